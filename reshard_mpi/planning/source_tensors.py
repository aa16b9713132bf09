"""Check tensors of opened shards (`SourceTensors`), and find the parts that make up a target box (`needed_parts`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry, TensorType
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.source_flaws import NONE_LOST, UnusableShard, errors_text
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, UnknownLengthError, whole_shape, whole_shape_of_parts
from reshard_mpi.sharding.placement import Piece, Placement, Shape
from reshard_mpi.sharding.strategy import Strategy, everywhere, find_or_follow, named_after

# What to do where one shard contradicts another one: nothing tells which of the two is wrong.
_OF_ANOTHER = (
    "if one of the two shards is of another checkpoint, take it away: others that hold the same take its place"
)


class TensorPart(NamedTuple):
    """A needed part of a tensor: `region`, which lies in `box`, which the holders of `piece` have."""

    placement: Placement
    piece: Piece
    box: Box
    region: Box


def parts_meeting(layout: Layout, box: Box) -> tuple[TensorPart, ...]:
    """Return the parts of a tensor that share elements with `box`."""
    return tuple(
        TensorPart(layout.placement, piece, layout.piece_box(piece), region)
        for piece, region in layout.pieces_meeting(box)
    )


class SourceGroup:
    """What source tensors of one kind have in common, that is all but their names and where their bytes are."""

    def __init__(
        self,
        dtype: DType,
        layouts: tuple[Layout, ...],
        ranks: tuple[int, ...],
        *,
        listed: bool,
        has_whole_sums: bool,
    ) -> None:
        self.dtype = dtype
        self.shape = layouts[0].shape  # of each whole tensor
        self.layouts = layouts  # how ranks hold it; several if stages that share it cut it differently
        self.ranks = ranks  # the opened ones that hold a part
        self.listed = listed  # whether the strategy places it (else it is taken to be on every rank)
        # whether these are sums of gradients that the optimizer does not cut, whatever strategies say
        self.has_whole_sums = has_whole_sums

    @property
    def is_tied(self) -> bool:
        """Whether several stages share the tensors."""
        return sum(len(layout.placement.stages) for layout in self.layouts) > 1


def needed_parts(
    name: str, group: SourceGroup, box: Box, target_rank: int, home_stage: int, opened: Container[int]
) -> tuple[TensorPart, ...]:
    """Return the parts to read for a box.

    Of several layouts the first is used for which every part should be in an opened shard; those of the home rank's
    stage come first.

    Args:
        name: of a tensor of the group, for errors.
        opened: ranks.

    Raises CoverageError if the parts do not make up the box. Different pieces are disjoint, so parts of different
    pieces cover the box if their sizes add up to its size.
    """
    ordered = sorted(group.layouts, key=lambda layout: home_stage not in layout.placement.stages)
    options = [parts_meeting(layout, box) for layout in ordered]

    def is_at_hand(part: TensorPart) -> bool:
        return any(rank in opened for rank in part.placement.holders(part.piece))

    at_hand = (option for option in options if all(map(is_at_hand, option)))
    parts = options[0] if len(options) == 1 else next(at_hand, options[0])
    covered = sum(part.region.size for part in parts)
    if covered != box.size or len({part.piece for part in parts}) != len(parts):
        raise CoverageError(
            f"the sources of {name!r} do not cover what target rank {target_rank} holds",
            expected=f"{box.size} elements of box {box}",
            got=f"{covered} elements in {len(parts)} parts",
            remedy="check that the source strategy is that of this checkpoint",
        )
    return parts


# For each opened shard, the number of the kind that a tensor has in it; _LACKING if the shard does not hold it.
_Signature = tuple[int, ...]
_LACKING = -1


class SourceTensors:
    """The tensors of the opened shards of one source checkpoint, in the order in which the shards list them.

    A checkpoint has thousands of tensors, but of few kinds and placed in few ways, so each group is made once.

    Attributes:
        ranks: those of the opened shards.
        lost: the shards that cannot be used, by rank.
        may_be_needed: tells of a name, and of all names there are, whether a tensor is asked for (None: all are); one
            that is not is left out if the opened shards do not tell how large it is.
    """

    def __init__(
        self,
        strategy: Strategy,
        manifests: Mapping[int, Manifest],
        lost: Mapping[int, UnusableShard] = NONE_LOST,
        may_be_needed: Callable[[str, Container[str]], bool] | None = None,
    ) -> None:
        self._strategy = strategy
        self._manifests = manifests
        self._lost = lost
        self.ranks = tuple(sorted(manifests))
        self._held = tuple(manifests[rank].tensors for rank in self.ranks)
        self._signatures = self._all_signatures()
        self._group_by_name: dict[str, SourceGroup] = {}
        # By the identity of placements, which the strategy keeps.
        self._groups: dict[tuple[int, _Signature, bool], SourceGroup] = {}
        self._layouts: dict[tuple[Placement, Shape], Layout] = {}
        if may_be_needed is not None:
            for name in self._of_unknown_length():
                if not may_be_needed(name, self._signatures):
                    del self._signatures[name]

    @property
    def names(self) -> Collection[str]:
        return self._signatures.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._signatures

    def layout(self, placement: Placement, shape: Shape) -> Layout:
        """Return the layout of this placement and shape; always the same object."""
        key = (placement, shape)
        if key not in self._layouts:
            self._layouts[key] = Layout(placement, shape)
        return self._layouts[key]

    def group(self, name: str) -> SourceGroup:
        """Return the group of a tensor that an opened shard holds; tensors that are alike have the same object.

        Raises LayoutError or DisagreementError if the shards contradict the strategy or each other, CoverageError if
        only lost shards tell how large the tensor is.
        """
        group = self._group_by_name.get(name)
        if group is None:
            placements = self._strategy.of_every_name or self._placements(name)  # there may be very many
            has_whole_sums = is_partial_sum(name) and self._is_whole_sum(name, placements)
            key = (id(placements), self._signatures[name], has_whole_sums)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = self._resolve(name, placements, has_whole_sums=has_whole_sums)
            self._group_by_name[name] = group
        return group

    def entries(self, name: str) -> dict[int, TensorEntry]:
        """Return the entry of a tensor in each opened shard that holds a part of it, by rank."""
        return {rank: self._manifests[rank].tensors[name] for rank in self.group(name).ranks}

    def same_shape(self, name: str, base: str) -> bool:
        """Tell whether two tensors have the same whole shape; true too if no opened shard holds `base`."""
        return base not in self._signatures or self.group(base).shape == self.group(name).shape

    def _placements(self, name: str) -> tuple[Placement, ...]:
        """Return how the strategy places a tensor; empty if it does not."""
        return find_or_follow(self._strategy, name, lambda base: self._held_alike(name, base))

    def missing_slices(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that hold a slice that no opened shard has and that tells how large tensors are, for each."""
        pieces: dict[tuple[Placement, Piece], None] = {}
        for name in self._of_unknown_length():
            for placement in self._placements(name):
                held_pieces = {placement.piece(rank) for rank in self._held_in((placement,), self._kinds(name))}
                every = map(placement.piece, self._strategy.ranks_of(placement.stages[0])) if held_pieces else ()
                pieces.update(((placement, piece), None) for piece in every if piece not in held_pieces)
        yield from (tuple(placement.holders(piece)) for placement, piece in pieces)

    def _of_unknown_length(self) -> list[str]:
        """Return the tensors cut by ceiling division whose slices are not all in opened shards."""
        strategy = self._strategy
        every = chain(chain.from_iterable(strategy.parameters.values()), (rule for _, rule in strategy.rules))
        if not any(placement.ceil for placement in every):
            return []
        unknown: dict[tuple[int, _Signature], bool] = {}
        names = []
        for name, signature in self._signatures.items():
            placements = self._placements(name)
            key = (id(placements), signature)
            if key not in unknown:
                unknown[key] = any(self._lacks_slices(name, placement) for placement in placements)
            if unknown[key]:
                names.append(name)
        return names

    def _lacks_slices(self, name: str, placement: Placement) -> bool:
        """Tell whether opened shards have some slices of a tensor and not all that tell how long it is."""
        kinds = self._held_in((placement,), self._kinds(name))
        if not (placement.ceil and kinds) or any(kind.global_shape is not None for kind in kinds.values()):
            return False
        try:
            whole_shape_of_parts(placement, {rank: kind.shape for rank, kind in kinds.items()})
        except UnknownLengthError:
            return True
        except LayoutError:
            return False  # which is raised when the tensor is looked into
        return False

    def _all_signatures(self) -> dict[str, _Signature]:
        first, *others = self._held or (None,)
        if first is not None and all(tensors.index_by_name is first.index_by_name for tensors in others):
            kept: dict[_Signature, _Signature] = {}  # of a thousand shards each is long, and few are different
            signatures = zip(*(tensors.kind_ids for tensors in self._held))
            return {name: kept.setdefault(own, own) for name, own in zip(first.index_by_name, signatures)}
        names = dict.fromkeys(name for tensors in self._held for name in tensors.index_by_name)
        columns = [
            [_LACKING if number is None else kind_of[number] for number in map(number_of.get, names)]
            for number_of, kind_of in ((tensors.index_by_name, tensors.kind_ids) for tensors in self._held)
        ]
        return dict(zip(names, zip(*columns)))

    def _kinds(self, name: str) -> dict[int, TensorType]:
        """Return the kind of a tensor on each opened rank that holds it."""
        return {
            rank: tensors.kinds[number]
            for rank, tensors, number in zip(self.ranks, self._held, self._signatures[name])
            if number != _LACKING
        }

    def _is_whole_sum(self, name: str, placements: tuple[Placement, ...]) -> bool:
        """Tell whether ranks hold their slice of a sum whole, though the strategy has the optimizer cut it once more.

        MindSpore's strategy files say of `accu_grads.w` what they say of `w`; but unless it is asked to shard the sums
        too, the optimizer's cut comes after them. The shapes tell which it is.
        """
        base = next((base for base in named_after(name) if base in self._signatures), None)
        for rank, kind in self._kinds(name).items():
            near = self._strategy.of_rank(placements, rank)
            if near is not None:
                return (
                    near.optimizer > 1
                    and base is not None
                    and whole_shape(near, rank, kind.shape) != self.group(base).shape
                    and whole_shape(near.changed(optimizer=1), rank, kind.shape) == self.group(base).shape
                )
        return False

    def _resolve(self, name: str, placements: tuple[Placement, ...], *, has_whole_sums: bool) -> SourceGroup:
        """Return the group of a tensor. placements: from the strategy; if empty, the tensor is on every rank."""
        if has_whole_sums:
            placements = tuple(placement.changed(optimizer=1) for placement in placements)
        kinds = self._kinds(name)
        kinds_in_stages = self._held_in(placements, kinds)
        listed = bool(kinds_in_stages)
        if not listed:  # in no strategy, or only in stages where the strategy does not list it
            placements = (everywhere(self._strategy),)
            kinds_in_stages = kinds
        first_rank, first = next(iter(kinds_in_stages.items()))
        near = next(placement for placement in placements if self._strategy.stage_of(first_rank) in placement.stages)
        of_stages = self._held_in((near,), kinds_in_stages)
        try:
            shape = first.global_shape
            if shape is None:
                shape = whole_shape_of_parts(near, {rank: kind.shape for rank, kind in of_stages.items()})
            layouts = tuple(self.layout(placement, shape) for placement in placements)
        except LayoutError as error:
            if isinstance(error, UnknownLengthError):
                self._require_none_lost(name, near, of_stages, error)
            error.where = f"tensor {name!r} in {self._manifests[first_rank].path}"
            error.remedy = error.remedy or "check that the strategy is that of this checkpoint"
            raise
        for layout in layouts:
            for rank in self._held_in((layout.placement,), kinds_in_stages):
                self._check(name, rank, layout, first_rank, kinds, listed=listed)
        for rank, kind in kinds_in_stages.items():
            if kind.dtype != first.dtype:
                raise DisagreementError(
                    f"source shards disagree in the type of {name!r}",
                    expected=f"{first.dtype}, as in {self._manifests[first_rank].path}",
                    got=str(kind.dtype),
                    where=self._manifests[rank].path,
                    remedy=f"use shards of one and the same checkpoint; {_OF_ANOTHER}",
                )
        ranks = tuple(kinds_in_stages)
        return SourceGroup(first.dtype, layouts, ranks, listed=listed, has_whole_sums=has_whole_sums)

    def _require_none_lost(
        self, name: str, placement: Placement, ranks: Collection[int], error: UnknownLengthError
    ) -> None:
        """Raise CoverageError if slices of a tensor are unknown since shards are lost. ranks: the opened holders."""
        held_pieces = {placement.piece(rank) for rank in ranks}
        lost = [
            shard
            for rank, shard in sorted(self._lost.items())
            if self._strategy.stage_of(rank) in placement.stages and placement.piece(rank) not in held_pieces
        ]
        if lost:
            only = lost[0] if len(lost) == 1 else None
            raise CoverageError(
                f"how large {name!r} is cannot be known, since some of its slices are in shards that are lost",
                expected=error.expected,
                got=errors_text(lost) if only is None or not only.problem else f"rank {only.rank}: {only.problem}",
                where=only.where if only is not None and only.problem else "",
                remedy="restore these ranks' shards, or give the mesh that the checkpoint was saved with, or the sizes"
                " of all slices in place of ceil",
            ) from None

    def _held_in(self, placements: tuple[Placement, ...], kinds: Mapping[int, TensorType]) -> dict[int, TensorType]:
        """Return the kinds on those ranks whose stage is one of a placement."""
        stages = {stage for placement in placements for stage in placement.stages}
        return {rank: kind for rank, kind in kinds.items() if self._strategy.stage_of(rank) in stages}

    def _held_alike(self, name: str, base: str) -> bool:
        if base not in self._signatures:
            return True
        others = self._kinds(base)
        return all(
            (other := others.get(rank)) is None or (other.shape, other.global_shape) == (kind.shape, kind.global_shape)
            for rank, kind in self._kinds(name).items()
        )

    def _check(
        self, name: str, rank: int, layout: Layout, first_rank: int, kinds: Mapping[int, TensorType], *, listed: bool
    ) -> None:
        """Raise DisagreementError if `rank` does not hold the box of the layout, which was derived from `first_rank`.

        What is wrong with a parameter is wrong with its state too, such as moments, and said of the parameter.

        Args:
            listed: whether the strategy says how the tensor is cut; else it should be whole on every rank.
        """
        kind, first = kinds[rank], kinds[first_rank]
        box = layout.box(rank)
        whole = kind.global_shape
        if kind.shape != box.shape or kind.box not in (None, box) or whole not in (None, layout.shape):
            owners = (base for base in named_after(name) if base in self._signatures)
            blamed = next((base for base in owners if self._held_alike(name, base)), name)
            of_state = f" of {name!r}, which goes with it" if blamed != name else ""
            if not listed and kind.shape != box.shape:
                raise DisagreementError(
                    f"the source strategy does not say how {blamed!r} is cut, and it is not the same on all ranks",
                    expected=f"shape {list(first.shape)} on every rank, as in {self._manifests[first_rank].path}",
                    got=f"shape {list(kind.shape)} on rank {rank}{of_state}",
                    where=self._manifests[rank].path,
                    remedy="say in the source strategy how it is cut: in TOML by a rule that matches its name;"
                    f" {_OF_ANOTHER}",
                )
            raise DisagreementError(
                f"the shape of {blamed!r} does not fit its layout, or the shards disagree",
                expected=f"box {box} of shape {list(box.shape)} on rank {rank} (whole tensor {list(layout.shape)},"
                f" as {self._manifests[first_rank].path} has {list(first.shape)})",
                got=f"shape {list(kind.shape)}{of_state}"
                + (f" at box {kind.box}" if kind.box is not None else "")
                + (f" of {list(whole)}" if whole is not None else ""),
                where=self._manifests[rank].path,
                remedy="check that the source strategy is that of this checkpoint; where slices have different lengths,"
                ' a TOML rule needs their sizes (sizes = "ceil": as torch cuts); ' + _OF_ANOTHER,
            )
