"""State that torch numbers: whose each number is, that it follows its parameter, and how it is numbered again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import sample, write_shard
from support.command_line import done, run_here
from support.examples import few, few_cases, one_at_a_time
from support.full_checkpoints import source_of
from support.torch_runs import array_of, transformed, tree_of

import reshard_mpi
from reshard_mpi.errors import MapError, StrategyError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType

Array = np.ndarray[Any, np.dtype[Any]]

# Two parameters are joined, one is turned; they are in another order in the target.
MAP = """
[[map]]
eq = "q [a h], k [b h] <=> qk [(a + b) h]"
[[map]]
eq = "{p*}.weight [o i] <=> {p*}.kernel [i o]"
"""
Q, K, BIAS, OUT, HEAD = (np.arange(24, dtype=np.float32) + 100 * at for at in range(5))
MODEL = {
    "q": Q[:12].reshape(4, 3),
    "k": K[:6].reshape(2, 3),
    "norm.running_mean": BIAS[:3],
    "norm.num_batches_tracked": np.array(7, np.int64),
    "bias": BIAS[:2],
    "out.weight": OUT[:6].reshape(2, 3),
}
PARAMETERS = ("q", "k", "bias", "out.weight")


_STORED: list[Array] = []


def tensor(array: Array) -> Any:
    """Return a tensor of a torch file; of the same array, the same storage."""
    key = next((key for key, other in enumerate(_STORED) if other is array), len(_STORED))
    if key == len(_STORED):
        _STORED.append(array)
    return torch_peer.tensor(sample("", array), str(key))


def floats(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorType]:
    return {name: TensorType(BY_NAME["float32"], shape) for name, shape in shapes.items()}


def moment(number: int, array: Array) -> Array:
    return array * 10 + number + 1


def training(
    model: dict[str, Array] = MODEL, parameters: tuple[str, ...] = PARAMETERS, steps: float = 3.0, **changes: Any
) -> dict[str, Any]:
    """Return what torch saves of a training: a model, and Adam's state by number."""
    state = {
        number: {
            "step": tensor(np.array(steps, np.float32)),
            "exp_avg": tensor(moment(number, model[name].astype(np.float32))),
        }
        for number, name in enumerate(parameters)
    }
    group = {"lr": 0.5, "betas": (0.9, 0.99), "amsgrad": False, "params": list(range(len(parameters)))}
    return {
        "model": {name: tensor(array) for name, array in model.items()},
        "optimizer": {"state": state, "param_groups": [group]},
        "epoch": 3,
        **changes,
    }


def arrays_of(tensors: dict[str, Any]) -> dict[str, Array]:
    return {name: array_of(value) for name, value in tensors.items()}


def converted(folder: Path, source: dict[str, Any], text: str = MAP, **options: Any) -> dict[str, Any]:
    """Return what a map makes of a torch file, as a torch file."""
    torch_peer.save(folder / "source.pt", source)
    (folder / "map.toml").write_text(text)
    if isinstance(options.get("like"), dict):
        torch_peer.save(folder / "like.pt", options["like"])
        options["like"] = folder / "like.pt"
    loaded: dict[str, Any] = transformed(
        folder / "source.pt", folder / "made", map=folder / "map.toml", overwrite=True, **options
    )
    return loaded


# The names in the map are those below "model"; without --like they are those of the file.
MAP_OF_FILES = MAP.replace('"q [', '"model.q [').replace(" k [", " model.k [").replace("> qk", "> model.qk")


def test_without_another_checkpoint_state_goes_by_name(tmp_path: Path) -> None:
    made = converted(tmp_path, training(), MAP_OF_FILES)
    optimizer = made["optimizer"]
    assert [*optimizer["state"]] == ["qk", "bias", "out.kernel"] == optimizer["param_groups"][0]["params"]
    assert optimizer["param_groups"][0]["lr"] == 0.5 and made["epoch"] == 3
    state = {name: arrays_of(of_parameter) for name, of_parameter in optimizer["state"].items()}
    expected = np.concatenate([moment(0, MODEL["q"]), moment(1, MODEL["k"])])
    assert np.array_equal(state["qk"]["exp_avg"], expected)
    assert np.array_equal(state["out.kernel"]["exp_avg"], moment(3, MODEL["out.weight"]).T)
    assert state["qk"]["step"] == 3 and state["qk"]["step"].shape == ()


LIKE_MODEL = {
    "out.kernel": np.zeros((3, 2), np.float32),
    "bias": np.ones(2, np.float32),
    "qk": np.zeros((6, 3), np.float32),
    "norm.running_mean": np.zeros(3, np.float32),
    "norm.num_batches_tracked": np.array(0, np.int64),
}
LIKE_PARAMETERS = ("out.kernel", "bias", "qk")


def test_like_another_checkpoint_it_is_numbered_as_there(tmp_path: Path) -> None:
    like = training(LIKE_MODEL, LIKE_PARAMETERS, 1, epoch=0, note="there")
    like["optimizer"]["param_groups"][0]["lr"] = 0.25
    made = converted(tmp_path, training(), like=like)
    group, state = made["optimizer"]["param_groups"][0], made["optimizer"]["state"]
    assert group["params"] == [0, 1, 2] and group["lr"] == 0.5 and made["epoch"] == 3 and made["note"] == "there"
    expected = np.concatenate([moment(0, MODEL["q"]), moment(1, MODEL["k"])])
    assert np.array_equal(arrays_of(state[2])["exp_avg"], expected)
    assert np.array_equal(arrays_of(state[1])["exp_avg"], moment(2, MODEL["bias"]))
    assert np.array_equal(arrays_of(made["model"])["qk"], np.concatenate([MODEL["q"], MODEL["k"]]))
    again = converted(tmp_path / "made", made, like=training(steps=1))
    assert arrays_of(again["model"]).keys() == MODEL.keys()
    for number, of_parameter in training()["optimizer"]["state"].items():
        one, other = arrays_of(of_parameter), arrays_of(again["optimizer"]["state"][number])
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_named_parameters_may_be_in_groups_and_in_any_order(tmp_path: Path) -> None:
    order = ("out.weight", "q", "bias", "k")
    source = training(parameters=order)
    groups = source["optimizer"]["param_groups"]
    groups[0]["params"], groups[0]["param_names"] = [0, 1, 3], ["out.weight", "q", "k"]
    groups.append({**groups[0], "params": [2], "param_names": ["bias"], "lr": 0.125})
    made = converted(tmp_path, source, MAP_OF_FILES)["optimizer"]
    # In the optimizer's own order, not the model's: what knows no names takes them by their places.
    assert [group["params"] for group in made["param_groups"]] == [["out.kernel", "qk"], ["bias"]]
    assert not any("param_names" in group for group in made["param_groups"])  # torch keeps its own, in its order
    expected = np.concatenate([moment(1, MODEL["q"]), moment(3, MODEL["k"])])
    assert np.array_equal(arrays_of(made["state"]["qk"])["exp_avg"], expected)


def test_what_modules_keep_as_a_tensor_is_no_parameter(tmp_path: Path) -> None:
    """Transformer Engine keeps scales of float8 so."""
    extra = np.zeros(5, np.uint8)
    model = {"q": MODEL["q"], "out._extra_state": extra, **MODEL, "_extra_state": extra[:3]}
    made = converted(tmp_path, training(model), MAP_OF_FILES)
    assert [*made["optimizer"]["state"]] == ["qk", "bias", "out.kernel"] and "out._extra_state" in made["model"]
    text = "[[map]]\neq = 'model.{p*} <=> model.{p*}'\n"
    options: dict[str, Any] = {"forward": True, "exclude": "*_extra_state"}
    assert [*converted(tmp_path, training(model), text, **options)["optimizer"]["state"]] == [*PARAMETERS]
    torch_peer.save(tmp_path / "like.pt", training(model))
    text = "[[map]]\neq = 'out.weight <=> out.weight'\n"
    back = converted(tmp_path, training(model), text, forward=True, like=tmp_path / "like.pt")
    assert np.array_equal(arrays_of(back["optimizer"]["state"][3])["exp_avg"], moment(3, MODEL["out.weight"]))


@pytest.mark.parametrize("is_below", [False, True])
@pytest.mark.parametrize("is_like", few(1, [False, True]))
def test_an_optimizer_at_the_root_of_a_file(tmp_path: Path, is_below: bool, is_like: bool) -> None:
    """The model is beside it: `{**optimizer.state_dict(), "model": ...}`."""

    def saved(model: dict[str, Array], parameters: tuple[str, ...]) -> dict[str, Any]:
        own = training(model, parameters)
        rest = {"model": own["model"]} if is_below else own["model"]
        return {**own["optimizer"], **rest, "epoch": 3}

    text = MAP_OF_FILES if is_below and not is_like else MAP
    like = saved(LIKE_MODEL, LIKE_PARAMETERS) if is_like else None
    made = converted(tmp_path, saved(MODEL, PARAMETERS), text, like=like)
    own = made["model"] if is_below else {name: made[name] for name in LIKE_MODEL}
    assert arrays_of(own).keys() == LIKE_MODEL.keys() and made["epoch"] == 3
    for number, name in enumerate(LIKE_PARAMETERS):
        expected = {"qk": np.concatenate([moment(0, MODEL["q"]), moment(1, MODEL["k"])]), "bias": moment(2, BIAS[:2])}
        state = arrays_of(made["state"][number if is_like else name])
        assert np.array_equal(state["exp_avg"], expected.get(name, moment(3, MODEL["out.weight"]).T))
    assert sorted(made["param_groups"][0]["params"]) == ([0, 1, 2] if is_like else sorted(LIKE_PARAMETERS))


def test_a_tensor_beside_an_optimizer_at_the_root_that_was_left_out_before_is_missed(tmp_path: Path) -> None:
    source = training({**MODEL, "more": BIAS[:5]})
    torch_peer.save(tmp_path / "x.pt", {**source["optimizer"], "model": source["model"]})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "y", exclude="model.more")
    with pytest.raises(MapError, match=r"model.more was left out before"):
        reshard_mpi.transform(tmp_path / "y", tmp_path / "made", map="model.bias <=> model.new", forward=True)


def test_lists_beside_an_optimizer_at_the_root(tmp_path: Path) -> None:
    """Numbers in names of the model are none of parameters."""
    model = {"0.weight": Q[:9].reshape(3, 3), "1.weight": K[:9].reshape(3, 3), "q": OUT[:9].reshape(3, 3)}
    source = training(model, ("q", "0.weight", "1.weight"))
    source["optimizer"]["param_groups"][0]["param_names"] = ["q", "0.weight", "1.weight"]
    torch_peer.save(tmp_path / "x.pt", {**source["optimizer"], "model": source["model"]})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "made", map="model.q <=> model.a", forward=True)
    masters = [tensor(moment(9, array)) for array in model.values()]
    torch_peer.save(tmp_path / "x.pt", {**source["optimizer"], "model": source["model"], "masters": masters})
    made = transformed(tmp_path / "x.pt", tmp_path / "other", map="model.q <=> model.a", forward=True)
    assert made["param_groups"][0]["params"] == ["a", "0.weight", "1.weight"]
    assert all(
        np.array_equal(arrays_of({"w": own})["w"], moment(9, array))
        for own, array in zip(made["masters"], model.values())
    )


@pytest.mark.parametrize("is_like", [False, True])
def test_positions_and_masks_are_no_parameters(tmp_path: Path, is_like: bool) -> None:
    """Of their types torch trains nothing."""
    buffers = {"positions": np.arange(3), "out.mask": np.ones((2, 3), np.bool_), "out.kind": np.zeros(2, np.uint8)}
    model = {**buffers, **MODEL}
    like = training({**buffers, **LIKE_MODEL}, LIKE_PARAMETERS) if is_like else None
    made = converted(tmp_path, training(model), MAP if is_like else MAP_OF_FILES, like=like)
    assert [*made["optimizer"]["state"]] == ([0, 1, 2] if is_like else ["qk", "bias", "out.kernel"])
    key = 0 if is_like else "out.kernel"
    assert np.array_equal(arrays_of(made["optimizer"]["state"][key])["exp_avg"], moment(3, MODEL["out.weight"]).T)


