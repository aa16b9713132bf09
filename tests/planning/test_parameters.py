"""Parameters that the strategies do not list, that were never saved, or whose copies are not alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support import ckpt_peer
from support.cases import Side
from support.checkpoints import as_read, expected_rank, read_shard, write_shard, write_strategy
from support.command_line import run_here
from support.conversions import (
    DST_LAYOUTS,
    SRC_LAYOUTS,
    TENSORS,
    Conversion,
    assert_right,
    listing,
    make,
    transform_by_function,
    write_conversion,
)
from support.examples import few, few_cases, one_at_a_time
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.errors import CoverageError, DisagreementError, StrategyError
from reshard_mpi.planning.source_flaws import is_generator_state

SRC_CUT = SRC_LAYOUTS["w"]


# A rule for all tensors


def test_a_rule_that_cuts_all_does_not_excuse_scalars_that_differ(tmp_path: Path) -> None:
    """Whole scalars are copies like any others."""
    for rank in range(2):
        arrays = {"w": np.arange(4, dtype=np.float32) + 10 * rank, "scale": np.array(2.5 + rank, np.float32)}
        shard = tmp_path / "two" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        shard.parent.mkdir(parents=True)
        write_shard(arrays, shard)
    spec = tmp_path / "all.toml"
    spec.write_text('mesh = { card = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["card"] }')
    with pytest.raises((StrategyError, DisagreementError), match="scale"):
        reshard_mpi.transform(tmp_path / "two", tmp_path / "back", src_strategy=spec, replicas="check")


# Sums of gradients


SUMMED_SRC = RawLayout((2, 2), (-1, 0), 2)
SUMMED_DST = RawLayout((2,), (-1, -1), 2)


def write_sums(folder: Path, kind: str, *, sharded: bool) -> tuple[Path, Path, Path]:
    """Write a checkpoint of 4 ranks with a sharded optimizer, whose strategy has it cut the sums too; return paths.

    sharded: whether the shards have the sums cut like that (MindSpore's gradient_accumulation_shard) or whole.
    """
    w = np.arange(48, dtype=np.float32).reshape(8, 6)
    tensors = {"w": w, "moments.w": w + 100, "accu_grads.w": w + 200}
    source = Side(4, 1, dict.fromkeys(tensors, SUMMED_SRC))
    target = Side(2, 1, dict.fromkeys(tensors, SUMMED_DST))
    for rank in range(4):
        arrays = expected_rank(source, tensors, rank)
        if not sharded:  # columns are cut by the rank's last bit, and nothing else
            arrays["accu_grads.w"] = np.ascontiguousarray(tensors["accu_grads.w"][:, rank % 2 * 3 : rank % 2 * 3 + 3])
        shard = folder / "src" / f"rank_{rank}" / f"checkpoint_{rank}.{kind}"
        shard.parent.mkdir(parents=True)
        write_shard(arrays, shard)
    return folder / "src", write_strategy(source, folder / "source"), write_strategy(target, folder / "target")


@pytest.mark.parametrize("to", few(1, ["ckpt", "hdf5"]))
@pytest.mark.parametrize("sharded", few(1, [False, True]))
def test_sums_are_cut_by_the_optimizer_where_the_source_cuts_them(tmp_path: Path, sharded: bool, to: str) -> None:
    """MindSpore's strategy says that it does, whether or not; at its word, whole sums would become twice as large."""
    src, src_strategy, dst_strategy = write_sums(tmp_path, "ckpt", sharded=sharded)
    strategies = {"src_strategy": src_strategy, "dst_strategy": dst_strategy}
    reshard_mpi.transform(src, tmp_path / "dst", to=to, verify=True, **strategies)
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)
    for rank in range(2):
        rows = slice(rank * 4, rank * 4 + 4)
        expected = {"w": whole[rows], "moments.w": whole[rows] + 100}
        expected["accu_grads.w"] = (whole[rows] if sharded else whole) + 200
        ending = "h5" if to == "hdf5" else to
        assert read_shard(tmp_path / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.{ending}") == as_read(expected)
    back = {} if to == "hdf5" else {"src_strategy": dst_strategy}
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "one", to="ckpt", replicas="check", **back)
    all_tensors = {"w": whole, "moments.w": whole + 100, "accu_grads.w": whole + 200}
    assert read_shard(tmp_path / "one" / "rank_0" / "checkpoint_0.ckpt") == as_read(all_tensors)


