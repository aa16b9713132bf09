"""Files of earlier days: read for ever, or refused by name; native shards are still written to the same bytes."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import ckpt, hdf5
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

GOLDEN = Path(__file__).parent / "golden"

# Saved by MindSpore 2.10 with save_checkpoint([w, s], append_dict={"note": "hé", "epoch": 3, "done": True},
# crc_check=True).
CHECKPOINT = (
    b"\n,\n\x01w\x12'\x08\x02\x08\x03\x12\x07Float32\x1a\x18\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\x00\x00@@"
    b"\x00\x00\x80@\x00\x00\xa0@\n\x12\n\x01s\x12\r\x12\x07Float16\x1a\x02\x00@"
    b"\n\x19\n\x04note\x12\x11\x08\x00\x12\x03str\x1a\x08h\x00\x00\x00\xe9\x00\x00\x00"
    b"\n\x1a\n\x05epoch\x12\x11\x12\x05Int64\x1a\x08\x03\x00\x00\x00\x00\x00\x00\x00"
    b"\n\x11\n\x04done\x12\t\x12\x04Bool\x1a\x01\x01"
    b"crc_num\x00\x00\x00\x00\x00\x00\xf8\x18\x9a&"
)


def test_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    path.write_bytes(CHECKPOINT)
    manifest = ckpt.locate(str(path))
    assert [(t.name, t.dtype.name, t.shape, sample_tensors.payload(t).hex()) for t in manifest.tensors.values()] == [
        ("w", "float32", (2, 3), "000000000000803f0000004000004040000080400000a040"),
        ("s", "float16", (), "0040"),
        ("epoch", "int64", (), "0300000000000000"),
        ("done", "bool", (), "01"),
    ]
    assert manifest.strings == {"note": "hé"}


# The native shard in golden/: rank 1 of 2 holds the lower half of every tensor.
NAMES = ["z/last", "a", "a/b", ".", "//", "é", *BY_NAME]
IDENTITY = ShardIdentity(1, 2, "placements of the whole checkpoint")
STRINGS = {"note": "hé", "empty": ""}
PARTS = {
    name: SampleTensor.random(name, BY_NAME.get(name, BY_NAME["float32"]), (3, 5), seed=1) for name in NAMES
}  # fmt: skip
SCALAR = SampleTensor.random("step", BY_NAME["int64"], ())
EMPTY = SampleTensor.random("none", BY_NAME["bfloat16"], (0, 7))


def native_spec() -> ShardSpec:
    halves = [TensorSpec(t.name, t.dtype, (6, 5), Box((3, 0), (6, 5))) for t in PARTS.values()]
    rest = [TensorSpec(t.name, t.dtype, t.shape, Box.whole(t.shape)) for t in (SCALAR, EMPTY)]
    return ShardSpec(IDENTITY, (*halves, *rest), STRINGS)


def contents() -> ShardContents:
    return ShardContents.of([*PARTS.values(), SCALAR, EMPTY], STRINGS)


def test_native_hdf5() -> None:
    manifest = hdf5.locate(str(GOLDEN / "native_v2.h5"))
    assert manifest.identity == IDENTITY
    assert sample_tensors.contents_of(manifest) == contents()
    assert list(manifest.tensors) == [*NAMES, "step", "none"]
    for name in NAMES:
        assert (manifest.tensors[name].box, manifest.tensors[name].global_shape) == (Box((3, 0), (6, 5)), (6, 5))


def test_native_hdf5_is_still_written_so(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    sample_tensors.fill(reserve_file(hdf5, str(path), native_spec()), contents())
    seal_file(hdf5, str(path))
    assert path.read_bytes() == (GOLDEN / "native_v2.h5").read_bytes()


def test_native_hdf5_of_the_earlier_form_is_refused() -> None:
    for read in (hdf5.locate, hdf5.stored_sums):
        with pytest.raises(ShardError, match="earlier form") as caught:
            read(str(GOLDEN / "native_v1.h5"))
        assert "with the reshard_mpi that wrote it" in caught.value.remedy


def test_h5py_reads_the_datasets_of_the_earlier_form() -> None:
    """What others read has not changed: all but our own group, and attributes of ours."""
    versions = [shown(GOLDEN / f"native_v{version}.h5") for version in (1, 2)]
    assert versions[0] == versions[1]
    assert len(versions[0]) > len(BY_NAME)


def shown(path: Path) -> dict[str, tuple[h5py.h5t.TypeID, tuple[int, ...], bytes]]:
    """Return the type, shape and elements of each dataset that is a tensor, as h5py shows them."""
    datasets = {}

    def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and (
            not name.startswith("__") or name.startswith("__reshard_mpi__/tensors/")
        ):
            datasets[name] = item.id.get_type(), item.shape, item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(visit)
    return datasets
