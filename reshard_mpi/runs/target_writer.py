"""Write targets whole or not at all (`Writer`)."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard_mpi import formats
from reshard_mpi.engine.open_files import OnBytes, Staging, sync_and_drop_cache
from reshard_mpi.engine.shard_transfer import Span, last_of, write_shard
from reshard_mpi.errors import DisagreementError, ShardError, TransformError, told
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import Format
from reshard_mpi.formats.structure import digest_besides
from reshard_mpi.journal.publication import Publication, opened_partial
from reshard_mpi.journal.target_records import TensorSum
from reshard_mpi.planning.rank_plan import Limits, RankPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.outcome import Failure, Outcome, Overflow, TargetReport, attempt, joined, merge, record_of
from reshard_mpi.runs.process_memory import RunMemory
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.scheduling import TargetSlice
from reshard_mpi.runs.target_plans import TargetPlans

if TYPE_CHECKING:
    from reshard_mpi.engine.source_ranges import SharedReading
    from reshard_mpi.filesystem.read_ahead import ReadAhead
    from reshard_mpi.journal.object_publication import StagedParts


def require_as_meant(module: Format, publication: Publication, manifest: Manifest, sums: Mapping[str, int]) -> None:
    """Raise TransformError if a sealed target, read back from the disk, has not the intended structure and sums."""
    sync_and_drop_cache(publication.descriptor)
    try:
        module.read_back(manifest)
        found_sums = module.stored_sums(manifest.path) if sums else sums
    except ShardError as error:
        raise _not_as_meant(manifest.path, told(error)) from error
    if found_sums and found_sums != sums:
        raise _not_as_meant(manifest.path, "other sums")


def _not_as_meant(path: str, got: str) -> TransformError:
    return TransformError(
        "what was written is not what lies in the file",
        expected="the structure that was meant",
        got=got,
        where=path,
        remedy="look for a failing disk or memory, and run the same command with --resume",
    )


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


class ShareReport(NamedTuple):
    """One process's share of a target that has been filled, or read back and compared with its sources."""

    rank: int
    waited_seconds: float
    requested_bytes: int = 0
    store_copied_bytes: int = 0
    mapped_bytes: int = 0
    seconds: float = 0.0
    overflows: tuple[Overflow, ...] = ()
    sums: tuple[TensorSum, ...] = ()  # of the tensors


class FillReport(NamedTuple):
    """A process's results on shared targets so far. outcome: with its failures."""

    outcome: Outcome = Outcome()
    reserved: tuple[Reserved, ...] = ()
    filled: tuple[ShareReport, ...] = ()
    verified: tuple[ShareReport, ...] = ()

    def joined(self, others: Iterable[FillReport]) -> FillReport:
        """Return this and the `others`, of the same process, as one."""
        parts = [self, *others]
        return merge(parts)._replace(outcome=self.outcome.joined(part.outcome for part in parts[1:]))


def fill_file(
    plan: RankPlan,
    manifest: Manifest,
    descriptor: int,
    span: Span | None,
    limits: Limits,
    on_bytes: OnBytes,
    staging: Staging | None = None,
    ahead: ReadAhead | None = None,
) -> Generator[float, None, ShareReport]:
    """Write the payloads of `plan` to a file that has been reserved; yield after each step the share that is written.

    Args:
        span: only this range of it; None: all.
        on_bytes, staging, ahead: as for `write_shard`.
    """
    begin = time.monotonic()
    traffic = yield from write_shard(
        plan, manifest, descriptor, span=span, limits=limits, on_bytes=on_bytes, staging=staging, ahead=ahead
    )
    seconds = time.monotonic() - begin
    overflows = tuple(
        Overflow(spec.name, spec.dtype.name, traffic.overflows[spec.name])
        for spec in (plan.tensors.specs if traffic.overflows else ())
        if spec.name in traffic.overflows
    )
    return ShareReport(plan.target_rank, 0.0, traffic.requested_bytes, 0, traffic.mapped_bytes, seconds, overflows)


