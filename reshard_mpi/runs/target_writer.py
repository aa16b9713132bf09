"""Write single targets for `write_targets`, each whole or not at all (`Writer`): one by one, or some side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard_mpi import formats
from reshard_mpi.engine.open_files import Staging, sync_and_drop_cache
from reshard_mpi.engine.shard_transfer import OpenTarget, is_transposed, last_of, write_shard
from reshard_mpi.errors import ShardError, TransformError, told
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import Format
from reshard_mpi.formats.structure import digest_besides
from reshard_mpi.journal.publication import Publication
from reshard_mpi.journal.target_records import TensorSum
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.runs.outcome import Outcome, Overflow, TargetReport, attempt, joined_overflows
from reshard_mpi.runs.target_plans import TargetPlans

if TYPE_CHECKING:
    from reshard_mpi.engine.checksums import Shown
    from reshard_mpi.engine.source_ranges import SharedReading
    from reshard_mpi.journal.staged_parts import StagedParts
    from reshard_mpi.runs.recorded_runs import RecordedTensor


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


class SliceReport(NamedTuple):
    """One process's slice of a target that has been filled, or read back and compared with its sources."""

    rank: int
    waited_seconds: float = 0.0
    requested_bytes: int = 0
    store_copied_bytes: int = 0
    mapped_bytes: int = 0
    seconds: float = 0.0
    overflows: tuple[Overflow, ...] = ()
    sums: tuple[TensorSum, ...] = ()  # of the tensors


T = TypeVar("T")


def _shown_by_store(staged: StagedParts, recorded: Sequence[RecordedTensor]) -> Shown:
    """Return how much of a filled target needs no look at its sources: recorded sums, or copied parts, show it.

    Raises ShardError if a tensor has not the recorded sum.
    """
    from reshard_mpi.engine.checksums import Shown
    from reshard_mpi.runs.recorded_runs import require_as_recorded

    require_as_recorded(recorded, staged)
    return Shown(staged.copied_spans, {tensor.spec.name: tensor.value for tensor in recorded})


def _next_of(steps: Generator[float, None, Outcome]) -> float | Outcome:
    """Take a step; return the share that is written, or the outcome at the end."""
    try:
        return next(steps)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


