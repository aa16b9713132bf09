"""Sort the files of a DeepSpeed checkpoint by their names (`sorted_files`), and name a target's (`TargetNames`).

    mp_rank_01_model_states.pt                       weights and settings; stages 0 to 2: of model-parallel rank 1
    zero_pp_rank_2_mp_rank_01_model_states.pt        the same of stage 3: of data-parallel rank 2
    bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt   a data-parallel rank's share of the optimizer, all stages
    layer_03-model_00-model_states.pt                a layer of a pipeline, of tensor-parallel rank 0
    layer_0_expert_5_mp_rank_00_model_states.pt      expert 5 of the first layer that has experts

Facts are of DeepSpeed 0.19; older releases left out `_model_00`, the underscore before `optim`, or `layer_0_`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple, TypeVar

from reshard_mpi.errors import ShardError

_ZERO = r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_?optim_states\.pt"
_STATES = r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt"
_LAYER = r"layer_(?P<layer>\d+)(?:-model_(?P<model>\d+))?-model_states\.pt"
_EXPERT = r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<model>\d+)_model_states\.pt"
_PREFIX = (
    r"(?P<tag>[^/]+)/(?P<type>bf16_)?zero(?P<zero_stage>[123])"
    r"(?:\.stages(?P<stages>[1-9]\d{0,8})\.layers(?P<layers>\d{1,9}(?:,\d{1,9})*))?"
    r"(?:\.experts(?P<experts>\d{1,9}(?:,\d{1,9})*))?"
)
_EXPERT_OPTIMIZER = r"expp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt"
# The folder of a universal checkpoint in which every parameter has one.
PARAMETERS = "zero"


class Ranks(NamedTuple):
    """The place of a file: its data-parallel and its model-parallel rank."""

    data: int
    model: int


class LayerPart(NamedTuple):
    """A layer of a pipeline, and the tensor-parallel rank that holds this part of it."""

    layer: int
    model: int


class Expert(NamedTuple):
    """An expert: the number of its layer among layers with experts, its own over all ranks, its model-parallel rank."""

    layer: int
    expert: int
    model: int


class TagFiles(NamedTuple):
    """The files of a checkpoint by their kinds, as names in its folder.

    Attributes:
        models: weights and settings. At stages 0 to 2 they are written by data-parallel rank 0 alone.
        optimizers: shares of the optimizer.
        expert_optimizers: those of trainings without ZeRO.
    """

    models: Mapping[Ranks, str]
    optimizers: Mapping[Ranks, str]
    layers: Mapping[LayerPart, str]
    experts: Mapping[Expert, str]
    expert_optimizers: Mapping[Ranks, str]

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [name for kind in self for name in kind.values()]


class TargetNames(NamedTuple):
    """The facts that the names of a target's files say. The prefix of a run says them too.

    Attributes:
        type: what the names of the optimizer's files begin with.
        stages: how many a pipeline has; layers: the numbers of its layers that have files.
        experts: how many each layer with experts has.
    """

    tag: str = "global_step0"
    type: str = ""
    zero_stage: int = 1
    stages: int = 1
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @classmethod
    def of_prefix(cls, prefix: str) -> TargetNames:
        """Return the names that a prefix says. A user's own says nothing: these files have names of their own."""
        match = re.fullmatch(_PREFIX, prefix)
        if match is None:
            return cls()
        tag, kind, zero_stage, stages, layers, experts = match.groups()
        numbers = [tuple(map(int, own.split(","))) if own else () for own in (layers, experts)]
        return cls(tag, kind or "", int(zero_stage), int(stages or 1), *numbers)

    @property
    def prefix(self) -> str:
        """Such a text as `global_step3/bf16_zero2`."""
        layers = f".stages{self.stages}.layers{','.join(map(str, self.layers))}" if self.layers else ""
        experts = f".experts{','.join(map(str, self.experts))}" if self.experts else ""
        return f"{self.tag}/{self.type}zero{self.zero_stage}{layers}{experts}"

    def path(self, number: int, targets: int) -> str:
        """Return the path of a target. Numbers are as of `layout.ZeroLayout`; targets: how many there are."""
        apart = len(self.layers) + sum(self.experts)
        of_stages = targets - apart
        ranks = of_stages // 2 if self.zero_stage == 3 else of_stages // self.stages - 1
        if number < ranks * self.stages:
            model_rank, rank = divmod(number, ranks)
            return f"{self.tag}/{self.type}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
        if number >= of_stages:
            return f"{self.tag}/{self._apart(number - of_stages)}"
        rank = number - ranks * self.stages
        if self.zero_stage == 3:
            return f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return f"{self.tag}/mp_rank_{rank:02d}_model_states.pt"

    def _apart(self, number: int) -> str:
        if self.layers:
            return f"layer_{self.layers[number]:02d}-model_states.pt"
        ends = [*accumulate(self.experts)]
        layer = bisect_right(ends, number)
        expert = number - ends[layer] + self.experts[layer]
        return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def sorted_files(names: Iterable[str], folder: str) -> TagFiles:
    """Return the files of a checkpoint among the names in a folder. Raises ShardError if two are of one rank."""
    lying = sorted(names)
    return TagFiles(
        models=_by_place(_STATES, Ranks, lying, folder),
        optimizers=_by_place(_ZERO, Ranks, lying, folder),
        layers=_by_place(_LAYER, LayerPart, lying, folder),
        experts=_by_place(_EXPERT, Expert, lying, folder),
        expert_optimizers=_by_place(_EXPERT_OPTIMIZER, Ranks, lying, folder),
    )


_Place = TypeVar("_Place", Ranks, LayerPart, Expert)


def _by_place(pattern: str, kind: type[_Place], names: Iterable[str], folder: str) -> dict[_Place, str]:
    """Return the names that match a pattern, in the order of the numbers in them."""
    found: dict[_Place, str] = {}
    for name in names:
        match = re.fullmatch(pattern, name)
        if match is None:
            continue
        place = kind(*(int(match[field] or 0) for field in kind._fields))
        other = found.setdefault(place, name)
        if other != name:
            raise ShardError(
                "two files of a DeepSpeed checkpoint are of one rank",
                expected="one of them: the files of one save",
                got=f"{other} and {name}",
                where=folder,
                remedy="remove the files of the other save",
            )
    return dict(sorted(found.items()))
