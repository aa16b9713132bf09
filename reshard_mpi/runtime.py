"""A run: which process makes which target, and what happens when one of them cannot.

Every process of a run executes `convert` (alone, as MPI rank, or as local worker): it plans its targets, learns
whether any process found a reason to refuse, and only then writes. Errors are caught target by target and gathered,
so the outcome is the same on every process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from reshard_mpi import discovery, formats, strategy
from reshard_mpi.comm import Comm
from reshard_mpi.conversion import Conversion, assign
from reshard_mpi.engine.files import Traffic
from reshard_mpi.engine.transfer import OnBytes, write_shard
from reshard_mpi.errors import ReshardError, TargetError, UsageError, as_reshard_error
from reshard_mpi.journal import Journal, RunIdentity, Unrecorded
from reshard_mpi.placement import Strategy, unsharded
from reshard_mpi.planning.agreement import (
    differing_beginnings,
    differing_stages,
    require_one_moment,
    require_same_names,
)
from reshard_mpi.planning.model import Limits, RankPlan
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.ranks import check_target_rank
from reshard_mpi.planning.summary import Plan, RankSummary
from reshard_mpi.report import Failure, Outcome, Progress, Silent, TargetReport
from reshard_mpi.request import Request
from reshard_mpi.source import SourceCheckpoint

# Plans kept from the refusal phase to the writing phase; beyond, planning again costs less than the memory would.
_MAX_KEPT_PLANS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """A request that has been looked into: source and strategies are read, the targets are known."""

    request: Request
    conversion: Conversion
    format: str
    targets: tuple[int, ...]

    @classmethod
    def open(cls, request: Request) -> Run:
        """Read strategies and find the shards. Raises a ReshardError for what is wrong with them."""
        source_strategy = strategy.load(request.src_strategy) if request.src_strategy else None
        target_strategy = strategy.load(request.dst_strategy) if request.dst_strategy else unsharded()
        if request.unlisted is Unlisted.DROP and request.dst_strategy is None:
            raise UsageError(
                "--unlisted drop needs a list to go by",
                expected="--dst-strategy with the parameters to keep",
                got="no target strategy",
            )
        _check_prefix(request.prefix)
        files = discovery.find_shards(request.source, request.select)
        source = SourceCheckpoint.open(files, source_strategy)
        conversion = Conversion(source, target_strategy, request.unlisted, request.strict)
        targets = _targets(request, target_strategy, conversion)
        name = request.to or files.format
        run = cls(request, conversion, name, targets)
        run._refuse_writing_to_source()
        return run

    def path(self, target_rank: int) -> Path:
        """Return the final path of one target shard: `rank_<r>/<prefix><r><ending>`."""
        ending = formats.by_name(self.format).SUFFIXES[0]
        return Path(self.request.target, f"rank_{target_rank}", f"{self.request.prefix}{target_rank}{ending}")

    def identity(self) -> RunIdentity:
        request = self.request
        return RunIdentity(
            {
                "source": str(Path(request.source).resolve()),
                "src_strategy": strategy.digest(request.src_strategy) if request.src_strategy else None,
                "dst_strategy": strategy.digest(request.dst_strategy) if request.dst_strategy else None,
                "select": request.select,
                "prefix": request.prefix,
                "to": self.format,
                "unlisted": str(request.unlisted),
                "strict": request.strict,
            }
        )

    def _refuse_writing_to_source(self) -> None:
        target, source = Path(self.request.target).resolve(), Path(self.request.source).resolve()
        files = (Path(path) for paths in self.conversion.source.files.by_rank.values() for path in paths)
        sources = {place.resolve() for path in files for place in (path, path.parent)}
        places = {place.resolve() for rank in self.targets for place in (self.path(rank), self.path(rank).parent)}
        if target == source or sources & places:
            raise TargetError(
                "the target is the source",
                expected="another folder",
                got=self.request.target,
                where=self.request.source,
                remedy="choose a target outside the source; a source is never written to",
            )


def convert(request: Request, comm: Comm, progress: Progress) -> Outcome:
    """Make the targets of `request` that fall to this process; return what all processes of `comm` did.

    Every process of `comm` must call it with the same request. Raises, on every process alike, the error that refused
    the run before anything was written. Targets that failed while they were written are in the outcome.
    """
    process = _Process(request, comm, progress)
    planned = _plan_together(process, comm)
    refuse(comm.allgather(process.begin(), "begun"))
    return Outcome(notes=planned.notes).joined(comm.allgather(process.write(), "written"))


def plan_targets(request: Request, comm: Comm) -> tuple[Plan, Outcome]:
    """Plan the targets of `request` without writing; return the plan and what the user should be told.

    Raises, on every process alike, what `convert` would refuse.
    """
    process = _Process(request, comm, Silent())
    planned = _plan_together(process, comm)
    targets = [target for share in comm.allgather(process.summaries(), "summed up") for target in share]
    return Plan(tuple(sorted(targets, key=lambda target: target.rank))), planned


def _plan_together(process: _Process, comm: Comm) -> Outcome:
    """Have every process plan its targets; raise what refuses the run, on every process alike.

    Returns what is to be said of the plans together.
    """
    outcomes = comm.allgather(process.prepare(), "planned")
    refuse(outcomes)
    for stage in differing_stages(held for outcome in outcomes for held in outcome.held):
        names = comm.allgather(process.names(stage), "named parameters")
        require_same_names({rank: held for share in names for rank, held in share.items()}, process.source)
    together = Outcome().joined(outcomes)
    return replace(together, notes=(*together.notes, *differing_beginnings(together.beginnings, together.notes)))


def refuse(outcomes: list[Outcome]) -> None:
    """Raise the first of the errors that the processes found while planning, if any."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures:
        require_one_moment(moment for outcome in outcomes for moment in outcome.moments)
        return
    first = failures[0]
    others = {failure.rank for failure in failures} - {first.rank, None}
    if first.rank is not None and f"target rank {first.rank}" not in first.error.problem:
        first.error.problem = f"target rank {first.rank}: {first.error.problem}"
    if others:
        first.error.problem += f" (and {len(others)} more {'target is' if len(others) == 1 else 'targets are'} refused)"
    raise first.error


