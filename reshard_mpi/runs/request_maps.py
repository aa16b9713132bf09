"""Read the maps of a request (`TensorMap`), find tied tensors, and check maps against values and cuts.

Halves of `[(f + f) h]` are all of the first tensor and all of the second. FSDP cuts so. Under tensor parallelism each
rank has a part of both, which is another tensor as a whole; no byte tells which of the two a file is.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.first_difference import first_difference_of_tensors, first_nonzero
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import element_of
from reshard_mpi.errors import MapError, StrategyError, UsageError
from reshard_mpi.formats.dtypes import DType, numbers
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorTable, TensorType
from reshard_mpi.mapping.map_file import read_rules
from reshard_mpi.mapping.numbered_state import named_tensors, training_in
from reshard_mpi.mapping.result import DerivedTensor, Equal, MapResult
from reshard_mpi.mapping.rules import TYPES, Rules
from reshard_mpi.mapping.selection import Selection, TargetTemplate
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.rank_plan import RankPlan, TensorPlan
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.text import counted, did_you_mean, shortened

_MAX_MAPS_LENGTH = 1 << 15


class TensorMap(NamedTuple):
    """A request's maps, types and selection."""

    # of maps that are applied one after another; if there are none, every tensor keeps its name and shape
    rules: tuple[Rules, ...]
    # choice, like: of what the last one makes
    choice: Selection
    forward: bool | None  # the direction in which they are read; None: as the names tell
    like: TargetTemplate | None
    digests: Mapping[str, str]  # of what decides what the rules make, by the names of the options

    @classmethod
    def read(cls, request: Request) -> TensorMap:
        """Read the map, the types and the selection that a request names.

        Raises MapError if the map cannot be read, UsageError for options that do not belong together.
        """
        if not request.map:
            options = {"--forward": request.forward, "--reverse": request.reverse}
            for option, given in (options | {"--axis": request.axis, "--like": request.like}).items():
                if given:
                    raise UsageError(f"{option} belongs to a map", expected="--map as well", got="no --map")
        choice = Selection(request.include or None, request.exclude, tuple(map(_typed, request.dtype)))
        length = sum(map(len, request.map))
        if length > _MAX_MAPS_LENGTH:  # records of runs hold them
            raise UsageError(
                "the maps are too long together",
                expected=f"{_MAX_MAPS_LENGTH} characters at most",
                got=str(length),
                remedy="put equations into a file (reshard-mpi help maps)",
            )
        lengths = _lengths(request.axis)
        read = [read_rules(name, request.config, lengths) for name in request.map]
        _require_axes(lengths, [rules for rules, _ in read])
        digests = {key: text for _, digests_of_one in read for key, text in digests_of_one.items()}
        if len(read) > 1:
            in_order = " ".join(digests_of_one["map"] for _, digests_of_one in read)
            digests["map"] = hashlib.sha256(in_order.encode()).hexdigest()
        like = None if request.like is None else _like(request.like)
        forward = request.forward if request.forward or request.reverse else None
        if like is not None:  # wherever it lies
            digests["like"] = hashlib.sha256(repr(like._replace(path="")).encode()).hexdigest()
        return cls(tuple(rules for rules, _ in read), choice, forward, like, digests)

    def of_two_checkpoints(self) -> TensorMap:
        """Return the same for one of two checkpoints: globs may match tensors of the other one only."""
        return self._replace(choice=self.choice._replace(may_match_none=True))

    def without_choice(self) -> TensorMap:
        """Return the same without a selection, which is made later."""
        return self._replace(choice=self.choice._replace(include=None, exclude=()))

    def choice_alone(self) -> TensorMap:
        """Return the selection alone, for a checkpoint that already is in the map's result form."""
        return self._replace(rules=(), forward=None, like=None, choice=self.choice._replace(types=()), digests={})


def _lengths(words: Iterable[str]) -> dict[str, int]:
    """Return the lengths of axes of `--axis NAME=LENGTH`. Raises UsageError if one has two."""
    lengths: dict[str, int] = {}
    for axis, _, length in (word.partition("=") for word in words):
        if lengths.setdefault(axis, int(length)) != int(length):
            raise UsageError(
                "--axis gives an axis two lengths", expected="one", got=f"{axis}={lengths[axis]} and {axis}={length}"
            )
    return lengths


