"""How the processes of one run talk: alone, or over MPI. The only module that imports mpi4py, and only when needed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.hosts import Identity, distinct_names, host_name

T = TypeVar("T")

# Variables by which launchers tell a process its rank and the number of processes, most specific first: MPICH and
# other PMI launchers, Open MPI, and srun (whose job-wide SLURM_NTASKS every batch shell has, so it is no sign).
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# Waiting ranks sleep between looking whether the others have arrived, for a small share of what they have waited so
# far: they neither spin nor come late.
_NAP_SHARE = 0.05
_SHORTEST_NAP_SECONDS = 0.0002
_LONGEST_NAP_SECONDS = 0.02
# Launchers do not pass on what they have not yet read of a process when it aborts its job.
_SPEAK_SECONDS = 0.2
# With MPICH under srun, an abort waits for a server that may have gone with another rank: then the kernel ends it.
_ABORT_SECONDS = 2


class Comm(Protocol):
    """A group of processes that run the same program.

    hosts: for every process, by rank, the name of its host, which no other host of the group has.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    def allgather(self, value: T, step: str) -> list[T]:
        """Return the values of all processes, by rank, to each. step: what the processes have just done.

        In place of the value of a process that is lost there may be the `Outcome` that says so.
        """
        ...


class SerialComm:
    """One process alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.hosts = (host_name(os.environ),)

    def allgather(self, value: T, step: str) -> list[T]:
        return [value]


class MPIComm:
    """The processes of an MPI communicator (an mpi4py `Comm`). Waiting sleeps instead of spinning."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        # Asking MPI which ranks share memory gives every one of them a host of its own under some launchers.
        self.hosts: Sequence[str] = distinct_names(self.allgather(Identity.local(os.environ), "named its host"))

    def allgather(self, value: T, step: str) -> list[T]:
        self._wait_for_all()
        values: list[T] = self._communicator.allgather(value)
        return values

    def _wait_for_all(self) -> None:
        arrived = self._communicator.Ibarrier()
        begin = time.monotonic()
        while not arrived.Test():
            waited_seconds = time.monotonic() - begin
            time.sleep(min(max(_SHORTEST_NAP_SECONDS, waited_seconds * _NAP_SHARE), _LONGEST_NAP_SECONDS))


def launched_size(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher says it started; 1 where there is no launcher."""
    sizes = [int(environment[name]) for name in _SIZE_VARIABLES if environment.get(name, "").isdigit()]
    return max(sizes, default=1)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank the launcher says this process has; 0 where there is no launcher."""
    ranks = (environment.get(name, "") for name in _RANK_VARIABLES)
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tell whether an MPI launcher started this process."""
    return launched_size(environment) > 1 or any(name in environment for name in _RANK_VARIABLES)


@contextmanager
def world(environment: Mapping[str, str], *, explicit_share: bool) -> Iterator[Comm]:
    """Yield MPI's world under a launcher, else a process alone; an error nobody handled aborts the whole job.

    explicit_share: the user said which targets this process takes, so a launcher that starts unconnected processes
    is what they want. Raises UsageError if the launcher and the MPI library do not belong together.
    """
    if not is_launched(environment):
        yield SerialComm()
        return
    mpi = _import_mpi()
    communicator = mpi.COMM_WORLD
    launched = launched_size(environment)
    if communicator.Get_size() == 1 and launched > 1:
        if explicit_share:
            yield SerialComm()
            return
        raise UsageError(
            "the launcher does not match the MPI library: every process sees itself alone",
            expected=f"a world of {launched} processes, as the launcher says",
            got=f"a world of 1 ({mpi.Get_library_version().splitlines()[0].strip()})",
            remedy="start with the mpirun of that MPI (srun: try --mpi=pmix or --mpi=pmi2), set MPI4PY_LIBMPI to the"
            " library of this launcher, or give each process its share with --part I/N",
        )
    try:
        yield MPIComm(communicator) if communicator.Get_size() > 1 else SerialComm()
    except ReshardError:
        raise  # gathered: every rank raises it alike
    except BaseException as error:
        # Without this the other ranks would wait for this one for ever.
        code = 1
        if isinstance(error, SystemExit | KeyboardInterrupt):
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130
        else:
            place = f"process {communicator.Get_rank()} on host {host_name(environment)}"
            sys.stderr.write(f"{traceback.format_exc()}reshard-mpi: {place} ends the job\n")
        sys.stderr.flush()
        if communicator.Get_size() > 1:
            time.sleep(_SPEAK_SECONDS)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_ABORT_SECONDS)
            communicator.Abort(code)
        raise


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "started by an MPI launcher, but MPI cannot be used from Python",
            expected="mpi4py and an MPI library",
            got=str(error).splitlines()[0],
            remedy="pip install 'reshard-mpi[mpi]', or set MPI4PY_LIBMPI to the library of your MPI",
        ) from None
    return MPI
