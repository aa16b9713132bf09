"""What is projected of memory follows what is measured: never below it, and never far above."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from processes import Measured, measure_peak, run_command

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.projection import Projection, checking_bytes
from reshard_mpi.runs.selfcheck import Summing
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import mindspore, table
from reshard_mpi.sharding.strategy.stages import to_stage_files
from reshard_mpi.units import MIB

# What is projected is at most so much more than what is measured.
MOST = 1.5
RANKS, TARGETS = 4, 8
# Options of h5py for a dataset.
Storage = dict[str, Any]


class Checkpoint(NamedTuple):
    """A checkpoint of four ranks, and the strategy of eight that it is to be resharded to."""

    src: Path
    src_strategy: Path
    dst_strategy: Path

    @classmethod
    def write(
        cls, folder: Path, kind: str, tensors: int, shape: tuple[int, int], storage: Storage | None = None
    ) -> Checkpoint:
        """storage: how h5py is to store each tensor, in HDF5 shards of its making."""
        names = [f"backbone.layers.{at // 10}.block.part_{at % 10}.weight" for at in range(tensors)]
        source = Strategy(RANKS, 1, {name: (Placement((RANKS,), ((0,), ())),) for name in names})
        target = Strategy(TARGETS, 1, {name: (Placement((TARGETS,), ((), (0,))),) for name in names})
        folder.mkdir()
        made = cls(folder / "src", folder / "src.ckpt", folder / "dst.ckpt")
        shapes = dict.fromkeys(names, shape)
        for path, side in ((made.src_strategy, source), (made.dst_strategy, target)):
            path.write_bytes(mindspore.encode_protobuf(to_stage_files(side, shapes)[0]))
        for rank in range(RANKS):
            path = made.src / f"rank_{rank}" / f"w{formats.by_name(kind).SUFFIXES[0]}"
            path.parent.mkdir(parents=True)
            _write_shard(path, kind, names, Layout(source.find(names[0])[0], shape).box(rank), rank, shape, storage)
        return made

    def options(self) -> list[str | Path]:
        return ["--src-strategy", self.src_strategy, "--dst-strategy", self.dst_strategy]

    def conversion(self) -> Conversion:
        files = discovery.find_shards(str(self.src))
        source = SourceCheckpoint.open(files, strategy.load(str(self.src_strategy)))
        return Conversion(source, strategy.load(str(self.dst_strategy)))


def _write_shard(
    path: Path, kind: str, names: Sequence[str], box: Box, rank: int, shape: tuple[int, int], storage: Storage | None
) -> None:
    """Write a shard whose parts differ from rank to rank."""
    elements = np.random.default_rng(rank).integers(0, 1 << 30, box.size, np.int32).view(np.float32).reshape(box.shape)
    if storage is not None:
        with h5py.File(path, "w") as file:
            for name in names:
                file.create_dataset(name, data=elements, **storage)
            file.create_dataset("global_step", data=np.int32(7))
        return
    module = formats.by_name(kind)
    specs = (
        *(TensorSpec(name, BY_NAME["float32"], shape, box) for name in names),
        TensorSpec("global_step", BY_NAME["int32"], (), Box((), ())),
    )
    place = reserve_file(
        module, str(path), ShardSpec(ShardIdentity(rank, RANKS, table.dumps(_described(names))), specs, {})
    )
    with path.open("r+b") as stream:
        for entry in (place.tensors[name] for name in names):
            done = 0
            for part in entry.source.ranges:
                stream.seek(part.offset_bytes)
                stream.write(elements.tobytes()[done : done + part.length_bytes])
                done += part.length_bytes
    seal_file(module, str(path))


def _described(names: Sequence[str]) -> Strategy:
    return Strategy(RANKS, 1, {name: (Placement((RANKS,), ((0,), ())),) for name in names})


def command(*arguments: str | Path) -> Measured:
    done = measure_peak([sys.executable, "-m", "reshard_mpi", *arguments], timeout_seconds=300)
    assert done.returncode == 0, done.stderr
    return done


def judge(what: str, projected_bytes: int, measured_bytes: int, most: float = MOST) -> None:
    share = projected_bytes / measured_bytes
    print(f"{what}: projected {projected_bytes / MIB:.1f} MiB, measured {measured_bytes / MIB:.1f} MiB: {share:.2f}")
    assert 1.0 <= share <= most, what


SMALL, LARGE, WIDE = (48, 16), (2048, 4096), (256, 1 << 18)
CASES = [
    ("ckpt", "ckpt", 17, SMALL),
    ("ckpt", "hdf5", 17, SMALL),
    ("hdf5", "hdf5", 17, SMALL),
    ("ckpt", "ckpt", 3, LARGE),
    ("ckpt", "ckpt", 2, WIDE),
    ("hdf5", "hdf5", 2, WIDE),
    ("ckpt", "hdf5", 2_000, SMALL),
    ("ckpt", "ckpt", 2_000, SMALL),
    ("hdf5", "hdf5", 2_000, SMALL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "to", "tensors", "shape"), CASES)
def test_projected_and_measured(tmp_path: Path, kind: str, to: str, tensors: int, shape: tuple[int, int]) -> None:
    made = Checkpoint.write(tmp_path / "made", kind, tensors, shape)
    what = f"{kind} to {to}, {tensors} tensors"
    options = [*made.options(), "--to", to, "--rank", "1"]
    planned = command("plan", made.src, tmp_path / "out", *options, "--json")
    judge(f"{what}, planned", Projection.of(made.conversion(), to).planning_bytes, planned.peak_rss_bytes)
    projected_bytes = json.loads(planned.stdout)["peak_bytes"]
    report = tmp_path / "report.json"
    written = command("transform", made.src, tmp_path / "out", *options, "--jobs", "1", "--report", report)
    judge(f"{what}, written", projected_bytes, written.peak_rss_bytes)
    assert json.loads(report.read_text())["targets"][0]["leased_bytes"] == projected_bytes

    options = [*made.options(), "--to", to, "--rank", "1", "--verify"]
    projected_bytes = json.loads(command("plan", made.src, tmp_path / "out_2", *options, "--json").stdout)["peak_bytes"]
    verified = command("transform", made.src, tmp_path / "out_2", *options, "--jobs", "1")
    judge(f"{what}, written and verified", projected_bytes, verified.peak_rss_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tensors", "shape"),
    [
        ("ckpt", 17, SMALL),
        ("hdf5", 17, SMALL),
        ("ckpt", 3, LARGE),
        ("ckpt", 2, WIDE),
        ("hdf5", 200, SMALL),
    ],
)
def test_verify(tmp_path: Path, kind: str, tensors: int, shape: tuple[int, int]) -> None:
    made = Checkpoint.write(tmp_path / "made", kind, tensors, shape)
    command("transform", made.src, tmp_path / "out", *made.options(), "--jobs", "1", "--verify")
    conversion = made.conversion()
    held = SourceCheckpoint.open(discovery.find_shards(str(tmp_path / "out")), conversion.target)
    projection = Projection.of(conversion, kind, also_read=held)
    pair = command("verify", made.src, tmp_path / "out", *made.options(), "--jobs", "1")
    what = f"{kind}, {tensors} tensors"
    judge(f"{what}, verified", projection.peak_bytes(conversion.plan(1)), pair.peak_rss_bytes)
    alone = command("verify", tmp_path / "out", "--jobs", "1")
    projected_bytes = checking_bytes(kind, Summing(tensors + 1, True, 0, shape == SMALL))
    judge(f"{what}, by its sums", projected_bytes, alone.peak_rss_bytes)


# Runs a command in this process and prints its peak, and that of the process it has the library in.
WITH_CHILD = """
import sys
from pathlib import Path
from reshard_mpi.cli.commands import main
from reshard_mpi.formats.hdf5 import isolation
try:
    main(sys.argv[1:])
