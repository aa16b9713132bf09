"""`reshard_mpi.transform`: the command line's options as arguments, and a report of what was done."""

from __future__ import annotations

import inspect

import pytest
from support.conversions import Conversion, assert_right

import reshard_mpi
from reshard_mpi.cli.arguments import commands_of, parser
from reshard_mpi.errors import TargetError, UsageError
from reshard_mpi.options import EXCLUSIVE, OPTIONS
from reshard_mpi.runs.request import Request

# Options that are about a shell alone.
_OF_A_SHELL = {"help", "report", "quiet", "verbose", "progress", "s3_endpoint"}
# Fields of a request for functions whose callers name files.
_OF_FUNCTIONS = {"source_by_rank", "target_file", "files", "norms"}
OF_TRANSFORM = {name: option for name, option in OPTIONS.items() if option.is_of_transform}


def test_it_has_every_option_of_the_command_line() -> None:
    arguments = set(inspect.signature(reshard_mpi.transform).parameters)
    command = commands_of(parser(["transform"]))["transform"]
    assert {action.dest for action in command._actions} - _OF_A_SHELL | {"comm", "progress"} == arguments
    assert OF_TRANSFORM.keys() | {"source", "target", "comm", "progress"} == arguments


def test_an_option_has_one_name_and_one_default() -> None:
    for action in commands_of(parser(["transform"]))["transform"]._actions:
        if action.dest in OPTIONS:
            option = OPTIONS[action.dest]
            assert action.option_strings == [option.flag]
            assert option.flag == ("--from" if option.name == "source_format" else f"--{option.name.replace('_', '-')}")
    arguments = inspect.signature(reshard_mpi.transform).parameters
    defaults = {name: arguments[name].default for name in OF_TRANSFORM}
    # In Python no map is None, and nothing is divided among processes unasked.
    assert defaults == {name: option.default for name, option in OF_TRANSFORM.items()} | {"map": None, "jobs": 1}


def test_the_same_options_exclude_each_other_everywhere() -> None:
    groups = commands_of(parser(["transform"]))["transform"]._mutually_exclusive_groups
    pairs = {tuple(action.dest for action in group._group_actions) for group in groups}
    assert {pair for pair in pairs if OPTIONS.keys() >= {*pair}} == {*EXCLUSIVE}


def test_a_request_has_a_field_for_every_option() -> None:
    fields = Request._fields
    assert OPTIONS.keys() - {"jobs"} | {"source", "target", "keeps_journal", "report", *_OF_FUNCTIONS} == {*fields}


def test_it_transforms_keeps_a_record_and_reports(c: Conversion) -> None:
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
def test_shares_and_processes(c: Conversion) -> None:
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, part=(1, 2))
    assert [target.rank for target in report.targets] == [1]
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, rank=[0], resume=True)
    assert [target.rank for target in report.targets] == [0]
    assert_right(c, (0, 1))
    report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, overwrite=True, jobs=2, verify=True)
    assert report.processes == 2
    assert_right(c, (0, 1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"resume": True, "overwrite": True}, "resume and overwrite exclude each other"),
        ({"rank": [0], "part": (0, 2)}, "rank and part exclude each other"),
        ({"part": (2, 2)}, "part is no share"),
        ({"to": "tar"}, "unknown"),
        ({"jobs": 0}, "jobs is out of range"),
        ({"prefix": 3}, "prefix is of a wrong type"),
        ({"unlisted": "all"}, "unknown value of unlisted"),
    ],
)
def test_wrong_calls(c: Conversion, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, **arguments)  # type: ignore[arg-type]
    assert not c.dst.exists()
