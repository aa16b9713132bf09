"""Open the shards of an opened source that one target needs, others in place of lost ones (`ShardOpener`).

A target opens the shards that the strategies say it needs. What no strategy lists is taken from those; so a tensor that
one rank alone has saved, an expert or a part of a sharded optimizer, would be lost without a word if its rank were not
among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from itertools import chain, islice
from typing import NamedTuple

from reshard_mpi.checkpoints.opening import require_recorded_cut
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError, ReshardError, StrategyError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_choice import needed_ranks, wants
from reshard_mpi.planning.source_flaws import UnusableShard, errors_text
from reshard_mpi.planning.source_tensors import SourceTensors
from reshard_mpi.planning.target_tensors import Policy, TargetTensors
from reshard_mpi.sharding.layout import UnknownLengthError
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Pattern, Strategy, Unlisted, find_or_follow, is_dropped, listed_names

# The first ranks of a stage that are looked at, and as many of the last ones, which hold uneven parts.
_LOOKED_AT = 8


def require_consistent_source(source: SourceCheckpoint) -> None:
    """Raise a ReshardError if shards contradict the source's strategy or each other.

    The first and the last shards of each stage are looked at, of these the ones that can be read. A target alone is
    planned from few shards: where slices are uneven and the strategy does not say so, the first shard fits it by
    itself, and the tensor comes out with a length that no target strategy may be able to cut.
    """
    strategy = source.strategy
    for stage in range(strategy.stages):
        ranks = strategy.ranks_of(stage)
        chosen = dict.fromkeys((*ranks[:_LOOKED_AT], *ranks[-_LOOKED_AT:]))
        manifest_or_none = {rank: source.find(rank) for rank in chosen if rank in source}
        manifests = {rank: manifest for rank, manifest in manifest_or_none.items() if manifest is not None}
        lost = {rank: source.lost(rank) for rank in chosen if rank not in manifests}
        tensors = SourceTensors(strategy, manifests, lost)
        for name in tensors.names:
            try:
                tensors.group(name)
            except (UnknownLengthError, CoverageError) as error:
                if len(chosen) == len(ranks) and not source.files.picked:  # else others may hold the slices
                    error.where = error.where or source.location_text
                    raise
            except (DisagreementError, LayoutError) as error:
                error.where += f"; {source.location_text}" if source.missing else ""
                raise


_MAX_NAMED = 5


class ShardShare(NamedTuple):
    """Which of the shards are looked into: share `number` of `shares` that together are all of them."""

    number: int
    shares: int

    def ranks(self, world_size: int) -> range:
        """Return the ranks of this share."""
        first, end = (-(-number * world_size // self.shares) for number in (self.number, self.number + 1))
        return range(first, end)


def left_behind(
    source: SourceCheckpoint, taken: Set[str], share: ShardShare, is_wanted: Callable[[str], bool]
) -> dict[str, int]:
    """Return the tensors of a share of the shards that a target does not take, each with a rank that holds it.

    Damaged shards are passed over.

    Args:
        taken: the tensors of the target.
        is_wanted: tells whether some target is to have a tensor.
    """
    only_there: dict[str, int] = {}
    for rank in share.ranks(source.strategy.world_size):
        shard = source.find(rank) if rank in source else None
        if shard is not None and not shard.tensors.keys() <= taken:
            for name in shard.tensors:
                if name not in taken and is_wanted(name):
                    only_there.setdefault(name, rank)
    return only_there


def left_behind_error(names: Iterable[str], only_there: dict[str, int], source: SourceCheckpoint) -> StrategyError:
    """Return the error for tensors that no target would get. It is about listed ones, if there are any."""
    all_lost = list(names)
    lost = [name for name in all_lost if name in source.strategy.parameters] or all_lost
    more = f", and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
    shown = ", ".join(f"{name!r} of rank {only_there[name]}" for name in islice(lost, _MAX_NAMED)) + more
    first = lost[0]
    if first in source.strategy.parameters:
        placements, rank = source.strategy.find(first), only_there[first]
        stages = sorted({stage for placement in placements for stage in placement.stages})
        if source.strategy.of_rank(placements, rank) is None:
            return StrategyError(
                "the source strategy lists a tensor for another stage than that of the ranks which hold it",
                expected=f"{first!r} in shards of stage {', '.join(map(str, stages))}",
                got=f"{shown}: stage {source.strategy.stage_of(rank)}",
                where=source.location_text,
                remedy="give the strategy that the checkpoint was saved with, its stages in the order of the ranks",
            )
        return StrategyError(
            "no target would get a tensor that few of the ranks hold which the source strategy lists for it",
            expected=f"it in one of the first {_MAX_LOOKED_INTO} of these ranks, or shards that hold different tensors",
            got=shown,
            where=source.location_text,
            remedy="exchange the shards of that rank and of one of the first that are to hold the same slices",
        )
    return StrategyError(
        "no target would get a tensor that only some ranks hold, since no strategy says who holds it",
        expected="a strategy that lists what differs between ranks, or one by which their shards are read",
        got=shown,
        where=source.location_text,
        remedy="list it in the source strategy (a TOML rule '*' takes all there is), or leave it out: with --exclude,"
        " or with --unlisted drop for all that is not listed",
    )


# If a shard lacks a parameter, others may still hold it (see `_other_holders`). But strategies also list parameters
# that are never saved, and to open a thousand shards to be sure of that would take minutes. Where as many shards as
# this hold the same names, the others are taken to hold these too.
_MAX_LOOKED_INTO = 64
# Shards of each stage that are asked for a name that no opened shard holds.
_MAX_ASKED = 16


class _CandidateRanks:
    """The ranks whose shards may be chosen for a target. lost: ranks known to be unusable, by rank.

    At first every shard is trusted, so that none is opened only to see whether it can be read. Once one is lost, every
    other is opened before it counts as a candidate.
    """

    def __init__(self, source: SourceCheckpoint) -> None:
        self.lost: dict[int, UnusableShard] = {}
        self._source = source
        self._trusting = True

    def distrust_unopened(self) -> None:
        """After the first loss, count a shard as available only once it has been opened."""
        self._trusting = not self.lost

    def __contains__(self, rank: object) -> bool:
        assert isinstance(rank, int)
        if self._trusting:
            return rank in self._source or not self._source.files.picked
        return self.open(rank) is not None

    def open(self, rank: int) -> Manifest | None:
        """Return the manifest of a rank's shard; None if it is lost. One that cannot be read becomes lost."""
        manifest = self._source.find(rank) if rank in self._source else None
        if manifest is None:
            self.lost[rank] = self._source.lost(rank)
        return manifest


