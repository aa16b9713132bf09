"""Tell by names the kinds of tensors (`kind_of`), their layers and kin (`kin_of`), and owners of state (`owners`).

Only names are looked at, so it is a guess where a framework lets users choose names. Wrong guesses of kinds change what
is counted, and what is compared with what, but never a byte that is written.

`moments.w`, `adam_m.w`, `optimizer.state.w.exp_avg` and `optimizer.state.w.step` belong to `w`: one of the words around
the name is one that optimizers use. `encoder.w` is another parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.groups import grouped
from reshard_mpi.sharding.state_names import (
    COPIES,
    MODULE_WORDS,
    NO_MOMENTS,
    PART,
    STATE_KEY,
    STATE_WORDS,
    SURE,
    dotted,
    parts_of,
)
from reshard_mpi.sharding.strategy import named_after

if TYPE_CHECKING:
    from reshard_mpi.mapping.direction import Direction, Inventory
    from reshard_mpi.mapping.equations import NamePattern
    from reshard_mpi.mapping.rules import EquationRule, Rules

# Words in the names of step counters of parameters.
COUNTS = frozenset(("step", "state_step"))
# What torch's optimizers have as one number of each parameter besides, behind its name (NAdam, ASGD).
_NUMBERS_OF_TORCH = frozenset(("eta", "mu", "mu_product"))
_COUNTS_OF_RUNS = frozenset(
    (
        *("_step_count", "current_iterator_step", "epoch", "epoch_num", "global_step", "global_steps", "iteration"),
        *("last_epoch", "last_overflow_iterator_step", "step_num"),
    )
)
_ALL_COUNTS = COUNTS | _COUNTS_OF_RUNS
# What Megatron calls such a copy, behind `state.`
_COPY_BEHIND_STATE = "param"
# Keys of models in trainings.
OF_MODEL = frozenset(("language_model", "model", "model_state_dict", "module", "network", "state_dict"))
# First words of what belongs neither to a model nor to a parameter, and the last one of what torch calls a module's
# own state.
_OF_RUN = frozenset(
    (
        *("args", "beta1_power", "beta2_power", "callbacks", "client_state", "ds_config", "extra_state"),
        *("grad_scaler", "learning_rate", "loops", "loss_scale", "lr_scheduler", "lr_schedulers"),
        *("opt_param_scheduler", "random_states", "rerun_state_machine", "rng", "rng_state", "scale_sense"),
        *("scaler", "scheduler"),
    )
)
_EXTRA_STATE = "_extra_state"

_LAYER = re.compile(r"(?:^|[./])(?:\w*layers?|\w*blocks?|h)[._/]?(\d{1,9})(?=[./]|$)", re.ASCII)
_EXPERT = re.compile(r"(?:^|[./])\w*experts?[._/]?(\d{1,9})(?=[./]|$)", re.ASCII)


class TensorKind(StrEnum):
    """The kind of a tensor, or of a value beside tensors, in a training's state."""

    MODEL = "model"  # weights and buffers
    COPY = "copy"  # a copy of a weight in float32, from which the optimizer goes on
    MOMENT = "moment"  # what an optimizer keeps of a parameter besides
    STEP = "step"  # a count of steps, of a parameter or of the run
    OTHER = "other"  # gradients, averages of weights, random states, settings, schedulers

    @property
    def branch(self) -> str:
        """The part of a training's state that has it: model, optimizer or other."""
        return self if self in (TensorKind.MODEL, TensorKind.OTHER) else "optimizer"


def kind_of(name: str) -> TensorKind:
    """Return the kind of a tensor: of `moments.w` and `optimizer.state.w.exp_avg` MOMENT, of `w` MODEL.

    A last word that is an optimizer's tells it, else the first word that is an optimizer's or a model's:
    `exp_avg.model.w` is a moment, `model.ema.w` the model's.
    """
    parts = parts_of(name) or (name,)
    first, last = parts[0], parts[-1]
    is_count = last in _ALL_COUNTS
    if first in _OF_RUN or last == _EXTRA_STATE:
        return TensorKind.STEP if is_count else TensorKind.OTHER
    if len(parts) == 1 or not _is_state(parts):
        return TensorKind.STEP if is_count and len(parts) == 1 else TensorKind.MODEL
    if is_count or first in COUNTS:
        return TensorKind.STEP
    if not NO_MOMENTS.isdisjoint(parts):
        return TensorKind.OTHER
    is_copy = not COPIES.isdisjoint(parts) or (STATE_KEY, _COPY_BEHIND_STATE) in pairwise(parts)
    return TensorKind.COPY if is_copy else TensorKind.MOMENT


