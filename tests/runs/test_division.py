"""Who makes which target: every byte of every target by exactly one process, evenly, and alike everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.runs.scheduling import CUT_BYTES, Assignment, TargetSlice, assign, divide

WEIGHTS = st.dictionaries(st.integers(0, 99), st.integers(0, 50), max_size=20)
HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(1, 6))
def test_every_target_is_assigned_once_and_the_load_is_spread(load: dict[int, int], processes: int) -> None:
    shares = list(assign(load, range(processes)).values())
    assert len(shares) == processes
    assert sorted(target for share in shares for target in share) == sorted(load)
    assert shares == list(assign(dict(reversed(load.items())), range(processes)).values())
    loads = sorted(sum(load[target] for target in share) for share in shares)
    assert loads[-1] - loads[0] <= max(load.values(), default=0)
    for share in shares:
        assert [load[target] for target in share] == sorted((load[target] for target in share), reverse=True)
    if len(set(load.values())) <= 1:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def slices_of(works: list[Assignment], target: int) -> Iterator[tuple[int, TargetSlice]]:
    for process, work in enumerate(works):
        yield from ((process, each) for each in work.slices if each.target == target)


@given(WEIGHTS, HOSTS, st.integers(0, 40 * CUT_BYTES))
def test_every_byte_of_every_target_is_filled_once(weights: dict[int, int], hosts: list[int], size_bytes: int) -> None:
    works = divide(weights, hosts)
    assert len(works) == len(hosts)
    for target in weights:
        alone = [process for process, work in enumerate(works) if target in work.whole]
        together = list(slices_of(works, target))
        assert len(alone) == (0 if together else 1)
        assert sum(target in work.leads for work in works) == 1
        if together:
            assert len({hosts[process] for process, _ in together}) == 1
            ranges = [each.range_of(size_bytes) for _, each in together]
            assert (ranges[0][0], ranges[-1][1]) == (0, size_bytes)
            assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
            assert all(at % CUT_BYTES == 0 or at == size_bytes for pair in ranges for at in pair)
    assert {target for work in works for target in (*work.leads, *work.assists)} == set(weights)


@given(WEIGHTS, HOSTS)
def test_all_processes_compute_the_same(weights: dict[int, int], hosts: list[int]) -> None:
    assert divide(weights, hosts) == divide(dict(reversed(weights.items())), [f"node{host}" for host in hosts])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_equal_targets_take_all_processes_of_a_host_equally_long(targets: int, processes: int, weight: int) -> None:
    works = divide(dict.fromkeys(range(targets), weight), [0] * processes)
    loads = [len(work.whole) + sum((each.stop - each.start) / each.whole for each in work.slices) for work in works]
    assert max(loads) - min(loads) < 0.01 + 1 / processes / weight
    assert sum(len(work.whole) for work in works) == targets - targets % processes


@given(WEIGHTS, st.integers(1, 8))
def test_what_is_shared_goes_to_those_with_the_least_to_do(weights: dict[int, int], processes: int) -> None:
    works = divide(weights, [0] * processes)
    alone = [sum(max(1, weights[target]) for target in work.whole) for work in works]
    shared = [
        sum(max(1, weights[each.target]) * (each.stop - each.start) / each.whole for each in work.slices)
        for work in works
    ]
    level = max((load + part for load, part in zip(alone, shared) if part), default=0)
    assert all(load + part > level - 1.01 for load, part in zip(alone, shared) if level)


def test_targets_are_spread_over_hosts_before_they_fill_one() -> None:
    works = divide({0: 1, 1: 1}, ["a", "a", "b", "b"])
    assert [[each.target for each in work.slices] for work in works] == [[0], [0], [1], [1]]


def test_as_many_targets_as_processes_are_one_each() -> None:
    works = divide(dict.fromkeys(range(4), 7), ["a", "a", "b", "b"])
    assert sorted(work.whole for work in works) == [(0,), (1,), (2,), (3,)]


def test_without_targets_there_is_nothing_to_do() -> None:
    assert divide({}, [0, 0]) == [Assignment(), Assignment()]


def test_a_small_file_is_not_cut() -> None:
    halves = [TargetSlice(0, 0, 1, 2), TargetSlice(0, 1, 2, 2)]
    assert [each.range_of(CUT_BYTES) for each in halves] == [(0, 0), (0, CUT_BYTES)]
    assert [each.range_of(0) for each in halves] == [(0, 0), (0, 0)]
