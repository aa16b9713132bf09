"""Plan the figures of a run for its pictures (`planned_figures`), and write these as files (`write_picture`)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import UsageError
from reshard_mpi.filesystem.paths import described, is_file_or_nothing
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.pictures.figures import (
    MOST_PLANNED,
    DrawnBlock,
    DrawnMove,
    Feed,
    Figures,
    Flow,
    Panel,
    Shards,
    TensorCut,
    cuts_of,
    cuts_of_boxes,
    feeds_of,
    most_planned,
    panel_of_layout,
    panel_of_pieces,
    path_of,
    sampled_targets,
    shown_dimensions,
)
from reshard_mpi.pictures.scene import files_as_shards, png_of, require_matplotlib, svg_of
from reshard_mpi.planning.rank_choice import writer
from reshard_mpi.planning.rank_plan import Group, RankPlan
from reshard_mpi.planning.source_tensors import SourceGroup
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.explain import (
    TensorLineage,
    likely_holders,
    listed_pieces,
    origin_of,
    source_groups,
    unknown_tensor,
)
from reshard_mpi.runs.open_run import open_for_planning
from reshard_mpi.runs.outcome import Outcome, agreed
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import Progress, ProgressStage
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.text import MIB, counted, one_line, shortened

# Of tensors that are alike: names shown, sources drawn of a picture's tensor, and moves of it kept.
_MOST_NAMES, _MOST_SOURCES, _MOST_MOVES = 500, 4, 2000
_PICTURE_ENDINGS = (".html", ".png", ".svg")
# A page has the cuts of this number of kinds of tensors at most.
_MOST_CUTS = 200
# What drawing takes: matplotlib with its fonts and the picture's dots, and the largest page as text.
_PNG_BYTES, _SVG_BYTES = 96 * MIB, 40 * MIB


class Asked(NamedTuple):
    """The subjects of a picture."""

    tensors: tuple[str, ...]  # the ones that the user names
    most_cuts: int  # how many kinds of tensors at most
    drawing_bytes: int = 0  # how much memory it takes to draw that


def planned_figures(request: Request, comm: Comm, asked: Asked, progress: Progress) -> tuple[Figures, Outcome] | None:
    """Return the figures of a run, and an outcome with notes and warnings, on the first process of `comm`.

    Returns None on the others; all of them must call this. With `ranks` in the request only these targets are planned.
    Raises, the same on every process, the errors for which a run would be refused.
    """
    with RunProcess.begun(request, comm, progress) as process:
        return agreed(lambda: _figures(process, asked) if comm.rank == 0 else None, comm)


def _figures(process: RunProcess, asked: Asked) -> tuple[Figures, Outcome]:
    request, _, memory, progress, _ = process
    progress.begin(ProgressStage("planning"))
    run = open_for_planning(process, most_planned=2 * MOST_PLANNED)
    memory.reserve_peak(memory.projection.planning_bytes + asked.drawing_bytes, f"a picture of {request.target}")
    planner = run.planner
    targets = planner.target.world_size
    most = most_planned(planner.planned_source.stats.tensors)
    planned = run.targets if request.rank is not None else sampled_targets(targets, most)
    collected = _Collected(planner, _DrawnSources.of(planner), asked)
    feeds: list[Feed] = []
    progress.begin(ProgressStage("planning", units=len(planned), unit="rank"))
    for rank in planned:
        plan = planner.plan(rank, checked=False)
        feeds.extend(feeds_of(plan, collected.sources.number))
        collected.add(plan)
        progress.completed()
    for name in asked.tensors:
        collected.find(name)
    if request.rank is None and len(planned) < targets:
        collected.complete(most)
    cuts = tuple(collected.cuts())
    of_cuts = {move.target for cut in cuts for move in cut.moves}
    files = {rank: str(run.path(rank)) for rank in sorted({*planned, *of_cuts})}
    are_files = formats.info(run.format).split_by_size
    written = files_as_shards(targets, files) if are_files else Shards(targets, "rank", files)
    flow = Flow(collected.sources.shards, written, planned, tuple(feeds))
    ranks = counted(targets, written.word)
    figures = Figures(
        f"{request.source}: {planner.source.summary_text}",
        f"{request.target}: {formats.title(run.format)}, {ranks}",
        flow,
        cuts,
        collected.further,
        collected.further_tensors,
    )
    return figures, Outcome.begun(planner).joined(collected.outcomes)


@dataclass(slots=True)
class _DrawnSources:
    """The source's shards by number: their ranks, or where files belong to no rank, their places in the checkpoint."""

    count: int
    by_file: bool
    files: dict[int, str]
    _number_of: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, planner: Planner) -> _DrawnSources:
        source = planner.source
        files, by_rank = source.files, source.files.by_rank
        if files.is_folder or (len(by_rank) == 1 and len(files.shards) > 1):
            paths = files.one_by_one().shards
            return cls(len(paths), True, dict(enumerate(paths)), {path: number for number, path in enumerate(paths)})
        named = {rank: shortened(paths, 1) for rank, paths in sorted(by_rank.items())}
        return cls(source.strategy.world_size, False, named)

    def number(self, rank: int, path: str) -> int:
        """Return the number of the shard that is the file `path` of a source rank."""
        if not self.by_file:
            return rank
        number = self._number_of.setdefault(path, self.count)
        if number == self.count:  # a file that another one refers to
            self.files[number], self.count = path, self.count + 1
        return number

    @property
    def shards(self) -> Shards:
        return files_as_shards(self.count, self.files) if self.by_file else Shards(self.count, "rank", self.files)


