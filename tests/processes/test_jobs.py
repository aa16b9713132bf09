"""How many local processes are started where more are asked for than are of use."""

from __future__ import annotations

import os
import resource

import pytest

from reshard_mpi.runs.workers import processes_by_default, processes_of_use

MANY = 10**11


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 4 cores where as many files may be open as anybody likes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("units", "together", "most", "why"),
    [
        (1, True, 8, "there is 1 target, and no more than 8 can work on one"),
        (3, True, 24, "there are 3 targets, and no more than 8 can work on one"),
        (3, False, 3, "there are 3 targets, and no more than 1 can work on one"),
        (10_000, True, 128, "there are 4 cores, and more than 32 on one are of no use"),
    ],
)
def test_no_more_than_are_of_use(units: int, together: bool, most: int, why: str) -> None:
    for asked in (1, most):
        assert processes_of_use(asked, units, "target", together=together) == (asked, ())
    for asked in (most + 1, MANY):
        note = f"{asked} processes were asked for, {most} started: {why}"
        assert processes_of_use(asked, units, "target", together=together) == (most, (note,))


def test_no_more_than_can_be_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (104, 4096))
    size, (note,) = processes_of_use(MANY, 100, "target", together=True)
    assert size == 20 and note.endswith("no more than 104 files may be open (ulimit -n)")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (30, 4096))
    assert processes_of_use(MANY, 100, "target", together=True)[0] == 1


@pytest.mark.parametrize(("targets", "size"), [(1, 4), (100, 4)])
def test_the_default(targets: int, size: int) -> None:
    assert processes_by_default(targets) == size


def test_the_default_on_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert [processes_by_default(targets) for targets in (1, 8, 20, 100)] == [8, 8, 20, 64]
