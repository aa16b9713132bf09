"""Targets in the source, or the source in a target: refused where the one would be taken for a part of the other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import read_shard
from support.command_line import run_here
from support.conversions import Conversion, listing, shards
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi.errors import TargetError

IN_SOURCE = "the target lies in a rank folder of the source"
IN_TARGET = "the source lies in a rank folder of the target"


def in_a_rank_folder(c: Conversion) -> Conversion:
    return c.but(dst=c.src / "rank_0" / "out")


def deep_in_a_rank_folder(c: Conversion) -> Conversion:
    return c.but(dst=c.src / "rank_3" / "a" / "b")


def a_further_rank_folder(c: Conversion) -> Conversion:
    return c.but(dst=c.src / "rank_8")


def a_rank_folder(c: Conversion) -> Conversion:
    return c.but(dst=c.src / "rank_3")


def a_further_rank_folder_by_a_link_to_the_source(c: Conversion) -> Conversion:
    (c.folder / "link").symlink_to(c.src)
    return c.but(dst=c.folder / "link" / "rank_8")


def a_link_into_a_rank_folder(c: Conversion) -> Conversion:
    c.dst.symlink_to(c.src / "rank_1")
    return c.but(dst=c.dst / "out")


def a_rank_folder_that_is_a_link(c: Conversion) -> Conversion:
    (c.folder / "elsewhere").mkdir()
    (c.src / "rank_8").symlink_to(c.folder / "elsewhere")
    return c.but(dst=c.src / "rank_8")


def where_a_rank_folder_of_the_source_leads(c: Conversion) -> Conversion:
    shutil.move(c.src / "rank_2", c.folder / "two")
    (c.src / "rank_2").symlink_to(c.folder / "two")
    return c.but(dst=c.src / "rank_2" / "out")


def a_rank_folder_of_the_target_that_leads_to_one(c: Conversion) -> Conversion:
    c.dst.mkdir()
    (c.src / "rank_8").mkdir()
    (c.dst / "rank_1").symlink_to(c.src / "rank_8")
    return c


def beside_one_shard(c: Conversion) -> Conversion:
    return c.but(src=c.shard(3), dst=c.src / "rank_5", src_strategy=None)


def in_the_folder_of_one_shard(c: Conversion) -> Conversion:
    return c.but(src=c.shard(3).parent, dst=c.shard(3).parent / "out", src_strategy=None)


def a_rank_folder_beside_loose_files(c: Conversion) -> Conversion:
    return c.but(src=shutil.copytree(c.src / "rank_0", c.folder / "loose"), dst=c.folder / "loose" / "rank_1")


def shard_through_a_link(c: Conversion) -> Conversion:
    place = c.folder / "dst" / "rank_5" / "of_rank_1.ckpt"
    place.parent.mkdir(parents=True)
    c.shard(1).rename(place)
    c.shard(1).symlink_to(place)
    return c


def around_one_shard(c: Conversion) -> Conversion:
    return c.but(src=c.shard(3), dst=c.src, src_strategy=None)


@few_cases(
    4,
    "lay",
    [
        in_a_rank_folder,
        deep_in_a_rank_folder,
        a_further_rank_folder,
        a_rank_folder,
        a_further_rank_folder_by_a_link_to_the_source,
        a_link_into_a_rank_folder,
        a_rank_folder_that_is_a_link,
        where_a_rank_folder_of_the_source_leads,
        a_rank_folder_of_the_target_that_leads_to_one,
        beside_one_shard,
        in_the_folder_of_one_shard,
        a_rank_folder_beside_loose_files,
        shard_through_a_link,
        around_one_shard,
    ],
)
def test_a_target_in_a_rank_folder_of_the_source(c: Conversion, lay: Callable[[Conversion], Conversion]) -> None:
    c = lay(c)
    refused(c, IN_SOURCE)


def source_in_a_rank_folder(c: Conversion) -> Conversion:
    shutil.move(c.src, c.folder / "dst" / "rank_0" / "ckpt")
    return c.but(src=c.folder / "dst" / "rank_0" / "ckpt")


def source_in_a_rank_folder_that_is_not_written(c: Conversion) -> Conversion:
    shutil.move(c.src, c.folder / "dst" / "rank_7")
    return c.but(src=c.folder / "dst" / "rank_7")


def source_through_a_link(c: Conversion) -> Conversion:
    shutil.move(c.src, c.folder / "dst" / "rank_7" / "ckpt")
    c.src.symlink_to(c.folder / "dst" / "rank_7" / "ckpt")
    return c


def target_through_a_link(c: Conversion) -> Conversion:
    c = source_in_a_rank_folder(c)
    (c.folder / "link").symlink_to(c.dst)
    return c.but(dst=c.folder / "link")


@few_cases(
    1,
    "lay",
    [
        source_in_a_rank_folder,
        source_in_a_rank_folder_that_is_not_written,
        source_through_a_link,
        target_through_a_link,
    ],
)
def test_a_source_in_a_rank_folder_of_the_target(c: Conversion, lay: Callable[[Conversion], Conversion]) -> None:
    (c.folder / "dst" / "rank_0").mkdir(parents=True)
    c = lay(c)
    refused(c, IN_TARGET)


def refused(c: Conversion, problem: str) -> None:
    before = listing(c.folder)
    for command in ("transform", "plan"):
        said = c.refused(command)
        assert problem in said and f"got: {c.dst}" in said
        assert f"where: {c.src}" in said and "what to do: choose a target" in said
    with pytest.raises(TargetError, match=problem):
        reshard_mpi.transform_checkpoints(c.src, c.dst, "net", c.src_strategy, c.dst_strategy)
    assert listing(c.folder) == before


@pytest.mark.parametrize("source", few(1, [".", "../src"]))
@pytest.mark.parametrize("target", few(1, ["out", "./rank_0/../out", "out/rank_0", "../rank_0"]))
def test_a_target_in_the_source_that_nobody_takes_for_a_shard(
    c: Conversion, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    before = shards(c.src)
    monkeypatch.chdir(c.src)
    nested = c.but(src=Path(source), dst=Path(target))
    nested.done()
    for rank in range(2):
        assert read_shard(nested.written(rank)) == c.expected(rank)
    assert shards(c.src) == before
    again = c.but(dst=c.folder / "again")
    again.done()  # the source is read as before


def test_one_target_by_rank_in_place_of_a_source_that_is_not_listed(c: Conversion) -> None:
    """Ranks 2 and 3 hold the same as 0 and 1, so they need not be listed, but they are the source's nevertheless."""
    listed = {rank: c.shard(rank) for rank in (0, 1)}
    before = listing(c.src)
    for place in (c.shard(2), c.src / "rank_9" / "checkpoint_9.ckpt", c.src / "rank_02" / "checkpoint_2.ckpt"):
        with pytest.raises(TargetError, match="would be taken for a shard of the source"):
            reshard_mpi.transform_checkpoint_by_rank(0, listed, place, c.src_strategy, c.dst_strategy)
        (c.folder / "link").unlink(missing_ok=True)
        (c.folder / "link").symlink_to(place.parent)
        with pytest.raises(TargetError, match="would be taken for a shard of the source"):
            reshard_mpi.transform_checkpoint_by_rank(
                0, listed, c.folder / "link" / place.name, c.src_strategy, c.dst_strategy
            )
    assert listing(c.src) == before


