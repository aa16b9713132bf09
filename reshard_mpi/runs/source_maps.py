"""Plan a source as one whole, and apply maps to it, for `mapped_source` (`SourceMaps`, `MapsOutcome`).

The source is planned as one full checkpoint in its own names. What a map makes is planned as a full checkpoint as well,
each of whose tensors comes from the shards, so nothing in between is ever there. Nothing is read of the shards but
their structure, and single numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import only_element
from reshard_mpi.errors import TargetError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import NEST, Manifest, shown_string
from reshard_mpi.formats.nest.rebuild_tree import first_difference
from reshard_mpi.formats.protocol import Packed
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.apply_to_file import SourceTree, applied_to_file
from reshard_mpi.mapping.chain import made_of_first
from reshard_mpi.mapping.companions import companions_followed, to_dequantize, without_companions
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.result import ConstantTensor, DerivedTensor, MapResult, parts_of, require_holdable, values_of
from reshard_mpi.mapping.rules import Rules, element_value
from reshard_mpi.mapping.selection import TargetTemplate
from reshard_mpi.planning.made_tensors import MappedTensors, dequantized
from reshard_mpi.planning.rank_choice import Accumulated, is_partial_sum
from reshard_mpi.planning.rank_plan import LEFT_OUT, RankPlan
from reshard_mpi.quantization.weights import SCHEME_TEXT, QuantizedWeight, QuantizedWeights
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.request_maps import TensorMap, require_known_sums, source_warnings, tensor_at, tied_tensors
from reshard_mpi.text import counted, shortened

if TYPE_CHECKING:
    from reshard_mpi.runs.maps_and_packing import Packing


class MapStep(NamedTuple):
    """The result of one map on a full checkpoint."""

    rules: Rules | None
    plan: RankPlan  # of the full checkpoint
    mapped: MapResult
    tensors: MappedTensors  # the derived ones, as a shard's

    @property
    def planned(self) -> RankPlan:
        """The map's result, planned as a full checkpoint."""
        tensors, holes = self.tensors.planned()
        return self.plan._replace(tensors=tensors, holes=holes)

    @property
    def in_own_types(self) -> MapStep:
        """The step without `--dtype`: another one after it gives tensors these types."""
        mapped = self.mapped.in_own_types
        return self._replace(mapped=mapped, tensors=MappedTensors(self.tensors.path, mapped, self.plan))


class MapsOutcome(NamedTuple):
    """What all maps make of the checkpoint, one after another, and that as a shard."""

    plan: RankPlan  # of the checkpoint as one full one
    inventory: Inventory  # its tensors
    steps: tuple[MapStep, ...]
    made: tuple[DerivedTensor, ...]  # the tensors that maps make of others, each as made of tensors of the checkpoint
    manifest: Manifest
    notes: tuple[str, ...]
    # the names of the checkpoint's tensors that go into targets or are looked at
    needed: frozenset[str]
    warnings: tuple[str, ...]  # of how the source is cut, and of values that do not follow their tensors
    packed: Packed | None  # the files that the result is packed into
    kinds: Mapping[str, TensorType]  # of the whole tensors that the maps make
    unpacked_plan: RankPlan  # of the maps' result before it is packed; of the source if nothing packs
    quantization: QuantizedWeights | None = None  # the quantized weights that the maps make
    dequantized: Sequence[QuantizedWeight] = ()  # the weights that are dequantized before

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of tensors that go nowhere, from each map's sources and the last one's results."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.mapped.left_out))

    @property
    def constants(self) -> tuple[ConstantTensor, ...]:
        """The tensors of the target that are made up."""
        return self.steps[-1].mapped.constants


