"""How long commands take that move next to nothing, beside an interpreter that does nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import generate
from benchmarks.interleave import Comparison
from benchmarks.machine import describe
from benchmarks.measure import Run
from benchmarks.measure import measure as measure_commands
from benchmarks.network import shapes, with_optimizer_sharding
from benchmarks.peers.ours import Transform
from benchmarks.peers.protocol import Peer
from benchmarks.results import Results
from benchmarks.rows import Question, answer, largest_process
from benchmarks.workplace import workplace

_TINY_MEGABYTES = 0.2


@dataclass(frozen=True, slots=True)
class Command:
    """Any command."""

    name: str
    arguments: tuple[str, ...]

    def missing(self) -> str | None:
        return None

    def run(self) -> Run:
        return measure_commands([self.arguments]).run


def measure(pairs: int, folder: Path | None) -> Results:
    """Measure start-up in its several forms."""
    network = shapes(_TINY_MEGABYTES)
    with workplace(folder, 100_000_000) as place:
        machine = describe(place)
        made = generate(place, network, with_optimizer_sharding(network), "ckpt")
        bare = Command("python -c pass", (sys.executable, "-c", "pass"))
        sides: dict[str, tuple[str, Peer]] = {
            "startup.help": ("help", Command("reshard-mpi --help", (*_console(), "--help"))),
            "startup.import": ("import", Command("import reshard_mpi", (sys.executable, "-c", "import reshard_mpi"))),
            "startup.jobs1": ("tiny transform", Transform(made, place / "dst", 1)),
            "startup.jobs2": ("tiny transform", Transform(made, place / "dst", 2)),
        }
        questions = [Question(Comparison(side, bare), key, what) for key, (what, side) in sides.items()]
        rows = answer(questions, pairs)
    runs = [run for question in questions for run in question.comparison.our_runs]
    return Results("startup", machine, pairs, [*rows, largest_process("startup.memory", runs)])


def _console() -> tuple[str, ...]:
    """Return the command line as it is installed, or else as a module."""
    installed = Path(sys.executable).parent / "reshard-mpi"
    return (str(installed),) if installed.exists() else (sys.executable, "-m", "reshard_mpi")
