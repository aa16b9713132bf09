"""Rename what lies beside tensors in a nest as they are renamed (`renamed`), where there is no `--like`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in, entries_of, value_of
from reshard_mpi.formats.nest.nodes import MODEL, decoded, parsed, written
from reshard_mpi.mapping.dictionaries import has_below, moved, names_below, new_names_of
from reshard_mpi.mapping.follow_parameters import MadeParameter, begin_in_target, beginning_of, made_in
from reshard_mpi.mapping.numbered_optimizers import EXTRA_STATE
from reshard_mpi.mapping.numbered_state import Training
from reshard_mpi.mapping.optimizers import (
    GROUPS,
    NOTHING,
    STATE_KEY,
    Form,
    Key,
    Optimizer,
    in_order_of_modules,
    optimizers_of,
    put,
    without_names,
)
from reshard_mpi.text import shortened

# Beside a model: lists and dictionaries of the names of its tensors, as DeepSpeed keeps them.
_OF_NAMES = ("buffer_names", "shared_params", "pipeline_layout")
# Where nests have the attributes of an object, and what torch calls what it says there of each module of a model.
_ATTRIBUTES, _METADATA = "state", "_metadata"


class NewNest(NamedTuple):
    """The text of a nest, and the paths of optimizers in it."""

    text: str
    unknown: Sequence[str]  # nothing tells which parameters their groups have
    known: Sequence[tuple[Optimizer, Optimizer]] = ()  # the others, each with the source's
    left_behind: Sequence[str] = ()  # what modules keep besides tensors, and does not follow these

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warning of values of modules that do not go where the modules' tensors go, if there are any."""
        text = (
            "values that modules keep beside their tensors do not follow these, since the maps take modules apart or"
            f" together: {shortened(self.left_behind)}; set them anew in the target"
        )
        return (text,) if self.left_behind else ()


def renamed(
    nest: str,
    training: Training,
    inventory: Collection[str],
    parameters: Sequence[MadeParameter],
    tensors: Sequence[str],
    where: str,
    steps: Sequence[Sequence[MadeParameter]] = (),
) -> NewNest:
    """Return a nest in which optimizers have the new names of their parameters: names instead of numbers, too.

    It lacks dictionaries that the maps have emptied, unless all that is made of what they held has names below them:
    names of one model would lie in several.

    Args:
        training: the source's, but for its prefix, which is what names of the model begin with in the target.
        inventory: the names of the source's tensors; parameters that are called otherwise keep their names.
        parameters: all that is made.
        tensors: the names of all that is made, in order.
        steps: what each map makes of what the one before has made, if there are several: dictionaries follow each.

    Raises MapError if parameters are put together that an optimizer treats differently.
    """
    root, order = parsed(nest)
    unknown, known = [], []
    optimizers = optimizers_of(root, training)
    for node, optimizer in optimizers:
        path = optimizer.path
        if optimizer.form is Form.UNKNOWN:
            unknown += [path] * (len(optimizer.groups) > 1)  # a lone group has all parameters in any case
            continue
        if optimizer.form is Form.NUMBERS:
            of_it = (parameter for parameter in parameters if not parameter.sources.isdisjoint(optimizer.parameters))
            made = [MadeParameter(name.removeprefix(training.prefix), own) for name, own, _ in of_it]
            gone = frozenset(optimizer.parameters)
        else:
            made, gone = made_in(path, path, optimizer.parameters, inventory, parameters, where)
        new = _renamed(optimizer, made, gone, where)
        known.append((new, optimizer))
        put(node, new)
    going = [_new_begin(*each, inventory, parameters, tensors) for each in known]
    begins = [beginning_of(each.parameters, each.path, inventory) for _, each in known]
    models = [None if new_begin else begin for begin, new_begin in zip(begins, going)]
    numbered = [*training.parameters.values()]
    if numbered and all(name.startswith(training.prefix) for name in numbered):
        models.append(training.prefix)
    left_behind: dict[str, None] = {}
    for step in steps or [parameters]:
        names = moved(root, new_names_of(step), (each for _, each in optimizers), models)
        values = [*values_of_modules(root, names, [each for _, each in optimizers])]
        new_name_of, unmoved = values_renamed(values, names)
        left_behind |= dict.fromkeys(unmoved)
        _move_values(root, values, new_name_of)
        _rename_modules(root, names)
        _rename_listed(root, new_names_of(step))
        _remove_emptied(root, "", names, [f"{each.path}{STATE_KEY}." for each, _ in known])
    return NewNest(written(root, None if order is None else tensors), unknown, known, [*left_behind])