class SourceMaps(NamedTuple):
    """A source, the maps that are applied to it one after another, and what packs their result."""

    original: Planner  # of the source to one full checkpoint in its own names
    tensor_map: TensorMap
    packing: Packing | None  # what packs the result into files; None: nothing does
    is_wanted: Callable[[str, Container[str]], bool]  # of a name and all names: whether the targets have the tensor
    is_rank_by_rank: bool  # whether there are as many targets as source ranks, so that each could keep its own values

    def outcome(self) -> MapsOutcome:
        """Plan the source as one full checkpoint, and apply the maps to it one after another."""
        rules, choice, forward, like, _ = self.tensor_map
        source = self.original.source
        plan, quantization = self.original.plan(0, checked=False), source.quantization
        dequantizing: Sequence[QuantizedWeight] = ()
        if quantization is not None:
            dequantizing, quantization = to_dequantize(quantization, choice, is_mapped=bool(rules))
            plan = dequantized(plan, dequantizing) if dequantizing else plan
        elif choice.types and source.looks_quantized:
            raise source.unknown_scheme("--dtype, which would dequantize it")
        inventory = _inventory_of(plan)
        nest = plan.strings.get(NEST)
        tied = {} if nest is None else tied_tensors(source, inventory)
        seen = inventory if quantization is None else without_companions(inventory, quantization.weights)
        made_file = applied_to_file(rules, choice, seen, SourceTree(nest, tied, source.files.path), forward, like)
        if quantization is not None:
            made_file, quantization = companions_followed(made_file, quantization, inventory)
        steps: list[MapStep] = []
        for mapped, own_rules in zip(made_file.mapped, rules or (None,)):
            steps.append(self._planned(mapped, own_rules, plan if not steps else steps[-1].planned))
        gone = (NEST,) if quantization is not None and quantization.text else (NEST, SCHEME_TEXT)
        strings = {name: text for name, text in plan.strings.items() if name not in gone}
        if made_file.nest is not None:
            strings[NEST] = made_file.nest
        kinds = steps[-1].mapped.kinds
        outcome = MapsOutcome(
            plan=plan,
            inventory=inventory,
            steps=tuple(steps),
            made=made_file.made,
            manifest=Manifest(source.files.path, source.files.format, steps[-1].tensors, strings),
            notes=made_file.notes,
            needed=self._needed(steps, dequantizing),
            warnings=(*made_file.warnings, *ties_undone(tied, made_file.made)),
            packed=None,
            kinds=kinds,
            unpacked_plan=plan,
            quantization=quantization,
            dequantized=dequantizing,
        )
        if self.packing is not None:
            outcome = self._pack(outcome, self.packing)
        outcome = outcome._replace(plan=_comparing_only(plan, outcome.needed))
        if source.strategy.world_size == 1:  # the pieces of an index say only who has written what
            return outcome
        cuts = source_warnings(self.wanted(outcome.made), outcome.plan, rules)
        return outcome._replace(warnings=(*cuts, *outcome.warnings))

    def _pack(self, outcome: MapsOutcome, packing: Packing) -> MapsOutcome:
        """Return the result of the maps packed into files, by one step more that cuts its tensors for them."""
        *first, last = outcome.steps
        packed = packing.pack(outcome.kinds, outcome.manifest.strings, last.mapped.own_types)
        if packed is None:
            return outcome._replace(unpacked_plan=last.planned)
        last = last.in_own_types
        outcome = outcome._replace(packed=packed, unpacked_plan=last.planned)
        _require_absent(packed.absent, [name for step in outcome.steps for name in step.mapped.left_out])
        parts = parts_of(packed, () if packing.by_file else packed.files, outcome.kinds)
        steps = (*first, last, self._planned(parts, None, outcome.unpacked_plan))
        manifest = outcome.manifest._replace(tensors=steps[-1].tensors, strings=dict(packed.strings))
        outcome = outcome._replace(steps=steps, manifest=manifest)
        if packing.by_file:
            compared = {name for equal in parts.equal for name in equal.names}
            return outcome._replace(needed=outcome.needed | compared)
        made = made_of_first(parts, outcome.made, last.mapped.constants)
        return outcome._replace(made=made, needed=self._needed(steps, outcome.dequantized))

    def _planned(self, mapped: MapResult, rules: Rules | None, plan: RankPlan) -> MapStep:
        """Return what one map makes of the tensors of a plan, with the numbers that are computed of theirs."""
        if self.original.policy.accumulated is Accumulated.SUM:
            require_known_sums(mapped, self.original.source.files.path)
        require_holdable(mapped)
        computed, ranks = self._computed(mapped, plan)
        mapped = mapped._replace(constants=(*mapped.constants, *computed))
        plan = plan._replace(value_ranks=(*plan.value_ranks, *ranks))
        return MapStep(rules, plan, mapped, MappedTensors(self.original.source.files.path, mapped, plan))

    def wanted(self, derived: Sequence[DerivedTensor]) -> list[DerivedTensor]:
        """Return the tensors that targets have; others are left out by their strategy."""
        names = {tensor.name for tensor in derived}
        return [tensor for tensor in derived if self.is_wanted(tensor.name, names)]

    def _needed(self, steps: Sequence[MapStep], dequantized: Sequence[QuantizedWeight]) -> frozenset[str]:
        """Return the names of the checkpoint's tensors that go into targets or are looked at."""
        needed = {tensor.name for tensor in self.wanted(steps[-1].mapped.made)}
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
                ranks.update(item.source_rank for item in tensor.reads)
                content = only_element(files, tensor, self.original.limits)
                return element_value(content, tensor.spec.dtype, name, self.original.source.files.path)

            for number, element in values_of(mapped.computed, mapped.counted, mapped.settings, read):
                computed.append(ConstantTensor(number.name, number.kind, element, number.where))
        return computed, ranks


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
    alike = (group._replace(names=tuple(name for name in group.names if name in names)) for group in plan.to_compare)
    return plan._replace(
        checks=tuple(check for check in plan.checks if check.name in names),
        to_compare=tuple(group for group in alike if group.names),
    )


