"""`plan --plot`: which files it draws, for every form of a source, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_shard
from support.command_line import done, run_apart, run_here
from support.conversions import Conversion as Files
from support.conversions import make
from support.examples import few, few_cases
from support.launch import MPI, by_one_mpi
from support.processes import Finished

import reshard_mpi
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.runs.planner import Planner

SPEC = 'mesh = {{ x = {ranks} }}\n[[parameter]]\nmatch = "w*"\nsplit = {{ 0 = ["x"] }}\n[[parameter]]\nmatch = "*"\n'


def draw(conversion: Files, path: Path, *options: str) -> Finished:
    return run_here(*conversion.arguments("plan"), "--plot", path, *options)


@few_cases(
    3,
    ("kind", "ending", "begin"),
    [
        ("ckpt", "html", b"<!DOCTYPE html>"),
        ("hdf5", "html", b"<!DOCTYPE html>"),
        ("ckpt", "svg", b"<svg "),
        ("hdf5", "png", b"\x89PNG"),
    ],
)
def test_every_form(tmp_path: Path, kind: str, ending: str, begin: bytes) -> None:
    conversion, path = make(tmp_path, kind), tmp_path / f"plan.{ending}"
    finished = draw(conversion, path)
    assert finished.ended == (0, "") and finished.out.startswith("drew 2 targets") and str(path) in finished.out
    assert path.read_bytes().startswith(begin)
    again = draw(conversion, path, "--tensor", "w")
    assert again.ended == (0, "") and path.read_bytes().startswith(begin)
    assert not conversion.dst.exists()


def test_a_tensor_alone(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    assert draw(conversion, tmp_path / "w.svg", "--tensor", "moments.w").code == 0
    drawn = (tmp_path / "w.svg").read_text()
    assert "How both sides cut moments.w" in drawn and "Who feeds whom" not in drawn
    assert "ranks 0, 2" in drawn and "rank 0 &lt; 0, 1" in drawn and "rank 1 &lt; 2, 3" in drawn


@pytest.mark.parametrize("kind", few(1, ["ckpt", "hdf5", "safetensors", "torch", "dcp", "hf"]))
def test_every_form_of_source_and_target(tmp_path: Path, kind: str) -> None:
    tensors = {"w": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.array(3, np.int64)}
    write_shard(tensors, tmp_path / "full.safetensors")
    for ranks in (2, 3):
        (tmp_path / f"{ranks}.toml").write_text(SPEC.format(ranks=ranks))
    cut = None if kind == "hf" else tmp_path / "2.toml"
    reshard_mpi.transform(tmp_path / "full.safetensors", tmp_path / "src", dst_strategy=cut, to=kind)
    said = ["--src-strategy", str(cut)] if kind in ("ckpt", "safetensors", "torch") else []
    arguments = ["plan", str(tmp_path / "src"), str(tmp_path / "dst"), *said, "--plot", str(tmp_path / "plan.html")]
    for target in ([], ["--dst-strategy", str(tmp_path / "3.toml")], ["--to", "hf"]):
        assert not done(*arguments, *target).warnings
        assert str(tmp_path / "src") in (tmp_path / "plan.html").read_text()


def test_through_a_map(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    (tmp_path / "map.toml").write_text('[[map]]\neq = "w [a b], moments.w [a b] <=> both [(a + a) b]"\n')
    options = ["--map", str(tmp_path / "map.toml"), "--tensor", "both"]
    target = conversion.strategy("other", {"both": conversion.target.layouts["w"]})
    finished = draw(conversion.but(dst_strategy=target), tmp_path / "plan.svg", *options)
    assert finished.code == 0, finished
    drawn = (tmp_path / "plan.svg").read_text()
    assert "How both sides cut both" in drawn and f"Made of w, moments.w by {tmp_path}/map.toml, line 1" in drawn


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("plan.pdf", [], "a picture's ending says its form"),
        ("plan", [], "a picture's ending says its form"),
        ("none/plan.svg", [], "the picture cannot be written"),
        ("plan.svg", ["--tensor", "w", "--tensor", "b"], "one picture shows one tensor"),
        ("plan.svg", ["--tensor", "v"], "the target has no tensor of this name"),
        ("plan.svg", ["--part", "0/2"], "a part of the targets is neither drawn nor explained"),
        ("plan.svg", ["--json"], "not allowed with argument"),
        ("plan.svg", ["--rank", "2"], "target rank out of range"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, name: str, options: list[str], problem: str) -> None:
    finished = draw(make(tmp_path), tmp_path / name, *options)
    assert finished.code == 2 and problem in finished.err
    assert not (tmp_path / name).exists()


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "plan.html").mkdir()
    finished = draw(make(tmp_path), tmp_path / "plan.html")
    assert finished.code == 2 and "a folder" in finished.err


def test_a_tensor_without_a_picture(tmp_path: Path) -> None:
    assert "--plot FILE" in make(tmp_path).refused("plan", "--tensor", "w", code=2)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    conversion = make(tmp_path)
    finished = draw(conversion, tmp_path / "plan.png")
    assert finished.code == 2 and "pip install 'reshard-mpi[plot]'" in finished.err
    assert not (tmp_path / "plan.png").exists()
    assert draw(conversion, tmp_path / "plan.html").code == 0


def test_a_target_that_is_there_is_drawn_as_well(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    conversion.done()
    assert draw(conversion, tmp_path / "plan.svg").code == 0


@pytest.mark.parametrize("ending", few(1, ["html", "svg", "png"]))
def test_of_sixteen_thousand_targets_few_are_planned(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = Planner.plan

    def counted(self: Planner, target_rank: int, *, checked: bool = True) -> RankPlan:
        planned.append(target_rank)
        return plan(self, target_rank, checked=checked)

    monkeypatch.setattr(Planner, "plan", counted)
    (tmp_path / "src").mkdir()
    write_shard({"w": np.zeros((16384, 2), np.float16), "b": np.zeros(3)}, tmp_path / "src" / "net.safetensors")
    (tmp_path / "dst.toml").write_text(SPEC.format(ranks=16384))
    arguments = [str(tmp_path / "src"), str(tmp_path / "dst"), "--dst-strategy", str(tmp_path / "dst.toml")]
    assert "drew 128 of 16384 targets" in done("plan", *arguments, "--plot", tmp_path / f"plan.{ending}").out
    assert len(planned) == len(set(planned)) <= 256


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    conversion.remove(2)
    for options in (["--plot", str(tmp_path / "plan.svg")], ["--explain", "w", "--rank", "1"]):
        finished = conversion.done("plan", *options)
        assert any("rank 2" in warning for warning in finished.warnings), finished


@by_one_mpi
def test_under_mpi_one_picture_is_drawn(tmp_path: Path, mpi: MPI) -> None:
    conversion = make(tmp_path)
    for options in (["--plot", str(tmp_path / "plan.svg")], ["--explain", "w"]):
        finished = run_apart(*conversion.arguments("plan", *options), mpi=mpi)
        assert finished.code == 0 and finished.out.count("drew 2 targets") + finished.out.count("w: float32") == 1
    finished = run_apart(*conversion.arguments("plan", "--explain", "v"), mpi=mpi)
    assert finished.code == 2 and finished.err.count("the target has no tensor of this name") == 1
