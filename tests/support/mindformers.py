"""GPT-2 as MindFormers shards it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import reshard_mpi
from support.cases import Side
from support.checkpoints import Arrays, write_strategy
from support.oracle import RawLayout

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
