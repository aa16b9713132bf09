"""Tensors that a map puts behind each other in one, where a strategy gives a rank some of them and nothing of others.

Halves of `[(f + f) h]` are all of the first tensor and all of the second. FSDP cuts so. Under tensor parallelism each
rank has a part of both, which is another tensor as a whole; no byte tells which of the two a file is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from reshard_mpi.errors import StrategyError
from reshard_mpi.mapping.made import Made
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.text import counted, shortened

# The boxes of one tensor, each with the name, without its numbers, of the tensor on the map's other side: layers or
# experts that are stacked are one kind, of which a rank may well have only some.
Parts = list[tuple[str, Box]]
_NUMBER = re.compile(r"[0-9]+")


def target_warnings(made: Iterable[Made], plan: RankPlan, rules: Sequence[Rules]) -> Iterator[str]:
    """Yield what must be known of how the strategy of the targets cuts what is made. plan: that of one target.

    Raises StrategyError if the configuration of the model contradicts that cut.
    """
    by_name = {tensor.name: tensor for tensor in made if len(tensor.sources) > 1}
    known: dict[tuple[int, Box], bool] = {}
    names = []
    for group in plan.tensors.groups:
        box, whole = group.kind.box, group.kind.global_shape
        if not by_name or box.shape == whole:
            continue
        for name in group.names:
            tensor = by_name.get(name)
            if tensor is None:
                continue
            key = (id(tensor.shape), box)
            if key not in known:
                parts = [(_kind(tensor.sources[pair.source]), pair.to) for pair in tensor.shape.pairs]
                _require_cut_by_ranks(name, parts, box, whole, rules, "target")
                known[key] = _is_one_sided(parts, box)
            if known[key]:
                names.append(name)
    if names:
        yield _warning(names, "the target")


def source_warnings(made: Iterable[Made], plan: RankPlan, rules: Sequence[Rules]) -> Iterator[str]:
    """Yield what must be known of how the strategy of the source cuts what is taken apart. plan: that of it whole.

    Raises StrategyError if the configuration of the model contradicts that cut.
    """
    parts_of = _parted(made)
    names = []
    for group in plan.tensors.groups if parts_of else ():
        boxes = {route.source_box for route in group.routes if route.source_box != group.kind.box}
        for name in group.names if boxes else ():
            parts = parts_of.get(name, [])
            for box in boxes if parts else ():
                _require_cut_by_ranks(name, parts, box, group.kind.global_shape, rules, "source")
            if any(_is_one_sided(parts, box) for box in boxes):
                names.append(name)
    if names:
        yield _warning(names, "the source")


def _require_cut_by_ranks(name: str, parts: Parts, box: Box, whole: Shape, rules: Sequence[Rules], side: str) -> None:
    """Raise StrategyError if a rank's box is certainly not what a tensor-parallel rank has of several tensors.

    parts: of the tensors behind each other in `name`. A map that has a part of each tensor for every tensor-parallel
    rank in turn needs a strategy of as many ranks. By any map, a rank among several has some of each tensor.
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


def _parted(made: Iterable[Made]) -> Mapping[str, Parts]:
    """Return the source tensors of which tensors of several kinds are made."""
    kinds: dict[str, set[str]] = {}
    users: dict[str, list[Made]] = {}
    for tensor in made:
        for name in tensor.sources.values():
            kinds.setdefault(name, set()).add(_kind(tensor.name))
            users.setdefault(name, []).append(tensor)
    return {
        name: [
            (_kind(tensor.name), pair.region)
            for tensor in users[name]
            for pair in tensor.shape.pairs
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