@dataclass(slots=True)
class _AlikeTensors:
    """Tensors that are planned alike; the first of `names` is drawn."""

    names: list[str]
    count: int
    layout: Layout
    dtype: DType
    origin: TensorLineage
    sources: Mapping[str, SourceGroup]  # how the source holds what it is made of
    held: dict[Box, list[int]] = field(default_factory=dict)  # the boxes of it that planned targets hold
    # for each source tensor, its boxes by shard
    taken: dict[str, dict[Box, list[int]]] = field(default_factory=dict)
    moves: list[DrawnMove] = field(default_factory=list)
    further_moves: int = 0

    def add(self, target_rank: int, group: Group, sources: _DrawnSources) -> None:
        """Add a target's part of the drawn tensor."""
        self.held.setdefault(group.kind.own_box, []).append(target_rank)
        place = group.names.index(self.names[0])
        for route in group.routes:
            item = route.item(place, self.names[0])
            path = path_of(item.source)
            number = sources.number(item.source_rank, path) if path else None
            source = None if number is None else self.origin.source_of(item.target_region)
            if source is not None and number is not None:
                holders = self.taken.setdefault(source, {}).setdefault(item.source_box, [])
                if number not in holders:
                    holders.append(number)
            if len(self.moves) >= _MOST_MOVES:
                self.further_moves += 1
                continue
            drawn = self.origin.sources[:_MOST_SOURCES]
            panel = drawn.index(source) if source in drawn else None
            size_bytes = item.region.size * item.source.unconverted.dtype.itemsize_bytes if number is not None else 0
            self.moves.append(
                DrawnMove(target_rank, item.target_region, number, panel, item.region, path, size_bytes, source or "")
            )


