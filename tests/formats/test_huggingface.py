"""Hugging Face's folders: read by their index, cut and written as the reference does it, refused where it must be."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import safetensors_peer
from support.checkpoints import copied_in_order
from support.command_line import done, refused
from support.conversions import TENSORS, Conversion, listing, make
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.errors import ShardError, TargetError, UsageError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.formats.safetensors import huggingface
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.runs.open_run import filled_files, strategy_of
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import ArraysByName
from reshard_mpi.testing.folders import FolderConformance, Spoil, cut_short, lost
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

GOLDEN = Path(__file__).parent / "golden" / "hugging_face"
INDEX, SINGLE, MAP = "model.safetensors.index.json", "model.safetensors", "param_name_map.json"


def loaded(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder as the reference library reads them, by its index."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    path = folder / INDEX
    if not path.exists():
        return dict(load_file(folder / SINGLE))
    weight_map = json.loads(path.read_text())["weight_map"]
    held = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, held.values())) == len(weight_map)
    return {name: held[file][name] for name, file in weight_map.items()}


# How tensors are cut into files


def specs(sizes: dict[str, int]) -> Specs:
    kinds = {
        size: TensorType.of_box(BY_NAME["int8"], Box.whole((size,)), (size,)) for size in sorted(set(sizes.values()))
    }
    numbers = {size: number for number, size in enumerate(kinds)}
    return Specs(list(sizes), list(kinds.values()), [numbers[size] for size in sizes.values()])


@given(sizes=st.lists(st.integers(0, 12), max_size=30), most_bytes=st.integers(1, 20))
def test_cut_as_the_reference_cuts(sizes: list[int], most_bytes: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    state = {f"t{number}": size for number, size in enumerate(sizes)}
    pattern = "model{suffix}.safetensors"
    split = hub.split_state_dict_into_shards_factory(
        state, get_storage_size=int, filename_pattern=pattern, max_shard_size=most_bytes
    )
    files = filled_files(specs(state), most_bytes)
    named = {huggingface.file_name(at, len(files), "ignored"): names for at, names in enumerate(files)}
    assert {file: list(names) for file, names in split.filename_to_tensors.items() if names} == {
        file: names for file, names in named.items() if names
    }


@given(sizes=st.lists(st.integers(0, 12), max_size=30), most_bytes=st.integers(1, 20))
def test_files_are_filled_in_order(sizes: list[int], most_bytes: int) -> None:
    state = {f"t{number}": size for number, size in enumerate(sizes)}
    files = filled_files(specs(state), most_bytes)
    assert sorted(name for names in files for name in names) == sorted(state)
    small = [names for names in files if not any(state[name] > most_bytes for name in names)]
    assert [name for names in small for name in names] == [name for name in state if state[name] <= most_bytes]
    assert all(len(names) == 1 or sum(map(state.__getitem__, names)) <= most_bytes for names in files)
    for names, following in pairwise(small):
        assert sum(map(state.__getitem__, names)) + state[following[0]] > most_bytes
    strategy = strategy_of(files)
    assert strategy.world_size == len(files) >= 1
    for stage, names in enumerate(files):
        assert all(strategy.find(name)[0].stages == (stage,) for name in names)


# There and back


def written(tmp_path: Path, *options: str) -> tuple[Conversion, Conversion]:
    """Write the small conversion as a folder; return it, and that conversion."""
    c = make(tmp_path)
    there = c.but(dst=tmp_path / "hf", dst_strategy=None)
    there.done("transform", "--to", "hf", *options)
    return there, c


def test_there_and_back(tmp_path: Path) -> None:
    there, c = written(tmp_path, "--max-shard-size", "140", "--verify")
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in there.dst.glob("model*")) == [*files, INDEX]
    found = loaded(there.dst)
    assert found.keys() == TENSORS.keys()
    assert all(found[name].dtype == a.dtype and np.array_equal(found[name], a) for name, a in TENSORS.items())
    facts = json.loads((there.dst / INDEX).read_text())
    assert facts["metadata"] == {"total_size": sum(array.nbytes for array in TENSORS.values())}
    for file in files:
        content = (there.dst / file).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["__metadata__"] == {"format": "pt"}
        assert (there.dst / file).stat().st_mode & 0o777 == 0o666 & ~_umask()
    there.done("verify", "--jobs", "1")
    done("verify", there.dst, "--jobs", "1")
    done("inspect", there.dst, "--json")
    back = c.but(src=there.dst, src_strategy=None, dst=tmp_path / "back")
    back.done("transform", "--verify")
    for rank in range(2):
        found_shard = safetensors_peer.read(back.dst / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        assert found_shard.tensors.keys() == TENSORS.keys()
    done("diff", c.src, back.dst, *_strategies(c))


def _strategies(c: Conversion) -> list[str]:
    return ["--src-strategy", str(c.src_strategy), "--dst-strategy", str(c.dst_strategy), "--jobs", "1"]


def _umask() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    there, _ = written(tmp_path)
    assert sorted(path.name for path in there.dst.glob("model*")) == [SINGLE]
    said = done("transform", there.dst, tmp_path / "out", "--jobs", "1").err
    assert "Hugging Face folder, 1 file, 4 tensors" in said
    assert loaded(there.dst).keys() == TENSORS.keys()
    done("inspect", there.dst)


def test_another_size_makes_another_run(tmp_path: Path) -> None:
    there, _ = written(tmp_path, "--max-shard-size", "140")
    said = there.refused("transform", "--to", "hf", "--max-shard-size", "141", "--resume")
    assert "another run" in said and "--max-shard-size 141" in said
    assert "no --max-shard-size" not in said and "None" not in said


@pytest.mark.slow
def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    """With another size files have other names, and some loaders would take the old ones for a part."""
    there, _ = written(tmp_path, "--max-shard-size", "140")
    there.done("transform", "--to", "hf", "--overwrite")
    assert sorted(path.name for path in there.dst.glob("model*")) == [SINGLE]
    assert loaded(there.dst).keys() == TENSORS.keys()
    there.done("transform", "--to", "hf", "--max-shard-size", "140", "--overwrite", "--jobs", "2")
    assert len(list(there.dst.glob("model*"))) == 4
    assert loaded(there.dst).keys() == TENSORS.keys()


def test_files_of_an_earlier_run_of_another_format_are_removed(tmp_path: Path) -> None:
    there, _ = written(tmp_path, "--max-shard-size", "140")
    there.done("transform", "--to", "dcp", "--overwrite")
    assert not list(there.dst.glob("model*"))
    done("inspect", there.dst)


@pytest.mark.parametrize("first", few(1, ["records", "shards"]))
def test_files_of_an_earlier_run_in_a_copy_without_times_are_not_removed(tmp_path: Path, first: str) -> None:
    """Somebody may have saved a state there of which a sample is the same, whichever was copied first."""
    there, _ = written(tmp_path, "--max-shard-size", "140")
    earlier = there.dst.rename(tmp_path / "earlier")
    copied_in_order(earlier, there.dst, first)
    before = listing(there.dst)
    assert "no part of the checkpoint" in there.refused("transform", "--to", "dcp", "--overwrite")
    assert listing(there.dst) == before


@few_cases(1, "change", ["another size", "modified", "modified, by an earlier version", "a link", "no record"])
def test_files_that_somebody_has_changed_are_not_removed(tmp_path: Path, change: str) -> None:
    there, _ = written(tmp_path, "--max-shard-size", "140")
    path, record = there.dst / "model-00002-of-00003.safetensors", there.dst / ".reshard_mpi" / "rank_1.json"
    if change == "another size":
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path, ns=(0, 0))
    elif change == "modified":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        os.utime(path, ns=(0, record.stat().st_mtime_ns + 1))
    elif change == "modified, by an earlier version":
        facts = json.loads(record.read_text())
        record.write_text(json.dumps({name: facts[name] for name in facts if name != "sample"}))
        os.utime(path, ns=(0, facts["modified_ns"] + 1))
    elif change == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        record.unlink()
    before = listing(there.dst)
    said = there.refused("transform", "--to", "hf", "--overwrite")
    assert "no part of the checkpoint" in said and f"got: {path.name}\n" in said and "remove them" in said
    assert listing(there.dst) == before


@pytest.mark.slow
def test_several_processes_of_a_function(c: Conversion, tmp_path: Path) -> None:
    report = reshard_mpi.transform(
        c.src, tmp_path / "hf", c.src_strategy, to="hf", max_shard_size="140 B", jobs=2, verify=True
    )
    assert len(report.targets) == 3
    assert loaded(tmp_path / "hf").keys() == TENSORS.keys()
    assert reshard_mpi.load_rank(0, tmp_path / "hf")["w"].tobytes() == TENSORS["w"].tobytes()


def test_strings_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "full.safetensors"
    tensor = SampleTensor.random("w", BY_NAME["float32"], (2, 3))
    safetensors_peer.write(path, ShardContents.of([tensor], {"note": "text"}))
    said = done("transform", path, tmp_path / "hf", "--to", "hf", "--jobs", "1", "--verify").err
    assert "has no place for texts or settings: 'note'" in said
    strict = ["transform", str(path), str(tmp_path / "strict"), "--to", "hf", "--strict", "--jobs", "1"]
    assert "cannot be carried" in refused(*strict) and not (tmp_path / "strict").exists()
    done("verify", path, tmp_path / "hf", "--jobs", "1")
    done("verify", tmp_path / "hf", "--jobs", "1")


# What Hugging Face's libraries have saved


def test_saved_folders() -> None:
    held = huggingface.open_folder(str(GOLDEN / "sharded"))[0].tensors
    weight_map = json.loads((GOLDEN / "sharded" / INDEX).read_text())["weight_map"]
    assert held.keys() == weight_map.keys()
    assert len(huggingface.files_of(str(GOLDEN / "sharded"))) == 4
    tied = huggingface.open_folder(str(GOLDEN / "tied"))[0].tensors
    assert "lm_head.weight" not in tied and len(tied) == 11


def test_a_saved_folder_is_cut_anew(tmp_path: Path) -> None:
    """The order in which tensors were saved is not in the files, so others may come together than before."""
    done("transform", GOLDEN / "sharded", tmp_path / "hf", "--max-shard-size", "1KB", "--jobs", "1")
    ours, theirs = (json.loads((folder / INDEX).read_text()) for folder in (tmp_path / "hf", GOLDEN / "sharded"))
    assert list(ours["weight_map"]) == list(theirs["weight_map"])
    assert set(ours["weight_map"].values()) == set(theirs["weight_map"].values())
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    done("diff", GOLDEN / "sharded", tmp_path / "hf", "--jobs", "1")


# Wrong usage


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "hf", "--dst-strategy", "x.toml"], "not cut over ranks"),
        (["--to", "ckpt", "--max-shard-size", "5GB"], "--max-shard-size is for --to hf"),
        (["--to", "hf", "--crc"], "--crc is for targets in"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "x.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "*"\n')
    options = [str(tmp_path / option) if option.endswith(".toml") else option for option in options]
    said = refused("transform", GOLDEN / "sharded", tmp_path / "out", *options, "--jobs", "1", code=2)
    assert says in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["0", "-1", "many", "5XB"])
def test_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    said = refused("transform", GOLDEN / "sharded", tmp_path, "--to", "hf", f"--max-shard-size={size}", code=2)
    assert "--max-shard-size" in said
    with pytest.raises(UsageError, match="max_shard_size"):
        reshard_mpi.transform(GOLDEN / "sharded", tmp_path, to="hf", max_shard_size=size)


def test_functions_that_keep_no_record_write_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="runs that keep a record"):
        reshard_mpi.transform_checkpoints(GOLDEN / "sharded", tmp_path / "out", "p", output_format="hf")


def test_a_type_that_torch_has_not_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "full.safetensors"
    safetensors_peer.write(path, ShardContents.of([SampleTensor.random("four", BY_NAME["int4"], (3,))]))
    said = refused("transform", path, tmp_path / "hf", "--to", "hf", "--jobs", "1")
    assert "'four'" in said and "int4" in said and "--to" in said
    assert not (tmp_path / "hf").exists()


# Folders that are no sound checkpoint

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
NORM = "'model.norm.weight'"  # in the second file


def change(folder: Path, **weight_map: str | None) -> None:
    """Change what the index says of tensors (None: nothing any more)."""
    facts: dict[str, Any] = json.loads((folder / INDEX).read_text())
    facts["weight_map"] |= {name.replace("__", "."): file for name, file in weight_map.items()}
    facts["weight_map"] = {name: file for name, file in facts["weight_map"].items() if file is not None}
    (folder / INDEX).write_text(json.dumps(facts))


def put_in_too(folder: Path, file: str, name: str = "x", shape: tuple[int, ...] = (2,)) -> None:
    """Write one more tensor to a file, which is made if it is not there."""
    held = safetensors_peer.read(folder / file).tensors.values() if (folder / file).exists() else ()
    more = SampleTensor.random(name, BY_NAME["float32"], shape)
    safetensors_peer.write(folder / file, ShardContents.of([*held, more]))


INDICES = {
    "empty": b"",
    "no object": b"[]",
    "no map": b'{"metadata": {"total_size": 1}}',
    "an empty map": b'{"weight_map": {}}',
    "a map twice": b'{"weight_map": {"a": "a.safetensors"}, "weight_map": {"a": "a.safetensors"}}',
    "a tensor twice": b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
    "a file that is a number": b'{"weight_map": {"a": 1}}',
    "no name": b'{"weight_map": {"": "a.safetensors"}}',
    "cut short": b'{"weight_map": {"a": "a.safetensors"',
    "more behind": b'{"weight_map": {"a": "a.safetensors"}} {}',
    "nested deeply": b'{"metadata": ' + b"[" * 100_000,
    "nested objects": b'{"metadata": ' + b'{"a":' * 100_000,
    "too many names": pytest.param(
        lambda: b'{"weight_map": {%b}}' % b",".join(b'"%d":"a.safetensors"' % number for number in range(140_000)),
        marks=pytest.mark.slow,
    ),
    "a number that is none": b'{"metadata": 01, "weight_map": {"a": "a.safetensors"}}',
}


def listed_in(file: str | None, name: str = "model__norm__weight") -> Spoil:
    """Return a function that has the index say that a tensor lies in `file`."""
    return lambda folder: change(folder, **{name: file})


def single(folder: Path) -> None:
    """Put a checkpoint of one file beside the files of another save."""
    shutil.copy(GOLDEN / "tied" / SINGLE, folder)


def save_map(folder: Path, files: str) -> None:
    """Save a map as MindSpore's `unified_safetensors` does, which lists other files than the index, or the same."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / MAP).write_text(json.dumps({name: file.replace("model", files) for name, file in weight_map.items()}))


