"""torch's distributed checkpoints in safetensors: read by what each file says, and never with its last files missing.

`golden/torch_dcp` is of torch 2.13 in two processes: rows, columns, a tensor on both; and what torch consolidates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import done, refused
from support.sliced_peer import At, file_of, torch_file, write_torch

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery, shard_files
from reshard_mpi.errors import ReshardError, ShardError, SourceError
from reshard_mpi.formats.dtypes import BY_NAME, to_numpy
from reshard_mpi.formats.safetensors import torch_dcp
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.folders import FolderConformance, cut_short, lost, written

GOLDEN = Path(__file__).parent / "golden" / "torch_dcp"
SHARDED, CONSOLIDATED = GOLDEN / "sharded", GOLDEN / "consolidated"


def counted(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


# What torch has written


class TestSaved(FolderConformance):
    """Of two ranks."""

    info, src_files = formats.info("dcp-safetensors"), 2
    alone = "one part of a distributed checkpoint of torch"

    def save(self, folder: Path) -> ArraysByName:
        shutil.copytree(SHARDED, folder, dirs_exist_ok=True)
        norm = np.ones(4, to_numpy(BY_NAME["bfloat16"]))
        return {"row.weight": counted(8, 4), "col.weight": counted(4, 8), "norm": norm}


@pytest.mark.slow
def test_it_is_told_and_shown(tmp_path: Path) -> None:
    """Without --to it becomes a folder of Hugging Face's, as torch makes it, or cut safetensors shards of ranks."""
    done("transform", SHARDED, tmp_path / "out", "--from", "dcp-safetensors", "--src-files", "2", "--jobs", "1")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    done("diff", SHARDED, CONSOLIDATED, "--src-files", "2", "--jobs", "1")
    strategy = tmp_path / "two.toml"
    strategy.write_text(
        'mesh = { tp = 2 }\n[[parameter]]\nmatch = "row.*"\nsplit = { 1 = ["tp"] }\n[[parameter]]\nmatch = "*"\n'
    )
    done("transform", SHARDED, tmp_path / "cut", "--dst-strategy", strategy, "--src-files", "2", "--jobs", "2")
    found = reshard_mpi.load_rank(0, tmp_path / "cut", strategy)
    assert found["row.weight"].tolist() == counted(8, 4).tolist()
    assert (tmp_path / "cut" / "rank_1" / "checkpoint_1.safetensors").is_file()
    assert "last files are missing" in json.loads(done("inspect", SHARDED, "--json").out)["notes"][0]
    assert "no shard keeps sums" in refused("verify", SHARDED)


# Which files there should be


@pytest.mark.parametrize("command", ["transform", "plan", "verify", "diff"])
def test_the_user_must_say_how_many_files_there_were(tmp_path: Path, command: str) -> None:
    other = tmp_path / "out" if command in ("transform", "plan") else CONSOLIDATED
    said = refused(command, SHARDED, other)
    assert "tells whether its last files are missing" in said and "--src-files" in said
    assert not (tmp_path / "out").exists()


def test_functions_ask_for_it_too(tmp_path: Path) -> None:
    for call in (
        lambda: reshard_mpi.transform(SHARDED, tmp_path / "out"),
        lambda: reshard_mpi.plan(SHARDED),
        lambda: reshard_mpi.load_rank(0, SHARDED),
        lambda: reshard_mpi.diff(SHARDED, CONSOLIDATED),
        lambda: reshard_mpi.diff(CONSOLIDATED, SHARDED),
        lambda: reshard_mpi.transform_checkpoints(SHARDED, tmp_path / "out", "net"),
    ):
        with pytest.raises(SourceError, match="--src-files"):
            call()
    assert [target.rank for target in reshard_mpi.plan(SHARDED, src_files=2).targets] == [0]
    reshard_mpi.diff(SHARDED, CONSOLIDATED, src_files=2)
    assert len(reshard_mpi.transform(SHARDED, tmp_path / "out", src_files=2).targets) == 1


