"""The public functions. None uses MPI unless a communicator is given, so they may be called on one rank or on all.

What the command line prints as notes and warnings is logged by the logger "reshard_mpi", each text once: notes at
level INFO, warnings, and what is waited for, at level WARNING. With a communicator its rank 0 logs; worker processes
log nothing. Ranks that call a function without one log for themselves.
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
from reshard_mpi.runs.outcome import Report

__all__ = [
    "Plan",
    "RankSummary",
    "Report",
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
