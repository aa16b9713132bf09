"""What the opened source shards say of each tensor, checked against the source strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard_mpi.box import Box
from reshard_mpi.dtypes import DType
from reshard_mpi.errors import DisagreementError, LayoutError, ReshardError
from reshard_mpi.layout import Layout, whole_shape
from reshard_mpi.manifest import Manifest, TensorEntry
from reshard_mpi.nesting import regroup
from reshard_mpi.placement import Placement, Shape, Strategy
from reshard_mpi.planning.parameters import everywhere, find_or_follow


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the source checkpoint.

    placements: where its parts are. listed: whether the strategy says so (else it is taken to be on every rank).
    entries: the opened shards that hold a part of it, by rank.
    """

    name: str
    dtype: DType
    shape: Shape
    placements: tuple[Placement, ...]
    listed: bool
    entries: Mapping[int, TensorEntry]


class SourceTensors:
    """The tensors of the opened shards of one source checkpoint, in the order in which the shards list them."""

    def __init__(self, strategy: Strategy, manifests: Mapping[int, Manifest]) -> None:
        self._strategy = strategy
        self._manifests = manifests
        self._entries: dict[str, dict[int, TensorEntry]] = {}
        for rank in sorted(manifests):
            for name, entry in manifests[rank].tensors.items():
                self._entries.setdefault(name, {})[rank] = entry
        self._resolved: dict[str, SourceTensor] = {}
        self._layouts: dict[tuple[Placement, Shape], Layout] = {}
        self._boxes: dict[tuple[Placement, Shape, int], Box] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def layout(self, placement: Placement, shape: Shape) -> Layout:
        """Return the layout, made once for all tensors that share it."""
        key = (placement, shape)
        if key not in self._layouts:
            self._layouts[key] = Layout(placement, shape)
        return self._layouts[key]

    def box(self, placement: Placement, shape: Shape, rank: int) -> Box:
        """Return what `rank` holds, computed once for all tensors that share placement and shape."""
        key = (placement, shape, rank)
        if key not in self._boxes:
            self._boxes[key] = self.layout(placement, shape).box(rank)
        return self._boxes[key]

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
        listed = bool(placements)
        if not listed:
            placements = (everywhere(self._strategy),)
        held = {
            rank: entry
            for rank, entry in entries.items()
            if any(self._strategy.stage_of(rank) in placement.stages for placement in placements)
        }
        if not held:  # only in stages where the strategy does not list it
            held, placements, listed = entries, (everywhere(self._strategy),), False
        first_rank, first = next(iter(held.items()))
        shape = first.global_shape if first.global_shape is not None else None
        grouped = []
        for placement in placements:
            rank = next((r for r in held if self._strategy.stage_of(r) in placement.stages), None)
            if rank is None:
                continue
            try:
                shape = shape if shape is not None else whole_shape(placement, rank, held[rank].shape)
                placement = regroup(placement, shape)
                self.layout(placement, shape)
            except ReshardError as error:
                raise _about(error, name, self._manifests[rank].path) from None
            grouped.append(placement)
        assert shape is not None
        for rank, entry in held.items():
            self._check(name, rank, entry, tuple(grouped), shape, first, self._manifests[first_rank].path)
        return SourceTensor(name, first.dtype, shape, tuple(grouped), listed, held)

    def _held_alike(self, name: str, base: str) -> bool:
        if base not in self._entries:
            return True
        return all(
            rank not in self._entries[base] or self._entries[base][rank].shape == entry.shape
            for rank, entry in self._entries[name].items()
        )

    def _check(
        self,
        name: str,
        rank: int,
        entry: TensorEntry,
        placements: tuple[Placement, ...],
        shape: Shape,
        first: TensorEntry,
        first_path: str,
    ) -> None:
        path = self._manifests[rank].path
        if entry.dtype != first.dtype:
            raise DisagreementError(
                f"source shards disagree in the type of {name!r}",
                expected=f"{first.dtype}, as in {first_path}",
                got=str(entry.dtype),
                where=path,
                remedy="use shards of one and the same checkpoint",
            )
        stage = self._strategy.stage_of(rank)
        placement = next((p for p in placements if stage in p.stages), None)
        if placement is None:
            return
        box = self.box(placement, shape, rank)
        if entry.shape != box.shape or (entry.box is not None and entry.box != box):
            raise DisagreementError(
                f"the shape of {name!r} does not fit its layout, or the shards disagree",
                expected=f"box {box} of shape {list(box.shape)} on rank {rank}"
                f" (whole tensor {list(shape)}, as {first_path} has {list(first.shape)})",
                got=f"shape {list(entry.shape)}" + (f" at box {entry.box}" if entry.box is not None else ""),
                where=path,
                remedy="check that the source strategy is that of this checkpoint",
            )


def _about(error: ReshardError, name: str, path: str) -> ReshardError:
    if isinstance(error, LayoutError) and not error.where:
        error.where = f"tensor {name!r} in {path}"
        error.remedy = error.remedy or "check that the strategy is that of this checkpoint"
    return error
