"""Describe how far the run of a target folder is (`state_of`), and what was committed there, for `inspect`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reshard_mpi.errors import SourceError, StoreError, TargetError
from reshard_mpi.filesystem.paths import absolute_path, is_object_path
from reshard_mpi.filesystem.source_files import exists, is_file, size_if_there, version_of
from reshard_mpi.journal.commit import recorded_targets
from reshard_mpi.journal.file_ownership import NOT_WRITTEN, changed_index_files
from reshard_mpi.journal.publication import is_partial
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, run_path
from reshard_mpi.journal.run_records import CommitRecord, committed_times, run_to_commit
from reshard_mpi.journal.target_records import RecordHead, TargetRecord
from reshard_mpi.text import format_bytes

_NAMED = 20
# Of ranks that are not complete. A run may have a million of them.
_LISTED = 1 << 16


def state_of(folder: Path) -> dict[str, Any]:
    """Return the facts of the run that fills `folder` as `run`, and of its commit as `commit`, if there are such."""
    facts: dict[str, Any] = {}
    if exists(run_path(folder / STATE)):
        facts["run"] = _run(folder)
    if exists(folder / COMMIT_RECORD):
        try:
            facts["commit"] = _commit(folder)
        except SourceError as error:
            facts["commit"] = {"problem": error.problem}
    return facts


def about_record(path: Path) -> dict[str, Any] | None:
    """Return the facts of the commit record at `path`, or of the run that an unfinished file is of; None for others.

    Raises SourceError for other files that a run keeps, which says where to look instead.
    """
    if is_partial(path):
        folder = next((folder for folder in absolute_path(path).parents[:2] if exists(run_path(folder / STATE))), None)
        if folder is not None:
            return {"kind": "run", "path": str(path), "partial": str(path), **state_of(folder)}
        raise SourceError(
            "the file is not complete",
            expected="a shard under its own name",
            got="what a process is writing, or has left behind where it died",
            where=str(path),
            remedy=f"inspect {path.parent.parent}, the target folder, to see what is complete",
        )
    if path.parent.name == STATE:
        raise SourceError(
            "the file is for a run to keep its state in",
            expected="a target folder, a shard or a strategy",
            got=f"a file in {STATE}",
            where=str(path),
            remedy=f"inspect {path.parent.parent}, the target folder",
        )
    if path.name != COMMIT_RECORD or not is_file(path):
        return None
    return {"kind": "commit", "path": str(path), **_commit(path.parent)}


def as_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts from `state_of` or `about_record` as lines for people."""
    lines = []
    if "partial" in facts:
        lines.append(f"{facts['partial']}: being written, or left by a writer that died")
    if "run" in facts:
        committed = facts.get("commit", {})
        is_committed = "targets" in committed and not committed["index_problems"] and not _spoiled(committed)
        is_committed = is_committed and not facts["run"].get("incomplete")
        lines += _run_lines(facts["run"], committed=is_committed)
    commit = facts if facts.get("kind") == "commit" else facts.get("commit")
    return lines + (_commit_lines(commit) if commit is not None else [])


def _run(folder: Path) -> dict[str, Any]:
    try:
        identity = run_to_commit(folder)
        targets = recorded_targets(folder, identity)
    except TargetError as error:
        return {"problem": error.got}
    problems = ((rank, targets.get(rank, NOT_WRITTEN)) for rank in range(identity.target_ranks))
    incomplete = ((rank, problem) for rank, problem in problems if isinstance(problem, str))
    return {
        "path": str(folder),
        "settings": identity.as_json(),
        "in_words": identity.settings,
        "command": identity.command(str(absolute_path(folder))),
        "target_ranks": identity.target_ranks,
        "complete": [rank for rank, record in targets.items() if isinstance(record, TargetRecord)],
        "incomplete": {str(rank): problem for rank, problem in islice(incomplete, _LISTED)},
        "partial": _unfinished_uploads(folder) if is_object_path(folder) else _partial_files(folder),
    }


def _partial_files(folder: Path) -> list[str]:
    hidden = chain(folder.glob("rank_*/.*"), folder.glob(".*"))
    return sorted(str(path.relative_to(folder)) for path in hidden if is_partial(path))


def _unfinished_uploads(folder: Path) -> list[str]:
    """Return the names of objects that are being sent, or were when their writer died, with the time of the beginning.

    Empty where the store does not tell.
    """
    from reshard_mpi.filesystem.object_store import ObjectPlace
    from reshard_mpi.filesystem.object_uploads import unfinished

    place = ObjectPlace.of(folder)
    with suppress(StoreError):
        uploads = unfinished(place._replace(key=f"{place.key}/" if place.key else ""))
        begun = ((each.key, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.begun_ns / 1e9))) for each in uploads)
        return sorted(f"{key[len(place.key) :].lstrip('/')} (an upload of {when} UTC)" for key, when in begun)
    return []


