"""Values besides tensors are the source's with `--like`, wherever they lie, or the run is refused."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.examples import few, few_cases
from support.torch_runs import stored, tree_made_of, tree_of

import reshard_mpi
from reshard_mpi.errors import MapError


def tensor(value: float = 0.0) -> Any:
    return stored(np.full((2, 2), value, np.float32))


def grouped(rates: dict[str, float], *, form: str = "numbers") -> dict[str, Any]:
    """Return an optimizer with a group for each parameter. rates: of these, in order."""
    names = [*rates]
    keys = [*range(len(names))] if form == "numbers" else names
    state = {key: {"exp_avg": tensor()} for key in keys}
    groups = [
        {"lr": rate, "params": [key], **({"param_names": [name]} if form == "numbers" else {})}
        for key, (name, rate) in zip(keys, rates.items())
    ]
    if form != "flat":
        return {"state": state, "param_groups": groups}
    flat = {f"state.{name}.exp_avg": own["exp_avg"] for name, own in state.items()}
    return {**flat, **{f"param_groups.{name}.lr": rate for name, rate in rates.items()}}


def carried(
    folder: Path, source: dict[str, Any], like: dict[str, Any], equations: str = "model.{p*} <=> model.{p*}"
) -> Any:
    """Return what a training becomes with another one for `--like`, and the notes on that."""
    for name, values in (("x.pt", source), ("like.pt", like)):
        torch_peer.save(folder / name, values)
    asked: dict[str, Any] = {"to": "torch", "map": equations, "forward": True}
    report = reshard_mpi.transform(folder / "x.pt", folder / "dst", like=folder / "like.pt", **asked)
    return tree_of(folder / "dst"), report.notes


def training(rates: dict[str, float] | None = None, form: str = "numbers", **values: Any) -> dict[str, Any]:
    rates = {"a.w": 0.5} if rates is None else rates
    return {"model": {name: tensor() for name in rates}, "optim": grouped(rates, form=form), **values}


def taken(folder: Path, own: Any, like: Any) -> Any:
    """Return what a value of a training becomes. like: what the checkpoint that it is to be like has in its place."""
    return carried(folder, training(value=own), training(value=like), "{p*} <=> {p*}")[0]["value"]


@few_cases(
    4,
    ("own", "like"),
    [
        ({"state": {"epoch": 7}}, {"state": {"epoch": 1}}),
        ({"params": {"lr": 7}, "param_names": ["a"]}, {"params": {"lr": 1}, "param_names": ["b"]}),
        ((3, 7), [50, 60]),
        ([{"epoch": 0}, {"epoch": 1}], [{"epoch": 9}]),
        ([[1], [2, 3]], [[9]]),
        ({None: 1, 0.5: 2, (1, "a"): 3}, {None: 7, 0.5: 8, (1, "a"): 9}),
        (None, {"decay": 0.5}),
        ({"decay": 0.5}, None),
    ],
)
def test_values_are_the_sources(tmp_path: Path, own: Any, like: Any) -> None:
    assert taken(tmp_path, own, like) == own


UNLIKE, TURNED = {"a.w": 0.1, "b.w": 0.2}, {"b.w": 9.0, "a.w": 8.0}


@few_cases(2, ("form", "like"), [("numbers", "names"), ("numbers", "flat"), ("flat", "names"), ("flat",) * 2])
@pytest.mark.parametrize("key", few(1, ["base_lrs", "base_values"]))
def test_values_by_group_are_refused_where_groups_are_in_another_order(
    tmp_path: Path, key: str, form: str, like: str
) -> None:
    def saved(rates: dict[str, float], form: str, values: list[float]) -> dict[str, Any]:
        tensors = {name: tensor() for name in rates}
        return {**tensors, "optimizer": grouped(rates, form=form), "scheduler": {key: values}}

    source, names = saved(UNLIKE, form, [0.1, 0.2]), "{p*}.w <=> {p*}.w"
    same = saved(UNLIKE, like, [7.0, 8.0])
    assert carried(tmp_path, source, same, names)[0]["scheduler"] == {key: [0.1, 0.2]}
    with pytest.raises(MapError, match=f"values for groups of parameters(.|\n)*scheduler.{key}"):
        carried(tmp_path, source, saved(TURNED, like, [8.0, 7.0]), names)


def test_a_list_that_both_have_alike_is_none_by_group(tmp_path: Path) -> None:
    """As betas are among hyperparameters, where there are two groups."""
    source, like = (training(rates, hyper={"betas": [0.9, 0.95]}) for rates in (UNLIKE, TURNED))
    loaded, _ = carried(tmp_path, source, like, "{p*}.w <=> {p*}.w")
    assert loaded["hyper"] == {"betas": [0.9, 0.95]}
    assert [group["lr"] for group in loaded["optim"]["param_groups"]] == [0.2, 0.1]


@pytest.mark.parametrize("is_like", [False, True])
def test_what_state_has_of_no_parameter_is_the_sources(tmp_path: Path, is_like: bool) -> None:
    source, like = training(), training()
    source["optim"]["state"]["global"], like["optim"]["state"]["global"] = {"calls": 7}, {"calls": 1}
    torch_peer.save(tmp_path / "like.pt", like)
    asked: dict[str, Any] = {"like": tmp_path / "like.pt"} if is_like else {}
    begin = "" if is_like else "model."
    made = tree_made_of(tmp_path, source, to="torch", map=f"{begin}a.w <=> {begin}a.w", forward=True, **asked)
    assert made["optim"]["state"]["global"] == {"calls": 7}


@pytest.mark.parametrize("form", ["names", "flat"])
def test_every_optimizer_of_a_file_gets_new_names(tmp_path: Path, form: str) -> None:
    source = training(second={} if form == "flat" else {"note": 1})
    source["second"] |= grouped({"a.w": 0.25}, form=form)
    (tmp_path / "map.toml").write_text(
        "".join(
            f'[[map]]\neq = "{begin}a.w{end} <=> {begin}new.w{end}"\n'
            for begin, end in (("model.", ""), ("second.state.", ".exp_avg"))
        )
    )
    loaded = tree_made_of(tmp_path, source, to="torch", map=tmp_path / "map.toml", forward=True)
    assert [*loaded["optim"]["state"]] == ["new.w"]
    if form == "flat":
        assert {*loaded["second"]} == {"state.new.w.exp_avg", "param_groups.new.w.lr"}
    else:
        assert [*loaded["second"]["state"]] == ["new.w"] and "exp_avg" in loaded["second"]["state"]["new.w"]
        assert loaded["second"]["param_groups"][0]["params"] == ["new.w"]


@pytest.mark.parametrize("key", [0, "0"])
def test_an_optimizer_below_a_number_has_state_that_follows(tmp_path: Path, key: Any) -> None:
    source = {"model": {"a.w": tensor(1)}, "optimizers": {key: grouped({"a.w": 0.5})}}
    loaded = tree_made_of(tmp_path, source, to="torch", map="model.a.w <=> model.new.w", forward=True)["optimizers"][
        key
    ]
    assert [*loaded["state"]] == ["new.w"] and [*loaded["state"]["new.w"]] == ["exp_avg"]


def with_extra_state(names: dict[str, int], kind: str) -> dict[str, Any]:
    """Return a model whose modules keep a number besides their tensors, as torch has it of get_extra_state()."""
    model: dict[str, Any] = {}
    for name, number in names.items():
        extra = {"number": number, "text": str(number), "beside a tensor": {"c": number, "h": tensor(number)}}[kind]
        model |= {f"{name}.weight": tensor(number), f"{name}._extra_state": extra}
    return model


@pytest.mark.parametrize("is_like", [False, True])
def test_extra_state_of_modules_that_are_put_together_is_warned_of(tmp_path: Path, is_like: bool) -> None:
    torch_peer.save(tmp_path / "x.pt", {"model": with_extra_state({"a": 3, "b": 4}, "number")})
    like = {"model": {"w": stored(np.zeros((4, 2), np.float32))}}
    torch_peer.save(tmp_path / "like.pt", like)
    begin, options = ("", {"like": tmp_path / "like.pt"}) if is_like else ("model.", {})
    equation = f"{begin}a.weight [a h], {begin}b.weight [b h] <=> {begin}w [(a + b) h]"
    how = (tmp_path / "x.pt", tmp_path / "dst")
    report = reshard_mpi.transform(*how, map=equation, forward=True, **options)
    assert [text for text in report.warnings if r"model.a._extra_state, model.b._extra_state" in text]


def test_empty_extra_state_that_follows_no_module_is_left_out(tmp_path: Path) -> None:
    """Megatron-Core keeps `None` beside many modules: of what a map takes apart, a strict load knows no such key."""
    weights = {"layers.lin.weight": tensor(1), "norm.weight": tensor(2)}
    empty = dict.fromkeys(("layers.lin._extra_state/shard_0_2", "layers.lin._extra_state", "norm._extra_state"))
    torch_peer.save(tmp_path / "x.pt", {"model": {**weights, **empty, "kept": None}})
    equation = "model.layers.lin.weight [(e h) k] <=> model.h.{e}.w [h k]"
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=equation, forward=True, axis={"e": 2})
    made = tree_of(tmp_path / "dst")["model"]
    assert {*made} == {"h.0.w", "h.1.w", "norm.weight", "norm._extra_state", "kept"} and not report.warnings


@pytest.mark.parametrize("is_like", [False, True])
def test_extra_state_of_a_module_without_tensors_goes_with_the_module_around_it(tmp_path: Path, is_like: bool) -> None:
    """As Transformer Engine's `core_attention._extra_state`; of one module the map takes some of the tensors."""

    def model(begin: str, *values: int) -> dict[str, Any]:
        own = {f"{begin}{at}.core.a._extra_state": {"amax": value} for at, value in enumerate(values)}
        return {**{f"{begin}{at}.lin.weight": tensor(at) for at in range(2)}, "drop._extra_state": values[0], **own}

    torch_peer.save(tmp_path / "like.pt", {"model": model("blocks.", 8, 9)})
    begin, options = ("", {"like": tmp_path / "like.pt"}) if is_like else ("model.", {})
    equation = f"{begin}layers.{{p*}} <=> {begin}blocks.{{p*}}"
    made = tree_made_of(tmp_path, {"model": model("layers.", 3, 4)}, map=equation, forward=True, **options)["model"]
    extra = {name: value for name, value in made.items() if name.endswith("_extra_state")}
    core = {f"blocks.{at}.core.a._extra_state": {"amax": 3 + at} for at in range(2)}
    assert extra == {"drop._extra_state": 3, **core}


