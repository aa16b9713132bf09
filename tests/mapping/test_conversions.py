"""Checkpoints converted through maps, whole commands: random equations, strategies, formats and types against numpy."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import read_shard, write_ranks
from support.equations import Case, cases

import reshard_mpi

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Any

# The types of --dtype that the labels fit exactly, or are rounded to nearest even in as numpy does it.
TYPES = {"fp64": np.dtype(np.float64), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
MESH = {"m": 2, "n": 3}
KINDS = ("ckpt", "hdf5", "safetensors")


class Cut(NamedTuple):
    """How tensors are cut over the mesh: for each tensor, which axis of the mesh cuts which dimension."""

    axes: dict[str, dict[int, str]]

    @property
    def text(self) -> str:
        lines = ["[mesh]", *(f"{axis} = {size}" for axis, size in MESH.items())]
        for name, axes in self.axes.items():
            split = ", ".join(f'{dim} = ["{axis}"]' for dim, axis in axes.items())
            lines += ["[[parameter]]", f'match = "{name}"', f"split = {{ {split} }}" if split else ""]
        return "\n".join(lines)

    def ranks(self, tensors: dict[str, Array]) -> dict[int, dict[str, Array]]:
        shards = {}
        for rank, indices in enumerate(product(*map(range, MESH.values()))):
            index_of = dict(zip(MESH, indices))
            shards[rank] = {name: self._slice(name, array, index_of) for name, array in tensors.items()}
        return shards

    def _slice(self, name: str, array: Array, index_of: dict[str, int]) -> Array:
        for dim, axis in self.axes[name].items():
            array = np.split(array, MESH[axis], axis=dim)[index_of[axis]]
        return np.array(array)


def cut(draw: Draw, tensors: dict[str, Array]) -> Cut:
    """Draw how tensors are cut, each in dimensions that can be cut."""
    axes: dict[str, dict[int, str]] = {}
    for name, array in tensors.items():
        axes[name] = {}
        for axis, size in MESH.items():
            able = [dim for dim in range(array.ndim) if array.shape[dim] % size == 0 and dim not in axes[name]]
            if able and draw(st.booleans()):
                axes[name][draw(st.sampled_from(able))] = axis
    return Cut(axes)


def floats(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def map_text(case: Case) -> str:
    axes = [f"{axis} = {length}" for axis, length in case.axes.items() if axis in case.equation]
    return "\n".join(["[axes]", *axes, "[[map]]", f'eq = "{case.equation}"'])


@pytest.mark.slow
@settings(max_examples=60)
@given(case=cases(), data=st.data())
def test_there_and_back_over_ranks_and_formats(case: Case, data: st.DataObject) -> None:
    left, right = floats(case.left), floats(case.right)
    one, other = cut(data.draw, left), cut(data.draw, right)
    kind = data.draw(st.sampled_from(KINDS))
    converted = data.draw(st.sampled_from([None, *TYPES]))
    if converted is not None:
        right = {name: array.astype(TYPES[converted]) for name, array in right.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one.toml").write_text(one.text)
        (folder / "other.toml").write_text(other.text)
        (folder / "map.toml").write_text(map_text(case))
        write_ranks(one.ranks(left), folder / "start", data.draw(st.sampled_from(KINDS)))
        options: dict[str, Any] = {"map": folder / "map.toml", "dtype": converted or ()}
        strategies = folder / "one.toml", folder / "other.toml"
        reshard_mpi.transform(
            folder / "start", folder / "there", *strategies, to=kind, verify=True, forward=True, **options
        )
        for rank, expected in other.ranks(right).items():
            ending = {"ckpt": "ckpt", "hdf5": "h5", "safetensors": "safetensors"}[kind]
            written = read_shard(folder / "there" / f"rank_{rank}" / f"checkpoint_{rank}.{ending}")
            assert written == {
                name: (array.dtype.name, array.shape, array.tobytes()) for name, array in expected.items()
            }
        reshard_mpi.verify(folder / "start", folder / "there", *strategies, forward=True, **options)
        reshard_mpi.diff(folder / "start", folder / "there", *strategies, forward=True, **options)
        back = {**options, "dtype": "fp32" if converted else ()}
        reshard_mpi.transform(folder / "there", folder / "back", *strategies[::-1], to="ckpt", reverse=True, **back)
        if converted in (None, "fp64"):
            for rank, expected in one.ranks(left).items():
                written = read_shard(folder / "back" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
                assert written == {name: ("float32", array.shape, array.tobytes()) for name, array in expected.items()}
