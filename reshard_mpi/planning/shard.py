"""The plan of one target rank: every byte of its shard has exactly one source, or it is refused."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import repeat

from reshard_mpi.box import Box
from reshard_mpi.errors import CoverageError, LayoutError, StrategyError
from reshard_mpi.layout import Layout
from reshard_mpi.manifest import Manifest, ShardIdentity, TensorSpec
from reshard_mpi.placement import Piece, Placement, Strategy
from reshard_mpi.planning.agreement import agreement_checks, common_strings, replica_checks
from reshard_mpi.planning.model import Check, Copy, RankPlan, TensorPlan
from reshard_mpi.planning.parameters import (
    Unlisted,
    everywhere,
    find_or_follow,
    is_partial_sum,
    named_after,
)
from reshard_mpi.planning.replicas import choose_holders, home_rank
from reshard_mpi.planning.tensors import Part, SourceTensor, SourceTensors, parts_meeting

# How source and target hold a tensor.
_Way = tuple[tuple[Layout, ...], Layout]


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
        self._boxes: dict[Layout, Box] = {}
        self._parts: dict[_Way, tuple[Part, ...]] = {}
        # name -> its source and how the target holds it, for all that goes into this shard
        self._wanted: dict[str, tuple[SourceTensor, Layout]] = {}
        self._compared: list[str] = []
        for name in self._tensors.names:
            tensor = self._tensors.resolve(name)
            layout = self._target_layout(tensor)
            if layout is not None:
                self._wanted[name] = (tensor, layout)
                if tensor.listed and (tensor.is_tied or is_partial_sum(name)):
                    self._compared.append(name)

    def comparison_ranks(self, available: Container[int]) -> tuple[int, ...]:
        """Return the ranks to open besides, because copies of some tensors may differ and must be compared."""
        ranks: set[int] = set()
        for name in self._compared:
            tensor, target = self._wanted[name]
            for layout in tensor.layouts:
                for part in parts_meeting(layout, self._box(target)):
                    ranks.update(rank for rank in part.placement.holders(part.piece) if rank in available)
        return tuple(sorted(ranks - set(self._manifests)))

    def lacking(self) -> dict[tuple[int, ...], list[str]]:
        """Return the names that no opened shard holds where needed, by the ranks any of which should hold them.

        Of a name that no opened shard holds at all: the ranks that hold the same as one of those opened.
        """
        lacking: dict[tuple[int, ...], list[str]] = {}
        found: dict[object, list[tuple[int, ...]]] = {}  # many tensors are held alike
        for tensor, target in self._wanted.values():
            if tensor.listed:
                key = (tensor.layouts, target, *tensor.entries)
                if key not in found:
                    found[key] = [
                        tuple(part.placement.holders(part.piece))
                        for part in self._needed_parts(tensor, target)
                        if not any(rank in tensor.entries for rank in part.placement.holders(part.piece))
                    ]
                for ranks in found[key]:
                    lacking.setdefault(ranks, []).append(tensor.name)
        for name, placements in self._target.parameters.items():
            if name not in self._tensors and any(self._stage in placement.stages for placement in placements):
                origins = find_or_follow(self._source, name, lambda _: True)
                if origins not in found:
                    found[origins] = [tuple(self._alike(origin)) for origin in origins]
                for ranks in found[origins]:
                    lacking.setdefault(ranks, []).append(name)
        lacking.pop((), None)
        return lacking

    def _alike(self, origin: Placement) -> Iterator[int]:
        """Yield the ranks that hold the same as the first opened one that holds anything of `origin`."""
        opened = next((rank for rank in self._manifests if self._source.stage_of(rank) in origin.stages), None)
        return iter(()) if opened is None else origin.holders(origin.piece(opened))

    def plan(self, compared: Mapping[int, Manifest], strategy_table: str) -> RankPlan:
        """Return the plan.

        compared: the shards of `comparison_ranks`. strategy_table: what the shard is to say of the whole checkpoint.
        Raises CoverageError for a part without source, LayoutError or DisagreementError for what does not fit.
        """
        choice = self._choose()
        absent = self._absent()
        tensors = tuple(self._plan_tensor(tensor, layout, choice) for tensor, layout in self._wanted.values())
        same_world = self._target.world_size == self._source.world_size
        every = map(self._tensors.resolve, self._tensors.names)
        checks = list(agreement_checks(every, self._wanted, same_world=same_world))
        checks.extend(self._replica_checks(compared))
        strings, notes = common_strings(self._manifests, self._home)
        if self._unlisted is Unlisted.DROP:
            strings = {}
        identity = ShardIdentity(self._rank, self._target.world_size, strategy_table)
        opened = tuple(sorted({*self._manifests, *compared}))
        return RankPlan(
            target_rank=self._rank,
            stage=self._stage,
            identity=identity,
            tensors=tensors,
            strings=strings,
            checks=tuple(checks),
            absent=absent,
            notes=tuple(notes),
            source_ranks=opened,
            loose=frozenset(name for name, (tensor, _) in self._wanted.items() if not tensor.listed),
        )

    def _target_layout(self, tensor: SourceTensor) -> Layout | None:
        """Return how this target rank holds `tensor`, None if it does not."""
        if self._unlisted is Unlisted.FOLLOW:
            placements = find_or_follow(
                self._target, tensor.name, lambda base: self._tensors.same_shape(tensor.name, base)
            )
            if not placements and any(layout.placement.is_cut for layout in tensor.layouts):
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
            return self._tensors.layout(placement, tensor.shape)
        except LayoutError as error:
            error.where = f"tensor {tensor.name!r}, target strategy {self._target.origin}".rstrip()
            error.remedy = error.remedy or "choose a target strategy whose cuts divide the tensor, or give the sizes"
            raise

    def _box(self, target: Layout) -> Box:
        if target not in self._boxes:
            self._boxes[target] = target.box(self._rank)
        return self._boxes[target]

    def _needed_parts(self, tensor: SourceTensor, target: Layout) -> tuple[Part, ...]:
        """Return the parts to read for the target's box, of the layout whose parts are all at hand."""
        key = (tensor.layouts, target)
        if key not in self._parts:
            box = self._box(target)
            ordered = sorted(tensor.layouts, key=lambda layout: not self._is_near(layout.placement))
            options = [parts_meeting(layout, box) for layout in ordered]
            at_hand = (option for option in options if all(map(self._is_at_hand, option)))
            parts = options[0] if len(options) == 1 else next(at_hand, options[0])
            self._parts[key] = self._covering(parts, tensor, box)
        return self._parts[key]

    def _is_near(self, placement: Placement) -> bool:
        return self._source.stage_of(self._home) in placement.stages

    def _is_at_hand(self, part: Part) -> bool:
        return any(rank in self._manifests for rank in part.placement.holders(part.piece))

    def _covering(self, parts: tuple[Part, ...], tensor: SourceTensor, box: Box) -> tuple[Part, ...]:
        """Return `parts`, proved to cover `box`: being disjoint, they do if they have as many elements."""
        covered = sum(part.region.size for part in parts)
        if covered != box.size:
            raise CoverageError(
                f"the sources of {tensor.name!r} do not cover what target rank {self._rank} holds",
                expected=f"{box.size} elements of box {box}",
                got=f"{covered} elements",
            )
        return parts

    def _choose(self) -> dict[_Way, tuple[int | None, ...]]:
        """Return the rank to read each needed part from, for every way in which listed tensors are held."""
        parts_of = {
            (tensor.layouts, target): self._needed_parts(tensor, target)
            for tensor, target in self._wanted.values()
            if tensor.listed
        }
        demands: dict[Placement, dict[Piece, None]] = {}
        for parts in parts_of.values():
            for part in parts:
                demands.setdefault(part.placement, {})[part.piece] = None
        choice = choose_holders(demands, self._home, self._manifests)
        return {
            way: tuple(choice.get((part.placement, part.piece)) for part in parts) for way, parts in parts_of.items()
        }

    def _plan_tensor(
        self, tensor: SourceTensor, target: Layout, choice: Mapping[_Way, tuple[int | None, ...]]
    ) -> TensorPlan:
        parts = self._needed_parts(tensor, target)
        chosen = choice[tensor.layouts, target] if tensor.listed else repeat(self._any_rank(tensor))
        copies = []
        for part, rank in zip(parts, chosen):
            if rank not in tensor.entries:
                rank = next((other for other in part.placement.holders(part.piece) if other in tensor.entries), None)
            if rank is None:
                raise self._hole(tensor, part)
            copies.append(Copy(rank, tensor.entries[rank], part.box, part.region))
        return TensorPlan(TensorSpec(tensor.name, tensor.dtype, tensor.shape, self._box(target)), tuple(copies))

    def _any_rank(self, tensor: SourceTensor) -> int:
        return self._home if self._home in tensor.entries else next(iter(tensor.entries))

    def _hole(self, tensor: SourceTensor, part: Part) -> CoverageError:
        holders = tuple(part.placement.holders(part.piece))
        return CoverageError(
            f"no source holds a part of {tensor.name!r} that target rank {self._rank} needs",
            expected=f"box {part.region} on {_ranks(holders)}",
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

    def _replica_checks(self, compared: Mapping[int, Manifest]) -> Iterator[Check]:
        if not self._compared:
            return
        opened = SourceTensors(self._source, {**self._manifests, **compared})
        for name in self._compared:
            tensor, target = opened.resolve(name), self._wanted[name][1]
            why = (
                "they are partial sums of a step that is not finished: save at the end of a step"
                if is_partial_sum(name)
                else "the stages that share the parameter have drifted apart"
            )
            alternatives = [parts_meeting(layout, self._box(target)) for layout in tensor.layouts]
            yield from replica_checks(name, alternatives, tensor.entries, why)


def _not_followed(target: Strategy, name: str) -> str:
    others = [base for base in named_after(name) if target.find(base)]
    return f"{others[0]!r} listed, but of another shape" if others else "neither listed"


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"one of ranks {shown}"


def _paths(manifests: Mapping[int, Manifest], ranks: tuple[int, ...]) -> str:
    return ", ".join(manifests[rank].path for rank in ranks if rank in manifests)
