"""Checkpoints of very many small tensors, as mixtures of experts have them, beside safetensors and torch."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoint import Checkpoint, generate
from benchmarks.interleave import Comparison, warmed_up
from benchmarks.interpreters import lacks
from benchmarks.machine import describe
from benchmarks.measure import PROGRAMS, Run, last_json, settle
from benchmarks.measure import measure as measure_commands
from benchmarks.network import Resharding, Shapes
from benchmarks.peers.ours import Between, Transform
from benchmarks.peers.torch_dcp import Dcp
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, alone, answer, largest_process
from benchmarks.workplace import workplace
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

_SHAPE = (64, 64)  # 16 KiB of float32
_SOURCES, _TARGETS = 4, 2
_TENSOR_BYTES = 4 * _SHAPE[0] * _SHAPE[1]
_PIECES = 10_000


@dataclass(frozen=True, slots=True)
class Safetensors:
    """safetensors as its guide shows it: slices of the files' tensors, put together and saved, a process a target."""

    checkpoint: Checkpoint
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return f"safetensors load + save, {_TARGETS} processes"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "safetensors", "--safetensors")

    def run(self) -> Run:
        source = self.checkpoint.folder / "src_safetensors"
        program = [self.interpreter, str(PROGRAMS / "safetensors_columns.py")]
        counts = [str(len(self.checkpoint.shapes)), *map(str, _SHAPE), str(_SOURCES), str(_TARGETS)]
        if not source.exists():
            source.mkdir()
            measure_commands([[*program, "make", str(source), *counts]])
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()
        settle(self.checkpoint.folder)
        paths = [str(source), str(self.output)]
        return measure_commands([[*program, "reshard", *paths, *counts, str(rank)] for rank in range(_TARGETS)]).run


def measure(tensors: int, many: int, pairs: int, folder: Path | None, safetensors: str, torch: str) -> Results:
    """Measure all of it.

    tensors, many: how many there are, and in the larger checkpoint. safetensors, torch: interpreters that have them.
    """
    needed_bytes = (10 * tensors + 2 * many) * (_TENSOR_BYTES + 512)
    with workplace(folder, needed_bytes) as place:
        machine = describe(place)
        few, hdf5, more = (
            _made(place / name, kind, count)
            for name, kind, count in (("few", "ckpt", tensors), ("hdf5", "hdf5", tensors), ("many", "ckpt", many))
        )
        output, beside = place / "dst", place / "beside"
        small = Transform(few, output, _TARGETS)
        what = f"{tensors:,} tensors of 16 KiB, rows over {_SOURCES} -> columns over {_TARGETS}"
        questions = [
            Question(Comparison(small, Safetensors(few, beside, safetensors)), "tensors.ckpt", f"{what}, .ckpt"),
            Question(Comparison(small, Dcp(few, beside, torch)), "tensors.torch", f"{what}, .ckpt"),
            Question(Comparison(Transform(more, output, _TARGETS), small), "tensors.growth", f"{many:,} of them"),
        ]
        to_hdf5 = Transform(few, output, _TARGETS, options=("--to", "hdf5"))
        from_hdf5 = Transform(hdf5, output, _TARGETS, options=("--to", "ckpt"))
        for key, side in (("tensors.to_hdf5", to_hdf5), ("tensors.from_hdf5", from_hdf5)):
            way = key.partition(".")[2].replace("_", " ")
            questions.append(Question(Comparison(side, small), key, f"{what}, {way}"))
        questions += _other_forms(place, few, what, small)
        rows = answer(questions, pairs)
        runs = [run for question in questions for run in question.comparison.our_runs]
        pieces = warmed_up(lambda: _pieces(place), pairs)
        rows.append(alone("tensors.piece", f"{_PIECES:,} pieces of 4 KiB, CPU", "one process", pieces, Clock.INNER))
    return Results("tensors", machine, pairs, [*rows, largest_process("tensors.memory", runs)])


def _other_forms(place: Path, few: Checkpoint, what: str, small: Transform) -> list[Question]:
    """Ask for every other form there is, to it and from it, each beside `.ckpt` to `.ckpt`."""
    output, questions = place / "dst", []
    source = ("--src-strategy", str(few.src_strategy))
    target = ("--dst-strategy", str(few.dst_strategy))
    for form in ("safetensors", "torch", "hf", "dcp"):
        is_full, jobs = form == "hf", ("--jobs", str(_TARGETS))
        made = place / f"{form}_source"
        kept = source if is_full else (*source, "--dst-strategy", str(few.src_strategy))
        Between("", few.source, made, ("--to", form, *kept, *jobs)).run()
        to = Between(f"--to {form}", few.source, output, ("--to", form, *source, *(() if is_full else target), *jobs))
        described = () if form in ("hf", "dcp") else source
        back = Between(f"{form} --to ckpt", made, output, ("--to", "ckpt", *described, *target, *jobs))
        questions += [
            Question(Comparison(to, small), f"tensors.to_{form}", f"{what}, to {form}"),
            Question(Comparison(back, small), f"tensors.from_{form}", f"{what}, from {form}"),
        ]
    return questions


def _made(folder: Path, kind: str, count: int) -> Checkpoint:
    folder.mkdir()
    network: Shapes = {f"model.layers.{at // 300}.mlp.experts.{at % 300}.w1.weight": _SHAPE for at in range(count)}
    source, target = Placement((1, _SOURCES), ((1,), ())), Placement((1, _TARGETS), ((), (1,)))
    sides = (
        Strategy(ranks, 1, dict.fromkeys(network, (placement,)))
        for ranks, placement in ((_SOURCES, source), (_TARGETS, target))
    )
    return generate(folder, network, Resharding(f"{_SOURCES} -> {_TARGETS}", *sides), kind)


def _pieces(place: Path) -> Run:
    """Move small pieces that lie together on both sides, in the engine; inner_seconds is the CPU time of that alone."""
    program = [sys.executable, "-m", "benchmarks.programs.small_pieces", str(place), str(_PIECES)]
    measured = measure_commands([program])
    return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])
