"""Of a whole training by names, `{"model": ..., "optimizer": ...}`, maps see the model, and Hugging Face gets it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import write_shard
from support.examples import few, few_cases
from support.torch_runs import stored, transformed, tree_of

import reshard_mpi
from reshard_mpi.errors import DisagreementError, MapError

WEIGHTS = {
    "model.layers.0.q.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.layers.0.q.bias": np.arange(4, dtype=np.float32) + 100,
    "lm_head.weight": np.arange(6, dtype=np.float32).reshape(2, 3) - 7,
}
RENAMING = "model.layers.{l}.q.{w*} <=> decoder.{l}.query.{w*}"
RENAMED = {
    "model.layers.0.q.weight": "decoder.0.query.weight",
    "model.layers.0.q.bias": "decoder.0.query.bias",
    "lm_head.weight": "lm_head.weight",
}


def training(*, state: bool = True) -> dict[str, Any]:
    """Return the training: moments are the weights times 10, and a buffer is not trained."""
    moments = {name: {"step": stored(np.float32(3)), "exp_avg": stored(array * 10)} for name, array in WEIGHTS.items()}
    groups = [{"lr": 0.1, "params": [*WEIGHTS]}]
    weights = {**{name: stored(array) for name, array in WEIGHTS.items()}, "scale": stored(np.ones(2, np.float32))}
    return {
        "model": weights,
        "optimizer": {"state": moments if state else {}, "param_groups": groups},
        "client_state": {"seen": stored(np.arange(2)), "epoch": 4},
    }


def converted(folder: Path, source: Any, **options: Any) -> Path:
    torch_peer.save(folder / "x.pt", source)
    reshard_mpi.transform(folder / "x.pt", folder / "dst", **options)
    return folder / "dst"


def held(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return dict(reshard_mpi.load_rank(0, folder))


@pytest.mark.parametrize("state", [True, False])
def test_a_map_sees_the_names_below_the_model(tmp_path: Path, state: bool) -> None:
    dst = converted(tmp_path, training(state=state), map=RENAMING, to="torch")
    found = held(dst)
    for name, array in WEIGHTS.items():
        assert np.array_equal(found.pop(f"model.{RENAMED[name]}"), array)
        if state:
            assert np.array_equal(found.pop(f"optimizer.state.{RENAMED[name]}.exp_avg"), array * 10)
            assert found.pop(f"optimizer.state.{RENAMED[name]}.step") == 3
    assert found.keys() == {"model.scale", "client_state.seen"}
    loaded = tree_of(dst)
    assert [*loaded["optimizer"]["param_groups"][0]["params"]] == [*RENAMED.values()]
    assert loaded["client_state"]["epoch"] == 4


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("equation", "renamed"),
    [
        ("model.{p*} <=> net.{p*}", {"model.a.w": "net.a.w", "model.b": "net.b", "c.w": "c.w"}),
        ("model.{p*} <=> {p*}", {"model.a.w": "a.w", "model.b": "b", "c.w": "c.w"}),
        ("model.a.{p*} <=> model.d.{p*}", {"model.a.w": "model.d.w", "model.b": "model.b", "a.w": "a.w"}),
    ],
)
def test_a_map_sees_the_names_below_the_model_though_it_fits_whole_names(
    tmp_path: Path, equation: str, renamed: dict[str, str], state: bool
) -> None:
    arrays = {name: np.arange(6, dtype=np.float32) + 10 * number for number, name in enumerate(renamed)}
    moments = {name: {"exp_avg": stored(array * 10)} for name, array in arrays.items()}
    source = {
        "model": {name: stored(array) for name, array in arrays.items()},
        "optimizer": {"state": moments if state else {}, "param_groups": [{"params": [*renamed]}]},
    }
    dst = converted(tmp_path, source, map=equation, forward=True, to="torch")
    expected = {f"model.{renamed[name]}": array for name, array in arrays.items()}
    if state:
        expected |= {f"optimizer.state.{renamed[name]}.exp_avg": array * 10 for name, array in arrays.items()}
    found = held(dst)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    loaded = tree_of(dst)
    assert loaded["optimizer"]["param_groups"][0]["params"] == [*renamed.values()]


@pytest.mark.parametrize("are_named", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"map": RENAMING},
        {"map": [RENAMING, "decoder.{l}.query.weight [a b] <=> decoder.{l}.kernel [b a]"]},
        {"map": ["model.layers.{l}.q.bias <=> model.layers.{l}.q.beta", "{p*}.beta <=> net.{p*}.beta"]},
        {"map": RENAMING, "exclude": ["*lm_head*"]},
        {"map": RENAMING, "exclude": ["optimizer.*"]},
        {"map": RENAMING, "include": ["*query.weight*"]},
    ],
)
def test_maps_that_fit_no_whole_name_see_the_names_below_numbered_state_too(
    tmp_path: Path, options: dict[str, Any], are_named: bool
) -> None:
    """A map for the model alone, as those for Llama are, does for the file that torch saves of a training."""
    source = training()
    del source["model"]["scale"]  # a buffer has no number, and may not be told from a parameter
    (tmp_path / "names").mkdir()
    by_names = converted(tmp_path / "names", source, forward=True, to="torch", **options)
    optimizer = source["optimizer"]
    optimizer["state"] = dict(enumerate(optimizer["state"].values()))
    optimizer["param_groups"] = [{"lr": 0.1, "params": [*range(len(WEIGHTS))]}]
    if are_named:
        optimizer["param_groups"][0]["param_names"] = [*WEIGHTS]
    by_numbers = converted(tmp_path, source, forward=True, to="torch", **options)
    expected, found = held(by_names), held(by_numbers)
    assert expected and found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    groups, expected_groups = (tree_of(folder)["optimizer"]["param_groups"] for folder in (by_numbers, by_names))
    assert [{**group, "params": sorted(group["params"])} for group in groups] == [
        {**group, "params": sorted(group["params"])} for group in expected_groups
    ]


def test_maps_that_fit_whole_names_beside_numbered_state_see_these(tmp_path: Path) -> None:
    source = training()
    del source["model"]["scale"]
    source["optimizer"]["state"] = dict(enumerate(source["optimizer"]["state"].values()))
    source["optimizer"]["param_groups"] = [{"params": [*range(len(WEIGHTS))]}]
    dst = converted(tmp_path, source, map="model.model.{p*} <=> model.net.{p*}", forward=True, to="torch")
    assert "model.net.layers.0.q.weight" in held(dst)


def test_a_map_that_fits_neither_says_the_names_below(tmp_path: Path) -> None:
    with pytest.raises(MapError, match=r"did you mean 'model\.layers\.0\.q\.weight'"):
        converted(tmp_path, training(), map="model.layer.{l}.q.weight <=> decoder.{l}.query", to="torch")


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "optimizer.state.lm_head.weight.*"},
        {"include": "net.model.*"},
        {"dtype": "optimizer.state.lm_head.weight.exp_avg=bf16"},
    ],
)
def test_a_pattern_that_matches_nothing_makes_no_other_map(tmp_path: Path, options: dict[str, str]) -> None:
    """A map that takes any name fits all names of the file as well, and would rename the model's dictionary."""
    with pytest.raises(MapError, match="matches no"):
        converted(tmp_path, training(), map="{p*} <=> net.{p*}", forward=True, **options)
    assert not (tmp_path / "dst").exists()