def test_a_tied_weight_is_one_parameter(tmp_path: Path) -> None:
    model = {"embed": Q, **MODEL, "head": Q}
    made = converted(tmp_path, training(model, ("embed", *PARAMETERS)), MAP_OF_FILES)
    assert [*made["optimizer"]["state"]] == ["embed", "qk", "bias", "out.kernel"]


UNTIED = {
    "alone": "model.embed [v h] <=> model.wte [h v]",
    "both": "model.embed [v h] <=> model.wte [h v]\nmodel.head [v h] <=> model.wout [h v]",
    "renamed": "model.embed [v h] <=> model.wte [v h]",
    "stacked": "model.embed [v h], model.head [w h] <=> model.both [(v + w) h]",
    "padded": "model.head [v h] <=> model.wout [(v | 9) h]",
    "one joined": "model.embed [v h], model.q [w h] <=> model.all [(v + w) h]",
}


@pytest.mark.parametrize("way", few(4, [*UNTIED, "copied", "excluded", "not tied"]))
def test_a_tied_weight_that_an_equation_turns_alone_is_told(tmp_path: Path, way: str) -> None:
    """The target has two that are no longer alike, and one state."""
    embed = Q.reshape(8, 3)
    model = {"embed": embed, **MODEL, "head": embed.copy() if way == "not tied" else embed}
    torch_peer.save(tmp_path / "x.pt", {"model": {name: tensor(array) for name, array in model.items()}})
    equations = UNTIED.get(way, UNTIED["alone"]).split("\n")
    if way == "copied":
        equations = ["model.embed [v h], model.head [v h] <=> model.wte [h v]"]
    text = "".join(f"[[map]]\ncopy = {'true' if way == 'copied' else 'false'}\neq = '{eq}'\n" for eq in equations)
    (tmp_path / "map.toml").write_text(text)
    options: dict[str, Any] = {"exclude": ["model.head"]} if way == "excluded" else {}
    how = {"map": tmp_path / "map.toml", "forward": True, **options}
    warned = " ".join(reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **how).warnings)
    is_told = way in ("alone", "padded", "one joined")
    assert ("model.head" in warned) == ("model.embed" in warned) == ("copy = true" in warned) == is_told


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_weight_in_the_memory_of_another_may_have_a_number_of_its_own(tmp_path: Path, where: str) -> None:
    """`c.weight` is made of `a.weight.data`, and a buffer has the shape of both: it would get the state of `c`."""
    text = "[[map]]\neq = '{p*}.weight <=> {p*}.kernel'\n"
    weight, mask = np.zeros((4, 4), np.float32), np.ones((4, 4), np.float32)
    names = ["a.weight", "b.bias", *(["b.mask", "c.weight"] if where == "before" else ["c.weight", "d.mask"])]
    model = {name: {"b.bias": Q[:3], "b.mask": mask, "d.mask": mask}.get(name, weight) for name in names}
    with pytest.raises(MapError, match=r"[bd]\.mask's"):
        converted(tmp_path, training(model, ("a.weight", "b.bias", "c.weight")), text)
    renamed = {name.replace("mask", "weight"): array for name, array in model.items()}
    tied = ("a.weight", "b.bias", "b.weight" if where == "before" else "d.weight")
    made = converted(tmp_path, training(renamed, tied), text)
    assert [*made["optimizer"]["state"]] == [name.replace("weight", "kernel") for name in tied]


@pytest.mark.parametrize("untied_at", [None, 1])
def test_a_weight_that_is_tied_in_the_files_of_all_ranks_is_one_parameter(
    tmp_path: Path, untied_at: int | None
) -> None:
    """Every rank of data parallelism has saved its own file."""
    for rank in range(2):
        model = {"embed": Q, **MODEL, "head": Q.copy() if rank == untied_at else Q}
        (tmp_path / f"src/rank_{rank}").mkdir(parents=True)
        torch_peer.save(tmp_path / f"src/rank_{rank}/x.pt", training(model, ("embed", *PARAMETERS)))
    (tmp_path / "two.toml").write_text("mesh = { data = 2 }\n[[parameter]]\nmatch = '*'\n")
    (tmp_path / "map.toml").write_text(MAP_OF_FILES)
    how = (tmp_path / "src", tmp_path / "dst", tmp_path / "two.toml")
    if untied_at is not None:
        with pytest.raises(MapError, match="6 parameters, and 5 numbers"):
            reshard_mpi.transform(*how, map=tmp_path / "map.toml")
    else:
        reshard_mpi.transform(*how, map=tmp_path / "map.toml")
        made = tree_of(tmp_path / "dst")
        assert [*made["optimizer"]["state"]] == ["embed", "qk", "bias", "out.kernel"]


@pytest.mark.parametrize("way", few(2, ["like", "map", "no map"]))
@pytest.mark.parametrize("is_whole", few(1, [False, True]))
def test_an_optimizer_has_no_empty_entry_for_state_that_is_left_out(tmp_path: Path, way: str, is_whole: bool) -> None:
    """torch never has one, and its Adagrad cannot load it. By names it would take groups by places if all were gone."""
    exclude = "optimizer.state.*" if is_whole else {"like": "model.q", "map": "optimizer.state.q.*"}.get(way)
    exclude = exclude or "optimizer.state.0.*"
    if way == "no map":
        torch_peer.save(tmp_path / "x.pt", training())
        made = transformed(tmp_path / "x.pt", tmp_path / "made", exclude=exclude)
    else:
        begin = "" if way == "like" else "model."
        text = f'[[map]]\neq = "{begin}{{p*}} <=> {begin}{{p*}}"\n'
        options: dict[str, Any] = {"like": training()} if way == "like" else {}
        made = converted(tmp_path, training(), text, forward=True, exclude=exclude, **options)
    states = made["optimizer"]["state"]
    if is_whole:
        assert states == ({name: {} for name in PARAMETERS} if way == "map" else {})
    else:
        assert [*states] == ([*PARAMETERS[1:]] if way == "map" else [1, 2, 3])
        assert all({*state} == {"step", "exp_avg"} for state in states.values())


@pytest.mark.parametrize("is_same_order", [True, False])
def test_ranks_with_settings_of_their_own_have_the_order_that_all_have(tmp_path: Path, is_same_order: bool) -> None:
    """Tensor parallelism: every rank has saved all tensors of the model, and its number besides."""
    models = [{name: array + 1000 * rank for name, array in MODEL.items() if array.ndim} for rank in range(2)]
    for rank, model in enumerate(models):
        names = [*model] if is_same_order or rank == 0 else [*reversed(model)]
        (tmp_path / f"src/rank_{rank}").mkdir(parents=True)
        saved = {**training({name: model[name] for name in names}), "rank": rank}
        torch_peer.save(tmp_path / f"src/rank_{rank}/x.pt", saved)
    (tmp_path / "two.toml").write_text("mesh = { t = 2 }\n[[parameter]]\nmatch = '*'\nsplit = { 0 = ['t'] }\n")
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'model.{p*} <=> model.net.{p*}'\n")
    how = (tmp_path / "src", tmp_path / "dst", tmp_path / "two.toml")
    if not is_same_order:
        with pytest.raises(MapError, match="by the order of the model's tensors, which is not known here"):
            reshard_mpi.transform(*how, map=tmp_path / "map.toml")
        return
    reshard_mpi.transform(*how, map=tmp_path / "map.toml")
    made = tree_of(tmp_path / "dst")
    assert [*made["optimizer"]["state"]] == [f"net.{name}" for name in PARAMETERS]
    for number, name in enumerate(PARAMETERS):
        expected = np.concatenate([moment(number, model[name]) for model in models])
        assert np.array_equal(arrays_of(made["optimizer"]["state"][f"net.{name}"])["exp_avg"], expected)


def test_a_parameter_that_never_had_state_has_no_empty_entry_by_names_either(tmp_path: Path) -> None:
    source = training()
    del source["optimizer"]["state"][1]
    made = converted(tmp_path, source, '[[map]]\neq = "model.{p*} <=> model.{p*}"\n', forward=True)
    assert [*made["optimizer"]["state"]] == ["q", "bias", "out.weight"]
    assert made["optimizer"]["param_groups"][0]["params"] == [*PARAMETERS]


def spoiled(change: str) -> dict[str, Any]:
    source = training()
    optimizer = source["optimizer"]
    (group,) = optimizer["param_groups"]
    if change == "fewer parameters":
        group["params"].pop()
        del optimizer["state"][3]
    elif change == "another order":
        optimizer["state"][0], optimizer["state"][1] = optimizer["state"][1], optimizer["state"][0]
    elif change == "two groups without names":
        group["params"] = [0, 1, 2]
        optimizer["param_groups"].append({**group, "params": [3]})
    elif change == "a name that is not there":
        group["param_names"] = ["q", "k", "bias", "other"]
    elif change == "a number in no group":
        optimizer["state"][9] = optimizer["state"][0]
    elif change == "a number twice":
        group["params"] = [0, 1, 2, 2]
    elif change == "no model":
        del source["model"]
    elif change == "two models":
        source["average"] = {name: tensor(array.copy()) for name, array in MODEL.items()}
    elif change == "two optimizers":
        source["second"] = source["optimizer"]
    return source


def test_a_forged_nest_with_two_optimizers_under_one_key_is_no_traceback() -> None:
    from reshard_mpi.mapping.apply_to_file import carried_into, renamed
    from reshard_mpi.mapping.follow_parameters import MadeParameter
    from reshard_mpi.mapping.numbered_state import training_in

    optimizer = (
        '["optimizer",{"dict":[["state",{"dict":[[0,{"dict":[]}]]}],["param_groups",[{"dict":[["params",[0]]]}]]]}]'
    )
    nest = '{"nest":{"dict":[["optimizer",3],' + optimizer + ']},"order":[0,"w"]}'
    training = training_in(nest, floats({"w": (2,), "optimizer.state.0.exp_avg": (2,)}), {}, "file")
    made = [MadeParameter("w", frozenset("w"))]
    assert '"w"' in renamed(nest, training, {"w"}, made, ["w"], "file").text
    assert "params" in carried_into(nest, nest, training, training, {"w"}, made, "file").text


@few_cases(
    1,
    "change",
    [
        "fewer parameters",
        "another order",
        "two groups without names",
        "a name that is not there",
        "a number in no group",
        "a number twice",
        "no model",
        "two models",
        "two optimizers",
    ],
)
def test_what_leaves_a_doubt_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(MapError) as raised:
        converted(tmp_path, spoiled(change), MAP_OF_FILES)
    assert "named_parameters" in str(raised.value) and not (tmp_path / "made" / "rank_0").exists()
    if change != "no model":
        left_out = ["optimizer.*"] + (["second.*"] if change == "two optimizers" else [])
        assert "qk" in converted(tmp_path, spoiled(change), MAP_OF_FILES, exclude=left_out)["model"]


def test_values_under_numbers_are_those_of_the_source(tmp_path: Path) -> None:
    history = {0: 1.5, 1: 0.5}
    made = converted(tmp_path, training(history=history), like=training(LIKE_MODEL, LIKE_PARAMETERS, history={0: 9.0}))
    assert made["history"] == {0: 1.5}


