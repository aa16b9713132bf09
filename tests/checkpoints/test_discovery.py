"""Which files of a folder are the shards of a checkpoint, and of which rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_shard, write_strategy
from support.conversions import make
from support.toys import registered_toys
from toy_package import toy_folder

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import find_shards, shards_from_map
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.errors import DisagreementError, ReshardError, SourceError

__all__ = ["registered_toys"]


def lay(folder: Path, *names: str) -> Path:
    """Make files of these names, with a byte that no strategy begins with."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n")
    return folder


def chosen_files(folder: Path, select: str | None = None) -> dict[int, list[str]]:
    """Return the chosen files by rank, relative to the folder."""
    shards = find_shards(str(folder), select)
    assert shards.path == str(folder)
    return {rank: [str(Path(path).relative_to(folder)) for path in paths] for rank, paths in shards.by_rank.items()}


def refusal(kind: type[ReshardError], folder: Path, select: str | None = None) -> ReshardError:
    with pytest.raises(kind) as refused:
        find_shards(str(folder), select)
    assert refused.value.expected and refused.value.got
    assert refused.value.where.startswith(str(folder))
    return refused.value


# Rank folders


def test_rank_folders_are_taken_by_their_numbers(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/net.ckpt" for rank in (10, 9, 0)))
    assert chosen_files(tmp_path) == {0: ["rank_0/net.ckpt"], 9: ["rank_9/net.ckpt"], 10: ["rank_10/net.ckpt"]}
    assert list(chosen_files(tmp_path)) == [0, 9, 10]
    assert find_shards(str(tmp_path)).notes == ()


@pytest.mark.parametrize(("ending", "name"), [("ckpt", "ckpt"), ("h5", "hdf5"), ("hdf5", "hdf5")])
def test_the_ending_tells_the_format(tmp_path: Path, ending: str, name: str) -> None:
    lay(tmp_path, f"rank_0/net.{ending}", f"rank_1/net.{ending}")
    assert find_shards(str(tmp_path)).format == name


def test_what_else_lies_in_the_folders_does_not_count(tmp_path: Path) -> None:
    lay(tmp_path, "rank_0/checkpoint-3_1875.ckpt", "rank_1/checkpoint-3_1875.ckpt")
    lay(tmp_path, "rank_0/checkpoint-graph.meta", "rank_0/notes.txt", "rank_0/.checkpoint.ckpt", "rank_0/.x.partial")
    lay(tmp_path, "loose.ckpt", "rank_two/net.ckpt", "rank_3x/net.ckpt", "my_rank_4/net.ckpt")
    lay(tmp_path, "rank_5/folder.ckpt/net.txt")
    (tmp_path / "rank_6").mkdir()
    (tmp_path / "rank_7").write_bytes(b"\n")
    write_strategy(make(tmp_path / "other").source, tmp_path / "rank_0" / "strategy.ckpt")
    assert chosen_files(tmp_path) == {rank: [f"rank_{rank}/checkpoint-3_1875.ckpt"] for rank in (0, 1)}


def test_folders_without_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_1").mkdir()
    assert refusal(SourceError, tmp_path).got == "2 folders without"


def test_one_rank_in_two_folders_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "rank_1/net.ckpt", "rank_01/net.ckpt")
    error = refusal(SourceError, tmp_path)
    assert error.problem == "two folders are of one rank"
    assert error.got == "rank_01 and rank_1"


# Several checkpoints in a folder