def test_a_refusal_is_no_reason_to_take_other_names(tmp_path: Path) -> None:
    """Among all names of the file the optional entry would apply nowhere, and be left out without a word."""
    fusing = tmp_path / "fusing.toml"
    fusing.write_text(
        '[[map]]\neq = "q.w [x y], k.w [x y] <=> qk.w [(x + x) y]"\noptional = true\n'
        '[[map]]\neq = "{p*} <=> net.{p*}"\n'
    )
    weights = {name: np.full((2, 3), value, np.float32) for value, name in enumerate(("q.w", "k.w", "n.w"))}
    state = {name: {"exp_avg": stored(array)} for name, array in weights.items()}
    groups = [{"lr": 0.1, "params": ["q.w", "n.w"]}, {"lr": 0.2, "params": ["k.w"]}]
    source = {
        "model": {name: stored(array) for name, array in weights.items()},
        "optimizer": {"state": state, "param_groups": groups},
    }
    with pytest.raises(MapError, match="treats differently"):
        converted(tmp_path, source, map=fusing, forward=True)
    groups[1]["lr"] = 0.1
    groups[0]["params"], groups[1]["params"] = ["q.w", "k.w"], ["n.w"]
    assert {"model.qk.w", "model.net.n.w"} <= held(converted(tmp_path, source, map=fusing, forward=True)).keys()


@pytest.mark.parametrize("has_state", [False, True])
def test_what_lies_beside_the_model_is_taken_by_its_key_alone(tmp_path: Path, *, has_state: bool) -> None:
    """Also where equations before a catch-all, or for other models, leave it nothing of the model."""
    weights = {name: np.full((2, 3), value, np.float32) for value, name in enumerate(("a.w", "b.w"))}
    source: dict[str, Any] = {
        "model": {name: stored(array) for name, array in weights.items()},
        "ema": {"a.gamma": stored(np.full((2, 3), 7, np.float32))},
        "rng_state": stored(np.arange(5, dtype=np.float32)),
    }
    state = {name: {"exp_avg": stored(array + 10)} for name, array in weights.items() if has_state}
    source["optimizer"] = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    renamed = "".join(f'[[map]]\neq = "{name}.w <=> {name}.v"\n' for name in "ab")
    others = {
        "catch_all": '[[map]]\neq = "{p*} <=> net.{p*}"\noptional = true\n',
        "turned": '[[map]]\neq = "{p*}.gamma [x y] <=> {p*}.weight [y x]"\noptional = true\n',
        "said": '[[map]]\neq = "ema.{p*} <=> avg.{p*}"\n',
    }
    for name, entry in others.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(renamed + entry)
        made = held(converted(tmp_path, source, map=path, forward=True, overwrite=True)).keys()
        expected = {"model.a.v", "model.b.v", "rng_state", "avg.a.gamma" if name == "said" else "ema.a.gamma"}
        assert made == expected | {f"optimizer.state.{own}.v.exp_avg" for own in "ab" if has_state}


@few_cases(1, "options", [{}, {"map": RENAMING}, {"max_shard_size": 40}, {"jobs": 2, "max_shard_size": 40}])
def test_a_hugging_face_folder_gets_the_model(tmp_path: Path, options: dict[str, Any]) -> None:
    dst = converted(tmp_path, training(), to="hf", **options)
    names = RENAMED if "map" in options else {name: name for name in WEIGHTS}
    found = held(dst)
    assert np.array_equal(found.pop("scale"), np.ones(2, np.float32))
    assert found.keys() == {*names.values()}
    for name, array in WEIGHTS.items():
        assert np.array_equal(found[names[name]], array)
    report = reshard_mpi.verify(tmp_path / "x.pt", dst, **{k: v for k, v in options.items() if k == "map"})
    assert report.targets == () and not report.warnings


