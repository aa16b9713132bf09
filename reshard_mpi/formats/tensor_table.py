"""Keep the tensors of a shard in columns: it may hold a hundred thousand (`TensorTable`)."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Converted, Location, StridedView, read_element_bytes
from reshard_mpi.sharding.box import Box


class TensorEntry(NamedTuple):
    """One tensor of one shard."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # of the part that the shard holds
    source: Location  # where its elements are
    # the part's box in the whole tensor, and global_shape: the shape of that; None if the file does not say, and the
    # strategy must
    box: Box | None = None
    global_shape: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize_bytes

    @property
    def stored(self) -> ByteRanges | None:
        """The bytes that contain its elements, `steps` apart; None if these are decoded, converted, or in no file."""
        source = self.source
        if isinstance(source, StridedView):
            distances = ((length - 1) * stride for length, stride in zip(self.shape, source.strides_bytes))
            span_bytes = sum(distances, self.dtype.itemsize_bytes) if self.size_bytes else 0
            return ByteRanges((ByteRange(source.path, source.offset_bytes, span_bytes),), source.swapped)
        return source if isinstance(source, ByteRanges) else None

    @property
    def steps(self) -> tuple[int, ...] | None:
        """For each dimension, how many elements apart neighbours are where they are; None: they are row-major."""
        unconverted = self.unconverted
        if not isinstance(unconverted.source, StridedView):
            return None
        return tuple(stride // unconverted.dtype.itemsize_bytes for stride in unconverted.source.strides_bytes)

    @property
    def unconverted(self) -> TensorEntry:
        """The tensor as it is before its elements are converted; itself if they are not."""
        entry = self
        while isinstance(entry.source, Converted):
            entry = entry._replace(dtype=entry.source.dtype, source=entry.source.place)
        return entry

    @property
    def is_as_stored(self) -> bool:
        """Whether its bytes can be copied from the file as they are."""
        return isinstance(self.source, ByteRanges | StridedView) and not self.source.swapped


class TensorType(NamedTuple):
    """What many tensors of a shard have in common, read or to be written: all but name and place in the file.

    Example, the lower half of a matrix; `TensorType(FLOAT32, (2, 6))` is a file's that does not say of what it is part:

        TensorType(FLOAT32, (2, 6), Box((2, 0), (4, 6)), (4, 6))
    """

    dtype: DType
    shape: tuple[int, ...]  # of the part that the shard holds
    box: Box | None = None  # the part's box in the whole tensor; None: not known
    global_shape: tuple[int, ...] | None = None  # of the whole tensor; None: not known

    @classmethod
    def of_box(cls, dtype: DType, box: Box, global_shape: tuple[int, ...]) -> TensorType:
        """Return the type of a tensor that is the part `box` of a tensor of shape `global_shape`."""
        return cls(dtype, box.shape, box, global_shape)

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize_bytes * math.prod(self.shape)

    @property
    def unplaced(self) -> TensorType:
        """The same type without its box, as files have it that do not say of what their tensors are parts."""
        return TensorType(self.dtype, self.shape)

    @property
    def own_box(self) -> Box:
        """The box of a tensor whose box is known: one that is planned or written."""
        assert self.box is not None
        return self.box

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, where that is known."""
        assert self.global_shape is not None
        return self.global_shape


# Measured: for each tensor, its name and number; its kind and start; and its place if that is in `locations`.
_NAME_BYTES, _OFFSET_BYTES, _LOCATION_BYTES = 400, 16, 600
KEPT_TENSOR_BYTES, KEPT_OFFSET_BYTES = _NAME_BYTES + _OFFSET_BYTES, _OFFSET_BYTES

# The start of a tensor that is not one run of its shard's file, or not in this machine's byte order.
NOT_CONTIGUOUS = -1


class TensorTable(Mapping[str, TensorEntry]):
    """The tensors of one shard in the file's order, in columns. A tensor's number is its place in that order.

    Attributes:
        path: of the shard.
        index_by_name: by name.
        kinds: the different kinds, in the order in which they were added.
        kind_ids: for each tensor, the number of its kind.
        offsets: for each, the offset of its elements in the file `path`, if they are one run there (any offset, if
            there are none); else `NOT_CONTIGUOUS`.
        locations: the places of these, by number.
        in_pieces: whether the tensors are made up of pieces in other tables, and have no places of their own.

    Example, two float32 tensors of 16 elements, one behind the other from byte 100 on:

        index_by_name = {"a": 0, "b": 1}; kinds = [TensorType(FLOAT32, (16,), None, None)]
        kind_ids = [0, 0]; offsets = [100, 164]; locations = {}
    """

    in_pieces = False
    __slots__ = ("_number_of_kind", "index_by_name", "kind_ids", "kinds", "locations", "offsets", "path")

    def __init__(self, path: str, entries: Iterable[TensorEntry] = ()) -> None:
        self.path = path
        self.index_by_name: dict[str, int] = {}
        self.kinds: list[TensorType] = []
        self.kind_ids = array("I")
        self.offsets = array("q")
        self.locations: dict[int, Location] = {}
        self._number_of_kind: dict[TensorType, int] = {}
        for entry in entries:
            self.add_entry(entry)

    @property
    def unconverted(self) -> TensorTable:
        """The table with the types that the file has, if this one shows its tensors in other types; else this one."""
        return self

    def kind(self, kind: TensorType) -> int:
        """Return the number of a kind; add the kind if it is new."""
        number = self._number_of_kind.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def add(self, name: str, kind: int, start: int) -> None:
        """Add a tensor that is one run of the file.

        Args:
            kind: number of its kind.
            start: its offset in bytes. There must be no tensor of its name yet.
        """
        self.index_by_name[name] = len(self.offsets)
        self.kind_ids.append(kind)
        self.offsets.append(start)

    def add_unnamed(self, kind: int, start: int, source: Location | None = None) -> int:
        """Add a tensor that only a list of pieces knows, by its number, which is returned.

        Args:
            source: where it is, if `start` is `NOT_CONTIGUOUS`.
        """
        number = len(self.offsets)
        if source is not None:
            self.locations[number] = source
        self.kind_ids.append(kind)
        self.offsets.append(start)
        return number

    def add_entry(self, entry: TensorEntry) -> None:
        """Add a tensor. Raises ValueError if there is one of its name already."""
        if entry.name in self.index_by_name:
            raise ValueError(f"two tensors called {entry.name!r}")
        kind, source = self.kind(TensorType(entry.dtype, entry.shape, entry.box, entry.global_shape)), entry.source
        start = NOT_CONTIGUOUS
        if isinstance(source, ByteRanges) and not source.swapped:
            if not source.ranges and not entry.size_bytes:
                start = 0
            elif len(source.ranges) == 1 and source.ranges[0].path == self.path:
                start = source.ranges[0].offset_bytes
        if start == NOT_CONTIGUOUS:
            self.locations[len(self.offsets)] = source
        self.add(entry.name, kind, start)

    def share_names(self, other: TensorTable) -> None:
        """Share the table of names with another shard if that has the same names in the same order, to save memory."""
        if self.index_by_name is not other.index_by_name and list(self.index_by_name) == list(other.index_by_name):
            self.index_by_name = other.index_by_name

    def at(self, path: str) -> TensorTable:
        """Return the tensors of the file `path`, which must have the same tensors at the same places."""
        other = TensorTable(path)
        other.index_by_name, other.kinds, other._number_of_kind = self.index_by_name, self.kinds, self._number_of_kind
        other.kind_ids, other.offsets = self.kind_ids, self.offsets
        for number, source in self.locations.items():
            if isinstance(source, StridedView):
                other.locations[number] = source._replace(path=path)
                continue
            if not isinstance(source, ByteRanges):
                raise TypeError("a tensor whose bytes are not in the file as they are")
            ranges = tuple(ByteRange(path, part.offset_bytes, part.length_bytes) for part in source.ranges)
            other.locations[number] = ByteRanges(ranges, source.swapped)
        return other

    def source(self, number: int) -> Location:
        """Return where the elements of a tensor are."""
        start = self.offsets[number]
        if start == NOT_CONTIGUOUS:
            return self.locations[number]
        size_bytes = self.kinds[self.kind_ids[number]].size_bytes
        return ByteRanges((ByteRange(self.path, start, size_bytes),) if size_bytes else ())

    def payload_spans(self) -> list[tuple[int, int]]:
        """Return where elements lie in the file `path`: first bytes and ends, ascending; what touches is one span."""
        sizes = [kind.size_bytes for kind in self.kinds]
        spans = [(start, start + sizes[kind]) for start, kind in zip(self.offsets, self.kind_ids) if start >= 0]
        for number, place in self.locations.items():
            dtype, shape, *_ = self.kinds[self.kind_ids[number]]
            stored = TensorEntry("", dtype, shape, place).stored
            ours = (part for part in stored.ranges if part.path == self.path) if stored is not None else ()
            spans += [(part.offset_bytes, part.offset_bytes + part.length_bytes) for part in ours]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(span for span in spans if span[0] < span[1]):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((start, end))
        return merged

    def element_bytes(self, numbers: Sequence[int]) -> int:
        """Return how many bytes of files one element of each of these tensors takes, all together."""
        if not self.locations:
            counts = Counter(map(self.kind_ids.__getitem__, numbers))
            return sum(count * self.kinds[kind].dtype.itemsize_bytes for kind, count in counts.items())
        return sum(
            read_element_bytes(self.locations.get(number), self.kinds[self.kind_ids[number]].dtype)
            for number in numbers
        )

    def __getitem__(self, name: str) -> TensorEntry:
        number = self.index_by_name[name]
        dtype, shape, box, global_shape = self.kinds[self.kind_ids[number]]
        return TensorEntry(name, dtype, shape, self.source(number), box, global_shape)

    def kind_named(self, name: str) -> TensorType:
        """Return the kind of the tensor of this name. Raises KeyError if there is none."""
        return self.kinds[self.kind_ids[self.index_by_name[name]]]

    def keys(self) -> KeysView[str]:
        return self.index_by_name.keys()

    def __contains__(self, name: object) -> bool:
        return name in self.index_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.index_by_name)

    def __len__(self) -> int:
        return len(self.offsets)

    def __eq__(self, other: object) -> bool:
        """Tell whether both have the same tensors at the same places, in the same order; kinds may be in another."""
        if not isinstance(other, TensorTable) or self._columns() != other._columns():
            return False
        if self.kinds == other.kinds:
            return self.kind_ids == other.kind_ids
        numbers = {kind: number for number, kind in enumerate(other.kinds)}
        translated = [numbers.get(kind, -1) for kind in self.kinds]
        return [translated[number] for number in self.kind_ids] == list(other.kind_ids)

    def __hash__(self) -> int:
        return hash((self.path, len(self)))

    def _columns(self) -> tuple[object, ...]:
        return list(self.index_by_name), self.offsets, self.locations, self.path

    @property
    def tables(self) -> tuple[TensorTable, ...]:
        """All tables kept for these tensors: their own, and their source shards' tables."""
        return (self,)

    @staticmethod
    def kept_bytes(shards: Iterable[TensorTable]) -> int:
        """Return how much memory shards take together; names that several share count once."""
        names: dict[int, int] = {}
        places = 0
        for tensors in shards:
            names[id(tensors.index_by_name)] = len(tensors)
            places += _OFFSET_BYTES * len(tensors) + _LOCATION_BYTES * len(tensors.locations)
        return places + _NAME_BYTES * sum(names.values())


# The place of a tensor that has none of its own, since only its chunks have places.
_NOWHERE = ByteRanges(())


class ListedChunk(NamedTuple):
    """A chunk that an index lists. box: in the whole tensor. tensors, number: the tensors of a file, and which one."""

    box: Box
    tensors: TensorTable
    number: int


# What many listed tensors have in common: for each chunk, its box and the tensors of its file.
ChunkList = tuple[tuple[Box, TensorTable], ...]


class ChunkedTensors(TensorTable):
    """The whole tensors of a checkpoint whose chunks are listed one by one; only the chunks have places.

    A file may have several chunks of a tensor. Chunks may overlap if they hold the same there.

    Attributes:
        chunk_lists: the different lists of chunks.
        chunk_list_ids: for each tensor, the number of its list.
        numbers: for each tensor, the numbers of its chunks in their files.
        missing: in words, why no chunks of some files are listed.
        unreadable: the names of tensors whose elements cannot be read though their files are sound, each with the
            reason in words; no chunks of them are listed.
    """

    in_pieces = True
    __slots__ = ("_number_of_list", "chunk_list_ids", "chunk_lists", "missing", "numbers", "unreadable")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.chunk_lists: list[ChunkList] = []
        self.chunk_list_ids = array("I")
        self.numbers: list[tuple[int, ...]] = []
        self.missing: tuple[str, ...] = ()
        self.unreadable: dict[str, str] = {}
        self._number_of_list: dict[tuple[tuple[Box, int], ...], int] = {}

    def add_listed(self, name: str, dtype: DType, shape: tuple[int, ...], chunks: Sequence[ListedChunk]) -> None:
        """Add a tensor. Raises ValueError if there is one of its name already, or if a chunk does not fit it."""
        whole = Box.whole(shape)
        for box, tensors, number in chunks:
            kind = tensors.kinds[tensors.kind_ids[number]]
            if (kind.dtype, kind.shape) != (dtype, box.shape) or not (box.ndim == whole.ndim and whole.contains(box)):
                raise ValueError(f"a chunk of {name!r} is {kind.dtype} {list(kind.shape)}, listed as {dtype} at {box}")
        listed = tuple((chunk.box, chunk.tensors) for chunk in chunks)
        self._add(name, TensorType(dtype, shape), self._number_of(listed), tuple(chunk.number for chunk in chunks))

    def add_whole(self, tensors: TensorTable) -> None:
        """Add every tensor of a file that holds them whole. Raises ValueError if there is one of a name already."""
        of_kind: dict[int, tuple[TensorType, int]] = {}
        for name, number in tensors.index_by_name.items():
            kind_id = tensors.kind_ids[number]
            if kind_id not in of_kind:
                dtype, shape = tensors.kinds[kind_id].dtype, tensors.kinds[kind_id].shape
                of_kind[kind_id] = TensorType(dtype, shape), self._number_of(((Box.whole(shape), tensors),))
            self._add(name, *of_kind[kind_id], (number,))

    def _number_of(self, chunks: ChunkList) -> int:
        """Return the number of a list of chunks; add the list if it is new."""
        key = tuple((box, id(tensors)) for box, tensors in chunks)
        number = self._number_of_list.setdefault(key, len(self.chunk_lists))
        if number == len(self.chunk_lists):
            self.chunk_lists.append(chunks)
        return number

    def add_unreadable(self, name: str, dtype: DType, shape: tuple[int, ...], why: str) -> None:
        """Add a tensor that cannot be read. Raises ValueError if there is one of its name already.

        It has an empty list of its own, so that nothing is said of it together with others.
        """
        self._add(name, TensorType(dtype, shape), len(self.chunk_lists), ())
        self.chunk_lists.append(())
        self.unreadable[name] = why

    def _add(self, name: str, kind: TensorType, list_number: int, numbers: tuple[int, ...]) -> None:
        if name in self.index_by_name:
            raise ValueError(f"two tensors called {name!r}")
        self.locations[len(self.offsets)] = _NOWHERE
        self.add(name, self.kind(kind), NOT_CONTIGUOUS)
        self.chunk_list_ids.append(list_number)
        self.numbers.append(numbers)

    @property
    def chunks(self) -> int:
        """How many chunks all tensors have together."""
        return sum(map(len, self.numbers))

    @property
    def files(self) -> tuple[TensorTable, ...]:
        """The tensors of each file that has chunks."""
        by_identity = {id(tensors): tensors for chunks in self.chunk_lists for _, tensors in chunks}
        return tuple(by_identity.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkedTensors) or list(self) != list(other):
            return False
        has_same_kinds = self.kinds == other.kinds and self.kind_ids == other.kind_ids
        return has_same_kinds and list(self._chunks()) == list(other._chunks())

    __hash__ = TensorTable.__hash__

    def _chunks(self) -> Iterator[object]:
        for list_number, numbers in zip(self.chunk_list_ids, self.numbers):
            chunks = zip(self.chunk_lists[list_number], numbers)
            yield [(box, tensors.source(number)) for (box, tensors), number in chunks]
