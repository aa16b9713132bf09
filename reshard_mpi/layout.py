"""Which rank holds which box of a tensor.

A Placement says how a tensor is cut over a mesh, without its shape: that is all a strategy file holds. A Layout is a
Placement bound to a shape. The semantics are MindSpore's:

- local rank r of a stage has the coordinates of a row-major walk over `mesh`, last axis fastest;
- every tensor dimension is cut evenly (or at given sizes) over the mesh axes that `split` names, the major one first;
- ranks with the same slice are counted in row-major order of the mesh axes not in use, and an optimizer cut into k
  pieces gives the one at position p piece p mod k of dimension 0 of that slice;
- global rank = stage x ranks of a stage + local rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate

from reshard_mpi.box import Box
from reshard_mpi.errors import LayoutError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One distinct part of a tensor: the slice index in every dimension, and the optimizer piece within that slice."""

    index: tuple[int, ...]
    part: int


@dataclass(frozen=True, slots=True)
class Placement:
    """How one parameter is cut over the ranks of its stages.

    mesh: ranks along each mesh axis of one stage. split: for each tensor dimension the mesh axes (counted from the
    left) that cut it, major first; an empty `split` cuts nothing, whatever the number of dimensions. optimizer: into
    how many pieces dimension 0 of each slice is cut once more. sizes: pairs (dimension, slice sizes) for dimensions
    cut unevenly. stages: the pipeline stages that hold it. expanded_shape: set where `split` may list more dimensions
    than the tensor has, each of them a factor of a real one (MindSpore's JSON of nested maps): the whole tensor's
    shape in those factors. open_ended: the tensor may have further dimensions, not cut (a rule that fits many tensors).

    Raises LayoutError if an axis is outside the mesh or used twice, or the optimizer cut has no ranks to go over.
    """

    mesh: tuple[int, ...]
    split: tuple[tuple[int, ...], ...] = ()
    optimizer: int = 1
    sizes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    stages: tuple[int, ...] = (0,)
    expanded_shape: Shape | None = None
    open_ended: bool = False

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.mesh):
            raise LayoutError("a mesh axis has no ranks", expected="every axis 1 or more", got=f"mesh {self.mesh}")
        used = [axis for axes in self.split for axis in axes]
        for axis in used:
            if not 0 <= axis < len(self.mesh):
                raise LayoutError(
                    "a tensor dimension is mapped outside the mesh",
                    expected=f"mesh axes 0 to {len(self.mesh) - 1} of mesh {self.mesh} (counted from the left)",
                    got=f"axis {axis}",
                )
        if len(set(used)) != len(used):
            raise LayoutError(
                "a mesh axis cuts two dimensions", expected="each mesh axis used once", got=f"mesh axes {self.split}"
            )
        if self.optimizer < 1 or self.holders_per_slice % self.optimizer:
            raise LayoutError(
                "the optimizer cut does not fit the ranks that share a slice",
                expected=f"a divisor of {self.holders_per_slice} (mesh {self.mesh} without the axes in use)",
                got=str(self.optimizer),
            )
        for dim, sizes in self.sizes:
            if dim >= len(self.split) or len(sizes) != self.slices(dim):
                slices = self.slices(dim) if dim < len(self.split) else 0
                raise LayoutError(
                    f"the sizes given for dimension {dim} do not fit its cut",
                    expected=f"{slices} sizes",
                    got=f"{len(sizes)} sizes {list(sizes)}",
                )

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return math.prod(self.mesh)

    @property
    def free_axes(self) -> tuple[int, ...]:
        """Mesh axes that cut no dimension."""
        used = {axis for axes in self.split for axis in axes}
        return tuple(axis for axis in range(len(self.mesh)) if axis not in used)

    @property
    def holders_per_slice(self) -> int:
        """Ranks of a stage that share one slice, before the optimizer cut."""
        return math.prod(self.mesh[axis] for axis in self.free_axes)

    @property
    def is_cut(self) -> bool:
        """Whether any rank holds less than the whole tensor."""
        return self.optimizer > 1 or any(self.slices(dim) > 1 for dim in range(len(self.split)))

    def slices(self, dim: int) -> int:
        """Into how many slices dimension `dim` is cut, before the optimizer cut."""
        return math.prod(self.mesh[axis] for axis in self.split[dim]) if dim < len(self.split) else 1

    def cuts(self, dim: int) -> int:
        """Into how many parts dimension `dim` is cut in all."""
        return self.slices(dim) * (self.optimizer if dim == 0 else 1)

    def total(self, dim: int) -> int | None:
        """The length of dimension `dim`, where the placement itself tells it."""
        return next((sum(sizes) for at, sizes in self.sizes if at == dim), None)

    def piece(self, rank: int) -> Piece:
        """Return which part of the tensor global rank `rank` holds."""
        coordinates = unravel(rank % self.stage_size, self.mesh)
        index = []
        for axes in self.split:
            at = 0
            for axis in axes:
                at = at * self.mesh[axis] + coordinates[axis]
            index.append(at)
        position = 0
        if self.optimizer > 1:
            for axis in self.free_axes:
                position = position * self.mesh[axis] + coordinates[axis]
        return Piece(tuple(index), position % self.optimizer)

    def holder(self, piece: Piece, home: int) -> int:
        """Return the global rank that holds `piece` and lies nearest to rank `home` in the mesh.

        Of the copies it is the one with the coordinates of `home` along the free axes, so parameters cut alike and
        parameters cut over other axes are looked for in the same files.
        """
        stage = home // self.stage_size
        if stage not in self.stages:
            stage = self.stages[0]
        coordinates = list(unravel(home % self.stage_size, self.mesh))
        self._set_index(coordinates, piece)
        if self.optimizer > 1:
            free = self.free_axes
            lengths = tuple(self.mesh[axis] for axis in free)
            position = ravel(tuple(coordinates[axis] for axis in free), lengths)
            position += piece.part - position % self.optimizer
            for axis, at in zip(free, unravel(position, lengths)):
                coordinates[axis] = at
        return stage * self.stage_size + ravel(tuple(coordinates), self.mesh)

    def holders(self, piece: Piece) -> Iterator[int]:
        """Yield every global rank that holds `piece`, in ascending order within each stage."""
        free = self.free_axes
        lengths = tuple(self.mesh[axis] for axis in free)
        coordinates = [0] * len(self.mesh)
        self._set_index(coordinates, piece)
        for stage in self.stages:
            for position in range(piece.part, math.prod(lengths), self.optimizer):
                for axis, at in zip(free, unravel(position, lengths)):
                    coordinates[axis] = at
                yield stage * self.stage_size + ravel(tuple(coordinates), self.mesh)

    def _set_index(self, coordinates: list[int], piece: Piece) -> None:
        for axes, at in zip(self.split, piece.index):
            for axis in reversed(axes):
                at, coordinates[axis] = divmod(at, self.mesh[axis])

    def with_stages(self, stages: tuple[int, ...]) -> Placement:
        return replace(self, stages=stages)


