"""Dictionaries and lists of a nest go where a map puts all of their tensors, with what lies beside these in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.examples import few_cases
from support.torch_runs import array_of, stored, transformed, tree_made_of, tree_of

import reshard_mpi
from reshard_mpi.errors import MapError


def tensor(value: float, shape: tuple[int, ...] = (2, 2)) -> Any:
    return stored(np.full(shape, value, np.float32))


def plain(value: Any) -> Any:
    """Return the same with the first number of each tensor in its place."""
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    if isinstance(value, list):
        return [plain(own) for own in value]
    if not isinstance(value, torch_peer.Tensor):
        return value
    return float(array_of(value).flat[0])


def filled(value: Any) -> Any:
    """Return the same with a tensor in the place of each number that is a float."""
    if isinstance(value, dict):
        return {key: filled(own) for key, own in value.items()}
    if isinstance(value, list):
        return [filled(own) for own in value]
    return tensor(value) if isinstance(value, float) else value


def made_of(folder: Path, source: dict[str, Any], *equations: str, like: dict[str, Any] | None = None) -> Any:
    """Return what equations, one after another in a file, make of a file."""
    torch_peer.save(folder / "x.pt", filled(source))
    (folder / "map.toml").write_text("".join(f'[[map]]\neq = "{equation}"\n' for equation in equations))
    options: dict[str, Any] = {} if like is None else {"like": folder / "like.pt"}
    if like is not None:
        torch_peer.save(folder / "like.pt", filled(like))
    report = reshard_mpi.transform(
        folder / "x.pt", folder / "dst", to="torch", map=folder / "map.toml", forward=True, **options
    )
    return plain(tree_of(folder / "dst")), report


TRAINER = {
    "0.weight": 1.0,
    "0.bias": 2.0,
    "optim_state": {"0.weight": {"step": 3, "exp_avg": 10.0}, "0.bias": {"step": 4, "exp_avg": 20.0}},
    "epoch": 7,
}


@pytest.mark.parametrize("is_like", [False, True])
def test_state_by_parameter_that_is_no_optimizer_of_torch(tmp_path: Path, is_like: bool) -> None:
    expected = {
        "0.kernel": 1.0,
        "0.bias": 2.0,
        "optim_state": {"0.kernel": {"step": 3, "exp_avg": 10.0}, "0.bias": {"step": 4, "exp_avg": 20.0}},
        "epoch": 7,
    }
    zeros = {"0.kernel": {"step": 0, "exp_avg": 0.0}, "0.bias": {"step": 0, "exp_avg": 0.0}}
    like = {"0.kernel": 0.0, "0.bias": 0.0, "optim_state": zeros, "epoch": 0} if is_like else None
    made, report = made_of(tmp_path, TRAINER, "{p*}.weight <=> {p*}.kernel", like=like)
    assert made == expected and not report.warnings


@few_cases(
    4,
    ("source", "equations", "expected"),
    [
        (  # modules in modules
            {"params": {"fc": {"weight": 1.0, "bias": 2.0, "size": 2}, "out": {"weight": 3.0}}},
            ["params.fc.{p*} <=> params.proj.{p*}"],
            {"params": {"proj": {"weight": 1.0, "bias": 2.0, "size": 2}, "out": {"weight": 3.0}}},
        ),
        ({"encoder": {"0.w": 1.0}, "epoch": 3}, ["encoder.{p*} <=> enc.{p*}"], {"enc": {"0.w": 1.0}, "epoch": 3}),
        (  # exchanged
            {"g": {"w": 1.0, "size": 3}, "d": {"w": 2.0, "size": 4}},
            ["g.{p*} <=> d.{p*}", "d.{p*} <=> g.{p*}"],
            {"d": {"w": 1.0, "size": 3}, "g": {"w": 2.0, "size": 4}},
        ),
        (  # into another dictionary, and out of it
            {"a": {"net": {"w": 1.0, "n": 5}, "n": 6}, "b": {"v": 2.0}},
            ["a.net.{p*} <=> b.net.{p*}"],
            {"a": {"n": 6}, "b": {"v": 2.0, "net": {"w": 1.0, "n": 5}}},
        ),
        (  # numbers stay numbers
            {"layers": {0: {"w": 1.0, "n": 5}, 1: {"w": 2.0, "n": 6}}},
            ["layers.{l}.{p*} <=> blocks.{l}.{p*}"],
            {"blocks": {0: {"w": 1.0, "n": 5}, 1: {"w": 2.0, "n": 6}}},
        ),
        (
            {"layers": {0: {"w": 1.0}, 1: {"w": 2.0}}},
            ["layers.1.{p*} <=> layers.2.{p*}"],
            {"layers": {0: {"w": 1.0}, 2: {"w": 2.0}}},
        ),
        (  # a list of modules
            {"net": {"layers": [{"w": 1.0, "n": 5}, {"w": 2.0, "n": 6}]}},
            ["net.layers.{p*} <=> net.blocks.{p*}"],
            {"net": {"blocks": [{"w": 1.0, "n": 5}, {"w": 2.0, "n": 6}]}},
        ),
        (  # what is taken together or apart has equal values
            {"m": {"q": {"v": 1.0, "n": 5}, "k": {"v": 2.0, "n": 5}}},
            ["m.q.{s} [a h], m.k.{s} [b h] <=> m.qk.{s} [(a + b) h]".replace("{s}", "v")],
            {"m": {"qk": {"v": 1.0, "n": 5}}},
        ),
        (
            {"m": {"qk": {"v": 1.0, "n": 5}}},
            ["m.qk.v [(1 + 1) h] <=> m.q.v [1 h], m.k.v [1 h]"],
            {"m": {"q": {"v": 1.0, "n": 5}, "k": {"v": 1.0, "n": 5}}},
        ),
    ],
)
def test_dictionaries_go_along(
    tmp_path: Path, source: dict[str, Any], equations: list[str], expected: dict[str, Any]
) -> None:
    made, report = made_of(tmp_path, source, *equations)
    assert made == expected and not report.warnings


@few_cases(
    2,
    ("source", "equations", "expected"),
    [
        # the dictionary is taken off
        ({"model": {"w": 1.0, "n": 5}}, ["model.{p*} <=> {p*}"], {"model": {"n": 5}, "w": 1.0}),
        # all of it begins as before
        ({"model": {"w": 1.0}}, ["model.{p*} <=> model.net.{p*}"], {"model": {"net.w": 1.0}}),
        # there is another dictionary, or another value
        ({"a": {"w": 1.0, "n": 5}, "b": {"v": 2.0}}, ["a.{p*} <=> b.{p*}"], {"a": {"n": 5}, "b": {"v": 2.0, "w": 1.0}}),
        ({"a": {"w": 1.0, "n": 5}, "b": "x"}, ["a.{p*} <=> b.{p*}"], {"a": {"n": 5}, "b": "x", "b.w": 1.0}),
        # another tensor would get into the dictionary
        ({"a": {"w": 1.0}, "b.v": 2.0}, ["a.{p*} <=> b.{p*}"], {"a": {}, "b.v": 2.0, "b.w": 1.0}),
        # modules that are taken together have other values
        (
            {"m": {"q": {"v": 1.0, "n": 5}, "k": {"v": 2.0, "n": 6}}},
            ["m.q.v [a h], m.k.v [b h] <=> m.qk.v [(a + b) h]"],
            {"m": {"q": {"n": 5}, "k": {"n": 6}, "qk.v": 1.0}},
        ),
        # one is taken apart
        ({"m": {"q": {"v": 1.0, "u": 2.0}}}, ["m.q.v <=> m.k.v"], {"m": {"q": {"u": 2.0}, "k.v": 1.0}}),
    ],
)
def test_dictionaries_stay(
    tmp_path: Path, source: dict[str, Any], equations: list[str], expected: dict[str, Any]
) -> None:
    made, _ = made_of(tmp_path, source, *equations)
    assert made == expected


def test_the_model_of_an_optimizer_stays_where_the_optimizer_looks_for_it(tmp_path: Path) -> None:
    """Its names would no longer be those of the optimizer."""
    optimizer = {"state": {"w": {"exp_avg": 3.0}}, "param_groups": [{"params": ["w"], "lr": 0}]}
    source = {"model": {"w": 1.0}, "optim": optimizer, "ema": {"v": 2.0}}
    made, _ = made_of(
        tmp_path,
        source,
        "model.w <=> net.w",
        "optim.state.w.exp_avg <=> optim.state.net.w.exp_avg",
        "ema.{p*} <=> avg.{p*}",
    )
    assert made["net.w"] == 1.0 and [*made["optim"]["state"]] == ["net.w"] and made["avg"] == {"v": 2.0}


@pytest.mark.parametrize("are_numbered", [False, True])
def test_modules_in_the_model_of_an_optimizer_go_along(tmp_path: Path, are_numbered: bool) -> None:
    keys: list[Any] = [0, 1] if are_numbered else ["fc.w", "out.w"]
    state = {key: {"exp_avg": 3.0 + number} for number, key in enumerate(keys)}
    source = {
        "model": {"fc": {"w": 1.0, "bits": 4}, "out": {"w": 2.0}},
        "optim": {"state": state, "param_groups": [{"params": keys, "lr": 0}]},
    }
    equations = [] if are_numbered else ["optim.state.fc.{s*} <=> optim.state.proj.{s*}"]
    made, _ = made_of(tmp_path, source, "model.fc.{p*} <=> model.proj.{p*}", *equations)
    assert made["model"] == {"proj": {"w": 1.0, "bits": 4}, "out": {"w": 2.0}}
    assert made["optim"]["state"] == {"proj.w": {"exp_avg": 3.0}, "out.w": {"exp_avg": 4.0}}


GROUP = {"lr": 3, "params": ["fc.w", "fc.b"]}
NESTED = {
    "params": {"fc": {"weight": 1.0, "bias": 2.0, "size": 2}, "out": {"weight": 3.0}},
    "slow": {"fc": {"weight": 4.0, "bias": 5.0}, "out": {"weight": 6.0}},
    "optim_state": {"params.fc.weight": {"step": 3, "exp_avg": 7.0}, "params.out.weight": {"step": 4, "exp_avg": 8.0}},
    "epoch": 7,
}


@few_cases(
    1,
    "equations",
    [
        ["params.fc.{p*} <=> params.proj.{p*}", "params.proj.weight <=> params.proj.kernel"],
        ["params.fc.weight <=> params.fc.kernel", "params.fc.{p*} <=> params.proj.{p*}"],
        ["params.{p*} <=> net.{p*}", "net.fc.weight <=> net.fc.kernel", "net.{p*} <=> model.net.{p*}"],
        ["params.fc.{p*} <=> params.x.{p*}", "params.out.{p*} <=> params.fc.{p*}", "params.x.{p*} <=> params.out.{p*}"],
        ["slow.fc.{p*} <=> params.slow.{p*}", "params.slow.{p*} <=> slow.fc.{p*}"],
        ["slow.{p*} <=> fast.{p*}", "fast.fc.weight <=> other"],
        ["fc.w <=> fc.v", "{p*} <=> net.{p*}", "net.fc.v <=> out"],
    ],
)
def test_several_maps_nest_as_one_after_another(tmp_path: Path, equations: list[str]) -> None:
    training = {
        "model": {"fc.w": 1.0, "fc.b": 2.0},
        "ema": {"fc.w": 3.0},  # it follows its parameter
        "optimizer": {"state": {"fc.w": {"exp_avg": 4.0}, "fc.b": {"exp_avg": 5.0}}, "param_groups": [GROUP]},
    }
    torch_peer.save(tmp_path / "0.pt", filled(training if equations[0].startswith("fc") else NESTED))
    how: dict[str, Any] = {"to": "torch", "forward": True, "overwrite": True}
    reshard_mpi.transform(tmp_path / "0.pt", tmp_path / "chain", map=equations, **how)
    source = tmp_path / "0.pt"
    for at, equation in enumerate(equations):
        reshard_mpi.transform(source, tmp_path / f"{at}", map=equation, **how)
        source = tmp_path / f"{at}"
    chain, steps = (plain(tree_of(folder)) for folder in (tmp_path / "chain", source))
    assert chain == steps


@pytest.mark.parametrize("key", ["model", "net"])
def test_names_taken_out_of_a_dictionary_are_not_put_back_into_it(tmp_path: Path, key: str) -> None:
    """State follows both maps as the model does, so it would have a key before its names that it did not have."""
    optimizer = {"state": {"w": {"exp_avg": 3.0}, "b": {"exp_avg": 4.0}}, "param_groups": [{"params": ["w", "b"]}]}
    torch_peer.save(tmp_path / "x.pt", filled({key: {"w": 1.0, "b": 2.0}, "optim": optimizer}))
    equations = [f"{key}.{{p*}} <=> {{p*}}", f"{{p*}} <=> {key}.{{p*}}"]
    how: dict[str, Any] = {"to": "torch", "forward": True}
    with pytest.raises(MapError, match="would be those of no dictionary"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=equations, **how)
    equations[1] = "{p*} <=> new.{p*}"
    loaded = transformed(tmp_path / "x.pt", tmp_path / "dst", map=equations, **how)  # at the root
    assert {"new.w", "new.b"} < loaded.keys() and loaded["optim"]["param_groups"][0]["params"] == ["new.w", "new.b"]


def test_a_dictionary_that_does_not_go_along_leaves_names_of_none(tmp_path: Path) -> None:
    """The second map takes a buffer to another name, so that not all tensors keep what follows the key."""
    optimizer = {"state": {"w": {"exp_avg": 3.0}}, "param_groups": [{"params": ["w"]}]}
    torch_peer.save(tmp_path / "x.pt", filled({"model": {"w": 1.0, "b": 2.0}, "optim": optimizer}))
    how: dict[str, Any] = {"to": "torch", "forward": True, "overwrite": True}
    for second in ("net.b <=> net.c.b", "net.b <=> net.c"):
        with pytest.raises(MapError, match="would be those of no dictionary"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=["model.{p*} <=> net.{p*}", second], **how)
    loaded = plain(transformed(tmp_path / "x.pt", tmp_path / "dst", map="model.{p*} <=> net.{p*}", **how))
    assert loaded == {"net": {"w": 1.0, "b": 2.0}, "optim": plain(filled(optimizer))}


@pytest.mark.parametrize("key", ["module", "net"])
def test_names_that_lack_a_wrapper_do_not_become_whole_names(tmp_path: Path, key: str) -> None:
    """The tensors of `module` stay in that dictionary, without the wrapper that they had before their names."""
    optimizer: Any = {"state": {}, "param_groups": [{"params": [*"wb"]}]}  # by SGD
    torch_peer.save(tmp_path / "x.pt", filled({key: {"module.w": 1.0, "module.b": 2.0}, "optim": optimizer}))
    maps = [f"{key}.module.{{p*}} <=> {key}.{{p*}}", f"{key}.w <=> {key}.v"]
    how: dict[str, Any] = {"to": "torch", "forward": True, "overwrite": True}
    with pytest.raises(MapError, match="would be those of no dictionary"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map=maps, **how)
    loaded = plain(transformed(tmp_path / "x.pt", tmp_path / "dst", map=maps[0], **how))
    assert loaded == {key: {"w": 1.0, "b": 2.0}, "optim": optimizer}


@pytest.mark.parametrize("trained", ["wb", "w"])
@pytest.mark.parametrize("equation", ["w <=> v", "{p*} <=> net.{p*}"])
def test_a_model_at_the_root_and_one_below_a_key_whose_optimizers_have_the_same_names(
    tmp_path: Path, equation: str, trained: str
) -> None:
    """Those of both are whole names of the model at the root, and one of them belongs to the other model."""
    model = {"w": 1.0, "b": 2.0}
    first, second = (
        {
            "state": {name: {"exp_avg": value * by} for name, value in model.items()},
            "param_groups": [{"params": [*"wb"]}],
        }
        for by in (10.0, 20.0)
    )
    torch_peer.save(tmp_path / "x.pt", filled({**model, "critic": model, "optim": first, "critic_optim": second}))
    with pytest.raises(MapError, match="would be those of no dictionary"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", forward=True, map=equation)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "left", to="torch", exclude=["critic.*", "critic_optim.*"])
    made = plain(transformed(tmp_path / "left", tmp_path / "dst", to="torch", forward=True, map="w <=> v"))
    assert made["optim"]["param_groups"][0]["params"] == [*"vb"]


def test_a_value_that_is_called_as_tensors_begin_later_on_stays(tmp_path: Path) -> None:
    maps = ["net.fc.{p*} <=> epoch.{p*}", "epoch.{p*} <=> net.fc.{p*}"]
    source = {"net": {"fc.w": 1.0, "fc.b": 2.0}, "epoch": 3}
    assert plain(tree_made_of(tmp_path, filled(source), to="torch", map=maps, forward=True)) == source


@pytest.mark.parametrize("names", [["w"], ["w", "b"]])
def test_parameters_are_not_put_together_with_what_an_optimizer_does_not_train(
    tmp_path: Path, names: list[str]
) -> None:
    """With state that is refused since some have it; an optimizer may have none."""
    optimizer = {"state": {}, "param_groups": [{"params": names}]}
    torch_peer.save(tmp_path / "x.pt", filled({"model": {"w": 1.0, "b": 2.0}, "optim": optimizer}))
    how: dict[str, Any] = {
        "to": "torch",
        "forward": True,
        "map": "model.w [a h], model.b [b h] <=> model.both [(a + b) h]",
    }
    if len(names) < 2:
        with pytest.raises(MapError, match="both would be made of parameters of an optimizer and of"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **how)
        return
    loaded = transformed(tmp_path / "x.pt", tmp_path / "dst", **how)
    assert loaded["optim"]["param_groups"][0]["params"] == ["both"]


@pytest.mark.parametrize("form", ["names", "flat"])
def test_state_stays_in_its_optimizer_where_a_model_is_called_state_in_between(tmp_path: Path, form: str) -> None:
    """`state.w` is a parameter's name after the first map, and in the optimizer that of its state."""
    optimizer: dict[str, Any] = {"state.w.exp_avg": 3.0, "state.b.exp_avg": 4.0}
    optimizer |= {"param_groups.w.lr": 1, "param_groups.b.lr": 1}
    if form == "names":
        states = {"w": {"exp_avg": 3.0}, "b": {"exp_avg": 4.0}}
        optimizer = {"state": states, "param_groups": [{"lr": 1, "params": [*"wb"]}]}
    torch_peer.save(tmp_path / "x.pt", filled({"net": {"w": 1.0, "b": 2.0}, "train": {"opt": optimizer}}))
    maps = ["net.{p*} <=> state.{p*}", "state.{p*} <=> net.{p*}"]
    with pytest.raises(MapError):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", map=maps, forward=True)


