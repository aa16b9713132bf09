"""Refuse state that stays as it is while its parameters do not (`require_none_stranded`, `require_none_by_order`).

With `model.layers.0.w` and `optim.exp_avg.layers.0.w`, a map that takes the one and leaves the other as it is would
make a checkpoint whose optimizer belongs to parameters that it does not have. So it would with what Adafactor keeps of
the rows and columns of `w`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in, entries_of, names_by_path, pairs_of, value_of
from reshard_mpi.formats.nest.nodes import parsed
from reshard_mpi.groups import grouped
from reshard_mpi.mapping.box_pairs import TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory
from reshard_mpi.mapping.follow_parameters import is_copied
from reshard_mpi.mapping.matching import Match
from reshard_mpi.mapping.numbered_optimizers import begins_of
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY, Form, Optimizer
from reshard_mpi.mapping.result import DerivedTensor, MapResult
from reshard_mpi.mapping.selection import TargetTemplate
from reshard_mpi.mapping.tensor_kinds import (
    ends_of,
    has_shape_of,
    is_behind_parameter,
    is_named_like_state,
    may_be_state,
    parted_anywhere,
    with_state,
)
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.state_names import STATE_WORDS, dotted, parts_of
from reshard_mpi.text import shortened

_NUMBER = re.compile(rf"(?:^|\.){STATE_KEY}\.([0-9]+)\.")
# What names of a model's tensors begin with, where they do not stand alone.
_MODELS = ("", "model.", "module.", "network.", "params.", "state_dict.")
# Adafactor and CAME of MindSpore have `exp_avg_sq_row_fc.weight` for state of `fc.weight`.
_JOINED_TO_NAME = "exp_avg_"
# The numbers in a name, and what is behind them.
_PLACE = re.compile(r"([0-9]+(?:\.[0-9]+)*)(.*)", re.DOTALL)


def require_none_stranded(kept: Iterable[str], taken: Iterable[Match], inventory: Inventory) -> None:
    """Raise MapError if a tensor that stays as it is looks like state of a parameter that an equation takes.

    Args:
        kept: the names of those that stay, and are neither left out nor state of another tensor by its whole name.
    """
    parameters_with_state = with_state(inventory)
    joined = [name for name in kept if name.startswith(_JOINED_TO_NAME)]
    states = [name for name in kept if is_named_like_state(name) and name not in parameters_with_state]
    if not states and not joined:
        return
    shapes = {name: kind.shape for name, kind in inventory.items()}
    matches = [match for match in taken if not _is_left(match, shapes)]
    parameters = _by_ends_of_names(matches)
    others = [name for name in inventory if not is_named_like_state(name)]
    match_of = {name: match for match in matches for name in match.names}
    for name in joined:
        _require_not_joined(name, match_of)
    ends = frozenset(end for name in others if name not in match_of for end in (dotted(name), *ends_of(name)))
    all_ends = frozenset(end for name in others for end in (dotted(name), *ends_of(name)))
    match_of_shape = {inventory[name].shape: match for name, match in match_of.items()}
    for name in states:
        numbered = match_of_shape.get(inventory[name].shape)
        if numbered is not None and _is_numbered(name, all_ends):
            raise MapError(
                "state that torch numbers would stay as it is, while an equation takes parameters of its shape",
                expected="torch's own file, or a checkpoint that this program has made of it, whose order is known",
                got=name,
                where=numbered.rule.where,
                remedy="convert the checkpoint with its map before it gets a form without that, or leave the state out"
                " (--exclude)",
            )
        parted = parted_anywhere(name, match_of)
        if parted is not None:
            whole, _ = parted
            raise MapError(
                f"state of {whole} would stay as it is, while an equation takes the parameter",
                expected=f"the shape of the parameter, {list(inventory[whole].shape)}, or a single element, as in the"
                " same state of all parameters",
                got=f"{name} {list(inventory[name].shape)}",
                where=match_of[whole].rule.where,
                remedy="write equations for such state, or leave it out with --exclude",
            )
        for parameter, match, is_of_torch, is_renamed in _named_in_part(name, parameters, ends, others):
            shape = inventory[name].shape
            if inventory[parameter].shape == shape or (is_of_torch and (is_renamed or prod(shape) != 1)):
                raise MapError(
                    f"state of {parameter} would stay as it is, while an equation takes the parameter",
                    expected=f"{parameter}, the whole name, in that of its state, so that it follows",
                    got=name,
                    where=match.rule.where,
                    remedy="write equations for such state as for the parameters, or leave it out with --exclude",
                )


def _require_not_joined(name: str, match_of: Mapping[str, Match]) -> None:
    """Raise MapError if a word for state is joined to the name of a parameter that an equation takes."""
    for place in (place for place, character in enumerate(name) if character == "_"):
        parameter = name[place + 1 :]
        if parameter in match_of:
            raise MapError(
                f"state of {parameter} would stay as it is, while an equation takes the parameter",
                expected="the parameter's name between dots in that of its state, so that it follows",
                got=name,
                where=match_of[parameter].rule.where,
                remedy="write equations for such state as for the parameters, or leave it out with --exclude",
            )


def keeps_its_name(name: str, owner: str, match_of: Mapping[str, Match], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a name in state is its parameter's as before, which lies under another key of the file.

    Args:
        owner: the parameter, or nothing.
    """
    match = match_of.get(owner)
    end = next((end for end in ends_of(owner) if f".{end}." in f".{dotted(name)}."), None)
    if match is None or end is None or match.equal or len(match.sources) != 1 or not is_copied(match, shapes):
        return False
    begin, targets = dotted(owner).removesuffix(end), map(dotted, match.targets.values())
    return all(f".{name}".endswith(f".{end}") and not name.startswith(begin) for name in targets)


