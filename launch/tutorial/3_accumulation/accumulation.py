"""Gradient accumulation in MindSpore: gradients of several small batches are summed, and then applied together.

In one process, or in several that each train on a part of every batch and have sums of their own (data parallel).
"""

from __future__ import annotations

import mindspore as ms
from digits import batches
from mindspore import nn, ops

BATCHES, BATCHES_AN_UPDATE = 40, 4
# The loss scale doubles after so many batches. It is a power of two, so that gradients are the same whatever it is.
FIRST_SCALE, BATCHES_A_SCALE = 1024.0, 7

_sum = ops.MultitypeFuncGraph("sum")
_of_all = ops.MultitypeFuncGraph("of_all")
_clear = ops.MultitypeFuncGraph("clear")


@_sum.register("Tensor", "Tensor", "Tensor")
def _add_gradient(share, total, gradient):
    return ops.assign_add(total, gradient * share)


@_of_all.register("Function", "Tensor", "Tensor")
def _sum_of_all_ranks(all_reduce, share, total):
    return all_reduce(total) * share


@_clear.register("Tensor", "Tensor")
def _set_to_zero(total, zero):
    return ops.assign(total, zero)


class Forward(nn.Cell):
    """The loss of a small batch; its gradients are added to the sums. It holds all that a checkpoint must have.

    share: what a gradient is multiplied by before it is added. sums: what the sums are called, before the names of
    weights.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, share: float, sums: str) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer, self.share = network, optimizer, ms.Tensor(share, ms.float32)
        self.loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.grad_sum = self.weights.clone(prefix=sums, init="zeros")
        self.loss_scale = ms.Parameter(ms.Tensor(FIRST_SCALE, ms.float32), name="loss_scale", requires_grad=False)
        self.scale_counter = ms.Parameter(ms.Tensor(0, ms.int32), name="scale_counter", requires_grad=False)
        self.gradients, self.each = ops.GradOperation(get_by_list=True, sens_param=True), ops.HyperMap()

    def construct(self, pictures, shown):
        loss = self.loss(pictures, shown)
        gradients = self.gradients(self.loss, self.weights)(pictures, shown, self.loss_scale)
        return ops.depend(loss, self.each(ops.partial(_sum, self.share / self.loss_scale), self.grad_sum, gradients))

    def update_scale(self) -> float:
        """Count a batch, and double the scale when it is time; return what it is."""
        count, scale = int(self.scale_counter.asnumpy()) + 1, float(self.loss_scale.asnumpy())
        if count == BATCHES_A_SCALE:
            count, scale = 0, 2 * scale
            self.loss_scale.set_data(ms.Tensor(scale, ms.float32))
        self.scale_counter.set_data(ms.Tensor(count, ms.int32))
        return scale


class Update(nn.Cell):
    """The optimizer's update by the sums, and sums of zero after it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.grad_sum, self.each = forward.optimizer, forward.grad_sum, ops.HyperMap()
        self.zeros = forward.grad_sum.clone(prefix="zeros", init="zeros")

    def construct(self):
        return self.updated_by(self.grad_sum)

    def updated_by(self, gradients):
        done = self.optimizer(gradients)
        return ops.depend(done, self.each(ops.partial(_clear), ops.depend(self.grad_sum, done), self.zeros))


class UpdateOfAll(Update):
    """The update by the sums of all ranks, added, and multiplied by a share."""

    def __init__(self, forward: Forward, share: float) -> None:
        super().__init__(forward)
        self.all_reduce, self.share = ops.AllReduce(), ms.Tensor(share, ms.float32)

    def construct(self):
        return self.updated_by(self.each(ops.partial(_of_all, self.all_reduce, self.share), self.grad_sum))


class Training:
    """A network in training by accumulated gradients, and the losses of all its batches.

    rank, ranks: which part of every batch this process trains on. averages: whether ranks take the mean of their sums,
    each of the mean over its pictures; else they add them, each its share of the mean over all pictures. sums: what
    these are called: grad_sum, as in MindSpore's guide, or accu_grads, as MindSpore's own cells call theirs.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, *, averages: bool = True, sums: str = "grad_sum") -> None:
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        ms.set_seed(2)
        network = nn.SequentialCell(nn.Dense(784, 96), nn.ReLU(), nn.Dense(96, 48), nn.ReLU(), nn.Dense(48, 10))
        optimizer = nn.Momentum(network.trainable_params(), 0.005, 0.9)
        self.rank, self.ranks = rank, ranks
        self.forward = Forward(network, optimizer, 1.0 if averages else 1 / ranks, sums).set_train()
        update = Update(self.forward) if ranks == 1 else UpdateOfAll(self.forward, 1 / ranks if averages else 1.0)
        self.update = update.set_train()
        self.losses: list[float] = []
        self.scales: list[float] = []

    def load(self, saved: dict[str, ms.Parameter], *, sums_are_lost: bool = False) -> int:
        """Load what was saved; return how many batches were done by then. sums_are_lost: do without the sums."""
        start = int(saved.pop("batch_num").asnumpy())
        sums = {total.name for total in self.forward.grad_sum} if sums_are_lost else set()
        saved = {name: value for name, value in saved.items() if name not in sums}
        missing, left = ms.load_param_into_net(self.forward, saved)
        if left or set(missing) != sums:
            raise SystemExit(f"not in the checkpoint: {missing}; not in the network: {left}")
        return start

    def run(self, start: int = 0, stop: int = BATCHES) -> None:
        """Train from one batch to another."""
        for number, (pictures, shown) in enumerate(batches(BATCHES, 32, seed=3)):
            if not start <= number < stop:
                continue
            own = slice(self.rank, None, self.ranks)
            flat = ms.Tensor(((pictures[own] - 0.13) / 0.3).reshape(-1, 784).astype("float32"))
            self.losses.append(float(self.forward(flat, ms.Tensor(shown[own])).asnumpy()))
            self.scales.append(self.forward.update_scale())
            if (number + 1) % BATCHES_AN_UPDATE == 0:
                self.update()
