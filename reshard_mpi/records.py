"""What the small files that a run keeps in its target folder say: which run it is, and which targets are complete.

`.reshard_mpi/run.json` names the run, `.reshard_mpi/rank_<r>.json` records that target r is complete and what it was
made from. `reshard.json` stands in the target folder itself only while all targets are complete: see `commit`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from reshard_mpi.box import Box
from reshard_mpi.dtypes import BY_NAME
from reshard_mpi.planning.model import Beginning, Held, Moment, RankPlan
from reshard_mpi.provenance import Sources

STATE = ".reshard_mpi"
COMMIT_RECORD = "reshard.json"
# The digests of strategies, and by what name records tell where those were read from.
_STRATEGIES = {"src_strategy": "src_strategy_file", "dst_strategy": "dst_strategy_file"}
# The settings of a run by the options that make them, or what else they are called.
_OPTIONS = {
    "src_strategy": "--src-strategy",
    "dst_strategy": "--dst-strategy",
    "select": "--select",
    "prefix": "--prefix",
    "unlisted": "--unlisted",
    "strict": "--strict",
    "crc": "--crc",
    "sums_in_shards": "--verify",
}
_TOLD = {"source": "SRC", "to": "targets in", "target_ranks": "target ranks:"}
# No tensor has as many bytes, and sums of as many cannot be put together.
_MAX_TENSOR_BYTES = 1 << 62


class RunIdentity(NamedTuple):
    """What makes two runs the same: everything that decides the bytes they write.

    facts: plain JSON values by name (strategies' digests, source path, selection, prefix, format, options).
    strategy_files: where the strategies were read from, by the names of their digests in `facts`. Only to be told: a
    strategy that has been moved is the same.
    """

    facts: Mapping[str, Any]
    strategy_files: Mapping[str, str] = {}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def differences(self, other: RunIdentity) -> tuple[str, str]:
        """Return what this run does where `other` does something else, and what `other` does there; in words."""
        names = sorted(name for name in {*self.facts, *other.facts} if self.facts.get(name) != other.facts.get(name))
        same_file = {name for name in names if self.strategy_files.get(name) == other.strategy_files.get(name)}
        ours = [self._setting(name, " as it is now" * (name in same_file)) for name in names]
        theirs = [other._setting(name, " as it was then" * (name in same_file)) for name in names]
        return ", ".join(ours), ", ".join(theirs)

    @property
    def settings(self) -> str:
        """What the run does, in words: its source, and the options that are given."""
        return ", ".join(self._setting(name, "") for name, value in self.facts.items() if value)

    def _setting(self, name: str, state: str) -> str:
        """Return one setting as the command line has it. state: of a strategy file, what tells it from another."""
        value, option = self.facts.get(name), _OPTIONS.get(name)
        if option is None:
            return f"{_TOLD.get(name, name)} {value}"
        if not value:
            return f"no {option}"
        if value is True:
            return option
        if name in _STRATEGIES:
            return f"{option} {self.strategy_files.get(name, 'FILE')}{state}"
        return f"{option} {value!r}"

    def as_text(self) -> str:
        """Return what `run.json` holds."""
        return json.dumps({**self.as_json(), "digest": self.digest}, indent=1)

    def as_json(self) -> dict[str, Any]:
        """Return plain values by name."""
        return {**self.facts, **{_STRATEGIES[name]: path for name, path in self.strategy_files.items()}}

    @classmethod
    def recorded(cls, state: Path) -> RunIdentity | None:
        """Return the run that `run.json` names; None where there is none, or it is damaged."""
        found = read_json(run_path(state)) or {}
        identity = cls.of({name: value for name, value in found.items() if name != "digest"})
        return identity if identity.digest == found.get("digest") else None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunIdentity:
        """Return what `as_json` made."""
        files = {name: str(values[key]) for name, key in _STRATEGIES.items() if key in values}
        return cls({name: value for name, value in values.items() if name not in _STRATEGIES.values()}, files)


class Evidence(NamedTuple):
    """What one target was made from, to be compared with what other processes made other targets from.

    read_ranks: the source ranks its tensors come from. sources: the files of these, as they were when it was planned.
    texts: digest of the strings it holds. The rest is as its plan has it.
    """

    read_ranks: tuple[int, ...]
    held: Held
    moments: tuple[Moment, ...]
    beginnings: tuple[Beginning, ...]
    sources: Sources = Sources()
    texts: str = ""

    @classmethod
    def of(cls, plan: RankPlan, sources: Sources) -> Evidence:
        return cls(plan.read_ranks, plan.held, plan.moments, plan.beginnings, sources, digest_of_texts(plan.strings))


class TensorSum(NamedTuple):
    """The sum of what a shard holds of a tensor (see `checksum`): `shape` elements from `start` on of all of it.

    loose: no strategy places the tensor, so each rank may have its own.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    value: int
    loose: bool

    @classmethod
    def of(cls, facts: Sequence[Any]) -> TensorSum:
        """Return what a record says of a tensor. Raises KeyError, TypeError or ValueError if that cannot be."""
        name, dtype, whole, start, shape, value, loose = facts
        stop = tuple(low + length for low, length in zip(start, shape, strict=True))
        one = cls(str(name), str(dtype), tuple(whole), tuple(start), tuple(shape), int(value, 16), bool(loose))
        if not all(isinstance(number, int) for number in (*whole, *start, *shape)):
            raise TypeError("a place in a tensor that is no number")
        box = Box.whole(one.global_shape)
        if not box.contains(Box(one.start, stop)) or box.size * BY_NAME[dtype].itemsize_bytes > _MAX_TENSOR_BYTES:
            raise ValueError("a place that is in no tensor")
        return one


class TargetRecord(NamedTuple):
    """That a target is complete. digest: of the run that made it. file: its path in the target folder.

    sums: of its tensors, in file order; none if it was not verified.
    announced: the inode and time of modification of that file, in a record that is written just before the file takes
    its name. So it is true from that instant on, and not before, whenever the writer dies. None: the file is in place.
    """

    digest: str
    rank: int
    file: str
    size_bytes: int
    evidence: Evidence
    sums: tuple[TensorSum, ...] = ()
    announced: tuple[int, int] | None = None

    def is_about(self, status: os.stat_result) -> bool:
        """Tell whether what lies in the place of the target is what was written there. Else it is not complete."""
        if status.st_size != self.size_bytes:
            return False
        return self.announced is None or self.announced == (status.st_ino, status.st_mtime_ns)

    def as_text(self) -> str:
        """Return what `rank_<r>.json` holds."""
        evidence = self.evidence
        facts = {
            "digest": self.digest,
            "rank": self.rank,
            "file": self.file,
            "size_bytes": self.size_bytes,
            "read_ranks": evidence.read_ranks,
            "held": evidence.held._asdict(),
            "moments": [moment._asdict() for moment in evidence.moments],
            "beginnings": [beginning._asdict() for beginning in evidence.beginnings],
            "sums": [(*one[:5], f"{one.value:08x}", one.loose) for one in self.sums],
            "sources": evidence.sources.as_json(),
            "texts": evidence.texts,
        }
        if self.announced is not None:
            facts["announced"] = self.announced
        return json.dumps(facts)

    @classmethod
    def read(cls, state: Path, target_rank: int) -> TargetRecord | None:
        """Return the record of a target; None where there is none, or it is damaged."""
        facts = read_json(record_path(state, target_rank)) or {}
        announced = facts.get("announced")
        try:
            held = facts["held"]
            record = cls(
                str(facts["digest"]),
                int(facts["rank"]),
                str(facts["file"]),
                int(facts["size_bytes"]),
                Evidence(
                    tuple(map(int, facts["read_ranks"])),
                    Held(int(held["stage"]), str(held["digest"]), int(held["rank"])),
                    tuple(Moment(str(one["name"]), str(one["value"]), str(one["path"])) for one in facts["moments"]),
                    tuple(
                        Beginning(str(one["name"]), str(one["digest"]), int(one["rank"])) for one in facts["beginnings"]
                    ),
                    Sources.of(facts["sources"]),
                    str(facts["texts"]),
                ),
                tuple(map(TensorSum.of, facts["sums"])),
                None if announced is None else (int(announced[0]), int(announced[1])),
            )
        except (LookupError, TypeError, ValueError, OverflowError):
            return None
        path = PurePosixPath(record.file)
        outside = path.is_absolute() or ".." in path.parts or "\0" in record.file
        return None if outside or record.rank != target_rank else record


class CommitRecord(NamedTuple):
    """What `reshard.json` says of the checkpoint in its folder.

    digest: of the run that made it. files: of the targets, by rank. sums: CRC-32 of whole tensors, in hexadecimal; none
    if they are not known.
    """

    digest: str
    files: Mapping[int, str]
    sums: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> CommitRecord | None:
        """Return the commit record of a folder; None where there is none, or it is damaged."""
        facts = read_json(folder / COMMIT_RECORD, follow_link=True) or {}
        try:
            digest = str(facts["digest"])
            files = {int(target["rank"]): str(target["file"]) for target in facts["targets"]}
            sums = {str(name): str(value) for name, value in facts.get("sums", {}).items()}
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError):
            return None
        return cls(digest, files, sums)


def digest_of_texts(strings: Mapping[str, str]) -> str:
    """Return what tells the strings of a shard from others."""
    return hashlib.sha256(json.dumps(strings, sort_keys=True).encode()).hexdigest()


def run_path(state: Path) -> Path:
    return state / "run.json"


def record_path(state: Path, target_rank: int) -> Path:
    return state / f"rank_{target_rank}.json"


def read_json(path: Path, *, follow_link: bool = False) -> dict[str, Any] | None:
    """Return the JSON object in a file: None if there is no such file, nothing if it holds anything else.

    follow_link: for checkpoints that are folders of links. Else a link is no record.
    """

    def opened(path: str, flags: int) -> int:
        # Of a pipe in its place, do not wait for a writer.
        return os.open(path, flags | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW))

    try:
        with open(path, opener=opened) as stream:
            value = json.load(stream) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        return {}
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return {}
    return value if isinstance(value, dict) else {}
