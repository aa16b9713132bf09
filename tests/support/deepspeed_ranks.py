"""Trainings in the real DeepSpeed, each on as many ranks as it is asked for: `python deepspeed_ranks.py`.

Reads tasks as lines of JSON, and says for each in a line what went wrong, or nothing. DeepSpeed is imported once: the
ranks of a task are forks, which talk over gloo. A task's keys: `ranks`, `stage` of ZeRO, `is_bf16`, `has_scheduler`;
`load`: a folder to load a checkpoint from, or null; `earlier_steps`: how many that checkpoint does not know of;
`steps`: how many to take, then; `out`: the folder for what comes of it. `kind`: of the model: `plain`; `pipeline`, of
two stages; `experts`, which are divided over `ep_size` ranks. `accumulates_fp32`: whether gradients are added up in
float32, for which DeepSpeed takes BF16_Optimizer.

There the engine saves a checkpoint (`saved`), takes one more step, and saves again (`stepped`). Beside each of a plain
model lie its whole tensors (`saved.pt`), put together of the engine's own files by no more than how DeepSpeed lays them
out.
`facts.json` says how the training stands at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

CLIENT_STATE = {"epoch": 3, "note": "a user's", "numbers": [1, 2.5, None, True]}
WITHIN_SECONDS = 200
_RATE, _BETAS, _DECAY = 0.01, (0.9, 0.95), 0.1
_KINDS = ("exp_avg", "exp_avg_sq")


class SmallClassifier(nn.Module):
    """A classifier, with a parameter that no number of ranks divides and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.line = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 5, bias=False)
        self.odd = nn.Parameter(torch.linspace(-1, 1, 7))
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 2.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.line(self.table(tokens))))
        logits = self.head(hidden) * self.scale[0] + self.odd.sum()
        return nn.functional.cross_entropy(logits.float(), tokens % 5)

    def groups(self) -> list[dict[str, Any]]:
        return groups_of(self)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of the optimizer: what has several dimensions decays."""
    several = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    return [{"params": several, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]


class Mixture(nn.Module):
    """A classifier with two layers of experts, each of which begins with weights of its own."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict()
        for name, count in {"2": 4, "10": 2}.items():
            expert = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
            layer = MoE(6, expert, num_experts=count, ep_size=ep_size, min_capacity=16, use_rts=False)
            own = layer.deepspeed_moe.experts.deepspeed_experts
            for place, each in enumerate(own):
                generator = torch.Generator().manual_seed(dist.get_rank() % ep_size * len(own) + place)
                for parameter in each.parameters():
                    nn.init.normal_(parameter, std=0.4, generator=generator)
            self.layers[name] = layer
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden)[0]
        return nn.functional.cross_entropy(self.head(hidden).float(), tokens % 5)


def _pipeline() -> nn.Module:
    """Return a pipeline of two stages, which share a table; one layer has no weights."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("table", nn.Embedding, 11, 6),
        LayerSpec(nn.Linear, 6, 10),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.LayerNorm, 10),
        LayerSpec(nn.Linear, 10, 6),
        TiedLayerSpec("table", nn.Embedding, 11, 6, forward_fn=lambda table, hidden: hidden @ table.weight.T),
    ]
    made: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    return made


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), tokens)


def new_model(*, is_loaded: bool) -> SmallClassifier:
    """Return a model as it begins; one that is to be loaded into begins with other weights."""
    torch.manual_seed(99 if is_loaded else 5)
    model = SmallClassifier()
    if is_loaded:
        model.scale.zero_()
    return model


def _model_and_groups(task: Mapping[str, Any]) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return the model of a task as it begins, and the groups of its optimizer."""
    is_loaded = task["load"] is not None
    torch.manual_seed(99 if is_loaded else 5)
    if task["kind"] == "pipeline":
        pipeline = _pipeline()
        return pipeline, groups_of(pipeline)
    if task["kind"] == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        mixture = Mixture(task["ep_size"])
        named = [{**own, "name": f"own {number}"} for number, own in enumerate(groups_of(mixture))]
        return mixture, split_params_into_different_moe_groups_for_optimizer(named)
    model = new_model(is_loaded=is_loaded)
    return model, model.groups()


def batch(step: int) -> torch.Tensor:
    """Return what every rank trains on in a step, so that the gradients do not depend on how many there are."""
    return torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(100 + step))


def _config(task: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"lr": _RATE, "betas": _BETAS, "weight_decay": _DECAY, "torch_adam": True}
    zero = {"stage": task["stage"], "stage3_gather_16bit_weights_on_model_save": True}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if task["has_scheduler"]:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": _RATE}}
    if task["accumulates_fp32"]:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if task["is_bf16"]:
        config["bf16"] = {"enabled": True}
    return config