def test_whole_sums_that_differ_are_refused(tmp_path: Path) -> None:
    src, src_strategy, dst_strategy = write_sums(tmp_path, "ckpt", sharded=False)
    shard = src / "rank_3" / "checkpoint_3.ckpt"
    arrays = {
        name: np.frombuffer(held, np.float32).reshape(shape) for name, (_, shape, held) in read_shard(shard).items()
    }
    write_shard({**arrays, "accu_grads.w": arrays["accu_grads.w"] + 1}, shard)
    with pytest.raises(DisagreementError, match="partial sums"):
        reshard_mpi.transform(src, tmp_path / "dst", src_strategy=src_strategy, dst_strategy=dst_strategy)


# Unlisted


@few_cases(2, "state", ["moments", "accum", "stat", "moment1", "adam_m", "adam_v", "exp_avg", "opt.lamb_m"])
def test_unlisted_state_follows_its_parameter(c: Conversion, state: str) -> None:
    name = f"{state}.w"
    held = {rank: {**c.arrays(rank), name: c.arrays(rank)["moments.w"]} for rank in range(4)}
    for rank, arrays in held.items():
        c.rewrite(rank, {name: arrays[name]})
    transform_by_function(c)
    for rank in range(2):
        assert read_shard(c.written(rank))[name] == read_shard(c.written(rank))["moments.w"]


def test_unlisted_state_of_another_shape_does_not_follow(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"stat.w": np.array([3.0, 4.0])})
    transform_by_function(c)
    for rank in range(2):
        assert read_shard(c.written(rank))["stat.w"] == as_read({"s": np.array([3.0, 4.0])})["s"]


def test_replicate(c: Conversion) -> None:
    transform_by_function(c, unlisted="replicate")
    for rank in range(2):
        whole = {"moments.w": TENSORS["moments.w"]}
        assert read_shard(c.written(rank)) == as_read({**expected_rank(c.target, TENSORS, rank), **whole})


def test_drop(c: Conversion) -> None:
    for rank in range(4):
        with c.shard(rank).open("ab") as file:
            file.write(ckpt_peer.value("note", (0,), "str", "text".encode("utf-32-le")))
    transform_by_function(c, unlisted="drop")
    for rank in range(2):
        kept = {name: array for name, array in expected_rank(c.target, TENSORS, rank).items() if name in DST_LAYOUTS}
        assert read_shard(c.written(rank)) == as_read(kept)
        assert not ckpt_peer.read(c.written(rank)).strings


def test_sharded_and_following_nothing(c: Conversion, tmp_path: Path) -> None:
    c = c.but(src_strategy=c.strategy("more", {**SRC_LAYOUTS, "head": SRC_CUT}))
    for rank in range(4):
        c.rewrite(rank, {"head": c.arrays(rank)["w"]})
    before = listing(tmp_path)
    with pytest.raises(StrategyError, match=r"'head' is sharded in the source(.|\n)*--unlisted replicate"):
        transform_by_function(c)
    assert "'head'" in c.refused()
    assert listing(tmp_path) == before
    transform_by_function(c, unlisted="replicate")
    assert read_shard(c.written(1))["head"] == as_read({"w": TENSORS["w"]})["w"]
    transform_by_function(c, unlisted="drop")
    assert "head" not in read_shard(c.written(1))


# Listed, and not there


def test_listed_but_never_saved(c: Conversion, tmp_path: Path) -> None:
    c = c.but(
        src_strategy=c.strategy("s", {**SRC_LAYOUTS, "adam_v.w": SRC_CUT}),
        dst_strategy=c.strategy("d", {**DST_LAYOUTS, "adam_v.w": DST_LAYOUTS["w"], "x": DST_LAYOUTS["b"]}),
    )
    finished = c.done("transform", "--report", str(tmp_path / "report.json"))
    assert "warning: 2 listed parameters are in no source shard: adam_v.w, x" in finished.err
    assert json.loads((tmp_path / "report.json").read_text())["absent"] == ["adam_v.w", "x"]
    assert_right(c)
    before = listing(tmp_path)
    strict = c.but(dst=tmp_path / "strict")
    for command in ("transform", "plan"):
        assert "got: 2 absent: adam_v.w, x" in strict.refused(command, "--strict")
    with pytest.raises(CoverageError, match="2 absent"):
        reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy, strict=True)
    assert listing(tmp_path) == before


def test_strict_where_all_is_there(tmp_path: Path) -> None:
    make(tmp_path).done("transform", "--strict")


