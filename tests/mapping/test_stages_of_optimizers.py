"""Optimizers that stages of a pipeline have saved are joined, or refused."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.examples import few, few_cases
from support.torch_runs import stored, transformed, tree_of

import reshard_mpi
from reshard_mpi.errors import DisagreementError, StrategyError

Groups = Sequence[Sequence[str]]  # the parameters of each


def tensor(value: float = 0.0) -> Any:
    return stored(np.full((2, 2), value, np.float32))


def saved(folder: Path, stages: Sequence[Groups], settings: Callable[[str], dict[str, Any]], kind: type = dict) -> Path:
    """Save stages whose optimizers name their parameters. settings: of the group with this first parameter."""
    for stage, groups in enumerate(stages):
        names = [name for group in groups for name in group]
        optimizer = kind(
            state=kind((name, kind(exp_avg=tensor(), note=name)) for name in names),
            param_groups=[{**settings(group[0]), "params": [*group]} for group in groups],
        )
        (folder / f"rank_{stage}").mkdir(parents=True)
        torch_peer.save(
            folder / f"rank_{stage}" / "x.pt", {"model": {name: tensor() for name in names}, "optim": optimizer}
        )
    (folder / "stages.toml").write_text(f"mesh = {{ data = 1 }}\nstages = {len(stages)}\n[[parameter]]\nmatch = '*'\n")
    return folder


def joined(source: Path, folder: Path) -> Any:
    return transformed(source, folder, source / "stages.toml", to="torch")["optim"]


def test_a_parameter_is_in_one_group_by_way_of_other_stages(tmp_path: Path) -> None:
    """Groups of equal settings; a stage has one of them only."""
    stages = [[["h"], ["c"]], [["a"], ["d"]], [["b"]]]
    source = saved(tmp_path / "src", stages, lambda _: {"lr": 0.5})
    new = {"c": 0, "d": 0, "h": 1, "a": 2, "b": 2}
    rules = (f"[[parameter]]\nmatch = ['*.{name}', '*.{name}.*']\nstage = {at}\n" for name, at in new.items())
    (tmp_path / "new.toml").write_text("mesh = { data = 1 }\nstages = 3\n" + "".join(rules))
    reshard_mpi.transform(
        source, tmp_path / "new", source / "stages.toml", dst_strategy=tmp_path / "new.toml", to="torch"
    )
    groups = transformed(tmp_path / "new", tmp_path / "one", tmp_path / "new.toml", to="torch")["optim"]["param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == ["a", "b", "c", "d", "h"]


@pytest.mark.parametrize("more_at", ["first stage", "last stage"])
def test_settings_that_are_tensors_stay_with_their_group(tmp_path: Path, more_at: str) -> None:
    rate = tensor(0.5)

    def settings(name: str) -> dict[str, Any]:
        return {"lr": rate, "decay": float(name == "x")}

    stages = [[["a"]], [["b"], ["x"]]]
    source = saved(tmp_path / "src", stages if more_at == "last stage" else stages[::-1], settings)
    optimizer = joined(source, tmp_path / "dst")
    assert {*optimizer["state"]} == {"a", "b", "x"}
    assert [({*group["params"]}, group["decay"]) for group in optimizer["param_groups"]] == [
        ({"a", "b"}, 0),
        ({"x"}, 1),
    ]
    assert all("lr" in group for group in optimizer["param_groups"])


def test_settings_that_are_tensors_in_another_place_are_refused(tmp_path: Path) -> None:
    stages = [[["a"]], [["x"], ["b"]]]
    source = saved(tmp_path / "src", stages, lambda name: {"lr": tensor(0.5), "decay": float(name == "x")})
    with pytest.raises(DisagreementError, match="settings that are tensors, and groups in other places"):
        joined(source, tmp_path / "dst")


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_optimizers_that_are_ordered_dictionaries_are_joined(tmp_path: Path, kind: type) -> None:
    source = saved(tmp_path / "src", [[["a"]], [["b"], ["x"]]], lambda name: {"lr": float(name == "x")}, kind)
    optimizer = joined(source, tmp_path / "dst")
    assert {name: (state["note"], "exp_avg" in state) for name, state in optimizer["state"].items()} == {
        name: (name, True) for name in "abx"
    }
    assert [({*group["params"]}, group["lr"]) for group in optimizer["param_groups"]] == [({"a", "b"}, 0), ({"x"}, 1)]
    assert type(optimizer) is type(optimizer["state"]) is kind


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_is_no_tensor_is_kept_of_every_stage_of_a_model_that_torch_says_more_of(
    tmp_path: Path, kind: type
) -> None:
    """`_metadata` of two stages never agree; extra state of modules and the optimizer lie beside the tensors."""
    for stage in range(2):
        name = f"layers.{stage}"
        model = kind([(f"{name}.weight", tensor()), (f"{name}._extra_state", {"amax": stage})])
        model["optim"] = {
            "state": {f"{name}.weight": {"exp_avg": tensor()}},
            "param_groups": [{"lr": 0.5, "params": [f"{name}.weight"]}],
        }
        if kind is OrderedDict:
            model._metadata = OrderedDict({"": {"version": 1}, name: {"version": 1 + stage}})
        (tmp_path / f"rank_{stage}").mkdir()
        torch_peer.save(tmp_path / f"rank_{stage}" / "x.pt", model)
    (tmp_path / "stages.toml").write_text("mesh = { data = 1 }\nstages = 2\n[[parameter]]\nmatch = '*'\n")
    report = reshard_mpi.transform(tmp_path, tmp_path / "dst", tmp_path / "stages.toml", to="torch")
    whole = tree_of(tmp_path / "dst")
    assert [whole[f"layers.{stage}._extra_state"] for stage in range(2)] == [{"amax": 0}, {"amax": 1}]
    names = ["layers.0.weight", "layers.1.weight"]
    assert [*whole["optim"]["state"]] == names
    assert [group["params"] for group in whole["optim"]["param_groups"]] == [names]
    if kind is OrderedDict:
        assert {name: each["version"] for name, each in whole._metadata.items()} == {
            "": 1,
            "layers.0": 1,
            "layers.1": 2,
        }
    assert not [note for note in report.notes if "differs" in note]


# Optimizers with numbers, which mean other parameters in every stage


def numbered(folder: Path, states: Sequence[Sequence[int]], below: str = "optim") -> Path:
    """Save stages of two parameters each. states: the numbers of those that have state, by stage."""
    for stage, numbers in enumerate(states):
        names = [f"l{2 * stage + place}" for place in range(2)]
        optimizer = {
            "state": {number: {"exp_avg": tensor(stage)} for number in numbers},
            "param_groups": [{"lr": 0.5, "params": [0, 1]}],
        }
        optimizers: Any = [optimizer] if below == "a list" else optimizer
        (folder / f"rank_{stage}").mkdir(parents=True)
        path = folder / f"rank_{stage}" / "x.pt"
        torch_peer.save(path, {"model": {name: tensor() for name in names}, "optim": optimizers})
    (folder / "stages.toml").write_text(f"mesh = {{ data = 1 }}\nstages = {len(states)}\n[[parameter]]\nmatch = '*'\n")
    return folder


@pytest.mark.parametrize("form", few(1, ["torch", "safetensors"]))
@pytest.mark.parametrize("states", [([], [0, 1]), ([0], [1])])
@pytest.mark.parametrize("to_stages", few(1, [False, True]))
def test_numbers_of_another_stage_are_refused(
    tmp_path: Path, states: Sequence[Sequence[int]], form: str, to_stages: bool
) -> None:
    """One of them is frozen, or has not trained all of its parameters."""
    source = numbered(tmp_path / "src", states, "a list" if form == "torch" else "optim")
    rules = "".join(f"[[parameter]]\nmatch = 'model.l[{2 * at}{2 * at + 1}]'\nstage = {at}\n" for at in range(2))
    (tmp_path / "dst.toml").write_text(f"mesh = {{ data = 1 }}\nstages = 2\n{rules}")
    how = (source, tmp_path / "dst", source / "stages.toml", tmp_path / "dst.toml" if to_stages else None)
    with pytest.raises(DisagreementError, match="means another parameter"):
        reshard_mpi.transform(*how, to=form)
    assert not [*tmp_path.glob("dst/rank_*/*")]
    reshard_mpi.transform(*how, to=form, exclude=["optim.*"])


@pytest.mark.parametrize("states", few(1, [[], [0, 1]]))
@pytest.mark.parametrize("parameters", [2, 4])
def test_equal_optimizers_that_number_the_parameters_of_their_own_stage_are_warned_of(
    tmp_path: Path, states: Sequence[int], parameters: int
) -> None:
    """As of SGD without momentum, or with one that is zero still; one of all four parameters is the whole model's."""
    source = tmp_path / "src"
    for stage in range(2):
        optimizer = {
            "state": {number: {"momentum_buffer": tensor()} for number in states},
            "param_groups": [{"lr": 0.5, "params": [*range(parameters)]}],
        }
        names = [f"l{2 * stage}", f"l{2 * stage + 1}", "norm.running_mean"]
        (source / f"rank_{stage}").mkdir(parents=True)
        torch_peer.save(
            source / f"rank_{stage}/x.pt", {"model": {name: tensor() for name in names}, "optim": optimizer}
        )
    (source / "stages.toml").write_text("mesh = { data = 1 }\nstages = 2\n[[parameter]]\nmatch = '*'\n")
    warnings = reshard_mpi.transform(source, tmp_path / "dst", source / "stages.toml", to="torch").warnings
    assert any("optim.param_groups" in warning for warning in warnings) == (parameters == 2)


