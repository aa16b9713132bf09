"""The picture of who feeds whom: source shards down, targets across, the bytes between them as shade."""

from __future__ import annotations

from collections.abc import Iterator

from reshard_mpi.pictures.figures import Figures, Shards
from reshard_mpi.pictures.flow import Grid, Span, grid_of
from reshard_mpi.pictures.palette import EMPTY, FAINT, GRID, INK, amount_colour, on
from reshard_mpi.pictures.scene import Rectangle, Scene, Text, fitted, text_width, wrapped
from reshard_mpi.text import counted
from reshard_mpi.units import format_bytes

_LEFT, _TOP, _RIGHT, _SIDE = 110.0, 156.0, 96.0, 520.0
_MOST_CELL, _LEAST_WRITTEN = 72.0, 46.0
_LEGEND_STEPS = 64


def matrix_scene(figures: Figures) -> Scene:
    """Return the picture of who feeds whom."""
    flow, grid = figures.flow, grid_of(figures.flow)
    cell = min(_MOST_CELL, _SIDE / max(len(grid.rows), len(grid.columns)))
    width, height = cell * len(grid.columns), cell * len(grid.rows)
    total_width = max(_LEFT + width + _RIGHT, 640.0)
    notes = [line for note in _notes(figures) for line in wrapped(note, total_width - 48, 10.5, 4)]
    title = "Who feeds whom: what each target reads of each source shard"
    total = f"{counted(len(flow.planned), 'target')}, {format_bytes(flow.size_bytes)} read" + (
        " (a sample)" if flow.is_sample else ""
    )
    heading = [
        Text(24, 32, fitted(title, total_width - 48, 16), 16, bold=True),
        Text(24, 54, fitted(f"from {figures.source}", total_width - 48, 11.5), 11.5, title=figures.source),
        Text(24, 71, fitted(f"to {figures.target}", total_width - 48, 11.5), 11.5, title=figures.target),
        Text(24, 88, total, 11.5),
    ]
    end = _TOP + height
    items = [*heading, *_axes(grid, flow.sources, flow.targets, cell), *_cells(figures, grid, cell)]
    items += _legend(max(grid.cells.values(), default=0), end + 30)
    items += [Text(24, end + 84 + 15 * number, note, 10.5, colour=FAINT) for number, note in enumerate(notes)]
    return Scene(total_width, end + 92 + 15 * len(notes), f"{title}; {total}", tuple(items))


def _notes(figures: Figures) -> Iterator[str]:
    flow, grid = figures.flow, grid_of(figures.flow)
    if flow.is_sample:
        yield (
            f"A sample: {len(flow.planned)} of {flow.targets.total} targets have been planned, the same number in every"
            " column; bytes are of these alone, and a source that only others read is blank."
        )
    for side, spans, place in ((flow.sources, grid.rows, "row"), (flow.targets, grid.columns, "column")):
        size = spans[0].last - spans[0].first + 1
        if size > 1:
            yield f"Each {place} stands for {size} {side.word}s next to each other."
    blank = sum(
        all((row, column) not in grid.cells for column in range(len(grid.columns))) for row in range(len(grid.rows))
    )
    if blank and not flow.is_sample:
        yield f"{counted(blank, 'row')} without a shade: nothing is read of them, as others hold the same."


def _axes(grid: Grid, sources: Shards, targets: Shards, cell: float) -> Iterator[Text]:
    if cell >= 13:
        yield Text(_LEFT + cell * len(grid.columns) + 8, _TOP - 8, "in all", 10, colour=FAINT)
    yield Text(_LEFT, _TOP - 34, f"target {targets.word}", 12, bold=True)
    yield Text(30, _TOP + cell * len(grid.rows) / 2, f"source {sources.word}", 12, "middle", bold=True, turned=True)
    widest = max(text_width(str(span), 10) for span in grid.columns)
    are_turned = widest > cell - 4
    step = _label_step(grid.columns, cell if are_turned else max(cell, widest + 6), cell)
    for number, span in enumerate(grid.columns):
        if number % step == 0:
            x = _LEFT + (number + 0.5) * cell
            key, title = f"column {number}", targets.files.get(span.first, "") if span.first == span.last else ""
            if are_turned and step * cell < widest + 8:
                yield Text(x + 4, _TOP - 6, str(span.first), 10, "start", turned=True, title=title, key=key)
            else:
                yield Text(x, _TOP - 8, str(span), 10, "middle", title=title, key=key)
    step = _label_step(grid.rows, cell, cell)
    for number, span in enumerate(grid.rows):
        if number % step == 0:
            y = _TOP + (number + 0.5) * cell + 3.5
            title = sources.files.get(span.first, "") if span.first == span.last else ""
            yield Text(_LEFT - 8, y, str(span), 10, "end", title=title, key=f"row {number}")


def _label_step(spans: tuple[Span, ...], room: float, cell: float) -> int:
    """Return which spans are labelled, each one or every n-th."""
    step = 1
    while step * cell < max(13.0, room if room > cell else 0.0) and step < len(spans):
        step *= 2
    return step


def _cells(figures: Figures, grid: Grid, cell: float) -> Iterator[Rectangle | Text]:
    flow = figures.flow
    largest = max(grid.cells.values(), default=0)
    gap = 1.0 if cell > 12 else 0.25
    for row, source in enumerate(grid.rows):
        for column, target in enumerate(grid.columns):
            size_bytes = grid.cells.get((row, column), 0)
            fill = amount_colour(size_bytes / largest) if size_bytes else EMPTY
            x, y = _LEFT + column * cell, _TOP + row * cell
            said = format_bytes(size_bytes) if size_bytes else "nothing"
            title = f"source {flow.sources.word} {source} to target {flow.targets.word} {target}: {said}"
            yield Rectangle(
                x + gap / 2,
                y + gap / 2,
                cell - gap,
                cell - gap,
                fill,
                title=title,
                key=f"cell {row} {column}",
            )
            if size_bytes and cell >= _LEAST_WRITTEN:
                amount, unit = said.split(" ")
                middle, colour = x + cell / 2, on(fill)
                yield Text(middle, y + cell / 2 - 1, amount, 10.5, "middle", colour, key=f"cell {row} {column}")
                yield Text(middle, y + cell / 2 + 11, unit, 9, "middle", colour, key=f"cell {row} {column}")
    yield Rectangle(_LEFT, _TOP, cell * len(grid.columns), cell * len(grid.rows), None, GRID)
    for row in range(len(grid.rows)):
        read = sum(grid.cells.get((row, column), 0) for column in range(len(grid.columns)))
        y = _TOP + (row + 0.5) * cell + 3.5
        if cell >= 13:
            x = _LEFT + cell * len(grid.columns) + 8
            yield Text(x, y, format_bytes(read) if read else "-", 10, colour=FAINT, key=f"row {row}")


def _legend(largest: int, top: float) -> list[Rectangle | Text]:
    width = 200.0
    step = width / _LEGEND_STEPS
    shades = [
        Rectangle(_LEFT + number * step, top, step + 0.3, 10, amount_colour(number / (_LEGEND_STEPS - 1)))
        for number in range(_LEGEND_STEPS)
    ]
    return [
        *shades,
        Text(_LEFT, top + 24, "more than 0", 10),
        Text(_LEFT + width, top + 24, format_bytes(largest), 10, "end"),
        Text(_LEFT + width + 14, top + 9, "bytes from row to column", 10, colour=FAINT),
        Rectangle(_LEFT + width + 200, top, 14, 10, EMPTY, GRID),
        Text(_LEFT + width + 220, top + 9, "nothing", 10, colour=INK),
    ]
