"""Render pictures as an HTML page or PNG (`page_of`, `png_of`).

Names may hold anything. They get into the page in three ways, each with its own escape: as text of the template and of
SVG (`html.escape`), and as JSON in which no character has a meaning in HTML. The page's own policy lets no script run
but its own, told by its digest, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from reshard_mpi.errors import UsageError
from reshard_mpi.pictures.figures import DrawnMove, Figures, TensorCut, grid_of
from reshard_mpi.pictures.matrix import matrix_scene
from reshard_mpi.pictures.scene import PAPER, Rectangle, Scene, TextLine, svg_of
from reshard_mpi.pictures.tensor_cuts import cut_scene
from reshard_mpi.text import counted, format_bytes, one_line

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
        policy=f"default-src 'none'; script-src '{digest_of(script)}'; style-src '{digest_of(style)}'; img-src data:",
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
        data=json_of(_data(figures, cuts)),
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
            shown = one_line(name)
            names.append(shown if len(shown) <= _MOST_NAME else f"{shown[:_MOST_NAME]}...")
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


def json_of(value: object) -> str:
    """Return JSON that may stand in a script element: nothing in it can end that."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def digest_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Points of a scene become inches of matplotlib's as 1/72, and inches this number of dots: sharp in print at that size.
_POINTS, _DOTS = 72, 200


def require_matplotlib() -> None:
    """Raise UsageError if matplotlib is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a picture in PNG is drawn by matplotlib, which cannot be imported",
            expected="matplotlib, as pip install 'reshard-mpi[plot]' brings it",
            got=str(error),
            remedy="install it, or ask for .svg or .html, which need nothing",
        ) from None


def png_of(scene: Scene) -> bytes:
    """Return a scene as a PNG file. Raises UsageError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    figure = Figure(figsize=(scene.width / _POINTS, scene.height / _POINTS), dpi=_DOTS, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    for order, item in enumerate(scene.items):
        if isinstance(item, Rectangle):
            _add_rectangle(axes, item, order)
        else:
            _add_text(axes, item, order)
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font has not
        figure.savefig(
            written, format="png", metadata={"Title": scene.title.encode("latin-1", "replace").decode("latin-1")}
        )
    return written.getvalue()


def _add_rectangle(axes: Any, item: Rectangle, order: int) -> None:
    from matplotlib.patches import Rectangle as Patch

    axes.add_patch(
        Patch(
            (item.x, item.y),
            item.width,
            item.height,
            facecolor=item.fill or "none",
            edgecolor=item.stroke or "none",
            linewidth=item.stroke_width if item.stroke else 0,
            joinstyle="miter",
            zorder=order,
        )
    )


def _add_text(axes: Any, item: TextLine, order: int) -> None:
    sides = {"start": "left", "middle": "center", "end": "right"}
    text = axes.text(
        item.x,
        item.y,
        item.text,
        fontsize=item.size,
        color=item.colour,
        fontweight="bold" if item.bold else "normal",
        horizontalalignment=sides[item.anchor],
        verticalalignment="baseline",
        rotation=90 if item.turned else 0,
        rotation_mode="anchor",
        zorder=order,
    )
    text.set_parse_math(False)  # a name with dollars is a name
