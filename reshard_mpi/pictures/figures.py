"""Define and compute what pictures show: who feeds whom, how tensors are cut (`Figures`, `grid_of`, `cuts_of`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

from reshard_mpi.formats.locations import ByteRange, Constant, LibraryRead, StridedView
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.rank_plan import RankPlan, ReadGroup
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Shape
from reshard_mpi.text import number_ranges


class Feed(NamedTuple):
    """What one target takes from one source shard. size_bytes: read of the shard's files. tensors: that need them."""

    source: int
    target: int
    tensors: int
    size_bytes: int


class Shards(NamedTuple):
    """The shards of one side."""

    total: int  # how many there are
    word: str  # what a number of one counts, "rank" or "file"
    files: Mapping[int, str]  # paths by number, at least of the shards that are in a picture
    # names, short_names: what those are called that have no rank, their files' names, and the parts in which these
    # differ
    names: Mapping[int, str] = {}
    short_names: Mapping[int, str] = {}

    def called(self, numbers: Sequence[int]) -> str:
        """Return some shards by name, such as `rank 3`, `ranks 0, 4` or `model.safetensors`."""
        if self.names:
            return ", ".join(self.names.get(number, f"{self.word} {number}") for number in numbers)
        return f"{self.word}{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"

    def briefly(self, numbers: Sequence[int]) -> str:
        """Return the same in fewer letters: numbers of ranks, or what names of files differ in."""
        if self.names:
            return ", ".join(self.short_names.get(number, str(number)) for number in numbers)
        return number_ranges(numbers)

    def span(self, first: int, last: int) -> str:
        """Return the shards from `first` to `last` in words: `rank 3`, `ranks 4-7`, or names of files."""
        if first == last:
            return self.called([first])
        return f"{self.called([first])} to {self.called([last])}" if self.names else f"{self.word}s {first}-{last}"


class Flow(NamedTuple):
    """Who feeds whom. planned: the targets that feeds are known of, ascending; all of them, or a sample."""

    sources: Shards
    targets: Shards
    planned: tuple[int, ...]
    feeds: tuple[Feed, ...]

    @property
    def is_sample(self) -> bool:
        return len(self.planned) < self.targets.total

    @property
    def size_bytes(self) -> int:
        return sum(feed.size_bytes for feed in self.feeds)


class DrawnBlock(NamedTuple):
    """Neighbouring pieces of a tensor that are drawn as one rectangle."""

    box: Box  # of all of them
    piece: Box  # the box of the first
    pieces: int  # how many they are
    holders: tuple[int, ...]  # the first shards that hold the first piece, ascending; copies: how many hold it
    copies: int
    planned: int | None = None  # of a target, one that holds it and has been planned


class Panel(NamedTuple):
    """A tensor as one side cuts it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shown: tuple[int, ...]  # the dimensions that are drawn, at most two, ascending
    cuts: tuple[int, ...]  # into how many parts each dimension is cut
    blocks: tuple[DrawnBlock, ...]
    pieces: int  # how many there are in all


class DrawnMove(NamedTuple):
    """A region of a target's tensor and its source."""

    target: int
    region: Box  # in the target tensor
    source: int | None  # the source shard; None: it is made up
    panel: int | None  # the number of the source tensor in the picture; None: it is not in it
    source_region: Box  # in that tensor
    file: str
    size_bytes: int
    tensor: str = ""  # the source tensor's name, or ""


class TensorCut(NamedTuple):
    """How both sides cut tensors that are alike; the first of them is drawn."""

    names: tuple[str, ...]  # the first of them
    total: int  # how many they are
    size_bytes: int  # of all of them
    sources: tuple[Panel, ...]  # what the first is made of
    further: int  # how many more tensors it is made of
    target: Panel
    moves: tuple[DrawnMove, ...]  # what targets that have been planned take
    further_moves: int = 0  # how many more there are
    by: str = ""  # what says that it is made so: the place of an equation in a map, or ""


class Figures(NamedTuple):
    """All figures of one plan. source, target: what both sides are, in words. further: how many cuts are left out."""

    source: str
    target: str
    flow: Flow
    cuts: tuple[TensorCut, ...]
    further: int = 0
    further_tensors: int = 0


