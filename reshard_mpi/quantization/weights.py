"""Describe quantized weights and their companions, and place these as the weights are cut (`QuantizedWeights`).

A cut on the grain of a weight cuts its companions at whole elements, so that it is a matter of bytes. Elsewhere two
ranks would need the scale of one block, and no file of a rank can say at which of its rows a block begins: a loader
takes the first for the start of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Shape
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import ranges

# The name of the text, in files of ranks, that says how a checkpoint is quantized: the configuration's own key.
SCHEME_TEXT = "quantization_config"
# How the names of what a module has besides end: of its activations and its cache.
CARRIED = tuple(
    f"{what}_{value}"
    for what in ("input", "output", "activation", "q", "k", "v")
    for value in ("scale", "scale_inv", "zero_point", "global_scale")
)


class Scheme(NamedTuple):
    """A way of quantizing, as a checkpoint's configuration says it.

    Example, DeepSeek's: `Scheme("fp8", "fp8", block=(128, 128))`.
    """

    name: str  # what the configuration calls it, for messages: `fp8`, `gptq`, `pack-quantized`
    # fp8: elements of 8-bit floats times scales; int8: whole numbers times scales; packed: whole numbers of `bits` in
    # int32 along the last dimension (compressed-tensors); gptq, awq: their own packing; mxfp4: blocks of 32 with a
    # power of two (gpt-oss); nvfp4: blocks of 16; whole: recognized, and never cut
    kind: str
    bits: int = 8
    # how many elements of the logical weight (rows, columns) share a scale; 0: all of them
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True  # whether there are no zero points; gptq stores them all the same
    act_order: bool = False  # whether an index says which group a column belongs to
    divides: bool = False  # whether the scale of the whole tensor divides (compressed-tensors' nvfp4)


class Relation(NamedTuple):
    """How a dimension of a companion belongs to one of its weight.

    A stored weight that is `length` long there has a companion that is ceil(length * own / step) long.
    """

    dim: int  # of the stored weight
    step: int  # how many elements of the stored weight belong to `own` elements of the companion
    own: int = 1

    def length(self, length: int) -> int:
        """Return the companion's length, or the place where it is cut, by the stored weight's."""
        return -(-length * self.own // self.step)


class Companion(NamedTuple):
    """A tensor that is stored beside a quantized weight and belongs to it."""

    role: str  # scale, zeros, group_index, global_scale, shape; else what is only carried (input_scale)
    name: str
    # for each of its dimensions how it belongs to the weight's; None: it has nothing to do with them, so whoever holds
    # a part of the weight holds all of it
    dims: tuple[Relation | None, ...] = ()


class QuantizedWeight(NamedTuple):
    """A logical weight, and the tensors that are stored for it.

    Example, DeepSeek's in blocks of 128 x 128:

        QuantizedWeight("q.weight", "q.weight", (576, 7168), scheme, (128, 128), (
            Companion("scale", "q.weight_scale_inv", (Relation(0, 128), Relation(1, 128))),
        ))
    """

    name: str  # as the weight is called once it is dequantized
    stored: str  # the tensor that holds its elements
    shape: tuple[int, ...]  # of the logical weight
    scheme: Scheme
    grain: tuple[int, ...]  # for each dimension of the stored tensor, of how many elements a cut must be a multiple
    companions: tuple[Companion, ...]

    def companion(self, role: str) -> Companion | None:
        """Return the companion of a role; None if there is none."""
        return next((each for each in self.companions if each.role == role), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that are stored for it."""
        return (self.stored, *(each.name for each in self.companions))


_MOST_RANKS = 512


class StoredWeight(NamedTuple):
    """A quantized weight, and the shape of the whole tensor that holds its elements."""

    weight: QuantizedWeight
    shape: Shape


