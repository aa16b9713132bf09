"""Older checkpoints that Megatron itself has written, to every target: equal to what the running ranks gave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from formats.test_megatron_samples import DATA, LEGACY, unpacked
from support import dcp_peer, deepspeed_peer, hdf5_peer, safetensors_peer
from support.command_line import done
from support.torch_runs import require_equal, samples_in, tree_of

from reshard_mpi.testing.sample_tensors import SampleTensor

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no megatron under RESHARD_MPI_SHARED_DATA or ../shared/data")
# Names that torch_dist has for norms, and the module of the samples.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_KINDS = {"param": "fp32_param"}
_ROWS = {"legacy_tp2pp2": 128, "legacy_pp2_vpp2_tied_plain": 112}


def expected(name: str) -> Iterator[tuple[str, SampleTensor]]:
    """Yield the tensors of the running ranks by their names in a whole training state, layer by layer."""
    with np.load(DATA / "expected" / "tp2.npz") as arrays:
        for stacked, array in arrays.items():
            kind, _, key = stacked.rpartition("|")
            part = key.removeprefix("decoder.layers.")
            if "tied" in name and key == "output_layer.weight":
                continue
            layers = enumerate(array) if part != key else [(0, array)]
            for layer, own in layers:
                own_key = f"decoder.layers.{layer}.{_NORMS.get(part, part)}" if part != key else key
                whole = (
                    own[: _ROWS[name]] if key in ("embedding.word_embeddings.weight", "output_layer.weight") else own
                )
                named = f"optimizer.state.{own_key}.{_KINDS.get(kind, kind)}" if kind else f"model.{own_key}"
                yield named, deepspeed_peer.sample(whole, None if kind else "bfloat16", named)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEGACY)
def test_every_target(tmp_path: Path, name: str) -> None:
    save = unpacked(name, tmp_path / "unpacked")
    for to in ("torch", "dcp", "hdf5", "hf"):
        done("transform", save, tmp_path / to, "--to", to, "--verify")
    made = samples_in(tree_of(tmp_path / "torch"))
    whole = dict(expected(name))
    require_equal(made, whole)
    assert {own for own in made if not own.endswith(".step")} == set(whole)
    others = {
        "dcp": dcp_peer.read(tmp_path / "dcp").tensors,
        "hdf5": hdf5_peer.read(tmp_path / "hdf5" / "rank_0" / "checkpoint_0.h5").tensors,
    }
    for to, tensors in others.items():
        assert set(tensors) == set(made), to
        require_equal(tensors, made)
    weights = {own: tensor for own, tensor in made.items() if own.startswith("model.")}
    require_equal(
        safetensors_peer.read(tmp_path / "hf" / "model.safetensors").tensors,
        {own.removeprefix("model."): tensor for own, tensor in weights.items()},
    )


@pytest.mark.parametrize("name", LEGACY)
def test_every_key_of_every_file(tmp_path: Path, name: str) -> None:
    """What files hold is part of the target, or is named."""
    save = unpacked(name, tmp_path / "unpacked")
    said = done("transform", save, tmp_path / "out", "--to", "torch").err
    target = tree_of(tmp_path / "out")
    files = [*save.rglob("model_optim_rng.pt")]
    for path in files:
        content = deepspeed_peer.load(path)
        for key, value in content.items():
            if key.startswith("model"):
                kinds = {own.rpartition(".")[2] for own in value}
                assert kinds <= {own.rpartition(".")[2] for own in target["model"]}
            elif key == "optimizer":
                inner = value["optimizer"]
                assert set(value) <= {"optimizer", "fp32_from_fp16_params"} and set(inner) <= {"state", "param_groups"}
                for group, made in zip(inner["param_groups"], target["optimizer"]["param_groups"], strict=True):
                    assert set(group) | {"params"} == set(made)
                    assert all(group[own] == made[own] for own in group if own != "params")
            elif f"{key}: " not in said:
                own = vars(value) if key == "args" else value
                kept = target["scheduler" if key == "opt_param_scheduler" else key]
                assert set(own) == set(kept) if isinstance(own, dict) else own == kept, key
    assert len(files) in (2, 4)