def _is_state(parts: Sequence[str]) -> bool:
    if parts[0] in STATE_WORDS | COUNTS or parts[-1] in SURE:
        return True
    words = SURE | {STATE_KEY} if parts[-1] in COUNTS else SURE  # an optimizer may have any key
    return next((word for word in parts if word in OF_MODEL or word in words), None) in words


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is of: 3 of `model.layers.3.w`, `h.3.w` and `layer3.w`."""
    return _number_in(name, _LAYER)


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor is of: 7 of `model.layers.3.mlp.experts.7.w`."""
    return _number_in(name, _EXPERT)


def _number_in(name: str, pattern: re.Pattern[str]) -> int | None:
    found = pattern.search(name)
    return None if found is None else int(found[1])


def kin_of(name: str) -> str:
    """Return a name with stars in place of its layer and expert: all tensors that have it alike are kin.

    Of `model.layers.3.mlp.experts.7.w` it is `model.layers.*.mlp.experts.*.w`.
    """
    for pattern in (_EXPERT, _LAYER):
        found = pattern.search(name)
        if found is not None:
            name = f"{name[: found.start(1)]}*{name[found.end(1) :]}"
    return name


class NameAffixes(NamedTuple):
    """The text before and behind a parameter's name in its state's name."""

    before: str
    behind: str

    @property
    def is_count(self) -> bool:
        """Whether the affixes belong to a count of steps."""
        return not COUNTS.isdisjoint((*parts_of(self.before), *parts_of(self.behind)))

    @property
    def is_number(self) -> bool:
        """Whether they belong to one number of a parameter, which has the shape of a parameter of one element too."""
        return self.is_count or (self.are_of_torch and parts_of(self.behind)[-1] in _NUMBERS_OF_TORCH)

    @property
    def is_of_optimizer(self) -> bool:
        """Whether one of the words is an optimizer's, and no module is called so."""
        return _is_of_optimizer((*parts_of(self.before), *parts_of(self.behind)))

    @property
    def has_word_beside(self) -> bool:
        """Whether the part right before or behind is an optimizer's word, but for torch's key of all state."""
        beside = {*parts_of(self.before)[-1:], *parts_of(self.behind)} - {STATE_KEY}
        return not beside.isdisjoint(STATE_WORDS | COUNTS)

    @property
    def are_of_torch(self) -> bool:
        """Whether they are `state` and a key of the state, as in torch's optimizers: `optim.state.w.exp_avg`."""
        return parts_of(self.before)[-1:] == (STATE_KEY,) and self.behind != ""

    @classmethod
    def of(cls, pattern: NamePattern) -> NameAffixes:
        """Return the affixes of the only capture in a name."""
        return cls(*pattern.literals)

    def around(self, name: str) -> str:
        return f"{self.before}{name}{self.behind}"

    def within(self, name: str) -> str | None:
        """Return the text between the affixes in a name; None if the name does not have them."""
        if not (name.startswith(self.before) and name.endswith(self.behind)):
            return None
        return name[len(self.before) : len(name) - len(self.behind)] or None


def is_state(name: str, rules: Rules, inventory: Inventory, direction: Direction) -> bool:
    """Tell whether a tensor is state that `rules.states` speak of; equations of parameters do not take it."""
    return parted_by(name, (source_affixes(rule, direction) for rule in rules.states), inventory) is not None


def owners(
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    rules: Rules | None,
    direction: Direction | None,
    told: Mapping[str, str],
    *,
    in_target: bool = False,
) -> dict[str, str]:
    """Return, by name, the parameters that tensors are state of; other tensors are left out.

    Args:
        names: of some of the tensors of the source, or of the target.
        shapes: of all of them.
        told: parameters that optimizers tell, in place of those that names tell.
    """
    side = target_affixes if in_target else source_affixes
    state_rules = [] if rules is None or direction is None else [side(rule, direction) for rule in rules.states]
    parameters = with_state(shapes)
    parted = ((name, _parameter_of(name, state_rules, shapes)) for name in names if name not in parameters)
    found = ((name, told[name] if told.get(name) in shapes else own[0]) for name, own in parted if own is not None)
    return {name: owner for name, owner in found if owner != name}


class OwnersInPart(NamedTuple):
    """Parameters of state, by its name, which has the end of the parameter's name behind a word for state."""

    owner_of: Mapping[str, str]
    in_doubt: Mapping[str, str]  # of what may be a module with such a word for its name

    def require_no_doubt(self, gone: Container[str], kept: Iterable[str]) -> None:
        """Raise MapError if a tensor that is kept may be state of one that goes."""
        for name in kept:
            owner = self.in_doubt.get(name)
            if owner in gone and name not in gone:
                raise MapError(
                    f"{owner} is left out, and its name does not tell whether {name} is state of it, or a parameter",
                    expected="a model below a key such as model, and its state beside that",
                    got=f"two tensors of one shape: {owner}, {name}",
                    remedy=f"leave both out (--exclude '{name}', or drop in a map), or take what is to stay by its"
                    " names alone (--include)",
                )


