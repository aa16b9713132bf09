"""A tensor that only some ranks hold, and no strategy lists, reaches a target, or the run is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Side
from support.checkpoints import read_shard, write_ranks, write_shard, write_shards, write_strategy
from support.command_line import refused, run_here
from support.examples import few, many
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.errors import StrategyError

RANKS = 4
NOBODY_GETS = "no target would get a tensor that only some ranks hold"


def write(folder: Path, own: Mapping[str, object], ranks: int = RANKS) -> Path:
    """Write shards of ranks that all hold `dense`. own: further names, each with the ranks that hold it too."""
    for rank in range(ranks):
        shard = folder / f"rank_{rank}" / "c.h5"
        shard.parent.mkdir(parents=True)
        with h5py.File(shard, "w") as file:
            file["dense"] = np.arange(48, dtype="f4").reshape(8, 6)
            for name, holders in own.items():
                if rank in holders:  # type: ignore[operator]
                    file[name] = np.full((3, 3), rank, "f4")
    return folder


def spec(path: Path, ranks: int, rule: str = "dense") -> Path:
    path.write_text(f'mesh = {{ ep = {ranks} }}\n[[parameter]]\nmatch = "{rule}"\n')
    return path


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors of all shards below a folder."""
    names: set[str] = set()
    for path in folder.glob("rank_*/*.h5"):
        with h5py.File(path) as file:
            file.visititems(lambda name, item: names.add(name) if isinstance(item, h5py.Dataset) else None)
    return {name for name in names if not name.startswith("__")}


def of_experts(folder: Path) -> Path:
    return write(folder, {f"experts.{rank}.w": (rank,) for rank in range(RANKS)})


@pytest.mark.parametrize("command", few(1, ["transform", "plan", "diff"]))
def test_experts_of_ranks_that_no_target_opens(tmp_path: Path, command: str) -> None:
    src, one = of_experts(tmp_path / "src"), spec(tmp_path / "src.toml", RANKS)
    dst = write(tmp_path / "dst", {}, 1) if command == "diff" else tmp_path / "dst"
    finished = run_here(command, src, dst, "--src-strategy", str(one))
    assert finished.code == 3 and finished.out == "", finished
    assert NOBODY_GETS in finished.err and "'experts.1.w' of rank 1" in finished.err
    assert "what to do: list it in the source strategy (a TOML rule '*' takes all there is)" in finished.err
    assert command == "diff" or not dst.exists()


@pytest.mark.parametrize("replicas", few(1, ["sample", "check", "any"]))
def test_half_of_them(tmp_path: Path, replicas: str) -> None:
    """Two targets open the shards of two ranks, and have their experts; those of the others would be lost."""
    src = of_experts(tmp_path / "src")
    strategies = [spec(tmp_path / f"{ranks}.toml", ranks) for ranks in (RANKS, 2)]
    with pytest.raises(StrategyError, match=f"{NOBODY_GETS}(.|\n)*'experts.1.w' of rank 1"):
        reshard_mpi.transform(src, tmp_path / "dst", *strategies, replicas=replicas)
    assert not (tmp_path / "dst").exists()


def test_a_part_of_the_targets_tells_of_its_part_of_the_shards(tmp_path: Path) -> None:
    src = of_experts(tmp_path / "src")
    one, two = (spec(tmp_path / f"{ranks}.toml", ranks) for ranks in (RANKS, 2))
    for target, lost in ((0, 1), (1, 3)):
        strategies = ("--src-strategy", str(one), "--dst-strategy", str(two))
        said = refused("transform", src, tmp_path / "dst", *strategies, "--rank", str(target))
        assert f"got: 'experts.{lost}.w' of rank {lost}\n" in said


def test_each_rank_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    src, one = of_experts(tmp_path / "src"), spec(tmp_path / "one.toml", RANKS)
    reshard_mpi.transform(src, tmp_path / "dst", one, one)
    assert names_in(tmp_path / "dst") == names_in(src)


