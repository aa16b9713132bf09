"""Full checkpoints in safetensors as arrays by name, and maps that they are taken through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support.checkpoints import read_shard, write_ranks

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]


def floats(*shape: int, first: int = 0) -> Array:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def source_of(folder: Path, tensors: Tensors) -> Path:
    write_ranks({0: tensors}, folder / "src", "safetensors")
    return folder / "src"


def map_of(folder: Path, text: str) -> Path:
    path = folder / "map.toml"
    path.write_text(text)
    return path


def held(folder: Path) -> Tensors:
    """Return the tensors of a full checkpoint in safetensors, as arrays."""
    read = read_shard(folder / "rank_0" / "checkpoint_0.safetensors")
    types = {"bfloat16": ml_dtypes.bfloat16}
    return {
        name: np.frombuffer(content, np.dtype(types.get(dtype, dtype))).reshape(shape)
        for name, (dtype, shape, content) in read.items()
    }


def assert_held(folder: Path, expected: Tensors) -> None:
    found = held(folder)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name


class Weights:
    """Arrays no two of whose elements are equal."""

    def __init__(self) -> None:
        self._next = 1

    def __call__(self, *shape: int) -> Array:
        size = int(np.prod(shape))
        array = np.arange(self._next, self._next + size, dtype=np.float32).reshape(shape)
        self._next += size
        return array
