"""Settings of an optimizer that names its parameters go with them: groups, flat keys, numbers in state."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.examples import few, few_cases, one_at_a_time
from support.torch_runs import array_of, stored, transformed, tree_made_of, tree_of

import reshard_mpi
from reshard_mpi.errors import MapError

NAMES = ("a.w", "b.w", "c.w")
RATES = dict(zip(NAMES, (0.1, 0.2, 0.3)))
SWAP = {"a.w": "b.w", "b.w": "a.w", "c.w": "d.w"}  # what becomes of each


def tensor(value: float) -> Any:
    return stored(np.full((2, 2), value, np.float32))


def value_of(stored: Any) -> float:
    return float(array_of(stored).flat[0])


def nested(names: dict[str, str], *, is_flat: bool, has_state: bool) -> dict[str, Any]:
    """Return what torch's `get_optimizer_state_dict` returns. names: original names, and those in this file."""
    rates = {new: RATES[name] for name, new in names.items()}
    state = {new: {"exp_avg": tensor(10 + 10 * NAMES.index(name)), "note": name} for name, new in names.items()}
    if not is_flat:
        groups = [{"lr": rate, "params": [new]} for new, rate in rates.items()]
        return {"state": state if has_state else {}, "param_groups": groups}
    flat = {f"state.{new}.{key}": value for new, own in state.items() for key, value in own.items()}
    return {**(flat if has_state else {}), **{f"param_groups.{new}.lr": rate for new, rate in rates.items()}}


def training(path: Path, names: dict[str, str], model: str = "model", *, is_flat: bool, has_state: bool) -> Path:
    """Save a training whose tensors and settings tell which parameter they are of."""
    tensors = {new: tensor(NAMES.index(name)) for name, new in names.items()}
    optimizer = nested(names, is_flat=is_flat, has_state=has_state)
    torch_peer.save(path, {**({model: tensors} if model else tensors), "optim": optimizer})
    return path


def assert_of(path: Path, names: dict[str, str], model: str, *, is_flat: bool, has_state: bool) -> None:
    """Assert that all in a file belongs to the parameter that it is called by."""
    loaded = torch_peer.load(path)
    weights, optimizer = loaded[model] if model else loaded, loaded["optim"]
    assert {new: value_of(weights[new]) for new in names.values()} == {
        new: NAMES.index(name) for name, new in names.items()
    }
    rates = {new: RATES[name] for name, new in names.items()}
    if is_flat:
        lr = {key: value for key, value in optimizer.items() if key.endswith(".lr")}
        assert lr == {f"param_groups.{new}.lr": rate for new, rate in rates.items()}
    else:
        assert {name: group["lr"] for group in optimizer["param_groups"] for name in group["params"]} == rates
    for name, new in names.items() if has_state else ():
        own = (
            {key: optimizer[f"state.{new}.{key}"] for key in ("exp_avg", "note")}
            if is_flat
            else optimizer["state"][new]
        )
        assert own["note"] == name and value_of(own["exp_avg"]) == 10 + 10 * NAMES.index(name)


def swapping(folder: Path, model: str, *, has_state: bool) -> Path:
    """Write a map by `SWAP`. State follows by itself only where it has the whole names of the model's tensors."""
    begin = f"{model}." if model else ""
    pairs = [(f"{begin}{old}", f"{begin}{new}") for old, new in SWAP.items()]
    if has_state and model:
        pairs += [(f"optim.state.{old}.exp_avg", f"optim.state.{new}.exp_avg") for old, new in SWAP.items()]
    (folder / "map.toml").write_text("".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs))
    return folder / "map.toml"


EITHER = (True, False)
WAYS = [
    *product(("dcp",), ("model", ""), EITHER, EITHER, EITHER),
    *product(("safetensors", ""), ("model",), EITHER, EITHER, (False,)),
]


@pytest.mark.parametrize(("between", "model", "has_state", "is_flat", "like"), few(1, WAYS))
def test_settings_go_with_their_parameter(
    tmp_path: Path, is_flat: bool, has_state: bool, model: str, like: bool, between: str
) -> None:
    src = training(tmp_path / "x.pt", {name: name for name in NAMES}, model, is_flat=is_flat, has_state=has_state)
    if between:
        reshard_mpi.transform(src, tmp_path / "between", to=between)
        src = tmp_path / "between"
    # What all tensors of both files begin with is left out of the names, if there is another checkpoint to be like.
    written = "" if like and not has_state else model
    options: dict[str, Any] = {"map": swapping(tmp_path, written, has_state=has_state), "to": "torch"}
    if like:
        in_order = {name: SWAP[name] for name in reversed(NAMES)}  # with other values, which are not to stay
        others = {"a.w": "d.w", "b.w": "b.w", "c.w": "a.w"}
        assert {*others.values()} == {*in_order.values()}
        options["like"] = training(tmp_path / "like.pt", others, model, is_flat=is_flat, has_state=has_state)
    reshard_mpi.transform(src, tmp_path / "dst", **options)
    assert_of(tmp_path / "dst/rank_0/checkpoint_0.pt", SWAP, model, is_flat=is_flat, has_state=has_state)


@pytest.mark.parametrize(("is_flat", "like"), [*product(EITHER, EITHER)])
def test_parameters_of_different_settings_are_not_put_together(tmp_path: Path, is_flat: bool, like: bool) -> None:
    src = training(tmp_path / "x.pt", {name: name for name in NAMES}, is_flat=is_flat, has_state=False)
    m = "" if like else "model."
    (tmp_path / "map.toml").write_text(f'[[map]]\neq = "{m}a.w [x y], {m}b.w [z y] <=> {m}ab.w [(x + z) y]"\n')
    merged = tmp_path / "like.pt"
    tensors = {"ab.w": stored(np.zeros((4, 2), np.float32)), "c.w": tensor(2)}
    optimizer = nested({"a.w": "ab.w", "c.w": "c.w"}, is_flat=is_flat, has_state=False)
    torch_peer.save(merged, {"model": tensors, "optim": optimizer})
    with pytest.raises(MapError, match="parameters that the optimizer treats differently are put together"):
        reshard_mpi.transform(
            src, tmp_path / "dst", to="torch", map=tmp_path / "map.toml", like=merged if like else None
        )


