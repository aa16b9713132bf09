"""Take quantized weights through maps with their companions (`companions_followed`), or dequantize them before.

Equations are for the tensors that hold the elements of weights. What they do to a weight's boxes they do to those of
its companions, in steps of the grain; where a box begins or ends elsewhere, or a companion would have to be two things
at once, the map is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from reshard_mpi.errors import MapError, ReshardError
from reshard_mpi.mapping.apply_to_file import MappedFile
from reshard_mpi.mapping.box_pairs import Assembly, BoxPair, TermTensor
from reshard_mpi.mapping.chain import composed
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.result import DerivedTensor, MapResult, taken_of
from reshard_mpi.mapping.selection import ANY, Selection
from reshard_mpi.quantization.grouping import quantized_weights
from reshard_mpi.quantization.layouts import fit, layout_of
from reshard_mpi.quantization.weights import Companion, QuantizedWeight, QuantizedWeights, Relation, StoredWeight
from reshard_mpi.sharding.box import Box, overlapping
from reshard_mpi.sharding.strategy import Pattern
from reshard_mpi.sharding.strides import paired
from reshard_mpi.text import counted

# Kinds of schemes in which no byte holds parts of several elements: only then may axes change places.
_UNPACKED = ("fp8", "int8")
Weights = Mapping[str, StoredWeight]
# Types into which no weight is dequantized.
_NARROW = ("float8_e4m3fn", "float8_e5m2")


def without_companions(inventory: Inventory, weights: Weights) -> Inventory:
    """Return the tensors that equations and patterns see: companions go with their weights."""
    hidden = {companion.name for stored in weights.values() for companion in stored.weight.companions}
    return {name: kind for name, kind in inventory.items() if name not in hidden}


def _followed(mapped: MapResult, weights: Weights, inventory: Inventory) -> tuple[MapResult, Weights]:
    """Return the result of a map with the companions of the quantized weights that it makes, and these weights.

    Args:
        weights: the quantized ones among the tensors that the map takes.
        inventory: all of these, companions too.

    Raises MapError where companions cannot follow exactly.
    """
    made: list[DerivedTensor] = []
    new_weights: dict[str, StoredWeight] = {}
    assemblies: dict[object, Assembly] = {}
    for tensor in mapped.made:
        places = {place: tensor.sources[place] for place in taken_of(tensor)}
        quantized = {place: weights[name].weight for place, name in places.items() if name in weights}
        if not quantized:
            made.append(tensor)
            continue
        _require_stored_type(tensor, next(iter(quantized.values())), inventory)
        weight, companions = _Following(tensor, places, quantized, inventory, assemblies).made()
        new_weights[tensor.name] = StoredWeight(weight, tensor.assembly.shape)
        made += companions
    _require_different(made, mapped)
    taken = {name for tensor in made for name in tensor.sources.values()}
    left_out = [
        companion.name
        for stored in weights.values()
        for companion in stored.weight.companions
        if companion.name not in taken
    ]
    return mapped._replace(made=tuple(made), left_out=(*mapped.left_out, *left_out)), new_weights


def _require_stored_type(tensor: DerivedTensor, weight: QuantizedWeight, inventory: Inventory) -> None:
    """Raise MapError if stored elements of a quantized weight would be converted, without their scales."""
    stored = inventory[weight.stored].dtype
    if tensor.dtype != stored:
        raise MapError(
            f"the elements that are stored of {weight.stored} would be converted without their scales",
            expected=f"{tensor.name} in {stored} as well, or of a weight that is dequantized",
            got=str(tensor.dtype),
            where=tensor.where,
            remedy="dequantize all weights before the map (--dtype bf16), or give this one no other type",
        )


class _Following:
    """A quantized weight that a map makes, for which its companions are made.

    Args:
        places: the names of the tensors that it is made of.
        quantized: those of them that are quantized: all, or the map is refused.
        assemblies: kept for tensors that are made in the same way, which get the same object.
    """

    def __init__(
        self,
        tensor: DerivedTensor,
        places: Mapping[TermTensor, str],
        quantized: Mapping[TermTensor, QuantizedWeight],
        inventory: Inventory,
        assemblies: dict[object, Assembly],
    ) -> None:
        self._tensor, self._sources, self._inventory, self._assemblies = tensor, quantized, inventory, assemblies
        self._first = next(iter(quantized.values()))
        plain = [name for place, name in places.items() if place not in quantized]
        if plain:
            raise self._refusal(f"{self._first.stored} is quantized, and {plain[0]} is not", "all of one kind")
        for weight in quantized.values():
            if (weight.scheme, weight.grain) != (self._first.scheme, self._first.grain) or [
                (each.role, each.dims) for each in weight.companions
            ] != [(each.role, each.dims) for each in self._first.companions]:
                raise self._refusal(
                    f"{self._first.stored} and {weight.stored} are quantized in different ways", "one way"
                )
        if tensor.assembly.zeros:
            raise self._refusal("zeros would be added, which have no scale", "no padding")
        self._source_of, self._is_same_order = self._dimensions()
        self._require_runs()

    def made(self) -> tuple[QuantizedWeight, list[DerivedTensor]]:
        """Return the weight, and it with its companions as tensors of the target, in the order of the source."""
        tensor, first = self._tensor, self._first
        whole = self._is_whole
        if first.scheme.kind == "whole" and not whole:
            raise self._refusal("its tensors are moved whole", "it renamed at most")
        grain = tuple(1 if dim is None else first.grain[dim] for dim in self._source_of)
        companions, derived = [], []
        for number, companion in enumerate(first.companions):
            names = {place: weight.companions[number].name for place, weight in self._sources.items()}
            dims = companion.dims if whole else self._new_dims(companion)
            new = companion._replace(name=_renamed(companion.name, first.stored, tensor.name), dims=dims)
            kinds = {self._inventory[name] for name in names.values()}
            if len(kinds) > 1 and any(kind.dtype != next(iter(kinds)).dtype for kind in kinds):
                raise self._refusal(f"{companion.name} and its like have different types", "one type")
            assembly = self._assembly(companion, new, names)
            companions.append(new)
            derived.append(DerivedTensor(new.name, next(iter(kinds)).dtype, assembly, names, tensor.where))
        weight = first._replace(
            name=_renamed(first.name, first.stored, tensor.name),
            stored=tensor.name,
            shape=self._logical_shape,
            grain=grain,
            companions=tuple(companions),
        )
        order = {name: number for number, name in enumerate(self._inventory)}
        own = [tensor, *derived]
        own.sort(key=lambda each: min(order[name] for name in each.sources.values()))
        return weight, own

    @property
    def _logical_shape(self) -> tuple[int, ...]:
        """The shape of the weight that is made, once it is dequantized."""
        scheme, shape = self._first.scheme, self._tensor.assembly.shape
        if self._is_whole or scheme.kind in _UNPACKED:
            return self._first.shape if self._is_whole else shape
        made = fit(layout_of(scheme), shape, {}, None).shape
        if scheme.kind != "packed":
            return made
        # The last word of a row may not be full: the last columns of all tell where it ends.
        last = next(pair for pair in self._tensor.assembly.pairs if pair.to.stop[-1] == shape[-1])
        left_out = self._sources[last.source].shape[-1] - last.region.stop[-1] * 32 // scheme.bits
        return (*made[:-1], made[-1] + min(0, left_out))

    @property
    def _is_whole(self) -> bool:
        """Whether the map only renames the weight."""
        (pair, *others) = self._tensor.assembly.pairs or (None,)
        source = self._inventory[self._first.stored].shape
        return (
            pair is not None
            and not others
            and pair.region == Box.whole(source)
            and pair.to == Box.whole(source)
            and pair.order in (None, tuple(range(len(source))))
        )

    def _dimensions(self) -> tuple[tuple[int | None, ...], bool]:
        """Return the source's dimension for each of the target's, None for one along which weights are stacked.

        Also whether dimensions keep their order.
        """
        assembly = self._tensor.assembly
        source_of: list[int | None] = [None] * len(assembly.shape)
        source_shape = self._inventory[self._first.stored].shape
        for pair in assembly.pairs:
            pairs = paired(pair.region, pair.to, pair.order)
            if pair.order is None and pair.region.shape == pair.to.shape:
                pairs = tuple((dim, dim) for dim in range(pair.to.ndim))
            for dim, target_dim in pairs:
                if source_of[target_dim] not in (None, dim):
                    raise self._refusal("its axes are joined or divided", "axes that stay axes")
                source_of[target_dim] = dim
        ones = [dim for dim, length in enumerate(source_shape) if length == 1 and dim not in source_of]
        free = [dim for dim, length in enumerate(assembly.shape) if length == 1 and source_of[dim] is None]
        for dim, target_dim in zip(reversed(ones), reversed(free)):
            source_of[target_dim] = dim
        known = [dim for dim in source_of if dim is not None]
        dropped = [dim for dim in range(len(source_shape)) if dim not in known]  # along which weights were stacked
        is_taken_apart = all(pair.region.shape[dim] == 1 for pair in assembly.pairs for dim in dropped)
        if not is_taken_apart or len(set(known)) != len(known) or any(self._first.grain[dim] != 1 for dim in dropped):
            raise self._refusal("its axes are joined or divided", "axes that stay axes")
        is_same = known == sorted(known)
        rows, columns = self._first.scheme.block
        if not is_same and self._first.scheme.kind not in _UNPACKED:
            raise self._refusal("its elements are packed along an axis, and the axes change places", "axes in order")
        if not is_same and rows != columns:
            raise self._refusal(
                f"its axes change places, and blocks of {rows} x {columns} are none of the configuration then",
                "axes in order, or square blocks",
            )
        return tuple(source_of), is_same

    def _require_runs(self) -> None:
        """Raise MapError if words, each of several elements, are put among each other one by one.

        An equation that weaves heads means elements, and these would stay together.
        """
        scheme, shape = self._first.scheme, self._inventory[self._first.stored].shape
        axes = layout_of(scheme).stored.axes if scheme.kind not in (*_UNPACKED, "whole") else ()
        for dim, axis in enumerate(axes, len(shape) - len(axes)):
            if axis.of is None or axis.ratio == 1 or dim not in self._source_of:
                continue
            target_dim, shifts = self._source_of.index(dim), dict[TermTensor, int]()
            for pair in self._tensor.assembly.pairs:
                shift = pair.to.start[target_dim] - pair.region.start[dim]
                if pair.region.shape[dim] == 1 and shifts.setdefault(pair.source, shift) != shift:
                    problem = (
                        f"{1 / axis.ratio} elements lie in one along dimension {dim}, and they are woven one by one"
                    )
                    raise self._refusal(problem, "parts of several that stay in order")

    def _new_dims(self, companion: Companion) -> tuple[Relation | None, ...]:
        """Return how the dimensions of a companion belong to the target weight's."""
        own = {relation.dim: relation for relation in companion.dims if relation is not None}
        related: list[Relation | None] = []
        for dim, source_dim in enumerate(self._source_of):
            if source_dim is None:
                related.append(Relation(dim, 1))
            elif source_dim in own:
                related.append(own[source_dim]._replace(dim=dim))
        others = [number for number, relation in enumerate(companion.dims) if relation is None]
        if others and not self._is_same_order:
            raise self._refusal(f"{companion.name} has an axis that is none of the weight's", "axes in order")
        for number in others:
            gone = sum(1 for each in companion.dims[:number] if each is not None and each.dim not in self._source_of)
            related.insert(number + self._source_of.count(None) - gone, None)
        return tuple(related)

    def _assembly(self, companion: Companion, new: Companion, names: Mapping[TermTensor, str]) -> Assembly:
        """Return how a companion of the target is made of its like in the sources."""
        kinds = {place: self._inventory[name].shape for place, name in names.items()}
        key = (id(self._tensor.assembly), companion.dims, new.dims, tuple(kinds.items()))
        if key in self._assemblies:
            return self._assemblies[key]
        is_stated = companion.role == "shape" and companion.dims == new.dims == (None,)  # and said anew when planned
        if is_stated or (new.dims == companion.dims and self._is_whole):
            source = self._tensor.assembly.pairs[0].source
            assembly = Assembly.whole(source, kinds[source])
        else:
            pairs: dict[Box, BoxPair] = {}
            for pair in self._tensor.assembly.pairs:
                moved = self._moved(pair, companion, new, kinds[pair.source])
                if pairs.setdefault(moved.to, moved) != moved:
                    raise self._refusal(f"{companion.name} and its like would have to be one", "the same in all parts")
            lengths = [
                kinds[self._tensor.assembly.pairs[0].source][companion.dims.index(None)]
                if relation is None
                else relation.length(self._tensor.assembly.shape[relation.dim])
                for relation in new.dims
            ]
            assembly = Assembly(tuple(lengths), tuple(pairs.values()), ())
            whole = Box.whole(tuple(lengths))
            is_covered = sum(pair.to.size for pair in pairs.values()) == whole.size
            if not is_covered or any(True for _ in overlapping(list(pairs), whole)):
                raise self._refusal(f"{companion.name} and its like do not make up one", "parts that join exactly")
        self._assemblies[key] = assembly
        return assembly

    def _moved(self, pair: BoxPair, companion: Companion, new: Companion, whole: tuple[int, ...]) -> BoxPair:
        """Return the pair of a companion's boxes for a pair of its weight's."""
        source_shape = self._inventory[self._sources[pair.source].stored].shape
        for dim, target_dim in ((dim, number) for number, dim in enumerate(self._source_of) if dim is not None):
            grain = self._first.grain[dim]
            begins = pair.region.start[dim], pair.to.start[target_dim]
            ends = pair.region.stop[dim], pair.to.stop[target_dim]
            is_end = ends == (source_shape[dim], self._tensor.assembly.shape[target_dim])
            if any(begin % grain for begin in begins) or (any(end % grain for end in ends) and not is_end):
                name = self._sources[pair.source].stored
                raise self._refusal(
                    f"a part begins or ends within a block, at {begins[0]} to {ends[0]} of {name}",
                    f"parts that are multiples of {grain} along dimension {dim}",
                )
        region, to = _box(companion, pair.region, whole), _box(new, pair.to, whole, companion)
        order = None
        if not self._is_same_order:
            own = [None if relation is None else relation.dim for relation in companion.dims]
            order = tuple(own.index(dim) for dim in self._source_of if dim is not None and dim in own)
        return BoxPair(pair.source, region, to, order)

    def _refusal(self, problem: str, expected: str) -> MapError:
        return MapError(
            f"{self._tensor.name} cannot be made of quantized weights: {problem}",
            expected=f"what scales follow exactly: {expected}",
            got=", ".join(sorted({weight.stored for weight in self._sources.values()})[:4]),
            where=self._tensor.where,
            remedy="dequantize (--dtype bf16), which makes plain weights before the map",
        )


