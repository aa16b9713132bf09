"""Follow parameters through a map: their state as tensors (`followed`), and their names in optimizers (`made_in`).

Where an equation takes parameters, it takes their state as well: what is before and behind the parameter's name stays.
An optimizer of a nest lists parameters by names of its own, and has those that are made of them afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.groups import grouped
from reshard_mpi.mapping.box_pairs import Assembly, BoxPair, Geometry, TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory, TemplateShapes
from reshard_mpi.mapping.matching import Match
from reshard_mpi.mapping.rules import EquationRule, Rules
from reshard_mpi.mapping.tensor_kinds import (
    NameAffixes,
    has_shape_of,
    parted_anywhere,
    parted_by,
    source_affixes,
    target_affixes,
    with_state,
    without_state_of_others,
)

_MAX_NAMED = 5


def followed(
    rules: Rules,
    matches: Sequence[Match],
    left: Mapping[str, None],
    inventory: Inventory,
    direction: Direction,
    like: TemplateShapes | None,
) -> Iterator[Match]:
    """Yield how state follows its parameters: those in `matches` and, by `rules.states`, some that no equation takes.

    Args:
        left: the names of tensors that no equation has taken.
        like: decides which of `rules.states` applies.

    Raises MapError if some of the parameters that are put together have a state that others lack.
    """
    match_of = {name: number for number, match in enumerate(matches) for name in match.names}
    by_affixes = grouped((source_affixes(rule, direction), rule) for rule in rules.states)
    families: dict[tuple[int, NameAffixes], set[str]] = {}
    shapes = {name: kind.shape for name, kind in inventory.items()}
    parameters = with_state(shapes)
    parted = {name: parted_by(name, by_affixes, shapes) or parted_anywhere(name, shapes) for name in left}
    states = {name: owner for name, owner in parted.items() if owner is not None and name not in parameters}
    # Of a square parameter [8, 8], Shampoo's matrices have its shape by chance; of the others they have not.
    by_chance = {affixes for name, (base, affixes) in states.items() if not has_shape_of(name, base, shapes)}
    # Of a column [4, 1], Adafactor's sums over columns have its shape by chance: beside sums over rows, [1, 1].
    with_sums = {base for name, (base, _) in states.items() if _is_sum(shapes[name], shapes[base])}
    by_chance |= {affixes for base, affixes in states.values() if base in with_sums and not affixes.has_word_beside}
    for name, (base, affixes) in states.items():
        if not has_shape_of(name, base, shapes):
            continue
        if base in match_of:
            if affixes in by_chance and not is_copied(matches[match_of[base]], shapes):
                continue
            families.setdefault((match_of[base], affixes), set()).add(base)
            continue
        chosen = _chosen(by_affixes.get(affixes, ()), (base,), direction, like)
        if chosen is not None:
            yield _of_kept(chosen, name, target_affixes(chosen, direction).around(base), inventory)
    for (number, affixes), bases in families.items():
        match = _having_state(matches[number], bases, affixes)
        chosen = _chosen(by_affixes.get(affixes, ()), tuple(match.targets.values()), direction, like)
        new_affixes = affixes if chosen is None else target_affixes(chosen, direction)
        yield _state(match, affixes, new_affixes, inventory, chosen)


def _having_state(match: Match, bases: Collection[str], affixes: NameAffixes) -> Match:
    """Return the part of a match that has a state: a BatchNorm's running figures have none, weight and bias may have.

    Of tensors that are equal, the others need none: torch has one state of tied weights.

    Args:
        bases: the names of the parameters that have it.
        affixes: what is around them in those of the state.

    Raises MapError if some of the parameters that a tensor is made of have it, and others have not.
    """
    having = [name for name in match.names if name in bases]
    if len(match.sources) == 1 and match.equal:
        return match._replace(sources=dict.fromkeys(match.sources, having[0]), equal=tuple(having[1:]))
    targets = {}
    for place, target in match.targets.items():
        parts = dict.fromkeys(match.sources[pair.source] for pair in match.geometry.targets[place].pairs)
        needed = [*parts, *match.equal]
        lacking = [name for name in needed if name not in bases]
        if not lacking:
            targets[place] = target
        elif len(lacking) < len(needed):
            raise MapError(
                "some of the parameters that are put together have a state that others have not",
                expected=", ".join(map(affixes.around, needed[:_MAX_NAMED])),
                got=f"not there, or of another shape: {', '.join(map(affixes.around, lacking[:_MAX_NAMED]))}",
                where=match.rule.where,
            )
    return match._replace(
        sources={place: name for place, name in match.sources.items() if name in bases},
        targets=targets,
        geometry=match.geometry._replace(targets={place: match.geometry.targets[place] for place in targets}),
    )


def _is_sum(shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> bool:
    """Tell whether state has the shape of sums over some axes of its parameter, which has two axes or more."""
    is_alike = len(shape) == len(of_parameter) > 1 and all(size in (1, own) for size, own in zip(shape, of_parameter))
    return is_alike and shape != of_parameter


def is_copied(match: Match, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether tensors that an equation makes are its source as it is, under other names."""
    wholes = [BoxPair.whole(place, shapes[name]) for place, name in match.sources.items()]
    return all(
        [pair._replace(order=None) for pair in made.pairs] == wholes
        and not made.zeros
        and all(pair.order in (None, tuple(range(len(made.shape)))) for pair in made.pairs)
        for made in match.geometry.targets.values()
    )


