"""Checkpoints of DeepSpeed's ZeRO: whole weights in fp32, and other numbers of ranks, beside its own two scripts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.network import shapes
from benchmarks.peers.deepspeed import ToUniversal, ZeroToFp32, make_source
from benchmarks.peers.ours import Between
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, answer, largest_process
from benchmarks.workplace import workplace

_RANKS, _MORE_RANKS = 4, 8
# What all sides write, and the source, in sizes of the tensors.
_SIZES = 6


def measure(megabytes: int, pairs: int, folder: Path | None, deepspeed: str) -> Results:
    """Measure both, interleaved. megabytes: of what the optimizer has, which is three times the weights in fp32."""
    # A weight stands for itself and two moments, as each does in the network.
    network = {name: shape for name, shape in shapes(megabytes).items() if not name.startswith("adam_")}
    with workplace(folder, _SIZES * megabytes * 1_000_000) as place:
        packages = ("deepspeed", "torch", "safetensors")
        machine = describe(place, [(deepspeed, package) for package in packages])
        source, ours, beside = place / "src", place / "dst", place / "beside"
        to_fp32, to_universal = ZeroToFp32(source, beside, deepspeed), ToUniversal(source, beside, deepspeed)
        if to_fp32.missing() is None:
            make_source(source, network, _RANKS, deepspeed)
        fp32 = Comparison(_ours(source, ours, "--to", "hf", "--dtype", "fp32"), to_fp32)
        options = ("--to", "deepspeed", "--dp", str(_MORE_RANKS), "--zero-stage", "2")
        ranks = Comparison(_ours(source, ours, *options), to_universal)
        size, cpu = f"{megabytes} MB", Clock.CPU
        whole, more = f"{size}, ZeRO-2 of {_RANKS} -> weights in fp32", f"{size}, ZeRO-2 of {_RANKS} -> {_MORE_RANKS}"
        questions = [
            Question(fp32, "deepspeed.fp32", f"{whole}: whole command", megabytes),
            Question(fp32, "deepspeed.fp32.cpu", f"{whole}: CPU time", megabytes, cpu, cpu),
            Question(fp32, "deepspeed.fp32.memory", f"{whole}: peak memory", megabytes),
            Question(ranks, "deepspeed.ranks", f"{more}: whole command", megabytes),
            Question(ranks, "deepspeed.ranks.cpu", f"{more}: CPU time", megabytes, cpu, cpu),
            Question(ranks, "deepspeed.ranks.memory", f"{more}: peak memory", megabytes),
        ]
        rows = answer(questions, pairs)
        largest = largest_process("deepspeed.memory", [*fp32.our_runs, *ranks.our_runs])
    return Results("deepspeed", machine, pairs, [*rows, largest])


def _ours(source: Path, output: Path, *options: str) -> Between:
    return Between(" ".join([*options, "--jobs 2"]), source, output, (*options, "--jobs", "2"))
