"""Accumulated gradients that differ between replicas are joined: by any strategies, in any format, on any processes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, Side, cases
from support.checkpoints import ENDINGS, KINDS, as_read, read_shard, write_ranks, write_strategy
from support.examples import few, many, one_at_a_time
from support.oracle import RawLayout
from support.sums import parts, source_ranks, target_ranks, with_sums

import reshard_mpi

HOW = st.sampled_from(["mean", "sum"])
FLOATS = [np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)]


@st.composite
def accumulating(draw: st.DrawFn) -> tuple[Case, dict[str, dict[int, np.ndarray]]]:
    """Draw a case with accumulated gradients, and what each source rank has of them."""
    case = draw(cases(max_ranks=6, max_parameters=2, empty=False))
    both = (case.src, case.dst)
    untied = [name for name in case.tensors if all(len(side.layouts[name].stages) == 1 for side in both)]
    parameters = [name for name in untied if not any(name in side.unlisted for side in both)]
    dtypes = {name: draw(st.sampled_from(FLOATS)) for name in parameters}
    prefix = draw(st.sampled_from(["accu_grads", "grad_sum", "net.accu_grads"]))
    case, names = with_sums(case, dtypes, prefix, draw(st.booleans()))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return case, {name: parts(case.src, name, case.tensors[name], random) for name in names}


@pytest.mark.slow
@many(25)
@given(drawn=accumulating(), how=HOW, kinds=st.tuples(*[st.sampled_from(KINDS)] * 2))
def test_targets_hold_what_is_joined(
    drawn: tuple[Case, dict[str, dict[int, np.ndarray]]], how: str, kinds: tuple[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), *drawn, how, kinds)


# Data parallel (d), tensor parallel (t), pipeline (p), and the optimizer's share (o) of ranks that hold the same.
W = (16, 12)
MESHES = {
    "d4": Side(4, 1, {"w": RawLayout((4,), (-1, -1))}),
    "d2": Side(2, 1, {"w": RawLayout((2,), (-1, -1))}),
    "d2t2": Side(4, 1, {"w": RawLayout((2, 2), (-1, 0))}),
    "t2d2": Side(4, 1, {"w": RawLayout((2, 2), (1, -1))}),
    "d2t2p2": Side(8, 2, {"w": RawLayout((2, 2), (0, -1), stages=(1,)), "v": RawLayout((2, 2), (-1, -1))}),
    "d3t2": Side(6, 1, {"w": RawLayout((3, 2), (-1, 0))}),
    "d4o2": Side(4, 1, {"w": RawLayout((4,), (-1, -1), 2)}),
    "d4t2o2": Side(8, 1, {"w": RawLayout((4, 2), (-1, 0), 2)}),
    "d2t2 uneven": Side(4, 1, {"w": RawLayout((2, 2), (0, -1), split_sizes=(4, 12))}),
    "one": Side(1, 1, {"w": RawLayout((1,), (-1, -1))}),
}
PAIRS = [
    *(("d4", "d2t2"), ("d2t2", "one"), ("one", "d2t2"), ("d4t2o2", "d3t2"), ("d2t2p2", "d2t2")),
    *(("d2t2 uneven", "d4o2"), ("d4", "d2t2 uneven"), ("t2d2", "d2t2p2"), ("d2t2p2", "d2t2p2")),
    *(("d4", "d2"), ("d2t2", "d4"), ("t2d2", "d2t2"), ("d3t2", "d4o2"), ("d4o2", "d2"), ("d2", "d4t2o2")),
]


# Who has which replica is found before it matters whether they are divided by their number.
@pytest.mark.parametrize(("pair", "how"), few(1, one_at_a_time(PAIRS, ["mean", "sum"])))
def test_meshes_that_people_have(tmp_path: Path, pair: tuple[str, str], how: str) -> None:
    source, target = pair
    names = [name for name in ("w", "v") if "p" in source + target or name == "w"]
    sides = [replace(MESHES[key], layouts=with_v(MESHES[key], names)) for key in (source, target)]
    tensors = {name: np.random.default_rng(1).standard_normal(W).astype(np.float32) for name in names}
    case, sums = with_sums(
        Case(*sides, tensors), dict.fromkeys(names, np.dtype(np.float32)), "accu_grads", listed=False
    )
    random = np.random.default_rng(2)
    check(tmp_path, case, {name: parts(case.src, name, case.tensors[name], random) for name in sums}, how)


def with_v(side: Side, names: list[str]) -> dict[str, RawLayout]:
    """Return layouts of these tensors: a second one is on all ranks alike, in the first stage."""
    return {name: side.layouts.get(name, RawLayout((side.stage_size,), (-1, -1))) for name in names}


def check(
    base: Path, case: Case, sums: dict[str, dict[int, np.ndarray]], how: str, kinds: tuple[str, str] = ("ckpt", "ckpt")
) -> None:
    """Transform a case with these accumulated gradients, and hold every target against the oracle."""
    strategies = {
        "src_strategy": write_strategy(case.src, base / "src_strategy"),
        "dst_strategy": write_strategy(case.dst, base / "dst_strategy"),
    }
    write_ranks(source_ranks(case, sums), base / "src", kinds[0])
    options = {"to": kinds[1], "accumulated": how, "verify": True}
    reshard_mpi.transform(base / "src", base / "dst", **strategies, **options)
    for rank, arrays in target_ranks(case, sums, how).items():
        written = read_shard(base / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[kinds[1]]}")
        assert written == as_read(arrays), rank
    reshard_mpi.verify(base / "src", base / "dst", **strategies, accumulated=how)
    reshard_mpi.verify(base / "dst")
    reshard_mpi.diff(base / "src", base / "dst", *strategies.values(), accumulated=how)