def _commit(folder: Path) -> dict[str, Any]:
    record = CommitRecord.read(folder)
    if record is None:
        raise SourceError(
            "the commit record is damaged",
            expected=f"what a run writes to {COMMIT_RECORD}",
            where=str(folder / COMMIT_RECORD),
            remedy="reshard-mpi commit writes it anew, if the records of the run are there",
        )
    times_ns = committed_times(folder, record)
    targets = [
        {
            "rank": rank,
            "file": file,
            "size_bytes": record.sizes_bytes.get(rank),
            "got_bytes": size_if_there(folder / file),
            **_not_as_committed(folder, record, rank, times_ns),
        }
        for rank, file in record.files.items()
    ]
    return {
        "settings": record.run.as_json(),
        "in_words": record.run.settings,
        "command": record.run.command(str(absolute_path(folder))),
        "targets": targets,
        "index_problems": {
            name: "is not as it was committed" if exists(folder / name) else "is not there"
            for name in changed_index_files(folder, record)
        },
        "sources": [{"file": file, "size_bytes": size_bytes} for file, size_bytes in record.sources],
        "sums": dict(record.sums),
    }


def _not_as_committed(
    folder: Path, committed: CommitRecord, rank: int, times_ns: Mapping[int, int] | None
) -> dict[str, str]:
    """Return the `problem` of a target whose own record says that it is another one than was committed, if it does."""
    head = RecordHead.read(folder / STATE, rank)
    if head is None:
        return {}
    if head.digest != committed.digest:
        return {"problem": "is of another run"}
    made_ns, committed_ns = head.modified_ns or 0, None if times_ns is None else times_ns.get(rank, 0)
    if committed_ns is not None and made_ns != committed_ns:
        is_later = made_ns > committed_ns
        return {"problem": "was made after the commit" if is_later else "is an earlier one than was committed"}
    with suppress(OSError):  # what is not there, or has another size, is told by that
        path = folder / head.file
        if version_of(path).size_bytes == head.size_bytes and not head.is_about(path):
            is_older = head.is_newer_than(path)
            return {"problem": "is older than its record" if is_older else "was modified after its record was written"}
    return {}


def _run_lines(run: dict[str, Any], *, committed: bool) -> list[str]:
    if "problem" in run:
        return [f"run: {run['problem']}"]
    end = "committed" if committed else "not committed"
    lines = [
        f"run: {len(run['complete'])} of {run['target_ranks']} targets complete, {end}",
        f"  made by: {run['command']}",
    ]
    incomplete = run["target_ranks"] - len(run["complete"])
    if incomplete:
        lines.append("  the same command with --resume makes the others")
    elif not committed:
        lines.append(f"  what is left: reshard-mpi commit {shlex.quote(run['path'])}")
    lines += _some([f"  target rank {rank} {why}" for rank, why in run["incomplete"].items()], incomplete)
    return lines + _some([f"  {path}: being written, or left by a writer that died" for path in run["partial"]])


def _commit_lines(commit: dict[str, Any]) -> list[str]:
    if "problem" in commit:
        return [f"commit: {commit['problem']}"]
    bad = _spoiled(commit)
    sums = f", CRC-32 of {len(commit['sums'])} tensors" if commit["sums"] else ""
    count = len(commit["targets"])
    lines = [f"commit: {count} targets{sums}; {count - len(bad)} of them there as committed"]
    lines += [f"  {name} {problem}" for name, problem in commit["index_problems"].items()]
    shown = bad
    if "kind" in commit:
        lines.append(f"  made by: {commit['command']}")
        shown = commit["targets"]
    return lines + _some([f"  rank {target['rank']}: {target['file']}{_state(target)}" for target in shown])


def _spoiled(commit: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets that are not there as they were committed."""
    return [each for each in commit["targets"] if each["got_bytes"] != each["size_bytes"] or "problem" in each]


def _state(target: dict[str, Any]) -> str:
    size, got = target["size_bytes"], target["got_bytes"]
    if got is None:
        return " is not there"
    if "problem" in target:
        return f" {target['problem']}"
    if got != size:
        return f" has {got} bytes, not the {size} that were committed"
    return f", {format_bytes(got)}"


def _some(lines: list[str], count: int | None = None) -> list[str]:
    """Return `lines`; if they are many, the first of them and how many more there are. count: if not all are given."""
    count = len(lines) if count is None else count
    return lines if count <= _NAMED else [*lines[:_NAMED], f"  and {count - _NAMED} more"]