def test_the_newest_is_chosen_by_natural_order_and_said(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/net-{step}.ckpt" for rank in (0, 1) for step in ("9_5", "10_5", "2_100")))
    assert chosen_files(tmp_path) == {rank: [f"rank_{rank}/net-10_5.ckpt"] for rank in (0, 1)}
    (note,) = find_shards(str(tmp_path)).notes
    assert "net-10_5.ckpt chosen, the newest by name that all ranks have" in note


@pytest.mark.parametrize(
    ("ranks", "others", "newest"),
    [
        pytest.param((0, 1), [], "net-3_{0}.ckpt", id="a number that is the rank"),
        pytest.param((1, 11), ["net_rank_{0}-1_11.ckpt"], "net_rank_{0}-2_11.ckpt", id="the rank in the name"),
        pytest.param(range(8), ["llama2_7b_rank_{0}-1_99.ckpt"], "llama2_7b_rank_{0}-1_100.ckpt", id="the rank twice"),
        pytest.param((0, 1), ["net1²9.ckpt"], "net1²10.ckpt", id="odd digits"),
        # MindSpore puts a number before the epoch where a file of that name was there before.
        pytest.param((0, 1), ["net-1_100.ckpt", "net_1-1_100.ckpt"], "net_2-1_100.ckpt", id="earlier runs"),
    ],
)
def test_the_newest_of_names_with_several_numbers(
    tmp_path: Path, ranks: Iterable[int], others: list[str], newest: str
) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name.format(rank)}" for rank in ranks for name in (newest, *others)))
    assert chosen_files(tmp_path) == {rank: [f"rank_{rank}/{newest.format(rank)}"] for rank in ranks}


def test_steps_that_happen_to_be_ranks_are_not_one_checkpoint(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/net-1_{step}.ckpt" for rank in (0, 1) for step in (rank, rank + 5)))
    assert refusal(SourceError, tmp_path).problem == "no checkpoint that all rank folders have"


def test_the_newest_is_one_that_all_ranks_have(tmp_path: Path) -> None:
    lay(tmp_path, "rank_0/net-1_5.ckpt", "rank_0/net-2_5.ckpt", "rank_0/net-3_5.ckpt")
    lay(tmp_path, "rank_1/net-1_5.ckpt", "rank_1/net-2_5.ckpt")
    assert chosen_files(tmp_path) == {rank: [f"rank_{rank}/net-2_5.ckpt"] for rank in (0, 1)}


def test_a_choice_that_is_none_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "rank_0/a-1.ckpt", "rank_0/a-2.ckpt", "rank_1/a-3.ckpt", "rank_1/a-4.ckpt")
    error = refusal(SourceError, tmp_path)
    assert error.got == "rank_0: a-2.ckpt; rank_1: a-4.ckpt"
    assert "--select" in error.remedy


def test_shards_of_different_moments_are_refused(tmp_path: Path) -> None:
    lay(tmp_path, "rank_0/net-3_5.ckpt", "rank_1/net-3_5.ckpt", "rank_2/net-4_5.ckpt")
    error = refusal(DisagreementError, tmp_path)
    assert error.expected == "epoch 3 step 5, as net-3_5.ckpt of rank 0"
    assert error.got == "epoch 4 step 5: net-4_5.ckpt of rank 2"


# Several files of a rank that are not checkpoints of several steps


@pytest.mark.parametrize("ending", ["h5", "ckpt", "safetensors"])
def test_a_model_and_its_optimizer_in_two_files_are_not_two_moments(tmp_path: Path, ending: str) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name}.{ending}" for rank in (0, 1) for name in ("model", "optim")))
    error = refusal(SourceError, tmp_path)
    assert error.problem == "several files of one rank"
    assert error.expected == "one file a rank, or names that differ in their step only"
    assert error.got == f"model.{ending}, optim.{ending} of rank 0"
    assert f"--select 'model.{ending}' or --select 'optim.{ending}'" in error.remedy
    assert chosen_files(tmp_path, "model*") == {rank: [f"rank_{rank}/model.{ending}"] for rank in (0, 1)}


def test_a_rank_that_lacks_one_of_two_kinds_of_files_does_not_give_the_other(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name}.h5" for rank in range(4) for name in ("model", "optim")))
    (tmp_path / "rank_3" / "optim.h5").unlink()
    assert refusal(SourceError, tmp_path).problem == "several files of one rank"


