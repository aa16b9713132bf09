"""What the metadata of a checkpoint has very many of, read at once: keys and places of items, chunks, properties.

The pickler writes the attributes of these objects with the same opcodes every time, so one regular expression takes
them whole, and what has been met before is looked up by its bytes. A state that is written in any other way, as the
first of each class is, which spells its names, is left to the interpreter; both come to the same records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.formats.nest.trees import Global, Value
from reshard_mpi.formats.torch.pickles import ReadState, StateReader
from reshard_mpi.formats.torch.tensors import SIZE


class ItemKey(NamedTuple):
    """What an item of a file is: the name of a tensor or object, and where its chunk begins (None: an object)."""

    name: str
    offsets: tuple[int, ...] | None


class ItemPlace(NamedTuple):
    """The bytes of an item: the name of its file, where it begins there, and how long it is."""

    file: str
    offset_bytes: int
    length_bytes: int


class Chunk(NamedTuple):
    """A part of a tensor: its first element, and how long it is in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Properties(NamedTuple):
    """Of what type the elements of a tensor are: the name of a constant of torch."""

    dtype: Global


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ITEM_KEY = Global(_METADATA, "MetadataIndex")
ITEM_PLACE = Global(_FILESYSTEM, "_StorageInfo")
CHUNK = Global(_METADATA, "ChunkStorageMetadata")
PROPERTIES = Global(_METADATA, "TensorProperties")

# What a memo has in the place of a dictionary of attributes, which nothing refers to again.
_STATE = Global("", "attributes")
# What such an object takes of memory besides the cost of its opcode.
_COST_BYTES = 64
# No shape and no file has larger numbers.
MAX_NUMBER = 1 << 62
# Metadata that is not hostile has few sorts of chunks, and few shapes.
_MAX_KNOWN = 4096

_GET = rb"(?:h.|j.{4})"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
_GET_NUMBERS = re.compile(_NUMBER, re.DOTALL)


def _patterns(put: bytes) -> tuple[re.Pattern[bytes], ...]:
    """Return what keys up to their name, keys from there on, places, chunks and properties are written as.

    put: the opcode that gives each object a number in the memo, or nothing.
    """
    n = _NUMBER
    tuples = rb"(?:\)|(?:%s\x85|%s%s\x86|%s%s%s\x87|\((?:%s){4,}t)%s)" % (n, n, n, n, n, n, n, put)
    size = rb"(%s(?:%s\x85%sR%s)?)" % (_GET, tuples, put, put)
    begin = rb"%s}%s\(" % (put, put)
    parts = (
        begin + rb"(%s)(?:(%s)|\x8c(.))" % (_GET, _GET),
        rb"(%s)(?:N|%s)(%s)(?:N|%s)ub" % (_GET, _NUMBER, _GET, size),
        begin + rb"(%s)(%s)(%s)(%s)(%s)(%s)(?:(%s)N)?ub" % (_GET, _GET, _GET, _NUMBER, _GET, _NUMBER, _GET),
        begin + rb"(%s)%s(%s)%sub" % (_GET, size, _GET, size),
        put + rb"\((%s)%s[\x88\x89]%s[\x88\x89]t%sb" % (_GET, _GET, _GET, put),
    )
    return tuple(re.compile(part, re.DOTALL) for part in parts)