def test_a_copy_of_the_model_that_goes_elsewhere_leaves_a_doubt(tmp_path: Path) -> None:
    tensors = {name: tensor(NAMES.index(name)) for name in NAMES}
    optimizer = nested({name: name for name in NAMES}, is_flat=True, has_state=False)
    torch_peer.save(tmp_path / "x.pt", {"model": tensors, "teacher": dict(tensors), "optim": optimizer})
    with pytest.raises(MapError, match="which model an optimizer belongs to cannot be told"):
        reshard_mpi.transform(
            tmp_path / "x.pt", tmp_path / "dst", to="torch", map=swapping(tmp_path, "model", has_state=False)
        )


@pytest.mark.parametrize("rates", [[0.1, 0.1], [0.1, 0.2]])
def test_what_a_scheduler_has_by_group_does_not_go_to_other_groups(tmp_path: Path, rates: list[float]) -> None:
    for name, order in (("x.pt", ("a.w", "b.w")), ("like.pt", ("b.w", "a.w"))):
        optimizer = nested({name: name for name in order}, is_flat=False, has_state=True)
        scheduler = {"schedulers": [{"base_lrs": rates, "last_epoch": 1}]}
        torch_peer.save(tmp_path / name, {"model": {n: tensor(1) for n in order}, "optim": optimizer, "s": scheduler})
    asked: dict[str, Any] = {"to": "torch", "map": "{p*} <=> {p*}", "like": tmp_path / "like.pt"}
    if rates[0] == rates[1]:
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **asked)
        return
    with pytest.raises(MapError, match="a scheduler has values for groups of parameters"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **asked)


@pytest.mark.parametrize("names", [("w", "state.w"), ("state.w", "w"), ("w", "optimizer.state.w"), ("a", "state.a")])
@pytest.mark.parametrize("like", few(1, [False, True]))
def test_state_of_a_parameter_beside_one_that_is_called_like_it(
    tmp_path: Path, names: tuple[str, str], like: bool
) -> None:
    state = {number: {"exp_avg": tensor(10 + number)} for number in range(2)}
    groups = [{"lr": 0.5, "params": [0, 1], "param_names": [*names]}]
    saved = {name: tensor(number) for number, name in enumerate(names)}
    torch_peer.save(tmp_path / "x.pt", {**saved, "optim": {"state": state, "param_groups": groups}})
    one, other = names
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{a} <=> {b}"\n' for a, b in (names, (other, one))))
    asked: dict[str, Any] = {"to": "torch", "map": tmp_path / "map.toml", "forward": True}
    try:
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", like=tmp_path / "x.pt" if like else None, **asked)
    except MapError:
        assert like or "optimizer" in other  # where names still leave a doubt
        return
    loaded = tree_of(tmp_path / "dst")
    (group,) = loaded["optim"]["param_groups"]
    key_of = dict(zip(group["param_names" if like else "params"], group["params"]))
    for name, number in ((one, 1), (other, 0)):
        assert value_of(loaded[name]) == number
        assert value_of(loaded["optim"]["state"][key_of[name]]["exp_avg"]) == 10 + number


@few_cases(
    2,
    ("between", "rates", "seeds"),
    one_at_a_time(["torch", "dcp", "safetensors"], [(0.1, 0.1), (0.1, 0.2)], [(3, 3), (3, 4)]),
)
@pytest.mark.parametrize("is_flat", few(1, [True, False]))
def test_optimizers_of_stages_are_joined(
    tmp_path: Path, is_flat: bool, seeds: tuple[int, int], rates: tuple[float, float], between: str
) -> None:
    """Two stages have saved a parameter each, and an optimizer that names it."""
    for stage, name in enumerate(("a.w", "b.w")):
        (tmp_path / "src" / f"rank_{stage}").mkdir(parents=True)
        state = {"exp_avg": tensor(10 + stage), "note": name}
        named = {"state": {name: state}, "param_groups": [{"lr": rates[stage], "params": [name]}]}
        flat = {
            **{f"state.{name}.{key}": value for key, value in state.items()},
            f"param_groups.{name}.lr": rates[stage],
        }
        saved = {"model": {name: tensor(stage)}, "optim": flat if is_flat else named, "seed": seeds[stage]}
        torch_peer.save(tmp_path / "src" / f"rank_{stage}" / "x.pt", saved)
    (tmp_path / "stages.toml").write_text('mesh = { data = 1 }\nstages = 2\n[[parameter]]\nmatch = "*"\n')
    report = reshard_mpi.transform(tmp_path / "src", tmp_path / "between", tmp_path / "stages.toml", to=between)
    assert any("differs from the one taken" in note for note in report.notes) == (seeds == (3, 4))
    loaded = transformed(tmp_path / "between", tmp_path / "dst", to="torch")
    assert loaded["seed"] == 3
    for stage, name in enumerate(("a.w", "b.w")):
        assert value_of(loaded["model"][name]) == stage
        optimizer = loaded["optim"]
        if is_flat:
            assert optimizer[f"param_groups.{name}.lr"] == rates[stage]
            state = {key: optimizer[f"state.{name}.{key}"] for key in ("exp_avg", "note")}
        else:
            assert [group["lr"] for group in optimizer["param_groups"] if name in group["params"]] == [rates[stage]]
            assert sum(len(group["params"]) for group in optimizer["param_groups"]) == 2
            state = optimizer["state"][name]
        assert state["note"] == name and value_of(state["exp_avg"]) == 10 + stage


