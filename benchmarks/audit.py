"""Two checkpoints compared in numbers, beside `cmp` of as many bytes; one audited, beside `sha256sum` of its files."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.interleave import Comparison, take_turns
from benchmarks.machine import describe
from benchmarks.measure import Run
from benchmarks.measure import measure as measure_commands
from benchmarks.network import Shapes, shapes
from benchmarks.peers.ours import COMMAND
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, alone, answer, largest_process
from benchmarks.workplace import workplace
from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME, to_numpy
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.sharding.box import Box

_BLOCK_ELEMENTS = 1 << 22
# How far apart in the same noise tensors begin.
_APART_BYTES = 520
# Experts' tensors, of 64 KiB each.
_EXPERTS, _EXPERT = 30_000, (128, 128)


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


@dataclass(frozen=True, slots=True)
class Audit:
    """`reshard-mpi audit` of a checkpoint that is sound."""

    source: Path
    name: str = "audit --jobs 2"

    def missing(self) -> str | None:
        return None

    def run(self) -> Run:
        return measure_commands([[*COMMAND, "audit", str(self.source), "--jobs", "2", "--quiet"]]).run


@dataclass(frozen=True, slots=True)
class Sha256:
    """`sha256sum` of two halves of a checkpoint, by two processes."""

    halves: tuple[Path, Path]
    name: str = "sha256sum, two processes"

    def missing(self) -> str | None:
        return None if shutil.which("sha256sum") else "sha256sum is not installed"

    def run(self) -> Run:
        return measure_commands([["sha256sum", str(half)] for half in self.halves]).run


def measure(megabytes: int, pairs: int, folder: Path | None) -> Results:
    """Measure all of it, interleaved."""
    with workplace(folder, 5 * megabytes * 1_000_000 + _EXPERTS * 4 * math.prod(_EXPERT)) as place:
        machine = describe(place)
        network, wide = shapes(megabytes), shapes(megabytes * 2)
        first, copy, other = (place / f"{name}.safetensors" for name in ("first", "copy", "other"))
        _write(first, network, 1.0)
        shutil.copyfile(first, copy)
        _write(other, network, 1.001)
        peer = Cmp(first, copy)
        size = f"{first.stat().st_size / 1e6:.0f} MB of fp32"
        differing, same = Comparison(DiffValues(first, other), peer), Comparison(DiffValues(first, copy), peer)
        questions = [
            Question(differing, "audit.values", f"{size}, all elements differ", megabytes),
            Question(differing, "audit.values.cpu", f"{size}: CPU time", megabytes, Clock.CPU, Clock.CPU),
            Question(same, "audit.same", f"{size}, the same", megabytes),
        ]
        for key, dtype, tensors in (("audit.fp32", "float32", network), ("audit.bf16", "bfloat16", wide)):
            halves = _in_two_files(place / key, tensors, dtype)
            audited = Comparison(Audit(place / key), Sha256(halves))
            questions.append(Question(audited, key, f"as much in {dtype}", megabytes))
        experts = place / "experts.safetensors"
        _write(experts, {f"layers.{at % 60}.experts.{at // 60}.w": _EXPERT for at in range(_EXPERTS)}, 1.0)
        rows = answer(questions, pairs)
        of_experts = Audit(experts)
        many = take_turns([of_experts], pairs)[0].runs
        runs = [run for question in questions for run in question.comparison.our_runs]
    row = alone("audit.experts", f"{_EXPERTS} experts' tensors of 64 KiB", of_experts.name, many)
    largest = largest_process("audit.memory", runs), largest_process("audit.experts.memory", many)
    return Results("audit", machine, pairs, [*rows, row, *largest])


def _in_two_files(folder: Path, tensors: Shapes, dtype: str) -> tuple[Path, Path]:
    """Write tensors as a folder of Hugging Face, half of the bytes to each of two files."""
    folder.mkdir()
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    names, first = sorted(tensors, key=lambda name: -sizes[name]), list[str]()
    for name in names:
        if sum(sizes[each] for each in first) + sizes[name] <= sum(sizes.values()) / 2:
            first.append(name)
    halves = first, [name for name in names if name not in first]
    paths = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    for path, half, before in zip(paths, halves, (0, len(first))):
        _write(path, {name: tensors[name] for name in half}, 1.0, dtype, before)
    file_of = {name: path.name for path, half in zip(paths, halves) for name in half}
    index = {"metadata": {"total_size": sum(sizes.values()) * BY_NAME[dtype].itemsize_bytes}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def _write(path: Path, tensors: Shapes, factor: float, dtype: str = "float32", before: int = 0) -> None:
    """Write tensors with normal numbers, times a factor; no two begin alike, as copies would.

    Args:
        before: how many tensors other files have of the same noise.
    """
    module, kind = formats.by_name("safetensors"), BY_NAME[dtype]
    specs = tuple(TensorSpec(name, kind, shape, Box.whole(shape)) for name, shape in tensors.items())
    shard = reserve_file(module, str(path), ShardSpec(ShardIdentity(0, 1, ""), specs, {}))
    numbers = np.random.default_rng(0).standard_normal(_BLOCK_ELEMENTS, np.float32) * np.float32(factor)
    noise = numbers.astype(to_numpy(kind)).tobytes()
    with path.open("r+b") as stream:
        for number, entry in enumerate(shard.tensors.values(), before):
            begin = number * _APART_BYTES % (len(noise) // 2)
            for part in entry.source.ranges:  # type: ignore[union-attr]
                stream.seek(part.offset_bytes)
                for at in range(0, part.length_bytes, len(noise) - begin):
                    stream.write(noise[begin : begin + part.length_bytes - at])
    seal_file(module, str(path))
