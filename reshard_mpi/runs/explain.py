"""Explain in words where a target's tensor comes from (`explained`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import UsageError
from reshard_mpi.formats.locations import Constant, LibraryRead
from reshard_mpi.formats.tensor_table import ChunkedTensors
from reshard_mpi.groups import grouped
from reshard_mpi.planning.rank_plan import RankPlan, ReadItem
from reshard_mpi.planning.source_tensors import SourceGroup
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.open_run import Run, open_for_planning
from reshard_mpi.runs.outcome import Outcome, agreed
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import Progress, Words, complain
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import Strategy, Unlisted, find_or_follow, placing_name
from reshard_mpi.sharding.toml_spec import place_of_layout, place_of_rule
from reshard_mpi.text import counted, did_you_mean, format_bytes, number_ranges, one_line, shortened


class TensorLineage(NamedTuple):
    """The sources of a target's tensor."""

    sources: tuple[str, ...]  # the names of source tensors, in the order in which they are met
    by: str  # the place of the equation, or of the entry that makes it up, in the map; empty where it stays as it is
    # for each part that a map makes, its box in the target's tensor and the name of the source tensor; None where there
    # is no map
    boxes: tuple[tuple[Box, str], ...] | None = None

    def source_of(self, region: Box) -> str | None:
        """Return the source tensor that a region of the target's tensor comes from; None if it is made up."""
        if self.boxes is None:
            return self.sources[0]
        return next((name for box, name in self.boxes if box.contains(region)), None)


def origin_of(planner: Planner, name: str) -> TensorLineage:
    """Return the sources of the tensor `name` of a target."""
    if planner.mapped is None:
        return TensorLineage((name,), "")
    from reshard_mpi.mapping.result import DerivedTensor

    recipe = planner.mapped.recipe(name)
    if not isinstance(recipe, DerivedTensor):
        return TensorLineage((), recipe.where if recipe is not None else "", ())
    boxes = tuple((pair.to, recipe.sources[pair.source]) for pair in recipe.assembly.pairs)
    return TensorLineage(tuple(dict.fromkeys(source for _, source in boxes)), recipe.where, boxes)


def source_groups(planner: Planner, target_rank: int, names: tuple[str, ...]) -> Mapping[str, SourceGroup]:
    """Return how the source holds the tensors that are read for a target."""
    both = planner.held(target_rank, names) if planner.mapped is None else planner.mapped.original.held(0, names)
    return {name: held.group for name, held in both.items()}


def listed_pieces(planner: Planner, name: str) -> Mapping[Box, Sequence[str]] | None:
    """Return the pieces of a source tensor that an index lists, with the files that have each; None if none does."""
    stored = planner.source
    tensors = stored.manifest(0).tensors if stored.files.is_folder else None
    if not isinstance(tensors, ChunkedTensors):
        return None
    pieces = tensors.chunk_lists[tensors.chunk_list_ids[tensors.index_by_name[name]]]
    return grouped((box, file.path) for box, file in pieces)


def likely_holders(target: Strategy, name: str) -> Sequence[int]:
    """Return target ranks, the likely holders of a tensor first: by their strategy, then others."""
    placements = find_or_follow(target, name, lambda _: True)
    stages = dict.fromkeys(stage for placement in placements for stage in placement.stages)
    return [stage * target.stage_size for stage in (*stages, *(s for s in range(target.stages) if s not in stages))]


def unknown_tensor(name: str, names_known: Iterable[str]) -> UsageError:
    """Return the error that no target has a tensor of this name."""
    names = list(names_known)
    return UsageError(
        "the target has no tensor of this name",
        expected=f"one of its {len(names)} tensors",
        got=f"{name!r}{did_you_mean(name, names)}",
        remedy="reshard-mpi plan -v lists them",
    )


# Copies explained of one target, and source tensors of one tensor.
_MOST_READS, _MOST_SOURCES = 100, 20


