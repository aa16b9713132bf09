"""What a benchmark found, and the forms it is given in: a Markdown table, JSON, curves to be drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import as_line
from benchmarks.rows import Row, Side
from benchmarks.spread import Spread, short
from benchmarks.targets import MIB, Figure

GB = 1e9
_HEADER = (
    "what",
    "ours",
    "beside",
    "seconds, ours",
    "seconds, beside",
    "ratio of neighbours",
    "asked for",
    "reached",
    "peak memory",
    "read",
    "written",
)
_LEGEND = (
    "Pairs of values are ours / beside. Medians (least-most). Peak: resident memory of the largest process."
    " Read and written: payload by the report of a transform, else what system calls read and wrote, which leaves out"
    " mapped files."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Throughput in GB/s over something: sizes in MB, or numbers of processes."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Results:
    """Everything one benchmark found."""

    benchmark: str
    machine: dict[str, str]
    pairs: int
    rows: list[Row]
    x_label: str = ""
    curves: list[Curve] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(row.skipped is not None and row.skipped.startswith("failed") for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "pairs": self.pairs,
            "rows": [row.as_json() for row in self.rows],
            "curves": [{"label": curve.label, "points": curve.points} for curve in self.curves],
        }

    def as_markdown(self) -> str:
        """Return the machine's line, the table, and the rows that are missing, each with its reason."""
        measured = [row for row in self.rows if row.skipped is None]
        skipped = [f"- not measured: {row.what}: {row.skipped}" for row in self.rows if row.skipped is not None]
        parts = [f"{as_line(self.machine)}; {self.pairs} counted runs of each side"]
        if measured:
            parts += [table(_HEADER, [_cells(row) for row in measured]), _LEGEND]
        return "\n\n".join([*parts, *(["\n".join(skipped)] if skipped else [])])


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table."""
    widths = [max(len(line[at]) for line in (header, *lines)) for at in range(len(header))]
    ruler = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"
        for line in (header, ruler, *lines)
    )


def _cells(row: Row) -> list[str]:
    ours, peer = row.ours, row.peer
    return [
        row.what,
        ours.name if ours else "-",
        peer.name if peer else "-",
        ours.seconds.as_text() if ours else "-",
        peer.seconds.as_text() if peer else "-",
        _ratio(row),
        row.target.as_text(),
        {True: "yes", False: "no", None: "-"}[row.reached],
        _peak(row),
        _both(ours, peer, lambda side: size_text(side.read_bytes.median)),
        _both(ours, peer, lambda side: size_text(side.written_bytes.median)),
    ]


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    figure = row.target.figure
    return f"{row.ratio.as_text()} {figure.value if figure is not Figure.SECONDS else Figure.TIME.value}"


def _peak(row: Row) -> str:
    if row.ours is None and row.figure is not None:
        return _mebibytes(row.figure)
    return _both(row.ours, row.peer, lambda side: _mebibytes(side.peak_bytes))


def _mebibytes(size: Spread) -> str:
    return f"{size.median / MIB:.0f} MiB"


def size_text(size_bytes: float) -> str:
    """Return a size in decimal units, as sizes of tensors are given here."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{short(size_bytes / unit)} {name}"
    return f"{size_bytes:.0f} B"


def _both(ours: Side | None, peer: Side | None, text: Callable[[Side], str]) -> str:
    return " / ".join(text(side) for side in (ours, peer) if side is not None) or "-"
