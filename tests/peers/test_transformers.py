"""Hugging Face's models: what `save_pretrained` writes is read, and what we write `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import reshard_mpi

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

# The layers of a tensor parallel inference: columns and rows of the usual names, in a spec for two ranks.
TWO_RANKS = """
mesh = { tp = 2 }
[[parameter]]
match = "*.self_attn.?_proj.weight"
split = { 0 = ["tp"] }
optional = true
[[parameter]]
match = "*.down_proj.weight"
split = { 1 = ["tp"] }
[[parameter]]
match = "model.embed_tokens.weight"
split = { 0 = ["tp"] }
[[parameter]]
match = "*"
"""


@pytest.fixture(scope="module", params=[False, True], ids=["head of its own", "tied head"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=request.param,
    )
    return transformers.LlamaForCausalLM(config).eval()


def assert_same(folder: Path, model: Any) -> None:
    """Check that the model in a folder is this one: every tensor, and what it makes of a text."""
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


def with_configuration(source: Path, target: Path) -> Path:
    """Put what is no tensor beside the tensors, as one who publishes a model does."""
    for path in source.glob("*config.json"):
        shutil.copy(path, target / path.name)
    return target


@pytest.mark.parametrize("saved", ["40KB", "1GB"], ids=["several files", "one file"])
@pytest.mark.parametrize("written", ["25KB", None], ids=["several files", "one file"])
def test_cut_into_other_files(tmp_path: Path, model: Any, saved: str, written: str | None) -> None:
    model.save_pretrained(tmp_path / "src", max_shard_size=saved)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", to="hf", max_shard_size=written)
    files = sorted((tmp_path / "dst").glob("*.safetensors"))
    assert (len(files) > 1) == (written is not None)
    assert (tmp_path / "dst" / "model.safetensors.index.json").exists() == (written is not None)
    assert_same(with_configuration(tmp_path / "src", tmp_path / "dst"), model)


def test_the_same_files_as_transformers(tmp_path: Path, model: Any) -> None:
    """At the same limit the same tensors are in the same files, and the index says the same."""
    model.save_pretrained(tmp_path / "src", max_shard_size="30KB")
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", to="hf", max_shard_size="30KB")
    ours, theirs = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("dst", "src")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    limit = 30_000
    sizes: dict[str, int] = {}
    tensors = model.state_dict()
    for name, file in ours["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + tensors[name].numel() * tensors[name].element_size()
    assert max(sizes.values()) <= limit


@pytest.mark.parametrize("form", ["ckpt", "hdf5", "safetensors", "torch", "dcp"])
def test_through_shards_of_two_ranks(tmp_path: Path, model: Any, form: str) -> None:
    spec = tmp_path / "two.toml"
    spec.write_text(TWO_RANKS)
    model.save_pretrained(tmp_path / "src", max_shard_size="40KB")
    reshard_mpi.transform(tmp_path / "src", tmp_path / "ranks", None, spec, to=form)
    described = None if form in ("hdf5", "dcp") else spec
    reshard_mpi.transform(tmp_path / "ranks", tmp_path / "dst", described, to="hf", max_shard_size="40KB")
    assert_same(with_configuration(tmp_path / "src", tmp_path / "dst"), model)
