"""How much one process of a run is going to write at most: targets, their records, the commit record and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from reshard_mpi import formats
from reshard_mpi.journal.recorded_strategy import STRATEGY_RECORD
from reshard_mpi.journal.records import COMMIT_RECORD, STATE, Evidence, TargetRecord, record_path
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.runs.preflight import Room, Tally
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.placement import Strategy

# A number in JSON, with its separator.
_NUMBER_BYTES = 24
# The name of an element type, a sum and a flag in JSON, with their separators.
_SUM_BYTES = 48
# The identity of a run, with paths and options; keys of a record; a digest.
_IDENTITY_BYTES = 16384
_LINE_BYTES = 256
# A placement in the table of a strategy.
_PLACEMENT_BYTES = 1024
# What the report says of a target, and of each rank that it was read from, on a line of its own.
_REPORTED_TARGET_BYTES = 640
_REPORTED_RANK_BYTES = 16
# What the report says of the run as a whole; warnings and notes are few.
_REPORT_BYTES = 65536


class Needs:
    """Adds up the room that one process needs for what `request` asks of it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tally = Tally()
        self._read_ranks: dict[str, tuple[int, ...]] = {}
        self._sources: set[str] = set()
        self._stage_digests: set[str] = set()
        self._summed: set[str] = set()

    def add(self, plan: RankPlan, evidence: Evidence, format_name: str, path: Path, left_bytes: int) -> None:
        """Add the target of `plan` and its record.

        path: of the target file. left_bytes: size of what an earlier run has left of it.
        """
        request = self._request
        self._read_ranks[str(path)] = plan.read_ranks
        if request.recorded:
            file = str(path.relative_to(request.target))
            record_bytes = record_at_most_bytes(plan, evidence, file, sums=request.verify)
            self._tally.add_record(record_path(Path(request.target, STATE), plan.target_rank), record_bytes)
            self._sources.update(source.path for source in evidence.sources.files)
            if request.verify and evidence.held.digest not in self._stage_digests:
                self._stage_digests.add(evidence.held.digest)
                self._summed.update(plan.tensors.specs.names)
        module = formats.by_name(format_name)
        size_bytes = module.size_at_most_bytes(plan.shard._replace(with_sums=request.verify), crc=request.crc)
        self._tally.add(path, size_bytes, left_bytes=left_bytes)

    def _add_strategy(self, target: Strategy) -> None:
        """Add the record of how the targets are cut: their placement table, escaped once more as one text."""
        names = (*target.parameters, *(glob for glob, _ in target.rules))
        size_bytes = _IDENTITY_BYTES + sum(2 * _text_bytes(name) + 2 * _NUMBER_BYTES for name in names)
        placements = {placement for held in target.parameters.values() for placement in held}
        size_bytes += _PLACEMENT_BYTES * (len(placements) + len(target.rules))
        path = Path(self._request.target, STATE, STRATEGY_RECORD)
        if not path.exists():
            self._tally.add_record(path, size_bytes)

    def rooms(
        self, reported: int, processes: int, shares: Callable[[], bool], strategy: Strategy | None
    ) -> tuple[Room, ...]:
        """Return the room that is needed on each file system, as `Tally.rooms` does.

        reported: how many targets are in the report that this process writes, if any. processes, shares: see there.
        strategy: of the targets, if this process is to record it.
        """
        request = self._request
        if request.recorded and self._read_ranks:
            commit_bytes = commit_record_at_most_bytes(self._read_ranks.items(), self._sources, self._summed)
            self._tally.add_record(Path(request.target, COMMIT_RECORD), commit_bytes)
            if strategy is not None:
                self._add_strategy(strategy)
        if request.report is not None and reported:
            longest_path = max(self._read_ranks, key=len, default="")
            most_ranks = max(map(len, self._read_ranks.values()), default=0)
            self._tally.add_record(Path(request.report), report_at_most_bytes(reported, longest_path, most_ranks))
        return self._tally.rooms(processes, shares)


def record_at_most_bytes(plan: RankPlan, evidence: Evidence, file: str, *, sums: bool) -> int:
    """Return the most bytes that the record of a target can take. sums: whether it has the sums of the tensors."""
    record = TargetRecord("0" * 64, plan.target_rank, file, 0, evidence, announced=(0, 0))
    size_bytes = len(record.as_text()) + 4 * _NUMBER_BYTES
    if sums:
        for group in plan.tensors.groups:
            tensor_bytes = 3 * len(group.kind.global_shape) * _NUMBER_BYTES + _SUM_BYTES
            size_bytes += sum(tensor_bytes + _text_bytes(name) for name in group.names)
    return size_bytes


def commit_record_at_most_bytes(
    targets: Iterable[tuple[str, Sequence[int]]], sources: Iterable[str], summed: Collection[str]
) -> int:
    """Return the most bytes that a commit record can take.

    targets: of each, its path and the ranks it is read from. sources: paths. summed: names of tensors with a sum.
    """
    size_bytes = _IDENTITY_BYTES
    size_bytes += sum(_LINE_BYTES + _text_bytes(file) + _NUMBER_BYTES * len(ranks) for file, ranks in targets)
    size_bytes += sum(_LINE_BYTES + _text_bytes(path) for path in sources)
    return size_bytes + sum(_text_bytes(name) + _SUM_BYTES for name in summed)


def report_at_most_bytes(targets: int, longest_path: str, most_ranks: int) -> int:
    """Return the most bytes that a report of so many targets can take, each read from `most_ranks` source ranks."""
    target_bytes = _REPORTED_TARGET_BYTES + _text_bytes(longest_path) + _REPORTED_RANK_BYTES * most_ranks
    return _REPORT_BYTES + targets * target_bytes


def _text_bytes(text: str) -> int:
    """Return how many bytes a text takes in JSON, which escapes all but ASCII characters."""
    return len(json.dumps(text)) + 2
