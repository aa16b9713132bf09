"""Refuse the folder of another run; lock, publish and record the targets of a run (`Journal`).

In the target folder, `.reshard_mpi/run.json` names the run that fills it, `rank_<r>.lock` is locked while target r is
written (the kernel unlocks it when the writer dies), and `rank_<r>.json` records that target r is complete. Processes
that write targets share `commit.lock`, and one that commits has it alone, so nothing changes while it commits.

A record is written twice. The first one is written before the target takes its name and identifies the file that will
(`TargetRecord.announced`), so a finished target is known as such even if its writer died in that instant. The second
one names no inode, so it stays valid when the folder is copied, and on file systems that give files new numbers.
What lies in a target's place and is not this program's own (see `file_ownership`) is replaced with --overwrite alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from reshard_mpi.errors import (
    CoverageError,
    DisagreementError,
    ShardError,
    StoreError,
    TargetError,
    TransformError,
    told,
)
from reshard_mpi.filesystem.folders import (
    Folder,
    close,
    closing,
    holders,
    make_folders,
    open_lock,
    try_lock,
    wait_for_lock,
)
from reshard_mpi.filesystem.paths import require_file_or_nothing
from reshard_mpi.filesystem.source_files import SourceFile, is_taken, version_of
from reshard_mpi.journal.file_ownership import (
    is_in_place,
    leftover_index,
    leftovers,
    note_replaceable,
    other_saves,
    remove_earlier_run,
    remove_note,
    require_no_other_records,
    require_own_index,
    require_own_target,
)
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.publication import Publication, partial_path, publish_text, remove_dead_partials
from reshard_mpi.journal.record_files import (
    COMMIT_RECORD,
    STATE,
    lock_name,
    read_json,
    record_path,
    recorded_ranks,
    run_path,
)
from reshard_mpi.journal.run_records import RunIdentity, glob_of, keep_strategy, strategy_of_run
from reshard_mpi.journal.target_folders import (
    opened_inner,
    require_place,
    require_writable,
    space_of_dead_partials,
    target_folder,
    uncommit,
)
from reshard_mpi.journal.target_records import RecordHead, TargetRecord, TensorSum, sample_of
from reshard_mpi.planning.source_flaws import Differences
from reshard_mpi.text import Say

# Between attempts to take a lock that others have for an instant, to see whether it is held.
_NAP_SECONDS = 0.002
# Beginning a run takes as long as writing a small file, committing it some moments.
_BEGIN_SECONDS = 3.0
_COMMIT_SECONDS = 10.0
_CHANGED = "restore what was there, or make all targets anew from what is there now (--overwrite)"
_RUN_LOCK, COMMIT_LOCK = "run.lock", "commit.lock"


class Journal:
    """The state of one run in one target folder. Nothing is created before `begin`."""

    def __init__(
        self,
        folder: Path,
        identity: RunIdentity,
        *,
        resume: bool,
        overwrite: bool,
        strategy: Callable[[], str] | None = None,
    ) -> None:
        """strategy: makes the placement table of the targets, to be recorded; None: the targets say it themselves."""
        self.folder = folder
        self.identity = identity
        self._strategy = strategy
        self._state = folder / STATE
        self._index_names = identity.index_names
        self._resume = resume
        self._overwrite = overwrite

    def check(self) -> None:
        """Raise TargetError if the folder cannot be joined: it cannot be written to, or is not this run's.

        It is another run's if it holds a record of another run, or an index or a commit record that this run has not
        written.
        """
        require_writable(self.folder)
        with opened_inner(self.folder, STATE) as state:
            if state is not None:
                require_writable(self._state)
                for lock in (_RUN_LOCK, COMMIT_LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        close(state.open_file(lock, os.O_RDONLY, "a lock"))
        require_file_or_nothing(self.folder / COMMIT_RECORD, "the commit record")
        self._require_joinable()

    def _require_joinable(self) -> None:
        """Raise TargetError if the records, the index or the commit record in the folder are not this run's."""
        if self._overwrite:
            return
        run = read_json(run_path(self._state))
        if run is None and recorded_ranks(self._state):
            require_no_other_records(self._state, self.identity)
        if run is None or run.get("digest") == self.identity.digest:
            self._require_own_index()
            return
        other = RunIdentity.recorded(self._state)
        choice = self.identity.other_choice(other) if other is not None else None
        if choice is not None:
            raise _another_choice(*choice, self.folder, str(self.identity.facts.get("source")))
        moment = self.identity.moment_beside(other) if other is not None else None
        goes_on = "" if moment is None else f"to go on with what was begun, give {moment} as the source; else "
        ours, theirs = self.identity.differences(other) if other is not None else ("the same settings", "")
        staying = other_saves(other, self.identity) if other is not None else ()
        replaces = (
            f"--overwrite to add these targets beside it ({', '.join(staying)} stays)"
            if staying
            else "--overwrite to replace that run's targets one by one"
        )
        raise TargetError(
            "the target folder holds another run",
            expected=f"an empty folder, or a run with {ours}",
            got=f"a run with {theirs}" if theirs else f"a record of a run that cannot be read: {run_path(self._state)}",
            where=str(self.folder),
            remedy=f"{goes_on}use another target, or {replaces}",
        )

    def skips(self, target_rank: int, path: Path) -> bool:
        """Tell whether the target is complete and is to be skipped (--resume).

        Raises TargetError if its file exists and neither --resume nor --overwrite is given; if the file is of another
        origin, without --overwrite; if no file can take its name; if a live process is writing it. Raises
        DisagreementError if the target is to be skipped, but was made from sources that have changed.
        """
        self._require_place(path)
        self._refuse_locked(target_rank)
        if self._overwrite or not is_taken(path):
            return False
        record = self._record(target_rank)
        file = path.relative_to(self.folder).as_posix()
        complete = record is not None and is_in_place(self.folder, self.identity, target_rank, file)
        if not complete:
            self._require_recorded(target_rank, path)
        if self._resume:
            if complete and record is not None:
                problem = f"target rank {target_rank} was made from sources that have changed since"
                record.inputs.sources.require_unchanged(problem, _CHANGED)
            return complete
        origin = "complete by the record of this run" if complete else "which this run was about to replace"
        raise TargetError(
            f"target rank {target_rank} is there already",
            expected="no file of that name",
            got=f"{version_of(path).size_bytes} bytes, {origin}",
            where=str(path),
            remedy="--resume skips what is complete, --overwrite replaces it",
        )

    def _require_place(self, path: Path) -> None:
        """Raise TargetError if no file can take the name of a target."""
        require_place(self.folder, path)

    def _require_recorded(self, target_rank: int, path: Path) -> None:
        """Raise TargetError if no record explains the file in a target's place."""
        with opened_inner(self.folder, STATE) as state:
            require_own_target(state, self.folder, target_rank, path)

    def is_verified(self, target_rank: int) -> bool:
        """Tell whether a complete target was compared with its sources when it was made."""
        record = self._record(target_rank)
        return record is not None and record.is_verified

    def leftovers(self) -> Collection[str]:
        """Return the paths of the files of an earlier run that `begin` removes, since --overwrite is given.

        They are relative to the target folder.
        """
        if not self._overwrite or self._is_begun():
            return ()
        return {*leftovers(self.folder, self.identity), *leftover_index(self.folder, self.identity)}

    def begin(self, say: Say = lambda _: None) -> None:
        """Create the folder and record the run in it; join the run if another process has begun it.

        Before that the `leftovers` of an earlier run are removed.

        Args:
            say: is told who is waited for.

        Raises TargetError as `check` does, and if the lock is held for too long.
        """
        make_folders(self.folder)
        run, path = run_path(self._state), self._state / _RUN_LOCK
        with (
            Folder.open(self.folder) as folder,
            folder.made_inner(STATE) as state,
            closing(open_lock(state, _RUN_LOCK)) as lock,
        ):
            if wait_for_lock(lock, fcntl.LOCK_EX, path, say, _BEGIN_SECONDS, self._is_begun):
                remove_dead_partials(state, run.name)
                is_new = read_json(run) is None
                if self._overwrite and not self._is_begun():
                    is_new = True
                    remove_earlier_run(folder, state, self.identity, self._index_names)
                if is_new or self._is_begun():
                    self._keep_strategy(state)
                if is_new:
                    publish_text(state, run.name, self.identity.as_text())
        self.check()

    def _keep_strategy(self, state: Folder) -> None:
        """Record how the targets are cut, unless they say it themselves or the record is there."""
        if self._strategy is not None and strategy_of_run(self.folder, self.identity.digest) is None:
            keep_strategy(state, self.identity.digest, self._strategy())

    @contextlib.contextmanager
    def writing(
        self, target_rank: int, path: Path, inputs: TargetInputs, say: Say = lambda _: None
    ) -> Iterator[Publication]:
        """Hold the target's lock and yield the file to write and publish; if it is not published, it is removed.

        Args:
            inputs: for its record.
            say: is told who is waited for.

        Raises TargetError if a live process is writing the target, or another run has begun since.
        """
        with (
            Folder.open(self.folder) as folder,
            folder.inner(STATE) as state,
            self._locked(state, target_rank) as lock,
            _commit_lock(state, say),
            target_folder(folder, path) as inner,
        ):
            self._require_begun()
            self._require_still_own(state, target_rank, path)
            if not self._overwrite:
                self._require_own_index()
            uncommit(folder, self._index_names)
            if is_taken(path) or os.fstat(lock).st_size:  # else there is nothing to note, and nothing was noted
                note_replaceable(lock, path)
            record = record_path(self._state, target_rank).name
            state.remove(record)
            remove_dead_partials(state, record)
            remove_dead_partials(inner, path.name)

            def announce(written: SourceFile, sums: Sequence[TensorSum], besides: str) -> None:
                """Write the record that becomes true at the moment when the file that was `written` gets its name."""
                inputs.require_sources_unchanged(target_rank)
                self._require_still_own(state, target_rank, path)
                self._require_begun()
                version, file = written.version, path.relative_to(self.folder).as_posix()
                own = self.identity.digest, target_rank, file, version.size_bytes, version.modified_ns
                head = RecordHead(*own, announced=(version.inode, version.modified_ns), sample=sample_of(written))
                TargetRecord(head, inputs, tuple(sums), besides).publish(state, synced=False)  # the next is

            with Publication(inner, path.name, announce, partial(self._confirm, state, target_rank)) as publication:
                yield publication
                if publication.is_published:
                    remove_note(lock)

    def commit_if_complete(
        self, made_here: Collection[int], *, any_written: bool, any_failed: bool, already_told: Collection[str]
    ) -> Differences:
        """Commit the targets if all of the run are complete now; return messages that are not in `already_told`.

        Args:
            made_here, any_written: as for `commit.commit_if_complete`.
            any_failed: even then another run may have made these targets, and left it to this one to commit.
        """
        from reshard_mpi.journal.commit import commit_if_complete  # which imports this module

        try:
            return commit_if_complete(
                self.folder, self.identity, made_here=made_here, any_written=any_written, already_told=already_told
            )
        except (CoverageError, DisagreementError) as error:
            if len(made_here) == self.identity.target_ranks or not self._overwrite:
                raise
            note = f"not committed yet, as targets that are still to be replaced may be why: {error.problem}"
            return Differences(notes=(note,))
        except (OSError, ShardError, StoreError) as error:  # a ShardError is about a target, as the index is made of
            raise TransformError(
                "the targets are complete, but the commit record could not be written",
                got=str(error) if isinstance(error, OSError) else told(error),
                where=str(self.folder),
                remedy="mend the cause, then reshard-mpi commit",
            ) from error

    def left_bytes(self, path: Path) -> int:
        """Return how much space partial files of dead writers take, which is free again when the target is begun."""
        return space_of_dead_partials(self.folder, path)

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return the longest paths that are made for a target. They are used only to check the limits of names."""
        return partial_path(path), partial_path(record_path(self._state, target_rank))

    def _require_begun(self) -> None:
        if not self._is_begun():
            raise TargetError(
                "another run has begun in the target folder since this one did",
                expected="one run at a time",
                got=f"{run_path(self._state)} of another run",
                where=str(self.folder),
                remedy="let the other one finish, or choose another target folder",
            )

    def _require_own_index(self) -> None:
        if any(is_taken(self.folder / name) for name in (COMMIT_RECORD, *self._index_names)):
            require_own_index(self.folder, self.identity, self._is_begun)

    def _require_still_own(self, state: Folder, target_rank: int, path: Path) -> None:
        """Raise TargetError, without --overwrite, if somebody has saved a file in a target's place since then."""
        if not self._overwrite and is_taken(path):
            require_own_target(state, self.folder, target_rank, path)

    def _confirm(self, state: Folder, target_rank: int, descriptor: int) -> None:
        """Record a target with the time that its file has now, which some file systems set when it is renamed.

        By then somebody may have saved another file in its place, which this does not make a target.
        """
        record = self._record(target_rank)
        if record is not None:
            head = record.head._replace(announced=None, modified_ns=os.fstat(descriptor).st_mtime_ns)
            record._replace(head=head).publish(state)

    def _is_begun(self) -> bool:
        """Tell whether the folder's record belongs to this run."""
        return (read_json(run_path(self._state)) or {}).get("digest") == self.identity.digest

    @contextlib.contextmanager
    def _locked(self, state: Folder, target_rank: int) -> Iterator[int]:
        with closing(open_lock(state, lock_name(target_rank))) as lock:
            self._take(lock, fcntl.LOCK_EX, target_rank)
            yield lock

    def _refuse_locked(self, target_rank: int) -> None:
        # Without such a file, nobody has ever written it.
        with opened_inner(self.folder, STATE) as state, contextlib.suppress(FileNotFoundError):
            if state is not None:
                with closing(state.open_file(lock_name(target_rank), os.O_RDONLY, "a lock")) as lock:
                    self._take(lock, fcntl.LOCK_SH, target_rank)

    def _take(self, lock: int, kind: int, target_rank: int) -> None:
        """Take the lock that a writer of a target has alone, and those who look for one share for an instant."""
        while not try_lock(lock, kind):
            if try_lock(lock, fcntl.LOCK_SH):  # only processes that look, as this one does now, are in the way
                fcntl.flock(lock, fcntl.LOCK_UN)
                time.sleep(_NAP_SECONDS * os.urandom(1)[0] / 256)  # not all at once again
                continue
            raise TargetError(
                f"target rank {target_rank} is being written by another process",
                expected="one process for each target",
                got=f"a lock on {self._state / lock_name(target_rank)}, held by {holders(lock)}",
                where=str(self.folder),
                remedy="wait for it, or give the processes different targets",
            )

    def _record(self, target_rank: int) -> TargetRecord | None:
        record = TargetRecord.read(self._state, target_rank)
        return record if record is not None and record.head.digest == self.identity.digest else None


def _another_choice(ours: str, theirs: str, folder: Path, source: str) -> TargetError:
    """Return the error for a run that goes on with other source files than it was begun with."""
    pattern = glob_of(theirs)
    goes_on = "" if pattern is None else f"to go on with what was begun, --select {shlex.quote(pattern)}; "
    return TargetError(
        "the target folder holds a run from another checkpoint of the same source",
        expected=f"{theirs}, which the run that began this folder has chosen",
        got=f"{ours}, chosen now in {source}",
        where=str(folder),
        remedy=f"{goes_on}to begin again with what is there now, another target, or --overwrite",
    )


@contextlib.contextmanager
def _commit_lock(state: Folder, say: Say) -> Iterator[None]:
    """Hold the lock that processes share while they write targets, and that one has alone while it commits."""
    with closing(open_lock(state, COMMIT_LOCK)) as lock:
        wait_for_lock(lock, fcntl.LOCK_SH, state.path / COMMIT_LOCK, say, _COMMIT_SECONDS)
        yield