@pytest.mark.parametrize("names", [("w", "m.step.w"), ("w", "ema.w"), ("a.w", "prev.a.w")])
def test_a_parameter_with_state_of_its_own_is_no_state_of_another(tmp_path: Path, names: tuple[str, str]) -> None:
    state = {number: {"exp_avg": tensor(10 + number)} for number in range(2)}
    groups = [{"lr": 0.5, "params": [0, 1], "param_names": [*names]}]
    model = {name: tensor(number) for number, name in enumerate(names)}
    equation = f"model.{names[0]} <=> model.new"
    loaded = tree_made_of(
        tmp_path,
        {"model": model, "optim": {"state": state, "param_groups": groups}},
        to="torch",
        map=equation,
        forward=True,
    )
    assert {name: value_of(value) for name, value in loaded["model"].items()} == {"new": 0, names[1]: 1}
    held = {name: value_of(own["exp_avg"]) for name, own in loaded["optim"]["state"].items()}
    assert held == {"new": 10, names[1]: 11}


FORMS = ("numbers", "names", "flat")


def of_form(path: Path, mine: tuple[str, ...], key: str, form: str, *, own: bool) -> Path:
    """Save a training of two parameters with an optimizer in one of torch's forms. own: else with other values."""
    keys = [*range(len(mine))] if form == "numbers" else [*mine]
    state = {k: {"exp_avg": tensor(10 + at if own else 0), "note": at if own else 99} for at, k in enumerate(keys)}
    rates = [0.1 + 0.1 * at if own else 0.7 for at in range(len(mine))]
    groups = [
        {"lr": rate, "params": [k], **({"param_names": [name]} if form == "numbers" else {})}
        for rate, k, name in zip(rates, keys, mine)
    ]
    optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
    if form == "flat":
        optimizer = {f"state.{name}.{kind}": value for name, values in state.items() for kind, value in values.items()}
        optimizer |= {f"param_groups.{name}.lr": rate for name, rate in zip(mine, rates)}
    model = {name: tensor(at if own else 0) for at, name in enumerate(mine)}
    torch_peer.save(path, {"model": model, key: optimizer})
    return path


@pytest.mark.parametrize("key", ["optim", "optimizer"])
@pytest.mark.parametrize(("form", "like"), few(1, list(permutations(FORMS, 2))))
def test_settings_between_forms(tmp_path: Path, form: str, like: str, key: str) -> None:
    """An optimizer that goes by names, as `get_optimizer_state_dict` has it, becomes one with numbers, and so on."""
    src = of_form(tmp_path / "x.pt", ("a.w", "b.w"), "optim", form, own=True)
    template = of_form(tmp_path / "like.pt", ("d.w", "c.w"), key, like, own=False)
    new = {"a.w": "c.w", "b.w": "d.w"}
    # With numbers in the source or the target the model's names lack what all of them begin with.
    before = ("", "optimizer.state.") if form == "numbers" else ("model.", "optim.state.")
    after = ("", "optimizer.state.") if like == "numbers" else ("model.", f"{key}.state.")
    equations = [
        f'[[map]]\neq = "{b}{old}{end} <=> {a}{made}{end}"\n'
        for (b, a), end in zip(zip(before, after), ("", ".exp_avg"))
        for old, made in new.items()
    ]
    (tmp_path / "map.toml").write_text("".join(equations))
    loaded = transformed(src, tmp_path / "dst", to="torch", map=tmp_path / "map.toml", forward=True, like=template)
    assert {name: value_of(value) for name, value in loaded["model"].items()} == {"c.w": 0, "d.w": 1}
    optimizer = loaded[key]
    for at, name in enumerate(("c.w", "d.w")):
        if like == "flat":
            rate = optimizer[f"param_groups.{name}.lr"]
            state = {kind: optimizer[f"state.{name}.{kind}"] for kind in ("exp_avg", "note")}
        else:
            groups = optimizer["param_groups"]
            group = next(group for group in groups if name in group.get("param_names", group["params"]))
            (number,) = group["params"]
            rate, state = group["lr"], optimizer["state"][number]
        assert rate == 0.1 + 0.1 * at
        assert value_of(state["exp_avg"]) == 10 + at and state["note"] == at


def test_groups_of_a_second_optimizer_without_state_are_left_alone(tmp_path: Path) -> None:
    """Nothing tells which of them is which, though the first optimizer has state."""

    def saved(path: Path, rates: list[float]) -> Path:
        first = {"state": {0: {"exp_avg": tensor(1)}}, "param_groups": [{"lr": rates[0], "params": [0]}]}
        groups = [{"lr": rate, "params": [number]} for number, rate in enumerate(rates[1:])]
        model = {"a.w": tensor(0)}
        torch_peer.save(path, {"model": model, "one": first, "two": {"state": {}, "param_groups": groups}})
        return path

    src, like = saved(tmp_path / "x.pt", [0.1, 0.2, 0.3]), saved(tmp_path / "like.pt", [0.9, 0.8, 0.7])
    report = reshard_mpi.transform(src, tmp_path / "dst", to="torch", map="{p*}.w <=> {p*}.w", like=like)
    loaded = tree_of(tmp_path / "dst")
    assert [group["lr"] for group in loaded["one"]["param_groups"]] == [0.1]
    assert [group["lr"] for group in loaded["two"]["param_groups"]] == [0.8, 0.7]
    assert any("the settings of two.param_groups are those of" in note for note in report.notes)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_what_is_computed_of_settings_is_so_in_every_form(tmp_path: Path, form: str) -> None:
    """MindSpore's powers of betas, and what is said of AdamW."""
    settings = {"lr": 0.25, "betas": (0.5, 0.75), "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    name: Any = 0 if form == "numbers" else "fc.bias"
    step = stored(np.float32(3))
    state = {"step": step, "exp_avg": tensor(1), "exp_avg_sq": tensor(2)}
    optimizer: dict[str, Any] = {"state": {name: state}, "param_groups": [{**settings, "params": [name]}]}
    if form == "flat":
        optimizer = {f"state.fc.bias.{key}": value for key, value in state.items()}
        optimizer |= {f"param_groups.fc.bias.{key}": value for key, value in settings.items()}
    torch_peer.save(tmp_path / "x.pt", {"fc.bias": tensor(5), "optimizer": optimizer})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="ckpt", map="torch-mindspore", forward=True)
    loaded = reshard_mpi.load_rank(0, tmp_path / "dst")
    assert (loaded["beta1_power"], loaded["beta2_power"], loaded["learning_rate"]) == (0.125, 0.75**3, 0.25)


