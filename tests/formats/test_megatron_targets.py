"""Files that are written for Megatron-Core hold what its loader looks for, under its keys, and no class but its own."""

from __future__ import annotations

import argparse
import enum
import itertools
import json
import shutil
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, deepspeed_peer, torch_peer
from support.checkpoints import write_ranks
from support.command_line import refused
from support.examples import few, many
from support.torch_runs import tree_of

import reshard_mpi
from reshard_mpi.errors import ReshardError, TargetError, UsageError
from reshard_mpi.journal import commit

Array = np.ndarray[Any, Any]
# Of storages; a key that was of two in one file would be of two sizes.
KEYS = map(str, itertools.count())
BF16 = np.dtype(ml_dtypes.bfloat16)
ENUMS = "megatron.core.transformer.enums"
LAYER = "decoder.layers."


class AttnBackend(enum.Enum):
    flash, fused, unfused, local, auto = range(1, 6)


# All that pickles of a checkpoint may name, besides plain data.
KNOWN = {"argparse": argparse, ENUMS: types.SimpleNamespace(AttnBackend=AttnBackend)}


@pytest.fixture(autouse=True)
def known_classes() -> Iterator[None]:
    with mock.patch.dict(torch_peer.STAND_INS, KNOWN):
        yield


def array(shape: tuple[int, ...], salt: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([*shape, salt]).standard_normal(shape).astype(np.float32).astype(dtype)


def tensor(values: Array) -> Any:
    return torch_peer.tensor(dcp_peer.sample(values), next(KEYS))


SHAPES = {
    "embedding.word_embeddings.weight": (6, 4),
    f"{LAYER}self_attention.linear_qkv.weight": (3, 8, 4),
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (3, 4),
    f"{LAYER}mlp.experts.experts.linear_fc1.weight": (3, 2, 5, 4),
    "decoder.final_layernorm.weight": (4,),
}
GROUP = {"is_expert_parallel": False, "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 0.01, "lr": 0.005, "step": 3}
ARGS = {
    "num_layers": 3,
    "hidden_size": 4,
    "params_dtype": torch_peer.STAND_INS["torch"].bfloat16,  # type: ignore[attr-defined]
    "attention_backend": {"class": f"{ENUMS}.AttnBackend", "value": 5},
    "betas": (0.9, 0.95),
    "data_path": ["a", "b"],
}
SCHEDULE = {"max_lr": 0.01, "num_steps": 24, "lr_decay_style": "cosine"}


class Training:
    """A whole training: `weights` of the model, `state` of its optimizer by kind, and `besides`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any = BF16, **besides: Any) -> None:
        main = {key: array(shape, 1) for key, shape in shapes.items()}
        self.weights = {key: values.astype(dtype) for key, values in main.items()}
        moments = {kind: {key: array(shape, 2) for key, shape in shapes.items()} for kind in ("exp_avg", "exp_avg_sq")}
        self.state = ({"fp32_param": main} if dtype != np.float32 else {}) | moments
        self.besides = besides or {
            "args": dict(ARGS),
            "checkpoint_version": 3.0,
            "iteration": 3,
            "scheduler": dict(SCHEDULE),
        }
        self.groups = [dict(GROUP), GROUP | {"wd_mult": 0.0}]
        self.extra: dict[str, Any] = {}

    def tree(self) -> dict[str, Any]:
        """Return what a file of torch has of it."""
        state: dict[str, dict[str, Any]] = {}
        for kind, own in self.state.items():
            for key, values in own.items():
                state.setdefault(key, {})[kind] = tensor(values)
        model = {key: tensor(values) for key, values in self.weights.items()}
        return {"model": model | self.extra, "optimizer": {"state": state, "param_groups": self.groups}, **self.besides}

    def save(self, path: Path) -> Path:
        torch_peer.save(path, self.tree())
        return path

    def expected(self) -> dict[str, Array]:
        """Return the tensors that Megatron is to find."""
        main = self.state.get("fp32_param", self.weights)
        kinds = {kind: own for kind, own in self.state.items() if kind != "fp32_param"} | {"param": main}
        return self.weights | {
            f"optimizer.state.{kind}.{key}": values for kind, own in kinds.items() for key, values in own.items()
        }


def written(folder: Path) -> dcp_peer.Checkpoint:
    """Return what the latest checkpoint of a folder holds, by other means than the package's."""
    return dcp_peer.read(folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}")


def require_tensors(folder: Path, expected: dict[str, Array]) -> None:
    found = written(folder).tensors
    assert {name: (each.dtype.name, each.shape, each.content) for name, each in found.items()} == {
        name: (values.dtype.name, values.shape, values.tobytes()) for name, values in expected.items()
    }


def require_same(one: Path, other: Path, *, attrs: bool = True) -> None:
    with reshard_mpi.open(one) as before, reshard_mpi.open(other) as after:
        assert {name: before[name][...].tobytes() for name in before} == {
            name: after[name][...].tobytes() for name in after
        }
        assert not attrs or before.attrs == after.attrs


def test_a_whole_training(tmp_path: Path) -> None:
    training = Training(SHAPES)
    key = f"{LAYER}self_attention.linear_qkv._extra_state/shard_{{}}_3"
    training.extra = {key.format(0): None, key.format(1): None, key.format(2): tensor(np.arange(3, dtype=np.uint8))}
    source, out = training.save(tmp_path / "x.pt"), tmp_path / "out"
    report = reshard_mpi.transform(source, out, to="megatron", verify=True)
    assert not report.warnings and not report.notes
    require_tensors(out, training.expected())
    found = written(out)
    assert found.paths is None
    (common,) = found.objects.pop("common_state/shard_0_1")
    assert common == {
        "args": argparse.Namespace(**ARGS | {"attention_backend": AttnBackend.auto}),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "optimizer": {"optimizer": {"param_groups": training.groups}, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": SCHEDULE,
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
    }
    assert [*common["args"].__dict__] == [*ARGS]
    (extra,) = found.objects.pop(key.format(2))
    assert torch_peer.sample_of("", extra).content == bytes(range(3))
    assert found.objects == {key.format(0): [None], key.format(1): [None]}
    folder = out / "iter_0000003"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }
    assert {path.name for path in folder.iterdir()} == {"metadata.json", ".metadata", "__0_0.distcp"}
    assert (out / "latest_checkpointed_iteration.txt").read_bytes() == b"3"
    reshard_mpi.verify(source, out)
    reshard_mpi.transform(out, tmp_path / "again", to="megatron")
    require_same(out, tmp_path / "again")


def test_layers_and_experts_are_chunks_of_their_own(tmp_path: Path) -> None:
    """A rank that loads a layer reads the whole of every chunk that has a part of it."""
    reshard_mpi.transform(Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    listed = written(tmp_path / "out").metadata.state_dict_metadata
    chunks = {
        key.rpartition(".")[0]: [tuple(chunk.sizes) for chunk in listed[key].chunks]
        for key in SHAPES
        if key.endswith("weight")
    }
    assert chunks[f"{LAYER}mlp.experts.experts.linear_fc1"] == [(1, 1, 5, 4)] * 6
    assert chunks["embedding.word_embeddings"] == [(6, 4)]


def test_common_state_is_a_file_up_to_a_release(tmp_path: Path) -> None:
    training = Training(SHAPES)
    training.besides["args"]["scope"] = {"class": f"{ENUMS}.CudaGraphModule", "value": 2}
    source = training.save(tmp_path / "x.pt")
    report = reshard_mpi.transform(source, tmp_path / "out", to="megatron", core_version="0.17")
    assert [note for note in report.notes if "args.scope" in note and "0.17" in note]
    folder = tmp_path / "out/iter_0000003"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = torch_peer.load(folder / "common.pt")
    assert common["args"] == argparse.Namespace(**ARGS | {"attention_backend": AttnBackend.auto})
    assert "common_state/shard_0_1" not in written(tmp_path / "out").objects
    with pytest.raises(UsageError, match="core_version"):
        reshard_mpi.transform(source, tmp_path / "other", to="megatron", core_version="0.14")
    with pytest.raises(UsageError, match="--core-version is for --to megatron"):
        reshard_mpi.transform(source, tmp_path / "other", to="dcp", core_version="0.19")


@pytest.mark.parametrize("value", few(1, [7, "5", True, None]))
def test_what_is_no_member_of_an_enumeration_is_left_out(tmp_path: Path, value: Any) -> None:
    training = Training(SHAPES)
    training.besides["args"]["attention_backend"] = {"class": f"{ENUMS}.AttnBackend", "value": value}
    training.besides["harm"] = [{"class": "os.system", "value": "true"}, 5]
    report = reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    (common,) = written(tmp_path / "out").objects["common_state/shard_0_1"]
    is_plain = value in (True, None)  # no class's value, but a dictionary
    assert hasattr(common["args"], "attention_backend") == is_plain
    assert common["harm"] == [5]
    assert [note for note in report.notes if "harm[0]" in note and ("args.attention_backend" in note) != is_plain]


def numbered(training: Training) -> Training:
    """Return the training with layers and experts apart, as the files of ranks have them."""
    apart = Training({}, **training.besides)
    apart.groups = training.groups

    def taken(tensors: dict[str, Array]) -> dict[str, Array]:
        found = {}
        for key, values in tensors.items():
            part = key.removeprefix(LAYER)
            for layer, of_layer in enumerate(values) if part != key else ():
                if ".experts.experts." not in part:
                    found[f"{LAYER}{layer}.{part}"] = of_layer
                else:
                    names = part.replace(".experts.experts.", ".experts.local_experts.{}.")
                    found |= {f"{LAYER}{layer}.{names.format(expert)}": own for expert, own in enumerate(of_layer)}
            if part == key:
                found[key] = values
        return found

    apart.weights = taken(training.weights)
    apart.state = {kind: taken(own) for kind, own in training.state.items()}
    return apart


def test_numbered_layers_are_put_on_top_of_each_other(tmp_path: Path) -> None:
    training = Training(SHAPES)
    apart = numbered(training)
    apart.extra = {f"{LAYER}{layer}.self_attention.linear_qkv._extra_state": None for layer in range(3)}
    reshard_mpi.transform(apart.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron", verify=True)
    require_tensors(tmp_path / "out", training.expected())
    objects = written(tmp_path / "out").objects
    assert [name for name in objects if "_extra_state" in name] == [
        f"{LAYER}self_attention.linear_qkv._extra_state/shard_{layer}_3" for layer in range(3)
    ]
    reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "out")


def test_layers_that_are_not_alike_keep_their_numbers(tmp_path: Path) -> None:
    training = Training(
        {
            f"{LAYER}0.mlp.linear_fc1.weight": (5, 4),
            f"{LAYER}1.mlp.experts.linear_fc1.weight0": (5, 4),
            f"{LAYER}1.mlp.experts.linear_fc1.weight1": (5, 4),
        }
    )
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    assert {name: each.shape for name, each in written(tmp_path / "out").tensors.items() if "optim" not in name} == {
        f"{LAYER}0.mlp.linear_fc1.weight": (5, 4),
        f"{LAYER}1.mlp.experts.experts.linear_fc1.weight": (2, 5, 4),
    }
    training.weights[f"{LAYER}1.mlp.experts.linear_fc1.weight3"] = array((5, 4), 1, BF16)  # and there is no number 2
    with pytest.raises(TargetError, match="not alike"):
        reshard_mpi.transform(training.save(tmp_path / "y.pt"), tmp_path / "other", to="megatron")


@pytest.mark.parametrize("args", few(1, [{"moe_layer_freq": [1, 1, 1]}, {"linear_attention_freq": 2}]), ids=str)
def test_layers_keep_their_numbers_as_arguments_say(tmp_path: Path, args: dict[str, Any]) -> None:
    """A run whose layers can be of several kinds looks for numbers, also where all are of one."""
    apart = numbered(Training(SHAPES))
    apart.besides["args"] |= args
    experts = "mlp.experts.experts.{}linear_fc1"
    extra = f"{LAYER}1.{experts.format('1.')}._extra_state/shard_0_1", f"{LAYER}2.a.core_attention._extra_state"
    apart.extra = dict.fromkeys(extra)
    reshard_mpi.transform(apart.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron", verify=True)
    found = written(tmp_path / "out")
    assert {name: each.shape for name, each in found.tensors.items() if name.startswith(f"{LAYER}2.")} == {
        f"{LAYER}2.{name.removeprefix(LAYER)}": shape[1:] for name, shape in SHAPES.items() if name.startswith(LAYER)
    }
    objects = {f"{LAYER}1.{experts.format('')}._extra_state/shard_1_2", f"{extra[1]}/shard_0_1"}
    assert {name for name in found.objects if "_extra_state" in name} == objects


def test_objects_of_numbered_experts(tmp_path: Path) -> None:
    """They are told as the weights beside them are, by layer and expert."""
    apart = numbered(Training(SHAPES))
    expert = f"{LAYER}2.mlp.experts.local_experts.1.linear_fc1._extra_state"
    apart.extra = dict.fromkeys((expert, f"{LAYER}0.self_attention.core_attention._extra_state/shard_0_1"))
    reshard_mpi.transform(apart.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    assert {name for name in written(tmp_path / "out").objects if "_extra_state" in name} == {
        f"{LAYER}mlp.experts.experts.linear_fc1._extra_state/shard_2.1_3.2",
        f"{LAYER}self_attention.core_attention._extra_state/shard_0_3",
    }


def test_layers_for_multi_token_prediction_keep_their_numbers(tmp_path: Path) -> None:
    training = Training({**SHAPES, "mtp.layers.0.eh_proj.weight": (4, 8), "mtp.layers.1.eh_proj.weight": (4, 8)})
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron", verify=True)
    require_tensors(tmp_path / "out", training.expected())


def test_norms_of_megatrons_own_layers_have_the_names_of_torch_dist(tmp_path: Path) -> None:
    """Latent attention has no such layers, and Transformer Engine's with experts have a norm before these."""
    own = {"input_layernorm.weight": (4,), "pre_mlp_layernorm.weight": (4,), "pre_mlp_layernorm.bias": (4,)}
    shapes = {f"self_attention.linear_{part}.weight": (8, 4) for part in ("qkv", "kv_up_proj")}
    joined = (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_bias",
    )
    training = Training(
        {f"{LAYER}{layer}.{name}": shape for layer in range(2) for name, shape in (own | shapes).items()}
        | {f"mtp.layers.0.transformer_layer.{name}": shape for name, shape in (own | shapes).items()}
    )
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron", verify=True)
    found = written(tmp_path / "out").tensors
    for name, key in zip(own, joined, strict=True):
        wholes = [training.weights[f"{LAYER}{layer}.{name}"] for layer in range(2)]
        assert found[f"{LAYER}{key}"].content == np.stack(wholes).tobytes()
        assert f"mtp.layers.0.transformer_layer.{key}" in found and f"{LAYER}{name}" not in found
        assert f"optimizer.state.exp_avg.{LAYER}{key}" in found
    for lacking in ("self_attention.linear_qkv.weight", "input_layernorm.weight"):
        others = Training({f"{LAYER}0.{name}": shape for name, shape in (own | shapes).items() if name != lacking})
        folder = tmp_path / lacking
        reshard_mpi.transform(others.save(tmp_path / f"{lacking}.pt"), folder, to="megatron")
        assert f"{LAYER}pre_mlp_layernorm.weight" in written(folder).tensors


def test_weights_in_float32_are_their_own_copies(tmp_path: Path) -> None:
    training = Training(SHAPES, np.float32)
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    require_tensors(tmp_path / "out", training.expected())
    require_same(tmp_path / "x.pt", tmp_path / "out", attrs=False)


def test_weights_without_copies_are_converted(tmp_path: Path) -> None:
    training = Training(SHAPES)
    training.state.pop("fp32_param")
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron", verify=True)
    copies = {f"optimizer.state.param.{key}": values.astype(np.float32) for key, values in training.weights.items()}
    require_tensors(tmp_path / "out", training.expected() | copies)


def test_experts_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    training = Training(SHAPES, iteration=3, args=dict(ARGS), scaler={"scale": 2.0})
    training.groups.append(GROUP | {"is_expert_parallel": True})
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    (common,) = written(tmp_path / "out").objects["common_state/shard_0_1"]
    assert [*common["optimizer"]] == [0, 1]
    groups = [own["optimizer"]["param_groups"] for own in common["optimizer"].values()]
    assert groups == [training.groups[:2], training.groups[2:]]
    assert all(own["grad_scaler"] == {"scale": 2.0} for own in common["optimizer"].values())


def groups_of(folder: Path) -> Any:
    """Return the groups of the optimizer of a folder, or of its two."""
    (common,) = written(folder).objects["common_state/shard_0_1"]
    own = common["optimizer"]
    return (
        own["optimizer"]["param_groups"] if "optimizer" in own else [own[n]["optimizer"]["param_groups"] for n in own]
    )


@pytest.mark.slow
def test_experts_get_an_optimizer_of_their_own_or_lose_it(tmp_path: Path) -> None:
    """As Megatron has it where ranks share them out, or not."""
    training = Training(SHAPES)
    of_experts = [group | {"is_expert_parallel": True} for group in training.groups]
    reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "two", to="megatron", ep=2, verify=True)
    assert groups_of(tmp_path / "two") == [training.groups, of_experts]
    reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "two")
    reshard_mpi.transform(tmp_path / "two", tmp_path / "one", to="megatron", ep=1)
    assert groups_of(tmp_path / "one") == training.groups
    reshard_mpi.transform(tmp_path / "two", tmp_path / "same", to="megatron", ep=2)
    assert groups_of(tmp_path / "same") == [training.groups, of_experts]
    require_tensors(tmp_path / "one", training.expected())
    training.groups += [of_experts[0] | {"lr": 0.25}]
    with pytest.raises(TargetError, match="other settings"):
        reshard_mpi.transform(training.save(tmp_path / "y.pt"), tmp_path / "other", to="megatron", ep=1)


def test_experts_that_ranks_cannot_share_out(tmp_path: Path) -> None:
    training = Training(SHAPES)
    dense = Training({key: shape for key, shape in SHAPES.items() if "experts" not in key})
    torch_peer.save(tmp_path / "weights.pt", {key: tensor(array(shape, 1)) for key, shape in SHAPES.items()})
    for source, ep, got in (
        (training.save(tmp_path / "x.pt"), 4, "experts: 2"),
        (dense.save(tmp_path / "y.pt"), 1, "no experts"),
        (tmp_path / "weights.pt", 2, "experts: 2, no optimizer"),
    ):
        with pytest.raises(TargetError, match=f"--ep {ep} cannot") as caught:
            reshard_mpi.transform(source, tmp_path / "out", to="megatron", ep=ep)
        assert f"got: {got}" in str(caught.value)
    with pytest.raises(UsageError, match="--ep is for --to deepspeed or --to megatron"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="dcp", ep=2)


@pytest.mark.parametrize("to", few(1, ["hf", "safetensors", "ckpt"]))
def test_weights_of_others(tmp_path: Path, to: str) -> None:
    """What Megatron's modules save besides is made; there are no arguments, and that is said."""
    weights = {key: array(shape, 1) for key, shape in SHAPES.items()}
    torch_peer.save(tmp_path / "x.pt", {key: tensor(values) for key, values in weights.items()})
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "source", to=to)
    report = reshard_mpi.transform(tmp_path / "source", tmp_path / "out", to="megatron", verify=True)
    assert [note for note in report.notes if "no arguments of Megatron" in note and "iteration is 0" in note]
    require_tensors(tmp_path / "out", weights)
    objects = written(tmp_path / "out").objects
    (common,) = objects.pop("common_state/shard_0_1")
    assert "args" not in common and "optimizer" not in common and common["iteration"] == 0
    assert "distrib_optim_sharding_type" not in common["content_metadata"]
    modules = {
        f"{LAYER}self_attention.linear_qkv": (3,),
        f"{LAYER}mlp.experts.experts.linear_fc1": (3, 2),
        "decoder.final_layernorm": (1,),
    }
    keys = {
        f"{module}._extra_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, counts))}"
        for module, counts in modules.items()
        for place in np.ndindex(counts)
    }
    assert {*objects} == keys and all(value == [None] for value in objects.values())


def test_the_step_of_another_framework(tmp_path: Path) -> None:
    """It is a tensor of each parameter there, and one number of each group here."""
    training = Training(SHAPES, global_step=7)
    training.groups = [{"lr": 0.5, "params": [*SHAPES]}]
    tree = training.tree()
    for own in tree["optimizer"]["state"].values():
        own["step"] = tensor(np.float32(9).reshape(()))
    torch_peer.save(tmp_path / "x.pt", tree)
    report = reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="megatron")
    assert [note for note in report.notes if "iteration is 7" in note]
    assert [note for note in report.notes if "--no-load-optim" in note]
    (common,) = written(tmp_path / "out").objects["common_state/shard_0_1"]
    assert common["optimizer"]["optimizer"]["param_groups"] == [{"lr": 0.5, "step": 9.0}]
    assert common["iteration"] == 7 and common["global_step"] == 7
    require_tensors(tmp_path / "out", training.expected())
    tree["optimizer"]["state"]["decoder.final_layernorm.weight"]["step"] = tensor(np.float32(8).reshape(()))
    torch_peer.save(tmp_path / "y.pt", tree)
    with pytest.raises(reshard_mpi.ReshardError, match="step"):
        reshard_mpi.transform(tmp_path / "y.pt", tmp_path / "other", to="megatron")


def test_groups_of_another_framework_that_nothing_tells_apart_are_read_again(tmp_path: Path) -> None:
    training = Training(SHAPES, global_step=7)
    training.groups = [{"lr": 0.5, "params": [*SHAPES][:2]}, {"lr": 0.25, "params": [*SHAPES][2:]}]
    tree = training.tree()
    torch_peer.save(tmp_path / "x.pt", tree)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="megatron")
    reshard_mpi.verify(tmp_path / "x.pt", tmp_path / "out")
    report = reshard_mpi.transform(tmp_path / "out", tmp_path / "again", to="torch")
    assert any("have no list of parameters" in note for note in report.notes)
    again = tree_of(tmp_path / "again")["optimizer"]
    assert [group["lr"] for group in again["param_groups"]] == [0.5, 0.25]
    assert again["state"].keys() == tree["optimizer"]["state"].keys()