def _require_axes(lengths: Mapping[str, int], rules: Sequence[Rules]) -> None:
    """Raise UsageError for a length of an axis that no map has."""
    known = sorted({axis for each in rules for axis in each.all_axes})
    for axis, length in lengths.items():
        if axis not in known:
            raise UsageError(
                f"--axis {axis}={length} is of no axis of the map{did_you_mean(axis, known)}",
                expected=", ".join(known) or "none: its equations have no axes",
                got=axis,
                where=", ".join(each.where for each in rules),
            )


def _typed(text: str) -> tuple[str, DType]:
    """Return the glob and the type of `--dtype TYPE` or `--dtype GLOB=TYPE`."""
    glob, equals, name = text.rpartition("=")
    if name not in TYPES or (equals and not glob):
        short = next((short for short, dtype in TYPES.items() if dtype.name == name), None)
        raise UsageError(
            "--dtype is no type" + ("" if short is None else f"; did you mean {short!r}?"),
            expected=f"TYPE or GLOB=TYPE, TYPE one of {', '.join(TYPES)}",
            got=text,
        )
    return glob or "*", TYPES[name]


def _like(path: str) -> TargetTemplate:
    """Read the names and shapes of a checkpoint."""
    files = discovery.find_shards(path, role="checkpoint that the target is to be like")
    source = open_source(files, None)
    plan = Planner(source, unsharded()).plan(0, checked=False)
    inventory = {spec.name: TensorType(spec.dtype, spec.global_shape) for spec in plan.tensors.specs}
    shapes = {name: kind.shape for name, kind in inventory.items()}
    nest = plan.strings.get(NEST)
    training = training_in(nest, inventory, tied_tensors(source, shapes), path)
    named = named_tensors(training, shapes, path, is_stripped=True)
    plain = {name: shapes[in_file] for name, in_file in named.items()}
    return TargetTemplate(
        path, plain, nest, {name: in_file for name, in_file in named.items() if name != in_file}, training
    )


def tied_tensors(source: SourceCheckpoint, names: Collection[str]) -> Mapping[str, str]:
    """Return those tensors that are other ones once more in all files, with the name of the first of these."""
    tied: Mapping[str, str] | None = None
    for rank in sorted(source.files.by_rank):
        shard = None if tied == {} else source.find(rank)
        if shard is not None:
            in_shard = _tied_in(shard.tensors, names)
            tied = {name: other for name, other in in_shard.items() if tied is None or tied.get(name) == other}
    return tied or {}


def _tied_in(tensors: TensorTable, names: Collection[str]) -> dict[str, str]:
    if isinstance(tensors, ChunkedTensors):  # each is written by itself
        return {}
    first: dict[object, str] = {}
    tied = {}
    for name in names:
        entry = tensors.get(name)
        if entry is None or not entry.size_bytes:
            continue
        other = first.setdefault((entry.dtype, entry.shape, entry.source), name)
        if other != name:
            tied[name] = other
    return tied


# The boxes of one tensor, each with the name, without its numbers, of the tensor on the map's other side: layers or
# experts that are stacked are one kind, and a rank may well have only some of these.
Parts = list[tuple[str, Box]]
_NUMBER = re.compile(r"[0-9]+")


def target_warnings(derived: Iterable[DerivedTensor], plan: RankPlan, rules: Sequence[Rules]) -> Iterator[str]:
    """Yield warnings on how the target's strategy cuts tensors that the map fuses. plan: of one target.

    Raises StrategyError if the configuration of the model contradicts that cut.
    """
    by_name = {tensor.name: tensor for tensor in derived if len(tensor.sources) > 1}
    is_one_sided: dict[tuple[int, Box], bool] = {}
    names = []
    for group in plan.tensors.groups:
        box, whole = group.kind.own_box, group.kind.whole_shape
        if not by_name or box.shape == whole:
            continue
        for name in group.names:
            tensor = by_name.get(name)
            if tensor is None:
                continue
            key = (id(tensor.assembly), box)
            if key not in is_one_sided:
                parts = [(_kind(tensor.sources[pair.source]), pair.to) for pair in tensor.assembly.pairs]
                _require_cut_by_ranks(name, parts, box, whole, rules, "target")
                is_one_sided[key] = _is_one_sided(parts, box)
            if is_one_sided[key]:
                names.append(name)
    if names:
        yield _warning(names, "the target")


