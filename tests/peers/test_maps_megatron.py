"""The maps between Hugging Face and Megatron-Core, against what transformers and Megatron-Core have and compute."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import run_command

import reshard_mpi

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.torch
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
SCRIPT = Path(__file__).parents[1] / "support" / "megatron_model.py"

VOCABULARY, PADDED, LAYERS, HIDDEN, FEED, HEADS, GROUPS, EXPERTS = 60, 64, 2, 32, 48, 4, 2, 4
TOKENS = [[1, 5, 9, 2, 33, 4, 7, 59], [3, 3, 0, 8, 21, 40, 11, 6]]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
THEIRS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FEED,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "layernorm_epsilon": 1e-6,
}
ROUTED = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}


class Family(NamedTuple):
    """A model as both sides configure it."""

    map: str  # the name of the map of rank files of one rank, with `-dist` behind it that of torch_dist
    config: Any  # of transformers
    theirs: dict[str, Any]  # for Megatron-Core's TransformerConfig
    layers: dict[str, Any]  # for its layer specification
    is_uneven: bool = False  # whether its layers are not alike, so that torch_dist has numbers in names
    is_tied: bool = False


def family(name: str, kind: str, theirs: dict[str, Any], layers: dict[str, Any], **others: Any) -> Family:
    own = {key: others.pop(key) for key in ("is_uneven", "is_tied") if key in others}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **others})
    return Family(f"hf-{name}-megatron", config, {**THEIRS, **theirs}, layers, **own)


def families() -> dict[str, Family]:
    routed = {"num_experts": EXPERTS}
    experts = {**ROUTED, "moe_ffn_hidden_size": 24}
    deepseek = {
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        **OF_EXPERTS,
        **LATENT,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    }
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
        "num_query_groups": HEADS,
        "rope_type": "rope",
        "qk_layernorm": True,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": 1.0,
        **experts,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    }
    of_latent = {"multi_latent_attention": True, "qk_layernorm": True}
    return {
        "llama": family("llama", "Llama", {}, {}),
        "llama-tied": family("llama", "Llama", {}, {}, is_tied=True, tie_word_embeddings=True),
        "qwen2": family("llama", "Qwen2", {"add_qkv_bias": True}, {}),
        "qwen3": family(
            "llama", "Qwen3", {"qk_layernorm": True, "kv_channels": 12}, {"qk_layernorm": True}, head_dim=12
        ),
        "mixtral": family(
            "mixtral", "Mixtral", ROUTED, routed, num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=8
        ),
        "qwen2-moe": family(
            "qwen-moe",
            "Qwen2Moe",
            {
                **experts,
                "add_qkv_bias": True,
                "moe_shared_expert_intermediate_size": 20,
                "moe_shared_expert_gate": True,
                "moe_router_pre_softmax": True,
            },
            routed,
            **OF_EXPERTS,
            num_experts=EXPERTS,
            shared_expert_intermediate_size=20,
        ),
        "qwen3-moe": family(
            "qwen-moe",
            "Qwen3Moe",
            {**experts, "qk_layernorm": True, "kv_channels": 12},
            {**routed, "qk_layernorm": True},
            **OF_EXPERTS,
            num_experts=EXPERTS,
            head_dim=12,
            norm_topk_prob=True,
        ),
        "deepseek": family(
            "deepseek", "DeepseekV3", latent, {**routed, **of_latent}, **deepseek, first_k_dense_replace=0
        ),
        "deepseek-uneven": family(
            "deepseek",
            "DeepseekV3",
            {**latent, "moe_layer_freq": [0, 1]},
            {},
            **deepseek,
            first_k_dense_replace=1,
            is_uneven=True,
        ),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what has a model of Megatron-Core made by each of its ranks, and returns the folder, once a case."""

    @cache
    def made_by_ranks(name: str, ranks: int = 1) -> Path:
        own, folder = families()[name], tmp_path_factory.mktemp(name)
        sizes = {"vocabulary": VOCABULARY, "padded": PADDED, "tied": own.is_tied, "tokens": TOKENS}
        case = {**sizes, "config": own.theirs, "layers": own.layers, "by_layer": own.is_uneven}
        (folder / "case.json").write_text(json.dumps(case))
        command = [sys.executable, SCRIPT, folder / "case.json", folder]
        environment = {"OMP_NUM_THREADS": "1"}
        with ThreadPoolExecutor(ranks) as pool:
            calls = [
                pool.submit(run_command, [*command, str(rank), str(ranks)], env=environment, check=True)
                for rank in range(ranks)
            ]
            for call in calls:
                call.result()
        return folder

    return made_by_ranks


def weights(folder: Path) -> dict[str, Any]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in safetensors.load_file(path).items()}


def assert_same(made: dict[str, Any], expected: dict[str, Any]) -> None:
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], value) for name, value in expected.items())


def transformed(source: Path, target: Path, own: Family, name: str, **options: Any) -> Path:
    own.config.save_pretrained(target.parent)
    reshard_mpi.transform(source, target, map=name, config=target.parent / "config.json", **options)
    return target


@needs_megatron
@pytest.mark.parametrize("name", families())
def test_logits_are_the_same(tmp_path: Path, made: Callable[[str], Path], name: str) -> None:
    own, theirs = families()[name], made(name)
    dist = own.map if own.is_uneven else f"{own.map}-dist"
    whole = transformed(theirs / "dist", tmp_path / "dist", own, dist, to="hf", source_format="megatron")
    ranks = transformed(theirs / "rank_0" / "model.pt", tmp_path / "rank", own, own.map, to="hf")
    assert_same(weights(ranks), weights(whole))

    own.config.save_pretrained(whole)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        whole, output_loading_info=True, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(torch.tensor(TOKENS)).logits
    expected = torch.load(theirs / "logits.pt")
    assert expected.abs().max() > 0.1 and torch.allclose(logits, expected, rtol=0, atol=3e-6)

    options = {"to": "torch", "axis": {"m": PADDED}}
    again = transformed(whole, tmp_path / "again", own, own.map, **options, like=theirs / "rank_0" / "model.pt")
    assert_same(torch.load(next(again.glob("*/*.pt"))), torch.load(theirs / "rank_0" / "model.pt"))
