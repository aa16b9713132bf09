"""Trainings in the forms in which torch saves them become checkpoints of DeepSpeed: nothing is refused without need."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import deepspeed_peer, torch_peer
from support.deepspeed_peer import Form
from support.examples import one_at_a_time

import reshard_mpi
from reshard_mpi.errors import ReshardError, TargetError

pytestmark = pytest.mark.slow

SHAPES = {"a.weight": (5, 3), "a.bias": (1,), "b.weight": (7, 2)}
STAGES = (3, 1, 2)
of_every_stage = pytest.mark.parametrize("stage", STAGES)
KEYS = itertools.count()
GRAD_SCALER = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 200,
    "_growth_tracker": 7,
}


def trained(folder: Path, dtype: str = "float32") -> Any:
    """Return a training of two groups as one object of torch."""
    training = deepspeed_peer.training(SHAPES, {"c.weight": (11,)}, dtype=dtype)
    deepspeed_peer.write(folder / "save", training, Form(2, 2))
    reshard_mpi.transform(folder / "save", folder / "torch", to="torch")
    loaded = deepspeed_peer.load(folder / "torch/rank_0/checkpoint_0.pt")
    return {"model": loaded["model"], "optimizer": loaded["optimizer"]}


def tensor(array: Any) -> torch_peer.Tensor:
    return torch_peer.tensor(deepspeed_peer.sample(np.asarray(array)), f"new{next(KEYS)}")


def made(folder: Path, training: Any, stage: int = 2, **options: Any) -> Path:
    torch_peer.save(folder / "x.pt", training)
    asked = {"to": "deepspeed", "dp": 3, "zero_stage": stage}
    reshard_mpi.transform(folder / "x.pt", folder / "out", verify=True, **asked, **options)
    reshard_mpi.verify(folder / "x.pt", folder / "out")
    return folder / "out"


def one(out: Path, pattern: str = "*rank_0_mp_rank_00_optim_states.pt") -> Any:
    return deepspeed_peer.load(next((out / "global_step0").glob(pattern)))


def scaler(out: Path) -> tuple[str, dict[str, Any]]:
    state = one(out)["optimizer_state_dict"]
    found = state["loss_scaler"]
    attributes = {key: value for key, value in vars(found).items() if key != "args"}
    assert state["dynamic_loss_scale"] is attributes["dynamic"]
    return type(found).__name__, attributes


NO_SCALE = ("LossScaler", {"cur_scale": 1.0, "dynamic": False})


@pytest.mark.parametrize(("stage", "state"), one_at_a_time(STAGES, [GRAD_SCALER, {}, None]))
def test_a_model_that_is_not_in_fp16_has_no_scale_of_losses(tmp_path: Path, stage: int, state: Any) -> None:
    """What torch's scaler has said is found among what the training keeps itself."""
    out = made(tmp_path, {**trained(tmp_path), "scaler": state}, stage)
    assert scaler(out) == NO_SCALE
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    assert one(out, name).get("scaler") == state


def test_the_scale_of_torch_goes_on_in_fp16(tmp_path: Path) -> None:
    """Steps since the last change count: with DeepSpeed the scale grows in the same step."""
    out = made(tmp_path, {**trained(tmp_path), "scaler": GRAD_SCALER}, dtype="model.*=fp16")
    kind, attributes = scaler(out)
    assert kind == "DynamicLossScaler"
    assert attributes["cur_scale"] == 1024.0 and attributes["scale_factor"] == 2.0
    window = attributes["scale_window"]
    steps = range(attributes["cur_iter"], 1000)
    grows = next(step for step in steps if (step - attributes["last_overflow_iter"]) % window == 0)
    assert grows - attributes["cur_iter"] == 200 - 7 - 1


