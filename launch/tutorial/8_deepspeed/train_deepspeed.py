"""Trains with DeepSpeed on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node 4 train_deepspeed.py losses_zero2.json --stage 2 --save zero2 --after 10
    torchrun --standalone --nproc-per-node 2 train_deepspeed.py losses_zero3.json --stage 3 --resume for_zero3

--save, --after: saves a checkpoint into this folder after so many steps in all, and goes on. --resume: begins with the
checkpoint in this folder. The first argument is the file for the losses of all steps that were taken.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from lesson import BATCH_SIZE, BETAS, DECAY, EPSILON, LARGEST_NORM, RATE, Network, batches_from
from torch import nn

# Else DeepSpeed would compile an operator, to add up in shared memory what the processes of one host have.
vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None


def config(stage: int) -> dict[str, Any]:
    adam = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY, "torch_adam": True}
    return {
        "train_batch_size": BATCH_SIZE,
        "gradient_clipping": LARGEST_NORM,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": adam},
    }


def main(losses_file: str, stage: int, resume: str | None, save: str | None, after: int) -> None:
    torch.manual_seed(0)
    model = Network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
    if resume is not None:
        path, _ = engine.load_checkpoint(resume)
        if path is None:
            sys.exit(f"there is no checkpoint in {resume}")
    rank, processes = dist.get_rank(), dist.get_world_size()
    losses = []
    for pictures, shown in batches_from(engine.global_steps, part=rank, parts=processes):
        loss = nn.functional.cross_entropy(engine(pictures), shown)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / processes)
        if save is not None and engine.global_steps == after:
            engine.save_checkpoint(save)
    if rank == 0:
        Path(losses_file).write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses_file", metavar="LOSSES.json")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--resume", metavar="FOLDER")
    parser.add_argument("--save", metavar="FOLDER")
    parser.add_argument("--after", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    # One thread each, so that the losses do not depend on how many processors there are.
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    main(arguments.losses_file, arguments.stage, arguments.resume, arguments.save, arguments.after)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
    sys.stdout.flush()
    os._exit(0)
