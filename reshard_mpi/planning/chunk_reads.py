"""Plan reads from checkpoints whose index lists chunks (`ChunkReads`)."""

from __future__ import annotations

import glob
import shlex
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from reshard_mpi.errors import CoverageError, ReshardError
from reshard_mpi.formats.locations import ByteRanges, paths_of
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.formats.tensor_table import ChunkedTensors, ChunkList, TensorTable
from reshard_mpi.planning.made_tensors import MappedTensors
from reshard_mpi.planning.rank_choice import Replicas, home_rank
from reshard_mpi.planning.rank_plan import Check, Group, PlannedTensors, ReadGroup, ReadItem, TensorPlan
from reshard_mpi.planning.source_flaws import errors_text
from reshard_mpi.sharding.box import Box, CoveredPart, Pieces, UncoveredError, overlapping
from reshard_mpi.text import counted

# Unless all overlaps are compared: pairs of chunks of a list; overlaps of tensors of one kind, and places in each file;
# and elements at each place.
_MAX_PAIRS, _MAX_SAMPLED, _SAMPLED_ELEMENTS = 64, 4, 4096
_TWICE = "the checkpoint lists the same part of it twice"


class ChunkReads:
    """Plans the reads of one target from chunks, or from the tensors that a map makes.

    Attributes:
        target_rank, targets: the rank, and how many ranks there are. Of several files that hold the same, the target
            prefers the first one from its own place on among the files, so that targets read different files.
        allows_holes: tensors without all their chunks do not refuse the plan, but are named in `holes`, each with the
            reason.
    """

    def __init__(self, target_rank: int, targets: int, *, allows_holes: bool = False) -> None:
        self._target_rank = target_rank
        self._targets = targets
        self._allows_holes = allows_holes
        self.holes: dict[str, ReshardError] = {}
        self._known: dict[int, tuple[ChunkList, list[int], Pieces]] = {}
        self._overlapping: dict[tuple[int, Box, int | None], list[tuple[int, int, Box]]] = {}
        self._places: dict[int, dict[int, int]] = {}

    def planned(self, tensors: PlannedTensors) -> PlannedTensors:
        """Return the same tensors with every route from a list of chunks replaced by routes from the chunks themselves.

        Those from tensors that a map makes are replaced by routes from what they are made of. Raises CoverageError for
        a part that no chunk has, and for a tensor that cannot be read, unless there may be holes.
        """
        route_of: dict[tuple[int, ...], int] = {}
        names: list[list[str]] = []
        places: list[list[int]] = []
        group_of = array("I")
        for number, place in zip(tensors.group_of, tensors.place_in_group):
            group = tensors.groups[number]
            key = (number, *(_list_of(route, place) for route in group.routes))
            new = route_of.setdefault(key, len(route_of))
            if new == len(names):
                names.append([])
                places.append([])
            names[new].append(group.names[place])
            places[new].append(place)
            group_of.append(new)
        groups = []
        for (number, *_), own_names, own_places in zip(route_of, names, places):
            group = tensors.groups[number]
            try:
                routes = [
                    route_of for route in group.routes for route_of in self._routes(route, own_names[0], own_places)
                ]
            except CoverageError as error:
                if not self._allows_holes:
                    raise
                routes = []
                self.holes.update(dict.fromkeys(own_names, error))
            groups.append(Group(group.kind, own_names, tuple(routes)))
        return PlannedTensors(groups, group_of)

    def reads(self, item: ReadItem, tensors: TensorTable) -> tuple[ReadItem, ...]:
        """Return the read items from single chunks that replace one read item from a list of chunks."""
        name, number = item.source.name, tensors.index_by_name[item.source.name]
        route = ReadGroup(item.source_rank, item.source_box, item.region, tensors, (number,), item.to, item.order)
        return tuple(own.item(0, name) for own in self._routes(route, name, [0]))

    def _routes(self, route: ReadGroup, name: str, places: Sequence[int]) -> Iterator[ReadGroup]:
        """Yield the routes from single chunks that replace one route.

        Args:
            places: of the tensors in the route, all with the same list of chunks.
            name: of the first of them, for errors.
        """
        tensors = route.tensors
        if isinstance(tensors, MappedTensors):
            yield from tensors.routes(route, places)
            return
        if not isinstance(tensors, ChunkedTensors):
            yield route._replace(numbers=array("I", (route.numbers[place] for place in places)))
            return
        if name in tensors.unreadable:
            raise _unreadable(name, tensors)
        numbers = [route.numbers[place] for place in places]
        chunks = tensors.chunk_lists[tensors.chunk_list_ids[numbers[0]]]
        order, taken = self._taken(tensors, tensors.chunk_list_ids[numbers[0]], route.region, name)
        for place, region in taken:
            box, file = chunks[order[place]]
            in_file = array("I", (tensors.numbers[number][order[place]] for number in numbers))
            to = None if route.to is None else route.move.target_of(region)
            yield ReadGroup(route.source_rank, box, region, file, in_file, to, route.order)

    def _taken(
        self, tensors: ChunkedTensors, list_number: int, region: Box, name: str
    ) -> tuple[list[int], list[CoveredPart]]:
        """Return the chunk numbers of a list by preference, and the boxes taken from each, by place in that order.

        Raises CoverageError if the chunks do not make up the region.
        """
        chunks = tensors.chunk_lists[list_number]
        cached = self._known.get(id(chunks))
        if cached is None:
            if id(tensors) not in self._places:
                self._places[id(tensors)] = {id(file): number for number, file in enumerate(tensors.files)}
            places = self._places[id(tensors)]
            home = home_rank(self._target_rank, self._targets, len(places))
            order = sorted(range(len(chunks)), key=lambda chunk: (places[id(chunks[chunk][1])] - home) % len(places))
            cached = self._known[id(chunks)] = chunks, order, Pieces([chunks[chunk][0] for chunk in order])
        try:
            return cached[1], cached[2].cover(region)
        except UncoveredError as error:
            missing = errors_text(tensors.missing)
            raise CoverageError(
                f"no chunk of {name!r} that the checkpoint lists has a part that target rank {self._target_rank} needs",
                expected=f"box {error.box}",
                got=missing or f"{len(chunks)} chunks without it",
                where=tensors.path,
                remedy="restore the files of the checkpoint" if missing else "save or copy the checkpoint again",
            ) from None

    def checks(self, groups: Sequence[Group], replicas: Replicas) -> Iterator[Check]:
        """Yield the checks that overlapping chunks hold the same where they overlap.

        With CHECK all overlaps are compared whole; with SAMPLE a few of tensors of each kind, and in each file; with
        ANY none.
        """
        if replicas is Replicas.ANY:
            return
        limit = None if replicas is Replicas.CHECK else _MAX_PAIRS
        sampled = Counter[str]()
        for group in groups:
            for route in group.routes:
                overlaps = self._overlaps(group, route, limit) if isinstance(route.tensors, ChunkedTensors) else ()
                for number, overlap in enumerate(overlaps):
                    is_first = number < _MAX_SAMPLED
                    yield from (overlap,) if limit is None else _sampled(overlap, sampled, is_first=is_first)

    def _overlaps(self, group: Group, route: ReadGroup, limit: int | None) -> Iterator[Check]:
        """Yield the checks of whole overlaps, up to a limit for each list of chunks."""
        tensors = route.tensors
        assert isinstance(tensors, ChunkedTensors)
        for place, name in enumerate(group.names):
            number = route.numbers[place]
            chunks = tensors.chunk_lists[tensors.chunk_list_ids[number]]
            key = (id(chunks), route.region, limit)
            if key not in self._overlapping:
                found = overlapping([box for box, _ in chunks], route.region)
                self._overlapping[key] = list(islice(found, limit))
            for first, second, region in self._overlapping[key]:
                reads = (self._chunk(tensors, number, chunk, name, region) for chunk in (first, second))
                yield Check(name, tuple(reads), refuse=True, why=_TWICE)

    def _chunk(self, tensors: ChunkedTensors, number: int, chunk: int, name: str, region: Box) -> ReadItem:
        box, file = tensors.chunk_lists[tensors.chunk_list_ids[number]][chunk]
        return ReadGroup(0, box, region, file, (tensors.numbers[number][chunk],)).item(0, name)


