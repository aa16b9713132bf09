"""Checkpoints that are read where they are: slices beside safetensors, loading beside torch, and opening alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import reshard_mpi
from benchmarks.checkpoint import generate
from benchmarks.interleave import Comparison, take_turns
from benchmarks.interpreters import lacks
from benchmarks.machine import describe
from benchmarks.measure import PROGRAMS, ROOT, Run, last_json
from benchmarks.measure import measure as measure_commands
from benchmarks.network import Resharding, shapes, with_optimizer_sharding
from benchmarks.peers.torch_dcp import Dcp, DcpLoad
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, Row, alone, answer
from benchmarks.workplace import workplace
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

_RANKS, _TENSORS_A_RANK, _ROWS, _MANY = 64, 600, 2_000, 20_000


@dataclass(frozen=True, slots=True)
class Opened:
    """A program that opens a checkpoint, in a fresh process, and prints the seconds that took.

    Attributes:
        peer: whether safetensors opens it; else we do.
        rows: whether one row of each tensor is read.
    """

    source: Path
    strategy: Path | None
    interpreter: str
    peer: bool = False
    rows: bool = False

    @property
    def name(self) -> str:
        return "safe_open and get_slice" if self.peer else "reshard_mpi.open"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "safetensors", "--torch") if self.peer else None

    def run(self) -> Run:
        program = [self.interpreter, str(PROGRAMS / "open_checkpoint.py"), str(self.source), str(self.strategy or "")]
        flags = ["--peer"] * self.peer + ["--rows"] * self.rows
        measured = measure_commands([[*program, *flags]], {"PYTHONPATH": str(ROOT)})
        facts = last_json(measured.stdout)
        return replace(measured.run, inner_seconds=facts["seconds"], peak_bytes=facts["grown_bytes"])


def measure(megabytes: int, pairs: int, folder: Path | None, torch: str) -> Results:
    """Measure all of it, interleaved."""
    network = shapes(megabytes)
    with workplace(folder, 6 * megabytes * 1_000_000) as place:
        machine = describe(place, [(torch, "torch"), (torch, "safetensors")])
        made = generate(place, network, with_optimizer_sharding(network), "safetensors")
        dcp = Dcp(made, place / "beside", torch)
        if dcp.missing() is None:
            dcp.make_source()
        hf = place / "hf"
        reshard_mpi.transform(made.source, hf, made.src_strategy, to="hf", jobs=2)
        size, inner = f"{made.size_bytes / 1e6:.0f} MB", Clock.INNER
        from_dcp = Comparison(DcpLoad(dcp, dcp.source, "Reader"), DcpLoad(dcp, dcp.source, "FileSystemReader"))
        from_hf = Comparison(DcpLoad(dcp, hf, "Reader"), DcpLoad(dcp, hf, "HuggingFaceStorageReader"))
        small = _whole(place / "rows", _ROWS, (96, 960))
        rows = Comparison(
            Opened(small, None, sys.executable, rows=True), Opened(small, None, torch, peer=True, rows=True)
        )
        questions = [
            Question(from_dcp, "open.dcp", f"{size} dcp into {dcp.processes} ranks", megabytes, inner, inner),
            Question(from_dcp, "open.dcp.memory", f"{size} dcp into {dcp.processes} ranks: peak memory", megabytes),
            Question(from_hf, "open.hf", f"{size} hf into {dcp.processes} ranks", megabytes, inner, inner),
            Question(rows, "open.rows", f"one row of each of {_ROWS:,} tensors", None, inner, inner),
        ]
        answered = answer(questions, pairs)
        answered += _alone(place, pairs)
    return Results("open", machine, pairs, answered)


def _alone(place: Path, pairs: int) -> list[Row]:
    """Return the rows of checkpoints that are only opened."""
    cut = {f"layers.{number}.weight": (64, 16) for number in range(_TENSORS_A_RANK)}
    strategy = Strategy(_RANKS, 1, {name: (Placement((_RANKS,), ((0,), ())),) for name in cut})
    sides = {}
    for kind in ("ckpt", "safetensors"):
        folder = place / f"ranks_{kind}"
        folder.mkdir()
        made = generate(folder, cut, Resharding(f"{_RANKS} ranks", strategy, None), kind)
        sides[f"open.64.{kind}"] = (f"{_RANKS} ranks of {kind}, {_TENSORS_A_RANK} tensors each", made.source)
    whole = _whole(place / "many", _MANY, (4, 4))
    for kind in ("ckpt", "safetensors", "hdf5", "dcp"):
        reshard_mpi.transform(whole, place / f"many_{kind}", to=kind)
        sides[f"open.many.{kind}"] = (f"{_MANY:,} tensors of {kind}", place / f"many_{kind}")
    strategies = {key: path.parent / "src_strategy.ckpt" for key, (_, path) in sides.items() if ".64." in key}
    opened = [Opened(path, strategies.get(key), sys.executable) for key, (_, path) in sides.items()]
    turns = take_turns(opened, pairs)
    rows = [
        alone(key, f"open {what}", "reshard_mpi.open", turn.runs, Clock.INNER)
        if turn.failed is None
        else Row(key, what, skipped=turn.failed)
        for (key, (what, _)), turn in zip(sides.items(), turns)
    ]
    runs = [run for turn in turns for run in turn.runs]
    largest = max(runs, key=lambda run: run.peak_bytes, default=None)
    memory = "the most that opening any of these takes"
    skipped = Row("open.memory", memory, skipped="nothing was run")
    return [*rows, skipped if largest is None else alone("open.memory", memory, "reshard_mpi.open", [largest])]


def _whole(folder: Path, count: int, shape: tuple[int, int]) -> Path:
    """Write a checkpoint of one safetensors file; return its folder."""
    folder.mkdir()
    network = {f"layers.{number}.weight": shape for number in range(count)}
    replicated = Strategy(1, 1, {name: (Placement((1,), ((), ())),) for name in network})
    return generate(folder, network, Resharding("whole", replicated, None), "safetensors").source
