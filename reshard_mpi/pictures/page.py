"""The page of a plan: its pictures and what they are made of in one HTML file, which needs no network.

Names may hold anything. They get into the page in three ways, each with its own escape: as text of the template and of
SVG (`html.escape`), and as JSON in which no character has a meaning in HTML. The page's own policy lets no script run
but its own, told by its digest, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from reshard_mpi.pictures.figures import Cut, Figures, Move
from reshard_mpi.pictures.flow import grid_of
from reshard_mpi.pictures.matrix import matrix_scene
from reshard_mpi.pictures.svg import svg_of
from reshard_mpi.pictures.tensor import cut_scene
from reshard_mpi.text import counted, one_line
from reshard_mpi.units import format_bytes

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
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:",
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
        data=_json(_data(figures, cuts)),
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
    """Yield what is not in the page."""
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


def _data(figures: Figures, cuts: Sequence[Cut]) -> dict[str, Any]:
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

    def of(self, cut: Cut) -> list[str]:
        names: list[str] = []
        for name in cut.names:
            if names and self._room <= 0:
                break
            shown = one_line(name)
            names.append(shown if len(shown) <= _MOST_NAME else f"{shown[:_MOST_NAME]}...")
            self._room -= len(names[-1])
        return names


def _move(move: Move) -> list[Any]:
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


def _json(value: object) -> str:
    """Return JSON that may stand in a script element: nothing in it can end that."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