class States:
    """Reads the states of one pickle."""

    def __init__(self) -> None:
        self._patterns: tuple[re.Pattern[bytes], ...] = ()
        self._put = 0
        self._gotten: dict[bytes, Value] = {}
        self._sizes: dict[bytes, tuple[tuple[int, ...], Sequence[Value]]] = {}
        self._known: dict[bytes, tuple[Value, Sequence[Value]]] = {}

    @property
    def readers(self) -> Mapping[Global, StateReader]:
        return {ITEM_KEY: self._key, ITEM_PLACE: self._place, CHUNK: self._chunk, PROPERTIES: self._properties}

    def _choose(self, data: bytes, at: int) -> None:
        """See whether this pickler gives each object a number."""
        self._put = int(data[at : at + 1] == b"\x94")
        self._patterns = _patterns(rb"\x94" * self._put)

    def _key(self, data: bytes, at: int, memo: Sequence[Value]) -> ReadState | None:
        if not self._patterns:
            self._choose(data, at)
        head = self._patterns[0].match(data, at)
        if head is None or self._get(head[1], memo) != "fqn":
            return None
        memoized: list[Value] = []
        end = head.end()
        if head[2] is not None:
            name = self._get(head[2], memo)
        else:
            text_end = end + head[3][0]
            name, end = _text(data[end:text_end]), text_end + self._put
            if data[text_end:end] != b"\x94" * self._put:
                return None
            memoized.append(name)
        tail = self._patterns[1].match(data, end)
        if tail is None or type(name) is not str:
            return None
        if self._get(tail[1], memo) != "index" or self._get(tail[2], memo) != "offset":
            return None
        offsets: tuple[int, ...] | None = None
        of_size: Sequence[Value] = ()
        if tail[3] is not None:
            size = self._size(tail[3], memo)
            if size is None:
                return None
            offsets, of_size = size
        key = ItemKey(name, offsets)
        return ReadState(key, tail.end(), self._memoized(key, *memoized, *of_size), _COST_BYTES)

    def _place(self, data: bytes, at: int, memo: Sequence[Value]) -> ReadState | None:
        found = self._patterns[2].match(data, at) if self._patterns else None
        if found is None:
            return None
        get = self._get
        if (get(found[1], memo), get(found[3], memo), get(found[5], memo)) != ("relative_path", "offset", "length"):
            return None
        if found[7] is not None and get(found[7], memo) != "transform_descriptors":
            return None
        file = get(found[2], memo)
        if type(file) is not str:
            return None
        place = ItemPlace(file, _number(found[4]), _number(found[6]))
        return ReadState(place, found.end(), self._memoized(place), _COST_BYTES)

    def _chunk(self, data: bytes, at: int, memo: Sequence[Value]) -> ReadState | None:
        if not self._patterns:
            self._choose(data, at)
        found = self._patterns[3].match(data, at)
        if found is None:
            return None
        known = self._known.get(found[0])
        if known is None:
            offsets, sizes = self._size(found[2], memo), self._size(found[4], memo)
            keys = self._get(found[1], memo), self._get(found[3], memo)
            if offsets is None or sizes is None or keys != ("offsets", "sizes"):
                return None
            chunk = Chunk(offsets[0], sizes[0])
            known = self._remember(found[0], chunk, self._memoized(chunk, *offsets[1], *sizes[1]))
        return ReadState(known[0], found.end(), known[1], _COST_BYTES)

    def _properties(self, data: bytes, at: int, memo: Sequence[Value]) -> ReadState | None:
        if not self._patterns:
            self._choose(data, at)
        found = self._patterns[4].match(data, at)
        if found is None:
            return None
        known = self._known.get(found[0])
        if known is None:
            dtype = self._get(found[1], memo)
            if type(dtype) is not Global:
                return None
            properties = Properties(dtype)
            known = self._remember(found[0], properties, [properties, _STATE] if self._put else [])
        return ReadState(known[0], found.end(), known[1], _COST_BYTES)

    def _memoized(self, made: Value, *further: Value) -> list[Value]:
        return [made, _STATE, *further] if self._put else []

    def _remember(self, content: bytes, made: Value, memoized: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        if len(self._known) < _MAX_KNOWN:
            self._known[content] = made, memoized
        return made, memoized

    def _get(self, content: bytes, memo: Sequence[Value]) -> Value:
        """Return the object whose number the memo is asked for."""
        found = self._gotten.get(content)
        if found is None:
            number = int.from_bytes(content[1:], "little")
            found = memo[number] if number < len(memo) else None
            if len(self._gotten) < _MAX_KNOWN:
                self._gotten[content] = found
        return found

    def _size(self, content: bytes, memo: Sequence[Value]) -> tuple[tuple[int, ...], Sequence[Value]] | None:
        """Return the numbers of a size, and what the memo takes while it is made; None if it is none."""
        known = self._sizes.get(content)
        if known is not None:
            return known
        get_bytes = 2 if content[0] == 0x68 else 5
        first = self._get(content[:get_bytes], memo)
        if len(content) == get_bytes:
            return (first, ()) if _is_size(first) else None
        if first != SIZE:
            return None
        numbers = tuple(map(_number, _GET_NUMBERS.findall(content, get_bytes)))
        if any(not 0 <= number < MAX_NUMBER for number in numbers):
            return None
        made = [numbers] if numbers else []
        known = numbers, [*made, (numbers,), numbers] if self._put else []
        if len(self._sizes) < _MAX_KNOWN:
            self._sizes[content] = known
        return known


def _is_size(value: Value) -> bool:
    return type(value) is tuple and all(type(number) is int and 0 <= number < MAX_NUMBER for number in value)


def _number(content: bytes) -> int:
    """Return the number that an opcode puts on the stack."""
    width = _WIDTHS.get(content[0])
    if width is None:
        return int.from_bytes(content[2:], "little", signed=True)
    return int.from_bytes(content[1:], "little", signed=width == 4)


def _text(content: bytes) -> str | None:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
