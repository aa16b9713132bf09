"""Hold what comparing two checkpoints in numbers has found, and print it (`ValueComparison`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.groups import grouped
from reshard_mpi.mapping.tensor_kinds import TensorKind, kind_of
from reshard_mpi.text import beginning, counted, json_number, one_line

if TYPE_CHECKING:
    from reshard_mpi.engine.value_distance import ValueDistance

# Tensors and values beside them that are printed; --json has all.
_MOST_LISTED = _MOST_VALUES = 20
_MOST_CHARACTERS = 60
# A share in percent that is not all is never shown as 100.
_ALMOST_ALL = 99.99
_HEADING = ("differing", "largest", "relative", "norm A", "norm B", "cosine", "tensor")


class ComparedType(NamedTuple):
    """What one checkpoint says of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def as_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape)}


class TensorComparison(NamedTuple):
    """One tensor of two checkpoints.

    Attributes:
        first, second: None where a checkpoint has no such tensor.
        distance: None if they are not compared: one is missing, or shapes or types are too unlike.
    """

    name: str
    first: ComparedType | None
    second: ComparedType | None
    distance: ValueDistance | None

    @property
    def passes(self) -> bool:
        """Whether no element is further apart than is tolerated."""
        return self.distance is not None and not self.distance.outside

    @property
    def differs(self) -> bool:
        return self.distance is None or self.distance.differing > 0

    @property
    def kind(self) -> TensorKind:
        return kind_of(self.name)

    def order(self) -> tuple[bool, float, float]:
        """Return the key by which tensors are sorted: the most different come first."""
        if self.distance is None:
            return False, -math.inf, -math.inf
        return self.passes, -self.distance.share, -self.distance.relative

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; NaN and infinities as texts."""
        facts: dict[str, Any] = {"name": self.name, "kind": str(self.kind), "passes": self.passes}
        facts |= {"first": self.first and self.first.as_json(), "second": self.second and self.second.as_json()}
        return facts if self.distance is None else {**facts, **_numbers_of(self.distance)}


def _numbers_of(distance: ValueDistance) -> dict[str, Any]:
    return {
        "elements": distance.elements,
        "differing": distance.differing,
        "outside": distance.outside,
        "share": distance.differing / distance.elements if distance.elements else 0.0,
        "largest": json_number(distance.largest),
        "relative": json_number(distance.relative),
        "norms": [*map(json_number, distance.norms)],
        "norm_of_difference": json_number(distance.norm_of_difference),
        "cosine": distance.cosine,
        "not_finite": [*distance.not_finite],
    }


class ValueDifference(NamedTuple):
    """A value beside the tensors that is another one in the second checkpoint, as JSON; None: not there."""

    name: str
    first: str | None
    second: str | None


class _KindSummary(NamedTuple):
    """All tensors of one kind together."""

    kind: TensorKind
    tensors: int
    differing_tensors: int
    failing: int  # tensors that do not pass
    distance: ValueDistance | None


class ValueComparison(NamedTuple):
    """What comparing two checkpoints in numbers has found.

    Attributes:
        tensors: all of both, those that differ most first.
        values: those beside the tensors that differ, by name.
        left_out: in words, what is in one of them and cannot be compared.
    """

    tensors: tuple[TensorComparison, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    left_out: tuple[str, ...] = ()

    def joined(self, others: Iterable[ValueComparison]) -> ValueComparison:
        """Return what several processes have found as one."""
        found = [self, *others]
        tensors = sorted((tensor for each in found for tensor in each.tensors), key=TensorComparison.order)
        values = dict.fromkeys(value for each in found for value in each.values)
        left_out = dict.fromkeys(what for each in found for what in each.left_out)
        return ValueComparison(tuple(tensors), tuple(values), tuple(left_out))

    @property
    def passes(self) -> bool:
        """Whether all tensors are in both, and no element is further apart than is tolerated."""
        return not self.left_out and all(tensor.passes for tensor in self.tensors)

    def by_kind(self) -> tuple[_KindSummary, ...]:
        """Return a summary for each kind of tensors."""
        of_kind = grouped((tensor.kind, tensor) for tensor in self.tensors)
        return tuple(_summary(kind, of_kind[kind]) for kind in TensorKind if kind in of_kind)

    def as_json(self, top: int | None = None) -> dict[str, Any]:
        """Return it as plain values. top: how many tensors at most; None: all."""
        return {
            "kind": "values",
            "passes": self.passes,
            "by_kind": {
                summary.kind: {
                    "tensors": summary.tensors,
                    "differing_tensors": summary.differing_tensors,
                    "failing_tensors": summary.failing,
                    **({} if summary.distance is None else _numbers_of(summary.distance)),
                }
                for summary in self.by_kind()
            },
            "tensors": [tensor.as_json() for tensor in self.tensors[:top]],
            "values": [value._asdict() for value in self.values],
            "left_out": list(self.left_out),
        }

    def as_text(self, top: int | None = None) -> str:
        """Return it as lines for people. top: how many tensors that differ are listed at most; None: 20."""
        top = top or _MOST_LISTED
        differing = [tensor for tensor in self.tensors if tensor.differs]
        rows = [_row(tensor) for tensor in differing[:top]]
        lines = [*_table(rows)] if rows else []
        if len(differing) > top:
            lines.append(f"{len(differing) - top} more tensors differ (--top N lists N)")
        lines += map(_summary_line, self.by_kind())
        values = self.values[:_MOST_VALUES]
        lines += (f"{value.name}: {_shown(value.first)} and {_shown(value.second)}" for value in values)
        if len(self.values) > _MOST_VALUES:
            lines.append(f"{len(self.values) - _MOST_VALUES} more values beside the tensors differ (--json lists all)")
        lines += self.left_out
        return "\n".join(map(one_line, lines))


def _row(tensor: TensorComparison) -> tuple[str, ...]:
    name = tensor.name
    if tensor.distance is None:
        sides = [f"{side or 'none'} in {place}" for side, place in ((tensor.first, "A"), (tensor.second, "B"))]
        return (*("-",) * 6, f"{name} ({', '.join(sides)})")
    if tensor.first and tensor.second and tensor.first.dtype != tensor.second.dtype:
        name = f"{name} ({tensor.first.dtype} and {tensor.second.dtype})"
    distance = tensor.distance
    if any(distance.not_finite):
        name = f"{name} ({' and '.join(map(str, distance.not_finite))} NaN or infinite)"
    return (*_numbers(distance), f"{name}{' (tolerated)' * tensor.passes}")


def _numbers(distance: ValueDistance) -> tuple[str, ...]:
    share = 100 * distance.differing / max(1, distance.elements)
    percent = f"{share:.3g}" if distance.differing in (0, distance.elements) else f"{min(share, _ALMOST_ALL):.4g}"
    numbers = (distance.largest, distance.relative, *distance.norms)
    cosine = "-" if distance.cosine is None else f"{distance.cosine:.9g}"
    return f"{percent} %", *(f"{number:.5g}" for number in numbers), cosine


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows below their heading, numbers to the right of their columns."""
    cells = [_HEADING, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADING) - 1)]
    for row in cells:
        yield "  ".join((*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]))


