"""Apply maps to a training file: name the numbers of its optimizer, then apply them in turn (`applied_to_file`).

A map speaks of parameters by their names, and of the state of `w` as `optimizer.state.w.exp_avg`; a file may have
numbers for names, and everything below a key like `model`. This is between the two, on both sides. Of several maps each
takes the names that the one before it has made, so the numbers of the files matter only at the beginning and the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest import dictionaries_in
from reshard_mpi.formats.nest.nodes import MODEL, is_whole_training, parsed
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.carry_values import carried_into
from reshard_mpi.mapping.chain import chained, parameters_of, steps_of
from reshard_mpi.mapping.check_optimizers import (
    MadeTensors,
    owners_by_names,
    require_no_part_left_out,
    require_own_state,
)
from reshard_mpi.mapping.dictionaries import NestedTensors, home_of, require_homes
from reshard_mpi.mapping.direction import Inventory, UnfitMapError
from reshard_mpi.mapping.follow_parameters import MadeParameter
from reshard_mpi.mapping.names_in_files import NamedChain, VisibleNames, chain_below, chain_like, chain_whole
from reshard_mpi.mapping.numbered_optimizers import begins_of
from reshard_mpi.mapping.numbered_state import NO_TRAINING, Training, in_order, training_in
from reshard_mpi.mapping.optimizers import STATE_KEY, Form, optimizers_in_nest, settings_of_all, unread_in
from reshard_mpi.mapping.rename_values import NewNest, renamed, without_emptied, without_left_out
from reshard_mpi.mapping.result import DerivedTensor, MapResult, names_taken
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.mapping.selection import Selection, TargetTemplate, is_chosen
from reshard_mpi.mapping.stranded_state import require_none_by_order


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
    none of these. The same holds for the checkpoint of `like`. Where the optimizer goes by numbers, and there is no
    `like`, they see whole names, and names without `model.` only if they fit none of these.
    """
    if not rules:
        return _without_maps(choice, inventory, source, forward)
    if source.nest is not None:
        inventory = {name: inventory[name] for name in in_order(source.nest, inventory, source.path)}
    training = _training(choice, inventory, source)
    of_optimizers = tuple(begin for each in optimizers_in_nest(source.nest, training) for begin in begins_of(each.path))
    fitting: list[MappedFile] = []
    unfit: list[MapError] = []
    for own, own_like, is_below, beside in _attempts(source.nest, training, inventory, like):
        of_model = choice._replace(beside=beside)
        try:
            fitting.append(_mapped(rules, of_model, inventory, source, own, forward, own_like, is_below=is_below))
        except MapError as error:
            if not (fitting or isinstance(error, UnfitMapError)):
                raise
            unfit.append(error)
        if fitting and not _takes_others_alone(fitting[-1], beside, of_optimizers):
            return fitting[-1]
    if not fitting:
        raise unfit[0]
    return fitting[0]


class _Attempt(NamedTuple):
    """A way in which maps may see the names of a file, since they say these with or without the model's key."""

    training: Training  # its prefix is left out of names
    like: TargetTemplate | None
    is_below: bool  # names are seen below the model's key, and the target has the model below it, too
    beside: frozenset[str]  # tensors beside the model, which equations of parameters do not take


def _attempts(
    nest: str | None, training: Training, inventory: Inventory, like: TargetTemplate | None
) -> list[_Attempt]:
    """Return in which ways maps may see the names of a file, the likely one first."""
    outside = frozenset(name for name in inventory if not name.startswith(MODEL))
    if _goes_by_names_below(nest, training):
        below, beside = training._replace(prefix=MODEL), outside
    else:
        below, beside = training, frozenset[str]()
    like_below = like
    if like is not None and _goes_by_names_below(like.nest, like.training):
        like_below = like.below(MODEL)
    whole = _Attempt(training, like, False, beside)
    if below is not training or like_below is not like:
        return [_Attempt(below, like_below, like is None, beside), whole]
    if like is None and training.optimizer is not None and training.prefix == MODEL and is_whole_training(nest):
        return [whole, _Attempt(training, None, True, outside)]
    return [whole]


def _without_maps(choice: Selection, inventory: Inventory, source: SourceTree, forward: bool | None) -> MappedFile:
    """Leave tensors of a file out, and with them what its nest says of them; the others stay as they are."""
    training = NO_TRAINING
    if choice.leaves_out and source.nest is not None:
        in_order(source.nest, (), source.path)  # refuses a text that is no nest
        with suppress(MapError):  # nothing tells whose state it is
            training = training_in(source.nest, inventory, source.tied, source.path)
    optimizers = optimizers_in_nest(source.nest, training) if choice.leaves_out else []
    mapped = applied(None, choice._replace(owners=owners_by_names(optimizers, inventory)), inventory, forward)
    sources_of = {tensor.name: names_taken(tensor) for tensor in mapped.made}
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
    names = VisibleNames.of(training, source.nest, inventory, source.path, is_stripped=is_stripped, is_below=is_below)
    of_maps = names.chosen(choice, inventory)
    tensors = {name: inventory[in_file] for name, in_file in names.in_file.items()}
    settings = settings_of_all(training, source.nest)

    def apply(in_target: Callable[[str], str], selects: bool) -> Sequence[MapResult]:
        asked = of_maps if selects else of_maps._replace(include=None, exclude=())
        return tuple(chained(rules, asked._replace(named=in_target), tensors, forward, like, settings))

    if is_below:
        chain = chain_below(names, apply, leaves_out=choice.leaves_out)
    elif like is not None:
        chain = chain_like(names, apply, like.named)
    else:
        chain = chain_whole(names, apply, home)
    _require_different(chain.in_files[-1], chain.by_maps[-1], source.path)
    _require_read(source, chain.made)
    if source.nest is not None:
        require_none_by_order(source.nest, names.optimizers, inventory, chain.in_files, chain.made, like, source.path)
    if like is not None:
        return _nested_as_like(like, source.nest, names, chain, inventory, source.path)
    if source.nest is None:
        return MappedFile(chain.in_files, chain.made, None)
    made = _AllMade.of(chain)
    new = _moved_nest(source.nest, names, chain, made, inventory, source.path)
    if home is None and chain.begin != training.prefix:
        home = _home(new.text, training, chain.made)
        if home != chain.begin:  # another thing may have the place, or several maps move what is in the dictionary, too
            return _mapped(rules, choice, inventory, source, training, forward, like, home=home)
    return _nested_as_source(source.nest, new, names, chain, made, inventory, source.path)