def test_what_hugging_face_does_not_get_is_named(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "x.pt", training())
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="hf")
    (note,) = (note for note in report.notes if note.startswith("left out: "))
    assert "optimizer.state.model.layers.0.q.weight.step" in note
    with pytest.raises(DisagreementError, match="cannot be carried"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "strict", to="hf", strict=True)


def with_copies(dtype: Any, factor: float) -> dict[str, Any]:
    """Return the training with weights of a type, and copies in float32 of these weights times a factor."""
    source = training()
    for name, array in WEIGHTS.items():
        source["model"][name] = stored(array.astype(dtype))
        source["optimizer"]["state"][name]["fp32_param"] = stored(array * np.float32(factor))
    return source


def test_weights_in_float32_are_the_models_whatever_the_optimizer_keeps(tmp_path: Path) -> None:
    dst = converted(tmp_path, with_copies(np.float32, 2), to="hf")
    assert all(np.array_equal(held(dst)[name], array) for name, array in WEIGHTS.items())


@pytest.mark.parametrize("jobs", few(1, [1, 2]))
def test_weights_that_are_widened_are_their_copies_or_refused(tmp_path: Path, jobs: int) -> None:
    finer = 1 + 2**-12  # float16 has ten bits behind the first one
    dst = converted(tmp_path, with_copies(np.float16, finer), to="hf", dtype="fp32", jobs=jobs)
    assert all(np.array_equal(held(dst)[name], array * np.float32(finer)) for name, array in WEIGHTS.items())
    edited = tmp_path / "edited"
    edited.mkdir()
    with pytest.raises(DisagreementError, match="not what the optimizer would make of their copy"):
        converted(edited, with_copies(np.float16, 2), to="hf", dtype="fp32", jobs=jobs)
    assert not (edited / "dst").exists()
    chosen = converted(edited, with_copies(np.float16, 2), to="hf", dtype="fp32", exclude=["*.fp32_param"])
    assert all(np.array_equal(held(chosen)[name], array) for name, array in WEIGHTS.items())


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("equation", "problem"),
    [
        ("net.{p*} <=> epoch.{p*}", "would be those of no dictionary"),  # a value has this key
        ("net.{p*} <=> net.deep.{p*}", "would stay as it is"),
        ("net.lm_head.{p*} <=> head.lm_head.{p*}", "would be kept of|several models"),
    ],
)
def test_names_in_an_optimizer_that_would_be_those_of_no_model_are_refused(
    tmp_path: Path, equation: str, problem: str, state: bool
) -> None:
    saved = training(state=state)
    saved |= {"net": saved.pop("model"), "epoch": 3}
    if not state and "deep" in equation:  # they are renamed
        dst = converted(tmp_path, saved, map=equation, forward=True, to="torch")
        groups = tree_of(dst)["optimizer"]["param_groups"]
        assert groups[0]["params"] == [f"deep.{name}" for name in WEIGHTS]
        return
    with pytest.raises(MapError, match=problem):
        converted(tmp_path, saved, map=equation, forward=True, to="torch")


@pytest.mark.parametrize("state", [True, False])
def test_names_at_the_root_do_not_go_into_a_dictionary_that_is_there(tmp_path: Path, state: bool) -> None:
    """There the names would be whole, and those of tensors in the dictionary are not."""
    saved = training(state=state)
    saved |= {**saved.pop("model"), "ema": {"decay": 0.5}}
    with pytest.raises(MapError, match="would be those of no dictionary"):
        converted(tmp_path, saved, map="{p*} <=> ema.{p*}", forward=True, to="torch")
    converted(tmp_path, saved, map="{p*} <=> body.{p*}", forward=True, to="torch")


@pytest.mark.parametrize("model", few(1, ["", "model", "net"]))
@pytest.mark.parametrize("form", few(2, ["names", "flat", "tensors", "plain"]))
@pytest.mark.parametrize("key", few(1, ["optimizer", "optim", "train.opt"]))
def test_what_takes_any_name_takes_nothing_out_of_an_optimizer(tmp_path: Path, key: str, form: str, model: str) -> None:
    """The state follows by the names of the parameters, or what would leave it behind is refused. plain: no nest."""
    begin = f"{model}." * bool(model)
    state = {f"state.{name}.exp_avg": array * 10 for name, array in WEIGHTS.items()}
    groups = {f"param_groups.{name}.lr": np.float32(0.5) for name in WEIGHTS}
    names = {f"{begin}{name}": array for name, array in WEIGHTS.items()}
    names |= {f"{key}.{name}": array for name, array in {**state, **groups}.items()}
    if form == "plain":
        write_shard({name: np.asarray(array) for name, array in names.items()}, tmp_path / "x.safetensors")
    else:
        optimizer: dict[str, Any] = {name: stored(array) for name, array in {**state, **groups}.items()}
        if form == "flat":
            optimizer |= {name.replace(".lr", ".eps"): 0.5 for name in groups}
        if form == "names":
            optimizer = {"state": {name: {"exp_avg": stored(array * 10)} for name, array in WEIGHTS.items()}}
            optimizer["param_groups"] = [{"lr": stored(np.float32(0.5)), "params": [*WEIGHTS]}]
        weights = {name: stored(array) for name, array in WEIGHTS.items()}
        first, _, second = key.partition(".")
        saved = {first: {second: optimizer} if second else optimizer, **({model: weights} if model else weights)}
        torch_peer.save(tmp_path / "x.pt", saved)
    options: dict[str, Any] = {"map": "{p*} <=> body.{p*}", "forward": True}
    source = tmp_path / ("x.safetensors" if form == "plain" else "x.pt")
    is_whole = (model, key) == ("model", "optimizer")
    if model and (form == "plain" or (form == "tensors" and not is_whole)):  # no groups tell whose state it is
        with pytest.raises(MapError, match="would stay as it is"):
            reshard_mpi.transform(source, tmp_path / "dst", **options)
        return
    reshard_mpi.transform(source, tmp_path / "dst", **options)
    found = held(tmp_path / "dst")
    begin, new = (
        (begin, "body.") if is_whole or not model else (f"body.{begin}", "")
    )  # maps see a whole training's names
    for name, array in WEIGHTS.items():
        assert np.array_equal(found[f"{begin}{new}{name}"], array)
        assert np.array_equal(found[f"{key}.state.{new}{name}.exp_avg"], array * 10)
    assert not [name for name in found if name.startswith("body.") and key in name]


