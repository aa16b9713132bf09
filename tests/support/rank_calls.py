"""What ranks call of the package, for `launch.run_ranks`; nothing else is imported, as each rank loads all of it.

A `run` is the source, the target, and the strategies of both.
"""

from __future__ import annotations

import logging
from pathlib import Path

import reshard_mpi
from reshard_mpi.runs.progress import RunStatus

Run = tuple[Path, Path, Path, Path]


def transform_alone_then_together(run: Run, alone: Path, kind: str) -> None:
    """Transform to `alone` in every rank by itself, then to the target with all ranks."""
    from mpi4py import MPI

    src, together, *strategies = run
    for dst, comm in ((alone, None), (together, MPI.COMM_WORLD)):
        reshard_mpi.transform_checkpoints(src, dst, "checkpoint_", *strategies, output_format=kind, comm=comm)


def told_while_transforming(run: Run, asking: tuple[int, ...]) -> tuple[list[RunStatus], int]:
    """Transform with all ranks; return what this one was told, and how many messages are left for it."""
    from mpi4py import MPI

    told: list[RunStatus] = []
    comm = MPI.COMM_WORLD
    progress = told.append if comm.Get_rank() in asking else None
    reshard_mpi.transform(*run, comm=comm, verify=True, progress=progress)
    comm.Barrier()
    return told, int(comm.iprobe())


def logged_while_transforming(run: Run) -> list[tuple[str, str]]:
    """Transform with all ranks; return what this one has logged."""
    from mpi4py import MPI

    told: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("reshard_mpi")
    logger.setLevel(logging.INFO)
    logger.addHandler(Handler())
    src, dst, *strategies = run
    reshard_mpi.transform_checkpoints(src, dst, "checkpoint_", *strategies, comm=MPI.COMM_WORLD)
    return told
