"""Random strategies, and short ways to say one."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)


def one_layout(layout: RawLayout, name: str = "w", stage: int = 0, path: str = "") -> StageFile:
    return StageFile({name: layout}, (StrategyItem("MatMul", stage, ((1, 2), (2, 1))),), path)


@st.composite
def placements(draw: st.DrawFn, ranks: int, stages: tuple[int, ...] = (0,)) -> Placement:
    """Placements that MindSpore's files can state, over any mesh of `ranks` ranks."""
    mesh, left = [], ranks
    while left > 1:
        mesh.append(draw(st.sampled_from([axis for axis in range(2, left + 1) if left % axis == 0])))
        left //= mesh[-1]
    mesh = mesh or [1]
    axes = draw(st.permutations(range(len(mesh))))
    split: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 3))):
        taken = draw(st.integers(0, min(2, len(axes))))
        split.append(tuple(axes[:taken]))
        axes = axes[taken:]
    holders = math.prod(mesh[axis] for axis in axes)
    optimizer = draw(st.sampled_from([k for k in range(1, holders + 1) if holders % k == 0]))
    sizes = ()
    if split and draw(st.booleans()):
        slices = math.prod(mesh[axis] for axis in split[0])
        sizes = ((0, tuple(draw(st.lists(st.integers(1, 9), min_size=slices, max_size=slices)))),)
    return Placement(tuple(mesh), tuple(split), optimizer, sizes, stages)


@st.composite
def whole_strategies(draw: st.DrawFn) -> Strategy:
    """Strategies of one to three stages; some parameters are shared by stages, alike or not."""
    ranks, stages = draw(st.sampled_from([1, 2, 4, 6, 8, 12])), draw(st.integers(1, 3))
    parameters: dict[str, tuple[Placement, ...]] = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        at = draw(st.lists(st.integers(0, stages - 1), min_size=1, max_size=stages, unique=True).map(sorted))
        if len(at) > 1 and draw(st.booleans()):
            parts = [draw(placements(ranks, (stage,))) for stage in at]
            if len({part.with_stages((0,)) for part in parts}) == len(parts):
                parameters[name] = tuple(parts)
                continue
        parameters[name] = (draw(placements(ranks, tuple(at))),)
    for stage in range(stages):
        parameters[f"of stage {stage}"] = (draw(placements(ranks, (stage,))),)
    return Strategy(ranks * stages, stages, parameters)