def test_a_hugging_face_folder_of_no_model_is_refused(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "x.pt", training())
    with pytest.raises(MapError, match="no tensor of the model is left"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="hf", include=["optimizer.*"])
    assert not (tmp_path / "dst").exists()


def test_a_model_without_an_optimizer_keeps_its_names(tmp_path: Path) -> None:
    """A model of transformers may have a part called `model`, so the key alone tells nothing."""
    source = {"model": training()["model"], "epoch": 3}
    assert held(converted(tmp_path, source, to="hf")).keys() == {f"model.{name}" for name in (*WEIGHTS, "scale")}


def template(form: str) -> Any:
    """Return a checkpoint of the network that the renaming leads to, in one of torch's forms, with other values."""
    renamed = [*RENAMED.values()]
    shapes = {new: WEIGHTS[name].shape for name, new in RENAMED.items()}
    model = {
        **{name: stored(np.zeros(shape, np.float32)) for name, shape in shapes.items()},
        "scale": stored(np.zeros(2)),
    }
    states = [
        {"step": stored(np.float32(0)), "exp_avg": stored(np.zeros(shape, np.float32))} for shape in shapes.values()
    ]
    if form == "bare":
        return model
    keys: list[Any] = [*range(3)] if form == "numbers" else renamed
    groups = [{"lr": 9.0, "params": keys}]
    names = {"param_names": renamed} if form == "numbers" else {}
    optimizer: Any = {"state": dict(zip(keys, states)), "param_groups": [{**groups[0], **names}]}
    if form == "flat":
        optimizer = {
            f"state.{name}.{key}": own for name, state in zip(renamed, states) for key, own in state.items()
        } | {f"param_groups.{name}.lr": 9.0 for name in renamed}
    return {"model": model} if form == "model" else {"model": model, "optimizer": optimizer, "epoch": 0}


@pytest.mark.parametrize("form", few(2, ["names", "numbers", "flat", "model", "bare"]))
@pytest.mark.parametrize("direction", few(1, ["forward", "reverse"]))
def test_the_target_is_nested_like_a_checkpoint(tmp_path: Path, form: str, direction: str) -> None:
    """Numbers and names are those of that checkpoint; settings of groups, and other values, are the source's."""
    torch_peer.save(tmp_path / "like.pt", template(form))
    sides = RENAMING.split(" <=> ")
    equation = " <=> ".join(sides if direction == "forward" else sides[::-1])
    options: dict[str, Any] = {"map": equation, direction: True, "like": tmp_path / "like.pt", "to": "torch"}
    has_state = form not in ("model", "bare")
    options["exclude"] = ["client_state.seen", *([] if has_state else ["optimizer.*"])]
    loaded = tree_of(converted(tmp_path, training(), **options))
    model = loaded if form == "bare" else loaded["model"]
    expected = template(form)
    assert [*loaded] == [*expected]
    for number, (name, new) in enumerate(RENAMED.items()):
        array = WEIGHTS[name]
        assert torch_peer.sample_of("", model[new]).content == array.tobytes()
        if has_state and form != "flat":
            state = loaded["optimizer"]["state"][number if form == "numbers" else new]
            assert torch_peer.sample_of("", state["exp_avg"]).content == (array * 10).tobytes()
        elif has_state:
            own = loaded["optimizer"][f"state.{new}.exp_avg"]
            assert torch_peer.sample_of("", own).content == (array * 10).tobytes()
            assert loaded["optimizer"][f"param_groups.{new}.lr"] == 0.1
    if has_state and form != "flat":
        assert [group["lr"] for group in loaded["optimizer"]["param_groups"]] == [0.1]


def test_numbers_become_names_like_a_checkpoint(tmp_path: Path) -> None:
    source = training()
    states = source["optimizer"]["state"]
    source["optimizer"]["state"] = dict(enumerate(states.values()))
    source["optimizer"]["param_groups"][0] |= {"params": [0, 1, 2], "param_names": [*states]}
    torch_peer.save(tmp_path / "like.pt", template("names"))
    options: dict[str, Any] = {"map": RENAMING, "like": tmp_path / "like.pt", "to": "torch"}
    dst = converted(tmp_path, source, exclude=["client_state.seen"], **options)
    loaded = tree_of(dst)
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [*RENAMED.values()]}]
    assert {*loaded["optimizer"]["state"]} == {*RENAMED.values()}


def test_what_the_checkpoint_lacks_is_named_with_what_helps(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "like.pt", template("model"))
    with pytest.raises(MapError, match=r"not in it: .*optimizer\.state[\s\S]*--exclude"):
        converted(tmp_path, training(), map=RENAMING, like=tmp_path / "like.pt", to="torch")


