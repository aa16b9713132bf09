"""A source checkpoint as a map makes it: one full checkpoint of one rank, in the names, shapes and types of the target.

The checkpoint is planned as one full one, in its own names and by its own strategy, with all the checks that belong to
that. Nothing is read of it but its structure, and what a map says is equal or padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.source import Extent, SourceCheckpoint
from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import first_difference_of_tensors, first_nonzero
from reshard_mpi.errors import MapError, ReshardError, UsageError
from reshard_mpi.formats.dtypes import DType, numbers
from reshard_mpi.formats.manifest import NEST, Manifest, shown_string
from reshard_mpi.formats.nest import first_difference
from reshard_mpi.mapping.likeness import Like
from reshard_mpi.mapping.mapped import Choice, Equal, Mapped, applied
from reshard_mpi.mapping.matching import Inventory, Kind
from reshard_mpi.mapping.reading import read_rules
from reshard_mpi.mapping.rules import TYPES, Rules
from reshard_mpi.planning.losses import Lost, Missing
from reshard_mpi.planning.mapped import MappedTensors
from reshard_mpi.planning.model import RankPlan, TensorPlan
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.placement import unsharded

_MAX_NAMED = 5


class TensorMap(NamedTuple):
    """What a request says of names, shapes and types.

    rules: None: every tensor keeps its name and shape. forward: the direction in which the rules are read; None: as the
    names tell. like: the checkpoint that the target is to be like. digest: of the files that the rules come from; empty
    if there are none.
    """

    rules: Rules | None
    choice: Choice
    forward: bool | None
    like: Like | None
    digest: str

    @classmethod
    def read(cls, request: Request) -> TensorMap:
        """Read the map that a request names, and what it says of types and of which tensors are taken.

        Raises MapError if the map cannot be read, UsageError for options that do not belong together.
        """
        if request.map is None:
            options = {"--config": request.config, "--forward": request.forward, "--reverse": request.reverse}
            for option, given in (options | {"--like": request.like}).items():
                if given:
                    raise UsageError(f"{option} belongs to a map", expected="--map FILE|NAME as well", got="no --map")
        choice = Choice(request.include or None, request.exclude, tuple(map(_typed, request.dtype)))
        rules, digest = read_rules(request.map, request.config) if request.map is not None else (None, "")
        like = None if request.like is None else _like(request.like)
        forward = request.forward if request.forward or request.reverse else None
        digest = digest if like is None else hashlib.sha256(repr((digest, like)).encode()).hexdigest()
        return cls(rules, choice, forward, like, digest)


def _like(path: str) -> Like:
    """Read the names and shapes of a checkpoint."""
    files = discovery.find_shards(path, role="checkpoint that the target is to be like")
    plan = Conversion(SourceCheckpoint.open(files, None), unsharded()).plan(0, checked=False)
    return Like(path, {spec.name: spec.global_shape for spec in plan.tensors.specs}, plan.strings.get(NEST))


def _nested_like(strings: Mapping[str, str], like: Like | None) -> dict[str, str]:
    """Return the strings of a checkpoint, nested as the target is to be."""
    if like is None:
        return dict(strings)
    others = {name: text for name, text in strings.items() if name != NEST}
    return others if like.nest is None else {**others, NEST: like.nest}


def _typed(text: str) -> tuple[str, DType]:
    """Return the glob and the type of `--dtype TYPE` or `--dtype GLOB=TYPE`."""
    glob, equals, name = text.rpartition("=")
    if name not in TYPES or (equals and not glob):
        raise UsageError("--dtype is no type", expected=f"TYPE or GLOB=TYPE, TYPE one of {', '.join(TYPES)}", got=text)
    return glob or "*", TYPES[name]


class _Made(NamedTuple):
    """The checkpoint planned as one full one, its tensors, what the map makes of them, and that as a shard."""

    plan: RankPlan
    inventory: Inventory
    mapped: Mapped
    manifest: Manifest


def conversion_through(tensor_map: TensorMap, conversion: Conversion) -> Conversion:
    """Return a conversion of what a map makes of the source."""

    def through(original: Conversion) -> SourceCheckpoint:
        return MappedCheckpoint.of(original, tensor_map)

    original = Conversion(conversion.source, unsharded(), strict=conversion.strict, replicas=conversion.replicas)
    return replace(conversion, source=through(original), original=original, through=through)


@dataclass(slots=True)
class MappedCheckpoint(SourceCheckpoint):
    """The source checkpoint of `original` as a map makes it. Its files are those of that; it has one rank, 0."""

    original: Conversion | None = field(default=None)
    tensor_map: TensorMap | None = field(default=None)
    _made: _Made | None = field(default=None)
    _is_checked: bool = field(default=False)

    @classmethod
    def of(cls, original: Conversion, tensor_map: TensorMap) -> MappedCheckpoint:
        """Return what a map makes of the source of `original`, a conversion of it to one full checkpoint."""
        files = original.source.files
        return cls(files, unsharded(files.path), original=original, tensor_map=tensor_map)

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

    def check_crc(self, rank: int) -> ReshardError | None:
        return self.stored.check_crc(rank)

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
        self._made = None

    def stage_ranks(self) -> dict[int, int]:
        return {0: 0}

    def shown_tensors(self) -> Iterator[str]:
        made = self._opened()
        dtypes = {name: kind.dtype for name, kind in made.inventory.items()}
        for tensor in made.mapped.made:
            sources = list(dict.fromkeys(tensor.sources[pair.source] for pair in tensor.shape.pairs))
            before = {dtypes[name] for name in sources} - {tensor.dtype}
            types = f", converted from {' and '.join(map(str, before))}" if before else ""
            origin = f"{_named(sources)}, by {tensor.where}" if tensor.where else "as it is"
            zeros = f", {sum(box.size for box in tensor.shape.zeros)} zeros" if tensor.shape.zeros else ""
            yield f"{tensor.name} {tensor.dtype} {list(tensor.shape.shape)}: {origin}{zeros}{types}"
        for name, kind, element, where in made.mapped.constants:
            yield f"{name} {kind.dtype} {list(kind.shape)}: made up of {numbers(element, kind.dtype)[0]}, by {where}"
        for name in made.mapped.left_out:
            yield f"{name}: left out"

    def completed(self, plan: RankPlan, *, checked: bool) -> RankPlan:
        """Return a target's plan with what planning the checkpoint as it is has shown.

        checked: as in `Conversion.plan`; what is checked is checked by the first call.
        """
        if checked and not self._is_checked:
            made = self._opened()
            whole = self._conversion.checked(made.plan)
            self.check_values()
            self._made, self._is_checked = made._replace(plan=whole), True
        whole, _, mapped, _ = self._opened()
        return plan._replace(
            moments=(*plan.moments, *whole.moments),
            absent=(*plan.absent, *whole.absent),
            notes=(*whole.notes, *self._notes(mapped), *self._nest_notes(whole), *plan.notes),
            alike=whole.alike,
            lost=whole.lost,
            warnings=(*whole.warnings, *plan.warnings),
            left_out=(*whole.left_out, *plan.left_out),
        )

    def check_values(self) -> None:
        """Raise MapError if tensors of which one is taken for all differ, or padding holds anything but zeros."""
        made = self._opened()
        self._require_equal(made)
        self._require_padding(made)

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
            mapped = applied(rules, choice, in_order, forward, like)
            rank = min(plan.read_ranks, default=0)
            tensors = MappedTensors(self.files.path, mapped, plan.tensors, rank)
            strings = _nested_like(plan.strings, like)
            manifest = Manifest(self.files.path, self.files.format, tensors, strings)
            self._made = _Made(plan, in_order, mapped, manifest)
        return self._made

    def _notes(self, mapped: Mapped) -> Iterator[str]:
        """Yield what the user must know of what the map makes."""
        if mapped.direction is not None and self.tensor_map is not None and self.tensor_map.rules is not None:
            made = sum(1 for tensor in mapped.made if tensor.where)
            yield f"the map {self.tensor_map.rules.where}, read {mapped.direction}, makes {made} tensors"
            if mapped.kept:
                yield f"no equation takes {_named(mapped.kept)}; names and shapes stay as they are"
        if mapped.left_out:
            yield f"left out: {_named(mapped.left_out)}"
        if mapped.constants:
            yield f"made up: {_named([tensor.name for tensor in mapped.constants])}"
        dropped = [(pads.name, sum(box.size for box in pads.boxes)) for pads in mapped.pads if pads.are_dropped]
        if dropped:
            elements = sum(size for _, size in dropped)
            names = _named([name for name, _ in dropped])
            yield f"{elements} elements of padding are dropped, whatever they hold: {names}"

    def _nest_notes(self, whole: RankPlan) -> Iterator[str]:
        """Yield what becomes of what is neither tensor nor text."""
        like = None if self.tensor_map is None else self.tensor_map.like
        own = whole.strings.get(NEST)
        if like is None or like.nest == own:
            return
        if like.nest is None:
            yield f"left out, since {like.path} has no such thing: {shown_string(NEST)}"
        else:
            where = first_difference(own, like.nest) or "how tensors are nested"
            yield f"{shown_string(NEST)}: that of {like.path}, which differs from that of the source: {where}"

    def _require_equal(self, made: _Made) -> None:
        places = made.plan.tensors.places if made.mapped.equal else {}
        for equal in made.mapped.equal:
            tensors = [_tensor(made, places[name]) for name in equal.names]
            for other in tensors[1:]:
                self._require_same(tensors[0], other, equal)

    def _require_same(self, first: TensorPlan, other: TensorPlan, equal: Equal) -> None:
        if (first.spec.dtype, first.spec.global_shape) != (other.spec.dtype, other.spec.global_shape):
            element = None
        else:
            self._conversion.before_gathering()
            with Files() as files:
                element = first_difference_of_tensors(files, first, other, self._conversion.limits)
            if element is None:
                return
        where = f"a difference at element {list(element)}" if element is not None else "other types or shapes"
        raise MapError(
            "one tensor is taken for several, and they differ",
            expected=f"the same in {first.spec.name} and {other.spec.name}",
            got=where,
            where=f"{self.files.path}, by {equal.where}",
        )

    def _require_padding(self, made: _Made) -> None:
        places = made.plan.tensors.places if made.mapped.pads else {}
        for pads in made.mapped.pads:
            if pads.are_dropped:
                continue
            self._conversion.before_gathering()
            tensor = _tensor(made, places[pads.name])
            with Files() as files:
                for box in pads.boxes:
                    element = first_nonzero(files, tensor, box, self._conversion.limits)
                    if element is not None:
                        raise MapError(
                            f"the padding of {pads.name} is not zero",
                            expected=f"zeros in {box}",
                            got=f"another value at element {list(element)}",
                            where=f"{self.files.path}, by {pads.where}",
                            remedy='say pads = "drop" in the entry of the map if it may be thrown away, though it may'
                            " have been trained",
                        )


def _tensor(made: _Made, at: tuple[int, int]) -> TensorPlan:
    group, place = at
    return made.plan.tensors.groups[group].tensor(place)


def _named(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