@pytest.mark.parametrize("exclude", ["*b", "model.b"])
def test_an_optimizer_all_of_whose_parameters_are_left_out_has_none(tmp_path: Path, exclude: str) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": ["b"]}]}
    torch_peer.save(tmp_path / "x.pt", filled({"model": {"w": 1.0, "b": 2.0}, "optimizer": optimizer}))
    how: dict[str, Any] = {"to": "torch", "exclude": exclude, "overwrite": True}
    for further in ({}, {"map": "model.{p*} <=> net.{p*}", "forward": True}):
        left = exclude.replace("model", "net") if further else exclude
        loaded = transformed(tmp_path / "x.pt", tmp_path / "dst", **(how | {"exclude": left}), **further)
        assert loaded["optimizer"]["param_groups"][0]["params"] == []
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "again", to="torch", include="*w")


def test_numbers_are_not_taken_for_those_of_a_module_of_a_model(tmp_path: Path) -> None:
    """They may be those of any two parameters; the shapes are those of `fc` by chance."""
    model = {"q": 1.0, "b": {"w": 2.0}, "fc": {"bias": 3.0, "weight": 4.0}}
    optimizer = {"state": {at: {"exp_avg": float(at)} for at in range(2)}, "param_groups": [{"params": [0, 1]}]}
    torch_peer.save(tmp_path / "x.pt", filled({"app": {"model": model}, "optim": optimizer}))
    with pytest.raises(MapError, match="whose optimizer state each number is cannot be told"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map="{p*} <=> x.{p*}", forward=True)