@pytest.mark.parametrize("homes", few(1, ["0101", "0011", "0000"]))
def test_numbers_that_the_strategy_does_not_list_are_those_of_one_stage(tmp_path: Path, homes: str) -> None:
    """Of interleaved stages (0101) each would have the state of both stages under one number."""
    source = numbered(tmp_path / "src", ([0, 1], [0, 1]))

    def strategy(name: str, homes: str) -> Path:
        rules = "".join(f"[[parameter]]\nmatch = 'model.l{at}'\nstage = {stage}\n" for at, stage in enumerate(homes))
        (tmp_path / name).write_text(f"mesh = {{ data = 1 }}\nstages = {len({*homes})}\n{rules}")
        return tmp_path / name

    how: Any = (source, tmp_path / "dst", strategy("src.toml", "0011"), strategy("dst.toml", homes))
    if homes == "0011":
        reshard_mpi.transform(*how, to="torch")
        for stage in range(2):
            state = reshard_mpi.load_rank(stage, tmp_path / "dst", tmp_path / "dst.toml", tmp_path / "dst.toml")
            assert state["optim.state.0.exp_avg"][0, 0] == stage
        with pytest.raises(StrategyError, match="other stages hold another"):  # which is one checkpoint
            reshard_mpi.transform(source, tmp_path / "dcp", *how[2:], to="dcp")
        return
    with pytest.raises(StrategyError, match=r"other stages hold another 'optim\.state\.0\.exp_avg' too"):
        reshard_mpi.transform(*how, to="torch")
    assert not [*tmp_path.glob("dst/rank_*/*")]
    for options in ({"unlisted": "replicate"}, {"exclude": ["optim.*"]}, {"replicas": "any"}):
        warnings = reshard_mpi.transform(*how, to="torch", overwrite=True, **options).warnings
        is_told = any("'optim.state.0.exp_avg' differs between ranks 0, 1" in warning for warning in warnings)
        assert is_told == ("exclude" not in options)