@pytest.mark.parametrize("texts", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("is_like", few(1, [False, True]))
def test_plain_values_of_state_go_with_numbers_that_are_texts(
    tmp_path: Path, is_like: bool, texts: tuple[bool, bool]
) -> None:
    """As in torch's distributed checkpoints, where the keys 0 and 1 have become "0" and "1"."""

    def counted(names: tuple[str, ...], first: int, *, is_text: bool) -> dict[str, Any]:
        source = training({name: Q[:6].reshape(2, 3) for name in names}, names)
        states = source["optimizer"]["state"]
        states = {number: {**state, "step": first + number} for number, state in states.items()}
        source["optimizer"]["state"] = {str(number) if is_text else number: state for number, state in states.items()}
        return source

    options = {"like": counted(("n.b", "n.a"), 100, is_text=texts[1])} if is_like else {}
    text = "[[map]]\neq = '{p*} <=> n.{p*}'" if is_like else "[[map]]\neq = 'model.{p*} <=> n.{p*}'"
    made = converted(tmp_path, counted(("a", "b"), 5, is_text=texts[0]), text, forward=True, **options)
    steps = [state["step"] for state in made["optimizer"]["state"].values()]
    assert steps == ([6, 5] if is_like else [5, 6])


def test_a_group_of_parameters_of_several_groups_has_what_these_say_alike(tmp_path: Path) -> None:
    source, like = training(), training(LIKE_MODEL, LIKE_PARAMETERS)
    source["optimizer"]["param_groups"] = [
        {"lr": 0.5, "decay": 0.1, "params": [0, 1], "param_names": ["q", "k"]},
        {"lr": 0.5, "decay": 0, "params": [2, 3], "param_names": ["bias", "out.weight"]},
    ]
    like["optimizer"]["param_groups"] = [{"lr": 9.0, "decay": 0.3, "params": [0, 1, 2]}]
    (group,) = converted(tmp_path, source, like=like)["optimizer"]["param_groups"]
    assert (group["lr"], group["decay"]) == (0.5, 0.3)


@pytest.mark.parametrize("is_named", [(True, True), (True, False), (False, True), (False, False)])
def test_settings_and_plain_values_go_where_their_parameter_goes_by_names_too(
    tmp_path: Path, is_named: tuple[bool, bool]
) -> None:
    """As torch's get_optimizer_state_dict has them: groups of the other checkpoint are in another order."""

    def grouped(names: tuple[str, ...], first: int, *, is_named: bool) -> dict[str, Any]:
        states = training({name: Q[:6].reshape(2, 3) for name in names}, names)["optimizer"]["state"]
        states = {number: {**state, "count": first + number} for number, state in states.items()}
        keys = names if is_named else range(len(names))
        groups = [
            {"lr": first / 2 + number, "params": [key], **({} if is_named else {"param_names": [name]})}
            for number, (key, name) in enumerate(zip(keys, names))
        ]
        optimizer = {"state": dict(zip(keys, states.values())), "param_groups": groups}
        return {**{name: tensor(Q[:6].reshape(2, 3)) for name in names}, "optimizer": optimizer}

    source, like = grouped(("a", "b"), 4, is_named=is_named[0]), grouped(("n.b", "n.a"), 100, is_named=is_named[1])
    text = "[[map]]\neq = 'a <=> n.a'\n[[map]]\neq = 'b <=> n.b'"
    made = converted(tmp_path, source, text, like=like)["optimizer"]
    assert [group["lr"] for group in made["param_groups"]] == [3.0, 2.0]
    assert [group["params"] for group in made["param_groups"]] == ([["n.b"], ["n.a"]] if is_named[1] else [[0], [1]])
    assert [state["count"] for state in made["state"].values()] == [5, 4]


def test_groups_that_nothing_tells_apart_stay_as_they_are_there(tmp_path: Path) -> None:
    """Without state no number is a parameter's, so the settings of one group could go to the parameters of another."""
    source, like = training(), training(LIKE_MODEL, LIKE_PARAMETERS)
    source["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0, 1]}, {"lr": 0.25, "params": [2, 3]}]}
    like["optimizer"] = {"state": {}, "param_groups": [{"lr": 9.0, "params": [0, 1]}, {"lr": 8.0, "params": [2]}]}
    made = converted(tmp_path, source, like=like)
    assert [group["lr"] for group in made["optimizer"]["param_groups"]] == [9.0, 8.0] and made["epoch"] == 3
    for one in (source, like):
        one["optimizer"]["param_groups"][:] = [{**one["optimizer"]["param_groups"][0], "params": [0, 1, 2, 3]}]
    (group,) = converted(tmp_path, source, like=like)["optimizer"]["param_groups"]
    assert group["lr"] == 0.5


def test_a_setting_that_is_a_tensor_stays_with_its_parameters(tmp_path: Path) -> None:
    source, like = training(), training(LIKE_MODEL, LIKE_PARAMETERS)
    rates = [tensor(np.array(rate, np.float32)) for rate in (0.5, 0.25)]
    source["optimizer"]["param_groups"] = [
        {"lr": rates[0], "params": [0, 1], "param_names": ["q", "k"]},
        {"lr": rates[1], "params": [2, 3], "param_names": ["bias", "out.weight"]},
    ]
    groups = [
        {"lr": tensor(np.array(9, np.float32)), "params": [0, 1], "param_names": ["out.kernel", "bias"]},
        {"lr": tensor(np.array(8, np.float32)), "params": [2], "param_names": ["qk"]},
    ]
    like["optimizer"]["param_groups"] = groups
    with pytest.raises(MapError, match="a setting of the optimizer is a tensor"):
        converted(tmp_path, source, like=like)
    names, parameters = (*LIKE_PARAMETERS[2:], *LIKE_PARAMETERS[:2]), [{"params": [0]}, {"params": [1, 2]}]
    like = training({name: LIKE_MODEL[name] for name in (*names, *LIKE_MODEL)}, names)
    like["optimizer"]["param_groups"] = [
        {**group, **own, "param_names": [names[number] for number in own["params"]]}
        for group, own in zip(groups, parameters)
    ]
    made = converted(tmp_path, source, like=like)["optimizer"]["param_groups"]
    assert [float(arrays_of({"lr": group["lr"]})["lr"]) for group in made] == [0.5, 0.25]


def test_numbers_that_become_other_parameters_are_of_one_moment(tmp_path: Path) -> None:
    """Parameters have been trained for other numbers of steps, as some are frozen for a time: `0.step` is another's."""
    source, like = training(), training(LIKE_MODEL, LIKE_PARAMETERS)
    for number, name in enumerate(PARAMETERS):
        source["optimizer"]["state"][number]["step"] = tensor(np.array(7 if name in "qk" else 10 + number, np.float32))
    state = converted(tmp_path, source, like=like)["optimizer"]["state"]
    assert [arrays_of(state[number])["step"] for number in range(3)] == [13, 12, 7]
    reshard_mpi.verify(tmp_path / "source.pt", tmp_path / "made", map=tmp_path / "map.toml", like=tmp_path / "like.pt")


@pytest.mark.parametrize("copy", ["ema", "wrapped", "first", "inner"])
def test_a_copy_of_the_model_without_its_buffers_is_a_doubt(tmp_path: Path, copy: str) -> None:
    """The copy alone has as many tensors as there are numbers, and the optimizer's model has a buffer of its own."""
    source = training(MODEL | {"mask": BIAS[:4]})
    plain = {name: tensor(MODEL[name].copy()) for name in PARAMETERS}
    if copy == "wrapped":
        plain = {f"module.{name}": value for name, value in plain.items()}
    source = {"teacher": plain, **source} if copy == "first" else {**source, "teacher": plain}
    source |= source.pop("model") if copy == "inner" else {}
    with pytest.raises(MapError, match="whose optimizer state each number is cannot be told") as raised:
        converted(tmp_path, source, "[[map]]\neq = '{p*} <=> x.{p*}'\n")
    other = "the file itself" if copy == "inner" else "model."
    assert "teacher." in str(raised.value) and other in str(raised.value) and "exclude" in str(raised.value)


@pytest.mark.parametrize("is_like", [False, True])
def test_parameters_of_two_groups_may_be_in_one_equation(tmp_path: Path, is_like: bool) -> None:
    """An equation of several tensors holds a weight and its bias together; each has the settings of its own group."""
    model = {"fc.w": Q[:6].reshape(3, 2), "fc.b": BIAS[:3]}

    def grouped(names: tuple[str, ...], decays: tuple[float, float]) -> dict[str, Any]:
        source = training(dict(zip(names, model.values())), names)
        settings = source["optimizer"]["param_groups"][0]
        source["optimizer"]["param_groups"] = [
            {**settings, "params": [number], "param_names": [name], "weight_decay": decay}
            for number, (name, decay) in enumerate(zip(names, decays))
        ]
        return source

    prefix = "" if is_like else "model."
    text = f"[[map]]\neq = '{prefix}fc.w [o i], {prefix}fc.b [o] <=> {prefix}d.w [o i], {prefix}d.b [o]'"
    options = {"like": grouped(("d.w", "d.b"), (7.0, 8.0))} if is_like else {}
    made = converted(tmp_path, grouped(tuple(model), (0.5, 0.0)), text, **options)
    groups = made["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert [group["param_names" if is_like else "params"] for group in groups] == [["d.w"], ["d.b"]]


def test_an_optimizer_without_state_beside_another_one_goes_by_the_names_in_its_groups(tmp_path: Path) -> None:
    """As one with SGD for some of the parameters; only that with state tells whose its numbers are."""
    source = training()
    (group,) = source["optimizer"]["param_groups"]
    state = source["optimizer"]["state"]
    first = {"state": {}, "param_groups": [{**group, "params": [0, 1], "param_names": ["q", "k"]}]}
    second = {
        "state": {0: state[2], 1: state[3]},
        "param_groups": [{**group, "params": [0, 1], "param_names": ["bias", "out.weight"]}],
    }
    source |= {"optimizer": first, "second": second}
    made = converted(tmp_path, source, "[[map]]\neq = 'model.q <=> model.z'\n")
    (group_made,) = made["optimizer"]["param_groups"]
    assert group_made["params"] == ["z", "k"] and "param_names" not in group_made
    assert made["optimizer"]["state"] == {"z": {}, "k": {}}
    assert [*made["second"]["state"]] == ["bias", "out.weight"]


def test_joined_parameters_of_two_groups_are_refused(tmp_path: Path) -> None:
    source = training()
    (group,) = source["optimizer"]["param_groups"]
    group["params"], group["param_names"] = [0, 2, 3], ["q", "bias", "out.weight"]
    source["optimizer"]["param_groups"].append({**group, "params": [1], "param_names": ["k"]})
    with pytest.raises(MapError, match="parameters that the optimizer treats differently are put together"):
        converted(tmp_path, source, MAP_OF_FILES)


def test_joined_parameters_after_other_numbers_of_steps_are_refused(tmp_path: Path) -> None:
    source = training()
    source["optimizer"]["state"][1]["step"] = tensor(np.array(5, np.float32))
    with pytest.raises(MapError, match="one tensor is taken for several, and they differ"):
        converted(tmp_path, source, MAP_OF_FILES)


STATES = """
[[map]]
eq = "{p*}.weight [o i] <=> {p*}.kernel [i o]"
[[map]]
state = "optimizer.state.{p*}.exp_avg <=> m.{p*}"
warning = "m is another thing"
[[map]]
state = "optimizer.state.{p*}.exp_avg <=> n.{p*}"
[[map]]
[map.count]
each = "optimizer.state.{p*}.step"
beside = "optimizer.state.{p*}.exp_avg"
total = "t"
total_type = "int32"
[[map]]
number = { name = "power", of = "betas.1", power = true }
[[map]]
number = { name = "rate", of = "lr" }
[[map]]
caution = { of = "amsgrad", text = "amsgrad is another rule" }
"""


def there(state: str, **more: Array) -> dict[str, Array]:
    """Return a target whose state is called `state`, with one number of steps."""
    arrays = {name: array for name, array in MODEL.items() if name != "out.weight"}
    arrays["out.kernel"] = np.ascontiguousarray(MODEL["out.weight"].T)
    moments = {
        f"{state}.{name}": moment(at, arrays.get(name, arrays["out.kernel"])) for at, name in enumerate(PARAMETERS)
    }
    moments[f"{state}.out.kernel"] = np.ascontiguousarray(moment(3, MODEL["out.weight"]).T)
    del moments[f"{state}.out.weight"]
    return {**arrays, **moments, "t": np.array([3], np.int32), **more}


@pytest.mark.parametrize("state", few(1, ["m", "n"]))
def test_numbers_become_those_of_the_target_and_back(tmp_path: Path, state: str) -> None:
    powers = {"power": np.array(0.99**3, np.float32), "rate": np.array([0.5], np.float32)}
    like = there(state, **powers)
    write_shard({name: np.zeros_like(array) for name, array in like.items()}, tmp_path / "like.ckpt")
    torch_peer.save(tmp_path / "source.pt", training())
    (tmp_path / "map.toml").write_text(STATES)
    options = {"map": tmp_path / "map.toml", "like": tmp_path / "like.ckpt"}
    made = reshard_mpi.load_rank(0, tmp_path / "source.pt", **options)
    assert made.keys() == like.keys()
    for name, array in like.items():
        got = made[name]
        assert isinstance(got, np.ndarray) and got.dtype == array.dtype and got.shape == array.shape
        assert np.array_equal(got, array), name
    report = reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "there", to="ckpt", **options)
    assert ("m is another thing" in " ".join(report.warnings)) == (state == "m")

    (path,) = (tmp_path / "there").rglob("*.ckpt")
    torch_peer.save(tmp_path / "like.pt", training(steps=0))
    options["like"], source = tmp_path / "like.pt", training()
    again = transformed(path, tmp_path / "back", to="torch", **options)
    for number, of_parameter in source["optimizer"]["state"].items():
        one, other = arrays_of(of_parameter), arrays_of(again["optimizer"]["state"][number])
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) and one[key].shape == other[key].shape for key in one)


