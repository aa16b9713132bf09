"""Runs from and to files of torch: tensors of arrays for what is saved, and what a run has made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import reshard_mpi
from reshard_mpi.testing.sample_tensors import SampleTensor
from support import torch_peer
from support.checkpoints import sample

Array = np.ndarray[Any, np.dtype[Any]]
_keys = count()


def stored(array: Any) -> torch_peer.Tensor:
    """Return an array as a tensor that has a storage of its own."""
    return torch_peer.tensor(sample("", np.asarray(array)), f"of_array_{next(_keys)}")


def array_of(made: torch_peer.Tensor) -> Array:
    """Return the tensor of a file as an array."""
    stored = torch_peer.sample_of("", made)
    return np.frombuffer(stored.content, stored.dtype.name).reshape(stored.shape)


def tree_of(folder: Path, rank: int = 0) -> Any:
    """Return what the file of `rank` holds in a folder of targets."""
    return torch_peer.load(folder / f"rank_{rank}" / f"checkpoint_{rank}.pt")


def transformed(source: Path, target: Path, *strategies: Path | None, **options: Any) -> Any:
    """Transform to files of torch, and return what the first one holds."""
    reshard_mpi.transform(source, target, *strategies, **options)
    return tree_of(target)


def tree_made_of(folder: Path, source: Any, *strategies: Path | None, **options: Any) -> Any:
    """Save a value as `x.pt` in a folder, transform that, and return what the file in its place in `dst` holds."""
    torch_peer.save(folder / "x.pt", source)
    return transformed(folder / "x.pt", folder / "dst", *strategies, **options)


def samples_in(tree: Any) -> dict[str, SampleTensor]:
    """Return the tensors in nested dictionaries, by their keys joined by dots."""

    def leaves(value: Any, *keys: str) -> Iterator[tuple[str, torch_peer.Tensor]]:
        if isinstance(value, torch_peer.Tensor):
            yield ".".join(keys), value
        for key, entry in value.items() if isinstance(value, dict) else ():
            yield from leaves(entry, *keys, str(key))

    return {name: torch_peer.sample_of(name, tensor) for name, tensor in leaves(tree)}


def require_equal(made: Mapping[str, SampleTensor], expected: Mapping[str, SampleTensor]) -> None:
    """Require what is expected to be among what was made."""
    for name, whole in expected.items():
        sample = made[name]
        assert (sample.dtype, sample.shape, sample.content) == (whole.dtype, whole.shape, whole.content), name