def without_a_moment(training: Training) -> None:
    training.state["exp_avg"].pop("embedding.word_embeddings.weight")


def with_state_of_nothing(training: Training) -> None:
    training.state["exp_avg"]["lost.weight"] = array((2,), 1)


def with_state_of_another_shape(training: Training) -> None:
    training.state["exp_avg"]["embedding.word_embeddings.weight"] = array((7, 4), 1)


def with_a_copy_of_what_is_not_trained(training: Training) -> None:
    for kind in ("exp_avg", "exp_avg_sq"):
        training.state[kind].pop("embedding.word_embeddings.weight")


def without_weights(training: Training) -> None:
    training.weights, training.state = {}, {}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_a_moment, "exp_avg of every parameter"),
        (with_state_of_nothing, "lost.weight"),
        (with_state_of_another_shape, r"\[6, 4\]"),
        (with_a_copy_of_what_is_not_trained, "moments of every weight"),
        (without_weights, "tensors of a model"),
    ],
)
def test_a_training_that_contradicts_itself_is_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    training = Training(SHAPES)
    spoil(training)
    with pytest.raises(TargetError, match=says):
        reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_an_optimizer_beside_weights_of_no_model_is_refused(tmp_path: Path) -> None:
    """Its state would be weights by these names, of which Megatron's own are made."""
    weights = {
        "embedding.word_embeddings.weight": (4, 3),
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": (2, 4, 3),
    }
    arrays = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
    state = {f"optimizer.state.{name}.{kind}": arrays[name] for name in weights for kind in ("exp_avg", "exp_avg_sq")}
    steps = {f"optimizer.state.{name}.step": np.float32(3) for name in weights}
    write_ranks({0: {**arrays, **state, **steps}}, tmp_path / "src", "safetensors")
    with pytest.raises(TargetError, match=r"not what a checkpoint of Megatron is made of(?s:.*)optimizer.state"):
        reshard_mpi.transform(tmp_path / "src", tmp_path / "out", to="megatron")
    reshard_mpi.transform(tmp_path / "src", tmp_path / "out", to="megatron", exclude=["optimizer.*"])
    assert {name.removeprefix("model.") for name in reshard_mpi.load_rank(0, tmp_path / "out")} == {
        "embedding.word_embeddings.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
    }


