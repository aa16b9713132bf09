"""What is safe to write and what is done: locks, partial files, publishing by rename, records.

Under the target folder, `.reshard_mpi/run.json` names the run that fills it, `rank_<r>.lock` is locked while target r
is written (the kernel drops it when the writer dies) and `rank_<r>.json` records that target r is complete. All who
write share `commit.lock`, and who commits has it alone, so that no commit record is made of what is just changing.

A record is written twice. The first one is there before the target takes its name and says which file that will be
(`TargetRecord.announced`), so that a target that was finished is known by it though its writer died in that instant.
The second says the same of whatever is in place, for folders that are copied and file systems that number files anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from reshard_mpi.errors import TargetError
from reshard_mpi.hosts import host_name
from reshard_mpi.paths import described, require_replaceable
from reshard_mpi.publication import (
    Publication,
    dead_bytes,
    make_folder,
    partial_path,
    publish_text,
    remove_dead,
    remove_stale,
    shown_alive,
    stale_bytes,
    sync,
)
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

# Between attempts to take a lock that others have for an instant, to see whether it is held.
_NAP_SECONDS = 0.002
_CHANGED = "restore what was there, or make all targets anew from what is there now (--overwrite)"


def withdraw(folder: Path) -> None:
    """Remove the commit record of a target folder, for good: its targets are going to change."""
    try:
        (folder / COMMIT_RECORD).unlink()
    except FileNotFoundError:
        return
    sync(folder)


def commit_lock_path(state: Path) -> Path:
    return state / "commit.lock"


@contextlib.contextmanager
def commit_lock(state: Path, kind: int) -> Iterator[None]:
    """Hold the lock that who writes targets shares (LOCK_SH), and who commits has alone (LOCK_EX).

    Raises BlockingIOError if `kind` has LOCK_NB and somebody is in the way.
    """
    with commit_lock_path(state).open("a+") as stream:
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
        """Say no. Raises TargetError if no file can be put in that place."""
        _require_place(path)
        return False

    def is_verified(self, target_rank: int) -> bool:
        return False

    def begin(self) -> None:
        pass

    @contextlib.contextmanager
    def writing(self, target_rank: int, path: Path, evidence: Evidence | None = None) -> Iterator[Publication]:
        """Yield what to write the target to and to publish it with; without that it is removed."""
        make_folder(path.parent)
        folder = path.parent.parent
        record = TargetRecord.read(folder / STATE, target_rank)
        if record is not None and folder / record.file == path:
            withdraw(folder)
            record_path(folder / STATE, target_rank).unlink(missing_ok=True)
        host = host_name(os.environ)
        remove_dead(path, host)
        with (
            shown_alive(path, host) as token,
            Publication(path, lambda *_: _require_unchanged(target_rank, evidence), token=token) as publication,
        ):
            yield publication

    def left_bytes(self, path: Path) -> int:
        """Return what is free again when a target is begun: what the dead have left of it."""
        return dead_bytes(path, host_name(os.environ))

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return the longest paths that are made for a target."""
        return (partial_path(path),)


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
        _require_writable(self._state)
        require_replaceable(self.folder / COMMIT_RECORD, "the commit record")
        for lock in (self._run_lock(), commit_lock_path(self._state)):
            require_replaceable(lock, "a lock")  # to open a pipe would be to wait for whoever is at its other end
        there = read_json(run_path(self._state))
        if there is None or there.get("digest") == self.identity.digest or self._overwrite:
            return
        other = RunIdentity.recorded(self._state)
        ours, theirs = self.identity.differences(other) if other is not None else ("the same settings", "")
        raise TargetError(
            "the target folder holds another run",
            expected=f"an empty folder, or a run with {ours}",
            got=f"a run with {theirs}" if theirs else f"a record of a run that cannot be read: {run_path(self._state)}",
            where=str(self.folder),
            remedy="use another target, or --overwrite to replace that run's targets one by one",
        )

    def is_done(self, target_rank: int, path: Path) -> bool:
        """Tell whether the target is complete and to be skipped (--resume).

        Raises TargetError if its file is there and neither --resume nor --overwrite says what to do with it, if no file
        can be put in that place, or a live process is writing it; DisagreementError if it is to be skipped, but was
        made from sources that have changed.
        """
        _require_place(path)
        require_replaceable(self._lock(target_rank), "a lock")
        self._refuse_locked(target_rank)
        if self._overwrite or not path.exists():
            return False
        record = self._record(target_rank)
        status = path.stat()
        complete = record is not None and record.is_about(status)
        if self._resume:
            if complete and record is not None:
                problem = f"target rank {target_rank} was made from sources that have changed since"
                record.evidence.sources.require_unchanged(problem, _CHANGED)
            return complete
        origin = "complete by the record of this run" if complete else "of another origin"
        raise TargetError(
            f"target rank {target_rank} is there already",
            expected="no file of that name",
            got=f"{status.st_size} bytes, {origin}",
            where=str(path),
            remedy="--resume skips what is complete, --overwrite replaces it",
        )

    def is_verified(self, target_rank: int) -> bool:
        """Tell whether a target that is done was compared with its sources when it was made."""
        record = self._record(target_rank)
        return record is not None and bool(record.sums)

    def begin(self) -> None:
        """Create the folder and say which run fills it; joins the run if another process has begun it."""
        make_folder(self._state)
        run = run_path(self._state)
        with self._run_lock().open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            remove_stale(run)
            there = read_json(run)
            if there is None or (self._overwrite and there.get("digest") != self.identity.digest):
                publish_text(run, self.identity.as_text())
        self.check()

    @contextlib.contextmanager
    def writing(self, target_rank: int, path: Path, evidence: Evidence) -> Iterator[Publication]:
        """Hold the target's lock and yield what to write it to and to publish it with; without that it is removed.

        evidence: what its record is to say. Raises TargetError if a live process is writing the target.
        """
        with self._locked(target_rank), commit_lock(self._state, fcntl.LOCK_SH):
            withdraw(self.folder)
            make_folder(path.parent)
            record = record_path(self._state, target_rank)
            record.unlink(missing_ok=True)
            remove_stale(record)
            remove_stale(path)
            announce = partial(self._announce, target_rank, path, evidence)
            with Publication(path, announce, partial(self._confirm, target_rank)) as publication:
                yield publication

    def left_bytes(self, path: Path) -> int:
        """Return what is free again when a target is begun: what the dead have left of it."""
        return stale_bytes(path)

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return the longest paths that are made for a target."""
        return partial_path(path), partial_path(record_path(self._state, target_rank))

    def _announce(
        self, target_rank: int, path: Path, evidence: Evidence, whole: Path, sums: Sequence[TensorSum]
    ) -> None:
        """Record that the target is complete from the instant on in which `whole` takes its name."""
        _require_unchanged(target_rank, evidence)
        file, status = path.relative_to(self.folder).as_posix(), whole.stat()
        announced = (status.st_ino, status.st_mtime_ns)
        size_bytes = status.st_size
        record = TargetRecord(self.identity.digest, target_rank, file, size_bytes, evidence, tuple(sums), announced)
        publish_text(record_path(self._state, target_rank), record.as_text(), synced=False)  # the next one is

    def _confirm(self, target_rank: int) -> None:
        record = self._record(target_rank)
        if record is not None:
            publish_text(record_path(self._state, target_rank), record._replace(announced=None).as_text())

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

    def _run_lock(self) -> Path:
        return self._state / "run.lock"

    def _lock(self, target_rank: int) -> Path:
        return self._state / f"rank_{target_rank}.lock"

    def _take(self, stream: TextIO, kind: int, target_rank: int) -> None:
        """Take the lock that who writes a target has alone, and who looks for a writer shares for an instant."""
        while not _try_lock(stream, kind):
            if _try_lock(stream, fcntl.LOCK_SH):  # only others that look, as this process now does, are in the way
                fcntl.flock(stream, fcntl.LOCK_UN)
                time.sleep(_NAP_SECONDS * os.urandom(1)[0] / 256)  # not all at once again
                continue
            raise TargetError(
                f"target rank {target_rank} is being written by another process",
                expected="one process for each target",
                got=f"a lock on {stream.name}",
                where=str(self.folder),
                remedy="wait for it, or give the processes different targets",
            )

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
            "the target is not a folder" if nearest == folder else f"{described(nearest)} is in the way of the target",
            expected="a folder",
            got=described(nearest),
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


def _require_place(path: Path) -> None:
    """Raise TargetError if no file can take the name `path`, whatever is there."""
    _require_writable(path.parent)
    require_replaceable(path, "a target")


def _require_unchanged(target_rank: int, evidence: Evidence | None) -> None:
    if evidence is not None:
        problem = f"sources of target rank {target_rank} were changed while it was written"
        evidence.sources.require_unchanged(problem, "make sure that nothing writes to the source, and run again")


def _try_lock(stream: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
