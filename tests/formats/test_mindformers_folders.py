"""MindFormers' second form: read by its index, whatever is cut, copied or left out, and refused where it must be.

`golden/mindformers` is of MindFormers' own functions and MindSpore 2.10: four ranks, rows, columns, both, nested.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from support import ckpt_peer, safetensors_peer
from support.checkpoints import flip_bits
from support.command_line import done, refused
from support.dcp_peer import arrays_of
from support.examples import few
from support.processes import run_command
from support.sliced_peer import COMMON, Sliced, change_index, file_of, mindformers_file, write_mindformers

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.errors import CoverageError, ReshardError, ShardError, SourceError
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.safetensors import mindformers, mindformers_index
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.folders import FolderConformance, lost, written

GOLDEN = Path(__file__).parent / "golden" / "mindformers"
LATEST, ITERATION = "latest_checkpointed_iteration.txt", "iteration_00000002"
FIRST = mindformers_file("model", 0, 2)


def counted(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


# What MindFormers has written


class TestSaved(FolderConformance):
    """Of four ranks."""

    info, index, alone = formats.info("mindformers"), "metadata.json", "one part of a MindFormers checkpoint"

    def save(self, folder: Path) -> ArraysByName:
        shutil.copytree(GOLDEN / ITERATION, folder, dirs_exist_ok=True)
        shapes = dict.fromkeys(("row.weight", "nested.weight", "adam_m.row.weight"), (8, 4))
        shapes |= {"col.weight": (4, 8), "both.weight": (4, 8)}
        return {"norm": counted(4), **{name: counted(*shape) for name, shape in shapes.items()}}

    def lead_outside(self, folder: Path, file: str) -> str:
        change_index(folder, _storage(norm=[{"file_name": file}]))
        return "('norm', (0,)) lies outside"

    def rewritten(self, facts: Any) -> Any:
        more = {"more": [1, "x", {"y": [None, -2.5e3, True]}]}
        is_small = isinstance(facts, dict) and ("file_name" in facts or "global_offset" in facts)
        return {**more, **super().rewritten(facts)} if is_small else super().rewritten(facts)


def test_what_is_said_of_the_training_is_a_nest() -> None:
    nest = json.loads(mindformers.open_folder(str(GOLDEN / ITERATION))[0].strings[NEST])
    common = json.loads((GOLDEN / ITERATION / "common.json").read_text())
    assert nest == {"dict": [["common", {"dict": [list(item) for item in common.items()]}]]}


def test_what_is_said_of_another_step_than_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ITERATION
    shutil.copytree(GOLDEN / ITERATION, folder)
    said = json.loads((folder / "common.json").read_text())
    for steps in ({"step_num": 3, "global_step": 3}, {"global_step": 1, "step_num": "?"}):
        (folder / "common.json").write_text(json.dumps(said | steps))
        assert "common.json of a checkpoint is of another save" in refused("transform", folder, tmp_path / "out")
    for steps in ({"step_num": 0}, {"global_step": 1}, {"step_num": "?", "global_step": None}):  # one of them counts
        (folder / "common.json").write_text(json.dumps(said | steps))
        mindformers.open_folder(str(folder))
    folder.rename(tmp_path / "by any name")
    (tmp_path / "by any name" / "common.json").write_text(json.dumps(said | {"step_num": 3, "global_step": 3}))
    done("transform", tmp_path / "by any name", tmp_path / "out")


@pytest.mark.slow
def test_it_is_cut_over_ranks(tmp_path: Path) -> None:
    """Without --to the targets are MindSpore's safetensors shards."""
    strategy = tmp_path / "two.toml"
    strategy.write_text(
        'mesh = { tp = 2 }\n[[parameter]]\nmatch = "*.weight"\nsplit = { 1 = ["tp"] }\n[[parameter]]\nmatch = "*"\n'
    )
    done("transform", GOLDEN, tmp_path / "out", "--dst-strategy", strategy, "--jobs", "2")
    for rank in (0, 1):
        path = tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        held = {name: tensor.content for name, tensor in safetensors_peer.read(path).tensors.items()}
        half = slice(4 * rank, 4 * rank + 4)
        assert held["both.weight"] == counted(4, 8)[:, half].tobytes()
        assert held["adam_m.row.weight"] == counted(8, 4)[:, 2 * rank : 2 * rank + 2].tobytes()
    done("diff", GOLDEN, tmp_path / "out", "--dst-strategy", strategy, "--jobs", "1")


