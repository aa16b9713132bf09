"""What a user sees of a run while it goes on: a bar on a terminal, lines elsewhere, one for the whole run."""

from __future__ import annotations

import io
import itertools
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.command_line import COMMAND, done, refused, run_apart, run_here
from support.conversions import Conversion, make, write_conversion
from support.examples import few_cases, one_at_a_time
from support.harm import fault
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout
from support.terminals import run_on_terminal

from reshard_mpi.cli import output
from reshard_mpi.engine import first_difference
from reshard_mpi.runs import diff, monitor
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.progress import Counts, Display, ProgressStage, RunStatus, format_seconds

ESCAPE = "\x1b"
TENSORS = {f"layer{number}.w": np.full((8, 4), number, np.float32) for number in range(8)}
SIZE = "1.00 KiB"
# A line of a run that is at work.
AT_WORK = re.compile(rf"writing \S+ K?i?B of {SIZE}, (\d+) %(, \S+ K?i?B/s, [\d.]+ s left)?, \d of 2 targets")
LAST = re.compile(rf"writing {SIZE} of {SIZE}, 100 %, in \S+ s, 2 of 2 targets")


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    """A conversion of two targets, 1 KiB together."""
    sides = (Side(ranks, 1, dict.fromkeys(TENSORS, RawLayout((ranks,), (0, -1)))) for ranks in (4, 2))
    return write_conversion(tmp_path, "ckpt", *sides, TENSORS)


def slowed(c: Conversion) -> dict[str, str]:
    """Return the environment in which each of the 32 pieces takes a tenth of a second."""
    return fault(c, c.folder / "counter", "import time; time.sleep(0.1)", on="copy_file_range", path="dst/")


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "jobs"), one_at_a_time([0, 30, 60, 100], ["1", "2"]))
def test_a_bar_on_a_terminal(c: Conversion, columns: int, jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)  # a continuous integration may well have it
    command = [*COMMAND, *c.arguments("transform", "--jobs", jobs)]
    code, shown = run_on_terminal(command, slowed(c), columns=columns)
    *bar, closing, end = re.split("[\r\n]", shown)
    assert code == 0 and closing.startswith("wrote 2 shards, ") and end == "", shown
    assert any(line.startswith("source: ") for line in bar)
    frames = [re.sub(rf"{ESCAPE}\[\d*m", "", frame).rstrip() for frame in bar]
    drawn = [
        match for frame in frames if (match := re.fullmatch(r" *(\d+) %(|, .* left|, in .*) +\|.*\| ?(.*)", frame))
    ]
    percents = [int(match[1]) for match in drawn]
    assert percents == sorted(percents) and percents[-1] == 100 and any(0 < percent < 100 for percent in percents)
    # What matters most stands first, and is there on the narrowest terminal; the rest as far as there is room for it.
    rest = {30: "", 60: rf"writing \S+ B of {SIZE}"}.get(
        columns, rf"writing \S+ B of {SIZE}, \d of 2 targets(, \S+ K?i?B/s)?"
    )
    assert any(re.fullmatch(r", [\d.]+ s left", match[2]) and re.fullmatch(rest, match[3]) for match in drawn), frames
    assert all(len(match[0]) < (columns or 80) for match in drawn)
    assert f"{ESCAPE}[32m" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour(c: Conversion, variable: str, value: str) -> None:
    code, shown = run_on_terminal([*COMMAND, *c.arguments()], {**slowed(c), variable: value})
    assert code == 0 and ESCAPE not in shown and ("\r" in shown) == (variable == "NO_COLOR"), shown


