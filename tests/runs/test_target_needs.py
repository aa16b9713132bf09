"""What is projected of memory follows what is measured: never below it, and never far above."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.command_line import done, measure_apart
from support.large_checkpoints import LARGE, SMALL, TARGETS, WIDE, LargeCheckpoint, Storage, write_large, write_many
from support.processes import Measured, run_command

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.runs.check_sums import Summing
from reshard_mpi.runs.process_memory import Projection, Workload, checking_bytes
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import MIB

pytestmark = pytest.mark.slow

# What is projected is at most so much more than what is measured.
MOST = 1.5
# Halves of their rows are summed as runs of 8 bytes: of the first so many that numpy does it.
NARROW, LOW = (128, 4), (16, 4)
# Of these the sources are gathered by numpy as well.
HIGH = (512, 4)


def command(*arguments: str | Path) -> Measured:
    """Run a command that succeeds."""
    finished = measure_apart(*arguments, timeout_seconds=300)
    assert finished.code == 0, finished
    return finished


def judge(what: str, projected_bytes: int, measured_bytes: int, most: float = MOST) -> None:
    share = projected_bytes / measured_bytes
    print(f"{what}: projected {projected_bytes / MIB:.1f} MiB, measured {measured_bytes / MIB:.1f} MiB: {share:.2f}")
    assert 1.0 <= share <= most, what


# What reading takes and what writing takes are added, so each format is read and written once with few and with many.
CASES = [
    ("ckpt", "ckpt", 17, SMALL),
    ("hdf5", "hdf5", 17, SMALL),
    ("ckpt", "ckpt", 3, LARGE),
    ("ckpt", "ckpt", 2, WIDE),
    ("ckpt", "ckpt", 2_000, SMALL),
    ("hdf5", "hdf5", 2_000, SMALL),
    ("torch", "torch", 17, SMALL),
    ("torch", "torch", 2_000, SMALL),
    ("safetensors", "safetensors", 17, SMALL),
    ("safetensors", "safetensors", 2_000, SMALL),
    ("dcp", "dcp", 17, SMALL),
    ("dcp", "dcp", 2_000, SMALL),
    ("hf", "safetensors", 2_000, SMALL),
]


def written(folder: Path, kind: str, tensors: int, shape: tuple[int, int], pieces: int = TARGETS) -> LargeCheckpoint:
    """Write a checkpoint; a folder with an index is made of one of ckpt, and needs no strategy of its own.

    pieces: of each tensor, if the index lists them.
    """
    traits = formats.info(kind)
    if not traits.is_folder:
        return write_many(folder, kind, tensors, shape)
    made = write_many(folder, "ckpt", tensors, shape, targets=pieces)
    target = () if traits.split_by_size else ("--dst-strategy", made.dst_strategy)
    done("transform", made.src, folder / "listed", "--src-strategy", made.src_strategy, *target, "--to", kind)
    return made._replace(src=folder / "listed", src_strategy=None)


@pytest.mark.parametrize(("kind", "to", "tensors", "shape"), CASES)
def test_projected_and_measured(tmp_path: Path, kind: str, to: str, tensors: int, shape: tuple[int, int]) -> None:
    judge_run(f"{kind} to {to}, {tensors} tensors", written(tmp_path / "made", kind, tensors, shape), to, tmp_path)


def test_a_folder_that_lists_many_pieces(tmp_path: Path) -> None:
    made = written(tmp_path / "made", "dcp", 500, (48, 48), pieces=48)
    judge_run("24,000 pieces", made, "dcp", tmp_path)


@pytest.mark.parametrize(
    ("kind", "tensors", "shape"), [("ckpt", 17, SMALL), ("hdf5", 2, LARGE), ("ckpt", 1_000, SMALL)]
)
def test_accumulated_gradients_that_are_joined(tmp_path: Path, kind: str, tensors: int, shape: tuple[int, int]) -> None:
    """Four ranks each have all of both; what they have of the parameters is not looked at."""
    names = [f"{prefix}layers.{number}.w" for prefix in ("", "accu_grads.") for number in range(tensors)]
    source, target = (
        Strategy(ranks, 1, {name: (Placement((ranks,), split),) for name in names})
        for ranks, split in ((4, ((), ())), (2, ((0,), ())))
    )
    made = write_large(tmp_path / "made", kind, source, target, shape, lambda rank, _: bytes(range(rank, rank + 100)))
    joining = ("--accumulated", "mean", "--replicas", "any")
    judge_run(f"{tensors} sums", made, kind, tmp_path, *joining)


def judge_run(what: str, made: LargeCheckpoint, to: str, tmp_path: Path, *further: str) -> None:
    """Plan, write and verify one target of a checkpoint, and compare what each takes with what was projected.

    further: options.
    """
    options = [*made.options(), "--to", to, "--rank", "1", *further]
    planned = command("plan", made.src, tmp_path / "out", *options, "--verify", "--json")
    judge(f"{what}, planned", Projection.of(Workload(made.planner(), to)).planning_bytes, planned.peak_rss_bytes)
    report, leased_bytes = tmp_path / "report.json", 0
    for how in ([], ["--verify"]):
        out = tmp_path / "_".join(["out", *how])
        made_so = command("transform", made.src, out, *options, *how, "--jobs", "1", "--report", report, "--overwrite")
        leased_bytes = json.loads(report.read_text())["targets"][0]["leased_bytes"]
        judge(f"{what}, written {how}", leased_bytes, made_so.peak_rss_bytes)
    assert leased_bytes == json.loads(planned.out)["peak_bytes"]


@pytest.mark.parametrize(
    ("kind", "tensors", "shape"),
    [
        ("ckpt", 17, NARROW),
        ("ckpt", 3, LARGE),
        ("ckpt", 2, WIDE),
        ("hdf5", 200, NARROW),
        ("safetensors", 17, HIGH),
        ("ckpt", 17, LOW),
        ("safetensors", 2_000, LOW),
    ],
)
def test_verify(tmp_path: Path, kind: str, tensors: int, shape: tuple[int, int]) -> None:
    made = write_many(tmp_path / "made", kind, tensors, shape, targets=2)
    done("transform", made.src, tmp_path / "out", *made.options(), "--jobs", "1", "--verify")
    planner = made.planner()
    held = open_source(discovery.find_shards(str(tmp_path / "out")), planner.target)
    projection = Projection.of(Workload(planner, kind, also_read=held))
    pair = command("verify", made.src, tmp_path / "out", *made.options(), "--jobs", "1")
    what = f"{kind}, {tensors} tensors"
    judge(f"{what}, verified", projection.peak_bytes(planner.plan(1)), pair.peak_rss_bytes)
    alone = command("verify", tmp_path / "out", "--jobs", "1")
    projected_bytes = checking_bytes(kind, Summing(tensors + 1, True, 0, shape in (NARROW, HIGH)))
    judge(f"{what}, by its sums", projected_bytes, alone.peak_rss_bytes)


# Runs a command in this process and prints its peak, and that of the process it has the library in.
WITH_CHILD = """
import sys
from pathlib import Path
from reshard_mpi.cli.commands import main
from reshard_mpi.formats.hdf5 import reader_process as isolation
try:
    main(sys.argv[1:])
