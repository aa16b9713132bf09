"""Select result tensors and types; drop and fill tensors (`Selection`, `TargetTemplate`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import FLOATS, DType, numbers
from reshard_mpi.formats.nest import BY_GROUP
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.direction import MAX_NAMED, Direction, Inventory, TemplateShapes
from reshard_mpi.mapping.equations import NamePattern
from reshard_mpi.mapping.numbered_state import NO_TRAINING, Training, named_tensors
from reshard_mpi.mapping.optimizers import GROUPS, STATE_KEY
from reshard_mpi.mapping.result import ConstantTensor, DerivedTensor, Pads
from reshard_mpi.mapping.rules import TYPES, Drop, Fill, Rules, element_of
from reshard_mpi.mapping.tensor_kinds import COUNTS, OwnersInPart, owned_by, owners, owners_in_part
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.state_names import MODULE_WORDS, STATE_WORDS, dotted, is_named_as_state, parts_of
from reshard_mpi.sharding.strategy import Pattern, named_after
from reshard_mpi.text import first_few, shortened


class Selection(NamedTuple):
    """The selection of derived tensors, by their new names, and their types."""

    include: tuple[str, ...] | None = None  # globs, one must match; None: all
    exclude: tuple[str, ...] = ()  # globs, none may match
    types: tuple[tuple[str, DType], ...] = ()  # globs with the types that floating-point tensors become
    named: Callable[[str], str] = str  # what tensors are called in the target's file, where it is not their name
    may_match_none: bool = False  # whether globs may match nothing
    # what is taken once all maps are applied, if this is not the last of several: nothing is left out here, and state
    # that is left out then may stay without its parameter
    last: Selection | None = None
    # single numbers of the target that training counts or sets, as their places in it tell, by names in its file
    settings: Collection[str] = ()
    # the tensors that state is of, by its name, where an optimizer says it and names might say something else
    owners: Mapping[str, str] = MappingProxyType({})
    # the tensors beside the model, which equations for its parameters do not take, though `{p*}` stands for any name
    beside: Collection[str] = ()

    @property
    def leaves_out(self) -> bool:
        """Whether there are globs that may leave tensors out."""
        return self.include is not None or bool(self.exclude)


# The glob of a type that is given without one.
ANY = "*"
# What training counts and sets, in single numbers: their types stay unless they are named. Where the place tells it,
# names need not (`settings_among`).
_COUNTERS = frozenset(
    (
        *("step", "global_step", "state_step", "step_num", "epoch_num", "beta1_power", "beta2_power", "learning_rate"),
        *("lr", "momentum", "scale", "scale_sense", "loss_scale", "_growth_tracker", "current_iterator_step"),
        *("last_overflow_iterator_step", "decay"),
    )
)


def type_of(choice: Selection, name: str, dtype: DType, shape: tuple[int, ...]) -> DType:
    """Return the type that a tensor of the target gets: by the last pattern that matches, else its own."""
    number = _deciding(choice, name, shape) if dtype in FLOATS else None
    return dtype if number is None else choice.types[number][1]


def _is_counted(name: str) -> bool:
    """Tell whether a single number is one that training counts or sets: `step`, and a parameter's `step.fc.weight`."""
    return dotted(name).rpartition(".")[2] in _COUNTERS or not COUNTS.isdisjoint(parts_of(name))


def _deciding(choice: Selection, name: str, shape: tuple[int, ...]) -> int | None:
    """Return which of `types` gives a tensor of floating-point numbers its type; None: it stays."""
    in_file = choice.named(name)
    is_counter = in_file in choice.settings or (prod(shape) == 1 and _is_counted(in_file))
    for number in reversed(range(len(choice.types))):
        glob = choice.types[number][0]
        if Pattern(glob).matches(in_file) and not (glob == ANY and is_counter):
            return number
    return None