@dataclass(slots=True)
class _Collected:
    """The facts of planned targets on tensors, kind by kind. further: kinds that are not drawn."""

    planner: Planner
    sources: _DrawnSources
    asked: Asked
    further: int = 0
    further_tensors: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    _planned: set[int] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)
    _drawn: dict[str, _AlikeTensors] = field(default_factory=dict)

    def add(self, plan: RankPlan) -> None:
        """Add a target that has been planned."""
        self._planned.add(plan.target_rank)
        self.outcomes.append(Outcome.of(plan))
        new: dict[str, tuple[Group, list[str]]] = {}
        for group in plan.tensors.groups:
            unknown = set(group.names) - self._known
            if unknown:
                self._known |= unknown
                names = [name for name in group.names if name in unknown]
                asked = [name for name in self.asked.tensors if name in unknown]
                if asked or len(self._drawn) + len(new) < self.asked.most_cuts:
                    new[(asked or names)[0]] = group, names
                else:
                    self.further += 1
                    self.further_tensors += len(names)
        if new:
            self._add_kinds(plan.target_rank, new)
        for group in plan.tensors.groups:
            for name in self._drawn.keys() & set(group.names):
                self._drawn[name].add(plan.target_rank, group, self.sources)

    def _add_kinds(self, rank: int, new: Mapping[str, tuple[Group, list[str]]]) -> None:
        """Add kinds of tensors, by the one that is drawn of each. rank: a target that holds them."""
        layouts = self.planner.held(rank, new)  # of all at once, since that takes as long as to plan it
        origins = {first: origin_of(self.planner, first) for first in new}
        groups: Mapping[str, SourceGroup] = {first: both.group for first, both in layouts.items()}
        if self.planner.mapped is not None:
            names = dict.fromkeys(name for origin in origins.values() for name in origin.sources[:_MOST_SOURCES])
            groups = source_groups(self.planner, rank, tuple(names))
        for first, (group, alike) in new.items():
            asked = [name for name in self.asked.tensors if name in alike]
            named = dict.fromkeys((first, *asked, *alike[:_MOST_NAMES]))
            origin = origins[first]
            sources = {name: groups[name] for name in origin.sources[:_MOST_SOURCES]}
            layout, dtype = layouts[first].layout, group.kind.dtype
            self._drawn[first] = _AlikeTensors(list(named), len(alike), layout, dtype, origin, sources)

    def find(self, name: str) -> None:
        """Plan a target that holds a tensor, if none has been. Raises UsageError if no target has such a tensor."""
        if name in self._known:
            return
        for rank in likely_holders(self.planner.target, name):
            if rank not in self._planned:
                self.add(self.planner.plan(rank, checked=False))
            if name in self._known:
                return
        raise unknown_tensor(name, self._known)

    def complete(self, most: int) -> None:
        """Plan further targets, `most` at most, so that each block that is drawn has one that has been planned."""
        budget = len(self._planned) + most
        for kind in list(self._drawn.values()):
            for block in self._panels(kind)[1].blocks:
                if block.box.size == 0 or block.planned is not None:
                    continue
                if len(self._planned) >= budget:
                    return
                rank = self._writer(kind, block) if self.planner.is_one_checkpoint else block.holders[0]
                if rank not in self._planned:
                    self.add(self.planner.plan(rank, checked=False))

    def _writer(self, kind: _AlikeTensors, block: DrawnBlock) -> int:
        """Return the target that writes the first piece of a block, where others that hold it do not."""
        piece = next(piece for piece, _ in kind.layout.pieces_meeting(block.piece))
        is_listed = all(group.listed for group in kind.sources.values())
        return writer(kind.names[0], piece, kind.layout.placement, is_listed=is_listed)

    def cuts(self) -> Iterable[TensorCut]:
        """Yield how both sides cut each kind of tensors; requested ones come first."""
        in_order = sorted(self._drawn.values(), key=lambda kind: kind.names[0] not in self.asked.tensors)
        for kind in in_order:
            sources, target = self._panels(kind)
            size_bytes = math.prod(kind.layout.shape) * kind.dtype.itemsize_bytes * kind.count
            further = max(0, len(kind.origin.sources) - _MOST_SOURCES)
            names = tuple(kind.names)
            moves = tuple(kind.moves)
            yield TensorCut(
                names, kind.count, size_bytes, sources, further, target, moves, kind.further_moves, kind.origin.by
            )

    def _panels(self, kind: _AlikeTensors) -> tuple[tuple[Panel, ...], Panel]:
        groups = kind.sources
        is_same = self.planner.mapped is None
        shapes = {name: groups[name].shape for name in groups}
        boxes = {name: self._pieces(kind, name) for name in groups}
        by_layout = {name: _layout_of(groups[name].layouts, tuple(boxes[name])) for name in groups}
        if self.sources.by_file:
            cuts = {name: cuts_of_boxes(shapes[name], boxes[name]) for name in groups}
        else:
            cuts = {name: cuts_of(by_layout[name]) for name in groups}
        target = _target_panel(kind, tuple(cuts.values()) if is_same else ())
        panels = []
        for name in groups:
            shown = target.shown if is_same else shown_dimensions(shapes[name], cuts[name])
            dtype = groups[name].dtype.name
            if self.sources.by_file:
                panels.append(panel_of_pieces(name, dtype, shapes[name], boxes[name], shown))
            else:
                panels.append(panel_of_layout(name, dtype, by_layout[name], shown))
        return tuple(panels), target

    def _pieces(self, kind: _AlikeTensors, name: str) -> Mapping[Box, list[int]]:
        """Return the pieces of a source tensor: all in an index, else the pieces that planned targets read."""
        listed = listed_pieces(self.planner, name)
        if listed is None:
            return kind.taken.get(name, {})
        return {box: [self.sources.number(0, path) for path in paths] for box, paths in listed.items()}