class _Process:
    """What one process of a run does in its two phases."""

    def __init__(self, request: Request, comm: Comm, progress: Progress) -> None:
        self._request = request
        self._comm = comm
        self._progress = progress
        self._to_write: list[int] = []
        self._summaries: list[RankSummary] = []
        self._plans: dict[int, RankPlan] = {}
        self._names: dict[str, tuple[int, int, tuple[str, ...]]] = {}
        self._run: Run | None = None
        self._journal: Journal | Unrecorded | None = None
        self._planned = Outcome()

    def prepare(self) -> Outcome:
        """Plan this process's targets; failures in what it returns refuse the run."""
        try:
            self._run = Run.open(self._request)
            self._journal = _journal(self._run)
            self._journal.check()
            weights = self._run.conversion.target_weights(self._run.targets)
            mine = assign(weights, self._comm.size)[self._comm.rank]
        except (ReshardError, OSError) as error:
            return Outcome(failures=(Failure(None, as_reshard_error(error)),))
        outcome = Outcome(notes=self._run.conversion.source.files.notes)
        outcome = outcome.joined([self._prepare_target(self._run, self._journal, rank) for rank in mine])
        self._planned = outcome
        return outcome

    def begin(self) -> Outcome:
        """Make the target folder ready, if this process has anything to write; failures refuse the run."""
        if self._journal is None:
            raise RuntimeError("begin needs a prepare that succeeded")
        try:
            if self._to_write:
                self._journal.begin()
        except (ReshardError, OSError) as error:
            return Outcome(failures=(Failure(None, as_reshard_error(error)),))
        return Outcome()

    def write(self) -> Outcome:
        """Write this process's targets, each whole or not at all; failures do not stop the others."""
        if self._run is None or self._journal is None:
            raise RuntimeError("write needs a prepare that succeeded")
        outcomes = [self._planned]
        self._progress.assigned(tuple(self._to_write))
        for rank in self._to_write:
            try:
                report = self._write_target(self._run, self._journal, rank)
                outcomes.append(Outcome(targets=(report,)))
            except (ReshardError, OSError, MemoryError) as error:
                failure = Failure(rank, as_reshard_error(error, self._run.path(rank)))
                outcomes.append(Outcome(failures=(failure,)))
        return Outcome().joined(outcomes)

    @property
    def source(self) -> str:
        return self._request.source

    def names(self, stage: int) -> dict[int, tuple[str, ...]]:
        """Return what strategies place on the target ranks of `stage`; of ranks that have the same, one."""
        return {rank: names for at, rank, names in self._names.values() if at == stage}

    def summaries(self) -> list[RankSummary]:
        """Return what the targets that `prepare` planned amount to."""
        return self._summaries

    def _prepare_target(self, run: Run, journal: Journal | Unrecorded, rank: int) -> Outcome:
        try:
            if journal.is_done(rank, run.path(rank)):
                size_bytes = run.path(rank).stat().st_size
                return Outcome((TargetReport(rank, str(run.path(rank)), (), size_bytes, 0, 0, 0, 0.0, skipped=True),))
            plan = run.conversion.plan(rank)
        except (ReshardError, OSError) as error:
            return Outcome(failures=(Failure(rank, as_reshard_error(error)),))
        self._to_write.append(rank)
        self._summaries.append(RankSummary.of(plan, run.conversion.limits))
        if len(self._plans) < _MAX_KEPT_PLANS:
            self._plans[rank] = plan
        self._names.setdefault(plan.held.digest, (plan.stage, rank, plan.placed))
        return Outcome(
            absent=plan.absent,
            notes=plan.notes,
            moments=plan.moments,
            held=(plan.held,),
            beginnings=plan.beginnings,
        )

    def _write_target(self, run: Run, journal: Journal | Unrecorded, rank: int) -> TargetReport:
        begin = time.monotonic()
        plan = self._plans.pop(rank, None) or run.conversion.plan(rank)
        self._progress.started(rank, plan.written_bytes)
        path = run.path(rank)
        with journal.writing(rank, path) as partial:
            traffic = write_file(plan, run.format, partial, run.conversion.limits, self._progress.moved)
        report = TargetReport(
            rank=rank,
            path=str(path),
            read_ranks=plan.read_ranks,
            written_bytes=plan.written_bytes,
            needed_bytes=plan.needed_bytes,
            requested_bytes=traffic.requested_bytes,
            mapped_bytes=traffic.mapped_bytes,
            seconds=time.monotonic() - begin,
        )
        self._progress.finished(report)
        return report


