"""Tensors that are cut over the ranks of a mesh by a random strategy, and what every rank must hold of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import reshard_mpi
from support.equations import Case

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Any

# The types of --dtype that the labels fit exactly, or are rounded to nearest even in as numpy does it.
TYPES = {"fp64": np.dtype(np.float64), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
MESHES = ({"m": 1, "n": 1}, {"m": 2, "n": 1}, {"m": 2, "n": 3}, {"m": 3, "n": 2}, {"m": 1, "n": 4})
KINDS = ("ckpt", "hdf5", "safetensors")
# Formats whose checkpoints say themselves how they are cut.
DESCRIBED = ("hdf5", "dcp")


class Cut(NamedTuple):
    """How tensors are cut over a mesh: for each tensor, which axis of the mesh cuts which dimension."""

    mesh: dict[str, int]
    axes: dict[str, dict[int, str]]

    @property
    def text(self) -> str:
        lines = ["[mesh]", *(f"{axis} = {size}" for axis, size in self.mesh.items())]
        for name, axes in self.axes.items():
            split = ", ".join(f'{dim} = ["{axis}"]' for dim, axis in axes.items())
            lines += ["[[parameter]]", f'match = "{name}"', f"split = {{ {split} }}" if split else ""]
        return "\n".join(lines)

    def ranks(self, tensors: dict[str, Array]) -> dict[int, dict[str, Array]]:
        shards = {}
        for rank, indices in enumerate(product(*map(range, self.mesh.values()))):
            index_of = dict(zip(self.mesh, indices))
            shards[rank] = {name: self._slice(name, array, index_of) for name, array in tensors.items()}
        return shards

    def _slice(self, name: str, array: Array, index_of: dict[str, int]) -> Array:
        for dim, axis in self.axes[name].items():
            array = np.split(array, self.mesh[axis], axis=dim)[index_of[axis]]
        return np.array(array)


def cut(draw: Draw, tensors: dict[str, Array]) -> Cut:
    """Draw how tensors are cut, each in dimensions that can be cut."""
    mesh = draw(st.sampled_from(MESHES))
    axes: dict[str, dict[int, str]] = {}
    for name, array in tensors.items():
        axes[name] = {}
        for axis, size in mesh.items():
            able = [dim for dim in range(array.ndim) if array.shape[dim] % size == 0 and dim not in axes[name]]
            if size > 1 and able and draw(st.booleans()):
                axes[name][draw(st.sampled_from(able))] = axis
    return Cut(mesh, axes)


def in_floats(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def map_text(case: Case) -> str:
    axes = [f"{axis} = {length}" for axis, length in case.axes.items() if axis in case.equation]
    return "\n".join(["[axes]", *axes, "[[map]]", f'eq = "{case.equation}"'])


def assert_ranks(folder: Path, kind: str, expected: Cut, tensors: dict[str, Array], strategy: Path) -> None:
    """See that the shards of every rank are those of the tensors as they are cut, bit by bit."""
    source = None if kind in (*DESCRIBED, "hf") else strategy
    for rank, arrays in expected.ranks(tensors).items():
        loaded = reshard_mpi.load_rank(rank, folder, source, strategy)
        assert {name: (array.dtype, array.shape, array.tobytes()) for name, array in loaded.items()} == {
            name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()
        }
