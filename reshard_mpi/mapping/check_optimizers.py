"""Check that a target's optimizers have the state of their own parameters (`require_own_state`).

Equations, names and groups are carried on by different rules. What came out of them is compared here with the source,
by one rule: a parameter is made of parameters whose state it has, and loses none of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY, Form, MadeParameter, Optimizer

_REMEDY = (
    "write equations for the parameter and for its state, in the names that each has in the source, be it the same"
    " names on both sides; or leave the optimizer out (--exclude)"
)


class _State(NamedTuple):
    """Whose state the tensors of an optimizer are."""

    owner_of: Mapping[str, str]  # by tensor name; a parameter as the optimizer calls it
    unowned: Sequence[str]  # tensors below `state` of no parameter


def require_own_state(
    pairs: Iterable[tuple[Optimizer, Optimizer]],
    inventory: Inventory,
    made: Sequence[MadeParameter],
    where: str,
) -> None:
    """Raise MapError if a target's optimizer has state of other parameters, or lacks some of its own.

    Args:
        pairs: the target's optimizers, each with the source's.
        inventory: of the source's tensors.
        made: all tensors of the target that are made of others.
    """
    sources_of = {tensor.name: tensor.sources for tensor in made}
    for target, source in pairs:
        if Form.UNKNOWN in (target.form, source.form):
            continue
        for begin in _beginnings(source, inventory):
            problems = [
                _problem(target, target_begin, source, begin, inventory, sources_of)
                for target_begin in _beginnings(target, sources_of)
            ]
            if problems and all(problems):
                problem, got = next(problem for problem in problems if problem)
                raise MapError(problem, got=got, where=where, remedy=_REMEDY)


def _problem(
    target: Optimizer,
    target_begin: str,
    source: Optimizer,
    begin: str,
    inventory: Inventory,
    sources_of: Mapping[str, Collection[str]],
) -> tuple[str, str] | None:
    """Return the first fault of a target's optimizer, and a tensor that shows it; None if there is none.

    Args:
        target_begin, begin: what names of tensors have before those of the optimizers.
    """
    of_source, of_target = _state(source, inventory), _state(target, sources_of)
    owners: dict[str, set[str]] = {}  # of the source's state, the target's parameters that have it
    for name in (*of_target.owner_of, *of_target.unowned):
        owner = of_target.owner_of.get(name)
        origins = None if owner is None else sources_of.get(f"{target_begin}{owner}")
        states = [state for state in sources_of[name] if state in of_source.owner_of]
        strangers = []
        for state in states:
            whole = f"{begin}{of_source.owner_of[state]}"
            if owner is None:
                return f"state of {whole} would be of no parameter that the optimizer has", name
            is_own = whole not in inventory if origins is None else whole in origins
            if is_own:
                owners.setdefault(state, set()).add(owner)
            else:
                strangers.append(whole)
        # Parameters that an equation takes together have equal counters, and one of these is taken.
        is_counter = all(prod(inventory[state].shape) == 1 for state in states)
        if strangers and (len(strangers) == len(states) or not is_counter):
            return f"state of {strangers[0]} would be that of {target_begin}{owner}, which is not made of it", name
    made_of: dict[str, set[str]] = {}  # by parameter of the source, in whole: the target's
    for parameter in target.parameters:
        for whole in sources_of.get(f"{target_begin}{parameter}", ()):
            made_of.setdefault(whole, set()).add(parameter)
    for state, own in owners.items():
        whole = f"{begin}{of_source.owner_of[state]}"
        lacking = sorted(made_of.get(whole, own) - own)
        if lacking:
            return f"{target_begin}{lacking[0]} would be without state of {whole}, of which it is made", state
    return None


def _state(optimizer: Optimizer, tensors: Iterable[str]) -> _State:
    name_of = {str(optimizer.keys.get(name, name)): name for name in optimizer.parameters}
    begins = [f"{optimizer.path}{STATE_KEY}."]
    if optimizer.form is Form.FLAT:
        begins.append(f"{optimizer.path}{GROUPS}.")
    owner_of, unowned = {}, []
    for name in tensors:
        for begin in begins:
            if not name.startswith(begin):
                continue
            key = name.removeprefix(begin)
            while key and key not in name_of:
                key = key.rpartition(".")[0]
            if key:
                owner_of[name] = name_of[key]
            else:
                unowned.append(name)
    return _State(owner_of, unowned)


def _beginnings(optimizer: Optimizer, tensors: Iterable[str]) -> list[str]:
    """Return the texts that make an optimizer's names of parameters names of tensors, of as many as can be."""
    names = optimizer.parameters
    if optimizer.form is Form.NUMBERS:
        return [""]
    counts = Counter(begin for name in tensors if not _is_below(name, optimizer.path) for begin in _begins(name, names))
    most = max(counts.values(), default=0)
    fitting = [begin for begin, count in counts.items() if count == most]
    # `moment.model.` is state of `model.`.
    outer = [begin for begin in fitting if not any(begin != other and begin.endswith(other) for other in fitting)]
    return outer or [""]


def _is_below(name: str, path: str) -> bool:
    return bool(path) and name.startswith(path)


def _begins(name: str, ends: Collection[str]) -> Iterator[str]:
    """Yield the beginnings of a name that leave one of the ends: the name itself, or its text behind a dot."""
    start = 0
    while True:
        if name[start:] in ends:
            yield name[:start]
        start = name.find(".", start) + 1
        if not start:
            return
