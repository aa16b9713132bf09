"""From one form of a checkpoint to another, beside the tools that their own frameworks have for it, and beside `cp`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import Checkpoint, generate, source_bytes
from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.measure import Run
from benchmarks.network import shapes, with_optimizer_sharding
from benchmarks.peers.cp import Cp
from benchmarks.peers.mindspore import TransformCheckpoints, Unified
from benchmarks.peers.ours import Between, Call, Transform
from benchmarks.peers.torch_dcp import Dcp
from benchmarks.peers.torch_files import Consolidation, ToTorch, cut_into_shards
from benchmarks.results import Results
from benchmarks.rows import Clock, Question, Row, answer, largest_process
from benchmarks.workplace import workplace


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for. large_megabytes: the size beside `cp`. mindspore, torch: the interpreters that have them."""

    megabytes: int
    large_megabytes: int
    pairs: int
    folder: Path | None
    mindspore: str
    torch: str


def measure(settings: Settings) -> Results:
    """Measure beside the frameworks at the smaller size, and beside `cp` at the larger one."""
    rows: list[Row] = []
    runs: list[Run] = []
    machine: dict[str, str] = {}
    for megabytes, ask in ((settings.megabytes, _beside_frameworks), (settings.large_megabytes, _beside_cp)):
        network = shapes(megabytes)
        resharding = with_optimizer_sharding(network)
        needed_bytes = 3 * source_bytes(network, resharding.source) + megabytes * 4_000_000
        with workplace(settings.folder, needed_bytes) as folder:
            peers = [(settings.mindspore, "mindspore"), (settings.torch, "torch")]
            machine = machine or describe(folder, peers)
            questions = ask(settings, generate(folder, network, resharding, "safetensors"), megabytes)
            rows += answer(questions, settings.pairs)
            for comparison in dict.fromkeys(question.comparison for question in questions):
                runs += comparison.our_runs
    return Results("forms", machine, settings.pairs, [*rows, largest_process("forms.memory", runs)])


def _beside_frameworks(settings: Settings, made: Checkpoint, megabytes: int) -> list[Question]:
    output, beside = made.folder / "dst", made.folder / "beside"
    shards = Comparison(Transform(made, output, 2), TransformCheckpoints(made, beside, settings.mindspore, 2))
    to_hf = _to_hf(made, output)
    unified = Comparison(to_hf, Unified(made, beside, settings.mindspore, 2))
    consolidated = Comparison(to_hf, _consolidation(settings, made))
    dcp = Dcp(made, beside, settings.torch)
    if dcp.missing() is None:
        dcp.make_source()
    resharded = Comparison(_between_dcp(made, dcp, output), dcp)
    call = Comparison(Call(dcp.source, output, _target(made), "dcp", dcp.processes), dcp)
    one_file = Comparison(_to_torch(dcp.source, output), ToTorch(dcp.source, made.folder / "beside.pt", settings.torch))
    size, cpu = f"{made.size_bytes / 1e6:.0f} MB", Clock.CPU
    ranks = f"{size} safetensors, {made.resharding.name}"
    return [
        Question(shards, "forms.safetensors", f"{ranks}: whole command", megabytes),
        Question(shards, "forms.safetensors.memory", f"{ranks}: peak memory", megabytes),
        Question(unified, "forms.hf", f"{size}, 8 safetensors ranks -> hf: whole command", megabytes),
        Question(consolidated, "forms.hf.cpu", f"{size}, 8 shards -> hf: CPU time", megabytes, cpu, cpu),
        Question(resharded, "forms.dcp", f"{size} dcp, {made.resharding.name}: whole command", megabytes),
        Question(
            call, "forms.dcp.call", f"{size} dcp, {made.resharding.name}: call", megabytes, Clock.INNER, Clock.INNER
        ),
        Question(one_file, "forms.torch", f"{size}, 8 ranks of dcp -> one .pt: whole command", megabytes),
        Question(one_file, "forms.torch.memory", f"{size}, 8 ranks of dcp -> one .pt: peak memory", megabytes),
    ]


def _beside_cp(settings: Settings, made: Checkpoint, megabytes: int) -> list[Question]:
    output, beside = made.folder / "dst", made.folder / "beside"
    strategies = ("--src-strategy", str(made.src_strategy), "--dst-strategy", str(_target(made)))
    to_dcp = Between("--to dcp --jobs 2", made.source, output, ("--to", "dcp", "--jobs", "2", *strategies))
    sides: dict[str, tuple[str, Transform | Between]] = {
        "safetensors": (made.resharding.name, Transform(made, output, 2)),
        "hf": ("8 ranks -> hf", _to_hf(made, output)),
        "torch": ("8 ranks -> one .pt", _to_torch(made.source, output, *strategies[:2])),
        "dcp": (f"{made.resharding.name}, to dcp", to_dcp),
    }
    size = f"{made.size_bytes / 1e6:.0f} MB safetensors"
    return [
        Question(
            Comparison(ours, Cp(output, beside, 2)), f"forms.cp.{name}", f"{size}, {what}: whole command", megabytes
        )
        for name, (what, ours) in sides.items()
    ]


def _to_hf(made: Checkpoint, output: Path) -> Between:
    options = ("--to", "hf", "--src-strategy", str(made.src_strategy), "--jobs", "2")
    return Between("--to hf --jobs 2", made.source, output, options)


def _to_torch(source: Path, output: Path, *strategy: str) -> Between:
    return Between("--to torch --jobs 2", source, output, ("--to", "torch", "--jobs", "2", *strategy))


def _between_dcp(made: Checkpoint, dcp: Dcp, output: Path) -> Between:
    options = ("--to", "dcp", "--dst-strategy", str(_target(made)), "--jobs", str(dcp.processes))
    return Between(f"--to dcp --jobs {dcp.processes}", dcp.source, output, options)


def _consolidation(settings: Settings, made: Checkpoint) -> Consolidation:
    """Return torch's consolidation of shards that are made, by torch, of what ours makes of the same source."""
    shards, whole = made.folder / "shards", made.folder / "whole"
    consolidation = Consolidation(shards, made.folder / "consolidated", settings.torch)
    if consolidation.missing() is None:
        _to_hf(made, whole).run()
        cut_into_shards(whole, shards, made.resharding.source.world_size, settings.torch)
    return consolidation


def _target(made: Checkpoint) -> Path:
    assert made.dst_strategy is not None
    return made.dst_strategy