def assert_lines(err: str) -> None:
    """Check what a log has of a slowed run."""
    assert err.count("source: ") == 1 and not {"\r", ESCAPE} & set(err), err
    *lines, last = (line for line in err.splitlines() if not line.startswith(("source: ", "planning")))
    at_work = [AT_WORK.fullmatch(line) for line in lines]
    assert at_work and all(at_work) and LAST.fullmatch(last), err
    percents = [int(match[1]) for match in at_work if match]
    assert percents == sorted(percents) and percents[0] < 100, err


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_lines_in_a_log(c: Conversion, jobs: str) -> None:
    finished = run_apart(*c.arguments("transform", "--jobs", jobs), env=slowed(c), check=True)
    assert_lines(finished.err)


def test_lines_of_all_ranks_by_one_of_them(c: Conversion, mpi: MPI) -> None:
    finished = run_apart(*c.arguments(), mpi=mpi, ranks=2, env=slowed(c), check=True)
    assert_lines(finished.err)


@by_one_mpi
def test_details_of_every_rank(c: Conversion, mpi: MPI) -> None:
    finished = run_apart(*c.arguments("transform", "-v"), mpi=mpi, ranks=2, check=True)
    targets = [line.partition(":")[0] for line in finished.err.splitlines() if line.startswith("target ")]
    assert sorted(targets) == ["target 0", "target 1"], finished


def test_quiet(c: Conversion) -> None:
    for command, options in (("transform", c.arguments()[1:]), *((each, compared(c)) for each in ("verify", "diff"))):
        finished = done(command, *options, "--quiet", "--jobs", "1")
        assert (finished.out, finished.err) == ("", ""), finished


@by_one_mpi
def test_quiet_ranks(c: Conversion, mpi: MPI) -> None:
    for arguments in (c.arguments("transform", "-q"), ["verify", *compared(c), "-q"]):
        finished = run_apart(*arguments, mpi=mpi)
        assert (finished.code, finished.out, finished.err) == (0, "", ""), finished


def compared(c: Conversion) -> list[str]:
    """Return what is given to a command that compares targets with their source."""
    return [str(c.src), str(c.dst), *c.arguments()[3:7]]


def test_errors_are_told_to_the_quiet_too(tmp_path: Path) -> None:
    c = make(tmp_path)
    done(*c.arguments("transform", "-q"))
    c.written(0).write_bytes(b"")
    finished = run_here("verify", c.src, c.dst, *c.arguments()[3:7], "-q", "--jobs", "1")
    assert finished.code in (3, 4) and re.match("(damage|reshard-mpi: error): ", finished.err), finished
    assert refused(*c.arguments("transform", "-q")).startswith("reshard-mpi: error: ")


def test_warnings_are_told_to_the_quiet_too(tmp_path: Path) -> None:
    """A job's log has what somebody should know of a run that went through; notes and progress it has not."""
    c = make(tmp_path)
    c.remove(0)
    warning, compared = "warning: 3 of 4 ranks are there: no shard of rank 0 in ", [str(c.src), str(c.dst)]
    for command in (
        c.arguments("plan"),
        c.arguments("transform"),
        ["verify", *compared, *c.arguments()[3:7], "--jobs", "1"],
        ["diff", *compared, *c.arguments()[3:7], "--jobs", "1"],
    ):
        finished = done(*command, "-q")
        assert "warning: " in finished.err, finished
        assert all(line.startswith("warning: ") for line in finished.err.splitlines()), finished
        assert (finished.out == "") == (command[0] != "plan"), finished
        assert warning in finished.err or command[0] in ("verify", "diff"), finished


def test_quiet_and_verbose_exclude_each_other(tmp_path: Path) -> None:
    assert "not allowed with" in refused(*make(tmp_path).arguments("transform", "-q", "-v"), code=2)


def test_what_a_run_says_at_its_end(tmp_path: Path) -> None:
    c = make(tmp_path)
    finished = done(*c.arguments("transform", "--verify"))
    assert finished.out.startswith("wrote and verified 2 shards, "), finished
    assert finished.out.endswith("/s)\n")