@pytest.mark.parametrize("way", ["exchanged", "together", "in part"])
def test_values_of_modules_that_are_taken_apart_are_warned_of(tmp_path: Path, way: str) -> None:
    model = {f"{name}.{key}": tensor(at) for at, name in enumerate("ab") for key in ("weight", "bias")}
    model |= {"a.bits": 3, "b.bits": 4, "a._extra_state": 5}
    torch_peer.save(tmp_path / "x.pt", {"model": model})
    equations = {
        "exchanged": ["model.a.{p*} <=> model.b.{p*}", "model.b.{p*} <=> model.a.{p*}"],
        "together": [
            f"model.a.{key} [a h], model.b.{key} [b h] <=> model.c.{key} [(a+b) h]" for key in ("weight", "bias")
        ],
        "in part": ["model.a.weight <=> model.c.weight"],
    }[way]
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{each}"\n' for each in equations))
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=tmp_path / "map.toml", forward=True)
    made = tree_of(tmp_path / "dst")["model"]
    if way == "exchanged":
        assert (made["b.bits"], made["a.bits"], made["b._extra_state"]) == (3, 4, 5) and not report.warnings
        return
    (warning,) = report.warnings
    assert ("model.a.bits" in warning) and ("model.b.bits" in warning) == (way == "together")
    assert ("model.a._extra_state" in warning) == (way == "in part") and "set them anew" in warning


