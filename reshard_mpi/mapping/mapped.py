"""What a map makes of a checkpoint: which tensors there are then, and which boxes of its own each is made of."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import FLOATS, DType
from reshard_mpi.mapping.candidates import Inventory, Kind
from reshard_mpi.mapping.choice import Choice, all_typed, chosen_of, constant_typed, is_chosen
from reshard_mpi.mapping.computing import Computed, Counted, computed, counted
from reshard_mpi.mapping.directions import Direction, told_direction
from reshard_mpi.mapping.fills import made_up, may_make
from reshard_mpi.mapping.fitting import whole_pair
from reshard_mpi.mapping.following import followed, is_named_as_state, is_state
from reshard_mpi.mapping.likeness import Like, require_alike
from reshard_mpi.mapping.made import Equal, Made, Mapped, Pads
from reshard_mpi.mapping.matching import Match, matches
from reshard_mpi.mapping.pairs import Place, TargetShape
from reshard_mpi.mapping.rules import TYPES, Rules
from reshard_mpi.mapping.settings import cautions
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.patterns import Pattern
from reshard_mpi.sharding.placement import named_after

_MAX_NAMED = 5
_OWN = Place(0, ())


def applied(
    rules: Rules | None,
    choice: Choice,
    inventory: Inventory,
    forward: bool | None = None,
    like: Like | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Mapped:
    """Return what a map makes of the tensors of a checkpoint.

    rules: None: every tensor keeps its name and shape. forward: the direction; None: as the names tell. like: decides
    which equations apply, and in which order tensors are; what is made must be alike, of what `choice` takes. settings:
    of the source's optimizer. Raises MapError if the map does not fit.
    """
    shapes = None if like is None else like.shapes
    taken: list[Match] = []
    left = dict.fromkeys(inventory)
    dropped: list[str] = []
    direction = None
    known = Counted(None, (), ())
    states: list[Match] = []
    if rules is not None:
        direction = told_direction(rules, inventory, forward, shapes)
        states_apart = {
            name: kind for name, kind in inventory.items() if not is_state(name, rules, inventory, direction)
        }
        taken = list(matches(rules, states_apart, direction, shapes))
        for match in taken:
            for name in (*match.sources.values(), *match.equal):
                left.pop(name, None)
        dropped = _dropped(rules, left, direction, shapes or {})
        for name in dropped:
            del left[name]
        if not direction.is_forward:
            settings = {} if like is None else like.training.settings
        known = counted(rules, left, inventory, direction, shapes)
        for name in known.names:
            del left[name]
        states = list(followed(rules, taken, left, inventory, direction, shapes))
        for match in states:
            for name in (*match.sources.values(), *match.equal):
                left.pop(name, None)
        parameters = len(taken)
        taken += states
    else:
        parameters = 0
    parameter_names = {name for match in taken[:parameters] for name in match.sources.values()}
    position = {name: number for number, name in enumerate(inventory)}
    made = [(position[name], _kept(name, inventory[name])) for name in left]
    for number, match in enumerate(taken):
        first = min(position[name] for name in match.sources.values())
        of_state = number >= parameters or _is_state(match, parameter_names, inventory)
        made += [(first, tensor) for tensor in _of_match(match, inventory, direction, is_state=of_state)]
    made.sort(key=lambda placed: placed[0])
    tensors = [tensor for _, tensor in made]
    if like is not None:
        tensors = [_single_shaped(tensor, like.shapes.get(tensor.name)) for tensor in tensors]
        order = {name: number for number, name in enumerate(like.shapes)}
        tensors.sort(key=lambda tensor: order.get(tensor.name, len(order)))
    _require_different(tensors)
    constants = made_up(rules, tensors, direction, like) if rules is not None and direction is not None else []
    computed_numbers: list[Computed] = []
    if rules is not None and direction is not None:
        others = dict.fromkeys(tensor.name for tensor in tensors)  # in their order, which is that of what is computed
        computed_numbers = list(computed(rules, known, others, settings, direction, shapes))
        of_numbers = {number.name for number in computed_numbers}
        constants = [constant for constant in constants if constant.name not in of_numbers]
        twice = sorted(of_numbers & others.keys())
        if twice:
            raise MapError(f"what is computed has the name of another tensor: {twice[0]}", where=rules.where)
    made_besides = [*(constant.name for constant in constants), *(number.name for number in computed_numbers)]
    chosen, excluded = chosen_of(choice, tensors, made_besides)
    excluded += [name for name in made_besides if not is_chosen(choice, name)]
    computed_numbers = [number for number in computed_numbers if is_chosen(choice, number.name)]
    wanted = {constant.name for constant in constants if is_chosen(choice, constant.name)}
    used = {name for tensor in chosen for name in tensor.sources.values()}
    if like is not None:
        made_shapes = {tensor.name: tensor.shape.shape for tensor in chosen}
        made_shapes |= {number.name: number.kind.shape for number in computed_numbers}
        made_shapes |= {constant.name: constant.kind.shape for constant in constants if constant.name in wanted}
        of_choice = {name: shape for name, shape in like.shapes.items() if is_chosen(choice, name)}
        require_alike(made_shapes, like._replace(shapes=of_choice))
    return Mapped(
        tuple(all_typed(choice, chosen)),
        tuple(constant_typed(choice, constant) for constant in constants if constant.name in wanted),
        tuple(_equal(taken, used, known)),
        (*_pads(taken, used), *_zeros(rules, dropped, inventory, direction)),
        (*dropped, *excluded, *(name for name, _ in known.numbers), *(() if computed_numbers else known.steps)),
        tuple(left) if rules is not None else (),
        direction,
        tuple(computed_numbers),
        known,
        tuple(_cautions(rules, states, settings)) if rules is not None else (),
        settings,
    )


def _equal(taken: Iterable[Match], used: set[str], known: Counted) -> Iterator[Equal]:
    for match in taken:
        first = next(iter(match.sources.values()))
        if match.equal and first in used:
            yield Equal((first, *match.equal), match.rule.where)
    if known.rule is not None and len(known.steps) > 1:
        yield Equal(known.steps, known.rule.where)


def _cautions(rules: Rules, states: Sequence[Match], settings: Mapping[str, Any]) -> Iterator[str]:
    if states:
        yield from dict.fromkeys(match.rule.warning for match in states if match.rule.warning)
        yield from cautions(rules.cautions, settings)


def _is_state(match: Match, names: Container[str], inventory: Inventory) -> bool:
    """Tell whether an equation takes state of what it takes elsewhere: `{p*}` may stand for a prefix as well."""
    name = next(iter(match.sources.values()))
    bases = (base for base in named_after(name) if base in names and is_named_as_state(name, base))
    return any(inventory[base].shape == inventory[name].shape for base in bases)


def _kept(name: str, kind: Kind) -> Made:
    return Made(name, kind.dtype, TargetShape(kind.shape, (whole_pair(_OWN, kind.shape),), ()), {_OWN: name}, "")


def _single_shaped(tensor: Made, shape: tuple[int, ...] | None) -> Made:
    """Return a tensor of one element in this shape of one element; any other tensor as it is."""
    own = tensor.shape
    if shape is None or shape == own.shape or prod(own.shape) != 1 or prod(shape) != 1:
        return tensor
    pairs = tuple(pair._replace(to=Box.whole(shape), order=None) for pair in own.pairs)
    return tensor._replace(shape=TargetShape(shape, pairs, ()))


def _of_match(match: Match, inventory: Inventory, direction: Direction | None, *, is_state: bool) -> Iterator[Made]:
    assert direction is not None
    _, target = direction.sides(match.rule)
    for place, shape in match.geometry.targets.items():
        type_name = None if is_state else target[place.term].type_name
        dtypes = {inventory[match.sources[pair.source]].dtype: match.sources[pair.source] for pair in shape.pairs}
        if not dtypes:
            dtypes = {inventory[name].dtype: name for name in match.sources.values()}
        if type_name is None and len(dtypes) > 1:
            raise MapError(
                f"the tensors that make up {match.targets[place]} are of different types",
                expected="one type, or a type in the equation",
                got=", ".join(f"{name} {dtype}" for dtype, name in dtypes.items()),
                where=match.rule.where,
            )
        dtype = next(iter(dtypes)) if type_name is None else TYPES[type_name]
        for source_dtype, name in dtypes.items():
            _require_convertible(name, source_dtype, dtype, match.rule.where)
        yield Made(match.targets[place], dtype, shape, match.sources, match.rule.where)


def _require_convertible(name: str, source: DType, target: DType, where: str) -> None:
    if source != target and not {source, target} <= FLOATS:
        raise MapError(
            f"{name} cannot become {target}", expected=f"one of {', '.join(TYPES)}", got=str(source), where=where
        )


def _require_different(tensors: Iterable[Made]) -> None:
    """Raise MapError if two tensors have one name."""
    origin: dict[str, Made] = {}
    for tensor in tensors:
        other = origin.setdefault(tensor.name, tensor)
        if other is not tensor:
            described = (
                f"{next(iter(each.sources.values()), '')} ({each.where or 'as it is'})" for each in (other, tensor)
            )
            raise MapError(
                f"two tensors would have the name {tensor.name}",
                got=" and ".join(described),
                where=tensor.where or other.where,
            )


def _dropped(
    rules: Rules, left: Mapping[str, None], direction: Direction, wanted: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the names of tensors that are left out. wanted: those that the target is to have are not."""
    dropped: dict[str, None] = {}
    for drop in rules.drops:
        if drop.side != direction.source_side:
            is_made_up = any(fill.side == drop.side and may_make(fill, drop.glob) for fill in rules.fills)
            if not (is_made_up or drop.is_optional):
                raise MapError(
                    f"read {direction}, the map loses what it leaves out in the other direction",
                    expected="a [[map]] entry with fill that makes it up, or optional = true",
                    got=f"drop = {drop.glob!r}",
                    where=drop.where,
                )
            continue
        pattern = Pattern(drop.glob)
        names = [name for name in left if pattern.matches(name) and name not in wanted]
        if not names and not drop.is_optional:
            raise MapError(
                "nothing is left out by a pattern",
                expected=f"tensors {drop.glob!r} that no equation takes",
                got=", ".join(list(left)[:_MAX_NAMED]) or "none that is left",
                where=drop.where,
                remedy="mend the pattern, or say optional = true if it need not match",
            )
        dropped.update(dict.fromkeys(names))
    return list(dropped)


def _zeros(
    rules: Rules | None, dropped: Sequence[str], inventory: Inventory, direction: Direction | None
) -> Iterator[Pads]:
    """Yield the tensors that are left out and may hold only zeros."""
    if rules is None or direction is None:
        return
    for drop in rules.drops:
        if drop.are_zeros and drop.side == direction.source_side:
            for name in filter(Pattern(drop.glob).matches, dropped):
                yield Pads(name, (Box.whole(inventory[name].shape),), False, drop.where)


def _pads(taken: Iterable[Match], used: set[str]) -> Iterator[Pads]:
    for match in taken:
        for place, name in match.sources.items():
            boxes = match.geometry.pads.get(place.term, ())
            if boxes and name in used:
                yield Pads(name, boxes, match.rule.drops_pads, match.rule.where)
