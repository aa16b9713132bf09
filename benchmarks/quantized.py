"""Quantized checkpoints: 8-bit floats in blocks dequantized to bfloat16, beside torch doing so tensor by tensor."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interleave import Comparison
from benchmarks.interpreters import lacks
from benchmarks.machine import describe
from benchmarks.measure import PROGRAMS, Run, settle
from benchmarks.measure import measure as measure_commands
from benchmarks.peers.ours import Between
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, answer, largest_process
from benchmarks.workplace import workplace

_PROGRAM = str(PROGRAMS / "fp8_files.py")
# The source, and what both sides write, in sizes of the source.
_SIZES = 5


@dataclass(frozen=True, slots=True)
class Multiplied:
    """torch: of each file `load_file`, each weight times its scales in float32, `save_file` in bfloat16."""

    source: Path
    output: Path
    interpreter: str
    name: str = "torch load_file, multiply, save_file"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "torch", "--torch") or lacks(self.interpreter, "safetensors", "--torch")

    def run(self) -> Run:
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.output.parent)
        return measure_commands([[self.interpreter, _PROGRAM, "dequantize", str(self.source), str(self.output)]]).run


def measure(megabytes: int, pairs: int, folder: Path | None, torch: str) -> Results:
    """Measure both, interleaved.

    Args:
        megabytes: of the source.
        torch: an interpreter that has torch and safetensors, and writes the source.
    """
    with workplace(folder, _SIZES * megabytes * 1_000_000) as place:
        machine = describe(place, [(torch, "torch"), (torch, "safetensors")])
        source = place / "source"
        peer = Multiplied(source, place / "beside", torch)
        if peer.missing() is None:
            measure_commands([[torch, _PROGRAM, "make", str(source), str(megabytes)]])
        options = ("--to", "hf", "--dtype", "bf16", "--jobs", "2")
        compared = Comparison(Between("--to hf --dtype bf16 --jobs 2", source, place / "dst", options), peer)
        what, cpu = f"{megabytes} MB of fp8 in blocks -> bf16", Clock.CPU
        questions = [
            Question(compared, "quantized.fp8", f"{what}: whole command", megabytes),
            Question(compared, "quantized.fp8.cpu", f"{what}: CPU time", megabytes, cpu, cpu),
            Question(compared, "quantized.fp8.memory", f"{what}: peak memory", megabytes),
        ]
        rows = answer(questions, pairs)
        return Results("quantized", machine, pairs, [*rows, largest_process("quantized.memory", compared.our_runs)])
