"""DeepSpeed's own scripts for checkpoints of ZeRO, each as a whole command."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interpreters import lacks
from benchmarks.measure import PROGRAMS, Run, measure, settle
from benchmarks.network import Shapes

# Else it looks for a GPU, and says what it has not found.
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}
_TAG = "global_step1"


@dataclass(frozen=True, slots=True)
class ZeroToFp32:
    """`zero_to_fp32.py` of the checkpoint at `source`, to safetensors."""

    source: Path
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return "zero_to_fp32.py --safe_serialization"

    def missing(self) -> str | None:
        packages = ("deepspeed", "safetensors", "huggingface-hub")
        return next(filter(None, (lacks(self.interpreter, package, "--deepspeed") for package in packages)), None)

    def run(self) -> Run:
        _clear(self.output)
        program = [self.interpreter, "-m", "deepspeed.utils.zero_to_fp32"]
        return measure([[*program, str(self.source), str(self.output), "--safe_serialization"]], _ENVIRONMENT).run


@dataclass(frozen=True, slots=True)
class ToUniversal:
    """`ds_to_universal.py` of the checkpoint at `source`, from which a training of any number of ranks then loads."""

    source: Path
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return "ds_to_universal.py --inject_missing_state"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "deepspeed", "--deepspeed")

    def run(self) -> Run:
        _clear(self.output)
        program = [self.interpreter, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        folders = ["--input_folder", str(self.source / _TAG), "--output_folder", str(self.output / _TAG)]
        return measure([[*program, *folders]], _ENVIRONMENT).run


def make_source(source: Path, network: Shapes, ranks: int, interpreter: str) -> None:
    """Have a checkpoint of ZeRO-2 written as DeepSpeed's engine does it, of noise."""
    shapes = source.with_suffix(".json")
    shapes.write_text(json.dumps(network))
    program = [interpreter, str(PROGRAMS / "deepspeed_files.py")]
    measure([[*program, str(source), _TAG, str(shapes), str(ranks)]], _ENVIRONMENT)


def _clear(output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    settle(output.parent)