@pytest.mark.parametrize("are_named", [False, True])
def test_groups_without_state_go_by_their_names_or_stay(tmp_path: Path, are_named: bool) -> None:
    names = ("a.w", "b.w")
    groups = [
        {"lr": rate, "params": [number], **({"param_names": [names[number]]} if are_named else {})}
        for number, rate in enumerate((0.1, 0.9))
    ]
    optimizer = {"state": {}, "param_groups": groups}
    torch_peer.save(tmp_path / "x.pt", {"model": {name: tensor(1) for name in names}, "optimizer": optimizer})
    pairs = (("model.a.w", "model.b.w"), ("model.b.w", "model.a.w"))
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs))
    report = reshard_mpi.transform(
        tmp_path / "x.pt", tmp_path / "dst", to="torch", map=tmp_path / "map.toml", forward=True
    )
    loaded = tree_of(tmp_path / "dst")["optimizer"]["param_groups"]
    if are_named:
        assert [(group["lr"], group["params"]) for group in loaded] == [(0.1, ["b.w"]), (0.9, ["a.w"])]
        assert any("goes by names of parameters" in note for note in report.notes)
    else:
        assert [(group["lr"], group["params"]) for group in loaded] == [(0.1, [0]), (0.9, [1])]
        assert any("without the optimizer's state nothing tells whose they are" in note for note in report.notes)


def test_a_schedulers_values_by_group_are_the_sources_whatever_the_number_of_groups(tmp_path: Path) -> None:
    def saved(path: Path, rate: float, decays: list[float]) -> Path:
        groups: list[dict[str, Any]] = [
            {"lr": rate, "decay": decay, "params": [], "param_names": []} for decay in decays
        ]
        for number, name in enumerate(("a.w", "b.w")):
            group = groups[min(number, len(groups) - 1)]
            group["params"].append(number)
            group["param_names"].append(name)
        state = {number: {"exp_avg": tensor(1)} for number in range(2)}
        model = {name: tensor(0) for name in ("a.w", "b.w")}
        scheduler: dict[str, Any] = {"base_lrs": [rate] * len(groups)}
        scheduler["_schedulers"] = [dict(scheduler), {**scheduler, "last_epoch": round(10 * rate)}]
        torch_peer.save(
            path, {"model": model, "optimizer": {"state": state, "param_groups": groups}, "scheduler": scheduler}
        )
        return path

    src, like = saved(tmp_path / "x.pt", 0.1, [0.0, 0.5]), saved(tmp_path / "like.pt", 0.9, [0.0])
    loaded = transformed(src, tmp_path / "dst", to="torch", map="{p*}.w <=> {p*}.w", like=like)
    inner = [{"base_lrs": [0.1]}, {"base_lrs": [0.1], "last_epoch": 1}]
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert loaded["scheduler"] == {"base_lrs": [0.1], "_schedulers": inner}


def test_unlike_values_of_a_scheduler_are_not_dealt_to_more_groups(tmp_path: Path) -> None:
    """Without state nothing tells which group is which: they are the other checkpoint's, and so is the scheduler."""

    def saved(path: Path, rates: list[float]) -> Path:
        groups = [{"lr": rate, "params": [number]} for number, rate in enumerate(rates)]
        optimizer = {"state": {}, "param_groups": groups}
        saved = {"model": {"a.w": tensor(0)}, "optimizer": optimizer, "scheduler": {"base_lrs": rates}}
        torch_peer.save(path, saved)
        return path

    src, like = saved(tmp_path / "x.pt", [0.1, 0.2]), saved(tmp_path / "like.pt", [0.7, 0.8, 0.9])
    report = reshard_mpi.transform(src, tmp_path / "dst", to="torch", map="{p*}.w <=> {p*}.w", like=like)
    loaded = tree_of(tmp_path / "dst")
    assert [group["lr"] for group in loaded["optimizer"]["param_groups"]] == [0.7, 0.8, 0.9]
    assert loaded["scheduler"] == {"base_lrs": [0.7, 0.8, 0.9]}
    assert any("nothing tells which group is which" in note for note in report.notes)


def test_settings_of_a_flat_optimizer_that_are_tensors_follow(tmp_path: Path) -> None:
    optimizer = {"state.a.w.exp_avg": tensor(1), "param_groups.a.w.lr": tensor(2), "param_groups.a.w.eps": 0.5}
    saved = {"a.w": tensor(0), "opt": optimizer}
    loaded = tree_made_of(tmp_path, saved, to="torch", map="a.w <=> b.w", forward=True)
    assert {*loaded["opt"]} == {"state.b.w.exp_avg", "param_groups.b.w.lr", "param_groups.b.w.eps"}


@pytest.mark.parametrize("left", few(1, ["state.a.w.step", "param_groups.a.w.lr"]))
def test_single_numbers_of_a_renamed_parameter_do_not_stay(tmp_path: Path, left: str) -> None:
    """Its state has equations, since its names lack what the model's begin with; a count or rate has none."""
    single = stored(np.array(3, np.float32))
    optimizer = {"state.a.w.exp_avg": tensor(1), left: single, "param_groups.a.w.eps": 0.5}
    torch_peer.save(tmp_path / "x.pt", {"model": {"a.w": tensor(0)}, "optim": optimizer})
    asked: dict[str, Any] = {"to": "torch", "map": tmp_path / "map.toml", "forward": True}

    def mapped(*pairs: tuple[str, str]) -> None:
        (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs))
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", overwrite=True, **asked)

    moment = ("optim.state.a.w.exp_avg", "optim.state.b.w.exp_avg")
    with pytest.raises(MapError, match="would stay as it is"):
        mapped(("model.a.w", "model.b.w"), moment)
    mapped(("model.a.w [a b]", "net.a.w [b a]"), ("optim.state.a.w.exp_avg [a b]", "optim.state.a.w.exp_avg [b a]"))
    assert {*tree_of(tmp_path / "dst")["optim"]} == optimizer.keys()
    mapped(("model.a.w", "model.b.w"), moment, (f"optim.{left}", f"optim.{left.replace('.a.', '.b.')}"))
    assert {*tree_of(tmp_path / "dst")["optim"]} == {key.replace(".a.", ".b.") for key in optimizer}


