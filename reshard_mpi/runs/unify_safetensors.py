"""Merge shards into a few files of whole tensors, by MindSpore's names (`unify`).

`part0.safetensors`, `part1.safetensors` and so on hold the tensors that the source strategy places;
`hyper_param.safetensors` those that it does not, such as step counters; `param_name_map.json`, written last, says which
part holds which tensor. MindSpore's `load_distributed_checkpoint` reads them by these names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.errors import UsageError, wrong_type
from reshard_mpi.filesystem.folders import Folder, make_folders
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.journal.publication import publish_text
from reshard_mpi.journal.records import TargetInputs
from reshard_mpi.journal.target_places import Unrecorded
from reshard_mpi.planning.find_placement import Unlisted
from reshard_mpi.planning.rank_plan import PlannedTensors, RankPlan
from reshard_mpi.planning.shared_facts import require_one_checkpoint
from reshard_mpi.processes.comm import Comm, SerialComm
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.outcome import Outcome, agreed, attempt
from reshard_mpi.runs.overlap import refuse_overlap
from reshard_mpi.runs.preflight import (
    SpaceEstimate,
    SpaceNeed,
    lying_beside,
    may_share,
    require_readable_structure,
    require_room,
    require_same_choice,
    require_short_names,
    stranger_notes,
)
from reshard_mpi.runs.progress import CLOSED, MOVED, Progress, Stage
from reshard_mpi.runs.request import Request, Strategies, TargetFile
from reshard_mpi.runs.run_memory import RunMemory, Workload
from reshard_mpi.runs.scheduling import filled_files, strategy_of
from reshard_mpi.runs.target_writer import target_report, write_whole
from reshard_mpi.runs.transform import plan_alone
from reshard_mpi.text import GIB

FORMAT = "safetensors"
PART, HYPER, MAP = "part{}.safetensors", "hyper_param.safetensors", "param_name_map.json"
# The size up to which MindSpore fills a part.
MOST_BYTES = 3 * GIB

# Called with the name of each tensor; returns whether to take it, or its new name.
Choose = Callable[[str], object]


def request_of_files(request: Request, choose: Choose | None) -> Request:
    """Return the request with the files to write, which are found by planning the whole checkpoint."""
    with RunMemory(lambda: request.allowance, SerialComm(), Progress()) as memory:
        memory.open()
        conversion = _conversion(request, memory, None)
        memory.reserve_for_planning(Workload(conversion, FORMAT), _purpose(request))
        plan = conversion.plan(0, checked=False)
        conversion.require_none_left_behind(
            plan, ShardShare(0, 1), lambda name: choose is None or _chosen(name, choose(name)) is not None
        )
        unified = unified_files(plan, choose)
    # Otherwise tensors that are left out would be placed like those they are named after.
    return request._replace(files=unified, unlisted=request.unlisted if choose is None else Unlisted.DROP)


def _purpose(request: Request) -> str:
    return f"planning {request.target} from {request.source}"


def _conversion(request: Request, memory: RunMemory, strategies: Strategies | None) -> Conversion:
    """Return the conversion of the source to the files that the request lists, or, without such, to one of all."""
    purpose, named = _purpose(request), (request.src_strategy,) if strategies is None else ()
    memory.reserve_for_reading(named, purpose)
    read, files = strategies or Strategies.read(request), request.shard_files()
    memory.reserve_for_reading(named, purpose, files.format)
    names = [[name for name, _ in file.tensors] for file in request.files]
    target = strategy_of(names) if names else read.target
    conversion = Conversion(open_source(files, read.source), target, request.unlisted, replicas=request.replicas)
    memory.on_memory_released(conversion.forget)
    return conversion


def unified_files(plan: RankPlan, choose: Choose | None) -> tuple[TargetFile, ...]:
    """Return the files to write for a checkpoint. plan: of all of it, as one shard.

    Raises UsageError if `choose` gives two tensors one name or leaves none, WrongTypeError if it returns neither a bool
    nor a text.
    """
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    specs = plan.tensors.specs
    for name in specs.names:
        chosen = name if choose is None else _chosen(name, choose(name))
        if chosen is None:
            continue
        other = owners.setdefault(chosen, name)
        if other != name:
            raise UsageError(f"choice_func gives two tensors the name {chosen!r}", got=f"{other!r} and {name!r}")
        names[name] = chosen
    if specs.names and not names:
        raise UsageError("choice_func leaves nothing", expected="True or a name for some tensor", got="False for all")
    kinds = dict(zip(specs.names, specs.kind_ids))
    placed = [name for name in names if name not in plan.loose]
    part_specs = Specs(placed, specs.kinds, [kinds[name] for name in placed])
    parts = filled_files(part_specs, MOST_BYTES) if placed or not names else []
    files = [(PART.format(number), part) for number, part in enumerate(parts)]
    loose = [name for name in names if name in plan.loose]
    return tuple(
        TargetFile(
            file, tuple((name, names[name]) for name in own), sum(specs.kinds[kinds[name]].size_bytes for name in own)
        )
        for file, own in (*files, *([(HYPER, loose)] if loose else []))
    )


def numbers_of(request: Request) -> Sequence[int]:
    """Return the numbers of the files that a request writes: its share of the parts; the first share has all others."""
    parts = [number for number, file in enumerate(request.files) if file.name != HYPER]
    share, shares = request.part or (0, 1)
    others = [number for number in range(len(request.files)) if number not in parts] if share == 0 else []
    return [*parts[share::shares], *others]


def _chosen(name: str, answer: object) -> str | None:
    """Return the new name of a tensor, by what `choose` returned for it; None if the tensor is left out."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool):
        return name if answer else None
    raise wrong_type(f"what choice_func returns for {name!r}", "True, False or a name", answer)


