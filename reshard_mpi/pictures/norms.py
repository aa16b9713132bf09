"""Draw the norms of tensors by layer and kind, marked where an audit has found something, as a page (`norms_page`).

The page is made as the page of a plan: names are escaped, no script runs but its own, and nothing is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import NamedTuple

from reshard_mpi.mapping.tensor_kinds import kin_of, layer_of
from reshard_mpi.pictures.rendering import digest_of, json_of
from reshard_mpi.text import counted, natural_key, one_line

_PAGE, _SCRIPT = (Path(__file__).with_name(f"norms.{ending}") for ending in ("html", "js"))
_STYLES = [Path(__file__).with_name(f"{name}.css") for name in ("page", "norms")]
# What a page holds at most: pictures, points of one of them, rows of findings; and characters of a text.
_MOST_CHARTS, _MOST_POINTS, _MOST_ROWS, _MOST_TEXT = 150, 400, 1000, 300
# A picture: its size, and what is free at its edges. Norms further from the middle one lie at an edge.
_WIDTH, _HEIGHT, _EDGE = 240, 90, 8
_DECADES = 3.0


class TensorNorm(NamedTuple):
    """The norm of one tensor, with its type and shape in words.

    Example: `TensorNorm("h.3.w", 1.25, "bfloat16 [64, 64]")`.
    """

    name: str
    norm: float
    told: str


class Mark(NamedTuple):
    """A finding on a tensor; without a name, on a file. severity: `error` or `note`."""

    severity: str
    kind: str
    tensor: str
    detail: str


class _Chart(NamedTuple):
    """The tensors of one kind, each with its number in the page."""

    kin: str
    points: list[tuple[int, TensorNorm]]
    marked: int  # how many of them have been found


def norms_page(path: str, summary: str, norms: Sequence[TensorNorm], marks: Sequence[Mark]) -> str:
    """Return the page of an audit.

    Args:
        path: of the checkpoint; summary: the result in a line.
        norms: of all tensors in their order.
        marks: worst first.
    """
    of_tensor: dict[str, list[Mark]] = {}
    for mark in marks:
        of_tensor.setdefault(mark.tensor, []).append(mark)
    charts = _charts(norms, of_tensor)
    drawn = [chart._replace(points=_thinned(chart.points, of_tensor)) for chart in charts[:_MOST_CHARTS]]
    shown = [norm for chart in drawn for _, norm in chart.points]
    number_of = {norm.name: number for number, norm in enumerate(shown)}
    style, script = "".join(each.read_text(encoding="utf-8") for each in _STYLES), _SCRIPT.read_text(encoding="utf-8")
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; script-src '{digest_of(script)}'; style-src '{digest_of(style)}'; img-src data:",
        style=style,
        script=script,
        path=_text(path),
        summary=_text(summary),
        findings="".join(_row(mark, number_of) for mark in marks[:_MOST_ROWS]) or "<tr><td>nothing</td></tr>",
        left_out="".join(f"<p>{escape(text)}</p>" for text in _left_out(charts, len(shown), len(norms), len(marks))),
        charts="".join(_figure(chart, number_of, of_tensor) for chart in drawn),
        data=json_of(
            {
                "names": [_short(norm.name) for norm in shown],
                "told": [f"norm {norm.norm:.6g}, {one_line(norm.told)}" for norm in shown],
                "found": [
                    [_short(f"{mark.severity}: {mark.kind}: {mark.detail}") for mark in of_tensor.get(norm.name, ())]
                    for norm in shown
                ],
            }
        ),
    )


def _charts(norms: Iterable[TensorNorm], marked: Mapping[str, object]) -> list[_Chart]:
    """Return a chart for each kind of tensors, those in which something was found first."""
    by_kin: dict[str, list[tuple[int, TensorNorm]]] = {}
    for number, norm in enumerate(norms):
        by_kin.setdefault(kin_of(norm.name), []).append((number, norm))
    charts = [_Chart(kin, points, sum(norm.name in marked for _, norm in points)) for kin, points in by_kin.items()]
    return sorted(charts, key=lambda chart: (not chart.marked, natural_key(chart.kin)))


def _thinned(points: list[tuple[int, TensorNorm]], marked: Mapping[str, object]) -> list[tuple[int, TensorNorm]]:
    """Return as many points as a chart has room for, the found ones among them."""
    step = -(-len(points) // _MOST_POINTS)
    found = [point for point in points if point[1].name in marked][:_MOST_POINTS]
    kept = {number for number, _ in (*points[::step], *found)}
    return [point for point in points if point[0] in kept]


def _left_out(charts: Sequence[_Chart], shown: int, all_norms: int, marks: int) -> Iterator[str]:
    """Yield words on the parts that the page leaves out."""
    if len(charts) > _MOST_CHARTS:
        yield f"{counted(len(charts) - _MOST_CHARTS, 'more kind')} of tensors are not in this page."
    if shown < all_norms:
        yield f"{shown} of {counted(all_norms, 'tensor')} are drawn, those that were found among them."
    if marks > _MOST_ROWS:
        yield f"{counted(marks - _MOST_ROWS, 'more finding')} are not in this page: --json lists all."


def _row(mark: Mark, number_of: Mapping[str, int]) -> str:
    number, name = number_of.get(mark.tensor), _text(mark.tensor)
    named = name if number is None else f'<button data-point="{number}">{name}</button>'
    return (
        f"<tr><td>{_text(mark.severity)}</td><td>{_text(mark.kind)}</td><td>{named}</td>"
        f"<td>{_text(mark.detail)}</td></tr>\n"
    )


def _figure(chart: _Chart, number_of: Mapping[str, int], marks: Mapping[str, Sequence[Mark]]) -> str:
    """Return one picture: a point for each tensor, by its layer and the logarithm of its norm."""
    heights = {norm.name: _height(norm.norm) for _, norm in chart.points}
    middle = median(heights.values())
    lowest, highest = max(min(heights.values()), middle - _DECADES), min(max(heights.values()), middle + _DECADES)
    lowest, highest = (lowest, highest) if highest - lowest >= 1 else (lowest - 0.5, highest + 0.5)
    layers = [layer_of(norm.name) for _, norm in chart.points]
    columns = [place if layer is None else layer for place, layer in enumerate(layers)]
    first, last, of_column, drawn = min(columns), max(columns), Counter(columns), Counter[int]()
    room = (_WIDTH - 2 * _EDGE) / (last - first + 1)

    def across(column: int) -> float:
        """Return the place of the next point of a column: experts of one layer lie side by side."""
        drawn[column] += 1
        return _EDGE + room * (column - first + 0.1 + 0.8 * (drawn[column] - 0.5) / of_column[column])

    def down(height: float) -> float:
        share = (min(max(height, lowest), highest) - lowest) / (highest - lowest)
        return _HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE)

    lines = "".join(
        f'<line x1="0" x2="{_WIDTH}" y1="{down(ten):.1f}" y2="{down(ten):.1f}"/>'
        for ten in range(math.ceil(lowest), math.floor(highest) + 1)
    )
    circles = "".join(
        f'<circle data-point="{number_of[norm.name]}" cx="{across(column):.1f}" cy="{down(heights[norm.name]):.1f}"'
        f' r="3"{_class_of(marks.get(norm.name, ()))}/>'
        for column, (_, norm) in zip(columns, chart.points)
    )
    norms = [norm.norm for _, norm in chart.points]
    span = f"{min(norms):.2g}" if len(norms) == 1 else f"{min(norms):.2g} to {max(norms):.2g}"
    where = f", layers {first} to {last}" if any(layer is not None for layer in layers) and last > first else ""
    caption = f"{chart.kin} ({counted(len(chart.points), 'point')}, norms {span}{where})"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(chart.kin)}">'
        f"{lines}{circles}</svg><figcaption>{_text(caption)}</figcaption></figure>\n"
    )


def _class_of(marks: Sequence[Mark]) -> str:
    """Return the class of a point, by the worst of what was found."""
    return f' class="{"error" if any(mark.severity == "error" for mark in marks) else "note"}"' if marks else ""


def _height(norm: float) -> float:
    """Return the decimal logarithm of a norm, within bounds."""
    return 40.0 if not math.isfinite(norm) else math.log10(min(max(norm, 1e-12), 1e40))


def _text(text: str) -> str:
    return escape(_short(text))


def _short(text: str) -> str:
    shown = one_line(text)
    return shown if len(shown) <= _MOST_TEXT else f"{shown[:_MOST_TEXT]}..."
