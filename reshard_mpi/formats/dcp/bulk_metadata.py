"""Read the chunks of DCP metadata many at a time (`States`).

The pickler writes the attributes of these objects with the same opcodes every time, so regular expressions take them
whole, and what has been met before is looked up by its bytes. What is written in any other way, as the first object of
each class is, which spells its names, is left to the interpreter; both come to the same (`metadata`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.formats.nest.nodes import Call, Dict, Global, Value
from reshard_mpi.formats.torch.pickle_hooks import ObjectReader, ReadObjects
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


class TensorFacts(NamedTuple):
    """A tensor: its type as a constant of torch, its shape, and its chunks."""

    dtype: Global
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
TENSOR = Global(METADATA, "TensorStorageMetadata")
PROPERTIES = Global(METADATA, "TensorProperties")
CHUNK = Global(METADATA, "ChunkStorageMetadata")
ITEM_KEY = Global(METADATA, "MetadataIndex")
ITEM_PLACE = Global(FILESYSTEM, "_StorageInfo")

# No shape and no file has larger numbers.
MAX_NUMBER = 1 << 62
# What a memo has in the place of a dictionary or list of attributes, which nothing refers to again.
_ATTRIBUTES = Global("", "attributes")
# What such an object takes of memory, its memo entries included.
_COST_BYTES = 200
# Metadata that is not hostile has few sorts of tensors and chunks, and few shapes.
_MAX_KNOWN, _MAX_ALIKE, _MAX_ALIKE_BYTES = 4096, 16, 4096
# Objects at a time, so that their memory can be checked.
_MOST_AT_ONCE = 4096

_GET = rb"(?:h.|j.{4})"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
_FIND_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_COUNTED = re.compile(rb"(\(?)((?:%s){1,64})([\x85-\x87t])" % _NUMBER, re.DOTALL)
# The beginning and end of a tuple of this length; longer ones as the last.
_ENDS = {1: (b"", b"\x85"), 2: (b"", b"\x86"), 3: (b"", b"\x87"), 4: (b"(", b"t")}
_MEMOIZE, _BINGET, _TUPLE1 = b"\x94", 0x68, 0x85
_SHORT_TEXT = 0x8C
_OF_CHUNKS = ("offsets", "sizes")
_OF_PLACES = ("relative_path", "offset", "length", "transform_descriptors")


_OF_ITEMS = ("fqn", "index", "offset", ITEM_PLACE, *_OF_PLACES, ITEM_KEY)


class _ItemGroups(NamedTuple):
    """Which groups of a pattern have what differs from item to item, and which have names of attributes and classes."""

    values: tuple[int, ...]
    names: tuple[int, ...]


_OF_FIRST = _ItemGroups((2, 5, 8, 10, 12), (1, 3, 4, 6, 7, 9, 11, 13))
_OF_FURTHER = _ItemGroups((3, 6, 9, 11, 13), (2, 4, 5, 7, 8, 10, 12, 14, 1))


class _OpcodePatterns(NamedTuple):
    """How a pickler writes these objects, each from behind the opcode that makes it."""

    item: re.Pattern[bytes]  # a key and its place
    # item_again, chunk_again: one that follows another
    item_again: re.Pattern[bytes]
    tensor: re.Pattern[bytes]  # up to its chunks
    chunk: re.Pattern[bytes]
    chunk_again: re.Pattern[bytes]


def _patterns(put: bytes) -> _OpcodePatterns:
    """Return the patterns. put: the opcode that gives each object a number in the memo, or nothing."""
    get, number = _GET, _NUMBER
    size = rb"(%s(?:(?:\)|\(?(?:%s){1,64}[\x85-\x87t]%s)\x85%sR%s)?)" % (get, number, put, put, put)
    begin, new = rb"%s}%s\(" % (put, put), rb"(%s)\)\x81" % get
    text = rb"(%s|\x8c.[ -~]{1,255}%s)" % (get, put) if put else b"(%s)" % get
    key = begin + rb"(%s)%s(%s)(?:N|%s)(%s)(?:N|%s)ub" % (get, text, get, number, get, size)
    place = new + begin + rb"(%s)%s(%s)(%s)(%s)(%s)(?:(%s)N)?ub" % (get, text, get, number, get, number, get)
    properties = rb"(?:%s%s\((%s)%s[\x88\x89]%s[\x88\x89]t%sb|(%s))" % (new, put, get, get, get, put, get)
    tensor = begin + rb"(%s)%s(%s)%s(%s)\]%s(\(?)" % (get, properties, get, size, get, put)
    chunk = begin + rb"(%s)%s(%s)%sub" % (get, size, get, size)
    parts = (key + place, new + key + place, tensor, chunk, rb"(?:%s%s|(%s))" % (new, chunk, get))
    return _OpcodePatterns(*(re.compile(part, re.DOTALL) for part in parts))


class _Size(NamedTuple):
    """A size, and its memo entries. numbers: None where there is none."""

    numbers: tuple[int, ...] | None
    memoized: Sequence[Value]


_NO_SIZE = _Size(None, ())


class _SeenTensor(NamedTuple):
    """A tensor met before: its bytes, its record, and its memo entries."""

    content: bytes
    facts: TensorFacts
    memoized: Sequence[Value]


class _Memory:
    """The memo of a pickle, and entries added while objects are read in bulk.

    Attributes:
        puts: the pickler gives each object a number.
    """

    def __init__(self, memo: Sequence[Value], *, puts: bool) -> None:
        self._memo = memo
        self._puts = puts
        self.added: list[Value] = []

    def get(self, content: bytes) -> Value:
        """Return the object that an opcode takes from the memo; None if there is none."""
        number = int.from_bytes(content[1:], "little")
        memoized = len(self._memo)
        if number < memoized:
            return self._memo[number]
        return self.added[number - memoized] if number < memoized + len(self.added) else None

    def put(self, *objects: Value) -> None:
        if self._puts:
            self.added += objects


class States:
    """Reads the objects of one pickle."""

    def __init__(self) -> None:
        self._puts = False
        self._known_patterns: _OpcodePatterns | None = None
        self._sizes: dict[bytes, _Size] = {}
        self._chunks: dict[bytes, tuple[Chunk, Sequence[Value]]] = {}
        self._tensors: dict[bytes, list[_SeenTensor]] = {}
        self._spelled: set[tuple[bytes | None, ...]] = set()

    @property
    def readers(self) -> Mapping[Global, ObjectReader]:
        return {ITEM_KEY: self._items_at, TENSOR: self._tensor_at, CHUNK: self._chunks_at}

    def _patterns(self, data: bytes, offset: int) -> _OpcodePatterns:
        """Return how this pickler writes objects: whether it gives each a number is seen from the first."""
        if self._known_patterns is None:
            self._puts = data[offset : offset + 1] == _MEMOIZE
            self._known_patterns = _patterns(_MEMOIZE if self._puts else b"")
        return self._known_patterns

    def _items_at(self, data: bytes, offset: int, memo: Sequence[Value]) -> ReadObjects | None:
        """Read a key and its place, and others as long as they follow."""
        patterns = self._patterns(data, offset)
        memory, values = _Memory(memo, puts=self._puts), list[Value]()
        match, groups, end, added = patterns.item.match(data, offset), _OF_FIRST, offset, 0
        while match is not None and len(values) < _MOST_AT_ONCE:
            name_bytes, size, file_bytes, start, length = match.group(*groups.values)
            name = self._text(name_bytes, memory)
            read_size = _NO_SIZE if size is None else self._size(size, memory)
            names = match.group(*groups.names)
            if name is None or read_size is None or not self._are_names(names, _OF_ITEMS, memory):
                break
            key = ItemKey(name, read_size.numbers)
            memory.put(key, _ATTRIBUTES, *([name] if name_bytes[0] == _SHORT_TEXT else ()), *read_size.memoized)
            file = self._text(file_bytes, memory)
            if file is None:
                break
            place = ItemPlace(file, _number(start), _number(length))
            memory.put(place, _ATTRIBUTES, *([file] if file_bytes[0] == _SHORT_TEXT else ()))
            values += (key, place)
            end, added = match.end(), len(memory.added)
            match, groups = patterns.item_again.match(data, end), _OF_FURTHER
        return ReadObjects(values, end, memory.added[:added], _COST_BYTES * len(values)) if values else None

    def _are_names(self, names: tuple[bytes | None, ...], wished: tuple[Value, ...], memory: _Memory) -> bool:
        """Tell whether opcodes get these names of attributes and classes from the memo."""
        if names in self._spelled:
            return True
        objects = [memory.get(name) if name is not None else wish for name, wish in zip(names, wished)]
        if objects != list(wished[: len(names)]):
            return False
        if len(self._spelled) < _MAX_KNOWN:
            self._spelled.add(names)
        return True

    def _text(self, content: bytes, memory: _Memory) -> str | None:
        """Return a text, from the memo or spelled; None if it is none."""
        if content[0] == _SHORT_TEXT:
            return content[2:-1].decode() if len(content) == content[1] + 3 else None
        text = memory.get(content)
        return text if type(text) is str else None

    def _tensor_at(self, data: bytes, offset: int, memo: Sequence[Value]) -> ReadObjects | None:
        """Read a tensor with all its chunks."""
        head = self._patterns(data, offset).tensor.match(data, offset)
        if head is None:
            return None
        alike = self._tensors.setdefault(head[0], []) if len(self._tensors) < _MAX_KNOWN else []
        for seen in alike:
            if data.startswith(seen.content, offset):
                return ReadObjects([seen.facts], offset + len(seen.content), seen.memoized, _COST_BYTES)
        memory = _Memory(memo, puts=self._puts)
        read = self._tensor(data, head, memory)
        if read is None:
            return None
        facts, end = read
        if self._puts:
            memory.added[0] = facts
        if len(alike) < _MAX_ALIKE and end - offset <= _MAX_ALIKE_BYTES:
            alike.append(_SeenTensor(data[offset:end], facts, memory.added))
        return ReadObjects([facts], end, memory.added, _COST_BYTES * (1 + len(facts.chunks)))

    def _tensor(self, data: bytes, head: re.Match[bytes], memory: _Memory) -> tuple[TensorFacts, int] | None:
        """Return a tensor that begins so, and where it ends; None if it is written in another way."""
        properties_key, new, dtype_get, properties, size_key, shape_bytes, chunks_key, mark = head.groups()
        memory.put(_ATTRIBUTES, _ATTRIBUTES)
        if properties is not None:
            dtype = _dtype_of(memory.get(properties))
        else:
            dtype = memory.get(dtype_get) if memory.get(new) == PROPERTIES else None
            memory.put(Call(PROPERTIES, ()), _ATTRIBUTES)
        keys = tuple(map(memory.get, (properties_key, size_key, chunks_key)))
        shape = self._size(shape_bytes, memory)
        if type(dtype) is not Global or keys != ("properties", "size", "chunks") or shape is None:
            return None
        memory.put(*shape.memoized, _ATTRIBUTES)
        chunks, end = self._chunks_of(data, head.end(), memory, most=_MOST_AT_ONCE if mark else 1)
        ending = b"eub" if mark else b"aub"
        if not data.startswith(ending, end):
            return None
        return TensorFacts(dtype, shape.numbers or (), tuple(chunks)), end + len(ending)

    def _chunks_at(self, data: bytes, offset: int, memo: Sequence[Value]) -> ReadObjects | None:
        """Read a chunk, and others as long as they follow."""
        patterns = self._patterns(data, offset)
        match, memory = patterns.chunk.match(data, offset), _Memory(memo, puts=self._puts)
        chunk = None if match is None else self._chunk(match[0], match.group(1, 2, 3, 4), memory)
        if match is None or chunk is None:
            return None
        chunks, end = self._chunks_of(data, match.end(), memory, most=_MOST_AT_ONCE)
        return ReadObjects([chunk, *chunks], end, memory.added, _COST_BYTES * (1 + len(chunks)))

    def _chunks_of(self, data: bytes, offset: int, memory: _Memory, most: int) -> tuple[list[Chunk], int]:
        """Return the chunks that follow each other from byte `offset` on, and where they end."""
        pattern, chunks = self._patterns(data, offset).chunk_again, list[Chunk]()
        while len(chunks) < most:
            match = pattern.match(data, offset)
            if match is None:
                break
            if match[6] is not None:
                chunk = _chunk_of(memory.get(match[6]))
            else:
                is_chunk = memory.get(match[1]) == CHUNK
                chunk = self._chunk(match[0], match.group(2, 3, 4, 5), memory) if is_chunk else None
            if type(chunk) is not Chunk:
                break
            chunks.append(chunk)
            offset = match.end()
        return chunks, offset

    def _chunk(self, content: bytes, parts: tuple[bytes, ...], memory: _Memory) -> Chunk | None:
        """Return a chunk. content: all its bytes; parts: the names of its attributes, each with a size."""
        cached = self._chunks.get(content)
        if cached is None:
            offsets_key, offsets_bytes, sizes_key, sizes_bytes = parts
            offsets, sizes = self._size(offsets_bytes, memory), self._size(sizes_bytes, memory)
            if offsets is None or sizes is None or not self._are_names((offsets_key, sizes_key), _OF_CHUNKS, memory):
                return None
            chunk = Chunk(offsets.numbers or (), sizes.numbers or ())
            cached = chunk, (chunk, _ATTRIBUTES, *offsets.memoized, *sizes.memoized)
            if len(self._chunks) < _MAX_KNOWN:
                self._chunks[content] = cached
        memory.put(*cached[1])
        return cached[0]

    def _size(self, content: bytes, memory: _Memory) -> _Size | None:
        """Return a size; None if it is written in another way."""
        cached = self._sizes.get(content)
        if cached is not None:
            return cached
        get_bytes = 2 if content[0] == _BINGET else 5
        first = memory.get(content[:get_bytes])
        width = _WIDTHS.get(content[get_bytes]) if len(content) > get_bytes else None
        if len(content) == get_bytes:
            cached = _Size(first, ()) if _is_size(first) else None
        elif width is not None and content[get_bytes + width + 1] == _TUPLE1:
            # One number, as buckets of Megatron have it in a hundred thousand chunks.
            length = int.from_bytes(content[get_bytes + 1 : get_bytes + width + 1], "little", signed=width == 4)
            only = (length,)
            cached = _Size(only, (only, (only,), only)) if first == SIZE and length >= 0 else None
        else:
            counted = _COUNTED.match(content, get_bytes)
            numbers = () if counted is None else tuple(map(_number, _FIND_NUMBERS.findall(counted[2])))
            if counted is not None and counted.group(1, 3) != _ENDS[min(len(numbers), 4)]:
                return None
            memoized = (numbers, (numbers,), numbers) if numbers else ((numbers,), numbers)
            cached = _Size(numbers, memoized) if first == SIZE and _is_size(numbers) else None
        if cached is not None and len(self._sizes) < _MAX_KNOWN:
            self._sizes[content] = cached
        return cached


def _dtype_of(properties: Value) -> Value:
    """Return the type that properties of a tensor name, which were read opcode by opcode; None if there is none."""
    state = properties.state if type(properties) is Call and properties.function == PROPERTIES else None
    return state[0] if type(state) is tuple and state else None


def _chunk_of(value: Value) -> Value:
    """Return a chunk from the memo, where it may have been read opcode by opcode."""
    if type(value) is not Call or value.function != CHUNK or type(value.state) is not Dict:
        return value
    offsets, sizes = value.state.get("offsets"), value.state.get("sizes")
    return Chunk(offsets, sizes) if _is_size(offsets) and _is_size(sizes) else None


def _is_size(value: Value) -> bool:
    return type(value) is tuple and all(type(number) is int and 0 <= number < MAX_NUMBER for number in value)


def _number(content: bytes) -> int:
    """Return the number that an opcode puts on the stack."""
    width = _WIDTHS.get(content[0])
    if width is None:
        return int.from_bytes(content[2:], "little", signed=True)
    return int.from_bytes(content[1:], "little", signed=width == 4)
