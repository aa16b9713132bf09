"""torch's own tools that make whole files of distributed checkpoints, each as a whole command."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interpreters import lacks
from benchmarks.measure import PROGRAMS, Run, measure, settle


@dataclass(frozen=True, slots=True)
class ToTorch:
    """`dcp_to_torch_save` of the distributed checkpoint at `source`."""

    source: Path
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return "torch dcp_to_torch_save"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "torch", "--torch")

    def run(self) -> Run:
        self.output.unlink(missing_ok=True)
        settle(self.output.parent)
        return measure(
            [[self.interpreter, str(PROGRAMS / "torch_files.py"), "to_torch", str(self.source), str(self.output)]]
        ).run


@dataclass(frozen=True, slots=True)
class Consolidation:
    """`consolidate_safetensors_files` of the shards at `source`, with two threads."""

    source: Path
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return "torch consolidate_safetensors_files, 2 threads"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "torch", "--torch") or lacks(self.interpreter, "safetensors", "--torch")

    def run(self) -> Run:
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.output.parent)
        program = [self.interpreter, str(PROGRAMS / "torch_files.py"), "consolidate"]
        return measure([[*program, str(self.source), str(self.output)]]).run


def cut_into_shards(full: Path, shards: Path, ranks: int, interpreter: str) -> None:
    """Have torch's form of shards made of full safetensors files."""
    measure([[interpreter, str(PROGRAMS / "torch_files.py"), "shard", str(full), str(shards), str(ranks)]])