def explained(request: Request, comm: Comm, name: str) -> tuple[str, Outcome] | None:
    """Return lines that explain a tensor, and an outcome with notes and warnings, on the first process of `comm`.

    Returns None on the others; all of them must call this. The targets are those of the request, or the first that
    holds the tensor. Raises, the same on every process, UsageError if no target has the tensor, and the errors for
    which a run would be refused.
    """
    with RunProcess.begun(request, comm, Progress(Words(complain))) as process:
        return agreed(lambda: _explained(process, name) if comm.rank == 0 else None, comm)


def _explained(process: RunProcess, name: str) -> tuple[str, Outcome]:
    request = process.request
    run = open_for_planning(process, most_planned=len(request.rank or ()) + 1)
    planner = run.planner
    first = _first_holder(planner, name, request.rank or ())
    both = planner.held(first.target_rank, (name,))[name]
    origin = origin_of(planner, name)
    targets = planner.target.world_size
    size_bytes = math.prod(both.layout.shape) * both.group.dtype.itemsize_bytes
    lines = [f"{name}: {both.group.dtype} {list(both.layout.shape)}, {format_bytes(size_bytes)}"]
    lines += ["", f"source: {request.source}: {planner.source.summary_text}"]
    lines += [f"  {line}" for line in _source_lines(run, first.target_rank, origin)]
    lines += ["", f"target: {request.target}: {formats.title(run.format)}, {counted(targets, 'rank')}"]
    lines += [f"  {line}" for line in _target_lines(run, name, both.layout, _shapes(first))]
    outcomes = [Outcome.of(first)]
    for rank in run.targets if request.rank is not None else (first.target_rank,):
        plan = first if rank == first.target_rank else planner.plan(rank, checked=False)
        outcomes.append(Outcome.of(plan))
        lines += ["", *_rank_lines(run, plan, name, origin)]
    if request.rank is None and targets > 1:
        lines += ["", f"--rank R explains the other target ranks, 0 to {targets - 1}"]
    return "\n".join(map(one_line, lines)), Outcome.begun(planner).joined(outcomes)


def _first_holder(planner: Planner, name: str, ranks: Sequence[int]) -> RankPlan:
    """Return the plan of a target that holds a tensor: of one of `ranks`, if any of them does."""
    every_name: dict[str, None] = {}
    for rank in dict.fromkeys((*ranks, *likely_holders(planner.target, name))):
        plan = planner.plan(rank, checked=False)
        if planner.held(rank, (name,)):
            return plan
        every_name |= dict.fromkeys(held for group in plan.tensors.groups for held in group.names)
    if planner.mapped is not None and name in _shapes(planner.mapped.original.plan(0, checked=False)):
        becomes = [other for other in every_name if name in origin_of(planner, other).sources]
        raise UsageError(
            f"{name!r} is a tensor of the source",
            expected=f"one of the target, such as {shortened(becomes)}" if becomes else "one of the target",
            got=f"{name!r}, which goes into {shortened(becomes)}" if becomes else f"{name!r}, which the map leaves out",
        )
    raise unknown_tensor(name, every_name)


def _shapes(plan: RankPlan) -> dict[str, Shape]:
    return {name: group.kind.whole_shape for group in plan.tensors.groups for name in group.names}


