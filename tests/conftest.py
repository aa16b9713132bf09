"""What all tests share: fixtures for MPI, and the rules for what runs where."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from support import browser, fault_proxy, object_servers
from support.conversions import Conversion, make
from support.examples import DEEP, QUICK, WHOLE
from support.fault_proxy import FaultProxy
from support.launch import MPI, MPI_NAMES, RankRun, find_mpi, run_ranks
from support.object_servers import Bucket, ObjectServer
from support.slurm import Cluster, running_cluster

from reshard_mpi.cli import output
from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.runs import workers

TESTS_FOLDER = str(Path(__file__).parent)
RANKS_FOLDER = Path(__file__).parent / "ranks"
IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 2 << 30  # many times what the quick part takes
_NAMED_LENGTH = 60  # of a text in the name of a case
_PROCESSES = 6  # that test in the whole suite: many tests wait for other processes most of the time
_FAST = "RESHARD_MPI_TEST_FAST_FOLDER"
_MEMORY = pytest.StashKey[Path]()  # of a run of the whole suite: its folder in memory
_PLACE = pytest.StashKey[Path | None]()  # of a test: where its files are, if not where pytest has them
_NUMBERS = itertools.count()

# Cases build whole checkpoints, so one example may well take longer than hypothesis likes. A continuous integration
# run draws the same examples every time: it judges the change, while developers' runs look for what is still hidden.
settings.register_profile(
    "developer", deadline=None, max_examples=WHOLE, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("developer"), derandomize=True)
_PROFILE = "ci" if os.environ.get("CI") else "developer"
# The quick part of the suite looks at a few examples of each property.
settings.register_profile("quick", settings.get_profile(_PROFILE), max_examples=QUICK)
# Of a night: `--hypothesis-profile=deep`.
settings.register_profile("deep", settings.get_profile("developer"), max_examples=DEEP)
settings.load_profile(_PROFILE)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes test. The quick part computes, and each process has all tests to collect first."""
    return min(_PROCESSES, (os.cpu_count() or 1) + 1) if _is_quick(config) else _PROCESSES


def pytest_configure(config: pytest.Config) -> None:
    # Else every process that a test starts would compile all of the package again, which takes as long as what it does.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _compile_new_checkout(config)
    # Thousands of tests stay until the end: who looks through them for garbage again and again finds none.
    gc.set_threshold(50_000)
    _keep_files_in_memory(config)
    if _is_quick(config):
        settings.load_profile("quick")
        # Nothing in it must run alone. Each process has half of the tests, module by module, and fixtures of a module
        # are made once; who ends first takes from the other.
        config.option.dist = "worksteal" if config.getoption("dist", "no") != "no" else "no"
        config.option.loadgroup = False  # else names of tests end in their groups
    # Else whatever loads numpy starts threads for linear algebra, which nobody does here. A test that runs the command
    # line in its own process sets this too, so it would depend on the order of tests.
    os.environ.update(ONE_THREAD)
    # A run that takes longer than usual shows its progress, and on a busy machine any does.
    output._FIRST_SECONDS = math.inf
    # A shell that starts the tests in the background has them, and all that they start, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_quick(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow"


def _compile_new_checkout(config: pytest.Config) -> None:
    """Compile all tests where nobody has yet: else each of the processes that test does, all at the same time.

    Hypothesis likewise looks through all characters once, and keeps what it finds.
    """
    modules = sorted(Path(TESTS_FOLDER).rglob("test_*.py"))
    is_new = not any(Path(TESTS_FOLDER, "__pycache__").glob("test_*.pyc"))
    if is_new and config.option.numprocesses and not config.option.file_or_dir:
        collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0"]
        halves = [
            subprocess.Popen([*collecting, *half], cwd=config.rootpath, stdout=subprocess.DEVNULL)
            for half in (modules[::2], modules[1::2])
        ]
        st.text().validate()
        for half in halves:
            half.wait()


def _keep_files_in_memory(config: pytest.Config) -> None:
    """Put temporary files where nobody waits for a disk, unless the user names a place for them.

    A small conversion waits for the disk several times as long as it computes. In the whole suite what is about files
    and memory has its files on the disk where it starts processes, as users have their checkpoints.
    """
    if not hasattr(config, "workerinput"):  # what starts the processes that test decides for them
        is_named = config.option.basetemp or {"TMPDIR", "PYTEST_DEBUG_TEMPROOT"} & os.environ.keys()
        os.environ[_FAST] = str(IN_MEMORY) if not is_named and _has_room(IN_MEMORY) else ""
    if not os.environ[_FAST]:
        return
    if _is_quick(config):
        os.environ["TMPDIR"] = os.environ[_FAST]
        tempfile.tempdir = None  # else what was found before is kept
    else:
        folder = tempfile.TemporaryDirectory(dir=os.environ[_FAST])
        config.add_cleanup(folder.cleanup)
        config.stash[_MEMORY] = Path(folder.name)


