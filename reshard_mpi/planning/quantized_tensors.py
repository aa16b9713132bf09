"""Plan quantized weights: dequantized (`dequantized`), or with the shapes of pieces (`with_piece_shapes`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from reshard_mpi.errors import LayoutError, ReshardError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.locations import Constant, Dequantized
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, RankPlan, ReadGroup, TensorPlan
from reshard_mpi.quantization.weights import QuantizedWeight, StoredWeight
from reshard_mpi.sharding.box import Box

_FLOAT32 = BY_NAME["float32"]
# Companions that are of no use once a weight is dequantized.
_NOT_READ = ("shape", "carried")


def dequantized(plan: RankPlan, weights: Iterable[QuantizedWeight]) -> RankPlan:
    """Return the plan of a full checkpoint with weights in float32 in place of their stored tensors."""
    places = plan.tensors.places
    table = TensorTable("")
    numbers: dict[tuple[int, ...], list[int]] = {}
    ranks: dict[tuple[int, ...], set[int]] = {}
    at: dict[str, str] = {}  # the weight that stands in the place of a stored tensor
    gone: set[str] = set()
    holes: dict[str, ReshardError] = dict(plan.holes)
    for weight in weights:
        stored: dict[str, TensorPlan] = {}
        names = [weight.stored, *(each.name for each in weight.companions if each.role not in _NOT_READ)]
        for name in names:
            group, place = places[name]
            stored[name] = plan.tensors.groups[group].tensor(place)
            if name in plan.holes:
                holes[weight.name] = plan.holes[name]
        number = len(table)
        table.add_entry(TensorEntry(weight.name, _FLOAT32, weight.shape, Dequantized(weight, stored)))
        numbers.setdefault(weight.shape, []).append(number)
        ranks.setdefault(weight.shape, set()).update(copy.source_rank for own in stored.values() for copy in own.copies)
        at[weight.stored] = weight.name
        gone.update(weight.names)
    names_of = list(table)
    groups = []
    for shape, own in numbers.items():
        whole, own_ranks = Box.whole(shape), tuple(sorted(ranks[shape]))
        is_hole = any(names_of[number] in holes for number in own)
        route = ReadGroup(min(own_ranks, default=0), whole, whole, table, array("I", own), joined_ranks=own_ranks)
        kind = TensorType.of_box(_FLOAT32, whole, shape)
        groups.append(Group(kind, [names_of[number] for number in own], () if is_hole else (route,)))
    order = [at.get(name, name) for name in plan.tensors.specs.names if name not in gone or name in at]
    return plan._replace(tensors=_replaced(plan.tensors, gone, groups, order), holes=holes)


def with_piece_shapes(plan: RankPlan, weights: Mapping[str, StoredWeight], *, is_global: bool) -> RankPlan:
    """Return a plan whose tensors that state shapes of weights state the shapes of the target's pieces.

    Args:
        is_global: whether the target's files state the shapes of whole weights.

    Raises LayoutError for weights that are stacked, which have one tensor for all their shapes.
    """
    places = plan.tensors.places
    groups: dict[tuple[TensorType, tuple[int, ...]], list[str]] = {}
    for stored in weights.values():
        companion = stored.weight.companion("shape")
        if companion is None or companion.name not in places or stored.weight.stored not in places:
            continue
        kind = plan.tensors.groups[places[companion.name][0]].kind
        box = plan.tensors.groups[places[stored.weight.stored][0]].kind.own_box
        if kind.shape != (2,) or box.ndim != 2:
            if box != Box.whole(stored.shape):
                raise LayoutError(
                    f"{stored.weight.stored} is cut, and one tensor states the shapes of all its matrices",
                    expected="it whole, or cut along the axis of its matrices alone",
                    got=str(box),
                )
            continue
        shape = stored.weight.shape if is_global else _piece_shape(stored, box)
        groups.setdefault((kind, shape), []).append(companion.name)
    if not groups:
        return plan
    made = [
        Group(kind, names, tuple(_constants(kind.dtype, shape, len(names), min(plan.read_ranks, default=0))))
        for (kind, shape), names in groups.items()
    ]
    gone = {name for group in made for name in group.names}
    alike = (group._replace(names=tuple(name for name in group.names if name not in gone)) for group in plan.alike)
    return plan._replace(
        tensors=_replaced(plan.tensors, gone, made, plan.tensors.specs.names),
        alike=tuple(group for group in alike if group.names),
        loose=plan.loose if is_global else plan.loose | gone,
    )


def _piece_shape(stored: StoredWeight, box: Box) -> tuple[int, int]:
    """Return the shape of a piece of a weight whose rows are packed into words of 32 bits."""
    rows, columns = stored.weight.shape
    per_word = 32 / stored.weight.scheme.bits
    start, end = (min(columns, round(place * per_word)) for place in (box.start[1], box.stop[1]))
    return (rows if box.shape[0] == stored.shape[0] else box.shape[0]), end - start


def _constants(dtype: DType, values: tuple[int, ...], count: int, rank: int) -> Iterator[ReadGroup]:
    for place, value in enumerate(values):
        one = Box((0,), (1,))
        element = Constant(value.to_bytes(dtype.itemsize_bytes, "little", signed=True))
        table = TensorTable("", [TensorEntry("", dtype, (1,), element)])
        yield ReadGroup(rank, one, one, table, array("I", [0] * count), Box((place,), (place + 1,)))


def _replaced(tensors: PlannedTensors, gone: set[str], groups: Iterable[Group], order: Iterable[str]) -> PlannedTensors:
    """Return tensors without some, and with other groups, in the order of their names."""
    kept = tensors.without(gone)
    every = [*kept.groups, *groups]
    number_of = {name: number for number, group in enumerate(every) for name in group.names}
    names = list(order)
    in_order: list[list[str]] = [[] for _ in every]
    for name in names:
        in_order[number_of[name]].append(name)
    placed = {name: place for group in every for place, name in enumerate(group.names)}
    sorted_groups = [
        group.part([placed[name] for name in own]) if list(group.names) != own else group
        for group, own in zip(every, in_order)
    ]
    return PlannedTensors(sorted_groups, array("I", map(number_of.__getitem__, names)))
