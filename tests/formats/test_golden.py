"""Files of earlier days: they must be read for ever, and native shards are still written to the same bytes."""

from __future__ import annotations

from pathlib import Path

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


def test_native_hdf5_version_1() -> None:
    manifest = hdf5.locate(str(GOLDEN / "native_v1.h5"))
    assert manifest.identity == IDENTITY
    assert sample_tensors.contents_of(manifest) == contents()
    assert list(manifest.tensors) == [*NAMES, "step", "none"]
    for name in NAMES:
        assert (manifest.tensors[name].box, manifest.tensors[name].global_shape) == (Box((3, 0), (6, 5)), (6, 5))


def test_native_hdf5_is_still_written_so(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    sample_tensors.fill(reserve_file(hdf5, str(path), native_spec()), contents())
    seal_file(hdf5, str(path))
    assert path.read_bytes() == (GOLDEN / "native_v1.h5").read_bytes()
