"""Shards that a run has written are read again without a strategy, since its records say how it has cut them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import copied_in_order, write_shard
from support.command_line import done, run_here
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi import SourceError, StrategyError

SPEC = """
mesh = { tp = 4 }
[[parameter]]
match = "w*"
split = { 0 = ["tp"] }
"""
FORMATS = ("safetensors", "torch", "ckpt")


@pytest.fixture(params=few(1, FORMATS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The target folder of four ranks; the rows of one tensor are alike, as those of many a state are."""
    write_shard(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "four.toml").write_text(SPEC)
    strategy = tmp_path / "four.toml"
    reshard_mpi.transform(tmp_path / "model.safetensors", tmp_path / "four", dst_strategy=strategy, to=request.param)
    strategy.unlink()
    return tmp_path / "four"


def tensors() -> dict[str, np.ndarray]:
    rows = np.tile(np.arange(64, dtype=np.float32), (8, 1))
    return {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "w_alike": rows, "b": np.ones(3, np.float32)}


@pytest.mark.slow
def test_by_every_function(made: Path, tmp_path: Path) -> None:
    reshard_mpi.transform(made, tmp_path / "one", to="safetensors", strict=True)
    done("diff", tmp_path / "model.safetensors", tmp_path / "one")
    done("diff", tmp_path / "model.safetensors", made)
    assert run_here("verify", tmp_path / "model.safetensors", made).code in (0, 2)
    for rank in range(4):
        half = reshard_mpi.load_rank(rank, made, dst_strategy=spec(tmp_path))
        assert (half["w"] == tensors()["w"][2 * rank : 2 * rank + 2]).all()
    reshard_mpi.transform(made, tmp_path / "again", dst_strategy=spec(tmp_path), to="hdf5")
    reshard_mpi.transform(tmp_path / "again", tmp_path / "whole", to="safetensors")
    done("diff", tmp_path / "model.safetensors", tmp_path / "whole")


def spec(folder: Path) -> Path:
    (folder / "again.toml").write_text(SPEC)
    return folder / "again.toml"


def test_a_lost_shard_that_nothing_replaces_is_named(made: Path, tmp_path: Path) -> None:
    for path in (made / "rank_2").iterdir():
        path.unlink()
    with pytest.raises(reshard_mpi.ReshardError, match="rank 2"):
        reshard_mpi.transform(made, tmp_path / "one", to="safetensors")


@few_cases(1, "how", ["no commit", "no record", "another size", "another run", "no table", "no JSON", "saved over"])
def test_other_files_need_a_strategy(made: Path, tmp_path: Path, how: str) -> None:
    record, commit = made / ".reshard_mpi" / "strategy.json", made / "reshard.json"
    if how == "no commit":
        commit.unlink()
    elif how == "no record":
        record.unlink()
    elif how == "another size":
        facts = json.loads(commit.read_text())
        facts["targets"][1]["size_bytes"] += 1
        commit.write_text(json.dumps(facts))
    elif how == "no JSON":
        record.write_text("[" * 100_000)
    elif how == "saved over":
        (shard,) = (made / "rank_1").iterdir()
        content = shard.read_bytes()
        later_ns = shard.stat().st_mtime_ns + 60 * 10**9
        shard.unlink()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(shard, ns=(later_ns, later_ns))
    else:
        facts = json.loads(record.read_text())
        facts |= {"digest": "0" * 64} if how == "another run" else {"strategy": 7}
        record.write_text(json.dumps(facts))
    with pytest.raises(SourceError, match="do not say how they are sharded"):
        reshard_mpi.transform(made, tmp_path / "one", to="safetensors")


def test_a_forged_table_is_refused(made: Path, tmp_path: Path) -> None:
    record = made / ".reshard_mpi" / "strategy.json"
    facts = json.loads(record.read_text())
    facts["strategy"] = facts["strategy"].replace('"world_size":4', '"world_size":"4"')
    facts["sha256"] = hashlib.sha256(facts["strategy"].encode()).hexdigest()
    record.write_text(json.dumps(facts))
    with pytest.raises(StrategyError, match="world_size"):
        reshard_mpi.transform(made, tmp_path / "one", to="safetensors")