def test_a_numbered_optimizer_of_a_model_whose_dictionary_goes_has_names_of_none(tmp_path: Path) -> None:
    """The first map takes one parameter out of the model's names twice, and the dictionary is not made anew."""
    optimizer = {"state": {at: {"exp_avg": float(at)} for at in range(2)}, "param_groups": [{"params": [0, 1]}]}
    torch_peer.save(tmp_path / "x.pt", filled({"model": {"model.q": 1.0, "k": 2.0}, "optim": optimizer}))
    maps = ["model.{p*} <=> {p*}", "{p*} <=> model.{p*}"]
    with pytest.raises(MapError, match="would be those of no dictionary"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", map=maps, forward=True)
    loaded = transformed(tmp_path / "x.pt", tmp_path / "dst", to="torch", map=maps[0], forward=True)  # whole names
    assert [*loaded["optim"]["state"]] == ["model.q", "k"] and {"model.q", "k"} < loaded.keys()


@pytest.mark.parametrize("begin", ["", "critic."])
def test_names_that_two_models_have_are_not_exchanged_in_one_of_them(tmp_path: Path, begin: str) -> None:
    model = {"w": 1.0, "b": 2.0}
    optimizer = {"state": {"w": {"exp_avg": 3.0}, "b": {"exp_avg": 4.0}}, "param_groups": [{"params": ["w", "b"]}]}
    source = {**model, "critic": model, "optim": optimizer, "critic_optim": optimizer}
    with pytest.raises(MapError):
        made_of(tmp_path, source, f"{begin}w <=> {begin}b", f"{begin}b <=> {begin}w")