def owners_in_part(shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, str]) -> OwnersInPart:
    """Return the parameters of state that has the end of a parameter's name behind a word for state.

    The model may be below a key: `model.w` beside `optimizer.state.w.exp_avg`. Where several end so, none is told.

    Args:
        shapes: of all tensors.
        told: parameters that optimizers tell.
    """
    owner_of = {name: owner for name, owner in told.items() if name in shapes and owner in shapes}
    in_doubt: dict[str, str] = {}
    words_of = {name: STATE_WORDS.intersection(parts_of(name)) for name in shapes if name not in owner_of}
    parameters = [name for name, words in words_of.items() if not words]
    # What may be a module comes first: it may have state itself.
    modules = {name for name, words in words_of.items() if words and words <= MODULE_WORDS}
    for name, owner, end, affixes in _in_part(modules.difference(owner_of.values()), parameters, ()):
        before, behind, begin = parts_of(affixes.before), parts_of(affixes.behind), dotted(owner).removesuffix(end)
        if _is_beside_model(before, behind, begin):
            owner_of[name] = owner
        elif has_shape_of(name, owner, shapes) and may_be_state(before, behind, begin, parameters):
            in_doubt[name] = owner
    left = {name for name, words in words_of.items() if words and name not in owner_of}
    modules = left & {*modules, *owner_of.values(), *with_state(shapes)}
    owner_of |= {name: owner for name, owner, _, _ in _in_part(left - modules, parameters, modules)}
    owner_of = {name: owner for name, owner in owner_of.items() if has_shape_of(name, owner, shapes)}
    with_own = frozenset(owner_of.values())
    return OwnersInPart(owner_of, {name: owner for name, owner in in_doubt.items() if name not in with_own})


def _in_part(
    names: Iterable[str], parameters: Collection[str], modules: Collection[str]
) -> Iterator[tuple[str, str, str, NameAffixes]]:
    """Yield names of state, each with the parameter that ends so, that end, and its affixes.

    State that has the whole name of one is not meant.

    Args:
        parameters: those that state is looked for of; modules: others, which are asked where none of these ends so.
    """
    every = {dotted(name): name for name in (*parameters, *modules)}
    ends = {end for name in every for end in ends_of(name) if not end.isdecimal()}  # torch has numbers
    known = ends | every.keys()
    found = ((name, parted_anywhere(dotted(name), known)) for name in names)
    parted = [(name, *each) for name, each in found if each is not None and each[0] not in every]
    parted = [each for each in parted if not STATE_WORDS.isdisjoint(parts_of(each[2].before)[-1:])]
    used = frozenset(end for _, end, _ in parted)
    by_end = grouped((next((end for end in ends_of(name) if end in used), ""), name) for name in every.values())
    for name, end, affixes in parted:
        own = by_end.get(end, [])
        own = [each for each in own if each not in modules] or own
        if len(own) == 1:
            yield name, own[0], end, affixes


def may_be_state(before: Sequence[str], behind: Sequence[str], begin: str, others: Iterable[str]) -> bool:
    """Tell whether a tensor is state of a parameter rather than of a module called `state`, `ema` or the like.

    State lies beside the model: `adam_m.w`, `ema.w` with `model.w`. If all names begin alike, that may be the model's
    key, whatever it is called.

    Args:
        before, behind: the parts of its name around a part of the parameter's.
        begin: what is before that in the parameter's name.
        others: the names of all tensors that are not named as state is.
    """
    is_beside = _is_beside_model(before, behind, begin)
    return is_beside or all(name.startswith(begin) for name in map(dotted, others) if "." in name)


def _is_beside_model(before: Sequence[str], behind: Sequence[str], begin: str) -> bool:
    first, _, keys = begin.removesuffix(".").partition(".")
    is_beside = first not in before[:1] and (keys or first).rpartition(".")[2] in OF_MODEL
    return is_beside or _is_of_optimizer((*before, *behind))


def _is_of_optimizer(parts: Sequence[str]) -> bool:
    return not STATE_WORDS.intersection(parts) <= MODULE_WORDS


def ends_of(name: str) -> Iterator[str]:
    """Yield the text behind each dot or slash of a name, with dots in it."""
    return named_after(dotted(name))