def test_one_target_by_rank_under_another_name(c: Conversion) -> None:
    listed = {rank: c.shard(rank) for rank in (0, 1)}
    with pytest.raises(TargetError, match="would be taken for a shard of the source"):
        place = c.src / "rank_0" / "new_0.ckpt"
        reshard_mpi.transform_checkpoint_by_rank(0, listed, place, c.src_strategy, c.dst_strategy)
    assert not place.exists()
    place = c.src / "out" / "rank_0" / "checkpoint_0.ckpt"
    reshard_mpi.transform_checkpoint_by_rank(0, listed, place, c.src_strategy, c.dst_strategy)
    assert read_shard(place) == c.expected(0)


def a_file_there(c: Conversion, file: str) -> Path:
    return c.dst / file


def a_link_to_it(c: Conversion, file: str) -> Path:
    (c.folder / f"link{Path(file).suffix}").symlink_to(c.dst / file)
    return c.folder / f"link{Path(file).suffix}"


@pytest.mark.parametrize("place", few(1, [a_file_there, a_link_to_it]))
@pytest.mark.parametrize("to", ["hdf5", "torch"])
def test_a_target_of_an_earlier_run_is_no_source_of_the_run_that_removes_it(
    c: Conversion, place: Callable[[Conversion, str], Path], to: str
) -> None:
    full = c.but(dst_strategy=None)
    full.done("transform", "--to", "hf")
    before = listing(c.dst)
    source = place(c, "model.safetensors")
    refused = run_here("transform", source, c.dst, "--to", to, "--overwrite", "--jobs", "1")
    assert refused.code == 3 and "a target of an earlier run in this folder, which --overwrite removes" in refused.err
    assert listing(c.dst) == before


def test_a_copy_by_hard_links_of_what_an_earlier_run_has_made_is_a_source(c: Conversion) -> None:
    """Targets take the place of names of its files, or these are removed: the files themselves stay as they are."""
    c.done()
    copy = c.folder / "copy"
    shutil.copytree(c.dst, copy, copy_function=os.link)
    before = shards(copy)
    for to in ("ckpt", "hf", "ckpt"):
        anew = reshard_mpi.transform(copy, c.dst, c.dst_strategy, to=to, overwrite=True)
        assert len(anew.targets) == 1
        reshard_mpi.diff(c.src, c.dst, c.src_strategy)
    back = reshard_mpi.transform(copy, c.dst, c.dst_strategy, c.src_strategy, overwrite=True)
    assert len(back.targets) == 4 and shards(copy) == before
