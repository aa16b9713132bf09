"""Compare two checkpoints in numbers, tensor by tensor (`diff_values`).

Whole tensors are dealt out to the processes of the run, the largest first; each is read once, block by block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.value_distance import Tolerance, distance_of, is_comparable
from reshard_mpi.formats.manifest import TensorSpec
from reshard_mpi.formats.nest.nodes import NestError
from reshard_mpi.formats.nest.rebuild_tree import as_json, leaves, values_beside
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.diff import DiffSide, planned_sides, tensor_pairs
from reshard_mpi.runs.outcome import Checked, Outcome, attempt, raise_first_failure
from reshard_mpi.runs.plan_conversion import LIMITS
from reshard_mpi.runs.process_memory import RunMemory
from reshard_mpi.runs.progress import Progress, ProgressStage
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.value_comparison import ComparedType, TensorComparison, ValueComparison, ValueDifference


def diff_values(
    request: Request, comm: Comm, progress: Progress, memory: RunMemory, strategies: Strategies | None
) -> Outcome:
    """Compare the checkpoints `request.source` and `request.target` in numbers.

    What is found is the outcome's `comparison`. Raises a ReshardError, the same on all processes, if the two cannot be
    compared.
    """
    tolerance = Tolerance(request.atol, request.rtol)
    first, second, planned = planned_sides(request, comm, progress, memory, strategies, in_numbers=True)
    own, others = ({spec.name: spec for spec in side.plan.tensors.specs} for side in (first, second))
    common = [spec for name, spec in own.items() if name in others and _are_comparable(spec, others[name])]
    common.sort(key=lambda spec: -spec.size_bytes)
    mine = {spec.name: spec for spec in common[comm.rank :: comm.size]}
    size_bytes, own_bytes = (sum(spec.size_bytes for spec in specs) for specs in (common, mine.values()))
    progress.begin(ProgressStage("comparing", size_bytes, len(common), "tensor"), own_bytes)

    def compare_mine() -> Outcome:
        tensors = [*_compared((first, second), mine, tolerance, progress)]
        values: Sequence[ValueDifference] = ()
        left_out: Sequence[str] = ()
        if comm.rank == 0:
            compared = {spec.name for spec in common}
            for name in dict.fromkeys((*own, *others)):
                if name not in compared:
                    tensors.append(TensorComparison(name, _type_of(own.get(name)), _type_of(others.get(name)), None))
            values = [*_differing_values(first.plan, second.plan, tolerance)]
            left_out = [what for side in (first, second) for what in side.plan.left_out]
        found = ValueComparison(tuple(tensors), tuple(values), tuple(left_out))
        checked = Checked(0, second.path, len(mine), own_bytes, ("the other",))
        return Outcome(comparison=found, checked=(checked,))

    outcomes = comm.allgather(attempt(compare_mine, comm))
    raise_first_failure(outcomes, comm)
    return Outcome(processes=comm.size).joined([planned, *outcomes])


def _are_comparable(first: TensorSpec, second: TensorSpec) -> bool:
    return first.global_shape == second.global_shape and is_comparable(first.dtype, second.dtype)


def _type_of(spec: TensorSpec | None) -> ComparedType | None:
    return None if spec is None else ComparedType(spec.dtype.name, tuple(spec.global_shape))


def _compared(
    sides: tuple[DiffSide, DiffSide], wanted: Mapping[str, TensorSpec], tolerance: Tolerance, progress: Progress
) -> Iterator[TensorComparison]:
    """Yield how far tensors are apart that both sides have."""
    with Files() as files:
        for tensor, other, on_bytes in tensor_pairs(*sides, wanted, progress):
            distance = distance_of(files, tensor, other, LIMITS, tolerance, on_bytes)
            yield TensorComparison(tensor.spec.name, _type_of(tensor.spec), _type_of(other.spec), distance)


def _differing_values(first: RankPlan, second: RankPlan, tolerance: Tolerance) -> Iterator[ValueDifference]:
    """Yield the values beside the tensors that are not the same; numbers may be as far apart as in tensors."""
    ours, theirs = _values(first), _values(second)
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs or not _are_same(ours[name], theirs[name], tolerance):
            yield ValueDifference(name, _as_json(ours, name), _as_json(theirs, name))


def _values(plan: RankPlan) -> dict[str, Any]:
    """Return the values beside tensors by their names: keys and places joined by dots."""
    try:
        return dict(leaves(values_beside(plan.tensors.specs.names, plan.strings)))
    except NestError:
        return dict(plan.strings)  # a damaged text is compared as it is


def _are_same(one: Any, other: Any, tolerance: Tolerance) -> bool:
    numbers = [value for value in (one, other) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2:
        return type(one) is type(other) and bool(one == other)
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    try:
        return math.isfinite(other) and abs(one - other) <= tolerance.atol + tolerance.rtol * abs(other)
    except OverflowError:  # whole numbers that no float can hold
        return False


def _as_json(values: Mapping[str, Any], name: str) -> str | None:
    return json.dumps(as_json(values[name])) if name in values else None
