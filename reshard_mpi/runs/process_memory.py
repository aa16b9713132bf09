"""Project the memory that a process of a run needs (`Projection`), and reserve it for that process (`RunProcess`)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from reshard_mpi import formats
from reshard_mpi.checkpoints.source import MAX_KEPT_BYTES, SourceCheckpoint
from reshard_mpi.engine.read import takes_numpy
from reshard_mpi.engine.shard_transfer import are_many, is_gathered, is_transposed
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import entries, is_folder, version_of
from reshard_mpi.formats.locations import Constant, Dequantized, LibraryRead, Reduced
from reshard_mpi.formats.tensor_table import KEPT_OFFSET_BYTES, KEPT_TENSOR_BYTES, TensorEntry
from reshard_mpi.planning.rank_plan import Group, RankPlan, TensorPlan
from reshard_mpi.processes.comm import Comm
from reshard_mpi.processes.governor import Allowance
from reshard_mpi.processes.leases import MPI_BYTES, WORKER_BYTES, ProcessLease
from reshard_mpi.runs.planner import LIMITS, Planner
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB

if TYPE_CHECKING:
    from reshard_mpi.formats.registry import FormatInfo
    from reshard_mpi.runs.check_sums import Summing

# An interpreter with the modules that plan and move bytes, and a thread, but without the command line; what numpy adds.
INTERPRETER_BYTES = 28 * MIB
_NUMPY_BYTES = 15 * MIB
# The client for object storage, its connections, and parts of the structure of files that are kept.
_STORE_BYTES = 44 * MIB
# How many bytes parsing a strategy file takes at most for each of its bytes.
_PARSING_SHARE = 11
# For each parameter of the larger of the two strategies, for both.
_PARAMETER_BYTES = KIB // 2
# For each tensor while its target is planned; for each in a plan that is kept.
_PLANNED_SHARD_BYTES = KIB // 2
_KEPT_PLAN_BYTES = 64
# For each tensor that is made through a map, besides: what it is made of.
_MAPPED_BYTES = KIB
# For each chunk of a tensor that an index lists; most of it only while the index is read, but none is given back.
_LISTED_CHUNK_BYTES = 576
# For each kind of tensors, in a plan and in the structure of several shards.
_KIND_BYTES = 8 * KIB
# For each tensor of a shard that is compared with its own sums, in any format.
_CHECKED_TENSOR_BYTES = 3 * KIB
# For each tensor of a file that a child process reads.
_CHILD_TENSOR_BYTES = 3 * KIB
# For each sum of a tensor.
_SUM_BYTES = KIB
# For each read item beyond the first of a target tensor.
_READ_ITEM_BYTES = 16
# For each read item of a small tensor, if these are moved many at a time.
_BATCHED_BYTES = 32
# What converting or joining elements takes: a block of them before and after, what is between, and tables.
_CONVERSION_BYTES = 8 * MIB
# A window begins and ends with a page, and the kernel maps pages around it that are in memory.
_AROUND_BYTES = 256 * KIB
# How many plans a process keeps, and how large they may be together.
MAX_KEPT_PLANS = 4
MAX_KEPT_PLANS_BYTES = 56 * MIB
# At least one of several workers needs this much besides its own size, or none could finish.
_WORK_BYTES = 24 * MIB
# Memory that a worker keeps until it ends, for each tensor that it has planned.
_PLANNED_BYTES = 3 * KIB


def opening_bytes(strategies: Iterable[str | os.PathLike[str] | None], *source_formats: str) -> int:
    """Return the bytes that a process needs to read strategy files, and then the structure of the first shards.

    Args:
        strategies: paths of the files; None: no such file.
        source_formats: of the shards, once they are known. Modules that planning loads later take as much as the
            structure of 10,000 tensors, so this counts that as well.
    """
    children = max((formats.info(name).child_bytes for name in source_formats), default=0)
    shard_bytes = children + _NUMPY_BYTES if children else 0
    return (
        INTERPRETER_BYTES
        + _loaded_bytes()
        + shard_bytes
        + _PARSING_SHARE * sum(_size_bytes(path) for path in strategies if path is not None)
    )


def checking_bytes(source_format: str, summing: Summing) -> int:
    """Return the bytes that a process needs to check a shard against its own sums."""
    child_bytes, form = 0, formats.info(source_format)
    if form.child_bytes and not summing.is_native:
        child_bytes = _child_bytes(form, summing.tensors) + LIMITS.buffer_bytes + summing.decoding_bytes
    own_bytes = INTERPRETER_BYTES + _loaded_bytes() + (_NUMPY_BYTES if summing.with_numpy else 0)
    return own_bytes + child_bytes + LIMITS.buffer_bytes + summing.tensors * _CHECKED_TENSOR_BYTES


class Workload(NamedTuple):
    """What one process plans, and then writes or compares."""

    planner: Planner  # with at least one shard read
    target_format: str
    targets: int = 1  # the most that are planned
    verify: bool = False  # whether targets are compared with their sources afterwards
    also_read: SourceCheckpoint | None = None  # is compared with the sources; then nothing is written
    is_streamed: bool = False  # whether targets are sent to an object store while they are filled


class Projection(NamedTuple):
    """The memory that a conversion takes in one process."""

    planning_bytes: int  # the most while it plans
    base_bytes: int  # an interpreter with its libraries, and what has been read and planned
    tensor_bytes: int  # for each tensor that is written, in this program and in the library of the format
    compares: bool  # whether the target is read as well as its sources, and all of them through windows
    has_numpy: bool  # whether base_bytes includes numpy
    decoding_bytes: int = 0  # the most that decoding a tensor of the target takes
    # whether the target is written: many small tensors are then moved in batches, and one that is compared is summed
    writes: bool = True
    staged_bytes: int = 0  # the most of a target that lies in memory, where it is sent while it is filled

    @classmethod
    def of(cls, work: Workload) -> Projection:
        """Return the projection of a process's work."""
        planner, target_format, targets, verify, also_read, is_streamed = work
        source, target = planner.planned_source, planner.target
        source_form, target_form = formats.info(source.files.format), formats.info(target_format)
        per_shard, has_numpy = source.stats.tensors, not source.stats.is_as_stored
        known_bytes = _known_bytes(per_shard, source)
        # A kept plan keeps the names in its shards. With one stage all have the same, which are kept anyway.
        plan_bytes = _KEPT_PLAN_BYTES + (KEPT_TENSOR_BYTES if source.strategy.stages > 1 else 0)
        kept_bytes = min(MAX_KEPT_PLANS_BYTES, per_shard * min(MAX_KEPT_PLANS, targets) * plan_bytes)
        parameters = max(len(source.strategy.parameters), len(target.parameters))
        base_bytes = INTERPRETER_BYTES + _loaded_bytes() + (_NUMPY_BYTES if has_numpy else 0)
        base_bytes += parameters * _PARAMETER_BYTES
        base_bytes += per_shard * _MAPPED_BYTES if planner.mapped is not None else 0
        base_bytes += source.stats.chunks * _LISTED_CHUNK_BYTES
        base_bytes += known_bytes + kept_bytes + per_shard * _PLANNED_SHARD_BYTES + source.stats.kinds * _KIND_BYTES
        if not source.stats.is_native:
            base_bytes += _child_bytes(source_form, per_shard)
        planning_bytes = base_bytes + max(per_shard * source_form.read_tensor_bytes, source.stats.decoding_bytes)
        if also_read is not None:
            stats = also_read.stats
            base_bytes += _known_bytes(stats.tensors, also_read)
            if not stats.is_native:
                base_bytes += _child_bytes(target_form, stats.tensors)
                if not source.stats.is_native:
                    base_bytes -= min(source_form.child_bytes, target_form.child_bytes)  # one child reads both
            if not stats.is_as_stored and not has_numpy:
                base_bytes, has_numpy = base_bytes + _NUMPY_BYTES, True
            return cls(planning_bytes, base_bytes, _SUM_BYTES, True, has_numpy, stats.decoding_bytes, writes=False)
        if target_form.needs_numpy:
            base_bytes += 0 if has_numpy else _NUMPY_BYTES
            has_numpy = True
        base_bytes += target_form.library_bytes
        tensor_bytes = target_form.written_tensor_bytes + (_SUM_BYTES if verify else 0)
        staged_bytes = 0
        if is_streamed:
            from reshard_mpi.journal.staged_parts import STAGED_BYTES  # which is loaded for nothing else

            staged_bytes = STAGED_BYTES
        return cls(planning_bytes, base_bytes, tensor_bytes, verify, has_numpy, staged_bytes=staged_bytes)

    @property
    def gathering_bytes(self) -> int:
        """The most while copies that are many runs in their shards are compared."""
        numpy_bytes = 0 if self.has_numpy else _NUMPY_BYTES
        return self.planning_bytes + numpy_bytes + LIMITS.buffer_bytes + LIMITS.window_bytes

    def peak_bytes(self, plan: RankPlan) -> int:
        """Return the most bytes that a process needs to plan and write this target."""
        decoding_bytes, has_numpy = self.decoding_bytes, self.has_numpy
        buffer_bytes = window_bytes = conversion_bytes = turning_bytes = 0
        records_bytes = self._records_bytes(plan)
        if self.writes and are_many(plan.tensors):
            has_numpy, buffer_bytes, window_bytes = True, 2 * LIMITS.buffer_bytes, plan.needed_bytes
        for group in plan.tensors.groups:
            first, *others = group.tensor(0), *_otherwise_stored(group)
            buffer_bytes = max(buffer_bytes, min(LIMITS.buffer_bytes, group.kind.size_bytes))
            through_windows = any(
                is_gathered(tensor, LIMITS) or (self.compares and _is_gathered_to_compare(tensor))
                for tensor in (first, *others)
            )
            if is_transposed(first, LIMITS):
                turning_bytes = LIMITS.tile_bytes
            is_summed_in_short_runs = self.compares and self.writes and _is_in_short_runs(first)
            has_numpy = has_numpy or through_windows or is_summed_in_short_runs
            for source in (item.source for tensor in (first, *others) for item in tensor.reads):
                stored = source.unconverted
                conversion_bytes = max(conversion_bytes, _conversion_bytes(source, stored))
                for place in stored.source.places if isinstance(stored.source, Reduced) else (stored.source,):
                    if isinstance(place, LibraryRead):
                        read_bytes = 2 * min(LIMITS.buffer_bytes, stored.size_bytes)  # in the child and in this process
                        decoding_bytes = max(decoding_bytes, place.decoding_bytes + place.kept_bytes + read_bytes)
                    elif through_windows and not isinstance(place, Constant):
                        window_bytes = max(window_bytes, stored.size_bytes + _AROUND_BYTES)
        moved_bytes = min(2 * LIMITS.buffer_bytes, buffer_bytes) + min(LIMITS.window_bytes, window_bytes)
        moved_bytes += conversion_bytes + turning_bytes
        if any(is_object_path(route.tensors.path) for group in plan.tensors.groups for route in group.routes):
            from reshard_mpi.filesystem.read_ahead import AHEAD_BYTES  # which is loaded for nothing else

            moved_bytes += min(AHEAD_BYTES, plan.needed_bytes)
        moved_bytes += min(self.staged_bytes, plan.written_bytes)
        moved_bytes += _NUMPY_BYTES if has_numpy and not self.has_numpy else 0
        return max(self.planning_bytes, self.base_bytes + moved_bytes + records_bytes + decoding_bytes)

    def _records_bytes(self, plan: RankPlan) -> int:
        """Return the memory for the records of a target's tensors while it is written."""
        size_bytes = self.tensor_bytes * len(plan.tensors)
        if self.writes and are_many(plan.tensors):
            size_bytes += _BATCHED_BYTES * plan.read_count
        return size_bytes + sum(
            _READ_ITEM_BYTES * (len(group.routes) - 1) * len(group.names) for group in plan.tensors.groups
        )

    def further_bytes(self, plan: RankPlan) -> int:
        """Return the bytes that this target needs while it is written side by side with others."""
        filled_bytes = 0
        if self.staged_bytes:
            from reshard_mpi.journal.staged_parts import FILLED_BYTES  # which is loaded for nothing else

            filled_bytes = min(FILLED_BYTES, plan.written_bytes)
        return plan.kept_bytes + self._records_bytes(plan) + LIMITS.buffer_bytes + filled_bytes


