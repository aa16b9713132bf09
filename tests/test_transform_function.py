"""`reshard_mpi.transform`: the command line's options as arguments, and a report of what was done."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from support.conversions import assert_right, make

import reshard_mpi
from reshard_mpi.cli.arguments import parser
from reshard_mpi.errors import TargetError, UsageError

# Options that are about a shell alone, and those whose name is a plural where they are given several times.
_OF_A_SHELL = {"help", "report", "quiet", "verbose", "progress", "source", "target"}
_NAMES = {"rank": "ranks"}


def test_it_has_every_option_of_the_command_line() -> None:
    arguments = set(inspect.signature(reshard_mpi.transform).parameters)
    command = next(action for action in parser()._actions if action.choices and "transform" in action.choices)
    options = {action.dest for action in command.choices["transform"]._actions} - _OF_A_SHELL
    assert {_NAMES.get(option, option) for option in options} | {"source", "target", "comm", "progress"} == arguments


def test_it_transforms_keeps_a_record_and_reports(tmp_path: Path) -> None:
    c = make(tmp_path)
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy)
    assert_right(c, (0, 1))
    assert [target.rank for target in report.targets] == [0, 1] and (c.dst / "reshard.json").exists()
    assert report.written_bytes == sum(target.written_bytes for target in report.targets) > 0
    assert report.seconds > 0 and report.processes == 1 and report.warnings == ()
    with pytest.raises(TargetError):
        reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy)
    again = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, resume=True)
    assert again.written_bytes == 0 and all(target.skipped for target in again.targets)


@pytest.mark.slow
def test_shares_and_processes(tmp_path: Path) -> None:
    c = make(tmp_path)
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, part=(1, 2))
    assert [target.rank for target in report.targets] == [1]
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, ranks=[0], resume=True)
    assert [target.rank for target in report.targets] == [0]
    assert_right(c, (0, 1))
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, overwrite=True, jobs=2, verify=True)
    assert report.processes == 2
    assert_right(c, (0, 1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"resume": True, "overwrite": True}, "resume and overwrite exclude each other"),
        ({"ranks": [0], "part": (0, 2)}, "ranks and part exclude each other"),
        ({"part": (2, 2)}, "part is no share"),
        ({"to": "tar"}, "unknown"),
        ({"jobs": 0}, "jobs is out of range"),
        ({"prefix": 3}, "prefix is of a wrong type"),
        ({"unlisted": "all"}, "unknown value of unlisted"),
    ],
)
def test_wrong_calls(tmp_path: Path, arguments: dict[str, object], says: str) -> None:
    c = make(tmp_path)
    with pytest.raises(UsageError, match=says):
        reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, **arguments)  # type: ignore[arg-type]
    assert not c.dst.exists()