class _AllMade(NamedTuple):
    """All that maps make of a source's tensors, by names in the target's file."""

    parameters: Sequence[MadeParameter]
    tensors: Sequence[str]  # constants and numbers, too
    made: MadeTensors

    @classmethod
    def of(cls, chain: NamedChain) -> _AllMade:
        parameters = [*parameters_of(chain.in_files[0]._replace(made=chain.made))]
        sources_of = {parameter.name: parameter.sources for parameter in parameters}
        made = MadeTensors({tensor.name: tensor for tensor in chain.made}, sources_of)
        return cls(parameters, [*_names_made(chain.in_files[-1])], made)


def _nested_as_like(
    like: TargetTemplate, nest: str | None, names: VisibleNames, chain: NamedChain, inventory: Inventory, where: str
) -> MappedFile:
    """Return what maps have made, nested as `like` is, with the values that its nest and the source's both have.

    Args:
        nest: of the source; where: its path, for errors.
    """
    notes = (*_told_of_order(names.training, where), *_told_of_order(like.training, like.path))
    if like.nest is None or nest is None:
        return MappedFile(chain.in_files, chain.made, like.nest, notes)
    all_made = _AllMade.of(chain)
    new = carried_into(like.nest, nest, names.training, like.training, inventory, all_made.parameters, where)
    in_like = [like.named.get(name, name) for name in like.shapes]
    text = without_emptied(new.text, like.training, in_like, all_made.tensors)
    require_own_state(new.known, inventory, all_made.made, where)
    unknown = (
        f"the settings of {path}param_groups are those of {like.path}: without the optimizer's state in both"
        " checkpoints nothing tells which group is which"
        for path in new.unknown
    )
    return MappedFile(chain.in_files, chain.made, text, (*notes, *unknown), new.warnings)


def _moved_nest(
    nest: str, names: VisibleNames, chain: NamedChain, all_made: _AllMade, inventory: Inventory, where: str
) -> NewNest:
    """Return the source's nest as maps change it: names become new ones, and dictionaries that get empty go."""
    used = frozenset[str]().union(*all_made.made.sources_of.values())
    nest = without_emptied(nest, names.training, inventory, used)
    steps = [*steps_of(chain.in_files, chain.in_target[:-1])] if len(chain.in_files) > 1 else ()
    training = names.training._replace(prefix=chain.begin)
    return renamed(nest, training, inventory, all_made.parameters, all_made.tensors, where, steps)


def _nested_as_source(
    nest: str,
    new: NewNest,
    names: VisibleNames,
    chain: NamedChain,
    all_made: _AllMade,
    inventory: Inventory,
    where: str,
) -> MappedFile:
    """Return what maps have made in a nest that has come of the source's, once optimizers find their state there."""
    made = all_made.made
    require_own_state(new.known, inventory, made, where)
    nested = (
        NestedTensors.of(inventory, parsed(nest).root),
        NestedTensors.of(all_made.tensors, parsed(new.text).root),
    )
    require_homes(new.known, *nested, made.sources_of, where)
    notes = [*_told_of_order(names.training, where)]
    begins = tuple(f"{each.path}state." for each, _ in new.known if each.form is not Form.FLAT)
    if names.training.optimizer is not None or any(derived.name.startswith(begins) for derived in chain.made):
        # Its own load_state_dict takes the states of a group by their places, whatever their names.
        by_names = "the optimizer's state goes by names of parameters, as torch's set_optimizer_state_dict takes it"
        notes = [by_names, *notes]
    notes += (
        f"the groups of {path}param_groups stay as they are: without the optimizer's state nothing tells whose they are"
        for path in new.unknown
    )
    return MappedFile(chain.in_files, chain.made, new.text, tuple(notes), new.warnings)


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


def _home(nest: str, training: Training, made: Iterable[DerivedTensor]) -> str:
    """Return what names begin with in the innermost dictionary that has all parameters of a numbered optimizer."""
    parameters = frozenset(training.parameters.values())
    names = [tensor.name for tensor in made if not parameters.isdisjoint(names_taken(tensor))]
    return home_of(names, (path for path, _ in dictionaries_in(parsed(nest).root)))


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
        moved = [name for name in names_taken(tensor) if name != tensor.name and name.startswith(tuple(paths))]
        if moved:
            raise MapError(
                "the groups of an optimizer name its parameters in a way that cannot be read, and would keep old names",
                expected="a list of dictionaries, each with a list `params`, as torch saves param_groups",
                got=f"{min(moved)}, which becomes {tensor.name}",
                where=source.path,
                remedy="save the groups as torch does, or leave the optimizer out (--exclude)",
            )


def _names_made(mapped: MapResult) -> Iterator[str]:
    yield from (tensor.name for tensor in mapped.made)
    yield from (constant.name for constant in mapped.constants)
    yield from (number.name for number in mapped.computed)
