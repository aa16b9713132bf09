"""Write the HTML page of a plan (`page_of`), and of an audit, with the norms of tensors (`norms_page`).

Names may hold anything. They get into a page in three ways, each with its own escape: as text of the template and of
SVG (`html.escape`), and as JSON in which no character has a meaning in HTML. The page's own policy lets no script run
but its own, told by its digest, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

from reshard_mpi.groups import grouped
from reshard_mpi.mapping.tensor_kinds import kin_of, layer_of
from reshard_mpi.pictures.figures import DrawnMove, Figures, TensorCut, grid_of
from reshard_mpi.pictures.matrix import matrix_scene
from reshard_mpi.pictures.scene import svg_of
from reshard_mpi.pictures.tensor_cuts import cut_scene
from reshard_mpi.text import beginning, counted, format_bytes, natural_key, one_line

_PAGE, _STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{ending}") for ending in ("html", "css", "js"))
# What a page holds at most: characters of pictures and of names; of one tensor, moves; and feeds.
_MOST_DRAWN, _MOST_NAMED, _MOST_MOVES, _MOST_FEEDS = 6_000_000, 2_000_000, 200, 20_000
_MOST_NAME = 400


def page_of(figures: Figures) -> str:
    """Return the page of a plan."""
    drawn = list(_drawn(figures))
    cuts = figures.cuts[: len(drawn)]
    style, script = _STYLE.read_text(encoding="utf-8"), _SCRIPT.read_text(encoding="utf-8")
    flow = figures.flow
    planned = f"{len(flow.planned)} of {counted(flow.targets.total, 'target')} planned"
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        source=escape(one_line(figures.source)),
        target=escape(one_line(figures.target)),
        summary=escape(
            f"{planned}, {format_bytes(flow.size_bytes)} read of {counted(flow.sources.total, flow.sources.word)}"
        ),
        left_out="".join(f"<p>{escape(text)}</p>" for text in _left_out(figures, len(cuts))),
        matrix=svg_of(matrix_scene(figures)),
        cuts="".join(f'<template id="cut-{number}">{svg}</template>\n' for number, svg in enumerate(drawn)),
        data=_json_of(_data(figures, cuts)),
    )


def _drawn(figures: Figures) -> Iterator[str]:
    room = _MOST_DRAWN
    for cut in figures.cuts:
        svg = svg_of(cut_scene(cut, figures))
        room -= len(svg)
        if room < 0:
            return
        yield svg


def _left_out(figures: Figures, cuts: int) -> Iterator[str]:
    """Yield words on the parts that the page leaves out."""
    rest = figures.cuts[cuts:]
    further, tensors = figures.further + len(rest), figures.further_tensors + sum(cut.total for cut in rest)
    if further:
        yield (
            f"{counted(further, 'more kind')} of tensors ({counted(tensors, 'tensor')}) are not in this page:"
            " --tensor NAME has one drawn."
        )
    feeds = len(figures.flow.feeds) - _MOST_FEEDS
    if feeds > 0:
        yield f"The smallest {feeds} of {len(figures.flow.feeds)} entries are not in the lists of files."


def _data(figures: Figures, cuts: Sequence[TensorCut]) -> dict[str, Any]:
    flow, grid = figures.flow, grid_of(figures.flow)
    feeds = sorted(flow.feeds, key=lambda feed: feed.size_bytes, reverse=True)[:_MOST_FEEDS]
    sources, targets = {feed.source for feed in feeds}, {feed.target for feed in feeds}
    moves = [move for cut in cuts for move in cut.moves[:_MOST_MOVES]]
    named = sources | {move.source for move in moves}, targets | {move.target for move in moves}
    names = _Names()
    return {
        "rows": [list(span) for span in grid.rows],
        "columns": [list(span) for span in grid.columns],
        "rowNames": [one_line(flow.sources.span(*span)) for span in grid.rows],
        "columnNames": [one_line(flow.targets.span(*span)) for span in grid.columns],
        "sourceNames": {number: name for number, name in flow.sources.names.items() if number in named[0]},
        "targetNames": {number: name for number, name in flow.targets.names.items() if number in named[1]},
        "sourceFiles": {number: one_line(flow.sources.files.get(number, "")) for number in sources},
        "targetFiles": {number: one_line(flow.targets.files.get(number, "")) for number in targets},
        "feeds": [list(feed) for feed in feeds],
        "cuts": [
            {
                "names": names.of(cut),
                "count": cut.total,
                "shape": f"{cut.target.dtype} {list(cut.target.shape)}",
                "moves": [_move(move) for move in cut.moves[:_MOST_MOVES]],
                "moreMoves": max(0, len(cut.moves) - _MOST_MOVES) + cut.further_moves,
            }
            for cut in cuts
        ],
    }


class _Names:
    """Takes the names of tensors for a page as long as there is room; of each kind one is always taken."""

    def __init__(self) -> None:
        self._room = _MOST_NAMED

    def of(self, cut: TensorCut) -> list[str]:
        names: list[str] = []
        for name in cut.names:
            if names and self._room <= 0:
                break
            names.append(beginning(one_line(name), _MOST_NAME))
            self._room -= len(names[-1])
        return names


def _move(move: DrawnMove) -> list[Any]:
    made_up = move.source is None
    return [
        move.target,
        str(move.region),
        move.source,
        "" if made_up else str(move.source_region),
        one_line(move.tensor)[:_MOST_NAME],
        one_line(move.file),
        move.size_bytes,
    ]


def _json_of(value: object) -> str:
    """Return JSON that may stand in a script element: nothing in it can end that."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(style: str, script: str) -> str:
    """Return the policy of a page: it runs this script, has this style, and loads nothing."""
    script_digest, style_digest = _digest_of(script), _digest_of(style)
    return f"default-src 'none'; script-src '{script_digest}'; style-src '{style_digest}'; img-src data:"


