"""Models of 15 architectures that transformers saves are sound by its own definition; spoiled ones are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.command_line import done, run_here

from reshard_mpi.soundness import command, definition

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {**DECODER, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {**DECODER, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("mistral", DECODER),
    "MixtralForCausalLM": ("mixtral", {**DECODER, "num_local_experts": 4}),
    "Qwen2ForCausalLM": ("qwen2", DECODER),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {**MIXTURE, "shared_expert_intermediate_size": 24}),
    "Qwen3ForCausalLM": ("qwen3", {**DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**MIXTURE, "head_dim": 8}),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {
            **MIXTURE,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "Gemma2ForCausalLM": ("gemma2", {**DECODER, "head_dim": 8}),
    "PhiForCausalLM": ("phi", {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}),
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "GPTNeoXForCausalLM": ("gpt_neox", DECODER),
    "BertForMaskedLM": ("bert", DECODER),
    "T5ForConditionalGeneration": ("t5", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}),
    "ViTForImageClassification": ("vit", {**DECODER, "image_size": 16, "patch_size": 4}),
}


def saved(architecture: str, folder: Path, *, layers: int = 2, in_files: str = "5GB") -> Path:
    """Have transformers make a model of random numbers, and save it."""
    kind, settings = MODELS[architecture]
    numbered = {key: layers for key in ("num_hidden_layers", "n_layer", "num_layers") if key in settings}
    config = transformers.AutoConfig.for_model(kind, **{**settings, **numbered})
    torch.manual_seed(layers)
    model = getattr(transformers, architecture)(config)
    for parameter in model.parameters():  # some begin as zeros, and some alike in all layers
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder, max_shard_size=in_files)
    return folder


class ForkedModel(definition.ModelProcess):
    """Lists a model's tensors in a fork of this process, which has imported what takes a new one two seconds."""

    def __init__(self, config: definition.ModelConfig) -> None:
        self._config = config
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        reader, writer = os.pipe()
        self._fork = os.fork()
        if self._fork == 0:
            os.dup2(self._answer.fileno(), 1)
            os.close(writer)
            with os.fdopen(reader) as sys.stdin:
                definition.print_tensors()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            json.dump(config.values, stream)

    def result(self) -> definition.Definition | str:
        """Have the fork's answer taken for that of a process."""
        self._process = cast("subprocess.Popen[bytes]", SimpleNamespace(communicate=self._communicate))
        return super().result()

    def _communicate(self, timeout: float) -> tuple[bytes, None]:
        assert os.waitpid(self._fork, 0)[1] == 0
        with self._answer as answer:
            answer.seek(0)
            return answer.read(), None

    def close(self) -> None:
        """Leave the fork, which ends by itself."""


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ModelProcess", ForkedModel)


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("architecture", MODELS)
def test_what_transformers_saves_is_sound(architecture: str, tmp_path: Path) -> None:
    """Every second architecture in one file of two layers, the others in many files of three."""
    form: dict[str, Any] = {} if [*MODELS].index(architecture) % 2 else {"layers": 3, "in_files": "20KB"}
    finished = done("audit", saved(architecture, tmp_path / "model", **form), "--jobs", "1")
    assert f"{architecture} of transformers {transformers.__version__}" in finished.out and "error" not in finished.out


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "LlamaForCausalLM"])
def test_a_lost_shard_with_a_consistent_index(architecture: str, tmp_path: Path) -> None:
    folder = saved(architecture, tmp_path / "whole", in_files="20KB")
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    gone = sorted(set(files["weight_map"].values()))[1]
    lost = {name for name, file in files["weight_map"].items() if file == gone}
    files["weight_map"] = {name: file for name, file in files["weight_map"].items() if file != gone}
    names = sorted(set(files["weight_map"].values()))
    renamed = {name: f"model-{number + 1:05}-of-{len(names):05}.safetensors" for number, name in enumerate(names)}
    (folder / gone).unlink()
    for name, new in renamed.items():
        shutil.move(folder / name, folder / new)
    files["weight_map"] = {name: renamed[file] for name, file in files["weight_map"].items()}
    index.write_text(json.dumps(files))
    finished = run_here("audit", folder, "--json", "--jobs", "1")
    found = {(each["kind"], each["tensor"]) for each in json.loads(finished.out)["findings"]}
    assert finished.code == 4 and found == {("missing", name) for name in lost}


def test_the_configuration_of_a_model_with_more_layers(tmp_path: Path) -> None:
    folder = saved("Qwen3MoeForCausalLM", tmp_path / "model")
    deeper = saved("Qwen3MoeForCausalLM", tmp_path / "deeper", layers=3)
    finished = run_here("audit", folder, "--config", deeper, "--json", "--jobs", "1")
    found = {
        (each["kind"], each["tensor"].startswith("model.layers.2.")) for each in json.loads(finished.out)["findings"]
    }
    assert finished.code == 4 and found == {("missing", True)}


def test_a_head_of_its_own_beside_a_tied_one(tmp_path: Path) -> None:
    folder = saved("LlamaForCausalLM", tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    safetensors.save_file({**tensors, "lm_head.weight": embedding.clone()}, path, {"format": "pt"})
    assert done("audit", folder, "--jobs", "1").out.endswith("sound\n")
    safetensors.save_file({**tensors, "lm_head.weight": embedding * 2}, path, {"format": "pt"})
    finished = run_here("audit", folder, "--jobs", "1")
    assert finished.code == 4 and "error: tied 'lm_head.weight'" in finished.out


def test_a_training_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(9, 6), "layers": torch.nn.ModuleList(layers)})
    for number, kind in enumerate((torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)):
        optimizer = kind(model.parameters(), **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        for _ in range(3):
            hidden = model["emb"](torch.arange(9))
            for layer in model["layers"]:
                hidden = layer(hidden)
            optimizer.zero_grad()
            hidden.square().sum().backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{number}.pt")
        finished = done("audit", tmp_path / f"{number}.pt", "--jobs", "1")
        assert "training state" in finished.out and "error" not in finished.out
