"""LeNet in MindSpore with a cycle of its own: loss, gradients and update written out, evaluation on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mindspore as ms
import numpy as np
from digits import batches
from mindspore import nn, ops
from mindspore.common.initializer import TruncatedNormal

EPOCHS, STEPS = 2, 40
EVALUATED_EVERY = 10  # steps


class Place(NamedTuple):
    """Where in the cycle a training is: so many epochs and steps of the next are done."""

    epoch: int
    step: int


BEGIN, END = Place(0, 0), Place(EPOCHS, 0)


class LeNet(nn.Cell):
    """Two convolutions and three full layers, for pictures of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid", weight_init=TruncatedNormal(0.1))
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid", weight_init=TruncatedNormal(0.1))
        self.fc1 = nn.Dense(16 * 5 * 5, 120, TruncatedNormal(0.1))
        self.fc2 = nn.Dense(120, 84, TruncatedNormal(0.1))
        self.fc3 = nn.Dense(84, 10, TruncatedNormal(0.1))
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()

    def construct(self, x):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.flatten(self.pool(self.relu(self.conv2(x))))
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


class TrainingStep(nn.Cell):
    """One step: the loss, its gradients, and the optimizer's update. It holds all that a checkpoint must have."""

    def __init__(self, network: LeNet) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
        self.optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.gradients = ops.GradOperation(get_by_list=True)

    def construct(self, pictures, shown):
        loss = self.loss(pictures, shown)
        return ops.depend(loss, self.optimizer(self.gradients(self.loss, self.weights)(pictures, shown)))


class Training:
    """A network in training, and what has come of it: losses of all steps, and accuracies on the way."""

    def __init__(self) -> None:
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        ms.set_seed(1)
        self.step = TrainingStep(LeNet()).set_train()
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def run(self, start: Place = BEGIN, stop: Place = END) -> None:
        """Train from one place of the cycle to another."""
        for place, (pictures, shown) in cycle():
            if start <= place < stop:
                self.losses.append(float(self.step(pictures, shown).asnumpy()))
                if (place.step + 1) % EVALUATED_EVERY == 0:
                    self.accuracies.append(self.evaluate())

    def evaluate(self) -> float:
        """Return how many of 320 digits that are not trained are told right."""
        network = self.step.network.set_train(False)
        right = [network(pictures).asnumpy().argmax(1) == shown.asnumpy() for pictures, shown in _tensors(10, seed=2)]
        network.set_train(True)
        return float(np.mean(right))


def cycle() -> Iterator[tuple[Place, tuple[ms.Tensor, ms.Tensor]]]:
    """Yield the batches of all epochs, each with how much was done before it."""
    data = _tensors(STEPS, seed=1)
    for epoch in range(EPOCHS):
        for step, batch in enumerate(data):
            yield Place(epoch, step), batch


def _tensors(count: int, seed: int) -> list[tuple[ms.Tensor, ms.Tensor]]:
    """Return so many batches of 32 digits, with a border that makes them 32 x 32."""
    border = ((0, 0), (0, 0), (2, 2), (2, 2))
    return [
        (ms.Tensor((np.pad(pictures, border) - 0.13) / np.float32(0.31)), ms.Tensor(shown))
        for pictures, shown in batches(count, 32, seed=seed)
    ]
