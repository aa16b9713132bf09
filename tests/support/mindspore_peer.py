"""MindSpore itself as a peer: it saves, transforms and loads checkpoints, in the terms of the other tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from support.checkpoints import Read

Arrays = Mapping[str, np.ndarray]

_KINDS = {"bool": "bool_"}  # where MindSpore's name is not numpy's


def tensor_of(array: np.ndarray) -> Any:
    """Make a MindSpore tensor of these very bits."""
    kind = getattr(ms, _KINDS.get(array.dtype.name, array.dtype.name))
    return ms.Tensor.convert_bytes_to_tensor(array.tobytes(), array.shape, kind)


def save(arrays: Arrays, path: Path, **options: Any) -> None:
    """Save a shard with MindSpore, making its folder; options: as `save_checkpoint` takes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"name": name, "data": ms.Parameter(tensor_of(array), name=name)} for name, array in arrays.items()]
    ms.save_checkpoint(entries, str(path), **options)


def load(path: Path) -> tuple[Read, dict[str, str]]:
    """Load a shard with MindSpore: its tensors and its strings."""
    loaded = ms.load_checkpoint(str(path))
    strings = {name: value for name, value in loaded.items() if isinstance(value, str)}
    tensors = {
        name: (str(value.dtype).lower(), tuple(value.shape), bytes(value.get_bytes()))
        for name, value in loaded.items()
        if name not in strings
    }
    return tensors, strings
