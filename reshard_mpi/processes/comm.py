"""Talk between the processes of a run, alone or over MPI (`world`); no other module imports mpi4py.

mpi4py is imported only when a process is one of several MPI ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.processes.host import HostIdentity, distinct_names, host_name
from reshard_mpi.processes.signals import exit_when_terminated, ignore_stops, stopped_by
from reshard_mpi.text import beginning, lines

T = TypeVar("T")

# Variables by which launchers tell a process its rank and the number of processes, most specific first: MPICH and
# other PMI launchers, Open MPI, and srun (whose job-wide SLURM_NTASKS every batch shell has, so it is no sign).
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# A rank that waits for the others sleeps for a small share of the time it has waited so far: it neither spins nor comes
# late.
_NAP_SHARE = 0.05
_SHORTEST_NAP_SECONDS = 0.0002
_LONGEST_NAP_SECONDS = 0.02
# How often it does something else meanwhile.
MEANWHILE_SECONDS = 0.1
# Launchers need so long to read what a process says before it aborts its job, or they do not pass it on.
_SPEAK_SECONDS = 0.2
# With MPICH under srun, an abort waits for a server that may have ended with another rank; then an alarm ends it.
_ABORT_SECONDS = 2
_HEAD_START_SECONDS = 1
# How long a rank that is told to stop waits for the others to be told so too. The tags of two messages: that a rank has
# been told to stop, and that the user has been told of it.
_STOP_SECONDS = 2.0
_STOP_TAG, _TOLD_TAG = 17, 18
_MAPPED = Path("/proc/self/maps")
_MPICH_SHARED_MEMORY = "/dev/shm/mpich_shm_"
# Whether this process knows nothing of the others that its launcher has started, and whether it has looked.
_is_by_itself = False
_has_world = False


class Comm(Protocol):
    """A group of processes that run the same program.

    Attributes:
        hosts: by rank, the name of each process's host; different hosts have different names.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    def meanwhile(self, do: Callable[[], None]) -> Callable[[], None]:
        """Call `do` now and then while this process waits for the others, until the function returned is called."""
        ...

    def allgather(self, value: T) -> list[T]:
        """Return the values of all processes by rank; every process must call this.

        In place of the value of a process that was lost there may be an `Outcome` that says so.
        """
        ...


class SerialComm:
    """One process alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.hosts = (host_name(os.environ),)

    def meanwhile(self, do: Callable[[], None]) -> Callable[[], None]:
        return lambda: None  # it waits for nobody

    def allgather(self, value: T) -> list[T]:
        return [value]


class MPIComm:
    """The processes of an MPI communicator (an mpi4py `Comm`). Waiting sleeps instead of spinning."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._meanwhile: list[Callable[[], None]] = []
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        # Asking MPI which ranks share memory gives every one of them a host of its own under some launchers.
        self.hosts: Sequence[str] = distinct_names(self.allgather(HostIdentity.local(os.environ)))

    def meanwhile(self, do: Callable[[], None]) -> Callable[[], None]:
        self._meanwhile.append(do)
        return partial(self._meanwhile.remove, do)

    def allgather(self, value: T) -> list[T]:
        self._wait_for_all()
        values: list[T] = self._communicator.allgather(value)
        return values

    def posts(self) -> Posts:
        """Open a way by which ranks send small values to rank 0; every process must call this."""

        self._wait_for_all()
        return Posts(self._communicator)

    def _wait_for_all(self) -> None:
        arrived = self._communicator.Ibarrier()
        begin = done = time.monotonic()
        while not arrived.Test():
            now = time.monotonic()
            waited_seconds = now - begin
            if now - done >= MEANWHILE_SECONDS:
                for do in self._meanwhile:
                    do()
                done = time.monotonic()
            time.sleep(min(max(_SHORTEST_NAP_SECONDS, waited_seconds * _NAP_SHARE), _LONGEST_NAP_SECONDS))


# Each host may have its own of these options.
_OF_HOSTS = ("memory", "max_active")


def require_same_options(comm: Comm, options: Mapping[str, object]) -> None:
    """Raise UsageError, in all processes, if the options of one differ from process 0's: they would not do the same.

    Args:
        options: of this process, by name.
    """
    if comm.size == 1:
        return
    own = {name: repr(value) for name, value in options.items() if name not in _OF_HOSTS}
    first, *others = comm.allgather(own)
    for rank, other in enumerate(others, 1):
        name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
        if name is not None:
            texts = (
                f"rank {at}: {name} {beginning(each.get(name, '-'), 80)}" for at, each in ((0, first), (rank, other))
            )
            raise UsageError(
                "the ranks of this MPI run were given different commands",
                expected="the same command, with the same options",
                got="; ".join(texts),
                remedy="start all ranks by one command, as mpirun -n N reshard-mpi ...",
            )


