"""The maps between Hugging Face and Megatron-Core, against what transformers and Megatron-Core have and compute."""

from __future__ import annotations

import json
import random
import shutil
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
OF_TWO_RANKS = ["llama", "qwen2"]
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


def by_megatron(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test run where Megatron-Core is, and in one process with the others: all share the models it makes."""
    return pytest.mark.megatron(pytest.mark.xdist_group("models of Megatron-Core")(test))


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
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that has so many ranks make all models of Megatron-Core, once; it returns their folders'."""

    @cache
    def made_by_ranks(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"of_{ranks}")
        sizes = {"vocabulary": VOCABULARY, "padded": PADDED, "tokens": TOKENS}
        cases = {
            name: {**sizes, "tied": own.is_tied, "config": own.theirs, "layers": own.layers, "by_layer": own.is_uneven}
            for name, own in families().items()
            if ranks == 1 or name in OF_TWO_RANKS
        }
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, SCRIPT, folder / "cases.json", folder]
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


def logits_of(own: Family, folder: Path) -> Any:
    """Return what transformers computes with the weights in a folder, which must be all of the model."""
    own.config.save_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits


def assert_close(logits: Any, theirs: Path, ranks: int) -> None:
    parts = [torch.load(theirs / f"rank_{rank}" / "logits.pt") for rank in range(ranks)]
    expected = torch.cat(parts, -1)[..., :VOCABULARY]
    assert expected.abs().max() > 0.1 and torch.allclose(logits, expected, rtol=0, atol=3e-6)


@by_megatron
@pytest.mark.parametrize("name", families())
def test_logits_are_the_same(tmp_path: Path, made: Callable[[int], Path], name: str) -> None:
    own, theirs = families()[name], made(1) / name
    dist = own.map if own.is_uneven else f"{own.map}-dist"
    whole = transformed(theirs / "dist", tmp_path / "whole", own, dist, to="hf", source_format="megatron")
    ranks = transformed(theirs / "rank_0" / "model.pt", tmp_path / "rank", own, own.map, to="hf")
    assert_same(weights(ranks), weights(whole))
    assert_close(logits_of(own, whole), theirs, 1)

    options = {"to": "torch", "axis": {"m": PADDED}}
    again = transformed(whole, tmp_path / "again", own, own.map, **options, like=theirs / "rank_0" / "model.pt")
    assert_same(torch.load(next(again.glob("*/*.pt"))), torch.load(theirs / "rank_0" / "model.pt"))
    reshard_mpi.transform(theirs / "dist", tmp_path / "keys", to="safetensors", source_format="dcp")
    again = transformed(whole, tmp_path / "dist", own, dist, to="safetensors", like=tmp_path / "keys")
    assert_same(weights(again / "rank_0"), weights(tmp_path / "keys" / "rank_0"))


@by_megatron
@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_logits_of_two_ranks_are_the_same(tmp_path: Path, made: Callable[[int], Path], name: str) -> None:
    """Halves of each rank's gated matrix, and groups of queries, keys and values, lie as the map for ranks has them."""
    own, theirs = families()[name], made(2) / name
    rules = [(["*norm*"], ""), (["*linear_proj.weight", "*linear_fc2*"], 'split = { 1 = ["tensor"] }')]
    text = "mesh = { tensor = 2 }\n"
    for patterns, split in (*rules, (["*"], 'split = { 0 = ["tensor"] }')):
        text += "".join(f'[[parameter]]\nmatch = "{pattern}"\n{split}\n' for pattern in patterns)
    (tmp_path / "two.toml").write_text(text)
    for rank in range(2):
        (tmp_path / "ranks" / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(theirs / f"rank_{rank}" / "model.pt", tmp_path / "ranks" / f"rank_{rank}")
    own.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": PADDED // 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    through = {"map": f"{own.map}-tp", "config": tmp_path / "config.json"}
    reshard_mpi.transform(tmp_path / "ranks", tmp_path / "whole", tmp_path / "two.toml", to="hf", **through)
    assert_close(logits_of(own, tmp_path / "whole"), theirs, 2)
    like = {"like": tmp_path / "like.safetensors"}  # names of Megatron-Core's own layers
    shapes = reshard_mpi.load_rank(0, tmp_path / "ranks", tmp_path / "two.toml")
    safetensors.save_file({key: torch.from_numpy(value) for key, value in shapes.items()}, like["like"])
    target = tmp_path / "again"
    reshard_mpi.transform(tmp_path / "whole", target, None, tmp_path / "two.toml", to="torch", **through, **like)
    for rank in range(2):
        again = torch.load(next((target / f"rank_{rank}").glob("*.pt")))
        assert_same(again, torch.load(theirs / f"rank_{rank}" / "model.pt"))


def random_config(own: Family, seed: int) -> Any:
    """Return the configuration of a tiny model of a family with random sizes."""
    draw = random.Random(seed)
    groups, of_group, head = draw.randint(1, 3), draw.randint(1, 3), 2 * draw.randint(1, 4)
    sizes = {"vocab_size": draw.randint(5, 90), "num_hidden_layers": draw.randint(1, 4)}
    sizes |= {"num_key_value_heads": groups, "num_attention_heads": groups * of_group}
    sizes |= {"hidden_size": groups * of_group * head, "intermediate_size": 2 * draw.randint(2, 20), "head_dim": head}
    values = {**own.config.to_dict(), **sizes, "tie_word_embeddings": draw.random() < 0.3}
    if "q_lora_rank" in values:
        values |= {"num_key_value_heads": groups * of_group, "q_lora_rank": draw.choice([None, 6])}
        values.pop("head_dim")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if key in values and own.map != "hf-llama-megatron":
            values[key] = 2 * draw.randint(2, 6)
    for key in ("layer_types", "model_type", "transformers_version"):
        values.pop(key, None)
    return type(own.config)(**values)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", families())
def test_all_that_transformers_saves_comes_back(tmp_path: Path, name: str, seed: int) -> None:
    """No name of a random tiny model is left over on either side, and transformers loads what comes back."""
    own = families()[name]
    own = own._replace(config=random_config(own, seed))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(own.config).eval()
    with torch.no_grad():
        for parameter in model.state_dict().values():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "ours")
    again = tmp_path
    for layout in [own.map, *([] if own.is_uneven else [f"{own.map}-dist"])]:
        theirs = tmp_path / layout / "theirs"
        transformed(tmp_path / "ours", theirs, own, layout, to="safetensors", axis={"m": 16})
        names = [*weights(theirs / "rank_0")]
        assert all(each.startswith(("embedding.", "decoder.", "output_layer.")) for each in names)
        again = transformed(theirs, tmp_path / layout / "again", own, layout, to="hf")
        assert_same(weights(again), weights(tmp_path / "ours"))
    own.config.save_pretrained(again)
    loaded, info = type(model).from_pretrained(again, output_loading_info=True, local_files_only=True)
    assert not any(info.values()), info
    assert_same(loaded.state_dict(), model.state_dict())
