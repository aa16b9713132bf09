"""Read layers and experts in the names of a Megatron model's tensors (`place_of`).

torch_dist stacks the layers of a model: `decoder.layers.mlp.linear_fc2.weight` has the layer as its first dimension,
and experts as the next one. Models whose layers are not alike have the layer's number in the name instead.
(megatron/core/transformer/transformer_block.py, moe/experts.py of Megatron-Core 0.19)
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Parts of a model in the order in which they are built.
_SECTIONS = ("embedding.", "decoder.layers.", "decoder.final_", "mtp.", "output_layer.")
_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?:(?P<number>\d{1,9})\.)?(?P<part>.+)")
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"(?P<before>.*\.(?:local_)?experts\.)(?P<number>\d{1,9})(?P<after>\..*)")


class NamedPlace(NamedTuple):
    """The place of a tensor in its model, as its name tells it.

    Attributes:
        section: which part of the model, in the order in which they are built; None: that is not known.
        layer, expert: its numbers, None where the name has none.
        part: the name without these.
        stacked_layers, stacked_experts: whether the tensor has them as its first dimensions.
    """

    section: int | None
    layer: int | None
    expert: int | None
    part: str
    stacked_layers: bool
    stacked_experts: bool


def place_of(key: str) -> NamedPlace:
    """Return the place of a tensor in its model."""
    section = next((number for number, begin in enumerate(_SECTIONS) if key.startswith(begin)), None)
    layer, part, stacked_layers = None, key, False
    if match := _LAYER.fullmatch(key):
        part, stacked_layers = match["part"], match["number"] is None
        layer = None if stacked_layers else int(match["number"])
    expert = None
    if found := _EXPERT.fullmatch(part):
        part, expert = f"{found['before']}*{found['after']}", int(found["number"])
    return NamedPlace(section, layer, expert, part, stacked_layers, _EXPERTS in key and expert is None)


def is_expert(key: str) -> bool:
    """Tell whether a tensor is of experts, which the ranks of expert parallelism share out."""
    place = place_of(key)
    return place.stacked_experts or place.expert is not None or ".experts." in key


def layer_axes(key: str) -> int:
    """Return how many of a tensor's first dimensions are layers and experts."""
    place = place_of(key)
    return place.stacked_layers + place.stacked_experts
