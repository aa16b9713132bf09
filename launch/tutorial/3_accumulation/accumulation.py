"""Gradient accumulation in MindSpore: gradients of several small batches are summed, and then applied together."""

from __future__ import annotations

import mindspore as ms
from digits import batches
from mindspore import nn, ops

BATCHES, BATCHES_AN_UPDATE = 40, 4

_sum = ops.MultitypeFuncGraph("sum")
_clear = ops.MultitypeFuncGraph("clear")


@_sum.register("Tensor", "Tensor")
def _add_gradient(total, gradient):
    return ops.assign_add(total, gradient)


@_clear.register("Tensor", "Tensor")
def _set_to_zero(total, zero):
    return ops.assign(total, zero)


class Forward(nn.Cell):
    """The loss of a small batch; its gradients are added to the sums. It holds all that a checkpoint must have."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.grad_sum = self.weights.clone(prefix="grad_sum", init="zeros")
        self.gradients, self.each = ops.GradOperation(get_by_list=True), ops.HyperMap()

    def construct(self, pictures, shown):
        loss = self.loss(pictures, shown)
        gradients = self.gradients(self.loss, self.weights)(pictures, shown)
        return ops.depend(loss, self.each(ops.partial(_sum), self.grad_sum, gradients))


class Update(nn.Cell):
    """The optimizer's update by the sums, and sums of zero after it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.grad_sum, self.each = forward.optimizer, forward.grad_sum, ops.HyperMap()
        self.zeros = forward.grad_sum.clone(prefix="zeros", init="zeros")

    def construct(self):
        done = self.optimizer(self.grad_sum)
        return ops.depend(done, self.each(ops.partial(_clear), ops.depend(self.grad_sum, done), self.zeros))


class Training:
    """A network in training by accumulated gradients, and the losses of all its batches."""

    def __init__(self) -> None:
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        ms.set_seed(2)
        network = nn.SequentialCell(nn.Dense(784, 96), nn.ReLU(), nn.Dense(96, 48), nn.ReLU(), nn.Dense(48, 10))
        self.forward = Forward(network, nn.Momentum(network.trainable_params(), 0.005, 0.9)).set_train()
        self.update = Update(self.forward).set_train()
        self.losses: list[float] = []

    def run(self, start: int = 0, stop: int = BATCHES) -> None:
        """Train from one batch to another."""
        for number, (pictures, shown) in enumerate(batches(BATCHES, 32, seed=3)):
            if not start <= number < stop:
                continue
            flat = ms.Tensor(((pictures - 0.13) / 0.3).reshape(-1, 784).astype("float32"))
            self.losses.append(float(self.forward(flat, ms.Tensor(shown)).asnumpy()))
            if (number + 1) % BATCHES_AN_UPDATE == 0:
                self.update()