def test_present_in_some_holders_and_absent_in_others(c: Conversion, tmp_path: Path) -> None:
    for rank in (1, 3):  # the only holders of the second half
        c.rewrite(rank, {"w": None})
    before = listing(tmp_path)
    with pytest.raises(CoverageError, match=r"'w'(.|\n)*one of ranks 1, 3(.|\n)*shards without the tensor"):
        transform_by_function(c)
    assert c.run().code == 3
    assert listing(tmp_path) == before


@pytest.mark.slow
def test_followers_that_only_some_replicas_hold(c: Conversion, tmp_path: Path) -> None:
    """Target 0 opens ranks 0 and 1, target 1 ranks 2 and 3: neither alone can see that something is missing."""
    for rank in (0, 1):
        c.rewrite(rank, {"moments.w": None})
    before = listing(tmp_path)
    with pytest.raises(CoverageError, match=r"target rank 0 holds 'moments.w', but those for rank 1 do"):
        transform_by_function(c)
    with pytest.raises(CoverageError, match=r"'moments.w'"):
        reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy)
    for command, options in (("plan", ()), ("transform", ()), ("transform", ("--jobs", "2"))):
        said = c.refused(command, *options)
        assert "'moments.w'" in said and "what to do" in said
    assert listing(tmp_path) == before


def test_saved_without_redundancy(c: Conversion) -> None:
    c.rewrite(0, {"w": None})
    c.rewrite(1, {"moments.w": None, "b": None})
    c.rewrite(2, {"moments.w": None, "b": None})
    c.rewrite(3, {"w": None})
    transform_by_function(c)
    assert_right(c)


# Copies that are not alike


@pytest.mark.parametrize("name", few(1, ["accu_grads.w", "grad_sum.w", "net.accu_grads.w"]))
def test_partial_sums_that_differ(c: Conversion, tmp_path: Path, name: str) -> None:
    for rank in range(4):
        grads = c.arrays(rank)["w"].copy()
        if rank == 3:
            grads[5, 1] += 1
        c.rewrite(rank, {name: grads})
    before = listing(tmp_path)
    says = rf"copies of '{name}' differ(.|\n)*element \[5, 3\](.|\n)*partial sums(.|\n)*/rank_1/.* and .*/rank_3/"
    with pytest.raises(DisagreementError, match=says):
        transform_by_function(c)
    assert re.search(says, c.refused())
    assert listing(tmp_path) == before


def test_partial_sums_that_agree(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"accu_grads.w": c.arrays(rank)["w"]})
    transform_by_function(c)
    for rank in range(2):
        assert read_shard(c.written(rank))["accu_grads.w"] == read_shard(c.written(rank))["w"]


def test_other_copies_are_not_compared(c: Conversion) -> None:
    c.rewrite(2, {"w": c.arrays(2)["w"] + 1})  # opening every copy to compare would cost more than the conversion
    transform_by_function(c)
    assert read_shard(c.written(0)) == c.expected(0)


TIED = {"embedding": np.arange(64, dtype=np.float32).reshape(16, 4), "v": np.ones(4, np.float32)}
TIED_SOURCE = Side(
    4, 2, {"embedding": RawLayout((2,), (0, -1), stages=(0, 1)), "v": RawLayout((2,), (-1,), stages=(1,))}
)
TIED_TARGET = Side(2, 1, {"embedding": RawLayout((2,), (-1, 0)), "v": RawLayout((2,), (-1,))})


def test_tied_copies_of_stages(tmp_path: Path) -> None:
    c = write_conversion(tmp_path, "ckpt", TIED_SOURCE, TIED_TARGET, TIED)
    before = listing(tmp_path)
    drifted = c.arrays(3)["embedding"].copy()
    drifted[0, 3] = 99
    original = c.shard(3).read_bytes()
    c.rewrite(3, {"embedding": drifted})
    with pytest.raises(DisagreementError, match=r"'embedding' differ(.|\n)*\[8, 3\](.|\n)*drifted apart"):
        transform_by_function(c)
    assert c.run().code == 3
    c.shard(3).write_bytes(original)
    assert listing(tmp_path) == before
    transform_by_function(c)
    assert_right(c)