@pytest.mark.parametrize("of_source", [{}, {"b._extra_state": 5}])
def test_extra_state_that_the_source_has_none_for_is_that_of_like(tmp_path: Path, of_source: dict[str, Any]) -> None:
    """In the source another module, which goes elsewhere, may have the name."""
    source = {"a.weight": tensor(1), "b.weight": tensor(2), **of_source}
    torch_peer.save(tmp_path / "like.pt", {"model": with_extra_state({"b": 8, "c": 9}, "number")})
    text = "".join(f'[[map]]\neq = "{old}.{{p*}} <=> {new}.{{p*}}"\n' for old, new in ("ab", "bc"))
    (tmp_path / "map.toml").write_text(text)
    options: Any = {"map": tmp_path / "map.toml", "like": tmp_path / "like.pt", "forward": True}
    made = tree_made_of(tmp_path, {"model": source}, **options)["model"]
    assert made["b._extra_state"] == 8 and made["c._extra_state"] == of_source.get("b._extra_state", 9)


def test_extra_state_takes_the_place_of_another_that_has_a_tensor(tmp_path: Path) -> None:
    source = with_extra_state({"a": 3}, "text") | with_extra_state({"b": 4}, "beside a tensor")
    like = with_extra_state({"b": 8}, "number") | with_extra_state({"c": 9}, "beside a tensor")
    torch_peer.save(tmp_path / "like.pt", {"model": like})
    text = "".join(f'[[map]]\neq = "{old}.{{p*}} <=> {new}.{{p*}}"\n' for old, new in ("ab", "bc"))
    (tmp_path / "map.toml").write_text(text)
    options: Any = {"map": tmp_path / "map.toml", "like": tmp_path / "like.pt", "forward": True}
    made = tree_made_of(tmp_path, {"model": source}, **options)["model"]
    assert made["b._extra_state"] == "3" and made["c._extra_state"]["c"] == 4