def _source_lines(run: Run, target_rank: int, origin: TensorLineage) -> Iterator[str]:
    """Yield how the source holds the sources of a tensor."""
    planner, request = run.planner, run.request
    stored = planner.source
    if origin.by:
        made_of = f"made of {shortened(origin.sources)}" if origin.sources else "made up"
        yield f"{made_of}, by {origin.by}"
    shapes: Mapping[str, Shape] = {}
    if stored.strategy.world_size > 1:
        mapped = planner.mapped
        plan = planner.plan(target_rank, checked=False) if mapped is None else mapped.original.plan(0, checked=False)
        shapes = _shapes(plan)
    groups = source_groups(planner, target_rank, origin.sources[:_MOST_SOURCES])
    for name, group in groups.items():
        about = f"{name}: {group.dtype} {list(group.shape)}, " if len(origin.sources) > 1 or origin.by else ""
        if stored.files.is_folder:
            yield f"{about}in pieces that the index of {stored.files.path} lists"
            continue
        if stored.strategy.world_size == 1:
            yield f"{about}whole, in a full checkpoint"
            continue
        where = _entry(stored.strategy, name, shapes, request.src_strategy)
        if not group.listed or where is None:
            yield f"{about}whole on every rank, since the source's strategy does not place it"
            continue
        yield f"{about}placed by {where}"
        for layout in group.layouts:
            yield from _layout_lines(layout, stored.strategy)
    if len(origin.sources) > _MOST_SOURCES:
        yield f"and {len(origin.sources) - _MOST_SOURCES} more"


