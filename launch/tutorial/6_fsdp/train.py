"""Trains with FSDP2 on as many processes as torchrun starts, or on one without it.

    torchrun --standalone --nproc-per-node 4 train.py losses_4.json --save four
    torchrun --standalone --nproc-per-node 2 train.py losses_2.json --resume two
    python train.py losses_1.json --resume whole/rank_0/checkpoint_0.pt

There are 20 steps. --save: after half of them model, optimizer and number of steps are saved into this folder by
torch.distributed.checkpoint, and the training goes on. --resume: it begins with what lies in this folder or, on one
process, in this file of torch.save. The first argument is the file for the losses of all steps that were taken.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digits import batches
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

STEPS, BATCH_SIZE = 20, 64


class Training:
    """Model, optimizer and number of steps, as torch's distributed checkpoints save and load them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)
        )
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["steps"]

    def step(self, pictures: torch.Tensor, shown: torch.Tensor) -> float:
        """Take a step with this process's part of a batch; return the loss of all of the batch."""
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        loss = nn.functional.cross_entropy(self.model(pictures.chunk(processes)[rank]), shown.chunk(processes)[rank])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item() / processes


def load(training: Training, path: str) -> None:
    if Path(path).is_dir():
        dcp.load({"training": training}, checkpoint_id=path)
    else:
        training.load_state_dict(torch.load(path, weights_only=True)["training"])


def main(losses_file: str, save: str | None, resume: str | None) -> None:
    training = Training()
    if resume is not None:
        load(training, resume)
    data = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches(STEPS, BATCH_SIZE, seed=8)]
    losses = []
    for pictures, shown in data[training.steps :]:
        losses.append(training.step(pictures, shown))
        if save is not None and training.steps == STEPS // 2:
            dcp.save({"training": training}, checkpoint_id=save)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(losses_file).write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses_file", metavar="LOSSES.json")
    parser.add_argument("--save", metavar="FOLDER")
    parser.add_argument("--resume", metavar="FOLDER|FILE")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has set it
        dist.init_process_group("gloo")
    # One thread each, so that the losses do not depend on how many processors there are.
    torch.set_num_threads(1)
    main(arguments.losses_file, arguments.save, arguments.resume)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
        sys.stdout.flush()
        os._exit(0)
