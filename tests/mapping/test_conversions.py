"""Large tensors through maps, whole commands: in several blocks, of any byte order and type, against numpy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cut_checkpoints import TYPES
from support.examples import many

import reshard_mpi

pytestmark = pytest.mark.slow

# About as many bytes as are read, converted or joined at a time, as float32.
ABOUT = (256 << 10, 2 << 20, 4 << 20, 8 << 20)


@many(6)
@given(
    about=st.sampled_from(ABOUT),
    more=st.integers(-2, 2),
    columns=st.sampled_from([1, 3, 64, 1000]),
    order=st.sampled_from("<>"),
    chunks=st.sampled_from([None, (1000, 1), (70, 900), (1 << 20, 64)]),
    joined=st.booleans(),
    turned=st.booleans(),
    converted=st.sampled_from([None, *TYPES]),
    jobs=st.sampled_from([1, 2]),
    to=st.sampled_from(["hf", "hdf5"]),
)
def test_tensors_of_several_blocks(
    about: int, more: int, columns: int, order: str, chunks: tuple[int, int] | None, joined: bool, turned: bool,
    converted: str | None, jobs: int, to: str,
) -> None:  # fmt: skip
    """Tensors that are moved in several blocks: of either byte order, in compressed chunks, turned, joined, padded."""
    rows = about // 4 // columns + more
    whole = np.random.default_rng(about + more).standard_normal((rows, columns), np.float32) * 100
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with h5py.File(folder / "source.h5", "w") as file:
            stored = {} if chunks is None else {"chunks": tuple(map(min, chunks, whole.shape)), "compression": "lzf"}
            file.create_dataset("w", data=whole.astype(f"{order}f4"), **stored)
            file.create_dataset("u", data=-whole, **stored)
        right = "(v | 64) h" if not turned else "h (v | 64)"
        equation = (
            f"w [v h], u [v h] <=> x [{right.replace('v |', '(v + v) |')}]" if joined else f"w [v h] <=> x [{right}]"
        )
        (folder / "map.toml").write_text(f"[axes]\nv = {rows}\n[[map]]\neq = '{equation}'\n")
        expected = np.concatenate([whole, -whole]) if joined else whole
        expected = np.pad(expected, ((0, -len(expected) % 64), (0, 0)))
        expected = (expected.T if turned else expected).astype(TYPES.get(converted or "", np.dtype(np.float32)))
        options: dict[str, Any] = {"map": folder / "map.toml", "dtype": converted or ()}
        reshard_mpi.transform(folder / "source.h5", folder / "there", to=to, jobs=jobs, **options)
        made = reshard_mpi.load_rank(0, folder / "there")["x"]
        assert (made.dtype, made.shape, made.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        reshard_mpi.diff(folder / "source.h5", folder / "there", **options)
        back = {**options, "dtype": "fp32" if converted else ()}
        reshard_mpi.transform(folder / "there", folder / "back", to="safetensors", reverse=True, **back)
        narrowed = whole.astype(TYPES.get(converted or "", np.dtype(np.float32))).astype(np.float32)
        assert reshard_mpi.load_rank(0, folder / "back")["w"].tobytes() == narrowed.tobytes()