def _chosen(
    rules: Sequence[EquationRule], targets: Sequence[str], direction: Direction, like: TemplateShapes | None
) -> EquationRule | None:
    """Return the first rule that makes state that the target is to have.

    Args:
        targets: the names of the parameters that it is made for.
    """
    for rule in rules:
        if like is None or all(target_affixes(rule, direction).around(name) in like for name in targets):
            return rule
    return None


def _of_kept(rule: EquationRule, name: str, target: str, inventory: Inventory) -> Match:
    """Return how the state of a parameter that no equation takes gets another name."""
    place = TermTensor(0, ())
    whole = Assembly.whole(place, inventory[name].shape)
    return Match(rule, {place: name}, {place: target}, Geometry({place: whole}, {}))


def _state(
    match: Match,
    affixes: NameAffixes,
    target_affixes: NameAffixes,
    inventory: Inventory,
    state_rule: EquationRule | None,
) -> Match:
    """Return how the state of the tensors of a match follows them. state_rule: the one that gives it other affixes."""
    rule = match.rule if state_rule is None else match.rule._replace(warning=state_rule.warning)
    sources = {place: affixes.around(name) for place, name in match.sources.items()}
    targets = {place: target_affixes.around(name) for place, name in match.targets.items()}
    equal = tuple(map(affixes.around, match.equal))
    shapes_alike = all(
        inventory[sources[place]].shape == inventory[name].shape for place, name in match.sources.items()
    )
    if shapes_alike and not (affixes.is_number and prod(inventory[next(iter(sources.values()))].shape) == 1):
        return Match(rule, sources, targets, match.geometry, equal)
    # A number of each parameter, such as its step: all must have the same.
    (first, name), *others = sources.items()
    whole = Assembly.whole(first, inventory[name].shape)
    return Match(
        rule,
        {first: name},
        targets,
        Geometry(dict.fromkeys(targets, whole), {}),
        (*(other for _, other in others), *equal),
    )


class MadeParameter(NamedTuple):
    """A parameter that a map has made: its name, and the names of the parameters of the source that are in it."""

    name: str
    sources: frozenset[str]
    whole: str = ""  # its name with what the model's begin with, where `name` lacks it


