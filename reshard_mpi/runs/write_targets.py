"""Write a process's targets of a run (`write_targets`), also files that several processes fill (`SharedTargets`)."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.engine.shard_transfer import OpenTarget
from reshard_mpi.errors import DisagreementError, TransformError
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.publication import Publication, opened_partial
from reshard_mpi.journal.target_records import joined_sums
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.outcome import Failure, Outcome, merge, report_of
from reshard_mpi.runs.scheduling import TargetSlice
from reshard_mpi.runs.target_plans import TargetPlans
from reshard_mpi.runs.target_writer import SliceReport, Writer


def write_targets(plans: TargetPlans) -> Outcome:
    """Write this process's part of a run; return the outcome for the targets it leads. A failure stops no others.

    Shared targets are filled after all others, so that processes wait as little as possible for one another. Memory is
    asked for each target; while this process waits for others of the run, processes in line get it.
    """
    writer, comm = Writer(plans), plans.comm
    plans.progress.display.assigned(tuple(rank for rank in plans.own.leads if rank in plans.to_write))
    if not any(work.slices for work in plans.assignments):
        return writer.write_alone()
    shared = SharedTargets(writer, plans)
    with ExitStack() as publications:
        begun = shared.reserve(publications)
        reserved = {target.rank: target for part in _gathered(comm, begun) for target in part.reserved}
        alone = writer.write_alone()
        parts = _gathered(comm, shared.fill(reserved))
        if plans.run.request.verify:
            verified = _gathered(comm, shared.verify(reserved, parts))
            parts = [filled.joined([compared]) for filled, compared in zip(parts, verified)]
        published = shared.publish(parts)
    return begun.outcome.joined([alone, published])


class Reserved(NamedTuple):
    """A target that several processes are going to fill: its file exists, with everything but the payloads."""

    rank: int
    packed: bytes  # its manifest, compressed, since each process gets it of all targets and needs few
    identity: FileIdentity  # of the file

    @classmethod
    def of(cls, rank: int, manifest: Manifest, identity: FileIdentity) -> Reserved:
        return cls(rank, zlib.compress(pickle.dumps(manifest), level=1), identity)

    def manifest(self) -> Manifest:
        """Return the manifest of the file, with the place of each tensor."""
        manifest: Manifest = pickle.loads(zlib.decompress(self.packed))
        return manifest


class FillReport(NamedTuple):
    """A process's results on shared targets so far, with its failures in `outcome`."""

    outcome: Outcome = Outcome()
    reserved: tuple[Reserved, ...] = ()
    filled: tuple[SliceReport, ...] = ()
    verified: tuple[SliceReport, ...] = ()

    def joined(self, others: Iterable[FillReport]) -> FillReport:
        """Return this and the `others`, of the same process, as one."""
        parts = [self, *others]
        return merge(parts)._replace(outcome=self.outcome.joined(part.outcome for part in parts[1:]))


class _Led(NamedTuple):
    """A shared target that this process leads, between its reservation and its publication. begin: a monotonic time."""

    publication: Publication
    reserved: Reserved
    begin: float
    waited_seconds: float


