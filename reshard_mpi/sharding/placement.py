"""Define which rank holds which piece of a tensor, without its shape (`Placement`, `ceil_lengths`).

- local rank r of a stage has the coordinates of a row-major walk over `mesh`, last axis fastest;
- every tensor dimension is cut evenly (or at given sizes, or by ceiling division) over the mesh axes that `split`
  names, the major one first;
- ranks with the same slice are counted in row-major order of the mesh axes not in use, and an optimizer cut into k
  pieces gives the one at position p piece p mod k of dimension 0 of that slice;
- global rank = stage x ranks of a stage + local rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from reshard_mpi.errors import LayoutError
from reshard_mpi.text import counted

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """One distinct part of a tensor: the slice index in every dimension, and the optimizer piece within that slice."""

    slices: tuple[int, ...]
    part: int


class Placement:
    """How one parameter is cut over the ranks of its stages. Immutable.

    Example, on a mesh of 2 x 4 ranks, with rows cut over the second axis, and each part in two by the optimizer:
    `Placement(mesh=(2, 4), split=((1,), ()), optimizer=2)`.

    Args:
        mesh: ranks along each mesh axis of one stage.
        split: for each dimension the mesh axes (counted from the left) that cut it, major first; () cuts nothing at any
            rank.
        optimizer: number of pieces into which dimension 0 of each slice is cut once more.
        sizes: (dimension, slice sizes) for dimensions cut unevenly.
        stages: the pipeline stages that hold it.
        expanded_shape: set where `split` may list more dimensions than the tensor has, each a factor of a real one
            (MindSpore's JSON of nested maps): the whole tensor's shape in those factors.
        open_ended: the tensor may have further dimensions, not cut (a rule that fits many tensors).
        whole_scalars: a tensor without dimensions is not cut (a rule that fits all tensors).
        ceil: dimensions are cut by ceiling division, as torch cuts them: the last slices may be shorter or empty; over
            several axes each slice is cut again. Their lengths follow from the tensor's shape.

    Raises LayoutError if an axis is outside the mesh or used twice, or the optimizer cut has no ranks to go over.
    """

    def __init__(
        self,
        mesh: tuple[int, ...],
        split: tuple[tuple[int, ...], ...] = (),
        optimizer: int = 1,
        sizes: tuple[tuple[int, tuple[int, ...]], ...] = (),
        stages: tuple[int, ...] = (0,),
        expanded_shape: Shape | None = None,
        open_ended: bool = False,
        whole_scalars: bool = False,
        ceil: bool = False,
    ) -> None:
        self.mesh: Final = mesh
        self.split: Final = split
        self.optimizer: Final = optimizer
        self.sizes: Final = sizes
        self.stages: Final = stages
        self.expanded_shape: Final = expanded_shape
        self.open_ended: Final = open_ended
        self.whole_scalars: Final = whole_scalars
        self.ceil: Final = ceil
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
        if self.ceil and (self.sizes or self.optimizer > 1):
            raise LayoutError(
                "a cut by ceiling division stands alone",
                expected="neither the sizes of slices nor an optimizer cut",
                got=f"an optimizer cut into {self.optimizer}" if self.optimizer > 1 else f"sizes {self.sizes}",
            )
        for dim, lengths in sizes:
            if dim >= len(self.split) or len(lengths) != self.slices(dim):
                slices = self.slices(dim) if dim < len(self.split) else 0
                raise LayoutError(
                    f"the sizes given for dimension {dim} do not fit its cut",
                    expected=f"{slices} sizes",
                    got=f"{len(lengths)} sizes {list(lengths)}",
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"Placement({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def changed(self, **values: Any) -> Placement:
        """Return this placement with other values of its attributes."""
        return Placement(**{**vars(self), **values})

    @property
    def dimensions(self) -> str:
        """How many dimensions the tensor has, in words."""
        return counted(len(self.split), "dimension") + (" or more" if self.open_ended else "")

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
    def optimizer_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the optimizer cuts, in a spec: the last axes that cut no dimension."""
        axes: list[int] = []
        for axis in reversed(self.free_axes):
            if math.prod(self.mesh[chosen] for chosen in axes) == self.optimizer:
                break
            if self.mesh[axis] > 1:
                axes.insert(0, axis)
        return tuple(axes)

    @property
    def holders_per_slice(self) -> int:
        """Ranks of a stage that share one slice, before the optimizer cut."""
        return math.prod(self.mesh[axis] for axis in self.free_axes)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same piece, over all stages."""
        return self.holders_per_slice // self.optimizer * len(self.stages)

    @property
    def is_cut(self) -> bool:
        """Whether any rank holds less than the whole tensor."""
        return self.optimizer > 1 or any(self.slices(dim) > 1 for dim in range(len(self.split)))

    def slices(self, dim: int) -> int:
        """Into how many slices dimension `dim` is cut, before the optimizer cut."""
        return math.prod(self.mesh[axis] for axis in self.split[dim]) if dim < len(self.split) else 1

    @property
    def is_uneven(self) -> bool:
        """Whether slices of one dimension may have different lengths."""
        return self.ceil or bool(self.sizes)

    def cuts(self, dim: int) -> int:
        """Into how many parts dimension `dim` is cut in all."""
        return self.slices(dim) * (self.optimizer if dim == 0 else 1)

    def total(self, dim: int) -> int | None:
        """The length of dimension `dim`, where the placement itself tells it."""
        return next((sum(sizes) for cut_dim, sizes in self.sizes if cut_dim == dim), None)

    def piece(self, rank: int) -> Piece:
        """Return which part of the tensor global rank `rank` holds."""
        coordinates = unravel(rank % self.stage_size, self.mesh)
        indices = []
        for axes in self.split:
            index = 0
            for axis in axes:
                index = index * self.mesh[axis] + coordinates[axis]
            indices.append(index)
        position = 0
        if self.optimizer > 1:
            for axis in self.free_axes:
                position = position * self.mesh[axis] + coordinates[axis]
        return Piece(tuple(indices), position % self.optimizer)

    @property
    def cuts_text(self) -> str:
        """How dimensions are cut, in words: `dimension 1 in 4 parts`."""
        cuts = [(dim, self.cuts(dim)) for dim in range(max(1, len(self.split)))]
        return ", ".join(f"dimension {dim} in {parts} parts" for dim, parts in cuts if parts > 1) or "not cut"

    def holder(self, piece: Piece, home: int) -> int:
        """Return the global rank that holds `piece` and lies nearest to rank `home` in the mesh.

        Along the free axes it has the coordinates of `home`, so parameters that are cut over different axes are taken
        from the same files.
        """
        stage = home // self.stage_size
        if stage not in self.stages:
            stage = self.stages[0]
        near = unravel(home % self.stage_size, self.mesh)
        free = self.free_axes
        position = ravel(tuple(near[axis] for axis in free), tuple(self.mesh[axis] for axis in free))
        return stage * self.stage_size + self._holders_in_stage(piece)(
            position + piece.part - position % self.optimizer
        )

    def holders(self, piece: Piece) -> Iterator[int]:
        """Yield every global rank that holds `piece`, in ascending order within each stage."""
        rank_at = self._holders_in_stage(piece)
        for stage in self.stages:
            for position in range(piece.part, self.holders_per_slice, self.optimizer):
                yield stage * self.stage_size + rank_at(position)

    def nth_holder(self, piece: Piece, number: int) -> int:
        """Return the global rank that `holders` yields as the one of this number, from 0."""
        stage, place = divmod(number, self.holders_per_slice // self.optimizer)
        position = piece.part + place * self.optimizer
        return self.stages[stage] * self.stage_size + self._holders_in_stage(piece)(position)

    def _holders_in_stage(self, piece: Piece) -> Callable[[int], int]:
        """Return what finds the local rank that holds the slice of `piece`, by its position along the free axes."""
        coordinates = [0] * len(self.mesh)
        for axes, index in zip(self.split, piece.slices):
            for axis in reversed(axes):
                index, coordinates[axis] = divmod(index, self.mesh[axis])
        free = self.free_axes
        lengths = tuple(self.mesh[axis] for axis in free)

        def rank_at(position: int) -> int:
            for axis, coordinate in zip(free, unravel(position, lengths)):
                coordinates[axis] = coordinate
            return ravel(tuple(coordinates), self.mesh)

        return rank_at

    def with_stages(self, stages: tuple[int, ...]) -> Placement:
        return self.changed(stages=stages)


def replicated(ranks: int) -> Placement:
    """Return the placement of a tensor that every one of `ranks` ranks holds whole."""
    return Placement((ranks,))


def unravel(number: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major coordinates of element `number` in an array of shape `lengths`."""
    coordinates = []
    for length in reversed(lengths):
        number, coordinate = divmod(number, length)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def ravel(coordinates: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """Return the row-major number of the element at `coordinates` in an array of shape `lengths`."""
    number = 0
    for coordinate, length in zip(coordinates, lengths):
        number = number * length + coordinate
    return number


def ceil_lengths(length: int, cuts: Iterable[int]) -> tuple[int, ...]:
    """Return the lengths of a dimension's slices under ceiling division, and again for each of these."""
    lengths = [length]
    for count in cuts:
        lengths = [
            max(0, min(step, whole - index * step))
            for whole, step in ((whole, -(-whole // count)) for whole in lengths)
            for index in range(count)
        ]
    return tuple(lengths)