def replicated(ranks: int) -> Placement:
    """Return the placement of a tensor that every one of `ranks` ranks holds whole."""
    return Placement((ranks,))


@dataclass(frozen=True, slots=True)
class Strategy:
    """The placements of a whole checkpoint: what all its strategy files say together.

    parameters: for each listed name the placements that hold it; more than one where stages that share a parameter
    cut it differently. rules: pairs (glob, placement) for names not listed one by one; the first match wins.
    All stages have the same number of ranks. Raises LayoutError where they do not.
    """

    world_size: int
    stages: int
    parameters: Mapping[str, tuple[Placement, ...]]
    rules: tuple[tuple[str, Placement], ...] = ()
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        checked = set()
        for name, placements in (*self.parameters.items(), *((glob, (rule,)) for glob, rule in self.rules)):
            for placement in placements:
                if placement in checked:
                    continue
                checked.add(placement)
                if placement.stage_size * self.stages != self.world_size:
                    raise LayoutError(
                        "the mesh does not fit the number of ranks",
                        expected=f"{self.world_size // self.stages} ranks a stage"
                        f" ({self.world_size} ranks, {self.stages} stages)",
                        got=f"mesh {placement.mesh} for parameter {name!r}",
                        where=self.origin,
                        remedy="give every parameter of one strategy the same device number",
                    )

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def find(self, name: str) -> tuple[Placement, ...]:
        """Return the placements of parameter `name`; empty where the strategy does not list it."""
        listed = self.parameters.get(name)
        if listed is not None:
            return listed
        return next(((placement,) for glob, placement in self.rules if fnmatchcase(name, glob)), ())


