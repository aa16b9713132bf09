"""How much memory a process of a run is going to use: projected before it does, from what is known by then.

All figures are of resident memory, measured (`tests/test_projection.py`) and rounded up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.source import MAX_KEPT_BYTES, SourceCheckpoint
from reshard_mpi.engine.crc import has_short_runs
from reshard_mpi.engine.regions import takes_numpy
from reshard_mpi.engine.transfer import are_many, is_gathered
from reshard_mpi.formats.columns import KEPT_PLACE_BYTES, KEPT_TENSOR_BYTES
from reshard_mpi.formats.places import Decoded
from reshard_mpi.formats.traits import Costs
from reshard_mpi.planning.model import Group, RankPlan, TensorPlan
from reshard_mpi.runs.conversion import LIMITS, Conversion
from reshard_mpi.runs.selfcheck import Summing
from reshard_mpi.sharding.box import Box
from reshard_mpi.units import KIB, MIB

# An interpreter with what plans and moves bytes; what is added by numpy, and by MPI.
INTERPRETER_BYTES = 27 * MIB
_NUMPY_BYTES = 13 * MIB
_MPI_BYTES = 18 * MIB
# What is read of a strategy file, for each of its bytes, at the most while it is parsed.
_PARSING_SHARE = 11
# A parameter of a strategy; of the larger of the two, for both.
_PARAMETER_BYTES = KIB // 2
# A tensor while its target is planned; of a plan that is kept; the sum of one.
_PLANNED_BYTES = KIB // 2
_KEPT_PLAN_BYTES = 64
# A kind of tensors in a plan, and in the structure of several shards.
_KIND_BYTES = 8 * KIB
_SUM_BYTES = KIB
# A copy beyond the first of a target tensor.
_COPY_BYTES = 16
# A copy of a small tensor where those are moved many at a time.
_BATCHED_BYTES = 32
# A window begins and ends with a page, and with it the kernel maps what it has of the file around.
_AROUND_BYTES = 256 * KIB
# What a process keeps of plans.
MAX_KEPT_PLANS = 4
MAX_KEPT_PLANS_BYTES = 56 * MIB


def opening_bytes(strategies: Iterable[str | os.PathLike[str] | None], *source_formats: str) -> int:
    """Project what a process needs that reads strategy files, and then the structure of first shards.

    What planning loads later is as large as the structure of 10,000 tensors. source_formats: once they are known.
    """
    children = max((_costs(name).child for name in source_formats), default=0)
    shard_bytes = children + _NUMPY_BYTES if children else 0
    return (
        INTERPRETER_BYTES
        + _loaded_bytes()
        + shard_bytes
        + _PARSING_SHARE * sum(_size_bytes(path) for path in strategies if path is not None)
    )


def checking_bytes(source_format: str, summing: Summing) -> int:
    """Project what a process needs that checks a shard against the sums that it keeps."""
    child_bytes, costs = 0, _costs(source_format)
    if costs.child and not summing.is_native:
        child_bytes = costs.child + summing.tensors * costs.child_tensor + LIMITS.buffer_bytes + summing.decoding_bytes
    own_bytes = INTERPRETER_BYTES + _loaded_bytes() + (_NUMPY_BYTES if summing.with_numpy else 0)
    return own_bytes + child_bytes + LIMITS.buffer_bytes + summing.tensors * costs.checking


class Projection(NamedTuple):
    """What a conversion takes in one process.

    planning_bytes: at the most while it plans. base_bytes: an interpreter with its libraries, and what it has read and
    planned. tensor_bytes: a tensor that is written, in this program and in the library of its format. compares: what is
    in the target is read beside its sources, all of them through windows. decoding_bytes: what it takes to decode a
    tensor of that; of the sources it is known with their tensors. has_numpy: it is in base_bytes already.
    """

    planning_bytes: int
    base_bytes: int
    tensor_bytes: int
    compares: bool
    has_numpy: bool
    decoding_bytes: int = 0

    @classmethod
    def of(
        cls,
        conversion: Conversion,
        target_format: str,
        *,
        targets: int = 1,
        verify: bool = False,
        also_read: SourceCheckpoint | None = None,
    ) -> Projection:
        """Project from what is known of a conversion as soon as one of its shards has been read.

        targets: how many are planned at the most. verify: what is written is compared with its sources. also_read:
        nothing is written, and this is compared.
        """
        source, target = conversion.source, conversion.target
        costs, target_costs = _costs(source.files.format), _costs(target_format)
        per_shard, has_numpy = source.extent.tensors, not source.extent.is_as_stored
        known_bytes = _known_bytes(per_shard, source)
        # Plans keep the names of their shards, which are kept anyway where all shards have the same.
        plan_bytes = _KEPT_PLAN_BYTES + (KEPT_TENSOR_BYTES if source.strategy.stages > 1 else 0)
        kept_bytes = min(MAX_KEPT_PLANS_BYTES, per_shard * min(MAX_KEPT_PLANS, targets) * plan_bytes)
        parameters = max(len(source.strategy.parameters), len(target.parameters))
        base_bytes = INTERPRETER_BYTES + _loaded_bytes() + (_NUMPY_BYTES if has_numpy else 0)
        base_bytes += parameters * _PARAMETER_BYTES
        base_bytes += known_bytes + kept_bytes + per_shard * _PLANNED_BYTES + source.extent.kinds * _KIND_BYTES
        if not source.extent.is_native:
            base_bytes += costs.child + per_shard * costs.child_tensor
        planning_bytes = base_bytes + max(per_shard * costs.reading, source.extent.decoding_bytes)
        if also_read is not None:
            extent = also_read.extent
            base_bytes += _known_bytes(extent.tensors, also_read)
            if not extent.is_native:
                base_bytes += target_costs.child if source.extent.is_native or not costs.child else 0  # it serves both
                base_bytes += extent.tensors * target_costs.child_tensor
            if not extent.is_as_stored and not has_numpy:
                base_bytes, has_numpy = base_bytes + _NUMPY_BYTES, True
            return cls(planning_bytes, base_bytes, _SUM_BYTES, True, has_numpy, extent.decoding_bytes)
        if target_costs.uses_numpy:
            base_bytes += 0 if has_numpy else _NUMPY_BYTES
            has_numpy = True
        base_bytes += target_costs.library + min(per_shard * target_costs.cached, target_costs.most_cached)
        tensor_bytes = target_costs.writing + (_SUM_BYTES if verify else 0)
        return cls(planning_bytes, base_bytes, tensor_bytes, verify, has_numpy)

    @property
    def gathering_bytes(self) -> int:
        """At the most while it compares copies that lie in many runs in their shards."""
        numpy_bytes = 0 if self.has_numpy else _NUMPY_BYTES
        return self.planning_bytes + numpy_bytes + LIMITS.buffer_bytes + LIMITS.window_bytes

    def peak_bytes(self, plan: RankPlan) -> int:
        """Project the most that a process needs which plans and writes this target."""
        decoding_bytes, buffer_bytes, window_bytes, has_numpy = self.decoding_bytes, 0, 0, self.has_numpy
        records_bytes = self.tensor_bytes * len(plan.tensors)
        if are_many(plan.tensors):
            has_numpy, buffer_bytes = True, 2 * LIMITS.buffer_bytes
            window_bytes = max(window_bytes, plan.needed_bytes)
            records_bytes += _BATCHED_BYTES * plan.copies
        for group in plan.tensors.groups:
            alike = group.tensor(0)
            buffer_bytes = max(buffer_bytes, min(LIMITS.buffer_bytes, group.kind.size_bytes))
            records_bytes += _COPY_BYTES * (len(group.routes) - 1) * len(group.names)
            through_windows = any(
                is_gathered(tensor, LIMITS) or (self.compares and _is_gathered_to_compare(tensor))
                for tensor in (alike, *_otherwise_stored(group))
            )
            has_numpy = has_numpy or through_windows or (self.compares and _is_in_short_runs(alike))
            for source in (copy.source for tensor in (alike, *_otherwise_stored(group)) for copy in tensor.copies):
                if isinstance(source.source, Decoded):
                    read_bytes = 2 * min(LIMITS.buffer_bytes, source.size_bytes)  # there and here
                    decoding_bytes = max(
                        decoding_bytes, source.source.decoding_bytes + source.source.kept_bytes + read_bytes
                    )
                elif through_windows:
                    window_bytes = max(window_bytes, source.size_bytes + _AROUND_BYTES)
        moved_bytes = min(2 * LIMITS.buffer_bytes, buffer_bytes) + min(LIMITS.window_bytes, window_bytes)
        moved_bytes += _NUMPY_BYTES if has_numpy and not self.has_numpy else 0
        return max(self.planning_bytes, self.base_bytes + moved_bytes + records_bytes + decoding_bytes)


def _costs(format_name: str) -> Costs:
    return formats.by_name(format_name).TRAITS.costs


def _known_bytes(tensors: int, checkpoint: SourceCheckpoint) -> int:
    """Project what is kept of the structure of shards with so many tensors each: those of a stage have the same."""
    shards, stages = len(checkpoint.files.by_rank), checkpoint.strategy.stages
    alike_bytes = tensors * (stages * KEPT_TENSOR_BYTES + max(0, shards - stages) * KEPT_PLACE_BYTES)
    return min(MAX_KEPT_BYTES + tensors * KEPT_TENSOR_BYTES, alike_bytes)


def _otherwise_stored(group: Group) -> Iterator[TensorPlan]:
    """Yield the tensors of a group that are not one run of their shards' files: they need not be stored alike."""
    for at in range(1, len(group.names)):
        if any(route.numbers[at] in route.tensors.elsewhere for route in group.routes if route.tensors.elsewhere):
            yield group.tensor(at)


def _is_gathered_to_compare(tensor: TensorPlan) -> bool:
    return any(takes_numpy(copy, copy.target_region, LIMITS.buffer_bytes) for copy in tensor.copies)


def _is_in_short_runs(tensor: TensorPlan) -> bool:
    whole, itemsize_bytes = Box.whole(tensor.spec.global_shape), tensor.spec.dtype.itemsize_bytes
    return any(has_short_runs(box, whole, itemsize_bytes) for box in (tensor.spec.box, *_regions(tensor)))


def _regions(tensor: TensorPlan) -> Iterator[Box]:
    return (copy.target_region for copy in tensor.copies)


def _loaded_bytes() -> int:
    """What this process has loaded besides an interpreter with this program."""
    return _MPI_BYTES if "mpi4py.MPI" in sys.modules else 0


def _size_bytes(path: str | os.PathLike[str]) -> int:
    """Return how large a file is, or all files of a folder; 0 for what is not there."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except NotADirectoryError:
        return Path(path).stat().st_size
    except OSError:
        return 0
