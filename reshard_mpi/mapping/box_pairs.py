"""Check that an equation is one-to-one (`check_one_to_one`), and pair the boxes of its sides (`geometry`).

The blocks of a side are its tensors in order, and the summands of each in order. Those of both sides are paired first
with first, and both of a pair must have the same axes. Axes that are the minor ones of a dimension on both
sides stay within a box; each combination of all others is a pair of boxes of its own. So boxes are disjoint on either
side, and cover it but for padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product as combinations
from typing import NamedTuple

from reshard_mpi.mapping.axis_sizes import Sizes, extent, length_of, padded_extent
from reshard_mpi.mapping.equations import Axis, Padded, Product, Sum, Term, axes_of, pads_of, sums_of
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Move

# Of one tensor more boxes than this would not fit the memory of a plan: each takes a KiB.
MAX_PAIRS = 1 << 16


class EquationProblem(ValueError):
    """An equation is not one-to-one, or cannot be read as such."""


class Block(NamedTuple):
    """A block of a side: the number of its term, and which summand of it it is."""

    term: int
    summand: int


def blocks_of(side: Sequence[Term]) -> list[Block]:
    """Return the blocks of a side in order. Raises EquationProblem if a tensor cannot be divided into blocks."""
    for term in side:
        if sum(1 for _ in sums_of(term)) > 1:
            raise EquationProblem(f"{term.name.text} has more than one concatenation")
    return [Block(number, summand) for number, term in enumerate(side) for summand in range(term.blocks)]


def check_one_to_one(left: Sequence[Term], right: Sequence[Term], *, copies: bool = False) -> tuple[str, ...]:
    """Return the captures that all names of an equation share. Raises EquationProblem if it is not one-to-one.

    Args:
        copies: whether the only tensor of one side is each of those on the other.
    """
    for side in (left, right):
        names = [term.name.text for term in side]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EquationProblem(f"not one-to-one: {twice[0]} is twice on a side")
    if copies and len(right) == 1:
        left, right = right, left
    left_blocks, right_blocks = blocks_of(left), blocks_of(right)
    bare = [term.name.text for term in (*left, *right) if term.dims is None]
    if bare and len(bare) < len(left) + len(right):
        raise EquationProblem(f"{bare[0]} has no dimensions in brackets, and other tensors have")
    if copies:
        if any(term.dims != right[0].dims for term in right):
            raise EquationProblem(
                "copy = true is for tensors of one side that are the same, and their dimensions differ"
            )
        if len(left_blocks) != 1 or len(right) < 2:
            raise EquationProblem("copy = true is for one tensor, without '+', on one side, and several on the other")
        left_blocks = left_blocks * len(right_blocks)
    if len(left_blocks) != len(right_blocks):
        raise EquationProblem(
            f"the left side has {len(left_blocks)} blocks, and the right side {len(right_blocks)}: tensors, and the"
            " summands of each, are paired first with first"
        )
    shared: tuple[str, ...] | None = None
    for left_block, right_block in zip(left_blocks, right_blocks):
        one, other = left[left_block.term], right[right_block.term]
        common = _check_block(one, left_block.summand, other, right_block.summand)
        if shared is not None and set(common) != set(shared):
            raise EquationProblem(
                f"{one.name.text} and {other.name.text} share {_listed(common)}, and the blocks before them"
                f" {_listed(shared)}: captures that stay captures must be in all names"
            )
        shared = common if shared is None else shared
    facing = [term.name.text for term in (*left, *right) if len(term.name.captures) > len(shared or ())]
    if copies and facing:
        raise EquationProblem(f"copy = true is for whole tensors, and a capture of {facing[0]} faces a dimension")
    return shared or ()


def _check_block(left: Term, left_summand: int, right: Term, right_summand: int) -> tuple[str, ...]:
    """Return the captures that the names of two paired blocks share. Raises EquationProblem if their axes differ."""
    shared = tuple(capture.name for capture in left.name.captures if capture in right.name.captures)
    if any(any(pads_of(part)) for term in (left, right) for one_sum in sums_of(term) for part in one_sum.summands):
        raise EquationProblem(f"padding within a concatenation, in {left.name.text} or {right.name.text}")
    axes = []
    for term, summand in ((left, left_summand), (right, right_summand)):
        names = [name for dim in term.dims or () for name in _block_axes(dim, summand) if name != "1"]
        for capture in term.name.captures:
            if capture.name in shared:
                if capture.name in names:
                    raise EquationProblem(f"{capture.name!r} is in both names and a dimension of {term.name.text}")
            elif capture.is_text:
                raise EquationProblem(f"{{{capture.name}*}} of {term.name.text} is not in the name of its other side")
            else:
                names.append(capture.name)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EquationProblem(f"{twice[0]!r} is twice in {term.name.text}")
        axes.append(set(names))
    for number, (term, other) in enumerate(((left, right), (right, left))):
        alone = sorted(axes[number] - axes[1 - number])
        if alone:
            raise EquationProblem(
                f"not one-to-one: {_listed(alone)} of {term.name.text} is not on its other side, {other.name.text}"
            )
    return shared


def _block_axes(product: Product, summand: int) -> Iterator[str]:
    """Yield the axes of one block of a dimension."""
    for factor in product:
        if isinstance(factor, Axis):
            yield factor.name
        else:
            yield from _block_axes(factor.product if isinstance(factor, Padded) else factor.summands[summand], summand)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def stacked(name_of: Term, other: Term) -> tuple[str, ...]:
    """Return the captures of a tensor's name that are axes of another one's dimensions."""
    others = {axis for dim in other.dims or () for axis in axes_of(dim)}
    return tuple(capture.name for capture in name_of.name.captures if capture.name in others)


class TermTensor(NamedTuple):
    """One tensor of a side: the number of its term, and the values of the captures that face axes of the other side."""

    term: int
    values: tuple[int, ...]


class BoxPair(NamedTuple):
    """A box of a source tensor that becomes a box of a target tensor. order: as in `planning.rank_plan.Copy`."""

    source: TermTensor
    region: Box
    to: Box
    order: tuple[int, ...] | None

    @classmethod
    def whole(cls, source: TermTensor, shape: tuple[int, ...]) -> BoxPair:
        """Return the pair that takes a tensor as it is."""
        return cls(source, Box.whole(shape), Box.whole(shape), None)

    @property
    def move(self) -> Move:
        return Move(self.region, self.to, self.order)


class Assembly(NamedTuple):
    """A target tensor: its shape, the pairs that make it up, and the boxes of it that are zeros."""

    shape: tuple[int, ...]
    pairs: tuple[BoxPair, ...]
    zeros: tuple[Box, ...]

    @classmethod
    def whole(cls, source: TermTensor, shape: tuple[int, ...]) -> Assembly:
        """Return the assembly of a target that is one tensor of the source, taken as it is."""
        return cls(shape, (BoxPair.whole(source, shape),), ())


class Geometry(NamedTuple):
    """What an equation comes to for certain sizes: its target tensors, and by term, what of the source is padding."""

    targets: Mapping[TermTensor, Assembly]
    pads: Mapping[int, tuple[Box, ...]]


class _Digit(NamedTuple):
    """An axis of a dimension, in which its neighbours are `stride` apart."""

    axis: str
    stride: int


class _BlockAxes(NamedTuple):
    """A block of a tensor, for certain sizes: for each dimension its axes, the minor one last, and where it begins."""

    digits: tuple[tuple[_Digit, ...], ...]
    offsets: tuple[int, ...]
    captures: tuple[str, ...]

    def place_of(self) -> dict[str, tuple[int, int]]:
        """Return the dimension and the stride of each axis."""
        return {digit.axis: (dim, digit.stride) for dim, digits in enumerate(self.digits) for digit in digits}


def geometry(source: Sequence[Term], target: Sequence[Term], sizes: Sizes, *, copies: bool = False) -> Geometry:
    """Return which boxes of the source tensors become which of the target tensors.

    Args:
        sizes: of all axes; those of captures that face dimensions too.
        copies: whether each target tensor is made of the first one of the source.

    Raises EquationProblem if there are too many boxes.
    """
    source_blocks, target_blocks = blocks_of(source), blocks_of(target)
    if copies:
        source_blocks = [source_blocks[0]] * len(target_blocks)
    pairs: dict[TermTensor, list[BoxPair]] = {}
    boxes = 0
    for source_block, target_block in zip(source_blocks, target_blocks):
        for place in _places(source[source_block.term], target_block.term, target[target_block.term], sizes):
            pairs.setdefault(place, [])
        for place, pair in _block_pairs(source, source_block, target, target_block, sizes):
            pairs.setdefault(place, []).append(pair)
            boxes += 1
            if boxes > MAX_PAIRS:
                raise _too_many(target[target_block.term], boxes)
    zeros = {number: tuple(_pads(term, sizes)) for number, term in enumerate(target)}
    shapes = {number: _shape(term, sizes) for number, term in enumerate(target)}
    targets = {
        place: Assembly(shapes[place.term], tuple(box_pairs), zeros[place.term]) for place, box_pairs in pairs.items()
    }
    for place, (shape, box_pairs, empty) in targets.items():
        filled = sum(pair.to.size for pair in box_pairs) + sum(box.size for box in empty)
        if filled != math.prod(shape):
            raise EquationProblem(
                f"{target[place.term].name.text} of shape {list(shape)} has {math.prod(shape)} elements, and {filled}"
                " are said to be in it"
            )
    return Geometry(targets, {number: tuple(_pads(term, sizes)) for number, term in enumerate(source)})


def _places(source: Term, number: int, target: Term, sizes: Sizes) -> Iterator[TermTensor]:
    """Yield the tensors that a target term stands for."""
    lengths = [sizes[axis] for axis in stacked(target, source)]
    if 0 in lengths:
        raise EquationProblem(f"an axis of length 0 would be no tensors {target.name.text}")
    if math.prod(lengths) > MAX_PAIRS:
        raise _too_many(target, math.prod(lengths))
    return (TermTensor(number, values) for values in combinations(*map(range, lengths)))


def _too_many(target: Term, count: int) -> EquationProblem:
    return EquationProblem(
        f"{target.name.text} would be put together from {count} boxes or more, or be so many tensors; at most"
        f" {MAX_PAIRS} are possible"
    )


def _shape(term: Term, sizes: Sizes) -> tuple[int, ...]:
    return tuple(extent(dim, sizes) for dim in term.dims or ())


def _side(term: Term, block: Block, sizes: Sizes, captures: tuple[str, ...]) -> _BlockAxes:
    digits, offsets = [], []
    for dim in term.dims or ():
        axes, offset, _ = _flat(dim, block.summand, sizes, 1)
        digits.append(tuple(digit for digit in axes if length_of(digit.axis, sizes) != 1))
        offsets.append(offset)
    return _BlockAxes(tuple(digits), tuple(offsets), captures)


def _flat(product: Product, summand: int, sizes: Sizes, stride: int) -> tuple[list[_Digit], int, int]:
    """Return the axes of a product with their strides, the offset of the block within it, and the product's length."""
    digits = list[_Digit]()
    offset, length = 0, 1
    for factor in reversed(product):
        if isinstance(factor, Axis):
            digits.insert(0, _Digit(factor.name, stride * length))
            length *= length_of(factor.name, sizes)
            continue
        if isinstance(factor, Padded):
            inner, start, unpadded = _flat(factor.product, summand, sizes, stride * length)
            total = padded_extent(unpadded, factor, sizes)
        else:
            inner, start, total = _flat_sum(factor, summand, sizes, stride * length)
        digits[:0] = inner
        offset += start
        length *= total
    return digits, offset, length


