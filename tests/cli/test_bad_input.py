"""Bad input: the exit code, the named error, a message that helps, no traceback, and nothing written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run_here
from support.conversions import SRC_LAYOUTS, Conversion, assert_right, listing, make, of_every_kind, transform_apart
from support.examples import few
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.errors import (
    CoverageError,
    DisagreementError,
    LayoutError,
    ReshardError,
    ShardError,
    SourceError,
    StrategyError,
    TargetError,
    UsageError,
)

BOTH = ("ckpt", "hdf5")  # of those that meet with the bytes of a file
LABELS = ("expected", "got", "where", "what to do")


@dataclass(frozen=True, slots=True)
class Bad:
    """A way to spoil a conversion. says: patterns of the message. without: parts of it that would say nothing."""

    spoil: Callable[[Conversion], Conversion | None]
    error: type[ReshardError]
    says: tuple[str, ...]
    without: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("ckpt",)

    def check(self, message: str) -> None:
        for label in LABELS:
            if label not in self.without:
                assert f"\n  {label}: " in message, message
        for pattern in self.says:
            assert re.search(pattern, message), f"{pattern!r} not in:\n{message}"


CASES: dict[str, Bad] = {}


def bad(
    error: type[ReshardError], *says: str, without: tuple[str, ...] = (), kinds: tuple[str, ...] = ("ckpt",)
) -> Callable[[Callable[[Conversion], Conversion | None]], Callable[[Conversion], Conversion | None]]:
    def add(spoil: Callable[[Conversion], Conversion | None]) -> Callable[[Conversion], Conversion | None]:
        CASES[spoil.__name__] = Bad(spoil, error, says, without, kinds)
        return spoil

    return add


# The source: folders and files.


@bad(SourceError, "not there", "got: nothing", "where: .*/missing")
def no_such_folder(c: Conversion) -> Conversion:
    return c.but(src=c.folder / "missing")


@bad(SourceError, "not there", "got: a pipe", "where: .*/pipe")
def a_pipe(c: Conversion) -> Conversion:
    os.mkfifo(c.folder / "pipe")
    return c.but(src=c.folder / "pipe")


@bad(SourceError, "no checkpoint found", "where: .*/empty")
def a_folder_with_nothing_in_it(c: Conversion) -> Conversion:
    (c.folder / "empty").mkdir()
    return c.but(src=c.folder / "empty")


@bad(SourceError, "no checkpoint found", "4 folders without")
def rank_folders_with_nothing_in_them(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).unlink()


@bad(CoverageError, "w'", r"box .* on one of ranks 1, 3", "got: shard missing", "where: .*/src")
def rank_folders_missing_and_no_replica(c: Conversion) -> None:
    c.remove(1, 3)


@bad(CoverageError, "'w'", "on one of ranks 1, 3", "shards without the tensor", "where: .*rank_1.*")
def a_parameter_missing_where_it_is_needed(c: Conversion) -> None:
    c.remove(3)
    c.rewrite(1, {"w": None})


# Damaged shards: ranks 0 and 2 hold the same, as 1 and 3 do, so one of them alone is replaced (test_lost_shards.py).


@bad(
    CoverageError,
    "w'",
    "on one of ranks 0, 2",
    r"got: rank 0: a shard is empty, .* 0 bytes, in .*/rank_0/.*rank 2: ",
    kinds=BOTH,
)
def an_empty_shard(c: Conversion) -> None:
    for rank in (0, 2):
        c.shard(rank).write_bytes(b"")


@bad(ShardError, "a shard is empty", "got: 0 bytes", r"where: .*rank_0/checkpoint_0\.")
def empty_shards_alone(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).write_bytes(b"")


@bad(ShardError, "a shard is empty", "got: 0 bytes", r"where: .*rank_0/checkpoint_0\.")
def an_empty_shard_where_no_strategy_says_who_else_holds_it(c: Conversion) -> Conversion:
    c.shard(0).write_bytes(b"")
    return c.but(src_strategy=None)


@bad(CoverageError, "on one of ranks 1, 3", r"rank 1: .*truncated.*, in .*rank_1/checkpoint_1\.", kinds=BOTH)
def a_truncated_shard(c: Conversion) -> None:
    for rank in (1, 3):
        content = c.shard(rank).read_bytes()
        c.shard(rank).write_bytes(content[: len(content) - 20])


@bad(CoverageError, "on one of ranks 1, 3", r"rank 1: .*truncated.*, in .*rank_1/checkpoint_1\.", kinds=BOTH)
def half_a_shard(c: Conversion) -> None:
    for rank in (1, 3):
        content = c.shard(rank).read_bytes()
        c.shard(rank).write_bytes(content[: len(content) // 2])


@bad(CoverageError, "on one of ranks 0, 2", r"rank 0: .*in .*rank_0/checkpoint_0\.", kinds=BOTH)
def an_over_long_shard(c: Conversion) -> None:
    for rank in (0, 2):
        with c.shard(rank).open("ab") as file:
            file.write(b"\xff" * 40)


@bad(CoverageError, "'w'.* longer", r"rank 0: .*in .*rank_0/checkpoint_0\.", kinds=("ckpt",))
def a_tensor_that_is_longer_than_its_shape(c: Conversion) -> None:
    for rank in (0, 2):
        content = c.shard(rank).read_bytes()
        c.shard(rank).write_bytes(content.replace(b"\x08\x08\x08\x02", b"\x08\x07\x08\x02", 1))


@bad(CoverageError, "on one of ranks 0, 2", r"rank 0: .*in .*rank_0/checkpoint_0\.", kinds=BOTH)
def a_shard_of_damaged_structure(c: Conversion) -> None:
    for rank in (0, 2):
        content = bytearray(c.shard(rank).read_bytes())
        content[:64] = b"\xff" * 64
        c.shard(rank).write_bytes(content)


@bad(CoverageError, "damaged", r"rank 0: .*in .*rank_0/checkpoint_0\.", kinds=("hdf5",))
def a_shard_of_damaged_structure_inside(c: Conversion) -> None:
    for rank in (0, 2):
        content = c.shard(rank).read_bytes()
        c.shard(rank).write_bytes(content.replace(b"TREE", b"EERT").replace(b"SNOD", b"DONS"))


@bad(ShardError, "encrypted", "dec_key", without=("expected", "got"), kinds=("ckpt",))
def an_encrypted_checkpoint(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).write_bytes(0x7F3A5ED8.to_bytes(4, "little") + bytes(100))


@bad(SourceError, "two formats", r"\.ckpt", r"\.h5", kinds=BOTH)
def both_formats_in_one_rank_folder(c: Conversion) -> None:
    other = make(c.folder / "other", {"ckpt": "hdf5", "hdf5": "ckpt"}[c.kind])
    shutil.copy(other.shard(2), c.shard(2).parent)


@bad(SourceError, "do not say how they are sharded", "src.strategy")
def no_source_strategy(c: Conversion) -> Conversion:
    return c.but(src_strategy=None)


@bad(SourceError, "no checkpoint", "got: a strategy file", "where: .*src_strategy")
def a_strategy_given_as_checkpoint(c: Conversion) -> Conversion:
    assert c.src_strategy is not None
    return c.but(src=c.src_strategy)


# What the shards say.


@bad(DisagreementError, "'w'", r"got: shape \[8, 3\]", r"where: .*rank_1")
def a_shape_that_does_not_fit_its_layout(c: Conversion) -> None:
    for rank in (1, 3):  # as many shards say this as say otherwise
        c.rewrite(rank, {"w": np.zeros((8, 3), np.float32)})


@bad(LayoutError, "number of dimensions", r"shape \[8\]", r"'w' in .*rank_0")
def a_tensor_of_another_number_of_dimensions(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"w": np.zeros(8, np.float32)})


@bad(DisagreementError, "type of 'w'", "expected: float32", "got: float16", r"where: .*rank_1", kinds=BOTH)
def ranks_that_disagree_in_type(c: Conversion) -> None:
    for rank in (1, 3):
        c.rewrite(rank, {"w": np.zeros((8, 2), np.float16)})


@bad(DisagreementError, "type of 'global_step'", r"where: .*rank_1")
def scalars_that_disagree_in_type(c: Conversion) -> None:
    for rank in (1, 3):
        c.rewrite(rank, {"global_step": np.array(7, np.int64)})


@bad(DisagreementError, "'global_step'", r"got: shape \[1\]", r"where: .*rank_1", kinds=BOTH)
def scalars_that_disagree_in_shape(c: Conversion) -> None:
    for rank in (1, 3):
        c.rewrite(rank, {"global_step": np.array([7], np.int32)})


@bad(DisagreementError, "'global_step'", "different moments", "where: .*src", kinds=BOTH)
def ranks_that_disagree_in_step(c: Conversion) -> None:
    for rank in (1, 3):
        c.rewrite(rank, {"global_step": np.array(8, np.int32)})


@bad(DisagreementError, "different moments", "epoch_num", "where: .*src")
def ranks_that_disagree_in_epoch(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"epoch_num": np.array(1 + (rank == 1), np.int64)})


@bad(DisagreementError, "different moments", "epoch 1 step 5", "epoch 1 step 6", "with -?-?select")
def ranks_that_disagree_in_the_step_of_their_names(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(f"net-1_{5 + rank // 2}{c.shard(rank).suffix}"))


@bad(DisagreementError, "different moments", "epoch 1 step 5", "epoch 2 step 5", "with -?-?select")
def ranks_that_disagree_in_the_epoch_of_their_names(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(f"net-{1 + rank // 2}_5{c.shard(rank).suffix}"))


@bad(SourceError, "no checkpoint that all rank folders have", "net-1_5", "net-1_6", "with -?-?select")
def rank_folders_without_a_checkpoint_in_common(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(f"net-1_{5 + rank // 2}{c.shard(rank).suffix}"))
    shutil.copy(c.src / "rank_0" / f"net-1_5{c.shard(0).suffix}", c.src / "rank_0" / f"net-1_4{c.shard(0).suffix}")


@bad(SourceError, "several files of one rank", "checkpoint_0", "optim", "(--select |select=)'checkpoint_")
def models_and_optimizers_in_two_files_a_rank(c: Conversion) -> None:
    for rank in range(4):
        shutil.copy(c.shard(rank), c.shard(rank).with_stem("optim"))


@bad(SourceError, "each a part of it", "x-00001-of-00002.*x-00002-of-00002", "in one file")
def parts_of_shards(c: Conversion) -> None:
    for rank in range(4):
        shutil.copy(c.shard(rank), c.shard(rank).with_stem("x-00001-of-00002"))
        c.shard(rank).rename(c.shard(rank).with_stem("x-00002-of-00002"))


# Strategies.


@bad(StrategyError, "cannot be read", "No such file", "where: .*missing", without=("expected",))
def no_such_source_strategy(c: Conversion) -> Conversion:
    return c.but(src_strategy=c.folder / "missing")


@bad(StrategyError, "cannot be read", "No such file", "where: .*missing", without=("expected",))
def no_such_target_strategy(c: Conversion) -> Conversion:
    return c.but(dst_strategy=c.folder / "missing")


@bad(StrategyError, "empty", "got: 0 bytes", "where: .*none", without=("what to do",))
def an_empty_strategy(c: Conversion) -> Conversion:
    (c.folder / "none").write_bytes(b"")
    return c.but(src_strategy=c.folder / "none")


@bad(
    StrategyError,
    "neither protobuf nor JSON nor TOML|not a MindSpore strategy",
    "where: .*noise",
    without=("what to do",),
)
def a_strategy_of_no_known_kind(c: Conversion) -> Conversion:
    (c.folder / "noise").write_bytes(b"these are not the strategies you are looking for\n")
    return c.but(dst_strategy=c.folder / "noise")


@bad(StrategyError, "strategy", "where: .*noise")
def a_strategy_of_random_bytes(c: Conversion) -> Conversion:
    (c.folder / "noise.ckpt").write_bytes(bytes(range(255, 0, -1)))
    return c.but(dst_strategy=c.folder / "noise.ckpt")


@bad(StrategyError, "JSON", "where: .*broken", without=("expected",))
def a_strategy_of_broken_json(c: Conversion) -> Conversion:
    (c.folder / "broken.json").write_text('{"current_stage": 1, ')
    return c.but(src_strategy=c.folder / "broken.json")


@bad(StrategyError, "not a strategy", "got: a MindSpore checkpoint|got: an HDF5 file", "where: .*rank_0", kinds=BOTH)
def a_checkpoint_given_as_strategy(c: Conversion) -> Conversion:
    return c.but(src_strategy=c.shard(0))


@bad(StrategyError, "no strategy file", "where: .*rank_0")
def a_checkpoint_folder_given_as_strategy(c: Conversion) -> Conversion:
    return c.but(dst_strategy=c.shard(0).parent)


@bad(StrategyError, "no parameter in common", "'w'", "'other'")
def strategies_whose_parameters_do_not_meet(c: Conversion) -> Conversion:
    return c.but(dst_strategy=c.strategy("other", {"other": RawLayout((2,), (0, -1))}))


@bad(StrategyError, "no tensor of the checkpoint is in the source strategy", "net.v", "w")
def strategies_of_another_network_than_the_checkpoint(c: Conversion) -> Conversion:
    return c.but(
        src_strategy=c.strategy("s", {"net.v": RawLayout((2, 2), (-1, 0))}),
        dst_strategy=c.strategy("d", {"net.v": RawLayout((2,), (0, -1))}),
    )


@bad(LayoutError, "cannot be cut evenly|does not divide", r"3", r"shape \[8, 4\]", "w'", "where: .*odd")
def a_cut_of_the_target_that_does_not_divide(c: Conversion) -> Conversion:
    return c.but(
        dst_strategy=c.strategy("odd", {**SRC_LAYOUTS, "w": RawLayout((3,), (0, -1)), "b": RawLayout((3,), (-1,))})
    )


@bad(LayoutError, "optimizer cut", "multiple of 3", r"\[8\] of shape \[8\]", "'b'", "where: .*odd", "without optimizer")
def an_optimizer_cut_of_the_target_that_does_not_divide(c: Conversion) -> Conversion:
    return c.but(dst_strategy=c.strategy("odd", {"w": RawLayout((3,), (-1, -1)), "b": RawLayout((3,), (-1,), 3)}))


@bad(DisagreementError, "w' does not fit its layout", r"box \[0:3, 0:2\]", r"got: shape \[8, 2\]", "where: .*rank_0")
def sizes_of_the_source_that_do_not_fit_the_shards(c: Conversion) -> Conversion:
    layouts = {"w": RawLayout((4,), (0, -1), split_sizes=(3, 2, 2, 1)), "b": RawLayout((4,), (-1,))}
    return c.but(src_strategy=c.strategy("odd", layouts))


@bad(LayoutError, "outside the mesh", r"\[2\]", "'w'", "where: .*wide", without=("what to do",))
def a_tensor_map_outside_the_mesh(c: Conversion) -> Conversion:
    layouts = {"w": RawLayout((2, 2), (-1, 2)), "b": RawLayout((2, 2), (-1,))}
    return c.but(src_strategy=c.strategy("wide", layouts))


@bad(LayoutError, "number", "dimensions", "w'", "3 dimensions")
def a_tensor_map_of_the_wrong_number_of_dimensions(c: Conversion) -> Conversion:
    layouts = {"w": RawLayout((2, 2), (-1, 0, -1)), "b": RawLayout((2, 2), (-1,))}
    return c.but(src_strategy=c.strategy("deep", layouts), dst_strategy=None)


@bad(LayoutError, "different numbers of dimensions", "'w'")
def strategies_of_different_numbers_of_dimensions(c: Conversion) -> Conversion:
    layouts = {"w": RawLayout((2,), (0, -1, -1)), "b": RawLayout((2,), (-1,))}
    return c.but(dst_strategy=c.strategy("deep", layouts))


@bad(SourceError, "ranks its strategy does not know", "expected: ranks 0 to 1", "got: rank 2 and 1 more")
def a_mesh_of_fewer_ranks_than_the_checkpoint(c: Conversion) -> Conversion:
    return c.but(src_strategy=c.strategy("small", {"w": RawLayout((2,), (-1, 0)), "b": RawLayout((2,), (-1,))}))


@bad(CoverageError, "w'", "rank 4", "the shards of 4 of 8 ranks", "strategy")
def a_mesh_of_more_ranks_than_the_checkpoint(c: Conversion) -> Conversion:
    return c.but(src_strategy=c.strategy("large", {"w": RawLayout((8,), (0, -1)), "b": RawLayout((8,), (-1,))}))


@bad(LayoutError, "mesh does not fit", "'b'", "same device number")
def meshes_of_one_strategy_that_differ(c: Conversion) -> Conversion:
    return c.but(src_strategy=c.strategy("mixed", {"w": RawLayout((2, 2), (-1, 0)), "b": RawLayout((8,), (-1,))}))


# The target.


@bad(TargetError, "target is the source")
def target_equals_source(c: Conversion) -> Conversion:
    return c.but(dst=c.src)


@bad(TargetError, "target is the source")
def target_equals_source_in_other_words(c: Conversion) -> Conversion:
    return c.but(dst=c.src / "." / "rank_0" / ".." / "")


@bad(TargetError, "target is the source")
def target_equals_source_through_a_link(c: Conversion) -> Conversion:
    (c.folder / "link").symlink_to("src", target_is_directory=True)
    return c.but(dst=c.folder / "link")


@bad(TargetError, "target is the source")
def target_rank_folder_leads_to_the_source(c: Conversion) -> Conversion:
    c.dst.mkdir()
    (c.dst / "rank_1").symlink_to(c.src / "rank_3", target_is_directory=True)
    return c


@bad(TargetError, "target is the source")
def source_is_a_file_in_a_rank_folder_of_the_target(c: Conversion) -> Conversion:
    file = c.shard(0).with_name(f"whole{c.shard(0).suffix}")
    c.shard(0).rename(file)
    return c.but(src=file, dst=c.src, src_strategy=None, dst_strategy=None)


@bad(TargetError, "target is the source")
def a_source_file_leads_to_the_target(c: Conversion) -> None:
    c.written(1).parent.mkdir(parents=True)
    c.shard(2).rename(c.written(1))
    c.shard(2).symlink_to(c.written(1))


@bad(TargetError, "target is not a folder", "got: a file")
def a_file_in_the_place_of_the_target(c: Conversion) -> None:
    c.dst.write_text("mine")


@bad(TargetError, "file", "where: .*/mine")
def a_file_in_the_way_to_the_target(c: Conversion) -> Conversion:
    (c.folder / "mine").write_text("mine")
    return c.but(dst=c.folder / "mine" / "more" / "dst")


@bad(UsageError, "unlisted.*drop", "dst|target strategy", without=("where", "what to do"))
def drop_without_a_target_strategy(c: Conversion) -> Conversion:
    return c.but(dst_strategy=None, options=("--unlisted", "drop"))


EVERY = [
    pytest.param(name, kind, id=f"{name}-{kind}", marks=pytest.mark.slow if kind != case.kinds[0] else ())
    for name, case in CASES.items()
    for kind in case.kinds
]


def spoiled(tmp_path: Path, name: str, kind: str) -> Conversion:
    conversion = make(tmp_path, kind)
    return CASES[name].spoil(conversion) or conversion


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_refused(tmp_path: Path, name: str, kind: str) -> None:
    case = CASES[name]
    conversion = spoiled(tmp_path, name, kind)
    before = listing(tmp_path)
    for command in ("transform", "plan"):
        finished = conversion.run(command)
        assert finished.code == case.error.exit_code, finished
        assert finished.out == ""
        assert finished.err.startswith("reshard-mpi: error: ") and "Traceback" not in finished.err
        case.check(finished.err)
    unlisted = "drop" if "drop" in conversion.options else "follow"
    with pytest.raises(case.error) as caught:
        reshard_mpi.transform_checkpoints(
            conversion.src,
            conversion.dst,
            "checkpoint_",
            conversion.src_strategy,
            conversion.dst_strategy,
            1,
            kind,
            unlisted=unlisted,
        )
    case.check(str(caught.value))
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["no_such_folder", "an_empty_shard", "a_strategy_of_random_bytes", "target_equals_source"]
)
def test_refused_by_the_real_command(tmp_path: Path, name: str) -> None:
    conversion = spoiled(tmp_path, name, "ckpt")
    before = listing(tmp_path)
    finished = transform_apart(conversion, "--jobs", "2")
    assert finished.code == CASES[name].error.exit_code, finished
    CASES[name].check(finished.err)
    assert "Traceback" not in finished.err and not finished.out
    assert listing(tmp_path) == before


@of_every_kind
@pytest.mark.parametrize("missing", [(0,), (2, 3), (0, 3)])
def test_missing_rank_folders_whose_boxes_replicas_hold(tmp_path: Path, kind: str, missing: tuple[int, ...]) -> None:
    conversion = make(tmp_path, kind)
    conversion.remove(*missing)
    conversion.done()
    assert_right(conversion)


USAGE = {
    "more_parts_than_can_be": (["--part", f"0/{10**19}"], "--part: expected I/N with N of 18 digits at most"),
    "part_equal_to_the_number_of_parts": (
        ["--part", "3/3"],
        r"--part: expected I/N with I from 0 to N-1, or auto/N, got '3/3'",
    ),
    "part_of_none": (["--part", "0/0"], "--part: expected I/N"),
    "part_without_number": (["--part", "1"], "--part: expected I/N"),
    "part_negative": (["--part", "-1/3"], "--part"),
    "rank_out_of_range": (["--rank", "2"], "target rank out of range\n  expected: 0 to 1\n  got: 2"),
    "one_rank_of_two_out_of_range": (["--rank", "0", "--rank", "17"], "target rank out of range(.|\n)*got: 17"),
    "rank_negative": (["--rank", "-1"], "--rank: expected ranks, such as 3 or 0-3,8, got '-1'"),
    "rank_no_number": (["--rank", "\u00b2"], "--rank: expected ranks"),
    "rank_range_backwards": (["--rank", "3-1"], "--rank: expected the lower rank first, 1-3, got '3-1'"),
    "rank_range_open": (["--rank", "0-"], "--rank: expected ranks, such as 3 or 0-3,8, got '0-'"),
    "rank_list_with_a_hole": (["--rank", "0,,1"], "--rank: expected ranks, such as 3 or 0-3,8, got '0,,1'"),
    "rank_range_huge": (["--rank", "0-" + "9" * 18], "--rank: expected at most 65536 ranks"),
    "rank_of_many_digits": (["--rank", "9" * 5000], "--rank: expected ranks"),
    "rank_range_out_of_range": (["--rank", "1-5"], "target rank out of range(.|\n)*got: 2"),
    "rank_and_part": (["--rank", "0", "--part", "0/2"], "not allowed with"),
    "resume_and_overwrite": (["--resume", "--overwrite"], "not allowed with"),
    "jobs_zero": (["--jobs", "0"], "--jobs: expected 1 or more, got '0'"),
    "jobs_no_number": (["--jobs", "many"], "--jobs: expected 1 or more, got 'many'"),
    "unknown_option": (["--rename", "a=b"], "no such option: --rename"),
    "shortened_option": (["--over"], "no such option: --over; did you mean '--overwrite'[?]"),
    "unknown_format": (["--to", "gguf"], "--to: expected ckpt, .* or megatron, got 'gguf'"),
    "unknown_unlisted": (["--unlisted", "ignore"], "--unlisted: expected follow, replicate or drop, got 'ignore'"),
    "unknown_progress": (["--progress", "loud"], "--progress: expected .*, got 'loud'"),
    "prefix_of_another_folder": (["--prefix", "../x"], "prefix(.|\n)*got: '../x'"),
    "prefix_that_hides": (["--prefix", ".x"], "prefix(.|\n)*got: '.x'"),
    "prefix_that_the_rank_continues": (["--prefix", "step_7"], "the number of the rank follows(.|\n)*got: 'step_7'"),
    "report_without_folder": (["--report", "missing/report.json"], "report(.|\n)*where: missing/report.json"),
    "report_over_a_folder": (["--report", "/"], "report(.|\n)*where: /"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage(tmp_path: Path, name: str) -> None:
    options, says = USAGE[name]
    conversion = make(tmp_path)
    before = listing(tmp_path)
    finished = conversion.run("transform", *options)
    assert finished.code == 2 and finished.out == "" and "Traceback" not in finished.err, finished
    assert re.search(says, finished.err), finished.err
    assert listing(tmp_path) == before


# What is wrong, and where to look.
_TOLD = r"(reshard-mpi( [a-z-]+)?): error: .*\n  what to do: \1 --help\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert"],
        ["transform"],
        ["transform", "a"],
        ["inspect"],
        ["ranks"],
        ["ranks", "x"],
        ["merge-strategies", "a"],
    ],
)
def test_wrong_commands(tmp_path: Path, arguments: list[str]) -> None:
    finished = run_here(*arguments)
    assert finished.code == 2 and re.fullmatch(_TOLD, finished.err), finished


def test_wrong_usage_of_the_functions(c: Conversion, tmp_path: Path) -> None:
    paths = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    before = listing(tmp_path)
    for call in (
        lambda: reshard_mpi.transform_checkpoints(*paths, -1),
        lambda: reshard_mpi.transform_checkpoints(*paths, 1, "gguf"),
        lambda: reshard_mpi.transform_checkpoints(*paths, unlisted="ignore"),
        lambda: reshard_mpi.transform_checkpoints(c.src, c.dst, "a/b", c.src_strategy, c.dst_strategy),
        lambda: reshard_mpi.rank_list_for_transform(2, c.src_strategy, c.dst_strategy),
        lambda: reshard_mpi.rank_list_for_transform(-1, c.src_strategy, c.dst_strategy),
        lambda: reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy, rank=[2]),
        lambda: reshard_mpi.load_rank(2, c.src, c.src_strategy, c.dst_strategy),
        lambda: reshard_mpi.load_rank(0, c.src, c.src_strategy, None, unlisted="drop"),
        lambda: reshard_mpi.transform_checkpoint_by_rank(0, {0: c.shard(0)}, c.folder / "out.gguf", *paths[3:]),
    ):
        with pytest.raises(UsageError, match="expected: "):
            call()
    assert listing(tmp_path) == before


def test_a_target_by_rank_that_is_a_source(c: Conversion, tmp_path: Path) -> None:
    files = {rank: c.shard(rank) for rank in range(4)}
    (tmp_path / "link.ckpt").symlink_to(c.shard(2))
    (tmp_path / "folder").symlink_to(c.src / "rank_1", target_is_directory=True)
    before = listing(tmp_path)
    for target in (c.shard(2), tmp_path / "link.ckpt", tmp_path / "folder" / ".." / "rank_1" / c.shard(1).name):
        with pytest.raises(TargetError, match=r"one of the sources(.|\n)*expected: (.|\n)*where: "):
            reshard_mpi.transform_checkpoint_by_rank(0, files, target, c.src_strategy, c.dst_strategy)
    assert listing(tmp_path) == before


def test_a_target_by_rank_that_is_a_strategy(c: Conversion, tmp_path: Path) -> None:
    files = {rank: c.shard(rank) for rank in range(4)}
    before = listing(tmp_path)
    for strategy in (c.src_strategy, c.dst_strategy):
        for given in (strategy, strategy.parent):
            pair = (given, c.dst_strategy) if strategy == c.src_strategy else (c.src_strategy, given)
            with pytest.raises(TargetError, match=r"one of the strategies(.|\n)*expected: (.|\n)*where: "):
                reshard_mpi.transform_checkpoint_by_rank(0, files, strategy, *pair)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["src/rank_0/checkpoint_0.ckpt", "notes.json", "dst/rank_1/checkpoint_1.ckpt", "dst/.metadata"]
)
def test_a_report_in_the_place_of_something_else(c: Conversion, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.json").write_text('{"current_stage": 1}')
    (tmp_path / "dst" / "rank_1").mkdir(parents=True)
    before = listing(tmp_path)
    said = c.refused("transform", "--report", str(tmp_path / name), code=2)
    assert "the report cannot be written" in said and name in said
    assert "what to do: choose another name" in said
    assert listing(tmp_path) == before


def test_files_by_rank_that_are_not_there(c: Conversion) -> None:
    strategies = (c.src_strategy, c.dst_strategy)
    with pytest.raises(SourceError, match=r"shard of rank 1(.|\n)*got: nothing(.|\n)*where: .*gone"):
        reshard_mpi.transform_checkpoint_by_rank(
            0, {0: c.shard(0), 1: c.folder / "gone"}, c.folder / "o.ckpt", *strategies
        )
    with pytest.raises(SourceError, match="map of checkpoint files is empty"):
        reshard_mpi.transform_checkpoint_by_rank(0, {}, c.folder / "o.ckpt", *strategies)
    with pytest.raises(CoverageError, match="one of ranks 1, 3"):
        reshard_mpi.transform_checkpoint_by_rank(0, {0: c.shard(0)}, c.folder / "o.ckpt", *strategies)
    with pytest.raises(CoverageError, match="one of ranks 1, 3"):
        reshard_mpi.transform_checkpoint_by_rank(0, {0: c.shard(0)}, c.folder / "no" / "o.ckpt", *strategies)
    assert not list(c.folder.glob("**/*o.ckpt*")) and not (c.folder / "no").exists()


def test_the_folder_of_a_target_by_rank_is_made(c: Conversion) -> None:
    files = {rank: c.shard(rank) for rank in range(4)}
    target = c.folder / "new" / "rank_0" / "o.ckpt"
    reshard_mpi.transform_checkpoint_by_rank(0, files, target, c.src_strategy, c.dst_strategy)
    assert target.is_file() and list(target.parent.iterdir()) == [target]
    (c.folder / "file").touch()
    with pytest.raises(TargetError, match="not a folder"):
        reshard_mpi.transform_checkpoint_by_rank(0, files, c.folder / "file" / "o.ckpt", c.src_strategy, c.dst_strategy)


# A target folder with something in it.


def test_a_finished_target(c: Conversion, tmp_path: Path) -> None:
    c.done()
    before = listing(tmp_path)
    for command in ("transform", "plan"):
        said = c.refused(command)
        assert said.startswith("reshard-mpi: error: target rank 0 is there already (and 1 more")
        assert "complete by the record of this run" in said and "--resume" in said
        assert "--overwrite" in said
    assert listing(tmp_path) == before
    assert "2 were complete already" in c.done("transform", "--resume").out
    assert listing(tmp_path) == before
    c.done("transform", "--overwrite")
    again = listing(tmp_path)
    timed = {name for name in before if re.search(r"/\.reshard_mpi/(rank_\d|committed)\.json", name)}
    assert again.keys() == before.keys() and len(timed) == 3  # they have the times of targets
    assert all(again[name] == before[name] for name in before.keys() - timed)


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_a_target_that_another_program_wrote(c: Conversion, tmp_path: Path, options: tuple[str, ...]) -> None:
    c.written(1).parent.mkdir(parents=True)
    c.written(1).write_text("mine")
    before = listing(tmp_path)
    said = c.refused("transform", *options)
    assert "a file that this run has not written lies where target rank 1 goes" in said
    assert "of another origin" in said and "--overwrite" not in said
    assert listing(tmp_path) == before


@pytest.mark.parametrize("options", [(), ("--resume",), ("--overwrite",)])
def test_a_place_that_no_target_can_take(c: Conversion, options: tuple[str, ...]) -> None:
    c.written(1).mkdir(parents=True)
    said = c.refused("transform", *options)
    assert "a folder is in the place of a target" in said
    assert str(c.written(1)) in said
    with pytest.raises(TargetError, match="a folder is in the place"):
        reshard_mpi.transform_checkpoint_by_rank(
            1, {1: c.shard(1), 2: c.shard(2)}, c.written(1), c.src_strategy, c.dst_strategy
        )
    shutil.rmtree(c.written(1).parent)
    c.written(1).parent.write_text("a file")
    assert "rank_1" in c.refused("transform", *options) and listing(c.dst) == {"rank_1": b"a file"}


@pytest.mark.slow
def test_a_target_that_holds_another_run(c: Conversion, tmp_path: Path) -> None:
    c.done("transform", "--rank", "0")
    before = listing(tmp_path)
    another_strategy = f"--dst-strategy {c.src_strategy}, target ranks: 4"
    for other, now, then in (
        (["--unlisted", "replicate"], "--unlisted 'replicate'", "--unlisted 'follow'"),
        (["--prefix", "x"], "--prefix 'x'", "--prefix 'checkpoint_'"),
        (["--to", "hdf5"], "targets in hdf5", "targets in ckpt"),
        (["--resume", "--strict"], "--strict", "no --strict"),
        ([], another_strategy, f"--dst-strategy {c.dst_strategy}, "),
    ):
        for command in ("transform", "plan"):
            asked = c if other else c.but(dst_strategy=c.src_strategy)
            said = asked.refused(command, "--rank", "1", *other)
            assert "the target folder holds another run" in said
            assert all(f"\n  {label}: " in said for label in LABELS)
            assert f"\n  expected: an empty folder, or a run with {now}\n" in said, said
            assert f"\n  got: a run with {then}" in said and not re.search("[0-9a-f]{64}", said), said
    assert listing(tmp_path) == before
    c.done("transform", "--rank", "1")  # the same run joins
    c.done("transform", "--prefix", "x", "--overwrite")


def test_two_live_runs_on_one_target(tmp_path: Path) -> None:
    import fcntl

    c = make(tmp_path)
    c.done("transform", "--rank", "0")
    with (c.dst / ".reshard_mpi" / "rank_1.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # as a process does while it writes target 1
        before = listing(tmp_path)
        for again in ("--resume", "--overwrite"):
            said = c.refused("transform", again)
            assert "target rank 1 is being written by another process" in said
            assert all(f"\n  {label}: " in said for label in LABELS)
        assert listing(tmp_path) == before
    c.done("transform", "--resume")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(c: Conversion) -> None:
    c.dst.mkdir(mode=0o500)
    said = c.refused()
    assert "cannot be written" in said and str(c.dst) in said
    assert not listing(c.dst)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    assert "Traceback" not in make(tmp_path).but(dst=Path("/proc/dst")).refused()


def test_a_shard_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c, open_file = make(tmp_path), os.open

    def refused(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith(c.shard(0).name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refused)  # root may read anything
    finished = run_here("inspect", c.shard(0))
    assert finished.code == 3 and "what to do: get the right to read it" in finished.err, finished


# Other commands.


def test_ranks_out_of_range(c: Conversion) -> None:
    finished = run_here("ranks", "2", "--src-strategy", c.src_strategy, "--dst-strategy", c.dst_strategy)
    assert finished.code == 2 and "expected: 0 to 1" in finished.err and "got: 2" in finished.err and not finished.out


def test_nothing_to_inspect(c: Conversion, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    shutil.copy(make(tmp_path / "other", "hdf5").shard(2), c.shard(2).parent)
    c.shard(3).write_bytes(b"")
    for path, says in (
        (tmp_path / "missing", "there is nothing to inspect"),
        (tmp_path / "empty", "must be called rank_0, rank_1 and so on"),
        (tmp_path / "notes.txt", "neither a checkpoint nor a strategy"),
        (c.src, "two formats"),
        (c.shard(3), "a shard is empty"),
    ):
        finished = run_here("inspect", path)
        assert finished.code == 3 and says in finished.err and "where: " in finished.err, finished
        assert not finished.out


def test_stages_that_cannot_be_merged(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        finished = run_here("merge-strategies", tmp_path / folder, tmp_path / "out.ckpt")
        assert finished.code == 3 and "where: " in finished.err and not (tmp_path / "out.ckpt").exists()
    c = make(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "out.ckpt"):
        finished = run_here("merge-strategies", c.src_strategy, out)
        assert finished.code == 3 and "cannot be written" in finished.err, finished


@pytest.mark.parametrize("name", few(1, ["src", "dst", "src_strategy.ckpt", "dst_strategy.ckpt"]))
def test_a_demo_where_one_is_already(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "file").write_text("")
    before = listing(tmp_path)
    for folder, says in ((tmp_path, "has a demo already"), (tmp_path / "file", "file")):
        finished = run_here("demo", folder)
        assert finished.code == 3 and says in finished.err
    assert listing(tmp_path) == before