@pytest.mark.parametrize(
    ("section", "scale"),
    [({}, 2.0**16), ({"initial_scale_power": 4}, 16.0), ({"loss_scale": 8}, 8.0)],
    ids=["usual", "power", "fixed"],
)
def test_fp16_begins_with_the_scale_of_the_settings(tmp_path: Path, section: dict[str, Any], scale: float) -> None:
    training = {**trained(tmp_path), "config": {"mine": 3}, "ds_config": {"fp16": {"enabled": True, **section}}}
    kind, attributes = scaler(made(tmp_path, training, dtype="model.*=fp16"))
    assert attributes["cur_scale"] == scale
    assert kind == ("LossScaler" if "loss_scale" in section else "DynamicLossScaler")


def test_a_scale_of_fp16_does_not_go_on_in_bf16(tmp_path: Path) -> None:
    training = deepspeed_peer.training(SHAPES, dtype="float16")

    def scaled(_: str, content: dict[str, Any]) -> None:
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["loss_scaler"].cur_scale = 512.0

    deepspeed_peer.write(tmp_path / "save", training, Form(2, 2), scaled)
    found = {}
    for dtype in ("fp16", "bf16"):
        asked: dict[str, Any] = {"to": "deepspeed", "dp": 2, "zero_stage": 2, "dtype": f"model.*={dtype}"}
        reshard_mpi.transform(tmp_path / "save", tmp_path / dtype, **asked)
        path = next((tmp_path / dtype / "global_step3").glob("*rank_0_mp_rank_00_optim_states.pt"))
        found[dtype] = deepspeed_peer.load(path)["optimizer_state_dict"]["loss_scaler"].cur_scale
    assert found == {"fp16": 512.0, "bf16": 1.0}


@of_every_stage
def test_settings_of_groups_may_be_tensors(tmp_path: Path, stage: int) -> None:
    """As the learning rate of an optimizer that is captured in a graph."""
    training = trained(tmp_path)
    for number, group in enumerate(training["optimizer"]["param_groups"]):
        group |= {"lr": tensor(np.float32(number + 0.5)), "steps": [1, tensor([1.0, number])]}
    out = made(tmp_path, training, stage)
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    for rank in range(3):
        groups = one(out, f"*rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"][key]["param_groups"]
        rates = [torch_peer.sample_of("", group["lr"]) for group in groups]
        assert [np.frombuffer(rate.content, np.float32)[0] for rate in rates] == [0.5, 1.5]
        assert [rate.shape for rate in rates] == [(), ()]
    with reshard_mpi.open(out) as opened:
        assert float(opened["optimizer.param_groups.1.lr"][...]) == 1.5
        assert opened["optimizer.param_groups.1.steps.1"][...].tolist() == [1.0, 1.0]
    reshard_mpi.transform(out, tmp_path / "again", to="deepspeed", dp=2, zero_stage=stage % 3 + 1)
    reshard_mpi.verify(out, tmp_path / "again")