class ShardOpener:
    """Opens source shards for the targets of a conversion.

    Which shards are opened depends on the target and the files alone, not on other targets opened before. So all
    processes, however a run is divided, take a target's data from the same shards.
    """

    def __init__(self, source: SourceCheckpoint, target: Strategy, policy: Policy) -> None:
        self.source = source
        self.target = target
        self.policy = policy
        self._never_saved: dict[tuple[int, ...], set[str]] = {}
        self._asked_targets: set[int] = set()
        self._others_have: set[str] | None = set()  # None: a target cannot be opened, so what it has is not known
        self._names_of: dict[int, frozenset[str]] = {}  # the tensors of targets that write what no strategy lists

    def open(self, target_rank: int) -> TargetTensors:
        """Open the shards that a target needs.

        Raises a ReshardError if shards contradict each other or a strategy, the source's before the target's. Parts
        that no shard holds are reported later, by `plan_target`.
        """
        try:
            opened = self._opened(target_rank)
            require_recorded_cut(self.source, opened.tensors, opened.class_by_name)
            return opened
        except (DisagreementError, LayoutError, StrategyError):
            require_consistent_source(self.source)
            raise

    def require_none_left_behind(
        self, target_rank: int, taken: Set[str], share: ShardShare, is_asked: Callable[[str], bool]
    ) -> None:
        """Raise StrategyError if a share of the shards holds tensors that no target would get.

        Args:
            taken: the tensors of this target.
            is_asked: tells whether a tensor of the source is asked for at all.
        """

        if self._others_have is None:
            return
        drops = self.policy.unlisted is Unlisted.DROP

        def is_wanted(name: str) -> bool:
            return is_asked(name) and not (drops and is_dropped(self.target, name, taken))

        only_there = left_behind(self.source, taken, share, is_wanted)
        lost = only_there.keys() - self._others_have
        for other in self._nearest_targets(target_rank) if lost else ():
            if other not in self._asked_targets:
                self._asked_targets.add(other)
                try:
                    self._others_have.update(self.open(other).names)
                except ReshardError:  # it is said of that target, and nothing is committed without it
                    self._others_have = None
                    return
                lost -= self._others_have
                if not lost:
                    break
        if lost:
            raise left_behind_error(sorted(lost), only_there, self.source)

    def require_written(self, opened: TargetTensors) -> None:
        """Raise StrategyError if another target is to write a tensor that no strategy lists, and does not have it.

        Args:
            opened: the shards of one target of a checkpoint whose pieces are written once.
        """
        lost: list[str] = []
        for name, rank in opened.writers_of_unlisted().items():
            if rank not in self._names_of:
                try:
                    self._names_of[rank] = frozenset(self.open(rank).names)
                except ReshardError:
                    return  # it is said of that target, and nothing is committed without it
            if name not in self._names_of[rank]:
                lost.append(name)
        if lost:
            shards = opened.manifests.items()
            only_there = {name: rank for rank, shard in shards for name in lost if name in shard.tensors}
            raise left_behind_error(lost, only_there, self.source)

    def _nearest_targets(self, target_rank: int) -> Iterable[int]:
        """Return all other targets, first one of each stage."""
        size = self.target.stage_size
        alike = (stage * size + target_rank % size for stage in range(self.target.stages))
        return (rank for rank in dict.fromkeys((*alike, *range(self.target.world_size))) if rank != target_rank)

    def _opened(self, target_rank: int) -> TargetTensors:
        self._require_stages_of_rules(target_rank)
        candidates = _CandidateRanks(self.source)
        while True:
            lost_before = len(candidates.lost)
            opened = self._try_to_open(target_rank, candidates)
            if opened is not None:
                return opened
            if len(candidates.lost) == lost_before:
                raise RuntimeError("shards are chosen again though none has been lost")
            candidates.distrust_unopened()

    def _try_to_open(self, target_rank: int, candidates: _CandidateRanks) -> TargetTensors | None:
        """Open the shards that a target needs; None if one of them turns out to be lost."""
        source, lost = self.source.strategy, candidates.lost
        names = self.source.rule_names()
        ranks = set(
            needed_ranks(
                source, self.target, target_rank, names=names, available=candidates, unlisted=self.policy.unlisted
            )
        )
        is_asked = target_rank in self.source or not self.source.files.picked
        if source.world_size == self.target.world_size and target_rank not in lost and is_asked:
            ranks.add(target_rank)  # values that no strategy lists and each rank has for itself (random state)
        manifests: dict[int, Manifest] = {}
        self._add(manifests, ranks, candidates)
        if not manifests.keys() >= ranks:
            self._require_any_left(target_rank, ranks, lost)
            return None
        if self._lists_unseen(target_rank, manifests):
            seen = {source.stage_of(rank) for rank in manifests}
            unseen = (rank for rank in self._stage_ranks(candidates) if source.stage_of(rank) not in seen)
            self._add(manifests, unseen, candidates)
        self._add(manifests, self._holders_of_unseen(target_rank, manifests), candidates)
        tensors = self._tensors(target_rank, manifests, candidates)
        while holders := (
            tensors.joined_ranks() - manifests.keys() - lost.keys()
            or self._other_holders(tensors, manifests, candidates)
        ):
            self._add(manifests, holders, candidates)
            tensors = self._tensors(target_rank, manifests, candidates)
        return tensors

    def _require_any_left(self, target_rank: int, ranks: Collection[int], lost: Mapping[int, UnusableShard]) -> None:
        """Raise CoverageError if all shards that are left to choose from are known to be lost."""
        if lost.keys() >= set(ranks) and lost.keys() >= self.source.files.by_rank.keys():
            raise CoverageError(
                f"no source shard can be used for target rank {target_rank}",
                expected="one or more that can be read",
                got=errors_text(tuple(lost.values())),
                where=self.source.files.path,
                remedy="restore the shards; reshard-mpi inspect shows what is wrong with each",
            )

    def _stage_ranks(self, candidates: _CandidateRanks) -> Iterator[int]:
        """Yield one rank with a usable shard for each stage that has one."""
        for stage, first in self.source.stage_ranks().items():
            others = (rank for rank in self.source.strategy.ranks_of(stage) if rank in self.source)
            yield from islice((rank for rank in chain([first], others) if candidates.open(rank) is not None), 1)

    def _add(self, manifests: dict[int, Manifest], ranks: Iterable[int], candidates: _CandidateRanks) -> None:
        """Open those shards that are not lost and add them to `manifests`, which stays in the order of ranks."""
        opened = {rank: candidates.open(rank) for rank in sorted(ranks) if rank not in manifests}
        manifests.update((rank, manifest) for rank, manifest in opened.items() if manifest is not None)
        for rank in sorted(manifests):
            manifests[rank] = manifests.pop(rank)

    def _tensors(self, target_rank: int, manifests: dict[int, Manifest], candidates: _CandidateRanks) -> TargetTensors:
        """Return the tensors of the target; open shards as well whose slices tell how long they are, if need be."""
        source, lost = self.source.strategy, candidates.lost
        while True:
            try:
                return TargetTensors(source, self.target, target_rank, manifests, lost, self.policy)
            except (UnknownLengthError, CoverageError):
                missing = SourceTensors(source, manifests, lost).missing_slices()
                available = ([rank for rank in holders if rank in candidates] for holders in missing)
                if not (chosen := {ranks[0] for ranks in available if ranks} - manifests.keys() - lost.keys()):
                    raise
                self._add(manifests, chosen, candidates)

    def _other_holders(
        self, tensors: TargetTensors, manifests: dict[int, Manifest], candidates: _CandidateRanks
    ) -> Collection[int]:
        """Return ranks that are not opened yet and hold names that the opened shards lack; empty if there are none.

        There may be some if shards were saved without redundancy: then only one of several ranks with equal copies has
        saved each parameter.
        """
        chosen: set[int] = set()
        for holders, names in tensors.lacking().items():
            if not chosen.intersection(holders):  # a chosen holder may hold these too; the next call shows it
                opened = [manifests[rank] for rank in holders if rank in manifests]
                others = (rank for rank in holders if rank in self.source and rank not in manifests)
                chosen.update(self._first_with(names, holders, others, candidates, opened))
        if chosen:
            return chosen
        # A name that only ranks with other parts hold must be found too: if the needed part has elements, it is a hole.
        for origins, names in tensors.unseen().items():
            first = tuple(self._first_of_stages(origins))
            unopened = (rank for rank in first if rank not in manifests)
            chosen.update(self._first_with(names, first, unopened, candidates))
        return chosen

    def _first_with(
        self,
        names: Iterable[str],
        holders: tuple[int, ...],
        others: Iterable[int],
        candidates: _CandidateRanks,
        opened: Iterable[Manifest] = (),
    ) -> Iterator[int]:
        """Yield the first of `others` that holds one of the names.

        If there is none, and no damaged shard among them, it is noted that these `holders` never saved the names.

        Args:
            opened: other shards of the holders. Where these and the first that are looked into hold the same names,
                among them names that the source's strategy lists, no more than `_MAX_LOOKED_INTO` are looked into.
        """
        never_saved = self._never_saved.setdefault(holders, set())
        unseen = [name for name in names if name not in never_saved]
        damaged, seen = False, {frozenset(manifest.tensors) for manifest in opened}
        listed = self.source.strategy.parameters.keys()
        for number, rank in enumerate(others if unseen else ()):
            if number >= _MAX_LOOKED_INTO and len(seen) == 1 and not any(map(listed.isdisjoint, seen)):
                break
            manifest = candidates.open(rank)
            if manifest is None:
                damaged = True
            elif any(name in manifest.tensors for name in unseen):
                yield rank
                return
            elif len(seen) < 2:
                seen.add(frozenset(manifest.tensors))
        if not damaged:
            never_saved.update(unseen)

    def _first_of_stages(self, origins: Iterable[Placement]) -> Iterator[int]:
        """Yield the first ranks that have shards, of each stage in which one of these placements is."""
        for stage in sorted({stage for origin in origins for stage in origin.stages}):
            ranks = self.source.strategy.ranks_of(stage)
            yield from islice((rank for rank in ranks if rank in self.source), _MAX_ASKED)

    def _lists_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> bool:
        """Tell whether the target lists names that no opened shard holds and the source strategy does not place.

        Any stage may hold these.
        """
        return self.source.strategy.stages > 1 and any(
            not any(name in manifest.tensors for manifest in manifests.values())
            and self.target.of_rank(placements, target_rank) is not None
            and not find_or_follow(self.source.strategy, name, lambda _: True)
            for name, placements in self.target.parameters.items()
        )

    def _holders_of_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> set[int]:
        """Return ranks that hold names which the target needs, only rules place, and no opened shard holds."""
        seen = {name for manifest in manifests.values() for name in manifest.tensors}
        return {
            next(iter(ranks.values()))
            for name, ranks in self.source.rule_names().items()
            if name not in seen
            and wants(self.source.strategy, self.target, target_rank, name, self.policy.unlisted, seen)
        }

    def _require_stages_of_rules(self, target_rank: int) -> None:
        """Raise CoverageError if the target may need tensors that rules place in a stage without any sound shard."""
        source = self.source.strategy
        for glob, placement in source.rules:
            present = self.source.stage_ranks()
            missing = [stage for stage in placement.stages if stage not in present]
            if not missing or glob in self.source.rule_names():  # this one tensor may be in all stages of its rule
                continue
            names = [glob, *filter(Pattern(glob).matches, self.target.parameters)]
            holding = [placement for name in names for placement in self.target.find(name)]
            if holding and self.target.of_rank(holding, target_rank) is None:
                continue
            damaged = (self.source.lost(rank) for rank in self.source.files.by_rank if source.stage_of(rank) in missing)
            raise CoverageError(
                f"no shard that should hold {glob!r} is there",
                expected=f"a shard of stage {missing[0]} of the source",
                got="; ".join([f"shards of stage {', '.join(map(str, present))}", *map(str, islice(damaged, 4))]),
                where=self.source.files.path,
                remedy="restore the shards of that stage",
            )

    def knows(self, name: str) -> bool:
        """Tell whether targets find the tensor of this name whichever shards hold it."""
        strategy = self.source.strategy
        return not strategy.rules or name in self.source.rule_names() or name in listed_names(strategy)
