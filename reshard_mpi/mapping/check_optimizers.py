"""Check that a target's optimizers have the state of their own parameters (`require_own_state`).

Equations, names and groups are carried on by different rules. What came out of them is compared here with the source,
by one rule: what becomes of a parameter becomes of its state, in an optimizer that has the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in, names_by_path
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.numbered_optimizers import WRAPPERS, begins_of
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY, Form, Optimizer
from reshard_mpi.mapping.result import DerivedTensor, names_taken, taken_of
from reshard_mpi.mapping.tensor_kinds import without_state_of_others
from reshard_mpi.sharding.strides import paired
from reshard_mpi.text import shortened

_EXPECTED = "each parameter of an optimizer with its own state, which is renamed, cut and turned as the parameter is"
_REMEDY = (
    "write equations for the parameter and for its state, in the names that each has in the source, be it the same"
    " names on both sides; or leave the optimizer out (--exclude)"
)


class MadeTensors(NamedTuple):
    """The tensors of a target that are made of others, by name."""

    made: Mapping[str, DerivedTensor]
    sources_of: Mapping[str, Collection[str]]  # what is equal to a source is a source as well


class _Fault(NamedTuple):
    """A fault of a target's optimizer: the problem, a tensor that shows it, and what to do."""

    problem: str
    got: str
    remedy: str = _REMEDY


class _Side(NamedTuple):
    """An optimizer of the source or the target, with names of tensors."""

    optimizer: Optimizer
    begin: str  # what these have before the optimizer's names of parameters
    owner_of: Mapping[str, str]  # by tensor of its state: the parameter, by the name of its tensor
    unowned: Sequence[str]  # tensors below `state` of no parameter

    @property
    def parameters(self) -> list[str]:
        return [f"{self.begin}{name}" for name in self.optimizer.parameters]


def require_own_state(
    pairs: Iterable[tuple[Optimizer, Optimizer]], inventory: Inventory, target: MadeTensors, where: str
) -> None:
    """Raise MapError if a target's optimizer has state of other parameters, or lacks some of its own.

    Args:
        pairs: the target's optimizers, each with the source's.
        inventory: of the source's tensors.
        where: the source, for errors.
    """
    used = frozenset[str]().union(*target.sources_of.values())
    left_out = inventory.keys() - used
    for own, of_source in pairs:
        if Form.UNKNOWN in (own.form, of_source.form):
            continue
        _require_none_in_doubt(of_source, inventory, used, where)
        target_sides = _sides(own, _beginnings(own, target.made) or [""], target.made)
        sides = _sides(of_source, _models(of_source, inventory), inventory)
        kept = [side for side in sides if not used.isdisjoint(side.parameters)]
        for source_side in kept or sides:  # a model that is left out, such as an average, is not the optimizer's
            trained = frozenset(source_side.parameters)
            compared = (_Compared(side, source_side, trained, inventory, left_out, target) for side in target_sides)
            faults = [each.fault() for each in compared]
            fault = faults[0] if all(faults) else _taken_out(target_sides, source_side, target)
            if fault is not None:
                raise MapError(fault.problem, expected=_EXPECTED, got=fault.got, where=where, remedy=fault.remedy)
        if any(used.issuperset(side.parameters) for side in sides):
            _require_one_model(own, target.made, where)


def _require_one_model(own: Optimizer, made: Mapping[str, DerivedTensor], where: str) -> None:
    """Raise MapError if the parameters of an optimizer, which may have no state, are put into several models.

    Names in the optimizer would go by the one for some of them, and by the other for others.
    """
    counts = _beginnings(own, made).values()
    if own.form is Form.NUMBERS or not own.parameters or any(count == len(own.parameters) for count in counts):
        return
    others = [name for name in made if not (own.path and name.startswith(own.path))]
    found = {name[len(begin) :]: name for name in others for begin in _begins(name, own.parameters)}
    if len(found) == len(own.parameters):
        raise MapError(
            "parameters of one optimizer are put into several models",
            expected=_EXPECTED,
            got=shortened([*found.values()]),
            where=where,
            remedy="write equations for all of the model, or leave the optimizer out (--exclude)",
        )


def owners_by_names(optimizers: Iterable[Optimizer], tensors: Collection[str]) -> dict[str, str]:
    """Return, by name, the parameters that tensors are state of, as far as optimizers tell by names of parameters.

    Another tensor may have such a name as its whole name: `model.fc` is `model.model.fc` to the optimizer of a model
    below the key `model`. A wrapper may be before all of an optimizer's names, and not before the model's: `module.fc`.
    """
    owner_of: dict[str, str] = {}
    for optimizer in (each for each in optimizers if each.form in (Form.NAMES, Form.FLAT)):
        wrapper, models = _models_behind(optimizer, tensors)
        if len(models) == 1 and {*WRAPPERS}.issuperset(wrapper.split(".")[:-1]):
            (side,) = _sides(optimizer, [""], tensors)
            owners = {state: f"{models[0]}{name.removeprefix(wrapper)}" for state, name in side.owner_of.items()}
            owner_of |= {state: owner for state, owner in owners.items() if owner in tensors}
    return owner_of


