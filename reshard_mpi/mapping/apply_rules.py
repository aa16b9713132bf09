"""Apply the rules of one map to a checkpoint's tensors (`applied`); optimizer state by `follow_parameters`."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import FLOATS, DType
from reshard_mpi.mapping.box_pairs import Assembly, TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory, UnfitMapError, shown, told_direction
from reshard_mpi.mapping.follow_parameters import followed
from reshard_mpi.mapping.matching import Match, matches, usual_notes
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY
from reshard_mpi.mapping.result import (
    Computed,
    ConstantTensor,
    CountedScalars,
    DerivedTensor,
    Equal,
    MapResult,
    Pads,
    computed,
    counted,
)
from reshard_mpi.mapping.rules import TYPES, Drop, Rules, Unlike, cautions, setting
from reshard_mpi.mapping.selection import (
    Selection,
    TargetTemplate,
    all_typed,
    constant_typed,
    dropped,
    is_chosen,
    made_up,
    require_alike,
    require_any,
    settings_among,
    states_among,
    states_left_out,
    type_of,
    zeros,
)
from reshard_mpi.mapping.stranded_state import (
    copies_that_stay,
    keeps_its_name,
    require_none_as_parameter,
    require_none_stranded,
    states_as_parameters,
)
from reshard_mpi.mapping.tensor_kinds import is_named_like_state, is_state, owners
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.state_names import is_named_as_state
from reshard_mpi.sharding.strategy import named_after

_OWN = TermTensor(0, ())


class _Matched(NamedTuple):
    """What becomes of the tensors of a checkpoint."""

    direction: Direction | None
    matches: Sequence[Match]  # what equations take
    states: Sequence[Match]  # the state that follows them, or has other names
    kept: Sequence[str]  # the names of tensors that stay as they are
    dropped: Mapping[str, Drop]  # tensors left out, by name
    counted: CountedScalars  # tensors computed anew


def applied(
    rules: Rules | None,
    choice: Selection,
    inventory: Inventory,
    forward: bool | None = None,
    like: TargetTemplate | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    settings_of_target: Mapping[str, Any] = MappingProxyType({}),
) -> MapResult:
    """Apply the rules of a map to the tensors of a checkpoint.

    Args:
        rules: None: every tensor keeps its name and shape.
        forward: the direction; None: as the names tell.
        like: decides which equations apply, and in which order tensors are. What is made must be what it has, as far
            as `choice` takes it.
        settings: of the source's optimizer.
        settings_of_target: of that in the checkpoint which the last of several maps is to make one like.

    Raises MapError if the map does not fit.
    """
    taken = _taken(rules, inventory, forward, like, settings, choice)
    is_backward = taken.direction is not None and not taken.direction.is_forward
    of_left = settings_of_target if is_backward else settings
    everything = _everything(taken, rules, inventory, choice, like, of_left)
    shapes = everything.shapes
    states_out = states_left_out(choice, {**({} if like is None else like.shapes), **shapes}, rules, taken.direction)
    chosen = frozenset(require_any(choice, shapes)) - states_out
    stranded = _stranded_in_between(choice, taken, inventory, rules)
    outcome = everything.among(chosen)
    _require_state_follows([name for name in taken.kept if name in chosen - stranded], taken, inventory, rules, choice)
    if taken.direction is not None:
        require_none_as_parameter(taken.matches, chosen, inventory, taken.direction)
    copies = copies_that_stay((name for name in taken.kept if name in chosen), taken.matches, inventory)
    if like is not None:
        of_choice = {name: shape for name, shape in like.shapes.items() if is_chosen(choice, name)}
        of_choice = {name: shape for name, shape in of_choice.items() if name not in states_out}
        require_alike(outcome.shapes, like._replace(shapes=of_choice))
    does_anything = taken.matches or taken.states or taken.dropped or everything.constants or outcome.numbers
    if rules is not None and not does_anything:
        raise _does_nothing(rules, taken.direction, inventory, like)
    if choice.types:
        choice = choice._replace(settings=settings_among({choice.named(name): shape for name, shape in shapes.items()}))
    used = {name for tensor in outcome.tensors for name in tensor.sources.values()}
    scalars = taken.counted
    made = tuple(all_typed(choice, outcome.tensors))
    states_dropped: Iterable[str] = ()
    if rules is not None and taken.direction is not None and taken.dropped:
        states_dropped = states_among(taken.dropped, inventory, rules, taken.direction, choice.owners)
    return MapResult(
        made=made,
        constants=tuple(constant_typed(choice, constant) for constant in outcome.constants),
        equal=tuple(_equal((*taken.matches, *taken.states), used, scalars)),
        pads=(*_pads((*taken.matches, *taken.states), used), *zeros(taken.dropped, inventory)),
        left_out=(
            *taken.dropped,
            *(name for name in shapes if name not in chosen),
            *(name for name, _ in scalars.numbers),
            *(() if outcome.numbers else scalars.steps),
        ),
        direction=taken.direction,
        computed=tuple(outcome.numbers),
        counted=scalars,
        cautions=() if rules is None else (*_cautions(rules, taken, everything, inventory), *copies),
        settings=everything.settings,
        states_left_out=(*states_dropped, *(name for name in shapes if name in states_out)),
        stranded=stranded,
        notes=() if rules is None else tuple(usual_notes(taken.matches, rules)),
        own_types={own.name: own.dtype for own, tensor in zip(outcome.tensors, made) if own.dtype != tensor.dtype},
    )


class _Everything(NamedTuple):
    """All tensors of a checkpoint after the map, or a part. settings: of the optimizer on the map's left side."""

    tensors: Sequence[DerivedTensor]
    constants: Sequence[ConstantTensor]
    numbers: Sequence[Computed]
    settings: Mapping[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {tensor.name: tensor.assembly.shape for tensor in self.tensors}
        shapes |= {constant.name: constant.kind.shape for constant in self.constants}
        return shapes | {number.name: number.kind.shape for number in self.numbers}

    def among(self, names: Container[str]) -> _Everything:
        """Return the tensors with one of these names."""
        return self._replace(
            tensors=[tensor for tensor in self.tensors if tensor.name in names],
            constants=[constant for constant in self.constants if constant.name in names],
            numbers=[number for number in self.numbers if number.name in names],
        )


def _everything(
    taken: _Matched,
    rules: Rules | None,
    inventory: Inventory,
    choice: Selection,
    like: TargetTemplate | None,
    settings: Mapping[str, Any],
) -> _Everything:
    """Return all that the tensors of a checkpoint become. settings: of the optimizer on the map's left side."""
    tensors = _tensors(taken, inventory, choice, like)
    if rules is None or taken.direction is None:
        return _Everything(tensors, (), (), settings)
    constants = made_up(rules, tensors, taken.direction, like)
    numbers = _computed(rules, taken, tensors, settings, like)
    of_numbers = {number.name for number in numbers}
    return _Everything(tensors, [tensor for tensor in constants if tensor.name not in of_numbers], numbers, settings)


def _require_state_follows(
    kept: Sequence[str], taken: _Matched, inventory: Inventory, rules: Rules | None, choice: Selection
) -> None:
    """Raise MapError if state stays as it is, though the parameter that it is of does not."""
    shapes = {name: kind.shape for name, kind in inventory.items()}
    owner_of = owners(kept, shapes, rules, taken.direction, {}) if rules else {}
    matches = (*taken.matches, *taken.states)
    parameters = frozenset(name for match in matches for name in match.names)
    stay = [name for name in kept if name not in owner_of or owner_of[name] in parameters]
    match_of = {name: match for match in matches for name in match.sources.values()}
    stay = [name for name in stay if not keeps_its_name(name, choice.owners.get(name, ""), match_of, shapes)]
    require_none_stranded(stay, matches, inventory)


def _stranded_in_between(
    choice: Selection, taken: _Matched, inventory: Inventory, rules: Rules | None
) -> frozenset[str]:
    """Return state that stays while its parameter goes, and that the user leaves out after the last map."""
    names = [] if choice.last is None else [name for name in taken.kept if not is_chosen(choice.last, name)]
    try:
        _require_state_follows(names, taken, inventory, rules, choice)
    except MapError:
        return frozenset(name for name in names if is_named_like_state(name))
    return frozenset()


def _taken(
    rules: Rules | None,
    inventory: Inventory,
    forward: bool | None,
    like: TargetTemplate | None,
    settings: Mapping[str, Any],
    choice: Selection,
) -> _Matched:
    """Return what becomes of the tensors of a checkpoint by a map; without one they stay as they are."""
    if rules is None:
        return _Matched(None, (), (), tuple(inventory), {}, CountedScalars(None, (), ()))
    shapes = None if like is None else like.shapes
    direction = told_direction(rules, inventory, forward, shapes)
    states_apart = {name: kind for name, kind in inventory.items() if not is_state(name, rules, inventory, direction)}
    taken = list(matches(rules, states_apart, direction, shapes))
    no_parameters = _settings_of_optimizers(taken, inventory) | _beside(taken, choice.beside, direction)
    no_parameters |= states_as_parameters(taken, inventory, direction)
    if no_parameters:
        states_apart = {name: kind for name, kind in states_apart.items() if name not in no_parameters}
        taken = list(matches(rules, states_apart, direction, shapes))
    left = dict.fromkeys(inventory)
    _remove(left, taken)
    entries = dropped(rules, tuple(left), inventory, direction, shapes or {}, choice.owners)
    for name in entries:
        del left[name]
    scalars = counted(rules, left, inventory, direction, shapes, settings)
    for name in scalars.names:
        del left[name]
    states: list[Match] = []
    following: Sequence[Match] = taken
    while following := list(followed(rules, following, left, inventory, direction, shapes)):  # state of state, too
        _remove(left, following)
        states += following
    return _Matched(direction, taken, states, tuple(left), entries, scalars)


def _settings_of_optimizers(taken: Iterable[Match], inventory: Inventory) -> frozenset[str]:
    """Return the settings of torch's optimizers that equations of parameters take, as `{p*}` stands for any name.

    They stay with their group, which lies beside the state, whatever the key of the optimizer.
    """
    rule_of = {name: id(match.rule) for match in taken for name in match.names}
    paths = {f".{name}".partition(f".{GROUPS}.")[0] for name in inventory if GROUPS in name.split(".")}
    beside = tuple(f"{path}.{STATE_KEY}." for path in paths)
    settings = {name for name in rule_of if GROUPS in name.split(".") or f".{name}".startswith(beside)}
    of_parameters = {rule for name, rule in rule_of.items() if name not in settings}
    return frozenset(name for name in settings if rule_of[name] in of_parameters)


def _beside(taken: Iterable[Match], beside: Collection[str], direction: Direction) -> frozenset[str]:
    """Return the tensors beside a model that equations take which take the model's too, or do not say their key."""
    match_of = {name: match for match in taken for name in match.names}
    of_model = {id(match.rule) for name, match in match_of.items() if name not in beside}
    held = ((name, match_of[name].rule) for name in beside if name in match_of)
    return frozenset(
        name
        for name, rule in held
        if id(rule) in of_model or any(term.name.text.startswith("{") for term in direction.sides(rule)[0])
    )


def _tensors(
    taken: _Matched, inventory: Inventory, choice: Selection, like: TargetTemplate | None
) -> list[DerivedTensor]:
    """Return the derived tensors, in their order in the target."""
    parameter_names = {name for match in taken.matches for name in match.sources.values()}
    position = {name: number for number, name in enumerate(inventory)}
    # One for all tensors of a shape: tensors that are made in the same way are planned and moved together.
    wholes = {kind.shape: Assembly.whole(_OWN, kind.shape) for kind in inventory.values()}
    by_match = [
        (position[name], DerivedTensor(name, kind.dtype, wholes[kind.shape], {_OWN: name}, ""))
        for name, kind in ((name, inventory[name]) for name in taken.kept)
    ]
    states = {id(match) for match in taken.states}
    for match in (*taken.matches, *taken.states):
        first = min(position[name] for name in match.sources.values())
        of_state = id(match) in states or _is_state(match, parameter_names, inventory)
        of_match = _of_match(match, inventory, taken.direction, choice, is_state=of_state)
        by_match += [(first, tensor) for tensor in of_match]
    by_match.sort(key=lambda placed: placed[0])
    tensors = [tensor for _, tensor in by_match]
    if like is not None:
        tensors = [_single_shaped(tensor, like.shapes.get(tensor.name)) for tensor in tensors]
        order = {name: number for number, name in enumerate(like.shapes)}
        tensors.sort(key=lambda tensor: order.get(tensor.name, len(order)))
    _require_different(tensors)
    return tensors


def _computed(
    rules: Rules,
    taken: _Matched,
    tensors: Iterable[DerivedTensor],
    settings: Mapping[str, Any],
    like: TargetTemplate | None,
) -> list[Computed]:
    """Return the numbers that are computed. Raises MapError if one has the name of another tensor."""
    assert taken.direction is not None
    others = dict.fromkeys(tensor.name for tensor in tensors)  # in their order, which is the order of computing
    shapes = None if like is None else like.shapes
    numbers = list(computed(rules, taken.counted, others, settings, taken.direction, shapes))
    twice = sorted(number.name for number in numbers if number.name in others)
    if twice:
        raise MapError(f"what is computed has the name of another tensor: {twice[0]}", where=rules.where)
    return numbers


def _does_nothing(
    rules: Rules, direction: Direction | None, inventory: Inventory, like: TargetTemplate | None
) -> MapError:
    as_like = "" if like is None else f" that become what is in {like.path}"
    side = "left" if direction is None else direction.source_side
    return UnfitMapError(
        "the map does nothing: none of its entries applies",
        expected=f"tensors of its {side} sides{as_like}",
        got=shown(inventory),
        where=rules.where,
        remedy="mend the names, read it the other way (--forward, --reverse), or leave out --map",
    )


def _remove(left: dict[str, None], taken: Iterable[Match]) -> None:
    for match in taken:
        for name in match.names:
            left.pop(name, None)


def _equal(taken: Iterable[Match], used: set[str], scalars: CountedScalars) -> Iterator[Equal]:
    for match in taken:
        first = next(iter(match.sources.values()))
        if match.equal and first in used:
            yield Equal((first, *match.equal), match.rule.where)
    if scalars.rule is not None and len(scalars.steps) > 1:
        yield Equal(scalars.steps, scalars.rule.where)


def _cautions(rules: Rules, taken: _Matched, everything: _Everything, inventory: Inventory) -> Iterator[str]:
    if not taken.states or taken.direction is None:
        return
    yield from dict.fromkeys(match.rule.warning for match in taken.states if match.rule.warning)
    yield from cautions(rules.cautions, everything.settings)
    names = everything.shapes
    of_groups = [name.rpartition(f".{GROUPS}.")[2] for name in inventory if f".{GROUPS}." in f".{name}"]
    for number in rules.numbers if taken.direction.is_forward else ():
        is_tensor = any(f".{number.of}." in f"{name}." for name in of_groups)
        said = setting(everything.settings, number.of)
        if number.name not in names and (is_tensor or isinstance(said, dict | Unlike)):
            what = (
                "a tensor"
                if is_tensor
                else "not the same for all parameters"
                if isinstance(said, Unlike)
                else "no plain number"
            )
            yield f"{number.name} is not made, since {number.of} of the optimizer is {what}"


def _is_state(match: Match, names: Container[str], inventory: Inventory) -> bool:
    """Tell whether an equation takes the state of a parameter that it also takes: `{p*}` may stand for a prefix as
    well.
    """
    name = next(iter(match.sources.values()))
    bases = (base for base in named_after(name) if base in names and is_named_as_state(name, base))
    return any(inventory[base].shape == inventory[name].shape for base in bases)


def _single_shaped(tensor: DerivedTensor, shape: tuple[int, ...] | None) -> DerivedTensor:
    """Return a tensor of one element in this shape of one element; any other tensor as it is."""
    own = tensor.assembly
    if shape is None or shape == own.shape or prod(own.shape) != 1 or prod(shape) != 1:
        return tensor
    pairs = tuple(pair._replace(to=Box.whole(shape), order=None) for pair in own.pairs)
    return tensor._replace(assembly=Assembly(shape, pairs, ()))


def _of_match(
    match: Match, inventory: Inventory, direction: Direction | None, choice: Selection, *, is_state: bool
) -> Iterator[DerivedTensor]:
    assert direction is not None
    _, target = direction.sides(match.rule)
    for place, shape in match.geometry.targets.items():
        type_name = None if is_state else target[place.term].type_name
        dtypes = {inventory[match.sources[pair.source]].dtype: match.sources[pair.source] for pair in shape.pairs}
        if not dtypes:
            dtypes = {inventory[name].dtype: name for name in match.sources.values()}
        chosen = {type_of(choice, match.targets[place], dtype, shape.shape) for dtype in dtypes}
        if type_name is None and len(chosen) > 1:
            raise MapError(
                f"the tensors that make up {match.targets[place]} are of different types",
                expected=f"one type{' or a type in the equation' * (not is_state)}, or --dtype that gives them one",
                got=", ".join(f"{name} {dtype}" for dtype, name in dtypes.items()),
                where=match.rule.where,
            )
        dtype = TYPES[type_name] if type_name is not None else chosen.pop() if len(dtypes) > 1 else next(iter(dtypes))
        for source_dtype, name in dtypes.items():
            _require_convertible(name, source_dtype, dtype, match.rule.where)
        yield DerivedTensor(match.targets[place], dtype, shape, match.sources, match.rule.where)


def _require_convertible(name: str, source: DType, target: DType, where: str) -> None:
    if source != target and not {source, target} <= FLOATS:
        raise MapError(
            f"{name} cannot become {target}", expected=f"one of {', '.join(TYPES)}", got=str(source), where=where
        )


def _require_different(tensors: Iterable[DerivedTensor]) -> None:
    """Raise MapError if two tensors have one name."""
    origin: dict[str, DerivedTensor] = {}
    for tensor in tensors:
        other = origin.setdefault(tensor.name, tensor)
        if other is not tensor:
            described = (
                f"{next(iter(each.sources.values()), '')} ({each.where or 'as it is'})" for each in (other, tensor)
            )
            raise MapError(
                f"two tensors would have the name {tensor.name}",
                expected="another name for each tensor of the target",
                got=" and ".join(described),
                where=tensor.where or other.where,
                remedy="mend the equations, or leave one of the two out with an entry drop",
            )


def _pads(taken: Iterable[Match], used: set[str]) -> Iterator[Pads]:
    for match in taken:
        for place, name in match.sources.items():
            boxes = match.geometry.pads.get(place.term, ())
            if boxes and name in used:
                yield Pads(name, boxes, match.rule.drops_pads, match.rule.where)
