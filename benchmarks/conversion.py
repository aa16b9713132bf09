"""Whole conversions beside `cp`, MindSpore and torch's distributed checkpoint, and with blocks shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpoint import Checkpoint, generate, source_bytes
from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.measure import Run
from benchmarks.network import by_rows, rows_into_columns, shapes, with_optimizer_sharding
from benchmarks.peers.cp import Cp
from benchmarks.peers.mindspore import TransformByRank, TransformCheckpoints
from benchmarks.peers.ours import Function, Transform
from benchmarks.peers.torch_dcp import Dcp
from benchmarks.results import GB, Curve, Results
from benchmarks.rows import Clock, Question, Row, answer, largest_process
from benchmarks.targets import COLUMNS_MB
from benchmarks.workplace import workplace
from benchmarks.xfs import CannotMountError, mounted

AGAINST = ("cp", "mindspore", "torch", "sharing")
FORMATS = ("ckpt", "hdf5")
# Where rows become columns, every dimension can be cut into 8 pieces and into 3.
_COLUMN_CUTS = 24


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for. mindspore, torch: the interpreters that have them."""

    sizes_megabytes: tuple[int, ...]
    formats: tuple[str, ...]
    against: tuple[str, ...]
    pairs: int
    processes: int
    folder: Path | None
    mindspore: str
    torch: str


@dataclass(slots=True)
class _Found:
    """What has been found so far: rows, all runs of ours, and points of throughput by curve."""

    machine: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    our_runs: list[Run] = field(default_factory=list)
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def measure(settings: Settings) -> Results:
    """Measure all that `settings` asks for: frameworks at the smallest of the sizes, block sharing at the largest."""
    found = _Found()
    smallest = min(settings.sizes_megabytes)
    for megabytes in sorted(settings.sizes_megabytes):
        for kind in settings.formats:
            against = {"cp"}
            if megabytes == smallest and kind == "ckpt":
                against |= {"mindspore", "torch"}
            _convert(settings, found, megabytes, kind, against.intersection(settings.against))
    if "cp" in settings.against and "ckpt" in settings.formats:
        _turn_into_columns(settings, found, min(COLUMNS_MB, max(settings.sizes_megabytes)))
    if "sharing" in settings.against:
        _share_blocks(settings, found, max(settings.sizes_megabytes))
    found.rows.append(largest_process("conversion.memory", found.our_runs))
    curves = [Curve(label, tuple(points)) for label, points in found.points.items()]
    return Results("conversion", found.machine, settings.pairs, found.rows, "MB of tensors", curves)


def _convert(settings: Settings, found: _Found, megabytes: int, kind: str, against: set[str]) -> None:
    """Measure one size and format on the memory file system, or wherever the user wants it."""
    if not against:
        return
    network = shapes(megabytes)
    resharding = with_optimizer_sharding(network)
    # The source, what ours writes and what the other does; torch has a source of its own.
    copies_bytes = source_bytes(network, resharding.source) + megabytes * 1_000_000 * (3 if "torch" in against else 2)
    with workplace(settings.folder, copies_bytes) as folder:
        _look_around(settings, found, folder)
        made = generate(folder, network, resharding, kind)
        questions = []
        if "cp" in against:
            questions.append(_beside_cp(settings, made, megabytes, f"cp.{kind}"))
        if "mindspore" in against:
            questions += _beside_mindspore(settings, made, megabytes)
        if "torch" in against:
            questions += _beside_torch(settings, made, megabytes)
        _answer(settings, found, questions)
    for row in found.rows[-len(questions) :]:
        if row.key.startswith("cp."):
            _add_points(found, made, row)


def _turn_into_columns(settings: Settings, found: _Found, megabytes: int) -> None:
    """Measure short runs that lie far apart in the source, beside `cp`."""
    network = shapes(megabytes, _COLUMN_CUTS)
    resharding = rows_into_columns(network)
    with workplace(settings.folder, 3 * source_bytes(network, resharding.source)) as folder:
        _look_around(settings, found, folder)
        made = generate(folder, network, resharding, "ckpt")
        _answer(settings, found, [_beside_cp(settings, made, megabytes, "cp.columns")])