class Writer:
    """Writes targets of a run in one process; memory is asked for each of them."""

    def __init__(self, plans: TargetPlans) -> None:
        self._plans = plans
        self._run = plans.run
        self._progress = plans.progress
        self._limits = plans.run.planner.limits
        self._format = formats.by_name(plans.run.format)

    def write_alone(self) -> Outcome:
        """Write the targets that this process makes alone; return their outcome."""
        outcomes: list[Outcome] = []
        for ranks in self._plans.side_by_side():
            outcomes += self._write_side_by_side(ranks)
            self._plans.memory.lease().release_if_contended()
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
                result = self.attempt(rank, lambda rank: _next_of(steps[rank]))
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
        plan, waited_seconds = self.plan_with_memory(rank, together)
        self._progress.display.started(rank)
        with self.writing(rank) as publication:
            if self._run.is_streamed:
                self._choose_place(publication, plan)
            manifest = self.reserve(publication, plan)
            # tensors that are verified by sums which their sources have in an object store
            sums_in_store = self._plans.recorded_sums
            recorded = [] if sums_in_store is None else sums_in_store.tensors(plan.tensors, manifest)
            staging = self._staged(publication, plan, manifest, recorded)
            opened = OpenTarget(plan, manifest, publication.descriptor)
            if reading is not None:
                reading.add(opened, staging)
            yield 0.0
            filled = yield from self._fill(opened, staging, reading)
            sums: tuple[TensorSum, ...] = ()
            if self._run.request.verify:
                sums = self.verify(opened, plan.written_bytes, staging, recorded)
            self.finish(publication, manifest, sums)
            filled = filled._replace(store_copied_bytes=publication.store_copied_bytes)
        return self.outcome_of(plan, begin, waited_seconds, [filled], together)

    def fill_span(self, opened: OpenTarget) -> SliceReport:
        """Fill a span of a file that other processes fill too."""
        with self._reading() as reading:
            if reading is not None:
                reading.add(opened, None)
            return last_of(self._fill(opened, None, reading))

    def _fill(
        self, opened: OpenTarget, staging: Staging | None, reading: SharedReading | None
    ) -> Generator[float, None, SliceReport]:
        """Write the payloads of a target; yield after each step the share that is written."""
        begin, plan, ahead = time.monotonic(), opened.plan, None if reading is None else reading.ahead
        moved = self._progress.moved
        traffic = yield from write_shard(opened, limits=self._limits, on_bytes=moved, staging=staging, ahead=ahead)
        seconds = time.monotonic() - begin
        overflows = tuple(
            Overflow(spec.name, spec.dtype.name, traffic.overflows[spec.name])
            for spec in (plan.tensors.specs if traffic.overflows else ())
            if spec.name in traffic.overflows
        )
        return SliceReport(plan.target_rank, 0.0, traffic.requested_bytes, 0, traffic.mapped_bytes, seconds, overflows)

    def verify(
        self,
        opened: OpenTarget,
        size_bytes: int,
        staged: StagedParts | None = None,
        recorded: Sequence[RecordedTensor] = (),
    ) -> tuple[TensorSum, ...]:
        """Return the sums of the tensors in the span that has been filled, as they lie on the disk.

        Args:
            size_bytes: how many bytes of the target this process has written.
            staged: what a store has copied of it. recorded: its tensors that have recorded sums.

        Raises DamageError if they differ from their sources, ShardError if one has not the recorded sum.
        """
        from reshard_mpi.engine.checksums import NOTHING_SHOWN
        from reshard_mpi.runs.check_sums import sums_as_planned

        plan, manifest, descriptor, span = opened
        sync_and_drop_cache(descriptor)
        self._progress.synced(size_bytes)
        shown = NOTHING_SHOWN if staged is None else _shown_by_store(staged, recorded)
        return sums_as_planned(plan, manifest, span, self._limits, self._progress.read_back, shown)

    def _reading(self) -> AbstractContextManager[SharedReading | None]:
        """Have what lies in an object store fetched before it is needed; None for files."""
        if not is_object_path(self._run.request.source):
            return nullcontext()
        from reshard_mpi.engine.source_ranges import SharedReading

        return closing(SharedReading(self._limits))

    def writing(self, rank: int) -> AbstractContextManager[Publication]:
        path, say = self._run.path(rank), self._progress.display.say
        return self._plans.journal.writing(rank, path, self._plans.inputs[rank], say)

    def reserve(self, publication: Publication, plan: RankPlan) -> Manifest:
        """Write all of a target but its payloads; return its manifest, with the place of each tensor."""
        shard = plan.shard._replace(with_sums=self._run.request.verify)
        return self._format.reserve(publication.descriptor, str(publication.partial), shard)

    def _choose_place(self, publication: Publication, plan: RankPlan) -> None:
        """Write a transposed target to the disk before it is sent: its parts are complete only when all are filled."""
        from reshard_mpi.journal.object_journal import ObjectPublication

        assert isinstance(publication, ObjectPublication)
        if any(is_transposed(group.tensor(0), self._limits) for group in plan.tensors.groups):
            publication.move_to_disk()

    def _staged(
        self, publication: Publication, plan: RankPlan, manifest: Manifest, recorded: Sequence[RecordedTensor]
    ) -> StagedParts | None:
        """Begin to send a target that is written to an object store; None for a file.

        Args:
            recorded: tensors whose sums are known: where the store copies them, they are read only if the format itself
                sums them.
        """
        if not is_object_path(self._run.request.target):
            return None
        from reshard_mpi.engine.source_ranges import copied_runs
        from reshard_mpi.journal.object_journal import ObjectPublication
        from reshard_mpi.runs.recorded_runs import spans_of

        assert isinstance(publication, ObjectPublication)
        is_summed = self._run.request.crc or formats.info(self._run.format).sums_payloads
        unread = () if is_summed or not recorded else spans_of(recorded)
        return publication.stage(manifest, copied_runs(plan.tensors, manifest), unread)

    def finish(self, publication: Publication, manifest: Manifest, sums: Sequence[TensorSum]) -> None:
        """Seal a target that is filled, read its structure back, and publish it."""
        sums_by_name = {tensor.name: tensor.value for tensor in sums}
        self._format.seal(publication.descriptor, manifest.path, sums_by_name, crc=self._run.request.crc)
        require_as_meant(self._format, publication, manifest, sums_by_name)
        is_verified = self._run.request.verify
        if is_verified and formats.info(self._run.format).packs:
            manifest = self._format.locate(manifest.path)
            if manifest.tensors.keys() != sums_by_name.keys():
                # Whoever reads the file by itself finds vectors, whose checksums are among its other bytes; only the
                # plan knows whose parts they are.
                sums = ()
        file = SourceFile(manifest.path, publication.descriptor)
        besides = digest_besides(file, manifest.tensors.payload_spans()) if is_verified else ""
        publication.publish(sums, besides)

    def plan_with_memory(self, rank: int, together: Sequence[int] = ()) -> tuple[RankPlan, float]:
        """Wait for the memory that a target takes; return its plan, and the seconds waited.

        Args:
            together: all targets that are written side by side with it, and the target itself; none: it alone.
        """
        purpose = f"target rank {rank} of {self._run.request.target}"
        self._plans.memory.reserve_peak(self._plans.peak_bytes_of(together or (rank,)), purpose)
        return self._plans.plan(rank), self._plans.memory.lease().take_waited_seconds()

    def attempt(self, rank: int, do: Callable[[int], T]) -> T | Outcome:
        return attempt(partial(do, rank), self._plans.comm, rank, self._run.path(rank))

    def outcome_of(
        self,
        plan: RankPlan,
        begin: float,
        waited_seconds: float,
        filled: Sequence[SliceReport],
        together: Sequence[int] = (),
    ) -> Outcome:
        """Return the outcome of a target that is complete now.

        Args:
            begin: a monotonic time.
            filled: its parts.
            together: as for `plan_with_memory`.
        """
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
            leased_bytes=self._plans.peak_bytes_of(together or (rank,)),
            process=self._plans.comm.rank,
            processes=len(filled),
            overflows=joined_overflows(overflow for part in filled for overflow in part.overflows),
        )
        self._progress.closed(plan.written_bytes)
        self._progress.finished(report)
        return Outcome((report,))
