"""Present a source as maps make it: one full checkpoint of one rank (`MappedCheckpoint`).

The checkpoint is planned as one full one, in its own names and by its own strategy, with all the checks that belong to
that. Maps are applied one after another: what one makes is planned as a full checkpoint as well, each of whose tensors
comes from the shards, so nothing in between is ever there. Nothing is read of the shards but their structure, what a
map says is equal or padding, and single numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import ShardStats, SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element
from reshard_mpi.errors import DisagreementError, TargetError
from reshard_mpi.formats.manifest import NEST, Manifest, ShardIdentity
from reshard_mpi.formats.protocol import Packed, Part
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.apply_to_file import SourceTree, applied_to_file
from reshard_mpi.mapping.chain import made_of_first
from reshard_mpi.mapping.companions import (
    companions_followed,
    notes_on_dequantized,
    to_dequantize,
    without_companions,
)
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.result import ConstantTensor, DerivedTensor, MapResult, parts_of, require_holdable, values_of
from reshard_mpi.mapping.rules import Rules, element_value
from reshard_mpi.mapping.selection import is_chosen
from reshard_mpi.planning.gradient_joining import gradients_like, notes_on
from reshard_mpi.planning.map_routes import MappedTensors
from reshard_mpi.planning.quantized_tensors import dequantized
from reshard_mpi.planning.rank_plan import PlannedTensors, RankPlan
from reshard_mpi.planning.shared_facts import OWN
from reshard_mpi.planning.source_flaws import MissingRanks, UnusableShard
from reshard_mpi.planning.tensor_names import Accumulated, Unlisted, is_partial_sum
from reshard_mpi.quantization.weights import SCHEME_TEXT, QuantizedWeight
from reshard_mpi.runs.check_maps import (
    TensorMap,
    require_equal,
    require_known_sums,
    require_padding,
    source_warnings,
    target_warnings,
    tensor_at,
    tied_tensors,
)
from reshard_mpi.runs.map_notes import MapsOutcome, MapStep, notes_of_nest, notes_of_tensors, origins, ties_undone
from reshard_mpi.runs.plan_conversion import Conversion
from reshard_mpi.sharding.strategy import Strategy, unsharded

if TYPE_CHECKING:
    from reshard_mpi.runs.packing import Packing


def conversion_through(tensor_map: TensorMap, conversion: Conversion, packing: Packing | None = None) -> Conversion:
    """Return the conversion of the source through a map.

    Args:
        packing: what packs the map's result into files; the targets are these then.
    """
    source = conversion.source
    policy = conversion.policy._replace(unlisted=Unlisted.FOLLOW, allows_holes=True)
    original = Conversion(source, unsharded(), policy)
    view = MappedCheckpoint(
        source.files,
        unsharded(source.files.path),
        original=original,
        tensor_map=tensor_map,
        packing=packing,
        is_wanted=conversion.is_wanted,
        is_rank_by_rank=conversion.target.world_size == source.strategy.world_size > 1,
    )
    return conversion.changed(view=view)


class MappedCheckpoint(SourceCheckpoint):
    """The result of maps as a checkpoint of one rank, 0. It has the source's files.

    Args:
        original: of the source to one full checkpoint in its own names.
        packing: what packs the result into files; None: nothing does.
        is_wanted: of a name and all names: whether the targets have the tensor.
        is_rank_by_rank: whether there are as many targets as source ranks, so that each could keep its own values.
    """

    def __init__(
        self,
        files: ShardFiles,
        strategy: Strategy,
        *,
        original: Conversion,
        tensor_map: TensorMap,
        packing: Packing | None,
        is_wanted: Callable[[str, Container[str]], bool],
        is_rank_by_rank: bool,
    ) -> None:
        super().__init__(files, strategy)
        self.original = original
        self.tensor_map = tensor_map
        self.packing = packing
        self.is_wanted = is_wanted
        self.is_rank_by_rank = is_rank_by_rank
        self._made: MapsOutcome | None = None
        self._is_checked = False
        self._recipes: Mapping[str, DerivedTensor | ConstantTensor] | None = None

    def of(self, source: SourceCheckpoint) -> MappedCheckpoint:
        """Return the same view of `source`: the same files, opened anew."""
        return MappedCheckpoint(
            self.files,
            self.strategy,
            original=self.original.changed(source=source),
            tensor_map=self.tensor_map,
            packing=self.packing,
            is_wanted=self.is_wanted,
            is_rank_by_rank=self.is_rank_by_rank,
        )

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
    def extent(self) -> ShardStats:
        """The sizes of shards and of the map's result; boxes of equations count as tensors, which are as large."""
        own, outcome = self.original.source.extent, self._made
        if outcome is None:
            return own
        first, *others = (step.mapped.made for step in outcome.steps)
        shapes = {id(tensor.shape): tensor.shape for tensors in (first, *others, outcome.made) for tensor in tensors}
        boxes = sum(len(shape.pairs) + len(shape.zeros) for shape in shapes.values())
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
        return self.packing is not None and self.packing.by_file

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
            loose=frozenset(),
        )

    def planned_parts(self, parts: Sequence[Part]) -> PlannedTensors:
        """Return where parts of its tensors come from. Raises the error for what cannot be made."""
        outcome = self._opened()
        made_parts, whole = parts_of(self.packed, [parts], outcome.kinds), outcome.whole
        rank = min(whole.read_ranks, default=0)
        made = MappedTensors(self.files.path, made_parts, whole.tensors, rank, whole.holes)
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
        taken = {*self._opened().inventory, *self._opened().stored_names}
        rules, choice, *_ = self.tensor_map

        def is_wanted(name: str) -> bool:
            return (bool(rules) or is_chosen(choice, name)) and is_asked(name)  # rules may give it another name

        self.original.shards.require_none_left_behind(0, taken, share, is_wanted)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the results of the maps."""
        outcome = self._opened()
        of_tensors = notes_of_tensors(outcome, self._wanted(outcome.made))
        packed = () if outcome.packed is None else outcome.packed.notes
        return (
            *of_tensors,
            *outcome.notes,
            *notes_of_nest(outcome, self.tensor_map.like),
            *notes_on_dequantized(outcome.dequantized),
            *packed,
        )

    def cut_warnings(self, plan: RankPlan) -> tuple[str, ...]:
        """Return warnings on how a target holds the tensors that a map makes. plan: the target's plan."""
        return tuple(target_warnings(self._opened().made, plan, self.tensor_map.rules))

    def completed(self, plan: RankPlan, *, checked: bool) -> RankPlan:
        """Return a target's plan with what planning the checkpoint as it is has shown.

        Args:
            checked: as in `Conversion.plan`; what is checked is checked by the first call.
        """
        if checked and not self._is_checked:
            outcome = self._opened()
            whole = self.original.checked(outcome.plan)
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
            alike=whole.alike,
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

    def _opened(self) -> MapsOutcome:
        if self._made is None:
            self._made = self._map_source()
        return self._made

    def _map_source(self) -> MapsOutcome:
        """Plan the source as one full checkpoint, and apply the maps to it one after another."""
        rules, choice, forward, like, _ = self.tensor_map
        plan = self.original.plan(0, checked=False)
        quantization = self.original.source.quantization
        dequantizing: Sequence[QuantizedWeight] = ()
        if quantization is not None:
            dequantizing, quantization = to_dequantize(quantization, choice, is_mapped=bool(rules))
            plan = dequantized(plan, dequantizing) if dequantizing else plan
        elif choice.types and self.original.source.looks_quantized:
            raise self.original.source.unknown_scheme("--dtype, which would dequantize it")
        inventory = _inventory_of(plan)
        nest = plan.strings.get(NEST)
        tied = {} if nest is None else tied_tensors(self.original.source, inventory)
        seen = inventory if quantization is None else without_companions(inventory, quantization.weights)
        made_file = applied_to_file(rules, choice, seen, SourceTree(nest, tied, self.files.path), forward, like)
        if quantization is not None:
            made_file, quantization = companions_followed(made_file, quantization, inventory)
        steps: list[MapStep] = []
        for mapped, own_rules in zip(made_file.mapped, rules or (None,)):
            steps.append(self._planned(mapped, own_rules, plan if not steps else steps[-1].planned))
        gone = (NEST,) if quantization is not None and quantization.text else (NEST, SCHEME_TEXT)
        strings = {name: text for name, text in plan.strings.items() if name not in gone}
        if made_file.nest is not None:
            strings[NEST] = made_file.nest
        kinds = {tensor.name: TensorType(tensor.dtype, tensor.shape.shape) for tensor in steps[-1].mapped.made}
        kinds |= {tensor.name: tensor.kind for tensor in steps[-1].mapped.constants}
        outcome = MapsOutcome(
            plan=plan,
            inventory=inventory,
            steps=tuple(steps),
            made=made_file.made,
            manifest=Manifest(self.files.path, self.files.format, steps[-1].tensors, strings),
            notes=made_file.notes,
            needed=self._needed(steps, dequantizing),
            warnings=(*made_file.warnings, *ties_undone(tied, made_file.made)),
            packed=None,
            kinds=kinds,
            whole=plan,
            quantization=quantization,
            dequantized=dequantizing,
        )
        if self.packing is not None:
            outcome = self._pack(outcome, self.packing)
        outcome = outcome._replace(plan=_comparing_only(plan, outcome.needed))
        if self.original.source.strategy.world_size == 1:  # the pieces of an index say only who has written what
            return outcome
        cuts = source_warnings(self._wanted(outcome.made), outcome.plan, rules)
        return outcome._replace(warnings=(*cuts, *outcome.warnings))

    def _pack(self, outcome: MapsOutcome, packing: Packing) -> MapsOutcome:
        """Return the result of the maps packed into files, by one step more that cuts its tensors for them."""
        *first, last = outcome.steps
        packed = packing.pack(outcome.kinds, outcome.manifest.strings, last.mapped.own_types)
        if packed is not None:
            last = last.in_own_types
        outcome = outcome._replace(packed=packed, whole=last.planned)
        if packed is None:
            return outcome
        _require_absent(packed.absent, [name for step in outcome.steps for name in step.mapped.left_out])
        parts = parts_of(packed, () if packing.by_file else packed.files, outcome.kinds)
        steps = (*first, last, self._planned(parts, None, outcome.whole))
        manifest = Manifest(self.files.path, self.files.format, steps[-1].tensors, dict(packed.strings))
        outcome = outcome._replace(steps=steps, manifest=manifest)
        if packing.by_file:
            compared = {name for equal in parts.equal for name in equal.names}
            return outcome._replace(needed=outcome.needed | compared)
        made = made_of_first(parts, outcome.made, last.mapped.constants)
        return outcome._replace(made=made, needed=self._needed(steps, outcome.dequantized))

    def _planned(self, mapped: MapResult, rules: Rules | None, plan: RankPlan) -> MapStep:
        """Return what one map makes of the tensors of a plan, with the numbers that are computed of theirs."""
        if self.original.policy.accumulated is Accumulated.SUM:
            require_known_sums(mapped, self.files.path)
        require_holdable(mapped)
        computed, ranks = self._computed(mapped, plan)
        mapped = mapped._replace(constants=(*mapped.constants, *computed))
        plan = plan._replace(value_ranks=(*plan.value_ranks, *ranks))
        rank = min(plan.read_ranks, default=0)
        return MapStep(rules, plan, mapped, MappedTensors(self.files.path, mapped, plan.tensors, rank, plan.holes))

    def _wanted(self, derived: Sequence[DerivedTensor]) -> list[DerivedTensor]:
        """Return the tensors that targets have; others are left out by their strategy."""
        names = {tensor.name for tensor in derived}
        return [tensor for tensor in derived if self.is_wanted(tensor.name, names)]

    def _needed(self, steps: Sequence[MapStep], dequantized: Sequence[QuantizedWeight]) -> frozenset[str]:
        """Return the names of the checkpoint's tensors that go into targets or are looked at."""
        needed = {tensor.name for tensor in self._wanted(steps[-1].mapped.made)}
        for step in reversed(steps):
            mapped = step.mapped
            needed = {name for tensor in mapped.made if tensor.name in needed for name in tensor.sources.values()}
            needed.update(name for equal in mapped.equal for name in equal.names)
            needed.update(pads.name for pads in mapped.pads)
            needed.update(mapped.counted.names)
        return frozenset(needed.union(*(weight.names for weight in dequantized if weight.name in needed)))

    def _computed(self, mapped: MapResult, plan: RankPlan) -> tuple[list[ConstantTensor], set[int]]:
        """Return the tensors that are computed of single numbers of the source, and the ranks that have these."""
        computed: list[ConstantTensor] = []
        ranks: set[int] = set()
        if not (mapped.computed or mapped.counted.numbers):
            return computed, ranks
        self.original.before_gathering()
        places = plan.tensors.places
        with Files() as files:

            def read(name: str) -> float:
                tensor = tensor_at(plan, places[name])
                ranks.update(copy.source_rank for copy in tensor.copies)
                content = only_element(files, tensor, self.original.limits)
                return element_value(content, tensor.spec.dtype, name, self.files.path)

            for number, element in values_of(mapped.computed, mapped.counted, mapped.settings, read):
                computed.append(ConstantTensor(number.name, number.kind, element, number.where))
        return computed, ranks

    def _require_nobodys_own(self, outcome: MapsOutcome, whole: RankPlan) -> None:
        """Raise DisagreementError if each rank has its own of something that all targets would get from one of them.

        Args:
            whole: the plan of the checkpoint with what its checks found.
        """
        taken = {name for tensor in self._wanted(outcome.made) for name in tensor.sources.values()}
        own = (check.name for check in outcome.plan.checks if check.why == OWN and check.name in taken)
        for name in own if self.is_rank_by_rank else ():
            if any(tensor.name == name for tensor in whole.differing):
                raise DisagreementError(
                    f"each rank has its own {name!r}, and all targets would have that of one",
                    expected="the same on all ranks, with a map, types or a choice",
                    got=f"different ones on {self.original.source.strategy.world_size} ranks",
                    where=self.files.path,
                    remedy=f"leave it out (--exclude {name!r}); only a run without --map, --dtype, --include and"
                    " --exclude keeps it",
                )


def _require_absent(prefixes: Sequence[str], left_out: Sequence[str]) -> None:
    """Raise TargetError if tensors are left out whose absence would say something: their names begin so."""
    lost = next((name for name in left_out if name.startswith(tuple(prefixes))), None)
    if lost is not None:
        raise TargetError(
            "all state of a parameter is left out, so it would be taken for one that is not trained",
            expected="the state of every parameter that the optimizer trains",
            got=f"{lost} left out",
            remedy="keep it, or choose --to torch",
        )


def _inventory_of(plan: RankPlan) -> Inventory:
    """Return the tensors of a plan in file order."""
    groups = ((TensorType(group.kind.dtype, group.kind.whole_shape), group.names) for group in plan.tensors.groups)
    kinds = {name: kind for kind, names in groups for name in names}
    return {name: kinds[name] for name in plan.tensors.specs.names}


def _comparing_only(plan: RankPlan, names: Container[str]) -> RankPlan:
    """Return a plan without comparisons of other tensors than these."""
    alike = (group._replace(names=tuple(name for name in group.names if name in names)) for group in plan.alike)
    return plan._replace(
        checks=tuple(check for check in plan.checks if check.name in names),
        alike=tuple(group for group in alike if group.names),
    )