@pytest.mark.parametrize("form", few(2, ["names", "flat", "none"]))
@pytest.mark.parametrize("key", few(1, ["ema", "teacher"]))
def test_what_lies_beside_the_model_stays_there(tmp_path: Path, key: str, form: str) -> None:
    values = {"fc.w": stored(np.ones((2, 3), np.float32)), "fc.b": stored(np.zeros(3, np.float32))}
    moment = stored(np.full((2, 3), 2, np.float32))
    optimizer = {
        "names": {"state": {"fc.w": {"exp_avg": moment}}, "param_groups": [{"lr": 1.0, "params": ["fc.w"]}]},
        "flat": {"state.fc.w.exp_avg": moment, "param_groups.fc.w.lr": 1.0},
    }
    tree = {"model": dict(values), key: dict(values)} | ({"optimizer": optimizer[form]} if form in optimizer else {})
    torch_peer.save(tmp_path / "x.pt", tree)
    converted = transformed(tmp_path / "x.pt", tmp_path / "out", map=f"{key}.{{p*}} <=> {key}.net.{{p*}}", forward=True)
    assert {name: [*part] for name, part in converted.items() if name in ("model", key)} == {
        "model": ["fc.w", "fc.b"],
        key: ["net.fc.w", "net.fc.b"],
    }


def test_an_equation_for_any_name_takes_the_model_and_nothing_beside_it(tmp_path: Path) -> None:
    fc, moment = stored(np.ones((2, 3), np.float32)), stored(np.full((2, 3), 2, np.float32))
    optimizer = {"state": {"fc.w": {"exp_avg": moment}}, "param_groups": [{"lr": 1.0, "params": ["fc.w"]}]}
    beside = {"rng_state": stored(np.arange(5, dtype=np.uint8)), "scaler": {"scale": stored(np.float32(8).reshape(()))}}
    torch_peer.save(tmp_path / "x.pt", {"model": {"fc.w": fc}, "optimizer": optimizer, **beside})
    asked: dict[str, Any] = {"forward": True, "map": ["{p*} <=> net.{p*}", "{p*} <=> a.{p*}"]}
    converted = transformed(tmp_path / "x.pt", tmp_path / "out", **asked)
    assert [*converted["model"]] == ["a.net.fc.w"] and [*converted["optimizer"]["state"]] == ["a.net.fc.w"]
    assert [*converted["scaler"]] == ["scale"] and "rng_state" in converted
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "hf", to="hf", **asked)
    with reshard_mpi.open(tmp_path / "hf") as checkpoint:
        assert [*checkpoint] == ["a.net.fc.w"]
    # By its own name it goes wherever an equation says.
    assert [*transformed(tmp_path / "x.pt", tmp_path / "named", map="rng_state <=> seed", forward=True)["model"]] == [
        "fc.w"
    ]


def test_state_and_counts_for_mindspore_are_called_the_same_by_names_and_by_numbers(tmp_path: Path) -> None:
    shapes = {"0.weight": (2, 3), "0.bias": (2,), "1.weight": (4, 2), "1.bias": (4,)}
    values = {name: stored(np.full(shape, at, np.float32)) for at, (name, shape) in enumerate(shapes.items())}
    moments = {name: stored(np.full(shape, 7 + at, np.float32)) for at, (name, shape) in enumerate(shapes.items())}
    step = stored(np.float32(3).reshape(()))
    settings = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    for keys, form in (([*values], "names"), ([*range(4)], "numbers")):
        states = {
            key: {"step": step, "exp_avg": moment, "exp_avg_sq": moment} for key, moment in zip(keys, moments.values())
        }
        optimizer = {"state": states, "param_groups": [{"params": keys, **settings}]}
        torch_peer.save(tmp_path / f"{form}.pt", {"model": dict(values), "optimizer": optimizer})
        reshard_mpi.transform(tmp_path / f"{form}.pt", tmp_path / form, map="torch-mindspore", forward=True, to="ckpt")
    by_names, by_numbers = (held(tmp_path / form) for form in ("names", "numbers"))
    assert {*by_names} == {*by_numbers} >= {"model.0.weight", "moment1.model.0.weight", "global_step"}
    for name, array in by_names.items():
        np.testing.assert_array_equal(array, by_numbers[name])


def test_state_is_left_out_with_a_parameter_that_a_map_renames(tmp_path: Path) -> None:
    values = {name: stored(np.full((2, 3), at, np.float32)) for at, name in enumerate(("model.a.w", "head.w"))}
    states = {name: {"exp_avg": value} for name, value in values.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 1.0, "params": [*values]}]}
    torch_peer.save(tmp_path / "x.pt", {"model": dict(values), "optimizer": optimizer})
    asked: dict[str, Any] = {"map": "model.{p*} <=> net.{p*}", "forward": True, "exclude": "optimizer.*"}
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", **asked)
    with reshard_mpi.open(tmp_path / "out") as checkpoint:
        assert {name for name in checkpoint if name.startswith("optimizer.")} == set() and len(checkpoint) == 2


NETWORKS = {"model": "optimizer", "critic": "critic_optimizer"}


def two_networks(names: tuple[str, str], forms: tuple[str, str]) -> dict[str, Any]:
    """Return a training of two networks of one parameter each; their optimizers go by names, flat or by numbers."""
    made: dict[str, Any] = {}
    for at, (key, name, form) in enumerate(zip(NETWORKS, names, forms)):
        made[key] = {name: stored(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * at)}
        moment = stored(np.arange(6, dtype=np.float32).reshape(2, 3) + 50 * (at + 1))
        own = 0 if form == "numbers" else name
        optimizer: dict[str, Any] = {"state": {own: {"exp_avg": moment}}}
        optimizer["param_groups"] = [{"lr": 0.1, "params": [own]} | ({"param_names": [name]} if own == 0 else {})]
        if form == "flat":
            optimizer = {f"state.{name}.exp_avg": moment, f"param_groups.{name}.lr": 0.1}
        made[NETWORKS[key]] = optimizer
    return made