def flat(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer as `StateDictOptions(flatten_optimizer_state_dict=True)` has it: state, then groups."""
    made = {
        f"state.{name}.{kind}": value for name, state in optimizer["state"].items() for kind, value in state.items()
    }
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            made |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return made


@pytest.mark.parametrize(("stage", "is_tensor"), one_at_a_time(STAGES, [False, True]))
def test_a_flat_optimizer_has_its_groups_again(tmp_path: Path, stage: int, is_tensor: bool) -> None:
    training = trained(tmp_path)
    for number, group in enumerate(training["optimizer"]["param_groups"]):
        group |= {"weight_decay": number / 10, "lr": tensor(np.float32(0.5)) if is_tensor else 0.5}
    groups = [group["params"] for group in training["optimizer"]["param_groups"]]
    out = made(tmp_path, {**training, "optimizer": flat(training["optimizer"])}, stage)
    with reshard_mpi.open(out) as opened:
        found = opened.attrs["optimizer"]["param_groups"]
    assert [group["params"] for group in found] == groups
    assert [group["weight_decay"] for group in found] == [0.0, 0.1]


def test_rates_of_a_flat_optimizer_that_are_tensors_must_agree_in_a_group(tmp_path: Path) -> None:
    training = trained(tmp_path)
    for number, group in enumerate(training["optimizer"]["param_groups"]):
        group["lr"] = tensor(np.float32(number))  # which alone tells the groups apart
    with pytest.raises(ReshardError, match=r"lr"):
        made(tmp_path, {**training, "optimizer": flat(training["optimizer"])})


@pytest.mark.parametrize(("stage", "is_flat"), one_at_a_time(STAGES, [False, True]))
def test_parameters_that_are_not_trained_may_be_in_groups(tmp_path: Path, stage: int, is_flat: bool) -> None:
    """DeepSpeed's engine leaves them out of its vectors; stage 3 cuts them as parameters."""
    training = trained(tmp_path)
    del training["optimizer"]["state"]["a.bias"]
    if is_flat:
        training["optimizer"]["param_groups"][1]["lr"] = 9
        training["optimizer"] = flat(training["optimizer"])
    torch_peer.save(tmp_path / "x.pt", training)
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", dp=3, zero_stage=stage)
    assert any("a.bias" in note and "not trained" in note for note in report.notes)
    reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "out")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    model = one(tmp_path / "out", name)
    assert [[*group] for group in model["param_shapes"]] == [["a.weight", "b.weight"], ["c.weight"]]
    if stage > 1:
        assert [*model["frozen_param_shapes"]] == ["a.bias"]


def test_an_optimizer_without_any_state_trains_all(tmp_path: Path) -> None:
    training = trained(tmp_path)
    training["optimizer"]["state"] = {}
    model = one(made(tmp_path, training), "mp_rank_00_model_states.pt")
    assert [[*group] for group in model["param_shapes"]] == [[*SHAPES], ["c.weight"]]


def test_state_that_was_left_out_does_not_make_a_parameter_one_that_is_not_trained(tmp_path: Path) -> None:
    training = trained(tmp_path)
    with pytest.raises(TargetError, match="every parameter that the optimizer trains"):
        made(tmp_path, training, exclude=["optimizer.state.a.bias.*"])


@pytest.mark.parametrize(
    ("stage", "keys"), one_at_a_time(STAGES, [("model", "optimizer"), ("state_dict", ""), ("", "optim"), ("", "")])
)
def test_files_of_model_and_optimizer_may_hold_more(tmp_path: Path, stage: int, keys: tuple[str, str]) -> None:
    """`model.pt` is kept as it is where it is joined with `optim.pt`; the epoch in it is the training's."""
    training = trained(tmp_path)
    del training["optimizer"]["state"]["a.bias"]
    folder = tmp_path / "files"
    folder.mkdir()
    for number, (name, key) in enumerate(zip(("model", "optimizer"), keys)):
        own = {key: training[name], f"epoch {number}": number} if key else dict(training[name])
        if keys == ("", "") and name == "model":
            own |= {"epoch 0": 0, "layer._extra_state": 5}
        torch_peer.save(folder / f"{name}.pt", own)
    asked: dict[str, Any] = {"to": "deepspeed", "dp": 2, "zero_stage": stage}
    reshard_mpi.transform(folder, tmp_path / "out", **asked)
    reshard_mpi.verify(folder, tmp_path / "out")
    with reshard_mpi.open(tmp_path / "out") as opened:
        for name, value in training["model"].items():
            assert opened[f"model.{name}"][...].tobytes() == torch_peer.sample_of("", value).content
        besides = opened.attrs.get("client_state", {})
        expected = {f"epoch {number}": number for number, key in enumerate(keys) if key}
        assert besides == (expected or {"epoch 0": 0})
        assert opened.attrs["model"].get("layer._extra_state") == (None if any(keys) else 5)
    with pytest.raises(TargetError, match="every parameter that the optimizer trains"):
        reshard_mpi.transform(folder, tmp_path / "other", exclude=["*state.b.weight.*"], **asked)
