"""Find whose optimizer state each number of a torch file is (`training_in`).

Such a file has the model's tensors in one dictionary, and beside it `{"state": {0: {...}}, "param_groups": [...]}`. The
numbers get the names of parameters here, so that state can follow them: `optimizer.state.0.exp_avg` becomes
`optimizer.state.fc.weight.exp_avg`. What leaves a doubt is refused. Formats have orders of their own, so the order of
the model is taken from the text of the nest alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.nest import entries_of, names_by_path, pairs_of
from reshard_mpi.formats.nest.nodes import UNREADABLE, decoded, parsed, places
from reshard_mpi.mapping.direction import Inventory, TemplateShapes
from reshard_mpi.mapping.numbered_optimizers import (
    BUFFER_NAMES,
    OF_OPTIMIZER,
    Numbered,
    begins_of,
    optimizers_in,
    parameters_of_numbers,
    state_of,
)
from reshard_mpi.sharding.state_names import STATE_WORDS

# What state is called once its numbers are names, wherever the optimizer is in its file, unless another one has it.
STATE = "optimizer.state."
# No buffer is called so.
_TRAINED = ("weight", "bias")
# Types that have no gradient in torch: positions, masks.
_UNTRAINED = frozenset(dtype for dtype in BY_NAME.values() if "int" in dtype.name or dtype.name == "bool")
# Words in the names of models that no optimizer trains: averages of another one.
_COPIES = frozenset(("average", "averaged", "avg", "ema", "shadow", "swa", "teacher"))
_MAX_NAMED = 5
_NOT_TOLD = "whose optimizer state each number is cannot be told"
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


class _TrainingFile(NamedTuple):
    """A file of a training: its tensors in their order, its optimizers, and other dictionaries, such as the model's."""

    shapes: TemplateShapes
    place: Mapping[str, int]  # of each tensor in the order of the model, as far as the nest has it
    optimizers: Mapping[str, Numbered]  # by their paths
    states: Mapping[str, Sequence[str]]  # the tensors in each of them
    paths: frozenset[str]  # what names in each other dictionary begin with
    others: tuple[str, ...]  # the tensors in no optimizer

    def with_state(self, *, are_values_state: bool) -> list[str]:
        """Return the paths of the optimizers that have state."""
        return [
            path
            for path, optimizer in self.optimizers.items()
            if (are_values_state and optimizer.has_values)
            or any(state_of(optimizer, name) for name in self.states.get(path, ()))
        ]

    def models(self) -> dict[str, list[str]]:
        """Return the tensors of each dictionary in no optimizer, in the order of the model."""
        in_order = sorted(self.others, key=lambda name: self.place.get(name, len(self.place)))
        return names_by_path(in_order, self.paths)

    def whole(self) -> str:
        """Return what names in the innermost dictionary begin with that has all tensors in no optimizer."""
        models = names_by_path(self.others, self.paths)
        return max((path for path, own in models.items() if len(own) == len(self.others)), default="")


def _training_file(nest: str, shapes: TemplateShapes, where: str) -> _TrainingFile:
    root, place = _parsed(nest, shapes, where)
    try:
        optimizers = {optimizer.path: optimizer for optimizer in optimizers_in(root, "")}
        paths = frozenset(_paths_in(root, "", optimizers))
    except RecursionError as error:
        raise _unreadable(error, where) from None
    states = names_by_path(shapes, optimizers)
    if "" in states:
        states[""] = [name for name in states[""] if name.startswith(begins_of(""))]
    of_optimizers = frozenset[str]().union(*states.values())
    others = tuple(name for name in shapes if name not in of_optimizers)
    return _TrainingFile(shapes, place, optimizers, states, paths, others)


def _training_in(
    nest: str, inventory: Inventory, alias: Mapping[str, str], where: str, *, are_values_state: bool
) -> Training:
    """Find the training as `training_in` does. are_values_state: whether values without any tensor are state, too."""
    shapes = {name: kind.shape for name, kind in inventory.items()}
    file = _training_file(nest, shapes, where)
    stateless = Training(file.whole(), None, {})
    with_state = file.with_state(are_values_state=are_values_state)
    has_state = bool(with_state)
    if not has_state and len(file.optimizers) == 1:
        # Groups that say their parameters' names go with these, though there is no state.
        with_state = [path for path, each in file.optimizers.items() if all(group.names for group in each.groups)]
    if not with_state:
        return stateless
    if len(with_state) > 1:
        raise _doubt("there are several optimizers", ", ".join(with_state[:_MAX_NAMED]), where)
    optimizer = file.optimizers[with_state[0]]
    are_named = all(group.names is not None for group in optimizer.groups)
    if not are_named:
        _require_order(file, where)
    models = file.models()
    no_parameters = {*alias, *(name for name, kind in inventory.items() if kind.dtype in _UNTRAINED)}
    fitting, problems = _fitting_models(optimizer, models, file, no_parameters, are_named=are_named)
    if len(fitting) != 1 and not has_state:
        return stateless
    if len(fitting) != 1:
        got = " or ".join(fitting.values()) if fitting else "; ".join(problems[:_MAX_NAMED]) or "no parameters"
        remedy = (_MODELS_REMEDY if fitting else _NAMES_REMEDY) if are_named else _REMEDY
        raise _doubt(_NOT_TOLD, got, where, remedy)
    ((parameters, prefix),) = fitting.items()
    if not are_named:
        _require_no_other(parameters, prefix, models, alias, shapes, where)
        gone = _gone(nest, prefix, optimizer, shapes)
        if gone is not None:
            raise _doubt(_NOT_TOLD, f"{gone} was left out before", where)
    numbers = [number for group in optimizer.groups for number in group.numbers]
    is_taken = any(name.startswith(STATE) and state_of(optimizer, name) is None for name in shapes)
    state = f"{optimizer.path}state." if is_taken else STATE
    return Training(prefix, optimizer, dict(zip(numbers, parameters)), are_named, state)


