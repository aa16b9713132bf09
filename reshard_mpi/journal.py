"""What is safe to write and what is done: locks, partial files, publishing by rename, records.

Under the target folder, `.reshard_mpi/run.json` names the run that fills it, `rank_<r>.lock` is locked while target r
is written (the kernel drops it when the writer dies) and `rank_<r>.json` records that target r is complete. All who
write share `commit.lock`, and who commits has it alone, so that no commit record is made of what is just changing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from reshard_mpi.errors import TargetError
from reshard_mpi.records import (
    COMMIT_RECORD,
    STATE,
    Evidence,
    RunIdentity,
    TargetRecord,
    TensorSum,
    read_json,
    record_path,
    run_path,
)

_PARTIAL = ".partial"


class Publication:
    """A file that is written beside its final path and takes that name, synced, when `publish` is called.

    Left without that, for whatever reason, it is removed. then: called when the file is in place, with the sums that
    were given.
    """

    def __init__(self, path: Path, then: Callable[[Sequence[TensorSum]], None] = lambda sums: None) -> None:
        self.partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}{_PARTIAL}")
        self._path = path
        self._then = then
        self._is_published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            self.partial.unlink(missing_ok=True)

    def publish(self, sums: Sequence[TensorSum] = ()) -> None:
        """Put the file in place, whatever was there. sums: of what it holds, if they are known."""
        sync(self.partial)
        self.partial.replace(self._path)
        self._is_published = True
        sync(self._path.parent)
        self._then(sums)


def publish_text(path: Path, text: str) -> None:
    """Put a small file in place, whatever was there."""
    with Publication(path) as publication:
        publication.partial.write_text(text)
        publication.publish()


def remove_stale(path: Path) -> None:
    """Remove what processes that died have left of `path`; nobody else may be writing it."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        stale.unlink(missing_ok=True)


def withdraw(folder: Path) -> None:
    """Remove the commit record of a target folder, for good: its targets are going to change."""
    try:
        (folder / COMMIT_RECORD).unlink()
    except FileNotFoundError:
        return
    sync(folder)


@contextlib.contextmanager
def commit_lock(state: Path, kind: int) -> Iterator[None]:
    """Hold the lock that who writes targets shares (LOCK_SH), and who commits has alone (LOCK_EX).

    Raises BlockingIOError if `kind` has LOCK_NB and somebody is in the way.
    """
    with (state / "commit.lock").open("a+") as stream:
        fcntl.flock(stream, kind)
        yield


