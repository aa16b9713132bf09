"""Trains the network in torch: python train_torch.py [--resume FILE --part 2]

Without --resume it trains all parts without a break, and saves model and optimizer after the first as torch.pt.
With it, it trains the part that is named.
"""

import argparse

import numpy as np
import torch
from lesson import LEARNING_RATE, PARTS, note, part, test_data
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.line = nn.Linear(8 * 12 * 12, 64)
        self.layernorm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10, bias=False)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.conv(pictures)))
        return self.head(self.layernorm(torch.relu(self.line(features.flatten(1)))))


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)

    def save(self, path: str) -> None:
        torch.save({"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: str) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.network.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    def outputs(self) -> np.ndarray:
        """Return what the network answers to the test pictures."""
        self.network.eval()
        with torch.no_grad():
            return self.network(torch.from_numpy(test_data()[0])).numpy()

    def train(self, number: int) -> list[float]:
        """Train a part; return the losses."""
        self.network.train()
        losses = []
        for pictures, shown in part(number):
            self.optimizer.zero_grad()
            outputs = self.network(torch.from_numpy(pictures))
            loss = nn.functional.cross_entropy(outputs, torch.from_numpy(shown).long())
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", metavar="FILE")
    parser.add_argument("--part", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training = Training()
    if arguments.resume is not None:
        training.load(arguments.resume)
        outputs = training.outputs()
        note("torch_resumed", arguments.part, training.train(arguments.part), outputs)
    else:
        for number in range(PARTS):
            outputs = training.outputs()
            note("torch", number, training.train(number), outputs)
            if number == 0:
                training.save("torch.pt")