def _box(companion: Companion, box: Box, whole: tuple[int, ...], source: Companion | None = None) -> Box:
    """Return the box of a companion for one of its weight.

    Args:
        whole: the shape of the source's companion, which tells how long axes of its own are.
        source: that, if `companion` is the target's.
    """
    start, stop = [], []
    own = iter([length for length, relation in zip(whole, (source or companion).dims) if relation is None])
    for relation in companion.dims:
        start.append(0 if relation is None else relation.length(box.start[relation.dim]))
        stop.append(next(own) if relation is None else relation.length(box.stop[relation.dim]))
    return Box(tuple(start), tuple(stop))


def _renamed(name: str, stored: str, new_stored: str) -> str:
    """Return the name of a companion of `stored` beside a weight of another name: `w_scale` beside `v` is `v_scale`."""
    same = next((at for at, (one, other) in enumerate(zip(name, stored)) if one != other), min(len(name), len(stored)))
    begin, end = stored[:same], stored[same:]
    if not new_stored.endswith(end):
        return f"{new_stored}_{name.rpartition('.')[2]}"
    return new_stored[: len(new_stored) - len(end)] + name[len(begin) :]


def _require_different(made: Iterable[DerivedTensor], mapped: MapResult) -> None:
    seen = {constant.name for constant in mapped.constants}
    for tensor in made:
        if tensor.name in seen:
            raise MapError(
                f"two tensors would have the name {tensor.name}",
                expected="another name for each tensor of the target",
                where=tensor.where,
                remedy="mend the equations: what is stored beside a quantized weight is named after it",
            )
        seen.add(tensor.name)


