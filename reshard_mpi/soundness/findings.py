"""List what an audit has found, worst first, for people and as plain values (`Finding`, `AuditReport`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.sharding.strategy import Pattern
from reshard_mpi.text import beginning, counted, format_bytes, natural_key, one_line

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome

# What a terminal shows at once.
_MOST_LINES = 20
_MOST_DETAIL = 400


class FindingKind(StrEnum):
    """Ways for a tensor or a file to be wrong, in the order in which people want to read them."""

    STRUCTURE = "structure"  # a part is missing, there twice, or cannot be read
    SUM = "sum"  # a file or a tensor does not fit a sum that is kept of it
    MISSING = "missing"  # the model's definition has a tensor of this name
    SURPLUS = "surplus"  # the definition has no tensor of this name
    SHAPE = "shape"  # the definition has it in another shape
    TIED = "tied"  # differs from the tensor that it is tied to
    NAN = "nan"
    INFINITE = "infinite"
    BEYOND = "beyond"  # values that fit no training
    SCALE = "scale"  # a scale of a quantized weight that is none, or the number of a group that it does not have
    ZERO = "zero"  # all are zero
    CONSTANT = "constant"  # all are equal
    COPY = "copy"  # the same as the tensor of another layer or expert
    MOMENTS = "moments"  # a parameter has not all that the optimizer keeps of the others
    STEP = "step"  # the count of steps is another one than all other parameters have
    FP32 = "fp32"  # a copy in float32, rounded, is not the weight
    ROWS = "rows"  # rows are all zero
    SUBNORMAL = "subnormal"  # many values are subnormal
    NORM = "norm"  # far from the norms of its kin
    CHANGE = "change"  # far from its norm in the previous checkpoint

    @property
    def is_note(self) -> bool:
        """Whether it may be as it should be."""
        return self in _NOTES


_NOTES = frozenset((FindingKind.ROWS, FindingKind.SUBNORMAL, FindingKind.NORM, FindingKind.CHANGE))
_RANKS = {kind: number for number, kind in enumerate(FindingKind)}


class Finding(NamedTuple):
    """One thing that an audit has found.

    Example: `Finding(FindingKind.NAN, "h.3.w", 2, "ckpt/rank_2/model.ckpt", "4 of 1024 elements, the first at [0, 7]")`
    """

    kind: FindingKind
    tensor: str  # name; empty for a whole file
    rank: int | None  # the source rank that holds what is wrong; None: it is of no rank
    file: str  # path of its file; empty where there is none
    detail: str  # in words, with numbers

    @property
    def severity(self) -> str:
        """`error`, or `note` for what may be as it should be."""
        return "note" if self.kind.is_note else "error"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {
            "kind": str(self.kind),
            "severity": self.severity,
            "tensor": self.tensor,
            "rank": self.rank,
            "file": self.file,
            "detail": self.detail,
        }

    def as_line(self) -> str:
        """Return the finding in one line, with unprintable characters escaped."""
        place = ", ".join(filter(None, ("" if self.rank is None else f"rank {self.rank}", self.file)))
        detail = beginning(self.detail, _MOST_DETAIL)
        named = f" {self.tensor!r}" if self.tensor else ""
        return one_line(f"{self.severity}: {self.kind}{named}: {detail}{f' ({place})' if place else ''}")


def worst_first(findings: Iterable[Finding], allowed: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return findings in the order in which people read them: by kind, then by tensor.

    Args:
        allowed: globs; findings of tensors whose names match one are left out.
    """
    globs = [Pattern(glob) for glob in allowed]
    kept = (each for each in findings if not (each.tensor and any(glob.matches(each.tensor) for glob in globs)))
    return tuple(sorted(dict.fromkeys(kept), key=lambda each: (_RANKS[each.kind], natural_key(each.tensor))))


class AuditReport(NamedTuple):
    """The result of an audit."""

    path: str  # of the checkpoint
    tensors: int  # how many were read
    read_bytes: int
    findings: tuple[Finding, ...]  # worst first
    checked: tuple[str, ...]  # what it was held against: "structure", "sums", "content", ...
    notes: tuple[str, ...]  # for people
    warnings: tuple[str, ...]
    seconds: float
    processes: int

    @classmethod
    def of(cls, path: str, outcome: Outcome, seconds: float) -> AuditReport:
        """Return the report of an audit of the checkpoint at a path."""
        checked = outcome.checked
        return cls(
            path,
            sum(each.tensors for each in checked),
            sum(each.read_bytes for each in checked),
            outcome.findings,
            tuple(dict.fromkeys(by for each in checked for by in each.by)),
            outcome.notes,
            outcome.warnings,
            seconds,
            outcome.processes,
        )

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that cannot be as they should be."""
        return tuple(each for each in self.findings if not each.kind.is_note)

    def is_sound(self, *, strict: bool = False) -> bool:
        """Tell whether there is no error; strict: and neither a note nor a warning."""
        return not (self.findings or self.warnings if strict else self.errors)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "kind": "audit",
            "path": self.path,
            "tensors": self.tensors,
            "bytes": self.read_bytes,
            "checked": list(self.checked),
            "errors": len(self.errors),
            "notes": len(self.findings) - len(self.errors),
            "findings": [each.as_json() for each in self.findings],
            "seconds": self.seconds,
        }

    def as_lines(self, *, is_all: bool = False) -> list[str]:
        """Return the findings for people, on one screen; is_all: every one of them.

        Where there are too many, each kind keeps the same share of the lines, and the last line counts the rest.
        """
        shown = list(self.findings) if is_all else _shared_out(self.findings)
        texts = [each.as_line() for each in shown]
        rest = len(self.findings) - len(shown)
        if rest:
            of_kinds = Counter(each.kind for each in self.findings)
            counts = ", ".join(f"{count} {kind}" for kind, count in of_kinds.items())
            texts.append(f"and {rest} more (--verbose or --json lists all): {counts}")
        return texts

    def summary(self) -> str:
        """Return the closing line."""
        errors, notes = len(self.errors), len(self.findings) - len(self.errors)
        of_what = f"audited {counted(self.tensors, 'tensor')}, {format_bytes(self.read_bytes)}"
        by = f" ({', '.join(self.checked)})" if self.checked else ""
        found = "sound" if not self.findings else f"{counted(errors, 'error')}, {counted(notes, 'note')}"
        warned = f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return f"{of_what} in {self.seconds:.2f} s{by}: {found}{warned}"


def _shared_out(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that fit on a screen: of each kind the first ones."""
    counts = Counter(each.kind for each in findings)
    share = max(1, _MOST_LINES // max(1, len(counts)))
    shown: list[Finding] = []
    taken = Counter[FindingKind]()
    spare = _MOST_LINES - sum(min(share, count) for count in counts.values())
    for each in findings:
        if taken[each.kind] >= share:
            if spare <= 0:
                continue
            spare -= 1
        taken[each.kind] += 1
        shown.append(each)
    return shown