WRONG = {
    "a map of another save": (partial(save_map, files="part"), (MAP, INDEX, "another save")),
    "an old single file beside a map": (
        lambda folder: (save_map(folder, "model"), single(folder), (folder / INDEX).unlink()),
        (SINGLE, MAP, "--select"),
    ),
    "an old single file": (single, (SINGLE, INDEX, "--select")),
    "files beside a single one": (lambda folder: (single(folder), (folder / INDEX).unlink()), FIRST),
    "a file is missing": (lost(SECOND), SECOND),
    "a file is cut short": (cut_short(SECOND), SECOND),
    "a tensor that the index lacks": (listed_in(None), (NORM, "which the index lacks")),
    "a tensor that no file has": (listed_in(FIRST, "extra"), "'extra'"),
    "a tensor in another file": (listed_in(FIRST), NORM),
    "a tensor in two files": (partial(put_in_too, file=THIRD, name="model.norm.weight"), (NORM, f"{SECOND} alone")),
    "a file of another ending": (listed_in("a.bin"), NORM),
    "a long name of a file": (listed_in("n" * 5000 + ".safetensors"), NORM),
    "a part of another save": (partial(put_in_too, file="model-00004-of-00004.safetensors"), ("another save", "00004")),
}


class TestFolder(FolderConformance):
    """Three files that transformers has saved, with their index."""

    info, index, damaged_indices, wrong = formats.info("hf"), INDEX, INDICES, WRONG
    uses_prefix = False

    def save(self, folder: Path) -> ArraysByName:
        shutil.copytree(GOLDEN / "sharded", folder, dirs_exist_ok=True)
        return loaded(folder)

    def lead_outside(self, folder: Path, file: str) -> str:
        change(folder, model__norm__weight=file)
        return NORM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "sharded")
    return tmp_path / "sharded"