def unsharded(origin: str = "") -> Strategy:
    """Return the strategy of one full checkpoint: one rank that holds every tensor whole."""
    return Strategy(1, 1, {}, (("*", replicated(1)),), origin)


class Layout:
    """A Placement bound to the shape of the whole tensor.

    Raises LayoutError if the number of dimensions differs, or a cut does not divide and no sizes are given.
    """

    __slots__ = ("_bounds", "placement", "shape")

    def __init__(self, placement: Placement, shape: Shape) -> None:
        placement = regroup(placement, shape)
        if placement.split and len(placement.split) != len(shape):
            raise LayoutError(
                "a tensor has another number of dimensions than its placement",
                expected=_dimensions(placement),
                got=f"shape {list(shape)}",
            )
        self.placement = placement
        self.shape = shape
        self._bounds: dict[int, tuple[int, ...]] = {}
        for dim, sizes in placement.sizes:
            bounds = [0]
            for size in sizes:
                bounds.append(bounds[-1] + size)
            if bounds[-1] != shape[dim]:
                raise LayoutError(
                    f"the sizes given for dimension {dim} do not add up to the tensor",
                    expected=f"{shape[dim]} of shape {list(shape)}",
                    got=f"{bounds[-1]} = sum of {list(sizes)}",
                )
            self._bounds[dim] = tuple(bounds)
        for dim in range(len(placement.split)):
            if dim not in self._bounds and shape[dim] % placement.slices(dim):
                raise LayoutError(
                    f"dimension {dim} cannot be cut evenly",
                    expected=f"a multiple of {placement.slices(dim)}, or the sizes of its slices",
                    got=f"shape {list(shape)}",
                )
        if placement.optimizer > 1:
            heights = {1}
            if shape:
                heights = {high - low for low, high in (self._slice(0, at) for at in range(placement.slices(0)))}
            if any(height % placement.optimizer for height in heights):
                raise LayoutError(
                    "the optimizer cut does not divide dimension 0",
                    expected=f"slices whose height is a multiple of {placement.optimizer}",
                    got=f"heights {sorted(heights)} of shape {list(shape)}",
                )

    def box(self, rank: int) -> Box:
        """Return what global rank `rank` holds; its stage must be one of the placement's."""
        return self.piece_box(self.placement.piece(rank))

    def piece_box(self, piece: Piece) -> Box:
        """Return the box of one part."""
        if not self.placement.split:
            low, high = [0] * len(self.shape), list(self.shape)
        else:
            bounds = [self._slice(dim, at) for dim, at in enumerate(piece.index)]
            low, high = [b[0] for b in bounds], [b[1] for b in bounds]
        if self.placement.optimizer > 1:
            height = (high[0] - low[0]) // self.placement.optimizer
            low[0] += piece.part * height
            high[0] = low[0] + height
        return Box(tuple(low), tuple(high))

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Yield the parts that share elements with `box`, each with the shared box, in row-major order.

        Found dimension by dimension: the cost is that of what is found, whatever the number of ranks.
        """
        if box.size == 0:
            return
        dims = len(self.placement.split)
        options = [self._slices_meeting(dim, box.start[dim], box.stop[dim]) for dim in range(dims)]
        for index in _product(options):
            for part in range(self.placement.optimizer):
                piece = Piece(index, part)
                shared = self.piece_box(piece).intersect(box)
                if shared is not None:
                    yield piece, shared

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return all ranks, `rank` among them, that hold what `rank` holds."""
        return tuple(sorted(self.placement.holders(self.placement.piece(rank))))

    def _slice(self, dim: int, at: int) -> tuple[int, int]:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            return bounds[at], bounds[at + 1]
        step = self.shape[dim] // self.placement.slices(dim)
        return at * step, at * step + step

    def _slices_meeting(self, dim: int, low: int, high: int) -> range:
        bounds = self._bounds.get(dim)
        if bounds is not None:
            first = next(i for i in range(len(bounds) - 1) if bounds[i + 1] > low)
            last = next(i for i in range(len(bounds) - 1, 0, -1) if bounds[i - 1] < high)
            return range(first, last)
        step = self.shape[dim] // self.placement.slices(dim)
        return range(low // step, (high - 1) // step + 1)


def whole_shape(placement: Placement, rank: int, held: Shape) -> Shape:
    """Return the shape of the whole tensor of which `rank` holds a part of shape `held`.

    Raises LayoutError if the number of dimensions, or a dimension of given sizes, does not fit.
    """
    placement = _regroup_held(placement, held)
    if not placement.split and placement.optimizer == 1:
        return held
    if placement.split and len(placement.split) != len(held):
        raise LayoutError(
            "a tensor has another number of dimensions than its placement",
            expected=_dimensions(placement),
            got=f"shape {list(held)}",
        )
    if not held:
        raise LayoutError("a scalar cannot be cut", expected="a tensor of one dimension or more", got="shape []")
    return tuple(placement.total(dim) or length * placement.cuts(dim) for dim, length in enumerate(held))


def stand_in_shape(source: Placement, target: Placement) -> Shape:
    """Return a small shape that both placements cut, in which the same parts meet as in any shape they both cut."""
    shorter, longer = sorted((source, target), key=lambda placement: len(placement.split))
    if shorter.split and not shorter.open_ended and len(shorter.split) != len(longer.split):
        raise LayoutError(
            "source and target place a parameter with different numbers of dimensions",
            expected=f"{_dimensions(source)}, as the source has",
            got=_dimensions(target),
        )
    shape = []
    for dim in range(max(len(source.split), len(target.split), 1)):
        least = math.lcm(source.cuts(dim), target.cuts(dim))
        shape.append(source.total(dim) or target.total(dim) or least)
    return tuple(shape)


@lru_cache(maxsize=4096)
def regroup(placement: Placement, shape: Shape) -> Placement:
    """Return the placement with the dimensions of a tensor of `shape`.

    The factors of an expanded placement are joined, an open-ended one is closed; others stay as they are.
    """
    placement = _closed(placement, len(shape))
    if placement.expanded_shape is None or len(shape) == len(placement.split):
        return placement
    return _join(placement, placement.expanded_shape, shape)


def align(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """Return both placements over the same dimensions, joining factors where one lists more of them than the other.

    Raises LayoutError if the factors leave more than one way.
    """
    if source.expanded_shape and target.expanded_shape:
        if source.expanded_shape == target.expanded_shape:
            return source, target
        shape = _common_factors(source.expanded_shape, target.expanded_shape)
        return _join(source, source.expanded_shape, shape), _join(target, target.expanded_shape, shape)
    if source.expanded_shape and target.split:
        return _join_to(source, len(target.split)), target
    if target.expanded_shape and source.split:
        return source, _join_to(target, len(source.split))
    return source, target


def _common_factors(first: Shape, second: Shape) -> Shape:
    ends = [set(accumulate(shape, operator.mul)) for shape in (first, second)]
    shape, before = [], 1
    for end in sorted(ends[0] & ends[1]):
        shape.append(end // before)
        before = end
    return tuple(shape)


def _join_to(placement: Placement, dims: int) -> Placement:
    """Join factors into `dims` dimensions: in a dimension, all factors but the last are cut down to length 1."""
    assert placement.expanded_shape is not None
    if len(placement.split) == dims:
        return placement
    single = [length == placement.cuts(dim) for dim, length in enumerate(placement.expanded_shape)]
    ways = [
        tuple(math.prod(placement.expanded_shape[first:last]) for first, last in grouping)
        for grouping in _groupings(len(single), dims)
        if all(all(single[first : last - 1]) for first, last in grouping)
    ]
    if len(ways) != 1:
        raise LayoutError(
            "the factors of a nested layout cannot be joined into the dimensions of the other strategy",
            expected=f"exactly one way to join {list(placement.expanded_shape)} into {dims} dimensions",
            got=f"{len(ways)} ways",
            remedy="give the strategy as a protobuf file, which keeps nested maps as they are",
        )
    return _join(placement, placement.expanded_shape, ways[0])


def _regroup_held(placement: Placement, held: Shape) -> Placement:
    placement = _closed(placement, len(held))
    if placement.expanded_shape is None or len(held) == len(placement.split) or not held:
        return placement
    factors = tuple(
        length // placement.slices(dim) if length % placement.slices(dim) == 0 else 0
        for dim, length in enumerate(placement.expanded_shape)
    )
    # The optimizer cuts the joined dimension 0, not its first factor.
    return _join(placement, factors, (held[0] * placement.optimizer, *held[1:]))


def _closed(placement: Placement, ndim: int) -> Placement:
    """Return an open-ended placement as that of a tensor of `ndim` dimensions."""
    if not placement.open_ended or not placement.split or ndim < len(placement.split):
        return placement
    return replace(placement, split=placement.split + ((),) * (ndim - len(placement.split)), open_ended=False)


def _dimensions(placement: Placement) -> str:
    return f"{len(placement.split)} dimensions{' or more' if placement.open_ended else ''}"


def _join(placement: Placement, factors: Shape, shape: Shape) -> Placement:
    groupings = [
        g
        for g in _groupings(len(factors), len(shape))
        if all(math.prod(factors[first:last]) == length for (first, last), length in zip(g, shape))
    ]
    found = {tuple(tuple(a for axes in placement.split[i:j] for a in axes) for i, j in g) for g in groupings}
    if len(found) != 1:
        raise LayoutError(
            "the factors of a nested layout cannot be joined into the tensor's dimensions",
            expected=f"exactly one way to join {list(factors)} into the shape",
            got=f"{len(found)} ways for shape {list(shape)}",
            remedy="give the strategy as a protobuf file, which keeps nested maps as they are",
        )
    return Placement(placement.mesh, found.pop(), placement.optimizer, placement.sizes, placement.stages)


def _groupings(factors: int, dims: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the ways to cut `factors` consecutive factors into `dims` groups of one or more."""
    if dims == 0:
        if factors == 0:
            yield ()
        return
    for last in range(factors - 1, dims - 2, -1):
        for head in _groupings(last, dims - 1):
            yield (*head, (last, factors))


def unravel(number: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major coordinates of element `number` in an array of shape `lengths`."""
    coordinates = []
    for length in reversed(lengths):
        number, at = divmod(number, length)
        coordinates.append(at)
    return tuple(reversed(coordinates))


def ravel(coordinates: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """Return the row-major number of the element at `coordinates` in an array of shape `lengths`."""
    number = 0
    for at, length in zip(coordinates, lengths):
        number = number * length + at
    return number


def _product(options: list[range]) -> Iterator[tuple[int, ...]]:
    if not options:
        yield ()
        return
    for first in options[0]:
        for rest in _product(options[1:]):
            yield (first, *rest)