def _target_panel(kind: _AlikeTensors, other_cuts: tuple[Sequence[int], ...]) -> Panel:
    shown = shown_dimensions(kind.layout.shape, cuts_of(kind.layout), *other_cuts)
    panel = panel_of_layout(kind.names[0], kind.dtype.name, kind.layout, shown)
    planned = (kind.held.get(block.piece) for block in panel.blocks)
    blocks = (block._replace(planned=ranks[0] if ranks else None) for block, ranks in zip(panel.blocks, planned))
    return panel._replace(blocks=tuple(blocks))


def _layout_of(layouts: Sequence[Layout], taken: Sequence[Box]) -> Layout:
    """Return the layout that has the taken boxes as its pieces: stages that share a tensor may cut it differently."""
    for layout in layouts if taken else ():
        if taken[0] in [layout.piece_box(piece) for piece, _ in layout.pieces_meeting(taken[0])]:
            return layout
    return layouts[0]


def asked_pictures(path: str | None, tensors: Sequence[str]) -> Asked:
    """Return the request for a picture in the file `path`, in the form that its ending names.

    Raises UsageError for pictures or files that are impossible.
    """
    if path is None:
        raise UsageError(
            "--tensor says what is drawn", expected="--plot FILE.html, .png or .svg as well", got="no --plot"
        )
    ending = _ending(path)
    require_picture(path, _PICTURE_ENDINGS)
    if ending != ".html" and len(tensors) > 1:
        raise UsageError(
            "one picture shows one tensor",
            expected="--tensor once, or a page (.html)",
            got=f"{len(tensors)} tensors for {path}",
        )
    if ending == ".png":
        require_matplotlib()
    most_cuts = _MOST_CUTS if ending == ".html" else 0
    return Asked(tuple(dict.fromkeys(tensors)), most_cuts, _PNG_BYTES if ending == ".png" else _SVG_BYTES)


def require_picture(path: str, endings: Sequence[str]) -> None:
    """Raise UsageError for a file that can be no picture of a form that has one of these endings."""
    if _ending(path) not in endings:
        raise UsageError("a picture's ending says its form", expected=", ".join(endings), got=path)
    file = Path(path)
    if not is_file_or_nothing(file) or not file.parent.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(
            "the picture cannot be written",
            expected="a new file in a folder that is there, or an earlier picture",
            got=described(file) if not is_file_or_nothing(file) else described(file.parent),
            where=path,
            remedy="choose another name",
        )


def write_picture(path: str, figures: Figures) -> str:
    """Write the picture of figures; return its subject in a line. Raises OSError, and then leaves no file."""
    write_page(path, _drawn(path, figures))
    flow = figures.flow
    planned = (
        f"{len(flow.planned)} of {flow.targets.total} targets"
        if flow.is_sample
        else counted(len(flow.planned), "target")
    )
    cuts = f", {counted(len(figures.cuts), 'kind')} of tensors" if _ending(path) == ".html" else ""
    return f"drew {planned}{cuts}: {one_line(path)}"


def write_page(path: str, content: bytes) -> None:
    """Write a picture or a page. Raises OSError, and then leaves no file."""
    try:
        Path(path).write_bytes(content)
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise


def _drawn(path: str, figures: Figures) -> bytes:
    if _ending(path) == ".html":
        from reshard_mpi.pictures.pages import page_of

        return page_of(figures).encode()
    from reshard_mpi.pictures.matrix import matrix_scene
    from reshard_mpi.pictures.tensor_cuts import cut_scene

    scene = cut_scene(figures.cuts[0], figures) if figures.cuts else matrix_scene(figures)
    return svg_of(scene).encode() if _ending(path) == ".svg" else png_of(scene)


def _ending(path: str) -> str:
    return Path(path).suffix.lower()