def _beside_cp(settings: Settings, made: Checkpoint, megabytes: int, key: str) -> Question:
    ours = Transform(made, made.folder / "dst", settings.processes)
    comparison = Comparison(ours, Cp(ours.output, made.folder / "beside", settings.processes))
    return Question(comparison, key, _what(made, "whole command"), megabytes)


def _beside_mindspore(settings: Settings, made: Checkpoint, megabytes: int) -> list[Question]:
    output, beside, processes = made.folder / "dst", made.folder / "beside", settings.processes
    jobs = Transform(made, output, processes)
    ranks = Transform(made, output, processes, under_mpi=True)
    whole = TransformCheckpoints(made, beside, settings.mindspore, processes)
    by_rank = TransformByRank(made, beside, settings.mindspore, processes)
    with_jobs = Comparison(jobs, whole)
    return [
        Question(with_jobs, "mindspore.jobs", _what(made, "whole command"), megabytes),
        Question(Comparison(ranks, whole), "mindspore.mpirun", _what(made, "whole command"), megabytes),
        Question(with_jobs, "mindspore.memory", _what(made, "peak memory"), megabytes),
        Question(Comparison(jobs, by_rank), "mindspore.by_rank", _what(made, "whole command"), megabytes),
    ]


def _beside_torch(settings: Settings, made: Checkpoint, megabytes: int) -> list[Question]:
    output = made.folder / "dst"
    dcp = Dcp(made, made.folder / "beside", settings.torch)
    ranks = dcp.processes
    inner = Clock.INNER
    return [
        Question(
            Comparison(Function(made, output, ranks), dcp), "torch.api", _what(made, "API"), megabytes, inner, inner
        ),
        Question(
            Comparison(Transform(made, output, ranks, under_mpi=True), dcp),
            "torch.command",
            _what(made, "whole command"),
            megabytes,
        ),
    ]


def _share_blocks(settings: Settings, found: _Found, megabytes: int) -> None:
    """Measure the engine where a file can take over blocks of another, beside `cp` that copies them."""
    network = shapes(megabytes)
    resharding = by_rows(network)
    needed_bytes = 3 * source_bytes(network, resharding.source)
    with workplace(settings.folder, needed_bytes) as folder:
        _look_around(settings, found, folder)
        try:
            with mounted(folder, needed_bytes) as point:
                made = generate(point, network, resharding, "hdf5")
                ours = Transform(made, point / "dst", settings.processes)
                copies = Cp(ours.output, point / "beside", settings.processes, ("--reflink=never",))
                what = _what(made, "on XFS, engine beside whole command")
                question = Question(Comparison(ours, copies), "sharing", what, megabytes, Clock.INNER)
                _answer(settings, found, [question])
        except CannotMountError as error:
            what = f"{megabytes} MB .hdf5, {resharding.name}, on XFS"
            found.rows.append(Row("sharing", what, megabytes, skipped=str(error)))


def _answer(settings: Settings, found: _Found, questions: list[Question]) -> None:
    found.rows += answer(questions, settings.pairs)
    for comparison in dict.fromkeys(question.comparison for question in questions):
        found.our_runs += comparison.our_runs


def _look_around(settings: Settings, found: _Found, folder: Path) -> None:
    """Describe the machine as seen from where the first measurement is made."""
    peers = [(settings.mindspore, "mindspore"), (settings.torch, "torch")]
    found.machine = found.machine or describe(folder, peers)


def _add_points(found: _Found, made: Checkpoint, row: Row) -> None:
    for side in (row.ours, row.peer):
        if side is not None:
            points = found.points.setdefault(f"{side.name}, .{made.format}", [])
            points.append((round(made.size_bytes / 1e6), made.size_bytes / GB / side.seconds.median))


def _what(made: Checkpoint, measured: str) -> str:
    return f"{made.size_bytes / 1e6:.0f} MB .{made.format}, {made.resharding.name}: {measured}"