# A target is planned in some milliseconds, and in a second for each hundred thousand tensors. Planned at most: targets,
# tensors of all of them together, and targets however many tensors they have.
MOST_PLANNED, _MOST_TENSORS, _LEAST_PLANNED = 128, 1_500_000, 8
# As many rows and columns can still be told apart.
MOST_SPANS = 64
# The fraction of a group at which one of it is taken goes round by the golden section, so that the samples of all
# groups together meet every coordinate of a mesh, whose axes are most often powers of two.
_GOLDEN = 0.6180339887498949


class ShardSpan(NamedTuple):
    """Shards that share a row or a column: those from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Grid(NamedTuple):
    """A flow in rows (sources) and columns (targets). cells: bytes by number of row and of column, if there are any."""

    rows: tuple[ShardSpan, ...]
    columns: tuple[ShardSpan, ...]
    cells: Mapping[tuple[int, int], int]


def most_planned(tensors: int) -> int:
    """Return the maximum number of targets planned for a picture of a checkpoint with this number of tensors."""
    return min(MOST_PLANNED, max(_LEAST_PLANNED, _MOST_TENSORS // max(tensors, 1)))


def sampled_targets(targets: int, most: int) -> tuple[int, ...]:
    """Return the targets to plan for a picture: all if there are no more than `most`, else a sample, spread evenly.

    There is the same number of each column, if there can be one of each.
    """
    if targets <= most:
        return tuple(range(targets))
    spans = _even_spans(targets, min(most, MOST_SPANS))
    each = most // len(spans)
    chosen = set[int]()
    for number, (first, last) in enumerate(spans):
        size = last - first + 1
        for sample in range(min(each, size)):
            fraction = (number * _GOLDEN + sample / each) % 1
            chosen.add(first + int(fraction * size))
    return tuple(sorted(chosen))


def feeds_of(plan: RankPlan, number_of: Callable[[int, str], int]) -> Iterator[Feed]:
    """Yield the bytes that the target of `plan` takes from each source shard.

    Args:
        number_of: returns the number of the shard of a source rank that is the file of this path.
    """
    tensors: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for group in plan.tensors.groups:
        in_group = defaultdict[int, set[int]](set)
        for route in group.routes:
            for path, places in _places_by_file(route).items():
                number = number_of(route.source_rank, path)
                in_group[number].update(places)
                numbers = [route.numbers[place] for place in places]
                sizes[number] += route.region.size * route.tensors.element_bytes(numbers)
        tensors.update({number: len(places) for number, places in in_group.items()})
    return (Feed(number, plan.target_rank, tensors[number], sizes[number]) for number in sorted(sizes))


def grid_of(flow: Flow) -> Grid:
    """Return a flow in at most MOST_SPANS rows and columns, each of one shard where there are no more."""
    rows = _even_spans(flow.sources.total)
    few = flow.is_sample and len(flow.planned) <= MOST_SPANS
    columns = tuple(ShardSpan(rank, rank) for rank in flow.planned) if few else _even_spans(flow.targets.total)
    column_of = {rank: number for number, rank in enumerate(flow.planned)} if few else None
    height, width = rows[0].last + 1, columns[0].last + 1
    cells: Counter[tuple[int, int]] = Counter()
    for feed in flow.feeds:
        column = column_of[feed.target] if column_of is not None else feed.target // width
        cells[feed.source // height, column] += feed.size_bytes
    return Grid(rows, columns, cells)


def path_of(entry: TensorEntry) -> str:
    """Return the path of the file that a tensor is in; of several the first. Empty for one that is in no file."""
    place = entry.unconverted.source
    if isinstance(place, LibraryRead | StridedView):
        return place.path
    if isinstance(place, Constant):
        return ""
    ranges: Sequence[ByteRange] = entry.unconverted.stored.ranges if entry.unconverted.stored is not None else ()
    return ranges[0].path if ranges else ""


def _places_by_file(route: ReadGroup) -> dict[str, Sequence[int]]:
    """Return the places of a route's tensors by the file that they are in; those in no file are left out."""
    tensors = route.tensors
    if not tensors.locations:
        return {tensors.path: range(len(route.numbers))} if tensors.path else {}
    by_file = defaultdict[str, list[int]](list)
    for place, number in enumerate(route.numbers):
        path = path_of(route.item(place, "").source) if number in tensors.locations else tensors.path
        if path:
            by_file[path].append(place)
    return dict(by_file)


