"""Trains 20 steps in MindSpore: python train_mindspore.py. After 10 it saves what each of 8 ranks would hold of it.

The training is that of one process, so the shards are cut by numpy, as eight_ranks.toml says.
"""

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from lesson import LEARNING_RATE, STEPS, lesson
from mindspore import nn, ops

RANKS, QUARTERS = 8, 4
CUT = {"line1.weight": 0, "line1.bias": 0, "line2.weight": 1}  # the dimension that is cut into quarters


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.line1 = nn.Dense(784, 96)
        self.norm = nn.LayerNorm((96,), epsilon=1e-5)
        self.line2 = nn.Dense(96, 48)
        self.head = nn.Dense(48, 10)

    def construct(self, pictures: ms.Tensor) -> ms.Tensor:
        features = self.norm(ops.relu(self.line1(self.flatten(pictures))))
        return self.head(ops.relu(self.line2(features)))


def part(name: str, whole: np.ndarray, rank: int) -> np.ndarray:
    """Return what a rank holds of a parameter, or of state of the optimizer that is named after one."""
    dimension = CUT.get(name.removeprefix("moment1.").removeprefix("moment2."))
    return whole if dimension is None else np.split(whole, QUARTERS, dimension)[rank % QUARTERS]


def save(folder: str, parameters: dict[str, Any]) -> None:
    for rank in range(RANKS):
        shard = [
            {"name": name, "data": ms.Tensor(part(name, each.asnumpy(), rank))} for name, each in parameters.items()
        ]
        path = Path(folder, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
        path.parent.mkdir(parents=True)
        ms.save_checkpoint(shard, str(path))


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_seed(1)
    network = Network()
    optimizer = nn.Adam(network.trainable_params(), LEARNING_RATE)
    step: Any = nn.TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer)
    step.set_train()
    losses = []
    for number, (pictures, shown) in enumerate(lesson(0), 1):
        losses.append(float(step(ms.Tensor(pictures), ms.Tensor(shown)).asnumpy()))
        if number == STEPS // 2:
            save("eight", {each.name: each for each in (*network.get_parameters(), *optimizer.get_parameters())})
    Path("losses_mindspore.json").write_text(json.dumps(losses))
