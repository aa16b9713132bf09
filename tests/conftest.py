"""What all tests share: fixtures for MPI, and the rules for what runs where."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from launch import MPI, MPI_NAMES, RankRun, find_mpi, run_ranks
from slurm import Cluster, running_cluster

RANKS_FOLDER = Path(__file__).parent / "ranks"

# Cases build whole checkpoints, so one example may well take longer than hypothesis likes. A continuous integration
# run draws the same examples every time: it judges the change, while developers' runs look for what is still hidden.
settings.register_profile("developer", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", settings.get_profile("developer"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them, and all that they start, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that run inside ranks, unless this is a rank: test_inside_ranks.py starts them."""
    return True if collection_path == RANKS_FOLDER and not config.getoption("--with-mpi") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What must not run twice at a time runs in one process; first, so that the others run beside it.
    items.sort(key=lambda item: _one_at_a_time(item) or "z")
    for item in items:
        group = _one_at_a_time(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    if importlib.util.find_spec("mindspore") is None:
        for item in items:
            if item.get_closest_marker("mindspore"):
                item.add_marker(pytest.mark.skip(reason="MindSpore is not installed"))


def _one_at_a_time(item: pytest.Item) -> str | None:
    """Return what the test needs that only one can have: the cluster, or Open MPI, whose launchers share a folder.

    One that ends removes that folder, also while another is just starting in it.
    """
    if "slurm" in getattr(item, "fixturenames", ()):
        return "a cluster"
    callspec = getattr(item, "callspec", None)
    return "openmpi" if callspec is not None and callspec.params.get("mpi") == "openmpi" else None


@pytest.fixture(scope="session", autouse=True)
def _own_leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share no leases with what else this user does here, and leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESHARD_MPI_STATE_DIR", str(tmp_path_factory.mktemp("leases") / "state"))
        yield


@pytest.fixture(params=MPI_NAMES)
def mpi(request: pytest.FixtureRequest) -> MPI:
    """Every MPI implementation of this machine in turn."""
    found = find_mpi(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    return found


@pytest.fixture
def mpirun(mpi: MPI) -> Callable[..., RankRun]:
    """`mpirun(ranks, function, *args, ...)`: launch.run_ranks under every MPI in turn."""
    return functools.partial(run_ranks, mpi)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A SLURM cluster of two nodes, started when the first test asks for it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mindspore() -> ModuleType:
    """MindSpore itself; for tests marked `mindspore`."""
    return importlib.import_module("mindspore")
