"""Locate the tensors of a safetensors file, digest its header, name its kind of checkpoint (`locate`, `part_of`).

Nothing else tells that what they hold may be slices. So no such file is taken for a checkpoint by itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import HeaderDigest, Manifest
from reshard_mpi.formats.safetensors.file_header import CRC, LENGTH_BYTES, MAX_HEADER_BYTES, START, read

# Its number from 0, and the number of all. MindFormers saves the model and the optimizer apart.
_OF_MINDFORMERS = re.compile(r".*-(?:model|opt)-(\d{7})-(\d{7})\.safetensors")
# What torch saves so holds whole tensors.
_OF_WHOLE_TENSORS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_BEHIND_THE_FIRST = re.compile(r'"saved_offsets": ?\[[0, ]*[1-9]')


def mindformers_count(name: str) -> int | None:
    """Return how many files like this one MindFormers has saved, by the name of one; None if it is not called so."""
    match = _OF_MINDFORMERS.fullmatch(name)
    return int(match[2]) if match else None


def part_of(path: str, sharding: str | None) -> str:
    """Return in words of what checkpoint a file is a part; empty if nothing says that it is one.

    Args:
        sharding: what it says of itself as a part of torch's distributed checkpoints.
    """
    name = Path(path).name
    if (mindformers_count(name) or 0) > 1:
        return "a MindFormers checkpoint"
    is_whole = _OF_WHOLE_TENSORS.fullmatch(name) and not _BEHIND_THE_FIRST.search(sharding or "")
    return "" if sharding is None or is_whole else "a distributed checkpoint of torch"


_CRC = re.compile(rb'"%b":"[0-9 ]{0,20}",?' % CRC.encode())
_READ_BYTES = 1 << 20


def digest_of_file(file: SourceFile) -> HeaderDigest | None:
    """Return the header digest of a file; None if it has no header, or cannot be read."""
    try:
        length_bytes = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
        if length_bytes > min(file.size_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
            return None
        return digest_of_header(length_bytes, _chunks(file, length_bytes), file.size_bytes)
    except ShardError:
        return None


def digest_of_header(length_bytes: int, chunks: Iterable[bytes], size_bytes: int) -> HeaderDigest:
    """Return the header digest of a file. chunks: its header, `length_bytes` long. size_bytes: of the whole file."""
    digest = hashlib.blake2b(length_bytes.to_bytes(LENGTH_BYTES, "little"))
    spaces = 0
    for number, chunk in enumerate(chunks):
        if number == 0:
            chunk = without_crc(chunk)
        text = chunk.rstrip(b" ")
        if text:
            digest.update(b" " * spaces)
            digest.update(text)
            spaces = 0
        spaces += len(chunk) - len(text)
    return HeaderDigest(size_bytes, digest.digest())


def without_crc(header: bytes) -> bytes:
    """Return a header, or the beginning of one, without a checksum that is the first of its metadata."""
    match = _CRC.match(header, len(START)) if header.startswith(START) else None
    return header[: match.start()] + header[match.end() :] if match else header


def _chunks(file: SourceFile, length_bytes: int) -> Iterator[bytes]:
    for index in range(0, length_bytes, _READ_BYTES):
        yield file.read_exactly(LENGTH_BYTES + index, min(_READ_BYTES, length_bytes - index))


NAME = "safetensors"


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors and strings of the file at `path` without reading any payload.

    Args:
        like: another shard; one with the same header has its tensors at the same places.

    Raises ShardError if the file is empty, truncated, over-long or damaged, holds a name twice, or a tensor whose range
    is not as long as its shape and type say, or shared with another; or if bytes belong to no tensor.
    """
    with structure.opened(path) as file:
        if like is not None and like.header_digest is not None and digest_of_file(file) == like.header_digest:
            return like.at(path)._replace(part_of=like.part_of or part_of(path, None))
        contents = read(file)
        header_digest = digest_of_file(file)
    return Manifest(
        path,
        NAME,
        contents.tensors,
        contents.strings,
        header_digest=header_digest,
        left_out=contents.left_out,
        lacks_others=contents.lacks_others,
        part_of=part_of(path, contents.sharding),
    )


def read_back(meant: Manifest) -> None:
    """Read the header of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate(meant.path), meant)
