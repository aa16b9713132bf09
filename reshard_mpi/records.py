"""What the small files that a run keeps in its target folder say: which run it is, and which targets are complete.

`.reshard_mpi/run.json` names the run, `.reshard_mpi/rank_<r>.json` records that target r is complete and what it was
made from. `reshard.json` stands in the target folder itself only while all targets are complete: see `commit`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from reshard_mpi.planning.model import Beginning, Held, Moment, RankPlan
from reshard_mpi.provenance import Sources

STATE = ".reshard_mpi"
COMMIT_RECORD = "reshard.json"


class RunIdentity(NamedTuple):
    """What makes two runs the same: everything that decides the bytes they write.

    facts: plain JSON values by name (strategies' digests, source path, selection, prefix, format, options).
    """

    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def difference(self, facts: Mapping[str, Any]) -> str:
        """Return the names and values in which another run differs."""
        names = sorted(
            name for name in {*self.facts, *facts} if self.facts.get(name) != facts.get(name) and name != "digest"
        )
        return ", ".join(f"{name} {facts.get(name)!r} (now {self.facts.get(name)!r})" for name in names)

    def as_text(self) -> str:
        """Return what `run.json` holds."""
        return json.dumps({**self.facts, "digest": self.digest}, indent=1)

    @classmethod
    def recorded(cls, state: Path) -> RunIdentity | None:
        """Return the run that `run.json` names; None where there is none, or it is damaged."""
        facts = read_json(run_path(state)) or {}
        identity = cls({name: value for name, value in facts.items() if name != "digest"})
        return identity if identity.digest == facts.get("digest") else None


class Evidence(NamedTuple):
    """What one target was made from, to be compared with what other processes made other targets from.

    read_ranks: the source ranks its tensors come from. sources: the files of these, as they were when it was planned.
    The rest is as its plan has it.
    """

    read_ranks: tuple[int, ...]
    held: Held
    moments: tuple[Moment, ...]
    beginnings: tuple[Beginning, ...]
    sources: Sources = Sources()

    @classmethod
    def of(cls, plan: RankPlan, sources: Sources) -> Evidence:
        return cls(plan.read_ranks, plan.held, plan.moments, plan.beginnings, sources)


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
            record = cls(
                str(facts["digest"]),
                int(facts["rank"]),
                str(facts["file"]),
                int(facts["size_bytes"]),
                Evidence(
                    tuple(facts["read_ranks"]),
                    Held(**facts["held"]),
                    tuple(Moment(**moment) for moment in facts["moments"]),
                    tuple(Beginning(**beginning) for beginning in facts["beginnings"]),
                    Sources.of(facts["sources"]),
                ),
                tuple(
                    TensorSum(
                        str(name), str(dtype), tuple(whole), tuple(start), tuple(shape), int(crc, 16), bool(loose)
                    )
                    for name, dtype, whole, start, shape, crc, loose in facts["sums"]
                ),
                None if announced is None else (int(announced[0]), int(announced[1])),
            )
        except (KeyError, IndexError, TypeError, ValueError):
            return None
        path = PurePosixPath(record.file)
        outside = path.is_absolute() or ".." in path.parts
        return None if outside or record.rank != target_rank else record


def run_path(state: Path) -> Path:
    return state / "run.json"


def record_path(state: Path, target_rank: int) -> Path:
    return state / f"rank_{target_rank}.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file: None if there is no such file, nothing if it holds anything else."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
