"""The order of a model's tensors, by which torch numbers optimizer state, through formats that have other orders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.command_line import done
from support.examples import few, one_at_a_time
from support.torch_runs import array_of, stored, transformed, tree_of

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.errors import MapError, TargetError
from reshard_mpi.formats import ckpt
from reshard_mpi.formats.manifest import NEST, CommonNest, common_nest, nest_settings
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import agree
from reshard_mpi.testing import sample_tensors

Array = np.ndarray[Any, np.dtype[Any]]

# Parameters of one shape, so that nothing but the order tells whose state is whose; as they are in the model.
DTYPES = {"d": "float32", "b": "float16", "a": "float32", "c": "float16"}
MODEL = {name: np.full((2, 3), 10 * at + 1, dtype) for at, (name, dtype) in enumerate(DTYPES.items())}
MAP = '[[map]]\neq = "model.{p*} <=> model.net.{p*}"\n'
# Where tensors are: on two replicas, in two stages of a pipeline, in two stages that take turns.
SPECS = {
    "one": "",
    "replicas": "mesh = { data = 2 }\n",
    "stages": "mesh = { data = 1 }\nstages = 2\n",
    "turns": "mesh = { data = 1 }\nstages = 2\n",
}
SECOND_STAGE = {
    "stages": ("model.[ac]", "optimizer.state.[23].*", "last"),
    "turns": ("model.[bc]", "optimizer.state.[13].*"),
}
FORMATS = ("ckpt", "hdf5", "safetensors", "torch", "dcp")


def moment(name: str) -> Array:
    return np.full((2, 3), 100 + [*MODEL].index(name), np.float32)


def training(names: Iterable[str] = MODEL) -> dict[str, Any]:
    """Return what torch saves of a training: values among tensors, and a number beside state. names: in their order."""
    names = list(names)
    state = {
        number: {"step": stored(np.array(3, np.float32)), "exp_avg": stored(moment(name)), "note": number}
        for number, name in enumerate(names)
    }
    groups = [{"lr": 0.5, "params": [*range(len(names))]}]
    return {
        "epoch": 3,
        "model": {name: stored(MODEL[name]) for name in names},
        "seed": stored(np.array(5, np.int64)),
        "optimizer": {"state": state, "param_groups": groups},
        "last": stored(np.zeros(3, np.int8)),
    }


def keys_of(value: Any) -> Any:
    """Return all keys of nested dictionaries, in their order."""
    return [(key, keys_of(part)) for key, part in value.items()] if isinstance(value, dict) else None


def source(folder: Path) -> Path:
    torch_peer.save(folder / "x.pt", training())
    return folder / "x.pt"


def spec(folder: Path, ways: str) -> Path | None:
    """Write a strategy that has tensors in one of the ways of `SPECS`."""
    if ways == "one":
        return None
    rules = "".join(f"[[parameter]]\nmatch = '{glob}'\nstage = 1\n" for glob in SECOND_STAGE.get(ways, ()))
    last = "[[parameter]]\nmatch = '*'\n" + "stage = 0\n" * bool(rules)
    (folder / f"{ways}.toml").write_text(SPECS[ways] + rules + last)
    return folder / f"{ways}.toml"


def made(src: Path, dst: Path, to: str, folder: Path, before: str = "one", ways: str = "one", **options: Any) -> Path:
    """Convert a checkpoint whose tensors are in the way `before`; return the file, or the folder of several ranks."""
    src_strategy = None if src.is_file() or (src / ".metadata").exists() else spec(folder, before)
    strategies = {"src_strategy": src_strategy, "dst_strategy": spec(folder, ways)}
    reshard_mpi.transform(src, dst, to=to, **strategies, **options)
    return next((dst / "rank_0").iterdir()) if ways == "one" and to != "dcp" else dst


def assert_as_it_was(path: Path) -> None:
    loaded, original = torch_peer.load(path), training()
    assert keys_of(loaded) == keys_of(original)
    for number, name in enumerate(MODEL):
        assert np.array_equal(array_of(loaded["model"][name]), MODEL[name])
        assert np.array_equal(array_of(loaded["optimizer"]["state"][number]["exp_avg"]), moment(name))


@pytest.mark.parametrize(("form", "ways"), few(2, one_at_a_time(FORMATS, SPECS)))
def test_keys_keep_their_order(tmp_path: Path, form: str, ways: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path, ways=ways)
    assert_as_it_was(made(between, tmp_path / "back", "torch", tmp_path, before=ways))


@pytest.mark.parametrize(("form", "ways"), few(1, one_at_a_time(FORMATS, SPECS)))
def test_state_goes_with_its_parameter(tmp_path: Path, form: str, ways: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path, ways=ways)
    (tmp_path / "map.toml").write_text(MAP)
    path = made(between, tmp_path / "back", "torch", tmp_path, before=ways, map=tmp_path / "map.toml")
    optimizer = torch_peer.load(path)["optimizer"]
    names = [f"net.{name}" for name in MODEL]
    assert [*optimizer["state"]] == names == optimizer["param_groups"][0]["params"]
    for name in MODEL:
        assert np.array_equal(array_of(optimizer["state"][f"net.{name}"]["exp_avg"]), moment(name)), name


def without_order(path: Path) -> None:
    """Make a shard as earlier versions wrote it: its nest has no order of tensors."""
    form = formats.name_of(str(path))
    assert form is not None
    module = formats.by_name(form)
    found = sample_tensors.contents_of(module.locate(str(path)))
    nest = json.dumps(json.loads(found.strings[NEST])["nest"], separators=(",", ":"))
    path.unlink()
    sample_tensors.write(module, str(path), sample_tensors.ShardContents(found.tensors, {NEST: nest}))


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "torch"]))
def test_without_the_order_numbers_are_refused(tmp_path: Path, form: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path)
    without_order(between)
    (tmp_path / "map.toml").write_text(MAP)
    with pytest.raises(MapError, match="order of the model's tensors, which is not known") as raised:
        made(between, tmp_path / "back", "torch", tmp_path, map=tmp_path / "map.toml")
    assert "convert torch's own file once more" in str(raised.value) and str(between) in str(raised.value)
    assert not list(tmp_path.glob("back/rank_*"))
    # All else can be done with it.
    made(between, tmp_path / "weights", "torch", tmp_path, map=tmp_path / "map.toml", exclude="optimizer.*")
    loaded = torch_peer.load(made(between, tmp_path / "same", "torch", tmp_path))
    assert sorted(loaded) == sorted(training())
    for number, name in enumerate(MODEL):
        assert np.array_equal(array_of(loaded["optimizer"]["state"][number]["exp_avg"]), moment(name))


def test_names_in_the_file_need_no_order(tmp_path: Path) -> None:
    saved = training()
    (group,) = saved["optimizer"]["param_groups"]
    group["param_names"] = [*MODEL]
    torch_peer.save(tmp_path / "x.pt", saved)
    between = made(tmp_path / "x.pt", tmp_path / "between", "safetensors", tmp_path)
    without_order(between)
    (tmp_path / "map.toml").write_text(MAP)
    report = reshard_mpi.transform(between, tmp_path / "back", to="torch", map=tmp_path / "map.toml")
    assert "cannot be seen" not in " ".join(report.notes)
    state = tree_of(tmp_path / "back")["optimizer"]["state"]
    assert all(np.array_equal(array_of(state[f"net.{name}"]["exp_avg"]), moment(name)) for name in MODEL)


def test_it_is_told_what_numbers_are_taken_for(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(MAP)
    report = reshard_mpi.transform(source(tmp_path), tmp_path / "there", map=tmp_path / "map.toml")
    assert (
        "given its parameters in another order, as from two lists, or others in their place, cannot be seen"
        in " ".join(report.notes)
    )


def test_it_is_told_whenever_state_goes_by_names(tmp_path: Path) -> None:
    """torch's own load_state_dict takes it by places, and maps there and back may have changed these."""
    saved = training()
    model = {f"layer.{name}": tensor for name, tensor in saved["model"].items()}
    torch_peer.save(tmp_path / "x.pt", {**model, "optimizer": saved["optimizer"]})
    equation = "layer.{p*} <=> net.{p*}"
    there = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "there", map=equation)
    back = reshard_mpi.transform(tmp_path / "there", tmp_path / "back", map=equation)
    for report in (there, back):
        assert any("as torch's set_optimizer_state_dict takes it" in note for note in report.notes)