def _is_left(match: Match, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether an equation leaves a tensor its name and arrangement: it is for the type alone, or for nothing."""
    names = [*match.sources.values()]
    return names == [*match.targets.values()] and len(names) == 1 and not match.equal and is_copied(match, shapes)


def copies_that_stay(kept: Iterable[str], taken: Iterable[Match], inventory: Inventory) -> Iterator[str]:
    """Yield a warning of tensors that stay as they are, and may be copies of parameters that equations cut or turn.

    They have the shape of such a parameter, and end in its name: frameworks have many words for averages and state.

    Args:
        kept: the names of those that stay.
    """
    shapes = {name: kind.shape for name, kind in inventory.items()}
    arranged = {name for match in taken if not is_copied(match, shapes) for name in match.sources.values()}
    by_dots = {dotted(name): shapes[name] for name in arranged}
    shape_of = {
        name.removeprefix(begin): shape
        for name, shape in by_dots.items()
        for begin in _MODELS
        if name.startswith(begin)
    }
    copies = [
        name
        for name in kept
        if prod(shapes[name]) > 1 and any("." in end and shape_of.get(end) == shapes[name] for end in ends_of(name))
    ]
    if copies:
        yield (
            "tensors that stay as they are have the names and shapes of parameters that equations cut or turn: if they"
            f" are copies or state of these, write equations for them as well ({shortened(copies)})"
        )


def states_as_parameters(taken: Sequence[Match], inventory: Inventory, direction: Direction) -> frozenset[str]:
    """Return state that equations of parameters take, as `{p*}` stands for any name, and whose parameters are taken.

    It follows its parameter, whatever else its name fits: its name is the parameter's new one between the same words.
    """
    shapes = {name: kind.shape for name, kind in inventory.items()}
    match_of = {name: match for match in taken for name in match.names}
    held = ((name, parted_anywhere(name, inventory)) for name in _as_parameters(taken, inventory, direction))
    of_owners = ((name, *parted) for name, parted in held if parted is not None)
    return frozenset(
        name
        for name, owner, affixes in of_owners
        if owner in match_of and (has_shape_of(name, owner, shapes) or affixes.is_of_optimizer)
    )


def _as_parameters(taken: Sequence[Match], inventory: Inventory, direction: Direction) -> list[str]:
    """Return the names of state that equations take by names in which they do not say a word for state themselves."""
    states = []
    for match in taken:
        source, _ = direction.sides(match.rule)
        says_state = [is_named_like_state(term.name.text) for term in source]
        states += [name for place, name in match.sources.items() if not says_state[place.term]]
        states += match.equal if not any(says_state) else ()
    states = [name for name in states if is_named_like_state(name)]
    with_own = with_state(inventory) if states else frozenset()
    return [name for name in states if name not in with_own]


def require_none_as_parameter(
    taken: Sequence[Match], chosen: Container[str], inventory: Inventory, direction: Direction
) -> None:
    """Raise MapError for state that an equation of parameters takes, `{p*} <=> net.{p*}`, apart from its parameter.

    The parameter stays; or it is taken by another equation, and the state has only a part of its name.

    Args:
        taken: what equations take.
        chosen: the names of the target's tensors that are not left out.
    """
    match_of = {name: match for match in taken for name in match.names}
    shapes = {name: kind.shape for name, kind in inventory.items()}
    names = (name for name in _as_parameters(taken, inventory, direction) if prod(shapes[name]) > 1)
    states = [name for name in names if any(target in chosen for target in match_of[name].targets.values())]
    if not states:
        return
    parameters = _by_ends_of_names(match for match in taken if not _is_left(match, shapes))
    others = [name for name in inventory if not is_named_like_state(name)]
    ends = frozenset(end for name in others if name not in match_of for end in (dotted(name), *ends_of(name)))
    for name in states:
        own, parted = match_of[name], parted_anywhere(name, inventory)
        stays = is_copied(own, shapes) and [*own.targets.values()] == [name]
        if parted is None:
            for parameter, match, _, _ in _named_in_part(name, parameters, ends, others):
                is_another = match.rule is not own.rule and shapes[parameter] == shapes[name]
                if is_another and not _go_along(name, own, parameter, match, shapes):
                    raise _taken_apart(name, own, parameter, f"as {match.rule.where} says")
        elif not stays and parted[0] not in match_of and shapes[parted[0]] == shapes[name]:
            raise _taken_apart(name, own, parted[0], "and stay as it is")


def _go_along(name: str, own: Match, parameter: str, match: Match, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether an equation does to state, which has a part of its parameter's name, what another does to that.

    Args:
        own, match: what takes the state, and what takes the parameter.
    """
    if len(own.targets) != 1 or len(match.targets) != 1:
        return False
    (new_name,), (new_parameter,) = map(dotted, own.targets.values()), map(dotted, match.targets.values())
    name, parameter = dotted(name), dotted(parameter)
    end = next((end for end in (parameter, *ends_of(parameter)) if f".{end}." in f".{name}."), "")
    before, _, behind = f".{name}.".partition(f".{end}.")
    new_end = f".{new_name}.".removeprefix(f"{before}.").removesuffix(f".{behind}")
    is_around = f".{new_name}." == f"{before}.{new_end}.{behind}" and f".{new_parameter}".endswith(f".{new_end}")
    return is_around and (own.geometry == match.geometry or (is_copied(own, shapes) and is_copied(match, shapes)))


def _taken_apart(name: str, match: Match, parameter: str, way: str) -> MapError:
    return MapError(
        f"an equation takes state of {parameter} for a parameter, and does not arrange it as that is",
        expected=f"the state of {parameter} to follow it, {way}",
        got=f"{name}, which becomes {', '.join(match.targets.values())}",
        where=match.rule.where,
        remedy="write the equation for names of the model alone, or one for such state before it, or leave the"
        f" state out (--exclude '{min(match.targets.values())}')",
    )


def _is_numbered(name: str, ends: Container[str]) -> bool:
    """Tell whether state of this name is kept under a number: `optimizer.state.0.exp_avg`.

    Args:
        ends: of the names of tensors that are no state. Modules may have numbers for names:
            `optimizer.state.0.weight.exp_avg` is of `0.weight`.
    """
    words = STATE_WORDS.intersection(parts_of(name)) - {STATE_KEY}
    name = dotted(name)
    number = _NUMBER.search(name)
    if not words or number is None:
        return False
    parts = name[number.end() :].split(".")
    return all(f"{number[1]}.{'.'.join(parts[:length])}" not in ends for length in range(1, len(parts)))


def _by_ends_of_names(taken: Iterable[Match]) -> Mapping[str, Sequence[tuple[str, Match]]]:
    """Return parameters by their names' ends, after the first parts: a model and its copy have equal ones."""
    named = ((name, match) for match in taken for name in match.names)
    # An equation may be of state.
    return grouped((end, each) for each in named if STATE_KEY not in parts_of(each[0]) for end in ends_of(each[0]))


def _named_in_part(
    name: str, parameters: Mapping[str, Sequence[tuple[str, Match]]], ends: Container[str], others: Collection[str]
) -> Iterator[tuple[str, Match, bool, bool]]:
    """Yield the parameters whose names end in some consecutive parts of a name of state, and what takes them.

    The last items are whether torch's optimizers have such names (`state.fc.weight.step`), and whether the parameter's
    is gone.

    Args:
        ends: of names of tensors that stay; their state may stay as well.
        others: the names of all tensors that are not named as state is.
    """
    parts = parts_of(name)
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1 - is_behind_parameter(parts, length)):
            before, behind = parts[:start], parts[start + length :]
            end = ".".join(parts[start : start + length])
            taken = [each for each in parameters.get(end, ()) if each[0] != name]
            if taken and not STATE_WORDS.isdisjoint((*before, *behind)):
                for parameter, match in taken:
                    if may_be_state(before, behind, dotted(parameter).removesuffix(end), others):
                        targets = map(dotted, match.targets.values())
                        is_kept = any(f".{target}".endswith(f".{end}") for target in targets)
                        yield parameter, match, before[-1:] in (("state",), ("param_groups",)), not is_kept
            elif end in ends:
                return