@pytest.mark.parametrize(
    "name", ["output_layer.weight", "decoder.layers.final", "decoder.layers.0.mlp.experts.experts.scale"]
)
def test_a_weight_without_the_dimensions_that_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    arrays = {"embedding.word_embeddings.weight": np.zeros((4, 3), np.float32), name: np.array(3, np.float32)}
    write_ranks({0: arrays}, tmp_path / "src", "safetensors")
    with pytest.raises(TargetError, match="too few dimensions"):
        reshard_mpi.transform(tmp_path / "src", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_no_strategy_cuts_it(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\n')
    source = Training(SHAPES).save(tmp_path / "x.pt")
    with pytest.raises(UsageError, match="any number of ranks"):
        reshard_mpi.transform(source, tmp_path / "out", to="megatron", dst_strategy=tmp_path / "two.toml")


def test_other_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    training = Training(SHAPES)
    training.besides["averages"] = {"w": tensor(array((2,), 5)), "count": 4}
    report = reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    assert [note for note in report.notes if "averages.w" in note]
    (common,) = written(tmp_path / "out").objects["common_state/shard_0_1"]
    assert common["averages"] == {"count": 4}
    require_tensors(tmp_path / "out", training.expected())


# The size of a file of a few chunks, so that there are several.
SMALL: dict[str, Any] = {"to": "megatron", "max_shard_size": 300}


def test_a_stopped_run_goes_on_and_its_index_is_written_last(tmp_path: Path) -> None:
    source, out = Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out"
    folder, named = out / "iter_0000003", []
    index = [folder / ".metadata", folder / "metadata.json", out / "latest_checkpointed_iteration.txt"]
    publish = commit.publish_bytes

    def noted(opened: Any, name: str, content: bytes) -> None:
        named.append(opened.path / name)
        publish(opened, name, content)

    with mock.patch.object(commit, "publish_bytes", noted):
        reshard_mpi.transform(source, out, rank=[0, 2], **SMALL)
        assert not any(path.exists() for path in index) and not named
        count = len(reshard_mpi.transform(source, out, resume=True, **SMALL).targets)
    assert named == index and count > 3
    require_tensors(out, Training(SHAPES).expected())
    contents = {path: path.read_bytes() for path in index}
    for path in index:
        path.unlink()
        reshard_mpi.transform(source, out, resume=True, **SMALL)
        assert {path: path.read_bytes() for path in index} == contents
    (folder / "__1_0.distcp").unlink()
    reshard_mpi.transform(source, out, rank=0, overwrite=True, **SMALL)
    assert not any(path.exists() for path in index)


@pytest.mark.slow
def test_another_run_takes_the_place_of_one(tmp_path: Path) -> None:
    """Of another iteration, whose folder has another name, it lies beside the first one, which stays whole."""
    source, out = Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out"
    reshard_mpi.transform(source, out, core_version="0.18", **SMALL)
    with pytest.raises(TargetError, match="another run"):
        reshard_mpi.transform(source, out, to="megatron")
    reshard_mpi.transform(source, out, to="megatron", overwrite=True)
    assert {path.name for path in (out / "iter_0000003").iterdir()} == {"metadata.json", ".metadata", "__0_0.distcp"}
    before = {path.name: path.read_bytes() for path in (out / "iter_0000003").iterdir()}
    later = Training(SHAPES, iteration=12, args=dict(ARGS)).save(tmp_path / "y.pt")
    reshard_mpi.transform(later, out, to="megatron", overwrite=True)
    assert {path.name: path.read_bytes() for path in (out / "iter_0000003").iterdir()} == before
    assert {path.name for path in (out / "iter_0000012").iterdir()} == {"metadata.json", ".metadata", "__0_0.distcp"}
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "12"
    reshard_mpi.verify(later, out)


def test_damage_is_found(tmp_path: Path) -> None:
    source, out = Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out"
    reshard_mpi.transform(source, out, to="megatron", verify=True)
    path = out / "iter_0000003/__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.index(array((6, 4), 2).tobytes())  # a moment of the embedding
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(reshard_mpi.ReshardError, match=r"embedding\.word_embeddings"):
        reshard_mpi.verify(source, out)


@pytest.mark.slow
@many(8)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 200, 10**6]),
    st.sampled_from(["0.15", "0.18", "0.19"]),
    st.sampled_from([BF16, np.dtype(np.float16), np.dtype(np.float32)]),
)
def test_it_comes_back_through_any_form(
    layers: int, experts: int, apart: bool, most_bytes: int, release: str, dtype: Any
) -> None:
    training = Training(
        {key: (layers, *shape[1:]) if key.startswith(LAYER) else shape for key, shape in SHAPES.items()}
        | {f"{LAYER}mlp.experts.experts.linear_fc2.weight": (layers, experts, 4, 5), f"{LAYER}empty": (layers, 0)},
        dtype,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training.besides["args"]["num_layers"] = layers
        source = (numbered(training) if apart else training).save(folder / "x.pt")
        asked: dict[str, Any] = {"to": "megatron", "max_shard_size": most_bytes, "core_version": release}
        reshard_mpi.transform(source, folder / "out", verify=True, **asked)
        require_tensors(folder / "out", training.expected())
        reshard_mpi.transform(folder / "out", folder / "torch", to="torch", verify=True)
        reshard_mpi.transform(folder / "torch", folder / "again", **asked)
        require_same(folder / "out", folder / "again")
        names = {path.name for path in (folder / "out/iter_0000003").iterdir()}
        assert {path.name: path.read_bytes() for path in (folder / "again/iter_0000003").iterdir()}.keys() == names


@pytest.mark.parametrize("without_copies", few(1, [True, False]))
def test_a_copy_without_records_is_verified_by_its_tensors(tmp_path: Path, without_copies: bool) -> None:
    training = Training(SHAPES)
    training.besides["averages"] = {"w": tensor(array((2,), 5))}
    if without_copies:
        training.state.pop("fp32_param")
    source = training.save(tmp_path / "x.pt")
    reshard_mpi.transform(source, tmp_path / "out", **SMALL)
    copy = shutil.copytree(tmp_path / "out/iter_0000003", tmp_path / "copy")
    reshard_mpi.verify(source, copy)
    chunk = array((3, 8, 4), 2)[1].tobytes()  # a moment
    path = next(path for path in copy.glob("*.distcp") if chunk in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(chunk)] ^= 1
    path.write_bytes(content)
    with pytest.raises(reshard_mpi.ReshardError, match="linear_qkv"):
        reshard_mpi.verify(source, copy)
    apart = numbered(training).save(tmp_path / "y.pt")
    with pytest.raises(TargetError, match="on top of each other"):
        reshard_mpi.verify(apart, copy)


@pytest.mark.parametrize("dtype", few(1, ["model.*=fp16", "fp16", "model.*=fp32"]))
def test_weights_of_another_type_are_made_of_their_copies(tmp_path: Path, dtype: str) -> None:
    """Megatron makes them so when it goes on, and the target is read again."""
    training, new = Training(SHAPES), np.float32 if "fp32" in dtype else np.float16
    source, out = training.save(tmp_path / "x.pt"), tmp_path / "out"
    reshard_mpi.transform(source, out, to="megatron", dtype=dtype, verify=True)
    if not dtype.startswith("model"):
        for kind in ("exp_avg", "exp_avg_sq"):
            training.state[kind] = {key: own.astype(new) for key, own in training.state[kind].items()}
    training.weights = {key: own.astype(new) for key, own in training.state["fp32_param"].items()}
    require_tensors(out, training.expected())
    reshard_mpi.verify(source, out)
    shutil.rmtree(out / ".reshard_mpi")
    reshard_mpi.verify(source, out, dtype=dtype)
    reshard_mpi.transform(out, tmp_path / "again", to="torch", verify=True)


def test_weights_that_are_not_their_copies_rounded_are_refused(tmp_path: Path) -> None:
    training = Training(SHAPES)
    key = "decoder.final_layernorm.weight"
    training.weights[key][2] += 1
    source = training.save(tmp_path / "x.pt")
    with pytest.raises(ReshardError, match="not what Megatron would make of their copy"):
        reshard_mpi.transform(source, tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()
    reshard_mpi.transform(source, tmp_path / "out", to="megatron", exclude=["*.fp32_param"])
    training.state["fp32_param"] = {name: own.astype(np.float32) for name, own in training.weights.items()}
    require_tensors(tmp_path / "out", training.expected())


@pytest.mark.parametrize("what", few(1, ["a layer", "an expert"]))
def test_an_optimizer_of_some_layers_or_experts_is_refused(tmp_path: Path, what: str) -> None:
    """Their weights are put on top of each other, and Megatron finds no piece of the others' state."""
    name = {"a layer": "{}.mlp", "an expert": "0.mlp.experts.local_experts.{}"}[what]
    names = [f"decoder.layers.{name.format(number)}.linear_fc2.weight" for number in (0, 1)]
    training = Training(dict.fromkeys(names, (4, 4)))
    for own in training.state.values():
        del own[names[1]]
    with pytest.raises(TargetError, match="not what a checkpoint of Megatron is made of") as caught:
        reshard_mpi.transform(training.save(tmp_path / "x.pt"), tmp_path / "out", to="megatron")
    assert names[1] in str(caught.value)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="megatron", exclude=["optimizer.*"])


@pytest.mark.parametrize("version", ["0.15", "0.18", "0.19"])
def test_a_complete_target_is_skipped_or_replaced(tmp_path: Path, version: str) -> None:
    """Its own `common.pt` is no file of others, whichever release has made it."""
    source, out = Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out"
    how: dict[str, Any] = {"to": "megatron", "core_version": version}
    reshard_mpi.transform(source, out, **how)
    files = {path: path.read_bytes() for path in out.glob("iter*/*")}
    with pytest.raises(TargetError, match="is there already"):
        reshard_mpi.transform(source, out, **how)
    for again in ({"resume": True}, {"overwrite": True}):
        reshard_mpi.transform(source, out, **how, **again)
        assert {path: path.read_bytes() for path in out.glob("iter*/*")} == files
    for other in ("0.19", "0.18"):
        reshard_mpi.transform(source, out, to="megatron", core_version=other, overwrite=True)
        assert (out / "iter_0000003/common.pt").exists() is (other == "0.18")
        require_tensors(out, Training(SHAPES).expected())


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_an_index_of_others_stays(tmp_path: Path, name: str) -> None:
    source, other = Training(SHAPES).save(tmp_path / "x.pt"), tmp_path / "out/iter_0000003" / name
    other.parent.mkdir(parents=True)
    other.write_bytes(b"other")
    for again in ({}, {"resume": True}):
        with pytest.raises(TargetError, match="an index that is not known"):
            reshard_mpi.transform(source, tmp_path / "out", to="megatron", core_version="0.18", **again)
        assert other.read_bytes() == b"other"


def test_a_gated_matrix_that_is_there_whole_and_in_halves_is_refused(tmp_path: Path) -> None:
    """As where one of both is of another save: read as one tensor, the halves would be lost."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    arrays = {f"{name}{end}": np.ones((2, 2), np.float32) for end in ("_w", "_v", "")}
    model = {own: torch_peer.tensor(deepspeed_peer.sample(array), own) for own, array in arrays.items()}
    torch_peer.save(tmp_path / "a.pt", {"model": model})
    reshard_mpi.transform(tmp_path / "a.pt", tmp_path / "dst", to="megatron")
    assert "whole and in halves" in refused("transform", tmp_path / "dst", tmp_path / "out")


@pytest.mark.parametrize("name", few(2, ["optimizer.state.exp_avg.w", "common_state/shard_0_1", "a/shard_0_2"]))
def test_a_weight_that_has_a_key_of_megatrons_for_a_name_is_refused(tmp_path: Path, name: str) -> None:
    arrays = {own: np.ones((2, 2), np.float32) for own in ("w", name)}
    model = {own: torch_peer.tensor(deepspeed_peer.sample(array), own) for own, array in arrays.items()}
    torch_peer.save(tmp_path / "a.pt", {"model": model})
    with pytest.raises(TargetError, match="by which Megatron keeps something else"):
        reshard_mpi.transform(tmp_path / "a.pt", tmp_path / "dst", to="megatron")
    assert not (tmp_path / "dst").exists()