@pytest.mark.parametrize(("form", "ways"), few(1, one_at_a_time(FORMATS, SPECS)))
def test_like_a_checkpoint_that_was_converted(tmp_path: Path, form: str, ways: str) -> None:
    """The target is numbered by the order of that model, whatever has become of its file; so is the source."""
    order = {0: "c", 1: "a", 2: "b", 3: "d"}
    other = training(order.values())
    torch_peer.save(tmp_path / "other.pt", other)
    like = made(tmp_path / "other.pt", tmp_path / "like", form, tmp_path)
    between = made(source(tmp_path), tmp_path / "between", form, tmp_path, ways=ways)
    (tmp_path / "map.toml").write_text("[[map]]\neq = '{p*} <=> {p*}'\n")
    options = {"map": tmp_path / "map.toml", "like": like, "forward": True}
    path = made(between, tmp_path / "back", "torch", tmp_path, before=ways, **options)
    loaded = torch_peer.load(path)
    assert keys_of(loaded) == keys_of(other)
    for number, name in order.items():
        assert np.array_equal(array_of(loaded["optimizer"]["state"][number]["exp_avg"]), moment(name))
        assert np.array_equal(array_of(loaded["model"][name]), MODEL[name])


def test_like_a_checkpoint_without_the_order_is_refused(tmp_path: Path) -> None:
    like = made(source(tmp_path), tmp_path / "like", "safetensors", tmp_path)
    without_order(like)
    (tmp_path / "map.toml").write_text("[[map]]\neq = '{p*} <=> {p*}'\n")
    with pytest.raises(MapError, match="order of the model's tensors, which is not known") as raised:
        made(source(tmp_path), tmp_path / "back", "torch", tmp_path, map=tmp_path / "map.toml", like=like, forward=True)
    assert str(like) in str(raised.value)