@pytest.mark.parametrize("form", ["names", "flat"])
@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_state_of_a_wrapped_model_goes_with_what_is_excluded(tmp_path: Path, wrapper: str, form: str) -> None:
    of_form(tmp_path / "y.pt", (f"{wrapper}.a.w", f"{wrapper}.b.w"), "optim", form, own=True)
    tree = torch_peer.load(tmp_path / "y.pt")
    tree["model"] = {name.removeprefix(f"{wrapper}."): value for name, value in tree["model"].items()}
    torch_peer.save(tmp_path / "x.pt", tree)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", exclude=["model.b.w"])
    left = [name for name in reshard_mpi.load_rank(0, tmp_path / "dst") if "exp_avg" in name]
    assert left == [f"optim.state.{wrapper}.a.w.exp_avg"]


@pytest.mark.parametrize("form", few(1, ["names", "flat"]))
@pytest.mark.parametrize("wrapper", few(1, ["net", "trainer.module"]))
@pytest.mark.parametrize("mapped", few(1, [False, True]))
def test_state_behind_another_name_does_not_outlive_what_is_excluded(
    tmp_path: Path, wrapper: str, form: str, mapped: bool
) -> None:
    """It may be state of another model, which is not in the file."""
    of_form(tmp_path / "y.pt", (f"{wrapper}.a.w", f"{wrapper}.b.w"), "optim", form, own=True)
    tree = torch_peer.load(tmp_path / "y.pt")
    tree["model"] = {name.removeprefix(f"{wrapper}."): value for name, value in tree["model"].items()}
    tree["ema"] = {name: tensor(0) for name in tree["model"]}
    tree["mean"] = tensor(0)
    torch_peer.save(tmp_path / "x.pt", tree)
    options: dict[str, Any] = {"to": "torch"}
    options |= {"map": "mean <=> average", "forward": True} if mapped else {}
    with pytest.raises(MapError, match=r"model\.b\.w is excluded, and its state may not be") as raised:
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["model.b.w"], **options)
    assert f"--exclude 'optim.state.{wrapper}.b.w.*'" in str(raised.value)
    state = [f"optim.state.{wrapper}.b.w.*"]
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["model.b.w", *state], **options)
    assert f"optim.state.{wrapper}.a.w.exp_avg" in reshard_mpi.load_rank(0, tmp_path / "dst")
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "kept", exclude=["ema.*"], **options)


@pytest.mark.parametrize("form", few(1, ["names", "flat", "numbers"]))
def test_groups_of_an_optimizer_without_state_have_the_names_of_one_model(tmp_path: Path, form: str) -> None:
    """Of a part that goes to another key, names in the groups would be whole, and of the rest they would not."""
    of_form(tmp_path / "y.pt", ("a.w", "b.w"), "optim", form, own=True)
    tree = torch_peer.load(tmp_path / "y.pt")
    if form == "flat":
        tree["optim"] = {key: value for key, value in tree["optim"].items() if not key.startswith("state.")}
    else:
        tree["optim"]["state"] = {}
    torch_peer.save(tmp_path / "x.pt", tree)
    with pytest.raises(MapError, match="parameters of one optimizer are put into several models"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map="model.a.{p*} <=> net.{p*}", forward=True)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", map="model.a.{p*} <=> model.net.{p*}", forward=True)


@pytest.mark.parametrize("form", ["names", "flat", "numbers"])
def test_what_is_not_included_is_excluded(tmp_path: Path, form: str) -> None:
    of_form(tmp_path / "x.pt", ("a.w", "b.w"), "optim", form, own=True)
    for chosen in ({"include": ["model.a.*", "optim.*"]}, {"exclude": "model.b.w"}):
        if form != "numbers" and "exclude" in chosen:  # it goes along
            continue
        with pytest.raises(MapError, match=r"model\.b\.w is excluded, and its state is not"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **chosen)
    for number, chosen in enumerate(({"include": "*a.w*"}, {"exclude": "*b.w*"})):
        if form != "numbers":
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / f"dst{number}", **chosen)
    if form != "numbers":
        first, second = (tree_of(tmp_path / f"dst{number}")["optim"] for number in range(2))
        assert first.keys() == second.keys()
        if form == "names":
            assert first["param_groups"][0]["params"] == second["param_groups"][0]["params"] == ["a.w"]
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "state", include="optim.*")  # a whole model may be left out


@pytest.mark.parametrize("is_named", few(1, [False, True]))
def test_numbers_of_two_optimizers_do_not_outlive_a_part_of_a_model(tmp_path: Path, is_named: bool) -> None:
    """As of a generator and its opponent: nothing tells which optimizer is whose, and the numbers behind would move."""
    tree = {}
    for key in "gd":
        of_form(tmp_path / "y.pt", ("a.w", "b.w"), "optim", "numbers", own=True)
        one = torch_peer.load(tmp_path / "y.pt")
        for number, state in one["optim"]["state"].items():
            state["exp_avg"] = stored(np.full(2, number, np.float32))
        for number, name in enumerate(one["model"]):
            one["model"][name] = stored(np.full(2, number, np.float32))
        for group in one["optim"]["param_groups"] * (not is_named):
            del group["param_names"]
        tree |= {key: one["model"], f"opt_{key}": one["optim"]}
    torch_peer.save(tmp_path / "x.pt", tree)
    with pytest.raises(MapError, match=r"g\.b\.w is excluded, and its state may not be"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["g.b.w"])
    for number, exclude in enumerate((["g.b.w", "opt_?.state.1.*"], ["g.*", "opt_g.*"], ["g.*"])):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / f"dst{number}", exclude=exclude)