@few_cases(
    2,
    ("to", "says"),
    [
        ("torch", ": {}/rank_0/checkpoint_0.pt\n"),
        ("ckpt", ": {}/rank_0/checkpoint_0.ckpt\n"),
        ("hf", ": {}/model.safetensors\n"),
        ("dcp", "/s)\n"),
    ],
)
def test_the_end_of_a_run_says_where_one_file_is(tmp_path: Path, to: str, says: str) -> None:
    """The target is a folder whatever it is called; of DCP the folder is the checkpoint."""
    c = make(tmp_path)
    target = f"{tmp_path}/model.pt"
    arguments = [f"{c.src}", target, "--src-strategy", f"{c.src_strategy}", "--to", to]
    assert done("transform", *arguments).out.endswith(says.format(target))
    assert done("transform", *arguments, "--resume").out.endswith(says.format(target).replace("/s)", "already"))


# Stages that are over in no time are made to last.


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a line printed at every look, look all the time, and count the looks."""
    monkeypatch.setattr(output, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(output, "Lines", CountedLines)
    monkeypatch.setattr(CountedLines, "looks", 0)


class CountedLines(output.Lines):
    """Counts how often how far a run is has been shown."""

    looks = 0

    def update(self, status: RunStatus) -> None:
        super().update(status)
        CountedLines.looks += 1


def slow_down(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Have a function begin when the display has been updated twice more, so that what it does is shown."""
    function, update, updates = getattr(module, name), output.Lines.update, itertools.count()
    last = 0

    def counted(lines: output.Lines, status: RunStatus) -> None:
        nonlocal last
        update(lines, status)
        last = next(updates)

    def slow(*arguments: Any, **options: Any) -> Any:
        before, hanging = last, time.monotonic() + 60
        while last < before + 2 and time.monotonic() < hanging:
            time.sleep(0.005)
        return function(*arguments, **options)

    monkeypatch.setattr(output.Lines, "update", counted)
    monkeypatch.setattr(module, name, slow)


@pytest.mark.usefixtures("at_once")
def test_copies_that_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, first_difference, "first_difference")
    finished = done(*make(tmp_path).arguments("transform", "--replicas", "check"))
    assert re.search(r"^comparing copies .* of 768 B, [1-9]\d? %", finished.err, re.M), finished


@pytest.mark.usefixtures("at_once")
def test_shards_that_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard_mpi.runs import verify_command

    c = make(tmp_path)
    c.done()
    slow_down(monkeypatch, verify_command, "_require_same_tensors")
    pair = ["verify", str(c.src), str(c.dst), *c.arguments()[3:7], "--jobs", "1"]
    finished = run_here(*pair, "-v")
    assert re.search(r"^verifying (.*) of \1, 100 %, in \S+ s, 2 of 2 shards$", finished.err, re.M), finished
    assert re.search(r"^verifying .*, 1 of 2 shards$", finished.err, re.M), finished
    assert "shard of rank 0: 4 tensors sound by the source\n" in finished.err


@pytest.mark.usefixtures("at_once")
def test_tensors_that_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, diff, "first_difference_of_tensors")
    c = make(tmp_path)
    finished = done("diff", c.src, c.src, *c.arguments()[3:5], *both(c), "--jobs", "1")
    assert re.search(r"^comparing .* of 324 B, .*, 3 of 4 tensors$", finished.err, re.M), finished


def test_each_tensor_that_is_the_same(tmp_path: Path) -> None:
    c = make(tmp_path)
    finished = done("diff", c.src, c.src, *c.arguments()[3:5], *both(c), "--jobs", "1", "-v")
    assert "'w' is the same: float32 of shape [8, 4], 128 B\n" in finished.err, finished
    assert len(re.findall("is the same", finished.err)) == 4


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("option", [[], ["--plot", "plan.svg"]], ids=["plan", "plot"])
def test_ranks_that_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Planner.plan
    slow_down(monkeypatch, Planner, "plan")
    finished = make(tmp_path / "c").done("plan", *option)
    assert re.search(r"^planning: rank 1 of 2, \S+ s so far$", finished.err, re.M), finished
    assert "planning" not in finished.out
    monkeypatch.setattr(Planner, "plan", plan)  # it would wait for a display
    assert make(tmp_path / "q").done("plan", *option, "-q").err == ""