def to_dequantize(
    quantization: QuantizedWeights, choice: Selection, *, is_mapped: bool
) -> tuple[tuple[QuantizedWeight, ...], QuantizedWeights | None]:
    """Return the weights that `--dtype` dequantizes, and the quantized ones that are left, if any.

    Args:
        is_mapped: whether a map is applied after that, which may give them other names.

    Raises MapError for weights that cannot be dequantized, and for types that are none of plain weights.
    """
    chosen: list[QuantizedWeight] = []
    for stored in quantization.weights.values():
        weight = stored.weight
        names = (weight.name, weight.stored)
        types = [(glob, dtype) for glob, dtype in choice.types if glob == ANY or any(map(Pattern(glob).matches, names))]
        if not types:
            continue
        glob, dtype = types[-1]
        if glob != ANY and is_mapped:
            raise MapError(
                f"--dtype {glob}=... would dequantize {weight.stored} before a map that may give it another name",
                expected="with --map, a type for all: --dtype TYPE",
                got=f"a pattern that matches {weight.stored}",
                where=quantization.where,
            )
        inputs = next((each.name for each in weight.companions if each.name.endswith("pre_quant_scale")), None)
        if dtype.name in _NARROW or weight.scheme.kind == "whole" or inputs is not None:
            way = f"and {dtype} is no type to dequantize it"
            if weight.scheme.kind == "whole":
                way = "whose form is not known well enough to dequantize it"
            elif inputs is not None:
                way = f"and {inputs} scales its module's inputs, of which a plain weight knows nothing"
            raise MapError(
                f"{weight.stored} is quantized by {weight.scheme.name}, {way}",
                expected="--dtype bf16, fp16 or fp32, of weights that can be dequantized",
                got=f"--dtype {'' if glob == ANY else f'{glob}='}{dtype}",
                where=quantization.where,
                remedy="leave --dtype out: quantized weights are moved as they are",
            )
        chosen.append(weight)
    if not chosen:
        return (), quantization
    gone = {weight.stored for weight in chosen}
    left = {name: stored for name, stored in quantization.weights.items() if name not in gone}
    return tuple(chosen), QuantizedWeights(quantization.text, left, quantization.where) if left else None


