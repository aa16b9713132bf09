"""Parse the header of a safetensors file, tensors and metadata, within limits (`open_header`, `read`).

Accepted is what the reference parser accepts (safetensors 0.8), with exceptions that are refused: an entry or a field
given twice, fields that are not known.

Metadata is text by text. If an entry has the name of a tensor, MindSpore takes its text for the tensor's type, and
fails if it is none. So such an entry is written only to give a type.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import START_BYTES
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.safetensors.json_reader import Json, JsonReader, as_numbers, as_object, shown
from reshard_mpi.formats.structure import MAX_NAME_BYTES, kept_bytes
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
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
    is_storable = 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    return is_storable and name not in _RESERVED and not name.startswith((STRING_PREFIX, _OF_ONE_FILE))


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
        raise structure.other_kind(start, path, "a safetensors file") or ShardError(
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


# Behind this `seal` adds the checksum of a file to its metadata, and takes as many spaces from the end.
START = f'{{"{METADATA}":{{'.encode()


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

_MAX_PAYLOAD_BYTES = 1 << 63
# Of an entry as it is written; real ones have some hundred bytes.
_MAX_ENTRY_BYTES = 64 << 10
# One for each tensor, if all are of MindSpore's Int4.
_MAX_METADATA = structure.MAX_TENSORS + 1024
_FIELDS = {"dtype", "shape", "data_offsets"}
# An entry as all writers write it, with the comma before it: its name, its kind, and its offsets.
_USUAL_ENTRY = re.compile(
    r',"([^"\\\x00-\x1f]++)":\{"dtype":"([A-Z0-9_]++","shape":\[[0-9,]*+)\]'
    r',"data_offsets":\[(0|[1-9][0-9]{0,17}+),(0|[1-9][0-9]{0,17}+)\]\}(?=[,}])'
)
# The number and size of a kind that is not known yet: no tensor has such a size.
_NO_KIND: tuple[int, int | None] = -1, None
# Of a string as it is written: it takes up to twelve times as much memory while it is read.
MAX_STRING_BYTES = structure.MAX_STRING_BYTES // 2


class HeaderContents(NamedTuple):
    """The contents of a header: tensors and metadata."""

    tensors: TensorTable
    strings: dict[str, str]
    crc: str | None  # its entry `crc_num`, if it has one
    # lacks_others, left_out: see `Manifest`
    lacks_others: bool
    left_out: tuple[str, ...] = ()
    sharding: str | None = None  # its entry `SHARDING`, if there is one


def read(file: SourceFile) -> HeaderContents:
    """Read the header of a file. Raises ShardError as `locate` does."""
    return _HeaderReading(open_header(file), file.size_bytes).contents()


class _HeaderReading:
    """The tensors and strings of one file while they are read."""

    def __init__(self, header: JsonReader, size_bytes: int) -> None:
        self._header = header
        self._data_bytes = size_bytes - header.end
        self._tensors = TensorTable(header.path)
        self._ends = array("q")
        # Kinds by type and lengths: their numbers, and the size of a tensor.
        self._kinds: dict[tuple[str | int, ...], tuple[int, int]] = {}
        self._kinds_as_written: dict[str, tuple[int, int]] = {}  # the same, by their text in `_USUAL_ENTRY`
        self._strings: dict[str, str] = {}
        self._plain = PlainStrings()
        self._int4: dict[str, None] = {}
        self._crc: str | None = None
        self._lacks_others = False
        self._sharding: str | None = None
        self._has_metadata = False
        self._kept_bytes = 0

    def contents(self) -> HeaderContents:
        """Read all of the header."""
        for name in self._header.members():
            if name == METADATA:
                self._take_metadata()
            else:
                self._add_entry(name, self._header.value(_MAX_ENTRY_BYTES))
                self._add_alike()
        self._header.require_end()
        self._require_tiles()
        self._mark_int4()
        plain, left_out = self._plain.kept(self._tensors, self._strings)
        strings = plain | self._strings
        return HeaderContents(self._tensors, strings, self._crc, self._lacks_others, left_out, self._sharding)

    def _add_alike(self) -> None:
        """Add the tensors that come next and are of known kinds, up to an entry that is unusual, or has any flaw.

        Nearly all tensors are such. To read their entries as JSON takes three times as long.
        """
        names, kinds = self._tensors.index_by_name, self._kinds_as_written
        data_bytes, base = self._data_bytes, self._header.end
        add_kind, add_start, add_end = self._tensors.kind_ids.append, self._tensors.offsets.append, self._ends.append
        memory_of = structure.kept_bytes
        for entry in self._header.matches(_USUAL_ENTRY):
            name, kind, begin_text, end_text = entry.groups()
            begin, end, (number, size_bytes) = int(begin_text), int(end_text), kinds.get(kind, _NO_KIND)
            kept_bytes = self._kept_bytes + memory_of(name)
            if (
                end - begin != size_bytes
                or end > data_bytes
                or name in names
                or name == METADATA
                or len(name) > MAX_NAME_BYTES // 4
                or len(names) == structure.MAX_TENSORS
                or kept_bytes > structure.MAX_KEPT_BYTES
            ):
                break
            self._kept_bytes = kept_bytes
            names[sys.intern(name)] = len(names)
            add_kind(number)
            add_start(base + begin)
            add_end(base + end)

    def _add_entry(self, name: str, entry: Json) -> None:
        """Add the tensor that an entry describes."""
        fields = as_object(entry)
        if fields is None or fields.keys() != _FIELDS:
            raise self._damaged(name, entry, "an object of dtype, shape and data_offsets, each once, and nothing else")
        dtype, dims, offsets = fields["dtype"], as_numbers(fields["shape"]), as_numbers(fields["data_offsets"])
        if type(dtype) is not str or dims is None or offsets is None or len(offsets) != 2:
            raise self._damaged(
                name,
                entry,
                f"the name of a type, up to {structure.MAX_DIMENSIONS} lengths and two offsets, each a whole number, 0"
                " or more, of 64 bits",
            )
        kind = self._kinds.get((dtype, *dims)) or self._kind(name, dtype, dims)
        self._add(name, kind, *offsets)

    def _damaged(self, name: str, entry: Json, expected: str) -> ShardError:
        return self._header.damage(f"the entry of {shown(name)} is damaged", expected=expected, got=shown(entry))

    def _kind(self, name: str, tag: str, dims: tuple[int, ...]) -> tuple[int, int]:
        """Add the kind of the tensor `name`; return its number, and the size of such a tensor."""
        dtype = BY_TAG.get(tag)
        if dtype is None:
            raise self._header.damage(
                f"{name!r} has a type that is not known",
                expected=", ".join(BY_TAG),
                got=shown(tag),
                remedy="save this tensor in another type, or the file without it",
            )
        if dtype.itemsize_bytes * math.prod(length for length in dims if length) >= _MAX_PAYLOAD_BYTES:
            raise self._header.damage(f"the shape of {name!r} is impossibly large", got=str(list(dims)))
        kind = TensorType(dtype, dims)
        number = self._tensors.kind(kind)
        self._keep(structure.kept_kind_bytes(len(dims)))
        known = self._kinds[tag, *dims] = number, kind.size_bytes
        self._kinds_as_written[f'{tag}","shape":[{",".join(map(str, dims))}'] = known
        return known

    def _add(self, name: str, kind: tuple[int, int], begin: int, end: int) -> None:
        number, size_bytes = kind
        names = self._tensors.index_by_name
        if name in names:
            raise self._header.damage(f"the name {name!r} appears twice in a shard", expected="each tensor once")
        if not name or (len(name) > structure.MAX_NAME_BYTES // 4 and len(name.encode()) > structure.MAX_NAME_BYTES):
            raise self._header.damage(
                "a tensor's name has an impossible length", expected=f"1 to {structure.MAX_NAME_BYTES} bytes"
            )
        if not begin <= end <= self._data_bytes or end - begin != size_bytes:
            raise self._wrong_range(name, number, begin, end)
        if len(names) == structure.MAX_TENSORS:
            raise self._header.damage("a shard holds too many tensors", expected=f"{structure.MAX_TENSORS} at most")
        self._keep(structure.kept_bytes(name))
        self._tensors.add(sys.intern(name), number, self._header.end + begin)
        self._ends.append(self._header.end + end)

    def _wrong_range(self, name: str, kind: int, begin: int, end: int) -> ShardError:
        if begin <= end and end > self._data_bytes:
            return self._header.damage(
                f"a shard ends before the end of {name!r}: it is truncated, or damaged",
                expected=f"{self._header.end + end} bytes at least",
                got=f"{self._header.end + self._data_bytes} bytes in all",
            )
        dtype, dims, *_ = self._tensors.kinds[kind]
        return self._header.damage(
            f"the range of {name!r} does not fit its shape",
            expected=f"{self._tensors.kinds[kind].size_bytes} bytes ({dtype} {list(dims)})",
            got=f"from {begin} to {end}",
        )

    def _keep(self, size_bytes: int) -> None:
        self._kept_bytes += size_bytes
        if self._kept_bytes > structure.MAX_KEPT_BYTES:
            raise self._header.damage(
                "a shard's names take too much memory", expected=f"{structure.MAX_KEPT_BYTES} bytes at most"
            )

    def _take_metadata(self) -> None:
        if self._has_metadata:
            raise self._header.damage("a shard has metadata twice", expected="it once")
        self._has_metadata = True
        for count, key in enumerate(self._header.members()):
            if count == _MAX_METADATA:
                raise self._header.damage(
                    "the metadata of a shard is too long", expected=f"{_MAX_METADATA} entries at most"
                )
            is_long = key == SHARDING or key.startswith(STRING_PREFIX)
            self._add_metadata(key, self._header.text(MAX_STRING_BYTES if is_long else MAX_PLAIN_BYTES // 4))

    def _add_metadata(self, key: str, text: str | None) -> None:
        """Keep what an entry of the metadata says. text: None if it is too long to say anything."""
        name = key.removeprefix(STRING_PREFIX)
        once = {CRC: self._crc, SHARDING: self._sharding}
        if once.get(key) is not None or key in self._int4 or (key != name and name in self._strings):
            raise self._header.damage(f"the metadata of a shard says {key!r} twice", expected="it once")
        if key == REMOVED:
            self._lacks_others = text == "True"
        if key == CRC:
            self._crc = text if text is not None else "too long"
        elif key == SHARDING:
            if text is None:
                raise self._header.damage(f"{key} is too long", expected=f"{MAX_STRING_BYTES} bytes at most")
            self._sharding = text
        elif key != name:
            if text is None or not name:
                raise self._header.damage(
                    f"the string {name!r} is damaged or too long", expected=f"{MAX_STRING_BYTES} bytes at most"
                )
            self._keep(structure.kept_bytes(name) + structure.kept_bytes(text))
            self._strings[name] = text
        elif text == INT4_TAG:
            self._keep(structure.kept_bytes(key))
            self._int4[sys.intern(key)] = None
        elif key not in (FORMAT, REMOVED):  # these are about the file that they stand in: nothing is lost
            self._plain.add(key, text)

    def _mark_int4(self) -> None:
        """Give tensors that the metadata marks as MindSpore's Int4 their type."""
        tensors = self._tensors
        for name in self._int4:
            number = tensors.index_by_name.get(name)
            if number is None:
                continue  # the metadata of another file
            kind = tensors.kinds[tensors.kind_ids[number]]
            if BY_TAG["I8"] != kind.dtype:
                raise self._header.damage(
                    f"the metadata says that {name!r} is {INT4_TAG}", expected="I8", got=str(kind.dtype)
                )
            tensors.kind_ids[number] = tensors.kind(kind._replace(dtype=INT4))

    def _require_tiles(self) -> None:
        """Raise ShardError unless every byte behind the header belongs to exactly one tensor."""
        starts, ends = self._tensors.offsets, self._ends
        order: Sequence[int] = range(len(starts))
        if any(starts[offset] != ends[offset - 1] for offset in order[1:]):
            order = sorted(order, key=lambda offset: (starts[offset], ends[offset]))
        names = list(self._tensors)
        last, before = self._header.end, "the header"
        for number in order:
            if starts[number] != last:
                raise self._header.damage(
                    f"{names[number]!r} {'overlaps with' if starts[number] < last else 'does not follow'} {before}",
                    expected=f"its first byte at {last}, where {before} ends",
                    got=str(starts[number]),
                )
            last, before = ends[number], repr(names[number])
        size_bytes = self._header.end + self._data_bytes
        if last != size_bytes:
            raise self._header.damage(
                "a shard goes on behind its last tensor",
                expected=f"its end at byte {last}",
                got=f"{size_bytes - last} bytes more",
            )
