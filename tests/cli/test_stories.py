"""The tutorial's stories that need MPI or MindSpore, run as a user runs them: each proves what it says, or fails."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import Arrays, as_read, read_shard, write_shard
from support.examples import few
from support.launch import MPI, find_mpi
from support.processes import Finished, run_command

from reshard_mpi import transform

TUTORIAL = Path(__file__).parents[2] / "launch" / "tutorial"
LENET = {
    "conv1.weight": (6, 1, 5, 5),
    "conv2.weight": (16, 6, 5, 5),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}
HAS_MINDSPORE = importlib.util.find_spec("mindspore") is not None


@pytest.mark.slow
def test_the_readme_has_the_guides_conversion(tmp_path: Path) -> None:
    """Its second section, word for word."""
    block = re.search(r"<!-- guide -->\n```sh\n(.*?)```\n", (TUTORIAL.parents[1] / "README.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "launch").symlink_to(TUTORIAL.parent)
    environment = {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
    if find_mpi("mpich") is None:
        pytest.skip("mpich is not installed")
    finished = run_command(["bash", "-e", "-c", block[1]], env=environment, cwd=tmp_path, check=True)
    assert finished.out.splitlines()[-1] == "dst_checkpoints: 48 slices equal those of the whole tensors"


@pytest.mark.slow
@pytest.mark.skipif(HAS_MINDSPORE, reason="with MindSpore the whole story is run, in test_all_stories.py")
def test_eight_to_four_without_mindspore(tmp_path: Path) -> None:
    """By the script that runs all stories, or those that are named; under one MPI, as what it starts is under each."""
    mpi = find_mpi("mpich") or find_mpi("openmpi")
    if mpi is None:
        pytest.skip("no MPI is installed")
    work = tmp_path / "work"
    finished = run_script(TUTORIAL / "run_all.sh", work, "1_eight_to_four", mpi=mpi)
    proved = (
        "proved: 8 cards to 4 by MindSpore's strategy files, for training, for inference and from a pipeline:"
        " all 120 slices are those of the whole tensors"
    )
    assert finished.out == proved + "\n"
    told = (work / "1_eight_to_four.log").read_text().splitlines()
    assert told[-2:] == ["not run: compiling and training, which need MindSpore 2.10", proved]
    work /= "1_eight_to_four"
    logs = {str(path.relative_to(work)) for path in work.glob("log_output/**/stdout")}
    assert logs == {f"log_output/1/rank.{rank}/stdout" for rank in range(4)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 11, 16])
def test_custom_loop_converts_for_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """The story's conversion without its framework: LeNet's tensors, its momentum and counters."""
    strategy = run_command([sys.executable, TUTORIAL / "2_custom_loop" / "strategy.py", str(ranks)], check=True).out
    (tmp_path / "strategy.toml").write_text(strategy)
    random = np.random.default_rng(4)
    tensors: Arrays = {
        state + name: random.standard_normal(shape, np.float32)
        for state in ("", "moments.")
        for name, shape in LENET.items()
    }
    tensors |= {"learning_rate": np.array(0.01, np.float32), "epoch_num": np.array(1, np.int64)}
    write_shard(tensors, tmp_path / "lenet.ckpt")
    transform(tmp_path / "lenet.ckpt", tmp_path / "cut", dst_strategy=tmp_path / "strategy.toml")
    transform(tmp_path / "cut", tmp_path / "back", src_strategy=tmp_path / "strategy.toml")
    assert read_shard(tmp_path / "back" / "rank_0" / "checkpoint_0.ckpt") == as_read(tensors)
    heights = [
        read_shard(tmp_path / "cut" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")["moments.fc1.weight"][1][0]
        for rank in range(ranks)
    ]
    step = -(-120 // ranks)
    assert heights == [len(range(120)[rank * step : (rank + 1) * step]) for rank in range(ranks)]


@pytest.mark.parametrize("damage", few(1, ["one element", "a tensor too many", "a rank too many"]))
def test_the_check_of_slices_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """The story's own check, beside shards that are right but for one thing."""
    monkeypatch.syspath_prepend(str(TUTORIAL / "1_eight_to_four"))
    from check import check  # type: ignore[import-not-found]
    from checkpoint_files import save  # type: ignore[import-not-found]
    from known_tensors import four_cards, whole_tensors  # type: ignore[import-not-found]

    shards = [{name: four_cards(name, whole, rank) for name, whole in whole_tensors().items()} for rank in range(4)]
    for rank, shard in enumerate(shards):
        save(tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", shard)
    assert check(tmp_path, "four_cards", []) == 24

    if damage == "one element":
        shards[3]["layer2.bias"] = shards[3]["layer2.bias"] + np.eye(1, 128, 5, dtype=np.float32)[0]
    elif damage == "a tensor too many":
        shards[3]["more"] = np.zeros(1, np.float32)
    else:
        save(tmp_path / "rank_4" / "checkpoint_4.ckpt", shards[3])
    save(tmp_path / "rank_3" / "checkpoint_3.ckpt", shards[3])
    with pytest.raises(SystemExit):
        check(tmp_path, "four_cards", [])


def run_script(script: Path, work: Path, *arguments: str, mpi: MPI | None = None) -> Finished:
    """Run what tells a story, with the programs of these tests' environment; it must succeed."""
    folders = [sysconfig.get_path("scripts"), os.environ["PATH"]]
    if mpi is not None:
        # A folder with this mpirun alone: beside it may lie a python of another environment.
        work.parent.joinpath("bin").mkdir()
        mpirun = work.parent / "bin" / "mpirun"
        mpirun.write_text(f'#!/bin/bash\nexec {mpi.launcher} "$@"\n')
        mpirun.chmod(0o755)
        folders.insert(0, str(mpirun.parent))
    environment = {"PATH": os.pathsep.join(folders), **(mpi.environment if mpi else {})}
    finished = run_command(
        ["bash", str(script), str(work), *arguments],
        env=environment,
        timeout_seconds=600,
        check=True,
    )
    assert finished.out.splitlines()[-1].startswith("proved: "), finished
    return finished
