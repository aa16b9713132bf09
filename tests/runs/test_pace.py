"""How long the rest of a stage takes, from counts at moments that are given: no clock, no files.

`paces/` holds what conversions of 4 GiB counted, a moment every quarter of a second: of tensors in 8 shards, in memory
but where a name says otherwise, on a machine that others used as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.runs.monitor import EtaEstimator
from reshard_mpi.runs.progress import CLOSED, MOVED, PHASES, BytesByPhase, Counts, Stage, own_by_phase
from reshard_mpi.text import MIB

PACES = sorted((Path(__file__).parent / "paces").glob("*.json"))
VERIFIED = Stage("writing and verifying", 1000 * MIB, 4, phases=PHASES)
WRITTEN = VERIFIED._replace(phases=(MOVED, CLOSED))
READ = VERIFIED._replace(phases=(MOVED,))


class Said:
    """What a pace says at a moment. left: how long the rest really took. share: of the time that has gone by."""

    def __init__(self, pace: EtaEstimator, size_bytes: int, seconds: float, end_seconds: float) -> None:
        self.left = end_seconds - seconds
        self.seconds_left = pace.seconds_left
        self.share = seconds / end_seconds
        self.share_done = pace.bytes_done / size_bytes

    @property
    def ratio(self) -> float:
        assert self.seconds_left is not None
        return self.seconds_left / self.left


def recorded(path: Path) -> Iterator[Said]:
    trace = json.loads(path.read_text())
    own: list[BytesByPhase] = [tuple(by_phase) for by_phase in trace["own_kib"]]
    size = sum(by_phase[MOVED] for by_phase in own)
    pace = EtaEstimator(Stage("writing", size, phases=tuple(trace["phases"])), 0.0)
    end_seconds = trace["moments"][-1][0]
    for seconds, *done in trace["moments"]:
        pace.add(seconds, [Counts(1, tuple(by_phase), of) for by_phase, of in zip(done, own)])
        yield Said(pace, size, seconds, end_seconds)


@pytest.mark.parametrize("path", PACES, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    said = list(recorded(path))
    assert said[-1].share_done == pytest.approx(1, abs=1e-6)  # bytes of each process are rounded to KiB
    assert all(abs(moment.share_done - moment.share) < 0.15 for moment in said)
    late = [moment for moment in said if moment.share >= 0.5 and moment.left > 0.26]  # less is shown as 0.2 s
    assert late and all(0.5 <= moment.ratio <= 2 for moment in late), [(one.share, one.ratio) for one in late]


def counts_of(stage: Stage, work: list[tuple[int, float]], own_bytes: int, at_seconds: float) -> Counts:
    """What a process has done by then that goes through `work`: phases, one after another, and what each takes."""
    done = [0, 0, 0, 0]
    for phase, seconds in work:
        share = min(1.0, max(0.0, at_seconds / seconds))
        at_seconds -= seconds
        done[phase] += (
            int(own_bytes / sum(phase == of for of, _ in work) * share) if phase in (0, 2) or share == 1 else 0
        )
    moved, synced, read_back, closed = done
    return Counts(1, (moved, synced, read_back, closed), own_by_phase(stage, own_bytes, own_bytes))


TARGET = [(0, 2.0), (1, 1.0), (2, 0.5), (3, 0.5)]


def test_each_phase_has_a_speed_of_its_own() -> None:
    """Four targets of four seconds each, of which nothing is counted for one and a half."""
    pace = EtaEstimator(VERIFIED, 0.0)
    for tick in range(65):
        seconds = tick / 4
        pace.add(seconds, [counts_of(VERIFIED, TARGET * 4, 1000 * MIB, seconds)])
        if 4.25 < seconds < 16:
            assert pace.seconds_left == pytest.approx(16 - seconds, rel=0.15, abs=0.3), seconds
            assert pace.bytes_done / VERIFIED.size_bytes == pytest.approx(seconds / 16, abs=0.08)  # type: ignore[operator]
    assert pace.bytes_done == VERIFIED.size_bytes and pace.seconds_left == 0


def test_the_process_with_the_most_work_left_is_the_last() -> None:
    pace = EtaEstimator(READ, 0.0)
    for tick in range(1, 20):
        seconds = tick / 4
        counts = [counts_of(READ, [(0, length)], int(length * 100 * MIB), seconds) for length in (8.0, 1.0, 1.0)]
        pace.add(seconds, counts)
        if seconds > 0.5:
            assert pace.seconds_left == pytest.approx(8 - seconds, rel=0.01)


def test_no_time_is_promised_before_anything_is_done() -> None:
    pace = EtaEstimator(WRITTEN, 0.0)
    for seconds in (0.2, 1.0, 2.0):
        pace.add(seconds, [Counts(1, own_bytes=own_by_phase(WRITTEN, 1000 * MIB, 1000 * MIB))])
        assert (pace.bytes_done, pace.seconds_left) == (0, None)


def test_no_time_is_promised_when_nothing_moves_any_more() -> None:
    pace = EtaEstimator(READ, 0.0)
    for second in range(20):
        pace.add(second, [Counts(1, (min(second, 5) * 100 * MIB, 0, 0, 0), (1000 * MIB, 0, 0, 0))])
        assert (pace.seconds_left is None) == (second in (0, *range(11, 20))), second


def test_waiting_for_memory_is_no_work() -> None:
    own = (1000 * MIB, 0, 0, 0)
    pace = EtaEstimator(READ, 0.0)
    for second in range(1, 60):
        pace.add(second, [Counts(1, own_bytes=own, waits=True)])
    pace.add(60, [Counts(1, (100 * MIB, 0, 0, 0), own)])
    assert pace.seconds_left == pytest.approx(9)


def test_the_speed_follows_what_a_run_does() -> None:
    own = (1000 * MIB, 0, 0, 0)
    pace = EtaEstimator(READ, 0.0)
    for tick in range(1, 400):  # fast for the first ten seconds, as into a cache, and then at a tenth of that
        seconds = tick / 4
        pace.add(seconds, [Counts(1, (int(MIB * (10 * min(seconds, 10) + max(0.0, seconds - 10))), 0, 0, 0), own)])
    assert pace.seconds_left == pytest.approx(1000 - 100 - 90, rel=0.15)


def test_all_is_said_to_be_done_only_if_it_is() -> None:
    own = own_by_phase(WRITTEN, 1000 * MIB, 1000 * MIB)
    pace = EtaEstimator(WRITTEN, 0.0)
    pace.add(1.0, [Counts(1, (1000 * MIB, 0, 0, 0), own)])
    assert pace.bytes_done == 1000 * MIB - 1
    pace.add(2.0, [Counts(1, (1000 * MIB, 0, 0, 1000 * MIB), own)])
    assert pace.bytes_done == 1000 * MIB


def test_a_stage_of_unknown_size_has_no_pace() -> None:
    pace = EtaEstimator(Stage("planning"), 0.0)
    pace.add(1.0, [Counts(1)])
    assert (pace.bytes_done, pace.seconds_left) == (0, None)


moments = st.lists(
    st.tuples(st.floats(0, 100), st.lists(st.tuples(*[st.integers(0, 10**9)] * 4), min_size=3, max_size=3)), max_size=20
)


@given(moments)
def test_whatever_is_counted(steps: list[tuple[float, list[BytesByPhase]]]) -> None:
    """What is done never becomes less, nor more than there is, and no time is negative."""
    pace, seconds, before = EtaEstimator(VERIFIED, 0.0), 0.0, 0
    done = [[0, 0, 0, 0] for _ in range(3)]
    for step_seconds, by_process in steps:
        seconds += step_seconds
        done = [[old + new for old, new in zip(was, more)] for was, more in zip(done, by_process)]
        own = own_by_phase(VERIFIED, 333 * MIB, 333 * MIB)
        pace.add(seconds, [Counts(1, (one[0], one[1], one[2], one[3]), own) for one in done])
        assert before <= pace.bytes_done <= 1000 * MIB
        assert pace.seconds_left is None or pace.seconds_left >= 0
        before = pace.bytes_done
