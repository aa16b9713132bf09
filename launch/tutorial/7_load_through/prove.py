"""Holds the losses of torch against those of MindSpore alone, and of torch from a checkpoint that was converted."""

import json
import sys
from pathlib import Path

from lesson import STEPS

MOST_APART = 1e-4


def losses_of(name: str) -> list[float]:
    losses: list[float] = json.loads(Path(f"losses_{name}.json").read_text())
    return losses


if __name__ == "__main__":
    alone = losses_of("mindspore")[STEPS // 2 :]
    through, converted = losses_of("through"), losses_of("converted")
    print(f"{'':10} {'MindSpore':>14} {'torch':>14}")
    for step, (expected, got) in enumerate(zip(alone, through, strict=True), STEPS // 2 + 1):
        print(f"loss {step:<5} {expected:14.6f} {got:14.6f}")
    if through != converted:
        sys.exit(f"the losses are not those of the converted checkpoint: {through} and {converted}")
    apart = max(abs(got - expected) for got, expected in zip(through, alone))
    if not apart <= MOST_APART:
        sys.exit(f"the losses of torch and MindSpore are {apart} apart")
    print(
        "proved: 7_load_through: MindSpore's checkpoint of 8 ranks, loaded into FSDP on 4 processes without a copy:"
        f" {len(alone)} losses are those of the converted checkpoint, and those of MindSpore alone (at most {apart:.0e}"
        " apart)"
    )
