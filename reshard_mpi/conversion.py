"""One source checkpoint and one target strategy: the plans of the target's ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError
from reshard_mpi.layout import Layout
from reshard_mpi.manifest import Manifest
from reshard_mpi.placement import Strategy
from reshard_mpi.planning.agreement import loose_beginnings, moment_counters
from reshard_mpi.planning.model import Beginning, Limits, Moment, RankPlan
from reshard_mpi.planning.parameters import Unlisted, find_or_follow
from reshard_mpi.planning.ranks import check_target_rank, needed_ranks, wants
from reshard_mpi.planning.shard import ShardPlanner
from reshard_mpi.planning.tensors import SourceTensors
from reshard_mpi.source import SourceCheckpoint
from reshard_mpi.strategy import table
from reshard_mpi.units import MIB

# The buffer is large enough that what Python does for each filling of it is small beside moving the bytes. The window
# is the most that is mapped of sources at once. An interpreter with HDF5 and MPI takes 70 MiB.
LIMITS = Limits(base_bytes=72 * MIB, buffer_bytes=2 * MIB, window_bytes=16 * MIB)
# A shard that lacks a parameter is no sign that the others do (see `_other_holders`), but strategies also list what is
# never saved, and opening a thousand shards to be sure of that would take minutes.
_MAX_LOOKED_INTO = 64


@dataclass(slots=True)
class Conversion:
    """Plans target ranks and checks, before anything is written, what must hold of the source.

    unlisted, strict: as the command line's options of these names.
    """

    source: SourceCheckpoint
    target: Strategy
    unlisted: Unlisted = Unlisted.FOLLOW
    strict: bool = False
    limits: Limits = LIMITS
    _table: str | None = field(default=None)
    _names: tuple[str, ...] | None = field(default=None)
    _never_saved: dict[tuple[int, ...], set[str]] = field(default_factory=dict)

    def source_ranks(self, target_rank: int) -> tuple[int, ...]:
        """Return the source ranks that target rank `target_rank` reads tensors from, ascending."""
        return needed_ranks(
            self.source.strategy,
            self.target,
            target_rank,
            names=self._rule_names(),
            available=self.source,
            unlisted=self.unlisted,
        )

    def plan(self, target_rank: int, *, checked: bool = True) -> RankPlan:
        """Return the plan of one target rank, its checks passed.

        checked: False leaves out what reads tensors of the source: another process, or an earlier call, has done that.
        Raises a ReshardError where the target cannot be made exactly.
        """
        check_target_rank(target_rank, self.target)
        self._require_stages_of_rules(target_rank)
        ranks = set(self.source_ranks(target_rank))
        if self.source.strategy.world_size == self.target.world_size and target_rank in self.source:
            ranks.add(target_rank)  # values that no strategy lists and each rank has for itself (random state)
        manifests = self._open(ranks)
        if self._lists_unseen(target_rank, manifests):
            seen = {self.source.strategy.stage_of(rank) for rank in manifests}
            extra = {rank for stage, rank in self.source.stage_ranks().items() if stage not in seen}
            manifests = self._open(ranks | extra)
        if self._wants_unseen(target_rank, manifests):
            manifests = self._open({*manifests, *self.source.stage_ranks().values()})
        planner = self._planner(target_rank, manifests)
        while found := self._other_holders(planner, manifests):
            manifests = self._open({*manifests, *found})
            planner = self._planner(target_rank, manifests)
        compared = self._open(planner.comparison_ranks(self.source)) if checked else {}
        try:
            plan = planner.plan(compared, self._strategy_table())
        except CoverageError as error:
            files, size = self.source.files, self.source.strategy.world_size
            error.where = error.where or f"{files.path}, which has the shards of {len(files.by_rank)} of {size} ranks"
            raise
        if not checked:
            return plan
        return self._checked(plan)._replace(moments=self._moments(plan, manifests), beginnings=self._beginnings(plan))

    def target_weights(self, targets: Sequence[int]) -> dict[int, int]:
        """Return how large the shards of `targets` will be relative to each other (bytes, or 1 where all are alike)."""
        uneven = any(p.sizes for placements in self.target.parameters.values() for p in placements)
        if self.target.stages == 1 and not uneven:
            return dict.fromkeys(targets, 1)
        itemsizes = self._itemsizes_by_layout()
        weights: dict[int, int] = {}
        by_stage: dict[int, int] = {}
        for target_rank in targets:
            stage = self.target.stage_of(target_rank)
            if uneven or stage not in by_stage:
                by_stage[stage] = sum(
                    itemsize * layout.box(target_rank).size
                    for layout, itemsize in itemsizes.items()
                    if stage in layout.placement.stages
                )
            weights[target_rank] = by_stage[stage]
        return weights

    def _open(self, ranks: set[int] | tuple[int, ...]) -> dict[int, Manifest]:
        return {rank: self.source.manifest(rank) for rank in sorted(ranks) if rank in self.source}

    def _planner(self, target_rank: int, manifests: dict[int, Manifest]) -> ShardPlanner:
        return ShardPlanner(
            self.source.strategy,
            self.target,
            target_rank,
            manifests,
            unlisted=self.unlisted,
            strict=self.strict,
        )

    def _other_holders(self, planner: ShardPlanner, manifests: dict[int, Manifest]) -> set[int]:
        """Return ranks not opened yet that hold what the opened shards lack.

        Shards saved without redundancy hold each parameter on one of the ranks that have it alike.
        """
        found: set[int] = set()
        for holders, names in planner.lacking().items():
            never_saved = self._never_saved.setdefault(holders, set())
            unseen = [name for name in names if name not in never_saved]
            others = [rank for rank in holders if rank in self.source and rank not in manifests] if unseen else []
            if found.intersection(others):
                continue  # what was found may hold these too: looked at again with it
            for rank in others[:_MAX_LOOKED_INTO]:
                if any(name in self.source.manifest(rank).tensors for name in unseen):
                    found.add(rank)
                    break
            else:
                never_saved.update(unseen)
        return found

    def _moments(self, plan: RankPlan, manifests: dict[int, Manifest]) -> tuple[Moment, ...]:
        counters = tuple(moment_counters(manifests))
        if not counters:
            return ()
        from reshard_mpi.engine.arrays import load_shard

        values = load_shard(plan._replace(tensors=tuple(counter for _, counter in counters)), limits=self.limits)
        named = ((counter.spec.name, path) for path, counter in counters)
        return tuple(Moment(name, str(values[name].tolist()), path) for name, path in named)

    def _beginnings(self, plan: RankPlan) -> tuple[Beginning, ...]:
        if self.source.strategy.world_size in (1, self.target.world_size):
            return ()  # nothing else to take, or each rank keeps its own
        starts = tuple(loose_beginnings(plan))
        if not starts:
            return ()
        from reshard_mpi.engine.arrays import load_shard

        values = load_shard(plan._replace(tensors=starts), limits=self.limits)
        return tuple(
            Beginning(name, hashlib.sha256(values[name].tobytes()).hexdigest(), start.copies[0].source_rank)
            for start in starts
            for name in (start.spec.name,)
        )

    def _checked(self, plan: RankPlan) -> RankPlan:
        """Run the plan's checks; a difference that matters refuses the target, another becomes a note."""
        if not plan.checks:
            return plan
        from reshard_mpi.engine.arrays import first_difference

        notes = []
        for check in plan.checks:
            found = first_difference(check, limits=self.limits)
            if found is None:
                continue
            first, (other, index) = check.copies[0], found
            if check.refuse:
                raise DisagreementError(
                    f"copies of {check.name!r} differ",
                    expected=f"the same bytes on ranks {first.source_rank} and {other.source_rank}",
                    got=f"a difference at element {list(index)}: {check.why}",
                    where=f"ranks {first.source_rank} and {other.source_rank} of {self.source.files.path}",
                    remedy="use shards of one and the same moment",
                )
            notes.append(
                f"{check.name!r} differs between ranks {first.source_rank} and {other.source_rank}: {check.why}"
            )
        return plan._replace(notes=(*plan.notes, *notes))

    def _lists_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> bool:
        """Tell whether the target lists names that only shards of stages not opened yet could hold."""
        stage = self.target.stage_of(target_rank)
        return self.source.strategy.stages > 1 and any(
            not any(name in manifest.tensors for manifest in manifests.values())
            and any(stage in placement.stages for placement in placements)
            and not find_or_follow(self.source.strategy, name, lambda _: True)
            for name, placements in self.target.parameters.items()
        )

    def _wants_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> bool:
        """Tell whether the target needs names that no opened shard has, which only rules place: holes, most likely."""
        seen = {name for manifest in manifests.values() for name in manifest.tensors}
        return any(
            wants(self.source.strategy, self.target, target_rank, name, self.unlisted)
            for name in self._rule_names()
            if name not in seen
        )

    def _require_stages_of_rules(self, target_rank: int) -> None:
        """Raise CoverageError if the target may hold what, by rules, only stages without any shard have."""
        there = self.source.stage_ranks()
        for glob, placement in self.source.strategy.rules:
            if any(stage in there for stage in placement.stages):
                continue
            names = [glob, *(name for name in self.target.parameters if fnmatchcase(name, glob))]
            holding = [placement.stages for name in names for placement in self.target.find(name)]
            if holding and not any(self.target.stage_of(target_rank) in stages for stages in holding):
                continue
            raise CoverageError(
                f"no shard that should hold {glob!r} is there",
                expected=f"a shard of stage {placement.stages[0]} of the source",
                got=f"shards of stage {', '.join(map(str, there))}",
                where=self.source.files.path,
                remedy="restore the shards of that stage",
            )

    def _rule_names(self) -> tuple[str, ...]:
        """Return the names that shards hold, where the source strategy lists none but goes by rules."""
        if self._names is None:
            names: dict[str, None] = {}
            if self.source.strategy.rules and self.source.strategy.world_size > 1:
                for rank in self.source.stage_ranks().values():
                    names.update(dict.fromkeys(self.source.manifest(rank).tensors))
            self._names = tuple(names)
        return self._names

    def _itemsizes_by_layout(self) -> dict[Layout, int]:
        """Return how the target holds the tensors that the first shard of each stage shows, with their element sizes.

        Tensors with the same layout are added up. What does not fit is left out: planning refuses it by name.
        """
        shown = SourceTensors(self.source.strategy, self._open(tuple(self.source.stage_ranks().values())))
        found: dict[Layout, int] = {}
        for name in shown.names:
            with contextlib.suppress(LayoutError, DisagreementError):
                tensor = shown.resolve(name)
                for placement in find_or_follow(self.target, name, partial(shown.same_shape, name)):
                    layout = shown.layout(placement, tensor.shape)
                    found[layout] = found.get(layout, 0) + tensor.dtype.itemsize_bytes
        return found

    def _strategy_table(self) -> str:
        if self._table is None:
            self._table = table.dumps(self.target)
        return self._table
