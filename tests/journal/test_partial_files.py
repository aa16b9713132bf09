"""What killed calls of the functions leave: removed when the target is made again, if nobody is writing it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.conversions import Conversion, assert_right, make
from support.processes import run_command
from support.stand_ins import doing

import reshard_mpi
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal import publication
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.publication import Publication, dead_partial_bytes, remove_dead_partials
from reshard_mpi.journal.target_folders import Unrecorded
from reshard_mpi.planning.rank_plan import StageDigest
from reshard_mpi.processes.host import host_name

CONTENT = bytes(8192)
INPUTS = TargetInputs((), StageDigest(0, "", 0), (), ())
# Writes a target, and publishes it when it is told to.
WRITER = f"""
import sys
from pathlib import Path
from reshard_mpi.journal.target_records import TargetInputs
from reshard_mpi.journal.target_folders import Unrecorded
from reshard_mpi.planning.rank_plan import StageDigest
path = Path(sys.argv[1])
inputs = TargetInputs((), StageDigest(0, "", 0), (), ())
with Unrecorded(path.parent.parent).writing(0, path, inputs) as publication:
    publication.partial.write_bytes(b"x" * {len(CONTENT)})
    print(publication.partial, flush=True)
    sys.stdin.readline()
    publication.publish()
"""
Start = Callable[..., tuple["subprocess.Popen[str]", Path]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0" / "net.ckpt"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Start a writer on a host of a name; returns it, and its partial file."""
    started = []

    def start_one(host: str | None = None) -> tuple[subprocess.Popen[str], Path]:
        env = {**os.environ, **({"RESHARD_MPI_HOST": host} if host else {})}
        command = [sys.executable, "-c", WRITER, str(path)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        started.append(writer)
        assert writer.stdout is not None
        return writer, Path(writer.stdout.readline().strip())

    yield start_one
    for writer in started:
        writer.kill()
        writer.communicate()


def write(path: Path) -> None:
    with Unrecorded(path.parent.parent).writing(0, path, INPUTS) as mine:
        mine.partial.write_bytes(b"mine")
        mine.publish()


def left(path: Path) -> int:
    return Unrecorded(path.parent.parent).left_bytes(path)


def test_what_a_killed_writer_left(path: Path, start: Start) -> None:
    writer, partial = start()
    writer.kill()
    writer.wait()
    assert partial.stat().st_size == len(CONTENT)
    assert left(path) == 512 * partial.stat().st_blocks > 0
    write(path)
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == b"mine"
    assert left(path) == 0


def test_what_a_living_writer_writes(path: Path, start: Start) -> None:
    """Calls alike on all ranks replace each other's targets, each whole."""
    writer, partial = start()
    assert left(path) == 0
    write(path)
    assert path.read_bytes() == b"mine" and partial.stat().st_size == len(CONTENT)
    writer.communicate("publish\n")
    assert writer.returncode == 0
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == b"x" * len(CONTENT)


def test_what_was_written_on_another_host(path: Path, start: Start) -> None:
    """Its lock may not be seen here, so it is left as it is, and not counted."""
    writer, partial = start("another")
    writer.kill()
    writer.wait()
    write(path)
    assert partial.exists() and left(path) == 0
    with Folder.open(path.parent) as folder:
        remove_dead_partials(folder, path.name, "another")
    assert list(path.parent.iterdir()) == [path]


def test_one_of_a_name_that_is_a_pattern(tmp_path: Path) -> None:
    host = host_name(os.environ)
    with Folder.open(tmp_path) as folder, Publication(folder, "net1.ckpt", host=host) as other:
        other.partial.write_bytes(CONTENT)
        assert dead_partial_bytes(folder, "net?.ckpt", host) == dead_partial_bytes(folder, "net1.ckpt", host) == 0
        remove_dead_partials(folder, "net?.ckpt", host)
        assert list(tmp_path.iterdir()) == [other.partial]


def test_one_that_is_taken_for_dead_before_it_has_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again, with another name."""
    try_lock = publication._try_lock
    seen: list[str] = []

    def interrupted(descriptor: int) -> bool | None:
        (partial,) = tmp_path.iterdir()
        seen.append(partial.name)
        if len(seen) == 1:  # another process has the lock, and is about to remove it
            partial.unlink()
            return False
        if len(seen) == 2:  # another process has removed it already
            partial.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr(publication, "_try_lock", interrupted)
    with Folder.open(tmp_path) as folder, Publication(folder, "net.ckpt", host="here") as mine:
        assert len(set(seen)) == 3 and seen[2] == mine.partial.name
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks(path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    writer, partial = start()
    writer.kill()
    writer.wait()
    monkeypatch.setattr(fcntl, "flock", refuse)
    write(path)  # which of the others live cannot be told
    assert path.read_bytes() == b"mine" and partial.exists() and left(path) == 0


def test_locks_that_are_no_files(path: Path, tmp_path: Path) -> None:
    """What has such a name, and is nobody's lock, keeps nobody waiting and is not followed."""
    path.parent.mkdir()
    digest = publication._host_digest(host_name(os.environ))
    (tmp_path / "private").write_text("mine")
    (path.parent / f".net.ckpt.{digest}00000000.partial").symlink_to(tmp_path / "private")
    (path.parent / f".net.ckpt.{digest}00000001.partial").mkdir()
    write(path)
    assert (tmp_path / "private").read_text() == "mine" and path.read_bytes() == b"mine"


# Whole calls

CALL = """
import sys, reshard_mpi
src, dst, src_strategy, dst_strategy, jobs = sys.argv[1:]
reshard_mpi.transform_checkpoints(src, dst, "checkpoint_", src_strategy, dst_strategy, int(jobs))
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_call_that_was_killed(tmp_path: Path, jobs: str) -> None:
    conversion: Conversion = make(tmp_path)
    paths = [str(path) for path in (conversion.src, conversion.dst, conversion.src_strategy, conversion.dst_strategy)]
    killing = doing(tmp_path, f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    finished = run_command([sys.executable, "-c", CALL, *paths, jobs], env=killing)
    assert finished.code != 0
    assert list(conversion.dst.rglob("*.partial"))
    reshard_mpi.transform_checkpoints(*paths[:2], "checkpoint_", *paths[2:])
    assert set(conversion.dst.rglob("*.*")) == {conversion.written(rank) for rank in (0, 1)}
    assert_right(conversion)


@pytest.mark.parametrize("function", ["partial_name", "_try_lock"])
def test_a_signal_at_the_beginning_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publication, function, interrupted)
    with Folder.open(tmp_path) as folder, pytest.raises(KeyboardInterrupt):
        Publication(folder, "net.ckpt", host="here").__enter__()
    assert not list(tmp_path.iterdir())
