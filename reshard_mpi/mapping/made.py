"""What a map makes of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.files import MAX_DIMENSIONS, MAX_NAME_BYTES
from reshard_mpi.mapping.candidates import Kind
from reshard_mpi.mapping.computing import Computed, Counted
from reshard_mpi.mapping.directions import Direction
from reshard_mpi.mapping.pairs import Place, TargetShape
from reshard_mpi.sharding.box import Box


class Made(NamedTuple):
    """A tensor that is made of others.

    shape: its pairs, and what of it is zeros. sources: the names of the tensors that pairs take from. where: the place
    of the equation in the map; empty for a tensor that no equation takes.
    """

    name: str
    dtype: DType
    shape: TargetShape
    sources: Mapping[Place, str]
    where: str


def taken_of(tensor: Made) -> tuple[Place, ...]:
    """Return which of its sources a tensor is made of: an equation of several tensors may take others besides.

    One that has no element of any, since it has none itself or only zeros, is made of all.
    """
    return tuple(dict.fromkeys(pair.source for pair in tensor.shape.pairs)) or tuple(tensor.sources)


class Constant(NamedTuple):
    """A tensor that is made up. element: the bytes of each of its elements."""

    name: str
    kind: Kind
    element: bytes
    where: str

    @property
    def shape(self) -> TargetShape:
        """What it is made of: nothing."""
        return TargetShape(self.kind.shape, (), (Box.whole(self.kind.shape),))


class Equal(NamedTuple):
    """Tensors of which one is taken for all. where: the place of the equation in the map."""

    names: tuple[str, ...]
    where: str


class Pads(NamedTuple):
    """Boxes of a source tensor that go nowhere. are_dropped: whether they may hold anything; else only zeros."""

    name: str
    boxes: tuple[Box, ...]
    are_dropped: bool
    where: str


class Mapped(NamedTuple):
    """All that a map makes of a checkpoint.

    left_out: the names of tensors that go nowhere. states_left_out: those of them that are left out with the parameter
    whose state they are. computed: tensors of one element that are computed, with the `settings` of the optimizer on
    the left. counted: those of the source that hold what is computed anew. cautions: what people must know of it, in
    words. stranded: state that stays while its parameter goes, which is left out after a later map.
    """

    made: tuple[Made, ...]
    constants: tuple[Constant, ...]
    equal: tuple[Equal, ...]
    pads: tuple[Pads, ...]
    left_out: tuple[str, ...]
    direction: Direction | None
    computed: tuple[Computed, ...] = ()
    counted: Counted = Counted(None, (), ())
    cautions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    states_left_out: tuple[str, ...] = ()
    stranded: frozenset[str] = frozenset()


def require_holdable(mapped: Mapped) -> None:
    """Raise MapError for a tensor whose name or shape is more than a shard is read with."""
    shapes = [(tensor.name, tensor.shape.shape, tensor.where) for tensor in mapped.made]
    shapes += [(constant.name, constant.kind.shape, constant.where) for constant in mapped.constants]
    shapes += [(number.name, number.kind.shape, number.where) for number in mapped.computed]
    for name, shape, where in shapes:
        length_bytes = len(name.encode(errors="replace"))
        if length_bytes > MAX_NAME_BYTES:
            raise MapError(
                "a name that the map makes is too long",
                expected=f"at most {MAX_NAME_BYTES} bytes",
                got=f"{length_bytes} bytes: {name[:80]}...",
                where=where,
            )
        if len(shape) > MAX_DIMENSIONS:
            raise MapError(
                f"{name} would have too many dimensions",
                expected=f"at most {MAX_DIMENSIONS}",
                got=str(len(shape)),
                where=where,
                remedy="leave axes of length 1 out, or put axes together: (a b)",
            )