def _has_room(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    found = os.statvfs(folder)
    runs_programs = not found.f_flag & os.ST_NOEXEC  # some tests write programs, and containers often forbid it there
    return runs_programs and found.f_bavail * found.f_frsize >= _ROOM_BYTES


@pytest.hookimpl(tryfirst=True)  # before any fixture asks for a folder
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose where the test has its files, also those that it makes itself."""
    memory = item.config.stash.get(_MEMORY, None)
    item.stash[_PLACE] = place = None if _needs_disk(item) else memory
    if memory is not None:
        tempfile.tempdir = place and str(place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: there is hardly any, among millions of objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that run inside ranks, unless this is a rank: test_inside_ranks.py starts them."""
    return True if collection_path == RANKS_FOLDER and not config.getoption("--with-mpi") else None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case after the beginning of a long text, since the processes tell each other names of tests."""
    if isinstance(val, str | bytes) and len(val) > _NAMED_LENGTH:
        return f"{val[:_NAMED_LENGTH]!a} and so on, {len(val)}"
    return None


# Libraries whose tests are marked with their names, since they need the library itself.
_PEERS = ("mindspore", "torch", "deepspeed", "megatron")
# What takes a cluster, an MPI, a real object store, or MindSpore itself.
_SLOW_FIXTURES = {"mpi", "mpirun", "slurm", "seaweedfs", "mindspore"}
# Modules of single tests that take longest.
_LONG_MODULES = {
    *("test_all_stories", "test_benchmarks", "test_control_groups", "test_memory", "test_pages", "test_stories"),
    "test_wheel",
}
# Rooms whose tests that start processes have their files on the disk.
_ON_DISK = {"engine", "filesystem", "processes", "runs", "tests"}
# Rooms where local processes start as users' do: for their own sake, and beside threads of frameworks and servers.
_REALLY_STARTED = {"processes", "objects", "peers"}
# What starts a process, or has one started, by the names of the functions.
_STARTERS = {"run_command", "measure_peak", "run_ranks", "Popen", "mpirun_command"}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = [peer for peer in _PEERS if importlib.util.find_spec(peer) is None]
    no_browser, no_store = browser.missing(), object_servers.missing_for_seaweedfs()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if _is_slow(item, marks):
            item.add_marker(pytest.mark.slow)
            marks.add("slow")
        asks_for_store = not {"seaweedfs", "seaweedfs_server"}.isdisjoint(_stores_of(item))
        if asks_for_store or "stores" in marks or (item.path.parent.name == "objects" and "slow" in marks):
            item.add_marker(pytest.mark.stores)
            item.add_marker(pytest.mark.skipif(bool(no_store), reason=no_store))
        for peer in marks.intersection(lacking):
            item.add_marker(pytest.mark.skip(reason=f"{peer} is not installed"))
        if no_browser and "browser" in marks:
            item.add_marker(pytest.mark.skip(reason=f"no browser: {no_browser} is not installed"))
    # What must not run twice at a time runs in one process; first, so that the others run beside it. Then what takes
    # longest, so that no process is left with it at the end.
    items.sort(key=lambda item: _one_at_a_time(item) or ("y" if item.path.stem in _LONG_MODULES else "z"))
    for item in items:
        group = _one_at_a_time(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def _stores_of(item: pytest.Item) -> set[str]:
    """Return the names of fixtures that a test asks for, by its arguments or by its parameters."""
    callspec = getattr(item, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    return {*getattr(item, "fixturenames", ()), *(value for value in values if isinstance(value, str))}


def _is_slow(item: pytest.Item, marks: set[str]) -> bool:
    """Tell whether a test of these marks is left out of the quick part, besides those that are marked in their places.

    A test that starts processes takes a second or so; one of many such, told apart by parameters, would take a minute
    with the others.
    """
    if not _SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) or not marks.isdisjoint(_PEERS):
        return True
    callspec = getattr(item, "callspec", None)
    # A variant that is made by local processes has one that is made by one alone.
    return callspec is not None and ("jobs" in callspec.id.split("-") or _has_processes(item))


def _needs_disk(item: pytest.Item) -> bool:
    """Tell whether a test is about files as such, about memory, which files in memory take too, or about hosts."""
    return (item.path.parent.name in _ON_DISK and _has_processes(item)) or "slurm" in getattr(item, "fixturenames", ())


def _has_processes(item: pytest.Item) -> bool:
    """Tell whether a test starts processes, itself or by a fixture of those that do."""
    starts = _starts_processes(getattr(item, "function", None))
    return starts or not _SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@functools.cache
def _starts_processes(function: object) -> bool:
    """Tell whether a function of the tests names one that starts a process, or one of the tests that does."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is None or not code.co_filename.startswith(TESTS_FOLDER):
        return False
    names = _names_in(code)
    known = getattr(function, "__globals__", {})
    called = (known[name] for name in names if inspect.isfunction(known.get(name)))
    return bool(_STARTERS & names) or any(other is not function and _starts_processes(other) for other in called)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function uses, with those of the functions and comprehensions in it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _one_at_a_time(item: pytest.Item) -> str | None:
    """Return what the test needs that only one can have: the cluster, or Open MPI, whose launchers share a folder.

    One that ends removes that folder, also while another is just starting in it.
    """
    if "slurm" in getattr(item, "fixturenames", ()):
        return "a cluster"
    callspec = getattr(item, "callspec", None)
    return "openmpi" if callspec is not None and callspec.params.get("mpi") == "openmpi" else None


@pytest.fixture(scope="session", autouse=True)
def _own_leases() -> Iterator[None]:
    """Tests share no leases with what else this user does here, and leave nothing behind."""
    fast = IN_MEMORY if IN_MEMORY.is_dir() else None  # as leases are kept for users
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=fast) as folder:
        patch.setenv("RESHARD_MPI_STATE_DIR", f"{folder}/state")
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """What the tests' own processes do is done as on one core, without workers, unless a test asks for some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture
def fresh_workers() -> None:
    """For a test whose local processes are started by another interpreter, as those of programs with threads are."""


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local processes are forked from the one that tests, though it has threads and has loaded HDF5.

    Else another interpreter would start for each run of several, and load all anew.
    """
    if request.path.parent.name not in _REALLY_STARTED and "fresh_workers" not in request.fixturenames:
        monkeypatch.setattr(workers, "_may_fork", lambda: True)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the test, kept if that fails. (pytest's own looks through all that are there, for a number.)"""
    kept = tmp_path_factory.getbasetemp()
    place = request.node.stash[_PLACE] or kept
    folder = place / f"test_{next(_NUMBERS)}"
    folder.mkdir(0o700)
    failures = request.session.testsfailed
    yield folder
    if request.session.testsfailed == failures:
        shutil.rmtree(folder, ignore_errors=True)
    elif place is not kept:
        with contextlib.suppress(shutil.Error):  # a pipe or socket cannot be moved
            shutil.move(folder, kept)


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    """The small conversion of 4 ranks to 2, in .ckpt."""
    return make(tmp_path)


@pytest.fixture(params=MPI_NAMES)
def mpi(request: pytest.FixtureRequest) -> MPI:
    """Every MPI implementation of this machine in turn."""
    implementation = find_mpi(request.param)
    if implementation is None:
        pytest.skip(f"{request.param} is not installed")
    return implementation


@pytest.fixture
def mpirun(mpi: MPI) -> Callable[..., RankRun]:
    """`mpirun(ranks, function, *args, ...)`: launch.run_ranks under every MPI in turn."""
    return functools.partial(run_ranks, mpi)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A SLURM cluster of two nodes, started when the first test asks for it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _as_without_stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what tests of object storage have loaded out of the memory that is reckoned for others."""
    uses_stores = request.path.parent.name in ("objects", "filesystem") or request.node.get_closest_marker("stores")
    loaded = None if uses_stores else sys.modules.pop("botocore", None)
    yield
    if loaded is not None:
        sys.modules["botocore"] = loaded


@pytest.fixture(scope="session")
def moto_server() -> Iterator[ObjectServer]:
    """An object store that is quick and not quite true, started when the first test asks for it."""
    with object_servers.running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[ObjectServer]:
    """A real object store, started when the first test asks for it."""
    with object_servers.running_seaweedfs() as server:
        yield server


@pytest.fixture
def moto(moto_server: ObjectServer) -> Iterator[Bucket]:
    """A bucket in moto, which the environment names during the test."""
    with object_servers.new_bucket(moto_server) as bucket:
        yield bucket


@pytest.fixture
def seaweedfs(seaweedfs_server: ObjectServer) -> Iterator[Bucket]:
    """A bucket in SeaweedFS, which the environment names during the test."""
    with object_servers.new_bucket(seaweedfs_server) as bucket:
        yield bucket


@pytest.fixture
def proxy(moto: Bucket) -> Iterator[FaultProxy]:
    """A proxy before moto, which the environment names during the test; SeaweedFS gets one by `fault_proxy.before`."""
    with fault_proxy.before(moto.server) as started:
        yield started


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """A bucket in each store in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def mindspore() -> ModuleType:
    """MindSpore itself; for tests marked `mindspore`."""
    return importlib.import_module("mindspore")