def _require_none_in_doubt(optimizer: Optimizer, inventory: Collection[str], used: Collection[str], where: str) -> None:
    """Raise MapError if a tensor is excluded whose state may stay, since names in the optimizer begin otherwise.

    Args:
        optimizer: of the source.
        used: the names of the tensors that go into the target.
    """
    wrapper, models = _models_behind(optimizer, inventory)
    if not wrapper:
        return
    (side,) = _sides(optimizer, [""], inventory)
    states = {state: name.removeprefix(wrapper) for state, name in side.owner_of.items() if state in used}
    kept = [begin for begin in models if any(f"{begin}{name}" in used for name in states.values())]
    for begin in kept:  # a model that is left out, such as an average, is not the optimizer's
        for state, name in states.items():
            parameter = f"{begin}{name}"
            if parameter in inventory and parameter not in used:
                raise MapError(
                    f"{parameter} is excluded, and its state may not be",
                    expected="names in the optimizer that are the model's, or go on as these do behind"
                    f" {' or '.join(WRAPPERS)}",
                    got=f"{state}: {wrapper}{name} may be this parameter, or one of another model",
                    where=where,
                    remedy=_excluding(side, state),
                )


def require_no_part_left_out(
    root: Any, optimizers: Sequence[Optimizer], inventory: Inventory, used: Collection[str], where: str
) -> None:
    """Raise MapError if a part of a model is excluded, and its state stays in an optimizer that may be the model's.

    Nothing tells whose its numbers are, as with two models and two optimizers. A whole model may be left out.

    Args:
        root: of the source's nest.
        optimizers: of the source.
        used: the names of the tensors that go into the target.
    """
    apart = tuple(begin for each in optimizers for begin in begins_of(each.path))
    models = names_by_path(inventory, {path for path, _ in dictionaries_in(root)})
    models[""] = [*inventory]
    inner = {name: path for path in sorted(models, key=len) for name in models[path] if not name.startswith(apart)}
    with_kept = {path for name, path in inner.items() if name in used}
    for optimizer in (each for each in optimizers if each.form is Form.UNKNOWN):
        begin = f"{optimizer.path}{STATE_KEY}."
        states = [name for name in inventory if name.startswith(begin) and prod(inventory[name].shape) > 1]
        kept = {inventory[name].shape: name for name in states if name in used}
        for shape in [inventory[name].shape for name in states if name not in used]:
            kept.pop(shape, None)  # the state is excluded as well
        for name, path in inner.items():
            shape = inventory[name].shape
            if name not in used and path in with_kept and shape in kept:
                model = f"the whole model (--exclude '{path}*'), or " * bool(path)
                raise MapError(
                    f"{name} is excluded, and its state may not be",
                    expected="names of parameters beside the numbers (`param_names`), or one model and one optimizer:"
                    " else nothing tells whose the numbers are",
                    got=f"{kept[shape]}, of its shape",
                    where=where,
                    remedy=f"leave out {model}the state as well (--exclude '{begin}*')",
                )


def _models_behind(optimizer: Optimizer, tensors: Collection[str]) -> tuple[str, list[str]]:
    """Return what names in an optimizer have before the model's, and what names of each such model begin with.

    An average has the same names as the model.
    """
    wrapper, inner = "", optimizer
    while not _beginnings(inner, tensors):
        parted = {name.partition(".")[:2] for name in inner.parameters}
        if len(parted) != 1 or not all(dot for _, dot in parted):
            return "", [""]
        before = "".join(parted.pop())
        wrapper += before
        places = {name.removeprefix(before): place for name, place in inner.parameters.items()}
        inner = inner._replace(parameters=places)
    return wrapper, _models(inner, tensors)


