"""Locate the tensors of a safetensors file (`locate`).

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
from reshard_mpi.formats import files
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.safetensors import header
from reshard_mpi.formats.safetensors.header import (
    BY_TAG,
    CRC,
    INT4,
    INT4_TAG,
    MAX_PLAIN_BYTES,
    METADATA,
    REMOVED,
    SHARDING,
    STRING_PREFIX,
    Header,
    PlainStrings,
    Usual,
    is_of_this_file,
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
_MAX_TYPE_BYTES = 64
# One for each tensor, if all are of MindSpore's Int4.
_MAX_METADATA = files.MAX_TENSORS + 1024
# Ways to write types and shapes that are remembered: real files have a few dozen.
_MAX_SPELLINGS = 2048
_FIELDS = ("dtype", "shape", "data_offsets")
# A character may be written with six bytes, those outside of the basic plane with twelve.
_ESCAPED = 6
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
    with files.opened(path) as (fd, size_bytes):
        if like is not None and like.header_digest is not None and header.of_file(fd, size_bytes) == like.header_digest:
            return like.at(path)._replace(part_of=like.part_of or part_of(path, None))
        contents = read(fd, path, size_bytes)
        header_digest = header.of_file(fd, size_bytes)
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


def read(fd: int, path: str, size_bytes: int) -> HeaderContents:
    """Read the header of a file of a given size. Raises ShardError as `locate` does."""
    return _HeaderReading(Header(fd, path, size_bytes), size_bytes).contents()


class _HeaderReading:
    """The tensors and strings of one file while they are read."""

    def __init__(self, header: Header, size_bytes: int) -> None:
        self._header = header
        self._data_bytes = size_bytes - header.end
        self._tensors = TensorTable(header.path)
        self._ends = array("q")
        self._kinds: dict[tuple[bytes, bytes], tuple[int, int]] = {}
        self._strings: dict[str, str] = {}
        self._plain = PlainStrings()
        self._int4: dict[str, int] = {}
        self._crc: str | None = None
        self._lacks_others = False
        self._sharding: str | None = None
        self._has_metadata = False
        self._kept_bytes = 0

    def contents(self) -> HeaderContents:
        """Read all of the header."""
        header = self._header
        header.require(b"{")
        if not header.take(b"}"):
            while True:
                while (usual := header.usual_entry()) is not None:
                    self._add_usual(usual)
                self._take_entry()
                if header.take(b"}"):
                    break
                header.require(b",")
        header.require_end()
        self._require_tiles()
        self._mark_int4()
        plain, left_out = self._plain.kept(self._tensors, self._strings)
        return HeaderContents(
            self._tensors, plain | self._strings, self._crc, self._lacks_others, left_out, self._sharding
        )

    def _add_usual(self, entry: Usual) -> None:
        """Add a tensor of the usual form; its kind is looked at once for all that are alike."""
        alike = self._kinds.get((entry.dtype, entry.shape))
        if alike is None:
            dims = tuple(int(length) for length in entry.shape.split(b",")) if entry.shape else ()
            alike = self._kind(entry.at, "a tensor", entry.dtype.decode(), dims)
            if len(self._kinds) < _MAX_SPELLINGS:
                self._kinds[entry.dtype, entry.shape] = alike
        try:
            name = entry.name.decode()
        except UnicodeDecodeError as error:
            raise self._header.damage("a tensor's name is not UTF-8", entry.at, got=str(error)) from None
        self._add(entry.at, name, alike, entry.begin, entry.end)

    def _take_entry(self) -> None:
        """Take one entry of the header, of whatever form: a tensor, or the metadata."""
        header = self._header
        header.next_is(b'"')
        offset = header.at
        name = header.text(_ESCAPED * files.MAX_NAME_BYTES)
        if name is None:
            raise self._header.damage(
                "a tensor's name is too long", offset, expected=f"{files.MAX_NAME_BYTES} bytes at most"
            )
        header.require(b":")
        if name == METADATA:
            self._take_metadata(offset)
            return
        fields = self._fields(offset, name)
        dtype, dims, offsets = (fields[field] for field in _FIELDS)
        assert isinstance(dtype, str) and isinstance(dims, tuple) and isinstance(offsets, tuple)
        if len(offsets) != 2:
            raise header.damage(
                f"{name!r} has no two offsets", offset, expected="the first byte and the one after the last"
            )
        self._add(offset, name, self._kind(offset, repr(name), dtype, dims), *offsets)

    def _fields(self, offset: int, name: str) -> dict[str, str | tuple[int, ...]]:
        header = self._header
        header.require(b"{")
        fields: dict[str, str | tuple[int, ...]] = {}
        while len(fields) < len(_FIELDS):
            if fields:
                header.require(b",")
            header.next_is(b'"')
            field_at = header.at
            field = header.text(_MAX_TYPE_BYTES)
            if field not in _FIELDS or field in fields:
                raise header.damage(
                    f"{name!r} has a field that is {'given twice' if field in fields else 'not known'}",
                    field_at,
                    expected=" and ".join(_FIELDS),
                    got=repr(field),
                )
            header.require(b":")
            if field == "dtype":
                dtype = header.text(_MAX_TYPE_BYTES)
                fields[field] = dtype if dtype is not None else "..."
            else:
                fields[field] = header.numbers(files.MAX_DIMENSIONS)
        if not header.take(b"}"):
            raise header.damage(f"{name!r} has more than {', '.join(_FIELDS)}", header.at, expected="no other fields")
        return fields

    def _kind(self, offset: int, called: str, dtype_tag: str, dims: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of a kind of tensors, and the size of one."""
        dtype = BY_TAG.get(dtype_tag)
        if dtype is None:
            raise self._header.damage(
                f"{called} has a type that is not known",
                offset,
                expected=", ".join(BY_TAG),
                got=repr(dtype_tag),
                remedy="save this tensor in another type, or the file without it",
            )
        if len(dims) > files.MAX_DIMENSIONS:
            raise self._header.damage(
                f"{called} has too many dimensions",
                offset,
                expected=f"{files.MAX_DIMENSIONS} at most",
                got=str(len(dims)),
            )
        if dtype.itemsize_bytes * math.prod(length for length in dims if length) >= _MAX_PAYLOAD_BYTES:
            raise self._header.damage(f"the shape of {called} is impossibly large", offset, got=str(list(dims)))
        kind = TensorType(dtype, dims)
        kinds_before = len(self._tensors.kinds)
        number = self._tensors.kind(kind)
        if number == kinds_before:
            self._keep(offset, files.kept_kind_bytes(len(dims)))
        return number, kind.size_bytes

    def _add(self, offset: int, name: str, kind: tuple[int, int], begin: int, end: int) -> None:
        number, size_bytes = kind
        if name in self._tensors:
            raise self._header.damage(
                f"the name {name!r} appears twice in a shard", offset, expected="each tensor once"
            )
        if not name or (len(name) > files.MAX_NAME_BYTES // 4 and len(name.encode()) > files.MAX_NAME_BYTES):
            raise self._header.damage(
                "a tensor's name has an impossible length", offset, expected=f"1 to {files.MAX_NAME_BYTES} bytes"
            )
        if not begin <= end <= self._data_bytes or end - begin != size_bytes:
            raise self._wrong_range(offset, name, number, begin, end)
        if len(self._tensors) == files.MAX_TENSORS:
            raise self._header.damage("a shard holds too many tensors", offset, expected=f"{files.MAX_TENSORS} at most")
        self._keep(offset, files.kept_bytes(name))
        self._tensors.add(sys.intern(name), number, self._header.end + begin)
        self._ends.append(self._header.end + end)

    def _wrong_range(self, offset: int, name: str, kind: int, begin: int, end: int) -> ShardError:
        if begin <= end and end > self._data_bytes:
            return self._header.damage(
                f"a shard ends before the end of {name!r}: it is truncated, or damaged",
                offset,
                expected=f"{self._header.end + end} bytes at least",
                got=f"{self._header.end + self._data_bytes} bytes in all",
                remedy="copy it again",
            )
        dtype, dims, *_ = self._tensors.kinds[kind]
        return self._header.damage(
            f"the range of {name!r} does not fit its shape",
            offset,
            expected=f"{self._tensors.kinds[kind].size_bytes} bytes ({dtype} {list(dims)})",
            got=f"from {begin} to {end}",
            remedy="the shard is damaged: save or copy it again",
        )

    def _keep(self, offset: int, size_bytes: int) -> None:
        self._kept_bytes += size_bytes
        if self._kept_bytes > files.MAX_KEPT_BYTES:
            raise self._header.damage(
                "a shard's names take too much memory", offset, expected=f"{files.MAX_KEPT_BYTES} bytes at most"
            )

    def _take_metadata(self, offset: int) -> None:
        """Take the metadata."""
        header = self._header
        if self._has_metadata:
            raise header.damage("a shard has metadata twice", offset, expected="it once")
        self._has_metadata = True
        for count, (key_at, key) in enumerate(header.members(_ESCAPED * (files.MAX_NAME_BYTES + len(STRING_PREFIX)))):
            if count == _MAX_METADATA:
                raise header.damage(
                    "the metadata of a shard is too long", key_at, expected=f"{_MAX_METADATA} entries at most"
                )
            is_long = key is not None and (key == SHARDING or key.startswith(STRING_PREFIX))
            text = header.text(MAX_STRING_BYTES if is_long else MAX_PLAIN_BYTES // 4)
            if key is None:
                self._plain.leave_out("an entry with a very long name")
            else:
                self._add_metadata(key_at, key, text)

    def _add_metadata(self, offset: int, key: str, text: str | None) -> None:
        """Keep what an entry says. text: None if it is too long to say anything."""
        name = key.removeprefix(STRING_PREFIX)
        once = {CRC: self._crc, SHARDING: self._sharding}
        if once.get(key) is not None or key in self._int4 or (key != name and name in self._strings):
            raise self._header.damage(f"the metadata of a shard says {key!r} twice", offset, expected="it once")
        if key == REMOVED:
            self._lacks_others = text == "True"
        if key == CRC:
            self._crc = text if text is not None else "too long"
        elif key == SHARDING:
            if text is None:
                raise self._header.damage(f"{key} is too long", offset, expected=f"{MAX_STRING_BYTES} bytes at most")
            self._sharding = text
        elif key != name:
            if text is None or not name:
                raise self._header.damage(
                    f"the string {name!r} is damaged or too long",
                    offset,
                    expected=f"{MAX_STRING_BYTES} bytes at most",
                )
            self._keep(offset, files.kept_bytes(name) + files.kept_bytes(text))
            self._strings[name] = text
        elif text == INT4_TAG:
            self._keep(offset, files.kept_bytes(key))
            self._int4[sys.intern(key)] = offset
        elif not is_of_this_file(key):
            self._plain.add(key, text)

    def _mark_int4(self) -> None:
        """Give tensors that the metadata marks as MindSpore's Int4 their type."""
        tensors = self._tensors
        for name, offset in self._int4.items():
            number = tensors.index_by_name.get(name)
            if number is None:
                continue  # the metadata of another file
            kind = tensors.kinds[tensors.kind_ids[number]]
            if BY_TAG["I8"] != kind.dtype:
                raise self._header.damage(
                    f"the metadata says that {name!r} is {INT4_TAG}", offset, expected="I8", got=str(kind.dtype)
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
                    starts[number],
                    expected=f"its first byte at {last}, where {before} ends",
                    got=str(starts[number]),
                    remedy="the shard is damaged: save or copy it again",
                )
            last, before = ends[number], repr(names[number])
        size_bytes = self._header.end + self._data_bytes
        if last != size_bytes:
            raise self._header.damage(
                "a shard goes on behind its last tensor",
                last,
                expected="its end",
                got=f"{size_bytes - last} bytes more",
                remedy="copy it again",
            )