def test_an_old_single_file_beside_an_index_is_chosen(folder: Path) -> None:
    single(folder)
    out = folder.parent / "chosen"
    done("transform", folder, out, "--select", SINGLE, "--to", "ckpt", "--jobs", "1")
    done("diff", GOLDEN / "tied", out, "--jobs", "1")


def test_a_map_of_the_same_files(folder: Path, tmp_path: Path) -> None:
    save_map(folder, "model")
    done("transform", folder, tmp_path / "out", "--to", "safetensors", "--jobs", "1")


def test_files_without_an_index(folder: Path, tmp_path: Path) -> None:
    """They are taken together, unless they say themselves that there are more of them."""
    (folder / INDEX).unlink()
    done("diff", GOLDEN / "sharded", folder, "--jobs", "1")
    (folder / "model-00003-of-00003.safetensors").rename(tmp_path / "lost")
    arguments = ["transform", str(folder), str(tmp_path / "out"), "--to", "ckpt", "--jobs", "1"]
    said = refused(*arguments)
    assert "lacks some of its files" in said and "number 3 is not there" in said
    assert "number 3" in refused(*arguments, "--select", "model-00001*")
    one = folder / "model-00001-of-00003.safetensors"
    done("transform", one, tmp_path / "out", "--to", "ckpt", "--jobs", "1")


