"""Takes the last 10 steps in torch, with FSDP2 on as many processes as torchrun starts.

    python train_torch.py --begin like.pt
    torchrun --standalone --nproc-per-node 4 train_torch.py losses_through.json --through eight
    torchrun --standalone --nproc-per-node 4 train_torch.py losses_converted.json --resume converted

--begin: saves model and optimizer as they begin, which tells names and shapes. --through: fills them from MindSpore's
checkpoint of 8 ranks where it lies. --resume: from a checkpoint of torch. The first argument is the file for losses.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lesson import LEARNING_RATE, STEPS, lesson
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from reshard_mpi.torch import Reader

STRATEGY = Path(__file__).parent / "eight_ranks.toml"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line1 = nn.Linear(784, 96)
        self.norm = nn.LayerNorm(96)
        self.line2 = nn.Linear(96, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features = self.norm(torch.relu(self.line1(pictures.flatten(1))))
        return self.head(torch.relu(self.line2(features)))


def main(losses_file: str | None, begin: str | None, through: str | None, resume: str | None) -> None:
    torch.manual_seed(0)
    model = Network()
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    held, state = get_state_dict(model, optimizer)
    training = {**held, "optimizer": state}  # named as the map names them
    if begin is not None:
        torch.save(training, begin)
        return
    if through is not None:
        reader = Reader(through, src_strategy=STRATEGY, map="torch-mindspore", like="like.pt")
        dcp.load(training, storage_reader=reader)
    else:
        dcp.load(training, checkpoint_id=resume)
    set_state_dict(model, optimizer, model_state_dict=held, optim_state_dict=state)
    rank, processes = dist.get_rank(), dist.get_world_size()
    losses = []
    for pictures, shown in lesson(STEPS // 2):
        inputs, expected = (torch.from_numpy(each).chunk(processes)[rank] for each in (pictures, shown))
        loss = nn.functional.cross_entropy(model(inputs), expected.long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / processes)
    if rank == 0 and losses_file is not None:
        Path(losses_file).write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses_file", metavar="LOSSES.json", nargs="?")
    parser.add_argument("--begin", metavar="FILE")
    parser.add_argument("--through", metavar="FOLDER")
    parser.add_argument("--resume", metavar="FOLDER")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has set it
        dist.init_process_group("gloo")
    # One thread each, so that the losses do not depend on how many processors there are.
    torch.set_num_threads(1)
    main(arguments.losses_file, arguments.begin, arguments.through, arguments.resume)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
        sys.stdout.flush()
        os._exit(0)
