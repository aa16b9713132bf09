"""Lay out the picture of who feeds whom (`matrix_scene`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi.pictures.figures import Figures, Grid, Shards, ShardSpan, grid_of
from reshard_mpi.pictures.scene import (
    EMPTY,
    FAINT,
    GRID,
    INK,
    Rectangle,
    Scene,
    TextLine,
    amount_colour,
    fitted,
    on,
    text_width,
    wrapped,
)
from reshard_mpi.text import counted, format_bytes

# The margins at the least, and how long a side of the matrix is at most.
_LEFT, _TOP, _RIGHT, _SIDE = 110.0, 156.0, 96.0, 520.0
# Names of files beside rows and above columns are no longer than this.
_MOST_ROW_LABEL, _MOST_COLUMN_LABEL = 220.0, 120.0
_MOST_CELL, _LEAST_WIDTH, _LEAST_HEIGHT = 72.0, 46.0, 28.0
# Numbers of rows and columns are so far apart.
_LEAST_APART = 13.0
# Cells are no more than this wider than high, or higher than wide.
_MOST_ASPECT = 2.2
_LEGEND_STEPS = 64


class _MatrixFrame(NamedTuple):
    """The place of the matrix, and the size of a cell. rows, columns: the labels beside them."""

    left: float
    top: float
    width: float
    height: float
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    are_turned: bool  # of columns


def matrix_scene(figures: Figures) -> Scene:
    """Return the picture of who feeds whom."""
    flow, grid = figures.flow, grid_of(figures.flow)
    cell = _frame(grid, flow.sources, flow.targets)
    width, height = cell.width * len(grid.columns), cell.height * len(grid.rows)
    total_width = max(cell.left + width + _RIGHT, 640.0)
    notes = [line for note in _notes(figures) for line in wrapped(note, total_width - 48, 10.5, 4)]
    title = "Who feeds whom: what targets read of source shards"
    total = f"{counted(len(flow.planned), 'target')}, {format_bytes(flow.size_bytes)} read" + (
        " (a sample)" if flow.is_sample else ""
    )
    heading = [
        TextLine(24, 32, fitted(title, total_width - 48, 16, bold=True), 16, bold=True),
        TextLine(24, 54, fitted(f"from {figures.source}", total_width - 48, 11.5), 11.5, title=figures.source),
        TextLine(24, 71, fitted(f"to {figures.target}", total_width - 48, 11.5), 11.5, title=figures.target),
        TextLine(24, 88, total, 11.5),
    ]
    end = cell.top + height
    items = [*heading, *_axes(grid, flow.sources, flow.targets, cell), *_cells(figures, grid, cell)]
    items += _legend(max(grid.cells.values(), default=0), end + 30)
    items += [TextLine(24, end + 84 + 15 * number, note, 10.5, colour=FAINT) for number, note in enumerate(notes)]
    return Scene(total_width, end + 92 + 15 * len(notes), f"{title}; {total}", tuple(items))


def _frame(grid: Grid, sources: Shards, targets: Shards) -> _MatrixFrame:
    width, height = min(_MOST_CELL, _SIDE / len(grid.columns)), min(_MOST_CELL, _SIDE / len(grid.rows))
    width, height = min(width, height * _MOST_ASPECT), min(height, width * _MOST_ASPECT)
    rows = _labels(grid.rows, sources, _MOST_ROW_LABEL)
    columns = _labels(grid.columns, targets, width - 4)
    are_turned = any(text_width(label, 10) > width - 4 for label in columns)
    if are_turned:
        columns = _labels(grid.columns, targets, _MOST_COLUMN_LABEL, are_turned=True)
    left = max(_LEFT, 60 + max(text_width(label, 10) for label in rows))
    top = max(_TOP, 118 + max(text_width(label, 10) for label in columns)) if are_turned else _TOP
    return _MatrixFrame(left, top, width, height, rows, columns, are_turned)


def _labels(spans: tuple[ShardSpan, ...], shards: Shards, room: float, *, are_turned: bool = False) -> tuple[str, ...]:
    """Return the labels of rows or columns: numbers of ranks, or names of files.

    Args:
        room: how long a name may be; where one is longer, only what names differ in.
    """
    if not shards.names:
        return tuple(str(span.first) if are_turned else str(span) for span in spans)
    long = [shards.called([span.first]) + ("" if span.first == span.last else " ...") for span in spans]
    if all(text_width(label, 10) <= room for label in long):
        return tuple(long)
    short = [shards.briefly([span.first]) + ("" if span.first == span.last else " ...") for span in spans]
    return tuple(fitted(label, max(room, 40.0), 10) for label in short)


def _notes(figures: Figures) -> Iterator[str]:
    flow, grid = figures.flow, grid_of(figures.flow)
    if flow.is_sample:
        yield (
            f"A sample: {len(flow.planned)} of {flow.targets.total} targets have been planned; bytes are of these"
            " alone, and a source that only others read is blank."
        )
    for side, spans, place in ((flow.sources, grid.rows, "row"), (flow.targets, grid.columns, "column")):
        size = spans[0].last - spans[0].first + 1
        if size > 1:
            named = ", and has the name of the first" if side.names else ""
            yield f"Each {place} stands for {size} {side.word}s next to each other{named}."
    blank = sum(
        all((row, column) not in grid.cells for column in range(len(grid.columns))) for row in range(len(grid.rows))
    )
    if blank and not flow.is_sample:
        yield f"{counted(blank, 'row')} without a shade: nothing is read of them, as others hold the same."


def _axes(grid: Grid, sources: Shards, targets: Shards, cell: _MatrixFrame) -> Iterator[Rectangle | TextLine]:
    """Yield the numbers of rows and columns, and for each a mark, also where there is no room for a number."""
    width, height = cell.width * len(grid.columns), cell.height * len(grid.rows)
    yield TextLine(26, cell.top + height / 2, f"source {sources.word}", 12, "middle", bold=True, turned=True)
    above = 30.0
    if cell.are_turned:
        above = max(50.0, 20 + max(text_width(label, 10) for label in cell.columns))
    yield TextLine(cell.left, cell.top - above, f"target {targets.word}", 12, bold=True)
    step = _label_step(cell.width)
    for number, span in enumerate(grid.columns):
        x, key, title = cell.left + number * cell.width, f"column {number}", _title(span, targets)
        yield Rectangle(x + 0.5, cell.top - 7, cell.width - 1, 5, GRID, title=title, key=key)
        if number % step == 0:
            middle = x + cell.width / 2
            if cell.are_turned:
                yield TextLine(middle + 3.5, cell.top - 11, cell.columns[number], 10, turned=True, title=title, key=key)
            else:
                yield TextLine(middle, cell.top - 11, cell.columns[number], 10, "middle", title=title, key=key)
    step = _label_step(cell.height)
    for number, span in enumerate(grid.rows):
        y, key, title = cell.top + number * cell.height, f"row {number}", _title(span, sources)
        yield Rectangle(cell.left - 7, y + 0.5, 5, cell.height - 1, GRID, title=title, key=key)
        if number % step == 0:
            yield TextLine(
                cell.left - 11, y + cell.height / 2 + 3.5, cell.rows[number], 10, "end", title=title, key=key
            )
    if _label_step(cell.height) == 1:
        yield TextLine(cell.left + width + 8, cell.top - 11, "in all", 10, colour=FAINT)
        for number in range(len(grid.rows)):
            read = sum(grid.cells.get((number, column), 0) for column in range(len(grid.columns)))
            y = cell.top + (number + 0.5) * cell.height + 3.5
            text = format_bytes(read) if read else "-"
            yield TextLine(cell.left + width + 8, y, text, 10, colour=FAINT, key=f"row {number}")


def _title(span: ShardSpan, shards: Shards) -> str:
    """Return the tooltip of a row or a column: its numbers, and the file of a single shard."""
    file = shards.files.get(span.first, "") if span.first == span.last else ""
    return shards.span(*span) + (f": {file}" if file else "")


def _label_step(length: float) -> int:
    """Return which rows or columns of this length are labelled: each one, or every n-th."""
    step = 1
    while step * length < _LEAST_APART:
        step *= 2
    return step


def _cells(figures: Figures, grid: Grid, cell: _MatrixFrame) -> Iterator[Rectangle | TextLine]:
    flow = figures.flow
    largest = max(grid.cells.values(), default=0)
    gap = 1.0 if min(cell.width, cell.height) > _LEAST_APART else 0.25
    for row, source in enumerate(grid.rows):
        for column, target in enumerate(grid.columns):
            size_bytes = grid.cells.get((row, column), 0)
            fill = amount_colour(size_bytes / largest) if size_bytes else EMPTY
            x, y = cell.left + column * cell.width, cell.top + row * cell.height
            said = format_bytes(size_bytes) if size_bytes else "nothing"
            title = f"source {flow.sources.span(*source)} to target {flow.targets.span(*target)}: {said}"
            key = f"cell {row} {column}"
            yield Rectangle(x + gap / 2, y + gap / 2, cell.width - gap, cell.height - gap, fill, title=title, key=key)
            if size_bytes and cell.width >= _LEAST_WIDTH and cell.height >= _LEAST_HEIGHT:
                amount, unit = said.split(" ")
                x, y, colour = x + cell.width / 2, y + cell.height / 2, on(fill)
                yield TextLine(x, y - 1, amount, 10.5, "middle", colour, key=key)
                yield TextLine(x, y + 11, unit, 9, "middle", colour, key=key)
    yield Rectangle(cell.left, cell.top, cell.width * len(grid.columns), cell.height * len(grid.rows), None, GRID)


def _legend(largest: int, top: float) -> list[Rectangle | TextLine]:
    width = 200.0
    step = width / _LEGEND_STEPS
    shades = [
        Rectangle(_LEFT + number * step, top, step + 0.3, 10, amount_colour(number / (_LEGEND_STEPS - 1)))
        for number in range(_LEGEND_STEPS)
    ]
    return [
        *shades,
        TextLine(_LEFT, top + 24, "more than 0", 10),
        TextLine(_LEFT + width, top + 24, format_bytes(largest), 10, "end"),
        TextLine(_LEFT + width + 14, top + 9, "bytes from row to column", 10, colour=FAINT),
        Rectangle(_LEFT + width + 200, top, 14, 10, EMPTY, GRID),
        TextLine(_LEFT + width + 220, top + 9, "nothing", 10, colour=INK),
    ]
