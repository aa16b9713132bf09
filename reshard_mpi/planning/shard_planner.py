"""Plan one target rank: every byte has exactly one source (`ShardPlanner`)."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, ReshardError, StrategyError, UsageError
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.planning.chunks import PiecesOf, missing_files
from reshard_mpi.planning.parameters import (
    Accumulated,
    Unlisted,
    everywhere,
    find_or_follow,
    is_partial_sum,
    listed_names,
    may_be_held,
)
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, RankPlan, ReadGroup, SharedFact
from reshard_mpi.planning.ranks import wants
from reshard_mpi.planning.replicas import (
    ReplicaGroup,
    Replicas,
    choose_holders,
    copies_alike,
    home_rank,
    pieces_written_by,
)
from reshard_mpi.planning.shard_faults import missing_part_error, require_never_saved, stage_missing
from reshard_mpi.planning.shared_facts import (
    agreement_checks,
    common_strings,
    is_moment,
    left_out_of,
    require_tensors_or_strings,
    shared_tensors,
)
from reshard_mpi.planning.target_layouts import (
    GradientJoining,
    GradientShare,
    TargetLayouts,
    apart,
    joined_route,
    sums_among,
    zero_route,
)
from reshard_mpi.planning.tensors import SourceGroup, SourceTensors, TensorPart, needed_parts
from reshard_mpi.planning.unusable_shards import UnusableShard, named
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement, Strategy


@dataclass(frozen=True, slots=True)
class _TensorClass:
    """Tensors that are alike in source and target, by name in file order, and the parts that are needed of each."""

    number: int
    group: SourceGroup
    layout: Layout
    share: GradientShare | ReshardError
    box: Box
    parts: tuple[TensorPart, ...]
    names: list[str] = field(default_factory=list)


class BothLayouts(NamedTuple):
    """How both sides hold a tensor."""

    source: SourceGroup
    target: Layout


class Policy(NamedTuple):
    """The user's options for targets."""

    unlisted: Unlisted  # what becomes of parameters that the target strategy does not list
    strict: bool  # whether a listed parameter that was never saved is an error
    replicas: Replicas  # which copies are compared
    accumulated: Accumulated  # what becomes of accumulated gradients
    allows_holes: bool = False  # tensors that cannot be made do not refuse the plan, but are named in it