class SharedTargets:
    """The targets that this process fills together with others of its host."""

    def __init__(self, writer: Writer, plans: TargetPlans) -> None:
        self._writer = writer
        self._plans = plans
        self._run = plans.run
        self._led: dict[int, _Led] = {}

    def reserve(self, publications: ExitStack) -> FillReport:
        """Make the files of the targets that this process leads, with everything but the payloads.

        Args:
            publications: keeps them open until all are published.
        """

        def reserve_one(rank: int) -> FillReport:
            begin = time.monotonic()
            plan, waited_seconds = self._writer.plan_with_memory(rank)
            publication = publications.enter_context(self._writer.writing(rank))
            manifest = self._writer.reserve(publication, plan)
            reserved = Reserved.of(rank, manifest, publication.identity)
            self._led[rank] = _Led(publication, reserved, begin, waited_seconds)
            return FillReport(reserved=(reserved,))

        shared = {each.target for each in self._plans.own.slices}
        ranks = [rank for rank in self._plans.own.leads if rank in shared and rank in self._plans.to_write]
        return FillReport().joined(report_of(FillReport, self._writer.attempt(rank, reserve_one)) for rank in ranks)

    def fill(self, reservations: Mapping[int, Reserved]) -> FillReport:
        """Fill this process's slices of the targets that have been reserved."""

        def fill_one(own: TargetSlice, opened: OpenTarget) -> SliceReport:
            self._plans.progress.display.started(own.target)
            return self._writer.fill_span(opened)

        outcome, filled = self._of_slices(self._plans.own.slices, reservations, fill_one)
        return FillReport(outcome, filled=filled)

    def verify(self, reservations: Mapping[int, Reserved], parts: Sequence[FillReport]) -> FillReport:
        """Compare this process's slices of the targets that all have filled with their sources."""

        def verify_one(own: TargetSlice, opened: OpenTarget) -> SliceReport:
            sums = self._writer.verify(opened, own.bytes_of(opened.plan.written_bytes))
            return SliceReport(own.target, sums=sums)

        filled = [each for each in self._plans.own.slices if not self._parts_of(each.target, parts, verified=False)[1]]
        outcome, verified = self._of_slices(filled, reservations, verify_one)
        return FillReport(outcome, verified=verified)

    def _of_slices(
        self,
        slices: Iterable[TargetSlice],
        reservations: Mapping[int, Reserved],
        do: Callable[[TargetSlice, OpenTarget], SliceReport],
    ) -> tuple[Outcome, tuple[SliceReport, ...]]:
        """Apply a function to each slice whose target has been reserved; return failures, and the results of others.

        Args:
            do: takes the slice, and its target, whose span is the slice's.
        """

        def do_one(own: TargetSlice, rank: int) -> SliceReport:
            plan, waited_seconds = self._writer.plan_with_memory(rank)
            manifest, identity = reservations[rank].manifest(), reservations[rank].identity
            _require_planned_alike(plan, manifest, self._run.request.source)
            with self._opened(rank, manifest, identity) as descriptor:
                span = own.range_of(os.fstat(descriptor).st_size)
                report = do(own, OpenTarget(plan, manifest, descriptor, span))
            if span[0] < span[1]:  # whoever leads the target has looked at the sources at another time
                self._plans.inputs[rank].require_sources_unchanged(rank)
            return report._replace(waited_seconds=waited_seconds)

        there = (each for each in slices if each.target in reservations)
        done = [self._writer.attempt(each.target, partial(do_one, each)) for each in there]
        failed = Outcome().joined(each for each in done if isinstance(each, Outcome))
        return failed, tuple(each for each in done if isinstance(each, SliceReport))

    def _opened(self, rank: int, manifest: Manifest, identity: FileIdentity) -> AbstractContextManager[int]:
        """Open the file of a target that this process, or another one, has reserved."""
        if rank in self._led:
            return nullcontext(self._led[rank].publication.descriptor)
        return opened_partial(self._run.path(rank), Path(manifest.path).name, identity)

    def publish(self, parts: Sequence[FillReport]) -> Outcome:
        """Put the shared targets that this process leads in place, if all other processes have done their parts."""

        def publish_one(rank: int) -> Outcome:
            led = self._led[rank]
            filled, failures = self._parts_of(rank, parts, verified=self._run.request.verify)
            if failures:
                return Outcome(failures=failures)
            compared = [verified for part in parts for verified in part.verified if verified.rank == rank]
            plan, waited_seconds = self._writer.plan_with_memory(rank)
            sums = joined_sums((each.sums for each in compared), plan.tensors.specs.names) if compared else ()
            self._writer.finish(led.publication, led.reserved.manifest(), sums)
            waited_seconds += led.waited_seconds + max((each.waited_seconds for each in compared), default=0.0)
            return self._writer.outcome_of(plan, led.begin, waited_seconds, filled)

        return Outcome().joined([self._writer.attempt(rank, publish_one) for rank in self._led])

    def _parts_of(
        self, rank: int, parts: Sequence[FillReport], *, verified: bool
    ) -> tuple[list[SliceReport], tuple[Failure, ...]]:
        """Return the filled parts of the shared target `rank`, and failures of the processes that have not done theirs.

        Args:
            parts: of all processes; that of a process that died has only the outcome of its death.
            verified: whether parts must have been verified too.
        """
        all_filled: list[SliceReport] = []
        failures: list[Failure] = []
        for process, (work, part) in enumerate(zip(self._plans.assignments, parts)):
            if rank not in {each.target for each in work.slices}:
                continue
            own = [filled for filled in part.filled if filled.rank == rank]
            is_whole = own and (not verified or any(each.rank == rank for each in part.verified))
            if is_whole and not any(failure.rank == rank for failure in part.outcome.failures):
                all_filled += own
                continue
            of_rank = [failure for failure in part.outcome.failures if failure.rank == rank]
            of_process = [failure._replace(rank=rank) for failure in part.outcome.failures]
            error = TransformError(
                "a process did not do its part",
                expected="all of the target filled and verified",
                remedy="mend what failed there first",
            )
            unknown = Failure(rank, process, self._plans.comm.hosts[process], error)
            failures.append([*of_rank, *of_process, unknown][0])
        return all_filled, tuple(failures)


def _gathered(comm: Comm, part: FillReport) -> list[FillReport]:
    """Return the parts of all processes, in their order. part: this process's."""
    return [report_of(FillReport, value) for value in comm.allgather(part)]


def _require_planned_alike(plan: RankPlan, manifest: Manifest, source: str) -> None:
    """Raise DisagreementError if the process that has reserved a shared target has planned other tensors."""
    planned = {spec.name: (spec.dtype, spec.box.shape) for spec in plan.tensors.specs}
    reserved = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    if planned != reserved:
        name = next(name for name in {**planned, **reserved} if planned.get(name) != reserved.get(name))
        raise DisagreementError(
            f"processes have planned target rank {plan.target_rank} differently",
            expected="a source that does not change while it is read",
            got=f"two forms of {name!r}",
            where=source,
            remedy="run the same command again when nothing writes to the source any more",
        )
