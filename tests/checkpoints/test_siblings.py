"""One shard given as a checkpoint while those of other ranks lie beside it: taken only if they hold the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.checkpoints import as_read, read_shard, write_shard
from support.command_line import done
from support.conversions import TENSORS, Conversion, listing, make
from support.examples import few

import reshard_mpi
from reshard_mpi.checkpoints import refuse_sources
from reshard_mpi.errors import SourceError
from reshard_mpi.planning.rank_plan import Check

REFUSED = "the shard of one rank is no full checkpoint"


@pytest.fixture(params=["ckpt", "hdf5"])
def c(tmp_path: Path, request: pytest.FixtureRequest) -> Conversion:
    return make(tmp_path, request.param).but(src_strategy=None)


@pytest.fixture
def alike(c: Conversion) -> Conversion:
    """A checkpoint of data parallel ranks: each has all of it."""
    for rank in range(4):
        c.shard(rank).unlink()
        write_shard(TENSORS, c.shard(rank))
    return c


def refused(c: Conversion, got: str = "") -> None:
    """Check that every way to use the source is refused, with the folder named that is to be given."""
    before = listing(c.folder)
    said = c.refused()
    assert REFUSED in said and got in said
    assert f"what to do: give {c.folder / 'src'}, and the strategy" in said, said
    calls = (
        lambda: reshard_mpi.plan(c.src, None, c.dst_strategy),
        lambda: reshard_mpi.load_rank(0, c.src, None, c.dst_strategy),
        lambda: reshard_mpi.transform_checkpoints(c.src, c.dst, "net", None, c.dst_strategy),
        lambda: reshard_mpi.verify(c.folder / "src", c.src, c.folder / "src_strategy"),
    )
    for call in calls:
        with pytest.raises(SourceError, match=REFUSED):
            call()
    assert listing(c.folder) == before


@pytest.mark.parametrize("rank", few(1, [0, 3]))
def test_a_slice_is_refused(c: Conversion, rank: int) -> None:
    for source in (c.shard(rank), c.shard(rank).parent):
        refused(c.but(src=source), f"the shard of rank {rank} alone; that of rank")


def test_a_slice_is_refused_through_links(c: Conversion) -> None:
    file, folder = c.folder / f"file{c.shard(1).suffix}", c.folder / "folder"
    file.symlink_to(c.shard(1))
    folder.symlink_to(c.shard(1).parent)
    for source in (file, folder):
        refused(c.but(src=source))


def test_a_slice_is_refused_where_one_stands(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(c.shard(1).parent)
    for source in (Path(), Path(c.shard(1).name)):
        refused(c.but(src=source))


def test_a_slice_in_a_map_is_refused(c: Conversion) -> None:
    out = c.folder / "out.ckpt"
    with pytest.raises(SourceError, match=REFUSED):
        reshard_mpi.transform_checkpoint_by_rank(0, {0: c.shard(2)}, out, dst_strategy_file=c.dst_strategy)
    assert not out.exists()


def test_a_selected_shard_is_refused(c: Conversion) -> None:
    assert REFUSED in c.refused("transform", "--select", "checkpoint_0.*")


def test_a_rank_of_none_is_refused_without_the_others(c: Conversion) -> None:
    c.remove(0, 1, 2)
    said = c.but(src=c.shard(3)).refused()
    assert REFUSED in said and "none of other ranks to compare it with" in said


def test_a_shard_of_rank_0_by_itself_is_a_checkpoint(alike: Conversion) -> None:
    alike.remove(1, 2, 3)
    assert "note" not in alike.but(src=alike.shard(0), dst_strategy=None).done().err
    assert read_shard(alike.written(0)) == as_read(TENSORS)


def test_rank_folders_without_shards_are_named(alike: Conversion) -> None:
    for rank in (1, 2, 3):
        alike.shard(rank).unlink()
    said = alike.but(dst_strategy=None).done("transform", "--to", "safetensors").err
    assert f"warning: {alike.src} is taken for a full checkpoint: the rank folders beside it (ranks 1, 2, 3)" in said


def test_a_shard_beside_an_unfinished_one_is_refused(alike: Conversion) -> None:
    for rank in (1, 2, 3):
        alike.shard(rank).unlink()
    partial = alike.shard(1).with_name(f".{alike.shard(1).name}.0123456789ab.partial")
    partial.touch()
    said = alike.but(dst_strategy=None).refused()
    assert "the shard of another rank is not finished" in said and f"got: {partial}" in said


@pytest.mark.parametrize("rank", few(1, [0, 3]))
def test_what_all_ranks_have_alike_is_a_checkpoint(alike: Conversion, rank: int) -> None:
    for number, source in enumerate((alike.shard(rank), alike.shard(rank).parent)):
        c = alike.but(src=source, dst=alike.folder / f"dst_{number}", dst_strategy=None)
        assert f"note: {source} is taken for a full checkpoint" in c.done().err
        assert read_shard(c.written(0)) == as_read(TENSORS)


def lacks(arrays: dict[str, np.ndarray]) -> None:
    del arrays["b"]


def holds_more(arrays: dict[str, np.ndarray]) -> None:
    arrays["more"] = np.zeros(1, np.int8)


def another_type(arrays: dict[str, np.ndarray]) -> None:
    arrays["b"] = arrays["b"].astype(np.int32)


def another_shape(arrays: dict[str, np.ndarray]) -> None:
    arrays["w"] = arrays["w"].reshape(4, 8)


def another_end(arrays: dict[str, np.ndarray]) -> None:
    arrays["w"] = arrays["w"].copy()
    arrays["w"].reshape(-1)[-1] += 1


DIFFERENCES = {
    lacks: "that of rank 2, beside it, lacks 'b'",
    holds_more: "that of rank 2, beside it, also holds 'more'",
    another_type: "holds 'b' as int32 [8], not int64 [8]",
    another_shape: "holds 'w' as float32 [4, 8], not float32 [8, 4]",
    another_end: "holds other values of 'w'",
}


@pytest.mark.parametrize("change", few(1, DIFFERENCES))
def test_a_sibling_that_differs(alike: Conversion, change: object) -> None:
    arrays = dict(TENSORS)
    change(arrays)  # type: ignore[operator]
    alike.shard(2).unlink()
    write_shard(arrays, alike.shard(2))
    refused(alike.but(src=alike.shard(1)), DIFFERENCES[change])  # type: ignore[index]


@pytest.mark.parametrize("shapes", [[(8, 4), (6, 6), (2, 2)], [(6, 6), (6, 6), (6, 6)]], ids=["shapes", "one shape"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_one_cut_tensor_is_found_among_others_that_differ_in_numbers(
    tmp_path: Path, shapes: list[tuple[int, int]], cut: int
) -> None:
    """Three layers of which one is cut: what one layer shows says nothing of the others."""
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        arrays = {f"layer{number}.weight": np.ones(shape, np.float32) for number, shape in enumerate(shapes)}
        arrays[f"layer{cut}.weight"] *= rank
        write_shard(arrays, tmp_path / f"rank_{rank}" / "net.ckpt")
    with pytest.raises(SourceError, match=f"holds other values of 'layer{cut}.weight'") as caught:
        reshard_mpi.plan(tmp_path / "rank_1")
    assert caught.value.problem == REFUSED


def test_a_sibling_that_cannot_be_read_proves_nothing(alike: Conversion) -> None:
    for rank in (0, 2):
        alike.shard(rank).write_bytes(b"")
    c = alike.but(src=alike.shard(1), dst_strategy=None)
    assert "(compared with rank 3)" in c.done().err
    alike.shard(3).write_bytes(b"")
    refused(alike.but(src=alike.shard(1)), "that of rank 0 cannot be compared (a shard is empty")


def test_folders_of_ranks_without_shards_say_nothing(alike: Conversion) -> None:
    for rank in (1, 2, 3):
        alike.shard(rank).unlink()
    assert "note" not in alike.but(dst_strategy=None).done().err


def test_only_the_shard_of_the_same_name_is_compared(alike: Conversion) -> None:
    for rank in range(4):
        write_shard({"w": np.zeros(rank + 1)}, alike.shard(rank).with_stem("checkpoint_10"))
    c = alike.but(src=alike.shard(1), dst_strategy=None)
    c.done()
    refused(alike.but(src=alike.shard(1).with_stem("checkpoint_10")), "holds 'w' as")
    for rank in (0, 2, 3):
        alike.shard(rank).rename(alike.shard(rank).with_stem("checkpoint_20"))
    refused(alike.but(src=alike.shard(1)), "cannot be compared (no shard of the same name")


def test_loose_files_of_a_rank(alike: Conversion) -> None:
    halves = [{"w": TENSORS["w"]}, {"b": TENSORS["b"]}]
    for rank in range(4):
        alike.shard(rank).unlink()
        for number, half in enumerate(halves):
            write_shard(half, alike.shard(rank).with_stem(f"part_{number}"))
    c = alike.but(src=alike.shard(2).parent, dst_strategy=None)
    c.done()
    assert read_shard(c.written(0)) == as_read(halves[0] | halves[1])
    write_shard({"b": TENSORS["b"] + 1}, alike.shard(3).with_stem("part_1"))
    refused(alike.but(src=alike.shard(2).parent), "holds other values of 'b'")


def test_a_handful_of_siblings_is_looked_at() -> None:
    every = dict.fromkeys(rank for rank in range(100) if rank != 40)
    assert refuse_sources._nearest_and_last(40, every) == [39, 41, 38, 99]
    assert refuse_sources._nearest_and_last(0, {1: None, 2: None}) == [1, 2]


def test_little_of_a_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"layers.{layer}.w": np.full((512, 1024), layer, np.float32) for layer in range(3)}
    arrays |= {f"{chr(97 + number % 26)}{chr(97 + number // 26)}": np.zeros(1024, np.int8) for number in range(200)}
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        write_shard(arrays, tmp_path / f"rank_{rank}" / "net.ckpt")
    compared: list[Check] = []
    samples = refuse_sources._samples

    def kept(ours: object, theirs: object) -> list[Check]:
        sampled = list(samples(ours, theirs))  # type: ignore[arg-type]
        compared.extend(sampled)
        return sampled

    monkeypatch.setattr(refuse_sources, "_samples", kept)
    reshard_mpi.plan(tmp_path / "rank_1")
    assert 20_000 < sum(check.reads[0].size_bytes for check in compared) <= 96 * 1024
    of_w = [check.reads[0].region for check in compared if check.name.startswith("layers.")]
    assert len({check.name for check in compared if check.name.startswith("layers.")}) == 1
    assert (of_w[0].start, of_w[-1].stop) == ((0, 0), (512, 1024)) and len(of_w) == 4


# A source strategy of several ranks, and shards that describe themselves.


def test_with_a_strategy_the_folder_tells_the_rank(c: Conversion) -> None:
    strategy = make(c.folder / "other", c.kind).src_strategy
    said = c.but(src=c.shard(3).parent, src_strategy=strategy).refused()
    assert "expected: box [0:4, 0:2] on one of ranks 0, 2" in said
    assert f"what to do: give {c.src}, where the shards of the other ranks are" in said
    assert not c.dst.exists()


def test_a_shard_that_describes_itself(c: Conversion) -> None:
    strategy = make(c.folder / "other", c.kind).src_strategy
    native = c.but(dst=c.folder / "native", src_strategy=strategy, dst_strategy=strategy)
    native.done("transform", "--to", "hdf5")
    shard = native.but(kind="hdf5").written(3)
    for source in (shard, shard.parent):
        assert f"what to do: give {native.dst}, where the shards" in c.but(src=source).refused()
    assert not c.dst.exists()
    with h5py.File(shard) as file:
        assert (file.attrs["rank"], file.attrs["world_size"]) == (3, 4)


def test_one_shard_can_still_be_inspected(c: Conversion) -> None:
    for source in (c.shard(3), c.shard(3).parent):
        done("inspect", os.fspath(source))
    assert list(reshard_mpi.inspect(c.shard(3).parent)["shards"]) == [3]


def test_the_checkpoint_moved_elsewhere_is_what_the_user_says(c: Conversion) -> None:
    shutil.copytree(c.shard(3).parent, c.folder / "mine")
    c.but(src=c.folder / "mine", dst_strategy=None).done()
    assert read_shard(c.written(0)) == as_read(c.arrays(3))
