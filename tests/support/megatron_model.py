"""Be a rank of tiny models of Megatron-Core on a CPU: make each, save it as torch_dist and by ranks, give its logits.

    python megatron_model.py CASES.json FOLDER RANK RANKS

Layers are Megatron-Core's own (no Transformer Engine), and no CUDA is needed. CASES.json has, by name, `vocabulary`
(and `padded`, to which it is), `tied`, `tokens`, `config` for `TransformerConfig`, and `layers` for its layer
specification, or `by_layer` where layers are not alike. FOLDER/NAME gets `rank_N/model.pt` and `rank_N/logits.pt`, of
its part of the vocabulary; of a single rank `dist` (torch_dist) as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed

sys.path.append(str(Path(__file__).parents[2] / "launch" / "tutorial" / "9_megatron"))
from megatron_on_cpu import replace_cuda

replace_cuda()

import megatron.core.tensor_parallel.random as random_states  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402


def configuration(case: dict[str, Any], ranks: int) -> Any:
    """Return the configuration of a case's model."""
    is_latent = case["config"].get("multi_latent_attention", False)
    kind = transformer_config.MLATransformerConfig if is_latent else transformer_config.TransformerConfig
    fused = ("gradient_accumulation", "bias_activation", "masked_softmax", "bias_dropout")
    return kind(
        use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        **{f"{name}_fusion": False for name in fused},
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=ranks,
        **{"add_bias_linear": False, **case["config"]},
    )


class PlainAttention(torch.nn.Module):
    """Attention whose keys and values differ in size, which of Megatron-Core's only Transformer Engine's can have."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        scores = torch.einsum("ibhd,jbhd->bhij", query, key) * self.scale
        shares = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", shares, value).flatten(2)


def made(case: dict[str, Any], ranks: int) -> Any:
    """Return the model of a case with weights that are random, and zeros where the vocabulary is padded."""
    config = configuration(case, ranks)
    if case.get("by_layer"):
        specification = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    else:
        specification = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", **case["layers"])
    if case["config"].get("multi_latent_attention"):
        for layer in getattr(specification, "layer_specs", [specification]):
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    model = GPTModel(
        config,
        specification,
        vocab_size=case["padded"],
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case["tied"],
    ).eval()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                seed = zlib.crc32(name.encode()) + rank * getattr(value, "tensor_model_parallel", False)
                generator, around = torch.Generator().manual_seed(seed), 1.0 if "norm" in name else 0.0
                value.copy_(around + 0.1 * torch.randn(value.shape, generator=generator))
        first = rank * case["padded"] // ranks
        for name, value in model.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                value[max(0, case["vocabulary"] - first) :] = 0
    return model


def sharded(model: Any) -> Any:
    """Return what Megatron-Core saves of a model as torch_dist."""
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": ranks})


def main() -> None:
    cases, folder, arguments = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[1:]
    sys.argv = sys.argv[:1]  # Megatron-Core reads them too
    rank, ranks = map(int, arguments[2:])
    torch.distributed.init_process_group("gloo", f"file://{folder.absolute()}/meeting", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(ranks, 1)
    random_states.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    for name, case in cases.items():
        save(case, folder / name, rank, ranks)


def save(case: dict[str, Any], folder: Path, rank: int, ranks: int) -> None:
    """Make the model of a case; write this rank's part of it, and its logits."""
    model = made(case, ranks)
    own = folder / f"rank_{rank}"
    own.mkdir(parents=True)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(tensors, own / "model.pt")
    if ranks == 1:
        (folder / "dist").mkdir()
        common = {"args": argparse.Namespace(num_layers=case["config"]["num_layers"]), "iteration": 3}
        dist_checkpointing.save({**common, "model": sharded(model)}, str(folder / "dist"))
    tokens = torch.tensor(case["tokens"])
    count = tokens.shape[1]
    mask = torch.tril(torch.ones(1, 1, count, count)) < 0.5
    with torch.no_grad():
        logits = model(tokens, torch.arange(count)[None], mask)
    torch.save(logits, own / "logits.pt")


if __name__ == "__main__":
    main()