def test_other_settings_than_the_source_was_trained_with_are_refused(tmp_path: Path) -> None:
    write_shard(there("m", power=np.array(0.9**3, np.float32)), tmp_path / "source.ckpt")
    torch_peer.save(tmp_path / "like.pt", training())
    (tmp_path / "map.toml").write_text(STATES)
    with pytest.raises(MapError, match="power does not belong to the settings of the target"):
        reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map=tmp_path / "map.toml", like=tmp_path / "like.pt")


def test_steps_that_differ_are_no_one_number(tmp_path: Path) -> None:
    source = training()
    source["optimizer"]["state"][1]["step"] = tensor(np.array(5, np.float32))
    torch_peer.save(tmp_path / "source.pt", source)
    write_shard(there("m"), tmp_path / "like.ckpt")
    (tmp_path / "map.toml").write_text(STATES)
    with pytest.raises(MapError, match="one tensor is taken for several, and they differ"):
        reshard_mpi.transform(
            tmp_path / "source.pt",
            tmp_path / "there",
            map=tmp_path / "map.toml",
            like=tmp_path / "like.ckpt",
            to="ckpt",
        )


@pytest.mark.parametrize(("steps", "what"), [(2**24 + 1, "cannot be"), (2**53 + 1, "too large to reckon with")])
def test_a_count_is_not_rounded(tmp_path: Path, steps: int, what: str) -> None:
    write_shard(there("m", t=np.array([steps], np.int64)), tmp_path / "source.ckpt")
    (tmp_path / "map.toml").write_text(STATES)
    with pytest.raises(MapError, match=what):
        reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map=tmp_path / "map.toml", reverse=True)


@pytest.mark.parametrize("beta", [1e300, 10**400, 0.0])
def test_settings_of_which_no_number_can_be_made_are_refused(tmp_path: Path, beta: float) -> None:
    source = training(steps=-1.0 if beta == 0 else 3.0)
    source["optimizer"]["param_groups"][0]["betas"] = (0.9, beta)
    torch_peer.save(tmp_path / "source.pt", source)
    text = STATES.replace("{p*}.weight [o", "model.{p*}.weight [o").replace("> {p*}.kernel", "> model.{p*}.kernel")
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(MapError, match="power cannot be made of a setting of the optimizer"):
        reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "there", map=tmp_path / "map.toml", to="ckpt")


def test_what_a_setting_makes_different_is_said(tmp_path: Path) -> None:
    source = training()
    source["optimizer"]["param_groups"][0]["amsgrad"] = True
    torch_peer.save(tmp_path / "source.pt", source)
    write_shard(there("n"), tmp_path / "like.ckpt")
    (tmp_path / "map.toml").write_text(STATES)
    options = {"map": tmp_path / "map.toml", "like": tmp_path / "like.ckpt", "to": "ckpt"}
    report = reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "there", **options)
    assert "amsgrad is another rule" in " ".join(report.warnings)


NEST = "__reshard_mpi_nest__"
GROUPS = '"param_groups",[{"dict":[["params",[0]]]}]'


@pytest.mark.parametrize(
    "nest",
    [
        "",
        "{",
        "[" * 5000 + "]" * 5000,
        '{"dict":' * 3000 + "[]" + "}" * 3000,
        '{"dict":[1,null,[]]}',
        '{"dict":[["optimizer",{"dict":[["state",{"dict":[]}],["param_groups",3]]}]]}',
        '{"dict":[["optimizer",{"dict":[["state",{"dict":[]}],["param_groups",[{"dict":[["params",[[]]]]}]]]}]]}',
        '{"dict":[["optimizer",{"dict":[["state",{"dict":[]}],["param_groups",[{"dict":[["params",[9999999999]]]}]]]}]]}',
        '{"dict":[["optimizer",{"dict":[["state",{"dict":[5]}],[' + GROUPS + "]]}]]}",
    ],
)
def test_a_nest_that_is_none_is_refused_or_left_alone(tmp_path: Path, nest: str) -> None:
    """Any file may have a text of that name."""
    from reshard_mpi.mapping.numbered_state import training_in

    shapes = {"w": (2,), "optimizer.state.0.exp_avg": (2,)}
    try:
        training = training_in(nest, floats(shapes), {}, "file")
    except MapError as error:
        assert "file" in str(error)
    else:
        assert training.optimizer is None


@pytest.mark.slow
def test_many_dictionaries_take_no_long_time() -> None:
    """Files with thousands of dictionaries and tensors: each name is looked at once for each of its dots."""
    from reshard_mpi.mapping.numbered_state import training_in

    parts = ",".join(f'["d{number}",{{"dict":[["state",{{"dict":[]}}],[{GROUPS}]]}}]' for number in range(20_000))
    shapes = {f"d{number}.w{number}": (1,) for number in range(20_000)}
    assert training_in(f'{{"dict":[{parts}]}}', floats(shapes), {}, "file").optimizer is None


@pytest.mark.parametrize("is_like", few(1, [False, True]))
def test_verify_and_diff_see_the_same(tmp_path: Path, is_like: bool) -> None:
    torch_peer.save(tmp_path / "source.pt", training())
    torch_peer.save(tmp_path / "like.pt", training(LIKE_MODEL, LIKE_PARAMETERS, 1))
    (tmp_path / "map.toml").write_text(MAP if is_like else MAP_OF_FILES)
    options = ["--map", str(tmp_path / "map.toml"), *(["--like", str(tmp_path / "like.pt")] if is_like else [])]
    both = str(tmp_path / "source.pt"), str(tmp_path / "made")
    for command in ("plan", "transform", "verify", "diff"):
        done(command, *both, *options)
    said = run_here("plan", *both, *options, "-v", "--overwrite")
    name = "optimizer.state.2.exp_avg" if is_like else "optimizer.state.qk.exp_avg"
    assert f"{name} float32 [6, 3]: optimizer.state.0.exp_avg, optimizer.state.1.exp_avg, by" in said.out, said
    done("plan", *both, *options, "--exclude", "optimizer.*", "--overwrite")


def test_state_is_no_parameter_of_an_equation(tmp_path: Path) -> None:
    """`moment1.ln.gamma` and `moment1.ln.beta` look like a norm's, and are state of one."""
    weights = {"ln.gamma": BIAS[:3], "ln.beta": BIAS[3:6], "fc.weight": OUT[:6].reshape(2, 3), "fc.bias": OUT[6:8]}
    moments = {f"moment{at}.{name}": moment(at, array) for at in (1, 2) for name, array in weights.items()}
    numbers = {"global_step": np.array([4], np.int32), "beta1_power": np.array(0.5, np.float32)}
    write_shard({**weights, **moments, **numbers}, tmp_path / "source.ckpt")
    made = reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map="torch-mindspore")
    names = {"ln.gamma": "ln.weight", "ln.beta": "ln.bias"}
    keys = {1: "exp_avg", 2: "exp_avg_sq"}
    expected = {names.get(name, name): array for name, array in weights.items()}
    for at, key in keys.items():
        state = {f"optimizer.state.{names.get(name, name)}.{key}": moment(at, array) for name, array in weights.items()}
        expected |= state
    steps = {f"optimizer.state.{names.get(name, name)}.step": np.array(4, np.float32) for name in weights}
    assert made.keys() == expected.keys() | steps.keys()
    assert all(np.array_equal(made[name], array) for name, array in (expected | steps).items())


@pytest.mark.parametrize("side", ["left", "right", "neither"])
def test_state_tells_the_direction_where_all_layers_are_linear(tmp_path: Path, side: str) -> None:
    """Their weights and biases have the same names on both sides."""
    weights = {"fc.weight": OUT[:6].reshape(2, 3), "fc.bias": OUT[6:8]}
    kinds = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
    left = {f"optimizer.state.{name}.{key}": moment(1, array) for key in kinds for name, array in weights.items()}
    left |= {f"optimizer.state.{name}.step": np.array(4, np.float32) for name in weights}
    right = {f"{key}.{name}": moment(1, array) for key in kinds.values() for name, array in weights.items()}
    right["global_step"] = np.array([4], np.int32)
    source, other = (left, right) if side == "left" else (right, left)
    write_shard({**weights, **(source if side != "neither" else {})}, tmp_path / "source.safetensors")
    if side == "neither":
        with pytest.raises(MapError, match="can be read in both directions"):
            reshard_mpi.load_rank(0, tmp_path / "source.safetensors", map="torch-mindspore")
        made, other = reshard_mpi.load_rank(0, tmp_path / "source.safetensors", map="torch-mindspore", reverse=True), {}
    else:
        made = reshard_mpi.load_rank(0, tmp_path / "source.safetensors", map="torch-mindspore")
    assert made.keys() == {*weights, *other}
    assert all(np.array_equal(made[name], array) for name, array in {**weights, **other}.items())


def test_what_is_made_up_beside_state_is_not_made_up_beside_what_else_is_named_so(tmp_path: Path) -> None:
    names = ("running_mean", "running_var")
    torch_model = {f"bn.{name}": BIAS[:3] for name in names} | {"bn.weight": BIAS[3:6], "bn.bias": BIAS[6:9]}
    renamed = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    model = {f"bn.{new}": torch_model[f"bn.{old}"] for old, new in renamed.items()}
    state = {f"accum.bn.{name}": array for name, array in (("gamma", OUT[:3]), ("beta", OUT[3:6]))}
    stat = {f"stat.bn.{name}": np.zeros(3, np.float32) for name in ("gamma", "beta")}
    parameters = ("bn.weight", "bn.bias")
    source = training(torch_model, parameters)
    for number, array in enumerate(state.values()):
        source["optimizer"]["state"][number] = {"momentum_buffer": tensor(array)}
    torch_peer.save(tmp_path / "source.pt", source)
    expected = {**model, **state, **stat}
    write_shard(expected, tmp_path / "like.ckpt")
    made = reshard_mpi.load_rank(0, tmp_path / "source.pt", map="torch-mindspore", like=tmp_path / "like.ckpt")
    assert made.keys() == expected.keys()
    assert all(np.array_equal(made[name], array) for name, array in expected.items())


