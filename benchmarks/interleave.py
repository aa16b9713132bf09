"""Runs of two sides in turns, so that whatever disturbs the machine disturbs both alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.measure import CommandFailedError, Run
from benchmarks.peers.protocol import Peer

WARM_UPS = 1  # rounds that do not count: the first brings pages and bytecode into memory


@dataclass(eq=False, slots=True)
class Comparison:
    """Two sides and their runs, pair by pair. missing: why there are none."""

    ours: Peer
    peer: Peer
    our_runs: list[Run] = field(default_factory=list)
    peer_runs: list[Run] = field(default_factory=list)
    missing: str | None = None


def interleave(comparisons: Sequence[Comparison], pairs: int) -> None:
    """Run every pair once uncounted and then `pairs` times, all comparisons in turns: ours, a peer, ours, the next.

    Where a side is missing or fails, the comparison says why.
    """
    for comparison in comparisons:
        # The peer first: a source that it should have made is missing with it.
        comparison.missing = comparison.peer.missing() or comparison.ours.missing()
    for number in range(1 - WARM_UPS, 1 + pairs):
        for comparison in comparisons:
            if comparison.missing is None:
                try:
                    ours, theirs = comparison.ours.run(), comparison.peer.run()
                except CommandFailedError as error:
                    comparison.missing = f"failed: {error}"
                    print(error.details, file=sys.stderr, flush=True)
                    continue
                _say(number, pairs, comparison, ours, theirs)
                if number > 0:
                    comparison.our_runs.append(ours)
                    comparison.peer_runs.append(theirs)


@dataclass(slots=True)
class Turns:
    """The runs of one side that is compared with no other in pairs. failed: why there are none."""

    runs: list[Run] = field(default_factory=list)
    failed: str | None = None


def take_turns(sides: Sequence[Peer], rounds: int) -> list[Turns]:
    """Run every side once uncounted and then `rounds` times, one after the other in every round."""
    turns = [Turns() for _ in sides]
    for number in range(1 - WARM_UPS, 1 + rounds):
        for side, turn in zip(sides, turns):
            if turn.failed is None:
                try:
                    run = side.run()
                except CommandFailedError as error:
                    turn.failed = f"failed: {error}"
                    print(error.details, file=sys.stderr, flush=True)
                    continue
                if number > 0:
                    turn.runs.append(run)
    return turns


def warmed_up(run: Callable[[], Run], rounds: int) -> list[Run]:
    """Return what so many runs took, after those that do not count."""
    return [run() for _ in range(WARM_UPS + rounds)][WARM_UPS:]


def _say(number: int, pairs: int, comparison: Comparison, ours: Run, theirs: Run) -> None:
    stage = f"pair {number} of {pairs}" if number else "warm-up"
    print(
        f"{stage}: {comparison.ours.name} {ours.seconds:.3f} s, {comparison.peer.name} {theirs.seconds:.3f} s",
        file=sys.stderr,
        flush=True,
    )
