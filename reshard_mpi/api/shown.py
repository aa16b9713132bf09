"""Progress as a function of the caller is told of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from reshard_mpi.processes.comm import Comm, MPIComm
from reshard_mpi.runs.progress import RunProgress, Silent, ended, log_warning
from reshard_mpi.runs.ranks import RankProgress, RootProgress
from reshard_mpi.runs.status import RunStatus
from reshard_mpi.runs.watched import Display, Watched

# How far apart two calls are.
_INTERVAL_SECONDS = 0.5

OnProgress = Callable[[RunStatus], object]


class Told(Display):
    """The display of a caller's function. If it raises, the error is logged, and it is not called again."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._next_seconds = 0.0

    def update(self, status: RunStatus) -> None:
        if status.seconds >= self._next_seconds:
            self._next_seconds = status.seconds + _INTERVAL_SECONDS
            self._tell(status)

    def say(self, text: str) -> None:
        log_warning(text)

    def close(self, status: RunStatus) -> None:
        self._tell(status)

    def _tell(self, status: RunStatus) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(status)
        except Exception:
            import logging

            logging.getLogger("reshard_mpi").exception("the function that is told the progress has failed")
            self._on_progress = None


def shown_to(on_progress: OnProgress | None, comm: Comm) -> AbstractContextManager[RunProgress]:
    """Give what tells a caller's function the progress of a run, until its end. Every process must call this."""
    return ended(progress_for(on_progress, comm))


def progress_for(on_progress: OnProgress | None, comm: Comm) -> RunProgress:
    """Return what tells a caller's function the progress of a run. Every process of `comm` must call this.

    It is called on rank 0, if it is given there.
    """
    if not any(comm.allgather(on_progress is not None)):
        return Silent()
    if not isinstance(comm, MPIComm):
        return Watched(Told(on_progress))
    return RootProgress(comm, Told(on_progress)) if comm.rank == 0 else RankProgress(comm, log_warning)
