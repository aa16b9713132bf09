"""Elements that turned out to be too large for the type that they were converted to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reshard_mpi.text import counted

# Of so many tensors users are told one by one.
_MAX_TOLD = 8
_LARGEST = {"float8_e4m3fn": "448, its largest number"}


class Overflow(NamedTuple):
    """How many elements of a target tensor were too large for its type, which is `dtype`."""

    tensor: str
    dtype: str
    elements: int


def joined(overflows: Iterable[Overflow]) -> tuple[Overflow, ...]:
    """Return one record for each tensor of one type, with the elements of all its records."""
    elements: dict[tuple[str, str], int] = {}
    for overflow in overflows:
        key = (overflow.tensor, overflow.dtype)
        elements[key] = elements.get(key, 0) + overflow.elements
    return tuple(Overflow(tensor, dtype, count) for (tensor, dtype), count in elements.items())


def warnings_of(targets: Iterable[Iterable[Overflow]]) -> Iterator[str]:
    """Yield what users are told of the overflows of all targets, those of one tensor together."""
    records = [overflow for target in targets for overflow in target]
    in_targets: dict[tuple[str, str], int] = {}
    for tensor, dtype, _ in records:
        in_targets[tensor, dtype] = in_targets.get((tensor, dtype), 0) + 1
    together = joined(records)
    for tensor, dtype, elements in together[:_MAX_TOLD]:
        are, targets_of_it = "is" if elements == 1 else "are", in_targets[tensor, dtype]
        where = f", in {targets_of_it} targets together," if targets_of_it > 1 else ""
        became = _LARGEST.get(dtype, "infinite")
        yield f"{counted(elements, 'element')} of {tensor!r}{where} {are} too large for {dtype} and became {became}"
    if len(together) > _MAX_TOLD:
        elements = sum(overflow.elements for overflow in together[_MAX_TOLD:])
        others = counted(len(together) - _MAX_TOLD, "further tensor")
        yield f"so did {counted(elements, 'element')} of {others}; the report (--report) names all"