@pytest.mark.parametrize("way", few(1, ["exclude", "drop", "rule"]))
def test_what_the_message_says_helps(tmp_path: Path, way: str) -> None:
    src = of_experts(tmp_path / "src")
    one, two = spec(tmp_path / "one.toml", RANKS), spec(tmp_path / "two.toml", 2)
    if way == "exclude":
        reshard_mpi.transform(src, tmp_path / "dst", one, two, exclude="experts.*")
    elif way == "drop":
        reshard_mpi.transform(src, tmp_path / "dst", one, two, unlisted="drop")
    else:
        reshard_mpi.transform(src, tmp_path / "dst", spec(one, RANKS, "*"), spec(two, 2, "*"))
    assert names_in(tmp_path / "dst") == (names_in(src) if way == "rule" else {"dense"})


def test_one_rank_alone_in_the_middle(tmp_path: Path) -> None:
    """The first and the last shard of the stage hold the same, so these show nothing; a rule places it, though."""
    src, one = write(tmp_path / "src", {"adapter": (1,)}), spec(tmp_path / "one.toml", RANKS, "*")
    with pytest.raises(StrategyError, match="'adapter' of rank 1"):
        reshard_mpi.transform(src, tmp_path / "dst", one)


def test_a_state_of_a_listed_parameter_that_one_copy_has(tmp_path: Path) -> None:
    src, one = write(tmp_path / "src", {"exp_avg.dense": (2,)}), spec(tmp_path / "one.toml", RANKS)
    with pytest.raises(StrategyError, match=r"'exp_avg\.dense' of rank 2"):
        reshard_mpi.transform(src, tmp_path / "dst", one)


def test_states_that_only_targets_of_another_stage_open(tmp_path: Path) -> None:
    """An optimizer sharded by parameter: the state of stage 0's lies where only stage 1's target looks, and so back."""
    for rank, state in enumerate(("exp_avg.b", "exp_avg.a")):
        shard = tmp_path / "src" / f"rank_{rank}" / "c.h5"
        shard.parent.mkdir(parents=True)
        with h5py.File(shard, "w") as file:
            for name in ("a", "b", state):
                file[name] = np.full((4, 4), rank if name == state else 7, "f4")
    one = spec(tmp_path / "src.toml", 2, "[ab]")
    rules = "".join(f'[[parameter]]\nmatch = "{name}"\nstage = {stage}\n' for stage, name in enumerate("ab"))
    (tmp_path / "dst.toml").write_text(f"stages = 2\nmesh = {{ dp = 1 }}\n{rules}")
    try:
        reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", one, tmp_path / "dst.toml")
    except StrategyError as error:
        assert NOBODY_GETS in str(error)
    else:
        assert names_in(tmp_path / "dst") == {"a", "b", "exp_avg.a", "exp_avg.b"}


LAYERS = ["embed", "layers.0", "layers.1", "layers.2", "head"]


def of_stages(first: str, second: str, copies: int) -> Side:
    """Return a side of two stages whose ranks hold the same. first, second: the layers of each, a digit for each."""
    stages_of = {
        name: tuple(stage for stage, own in enumerate((first, second)) if str(number) in own)
        for number, name in enumerate(LAYERS)
    }
    layouts = {name: RawLayout((copies,), (-1, -1), stages=stages) for name, stages in stages_of.items()}
    return Side(2 * copies, 2, layouts)


