"""Find whose optimizer state each number of a torch file is (`training_in`).

Such a file has the model's tensors in one dictionary, and beside it `{"state": {0: {...}}, "param_groups": [...]}`. The
numbers get the names of parameters here, so that state can follow them: `optimizer.state.0.exp_avg` becomes
`optimizer.state.fc.weight.exp_avg`. What leaves a doubt is refused. Formats have orders of their own, so the order of
the model is taken from the text of the nest alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.nest import BUFFERS, entries_below, entries_of, names_by_path, pairs_of, value_of
from reshard_mpi.formats.nest.nodes import UNREADABLE, decoded, parsed, places
from reshard_mpi.mapping.direction import Inventory, TemplateShapes
from reshard_mpi.sharding.state_names import STATE_WORDS

# What state is called once its numbers are names, wherever the optimizer is in its file, unless another one has it.
STATE = "optimizer.state."
# What torch calls what a module keeps besides its tensors, behind the module's name (torch.nn.Module.get_extra_state).
EXTRA_STATE = "_extra_state"
# Tensors of a model that no optimizer changes. Users' own are not known if a parameter could have their type; where
# there are any, the numbers do not come out.
_BUFFERS = (*BUFFERS, EXTRA_STATE)
# No buffer is called so.
_TRAINED = ("weight", "bias")
# Types that have no gradient in torch: positions, masks.
_UNTRAINED = frozenset(dtype for dtype in BY_NAME.values() if "int" in dtype.name or dtype.name == "bool")
_OF_OPTIMIZER = ("state", "param_groups")
# What DistributedDataParallel, torch.compile, FSDP and trainers put before the names of all parameters of a model.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "model")
# Words in the names of models that no optimizer trains: averages of another one.
_COPIES = frozenset(("average", "averaged", "avg", "ema", "shadow", "swa", "teacher"))
_MAX_NAMED = 5
_REMEDY = (
    "give torch's optimizer named parameters, which it keeps in the file (AdamW(model.named_parameters())), or leave"
    " the state out (--exclude)"
)
_TWIN_REMEDY = (
    "convert the checkpoint without the other one before, and without a map (--exclude 'ema.*'), then that with the"
    " map; or leave the state out (--exclude)"
)
_MODELS_REMEDY = (
    "leave all but the model of the optimizer out (--exclude 'ema.*'), or the state; they can be converted on their own"
)
_NAMES_REMEDY = (
    "give the optimizer the names that parameters have in the file (AdamW(model.named_parameters())), or leave its"
    " state out (--exclude)"
)
_ORDER_REMEDY = (
    "convert torch's own file once more, since what earlier versions of this program made of it does not have the"
    f" order; or {_REMEDY}"
)


class ParameterGroup(NamedTuple):
    """The numbers of parameters that an optimizer treats alike, and their names if the file says these."""

    numbers: tuple[int, ...]
    names: tuple[str, ...] | None


class Numbered(NamedTuple):
    """A dictionary of an optimizer."""

    path: str  # what names of its tensors begin with
    groups: tuple[ParameterGroup, ...]
    has_values: bool = False  # whether its state has values besides tensors, such as counts of steps


class Training(NamedTuple):
    """The training in a file: where its model lies, and which parameter has which number in its optimizer."""

    prefix: str  # what names of the model's tensors begin with
    optimizer: Numbered | None  # None if there is none, or no state in it
    parameters: Mapping[int, str]  # the names of its parameters, by number
    are_named: bool = False  # the optimizer says these names itself
    state: str = STATE  # what names of its state begin with in maps


NO_TRAINING = Training("", None, {})


def training_in(nest: str | None, inventory: Inventory, alias: Mapping[str, str], where: str) -> Training:
    """Find the training in a file.

    Args:
        nest: the text that says how its tensors are nested, and their order.
        inventory: of its tensors.
        alias: for tensors that are others once more, such as tied weights, the name of the first of them.
        where: the file, for errors.

    Raises MapError if state is numbered and the names of the parameters cannot be told.
    """
    if nest is None:
        return NO_TRAINING
    try:
        return _training_in(nest, inventory, alias, where, are_values_state=True)
    except MapError:  # values alone may be left of state whose tensors are excluded
        return _training_in(nest, inventory, alias, where, are_values_state=False)


def _training_in(
    nest: str, inventory: Inventory, alias: Mapping[str, str], where: str, *, are_values_state: bool
) -> Training:
    """Find the training as `training_in` does. are_values_state: whether values without any tensor are state, too."""
    shapes = {name: kind.shape for name, kind in inventory.items()}
    no_parameters = {*alias, *(name for name, kind in inventory.items() if kind.dtype in _UNTRAINED)}
    root, place = _parsed(nest, shapes, where)
    try:
        optimizers = {optimizer.path: optimizer for optimizer in optimizers_in(root, "")}
        paths = set(_paths_in(root, "", optimizers))
    except RecursionError as error:
        raise _unreadable(error, where) from None
    below = names_by_path(shapes, optimizers)
    if "" in below:
        below[""] = [name for name in below[""] if name.startswith(begins_of(""))]
    with_state = [
        path
        for path, optimizer in optimizers.items()
        if (are_values_state and optimizer.has_values) or any(state_of(optimizer, name) for name in below.get(path, ()))
    ]
    others = dict.fromkeys(shapes, None)
    for names in below.values():
        for name in names:
            others.pop(name, None)
    models = names_by_path(others, paths)
    stateless = Training(max((path for path, own in models.items() if len(own) == len(others)), default=""), None, {})
    has_state = bool(with_state)
    if not has_state and len(optimizers) == 1:
        # Groups that say their parameters' names go with these, though there is no state.
        with_state = [path for path, each in optimizers.items() if all(group.names for group in each.groups)]
    if not with_state:
        return stateless
    if len(with_state) > 1:
        raise _doubt("there are several optimizers", ", ".join(with_state[:_MAX_NAMED]), where)
    optimizer = optimizers[with_state[0]]
    are_named = all(group.names is not None for group in optimizer.groups)
    unplaced = [name for name in others if name not in place]
    if unplaced and not are_named:
        raise MapError(
            "torch numbers the optimizer's state by the order of the model's tensors, which is not known here",
            expected="torch's own file, or a checkpoint that this program has made of it",
            got=f"{'no order' if not place else 'an order without these'}: {', '.join(unplaced[:_MAX_NAMED])}",
            where=where,
            remedy=_ORDER_REMEDY,
        )
    models = names_by_path(sorted(others, key=lambda name: place.get(name, len(place))), paths)
    by_path: dict[tuple[str, ...], str] = {}
    problems = []
    exact: list[tuple[str, ...]] = []  # the parameters of models with the very names of the optimizer
    for is_wrapped in (False, True) if are_named else (False,):
        exact = [*by_path]
        for path, own in sorted(models.items(), key=lambda model: -len(model[0])):
            inner = tuple(other for other in paths if other != path and other.startswith(path)) if is_wrapped else None
            parameters, problem = _parameters(optimizer, path, own, shapes, no_parameters, inner)
            beside = [name for name in own if not name.startswith(inner or ())]
            if parameters and not (exact and _is_part(parameters, path, beside)):
                by_path.setdefault(parameters, path)
            elif not is_wrapped:
                problems.append(f"{path.removesuffix('.') or 'the file'}: {problem}")
    if [path for path in by_path.values() if not _is_copy(path)] == [by_path[parameters] for parameters in exact]:
        by_path = {parameters: by_path[parameters] for parameters in exact} or by_path
    if len(by_path) != 1 and not has_state:
        return stateless
    if len(by_path) != 1:
        got = " or ".join(by_path.values()) if by_path else "; ".join(problems[:_MAX_NAMED]) or "no parameters"
        remedy = (_MODELS_REMEDY if by_path else _NAMES_REMEDY) if are_named else _REMEDY
        raise _doubt("whose optimizer state each number is cannot be told", got, where, remedy)
    ((parameters, prefix),) = by_path.items()
    twin = None if are_named else _twin(parameters, prefix, models, shapes)
    if twin is not None:
        got = f"{prefix} or {twin or 'the file itself'}, which has tensors of these shapes too, and more"
        raise _doubt("whose optimizer state each number is cannot be told", got, where, _TWIN_REMEDY)
    other = None if are_named else _other_number(frozenset(parameters), models[prefix], alias, shapes)
    if other is not None:
        got = f"a number that is {other}'s, or that of a tensor in the same memory as another, which is none then"
        raise _doubt("whose optimizer state each number is cannot be told", got, where)
    gone = None if are_named else _gone(nest, prefix, optimizer, shapes)
    if gone is not None:
        raise _doubt("whose optimizer state each number is cannot be told", f"{gone} was left out before", where)
    numbers = [number for group in optimizer.groups for number in group.numbers]
    is_taken = any(name.startswith(STATE) and state_of(optimizer, name) is None for name in shapes)
    state = f"{optimizer.path}state." if is_taken else STATE
    return Training(prefix, optimizer, dict(zip(numbers, parameters)), are_named, state)


def _is_part(parameters: Iterable[str], path: str, names: Iterable[str]) -> bool:
    """Tell whether parameters are one module's, beside other modules: behind a wrapper are all tensors of a model.

    Args:
        path: what names of the model's tensors begin with; names: these.
    """
    modules, of_parameters = (
        {name[len(path) :].rpartition(".")[0].partition(".")[0] for name in some} for some in (names, parameters)
    )
    return len(of_parameters) == 1 and not modules <= {*of_parameters, ""}


def _is_copy(path: str) -> bool:
    """Tell whether a dictionary is called as averages of a model are: `ema`, `model_ema`, `teacher`."""
    return not STATE_WORDS.isdisjoint(path.split(".")) or not _COPIES.isdisjoint(re.split("[._]", path.lower()))


def _twin(
    parameters: Sequence[str], prefix: str, models: Mapping[str, Sequence[str]], shapes: TemplateShapes
) -> str | None:
    """Return the path of another model that has all these parameters, and maybe more; None if there is none.

    They are told by names and shapes, or by shapes in their order: copies (EMA, a teacher, master weights) may have
    names of their own, or none. It has more tensors besides, else it would fit the numbers too: buffers of users' own,
    which only one of a model and its copy may have, or parameters that are frozen.

    Args:
        parameters: of the model at `prefix`.
    """
    own = [name.removeprefix(prefix) for name in parameters]
    while all("." in name for name in own) and len({name.partition(".")[0] for name in own}) == 1:
        own = [name.partition(".")[2] for name in own]  # such as "module" of DataParallel
    for path, names in models.items():
        if path.startswith(prefix):
            continue
        if prefix.startswith(path):  # the tensors of no dictionary in it
            inner = tuple(other for other in models if other != path and other.startswith(path))
            names = [name for name in names if not name.startswith(inner)]
            if path and any(shapes[name] for name in names):  # `prefix` is a module of it
                return path
        in_order = iter([shapes[name] for name in names])
        if all(shapes[parameter] in in_order for parameter in parameters):  # each behind the one before
            return path
        before = {name.removesuffix(own[0]) for name in names if f".{name}".endswith(f".{own[0]}")}
        if any(
            all(shapes.get(f"{begin}{name}") == shapes[parameter] for name, parameter in zip(own, parameters))
            for begin in before
        ):
            return path
    return None


def _other_number(
    parameters: Collection[str], own: Sequence[str], alias: Mapping[str, str], shapes: TemplateShapes
) -> str | None:
    """Return a parameter that may be a buffer, so that a tensor in the memory of another has its number; None if none.

    Two parameters may share memory and yet have state of their own: `nn.Parameter(other.data)`.

    Args:
        own: the tensors of the model, in order.
    """
    own = [name for name in own if name in alias or name in parameters]
    for place, name in enumerate(own):
        for neighbours in (own[place + 1 :], own[:place][::-1]) if name in alias else ():
            for other in neighbours:
                if shapes[other] != shapes[name]:
                    break
                if other not in alias and other != alias[name] and other.rpartition(".")[2] not in _TRAINED:
                    return other
    return None


def _gone(nest: str, prefix: str, optimizer: Numbered, shapes: TemplateShapes) -> str | None:
    """Return a tensor that the model had when its order was written down, and has no more; None if it has all."""
    for name in decoded(parsed(nest).order or ()):
        is_of_model = name.startswith(prefix) and not name.startswith(begins_of(optimizer.path))
        if is_of_model and name not in shapes and name.rpartition(".")[2] not in _BUFFERS:
            return name
    return None


def in_order(nest: str, names: Iterable[str], where: str) -> list[str]:
    """Return tensor names in the order of a nest; names that it does not have come last.

    Args:
        where: the file of the nest, for errors.

    Raises MapError if the nest cannot be read.
    """
    names = list(names)
    _, place = _parsed(nest, names, where)
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _parsed(nest: str, names: Iterable[str], where: str) -> tuple[Any, Mapping[str, int]]:
    """Return the value of a nest, and the places of those names that its order has. Raises as `in_order` does."""
    try:
        root, order = parsed(nest)
        return root, places(order, frozenset(names))
    except UNREADABLE as error:
        raise _unreadable(error, where) from None


def _unreadable(error: Exception, where: str) -> MapError:
    return MapError("how the tensors of a file are nested cannot be read", got=str(error)[:100], where=where)


def _doubt(problem: str, got: str, where: str, remedy: str = _REMEDY) -> MapError:
    expected = "as many parameters as the optimizer has, in the order of the model, each with the shape of its state"
    return MapError(problem, expected=expected, got=got, where=where, remedy=remedy)


def optimizers_in(node: Any, path: str) -> Iterator[Numbered]:
    """Yield the dictionaries of optimizers in a part of a nest. path: what names in this part begin with."""
    groups = value_of(node, "param_groups")
    if entries_below(node, "state") is not None and isinstance(groups, list) and groups:
        read_groups = [_group(group) for group in groups]
        is_told = value_of(node, "state") is not None or all(group and group.names is not None for group in read_groups)
        if all(read_groups) and is_told:
            states = (pairs_of(state) for _, state in pairs_of(value_of(node, "state")))
            has_values = any(value is not None for pairs in states for _, value in pairs)
            yield Numbered(path, tuple(group for group in read_groups if group is not None), has_values)
            return
    for key, value in pairs_of(node):
        yield from optimizers_in(value, f"{path}{key}.")


def _group(node: Any) -> ParameterGroup | None:
    numbers, names = value_of(node, "params"), value_of(node, "param_names")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return None
    is_named = isinstance(names, list) and len(names) == len(numbers) and all(isinstance(name, str) for name in names)
    return ParameterGroup(tuple(numbers), tuple(names) if is_named else None)


def begins_of(path: str) -> tuple[str, ...]:
    """Return what names in an optimizer's dictionary begin with. Beside an optimizer at the root there are models."""
    return (path,) if path else tuple(f"{key}." for key in _OF_OPTIMIZER)


