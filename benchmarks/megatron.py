"""Checkpoints of Megatron-Core: weights to Hugging Face, the optimizer out of its buckets, and a very long index."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.interleave import Comparison, take_turns
from benchmarks.machine import describe
from benchmarks.measure import PROGRAMS
from benchmarks.measure import measure as measure_commands
from benchmarks.opening import Opened
from benchmarks.peers.cp import Cp
from benchmarks.peers.ours import Between
from benchmarks.peers.torch_files import ToTorch
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, Row, alone, answer, largest_process
from benchmarks.workplace import workplace

_ITERATION = "iter_0000001"
_ITEMS = 100_000
# What all sides write, and the sources, in sizes of the tensors.
_SIZES = 8


def measure(megabytes: int, items: int, pairs: int, folder: Path | None, torch: str) -> Results:
    """Measure all three, interleaved.

    Args:
        megabytes: of weights; and of weights with the optimizer's state.
        items: of the long index.
        torch: an interpreter that has it, and writes the sources.
    """
    with workplace(folder, _SIZES * megabytes * 1_000_000) as place:
        machine = describe(place, [(torch, "torch")])
        weights, buckets, long = (place / name for name in ("weights", "buckets", "items"))
        to_torch = ToTorch(weights / _ITERATION, place / "beside.pt", torch)
        if to_torch.missing() is None:
            for source, task, count in ((weights, "weights", megabytes), (buckets, "buckets", megabytes)):
                _make(source, task, count, torch)
            _make(long, "items", items, torch)
        to_hf = Comparison(_ours(weights, place / "hf", "hf"), to_torch)
        written = place / "dst"
        to_megatron = Comparison(
            _ours(buckets, written, "megatron"), Cp(written / _ITERATION, place / "copied", processes=2)
        )
        size, cpu = f"{megabytes} MB", Clock.CPU
        hf, out_of_buckets = f"{size} of torch_dist -> Hugging Face", f"{size}, dp_reshardable -> fully_reshardable"
        questions = [
            Question(to_hf, "megatron.weights", f"{hf}: whole command", megabytes),
            Question(to_hf, "megatron.weights.cpu", f"{hf}: CPU time", megabytes, cpu, cpu),
            Question(to_hf, "megatron.weights.memory", f"{hf}: peak memory", megabytes),
            Question(to_megatron, "megatron.buckets", f"{out_of_buckets}: whole command", megabytes),
        ]
        rows = answer(questions, pairs)
        largest = largest_process("megatron.memory", [*to_hf.our_runs, *to_megatron.our_runs])
        return Results("megatron", machine, pairs, [*rows, largest, *_opened(long, items, pairs)])


def _make(folder: Path, task: str, count: int, torch: str) -> None:
    """Have a source written by torch's own classes."""
    measure_commands([[torch, str(PROGRAMS / "megatron_files.py"), task, str(folder), str(count)]])


def _ours(source: Path, output: Path, to: str) -> Between:
    return Between(f"--to {to} --jobs 2", source, output, ("--to", to, "--jobs", "2"))


def _opened(source: Path, items: int, pairs: int) -> list[Row]:
    """Return the rows of a checkpoint with a long index, which is only opened."""
    what, ours = f"open {items:,} items, and what every rank has planned", "reshard_mpi.open"
    keys = ("megatron.items", "megatron.items.memory")
    if not source.exists():
        return [Row(key, what, skipped="torch, which writes it, is not installed") for key in keys]
    (turn,) = take_turns([Opened(source, None, sys.executable)], pairs)
    if turn.failed is not None:
        return [Row(key, what, skipped=turn.failed) for key in keys]
    return [alone(keys[0], what, ours, turn.runs, Clock.INNER), alone(keys[1], what, ours, turn.runs)]