def assert_own_names(folder: Path, *networks: str) -> None:
    """Assert that the optimizers of networks have the names of these."""
    loaded = tree_of(folder)
    for key in networks:
        optimizer, names = loaded[NETWORKS[key]], [*loaded[key]]
        if "state" in optimizer:
            assert [*optimizer["state"]] == optimizer["param_groups"][0]["params"] == names
        else:
            assert {*optimizer} >= {f"state.{name}.exp_avg" for name in names}


@few_cases(
    1,
    ("forms", "equations", "refused"),
    [
        (("numbers", "names"), ["fc.w <=> lin.w", "model.fc.w <=> model.lin.w"], ["critic.c.w <=> critic.lin.w"]),
        (("names", "numbers"), ["critic.c.w <=> critic.lin.w"], ["fc.w <=> lin.w", "model.fc.w <=> model.lin.w"]),
        (("flat", "numbers"), ["critic.c.w <=> critic.lin.w"], ["fc.w <=> lin.w", "model.fc.w <=> model.lin.w"]),
    ],
)
def test_networks_whose_optimizers_have_two_forms(
    tmp_path: Path, forms: tuple[str, str], equations: list[str], refused: list[str]
) -> None:
    """What is before the names of one network does not get before those of the other."""
    source = two_networks(("fc.w", "c.w"), forms)
    how: dict[str, Any] = {"forward": True, "to": "torch", "overwrite": True}
    for equation in equations:
        assert_own_names(converted(tmp_path, source, map=equation, **how), *NETWORKS)
    for equation in refused:
        with pytest.raises(MapError):
            converted(tmp_path, source, map=equation, **how)


@pytest.mark.parametrize("form", few(1, ["names", "flat"]))
@few_cases(2, "equation", ["critic.{p*} <=> critic.x.{p*}", "fc.w <=> fd.w", "critic.fc.w [o i] <=> critic.fc.w [i o]"])
def test_networks_of_the_same_names_whose_optimizers_go_by_them(tmp_path: Path, equation: str, form: str) -> None:
    """Nothing tells which optimizer is whose."""
    source = two_networks(("fc.w", "fc.w"), (form, form))
    with pytest.raises(MapError):
        converted(tmp_path, source, map=equation, forward=True, to="torch")
    equations = ["critic.fc.w <=> critic.x.w"]
    equations.append("critic_optimizer.state.fc.w.exp_avg <=> critic_optimizer.state.x.w.exp_avg")
    (tmp_path / "both.toml").write_text("".join(f'[[map]]\neq = "{each}"\n' for each in equations))
    how: dict[str, Any] = {"map": tmp_path / "both.toml", "forward": True, "to": "torch"}
    assert_own_names(converted(tmp_path, source, **how, exclude=["model.*", "optimizer.*"]), "critic")


@pytest.mark.parametrize("form", few(1, ["names", "flat"]))
@pytest.mark.parametrize("eq", few(2, ["{p*} <=> net.{p*}", "{p*} <=> {p*}.v", "fc.w <=> net.fc.w"]))
def test_what_an_optimizer_has_besides_stays_in_it(tmp_path: Path, eq: str, form: str) -> None:
    """State of a parameter that is not in the model, as of a loss, an average in the optimizer, and a scale."""
    moments = {name: {"exp_avg": stored(np.ones((2, 3), np.float32) + at)} for at, name in enumerate(("fc.w", "temp"))}
    optimizer: dict[str, Any] = {"state": moments, "param_groups": [{"lr": 0.1, "params": [*moments]}]}
    if form == "flat":
        optimizer = {f"state.{name}.exp_avg": own["exp_avg"] for name, own in moments.items()}
        optimizer |= {f"param_groups.{name}.lr": 0.1 for name in moments}
    kept = {"loss_scale": stored(np.float32(8)), "ema": {"fc.w": stored(np.ones((2, 3), np.float32))}}
    source = {"model": {"fc.w": stored(np.zeros((2, 3), np.float32))}, "optimizer": optimizer | kept}
    dst = converted(tmp_path, source, map=eq, forward=True, to="torch")
    loaded = tree_of(dst)
    (new,) = loaded["model"]
    assert new != "fc.w" and loaded.keys() == source.keys() and [*loaded["optimizer"]["ema"]] == [new]
    own = loaded["optimizer"]
    state = own["state"] if form == "names" else {name.split(".", 1)[1]: own[name] for name in own if "state." in name}
    assert {*state} == ({new, "temp"} if form == "names" else {f"{new}.exp_avg", "temp.exp_avg"})
    assert "loss_scale" in own


@pytest.mark.parametrize("form", ["names", "flat"])
@pytest.mark.parametrize("has_more", [True, False])
def test_what_lies_beside_the_model_may_get_another_key(tmp_path: Path, has_more: bool, form: str) -> None:
    source = {key: two_networks(("fc.w", "c.w"), (form, form))[key] for key in ("model", "optimizer")}
    source |= {key: {"p.w": stored(np.ones((2, 3), np.float32))} for key in ("ema", "teacher")}
    equations = ["ema.{p*} <=> model_ema.{p*}", "teacher.{p*} <=> other.{p*}", *(["fc.w <=> z.w"] if has_more else [])]
    (tmp_path / "m.toml").write_text("".join(f'[[map]]\neq = "{each}"\n' for each in equations))
    dst = converted(tmp_path, source, map=tmp_path / "m.toml", forward=True, to="torch")
    loaded = tree_of(dst)
    assert loaded.keys() == {"model", "optimizer", "model_ema", "other"}
    assert [*loaded["model"]] == ["z.w" if has_more else "fc.w"] and [*loaded["model_ema"]] == ["p.w"]