def require_none_by_order(
    nest: str,
    optimizers: Sequence[Optimizer],
    inventory: Inventory,
    chain: Sequence[MapResult],
    made: Iterable[DerivedTensor],
    like: TargetTemplate | None,
    where: str,
) -> None:
    """Raise MapError if tensors in the order of parameters stay as they are, and the parameters do not.

    Averages of a model may be a list (`ema.shadow_params.0`), and an optimizer around another one has state of its own
    (`optimizer.slow_state.0.slow_buffer`). What such tensors are told by is that they have shapes of parameters. Their
    order may be the model's, or that of the optimizer's numbers, group after group.

    Args:
        nest: of the source.
        optimizers: of the source, whose state by parameters is not meant.
        inventory: of the source's tensors, in order.
        chain: what each map makes; made: what the last one makes of the source's tensors.
        like: the checkpoint that the target is to be like; None: there is none.
        where: the source, for errors.
    """
    root = parsed(nest).root
    numbering = names_by_path(inventory, set(_numbering(root, "")))
    if not numbering:
        return
    copied = {each.name: each.sources[place] for each in made if (place := _copied(each, inventory)) is not None}
    in_target = list(copied) if like is None or like.nest is None else parsed(like.nest).in_order(copied)
    position = {copied[name]: number for number, name in enumerate(in_target)}
    # The parameters of each model in an order that its state may have, with their places in the target.
    apart = (*numbering, *(begin for optimizer in optimizers for begin in begins_of(optimizer.path)))
    others = [name for name in inventory if not name.startswith(apart)]
    orders: list[tuple[list[str], Mapping[str, int]]] = [
        (names, position) for names in names_by_path(others, {path for path, _ in dictionaries_in(root)}).values()
    ]
    numbered = [] if like is None else [copied[name] for name in like.training.parameters.values() if name in copied]
    for names in ([*each.parameters] for each in optimizers if each.form is Form.NUMBERS):
        in_order = numbered or [name for name in names if name in position]  # groups keep their order otherwise
        orders.append((names, {name: number for number, name in enumerate(in_order)}))
    models = [
        (_count_shapes(names, inventory), _count_shapes(_in_place(names, place_of), inventory))
        for names, place_of in orders
    ]
    named = {source for mapped in chain for each in mapped.made if each.where for source in each.sources.values()}
    for path, names in numbering.items():
        numbers = ((_PLACE.match(name, len(path)), name) for name in names)
        families = grouped((number[2], name) for number, name in numbers if number is not None)
        for family in families.values():
            shapes = _count_shapes(family, inventory)
            is_kept = named.isdisjoint(family) and not position.keys().isdisjoint(family)
            if is_kept and any(shapes <= of_model and not shapes <= left for of_model, left in models):
                raise MapError(
                    "tensors that may be told by the order of parameters alone would stay as they are, while the"
                    " parameters do not",
                    expected="tensors below names of parameters, which follow, or equations for these as well",
                    got=f"{family[0]}, {len(family)} tensor{'s' * (len(family) > 1)} of shapes that parameters have",
                    where=where,
                    remedy="write equations for them, be it the same names on both sides, or leave them out"
                    f" (--exclude '{path}*')",
                )