def _digest_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_NORMS_PAGE, _NORMS_SCRIPT = (Path(__file__).with_name(f"norms.{ending}") for ending in ("html", "js"))
_NORMS_STYLES = [Path(__file__).with_name(f"{name}.css") for name in ("page", "norms")]
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
    of_tensor = grouped((mark.tensor, mark) for mark in marks)
    charts = _charts(norms, of_tensor)
    drawn = [chart._replace(points=_thinned(chart.points, of_tensor)) for chart in charts[:_MOST_CHARTS]]
    shown = [norm for chart in drawn for _, norm in chart.points]
    number_of = {norm.name: number for number, norm in enumerate(shown)}
    style, script = (
        "".join(each.read_text(encoding="utf-8") for each in _NORMS_STYLES),
        _NORMS_SCRIPT.read_text(encoding="utf-8"),
    )
    return Template(_NORMS_PAGE.read_text(encoding="utf-8")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        path=_text(path),
        summary=_text(summary),
        findings="".join(_row(mark, number_of) for mark in marks[:_MOST_ROWS]) or "<tr><td>nothing</td></tr>",
        left_out="".join(
            f"<p>{escape(text)}</p>" for text in _norms_left_out(charts, len(shown), len(norms), len(marks))
        ),
        charts="".join(_figure(chart, number_of, of_tensor) for chart in drawn),
        data=_json_of(
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
    by_kin = grouped((kin_of(norm.name), (number, norm)) for number, norm in enumerate(norms))
    charts = [_Chart(kin, points, sum(norm.name in marked for _, norm in points)) for kin, points in by_kin.items()]
    return sorted(charts, key=lambda chart: (not chart.marked, natural_key(chart.kin)))


def _thinned(points: list[tuple[int, TensorNorm]], marked: Mapping[str, object]) -> list[tuple[int, TensorNorm]]:
    """Return as many points as a chart has room for, the found ones among them."""
    step = -(-len(points) // _MOST_POINTS)
    found = [point for point in points if point[1].name in marked][:_MOST_POINTS]
    kept = {number for number, _ in (*points[::step], *found)}
    return [point for point in points if point[0] in kept]


def _norms_left_out(charts: Sequence[_Chart], shown: int, all_norms: int, marks: int) -> Iterator[str]:
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
    return beginning(one_line(text), _MOST_TEXT)
