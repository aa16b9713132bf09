"""To how many ranks a model can be cut, and what stands in the way, by its configuration and its shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import sample, write_ranks, write_shard
from support.command_line import done, refused, run_here

from reshard_mpi.checkpoints.parallel_sizes import ModelSizes, TensorSize, parallel_sizes

LLAMA = {
    "model.embed_tokens.weight": (96, 24),
    **{f"model.layers.{layer}.self_attn.q_proj.weight": (24, 24) for layer in range(4)},
    **{f"model.layers.{layer}.self_attn.k_proj.weight": (8, 24) for layer in range(4)},
    **{f"model.layers.{layer}.norm.weight": (24,) for layer in range(4)},
    **{f"model.layers.{layer}.mlp.experts.{e}.w1.weight": (48, 24) for layer in range(4) for e in range(6)},
    "lm_head.weight": (96, 24),
}
CONFIG = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "num_local_experts": 6,
    "num_hidden_layers": 4,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    write_shard({name: np.zeros(shape, "f4") for name, shape in LLAMA.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def facts_of(*arguments: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(done("inspect", *arguments, "--parallel-sizes", "--json").out)
    return facts


def fits(facts: dict[str, Any]) -> dict[str, list[int]]:
    axes = ("tensor", "pipeline", "expert")
    return {axis: [count["ranks"] for count in facts[axis] if count["fits"]] for axis in axes}


def test_by_a_configuration_beside_the_files(llama: Path) -> None:
    facts = facts_of(llama)
    assert facts["kind"] == "parallel sizes" and facts["notes"] == []
    assert facts["sizes"] == {
        "heads": 12,
        "kv_groups": 4,
        "vocabulary": 96,
        "experts": 6,
        "layers": 4,
        "origin": str(llama / "config.json"),
    }
    assert fits(facts) == {"tensor": [1, 2, 4], "pipeline": [1, 2, 4], "expert": [1, 2, 3, 6]}
    obstacles = {count["ranks"]: count["obstacles"] for count in facts["tensor"]}
    assert obstacles[3] == ["4 KV groups"] and obstacles[6] == ["4 KV groups"]
    assert obstacles[8] == ["12 heads", "4 KV groups"]
    assert obstacles[5][:3] == ["12 heads", "4 KV groups", "vocabulary of 96, which 4 rows more would make a multiple"]
    assert obstacles[5][3:] == ["model.layers.*.mlp.experts.*.w1.weight: 48 rows / 5 = 9.6, not a whole number"]
    assert {count["ranks"]: count["obstacles"] for count in facts["pipeline"]}[3] == ["4 layers"]
    assert {count["ranks"]: count["obstacles"] for count in facts["expert"]}[4] == ["6 experts"]


def test_weights_are_cut_along_the_dimension_that_servers_cut(tmp_path: Path) -> None:
    """Others do not matter: the hidden size is a multiple of 8, the width of the feed-forward part is none."""
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (48, 16),
        f"{layer}.self_attn.q_proj.weight": (24, 16),
        f"{layer}.mlp.gate.weight": (2, 16),  # a router, which all ranks have whole
        f"{layer}.mlp.gate_proj.weight": (12, 16),
        f"{layer}.mlp.down_proj.weight": (16, 12),
    }
    write_shard({name: np.zeros(shape, "f4") for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 24, "vocab_size": 48}))
    facts = facts_of(tmp_path)
    assert fits(facts)["tensor"] == [1, 2, 3, 4, 6, 12]
    obstacles = {count["ranks"]: count["obstacles"] for count in facts["tensor"]}
    assert obstacles[8] == [
        "model.layers.*.mlp.gate_proj.weight: 12 rows / 8 = 1.5, not a whole number",
        "model.layers.*.mlp.down_proj.weight: 12 columns / 8 = 1.5, not a whole number",
    ]
    # GPT-2 has columns first.
    write_shard({"h.0.mlp.c_fc.weight": np.zeros((16, 9), "f4")}, tmp_path / "model.safetensors")
    assert fits(facts_of(tmp_path))["tensor"] == [1, 2, 3, 4, 8]


def test_bytes_of_a_rank(llama: Path) -> None:
    facts = facts_of(llama)
    matrices = 4 * (2 * 96 * 24 + 4 * (24 * 24 + 8 * 24) + 24 * 48 * 24)
    norms, experts = 4 * 4 * 24, 4 * 24 * 48 * 24
    outside = 4 * 2 * 96 * 24
    assert [count["model_bytes"] for count in facts["tensor"]][:4:3] == [matrices + norms, matrices // 4 + norms]
    assert facts["pipeline"][1]["model_bytes"] == outside + (matrices + norms - outside) // 2
    assert facts["expert"][2]["model_bytes"] == matrices + norms - experts + experts // 3
    assert all(count["size_bytes"] == count["model_bytes"] for count in facts["tensor"])


def test_as_text(llama: Path) -> None:
    assert done("inspect", llama, "--parallel-sizes").out.splitlines() == [
        f"4 layers, 12 heads, 4 KV groups, 6 experts, vocabulary of 96 ({llama}/config.json)",
        "tensor-parallel ranks: 1, 2, 4",
        "  1: at most 138.38 KiB of weights a rank",
        "  2: at most 69.38 KiB of weights a rank",
        "  4: at most 34.88 KiB of weights a rank",
        "  8: no, because of 12 heads; 4 KV groups",
        "pipeline-parallel ranks: 1, 2, 4",
        "  1: at most 138.38 KiB of weights a rank",
        "  2: at most 78.19 KiB of weights a rank",
        "  4: at most 48.09 KiB of weights a rank",
        "expert-parallel ranks: 1-3, 6",
        "  1: at most 138.38 KiB of weights a rank",
        "  2: at most 84.38 KiB of weights a rank",
        "  3: at most 66.38 KiB of weights a rank",
        "  4: no, because of 6 experts",
        "  6: at most 48.38 KiB of weights a rank",
    ]


def test_without_a_configuration_shapes_tell_all_but_heads(llama: Path) -> None:
    (llama / "config.json").unlink()
    facts = facts_of(llama)
    assert facts["sizes"] | {"origin": ""} == {**dict.fromkeys(ModelSizes._fields), "origin": "", **OWN}
    assert "heads are not known" in facts["notes"][0]
    assert fits(facts) == {"tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4], "expert": [1, 2, 3, 6]}  # k_proj has 8 rows


OWN = {"vocabulary": 96, "experts": 6, "layers": 4}


def test_a_configuration_that_is_given_and_says_other_numbers(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other\x1b.json"
    other.write_text(json.dumps({"text_config": {"num_attention_heads": 6, "num_hidden_layers": 5}, "n_head": 7}))
    facts = facts_of(llama, "--config", other)
    assert facts["sizes"]["heads"] == facts["sizes"]["kv_groups"] == 6 and facts["sizes"]["layers"] == 4
    assert facts["notes"] == [f"{other} says 5 layers, the names of tensors say 4; these count"]
    out = done("inspect", llama, "--config", other, "--parallel-sizes").out
    assert "\x1b" not in out and "other\\x1b.json" in out


@pytest.mark.parametrize("text", ["[]", "{", "\udcff"])
def test_a_configuration_that_is_none(llama: Path, text: str) -> None:
    (llama / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "the configuration is no" in refused("inspect", llama, "--parallel-sizes")


def test_arguments_in_a_checkpoint(tmp_path: Path) -> None:
    weights = torch_peer.tensor(sample("w", np.zeros((8, 4), "f4")), "0")
    moments = torch_peer.tensor(sample("m", np.zeros((8, 4), "f4")), "1")
    arguments = {"num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True, "padded_vocab_size": 8}
    content = {"model": {"layers.0.w": weights}, "optimizer": {"state": {0: {"exp_avg": moments}}}, "args": arguments}
    torch_peer.save(tmp_path / "a.pt", content)
    facts = facts_of(tmp_path / "a.pt")
    assert facts["sizes"]["origin"] == "the arguments in the checkpoint"
    assert (facts["sizes"]["heads"], facts["sizes"]["kv_groups"], facts["sizes"]["vocabulary"]) == (4, 2, 8)
    assert fits(facts)["tensor"] == [1, 2]
    assert (facts["tensor"][1]["model_bytes"], facts["tensor"][1]["size_bytes"]) == (64, 128)
    assert (
        "at most 64 B of weights a rank, 128 B with all else"
        in done("inspect", tmp_path / "a.pt", "--parallel-sizes").out
    )


def test_stacked_layers_and_experts() -> None:
    shapes = {
        "model.decoder.layers.self_attention.linear_qkv.weight": (6, 24, 8),
        "model.decoder.layers.mlp.experts.experts.linear_fc1.weight": (6, 4, 16, 8),
        "model.decoder.layers.input_layernorm.weight": (6, 8),
        "model.embedding.word_embeddings.weight": (40, 8),
        "model.embedding.position_embeddings.weight": (64, 8),
    }
    found = parallel_sizes({name: TensorSize(shape, 2) for name, shape in shapes.items()}, ModelSizes(heads=8))
    assert (found.sizes.layers, found.sizes.experts, found.sizes.vocabulary) == (6, 4, 40)
    assert [count.ranks for count in found.pipeline if not count.obstacles] == [1, 2, 3, 6]
    assert [count.ranks for count in found.expert if not count.obstacles] == [1, 2, 4]
    assert [count.ranks for count in found.tensor if not count.obstacles] == [1, 2, 4, 8]
    total = sum(TensorSize(shape, 2).size_bytes for shape in shapes.values())
    assert found.tensor[1].model_bytes == (total - 6 * 8 * 2) // 2 + 6 * 8 * 2


def test_parts_that_ranks_hold_are_put_together(tmp_path: Path) -> None:
    whole = np.zeros((8, 6), "f4")
    write_ranks({rank: {"layers.0.w": whole[4 * rank :][:4]} for rank in (0, 1)}, tmp_path / "src", "safetensors")
    strategy = tmp_path / "strategy.toml"
    strategy.write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\n')
    facts = facts_of(tmp_path / "src", "--src-strategy", strategy)
    assert fits(facts)["tensor"] == [1, 2, 3, 4, 6, 8] and facts["tensor"][0]["model_bytes"] == whole.nbytes


def test_it_goes_with_a_whole_checkpoint_alone(llama: Path) -> None:
    for others in (["model*"], ["--rank", "0"], ["--stats"], ["--toml"]):
        said = run_here("inspect", llama, "--parallel-sizes", *others)
        assert said.code == 2 and "--parallel-sizes is of whole checkpoints" in said.err, said


def quantized(folder: Path, shapes: dict[str, tuple[str, tuple[int, ...]]], config: dict[str, Any]) -> Path:
    """Write a quantized checkpoint with sparse tensors of real sizes: only their shapes count."""
    folder.mkdir()
    header, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * {"F8_E4M3": 1, "U8": 1, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_blocks(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    scales = ("F32", (-(-rows // 128), -(-columns // 128)))
    return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.weight_scale_inv": scales}


def in_gptq(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    groups = columns // 128
    return {
        f"{name}.qweight": ("I32", (columns // 8, rows)),
        f"{name}.qzeros": ("I32", (groups, rows // 8)),
        f"{name}.scales": ("F16", (groups, rows)),
        f"{name}.g_idx": ("I32", (columns,)),
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYER = "model.layers.0"


def test_servers_cut_blocks_of_deepseek_between_them(tmp_path: Path) -> None:
    shapes = {
        **in_blocks(f"{LAYER}.self_attn.q_a_proj", 1536, 7168),
        **in_blocks(f"{LAYER}.self_attn.kv_a_proj_with_mqa", 576, 7168),
        **in_blocks(f"{LAYER}.self_attn.kv_b_proj", 32768, 512),
        **in_blocks(f"{LAYER}.self_attn.o_proj", 7168, 16384),
        **in_blocks(f"{LAYER}.mlp.gate_proj", 18432, 7168),
        **in_blocks(f"{LAYER}.mlp.down_proj", 7168, 18432),
        **in_blocks(f"{LAYER}.mlp.experts.0.down_proj", 7168, 2048),
        **in_blocks(f"{LAYER}.mlp.shared_experts.up_proj", 512, 7168),
    }
    config = {"num_attention_heads": 128, "quantization_config": FP8}
    facts = facts_of(quantized(tmp_path / "deepseek", shapes, config))
    assert fits(facts)["tensor"] == [1, 2, 4]
    obstacles = {count["ranks"]: count["obstacles"] for count in facts["tensor"]}
    shared = "model.layers.*.mlp.shared_experts.up_proj.weight: 512 rows"
    assert obstacles[8] == [f"{shared} / 8 = 64, not a multiple of 128"]
    assert obstacles[16] == [f"{shared} / 16 = 32, not a multiple of 128"]
    assert obstacles[32] == [
        "model.layers.*.mlp.gate_proj.weight: 18432 rows / 32 = 576, not a multiple of 128",
        "model.layers.*.mlp.down_proj.weight: 18432 columns / 32 = 576, not a multiple of 128",
        "model.layers.*.mlp.experts.*.down_proj.weight: 2048 columns / 32 = 64, not a multiple of 128",
        "1 more weight",
    ]
    whole = sum(
        rows * columns + 4 * -(-rows // 128) * (columns // 128) for rows, columns in ((1536, 7168), (576, 7168))
    )
    total = facts["tensor"][0]["model_bytes"]
    assert facts["tensor"][1]["model_bytes"] == whole + (total - whole) // 2
    others = {name: kind for name, kind in shapes.items() if "shared" not in name}
    text = done("inspect", quantized(tmp_path / "others", others, config), "--parallel-sizes").out
    assert "tensor-parallel ranks: 1, 2, 4, 8, 16\n" in text
    assert "  32: no, because of model.layers.*.mlp.gate_proj.weight: 18432 rows / 32 = 576, not" in text


def test_servers_cut_groups_of_gptq_along_columns_alone(tmp_path: Path) -> None:
    shapes = {**in_gptq(f"{LAYER}.self_attn.q_proj", 4096, 4096), **in_gptq(f"{LAYER}.mlp.down_proj", 4096, 3072)}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config = {"num_attention_heads": 32, "quantization_config": {**settings, "desc_act": False}}
    facts = facts_of(quantized(tmp_path / "gptq", shapes, config))
    assert fits(facts)["tensor"] == [1, 2, 4, 8]
    name = "model.layers.*.mlp.down_proj.weight"
    assert facts["tensor"][15]["obstacles"] == [f"{name}: 3072 columns / 16 = 192, not a multiple of 128"]
    # With an index all groups are whole on each rank, so that words of 8 elements are the grain.
    by_index = {"num_attention_heads": 32, "quantization_config": {**settings, "desc_act": True}}
    folder = quantized(tmp_path / "index", shapes, by_index)
    facts = facts_of(folder)
    assert fits(facts)["tensor"] == [1, 2, 4, 8, 16, 32]
    weights = (4096 * 4096 + 4096 * 3072) // 2
    own = 24 * 4096 * 2 + 24 * 512 * 4 + 4096 * 4  # scales and zeros of the rows' piece are whole; q_proj's index too
    cut = weights + 32 * 4096 * 2 + 32 * 512 * 4 + 3072 * 4
    assert facts["tensor"][1]["model_bytes"] == own + cut // 2
    (folder / "config.json").rename(tmp_path / "config.json")
    assert fits(facts_of(folder, "--config", tmp_path / "config.json"))["tensor"] == [1, 2, 4, 8, 16, 32]


def test_servers_cut_stacked_experts_of_gpt_oss_between_blocks(tmp_path: Path) -> None:
    experts = f"{LAYER}.mlp.experts"
    shapes = {
        f"{experts}.gate_up_proj_blocks": ("U8", (32, 5760, 90, 16)),
        f"{experts}.gate_up_proj_scales": ("U8", (32, 5760, 90)),
        f"{experts}.gate_up_proj_bias": ("BF16", (32, 5760)),
        f"{experts}.down_proj_blocks": ("U8", (32, 2880, 90, 16)),
        f"{experts}.down_proj_scales": ("U8", (32, 2880, 90)),
        f"{experts}.down_proj_bias": ("BF16", (32, 2880)),
    }
    config = {"num_attention_heads": 64, "num_key_value_heads": 8, "quantization_config": {"quant_method": "mxfp4"}}
    facts = facts_of(quantized(tmp_path / "gpt-oss", shapes, config))
    assert fits(facts)["tensor"] == [1, 2] and facts["sizes"]["experts"] == 32
    named = "model.layers.*.mlp.experts.down_proj: 2880 columns"
    assert facts["tensor"][7]["obstacles"] == [f"{named} / 8 = 360, not a multiple of 32"]
    assert facts["tensor"][3]["obstacles"] == [f"{named} / 4 = 720, not a multiple of 32"]


def test_joined_weights_are_cut_in_each_part_and_unknown_schemes_nowhere(tmp_path: Path) -> None:
    shapes = {**in_blocks(f"{LAYER}.mlp.gate_up_proj", 2048, 1024), **in_blocks(f"{LAYER}.qkv_proj", 3072, 1024)}
    config = {"num_attention_heads": 16, "num_key_value_heads": 4, "quantization_config": FP8}
    facts = facts_of(quantized(tmp_path / "joined", shapes, config))
    assert fits(facts)["tensor"] == [1, 2, 4]
    keys, gates = (
        "model.layers.*.qkv_proj.weight: 512 rows of keys",
        "model.layers.*.mlp.gate_up_proj.weight: 1024 rows of each part",
    )
    assert facts["tensor"][7]["obstacles"] == ["4 KV groups", f"{keys} / 8 = 64, not a multiple of 128"]
    assert facts["tensor"][15]["obstacles"][1] == f"{gates} / 16 = 64, not a multiple of 128"
    unknown = {**config, "quantization_config": {"quant_method": "of_tomorrow"}}
    facts = facts_of(quantized(tmp_path / "unknown", shapes, unknown))
    assert fits(facts)["tensor"] == [1]
    assert "moved whole, being quantized by of_tomorrow" in facts["tensor"][1]["obstacles"][0]
