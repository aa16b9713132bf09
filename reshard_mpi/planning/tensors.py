"""What the opened source shards say of each tensor, checked against the source strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, LayoutError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest, TensorEntry
from reshard_mpi.planning.parameters import everywhere, find_or_follow
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, whole_shape
from reshard_mpi.sharding.placement import Piece, Placement, Shape, Strategy


class Part(NamedTuple):
    """A needed part of a tensor: the `region` of what the holders of `piece` have, which is `box`."""

    placement: Placement
    piece: Piece
    box: Box
    region: Box


def parts_meeting(layout: Layout, box: Box) -> tuple[Part, ...]:
    """Return the parts of a tensor that share elements with `box`."""
    return tuple(
        Part(layout.placement, piece, layout.piece_box(piece), region) for piece, region in layout.pieces_meeting(box)
    )


class SourceTensor(NamedTuple):
    """One tensor of the source checkpoint.

    layouts: where its parts are; more than one where stages that share it cut it differently. listed: whether the
    strategy says so (else it is taken to be on every rank). entries: the opened shards that hold a part of it, by rank.
    """

    name: str
    dtype: DType
    shape: Shape
    layouts: tuple[Layout, ...]
    listed: bool
    entries: Mapping[int, TensorEntry]

    @property
    def is_tied(self) -> bool:
        """Whether several stages share it."""
        return sum(len(layout.placement.stages) for layout in self.layouts) > 1


class _Fit(NamedTuple):
    """What tensors that are held alike have in common; `ranks` hold them."""

    layouts: tuple[Layout, ...]
    listed: bool
    ranks: tuple[int, ...]


class SourceTensors:
    """The tensors of the opened shards of one source checkpoint, in the order in which the shards list them.

    What is alike for many tensors is computed once: a checkpoint has thousands of them, placed in a few ways.
    """

    def __init__(self, strategy: Strategy, manifests: Mapping[int, Manifest]) -> None:
        self._strategy = strategy
        self._manifests = manifests
        self._entries: dict[str, dict[int, TensorEntry]] = {}
        for rank in sorted(manifests):
            for name, entry in manifests[rank].tensors.items():
                self._entries.setdefault(name, {})[rank] = entry
        self._resolved: dict[str, SourceTensor] = {}
        self._fits: dict[object, _Fit] = {}
        self._layouts: dict[tuple[Placement, Shape], Layout] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def layout(self, placement: Placement, shape: Shape) -> Layout:
        """Return the layout, one and the same for all tensors of this placement and shape."""
        key = (placement, shape)
        if key not in self._layouts:
            self._layouts[key] = Layout(placement, shape)
        return self._layouts[key]

    def resolve(self, name: str) -> SourceTensor:
        """Return the tensor called `name`, which an opened shard holds.

        Raises LayoutError or DisagreementError if the shards contradict the strategy or each other.
        """
        if name not in self._resolved:
            self._resolved[name] = self._resolve(name)
        return self._resolved[name]

    def same_shape(self, name: str, base: str) -> bool:
        """Tell whether two tensors have the same whole shape; a `base` that no shard holds contradicts nothing."""
        return base not in self._entries or self.resolve(base).shape == self.resolve(name).shape

    def _resolve(self, name: str) -> SourceTensor:
        entries = self._entries[name]
        placements = find_or_follow(self._strategy, name, lambda base: self._held_alike(name, base))
        key = (placements, tuple((rank, e.shape, e.box, e.global_shape) for rank, e in entries.items()))
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = self._fit(name, placements)
        held = entries if len(fit.ranks) == len(entries) else {rank: entries[rank] for rank in fit.ranks}
        first = held[fit.ranks[0]]
        for rank, entry in held.items():
            if entry.dtype is not first.dtype and entry.dtype != first.dtype:
                raise DisagreementError(
                    f"source shards disagree in the type of {name!r}",
                    expected=f"{first.dtype}, as in {self._manifests[fit.ranks[0]].path}",
                    got=str(entry.dtype),
                    where=self._manifests[rank].path,
                    remedy="use shards of one and the same checkpoint",
                )
        return SourceTensor(name, first.dtype, fit.layouts[0].shape, fit.layouts, fit.listed, held)

    def _fit(self, name: str, placements: tuple[Placement, ...]) -> _Fit:
        """Bind the placements of `name` to the shapes its shards hold; without any it is on every rank."""
        entries = self._entries[name]
        held = self._held_in(placements, entries)
        listed = bool(held)
        if not listed:  # in no strategy, or only in stages where the strategy does not list it
            placements = (everywhere(self._strategy),)
            held = entries
        first_rank, first = next(iter(held.items()))
        near = next(placement for placement in placements if self._strategy.stage_of(first_rank) in placement.stages)
        try:
            shape = first.global_shape
            if shape is None:
                shape = whole_shape(near, first_rank, first.shape)
            layouts = tuple(self.layout(placement, shape) for placement in placements)
        except LayoutError as error:
            error.where = f"tensor {name!r} in {self._manifests[first_rank].path}"
            error.remedy = error.remedy or "check that the strategy is that of this checkpoint"
            raise
        for layout in layouts:
            for rank in self._held_in((layout.placement,), held):
                self._check(name, rank, layout, first_rank)
        return _Fit(layouts, listed, tuple(held))

    def _held_in(self, placements: tuple[Placement, ...], entries: Mapping[int, TensorEntry]) -> dict[int, TensorEntry]:
        """Return the entries of ranks in whose stages one of `placements` is."""
        stages = {stage for placement in placements for stage in placement.stages}
        return {rank: entry for rank, entry in entries.items() if self._strategy.stage_of(rank) in stages}

    def _held_alike(self, name: str, base: str) -> bool:
        others = self._entries.get(base, {})
        return all(
            (other := others.get(rank)) is None
            or (other.shape, other.global_shape) == (entry.shape, entry.global_shape)
            for rank, entry in self._entries[name].items()
        )

    def _check(self, name: str, rank: int, layout: Layout, first_rank: int) -> None:
        """Raise DisagreementError if what `rank` holds is not what the layout, found by `first_rank`, says."""
        entry, first = self._entries[name][rank], self._entries[name][first_rank]
        box = layout.box(rank)
        whole = entry.global_shape
        if entry.shape != box.shape or entry.box not in (None, box) or whole not in (None, layout.shape):
            raise DisagreementError(
                f"the shape of {name!r} does not fit its layout, or the shards disagree",
                expected=f"box {box} of shape {list(box.shape)} on rank {rank} (whole tensor {list(layout.shape)},"
                f" as {self._manifests[first_rank].path} has {list(first.shape)})",
                got=f"shape {list(entry.shape)}"
                + (f" at box {entry.box}" if entry.box is not None else "")
                + (f" of {list(whole)}" if whole is not None else ""),
                where=self._manifests[rank].path,
                remedy="check that the source strategy is that of this checkpoint",
            )