def _require_order(file: _TrainingFile, where: str) -> None:
    """Raise MapError if the order of a file's tensors in no optimizer is not known."""
    unplaced = [name for name in file.others if name not in file.place]
    if unplaced:
        raise MapError(
            "torch numbers the optimizer's state by the order of the model's tensors, which is not known here",
            expected="torch's own file, or a checkpoint that this program has made of it",
            got=f"{'no order' if not file.place else 'an order without these'}: {', '.join(unplaced[:_MAX_NAMED])}",
            where=where,
            remedy=_ORDER_REMEDY,
        )


def _fitting_models(
    optimizer: Numbered,
    models: Mapping[str, Sequence[str]],
    file: _TrainingFile,
    no_parameters: Container[str],
    *,
    are_named: bool,
) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """Return the parameters of models that the numbers fit, with the models' paths, and why they fit no others.

    Names of an optimizer may lack, or have, what a wrapper puts before them. Models with its very names go before
    others, unless one of these is no copy of a model.

    Args:
        models: the tensors of each, in order, by what their names begin with.
        no_parameters: tensors that are others once more, or have a type that torch does not train.
        are_named: whether the optimizer says its parameters' names.
    """
    fitting: dict[tuple[str, ...], str] = {}
    problems = []
    exact: list[tuple[str, ...]] = []  # the parameters of models with the very names of the optimizer
    for is_wrapped in (False, True) if are_named else (False,):
        exact = [*fitting]
        for path, own in sorted(models.items(), key=lambda model: -len(model[0])):
            inner = None
            if is_wrapped:
                inner = tuple(other for other in file.paths if other != path and other.startswith(path))
            parameters, problem = parameters_of_numbers(optimizer, path, own, file.shapes, no_parameters, inner)
            beside = [name for name in own if not name.startswith(inner or ())]
            if parameters and not (exact and _is_part(parameters, path, beside)):
                fitting.setdefault(parameters, path)
            elif not is_wrapped:
                problems.append(f"{path.removesuffix('.') or 'the file'}: {problem}")
    if exact and [path for path in fitting.values() if not _is_copy(path)] == [fitting[each] for each in exact]:
        fitting = {parameters: fitting[parameters] for parameters in exact}
    return fitting, problems


def _require_no_other(
    parameters: Sequence[str],
    prefix: str,
    models: Mapping[str, Sequence[str]],
    alias: Mapping[str, str],
    shapes: TemplateShapes,
    where: str,
) -> None:
    """Raise MapError if another model, or another parameter of this one, may have the numbers.

    Args:
        parameters: of the model at `prefix`.
        models: the tensors of each, in order, by what their names begin with.
        alias: tensors that are others once more, with the names of these.
    """
    twin = _twin(parameters, prefix, models, shapes)
    if twin is not None:
        got = f"{prefix} or {twin or 'the file itself'}, which has tensors of these shapes too, and more"
        raise _doubt(_NOT_TOLD, got, where, _TWIN_REMEDY)
    other = _other_number(frozenset(parameters), models[prefix], alias, shapes)
    if other is not None:
        got = f"a number that is {other}'s, or that of a tensor in the same memory as another, which is none then"
        raise _doubt(_NOT_TOLD, got, where)


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
        if is_of_model and name not in shapes and name.rpartition(".")[2] not in BUFFER_NAMES:
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


def _paths_in(node: Any, path: str, without: Collection[str]) -> Iterator[str]:
    """Yield what names in each dictionary begin with, but for some optimizers."""
    if path and path in without:
        return
    if entries_of(node) is not None:
        yield path
    for key, value in pairs_of(node):
        if path not in without or key not in OF_OPTIMIZER:
            yield from _paths_in(value, f"{path}{key}.", without)


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
