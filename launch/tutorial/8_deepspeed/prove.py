"""Holds the losses after each change against those of the run without a break: they may differ as other sums do."""

import json
import sys
from pathlib import Path

# How many steps each run has taken.
TAKEN = {"zero3": 20, "torch": 10}
MOST_APART = 1e-5


def losses_of(name: str) -> list[float]:
    losses: list[float] = json.loads(Path(f"losses_{name}.json").read_text())
    return losses


if __name__ == "__main__":
    unbroken = losses_of("zero2")
    apart = {}
    for name, taken in TAKEN.items():
        losses = losses_of(name)
        if len(losses) != taken:
            sys.exit(f"{name}: {len(losses)} losses instead of {taken}")
        differences = [abs(got - expected) for got, expected in zip(losses, unbroken[-taken:], strict=True)]
        apart[name] = max(differences)
        if not apart[name] <= MOST_APART:
            sys.exit(f"{name}: the loss of a step is {apart[name]} from that of the run without a break")
    print(
        "proved: 8_deepspeed: from ZeRO-2 on 4 processes to ZeRO-3 on 2, and from that to torch alone, the later losses"
        f" are those of the run without a break (at most {apart['zero3']:.0e} and {apart['torch']:.0e} apart)"
    )
