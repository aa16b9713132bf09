"""Lay out the tensors on one target rank, or in files up to a size (`TargetLayouts`, `filled_files`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.planning.find_placement import Unlisted, everywhere, find_or_follow, is_dropped
from reshard_mpi.planning.source_tensors import SourceGroup, SourceTensors
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy, named_after

_NOT_DIVIDED = (
    "choose a target strategy whose cuts divide the tensor, or give the sizes of its slices (in a TOML rule"
    ' sizes = "ceil": as torch cuts)'
)
_NOT_DIVIDED_AGAIN = (
    "choose a target strategy whose cuts divide the tensor: in TOML give it a rule before this one, without optimizer,"
    ' or one with split and sizes = "ceil" instead of optimizer'
)


class TargetLayouts:
    """The layouts of tensors, and the boxes of one rank, on the target's side.

    Attributes:
        tensors: what the source has.
        unlisted: what becomes of parameters that the strategy does not list.
    """

    def __init__(self, strategy: Strategy, rank: int, tensors: SourceTensors, unlisted: Unlisted) -> None:
        self._strategy = strategy
        self._rank = rank
        self._stage = strategy.stage_of(rank)
        self._tensors = tensors
        self._unlisted = unlisted
        self._boxes: dict[Layout, Box] = {}
        self._layouts: dict[tuple[SourceGroup, int], Layout | None] = {}  # by the identity of kept placements

    def layout(self, name: str, group: SourceGroup) -> Layout | None:
        """Return how this target rank holds a tensor; None if it does not."""
        if self._unlisted is Unlisted.DROP and is_dropped(self._strategy, name, self._tensors):
            return None
        placements = self.placements(name)
        key = (group, id(placements))
        if key not in self._layouts:
            self._layouts[key] = self._placed(name, group, placements)
        return self._layouts[key]

    def _placed(self, name: str, group: SourceGroup, placements: tuple[Placement, ...]) -> Layout | None:
        """Return how this target rank holds the tensors of a group by these target placements; None if it does not."""
        is_cut = any(layout.placement.is_cut for layout in group.layouts)
        if not placements and self._unlisted is Unlisted.FOLLOW and is_cut:
            raise StrategyError(
                f"{name!r} is sharded in the source and the target strategy does not say how to place it",
                expected="it in the target strategy, or a parameter of the same shape whose whole name is in its own",
                got=_not_followed(self._strategy, name),
                where=self._strategy.origin,
                remedy="add it to the target strategy, or use --unlisted replicate or --unlisted drop",
            )
        placements = placements or (everywhere(self._strategy),)
        placement = next((option for option in placements if self._stage in option.stages), None)
        if placement is None:
            return None
        if group.has_whole_sums:
            placement = replace(placement, optimizer=1)
        try:
            return self._tensors.layout(placement, group.shape)
        except LayoutError as error:
            error.where = f"tensor {name!r}, target strategy {self._strategy.origin}".rstrip()
            error.remedy = error.remedy or (_NOT_DIVIDED_AGAIN if placement.optimizer > 1 else _NOT_DIVIDED)
            raise

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Return how the target strategy places a tensor; empty where it does not."""
        listed = self._strategy.parameters.get(name)
        if listed or self._unlisted is not Unlisted.FOLLOW:
            return listed or self._strategy.find(name)
        return find_or_follow(self._strategy, name, lambda base: self._tensors.same_shape(name, base))

    def lists(self, name: str) -> bool:
        """Tell whether the target strategy lists a name, other than by a rule for every name."""
        return bool(self._strategy.find(name)) and not self._strategy.is_only_caught(name)

    def box(self, layout: Layout) -> Box:
        """Return what this target rank holds of a tensor."""
        if layout not in self._boxes:
            self._boxes[layout] = layout.box(self._rank)
        return self._boxes[layout]


def _not_followed(target: Strategy, name: str) -> str:
    others = [base for base in named_after(name) if target.find(base)]
    return f"{others[0]!r} listed, but of another shape" if others else "neither listed"


def filled_files(specs: Specs, most_bytes: int) -> list[list[str]]:
    """Return the names of the tensors that each file holds, in their order.

    A new file is begun when the next tensor would make the current one larger than `most_bytes`. A tensor that is
    larger by itself gets a file of its own, which comes before the current one.
    """
    sizes = [kind.size_bytes for kind in specs.kinds]
    done: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, kind in zip(specs.names, specs.kind_ids):
        size_bytes = sizes[kind]
        if size_bytes > most_bytes:
            done.append([name])
            continue
        if current_bytes + size_bytes > most_bytes:
            done.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size_bytes
    return [*done, current] if current or not done else done


def strategy_of(named: Sequence[Sequence[str]]) -> Strategy:
    """Return the strategy of files with whole tensors: one stage of one rank for each file.

    Args:
        named: the names of the tensors in each file.
    """
    parameters: dict[str, tuple[Placement, ...]] = {}
    for stage, names in enumerate(named):
        placement = (Placement((1,), stages=(stage,)),)
        parameters |= dict.fromkeys(names, placement)
    return Strategy(len(named), len(named), parameters)
