"""The network of MindSpore's guide, and how its operators are cut. Needs MindSpore.

The guide cuts two of its operators. MindSpore's CPU build can run a step only where all operators that follow are cut
so that nothing has to be gathered among some of the ranks; `shard_for_cpu` says how.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops


class Dense(nn.Cell):
    """The guide's layer: a weight of (inputs, outputs), and a bias; drawn with numpy, the same at every start."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        weight = np.random.default_rng(seed).normal(0, inputs**-0.5, (inputs, outputs))
        self.weight = ms.Parameter(ms.Tensor(weight.astype(np.float32)))
        self.bias = ms.Parameter(ms.Tensor(np.zeros(outputs, np.float32)))
        self.matmul = ops.MatMul()
        self.add = ops.Add()

    def construct(self, x):
        return self.add(self.matmul(x, self.weight), self.bias)


class Network(nn.Cell):
    """The guide's network, for images that are flat: the CPU build cannot gather what ops.Flatten leaves in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Dense(28 * 28, 512, 1)
        self.relu1 = ops.ReLU()
        self.layer2 = Dense(512, 512, 2)
        self.relu2 = ops.ReLU()
        self.layer3 = Dense(512, 10, 3)

    def construct(self, x):
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


def shard_like_the_guide(network: Network, cards: int) -> None:
    """Cut two MatMuls as the guide does for 8 cards and for 4."""
    network.layer1.matmul.shard(((2, 1), (1, 2)) if cards == 8 else ((1, 4), (4, 1)))
    network.layer3.matmul.shard(((2, 2), (2, 1)))


def shard_for_cpu(network: Network, cards: int, *, predicts: bool = False) -> None:
    """Cut the MatMuls as the guide does, and what comes between them so that CPUs can run it.

    predicts: cut what comes last over all 4 cards, so that it is gathered among all of them, as CPUs can.
    """
    shard_like_the_guide(network, cards)
    if cards == 8:
        network.layer1.add.shard(((2, 2), (2,)))
        network.relu1.shard(((2, 2),))
        network.layer2.matmul.shard(((2, 2), (2, 1)))
        network.layer2.add.shard(((2, 1), (1,)))
        network.relu2.shard(((2, 1),))
    else:
        network.layer1.add.shard(((1, 1), (1,)))
        network.relu1.shard(((1, 1),))
        network.layer2.matmul.shard(((1, 1), (1, 1)))
        network.layer2.add.shard(((1, 1), (1,)))
        network.relu2.shard(((1, 1),))
    network.layer3.add.shard(((4 if predicts else 2, 1), (1,)))


def set_stages(network: Network) -> None:
    """Put the guide's layers into two pipeline stages."""
    network.layer1.pipeline_stage = 0
    network.relu1.pipeline_stage = 0
    network.layer2.pipeline_stage = 1
    network.relu2.pipeline_stage = 1
    network.layer3.pipeline_stage = 1
