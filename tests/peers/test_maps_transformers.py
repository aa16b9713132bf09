"""Experts stacked by the maps that ship are those that transformers stacks itself, and it loads what they give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard_mpi

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.torch

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
}


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def qwen2_moe() -> Any:
    sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 4}
    # A layer without experts is between two that have some.
    dense = transformers.Qwen2MoeConfig(**{**SIZES, "num_hidden_layers": 3}, **sizes, mlp_only_layers=[1])
    return transformers.Qwen2MoeForCausalLM(dense)


MODELS = [
    pytest.param("hf-mixtral-stacked", mixtral, id="mixtral"),
    pytest.param("hf-qwen2-moe", qwen2_moe, id="qwen2"),
]


@pytest.mark.parametrize(("name", "make"), MODELS)
def test_as_transformers_stacks_them(tmp_path: Path, name: str, make: Any) -> None:
    torch.manual_seed(11)
    model = make().eval()
    model.save_pretrained(tmp_path / "apart")  # which takes the experts apart
    files = list((tmp_path / "apart").glob("*.safetensors"))
    apart = {key: value for path in files for key, value in safetensors.load_file(path).items()}
    assert any(".experts.3." in key for key in apart)
    reshard_mpi.transform(tmp_path / "apart", tmp_path / "stacked", to="hf", map=name)
    stacked = safetensors.load_file(tmp_path / "stacked" / "model.safetensors")
    expected = model.state_dict()
    assert stacked.keys() == expected.keys()
    assert all(torch.equal(stacked[key], value) for key, value in expected.items())

    reshard_mpi.transform(tmp_path / "stacked", tmp_path / "again", to="hf", map=name)
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == apart.keys() and all(torch.equal(again[key], value) for key, value in apart.items())
    model.config.save_pretrained(tmp_path / "again")
    loaded = type(model).from_pretrained(tmp_path / "again", local_files_only=True).eval()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_what_transformers_calls_a_llama_is_what_the_maps_call_one(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in SIZES.items() if "tok" not in k})
    )
    model.save_pretrained(tmp_path / "model")
    source = tmp_path / "model"
    reshard_mpi.transform(source, tmp_path / "theirs", to="safetensors", map="hf-llama-mindformers")
    reshard_mpi.transform(tmp_path / "theirs", tmp_path / "again", to="hf", map="hf-llama-mindformers")
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())