def _sampled(overlap: Check, sampled: Counter[str], *, is_first: bool) -> Iterator[Check]:
    """Yield the checks of places in an overlap, one where each range of bytes begins, until a file has enough of them.

    Args:
        sampled: how many each file has, by its path; they are counted on.
        is_first: whether it is one of the first of its kind, whose beginning is compared in any case.
    """
    paths_at: dict[int, set[str]] = {}
    for read in overlap.reads:
        for start, path in _beginnings(read):
            paths_at.setdefault(start, set()).add(path)
    for number, (start, paths) in enumerate(sorted(paths_at.items())):
        if (is_first and number == 0) or any(sampled[path] < _MAX_SAMPLED for path in paths):
            sampled.update(paths)
            block = next(overlap.reads[0].region.blocks(_SAMPLED_ELEMENTS, start))
            yield overlap._replace(reads=tuple(read._replace(region=block) for read in overlap.reads))


def _beginnings(read: ReadItem) -> Iterator[tuple[int, str]]:
    """Yield the element of a region at which each range of bytes begins, with the path of its file.

    Where the region is only a part of what the ranges hold, as many places are spread over it.
    """
    entry = read.source.unconverted
    place, itemsize_bytes, size = entry.source, entry.dtype.itemsize_bytes, read.region.size
    if not isinstance(place, ByteRanges):
        yield from ((0, path) for path in paths_of(place) if size)
        return
    is_whole = read.region == read.source_box
    start_bytes = 0
    for number, run in enumerate(place.ranges):
        start = start_bytes // itemsize_bytes if is_whole else size * number // len(place.ranges)
        if run.length_bytes and start < size:
            yield start, run.path
        start_bytes += run.length_bytes


