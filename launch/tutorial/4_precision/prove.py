"""Holds what came of each mode against its unbroken run: python prove.py MODE...

The slices of 4 and of 3 ranks, put together by torch, must be the tensors that were saved, and the losses after the
break those without it, bit by bit.
"""

import json
import sys
from pathlib import Path

import torch
from network import BATCHES, EPOCHS

LATER_STEPS = (EPOCHS - 1) * BATCHES
# Along which dimension the tensors are cut; those of the last bias are whole on every rank.
CUT = {"0.weight": 0, "0.bias": 0, "2.weight": 0, "2.bias": 0, "4.weight": 1, "4.bias": None}


def tensors(path: Path) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return the tensors of a checkpoint, model and optimizer, and the dimension along which each is cut."""
    checkpoint = torch.load(path, weights_only=True)
    found = {}
    for number, (name, dimension) in enumerate(CUT.items()):
        found[name] = checkpoint["model"][f"linear_relu_stack.{name}"], dimension
        found[f"momentum of {name}"] = checkpoint["optimizer"]["state"][number]["momentum_buffer"], dimension
    return found


def check_slices(mode: str, folder: str, ranks: int) -> None:
    slices = [tensors(Path(mode, folder, f"rank_{rank}", f"checkpoint_{rank}.pt")) for rank in range(ranks)]
    for name, (whole, dimension) in tensors(Path(mode, "epoch_1.pt")).items():
        parts = [of_rank[name][0] for of_rank in slices]
        if dimension is None:
            right = all(torch.equal(part, whole) for part in parts)
        else:
            right = torch.equal(torch.cat(parts, dimension), whole)
        if not right:
            sys.exit(f"{mode}: the slices of {name} over {ranks} ranks are not what was saved")


def check_losses(mode: str) -> None:
    unbroken = json.loads(Path(mode, "losses.json").read_text())[BATCHES:]
    resumed = json.loads(Path(mode, "losses_resumed.json").read_text())
    if len(unbroken) != LATER_STEPS or len(resumed) != LATER_STEPS:
        sys.exit(f"{mode}: {len(unbroken)} and {len(resumed)} losses after the break instead of {LATER_STEPS}")
    for step, (expected, got) in enumerate(zip(unbroken, resumed), 1):
        if expected != got:
            sys.exit(f"{mode}: the loss of step {step} after the break is {got!r}, without it {expected!r}")


def main(modes: list[str]) -> None:
    for mode in modes:
        check_slices(mode, "four", 4)
        check_slices(mode, "three", 3)
        check_losses(mode)
    print(
        f"proved: 4_precision: through 4 and 3 ranks and back, the {LATER_STEPS} later losses of {', '.join(modes)} "
        "are those of the unbroken run, bit by bit; bf16 and fp16 weights are what torch makes of the fp32 ones"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
