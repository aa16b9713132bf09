"""Define the result of a map: derived tensors, constants, counted scalars (`MapResult`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest import rebuild_tree
from reshard_mpi.formats.nest.nodes import MODEL, Dict, is_whole_training
from reshard_mpi.formats.protocol import Packed, Part, SameParts
from reshard_mpi.formats.structure import MAX_DIMENSIONS, MAX_NAME_BYTES
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.box_pairs import Assembly, BoxPair, TermTensor
from reshard_mpi.mapping.direction import Direction, Inventory, TemplateShapes
from reshard_mpi.mapping.rules import (
    Count,
    Number,
    Rules,
    Unlike,
    count_element,
    element_of,
    require_power,
    setting,
    worth,
)
from reshard_mpi.sharding.box import Box


class CountedScalars(NamedTuple):
    """Tensors of the source that hold numbers of an optimizer, which are computed anew for the target."""

    rule: Count | None
    steps: tuple[str, ...]  # the tensors with the number of steps taken, all the same, by `rule`
    numbers: tuple[tuple[str, Number], ...]  # the tensors with settings
    plain: float | None = None  # the number of steps, where it is a plain number beside the tensors

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.steps, *(name for name, _ in self.numbers))


class Computed(NamedTuple):
    """A tensor of one element that is computed."""

    name: str
    kind: TensorType
    steps: str | None  # the tensor that holds how many steps were taken; None if it is not needed
    number: Number | None  # what it is, with `steps`; None: the steps themselves
    where: str


def counted(
    rules: Rules,
    left: Mapping[str, None],
    inventory: Inventory,
    direction: Direction,
    like: TemplateShapes | None,
    settings: Mapping[str, Any],
) -> CountedScalars:
    """Return the numbers among the tensors that no equation has taken; the target has none of them as they are.

    Args:
        settings: of the source's optimizer, where the number of steps may be as well.

    Raises MapError if parameters have taken different numbers of steps.
    """
    wanted = like or {}
    for count in rules.counts:
        if direction.is_forward:
            values = ((name, count.each.match(name)) for name in left)
            steps = tuple(name for name, value in values if value is not None and value[0] in inventory)
            plain = setting(settings, count.each.literals[-1].rpartition(".")[2])
            if isinstance(plain, Unlike) and not steps and (like is None or count.total in like):
                raise MapError(
                    f"{count.total} cannot be made: the optimizer has taken different numbers of steps for parameters",
                    expected="one number of steps",
                    got=", ".join(map(str, dict.fromkeys(map(str, plain.values)))),
                    where=count.where,
                    remedy="leave the optimizer's state out (--exclude)",
                )
            is_count = type(plain) in (int, float)
            if (steps or is_count) and (like is None or count.total in like):
                return CountedScalars(count, steps, (), None if steps or not is_count else plain)
        elif count.total in left and count.total not in wanted:
            return CountedScalars(count, (count.total,), tuple(_numbers(rules, left, wanted)))
    return CountedScalars(None, (), () if direction.is_forward else tuple(_numbers(rules, left, wanted)))


def _numbers(rules: Rules, left: Mapping[str, None], wanted: TemplateShapes) -> Iterator[tuple[str, Number]]:
    for number in rules.numbers:
        if number.name in left and number.name not in wanted:
            yield number.name, number


def computed(
    rules: Rules,
    scalars: CountedScalars,
    made_names: Collection[str],
    settings: Mapping[str, Any],
    direction: Direction,
    like: TemplateShapes | None,
) -> Iterator[Computed]:
    """Yield computed scalars: from `scalars`, and from the optimizer settings on the left.

    Args:
        made_names: the names of all tensors that are made otherwise.
    """
    steps = scalars.steps[0] if scalars.steps else None
    if not direction.is_forward:
        if scalars.rule is not None:
            count = scalars.rule
            for name in made_names:
                value = count.beside.match(name)
                if value is not None:
                    each = count.each.filled({count.each.captures[0].name: value[0]})
                    yield Computed(each, TensorType(count.each_type, _shape(each, (), like)), steps, None, count.where)
        return
    if scalars.rule is not None:
        total, dtype = scalars.rule.total, scalars.rule.total_type
        yield Computed(total, TensorType(dtype, _shape(total, (1,), like)), steps, None, scalars.rule.where)
    for number in rules.numbers:
        is_wanted = like is None or number.name in like
        if (
            is_wanted
            and number.name not in made_names
            and worth(number, settings, 1 if steps is not None or scalars.plain is not None else None) is not None
        ):
            kind = TensorType(number.dtype, _shape(number.name, (), like))
            yield Computed(number.name, kind, steps if number.is_power else None, number, number.where)


def values_of(
    numbers: Iterable[Computed], scalars: CountedScalars, settings: Mapping[str, Any], read: Callable[[str], float]
) -> Iterator[tuple[Computed, bytes]]:
    """Yield computed scalars with the bytes of their element.

    Args:
        read: returns the number that a tensor of the source holds.

    Raises MapError if a type cannot hold a number, or if one of `scalars` does not belong to the settings.
    """
    for name, number in scalars.numbers:
        if number.is_power and scalars.steps:
            require_power(number, settings, read(scalars.steps[0]), read(name), name)
    for wanted in numbers:
        steps = scalars.plain if wanted.steps is None else read(wanted.steps)
        value = steps if wanted.number is None else worth(wanted.number, settings, steps)
        assert value is not None
        encode = count_element if wanted.number is None else element_of
        yield wanted, encode(value, wanted.kind.dtype, wanted.name, wanted.where)


def _shape(name: str, usual: tuple[int, ...], like: TemplateShapes | None) -> tuple[int, ...]:
    """Return the shape of a tensor of one element: as in the target, if the target has it with one element."""
    shape = usual if like is None else like.get(name, usual)
    return shape if all(length == 1 for length in shape) else usual


class DerivedTensor(NamedTuple):
    """A tensor that is made of others."""

    name: str
    dtype: DType
    assembly: Assembly
    sources: Mapping[TermTensor, str]  # the names of the tensors that pairs take from
    where: str  # the place of the equation in the map; empty for a tensor that no equation takes


def taken_of(tensor: DerivedTensor) -> tuple[TermTensor, ...]:
    """Return which of its sources a tensor is made of: an equation of several tensors may take others besides.

    One that has no element of any, since it has none itself or only zeros, is made of all.
    """
    return tuple(dict.fromkeys(pair.source for pair in tensor.assembly.pairs)) or tuple(tensor.sources)


def names_taken(tensor: DerivedTensor) -> frozenset[str]:
    """Return the names of the tensors that a tensor is made of."""
    return frozenset(tensor.sources[place] for place in taken_of(tensor))


class ConstantTensor(NamedTuple):
    """A tensor that is made up.

    Attributes:
        element: the bytes of each of its elements.
        sibling: the name of the tensor that it is made up beside; empty: of none.
    """

    name: str
    kind: TensorType
    element: bytes
    where: str
    sibling: str = ""

    @property
    def assembly(self) -> Assembly:
        """Its shape, all of it made of no source."""
        return Assembly(self.kind.shape, (), (Box.whole(self.kind.shape),))


class Equal(NamedTuple):
    """Tensors that are equal, so that one is read for all. where: the equation's place in the map."""

    names: tuple[str, ...]
    where: str