SAID = ("012", "34")


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("held", "said"),
    few(2, [(("0123", "4"), SAID), (("01", "234"), SAID), (("34", "012"), SAID), (("034", "012"), ("012", "034"))]),
)
@pytest.mark.parametrize("is_json", few(1, [False, True]))
def test_a_strategy_that_lists_them_for_another_stage(
    tmp_path: Path, copies: int, held: tuple[str, str], said: tuple[str, str], is_json: bool
) -> None:
    """As where a model was divided otherwise, or rank folders of stages were swapped."""
    tensors = {name: np.full((4, 4), number, np.float32) for number, name in enumerate(LAYERS)}
    write_shards(of_stages(*held, copies), tensors, tmp_path / "src", "safetensors")
    shapes = dict.fromkeys(LAYERS, (4, 4)) if is_json else None
    strategy = write_strategy(of_stages(*said, copies), tmp_path / "strategies", shapes=shapes)
    with pytest.raises(StrategyError):
        reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", strategy, strategy)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "whole", strategy)
    assert read_shard(tmp_path / "whole" / "rank_0" / "checkpoint_0.safetensors").keys() == set(LAYERS)


def copied(ranks: int, names: Iterable[str]) -> Side:
    return Side(ranks, 1, {name: RawLayout((ranks,), (-1, -1)) for name in names})


@pytest.mark.parametrize("step", few(1, [1, 3, -1]))
@pytest.mark.parametrize("form", few(1, ["safetensors", "ckpt"]))
def test_each_is_saved_by_one_of_many_ranks_that_hold_it(tmp_path: Path, step: int, form: str) -> None:
    """As MindSpore removes redundancy, with fewer parameters than ranks."""
    ranks, tensors = 130, {f"w{number}": np.full((2, 2), number, np.float32) for number in range(40)}
    own = {rank: {"step": np.ones(1, np.float32)} for rank in range(ranks)}
    for number, (name, values) in enumerate(tensors.items()):
        own[number * step % ranks][name] = values
    write_ranks(own, tmp_path / "src", form)
    strategy = write_strategy(copied(ranks, tensors), tmp_path / "strategy")
    report = reshard_mpi.transform(tmp_path / "src", tmp_path / "whole", strategy, to="safetensors")
    assert not report.warnings
    assert read_shard(tmp_path / "whole" / "rank_0" / "checkpoint_0.safetensors").keys() == {*tensors, "step"}


def test_one_that_a_rank_behind_many_others_alone_has(tmp_path: Path) -> None:
    src = write(tmp_path / "src", {"x": [90]}, 100)
    strategy = write_strategy(copied(100, ["dense", "x"]), tmp_path / "strategy")
    with pytest.raises(StrategyError, match=r"few of the ranks(.|\n)*'x' of rank 90"):
        reshard_mpi.transform(src, tmp_path / "dst", strategy)
    shards = [src / f"rank_{rank}" / "c.h5" for rank in (0, 90)]
    shards[1].replace(shards[0])
    write(tmp_path / "other", {}, 1)
    (tmp_path / "other" / "rank_0" / "c.h5").replace(shards[1])
    reshard_mpi.transform(src, tmp_path / "dst", strategy)
    assert names_in(tmp_path / "dst") == {"dense", "x"}


def test_targets_that_need_no_lost_shard_are_made_together(tmp_path: Path) -> None:
    """Target 1 alone needs it, so that it cannot be asked what it has."""
    held = {0: ["a", "b"], 2: ["d", "g"], 3: ["e", "f"]}
    values = np.ones((2, 2), np.float32)
    write_ranks({rank: dict.fromkeys(names, values) for rank, names in held.items()}, tmp_path / "src", "safetensors")

    def stages(name: str, of_rule: dict[str, int], count: int) -> Path:
        rules = "".join(f'[[parameter]]\nmatch = "{rule}"\nstage = {stage}\n' for rule, stage in of_rule.items())
        (tmp_path / name).write_text(f"mesh = {{ dp = 1 }}\nstages = {count}\n{rules}")
        return tmp_path / name

    source = stages("src.toml", {"a": 0, "b": 0, "c.*": 1, "d": 2, "g": 2, "e": 3, "f": 3}, 4)
    target = stages("dst.toml", {"a": 0, "b": 1, "c.*": 1, "d": 2, "g": 2, "e": 2, "f": 1}, 3)
    report = reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", source, target, rank=[0, 2], jobs=1)
    assert [shard.rank for shard in report.targets] == [0, 2]


