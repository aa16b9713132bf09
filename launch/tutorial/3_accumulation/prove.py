"""Compares the broken training with the unbroken one, to the bit, and with one that has lost its sums."""

from __future__ import annotations

import json
import sys
from pathlib import Path

unbroken, first, rest, without = (
    json.loads(Path(f"{part}.json").read_text()) for part in ("unbroken", "first", "rest", "without")
)
if not rest or first + rest != unbroken:
    sys.exit(f"not proved: losses differ\n  unbroken: {unbroken}\n  broken: {first + rest}")
differing = [number for number, (lost, kept) in enumerate(zip(without, rest), len(first) + 1) if lost != kept]
if not differing:
    sys.exit("not proved: the losses without the sums are the same, so the sums were not needed")
print(f"without the sums the losses are others from batch {differing[0]} on")
print(
    f"proved: stopped {len(first) % 4} batches into an update, through 4 ranks and back: the {len(rest)} later losses"
    " are those of the unbroken run, to the bit"
)
