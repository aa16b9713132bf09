"""What maps make of the tensors of a file that may hold a training, in which parameters are numbered.

A map speaks of parameters by their names, and of the state of `w` as `optimizer.state.w.exp_avg`; a file may have
numbers for names, and everything below a key like `model`. This is between the two, on both sides. Of several maps each
takes the names that the one before it has made, so the numbers of the files matter only at the beginning and the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import Inventory
from reshard_mpi.mapping.choice import Choice, is_chosen
from reshard_mpi.mapping.composed import chained, composed
from reshard_mpi.mapping.likeness import Like
from reshard_mpi.mapping.made import Made, Mapped, taken_of
from reshard_mpi.mapping.mapped import applied
from reshard_mpi.mapping.numbering import STATE, Training, in_order, named_tensors, training_in
from reshard_mpi.mapping.renesting import MadeParameter, carried_into, groups_left_alone, with_names, with_other_names
from reshard_mpi.mapping.rules import Rules


class SourceFile(NamedTuple):
    """What a source has besides its tensors.

    nest: the text that says how they are nested; None if they are not. tied: tensors that are other ones once more,
    with the name of the first of these. path: for errors.
    """

    nest: str | None
    tied: Mapping[str, str]
    path: str


class MappedFile(NamedTuple):
    """What maps make of a file, and how it is nested.

    mapped: what each of them makes; the first is in the names of the source's file, the last in those of the target's.
    made: the tensors that the last one makes of others, as made of those of the file.
    """

    mapped: tuple[Mapped, ...]
    made: tuple[Made, ...]
    nest: str | None
    notes: tuple[str, ...] = ()


def applied_to_file(
    rules: Sequence[Rules],
    choice: Choice,
    inventory: Inventory,
    source: SourceFile,
    forward: bool | None = None,
    like: Like | None = None,
) -> MappedFile:
    """Return what `mapping.mapped.applied` makes of a file by each map, one after another. Raises what that raises.

    rules: of the maps; if there are none, every tensor keeps its name and shape. choice, like: of what the last makes.
    """
    if not rules:
        mapped = applied(None, choice, inventory, forward)
        if choice.exclude:
            _require_no_orphans(mapped, inventory, source)
        return MappedFile((mapped,), mapped.made, source.nest)
    if source.nest is not None:
        inventory = {name: inventory[name] for name in in_order(source.nest, inventory, source.path)}
    training = _training(choice, inventory, source)
    shapes = {name: kind.shape for name, kind in inventory.items()}
    named = named_tensors(training, shapes, source.path, is_stripped=like is not None)
    in_target = _names_in_target(training, like)
    plain = {name: inventory[in_file] for name, in_file in named.items()}
    chain = tuple(chained(rules, choice._replace(named=in_target), plain, forward, like, training.settings))
    in_files = _chain_in_files(chain, named, in_target)
    _require_different(in_files[-1], chain[-1], source.path)
    all_made = composed(in_files)
    notes = tuple(_told_of_order(training, source.path))
    if like is not None:
        # By their names in the target's file.
        at_source = [MadeParameter(made.name, _sources(made)) for made in all_made]
        nest = (
            None
            if like.nest is None
            else carried_into(like.nest, source.nest, training, like.training, at_source, source.path)
        )
        if like.nest is not None and source.nest is not None:
            left_alone = groups_left_alone(like.nest, source.nest, training, like.training)
            notes += tuple(
                f"the settings of {path}param_groups are those of {like.path}: without the optimizer's state in both"
                " checkpoints nothing tells which group is which"
                for path in left_alone
            )
        return MappedFile(in_files, all_made, nest, (*notes, *_told_of_order(like.training, like.path)))
    if source.nest is None:
        return MappedFile(in_files, all_made, None)
    names = set(training.parameters.values())
    parameters = [
        MadeParameter(made.name.removeprefix(training.prefix), _sources(made))
        for made in all_made
        if not names.isdisjoint(_sources(made))
    ]
    begin = None if training.optimizer is None else f"{training.optimizer.path}state."
    if begin is not None and any(made.name.startswith(begin) for made in all_made):
        by_names = "the optimizer's state goes by names of parameters, as torch's set_optimizer_state_dict takes it"
        notes = (by_names, *notes)
    last = in_files[-1]
    made_up = (*(constant.name for constant in last.constants), *(number.name for number in last.computed))
    tensors = [*(tensor.name for tensor in all_made), *made_up]
    if training.optimizer is None:
        all_parameters = [MadeParameter(made.name, _sources(made)) for made in all_made]
        nest = with_other_names(source.nest, inventory, all_parameters, tensors, source.path)
    else:
        nest = with_names(source.nest, training, parameters, tensors, source.path)
    return MappedFile(in_files, all_made, nest, notes)


def _told_of_order(training: Training, path: str) -> Iterator[str]:
    """Yield a note if nothing but the order of the model's tensors tells which parameter has which number."""
    if training.optimizer is not None and not training.are_named:
        yield (
            f"the optimizer's numbers in {path} are taken for the order of the model's tensors, as by"
            " model.parameters(): that it was given its parameters in another order, as from two lists, cannot be seen"
        )


