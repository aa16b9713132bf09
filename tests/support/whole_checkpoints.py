"""A training of a tiny mixture of experts, saved as a sharded folder, and the process that tells its definition.

`transformers` and `torch` are stand-ins, which have the model's class and little else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from reshard_mpi.testing.sample_tensors import ShardContents
from support import safetensors_peer
from support.checkpoints import sample

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

LAYERS, EXPERTS, HIDDEN, INNER, ROWS = 3, 4, 8, 6, 40
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CONFIG = {"architectures": ["TinyMoeForCausalLM"], "model_type": "tiny_moe", "layers": LAYERS, "experts": EXPERTS}

_TORCH = """
import contextlib
device = lambda name: contextlib.nullcontext()
"""
_TRANSFORMERS = f"""
__version__ = "4.99"
class Shaped:
    def __init__(self, *shape): self.shape = shape
class TinyMoeForCausalLM:
    base_model_prefix, all_tied_weights_keys = "model", {{"lm_head.weight": "model.embed_tokens.weight"}}
    _from_config = _keys_to_ignore_on_load_unexpected = _keys_to_ignore_on_save = None
    def __init__(self, config): self.config = config
    def state_dict(self):
        made = {{"model.embed_tokens.weight": Shaped({ROWS}, {HIDDEN}), "lm_head.weight": Shaped({ROWS}, {HIDDEN})}}
        for layer in range(self.config["layers"]):
            made[f"model.layers.{{layer}}.norm.weight"] = Shaped({HIDDEN})
            made[f"model.layers.{{layer}}.q_proj.weight"] = Shaped({HIDDEN}, {HIDDEN})
            for expert in range(self.config["experts"]):
                made[f"model.layers.{{layer}}.experts.{{expert}}.w1.weight"] = Shaped({INNER}, {HIDDEN})
                made[f"model.layers.{{layer}}.experts.{{expert}}.w2.weight"] = Shaped({HIDDEN}, {INNER})
        return made
class PicklyForCausalLM(TinyMoeForCausalLM):
    def __init__(self, config): raise ValueError("these settings\\x1b[31m do not fit")
"""
_MAPPING = """
class Settings(dict):
    from_dict = classmethod(lambda kind, values: kind(values))
    _attn_implementation = None
CONFIG_MAPPING = {"tiny_moe": Settings}
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the process that asks for a definition find packages that hardly do more than that."""
    folder = tmp_path / "packages"
    auto = folder / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    (folder / "torch.py").write_text(_TORCH)
    for package in (auto, auto.parent):
        (package / "__init__.py").write_text("")
    (folder / "transformers" / "__init__.py").write_text(_TRANSFORMERS)
    (auto / "configuration_auto.py").write_text(_MAPPING)
    monkeypatch.syspath_prepend(folder)
    return folder


def weights(seed: int = 0) -> Tensors:
    """Return the weights of the model, in bfloat16, with those of kin alike in size."""
    random = np.random.default_rng(seed)

    def drawn(*shape: int) -> Array:
        return (random.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)

    made = {EMBEDDING: drawn(ROWS, HIDDEN)}
    for layer in range(LAYERS):
        made[f"model.layers.{layer}.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
        made[f"model.layers.{layer}.q_proj.weight"] = drawn(HIDDEN, HIDDEN)
        for expert in range(EXPERTS):
            made[f"model.layers.{layer}.experts.{expert}.w1.weight"] = drawn(INNER, HIDDEN)
            made[f"model.layers.{layer}.experts.{expert}.w2.weight"] = drawn(HIDDEN, INNER)
    return made


def with_state(made: Mapping[str, Array], seed: int = 1) -> Tensors:
    """Return a whole training state with these weights: two moments, a step and a copy in float32 of each."""
    random = np.random.default_rng(seed)
    state: Tensors = {f"model.{name}": weight for name, weight in made.items()}
    for name, weight in made.items():
        begin = f"optimizer.state.{name}"
        wide = weight.astype(np.float32)
        state[f"{begin}.fp32_param"] = wide * np.float32(1 + 2**-12)  # which rounds to the same
        state[f"{begin}.exp_avg"] = (random.standard_normal(weight.shape) * 1e-3).astype(np.float32)
        state[f"{begin}.exp_avg_sq"] = np.square(random.standard_normal(weight.shape) * 1e-3).astype(np.float32)
        state[f"{begin}.step"] = np.array(3, np.float32)
    return state


def save(folder: Path, tensors: Mapping[str, Array], *, files: int = 3, config: Any = None) -> Path:
    """Save tensors as a sharded folder of Hugging Face whose index is consistent, and a configuration beside it."""
    folder.mkdir()
    names = list(tensors)
    shares = [names[number::files] for number in range(min(files, len(names)))]
    file_of = {}
    for number, share in enumerate(shares):
        file = f"model-{number + 1:05}-of-{len(shares):05}.safetensors"
        contents = ShardContents.of(sample(name, tensors[name]) for name in share)
        safetensors_peer.write(folder / file, contents)
        file_of.update(dict.fromkeys(share, file))
    size = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
