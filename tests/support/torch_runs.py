"""Runs from and to files of torch: tensors of arrays for what is saved, and what a run has made of it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import reshard_mpi
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
