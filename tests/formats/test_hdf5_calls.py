"""Datasets that are created by calls of the library itself are those that h5py creates."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from h5py import h5f
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.formats import hdf5
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import writer
from reshard_mpi.formats.hdf5 import writer as writing
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.sharding.box import Box

SAMPLE = [TensorSpec(f"{layer}/w", BY_NAME["float32"], (4, 4), Box((0, 2), (4, 4))) for layer in range(20)]


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Draw tensors with names in groups, of groups and with what HDF5 has no names for; boxes may be empty."""
    parts = st.sampled_from(["w", "layer", "é", ".", "", "a\0b", "__reshard_mpi__", "n" * 300])
    names = draw(st.lists(st.lists(parts, min_size=1, max_size=3).map("/".join).filter(bool), max_size=12, unique=True))
    drawn = []
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        start = tuple(draw(st.integers(0, length)) for length in shape)
        stop = tuple(draw(st.integers(low, length)) for low, length in zip(start, shape))
        drawn.append(TensorSpec(name, BY_NAME[draw(st.sampled_from(sorted(BY_NAME)))], shape, Box(start, stop)))
    return drawn


def reserved(path: Path, tensors: list[TensorSpec]) -> bytes:
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 2, "table"), tuple(tensors), {"note": "x"}))
    return path.read_bytes()


@given(tensors=specs())
def test_both_ways_write_the_same_bytes(tensors: list[TensorSpec]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        assert writer.library() is not None
        content = reserved(Path(folder, "shard.h5"), tensors)
        patch.setattr(writer, "library", lambda: None)
        Path(folder, "shard.h5").unlink()
        assert content == reserved(Path(folder, "shard.h5"), tensors)


def test_a_library_without_these_functions_is_reached_through_h5py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reserved(tmp_path / "expected.h5", SAMPLE)
    writer.library.cache_clear()
    monkeypatch.setattr(writer.ctypes, "PyDLL", lambda _: object())
    try:
        assert writer.library() is None
        assert reserved(tmp_path / "shard.h5", SAMPLE) == expected
    finally:
        writer.library.cache_clear()


def test_an_error_says_why(tmp_path: Path) -> None:
    """The cause comes last, as it has the number of a system error, if there is one."""
    file = writing._create(str(tmp_path / "file.h5"))
    writer = writing._NativeWriter(writing.h5g.open(file, b"/"))
    kind = writing.h5t.IEEE_F32LE
    assert writer.tensor(("w",), kind, (3,), ()) > 0
    with pytest.raises(RuntimeError, match="name already exists"):
        writer.tensor(("w",), kind, (3,), ())
    assert writer.tensor(("v",), kind, (3,), ()) > 0
    assert h5f.get_obj_count(file, h5f.OBJ_DATASET) == 0, "a dataset was left open"


def test_attributes_that_cannot_be_attached_leave_nothing_open(tmp_path: Path) -> None:
    file = writing._create(str(tmp_path / "file.h5"))
    writer = writing._NativeWriter(writing.h5g.open(file, b"/"))
    twice = (writing.attributes.numbers("offset", (1, 2)),) * 2
    with pytest.raises(RuntimeError, match="already exists"):
        writer.tensor(("w",), writing.h5t.IEEE_F32LE, (3,), twice)
    assert h5f.get_obj_count(file, h5f.OBJ_DATASET | h5f.OBJ_ATTR) == 0
