"""Remember the files that a target is made from, and notice changes (`SourceStates`).

Size and time of modification tell a file from another that has taken its place. Structure does not: the checkpoint of
another step has the same one. Within one run the time of the last change of status is compared as well, which nobody
can set back; it is not recorded, since a copy of the source has others. A few other files of the source are recorded
too, by which targets that have no file in common are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import nsmallest
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from reshard_mpi.errors import DisagreementError
from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.filesystem.source_files import FileVersion, is_folder, version_of
from reshard_mpi.journal import record_files
from reshard_mpi.planning.rank_plan import RankPlan, SharedFact, StageDigest
from reshard_mpi.planning.source_flaws import PrefixDigest
from reshard_mpi.text import first_few

_MANY = 3
# No process looks at every file of a source of thousands. Who exchanges a checkpoint exchanges nearly all.
_MOST_SEEN = 32
# Kernels keep whole seconds in 64 bits, and a file system may keep any of these times.
MAX_NS = (1 << 63) * 10**9


class FileState(NamedTuple):
    """One file of a source as records have it. path: relative to its folder. modified_ns: nanoseconds since 1970."""

    path: str
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, facts: Sequence[Any]) -> FileState:
        """Return the state that a record has of a file. Raises TypeError or ValueError if it is impossible."""
        path, size, modified = facts
        return cls(
            record_files.path_below(path), record_files.number(size), record_files.number(modified, -MAX_NS, MAX_NS)
        )

    def __str__(self) -> str:
        seconds, rest = divmod(self.modified_ns, 10**9)
        try:
            day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
        except (OverflowError, ValueError, OSError):  # a year of more than 32 bits
            return f"{self.size_bytes} bytes of {seconds}.{rest:09d} seconds after 1970"
        return f"{self.size_bytes} bytes of {day}.{rest:09d} UTC"


class SourceStates(NamedTuple):
    """Files of the source under `folder`, in the order of their ranks.

    Attributes:
        seen: a sample of all files of the checkpoint, as they lay there when the target was planned. None in records
            of earlier versions.
        named, versions: only within the run that has looked at the files: the folder by the name that it is read by,
            which may be a link that leads elsewhere later; and the version of each, which tells more.
    """

    folder: str = ""
    files: tuple[FileState, ...] = ()
    seen: tuple[FileState, ...] | None = None
    named: str = ""
    versions: tuple[FileVersion, ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> SourceStates:
        """Parse the sources that `as_json` wrote. Raises KeyError, TypeError or ValueError for other facts."""
        files = record_files.each(facts["files"], FileState.of)
        seen = _shared(record_files.each(facts["seen"], FileState.of)) if "seen" in facts else None
        folder = facts["folder"]
        return cls(record_files.path(folder) if folder or files or seen else "", files, seen)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        seen = {} if self.seen is None else {"seen": self.seen}
        return {"folder": self.folder, "files": self.files, **seen}

    def require_unchanged(self, problem: str, remedy: str) -> None:
        """Raise DisagreementError, which says `problem`, if a file has changed.

        One that is gone has not, but within the run that reads it: there it may have been changed before.
        """
        changed = list(self._changed())
        if changed:
            was, now, is_later = changed[0]
            more = f", and {len(changed) - 1} more: " if len(changed) > 1 else ""
            others = first_few([file.path for file, *_ in changed[1:]], _MANY)
            raise DisagreementError(
                problem,
                expected=f"{was.path} of {was}",
                got=f"{now or 'nothing'}{', but written or replaced since' * is_later}{more}{others}",
                where=self.folder,
                remedy=remedy,
            )

    def is_as_it_was(self, file: FileState, states: dict[tuple[str, FileState], bool | None]) -> bool | None:
        """Tell whether one of the files is still the same; None if it is gone, or cannot be looked at any more.

        Args:
            states: what is known of files in their folders, which is added to.
        """
        key = (self.folder, file)
        if key not in states:
            try:
                states[key] = _look(Path(self.folder), file.path)[0] == file
            except OSError:
                states[key] = None
        return states[key]

    def _changed(self) -> Iterator[tuple[FileState, FileState | None, bool]]:
        """Yield every file that has changed, as it was and is, and whether only the change of its status tells."""
        folder = Path(self.named or self.folder)
        for was, was_version in zip_longest(self.files, self.versions):
            try:
                now, version = _look(folder, was.path)
            except OSError as error:
                if was_version is not None:
                    if not isinstance(error, FileNotFoundError):
                        raise
                    yield was, None, False
                continue
            if now != was or (was_version is not None and version.is_later_than(was_version)):
                yield was, now, now == was


class TargetInputs(NamedTuple):
    """What one target was made from, to be compared with what other targets were made from."""

    # the source ranks that its tensors come from. shared_facts: as in its plan, and which of several checkpoints the
    # source is.
    read_ranks: tuple[int, ...]
    held: StageDigest
    shared_facts: tuple[SharedFact, ...]
    prefix_digests: tuple[PrefixDigest, ...]
    sources: SourceStates = SourceStates()  # their files, as they were when it was planned
    texts: str = ""  # digest of the strings it holds. The other fields are as in its plan.

    @classmethod
    def of(cls, plan: RankPlan, sources: SourceStates, of_choice: tuple[SharedFact, ...] = ()) -> TargetInputs:
        """Return the inputs of a planned target. of_choice: which of several checkpoints the source is."""
        moments = (*of_choice, *plan.shared_facts)
        return cls(plan.read_ranks, plan.held, moments, plan.prefix_digests, sources, digest_of_texts(plan.strings))

    def require_sources_unchanged(self, target_rank: int) -> None:
        """Raise DisagreementError if sources of the target have changed since it was planned."""
        problem = f"sources of target rank {target_rank} were changed while it was written"
        self.sources.require_unchanged(problem, "make sure that nothing writes to the source, and run again")


def digest_of_texts(strings: Mapping[str, str]) -> str:
    """Return a digest of the strings of a shard."""
    return hashlib.sha256(json.dumps(strings, sort_keys=True).encode()).hexdigest()


class FirstLooks:
    """The state of each file of a source when it was first looked at, before anything was read of it.

    Args:
        source: path of a folder, or of one file.
    """

    def __init__(self, source: str) -> None:
        self._source = Path(source)
        self._looks: dict[str, tuple[FileState, FileVersion]] = {}
        self._seen: tuple[FileState, ...] | None = None

    @cached_property
    def _folder(self) -> Path:
        return self._source if is_folder(self._source) else self._source.parent

    def look(self, paths: Iterable[str]) -> None:
        """Look at files that have not been looked at; whoever reads one that cannot be looked at says why."""
        for path in paths:
            with contextlib.suppress(OSError):
                self._look(path)

    def sources(self, paths: Iterable[str], all_paths: Iterable[str]) -> SourceStates:
        """Return these files of the source, of all that it has, as each was at the first look.

        The sample of all is the same for all processes, as far as a process that has a part of the source has them.
        Raises OSError if one of the files is gone.
        """
        looks = [self._look(path) for path in paths]
        files, versions = tuple(file for file, _ in looks), tuple(version for _, version in looks)
        if self._seen is None:
            folder = str(self._folder)
            sample = nsmallest(_MOST_SEEN, all_paths, key=lambda path: crc32(os.fsencode(path.removeprefix(folder))))
            self.look(sample)
            self._seen = tuple(self._looks[path][0] for path in sample if path in self._looks)
        return SourceStates(str(real_path(self._folder)), files, self._seen, str(self._folder), versions)

    def versions(self, paths: Iterable[str]) -> dict[str, FileVersion]:
        """Return the version of each of these files at the first look, by path. Raises OSError if one is gone."""
        return {path: self._look(path)[1] for path in paths}

    def _look(self, path: str) -> tuple[FileState, FileVersion]:
        if path not in self._looks:
            self._looks[path] = _look(self._folder, os.path.relpath(path, self._folder))
        return self._looks[path]


def require_same_sources(sources: Mapping[int, SourceStates], remedy: str) -> None:
    """Raise DisagreementError, which names a file and two targets, if targets were made from different states of it."""
    first: dict[str, tuple[int, FileState]] = {}
    for target_rank, own_sources in sources.items():
        for file in own_sources.files:
            # A folder that names the latest of others, and that one itself, are two ways to the same file.
            path = os.path.join(own_sources.folder, file.path)  # noqa: PTH118 - there may be millions
            first_rank, first_state = first.setdefault(path, (target_rank, file))
            if first_state[1:] != file[1:]:
                raise DisagreementError(
                    f"a source was changed between the targets of ranks {first_rank} and {target_rank}",
                    expected=f"{file.path} of {first_state}, as target rank {first_rank} was made from",
                    got=f"{file} for target rank {target_rank}",
                    where=own_sources.folder,
                    remedy=remedy,
                )


def require_one_state(targets: Mapping[int, tuple[SourceStates, int]], remedy: str) -> None:
    """Raise DisagreementError if the source was, or may have been, changed between the making of two targets.

    Sources that have changed after all targets were made do not matter. That is not so if a target was written before
    another one's source was saved, and is not believed if one target's sources are as they were and another one's not.

    Args:
        targets: by rank, the sources of a target, and when its file was written (nanoseconds since 1970).
    """
    require_same_sources({target_rank: sources for target_rank, (sources, _) in targets.items()}, remedy)
    states: dict[tuple[str, FileState], bool | None] = {}
    changed, gone, same = [], [], []
    for target_rank, (sources, _) in targets.items():
        of_files = {sources.is_as_it_was(file, states) for file in sources.files}
        if False in of_files:
            changed.append(target_rank)
        elif None in of_files:
            gone.append(target_rank)
        elif of_files:
            same.append(target_rank)
    last_ns = max((file.modified_ns for sources, _ in targets.values() for file in sources.files), default=0)
    for target_rank in (*changed, *gone):
        sources, written_ns = targets[target_rank]
        # What seems older than its own sources was made by a host whose clock is behind theirs, and tells nothing.
        own_ns = max((file.modified_ns for file in sources.files), default=0)
        if own_ns <= written_ns < last_ns:
            problem = f"other targets were made from what was saved after target rank {target_rank} was made"
            sources.require_unchanged(problem, remedy)
            lost = next(file for file in sources.files if sources.is_as_it_was(file, states) is None)
            got, where = f"{lost.path} is not there any more", sources.folder
            raise DisagreementError(problem, expected=f"{lost.path} of {lost}", got=got, where=where, remedy=remedy)
    for target_rank in changed:
        sources, _ = targets[target_rank]
        if same:
            problem = (
                f"the source of target rank {target_rank} is another one now, that of target rank {same[0]} is not"
            )
            sources.require_unchanged(problem, remedy)
    if changed or gone:  # else all lie there as they were, beside each other
        seen = {rank: own._replace(files=(*own.files, *(own.seen or ()))) for rank, (own, _) in targets.items()}
        require_same_sources(seen, remedy)


@lru_cache(maxsize=8)
def _shared(states: tuple[FileState, ...]) -> tuple[FileState, ...]:
    """Return equal states once, since all targets of a run have mostly seen the same."""
    return states


def _look(folder: Path, path: str) -> tuple[FileState, FileVersion]:
    """Return a file as it is now."""
    version = version_of(folder / path)
    return FileState(path, version.size_bytes, version.modified_ns), version
