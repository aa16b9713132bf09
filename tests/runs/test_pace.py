"""How long the rest of a stage takes, from counts at moments that are given: no clock, no files.

`paces/` holds what conversions of 4 GiB counted, a moment every quarter of a second: of tensors in 8 shards, in memory
but where a name says otherwise, on a machine that others used as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.runs.monitor import EtaEstimator
from reshard_mpi.runs.progress import CLOSED, MOVED, PHASES, Counts, Progress, ProgressStage
from reshard_mpi.text import MIB

PACES = sorted((Path(__file__).parent / "paces").glob("*.json"))
VERIFIED = ProgressStage("writing and verifying", 1000 * MIB, 4, phases=PHASES)
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


def counted(stage: ProgressStage, done: Sequence[int], own_bytes: int, closed_bytes: int) -> Counts:
    """What a process counts through whose phases so many bytes have gone."""
    progress = Progress()
    progress.begin(stage, own_bytes, closed_bytes)
    for add, count_bytes in zip((progress.moved, progress.synced, progress.read_back, progress.closed), done):
        add(count_bytes)
    return progress.counts()[0]


def recorded(path: Path) -> Iterator[Said]:
    trace = json.loads(path.read_text())
    own = trace["own_kib"]
    size = sum(by_phase[MOVED] for by_phase in own)
    stage = ProgressStage("writing", size, phases=tuple(trace["phases"]))
    pace = EtaEstimator(stage, 0.0)
    end_seconds = trace["moments"][-1][0]
    for seconds, *done in trace["moments"]:
        pace.add(seconds, [counted(stage, by_phase, of[MOVED], of[CLOSED]) for by_phase, of in zip(done, own)])
        yield Said(pace, size, seconds, end_seconds)


@pytest.mark.parametrize("path", PACES, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    said = list(recorded(path))
    assert said[-1].share_done == pytest.approx(1, abs=1e-6)  # bytes of each process are rounded to KiB
    assert all(abs(moment.share_done - moment.share) < 0.15 for moment in said)
    # A file that is synced or closed is counted at the end of it, so the time left may be told too short until then.
    late = [moment for moment in said if moment.share >= 0.5 and moment.left > 0.76]
    assert all(0.4 <= moment.ratio <= 2.2 for moment in late), [(one.share, one.ratio) for one in late]


def test_a_target_is_done_when_its_file_is_closed() -> None:
    """Four targets of four seconds each, of which nothing is counted for one and a half."""
    pace, target_bytes = EtaEstimator(VERIFIED, 0.0), 250 * MIB
    for tick in range(65):
        seconds = tick / 4
        targets, of_target = divmod(seconds, 4.0)
        moved, read_back = min(1.0, of_target / 2.0), min(1.0, max(0.0, of_target - 3.0) / 0.5)
        shares = targets + moved, targets + (of_target >= 3.0), targets + read_back, targets
        done = [int(share * target_bytes) for share in shares]
        pace.add(seconds, [counted(VERIFIED, done, 1000 * MIB, 1000 * MIB)])
        if 4.25 < seconds < 16:
            assert pace.seconds_left == pytest.approx(16 - seconds, rel=0.5, abs=1.5), seconds
            assert pace.bytes_done / VERIFIED.size_bytes == pytest.approx(seconds / 16, abs=0.08)  # type: ignore[operator]
    assert pace.bytes_done == VERIFIED.size_bytes and pace.seconds_left == 0


def read(done_mib: float, own_mib: float) -> Counts:
    """What a process counts that only reads."""
    return counted(READ, [int(done_mib * MIB)], int(own_mib * MIB), 0)


def test_the_process_with_the_most_work_left_is_the_last() -> None:
    pace = EtaEstimator(READ, 0.0)
    for tick in range(1, 20):
        seconds = tick / 4
        counts = [read(min(seconds, length) * 100, length * 100) for length in (8.0, 1.0, 1.0)]
        pace.add(seconds, counts)
        if seconds > 1:
            assert pace.seconds_left == pytest.approx(8 - seconds, rel=0.1)


def test_no_time_is_promised_before_anything_is_done() -> None:
    pace = EtaEstimator(WRITTEN, 0.0)
    for seconds in (0.2, 1.0, 2.0):
        pace.add(seconds, [counted(WRITTEN, [], 1000 * MIB, 1000 * MIB)])
        assert (pace.bytes_done, pace.seconds_left) == (0, None)


def test_no_time_is_promised_when_nothing_moves_any_more() -> None:
    pace = EtaEstimator(READ, 0.0)
    for second in range(20):
        pace.add(second, [read(min(second, 5) * 100, 1000)])
        assert (pace.seconds_left is None) == (second in (0, *range(10, 20))), second


def test_waiting_for_memory_is_no_work() -> None:
    pace = EtaEstimator(READ, 0.0)
    for second in range(1, 60):
        pace.add(second, [read(0, 1000)._replace(waits=1)])
    pace.add(60, [read(100, 1000)])
    assert pace.seconds_left == pytest.approx(9)


def test_the_speed_follows_what_a_run_does() -> None:
    pace = EtaEstimator(READ, 0.0)
    for tick in range(1, 400):  # fast for the first ten seconds, as into a cache, and then at a tenth of that
        seconds = tick / 4
        pace.add(seconds, [read(10 * min(seconds, 10) + max(0.0, seconds - 10), 1000)])
    assert pace.seconds_left == pytest.approx(1000 - 100 - 90, rel=0.15)


def test_all_is_said_to_be_done_only_if_it_is() -> None:
    size = 1000 * MIB
    pace = EtaEstimator(WRITTEN, 0.0)
    pace.add(1.0, [counted(WRITTEN, [size], size, size)])
    assert pace.bytes_done < size
    pace.add(2.0, [counted(WRITTEN, [size, 0, 0, size - 1], size, size)])
    assert pace.bytes_done == size - 1
    pace.add(3.0, [counted(WRITTEN, [size, 0, 0, size], size, size)])
    assert pace.bytes_done == size


def test_a_stage_of_unknown_size_has_no_pace() -> None:
    pace = EtaEstimator(ProgressStage("planning"), 0.0)
    pace.add(1.0, [Counts(1)])
    assert (pace.bytes_done, pace.seconds_left) == (0, None)


moments = st.lists(
    st.tuples(st.floats(0, 100), st.lists(st.tuples(*[st.integers(0, 10**9)] * 4), min_size=3, max_size=3)), max_size=20
)


@given(moments)
def test_whatever_is_counted(steps: list[tuple[float, list[tuple[int, int, int, int]]]]) -> None:
    """What is done never becomes less, nor more than there is, and no time is negative."""
    pace, seconds, before = EtaEstimator(VERIFIED, 0.0), 0.0, 0
    done = [[0, 0, 0, 0] for _ in range(3)]
    for step_seconds, by_process in steps:
        seconds += step_seconds
        done = [[old + new for old, new in zip(was, more)] for was, more in zip(done, by_process)]
        pace.add(seconds, [counted(VERIFIED, one, 333 * MIB, 333 * MIB) for one in done])
        assert before <= pace.bytes_done <= 1000 * MIB
        assert pace.seconds_left is None or pace.seconds_left >= 0
        before = pace.bytes_done