def test_it_is_told_and_shown(tmp_path: Path) -> None:
    said = done("transform", GOLDEN, tmp_path / "out", "--from", "mindformers", "--jobs", "1").err
    assert f"note: {ITERATION} of {GOLDEN} is read, the latest as {LATEST} says" in said
    assert "note:" not in done("plan", GOLDEN / ITERATION, tmp_path / "other").out
    assert "6 tensors, 656 B" in done("inspect", GOLDEN / ITERATION).out
    assert arrays_of(GOLDEN)["both.weight"].tobytes() == counted(4, 8).tobytes()


def test_every_file_is_verified_by_itself(tmp_path: Path) -> None:
    """They have no sums, but for MindSpore's checksum where it was asked for."""
    assert "no shard keeps sums" in refused("verify", GOLDEN)
    path = tmp_path / mindformers_file("model", 0, 1)
    shutil.copy(GOLDEN.parent / "mindspore" / "with_crc.safetensors", path)
    done("verify", tmp_path)
    done("transform", tmp_path, tmp_path / "out", "--verify", "--jobs", "1")
    flip_bits(path, -1)
    assert "its own checksum" in refused("verify", tmp_path, code=4)
    assert "checksum" in refused("transform", tmp_path, tmp_path / "again", "--verify", "--jobs", "1")


# Random checkpoints


@pytest.mark.slow
class TestSlices(CheckpointConformance):
    """Random cuts, each slice in one file or more, with or without redundancy."""

    info = formats.info("mindformers")

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        total = data.draw(st.integers(2, 4))
        tensors = {}
        for name, whole in arrays.items():
            counts = tuple(
                data.draw(st.sampled_from([count for count in (1, 2, 3) if length % count == 0]))
                for length in whole.shape
            )
            free = list(range(total))
            slices = int(np.prod(counts, dtype=int))
            if slices > total:
                counts, slices = (1,) * whole.ndim, 1
            first = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(slices)]
            copies = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
            holders = [[holder] for holder in first]
            for copy in copies:
                holders[data.draw(st.integers(0, slices - 1))].append(copy)
            tensors[name] = Sliced(whole, counts, holders, data.draw(st.sampled_from(["model", "opt"])))
        write_mindformers(folder, tensors, total)


# Copies, and what is lost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks: rows cut, a tensor on both, the optimizer's rows."""
    write_mindformers(tmp_path / ITERATION, small(), 2)
    return tmp_path / ITERATION


def small() -> dict[str, Sliced]:
    return {
        "w": Sliced(counted(4, 2), (2, 1), [[0], [1]]),
        "norm": Sliced(counted(3), (1,), [[0, 1]]),
        "adam_m.w": Sliced(counted(4, 2), (2, 1), [[0], [1]], "opt"),
    }


def test_a_lost_file_is_replaced_where_another_has_the_same(tmp_path: Path) -> None:
    tensors = {"w": Sliced(counted(4, 2), (2, 1), [[0, 2], [1, 3]]), "n": Sliced(counted(2), (1,), [[0, 1, 2, 3]])}
    write_mindformers(tmp_path, tensors, 4)
    (tmp_path / mindformers_file("model", 0, 4)).unlink()
    done("transform", tmp_path, tmp_path / "verified", "--jobs", "1", "--verify")
    (tmp_path / mindformers_file("model", 1, 4)).write_bytes(b"cut short")
    said = done("transform", tmp_path, tmp_path / "out", "--jobs", "1").err
    assert said.count("cannot be used, what it holds was taken from others") == 2
    assert arrays_of(tmp_path)["w"].tobytes() == counted(4, 2).tobytes()
    (tmp_path / mindformers_file("model", 2, 4)).unlink()
    assert "no chunk of 'w'" in refused("transform", tmp_path, tmp_path / "again", "--jobs", "1")
    with pytest.raises(CoverageError, match="no chunk of 'w'"):
        arrays_of(tmp_path)