def settings_among(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the single numbers that training counts or sets: in groups and state of optimizers, schedulers, callbacks.

    State with the shape of a parameter is no such number, even if the parameter has one element; nor are moments.

    Args:
        shapes: of all tensors, by names in their file.
    """
    parts_by_name = {name: [part for part in dotted(name).split(".") if not part.isdecimal()] for name in shapes}
    of_parameters = {
        parts[-1] for name, parts in parts_by_name.items() if STATE_KEY in parts[:-1] and prod(shapes[name]) != 1
    }
    return frozenset(
        name
        for name, (*parents, key) in ((name, parts) for name, parts in parts_by_name.items() if parts)
        if prod(shapes[name]) == 1
        and (
            GROUPS in parents
            or key in BY_GROUP
            or (STATE_KEY in parents and key not in of_parameters | STATE_WORDS - MODULE_WORDS)
            or any("sched" in part.lower() or part == "callbacks" for part in parents)
        )
    )


def is_chosen(choice: Selection, name: str) -> bool:
    """Tell whether a tensor of the target is taken."""
    name = choice.named(name)
    if choice.include is not None and not any(Pattern(glob).matches(name) for glob in choice.include):
        return False
    return not any(Pattern(glob).matches(name) for glob in choice.exclude)


def require_any(choice: Selection, names: Collection[str]) -> list[str]:
    """Return the selected tensors of the target.

    Raises MapError if a pattern matches none of them, or nothing is left.
    """
    if not choice.leaves_out:
        return list(names)
    if choice.may_match_none:
        return [name for name in names if is_chosen(choice, name)]
    for option, globs in (("--include", choice.include or ()), ("--exclude", choice.exclude)):
        for glob in globs:
            pattern = Pattern(glob)
            if not any(pattern.matches(choice.named(name)) for name in names):
                raise MapError(
                    f"{option} {glob} matches no tensor",
                    got=first_few([*map(choice.named, names)], MAX_NAMED),
                    remedy="give a pattern of the names that the target has",
                )
    chosen = [name for name in names if is_chosen(choice, name)]
    if not chosen:
        raise MapError(
            "--include and --exclude leave no tensor",
            expected="one tensor or more",
            got=f"none of {len(names)}",
            remedy="exclude less, or include more",
        )
    return chosen


def states_left_out(
    choice: Selection, shapes: Mapping[str, tuple[int, ...]], rules: Rules | None, direction: Direction | None
) -> frozenset[str]:
    """Return the tensors of the target that are state of parameters which `--exclude` leaves out, and go with them.

    Args:
        shapes: of all tensors of the target.
    """
    patterns = [Pattern(glob) for glob in choice.exclude]
    excluded = {name for name in shapes if any(pattern.matches(choice.named(name)) for pattern in patterns)}
    if not excluded:
        return frozenset()
    others = [name for name in shapes if name not in excluded]
    in_part = owners_in_part(shapes, choice.owners)
    in_part.require_no_doubt(excluded, (name for name in others if is_chosen(choice, name)))
    owner_of = {**in_part.owner_of, **owners(others, shapes, rules, direction, choice.owners, in_target=True)}
    return frozenset(name for name in others if not excluded.isdisjoint(owned_by(name, owner_of)))


def all_typed(choice: Selection, tensors: Sequence[DerivedTensor]) -> Iterator[DerivedTensor]:
    """Yield tensors in the types that `--dtype` gives them. Raises MapError for a pattern that decides of none."""
    floats = [tensor for tensor in tensors if tensor.dtype in FLOATS]
    deciding = {_deciding(choice, tensor.name, tensor.assembly.shape) for tensor in floats} if choice.types else set()
    for number, (glob, dtype) in enumerate(choice.types):
        if glob != ANY and number not in deciding:
            raise _without_effect(choice, glob, dtype, [choice.named(tensor.name) for tensor in floats])
    for tensor in tensors:
        yield tensor._replace(dtype=type_of(choice, tensor.name, tensor.dtype, tensor.assembly.shape))


def _without_effect(choice: Selection, glob: str, dtype: DType, floats: Sequence[str]) -> MapError:
    if any(map(Pattern(glob).matches, floats)):
        return MapError(
            f"--dtype {_shown(glob, dtype)} has no effect, since the last pattern that matches counts",
            expected="a type for all before those for some",
            got=", ".join(_shown(*each) for each in choice.types),
            remedy="change the order, or leave it out",
        )
    return MapError(
        f"--dtype {_shown(glob, dtype)} matches no floating-point tensor",
        got=first_few(floats, MAX_NAMED) or "none",
        remedy="give a pattern of the names that the target has",
    )


def _shown(glob: str, dtype: DType) -> str:
    """Return the value of `--dtype` as text."""
    name = next((name for name, dtype_of_name in TYPES.items() if dtype_of_name == dtype), str(dtype))
    return name if glob == ANY else f"{glob}={name}"


def constant_typed(choice: Selection, constant: ConstantTensor) -> ConstantTensor:
    """Return constants in the type that `--dtype` gives them. Raises MapError if the type cannot hold the value."""
    dtype = type_of(choice, constant.name, constant.kind.dtype, constant.kind.shape)
    if dtype == constant.kind.dtype:
        return constant
    value = numbers(constant.element, constant.kind.dtype)[0]
    element = element_of(value, dtype, constant.name, constant.where)
    return constant._replace(kind=constant.kind._replace(dtype=dtype), element=element)


class TargetTemplate(NamedTuple):
    """A checkpoint that the target is to be like: its path, and the shapes of its tensors by name."""

    path: str
    shapes: Mapping[str, Shape]
    # the text that says how its tensors are nested, with what is neither tensor nor text; None if they are not
    nest: str | None = None
    # what tensors are called in its file, where that is not their name: numbers of an optimizer's parameters, and what
    # names of the model's tensors begin with
    named: Mapping[str, str] = MappingProxyType({})
    training: Training = NO_TRAINING  # where these come from

    def below(self, prefix: str) -> TargetTemplate:
        """Return the same with a model whose names begin so, which they do not for maps. Raises MapError."""
        in_file = {self.named.get(name, name): shape for name, shape in self.shapes.items()}
        training = self.training._replace(prefix=prefix)
        named = named_tensors(training, in_file, self.path, is_stripped=True)
        return self._replace(
            shapes={name: in_file[other] for name, other in named.items()},
            named={name: other for name, other in named.items() if name != other},
            training=training,
        )


def require_alike(shapes: Mapping[str, Shape], like: TargetTemplate) -> None:
    """Raise MapError unless the derived tensors have the names and shapes in `like`."""
    missing = [f"{name} {list(shape)}" for name, shape in like.shapes.items() if name not in shapes]
    surplus = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in like.shapes]
    unlike = [
        f"{name} {list(shape)}, not {list(like.shapes[name])}"
        for name, shape in shapes.items()
        if like.shapes.get(name, shape) != shape
    ]
    if not (missing or surplus or unlike):
        return
    differences = (
        ("nothing makes", missing),
        ("not in it", surplus),
        ("of another shape", unlike),
    )
    raise MapError(
        "what the map makes is not like the target's checkpoint",
        expected=f"the names and shapes of {like.path}",
        got="; ".join(f"{what}: {shortened(names)}" for what, names in differences if names),
        where=like.path,
        remedy="give the map and the checkpoint that belong to the source, or leave out what both need not have"
        " (--include, --exclude)",
    )


def may_make(fill: Fill, glob: str) -> bool:
    """Tell whether a fill can make the tensor that a glob drops."""
    return Pattern(glob).matches(fill.name.filled({capture.name: "0" for capture in fill.name.captures}))


def made_up(
    rules: Rules, tensors: Sequence[DerivedTensor], direction: Direction, like: TargetTemplate | None
) -> list[ConstantTensor]:
    """Return the constants of `fill` rules; with `--like`, only those in the template that no equation makes."""
    names = {tensor.name for tensor in tensors}
    constants: dict[str, ConstantTensor] = {}
    for fill in rules.fills:
        target_side = "right" if direction.is_forward else "left"
        if fill.side != target_side or (like is None and fill.needs_like):
            continue
        filled = list(_of_fill(fill, tensors))
        if not filled and not fill.is_optional and not _may_be_nowhere(fill, rules, direction):
            raise MapError(
                "what is made up beside other tensors is made nowhere",
                expected=f"tensors {fill.beside.text if fill.beside is not None else ''} of the target",
                got=shortened([tensor.name for tensor in tensors]) or "no tensors",
                where=fill.where,
                remedy="mend the name, or say optional = true if there need not be any",
            )
        for constant in filled:
            if like is not None and (constant.name not in like.shapes or constant.name in names):
                continue
            if constant.name in names or constant.name in constants:
                raise MapError(f"what is made up has the name of another tensor: {constant.name}", where=fill.where)
            constants[constant.name] = constant
    return list(constants.values())


def _may_be_nowhere(fill: Fill, rules: Rules, direction: Direction) -> bool:
    """Tell whether the equations make the sibling of a fill, so that it lacks only where they do not apply."""
    if fill.beside is None:
        return False
    terms = [term for rule in (*rules.equations, *rules.states) for term in direction.sides(rule)[1]]
    names = (term.name.filled({capture.name: "0" for capture in term.name.captures}) for term in terms)
    return any(fill.beside.match(name) is not None for name in names)


def _of_fill(fill: Fill, tensors: Sequence[DerivedTensor]) -> Iterator[ConstantTensor]:
    if fill.beside is None:
        assert fill.shape is not None and fill.dtype is not None
        yield ConstantTensor(fill.name.text, TensorType(fill.dtype, fill.shape), fill.element(fill.dtype), fill.where)
        return
    beside: NamePattern = fill.beside
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        values = beside.match(tensor.name)
        # `{p*}` may stand for what is before a parameter in its state as well; a map that names state means it.
        is_of_state = values is not None and any(
            base in names and beside.match(base) is not None and is_named_as_state(tensor.name, base)
            for base in named_after(tensor.name)
        )
        if values is not None and not is_of_state:
            name = fill.name.filled({capture.name: value for capture, value in zip(beside.captures, values)})
            dtype = fill.dtype or tensor.dtype
            shape = tensor.assembly.shape if fill.shape is None else fill.shape
            yield ConstantTensor(name, TensorType(dtype, shape), fill.element(dtype), fill.where, tensor.name)


def dropped(
    rules: Rules,
    left: Sequence[str],
    inventory: Inventory,
    direction: Direction,
    wanted: TemplateShapes,
    told: Mapping[str, str],
) -> dict[str, Drop]:
    """Return the tensors that are left out, each with the entry of the map that says so.

    A pattern that a parameter matches speaks of parameters: their state is left out with them, and only then.

    Args:
        left: the names of tensors that no equation takes.
        wanted: what the target is to have is not left out.
        told: as `Selection.owners`.

    Raises MapError for an entry that leaves nothing out, though it must, or loses what nothing makes up again.
    """
    _require_made_up_again(rules, direction)
    drops = [drop for drop in rules.drops if drop.side == direction.source_side]
    shapes = {name: kind.shape for name, kind in inventory.items()}
    in_part = owners_in_part(shapes, told) if drops else OwnersInPart({}, {})
    owner_of = {**in_part.owner_of, **owners(left, shapes, rules, direction, told)} if drops else {}
    entries: dict[str, Drop] = {}
    for drop in drops:
        pattern = Pattern(drop.glob)
        named = {
            name
            for name in left
            if pattern.matches(name) and not any(map(pattern.matches, owned_by(name, owner_of))) and name not in wanted
        }
        if not named and not drop.is_optional:
            raise MapError(
                "nothing is left out by a pattern",
                expected=f"tensors {drop.glob!r} that no equation takes",
                got=", ".join(left[:MAX_NAMED]) or "none that is left",
                where=drop.where,
                remedy="mend the pattern, or say optional = true if it need not match",
            )
        for name in left:
            is_state = name not in wanted and not named.isdisjoint(owned_by(name, owner_of))
            if name in named or is_state:
                earlier = entries.get(name)
                entries[name] = drop if earlier is None or drop.are_zeros else earlier
    in_part.require_no_doubt(entries, left)
    return entries


def states_among(
    names: Mapping[str, Drop], inventory: Inventory, rules: Rules, direction: Direction, told: Mapping[str, str]
) -> Iterator[str]:
    """Yield the excluded tensors whose parameters are excluded as well."""
    shapes = {name: kind.shape for name, kind in inventory.items()}
    owner_of = {**owners_in_part(shapes, told).owner_of, **owners(names, shapes, rules, direction, told)}
    yield from (name for name in names if owner_of.get(name) in names)


def zeros(entries: Mapping[str, Drop], inventory: Inventory) -> Iterator[Pads]:
    """Yield the tensors that are left out and may hold only zeros."""
    for name, drop in entries.items():
        if drop.are_zeros:
            yield Pads(name, (Box.whole(inventory[name].shape),), False, drop.where)


def _require_made_up_again(rules: Rules, direction: Direction) -> None:
    """Raise MapError for tensors dropped in the other direction that this direction does not make again."""
    for drop in rules.drops:
        if drop.side == direction.source_side or drop.is_optional:
            continue
        if not any(fill.side == drop.side and may_make(fill, drop.glob) for fill in rules.fills):
            raise MapError(
                f"read {direction}, the map loses what it leaves out in the other direction",
                expected="a [[map]] entry with fill that makes it up, or optional = true",
                got=f"drop = {drop.glob!r}",
                where=drop.where,
            )