def companions_followed(
    made: MappedFile, quantization: QuantizedWeights, inventory: Inventory
) -> tuple[MappedFile, QuantizedWeights | None]:
    """Return what maps make with the companions of quantized weights, and the quantized weights that they make.

    Args:
        inventory: all tensors of the checkpoint, companions too.

    Raises MapError where companions cannot follow.
    """
    results = []
    weights = quantization.weights
    for mapped in made.mapped:
        mapped, weights = _followed(mapped, weights, inventory)
        inventory = mapped.kinds
        results.append(mapped)
    made = made._replace(mapped=tuple(results), made=composed(results))
    if not weights:
        return made, None
    if _says(quantization, weights, inventory):
        return made, QuantizedWeights(quantization.text, weights, quantization.where)
    warning = (
        f"{quantization.where} names modules as they were before the map, so the targets do not say how they are"
        " quantized: give a configuration with the new names (--config) where they are read"
    )
    made = made._replace(warnings=(*made.warnings, warning))
    return made, QuantizedWeights("", weights, quantization.where)


def _says(quantization: QuantizedWeights, weights: Weights, inventory: Inventory) -> bool:
    """Tell whether the configuration, which may name modules, still says how the weights are quantized."""
    every = (stored.weight for stored in weights.values())
    stated = {shape.name: weight.shape for weight in every if (shape := weight.companion("shape")) is not None}
    try:
        said = quantized_weights(json.loads(quantization.text), inventory, quantization.where, stated.get)
    except ReshardError:
        return False
    # One that is moved whole for what its tensors hold is told by the rest of its scheme.
    schemes = {name: stored.weight.scheme._replace(kind="") for name, stored in weights.items()}
    return {weight.stored: weight.scheme._replace(kind="") for weight in said} == schemes


def notes_on_dequantized(dequantized: Sequence[QuantizedWeight]) -> tuple[str, ...]:
    """Return a note on the weights that are dequantized."""
    if not dequantized:
        return ()
    names = " and ".join(sorted({weight.scheme.name for weight in dequantized}))
    return (
        f"dequantized {counted(len(dequantized), 'weight')} of {names}: take quantization_config out of the model's"
        " configuration (config.json)",
    )
