"""Compare a target as it was made: the options of its map, from its record, where the user gives none (`as_made`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard_mpi.errors import UsageError
from reshard_mpi.journal.commit_record import CommitRecord
from reshard_mpi.journal.identity import RunIdentity, joined_words
from reshard_mpi.journal.records import STATE
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.runs.request import Request

_FILES = ("map", "config", "like")
_REPEATED = ("dtype", "include", "exclude")
_OPTIONS = "the options that it was made with, or none of --map, --dtype, --include and --exclude: then they are taken"


def recorded_run(path: str) -> RunIdentity | None:
    """Return the run that made the checkpoint at `path`, as it is recorded there; None if it is not."""
    run = RunIdentity.recorded(Path(path) / STATE)
    if run is None:
        committed = CommitRecord.read(Path(path))
        run = None if committed is None else committed.run
    return run


def as_made(request: Request, path: str) -> tuple[Request, tuple[str, ...]]:
    """Return a request with what the checkpoint at `path` was made with, and notes on that.

    What becomes of names, shapes and types is taken from the record if the request says nothing of it, and so is
    `--unlisted drop`. Raises UsageError if a recorded file is not there.
    """
    run = recorded_run(path)
    if run is None:
        return request, ()
    facts = run.facts
    notes: tuple[str, ...] = ()
    if request.unlisted is Unlisted.FOLLOW and facts.get("unlisted") == Unlisted.DROP:
        request, notes = request._replace(unlisted=Unlisted.DROP), ("compared with --unlisted drop",)
    told = {name: facts[name] for name in (*_FILES, "direction", *_REPEATED) if facts.get(name)}
    if request.is_mapped or not told:
        return request, _said(notes, path)
    for name in (name for name in _FILES if name in told):
        if not _is_there(run, name):
            raise _not_given(f"--{name}, whose file is not there any more", _shown(run, told), path)
    made = request._replace(
        map=run.maps,
        config=run.files.get("config"),
        like=run.files.get("like"),
        forward=told.get("direction") == "forward",
        reverse=told.get("direction") == "reverse",
        dtype=_words(told, "dtype"),
        include=_words(told, "include"),
        exclude=_words(told, "exclude"),
    )
    return made, _said((*notes, f"compared with {_shown(run, told)}"), path)


def _is_there(run: RunIdentity, name: str) -> bool:
    """Return whether the recorded files of an option can still be read; an equation needs none."""
    if name == "map":
        from reshard_mpi.mapping.syntax import ARROW

        return bool(run.maps) and all(ARROW in word or Path(word).is_file() for word in run.maps)
    path = run.files.get(name, "")
    return bool(path) and (name == "like" or Path(path).is_file())


def made_otherwise(request: Request, digests: Mapping[str, str], path: str) -> UsageError | None:
    """Return the error for a checkpoint at `path` if it was made with other options than those of the request.

    Others may come to the same, so it is an error only if the checkpoint is not what the request makes. digests: of the
    map, its configuration, and the checkpoint that it is like, as `through_map` returns them.
    """
    run = recorded_run(path)
    if run is None:
        return None
    given = {
        **digests,
        **{name: words for name in _REPEATED if (words := joined_words(getattr(request, name)))},
    }
    made = {name: run.facts[name] for name in (*_FILES, *_REPEATED) if run.facts.get(name)}
    differing = [name for name in (*_FILES, *_REPEATED) if given.get(name) != made.get(name)]
    if not differing:
        return None
    return _not_given(f"{' and '.join(f'--{name}' for name in differing)} of other values", _shown(run, made), path)


def _not_given(got: str, made_with: str, path: str) -> UsageError:
    return UsageError(
        "the target was made with other options than these",
        expected=made_with or "no map, types or choice, as its record says",
        got=got,
        where=path,
        remedy=f"give {_OPTIONS}",
    )


def _shown(run: RunIdentity, told: Mapping[str, Any]) -> str:
    """Return settings as on the command line."""
    words = []
    for name in told:
        if name == "map":
            words += [word for text in run.maps or ("FILE",) for word in ("--map", text)]
        elif name in _FILES:
            words += [f"--{name}", run.files.get(name, "FILE")]
        elif name == "direction":
            words.append(f"--{told[name]}")
        else:
            words += [word for text in _words(told, name) for word in (f"--{name}", text)]
    return shlex.join(words)


def _words(told: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(shlex.split(str(told.get(name, ""))))


def _said(notes: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple(f"{note}, as {path} says" for note in notes)
