"""HDF5 files of other programs: every way elements can lie in a file that is read, and what names become."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import hdf5_peer

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.locations import ByteRanges, LibraryRead
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.sample_tensors import payload

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)
COMPRESSED = {"chunks": (3, 3), "compression": "gzip", "shuffle": True}
TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "?"]


def bits(array: np.ndarray[Any, Any]) -> bytes:
    """The elements in this machine's byte order."""
    return array.astype(array.dtype.newbyteorder("=")).tobytes()


@pytest.mark.parametrize(
    "storage, order, kind",
    [*itertools.product(({}, COMPRESSED), "<>", TYPES), ({"chunks": (2, 4)}, "<", "f4")],
    ids=str,
)
def test_types_byte_orders_and_storage(tmp_path: Path, kind: str, order: str, storage: dict[str, Any]) -> None:
    path = tmp_path / "w.h5"
    array = (NUMBERS * (1 if kind in ("?", "u1", "u2", "u4", "u8") else -1)).astype(np.dtype(kind).newbyteorder(order))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=array, **storage)
    entry = hdf5.locate(str(path)).tensors["w"]
    assert (entry.dtype.name, entry.shape) == (array.dtype.newbyteorder("=").name, (4, 6))
    assert (entry.box, entry.global_shape) == (None, None)
    assert isinstance(entry.source, LibraryRead if storage else ByteRanges)
    assert payload(entry) == bits(array)
    if isinstance(entry.source, LibraryRead):
        assert entry.source.chunk == storage["chunks"]
        part = entry.source.read(Box((1, 2), (4, 5)))
        assert part.flags.c_contiguous and part.shape == (3, 3)
        assert part.tobytes() == bits(array[1:4, 2:5])
        again = pickle.loads(pickle.dumps(entry.source))
        assert again.read(Box((0, 0), (1, 1))).tobytes() == bits(array[:1, :1])


@pytest.mark.parametrize("storage", [{}, {"chunks": (2,)}], ids=str)
def test_nan_payloads_keep_their_bits_in_either_byte_order(tmp_path: Path, storage: dict[str, Any]) -> None:
    path = tmp_path / "w.h5"
    raw = np.array([0x7F800001, 0xFFC12345, 0x7FA00000, 0x80000000], dtype=">u4")
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=raw.view(">f4"), **storage)
    assert payload(hdf5.locate(str(path)).tensors["w"]) == raw.astype("=u4").tobytes()


@pytest.mark.parametrize("libver", ["earliest", "v108", "latest"])
@pytest.mark.parametrize("userblock_bytes", [0, 512, 4096])
def test_every_version_of_the_structure(tmp_path: Path, libver: str, userblock_bytes: int) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w", libver=libver, userblock_size=userblock_bytes) as file:
        file["folder/w"] = NUMBERS
        file["folder/step"] = 3
        file.create_dataset("none", shape=(0, 3), dtype="f2")
    manifest = hdf5.locate(str(path))
    assert payload(manifest.tensors["folder/w"]) == NUMBERS.tobytes()
    assert payload(manifest.tensors["folder/step"]) == np.int64(3).tobytes()
    assert manifest.tensors["none"].source == ByteRanges(())
    for wrong in (path.read_bytes()[:-1], path.read_bytes() + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(ShardError, match=r"truncated|after its end"):
            hdf5.locate(str(path))


def test_compact_and_unwritten_datasets(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        compact = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I16BE, space, dcpl=properties)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, -2, 3], dtype="i2"))
        file.create_dataset("unwritten", shape=(2, 2), dtype="f4", fillvalue=1.5)
        file.create_dataset("sparse", shape=(5,), dtype="i4", chunks=(2,), fillvalue=7)[0] = 1
    tensors = hdf5.locate(str(path)).tensors
    assert payload(tensors["compact"]) == np.array([1, -2, 3], dtype="i2").tobytes()
    assert payload(tensors["unwritten"]) == np.full((2, 2), 1.5, dtype="f4").tobytes()
    assert payload(tensors["sparse"]) == np.array([1, 7, 7, 7, 7], dtype="i4").tobytes()
    assert [tensors[name].source.chunk for name in ("compact", "unwritten", "sparse")] == [(3,), (1, 1), (2,)]


def test_small_floats_by_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    e4m3 = h5py.h5t.IEEE_F16LE.copy()
    e4m3.set_fields(7, 3, 4, 0, 3)
    e4m3.set_size(1)
    e4m3.set_ebias(7)
    with h5py.File(path, "w") as file:
        for name, kind, raw in (
            ("b", hdf5_peer.bfloat16(), np.arange(3, dtype="u2")),
            ("f", e4m3, np.arange(3, dtype="u1")),
        ):
            handle = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((3,)))
            handle.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=kind)
    tensors = hdf5.locate(str(path)).tensors
    assert {name: tensor.dtype.name for name, tensor in tensors.items()} == {"b": "bfloat16", "f": "float8_e4m3fn"}
    assert payload(tensors["b"]) == np.arange(3, dtype="u2").tobytes()


def test_links_within_the_file_are_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["a/w"] = NUMBERS
        file["hard"] = file["a/w"]
        file["soft"] = h5py.SoftLink("/a/w")
        file["a/relative"] = h5py.SoftLink("w")
        file["folder"] = h5py.SoftLink("a")
        file["twice"] = h5py.SoftLink("/folder/relative")
        file["chunked"] = h5py.SoftLink("/folder/c")
        file["a"].create_dataset("c", data=NUMBERS, chunks=(2, 2))
    tensors = hdf5.locate(str(path)).tensors
    names = {"a/w", "a/relative", "a/c", "hard", "soft", "folder/w", "folder/relative", "folder/c", "twice", "chunked"}
    assert set(tensors) == names
    assert all(payload(tensor) == NUMBERS.tobytes() for tensor in tensors.values())


def test_groups_that_hold_themselves_end(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["a/w"] = NUMBERS
        file["a/b/up"] = file["a"]
        file["a/root"] = h5py.SoftLink("/")
        file["me"] = h5py.SoftLink(".")
    assert set(hdf5.locate(str(path)).tensors) == {"a/w"}


def test_creation_order_is_kept_where_it_is_tracked(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w", track_order=True) as file:
        for name in ("z", "b", "y", "a"):
            file[name] = NUMBERS
    assert list(hdf5.locate(str(path)).tensors) == ["z", "b", "y", "a"]


def test_scalar_strings(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["variable"] = "é层"
        file["empty"] = ""
        file["fixed"] = np.bytes_(b"abc")
        file["w"] = NUMBERS
    manifest = hdf5.locate(str(path))
    assert manifest.strings == {"variable": "é层", "empty": "", "fixed": "abc"}
    assert set(manifest.tensors) == {"w"}


def test_named_types_and_attributes_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["type"] = np.dtype("f4")
        file["w"] = NUMBERS
        file["w"].attrs["dtype"] = "int8"
        file.attrs["format"] = "something else"
    manifest = hdf5.locate(str(path))
    assert manifest.identity is None
    assert manifest.tensors["w"].dtype.name == "float32"


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=NUMBERS, chunks=(2, 2))
    source = hdf5.locate(str(path)).tensors["w"].source
    with h5py.File(path, "a") as file:
        file["w"][0, 0] = 9
        file["more"] = NUMBERS
    with pytest.raises(ShardError, match="changed"):
        source.read(Box((0, 0), (1, 1)))
