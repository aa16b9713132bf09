"""Define the metadata of a safetensors header, check its length and digest it (`open_header`, `of_file`).

Accepted is what the reference parser accepts (safetensors 0.8), with exceptions that are refused: an entry or a field
given twice, fields that are not known.

Metadata is text by text. If an entry has the name of a tensor, MindSpore takes its text for the tensor's type, and
fails if it is none. So such an entry is written only to give a type.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Iterator

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import START_BYTES
from reshard_mpi.filesystem.stores import SourceFile
from reshard_mpi.formats import files
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.files import MAX_NAME_BYTES, kept_bytes
from reshard_mpi.formats.manifest import NEST, HeaderDigest
from reshard_mpi.formats.safetensors.json_reader import JsonReader
from reshard_mpi.text import MIB

METADATA = "__metadata__"
# Who wrote the file. MindSpore and transformers look at it.
FORMAT, MINDSPORE, TORCH = "format", "ms", "pt"
# The decimal CRC-32 of names and contents that `save_checkpoint(crc_check=True)` adds.
CRC = "crc_num"
# In an entry with the name of a tensor: one value a byte, stored as I8.
INT4_TAG = "Int4"
# "True" where what several ranks hold is in the file of one of them.
REMOVED = "remove_redundancy"
# In files of torch's distributed checkpoints: where each tensor lies in the whole one, as JSON (see `torch_dcp`).
SHARDING = "DCP_SHARDING_INFO"
# A string of a shard that cannot stand there by its own name, behind this prefix. Any other entry is a string, too.
STRING_PREFIX = "__reshard_mpi__:"
# What torch says here of the parts of tensors in a file holds for no other file.
_OF_ONE_FILE = "DCP_"
_RESERVED = frozenset((METADATA, FORMAT, CRC, REMOVED, NEST))
# Of all strings that stand under their own names, so that no foreign file fills the memory; longer ones of this
# program's are written behind the prefix.
MAX_PLAIN_BYTES, MAX_WRITTEN_PLAIN_BYTES = 4 * MIB, MIB // 2
# Entries named that are not kept, and characters shown of each.
_MAX_LEFT_OUT, _MAX_SHOWN = 64, 100


def is_plain(name: str) -> bool:
    """Tell whether a string of this name is an entry of the same name."""
    return name not in _RESERVED and not name.startswith((STRING_PREFIX, _OF_ONE_FILE)) and is_storable(name)


def is_of_this_file(name: str) -> bool:
    """Tell whether an entry is about the file that it stands in, and nothing is lost if it is not kept."""
    return name in (FORMAT, CRC, REMOVED)


def is_storable(name: str) -> bool:
    """Tell whether shards may have a string of this name."""
    return 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES


class PlainStrings:
    """The strings of a file that stand in its metadata under their own names, while they are read."""

    def __init__(self) -> None:
        self._strings: dict[str, str] = {}
        self._left_out: dict[str, None] = {}
        self._kept_bytes = 0

    def add(self, name: str, text: str | None) -> None:
        """Add what an entry says; of entries of one name, the last counts. text: None if it is too long."""
        self._kept_bytes += kept_bytes(name) + (0 if text is None else kept_bytes(text))
        if text is None or self._kept_bytes > MAX_PLAIN_BYTES:
            self.leave_out(f"{name[:_MAX_SHOWN]!r}, which is too long, or follows others that are")
        elif is_plain(name):
            self._strings[name] = text
        else:
            self.leave_out(f"{name[:_MAX_SHOWN]!r}")

    def leave_out(self, what: str) -> None:
        """Say that an entry is not kept, unless that has been said of many."""
        if len(self._left_out) < _MAX_LEFT_OUT:
            self._left_out[f"of its metadata {what}"] = None

    def kept(self, tensors: Container[str], strings: Container[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the strings, and words on omissions: names that are taken by a tensor or another string."""
        for name in [name for name in self._strings if name in tensors or name in strings]:
            del self._strings[name]
            self.leave_out(f"{name[:_MAX_SHOWN]!r}, of which there are two")
        return self._strings, tuple(self._left_out)


# The reference's own limit.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8


def open_header(file: SourceFile) -> JsonReader:
    """Return the header of a file. Raises ShardError if it has none, or not all of one."""
    path, size_bytes = file.path, file.size_bytes
    start = file.read(0, START_BYTES)
    length_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
    begins = start[LENGTH_BYTES : LENGTH_BYTES + 1]
    if length_bytes < 2 or length_bytes > MAX_HEADER_BYTES or begins != b"{":
        raise files.other_kind(start, path, "a safetensors file") or ShardError(
            "a shard is not a safetensors file",
            expected=f"the length of a header, up to {MAX_HEADER_BYTES}, and a header that begins with '{{'",
            got=f"a length of {length_bytes}, then {begins!r}" if begins else f"{size_bytes} bytes",
            where=path,
            remedy="copy it again, or give it the ending of its format",
        )
    end = LENGTH_BYTES + length_bytes
    if end > size_bytes:
        raise ShardError(
            "a shard ends in the middle of its header: it is truncated",
            expected=f"{end} bytes at least",
            got=f"{size_bytes} bytes in all",
            where=path,
        )
    return JsonReader(file.read_exactly, path, LENGTH_BYTES, end, "the header of a shard")


# Behind this `writer.seal` adds the checksum of a file to its metadata, and takes as much from the spaces at the end.
START = f'{{"{METADATA}":{{'.encode()
_CRC = re.compile(rb'"%b":"[0-9 ]{0,20}",?' % CRC.encode())
_READ_BYTES = 1 << 20


def of_file(file: SourceFile) -> HeaderDigest | None:
    """Return the header digest of a file; None if it has no header, or cannot be read."""
    try:
        length_bytes = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
        if length_bytes > min(file.size_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
            return None
        return of_header(length_bytes, _chunks(file, length_bytes), file.size_bytes)
    except ShardError:
        return None


def of_header(length_bytes: int, chunks: Iterable[bytes], size_bytes: int) -> HeaderDigest:
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


_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
BY_TAG: dict[str, DType] = {tag: BY_NAME[name] for tag, name in _NAMES.items()}
# Int4, one value a byte, is MindSpore's: I8, and an entry in the metadata that says so.
TAG_OF: dict[str, str] = {name: tag for tag, name in _NAMES.items()} | {"int4": "I8"}
INT4 = BY_NAME["int4"]