def origins(outcome: MapsOutcome, accumulated: Accumulated) -> Iterator[tuple[str, str]]:
    """Yield tensors of the targets with their sources, and tensors that are left out, by name."""
    dtypes = {name: kind.dtype for name, kind in outcome.inventory.items()}
    for tensor in outcome.made:
        sources = list(dict.fromkeys(tensor.sources[pair.source] for pair in tensor.assembly.pairs))
        before = {dtypes[name] for name in sources} - {tensor.dtype}
        types = f", converted from {' and '.join(map(str, before))}" if before else ""
        origin = f"{shortened(sources) or 'made up'}, by {tensor.where}" if tensor.where else "as it is"
        zeros = f", {sum(box.size for box in tensor.assembly.zeros)} zeros" if tensor.assembly.zeros else ""
        joins = accumulated is not Accumulated.REFUSE and any(map(is_partial_sum, sources))
        types += f", the {accumulated} of replicas" if joins else ""
        yield tensor.name, f"{origin}{zeros}{types}"
    for constant in outcome.constants:
        yield constant.name, f"made up of {numbers(constant.element, constant.kind.dtype)[0]}, by {constant.where}"
    yield from ((name, LEFT_OUT) for name in outcome.left_out)


def notes_of_tensors(outcome: MapsOutcome, wanted: Sequence[DerivedTensor]) -> Iterator[str]:
    """Yield notes for the user on the tensors that maps make and leave out.

    Args:
        wanted: the tensors of `outcome.made` that targets have.
    """
    for step in outcome.steps:
        if step.rules is not None and step.mapped.direction is not None:
            count = sum(1 for tensor in step.mapped.made if tensor.where)
            yield f"the map {step.rules.where}, read {step.mapped.direction}, makes {counted(count, 'tensor')}"
            yield from step.mapped.notes
    is_mapped = outcome.steps[0].rules is not None
    kept = [next(iter(tensor.sources.values())) for tensor in wanted if not tensor.where]
    if kept and is_mapped:
        yield f"no equation takes {shortened(list(dict.fromkeys(kept)))}; names and shapes stay as they are"
    with_parameters = [name for step in outcome.steps for name in step.mapped.states_left_out]
    others = {*outcome.left_out}.difference(with_parameters)
    left_out = [name for name in outcome.left_out if name in others]
    if left_out:
        yield f"left out: {shortened(left_out)}"
    if with_parameters:
        yield f"left out with the parameters whose state they are: {shortened(with_parameters)}"
    if outcome.constants:
        yield f"made up: {shortened([tensor.name for tensor in outcome.constants])}"
    pads = (pads for step in outcome.steps for pads in step.mapped.pads if pads.are_dropped)
    dropped = [(pad.name, sum(box.size for box in pad.boxes)) for pad in pads]
    if dropped:
        elements = sum(size for _, size in dropped)
        names = shortened([name for name, _ in dropped])
        yield f"{elements} elements of padding are dropped, whatever they hold: {names}"


def ties_undone(tied: Mapping[str, str], made: Sequence[DerivedTensor]) -> Iterator[str]:
    """Yield a warning of tensors that are one in the source, and are cut or turned in different ways by maps.

    Args:
        tied: tensors that are others once more, with the names of these.
        made: what maps make of tensors of the source.
    """
    forms: dict[str, set[tuple[object, ...]]] = {}
    for tensor in made if tied else ():
        for pair in tensor.assembly.pairs:
            order = pair.order or tuple(range(len(pair.region.shape)))
            form = (tensor.assembly.shape, pair.region, pair.to.shape, order)
            forms.setdefault(tensor.sources[pair.source], set()).add(form)
    pairs = [(name, other) for name, other in tied.items() if name in forms and other in forms]
    undone = [f"{name} and {other}" for name, other in pairs if forms[name] != forms[other]]
    if undone:
        yield (
            "tensors that are one in the source, as tied weights are, become different ones:"
            f" {shortened(undone)}; write the same equation for both, or one of both with copy = true"
        )


def notes_of_nest(outcome: MapsOutcome, like: TargetTemplate | None) -> Iterator[str]:
    """Yield notes on values that are neither tensor nor text.

    Args:
        like: the checkpoint whose names and values the result has, if one is named.
    """
    own, new = outcome.plan.strings.get(NEST), outcome.manifest.strings.get(NEST)
    if like is None or new == own:
        return
    if new is None:
        yield f"left out, since {like.path} has no such thing: {shown_string(NEST)}"
    else:
        other = first_difference(own, new)
        where = f"the first other one is {other}" if other else "tensors are nested otherwise"
        yield f"{shown_string(NEST)}: as in {like.path}, with the values of the source that both have; {where}"
