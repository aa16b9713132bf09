"""Compare two checkpoints tensor by tensor, in any formats: byte by byte (`diff`), or in numbers (`diff_values`).

Each is planned as one full checkpoint, which finds all parts of every tensor and proves that they cover it, as for a
transform. Then the tensors are compared in blocks; they are dealt out to the processes of the run, in numbers the
largest first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.compare_replicas import compare, comparing_bytes
from reshard_mpi.checkpoints.opening import open_source, require_same_choice
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.first_difference import first_difference_of_tensors, value_at
from reshard_mpi.engine.open_files import Files
from reshard_mpi.errors import DifferenceError, SourceError
from reshard_mpi.formats.manifest import NEST, OF_RANKS_ALONE, TensorSpec
from reshard_mpi.formats.nest.nodes import NestError, agree
from reshard_mpi.formats.nest.rebuild_tree import as_json, leaves, values_beside
from reshard_mpi.formats.nest.rebuild_tree import first_difference as first_nest_difference
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.planning.comparison_choice import partition_for
from reshard_mpi.planning.gradient_joining import gradient_texts
from reshard_mpi.planning.rank_plan import RankPlan, TensorPlan
from reshard_mpi.planning.source_flaws import TEXT, UnusableShard, difference_messages
from reshard_mpi.planning.strategy_check import drift_warning
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.maps_and_packing import both_through_map, packings_of_two
from reshard_mpi.runs.outcome import Checked, Failure, Outcome, agreed, attempt, raise_first_failure
from reshard_mpi.runs.planner import LIMITS, Planner
from reshard_mpi.runs.process_memory import RunProcess, Workload
from reshard_mpi.runs.progress import Progress, ProgressStage, SliceCounter
from reshard_mpi.runs.value_comparison import ComparedType, TensorComparison, ValueComparison, ValueDifference
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.text import MIB, format_bytes, shortened

if TYPE_CHECKING:
    from reshard_mpi.engine.value_distance import Tolerance

# Memory for a few blocks of elements as float64, and for numpy itself.
MEASURING_BYTES = 24 * MIB
# Differing tensors described by one process; of more it gives the number.
_MAX_DESCRIBED = 20


class DiffSide(NamedTuple):
    """One of the two checkpoints."""

    path: str  # as the user named it
    source: SourceCheckpoint
    plan: RankPlan  # of all that it holds
    has_values: bool  # whether what it has beside its tensors can be compared


def diff(process: RunProcess) -> Outcome:
    """Compare the source of the request with its target.

    The differences are the outcome's failures. Raises a ReshardError, the same on all processes, if the two cannot be
    compared.
    """
    comm, progress = process.comm, process.progress
    first, second, planned = planned_sides(process)
    specs = {spec.name: spec for spec in second.plan.tensors.specs}
    common = [spec for spec in first.plan.tensors.specs if specs.get(spec.name) == spec]
    mine = common[comm.rank :: comm.size]
    size_bytes, own_bytes = (sum(spec.size_bytes for spec in tensors) for tensors in (common, mine))
    progress.begin(ProgressStage("comparing", size_bytes, len(common), "tensor"), own_bytes)
    unlike = _unlike(first, second) if comm.rank == 0 else ()
    differences = attempt(lambda: [*unlike, *_differences(first, second, mine, progress)], comm)
    if isinstance(differences, Outcome):
        outcome = differences.joined([planned])
    else:
        failures = tuple(Failure.here(None, comm, error) for error in differences)
        checked = Checked(0, second.path, len(mine), sum(spec.size_bytes for spec in mine), ("the other",))
        outcome = planned._replace(failures=failures, checked=(checked,))
    return Outcome(processes=comm.size).joined(comm.allgather(outcome))


def planned_sides(process: RunProcess, *, in_numbers: bool = False) -> tuple[DiffSide, DiffSide, Outcome]:
    """Plan both sides, and compare the replicas of each; return them, and an outcome with notes and warnings.

    Args:
        in_numbers: whether they are to be compared in numbers, and not byte by byte.
    """
    comm, progress = process.comm, process.progress
    progress.begin(ProgressStage("planning"))
    first, second, planned = agreed(lambda: _planned(process, in_numbers=in_numbers), comm)
    require_same_choice(comm, first.source.files, second.source.files)
    if comm.rank == 0:
        progress.display.reading(first.source.summary_text)
    lost = compare_copies([(side.source, side.plan) for side in (first, second)], process)
    return first, second, planned.joined([Outcome(lost=lost)])


def compare_copies(
    planned: Sequence[tuple[SourceCheckpoint, RankPlan]], process: RunProcess
) -> tuple[UnusableShard, ...]:
    """Compare the replicas in checkpoints that must be the same before one stands for all, as a transform does.

    Args:
        planned: each with the plan of all that it holds.

    Returns the shards that could not be read. Raises, the same on all processes, what `compare` raises.
    """
    if not any(plan.to_compare for _, plan in planned):
        return ()
    comm, progress = process.comm, process.progress
    mine = [list(partition_for(plan.to_compare, comm.rank, comm.size)) for _, plan in planned]
    size_bytes = sum(alike.size_bytes for _, plan in planned for alike in plan.to_compare)
    own_bytes = sum(alike.size_bytes for of_side in mine for alike in of_side)
    progress.begin(ProgressStage("comparing copies", size_bytes), own_bytes)

    def compare_mine() -> tuple[UnusableShard, ...]:
        counted = SliceCounter(progress.moved, own_bytes)
        lost = [lost for (source, _), own in zip(planned, mine) for lost in compare(source, own, LIMITS, counted.add)]
        counted.end()
        return tuple(lost)

    return agreed(compare_mine, comm)


class PlannedWhole(NamedTuple):
    """All that a checkpoint holds, planned as one full checkpoint to be compared with something."""

    plan: RankPlan
    peak_bytes: int  # the memory that comparing it takes
    notes: tuple[str, ...]  # on what its shards do not hold alike
    warnings: tuple[str, ...]
    drift: tuple[str, ...]  # the warning of replicas that have drifted apart, if they have

    @classmethod
    def of(cls, planner: Planner, also_read: SourceCheckpoint, process: RunProcess, purpose: str) -> PlannedWhole:
        """Plan a checkpoint, with the memory for that, and look whether its shards agree on tensors that several hold.

        Args:
            also_read: the one that it is compared with, or itself.
        """
        comm, memory, path = process.comm, process.memory, planner.source.files.path
        memory.reserve_for_planning(Workload(planner, also_read.files.format, also_read=also_read), purpose)
        findings = planner.sample_findings(process=comm.rank, processes=comm.size)
        plan = planner.plan(0, checked=False)
        planner.require_none_left_behind(plan, ShardShare(comm.rank, comm.size))
        of_ranks = findings.unlisted
        if comm.rank == 0:
            own, own_plan = planner, plan
            if planner.mapped is not None:
                own = planner.mapped.original
                own_plan = own.plan(0, checked=False)
            of_ranks += own.with_values_compared(own_plan).differing
        peak_bytes = memory.possible_peak_bytes(plan) + (comparing_bytes(LIMITS) if plan.to_compare else 0)
        drift = (drift_warning(findings.drifted),) if findings.drifted else ()
        found = difference_messages(of_ranks, path)
        return cls(plan, peak_bytes, found.notes, found.warnings, drift)


def _planned(process: RunProcess, *, in_numbers: bool) -> tuple[DiffSide, DiffSide, Outcome]:
    """Return both sides, planned, and an outcome with the notes and warnings on them."""
    request, comm, memory, *_ = process
    governor, purpose = memory.lease().governor, f"comparing {request.source} with {request.target}"
    process.reserve_for_reading(purpose)
    read = process.read_strategies()
    first_files = request.shard_files()
    second_files = discovery.find_shards(request.target, role="other")
    if not formats.info(second_files.format).knows_file_count:
        raise SourceError(
            f"nothing in a {formats.title(second_files.format)} tells whether its last files are missing",
            expected="it as the first of the two, with --src-files N",
            got="it as the second",
            where=second_files.path,
            remedy="compare them the other way round",
        )
    process.reserve_for_reading(purpose, first_files.format, second_files.format)
    given = None if request.dst_strategy is None else read.target
    sources = open_source(first_files, read.source), open_source(second_files, given)
    policy = Policy(replicas=request.replicas, accumulated=request.accumulated)
    as_they_are = Planner(sources[0], unsharded(), policy), Planner(sources[1], unsharded(), policy)
    packings = packings_of_two(*sources)
    planners, require_some = both_through_map(request, *as_they_are, packings)
    memory.free_with(*(planner.forget for planner in planners))
    wholes = [PlannedWhole.of(planner, other, process, purpose) for planner, other in zip(planners, reversed(sources))]
    plans = [whole.plan for whole in wholes]
    require_some(_names(planners, plans))
    mapped = planners[0].mapped
    if mapped is not None and comm.rank == 0:
        mapped.check_values()
    peak_bytes = sum(whole.peak_bytes for whole in wholes)
    while not memory.reserve_peak(peak_bytes + (MEASURING_BYTES if in_numbers else 0), purpose):
        plans = [planner.plan(0, checked=False) for planner in planners]
    paths = request.source, request.target
    first, second = (DiffSide(*each, not any(packings)) for each in zip(paths, sources, plans))
    notes = [*plans[0].notes] if mapped is not None else []
    notes += (note for plan in plans for note in plan.notes if note.startswith(TEXT))
    for source, whole in zip(sources, wholes):
        notes += (f"{source.files.path}: {note}" for note in whole.notes)
    for source, plan in zip(sources, plans):
        notes += (f"{source.files.path}: {note}" for note in gradient_texts(request.accumulated, plan.gradients))
    notes += (*first_files.notes, *second_files.notes, *governor.notes)
    if any(packings):
        notes += _other_values(*(source.files.format for source in sources))
    elif not in_numbers:
        notes += _other_texts(*plans)
    outcome = Outcome(
        notes=tuple(dict.fromkeys(notes)),
        lost=(*plans[0].lost, *plans[1].lost),
        modified=(*sources[0].files.modified, *sources[1].files.modified),
        other_warnings=tuple(_warnings(sources, wholes, plans)),
    )
    return first, second, outcome


def _warnings(
    sources: Sequence[SourceCheckpoint], wholes: Sequence[PlannedWhole], plans: Sequence[RankPlan]
) -> Iterator[str]:
    """Yield the warnings on both sides, kind by kind."""
    for source, whole in zip(sources, wholes):
        yield from whole.drift
        yield from (f"{source.files.path}: {warning}" for warning in whole.warnings)
    for source in sources:
        yield from source.files.warnings
    for plan in plans:
        yield from plan.warnings
    for plan in plans:
        yield from (text for text in plan.left_out if text.endswith(OF_RANKS_ALONE))


def _names(planners: Sequence[Planner], plans: Sequence[RankPlan]) -> list[str]:
    """Return the names of all tensors of both, taken or not."""
    left_out = (name for each in planners if each.mapped is not None for name in each.mapped.left_out)
    return list(dict.fromkeys((*(spec.name for plan in plans for spec in plan.tensors.specs), *left_out)))


def _other_values(*format_names: str) -> Iterator[str]:
    """Yield a note on each format that has values beside the tensors in a form of its own."""
    for name in format_names:
        if formats.info(name).packs:
            yield f"values beside the tensors are not compared: a {formats.title(name)} has some of its own"


def _other_texts(first: RankPlan, second: RankPlan) -> Iterator[str]:
    """Yield a note if the two do not hold the same strings."""
    names = sorted({**first.strings, **second.strings})
    differing = [name for name in names if first.strings.get(name) != second.strings.get(name)]
    if NEST in differing:
        differing.remove(NEST)
        ours, theirs = first.strings.get(NEST), second.strings.get(NEST)
        if not agree(ours, theirs):
            where = first_nest_difference(ours, theirs)
            yield f"values beside the tensors differ: {where or 'how they are nested, or the order of their keys'}"
    if differing:
        yield f"texts beside the tensors differ: {shortened(list(map(repr, differing)))}"


def _uncompared(plan: RankPlan) -> list[str]:
    """Return words on what cannot be compared, without the states of ranks that no other layout has."""
    return [what for what in plan.left_out if not what.endswith(OF_RANKS_ALONE)]


def _unlike(first: DiffSide, second: DiffSide) -> Iterator[DifferenceError]:
    """Yield tensors that cannot be compared, tensors in one checkpoint only, and differing types or shapes."""
    for side in (first, second):
        for what in _uncompared(side.plan):
            problem = f"not all that is in {side.path} can be compared"
            yield DifferenceError(problem, expected="tensors and plain data alone", got=what, where=side.path)
    first_specs, second_specs = ({spec.name: spec for spec in side.plan.tensors.specs} for side in (first, second))
    pairs = ((first, second, first_specs, second_specs), (second, first, second_specs, first_specs))
    for side, other, own, others in pairs:
        alone = [repr(name) for name in own if name not in others]
        if alone:
            yield DifferenceError(
                f"{len(alone)} {'tensor is' if len(alone) == 1 else 'tensors are'} in one of them only",
                expected=f"the tensors of {side.path} in {other.path} as well",
                got=f"not there: {shortened(alone)}",
                where=other.path,
            )
    unlike = [name for name, spec in first_specs.items() if second_specs.get(name, spec) != spec]
    for name in unlike[:_MAX_DESCRIBED]:
        yield DifferenceError(
            f"{name!r} is of another type or shape",
            expected=f"{_described(first_specs[name])}, as in {first.path}",
            got=_described(second_specs[name]),
            where=second.path,
        )
    if len(unlike) > _MAX_DESCRIBED:
        yield DifferenceError(f"{len(unlike) - _MAX_DESCRIBED} more tensors are of another type or shape")


def tensor_pairs(
    first: DiffSide, second: DiffSide, names: Container[str], progress: Progress
) -> Iterator[tuple[TensorPlan, TensorPlan, OnBytes]]:
    """Yield tensors that both sides have, by names, and a function to be told how many bytes have been compared."""
    others = {tensor.spec.name: tensor for tensor in second.plan.tensors if tensor.spec.name in names}
    for tensor in first.plan.tensors:
        other = others.get(tensor.spec.name)
        if other is not None:
            counted = SliceCounter(progress.moved, tensor.spec.size_bytes)
            yield tensor, other, counted.add
            counted.end()
            progress.completed()


def _differences(
    first: DiffSide, second: DiffSide, specs: Sequence[TensorSpec], progress: Progress
) -> Iterator[DifferenceError]:
    """Yield the first differing element of each of the tensors `specs` that differs."""
    differing = 0
    with Files() as files:
        for tensor, other, on_bytes in tensor_pairs(first, second, {spec.name for spec in specs}, progress):
            element = first_difference_of_tensors(files, tensor, other, LIMITS, on_bytes)
            if element is None:
                size = format_bytes(tensor.spec.size_bytes)
                progress.display.detail(f"{tensor.spec.name!r} is the same: {_described(tensor.spec)}, {size}")
                continue
            differing += 1
            if differing <= _MAX_DESCRIBED:
                yield DifferenceError(
                    f"{tensor.spec.name!r} differs at element {list(element)}",
                    expected=value_at(files, tensor, element, LIMITS),
                    got=value_at(files, other, element, LIMITS),
                    where=f"{first.path} and {second.path}",
                )
    if differing > _MAX_DESCRIBED:
        yield DifferenceError(f"{differing - _MAX_DESCRIBED} more tensors differ")


def _described(spec: TensorSpec) -> str:
    return f"{spec.dtype.name} of shape {list(spec.global_shape)}"


def diff_values(process: RunProcess) -> Outcome:
    """Compare the source and the target of the request in numbers.

    What is found is the outcome's `comparison`. Raises a ReshardError, the same on all processes, if the two cannot be
    compared.
    """
    from reshard_mpi.engine.value_distance import Tolerance, is_comparable  # it loads numpy

    def are_comparable(spec: TensorSpec, other: TensorSpec) -> bool:
        return spec.global_shape == other.global_shape and is_comparable(spec.dtype, other.dtype)

    request, comm, progress = process.request, process.comm, process.progress
    tolerance = Tolerance(request.atol, request.rtol)
    first, second, planned = planned_sides(process, in_numbers=True)
    own, others = ({spec.name: spec for spec in side.plan.tensors.specs} for side in (first, second))
    common = [spec for name, spec in own.items() if name in others and are_comparable(spec, others[name])]
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
            values = [*_differing_values(first.plan, second.plan, tolerance)] if first.has_values else ()
            left_out = [what for side in (first, second) for what in _uncompared(side.plan)]
        found = ValueComparison(tuple(tensors), tuple(values), tuple(left_out))
        checked = Checked(0, second.path, len(mine), own_bytes, ("the other",))
        return Outcome(comparison=found, checked=(checked,))

    outcomes = comm.allgather(attempt(compare_mine, comm))
    raise_first_failure(outcomes, comm)
    return Outcome(processes=comm.size).joined([planned, *outcomes])


def _type_of(spec: TensorSpec | None) -> ComparedType | None:
    return None if spec is None else ComparedType(spec.dtype.name, tuple(spec.global_shape))


def _compared(
    sides: tuple[DiffSide, DiffSide], wanted: Mapping[str, TensorSpec], tolerance: Tolerance, progress: Progress
) -> Iterator[TensorComparison]:
    """Yield how far tensors are apart that both sides have."""
    from reshard_mpi.engine.value_distance import distance_of

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
