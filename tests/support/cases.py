"""Random pairs of strategies, with the tensors of a checkpoint that both of them can cut.

A Case is plain data: what a test makes of it (strategy files, shards, expected slices) is up to the test. Sizes are
kept small, structure is not: every number of ranks from 1 to 16 on either side, stages, nested maps, transposed maps,
optimizer sharding in full and in part, uneven slices, parameters shared by stages, optimizer state that the strategies
list or leave out, and values that are in no strategy at all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from support.oracle import RawLayout

T = TypeVar("T")

DTYPES = (
    np.dtype(np.float32),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.int8),
    np.dtype(np.bool_),
    np.dtype(np.complex64),
    np.dtype(np.float16),
    np.dtype(np.int64),
    np.dtype(np.float64),
)

# Names with '.' and '-', one the tail of another, one with a number and '-' that is not at its start.
NAMES = ("w", "layer1.weight", "layer-1.weight", "net.layer1.weight", "a-b.c-d", "block.0-1.bias", "embedding_table")
STATE_PREFIXES = ("moments", "adam_m", "exp_avg", "accum")
REPLICATED_NAMES = ("global_step", "learning_rate")

# Up to 12, and a larger power of two.
WORLD_SIZES = tuple(itertools.product((*range(1, 13), 16), repeat=2))


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint's strategy: where each tensor lies.

    layouts: for every tensor of the case what holds, whether or not the strategy says so. unlisted: tensors that the
    strategy files leave out: state that follows the parameter it is named after, and replicated values, which are on
    every rank.
    """

    world_size: int
    stages: int
    layouts: dict[str, RawLayout]
    unlisted: frozenset[str] = frozenset()

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    @property
    def listed(self) -> dict[str, RawLayout]:
        """The layouts that the strategy files hold."""
        return {name: layout for name, layout in self.layouts.items() if name not in self.unlisted}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint as whole tensors of random bytes, and the two strategies it is resharded between."""

    src: Side
    dst: Side
    tensors: dict[str, np.ndarray]


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Tell whether two arrays are equal in type, shape and every bit (NaNs too)."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    world_sizes: tuple[int, int] | None = None,
    max_ranks: int = 16,
    max_parameters: int = 3,
    dtypes: Sequence[np.dtype] = DTYPES,
    stages: bool = True,
    uneven: bool = True,
    optimizer: bool = True,
    nested: bool = True,
    unlisted: bool = True,
    empty: bool = True,
) -> Case:
    """Draw a Case; each keyword that is False leaves that feature out.

    `world_sizes`: the ranks of source and target, where they are not to be drawn from 1 to `max_ranks` (hypothesis
    likes some numbers better than others; WORLD_SIZES has every pair). `stages`: pipeline stages and parameters shared
    by them; `unlisted`: tensors the strategies do not list; `empty`: dimensions of length 0.
    """
    choose = _Choices(draw, uneven=uneven, optimizer=optimizer, nested=nested, empty=empty)
    sides = (0, 1)
    world_sizes = world_sizes or (choose.integer(1, max_ranks), choose.integer(1, max_ranks))
    stage_counts = tuple(choose.divisor(size) if stages and choose.one_in(2) else 1 for size in world_sizes)
    stage_sizes = tuple(size // count for size, count in zip(world_sizes, stage_counts))
    names = choose.sample(NAMES, choose.integer(1, min(max_parameters, len(NAMES))))
    homes = tuple(choose.homes(len(names), count) for count in stage_counts)

    tensors: dict[str, np.ndarray] = {}
    layouts: tuple[dict[str, RawLayout], ...] = ({}, {})
    left_out: tuple[set[str], ...] = (set(), set())
    for number, name in enumerate(names):
        ndim = choose.pick((1, 2, 2, 3, 3, 4, 0))
        shape, pair = choose.shape_for([choose.layout(size, ndim) for size in stage_sizes], ndim)
        tensors[name] = choose.array(shape, choose.pick(dtypes))
        for side in sides:
            layouts[side][name] = replace(pair[side], stages=homes[side][number])

        if choose.one_in(3):
            state = f"{choose.pick(STATE_PREFIXES)}.{name}"
            tensors[state] = choose.array(shape, choose.pick(dtypes))
            for side in sides:
                if unlisted and choose.one_in(2):
                    left_out[side].add(state)
                    layouts[side][state] = layouts[side][name]
                else:
                    layouts[side][state] = choose.other_layout(layouts[side][name], shape)

    if unlisted and choose.one_in(3):
        name = choose.pick(REPLICATED_NAMES)
        tensors[name] = choose.array(choose.pick(((), (1,), (3, 2))), choose.pick(dtypes))
        for side in sides:
            uncut = (-1,) * tensors[name].ndim
            layouts[side][name] = RawLayout((stage_sizes[side],), uncut, stages=tuple(range(stage_counts[side])))
            left_out[side].add(name)

    src, dst = (Side(world_sizes[i], stage_counts[i], layouts[i], frozenset(left_out[i])) for i in sides)
    return Case(src, dst, tensors)


class _Choices:
    """The choices that make up one case; each shrinks towards its first, simplest outcome."""

    def __init__(self, draw: st.DrawFn, *, uneven: bool, optimizer: bool, nested: bool, empty: bool) -> None:
        self._draw = draw
        self._uneven = uneven
        self._optimizer = optimizer
        self._nested = nested
        self._empty = empty
        self._bytes = np.random.default_rng(self.integer(0, 2**16))

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high)) if low < high else low

    def one_in(self, count: int) -> bool:
        return self.integer(1, count) == count

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def divisor(self, number: int) -> int:
        return self.pick(_divisors(number))

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        left = list(options)
        return [left.pop(self.integer(0, len(left) - 1)) for _ in range(count)]

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        raw = np.frombuffer(self._bytes.bytes(math.prod(shape) * dtype.itemsize), np.uint8)
        if dtype == np.bool_:
            raw = raw & 1
        return raw.view(dtype).reshape(shape)

    def homes(self, parameters: int, stages: int) -> list[tuple[int, ...]]:
        """Choose the stages of each parameter, so that no stage is without one."""
        homes = [{self.integer(0, stages - 1)} for _ in range(parameters)]
        if stages > 1 and self.one_in(3):
            self.pick(homes).add(self.integer(0, stages - 1))
        for number, stage in enumerate(sorted(set(range(stages)).difference(*homes))):
            homes[number % parameters].add(stage)
        return [tuple(sorted(home)) for home in homes]

    def layout(self, ranks: int, ndim: int) -> RawLayout:
        """Choose a mesh and which of its axes cut which dimension."""
        mesh = self.pick(_meshes(ranks))
        axes_of: list[list[int]] = [[] for _ in range(ndim)]
        copies = 1
        for axis, length in enumerate(mesh):
            choice = self.integer(0, ndim)
            if choice and (self._nested or not axes_of[choice - 1]):
                axes_of[choice - 1].append(len(mesh) - 1 - axis)
            else:
                copies *= length
        for axes in axes_of:
            if len(axes) > 1 and self.one_in(2):
                axes.reverse()
        nested = any(len(axes) > 1 for axes in axes_of) or (self._nested and ndim > 0 and self.one_in(5))
        optimizer_size = 0
        if self._optimizer and ndim and copies > 1 and self.one_in(2):
            optimizer_size = self.pick((-1, *_divisors(copies)[1:]))
        if nested:
            return RawLayout(mesh, tuple(tuple(axes) or (-1,) for axes in axes_of), optimizer_size)
        return RawLayout(mesh, tuple(axes[0] if axes else -1 for axes in axes_of), optimizer_size)

    def shape_for(self, pair: list[RawLayout], ndim: int) -> tuple[tuple[int, ...], list[RawLayout]]:
        """Choose a shape that both layouts cut, and sizes for slices of dimension 0 that are to be uneven."""
        shape = []
        for dim in range(ndim):
            uneven = [dim == 0 and self._is_uneven(layout) for layout in pair]
            if any(uneven):
                length, pair = self._uneven_length(pair, uneven)
            elif self._empty and self.one_in(25):
                length = 0
            else:
                length = math.lcm(*(_cuts(layout, dim) for layout in pair))
                length *= self.integer(1, 4 if length == 1 else 2)
            shape.append(length)
        return tuple(shape), pair

    def _is_uneven(self, layout: RawLayout) -> bool:
        if not self._uneven or _slices(layout, 0) == 1:
            return False
        return self.one_in(2 if layout.opt_size else 3)  # together they would be rare

    def _uneven_length(self, pair: list[RawLayout], uneven: list[bool]) -> tuple[int, list[RawLayout]]:
        # A slice of any height will do for an uneven side, as long as its optimizer pieces are equal.
        units = [_optimizer_cuts(layout) if odd else _cuts(layout, 0) for layout, odd in zip(pair, uneven)]
        unit = math.lcm(*units)
        least = max(_cuts(layout, 0) for layout in pair) + 1  # no room for equal slices only
        length = unit * (-(-least // unit) + self.integer(0, 2))
        return length, [
            replace(layout, split_sizes=self._parts(length, _slices(layout, 0), step)) if odd else layout
            for layout, step, odd in zip(pair, units, uneven)
        ]

    def _parts(self, total: int, count: int, step: int) -> tuple[int, ...]:
        """Choose `count` multiples of `step`, none of them 0, that add up to `total`."""
        left, parts = total // step, []
        for others in range(count - 1, 0, -1):
            parts.append(self.integer(1, left - others))
            left -= parts[-1]
        return tuple(part * step for part in (*parts, left))

    def other_layout(self, layout: RawLayout, shape: tuple[int, ...]) -> RawLayout:
        """Choose a layout for state of a parameter: the same one, or another that cuts the same shape."""
        if not self.one_in(2):
            return layout
        other = self.layout(layout.stage_size, len(shape))
        if layout.split_sizes and (other.dev_matrix, _axes(other)) == (layout.dev_matrix, _axes(layout)):
            return layout  # over the same axes, state is cut as unevenly as its parameter
        if any(length % _cuts(other, dim) for dim, length in enumerate(shape)):
            other = replace(layout, opt_size=0)
        return replace(other, stages=layout.stages)


@functools.cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


@functools.cache
def _meshes(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return every mesh of so many ranks without axes of 1, simplest first, then some with one."""
    plain = sorted(_factorizations(ranks), key=lambda mesh: (len(mesh), mesh))
    with_one = [(*mesh[:place], 1, *mesh[place:]) for mesh in plain[-2:] for place in (0, len(mesh))]
    return (*plain, *with_one) if ranks > 1 else ((1,), (1, 1))


def _factorizations(number: int) -> list[tuple[int, ...]]:
    if number == 1:
        return [()]
    return [(first, *rest) for first in _divisors(number)[1:] for rest in _factorizations(number // first)]


def _axes(layout: RawLayout) -> list[tuple[int, ...]]:
    return [entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map]


def _slices(layout: RawLayout, dim: int) -> int:
    entry = layout.tensor_map[dim]
    numbers = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(layout.dev_matrix[-1 - number] for number in numbers if number != -1)


def _optimizer_cuts(layout: RawLayout) -> int:
    if layout.opt_size != -1:
        return max(layout.opt_size, 1)
    return layout.stage_size // math.prod(_slices(layout, dim) for dim in range(len(layout.tensor_map)))


def _cuts(layout: RawLayout, dim: int) -> int:
    return _slices(layout, dim) * (_optimizer_cuts(layout) if dim == 0 else 1)