class Pads(NamedTuple):
    """Boxes of a source tensor that go nowhere. are_dropped: whether they may hold anything; else only zeros."""

    name: str
    boxes: tuple[Box, ...]
    are_dropped: bool
    where: str


class MapResult(NamedTuple):
    """All that a map makes of a checkpoint."""

    made: tuple[DerivedTensor, ...]
    constants: tuple[ConstantTensor, ...]
    equal: tuple[Equal, ...]
    pads: tuple[Pads, ...]
    left_out: tuple[str, ...]  # the names of tensors that go nowhere
    direction: Direction | None
    # tensors of one element that are computed, with the `settings` of the optimizer on the left
    computed: tuple[Computed, ...] = ()
    counted: CountedScalars = CountedScalars(None, (), ())  # tensors of the source with values that are computed anew
    cautions: tuple[str, ...] = ()  # what people must know of it, in words
    settings: Mapping[str, Any] = MappingProxyType({})
    states_left_out: tuple[str, ...] = ()  # the ones left out with the parameter whose state they are
    # state that stays while its parameter goes, which is left out after a later map
    stranded: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()  # on what nothing but the map's usual lengths decides
    # of what is made of tensors and gets another type by `--dtype`: the one that it has without it
    own_types: Mapping[str, DType] = MappingProxyType({})
    beside: frozenset[str] = frozenset()  # what is made beside the model of a training

    @property
    def kinds(self) -> dict[str, TensorType]:
        """The type and shape of every tensor, by its name."""
        kinds = {tensor.name: TensorType(tensor.dtype, tensor.assembly.shape) for tensor in self.made}
        kinds |= {constant.name: constant.kind for constant in self.constants}
        return kinds | {number.name: number.kind for number in self.computed}

    @property
    def in_own_types(self) -> MapResult:
        """The same without `--dtype`, as far as tensors are made of others."""
        if not self.own_types:
            return self
        own = self.own_types
        made = tuple(tensor._replace(dtype=own.get(tensor.name, tensor.dtype)) for tensor in self.made)
        return self._replace(made=made, own_types=MappingProxyType({}))


