"""Plan tensors that are made of others: by a map (`MappedTensors`), in other types (`converted`), or `dequantized`.

The checkpoint is planned as one full one, in its own names and shapes; a map says which boxes of that are which boxes
of what it makes. Both together say where each part of a target comes from. Of quantized weights it is the scheme that
says what a weight is made of, and which shapes its pieces state (`with_piece_shapes`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.errors import LayoutError, ReshardError
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS, DType
from reshard_mpi.formats.locations import ByteRanges, Constant, Converted, Dequantized, Location
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, ChunkedTensors, TensorEntry, TensorTable, TensorType
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, RankPlan, ReadGroup, TensorPlan
from reshard_mpi.sharding.box import Box, Pieces
from reshard_mpi.sharding.strides import Move

if TYPE_CHECKING:
    from reshard_mpi.mapping.box_pairs import Assembly
    from reshard_mpi.mapping.result import MapResult
    from reshard_mpi.quantization.weights import QuantizedWeight, StoredWeight


_NOWHERE = ByteRanges(())
# Of tensors with more routes than this the ones that are needed are looked up.
_FEW_ROUTES = 8


class _Recipe(NamedTuple):
    """What tensors have in common that are made in the same way, of tensors that lie in the same way."""

    dtype: DType
    assembly: Assembly
    groups: tuple[int, ...]  # for each pair, the number of the group that its source tensor is in
    element: bytes | None = None


class MappedTensors(TensorTable):
    """The whole tensors that a map makes.

    Attributes:
        recipe_numbers: for each tensor, the number of the way in which it is made.
    """

    in_pieces = True
    __slots__ = (
        *("_converted", "_groups", "_holes", "_number_of_recipe", "_pieces", "_places", "_rank", "_recipes"),
        "recipe_numbers",
    )

    def __init__(self, path: str, mapped: MapResult, plan: RankPlan) -> None:
        """Make the tensors of `mapped`.

        Args:
            plan: of all tensors of the checkpoint, whole, in its own names and shapes. What is made of its holes cannot
                be taken; what is in no shard is said to come from the first rank that is read.
        """
        super().__init__(path)
        place_of = plan.tensors.places
        self._groups: Sequence[Group] = plan.tensors.groups
        self._holes = {number: plan.holes[name] for name, (number, _) in place_of.items() if name in plan.holes}
        self._rank = min(plan.read_ranks, default=0)
        # By the id of a table and the type; the table is kept with its result, so that its id is not used again.
        self._converted: dict[tuple[int, DType], tuple[TensorTable, TensorTable]] = {}
        self._pieces: dict[int, Pieces] = {}
        self._recipes: list[_Recipe] = []
        self._number_of_recipe: dict[tuple[object, ...], int] = {}
        self._places: list[Sequence[int]] = []
        self.recipe_numbers = array("I")
        for tensor in mapped.made:
            located = [place_of[tensor.sources[pair.source]] for pair in tensor.assembly.pairs]
            groups = tuple(number for number, _ in located)
            recipe = _Recipe(tensor.dtype, tensor.assembly, groups)
            self._add(tensor.name, recipe, (id(tensor.assembly), tensor.dtype, groups), [place for _, place in located])
        for made_up in mapped.constants:
            dtype, shape = made_up.kind.dtype, made_up.kind.shape
            recipe = _Recipe(dtype, made_up.assembly, (), made_up.element)
            self._add(made_up.name, recipe, (dtype, shape, made_up.element), ())

    def _add(self, name: str, recipe: _Recipe, key: tuple[object, ...], places: Sequence[int]) -> None:
        number = self._number_of_recipe.setdefault(key, len(self._recipes))
        if number == len(self._recipes):
            self._recipes.append(recipe)
        self.locations[len(self.offsets)] = _NOWHERE
        self.add(name, self.kind(TensorType(recipe.dtype, recipe.assembly.shape)), NOT_CONTIGUOUS)
        self.recipe_numbers.append(number)
        self._places.append(places)

    def routes(self, route: ReadGroup, places: Sequence[int]) -> Iterator[ReadGroup]:
        """Yield the routes that replace one from these tensors.

        Args:
            places: of the tensors in the route, all with the same recipe.

        Raises the error for what cannot be made.
        """
        numbers = [route.numbers[place] for place in places]
        dtype, assembly, groups, element = self._recipes[self.recipe_numbers[numbers[0]]]
        sources = [self._places[number] for number in numbers]
        for index, (pair, group) in enumerate(zip(assembly.pairs, groups)):
            wanted = pair.to.intersect(route.region)
            if wanted is None:
                continue
            if group in self._holes:
                raise self._holes[group].with_traceback(None)
            region = pair.move.source_of(wanted)
            after = Move(region, wanted, pair.order)
            in_group = [own[index] for own in sources]
            for part in self._meeting(group, region):
                moved = part.move.then(after)
                if moved is not None:
                    tensors = part.tensors
                    if self._groups[group].kind.dtype != dtype:
                        tensors = self._in_type(tensors, dtype)
                    yield ReadGroup(
                        part.source_rank,
                        part.source_box,
                        moved.region,
                        tensors,
                        array("I", (part.numbers[place] for place in in_group)),
                        None if moved.to == moved.region and moved.order is None else moved.to,
                        moved.order,
                        part.joined_ranks,
                    )
        for zeros in assembly.zeros:
            wanted = zeros.intersect(route.region)
            if wanted is not None:
                content = bytes(dtype.itemsize_bytes) if element is None else element
                made_up = TensorTable("", [constant("", dtype, wanted.shape, content)])
                zero = Box.whole(wanted.shape)
                yield ReadGroup(self._rank, zero, zero, made_up, array("I", [0] * len(numbers)), wanted)

    def planned(self) -> tuple[PlannedTensors, Mapping[str, ReshardError]]:
        """Return where all of these tensors come from, each whole; and by name the errors for those with a hole."""
        names: list[list[str]] = [[] for _ in self._recipes]
        numbers = [array("I") for _ in self._recipes]
        for number, name in enumerate(self):
            names[self.recipe_numbers[number]].append(name)
            numbers[self.recipe_numbers[number]].append(number)
        groups, holes = [], {}
        for recipe, own_names, own_numbers in zip(self._recipes, names, numbers):
            whole = Box.whole(recipe.assembly.shape)
            try:
                routes = tuple(
                    self.routes(ReadGroup(self._rank, whole, whole, self, own_numbers), range(len(own_names)))
                )
            except ReshardError as error:
                holes.update(dict.fromkeys(own_names, error))
                routes = ()
            groups.append(Group(TensorType.of_box(recipe.dtype, whole, whole.shape), own_names, routes))
        return PlannedTensors(groups, self.recipe_numbers), holes

    def _meeting(self, group: int, region: Box) -> Iterable[ReadGroup]:
        """Return the routes of a group that may have something of a region."""
        routes = self._groups[group].routes
        if len(routes) <= _FEW_ROUTES:
            return routes
        if group not in self._pieces:
            self._pieces[group] = Pieces([part.region if part.to is None else part.to for part in routes])
        return (routes[number] for number in sorted(number for number, _ in self._pieces[group].meeting(region)))

    def _in_type(self, tensors: TensorTable, dtype: DType) -> TensorTable:
        """Return the same tensors as they are in another type; always the same object."""
        key = (id(tensors), dtype)
        if key not in self._converted:
            self._converted[key] = tensors, converted(tensors, dtype)
        return self._converted[key][1]


def converted(tensors: TensorTable, dtype: DType) -> TensorTable:
    """Return the same tensors, with other floating-point types converted to `dtype` on reading.

    Names, numbers and numbers of kinds stay what they are.

    Args:
        dtype: one of `dtypes.FLOATS`.

    Raises ValueError if it is another one.
    """
    if dtype not in FLOATS:
        raise ValueError(f"elements cannot be converted to {dtype}")
    return (
        _converted_chunks(tensors, dtype) if isinstance(tensors, ChunkedTensors) else _ConvertedTensors(tensors, dtype)
    )


def constant(name: str, dtype: DType, shape: tuple[int, ...], element: bytes) -> TensorEntry:
    """Return a tensor all of whose elements have these bytes, in this machine's byte order.

    Raises ValueError if they are not as many as an element of `dtype` has.
    """
    if len(element) != dtype.itemsize_bytes:
        raise ValueError(f"an element of {dtype} has {dtype.itemsize_bytes} bytes, got {len(element)}")
    return TensorEntry(name, dtype, shape, Constant(element))


class _ConvertedTensors(TensorTable):
    """The tensors of a shard in another type. Only kinds and scattered locations are kept twice."""

    __slots__ = ("_changed", "_dtype", "_unconverted")

    def __init__(self, unconverted: TensorTable, dtype: DType) -> None:
        super().__init__(unconverted.path)
        self._unconverted, self._dtype = unconverted, dtype
        self.index_by_name, self.kind_ids = unconverted.index_by_name, unconverted.kind_ids
        self.kinds = [_converted_kind(kind, dtype) for kind in unconverted.kinds]
        self._changed = [kind != before for kind, before in zip(self.kinds, unconverted.kinds)]
        self.offsets = array(
            "q",
            (
                NOT_CONTIGUOUS if self._changed[kind] else start
                for kind, start in zip(unconverted.kind_ids, unconverted.offsets)
            ),
        )
        self.locations = {number: self.source(number) for number in unconverted.locations}

    @property
    def unconverted(self) -> TensorTable:
        return self._unconverted

    def source(self, number: int) -> Location:
        place, kind = self._unconverted.source(number), self.kind_ids[number]
        return Converted(place, self._unconverted.kinds[kind].dtype) if self._changed[kind] else place

    def element_bytes(self, numbers: Sequence[int]) -> int:
        return self._unconverted.element_bytes(numbers)

    def at(self, path: str) -> TensorTable:
        return _ConvertedTensors(self._unconverted.at(path), self._dtype)

    @property
    def tables(self) -> tuple[TensorTable, ...]:
        return (self, *self._unconverted.tables)

    def _columns(self) -> tuple[object, ...]:
        return self._dtype, *self._unconverted._columns()


def _converted_chunks(tensors: ChunkedTensors, dtype: DType) -> ChunkedTensors:
    by_file = {id(file): converted(file, dtype) for file in tensors.files}
    view = ChunkedTensors(tensors.path)
    view.index_by_name, view.kind_ids, view.offsets = tensors.index_by_name, tensors.kind_ids, tensors.offsets
    view.locations, view.chunk_list_ids, view.numbers = tensors.locations, tensors.chunk_list_ids, tensors.numbers
    view.missing, view.unreadable = tensors.missing, tensors.unreadable
    view.kinds = [_converted_kind(kind, dtype) for kind in tensors.kinds]
    view.chunk_lists = [tuple((box, by_file[id(file)]) for box, file in pieces) for pieces in tensors.chunk_lists]
    return view


def _converted_kind(kind: TensorType, dtype: DType) -> TensorType:
    return kind._replace(dtype=dtype) if kind.dtype in FLOATS else kind


_FLOAT32 = BY_NAME["float32"]
# Companions that are of no use once a weight is dequantized.
_NOT_READ = ("shape", "carried")


def dequantized(plan: RankPlan, weights: Iterable[QuantizedWeight]) -> RankPlan:
    """Return the plan of a full checkpoint with weights in float32 in place of their stored tensors."""
    places = plan.tensors.places
    table = TensorTable("")
    numbers: dict[tuple[int, ...], list[int]] = {}
    ranks: dict[tuple[int, ...], set[int]] = {}
    at: dict[str, str] = {}  # the weight that stands in the place of a stored tensor
    gone: set[str] = set()
    holes: dict[str, ReshardError] = dict(plan.holes)
    for weight in weights:
        stored: dict[str, TensorPlan] = {}
        names = [weight.stored, *(each.name for each in weight.companions if each.role not in _NOT_READ)]
        for name in names:
            group, place = places[name]
            stored[name] = plan.tensors.groups[group].tensor(place)
            if name in plan.holes:
                holes[weight.name] = plan.holes[name]
        number = len(table)
        table.add_entry(TensorEntry(weight.name, _FLOAT32, weight.shape, Dequantized(weight, stored)))
        numbers.setdefault(weight.shape, []).append(number)
        ranks.setdefault(weight.shape, set()).update(item.source_rank for own in stored.values() for item in own.reads)
        at[weight.stored] = weight.name
        gone.update(weight.names)
    names_of = list(table)
    groups = []
    for shape, own in numbers.items():
        whole, own_ranks = Box.whole(shape), tuple(sorted(ranks[shape]))
        is_hole = any(names_of[number] in holes for number in own)
        route = ReadGroup(min(own_ranks, default=0), whole, whole, table, array("I", own), joined_ranks=own_ranks)
        kind = TensorType.of_box(_FLOAT32, whole, shape)
        groups.append(Group(kind, [names_of[number] for number in own], () if is_hole else (route,)))
    order = [at.get(name, name) for name in plan.tensors.specs.names if name not in gone or name in at]
    return plan._replace(tensors=_replaced(plan.tensors, gone, groups, order), holes=holes)


def with_piece_shapes(plan: RankPlan, weights: Mapping[str, StoredWeight], *, is_global: bool) -> RankPlan:
    """Return the plan with each `weight_shape` tensor saying the shape of the target's own piece of its weight.

    Args:
        is_global: whether the target's files state the shapes of whole weights.

    Raises LayoutError for weights that are stacked, which have one tensor for all their shapes.
    """
    places = plan.tensors.places
    groups: dict[tuple[TensorType, tuple[int, ...]], list[str]] = {}
    for stored in weights.values():
        companion = stored.weight.companion("shape")
        if companion is None or companion.name not in places or stored.weight.stored not in places:
            continue
        kind = plan.tensors.groups[places[companion.name][0]].kind
        box = plan.tensors.groups[places[stored.weight.stored][0]].kind.own_box
        if kind.shape != (2,) or box.ndim != 2:
            if box != Box.whole(stored.shape):
                raise LayoutError(
                    f"{stored.weight.stored} is cut, and one tensor states the shapes of all its matrices",
                    expected="it whole, or cut along the axis of its matrices alone",
                    got=str(box),
                )
            continue
        shape = stored.weight.shape if is_global else _piece_shape(stored, box)
        groups.setdefault((kind, shape), []).append(companion.name)
    if not groups:
        return plan
    made = [
        Group(kind, names, tuple(_constants(kind.dtype, shape, len(names), min(plan.read_ranks, default=0))))
        for (kind, shape), names in groups.items()
    ]
    gone = {name for group in made for name in group.names}
    alike = (group._replace(names=tuple(name for name in group.names if name not in gone)) for group in plan.to_compare)
    return plan._replace(
        tensors=_replaced(plan.tensors, gone, made, plan.tensors.specs.names),
        to_compare=tuple(group for group in alike if group.names),
        unlisted=plan.unlisted if is_global else plan.unlisted | gone,
    )


def _piece_shape(stored: StoredWeight, box: Box) -> tuple[int, int]:
    """Return the shape of a piece of a weight whose rows are packed into words of 32 bits."""
    rows, columns = stored.weight.shape
    per_word = 32 / stored.weight.scheme.bits
    start, end = (min(columns, round(place * per_word)) for place in (box.start[1], box.stop[1]))
    return (rows if box.shape[0] == stored.shape[0] else box.shape[0]), end - start


def _constants(dtype: DType, values: tuple[int, ...], count: int, rank: int) -> Iterator[ReadGroup]:
    for place, value in enumerate(values):
        one = Box((0,), (1,))
        element = value.to_bytes(dtype.itemsize_bytes, "little", signed=True)
        table = TensorTable("", [constant("", dtype, (1,), element)])
        yield ReadGroup(rank, one, one, table, array("I", [0] * count), Box((place,), (place + 1,)))


def _replaced(tensors: PlannedTensors, gone: set[str], groups: Iterable[Group], order: Iterable[str]) -> PlannedTensors:
    """Return tensors without some, and with other groups, in the order that `order` gives."""
    kept = tensors.without(gone)
    every = [*kept.groups, *groups]
    number_of = {name: number for number, group in enumerate(every) for name in group.names}
    names = list(order)
    in_order: list[list[str]] = [[] for _ in every]
    for name in names:
        in_order[number_of[name]].append(name)
    placed = {name: place for group in every for place, name in enumerate(group.names)}
    sorted_groups = [
        group.part([placed[name] for name in own]) if list(group.names) != own else group
        for group, own in zip(every, in_order)
    ]
    return PlannedTensors(sorted_groups, array("I", map(number_of.__getitem__, names)))