def test_other_checkpoints_may_be_counted_too(tmp_path: Path) -> None:
    done("transform", CONSOLIDATED, tmp_path / "out", "--src-files", "2", "--jobs", "1")
    assert "other files too" in refused("transform", CONSOLIDATED, tmp_path / "no", "--src-files", "1", "--jobs", "1")
    assert "not as many" in refused("transform", CONSOLIDATED, tmp_path / "no", "--src-files", "3", "--jobs", "1")
    assert "--src-files" in refused("transform", CONSOLIDATED, tmp_path / "no", "--src-files", "0", code=2)


def test_names_may_be_dealt_out_to_several_files(tmp_path: Path) -> None:
    """A rank has only those files for which it has tensors."""
    files = {
        torch_file(1, 1, 2): {"a": At((0,), counted(2))},
        torch_file(1, 2, 2): {"b": At((0, 0), counted(2, 2))},
        torch_file(2, 1, 2): {"a": At((2,), counted(2) + 2)},
    }
    write_torch(tmp_path, files)
    found = reshard_mpi.load_rank(0, tmp_path, src_files=3)
    assert found["a"].tolist() == [0, 1, 2, 3] and found["b"].tolist() == [[0, 1], [2, 3]]


# Random pieces


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Draw into which boxes a tensor is cut: along every dimension anywhere, where parts may be empty."""
    parts = []
    for length in shape:
        inner = draw(st.lists(st.integers(0, length), max_size=2))
        parts.append([slice(low, high) for low, high in pairwise(sorted([0, *inner, length]))])
    return list(product(*parts))


def dealt(draw: Callable[[st.SearchStrategy[Any]], Any], arrays: ArraysByName) -> dict[str, dict[str, At]]:
    """Return files in which the boxes of tensors lie, each of some rank that has not another one of the tensor."""
    cuts = {name: draw(grids(array.shape)) for name, array in arrays.items()}
    ranks = max(map(len, cuts.values()))
    files: dict[str, dict[str, At]] = {torch_file(rank): {} for rank in range(1, ranks + 1)}
    for name, boxes in cuts.items():
        own = draw(st.permutations(range(1, ranks + 1)))
        for rank, box in zip(own, boxes):
            files[torch_file(rank)][name] = At([part.start for part in box], arrays[name][box])
    return files


@pytest.mark.slow
class TestPieces(CheckpointConformance):
    """Boxes of any sizes on any ranks, with one of two numbers of files."""

    info = formats.info("dcp-safetensors")
    count = 0

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        files = dealt(data.draw, arrays)
        write_torch(folder, files)
        self.count = len(files)

    def found(self, folder: Path) -> shard_files.ShardFiles:
        return discovery.find_shards(str(folder), src_files=self.count)


@given(data=st.data(), lost=st.integers(0, 30))
def test_no_file_can_be_lost_unseen(data: st.DataObject, lost: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(), (3,), (4, 3), (2, 2, 3), (0, 2)]), min_size=1, max_size=3))
    arrays = {f"t{at}": counted(*shape) + at for at, shape in enumerate(shapes)}
    files = dealt(data.draw, arrays)
    folder = tmp_path_factory.mktemp("pieces")
    write_torch(folder, files)
    found = reshard_mpi.load_rank(0, folder, src_files=len(files))
    assert {name: (array.shape, array.tobytes()) for name, array in found.items()} == {
        name: (array.shape, array.tobytes()) for name, array in arrays.items()
    }
    (folder / sorted(files)[lost % len(files)]).unlink()
    with pytest.raises((ShardError, SourceError), match=r"the files of rank|not as many files|no checkpoint found"):
        reshard_mpi.load_rank(0, folder, src_files=len(files))


# What files say

UPPER_LOWER = At((0, 0), counted(2, 3)), At((2, 0), counted(2, 3) + 6)
SAYINGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nothing of a tensor": (lambda says: {"v": says["w"]}, "'"),
    "another tensor too": (lambda says: {**says, "v": says["w"]}, "lacks 'v'"),
    "nothing": (lambda _: {}, "does not say where 'w' lies"),
    "too few coordinates": (lambda _: {"w": {"saved_offsets": [2]}}, "'w' cannot lie where its file says"),
    "too many coordinates": (lambda _: {"w": {"saved_offsets": [2, 0, 0]}}, "'w' cannot lie where its file says"),
    "far away": (lambda _: {"w": {"saved_offsets": [1 << 63, 0]}}, "'w' cannot lie where its file says"),
    "behind a hole": (lambda _: {"w": {"saved_offsets": [3, 0]}}, "no chunk of 'w'"),
    "aside": (lambda _: {"w": {"saved_offsets": [0, 5]}}, "no chunk of 'w'"),
    "a far hole": (lambda _: {"w": {"saved_offsets": [1 << 40, 0]}}, "no chunk of 'w'"),
    "negative": (lambda _: {"w": {"saved_offsets": [-1, 0]}}, "does not say where 'w' lies"),
    "no whole number": (lambda _: {"w": {"saved_offsets": [2.0, 0]}}, "does not say where 'w' lies"),
    "no list": (lambda _: {"w": {"saved_offsets": 2}}, "does not say where 'w' lies"),
    "no offsets": (lambda _: {"w": {}}, "does not say where 'w' lies"),
    "something else": (lambda _: {"w": {"saved_offsets": [2, 0], "stride": [1]}}, "does not say where 'w' lies"),
    "a list": (lambda _: [], "is damaged"),
}


# What two files of one tensor are called.
NAMES: dict[str, tuple[list[str], str]] = {
    "no first": ([torch_file(2)], "lacks the files of rank 1"),
    "a rank in between": ([torch_file(1), torch_file(3)], "lacks the files of rank 2"),
    "a file of all ranks": ([torch_file(1, 1, 2), torch_file(2, 1, 2)], "lacks file 2"),
    "two saves": ([torch_file(1, 1, 1), torch_file(2, 1, 2), torch_file(2, 2, 2)], "several distributed checkpoints"),
    "more than there can be": ([torch_file(1, 1, 1), torch_file(1, 2, 1)], "impossible numbers"),
    "rank 0": ([torch_file(0), torch_file(1)], "impossible numbers"),
    "another file": ([torch_file(1), "model.safetensors"], "two checkpoints lie together"),
    "a file of anything": ([torch_file(1), "other.safetensors"], "other files lie beside"),
}


def of_names(folder: Path, names: list[str]) -> None:
    """Write files that are called so in place of what is there."""
    shutil.rmtree(folder)
    write_torch(folder, {name: {f"w{at}": At((0,), counted(2))} for at, name in enumerate(names)})


def second_says(folder: Path, info: Callable[[dict[str, Any]], object] = dict, piece: At = UPPER_LOWER[1]) -> None:
    """Write the second file anew. info: what it says, made of what it should say."""
    write_torch(folder, {torch_file(2): {"w": piece}}, info=info)


OTHER_TYPE, OTHER_DIMENSIONS = At((2, 0), counted(2, 3).astype(np.int16)), At((2,), counted(2))
OVERLAPPING = At((1, 0), counted(3, 3))
SAYS_NOTHING = file_of({"w": counted(2, 3)}, {"format": "pt"})


def object_before(folder: Path) -> None:
    path = folder / torch_file(2)
    path.write_bytes(b"80004 raw bytes of an object" + path.read_bytes())


class TestTwoFiles(FolderConformance):
    """The halves of a tensor; and everything that may be wrong with them."""

    info, src_files, alone = TestSaved.info, 2, TestSaved.alone
    wrong: ClassVar = {
        **{
            f"says: {case}": (partial(second_says, info=info), says, ReshardError)
            for case, (info, says) in SAYINGS.items()
        },
        **{
            f"names: {case}": (partial(of_names, names=names), says, ReshardError)
            for case, (names, says) in NAMES.items()
        },
        "a piece of another type": (partial(second_says, piece=OTHER_TYPE), "contradict each other on 'w'"),
        "a piece of other dimensions": (partial(second_says, piece=OTHER_DIMENSIONS), "contradict each other on 'w'"),
        "a piece that overlaps and differs": (partial(second_says, piece=OVERLAPPING), "'w'", ReshardError),
        "a file that says nothing": (written(torch_file(2), SAYS_NOTHING), "does not say where its tensors lie"),
        "a file that is cut short": (cut_short(torch_file(2)), "truncated"),
        "a file with an object before it": (object_before, "not a safetensors file"),
        "the last file is lost": (lost(torch_file(2)), ("not as many files as you say", torch_file(1)), SourceError),
        "the first file is lost": (lost(torch_file(1)), "lacks the files of rank 1"),
    }

    def save(self, folder: Path) -> ArraysByName:
        write_torch(folder, {torch_file(rank): {"w": piece} for rank, piece in enumerate(UPPER_LOWER, 1)})
        return {"w": np.concatenate([piece.part for piece in UPPER_LOWER])}


TEXTS = {
    "cut short": '{"w": {"saved_offsets": [0',
    "more behind": '{"w": {"saved_offsets": [0]}} 1',
    "a tensor twice": '{"w": {"saved_offsets": [0]}, "w": {"saved_offsets": [0]}}',
    "offsets twice": '{"w": {"saved_offsets": [0], "saved_offsets": [0]}}',
    "no name": '{"": {"saved_offsets": [0]}}',
    "a long name": '{"' + "n" * 30_000 + '": {"saved_offsets": [0]}}',
    "many dimensions": '{"w": {"saved_offsets": [' + ",".join("0" * 40) + "]}}",
    "many digits": '{"w": {"saved_offsets": [' + "9" * 5000 + "]}}",
    "nested deeply": '{"w": ' + "[" * 100_000,
    "nested objects": '{"w":' * 100_000,
    "a field nested": '{"w": {"x": ' + '{"a":' * 100_000,
    "no object": "1",
    "nothing": "",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_damaged(case: str) -> None:
    with pytest.raises(ShardError) as caught:
        torch_dcp.saved_offsets(TEXTS[case], "a file")
    assert "a file" in caught.value.where


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.lists(st.integers(0, 1 << 62), max_size=4).map(tuple),
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_a_text_is_read_as_it_is_written(
    offsets: dict[str, tuple[int, ...]], indent: int | None, ensure_ascii: bool
) -> None:
    says = {name: {"saved_offsets": list(numbers)} for name, numbers in offsets.items()}
    text = json.dumps(says, indent=indent, ensure_ascii=ensure_ascii)
    assert torch_dcp.saved_offsets(text, "") == offsets


# Files by themselves


def test_a_part_by_itself_whatever_it_is_called(tmp_path: Path) -> None:
    """It says itself that it is a part."""
    for name in ("model.safetensors", "model-00002-of-00002.safetensors"):
        shutil.copy(SHARDED / torch_file(2), tmp_path / name)
        with pytest.raises(SourceError, match=TestSaved.alone):
            reshard_mpi.transform(tmp_path / name, tmp_path / "out")
    json_index = {"metadata": {}, "weight_map": {"row.weight": "x.safetensors"}}
    index = tmp_path / "indexed"
    write_torch(index, {"x.safetensors": {"row.weight": At((4, 0), counted(4, 4))}})
    (index / "model.safetensors.index.json").write_text(json.dumps(json_index))
    with pytest.raises(ShardError, match="one part of"):
        reshard_mpi.load_rank(0, index)


def test_what_one_rank_saves_whole_is_read_by_its_index(tmp_path: Path) -> None:
    """torch writes the same metadata there, and all tensors begin at their first element."""
    name = "model-00001-of-00001.safetensors"
    write_torch(tmp_path, {name: {"w": At((0, 0), counted(2, 3))}})
    assert reshard_mpi.load_rank(0, tmp_path / name)["w"].tolist() == counted(2, 3).tolist()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 24}, "weight_map": {"w": name}})
    )
    assert reshard_mpi.load_rank(0, tmp_path)["w"].tolist() == counted(2, 3).tolist()


def test_its_files_are_named_in_order(tmp_path: Path) -> None:
    write_torch(tmp_path, {torch_file(rank): {f"w{rank}": At((0,), counted(1))} for rank in range(1, 12)})
    assert [Path(path).name for path in torch_dcp.files_of(str(tmp_path))] == [torch_file(r) for r in range(1, 12)]
