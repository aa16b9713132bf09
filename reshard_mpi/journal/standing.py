"""How far the run of a target folder has come, by its records; and committing it when somebody asks for that."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import TargetError, TransformError
from reshard_mpi.filesystem.locks import holders, try_lock
from reshard_mpi.filesystem.paths import require_replaceable
from reshard_mpi.journal.commit import NOT_WRITTEN, Committed, commit_locked, complete_record, opened_to_commit, ranges
from reshard_mpi.journal.identity import RunIdentity
from reshard_mpi.journal.records import COMMIT_RECORD, STATE, TargetRecord, recorded_ranks, run_path
from reshard_mpi.journal.targets import COMMIT_LOCK, withdraw

# Committing takes moments: a process that is in the way for longer is stopped, or one of many that write all the time.
_WAIT_SECONDS = 10.0
_NAP_SECONDS = 0.05


class Standing(NamedTuple):
    """How far a run has come. complete: target ranks. problems: by rank, why targets that have a record are not."""

    identity: RunIdentity
    complete: tuple[int, ...]
    problems: Mapping[int, str]

    @property
    def incomplete(self) -> Iterator[tuple[int, str]]:
        """The rank of every target that is not complete, and why. There may be millions."""
        complete = set(self.complete)
        ranks = (rank for rank in range(self.identity.target_ranks) if rank not in complete)
        return ((rank, self.problems.get(rank, NOT_WRITTEN)) for rank in ranks)


def standing(folder: Path) -> Standing:
    """Return how far the run recorded under `folder` has come. Raises TargetError if there is none."""
    identity = _recorded_run(folder)
    targets = _recorded_targets(folder, identity)
    complete = tuple(rank for rank, record in targets.items() if isinstance(record, TargetRecord))
    return Standing(identity, complete, {rank: why for rank, why in targets.items() if isinstance(why, str)})


def commit(folder: Path) -> Committed:
    """Write the commit record of the run recorded under `folder`.

    Raises TargetError if there is no run, TransformError if targets of it are not complete, DisagreementError or
    CoverageError if they were made from shards that do not belong together. Then there is no commit record.
    """
    _recorded_run(folder)
    require_replaceable(folder / COMMIT_RECORD, "the commit record")
    deadline = time.monotonic() + _WAIT_SECONDS
    with opened_to_commit(folder) as opened:
        while not try_lock(opened.lock, fcntl.LOCK_EX):
            _require_complete(folder, _recorded_run(folder), "; a process is writing some of them now")
            if time.monotonic() >= deadline:
                raise TargetError(
                    "the targets are being written or committed by another process",
                    expected="nobody at work on them",
                    got=f"a lock on {folder / STATE / COMMIT_LOCK}, held by {holders(opened.lock)}",
                    where=str(folder),
                    remedy="wait for it",
                )
            time.sleep(_NAP_SECONDS)
        identity = _recorded_run(folder)
        try:
            records = _require_complete(folder, identity, "")
        except TransformError:
            withdraw(opened.folder, identity.format)
            raise
        return commit_locked(opened, identity, records, told=())


def _require_complete(folder: Path, identity: RunIdentity, besides: str) -> list[TargetRecord]:
    """Return the records of all targets. Raises TransformError, which names those that are not complete.

    besides: what the error is to say besides.
    """
    target_ranks = identity.target_ranks
    targets = _recorded_targets(folder, identity)
    records = [record for record in targets.values() if isinstance(record, TargetRecord)]
    if len(records) < target_ranks:
        missing = ranges(_gaps([record.rank for record in records], target_ranks))
        first = next(rank for rank in range(target_ranks) if not isinstance(targets.get(rank), TargetRecord))
        raise TransformError(
            f"{target_ranks - len(records)} of {target_ranks} targets are not complete: {missing}",
            expected="all of them written by this run, as their records say",
            got=f"target rank {first} {targets.get(first, NOT_WRITTEN)}{besides}",
            where=str(folder),
            remedy="run the same transform again with --resume, or the array tasks that make these targets"
            f" (sbatch --array={missing}, where a task is a target), then commit again",
        )
    return records


def _recorded_targets(folder: Path, identity: RunIdentity) -> dict[int, TargetRecord | str]:
    """Return by rank the records of targets that have one, or why these targets are not complete; ranks ascend."""
    ranks = (rank for rank in recorded_ranks(folder / STATE) if rank < identity.target_ranks)
    return {rank: complete_record(folder, identity, rank) for rank in ranks}


def _recorded_run(folder: Path) -> RunIdentity:
    identity = RunIdentity.recorded(folder / STATE)
    if identity is None or not identity.facts.keys() >= {"source", "to", "target_ranks"}:
        is_damaged = run_path(folder / STATE).exists()
        raise TargetError(
            "the folder holds no run to commit",
            expected="a folder that reshard-mpi transform has written to",
            got="a record of a run that is damaged, or of another version" if is_damaged else "no record of a run",
            where=str(folder),
            remedy="transform again with --overwrite" if is_damaged else "give the DST of the transform",
        )
    return identity


def _gaps(ranks: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of every run of ranks below `count` that are missing from these ascending ones."""
    for before, after in pairwise((-1, *ranks, count)):
        if before + 1 < after:
            yield before + 1, after - 1