def test_what_is_computed_has_the_order_of_what_it_is_computed_beside(tmp_path: Path) -> None:
    """Whatever Python's hashes are: processes that make a target together, or one after another, must agree."""
    names = [f"layer{number}.w" for number in (3, 1, 4, 0, 5, 9, 2, 6)]
    tensors = {name: OUT[:6].reshape(2, 3) for name in names}
    tensors |= {f"moment{at}.{name}": moment(at, tensors[name]) for at in (1, 2) for name in names}
    write_shard(tensors | {"global_step": np.array([4], np.int32)}, tmp_path / "source.ckpt")
    made = reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map="torch-mindspore", reverse=True)
    steps = [name for name in made if name.endswith(".step")]
    assert steps == [f"optimizer.state.{name}.step" for name in names]


@pytest.mark.parametrize("way", ["drop", "exclude"])
def test_numbered_state_of_what_is_left_out_goes_with_it(tmp_path: Path, way: str) -> None:
    text = MAP_OF_FILES + "[[map]]\ndrop = 'model.bias'\noptional = true\n" * (way == "drop")
    made = converted(tmp_path, training(), text, **({"exclude": "model.bias"} if way == "exclude" else {}))
    assert "bias" not in made["model"]
    assert [*made["optimizer"]["state"]] == ["qk", "out.kernel"] == made["optimizer"]["param_groups"][0]["params"]


@pytest.mark.parametrize("shape", [(1,), (3, 2)], ids=str)
@pytest.mark.parametrize("module", ["moments", "optim"])
def test_a_parameter_of_a_module_that_is_called_like_state_is_not_left_out_with_another(
    tmp_path: Path, module: str, shape: tuple[int, ...]
) -> None:
    """It has a number in the optimizer, and so it is a parameter, whatever its name."""
    model = {"layers.w": np.ones((3, 2), np.float32), f"{module}.w": np.ones(shape, np.float32)}
    text = "[[map]]\neq = '{p*} <=> {p*}'\n"
    made = converted(tmp_path, training(model, tuple(model)), text, forward=True, exclude="model.layers.w")
    assert [*made["model"]] == [f"{module}.w"] == [*made["optimizer"]["state"]]


@few_cases(
    2,
    ("key", "equation", "path", "begin"),
    [
        ("model", "model.{p*} <=> net.{p*}", "net", ""),
        ("state_dict", "state_dict.{p*} <=> model.{p*}", "model", ""),
        ("model", "{p*} <=> module.{p*}", "module.model", ""),
        ("model", "model.{p*} <=> model.n.{p*}", "model", "n."),
        ("model", "model.{p*} <=> {p*}", "", ""),
        ("model", "model.{p*} <=> epoch.{p*}", "", "epoch."),  # the key is taken
        ("model", "model.{p*} <=> ema.{p*}", "ema", ""),  # there is such a dictionary
    ],
)
def test_names_in_the_optimizer_go_by_the_models_dictionary(
    tmp_path: Path, key: str, equation: str, path: str, begin: str
) -> None:
    """As torch's set_optimizer_state_dict needs them: by the model's own names, whatever its key in the file."""
    source = training(ema={"decay": 0.5})
    source[key] = source.pop("model")
    made = converted(tmp_path, source, f'[[map]]\neq = "{equation}"\n', forward=True)
    names = [f"{begin}{name}" for name in PARAMETERS]
    optimizer, model = made["optimizer"], made[path] if path else made
    assert [*optimizer["state"]] == names == optimizer["param_groups"][0]["params"]
    assert [name for name in model if name in names] == names
    for number, (name, own) in enumerate(zip(names, PARAMETERS)):
        assert np.array_equal(arrays_of(optimizer["state"][name])["exp_avg"], moment(number, MODEL[own]))


@pytest.mark.parametrize("then", few(1, ["model.{p*} <=> net.{p*}", "{p*} <=> net.{p*}"]))
def test_names_in_the_optimizer_go_by_the_dictionary_that_several_maps_make(tmp_path: Path, then: str) -> None:
    torch_peer.save(tmp_path / "x.pt", training())
    (tmp_path / "first.toml").write_text("[[map]]\neq = 'model.out.{p*} <=> model.last.{p*}'\n")
    maps = [tmp_path / "first.toml", then]
    made = transformed(tmp_path / "x.pt", tmp_path / "made", map=maps, forward=True)
    model = made["net"] if then.startswith("model") else made["net.model"]
    names = ["q", "k", "bias", "last.weight"]
    assert [*made["optimizer"]["state"]] == names == made["optimizer"]["param_groups"][0]["params"]
    assert [name for name in model if name in names] == names


def test_state_that_goes_by_names_is_renamed_by_the_next_run_too(tmp_path: Path) -> None:
    """Also its plain values and the groups: what two runs make is what both maps make in one run."""
    source = training()
    for number, state in source["optimizer"]["state"].items():
        state["count"] = 5 if number < 2 else number
    first = "[[map]]\neq = 'model.{p*} <=> model.net.{p*}'"
    then = "[[map]]\neq = 'net.q [a h], net.k [b h] <=> body.qk [(a + b) h]'\n[[map]]\neq = 'net.bias <=> body.bias'\n"
    (tmp_path / "b").mkdir()
    by_names = converted(tmp_path, source, first)
    two_runs = converted(tmp_path / "b", by_names, then)
    optimizer = two_runs["optimizer"]
    names = ["body.qk", "body.bias", "net.out.weight"]
    assert [*optimizer["state"]] == names == optimizer["param_groups"][0]["params"]
    assert [state["count"] for state in optimizer["state"].values()] == [5, 2, 3]
    expected = np.concatenate([moment(0, MODEL["q"]), moment(1, MODEL["k"])])
    moments = {"exp_avg": optimizer["state"]["body.qk"]["exp_avg"]}
    assert np.array_equal(arrays_of(moments)["exp_avg"], expected)
    left_out = converted(tmp_path / "b", by_names, then, exclude="model.body.bias")["optimizer"]
    assert [*left_out["state"]] == ["body.qk", "net.out.weight"] == left_out["param_groups"][0]["params"]
    by_names["optimizer"]["state"]["net.k"]["count"] = 6
    with pytest.raises(MapError, match="parameters that the optimizer treats differently are put together"):
        converted(tmp_path / "b", by_names, then)


def test_state_by_names_that_are_those_of_no_tensor_has_equations_of_its_own(tmp_path: Path) -> None:
    """As torch's get_state_dict has it: the tensor is `model.q`, its state `q`; refused without these equations."""
    source = training()
    states = source["optimizer"]["state"]
    source["optimizer"]["state"] = {
        name: {**state, "count": number} for name, (number, state) in zip(PARAMETERS, states.items())
    }
    source["optimizer"]["param_groups"][0]["params"] = [*PARAMETERS]
    text = "[[map]]\neq = 'model.{p*} <=> model.n.{p*}'\n"
    with pytest.raises(MapError, match="would stay as it is"):
        converted(tmp_path, source, text)
    text += "[[map]]\neq = 'optimizer.state.{p*} <=> optimizer.state.n.{p*}'\n"
    made = converted(tmp_path, source, text, forward=True)["optimizer"]
    names = [f"n.{name}" for name in PARAMETERS]
    assert [*made["state"]] == names == made["param_groups"][0]["params"]
    for name, (number, state) in zip(names, states.items()):
        assert made["state"][name]["count"] == number and [*made["state"][name]] == ["step", "exp_avg", "count"]
        moments = {"exp_avg": made["state"][name]["exp_avg"]}
        assert np.array_equal(arrays_of(moments)["exp_avg"], arrays_of({"exp_avg": state["exp_avg"]})["exp_avg"])


@pytest.mark.parametrize("is_flat", few(1, [False, True]))
def test_a_count_by_names_does_not_stay_where_names_end_alike(tmp_path: Path, is_flat: bool) -> None:
    """`n.q` ends in `q`, and is another name nevertheless: the count would be that of no parameter."""
    state = {name: {"step": tensor(Q[:1]), "exp_avg": tensor(MODEL[name])} for name in "qk"}
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.5, "params": ["q", "k"]}]}
    if is_flat:
        optimizer = {f"state.{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        for name in "qk":
            optimizer |= {f"param_groups.{name}.lr": tensor(Q[:1]), f"param_groups.{name}.eps": 0.5}
    saved = {"model": {name: tensor(MODEL[name]) for name in "qk"}, "optim": optimizer}
    kinds = ["state.{p*}.exp_avg", "state.{p*}.step", *["param_groups.{p*}.lr"] * is_flat]
    equations = ["model.{p*} <=> model.n.{p*}"]
    equations += [f"optim.{kind} <=> optim.{kind.replace('{', 'n.{')}" for kind in kinds]
    for number in range(2, len(equations)):
        text = "".join(f"[[map]]\neq = '{each}'\n" for each in (*equations[:number], *equations[number + 1 :]))
        with pytest.raises(MapError, match="would be of no parameter"):
            converted(tmp_path, saved, text, forward=True)
    converted(tmp_path, saved, "".join(f"[[map]]\neq = '{each}'\n" for each in equations), forward=True)


def test_an_empty_parameter_goes_through_several_maps(tmp_path: Path) -> None:
    model = {"q": Q[:12].reshape(4, 3), "empty": Q[:0].reshape(0, 3), "out": OUT[:6].reshape(2, 3)}
    torch_peer.save(tmp_path / "source.pt", training(model, tuple(model)))
    equations = ["model.{p*} [a b] <=> model.n.{p*} [b a]", "model.n.{p*} <=> model.m.{p*}"]
    made = transformed(tmp_path / "source.pt", tmp_path / "made", map=equations)
    names = ["m.q", "m.empty", "m.out"]
    assert [*made["optimizer"]["state"]] == names == made["optimizer"]["param_groups"][0]["params"] == [*made["model"]]
    assert arrays_of(made["optimizer"]["state"]["m.empty"])["exp_avg"].shape == (3, 0)


def test_state_that_would_get_the_names_of_other_state_is_refused(tmp_path: Path) -> None:
    """The state of `q` and of `model.q` would both be `optimizer.state.q.*`, and one of the two would be lost."""
    torch_peer.save(tmp_path / "source.pt", training())
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'model.q <=> k'\n[[map]]\neq = 'model.k <=> model.k'\n")
    for target in ("safetensors", "torch"):
        with pytest.raises(MapError, match=r"two tensors would have the name optimizer\.state\.k\.step"):
            reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "made", map=tmp_path / "map.toml", to=target)
    assert not (tmp_path / "made").exists() or not [*(tmp_path / "made").rglob("checkpoint_*")]


def test_without_a_map_numbered_state_of_what_is_excluded_is_refused(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "source.pt", training())
    with pytest.raises(MapError, match=r"model\.bias is excluded, and its state is not") as raised:
        reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "dst", exclude="model.bias")
    assert "--exclude 'optimizer.state.2.*'" in str(raised.value) and not (tmp_path / "dst").exists()
    reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "dst", exclude=["model.bias", "optimizer.state.2.*"])
    reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "model", exclude="optimizer.*")


@pytest.mark.parametrize("named", few(1, [False, True]))
@pytest.mark.parametrize("rule", few(1, ["", "q", "*"]))
def test_state_that_does_not_follow_its_parameter_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: bool, rule: str
) -> None:
    """Numbers, and names without what the model's begin with, name no parameter for the target strategy."""
    torch_peer.save(tmp_path / "x.pt", training())
    cut = 'mesh = { tp = 2 }\n[[parameter]]\nmatch = "model.q"\nsplit = { 0 = ["tp"] }\n'
    cut += '[[parameter]]\nmatch = "model.*"\n'
    of_state = 'match = "*"\n' if rule == "*" else 'match = "optimizer.state.*.exp_avg"\n'
    (tmp_path / "tp.toml").write_text(cut + (f"[[parameter]]\n{of_state}" if rule else ""))
    options: dict[str, Any] = {"map": "model.{p*} <=> model.{p*}", "forward": True} if named else {}
    how = (tmp_path / "x.pt", tmp_path / "out", None, tmp_path / "tp.toml")
    if rule == "q":  # the strategy says it by name
        reshard_mpi.transform(*how, **options, strict=True)
        return
    with pytest.raises(StrategyError, match=r"optimizer\.state\.(0|q)\.exp_avg"):
        reshard_mpi.transform(*how, **options, strict=True)
    reshard_mpi.transform(*how, **options)
    assert "whole on every rank (optimizer.state." in caplog.text


