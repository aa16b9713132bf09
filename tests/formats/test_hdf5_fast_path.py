"""Native shards read byte by byte and through the library are the same, in sound files and in changed ones."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hdf5_peer

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import checksums, direct, reading, superblock
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import samples, strategies
from reshard_mpi.testing.samples import Contents, SampleTensor

# The headers of the first few tensors of a shard are in pieces, and left to the library.
CONTENTS = Contents.of(SampleTensor.random(name, BY_NAME["float32"], (3, 5)) for name in "klmnopqrstuvw")


def located(path: Path) -> Manifest | str:
    try:
        return hdf5.locate(str(path))
    except ShardError as error:
        return str(error)


def located_by_library(path: Path) -> Manifest | str:
    try:
        with path.open("rb") as file:
            superblock.check_length(file.fileno(), str(path), path.stat().st_size)
        return reading.locate(str(path))
    except ShardError as error:
        return str(error)


def read_directly(path: Path) -> Manifest | None:
    with path.open("rb") as file:
        return direct.locate(file.fileno(), str(path), path.stat().st_size)


@given(contents=strategies.contents())
def test_both_ways_find_the_same(contents: Contents) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.h5"
        samples.write(hdf5, str(path), contents)
        assert read_directly(path) == located_by_library(path)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 200, 4000])
def test_any_number_of_tensors(tmp_path: Path, count: int) -> None:
    """The library keeps links in the group's header, in a heap, or in heaps of heaps, listed by a tree of any depth."""
    path = tmp_path / "shard.h5"
    box = Box.whole((70_000,))
    names = [f"model.layers.{n}.{'attention.' * (n % 40)}w" for n in range(count)]
    tensors = tuple(TensorSpec(name, BY_NAME["int8"], box.shape, box) for name in names)
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(2, 3, "x"), tensors, {"note": "text"}))
    found = read_directly(path)
    assert found is not None and list(found.tensors) == names
    assert found == located_by_library(path)


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 0, 3), (1,) * 32], ids=str)
def test_any_type_and_shape(tmp_path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
    path = tmp_path / "shard.h5"
    whole = tuple(length + 3 for length in shape)
    box = Box(tuple(1 for _ in shape), tuple(length + 1 for length in shape))
    tensors = tuple(TensorSpec(name, dtype, whole, box) for name in ("w", "a/b/c", ".", "a//b"))
    reserve_file(hdf5, str(path), ShardSpec(ShardIdentity(0, 1, ""), tensors, {}))
    assert read_directly(path) == located_by_library(path)


def test_sums_are_read_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    reserve_file(hdf5, str(path), samples.spec_of(CONTENTS)._replace(with_sums=True))
    before = hdf5.locate(str(path))
    sums = {name: 7 + at for at, name in enumerate(CONTENTS.tensors)}
    seal_file(hdf5, str(path), sums)
    with path.open("rb") as file:
        assert direct.stored_sums(file.fileno(), str(path), path.stat().st_size) == sums
    assert reading.stored_sums(str(path)) == sums
    assert read_directly(path) == before


def test_two_datasets_at_one_place(tmp_path: Path) -> None:
    """Two headers that both name the same bytes, each with a sound checksum."""
    path = tmp_path / "shard.h5"
    samples.write(hdf5, str(path), CONTENTS)
    content = bytearray(path.read_bytes())
    (start, _), (other, other_end) = headers_of(path)[:2]
    place = content.index(b"\x03\x01", content.index(b"\x08\x12\x00", start)) + 2
    at = content.index(b"\x03\x01", content.index(b"\x08\x12\x00", other)) + 2
    content[at : at + 8] = content[place : place + 8]
    path.write_bytes(with_checksum(content, other, other_end))
    assert read_directly(path) is None
    with pytest.raises(ShardError, match="share bytes"):
        hdf5.locate(str(path))


def lookup3(data: bytes) -> int:
    """Return the checksum of HDF5's structures, Jenkins' lookup3 (File Format Specification, "Jenkins")."""

    def turned(word: int, by: int) -> int:
        return (word << by | word >> 32 - by) & 0xFFFFFFFF

    rounds = -(-len(data) // 12)
    words = struct.unpack(f"<{3 * rounds}I", data.ljust(12 * rounds, b"\0"))
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    for at in range(0, len(words), 3):
        a, b, c = ((x + y) & 0xFFFFFFFF for x, y in zip((a, b, c), words[at : at + 3]))
        if at + 3 < len(words):
            for by in (4, 6, 8, 16, 19, 4):
                a, b, c = b, (c + b) & 0xFFFFFFFF, ((a - c) & 0xFFFFFFFF) ^ turned(c, by)
    for by in (14, 11, 25, 16, 4, 14, 24):
        a, b, c = b, ((c ^ b) - turned(b, by)) & 0xFFFFFFFF, a
    return b


@given(blocks=st.integers(1, 70).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=9)))
def test_checksums(blocks: list[bytes]) -> None:
    assert checksums.lookup3(blocks) == [lookup3(block) for block in blocks]
    whole = [block + lookup3(block).to_bytes(4, "little") for block in blocks]
    assert checksums.all_right(whole)
    wrong = [*whole[:-1], whole[-1][:-1] + bytes([whole[-1][-1] ^ 1])]
    assert not checksums.all_right(wrong)