def _flat_sum(factor: Sum, summand: int, sizes: Sizes, stride: int) -> tuple[list[_Digit], int, int]:
    lengths = [extent(product, sizes) for product in factor.summands]
    digits, start, _ = _flat(factor.summands[summand], summand, sizes, stride)
    return digits, start + stride * sum(lengths[:summand]), sum(lengths)


def _block_pairs(
    source: Sequence[Term], source_block: Block, target: Sequence[Term], target_block: Block, sizes: Sizes
) -> Iterator[tuple[TermTensor, BoxPair]]:
    source_term, target_term = source[source_block.term], target[target_block.term]
    captures = stacked(source_term, target_term), stacked(target_term, source_term)
    left = _side(source_term, source_block, sizes, captures[0])
    right = _side(target_term, target_block, sizes, captures[1])
    left_place, right_place = left.place_of(), right.place_of()
    axes = [axis for axis in dict.fromkeys((*left_place, *right_place)) if not axis.isdecimal() or int(axis) != 1]
    kept = [_kept(digits, right_place, sizes) for digits in left.digits]
    inner = {axis for axis_names in kept for axis in axis_names}
    outer = [axis for axis in axes if axis not in inner]
    count = math.prod(length_of(axis, sizes) for axis in outer)
    if count > MAX_PAIRS:
        raise _too_many(target_term, count)
    runs = [math.prod(length_of(axis, sizes) for axis in axis_names) for axis_names in kept]
    target_lengths = [1] * len(right.digits)
    facing: dict[int, int] = {}  # for each source dimension that is longer than 1 within a box, the target's dimension
    for dim, axis_names in enumerate(kept):
        if axis_names:
            facing[dim] = right_place[axis_names[0]][0]
            target_lengths[facing[dim]] = runs[dim]
    order = (*sorted(facing, key=facing.__getitem__), *(dim for dim in range(len(runs)) if dim not in facing))
    is_transposed = sorted(facing, key=facing.__getitem__) != sorted(facing)
    steps = [(axis, left_place.get(axis), right_place.get(axis)) for axis in outer]
    for indices in combinations(*(range(length_of(axis, sizes)) for axis in outer)):
        start, to_start = list(left.offsets), list(right.offsets)
        for (_, from_place, to_place), index in zip(steps, indices):
            if from_place is not None:
                start[from_place[0]] += from_place[1] * index
            if to_place is not None:
                to_start[to_place[0]] += to_place[1] * index
        value_of = dict(zip(outer, indices))
        region, to = Box.at(start, runs), Box.at(to_start, target_lengths)
        holder = TermTensor(source_block.term, tuple(value_of.get(axis, 0) for axis in captures[0]))
        term_tensor = TermTensor(target_block.term, tuple(value_of.get(axis, 0) for axis in captures[1]))
        yield term_tensor, BoxPair(holder, region, to, order if is_transposed else None)