holders = st.sets(st.integers(0, RANKS - 1), min_size=1)


@many(25)
@given(own=st.dictionaries(st.sampled_from("abc"), holders), targets=st.integers(1, 6))
def test_all_names_arrive_or_none(
    tmp_path_factory: pytest.TempPathFactory, own: dict[str, set[int]], targets: int
) -> None:
    folder = tmp_path_factory.mktemp("left_behind")
    src = write(folder / "src", own)
    strategies = spec(folder / "src.toml", RANKS), spec(folder / "dst.toml", targets)
    try:
        reshard_mpi.transform(src, folder / "dst", *strategies, replicas="any")
    except StrategyError as error:
        assert NOBODY_GETS in str(error)
        assert any(len(ranks) < RANKS for ranks in own.values()) and targets != RANKS
        assert not (folder / "dst").exists()
    else:
        assert names_in(folder / "dst") == {"dense", *own}


@given(world_size=st.integers(1, 40), shares=st.integers(1, 40))
def test_shares_are_all_of_the_shards(world_size: int, shares: int) -> None:
    ranks = [rank for number in range(shares) for rank in ShardShare(number, shares).ranks(world_size)]
    assert ranks == list(range(world_size))


def test_unified(tmp_path: Path) -> None:
    src = write(tmp_path / "src", {"adapter": (1,)})
    spec_file = spec(tmp_path / "one.toml", RANKS)
    with pytest.raises(StrategyError, match="'adapter' of rank 1"):
        reshard_mpi.unified_safetensors(src, spec_file, tmp_path / "dst")
    reshard_mpi.unified_safetensors(src, spec_file, tmp_path / "dst", choice_func=lambda name: name == "dense")
    assert (tmp_path / "dst" / "part0.safetensors").exists()


# One checkpoint of all targets: a tensor that no strategy lists is written once


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_what_one_copy_alone_has_is_refused_where_another_rank_would_write_it(tmp_path: Path, to: str) -> None:
    """Each target reads its own rank's shard; in a folder that is one checkpoint rank 0 writes what is unlisted."""
    for rank in range(2):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        held = {"w": np.ones(4, np.float32), **({"ema": np.ones(3, np.float32)} if rank else {})}
        write_shard(held, tmp_path / "src" / f"rank_{rank}" / "x.ckpt")
    (tmp_path / "dp.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "w"\n')
    asked: dict[str, Any] = {"src_strategy": tmp_path / "dp.toml", "dst_strategy": tmp_path / "dp.toml", "to": to}
    if to == "dcp":
        with pytest.raises(StrategyError, match="no target would get a tensor"):
            reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", **asked)
        assert not (tmp_path / "dst").exists()
    else:
        reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", **asked)
        assert "ema" in read_shard(tmp_path / "dst" / "rank_1" / "checkpoint_1.safetensors")


def test_what_one_stage_alone_has_is_written_by_it(tmp_path: Path) -> None:
    for stage in range(2):
        held = {f"l{stage}": np.ones(4, np.float32), **({"ema": np.arange(3, dtype=np.float32)} if stage else {})}
        held["both"] = np.full(2, 7, np.float32)
        (tmp_path / "src" / f"rank_{stage}").mkdir(parents=True)
        write_shard(held, tmp_path / "src" / f"rank_{stage}" / "x.ckpt")
    rules = "".join(f'[[parameter]]\nmatch = "l{stage}"\nstage = {stage}\n' for stage in range(2))
    (tmp_path / "pp.toml").write_text(f"mesh = {{ dp = 1 }}\nstages = 2\n{rules}")
    strategies = (tmp_path / "pp.toml", tmp_path / "pp.toml")
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", *strategies, to="dcp")
    loaded = reshard_mpi.load_rank(0, tmp_path / "dst")
    assert loaded.keys() == {"l0", "l1", "ema", "both"}
    assert loaded["ema"].tolist() == [0, 1, 2] and loaded["both"].tolist() == [7, 7]
