"""Two checkpoints compared in numbers, beside `cmp` of as many bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.measure import Run
from benchmarks.measure import measure as measure_commands
from benchmarks.network import shapes
from benchmarks.peers.ours import COMMAND
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, answer, largest_process
from benchmarks.workplace import workplace
from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.sharding.box import Box

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class DiffValues:
    """`reshard-mpi diff --values` of two files. All differences are tolerated, so that it succeeds."""

    first: Path
    second: Path
    name: str = "diff --values --jobs 2"

    def missing(self) -> str | None:
        return None

    def run(self) -> Run:
        options = ("--values", "--atol", "1e9", "--jobs", "2", "--quiet")
        return measure_commands([[*COMMAND, "diff", str(self.first), str(self.second), *options]]).run


@dataclass(frozen=True, slots=True)
class Cmp:
    """`cmp` of two files that are the same, which it reads to their ends."""

    first: Path
    second: Path
    name: str = "cmp"

    def missing(self) -> str | None:
        return None if shutil.which("cmp") else "cmp is not installed"

    def run(self) -> Run:
        return measure_commands([["cmp", str(self.first), str(self.second)]]).run


def measure(megabytes: int, pairs: int, folder: Path | None) -> Results:
    """Measure all of it, interleaved."""
    with workplace(folder, 3 * megabytes * 1_000_000) as place:
        machine = describe(place)
        first, copy, other = (place / f"{name}.safetensors" for name in ("first", "copy", "other"))
        _write(first, megabytes, 1.0)
        shutil.copyfile(first, copy)
        _write(other, megabytes, 1.001)
        peer = Cmp(first, copy)
        size = f"{first.stat().st_size / 1e6:.0f} MB of fp32"
        differing, same = Comparison(DiffValues(first, other), peer), Comparison(DiffValues(first, copy), peer)
        questions = [
            Question(differing, "audit.values", f"{size}, all elements differ", megabytes),
            Question(differing, "audit.values.cpu", f"{size}: CPU time", megabytes, Clock.CPU, Clock.CPU),
            Question(same, "audit.same", f"{size}, the same", megabytes),
        ]
        rows = answer(questions, pairs)
        runs = [run for question in questions for run in question.comparison.our_runs]
    return Results("audit", machine, pairs, [*rows, largest_process("audit.memory", runs)])


def _write(path: Path, megabytes: int, factor: float) -> None:
    """Write a network's tensors with normal numbers, times a factor."""
    module, dtype = formats.by_name("safetensors"), BY_NAME["float32"]
    specs = tuple(TensorSpec(name, dtype, shape, Box.whole(shape)) for name, shape in shapes(megabytes).items())
    shard = reserve_file(module, str(path), ShardSpec(ShardIdentity(0, 1, ""), specs, {}))
    numbers = np.random.default_rng(0).standard_normal(_BLOCK_ELEMENTS, np.float32) * np.float32(factor)
    noise = numbers.tobytes()
    with path.open("r+b") as stream:
        for entry in shard.tensors.values():
            for part in entry.source.ranges:  # type: ignore[union-attr]
                stream.seek(part.offset_bytes)
                for at in range(0, part.length_bytes, len(noise)):
                    stream.write(noise[: part.length_bytes - at])
    seal_file(module, str(path))