def model_alone(
    kinds: Mapping[str, TensorType], strings: Mapping[str, str], own_types: Mapping[str, DType]
) -> Packed | None:
    """Return the model of a whole training as files that hold nothing else; None if the tensors are of none.

    A weight in 16 bit that `--dtype` makes float32 is the optimizer's copy of it in that type, where there is one: the
    weight must be that rounded. Raises MapError if no tensor is the model's.

    Args:
        own_types: of the tensors that `--dtype` gives another type: the one that they have without it, by name.
    """
    if not is_whole_training(strings.get(NEST)):
        return None
    copies = _full_precision(kinds, strings, own_types)
    parts = [
        Part(name.removeprefix(MODEL), copies.get(name, name), Box.whole(kind.shape))
        for name, kind in kinds.items()
        if name.startswith(MODEL)
    ]
    if not parts:
        raise MapError(
            "no tensor of the model is left to be written",
            expected="weights: a folder of Hugging Face holds the model alone",
            got=f"{len(kinds)} tensors of a whole training, none of them of its model",
            remedy="include tensors of the model, or choose a format for whole trainings: --to torch or --to dcp",
        )
    taken = {part.source for part in parts}
    others = tuple(name for name in kinds if not name.startswith(MODEL) and name not in taken)
    compared = [
        SameParts.of_copy(part, MODEL + part.name, own_types[MODEL + part.name].name, "the optimizer", part.name)
        for part in parts
        if part.source != MODEL + part.name
    ]
    return Packed("", [parts], strings, left_out=others, compared=[compared])


def _full_precision(
    kinds: Mapping[str, TensorType], strings: Mapping[str, str], own_types: Mapping[str, DType]
) -> dict[str, str]:
    """Return the optimizer's copies of the weights that `--dtype` widens to float32, by the names of the weights."""
    widened = {name for name, dtype in own_types.items() if dtype.itemsize_bytes == 2}
    copies = {}
    for name, kind in kinds.items():
        own = name.removeprefix("optimizer.state.").removesuffix(".fp32_param")
        weight = kinds.get(MODEL + own)
        is_copy = name == f"optimizer.state.{own}.fp32_param" and kind.dtype.name == "float32"
        if is_copy and weight == kind and MODEL + own in widened:
            copies[MODEL + own] = name
    if copies:
        root = rebuild_tree.rebuild(dict.fromkeys(kinds), strings)
        shared = root.get("shared_params") if type(root) is Dict else None
        for second, first in shared.pairs() if type(shared) is Dict else ():
            if f"{MODEL}{first}" in copies and f"{MODEL}{second}" in widened:
                copies[f"{MODEL}{second}"] = copies[f"{MODEL}{first}"]
    return copies


def parts_of(packed: Packed, files: Iterable[Sequence[Part]], kinds: Mapping[str, TensorType]) -> MapResult:
    """Return the parts of tensors that a format packs into its files, in the form of a map's result.

    Args:
        files: the parts of each of the files that are asked for.
        kinds: of the tensors, by name.
    """
    assemblies: dict[Box, Assembly] = {}
    source = TermTensor(0, ())
    made = []
    for part in (part for file in files for part in file):
        assembly = assemblies.get(part.box)
        if assembly is None:
            pair = BoxPair(source, part.box, Box.whole(part.box.shape), None)
            assembly = assemblies[part.box] = Assembly(part.box.shape, (pair,), ())
        dtype = BY_NAME[part.dtype] if part.dtype else kinds[part.source].dtype
        made.append(DerivedTensor(part.name, dtype, assembly, {source: part.source}, ""))
    equal = tuple(Equal(names, "the optimizer's groups") for names in packed.equal if len(names) > 1)
    return MapResult(tuple(made), (), equal, (), packed.left_out, None)


def require_holdable(mapped: MapResult) -> None:
    """Raise MapError for a tensor whose name or shape is more than a shard is read with."""
    shapes = [(tensor.name, tensor.assembly.shape, tensor.where) for tensor in mapped.made]
    shapes += [(constant.name, constant.kind.shape, constant.where) for constant in mapped.constants]
    shapes += [(number.name, number.kind.shape, number.where) for number in mapped.computed]
    for name, shape, where in shapes:
        length_bytes = len(name.encode(errors="replace"))
        if length_bytes > MAX_NAME_BYTES:
            raise MapError(
                "a name that the map makes is too long",
                expected=f"at most {MAX_NAME_BYTES} bytes",
                got=f"{length_bytes} bytes: {name[:80]}...",
                where=where,
            )
        if len(shape) > MAX_DIMENSIONS:
            raise MapError(
                f"{name} would have too many dimensions",
                expected=f"at most {MAX_DIMENSIONS}",
                got=str(len(shape)),
                where=where,
                remedy="leave axes of length 1 out, or put axes together: (a b)",
            )