def test_words_are_told_from_the_steps_between_them(tmp_path: Path) -> None:
    names = ("model_10_rank_{}.h5", "model_9_rank_{}.h5", "optim_10_rank_{}.h5")
    lay(tmp_path, *(f"rank_{rank}/{name.format(rank)}" for rank in (0, 1) for name in names))
    error = refusal(SourceError, tmp_path)
    assert "--select 'model_*_rank_*.h5'" in error.remedy
    assert chosen_files(tmp_path, "model_*_rank_*.h5")[1] == ["rank_1/model_10_rank_1.h5"]


def test_parts_of_the_shard_of_a_rank_are_refused(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/model-0000{part}-of-00002.h5" for rank in (0, 1) for part in (1, 2)))
    for select in (None, "model-00001*"):
        error = refusal(SourceError, tmp_path, select)
        assert error.problem == "several files hold the shard of one rank together, each a part of it"
        assert "model-00001-of-00002.h5" in error.got


def test_a_part_of_the_only_rank_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "rank_0/model-00001-of-00002.h5")
    assert "each a part of it" in refusal(SourceError, tmp_path).problem


@pytest.mark.parametrize("first", [0, 1])
def test_shards_may_be_called_as_parts_by_their_ranks(tmp_path: Path, first: int) -> None:
    names = {rank: [f"rank_{rank}/model-0000{rank + first}-of-00004.h5"] for rank in range(4)}
    lay(tmp_path, *(name for found_names in names.values() for name in found_names))
    assert chosen_files(tmp_path) == names
    assert not find_shards(str(tmp_path)).warnings


# One file of each rank, of different names


@pytest.mark.parametrize(
    ("names", "moments"),
    [
        (("step_100.h5", "step_200.h5"), ("step 100", "step 200")),
        (("model-iter0000100.h5", "model-iter0000200.h5"), ("step 100", "step 200")),
        (("global_step7_rank0.pt", "global_step8_rank1.pt"), ("step 7", "step 8")),
        (("checkpoint-100.h5", "checkpoint-200.h5"), ("step 100", "step 200")),
        (("net-0_5.ckpt", "net-1_5.ckpt"), ("epoch 0 step 5", "epoch 1 step 5")),
        (("net-1_0.ckpt", "net-2_1.ckpt"), ("epoch 1 step 0", "epoch 2 step 1")),
        (("net-1_100.ckpt", "net_1-1_200.ckpt"), ("epoch 1 step 100", "epoch 1 step 200")),
    ],
)
def test_names_of_different_steps_are_refused(tmp_path: Path, names: tuple[str, str], moments: tuple[str, str]) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name}" for rank, name in enumerate(names)))
    error = refusal(DisagreementError, tmp_path)
    assert error.expected == f"{moments[0]}, as {names[0]} of rank 0"
    assert error.got == f"{moments[1]}: {names[1]} of rank 1"


@pytest.mark.parametrize(
    "names",
    [
        ("model.h5", "optim.h5"),
        ("mp_rank_00_01.pt", "mp_rank_01_00.pt"),
        ("7.h5", "9.h5"),
        ("net-1763862000.h5", "net-1763862003.h5"),  # seconds since 1970
        ("net-20261123013301.h5", "net-20261123013307.h5"),
    ],
)
def test_selected_names_that_differ_in_more_than_the_rank_are_warned_of(tmp_path: Path, names: tuple[str, str]) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name}" for rank, name in enumerate(names)))
    (warning,) = find_shards(str(tmp_path), "*").warnings
    assert warning.endswith(f"differ in more than the rank, as {names[0]} of rank 0 and {names[1]} of rank 1")


