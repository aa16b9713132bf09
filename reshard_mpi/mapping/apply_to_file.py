"""Apply maps to a training file: name the numbers of its optimizer, then apply them in turn (`applied_to_file`).

A map speaks of parameters by their names, and of the state of `w` as `optimizer.state.w.exp_avg`; a file may have
numbers for names, and everything below a key like `model`. This is between the two, on both sides. Of several maps each
takes the names that the one before it has made, so the numbers of the files matter only at the beginning and the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in
from reshard_mpi.formats.nest.nodes import MODEL, is_whole_training, parsed
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.carry_values import carried_into
from reshard_mpi.mapping.chain import chain_in_files, chained, composed, parameters_of, steps_of
from reshard_mpi.mapping.check_optimizers import (
    MadeTensors,
    owners_by_names,
    require_no_part_left_out,
    require_own_state,
)
from reshard_mpi.mapping.dictionaries import NestedTensors, home_of, require_homes
from reshard_mpi.mapping.direction import Inventory, UnfitMapError
from reshard_mpi.mapping.follow_parameters import begin_in_target
from reshard_mpi.mapping.numbered_optimizers import begins_of
from reshard_mpi.mapping.numbered_state import NO_TRAINING, Training, in_order, named_tensors, training_in
from reshard_mpi.mapping.optimizers import STATE_KEY, Form, optimizers_in_nest, settings_of_all, unread_in
from reshard_mpi.mapping.rename_values import renamed, without_emptied, without_left_out
from reshard_mpi.mapping.result import DerivedTensor, MapResult, taken_of
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.mapping.selection import Selection, TargetTemplate, is_chosen
from reshard_mpi.mapping.stranded_state import require_none_by_order
from reshard_mpi.mapping.tensor_kinds import parted_anywhere


class SourceTree(NamedTuple):
    """The source without its tensors: how they are nested, which are tied, and its path."""

    nest: str | None  # the text that says how they are nested; None if they are not
    tied: Mapping[str, str]  # tensors that are other ones once more, with the name of the first of these
    path: str  # for errors


class MappedFile(NamedTuple):
    """What maps make of a file, and how it is nested."""

    # what each of them makes; the first is in the names of the source's file, the last in names of the target's
    mapped: tuple[MapResult, ...]
    made: tuple[DerivedTensor, ...]  # the tensors that the last one makes of others, as made of tensors of the file
    nest: str | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def applied_to_file(
    rules: Sequence[Rules],
    choice: Selection,
    inventory: Inventory,
    source: SourceTree,
    forward: bool | None = None,
    like: TargetTemplate | None = None,
) -> MappedFile:
    """Return what `apply_rules.applied` makes of a file by each map, one after another. Raises what that raises.

    Args:
        rules: of the maps; if there are none, every tensor keeps its name and shape.
        choice, like: of what the last makes.

    In a whole training whose optimizer goes by names, maps see names without `model.`, and whole names only if they fit
    none of these. The same holds for the checkpoint of `like`.
    """
    if not rules:
        training = NO_TRAINING
        if choice.leaves_out and source.nest is not None:
            in_order(source.nest, (), source.path)  # refuses a text that is no nest
            with suppress(MapError):  # nothing tells whose state it is
                training = training_in(source.nest, inventory, source.tied, source.path)
        optimizers = optimizers_in_nest(source.nest, training) if choice.leaves_out else []
        mapped = applied(None, choice._replace(owners=owners_by_names(optimizers, inventory)), inventory, forward)
        sources_of = {tensor.name: _sources(tensor) for tensor in mapped.made}
        used = frozenset[str]().union(*sources_of.values())
        begins = tuple(begin for optimizer in optimizers for begin in begins_of(optimizer.path))
        is_state_alone = choice.include is not None and all(name.startswith(begins) for name in used)
        nest = source.nest
        if nest is not None and choice.leaves_out and not is_state_alone:
            target = MadeTensors({tensor.name: tensor for tensor in mapped.made}, sources_of)
            require_own_state(((optimizer, optimizer) for optimizer in optimizers), inventory, target, source.path)
            require_no_part_left_out(parsed(nest).root, optimizers, inventory, used, source.path)
            nest = without_emptied(nest, training, inventory, sources_of)
            nest = without_left_out(nest, training, inventory, sources_of, source.path)
        return MappedFile((mapped,), mapped.made, nest)
    if source.nest is not None:
        inventory = {name: inventory[name] for name in in_order(source.nest, inventory, source.path)}
    training = _training(choice, inventory, source)
    is_below = _goes_by_names_below(source.nest, training)
    below = training._replace(prefix=MODEL) if is_below else training
    like_below = like
    if like is not None and _goes_by_names_below(like.nest, like.training):
        like_below = like.below(MODEL)
    attempts = [(below, like_below, like is None), (training, like, False)]
    if below is training and like_below is like:
        attempts = attempts[1:]
    outside = frozenset(name for name in inventory if below is not training and not name.startswith(MODEL))
    of_model = choice._replace(beside=outside)
    of_optimizers = tuple(begin for each in optimizers_in_nest(source.nest, training) for begin in begins_of(each.path))
    fitting: list[MappedFile] = []
    unfit: list[MapError] = []
    for own, own_like, is_below in attempts:
        try:
            fitting.append(_mapped(rules, of_model, inventory, source, own, forward, own_like, is_below=is_below))
        except MapError as error:
            if not (fitting or isinstance(error, UnfitMapError)):
                raise
            unfit.append(error)
        if fitting and not _takes_others_alone(fitting[-1], outside, of_optimizers):
            return fitting[-1]
    if not fitting:
        raise unfit[0]
    return fitting[0]


def _takes_others_alone(mapped: MappedFile, outside: frozenset[str], of_optimizers: tuple[str, ...]) -> bool:
    """Tell whether equations take tensors that are neither of the model nor of an optimizer, and none of the model."""
    made = (tensor for tensor in mapped.mapped[0].made if tensor.where)
    taken = [name for tensor in made for name in tensor.sources.values() if not name.startswith(of_optimizers)]
    return bool(taken) and outside.issuperset(taken)


def _goes_by_names_below(nest: str | None, training: Training) -> bool:
    """Tell whether a nest is a whole training whose optimizer, if any, has the names of parameters below `model.`.

    Of several optimizers by names each has its own; else some are another model's.
    """
    if not is_whole_training(nest) or (training.optimizer is not None and training.prefix != MODEL):
        return False
    optimizers = optimizers_in_nest(nest, training)
    by_names = [optimizer for optimizer in optimizers if optimizer.form in (Form.NAMES, Form.FLAT)]
    names = Counter(name for optimizer in by_names for name in optimizer.parameters)
    return not optimizers or (bool(by_names) and max(names.values(), default=1) == 1)


def _mapped(
    rules: Sequence[Rules],
    choice: Selection,
    inventory: Inventory,
    source: SourceTree,
    training: Training,
    forward: bool | None,
    like: TargetTemplate | None,
    *,
    is_below: bool = False,
    home: str | None = None,
) -> MappedFile:
    """Return what maps make of the file with a training.

    Args:
        is_below: they see the names below the training's prefix, and the target is nested as the source is.
        home: what names of the model of a numbered optimizer begin with in the target, if its dictionary is known.
    """
    is_stripped = is_below or like is not None
    shapes = {name: kind.shape for name, kind in inventory.items()}
    named = named_tensors(training, shapes, source.path, is_stripped=is_stripped)
    optimizers = optimizers_in_nest(source.nest, training)
    of_optimizers = tuple(begin for optimizer in optimizers for begin in begins_of(optimizer.path))
    prefix = training.prefix if is_stripped else ""
    of_parameters: frozenset[str] = frozenset()  # state beside optimizers, with whole names of parameters
    if is_below:
        below = {_named_below(name, prefix, shapes, of_optimizers): in_file for name, in_file in named.items()}
        of_parameters = frozenset(below[name] for name in below.keys() - named.keys())
        named = below
    plain = {name: inventory[in_file] for name, in_file in named.items()}
    told = owners_by_names(optimizers, inventory).items()
    apart = beside = {
        name: own for name, own in named.items() if name == own or (is_below and not own.startswith(prefix))
    }
    choice = choice._replace(
        owners={state.removeprefix(prefix): owner.removeprefix(prefix) for state, owner in told},
        beside=frozenset(name for name, own in named.items() if own in choice.beside or own.startswith(of_optimizers)),
    )
    # First all is named, so that something is left out by its name in the target.
    selects = not is_below or not choice.leaves_out
    settings = settings_of_all(training, source.nest)
    begin = training.prefix  # what names of the model begin with in the target, and names in the optimizer do not
    while True:
        in_target = _below_prefix(training, apart) if is_below else _names_in_target(training, like, begin)
        asked = choice if selects else choice._replace(include=None, exclude=())
        try:
            chain = tuple(chained(rules, asked._replace(named=in_target), plain, forward, like, settings))
        except MapError:
            if selects:
                raise
            selects = True  # what is in the way may be left out
            continue
        in_files = chain_in_files(chain, named, in_target)
        all_made = composed(in_files)
        if is_below:
            sources_by_name = {own.name: _sources(tensor) for own, tensor in zip(chain[-1].made, all_made, strict=True)}
            strangers = _made_apart(training, chain, sources_by_name, of_optimizers, of_parameters)
            if not strangers.keys() <= apart.keys():
                apart = strangers | apart
                continue
            if not selects:
                selects = True
                continue
        begin_before = begin
        if not is_stripped:
            begin = _begin_in_target(training, all_made) if home is None else home
        if begin == begin_before:
            break
    _require_different(in_files[-1], chain[-1], source.path)
    _require_read(source, all_made)
    notes = tuple(_told_of_order(training, source.path))
    all_parameters = [*parameters_of(in_files[0]._replace(made=all_made))]
    sources_of = {parameter.name: parameter.sources for parameter in all_parameters}
    target = MadeTensors({tensor.name: tensor for tensor in all_made}, sources_of)
    if source.nest is not None:
        of_like = (None, ()) if like is None else (like.nest, tuple(like.training.parameters.values()))
        require_none_by_order(source.nest, optimizers, inventory, in_files, all_made, *of_like, source.path)
    tensors = [*_names_made(in_files[-1])]
    if like is not None:
        notes += tuple(_told_of_order(like.training, like.path))
        if like.nest is None or source.nest is None:
            return MappedFile(in_files, all_made, like.nest, notes)
        # By their names in the target's file.
        new = carried_into(like.nest, source.nest, training, like.training, inventory, all_parameters, source.path)
        names = [like.named.get(name, name) for name in like.shapes]
        nest = without_emptied(new.text, like.training, names, tensors)
        require_own_state(new.known, inventory, target, source.path)
        unknown = (
            f"the settings of {path}param_groups are those of {like.path}: without the optimizer's state in both"
            " checkpoints nothing tells which group is which"
            for path in new.unknown
        )
        return MappedFile(in_files, all_made, nest, (*notes, *unknown), new.warnings)
    if source.nest is None:
        return MappedFile(in_files, all_made, None)
    used = frozenset[str]().union(*sources_of.values())
    nest = without_emptied(source.nest, training, inventory, used)
    between = [composed(in_files[:number]) for number in range(1, len(in_files))]
    in_target_of = [in_target] * len(between)
    if is_below:
        sources_between = [{tensor.name: _sources(tensor) for tensor in made} for made in between]
        strangers_of = [
            _made_apart(training, chain[:number], sources, of_optimizers, of_parameters)
            for number, sources in enumerate(sources_between, 1)
        ]
        in_target_of = [_below_prefix(training, beside | strangers) for strangers in strangers_of]
    steps = [*steps_of(in_files, in_target_of)] if between else ()
    new = renamed(nest, training._replace(prefix=begin), inventory, all_parameters, tensors, source.path, steps)
    if home is None and begin != training.prefix:
        home = _home(new.text, training, all_made)
        if home != begin:  # another thing may have the place, or several maps move what is in the dictionary, too
            return _mapped(rules, choice, inventory, source, training, forward, like, is_below=is_below, home=home)
    require_own_state(new.known, inventory, target, source.path)
    nested = NestedTensors.of(inventory, parsed(source.nest).root), NestedTensors.of(tensors, parsed(new.text).root)
    require_homes(new.known, *nested, sources_of, source.path)
    begins = tuple(f"{each.path}state." for each, _ in new.known if each.form is not Form.FLAT)
    if training.optimizer is not None or any(derived.name.startswith(begins) for derived in all_made):
        # Its own load_state_dict takes the states of a group by their places, whatever their names.
        by_names = "the optimizer's state goes by names of parameters, as torch's set_optimizer_state_dict takes it"
        notes = (by_names, *notes)
    notes += tuple(
        f"the groups of {path}param_groups stay as they are: without the optimizer's state nothing tells whose they are"
        for path in new.unknown
    )
    return MappedFile(in_files, all_made, new.text, notes, new.warnings)


def _named_below(name: str, prefix: str, shapes: Container[str], of_optimizers: tuple[str, ...]) -> str:
    """Return the name that maps see of state with its parameter's whole name (`moment1.model.w`); others as they are.

    States in optimizers have the names below.
    """
    is_whole = f".{prefix}" in name and not name.startswith(of_optimizers)
    parted = parted_anywhere(name, shapes) if is_whole else None
    if parted is None or not parted[0].startswith(prefix):
        return name
    return parted[1].around(parted[0].removeprefix(prefix))


def _told_of_order(training: Training, path: str) -> Iterator[str]:
    """Yield a note if nothing but the order of the model's tensors tells which parameter has which number."""
    if training.optimizer is not None and not training.are_named:
        yield (
            f"the optimizer's numbers in {path} are taken for the order of the model's tensors, as by"
            " model.parameters(): that it was given its parameters in another order, as from two lists, or others in"
            " their place, cannot be seen"
        )


