"""How much memory a process of a run is going to use: projected before it does, from what is known by then.

All figures are of resident memory, measured (`tests/test_projection.py`) and rounded up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.conversion import LIMITS, Conversion
from reshard_mpi.planning.model import Limits, RankPlan
from reshard_mpi.source import MAX_KEPT_TENSORS, SourceCheckpoint
from reshard_mpi.units import KIB, MIB

# An interpreter with what plans and moves bytes; with MPI; with HDF5's library; another one that has that library, for
# files of other making.
INTERPRETER_BYTES = 43 * MIB
_MPI_BYTES = 18 * MIB
_HDF5_BYTES = 15 * MIB
_CHILD_BYTES = 78 * MIB
# What is read of a strategy file, for each of its bytes, at the most while it is parsed.
_PARSING_SHARE = 11
# A parameter of a strategy; of the larger of the two, for both.
_PARAMETER_BYTES = KIB
# A tensor of a shard whose structure is known; while that is read; in a plan; while it is written; its sum.
_MANIFEST_BYTES = {"ckpt": KIB // 2, "hdf5": KIB}
_READING_BYTES = {"ckpt": KIB // 2, "hdf5": 3 * KIB // 2}
_FOREIGN_BYTES = 3 * KIB
_PLANNED_BYTES = 3 * KIB // 4
_WRITTEN_BYTES = {"ckpt": KIB // 4, "hdf5": 5 * KIB // 2}
# What HDF5's library keeps of structure while it writes: of each tensor, and at the most.
_CACHED_BYTES, _CACHE_BYTES = 8 * KIB, 20 * MIB
_SUM_BYTES = KIB
# A tensor, with its sums, of a shard that is checked.
_CHECKED_BYTES = {"ckpt": 2 * KIB, "hdf5": 7 * KIB}
# What a process keeps of plans, in tensors and as many copies.
MAX_KEPT_PLANS = 4
MAX_KEPT_COPIES = 20_000


def opening_bytes(strategies: Iterable[str | os.PathLike[str] | None], source_format: str | None = None) -> int:
    """Project what a process needs that reads strategy files, and then the structure of the first shard.

    What planning loads later is as large as the structure of 10,000 tensors. source_format: None until it is known.
    """
    shard_bytes = _CHILD_BYTES if source_format == "hdf5" else 0
    return (
        _interpreter_bytes()
        + shard_bytes
        + _PARSING_SHARE * sum(_size_bytes(path) for path in strategies if path is not None)
    )


def checking_bytes(source_format: str, tensors: int, *, is_native: bool) -> int:
    """Project what a process needs that checks a shard of so many tensors against the sums that it keeps.

    is_native: what can be read without the library of the format, in this process, is read so.
    """
    child_bytes = 0 if is_native or source_format == "ckpt" else _CHILD_BYTES + LIMITS.window_bytes
    return _interpreter_bytes() + child_bytes + LIMITS.buffer_bytes + tensors * _CHECKED_BYTES[source_format]


class Projection(NamedTuple):
    """What a conversion takes in one process.

    planning_bytes: at the most while it plans. limits: for moving bytes; what has been read and planned is in its base.
    """

    planning_bytes: int
    limits: Limits

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
        kind = source.files.format
        per_shard, is_foreign = source.most_tensors, not source.is_native
        known = min(MAX_KEPT_TENSORS + per_shard, per_shard * len(source.files.by_rank))
        kept = min(MAX_KEPT_COPIES, per_shard * min(MAX_KEPT_PLANS, targets)) if per_shard <= MAX_KEPT_COPIES else 0
        parameters = max(len(source.strategy.parameters), len(target.parameters))
        base_bytes = _interpreter_bytes() + parameters * _PARAMETER_BYTES
        base_bytes += known * _MANIFEST_BYTES[kind] + (kept + per_shard) * _PLANNED_BYTES
        if kind == "hdf5" and is_foreign:
            base_bytes += _CHILD_BYTES + per_shard * _FOREIGN_BYTES
        planning_bytes = base_bytes + per_shard * _READING_BYTES[kind]
        if also_read is not None:
            held = min(MAX_KEPT_TENSORS + also_read.most_tensors, also_read.most_tensors * len(also_read.files.by_rank))
            base_bytes += held * _MANIFEST_BYTES[target_format]
            if target_format == "hdf5" and not also_read.is_native:
                base_bytes += _CHILD_BYTES + also_read.most_tensors * _FOREIGN_BYTES
            return cls(planning_bytes, LIMITS._replace(base_bytes=base_bytes, tensor_bytes=_SUM_BYTES))
        if target_format == "hdf5":
            base_bytes += _HDF5_BYTES + min(per_shard * _CACHED_BYTES, _CACHE_BYTES)
        tensor_bytes = _WRITTEN_BYTES[target_format] + (_SUM_BYTES if verify else 0)
        return cls(planning_bytes, LIMITS._replace(base_bytes=base_bytes, tensor_bytes=tensor_bytes))

    def peak_bytes(self, plan: RankPlan) -> int:
        """Project the most that a process needs which plans and writes this target."""
        return max(self.planning_bytes, plan.peak_bytes(self.limits))


def _interpreter_bytes() -> int:
    return INTERPRETER_BYTES + (_MPI_BYTES if "mpi4py.MPI" in sys.modules else 0)


def _size_bytes(path: str | os.PathLike[str]) -> int:
    """Return how large a file is, or all files of a folder; 0 for what is not there."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except NotADirectoryError:
        return Path(path).stat().st_size
    except OSError:
        return 0