def test_numbers_of_a_stage_go_into_its_own_target(tmp_path: Path) -> None:
    source = numbered(tmp_path / "src", ([], [0, 1]))
    rules = "".join(f"[[parameter]]\nmatch = 'model.l[{2 * at}{2 * at + 1}]'\nstage = {at}\n" for at in range(2))
    rules += "[[parameter]]\nmatch = 'optim.*'\nstage = 1\n"
    (tmp_path / "dst.toml").write_text(f"mesh = {{ data = 1 }}\nstages = 2\n{rules}")
    reshard_mpi.transform(source, tmp_path / "dst", source / "stages.toml", tmp_path / "dst.toml", to="torch")
    states = [torch_peer.load(tmp_path / f"dst/rank_{at}/checkpoint_{at}.pt")["optim"]["state"] for at in range(2)]
    assert [[*state] for state in states] == [[], [0, 1]]


@pytest.mark.parametrize("rates", [[0.5], [0.5, 0.25]])
def test_values_of_a_scheduler_for_groups_of_another_stage_are_warned_of(
    tmp_path: Path, rates: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The last stage may have a group of its own; the scheduler of the first one is kept."""
    stages = [[["a"]], [["b"], ["head"]][: len(rates)]]
    source = saved(tmp_path / "src", stages, lambda name: {"lr": rates[name == "head"]})
    for stage, own in enumerate(([0.5], rates)):
        content = torch_peer.load(source / f"rank_{stage}/x.pt")
        torch_peer.save(source / f"rank_{stage}/x.pt", {**content, "sched": {"base_lrs": own, "last_epoch": 3}})
    assert len(joined(source, tmp_path / "dst")["param_groups"]) == len(rates)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("sched.base_lrs: kept as in" in text and "rank_1" in text for text in warned) == (len(rates) > 1)


# Optimizers that stages keep in unlike ways


def stages(folder: Path, optimizers: Sequence[Any], more: Sequence[Any] = ()) -> Path:
    """Save stages with these optimizers, each of whose tensors has the name of a parameter of its stage."""
    for stage, optimizer in enumerate(optimizers):
        (folder / f"rank_{stage}").mkdir(parents=True)
        torch_peer.save(
            folder / f"rank_{stage}" / "x.pt",
            {"model": {f"l{stage}": tensor(), "embed": tensor()}, "optim": optimizer, "more": [*more][stage:][:1]},
        )
    (folder / "stages.toml").write_text(
        f"mesh = {{ data = 1 }}\nstages = {len(optimizers)}\n[[parameter]]\nmatch = '*'\n"
    )
    return folder


def of(*names: str, **settings: Any) -> dict[str, Any]:
    """Return an optimizer by names with one group."""
    return {
        "state": {name: {"exp_avg": tensor()} for name in names},
        "param_groups": [{"lr": 0.5, **settings, "params": [*names]}],
    }


NO_GROUPS: dict[str, Any] = {"state": {}, "param_groups": []}


@pytest.mark.parametrize("nothing", few(2, [None, {}, [], NO_GROUPS]))
@pytest.mark.parametrize("at", few(1, [0, 1]))
def test_a_stage_without_an_optimizer_takes_none_away(tmp_path: Path, nothing: Any, at: int) -> None:
    optimizers = [nothing, of("l1")] if at == 0 else [of("l0"), nothing]
    optimizer = joined(stages(tmp_path / "src", optimizers), tmp_path / "dst")
    name = f"l{1 - at}"
    assert [group["params"] for group in optimizer["param_groups"]] == [[name]]
    assert [(own, [*state]) for own, state in optimizer["state"].items()] == [(name, ["exp_avg"])]


@few_cases(
    2,
    ("optimizers", "why"),
    [
        ([of("embed", "l0"), of("embed", "l1", lr=0.25)], "embed has other settings in its group in another stage"),
        ([[of("l0"), of("embed")], [of("l1")]], "are not as many in each stage"),
        ([{0: of("l0"), 1: of("embed")}, {0: of("l1")}], "are kept by numbers, and not as many in each stage"),
        ([(of("l0"), of("embed")), (of("l1"),)], "are not as many in each stage"),
        ([of("l0"), OrderedDict(of("l1"))], "are kept in different ways"),
    ],
)
def test_optimizers_that_cannot_be_joined_are_refused(tmp_path: Path, optimizers: Sequence[Any], why: str) -> None:
    source = stages(tmp_path / "src", optimizers)
    with pytest.raises(DisagreementError, match=why) as refused:
        joined(source, tmp_path / "dst")
    assert "l1.exp_avg" in str(refused.value)
    (glob,) = re.findall(r"--exclude '(.*?)'", str(refused.value))
    report = reshard_mpi.transform(source, tmp_path / "dst", source / "stages.toml", to="torch", exclude=[glob])
    assert {*tree_of(tmp_path / "dst")["model"]} == {"embed", "l0", "l1"}
    assert any("optimizers of stages cannot be joined" in warning and why in warning for warning in report.warnings)


def test_a_key_that_is_no_name_keeps_the_first_value_of_its_dictionary_alone(tmp_path: Path) -> None:
    source = stages(tmp_path / "src", [of("l0"), of("l1")], [{0.5: 1, "of 0": 0}, {0.5: 2, "of 1": 1}])
    optimizer = joined(source, tmp_path / "dst")
    assert [group["params"] for group in optimizer["param_groups"]] == [["l0", "l1"]]
    assert tree_of(tmp_path / "dst")["more"] == [{0.5: 1, "of 0": 0}]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_names_beside_parameters_and_the_order_of_settings_make_no_other_group(
    tmp_path: Path, is_reversed: bool
) -> None:
    """A group of joined ones has no names beside it, and the third stage shares a parameter with the first."""
    names = [["embed", "l0"], ["l1"], ["embed", "l2"]]
    optimizers = [of(*own, param_names=own) for own in names]
    if is_reversed:
        optimizers[1]["param_groups"] = [dict(reversed(optimizers[1]["param_groups"][0].items()))]
    optimizer = joined(stages(tmp_path / "src", optimizers), tmp_path / "dst")
    assert [group["params"] for group in optimizer["param_groups"]] == [["embed", "l0", "l1", "l2"]]
    assert {*optimizer["state"]} == {"embed", "l0", "l1", "l2"}


def test_files_of_stages_that_cannot_be_joined_get_no_index_of_all(tmp_path: Path) -> None:
    source = stages(tmp_path / "src", [[of("l0"), of("embed")], [of("l1")]])
    how = (source, tmp_path / "dst", source / "stages.toml", source / "stages.toml")
    with pytest.raises(DisagreementError, match="are not as many in each stage"):
        reshard_mpi.transform(*how, to="dcp")
    reshard_mpi.transform(*how, to="dcp", exclude=["optim.*"], overwrite=True)


def test_ranks_of_one_stage_share_out_state_by_numbers(tmp_path: Path) -> None:
    """As distributed Muon does: all groups on each rank, and the state of its own parameters."""
    names = ["a", "b", "c"]
    for rank, numbers in enumerate(([0, 2], [1])):
        optimizer = {
            "state": {number: {"exp_avg": tensor(number), "note": names[number]} for number in numbers},
            "param_groups": [{"lr": 0.5, "params": [0, 1, 2]}],
        }
        (tmp_path / f"src/rank_{rank}").mkdir(parents=True)
        torch_peer.save(
            tmp_path / f"src/rank_{rank}/x.pt", {"model": dict.fromkeys(names, tensor()), "optim": optimizer}
        )
    (tmp_path / "src/stages.toml").write_text("mesh = { data = 2 }\n[[parameter]]\nmatch = '*'\n")
    state = joined(tmp_path / "src", tmp_path / "dst")["state"]
    assert {number: (own["note"], "exp_avg" in own) for number, own in state.items()} == {
        number: (name, True) for number, name in enumerate(names)
    }
