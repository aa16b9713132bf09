"""A GPT-2 as MindFormers trains it: 8 ranks in 2 stages, 4 ranks in 2 stages, and one whole file, there and back.

The layouts are those of two strategy files that a real MindSpore wrote. Where these files are not (they are not the
project's), the same strategies made here stand in; where they are, both are used and must say the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import ENDINGS, KINDS, as_read, expected_rank, read_shard, write_shard
from support.command_line import run_in_fork
from support.examples import one_at_a_time
from support.mindformers import SIDES, weights, write_merged
from support.processes import run_command

import reshard_mpi
from reshard_mpi.sharding import strategy_files

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
REAL = DATA / "mindformers_gpt2"


# A step of a conversion: source, target, and the strategies of both (None: one whole checkpoint).
Convert = Callable[[Path, Path, Path | None, Path | None, str], None]


def by_function(src: Path, dst: Path, src_strategy: Path | None, dst_strategy: Path | None, kind: str) -> None:
    reshard_mpi.transform_checkpoints(src, dst, "checkpoint_", src_strategy, dst_strategy, output_format=kind)


def by_command(src: Path, dst: Path, src_strategy: Path | None, dst_strategy: Path | None, kind: str) -> None:
    command = ["transform", str(src), str(dst), "--to", kind, "--jobs", "1"]
    for option, path in (("--src-strategy", src_strategy), ("--dst-strategy", dst_strategy)):
        command += [option, str(path)] if path else []
    finished = run_in_fork(*command)
    assert finished.code == 0, finished
    target_lists_gradients = dst_strategy is not None
    assert ("36 listed parameters are in no source shard: accu_grads" in finished.err) is target_lists_gradients


@pytest.fixture(params=["made here", "real"])
def strategies(request: pytest.FixtureRequest, tmp_path: Path) -> dict[int, Path]:
    """The strategy files by number of ranks."""
    if request.param == "real":
        if not REAL.is_dir():
            pytest.skip("no mindformers_gpt2 under RESHARD_MPI_SHARED_DATA or ../shared/data")
        return {ranks: REAL / f"strategy_{ranks}_npus.ckpt" for ranks in (8, 4)}
    return {ranks: write_merged(SIDES[ranks], tmp_path / f"strategy_{ranks}") for ranks in (8, 4)}


@pytest.mark.parametrize(
    ("strategies", "convert", "kind"),
    one_at_a_time(["made here", "real"], [by_function, by_command], KINDS),
    indirect=["strategies"],
)
def test_there_and_back(strategies: dict[int, Path], convert: Convert, kind: str, tmp_path: Path) -> None:
    tensors = weights()
    at = tmp_path / "0_of_1"
    path = at / "rank_0" / f"gpt2.{ENDINGS[kind]}"
    path.parent.mkdir(parents=True)
    write_shard(tensors, path)
    ranks = 1
    for number, target_ranks in enumerate((8, 4, 1, 4, 8, 1), start=1):
        target = tmp_path / f"{number}_of_{target_ranks}"
        convert(at, target, strategies.get(ranks), strategies.get(target_ranks), kind)
        side = SIDES[target_ranks]
        for rank in range(target_ranks):
            written = read_shard(target / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[kind]}")
            assert written == as_read(expected_rank(side, tensors, rank)), (number, rank)
        at, ranks = target, target_ranks


def test_gradients_never_saved_are_an_error_where_asked_for(strategies: dict[int, Path], tmp_path: Path) -> None:
    write_shard(weights(), tmp_path / "gpt2.ckpt")
    command = [sys.executable, "-m", "reshard_mpi", "transform", tmp_path / "gpt2.ckpt", tmp_path / "dst", "--strict"]
    finished = run_command([*command, "--dst-strategy", strategies[8]])
    assert finished.code == 3, finished
    assert "accu_grads.backbone." in finished.err
    assert not (tmp_path / "dst").exists()


@pytest.mark.skipif(not REAL.is_dir(), reason="no mindformers_gpt2 under RESHARD_MPI_SHARED_DATA or ../shared/data")
@pytest.mark.parametrize("ranks", [8, 4])
def test_what_is_made_here_is_what_the_real_files_say(ranks: int, tmp_path: Path) -> None:
    made = strategy_files.load(str(write_merged(SIDES[ranks], tmp_path / "made")))
    assert made == strategy_files.load(str(REAL / f"strategy_{ranks}_npus.ckpt"))
