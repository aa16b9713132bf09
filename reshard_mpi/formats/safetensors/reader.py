"""Parse the header of a safetensors file, and locate its tensors (`locate`).

Nothing else tells that what they hold may be slices. So no such file is taken for a checkpoint by itself.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.stores import SourceFile
from reshard_mpi.formats import files
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.safetensors import metadata
from reshard_mpi.formats.safetensors.json_reader import Json, JsonReader, as_numbers, as_object, shown
from reshard_mpi.formats.safetensors.metadata import (
    BY_TAG,
    CRC,
    INT4,
    INT4_TAG,
    MAX_PLAIN_BYTES,
    METADATA,
    REMOVED,
    SHARDING,
    STRING_PREFIX,
    PlainStrings,
    is_of_this_file,
    open_header,
)
from reshard_mpi.formats.tensor_table import TensorTable, TensorType

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


NAME = "safetensors"
_MAX_PAYLOAD_BYTES = 1 << 63
# Of an entry as it is written; real ones have some hundred bytes.
_MAX_ENTRY_BYTES = 64 << 10
# One for each tensor, if all are of MindSpore's Int4.
_MAX_METADATA = files.MAX_TENSORS + 1024
_FIELDS = {"dtype", "shape", "data_offsets"}
# Of a string as it is written: it takes up to twelve times as much memory while it is read.
MAX_STRING_BYTES = files.MAX_STRING_BYTES // 2


class HeaderContents(NamedTuple):
    """The contents of a header: tensors and metadata."""

    tensors: TensorTable
    strings: dict[str, str]
    crc: str | None  # its entry `crc_num`, if it has one
    # lacks_others, left_out: see `Manifest`
    lacks_others: bool
    left_out: tuple[str, ...] = ()
    sharding: str | None = None  # its entry `SHARDING`, if there is one


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors and strings of the file at `path` without reading any payload.

    Args:
        like: another shard; one with the same header has its tensors at the same places.

    Raises ShardError if the file is empty, truncated, over-long or damaged, holds a name twice, or a tensor whose range
    is not as long as its shape and type say, or shared with another; or if bytes belong to no tensor.
    """
    with files.opened(path) as file:
        if like is not None and like.header_digest is not None and metadata.of_file(file) == like.header_digest:
            return like.at(path)._replace(part_of=like.part_of or part_of(path, None))
        contents = read(file)
        header_digest = metadata.of_file(file)
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
    files.require_as_written(locate(meant.path), meant)


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
        self._header.require_end()
        self._require_tiles()
        self._mark_int4()
        plain, left_out = self._plain.kept(self._tensors, self._strings)
        return HeaderContents(
            self._tensors, plain | self._strings, self._crc, self._lacks_others, left_out, self._sharding
        )

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
                f"the name of a type, up to {files.MAX_DIMENSIONS} lengths and two offsets, each a whole number, 0 or"
                " more, of 64 bits",
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
        self._keep(files.kept_kind_bytes(len(dims)))
        self._kinds[tag, *dims] = number, kind.size_bytes
        return number, kind.size_bytes

    def _add(self, name: str, kind: tuple[int, int], begin: int, end: int) -> None:
        number, size_bytes = kind
        names = self._tensors.index_by_name
        if name in names:
            raise self._header.damage(f"the name {name!r} appears twice in a shard", expected="each tensor once")
        if not name or (len(name) > files.MAX_NAME_BYTES // 4 and len(name.encode()) > files.MAX_NAME_BYTES):
            raise self._header.damage(
                "a tensor's name has an impossible length", expected=f"1 to {files.MAX_NAME_BYTES} bytes"
            )
        if not begin <= end <= self._data_bytes or end - begin != size_bytes:
            raise self._wrong_range(name, number, begin, end)
        if len(names) == files.MAX_TENSORS:
            raise self._header.damage("a shard holds too many tensors", expected=f"{files.MAX_TENSORS} at most")
        self._keep(files.kept_bytes(name))
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
        if self._kept_bytes > files.MAX_KEPT_BYTES:
            raise self._header.damage(
                "a shard's names take too much memory", expected=f"{files.MAX_KEPT_BYTES} bytes at most"
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
            self._keep(files.kept_bytes(name) + files.kept_bytes(text))
            self._strings[name] = text
        elif text == INT4_TAG:
            self._keep(files.kept_bytes(key))
            self._int4[sys.intern(key)] = None
        elif not is_of_this_file(key):
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
