"""`cp` of what this project wrote, in as many processes: nothing that writes these bytes anew is much faster."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Run, measure, settle


@dataclass(frozen=True, slots=True)
class Cp:
    """`cp -r` of what lies in `source`, shared out over `processes` by size. options: more for cp."""

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
        shares = self._shares()
        return measure([["cp", "-r", *self.options, *share, str(self.output)] for share in shares if share]).run

    def _shares(self) -> list[list[str]]:
        """Return what each process copies: the largest first, each to whom has the least so far."""
        sizes = {str(path): _size_bytes(path) for path in self.source.iterdir() if not path.name.startswith(".r")}
        shares: list[list[str]] = [[] for _ in range(self.processes)]
        for path in sorted(sizes, key=lambda path: -sizes[path]):
            min(shares, key=lambda share: sum(map(sizes.__getitem__, share))).append(path)
        return shares


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())