def test_numbers_of_optimizers_that_stages_have_of_their_own(tmp_path: Path) -> None:
    name = "optimizer.state.0.exp_avg"
    source = Side(4, 2, {name: RawLayout((2,), (-1,), stages=(0, 1)), "v": RawLayout((2,), (-1,), stages=(1,))})
    target = Side(2, 1, {name: RawLayout((2,), (-1,)), "v": RawLayout((2,), (-1,))})
    tensors = {name: np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    for rank in (2, 3):
        c.rewrite(rank, {name: c.arrays(rank)[name] + 1})
    with pytest.raises(
        DisagreementError, match=r"numbered parameters of its own(.|\n)*cannot be joined: leave them out"
    ):
        transform_by_function(c)


# Values that no strategy lists


def test_unlisted_values_that_differ_are_told(c: Conversion, tmp_path: Path) -> None:
    for rank in range(4):
        c.rewrite(rank, {"random_state": np.full(4, rank, np.uint32)})
    finished = c.done("transform", "--report", str(tmp_path / "report.json"))
    assert (
        "note: 'random_state' differs between ranks 0, 1, 2, 3: each rank has its own; one of them was taken"
        in finished.err
    )
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert len(notes) == 1 and "'random_state'" in notes[0]


# What is cut in truth, and in no strategy: each rank has another part of it, and a target gets one of them.


@pytest.mark.slow
def test_whole_numbers_that_no_strategy_lists_and_that_differ_are_warned_of(c: Conversion, tmp_path: Path) -> None:
    for rank in range(4):
        c.rewrite(rank, {"g_idx": np.arange(8 * rank, 8 * rank + 8, dtype=np.int64)})
    warning = "warning: 'g_idx' differs between ranks 0, 1, 2, 3: no strategy says how it is cut"
    assert c.done("plan").err.count(warning) == 1
    for options in ((), ("--jobs", "2"), ("--replicas", "check")):
        one = c.but(dst=tmp_path / f"dst{len(options)}{options[:1]}")
        assert one.done("transform", *options).err.count(warning) == 1


@pytest.mark.parametrize("options", [(), ("--replicas", "any"), ("--replicas", "check"), ("--jobs", "2")])
def test_strict_refuses_what_no_strategy_lists_and_differs(
    c: Conversion, tmp_path: Path, options: tuple[str, ...]
) -> None:
    for rank in range(4):
        c.rewrite(rank, {"g_idx": np.arange(8 * rank, 8 * rank + 8, dtype=np.int64)})
    before = listing(tmp_path)
    for command in ("plan", "transform"):
        said = c.refused(command, "--strict", *(options if command == "transform" else ()))
        assert "tensors that no strategy lists differ from rank to rank" in said
        assert "'g_idx'" in said and "list them in the source strategy" in said
    assert listing(tmp_path) == before


def test_strict_takes_what_says_it_is_the_state_of_a_generator(c: Conversion) -> None:
    names = ("rng", "cuda_rng_state", "random_state", "net.seed", "generator", "prng", "np.random.state")
    for rank in range(4):
        c.rewrite(rank, {name: np.full(4, rank, np.uint32) for name in names[:4]})
    finished = c.done("transform", "--strict")
    assert "warning" not in finished.err, finished
    assert finished.err.count("note: ") == 4
    assert all(map(is_generator_state, names))
    assert not any(map(is_generator_state, ("range", "strange", "wrong", "g_idx", "seedling", "regenerator_w")))


def test_ranks_that_no_target_opens_are_looked_into(c: Conversion) -> None:
    """All ranks have the same parameters, so that a target needs one shard alone."""
    c = c.but(src_strategy=c.strategy("s", {"w": RawLayout((4,), (-1, -1)), "b": RawLayout((4,), (-1,))}))
    for rank in range(4):
        c.shard(rank).unlink()
        write_shard({**TENSORS, "g_idx": np.arange(8 * rank, 8 * rank + 8, dtype=np.int64)}, c.shard(rank))
    assert "warning: 'g_idx' differs between ranks 0, 1" in c.but(dst_strategy=None).done().err


def test_a_commit_of_parts_warns_and_strict_refuses(c: Conversion, tmp_path: Path) -> None:
    """Neither part sees that the other has another value, and no sample is taken."""
    for rank in range(4):
        c.rewrite(rank, {"g_idx": np.full(8, rank // 2, np.int64)})
    for options in ((), ("--strict",)):
        c = c.but(dst=tmp_path / f"dst{len(options)}")
        c.done("transform", "--replicas", "any", "--part", "0/2", *options)
        finished = c.run("transform", "--replicas", "any", "--part", "1/2", *options)
        assert finished.code == (3 if options else 0) and "'g_idx' differs between ranks 0, 2" in finished.err, finished
        finished = run_here("commit", c.dst)
        assert finished.code == (3 if options else 0) and "'g_idx' differs between ranks 0, 2" in finished.err, finished


@pytest.mark.slow
def test_values_that_differ_between_targets_are_told(c: Conversion) -> None:
    """Each target opens two shards that agree, but not with those of the other: a row statistic cut by data rank."""
    for rank in range(4):
        c.rewrite(rank, {"vr.w": np.full(4, rank // 2, np.float32)})
    said = c.refused("plan")
    assert "are no copies of each other" in said and "'vr.w'" in said
    for command, jobs in (("plan", ()), ("transform", ("--jobs", "2"))):
        finished = c.done(command, *jobs, "--unlisted", "replicate")
        assert finished.err.count("'vr.w' differs between ranks 0, 1, 2, 3: no strategy says how it is cut") == 1


def test_every_rank_keeps_its_own_values_when_their_number_stays(c: Conversion) -> None:
    c = c.but(dst_strategy=c.strategy("d", {"w": RawLayout((4,), (0, -1)), "b": RawLayout((4,), (-1,))}))
    for rank in range(4):
        c.rewrite(rank, {"random_state": np.full(4, rank, np.uint32)})
    assert c.done("transform").err == ""
    for rank in range(4):
        assert read_shard(c.written(rank))["random_state"][2] == np.full(4, rank, np.uint32).tobytes()


# One moment


@few_cases(
    4,
    ("name", "unlisted"),
    one_at_a_time(
        ["global_step", "step_num", "state.w.step", "epoch_num", "step", "args.iteration"], ["follow", "drop"]
    ),
)
def test_shards_of_different_moments_in_one_target(c: Conversion, name: str, unlisted: str) -> None:
    for rank in range(4):
        c.rewrite(rank, {name: np.array(5 + (rank == 1), np.int64)})
    with pytest.raises(DisagreementError, match=rf"different moments|'{name}'"):
        transform_by_function(c, unlisted=unlisted)
    assert not c.dst.exists()


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_shards_of_different_moments_in_different_targets(c: Conversion, jobs: int) -> None:
    for rank in (2, 3):  # target 0 reads 0 and 1, target 1 reads these
        c.rewrite(rank, {"global_step": np.array(8, np.int32)})
    said = c.refused("transform", "--jobs", str(jobs))
    assert "different moments" in said
    assert "'global_step' = 7" in said and "'global_step' = 8" in said
    assert f"{c.src}/rank_0" in said and f"{c.src}/rank_2" in said
    assert c.run("plan").code == 3
    assert not c.dst.exists()
    with pytest.raises(DisagreementError, match="different moments"):
        transform_by_function(c)
    with pytest.raises(DisagreementError, match="different moments"):
        reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy)


def test_counters_of_torch_in_different_targets(c: Conversion) -> None:
    """Each counter is compared with that of the same name: a parameter added later has counted fewer steps."""
    for rank in range(4):
        steps = {"state.w.step": np.array(7, "f4"), "state.b.step": np.array(3, "f4"), "iteration": np.array([7])}
        c.rewrite(rank, steps)
    c.done("plan", "--strict")
    for rank in (2, 3):  # target 0 reads 0 and 1, target 1 reads these
        c.rewrite(rank, {"iteration": np.array([8])})
    said = c.refused()
    assert "different moments" in said
    assert "'iteration' = [7]" in said and "'iteration' = [8]" in said
    assert not c.dst.exists()


# Strings and types


def test_strings_are_carried(c: Conversion, tmp_path: Path) -> None:
    for rank in range(4):
        with c.shard(rank).open("ab") as file:
            file.write(ckpt_peer.value("note", (0,), "str", "Grüße".encode("utf-32-le")))
            own = f"rank {rank}"
            file.write(ckpt_peer.value("own", (0,), "str", own.encode("utf-32-le")))
    finished = c.done()
    assert "the string 'own' of" in finished.err and "'note'" not in finished.err
    assert ckpt_peer.read(c.written(1)).strings == {"note": "Grüße", "own": "rank 2"}
    assert reshard_mpi.load_rank(0, c.src, c.src_strategy, c.dst_strategy)["note"] == "Grüße"
    native = c.but(dst=tmp_path / "native", kind="hdf5")
    native.done("transform", "--to", "hdf5")
    assert reshard_mpi.inspect(native.written(1))["strings"] == {"note": "Grüße", "own": "rank 2"}