def test_copies_that_differ_are_refused(folder: Path) -> None:
    write_mindformers(folder, {**small(), "norm": Sliced(counted(3), (1,), [[0]])}, 2)
    other = {"w": counted(4, 2)[2:], "norm": counted(3) + 1}
    (folder / mindformers_file("model", 1, 2)).write_bytes(file_of(other, {}))
    change_index(
        folder,
        lambda index: index["storage_data"]["('norm', (0,))"].append({"file_name": mindformers_file("model", 1, 2)}),
    )
    assert "'norm'" in refused("transform", folder, folder / "out", "--jobs", "1")
    done("transform", folder, folder / "out", "--jobs", "1", "--replicas", "any")


def test_one_device_saves_no_index(tmp_path: Path) -> None:
    model, optimizer = mindformers_file("model", 0, 1), mindformers_file("opt", 0, 1)
    (tmp_path / model).write_bytes(file_of({"w": counted(2, 3)}, {}))
    (tmp_path / optimizer).write_bytes(file_of({"adam_m.w": counted(2, 3)}, {}))
    (tmp_path / "common.json").write_text(json.dumps(COMMON))
    assert (
        "MindFormers checkpoint, 2 files, 2 tensors" in done("transform", tmp_path, tmp_path / "out", "--jobs", "1").err
    )
    found = arrays_of(tmp_path)
    assert found.keys() == {"w", "adam_m.w"} and found["w"].tobytes() == counted(2, 3).tobytes()
    (tmp_path / optimizer).write_bytes(b"no safetensors")
    with pytest.raises(ShardError, match="a shard is a text that begins with"):
        arrays_of(tmp_path)


def test_numbers_that_the_index_does_not_list(folder: Path) -> None:
    counter = {"global_step": np.array([20], np.int64)}
    others = {mindformers_file("opt", number, 2): counter for number in (0, 1)}
    write_mindformers(folder, small(), 2, others=others)
    assert arrays_of(folder)["global_step"].tolist() == [20]
    (folder / mindformers_file("opt", 1, 2)).write_bytes(
        file_of({"adam_m.w": counted(4, 2)[2:], "global_step": np.array([21], np.int64)}, {})
    )
    assert "'global_step'" in refused("transform", folder, folder / "out", "--jobs", "1")


def test_a_tensor_called_as_what_is_said_of_the_training(tmp_path: Path) -> None:
    write_mindformers(tmp_path, {"common": Sliced(counted(3), (1,), [[0, 1]])}, 2)
    (tmp_path / "common.json").unlink()
    assert arrays_of(tmp_path)["common"].tolist() == [0, 1, 2]


# Wrong folders