def mindspore_names(names: Iterable[str]) -> set[str]:
    return {f"{begin}model.{name}" for begin in ("", "moment1.", "moment2.") for name in names}


def for_mindspore() -> dict[str, Any]:
    arrays = {name: np.arange(6, dtype=np.float32) for name in ("fc.w", "mlp.w", "lin.w")}
    state = {
        name: {"step": stored(np.float32(3)), "exp_avg": stored(array), "exp_avg_sq": stored(array)}
        for name, array in arrays.items()
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [*arrays]}]
    model = {name: stored(array) for name, array in arrays.items()}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


NUMBERS = {"global_step", "beta1_power", "beta2_power", "learning_rate"}


@pytest.mark.parametrize(
    "maps",
    [
        ["torch-mindspore"],
        ["torch-mindspore", "fc.{p*} <=> first.{p*}"],
        ["fc.{p*} <=> first.{p*}", "torch-mindspore"],
        ["torch-mindspore", "fc.{p*} <=> second.{p*}", "second.{p*} <=> first.{p*}"],
    ],
)
def test_numbers_that_any_map_computes_are_none_of_the_model(tmp_path: Path, maps: list[str]) -> None:
    found = held(converted(tmp_path, for_mindspore(), map=maps, forward=True, to="safetensors"))
    first = "fc.w" if len(maps) == 1 else "first.w"
    assert found.keys() == mindspore_names([first, "mlp.w", "lin.w"]) | NUMBERS
    assert found["global_step"] == 3


def test_state_that_is_made_up_has_the_whole_name_of_its_parameter(tmp_path: Path) -> None:
    entries = """
        [[map]]
        state = "optimizer.state.{p*}.exp_avg <=> accum.{p*}"
        [[map]]
        fill = { name = "stat.{p*}", value = 0, beside = "accum.{p*}" }
        """
    (tmp_path / "map.toml").write_text(entries)
    found = held(converted(tmp_path, for_mindspore(), map=tmp_path / "map.toml", forward=True, to="safetensors"))
    assert {"accum.model.fc.w", "stat.model.fc.w"} <= found.keys()


STATES = """
    [[map]]
    state = "optimizer.state.{p*}.exp_avg <=> moment1.{p*}"
    [[map]]
    state = "optimizer.state.{p*}.exp_avg_sq <=> moment2.{p*}"
    [[map]]
    count = { each = "optimizer.state.{p*}.step", beside = "optimizer.state.{p*}.exp_avg", total = "global_step" }
    """


@pytest.mark.parametrize("to", few(1, ["torch", "safetensors"]))
@pytest.mark.parametrize("states", few(1, [STATES, None]))
def test_state_that_a_map_has_named_comes_back_and_follows(tmp_path: Path, states: str | None, to: str) -> None:
    (tmp_path / "states.toml").write_text(states or "")
    named = str(tmp_path / "states.toml") if states else "torch-mindspore"
    converted(tmp_path, for_mindspore(), map=named, forward=True, to=to)
    (tmp_path / "dst").rename(tmp_path / "there")
    found = transformed(tmp_path / "there", tmp_path / "back", map=named, reverse=True, to="torch")
    assert found["optimizer"]["state"].keys() == found["model"].keys() and found.keys() == {"model", "optimizer"}
    assert all(own.keys() == {"step", "exp_avg", "exp_avg_sq"} for own in found["optimizer"]["state"].values())
    reshard_mpi.transform(
        tmp_path / "there", tmp_path / "moved", map="{p*} <=> net.{p*}", forward=True, to="safetensors"
    )
    moved = held(tmp_path / "moved").keys()
    assert moved - NUMBERS == mindspore_names([f"net.{name}" for name in for_mindspore()["model"]])


def test_state_of_a_parameter_beside_the_model_has_the_name_of_that(tmp_path: Path) -> None:
    entries = (f'[[map]]\nstate = "{key}.state.{{p*}}.exp_avg <=> moment1.{{p*}}"\n' for key in ("optimizer", "second"))
    (tmp_path / "map.toml").write_text("".join(entries))
    one, two = for_mindspore(), for_mindspore()
    state = {f"critic.{name}": own for name, own in two["optimizer"]["state"].items()}
    second = {"state": state, "param_groups": [{"lr": 0.1, "params": [*state]}]}
    source = {**one, "critic": two["model"], "second": second}
    found = held(converted(tmp_path, source, map=tmp_path / "map.toml", forward=True, to="safetensors"))
    assert {name for name in found if "moment1" in name} == {
        f"moment1.{key}.{name}" for key in ("model", "critic") for name in one["model"]
    }


def test_state_goes_by_the_name_of_a_parameter_that_a_run_before_has_taken_out_of_the_model(tmp_path: Path) -> None:
    converted(tmp_path, for_mindspore(), map="model.{p*} <=> {p*}", forward=True, to="torch")
    (tmp_path / "dst").rename(tmp_path / "between")
    reshard_mpi.transform(tmp_path / "between", tmp_path / "dst", map="torch-mindspore", forward=True, to="safetensors")
    found = held(tmp_path / "dst")
    assert {"fc.w", "moment1.fc.w"} <= found.keys() and not any("model" in name for name in found)


def test_state_that_is_made_up_in_the_optimizer_lies_beside_the_other_of_its_parameter(tmp_path: Path) -> None:
    name, beside = (f"optimizer.state.{{p*}}.{key}" for key in ("max_exp_avg_sq", "exp_avg_sq"))
    (tmp_path / "map.toml").write_text(f'[[map]]\nfill = {{ name = "{name}", value = 0, beside = "{beside}" }}\n')
    dst = converted(tmp_path, for_mindspore(), map=tmp_path / "map.toml", forward=True, to="torch")
    state = tree_of(dst)["optimizer"]["state"]
    assert state.keys() == for_mindspore()["model"].keys()
    assert all(own.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} for own in state.values())


