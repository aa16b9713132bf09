"""Peak memory is bounded whatever the size of a tensor, and no source byte is asked for that is not needed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.processes import measure_peak

from reshard_mpi import formats
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.formats.columns import TensorEntry, Tensors
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.places import ByteRange, Segments
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.formats.specs import ShardSpec, TensorSpec
from reshard_mpi.runs.outcome import Reserved
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import table
from reshard_mpi.sharding.strategy.protobuf import encode_protobuf
from reshard_mpi.sharding.strategy.stages import to_stage_files
from reshard_mpi.units import GIB, MIB

BOUND_BYTES = 200 * MIB
SHAPE = (10923, 49152)  # 2 GiB of float32; rows so that neither cut falls on a page
SOURCE = Strategy(8, 1, {"w": (Placement((8,), ((), (0,))),)})
TARGET = Strategy(6, 1, {"w": (Placement((6,), ((), (0,))),)})

# The same job in one process with nothing to bound it: as large a buffer and window as the tensor asks for.
_UNBOUNDED = """
import sys
from pathlib import Path
from reshard_mpi.checkpoints import discovery
from reshard_mpi.sharding import strategy
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.planning.model import Limits
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal.publication import Publication
from reshard_mpi.runs.write import write_whole
from reshard_mpi.checkpoints.source import SourceCheckpoint

source, target, src_strategy, dst_strategy = sys.argv[1:]
checkpoint = SourceCheckpoint.open(discovery.find_shards(source), strategy.load(src_strategy))
limits = Limits(buffer_bytes=1 << 31, window_bytes=1 << 31)
conversion = Conversion(checkpoint, strategy.load(dst_strategy), limits=limits)
with Folder.open(Path(target).parent) as folder, Publication(folder, Path(target).name) as publication:
    write_whole(conversion.plan(1), "ckpt", publication, limits, lambda _: None)
"""


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is room for it: twice the tensor."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 6 * GIB
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as name:
        yield Path(name)


def test_one_tensor_of_2_gib_column_wise(fast_folder: Path) -> None:
    for kind in ("ckpt", "hdf5"):
        source = _write_source(fast_folder / kind, kind)
        target, report = fast_folder / kind / "dst", fast_folder / kind / "report.json"
        options = ["--src-strategy", source / "src.ckpt", "--dst-strategy", source / "dst.ckpt", "--report", report]
        command = [sys.executable, "-m", "reshard_mpi"]
        bounded = measure_peak([*command, "transform", source / "src", target, *options, "--jobs", "2"])
        assert bounded.returncode == 0, bounded.stderr
        print(f"{kind}: peak {bounded.peak_rss_bytes / MIB:.0f} MiB")
        assert bounded.peak_rss_bytes <= BOUND_BYTES

        one = ["--rank", "1", "--overwrite", "--json"]
        planned = measure_peak([*command, "plan", source / "src", target, *options[:4], *one])
        projected_bytes = json.loads(planned.stdout)["peak_bytes"]
        assert bounded.peak_rss_bytes <= projected_bytes <= BOUND_BYTES
        verified = measure_peak([*command, "verify", source / "src", target, *options[:4], "--jobs", "2"])
        assert verified.returncode == 0, verified.stderr
        print(f"{kind}: verify peak {verified.peak_rss_bytes / MIB:.0f} MiB")
        assert verified.peak_rss_bytes <= projected_bytes

        targets = json.loads(report.read_text())["targets"]
        assert len(targets) == 6
        for facts in targets:
            assert facts["needed_bytes"] == facts["written_bytes"] > 340 * MIB
            assert facts["requested_bytes"] <= 1.01 * facts["needed_bytes"]
        _check_some_rows(target, kind)

        if kind == "ckpt":
            shutil.rmtree(target)
            free = [sys.executable, "-c", _UNBOUNDED, source / "src", source / "free", source / "src.ckpt"]
            unbounded = measure_peak([*free, source / "dst.ckpt"])
            assert unbounded.returncode == 0, unbounded.stderr
            print(f"without the bound: peak {unbounded.peak_rss_bytes / MIB:.0f} MiB")
            assert unbounded.peak_rss_bytes > BOUND_BYTES
        shutil.rmtree(fast_folder / kind)


def test_what_every_process_is_told_of_targets_filled_together() -> None:
    box = Box((1024, 0), (2048, 4096))

    def entry(at: int) -> TensorEntry:
        source = Segments((ByteRange("/dst/rank_1/.partial", at * 8 * MIB, 8 * MIB),))
        return TensorEntry(f"layers.{at}.weight", BY_NAME["bfloat16"], box.shape, source, box, (4096, 4096))

    manifest = Manifest("/dst/rank_1/.partial", "hdf5", Tensors("/dst/rank_1/.partial", map(entry, range(10_000))))
    told = pickle.dumps([Reserved.of(1, manifest, FileIdentity(1, 2))] * 2)
    tracemalloc.start()
    first, _ = pickle.loads(told)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < MIB / 2
    assert first.rank == 1 and first.manifest() == manifest


def _write_source(base: Path, kind: str) -> Path:
    """Write shards whose elements say where they are: column + 49152 x (row modulo 64)."""
    base.mkdir()
    for name, strategy in (("src.ckpt", SOURCE), ("dst.ckpt", TARGET)):
        (base / name).write_bytes(encode_protobuf(to_stage_files(strategy, {"w": SHAPE})[0]))
    module = formats.by_name(kind)
    for rank in range(8):
        box = Layout(SOURCE.find("w")[0], SHAPE).box(rank)
        path = base / "src" / f"rank_{rank}" / f"w{module.SUFFIXES[0]}"
        path.parent.mkdir(parents=True)
        identity = ShardIdentity(rank, 8, table.dumps(SOURCE))
        place = reserve_file(
            module, str(path), ShardSpec(identity, (TensorSpec("w", BY_NAME["float32"], SHAPE, box),), {})
        )
        pattern = _elements(0, 64, box).tobytes()
        with path.open("r+b") as stream:
            done = 0
            for part in place.tensors["w"].source.ranges:
                stream.seek(part.offset_bytes)
                left = part.length_bytes
                while left:
                    start = done % len(pattern)
                    count = min(left, len(pattern) - start)
                    stream.write(pattern[start : start + count])
                    done, left = done + count, left - count
        seal_file(module, str(path))
    return base


def _elements(first_row: int, last_row: int, box: Box) -> np.ndarray:
    rows = np.arange(first_row, last_row, dtype=np.int64)[:, None] % 64
    columns = np.arange(box.start[1], box.stop[1], dtype=np.int64)[None, :]
    return (columns + SHAPE[1] * rows).astype(np.float32)


def _check_some_rows(target: Path, kind: str) -> None:
    module = formats.by_name(kind)
    for rank in range(6):
        path = target / f"rank_{rank}" / f"checkpoint_{rank}{module.SUFFIXES[0]}"
        box = Layout(TARGET.find("w")[0], SHAPE).box(rank)
        (part,) = module.locate(str(path)).tensors["w"].source.ranges
        row_bytes = box.shape[1] * 4
        for row in (0, 1, 63, 64, 5000, SHAPE[0] - 1):
            with path.open("rb") as stream:
                held = os.pread(stream.fileno(), row_bytes, part.offset_bytes + row * row_bytes)
            assert held == _elements(row, row + 1, box).tobytes()
