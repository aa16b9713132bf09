"""Native shards read by their index and through the library are the same, in sound files and in changed ones."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from support.examples import few, one_at_a_time

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import library_reader, native_shard
from reshard_mpi.formats.locations import ByteRange
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.formats.structure import opened
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import example_contents, sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

CONTENTS = ShardContents.of(SampleTensor.random(name, BY_NAME["float32"], (3, 5)) for name in "klmnopqrstuvw")


def located(path: Path) -> Manifest | str:
    try:
        return hdf5.locate(str(path))
    except ShardError as error:
        return str(error)


def located_by_library(path: Path) -> Manifest | str:
    try:
        with opened(str(path)) as file:
            hdf5.end_of_file(file)
        return library_reader.locate(str(path))
    except ShardError as error:
        return str(error)


def read_by_index(path: Path) -> Manifest | None:
    with opened(str(path)) as file:
        return native_shard.locate(file, end_of(path))


def end_of(path: Path) -> int:
    """Return where the HDF5 file ends, and the index begins: version 2 of the superblock says it at byte 28."""
    end_bytes: int = struct.unpack_from("<Q", path.read_bytes(), 28)[0]
    return end_bytes


@given(contents=example_contents.contents())
def test_both_ways_find_the_same(contents: ShardContents) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.h5"
        sample_tensors.write(hdf5, str(path), contents)
        assert read_by_index(path) == located_by_library(path)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 200, pytest.param(4000, marks=pytest.mark.slow)])
def test_any_number_of_tensors(tmp_path: Path, count: int) -> None:
    path = tmp_path / "shard.h5"
    box = Box.whole((70_000,))
    names = [f"model.layers.{n}.{'attention.' * (n % 40)}w" for n in range(count)]
    tensors = tuple(TensorSpec(name, BY_NAME["int8"], box.shape, box) for name in names)
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(2, 3, "x"), tensors, {"note": "text"}))
    by_index = read_by_index(path)
    assert by_index is not None and list(by_index.tensors) == names
    assert by_index == located_by_library(path)


@pytest.mark.parametrize(
    "dtype, shape", one_at_a_time(BY_NAME.values(), [(2,), (), (0,), (2, 0, 3), (1,) * 32]), ids=str
)
def test_any_type_and_shape(tmp_path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
    path = tmp_path / "shard.h5"
    whole = tuple(length + 3 for length in shape)
    box = Box(tuple(1 for _ in shape), tuple(length + 1 for length in shape))
    tensors = tuple(TensorSpec(name, dtype, whole, box) for name in ("w", "a/b/c", ".", "a//b"))
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, ""), tensors, {}))
    assert read_by_index(path) == located_by_library(path)


def test_sums_are_read_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    reserve_file(hdf5, str(path), sample_tensors.spec_of(CONTENTS)._replace(with_sums=True))
    before = hdf5.locate(str(path))
    sums = {name: 7 + number for number, name in enumerate(CONTENTS.tensors)}
    seal_file(hdf5, str(path), sums)
    with opened(str(path)) as file:
        assert native_shard.stored_sums(file, end_of(path)) == sums
    assert library_reader.stored_sums(str(path)) == sums
    assert read_by_index(path) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound shard."""
    sample_tensors.write(hdf5, str(tmp_path / "shard.h5"), CONTENTS)
    return tmp_path / "shard.h5"


def changed(path: Path, content: bytes) -> Manifest | str:
    path.write_bytes(content)
    return located(path)


@pytest.mark.slow
def test_any_byte_of_structure_changed(path: Path) -> None:
    """What the index says is believed only where all is as it was written; else the library says what there is."""
    sound, manifest = path.read_bytes(), hdf5.locate(str(path))
    payloads = {
        offset for entry in manifest.tensors.values() for part in entry.source.ranges for offset in span_of(part)
    }
    end = end_of(path)
    unused = range(end + 16, end + 20)  # the checksum of sums, where there are none
    with path.open("r+b") as file:
        for offset, byte in enumerate(sound):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << offset % 8]), offset)
            by_index = native_shard.locate(SourceFile(str(path), file.fileno()), end)
            assert by_index == (manifest if offset in payloads or offset in unused else None), offset
            if offset % 97 == 0:
                assert located(path) == located_by_library(path)
            os.pwrite(file.fileno(), sound[offset : offset + 1], offset)


def span_of(part: ByteRange) -> range:
    return range(part.offset_bytes, part.offset_bytes + part.length_bytes)


