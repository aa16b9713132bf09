"""Trainings in the real Megatron-Core, each on as many ranks as it is asked for: `python megatron_ranks.py`.

Reads tasks as lines of JSON, and says for each in a line what went wrong, or nothing. Megatron-Core is imported once:
the ranks of a task are forks, which talk over gloo. No CUDA is needed (`megatron_on_cpu`). What is real is the model
(GPTModel), its optimizer (DistributedOptimizer), their dictionaries and dist_checkpointing. What is not: there is no
forward pass, and gradients are made up by the names of tensors, the same for every layout.

A task's keys: `tp`, `pp`, `ep`: the layout; `experts`: how many a layer has, 0 for none; `load`: a folder to load a
checkpoint from, or null; `only_model`: load nothing else; `save`: a folder to save one in, or null, `sharding` of its
optimizer, and `apart`: whether halves of gated matrices and experts are tensors of their own there; `steps`: how many
to take before that; `more_steps`: how many after; `whole`: the file (.npz) for the whole tensors at the end, put
together of what the ranks hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "launch" / "tutorial" / "9_megatron"))
from megatron_on_cpu import replace_cuda, replace_step

replace_cuda()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

replace_step()

LAYERS, HIDDEN, VOCABULARY, FFN = 4, 32, 128, 48
WITHIN_SECONDS = 900
_STATE = ("param", "exp_avg", "exp_avg_sq")


class Training:
    """The part of a training that one rank has."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        parallel_state.initialize_model_parallel(task["tp"], task["pp"], expert_model_parallel_size=task["ep"])
        experts = task["experts"]
        mixture = {"num_moe_experts": experts, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2} if experts else {}
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            num_query_groups=4,
            ffn_hidden_size=FFN,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=True,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            tensor_model_parallel_size=task["tp"],
            pipeline_model_parallel_size=task["pp"],
            expert_model_parallel_size=task["ep"],
            sequence_parallel=bool(experts) and task["tp"] > 1,
            gradient_accumulation_fusion=False,
            **mixture,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=experts or None, normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        self.wrapped = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            module=Float16Module(config, self.model),
        )
        self.metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        fill(self.entries(), lambda entry: entry.data, 0)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=0.001,
                weight_decay=0.1,
                clip_grad=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                adam_beta2=0.95,
            ),
            [self.wrapped],
        )
        settings = {"init_lr": 0.0, "max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 0, "lr_decay_steps": 100}
        decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 100, "wd_incr_style": "constant"}
        self.scheduler = OptimizerParamScheduler(self.optimizer, lr_decay_style="cosine", **settings, **decay)
        self.step_count = 0

    def metadata_for(self, sharding: str) -> dict[str, Any]:
        """Return what dictionaries are made for."""
        own = {**self.metadata, "distrib_optim_sharding_type": sharding}
        if sharding == "fully_reshardable":
            own["distrib_optim_fully_reshardable_mem_efficient"] = False
        return own | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    def model_dictionary(self) -> dict[str, Any]:
        return self.model.sharded_state_dict(metadata=self.metadata_for("fully_reshardable"))

    def entries(self) -> list[Any]:
        sharded, _ = extract_sharded_tensors_and_factories(self.model_dictionary())
        return list(nested_values(sharded))

    def step(self) -> None:
        """Take one step, with gradients that depend on its number alone."""
        self.step_count += 1
        self._optimize()
        self.scheduler.step(increment=8)

    def _optimize(self) -> None:
        self.wrapped.zero_grad_buffer()
        fill(self.entries(), lambda entry: getattr(entry.data, "main_grad", None), self.step_count)
        self.optimizer.step()

    def load(self, folder: Path, *, only_model: bool) -> dict[str, Any]:
        """Load a checkpoint; return what its ranks have in common."""
        asked: dict[str, Any] = {"model": self.model_dictionary()}
        if not only_model:
            self._optimize()  # without Transformer Engine, an optimizer that has no state yet cannot be loaded
            metadata = self.metadata_for("fully_reshardable")
            asked["optimizer"] = self.optimizer.sharded_state_dict(asked, is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load(asked, str(folder))
        self.model.load_state_dict(loaded["model"])
        if not only_model:
            self.optimizer.load_state_dict(loaded["optimizer"])
            for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                for state in optimizer.optimizer.state.values():
                    state["step"] = state["step"].clone()  # all share one, which each parameter would count up
            self.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        self.step_count = loaded["iteration"]
        return loaded

    def save(self, folder: Path, sharding: str) -> None:
        """Save a checkpoint as Megatron-LM's training loop does."""
        args = argparse.Namespace(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            tensor_model_parallel_size=self.task["tp"],
            pipeline_model_parallel_size=self.task["pp"],
            expert_model_parallel_size=self.task["ep"],
            params_dtype=torch.bfloat16,
            attention_backend=self.model.config.attention_backend,
            iteration=self.step_count,
        )
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": self.step_count}
        self.metadata["singleton_local_shards"] = self.task["apart"]
        state["model"] = self.model_dictionary()
        metadata = self.metadata_for(sharding)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        kept = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
        dist_checkpointing.save(state, str(folder), content_metadata=kept)
        self.metadata["singleton_local_shards"] = False

    def whole(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all whole tensors on rank 0, put together of what the ranks hold."""
        found: list[Any] = []
        owner = {
            param: optimizer
            for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer])
            for param in optimizer.model_param_group_index_map
        }
        for entry in self.entries():
            held = {"": entry.data.detach().float()}
            if optimizer := owner.get(entry.data):
                own = optimizer._get_model_param_range_map(entry.data)["param"]
                for name, state in optimizer._get_main_param_and_optimizer_states(entry.data).items():
                    if name in _STATE:  # the part of it that this data-parallel rank has
                        held[f"{name}|"] = torch.full_like(held[""], torch.nan).contiguous()
                        held[f"{name}|"].view(-1)[own.start : own.end] = state.detach().view(-1)
            for prefix, values in held.items():
                found += [
                    (prefix + part.key, tuple(part.global_shape), region(part), part.data.numpy().copy())
                    for part in parts(entry, values.contiguous())
                ]
        everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(found, everything)
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        for key, shape, place, values in (each for of_rank in everything or () for each in of_rank):
            whole = tensors.setdefault(key, np.full(shape, np.nan, dtype=np.float32))
            values = values.reshape(whole[place].shape)
            whole[place] = np.where(np.isnan(values), whole[place], values)
        assert not any(np.isnan(tensor).any() for tensor in tensors.values())
        return tensors


def made(key: str, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """Return the values of a whole tensor, by its name."""
    values = np.random.default_rng([zlib.crc32(key.encode()), salt]).standard_normal(shape)
    return torch.from_numpy(np.asarray(values, dtype=np.float32) * 0.05)


def parts(entry: Any, values: torch.Tensor) -> list[Any]:
    """Return the parts of whole tensors that an entry of a model is, with these values."""
    if isinstance(entry, ShardedTensorFactory):
        return list(nested_values(entry.build_fn(entry.key, values, entry.replica_id, None)))
    return [replace(entry, data=values, dtype=values.dtype)]


def region(part: Any) -> tuple[slice, ...]:
    """Return where a part lies in the whole tensor."""
    lengths = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return tuple(slice(low, low + length) for low, length in zip(part.global_offset, lengths, strict=True))


def fill(entries: list[Any], tensor_of: Callable[[Any], Any], salt: int) -> None:
    """Write values into tensors, each rank its part of the whole."""
    for entry in entries:
        target = tensor_of(entry)
        for part in parts(entry, target.detach()) if target is not None else ():
            value = made(part.key, part.global_shape, salt)[region(part)].reshape(part.local_shape)
            part.data.copy_(value.to(part.data.dtype))


def run(task: dict[str, Any]) -> None:
    """Do the part of a task that one rank has."""
    training = Training(task)
    facts = {}
    if task["load"] is not None:
        loaded = training.load(Path(task["load"]), only_model=task["only_model"])
        facts = {name: vars(value) if name == "args" else value for name, value in loaded.items() if name != "model"}
    for _ in range(task["steps"]):
        training.step()
    if task["save"] is not None:
        training.save(Path(task["save"]), task["sharding"])
    for _ in range(task["more_steps"]):
        training.step()
    tensors = training.whole()
    if dist.get_rank() == 0:
        np.savez(task["whole"], **tensors)
        kept = {name: facts[name] for name in facts if name in ("args", "iteration", "opt_param_scheduler")}
        Path(task["whole"]).with_suffix(".json").write_text(json.dumps(kept, default=str))


@contextlib.contextmanager
def group(rank: int, world: int, meeting: str) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(task: dict[str, Any]) -> str:
    """Do a task in forks; return what went wrong, or nothing."""
    world = task["tp"] * task["pp"] * max(task["ep"], 1)
    with tempfile.TemporaryDirectory() as folder:
        children = set()
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _end_as_rank(task, rank, world, folder)
            children.add(child)
        errors = _wait_for(children, Path(folder))
        done = len([*Path(folder).glob("*.done")])
    return errors or ("" if done == world else f"{done} of {world} ranks have ended")


def _wait_for(children: set[int], folder: Path) -> str:
    """Wait for ranks, and end all of them as soon as one has gone wrong, since they would wait for it; return why."""
    begin, errors = time.monotonic(), ""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        children.discard(child)
        errors = errors or "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
        is_late = time.monotonic() - begin > WITHIN_SECONDS
        for other in children if errors or status or is_late else ():
            os.kill(other, signal.SIGKILL)
        time.sleep(0 if child else 0.05)
    return errors


def _end_as_rank(task: dict[str, Any], rank: int, world: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    try:
        with group(rank, world, f"{folder}/meeting"):
            run(task)
        Path(folder, f"{rank}.done").touch()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stderr.flush()
        for helper in multiprocessing.active_children():  # of Megatron-Core, which Python would end
            helper.kill()
        os._exit(0)


if __name__ == "__main__":
    usual = {"tp": 1, "pp": 1, "ep": 1, "experts": 0, "load": None, "only_model": False, "save": None, "apart": False}
    usual |= {"sharding": "dp_reshardable", "steps": 0, "more_steps": 0}
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        os.write(answers, json.dumps(run_ranks({**usual, **json.loads(line)})).encode() + b"\n")
