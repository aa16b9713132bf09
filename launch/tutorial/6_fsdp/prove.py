"""Holds what became of the checkpoint of 4 processes, and of the training, against the unbroken run.

What torch itself makes of the checkpoints of 4 and of 2 processes must be, bit by bit, what lies in the one file, and
each of the 2 must have one half of every tensor. The losses may differ as much as other sums of the same numbers do.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from train import STEPS

FILE = "whole/rank_0/checkpoint_0.pt"
MOST_APART = 1e-5


def check_same(got: Any, expected: Any, name: str) -> None:
    """Exit unless two values are the same; dictionaries may list their keys in any order."""
    if isinstance(expected, dict) and isinstance(got, dict) and got.keys() == expected.keys():
        for key in expected:
            check_same(got[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            sys.exit(f"{name} is not the same")
    elif got != expected:
        sys.exit(f"{name} is {got!r}, and was {expected!r}")


def check_halves() -> None:
    for name, stored in FileSystemReader("two").read_metadata().state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata) or not stored.size:
            continue
        rows, *others = stored.size
        halves = {torch.Size([rows // 2, *others])}
        if len(stored.chunks) != 2 or {chunk.sizes for chunk in stored.chunks} != halves:
            sys.exit(f"{name} is not stored in two halves: {stored.chunks}")


def check_losses(unbroken: list[float]) -> float:
    """Exit unless the later losses are those of the unbroken run; return how far they are apart at most."""
    most = 0.0
    for processes in (2, 1):
        losses = json.loads(Path(f"losses_{processes}.json").read_text())
        if len(losses) != len(unbroken):
            sys.exit(f"{processes} processes: {len(losses)} losses instead of {len(unbroken)}")
        for step, (got, expected) in enumerate(zip(losses, unbroken), 1):
            if not abs(got - expected) <= MOST_APART:
                sys.exit(f"{processes} processes: the loss of step {step} after the break is {got}, not {expected}")
            most = max(most, abs(got - expected))
    return most


if __name__ == "__main__":
    whole = torch.load(FILE, weights_only=True)
    for folder in ("four", "two"):
        dcp_to_torch_save(folder, f"{folder}_by_torch.pt")
        check_same(torch.load(f"{folder}_by_torch.pt", weights_only=True), whole, folder)
    check_halves()
    most_apart = check_losses(json.loads(Path("losses_4.json").read_text())[STEPS // 2 :])
    print(
        f"proved: 6_fsdp: from 4 processes to 2 and to 1, the {STEPS // 2} later losses are those of the unbroken run "
        f"(at most {most_apart:.0e} apart); both checkpoints hold, bit by bit, what torch reads from that of 4"
    )
