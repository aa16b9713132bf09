"""A GPT-2 as MindFormers trains it: 8 ranks in 2 stages, 4 ranks in 2 stages, and one whole file, there and back.

The layouts are those of two strategy files that a real MindSpore wrote. Where these files are not (they are not the
project's), the same strategies made here stand in; where they are, both are used and must say the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cases import Side
from checkpoints import ENDINGS, Arrays, as_read, expected_rank, read_shard, write_shard, write_strategy
from oracle import RawLayout
from processes import run_command

import reshard_mpi
from reshard_mpi.sharding import strategy

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
REAL = DATA / "mindformers_gpt2"

STATE = ("adam_m", "adam_v", "accu_grads")
EMBEDDING = "backbone.embedding.word_embedding.embedding_table"  # in the first stage, and in the last for the logits
# A block's matrices, and how they are cut over a mesh's last axis: rows (0), columns (1).
MATRICES = {
    "attention.projection": 0,
    "attention.dense1": 0,
    "attention.dense2": 0,
    "attention.dense3": 0,
    "output.mapping": 1,
    "output.projection": 0,
}
CUT_BIASES = ("attention.dense1", "attention.dense2", "attention.dense3", "output.mapping")

# A step of a conversion: source, target, and the strategies of both (None: one whole checkpoint).
Convert = Callable[[Path, Path, Path | None, Path | None, str], None]


def by_function(src: Path, dst: Path, src_strategy: Path | None, dst_strategy: Path | None, kind: str) -> None:
    reshard_mpi.transform_checkpoints(src, dst, "checkpoint_", src_strategy, dst_strategy, output_format=kind)


def by_command(src: Path, dst: Path, src_strategy: Path | None, dst_strategy: Path | None, kind: str) -> None:
    command = [sys.executable, "-m", "reshard_mpi", "transform", src, dst, "--to", kind, "--jobs", "1"]
    for option, path in (("--src-strategy", src_strategy), ("--dst-strategy", dst_strategy)):
        command += [option, path] if path else []
    finished = run_command(command, check=True)
    target_lists_gradients = dst_strategy is not None
    assert ("36 listed parameters are in no source shard: accu_grads" in finished.stderr) is target_lists_gradients


@pytest.fixture(params=["made here", "real"])
def strategies(request: pytest.FixtureRequest, tmp_path: Path) -> dict[int, Path]:
    """The strategy files by number of ranks."""
    if request.param == "real":
        if not REAL.is_dir():
            pytest.skip("no mindformers_gpt2 under RESHARD_MPI_SHARED_DATA or ../shared/data")
        return {ranks: REAL / f"strategy_{ranks}_npus.ckpt" for ranks in (8, 4)}
    return {ranks: write_merged(SIDES[ranks], tmp_path / f"strategy_{ranks}") for ranks in (8, 4)}


@pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
@pytest.mark.parametrize("convert", [by_function, by_command])
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
    assert finished.returncode == 3, finished
    assert "accu_grads.backbone." in finished.stderr
    assert not (tmp_path / "dst").exists()


@pytest.mark.skipif(not REAL.is_dir(), reason="no mindformers_gpt2 under RESHARD_MPI_SHARED_DATA or ../shared/data")
@pytest.mark.parametrize("ranks", [8, 4])
def test_what_is_made_here_is_what_the_real_files_say(ranks: int, tmp_path: Path) -> None:
    made = strategy.load(str(write_merged(SIDES[ranks], tmp_path / "made")))
    assert made == strategy.load(str(REAL / f"strategy_{ranks}_npus.ckpt"))


def shape_of(name: str) -> tuple[int, ...]:
    """Return a shape that both strategies can cut; they hold none."""
    shapes = {
        "word_embedding.embedding_table": (512, 16),
        "position_embedding.embedding_table": (32, 16),
        "output.mapping.weight": (16, 64),
        "output.projection.weight": (64, 16),
        "mapping.bias": (64,),
        ".weight": (16, 16),
    }
    return next((shape for ending, shape in shapes.items() if name.endswith(ending)), (16,))


def gpt2(mesh: tuple[int, ...]) -> Side:
    """Two stages of ranks on `mesh`, whose last axis is the model's; one block in each."""

    def layout(name: str, cut: int | None, *stages: int) -> RawLayout:
        return RawLayout(mesh, tuple(0 if dim == cut else -1 for dim in range(len(shape_of(name)))), stages=stages)

    weight_layouts = {EMBEDDING: layout(EMBEDDING, None, 0, 1)}
    position = "backbone.embedding.position_embedding.embedding_table"
    weight_layouts[position] = layout(position, None, 0)
    for stage in (0, 1):
        block = f"backbone.blocks.{stage}"
        for name, cut in MATRICES.items():
            weight_layouts[f"{block}.{name}.weight"] = layout(f"{block}.{name}.weight", cut, stage)
            bias_cut = 0 if name in CUT_BIASES else None
            weight_layouts[f"{block}.{name}.bias"] = layout(f"{block}.{name}.bias", bias_cut, stage)
        for norm in ("layernorm1", "layernorm2"):
            for vector in ("gamma", "beta"):
                weight_layouts[f"{block}.{norm}.{vector}"] = layout("vector", None, stage)
    for vector in ("gamma", "beta"):
        weight_layouts[f"backbone.layernorm.{vector}"] = layout("vector", None, 1)

    layouts = dict(weight_layouts)
    for state in STATE:
        layouts |= {f"{state}.{name}": entry for name, entry in weight_layouts.items()}
    ranks = int(np.prod(mesh))
    layouts["global_step"] = RawLayout((ranks,), (), stages=(0, 1))
    return Side(2 * ranks, 2, layouts, frozenset({"global_step"}))


def unsharded(side: Side) -> Side:
    """One rank that holds everything `side` does."""
    layouts = {name: RawLayout((1,), (-1,) * len(layout.tensor_map)) for name, layout in side.layouts.items()}
    return Side(1, 1, layouts)


SIDES = {8: gpt2((2, 2)), 4: gpt2((2,)), 1: unsharded(gpt2((2,)))}


def weights() -> Arrays:
    """Random weights in bfloat16 with their moments in float32; accumulated gradients are never saved."""
    random = np.random.default_rng(8)
    tensors: Arrays = {}
    for name in SIDES[1].layouts:
        if name.startswith("accu_grads."):
            continue
        values = random.standard_normal(shape_of(name), np.float32)
        tensors[name] = values.astype(ml_dtypes.bfloat16) if name.startswith("backbone.") else values
    tensors["global_step"] = np.array(1200, np.int32)
    return tensors


def write_merged(side: Side, folder: Path) -> Path:
    """Write the strategy files of both stages and merge them."""
    reshard_mpi.merge_pipeline_strategys(write_strategy(side, folder), folder.with_suffix(".ckpt"))
    return folder.with_suffix(".ckpt")