@pytest.mark.parametrize("first", few(1, ["with times", "records", "shards"]))
def test_a_copy_needs_none(made: Path, tmp_path: Path, first: str) -> None:
    if first == "with times":
        shutil.copytree(made, tmp_path / "copied")
    else:
        copied_in_order(made, tmp_path / "copied", first)
    reshard_mpi.transform(made, tmp_path / "one", to="safetensors")
    reshard_mpi.transform(tmp_path / "copied", tmp_path / "again", to="safetensors")
    one, again = (tmp_path / name / "rank_0/checkpoint_0.safetensors" for name in ("one", "again"))
    assert one.read_bytes() == again.read_bytes()


@pytest.mark.slow
def test_a_table_with_a_flipped_bit_is_none(made: Path, tmp_path: Path) -> None:
    record = made / ".reshard_mpi" / "strategy.json"
    content = bytearray(record.read_bytes())
    reshard_mpi.transform(made, tmp_path / "right", to="safetensors")
    right = (tmp_path / "right/rank_0/checkpoint_0.safetensors").read_bytes()
    for place in range(5, len(content), 23):
        for bit in (1, 4):
            flipped = bytearray(content)
            flipped[place] ^= bit
            record.write_bytes(flipped)
            with contextlib.suppress(reshard_mpi.ReshardError):  # a flip in its version, say, does not matter
                reshard_mpi.transform(made, tmp_path / "one", to="safetensors", overwrite=True)
                assert (tmp_path / "one/rank_0/checkpoint_0.safetensors").read_bytes() == right


def test_a_strategy_that_is_given_must_agree(made: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(SPEC.replace("{ 0 =", "{ 1 ="))
    with pytest.raises(reshard_mpi.StrategyError, match="cuts a tensor otherwise"):
        reshard_mpi.transform(made, tmp_path / "one", tmp_path / "wrong.toml", to="safetensors")


@pytest.mark.slow
def test_shards_of_an_earlier_run_in_their_place_are_not_what_it_records(made: Path, tmp_path: Path) -> None:
    """Copied with their times; of the same size, and cut otherwise."""
    (tmp_path / "columns.toml").write_text(SPEC.replace("0 = ", "1 = "))
    earlier = tmp_path / "earlier"
    shutil.move(made, earlier)
    for path in earlier.glob("rank_*/*"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))
    form = next(path.suffix for path in earlier.glob("rank_0/*"))
    to = {".safetensors": "safetensors", ".pt": "torch", ".ckpt": "ckpt"}[form]
    reshard_mpi.transform(
        tmp_path / "model.safetensors", made, dst_strategy=tmp_path / "columns.toml", to=to, overwrite=True
    )
    reshard_mpi.transform(made, tmp_path / "sound", to="safetensors")
    shutil.copytree(made, tmp_path / "copy")
    reshard_mpi.transform(tmp_path / "copy", tmp_path / "sound as well", to="safetensors")
    shutil.copytree(earlier, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("reshard.json", ".reshard_mpi"))
    with pytest.raises(SourceError, match="do not say how they are sharded"):
        reshard_mpi.transform(made, tmp_path / "wrong", to="safetensors")


def test_copies_with_whole_seconds_are_what_it_records(made: Path, tmp_path: Path) -> None:
    """As archives keep them."""
    for path in made.glob("rank_*/*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns // 10**9 * 10**9))
    reshard_mpi.transform(made, tmp_path / "one", to="safetensors")
    loaded = reshard_mpi.load_rank(0, tmp_path / "one")
    assert loaded.keys() == tensors().keys()
    assert all(np.array_equal(loaded[name], array) for name, array in tensors().items())
