"""Lay out the picture of how both sides cut a tensor (`cut_scene`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.groups import grouped
from reshard_mpi.pictures.figures import DrawnBlock, DrawnMove, Figures, Flow, Panel, Shards, TensorCut, is_at_front
from reshard_mpi.pictures.scene import (
    EMPTY,
    FAINT,
    GRID,
    INK,
    PAPER,
    Area,
    Rectangle,
    Scene,
    TextLine,
    area_of,
    fitted,
    framed_label,
    label_beside,
    label_within,
    on,
    rank_colours,
    tensor_labels,
    text_width,
    wrapped,
)
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import counted, format_bytes, one_line, shortened

_WIDTH, _PANEL, _GAP, _LEFT = 1000.0, 360.0, 140.0, 92.0
# From one source tensor to the next.
_BETWEEN = 80.0
# A tensor much longer than wide is drawn less so.
_MOST_ASPECT = 2.6
_VECTOR_HEIGHT = 56.0
_MOST_DRAWN_MOVES = 600
_MOST_SWATCHES = 8


class _TensorFrame(NamedTuple):
    """Where a tensor is drawn, and its dimensions down and across; None: it has no such dimension."""

    x: float
    y: float
    width: float
    height: float
    shape: tuple[int, ...]
    down: int | None
    across: int | None

    def place(self, box: Box) -> tuple[float, float, float, float]:
        """Return where a box of the tensor is drawn: x, y, width and height."""
        x, width = self._along(self.across, box, self.x, self.width)
        y, height = self._along(self.down, box, self.y, self.height)
        return x, y, width, height

    def _along(self, dim: int | None, box: Box, start: float, length: float) -> tuple[float, float]:
        if dim is None or not self.shape[dim]:
            return start, length
        scale = length / self.shape[dim]
        return start + box.start[dim] * scale, (box.stop[dim] - box.start[dim]) * scale


class _Grounds:
    """The colours of a picture: one for what each source shard has of each source tensor."""

    def __init__(self, cut: TensorCut) -> None:
        self._sources = cut.sources
        blocks = [(number, block) for number, panel in enumerate(cut.sources) for block in panel.blocks]
        self._held = grouped(((number, holder), block) for number, block in blocks for holder in block.holders)
        self._first_blocks: dict[tuple[str, int], DrawnBlock] = {}
        for number, block in blocks:
            if block.holders:
                self._first_blocks.setdefault((cut.sources[number].name, block.holders[0]), block)
        in_order = sorted(cut.moves, key=lambda move: move.region.start)
        loose = [(move.tensor, move.source) for move in in_order if move.panel is None and move.source is not None]
        keys = list(dict.fromkeys((*self._first_blocks, *loose)))
        names = list(dict.fromkeys(name for name, _ in keys))
        keys.sort(key=lambda key: (names.index(key[0]), key[1]))
        self.colours = dict(zip(keys, rank_colours(range(len(keys))).values()))
        self.tensors = dict(zip(names, tensor_labels(names)))

    def of(self, move: DrawnMove) -> str:
        """Return the colour of a move: the colour of its source block."""
        if move.source is None:
            return EMPTY
        if move.panel is not None:
            name = self._sources[move.panel].name
            near = self._held.get((move.panel, move.source), ())
            for block in (*near, *self._sources[move.panel].blocks):
                if block.holders and block.box.contains(move.source_region):
                    return self.colours[name, block.holders[0]]
        return self.colours.get((move.tensor, move.source), EMPTY)

    def holders(self, key: tuple[str, int]) -> Sequence[int]:
        """Return the shards that hold what has a colour, as far as they are known."""
        return self._first_blocks[key].holders if key in self._first_blocks else (key[1],)


def cut_scene(cut: TensorCut, figures: Figures) -> Scene:
    """Return the picture of how both sides cut a tensor."""
    flow = figures.flow
    target = cut.target
    others = f"; {counted(cut.total - 1, 'more tensor')} alike" if cut.total > 1 else ""
    each = cut.size_bytes // cut.total
    about = f"{target.dtype} {list(target.shape)}, {format_bytes(each)}{others}"
    title = f"How both sides cut {target.name}"
    heading = [
        TextLine(24, 32, fitted(title, _WIDTH - 48, 16, bold=True), 16, bold=True, title=target.name),
        TextLine(24, 54, fitted(about, _WIDTH - 48, 11.5), 11.5),
        TextLine(24, 71, fitted(f"from {figures.source}", _WIDTH - 48, 11.5), 11.5, title=figures.source),
        TextLine(24, 88, fitted(f"to {figures.target}", _WIDTH - 48, 11.5), 11.5, title=figures.target),
    ]
    top = 150.0
    grounds = _Grounds(cut)
    right = _LEFT + _PANEL + _GAP
    sources, source_end = _sources(cut, flow.sources, grounds, top)
    frame = _frame(target, right, top, _PANEL)
    target_items = list(_target(cut, frame, flow.targets, flow.sources, grounds))
    captions = [TextLine(right, top - 38, "target", 12, bold=True)]
    captions += _caption(target, flow.targets, right, top - 22)
    end = max(source_end, frame.y + frame.height) + 30
    legend = list(_legend(grounds, flow.sources, end + 12))
    end += 44 if legend else 8
    notes = [line for note in _notes(cut, flow) for line in wrapped(note, _WIDTH - 48, 10.5, 3)]
    written = [TextLine(24, end + 15 * number, line, 10.5, colour=FAINT) for number, line in enumerate(notes)]
    items = (*heading, *captions, *sources, *target_items, *legend, *written)
    return Scene(_WIDTH, end + 15 * len(notes) + 12, f"{title}, {about}", items)


def _notes(cut: TensorCut, flow: Flow) -> Iterator[str]:
    if cut.by:
        yield f"Made of {shortened([panel.name for panel in cut.sources])} by {cut.by}."
    if cut.further:
        yield f"{counted(cut.further, 'more source tensor')} that it is made of are not drawn."
    panels = (*(("source", panel) for panel in cut.sources[:1]), ("target", cut.target))
    yield from dict.fromkeys(note for side, panel in panels for note in _dimension_notes(panel, side))
    if any(block.pieces > 1 for panel in (*cut.sources, cut.target) for block in panel.blocks):
        yield "Where pieces are too many to be drawn, neighbours are one rectangle, with name and colour of the first."
    drawn = sum(block.pieces for block in cut.target.blocks)
    if drawn < cut.target.pieces:
        yield f"{drawn} of the target's {cut.target.pieces} pieces are drawn."
    if any(block.planned is None and block.box.size for block in cut.target.blocks):
        yield "Grey in the target: " + (
            "not planned, as this is a sample." if flow.is_sample else "no target that was asked for."
        )
    if cut.moves and cut.target.blocks:
        first = cut.moves[0].target
        read = sorted({move.source for move in cut.moves if move.target == first and move.source is not None})[:3]
        reads = (
            f"; `{flow.targets.briefly([first])} < {flow.sources.briefly(read)}` is target"
            f" {flow.targets.called([first])}, which reads source {flow.sources.called(read)}"
        )
        colours = "Colours: the pieces of the source, and where they go. " if read else ""
        yield f"{colours}Black frames: what one target holds{reads if read else ''}."


def _dimension_notes(panel: Panel, side: str) -> Iterator[str]:
    ndim = len(panel.shape)
    if ndim > 2:
        down, across = panel.shown
        yield f"Of {ndim} dimensions two are drawn: {down} down, {across} across."
    for dim, count in enumerate(panel.cuts):
        if dim not in panel.shown and count > 1:
            yield f"The {side} cuts dimension {dim} too, into {count}: what is drawn is where its index is 0."


def _sources(cut: TensorCut, shards: Shards, grounds: _Grounds, top: float) -> tuple[list[Rectangle | TextLine], float]:
    """Return the drawings of the source tensors, one below the other, and where they end."""
    items: list[Rectangle | TextLine] = [TextLine(_LEFT, top - 38, "source", 12, bold=True)]
    if not cut.sources:
        items.append(TextLine(_LEFT, top + 20, "made up: it is in no source tensor", 11))
        return items, top + 40
    room = (
        _PANEL if len(cut.sources) == 1 else max(96.0, (1.5 * _PANEL - _BETWEEN * len(cut.sources)) / len(cut.sources))
    )
    is_renamed = len(cut.sources) > 1 or cut.sources[0].name != cut.target.name
    y = top
    for number, panel in enumerate(cut.sources):
        if number:
            y += _BETWEEN
        if is_renamed:
            x = _LEFT if number else _LEFT + 52
            items.append(TextLine(x, y - 38, fitted(panel.name, _PANEL, 11), 11, title=panel.name))
        items += _caption(panel, shards, _LEFT, y - 22)
        frame = _frame(panel, _LEFT, y, room)
        items += _empty(frame, panel)
        for block in panel.blocks:
            if block.box.size and block.holders:
                items += _block(frame, block, shards, grounds.colours[panel.name, block.holders[0]], number)
        items += _ticks(frame, [block.box for block in panel.blocks])
        y += frame.height
    return items, y


def _caption(panel: Panel, shards: Shards, x: float, y: float) -> Iterator[TextLine]:
    copies = max((block.copies for block in panel.blocks), default=1)
    pieces = "whole" if panel.pieces == 1 else f"{panel.pieces} pieces"
    on_each = f"{'' if panel.pieces == 1 else 'each '}on {counted(copies, shards.word)}"
    if pieces == "whole" and copies == 1 and shards.names and panel.blocks:
        on_each = f"in {_holders(panel.blocks[0], shards)}"
    shape = f"{panel.dtype} {list(panel.shape)}: "
    room = min(_PANEL + 60, _WIDTH - 24 - x)
    yield TextLine(x, y, fitted(f"{shape}{pieces}, {on_each}", room, 10.5), 10.5, colour=FAINT)


def _frame(panel: Panel, x: float, y: float, room: float) -> _TensorFrame:
    if len(panel.shown) < 2:
        across = panel.shown[0] if panel.shown else None
        width = _PANEL if panel.shown else _VECTOR_HEIGHT
        return _TensorFrame(x, y, width, _VECTOR_HEIGHT, panel.shape, None, across)
    down, across = panel.shown
    ratio = max(panel.shape[down], 1) / max(panel.shape[across], 1)
    ratio = min(max(ratio, 1 / _MOST_ASPECT), _MOST_ASPECT)
    width = min(_PANEL, room / ratio)
    return _TensorFrame(x, y, width, width * ratio, panel.shape, down, across)


def _empty(frame: _TensorFrame, panel: Panel) -> Iterator[Rectangle | TextLine]:
    yield Rectangle(frame.x, frame.y, frame.width, frame.height, EMPTY, GRID)
    if not Box.whole(panel.shape).size:
        yield TextLine(frame.x + 8, frame.y + min(frame.height / 2 + 4, 30), "no elements", 11)


def _block(
    frame: _TensorFrame, block: DrawnBlock, shards: Shards, fill: str, number: int
) -> Iterator[Rectangle | TextLine]:
    x, y, width, height = frame.place(block.box)
    title = f"source {_holders(block, shards)}: {_pieces(block)}"
    yield Rectangle(x, y, width, height, fill, PAPER, _line(width, height), title=title, key=f"source {number}")
    yield from label_within([*_names(block, shards)], Area(x, y, width, height), on(fill), title)


def _target(
    cut: TensorCut, frame: _TensorFrame, targets: Shards, sources: Shards, grounds: _Grounds
) -> Iterator[Rectangle | TextLine]:
    yield from _empty(frame, cut.target)
    by_target = grouped((move.target, move) for move in cut.moves)
    frames: list[Rectangle | TextLine] = []
    drawn = 0
    for block in cut.target.blocks:
        if not block.box.size:
            continue
        all_moves = by_target.get(block.planned, []) if block.planned is not None else []
        moves = [move for move in all_moves if is_at_front(move.region, cut.target.shown)]
        if block.pieces > 1:
            moves = [move._replace(region=block.box) for move in moves[:1]]
        shown = moves[: max(1, _MOST_DRAWN_MOVES - drawn)]
        drawn += len(shown)
        for move in shown:
            yield from _move(frame, move, cut, sources, grounds, whole=len(moves) == 1)
        x, y, width, height = frame.place(block.box)
        title = f"target {_holders(block, targets)}: {_pieces(block)}"
        frames.append(Rectangle(x, y, width, height, None, INK, _line(width, height) + 0.5))
        ground = grounds.of(moves[0]) if len(moves) == 1 else None
        labels = list(_target_labels(block, all_moves, targets, sources))
        is_striped = block.pieces == 1 and len(grounds.tensors) > 1
        left = 8 + max(text_width(text, 9) for text in grounds.tensors.values()) if is_striped else 0.0
        left = left if left < width / 2 else 0.0  # else labels of stripes are where the other is not
        label = list(framed_label(labels, Area(x + left, y, width - left, height), ground, title))
        frames += label
        if is_striped:
            frames += _stripe_labels(frame, moves[: max(0, _MOST_DRAWN_MOVES - drawn)], grounds, label)
    yield from frames
    yield from _ticks(frame, [block.box for block in cut.target.blocks])


def _target_labels(block: DrawnBlock, moves: Sequence[DrawnMove], targets: Shards, sources: Shards) -> Iterator[str]:
    """Yield what may be written into a block of the target, the longest first."""
    names = list(_names(block, targets))
    if block.copies == block.pieces == 1:  # each of several targets reads sources of its own
        read = sorted({move.source for move in moves if move.source is not None})
        texts = dict.fromkeys((sources.called(read) if sources.names else "", sources.briefly(read)))
        yield from (f"{name} < {text}" for name in names for text in texts if read and text)
    yield from names


def _stripe_labels(
    frame: _TensorFrame, moves: Sequence[DrawnMove], grounds: _Grounds, label: Sequence[Rectangle | TextLine]
) -> Iterator[TextLine]:
    """Yield the names of the source tensors in the stripes of a block, where they meet neither its label nor others."""
    taken = [*map(area_of, label)]
    for move in moves:
        text, stripe = grounds.tensors.get(move.tensor), Area(*frame.place(move.region))
        if text:
            lines = list(label_beside(text, stripe, taken, on(grounds.of(move)), move.tensor))
            taken += map(area_of, lines)
            yield from lines


def _move(
    frame: _TensorFrame, move: DrawnMove, cut: TensorCut, sources: Shards, grounds: _Grounds, *, whole: bool
) -> Iterator[Rectangle | TextLine]:
    x, y, width, height = frame.place(move.region)
    fill = grounds.of(move)
    if move.source is None:
        title = f"target {move.target}: {move.region} is made up"
    else:
        of_name = f" of {move.tensor}" if move.tensor and len(cut.sources) > 1 else ""
        title = (
            f"target {move.target}: {move.region} from {sources.called([move.source])},"
            f" {move.source_region}{of_name}, {format_bytes(move.size_bytes)}"
        )
    stroke = None if whole else PAPER
    yield Rectangle(x, y, width, height, fill, stroke, _line(width, height) / 2, title=title, key="move")


def _holders(block: DrawnBlock, shards: Shards) -> str:
    """Return who holds the first piece of a block, as `rank 3` or `ranks 0, 4`."""
    return shards.called(block.holders) + (", ..." if block.copies > len(block.holders) else "")


def _names(block: DrawnBlock, shards: Shards) -> Iterator[str]:
    """Yield what may be written into a block, the longest first."""
    more = ", ..." if block.copies > len(block.holders) else ""
    yield shards.called(block.holders) + more
    yield shards.briefly(block.holders) + more
    if block.copies > 1:
        yield f"{shards.briefly(block.holders[:1])}, ..."
    yield shards.briefly(block.holders[:1])


def _pieces(block: DrawnBlock) -> str:
    return f"{block.pieces} pieces, of which the first is {block.piece}" if block.pieces > 1 else str(block.piece)


def _ticks(frame: _TensorFrame, boxes: Sequence[Box]) -> Iterator[TextLine]:
    """Yield the indices at which a tensor is cut, and what its dimensions are."""
    if frame.across is not None:
        for index, place in _spaced(
            frame.shape, frame.across, boxes, frame.width, lambda text: text_width(text, 9) + 6
        ):
            yield TextLine(frame.x + place, frame.y - 5, str(index), 9, "middle", FAINT)
        name = f"dimension {frame.across}"
        yield TextLine(frame.x + frame.width / 2, frame.y + frame.height + 15, name, 9.5, "middle", FAINT)
    if frame.down is not None:
        widest = 0.0
        for index, place in _spaced(frame.shape, frame.down, boxes, frame.height, lambda _: 11):
            yield TextLine(frame.x - 6, frame.y + place + 3, str(index), 9, "end", FAINT)
            widest = max(widest, text_width(str(index), 9))
        name = f"dimension {frame.down}"
        yield TextLine(
            frame.x - max(48, 14 + widest), frame.y + frame.height / 2, name, 9.5, "middle", FAINT, turned=True
        )


def _spaced(
    shape: tuple[int, ...], dim: int, boxes: Sequence[Box], length: float, room: Callable[[str], float]
) -> Iterator[tuple[int, float]]:
    """Yield the indices at which a dimension is cut, each with its place, if there is room for it.

    Args:
        length: of the dimension as it is drawn.
        room: returns how much of it the text of an index takes.
    """
    whole = max(shape[dim], 1)
    last, end = -room("0"), length * shape[dim] / whole
    for index in sorted({0, *(box.start[dim] for box in boxes), *(box.stop[dim] for box in boxes)} - {shape[dim]}):
        place = index * length / whole
        if place - last >= room(str(index)) and (not index or end - place >= room(str(shape[dim]))):
            yield index, place
            last = place
    if shape[dim]:
        yield shape[dim], end


def _legend(grounds: _Grounds, shards: Shards, y: float) -> Iterator[Rectangle | TextLine]:
    """Yield the legend of the colours."""
    keys = list(grounds.colours)
    if len(keys) < 2:
        return
    names = {name: [key for key in keys if key[0] == name] for name in grounds.tensors}
    begin = "source tensor" if len(names) > 1 else f"source {shards.word}"
    x = _LEFT + text_width(begin, 10) + 14
    if len(keys) <= _MOST_SWATCHES:
        yield TextLine(_LEFT, y + 10, begin, 10)
        room = (_WIDTH - 24 - x) / len(keys) - 31
        for key in keys:
            holders = grounds.holders(key)
            options = [shards.called(holders)] if shards.names else []
            options += [shards.briefly(holders), f"{shards.briefly(holders[:1])}, ..."]
            if len(names) > 1:
                of_key = [f"{grounds.tensors[key[0]]}: {option}" for option in options]
                options = of_key if len(names[key[0]]) > 1 else [one_line(key[0]), grounds.tensors[key[0]]]
            text = next((option for option in options if text_width(option, 10) <= room), None)
            text = fitted(options[-1], room, 10) if text is None else text
            yield Rectangle(x, y, 12, 12, grounds.colours[key])
            yield TextLine(x + 17, y + 10, text, 10, title=key[0])
            x += 31 + text_width(text, 10)
        return
    strips = names if 1 < len(names) <= _MOST_SWATCHES else {"": keys}
    room = (_WIDTH - 24 - x) / len(strips) - 31
    width = 220.0 if len(strips) == 1 else min(60.0, room / 2)
    if len(strips) > 1:
        yield TextLine(_LEFT, y + 10, begin, 10)
    else:
        x = _LEFT
        first, last = keys[0], keys[-1]
        begin = f"source {shards.span(first[1], last[1])}, in their order"
        if len(names) > 1:
            begin = f"source tensors {grounds.tensors[first[0]]} to {grounds.tensors[last[0]]}, in their order"
    for name, of_name in strips.items():
        step = width / len(of_name)
        for number, key in enumerate(of_name):
            yield Rectangle(x + number * step, y, step + 0.3, 12, grounds.colours[key])
        text = fitted(grounds.tensors[name], room - width, 10) if name else fitted(begin, _WIDTH - 48 - x - width, 10)
        yield TextLine(x + width + 8, y + 10, text, 10, title=name)
        x += width + text_width(text, 10) + 31


def _line(width: float, height: float) -> float:
    """Return how thick the line around a rectangle is: thin around a small one."""
    return 1.5 if min(width, height) > 14 else 0.75 if min(width, height) > 5 else 0.25
