"""The HDF5 library in a process of its own: whatever it does with a file is an error that names it, and no more."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.examples import few_cases
from support.processes import run_command

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.hdf5 import reader_process
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.sharding.box import Box

# Stands for the library: the name of the file says what it does. Whatever has another name is read.
PRETEND = """
import os, signal, time
from pathlib import Path
from reshard_mpi.formats.hdf5 import datasets, datasets as library, library_reader as reading
from reshard_mpi.formats.hdf5 import reader_process_main as child, reader_process as wire
locate, read = reading.locate, datasets.read
def misbehave(path):
    what, _, outside = Path(path).stem.partition("-")
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "abort": os.abort()
    if what == "leave": os._exit(7)
    if what == "loop":
        while True: pass
    if what == "grow":
        kept = []
        while True: kept.append(bytearray(1 << 24))
    if what == "open":
        files = [os.open(path, os.O_RDONLY) for _ in range(3)]
    if what == "write": os.write(os.open(path, os.O_WRONLY), b"x" * 100)
    if what == "lie": os.write(1, (1 << 20).to_bytes(8, "little") + b"{" * (1 << 20))
    if what == "flood": os.write(1, (1 << 40).to_bytes(8, "little") + b"{" * (1 << 16))
    if what == "outside":
        tensor = ["w", "int8", [9], [[[1 << 40, 9]], False], None, None]
        wire.send(1, ["manifest", [[tensor], {}, None]])
    if what == "dump":
        import resource
        raise ValueError(f"core {resource.getrlimit(resource.RLIMIT_CORE)}")
    if what == "environment": raise ValueError(repr({k: v for k, v in os.environ.items() if "HDF5" in k}))
def located(path, step):
    with library.failures_named(path): misbehave(path)
    return locate(path, step)
def decoded(path, *rest):
    misbehave(os.readlink(path) if os.path.islink(path) else path)
    return read(path, *rest)
reading.locate, datasets.read = located, decoded
child.main(0, 1)
"""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reader_process._keeper._end()
    monkeypatch.setattr(reader_process, "_START", PRETEND)
    yield
    reader_process._keeper._end()


def make(path: Path, **options: object) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=np.arange(6, dtype="f4"), **options)
    return path


@few_cases(
    0,
    "what, got",
    [
        ("leave", "exit code 7"),
        ("outside", "an answer that cannot be: a place outside the file"),
        ("environment", r"\{'HDF5_PLUGIN_PRELOAD': '::'\}"),
        ("flood", "an answer that cannot be: a value of 1099511627776 bytes"),
        ("open", "Too many open files"),
        ("segfault", "the library died: SIGSEGV"),
        ("abort", "the library died: SIGABRT"),
        ("loop", "processor time"),
        ("lie", "an answer that cannot be"),
        ("write", "File too large"),
        ("dump", r"core \(0, 0\)"),
    ],
)
def test_what_the_library_may_do(
    tmp_path: Path, pretend: None, monkeypatch: pytest.MonkeyPatch, what: str, got: str
) -> None:
    monkeypatch.setenv("HDF5_PLUGIN_PATH", str(tmp_path))
    monkeypatch.setenv("HDF5_DRIVER", "split")
    path, good = make(tmp_path / f"{what}.h5"), make(tmp_path / "good.h5")
    before = list(hdf5.locate(str(good)).tensors)
    with pytest.raises(ShardError, match=got) as caught:
        hdf5.locate(str(path))
    assert str(path) in caught.value.where and caught.value.remedy
    # The next file has nothing to do with it.
    assert list(hdf5.locate(str(good)).tensors) == before == ["w"]


@pytest.mark.slow
def test_memory(tmp_path: Path, pretend: None) -> None:
    with pytest.raises(ShardError, match="too much memory") as caught:
        hdf5.locate(str(make(tmp_path / "grow.h5")))
    assert caught.value.where.startswith(str(tmp_path / "grow.h5"))


@pytest.mark.slow
def test_death_while_elements_are_decoded(tmp_path: Path, pretend: None) -> None:
    path = make(tmp_path / "good.h5", chunks=(2,), compression="gzip")
    source = hdf5.locate(str(path)).tensors["w"].source
    assert isinstance(source, LibraryRead)
    whole = Box.whole((6,))
    assert source.read(whole).view("f4").tolist() == [0, 1, 2, 3, 4, 5]
    path.rename(tmp_path / "segfault.h5")
    path.symlink_to("segfault.h5")
    with pytest.raises(ShardError, match="died: SIGSEGV") as caught:
        source.read(whole)
    assert caught.value.where == f"{path}, /w"


def test_a_relative_path_and_one_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "w.h5")
    hdf5.locate(str(tmp_path / "w.h5"))  # the process is there, and knows the folder it was started in
    monkeypatch.chdir(tmp_path)
    assert list(hdf5.locate("w.h5").tensors) == ["w"]
    name = os.fsdecode(b"\xff\n.h5")
    Path("w.h5").rename(name)
    assert hdf5.locate(name).path == name


def test_one_process_serves_all_files_and_threads(tmp_path: Path) -> None:
    paths = [str(make(tmp_path / f"{number}.h5", chunks=(2,))) for number in range(8)]
    hdf5.locate(paths[0])
    process = reader_process._keeper._process
    assert process is not None
    arrays: list[object] = []

    def work() -> None:
        for path in paths:
            source = hdf5.locate(path).tensors["w"].source
            assert isinstance(source, LibraryRead)
            arrays.append(source.read(Box((1,), (3,))).view("f4").tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrays == [[1, 2]] * 32
    assert reader_process._keeper._process is process


@pytest.mark.slow
def test_it_is_started_anew_when_it_has_gone(tmp_path: Path) -> None:
    path = str(make(tmp_path / "w.h5"))
    hdf5.locate(path)
    first = reader_process._keeper._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert list(hdf5.locate(path).tensors) == ["w"]
    second = reader_process._keeper._process
    assert second is not None and second.pid != first.pid


def test_a_fork_has_a_process_of_its_own(tmp_path: Path) -> None:
    path = str(make(tmp_path / "w.h5"))
    script = f"""