def _even_spans(count: int, most: int = MOST_SPANS) -> tuple[ShardSpan, ...]:
    size = -(-count // most)
    return tuple(ShardSpan(first, min(first + size, count) - 1) for first in range(0, count, size))


# The most blocks that a dimension is divided into, by the number of drawn dimensions that are cut.
_MOST_BLOCKS = {0: 1, 1: 64, 2: 16}
# Shards named of all that hold a piece.
_MOST_HOLDERS = 8
# Pieces of a list that are drawn.
MOST_LISTED = 512


def shown_dimensions(shape: Shape, *all_cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a tensor that are drawn, at most two, ascending.

    Those that any side cuts into the most parts come first, then the longest, then the last.

    Args:
        all_cuts: for each side, into how many parts it cuts each dimension.
    """
    cuts = [max((cuts[dim] for cuts in all_cuts), default=1) for dim in range(len(shape))]
    ranked = sorted(range(len(shape)), key=lambda dim: (cuts[dim], shape[dim], dim), reverse=True)
    return tuple(sorted(ranked[:2]))


def cuts_of(layout: Layout) -> tuple[int, ...]:
    """Return into how many parts a layout cuts each dimension."""
    return tuple(layout.placement.cuts(dim) for dim in range(len(layout.shape)))


def cuts_of_boxes(shape: Shape, boxes: Iterable[Box]) -> tuple[int, ...]:
    """Return into how many parts boxes cut each dimension."""
    starts: list[set[int]] = [set() for _ in shape]
    for box in boxes:
        for dim, start in enumerate(box.start):
            starts[dim].add(start)
    return tuple(max(1, len(distinct)) for distinct in starts)


def panel_of_layout(name: str, dtype: str, layout: Layout, shown: tuple[int, ...]) -> Panel:
    """Return a tensor as a layout cuts it, in blocks where its pieces are too many."""
    cuts = cuts_of(layout)
    cut_dims = sum(cuts[dim] > 1 for dim in shown)
    steps = [-(-count // _MOST_BLOCKS[cut_dims]) for count in cuts]
    ranges = [range(0, cuts[dim], steps[dim]) if dim in shown else range(1) for dim in range(len(cuts))]
    blocks = []
    for first in product(*ranges):
        last = tuple(
            min(index + steps[dim], cuts[dim]) - 1 if dim in shown else index for dim, index in enumerate(first)
        )
        piece = _piece(layout, first)
        low, high = layout.piece_box(piece), layout.piece_box(_piece(layout, last))
        holders = tuple(sorted(islice(layout.placement.holders(piece), _MOST_HOLDERS)))
        count = math.prod(end - index + 1 for index, end in zip(first, last))
        blocks.append(DrawnBlock(Box(low.start, high.stop), low, count, holders, layout.placement.replicas))
    return Panel(name, dtype, layout.shape, shown, cuts, tuple(blocks), math.prod(cuts))


def panel_of_pieces(
    name: str, dtype: str, shape: Shape, held: Mapping[Box, Sequence[int]], shown: tuple[int, ...] | None = None
) -> Panel:
    """Return a tensor whose pieces are known one by one. held: the shards that hold each."""
    cuts = cuts_of_boxes(shape, held)
    shown = shown_dimensions(shape, cuts) if shown is None else shown
    boxes = sorted((box for box in held if is_at_front(box, shown)), key=lambda box: box.start)
    step = 1
    if sum(count > 1 for count in cuts) == 1:  # then neighbours in this order are neighbours in the tensor
        step = -(-len(boxes) // _MOST_BLOCKS[1])
    blocks = []
    for place in range(0, min(len(boxes), step * MOST_LISTED), step):
        together = boxes[place : place + step]
        first, holders = together[0], sorted(held[together[0]])
        box = Box(first.start, tuple(map(max, *(box.stop for box in together)))) if step > 1 else first
        blocks.append(DrawnBlock(box, first, len(together), tuple(holders[:_MOST_HOLDERS]), len(holders)))
    return Panel(name, dtype, shape, shown, cuts, tuple(blocks), len(held))


def is_at_front(box: Box, shown: tuple[int, ...]) -> bool:
    """Tell whether a box is in the plane that is drawn: index 0 of every dimension that is not."""
    return all(start == 0 for dim, start in enumerate(box.start) if dim not in shown)


def _piece(layout: Layout, index: Sequence[int]) -> Piece:
    """Return the piece with number `index[dim]` along every dimension; optimizer cuts count as well."""
    placement = layout.placement
    if not index:
        return Piece((), 0)
    whole, part = divmod(index[0], placement.optimizer)
    slices = (whole, *index[1:])
    return Piece(slices[: len(placement.split)], part)