def _child_bytes(form: FormatInfo, tensors: int) -> int:
    """Return the memory of the child process that reads a shard of other programs; 0 if the format has none."""
    return form.child_bytes + tensors * _CHILD_TENSOR_BYTES if form.child_bytes else 0


def _known_bytes(tensors: int, checkpoint: SourceCheckpoint) -> int:
    """Return the bytes kept for the structure of shards with this number of tensors; shards of a stage share the
    names.
    """
    shards, stages = len(checkpoint.files.by_rank), checkpoint.strategy.stages
    alike_bytes = tensors * (stages * KEPT_TENSOR_BYTES + max(0, shards - stages) * KEPT_OFFSET_BYTES)
    return min(MAX_KEPT_BYTES + tensors * KEPT_TENSOR_BYTES, alike_bytes)


def _otherwise_stored(group: Group) -> Iterator[TensorPlan]:
    """Yield the tensors of a group, besides the first, that are not one run of a shard's file.

    Only such tensors may be stored otherwise than the first.
    """
    for place in range(1, len(group.names)):
        if any(route.numbers[place] in route.tensors.locations for route in group.routes if route.tensors.locations):
            yield group.tensor(place)


def _conversion_bytes(source: TensorEntry, stored: TensorEntry) -> int:
    """Return the memory that converting elements takes. stored: the source before its elements are converted."""
    if isinstance(stored.source, Dequantized):
        return 2 * _CONVERSION_BYTES
    return _CONVERSION_BYTES if stored is not source or isinstance(stored.source, Reduced) else 0


