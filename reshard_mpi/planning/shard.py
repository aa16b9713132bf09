"""The plan of one target rank: every byte of its shard has exactly one source, or it is refused."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from reshard_mpi.box import Box
from reshard_mpi.errors import CoverageError, LayoutError, StrategyError
from reshard_mpi.manifest import Manifest, ShardIdentity, TensorSpec
from reshard_mpi.nesting import regroup
from reshard_mpi.placement import Piece, Placement, Strategy
from reshard_mpi.planning.agreement import Part, agreement_checks, common_strings, replica_checks
from reshard_mpi.planning.model import Check, Copy, RankPlan, TensorPlan
from reshard_mpi.planning.parameters import (
    Unlisted,
    everywhere,
    find_or_follow,
    is_partial_sum,
    named_after,
)
from reshard_mpi.planning.replicas import Choice, choose_holders, home_rank
from reshard_mpi.planning.tensors import SourceTensor, SourceTensors


class ShardPlanner:
    """Plans one target rank out of the source shards opened for it.

    manifests: the opened shards by rank, those of `needed_ranks` at least. unlisted: what becomes of parameters the
    target strategy does not list. strict: listed parameters that were never saved are an error.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        target_rank: int,
        manifests: Mapping[int, Manifest],
        *,
        unlisted: Unlisted,
        strict: bool,
    ) -> None:
        self._source = source
        self._target = target
        self._rank = target_rank
        self._stage = target.stage_of(target_rank)
        self._home = home_rank(target_rank, target.world_size, source.world_size)
        self._manifests = manifests
        self._tensors = SourceTensors(source, manifests)
        self._unlisted = unlisted
        self._strict = strict
        self._parts: dict[tuple[tuple[Placement, ...], Placement, tuple[int, ...]], tuple[Box, tuple[Part, ...]]] = {}
        # name -> its source and how the target holds it, for all that goes into this shard
        self._wanted: dict[str, tuple[SourceTensor, Placement]] = {}
        for name in self._tensors.names:
            tensor = self._tensors.resolve(name)
            placement = self._target_placement(tensor)
            if placement is not None:
                self._wanted[name] = (tensor, placement)

    def comparison_ranks(self, available: Container[int]) -> tuple[int, ...]:
        """Return the ranks to open besides, because copies of some tensors may differ and must be compared."""
        ranks: set[int] = set()
        for tensor, placement in self._wanted.values():
            if self._must_compare(tensor):
                box = self._tensors.box(placement, tensor.shape, self._rank)
                for origin in tensor.placements:
                    for _, piece, _, _ in self._parts_of(origin, tensor.shape, box):
                        ranks.update(rank for rank in origin.holders(piece) if rank in available)
        return tuple(sorted(ranks - set(self._manifests)))

    def plan(self, compared: Mapping[int, Manifest], strategy_table: str) -> RankPlan:
        """Return the plan.

        compared: the shards of `comparison_ranks`. strategy_table: what the shard is to say of the whole checkpoint.
        Raises CoverageError for a part without source, LayoutError or DisagreementError for what does not fit.
        """
        choice = self._choose()
        absent = self._absent()
        tensors = tuple(self._plan_tensor(tensor, placement, choice) for tensor, placement in self._wanted.values())
        same_world = self._target.world_size == self._source.world_size
        checks = list(agreement_checks((tensor for tensor, _ in self._wanted.values()), same_world=same_world))
        checks.extend(self._replica_checks(compared))
        strings, notes = common_strings(self._manifests, self._home)
        if self._unlisted is Unlisted.DROP:
            strings = {}
        identity = ShardIdentity(self._rank, self._target.world_size, strategy_table)
        opened = tuple(sorted({*self._manifests, *compared}))
        return RankPlan(self._rank, identity, tensors, strings, tuple(checks), absent, tuple(notes), opened)

    def _target_placement(self, tensor: SourceTensor) -> Placement | None:
        """Return how this target rank holds `tensor`, None if it does not."""
        if self._unlisted is Unlisted.FOLLOW:
            placements = find_or_follow(
                self._target, tensor.name, lambda base: self._tensors.same_shape(tensor.name, base)
            )
            if not placements and any(placement.is_cut for placement in tensor.placements):
                raise StrategyError(
                    f"{tensor.name!r} is sharded in the source and the target strategy does not say how to place it",
                    expected="the parameter in the target strategy, or one it is named after with the same shape",
                    got=_not_followed(self._target, tensor.name),
                    where=self._target.origin,
                    remedy="add it to the target strategy, or use --unlisted replicate or --unlisted drop",
                )
        else:
            placements = self._target.find(tensor.name)
            if not placements and self._unlisted is Unlisted.DROP:
                return None
        placements = placements or (everywhere(self._target),)
        placement = next((p for p in placements if self._stage in p.stages), None)
        if placement is None:
            return None
        try:
            placement = regroup(placement, tensor.shape)
            self._tensors.layout(placement, tensor.shape)
        except LayoutError as error:
            error.where = f"tensor {tensor.name!r}, target strategy {self._target.origin}".rstrip()
            error.remedy = error.remedy or "choose a target strategy whose cuts divide the tensor, or give the sizes"
            raise
        return placement

    def _parts_of(self, origin: Placement, shape: tuple[int, ...], box: Box) -> list[Part]:
        layout = self._tensors.layout(origin, shape)
        return [(origin, piece, layout.piece_box(piece), region) for piece, region in layout.pieces_meeting(box)]

    def _needed_parts(self, tensor: SourceTensor, target: Placement) -> tuple[Box, tuple[Part, ...]]:
        """Return the target box and the parts to read for it, of the placement whose parts are all at hand."""
        key = (tensor.placements, target, tensor.shape)
        if key not in self._parts:
            box = self._tensors.box(target, tensor.shape, self._rank)
            ordered = sorted(tensor.placements, key=lambda p: self._home // p.stage_size not in p.stages)
            options = [tuple(self._parts_of(origin, tensor.shape, box)) for origin in ordered]
            at_hand = (
                option
                for option in options
                if all(any(r in self._manifests for r in origin.holders(piece)) for origin, piece, _, _ in option)
            )
            self._parts[key] = (box, next(at_hand, options[0]) if len(options) > 1 else options[0])
        return self._parts[key]

    def _choose(self) -> Choice:
        demands: dict[Placement, dict[Piece, None]] = {}
        done = set()
        for tensor, placement in self._wanted.values():
            key = (tensor.placements, placement, tensor.shape)
            if tensor.listed and key not in done:
                done.add(key)
                for origin, piece, _, _ in self._needed_parts(tensor, placement)[1]:
                    demands.setdefault(origin, {})[piece] = None
        return choose_holders(demands, self._home, self._manifests)

    def _plan_tensor(self, tensor: SourceTensor, placement: Placement, choice: Choice) -> TensorPlan:
        box, parts = self._needed_parts(tensor, placement)
        copies = []
        for origin, piece, part_box, region in parts:
            rank = choice.get((origin, piece)) if tensor.listed else self._any_rank(tensor)
            if rank not in tensor.entries:
                rank = next((r for r in origin.holders(piece) if r in tensor.entries), None)
            if rank is None:
                raise self._hole(tensor, origin, piece, region)
            copies.append(Copy(rank, tensor.entries[rank], part_box, region))
        covered = sum(copy.region.size for copy in copies)
        if covered != box.size:  # pieces of a layout are disjoint, so equal sizes mean: each element exactly once
            raise CoverageError(
                f"the sources of {tensor.name!r} do not cover what target rank {self._rank} holds",
                expected=f"{box.size} elements of box {box}",
                got=f"{covered} elements",
            )
        return TensorPlan(TensorSpec(tensor.name, tensor.dtype, tensor.shape, box), tuple(copies))

    def _any_rank(self, tensor: SourceTensor) -> int:
        return self._home if self._home in tensor.entries else next(iter(tensor.entries))

    def _hole(self, tensor: SourceTensor, origin: Placement, piece: Piece, region: Box) -> CoverageError:
        holders = tuple(origin.holders(piece))
        return CoverageError(
            f"no source holds a part of {tensor.name!r} that target rank {self._rank} needs",
            expected=f"box {region} on {_ranks(holders)}",
            got="shard missing" if not any(r in self._manifests for r in holders) else "shards without the tensor",
            where=_paths(self._manifests, holders),
            remedy="restore one of these ranks' shards, or give the strategy this checkpoint was saved with",
        )

    def _absent(self) -> tuple[str, ...]:
        """Return the listed parameters this shard should have that were never saved, as opened holders show."""
        absent = []
        for name in self._target.parameters:
            if name in self._tensors:
                continue
            if not any(self._stage in placement.stages for placement in self._target.parameters[name]):
                continue
            origins = find_or_follow(self._source, name, lambda _: True)
            holders = [
                rank
                for rank in self._manifests
                if any(self._source.stage_of(rank) in origin.stages for origin in origins)
            ]
            if origins and not holders:
                raise CoverageError(
                    f"no shard that should hold {name!r} is there",
                    expected=f"a shard of stage {origins[0].stages[0]} of the source",
                    got=f"shards of {_ranks(tuple(self._manifests))}",
                    remedy="restore the shards of that stage",
                )
            absent.append(name)
        if absent and self._strict:
            raise CoverageError(
                "the target strategy lists parameters that no source shard holds",
                expected="every listed parameter (--strict)",
                got=f"{len(absent)} absent: {', '.join(absent[:5])}" + (" ..." if len(absent) > 5 else ""),
                where=self._target.origin,
                remedy="leave out --strict if they were never saved",
            )
        if absent and not any(self._target.find(name) for name in self._wanted):
            raise StrategyError(
                "no parameter that the target strategy lists is in the checkpoint",
                expected=", ".join(absent[:3]),
                got=", ".join(self._tensors.names[:3]) or "no tensors",
                where=self._target.origin,
                remedy="check that checkpoint and strategy belong to the same network",
            )
        return tuple(absent)

    @staticmethod
    def _must_compare(tensor: SourceTensor) -> bool:
        tied = sum(len(placement.stages) for placement in tensor.placements) > 1
        return tensor.listed and (tied or is_partial_sum(tensor.name))

    def _replica_checks(self, compared: Mapping[int, Manifest]) -> Iterator[Check]:
        named = [(tensor.name, target) for tensor, target in self._wanted.values() if self._must_compare(tensor)]
        if not named:
            return
        opened = SourceTensors(self._source, {**self._manifests, **compared})
        for name, target in named:
            tensor = opened.resolve(name)
            box = opened.box(target, tensor.shape, self._rank)
            why = (
                "they are partial sums of a step that is not finished: save at the end of a step"
                if is_partial_sum(name)
                else "the stages that share the parameter have drifted apart"
            )
            alternatives = [self._parts_of(origin, tensor.shape, box) for origin in tensor.placements]
            yield from replica_checks(name, alternatives, tensor.entries, why)


def _not_followed(target: Strategy, name: str) -> str:
    others = [base for base in named_after(name) if target.find(base)]
    return f"{others[0]!r} listed, but of another shape" if others else "neither listed"


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"one of ranks {shown}"


def _paths(manifests: Mapping[int, Manifest], ranks: tuple[int, ...]) -> str:
    return ", ".join(manifests[rank].path for rank in ranks if rank in manifests)