def _training(choice: Selection, inventory: Inventory, source: SourceTree) -> Training:
    try:
        return training_in(source.nest, inventory, source.tied, source.path)
    except MapError:
        taken = {name: kind for name, kind in inventory.items() if is_chosen(choice, name)}
        with suppress(MapError):  # of several optimizers one may be left, and all models tell whose it is
            some = {name: kind for name, kind in inventory.items() if name in taken or STATE_KEY not in name.split(".")}
            return training_in(source.nest, some, source.tied, source.path)
        training = training_in(source.nest, taken, source.tied, source.path)
        if training.optimizer is not None and not training.are_named:
            raise
        return training


def _begin_in_target(training: Training, made: Sequence[DerivedTensor]) -> str:
    """Return what names of the model of a numbered optimizer begin with in the target, if its dictionary is there."""
    begin, parameters = training.prefix, frozenset(training.parameters.values())
    pairs = ((tensor.name, _sources(tensor)) for tensor in made)
    of_model = [(name, own) for name, own in pairs if begin and any(source.startswith(begin) for source in own)]
    has_parameters = any(not parameters.isdisjoint(own) for _, own in of_model)
    return begin_in_target(begin, of_model) if has_parameters else begin


def _home(nest: str, training: Training, made: Iterable[DerivedTensor]) -> str:
    """Return what names begin with in the innermost dictionary that has all parameters of a numbered optimizer."""
    parameters = frozenset(training.parameters.values())
    names = [tensor.name for tensor in made if not parameters.isdisjoint(_sources(tensor))]
    return home_of(names, (path for path, _ in dictionaries_in(parsed(nest).root)))


