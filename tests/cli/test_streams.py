"""Commands whose output, or whose report, the system does not take: the exit code says what became of the work."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.conversions import Conversion, assert_right
from support.launch import MPI, by_one_mpi, mpirun_command
from support.processes import Finished, run_command

from reshard_mpi.cli import commands, output
from reshard_mpi.journal.record_files import COMMIT_RECORD

NO_SPACE = "No space left on device"
# Every write to it fails as on a full disk.
FULL = ">/dev/full"


def shell(command: list[str], redirections: str) -> Finished:
    return run_command(["bash", "-c", f"set -o pipefail; {shlex.join(command)} {redirections}"])


def assert_complete(c: Conversion) -> None:
    assert (c.dst / COMMIT_RECORD).exists()
    assert_right(c)


# What only tells of what has been done


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_transform_whose_summary_cannot_be_written(c: Conversion, jobs: str) -> None:
    command = [*COMMAND, *c.arguments("transform", "--progress", "none", "--jobs", jobs)]
    finished = shell(command, FULL)
    assert finished.code == 0, finished
    warning = f"warning: standard output cannot be written ({NO_SPACE}); what is done stands: wrote 2 shards, "
    assert finished.err.startswith(warning) and finished.err.count("\n") == 1, finished
    assert_complete(c)
    assert shell([*command, "--resume"], f"{FULL} 2>&1").code == 0


@pytest.mark.slow
def test_a_commit_and_a_demo_whose_account_cannot_be_written(c: Conversion, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shell([*COMMAND, *c.arguments("transform", "--rank", rank)], "")
    for command, account in (
        (["commit", str(c.dst)], "committed 2 targets"),
        (["demo", str(tmp_path / "demo")], "demo: "),
    ):
        finished = shell([*COMMAND, *command], FULL)
        assert finished.code == 0 and f"what is done stands: {account}" in finished.err, finished
    assert_complete(c)


@by_one_mpi
def test_ranks_whose_summary_cannot_be_written(c: Conversion, mpi: MPI) -> None:
    """Nor is it tried again when the interpreter ends, with an exit code of its own."""
    ranks = shlex.join([*COMMAND, *c.arguments()])
    for stream in ("1", "2"):
        command = mpirun_command(mpi, 2, ["bash", "-c", f"{ranks} --overwrite {stream}>/dev/full"])
        assert run_command(command).code == 0
        assert_complete(c)


# What a command is for


PRODUCTS = (
    *("plan", "plan --json", "plan --sbatch", "verify", "ranks", "governor", "inspect", "inspect --json"),
    *("--help", "transform --help", "--version"),
)


def products(c: Conversion) -> dict[str, list[str]]:
    strategies = ["--src-strategy", str(c.src_strategy), "--dst-strategy", str(c.dst_strategy)]
    return {
        "plan": c.arguments("plan"),
        "plan --json": c.arguments("plan", "--json"),
        "plan --sbatch": c.arguments("plan", "--sbatch"),
        "verify": [
            "verify",
            str(c.src),
            str(c.src),
            *strategies[:2],
            "--dst-strategy",
            strategies[1],
            "--progress",
            "none",
        ],
        "ranks": ["ranks", "0", *strategies],
        "governor": ["governor"],
        "inspect": ["inspect", str(c.src)],
        "inspect --json": ["inspect", "--json", str(c.src)],
        "--help": ["--help"],
        "transform --help": ["transform", "--help"],
        "--version": ["--version"],
    }


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "--help" and "--json" not in name])
def test_output_that_cannot_be_written(c: Conversion, name: str) -> None:
    command = [*COMMAND, *products(c)[name]]
    finished = shell(command, FULL)
    assert finished.code == 3, finished
    assert finished.err.startswith("reshard-mpi: error: the output cannot be written\n  expected: "), finished
    assert f"got: {NO_SPACE}" in finished.err and "where: standard output" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "names"),
    [
        ("| true", ("plan", "inspect --json", "--help", "--version")),
        *((other, ("plan", "--help")) for other in (">&-", "2>/dev/full", "2>&-", ">&- 2>&- <&-")),
    ],
)
def test_output_that_nobody_wants(c: Conversion, redirections: str, names: Sequence[str]) -> None:
    for name in names:
        finished = shell([*COMMAND, *products(c)[name]], redirections)
        assert finished.code == 0 and finished.err == "", finished


def test_wrong_usage_that_cannot_be_told(tmp_path: Path) -> None:
    assert shell([*COMMAND, "transform"], "2>/dev/full").code == 2
    assert shell([*COMMAND, "inspect", str(tmp_path / "absent")], ">/dev/full 2>/dev/full").code == 3


# The report


def failing(monkeypatch: pytest.MonkeyPatch, c: Conversion, what: str) -> Path:
    """Return a path for a report, which goes to a full disk, or whose folder is gone when it is written."""
    path = c.folder / "reports" / "report.json"
    path.parent.mkdir()
    written = output.write_report

    def write(*arguments: object) -> object:
        path.parent.rmdir() if what == "gone" else path.symlink_to("/dev/full")
        return written(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(commands, "write_report", write)
    return path


@pytest.mark.parametrize(("what", "got"), [("gone", "No such file or directory"), ("full", NO_SPACE)])
def test_a_report_that_cannot_be_written(c: Conversion, monkeypatch: pytest.MonkeyPatch, what: str, got: str) -> None:
    path = failing(monkeypatch, c, what)
    finished = c.run("transform", "--report", str(path))
    assert finished.code == 4 and finished.out.startswith("wrote 2 shards, "), finished
    error = finished.err[finished.err.index("reshard-mpi: error: ") :]
    problem = "the report could not be written; all targets of this run are complete"
    assert error.startswith(f"reshard-mpi: error: {problem}\n  expected: "), finished
    assert f"got: {got}" in error and f"where: {path}" in error and "--resume --report" in error
    assert not path.is_symlink()  # nothing that is no report is left
    assert_complete(c)
    monkeypatch.undo()
    path.parent.mkdir(exist_ok=True)
    c.done("transform", "--resume", "--report", str(path))
    assert [target["skipped"] for target in json.loads(path.read_text())["targets"]] == [True, True]


def test_neither_targets_nor_a_report(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is told first of all, and the report is no longer said to be the only thing missing."""
    path = failing(monkeypatch, c, "full")
    monkeypatch.setattr("reshard_mpi.runs.target_writer.Writer.finish", _refuse)
    said = c.refused("transform", "--report", str(path), code=4)
    assert "2 of 2 targets failed" in said
    assert "the report could not be written\n" in said


def _refuse(*_: object) -> None:
    raise OSError(28, NO_SPACE)