@pytest.mark.parametrize("form", ["names", "flat"])
@pytest.mark.parametrize("name", few(1, ["state.0.w", "ema.w", "step.w", "exp_avg.w"]))
def test_state_goes_with_a_parameter_that_has_a_word_for_state_in_its_name(
    tmp_path: Path, name: str, form: str
) -> None:
    of_form(tmp_path / "x.pt", (name, "a.w"), "optim", form, own=True)
    made = transformed(tmp_path / "x.pt", tmp_path / "dst", to="torch", exclude=[f"model.{name}"])
    assert [*made["model"]] == ["a.w"] and name not in str(made["optim"])


@pytest.mark.parametrize("form", ["numbers", "names"])
def test_a_parameter_gets_the_name_of_a_module_whose_others_go_elsewhere(tmp_path: Path, form: str) -> None:
    """Its state is tensors alone, and lies in a dictionary of its own."""
    names = ["a.b", "a.c"]
    keys = [0, 1] if form == "numbers" else names
    state = {key: {"exp_avg": tensor(10 + at), "exp_avg_sq": tensor(20 + at)} for at, key in enumerate(keys)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": keys, "param_names": names}]}
    begin = "model." if form == "numbers" else ""  # the names below `model.` go for a whole training by names
    pairs = [(f"{begin}a.c", f"{begin}a"), (f"{begin}a.b", f"{begin}x")]
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs))
    how: dict[str, Any] = {"to": "torch", "map": tmp_path / "map.toml", "forward": True}
    saved = {"model": {name: tensor(0) for name in names}, "optimizer": optimizer}
    made = tree_made_of(tmp_path, saved, **how)["optimizer"]["state"]
    found = {name: {kind: value_of(moment) for kind, moment in moments.items()} for name, moments in made.items()}
    assert found == {"a": {"exp_avg": 11, "exp_avg_sq": 21}, "x": {"exp_avg": 10, "exp_avg_sq": 20}}


@pytest.mark.parametrize("form", few(2, FORMS))
@pytest.mark.parametrize(("excluded", "left"), few(1, [("model.b.w", ["a.w"]), ("optim.state.b.w.*", ["a.w", "b.w"])]))
def test_without_a_map_a_parameter_that_is_left_out_is_in_no_group_by_names(
    tmp_path: Path, form: str, excluded: str, left: list[str]
) -> None:
    """A number says nothing without those before it, so it stays."""
    of_form(tmp_path / "x.pt", ("a.w", "b.w"), "optim", form, own=True)
    globs = [*(["model.b.w"] if left == ["a.w"] else []), "optim.state.1.*"] if form == "numbers" else [excluded]
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", exclude=globs)
    before = torch_peer.load(tmp_path / "x.pt")["optim"]
    optimizer = tree_of(tmp_path / "dst")["optim"]
    if form == "flat":
        assert [name for name in ("a.w", "b.w") if f"param_groups.{name}.lr" in optimizer] == left
    elif form == "names":
        assert [name for group in optimizer["param_groups"] for name in group["params"]] == left
    else:
        assert optimizer["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("form", ["numbers", "names"])
def test_a_copy_of_parameters_that_are_treated_differently_is_refused(tmp_path: Path, form: str) -> None:
    for rates, at in (((0.1, 0.2), 0), ((0.1, 0.1), 1)):
        names = ("a.w", "b.w")
        keys: list[Any] = [0, 1] if form == "numbers" else [*names]
        groups = [{"lr": rate, "params": [key], "param_names": [n]} for rate, key, n in zip(rates, keys, names)]
        if at:
            groups = [{"lr": 0.1, "params": keys, "param_names": [*names]}]
        state = {key: {"exp_avg": tensor(1)} for key in keys}
        torch_peer.save(
            tmp_path / f"{at}.pt",
            {"model": {n: tensor(0) for n in names}, "optim": {"state": state, "param_groups": groups}},
        )
    text = '[[map]]\ncopy = true\neq = "model.a.w [v h], model.b.w [v h] <=> model.tied [v h]"\n'
    text += text.replace("model.", "optim.state.").replace(" [", ".exp_avg [") if form == "names" else ""
    (tmp_path / "map.toml").write_text(text)
    asked: dict[str, Any] = {"to": "torch", "map": tmp_path / "map.toml", "forward": True}
    with pytest.raises(MapError, match="treats differently"):
        reshard_mpi.transform(tmp_path / "0.pt", tmp_path / "dst", **asked)
    optimizer = transformed(tmp_path / "1.pt", tmp_path / "dst", **asked)["optim"]
    assert [*optimizer["state"]] == optimizer["param_groups"][0]["params"] == ["tied"]


@pytest.mark.parametrize("form", few(1, FORMS))
@pytest.mark.parametrize("steps", [(3, 3), (3, 4)])
def test_steps_that_are_plain_numbers_are_counted(tmp_path: Path, form: str, steps: tuple[int, int]) -> None:
    """As torch had them before 1.12, and other optimizers have."""
    settings = {"lr": 0.25, "betas": (0.5, 0.75)}
    names = ("fc.bias", "out.bias")
    keys: list[Any] = [0, 1] if form == "numbers" else [*names]
    state = {key: {"step": step, "exp_avg": tensor(1), "exp_avg_sq": tensor(2)} for key, step in zip(keys, steps)}
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{**settings, "params": keys}]}
    if form == "flat":
        optimizer = {f"state.{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        optimizer |= {f"param_groups.{name}.{key}": value for name in names for key, value in settings.items()}
    torch_peer.save(tmp_path / "x.pt", {**{name: tensor(5) for name in names}, "optimizer": optimizer})
    asked: dict[str, Any] = {"to": "ckpt", "map": "torch-mindspore", "forward": True}
    if steps[0] != steps[1]:
        with pytest.raises(MapError, match="different numbers of steps"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **asked)
        return
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", **asked)
    loaded = reshard_mpi.load_rank(0, tmp_path / "dst")
    assert (loaded["global_step"], loaded["beta1_power"], loaded["beta2_power"]) == (3, 0.125, 0.75**3)


@pytest.mark.parametrize("rates", ["tensor", "unlike"])
def test_a_number_that_a_setting_does_not_give_is_told(tmp_path: Path, rates: str) -> None:
    single = stored(np.array(0.5, np.float32))
    state = {at: {"exp_avg": tensor(1), "exp_avg_sq": tensor(2)} for at in (0, 1)}
    groups: list[dict[str, Any]] = [{"lr": single, "params": [0, 1], "param_names": ["a.bias", "b.bias"]}]
    if rates == "unlike":
        groups = [{"lr": at + 0.5, "params": [at], "param_names": [f"{'ab'[at]}.bias"]} for at in (0, 1)]
    optimizer = {"state": state, "param_groups": groups}
    torch_peer.save(tmp_path / "x.pt", {"a.bias": tensor(5), "b.bias": tensor(6), "optimizer": optimizer})
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="ckpt", map="torch-mindspore", forward=True)
    assert any("learning_rate is not made, since lr" in warning for warning in report.warnings)


