"""Compares each broken training with the unbroken one: in one process to the bit, on data-parallel ranks to 1e-5.

Joined sums are added in another order than those of a training without a break, so losses are not equal bit by bit.
How far apart those of a training are that has one rank's sums for all tells that the comparison would show it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MOST_APART, LEAST_LOST = 1e-5, 1e-3


def losses(name: str) -> list:
    """Return the losses of a part of the story; of one in one process, the losses and the loss scales."""
    return json.loads(Path(f"{name}.json").read_text())


def apart(name: str, unbroken: list[float]) -> float:
    """Return how far the losses of a broken training are from the last ones of an unbroken one, at most, in shares."""
    rest = losses(name)
    return max(abs(own - expected) / expected for own, expected in zip(rest, unbroken[-len(rest) :], strict=True))


(unbroken, scales), (first, first_scales), (rest, rest_scales), (without, _) = map(
    losses, ("unbroken", "first", "rest", "without")
)
if not rest or first + rest != unbroken:
    sys.exit(f"not proved: losses differ\n  unbroken: {unbroken}\n  broken: {first + rest}")
if first_scales + rest_scales != scales or rest_scales[0] == scales[0]:
    sys.exit(f"not proved: loss scales differ\n  unbroken: {scales}\n  broken: {first_scales + rest_scales}")
differing = [number for number, (lost, kept) in enumerate(zip(without, rest), len(first) + 1) if lost != kept]
if not differing:
    sys.exit("not proved: the losses without the sums are the same, so the sums were not needed")
print(f"without the sums the losses are others from batch {differing[0]} on")

for way in ("averaging", "adding"):
    for ranks in (4, 2):
        share = apart(f"{way}_{ranks}", losses(way))
        print(f"4 ranks, {way} their sums, gone on with {ranks}: losses {share:.1e} apart at most")
        if not share <= MOST_APART:
            sys.exit(f"not proved: losses are more than {MOST_APART} apart")
share = apart("averaging_of_one", losses("averaging"))
print(f"with one rank's sums for all: losses {share:.1e} apart at most")
if not share >= LEAST_LOST:
    sys.exit("not proved: the losses with one rank's sums for all are the same, so joining them was not needed")

print(
    f"proved: stopped {len(first) % 4} batches into an update: the {len(rest)} later losses are those of the unbroken"
    " run, to the bit through 4 ranks and back; and to 1e-5 where 4 data-parallel ranks had sums of their own, whose"
    " mean or sum 4 ranks and 2 go on with"
)