def test_sums_that_were_changed(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    reserve_file(hdf5, str(path), sample_tensors.spec_of(CONTENTS)._replace(with_sums=True))
    sums = {name: 7 + at for at, name in enumerate(CONTENTS.tensors)}
    seal_file(hdf5, str(path), sums)
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<3I", 7, 8, 9))
    content[at] ^= 1
    path.write_bytes(content)
    with opened(str(path)) as file:
        assert native_shard.stored_sums(file, end_of(path)) is None
    assert hdf5.stored_sums(str(path)) == {**sums, "k": 6}  # what the library reads there, as in any HDF5 file


# Indexes that lie, with right checksums

LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no version": lambda facts: facts.pop("version"),
    "another version": lambda facts: facts.update(version=1),
    "a payload beyond the file": lambda facts: facts["tensors"].__setitem__(1, 1 << 62),
    "a payload before the file": lambda facts: facts["tensors"].__setitem__(1, -4),
    "two payloads at one place": lambda facts: facts["tensors"].__setitem__(1, facts["tensors"][3]),
    "a payload in the structure": lambda facts: facts["tensors"].__setitem__(1, 0),
    "a way that is none": lambda facts: facts["tensors"].__setitem__(0, 7),
    "the last way from behind": lambda facts: facts["tensors"].__setitem__(0, -1),
    "no place": lambda facts: facts["tensors"].pop(),
    "one tensor less": lambda facts: facts.update(tensors=facts["tensors"][2:]),
    "one tensor more": lambda facts: facts["tensors"].extend((0, 0)),
    "places that are no numbers": lambda facts: facts["tensors"].__setitem__(1, "8"),
    "places that are not whole": lambda facts: facts["tensors"].__setitem__(1, 8.0),
    "a place that is true": lambda facts: facts["tensors"].__setitem__(0, False),
    "a type that is none": lambda facts: facts["ways"][0].__setitem__(0, "float31"),
    "another type of that size": lambda facts: facts["ways"][0].__setitem__(0, "float64"),
    "a shape below nothing": lambda facts: facts["ways"][0].__setitem__(1, [-3, 5]),
    "a shape that is huge": lambda facts: facts["ways"][0].__setitem__(1, [1 << 62, 1 << 62]),
    "a box outside of the whole": lambda facts: facts["ways"][0].__setitem__(2, [1, 0]),
    "fewer dimensions than the box": lambda facts: facts["ways"][0].__setitem__(3, [3]),
    "too many dimensions": lambda facts: facts["ways"].__setitem__(0, ["float32", [1] * 33, [0] * 33, [1] * 33]),
    "no ways": lambda facts: facts.update(ways=[]),
    "ways of nothing": lambda facts: facts.update(ways=[[]]),
    "a rank outside of the world": lambda facts: facts.update(rank=1),
    "a rank below nothing": lambda facts: facts.update(rank=-1),
    "a rank that is none": lambda facts: facts.update(rank=None),
    "a text outside of the file": lambda facts: facts.update(contents=[1 << 60, 10]),
    "a text without end": lambda facts: facts.update(strategy=[0, 1 << 40]),
    "another text": lambda facts: facts.update(contents=[0, 100]),
    "sums in the structure": lambda facts: facts.update(sums=[0, 100]),
    "nothing": lambda facts: facts.clear(),
}


def with_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of an index; its own checksum fits."""
    content, end = path.read_bytes(), end_of(path)
    mark, _, structure, sums, _ = struct.unpack_from("<8sIIIQ", content, end)
    head_bytes = struct.calcsize("<8sIIIQ")
    facts = json.loads(content[end + head_bytes :])
    change(facts)
    body = json.dumps(facts).encode()
    head = struct.pack("<8sIIIQ", mark, zlib.crc32(body), structure, sums, len(body))
    path.write_bytes(content[:end] + head + body)


@pytest.mark.parametrize("lie", LIES)
def test_lies(path: Path, lie: str) -> None:
    expected = located_by_library(path)
    with_index(path, lambda facts: None)
    assert read_by_index(path) == expected
    with_index(path, LIES[lie])
    assert read_by_index(path) is None
    assert located(path) == expected
    with pytest.raises(ShardError, match="not what was written"):
        hdf5.read_back(expected)


NO_INDEX = (b"", b"{", b"[]", b"1", b"null", b"[" * 100_000, b"\xff", b"[" + b"1," * (1 << 22) + b"1]")


@pytest.mark.parametrize("text", few(4, NO_INDEX), ids=range(len(NO_INDEX)))
def test_bodies_that_are_no_index(path: Path, text: bytes) -> None:
    content, end = path.read_bytes(), end_of(path)
    path.write_bytes(
        content[:end] + struct.pack("<8sIIIQ", native_shard.MARK, zlib.crc32(text), 0, 0, len(text)) + text
    )
    assert read_by_index(path) is None
    assert located(path) == located_by_library(path)


def test_lengths(path: Path) -> None:
    """A file that was cut, or goes on, is refused as any HDF5 file; one without its index is a native shard still."""
    content, end = path.read_bytes(), end_of(path)
    manifest = located(path)
    assert changed(path, content[:end]) == manifest
    for size_bytes in (end - 1, end + 1, end + 8, end + 27, end + 28, len(content) - 1):
        assert "is truncated" in (message := str(changed(path, content[:size_bytes]))) or "goes on" in message, (
            size_bytes
        )
    assert "goes on after its end" in str(changed(path, content + b"x"))
    assert "goes on after its end" in str(changed(path, content[:end] + b"x" * 100))


def more_attributes(file: h5py.File) -> None:
    file["w"].attrs["note"] = "x"


def another_box(file: h5py.File) -> None:
    rows = file["__reshard_mpi__/boxes"][()]
    rows[3] = ("float32", (6, 5), (2, 0))
    file["__reshard_mpi__/boxes"][()] = rows


def compressed_table(file: h5py.File) -> None:
    rows = file["__reshard_mpi__/boxes"][()]
    del file["__reshard_mpi__/boxes"]
    file.create_dataset("__reshard_mpi__/boxes", data=rows, compression="gzip")


def two_names(file: h5py.File) -> None:
    file["x"] = file["w"]


def compressed(file: h5py.File) -> None:
    del file["w"]
    file.create_dataset("w", data=np.ones((3, 5), "f4"), compression="gzip")


@pytest.mark.parametrize("edit", [more_attributes, another_box, compressed_table, two_names, compressed])
def test_edited_by_h5py(path: Path, edit: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "a") as file:
        edit(file)
    assert read_by_index(path) is None
    assert located(path) == located_by_library(path)


def test_a_file_after_other_content(path: Path) -> None:
    """Addresses in a file with a user block are no offsets."""
    shard = path.read_bytes()
    path.write_bytes(bytes(512) + shard)
    assert located(path) == located_by_library(path)
