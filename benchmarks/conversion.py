"""A whole conversion, as a user runs it, beside `cp` of what it writes: interleaved, so noise falls on both alike."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoint import Checkpoint, generate


def measure(megabytes: int, pairs: int, processes: int, kind: str, folder: Path | None) -> str:
    """Time `pairs` pairs of runs; return a table with the seconds of either and the median of the ratios."""
    memory = Path("/dev/shm")
    if folder is None and memory.is_dir() and shutil.disk_usage(memory).free > 8_000_000 * megabytes:
        folder = memory
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = generate(Path(name), megabytes, kind)
        output, copy = Path(name, "dst"), Path(name, "copy")
        ours, copies = [], []
        for _ in range(pairs + 1):
            shutil.rmtree(output, ignore_errors=True)
            ours.append(_seconds(lambda: _convert(made, output, processes)))
            shutil.rmtree(copy, ignore_errors=True)
            copies.append(_seconds(lambda: _copy(output, copy, processes)))
        written_bytes = sum(file.stat().st_size for file in output.rglob("rank_*/*"))
    # The first pair brings pages and bytecode into memory; it is not counted.
    ratios = [mine / theirs for mine, theirs in zip(ours[1:], copies[1:])]
    return "\n".join(
        [
            f"{made.size_bytes / 1e6:.0f} MB of tensors, {kind}, 8 -> 4 ranks with optimizer sharding,"
            f" {written_bytes / 1e9:.2f} GB written, {processes} processes; Python {platform.python_version()}",
            f"  transform (whole command)  {_spread(ours[1:])} s",
            f"  cp of its output           {_spread(copies[1:])} s",
            f"  ratio                      {_spread(ratios)}",
        ]
    )


def _convert(made: Checkpoint, output: Path, processes: int) -> None:
    strategies = ["--src-strategy", str(made.src_strategy), "--dst-strategy", str(made.dst_strategy)]
    command = [sys.executable, "-m", "reshard_mpi", "transform", str(made.source), str(output), *strategies]
    subprocess.run([*command, "--jobs", str(processes), "--progress", "none"], check=True, stdout=subprocess.DEVNULL)


def _copy(output: Path, copy: Path, processes: int) -> None:
    copy.mkdir()
    folders = sorted(output.glob("rank_*"))
    shares = [folders[at::processes] for at in range(processes)]
    copies = [subprocess.Popen(["cp", "-r", *map(str, share), str(copy)]) for share in shares if share]
    for started in copies:
        if started.wait():
            raise RuntimeError("cp failed")


def _seconds(work: object) -> float:
    assert callable(work)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f}  ({min(values):.3f} to {max(values):.3f})"
