"""A spec that cuts everything: scalars, such as how many steps an optimizer has taken, are whole on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import Arrays, as_read, read_shard, write_shard
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi.errors import ReshardError, TargetError

SPLIT = 'split = { 0 = ["dp"] }'
KINDS = {"ckpt": "ckpt", "hdf5": "h5"}
TENSORS: Arrays = {
    "model.w": np.arange(12 * 3, dtype=np.float32).reshape(12, 3),
    "model.b": np.arange(12, dtype=np.float16) + np.float16(0.5),
    "optimizer.w.step": np.array(7, np.float32),
    "epoch": np.array(3, np.int64),
}


def everything_over(ranks: int, folder: Path, cut: str = SPLIT) -> Path:
    """Write a spec by which each rank has a part of the rows of every tensor; return its path."""
    path = folder / f"over_{ranks}.toml"
    path.write_text(f'mesh = {{ dp = {ranks} }}\n[[parameter]]\nmatch = "*"\n{cut}\n')
    return path


def rows_of(ranks: int, rank: int) -> Arrays:
    """Return what a rank of so many holds."""
    return {
        name: array[rank * 12 // ranks : (rank + 1) * 12 // ranks] if array.ndim else array
        for name, array in TENSORS.items()
    }


def shard(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank_{rank}" / f"checkpoint_{rank}.{KINDS[kind]}"


@pytest.mark.parametrize("length", few(1, [1, 2, 5]))
@pytest.mark.parametrize("kind", few(1, KINDS))
def test_a_counter_of_which_most_ranks_have_an_empty_slice(tmp_path: Path, kind: str, length: int) -> None:
    """FSDP's slices of a counter with a dimension: what a rank has none of says nothing of the step."""
    rule = '[[parameter]]\nmatch = "*"\nsplit = { 0 = ["dp"] }\nsizes = "ceil"\n'
    specs = {ranks: tmp_path / f"{ranks}.toml" for ranks in (3, 2)}
    for ranks, spec in specs.items():
        spec.write_text(f"mesh = {{ dp = {ranks} }}\n{rule}")
    numbers = np.arange(1, length + 1, dtype=np.int64)
    tensors = {"w": np.arange(7, dtype=np.float32), "global_step": numbers, "opt.w.step": numbers[:1]}
    for rank in range(3):
        slices = {name: array[rank * -(-len(array) // 3) :][: -(-len(array) // 3)] for name, array in tensors.items()}
        path = tmp_path / "src" / f"rank_{rank}" / f"w.{KINDS[kind]}"
        path.parent.mkdir(parents=True)
        write_shard(slices, path)
    for target, ranks in ((specs[2], 2), (None, 1)):
        dst = tmp_path / f"dst{ranks}"
        reshard_mpi.transform(tmp_path / "src", dst, specs[3], target, to="ckpt", replicas="check", verify=True)
        read = [read_shard(shard(dst, rank, "ckpt")) for rank in range(ranks)]
        for name, array in tensors.items():
            assert b"".join(own[name][2] for own in read) == array.tobytes()


@pytest.mark.parametrize("kind", few(1, KINDS))
@few_cases(
    1,
    ("first", "second", "cut"),
    [*((*ranks, SPLIT) for ranks in ((2, 4), (4, 3), (3, 2), (6, 1))), (4, 2, 'optimizer = ["dp"]')],
)
def test_rows_are_cut_and_scalars_are_not(tmp_path: Path, kind: str, first: int, second: int, cut: str) -> None:
    write_shard(TENSORS, tmp_path / "one.ckpt")
    over = {ranks: everything_over(ranks, tmp_path, cut) for ranks in (first, second)}
    reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / "a", dst_strategy=over[first], to=kind, verify=True)
    # A native HDF5 shard says of itself how it was cut.
    source = None if kind == "hdf5" else over[first]
    reshard_mpi.transform(
        tmp_path / "a", tmp_path / "b", src_strategy=source, dst_strategy=over[second], replicas="check", verify=True
    )
    for ranks, folder in ((first, "a"), (second, "b")):
        for rank in range(ranks):
            assert read_shard(shard(tmp_path / folder, rank, kind)) == as_read(rows_of(ranks, rank))
    source = None if kind == "hdf5" else over[second]
    reshard_mpi.transform(tmp_path / "b", tmp_path / "back", src_strategy=source, to="ckpt")
    assert read_shard(shard(tmp_path / "back", 0, "ckpt")) == as_read(TENSORS)


def test_ranks_that_hold_different_scalars_are_refused(tmp_path: Path) -> None:
    """By the spec all ranks hold the same, so what differs is no checkpoint of this spec."""
    for rank in range(2):
        held = rows_of(2, rank) | {"optimizer.w.step": np.array(7 + rank, np.float32)}
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        write_shard(held, shard(tmp_path / "src", rank, "ckpt"))
    with pytest.raises(ReshardError) as refused:
        reshard_mpi.transform(
            tmp_path / "src", tmp_path / "dst", src_strategy=everything_over(2, tmp_path), replicas="check"
        )
    assert "optimizer.w.step" in str(refused.value)


@pytest.mark.parametrize("dtype", few(1, [np.int8, np.int64]))
def test_a_whole_number_that_the_checksum_of_safetensors_cannot_count_is_refused_before_anything_is_written(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    """It counts as so many bytes of 0, as MindSpore has it: a seed may be larger than memory, or negative."""
    write_shard(TENSORS | {"seed": np.array(-3, dtype)}, tmp_path / "one.ckpt")
    options = {"dst_strategy": everything_over(2, tmp_path), "to": "safetensors", "crc": True}
    with pytest.raises(TargetError) as refused:
        reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / "dst", **options)
    assert refused.value.exit_code == 3 and "'seed'" in refused.value.problem and refused.value.got == "-3"
    assert refused.value.where == str(tmp_path / "one.ckpt")
    assert "leave the tensor out (--exclude)" in refused.value.remedy
    assert not (tmp_path / "dst").exists()
    reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / "dst", **options, exclude="seed")
    reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / "ckpt", **options | {"to": "ckpt"})


def test_the_largest_whole_number_that_the_checksum_of_safetensors_counts(tmp_path: Path) -> None:
    for seed in (1 << 32, (1 << 32) + 1):
        write_shard({"seed": np.array(seed, np.int64)}, tmp_path / f"{seed}.ckpt")
    reshard_mpi.transform(tmp_path / f"{1 << 32}.ckpt", tmp_path / "dst", to="safetensors", crc=True)
    with pytest.raises(TargetError, match="'seed' has no place in the checksum"):
        reshard_mpi.transform(tmp_path / f"{(1 << 32) + 1}.ckpt", tmp_path / "larger", to="safetensors", crc=True)
    assert not (tmp_path / "larger").exists()


def test_numbers_that_have_a_dimension_or_a_fraction_are_summed_as_they_are(tmp_path: Path) -> None:
    tensors = {"seeds": np.array([-3, 1 << 40]), "rate": np.array(-0.5, np.float32), "on": np.array(True)}
    write_shard(tensors, tmp_path / "one.ckpt")
    reshard_mpi.transform(tmp_path / "one.ckpt", tmp_path / "dst", to="safetensors", crc=True)
    assert read_shard(tmp_path / "dst/rank_0/checkpoint_0.safetensors") == as_read(tensors)
