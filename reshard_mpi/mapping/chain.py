"""Apply maps one after another, each by `apply_rules` (`chained`), and compose them (`composed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.box_pairs import MAX_PAIRS, Assembly, BoxPair, TermTensor
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.follow_parameters import MadeParameter
from reshard_mpi.mapping.optimizers import settings_of_all
from reshard_mpi.mapping.result import Computed, ConstantTensor, DerivedTensor, MapResult, taken_of
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.mapping.selection import Selection, TargetTemplate
from reshard_mpi.mapping.tensor_kinds import parted_anywhere
from reshard_mpi.sharding.box import Pieces
from reshard_mpi.sharding.strides import Move
from reshard_mpi.text import shortened

# A tensor that is made of no other one.
MadeUp = ConstantTensor | Computed


class _Composed(NamedTuple):
    """How tensors are made of the first ones."""

    assembly: Assembly
    # for each source of the assembly, in order, the source of the last map and the source of the map before
    places: tuple[tuple[TermTensor, TermTensor], ...]


class Composition:
    """Tells, for tensors that several maps make in turn, from which first tensors they come.

    Tensors that are made alike get one assembly, so that they can be told by it.
    """

    def __init__(self) -> None:
        self._composed: dict[object, _Composed] = {}
        self._pieces: dict[int, Pieces] = {}
        self._kept: list[object] = []  # what identities are of
        self._boxes = 0

    def of(
        self, derived: Iterable[DerivedTensor], before: Mapping[str, MadeUp | DerivedTensor]
    ) -> Iterator[DerivedTensor]:
        """Yield tensors expressed by the sources of the tensors `before`; others have no sources.

        Raises MapError if they are made of too many boxes.
        """
        for tensor in derived:
            names = {place: tensor.sources[place] for place in taken_of(tensor)}
            recipes = {place: before.get(name) for place, name in names.items()}
            key = id(tensor.assembly), tuple((place, _identity(recipe)) for place, recipe in recipes.items())
            composed = self._composed.get(key)
            if composed is None:
                composed = self._composed[key] = self._compose(tensor, recipes)
                self._kept += [tensor, *recipes.values()]
            sources = {}
            for number, (place, inner) in enumerate(composed.places):
                recipe = recipes[place]
                assert isinstance(recipe, DerivedTensor)
                sources[TermTensor(number, ())] = recipe.sources[inner]
            wheres = list(dict.fromkeys(recipe.where for recipe in recipes.values() if recipe and recipe.where))
            where = ", then ".join(filter(None, (shortened(wheres) if wheres else "", tensor.where)))
            yield tensor._replace(assembly=composed.assembly, sources=sources, where=where)

    def _compose(self, tensor: DerivedTensor, recipes: Mapping[TermTensor, MadeUp | DerivedTensor | None]) -> _Composed:
        places: dict[tuple[TermTensor, TermTensor], TermTensor] = {}
        pairs, zeros = [], list(tensor.assembly.zeros)
        for pair in tensor.assembly.pairs:
            recipe, after = recipes[pair.source], pair.move
            if isinstance(recipe, DerivedTensor):
                for number, _ in sorted(self._pieces_of(recipe.assembly).meeting(pair.region)):
                    inner = recipe.assembly.pairs[number]
                    move = inner.move.then(after)
                    if move is not None:
                        place = places.setdefault((pair.source, inner.source), TermTensor(len(places), ()))
                        pairs.append(BoxPair(place, *move))
                        self._count(tensor)
            if isinstance(recipe, DerivedTensor) or (isinstance(recipe, ConstantTensor) and not any(recipe.element)):
                moved = (Move(box, box).then(after) for box in recipe.assembly.zeros)
                zeros += [move.to for move in moved if move is not None]
        if not places:  # of no element, or of zeros alone: it is made of the same tensors nevertheless
            for place, recipe in recipes.items():
                for own in taken_of(recipe) if isinstance(recipe, DerivedTensor) else ():
                    places[place, own] = TermTensor(len(places), ())
        return _Composed(Assembly(tensor.assembly.shape, tuple(pairs), tuple(zeros)), tuple(places))

    def _count(self, tensor: DerivedTensor) -> None:
        self._boxes += 1
        if self._boxes > MAX_PAIRS:
            raise MapError(
                f"the maps together would put tensors together from more than {MAX_PAIRS} boxes of different shapes",
                got=f"{tensor.name}, by {tensor.where}, of tensors that an earlier map has cut otherwise",
                where=tensor.where,
                remedy="convert the tensors in several runs, with one map each",
            )

    def _pieces_of(self, assembly: Assembly) -> Pieces:
        if id(assembly) not in self._pieces:
            self._pieces[id(assembly)] = Pieces([pair.to for pair in assembly.pairs])
        return self._pieces[id(assembly)]


def _identity(recipe: MadeUp | DerivedTensor | None) -> object:
    """Return a key that is equal for tensors made in the same way."""
    if isinstance(recipe, DerivedTensor):
        return id(recipe.assembly), None if recipe.assembly.pairs else tuple(recipe.sources)
    return (recipe.kind, recipe.element) if isinstance(recipe, ConstantTensor) else recipe and recipe.kind


def composed(chain: Iterable[MapResult]) -> tuple[DerivedTensor, ...]:
    """Return the tensors of the last map, expressed by the tensors that the first map takes."""
    first: dict[str, MadeUp | DerivedTensor] = {}
    last: tuple[DerivedTensor, ...] = ()
    for number, mapped in enumerate(chain):
        last = mapped.made if number == 0 else tuple(Composition().of(mapped.made, first))
        first = {tensor.name: tensor for tensor in last}
        first |= {tensor.name: tensor for tensor in mapped.constants}
        first |= {tensor.name: tensor for tensor in mapped.computed}
    return last


def parameters_of(mapped: MapResult) -> Iterator[MadeParameter]:
    """Yield all that a map makes; tensors that are equal to a source are sources as well."""
    equal = {each.names[0]: each.names for each in mapped.equal}
    for tensor in mapped.made:
        sources = (tensor.sources[place] for place in taken_of(tensor))
        yield MadeParameter(tensor.name, frozenset(name for own in sources for name in equal.get(own, (own,))))


def steps_of(chain: Sequence[MapResult], in_file: Sequence[Callable[[str], str]]) -> Iterator[list[MadeParameter]]:
    """Yield what each of several maps makes, by names in files.

    Args:
        chain: the first takes names of the source's file, and the last gives those of the target's.
        in_file: for each but the last, what tensors that it makes would be called in the target's file.
    """
    as_it_is: Callable[[str], str] = str
    for before, mapped, after in zip((as_it_is, *in_file), chain, (*in_file, as_it_is), strict=True):
        made = parameters_of(mapped)
        yield [MadeParameter(after(name), frozenset(map(before, sources))) for name, sources, _ in made]


def chained(
    rules: Sequence[Rules],
    choice: Selection,
    inventory: Inventory,
    forward: bool | None,
    like: TargetTemplate | None,
    settings: Mapping[str, Any],
) -> Iterator[MapResult]:
    """Yield the result of each map, applied to the result of the one before. Raises as `applied` does.

    Args:
        choice, like: of what the last one makes.
        settings: of the source's optimizer.
    """
    of_target = {} if like is None else settings_of_all(like.training, like.nest)
    stranded: frozenset[str] = frozenset()
    beside = frozenset(choice.beside)
    for number, of_one in enumerate(rules, 1):
        is_last = number == len(rules)
        own = choice if is_last else Selection(last=choice, owners=choice.owners)
        own_like = like if is_last else None
        mapped = applied(of_one, own._replace(beside=beside), inventory, forward, own_like, settings, of_target)
        _require_none_taken(stranded, mapped)
        stranded |= mapped.stranded
        inventory, beside = mapped.kinds, frozenset(_made_beside(mapped, beside))
        yield mapped._replace(beside=beside)


def _made_beside(mapped: MapResult, beside: frozenset[str]) -> Iterator[str]:
    """Yield the tensors that a map makes beside the model of a training: of others there, or computed, but no state.

    A tensor that is made up beside another one lies where that does.

    Args:
        beside: what lies there before; nothing in a file that is no training.
    """
    if not beside:
        return
    of_tensors = {tensor.name for tensor in mapped.made if beside.issuperset(tensor.sources.values())}
    yield from of_tensors
    others = [number.name for number in mapped.computed]
    others += [constant.name for constant in mapped.constants if constant.sibling in of_tensors]
    made = {tensor.name for tensor in mapped.made}
    yield from (name for name in others if parted_anywhere(name, made) is None)


def _require_none_taken(stranded: frozenset[str], mapped: MapResult) -> None:
    """Raise MapError if an equation takes state that an earlier map has left without its parameter."""
    for tensor in mapped.made if stranded else ():
        taken = stranded.intersection(tensor.sources.values()) if tensor.where else frozenset()
        if taken:
            raise MapError(
                "an equation takes state whose parameter an earlier map has changed",
                expected="state that has followed its parameter",
                got=min(taken),
                where=tensor.where,
                remedy="write equations for such state in the earlier map, or leave it out with an entry drop there",
            )


def made_of_first(
    parts: MapResult, made: Iterable[DerivedTensor], constants: Iterable[ConstantTensor]
) -> tuple[DerivedTensor, ...]:
    """Return parts of tensors, expressed by what these are made of."""
    before: dict[str, MadeUp | DerivedTensor] = {tensor.name: tensor for tensor in made}
    before |= {tensor.name: tensor for tensor in constants}
    return tuple(Composition().of(parts.made, before))


def chain_in_files(
    chain: Sequence[MapResult], named: Mapping[str, str], in_target: Callable[[str], str]
) -> tuple[MapResult, ...]:
    """Return the same chain with file names: the first map takes the source's, the last gives the target's."""
    last = len(chain) - 1
    return tuple(
        _in_files(mapped, named if number == 0 else {}, in_target if number == last else str)
        for number, mapped in enumerate(chain)
    )


def _in_files(mapped: MapResult, named: Mapping[str, str], in_target: Callable[[str], str]) -> MapResult:
    """Return the same in the names of the files on both sides."""

    def in_source(name: str) -> str:
        return named.get(name, name)

    scalars = mapped.counted
    return mapped._replace(
        made=tuple(
            tensor._replace(
                name=in_target(tensor.name), sources={place: in_source(name) for place, name in tensor.sources.items()}
            )
            for tensor in mapped.made
        ),
        constants=tuple(constant._replace(name=in_target(constant.name)) for constant in mapped.constants),
        equal=tuple(equal._replace(names=tuple(map(in_source, equal.names))) for equal in mapped.equal),
        pads=tuple(pads._replace(name=in_source(pads.name)) for pads in mapped.pads),
        left_out=tuple(map(in_source, mapped.left_out)),
        own_types={in_target(name): dtype for name, dtype in mapped.own_types.items()},
        states_left_out=tuple(map(in_source, mapped.states_left_out)),
        computed=tuple(
            number._replace(
                name=in_target(number.name), steps=None if number.steps is None else in_source(number.steps)
            )
            for number in mapped.computed
        ),
        counted=scalars._replace(
            steps=tuple(map(in_source, scalars.steps)),
            numbers=tuple((in_source(name), number) for name, number in scalars.numbers),
        ),
    )