def _train(task: Mapping[str, Any], rank: int) -> None:
    import deepspeed

    out = Path(task["out"])
    deepspeed.init_distributed(dist_backend="gloo")
    model, groups = _model_and_groups(task)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=_config(task))
    client_state = CLIENT_STATE
    if task["load"] is not None:
        path, loaded = engine.load_checkpoint(task["load"])
        assert path is not None, "nothing was loaded"
        client_state = {key: loaded[key] for key in CLIENT_STATE if key in loaded}  # among keys of DeepSpeed's own
    for _ in range(task["steps"]):
        _step(engine, task)
    _save(engine, out / "saved", client_state, task)
    loss = _step(engine, task)
    _save(engine, out / "stepped", client_state, task)
    if rank == 0:
        facts = {
            "client_state": client_state,
            "loss": loss,
            "rates": engine.get_lr(),
            "steps": engine.global_steps,
            "scheduler": engine.lr_scheduler.state_dict() if task["has_scheduler"] else None,
        }
        (out / "facts.json").write_text(json.dumps(facts))
    dist.barrier()


def _step(engine: Any, task: Mapping[str, Any]) -> float:
    own = batch(task["earlier_steps"] + engine.global_steps)
    if task["kind"] == "pipeline":
        return float(engine.train_batch(iter([(own, own)])))
    loss = engine(own)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _save(engine: Any, folder: Path, client_state: dict[str, Any], task: Mapping[str, Any]) -> None:
    """Have the engine save a checkpoint; of a plain model also its weights, and put the whole tensors beside both."""
    engine.save_checkpoint(folder, tag="now", client_state=client_state)
    if task["kind"] != "plain":
        return
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(dict(_whole_tensors(folder)), folder.with_suffix(".pt"))
    dist.barrier()


def _whole_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by kind and name. (Released DeepSpeed writes no gaps unless it is asked to.)"""
    for name, tensor in _read(folder / "weights.bin").items():
        yield f"model.{name}", tensor
    paths = sorted((folder / "now").glob("*_optim_states.pt"))
    states = [_read(path)["optimizer_state_dict"] for path in paths]  # of fewer than ten ranks, in their order
    model = _read(sorted((folder / "now").glob("*model_states.pt"))[0])
    is_sliced = "fp32_flat_groups" in states[0]
    masters = "fp32_flat_groups" if is_sliced else "single_partition_of_fp32_groups"
    base = "optimizer_state_dict" if is_sliced else "base_optimizer_state"
    for number, shapes in enumerate(model["param_shapes"]):
        of_ranks = [state[base]["state"][number] for state in states]
        vectors = {"fp32": [state[masters][number].detach() for state in states]}
        vectors |= {kind: [state[kind] for state in of_ranks] for kind in _KINDS}
        for kind, parts in vectors.items():
            joined, start = torch.cat(parts), 0
            for name, shape in shapes.items():
                size = shape.numel()
                if is_sliced:
                    length = math.ceil(size / len(parts))
                    whole = torch.cat([part[start : start + length] for part in parts])[:size]
                    start += length
                else:
                    whole = joined[start : start + size]
                    start += size
                yield f"{kind}.{name}", whole.reshape(shape).clone()
        for name in shapes:
            yield f"step.{name}", torch.as_tensor(of_ranks[0]["step"])


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _in_rank(task: Mapping[str, Any], rank: int) -> None:
    """Do one rank's part, in a process of its own, and end that."""
    code = 1
    try:
        os.dup2(2, 1)  # what DeepSpeed says is no answer
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["ranks"]))
        torch.set_num_threads(1)
        meeting = f"file://{task['out']}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=task["ranks"])
        _train(task, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _done(task: Mapping[str, Any]) -> str:
    """Do a task; return what went wrong with it."""
    Path(task["out"]).mkdir(parents=True)
    ranks: dict[int, int] = {}
    for rank in range(task["ranks"]):
        process = os.fork()
        if process == 0:
            _in_rank(task, rank)
        ranks[process] = rank
    problem, end = "", time.monotonic() + WITHIN_SECONDS
    while ranks and not problem:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank = ranks.pop(process)
            problem = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}" if status else ""
        elif time.monotonic() > end:
            problem = f"ranks {sorted(ranks.values())} take more than {WITHIN_SECONDS} s"
        else:
            time.sleep(0.02)
    for process in ranks:
        os.kill(process, 9)
        os.waitpid(process, 0)
    return problem


if __name__ == "__main__":
    # What every engine imports, so that the ranks have it from here: it takes longer than all that they do.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch._dynamo

    # Else DeepSpeed would compile an operator, to add up in shared memory what ranks of one host have. (In
    # `deepspeed.comm` the name `torch` is that of torch itself.)
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    for line in sys.stdin:
        print(json.dumps(_done(json.loads(line))), flush=True)
