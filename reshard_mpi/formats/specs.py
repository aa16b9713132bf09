"""The specification of a shard to be written: its tensors, strings and place in its checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.sharding.box import Box


class TensorSpec(NamedTuple):
    """A tensor of a shard to be written: part `box` of a tensor of shape `global_shape`."""

    name: str
    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class SpecKind(NamedTuple):
    """What many tensors of a shard to be written have in common. See `TensorSpec`."""

    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class Specs(Sequence[TensorSpec]):
    """The tensors of a shard to be written, in file order, in columns.

    kinds: the different kinds. kind_of: for each tensor, the number of its kind.
    """

    __slots__ = ("kind_of", "kinds", "names")

    def __init__(self, names: Sequence[str], kinds: Sequence[SpecKind], kind_of: Sequence[int]) -> None:
        self.names = names
        self.kinds = kinds
        self.kind_of = kind_of

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> Specs:
        """Return the same tensors in columns."""
        if isinstance(tensors, cls):
            return tensors
        numbers: dict[SpecKind, int] = {}
        kind_of = array("I", (numbers.setdefault(SpecKind(*tensor[1:]), len(numbers)) for tensor in tensors))
        return cls([tensor.name for tensor in tensors], list(numbers), kind_of)

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Specs: ...
    def __getitem__(self, index: int | slice) -> TensorSpec | Specs:
        if isinstance(index, slice):
            return Specs(self.names[index], self.kinds, self.kind_of[index])
        return TensorSpec(self.names[index], *self.kinds[self.kind_of[index]])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """How many bytes all elements take."""
        sizes = [kind.size_bytes for kind in self.kinds]
        return sum(sizes[kind] for kind in self.kind_of)


class ShardSpec(NamedTuple):
    """A shard to be written, its tensors in file order.

    with_sums: whether it gets room for a sum of each tensor. elsewhere: names of tensors that its rank holds as well,
    and that another file of the same checkpoint has.
    """

    identity: ShardIdentity
    tensors: Sequence[TensorSpec]
    strings: Mapping[str, str]
    with_sums: bool = False
    elsewhere: Sequence[str] = ()

    @property
    def specs(self) -> Specs:
        """The tensors in columns."""
        return Specs.of(self.tensors)
