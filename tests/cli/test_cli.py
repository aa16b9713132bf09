"""The commands, as their help describes them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import ENDINGS, expected_rank, write_strategy
from support.command_line import COMMAND, done, run_apart, run_here
from support.conversions import DST_LAYOUTS, TENSORS, Conversion, assert_right, listing, make, of_every_kind, shards
from support.examples import few, one_at_a_time
from support.oracle import RawLayout
from support.processes import run_command
from support.stand_ins import refusing

import reshard_mpi
from reshard_mpi.cli.arguments import parser
from reshard_mpi.sharding import strategy_files

# transform


@pytest.mark.parametrize("kind", few(1, ENDINGS))
def test_transform(tmp_path: Path, kind: str) -> None:
    c = make(tmp_path, kind)
    before = listing(c.src)
    finished = done(*c.arguments("transform", "-v"))
    assert re.fullmatch(r"wrote 2 shards, \d+ B in \d+\.\d\d s \(.*/s\)\n", finished.out)
    title = {"ckpt": "MindSpore checkpoint", "hdf5": "HDF5", "safetensors": "safetensors"}[kind]
    source, *targets = [line for line in finished.err.splitlines() if not line.startswith(("planning", "writing"))]
    assert source == f"source: {title}, 4 files, 4 ranks, 4 tensors a rank"
    assert len(targets) == 2
    assert all(re.fullmatch(r"target [01]: \d+ B from 2 source ranks in \d+\.\d\d s", line) for line in targets)
    assert_right(c)
    assert listing(c.src) == before


def test_prefix(c: Conversion) -> None:
    c.done("transform", "--prefix", "net")
    assert {path.name for path in c.dst.glob("rank_*/*")} == {"net0.ckpt", "net1.ckpt"}


def test_rank(c: Conversion) -> None:
    c.done("transform", "--rank", "1")
    assert_right(c, (1,))
    c.done("transform", "--rank", "0", "--rank", "0")
    assert_right(c)


def test_part(c: Conversion) -> None:
    c.done("transform", "--part", "1/2")
    assert_right(c, (1,))
    c.done("transform", "--part", "0/2")
    assert_right(c)
    assert c.done("transform", "--part", "5/6").out.splitlines()[-1] == "wrote 0 shards"


def test_resume_makes_what_is_missing(c: Conversion) -> None:
    c.done("transform", "--rank", "0")
    kept = c.written(0).stat()
    finished = c.done("transform", "--resume")
    assert "wrote 1 shard," in finished.out and "1 was complete already" in finished.out
    assert_right(c)
    assert c.written(0).stat().st_mtime_ns == kept.st_mtime_ns


def test_resume_redoes_what_is_not_complete(c: Conversion) -> None:
    c.done()
    whole = c.written(0).read_bytes()
    c.written(0).unlink()
    c.written(0).write_bytes(whole[:-1])
    said = c.refused("transform", "--resume")
    assert f"{len(whole) - 1} bytes, not the {len(whole)} that this run has written" in said
    c.written(0).unlink()
    left = c.written(1).with_name(".checkpoint_1.ckpt.0123.partial")
    left.write_bytes(b"left by a run that died")
    c.written(1).unlink()
    c.done("transform", "--resume")
    assert_right(c)
    assert not left.exists()


def test_overwrite_replaces_targets_not_folders(c: Conversion) -> None:
    c.done("transform", "--unlisted", "drop")
    (c.dst / "rank_0" / "notes.txt").write_text("mine")
    c.done("transform", "--overwrite")
    assert (c.dst / "rank_0" / "notes.txt").read_text() == "mine"
    (c.dst / "rank_0" / "notes.txt").unlink()
    assert_right(c)


@pytest.mark.slow
def test_jobs(c: Conversion) -> None:
    c.done("transform", "--jobs", "5", "--report", str(c.folder / "r"))
    assert_right(c)
    report = json.loads((c.folder / "r").read_text())
    assert report["processes"] == 5
    # Each of the two targets is filled by three of them, so one has a part of both.
    assert [target["processes"] for target in report["targets"]] == [3, 3]
    assert [target["process"] for target in report["targets"]] == [0, 2]


def test_report(c: Conversion) -> None:
    path = c.folder / "report.json"
    layouts = {**DST_LAYOUTS, "never.saved": RawLayout((2,), (0,))}
    c = c.but(dst_strategy=c.strategy("more", layouts))
    c.done("transform", "--rank", "1")
    c.done("transform", "--resume", "--report", str(path))
    report = json.loads(path.read_text())
    assert set(report) == {
        *("version", "source", "target", "processes", "seconds", "targets", "failures", "absent", "notes", "warnings")
    }
    assert (report["version"], report["processes"], report["failures"]) == (1, 1, [])
    assert (report["source"], report["target"]) == (str(c.src), str(c.dst))
    assert report["absent"] == ["never.saved"]
    again = c.arguments("transform", "--overwrite", "--report", str(path))
    done(*again)  # an earlier report is replaced
    assert not any(target["skipped"] for target in json.loads(path.read_text())["targets"])
    first, second = report["targets"]
    assert (first["rank"], first["skipped"], second["rank"], second["skipped"]) == (0, False, 1, True)
    held = sum(array.nbytes for array in expected_rank(c.target, TENSORS, 0).values())
    assert first["written_bytes"] == first["needed_bytes"] == first["requested_bytes"] == held
    assert first["read_ranks"] == [0, 1]
    assert first["path"] == str(c.written(0))


# Which checkpoint of a folder


@of_every_kind
def test_newest_checkpoint_by_natural_order(tmp_path: Path, kind: str) -> None:
    c = make(tmp_path, kind)
    for rank in range(4):
        new = c.shard(rank).with_name(f"net-10_5.{ENDINGS[kind]}")
        c.shard(rank).rename(new)
        for older in ("net-9_5", "net-10_4"):
            c.rewrite(rank, {"w": np.zeros((8, 2), np.float32)})
            c.shard(rank).rename(new.with_name(f"{older}.{ENDINGS[kind]}"))
        (new.parent / "checkpoint-graph.meta").write_bytes(b"not a shard")
        (new.parent / "strategy.ckpt").write_bytes(b"\x08\x01 not one either")
    assert f"net-10_5.{ENDINGS[kind]} chosen" in c.done().err
    assert_right(c)


def test_select(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name("net-9_5.ckpt"))
        c.rewrite(rank, {"w": np.zeros((8, 2), np.float32)})
        c.shard(rank).rename(c.shard(rank).with_name("net-10_5.ckpt"))
    c.done("transform", "--select", "*-9_*")
    assert_right(c)
    assert "--select" in c.but(dst=c.folder / "x").refused("transform", "--select", "*.pt")


# plan


def test_plan(c: Conversion) -> None:
    before = listing(c.folder)
    finished = c.done("plan")
    assert finished.err == ""
    source, head, first, second, total = finished.out.splitlines()
    assert source.startswith("source: ") and source.endswith(", 4 files, 4 ranks, 4 tensors a rank")
    assert re.split(r"  +", head.strip()) == ["target", "tensors", "writes", "reads", "peak memory", "source ranks"]
    assert first.split()[:2] == ["0", "4"] and first.endswith("0 1") and second.endswith("2 3")
    assert re.fullmatch(r"2 targets, 392 B; each process needs at most \d+\.\d\d MiB of memory", total)
    assert listing(c.folder) == before


def test_plan_json(c: Conversion) -> None:
    finished = c.run("plan", "--json", "--rank", "1")
    planned = json.loads(finished.out)
    assert finished.code == 0 and planned["version"] == 1 and planned["source"].endswith(", 4 tensors a rank")
    (target,) = planned["targets"]
    assert (target["rank"], target["read_ranks"], target["tensors"]) == (1, [2, 3], 4)
    assert planned["written_bytes"] == target["written_bytes"] == target["needed_bytes"] == 196
    assert target["peak_bytes"] == planned["peak_bytes"] < 200 << 20
    assert (target["absent"], target["notes"]) == ([], [])


def test_plan_says_what_transform_says(c: Conversion) -> None:
    c.rewrite(1, {"seed": np.array(3)})
    c.rewrite(0, {"seed": np.array(4)})
    layouts = {**DST_LAYOUTS, "never.saved": RawLayout((2,), (0,))}
    c = c.but(dst_strategy=c.strategy("more", layouts))
    planned = c.run("plan")
    finished = c.run("transform")
    assert planned.code == finished.code == 0
    assert planned.err == finished.err and "never.saved" in finished.err and "'seed' differs" in finished.err


# ranks


def test_ranks(c: Conversion) -> None:
    strategies = ["--src-strategy", str(c.src_strategy), "--dst-strategy", str(c.dst_strategy)]
    assert run_here("ranks", "0", *strategies).out == "0\n1\n"
    assert run_here("ranks", "1", *strategies).out == "2\n3\n"
    assert run_here("ranks", "0", *strategies[:2]).out == "0\n1\n"  # one full checkpoint
    assert run_here("ranks", "3", "--dst-strategy", c.src_strategy).out == "0\n"


# merge-strategies


@pytest.mark.parametrize("name", ["merged.ckpt", "merged.json", "new/merged.ckpt"])
def test_merge_strategies(tmp_path: Path, name: str) -> None:
    stages = {"w": RawLayout((2,), (0, -1), stages=(0,)), "v": RawLayout((2,), (-1, 0), stages=(1,))}
    folder = write_strategy(Side(4, 2, stages), tmp_path / "stages", shapes=dict.fromkeys(stages, (4, 4)))
    out = tmp_path / name
    done("merge-strategies", folder, out)
    shown = json.loads(run_here("inspect", "--json", out).out)
    assert (shown["kind"], shown["ranks"], shown["stages"]) == ("strategy", 4, 2)
    assert shown["parameters"] == json.loads(run_here("inspect", "--json", folder).out)["parameters"]


# inspect


def test_inspect_a_shard(c: Conversion) -> None:
    finished = done("inspect", c.shard(1))
    assert finished.out.splitlines()[0] == "ckpt shard: 4 tensors, 196 B"
    assert "  w  float32 [8, 2]  64 B" in finished.out.splitlines()
    shown = json.loads(run_here("inspect", "--json", c.shard(1)).out)
    assert (shown["kind"], shown["format"], shown["path"]) == ("shard", "ckpt", str(c.shard(1)))
    offset, length = shown["tensors"]["b"]["ranges"][0]
    assert c.shard(1).read_bytes()[offset : offset + length] == TENSORS["b"].tobytes()


def test_inspect_a_native_shard(c: Conversion) -> None:
    c.done("transform", "--to", "hdf5")
    finished = run_here("inspect", c.but(kind="hdf5").written(1))
    assert finished.out.splitlines()[0] == "hdf5 shard, rank 1 of 2: 4 tensors, 196 B"
    assert "  w  float32 [4, 4]  64 B  at [4, 0] of [8, 4]" in finished.out.splitlines()


def test_inspect_a_checkpoint(c: Conversion) -> None:
    finished = run_here("inspect", c.src)
    assert finished.out.splitlines()[0] == "checkpoint: 4 ranks, ckpt, 784 B of tensors"
    assert f"  rank 3: 4 tensors, 196 B  {c.shard(3)}" in finished.out.splitlines()
    shown = json.loads(run_here("inspect", "--json", c.src).out)
    assert (shown["kind"], shown["ranks"], set(shown["shards"])) == ("checkpoint", 4, {"0", "1", "2", "3"})


def test_inspect_a_strategy(c: Conversion) -> None:
    finished = run_here("inspect", c.src_strategy)
    assert finished.out.splitlines()[0] == "strategy: 4 ranks in 1 stage, 2 parameters"
    assert "  w  mesh 2x2 split 1=axis1" in finished.out.splitlines()
    shown = json.loads(run_here("inspect", "--json", c.src_strategy).out)
    expected = {"mesh": [2, 2], "split": [[], [1]], "optimizer": 1, "stages": [0]}
    assert shown["kind"] == "strategy" and shown["parameters"]["w"] == [expected]


# demo


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    finished = done("demo")
    assert "all 48 slices are bit-exact" in finished.out and "MiB/s" in finished.out
    assert not listing(tmp_path)


@pytest.mark.slow
def test_demo_in_a_folder(tmp_path: Path) -> None:
    base = tmp_path / "new"
    finished = done("demo", str(base))
    for path in ("src", "dst", "src_strategy.ckpt", "dst_strategy.ckpt"):
        assert f"{base}/{path}" in finished.out and (base / path).exists()
    again = ["transform", str(base / "src"), str(base / "again"), "--src-strategy", str(base / "src_strategy.ckpt")]
    again += ["--dst-strategy", str(base / "dst_strategy.ckpt"), "--jobs", "1"]
    done(*again)
    assert shards(base / "again") == shards(base / "dst")
    compiled = Path(__file__).parents[2] / "launch" / "tutorial" / "1_eight_to_four" / "strategies"
    for name in ("src_strategy.ckpt", "dst_strategy.ckpt"):  # as MindSpore's compiler has written them
        assert strategy_files.load(str(base / name)).parameters == strategy_files.load(str(compiled / name)).parameters


# help and what it costs


def test_version() -> None:
    assert run_here("--version").out == f"reshard-mpi {version('reshard-mpi')}\n"


def test_help_names_every_command_and_option() -> None:
    text = run_here("--help").out
    commands = re.findall(r"^    ([a-z-]+)(?: {2,}|\n)", text, re.MULTILINE)
    assert commands == [
        "transform",
        "plan",
        "verify",
        "audit",
        "diff",
        "commit",
        "ranks",
        "merge-strategies",
        "governor",
        "inspect",
        "help",
        "completion",
        "demo",
    ]
    for command in commands:
        text = run_here(command, "--help").out
        assert text.startswith(f"usage: reshard-mpi {command} ")
        assert all(f"{code} " in text for code in (0, 1, 2, 3, 4, 5, 130, 143))
        options = {option for action in parser_of(command)._actions for option in action.option_strings}
        assert (
            options
            == set(re.findall(r"^  (?:-., |)?(-{1,2}[a-z0-9-]+)", text, re.MULTILINE)) | {"-h", "-q", "-v"} & options
        )


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def test_help_begins_with_what_must_be_given() -> None:
    for command, usage in {
        "transform": "[OPTION]... SRC DST",
        "verify": "[OPTION]... SRC [DST]",
        "merge-strategies": "[OPTION]... DIR OUT",
        "help": "[TOPIC]",
        "inspect": "[OPTION]... PATH [GLOB|OTHER|TENSOR[SLICE]]...",
    }.items():
        first, second = run_here(command, "--help").out.splitlines()[:2]
        assert (first, second) == (f"usage: reshard-mpi {command} {usage}", "")


def test_options_stand_by_what_they_are_about() -> None:
    """No more than ten together, each group with a title of its own; no name is broken at its hyphens."""
    for command in ("transform", "plan", "verify", "diff"):
        text = run_here(command, "--help").out
        groups = [group for group in parser_of(command)._action_groups if group._group_actions]
        assert all(len(group._group_actions) <= 10 for group in groups)
        assert len({group.title for group in groups}) == len(groups) > 4
        assert "dcp-safetensors" in text and not re.search(r"\w-$", text, re.MULTILINE)


@pytest.mark.parametrize("columns", few(1, ["", "80", "200"]))
def test_help_fits_the_smallest_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    pages = [[], *([command] for command in re.findall(r"^    ([a-z-]+)", run_here("--help").out, re.MULTILINE))]
    assert len(pages) > 10
    for page in pages:
        text = run_here(*page, "--help").out
        assert [line for line in text.splitlines() if len(line) > 80] == []


HEAVY = {"numpy", "h5py", "google", "mpi4py", "ml_dtypes", "psutil"}


def modules_after(*arguments: str, env: dict[str, str] | None = None) -> set[str]:
    """Run the command line in a fresh interpreter and return the top names of all modules it has loaded."""
    code = (
        "import sys\nfrom reshard_mpi.cli.commands import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    finished = run_command([sys.executable, "-c", code, *arguments], check=True, env=env)
    return set(finished.err.splitlines()[-1].split())


def test_help_is_light() -> None:
    assert not modules_after("--help") & HEAVY
    assert not modules_after("transform", "--help") & HEAVY
    code = "import sys, reshard_mpi; print(*sys.modules)"
    assert not set(run_command([sys.executable, "-c", code], check=True).out.split()) & HEAVY


def test_a_ckpt_job_loads_neither_hdf5_nor_mpi(c: Conversion) -> None:
    assert not modules_after(*c.arguments()) & {"h5py", "mpi4py"}
    assert not modules_after("inspect", str(c.shard(0))) & {"h5py", "mpi4py"}


def test_module_and_script_are_the_same_command() -> None:
    finished = run_apart("--version", check=True)
    assert finished.out == f"reshard-mpi {reshard_mpi.__version__}\n"
    script = Path(sys.executable).with_name("reshard-mpi")
    if script.exists():
        assert run_command([script, "--version"], check=True).out == finished.out


def test_output_that_nobody_reads(c: Conversion) -> None:
    command = " ".join([*COMMAND, "inspect", str(c.shard(0))])
    finished = run_command(["bash", "-c", f"set -o pipefail; {command} | true"])
    assert finished.code == 0 and finished.err == "", finished


@pytest.mark.parametrize(
    ("to", "jobs"), one_at_a_time(["2>&1 | true", "2>/dev/full", ">&- 2>&-", "<&- >&-"], ["2", "1"])
)
def test_a_transform_that_nobody_listens_to(c: Conversion, to: str, jobs: str) -> None:
    command = " ".join([*COMMAND, *c.arguments("transform", "--jobs", jobs)])
    finished = run_command(["bash", "-c", f"set -o pipefail; {command} {to}"])
    assert finished.code == 0, finished
    assert_right(c)


@pytest.mark.slow
def test_failures_that_nobody_listens_to(c: Conversion, tmp_path: Path) -> None:
    env = refusing(tmp_path)
    for jobs in ("1", "2"):
        command = " ".join([*COMMAND, *c.arguments("transform", "--resume", "--jobs", jobs)])
        assert run_command(["bash", "-c", f"set -o pipefail; {command} 2>&1 | true"], env=env).code == 4