def _paths_in(node: Any, path: str, without: Collection[str]) -> Iterator[str]:
    """Yield what names in each dictionary begin with, but for some optimizers."""
    if path and path in without:
        return
    if entries_of(node) is not None:
        yield path
    for key, value in pairs_of(node):
        if path not in without or key not in _OF_OPTIMIZER:
            yield from _paths_in(value, f"{path}{key}.", without)


def state_of(optimizer: Numbered, name: str) -> tuple[int, str] | None:
    """Return the number and the key of a tensor of an optimizer's state; None if it is none."""
    begin = f"{optimizer.path}state."
    if not name.startswith(begin):
        return None
    number, dot, key = name[len(begin) :].partition(".")
    return (int(number), key) if dot and number.isdecimal() and len(number) < 10 else None


def _parameters(
    optimizer: Numbered,
    path: str,
    own: Sequence[str],
    shapes: TemplateShapes,
    no_parameters: Container[str],
    inner: tuple[str, ...] | None,
) -> tuple[tuple[str, ...], str]:
    """Return the names of the parameters in the order of their numbers, or none and an error text.

    Args:
        no_parameters: tensors that are others once more, or have a type that torch does not train.
        inner: paths of dictionaries in the model's, which are looked at by themselves, if the optimizer's names and
            those of the model may begin otherwise, as behind a wrapper; None if they may not.
    """
    numbers = [number for group in optimizer.groups for number in group.numbers]
    named = [group.names for group in optimizer.groups]
    if len(set(numbers)) < len(numbers):
        return (), "a number is in several groups"
    if all(names is not None for names in named):
        told = [name for names in named for name in names or ()]
        begin, ends = (path, told) if inner is None else _behind_wrapper(path, told, own, inner)
        parameters = [f"{begin}{name}" for name in ends]
        absent = [name for name in parameters if name not in shapes]
        if absent:
            return (), f"no {absent[0]}"
    else:
        parameters = [name for name in own if name.rpartition(".")[2] not in _BUFFERS and name not in no_parameters]
        if len(optimizer.groups) > 1:
            return (), f"{len(optimizer.groups)} groups of parameters, and no names in them"
        if len(parameters) != len(numbers) or numbers != sorted(numbers):
            return (), f"{len(parameters)} parameters, and {len(numbers)} numbers"
    name_of = dict(zip(numbers, parameters))
    states = [(name, *state) for name in shapes if (state := state_of(optimizer, name)) is not None]
    unknown = next((name for name, number, _ in states if number not in name_of), None)
    if unknown is not None:
        return (), f"{unknown}, whose number is in no group"
    # A count of steps has one element, whatever the parameter. A key with the shape of one parameter has it of all.
    like_parameters = {key for name, number, key in states if prod(shapes[name]) > 1}
    for name, number, key in states:
        parameter = name_of[number]
        if shapes[name] != shapes[parameter] and (prod(shapes[name]) != 1 or key in like_parameters):
            return (), f"{name} {list(shapes[name])} for {parameter} {list(shapes[parameter])}"
    return tuple(parameters), ""