@pytest.mark.parametrize(
    "numbers",
    [
        (100, 200),
        (100, 200, 300),
        (100, 100, 100, 200),
        (5, 5, 5, 6),  # 6 may be that of a rank, but three share 5
        (100, 200) * 4,
        (0, 1, 2, 300),
        (*range(30), 999, 31),
        (*range(8), *range(8)),  # the device of each of two hosts
        (*range(32, 40),),  # the second half of a larger run
        (1763862000, 1763862003),  # seconds since 1970
    ],
)
@pytest.mark.parametrize("form", ["net-{}.h5", "model_{}.pt", "w{}.ckpt"])
def test_numbers_that_are_not_the_ranks_are_refused_unless_selected(
    tmp_path: Path, numbers: tuple[int, ...], form: str
) -> None:
    names = [form.format(number) for number in numbers]
    lay(tmp_path, *(f"rank_{rank}/{name}" for rank, name in enumerate(names)))
    with pytest.raises(DisagreementError, match="differ in a number that is not that of the rank") as raised:
        find_shards(str(tmp_path))
    error = raised.value
    name, _, rank = str(error.got).partition(" of rank ")
    assert error.expected.endswith(f"as {names[0]} of rank 0")
    assert name == names[int(rank)] != names[0]
    assert names[0] in error.remedy
    selected = re.findall("--select '([^']*)'", error.remedy)
    assert len(selected) == 2
    (warning,) = find_shards(str(tmp_path), selected[1]).warnings
    assert "differ in more than the rank" in warning


@pytest.mark.parametrize(
    "name", ["checkpoint_{}.ckpt", "net-3_{}.ckpt", "mp_rank_0{}_model.pt", "{}.h5", "net.h5", "w_4_rank_{}.hdf5"]
)
def test_names_that_differ_in_the_rank_alone_need_no_word(tmp_path: Path, name: str) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name.format(rank)}" for rank in range(3)))
    found = find_shards(str(tmp_path))
    assert not found.warnings and not found.notes


# Selection


def test_select_chooses_among_names(tmp_path: Path) -> None:
    lay(tmp_path, *(f"rank_{rank}/{name}" for rank in (0, 1) for name in ("a-1_1.ckpt", "a-2_1.ckpt", "b-1_1.h5")))
    assert chosen_files(tmp_path, "*-1_1.ckpt") == {rank: [f"rank_{rank}/a-1_1.ckpt"] for rank in (0, 1)}
    assert find_shards(str(tmp_path), "*.h5").format == "hdf5"
    error = refusal(SourceError, tmp_path, "c*")
    endings = ", ".join(formats.suffixes())
    assert error.expected == f"files that end in {endings} and match 'c*' (--select) in its rank folders"


@pytest.mark.parametrize(
    "names", [("rank_0/a.ckpt", "rank_0/a.h5"), ("rank_0/a.ckpt", "rank_1/a.hdf5"), ("a.h5", "b.ckpt")]
)
def test_two_formats_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    lay(tmp_path, *names)
    error = refusal(SourceError, tmp_path)
    assert error.problem == "shards of two formats lie together"
    assert all(Path(name).name in error.got for name in names)
    assert "--select" in error.remedy


# Loose files


def test_one_file_is_a_full_checkpoint(tmp_path: Path) -> None:
    path = str(lay(tmp_path, "net.ckpt") / "net.ckpt")
    assert find_shards(path)._replace(looks=None) == ShardFiles(path, "ckpt", {0: (path,)})


def test_loose_files_are_one_full_checkpoint_together(tmp_path: Path) -> None:
    lay(tmp_path, "net_10.ckpt", "net_9.ckpt", "notes.txt")
    assert chosen_files(tmp_path) == {0: ["net_9.ckpt", "net_10.ckpt"]}


def test_loose_shards_that_describe_themselves_have_their_own_ranks(tmp_path: Path) -> None:
    conversion = make(tmp_path, "hdf5")
    strategies = conversion.src_strategy, conversion.dst_strategy
    reshard_mpi.transform_checkpoints(conversion.src, conversion.dst, "checkpoint_", *strategies, 1, "hdf5")
    loose = tmp_path / "loose"
    loose.mkdir()
    for rank, name in ((0, "z.h5"), (1, "a.h5")):
        conversion.written(rank).rename(loose / name)
    assert chosen_files(loose) == {0: ["z.h5"], 1: ["a.h5"]}
    assert find_shards(str(loose / "a.h5")).by_rank == {1: (str(loose / "a.h5"),)}
    (loose / "copy.h5").write_bytes((loose / "a.h5").read_bytes())
    error = refusal(SourceError, loose)
    assert error.problem == "two shards say they are the same rank"
    assert "rank 1 in " in error.got


