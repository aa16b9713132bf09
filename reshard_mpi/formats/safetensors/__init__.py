"""Read and write safetensors files, as MindSpore 2.10 writes them and all other sound ones.

A file is the length of a header (8 bytes, little-endian), the header, and the payloads: row-major, little-endian, one
after another without a byte between them. The header is JSON:

    {"__metadata__": {KEY: TEXT, ...}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

with offsets counted from its end. MindSpore puts `format` (`ms`), `crc_num` and, for a tensor of Int4, the name of that
into the metadata (see `file_header`). A file of the same tensors is always written alike.

That a file may hold slices is told by its name, or by torch's metadata in it (`part_of`), and by nothing else. So no
such file is taken for a checkpoint by itself.

The header that is written lists tensors in the order in which they lie in the file, which MindSpore's own parser wants,
and the reference parser wants no byte between them. So places follow from the order alone: first tensors whose size is
a multiple of 4096, then the others by falling size of their elements. Then

- where a shard has a tensor of 64 KiB or more, its data begins at a multiple of 4096, and so does every tensor whose
  size is one: file systems can share their blocks with other files of this kind;
- every tensor begins at a multiple of its element's size.

`crc_num` is the decimal CRC-32 of all names, sorted, each followed by its tensor's bytes (or what it counts as, see
`formats.manifest`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ChecksumError, ShardError, TargetError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import (
    HeaderDigest,
    Manifest,
    NotChecksummableError,
    ShardSpec,
    Specs,
    counted_bytes,
    is_in_crc,
)
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.safetensors.file_header import (
    CRC,
    FORMAT,
    INT4_TAG,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_STRING_BYTES,
    MAX_WRITTEN_PLAIN_BYTES,
    METADATA,
    MINDSPORE,
    START,
    STRING_PREFIX,
    TAG_OF,
    is_plain,
    read,
)
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.text import MIB

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
        manifest = Manifest(path, NAME, contents.tensors, contents.strings, header_digest=digest_of_file(file))
    part = part_of(path, contents.sharding)
    return manifest._replace(left_out=contents.left_out, lacks_others=contents.lacks_others, part_of=part)


def read_back(meant: Manifest) -> None:
    """Read the header of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate(meant.path), meant)


BLOCK_BYTES = 4096
_ALIGNED_FROM_BYTES = 64 << 10
_SMALL_ALIGNMENT_BYTES = 8
# Spaces at the end of a header, which `seal` replaces by a checksum: `"crc_num":"4294967295",`.
CRC_ROOM_BYTES = len(CRC) + 16
# The longest name, escaped, is six times as long; a type, and two offsets.
_ENTRY_BYTES = 128


class FileLayout(NamedTuple):
    """A file that is to be written: its header with the length before it, and where which tensor begins."""

    header: bytes
    order: Sequence[int]  # the numbers of the spec's tensors in file order
    starts: Sequence[int]  # the byte of the file at which each of these begins
    size_bytes: int


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without its payloads. fd: the empty file.

    Raises TargetError for types and names that it cannot hold, OSError if it cannot be written.
    """
    return reserve_as(fd, path, spec, NAME, _metadata(spec))


def reserve_as(fd: int, path: str, spec: ShardSpec, format_name: str, metadata: dict[str, str]) -> Manifest:
    """Write a file of the format called so, with this metadata, as `reserve` does."""
    structure.check_names(path, [*spec.specs.names, *spec.strings])
    layout = lay_out(spec.specs, metadata, path)
    structure.write_all(fd, layout.header, 0)
    os.ftruncate(fd, layout.size_bytes)
    specs, tensors = spec.specs, TensorTable(path)
    kinds = [tensors.kind(kind.unplaced) for kind in specs.kinds]
    for number, start in zip(layout.order, layout.starts):
        tensors.add(specs.names[number], kinds[specs.kind_ids[number]], start)
    text = layout.header[LENGTH_BYTES:]
    header_digest = digest_of_header(len(text), (text,), layout.size_bytes)
    return Manifest(path, format_name, tensors, dict(spec.strings), header_digest=header_digest)


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for contents or `crc` that it does not
    support.
    """
    if crc:
        _require_summable(spec.specs)
    return lay_out(spec.specs, _metadata(spec), "").size_bytes