def _behind_wrapper(
    path: str, names: Sequence[str], own: Sequence[str], inner: tuple[str, ...]
) -> tuple[str, Sequence[str]]:
    """Return what names of a model begin with, and how an optimizer's go on: `module.` is before either, or neither.

    Another first part of the optimizer's names may be that of another model.

    Args:
        path: what is before all of the model's; they are looked for with no more if nothing else fits them.
        own: the names of the model; inner: what names begin with in dictionaries that its own has.
    """
    parted = [name.partition(".") for name in names]
    ends_of_names = [names]
    if any({first for first, _, _ in parted} == {wrapper} for wrapper in WRAPPERS):
        ends_of_names.append([rest for _, _, rest in parted])
    known = frozenset(own)
    for ends in ends_of_names if names else ():
        begins = {name.removesuffix(ends[0]) for name in own if f".{name}".endswith(f".{ends[0]}")}
        fitting = [
            begin
            for begin in begins
            if begin.startswith(path) and not begin.startswith(inner) and all(f"{begin}{end}" in known for end in ends)
        ]
        if len(fitting) == 1:
            return fitting[0], ends
    return path, names


def named_tensors(training: Training, shapes: TemplateShapes, where: str, *, is_stripped: bool) -> dict[str, str]:
    """Return names of a file's tensors in which parameters are not numbered but named, and for each that in the file.

    Args:
        is_stripped: whether what names of the model's tensors begin with is left out.

    Raises MapError if two become one.
    """
    prefix = training.prefix if is_stripped else ""
    named: dict[str, str] = {}
    for name in shapes:
        state = None if training.optimizer is None else state_of(training.optimizer, name)
        plain = name.removeprefix(prefix)
        if state is not None:
            plain = f"{training.state}{training.parameters[state[0]].removeprefix(prefix)}.{state[1]}"
        if named.setdefault(plain, name) != name:
            raise MapError("two tensors would have one name", got=f"{named[plain]} and {name}: {plain}", where=where)
    return named