def test_an_earlier_checkpoint_is_verified_and_compared_as_before(tmp_path: Path) -> None:
    path = made(source(tmp_path), tmp_path / "there", "safetensors", tmp_path)
    without_order(path)
    done("verify", tmp_path / "x.pt", tmp_path / "there")
    said = done("diff", tmp_path / "x.pt", path)
    assert "differ" not in said.out + said.err, said
    saved = training()
    saved["model"] = dict(reversed(saved["model"].items()))
    torch_peer.save(tmp_path / "other.pt", saved)
    said = done("diff", tmp_path / "x.pt", tmp_path / "other.pt")
    assert "the order of their keys" in said.out + said.err, said


WRONG_ORDERS = ["3", "{}", "[0]", '[1,"a"]', '[0,"a",2,"b"]', '["a",0]', '[true,"a"]', '[0,"a",-1,"b"]', "[null,null]"]
WRONG_ORDERS += ['[0,"model.a",0,"model.a"]', f'[0,"{"x" * 5000}"]', f'[0,"{"x" * 3000}",3000,"{"y" * 3000}"]']


@pytest.mark.parametrize("order", few(4, WRONG_ORDERS), ids=range(len(WRONG_ORDERS)))
def test_a_forged_order_is_refused(tmp_path: Path, order: str) -> None:
    between = made(source(tmp_path), tmp_path / "between", "ckpt", tmp_path)
    found = sample_tensors.contents_of(ckpt.locate(str(between)))
    root = json.dumps(json.loads(found.strings[NEST])["nest"])
    between.unlink()
    forged = {NEST: f'{{"nest":{root},"order":{order}}}'}
    sample_tensors.write(ckpt, str(between), sample_tensors.ShardContents(found.tensors, forged))
    (tmp_path / "map.toml").write_text(MAP)
    with pytest.raises(TargetError, match="order of a nest"):
        made(between, tmp_path / "back", "torch", tmp_path)
    with pytest.raises(MapError, match=r"nested cannot be read|not known here"):
        made(between, tmp_path / "back", "torch", tmp_path, map=tmp_path / "map.toml")
    assert not list(tmp_path.glob("back/rank_*"))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_parameter_that_was_left_out_before_leaves_a_doubt(tmp_path: Path, form: str) -> None:
    """Another tensor that is no parameter would take its number."""
    saved = training()
    saved["model"]["table"] = stored(MODEL["a"])
    torch_peer.save(tmp_path / "x.pt", saved)
    between = made(tmp_path / "x.pt", tmp_path / "between", form, tmp_path, exclude=["model.b", "*.state.1.*"])
    (tmp_path / "map.toml").write_text(MAP)
    with pytest.raises(MapError, match=r"model\.b was left out before"):
        made(between, tmp_path / "back", "torch", tmp_path, map=tmp_path / "map.toml")


def stage_files(folder: Path) -> Path:
    """Write what the stages of a pipeline have saved: the same dictionaries, each with tensors of its own."""
    for rank, names in enumerate(("db", "ac")):
        (folder / f"rank_{rank}").mkdir(parents=True)
        model = {name: stored(MODEL[name]) for name in names}
        torch_peer.save(folder / f"rank_{rank}" / "x.pt", {"model": model, "epoch": 3})
    return folder


