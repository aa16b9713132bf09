"""Trains the network in each of the modes that are named: from the beginning, or on from a checkpoint.

    python train.py fp16 fp32 mixed
    python train.py --resume back/rank_0/checkpoint_0.pt fp16 fp32 mixed

Each mode has a folder of its name. After every epoch model, optimizer, scaler and number of the epoch are saved there
as epoch_<n>.pt. The losses of all steps go to losses.json; with --resume, to losses_resumed.json.
"""

import argparse
import json
from pathlib import Path

import torch
from network import EPOCHS, MODES, Training, accuracy, begin, test_data, training_data
from torch.nn.functional import cross_entropy


def train_epoch(mode: str, training: Training) -> list[float]:
    """Train for one epoch; return the loss of every step."""
    model, optimizer, scaler = training
    model.train()
    losses = []
    for pictures, shown in training_data():
        optimizer.zero_grad()
        if scaler is None:
            loss = cross_entropy(model(pictures.half() if mode == "fp16" else pictures), shown)
            loss.backward()
            optimizer.step()
        else:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = cross_entropy(model(pictures), shown)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


def save(training: Training, epoch: int, path: Path) -> None:
    checkpoint = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "epoch": epoch,
    }
    if training.scaler is not None:
        checkpoint["scaler"] = training.scaler.state_dict()
    torch.save(checkpoint, path)


def load(training: Training, path: Path) -> int:
    """Give a training that has not begun what was saved; return how many epochs that had taken."""
    checkpoint = torch.load(path, weights_only=True)
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    if training.scaler is not None:
        training.scaler.load_state_dict(checkpoint["scaler"])
    return checkpoint["epoch"]


def run(mode: str, resume: str | None) -> None:
    training = begin(mode)
    done = 0 if resume is None else load(training, Path(mode, resume))
    Path(mode).mkdir(exist_ok=True)
    losses = []
    for epoch in range(done + 1, EPOCHS + 1):
        losses += train_epoch(mode, training)
        scale = "" if training.scaler is None else f", scale of the loss {training.scaler.get_scale():.0f}"
        recognized = accuracy(training.model, *test_data())
        print(f"{mode}: epoch {epoch}, last loss {losses[-1]:.4f}, {recognized:.1%} recognized{scale}")
        if resume is None:
            save(training, epoch, Path(mode, f"epoch_{epoch}.pt"))
    name = "losses.json" if resume is None else "losses_resumed.json"
    Path(mode, name).write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", metavar="FILE", help="a checkpoint in the folder of each mode")
    parser.add_argument("mode", nargs="+", choices=MODES)
    arguments = parser.parse_args()
    # The order in which numbers are added up depends on the number of threads, and so do the last bits of a loss.
    torch.set_num_threads(1)
    for mode in arguments.mode:
        run(mode, arguments.resume)
