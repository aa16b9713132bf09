"""Define tensors that are converted, constant, or joined of several shards (`converted`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from reshard_mpi.formats.dtypes import FLOATS, DType
from reshard_mpi.formats.locations import Constant, Converted, Location, Reduced
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, ChunkedTensors, TensorEntry, TensorTable, TensorType


def converted(tensors: TensorTable, dtype: DType) -> TensorTable:
    """Return the same tensors, with other floating-point types converted to `dtype` on reading.

    Names, numbers and numbers of kinds stay what they are.

    Args:
        dtype: one of `dtypes.FLOATS`.

    Raises ValueError if it is another one.
    """
    if dtype not in FLOATS:
        raise ValueError(f"elements cannot be converted to {dtype}")
    return _converted_list(tensors, dtype) if isinstance(tensors, ChunkedTensors) else _ConvertedTensors(tensors, dtype)


def constant(name: str, dtype: DType, shape: tuple[int, ...], element: bytes) -> TensorEntry:
    """Return a tensor all of whose elements have these bytes, in this machine's byte order.

    Raises ValueError if they are not as many as an element of `dtype` has.
    """
    if len(element) != dtype.itemsize_bytes:
        raise ValueError(f"an element of {dtype} has {dtype.itemsize_bytes} bytes, got {len(element)}")
    return TensorEntry(name, dtype, shape, Constant(element))


class JoinedTensors(TensorTable):
    """The sums of the tensors that several shards have by some names, or their means; numbered in the order of these.

    Attributes:
        shards: in the order in which they are added; all have these tensors, of the same kinds.
    """

    __slots__ = ("_is_mean", "_numbers", "_shards")

    def __init__(self, names: Sequence[str], shards: Sequence[TensorTable], *, is_mean: bool) -> None:
        first, *_ = shards
        super().__init__(first.path)
        self._shards, self._is_mean = tuple(shards), is_mean
        by_table: dict[int, array[int]] = {}  # shards of replicas have their table of names in common, as a rule
        for shard in shards:
            if id(shard.index_by_name) not in by_table:
                by_table[id(shard.index_by_name)] = array("I", map(shard.index_by_name.__getitem__, names))
        self._numbers = tuple(by_table[id(shard.index_by_name)] for shard in shards)
        for number in self._numbers[0]:
            self.add_unnamed(self.kind(first.kinds[first.kind_ids[number]]), NOT_CONTIGUOUS)
        for shard, numbers in zip(shards, self._numbers):
            if shard.locations:
                self.locations |= {
                    place: self.source(place) for place, number in enumerate(numbers) if number in shard.locations
                }

    def source(self, number: int) -> Location:
        sources = (shard.source(numbers[number]) for shard, numbers in zip(self._shards, self._numbers))
        return Reduced(tuple(sources), self._is_mean)

    def element_bytes(self, numbers: Sequence[int]) -> int:
        return sum(
            shard.element_bytes([own[number] for number in numbers]) for shard, own in zip(self._shards, self._numbers)
        )

    @property
    def tables(self) -> tuple[TensorTable, ...]:
        return (self, *self._shards)

    def _columns(self) -> tuple[object, ...]:
        shards = tuple(shard._columns() for shard in self._shards)
        return self._is_mean, self.kinds, self.kind_ids, self._numbers, shards


class _ConvertedTensors(TensorTable):
    """The tensors of a shard in another type. Only kinds and scattered locations are kept twice."""

    __slots__ = ("_changed", "_dtype", "_unconverted")

    def __init__(self, unconverted: TensorTable, dtype: DType) -> None:
        super().__init__(unconverted.path)
        self._unconverted, self._dtype = unconverted, dtype
        self.index_by_name, self.kind_ids = unconverted.index_by_name, unconverted.kind_ids
        self.kinds = [_converted_kind(kind, dtype) for kind in unconverted.kinds]
        self._changed = [kind != before for kind, before in zip(self.kinds, unconverted.kinds)]
        self.offsets = array(
            "q",
            (
                NOT_CONTIGUOUS if self._changed[kind] else start
                for kind, start in zip(unconverted.kind_ids, unconverted.offsets)
            ),
        )
        self.locations = {number: self.source(number) for number in unconverted.locations}

    @property
    def unconverted(self) -> TensorTable:
        return self._unconverted

    def source(self, number: int) -> Location:
        place, kind = self._unconverted.source(number), self.kind_ids[number]
        return Converted(place, self._unconverted.kinds[kind].dtype) if self._changed[kind] else place

    def element_bytes(self, numbers: Sequence[int]) -> int:
        return self._unconverted.element_bytes(numbers)

    def at(self, path: str) -> TensorTable:
        return _ConvertedTensors(self._unconverted.at(path), self._dtype)

    @property
    def tables(self) -> tuple[TensorTable, ...]:
        return (self, *self._unconverted.tables)

    def _columns(self) -> tuple[object, ...]:
        return self._dtype, *self._unconverted._columns()


def _converted_list(tensors: ChunkedTensors, dtype: DType) -> ChunkedTensors:
    by_file = {id(file): converted(file, dtype) for file in tensors.files}
    view = ChunkedTensors(tensors.path)
    view.index_by_name, view.kind_ids, view.offsets = tensors.index_by_name, tensors.kind_ids, tensors.offsets
    view.locations, view.chunk_list_ids, view.numbers = tensors.locations, tensors.chunk_list_ids, tensors.numbers
    view.missing, view.unreadable = tensors.missing, tensors.unreadable
    view.kinds = [_converted_kind(kind, dtype) for kind in tensors.kinds]
    view.chunk_lists = [tuple((box, by_file[id(file)]) for box, file in pieces) for pieces in tensors.chunk_lists]
    return view


def _converted_kind(kind: TensorType, dtype: DType) -> TensorType:
    return kind._replace(dtype=dtype) if kind.dtype in FLOATS else kind