def source_warnings(derived: Iterable[DerivedTensor], plan: RankPlan, rules: Sequence[Rules]) -> Iterator[str]:
    """Yield warnings on how the source's strategy cuts fused tensors. plan: of the whole source.

    Raises StrategyError if the configuration of the model contradicts that cut.
    """
    parts_of = _parted(derived)
    names = []
    for group in plan.tensors.groups if parts_of else ():
        boxes = {route.source_box for route in group.routes if route.source_box != group.kind.box}
        for name in group.names if boxes else ():
            parts = parts_of.get(name, [])
            for box in boxes if parts else ():
                _require_cut_by_ranks(name, parts, box, group.kind.whole_shape, rules, "source")
            if any(_is_one_sided(parts, box) for box in boxes):
                names.append(name)
    if names:
        yield _warning(names, "the source")


def _require_cut_by_ranks(name: str, parts: Parts, box: Box, whole: Shape, rules: Sequence[Rules], side: str) -> None:
    """Raise StrategyError if a rank's box of several fused tensors certainly differs from a tensor-parallel rank's.

    Args:
        parts: of the tensors behind each other in `name`. A map that has a part of each tensor for every
            tensor-parallel rank in turn needs a strategy of as many ranks. By any map, a rank among several has some of
            each tensor.
        rules: of the maps that are applied one after another.
    """
    ranks = rules[0].tensor_parallel if rules else None  # all maps have one configuration
    parts = [(kind, part) for kind, part in parts if part.ndim == box.ndim]
    if ranks is None or not parts:
        return
    cut = [dim for dim in range(box.ndim) if any(box.shape[dim] < whole[dim] > part.shape[dim] for _, part in parts)]
    turns = min(Counter(kind for kind, _ in parts).values())
    is_of_other_ranks = (
        any(each.cuts_by_rank for each in rules)
        and turns == ranks
        and any(box.shape[dim] * ranks != whole[dim] for dim in cut)
    )
    if is_of_other_ranks or (ranks > 1 and _is_one_sided(parts, box)):
        count = max((-(-whole[dim] // max(1, box.shape[dim])) for dim in cut), default=1)
        raise StrategyError(
            f"the strategy of the {side} contradicts the configuration of the model: several tensors lie behind each"
            f" other in {name!r}, in parts for other ranks",
            expected=f"{name!r} whole, or cut so that each of {counted(ranks, 'rank')} has a part of each of these"
            " tensors, as tensor_model_parallel_size says",
            got=f"it is cut in {count}, and a rank has {list(box.shape)} of {list(whole)}",
            where=", ".join(each.where for each in rules),
            remedy="correct tensor_model_parallel_size in the file of --config, or the strategy; for tensor parallelism"
            " take the map that has parts for ranks (hf-llama-megatron-tp), for FSDP alone the one that has not"
            " (hf-llama-megatron) and a configuration without this key",
        )


def _parted(derived: Iterable[DerivedTensor]) -> Mapping[str, Parts]:
    """Return the source tensors from which tensors of several kinds are made."""
    kinds: dict[str, set[str]] = {}
    users: dict[str, list[DerivedTensor]] = {}
    for tensor in derived:
        for name in tensor.sources.values():
            kinds.setdefault(name, set()).add(_kind(tensor.name))
            users.setdefault(name, []).append(tensor)
    return {
        name: [
            (_kind(tensor.name), pair.region)
            for tensor in users[name]
            for pair in tensor.assembly.pairs
            if tensor.sources[pair.source] == name
        ]
        for name, of_name in kinds.items()
        if len(of_name) > 1
    }


def _is_one_sided(parts: Parts, box: Box) -> bool:
    met: Set[str] = {kind for kind, part in parts if part.ndim == box.ndim and part.intersect(box) is not None}
    return bool(met) and met != {kind for kind, _ in parts}


def _kind(name: str) -> str:
    return _NUMBER.sub("#", name)


def _warning(names: list[str], side: str) -> str:
    return (
        f"the map has several tensors behind each other in {shortened(names)}, and the strategy of {side} gives a rank"
        " only some of these: FSDP cuts so, but under tensor parallelism each rank has a part of each (see reshard-mpi"
        " help maps)"
    )


def require_equal(planner: Planner, plan: RankPlan, mapped: MapResult) -> None:
    """Raise MapError if tensors differ that the map takes for equal. plan: of the source as one full checkpoint."""
    places = plan.tensors.places if mapped.equal else {}
    for equal in mapped.equal:
        tensors = [tensor_at(plan, places[name]) for name in equal.names]
        for other in tensors[1:]:
            _require_same(planner, tensors[0], other, equal)


def _require_same(planner: Planner, first: TensorPlan, other: TensorPlan, equal: Equal) -> None:
    if (first.spec.dtype, first.spec.global_shape) != (other.spec.dtype, other.spec.global_shape):
        element = None
    else:
        planner.before_gathering()
        with Files() as files:
            element = first_difference_of_tensors(files, first, other, planner.limits)
        if element is None:
            return
    where = f"a difference at element {list(element)}" if element is not None else "other types or shapes"
    raise MapError(
        "one tensor is taken for several, and they differ",
        expected=f"the same in {first.spec.name} and {other.spec.name}",
        got=where,
        where=f"{planner.source.files.path}, by {equal.where}",
        remedy="save them as one and the same, or give each an equation of its own",
    )


def require_padding(planner: Planner, plan: RankPlan, mapped: MapResult) -> None:
    """Raise MapError if padding that must be zero is not. plan: as for `require_equal`."""
    places = plan.tensors.places if mapped.pads else {}
    for pads in mapped.pads:
        if pads.are_dropped:
            continue
        planner.before_gathering()
        tensor = tensor_at(plan, places[pads.name])
        with Files() as files:
            for box in pads.boxes:
                element = first_nonzero(files, tensor, box, planner.limits)
                if element is None:
                    continue
                value = numbers(element_of(files, tensor, element, planner.limits), tensor.spec.dtype)[0]
                if box == tensor.spec.box:
                    problem = f"{pads.name} is left out, and is not zero"
                    remedy = "leave zeros = true out of the entry of the map if it may be lost"
                else:
                    problem = f"the padding of {pads.name} is not zero"
                    remedy = 'say pads = "drop" in the entry of the map if it may be thrown away, though it may'
                    remedy += " have been trained"
                raise MapError(
                    problem,
                    expected=f"zeros in {box}, of all bits 0",
                    got=f"{value} at element {list(element)}",
                    where=f"{planner.source.files.path}, by {pads.where}",
                    remedy=remedy,
                )


def tensor_at(plan: RankPlan, group_and_place: tuple[int, int]) -> TensorPlan:
    """Return the tensor at a place in a plan. Raises the error for which it cannot be made."""
    group, place = group_and_place
    name = plan.tensors.groups[group].names[place]
    if name in plan.holes:
        raise plan.holes[name].with_traceback(None)
    return plan.tensors.groups[group].tensor(place)


def require_known_sums(mapped: MapResult, path: str) -> None:
    """Raise MapError if a name is an accumulated gradient's before the map and another tensor's after it, or the
    reverse.

    One of several target ranks gets a sum, and the others zeros; which tensors are sums is known by their names.
    """
    for tensor in mapped.made:
        sources = {tensor.sources[pair.source] for pair in tensor.assembly.pairs}
        if sources and {is_partial_sum(tensor.name)} != set(map(is_partial_sum, sources)):
            raise MapError(
                f"the map makes {tensor.name!r} of {shortened(sorted(sources))}, and only one side is known as sums",
                expected="accumulated gradients with names such as accu_grads.<parameter> on both sides"
                " (--accumulated sum)",
                got=f"{tensor.name!r} in the target",
                where=f"{path}, by {tensor.where}" if tensor.where else path,
                remedy="call them so on both sides, and rename them afterwards by another run",
            )
