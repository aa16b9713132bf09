"""How far a run is, as records and as text: no clock and no files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.runs.progress import Counts, ProgressStage, RunStatus, SliceCounter, format_seconds
from reshard_mpi.text import GIB, MIB

WRITING = ProgressStage("writing", 4 * GIB, 16)


def status(
    *counts: Counts,
    stage: ProgressStage = WRITING,
    seconds: float = 10.0,
    done: int = 0,
    seconds_left: float | None = 11.0,
) -> RunStatus:
    return RunStatus.of(stage, counts, seconds, done, seconds_left)


def test_counts_of_all_processes_are_added_up() -> None:
    far = status(Counts(1, units=3), Counts(1, units=1), Counts(1, waits=1), done=GIB + GIB // 4)
    assert (far.bytes_done, far.bytes_total, far.targets_done, far.targets_total) == (GIB + GIB // 4, 4 * GIB, 4, 16)
    assert (far.percent, far.seconds_left, far.waiting, far.bytes_per_second) == (31, 11.0, 1, 256.0 * MIB)
    assert far.as_text() == (
        "writing 1.25 GiB of 4.00 GiB, 31 %, 256.00 MiB/s, 11 s left, 4 of 16 targets, waiting for memory"
    )


def test_a_stage_without_targets_says_nothing_of_them() -> None:
    far = status(Counts(1), stage=ProgressStage("comparing copies", 2 * MIB), done=MIB)
    assert far.as_text() == "comparing copies 1.00 MiB of 2.00 MiB, 50 %, 93.09 KiB/s, 11 s left"


def test_all_is_said_to_be_done_only_if_it_is() -> None:
    assert status(Counts(1, units=15), done=4 * GIB - 1).percent == 99
    last = status(Counts(1, units=15), Counts(1, units=1), done=4 * GIB, seconds_left=0.0)
    assert last.is_complete and last.as_text() == "writing 4.00 GiB of 4.00 GiB, 100 %, in 10 s, 16 of 16 targets"


def test_what_was_complete_before_is_said_and_not_counted() -> None:
    far = status(Counts(1, units=1), stage=ProgressStage("writing", 2 * GIB, 2, ready=6), done=GIB, seconds_left=None)
    assert far.as_text() == "writing 1.00 GiB of 2.00 GiB, 50 %, 1 of 2 targets (6 complete before)"
    assert (far.targets_total, far.targets_before) == (2, 6)


def test_a_stage_of_unknown_size() -> None:
    far = status(Counts(1), stage=ProgressStage("planning"), seconds=65.2, seconds_left=None)
    assert (far.percent, far.seconds_left, far.as_text()) == (None, None, "planning, 1 min 05 s so far")


def test_ranks_that_are_planned() -> None:
    stage = ProgressStage("planning", units=16384, unit="rank")
    far = status(Counts(1, units=700), Counts(1, units=500), stage=stage, seconds=12.1, seconds_left=None)
    assert (far.percent, far.as_text()) == (None, "planning: rank 1200 of 16384, 12 s so far")


def test_several_that_wait() -> None:
    assert status(Counts(1, waits=1), Counts(1, waits=1)).as_text().endswith(", 2 processes wait for memory")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.04 s"), (7.4, "7 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3600 * 3 + 60 * 20, "3 h 20 min")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# Work of known size


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.lists(st.integers(0, 10**5)))
def test_exactly_the_size_is_told(size_bytes: int, steps: int, parts: list[int]) -> None:
    told: list[int] = []
    counted = SliceCounter(told.append, size_bytes, steps)
    for part in parts:
        counted.add(part)
        assert 0 <= sum(told) <= size_bytes
    counted.end()
    assert sum(told) == size_bytes and all(count >= 0 for count in told)