def launched_size(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher has started, or at least as many; 1 without a launcher."""
    sizes = [int(environment[name]) for name in _SIZE_VARIABLES if environment.get(name, "").isdigit()]
    return max([*sizes, launched_rank(environment) + 1])


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of this process as its launcher says; 0 without a launcher."""
    ranks = (environment.get(name, "") for name in _RANK_VARIABLES)
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tell whether an MPI launcher started this process."""
    return launched_size(environment) > 1 or any(name in environment for name in _RANK_VARIABLES)


def awaits_world(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher has started other processes as well, and this one is not yet connected to them.

    They will wait for it without end, unless the launcher ends them: so it dies by the signals that it is sent.
    """
    return not _has_world and launched_size(environment) > 1


def speaks(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is to report errors: where all fail alike, one report is enough.

    Before it is connected to the others it cannot know whether rank 0 fails as well. If rank 0 does, then the launcher
    ends this process while it waits here (`end_job`).
    """
    if _is_by_itself or launched_rank(environment) == 0:
        return True
    if _has_world:
        return False
    time.sleep(_HEAD_START_SECONDS)
    return True


def end_job(environment: Mapping[str, str], code: int) -> None:
    """Have the launcher end the whole job if this process fails with `code` before it is connected to the others.

    Most launchers do so by themselves when a process exits with another code than 0. That of MPICH has to be told, in
    the protocol PMI-1; srun, which speaks a later version with the same variables, is known by `PMI_JOBID`.
    """
    if code == 0 or not awaits_world(environment) or "PMI_FD" not in environment or "PMI_JOBID" in environment:
        return
    time.sleep(_SPEAK_SECONDS)
    with contextlib.suppress(OSError, ValueError):
        os.write(int(environment["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)


@contextmanager
def world(environment: Mapping[str, str], *, explicit_share: bool, stopped: Callable[[int], None]) -> Iterator[Comm]:
    """Yield MPI's world under a launcher, else a process alone. An unhandled error in the block aborts the whole job.

    Args:
        explicit_share: the user has said which targets this process makes, so the launcher may start unconnected
            processes.
        stopped: called with the exit code on one rank when a signal to stop ends the job.

    Raises UsageError if the launcher and the MPI library do not belong together.
    """
    global _is_by_itself, _has_world  # noqa: PLW0603 - facts of the process, as its world is
    communicator = None
    if is_launched(environment):
        try:
            communicator = _connect(environment)
        except UsageError:
            if not explicit_share:
                raise
            _is_by_itself = True
        _has_world = True
        exit_when_terminated()
    if communicator is None or communicator.Get_size() == 1:
        yield SerialComm()
        return
    try:
        yield MPIComm(communicator)
    except ReshardError:
        raise  # gathered: every rank raises it alike
    except BaseException as error:
        # Otherwise the other ranks would wait for this one for ever.
        code = stopped_by(error)
        if code is None:
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            import traceback  # which loads parsers of source code, for nothing in all other runs

            place = f"process {communicator.Get_rank()} on host {host_name(environment)}"
            sys.stderr.write(lines(f"{traceback.format_exc()}reshard-mpi: {place} ends the job\n"))
        else:
            _stop(communicator, code, stopped)
        _abort(communicator, code)
        raise


def _stop(communicator: Any, code: int, stopped: Callable[[int], None]) -> None:
    """End this process, which was told to stop, if all ranks were, or another has told the user; else return to abort.

    If the launcher has passed the signal on to all ranks, all come here, and none has to abort the job. Rank 0 waits
    for messages of all others, then it tells the user, and them that it has. Other MPI messages are left alone.
    """
    ignore_stops()
    rank, others = communicator.Get_rank(), set(range(communicator.Get_size())) - {communicator.Get_rank()}
    if rank > 0:
        communicator.isend(None, dest=0, tag=_STOP_TAG)
    is_told = partial(communicator.iprobe, tag=_TOLD_TAG)
    silent = set(others)
    deadline = time.monotonic() + _STOP_SECONDS
    while not is_told() and (silent or rank > 0) and time.monotonic() < deadline:
        silent -= {other for other in silent if communicator.iprobe(source=other, tag=_STOP_TAG)}
        time.sleep(_SHORTEST_NAP_SECONDS)
    if not is_told():
        stopped(code)
        time.sleep(_SPEAK_SECONDS)
        for other in others:
            communicator.isend(None, dest=other, tag=_TOLD_TAG)
        deadline = time.monotonic() + _SPEAK_SECONDS
        while time.monotonic() < deadline and not is_told():  # which also moves on what is being sent
            time.sleep(_SHORTEST_NAP_SECONDS)
        if rank > 0 or silent:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or messages of the library would bury that
            return
    _remove_shared_memory()
    # Finalizing MPI would wait for messages that were left unfinished.
    os._exit(code)


def _remove_shared_memory() -> None:
    """Remove the names of the shared memory that MPICH has mapped; processes that have mapped it keep it.

    MPICH names it after the launcher's job and step. A SLURM job that is requeued starts again as the same step, and
    would find what this one has left.
    """
    for line in _MAPPED.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.startswith(_MPICH_SHARED_MEMORY):
            with contextlib.suppress(OSError):  # another rank was first
                Path(path).unlink()


def _abort(communicator: Any, code: int) -> None:
    sys.stderr.flush()
    time.sleep(_SPEAK_SECONDS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_ABORT_SECONDS)
    communicator.Abort(code)


def _connect(environment: Mapping[str, str]) -> Any:
    """Return MPI's world. Raises UsageError if there is no MPI, or not the one that belongs to the launcher."""
    # MPI is initialized only once that is known to be possible: otherwise MPICH ends the process.
    checked = "mpi4py.MPI" not in sys.modules and "PMIX_RANK" in environment and "PMI_RANK" not in environment
    mpi = _import_mpi(initialize=not checked)
    launched = launched_size(environment)
    if checked:
        if mpi.get_vendor()[0] == "MPICH" and not _has_pmix():
            raise _mismatch(mpi, launched, "an MPICH that does not understand this launcher (PMIx)")
        mpi.Init_thread()
        atexit.register(mpi.Finalize)
    if mpi.COMM_WORLD.Get_size() == 1 and launched > 1:
        raise _mismatch(mpi, launched, "a world of 1")
    return mpi.COMM_WORLD


def _mismatch(mpi: Any, launched: int, got: str) -> UsageError:
    return UsageError(
        "the launcher does not match the MPI library: every process sees itself alone",
        expected=f"a world of {launched} processes, as the launcher says" if launched > 1 else "the same MPI in both",
        got=f"{got} ({mpi.Get_library_version().splitlines()[0].strip()})",
        remedy="start with the mpirun of that MPI (srun: try --mpi=pmix or --mpi=pmi2), set MPI4PY_LIBMPI to the"
        " library of this launcher, or give each process its share with --part I/N",
    )


def _has_pmix() -> bool:
    """Tell whether the loaded MPI library can talk to launchers by PMIx."""
    import ctypes

    mapped = {line.split(maxsplit=5)[-1] for line in _MAPPED.read_text().splitlines()}
    libraries = [path for path in mapped if Path(path).name.startswith("libmpi")]
    return any(hasattr(ctypes.CDLL(path), "PMIx_Init") for path in libraries)


def _import_mpi(*, initialize: bool) -> Any:
    try:
        import mpi4py

        if not initialize:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "started by an MPI launcher, but MPI cannot be used from Python",
            expected="mpi4py and an MPI library",
            got=str(error).splitlines()[0],
            remedy="pip install mpi4py, and an MPI if there is none: the site's, or pip install mpich; where it is"
            " not found, set MPI4PY_LIBMPI to its library",
        ) from None
    return MPI


class Posts:
    """A way from every rank to rank 0, beside all other messages of the program. All ranks must open and close it.

    Attributes:
        communicator: an mpi4py `Comm`.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator.Dup()
        self._on_its_way: Any = None
        self._sent = self._received = 0

    def send(self, value: object) -> None:
        """Send a value to rank 0, unless the one before is still on its way."""
        if self._on_its_way is None or self._on_its_way.Test():
            self._on_its_way = self._communicator.isend((self._communicator.Get_rank(), value), dest=0)
            self._sent += 1

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """Yield, on rank 0, what has arrived since the last call: the rank that sent it, and the value."""
        while self._communicator.iprobe():
            yield self._receive()

    def close(self) -> None:
        """End the communicator when all ranks call this; messages on their way are dropped."""
        sent = self._communicator.gather(self._sent)
        while sent is not None and self._received < sum(sent):
            self._receive()
        if self._on_its_way is not None:
            self._on_its_way.Wait()
        self._communicator.Free()

    def _receive(self) -> tuple[int, Any]:
        self._received += 1
        rank, value = self._communicator.recv()
        return rank, value