def _names_in_target(training: Training, like: TargetTemplate | None, begin: str) -> Callable[[str], str]:
    """Return what tensors are called in the target's file; without `like`, state goes by the names of parameters.

    Args:
        begin: what names of the model begin with there; names in the optimizer go by its dictionary.
    """
    if like is not None:
        return lambda name: like.named.get(name, name)
    path = "" if training.optimizer is None else training.optimizer.path

    def renamed(name: str) -> str:
        if training.optimizer is None or not name.startswith(training.state):
            return name
        return f"{path}state.{name.removeprefix(training.state).removeprefix(begin)}"

    return renamed


def _below_prefix(training: Training, apart: Mapping[str, str]) -> Callable[[str], str]:
    """Return what tensors are called in a target that has the model where the source has it.

    Args:
        apart: the names of tensors that are not in the model, and what these are called in the target.
    """
    below = training.prefix
    return lambda name: apart.get(name) or (name if name.startswith(training.state) else f"{below}{name}")


def _made_apart(
    training: Training,
    chain: Sequence[MapResult],
    sources_of: Mapping[str, Collection[str]],
    of_optimizers: tuple[str, ...],
    of_parameters: frozenset[str],
) -> dict[str, str]:
    """Return the names of tensors that do not go into the model, and what these are called in the target.

    What lies beside the model stays there, whatever it is called: `ema.w`, `average.w`. State that a map names after
    parameters has their whole names: `moment1.model.w`, `moment1.critic.w`. So has what is made up as state. Numbers
    that are computed, and what is made up beside what lies beside the model, have no other names.

    Args:
        chain: the maps' results by plain names.
        sources_of: by the names that maps give, the names of the sources in the file.
        of_optimizers: what names in optimizers begin with.
        of_parameters: state of the file that has the whole names of its parameters.
    """
    numbers: set[str] = set()
    made_up: set[str] = set()
    for mapped in chain:
        made = [(tensor.name, _sources(tensor)) for tensor in mapped.made] if numbers or made_up else []
        numbers = {name for name, own in made if own and numbers.issuperset(own)} | {n.name for n in mapped.computed}
        numbers |= {constant.name for constant in mapped.constants if constant.name in mapped.beside}
        made_up = {name for name, own in made if own and made_up.issuperset(own)} | {c.name for c in mapped.constants}
    states = {name for name, own in sources_of.items() if own and all(each.startswith(of_optimizers) for each in own)}
    parameters = sources_of.keys() - states - made_up - numbers
    model = training.prefix.rstrip(".")
    outside = {
        name for name, own in sources_of.items() if own and all(source.partition(".")[0] != model for source in own)
    }
    of_state = states | made_up | {name for name in outside if of_parameters.issuperset(sources_of[name])}
    named_as_state = {name for name in of_state if not name.startswith((training.state, *of_optimizers))}
    names = {name: name for name in numbers | outside | (named_as_state & states)}
    for name in named_as_state:
        parted = parted_anywhere(name, parameters)
        if parted is not None:
            owner, affixes = parted
            names[name] = affixes.around(owner if owner in outside else f"{training.prefix}{owner}")
    return names