@pytest.mark.parametrize("others", few(1, [["aux"], ["aux", "more"]]))
@pytest.mark.parametrize("form", few(2, ["numbers, like", "names, like", "names", "flat"]))
def test_an_excluded_parameter_is_none_of_those_whose_names_end_in_its_name(
    tmp_path: Path, form: str, others: list[str]
) -> None:
    """The model is at the root of the file, and a new head is to be trained."""

    def training(*rates: float) -> dict[str, Any]:
        groups = [["body.w", "head.w"], [f"{other}.head.w" for other in others]]
        names = [name for group in groups for name in group]
        model = {name: tensor(number) for number, name in enumerate(names)}
        keys: list[Any] = [*range(len(names))] if form.startswith("numbers") else names
        optimizer: dict[str, Any] = {"state": {key: {"exp_avg": tensor(9)} for key in keys}, "param_groups": []}
        for rate, group in zip(rates, groups):
            own = [keys[names.index(name)] for name in group]
            optimizer["param_groups"].append({"lr": rate, "params": own, "param_names": group})
        if form == "flat":
            optimizer = {f"state.{name}.exp_avg": tensor(9) for name in names}
            for rate, group in zip(rates, groups):
                optimizer |= {f"param_groups.{name}.lr": rate for name in group}
        return {**model, "optimizer": optimizer}

    torch_peer.save(tmp_path / "like.pt", training(7.0, 8.0))
    options: Any = {"map": "{p*}.w <=> {p*}.w", "forward": True, "exclude": ["head.w"]}
    options |= {"like": tmp_path / "like.pt"} if "like" in form else {}
    made = tree_made_of(tmp_path, training(0.5, 0.25), **options)["optimizer"]
    if form == "flat":
        rates = {key: value for key, value in made.items() if key.endswith(".lr")}
        expected = {f"param_groups.{other}.head.w.lr": 0.25 for other in others}
        assert rates == {"param_groups.body.w.lr": 0.5, **expected}
    else:
        assert [group["lr"] for group in made["param_groups"]] == [0.5, 0.25]
    if form == "names":
        assert made["param_groups"][0]["params"] == ["body.w"]


VERSIONS = {"": 1, "net": 2, "net.0": 3, "net.1": 4, "net.0.act": 5}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ({"net": "body.net"}, {"": 1, "body": 1, "body.net": 2, "body.net.0": 3, "body.net.1": 4, "body.net.0.act": 5}),
        ({"net.0": "net.1", "net.1": "net.0"}, {"": 1, "net": 2, "net.1": 3, "net.1.act": 5, "net.0": 4}),
        ({"net": ""}, {"": 2, "0": 3, "1": 4, "0.act": 5}),
        ({"net.0": "head"}, {"": 1, "net": 2, "head": 3, "head.act": 5, "net.1": 4}),
    ],
)
def test_what_torch_says_of_modules_goes_with_them(
    tmp_path: Path, pairs: dict[str, str], expected: dict[str, int]
) -> None:
    """The versions of modules: to one without a version load_state_dict gives values of an old one."""
    model = OrderedDict((f"net.{at}.{name}", tensor(at)) for at in range(2) for name in ("weight", "bias"))
    model._metadata = OrderedDict((name, {"version": version}) for name, version in VERSIONS.items())  # type: ignore[attr-defined]
    equations = [f"model.{old}.{{p*}} <=> model.{new}.{{p*}}".replace("..", ".") for old, new in pairs.items()]
    (tmp_path / "map.toml").write_text("".join(f"[[map]]\neq = '{each}'\n" for each in equations))
    made = tree_made_of(tmp_path, {"model": model, "epoch": 3}, map=tmp_path / "map.toml", forward=True)["model"]
    assert {name: own["version"] for name, own in made._metadata.items()} == expected