@pytest.mark.parametrize("form", few(1, FORMS))
@pytest.mark.parametrize("is_mapped", [False, True])
def test_state_of_a_parameter_that_is_excluded_does_not_stay(tmp_path: Path, form: str, is_mapped: bool) -> None:
    of_form(tmp_path / "x.pt", ("a.w", "b.w"), "optim", form, own=True)
    pairs = ("model.a.w",) if form == "numbers" else ("model.a.w", "optim.state.a.w.exp_avg")
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{name} <=> {name}"\n' for name in pairs))
    asked: dict[str, Any] = {"to": "torch", **({"map": tmp_path / "map.toml", "forward": True} if is_mapped else {})}
    own = ["optim.state.1.*"] if form == "numbers" and not is_mapped else ["optim.state.b.w.*"]
    if form == "numbers" and not is_mapped:  # else it goes with its parameter
        with pytest.raises(MapError, match=r"b\.w is excluded, and its state is not|optim\.state\.b\.w"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["model.b.w"], **asked)
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["model.b.w", *own], **asked)
    else:
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", exclude=["model.b.w"], **asked)
    left = [name for name in reshard_mpi.load_rank(0, tmp_path / "dst") if "exp_avg" in name]
    assert left == ["optim.state.0.exp_avg" if form == "numbers" and not is_mapped else "optim.state.a.w.exp_avg"]


def test_powers_are_checked_in_a_chain_too(tmp_path: Path) -> None:
    """Backwards the betas are those of the checkpoint that the last map is to make one like."""

    def saved(name: str, path: Path, beta: float) -> Path:
        group = {"lr": 0.25, "betas": (beta, 0.75), "params": [0]}
        step = stored(np.float32(3))
        optimizer = {
            "state": {0: {"step": step, "exp_avg": tensor(1), "exp_avg_sq": tensor(2)}},
            "param_groups": [group],
        }
        torch_peer.save(path, {name: tensor(5), "optimizer": optimizer})
        return path

    saved("fc.bias", tmp_path / "x.pt", 0.5)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "ms", to="ckpt", map="torch-mindspore", forward=True)
    maps = ["torch-mindspore", "new.bias <=> fc.bias"]
    asked: dict[str, Any] = {"to": "torch", "map": maps, "reverse": True}
    reshard_mpi.transform(tmp_path / "ms", tmp_path / "dst", like=saved("new.bias", tmp_path / "like.pt", 0.5), **asked)
    with pytest.raises(MapError, match="beta1_power does not belong"):
        saved("new.bias", tmp_path / "like.pt", 0.625)
        reshard_mpi.transform(tmp_path / "ms", tmp_path / "other", like=tmp_path / "like.pt", **asked)


@pytest.mark.parametrize("like", ["names", "flat"])
def test_a_parameter_whose_name_ends_anothers_has_its_own_settings(tmp_path: Path, like: str) -> None:
    names = ("norm.w", "enc.norm.w")
    of_form(tmp_path / "x.pt", names, "optim", "numbers", own=True)
    template = of_form(tmp_path / "like.pt", names, "optimizer", like, own=False)
    state = '[[map]]\neq = "optimizer.state.{p*}.exp_avg <=> optimizer.state.{p*}.exp_avg"\n'
    (tmp_path / "map.toml").write_text('[[map]]\neq = "{p*}.w <=> model.{p*}.w"\n' + state)
    optimizer = transformed(
        tmp_path / "x.pt", tmp_path / "dst", to="torch", map=tmp_path / "map.toml", forward=True, like=template
    )["optimizer"]
    for at, name in enumerate(names):
        if like == "flat":
            rate, note = (optimizer[key] for key in (f"param_groups.{name}.lr", f"state.{name}.note"))
        else:
            rate, note = optimizer["param_groups"][at]["lr"], optimizer["state"][name]["note"]
        assert (rate, note) == (0.1 + 0.1 * at, at)


def test_state_of_another_shape_does_not_stay_under_an_old_name(tmp_path: Path) -> None:
    """As Adafactor has it, of rows and columns; its names lack what the model's begin with."""
    row = stored(np.zeros(3, np.float32))
    optimizer = {"state": {"a.w": {"exp_avg_sq_row": row}}, "param_groups": [{"lr": 0.5, "params": ["a.w"]}]}
    torch_peer.save(tmp_path / "x.pt", {"model": {"a.w": tensor(0)}, "optim": optimizer})
    for equation in ("model.a.w <=> model.b.w", "model.a.w [o i] <=> model.a.w [i o]"):
        with pytest.raises(MapError, match="would stay as it is"):
            reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", map=equation, forward=True)


def test_equations_of_some_state_leave_other_state_alone(tmp_path: Path) -> None:
    of_form(tmp_path / "x.pt", ("a.w", "b.w"), "optim", "names", own=True)
    pairs = [(f"{begin}a.w{end}", f"{begin}c.w{end}") for begin, end in (("model.", ""), ("optim.state.", ".exp_avg"))]
    (tmp_path / "map.toml").write_text("".join(f'[[map]]\neq = "{old} <=> {new}"\n' for old, new in pairs))
    made = transformed(tmp_path / "x.pt", tmp_path / "dst", to="torch", map=tmp_path / "map.toml", forward=True)
    assert {name: state["note"] for name, state in made["optim"]["state"].items()} == {"c.w": 0, "b.w": 1}


