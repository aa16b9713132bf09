"""Define which rank holds which piece of a tensor, without its shape (`Placement`, `Strategy`, `ceil_lengths`).

- local rank r of a stage has the coordinates of a row-major walk over `mesh`, last axis fastest;
- every tensor dimension is cut evenly (or at given sizes, or by ceiling division) over the mesh axes that `split`
  names, the major one first;
- ranks with the same slice are counted in row-major order of the mesh axes not in use, and an optimizer cut into k
  pieces gives the one at position p piece p mod k of dimension 0 of that slice;
- global rank = stage x ranks of a stage + local rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.patterns import Patterns, ends_of
from reshard_mpi.text import counted

Shape = tuple[int, ...]

# How many names a strategy remembers the answers for.
_MAX_KNOWN = 1 << 16


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
    def copies(self) -> int:
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


class Strategy:
    """The placements of a whole checkpoint: what all its strategy files say together.

    Args:
        parameters: for each listed name the placements that hold it; more than one where stages that share a parameter
            cut it differently.
        rules: pairs (glob, placement) for names not listed one by one; the first match wins.
        required_rules: the globs of rules that must place at least one tensor of the checkpoint: those people wrote.
        axes: the names of the mesh axes, where one mesh with names serves all placements. Neither changes which rank
            holds what.

    Raises LayoutError unless all stages have the same number of ranks.
    """

    def __init__(
        self,
        world_size: int,
        stages: int,
        parameters: Mapping[str, tuple[Placement, ...]],
        rules: tuple[tuple[str, Placement], ...] = (),
        origin: str = "",
        required_rules: frozenset[str] = frozenset(),
        axes: tuple[str, ...] = (),
    ) -> None:
        self.world_size: Final = world_size
        self.stages: Final = stages
        self.parameters: Final = parameters
        self.rules: Final = rules
        self.origin: Final = origin
        self.required_rules: Final = required_rules
        self.axes: Final = axes
        # whether the first rule is for every name, as in a full checkpoint: then no pattern is looked at
        self._first_takes_all: Final = bool(rules) and rules[0][0] == "*"
        # the rules' answers for names asked about before: planning asks about each many times
        self._matched: dict[str, int | None] = {}
        self._followed_by_name: dict[str, tuple[str, ...]] = {}
        self._placed_by_rule: dict[int, tuple[Placement, ...]] = {}
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

    def __eq__(self, other: object) -> bool:
        """Tell whether both say the same, wherever it comes from."""
        names = ("world_size", "stages", "parameters", "rules")
        return isinstance(other, Strategy) and all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_spec(self) -> bool:
        """Whether people wrote it themselves, by rules over a mesh with names: no framework vouches for it."""
        return bool(self.axes)

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def find(self, name: str) -> tuple[Placement, ...]:
        """Return the placements of parameter `name`; empty where the strategy does not list it.

        All calls for one name, and for all names that one rule places, return the same object.
        """
        listed = self.parameters.get(name)
        if listed is not None:
            return listed
        rule = self.rule_of(name)
        return () if rule is None else self._placed_by_rule.setdefault(rule, (self.rules[rule][1],))

    def rule_of(self, name: str) -> int | None:
        """Return the number of the first rule that matches `name`, listed or not; None if none does."""
        if not self.rules:
            return None
        if self._first_takes_all:
            return 0
        cached = self._matched
        if name not in cached:
            if len(cached) >= _MAX_KNOWN:
                cached.clear()
            cached[name] = self._patterns.first(name)
        return cached[name]

    def followed(self, name: str) -> tuple[str, ...]:
        """Return the names that `name` may be named after (see `named_after`) and that more than a rule `*` lists."""
        cached = self._followed_by_name
        if name not in cached:
            if len(cached) >= _MAX_KNOWN:
                cached.clear()
            cached[name] = tuple(self._followed(name))
        return cached[name]

    def _followed(self, name: str) -> Iterator[str]:
        if self.find(name) and not self.is_only_caught(name):
            yield from (base for base in named_after(name) if self.find(base) and not self.is_only_caught(base))
            return
        ends = set() if self._first_takes_all or not self.rules else set(self._patterns.ends(name))
        if self.parameters:
            ends.update(end for end in ends_of(name) if name[end:] in self.parameters)
        yield from (name[end:] for end in sorted(ends))

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns([glob for glob, _ in self.rules])

    def listing(self, stages_of: Mapping[str, Collection[int]]) -> Strategy:
        """Return this strategy with the names that its rules place listed one by one, each in the stages that hold it.

        Args:
            stages_of: the stages that hold each name. Names that only a rule `*` places, and that may follow another
                parameter, are left to the rules.
        """
        listed = dict(self.parameters)
        placed: dict[
            tuple[Placement, tuple[int, ...]], tuple[Placement]
        ] = {}  # names placed alike have the same object
        for name, stages in stages_of.items():
            follows = self.is_only_caught(name) and bool(self.followed(name))
            if name in listed or follows:
                continue
            for placement in self.find(name):
                stages_here = tuple(stage for stage in placement.stages if stage in stages) or placement.stages
                listed[name] = placed.setdefault((placement, stages_here), (placement.with_stages(stages_here),))
        return Strategy(self.world_size, self.stages, listed, self.rules, self.origin, self.required_rules, self.axes)

    def is_only_caught(self, name: str) -> bool:
        """Tell whether only a rule for every name (`*`) lists parameter `name`."""
        if name in self.parameters:
            return False
        rule = self.rule_of(name)
        return rule is not None and self.rules[rule][0] == "*"


def unsharded(origin: str = "") -> Strategy:
    """Return the strategy of one full checkpoint: one rank that holds every tensor whole."""
    return Strategy(1, 1, {}, (("*", replicated(1)),), origin)


def named_after(name: str) -> Iterator[str]:
    """Yield the names that `name` may be named after (`adam.moment1.w` -> `moment1.w`, `w`), the longest first."""
    return (name[end:] for end in ends_of(name))


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