def _unreadable(name: str, tensors: ChunkedTensors) -> CoverageError:
    others = len(tensors.unreadable) - 1
    besides = f"; and {counted(others, 'other tensor')} cannot be read either" if others else ""
    pattern = shlex.quote(_pattern_of_all(name, tensors))
    return CoverageError(
        f"the tensor {name!r} of the checkpoint cannot be read",
        expected="a dense tensor of a type and form that this program knows",
        got=f"{tensors.unreadable[name]}{besides}",
        where=tensors.path,
        remedy=f"go on without it (--exclude {pattern}), or save it in another form",
    )


def _pattern_of_all(name: str, tensors: ChunkedTensors) -> str:
    """Return a pattern of all tensors that cannot be read; of `name` alone where others would match it too."""
    first, last = min(tensors.unreadable), max(tensors.unreadable)
    alike = next((index for index, (one, other) in enumerate(zip(first, last)) if one != other), len(first))
    prefix = first[: first.rfind(".", 0, alike) + 1]
    others = (other for other in tensors if other not in tensors.unreadable)
    if len(tensors.unreadable) == 1 or not prefix or any(other.startswith(prefix) for other in others):
        return glob.escape(name)
    return f"{glob.escape(prefix)}*"


def missing_files(tensors: TensorTable) -> Iterator[str]:
    """Yield a warning for each file of a list of chunks that cannot be used."""
    for missing in tensors.missing if isinstance(tensors, ChunkedTensors) else ():
        yield f"a file of the checkpoint cannot be used, what it holds was taken from others: {missing}"


def _list_of(route: ReadGroup, place: int) -> int:
    """Return a key: tensors with equal keys take their parts from the same places in the same way."""
    tensors = route.tensors
    if isinstance(tensors, MappedTensors):
        return tensors.recipe_numbers[route.numbers[place]]
    return tensors.chunk_list_ids[route.numbers[place]] if isinstance(tensors, ChunkedTensors) else 0


def held_tensor(spec: TensorSpec, shard: Manifest) -> TensorPlan:
    """Return a tensor as a shard that holds it gives it."""
    item = ReadItem(-1, shard.tensors[spec.name], spec.box, spec.box)
    chunked = shard.tensors if isinstance(shard.tensors, ChunkedTensors) else None
    return TensorPlan(spec, (item,) if chunked is None else ChunkReads(0, 1).reads(item, chunked))
