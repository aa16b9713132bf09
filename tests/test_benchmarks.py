"""Benchmarks at toy size: they measure what they say, and every row is there. How fast anything is, is not judged."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import object_servers
from support.processes import clean_environment, run_command

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks are part of the checkout, not of what is installed

from benchmarks import checkpoint, deepspeed, megatron, network, quantized, xfs
from benchmarks.__main__ import main
from benchmarks.interleave import Comparison, interleave
from benchmarks.interpreters import lacks
from benchmarks.measure import CommandFailedError, Run, measure
from benchmarks.peers.cp import Cp
from benchmarks.peers.ours import Transform, engine_seconds, with_report
from benchmarks.peers.torch_dcp import side_of
from benchmarks.plot import draw
from benchmarks.results import Curve, Results, size_text
from benchmarks.rows import Clock, Question, Row, alone, answer, largest_process
from benchmarks.spread import Spread, ratios
from benchmarks.targets import MIB, TARGETS, Figure
from benchmarks.workplace import NoRoomError, workplace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# The smallest interpreter there is, so that little stands beside what a test makes it do.
PYTHON = (sys.executable, "-I", "-S", "-c")

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def bare_interpreter(tmp_path: Path) -> Path:
    """An interpreter, as far as benchmarks ask it, for which nothing is installed."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho '{}'\n")
    script.chmod(0o755)
    return script


