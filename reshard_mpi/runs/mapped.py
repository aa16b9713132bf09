"""A source checkpoint as a map makes it: one full checkpoint of one rank, in the names, shapes and types of the target.

The checkpoint is planned as one full one, in its own names and by its own strategy, with all the checks that belong to
that. Nothing is read of it but its structure, what a map says is equal or padding, and single numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from reshard_mpi.checkpoints.source import LEFT_OUT, Extent, SourceCheckpoint
from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import only_element
from reshard_mpi.errors import DisagreementError, ReshardError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import NEST, Manifest, shown_string
from reshard_mpi.formats.nest import first_difference
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.mapping.candidates import Inventory, Kind
from reshard_mpi.mapping.choice import is_chosen
from reshard_mpi.mapping.computing import values_of
from reshard_mpi.mapping.made import Constant, Made, Mapped, require_holdable
from reshard_mpi.mapping.naming import SourceFile, applied_to_file
from reshard_mpi.mapping.settings import unpacked
from reshard_mpi.planning.agreement import OWN
from reshard_mpi.planning.losses import Lost, Missing
from reshard_mpi.planning.mapped import MappedTensors
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.planning.partial_sums import Accumulated, is_partial_sum, notes_on, sums_like
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.mapped_values import require_equal, require_known_sums, require_padding, tensor_at
from reshard_mpi.runs.maps import TensorMap, tied_tensors
from reshard_mpi.runs.one_sided import source_warnings, target_warnings
from reshard_mpi.sharding.placement import unsharded
from reshard_mpi.text import counted, shortened


class _Made(NamedTuple):
    """The checkpoint planned as one full one, its tensors, what the map makes of them, and that as a shard.

    needed: the names of the checkpoint's tensors of which targets have anything, or that are looked at. warnings: of
    how the source is cut.
    """

    plan: RankPlan
    inventory: Inventory
    mapped: Mapped
    manifest: Manifest
    notes: tuple[str, ...]
    needed: frozenset[str]
    warnings: tuple[str, ...]


def conversion_through(tensor_map: TensorMap, conversion: Conversion) -> Conversion:
    """Return a conversion of what a map makes of the source."""
    is_rank_by_rank = conversion.target.world_size == conversion.source.strategy.world_size > 1

    def through(original: Conversion) -> SourceCheckpoint:
        files, wanted = original.source.files, conversion.is_wanted
        return MappedCheckpoint(
            files,
            unsharded(files.path),
            original=original,
            tensor_map=tensor_map,
            is_wanted=wanted,
            is_rank_by_rank=is_rank_by_rank,
        )

    original = Conversion(
        conversion.source,
        unsharded(),
        strict=conversion.strict,
        replicas=conversion.replicas,
        accumulated=conversion.accumulated,
        allows_holes=True,
    )
    return replace(conversion, source=through(original), original=original, through=through)


@dataclass(slots=True)
class MappedCheckpoint(SourceCheckpoint):
    """The source checkpoint of `original` as a map makes it. Its files are those of that; it has one rank, 0.

    is_wanted: tells of a name whether the targets have it; takes the names of all tensors as well. is_rank_by_rank:
    whether the targets are as many as the source's ranks, so that each could keep values of its own.
    """

    original: Conversion | None = field(default=None)
    tensor_map: TensorMap | None = field(default=None)
    is_wanted: Callable[[str, Container[str]], bool] = field(default=lambda *_: True)
    is_rank_by_rank: bool = field(default=False)
    _made: _Made | None = field(default=None)
    _is_checked: bool = field(default=False)
    _recipes: Mapping[str, Made | Constant] | None = field(default=None)

    @property
    def stored(self) -> SourceCheckpoint:
        return self._conversion.source

    @property
    def described(self) -> str:
        return self.stored.described

    @property
    def missing(self) -> Missing | None:
        return self.stored.missing

    def __contains__(self, rank: object) -> bool:
        return rank == 0

    def manifest(self, rank: int) -> Manifest:
        return self._opened().manifest

    def find(self, rank: int) -> Manifest | None:
        return self._opened().manifest

    def lost(self, rank: int) -> Lost:
        return self.stored.lost(rank)

    def check_crc(self, rank: int, on_bytes: OnBytes = uncounted) -> ReshardError | None:
        return self.stored.check_crc(rank, on_bytes)

    @property
    def extent(self) -> Extent:
        """How large shards are, and what the map makes; the boxes of equations count as tensors, which are as large."""
        own, made = self.stored.extent, self._made
        if made is None:
            return own
        shapes = {id(tensor.shape): tensor.shape for tensor in made.mapped.made}
        boxes = sum(len(shape.pairs) + len(shape.zeros) for shape in shapes.values())
        return own._replace(tensors=max(own.tensors, len(made.manifest.tensors)) + boxes)

    def forget(self) -> None:
        self._conversion.forget()
        self._made = self._recipes = None

    def stage_ranks(self) -> dict[int, int]:
        return {0: 0}

    def origins(self, accumulated: Accumulated = Accumulated.REFUSE) -> Iterator[tuple[str, str]]:
        made = self._opened()
        dtypes = {name: kind.dtype for name, kind in made.inventory.items()}
        for tensor in made.mapped.made:
            sources = list(dict.fromkeys(tensor.sources[pair.source] for pair in tensor.shape.pairs))
            before = {dtypes[name] for name in sources} - {tensor.dtype}
            types = f", converted from {' and '.join(map(str, before))}" if before else ""
            origin = f"{shortened(sources)}, by {tensor.where}" if tensor.where else "as it is"
            zeros = f", {sum(box.size for box in tensor.shape.zeros)} zeros" if tensor.shape.zeros else ""
            joins = accumulated is not Accumulated.REFUSE and any(map(is_partial_sum, sources))
            types += f", the {accumulated} of replicas" if joins else ""
            yield tensor.name, f"{origin}{zeros}{types}"
        for name, kind, element, where in made.mapped.constants:
            yield name, f"made up of {numbers(element, kind.dtype)[0]}, by {where}"
        for name in made.mapped.left_out:
            yield name, LEFT_OUT

    def recipe(self, name: str) -> Made | Constant | None:
        """Return what a tensor is made of; None if the map makes none of this name."""
        if self._recipes is None:
            mapped = self._opened().mapped
            made = {tensor.name: tensor for tensor in mapped.made}
            self._recipes = {**made, **{tensor.name: tensor for tensor in mapped.constants}}
        return self._recipes.get(name)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the tensors of the source that go nowhere."""
        return self._opened().mapped.left_out

    def needs(self, name: str) -> bool:
        return name in self._opened().needed

    def takes(self, name: str) -> bool:
        assert self.tensor_map is not None
        rules, choice, *_ = self.tensor_map
        return rules is not None or is_chosen(choice, name)  # rules may give it another name

    def taken(self, plan: RankPlan) -> Set[str]:
        return self._opened().inventory.keys()

    def map_notes(self) -> tuple[str, ...]:
        whole, _, mapped, _, notes, *_ = self._opened()
        return (*self._notes(mapped), *notes, *self._nest_notes(whole))

    def cut_warnings(self, plan: RankPlan) -> tuple[str, ...]:
        rules = None if self.tensor_map is None else self.tensor_map.rules
        return tuple(target_warnings(self._opened().mapped.made, plan, rules))

    def completed(self, plan: RankPlan, *, checked: bool) -> RankPlan:
        """Return a target's plan with what planning the checkpoint as it is has shown.

        checked: as in `Conversion.plan`; what is checked is checked by the first call.
        """
        if checked and not self._is_checked:
            made = self._opened()
            whole = self._conversion.checked(made.plan)
            self.check_values()
            self._require_nobodys_own(made, whole)
            self._made, self._is_checked = made._replace(plan=whole), True
        whole, _, mapped, *_, warnings = self._opened()
        taken = {name for tensor in mapped.made for name in tensor.sources.values()}
        known_sums = set(notes_on(self._conversion.accumulated, whole.sums))  # said of the target, if it has them
        whole_notes = (note for note in whole.notes if note not in known_sums)
        kinds_of_sums = {sums_like(name) for name in taken if is_partial_sum(name)}
        return plan._replace(
            moments=(*plan.moments, *whole.moments),
            absent=(*plan.absent, *whole.absent),
            notes=(*whole_notes, *self.map_notes(), *plan.notes),
            differing=(*whole.differing, *plan.differing),
            alike=whole.alike,
            lost=whole.lost,
            warnings=(*whole.warnings, *mapped.cautions, *warnings, *plan.warnings),
            left_out=(*whole.left_out, *plan.left_out),
            sums=tuple(sums for sums in whole.sums if sums.names in kinds_of_sums),
        )

    def check_values(self) -> None:
        """Raise MapError if tensors of which one is taken for all differ, or padding holds anything but zeros."""
        made = self._opened()
        require_equal(self._conversion, made.plan, made.mapped)
        require_padding(self._conversion, made.plan, made.mapped)

    @property
    def _conversion(self) -> Conversion:
        assert self.original is not None
        return self.original

    def _opened(self) -> _Made:
        if self._made is None:
            assert self.tensor_map is not None
            plan = self._conversion.plan(0, checked=False)
            inventory = {
                name: Kind(group.kind.dtype, group.kind.global_shape)
                for name, group in ((name, group) for group in plan.tensors.groups for name in group.names)
            }
            in_order = {name: inventory[name] for name in plan.tensors.specs.names}
            rules, choice, forward, like, _ = self.tensor_map
            nest = plan.strings.get(NEST)
            tied = {} if nest is None else tied_tensors(self.stored, in_order)
            made = applied_to_file(rules, choice, in_order, SourceFile(nest, tied, self.files.path), forward, like)
            if self._conversion.accumulated is Accumulated.SUM:
                require_known_sums(made.mapped, self.files.path)
            require_holdable(made.mapped)
            mapped = made.mapped._replace(constants=(*made.mapped.constants, *self._computed(made.mapped, plan)))
            rank = min(plan.read_ranks, default=0)
            tensors = MappedTensors(self.files.path, mapped, plan.tensors, rank, plan.holes)
            strings = {name: text for name, text in plan.strings.items() if name != NEST}
            if made.nest is not None:
                strings[NEST] = made.nest
            manifest = Manifest(self.files.path, self.files.format, tensors, strings)
            needed = self._needed(mapped)
            plan = _comparing_only(plan, needed)
            is_cut = self.stored.strategy.world_size > 1  # the pieces of an index say only who has written what
            warnings = tuple(source_warnings(self._wanted(mapped), plan, rules)) if is_cut else ()
            self._made = _Made(plan, in_order, mapped, manifest, made.notes, needed, warnings)
        return self._made

    def _wanted(self, mapped: Mapped) -> list[Made]:
        """Return the tensors that targets have; others are left out by their strategy."""
        names = {tensor.name for tensor in mapped.made}
        return [tensor for tensor in mapped.made if self.is_wanted(tensor.name, names)]

    def _needed(self, mapped: Mapped) -> frozenset[str]:
        needed = {name for tensor in self._wanted(mapped) for name in tensor.sources.values()}
        needed.update(name for equal in mapped.equal for name in equal.names)
        needed.update(pads.name for pads in mapped.pads)
        return frozenset(needed | set(mapped.counted.names))

    def _computed(self, mapped: Mapped, plan: RankPlan) -> Iterator[Constant]:
        """Yield the tensors that are computed of single numbers of the source."""
        if not (mapped.computed or mapped.counted.numbers):
            return
        self._conversion.before_gathering()
        places = plan.tensors.places
        with Files() as files:

            def read(name: str) -> float:
                tensor = tensor_at(plan, places[name])
                content = only_element(files, tensor, self._conversion.limits)
                return unpacked(content, tensor.spec.dtype, name, self.files.path)

            for number, element in values_of(mapped.computed, mapped.counted, mapped.settings, read):
                yield Constant(number.name, number.kind, element, number.where)

    def _notes(self, mapped: Mapped) -> Iterator[str]:
        """Yield what the user must know of what the map makes."""
        if mapped.direction is not None and self.tensor_map is not None and self.tensor_map.rules is not None:
            made = sum(1 for tensor in mapped.made if tensor.where)
            yield f"the map {self.tensor_map.rules.where}, read {mapped.direction}, makes {counted(made, 'tensor')}"
            kept = [next(iter(tensor.sources.values())) for tensor in self._wanted(mapped) if not tensor.where]
            if kept:
                yield f"no equation takes {shortened(kept)}; names and shapes stay as they are"
        with_parameters = frozenset(mapped.states_left_out)
        left_out = [name for name in mapped.left_out if name not in with_parameters]
        if left_out:
            yield f"left out: {shortened(left_out)}"
        if with_parameters:
            yield f"left out with the parameters whose state they are: {shortened(mapped.states_left_out)}"
        if mapped.constants:
            yield f"made up: {shortened([tensor.name for tensor in mapped.constants])}"
        dropped = [(pads.name, sum(box.size for box in pads.boxes)) for pads in mapped.pads if pads.are_dropped]
        if dropped:
            elements = sum(size for _, size in dropped)
            names = shortened([name for name, _ in dropped])
            yield f"{elements} elements of padding are dropped, whatever they hold: {names}"

    def _nest_notes(self, whole: RankPlan) -> Iterator[str]:
        """Yield what becomes of what is neither tensor nor text."""
        like = None if self.tensor_map is None else self.tensor_map.like
        own, made = whole.strings.get(NEST), self._opened().manifest.strings.get(NEST)
        if like is None or made == own:
            return
        if made is None:
            yield f"left out, since {like.path} has no such thing: {shown_string(NEST)}"
        else:
            other = first_difference(own, made)
            where = f"the first other one is {other}" if other else "tensors are nested otherwise"
            yield f"{shown_string(NEST)}: as in {like.path}, with the values of the source that both have; {where}"

    def _require_nobodys_own(self, made: _Made, whole: RankPlan) -> None:
        """Raise DisagreementError if each rank has its own of something that all targets would get from one of them.

        whole: the plan of the checkpoint with what its checks found.
        """
        taken = {name for tensor in self._wanted(made.mapped) for name in tensor.sources.values()}
        own = (check.name for check in made.plan.checks if check.why == OWN and check.name in taken)
        for name in own if self.is_rank_by_rank else ():
            if any(tensor.name == name for tensor in whole.differing):
                raise DisagreementError(
                    f"each rank has its own {name!r}, and all targets would have that of one",
                    expected="the same on all ranks, with a map, types or a choice",
                    got=f"different ones on {self.stored.strategy.world_size} ranks",
                    where=self.files.path,
                    remedy=f"leave it out (--exclude {name!r}); only a run without --map, --dtype, --include and"
                    " --exclude keeps it",
                )


def _comparing_only(plan: RankPlan, names: Container[str]) -> RankPlan:
    """Return a plan without comparisons of other tensors than these."""
    alike = (group._replace(names=tuple(name for name in group.names if name in names)) for group in plan.alike)
    return plan._replace(
        checks=tuple(check for check in plan.checks if check.name in names),
        alike=tuple(group for group in alike if group.names),
    )