def _require_different(in_file: MapResult, plain: MapResult, path: str) -> None:
    """Raise MapError if two tensors get one name in the target's file, as state named after a shorter parameter can.

    Args:
        plain: the same by the names that the maps have given.
    """
    origin: dict[str, str] = {}
    for name, given in zip(_names_made(in_file), _names_made(plain)):
        other = origin.setdefault(name, given)
        if other != given:
            raise MapError(
                f"two tensors would have the name {name}",
                expected="another name for each tensor of the target",
                got=f"{other} and {given}",
                where=path,
                remedy="mend the equations: state is named without what all names of the source's model begin with; or"
                " leave the state out (--exclude)",
            )


def _require_read(source: SourceTree, made: Iterable[DerivedTensor]) -> None:
    """Raise MapError if state gets other names in an optimizer whose groups cannot be read."""
    paths = [] if source.nest is None else [f"{path}{STATE_KEY}." for path in unread_in(parsed(source.nest).root)]
    for tensor in made if paths else ():
        moved = [name for name in _sources(tensor) if name != tensor.name and name.startswith(tuple(paths))]
        if moved:
            raise MapError(
                "the groups of an optimizer name its parameters in a way that cannot be read, and would keep old names",
                expected="a list of dictionaries, each with a list `params`, as torch saves param_groups",
                got=f"{min(moved)}, which becomes {tensor.name}",
                where=source.path,
                remedy="save the groups as torch does, or leave the optimizer out (--exclude)",
            )


def _sources(tensor: DerivedTensor) -> frozenset[str]:
    return frozenset(tensor.sources[place] for place in taken_of(tensor))


def _names_made(mapped: MapResult) -> Iterator[str]:
    yield from (tensor.name for tensor in mapped.made)
    yield from (constant.name for constant in mapped.constants)
    yield from (number.name for number in mapped.computed)
