"""MindSpore's own tools, in a fresh interpreter, on the very files that this project reads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import Checkpoint
from benchmarks.interpreters import lacks
from benchmarks.measure import PROGRAMS, Run, measure, settle


@dataclass(frozen=True, slots=True)
class _Tool:
    """One of MindSpore's functions, run by the `interpreter` that has it in so many processes."""

    checkpoint: Checkpoint
    output: Path
    interpreter: str
    processes: int

    def missing(self) -> str | None:
        return lacks(self.interpreter, "mindspore", "--mindspore")


@dataclass(frozen=True, slots=True)
class TransformCheckpoints(_Tool):
    """`mindspore.transform_checkpoints` with `processes` processes, as a whole command. Writes the source's format."""

    @property
    def name(self) -> str:
        return f"MindSpore transform_checkpoints, process_num={self.processes}"

    def run(self) -> Run:
        _clear(self.output)
        program = [self.interpreter, str(PROGRAMS / "mindspore_whole.py"), str(self.processes), self.checkpoint.format]
        return measure([[*program, *_paths(self.checkpoint, self.output)]]).run


@dataclass(frozen=True, slots=True)
class Unified(_Tool):
    """`mindspore.unified_safetensors`: whole tensors of all ranks in a few files."""

    @property
    def name(self) -> str:
        return f"MindSpore unified_safetensors, max_process_num={self.processes}"

    def run(self) -> Run:
        _clear(self.output)
        paths = [str(path) for path in (self.checkpoint.source, self.checkpoint.src_strategy, self.output)]
        return measure([[self.interpreter, str(PROGRAMS / "mindspore_unified.py"), str(self.processes), *paths]]).run


@dataclass(frozen=True, slots=True)
class TransformByRank(_Tool):
    """`mindspore.transform_checkpoint_by_rank` for every target rank, shared out over `processes` interpreters."""

    @property
    def name(self) -> str:
        return f"MindSpore transform_checkpoint_by_rank, {self.processes} processes"

    def run(self) -> Run:
        _clear(self.output)
        target = self.checkpoint.resharding.target
        ranks = list(map(str, range(target.world_size if target else 1)))
        program = [self.interpreter, str(PROGRAMS / "mindspore_by_rank.py"), *_paths(self.checkpoint, self.output)]
        return measure([[*program, *ranks[at :: self.processes]] for at in range(self.processes)]).run


def _paths(checkpoint: Checkpoint, output: Path) -> list[str]:
    return [str(checkpoint.source), str(output), str(checkpoint.src_strategy), str(checkpoint.dst_strategy)]


def _clear(output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    settle(output.parent)
