"""What `inspect` shows of specs, of target folders that are not complete, and of the records of runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.command_line import done, refused, run_here
from support.conversions import Conversion, four_targets, make
from support.examples import few

from reshard_mpi.journal.run_status import as_lines, state_of

SPEC = """
stages = 2
[mesh]
dp = 2
tp = 4

[[parameter]]
match = "embedding"
split = { 0 = ["dp", "tp"] }
stage = 0

[[parameter]]
match = "*.weight"
split = { 1 = ["tp"] }
optimizer = ["dp"]

[[parameter]]
match = "*.uneven"
split = { 0 = ["dp"] }
sizes = { 0 = [3, 5] }

[[parameter]]
match = "*.ceil"
split = { 0 = ["dp"] }
sizes = "ceil"

[[parameter]]
match = "*"
"""


MAP = """
[[map]]
eq = "other <=> global_step"
"""


@pytest.fixture
def c(tmp_path: Path) -> Conversion:
    return four_targets(tmp_path)


def text(path: Path) -> list[str]:
    finished = done("inspect", path)
    return finished.out.splitlines()


def as_json(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run_here("inspect", "--json", path).out)
    return facts


def test_a_spec_is_shown_in_its_own_words(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    assert text(path) == [
        "strategy: 16 ranks in 2 stages, 5 rules",
        "  mesh dp=2 tp=4",
        "  embedding  split 0=dp+tp stage 0",
        "  *.weight  split 1=tp optimizer dp",
        "  *.uneven  split 0=dp sizes 0=[3, 5]",
        "  *.ceil  split 0=dp sizes ceil",
        "  *  whole",
    ]
    facts = as_json(path)
    assert facts["mesh"] == {"dp": 2, "tp": 4}
    assert [rule["axes"] for rule in facts["rules"]] == [
        {"split": {"0": ["dp", "tp"]}, "optimizer": []},
        {"split": {"1": ["tp"]}, "optimizer": ["dp"]},
        {"split": {"0": ["dp"]}, "optimizer": []},
        {"split": {"0": ["dp"]}, "optimizer": []},
        {"split": {}, "optimizer": []},
    ]
    assert [rule["match"] for rule in facts["rules"]] == ["embedding", "*.weight", "*.uneven", "*.ceil", "*"]


def test_the_names_of_axes_make_no_other_strategy(tmp_path: Path) -> None:
    from reshard_mpi.sharding import strategy_files

    for name, axes in (("a", ("dp", "tp")), ("b", ("x", "y"))):
        (tmp_path / f"{name}.toml").write_text(SPEC.replace("dp", axes[0]).replace("tp", axes[1]))
    a, b = (strategy_files.load(str(tmp_path / f"{name}.toml")) for name in "ab")
    assert (a.axes, b.axes) == (("dp", "tp"), ("x", "y")) and a == b


def test_a_target_folder_that_is_not_complete(c: Conversion) -> None:
    c.done("transform", "--rank", "0", "--rank", "2", "--prefix", "net_")
    (c.dst / "rank_1").mkdir()
    partial = c.dst / "rank_1" / ".net_1.ckpt.0123456789ab.partial"
    partial.write_bytes(b"half")
    (c.dst / "rank_2" / "net_2.ckpt").unlink()
    for path in (c.dst, c.dst / ".reshard_mpi"):
        lines = text(path)
        assert lines[0].startswith("checkpoint: 1 rank, ckpt")
        assert lines[-7:] == [
            "run: 1 of 4 targets complete, not committed",
            f"  made by: reshard-mpi transform {c.src} {c.dst} --src-strategy {c.src_strategy}"
            f" --dst-strategy {c.dst_strategy} --to ckpt --prefix net_",
            "  the same command with --resume makes the others",
            "  target rank 1 has not been written",
            "  target rank 2 has lost its file rank_2/net_2.ckpt",
            "  target rank 3 has not been written",
            "  rank_1/.net_1.ckpt.0123456789ab.partial: being written, or left by a writer that died",
        ]
    run = as_json(c.dst)["run"]
    assert run["complete"] == [0] and set(run["incomplete"]) == {"1", "2", "3"}
    assert run["partial"] == [str(partial.relative_to(c.dst))] and run["settings"]["source"] == str(c.src)
    assert text(partial) == [f"{partial}: being written, or left by a writer that died", *lines[-7:]]
    lone = c.dst.parent / "rank_0" / partial.name
    lone.parent.mkdir()
    partial.rename(lone)
    assert "the file is not complete" in refused("inspect", str(lone))


def test_the_command_that_is_shown_makes_the_others(c: Conversion) -> None:
    (c.dst.parent / "my map.toml").write_text(MAP)
    options = ["--map", str(c.dst.parent / "my map.toml"), "--dtype", "fp64", "--dtype", "w=fp32", "--exclude", "b"]
    options += ["--verify", "--to", "hdf5", "--unlisted", "replicate", "--reverse"]
    c.done("transform", "--rank", "0", *options)
    command = as_json(c.dst)["run"]["command"]
    assert f"  made by: {command}" in text(c.dst)
    program, *words = shlex.split(command)
    assert program == "reshard-mpi"
    done(*words, "--resume")
    lines = text(c.dst)
    assert "run: 4 of 4 targets complete, committed" in lines and f"  made by: {command}" in lines
    assert not any("--resume" in line for line in lines)
    (c.dst / "reshard.json").unlink()
    assert f"  what is left: reshard-mpi commit {c.dst}" in text(c.dst)


@pytest.mark.parametrize("options", [["--to", "hf", "--max-shard-size", "64"], ["--to", "dcp", "--select", "*.ckpt"]])
def test_the_command_of_a_folder_with_an_index(c: Conversion, options: list[str]) -> None:
    command = ["transform", str(c.src), str(c.dst), "--src-strategy", str(c.src_strategy), "--from", "ckpt", *options]
    done(*command)
    shown = shlex.split(as_json(c.dst)["run"]["command"])
    done(*shown[1:], "--resume")
    assert shown[:4] == ["reshard-mpi", *command[:3]] and set(options) <= set(shown)


def test_a_target_folder_without_any_complete_target(c: Conversion) -> None:
    c.done("transform", "--rank", "3")
    c.written(3).unlink()
    assert text(c.dst)[0] == "run: 0 of 4 targets complete, not committed"
    assert as_json(c.dst)["kind"] == "run"


def test_a_target_folder_that_is_complete(c: Conversion) -> None:
    c.done("transform", "--verify")
    lines = text(c.dst)
    assert "run: 4 of 4 targets complete, committed" in lines
    assert lines[-1] == "commit: 4 targets, CRC-32 of 4 tensors; 4 of them there as committed"
    facts = as_json(c.dst)
    assert facts["kind"] == "checkpoint" and facts["run"]["complete"] == [0, 1, 2, 3]
    assert set(facts["commit"]["sums"]) == {"w", "b", "moments.w", "global_step"}


def test_a_commit_record(c: Conversion) -> None:
    c.done()
    c.written(1).unlink()
    c.written(2).write_bytes(b"short")
    size = c.written(0).stat().st_size
    lines = text(c.dst / "reshard.json")
    assert lines[0] == "commit: 4 targets; 2 of them there as committed"
    assert lines[1].startswith(f"  made by: reshard-mpi transform {c.src} {c.dst} --src-strategy {c.src_strategy} ")
    assert lines[2:] == [
        f"  rank 0: rank_0/checkpoint_0.ckpt, {size} B",
        "  rank 1: rank_1/checkpoint_1.ckpt is not there",
        f"  rank 2: rank_2/checkpoint_2.ckpt has 5 bytes, not the {size} that were committed",
        f"  rank 3: rank_3/checkpoint_3.ckpt, {size} B",
    ]
    facts = as_json(c.dst / "reshard.json")
    assert facts["kind"] == "commit" and facts["settings"]["prefix"] == "checkpoint_"
    assert [target["got_bytes"] for target in facts["targets"]] == [size, None, 5, size]


@pytest.mark.parametrize("content", few(1, [b"{}", None]))
def test_an_index_that_is_not_as_it_was_committed(c: Conversion, content: bytes | None) -> None:
    c.done("transform", "--to", "dcp")
    index = c.dst / ".metadata"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    problem = f"  .metadata is not {'there' if content is None else 'as it was committed'}"
    assert text(c.dst / "reshard.json")[1] == problem
    lines = as_lines(state_of(c.dst))
    assert "run: 4 of 4 targets complete, not committed" in lines and problem in lines
    assert f"  what is left: reshard-mpi commit {c.dst}" in lines
    done("commit", c.dst)
    assert "run: 4 of 4 targets complete, committed" in as_lines(state_of(c.dst))


def test_a_target_that_was_lost_after_the_commit(c: Conversion) -> None:
    c.done()
    c.written(1).unlink()
    assert "run: 3 of 4 targets complete, not committed" in text(c.dst)


@pytest.mark.parametrize("content", few(1, ["", "{}", '{"digest": "0", "targets": [{}]}']))
def test_a_commit_record_that_is_damaged(c: Conversion, content: str) -> None:
    c.done()
    (c.dst / "reshard.json").write_text(content)
    assert "the commit record is damaged" in refused("inspect", c.dst / "reshard.json")
    assert text(c.dst)[-1] == "commit: the commit record is damaged"
    assert "run: 4 of 4 targets complete, not committed" in text(c.dst)


def test_a_run_record_that_is_damaged(c: Conversion) -> None:
    c.done()
    (c.dst / ".reshard_mpi" / "run.json").write_text("{}")
    assert "run: a record of a run that is damaged, or of another version" in text(c.dst)


@pytest.mark.parametrize("name", few(1, ["run.json", "rank_0.json", "rank_0.lock"]))
def test_a_file_of_the_state_of_a_run(c: Conversion, name: str) -> None:
    c.done()
    assert f"what to do: inspect {c.dst}, the target folder" in refused("inspect", c.dst / ".reshard_mpi" / name)


def test_a_checkpoint_of_no_run_says_nothing_of_one(tmp_path: Path) -> None:
    assert not {"run", "commit"} & set(as_json(make(tmp_path).src))


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_folder_with_an_index_has_files_and_no_ranks(c: Conversion, to: str) -> None:
    cut = ["--dst-strategy", str(c.dst_strategy)] if to == "dcp" else []
    target = c.folder / to
    made = ["transform", str(c.src), str(target), "--src-strategy", str(c.src_strategy), *cut, "--to", to]
    done(*made)
    files = sorted(target.glob("*.distcp" if to == "dcp" else "*.safetensors"))
    lines = text(target)
    assert lines[0].startswith(f"checkpoint: {len(files)} file{'s' * (len(files) > 1)}, {to}, ")
    assert lines[1].startswith("  model: 40 parameters in 2 tensors, 192 B (")
    first = 1 + next(number for number, line in enumerate(lines) if "global_step 7" in line)
    assert lines[first : first + len(files)] == [f"  {path}" for path in files]
    assert lines[first + len(files)].startswith("  total: ")


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_folder_with_an_index_that_is_called_as_of_a_rank(c: Conversion, to: str) -> None:
    target = c.but(dst=c.folder / "rank_3", dst_strategy=None, options=("--to", to))
    target.done("transform")
    assert text(target.dst)[0].startswith(f"checkpoint: 1 file, {to}, ")
