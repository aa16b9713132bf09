"""Name chunks of tensors in the files of a Megatron checkpoint by tensor and place (`NamedChunk`, `chunk_of`).

A file lists its tensors by name alone, so the name of a chunk says of which tensor it is, where it begins, and of what
shape the whole is: `decoder.layers.mlp.linear_fc2.weight [3, 0, 0] of [4, 32, 48]`. What is no chunk has another name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard_mpi.formats.tensor_table import TensorType

_NAME = re.compile(r"(?P<key>.*) \[(?P<start>[\d, ]*)\] of \[(?P<whole>[\d, ]*)\]", re.DOTALL)


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
    match = _NAME.fullmatch(name)
    return None if match is None else NamedChunk(match["key"], _numbers(match["start"]), _numbers(match["whole"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def item_kind(name: str, kind: TensorType) -> TensorType:
    """Return the kind of the item that a file has of a tensor."""
    chunk = chunk_of(name)
    return kind if chunk is None else TensorType(kind.dtype, chunk.shape(kind))
