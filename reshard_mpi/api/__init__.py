"""The public functions. None uses MPI unless a communicator is given, so they may be called on one rank or on all.

They log what the command line prints, to the logger "reshard_mpi": notes at level INFO, warnings and reasons for
waiting at level WARNING, each text once. With a communicator, its rank 0 logs. Without one, each rank that calls a
function logs for itself. Worker processes log nothing.
"""

from __future__ import annotations

from reshard_mpi.api.commands import diff, load_rank, plan, transform, verify
from reshard_mpi.api.mindspore import (
    convert_checkpoint_by_rank,
    convert_checkpoints,
    merge_pipeline_strategys,
    rank_list_for_convert,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.planning.summary import Plan, RankSummary
from reshard_mpi.runs.outcome import Report, ShardReport, TargetReport
from reshard_mpi.runs.status import RunStatus

__all__ = [
    "Plan",
    "RankSummary",
    "Report",
    "RunStatus",
    "ShardReport",
    "TargetReport",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "diff",
    "inspect",
    "load_rank",
    "merge_pipeline_strategys",
    "plan",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
    "verify",
]