def _in_place(names: Sequence[str], place_of: Mapping[str, int]) -> list[str]:
    """Return the parameters that stay, if these come in the same order in the target; none if they do not."""
    stay = [name for name in names if name in place_of]
    return stay if sorted(stay, key=place_of.__getitem__) == stay else []


def _numbering(node: Any, path: str) -> Iterator[str]:
    """Yield what names begin with in lists of tensors, and in what an optimizer has beside its groups and its state."""
    has_groups = isinstance(value_of(node, GROUPS), list)
    for key, value in pairs_of(node):
        begin = f"{path}{key}."
        if has_groups and key in (STATE_KEY, GROUPS):
            continue
        if (has_groups and path) or _is_list(value):
            yield begin
        else:
            yield from _numbering(value, begin)


def _is_list(node: Any) -> bool:
    """Tell whether a part of a nest is a list of tensors, or a dictionary by numbers."""
    entries = entries_of(node)
    if entries is not None:
        return bool(entries) and all(type(entry[0]) is int for entry in entries)
    items = [item for _, item in pairs_of(node) if item is not None]
    return bool(items) and all((isinstance(item, dict) and "tensor" in item) or _is_list(item) for item in items)


def _copied(tensor: DerivedTensor, inventory: Inventory) -> TermTensor | None:
    """Return which of its sources a tensor is as it is; None if it is none."""
    if len(tensor.assembly.pairs) != 1:
        return None
    (pair,) = tensor.assembly.pairs
    whole = Box.whole(inventory[tensor.sources[pair.source]].shape)
    is_whole = pair.region == pair.to == whole and tensor.assembly.shape == whole.shape
    return pair.source if is_whole and pair.order in (None, tuple(range(len(whole.shape)))) else None


def _count_shapes(names: Iterable[str], inventory: Inventory) -> Counter[tuple[int, ...]]:
    """Count, by shape, the tensors of more than one element."""
    shapes = (inventory[name].shape for name in names)
    return Counter(shape for shape in shapes if prod(shape) > 1)
