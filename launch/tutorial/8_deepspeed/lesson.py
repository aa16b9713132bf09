"""What all trainings have in common: the model, the settings of AdamW, and 30 steps, from the first or a later one."""

import torch
from digits import batches
from torch import nn

STEPS, BATCH_SIZE = 30, 64
RATE, BETAS, EPSILON, DECAY = 0.002, (0.9, 0.99), 1e-8, 0.05
# The largest norm of all gradients. DeepSpeed cuts them to 1 unless its settings say another, torch only if asked.
LARGEST_NORM = 1.0


class Network(nn.Module):
    """Of 47 features, which no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.line1 = nn.Linear(784, 96)
        self.line2 = nn.Linear(96, 47)
        self.head = nn.Linear(47, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.line1(pictures.flatten(1)))
        return self.head(torch.relu(self.line2(features)))


def batches_from(step: int, *, part: int = 0, parts: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what one of several equal parts of a training sees in each step from a step on, counted from 0."""
    tensors = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches(STEPS, BATCH_SIZE, seed=5)]
    return [(x.chunk(parts)[part], y.chunk(parts)[part]) for x, y in tensors[step:]]