class _Compared(NamedTuple):
    """An optimizer of the target, held against the source's that it has come of."""

    own: _Side
    of_source: _Side
    trained: frozenset[str]  # the parameters of the source's
    inventory: Inventory
    left_out: Collection[str]  # names of source tensors
    target: MadeTensors

    def fault(self) -> _Fault | None:
        """Return the first fault of the target's optimizer; None if there is none."""
        of_states = map(self._fault_of_state, (*self.own.owner_of, *self.own.unowned))
        of_parameters = map(self._fault_of_parameter, self.own.parameters)
        return next(filter(None, chain(of_states, of_parameters, self._lacking_state())), None)

    def _states(self, name: str) -> list[str]:
        """Return the state of the source's optimizer that a tensor is made of."""
        return [state for state in self.target.sources_of[name] if state in self.of_source.owner_of]

    def _is_of(self, state: str, owner: str) -> bool:
        """Tell whether a parameter of the target is made of the parameter that state of the source is of."""
        parameter = self.of_source.owner_of[state]
        origins = self.target.sources_of.get(owner)
        return parameter in origins if origins is not None else parameter not in self.inventory

    def _fault_of_state(self, name: str) -> _Fault | None:
        """Return the fault of a tensor among the optimizer's state: of others, of none, or arranged otherwise."""
        states, owner_of = self._states(name), self.of_source.owner_of
        for state in states:
            if owner_of[state] in self.left_out:
                problem = f"{owner_of[state]} is excluded, and its state is not"
                return _Fault(problem, state, _excluding(self.of_source, state))
        if name not in self.own.owner_of:
            if states:
                return _Fault(f"state of {owner_of[states[0]]} would be of no parameter", name)
            among = sorted(self.trained.intersection(self.target.sources_of[name]))
            return _Fault(f"{among[0]} would be among the state of its optimizer", name) if among else None
        owner, made = self.own.owner_of[name], self.target.made
        strangers = [owner_of[state] for state in states if not self._is_of(state, owner)]
        # Parameters that an equation takes together have equal counters, and one of these is taken.
        is_counter = all(prod(self.inventory[state].shape) == 1 for state in states)
        is_together = owner in made and made[name].where == made[owner].where != ""
        if strangers and not (is_counter and (is_together or len(strangers) < len(states))):
            return _Fault(f"state of {strangers[0]} would be kept of {owner}, which is not made of it", name)
        origins = self.target.sources_of.get(owner)
        if origins is None or _is_made_alike(made[name], made[owner], origins, self.of_source, self.inventory):
            return None
        return _Fault(f"state of {owner} would be arranged in another way than {owner}", name)

    def _fault_of_parameter(self, parameter: str) -> _Fault | None:
        """Return the fault of a parameter that is made of trained tensors and of others."""
        tensor = self.target.made.get(parameter)
        parts = frozenset[str]() if tensor is None else names_taken(tensor)
        strangers = parts - self.trained
        if not strangers or strangers == parts:
            return None
        problem = f"{parameter} would be made of parameters of an optimizer and of tensors that it does not train"
        return _Fault(problem, min(strangers), "leave the optimizer out (--exclude)")

    def _lacking_state(self) -> Iterator[_Fault]:
        """Yield faults of parameters that lack state which others have that are made of the same parameter."""
        having: dict[str, set[str]] = {}  # by state of the source: parameters of the target
        for name, owner in self.own.owner_of.items():
            for state in self._states(name):
                if self._is_of(state, owner):
                    having.setdefault(state, set()).add(owner)
        made_of: dict[str, set[str]] = {}  # by parameter of the source: parameters of the target
        for parameter in self.own.parameters:
            for source in self.target.sources_of.get(parameter, ()):
                made_of.setdefault(source, set()).add(parameter)
        for state, owners in having.items():
            parameter = self.of_source.owner_of[state]
            for lacking in sorted(made_of.get(parameter, owners) - owners):
                yield _Fault(f"{lacking} would be without state of {parameter}, which it is made of", state)


def _taken_out(own: Sequence[_Side], of_source: _Side, target: MadeTensors) -> _Fault | None:
    """Return a fault if an equation puts tensors of an optimizer elsewhere: `{p*}` takes any.

    That of all parameters may get names that are not torch's (`moment1.w`), and not that of some alone.

    Args:
        own: the target's optimizer, once for each beginning of its parameters' names.
    """
    path, source_groups = own[0].optimizer.path, f"{of_source.optimizer.path}{GROUPS}."
    begins = f"{path}{STATE_KEY}.", f"{path}{GROUPS}."
    with_state = frozenset(parameter for side in own for parameter in side.owner_of.values())
    parameters = frozenset(parameter for side in own for parameter in side.parameters)
    lacking = parameters - with_state if with_state else ()
    origins_of_lacking = frozenset[str]().union(*(target.sources_of.get(name, ()) for name in lacking))
    for name, sources in target.sources_of.items():
        if name.startswith(begins):
            continue
        is_of_torch = any(f".{kind}." in f".{name}" for kind in (STATE_KEY, GROUPS)) or bool(
            path and name.startswith(path)
        )
        for source in sorted(sources):
            is_of_optimizer = source.startswith(source_groups) or source in of_source.owner_of
            if (is_of_torch and is_of_optimizer) or of_source.owner_of.get(source) in origins_of_lacking:
                return _Fault(
                    "an equation takes tensors out of an optimizer, which would be without them",
                    f"{source}, which becomes {name}, by {target.made[name].where}",
                    "write the equation for names of the model alone, and one for state, or leave the optimizer out"
                    " (--exclude)",
                )
    return None


