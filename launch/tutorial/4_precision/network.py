"""The network, in each of three ways to train it, and the digits it is trained on."""

from typing import NamedTuple

import torch
from digits import batches, digits
from torch import nn

MODES = ("fp16", "fp32", "mixed")
EPOCHS, BATCHES, BATCH_SIZE = 3, 24, 64


class NeuralNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(
            nn.Linear(28 * 28, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10)
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.linear_relu_stack(self.flatten(pictures))


class Training(NamedTuple):
    """What a training needs to go on: scaler is None where gradients are not scaled."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None


def begin(mode: str) -> Training:
    """Return a training that has not begun."""
    torch.manual_seed(0)
    model = NeuralNetwork()
    if mode == "fp16":
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    # The scale begins too high and may grow often, so that it changes before the break and after it.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7) if mode == "mixed" else None
    return Training(model, optimizer, scaler)


def training_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of an epoch."""
    return [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches(BATCHES, BATCH_SIZE, seed=6)]


def test_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures that are in no epoch."""
    pictures, shown = digits(512, seed=7)
    return torch.from_numpy(pictures), torch.from_numpy(shown).long()


def accuracy(model: nn.Module, pictures: torch.Tensor, shown: torch.Tensor) -> float:
    """Return which part of the pictures are recognized, in the type of the model's weights."""
    model.eval()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return (model(pictures.to(dtype)).argmax(1) == shown).float().mean().item()