@pytest.mark.parametrize("form", few(1, ["{}.exp_avg", "optimizer.state.{}.exp_avg"]))
@pytest.mark.parametrize("kind", few(1, ["safetensors", "ckpt"]))
def test_state_by_a_key_behind_its_parameter_is_told_in_files_without_dictionaries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, form: str
) -> None:
    moments = {form.format(name): array * 10 for name, array in (("q", Q), ("k", K))}
    write_shard({"q": Q, "k": K, **moments, "moments.q": Q, "fc.exp_avg": Q}, tmp_path / f"x.{kind}")
    spec = 'mesh = { tp = 2 }\n[[parameter]]\nmatch = "q"\nsplit = { 0 = ["tp"] }\n'
    (tmp_path / "tp.toml").write_text(spec)
    how = (tmp_path / f"x.{kind}", tmp_path / "out", None, tmp_path / "tp.toml")
    with pytest.raises(StrategyError, match=re.escape(f"got: {form.format('q')} whole")):
        reshard_mpi.transform(*how, strict=True)
    reshard_mpi.transform(*how)
    assert f"whole on every rank ({form.format('q')})," in caplog.text
    (tmp_path / "tp.toml").write_text(spec + spec.partition("\n")[2].replace('"q"', f'"{form.format("q")}"'))
    reshard_mpi.transform(*how, strict=True, overwrite=True)


@pytest.mark.parametrize("model", ["model", ""])
def test_an_equation_that_takes_any_name_leaves_the_optimizers_tensors_in_it(tmp_path: Path, model: str) -> None:
    source = training()
    source["optimizer"]["param_groups"][0]["lr"] = tensor(np.array(0.5, np.float32))
    if not model:
        source |= source.pop("model")
    loaded = converted(tmp_path, source, '[[map]]\neq = "{p*} <=> module.{p*}"\n', forward=True)
    state, groups = loaded["optimizer"]["state"], loaded["optimizer"]["param_groups"]
    name = "q" if model else "module.q"  # by the dictionary of the model, `module.model`
    assert [*state] == groups[0]["params"] and {"exp_avg"} <= state[name].keys() and "lr" in groups[0]


@pytest.mark.parametrize("name", ["q", "net.q"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_an_equation_does_not_take_state_that_goes_by_names_out_of_its_optimizer(
    tmp_path: Path, is_flat: bool, name: str
) -> None:
    """The names may be those of a model that holds this one: then it cannot be known."""
    optimizer: dict[str, Any] = {
        "state": {name: {"exp_avg": tensor(Q)}},
        "param_groups": [{"lr": 0.5, "params": [name]}],
    }
    if is_flat:
        optimizer = {f"state.{name}.exp_avg": tensor(Q), f"param_groups.{name}.lr": 0.5}
    saved = {"model": {"q": tensor(Q)}, "optim": optimizer}
    text = '[[map]]\neq = "{p*} <=> module.{p*}"\n'
    if name == "net.q":
        with pytest.raises(MapError, match=r"state of model\.q would stay as it is"):
            converted(tmp_path, saved, text, forward=True)
        return
    made = converted(tmp_path, saved, text, forward=True)
    assert [*made["module.model"]] == ["q"] and made["optim"].keys() == optimizer.keys()


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_type_for_all_leaves_settings_that_are_tensors(tmp_path: Path, is_flat: bool) -> None:
    """Betas of 0.999 would be 1.0 in bfloat16, with which Adam no longer moves. One parameter has a single element."""

    def single(value: float = 0.999) -> Any:
        return tensor(np.array(value, np.float32))

    group = {"lr": single(), "betas": single() if is_flat else (single(), single()), "initial_lr": single()}
    state = {
        name: {"exp_avg": tensor(MODEL[name].reshape(-1)[: 1 + 11 * (name == "q")]), "mu_product": single()}
        for name in "qk"
    }
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{**group, "params": ["q", "k"]}]}
    if is_flat:
        optimizer = {f"state.{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        optimizer |= {f"param_groups.{name}.{key}": value for name in "qk" for key, value in group.items()}
    saved = {"model": {"q": tensor(Q[:12]), "scale_of_all": single()}, "optim": optimizer}
    saved |= {"scheduler": {"base_lrs": [single()], "max_lr": single()}}
    torch_peer.save(tmp_path / "x.pt", saved)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="safetensors", dtype="bf16")
    loaded = reshard_mpi.load_rank(0, tmp_path / "dst")
    kept = {name for name, value in loaded.items() if value.dtype == np.float32}
    assert {*loaded} - kept == {"model.q", "model.scale_of_all", "optim.state.q.exp_avg", "optim.state.k.exp_avg"}


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_type_for_all_is_that_of_moments_where_all_parameters_have_one_element(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """As the temperature of a training of agents, which has an optimizer of its own."""
    single = {key: tensor(np.full(shape, 0.999, np.float32)) for key in ("exp_avg", "exp_avg_sq", "mu_product", "step")}
    optimizer = {"state": {0: single}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch_peer.save(tmp_path / "x.pt", {"model": {"log_alpha": tensor(np.ones(shape, np.float32))}, "optim": optimizer})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="safetensors", dtype="bf16")
    loaded = reshard_mpi.load_rank(0, tmp_path / "dst")
    kept = {name.rpartition(".")[2] for name, value in loaded.items() if value.dtype == np.float32}
    assert kept == {"mu_product", "step"}


@pytest.mark.parametrize("copy", [{"shadow_params": True}, {"amp": {"master": True}}, {"names": True}])
def test_a_list_of_copies_is_not_taken_for_the_model(tmp_path: Path, copy: dict[str, Any]) -> None:
    """As of an EMA or of master weights; the model has a buffer of its own, so it has more tensors than numbers."""
    model = {"position_ids": np.arange(4), **MODEL}
    copies = [tensor(MODEL[name] + np.float32(1)) for name in PARAMETERS]

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return copies

    source = training() | {"model": {name: tensor(array) for name, array in model.items()}, "ema": filled(copy)}
    if "names" in copy:
        source["ema"] = {f"copy_of_{name.replace('.', '')}": each for name, each in zip(PARAMETERS, copies)}
    with pytest.raises(MapError, match="whose optimizer state each number is cannot be told"):
        converted(tmp_path, source, MAP_OF_FILES)


@pytest.mark.parametrize("equation", ["model.q [a h], model.k [b h] <=> model.qk [(a + b) h]", "model.q <=> model.new"])
def test_numbered_state_whose_order_nothing_tells_is_refused(tmp_path: Path, equation: str) -> None:
    """As in a folder of Hugging Face's form, which has names alone."""
    torch_peer.save(tmp_path / "x.pt", training())
    arrays = reshard_mpi.load_rank(0, tmp_path / "x.pt")
    (tmp_path / "hf").mkdir()
    source_of(tmp_path, arrays).joinpath("rank_0/checkpoint_0.safetensors").rename(tmp_path / "hf/model.safetensors")
    asked: dict[str, Any] = {"map": equation, "to": "torch", "forward": True}
    with pytest.raises(MapError, match="state that torch numbers would stay"):
        reshard_mpi.transform(tmp_path / "hf", tmp_path / "dst", **asked)
    reshard_mpi.transform(tmp_path / "hf", tmp_path / "dst", exclude=["optimizer.*"], **asked)


@pytest.mark.parametrize("head", few(1, ["head", "model.norm"]))
def test_a_prefix_that_a_map_takes_off_is_not_taken_off_twice(tmp_path: Path, head: str) -> None:
    """A part of the model is called as the key is that it lies below, as in a CausalLM of Hugging Face.

    If all that is made still begins so, it lies below the key, and the part is gone.
    """
    model = {"model.embed": Q[:12].reshape(4, 3), head: K[:6].reshape(2, 3)}
    torch_peer.save(tmp_path / "x.pt", training(model, tuple(model)))
    asked: dict[str, Any] = {"map": "model.{p*} <=> {p*}", "forward": True}
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "names", to="safetensors", **asked)
    names = [*model] if head == "head" else ["embed", "norm"]
    moments = {name for name in reshard_mpi.load_rank(0, tmp_path / "names") if name.endswith("exp_avg")}
    assert moments == {f"optimizer.state.{name}.exp_avg" for name in names}
    loaded = transformed(tmp_path / "x.pt", tmp_path / "torch", to="torch", **asked)
    optimizer, tensors = loaded["optimizer"], loaded if head == "head" else loaded["model"]
    assert [*optimizer["state"]] == optimizer["param_groups"][0]["params"] == names
    assert {*names} <= tensors.keys()


@pytest.mark.parametrize("is_flat", few(1, [False, True]))
@pytest.mark.parametrize("head", ["head", "model.norm"])
def test_names_lose_the_key_of_their_model_once(tmp_path: Path, head: str, is_flat: bool) -> None:
    """As the above, where the optimizer goes by names, and equations give its state these names."""
    names = ("model.embed", head)
    optimizer: dict[str, Any] = {
        "state": {name: {"exp_avg": tensor(Q)} for name in names},
        "param_groups": [{"lr": 0.5, "params": [*names]}],
    }
    if is_flat:
        optimizer = {f"state.{name}.exp_avg": tensor(Q) for name in names}
        optimizer |= {f"param_groups.{name}.lr": 0.5 for name in names}
    saved = {"model": {name: tensor(Q) for name in names}, "optim": optimizer}
    new = {"model.embed": "model.first", head: head}
    equations = [f"model.{name} <=> {new[name]}" for name in names]
    equations += [f"optim.state.{name}.exp_avg <=> optim.state.{new[name]}.exp_avg" for name in names]
    text = "".join(f"[[map]]\neq = '{each}'\n" for each in equations)
    if head != "head":  # all lies in the dictionary `model`, whose names would be without that
        with pytest.raises(MapError, match="would be those of no dictionary"):
            converted(tmp_path, saved, text, forward=True)
        return
    made = converted(tmp_path, saved, text, forward=True)["optim"]
    if is_flat:
        assert {*made} == {f"{key}.{name}.{of}" for name in new.values() for key, of in KINDS_OF_FLAT}
    else:
        assert [*made["state"]] == made["param_groups"][0]["params"] == [*new.values()]


KINDS_OF_FLAT = (("state", "exp_avg"), ("param_groups", "lr"))


@pytest.mark.parametrize("equation", ["model.fc [a b] <=> model.fc [b a]", "model.fc <=> model.head"])
def test_state_does_not_follow_a_parameter_whose_name_stands_in_its_own(tmp_path: Path, equation: str) -> None:
    """Of a wrapper with parts `model.fc` and `fc` below the key `model`: `model.fc` is `fc` to its optimizer."""
    names = ("model.fc", "fc")
    square = {name: tensor(number * Q[:9].reshape(3, 3)) for number, name in enumerate(names, 1)}
    states = {name: {"exp_avg": tensor(np.arange(9, dtype=np.float32).reshape(3, 3))} for name in names}
    saved = {"model": square, "optim": {"state": states, "param_groups": [{"lr": 0.5, "params": [*names]}]}}
    of_state = equation.replace("model.", "optim.state.").replace(" [", ".exp_avg [").replace(" <", ".exp_avg <")
    of_state = of_state if "[" in equation else f"{of_state}.exp_avg"
    of_state = of_state.replace("].exp_avg", "]")
    text = "".join(f"[[map]]\neq = '{each}'\n" for each in (equation, of_state))
    with pytest.raises(MapError, match=r"would be (kept of|arranged in another way)"):
        converted(tmp_path, saved, text, forward=True)
    text += "[[map]]\neq = 'model.model.fc <=> model.model.fc'\n"
    text += "[[map]]\neq = 'optim.state.model.fc.exp_avg <=> optim.state.model.fc.exp_avg'\n"
    made = converted(tmp_path, saved, text, forward=True)["optim"]["state"]
    assert np.array_equal(arrays_of(made["model.fc"])["exp_avg"], arrays_of(states["model.fc"])["exp_avg"])