class TestCommands:
    """`python -m benchmarks`, each benchmark once; all but one in this process, without warming up, of few tensors."""

    @pytest.fixture(autouse=True)
    def _cold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.interleave.WARM_UPS", 0)
        monkeypatch.setattr("benchmarks.tensors._PIECES", 100)
        monkeypatch.setattr("benchmarks.audit._EXPERTS", 100)
        monkeypatch.setattr("benchmarks.maps._EXPERTS_OF_LARGEST", 8)
        # What several are compared with is run once.
        run, runs = Transform.run, dict[int, tuple[Transform, Run]]()

        def run_once(side: Transform) -> Run:
            if id(side) not in runs:
                runs[id(side)] = side, run(side)
            return runs[id(side)][1]

        monkeypatch.setattr(Transform, "run", run_once)

    def test_conversion(self, tmp_path: Path, bare_interpreter: Path) -> None:
        peers = ["--mindspore", bare_interpreter, "--torch", bare_interpreter]
        rows = run_benchmark(tmp_path, "conversion", "--megabytes", "1", "--pairs", "1", *peers)
        assert set(rows) == {
            key for key in TARGETS if key.startswith(("cp.", "mindspore.", "torch.", "sharing", "conv"))
        }
        for key, row in rows.items():
            if key.startswith(("mindspore.", "torch.")):
                package = key.partition(".")[0]
                assert row["skipped"] == f"{package} is not installed (--{package} names an interpreter that has it)"
            elif key == "sharing":
                assert row["skipped"] is None or row["skipped"].startswith(("only root", "mkfs.xfs", "mount"))
            else:
                assert row["skipped"] is None
            if key.startswith(("cp.", "sharing")) and row["skipped"] is None:
                assert row["ours"]["written_bytes"]["median"] >= 0.99e6
                assert row["ours"]["read_bytes"]["median"] >= 0.99e6
                assert row["peer"]["written_bytes"]["median"] >= row["ours"]["written_bytes"]["median"]

    def test_planning(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "planning", "--pairs", "1")
        assert set(rows) == keys("ranks.", "plan.")
        assert all(row["skipped"] is None for row in rows.values())

    def test_startup(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        work.mkdir()
        command = [sys.executable, "-m", "benchmarks", "startup", "--pairs", "1", "--json", "--folder", work]
        printed = run_command(command, cwd=ROOT, check=True).out
        assert not list(work.iterdir())
        rows = check_rows(json.loads(printed))
        assert set(rows) == keys("startup.")
        assert all(row["skipped"] is None for row in rows.values())

    @pytest.mark.stores
    def test_objects(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if object_servers.missing_for_seaweedfs():
            pytest.skip("SeaweedFS is not installed")
        monkeypatch.setattr("benchmarks.objects._LONG_MIB", (6,))
        for formats in ("_FORMATS", "_COPIED_FORMATS"):  # each of them is measured by the same lines
            monkeypatch.setattr(f"benchmarks.objects.{formats}", ("hdf5",))
        told = tmp_path / "told.json"
        options = ["--megabytes", "4", "--pairs", "1", "--kills", "1", "--json", str(told)]
        monkeypatch.setattr(sys, "argv", ["benchmarks", "objects", *options])
        with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(io.StringIO()):
            main()
        assert end.value.code == 0
        rows = {row["key"]: row for row in json.loads(told.read_text())["rows"]}
        kinds = {key.split(".")[1] for key in rows}
        assert kinds == {"sent", "verify", "open", "quarters", "cpu", "memory", "kills"}
        assert rows["objects.verify.recorded"]["figure"] < rows["objects.verify.read"]["figure"]
        assert all(row["figure"] > 0 for row in rows.values())
        assert rows["objects.kills"]["reached"]

    def test_tensors(self, tmp_path: Path, bare_interpreter: Path) -> None:
        """Beside peers that are not there: their rows say so, the others have figures."""
        options = ("--tensors", "40", "--many", "80", "--pairs", "1")
        peers = ("--safetensors", bare_interpreter, "--torch", bare_interpreter)
        rows = run_benchmark(tmp_path, "tensors", *options, *peers)
        assert set(rows) == keys("tensors.")
        assert {key for key, row in rows.items() if row["skipped"]} == {"tensors.ckpt", "tensors.torch"}

    def test_forms(self, tmp_path: Path, bare_interpreter: Path) -> None:
        sizes = ["--megabytes", "1", "--large-megabytes", "1", "--pairs", "1"]
        peers = ["--mindspore", bare_interpreter, "--torch", bare_interpreter]
        rows = run_benchmark(tmp_path, "forms", *sizes, *peers)
        assert set(rows) == keys("forms.")
        with_figures = {key for key, row in rows.items() if row["skipped"] is None}
        assert with_figures == {"forms.memory", *(key for key in rows if key.startswith("forms.cp."))}

    @pytest.mark.torch
    @pytest.mark.mindspore
    def test_forms_beside_the_peers(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "forms", "--megabytes", "1", "--large-megabytes", "1", "--pairs", "1")
        assert {key: row["skipped"] for key, row in rows.items() if row["skipped"]} == {}

    def test_deepspeed(self, tmp_path: Path, bare_interpreter: Path) -> None:
        """Where DeepSpeed is not, nothing can be read either: its own classes are in its files."""
        rows = {row.key: row for row in deepspeed.measure(1, 1, tmp_path, str(bare_interpreter)).rows}
        assert set(rows) == keys("deepspeed.")
        lacking = "deepspeed is not installed (--deepspeed names an interpreter that has it)"
        assert {row.skipped for key, row in rows.items() if key != "deepspeed.memory"} == {lacking}
        assert rows["deepspeed.memory"].skipped is not None

    @pytest.mark.deepspeed
    def test_deepspeed_beside_its_scripts(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "deepspeed", "--megabytes", "1", "--pairs", "1")
        assert {key: row["skipped"] for key, row in rows.items() if row["skipped"]} == {}

    def test_megatron(self, tmp_path: Path, bare_interpreter: Path) -> None:
        """Where torch is not, nothing is written that could be read."""
        rows = {row.key: row for row in megatron.measure(1, 100, 1, tmp_path, str(bare_interpreter)).rows}
        assert set(rows) == keys("megatron.")
        assert all(row.skipped is not None for row in rows.values())

    @pytest.mark.torch
    def test_megatron_beside_torch(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "megatron", "--megabytes", "10", "--items", "1000", "--pairs", "1")
        assert {key: row["skipped"] for key, row in rows.items() if row["skipped"]} == {}

    def test_quantized(self, tmp_path: Path, bare_interpreter: Path) -> None:
        """Where torch is not, nothing is written that could be read."""
        rows = {row.key: row for row in quantized.measure(1, 1, tmp_path, str(bare_interpreter)).rows}
        assert set(rows) == keys("quantized.")
        assert all(row.skipped is not None for row in rows.values())

    @pytest.mark.torch
    def test_quantized_beside_torch(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "quantized", "--megabytes", "1", "--pairs", "1")
        assert {key: row["skipped"] for key, row in rows.items() if row["skipped"]} == {}

    def test_maps(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "maps", "--megabytes", "1", "--pairs", "1")
        assert set(rows) == keys("maps.")
        assert all(row["skipped"] is None for row in rows.values())

    def test_scaling(self, tmp_path: Path) -> None:
        sizes = ["--megabytes", "1", "--processes", "1", "2"]
        rows = run_benchmark(tmp_path, "scaling", "--pairs", "1", *sizes)
        assert set(rows) == keys("scaling.")
        assert all(row["skipped"] is None for row in rows.values())

    def test_verification(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "verification", "--megabytes", "1", "--pairs", "1")
        assert set(rows) == keys("verify.")
        assert all(row["skipped"] is None for row in rows.values())

    def test_audit(self, tmp_path: Path) -> None:
        rows = run_benchmark(tmp_path, "audit", "--megabytes", "1", "--pairs", "1")
        assert set(rows) == keys("audit.")
        assert all(row["skipped"] is None for row in rows.values())

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupted_benchmark_leaves_nothing(self, tmp_path: Path, number: int, code: int) -> None:
        command = [sys.executable, "-m", "benchmarks", "startup", "--pairs", "1000", "--folder", str(tmp_path)]
        started = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert started.stderr is not None
        assert "warm-up" in started.stderr.readline()
        assert list(tmp_path.iterdir())
        started.send_signal(number)
        _, errors = started.communicate(timeout=300)
        assert started.returncode == code
        assert "Traceback" not in errors
        assert not list(tmp_path.iterdir())


def keys(*beginnings: str) -> set[str]:
    """Return the rows that a benchmark must have."""
    return {key for key in TARGETS if key.startswith(beginnings)}


def run_benchmark(folder: Path, *arguments: str | os.PathLike[str]) -> Rows:
    """Run a benchmark that works in an empty folder, which must be empty again.

    Return its rows by key, from a JSON file beside which the table is printed.
    """
    work, file = folder / "work", folder / "result.json"
    work.mkdir()
    command = ["benchmarks", *map(str, arguments), "--json", str(file), "--folder", str(work)]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", command)
        patch.setattr(signal, "signal", lambda *_: None)  # this process is not the benchmark's to end
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    assert not list(work.iterdir())
    assert str(work) not in Path("/proc/mounts").read_text()
    assert "| what " in printed.getvalue() and "\n| ---" in printed.getvalue()
    return check_rows(json.loads(file.read_text()))


def check_rows(result: dict[str, Any]) -> Rows:
    """Return the rows of a result by key, after checking that their figures belong together."""
    assert result["machine"]["Python"]
    for row in result["rows"]:
        assert (row["skipped"] is None) == (row["figure"] is not None)
        for figure in (row["figure"], row["ratio"]):
            assert figure is None or 0 < figure["min"] <= figure["median"] <= figure["max"]
        if row["figure"] is not None and row["peer"] is not None:
            check_ratio(row)
    return {row["key"]: row for row in result["rows"]}


def check_ratio(row: dict[str, Any]) -> None:
    """Check that a ratio is the quotient of the two sides, one pair each."""
    kind = TARGETS[row["key"]].figure
    measured = "peak_bytes" if kind is Figure.SMALLER else "seconds"
    quotient = row["ours"][measured]["median"] / row["peer"][measured]["median"]
    expected = 1 / quotient if kind in (Figure.FASTER, Figure.SMALLER) else quotient
    assert row["ratio"]["median"] == pytest.approx(expected)


class TestMeasuring:
    """Commands whose needs are known."""

    def test_memory_of_the_largest_process(self) -> None:
        small, large = measure([[*PYTHON, "pass"]]), measure([[*PYTHON, "b'x' * (64 << 20)"], [*PYTHON, "pass"]])
        assert 1 * MIB < small.run.peak_bytes < 32 * MIB
        assert 60 * MIB < large.run.peak_bytes - small.run.peak_bytes < 68 * MIB

    def test_memory_of_a_grandchild(self) -> None:
        large = [*PYTHON, "b'x' * (64 << 20)"]
        inner = f"import subprocess; subprocess.run({large!r})"
        assert measure([[*PYTHON, inner]]).run.peak_bytes > 64 * MIB

    def test_bytes_read_and_written_by_all(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(bytes(5_000_000))
        copy = "import sys; open(sys.argv[2], 'wb').write(open(sys.argv[1], 'rb').read())"
        commands = [[*PYTHON, copy, str(tmp_path / "source"), str(tmp_path / f"copy_{number}")] for number in range(2)]
        run = measure(commands).run
        assert 10_000_000 <= run.read_bytes < 12_000_000
        assert 10_000_000 <= run.written_bytes < 10_100_000

    def test_commands_run_side_by_side(self, tmp_path: Path) -> None:
        """Each waits for the other."""
        meet = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
        meet += "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"
        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        assert measure([[*PYTHON, meet, first, second], [*PYTHON, meet, second, first]]).run.seconds > 0

    def test_a_failure_is_told_in_the_words_of_the_command(self) -> None:
        fail = [*PYTHON, "import sys; print('first'); sys.exit('no such luck')"]
        with pytest.raises(CommandFailedError, match=r"^exit code 1: no such luck$") as raised:
            measure([[*PYTHON, "pass"], fail])
        assert "first" in raised.value.details

    def test_cp_shares_the_folders_out(self, tmp_path: Path) -> None:
        for rank in range(3):
            (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
            (tmp_path / "src" / f"rank_{rank}" / "shard").write_bytes(bytes(1_000_000))
        copies = Cp(tmp_path / "src", tmp_path / "dst", 2)
        for _ in range(2):  # again over what it wrote before
            assert 3_000_000 <= copies.run().written_bytes < 3_100_000
        assert len(list((tmp_path / "dst").glob("rank_*/shard"))) == 3


class TestReport:
    """What a transform's report tells of a run."""

    TARGETS = (
        {"process": 0, "engine_seconds": 1.0, "requested_bytes": 10, "written_bytes": 20},
        {"process": 1, "engine_seconds": 2.5, "requested_bytes": 11, "written_bytes": 21},
        {"process": 0, "engine_seconds": 2.0, "requested_bytes": 12, "written_bytes": 22},
    )

    def test_time_in_the_engine_is_that_of_the_busiest_process(self) -> None:
        assert engine_seconds(self.TARGETS) == 3.0

    def test_time_in_the_engine_of_a_report_without_it(self) -> None:
        assert engine_seconds([{"process": 0, "seconds": 1.0}]) is None
        assert engine_seconds([]) is None

    def test_bytes_are_those_of_the_report(self) -> None:
        run = with_report(Run(4.0, 5, 6, 7), self.TARGETS)
        assert run == Run(4.0, 5, read_bytes=33, written_bytes=63, inner_seconds=3.0)


class Counted:
    """A side that notes when it runs and takes given seconds."""

    def __init__(self, name: str, log: list[str], seconds: Iterator[float], missing: str | None = None) -> None:
        self.name = name
        self._log = log
        self._seconds = seconds
        self._missing = missing

    def missing(self) -> str | None:
        return self._missing

    def run(self) -> Run:
        self._log.append(self.name)
        seconds = next(self._seconds)
        if seconds < 0:
            raise CommandFailedError("broken", "in detail")
        return Run(seconds, int(seconds * 100), 1, 2, seconds / 2)


class TestTurns:
    """Which side runs when, and which runs count."""

    def test_sides_alternate_and_the_first_pair_is_not_counted(self) -> None:
        log: list[str] = []
        ours = Counted("ours", log, iter([9, 9, 1, 2, 3, 4]))
        first = Comparison(ours, Counted("one", log, iter([9, 5, 6])))
        second = Comparison(ours, Counted("two", log, iter([9, 7, 8])))
        interleave([first, second], 2)
        assert log == ["ours", "one", "ours", "two"] * 3
        assert [run.seconds for run in first.our_runs] == [1, 3]
        assert [run.seconds for run in second.our_runs] == [2, 4]
        assert [run.seconds for run in second.peer_runs] == [7, 8]

    def test_a_missing_side_is_named_and_nothing_runs(self) -> None:
        log: list[str] = []
        comparison = Comparison(Counted("ours", log, iter([])), Counted("peer", log, iter([]), "is not installed"))
        (row,) = answer([Question(comparison, "cp.ckpt", "copying")], 3)
        assert log == []
        assert row.skipped == "is not installed"
        assert row.figure is None and row.reached is None

    def test_a_failing_side_does_not_stop_the_others(self) -> None:
        log: list[str] = []
        broken = Comparison(Counted("ours", log, iter([1])), Counted("broken", log, iter([-1])))
        sound = Comparison(Counted("ours", log, iter([1, 2])), Counted("sound", log, iter([1, 4])))
        rows = answer([Question(broken, "cp.ckpt", "a"), Question(sound, "cp.hdf5", "b")], 1)
        assert rows[0].skipped == "failed: broken"
        assert rows[1].skipped is None
        assert Results("conversion", {}, 1, rows).failed


class TestRows:
    """Ratios, targets and how they are shown."""

    def compare(self, key: str, megabytes: int | None = None, clock: Clock = Clock.COMMAND) -> Row:
        comparison = Comparison(Counted("ours", [], iter([9, 1, 2, 3])), Counted("peer", [], iter([9, 40, 60, 30])))
        (row,) = answer([Question(comparison, key, "what", megabytes, clock)], 3)
        return row

    def test_faster(self) -> None:
        row = self.compare("mindspore.jobs", 735)
        assert row.ratio == row.figure == Spread(30, 10, 40)
        assert row.reached is True
        assert self.compare("mindspore.jobs", 736).reached is None

    def test_time(self) -> None:
        row = self.compare("cp.ckpt", 4295)
        assert row.ratio == Spread(2 / 60, 1 / 40, 0.1)
        assert row.reached is True

    def test_seconds_beside_a_peer(self) -> None:
        row = self.compare("startup.help")
        assert row.figure == Spread(2, 1, 3)
        assert row.ratio == Spread(2 / 60, 1 / 40, 0.1)
        assert row.reached is False

    def test_a_side_alone(self) -> None:
        runs = [Run(1.0, 400 * MIB, 1, 2, 0.5), Run(3.0, 100 * MIB, 1, 2, 0.7)]
        assert alone("ranks.4096", "what", "ours", runs, Clock.INNER).figure == Spread(0.6, 0.5, 0.7)
        assert alone("ranks.large.memory", "what", "ours", runs).reached is True
        assert largest_process("conversion.memory", runs).reached is False
        assert largest_process("conversion.memory", []).skipped == "nothing was run"

    def test_statistics(self) -> None:
        assert Spread.of([3, 1, 10]) == Spread(3, 1, 10)
        assert ratios([2, 9, 4], [1, 3, 4]) == Spread(2, 1, 3)
        with pytest.raises(ValueError):
            ratios([1, 2], [1])

    def test_numbers_keep_three_digits(self) -> None:
        assert Spread(0.012345, 0.0001234, 1234.5).as_text() == "0.0123 (1.2e-04-1234)"
        assert [size_text(value) for value in (735_432_100, 1_500, 12)] == ["735 MB", "1.50 kB", "12 B"]

    def test_markdown_names_what_is_missing(self) -> None:
        rows = [self.compare("cp.ckpt", 4295), Row("sharing", "on XFS", skipped="only root can mount an image")]
        text = Results("conversion", {"cores": "2"}, 5, rows).as_markdown()
        assert text.startswith("cores 2; 5 counted runs of each side")
        assert "at most 1.4x its time at 4295 MB" in text
        assert text.endswith("- not measured: on XFS: only root can mount an image")


class TestSurroundings:
    """Interpreters, folders, the machine."""

    def test_an_interpreter_that_lacks_a_package(self, bare_interpreter: Path) -> None:
        expected = "torch is not installed (--torch names an interpreter that has it)"
        assert lacks(str(bare_interpreter), "torch", "--torch") == expected
        assert lacks(sys.executable, "numpy", "--torch") is None

    def test_workplace(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), workplace(tmp_path, 1000) as folder:
            (folder / "file").write_text("")
            raise ZeroDivisionError
        with pytest.raises(NoRoomError), workplace(tmp_path, 10**18):
            pass
        assert not list(tmp_path.iterdir())

    def test_xfs_without_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(xfs.CannotMountError, match="only root"), xfs.mounted(tmp_path, 1):
            pass

    def test_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        curves = [Curve("ours", ((1, 2.0), (2, 3.0)))]
        draw(Results("scaling", {}, 5, [], "processes", curves), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class TestCheckpoint:
    """What is generated is the size asked for, noise, and the same for every peer."""

    def test_sizes(self) -> None:
        for megabytes in (1, 735, 4295):
            tensors = network.shapes(megabytes)
            size_bytes = 4 * sum(map(math.prod, tensors.values()))
            assert 0.99 * megabytes * 1e6 < size_bytes <= megabytes * 1e6
            consolidation = network.consolidation(tensors)
            replicated = checkpoint.source_bytes(tensors, consolidation.source)
            assert size_bytes <= replicated < 1.05 * size_bytes

    @pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
    def test_shards_are_noise(self, tmp_path: Path, kind: str) -> None:
        tensors = network.shapes(1)
        made = checkpoint.generate(tmp_path, tensors, network.with_optimizer_sharding(tensors), kind)
        shards = sorted(made.source.glob("rank_*/*"))
        assert len(shards) == 8
        sizes_bytes = [len(shard.read_bytes()) for shard in shards]
        assert sum(sizes_bytes) >= checkpoint.source_bytes(tensors, made.resharding.source)
        packed = zlib.compress(b"".join(shard.read_bytes() for shard in shards), 1)
        assert len(packed) > 0.9 * checkpoint.source_bytes(tensors, made.resharding.source)
        assert made.src_strategy.exists() and made.dst_strategy is not None and made.dst_strategy.exists()

    def test_torch_holds_tensors_alike(self) -> None:
        tensors = network.shapes(1)
        resharding = network.with_optimizer_sharding(tensors)
        assert resharding.target is not None
        source, target = side_of(resharding.source), side_of(resharding.target)
        assert source["mesh"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert target["mesh"] == [[0, 2], [1, 3]]
        up, down, norm = (f"layers.0.{name}" for name in ("mlp.up.weight", "mlp.down.weight", "norm.gamma"))
        assert [source["placements"][name] for name in (up, down, norm)] == [[0, None], [1, None], [None, None]]
        assert [target["placements"][name] for name in (up, down, norm)] == [[0, 0], [1, 0], [0, 0]]
