"""A shard that is to be written: its tensors, strings and place in its checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.sharding.box import Box


class TensorSpec(NamedTuple):
    """A tensor of a shard that is to be written: `box` of a tensor of shape `global_shape`."""

    name: str
    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class SpecKind(NamedTuple):
    """What many tensors of a shard that is to be written have alike. See `TensorSpec`."""

    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class Specs(Sequence[TensorSpec]):
    """The tensors of a shard that is to be written, in file order, by column.

    kind_of: the number of each one's kind.
    """

    __slots__ = ("kind_of", "kinds", "names")

    def __init__(self, names: Sequence[str], kinds: Sequence[SpecKind], kind_of: Sequence[int]) -> None:
        self.names = names
        self.kinds = kinds
        self.kind_of = kind_of

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> Specs:
        """Return the same tensors by column."""
        if isinstance(tensors, cls):
            return tensors
        numbers: dict[SpecKind, int] = {}
        kind_of = array("I", (numbers.setdefault(SpecKind(*tensor[1:]), len(numbers)) for tensor in tensors))
        return cls([tensor.name for tensor in tensors], list(numbers), kind_of)

    @overload
    def __getitem__(self, at: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, at: slice) -> Specs: ...
    def __getitem__(self, at: int | slice) -> TensorSpec | Specs:
        if isinstance(at, slice):
            return Specs(self.names[at], self.kinds, self.kind_of[at])
        return TensorSpec(self.names[at], *self.kinds[self.kind_of[at]])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """How many bytes all elements take."""
        sizes = [kind.size_bytes for kind in self.kinds]
        return sum(sizes[kind] for kind in self.kind_of)


class ShardSpec(NamedTuple):
    """A shard that is to be written, tensors in file order. with_sums: it is to keep a sum of each of them."""

    identity: ShardIdentity
    tensors: Sequence[TensorSpec]
    strings: Mapping[str, str]
    with_sums: bool = False

    @property
    def specs(self) -> Specs:
        """The tensors by column."""
        return Specs.of(self.tensors)
