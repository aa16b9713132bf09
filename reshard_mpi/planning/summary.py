"""A summary of a plan for people and scripts: sizes, files and memory of every target rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from reshard_mpi.planning.losses import warnings_of
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.planning.shown_rules import ShownRule
from reshard_mpi.text import one_line
from reshard_mpi.units import format_bytes


class RankSummary(NamedTuple):
    """The summary of one target rank's plan.

    read_ranks: the source ranks that its tensors come from. written_bytes, needed_bytes: payload written, and read.
    peak_bytes: the most resident memory that its process is projected to need. warnings: of shards that cannot be used.
    """

    rank: int
    read_ranks: tuple[int, ...]
    tensors: int
    copies: int
    written_bytes: int
    needed_bytes: int
    peak_bytes: int
    absent: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: RankPlan, peak_bytes: int) -> RankSummary:
        return cls(
            rank=plan.target_rank,
            read_ranks=plan.read_ranks,
            tensors=len(plan.tensors),
            copies=plan.copies,
            written_bytes=plan.written_bytes,
            needed_bytes=plan.needed_bytes,
            peak_bytes=peak_bytes,
            absent=plan.absent,
            notes=plan.notes,
            warnings=(*warnings_of(plan.lost), *plan.warnings, *plan.left_out),
        )


class Plan(NamedTuple):
    """The targets of a conversion, in the order of their ranks.

    source: one line that describes the checkpoint. tensors: one for each tensor, with its whole shape and what it is
    made of. rules: what the rules of the source's spec make of its tensors.
    """

    targets: tuple[RankSummary, ...]
    source: str
    tensors: tuple[str, ...] = ()
    rules: tuple[ShownRule, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most memory that any process needs."""
        return max((target.peak_bytes for target in self.targets), default=0)

    @property
    def written_bytes(self) -> int:
        return sum(target.written_bytes for target in self.targets)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values; sizes in bytes."""
        return {
            "version": 1,
            "source": self.source,
            "written_bytes": self.written_bytes,
            "peak_bytes": self.peak_bytes,
            "targets": [target._asdict() for target in self.targets],
            **({"tensors": list(self.tensors)} if self.tensors else {}),
        }

    def as_table(self) -> str:
        """Return the plan as lines for people."""
        rows = [("target", "tensors", "writes", "reads", "peak memory", "source ranks")]
        for target in self.targets:
            ranks = " ".join(map(str, target.read_ranks[:12])) + (" ..." if len(target.read_ranks) > 12 else "")
            written, needed = format_bytes(target.written_bytes), format_bytes(target.needed_bytes)
            rows.append(
                (str(target.rank), str(target.tensors), written, needed, format_bytes(target.peak_bytes), ranks)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths)), row[5]]) for row in rows]
        count = len(self.targets)
        total = f"{count} {'target' if count == 1 else 'targets'}, {format_bytes(self.written_bytes)}"
        most = f"each process needs at most {format_bytes(self.peak_bytes)} of memory"
        return "\n".join([f"source: {self.source}", *map(one_line, self.tensors), *lines, f"{total}; {most}"])
