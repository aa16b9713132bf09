"""`--accumulated` on the command line: what it says, what a target folder remembers, and what it is not right for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import as_read, read_shard, write_ranks, write_shard
from support.command_line import done, run_apart, run_here
from support.conversions import (
    DST_LAYOUTS,
    SRC_LAYOUTS,
    TENSORS,
    Conversion,
    listing,
    make,
    transform_by_function,
    write_conversion,
)
from support.examples import few, few_cases
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.checkpoints import compare_replicas
from reshard_mpi.errors import CoverageError, DifferenceError, DisagreementError, SourceError, StrategyError, UsageError
from reshard_mpi.runs.progress import RunStatus

NAME = "accu_grads.w"
MEAN, SUM = ("--accumulated", "mean"), ("--accumulated", "sum")
# Each of 4 ranks has its own columns of rows 0 to 7; ranks 0 and 2 hold the same columns, and 1 and 3.
PARTS = [np.random.default_rng(rank).standard_normal((8, 2)).astype(np.float32) for rank in range(4)]
TOTAL = np.concatenate([PARTS[0] + PARTS[2], PARTS[1] + PARTS[3]], axis=1)
# Every rank holds all.
REPLICATED = 'mesh = {{ card = {} }}\n[[parameter]]\nmatch = "*"\n'


def accumulating(folder: Path, kind: str = "ckpt", parts: list[np.ndarray] = PARTS, name: str = NAME) -> Conversion:
    """Write the small conversion with an accumulated gradient of which each rank has its own sum."""
    c = make(folder, kind)
    for rank, part in enumerate(parts):
        c.rewrite(rank, {name: part})
    return c


def replicated(folder: Path, ranks: int) -> Path:
    """Write a spec by which so many ranks hold everything."""
    spec = folder / f"replicated_{ranks}.toml"
    spec.write_text(REPLICATED.format(ranks))
    return spec


def written(c: Conversion, rank: int, name: str = NAME) -> np.ndarray:
    """Return an accumulated gradient of float32 as a target shard has it."""
    dtype, shape, content = read_shard(c.written(rank))[name]
    assert dtype == "float32"
    return np.frombuffer(content, np.float32).reshape(shape)


def test_audit_judges_the_mean_of_partial_sums(tmp_path: Path) -> None:
    """That they differ is no flaw of a save in the middle of a step; a value that no training has is one."""
    c = accumulating(tmp_path)
    report = reshard_mpi.audit(c.src, c.src_strategy)
    assert report.is_sound() and any("the mean of 2 replicas" in note for note in report.notes)
    c.rewrite(3, {NAME: np.where(PARTS[3] == PARTS[3].max(), np.float32(np.nan), PARTS[3])})
    findings = [each for each in reshard_mpi.audit(c.src, c.src_strategy).findings if each.tensor == NAME]
    assert findings and not reshard_mpi.audit(c.src, c.src_strategy).is_sound()


# What comes of it, and what is said


@pytest.mark.parametrize(
    ("option", "whole"), few(1, [(MEAN, TOTAL / np.float32(2)), (SUM, TOTAL)]), ids=["mean", "sum"]
)
def test_targets_that_cut_them_get_rows_of_what_is_joined(
    tmp_path: Path, option: tuple[str, str], whole: np.ndarray
) -> None:
    c = accumulating(tmp_path)
    finished = c.done("transform", *option, "--verify")
    says = f"note: accumulated gradients accu_grads.*: the {option[1]} of 2 replicas, added in float32 in the order of"
    assert f"{says} their ranks; " in finished.err
    for rank in range(2):
        assert written(c, rank).tobytes() == whole[rank * 4 : rank * 4 + 4].tobytes()
        others = {name: held for name, held in read_shard(c.written(rank)).items() if name != NAME}
        assert others == c.expected(rank)
    c.done("verify", *option)
    done("verify", c.dst, "--jobs", "1")


@pytest.mark.slow
def test_replicas_of_the_target_get_the_mean_each_or_one_the_sum(tmp_path: Path) -> None:
    c = accumulating(tmp_path).but(dst_strategy=replicated(tmp_path, 3))
    c.done("transform", *MEAN)
    assert all(written(c, rank).tobytes() == (TOTAL / np.float32(2)).tobytes() for rank in range(3))
    c = c.but(dst=tmp_path / "sum")
    assert "that hold a piece the lowest gets it, the others zeros" in c.done("transform", *SUM, "--verify").err
    assert [written(c, rank).tobytes() for rank in range(3)] == [TOTAL.tobytes(), *[bytes(TOTAL.nbytes)] * 2]
    assert (c.dst / "reshard.json").is_file()
    done("verify", c.dst, "--jobs", "1")  # its copies differ, as they must
    c.done("diff", *SUM)
    c.done("verify", *SUM)


def test_a_sum_that_one_rank_has_goes_to_one_rank(tmp_path: Path) -> None:
    """From one rank to three that add theirs: copies would count three times."""
    write_shard({"w": TENSORS["w"], NAME: TOTAL}, tmp_path / "one.ckpt")
    spec, zeros = replicated(tmp_path, 3), np.zeros_like(TOTAL)
    for how, expected in (("mean", [TOTAL] * 3), ("sum", [TOTAL, zeros, zeros])):
        reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / how, dst_strategy=spec, accumulated=how)
        for rank, array in enumerate(expected):
            shard = read_shard(tmp_path / how / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
            assert shard == as_read({"w": TENSORS["w"], NAME: array})
    arguments = ("plan", str(tmp_path / "one.ckpt"), "x", "--dst-strategy", str(spec), *MEAN)
    assert "accu_grads.*: each piece is on one rank, nothing to join" in run_here(*arguments).err


def test_what_a_plan_says(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    finished = c.run("plan", *MEAN, "--verbose")
    assert f"{NAME} float32 [8, 4], on rank 0 [4, 4]: the mean of its replicas" in finished.out
    assert "the mean of 2 replicas" in finished.err
    targets = json.loads(c.run("plan", *SUM, "--json").out)["targets"]
    assert all("the sum of 2 replicas" in " ".join(target["notes"]) for target in targets)
    assert [target["read_ranks"] for target in targets] == [[0, 1, 2, 3]] * 2


def test_a_checkpoint_without_accumulated_gradients(tmp_path: Path) -> None:
    finished = make(tmp_path).run("transform", *SUM)
    says = "note: no target has a tensor called accu_grads.* or grad_sum.*, as accumulated gradients are: --accumulated"
    assert finished.code == 0 and f"{says} sum is no use" in finished.err


def test_refused_as_ever_unless_it_is_asked_for(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    for options in ((), ("--accumulated", "refuse")):
        said = c.refused("transform", *options)
        assert f"copies of '{NAME}' differ" in said
        assert "--accumulated mean or sum" in said
    assert c.run("transform", "--accumulated", "all").code == 2
    with pytest.raises(UsageError, match="unknown value of accumulated"):
        reshard_mpi.transform(c.src, c.dst, accumulated="all")


# However it is run


@by_one_mpi
def test_any_processes_write_the_same(tmp_path: Path, mpi: MPI) -> None:
    c = accumulating(tmp_path)
    alone = c.but(dst=tmp_path / "alone")
    assert run_apart(*alone.arguments("transform", *SUM), check=True).code == 0
    for name, options, launched in (("jobs", ("--jobs", "3"), None), ("mpi", (), mpi)):
        other = c.but(dst=tmp_path / name)
        arguments = [argument for argument in other.arguments("transform", *SUM) if argument not in ("--jobs", "1")]
        run_apart(*arguments, *options, "--verify", mpi=launched, ranks=3, check=True)
        assert [read_shard(other.written(rank)) for rank in range(2)] == [
            read_shard(alone.written(rank)) for rank in range(2)
        ]


def test_a_target_folder_remembers_it(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    c.done("transform", *MEAN, "--rank", "0")
    for other in (SUM, ()):
        said = c.refused("transform", *other, "--resume")
        assert "the target folder holds another run" in said
        assert "got: a run with --accumulated 'mean'" in said
    assert "1 was complete already" in c.done("transform", *MEAN, "--resume").out
    assert json.loads((c.dst / "reshard.json").read_text())["accumulated"] == "mean"


@pytest.mark.parametrize("option", [MEAN, pytest.param(SUM, marks=pytest.mark.slow)], ids=["mean", "sum"])
@pytest.mark.parametrize("removed", few(1, ["", ".reshard_mpi", "reshard.json"]))
def test_verify_takes_it_from_the_target(tmp_path: Path, option: tuple[str, str], removed: str) -> None:
    c = accumulating(tmp_path)
    c.done("transform", *option)
    if removed == ".reshard_mpi":
        shutil.rmtree(c.dst / removed)
    elif removed:
        (c.dst / removed).unlink()
    finished = c.run("verify")
    says = f"note: accumulated gradients are compared with the {option[1]} of the replicas, as {c.dst} says"
    assert finished.code == 0 and says in finished.err, finished
    assert says not in c.run("verify", *option).err
    assert says in c.done("verify", "--dtype", "*.w=fp32").err
    reshard_mpi.verify(c.src, c.dst, c.src_strategy, c.dst_strategy)


def test_verify_tells_who_forgot_it(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    transform_by_function(c, accumulated="mean")  # which keeps no record
    for option in ((), SUM):
        assert "give the --accumulated that it was made with" in c.refused("verify", *option, code=4)
    shard = read_shard(c.written(0))
    arrays = {name: np.frombuffer(held, dtype).reshape(shape).copy() for name, (dtype, shape, held) in shard.items()}
    arrays[NAME][1, 2] += 1
    write_shard(arrays, c.written(0))
    said = c.refused("verify", *MEAN, code=4)
    assert f"'{NAME}' differs from its source at element [1, 2]" in said
    assert f"({(TOTAL / np.float32(2))[1, 2].tobytes().hex()}) joined of several ranks" in said


def test_functions_have_it(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    transform_by_function(c, accumulated="mean")
    assert written(c, 1).tobytes() == (TOTAL[4:] / np.float32(2)).tobytes()
    strategies = (c.src_strategy, c.dst_strategy)
    reshard_mpi.verify(c.src, c.dst, *strategies, accumulated="mean")
    loaded = reshard_mpi.load_rank(1, c.src, *strategies, accumulated="sum")
    assert loaded[NAME].tobytes() == TOTAL[4:].tobytes()
    assert reshard_mpi.plan(c.src, *strategies, accumulated="sum").targets[0].read_ranks == (0, 1, 2, 3)
    with pytest.raises(CoverageError, match="parts of the sums"):
        reshard_mpi.load_rank(1, {0: c.shard(0), 1: c.shard(1)}, *strategies, accumulated="sum")


@pytest.mark.parametrize("shards_at_once", [1, 2, 3])
@pytest.mark.parametrize("same", [[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 2, 2], [3, 2, 2, 2]], ids=str)
def test_copies_of_one_sum_that_are_not_compared_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: list[int], shards_at_once: int
) -> None:
    """Shards with very many tensors are opened a few at a time."""
    monkeypatch.setattr(compare_replicas, "_MAX_TENSORS_AT_ONCE", 2 * shards_at_once)
    w, spec = np.ones((8, 2), np.float32), replicated(tmp_path, 4)
    write_ranks({rank: {"w": w, NAME: PARTS[number]} for rank, number in enumerate(same)}, tmp_path / "src")
    with pytest.raises(DisagreementError, match=f"copies of '{NAME}' are the same") as refused:
        reshard_mpi.plan(tmp_path / "src", spec, accumulated="sum")
    pairs = [(one, other) for other in range(4) for one in range(other) if same[one] == same[other]]
    assert any(f"ranks {one}, {other}" in str(refused.value) for one, other in pairs)


@pytest.mark.parametrize("portion", [1, 5])
def test_different_sums_in_many_batches_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(compare_replicas, "_MAX_TENSORS_AT_ONCE", 2)
    monkeypatch.setattr(compare_replicas, "_MAX_DIGESTS", portion)
    w, zeros, spec = np.ones((8, 2), np.float32), np.zeros((8, 2), np.float32), replicated(tmp_path, 4)
    parts = {"accu_grads.w": [*PARTS[:2], zeros, zeros], "grad_sum.w": PARTS}
    ranks = {rank: {"w": w, **{name: of[rank] for name, of in parts.items()}} for rank in range(4)}
    write_ranks(ranks, tmp_path / "src")
    whole = reshard_mpi.load_rank(0, tmp_path / "src", spec, accumulated="sum")
    assert whole["accu_grads.w"].tobytes() == (PARTS[0] + PARTS[1]).tobytes()


def test_what_is_excluded_need_not_be_a_sum(tmp_path: Path) -> None:
    """A counter may be called like an accumulated gradient; who leaves it out is not asked for its type."""
    c = accumulating(tmp_path)
    for rank in range(4):
        c.rewrite(rank, {NAME: PARTS[rank], "accu_grads.b": np.full(c.arrays(rank)["b"].shape, 7, np.int32)})
    assert "'accu_grads.b' is called like an accumulated gradient" in c.refused("transform", *MEAN, "--include", "*")
    c.done("transform", *MEAN, "--exclude", "accu_grads.b")
    assert written(c, 1).tobytes() == (TOTAL[4:] / np.float32(2)).tobytes()
    assert "accu_grads.b" not in read_shard(c.written(0))


@pytest.mark.parametrize("option", [("--exclude", NAME), ("--unlisted", "drop")], ids=" ".join)
def test_what_a_plan_says_of_those_that_are_left_out(tmp_path: Path, option: tuple[str, str]) -> None:
    finished = accumulating(tmp_path).run("plan", "-v", *MEAN, *option)
    lines = [line for line in finished.out.splitlines() if NAME in line]
    assert finished.code == 0 and lines in ([], [f"{NAME}: left out"]), lines


@pytest.mark.parametrize("spoiled", few(1, ["first", "second"]))
def test_a_comparison_takes_none_of_several_sums_for_all(tmp_path: Path, spoiled: str) -> None:
    c, other = accumulating(tmp_path / "sums"), accumulating(tmp_path / "same", parts=[PARTS[n % 2] for n in range(4)])
    first, second = (c, other) if spoiled == "first" else (other, c)
    pair = (first.src, second.src, first.src_strategy, second.src_strategy)
    with pytest.raises(DisagreementError, match=f"copies of '{NAME}' differ") as refused:
        reshard_mpi.diff(*pair)
    assert "how to join them" in str(refused.value) and str(c.shard(2)) in str(refused.value)
    with pytest.raises(DifferenceError, match=f"'{NAME}' differs"):
        reshard_mpi.diff(*pair, accumulated="mean")
    reshard_mpi.diff(c.src, c.src, c.src_strategy, c.src_strategy, accumulated="sum")


# One target at a time


def by_rank(c: Conversion, rank: int, shards: list[int], **options: Any) -> reshard_mpi.Report:
    files = {number: c.shard(number) for number in shards}
    strategies = (c.src_strategy, c.dst_strategy)
    return reshard_mpi.transform_checkpoint_by_rank(rank, files, c.written(rank), *strategies, **options)


def test_what_a_caller_is_told_of_one_target(tmp_path: Path) -> None:
    told: list[RunStatus] = []
    report = by_rank(make(tmp_path), 1, [0, 1, 2, 3], progress=told.append)
    (target,) = report.targets
    assert (target.rank, target.processes, report.processes) == (1, 1, 1) and target.path.endswith("checkpoint_1.ckpt")
    assert (told[-1].stage, told[-1].bytes_done, told[-1].is_complete) == ("writing", report.written_bytes, True)


@pytest.mark.parametrize(("how", "whole"), [("mean", TOTAL / np.float32(2)), ("sum", TOTAL)])
def test_shards_that_a_target_needs_are_listed(tmp_path: Path, how: str, whole: np.ndarray) -> None:
    c = accumulating(tmp_path)
    strategies = (c.src_strategy, c.dst_strategy)
    assert len(reshard_mpi.rank_list_for_transform(1, *strategies)) == 2
    listed = reshard_mpi.rank_list_for_transform(1, *strategies, accumulated=how)
    assert listed == [0, 1, 2, 3]
    assert by_rank(c, 1, listed, accumulated=how).targets[0].read_ranks == (0, 1, 2, 3)
    assert written(c, 1).tobytes() == whole[4:].tobytes()
    named = ("--src-strategy", str(strategies[0]), "--dst-strategy", str(strategies[1]))
    assert run_here("ranks", "1", *named, "--accumulated", how).out.split() == ["0", "1", "2", "3"]


def test_a_rank_that_gets_zeros_needs_no_more_shards(tmp_path: Path) -> None:
    spec = replicated(tmp_path, 4)
    lists = [reshard_mpi.rank_list_for_transform(rank, spec, spec, accumulated="sum") for rank in range(4)]
    assert lists == [[0, 1, 2, 3], [1], [2], [3]]
    assert reshard_mpi.rank_list_for_transform(2, spec, spec, accumulated="mean") == [0, 1, 2, 3]


def test_a_sum_of_which_parts_may_be_elsewhere_is_refused(tmp_path: Path) -> None:
    """The usual list of shards has one of several replicas, of which each has a sum of its own."""
    c = accumulating(tmp_path)
    shards = reshard_mpi.rank_list_for_transform(1, c.src_strategy, c.dst_strategy)
    with pytest.raises(CoverageError, match=f"'{NAME}' is a partial sum") as refused:
        by_rank(c, 1, shards)
    assert "rank_list_for_transform" in str(refused.value) and not c.written(1).exists()
    with pytest.raises(CoverageError, match="parts of the sums"):
        by_rank(c, 1, shards, accumulated="mean")
    with pytest.raises(DisagreementError, match=f"copies of '{NAME}' differ"):
        by_rank(c, 1, [0, 1, 2, 3])
    c = accumulating(tmp_path / "end of a step", parts=[np.zeros((8, 2), np.float32)] * 4)
    by_rank(c, 1, shards)
    assert not written(c, 1).any()


# Types, formats and maps


@pytest.mark.parametrize("dtype", few(1, [np.float16, ml_dtypes.bfloat16, np.float64]), ids=["half", "brain", "double"])
def test_other_types_are_added_in_float32_and_rounded_once(tmp_path: Path, dtype: type) -> None:
    """Added in their own type, the small numbers would be lost one after another."""
    values = [1.0, 2.0**-9, 2.0**-9, 2.0**-9]
    w = np.ones(2, np.float32)
    ranks = {rank: {"w": w, "grad_sum.w": np.full(2, value, dtype)} for rank, value in enumerate(values)}
    write_ranks(ranks, tmp_path / "src")
    spec = replicated(tmp_path, 4)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", spec, accumulated="sum", replicas="any", verify=True)
    shard = read_shard(tmp_path / "dst" / "rank_0" / "checkpoint_0.ckpt")
    assert shard == as_read({"w": w, "grad_sum.w": np.full(2, np.float32(sum(values))).astype(dtype)})


def test_what_is_too_large_for_its_type_is_told(tmp_path: Path) -> None:
    sums = ([40000, 1, 2], [40001, 3, 4])
    ranks = {
        rank: {"w": np.ones(3, np.float32), "grad_sum.w": np.array(values, np.float16)}
        for rank, values in enumerate(sums)
    }
    write_ranks(ranks, tmp_path / "src")
    paths = (str(tmp_path / "src"), str(tmp_path / "dst"), "--src-strategy", str(replicated(tmp_path, 2)))
    finished = done("transform", *paths, *SUM, "--jobs", "1")
    assert "warning: 1 element of 'grad_sum.w' is too large for float16 and became infinite" in finished.err


def test_a_type_and_a_choice_beside_it(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    c.done("transform", *SUM, "--dtype", "*=fp64", "--include", "*w")
    for rank in range(2):
        dtype, _, content = read_shard(c.written(rank))[NAME]
        assert (dtype, content) == ("float64", TOTAL[rank * 4 : rank * 4 + 4].astype(np.float64).tobytes())
    left_out = c.but(dst=tmp_path / "without")
    assert "replicas" not in left_out.done("transform", *SUM, "--exclude", "accu_grads.*").err
    left_out.done("transform", "--overwrite", "--exclude", "accu_grads.*")
    assert NAME not in read_shard(left_out.written(0))


def test_one_of_several_ranks_gets_what_a_map_makes_of_a_sum(tmp_path: Path) -> None:
    c = accumulating(tmp_path).but(dst_strategy=replicated(tmp_path, 3))
    c.done("transform", *SUM, "--dtype", "fp64", "--verify")
    shards = [read_shard(c.written(rank))[NAME] for rank in range(3)]
    assert shards == [("float64", (8, 4), TOTAL.astype(np.float64).tobytes()), *[("float64", (8, 4), bytes(256))] * 2]
    finished = c.run("plan", *SUM, "--dtype", "fp64", "--verbose", "--overwrite")
    assert f"{NAME} float64 [8, 4]: as it is, converted from float32, the sum of replicas" in finished.out


@pytest.mark.parametrize("option", [MEAN, pytest.param(SUM, marks=pytest.mark.slow)], ids=["mean", "sum"])
def test_files_that_are_filled_hold_what_is_joined(tmp_path: Path, option: tuple[str, str]) -> None:
    c = accumulating(tmp_path).but(dst_strategy=None)
    c.done("transform", *option, "--to", "hf", "--max-shard-size", "200")
    assert len(list(c.dst.glob("*.safetensors"))) > 1
    again = c.but(src=c.dst, src_strategy=None, dst=tmp_path / "again")
    assert "each piece is on one rank, nothing to join" in again.done("transform", *option, "--to", "ckpt").err
    assert written(again, 0).tobytes() == (TOTAL / np.float32(2 if option == MEAN else 1)).tobytes()


def test_an_equation_beside_it(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    turned, renamed = tmp_path / "turned.toml", tmp_path / "renamed.toml"
    turned.write_text('[[map]]\neq = "w [r c] <=> kernel [c r]"\n')
    whole = c.but(dst_strategy=None)
    whole.done("transform", *MEAN, "--map", str(turned), "--forward")
    assert written(whole, 0, "accu_grads.kernel").tobytes() == np.ascontiguousarray(TOTAL.T / np.float32(2)).tobytes()
    renamed.write_text(f'[[map]]\neq = "{NAME} <=> main_grad.w"\n')
    other = whole.but(dst=tmp_path / "renamed")
    other.done("transform", *MEAN, "--map", str(renamed), "--forward")
    other = other.but(dst=tmp_path / "sum")
    assert "only one side is known as sums" in other.refused("transform", *SUM, "--map", str(renamed), "--forward")


def test_a_format_of_one_copy_takes_a_mean_and_no_sum_of_one_holder(tmp_path: Path) -> None:
    c = accumulating(tmp_path).but(dst_strategy=replicated(tmp_path, 2))
    for target in ("0", "1"):
        said = c.refused("transform", *SUM, "--to", "dcp", "--rank", target, code=2)
        assert f"the target has one copy of '{NAME}' for 2 ranks" in said
        assert "what to do: take --accumulated mean, " in said
    c.done("transform", *MEAN, "--to", "dcp")
    one = tmp_path / "one"
    done("transform", c.dst, str(one), "--to", "ckpt", "--jobs", "1")
    shard = read_shard(one / "rank_0" / "checkpoint_0.ckpt")
    assert shard[NAME][2] == (TOTAL / np.float32(2)).tobytes()
    cut = make(tmp_path / "cut").but(src=c.src)
    cut.done("transform", *SUM, "--to", "dcp")  # without replicas


# What it is not right for


def test_integers_are_refused(tmp_path: Path) -> None:
    c = accumulating(tmp_path, parts=[np.full((8, 2), rank, np.int32) for rank in range(4)])
    with pytest.raises(SourceError, match="holds no floating-point numbers"):
        transform_by_function(c, accumulated="sum")


def test_whose_place_no_strategy_tells_is_refused(tmp_path: Path) -> None:
    c = accumulating(tmp_path, name="grad_sum.x", parts=[part[:, 0] for part in PARTS])
    before = listing(tmp_path)
    with pytest.raises(StrategyError, match=r"the source strategy does not place 'grad_sum\.x'"):
        transform_by_function(c, accumulated="mean")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("w", "got"), [(None, "no parameter"), (np.ones((8, 1), np.float32), "'w' of shape [8, 2]")], ids=["none", "shape"]
)
def test_without_its_parameter_replicas_are_not_known(c: Conversion, w: np.ndarray | None, got: str) -> None:
    """Sums differ whatever the strategy; the copies of the parameter are what tells a wrong one."""
    for rank in range(4):
        c.rewrite(rank, {"moments.w": None, "w": w, NAME: PARTS[rank]})
    layouts = {**SRC_LAYOUTS, NAME: SRC_LAYOUTS["w"]}
    targets = {**DST_LAYOUTS, NAME: DST_LAYOUTS["w"]}
    c = c.but(src_strategy=c.strategy("src_listing", layouts), dst_strategy=c.strategy("dst_listing", targets))
    with pytest.raises(StrategyError, match="not certain which ranks hold parts of the same sum") as refused:
        transform_by_function(c, accumulated="mean")
    assert got in refused.value.got


def test_stages_that_share_it(tmp_path: Path) -> None:
    layout = RawLayout((2,), (-1, -1), stages=(0, 1))
    source = Side(4, 2, {"w": layout, NAME: layout}, frozenset({NAME}))
    target = Side(2, 1, dict.fromkeys(("w", NAME), RawLayout((2,), (-1, -1))), frozenset({NAME}))
    tensors = dict.fromkeys(("w", NAME), TENSORS["w"])
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    with pytest.raises(StrategyError, match=f"stages share '{NAME}'"):
        transform_by_function(c, accumulated="mean")
    back = write_conversion(tmp_path / "back", "ckpt", target, source, tensors)
    with pytest.raises(StrategyError, match=f"stages share '{NAME}'"):
        transform_by_function(back, accumulated="sum")
    transform_by_function(c)


@pytest.mark.parametrize("lost", ["shard", "tensor"])
def test_a_rank_whose_part_is_missing(tmp_path: Path, lost: str) -> None:
    c = accumulating(tmp_path)
    if lost == "shard":
        c.remove(3)
    else:
        c.rewrite(3, {})
    with pytest.raises(CoverageError, match=f"parts of the sums in '{NAME}' are missing") as refused:
        transform_by_function(c, accumulated="mean")
    assert "rank 3" in str(refused.value) or "ranks 3" in str(refused.value)


def test_a_damaged_shard_cannot_be_replaced(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    c.shard(2).write_bytes(c.shard(2).read_bytes()[:100])
    said = c.refused("transform", *MEAN)
    assert "each has a sum of its own, which no other shard has" in said
    assert "rank_2" in said


@few_cases(2, ("length", "targets"), [(1, 1), (3, 1), (6, 2), (64, 16), (64, 64)])
def test_copies_of_a_small_sum_are_not_added_by_targets_of_small_pieces(
    tmp_path: Path, length: int, targets: int
) -> None:
    random = np.random.default_rng(length)
    w, total = (random.standard_normal(length).astype(np.float32) for _ in range(2))
    write_ranks({rank: {"w": w, NAME: total} for rank in (0, 1)}, tmp_path / "src")
    cut = tmp_path / "cut.toml"
    cut.write_text(f'mesh = {{ fsdp = {targets} }}\n[[parameter]]\nmatch = "*"\nsplit = {{ 0 = ["fsdp"] }}\n')
    paths = (tmp_path / "src", tmp_path / "dst", replicated(tmp_path, 2), cut)
    with pytest.raises(DisagreementError, match=f"copies of '{NAME}' are the same, and would be added"):
        reshard_mpi.transform(*paths, accumulated="sum")
    reshard_mpi.transform(*paths, accumulated="mean")


@pytest.mark.parametrize("same", few(1, [[0, 1, 0, 1], [0, 1, 2, 1]]), ids=["all", "some"])
def test_copies_of_one_sum_are_not_added(tmp_path: Path, same: list[int]) -> None:
    """Ranks that have added their sums already, or hold copies, would have them counted twice."""
    c = accumulating(tmp_path, parts=[PARTS[number] for number in same])
    said = c.refused("transform", *SUM)
    assert f"copies of '{NAME}' are the same, and would be added" in said
    assert "ranks 1, 3" in said or "ranks 0, 2" in said
    assert not c.dst.exists()
    c.done("transform", *SUM, "--replicas", "any")
    again = c.but(dst=tmp_path / "mean")
    again.done("transform", *MEAN)
    if same == [0, 1, 0, 1]:
        assert written(again, 0).tobytes() == np.concatenate(PARTS[:2], axis=1)[:4].tobytes()


def test_sums_of_zeros_may_be_the_same(tmp_path: Path) -> None:
    """At the end of a step there are none; and gradients of what was not used are zeros on some ranks."""
    zeros = np.zeros((8, 2), np.float32)
    for parts in ([zeros] * 4, [PARTS[0], zeros, zeros, zeros]):
        c = accumulating(tmp_path / str(len(list(tmp_path.iterdir()))), parts=parts)
        c.done("transform", *SUM)
        assert written(c, 0).tobytes() == np.concatenate([parts[0] + zeros, zeros], axis=1)[:4].tobytes()


def test_other_copies_are_still_held_against_each_other(tmp_path: Path) -> None:
    c = accumulating(tmp_path)
    c.rewrite(3, {NAME: PARTS[3], "w": c.arrays(3)["w"] + 100})
    assert "'w'" in c.refused("transform", *MEAN, "--replicas", "check")


@pytest.mark.slow
def test_mean_twice_is_mean_once(tmp_path: Path) -> None:
    """Of seven equal numbers, added and divided, some would be others: (7 x) / 7 is not always x in float32."""
    random = np.random.default_rng(5)
    w = np.ones(999, np.float32)
    ranks = {rank: {"w": w, "grad_sum.w": random.standard_normal(999, np.float32)} for rank in range(7)}
    write_ranks(ranks, tmp_path / "src")
    spec = replicated(tmp_path, 7)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "once", spec, spec, accumulated="mean")
    reshard_mpi.transform(tmp_path / "once", tmp_path / "twice", spec, spec, accumulated="mean")
    once, twice = (read_shard(tmp_path / name / "rank_0" / "checkpoint_0.ckpt") for name in ("once", "twice"))
    assert once == twice
    mean = np.frombuffer(once["grad_sum.w"][2], np.float32)
    assert ((mean * np.float32(7)) / np.float32(7) != mean).any() or (sum([mean] * 7) / np.float32(7) != mean).any()
    reshard_mpi.diff(tmp_path / "src", tmp_path / "once", spec, spec, accumulated="mean")