def _target_lines(run: Run, name: str, layout: Layout, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yield how the target holds a tensor, and what says so."""
    target, request = run.planner.target, run.request
    if request.dst_strategy is None:
        if target.world_size == 1:
            yield "whole, in one full checkpoint, since there is no --dst-strategy"
        else:
            yield "whole, in one of the files that are filled up to a size"
        return
    follows = run.planner.policy.unlisted is Unlisted.FOLLOW
    where = _entry(target, name, shapes if follows else None, request.dst_strategy)
    if where is None:
        yield f"whole on every rank, since the target's strategy does not list it (--unlisted {request.unlisted})"
        return
    yield f"placed by {where}"
    yield from _layout_lines(layout, target)


def _entry(strategy: Strategy, name: str, shapes: Mapping[str, Shape] | None, path: str | None) -> str | None:
    """Return what in a strategy places a tensor, and where that is written; None if nothing does.

    Args:
        shapes: the whole shapes of tensors, by which some follow others; None: none does.
        path: of the strategy's files; None: the shards say it themselves.
    """

    def fits(base: str) -> bool:
        return shapes is not None and shapes.get(base, shapes.get(name)) == shapes.get(name)

    placing = placing_name(strategy, name, fits)
    if placing is None:
        return None
    rule = strategy.rule_of(placing)
    if rule is not None and path is None:
        where = f"rule {rule + 1} of what the shards say of themselves ({strategy.origin})"
    elif rule is not None and path is not None:
        where = place_of_rule(path, rule)
    elif path is None:
        where = f"what the shards say of themselves ({strategy.origin}), entry {placing!r}"
    else:
        where = place_of_layout(path, placing)
    where += f", match {strategy.rules[rule][0]!r}" if rule is not None else ""
    return where if placing == name else f"that of {placing!r}, which it is named after: {where}"


def _layout_lines(layout: Layout, strategy: Strategy) -> Iterator[str]:
    """Yield how a tensor is cut, and how many ranks hold each piece."""
    placement = layout.placement
    stages = ""
    if strategy.stages > 1:
        stages = f" of stage{'s' if len(placement.stages) > 1 else ''} {number_ranges(placement.stages)}"
    if not placement.is_cut:
        yield f"not cut: whole on {counted(placement.replicas, 'rank')}{stages}"
        return
    mesh = ", ".join(f"{_axis(axis, strategy)}={length}" for axis, length in enumerate(placement.mesh))
    sizes = dict(placement.sizes)
    for dim, axes in enumerate(placement.split):
        if placement.slices(dim) > 1:
            over = " and ".join(_axis(axis, strategy) for axis in axes if placement.mesh[axis] > 1)
            uneven = f", of {shortened(sizes[dim], 16)}" if dim in sizes else ""
            yield f"dimension {dim} is cut into {placement.slices(dim)} over {over}{uneven} (mesh {mesh})"
    if placement.optimizer > 1:
        is_cut_before = any(placement.slices(dim) > 1 for dim in range(len(placement.split)))
        of_each = "each of these is cut along dimension 0" if is_cut_before else "dimension 0 is cut"
        yield f"{of_each} into {placement.optimizer} by the optimizer (mesh {mesh})"
    pieces = math.prod(placement.cuts(dim) for dim in range(len(layout.shape)))
    yield f"{pieces} pieces, each on {counted(placement.replicas, 'rank')}{stages}"


def _axis(axis: int, strategy: Strategy) -> str:
    """Return the name of a mesh axis, or its number from the left."""
    return strategy.axes[axis] if axis < len(strategy.axes) else f"axis {axis}"


def _rank_lines(run: Run, plan: RankPlan, name: str, origin: TensorLineage) -> Iterator[str]:
    """Yield the boxes of a tensor in a target, and their sources."""
    rank, target = plan.target_rank, run.planner.target
    stage = f" (stage {target.stage_of(rank)})" if target.stages > 1 else ""
    both = run.planner.held(rank, (name,)).get(name)
    if both is None:
        yield f"target rank {rank}{stage}: does not hold it"
        return
    box = both.layout.box(rank)
    size_bytes = box.size * both.group.dtype.itemsize_bytes
    held = f"target rank {rank}{stage}: holds {box}, {format_bytes(size_bytes)}"
    place = plan.tensors.places.get(name)
    if place is None:
        yield f"{held}, which another rank that holds the same writes into the checkpoint"
        return
    yield f"{held}, in {run.path(rank)}"
    group, number = place
    reads = plan.tensors.groups[group].tensor(number).reads
    for item in reads[:_MOST_READS]:
        yield from (f"  {line}" for line in _read_lines(run, item, origin))
    if len(reads) > _MOST_READS:
        yield f"  and {len(reads) - _MOST_READS} more parts"
    if not reads:
        yield "  it has no elements, so nothing is read"


def _read_lines(run: Run, item: ReadItem, origin: TensorLineage) -> Iterator[str]:
    """Yield where one part of a target's tensor comes from."""
    if isinstance(item.source.unconverted.source, Constant):
        yield f"{item.target_region} is made up: it is in no file"
        return
    source = origin.source_of(item.target_region)
    of_source = f" of {source}" if source is not None and origin.boxes is not None else ""  # a map may rename it
    stored = run.planner.source
    holder = "a piece" if stored.files.is_folder else f"source rank {item.source_rank}"
    moved = "" if item.to is None and not of_source else f" as {item.region}{of_source}"
    turned = "" if item.order is None else f", its dimensions in the order {list(item.order)}"
    yield f"{item.target_region} comes from {holder}{moved}{turned}, which holds {item.source_box}:"
    yield f"  {_bytes_text(item)}"


def _bytes_text(item: ReadItem) -> str:
    """Return the bytes and files that a read item takes, in words."""
    entry = item.source.unconverted
    itemsize = entry.dtype.itemsize_bytes
    taken = format_bytes(item.region.size * itemsize)
    converted = f", converted from {entry.dtype} to {item.source.dtype}" if entry.dtype != item.source.dtype else ""
    if isinstance(entry.source, LibraryRead):
        return f"{taken} of {entry.source.path}, decoded in chunks of {list(entry.source.chunk)}{converted}"
    stored, strides = entry.stored, item.source_strides
    if stored is None or not stored.ranges:
        return f"{taken}{converted}"
    if len(stored.ranges) > 1:
        return f"{taken} of {stored.ranges[0].path}, where it lies in {len(stored.ranges)} ranges{converted}"
    path, first_byte, _ = stored.ranges[0]
    begin = first_byte + strides.source_offset * itemsize
    end = begin + strides.source_span * itemsize
    runs = item.region.size // max(1, strides.run_length)
    run_text = f", in {runs} runs of {strides.run_length * itemsize} bytes" if runs > 1 else ""
    return f"{taken}: bytes {begin} up to {end} of {path}{run_text}{converted}"