def _tensor(name: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["state_dict_metadata"][name].update(changes)


def _storage(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["storage_data"].update({f"({key!r}, (0,))": value for key, value in changes.items()})


def _chunks(name: str, *chunks: tuple[list[int], list[int]]) -> Callable[[dict[str, Any]], object]:
    listed = [{"global_offset": number, "local_shape": shape} for number, shape in chunks]
    return _tensor(name, chunk=listed)


WRONG_INDICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "shape": (_tensor("norm", global_shape=[4]), "slice 0 of 'norm' has not the shape"),
    "shape of all": (_tensor("w", global_shape=[6, 2]), "slice 0 of 'w' has not the shape"),
    "type": (_tensor("norm", properties={"dtype": "Float16"}), "slice 0 of 'norm' is not what"),
    "unknown type": (_tensor("norm", properties={"dtype": "Float12"}), "a type that is not known"),
    "no type": (_tensor("norm", properties={}), "does not say what 'norm' is"),
    "uneven": (_tensor("w", axis_fragmentations=[3, 1]), "'w' cannot be cut as the index says"),
    "cut into none": (_tensor("w", axis_fragmentations=[0, 1]), "'w' cannot be cut as the index says"),
    "too few cuts": (_tensor("w", axis_fragmentations=[2]), "'w' cannot be cut as the index says"),
    "other cuts": (_tensor("w", axis_fragmentations=[1, 2]), "slice 0 of 'w' has not the shape"),
    "huge": (_tensor("w", global_shape=[1 << 62, 2]), "impossibly large"),
    "interleaved": (_tensor("w", layout={"interleaved_parallel": True}), "'w' is cut in an interleaved way"),
    "outside": (_chunks("w", ([0], [2, 2]), ([2], [2, 2])), "slice 2 of 'w' lies outside"),
    "hole": (_chunks("w", ([0], [2, 2])), "lacks slice 1 of 'w'"),
    "slice twice": (_chunks("norm", ([0], [3]), ([0], [3])), "lists slice 0 of 'norm' twice"),
    "offsets": (_chunks("w", ([0, 0], [2, 2]), ([2, 0], [2, 2])), "has no number"),
    "no offset": (_tensor("norm", chunk=[{"local_shape": [3]}]), "has no number"),
    "negative": (_chunks("norm", ([-1], [3])), "a whole number"),
    "no such tensor": (_storage(x=[{"file_name": FIRST}]), "which it does not list"),
    "nowhere": (_storage(norm=[]), "does not say where ('norm', (0,)) lies"),
    "not said where": (lambda index: index["storage_data"].pop("('w', (1,))"), "does not say where slice 1 of 'w'"),
    "in another file": (_storage(norm=[{"file_name": mindformers_file("opt", 0, 2)}]), "'norm' is not what"),
    "in one of two": (_storage(norm=[{"file_name": FIRST}]), "'norm' lies in a file that the index"),
    "in a file that is not there": (_storage(norm=[{"file_name": "lost.safetensors"}]), "'norm' lies in a file"),
    "two in one file": (
        lambda index: index["storage_data"].update({"('w', (1,))": [{"file_name": FIRST}]}),
        "holds two slices of 'w'",
    ),
    "no file": (_storage(norm=[{"storage_rank": 0}]), "in no file of it"),
    "no tensors": (lambda index: index.pop("state_dict_metadata"), "state_dict_metadata"),
    **{
        f"a file {file!r:.20}": (_storage(norm=[{"file_name": file}]), "('norm', (0,)) lies outside")
        for file in ("b/a.safetensors", "a.bin", "n" * 5000 + ".safetensors", 7, None, ["a.safetensors"])
    },
    "no storage": (lambda index: index.pop("storage_data"), "has no 'storage_data'"),
}


def test_parts_by_a_strategy(folder: Path, tmp_path: Path) -> None:
    """With a strategy that says which slices they are, files may stand for ranks."""
    strategy = tmp_path / "two.toml"
    strategy.write_text(
        'mesh = { tp = 2 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["tp"] }\n[[parameter]]\nmatch = "*"\n'
    )
    files = {rank: folder / mindformers_file("model", rank, 2) for rank in (0, 1)}
    assert reshard_mpi.load_rank(0, files, strategy)["w"].tolist() == counted(4, 2).tolist()


def test_other_programs_have_a_file_of_that_name(tmp_path: Path) -> None:
    """Such as Megatron, beside the metadata of a distributed checkpoint, or anybody in a folder of Hugging Face's."""
    shutil.copytree(Path(__file__).parent / "golden" / "dcp" / "four_ranks", tmp_path / "dcp")
    for content, names in (('{"sharded_backend": "torch_dist"}', ("dcp", "megatron")), ('{"by": "me"}', ("dcp",))):
        (tmp_path / "dcp" / "metadata.json").write_text(content)
        assert formats.names_of_folder(str(tmp_path / "dcp")) == names
    arrays_of(tmp_path / "dcp")


# Damaged or hostile JSON

_TENSOR = (
    b'{"properties": {"dtype": "Int8"}, "global_shape": [2], "axis_fragmentations": [1],'
    b' "chunk": [{"global_offset": [0], "local_shape": [2]}]}'
)
_PLACE = b'[{"file_name": "a.safetensors"}]'
INDICES = {
    "empty": b"",
    "no object": b"[]",
    "no tensors": b'{"state_dict_metadata": {}, "storage_data": {}}',
    "cut short": b'{"state_dict_metadata": {"a": ' + _TENSOR,
    "more behind": b'{"state_dict_metadata": {}, "storage_data": {}} 1',
    "tensors twice": b'{"state_dict_metadata": {}, "state_dict_metadata": {}, "storage_data": {}}',
    "a tensor twice": b'{"state_dict_metadata": {"a": %b, "a": %b}' % (_TENSOR, _TENSOR),
    "a slice twice": b'{"storage_data": {"(\'a\', (0,))": %b, "(\'a\', (0,))": %b}}' % (_PLACE, _PLACE),
    "a field twice": b'{"state_dict_metadata": {"a": {"global_shape": [1], "global_shape": [1]}}}',
    "a file twice": b'{"storage_data": {"x": [{"file_name": "a.safetensors", "file_name": "b.safetensors"}]}}',
    "no name": b'{"state_dict_metadata": {"": %b}}' % _TENSOR,
    "a long name": b'{"state_dict_metadata": {"%b": %b}}' % (b"n" * 5000, _TENSOR),
    "numbers that are none": b'{"state_dict_metadata": {"a": {"global_shape": [1.5]}}}',
    "a number of many digits": b'{"state_dict_metadata": {"a": {"global_shape": [%b]}}}' % (b"9" * 10_000),
    "many dimensions": b'{"state_dict_metadata": {"a": {"global_shape": [%b]}}}' % b",".join([b"1"] * 40),
    "many fragments": b'{"state_dict_metadata": {"a": {"properties": {"dtype": "Int8"}, "global_shape": [0],'
    b' "axis_fragmentations": [4611686018427387904], "chunk": []}}, "storage_data": {}}',
    "nested deeply": b'{"x": ' + b"[" * 100_000,
    "nested objects": b'{"x": ' + b'{"a":' * 100_000,
    "layout nested deeply": b'{"state_dict_metadata": {"a": {"layout": {"x": ' + b"[" * 100_000,
    "a place without a file": b'{"state_dict_metadata": {"a": %b}, "storage_data": {"(\'a\', (0,))": []}}' % _TENSOR,
    "no UTF-8": b'{"state_dict_metadata": {"\xff": %b}}' % _TENSOR,
}


# What is before many of the same, how each of them is made, how many they are, what is behind, and what is said of it.
TOO_MANY: dict[str, tuple[bytes, Callable[[int], bytes], int, bytes, str]] = {
    "slices": (
        b'{"state_dict_metadata": {"a": {"chunk": [',
        lambda number: b'{"global_offset":[%d],"local_shape":[1]}' % number,
        14_000,
        b"]}}}",
        "too many slices",
    ),
    "names": (
        b'{"state_dict_metadata": {',
        lambda number: b'"%d":%b' % (number, _TENSOR),
        14_000,
        b"}}",
        "too many tensors",
    ),
    "places": (b'{"storage_data": {', lambda number: b'"%d":%b' % (number, _PLACE), 30_000, b"}}", "too much"),
}


@pytest.mark.parametrize("case", few(1, TOO_MANY))
def test_an_index_that_lists_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """It may list a tenth of what it otherwise may, so that what is too large is made and read soon."""
    for module, name in ((structure, "MAX_TENSORS"), (structure, "MAX_KEPT_BYTES"), (mindformers_index, "_MAX_SLICES")):
        monkeypatch.setattr(module, name, getattr(module, name) // 10)
    before, entry, count, behind, says = TOO_MANY[case]
    path = tmp_path / "metadata.json"
    path.write_bytes(before + b",".join(map(entry, range(count))) + behind)
    with pytest.raises(ShardError, match=says) as caught:
        mindformers.files_of(str(tmp_path))
    assert str(path) in caught.value.where


def test_names_are_read_as_they_are_written(tmp_path: Path) -> None:
    names = ["it's", 'a "quote"', "both ' and \"", "\u5c42.\U0001f701", "back\\slash", "new\nline", "('w', (0,))"]
    write_mindformers(tmp_path, {name: Sliced(counted(2) + at, (2,), [[0], [1]]) for at, name in enumerate(names)}, 2)
    assert {name: array.tolist() for name, array in arrays_of(tmp_path).items()} == {
        name: [at, at + 1] for at, name in enumerate(names)
    }


COMMONS = {
    "empty": b" ",
    "cut short": b'{"epoch_num": 1',
    "no object": b"[1]",
    "a name twice": b'{"a": 1, "a": 2}',
    "no number": b'{"loss_scale": NaN}',
    "infinite": b'{"loss_scale": 1e999}',
    "nested deeply": b'{"a": ' + b"[" * 30_000,
    "nested too deeply for a nest": b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    "large": b'{"a": "' + b"x" * 100_000 + b'"}',
    "many digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
}


def write_anew(folder: Path, *, is_listed: bool = True, **arrays: np.ndarray[Any, Any]) -> None:
    """Write another checkpoint of two ranks in place of a folder. is_listed: whether its index has these arrays."""
    shutil.rmtree(folder)
    listed = {name: Sliced(array, (1,), [[0, 1]]) for name, array in arrays.items()} if is_listed else small()
    write_mindformers(folder, listed, 2, others={} if is_listed else {mindformers_file("opt", 0, 2): arrays})


class TestTwoRanks(TestSaved):
    """Rows cut, a tensor on both, the optimizer's rows; and everything that may be wrong with them."""

    damaged_indices: ClassVar = INDICES
    wrong: ClassVar = {
        **{
            f"index: {case}": (partial(change_index, change=change), says, ReshardError)
            for case, (change, says) in WRONG_INDICES.items()
        },
        **{
            f"common: {case}": (written("common.json", content), "common.json of a checkpoint cannot be read")
            for case, content in COMMONS.items()
        },
        "a file of another save": (
            written(mindformers_file("model", 3, 8), file_of({"w": counted(1, 2)}, {})),
            "another save",
        ),
        "no index": (lost("metadata.json"), ("does not say how it is sharded", "restore it")),
        "a tensor called 'common'": (partial(write_anew, common=counted(3)), "a tensor called 'common'"),
        "what may be a slice": (partial(write_anew, moments=counted(2), is_listed=False), "'moments' may be a slice"),
    }

    def save(self, folder: Path) -> ArraysByName:
        write_mindformers(folder, small(), 2)
        return {name: tensor.whole for name, tensor in small().items()}


def test_what_is_said_of_the_training_comes_back(folder: Path, tmp_path: Path) -> None:
    """Through a file of torch as plain data, and through MindSpore's files as one text."""
    said: dict[str, Any] = {**COMMON, "loss_scale": 65536.0, "more": {"list": [1, "two", {"three": None}], "": True}}
    (folder / "common.json").write_text(json.dumps(said))
    done("transform", folder, tmp_path / "ckpt", "--to", "ckpt", "--jobs", "1")
    held = ckpt_peer.read(tmp_path / "ckpt" / "rank_0" / "checkpoint_0.ckpt")
    assert held.strings.keys() == {NEST}
    done("transform", tmp_path / "ckpt", tmp_path / "torch", "--to", "torch", "--jobs", "1")
    done("diff", folder, tmp_path / "torch", "--jobs", "1")
    torch = pytest.importorskip("torch")
    loaded = torch.load(tmp_path / "torch" / "rank_0" / "checkpoint_0.pt", weights_only=True)
    assert loaded["common"] == said


# The folder of all moments


@pytest.mark.parametrize("name", few(1, ["iteration_00000007", "iter_00000007", "iter_0000007"]))
def test_the_latest_moment_is_read(tmp_path: Path, name: str) -> None:
    write_mindformers(tmp_path / ITERATION, small(), 2)
    write_mindformers(tmp_path / name, {**small(), "norm": Sliced(counted(3) + 7, (1,), [[0, 1]])}, 2)
    (tmp_path / LATEST).write_text("7\n")
    assert arrays_of(tmp_path)["norm"].tolist() == [7, 8, 9]
    assert arrays_of(tmp_path / ITERATION)["norm"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [b"", b"3", b"../other", b"/tmp", b"2 3", b"-2", b"2" * 100, b"\xff", b"0x2", b"release", "\u0662".encode()],
)
def test_a_latest_moment_that_is_not_there(folder: Path, content: bytes) -> None:
    (folder.parent / LATEST).write_bytes(content)
    write_mindformers(folder.parent.parent / "other", small(), 2)
    with pytest.raises(SourceError, match="does not lead to one"):
        arrays_of(folder.parent)
    assert "does not lead to one" in refused("inspect", folder.parent)


def test_a_folder_that_is_named_as_it_is_called(folder: Path) -> None:
    (folder.parent / LATEST).write_text("release\n")
    folder.rename(folder.parent / "release")
    assert arrays_of(folder.parent)["norm"].tolist() == [0, 1, 2]


def test_a_moment_that_is_there_twice(folder: Path) -> None:
    (folder.parent / LATEST).write_text("2")
    write_mindformers(folder.parent / "iter_00000002", small(), 2)
    with pytest.raises(SourceError, match="does not lead to one"):
        arrays_of(folder.parent)


def test_a_run_does_not_go_on_with_another_moment(folder: Path, tmp_path: Path) -> None:
    source, out = folder.parent, tmp_path / "out"
    (source / LATEST).write_text("2")
    done("transform", source, out, "--jobs", "1")
    done("transform", folder, out, "--resume", "--jobs", "1")
    write_mindformers(source / "iteration_00000003", small(), 2)
    (source / LATEST).write_text("3")
    refusal = refused("transform", source, out, "--resume", "--jobs", "1")
    assert "another run" in refusal and f"to go on with what was begun, give {folder} as the source" in refusal
    done("transform", folder, out, "--resume", "--jobs", "1")


# The command line, in which the next moment becomes the latest as soon as one process has looked.
_AS_THE_NEXT_IS_SAVED = """
from pathlib import Path
from reshard_mpi.__main__ import command
from reshard_mpi.checkpoints import discovery

source, first, found = Path({source!r}), Path({first!r}), discovery.latest_in

def latest_in(path, format_name=None):
    latest = found(path, format_name)
    try:
        first.touch(exist_ok=False)
    except FileExistsError:
        (source / {latest!r}).write_text("3")
        return found(path, format_name)
    return latest

discovery.latest_in = latest_in
command()
"""


@pytest.mark.slow
def test_processes_that_begin_while_the_next_moment_is_saved(folder: Path, tmp_path: Path) -> None:
    """Targets of one run are never of two moments, whichever process saw which."""
    source, out, strategy = folder.parent, tmp_path / "out", tmp_path / "two.toml"
    write_mindformers(source / "iteration_00000003", small(), 2)
    (source / LATEST).write_text("2")
    strategy.write_text('mesh = { tp = 2 }\n[[parameter]]\nmatch = "*"\n')
    script = _AS_THE_NEXT_IS_SAVED.format(source=str(source), latest=LATEST, first=str(tmp_path / "first"))
    arguments = ["transform", source, out, "--dst-strategy", strategy, "--jobs", "2"]
    finished = run_command([sys.executable, "-c", script, *arguments])
    assert finished.code == 3 and "'latest checkpoint' = iteration_0000000" in finished.err, finished
    assert not list(out.rglob("*.safetensors"))


def test_targets_are_not_written_into_the_source(folder: Path) -> None:
    source = folder.parent
    (source / LATEST).write_text("2")
    before = sorted(source.rglob("*"))
    for target in (source, folder):
        assert "the target is the source" in refused("transform", source, target, "--to", "ckpt", "--jobs", "1")
    assert sorted(source.rglob("*")) == before