def test_a_type_for_all_leaves_the_decay_of_an_average_and_what_callbacks_count(tmp_path: Path) -> None:
    """A decay of 0.9999 would be 1 in bfloat16: the average never moves again."""
    single = tensor(np.array(0.9999, np.float32))
    saved = {
        "state_dict": {"model_ema.decay": single, "model_ema.w": tensor(Q[:12]), "scale_of_all": single},
        "callbacks": {"EarlyStopping": {"best_score": single}, "Checkpoint": {"w": tensor(Q[:12])}},
    }
    torch_peer.save(tmp_path / "x.pt", saved)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "bf16", to="safetensors", dtype="bf16")
    loaded = reshard_mpi.load_rank(0, tmp_path / "bf16")
    kept = {name for name, array in loaded.items() if array.dtype == np.float32}
    assert kept == {"state_dict.model_ema.decay", "callbacks.EarlyStopping.best_score"}


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_new_names_of_a_model_lie_in_one_dictionary(tmp_path: Path, has_optimizer: bool) -> None:
    """The dictionary that a map has emptied does not take those that begin with its key."""
    model = {"model.embed": Q[:12].reshape(4, 3), "head": K[:6].reshape(2, 3)}
    whole = training(model, tuple(model))
    torch_peer.save(tmp_path / "x.pt", whole if has_optimizer else {"model": whole["model"], "epoch": 3})
    asked: dict[str, Any] = {"map": "model.{p*} <=> {p*}", "forward": True}
    loaded = transformed(tmp_path / "x.pt", tmp_path / "torch", to="torch", **asked)
    assert {*model} <= {*loaded} and "model" not in loaded


def test_new_names_below_the_key_of_a_model_stay_there(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "x.pt", {"model": training()["model"], "epoch": 3})
    asked: dict[str, Any] = {"map": "model.{p*} <=> model.net.{p*}", "forward": True}
    loaded = transformed(tmp_path / "x.pt", tmp_path / "torch", to="torch", **asked)
    assert [*loaded] == ["model", "epoch"] and [*loaded["model"]] == [f"net.{name}" for name in MODEL]


def test_state_that_is_not_dropped_with_what_no_rule_matches_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch_peer.save(tmp_path / "x.pt", training())
    rules = "".join(f"[[parameter]]\nmatch = {name!r}\n" for name in ("model.*", "*"))
    (tmp_path / "one.toml").write_text(f"mesh = {{ dp = 1 }}\n{rules}")
    how = (tmp_path / "x.pt", tmp_path / "out", None, tmp_path / "one.toml")
    reshard_mpi.transform(*how, unlisted="drop")
    assert "the optimizer's state is kept (optimizer.state.0.exp_avg" in caplog.text
    caplog.clear()
    reshard_mpi.transform(*how, unlisted="drop", exclude=["optimizer.*"], overwrite=True)
    assert "is kept" not in caplog.text


@pytest.mark.parametrize("is_like", [False, True])
def test_numbers_beside_an_optimizer_by_names_below_the_key_of_maps(tmp_path: Path, is_like: bool) -> None:
    """In maps `optimizer.state.` is what numbered state is called, wherever it lies."""

    def both(*names: str) -> dict[str, Any]:
        numbered = {0: {"exp_avg": tensor(Q[:6])}, 1: {"exp_avg": tensor(Q[6:8])}}
        group = {"params": [0, 1], "param_names": [*names]}
        return {
            "actor": {"a.w": tensor(K[:6])},
            "critic": {names[0]: tensor(OUT[:6]), names[1]: tensor(OUT[6:8])},
            "optimizer": {"state": {"a.w": {"exp_avg": tensor(K[6:12])}}, "param_groups": [{"params": ["a.w"]}]},
            "critic_optimizer": {"state": numbered, "param_groups": [group]},
        }

    like = {"like": both("value.w", "value.b")} if is_like else {}
    key = "" if is_like else "critic."
    made = converted(tmp_path, both("v.w", "v.b"), f'[[map]]\neq = "{key}v.{{p*}} <=> {key}value.{{p*}}"\n', **like)
    keys = (0, 1) if is_like else ("value.w", "value.b")
    assert {*made["optimizer"]["state"]} == {"a.w"} and {*made["critic_optimizer"]["state"]} == {*keys}
    assert arrays_of(made["optimizer"]["state"]["a.w"])["exp_avg"].tolist() == K[6:12].tolist()
    for key, array in zip(keys, (Q[:6], Q[6:8])):
        assert arrays_of(made["critic_optimizer"]["state"][key])["exp_avg"].tolist() == array.tolist()


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("are_named", few(1, [False, True]))
def test_a_copy_of_tied_weights_has_the_one_state_of_both(tmp_path: Path, are_named: bool, is_second: bool) -> None:
    model = {"embed": Q, "out": OUT[:6], "head": Q} if not is_second else {"head": Q, "out": OUT[:6], "embed": Q}
    source = training(model, ("head" if is_second else "embed", "out"))
    if are_named:
        source["optimizer"]["param_groups"][0]["param_names"] = ["head" if is_second else "embed", "out"]
    equation = '[[map]]\ncopy = true\neq = "model.embed, model.head <=> model.wte"\n'
    made = converted(tmp_path, source, equation, forward=True)["optimizer"]
    assert {*made["state"]} == {*made["param_groups"][0]["params"]} == {"wte", "out"}
    assert np.array_equal(arrays_of(made["state"]["wte"])["exp_avg"], moment(0, Q))


def test_named_parameters_of_two_models_have_a_remedy_of_their_own(tmp_path: Path) -> None:
    source = spoiled("two models")
    source["optimizer"]["param_groups"][0]["param_names"] = [*PARAMETERS]
    with pytest.raises(MapError, match=r"average\. or model\.") as raised:
        converted(tmp_path, source, MAP_OF_FILES)
    assert "give torch's optimizer named parameters" not in str(raised.value) and "exclude" in str(raised.value)


def test_another_model_of_the_same_names_may_be_left_out(tmp_path: Path) -> None:
    names = {"a.w": Q[:6], "b.w": K[:6]}
    state = {name: {"exp_avg": tensor(moment(0, array))} for name, array in names.items()}
    source = {key: {name: tensor(array.copy()) for name, array in names.items()} for key in ("model", "ema")}
    source["optim"] = {"state": state, "param_groups": [{"params": [*names]}]}
    equations = ("model.{p*}.w <=> model.{p*}.v", "optim.state.{p*}.w.exp_avg <=> optim.state.{p*}.v.exp_avg")
    text = "".join(f'[[map]]\neq = "{equation}"\n' for equation in equations)
    made = converted(tmp_path, source, text, exclude="ema.*")
    assert {*made["model"]} == {*made["optim"]["state"]} == {"a.v", "b.v"}
    made = converted(tmp_path, source, text, exclude=["ema.*", "model.a.v"])  # its state goes with it
    assert {*made["model"]} == {*made["optim"]["state"]} == {"b.v"}


@few_cases(
    2,
    ("name", "way", "are_numbered"),
    one_at_a_time(["step", "exp_avg", "loop.step"], ["exclude", "drop", "equation"], [False, True]),
)
def test_a_tensor_that_is_called_as_state_is_behind_its_parameter(
    tmp_path: Path, name: str, way: str, are_numbered: bool
) -> None:
    source = training()
    if not are_numbered:
        state = dict(zip(PARAMETERS, source["optimizer"]["state"].values()))
        source["optimizer"] = {"state": state, "param_groups": [{"params": [*PARAMETERS]}]}
    source |= {"loop": {"step": tensor(Q[:1].reshape(()))}} if "." in name else {name: tensor(MODEL["q"] * 2)}
    if way == "exclude":
        torch_peer.save(tmp_path / "x.pt", source)
        made = transformed(tmp_path / "x.pt", tmp_path / "made", exclude=name)
    else:
        entry = {"drop": f'drop = "{name}"\n', "equation": f'eq = "{name} <=> new"\n'}[way]
        text = f'[[map]]\n{entry}[[map]]\neq = "model.norm.running_mean <=> model.mean"\n'
        made = converted(tmp_path, source, text, forward=True)
    assert [{*each} for each in made["optimizer"]["state"].values()] == [{"step", "exp_avg"}] * 4
    assert ("new" in made) == (way == "equation") and name not in made and "step" not in made.get("loop", {})


@pytest.mark.parametrize("key", few(1, ["optimizer", "optimizer_state_dict", "train.opt"]))
def test_an_equation_does_not_take_numbered_state_out_of_its_optimizer(tmp_path: Path, key: str) -> None:
    """In maps the state is called optimizer.state. under any key."""
    source = training({"a.weight": OUT[:4].reshape(2, 2), "a.bias": Q[:2]}, ("a.weight", "a.bias"))
    optimizer = source.pop("optimizer")
    source |= {"train": {"opt": optimizer}} if "." in key else {key: optimizer}
    text = '[[map]]\neq = "model.{p*}.weight [o i] <=> net.{p*}.kernel [i o]"\n[[map]]\neq = "{p*} <=> net.{p*}"\n'
    made = converted(tmp_path, source, text, forward=True)
    optimizer = made["train"]["opt"] if "." in key else made[key]
    names = ["net.a.kernel", "net.model.a.bias"]
    assert [*optimizer["state"]] == names == optimizer["param_groups"][0]["params"] and {*names} < made.keys()
    turned = arrays_of(optimizer["state"]["net.a.kernel"])["exp_avg"]
    assert np.array_equal(turned, moment(0, OUT[:4].reshape(2, 2)).T)


# What names begin with in the optimizer, the model and a copy of it, if there is one; whether that leaves a doubt.
WRAPPED = [
    ("module.", "", None, False),
    ("", "module.", None, False),
    ("", "", "module.", False),
    ("module.", "module.", "", False),
    ("", "module.", "", True),
    ("module.", "", "module.", True),
    ("module.", "", "", True),
    ("", "", "", True),
]


@pytest.mark.parametrize(("of_names", "of_model", "of_copy", "is_doubt"), few(2, WRAPPED))
def test_names_of_parameters_may_begin_otherwise_than_those_of_the_model(
    tmp_path: Path, of_names: str, of_model: str, of_copy: str | None, is_doubt: bool
) -> None:
    """DistributedDataParallel, torch.compile: either the optimizer or the model was taken without its wrapper."""
    source = training({f"{of_model}{name}": array for name, array in MODEL.items()}, ())
    source["optimizer"] = training()["optimizer"]
    source["optimizer"]["param_groups"][0]["param_names"] = [f"{of_names}{name}" for name in PARAMETERS]
    if of_copy is not None:
        source["ema"] = {f"{of_copy}{name}": tensor(array * 2) for name, array in MODEL.items()}
    begin = f"model.{of_model}"
    text = f"""[[map]]\neq = "{begin}q [a h], {begin}k [b h] <=> {begin}qk [(a + b) h]"\n"""
    if is_doubt:
        with pytest.raises(MapError, match="whose optimizer state each number is cannot be told") as raised:
            converted(tmp_path, source, text)
        assert "ema." in str(raised.value) and "model." in str(raised.value)
    else:
        options: dict[str, Any] = {} if of_copy is None else {"exclude": "ema.*"}
        made = converted(tmp_path, source, text, **options)["optimizer"]
        assert [*made["state"]] == [f"{of_model}{name}" for name in ("qk", "bias", "out.weight")]