def _kept(digits: tuple[_Digit, ...], right_place: Mapping[str, tuple[int, int]], sizes: Sizes) -> list[str]:
    """Return the axes of a source dimension that lie together as the minor ones of one target dimension as well."""
    kept = list[str]()
    run = 1
    for axis, stride in reversed(digits):
        if axis not in right_place or stride != run or right_place[axis][1] != run:
            break
        if kept and right_place[kept[0]][0] != right_place[axis][0]:
            break
        kept.insert(0, axis)
        run *= length_of(axis, sizes)
    return kept


def _pads(term: Term, sizes: Sizes) -> Iterator[Box]:
    """Yield the boxes of a tensor that are padding. They are disjoint."""
    shape = _shape(term, sizes)
    used = [_used(dim, sizes) if any(pads_of(dim)) else None for dim in term.dims or ()]
    for number, spans in enumerate(used):
        if spans is None:
            continue
        before = [others if others is not None else [(0, shape[dim])] for dim, others in enumerate(used[:number])]
        for gap in _gaps(spans, shape[number]):
            for chosen in combinations(*before):
                edges = [*chosen, gap, *((0, length) for length in shape[number + 1 :])]
                box = Box(tuple(first for first, _ in edges), tuple(last for _, last in edges))
                if box.size:
                    yield box


def _used(product: Product, sizes: Sizes) -> list[tuple[int, int]]:
    """Return the spans of a dimension that are no padding, ascending."""
    spans, stride = [(0, 1)], 1
    for factor in reversed(product):
        length = extent((factor,), sizes)
        inner = _used(factor.product, sizes) if isinstance(factor, Padded) else [(0, length)]
        if spans == [(0, stride)]:  # nothing of what is minor is padding
            spans = [(first * stride, last * stride) for first, last in inner]
        else:
            indices = (index for first, last in inner for index in range(first, last))
            spans = [(index * stride + first, index * stride + last) for index in indices for first, last in spans]
        stride *= length
    return spans


def _gaps(spans: Sequence[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    end = 0
    for first, last in spans:
        if first > end:
            yield end, first
        end = max(end, last)
    if end < length:
        yield end, length
