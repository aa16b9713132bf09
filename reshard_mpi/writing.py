"""The second phase of a run: targets are written, each whole or not at all, alone or several processes together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.comm import Comm
from reshard_mpi.division import Share, Work
from reshard_mpi.engine.files import OnBytes
from reshard_mpi.engine.transfer import Span, write_shard
from reshard_mpi.errors import ReshardError, TransformError, as_reshard_error
from reshard_mpi.journal import Journal, Unrecorded
from reshard_mpi.manifest import Manifest
from reshard_mpi.memory import RunMemory
from reshard_mpi.planning.model import Limits, RankPlan
from reshard_mpi.publication import Publication
from reshard_mpi.records import Evidence, TensorSum
from reshard_mpi.report import Failure, Filled, Outcome, Progress, Reserved, TargetReport, Verified
from reshard_mpi.run import Run

# What may go wrong with one target and leave the others whole; anything else is a bug.
_EXPECTED = (ReshardError, OSError, MemoryError)


class Plans(NamedTuple):
    """What is to be written.

    of: the plan of a target. peak_bytes: what that is projected to take. due: the targets that are to be written at
    all, and what their records are to say.
    """

    of: Callable[[int], RankPlan]
    peak_bytes: Mapping[int, int]
    due: Mapping[int, Evidence]


class _Led(NamedTuple):
    """A target that others help to fill, between its reservation and its publication."""

    publication: Publication
    begin: float
    waited_seconds: float


class Writer:
    """What one process of a run does to write its part of the targets.

    works: the work of every process of `comm`. memory: asked for what is done for a target; while others are waited
    for, whoever is in line gets it.
    """

    def __init__(
        self,
        run: Run,
        journal: Journal | Unrecorded,
        works: Sequence[Work],
        comm: Comm,
        plans: Plans,
        memory: RunMemory,
        progress: Progress,
    ) -> None:
        self._run = run
        self._journal = journal
        self._works = works
        self._comm = comm
        self._work = works[comm.rank]
        self._plans = plans
        self._due = plans.due
        self._memory = memory
        self._progress = progress
        self._limits = run.conversion.limits
        self._format = formats.by_name(run.format)
        self._led: dict[int, _Led] = {}

    def write(self) -> Outcome:
        """Write what falls to this process and return what it has led; failures do not stop the others.

        Shared targets are filled last, so that processes that have finished wait as little as can be for others.
        """
        self._progress.assigned(tuple(rank for rank in self._work.leads if rank in self._due))
        if not any(work.shares for work in self._works):
            return self._write_alone()
        with ExitStack() as publications:
            begun = self._reserve(publications)
            together = self._comm.allgather(begun, "reserved")
            alone = self._write_alone()
            parts = self._comm.allgather(self._fill(together), "filled")
            if self._run.request.verify:
                verified = self._comm.allgather(self._verify(together, parts), "verified")
                parts = [part.with_verified(found) for part, found in zip(parts, verified)]
            shared = self._publish(parts)
        return Outcome(failures=begun.failures).joined([alone, shared])

    def _write_alone(self) -> Outcome:
        outcome = Outcome()
        for rank in self._work.alone:
            if rank in self._due:
                outcome = outcome.joined([self._attempt(rank, self._write_target)])
                self._memory.turn()
        return outcome

    def _write_target(self, rank: int) -> Outcome:
        begin = time.monotonic()
        plan, waited_seconds = self._plan(rank)
        self._progress.started(rank, plan.written_bytes)
        with self._journal.writing(rank, self._run.path(rank), self._due[rank]) as publication:
            manifest = self._format.reserve(str(publication.partial), plan.shard)
            filled = _fill(plan, manifest, None, self._limits, self._progress.moved)
            sums: tuple[TensorSum, ...] = ()
            if self._run.request.verify:
                sums = _verified(plan, manifest, None, self._limits)
            self._seal(publication, sums)
        return self._finished(plan, begin, waited_seconds, [filled])

    def _reserve(self, publications: ExitStack) -> Outcome:
        """Make the files of the shared targets that this process leads."""

        def reserve(rank: int) -> Outcome:
            begin = time.monotonic()
            plan, waited_seconds = self._plan(rank)
            writing = self._journal.writing(rank, self._run.path(rank), self._due[rank])
            publication = publications.enter_context(writing)
            manifest = self._format.reserve(str(publication.partial), plan.shard)
            self._led[rank] = _Led(publication, begin, waited_seconds)
            return Outcome(reserved=(Reserved.of(rank, manifest),))

        shared = {share.target for share in self._work.shares}
        ranks = [rank for rank in self._work.leads if rank in shared and rank in self._due]
        outcomes = [self._attempt(rank, reserve) for rank in ranks]
        return Outcome(
            failures=tuple(failure for outcome in outcomes for failure in outcome.failures),
            reserved=tuple(reserved for outcome in outcomes for reserved in outcome.reserved),
        )

    def _fill(self, begun: Sequence[Outcome]) -> Outcome:
        """Fill this process's shares of the targets that have been reserved."""
        reservations = {reserved.rank: reserved for outcome in begun for reserved in outcome.reserved}
        outcomes = []
        for share in self._work.shares:
            reserved = reservations.get(share.target)
            if reserved is not None:

                def fill(rank: int, reserved: Reserved = reserved, share: Share = share) -> Outcome:
                    manifest = reserved.manifest()
                    span = share.range_of(Path(manifest.path).stat().st_size)
                    plan, waited_seconds = self._plan(rank)
                    self._progress.started(rank, span[1] - span[0])
                    filled = _fill(plan, manifest, span, self._limits, self._progress.moved)
                    return Outcome(filled=(filled._replace(waited_seconds=waited_seconds),))

                outcomes.append(self._attempt(share.target, fill))
        return Outcome(
            failures=tuple(failure for outcome in outcomes for failure in outcome.failures),
            filled=tuple(filled for outcome in outcomes for filled in outcome.filled),
        )

    def _verify(self, begun: Sequence[Outcome], parts: Sequence[Outcome]) -> Outcome:
        """Compare this process's shares of the targets that have been filled with their sources."""
        reservations = {reserved.rank: reserved for outcome in begun for reserved in outcome.reserved}
        outcomes = []
        for share in self._work.shares:
            reserved = reservations.get(share.target)
            if reserved is not None and not self._parts_of(share.target, parts)[1]:

                def verify(rank: int, reserved: Reserved = reserved, share: Share = share) -> Outcome:
                    manifest = reserved.manifest()
                    span = share.range_of(Path(manifest.path).stat().st_size)
                    plan, waited_seconds = self._plan(rank)
                    sums = _verified(plan, manifest, span, self._limits)
                    return Outcome(verified=(Verified(rank, sums, waited_seconds),))

                outcomes.append(self._attempt(share.target, verify))
        return Outcome(
            failures=tuple(failure for outcome in outcomes for failure in outcome.failures),
            verified=tuple(verified for outcome in outcomes for verified in outcome.verified),
        )

    def _seal(self, publication: Publication, sums: Sequence[TensorSum]) -> None:
        """Finish a target and put it in place."""
        path = str(publication.partial)
        self._format.seal(path, {one.name: one.value for one in sums}, crc=self._run.request.crc)
        publication.publish(sums)

    def _publish(self, parts: Sequence[Outcome]) -> Outcome:
        """Put the shared targets that this process leads in place, where every other one has done its part."""

        def publish(rank: int) -> Outcome:
            led = self._led[rank]
            filled, failures = self._parts_of(rank, parts)
            if failures:
                return Outcome(failures=failures)
            found = [verified for part in parts for verified in part.verified if verified.rank == rank]
            plan, waited_seconds = self._plan(rank)
            self._seal(led.publication, _joined(found, plan))
            waited_seconds += led.waited_seconds + max((one.waited_seconds for one in found), default=0.0)
            return self._finished(plan, led.begin, waited_seconds, filled)

        return Outcome().joined([self._attempt(rank, publish) for rank in self._led])

    def _parts_of(self, rank: int, parts: Sequence[Outcome]) -> tuple[list[Filled], tuple[Failure, ...]]:
        """Return what every process that shares the target `rank` has filled, and the failures of those that have not.

        parts: what every process says of its own work; in place of one that died, what became of it.
        """
        found: list[Filled] = []
        failures: list[Failure] = []
        for process, (work, part) in enumerate(zip(self._works, parts)):
            if rank not in {share.target for share in work.shares}:
                continue
            own = [filled for filled in part.filled if filled.rank == rank]
            if own and not any(failure.rank == rank for failure in part.failures):
                found += own
                continue
            of_rank = [failure for failure in part.failures if failure.rank == rank]
            of_process = [failure._replace(rank=rank) for failure in part.failures]
            error = TransformError("a process did not fill its part", expected="a whole target")
            unknown = Failure(rank, process, self._comm.hosts[process], error)
            failures.append([*of_rank, *of_process, unknown][0])
        return found, tuple(failures)

    def _plan(self, rank: int) -> tuple[RankPlan, float]:
        """Have the memory that the target `rank` takes; return its plan, and the seconds waited."""
        purpose = f"target rank {rank} of {self._run.request.target}"
        self._memory.to_move(self._plans.peak_bytes[rank], purpose)
        return self._plans.of(rank), self._memory.take_waited_seconds()

    def _attempt(self, rank: int, do: Callable[[int], Outcome]) -> Outcome:
        try:
            return do(rank)
        except _EXPECTED as error:
            return Outcome(failures=(Failure.here(rank, self._comm, as_reshard_error(error, self._run.path(rank))),))

    def _finished(self, plan: RankPlan, begin: float, waited_seconds: float, filled: Sequence[Filled]) -> Outcome:
        report = TargetReport(
            rank=plan.target_rank,
            path=str(self._run.path(plan.target_rank)),
            read_ranks=plan.read_ranks,
            written_bytes=plan.written_bytes,
            needed_bytes=plan.needed_bytes,
            requested_bytes=sum(part.requested_bytes for part in filled),
            mapped_bytes=sum(part.mapped_bytes for part in filled),
            seconds=time.monotonic() - begin,
            engine_seconds=max(part.seconds for part in filled),
            waited_seconds=waited_seconds + max(part.waited_seconds for part in filled),
            leased_bytes=self._plans.peak_bytes[plan.target_rank],
            process=self._comm.rank,
            processes=len(filled),
        )
        self._progress.finished(report)
        return Outcome((report,))