def made_in(
    path: str,
    source_path: str,
    names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of an optimizer's, each by the name that the optimizer has for it, and those left out.

    These are names of tensors; or names as their state has them (`optim.state.fc.weight.exp_avg`); or else the names of
    tensors without what all of the model's begin with (`model.fc.weight`).

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
        names: of the optimizer's parameters in the source.
        tensors: names of the source's tensors, be anything made of them or not.
        parameters: all that is made.

    Raises MapError if names fit several models that become different ones.
    """
    known = frozenset(names)
    if beginning_of(known, source_path, tensors) is not None:
        below, gone = made_below(known, known, source_path, tensors, parameters, where)  # whatever else has such a name
        return _called_as_state(below, _followed_by_state(path, source_path, known, parameters)), gone
    made = [parameter for parameter in parameters if not known.isdisjoint(parameter.sources)]
    left = known.difference(*(parameter.sources for parameter in made))
    by_state = _followed_by_state(path, source_path, left, parameters)
    left = left.difference(*(parameter.sources for parameter in by_state))
    whole = frozenset(name for name in left if name in tensors)  # these are left out
    below, gone = made_below(left - whole, known, source_path, tensors, parameters, where)
    return [*made, *by_state, *below], gone | whole


def made_below(
    left: Collection[str],
    names: Collection[str],
    source_path: str,
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of `left`, and the rest of these, where names lack the beginning of all the model's.

    There is no rest if no beginning fits.

    Args:
        left: the parameters; names: these and others of the optimizer. The others as in `made_in`.
    """
    if not left:
        return [], frozenset()
    fitting = _begins(names, source_path, tensors) or _begins(left, source_path, tensors)
    made_of = (tuple(_below(begin, left, parameters)) for begin in fitting)
    made_by_model = {frozenset(made): made for made in made_of if made}  # each in the order of the parameters
    if len(made_by_model) > 1:
        raise MapError(
            "which model an optimizer belongs to cannot be told, and its parameters become different ones",
            expected="one model with these parameters",
            got=", ".join(sorted(fitting)),
            where=where,
            remedy="leave all but one of the models out (--exclude), or the optimizer's state",
        )
    made = [parameter for of_model in made_by_model.values() for parameter in of_model]
    return made, frozenset(left if fitting else ()).difference(*(parameter.sources for parameter in made))


def beginning_of(names: Collection[str], source_path: str, tensors: Collection[str]) -> str | None:
    """Return what names of tensors have before all names of an optimizer; None if several fit, or these are whole."""
    begins = [] if all(name in tensors for name in names) else _begins(names, source_path, tensors)
    return begins[0] if len(begins) == 1 else None


def _begins(names: Collection[str], source_path: str, tensors: Collection[str]) -> list[str]:
    """Return what names of tensors outside of an optimizer have before all of its names."""
    one = next(iter(names))
    others = (name for name in tensors if not (source_path and name.startswith(source_path)))
    begins = {name.removesuffix(one) for name in others if name.endswith(f".{one}")}
    fitting = [begin for begin in begins if all(f"{begin}{name}" in tensors for name in names)]
    return without_state_of_others(fitting)


def _below(begin: str, names: Collection[str], parameters: Sequence[MadeParameter]) -> Iterator[MadeParameter]:
    """Yield the parameters made of a model's, without what its names begin with in the target."""
    of_model = [each for each in parameters if any(name.startswith(begin) for name in each.sources)]
    new_begin = begin_in_target(begin, ((each.name, each.sources) for each in of_model))
    for parameter in of_model:
        of_it = frozenset(name.removeprefix(begin) for name in parameter.sources if name.startswith(begin))
        if not of_it.isdisjoint(names):
            yield MadeParameter(parameter.name.removeprefix(new_begin), of_it, parameter.name)


def is_taken_off(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> bool:
    """Tell whether maps take off what names of a model begin with, as where `model.fc.w` becomes `fc.w`.

    A name that begins so afterwards is then the name of a part that is called so. If all names still begin so, they lie
    in the same dictionary of the file as before.

    Args:
        made: the names of what is made of the model's tensors, tied ones too, each with those of its sources.
    """
    sources_of = dict(made)
    if any(name in sources for name, sources in sources_of.items()):
        return False
    return any(not name.startswith(begin) for name in sources_of)


def begin_in_target(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> str:
    """Return what names of a model begin with in the target: its dictionary is moved with all that is in it, or stays.

    Where maps take off what they begin with, and the names go on otherwise, it is nothing: they lie in no dictionary of
    their own.

    Args:
        begin, made: as of `is_taken_off`.
    """
    made = list(made)
    if not is_taken_off(begin, made):
        return begin
    pairs = [(name, source[len(begin) :]) for name, own in made for source in own if source.startswith(begin)]
    begins = {name.removesuffix(end) if f".{name}".endswith(f".{end}") else "" for name, end in pairs}
    return begins.pop() if len(begins) == 1 else ""


def _called_as_state(made: Sequence[MadeParameter], by_state: Sequence[MadeParameter]) -> list[MadeParameter]:
    """Return parameters by the names that equations give to their state, where these are unambiguous."""
    name_of = {parameter.sources: parameter.name for parameter in by_state}
    counts = Counter(parameter.sources for parameter in (*made, *by_state))
    are_paired = {sources for sources, count in counts.items() if sources in name_of and count == 2}
    return [each._replace(name=name_of[each.sources]) if each.sources in are_paired else each for each in made]


def _followed_by_state(
    path: str, source_path: str, names: Collection[str], parameters: Sequence[MadeParameter]
) -> list[MadeParameter]:
    """Return parameters that no tensor is named after, as those are called whose state is made of theirs.

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
    """
    begin, source_begin = f"{path}state.", f"{source_path}state."
    names_of: dict[str, set[str]] = {}
    for tensor in parameters if names else ():
        if not tensor.name.startswith(begin):
            continue
        for source in tensor.sources:
            name, dot, key = source.removeprefix(source_begin).rpartition(".")
            while dot and name not in names:
                name, dot, last = name.rpartition(".")
                key = f"{last}.{key}"
            if dot and source.startswith(source_begin) and tensor.name.endswith(f".{key}"):
                names_of.setdefault(tensor.name[len(begin) : -len(key) - 1], set()).add(name)
    return [MadeParameter(name, frozenset(sources)) for name, sources in names_of.items()]


def by_both_names(
    path: str,
    own_names: Collection[str],
    source_path: str,
    source_names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
    *,
    are_whole: bool,
) -> dict[str, frozenset[str]]:
    """Return, for parameters as an optimizer of a nest calls them, their sources as the source's optimizer does.

    Args:
        path, source_path: what names of tensors in these optimizers begin with.
        tensors: names of the source's tensors.
        are_whole: whether `own_names` are names of tensors.
    """
    made, gone = made_in(path, source_path, source_names, tensors, parameters, where)
    if are_whole:
        return {each.whole or each.name: each.sources for each in made}
    sources = {each.name: each.sources for each in made}
    left = [name for name in own_names if name not in sources and name not in gone]
    ends = {whole: name for name in left[:1] for whole in sources if whole.endswith(f".{name}")}
    begins = [whole.removesuffix(name) for whole, name in ends.items()]
    of_all = [begin for begin in begins if all(f"{begin}{name}" in sources for name in own_names)]
    own_sources = dict(sources)
    for name in own_names if len(of_all) == 1 else left:  # one may be the whole name of another
        fitting = {sources[f"{begin}{name}"] for begin in of_all}
        fitting = fitting or {own for whole, own in sources.items() if whole.endswith(f".{name}")}
        if len(fitting) > 1:
            raise MapError(
                "which parameter of the source an optimizer has cannot be told, since several end in its name",
                expected="names that begin as the model's tensors do, or one model with these parameters",
                got=f"{name}: {', '.join(sorted(min(own) for own in fitting))}",
                where=where,
                remedy="give --like a checkpoint whose optimizer has the names of the model's tensors, or leave the"
                " optimizer's state out (--exclude)",
            )
        if fitting:
            own_sources[name] = fitting.pop()
    return own_sources