class QuantizedWeights:
    """The quantized weights of a checkpoint.

    Args:
        text: the configuration that says how they are quantized, as JSON.
        weights: by the names of the tensors that hold their elements.
        where: the file with the configuration.
    """

    def __init__(self, text: str, weights: Mapping[str, StoredWeight], where: str) -> None:
        self.text = text
        self.weights = weights
        self.where = where

    @cached_property
    def companions(self) -> dict[str, QuantizedWeight]:
        """The weight of each tensor that is stored beside one, by name."""
        every = (stored.weight for stored in self.weights.values())
        return {companion.name: weight for weight in every for companion in weight.companions}

    @cached_property
    def shapes(self) -> frozenset[str]:
        """The names of the tensors that state the shapes of weights, so that each rank has its own of them."""
        every = (stored.weight.companion("shape") for stored in self.weights.values())
        return frozenset(each.name for each in every if each is not None)

    @cached_property
    def roles(self) -> dict[str, tuple[QuantizedWeight, str]]:
        """For each tensor of a weight the weight, and the tensor's role: a companion's, or `stored`."""
        stored = {name: (each.weight, "stored") for name, each in self.weights.items()}
        companions = (
            (companion.name, (weight, companion.role))
            for weight, _ in self.weights.values()
            for companion in weight.companions
        )
        return {**stored, **dict(companions)}

    def logical(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the tensors that a checkpoint would have without quantization: names, and shapes.

        Args:
            shapes: of its tensors, by name.
        """
        found = {}
        for name, shape in shapes.items():
            weight, role = self.roles.get(name, (None, ""))
            if weight is not None and role == "stored":
                found[weight.name] = weight.shape
            elif weight is None and not name.endswith(CARRIED):
                found[name] = shape
        return found

    def placing(self, strategy: Strategy, side: str, *, is_global: bool = False) -> Strategy:
        """Return a strategy that also lists all companions, as it places their weights.

        Args:
            side: source or target, for errors.
            is_global: whether the files say for each piece where in the whole it lies. Then weights may be cut
                anywhere, and what such a cut cannot follow stays whole.

        Raises LayoutError for a weight that is cut off its grain, StrategyError if the strategy lists a companion
        under its full name and says otherwise.
        """
        if strategy.world_size == 1:
            return strategy
        listed = dict(strategy.parameters)
        exact = {glob: (placement,) for glob, placement in reversed(strategy.rules)}
        known: dict[tuple[object, ...], tuple[Placement, ...]] = {}
        alike = set()
        for stored, (weight, shape) in self.weights.items():
            placements = strategy.find(stored)
            fitted = None
            if not placements:
                _require_none_placed(weight, strategy)
                continue
            for companion in weight.companions:
                key = (id(placements), shape, weight.grain, weight.scheme, companion.dims)
                derived = known.get(key)
                if derived is None:
                    if fitted is None:
                        fitted = [_cut_on_grain(weight, shape, each, strategy, side, is_global) for each in placements]
                    derived = tuple(_following(companion, each, shape) for each in fitted)
                    known[key] = derived
                given = strategy.parameters.get(companion.name) or exact.get(companion.name)
                if given is not None:
                    _require_same(companion, given, derived, weight, strategy)
                listed[companion.name] = derived
                if companion.role != "shape" and any(map(_is_cut_less, derived, placements)):
                    alike.add(companion.name)
        return strategy.listing_also(listed, frozenset(alike))


def _cut_on_grain(
    weight: QuantizedWeight, shape: Shape, placement: Placement, strategy: Strategy, side: str, is_global: bool
) -> Placement:
    """Return the placement of a weight for its shape, with optimizer cuts as cuts over axes.

    Raises LayoutError if it cuts the weight off its grain.
    """
    try:
        layout = Layout(placement, shape)
    except LayoutError as error:
        error.where = f"tensor {weight.stored!r}, {side} strategy {strategy.origin}".rstrip()
        raise
    for dim, length in enumerate(shape):
        places = sorted(layout.cut_places(dim))
        if weight.scheme.kind == "whole" and len(places) > 2:
            raise LayoutError(
                f"{weight.stored!r} is quantized by {weight.scheme.name}, whose tensors are moved whole",
                expected="it whole on every rank that holds it, or weights that are not quantized",
                got=f"dimension {dim} of {list(shape)} is cut in {len(places) - 1} by the {side} strategy",
                where=strategy.origin,
                remedy="place it whole, or convert the checkpoint without quantization",
            )
        grain = weight.grain[dim]
        off = [place for place in places if place % grain and place != length]
        if off and not is_global:
            raise LayoutError(
                f"{weight.stored!r} is quantized in blocks, and a cut within one leaves its scale on the wrong rows",
                expected=f"cuts of dimension {dim}, which is {length} long, at multiples of {grain}:"
                f" {_fitting(length, grain)}",
                got=f"slices of {', '.join(map(str, dict.fromkeys(b - a for a, b in pairwise(places))))}"
                f" by the {side} strategy",
                where=strategy.origin,
                remedy="choose another number of ranks, give sizes of slices that are multiples, or dequantize"
                " (--dtype bf16)"
                if side == "target"
                else "these blocks were made from other slices than those of one weight: merge the weights before"
                " they are quantized, or give the strategy this checkpoint was saved with",
            )
    return _over_axes(layout.placement, weight, shape)


def _fitting(length: int, grain: int) -> str:
    counts = [n for n in range(1, _MOST_RANKS + 1) if length % n == 0 and (n == 1 or length // n % grain == 0)]
    return (
        "whole, or in slices of given sizes, since no number of ranks cuts it evenly so"
        if counts == [1]
        else f"evenly over {ranges(counts)} ranks"
    )


def _over_axes(placement: Placement, weight: QuantizedWeight, shape: Shape) -> Placement:
    """Return the same placement without an optimizer cut: rows are cut over the axes that it goes over."""
    if placement.optimizer == 1:
        return placement
    axes = placement.optimizer_axes
    if math.prod(placement.mesh[axis] for axis in axes) != placement.optimizer:
        raise LayoutError(
            f"{weight.stored!r} is quantized, and the optimizer cuts it over a part of a mesh axis",
            expected="an optimizer cut over whole axes of the mesh",
            got=f"{placement.optimizer} parts on the mesh {list(placement.mesh)}",
        )
    split = placement.split or ((),) * len(shape)
    sizes = dict(placement.sizes)
    if 0 in sizes:
        parts = placement.optimizer
        sizes[0] = tuple(length // parts for length in sizes[0] for _ in range(parts))
    return placement.changed(split=(split[0] + axes, *split[1:]), optimizer=1, sizes=tuple(sorted(sizes.items())))


def _following(companion: Companion, placement: Placement, shape: Shape) -> Placement:
    """Return how a companion is placed, by the placement of its weight, which has `shape`."""
    split: list[tuple[int, ...]] = []
    sizes, lengths = [], dict(placement.sizes)
    for own_dim, relation in enumerate(companion.dims):
        axes = () if relation is None or relation.dim >= len(placement.split) else placement.split[relation.dim]
        if relation is None or not axes:
            split.append(())
            continue
        cuts = placement.slices(relation.dim)
        own = lengths.get(relation.dim) or (shape[relation.dim] // cuts,) * cuts
        places = list(accumulate(own, initial=0))
        bounds = [relation.length(place) for place in places]
        starts = [place for place in places[:-1] if place != shape[relation.dim]]  # a slice at the end is empty
        if any(place * relation.own % relation.step for place in starts):  # where pieces say where they lie
            split.append(())
            continue
        split.append(axes)
        pieces = tuple(stop - start for start, stop in pairwise(bounds))
        if len(set(pieces)) > 1:
            sizes.append((own_dim, pieces))
    return Placement(placement.mesh, tuple(split), sizes=tuple(sizes), stages=placement.stages)


def _is_cut_less(companion: Placement, weight: Placement) -> bool:
    """Tell whether ranks with different parts of a weight hold the same of a companion."""
    return companion.holders_per_slice > weight.holders_per_slice // weight.optimizer


def _require_none_placed(weight: QuantizedWeight, strategy: Strategy) -> None:
    """Raise StrategyError if a strategy places a companion of a weight that it does not place."""
    placed = next((each.name for each in weight.companions if strategy.find(each.name)), None)
    if placed is not None:
        raise StrategyError(
            f"the strategy places {placed!r}, and not the weight that it belongs to",
            expected=f"an entry for {weight.stored!r}, which its companions follow",
            got=f"none, and one that matches {placed!r}",
            where=strategy.origin,
            remedy="give the weight an entry, or take that one away",
        )


def _require_same(
    companion: Companion,
    given: Iterable[Placement],
    derived: tuple[Placement, ...],
    weight: QuantizedWeight,
    strategy: Strategy,
) -> None:
    """Raise StrategyError if the placements given for a companion cut it otherwise than its weight's do."""
    if [_cuts(each, companion) for each in given] != [_cuts(each, companion) for each in derived]:
        raise StrategyError(
            f"the strategy cuts {companion.name!r} otherwise than the weight that it belongs to",
            expected=f"no entry for it: it follows {weight.stored!r}",
            got=f"an entry under its full name that says {[_cuts(each, companion) for each in given]}, not"
            f" {[_cuts(each, companion) for each in derived]}",
            where=strategy.origin,
            remedy="leave that entry out",
        )


def _cuts(placement: Placement, companion: Companion) -> tuple[object, ...]:
    axes = tuple(placement.split[dim] if dim < len(placement.split) else () for dim in range(len(companion.dims)))
    return placement.mesh, axes, placement.optimizer, placement.stages