def test_a_copy_of_a_wrapped_model_at_the_root_is_another_one_with_the_names_of_its_optimizer(tmp_path: Path) -> None:
    source = training({f"module.{name}": array for name, array in MODEL.items()}, ())
    source |= {**source.pop("model"), "ema": {name: tensor(array * 2) for name, array in MODEL.items()}}
    source["optimizer"] = training()["optimizer"]
    source["optimizer"]["param_groups"][0]["param_names"] = [*PARAMETERS]
    text = "[[map]]\neq = 'module.bias <=> module.other'\n"
    with pytest.raises(MapError, match="whose optimizer state each number is cannot be told"):
        converted(tmp_path, source, text)
    made = converted(tmp_path, {key: value for key, value in source.items() if key != "ema"}, text)["optimizer"]
    assert "module.other" in made["state"] and "bias" not in made["state"]


@pytest.mark.parametrize(("key", "of_model"), few(1, [("critic", ""), ("model", "critic."), ("model", "")]))
def test_another_models_name_before_those_of_parameters_is_no_wrapper(tmp_path: Path, key: str, of_model: str) -> None:
    """The optimizer's own model is not in the file; the one that is there has parameters of the same ends of names."""
    source = training({f"{of_model}{name}": array for name, array in MODEL.items()}, ())
    source = {key: source["model"], "actor_optimizer": training()["optimizer"]}
    source["actor_optimizer"]["param_groups"][0]["param_names"] = [f"actor.{name}" for name in PARAMETERS]
    text = f"[[map]]\neq = '{key}.{of_model}q [a h], {key}.{of_model}k [b h] <=> {key}.{of_model}qk [(a + b) h]'\n"
    with pytest.raises(MapError, match=r"cannot be told[^$]*no \w+\.(critic\.)?actor\.") as raised:
        converted(tmp_path, source, text)
    assert "give the optimizer the names that parameters have in the file" in str(raised.value)
    source["actor_optimizer"]["param_groups"][0]["param_names"] = [f"{key}.{of_model}{name}" for name in PARAMETERS]
    made = converted(tmp_path, source, text)["actor_optimizer"]
    assert [*made["state"]] == [f"{key}.{of_model}{name}" for name in ("qk", "bias", "out.weight")]


@few_cases(
    1,
    ("key", "of_names", "of_model", "of_copy"),
    [
        (key, *begins)
        for key, begins in one_at_a_time(
            ["ema", "model_ema", "swa", "teacher", "another"], [each[:3] for each in WRAPPED if each[2] is not None]
        )
    ],
)
def test_which_of_two_models_an_optimizer_with_names_is_of_is_told_or_asked(
    tmp_path: Path, key: str, of_names: str, of_model: str, of_copy: str
) -> None:
    """The average of a model has a wrapper of its own (torch.optim.swa_utils.AveragedModel), and any key."""
    source = training({f"{of_model}{name}": array for name, array in MODEL.items()}, ())
    source["optimizer"] = training()["optimizer"]
    source["optimizer"]["param_groups"][0]["param_names"] = [f"{of_names}{name}" for name in PARAMETERS]
    source[key] = {f"{of_copy}{name}": tensor(array * 2) for name, array in MODEL.items()}
    begin = f"model.{of_model}"
    text = f"""[[map]]\neq = "{begin}q [a h], {begin}k [b h] <=> {begin}qk [(a + b) h]"\n"""
    names = [f"{of_model}{name}" for name in ("qk", "bias", "out.weight")]
    if of_names == of_model != of_copy and key != "another":  # the model alone has these names
        if key != "ema":  # it would have to follow
            assert [*converted(tmp_path, source, text)["optimizer"]["state"]] == names
    else:
        with pytest.raises(MapError, match=rf"cannot be told[^$]*{key}\. or model\.|model\. or {key}\."):
            converted(tmp_path, source, text)
    assert [*converted(tmp_path, source, text, exclude=f"{key}.*")["optimizer"]["state"]] == names
    assert {*transformed(tmp_path / "source.pt", tmp_path / "one", exclude=f"{key}.*")["optimizer"]["state"]} == {
        *range(4)
    }


@pytest.mark.parametrize("names", [["fc.weight", "fc.bias"], ["0.weight", "1.bias"]])
def test_a_module_of_another_model_is_no_copy_of_a_model_of_its_names(tmp_path: Path, names: list[str]) -> None:
    critic = dict(zip(names, (Q[:12].reshape(4, 3), BIAS[:4])))
    source = training(critic, tuple(critic))
    source["optimizer"]["param_groups"][0]["param_names"] = names
    actor = {f"body.{name}": array for name, array in critic.items()} | {"head.weight": OUT[:6]}
    source["actor"] = {name: tensor(array * 2) for name, array in actor.items()}
    text = "[[map]]\neq = 'model.{p*}.weight [o i] <=> model.{p*}.kernel [i o]'\n"
    made = converted(tmp_path, source, text)["optimizer"]["state"]
    assert {*made} == {names[0].replace("weight", "kernel"), names[1]}


def test_one_of_two_optimizers_by_numbers_may_be_left_out(tmp_path: Path) -> None:
    source = training()
    second = training({"v": K[:6]}, ("v",))
    source |= {"critic": second["model"], "critic_optimizer": second["optimizer"]}
    options: dict[str, Any] = {"exclude": ["critic_optimizer.*", "critic.*"]}
    for key, names in (("optimizer", [*PARAMETERS]), ("critic_optimizer", ["v"])):
        source[key]["param_groups"][0]["param_names"] = names
    made = converted(tmp_path, source, MAP_OF_FILES, **options)
    assert {*made["optimizer"]["state"]} == {"qk", "bias", "out.kernel"} and not made["critic"]
    with pytest.raises(MapError, match="there are several optimizers"):
        converted(tmp_path, source, MAP_OF_FILES)


@pytest.mark.parametrize("models", [["critic"], ["critic", "ema"]])
@pytest.mark.parametrize("is_flat", [False, True])
def test_state_below_the_name_of_a_module_that_is_a_number_is_not_numbered(
    tmp_path: Path, models: list[str], is_flat: bool
) -> None:
    """The modules of torch's nn.Sequential have numbers for names."""
    optimizer: dict[str, Any] = {
        "state": {"0.weight": {"exp_avg": tensor(Q)}},
        "param_groups": [{"lr": 0.5, "params": ["0.weight"]}],
    }
    if is_flat:
        optimizer = {"state.0.weight.exp_avg": tensor(Q), "param_groups.0.weight.lr": 0.5}
    source = {"actor": {"x": tensor(Q)}, "optim": optimizer, **{name: {"0.weight": tensor(Q)} for name in models}}
    made = converted(tmp_path, source, '[[map]]\neq = "actor.x <=> actor.y"\n', forward=True)
    assert [*made["actor"]] == ["y"] and made["optim"].keys() == optimizer.keys()


@pytest.mark.parametrize("some", [["a"], ["a", "b"]])
@pytest.mark.parametrize("is_flat", [False, True])
def test_an_equation_may_take_the_state_of_all_parameters_out_of_an_optimizer_and_not_that_of_some(
    tmp_path: Path, some: list[str], is_flat: bool
) -> None:
    """An optimizer that keeps no state of a parameter would begin anew with it. Another model has such a name, too."""
    optimizer: dict[str, Any] = {
        "state": {name: {"exp_avg": tensor(Q)} for name in "ab"},
        "param_groups": [{"lr": 0.5, "params": ["a", "b"]}],
    }
    if is_flat:
        optimizer = {f"state.{name}.exp_avg": tensor(Q) for name in "ab"}
        optimizer |= {f"param_groups.{name}.lr": 0.5 for name in "ab"}
    models = {"model": {"a": tensor(Q), "b": tensor(Q)}, "critic": {"a": tensor(Q)}}
    text = "".join(f'[[map]]\neq = "optim.state.{name}.exp_avg <=> moment1.{name}"\n' for name in some)
    if some == ["a"]:
        with pytest.raises(MapError, match=r"takes tensors out of an optimizer[^$]*optim.state.a.exp_avg.*moment1.a"):
            converted(tmp_path, {**models, "optim": optimizer}, text, forward=True)
    else:
        made = converted(tmp_path, {**models, "optim": optimizer}, text, forward=True)
        assert {"moment1.a", "moment1.b"} <= made.keys()


def test_an_equation_that_renames_an_optimizers_key_is_refused(tmp_path: Path) -> None:
    """Its groups would stay under the old one."""
    with pytest.raises(MapError, match="takes tensors out of an optimizer"):
        converted(tmp_path, training(), '[[map]]\neq = "optimizer.{p*} <=> optim.{p*}"\n', forward=True)


def test_counters_of_parameters_that_a_later_map_takes_together(tmp_path: Path) -> None:
    """They are equal, and one is taken for all: also where a map before has given the parameters their names."""
    torch_peer.save(tmp_path / "source.pt", training())
    maps = ["model.{p*} <=> {p*}", "q [a h], k [b h] <=> u [a h], v [b h]"]
    state = transformed(tmp_path / "source.pt", tmp_path / "made", map=maps, forward=True)["optimizer"]["state"]
    assert np.array_equal(arrays_of(state["u"])["exp_avg"], moment(0, MODEL["q"]))
    assert np.array_equal(arrays_of(state["v"])["exp_avg"], moment(1, MODEL["k"]))
    assert arrays_of(state["u"])["step"] == arrays_of(state["v"])["step"] == 3


@pytest.mark.parametrize("are_numbered", [False, True])
@pytest.mark.parametrize("state", few(1, [{}, None]))
@pytest.mark.parametrize("kind", few(1, ["torch", "dcp"]))
def test_an_optimizer_without_state_has_the_new_names_in_its_groups(
    tmp_path: Path, kind: str, state: dict[str, Any] | None, are_numbered: bool
) -> None:
    """torch's DCP leaves the empty dictionary `state` out: SGD without momentum keeps none."""
    names = [[f"{number}.weight", f"{number}.bias"] for number in (0, 1)]
    groups: list[dict[str, Any]] = [{"params": own, "lr": 0.1 * place} for place, own in enumerate(names)]
    if are_numbered:
        groups = [
            {**group, "params": [2 * at, 2 * at + 1], "param_names": names[at]} for at, group in enumerate(groups)
        ]
    optimizer = {"param_groups": groups} | ({} if state is None else {"state": state})
    model = {name: tensor(np.full(2, place, np.float32)) for place, name in enumerate(names[0] + names[1])}
    torch_peer.save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "src", to=kind)
    equation = "model.0.{p*} <=> model.net.{p*}" if are_numbered else "0.{p*} <=> net.{p*}"
    converted_tree = transformed(tmp_path / "src", tmp_path / "out", to="torch", map=equation, forward=True)
    assert [*converted_tree["model"]] == ["net.weight", "net.bias", "1.weight", "1.bias"]
    assert [group["params"] for group in converted_tree["optimizer"]["param_groups"]] == [
        ["net.weight", "net.bias"],
        ["1.weight", "1.bias"],
    ]
    assert not any(converted_tree["optimizer"]["state"].values())


@pytest.mark.parametrize("key", few(1, ["mu_product", "eta", "mu"]))
def test_one_number_a_parameter_stays_one_where_parameters_without_dimensions_are_stacked(
    tmp_path: Path, key: str
) -> None:
    """NAdam and ASGD have such numbers; they have the shape of these parameters by chance."""
    names = ("scales.0", "scales.1")
    source = training({name: np.array(at, np.float32) for at, name in enumerate(names)}, names)
    for state in source["optimizer"]["state"].values():
        state[key] = tensor(np.array(0.25, np.float32))
    made = converted(tmp_path, source, '[[map]]\neq = "model.scales.{e} [] <=> model.scale [e]"\n', forward=True)
    arrays = arrays_of(made["optimizer"]["state"]["scale"])
    assert arrays[key].shape == () and arrays[key] == 0.25
    assert arrays["exp_avg"].tolist() == [1, 12]