def lay_out(specs: Specs, metadata: dict[str, str], path: str) -> FileLayout:
    """Return the layout of a file of these tensors. Raises TargetError, which names `path`, for unsupported
    contents.
    """
    require_types(specs, path)
    sizes = [kind.size_bytes for kind in specs.kinds]
    ranks = [(size % BLOCK_BYTES != 0 or not size, -own.dtype.itemsize_bytes) for size, own in zip(sizes, specs.kinds)]
    order = sorted(range(len(specs)), key=lambda number: ranks[specs.kind_ids[number]])
    alignment = BLOCK_BYTES if max(sizes, default=0) >= _ALIGNED_FROM_BYTES else _SMALL_ALIGNMENT_BYTES
    text = "".join(_entries(specs, order, metadata, path))
    try:
        header = text.encode()
    except UnicodeEncodeError as error:
        raise TargetError(
            "a name or string is no Unicode text",
            got=str(error),
            where=path,
            remedy="rename or leave out the tensor (--map, --exclude), or save the checkpoint without the string",
        ) from None
    length_bytes = -(-(LENGTH_BYTES + len(header) + CRC_ROOM_BYTES) // alignment) * alignment - LENGTH_BYTES
    if length_bytes > MAX_HEADER_BYTES:
        raise TargetError(
            "a shard's names are too long for a safetensors file",
            expected=f"a header of {MAX_HEADER_BYTES} bytes at most",
            got=f"{length_bytes} bytes",
            where=path,
            remedy="write it as ckpt or hdf5 (--to)",
        )
    offset, starts = LENGTH_BYTES + length_bytes, []
    for number in order:
        starts.append(offset)
        offset += sizes[specs.kind_ids[number]]
    return FileLayout(length_bytes.to_bytes(LENGTH_BYTES, "little") + header.ljust(length_bytes), order, starts, offset)


def require_types(specs: Specs, path: str) -> None:
    """Raise TargetError for the first tensor of a type that safetensors has not."""
    for number, kind in enumerate(specs.kinds):
        if kind.dtype.name not in TAG_OF:
            raise TargetError(
                f"{_first(specs, number)!r} has a type that safetensors files cannot hold",
                expected=", ".join(TAG_OF),
                got=kind.dtype.name,
                where=path,
                remedy="write it as ckpt or hdf5 (--to), or leave it out",
            )


def _require_summable(specs: Specs) -> None:
    """Raise TargetError for the first tensor that MindSpore's checksum is not defined for, or that has its name."""
    _require_apart(specs.names, {CRC: ""}, "")
    for number, kind in enumerate(specs.kinds):
        if kind.dtype.name == "bfloat16":
            raise TargetError(
                f"{_first(specs, number)!r} has a type that MindSpore cannot check in a safetensors file",
                expected=f"no {kind.dtype.name}, where a checksum is asked for",
                got=kind.dtype.name,
                remedy="leave out --crc, or write it as ckpt (--to)",
            )


def _first(specs: Specs, kind: int) -> str:
    """Return the name of the first tensor of a kind."""
    return next((name for name, own in zip(specs.names, specs.kind_ids) if own == kind), "")


def _metadata(spec: ShardSpec) -> dict[str, str]:
    """Return what goes into the metadata besides types; nothing is called as a tensor.

    Raises TargetError for a string that would not be read back.
    """
    names = set(spec.specs.names)
    for name, text in spec.strings.items():
        size_bytes = len(encode_basestring(text).encode(errors="replace"))
        if size_bytes > MAX_STRING_BYTES:
            raise TargetError(
                f"the string {name!r} is too long for a safetensors file",
                expected=f"{MAX_STRING_BYTES} bytes at most, as JSON",
                got=f"{size_bytes} bytes",
                remedy="save the checkpoint with a shorter one, or write it in another format (--to)",
            )
    entries, plain_bytes = {} if FORMAT in names else {FORMAT: MINDSPORE}, 0
    for name, text in spec.strings.items():
        plain_bytes += structure.kept_bytes(name) + structure.kept_bytes(text)
        has_own_name = plain_bytes <= MAX_WRITTEN_PLAIN_BYTES and is_plain(name) and text != INT4_TAG
        entries[name if has_own_name else STRING_PREFIX + name] = text
    return entries


def _entries(specs: Specs, order: Sequence[int], metadata: dict[str, str], path: str) -> Iterator[str]:
    """Yield the parts of a header."""
    names, kind_of = specs.names, specs.kind_ids
    int4 = {number for number, kind in enumerate(specs.kinds) if kind.dtype.name == "int4"}
    tags = {names[offset]: INT4_TAG for offset in order if kind_of[offset] in int4} if int4 else {}
    _require_apart(names, metadata, path)
    entries = (f"{encode_basestring(key)}:{encode_basestring(text)}" for key, text in (metadata | tags).items())
    yield f"{START.decode()}{','.join(entries)}}}"
    kinds = [(_around(kind), kind.size_bytes) for kind in specs.kinds]
    offset = 0
    for number in order:
        around, size_bytes = kinds[kind_of[number]]
        yield f",{encode_basestring(names[number])}{around}[{offset},{offset + size_bytes}]}}"
        offset += size_bytes
    yield "}"


def _around(kind: TensorType) -> str:
    dims = ",".join(map(str, kind.shape))
    return f':{{"dtype":"{TAG_OF[kind.dtype.name]}","shape":[{dims}],"data_offsets":'


def _require_apart(names: Sequence[str], metadata: dict[str, str], path: str) -> None:
    """Raise TargetError for a tensor that is called as an entry of the header, or of its metadata."""
    for name in names:
        if name == METADATA or name in metadata:
            raise TargetError(
                f"a tensor cannot be called {name!r} in a safetensors file",
                expected="another name",
                got="one that the header has for something else",
                where=path,
                remedy="write it as ckpt or hdf5 (--to)",
            )


_ZEROS_BYTES = 2 * MIB


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Finish a file. crc: add `crc_num`, the checksum that MindSpore knows.

    There is no place in it for the sums of tensors. Raises TargetError if it holds what MindSpore cannot sum.
    """
    if crc:
        add_crc(fd, path)


def add_crc(fd: int, path: str) -> None:
    """Add the checksum to the metadata, in the place of spaces at the end of the header."""
    file = SourceFile(path, fd)
    try:
        entry = f'"{CRC}":"{_sum(file, read(file).tensors)}"'.encode()
    except NotChecksummableError as error:
        raise error.refusal(path) from None
    length_bytes = int.from_bytes(file.read_exactly(0, LENGTH_BYTES), "little")
    header = file.read_exactly(LENGTH_BYTES, length_bytes)
    entry += b"" if header.startswith(b"}", len(START)) else b","
    patched = START + entry + header[len(START) :]
    if len(patched.rstrip(b" ")) > length_bytes:
        raise RuntimeError("a header has no room for a checksum")
    structure.write_all(fd, patched[:length_bytes], LENGTH_BYTES)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether the file at `path` has a checksum. Raises ChecksumError if it does not fit names and contents."""
    with structure.opened(path) as file:
        contents = read(file)
        if contents.crc is None:
            return False
        try:
            actual = str(_sum(file, contents.tensors, on_bytes))
        except NotChecksummableError as error:
            actual = f"none that can be: {error.name!r} is {error.value}"
        if actual != contents.crc.strip(" "):
            raise ChecksumError(
                "a checkpoint does not fit its own checksum: it is damaged, or has that of another file",
                expected=f"CRC-32 {contents.crc!r}, as its {CRC} says",
                got=actual,
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True


def _sum(file: SourceFile, tensors: TensorTable, on_bytes: OnBytes = uncounted) -> int:
    """Return the checksum of all tensors. Raises NotChecksummableError if there is none, ShardError if the file is cut.

    Args:
        on_bytes: told how many bytes have just been read.
    """
    from zlib_ng.zlib_ng import crc32

    crc, zeros = 0, bytes(_ZEROS_BYTES)
    for name in sorted(tensors):
        crc = crc32(name.encode(), crc)
        kind, start = tensors.kind_named(name), tensors.offsets[tensors.index_by_name[name]]
        if is_in_crc(kind.dtype, kind.shape):
            left = counted_bytes(name, file.read_exactly(start, kind.size_bytes), kind.dtype)
            while left:
                part = min(left, len(zeros))
                crc = crc32(zeros[:part], crc)
                left -= part
        else:
            crc = structure.crc32_of(file, (start, start + kind.size_bytes), crc, on_bytes)
    return crc