def _new_begin(
    new: Optimizer,
    optimizer: Optimizer,
    inventory: Collection[str],
    parameters: Sequence[MadeParameter],
    tensors: Collection[str],
) -> str | None:
    """Return what names of an optimizer's model begin with in the target, if its dictionary goes there; None if not.

    It stays where names in the optimizer are by numbers until then, or whole names in the target.

    Args:
        new: the optimizer in the target. The others as of `renamed`.
    """
    begin = beginning_of(optimizer.parameters, optimizer.path, inventory)
    if not begin or optimizer.form is Form.NUMBERS:
        return None
    of_model = [(name, own) for name, own, _ in parameters if any(source.startswith(begin) for source in own)]
    new_begin = begin_in_target(begin, of_model)
    goes_along = new_begin not in ("", begin) and {f"{new_begin}{name}" for name in new.parameters} <= {*tensors}
    return new_begin if goes_along else None


def values_of_modules(
    root: Any, names: Sequence[tuple[str, str]], optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the names of what modules keep besides their tensors, each with its dictionary and its entry there.

    Beside tensors of dotted names it is what has such a name, and holds no tensor; and what torch calls extra state.

    Args:
        names: as of `new_names_of`.
        optimizers: of the nest, which have such names as well.
    """
    apart = tuple(begin for each in optimizers for begin in (f"{each.path}{STATE_KEY}.", f"{each.path}{GROUPS}."))
    for path, node in dictionaries_in(root):
        for entry in node["dict"]:
            if len(entry) < 2 or not isinstance(entry[0], str) or f"{path}{entry[0]}".startswith(apart):
                continue
            name, (first, dot, _) = f"{path}{entry[0]}", entry[0].partition(".")
            is_beside = dot and names_below(names, f"{path}{first}.") and not names_below(names, f"{name}.")
            if is_beside or f".{entry[0]}".endswith(f".{EXTRA_STATE}"):
                yield name, node, entry


def values_renamed(
    values: Sequence[tuple[str, Any, list[Any]]], names: Sequence[tuple[str, str]]
) -> tuple[dict[str, str], list[str]]:
    """Return new names of what modules keep besides tensors, by name, and the names of that which does not follow them.

    It follows the tensors in it, or else those of its module, if all go to one module, and those of no other do. A
    module without tensors goes where the module around it goes. `None`, as Megatron-Core keeps beside many modules, is
    nothing that could be lost.

    Args:
        values: as of `values_of_modules`.
        names: as of `new_names_of`.
    """
    new_names_by_name: dict[str, list[str]] = {}
    for name, _, _ in values:
        module, dot, key = name.rpartition(".")
        begins = _new_modules(f"{module}{dot}", names, names_below(names, f"{name}."))
        new_names_by_name[name] = [f"{begin}{key}" for begin in begins]
    counts = Counter(new for new_names in new_names_by_name.values() for new in new_names)
    of_one = ((name, new_names[0]) for name, new_names in new_names_by_name.items() if len(new_names) == 1)
    follow = {name: new for name, new in of_one if counts[new] == 1}
    return follow, [name for name, _, entry in values if name not in follow and entry[1:] != [None]]


def _new_modules(module: str, names: Sequence[tuple[str, str]], own: Sequence[tuple[str, str]] = ()) -> set[str]:
    """Return the modules that the tensors of a module go to, each as what names in it begin with; none if none tells.

    Args:
        names: as of `new_names_of`; own: those of them that are asked first.
    """
    around = module
    own = own or names_below(names, module)
    while around and not own:
        around = around[: around.rfind(".", 0, -1) + 1]
        own = names_below(names, around)
    begins = {begin for source, new in own for begin in _begins_of_module(source[len(around) :], new)}
    is_there = not own or (not begins and any(new.startswith(around) for _, new in own))
    return {f"{begin}{module[len(around) :]}" for begin in ({around} if is_there else begins)}


def _rename_modules(root: Any, names: Sequence[tuple[str, str]]) -> None:
    """Rename modules in what torch says of each beside a model's tensors (`_metadata`), as their tensors are renamed.

    Modules that are taken apart, or go to a dictionary for which it says nothing, stay under their names.

    Args:
        names: as of `new_names_of`.
    """
    told = {path: value_of(node.get(_ATTRIBUTES), _METADATA) for path, node in dictionaries_in(root)}
    tables = {
        path: table
        for path, table in told.items()
        if all(isinstance(each[0], str) for each in entries_of(table) or [[0]])
    }
    made: dict[str, dict[str, Any]] = {path: {} for path in tables}
    moved: dict[str, dict[str, Any]] = {path: {} for path in tables}
    for path, table in tables.items() if any(source != new for source, new in names) else ():
        for key, *value in table["dict"]:
            module = f"{path}{key}." if key else path
            new, *others = _new_modules(module, names) or (module,)
            home = max((other for other in tables if new.startswith(other)), key=len, default=None)
            is_kept = bool(others) or home is None or new == module
            if is_kept or not key:  # the whole model has one in any case
                made[path][key] = value
            if home is not None and not is_kept:
                moved[home][new[len(home) : -1]] = value
    for path, table in tables.items():
        table["dict"] = [[key, *value] for key, value in {**made[path], **moved[path]}.items()]


def _rename_listed(root: Any, names: Sequence[tuple[str, str]]) -> None:
    """Rename tensors of a model where their names are listed beside it, but for tensors put together or divided.

    Args:
        names: as of `new_names_of`.
    """
    uses, origins = (Counter(pair[side] for pair in names) for side in (0, 1))
    new_name_of = {
        source.removeprefix(MODEL): new.removeprefix(MODEL)
        for source, new in names
        if source.startswith(MODEL) and new.startswith(MODEL) and uses[source] == origins[new] == 1
    }
    for entry in entries_of(root) or ():
        if len(entry) == 2 and entry[0] in _OF_NAMES:
            entry[1] = _with_names(entry[1], new_name_of)


def _with_names(node: Any, new_name_of: Mapping[str, str]) -> Any:
    """Return a part of a nest with other texts; lists of names, as of the stages of a pipeline, in a model's order."""
    if isinstance(node, str):
        return new_name_of.get(node, node)
    if isinstance(node, list):
        new = [_with_names(each, new_name_of) for each in node]
        if all(isinstance(each, str) for each in new) and len({*new}) == len(new):
            return [*in_order_of_modules(dict.fromkeys(new, 0), dict.fromkeys(node, 0))]
        return new
    if isinstance(node, dict):
        return {key: _with_names(each, new_name_of) for key, each in node.items()}
    return node


def _begins_of_module(name: str, new: str) -> Iterator[str]:
    """Yield the beginning of the names of the module that a tensor goes to. name: its own in the module before."""
    if f".{new}".endswith(f".{name}"):
        yield new.removesuffix(name)
    elif "." not in name:
        yield new[: new.rfind(".") + 1]


def _move_values(root: Any, values: Sequence[tuple[str, Any, list[Any]]], new_name_of: Mapping[str, str]) -> None:
    """Put what modules keep into the dictionaries of a nest that take tensors of its new names.

    Extra state that is `None` and follows no module is left out: a strict load would have a key too many.

    Args:
        values: as of `values_of_modules`.
    """
    nodes = dict(dictionaries_in(root))
    moved = [each for each in values if new_name_of.get(each[0], each[0]) != each[0]]
    empty = (each for each in values if each[0] not in new_name_of and each[2][1:] == [None])
    gone = [each for each in empty if f".{EXTRA_STATE}" in f".{each[2][0]}"]
    for _, node, entry in (*moved, *gone):
        node["dict"].remove(entry)
    for name, node, entry in moved:
        path = new_name_of[name]
        while path and path not in nodes:
            path = path[: path.rfind(".", 0, -1) + 1]
        nodes.get(path, node)["dict"].append([new_name_of[name].removeprefix(path), entry[1]])


def without_left_out(nest: str, training: Training, tensors: Collection[str], left: Collection[str], where: str) -> str:
    """Return a nest whose optimizers by names have no parameters that are left out.

    By numbers they have: what these stand for depends on how many there are.

    Args:
        tensors: the names of the tensors that it was made for; left: of those that are left.
    """
    root, order = parsed(nest)
    made, is_changed = [MadeParameter(name, frozenset((name,))) for name in left], False
    for node, optimizer in optimizers_of(root, training):
        if optimizer.form in (Form.NAMES, Form.FLAT):
            path, names = optimizer.path, optimizer.parameters
            with suppress(MapError):  # nothing tells which model it belongs to
                own, gone = made_in(path, path, names, tensors, made, where)
                if not gone.isdisjoint(names):
                    put(node, _renamed(optimizer, own, gone, where))
                    is_changed = True
    return written(root, None if order is None else decoded(order)) if is_changed else nest


def without_emptied(nest: str, training: Training, tensors: Iterable[str], left: Iterable[str]) -> str:
    """Return a nest whose optimizers have no entry for state that is left out: torch has none that is empty.

    By names such entries stay if no parameter has state: torch would take the groups by their places.

    Args:
        tensors: the names of the tensors that it was made for; left: of those that are left.
    """
    root, order = parsed(nest)
    before, after = sorted(tensors), sorted(left)
    is_changed = False
    for node, optimizer in optimizers_of(root, training):
        states = value_of(node, STATE_KEY)
        entries = entries_of(states) or []
        begins = [f"{optimizer.path}{STATE_KEY}.{entry[0]}." for entry in entries]
        kept = [
            entry
            for entry, begin in zip(entries, begins)
            if entries_of(entry[-1]) != [] or has_below(after, begin) or not has_below(before, begin)
        ]
        if len(kept) < len(entries) and (kept or all(type(entry[0]) is int for entry in entries)):
            states["dict"], is_changed = kept, True
    return written(root, None if order is None else decoded(order)) if is_changed else nest


def _remove_emptied(node: Any, path: str, names: Sequence[tuple[str, str]], apart: Collection[str]) -> None:
    """Remove such dictionaries from a part of a nest.

    Args:
        path: what names of tensors in it begin with.
        names: as of `new_names_of`.
        apart: paths of parts that have new dictionaries.
    """
    entries = entries_of(node) or []
    for entry in [entry for entry in entries if len(entry) == 2]:
        begin = f"{path}{entry[0]}."
        if begin in apart:
            continue
        if entries_of(entry[1]) != []:
            _remove_emptied(entry[1], begin, names, apart)
            continue
        own = names_below(names, begin)
        are_below = [name.startswith(begin) for _, name in own]
        if any(are_below) and not all(are_below) and all(name != source for source, name in own):
            entries.remove(entry)


def _renamed(optimizer: Optimizer, made: Sequence[MadeParameter], gone: Container[str], where: str) -> Optimizer:
    """Return an optimizer with the new names of its parameters.

    Args:
        gone: parameters that are left out, unless anything is made of them; others keep their names.
    """
    new_names: dict[Key, list[str]] = {}
    for parameter in made:
        treated = [
            (optimizer.parameters[name], optimizer.states.get(name, NOTHING))
            for name in parameter.sources
            if name in optimizer.parameters
        ]
        if any(other != treated[0] for other in treated):
            raise treated_differently(parameter.sources, where)
        for name in parameter.sources:
            new_names.setdefault(name, []).append(parameter.name)
    for name in optimizer.parameters:
        new_names.setdefault(name, [] if name in gone else [name])
    places = {new: place for name, place in optimizer.parameters.items() for new in new_names[name]}
    parameters = in_order_of_modules(places, optimizer.parameters)
    states: dict[Key, Any] = {}
    for key, state in optimizer.states.items():
        for new in new_names[key] if key in optimizer.parameters else [key]:
            states.setdefault(new, state)
    if optimizer.form in (Form.NUMBERS, Form.NAMED_NUMBERS):
        states = states or dict[Key, Any](dict.fromkeys(parameters, NOTHING))  # torch takes groups by places without
        optimizer = optimizer._replace(form=Form.NAMES, keys={})
    elif optimizer.form is Form.FLAT and [*parameters] != [*optimizer.parameters]:
        optimizer = optimizer._replace(groups=[without_names(group) for group in optimizer.groups])
    return optimizer._replace(parameters=parameters, states=states)


def treated_differently(parameters: Iterable[Key], where: str) -> MapError:
    return MapError(
        "parameters that the optimizer treats differently are put together",
        expected="one group of parameters, and the same numbers in their state",
        got=", ".join(sorted(map(str, parameters))),
        where=where,
        remedy="leave the optimizer's state out (--exclude)",
    )