@pytest.mark.parametrize("form", ["numbers", "names"])
def test_an_excluded_parameter_has_no_say_in_the_settings_of_its_group(tmp_path: Path, form: str) -> None:
    def training(groups: dict[str, float], *, are_together: bool) -> dict[str, Any]:
        keys: list[Any] = [*range(len(groups))] if form == "numbers" else [*groups]
        parted = [keys] if are_together else [[key] for key in keys]
        rates = [*groups.values()]
        return {
            **{name: tensor(1) for name in groups},
            "optimizer": {
                "state": {key: {"exp_avg": tensor(2)} for key in keys},
                "param_groups": [
                    {"lr": rate, "params": own, "param_names": [[*groups][keys.index(key)] for key in own]}
                    for rate, own in zip(rates, parted)
                ],
            },
        }

    torch_peer.save(tmp_path / "like.pt", training({"norm.w": 7.0, "b.w": 7.0}, are_together=True))
    options: Any = {"map": "b.w <=> b.w", "forward": True, "exclude": ["norm.w"], "like": tmp_path / "like.pt"}
    made = tree_made_of(tmp_path, training({"norm.w": 0.5, "b.w": 0.25}, are_together=False), **options)["optimizer"]
    assert [group["lr"] for group in made["param_groups"]] == [0.25]


def rates_made(
    folder: Path, source: dict[str, Any], like: dict[str, Any], pairs: dict[str, str], **options: Any
) -> Any:
    """Return the rates of parameters after renames. pairs: the names of all tensors, before and after."""
    text = "".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs.items())
    for name, values in (("x.pt", source), ("like.pt", like)):
        torch_peer.save(folder / name, values)
    (folder / "map.toml").write_text(text)
    how = (folder / "x.pt", folder / "dst")
    reshard_mpi.transform(*how, map=folder / "map.toml", like=folder / "like.pt", forward=True, **options)
    groups = tree_of(folder / "dst")["optim"]["param_groups"]
    return {name: group["lr"] for group in groups for name in group["params"]}


def test_a_name_that_is_the_whole_name_of_another_parameter_is_taken_as_the_others_are(tmp_path: Path) -> None:
    rates = {"step.w": 0.1, "model.step.w": 0.2}
    pairs = {"step.w": "model.step.w", "model.step.w": "model.model.step.w"}
    pairs |= {f"optimizer.state.{name}.exp_avg": f"optim.state.{name}.exp_avg" for name in rates}
    made = rates_made(tmp_path, training(rates), training(dict.fromkeys(rates, 7.0), "names"), pairs)
    assert made == rates


def test_settings_of_a_parameter_that_is_left_out_are_not_those_of_another_one_of_its_name(tmp_path: Path) -> None:
    source = training({"a": 0.1, "b": 0.1, "head": 0.2}, "names")
    like = training({"x": 7.0, "head": 7.0, "y": 7.0}, "names")
    first, _, third = like["optim"]["param_groups"]
    like["optim"]["param_groups"] = [{**first, "params": ["x", "head"]}, third]
    new = {"a": "x", "b": "head", "head": "y"}
    pairs = {f"model.{old}": f"model.{name}" for old, name in new.items()}
    pairs |= {f"optim.state.{old}.exp_avg": f"optim.state.{name}.exp_avg" for old, name in new.items()}
    made = rates_made(tmp_path, source, like, pairs, exclude=["model.head", "optim.state.head.*"])
    assert (made["x"], made["y"]) == (0.1, 0.2)
