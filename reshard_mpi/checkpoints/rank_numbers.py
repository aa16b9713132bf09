"""Whether the numbers in the names of shards may be those of ranks, hosts, devices or the like, or must be steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Where ranks have numbers of their own in any order, they are no larger: a host has that many devices.
_SMALL = 16
# Seconds since 1970 have ten digits, a date with the time has twelve or fourteen: ranks save one after another.
_TIME = 10**9


def may_be_of_ranks(numbers: Mapping[int, int]) -> bool:
    """Tell whether numbers by rank, not all the same, may say which rank it is, and not which of several checkpoints.

    They may if counting ranks gives them, as that of the host or the device, of the tensor-parallel or the pipeline
    rank, from any number on; if each rank has a small one of its own; or if they are times.
    """
    ranks = max(numbers) + 1
    if min(numbers.values()) >= _TIME:
        return True
    if len(set(numbers.values())) == len(numbers) and max(numbers.values()) < max(2 * ranks, _SMALL):
        return True
    return any(_is_counted(numbers, run, cycle) for run in _steps(ranks) for cycle in _steps(-(-ranks // run)))


def _is_counted(numbers: Mapping[int, int], run: int, cycle: int) -> bool:
    """Tell whether numbers are `rank // run % cycle`, from any number on."""
    counted = ((number - rank // run % cycle) for rank, number in numbers.items())
    first = next(counted)
    return first >= 0 and all(difference == first for difference in counted)


def _steps(ranks: int) -> Iterator[int]:
    """Yield how many ranks may be alike in something: a divisor of their number, or a power of two if some are lost."""
    yield from {step for step in range(1, ranks + 1) if not ranks % step or not step & step - 1}
