"""Read layers and experts in the names of Megatron's tensors (`place_of`), and name their chunks (`chunk_of`).

torch_dist stacks the layers of a model: `decoder.layers.mlp.linear_fc2.weight` has the layer as its first dimension,
and experts as the next one. Models whose layers are not alike have the layer's number in the name instead.
(megatron/core/transformer/transformer_block.py, moe/experts.py of Megatron-Core 0.19)

A file lists its tensors by name alone, so the name of a chunk says of which tensor it is, where it begins, and of what
shape the whole is: `decoder.layers.mlp.linear_fc2.weight [3, 0, 0] of [4, 32, 48]`. What is no chunk has another name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard_mpi.formats.tensor_table import TensorType

# Parts of a model in the order in which they are built.
_SECTIONS = ("embedding.", "decoder.layers.", "decoder.final_", "mtp.", "output_layer.")
_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?:(?P<number>\d{1,9})\.)?(?P<part>.+)")
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"(?P<before>.*\.(?:local_)?experts\.)(?P<number>\d{1,9})(?P<after>\..*)")
_CHUNK = re.compile(r"(?P<key>.*) \[(?P<start>[\d, ]*)\] of \[(?P<whole>[\d, ]*)\]", re.DOTALL)


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


class NamedChunk(NamedTuple):
    """A chunk of a tensor: the key of that, where the chunk begins, and the shape of the whole."""

    key: str
    start: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.key} {list(self.start)} of {list(self.whole)}"

    def shape(self, kind: TensorType) -> tuple[int, ...]:
        """Return the shape of the chunk, which lies in a file without the dimensions that are layers and experts."""
        return (*(1,) * (len(self.whole) - len(kind.shape)), *kind.shape)


def chunk_of(name: str) -> NamedChunk | None:
    """Return the chunk of this name; None if it is the name of something else."""
    match = _CHUNK.fullmatch(name)
    return None if match is None else NamedChunk(match["key"], _numbers(match["start"]), _numbers(match["whole"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def item_kind(name: str, kind: TensorType) -> TensorType:
    """Return the kind of the item that a file has of a tensor."""
    chunk = chunk_of(name)
    return kind if chunk is None else TensorType(kind.dtype, chunk.shape(kind))
