"""Present a source as maps make it, for `Planner`: one full checkpoint of one rank (`MappedCheckpoint`).

The checkpoint is planned as one full one, in its own names and by its own strategy, with all the checks that belong to
that (`source_maps`). Of the shards' values only those are read that a map says are equal or padding, or that lie once
in a file which stands for two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import ShardStats, SourceCheckpoint
from reshard_mpi.engine.first_difference import first_difference_of_tensors, value_at
from reshard_mpi.engine.open_files import Files
from reshard_mpi.errors import DisagreementError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.protocol import OnBytes, Packed, Part, SameParts
from reshard_mpi.mapping.companions import notes_on_dequantized
from reshard_mpi.mapping.result import ConstantTensor, DerivedTensor, parts_of
from reshard_mpi.mapping.selection import is_chosen
from reshard_mpi.planning.gradient_joining import gradients_like, notes_on
from reshard_mpi.planning.made_tensors import MappedTensors
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.rank_plan import PlannedTensors, RankPlan, TensorPlan
from reshard_mpi.planning.shared_facts import OWN
from reshard_mpi.planning.source_flaws import MissingRanks, UnusableShard
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.request_maps import TensorMap, require_equal, require_padding, target_warnings
from reshard_mpi.runs.source_maps import MapsOutcome, SourceMaps, notes_of_nest, notes_of_tensors, origins
from reshard_mpi.sharding.strategy import Strategy, Unlisted, unsharded

if TYPE_CHECKING:
    from reshard_mpi.runs.maps_and_packing import Packing


def planner_through(tensor_map: TensorMap, planner: Planner, packing: Packing | None = None) -> Planner:
    """Return a planner of targets from the source as a map makes it.

    Args:
        packing: what packs the map's result into files; the targets are these then.
    """
    source = planner.source
    policy = planner.policy._replace(unlisted=Unlisted.FOLLOW, allows_holes=True)
    original = Planner(source, unsharded(), policy)
    is_rank_by_rank = planner.target.world_size == source.strategy.world_size > 1
    maps = SourceMaps(original, tensor_map, packing, planner.is_wanted, is_rank_by_rank)
    mapped = MappedCheckpoint(source.files, unsharded(source.files.path), maps)
    return planner.changed(mapped=mapped)


class MappedCheckpoint(SourceCheckpoint):
    """The result of maps as a checkpoint of one rank, 0. It has the source's files."""

    def __init__(self, files: ShardFiles, strategy: Strategy, maps: SourceMaps) -> None:
        super().__init__(files, strategy)
        self.maps = maps
        self.original = maps.original
        self._made: MapsOutcome | None = None
        self._is_checked = False
        self._recipes: Mapping[str, DerivedTensor | ConstantTensor] | None = None

    def of(self, source: SourceCheckpoint) -> MappedCheckpoint:
        """Return the same result of the maps of `source`: the same files, opened anew."""
        maps = self.maps._replace(original=self.original.changed(source=source))
        return MappedCheckpoint(self.files, self.strategy, maps)

    @property
    def missing(self) -> MissingRanks | None:
        return self.original.source.missing

    def __contains__(self, rank: object) -> bool:
        return rank == 0

    def manifest(self, rank: int) -> Manifest:
        return self._opened().manifest

    def find(self, rank: int) -> Manifest | None:
        return self._opened().manifest

    def lost(self, rank: int) -> UnusableShard:
        return self.original.source.lost(rank)

    @property
    def stats(self) -> ShardStats:
        """The sizes of shards and of the map's result. A box of an equation takes as much memory as a tensor."""
        own, outcome = self.original.source.stats, self._made
        if outcome is None:
            return own
        first, *others = (step.mapped.made for step in outcome.steps)
        assemblies = {
            id(tensor.assembly): tensor.assembly for tensors in (first, *others, outcome.made) for tensor in tensors
        }
        boxes = sum(len(each.pairs) + len(each.zeros) for each in assemblies.values())
        return own._replace(tensors=max(own.tensors, len(first)) + sum(map(len, others)) + boxes)

    def forget(self) -> None:
        self.original.forget()
        self._made = self._recipes = None

    def placed(self, target: Strategy, *, is_global: bool) -> Strategy:
        outcome, source = self._opened(), self.original.source
        suspect = source.looks_quantized
        for tensor in outcome.made if suspect and not is_global else ():
            if suspect in tensor.sources.values() and any(each.is_cut for each in target.find(tensor.name)):
                raise source.unknown_scheme("a strategy that cuts it")
        self.quantization = outcome.quantization
        return super().placed(target, is_global=is_global)

    def stage_ranks(self) -> dict[int, int]:
        return {0: 0}

    def origins(self) -> Iterator[tuple[str, str]]:
        """Yield tensors of the targets with their sources, and tensors that are left out, by name."""
        return origins(self._opened(), self.original.policy.accumulated)

    def recipe(self, name: str) -> DerivedTensor | ConstantTensor | None:
        """Return the sources of a tensor; None if the map makes none of this name."""
        if self._recipes is None:
            outcome = self._opened()
            recipes: dict[str, DerivedTensor | ConstantTensor] = {tensor.name: tensor for tensor in outcome.made}
            self._recipes = recipes | {tensor.name: tensor for tensor in outcome.constants}
        return self._recipes.get(name)

    @property
    def has_files(self) -> bool:
        """Whether its targets are files that a format packs it into."""
        return self.maps.packing is not None and self.maps.packing.by_file

    def file_plan(self, number: int) -> RankPlan:
        """Return the plan of one of the files that it is packed into. Raises the error for what cannot be made."""
        packed = self.packed
        return RankPlan(
            target_rank=number,
            stage=number,
            identity=ShardIdentity(number, len(packed.files), ""),
            tensors=self.planned_parts(packed.files[number]),
            strings={} if number and packed.only_first else packed.strings,
            checks=(),
            absent=(),
            notes=(),
            source_ranks=(0,),
            unlisted=frozenset(),
        )

    def planned_parts(self, parts: Sequence[Part]) -> PlannedTensors:
        """Return where parts of its tensors come from. Raises the error for what cannot be made."""
        outcome = self._opened()
        made_parts, whole = parts_of(self.packed, [parts], outcome.kinds), outcome.unpacked_plan
        made = MappedTensors(self.files.path, made_parts, whole)
        tensors, holes = made.planned()
        for error in holes.values():
            raise error.with_traceback(None)
        return tensors

    @property
    def packed(self) -> Packed:
        """The files that the result is packed into."""
        packed = self._opened().packed
        assert packed is not None  # only asked where the target's format packs
        return packed

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the tensors of the source that go nowhere."""
        return self._opened().left_out

    def needs(self, name: str) -> bool:
        return name in self._opened().needed

    def require_none_left_behind(self, share: ShardShare, is_asked: Callable[[str], bool]) -> None:
        """Raise StrategyError if a share of the source's shards holds tensors that the maps do not see.

        Args:
            is_asked: tells which tensors are asked for.
        """
        outcome = self._opened()
        taken = {*outcome.inventory, *(name for weight in outcome.dequantized for name in weight.names)}
        rules, choice, *_ = self.maps.tensor_map

        def is_wanted(name: str) -> bool:
            return (bool(rules) or is_chosen(choice, name)) and is_asked(name)  # rules may give it another name

        self.original.opener.require_none_left_behind(0, taken, share, is_wanted)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the results of the maps."""
        outcome = self._opened()
        of_tensors = notes_of_tensors(outcome, self.maps.wanted(outcome.made))
        packed = () if outcome.packed is None else outcome.packed.notes
        return (
            *of_tensors,
            *outcome.notes,
            *notes_of_nest(outcome, self.maps.tensor_map.like),
            *notes_on_dequantized(outcome.dequantized),
            *packed,
        )

    def cut_warnings(self, plan: RankPlan) -> tuple[str, ...]:
        """Return warnings on how a target holds the tensors that a map makes. plan: the target's plan."""
        return tuple(target_warnings(self._opened().made, plan, self.maps.tensor_map.rules))

    def completed(self, plan: RankPlan, *, checked: bool) -> RankPlan:
        """Add to a target's plan what planning the source without the map has shown, and return it.

        That is shared facts, absent tensors, replicas to compare, lost shards, notes and warnings.

        Args:
            checked: as in `Planner.plan`; what is checked is checked by the first call.
        """
        if checked and not self._is_checked:
            outcome = self._opened()
            whole = self.original.with_values_compared(outcome.plan)
            self.check_values()
            self._require_nobodys_own(outcome, whole)
            self._made, self._is_checked = outcome._replace(plan=whole), True
        outcome = self._opened()
        whole = outcome.plan
        cautions = dict.fromkeys(caution for step in outcome.steps for caution in step.mapped.cautions)
        taken = {name for tensor in outcome.made for name in tensor.sources.values()}
        known_notes = set(notes_on(self.original.policy.accumulated, whole.gradients))
        whole_notes = (note for note in whole.notes if note not in known_notes)  # the target says its own
        taken_gradients = {gradients_like(name) for name in taken if is_partial_sum(name)}
        return plan._replace(
            shared_facts=(*plan.shared_facts, *whole.shared_facts),
            absent=(*plan.absent, *whole.absent),
            notes=(*whole_notes, *self.notes(), *plan.notes),
            differing=(*whole.differing, *plan.differing),
            to_compare=whole.to_compare,
            lost=whole.lost,
            warnings=(*whole.warnings, *cautions, *outcome.warnings, *plan.warnings),
            left_out=(*whole.left_out, *plan.left_out),
            gradients=tuple(each for each in whole.gradients if each.names in taken_gradients),
            value_ranks=outcome.steps[-1].plan.value_ranks,
        )

    def check_values(self) -> None:
        """Raise MapError if tensors differ that the map takes for equal, or padding holds anything but zeros."""
        for step in self._opened().steps:
            require_equal(self.original, step.plan, step.mapped)
            require_padding(self.original, step.plan, step.mapped)

    def compared_bytes(self, numbers: Iterable[int]) -> int:
        """Return how many bytes `require_same_parts` compares of the files of these numbers."""
        parts = (same.first for number in numbers for same in self._compared(number))
        return sum(part.box.size * BY_NAME[part.dtype].itemsize_bytes for part in parts)

    def require_same_parts(self, numbers: Iterable[int], on_bytes: OnBytes) -> None:
        """Compare, bit by bit, what must be the same before the files of these numbers are written.

        A file has only one of two tensors that its framework takes for one.

        Args:
            on_bytes: called with the number of bytes just compared; not with what lies in one place.

        Raises DisagreementError for the first difference.
        """
        limits = self.original.limits
        for compared in filter(None, map(self._compared, numbers)):
            both = [self.planned_parts([getattr(same, side) for same in compared]) for side in ("first", "second")]
            with Files() as files:
                for same, first, second in zip(compared, *both):
                    if [*_places(first)] == [*_places(second)]:
                        continue
                    element = first_difference_of_tensors(files, first, second, limits, on_bytes)
                    if element is not None:
                        values = " and ".join(value_at(files, tensor, element, limits) for tensor in (first, second))
                        index = [start + place for start, place in zip(same.first.box.start, element)]
                        raise DisagreementError(
                            same.problem,
                            expected=f"{same.first.source} as {same.second.source} is, in {same.first.dtype}",
                            got=f"a difference at element {index}: {values}",
                            where=self.files.path,
                            remedy=same.remedy,
                        )

    def _compared(self, number: int) -> Sequence[SameParts]:
        packed = self._opened().packed
        return packed.compared[number] if packed is not None and number < len(packed.compared) else ()

    def _opened(self) -> MapsOutcome:
        if self._made is None:
            self._made = self.maps.outcome()
        return self._made

    def _require_nobodys_own(self, outcome: MapsOutcome, whole: RankPlan) -> None:
        """Raise DisagreementError if each rank has its own of something that all targets would get from one of them.

        Args:
            whole: the plan of the checkpoint with what its checks found.
        """
        taken = {name for tensor in self.maps.wanted(outcome.made) for name in tensor.sources.values()}
        own = (check.name for check in outcome.plan.checks if check.why == OWN and check.name in taken)
        for name in own if self.maps.is_rank_by_rank else ():
            if any(tensor.name == name for tensor in whole.differing):
                raise DisagreementError(
                    f"each rank has its own {name!r}, and all targets would have that of one",
                    expected="the same on all ranks, with a map, types or a choice",
                    got=f"different ones on {self.original.source.strategy.world_size} ranks",
                    where=self.files.path,
                    remedy=f"leave it out (--exclude {name!r}); only a run without --map, --dtype, --include and"
                    " --exclude keeps it",
                )


def _places(tensor: TensorPlan) -> Iterator[tuple[object, ...]]:
    """Yield where the parts of a tensor lie, and what becomes of them."""
    yield from ((item.source.source, item.source_box, item.region, item.to, item.order) for item in tensor.reads)
