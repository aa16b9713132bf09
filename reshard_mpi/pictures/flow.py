"""Who feeds whom: what each target takes from each source shard, and that in groups where there are many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.formats.columns import TensorEntry
from reshard_mpi.formats.places import ByteRange, Constant, Decoded, Strided
from reshard_mpi.pictures.figures import Feed, Flow
from reshard_mpi.planning.model import RankPlan, Route

# A target is planned in some milliseconds, and in a second for each hundred thousand tensors. So many targets are
# planned at most, so many tensors of all of them together, and so many targets however many tensors they have.
MOST_PLANNED, _MOST_TENSORS, _LEAST_PLANNED = 128, 1_500_000, 8
# As many rows and columns can still be told apart.
MOST_SPANS = 64
# The fraction of a group at which one of it is taken goes round by the golden section, so that the samples of all
# groups together meet every coordinate of a mesh, whose axes are most often powers of two.
_GOLDEN = 0.6180339887498949


class Span(NamedTuple):
    """Shards that share a row or a column: those from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Grid(NamedTuple):
    """A flow in rows (sources) and columns (targets). cells: bytes by number of row and of column, if there are any."""

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    cells: Mapping[tuple[int, int], int]


def most_planned(tensors: int) -> int:
    """Return how many targets are planned at most for a picture of a checkpoint with so many tensors."""
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
    """Yield what the target of `plan` takes from each source shard.

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
    for number in sorted(sizes):
        yield Feed(number, plan.target_rank, tensors[number], sizes[number])


def grid_of(flow: Flow) -> Grid:
    """Return a flow in at most MOST_SPANS rows and columns, each of one shard where there are no more."""
    rows = _even_spans(flow.sources.total)
    few = flow.is_sample and len(flow.planned) <= MOST_SPANS
    columns = tuple(Span(rank, rank) for rank in flow.planned) if few else _even_spans(flow.targets.total)
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
    if isinstance(place, Decoded | Strided):
        return place.path
    if isinstance(place, Constant):
        return ""
    ranges: Sequence[ByteRange] = entry.unconverted.stored.ranges if entry.unconverted.stored is not None else ()
    return ranges[0].path if ranges else ""


def _places_by_file(route: Route) -> dict[str, Sequence[int]]:
    """Return the places of a route's tensors by the file that they are in; those in no file are left out."""
    tensors = route.tensors
    if not tensors.elsewhere:
        return {tensors.path: range(len(route.numbers))} if tensors.path else {}
    by_file = defaultdict[str, list[int]](list)
    for place, number in enumerate(route.numbers):
        path = path_of(route.copy(place, "").source) if number in tensors.elsewhere else tensors.path
        if path:
            by_file[path].append(place)
    return dict(by_file)


def _even_spans(count: int, most: int = MOST_SPANS) -> tuple[Span, ...]:
    size = -(-count // most)
    return tuple(Span(first, min(first + size, count) - 1) for first in range(0, count, size))