T = TypeVar("T")


def _next_of(steps: Generator[float, None, Outcome]) -> float | Outcome:
    """Take a step; return what it yields, or the outcome at the end."""
    try:
        return next(steps)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


class _Led(NamedTuple):
    """A shared target that this process leads, between its reservation and its publication. begin: a monotonic time."""

    publication: Publication
    reserved: Reserved
    begin: float
    waited_seconds: float


class Writer:
    """Writes one process's part of the targets of a run.

    Attributes:
        memory: asked for each target; while this process waits for others of the run, processes in line get it.
    """

    def __init__(self, plans: TargetPlans, comm: Comm, memory: RunMemory, progress: Progress) -> None:
        self._plans = plans
        self._run = plans.run
        self._comm = comm
        self._memory = memory
        self._progress = progress
        self._limits = plans.run.conversion.limits
        self._format = formats.by_name(plans.run.format)
        self._led: dict[int, _Led] = {}

    def write(self) -> Outcome:
        """Write this process's part; return the outcome for the targets it leads. A failure does not stop the others.

        Shared targets are filled after all others, so that processes wait as little as possible for one another.
        """
        self._progress.display.assigned(tuple(rank for rank in self._plans.own.leads if rank in self._plans.inputs))
        if not any(work.shares for work in self._plans.assignments):
            return self._write_alone()
        with ExitStack() as publications:
            begun = self._reserve(publications)
            reserved = {target.rank: target for part in self._gathered(begun) for target in part.reserved}
            alone = self._write_alone()
            parts = self._gathered(self._fill(reserved))
            if self._run.request.verify:
                verified = self._gathered(self._verify(reserved, parts))
                parts = [filled.joined([compared]) for filled, compared in zip(parts, verified)]
            shared = self._publish(parts)
        return begun.outcome.joined([alone, shared])

    def _gathered(self, part: FillReport) -> list[FillReport]:
        """Return the parts of all processes, in their order. part: this process's."""
        return [record_of(FillReport, value) for value in self._comm.allgather(part)]

    def _write_alone(self) -> Outcome:
        outcomes: list[Outcome] = []
        for ranks in self._plans.side_by_side():
            outcomes += self._write_side_by_side(ranks)
            self._memory.yield_if_contended()
        return Outcome().joined(outcomes)

    def _write_side_by_side(self, ranks: Sequence[int]) -> Iterator[Outcome]:
        """Write targets whole; yield the outcome of each.

        They take turns: the next step is always that of the target with the smallest share written. So all are at
        about the same place of their sources, of which an object store sends each part once.
        """
        with self._reading() as reading, ExitStack() as begun:
            steps = {rank: self._write_target(rank, reading, ranks) for rank in ranks}
            for of_target in steps.values():
                begun.callback(of_target.close)
            shares = dict.fromkeys(ranks, -1.0)  # all are begun before one goes on
            while steps:
                rank = min(steps, key=lambda rank: shares[rank])
                result = self._attempt(rank, lambda rank: _next_of(steps[rank]))
                if isinstance(result, Outcome):
                    del steps[rank]
                    yield result
                else:
                    shares[rank] = result

    def _write_target(
        self, rank: int, reading: SharedReading | None, together: Sequence[int]
    ) -> Generator[float, None, Outcome]:
        """Write a target; yield after each step the share of it that is written. together: all that are written."""
        begin = time.monotonic()
        plan, waited_seconds = self._plan(rank, together)
        self._progress.display.started(rank)
        with self._writing(rank) as publication:
            if self._run.is_streamed:
                self._choose_place(publication, plan)
            manifest = self._reserved(publication, plan)
            staging = self._staged(publication, plan, manifest)
            if reading is not None:
                reading.add(plan.tensors, manifest, None, staging)
            yield 0.0
            filled = yield from fill_file(
                plan,
                manifest,
                publication.descriptor,
                None,
                self._limits,
                self._progress.moved,
                staging,
                None if reading is None else reading.ahead,
            )
            sums: tuple[TensorSum, ...] = ()
            if self._run.request.verify:
                sums = self._verified(plan, manifest, publication.descriptor, None, plan.written_bytes)
            self._seal(publication, manifest, sums)
            filled = filled._replace(store_copied_bytes=publication.store_copied_bytes)
        return self._finished(plan, begin, waited_seconds, [filled])

    def _reserve(self, publications: ExitStack) -> FillReport:
        """Make the files of the shared targets that this process leads, with everything but the payloads."""

        def reserve(rank: int) -> FillReport:
            begin = time.monotonic()
            plan, waited_seconds = self._plan(rank)
            publication = publications.enter_context(self._writing(rank))
            manifest = self._reserved(publication, plan)
            reserved = Reserved.of(rank, manifest, publication.identity)
            self._led[rank] = _Led(publication, reserved, begin, waited_seconds)
            return FillReport(reserved=(reserved,))

        shared = {share.target for share in self._plans.own.shares}
        ranks = [rank for rank in self._plans.own.leads if rank in shared and rank in self._plans.inputs]
        return FillReport().joined(record_of(FillReport, self._attempt(rank, reserve)) for rank in ranks)

    def _fill(self, reservations: Mapping[int, Reserved]) -> FillReport:
        """Fill this process's shares of the targets that have been reserved."""

        def fill(
            share: TargetSlice, plan: RankPlan, manifest: Manifest, descriptor: int, waited_seconds: float
        ) -> FillReport:
            span = share.range_of(os.fstat(descriptor).st_size)
            self._progress.display.started(share.target)
            with self._reading() as reading:
                if reading is not None:
                    reading.add(plan.tensors, manifest, span, None)
                ahead = None if reading is None else reading.ahead
                moved = self._progress.moved
                filled = last_of(fill_file(plan, manifest, descriptor, span, self._limits, moved, None, ahead))
            return FillReport(filled=(filled._replace(waited_seconds=waited_seconds),))

        return self._of_shares(self._plans.own.shares, reservations, fill)

    def _verify(self, reservations: Mapping[int, Reserved], parts: Sequence[FillReport]) -> FillReport:
        """Compare this process's shares of the targets that all have filled with their sources."""

        def verify(
            share: TargetSlice, plan: RankPlan, manifest: Manifest, descriptor: int, waited_seconds: float
        ) -> FillReport:
            span = share.range_of(os.fstat(descriptor).st_size)
            sums = self._verified(plan, manifest, descriptor, span, share.bytes_of(plan.written_bytes))
            return FillReport(verified=(ShareReport(share.target, waited_seconds, sums=sums),))

        filled = [
            share for share in self._plans.own.shares if not self._parts_of(share.target, parts, verified=False)[1]
        ]
        return self._of_shares(filled, reservations, verify)

    def _of_shares(
        self,
        shares: Iterable[TargetSlice],
        reservations: Mapping[int, Reserved],
        do: Callable[[TargetSlice, RankPlan, Manifest, int, float], FillReport],
    ) -> FillReport:
        """Apply a function to each share whose target has been reserved; return the joined results.

        Args:
            do: takes the share, the target's plan and manifest, its open file, and for how long memory was waited for.
        """

        def do_one(share: TargetSlice, rank: int) -> FillReport:
            reserved = reservations[rank]
            plan, waited_seconds = self._plan(rank)
            manifest = reserved.manifest()
            _require_planned_alike(plan, manifest, self._run.request.source)
            with self._opened(rank, reserved) as descriptor:
                report = do(share, plan, manifest, descriptor, waited_seconds)
            # Whoever leads the target has looked at the sources at another time.
            self._plans.inputs[rank].require_sources_unchanged(rank)
            return report

        there = (share for share in shares if share.target in reservations)
        return FillReport().joined(
            record_of(FillReport, self._attempt(share.target, partial(do_one, share))) for share in there
        )

    def _verified(
        self, plan: RankPlan, manifest: Manifest, descriptor: int, span: Span | None, size_bytes: int
    ) -> tuple[TensorSum, ...]:
        """Return the sums of the tensors in a filled `span`. Raises DamageError if they differ from their sources.

        Args:
            size_bytes: how many bytes of the target this process has written.
        """
        from reshard_mpi.runs.check_contents import sums_as_planned

        sync_and_drop_cache(descriptor)
        self._progress.synced(size_bytes)
        return sums_as_planned(plan, manifest, span, self._limits, self._progress.read_back)

    def _reading(self) -> AbstractContextManager[SharedReading | None]:
        """Have what lies in an object store fetched before it is needed; None for files."""
        if not is_object_path(self._run.request.source):
            return nullcontext()
        from reshard_mpi.engine.source_ranges import SharedReading

        return closing(SharedReading(self._limits))

    def _writing(self, rank: int) -> AbstractContextManager[Publication]:
        path, say = self._run.path(rank), self._progress.display.say
        return self._plans.journal.writing(rank, path, self._plans.inputs[rank], say)

    def _reserved(self, publication: Publication, plan: RankPlan) -> Manifest:
        """Write all of a target but its payloads; return its manifest, with the place of each tensor."""
        shard = plan.shard._replace(with_sums=self._run.request.verify)
        return self._format.reserve(publication.descriptor, str(publication.partial), shard)

    def _choose_place(self, publication: Publication, plan: RankPlan) -> None:
        """Keep a target on the disk until it is sent if axes change places in it: all its parts are filled at once."""
        from reshard_mpi.engine.shard_transfer import is_transposed
        from reshard_mpi.journal.object_publication import ObjectPublication

        assert isinstance(publication, ObjectPublication)
        if any(is_transposed(group.tensor(0), self._limits) for group in plan.tensors.groups):
            publication.move_to_disk()

    def _staged(self, publication: Publication, plan: RankPlan, manifest: Manifest) -> StagedParts | None:
        """Begin to send a target that is written to an object store; None for a file, or one that is read again."""
        if not is_object_path(self._run.request.target):
            return None
        from reshard_mpi.engine.source_ranges import copied_runs
        from reshard_mpi.journal.object_publication import ObjectPublication

        assert isinstance(publication, ObjectPublication)
        return publication.stage(manifest, copied_runs(plan.tensors, manifest))

    def _opened(self, rank: int, reserved: Reserved) -> AbstractContextManager[int]:
        """Open the file of a target that this process, or another one, has reserved."""
        if rank in self._led:
            return nullcontext(self._led[rank].publication.descriptor)
        return opened_partial(self._run.path(rank), Path(reserved.manifest().path).name, reserved.identity)

    def _seal(self, publication: Publication, manifest: Manifest, sums: Sequence[TensorSum]) -> None:
        """Finish a target, read its structure back, and put it in place."""
        sums_by_name = {tensor.name: tensor.value for tensor in sums}
        self._format.seal(publication.descriptor, manifest.path, sums_by_name, crc=self._run.request.crc)
        require_as_meant(self._format, publication, manifest, sums_by_name)
        is_verified = self._run.request.verify
        if is_verified and formats.info(self._run.format).packs:
            # Whoever reads the file by itself finds vectors, whose checksums are among its other bytes; only the plan
            # knows whose parts they are.
            manifest, sums = self._format.locate(manifest.path), ()
        file = SourceFile(manifest.path, publication.descriptor)
        besides = digest_besides(file, manifest.tensors.payload_spans()) if is_verified else ""
        publication.publish(sums, besides)

    def _publish(self, parts: Sequence[FillReport]) -> Outcome:
        """Put the shared targets that this process leads in place, if all other processes have done their parts."""

        def publish(rank: int) -> Outcome:
            led = self._led[rank]
            filled, failures = self._parts_of(rank, parts, verified=self._run.request.verify)
            if failures:
                return Outcome(failures=failures)
            compared = [verified for part in parts for verified in part.verified if verified.rank == rank]
            plan, waited_seconds = self._plan(rank)
            self._seal(led.publication, led.reserved.manifest(), _joined(compared, plan))
            waited_seconds += led.waited_seconds + max((share.waited_seconds for share in compared), default=0.0)
            return self._finished(plan, led.begin, waited_seconds, filled)

        return Outcome().joined([self._attempt(rank, publish) for rank in self._led])

    def _parts_of(
        self, rank: int, parts: Sequence[FillReport], *, verified: bool
    ) -> tuple[list[ShareReport], tuple[Failure, ...]]:
        """Return the filled parts of the shared target `rank`, and failures of the processes that have not done theirs.

        Args:
            parts: of all processes; that of a process that died has only the outcome of its death.
            verified: whether parts must have been verified too.
        """
        all_filled: list[ShareReport] = []
        failures: list[Failure] = []
        for process, (work, part) in enumerate(zip(self._plans.assignments, parts)):
            if rank not in {share.target for share in work.shares}:
                continue
            own = [filled for filled in part.filled if filled.rank == rank]
            is_whole = own and (not verified or any(share.rank == rank for share in part.verified))
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
            unknown = Failure(rank, process, self._comm.hosts[process], error)
            failures.append([*of_rank, *of_process, unknown][0])
        return all_filled, tuple(failures)

    def _plan(self, rank: int, together: Sequence[int] = ()) -> tuple[RankPlan, float]:
        """Wait for the memory that a target takes; return its plan, and the seconds waited.

        Args:
            together: all targets that are written side by side with it, and the target itself; none: it alone.
        """
        purpose = f"target rank {rank} of {self._run.request.target}"
        self._memory.reserve_for_copying(self._plans.peak_bytes_of(together or (rank,)), purpose)
        return self._plans.plan(rank), self._memory.take_waited_seconds()

    def _attempt(self, rank: int, do: Callable[[int], T]) -> T | Outcome:
        return attempt(partial(do, rank), self._comm, rank, self._run.path(rank))

    def _finished(self, plan: RankPlan, begin: float, waited_seconds: float, filled: Sequence[ShareReport]) -> Outcome:
        """Return the outcome of a target that is complete now. begin: a monotonic time. filled: its parts."""
        rank = plan.target_rank
        report = TargetReport(
            rank=rank,
            path=str(self._run.path(rank)),
            read_ranks=plan.read_ranks,
            written_bytes=plan.written_bytes,
            needed_bytes=plan.needed_bytes,
            requested_bytes=sum(part.requested_bytes for part in filled),
            store_copied_bytes=sum(part.store_copied_bytes for part in filled),
            mapped_bytes=sum(part.mapped_bytes for part in filled),
            seconds=time.monotonic() - begin,
            engine_seconds=max(part.seconds for part in filled),
            waited_seconds=waited_seconds + max(part.waited_seconds for part in filled),
            leased_bytes=self._plans.peak_bytes[rank],
            process=self._comm.rank,
            processes=len(filled),
            overflows=joined(overflow for part in filled for overflow in part.overflows),
        )
        self._progress.closed(plan.written_bytes)
        self._progress.finished(report)
        return Outcome((report,))


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


def _joined(parts: Sequence[ShareReport], plan: RankPlan) -> tuple[TensorSum, ...]:
    """Return the sums of a target's tensors, joined from its parts' sums."""
    if not parts:
        return ()
    from reshard_mpi.journal.target_records import joined_sums

    return joined_sums((part.sums for part in parts), plan.tensors.specs.names)