@pytest.mark.parametrize(
    ("name", "got"), [("net.txt", "net.txt"), ("strategy.ckpt", "a strategy file")], ids=["ending", "strategy"]
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / name).write_bytes(b"\x08\x00")
    assert refusal(SourceError, tmp_path / name).got == got


def test_nothing_is_refused(tmp_path: Path) -> None:
    assert refusal(SourceError, tmp_path).got == "neither"
    assert refusal(SourceError, tmp_path / "gone").problem == "the source is not there"


# A map of files


def test_a_map_of_files_is_taken_as_it_is(tmp_path: Path) -> None:
    lay(tmp_path, "b.ckpt", "a.ckpt")
    shards = shards_from_map({3: tmp_path / "b.ckpt", 1: str(tmp_path / "a.ckpt")})
    by_rank = {1: (str(tmp_path / "a.ckpt"),), 3: (str(tmp_path / "b.ckpt"),)}
    assert shards._replace(looks=None) == ShardFiles(str(tmp_path), "ckpt", by_rank, picked=True)


def test_maps_that_cannot_be_are_refused(tmp_path: Path) -> None:
    lay(tmp_path, "a.ckpt", "a.h5", "a.txt")
    for files, problem in (
        ({}, "the map of checkpoint files is empty"),
        ({0: tmp_path / "gone.ckpt"}, "a shard file is not there"),
        ({0: tmp_path / "a.ckpt", 1: tmp_path / "a.h5"}, "shards of two formats lie together"),
        ({0: tmp_path / "a.txt"}, "no checkpoint found in the source"),
        ({-1: tmp_path / "a.ckpt"}, "the map of checkpoint files has no such rank"),
    ):
        with pytest.raises(SourceError) as refused:
            shards_from_map(files)
        assert refused.value.problem == problem


def test_a_map_of_different_moments_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "net-1_5.ckpt", "net-2_5.ckpt")
    with pytest.raises(DisagreementError, match="different moments"):
        shards_from_map({rank: tmp_path / f"net-{rank + 1}_5.ckpt" for rank in (0, 1)})


def test_which_of_two_formats_is_meant(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        write_shard({"w": np.zeros(3)}, folder / "a.ckpt")
        write_shard({"w": np.zeros(3)}, folder / "a.h5")
    with pytest.raises(SourceError, match=r"shards of two formats lie together(.|\n)*--from ckpt"):
        find_shards(str(tmp_path))
    for name, ending in (("ckpt", "ckpt"), ("hdf5", "h5")):
        chosen = find_shards(str(tmp_path), format_name=name)
        assert chosen.format == name and {Path(path).name for (path,) in chosen.by_rank.values()} == {f"a.{ending}"}


def test_one_file_of_another_ending(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin~"
    write_shard({"w": np.zeros(3)}, tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt").rename(path)
    with pytest.raises(SourceError, match="no checkpoint found"):
        find_shards(str(path))
    assert find_shards(str(path), format_name="ckpt").format == "ckpt"


@pytest.mark.usefixtures("registered_toys")
def test_an_index_beside_rank_folders(tmp_path: Path) -> None:
    (tmp_path / toy_folder.INDEX).write_text("[{}, {}]")
    (tmp_path / "rank_0").mkdir()
    write_shard({"w": np.zeros(3)}, tmp_path / "rank_0" / "a.ckpt")
    both = r"two checkpoints lie together(.|\n)*1 rank folders and toys.index.json \(toys\)"
    with pytest.raises(SourceError, match=both):
        find_shards(str(tmp_path))
    assert find_shards(str(tmp_path), format_name="toys").is_folder
    assert find_shards(str(tmp_path), format_name="ckpt").by_rank == {0: (str(tmp_path / "rank_0" / "a.ckpt"),)}
