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
from support.command_line import measure_apart
from support.large_checkpoints import write_large
from support.processes import measure_peak

from reshard_mpi import formats
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.runs.write_targets import Reserved
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import GIB, MIB

pytestmark = pytest.mark.slow

BOUND_BYTES = 200 * MIB
SHAPE = (5461, 49152)  # 1 GiB of float32; rows so that neither cut falls on a page
SOURCE = Strategy(8, 1, {"w": (Placement((8,), ((), (0,))),)})
TARGET = Strategy(6, 1, {"w": (Placement((6,), ((), (0,))),)})

# The same job in one process with nothing to bound it: as large a buffer and window as the tensor asks for.
_UNBOUNDED = """
import sys
from pathlib import Path
from reshard_mpi.checkpoints import discovery
from reshard_mpi.sharding import strategy_files
from reshard_mpi.runs.planner import Planner
from reshard_mpi.planning.rank_plan import Limits
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal.publication import Publication
from reshard_mpi import formats
from reshard_mpi.engine.shard_transfer import OpenTarget, last_of, write_shard
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.source import SourceCheckpoint

source, target, src_strategy, dst_strategy = sys.argv[1:]
checkpoint = open_source(discovery.find_shards(source), strategy_files.load(src_strategy))
limits = Limits(buffer_bytes=1 << 31, window_bytes=1 << 31)
planner = Planner(checkpoint, strategy_files.load(dst_strategy))
planner.limits = limits
with Folder.open(Path(target).parent) as folder, Publication(folder, Path(target).name) as publication:
    plan, module, descriptor = planner.plan(1), formats.by_name("ckpt"), publication.descriptor
    manifest = module.reserve(descriptor, str(publication.partial), plan.shard)
    last_of(write_shard(OpenTarget(plan, manifest, descriptor), limits=limits, on_bytes=lambda _: None))
    module.seal(descriptor, manifest.path)
    publication.publish()
"""


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is room for it: twice the tensor."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 3 * GIB
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as name:
        yield Path(name)


def test_one_tensor_of_1_gib_column_wise(fast_folder: Path) -> None:
    for kind in ("ckpt", "hdf5"):
        made = write_large(
            fast_folder / kind, kind, SOURCE, TARGET, SHAPE, lambda _, box: _elements(0, 64, box).tobytes()
        )
        target, report = fast_folder / kind / "dst", fast_folder / kind / "report.json"
        paths = [made.src, target, *made.options()]
        bounded = measure_apart("transform", *paths, "--report", report, "--jobs", "2")
        assert bounded.code == 0, bounded
        print(f"{kind}: peak {bounded.peak_rss_bytes / MIB:.0f} MiB")
        assert bounded.peak_rss_bytes <= BOUND_BYTES

        planned = measure_apart("plan", *paths, "--rank", "1", "--overwrite", "--json")
        projected_bytes = json.loads(planned.out)["peak_bytes"]
        assert bounded.peak_rss_bytes <= projected_bytes <= BOUND_BYTES
        verified = measure_apart("verify", *paths, "--jobs", "2")
        assert verified.code == 0, verified
        print(f"{kind}: verify peak {verified.peak_rss_bytes / MIB:.0f} MiB")
        assert verified.peak_rss_bytes <= projected_bytes

        targets = json.loads(report.read_text())["targets"]
        assert len(targets) == 6
        for facts in targets:
            assert facts["needed_bytes"] == facts["written_bytes"] > 170 * MIB
            assert facts["requested_bytes"] <= 1.01 * facts["needed_bytes"]
        _check_some_rows(target, kind)

        if kind == "ckpt":
            shutil.rmtree(target)
            paths = [made.src, fast_folder / kind / "free", made.src_strategy, made.dst_strategy]
            unbounded = measure_peak([sys.executable, "-c", _UNBOUNDED, *paths])
            assert unbounded.code == 0, unbounded
            print(f"without the bound: peak {unbounded.peak_rss_bytes / MIB:.0f} MiB")
            assert unbounded.peak_rss_bytes > BOUND_BYTES
        shutil.rmtree(fast_folder / kind)


def test_what_every_process_is_told_of_targets_filled_together() -> None:
    box = Box((1024, 0), (2048, 4096))

    def entry(at: int) -> TensorEntry:
        source = ByteRanges((ByteRange("/dst/rank_1/.partial", at * 8 * MIB, 8 * MIB),))
        return TensorEntry(f"layers.{at}.weight", BY_NAME["bfloat16"], box.shape, source, box, (4096, 4096))

    manifest = Manifest("/dst/rank_1/.partial", "hdf5", TensorTable("/dst/rank_1/.partial", map(entry, range(10_000))))
    told = pickle.dumps([Reserved.of(1, manifest, FileIdentity(1, 2))] * 2)
    tracemalloc.start()
    first, _ = pickle.loads(told)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < MIB / 2
    assert first.rank == 1 and first.manifest() == manifest


def _elements(first_row: int, last_row: int, box: Box) -> np.ndarray:
    """Return elements that say where they are: column + 49152 x (row modulo 64)."""
    rows = np.arange(first_row, last_row, dtype=np.int64)[:, None] % 64
    columns = np.arange(box.start[1], box.stop[1], dtype=np.int64)[None, :]
    return (columns + SHAPE[1] * rows).astype(np.float32)


def _check_some_rows(target: Path, kind: str) -> None:
    module = formats.by_name(kind)
    for rank in range(6):
        path = target / f"rank_{rank}" / f"checkpoint_{rank}{formats.info(kind).suffixes[0]}"
        box = Layout(TARGET.find("w")[0], SHAPE).box(rank)
        (part,) = module.locate(str(path)).tensors["w"].source.ranges
        row_bytes = box.shape[1] * 4
        for row in (0, 1, 63, 64, 5000, SHAPE[0] - 1):
            with path.open("rb") as stream:
                held = os.pread(stream.fileno(), row_bytes, part.offset_bytes + row * row_bytes)
            assert held == _elements(row, row + 1, box).tobytes()
