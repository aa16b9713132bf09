"""Convert MindSpore's layouts and stages to and from a Strategy (`to_strategy`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.groups import grouped
from reshard_mpi.sharding.layout import fitted
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem, place
from reshard_mpi.sharding.placement import Placement, Shape, ravel, unravel
from reshard_mpi.sharding.state_names import is_named_as_state
from reshard_mpi.sharding.strategy import Strategy, named_after
from reshard_mpi.sharding.value_checks import MAX_AXES, MAX_DIMENSIONS, MAX_EXPANDED_DIMENSIONS, MAX_RANKS, MAX_STAGES

Layouts = Mapping[str, RawLayout]

# Only the leading number is a stage: a parameter's own name may hold further `-`.
_STAGE = re.compile(r"([0-9]{1,6})-(.+)", re.DOTALL)


def merged_stages(file: StageFile) -> tuple[Layouts, ...] | None:
    """Return the layouts of each stage of a merged file under their own names, or None if the file is not merged.

    Raises StrategyError if stages are missing from what can only be a merged file.
    """
    stages: dict[int, dict[str, RawLayout]] = {}
    for name, layout in file.layouts.items():
        match = _STAGE.fullmatch(name)
        if match is None:
            return None
        if stages.setdefault(int(match[1]), {}).setdefault(match[2], layout) != layout:
            raise StrategyError("a stage lists a parameter twice, differently", got=name, where=file.path)
    if not stages:
        return None
    if sorted(stages) != list(range(len(stages))):
        if len({item.stage for item in file.items}) > 1:
            raise _gap(sorted(stages), file.path)
        return None
    return tuple(stages[stage] for stage in range(len(stages)))


def by_stage(files: Iterable[StageFile], origin: str) -> tuple[StageFile, ...]:
    """Return one file for each stage, with names that have no stage, from per-rank files or a merged file (or copies).

    Files that agree with an earlier one are not kept.

    Args:
        origin: what the files come from, for errors.

    Raises StrategyError if files of one stage disagree, a stage is missing, or merged and other files are mixed.
    """
    chosen: dict[int, StageFile] = {}
    merged_path = silent_path = ""
    for file in files:
        if not file.layouts:
            raise StrategyError("the strategy lists no parameter", where=file.path)
        merged = merged_stages(file)
        if chosen and bool(merged) != bool(merged_path):
            raise StrategyError(
                "merged strategies and strategies of one stage are mixed",
                expected="one merged file, or only files of one stage each",
                got=f"{merged_path or file.path}, which is merged, among others",
                where=origin,
                remedy="give the merged file itself, or keep it in another folder",
            )
        if merged is None:
            silent_path = silent_path or (file.path if file.stage is None else "")
            if silent_path and chosen:
                raise stage_unknown(silent_path)
            stage = file.stage or 0
            _require_same(stage, chosen.setdefault(stage, file), file)
        else:
            merged_path = merged_path or file.path
            for stage, layouts in enumerate(merged):
                stage_file = StageFile(layouts, file.items, file.path)
                _require_same(stage, chosen.setdefault(stage, stage_file), stage_file)
    if not chosen:
        raise StrategyError("there is no strategy file", where=origin)
    if sorted(chosen) != list(range(len(chosen))):
        raise _gap(sorted(chosen), origin)
    return tuple(chosen[stage] for stage in range(len(chosen)))


def stage_unknown(path: str) -> StrategyError:
    """Return the error for a strategy file that does not say which pipeline stage it is of."""
    return StrategyError(
        "a strategy file does not say which stage it is of",
        expected="at least one strategy item, which tells the stage",
        got="none",
        where=path,
    )


def _require_same(stage: int, first: StageFile, file: StageFile) -> None:
    if first.layouts == file.layouts:
        return
    names = [*first.layouts, *file.layouts]
    name = next(name for name in names if first.layouts.get(name) != file.layouts.get(name))
    lacking_path = next((f.path for f in (first, file) if name not in f.layouts), None)
    raise StrategyError(
        f"strategy files of stage {stage} disagree",
        expected="the same layouts in every file of one stage",
        got=f"parameter {name!r} " + (f"not in {lacking_path}" if lacking_path else "laid out in two ways"),
        where=f"{first.path} and {file.path}",
        remedy="keep the strategy files of one run and one format together, each run in a folder of its own",
    )


def _gap(stages: list[int], where: str) -> StrategyError:
    listed = ", ".join(map(str, stages[:8])) + (", ..." if len(stages) > 8 else "")
    return StrategyError(
        "a pipeline stage is missing from the strategy",
        expected="stages from 0 without a gap",
        got=f"stage{'s' if len(stages) > 1 else ''} {listed}",
        where=where,
        remedy="give a folder with the strategy files of all stages, or the merged file",
    )


def to_strategy(files: Iterable[StageFile], origin: str) -> Strategy:
    """Merge the strategy files of a checkpoint. origin: their source, for errors.

    Raises StrategyError if they do not belong together, LayoutError if a layout contradicts itself.
    """
    stages = by_stage(files, origin)
    if len(stages) > MAX_STAGES:
        raise StrategyError(
            "the strategy has too many stages", expected=f"at most {MAX_STAGES}", got=str(len(stages)), where=origin
        )
    placements: dict[tuple[object, ...], Placement] = {}
    # By the identity of a layout, which many parameters share and the files keep.
    placement_of: dict[int, Placement] = {}
    # For each parameter its placements, each with one of the stages that hold it so.
    placed: dict[str, list[tuple[Placement, int]]] = {}
    for stage, file in enumerate(stages):
        has_sizes = any(layout.indices_offset for layout in file.layouts.values())
        for name, stated in file.layouts.items():
            placement = None if has_sizes else placement_of.get(id(stated))
            if placement is None:
                layout = _with_sizes(name, stated, file.layouts)
                key = _meaning(layout)
                placement = placements.get(key)
                if placement is None:
                    placement = placements[key] = to_placement(layout, place(file.path, name))
                if not has_sizes:
                    placement_of[id(stated)] = placement
            placed.setdefault(name, []).append((placement, stage))
    joined: dict[tuple[tuple[int, int], ...], tuple[Placement, ...]] = {}
    parameters = {}
    for name, entries in placed.items():
        combination = tuple([(id(placement), stage) for placement, stage in entries])
        if combination not in joined:
            stages_of = grouped(entries)
            joined[combination] = tuple(each.with_stages(tuple(stages)) for each, stages in stages_of.items())
        parameters[name] = joined[combination]
    stage_size = next(iter(placements.values())).stage_size
    if stage_size * len(stages) > MAX_RANKS:
        raise StrategyError("the strategy has too many ranks", expected=f"at most {MAX_RANKS}", where=origin)
    return Strategy(stage_size * len(stages), len(stages), parameters, origin=origin)


def _with_sizes(name: str, layout: RawLayout, layouts: Layouts) -> RawLayout:
    """Return the layout of an optimizer's state with the uneven sizes of the parameter that it is named after.

    MindSpore leaves them out of the state's own layout, which is cut over the same mesh axes.
    """
    if layout.indices_offset:
        return layout
    bases = (base for base in named_after(name) if base in layouts)
    base = next((layouts[base] for base in bases if is_named_as_state(name, base)), None)
    if base is None or not base.indices_offset:
        return layout
    if (base.dev_matrix, base.tensor_map) != (layout.dev_matrix, layout.tensor_map):
        return layout
    shape = layout.tensor_shape
    if shape is not None and (not shape or shape[0] != sum(base.param_split_shape)):
        return layout  # of another shape than the parameter
    return layout._replace(param_split_shape=base.param_split_shape, indices_offset=base.indices_offset)


def _meaning(layout: RawLayout) -> tuple[object, ...]:
    """Return all that the placement of a layout depends on: tensors of different shapes may share a placement."""
    shape = layout.tensor_shape
    if shape is not None and not _may_be_expanded(layout, shape):
        shape = None
    return (
        layout.dev_matrix,
        layout.tensor_map,
        layout.opt_weight_shard_size,
        layout.opt_weight_shard_step,
        layout.param_split_shape if layout.indices_offset else (),
        layout.indices_offset,
        shape,
    )


def to_placement(layout: RawLayout, where: str) -> Placement:
    """Return the placement that a layout means, held by stage 0.

    Raises StrategyError or LayoutError, with `where` in it, if the layout contradicts itself.
    """
    mesh = layout.dev_matrix
    if not mesh or len(mesh) > MAX_AXES or len(layout.tensor_map) > MAX_DIMENSIONS:
        raise StrategyError(
            "a layout has no mesh, or too large a one",
            expected=f"1 to {MAX_AXES} mesh axes and at most {MAX_DIMENSIONS} dimensions",
            got=f"dev_matrix of {len(mesh)} axes, tensor_map of {len(layout.tensor_map)} dimensions",
            where=where,
        )
    split = tuple(_axes(entry, mesh, where) for entry in layout.tensor_map)
    try:
        whole = Placement(mesh, split)
        sizes = _sizes(layout, where)
        placement = Placement(mesh, split, _optimizer(layout, whole, where), sizes)
        shape = layout.tensor_shape
        if shape is not None and _may_be_expanded(layout, shape):
            # Axes of one rank cut nothing, and would leave it open which dimension their factor belongs to.
            split = tuple(tuple(axis for axis in axes if mesh[axis] > 1) for axes in split)
            placement = placement.changed(split=split, expanded_shape=shape)
    except LayoutError as error:
        raise located(error, where) from None
    return placement


def located(error: LayoutError, where: str) -> LayoutError:
    """Return `error` with `where` it was met."""
    return type(error)(error.problem, expected=error.expected, got=error.got, where=where, remedy=error.remedy)


def _axes(entry: tuple[int, ...], mesh: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the mesh axes, counted from the left, that cut a dimension.

    A -1 cuts nothing; MindSpore writes one beside axes where its Layout names "None" beside them: `(("sp", "None"),)`.
    """
    cutting = tuple(axis for axis in entry if axis != -1)
    for axis in cutting:
        if not 0 <= axis < len(mesh):
            raise LayoutError(
                "a tensor dimension is mapped outside the mesh",
                expected=f"-1 (not cut), or axes 0 to {len(mesh) - 1} from the right of mesh {list(mesh)}",
                got=f"tensor map entry {list(entry)}",
                where=where,
            )
    return tuple(len(mesh) - 1 - axis for axis in cutting)


