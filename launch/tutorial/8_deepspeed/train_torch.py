"""Takes the steps that are left in torch alone: python train_torch.py LOSSES.json CHECKPOINT.pt."""

import json
import sys
from pathlib import Path

import torch
from lesson import LARGEST_NORM, RATE, Network, batches_from
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

if __name__ == "__main__":
    losses_file, checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    state = torch.load(checkpoint, weights_only=True)
    model = Network()
    model.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # with DeepSpeed's betas and decay
    losses = []
    for pictures, shown in batches_from(state["global_steps"]):
        loss = nn.functional.cross_entropy(model(pictures), shown)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    Path(losses_file).write_text(json.dumps(losses))