def _is_gathered_to_compare(tensor: TensorPlan) -> bool:
    return any(takes_numpy(item, item.target_region, LIMITS.buffer_bytes) for item in tensor.reads)


def _is_in_short_runs(tensor: TensorPlan) -> bool:
    from reshard_mpi.engine.checksums import has_short_runs  # which loads a library for sums

    whole, itemsize_bytes = Box.whole(tensor.spec.global_shape), tensor.spec.dtype.itemsize_bytes
    boxes = (tensor.spec.box, *(item.target_region for item in tensor.reads))
    return any(has_short_runs(box, whole, itemsize_bytes) for box in boxes)


def _loaded_bytes() -> int:
    """Return the bytes of libraries that this process has loaded besides this program."""
    bytes_of = {"mpi4py.MPI": MPI_BYTES, "botocore": _STORE_BYTES}
    return sum(size_bytes for library, size_bytes in bytes_of.items() if library in sys.modules)


def _size_bytes(path: str | os.PathLike[str]) -> int:
    """Return the size of a file, or of all files in a folder; 0 if there is nothing."""
    try:
        if is_folder(path):
            return sum(entry.size_bytes for entry in entries(path) if entry.is_file)
        return version_of(path).size_bytes
    except OSError:
        return 0


class RunMemory:
    """Holds memory for this process as long as the `with` block lasts.

    If there is not enough for a request, what was read and planned is freed (`reserve_peak` returns False then), or the
    process starts over. While the process waits for others of its run, it gives way to processes that wait for memory.
    """

    def __init__(self, allowance: Callable[[], Allowance], comm: Comm, progress: Progress) -> None:
        self._allowance = allowance
        self._comm = comm
        self._progress = progress
        self._no_longer_meanwhile: Callable[[], None] = lambda: None
        self._lease: ProcessLease | None = None
        self._projection: Projection | None = None
        self._to_free: Sequence[Callable[[], None]] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._no_longer_meanwhile()
        if self._lease is not None:
            self._lease.close()

    def lease(self) -> ProcessLease:
        """Return what this process holds; the first call opens the governor of this host. Raises a ReshardError."""
        if self._lease is None:
            say, alone = self._progress.waiting, self._comm.size == 1
            self._lease = ProcessLease.open(self._allowance(), os.environ, say, alone=alone)
            self._lease.on_memory_released = self._free
            self._no_longer_meanwhile = self._comm.meanwhile(self._lease.release_if_contended)
        return self._lease

    def free_with(self, *functions: Callable[[], None]) -> None:
        """Set the functions that free what was read and planned, for when other processes need memory."""
        self._to_free = functions

    def reserve_for_checking(self, source_format: str, purpose: str, summing: Summing) -> None:
        """Wait for the memory to check a shard against its own sums, beside what was planned."""
        self.reserve_peak(max(self.projection.gathering_bytes, checking_bytes(source_format, summing)), purpose)

    def reserve_for_planning(self, work: Workload, purpose: str) -> Projection:
        """Wait for the memory to read the shards of a conversion and to plan its targets; return the projection."""
        planner = work.planner
        if planner.mapped is not None:  # what the map makes tells how much memory planning takes
            self.reserve_peak(Projection.of(work).planning_bytes, purpose)
            planner.mapped.manifest(0)
        self._projection = Projection.of(work)
        self.reserve_peak(self._projection.planning_bytes, purpose)
        planner.before_gathering = partial(self.reserve_peak, self._projection.gathering_bytes, purpose)
        return self._projection

    @property
    def projection(self) -> Projection:
        """The projection made by `reserve_for_planning`."""
        if self._projection is None:
            raise RuntimeError("targets are planned before anything is moved")
        return self._projection

    def possible_peak_bytes(self, plan: RankPlan) -> int:
        """Return the bytes needed for the target of `plan`. Raises BudgetError if they can never be had."""
        peak_bytes = self.projection.peak_bytes(plan)
        if not self._allowance().unlimited:  # for a script for other hosts it is, though this process holds a lease
            self.lease().governor.require_possible(peak_bytes, INTERPRETER_BYTES)
        return peak_bytes

    def reserve_peak(self, peak_bytes: int, purpose: str) -> bool:
        """Wait for `peak_bytes` of memory in all; tell whether plans have not been freed meanwhile."""
        is_kept = self.lease().need(peak_bytes + self._progress.display.memory_bytes, purpose)
        self._progress.admitted()
        return is_kept

    def reserve_for_workers(self, jobs: int, parameters: int) -> int:
        """Wait for the memory to fork workers, and keep it; return how many fit: `jobs` or fewer, but one at least.

        Args:
            parameters: how many the strategies list, which is how many tensors each worker plans.
        """
        lease = self.lease()
        room_bytes = lease.governor.ceiling_bytes - INTERPRETER_BYTES - _WORK_BYTES
        size = max(1, min(jobs, room_bytes // (WORKER_BYTES + parameters * _PLANNED_BYTES)))
        self.reserve_peak(INTERPRETER_BYTES + size * WORKER_BYTES, "starting workers")
        lease.be_floor()
        return size

    def _free(self) -> None:
        for free in self._to_free:
            free()
        gc.collect()


class RunProcess(NamedTuple):
    """One process of a run, with the request, all processes of the run, its own memory, and its reports."""

    request: Request
    comm: Comm  # all processes of the run, which do the same at the same time
    memory: RunMemory
    progress: Progress
    strategies: Strategies | None = None  # of the request, if they have been read already

    @classmethod
    @contextmanager
    def begun(
        cls, request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None
    ) -> Iterator[RunProcess]:
        """Yield this process of a run; it holds memory as long as the `with` block lasts."""
        with RunMemory(lambda: request.allowance, comm, progress) as memory:
            yield cls(request, comm, memory, progress, strategies)

    def reserve_for_reading(self, purpose: str, *source_formats: str) -> None:
        """Wait for the memory to read the strategies and, for given source formats, the first shards."""
        to_read = (self.request.src_strategy, self.request.dst_strategy) if self.strategies is None else ()
        self.memory.reserve_peak(opening_bytes(to_read, *source_formats), purpose)

    def read_strategies(self) -> Strategies:
        """Return the strategies of the request."""
        return self.strategies or Strategies.read(self.request)