@pytest.mark.parametrize("like", [False, True])
def test_a_flat_optimizer_does_not_have_the_names_of_the_source(tmp_path: Path, like: bool) -> None:
    """torch takes over those of the first parameter that its own optimizer has in a group, in whatever order."""

    def saved(path: Path, names: tuple[str, ...]) -> Path:
        optimizer: dict[str, Any] = {f"state.{name}.exp_avg": tensor(1) for name in names}
        optimizer |= {f"param_groups.{name}.param_names": [*names] for name in names}
        torch_peer.save(path, {**{name: tensor(1) for name in names}, "optim": optimizer})
        return path

    source = saved(tmp_path / "x.pt", ("a.w", "b.w"))
    asked: dict[str, Any] = {"like": saved(tmp_path / "like.pt", ("a.w", "new.w"))} if like else {}
    for equation, names in (("b.w <=> new.w", ("a.w", "new.w")), ("a.w <=> a.w", ("a.w", "b.w"))):
        if like and "b.w" in names:
            continue
        folder = tmp_path / names[1]
        optimizer = transformed(source, folder, to="torch", map=equation, forward=True, **asked)["optim"]
        told = [] if "new.w" in names and not like else [*names]
        assert {key: optimizer[key] for key in optimizer if key.startswith("param_groups")} == {
            f"param_groups.{name}.param_names": told for name in names
        }


def test_flat_optimizers_of_stages_do_not_have_the_names_of_one_stage(tmp_path: Path) -> None:
    for stage, names in enumerate((("l0", "l1"), ("l2", "l3"))):
        optimizer = {f"param_groups.{name}.param_names": [*names] for name in names}
        optimizer |= {f"param_groups.{name}.lr": 0.5 for name in names}
        (tmp_path / "src" / f"rank_{stage}").mkdir(parents=True)
        model = {name: tensor(stage) for name in names}
        torch_peer.save(tmp_path / "src" / f"rank_{stage}" / "x.pt", {"model": model, "optim": optimizer})
    (tmp_path / "stages.toml").write_text('mesh = { data = 1 }\nstages = 2\n[[parameter]]\nmatch = "*"\n')
    optimizer = transformed(tmp_path / "src", tmp_path / "dst", tmp_path / "stages.toml", to="torch")["optim"]
    assert optimizer == {
        f"param_groups.l{at}.{key}": value for key, value in (("param_names", []), ("lr", 0.5)) for at in range(4)
    }


@pytest.mark.parametrize("form", few(1, ["names", "flat"]))
@pytest.mark.parametrize("way", few(2, ["exclude", "exclude with a map", "drop"]))
def test_state_is_not_left_out_with_a_parameter_whose_name_stands_in_its_own(
    tmp_path: Path, form: str, way: str
) -> None:
    """The tensor `model.fc` is `fc` to the optimizer, whose `model.fc` is the tensor `model.model.fc`."""
    of_form(tmp_path / "x.pt", ("model.fc", "fc", "a"), "optim", form, own=True)
    globs = ["model.fc", "optim.state.fc.*"]
    asked: dict[str, Any] = {} if way == "drop" else {"exclude": globs}
    if way != "exclude":
        drops = [f"[[map]]\ndrop = '{glob}'\noptional = true\n" for glob in (globs if way == "drop" else ())]
        pairs = [("model.a", "model.b"), ("optim.state.a.exp_avg", "optim.state.b.exp_avg")]
        equations = [f"[[map]]\neq = '{old} <=> {new}'\n" for old, new in pairs]
        (tmp_path / "map.toml").write_text("".join((*equations, *drops)))
        asked |= {"map": tmp_path / "map.toml", "forward": True}
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", **asked)
    name = "a" if way == "exclude" else "b"
    loaded = tree_of(tmp_path / "dst")
    assert {*loaded["model"]} == {"model.fc", name}
    held = loaded["optim"]
    moments = {
        own: held[f"state.{own}.exp_avg"] if form == "flat" else held["state"][own]["exp_avg"]
        for own in ("model.fc", name)
    }
    assert {own: value_of(moment) for own, moment in moments.items()} == {"model.fc": 10, name: 12}
    assert not any("whose state they are" in note and "model.fc" in note for note in report.notes)


def test_state_goes_with_the_parameter_that_its_optimizer_means(tmp_path: Path) -> None:
    of_form(tmp_path / "x.pt", ("model.fc", "fc"), "optim", "names", own=True)
    held = transformed(tmp_path / "x.pt", tmp_path / "dst", to="torch", exclude=["model.model.fc"])["optim"]["state"]
    assert {name for name, state in held.items() if "exp_avg" in state} == {"fc"}


@few_cases(1, "groups", [({"params": ["a.w"]},), [{"params": ("a.w",)}], {"all": {"params": ["a.w"]}}])
@pytest.mark.parametrize("like", few(1, [False, True]))
def test_groups_that_are_kept_otherwise_do_not_keep_old_names(tmp_path: Path, groups: Any, like: bool) -> None:
    saved = {"a.w": tensor(1), "b.w": tensor(2), "optim": {"state": {"a.w": {"m": tensor(3)}}, "param_groups": groups}}
    torch_peer.save(tmp_path / "x.pt", saved)
    torch_peer.save(tmp_path / "like.pt", saved)
    asked: dict[str, Any] = {"map": "b.{p*} <=> b.{p*}", "like": tmp_path / "like.pt" if like else None}
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "stays", to="torch", **asked)
    asked = {"map": "a.{p*} <=> c.{p*}"}
    with pytest.raises(
        MapError, match=r"groups of an optimizer(.|\n)*optim.state.a.w.m, which becomes optim.state.c.w.m"
    ):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "dst", to="torch", **asked)
    assert not (tmp_path / "dst").exists()
    without = saved["optim"] | {"param_groups": [{"lr": 0.1}]}  # which names none
    assert [*tree_made_of(tmp_path, saved | {"optim": without}, to="torch", **asked)["optim"]["state"]] == ["c.w"]