class _PlannedFiles(NamedTuple):
    """What planning has opened. mine: numbers of the files that this process writes. plans: of these, by number."""

    conversion: Conversion
    journal: Unrecorded
    mine: Sequence[int]
    plans: Mapping[int, RankPlan]
    space_needs: tuple[SpaceNeed, ...]
    outcome: Outcome


def unify(
    request: Request, comm: Comm, progress: Progress, memory: RunMemory, strategies: Strategies | None
) -> Outcome:
    """Write the files that `request` lists, or its part of them; return the outcome of all processes of `comm`.

    The request with the first part also writes the map, when its own files are complete. Raises the same error on every
    process if the run is refused, before anything is written. Files that fail later are in the outcome.
    """
    progress.begin(Stage("planning"))
    opened = agreed(lambda: _opened(request, comm, memory, strategies), comm)
    require_same_choice(comm, opened.conversion.source.files)
    plans = opened.plans.values()
    own_bytes = sum(plan.written_bytes for plan in plans)
    facts = [fact for plan in plans for fact in plan.shared_facts]
    gathered = comm.allgather((facts, opened.space_needs, own_bytes))
    require_one_checkpoint(fact for facts, *_ in gathered for fact in facts)
    require_room(needs for _, needs, _ in gathered)
    size_bytes = sum(own_bytes for *_, own_bytes in gathered)
    stage = Stage("writing", size_bytes, len(numbers_of(request)), "file", phases=(MOVED, CLOSED))
    progress.begin(stage, own_bytes, own_bytes)
    has_map = comm.rank == 0 and (request.part is None or request.part[0] == 0)
    agreed(lambda: _withdraw_map(request) if has_map else None, comm)
    outcome = opened.outcome.joined(comm.allgather(_write(request, opened, comm, memory, progress)))
    agreed(lambda: _publish_map(request) if has_map and not outcome.failures else None, comm)
    return outcome


def _opened(request: Request, comm: Comm, memory: RunMemory, strategies: Strategies | None) -> _PlannedFiles:
    """Plan the files that this process writes, and check that they can be written."""
    notes = memory.open().notes
    conversion = _conversion(request, memory, strategies)
    files = conversion.source.files
    mine = numbers_of(request)[comm.rank :: comm.size]
    memory.reserve_for_planning(Workload(conversion, FORMAT, targets=len(mine)), _purpose(request))
    paths = {number: Path(request.target, request.files[number].name) for number in mine}
    refuse_overlap(files, request.target, paths.values())
    journal = Unrecorded(Path(request.target))
    journal.check()
    for number, path in paths.items():
        require_short_names(journal.paths(number, path))
        journal.is_done(number, path)
    if comm.rank == 0:
        every_path = [Path(request.target, file.name) for file in request.files]
        notes = (*notes, *stranger_notes(lying_beside(Path(request.target), "hf", (MAP,), every_path, ())))
    plans, outcome = plan_alone(conversion, mine, notes)
    renamed = {plan.target_rank: _renamed(plan, request.files[plan.target_rank]) for plan in plans}
    space = SpaceEstimate()
    for number, plan in renamed.items():
        require_readable_structure(plan.shard, FORMAT)
        space.add(paths[number], FORMAT, plan.shard, left_bytes=journal.left_bytes(paths[number]))
        memory.require_possible(plan)
    needs = space.needs(comm.size, lambda: may_share(files, FORMAT, Path(request.target, MAP)))
    return _PlannedFiles(conversion, journal, mine, renamed, needs, outcome)


def _renamed(plan: RankPlan, file: TargetFile) -> RankPlan:
    """Return the plan of a file with the new names of its tensors."""
    names = dict(file.tensors)
    groups = tuple(group._replace(names=[names[name] for name in group.names]) for group in plan.tensors.groups)
    return plan._replace(tensors=PlannedTensors(groups, plan.tensors.group_of))


def _write(request: Request, opened: _PlannedFiles, comm: Comm, memory: RunMemory, progress: Progress) -> Outcome:
    """Write this process's files. One that fails does not stop the others."""

    def write(number: int) -> Outcome:
        begin, file, plan = time.monotonic(), request.files[number], opened.plans[number]
        path = Path(request.target, file.name)
        peak_bytes = memory.require_possible(plan)
        while not memory.reserve_for_copying(peak_bytes, f"{path}"):
            plan = _renamed(opened.conversion.plan(number, checked=False), file)
        evidence = TargetInputs.of(plan, opened.conversion.source.files.sources(plan.read_ranks))
        with opened.journal.writing(number, path, evidence, progress.display.say) as publication:
            filled = write_whole(plan, FORMAT, publication, opened.conversion.limits, progress.moved)
        progress.closed(plan.written_bytes)
        progress.completed()
        waited_seconds = memory.take_waited_seconds()
        return Outcome((target_report(plan, path, begin, waited_seconds, peak_bytes, comm.rank, [filled]),))

    outcomes = [attempt(partial(write, number), comm, number) for number in opened.mine]
    return Outcome().joined(outcomes)


def _withdraw_map(request: Request) -> None:
    """Remove the map of an earlier run, whose files will change."""
    make_folders(Path(request.target))
    with Folder.open(Path(request.target)) as folder:
        if folder.remove(MAP):
            folder.sync()


def _publish_map(request: Request) -> None:
    """Write the map: which part holds which tensor, and how many bytes all parts have together."""
    parts = [file for file in request.files if file.name != HYPER]
    total_bytes = sum(file.size_bytes for file in parts)
    weight_map = {name: file.name for file in parts for _, name in file.tensors}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=4)
    with Folder.open(Path(request.target)) as folder:
        publish_text(folder, MAP, text)
