"""The room that a run asks for: never less than it takes on the disk, and little more."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Side
from support.checkpoints import ENDINGS
from support.command_line import done, run_here
from support.conversions import Conversion, of_every_kind, write_conversion
from support.examples import one_at_a_time
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.runs import check_places
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import example_contents, sample_tensors

BLOCK_BYTES = 4096
# What an estimate may be too high by, besides as much again as the structure of a shard takes: of HDF5 blocks that the
# library leaves half empty, and what a tensor or a group is reckoned to take.
SPARE_BYTES = {"ckpt": 0, "hdf5": 64 << 10}
HDF5_OBJECT_BYTES = 4096
# What a run is reckoned to keep besides its shards.
KEPT_BYTES = 1 << 20
# Names as models have them, and such as no model has.
PATTERNS = ("layer.{}.weight", "model.layers.{}.self_attn.q_proj.weight", "{}", "g{}/w", "a/b/{}", "./{}\0", "é{}" * 50)
TYPES = [dtype for dtype in BY_NAME.values() if dtype.name != "str"]


def size_of(kind: str, spec: ShardSpec, *, sums: bool, crc: bool) -> int:
    """Return how large the file of a shard is: as it is reserved, and sealed."""
    module = formats.by_name(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"shard.{ENDINGS[kind]}")
        reserve_file(module, str(path), spec)
        seal_file(
            module, str(path), dict.fromkeys((tensor.name for tensor in spec.tensors), 1) if sums else {}, crc=crc
        )
        return path.stat().st_size


def check(kind: str, spec: ShardSpec, *, more: bool) -> None:
    """Check the estimate of a shard. more: of one with sums, or with a checksum."""
    sums, crc = more and kind == "hdf5", more and kind == "ckpt"
    spec = spec._replace(with_sums=sums)
    estimate = formats.by_name(kind).size_at_most_bytes(spec, crc=crc)
    size_bytes = size_of(kind, spec, sums=sums, crc=crc)
    payload_bytes = sum(tensor.size_bytes for tensor in spec.tensors)
    spare_bytes = SPARE_BYTES[kind]
    if kind == "hdf5":
        spare_bytes += sum(HDF5_OBJECT_BYTES * (1 + tensor.name.count("/")) for tensor in spec.tensors)
        spare_bytes += sum(BLOCK_BYTES for tensor in spec.tensors if tensor.size_bytes >= 1 << 16)
        spare_bytes += sum(16 * len(tensor.name.encode(errors="surrogatepass")) for tensor in spec.tensors)
        spare_bytes += sum(6 * len(text.encode(errors="surrogatepass")) for text in spec.strings.values())
    assert size_bytes <= estimate, (size_bytes, estimate)
    assert estimate <= size_bytes + (size_bytes - payload_bytes) + spare_bytes, (size_bytes, estimate)


def spec_of(names: list[str], shapes: list[tuple[int, ...]], draw: random.Random) -> ShardSpec:
    dtypes = draw.choices(TYPES, k=len(names))
    tensors = (TensorSpec(name, dtype, shape, Box.whole(shape)) for name, dtype, shape in zip(names, dtypes, shapes))
    return ShardSpec(ShardIdentity(3, 64, "x" * draw.choice([0, 5000])), tuple(tensors), {"note": "\n" * 100})


@of_every_kind
@given(contents=example_contents.contents(), more=st.booleans())
def test_shards_of_odd_contents(kind: str, contents: sample_tensors.ShardContents, more: bool) -> None:
    check(kind, sample_tensors.spec_of(contents), more=more)


@of_every_kind
@given(seed=st.integers(0, 1 << 30), count=st.sampled_from([0, 1, 8, 9, 40, 200]), pattern=st.sampled_from(PATTERNS))
def test_shards_of_many_tensors(kind: str, seed: int, count: int, pattern: str) -> None:
    draw = random.Random(seed)
    sides = draw.choice([(1, 2, 3), (100, 257), (16384, 16385, 40_000, 3)])
    shapes = [tuple(draw.choices(sides, k=draw.choice([0, 1, 1])) + [1] * draw.randrange(4)) for _ in range(count)]
    check(kind, spec_of([pattern.replace("{}", str(i)) for i in range(count)], shapes, draw), more=draw.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "dimensions"), one_at_a_time([10, 200, 1000, 4000], [4, 0, 8]))
def test_shards_of_a_large_model(length: int, dimensions: int) -> None:
    for kind in ("ckpt", "hdf5"):
        names = [f"{i:0{length}}" for i in range(4000 if length < 1000 else 400)]
        check(kind, spec_of(names, [(1,) * dimensions] * len(names), random.Random(length)), more=True)


@of_every_kind
def test_no_fewer_bytes_than_a_shard_of_2001_tensors(kind: str) -> None:
    names = [f"p{i:04}" for i in range(2001)]
    spec = spec_of(names, [(8,)] * len(names), random.Random(1))
    check(kind, spec, more=False)


# A whole run


def many(folder: Path, kind: str) -> Conversion:
    """Return a conversion of 2 ranks to 2, with 300 tensors, some of them large."""
    tensors = {f"layer.{i}.weight": np.full((2, 16500 if i % 50 == 0 else 8), i, np.float32) for i in range(300)}
    source = Side(2, 1, {name: RawLayout((2,), (0, -1)) for name in tensors})
    target = Side(2, 1, {name: RawLayout((2,), (-1, 0)) for name in tensors})
    return write_conversion(folder, kind, source, target, tensors)


def taken_bytes(*roots: Path) -> int:
    """Return what files and folders take on the disk."""
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    return sum(512 * path.lstat().st_blocks for path in paths)


@pytest.mark.slow
@of_every_kind
@pytest.mark.parametrize("options", [(), pytest.param(("--verify",), marks=pytest.mark.slow)])
def test_a_run_takes_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: tuple[str, ...]
) -> None:
    conversion, report = many(tmp_path, "ckpt"), tmp_path / "report.json"
    arguments = conversion.arguments("transform", "--to", kind, *options, "--report", str(report))
    with monkeypatch.context() as patch:
        patch.setattr(check_places, "_free_bytes", lambda mount: 0)
        refused = run_here(*arguments)
        needed = re.search(r"\((\d+) bytes\) free for", refused.err)
        assert refused.code == 3 and needed is not None, refused
        assert not conversion.dst.exists() and not report.exists()
    needed_bytes = int(needed[1])
    done(*arguments)
    # The tests' own file system may need no blocks for small files.
    files = [path for path in (*conversion.dst.rglob("*"), report) if path.is_file()]
    lengths = sum(path.stat().st_size for path in files)
    assert max(lengths, taken_bytes(conversion.dst, report)) <= needed_bytes
    written = conversion.but(kind=kind)
    structure_bytes = sum(written.written(rank).stat().st_size for rank in (0, 1)) - payload_of(conversion)
    spare_bytes = 2 * SPARE_BYTES[kind] + structure_bytes + 64 * BLOCK_BYTES + KEPT_BYTES
    spare_bytes += 2 * 300 * HDF5_OBJECT_BYTES if kind == "hdf5" else 0
    assert needed_bytes <= taken_bytes(conversion.dst, report) + spare_bytes


def payload_of(conversion: Conversion) -> int:
    plan = reshard_mpi.plan(conversion.src, conversion.src_strategy, conversion.dst_strategy)
    return sum(target.written_bytes for target in plan.targets)
