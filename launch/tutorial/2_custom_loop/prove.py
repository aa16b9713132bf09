"""Compares the broken training with the unbroken one, to the bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def read(part: str) -> tuple[list[float], list[float]]:
    """Return losses and accuracies of a part."""
    kept = json.loads(Path(f"{part}.json").read_text())
    return kept["losses"], kept["accuracies"]


(unbroken, accuracies), (first, first_accuracies), (rest, rest_accuracies) = map(read, ("unbroken", "first", "rest"))
if not rest or first + rest != unbroken:
    sys.exit(f"not proved: losses differ\n  unbroken: {unbroken}\n  broken: {first + rest}")
if first_accuracies[-1] != rest_accuracies[0] or first_accuracies[:-1] + rest_accuracies[1:] != accuracies:
    sys.exit(f"not proved: accuracies differ\n  unbroken: {accuracies}\n  broken: {first_accuracies} {rest_accuracies}")
print(
    f"proved: after 1 -> {sys.argv[1]} -> {sys.argv[2]} -> 1 in mid-training {len(rest)} losses and"
    f" {len(rest_accuracies)} evaluations are those of the unbroken run, to the bit"
)