finally:
    peak_kib = 0
    for pid in ("self", isolation._keeper._process.pid):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peak_kib += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    sys.stderr.write(f"{peak_kib << 10}\\n")
"""


@pytest.mark.parametrize(
    ("tensors", "shape", "storage"),
    [
        (17, SMALL, {}),
        (2_000, SMALL, {}),
        (1, (8192, 2048), {"chunks": (500, 2000), "compression": "gzip", "compression_opts": 1, "shuffle": True}),
        (1, (8192, 2048), {"chunks": (1024, 2048)}),
        (1, (8192, 2048), {"chunks": (2048, 2048), "compression": "lzf", "fletcher32": True}),
    ],
)
def test_files_of_other_making(tmp_path: Path, tensors: int, shape: tuple[int, int], storage: Storage) -> None:
    made = write_many(tmp_path / "made", "hdf5", tensors, shape, storage)
    paths = [made.src, tmp_path / "out", *made.options(), "--to", "ckpt", "--rank", "1"]
    projected_bytes = Projection.of(Workload(made.planner(), "ckpt")).planning_bytes
    out = ""
    for arguments in (["plan", *paths, "--json"], ["transform", *paths, "--jobs", "1"]):
        projected_bytes = json.loads(out)["peak_bytes"] if out else projected_bytes
        finished = run_command([sys.executable, "-c", WITH_CHILD, *arguments], timeout_seconds=300)
        assert finished.code == 0, finished.err
        judge(f"{tensors} tensors, {storage}, {arguments[0]}", projected_bytes, int(finished.err.split()[-1]))
        out = finished.out
