"""`cp` of what this project wrote, in as many processes: nothing that writes these bytes anew is much faster."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Run, measure, settle


@dataclass(frozen=True, slots=True)
class Cp:
    """`cp -r` of the rank folders in `source`, shared out over `processes`. options: more for cp."""

    source: Path
    output: Path
    processes: int
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([f"{self.processes} x cp", *self.options])

    def missing(self) -> str | None:
        return None if shutil.which("cp") else "cp is not installed"

    def run(self) -> Run:
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.output.parent)
        self.output.mkdir()
        folders = sorted(map(str, self.source.glob("rank_*")))
        shares = [folders[at :: self.processes] for at in range(self.processes)]
        return measure([["cp", "-r", *self.options, *share, str(self.output)] for share in shares if share]).run