import os, sys
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.hdf5 import reader_process as isolation
hdf5.locate({path!r})
ours = isolation._keeper._process.pid
isolation._keeper._lock.acquire()  # as if a thread were just asking
child = os.fork()
if child == 0:
    os._exit(list(hdf5.locate({path!r}).tensors) != ["w"] or isolation._keeper._process.pid == ours)
isolation._keeper._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert list(hdf5.locate({path!r}).tensors) == ["w"] and isolation._keeper._process.pid == ours
"""
    run_command([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_it_ends_with_who_asks(tmp_path: Path) -> None:
    path = str(make(tmp_path / "w.h5"))
    script = f"""
import os, signal
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.hdf5 import reader_process as isolation
hdf5.locate({path!r})
print(isolation._keeper._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = run_command([sys.executable, "-c", script])
    deadline = time.monotonic() + 120
    while Path(f"/proc/{int(finished.out)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_nothing_is_kept_open_for_it(tmp_path: Path) -> None:
    """Locks and connections that this process leaves to its children are not held by the one that has the library."""
    path = str(make(tmp_path / "w.h5"))
    reader_process._keeper._end()
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        hdf5.locate(path)
        process = reader_process._keeper._process
        assert process is not None
        kept = {str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
    reader_process._keeper._end()
    assert str(tmp_path / "lock") not in kept


def test_a_shard_of_our_own_needs_neither_process_nor_library(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "native_v2.h5"
    script = f"""
import sys
from reshard_mpi.formats import hdf5
assert hdf5.locate({str(golden)!r}).tensors
assert not any(name in sys.modules for name in ("h5py", "numpy", "reshard_mpi.formats.hdf5.reader_process")), "loaded"
"""
    run_command([sys.executable, "-c", script], check=True)


def test_manifests_survive_pickling(tmp_path: Path) -> None:
    path = make(tmp_path / "w.h5", chunks=(2,))
    again = pickle.loads(pickle.dumps(hdf5.locate(str(path))))
    assert again.tensors["w"].source.read(Box((0,), (1,))).view("f4").tolist() == [0]


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["transform", "--jobs", "2"]])
def test_modules_beside_a_file_are_not_run(tmp_path: Path, command: list[str]) -> None:
    """Where a foreign file lies, files may lie that are named as what interpreters of ours import."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", data=np.arange(64, dtype=np.float32), chunks=(8,))
    for name in ("resource", "psutil", "numpy", "h5py", "pickle", "reshard_mpi", "struct", "ml_dtypes", "zlib_ng"):
        (tmp_path / f"{name}.py").write_text("open('it-ran', 'w')\n")
    where = {"transform": ["a.h5", "out"]}.get(command[0], ["a.h5"])
    line = [sys.executable, "-P", "-m", "reshard_mpi", command[0], *where, *command[1:]]
    finished = run_command(line, cwd=tmp_path)
    assert finished.code == (3 if command[0] == "verify" else 0), finished  # it keeps no sums to verify by
    assert not (tmp_path / "it-ran").exists()