def test_a_folder_whose_only_file_has_gone(tmp_path: Path) -> None:
    """Another process may replace a checkpoint while it is looked at."""
    with pytest.raises(ShardError, match="is not there"):
        huggingface.open_folder(str(tmp_path))


def test_a_cache_whose_files_are_links(folder: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(folder.glob("model*"))):
        path.rename(tmp_path / f"blob{number}")
        path.symlink_to(f"../blob{number}")
    done("transform", folder, tmp_path / "out", "--max-shard-size", "1KB", "--jobs", "1", "--verify")
    done("diff", GOLDEN / "sharded", tmp_path / "out", "--jobs", "1")


def test_what_an_index_may_say_besides(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    besides = {"total_size": 1.5e9, "total_parameters": None, "a": [True, {"b": [[], {}, -1, "x"]}], "c": "d"}
    facts = {"metadata": besides, "weight_map": {"a": "x/b.safetensors"}, "other": [1, 2]}
    path.write_text(json.dumps(facts, indent=1))
    assert huggingface.read(str(path)) == facts["weight_map"]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(weight_map=st.dictionaries(NAMES, st.just("a.safetensors"), min_size=1))
def test_an_index_is_read_as_it_is_written(
    weight_map: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / INDEX
    path.write_text(huggingface.index_text(weight_map, 7), encoding="utf-8")
    assert huggingface.read(str(path)) == weight_map


# What MindSpore's unified_safetensors makes

MINDSPORE = Path(__file__).parent / "golden" / "mindspore"


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    shutil.copytree(MINDSPORE / "unified", tmp_path / "unified")
    return tmp_path / "unified"


@pytest.mark.parametrize("is_flat", few(1, [False, True]))
def test_files_that_mindspore_has_unified(unified: Path, tmp_path: Path, is_flat: bool) -> None:
    if is_flat:
        path = unified / "param_name_map.json"
        path.write_text(json.dumps(json.loads(path.read_text())["weight_map"]))
    done("diff", MINDSPORE / "ranks", unified, "--src-strategy", MINDSPORE / "strategy_2x2.ckpt")
    strategy = ["--dst-strategy", str(MINDSPORE / "strategy_1x2.ckpt")]
    done("transform", unified, tmp_path / "out", *strategy, "--prefix", "net_", "--jobs", "1")
    for rank in (0, 1):
        theirs = safetensors_peer.read(MINDSPORE / "transformed_1x2" / f"rank_{rank}" / f"net_{rank}.safetensors")
        assert safetensors_peer.read(tmp_path / "out" / f"rank_{rank}" / f"net_{rank}.safetensors") == theirs


HYPER = "hyper_param.safetensors"
WRONG_PARTS = {
    "a slice": (partial(put_in_too, file=HYPER, name="m", shape=(2, 4)), ("'m' may be a slice", "--select")),
    "a number that is in a part too": (partial(put_in_too, file=HYPER, name="ln.g", shape=(1,)), "'ln.g' lies in two"),
    "a part that is missing": (lost("part0.safetensors"), "part0.safetensors"),
}


class TestUnified(FolderConformance):
    """What MindSpore has made: parts, numbers beside them, and a map of names in place of an index."""

    info, index, damaged_indices, wrong = formats.info("hf"), "param_name_map.json", INDICES, WRONG_PARTS
    uses_prefix = False

    def save(self, folder: Path) -> ArraysByName:
        shutil.copytree(MINDSPORE / "unified", folder, dirs_exist_ok=True)
        load_file = pytest.importorskip("safetensors.numpy").load_file
        return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def test_what_may_be_a_slice_is_left_out(unified: Path) -> None:
    put_in_too(unified, HYPER, "moments.w", (2, 4))
    done("transform", unified, unified / "out", "--select", "part*", "--jobs", "1")
    parts = {name for part in unified.glob("part*.safetensors") for name in safetensors_peer.read(part).tensors}
    with reshard_mpi.open(unified / "out") as made:
        assert parts and made.keys() == parts


def test_targets_are_not_written_beside_other_files(c: Conversion, tmp_path: Path) -> None:
    stale = tmp_path / "hf" / SINGLE
    stale.parent.mkdir()
    stale.write_bytes(b"precious")
    there = c.but(dst=stale.parent, dst_strategy=None)
    said = there.refused("transform", "--to", "hf", "--max-shard-size", "140", "--overwrite")
    assert SINGLE in said and TargetError.__name__ not in said
    assert stale.read_bytes() == b"precious" and len(listing(stale.parent)) == 1


def test_a_prefix_is_no_part_of_their_names(tmp_path: Path) -> None:
    c = make(tmp_path, "safetensors").but(dst_strategy=None)
    for form in ("hf", "dcp"):
        said = c.refused("transform", "--to", form, "--prefix", "net", code=2)
        assert "have names of their own" in said and not c.dst.exists()
