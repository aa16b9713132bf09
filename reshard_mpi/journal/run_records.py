"""Read and write the records of a run: its identity (`RunIdentity`), its commit (`CommitRecord`), its strategy.

Shards of most formats do not say how they are cut. The run that wrote them knew, so the placement table of all targets
(`sharding.strategy_table`) lies beside its records. It is believed of a committed run alone, and only for the very
files that the commit record names.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.filesystem.source_files import exists, version_of
from reshard_mpi.journal import record_files
from reshard_mpi.journal.provenance import MAX_NS
from reshard_mpi.journal.publication import publish_text, remove_dead_partials
from reshard_mpi.journal.record_files import COMMIT_RECORD, DAMAGE, RUN_ROOM, STATE, read_json, run_path
from reshard_mpi.journal.target_records import (
    MAX_RANKS,
    MAX_TENSOR_BYTES,
    RecordHead,
    checked_file,
    checked_rank,
    checked_sum,
)
from reshard_mpi.options import AXES, COUNT, FLAG, MAPS, OPTIONS, PATH, SIZE, STAGE, TEXT, TEXTS, Kind
from reshard_mpi.sharding.value_checks import MAX_FILE_BYTES

# What decides which files of the source are read, if several checkpoints lie there. Two runs are the same if they have
# chosen the same, by whatever means.
CHOSEN, _SELECT = "chosen", "select"
# How a choice ends whose files have no name in common (`checkpoints.opening`).
_UNLIKE = re.compile(r", sha256:[0-9a-f]+\Z")
_RECORDED = {option.recorded_name: option for option in OPTIONS.values() if option.is_recorded}
# Options that name a file; the setting is its digest.
FILES_BY_DIGEST = tuple(name for name, option in _RECORDED.items() if option.kind is PATH)
# What files decide (settings are their digests) -> the names under which records keep the files' paths. The glob by
# which files were chosen is kept likewise.
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
        return lambda value: record_files.one_of(value, choices())
    checks: Mapping[Kind, Callable[[Any], Any]] = {
        PATH: record_files.optional(record_files.digest),
        MAPS: record_files.optional(record_files.digest),
        FLAG: record_files.flag,
        COUNT: lambda value: record_files.number(value, 1),
        STAGE: lambda value: record_files.number(value, 1, 3),
        SIZE: lambda value: record_files.number(value, 1, MAX_TENSOR_BYTES),
        TEXT: lambda value: record_files.text(value, 255),  # the beginning of a file name
        TEXTS: record_files.text,
        AXES: record_files.text,
    }
    return checks[kind]


# Settings -> the checks of their values.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    **{name: _check_of(option.kind) for name, option in _RECORDED.items()},
    **dict.fromkeys(("source", *(_FILES[name] for name in FILES_BY_DIGEST)), record_files.path),
    _FILES["map"]: record_files.text,  # or equations
    _MAPS: lambda value: record_files.number(value, 2, _MOST_MAPS),
    "direction": record_files.text,
    CHOSEN: record_files.text,
    "sums_in_shards": record_files.flag,
    _SELECT: record_files.optional(record_files.text),
    "target_ranks": lambda value: record_files.number(value, 1, MAX_RANKS),
}
_WORDS = {"source": "SRC", "to": "targets in", "target_ranks": "target ranks:", _MAPS: "maps:"}


def joined_words(words: Iterable[str]) -> str:
    """Return the values of a repeated option as one text, which is another one for any other values."""
    return " ".join(shlex.quote(word) if not word or _SPECIAL.search(word) else word for word in words)


def glob_of(chosen: str) -> str | None:
    """Return the glob that chooses the same files; None if no glob does, since the files have nothing in common."""
    return None if _UNLIKE.search(chosen) else "*".join(map(glob.escape, chosen.split("<rank>")))


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
    def index_names(self) -> tuple[str, ...]:
        """The names of the files that are written when all targets are complete, in order."""
        return formats.info(self.format).index_names(self.facts.get("prefix", ""))

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
        has_own_names = formats.info(self.format).packs  # its prefix is made of what the source says
        for name, flag in _FLAGS.items():
            if has_own_names and name == "prefix":
                continue
            option = _RECORDED.get(name)
            value = self.files.get(name) if name in _FILES else self.facts.get(name)
            if value is True:
                words.append(flag)
            elif value and (option is None or value != option.default):
                values = shlex.split(str(value)) if option and option.kind in (TEXTS, AXES) else [str(value)]
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
            identity = cls.of(record_files.settings(values, SETTINGS))
        except DAMAGE:
            return None
        return identity if identity.digest == digest else None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunIdentity:
        """Return what `as_json` made."""
        keys = {name: key for name, key in _FILES.items() if name != CHOSEN or CHOSEN in values}
        files = {name: str(values[key]) for name, key in keys.items() if values.get(key) is not None}
        return cls({name: value for name, value in values.items() if name not in keys.values()}, files)


def run_to_commit(folder: Path) -> RunIdentity:
    """Return the run recorded under `folder`. Raises TargetError if there is none to commit."""
    identity = RunIdentity.recorded(folder / STATE)
    if identity is None or not identity.facts.keys() >= {"source", "to", "target_ranks"}:
        is_damaged = exists(run_path(folder / STATE))
        raise TargetError(
            "the folder holds no run to commit",
            expected="a folder that reshard-mpi transform has written to",
            got="a record of a run that is damaged, or of another version" if is_damaged else "no record of a run",
            where=str(folder),
            remedy="transform again with --overwrite" if is_damaged else "give the DST of the transform",
        )
    return identity


# It has 60 bytes for each tensor of the checkpoint, 110 for each target, and 6 for each source rank that a target was
# made from: 100 MiB where each of 4,000 was made from all of 4,000.
COMMIT_ROOM = record_files.RecordLimits(128 << 20, 512 << 20)
# Its names besides the settings of the run.
_COMMITTED = {"targets", "sources", "sums", "index", "before_index", "digest", "format", "version"}


class CommitRecord(NamedTuple):
    """The contents of `reshard.json`."""

    digest: str  # of the run that made the targets
    files: Mapping[int, str]  # of the targets, by rank
    sums: Mapping[str, str]  # CRC-32 of whole tensors by name, in hexadecimal; none if unknown
    sizes_bytes: Mapping[int, int]  # of the files, by rank, as far as recorded
    sources: tuple[tuple[str, int], ...]  # the files that the targets were made from, with their sizes
    run: RunIdentity  # what the run was asked to do
    # SHA-256 of the files of the index, by name, the index last; none if the targets have none, or if they are unknown
    index_digests: Mapping[str, str] = MappingProxyType({})
    # SHA-256 of all but the tensors in files that have no sums of tensors, by rank: their own checksums are in it
    besides: Mapping[int, str] = MappingProxyType({})

    @property
    def check(self) -> str:
        """A CRC-32 of the sums and sizes of targets and index; `committed.json` names the record by it."""
        contents = (self.sums, self.sizes_bytes, self.index_digests, self.besides)
        return record_files.check_of([sorted(each.items()) for each in contents])

    @classmethod
    def read(cls, folder: Path) -> CommitRecord | None:
        """Return the commit record of a folder; None where there is none, or it is damaged."""
        try:
            return cls._of(read_json(folder / COMMIT_RECORD, COMMIT_ROOM, follow_link=True) or {})
        except DAMAGE:
            return None

    @classmethod
    def _of(cls, facts: Mapping[str, Any]) -> CommitRecord:
        """Return the record with these values. Raises LookupError, TypeError or ValueError if they are not of one."""
        targets = record_files.each(facts["targets"], record_files.table)
        files = {checked_rank(target["rank"]): checked_file(target["file"], target["rank"]) for target in targets}
        sizes = {
            target["rank"]: record_files.number(target["size_bytes"]) for target in targets if "size_bytes" in target
        }
        settings = record_files.settings({name: facts[name] for name in facts if name not in _COMMITTED}, SETTINGS)
        sources = record_files.each(facts.get("sources", []), record_files.table)
        sums = record_files.table(facts.get("sums", {}))
        run = RunIdentity.of(settings)
        digests = {
            **record_files.table(facts.get("before_index", {})),
            **dict.fromkeys(run.index_names[-1:], facts.get("index")),
        }
        # Every rank has its line, from 0 on.
        if not targets or len(files) < len(targets) or max(files) >= len(files):
            raise ValueError("targets that are not those of all ranks")
        if settings.get("target_ranks", len(files)) != len(files):
            raise ValueError("another number of targets than the run has")
        return cls(
            record_files.digest(facts["digest"]),
            files,
            {record_files.text(name): f"{checked_sum(value):08x}" for name, value in sums.items()},
            sizes,
            tuple(
                (record_files.path_below(source["file"]), record_files.number(source["size_bytes"]))
                for source in sources
            ),
            run,
            {name: record_files.sha256(digests[name]) for name in run.index_names if digests.get(name) is not None},
            {target["rank"]: record_files.sha256(target["besides"]) for target in targets if "besides" in target},
        )


_TIMES_RECORD = "committed.json"
# It has 25 bytes for each target.
_TIMES_ROOM = record_files.RecordLimits(1 << 29, 1 << 31)


def keep_times(state: Folder, committed: CommitRecord, times_ns: Mapping[int, int | None]) -> None:
    """Publish when the targets of a run that is being committed were made, in the folder of its state.

    Args:
        committed: the record that is published next.
        times_ns: by rank, as their records say.
    """
    facts = {"format": "reshard_mpi commit times", "version": 1, "digest": committed.digest, "of": committed.check}
    check = record_files.check_of([committed.check, times_ns])
    remove_dead_partials(state, _TIMES_RECORD)
    publish_text(state, _TIMES_RECORD, json.dumps({**facts, "modified_ns": times_ns, "check": check}) + "\n")


def committed_times(folder: Path, committed: CommitRecord) -> Mapping[int, int] | None:
    """Return when the targets of a commit were made, by rank (nanoseconds since 1970); None if unknown.

    Empty if the times there are those of another commit of the same run: a copy over an older folder has stopped
    before `reshard.json`, its last file, or has put only that there.
    """
    facts = read_json(folder / STATE / _TIMES_RECORD, _TIMES_ROOM) or {}
    try:
        if record_files.digest(facts["digest"]) != committed.digest:
            return None
        times = record_files.table(facts["modified_ns"])
        checked = [facts["of"], times] if "of" in facts else times  # earlier versions do not name the commit
        if "check" in facts and facts["check"] != record_files.check_of(checked):
            return None
        if facts.get("of", committed.check) != committed.check:
            return {}
        return {checked_rank(int(rank)): record_files.number(times[rank], -MAX_NS, MAX_NS) for rank in times}
    except DAMAGE:
        return None


STRATEGY_RECORD = "strategy.json"
# The table is one text, which is bounded again when it is read as a strategy.
_ROOM = record_files.RecordLimits(MAX_FILE_BYTES, 2 * MAX_FILE_BYTES)


def keep_strategy(state: Folder, digest: str, strategy: str) -> None:
    """Publish how the targets of a run are cut, in the folder of its state, unless it is too large to be read again.

    Args:
        digest: of the run.
        strategy: the placement table of all its targets.
    """
    facts = {"format": "reshard_mpi strategy", "version": 2, "digest": digest, "sha256": _sha256(strategy)}
    text = json.dumps({**facts, "strategy": strategy}) + "\n"
    remove_dead_partials(state, STRATEGY_RECORD)
    if len(text) <= _ROOM.file_bytes:
        publish_text(state, STRATEGY_RECORD, text)


def _sha256(strategy: str) -> str:
    return hashlib.sha256(strategy.encode()).hexdigest()


def recorded_strategy(folder: Path, files: Mapping[int, Sequence[str]]) -> tuple[str, str] | None:
    """Return the placement table of a committed run's targets and the path of the record; None if nothing says it.

    Args:
        files: paths of the shards by rank, which must be those that the commit record of `folder` names, of the same
            sizes.

    Raises OSError if a record or a file cannot be looked at.
    """
    committed = CommitRecord.read(folder)
    if committed is None or not all(_is_recorded(folder, committed, rank, paths) for rank, paths in files.items()):
        return None
    return strategy_of_run(folder, committed.digest)


def strategy_of_run(folder: Path, digest: str) -> tuple[str, str] | None:
    """Return the placement table of the run with this digest, and the path of its record.

    None if there is none, or it is damaged: a table with a flipped bit may be that of another sharding.
    """
    path = folder / STATE / STRATEGY_RECORD
    facts = read_json(path, _ROOM) or {}
    try:
        if record_files.digest(facts["digest"]) != digest:
            return None
        strategy = record_files.text(facts["strategy"], MAX_FILE_BYTES)
        return (strategy, str(path)) if record_files.digest(facts["sha256"]) == _sha256(strategy) else None
    except (LookupError, ValueError):
        return None


def _is_recorded(folder: Path, committed: CommitRecord, rank: int, paths: Sequence[str]) -> bool:
    """Tell whether the shard of a rank is the file that the run has written for it. Another may have the same size."""
    file, head = committed.files.get(rank), RecordHead.read(folder / STATE, rank)
    if file is None or head is None or [Path(path) for path in paths] != [folder / file]:
        return False
    if version_of(folder / file).size_bytes != committed.sizes_bytes.get(rank) or head.modified_ns is None:
        return False
    return (head.digest, head.file) == (committed.digest, file) and head.is_about(folder / file)
