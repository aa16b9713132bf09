"""How far a run is, as records and as text: no clock and no files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.runs.progress import Counted
from reshard_mpi.runs.status import Counts, Pace, RunStatus, Stage, format_seconds
from reshard_mpi.units import GIB, MIB

WRITING = Stage("writing", 4 * GIB, 16)


def status(
    *counts: Counts, stage: Stage = WRITING, seconds: float = 10.0, bytes_per_second: float | None = 256.0 * MIB
) -> RunStatus:
    return RunStatus.of(stage, counts, seconds, bytes_per_second)


def test_counts_of_all_processes_are_added_up() -> None:
    far = status(Counts(1, GIB, 3), Counts(1, GIB // 4, 1), Counts(1, 0, 0, waits=True))
    assert (far.bytes_done, far.bytes_total, far.targets_done, far.targets_total) == (GIB + GIB // 4, 4 * GIB, 4, 16)
    assert (far.percent, far.seconds_left, far.waiting) == (31, 11.0, 1)
    assert far.as_text() == (
        "writing 1.25 GiB of 4.00 GiB, 31 %, 256.00 MiB/s, 11 s left, 4 of 16 targets, waiting for memory"
    )


def test_a_stage_without_targets_says_nothing_of_them() -> None:
    far = status(Counts(1, MIB), stage=Stage("comparing copies", 2 * MIB), bytes_per_second=None)
    assert far.as_text() == "comparing copies 1.00 MiB of 2.00 MiB, 50 %"


def test_a_byte_is_done_after_its_last_pass() -> None:
    far = status(Counts(1, 4 * GIB), stage=WRITING._replace(passes=2))
    assert (far.bytes_done, far.percent) == (2 * GIB, 50)


def test_all_is_said_to_be_done_only_if_it_is() -> None:
    assert status(Counts(1, 4 * GIB - 1, 15)).percent == 99
    last = status(Counts(1, 4 * GIB - 1, 15), Counts(1, 1, 1))
    assert last.is_complete and last.as_text() == "writing 4.00 GiB of 4.00 GiB, 100 %, in 10 s, 16 of 16 targets"
    sealing = status(Counts(1, 4 * GIB, 15))
    assert not sealing.is_complete and sealing.as_text().endswith("100 %, 15 of 16 targets")


def test_what_was_complete_before_is_said_and_not_counted() -> None:
    far = status(Counts(1, GIB, 1), stage=Stage("writing", 2 * GIB, 2, ready=6), bytes_per_second=None)
    assert far.as_text() == "writing 1.00 GiB of 2.00 GiB, 50 %, 1 of 2 targets (6 complete before)"
    assert (far.targets_total, far.targets_before) == (2, 6)


def test_no_more_is_done_than_there_is() -> None:
    assert status(Counts(1, 5 * GIB)).bytes_done == 4 * GIB


def test_a_stage_of_unknown_size() -> None:
    far = status(Counts(1), stage=Stage("planning"), seconds=65.2)
    assert (far.percent, far.seconds_left, far.as_text()) == (None, None, "planning, 1 min 05 s so far")


def test_several_that_wait() -> None:
    assert status(Counts(1, waits=True), Counts(1, waits=True)).as_text().endswith(", 2 processes wait for memory")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.04 s"), (7.4, "7 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3600 * 3 + 60 * 20, "3 h 20 min")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# The recent speed


def test_no_speed_is_known_at_first() -> None:
    pace = Pace()
    assert pace.bytes_per_second is None
    pace.add(0.0, 0)
    assert pace.bytes_per_second is None
    pace.add(1.0, 100)
    assert pace.bytes_per_second == 100


def test_the_speed_of_a_stage_that_stands_still_is_not_known() -> None:
    pace = Pace()
    for second in range(20):
        pace.add(second, min(second, 5) * 100)
    assert pace.bytes_per_second is None


def test_the_speed_follows_what_a_run_does() -> None:
    pace = Pace()
    for tenth in range(600):  # fast for the first quarter, as into a cache, and then at a tenth of that
        seconds = tenth / 10
        pace.add(seconds, int(1000 * min(seconds, 15) + 100 * max(0.0, seconds - 15)))
    assert pace.bytes_per_second == pytest.approx(100, rel=0.01)


@given(st.floats(0.01, 30), st.integers(1, 10**9), st.integers(3, 200))
def test_an_even_speed_is_known_exactly(step_seconds: float, step_bytes: int, steps: int) -> None:
    pace = Pace()
    for step in range(steps):
        pace.add(step * step_seconds, step * step_bytes)
    if steps * step_seconds > 2:
        assert pace.bytes_per_second == pytest.approx(step_bytes / step_seconds, rel=1e-6)


# Work of known size


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.lists(st.integers(0, 10**5)))
def test_exactly_the_size_is_told(size_bytes: int, steps: int, parts: list[int]) -> None:
    told: list[int] = []
    counted = Counted(told.append, size_bytes, steps)
    for part in parts:
        counted.add(part)
        assert 0 <= sum(told) <= size_bytes
    counted.end()
    assert sum(told) == size_bytes and all(count >= 0 for count in told)
