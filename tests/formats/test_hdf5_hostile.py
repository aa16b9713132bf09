"""HDF5 files that are damaged or made to harm: refused by name, and nothing outside them is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import hdf5_peer
from support.hostile_hdf5 import (
    external_link,
    external_storage,
    groups_that_share_members,
    soft_link_through_an_external_one,
    soft_links_that_multiply,
    virtual_dataset,
)

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import hdf5, structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)


def growing_virtual_dataset(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(shape=(4, 6), dtype="f4", maxshape=(None, 6))
    source = h5py.VirtualSource(str(secret), "w", shape=(4, 6), maxshape=(None, 6))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file.create_virtual_dataset("w", layout)


@pytest.mark.parametrize(
    "make, message",
    [
        (external_link, "leaves the file"),
        (soft_link_through_an_external_one, "leaves the file"),
        (external_storage, "other files"),
        (virtual_dataset, "other files"),
        (growing_virtual_dataset, "other files"),
    ],
)
def test_other_files_are_never_opened(tmp_path: Path, make: Callable[[h5py.File, Path], None], message: str) -> None:
    secret, path = tmp_path / "secret", tmp_path / "w.h5"
    with h5py.File(secret, "w") as file:
        file.create_dataset("w", data=NUMBERS, chunks=(1, 6), maxshape=(None, 6))
    with h5py.File(path, "w") as file:
        make(file, secret)
    # Reading it now would fail in another way, and be seen in its access time.
    secret.unlink()
    secret.write_bytes(b"no HDF5")
    os.utime(secret, ns=(1, 1))
    with pytest.raises(ShardError, match=message) as caught:
        hdf5.locate(str(path))
    assert secret.stat().st_atime_ns == 1
    assert str(path) in caught.value.where


def dangling(file: h5py.File) -> None:
    file["w"] = h5py.SoftLink("/nowhere")


def circle(file: h5py.File) -> None:
    file["w"] = h5py.SoftLink("/v")
    file["v"] = h5py.SoftLink("/w")


def through_a_dataset(file: h5py.File) -> None:
    file["a"] = NUMBERS
    file["w"] = h5py.SoftLink("/a/x")


def null_space(file: h5py.File) -> None:
    file["w"] = h5py.Empty("f4")


def compound(file: h5py.File) -> None:
    file["w"] = np.zeros(3, dtype=[("a", "i4"), ("b", "f4")])


def almost_complex(file: h5py.File) -> None:
    file["w"] = np.zeros(3, dtype=[("r", "f4"), ("i", "f8")])


def array_type(file: h5py.File) -> None:
    file.create_dataset("w", shape=(3,), dtype=np.dtype(("f4", (2,))))


def opaque(file: h5py.File) -> None:
    file["w"] = np.zeros(3, dtype="V2")


def enumeration(file: h5py.File) -> None:
    file.create_dataset("w", shape=(3,), dtype=h5py.enum_dtype({"A": 0, "B": 1}, basetype="i1"))


def list_of_strings(file: h5py.File) -> None:
    file["w"] = ["a", "b"]


def references(file: h5py.File) -> None:
    file.create_dataset("w", shape=(3,), dtype=h5py.ref_dtype)


def odd_integer(file: h5py.File) -> None:
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    h5py.h5d.create(file.id, b"w", kind, h5py.h5s.create_simple((3,)))


def odd_float(file: h5py.File) -> None:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(100)
    h5py.h5d.create(file.id, b"w", kind, h5py.h5s.create_simple((3,)))


def long_string(file: h5py.File) -> None:
    file["w"] = "x" * (structure.MAX_STRING_BYTES + 1)


def long_fixed_string(file: h5py.File) -> None:
    file["w"] = np.bytes_(b"x" * (structure.MAX_STRING_BYTES + 1))


def absurd_shape(file: h5py.File) -> None:
    file.create_dataset("w", shape=(1 << 40, 1 << 40), dtype="f8", chunks=(1, 1))


def name_that_is_no_text(file: h5py.File) -> None:
    h5py.h5g.create(file.id, b"\xff\xfe")


@pytest.mark.parametrize(
    "make, message",
    [
        (dangling, "leads nowhere"),
        (circle, "leads round in circles"),
        (through_a_dataset, "leads nowhere"),
        (null_space, "no shape"),
        (compound, "type that no tensor has"),
        (almost_complex, "type that no tensor has"),
        (array_type, "type that no tensor has"),
        (opaque, "type that no tensor has"),
        (enumeration, "type that no tensor has"),
        (list_of_strings, "type that no tensor has"),
        (references, "type that no tensor has"),
        (odd_integer, "type that no tensor has"),
        (odd_float, "type that no tensor has"),
        (long_string, "too long"),
        (long_fixed_string, "too long"),
        (absurd_shape, "impossibly large"),
        (name_that_is_no_text, "not UTF-8"),
    ],
)
def test_refused(tmp_path: Path, make: Callable[[h5py.File], None], message: str) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        make(file)
    with pytest.raises(ShardError, match=message) as caught:
        hdf5.locate(str(path))
    assert caught.value.where.startswith(str(path))


@pytest.mark.parametrize("make", [groups_that_share_members, soft_links_that_multiply])
def test_endless_files_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[h5py.File], None]) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        make(file)
    monkeypatch.setattr(structure, "MAX_TENSORS", 2000)
    with pytest.raises(ShardError, match="too many objects"):
        hdf5.locate(str(path))


# Native shards whose parts do not fit

TABLE = "__reshard_mpi__/boxes"


def set_attribute(where: str, name: str, content: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[where].attrs[name]
        if content is not None:
            file[where].attrs[name] = content

    return change


def set_contents(content: bytes) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["__reshard_mpi__/contents"]
        file["__reshard_mpi__/contents"] = np.frombuffer(content, np.uint8)

    return change


def remove(name: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def set_row(field: str, content: Any) -> Callable[[h5py.File], None]:
    """Say something else of the first tensor."""

    def change(file: h5py.File) -> None:
        rows = file[TABLE][()]
        rows[0][field] = content
        file[TABLE][()] = rows

    return change


def set_table(make: Callable[[Any], Any]) -> Callable[[h5py.File], None]:
    """Put what `make` makes of the rows in the place of the table."""

    def change(file: h5py.File) -> None:
        table = make(file[TABLE][()])
        del file[TABLE]
        file[TABLE] = table

    return change


def table_that_is_a_group(file: h5py.File) -> None:
    del file[TABLE]
    file.create_group(TABLE)


def table_without_elements(file: h5py.File) -> None:
    kind = file[TABLE].dtype
    del file[TABLE]
    file.create_dataset(TABLE, (2,), kind)


def huge_table(file: h5py.File) -> None:
    """A tebibyte that takes no room in the file."""
    kind = file[TABLE].dtype
    del file[TABLE]
    file.create_dataset(TABLE, (1 << 35,), kind, chunks=(1024,))


def table_with_external_storage(file: h5py.File) -> None:
    kind = file[TABLE].dtype
    del file[TABLE]
    file.create_dataset(TABLE, (2,), kind, external=[("/etc/passwd", 0, 2 * kind.itemsize)])


def rows_of(dimensions: int) -> np.dtype[Any]:
    return np.dtype([("dtype", "S16"), ("global_shape", "<i8", (dimensions,)), ("offset", "<i8", (dimensions,))])


def in_three_dimensions(rows: Any, padding: int) -> Any:
    """Return rows with room for a third dimension, in which they have `padding` and not the 0 of no dimension."""
    wider = np.zeros(2, rows_of(3))
    wider["dtype"], wider["global_shape"][:, :2] = rows["dtype"], rows["global_shape"]
    wider["global_shape"][:, 2] = padding
    return wider


def add_a_tensor(file: h5py.File) -> None:
    file["more"] = NUMBERS


def name_twice(file: h5py.File) -> None:
    set_contents(json.dumps({"tensors": ["w", "w"], "strings": {}}).encode())(file)
    del file["__reshard_mpi__/tensors/%2E"]


def unescapable(file: h5py.File) -> None:
    file.move("__reshard_mpi__/tensors/%2E", "__reshard_mpi__/tensors/%2e")


NATIVE = {
    "newer version": (set_attribute("/", "version", 3), "version that this program does not know"),
    "earlier version": (set_attribute("/", "version", 1), "earlier form"),
    "no version": (set_attribute("/", "version", None), "`version`"),
    "version a text": (set_attribute("/", "version", "1"), "`version`"),
    "version a list": (set_attribute("/", "version", [1, 1]), "`version`"),
    "rank negative": (set_attribute("/", "rank", -1), "`rank`"),
    "rank beyond the ranks": (set_attribute("/", "rank", 1), "not among its ranks"),
    "type unknown": (set_row("dtype", b"float31"), "element type"),
    "type no text": (set_row("dtype", b"\xff"), "element type"),
    "type of another size": (set_row("dtype", b"float64"), "element type"),
    "type of the same size": (set_row("dtype", b"int32"), "element type"),
    "no type": (set_row("dtype", b""), "element type"),
    "offset outside": (set_row("offset", [1, 0]), "does not lie"),
    "offset negative": (set_row("offset", [-1, 0]), "does not lie"),
    "offset huge": (set_row("offset", [(1 << 63) - 1, 0]), "does not lie"),
    "whole smaller than the box": (set_row("global_shape", [4, 5]), "does not lie"),
    "whole negative": (set_row("global_shape", [-4, 6]), "does not lie"),
    "more dimensions than the tensor": (set_table(lambda rows: in_three_dimensions(rows, 1)), "does not lie"),
    "no table": (remove(TABLE), "missing"),
    "a table that is a group": (table_that_is_a_group, "no dataset"),
    "a table without elements": (table_without_elements, "element type"),
    "a table of a huge length": (huge_table, "not one row a tensor"),
    "a table in another file": (table_with_external_storage, "other files"),
    "a row too few": (set_table(lambda rows: rows[:1]), "not one row a tensor"),
    "a row too many": (set_table(lambda rows: np.concatenate([rows, rows[:1]])), "not one row a tensor"),
    "rows of two dimensions": (set_table(lambda rows: rows.reshape(2, 1)), "not one row a tensor"),
    "a table of numbers": (set_table(lambda rows: np.zeros(2, "<i8")), "not one row a tensor"),
    "rows without offsets": (set_table(lambda rows: rows[["dtype", "global_shape"]]), "not one row a tensor"),
    "rows of one dimension": (set_table(lambda rows: np.zeros(2, rows_of(1))), "element type"),
    "rows of too many dimensions": (set_table(lambda rows: np.zeros(2, rows_of(33))), "not one row a tensor"),
    "rows of narrow numbers": (
        set_table(lambda rows: rows.astype([("dtype", "S16"), ("global_shape", "<i4", (2,)), ("offset", "<i4", (2,))])),
        "not one row a tensor",
    ),
    "rows of single numbers": (
        set_table(lambda rows: np.zeros(2, [("dtype", "S16"), ("global_shape", "<i8"), ("offset", "<i8")])),
        "not one row a tensor",
    ),
    "a tensor is gone": (remove("w"), "not those in its list"),
    "a tensor too many": (add_a_tensor, "not those in its list"),
    "no contents": (remove("__reshard_mpi__/contents"), "missing"),
    "no strategy": (remove("__reshard_mpi__/strategy"), "missing"),
    "no reserved group": (remove("__reshard_mpi__"), "missing"),
    "contents no JSON": (set_contents(b"{"), "cannot be read"),
    "contents no text": (set_contents(b"\xff"), "cannot be read"),
    "contents of other shape": (set_contents(b"[]"), "cannot be read"),
    "contents without names": (set_contents(b'{"strings": {}}'), "cannot be read"),
    "contents with numbers": (set_contents(b'{"tensors": [1], "strings": {}}'), "damaged"),
    "contents too deep": (set_contents(b"[" * 100_000), "cannot be read"),
    "a name twice": (name_twice, "listed twice"),
    "an escaped name damaged": (unescapable, "escaped"),
}


@pytest.mark.parametrize("case", NATIVE)
def test_native_shards_that_contradict_themselves(tmp_path: Path, case: str) -> None:
    change, message = NATIVE[case]
    path = tmp_path / "shard.h5"
    tensors = [SampleTensor.random(name, BY_NAME["float32"], (4, 6)) for name in ("w", ".")]
    sample_tensors.write(hdf5, str(path), ShardContents.of(tensors))
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(ShardError, match=message) as caught:
        hdf5.locate(str(path))
    assert caught.value.where.startswith(str(path))


def test_a_native_tensor_that_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    hdf5_peer.write(path, ShardContents.of([SampleTensor.random("w", BY_NAME["float32"], (4, 6))]))
    with h5py.File(path, "a") as file:
        del file["w"]
        file.create_dataset("w", shape=(4, 6), dtype="f4")
    with pytest.raises(ShardError, match="never written"):
        hdf5.locate(str(path))
