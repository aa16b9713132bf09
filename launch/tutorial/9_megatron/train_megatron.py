"""Trains with Megatron-Core on as many processes as torchrun starts, without a GPU.

    torchrun --standalone --nproc-per-node 4 train_megatron.py losses_four.json --tp 2 --pp 2 --save four --after 10
    torchrun --standalone --nproc-per-node 1 train_megatron.py losses_one.json --load one --logits logits.pt

--tp, --pp: tensor and pipeline parallelism. --save, --after: saves a checkpoint into this folder after so many steps in
all, as Megatron does by itself (dp_reshardable), and goes on. --load: begins with the latest checkpoint in this folder.
--logits: a file for what the model says of the first sentences in the end. The first argument is the file for the
losses of all steps that were taken.
"""

import argparse
import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lesson import EPSILON, FFN, GROUPS, HEADS, HIDDEN, LAYERS, LENGTH, RATE, SENTENCES, STEPS, VOCABULARY, sentences
from megatron_on_cpu import replace_cuda, replace_step

replace_cuda()

import megatron.core.tensor_parallel.random as random_states  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

replace_step()
random_states.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
TRACKER = "latest_checkpointed_iteration.txt"


class Training:
    """The part of the training that this process has."""

    def __init__(self, tp: int, pp: int) -> None:
        parallel_state.initialize_model_parallel(tp, pp)
        self.layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        fused = ("gradient_accumulation", "bias_activation", "masked_softmax", "bias_dropout")
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            ffn_hidden_size=FFN,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            layernorm_epsilon=EPSILON,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            finalize_model_grads_func=finalize_model_grads,
            **{f"{name}_fusion": False for name in fused},
            **self.layout,
        )
        torch.manual_seed(0)
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        self.wrapped = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.model
        )
        settings = OptimizerConfig(
            optimizer="adam", lr=RATE, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(settings, [self.wrapped])
        self.steps = 0

    def step(self) -> float:
        """Take a step; return its loss, on processes of the last stage."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward(sentences(self.steps), is_training=True)
        self.optimizer.step()
        self.steps += 1
        return loss

    def _forward(self, tokens: torch.Tensor, *, is_training: bool) -> float:
        run = get_forward_backward_func()
        told = run(
            forward_step_func=_told,
            data_iterator=iter([tokens]),
            model=[self.wrapped],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=SENTENCES,
            forward_only=not is_training,
        )
        return sum(each["loss"] for each in told)

    def _dictionaries(self, *, is_loading: bool, form: str) -> dict[str, Any]:
        """Return the model and the optimizer as Megatron saves and loads them."""
        data_ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata: dict[str, Any] = {"distrib_optim_sharding_type": form, "dp_cp_group": data_ranks}
        if form == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        state = {"model": self.model.sharded_state_dict(metadata=metadata)}
        own = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return {**state, "optimizer": own}

    def save(self, folder: Path) -> None:
        args = argparse.Namespace(num_layers=LAYERS, hidden_size=HIDDEN, padded_vocab_size=VOCABULARY, **self.layout)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": self.steps}
        place = folder / f"iter_{self.steps:07d}"
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        form = "dp_reshardable"
        state |= self._dictionaries(is_loading=False, form=form)
        dist_checkpointing.save(state, str(place), content_metadata={"distrib_optim_sharding_type": form})
        if dist.get_rank() == 0:
            (folder / TRACKER).write_text(str(self.steps))

    def load(self, folder: Path) -> None:
        self.step()  # without Transformer Engine, an optimizer that has no state yet cannot be loaded
        place = folder / f"iter_{int((folder / TRACKER).read_text()):07d}"
        loaded = dist_checkpointing.load(self._dictionaries(is_loading=True, form="fully_reshardable"), str(place))
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for state in self.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()  # all share one, which each parameter would count up
        self.steps = loaded["iteration"]

    def logits(self) -> torch.Tensor:
        """Return the whole model's answer, of a training in one process."""
        tokens = sentences(0)[:, :-1]
        with torch.no_grad():
            return self.model(tokens, _positions(), _mask())


def _positions() -> torch.Tensor:
    return torch.arange(LENGTH).expand(SENTENCES, LENGTH)


def _mask() -> torch.Tensor:
    return torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5


def _told(data: Any, model: Any) -> Any:
    """Return what a stage makes of the sentences, and what becomes of that on the last one."""
    tokens = next(data)
    return model(tokens[:, :-1], _positions(), _mask(), labels=tokens[:, 1:]), partial(_mean)


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = losses.mean()
    return loss, {"loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("losses", type=Path)
    for name in ("tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("save", "load", "logits"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--after", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Training(options.tp, options.pp)
    if options.load is not None:
        training.load(options.load)
    losses = []
    while training.steps < STEPS:
        losses.append(training.step())
        if options.save is not None and training.steps == options.after:
            training.save(options.save)
    # The last process is of the last stage, which alone has losses.
    if dist.get_rank() == int(os.environ["WORLD_SIZE"]) - 1:
        options.losses.write_text(json.dumps(losses))
        if options.logits is not None:
            torch.save(training.logits(), options.logits)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
