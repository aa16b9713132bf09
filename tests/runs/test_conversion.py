"""Which targets a process gets: the largest first, each process finding the same without asking the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import write_shards
from support.in_memory import strategy_of
from support.oracle import RawLayout

from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.errors import CoverageError
from reshard_mpi.runs.open_run import strategy_of as filled
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.scheduling import target_weights
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

TENSORS = {"w": np.zeros((12, 4), np.float32), "v": np.zeros(6, np.float16), "scale.w": np.zeros((), np.float32)}


def weights(folder: Path, target: Side, ranks: range) -> dict[int, int]:
    """Return the weights of targets of a checkpoint of 2 ranks; `scale.w` is named after `w` and has another shape."""
    rows = {"w": RawLayout((2,), (0, -1)), "v": RawLayout((2,), (-1,)), "scale.w": RawLayout((2,), ())}
    source = Side(2, 1, rows, frozenset({"scale.w"}))
    write_shards(source, TENSORS, folder, "ckpt")
    checkpoint = open_source(find_shards(str(folder)), strategy_of(source))
    return target_weights(Planner(checkpoint, strategy_of(target)), ranks)


def test_targets_of_one_stage_weigh_alike(tmp_path: Path) -> None:
    target = Side(4, 1, {"w": RawLayout((4,), (0, -1)), "v": RawLayout((4,), (-1,))})
    assert weights(tmp_path, target, range(1, 3)) == {1: 1, 2: 1}


def test_targets_of_several_stages_weigh_what_their_stage_holds(tmp_path: Path) -> None:
    target = Side(4, 2, {"w": RawLayout((2,), (0, -1)), "v": RawLayout((2,), (-1,), stages=(1,))})
    assert weights(tmp_path, target, range(4)) == {0: 96, 1: 96, 2: 12, 3: 12}


def test_targets_of_uneven_slices_weigh_what_they_hold(tmp_path: Path) -> None:
    target = Side(2, 1, {"w": RawLayout((2,), (0, -1), split_sizes=(3, 9)), "v": RawLayout((2,), (-1,))})
    assert weights(tmp_path, target, range(2)) == {0: 3 * 4 * 4 + 12, 1: 9 * 4 * 4 + 12}


def test_files_that_are_filled_weigh_what_they_hold(tmp_path: Path) -> None:
    each = {f"w{number}": np.zeros((number % 5 + 1, 4), np.float32) for number in range(300)}
    whole = Side(1, 1, {name: RawLayout((1,), ()) for name in each})
    write_shards(whole, each, tmp_path, "ckpt")
    checkpoint = open_source(find_shards(str(tmp_path)), strategy_of(whole))
    named = [[f"w{first}", f"w{first + 1}"] for first in range(0, 300, 2)]
    found = target_weights(Planner(checkpoint, filled(named)), range(150))
    assert found == {file: sum(each[name].nbytes for name in names) for file, names in enumerate(named)}


def test_stages_that_cut_a_parameter_differently_write_it_once(tmp_path: Path) -> None:
    """Where all files make up one checkpoint: torch refuses chunks that overlap."""
    whole = Side(1, 1, {"w": RawLayout((1,), ())})
    write_shards(whole, {"w": TENSORS["w"]}, tmp_path, "ckpt")
    rows, columns = Placement((2,), ((0,), ()), stages=(0,)), Placement((2,), ((), (0,)), stages=(1,))
    checkpoint = open_source(find_shards(str(tmp_path)), strategy_of(whole))
    planner = Planner(checkpoint, Strategy(4, 2, {"w": (rows, columns)}), is_one_checkpoint=True)
    plans = [planner.plan(rank) for rank in range(4)]
    assert [list(plan.tensors.specs.names) for plan in plans] == [["w"], ["w"], [], []]
    assert [plan.shard.written_by_others for plan in plans] == [(), (), ("w",), ("w",)]
    assert all(plan.placed.keys() == {"w"} for plan in plans)


def test_what_does_not_fit_is_left_for_the_plan_to_refuse(tmp_path: Path) -> None:
    target = Side(14, 2, {"w": RawLayout((7,), (0, -1)), "v": RawLayout((7,), (-1,), stages=(1,))})
    assert weights(tmp_path, target, range(0, 14, 7)) == {0: 0, 7: 12}


def test_the_only_shard_of_a_part_that_is_gone_is_a_hole_though_rules_name_no_parameters(tmp_path: Path) -> None:
    cut = Placement((2,), ((0,),), open_ended=True)
    rules = (("w", cut.with_stages((0,))), ("v", cut.with_stages((1,))))
    source = Side(4, 2, {"w": RawLayout((2,), (0, -1)), "v": RawLayout((2,), (-1,), 2, stages=(1,))})
    write_shards(source, {name: TENSORS[name] for name in ("w", "v")}, tmp_path, "ckpt")
    shutil.rmtree(tmp_path / "rank_2")
    checkpoint = open_source(find_shards(str(tmp_path)), Strategy(4, 2, {}, rules))
    planner = Planner(checkpoint, Strategy(2, 1, {}, (("w", cut), ("v", cut))))
    assert {tensor.spec.name for tensor in planner.plan(1).tensors} == {"w", "v"}
    with pytest.raises(CoverageError, match="no source holds a part of 'v' that target rank 0 needs"):
        planner.plan(0)