def _excluding(side: _Side, state: str) -> str:
    """Return how to leave out the state of one parameter."""
    name = side.owner_of[state].removeprefix(side.begin)
    own = f"{side.optimizer.path}{STATE_KEY}.{side.optimizer.keys.get(name, name)}"
    return f"exclude the state as well (--exclude '{own}.*'; the optimizer: --exclude '{side.optimizer.path}*')"


def _is_made_alike(
    state: DerivedTensor, parameter: DerivedTensor, origins: Collection[str], side: _Side, inventory: Inventory
) -> bool:
    """Tell whether a state is arranged of its sources as its parameter is; True if these have other shapes than its.

    Args:
        origins: what the parameter is made of, with what is equal to that.
    """
    owner_of = {place: side.owner_of.get(state.sources[place], "") for place in taken_of(state)}
    taken = names_taken(parameter)
    if len(taken) == 1:  # the state of a tensor that is equal to it
        owner_of = {place: min(taken) if owner in origins else owner for place, owner in owner_of.items()}
    shapes = [inventory[state.sources[place]].shape for place in owner_of]
    shapes_of_owners = [inventory[owner].shape if owner in inventory else None for owner in owner_of.values()]
    if shapes != shapes_of_owners or all(prod(shape) == 1 for shape in shapes):
        return True
    if state.assembly.shape != parameter.assembly.shape:
        return False
    are_same = all(parameter.sources.get(place) == owner for place, owner in owner_of.items())
    if are_same and state.assembly == parameter.assembly:
        return True
    compared = 0
    for own in state.assembly.pairs:
        for other in parameter.assembly.pairs:
            part = own.to.intersect(other.to)
            if part is None or not part.size:
                continue
            regions = [pair.move.source_of(part) for pair in (own, other)]
            orders = [paired(region, part, pair.order) for region, pair in zip(regions, (own, other))]
            is_same = owner_of[own.source] == parameter.sources[other.source]
            if not is_same or regions[0] != regions[1] or orders[0] != orders[1]:
                return False
            compared += part.size
    return all(compared == sum(pair.to.size for pair in tensor.assembly.pairs) for tensor in (state, parameter))


def _sides(optimizer: Optimizer, beginnings: Iterable[str], tensors: Iterable[str]) -> list[_Side]:
    """Return an optimizer with names of tensors, once for each of several beginnings."""
    name_of = {str(optimizer.keys.get(name, name)): name for name in optimizer.parameters}
    kinds = (STATE_KEY, GROUPS) if optimizer.form is Form.FLAT else (STATE_KEY,)
    begins = tuple(f"{optimizer.path}{kind}." for kind in kinds)
    owner_of: dict[str, str] = {}
    unowned = []
    for name in tensors:
        if not name.startswith(begins):
            continue
        key = name[len(next(begin for begin in begins if name.startswith(begin))) :]
        while key and key not in name_of:
            key = key.rpartition(".")[0]
        if key:
            owner_of[name] = name_of[key]
        else:
            unowned.append(name)
    return [
        _Side(optimizer, begin, {name: f"{begin}{owner}" for name, owner in owner_of.items()}, unowned)
        for begin in beginnings
    ]


def _models(optimizer: Optimizer, tensors: Iterable[str]) -> list[str]:
    """Return what names of a model have before an optimizer's, for each model that has most of its parameters."""
    counts = _beginnings(optimizer, tensors)
    fitting = [begin for begin, count in counts.items() if count == max(counts.values())]
    return without_state_of_others(fitting) or [""]


def _beginnings(optimizer: Optimizer, tensors: Iterable[str]) -> Counter[str]:
    """Count, by the beginning that makes an optimizer's names of parameters names of tensors, how many are there."""
    if optimizer.form is Form.NUMBERS:
        return Counter([""])
    others = (name for name in tensors if not (optimizer.path and name.startswith(optimizer.path)))
    return Counter(begin for name in others for begin in _begins(name, optimizer.parameters))


def _begins(name: str, ends: Collection[str]) -> Iterator[str]:
    """Yield the beginnings of a name that leave one of the ends: the name itself, or its text behind a dot."""
    start = 0
    while True:
        if name[start:] in ends:
            yield name[:start]
        start = name.find(".", start) + 1
        if not start:
            return
