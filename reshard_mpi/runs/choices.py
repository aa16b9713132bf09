"""Whether all processes of a run that looks at checkpoints have chosen the same files of them."""

from __future__ import annotations

from reshard_mpi.checkpoints.chosen import moments_of
from reshard_mpi.checkpoints.discovery import ShardFiles
from reshard_mpi.planning.agreement import require_one_moment
from reshard_mpi.processes.comm import Comm


def require_same_choice(comm: Comm, *checkpoints: ShardFiles) -> None:
    """Raise DisagreementError, the same on every process, unless all have chosen the same files of each checkpoint.

    Every process looks for them itself, and another one may become the newest meanwhile. All processes must call this.
    """
    for of_one in zip(*comm.allgather(tuple(map(moments_of, checkpoints))), strict=True):
        require_one_moment(moment for moments in of_one for moment in moments)