def _summary(kind: TensorKind, tensors: Sequence[TensorComparison]) -> _KindSummary:
    distances = [tensor.distance for tensor in tensors if tensor.distance is not None]
    failing = sum(not tensor.passes for tensor in tensors)
    differing = sum(tensor.differs for tensor in tensors)
    if not distances:
        return _KindSummary(kind, len(tensors), differing, failing, None)
    norms = [math.hypot(*(distance.norms[side] for distance in distances)) for side in (0, 1)]
    products = math.fsum(
        (distance.cosine or 0.0) * (distance.norms[0] / norms[0]) * (distance.norms[1] / norms[1])
        for distance in distances
        if all(norms) and not any(map(math.isinf, norms))
    )
    whole = distances[0]._replace(
        elements=sum(distance.elements for distance in distances),
        differing=sum(distance.differing for distance in distances),
        outside=sum(distance.outside for distance in distances),
        largest=max(distance.largest for distance in distances),
        relative=max(distance.relative for distance in distances),
        norms=(norms[0], norms[1]),
        norm_of_difference=math.hypot(*(distance.norm_of_difference for distance in distances)),
        cosine=max(-1.0, min(1.0, products)) if all(norms) else None,
        not_finite=(sum(d.not_finite[0] for d in distances), sum(d.not_finite[1] for d in distances)),
    )
    return _KindSummary(kind, len(tensors), differing, failing, whole)


_WORDS = {
    TensorKind.MODEL: "model",
    TensorKind.COPY: "fp32 copies of weights",
    TensorKind.MOMENT: "optimizer's moments",
    TensorKind.STEP: "steps",
    TensorKind.OTHER: "other",
}


def _summary_line(summary: _KindSummary) -> str:
    line = f"{_WORDS[summary.kind]}: {summary.differing_tensors} of {counted(summary.tensors, 'tensor')}"
    line += " differs" if summary.differing_tensors == 1 else " differ"
    if summary.distance is not None and summary.distance.differing:
        share, largest, relative, *_, cosine = _numbers(summary.distance)
        line += f", in {share} of their elements, by {largest} at most, relative {relative}; cosine {cosine}"
    return line


def _shown(value: str | None) -> str:
    return "not there" if value is None else beginning(value, _MOST_CHARACTERS)
