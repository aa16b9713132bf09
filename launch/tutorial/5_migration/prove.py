"""Shows what torch and MindSpore have noted in two columns, and checks that they agree.

The slices of the 4 ranks are put together by hand and held against torch's tensors, bit by bit.
"""

import sys
from typing import NamedTuple

import mindspore as ms
import numpy as np
import torch
from lesson import PART_STEPS, noted, test_data

# Both compute in single precision, in other orders. Adam makes steps of one length of gradients that are nearly 0, so
# weights that hardly matter drift apart first, and outputs before losses.
LOSSES_APART, OUTPUTS_APART = 1e-4, 1e-3
# Tensors of both networks, and along which dimension four_ranks.toml cuts them.
SAME = {
    "conv.weight": ("conv.weight", None),
    "norm.gamma": ("norm.weight", None),
    "norm.beta": ("norm.bias", None),
    "norm.moving_mean": ("norm.running_mean", None),
    "norm.moving_variance": ("norm.running_var", None),
    "line.weight": ("line.weight", 0),
    "line.bias": ("line.bias", 0),
    "layernorm.gamma": ("layernorm.weight", None),
    "layernorm.beta": ("layernorm.bias", None),
    "head.weight": ("head.weight", 1),
}
# The parameters as torch's optimizer numbers them.
NUMBERED = ["conv.weight", "norm.weight", "norm.bias", "line.weight", "line.bias"]
NUMBERED += ["layernorm.weight", "layernorm.bias", "head.weight"]


def check_slices() -> None:
    saved = torch.load("torch.pt", weights_only=True)
    ranks = [ms.load_checkpoint(f"four/rank_{rank}/checkpoint_{rank}.ckpt") for rank in range(4)]
    for name, (torch_name, dimension) in SAME.items():
        expected = {name: saved["model"][torch_name]}
        if torch_name in NUMBERED:
            state = saved["optimizer"]["state"][NUMBERED.index(torch_name)]
            expected |= {f"moment1.{name}": state["exp_avg"], f"moment2.{name}": state["exp_avg_sq"]}
        for parameter, tensor in expected.items():
            parts = [rank[parameter].asnumpy() for rank in ranks]
            whole = parts[0] if dimension is None else np.concatenate(parts, dimension)
            if whole.tobytes() != tensor.numpy().tobytes():
                sys.exit(f"{parameter}: the slices of 4 ranks are not what torch saved")


class Apart(NamedTuple):
    """How far losses and outputs of two trainings are apart at most."""

    losses: float
    outputs: float


def compare(number: int, one: str, other: str) -> Apart:
    """Print what two have noted of a part, side by side. Exit if it does not agree."""
    losses, outputs = noted(one, number)
    other_losses, other_outputs = noted(other, number)
    apart = Apart(np.abs(np.subtract(losses, other_losses)).max(), np.abs(outputs - other_outputs).max())
    shown = test_data()[1]
    predicted, other_predicted = outputs.argmax(1), other_outputs.argmax(1)
    print(f"{'':12} {one:>14} {other:>14}")
    for picture in range(4):
        print(f"picture of {shown[picture]} {predicted[picture]:14} {other_predicted[picture]:14}")
    print(f"{'recognized':12} {(predicted == shown).mean():14.1%} {(other_predicted == shown).mean():14.1%}")
    for step, (loss, other_loss) in enumerate(zip(losses, other_losses, strict=True), number * PART_STEPS + 1):
        print(f"loss {step:<7} {loss:14.6f} {other_loss:14.6f}")
    print(f"losses are {apart.losses:.0e} apart at most, outputs {apart.outputs:.0e}")
    if not (apart.losses <= LOSSES_APART and apart.outputs <= OUTPUTS_APART and (predicted == other_predicted).all()):
        sys.exit(f"part {number + 1}: {one} and {other} do not agree")
    return apart


if __name__ == "__main__":
    check_slices()
    there, back = compare(1, "torch", "mindspore"), compare(2, "torch", "torch_resumed")
    print(
        "proved: 5_migration: torch's weights and Adam go on through 4 ranks in MindSpore, and back in torch: "
        f"the predictions are those of torch alone, the losses within {max(there.losses, back.losses):.0e}"
    )