def _require_no_orphans(mapped: Mapped, inventory: Inventory, source: SourceFile) -> None:
    """Raise MapError for numbered state of a parameter that is left out, which only a map takes out of its nest."""
    try:
        training = training_in(
            source.nest, {name: kind.shape for name, kind in inventory.items()}, source.tied, source.path
        )
    except MapError:  # nothing tells whose state it is
        return
    path = "" if training.optimizer is None else f"{training.optimizer.path}state."
    left_out, numbered = frozenset(mapped.left_out), [made.name for made in mapped.made if made.name.startswith(path)]
    for number, name in training.parameters.items():
        orphan = next((state for state in numbered if state.startswith(f"{path}{number}.")), None)
        if name in left_out and orphan is not None:
            raise MapError(
                f"{name} is excluded, and its state is not",
                got=orphan,
                where=source.path,
                remedy=f"exclude the state as well (--exclude '{path}{number}.*'; that of all: --exclude '{path}*')",
            )


def _training(choice: Choice, inventory: Inventory, source: SourceFile) -> Training:
    shapes = {name: kind.shape for name, kind in inventory.items()}
    try:
        return training_in(source.nest, shapes, source.tied, source.path)
    except MapError:
        taken = {name: shape for name, shape in shapes.items() if is_chosen(choice, name)}
        training = training_in(source.nest, taken, source.tied, source.path)
        if training.optimizer is not None:
            raise
        return training


def _names_in_target(training: Training, like: Like | None) -> Callable[[str], str]:
    """Return what tensors are called in the target's file; without `like`, state goes by the names of parameters."""
    if like is not None:
        return lambda name: like.named.get(name, name)
    path = "" if training.optimizer is None else training.optimizer.path

    def renamed(name: str) -> str:
        if training.optimizer is None or not name.startswith(STATE):
            return name
        return f"{path}state.{name.removeprefix(STATE).removeprefix(training.prefix)}"

    return renamed


def _require_different(in_file: Mapped, plain: Mapped, path: str) -> None:
    """Raise MapError if two tensors have one name in the target's file, where state has that of a shorter parameter.

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


def _sources(made: Made) -> frozenset[str]:
    return frozenset(made.sources[place] for place in taken_of(made))


def _names_made(mapped: Mapped) -> Iterator[str]:
    yield from (made.name for made in mapped.made)
    yield from (constant.name for constant in mapped.constants)
    yield from (number.name for number in mapped.computed)


def _chain_in_files(
    chain: Sequence[Mapped], named: Mapping[str, str], in_target: Callable[[str], str]
) -> tuple[Mapped, ...]:
    """Return the same, the first in the names of the source's file and the last in those of the target's."""
    last = len(chain) - 1
    return tuple(
        _in_files(mapped, named if number == 0 else {}, in_target if number == last else str)
        for number, mapped in enumerate(chain)
    )


def _in_files(mapped: Mapped, named: Mapping[str, str], in_target: Callable[[str], str]) -> Mapped:
    """Return the same in the names of the files on both sides."""

    def in_source(name: str) -> str:
        return named.get(name, name)

    known = mapped.counted
    return mapped._replace(
        made=tuple(
            made._replace(
                name=in_target(made.name), sources={place: in_source(name) for place, name in made.sources.items()}
            )
            for made in mapped.made
        ),
        constants=tuple(constant._replace(name=in_target(constant.name)) for constant in mapped.constants),
        equal=tuple(equal._replace(names=tuple(map(in_source, equal.names))) for equal in mapped.equal),
        pads=tuple(pads._replace(name=in_source(pads.name)) for pads in mapped.pads),
        left_out=tuple(map(in_source, mapped.left_out)),
        states_left_out=tuple(map(in_source, mapped.states_left_out)),
        computed=tuple(
            number._replace(
                name=in_target(number.name), steps=None if number.steps is None else in_source(number.steps)
            )
            for number in mapped.computed
        ),
        counted=known._replace(
            steps=tuple(map(in_source, known.steps)),
            numbers=tuple((in_source(name), number) for name, number in known.numbers),
        ),
    )