finally:
    peak_kib = 0
    for pid in ("self", isolation._keeper._process.pid):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peak_kib += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    sys.stderr.write(f"{peak_kib << 10}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "shape", "storage"),
    [
        (17, SMALL, {}),
        (2_000, SMALL, {}),
        (2, (8192, 2048), {"chunks": (500, 2000), "compression": "gzip", "shuffle": True}),
        (2, (8192, 2048), {"chunks": (1024, 2048)}),
        (2, (8192, 2048), {"chunks": (2048, 2048), "compression": "lzf", "fletcher32": True}),
    ],
)
def test_files_of_other_making(tmp_path: Path, tensors: int, shape: tuple[int, int], storage: Storage) -> None:
    made = Checkpoint.write(tmp_path / "made", "hdf5", tensors, shape, storage)
    options = [*made.options(), "--to", "ckpt", "--rank", "1"]
    planned = command("plan", made.src, tmp_path / "out", *options, "--json")
    projection = Projection.of(made.conversion(), "ckpt")
    what = f"{tensors} tensors, {storage}"
    with_child = [sys.executable, "-c", WITH_CHILD]
    for name, projected_bytes, arguments in [
        ("planned", projection.planning_bytes, ["plan", made.src, tmp_path / "out", *options]),
        (
            "written",
            json.loads(planned.stdout)["peak_bytes"],
            ["transform", made.src, tmp_path / "out", *options, "--jobs", "1"],
        ),
    ]:
        done = run_command([*with_child, *arguments], timeout_seconds=300)
        assert done.returncode == 0, done.stderr
        judge(f"{what}, {name}", projected_bytes, int(done.stderr.split()[-1]))
