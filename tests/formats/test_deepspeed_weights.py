"""What a checkpoint of DeepSpeed keeps of weights: they are their copies in float32, rounded, or it is not written."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import command_line, deepspeed_peer, torch_peer
from support.deepspeed_peer import Arrays, Form
from support.examples import one_at_a_time

import reshard_mpi
from reshard_mpi.errors import DisagreementError, TargetError

pytestmark = pytest.mark.slow

SHAPES = {"a.weight": (5, 3), "a.bias": (1,), "b.weight": (6, 6)}
EQUATIONS = ["NAME [x y] <=> c.weight [y x]", "NAME [x y] <=> NAME [y x]", "NAME [2 x y] <=> NAME [2 y x]"]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
_keys = count()


def tensor(array: Any, dtype: str | None = None) -> Any:
    return torch_peer.tensor(deepspeed_peer.sample(np.asarray(array), dtype), str(next(_keys)))


def training(dtype: str = "bfloat16", *, has_copies: bool = True) -> tuple[dict[str, Any], Arrays]:
    """Return a training as torch has it, with a model of this type, and its weights in float32."""
    weights = deepspeed_peer.arrays(SHAPES, 1)
    state = {
        name: {
            "step": tensor(np.float32(3)),
            "exp_avg": tensor(array * 2),
            **({"fp32_param": tensor(array)} if has_copies else {}),
        }
        for name, array in weights.items()
    }
    groups = [{"lr": 0.1, "params": ["b.weight", "a.weight"]}, {"lr": 0.2, "params": ["a.bias"]}]
    model = {name: tensor(array, dtype) for name, array in weights.items()}
    optimizer = {"state": state, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "buffer_names": [], "shared_params": {}}, weights


def saved(folder: Path, content: dict[str, Any]) -> Path:
    torch_peer.save(folder / "x.pt", content)
    return folder / "x.pt"


def written(folder: Path, source: Path, stage: int, **options: Any) -> Path:
    reshard_mpi.transform(source, folder / "out", to="deepspeed", dp=2, zero_stage=stage, **options)
    return folder / "out"


def refused(folder: Path, source: Path, stage: int, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        written(folder, source, stage, **options)
    assert not (folder / "out").exists()


def require_weights(folder: Path, dtype: str, expected: Arrays) -> None:
    """Require that a checkpoint has these weights in float32, and rounded to a type in the model."""
    with reshard_mpi.open(folder, replicas="check") as opened:
        for name, array in expected.items():
            assert opened[f"model.{name}"][...].tobytes() == deepspeed_peer.sample(array, dtype).content, name
            if dtype != "float32":
                assert opened[f"optimizer.state.{name}.fp32_param"][...].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(("stage", "dtype"), one_at_a_time([3, 2, 1], ["bfloat16", "float16", "float32"]))
def test_weights_that_were_changed_without_their_copies_are_refused(tmp_path: Path, stage: int, dtype: str) -> None:
    content, weights = training(dtype)
    edited = weights["b.weight"].copy()
    edited[4, 5] += 1
    content["model"]["b.weight"] = tensor(edited, dtype)
    source = saved(tmp_path, content)
    refused(tmp_path, source, stage, DisagreementError, r"b\.weight[^$]*element \[4, 5\]")
    refused(tmp_path, source, stage, DisagreementError, "b.weight", verify=True, jobs=2)
    written(tmp_path, source, stage, exclude=["*.fp32_param"])  # as the error says
    rounded = weights | {"b.weight": edited}
    with reshard_mpi.open(tmp_path / "out") as opened:
        for name, array in rounded.items():
            assert opened[f"model.{name}"][...].tobytes() == deepspeed_peer.sample(array, dtype).content


@pytest.mark.parametrize("stage", [2, 3])
def test_one_weight_that_was_changed_in_a_checkpoint_of_deepspeed_is_refused(tmp_path: Path, stage: int) -> None:
    """A sample of it shows nothing."""
    own = deepspeed_peer.training({"w": (300, 70)})

    def spoil(name: str, content: dict[str, Any]) -> None:
        if "module" in content:
            array = own.trained["w"].copy()
            array[140, 31] += 1
            content["module"]["w"] = tensor(array, "bfloat16")

    deepspeed_peer.write(tmp_path / "save", own, Form(2, 2), spoil)
    reshard_mpi.transform(tmp_path / "save", tmp_path / "torch", to="torch")
    refused(tmp_path, tmp_path / "save", stage, DisagreementError, r"'w'[^$]*element \[140, 31\]")
    refused(tmp_path, tmp_path / "torch", stage, DisagreementError, r"'w'[^$]*element \[140, 31\]", jobs=2)


@STAGES
def test_a_second_name_of_other_contents_is_refused(tmp_path: Path, stage: int) -> None:
    content, weights = training()
    content["model"]["head"] = tensor(weights["b.weight"] + 1, "bfloat16")
    content["shared_params"] = {"head": "b.weight"}
    refused(tmp_path, saved(tmp_path, content), stage, DisagreementError, "'head'[^$]*shared_params")
    content["model"]["head"] = content["model"]["b.weight"]
    written(tmp_path, saved(tmp_path, content), stage)
    require_weights(tmp_path / "out", "bfloat16", weights)
    with reshard_mpi.open(tmp_path / "out") as opened:
        assert opened["model.head"][...].tobytes() == opened["model.b.weight"][...].tobytes()


@pytest.mark.parametrize(("stage", "is_trained", "equation"), one_at_a_time([3, 2, 1], [True, False], EQUATIONS))
def test_a_map_that_leaves_a_second_name_behind_is_refused(
    tmp_path: Path, stage: int, is_trained: bool, equation: str
) -> None:
    content, weights = training()
    name = "b.weight" if is_trained else "frozen"
    if not is_trained:
        content["model"]["frozen"] = content["model"]["b.weight"]
    content["model"]["head"] = tensor(weights["b.weight"], "bfloat16")
    content["shared_params"] = {"head": name}
    if equation.count("2"):
        turned = weights["b.weight"].reshape(2, 3, 6)
        for key in (name, "head"):
            content["model"][key] = tensor(turned, "bfloat16")
        content["model"]["b.weight"] = tensor(turned, "bfloat16")
        content["optimizer"]["state"]["b.weight"] |= {"fp32_param": tensor(turned), "exp_avg": tensor(turned)}
    mapped: dict[str, Any] = {"map": equation.replace("NAME", name), "forward": True}
    errors: Any = (DisagreementError, TargetError)
    made = "c.weight" if "c.weight" in equation else name
    refused(tmp_path, saved(tmp_path, content), stage, errors, f"shared_params[^$]*{made}|{made}.*shared", **mapped)


@STAGES
def test_a_second_name_follows_a_map_that_renames(tmp_path: Path, stage: int) -> None:
    content, weights = training()
    content["model"]["head"] = tensor(weights["b.weight"], "bfloat16")
    content["shared_params"] = {"head": "b.weight"}
    written(tmp_path, saved(tmp_path, content), stage, map="b.weight <=> c.weight", forward=True)
    name = f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    assert deepspeed_peer.load(tmp_path / "out/global_step0" / name)["shared_params"] == {"head": "c.weight"}
    require_weights(tmp_path / "out", "bfloat16", {"c.weight": weights["b.weight"]})
    with reshard_mpi.open(tmp_path / "out") as opened:
        assert opened["model.head"][...].tobytes() == opened["model.c.weight"][...].tobytes()


@pytest.mark.parametrize(("stage", "dtype"), one_at_a_time([3, 2, 1], ["bf16", "fp16"]))
def test_another_type_for_the_model_does_not_round_the_only_copy(tmp_path: Path, stage: int, dtype: str) -> None:
    content, weights = training("float32", has_copies=False)
    written(tmp_path, saved(tmp_path, content), stage, dtype=f"model.*={dtype}", verify=True)
    require_weights(tmp_path / "out", {"bf16": "bfloat16", "fp16": "float16"}[dtype], weights)
    assert not reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "out").warnings


@pytest.mark.parametrize(("stage", "dtype"), one_at_a_time([2, 3, 1], ["fp16", "fp32"]))
def test_weights_in_another_type_are_made_of_their_copies(tmp_path: Path, stage: int, dtype: str) -> None:
    """Of weights in bfloat16 they would be rounded twice, and contradict the copies."""
    content, weights = training()
    content["model"]["head"] = content["model"]["b.weight"]
    content["shared_params"] = {"head": "b.weight"}
    written(tmp_path, saved(tmp_path, content), stage, dtype=f"model.*={dtype}")
    require_weights(tmp_path / "out", {"fp16": "float16", "fp32": "float32"}[dtype], weights)
    assert not reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "out").warnings
    content["model"]["a.weight"] = tensor(weights["a.weight"] + 1, "bfloat16")
    with pytest.raises(DisagreementError, match=r"a\.weight"):
        written(tmp_path, saved(tmp_path, content), stage, dtype=f"model.*={dtype}", overwrite=True)


@pytest.mark.parametrize(("stage", "dtype"), one_at_a_time([2, 3, 1], ["bf16", "fp32"]))
def test_what_is_told_for_weights_of_several_types_rounds_no_only_copy(tmp_path: Path, stage: int, dtype: str) -> None:
    content, weights = training()
    content["model"]["a.bias"] = tensor(weights["a.bias"])
    del content["optimizer"]["state"]["a.bias"]["fp32_param"]
    source = saved(tmp_path, content)
    refused(tmp_path, source, stage, TargetError, r"--dtype 'model.\*=TYPE'")
    written(tmp_path, source, stage, dtype=f"model.*={dtype}")
    require_weights(tmp_path / "out", {"bf16": "bfloat16", "fp32": "float32"}[dtype], weights)
    assert not reshard_mpi.verify(source, tmp_path / "out").warnings


@STAGES
def test_weights_in_64_bit_are_made_float32_first(tmp_path: Path, stage: int) -> None:
    """Rounded to 16 bit they need not be their copy in float32 rounded once more."""
    content, weights = training("float64", has_copies=False)
    source = saved(tmp_path, content)
    refused(tmp_path, source, stage, TargetError, "float64")
    refused(tmp_path, source, stage, TargetError, "float64", dtype="model.*=bf16")
    written(tmp_path, source, stage, dtype="model.*=fp32")
    require_weights(tmp_path / "out", "float32", weights)


def test_each_process_compares_its_own_share(tmp_path: Path) -> None:
    """One that is asked for the other files does not read what only these hold."""
    content, weights = training()
    edited = weights["b.weight"].copy()
    edited[0, 0] += 1
    content["model"]["b.weight"] = tensor(edited, "bfloat16")
    source = saved(tmp_path, content)
    refused(tmp_path, source, 3, DisagreementError, "b.weight", rank=[0])
    written(tmp_path, source, 3, rank=[1, 2])
    with pytest.raises(DisagreementError):
        written(tmp_path, source, 3, resume=True)
    assert not (tmp_path / "out/latest").exists()
    target = "--to", "deepspeed", "--dp", "2", "--zero-stage", "3"
    assert "b.weight" in command_line.refused("plan", source, tmp_path / "new", *target)


def test_who_trusts_copies_compares_none(tmp_path: Path) -> None:
    content, weights = training()
    content["model"]["b.weight"] = tensor(weights["b.weight"] + 1, "bfloat16")
    written(tmp_path, saved(tmp_path, content), 3, replicas="any")
    require_weights(tmp_path / "out", "bfloat16", weights)