@pytest.mark.parametrize("form", few(1, ["torch", "dcp", "safetensors"]))
def test_stages_that_others_have_saved_are_of_one_nest(tmp_path: Path, form: str) -> None:
    stages = "mesh = { data = 1 }\nstages = 2\n[[parameter]]\nmatch = 'model.[ac]'\nstage = 1\n[[parameter]]\n"
    (tmp_path / "stages.toml").write_text(f"{stages}match = '*'\nstage = 0\n")
    cut = {"src_strategy": tmp_path / "stages.toml"}
    there = {} if form == "safetensors" else {"dst_strategy": tmp_path / "stages.toml"}
    report = reshard_mpi.transform(stage_files(tmp_path / "src"), tmp_path / "there", to=form, **cut, **there)
    assert not [note for note in report.notes if "differs" in note]
    again = {} if form != "torch" else cut
    loaded = transformed(tmp_path / "there", tmp_path / "back", to="torch", **again)
    assert [*loaded] == ["model", "epoch"]
    assert sorted(loaded["model"]) == sorted(MODEL) and loaded["epoch"] == 3


def test_loose_files_of_one_nest_are_joined(tmp_path: Path) -> None:
    src = tmp_path / "loose"
    src.mkdir()
    for rank in range(2):
        path = stage_files(tmp_path / f"{rank}") / f"rank_{rank}" / "x.pt"
        path.rename(src / f"part-0000{rank + 1}-of-00002.pt")
    path = made(src, tmp_path / "one", "torch", tmp_path)
    assert keys_of(torch_peer.load(path)) == [("model", [(name, None) for name in "dbac"]), ("epoch", None)]


def test_an_order_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flatten_tree, "MAX_CHARACTERS", 500)
    report = reshard_mpi.transform(source(tmp_path), tmp_path / "there")
    assert "the order of its keys: it would take more than 500 characters" in " ".join(report.warnings)


def test_nests_agree_whatever_only_one_of_them_says_of_the_order() -> None:
    root = '{"dict":[["a",1]]}'
    one, other, fewer = (
        f'{{"nest":{root},"order":{order}}}' for order in ('[0,"x",0,"y"]', '[0,"y",0,"x"]', '[0,"y"]')
    )
    assert agree(None, None) and not agree(None, one) and agree(one, root) and agree(root, one) and agree(one, fewer)
    assert not agree(one, other) and not agree(one, '{"dict":[["a",true]]}') and not agree(one, "{")
    assert not agree(one, f'{{"nest":{root},"order":[3]}}')
    whole = CommonNest(root, is_whole=True)
    assert common_nest([one, other]) == whole == common_nest([root, one])
    assert common_nest([one, one]) == whole._replace(text=one)
    assert common_nest([one, '{"dict":[]}']) == whole
    assert common_nest([one, '{"dict":[["a",2]]}']) == whole._replace(is_whole=False)
    assert common_nest([one, "{"]) is common_nest([]) is None


def test_stages_join_groups_of_equal_settings_by_their_places() -> None:
    def stage(number: int) -> str:
        groups = ",".join(f'{{"dict":[["lr",0.1],["params",["l{number}.{name}"]]]}}' for name in "ab")
        return f'{{"dict":[["state",{{"dict":[]}}],["param_groups",[{groups}]]]}}'

    joined = common_nest([stage(0), stage(1)])
    assert joined is not None
    (_, (_, groups)) = json.loads(joined.text)["dict"]
    assert [dict(group["dict"])["params"] for group in groups] == [["l0.a", "l1.a"], ["l0.b", "l1.b"]]


@pytest.mark.parametrize(
    ("groups", "is_left_out"),
    [
        ('[{"dict":[["lr",0.1],["params",["a"]]]}]', True),
        ('[{"dict":[["lr"],["params",["a"]]]}]', False),  # a setting that is a tensor
        ('[{"dict":[["lr",0.1],["params",[0]]]}]', False),  # numbers of two stages are other parameters'
    ],
)
def test_optimizers_of_stages_that_may_not_be_joined_are_compared(groups: str, is_left_out: bool) -> None:
    nest = f'{{"dict":[["optimizer",{{"dict":[["state",{{"dict":[]}}],["param_groups",{groups}]]}}],["epoch",1]]}}'
    assert ("param_groups" not in nest_settings(nest)) == is_left_out
    assert "epoch" in nest_settings(nest)
