"""Identify the run of a target folder by its options and files (`RunIdentity`)."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.journal import fields
from reshard_mpi.journal.fields import DAMAGE, RUN_ROOM, read_json
from reshard_mpi.journal.records import MAX_RANKS, MAX_TENSOR_BYTES, run_path
from reshard_mpi.options import COUNT, FLAG, MAPS, OPTIONS, PATH, SIZE, TEXT, TEXTS, Kind

# What decides which files of the source are read, if several checkpoints lie there. Two runs are the same if they have
# chosen the same, by whatever means.
CHOSEN, _SELECT = "chosen", "select"
# How a choice ends whose files have no name in common (`checkpoints.opening`).
_UNLIKE = re.compile(r", sha256:[0-9a-f]+\Z")
_RECORDED = {option.recorded_name: option for option in OPTIONS.values() if option.is_recorded}
# Options that name a file; the setting is its digest.
FILES_BY_DIGEST = tuple(name for name, option in _RECORDED.items() if option.kind is PATH)
# What files decide (settings are their digests) -> the names under which records keep the files' paths. The glob that
# has led to what was chosen is kept as they are.
_FILES = {**{name: f"{name}_file" for name in (*FILES_BY_DIGEST, "map")}, CHOSEN: _SELECT}
# Settings -> their options on the command line.
_FLAGS = {
    **{name: option.flag for name, option in _RECORDED.items()},
    CHOSEN: "--select",
    _SELECT: "--select",  # a setting of its own in records of earlier versions
    "sums_in_shards": "--verify",
}
# How many maps are applied one after another, if there are several; `map` is the digest of all of them.
_MAPS, _MOST_MAPS = "maps", 1 << 16
# What is between words in a text of several, or quotes one; wildcards of globs are not.
_SPECIAL = re.compile(r"[\s'\"\\]")


def _check_of(kind: Kind) -> Callable[[Any], Any]:
    """Return the check of values of a kind in records."""
    if (choices := kind.choices) is not None:
        return lambda value: fields.one_of(value, choices())
    checks: Mapping[Kind, Callable[[Any], Any]] = {
        PATH: fields.optional(fields.digest),
        MAPS: fields.optional(fields.digest),
        FLAG: fields.flag,
        COUNT: lambda value: fields.number(value, 1),
        SIZE: lambda value: fields.number(value, 1, MAX_TENSOR_BYTES),
        TEXT: lambda value: fields.text(value, 255),  # the beginning of a file name
        TEXTS: fields.text,
    }
    return checks[kind]


# Settings -> the checks of their values.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    **{name: _check_of(option.kind) for name, option in _RECORDED.items()},
    **dict.fromkeys(("source", *(_FILES[name] for name in FILES_BY_DIGEST)), fields.path),
    _FILES["map"]: fields.text,  # or equations
    _MAPS: lambda value: fields.number(value, 2, _MOST_MAPS),
    "direction": fields.text,
    CHOSEN: fields.text,
    "sums_in_shards": fields.flag,
    _SELECT: fields.optional(fields.text),
    "target_ranks": lambda value: fields.number(value, 1, MAX_RANKS),
}
_WORDS = {"source": "SRC", "to": "targets in", "target_ranks": "target ranks:", _MAPS: "maps:"}


def joined_words(words: Iterable[str]) -> str:
    """Return the values of a repeated option as one text, which is another one for any other values."""
    return " ".join(shlex.quote(word) if not word or _SPECIAL.search(word) else word for word in words)


def joined_maps(words: Sequence[str]) -> str:
    """Return the maps of a run as one text: a single one as it is."""
    return words[0] if len(words) == 1 else joined_words(words)


def glob_of(chosen: str) -> str | None:
    """Return the glob that chooses the same files; None if no glob does, since the files have nothing in common."""
    if _UNLIKE.search(chosen):
        return None
    return "*".join(map(glob.escape, chosen.split("<rank>")))


class RunIdentity(NamedTuple):
    """Identifies a run by all that decides which bytes it writes."""

    # plain JSON values by name (strategies' digests, source path, chosen files, prefix, format, options)
    facts: Mapping[str, Any]
    # where strategies and maps were read from, by the names of their digests in `facts`, and the glob that the chosen
    # files match, if one was given; for messages only, since a file that has been moved is the same
    files: Mapping[str, str] = {}

    @property
    def format(self) -> str:
        """The format of its targets."""
        return str(self.facts.get("to", formats.DEFAULT))

    @property
    def target_ranks(self) -> int:
        """How many targets it has."""
        return int(self.facts["target_ranks"])

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def differences(self, other: RunIdentity) -> tuple[str, str]:
        """Return, in words, the settings that differ from `other`, and the other values."""
        names = sorted(name for name in {*self.facts, *other.facts} if self.facts.get(name) != other.facts.get(name))
        same_file = {name for name in names if self.files.get(name) == other.files.get(name)}
        ours = [self._setting(name, " as it is now" * (name in same_file)) for name in names]
        theirs = [other._setting(name, " as it was then" * (name in same_file)) for name in names]
        return ", ".join(ours), ", ".join(theirs)

    @property
    def settings(self) -> str:
        """The settings of the run in words: its source, and the options that are given."""
        return ", ".join(self._setting(name, "") for name, value in self.facts.items() if value)

    def other_choice(self, other: RunIdentity) -> tuple[str, str] | None:
        """Return what this run and `other` have chosen, if it is all in which they differ; None otherwise."""
        ours, theirs = self.facts.get(CHOSEN), other.facts.get(CHOSEN)
        is_all = {**self.facts, CHOSEN: None} == {**other.facts, CHOSEN: None}
        return (ours, theirs) if ours and theirs and ours != theirs and is_all else None

    def moment_beside(self, other: RunIdentity) -> str | None:
        """Return the source of `other` if it is a sibling of this run's source, like checkpoints of several steps."""
        ours, theirs = (Path(str(run.facts.get("source", ""))) for run in (self, other))
        return str(theirs) if ours != theirs and ours.parent == theirs.parent else None

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps through which tensors are taken, in their order: paths, or equations."""
        text = self.files.get("map")
        if text is None:
            return ()
        return tuple(shlex.split(text)) if _MAPS in self.facts else (text,)

    def command(self, target: str) -> str:
        """Return the command that makes these targets in the folder `target`."""
        words = ["reshard-mpi", "transform", str(self.facts.get("source")), target]
        for name, flag in _FLAGS.items():
            option = _RECORDED.get(name)
            value = self.files.get(name) if name in _FILES else self.facts.get(name)
            if value is True:
                words.append(flag)
            elif value and (option is None or value != option.default):
                values = shlex.split(str(value)) if option and option.kind is TEXTS else [str(value)]
                values = list(self.maps) if name == "map" else values
                words += (word for text in values for word in (flag, text))
        if self.facts.get("direction"):
            words.append(f"--{self.facts['direction']}")
        return shlex.join(words)

    def _setting(self, name: str, state: str) -> str:
        """Return one setting as on the command line. state: is added to a file of the same name as another."""
        value, option = self.facts.get(name), None if name in _WORDS else _FLAGS.get(name)
        if name == "direction":
            return f"--{value}" if value else "neither --forward nor --reverse"
        if name == CHOSEN:
            return f"files {value}" if value else "no record of which files were chosen (an earlier version)"
        if option is None and value is None:
            return f"no {name}"
        if option is None:
            return f"{_WORDS.get(name, name)} {value}"
        if not value:
            return f"no {option}"
        if value is True:
            return option
        if name in _FILES:
            return f"{option} {self.files.get(name, 'FILE')}{state}"
        return f"{option} {value!r}"

    def as_text(self) -> str:
        """Return what `run.json` holds."""
        return json.dumps({**self.as_json(), "digest": self.digest}, indent=1)

    def as_json(self) -> dict[str, Any]:
        """Return plain values by name."""
        return {**self.facts, **{_FILES[name]: path for name, path in self.files.items()}}

    @classmethod
    def recorded(cls, state: Path) -> RunIdentity | None:
        """Return the run that `run.json` names; None where there is none, or it is damaged."""
        values = read_json(run_path(state), RUN_ROOM) or {}
        try:
            digest = values.pop("digest", None)
            identity = cls.of(fields.settings(values, SETTINGS))
        except DAMAGE:
            return None
        return identity if identity.digest == digest else None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunIdentity:
        """Return what `as_json` made."""
        keys = {name: key for name, key in _FILES.items() if name != CHOSEN or CHOSEN in values}
        files = {name: str(values[key]) for name, key in keys.items() if values.get(key) is not None}
        return cls({name: value for name, value in values.items() if name not in keys.values()}, files)