class Unrecorded:
    """Keeps no state: targets are published whole, whatever was there, so identical concurrent runs are harmless.

    What the state of another run says of a target that is replaced is withdrawn.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Raise TargetError if the folder cannot be written to."""
        _require_writable(self._folder)

    def is_done(self, target_rank: int, path: Path) -> bool:
        return False

    def begin(self) -> None:
        pass

    @contextlib.contextmanager
    def writing(self, target_rank: int, path: Path, evidence: Evidence | None = None) -> Iterator[Publication]:
        """Yield what to write the target to and to publish it with; without that it is removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent.parent
        record = TargetRecord.read(folder / STATE, target_rank)
        if record is not None and folder / record.file == path:
            withdraw(folder)
            record_path(folder / STATE, target_rank).unlink(missing_ok=True)
        with Publication(path) as publication:
            yield publication


class Journal:
    """The state of one run in one target folder. Nothing is created before `begin`."""

    def __init__(self, folder: Path, identity: RunIdentity, *, resume: bool, overwrite: bool) -> None:
        self.folder = folder
        self.identity = identity
        self._state = folder / STATE
        self._resume = resume
        self._overwrite = overwrite

    def check(self) -> None:
        """Raise TargetError if the folder cannot be joined: it cannot be written to, or holds another run."""
        _require_writable(self.folder)
        other = read_json(run_path(self._state))
        if other is not None and other.get("digest") != self.identity.digest and not self._overwrite:
            raise TargetError(
                "the target folder holds another run",
                expected="an empty folder, or one this same run has begun",
                got=f"a run with other settings: {self.identity.difference(other)}",
                where=str(self.folder),
                remedy="use another target, or --overwrite to replace that run's targets one by one",
            )

    def is_done(self, target_rank: int, path: Path) -> bool:
        """Tell whether the target is complete and to be skipped (--resume).

        Raises TargetError if its file is there and neither --resume nor --overwrite says what to do with it, or a live
        process is writing it.
        """
        self._refuse_locked(target_rank)
        if self._overwrite or not path.exists():
            return False
        record = self._record(target_rank)
        size_bytes = path.stat().st_size
        complete = record is not None and record.size_bytes == size_bytes
        if self._resume:
            return complete
        raise TargetError(
            f"target rank {target_rank} is there already",
            expected="no file of that name",
            got=f"{size_bytes} bytes, " + ("complete by the record of this run" if complete else "of another origin"),
            where=str(path),
            remedy="--resume skips what is complete, --overwrite replaces it",
        )

    def begin(self) -> None:
        """Create the folder and say which run fills it; joins the run if another process has begun it."""
        self._state.mkdir(parents=True, exist_ok=True)
        run, text = run_path(self._state), self.identity.as_text()
        if self._overwrite:
            publish_text(run, text)
        else:  # a link, unlike a rename, fails if another process was first
            with Publication(run) as publication:
                publication.partial.write_text(text)
                with contextlib.suppress(FileExistsError):
                    os.link(publication.partial, run)
        self.check()

    @contextlib.contextmanager
    def writing(self, target_rank: int, path: Path, evidence: Evidence) -> Iterator[Publication]:
        """Hold the target's lock and yield what to write it to and to publish it with; without that it is removed.

        evidence: what its record is to say. Raises TargetError if a live process is writing the target.
        """
        with self._locked(target_rank), commit_lock(self._state, fcntl.LOCK_SH):
            withdraw(self.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(path)
            record = record_path(self._state, target_rank)
            record.unlink(missing_ok=True)
            remove_stale(record)
            with Publication(path, partial(self._record_complete, target_rank, path, evidence)) as publication:
                yield publication

    def _record_complete(self, target_rank: int, path: Path, evidence: Evidence, sums: Sequence[TensorSum]) -> None:
        file = path.relative_to(self.folder).as_posix()
        record = TargetRecord(self.identity.digest, target_rank, file, path.stat().st_size, evidence, tuple(sums))
        publish_text(record_path(self._state, target_rank), record.as_text())

    @contextlib.contextmanager
    def _locked(self, target_rank: int) -> Iterator[None]:
        with self._lock(target_rank).open("w") as stream:
            self._take(stream, fcntl.LOCK_EX, target_rank)
            yield

    def _refuse_locked(self, target_rank: int) -> None:
        try:
            with self._lock(target_rank).open() as stream:
                self._take(stream, fcntl.LOCK_SH, target_rank)
        except FileNotFoundError:
            pass  # nobody has ever written it

    def _lock(self, target_rank: int) -> Path:
        return self._state / f"rank_{target_rank}.lock"

    def _take(self, stream: TextIO, kind: int, target_rank: int) -> None:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetError(
                f"target rank {target_rank} is being written by another process",
                expected="one process for each target",
                got=f"a lock on {stream.name}",
                where=str(self.folder),
                remedy="wait for it, or give the processes different targets",
            ) from None

    def _record(self, target_rank: int) -> TargetRecord | None:
        record = TargetRecord.read(self._state, target_rank)
        return record if record is not None and record.digest == self.identity.digest else None


def _require_writable(folder: Path) -> None:
    """Raise TargetError if `folder` is there but cannot be written to, or cannot be made where it is not."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise TargetError(
            "the target is not a folder" if nearest == folder else "a file is in the way of the target",
            expected="a folder",
            got="a file",
            where=str(nearest),
            remedy="choose another target",
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise TargetError(
            "the target cannot be written",
            expected="the right to make files",
            got="a folder that is read-only to this user",
            where=str(nearest),
            remedy="choose another target, or change its permissions",
        )


def sync(path: Path) -> None:
    """Have all of a file, or the names in a folder, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