def write_file(plan: RankPlan, format_name: str, path: Path, limits: Limits, on_bytes: OnBytes) -> Filled:
    """Write the shard of `plan` to the new file `path`: reserve, move, seal."""
    module = formats.by_name(format_name)
    filled = _fill(plan, module.reserve(str(path), plan.shard), None, limits, on_bytes)
    module.seal(str(path))
    return filled


def _verified(plan: RankPlan, manifest: Manifest, span: Span | None, limits: Limits) -> tuple[TensorSum, ...]:
    """Return the sums of what has been filled. Raises DamageError if it is not what the sources hold."""
    from reshard_mpi.verification import forget_cached, sums_as_planned

    forget_cached(manifest.path)
    return sums_as_planned(plan, manifest, span, limits)


def _joined(parts: Sequence[Verified], plan: RankPlan) -> tuple[TensorSum, ...]:
    if not parts:
        return ()
    from reshard_mpi.sums import joined_sums

    return joined_sums((part.sums for part in parts), [tensor.spec.name for tensor in plan.tensors])


def _fill(plan: RankPlan, manifest: Manifest, span: Span | None, limits: Limits, on_bytes: OnBytes) -> Filled:
    begin = time.monotonic()
    traffic = write_shard(plan, manifest, span=span, limits=limits, on_bytes=on_bytes)
    return Filled(plan.target_rank, traffic.requested_bytes, traffic.mapped_bytes, time.monotonic() - begin, 0.0)
