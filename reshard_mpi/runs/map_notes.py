"""Tell what maps have made of a source: its notes, and each tensor's origin (`MapsOutcome`, `origins`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import NEST, Manifest, shown_string
from reshard_mpi.formats.nest.rebuild_tree import first_difference
from reshard_mpi.formats.protocol import Packed
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.result import ConstantTensor, DerivedTensor, MapResult
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.mapping.selection import TargetTemplate
from reshard_mpi.planning.map_routes import MappedTensors
from reshard_mpi.planning.rank_plan import LEFT_OUT, RankPlan
from reshard_mpi.planning.tensor_names import Accumulated, is_partial_sum
from reshard_mpi.quantization.placing import QuantizedWeights
from reshard_mpi.quantization.weights import QuantizedWeight
from reshard_mpi.text import counted, shortened


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
        mapped, plan = self.mapped.in_own_types, self.plan
        rank = min(plan.read_ranks, default=0)
        tensors = MappedTensors(self.tensors.path, mapped, plan.tensors, rank, plan.holes)
        return self._replace(mapped=mapped, tensors=tensors)


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
    whole: RankPlan  # of these, if they are packed
    quantization: QuantizedWeights | None = None  # the quantized weights that the maps make
    dequantized: Sequence[QuantizedWeight] = ()  # the weights that are dequantized before

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of tensors that go nowhere, from each map's sources and the last one's results."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.mapped.left_out))

    @property
    def stored_names(self) -> frozenset[str]:
        """The names of the tensors that are stored for dequantized weights."""
        return frozenset(name for weight in self.dequantized for name in weight.names)

    @property
    def constants(self) -> tuple[ConstantTensor, ...]:
        """The tensors of the target that are made up."""
        return self.steps[-1].mapped.constants


def origins(outcome: MapsOutcome, accumulated: Accumulated) -> Iterator[tuple[str, str]]:
    """Yield tensors of the targets with their sources, and tensors that are left out, by name."""
    dtypes = {name: kind.dtype for name, kind in outcome.inventory.items()}
    for tensor in outcome.made:
        sources = list(dict.fromkeys(tensor.sources[pair.source] for pair in tensor.shape.pairs))
        before = {dtypes[name] for name in sources} - {tensor.dtype}
        types = f", converted from {' and '.join(map(str, before))}" if before else ""
        origin = f"{shortened(sources) or 'made up'}, by {tensor.where}" if tensor.where else "as it is"
        zeros = f", {sum(box.size for box in tensor.shape.zeros)} zeros" if tensor.shape.zeros else ""
        joins = accumulated is not Accumulated.REFUSE and any(map(is_partial_sum, sources))
        types += f", the {accumulated} of replicas" if joins else ""
        yield tensor.name, f"{origin}{zeros}{types}"
    for name, kind, element, where in outcome.constants:
        yield name, f"made up of {numbers(element, kind.dtype)[0]}, by {where}"
    for name in outcome.left_out:
        yield name, LEFT_OUT


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
    left_out = [name for name in outcome.left_out if name not in frozenset(with_parameters)]
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
        for pair in tensor.shape.pairs:
            order = pair.order or tuple(range(len(pair.region.shape)))
            form = (tensor.shape.shape, pair.region, pair.to.shape, order)
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
