"""To how many ranks a model can be cut, and what stands in the way, by its configuration and its shapes."""

from __future__ import annotations

import json
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
    assert obstacles[5][3] == "model.embed_tokens.weight [96, 24]" and obstacles[5][-1] == "1 more shape"
    assert {count["ranks"]: count["obstacles"] for count in facts["pipeline"]}[3] == ["4 layers"]
    assert {count["ranks"]: count["obstacles"] for count in facts["expert"]}[4] == ["6 experts"]


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
    assert fits(facts) == {"tensor": [1, 2, 3, 4, 6, 8, 12, 24], "pipeline": [1, 2, 4], "expert": [1, 2, 3, 6]}


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