def write_file(plan: RankPlan, format_name: str, path: Path, limits: Limits, on_bytes: OnBytes) -> Traffic:
    """Write the shard of `plan` to the new file `path`: reserve, move, seal."""
    module = formats.by_name(format_name)
    place = module.reserve(str(path), plan.shard)
    traffic = write_shard(plan, place, limits=limits, on_bytes=on_bytes)
    module.seal(str(path))
    return traffic


def _journal(run: Run) -> Journal | Unrecorded:
    request = run.request
    if not request.recorded:
        return Unrecorded(Path(request.target))
    return Journal(Path(request.target), run.identity(), resume=request.resume, overwrite=request.overwrite)


def _check_prefix(prefix: str) -> None:
    if "/" in prefix or "\0" in prefix or prefix.startswith("."):
        raise UsageError(
            "the prefix cannot begin a file name",
            expected="text without '/' that does not start with '.', which would hide the files",
            got=repr(prefix),
        )


def _targets(request: Request, target: Strategy, conversion: Conversion) -> tuple[int, ...]:
    if request.ranks is not None:
        for rank in request.ranks:
            check_target_rank(rank, target)
        return tuple(sorted(set(request.ranks)))
    every = tuple(range(target.world_size))
    if request.part is None:
        return every
    share, shares = request.part
    return tuple(sorted(assign(conversion.target_weights(every), shares)[share]))
