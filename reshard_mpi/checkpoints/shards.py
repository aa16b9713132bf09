"""Which source shards are opened for a target: those it needs and, in place of lost ones, others that hold the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError, StrategyError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.disputes import disputes, witnesses
from reshard_mpi.planning.losses import Lost
from reshard_mpi.planning.parameters import Unlisted, find_or_follow, listed_names
from reshard_mpi.planning.ranks import needed_ranks, wants
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.planning.target import ShardPlanner
from reshard_mpi.sharding.patterns import Pattern
from reshard_mpi.sharding.placement import Placement, Strategy

# A shard that lacks a parameter is no sign that the others do (see `_other_holders`), but strategies also list what is
# never saved, and opening a thousand shards to be sure of that would take minutes.
_MAX_LOOKED_INTO = 64
# Where shards contradict each other or a strategy, so many others of each stage are asked.
_MAX_WITNESSES = 16


class Opened(NamedTuple):
    """The shards opened for a target, and what plans it from them."""

    manifests: dict[int, Manifest]
    planner: ShardPlanner


class _Candidates:
    """The ranks whose shards may be chosen for a target. lost: those whose shards may not, as far as is known.

    At first every rank may, so nothing is opened only to see whether it could be read. Once anything is lost, each is
    looked into before it is chosen.
    """

    def __init__(self, source: SourceCheckpoint) -> None:
        self.lost: dict[int, Lost] = {}
        self._source = source
        self._trusting = True

    def begin_anew(self) -> None:
        """From now on trust no shard that has not been looked into, if any has been lost."""
        self._trusting = not self.lost

    def __contains__(self, rank: object) -> bool:
        assert isinstance(rank, int)
        if self._trusting:
            return rank in self._source or not self._source.files.picked
        return self.open(rank) is not None

    def open(self, rank: int) -> Manifest | None:
        """Return what the shard of `rank` holds; None if it is lost, as one is that cannot be read."""
        if rank in self.lost:  # one that can be read is lost too where the others contradict it
            return None
        manifest = self._source.find(rank) if rank in self._source else None
        if manifest is None:
            self.lost[rank] = self._source.lost(rank)
        return manifest


@dataclass(slots=True)
class ShardOpener:
    """Opens source shards for the targets of a conversion.

    What is opened for a target, and so where it is taken from, follows from the target and the files alone, not from
    what has been met for other targets: every process, and every division of a run, finds the same.
    """

    source: SourceCheckpoint
    target: Strategy
    unlisted: Unlisted
    strict: bool
    replicas: Replicas
    _never_saved: dict[tuple[int, ...], set[str]] = field(default_factory=dict)

    def open(self, target_rank: int) -> Opened:
        """Open the shards that a target needs.

        Raises a ReshardError for what contradicts itself; holes are left for the planner to report.
        """
        self._require_stages_of_rules(target_rank)
        candidates = _Candidates(self.source)
        while True:
            known = len(candidates.lost)
            opened = self._try_to_open(target_rank, candidates)
            if opened is not None:
                return opened
            if len(candidates.lost) == known:
                raise RuntimeError("shards are chosen again though none has been lost")
            candidates.begin_anew()

    def _try_to_open(self, target_rank: int, candidates: _Candidates) -> Opened | None:
        """Open the shards that a target needs; None if one of them turns out to be lost."""
        source, lost = self.source.strategy, candidates.lost
        names = self.source.rule_names()
        ranks = set(
            needed_ranks(source, self.target, target_rank, names=names, available=candidates, unlisted=self.unlisted)
        )
        if (
            source.world_size == self.target.world_size
            and target_rank not in lost
            and not self._is_unasked(target_rank)
        ):
            ranks.add(target_rank)  # values that no strategy lists and each rank has for itself (random state)
        manifests: dict[int, Manifest] = {}
        self._add(manifests, ranks, candidates)
        if not manifests.keys() >= ranks:
            self._require_any_left(target_rank, ranks, lost)
            return None
        if self._lists_unseen(target_rank, manifests):
            seen = {source.stage_of(rank) for rank in manifests}
            self._add(
                manifests, (r for r in self._stage_ranks(candidates) if source.stage_of(r) not in seen), candidates
            )
        self._add(manifests, self._holders_of_unseen(target_rank, manifests), candidates)
        try:
            planner = self._planner(target_rank, manifests, lost)
            while found := self._other_holders(planner, manifests, candidates):
                self._add(manifests, found, candidates)
                planner = self._planner(target_rank, manifests, lost)
        except (DisagreementError, LayoutError, StrategyError):
            # It is the shards that are wrong, and no strategy, if others contradict them.
            outvoted = self._outvoted(manifests, lost)
            if not outvoted.keys() & manifests.keys():
                raise
            lost.update(outvoted)
            return None
        return Opened(manifests, planner)

    def _require_any_left(self, target_rank: int, ranks: Collection[int], lost: Mapping[int, Lost]) -> None:
        """Raise CoverageError if all that is left to choose are shards that are known to be lost."""
        if lost.keys() >= set(ranks) and lost.keys() >= self.source.files.by_rank.keys():
            raise CoverageError(
                f"no source shard can be used for target rank {target_rank}",
                expected="one or more whose tensors the others do not contradict",
                got="; ".join(map(str, islice(lost.values(), 4))) + ("; ..." if len(lost) > 4 else ""),
                where=self.source.files.path,
                remedy="use shards of one and the same checkpoint; reshard-mpi inspect shows what they hold",
            )

    def _stage_ranks(self, candidates: _Candidates) -> Iterator[int]:
        """Yield a rank of each stage that has a shard which can be used."""
        for stage, first in self.source.stage_ranks().items():
            size = self.source.strategy.stage_size
            others = (rank for rank in range(stage * size, (stage + 1) * size) if rank in self.source)
            yield from islice((rank for rank in chain([first], others) if candidates.open(rank) is not None), 1)

    def _is_unasked(self, rank: int) -> bool:
        return self.source.files.picked and rank not in self.source

    def _add(self, manifests: dict[int, Manifest], ranks: Iterable[int], candidates: _Candidates) -> None:
        """Open shards, as far as they can be read, and keep all in the order of their ranks."""
        opened = {rank: candidates.open(rank) for rank in sorted(ranks) if rank not in manifests}
        manifests.update((rank, manifest) for rank, manifest in opened.items() if manifest is not None)
        for rank in sorted(manifests):
            manifests[rank] = manifests.pop(rank)

    def _planner(self, target_rank: int, manifests: dict[int, Manifest], lost: dict[int, Lost]) -> ShardPlanner:
        return ShardPlanner(
            self.source.strategy,
            self.target,
            target_rank,
            manifests,
            lost=lost,
            unlisted=self.unlisted,
            strict=self.strict,
            replicas=self.replicas,
        )

    def _other_holders(
        self, planner: ShardPlanner, manifests: dict[int, Manifest], candidates: _Candidates
    ) -> Collection[int]:
        """Return ranks not opened yet that hold what the opened shards lack.

        Shards saved without redundancy hold each parameter on one of the ranks that have it alike.
        """
        found: set[int] = set()
        for holders, names in planner.lacking().items():
            if not found.intersection(holders):  # else that one may hold these too: looked at again with it
                others = [rank for rank in holders if rank in self.source and rank not in manifests]
                found.update(self._one_with(names, holders, others[:_MAX_LOOKED_INTO], candidates))
        if found:
            return found
        # A part without elements may be saved with any other, and a name that only other parts have is a hole.
        for origins, names in planner.unseen().items():
            first = tuple(self._first_of_stages(origins))
            others = [rank for rank in first if rank not in manifests]
            found.update(self._one_with(names, first, others, candidates))
        return found

    def _one_with(
        self, names: Iterable[str], holders: tuple[int, ...], others: Iterable[int], candidates: _Candidates
    ) -> Iterator[int]:
        """Yield the first of `others` that holds one of the names; with none, these `holders` never saved them."""
        never_saved = self._never_saved.setdefault(holders, set())
        unseen = [name for name in names if name not in never_saved]
        damaged = False
        for rank in others if unseen else ():
            manifest = candidates.open(rank)
            if manifest is None:
                damaged = True
            elif any(name in manifest.tensors for name in unseen):
                yield rank
                return
        if not damaged:
            never_saved.update(unseen)

    def _first_of_stages(self, origins: Iterable[Placement]) -> Iterator[int]:
        """Yield the first ranks of each stage that holds any of these placements, as far as they have shards."""
        size = self.source.strategy.stage_size
        for stage in sorted({stage for origin in origins for stage in origin.stages}):
            ranks = range(stage * size, (stage + 1) * size)
            yield from islice((rank for rank in ranks if rank in self.source), _MAX_WITNESSES)

    def _outvoted(self, manifests: Mapping[int, Manifest], lost: Collection[int]) -> dict[int, Lost]:
        """Return the shards that contradict in shape or type what most of those say that hold the tensor.

        Others are asked for the tensors in which those opened contradict each other; where they do not, for all, since
        the one that is wrong may be the only one opened.
        """
        source = self.source.strategy
        every = tuple(dict.fromkeys(name for manifest in manifests.values() for name in manifest.tensors))
        disputed = tuple(dispute.name for dispute in disputes(source, manifests, every))
        for names in filter(None, (disputed, every)):
            asked = dict(manifests)
            for rank in witnesses(source, names, {*manifests, *lost}, self.source.files.by_rank, _MAX_WITNESSES):
                witness = self.source.find(rank)
                if witness is not None:
                    asked[rank] = witness
            found: dict[int, Lost] = {}
            for dispute in disputes(source, asked, names):
                for rank, problem in dispute.outvoted().items():
                    found.setdefault(rank, Lost(rank, asked[rank].path, problem))
            if found:
                return found
        return {}

    def _lists_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> bool:
        """Tell whether the target lists names that only shards of stages not opened yet could hold."""
        stage = self.target.stage_of(target_rank)
        return self.source.strategy.stages > 1 and any(
            not any(name in manifest.tensors for manifest in manifests.values())
            and any(stage in placement.stages for placement in placements)
            and not find_or_follow(self.source.strategy, name, lambda _: True)
            for name, placements in self.target.parameters.items()
        )

    def _holders_of_unseen(self, target_rank: int, manifests: dict[int, Manifest]) -> set[int]:
        """Return who has the names that the target needs and no opened shard has, as far as only rules place them."""
        seen = {name for manifest in manifests.values() for name in manifest.tensors}
        return {
            next(iter(ranks.values()))
            for name, ranks in self.source.rule_names().items()
            if name not in seen and wants(self.source.strategy, self.target, target_rank, name, self.unlisted, seen)
        }

    def _require_stages_of_rules(self, target_rank: int) -> None:
        """Raise CoverageError if the target may hold what, by rules, stages without any sound shard have."""
        source = self.source.strategy
        for glob, placement in source.rules:
            there = self.source.stage_ranks()
            missing = [stage for stage in placement.stages if stage not in there]
            if not missing or glob in self.source.rule_names():  # by this name it may well be in all of its stages
                continue
            names = [glob, *filter(Pattern(glob).matches, self.target.parameters)]
            holding = [placement.stages for name in names for placement in self.target.find(name)]
            if holding and not any(self.target.stage_of(target_rank) in stages for stages in holding):
                continue
            damaged = (self.source.lost(r) for r in self.source.files.by_rank if source.stage_of(r) in missing)
            raise CoverageError(
                f"no shard that should hold {glob!r} is there",
                expected=f"a shard of stage {missing[0]} of the source",
                got="; ".join([f"shards of stage {', '.join(map(str, there))}", *map(str, islice(damaged, 4))]),
                where=self.source.files.path,
                remedy="restore the shards of that stage",
            )

    def knows(self, name: str) -> bool:
        """Tell whether a tensor that a shard holds is looked for in the shards of all targets, whoever holds it."""
        strategy = self.source.strategy
        return not strategy.rules or name in self.source.rule_names() or name in listed_names(strategy)