@pytest.mark.parametrize(
    ("options", "parameters", "rest"),
    [
        ({"exclude": "model.m*"}, ["fc.w", "lin.w"], NUMBERS),
        ({"exclude": "model.l*"}, ["fc.w", "mlp.w"], NUMBERS),
        ({"exclude": "moment?.*"}, [], NUMBERS | {"model.fc.w", "model.mlp.w", "model.lin.w"}),
        ({"include": ["model.*", "moment?.*"]}, ["fc.w", "mlp.w", "lin.w"], set()),
    ],
)
def test_what_is_left_out_has_its_name_in_the_target(
    tmp_path: Path, options: dict[str, Any], parameters: list[str], rest: set[str]
) -> None:
    found = held(converted(tmp_path, for_mindspore(), map="torch-mindspore", forward=True, to="safetensors", **options))
    assert found.keys() == mindspore_names(parameters) | rest
    with pytest.raises(MapError, match="matches no tensor"):
        converted(
            tmp_path, for_mindspore(), map="torch-mindspore", forward=True, exclude="model.moment1.*", overwrite=True
        )


@pytest.mark.parametrize(
    ("maps", "beside"),
    [
        (["extra.{p*} <=> more.{p*}", "{p*} <=> net.{p*}"], {"more.a.v", "rng"}),
        (["rng <=> random", "{p*} <=> net.{p*}"], {"extra.a.v", "random"}),
        (["{p*} <=> net.{p*}", "extra.{p*} <=> more.{p*}"], {"more.a.v", "rng"}),
    ],
)
def test_maps_of_what_lies_beside_the_model_change_nothing_in_it(
    tmp_path: Path, maps: list[str], beside: set[str]
) -> None:
    source = training() | {"extra": {"a": {"v": stored(np.ones(3, np.float32))}}, "rng": stored(np.arange(3))}
    found = held(converted(tmp_path, source, map=maps, forward=True, to="torch"))
    names = [f"model.net.{name}" for name in (*WEIGHTS, "scale")]
    names += [f"optimizer.state.net.{name}.{key}" for name in WEIGHTS for key in ("step", "exp_avg")]
    assert found.keys() == {*names, *beside, "client_state.seen"}


def test_what_a_map_has_computed_lies_beside_the_model_for_the_next_one(tmp_path: Path) -> None:
    maps = ["torch-mindspore", "{p*} <=> net.{p*}"]
    found = held(converted(tmp_path, for_mindspore(), map=maps, forward=True, to="safetensors"))
    assert found.keys() == mindspore_names(["net.fc.w", "net.mlp.w", "net.lin.w"]) | NUMBERS


@pytest.mark.parametrize("keys", few(1, [["model"], ["model", "teacher"], ["teacher", "model"], ["teacher"]]))
def test_equations_by_whole_names_apply_to_the_model_beside_others(tmp_path: Path, keys: list[str]) -> None:
    entries = (f'[[map]]\neq = "{key}.{{p*}}.w <=> {key}.{{p*}}.kernel"\noptional = true\n' for key in keys)
    (tmp_path / "map.toml").write_text("".join(entries))
    source = for_mindspore() | {"teacher": for_mindspore()["model"]}
    optimizer = source["optimizer"]
    optimizer["state"] = {f"model.{name}": own for name, own in optimizer["state"].items()}
    optimizer["param_groups"][0]["params"] = [*optimizer["state"]]
    found = held(converted(tmp_path, source, map=tmp_path / "map.toml", forward=True, to="torch"))
    for key in ("model", "teacher"):
        assert (f"{key}.fc.kernel" in found, f"{key}.fc.w" in found) == (key in keys, key not in keys)
    assert ("optimizer.state.model.fc.kernel.exp_avg" in found) == ("model" in keys)


@pytest.mark.parametrize("maps", few(1, [["map.toml"], ["map.toml", "{p*} <=> net.{p*}"]]))
def test_what_is_made_up_beside_a_tensor_lies_where_that_does(tmp_path: Path, maps: list[str]) -> None:
    fill = 'fill = { name = "{p*}.seen", value = 0, shape = [], beside = "{p*}.mean", type = "int64" }'
    (tmp_path / "map.toml").write_text(f"[[map]]\n{fill}\n")
    means = {"bn.mean": stored(np.ones(3, np.float32))}
    source = {"model": {**means, **training()["model"]}, "optimizer": training()["optimizer"], "teacher": means}
    options = {"map": [str(tmp_path / maps[0]), *maps[1:]], "forward": True, "to": "torch"}
    found = held(converted(tmp_path, source, **options))
    net = "net." * (len(maps) - 1)
    assert {name for name in found if "bn" in name} == {
        *(f"model.{net}bn.{key}" for key in ("mean", "seen")),
        *(f"teacher.bn.{key}" for key in ("mean", "seen")),
    }


def test_no_equation_for_any_name_takes_what_lies_beside_the_model_alone(tmp_path: Path) -> None:
    source = training() | {"extra": {"a": {"v": stored(np.ones(3, np.float32))}}}
    with pytest.raises(MapError, match=r"applies nowhere|no tensor|does nothing"):
        converted(tmp_path, source, map="{p*}.v <=> {p*}.u", forward=True, to="torch")
    found = held(converted(tmp_path, source, map="extra.{p*}.v <=> extra.{p*}.u", forward=True, to="torch"))
    assert "extra.a.u" in found