class ShardPlanner:
    """Plans one target rank from the source shards that were opened for it.

    Attributes:
        manifests: the opened shards by rank, those of `needed_ranks` at least.
        lost: the shards that were needed and cannot be used, by rank.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        target_rank: int,
        manifests: Mapping[int, Manifest],
        lost: Mapping[int, UnusableShard],
        policy: Policy,
    ) -> None:
        self._source = source
        self._target = target
        self._rank = target_rank
        self._stage = target.stage_of(target_rank)
        self._home = home_rank(target_rank, target.world_size, source.world_size)
        self._manifests = manifests
        self._policy = policy
        if policy.unlisted is not Unlisted.DROP:
            require_tensors_or_strings(manifests)
        leaves_out = target.stages > 1 or policy.unlisted is Unlisted.DROP
        self._tensors = SourceTensors(source, manifests, lost, self._may_hold if leaves_out else None)
        self._layouts = TargetLayouts(target, target_rank, self._tensors, policy.unlisted)
        self._lost = lost
        self._holes: dict[str, ReshardError] = {}
        # All that goes into this shard: by the way in which it is held, and by name in file order.
        self._ways: dict[tuple[SourceGroup, Layout, GradientShare | ReshardError], _TensorClass] = {}
        self._wanted: dict[str, _TensorClass] = {}
        home_stage = source.stage_of(self._home)
        joining = GradientJoining(
            policy.accumulated, source, self._tensors, target_rank, keeps_errors=policy.allows_holes
        )
        for name in self._tensors.names:
            group = self._tensors.group(name)
            layout = self._layouts.layout(name, group)
            if layout is not None:
                share = joining.share(name, group, layout.placement)
                if isinstance(share, ReshardError):
                    self._holes[name] = share
                way = self._ways.get((group, layout, share))
                if way is None:
                    box = self._layouts.box(layout)
                    has_parts = share in (GradientShare.TAKEN, GradientShare.JOINED)
                    parts = needed_parts(name, group, box, target_rank, home_stage, manifests) if has_parts else ()
                    way = _TensorClass(len(self._ways), group, layout, share, box, parts)
                    self._ways[group, layout, share] = way
                way.names.append(name)
                self._wanted[name] = way
        self._listed_here = tuple(self._find_listed_here())

    def _may_hold(self, name: str, present: Container[str]) -> bool:
        return may_be_held(self._target, self._stage, name, self._policy.unlisted, present)

    @property
    def names(self) -> Collection[str]:
        """The tensors of this target."""
        return self._wanted.keys()

    def lacking(self) -> dict[tuple[int, ...], list[str]]:
        """Return needed names that no opened shard has, by the ranks that should have them.

        If no opened shard holds the name at all, these are the ranks that should hold the same part as an opened one.
        """
        lacking: dict[tuple[int, ...], list[str]] = {}
        for way in self._ways.values():
            if way.group.listed:
                held: dict[Placement, set[Piece]] = {}
                for part in way.parts:
                    if part.placement not in held:  # there may be thousands of holders, and few ranks are opened
                        stages = part.placement.stages
                        of_stages = (rank for rank in way.group.ranks if self._source.stage_of(rank) in stages)
                        held[part.placement] = set(map(part.placement.piece, of_stages))
                    if part.piece not in held[part.placement]:
                        lacking.setdefault(tuple(part.placement.holders(part.piece)), []).extend(way.names)
        holders_of: dict[object, list[tuple[int, ...]]] = {}  # many tensors are placed alike
        for origins, names in self.unseen().items():
            if origins not in holders_of:
                holders_of[origins] = [tuple(self._alike(origin)) for origin in origins]
            for ranks in holders_of[origins]:
                lacking.setdefault(ranks, []).extend(names)
        lacking.pop((), None)
        return lacking

    def joined_ranks(self) -> set[int]:
        """Return the ranks whose shards are all needed, since their contents are joined."""
        return {
            rank
            for way in self._ways.values()
            if way.share is GradientShare.JOINED
            for part in way.parts
            for rank in part.placement.holders(part.piece)
        }

    def require_one_copy(self) -> None:
        """Raise UsageError if target ranks that hold the same piece get different sums, for a target of one copy."""
        for way in self._ways.values():
            name = way.names[0]
            if self._policy.accumulated is Accumulated.SUM and is_partial_sum(name) and way.layout.placement.copies > 1:
                raise UsageError(
                    f"the target has one copy of {name!r} for {way.layout.placement.copies} ranks",
                    expected="one rank for each piece, as there is one sum",
                    got="--accumulated sum, which gives the sum to one of these ranks and zeros to the others",
                    where=self._target.origin,
                    remedy="take --accumulated mean, a format with a file a rank (--to), or a target without replicas",
                )

    def unseen(self) -> dict[tuple[Placement, ...], list[str]]:
        """Return the listed names that this shard should have and no opened shard holds, by their source placements.

        A shard of a stage in which the source strategy does not list the name does not count as holding it. A name that
        the source strategy does not place is taken to be on every rank.
        """
        unseen: dict[tuple[Placement, ...], list[str]] = {}
        for name in self._listed_here:
            origins = find_or_follow(self._source, name, lambda _: True) or (everywhere(self._source),)
            unseen.setdefault(origins, []).append(name)
        return unseen

    def _find_listed_here(self) -> Iterator[str]:
        """Yield the listed names that no opened shard holds and that this target needs or must refuse (see `wants`)."""
        for name in dict.fromkeys((*listed_names(self._target), *listed_names(self._source))):
            if name in self._tensors and (not self._source.find(name) or self._tensors.group(name).listed):
                continue
            if self._layouts.lists(name):
                here = any(self._stage in placement.stages for placement in self._target.find(name))
            else:
                here = wants(self._source, self._target, self._rank, name, self._policy.unlisted, self._tensors)
            if here:
                yield name

    def _alike(self, origin: Placement) -> Iterator[int]:
        """Yield the ranks that hold the same part by `origin` as the first opened rank in one of its stages."""
        opened = next((rank for rank in self._manifests if self._source.stage_of(rank) in origin.stages), None)
        return iter(()) if opened is None else origin.holders(origin.piece(opened))

    def both_layouts(self, name: str) -> BothLayouts | None:
        """Return how both sides hold a tensor of this target; None if it is not of this target."""
        way = self._wanted.get(name)
        return None if way is None else BothLayouts(way.group, way.layout)

    def plan(self, strategy_table: str) -> RankPlan:
        """Return the plan of this target rank.

        Args:
            strategy_table: the description of the target strategy that goes into the shard.

        Raises CoverageError for a part that no source holds, LayoutError or DisagreementError if shards contradict
        strategies or each other.
        """
        choice = self._choose()
        absent = self._absent()
        groups = tuple(self._planned(way, choice[way.number]) for way in self._ways.values())
        pieces = PiecesOf(self._rank, self._target.world_size, allows_holes=self._policy.allows_holes)
        tensors = pieces.planned(PlannedTensors(groups, array("I", (way.number for way in self._wanted.values()))))
        same_world = self._target.world_size == self._source.world_size
        checks = (
            *agreement_checks(self._tensors, self._wanted, same_world=same_world),
            *pieces.checks(groups, self._policy.replicas),
        )
        strings, notes = common_strings(self._manifests, self._home)
        if self._policy.unlisted is Unlisted.DROP:
            strings = {}
        taken = [way for way in self._ways.values() if way.share is GradientShare.TAKEN]
        wanted = ((way.names, way.group, way.layout) for way in taken)
        loose = frozenset(name for way in self._ways.values() if not way.group.listed for name in way.names)
        identity = ShardIdentity(self._rank, self._target.world_size, strategy_table)
        return RankPlan(
            target_rank=self._rank,
            stage=self._stage,
            identity=identity,
            tensors=tensors,
            strings=strings,
            checks=checks,
            absent=absent,
            notes=tuple(notes),
            source_ranks=tuple(sorted(self._manifests)),
            loose=loose,
            unplaced=frozenset(name for name in loose if not self._layouts.lists(name)),
            shared_facts=tuple(self._shared()),
            alike=(*copies_alike(wanted, self._layouts.box, self._policy.replicas), *self._apart()),
            lost=self._replaced(groups) if self._lost else (),
            warnings=(
                *(self._not_its_own() if same_world and self._rank in self._lost else ()),
                *(missing for manifest in self._manifests.values() for missing in missing_files(manifest.tensors)),
            ),
            left_out=tuple(left_out_of(self._manifests)),
            sums=sums_among((way.names, way.group) for way in self._ways.values()),
            holes={**self._holes, **pieces.holes},
        )

    def written_elsewhere(self) -> frozenset[str]:
        """Return the tensors whose pieces here another target rank writes, if each piece is to be written once.

        Of a tensor that stages cut differently, those of the first placement make it up. One that no strategy lists is
        written by each stage that has it: whether others have it is not known here.
        """
        elsewhere: set[str] = set()
        for way in self._ways.values():
            placement, loose = way.layout.placement, not way.group.listed
            here = set(pieces_written_by(self._rank, way.names, placement, loose=loose))
            of_stage = placement.with_stages((self._stage,)) if loose else placement
            in_stage = set(pieces_written_by(self._rank, way.names, of_stage, loose=loose))
            for name in way.names:
                if loose and not self._layouts.lists(name):
                    is_here = name in in_stage
                else:
                    placements = self._layouts.placements(name) or (placement,)
                    is_here = name in here and self._stage in placements[0].stages
                if not is_here:
                    elsewhere.add(name)
        return frozenset(elsewhere)

    def writers_of_unlisted(self) -> dict[str, int]:
        """Return the target rank that writes each tensor which no strategy lists, if it is another one."""
        writers: dict[str, int] = {}
        for way in self._ways.values():
            of_stage = way.layout.placement.with_stages((self._stage,))
            rank = self._rank if way.group.listed else of_stage.nth_holder(of_stage.piece(self._rank), 0)
            if rank != self._rank:
                writers.update((name, rank) for name in way.names if not self._layouts.lists(name))
        return writers

    def _choose(self) -> list[Sequence[int | None]]:
        """Return the rank to read each part of each `_TensorClass` from, None where no opened rank holds it."""
        demands: dict[Placement, dict[Piece, None]] = {}
        for way in self._ways.values():
            for part in way.parts if way.group.listed and way.share is GradientShare.TAKEN else ():
                demands.setdefault(part.placement, {})[part.piece] = None
        choice = choose_holders(demands, self._home, self._manifests)
        return [
            [choice.get((part.placement, part.piece)) for part in way.parts]
            if way.group.listed
            else [self._any_rank(way.group)] * len(way.parts)
            for way in self._ways.values()
        ]

    def _planned(self, way: _TensorClass, chosen: Sequence[int | None]) -> Group:
        """Return where the tensors that are held in one way come from. chosen: a rank for each part.

        If the chosen rank lacks the tensors, another holder is taken. Raises CoverageError if there is none, unless
        there may be holes.
        """
        kind = TensorType.of_box(way.group.dtype, way.box, way.group.shape)
        if isinstance(way.share, ReshardError):
            return Group(kind, way.names, ())
        if way.share is GradientShare.ZEROS:
            return Group(kind, way.names, (zero_route(len(way.names), kind, min(self._manifests)),))
        if way.share is GradientShare.JOINED:
            is_mean = self._policy.accumulated is Accumulated.MEAN
            joined = (
                joined_route(way.names, part, way.group, self._manifests, self._lost, is_mean=is_mean)
                for part in way.parts
            )
            return Group(kind, way.names, tuple(joined))
        routes = []
        for part, rank in zip(way.parts, chosen):
            if rank not in way.group.ranks:
                rank = next((other for other in part.placement.holders(part.piece) if other in way.group.ranks), None)
            if rank is None:
                error = missing_part_error(way.names[0], part, self._rank, self._manifests, self._lost)
                if not self._policy.allows_holes:
                    raise error
                self._holes.update(dict.fromkeys(way.names, error))
                return Group(kind, way.names, ())
            tensors = self._manifests[rank].tensors
            numbers = array("I", map(tensors.index_by_name.__getitem__, way.names))
            routes.append(ReadGroup(rank, part.box, part.region, tensors, numbers))
        return Group(kind, way.names, tuple(routes))

    def _apart(self) -> Iterator[ReplicaGroup]:
        """Yield the copies that are added up, and so must not be the same, unless the user is trusted."""
        if self._policy.accumulated is Accumulated.SUM and self._policy.replicas is not Replicas.ANY:
            for way in self._ways.values():
                if way.share is GradientShare.JOINED:
                    yield from apart(way.names, way.parts, way.group.dtype.itemsize_bytes)

    def _shared(self) -> Iterator[SharedFact]:
        """Yield the tensors that this stage of the target shares with others: all ranks of them must have the same."""
        if self._target.stages == 1:
            return
        placed = (*self._target.parameters.values(), *((rule,) for _, rule in self._target.rules))
        shared = {_stages(placements) for placements in (*placed, (everywhere(self._target),))}
        by_stages: dict[tuple[int, ...], dict[str, SourceGroup]] = {stages: {} for stages in sorted(shared)}
        for name, way in self._wanted.items():
            if (way.group.listed or self._layouts.lists(name)) and not is_moment(name, way.group.shape):
                by_stages[_stages(self._layouts.placements(name) or (way.layout.placement,))][name] = way.group
        for stages, tensors in by_stages.items():
            if len(stages) > 1 and self._stage in stages:
                yield from shared_tensors(stages, tensors, self._manifests)

    def _replaced(self, groups: Sequence[Group]) -> tuple[UnusableShard, ...]:
        """Return the shards that cannot be used, with the ranks from which their data is taken instead.

        Those are the ranks that give the parts for which the lost shard is the preferred holder; if there is no such
        part, all parts that it holds.
        """
        nearest: dict[int, set[int]] = {rank: set() for rank in sorted(self._lost)}
        others: dict[int, set[int]] = {rank: set() for rank in nearest}
        for way, group in zip(self._ways.values(), groups):
            for part, route in zip(way.parts, group.routes):
                first = part.placement.holder(part.piece, self._home)
                for rank, instead in nearest.items():
                    if rank == first:
                        instead.add(route.source_rank)
                    elif way.group.listed and rank in part.placement.holders(part.piece):
                        others[rank].add(route.source_rank)
        return tuple(
            self._lost[rank]._replace(taken_from=tuple(sorted(nearest[rank] or others[rank]))) for rank in nearest
        )

    def _not_its_own(self) -> Iterator[str]:
        """Yield a warning if this rank's own values, which no strategy places, are taken from another rank's shard."""
        loose = [
            name for name, way in self._wanted.items() if not way.group.listed and not is_moment(name, way.group.shape)
        ]
        if loose:
            names = ", ".join(map(repr, loose[:3])) + (" ..." if len(loose) > 3 else "")
            taken_from = self._any_rank(self._wanted[loose[0]].group)
            yield (
                f"target rank {self._rank} has {names} of {named([taken_from])}, not its own: no strategy"
                " says who else holds the same, and its own shard cannot be used"
            )

    def _any_rank(self, group: SourceGroup) -> int:
        return self._home if self._home in group.ranks else group.ranks[0]

    def _absent(self) -> tuple[str, ...]:
        """Return the listed parameters that this shard should have and that were never saved, as opened shards show.

        Raises CoverageError if a shard that may hold one was not opened or is damaged, or if `strict`; StrategyError if
        the checkpoint has no parameter at all that the target strategy lists.
        """
        absent = []
        for name in self._listed_here:
            if name in self._tensors or not (name in self._target.parameters or name in self._source.parameters):
                continue  # a name that only a rule gives need not be in the checkpoint
            origins = find_or_follow(self._source, name, lambda _: True)
            stages = {stage for origin in origins for stage in origin.stages}
            if origins and not any(self._source.stage_of(rank) in stages for rank in self._manifests):
                raise stage_missing(name, origins, self._source, self._manifests, self._lost)
            if self._lost:
                wanted = [(way.names, way.group) for way in self._ways.values()]
                require_never_saved(name, origins, self._source, self._target, wanted, self._manifests, self._lost)
            if name in self._target.parameters:
                absent.append(name)
        if absent and self._policy.strict:
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
                got=", ".join(islice(self._tensors.names, 3)) or "no tensors",
                where=self._target.origin,
                remedy="check that checkpoint and strategy belong to the same network",
            )
        return tuple(absent)


def _stages(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(sorted({stage for placement in placements for stage in placement.stages}))