def headers_of(path: Path) -> list[tuple[int, int]]:
    """Return where headers in one piece begin, and where their checksums are."""
    with h5py.File(path) as file:
        infos = [h5py.h5o.get_info(file[name].id) for name in sorted(CONTENTS.tensors, reverse=True)]
    found = [(info.addr, info.addr + info.hdr.space.total - 4) for info in infos if info.hdr.nchunks == 1]
    assert found, "all headers are in pieces"
    return found


def with_checksum(content: bytearray, start: int, end: int) -> bytearray:
    content[end : end + 4] = lookup3(bytes(content[start:end])).to_bytes(4, "little")
    return content


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 3])
def test_any_byte_of_a_header_changed(tmp_path: Path, turn: int) -> None:
    path = tmp_path / "shard.h5"
    samples.write(hdf5, str(path), CONTENTS)
    sound = path.read_bytes()
    start, end = headers_of(path)[0]
    assert with_checksum(bytearray(sound), start, end) == sound
    assert read_directly(path) is not None
    for at in range(start, end):
        content = bytearray(sound)
        content[at] ^= 1 << (at + turn) % 8
        path.write_bytes(with_checksum(content, start, end))
        assert located(path) == located_by_library(path)


def test_damage_is_noticed(tmp_path: Path) -> None:
    """The numbers a tensor is found by are believed only where the checksum is right."""
    path = tmp_path / "shard.h5"
    samples.write(hdf5, str(path), CONTENTS)
    sound = path.read_bytes()
    start, end = headers_of(path)[0]
    for at in range(start, end + 4):
        content = bytearray(sound)
        content[at] ^= 1
        path.write_bytes(content)
        assert isinstance(located(path), str)


def more_attributes(file: h5py.File) -> None:
    file["w"].attrs["note"] = "x"


def another_offset(file: h5py.File) -> None:
    file["w"].attrs.modify("offset", np.array([0, 0]))
    file["w"].attrs.modify("global_shape", np.array([6, 5]))


def narrower_numbers(file: h5py.File) -> None:
    file["w"].attrs["global_shape"] = np.array([3, 5], np.int32)


def two_names(file: h5py.File) -> None:
    file["x"] = file["w"]


def compressed(file: h5py.File) -> None:
    attributes = dict(file["w"].attrs)
    del file["w"]
    file.create_dataset("w", data=np.ones((3, 5), "f4"), compression="gzip").attrs.update(attributes)
    file["w"].attrs["dtype"] = hdf5_peer.fixed("float32")


@pytest.mark.parametrize("edit", [more_attributes, another_offset, narrower_numbers, two_names, compressed])
def test_edited_by_h5py(tmp_path: Path, edit: Callable[[h5py.File], None]) -> None:
    path = tmp_path / "shard.h5"
    samples.write(hdf5, str(path), CONTENTS)
    with h5py.File(path, "a") as file:
        edit(file)
    assert located(path) == located_by_library(path)


def test_a_file_after_other_content(tmp_path: Path) -> None:
    """Addresses in a file with a user block are no offsets."""
    path = tmp_path / "shard.h5"
    samples.write(hdf5, str(path), CONTENTS)
    shard = path.read_bytes()
    path.write_bytes(bytes(512) + shard)
    assert located(path) == located_by_library(path)