@pytest.mark.slow
def test_a_plan_on_a_terminal_leaves_the_plan_alone(tmp_path: Path) -> None:
    c = make(tmp_path)
    slow = "import time; time.sleep(0.25)"  # for each of some twenty
    code, shown = run_on_terminal(
        [*COMMAND, *c.arguments("plan")], fault(c, c.folder / "n", slow, on="open", path="src/")
    )
    assert code == 0 and "planning" in shown, shown
    assert "planning" not in re.split("[\r\n]+", shown.rstrip())[-1]


def both(c: Conversion) -> list[str]:
    return ["--dst-strategy", str(c.src_strategy)]


def test_a_run_that_is_over_at_once_has_no_lines() -> None:
    status = RunStatus.of(ProgressStage("writing", 10, 1), [Counts(1, units=1)], 0.1, 10, None)
    lines = output.Lines(io.StringIO())
    lines.update(status)
    lines.close(status)
    assert lines._stream.getvalue() == ""  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("columns", [1, 20, 30, 60, 80, 200])
@pytest.mark.parametrize("waiting", [0, 1, 300])
def test_a_bar_of_any_width_has_percent_and_time_left_first(
    monkeypatch: pytest.MonkeyPatch, columns: int, waiting: int
) -> None:
    monkeypatch.setattr(output, "_columns", lambda _: columns)
    stream = Terminal()
    bar = output.Bar(stream, with_colour=False)
    total = 123 << 30
    for done_bytes, left in ((1 << 20, 7384.0), (50 << 30, 61.0), (122 << 30, 5.0)):
        counts = [Counts(1, done_bytes, total, 3)]
        status = RunStatus.of(ProgressStage("comparing copies", total, 128, ready=5), counts, 9.0, done_bytes, left)
        bar.update(status._replace(waiting=waiting))
        frame = stream.getvalue().rpartition("\r")[2]
        first = f"{done_bytes * 100 // total:3} %, {format_seconds(left)} left"
        assert frame.startswith(first[:columns]) and len(frame) <= columns
        if columns == 200:
            assert "comparing copies" in frame and "3 of 128 targets (5 complete before)" in frame and "/s" in frame
            assert ("wait" in frame) == (waiting > 0)
    bar.update(status._replace(bytes_total=None, waiting=waiting))
    assert len(stream.getvalue().rpartition("\r")[2]) <= columns
    bar.abandon(ends_line=False)


# Streams and variables


@pytest.mark.parametrize(
    ("stream", "environment", "draws", "colours"),
    [
        (Terminal(), {}, True, True),
        (Terminal(), {"NO_COLOR": ""}, True, True),  # as no-color.org has it
        (Terminal(), {"NO_COLOR": "1"}, True, False),
        (Terminal(), {"TERM": "dumb"}, False, False),
        (io.StringIO(), {}, False, False),
    ],
)
def test_which_streams_get_what(
    stream: io.StringIO, environment: Mapping[str, str], draws: bool, colours: bool
) -> None:
    assert output.may_draw(stream, environment) is draws and output.has_colour(stream, environment) is colours


def test_a_signal_while_the_thread_that_shows_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the command as it does at any other moment: what is closed then does not wait for that thread."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    shown = monitor.Monitor(Display(), list)
    with pytest.raises(KeyboardInterrupt):
        shown.begin(ProgressStage("writing"))
    shown.abandon(ends_line=False)


def test_a_host_without_room_for_a_thread_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    shown, ended = monitor.Monitor(Display(), list), list[object]()
    monkeypatch.setattr(Display, "close", lambda _, status: ended.append(status))
    shown.begin(ProgressStage("writing"))
    shown.say("a notice")
    shown.end()
    assert len(ended) == 1