def with_state(names: Collection[str]) -> frozenset[str]:
    """Return the tensors that have state of their own (`optimizer.state.ema.w.exp_avg`), so they are none of others.

    So has `ema.w` if there are `adam_m.ema.w` and `adam_m.w`.
    """
    by_dots = {dotted(name): name for name in names}
    parameters = set()
    for name in by_dots:
        _, found, rest = f".{name}".partition(f".{STATE_KEY}.")
        while found and rest:
            rest = rest.rpartition(".")[0]
            if rest in by_dots:
                parameters.add(rest)
                break
    words_of = ((name, STATE_WORDS.intersection(parts_of(name))) for name in by_dots)
    parted = ((name, parted_anywhere(name, by_dots)) for name, words in words_of if words and words <= MODULE_WORDS)
    owner_of = {name: owner[0] for name, owner in parted if owner is not None}
    for name in by_dots if owner_of else ():
        head, dot, key = name.rpartition(".")
        around = [(end, NameAffixes(name.removesuffix(end), "")) for end in ends_of(name)]
        for own, affixes in (*around, (head, NameAffixes("", f"{dot}{key}"))):
            if own in owner_of and affixes.is_of_optimizer and affixes.around(owner_of[own]) in by_dots:
                parameters.add(own)
    return frozenset(map(by_dots.__getitem__, parameters))


def without_state_of_others(begins: Collection[str]) -> list[str]:
    """Return the beginnings of names that end with no other of them: `moment.model.` is state of `model.`."""
    return [begin for begin in begins if not any(begin != other and begin.endswith(other) for other in begins)]


def owned_by(name: str, owner_of: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameter that a tensor is state of, and so on where that is state itself."""
    while name in owner_of:
        name = owner_of[name]
        yield name


def _parameter_of(
    name: str, all_affixes: Iterable[NameAffixes], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, NameAffixes] | None:
    """Return the parameter that owns a state tensor, and the affixes of the name; None if it is no state.

    Args:
        all_affixes: what maps have around names of parameters in those of their state.
    """
    parted = parted_by(name, all_affixes, shapes) or parted_anywhere(name, shapes)
    return parted if parted is not None and has_shape_of(name, parted[0], shapes) else None


def has_shape_of(name: str, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a tensor has a shape that state of a parameter has: the parameter's, or one element."""
    return shapes[name] == shapes[parameter] or prod(shapes[name]) == 1


def parted_by(
    name: str, all_affixes: Iterable[NameAffixes], inventory: Container[str]
) -> tuple[str, NameAffixes] | None:
    """Return the parameter that owns a state tensor and the affixes of the name, if that is known."""
    bases = ((affixes.within(name), affixes) for affixes in all_affixes)
    return next(((base, affixes) for base, affixes in bases if base is not None and base in inventory), None)


def parted_anywhere(name: str, inventory: Container[str]) -> tuple[str, NameAffixes] | None:
    """Find the longest name among `inventory` inside a state tensor's name: `optim.exp_avg.fc.w` gives (`fc.w`, its
    affixes).

    Names between `state.` and a key come first: `optim.state.w.exp_avg` is of `w`, even if there is a parameter
    `state.w`.
    """
    spans = [part.span() for part in PART.finditer(name)]
    parts = parts_of(name)
    found: tuple[str, NameAffixes] | None = None
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1 - is_behind_parameter(parts, length)):
            first, last = spans[start][0], spans[start + length - 1][1]
            if name[first:last] in inventory and not STATE_WORDS.isdisjoint((*parts[:start], *parts[start + length :])):
                parted = name[first:last], NameAffixes(name[:first], name[last:])
                if start > 0 and parts[start - 1] == STATE_KEY and start + length < len(parts):
                    return parted
                found = found or parted
    return found


def is_behind_parameter(parts: Sequence[str], length: int) -> bool:
    """Tell whether `length` parts at the end of a name are a key of state behind its parameter: `state.w.step`.

    A parameter may be called `step` as well.
    """
    return length == 1 and parts[-1] in STATE_WORDS and STATE_KEY in parts[:-2]


def source_affixes(rule: EquationRule, direction: Direction) -> NameAffixes:
    (source,), _ = direction.sides(rule)
    return NameAffixes.of(source.name)


def target_affixes(rule: EquationRule, direction: Direction) -> NameAffixes:
    _, (target,) = direction.sides(rule)
    return NameAffixes.of(target.name)


def is_named_like_state(name: str) -> bool:
    """Tell whether a part of a tensor's name is a word that optimizers use for their state."""
    return not STATE_WORDS.isdisjoint(parts_of(name))