def _optimizer(layout: RawLayout, whole: Placement, where: str) -> int:
    """Return into how many pieces the optimizer cuts dimension 0 of each slice.

    The step is how far apart in rank their holders are. It is 0 where there is no cut: MindFormers writes the size -1
    with it, and MindSpore does not cut then, whatever the size.
    """
    size, step = layout.opt_weight_shard_size, layout.opt_weight_shard_step
    if size < -1:
        raise StrategyError(
            "opt_weight_shard_size is impossible",
            expected="-1 (all ranks that share a slice), 0 (not cut), or the number of pieces",
            got=str(size),
            where=where,
        )
    if step < 0 or (step == 0 and size > 1):
        raise StrategyError(
            "opt_weight_shard_size and opt_weight_shard_step contradict each other",
            expected="a step of 1 or more where the optimizer cuts, a size of 0 or -1 where it does not",
            got=f"opt_weight_shard_size {size}, opt_weight_shard_step {step}",
            where=where,
            remedy="say by both whether the parameter is cut",
        )
    if step == 0:
        return 1
    return whole.holders_per_slice if size == -1 else max(size, 1)


def _sizes(layout: RawLayout, where: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the uneven slice sizes of dimension 0; MindFormers' param_split_shape without offsets is no such thing."""
    sizes, offsets = layout.param_split_shape, layout.indices_offset
    if not offsets:
        return ()
    if any(size < 0 for size in sizes) or offsets != tuple(accumulate(sizes, initial=0))[:-1]:
        raise StrategyError(
            "the sizes and offsets of an uneven split do not fit together",
            expected="as many offsets as sizes, each the sum of the sizes before it",
            got=f"param_split_shape {list(sizes[:16])}, indices_offset {list(offsets[:16])}",
            where=where,
        )
    return ((0, sizes),)


def _may_be_expanded(layout: RawLayout, shape: Shape) -> bool:
    """Tell whether a flat map may list the factors of a nested one: all but a dimension's last are cut to length 1."""
    mesh, dims = layout.dev_matrix, len(layout.tensor_map)
    if len(shape) != dims or dims > MAX_EXPANDED_DIMENSIONS:
        return False
    for axes, length in zip(layout.tensor_map[:-1], shape):
        if length in mesh and 0 <= axes[0] < len(mesh) and mesh[-1 - axes[0]] == length:
            return not layout.is_nested
    return False


def to_stage_files(strategy: Strategy, shapes: Mapping[str, Shape] | None = None) -> tuple[StageFile, ...]:
    """Return the contents of one MindSpore strategy file a stage.

    Args:
        shapes: whole tensor shapes by name; they give a number of dimensions to what is not cut, MindSpore's
            tensor_shape, and the names that the strategy's rules place.

    Raises StrategyError for what these files cannot say.
    """
    shapes = shapes or {}
    if strategy.rules and not shapes:
        raise StrategyError(
            "a strategy of rules cannot be written without the parameters' names",
            where=strategy.origin,
            remedy="give the shapes of the parameters",
        )
    stages: list[dict[str, RawLayout]] = [{} for _ in range(strategy.stages)]
    layout_of: dict[tuple[Placement, Shape | None], RawLayout] = {}
    for name in dict.fromkeys([*strategy.parameters, *(shapes if strategy.rules else ())]):
        for placement in strategy.find(name):
            key = (placement, shapes.get(name))
            if key not in layout_of:
                layout_of[key] = to_layout(placement, key[1], place(strategy.origin, name))
            for stage in placement.stages:
                stages[stage][name] = layout_of[key]
    for stage, layouts in enumerate(stages):
        if not layouts:
            raise StrategyError(f"stage {stage} holds no parameter", where=strategy.origin)
    return tuple(StageFile(layouts, (StrategyItem(f"stage_{stage}", stage),)) for stage, layouts in enumerate(stages))


def to_layout(placement: Placement, shape: Shape | None, where: str = "") -> RawLayout:
    """Return the layout that states `placement`; `shape` is the whole tensor's, where known."""
    if (placement.whole_scalars or placement.ceil) and shape is not None:
        placement = fitted(placement, shape)
    if placement.ceil and placement.is_cut:
        raise StrategyError(
            "MindSpore's strategy files cannot say a cut by ceiling division without the tensor's shape",
            expected="the sizes of its slices",
            where=where,
        )
    mesh, split = placement.mesh, placement.split
    if shape is not None and placement.expanded_shape is None:
        split = split + ((),) * (len(shape) - len(split) if placement.open_ended or not split else 0)
    by_dim = dict(placement.sizes)
    sizes = by_dim.pop(0, ())
    if by_dim:
        raise StrategyError(
            "MindSpore's strategy files cannot say uneven sizes of other dimensions than 0",
            got=f"sizes of dimension {min(by_dim)}",
            where=where,
        )
    return RawLayout(
        mesh,
        tuple(tuple(len(mesh) - 1 - axis for axis in axes) or (-1,) for axes in split),
        placement.optimizer if placement.optimizer > 1 else 0,
        _step(placement),
        sizes,
        tuple(accumulate(sizes, initial=0))[:-1],
        tensor_shape=placement.expanded_shape or shape,
    )


def _step(placement: Placement) -> int:
    """Return how far apart in rank the holders of neighbouring optimizer pieces are, as MindSpore computes it."""
    pieces, free = placement.optimizer, placement.free_axes
    if pieces == 1:
        return 0
    coordinates = [0] * len(placement.mesh)
    lengths = tuple(placement.mesh[axis] for axis in free)
    for axis, coordinate in zip(free, unravel(pieces - 1, lengths)):
        coordinates[axis] = coordinate
    return ravel(tuple(coordinates), placement.mesh) // (pieces - 1)
