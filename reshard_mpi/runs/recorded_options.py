"""Take the options of a comparison from the record of the run that made the checkpoint (`as_made`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.errors import UsageError
from reshard_mpi.filesystem.source_files import exists, is_file
from reshard_mpi.journal.record_finder import RecordFinder, run_of
from reshard_mpi.journal.run_records import CHOSEN, CommitRecord, RunIdentity, joined_words
from reshard_mpi.planning.tensor_names import Accumulated, Unlisted
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.strategy import Strategy

_FILES = ("map", "config", "like")
_REPEATED = ("axis", "dtype", "include", "exclude")
_OPTIONS = (
    "the options that it was made with, or none of --map, --dtype, --include, --exclude and --unlisted: then they are"
    " taken"
)


def recorded_run(files: ShardFiles) -> RunIdentity | None:
    """Return the run that made a checkpoint, as records of its files or its commit record say; None if none does."""
    paths = ((path, rank) for rank, rank_paths in files.by_target_rank.items() for path in rank_paths)
    finder = RecordFinder()
    found = next((run for path, rank in paths if (run := run_of(path, rank, finder)) is not None), None)
    committed = CommitRecord.read(Path(files.path)) if found is None else None
    return committed.run if committed is not None else found and found[0]


def as_made(request: Request, run: RunIdentity | None, path: str) -> tuple[Request, tuple[str, ...]]:
    """Return a request with the options of the run that made the checkpoint at `path`, and notes on them.

    What becomes of names, shapes and types is taken from the record if the request says nothing of it, and so is
    `--unlisted`. Raises UsageError if a recorded file is not there.
    """
    if run is None:
        return request, ()
    facts = run.facts
    notes: tuple[str, ...] = ()
    if request.unlisted is Unlisted.FOLLOW and (unlisted := _unlisted(facts.get("unlisted"))):
        request = request._replace(unlisted=Unlisted(unlisted["unlisted"]))
        notes = (f"compared with {_shown(run, unlisted)}",)
    options = {name: facts[name] for name in (*_FILES, "direction", *_REPEATED) if facts.get(name)}
    if request.is_mapped or not options:
        return request, _said(notes, path)
    for name in (name for name in _FILES if name in options):
        if not _is_there(run, name):
            raise _not_given(f"--{name}, whose file is not there any more", _shown(run, options), path)
    as_run = request._replace(
        map=run.maps,
        config=run.files.get("config"),
        like=run.files.get("like"),
        forward=options.get("direction") == "forward",
        reverse=options.get("direction") == "reverse",
        axis=_words(options, "axis"),
        dtype=_words(options, "dtype"),
        include=_words(options, "include"),
        exclude=_words(options, "exclude"),
    )
    return as_run, _said((*notes, f"compared with {_shown(run, options)}"), path)


def _is_there(run: RunIdentity, name: str) -> bool:
    """Return whether the recorded files of an option can still be read; an equation needs none."""
    if name == "map":
        from reshard_mpi.options import ARROW

        return bool(run.maps) and all(ARROW in word or is_file(word) for word in run.maps)
    path = run.files.get(name, "")
    return bool(path) and (name == "like" or is_file(path))


def made_otherwise(
    request: Request, digests: Mapping[str, str], chosen: str, run: RunIdentity | None, path: str
) -> UsageError | None:
    """Return the error for a checkpoint at `path` made with other options than the request's, or of other files.

    Others may come to the same, so it is an error only if the checkpoint is not what the request makes.

    Args:
        digests: of the map, its configuration, and the checkpoint that it is like, as `apply_map` returns them.
        chosen: the files of the source, as `chosen_files` calls them.
        run: the one that made it.
    """
    if run is None:
        return None
    made_of = run.facts.get(CHOSEN, chosen)
    if made_of != chosen:
        return UsageError(
            "the target was made of other files of the source than these",
            expected=f"{made_of}, as its record says",
            got=chosen,
            where=path,
            remedy="give --select with the names of the files it was made of",
        )
    given = {
        **digests,
        **{name: words for name in _REPEATED if (words := joined_words(_given(request, name)))},
        **_unlisted(str(request.unlisted)),
    }
    of_run = {name: run.facts[name] for name in (*_FILES, *_REPEATED) if run.facts.get(name)}
    of_run |= _unlisted(run.facts.get("unlisted"))
    differing = [name for name in (*_FILES, *_REPEATED, "unlisted") if given.get(name) != of_run.get(name)]
    if not differing:
        return None
    return _not_given(f"{' and '.join(f'--{name}' for name in differing)} of other values", _shown(run, of_run), path)


def _given(request: Request, name: str) -> Sequence[str]:
    """Return the values of a repeated option in the order of records."""
    values: Sequence[str] = getattr(request, name)
    return sorted(values) if name == "axis" else values


def _unlisted(value: str | None) -> dict[str, str]:
    """Return the option of this value, by its name; none for the default."""
    return {} if value is None or value == Unlisted.FOLLOW else {"unlisted": value}


def _not_given(got: str, made_with: str, path: str) -> UsageError:
    return UsageError(
        "the target was made with other options than these",
        expected=made_with or "no map, types or choice, as its record says",
        got=got,
        where=path,
        remedy=f"give {_OPTIONS}",
    )


def _shown(run: RunIdentity, options: Mapping[str, Any]) -> str:
    """Return settings as on the command line."""
    words = []
    for name in options:
        if name == "map":
            words += [word for text in run.maps or ("FILE",) for word in ("--map", text)]
        elif name in _FILES:
            words += [f"--{name}", run.files.get(name, "FILE")]
        elif name == "direction":
            words.append(f"--{options[name]}")
        else:
            words += [word for text in _words(options, name) for word in (f"--{name}", text)]
    return shlex.join(words)


def _words(options: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(shlex.split(str(options.get(name, ""))))


def _said(notes: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple(f"{note}, as {path} says" for note in notes)


def accumulated_as_made(request: Request, run: RunIdentity | None) -> Accumulated:
    """Return the target's handling of accumulated gradients: as requested, else from its record."""
    if request.accumulated is not Accumulated.REFUSE:
        return request.accumulated
    return Accumulated(run.facts.get("accumulated", Accumulated.REFUSE)) if run else Accumulated.REFUSE


def strategy_to_drop_by(run: RunIdentity | None, path: str) -> Strategy | None:
    """Return the target strategy of the run that made the checkpoint at `path`; None if no record names one.

    Raises UsageError if the file is not there any more, or is another one.
    """
    recorded = None if run is None else run.files.get("dst_strategy")
    if run is None or recorded is None:
        return None
    from reshard_mpi.sharding.strategy_files import digest, load

    if not exists(recorded) or digest(recorded) != run.facts["dst_strategy"]:
        made_with = shlex.join(["--dst-strategy", recorded, "--unlisted", "drop"])
        raise _not_given("no --dst-strategy, and its file is not there any more, or is another one", made_with, path)
    return load(recorded)
