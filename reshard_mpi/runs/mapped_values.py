"""What a map says of the values in the source, held against them: tensors that are equal, padding that is zero."""

from __future__ import annotations

from reshard_mpi.engine.comparing import first_difference_of_tensors, first_nonzero
from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import element_of
from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.mapping.made import Equal, Mapped
from reshard_mpi.planning.model import RankPlan, TensorPlan
from reshard_mpi.planning.partial_sums import is_partial_sum
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.text import shortened


def require_equal(conversion: Conversion, plan: RankPlan, mapped: Mapped) -> None:
    """Raise MapError if tensors differ of which one is taken for all. plan: of the source as one full checkpoint."""
    places = plan.tensors.places if mapped.equal else {}
    for equal in mapped.equal:
        tensors = [tensor_at(plan, places[name]) for name in equal.names]
        for other in tensors[1:]:
            _require_same(conversion, tensors[0], other, equal)


def _require_same(conversion: Conversion, first: TensorPlan, other: TensorPlan, equal: Equal) -> None:
    if (first.spec.dtype, first.spec.global_shape) != (other.spec.dtype, other.spec.global_shape):
        element = None
    else:
        conversion.before_gathering()
        with Files() as files:
            element = first_difference_of_tensors(files, first, other, conversion.limits)
        if element is None:
            return
    where = f"a difference at element {list(element)}" if element is not None else "other types or shapes"
    raise MapError(
        "one tensor is taken for several, and they differ",
        expected=f"the same in {first.spec.name} and {other.spec.name}",
        got=where,
        where=f"{conversion.source.files.path}, by {equal.where}",
        remedy="save them as one and the same, or give each an equation of its own",
    )


def require_padding(conversion: Conversion, plan: RankPlan, mapped: Mapped) -> None:
    """Raise MapError if padding that must be zero is not. plan: as for `require_equal`."""
    places = plan.tensors.places if mapped.pads else {}
    for pads in mapped.pads:
        if pads.are_dropped:
            continue
        conversion.before_gathering()
        tensor = tensor_at(plan, places[pads.name])
        with Files() as files:
            for box in pads.boxes:
                element = first_nonzero(files, tensor, box, conversion.limits)
                if element is None:
                    continue
                value = numbers(element_of(files, tensor, element, conversion.limits), tensor.spec.dtype)[0]
                if box == tensor.spec.box:
                    problem = f"{pads.name} is left out, and is not zero"
                    remedy = "leave zeros = true out of the entry of the map if it may be lost"
                else:
                    problem = f"the padding of {pads.name} is not zero"
                    remedy = 'say pads = "drop" in the entry of the map if it may be thrown away, though it may'
                    remedy += " have been trained"
                raise MapError(
                    problem,
                    expected=f"zeros in {box}, of all bits 0",
                    got=f"{value} at element {list(element)}",
                    where=f"{conversion.source.files.path}, by {pads.where}",
                    remedy=remedy,
                )


def tensor_at(plan: RankPlan, at: tuple[int, int]) -> TensorPlan:
    """Return the tensor at a place in a plan. Raises the error for which it cannot be made."""
    group, place = at
    name = plan.tensors.groups[group].names[place]
    if name in plan.holes:
        raise plan.holes[name].with_traceback(None)
    return plan.tensors.groups[group].tensor(place)


def require_known_sums(mapped: Mapped, path: str) -> None:
    """Raise MapError if the names of accumulated gradients are those of other tensors before the map, or after it.

    One of several target ranks gets a sum, and the others zeros; which tensors are sums is known by their names.
    """
    for tensor in mapped.made:
        sources = {tensor.sources[pair.source] for pair in tensor.shape.pairs}
        if sources and {is_partial_sum(tensor.name)} != set(map(is_partial_sum, sources)):
            raise MapError(
                f"the map makes {tensor.name!r} of {shortened(sorted(sources))}, and only one side is known as sums",
                expected="accumulated gradients with names such as accu_grads.<parameter> on both sides"
                " (--accumulated sum)",
                got=f"{tensor.name!r} in the target",
                where=f"{path}, by {tensor.where}" if tensor.where else path,
                remedy="call them so on both sides, and rename them afterwards by another run",
            )
