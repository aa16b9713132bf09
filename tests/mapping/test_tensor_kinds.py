"""What names of tensors tell: kinds, layers, experts, and which tensors are kin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.mapping.tensor_kinds import TensorKind, expert_of, kin_of, kind_of, layer_of

NAMES_OF_KIND = {
    TensorKind.MODEL: (
        "w",
        "weight.step",
        "model.layers.0.mlp.down_proj.weight",
        "model.ema.w",
        "model.optimizer_embedding.weight",
        "encoder.state.proj.weight",
        "layer1.weight",
        "bn1.num_batches_tracked",
        "model.epoch",
        "model.state.step",
        "state_dict.net.0.bias",
        "transformer/h/0/attn/w",
        ".".join("w" * 100),
    ),
    TensorKind.COPY: (
        "optimizer.state.model.layers.0.w.fp32_param",
        "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight",
        "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight",
        "chained_0.optimizer.state.param.decoder.layers.0.w",
        "master.w",
        "optimizer.master_param.w",
    ),
    TensorKind.MOMENT: (
        "moments.layer1.weight",
        "adam_m.model.layers.0.w",
        "exp_avg.model.w",
        "w.exp_avg",
        "model.layers.0.w.exp_avg_sq",
        "optimizer.state.0.exp_avg",
        "optim.exp_avg_sq.decoder.w",
        "state.0.momentum_buffer",
        "optimizer.state.model.step.weight.exp_avg",
        "moment1/fc/w",
        "accum.w",
        "optimizer_states.0.state.4.exp_avg",
    ),
    TensorKind.STEP: (
        "step",
        "global_step",
        "epoch_num",
        "optimizer.state.layers.0.w.step",
        "state.3.step",
        "step.w",
        "state_step.w",
        "scheduler.last_epoch",
        "args.iteration",
        "optimizer.param_groups.0.step",
        "opt.state.fc.weight.step",
        "train.opts.0.state.model.layers.0.w.step",
    ),
    TensorKind.OTHER: (
        "rng_state",
        "scheduler.base_lrs.0",
        "args.hidden_size",
        "accu_grads.w",
        "optimizer.param_groups.0.lr",
        "ema.model.w",
        "learning_rate",
        "model.layers.0.self_attention._extra_state",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES_OF_KIND.items() for name in names])
def test_the_kind(kind: TensorKind, name: str) -> None:
    assert kind_of(name) is kind


def test_the_branch_of_each_kind() -> None:
    assert [kind.branch for kind in TensorKind] == ["model", "optimizer", "optimizer", "optimizer", "other"]


@pytest.mark.parametrize(
    ("name", "layer", "expert", "kin"),
    [
        ("model.layers.3.w", 3, None, "model.layers.*.w"),
        ("transformer.h.11.attn.w", 11, None, "transformer.h.*.attn.w"),
        ("layer1.0.conv2.weight", 1, None, "layer*.0.conv2.weight"),
        ("layers_12.w", 12, None, "layers_*.w"),
        ("encoder/blocks/7/w", 7, None, "encoder/blocks/*/w"),
        ("decoder.block.2.layer.0.w", 2, None, "decoder.block.*.layer.0.w"),
        ("model.layers.3.mlp.experts.17.w1", 3, 17, "model.layers.*.mlp.experts.*.w1"),
        ("experts.4.layers.2.w", 2, 4, "experts.*.layers.*.w"),
        ("optimizer.state.decoder.layers.1.mlp.local_experts.0.w.exp_avg", 1, 0, None),
        ("model.layers.0.deepspeed_moe.experts.deepspeed_experts.5.w", 0, 5, None),
        ("expert_2.w", None, 2, "expert_*.w"),
        ("optimizer.state.3.exp_avg", None, None, "optimizer.state.3.exp_avg"),
        ("net.0.weight", None, None, "net.0.weight"),
        ("decoder.layers.mlp.experts.experts.w", None, None, "decoder.layers.mlp.experts.experts.w"),
        ("model.layers.\uff13.w", None, None, "model.layers.\uff13.w"),
        (f"layers.{'9' * 5000}.w", None, None, None),
        ("layers.5", 5, None, "layers.*"),
    ],
)
def test_layer_and_expert(name: str, layer: int | None, expert: int | None, kin: str | None) -> None:
    assert (layer_of(name), expert_of(name)) == (layer, expert)
    if kin is not None:
        assert kin_of(name) == kin


@given(st.text("layersxph0123.*_/", max_size=40))
def test_kin_have_the_same_name_but_for_layer_and_expert(name: str) -> None:
    layer, expert, kin = layer_of(name), expert_of(name), kin_of(name)
    assert (kin == name) == (layer is None and expert is None)
    assert len(kin.split(".")) == len(name.split("."))


@given(st.integers(0, 10**8), st.integers(0, 10**8))
def test_all_layers_and_experts_of_a_tensor_are_kin(layer: int, expert: int) -> None:
    name = f"optimizer.state.model.layers.{layer}.experts.{expert}.w.exp_avg"
    assert kin_of(name) == kin_of("optimizer.state.model.layers.0.experts.0.w.exp_avg")
    assert (layer_of(name), expert_of(name)) == (layer, expert)
