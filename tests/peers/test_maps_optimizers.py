"""A training goes on in MindSpore where it stopped in torch, and back: weights agree after the next steps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import done

import reshard_mpi
from reshard_mpi.errors import MapError

torch = pytest.importorskip("torch")
ms = pytest.importorskip("mindspore")

pytestmark = [pytest.mark.torch, pytest.mark.mindspore]

TOLERANCE = 1e-5
NORMS = {"weight": "gamma", "bias": "beta"}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def _after_the_first_reshape() -> None:
    """MindSpore 2.10 is built for numpy 1: under numpy 2 the first reshape in a process fails, and no later one."""
    with contextlib.suppress(ImportError, SystemError):
        ms.Tensor([1.0]).reshape(1, 1)


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(6)
        self.fc1 = torch.nn.Linear(6, 8)
        self.ln = torch.nn.LayerNorm(8)
        self.fc2 = torch.nn.Linear(8, 8)  # of one shape with the next
        self.fc3 = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.fc3(torch.tanh(self.fc2(self.ln(self.fc1(self.bn(x))))))


class MindSporeNet(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc3 = ms.nn.Dense(8, 8)  # in another order than in torch
        self.fc1 = ms.nn.Dense(6, 8)
        self.ln = ms.nn.LayerNorm((8,), epsilon=1e-5)
        self.fc2 = ms.nn.Dense(8, 8)
        self.bn = ms.nn.BatchNorm1d(6)
        self.set_train()

    def construct(self, x: Any) -> Any:
        return self.fc3(ms.ops.tanh(self.fc2(self.ln(self.fc1(self.bn(x))))))


def batches(first: int, last: int) -> list[np.ndarray]:
    return [np.random.default_rng(at).standard_normal((4, 6)).astype(np.float32) for at in range(first, last)]


def torch_steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    for batch in batches(first, last):
        optimizer.zero_grad()
        net(torch.from_numpy(batch)).square().mean().backward()
        optimizer.step()


def mindspore_steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    gradients = ms.value_and_grad(lambda x: net(x).square().mean(), None, optimizer.parameters)
    for batch in batches(first, last):
        optimizer(gradients(ms.Tensor(batch))[1])


def save_torch(net: Any, optimizer: Any, path: Path) -> Path:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def save_mindspore(net: Any, optimizer: Any, path: Path) -> Path:
    """Save weights and state, each once."""
    parameters = {parameter.name: parameter for parameter in (*net.get_parameters(), *optimizer.get_parameters())}
    ms.save_checkpoint([{"name": name, "data": value} for name, value in parameters.items()], str(path))
    return path


def torch_weights(net: Any) -> Arrays:
    """Return what is trained of a net, as MindSpore names it; running figures are averaged in other ways there."""
    names = {f"{norm}.{ours}": f"{norm}.{theirs}" for norm in ("ln", "bn") for ours, theirs in NORMS.items()}
    return {names.get(name, name): value.detach().numpy() for name, value in net.named_parameters()}


def assert_weights_agree(net: Any, other: Any) -> None:
    mine, theirs = torch_weights(net), {value.name: value.asnumpy() for value in other.trainable_params()}
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        assert np.abs(array - theirs[name]).max() <= TOLERANCE, name


def decayed(net: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return all parameters as one group: of those without a group, MindSpore would not decay gamma and beta."""
    return [{"params": net.trainable_params(), "weight_decay": weight_decay}]


PAIRS = {
    "Adam": (
        lambda net: torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.99), weight_decay=0.02),
        lambda net: ms.nn.Adam(decayed(net, 0.02), 0.01, beta1=0.8, beta2=0.99),
    ),
    "Adam, named": (
        lambda net: torch.optim.Adam(
            [
                {"params": [pair for pair in net.named_parameters() if pair[1].ndim == 1]},
                {"params": [pair for pair in net.named_parameters() if pair[1].ndim > 1]},
            ],
            lr=0.01,
        ),
        lambda net: ms.nn.Adam(net.trainable_params(), 0.01),
    ),
    "Adam, amsgrad": (
        lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
        lambda net: ms.nn.Adam(net.trainable_params(), 0.01, use_amsgrad=True),
    ),
    "Momentum": (
        lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda net: ms.nn.Momentum(decayed(net, 0.01), 0.05, momentum=0.9),
    ),
    "SGD": (
        lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, dampening=0.1),
        lambda net: ms.nn.SGD(net.trainable_params(), 0.05, momentum=0.9, dampening=0.1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_training_goes_on(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    make_torch, make_mindspore = PAIRS[name]
    net = TorchNet()
    optimizer = make_torch(net)
    torch_steps(net, optimizer, 0, 3)
    source = save_torch(net, optimizer, tmp_path / "training.pt")

    other = MindSporeNet()
    other_optimizer = make_mindspore(other)
    like = save_mindspore(other, other_optimizer, tmp_path / "like.ckpt")
    reshard_mpi.transform(source, tmp_path / "there", to="ckpt", map="torch-mindspore", like=like)
    (made,) = (tmp_path / "there").glob("rank_0/*.ckpt")
    loaded = ms.load_checkpoint(str(made))
    for target in (other, other_optimizer):
        missing, _ = ms.load_param_into_net(target, loaded)
        assert not missing
    torch_steps(net, optimizer, 3, 5)
    mindspore_steps(other, other_optimizer, 3, 5)
    assert_weights_agree(net, other)

    # And back, two steps later.
    source = save_mindspore(other, other_optimizer, tmp_path / "training.ckpt")
    again = TorchNet()
    again_optimizer = make_torch(again)
    torch_steps(again, again_optimizer, 7, 8)  # torch has no state before the first step
    like = save_torch(again, again_optimizer, tmp_path / "like.pt")
    reshard_mpi.transform(source, tmp_path / "back", to="torch", map="torch-mindspore", like=like)
    (made,) = (tmp_path / "back").rglob("*.pt")
    state = torch.load(made, weights_only=True)
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    torch_steps(again, again_optimizer, 5, 7)
    mindspore_steps(other, other_optimizer, 5, 7)
    assert_weights_agree(again, other)
    torch_steps(net, optimizer, 5, 7)
    assert_weights_agree(net, other)


def test_without_its_state_it_would_not_agree(tmp_path: Path) -> None:
    """What the test above would see if nothing of the state were moved."""
    torch.manual_seed(1)
    make_torch, make_mindspore = PAIRS["Adam"]
    net, other = TorchNet(), MindSporeNet()
    optimizer, other_optimizer = make_torch(net), make_mindspore(other)
    torch_steps(net, optimizer, 0, 3)
    source, like = tmp_path / "net.pt", tmp_path / "like.ckpt"
    torch.save(net.state_dict(), source)
    ms.save_checkpoint(other, str(like))
    reshard_mpi.transform(source, tmp_path / "there", to="ckpt", map="torch-mindspore", like=like, forward=True)
    (made,) = (tmp_path / "there").glob("rank_0/*.ckpt")
    ms.load_param_into_net(other, ms.load_checkpoint(str(made)))
    torch_steps(net, optimizer, 3, 5)
    mindspore_steps(other, other_optimizer, 3, 5)
    with pytest.raises(AssertionError):
        assert_weights_agree(net, other)


@pytest.mark.parametrize(
    ("make_torch", "make_mindspore", "told"),
    [
        (
            lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
            lambda net: ms.nn.AdamWeightDecay(net.trainable_params(), 0.01),
            "AdamWeightDecay does not correct the bias",
        ),
        (
            lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
            lambda net: ms.nn.Adam(net.trainable_params(), 0.01),
            "AdamW takes its decay from the weights",
        ),
        (
            lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True),
            lambda net: ms.nn.Momentum(net.trainable_params(), 0.01, momentum=0.9, use_nesterov=True),
            "Nesterov's momentum is another rule",
        ),
        (
            lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
            lambda net: ms.nn.Momentum(net.trainable_params(), 0.01, momentum=0.9, weight_decay=0.1),
            "MindSpore decays no gamma and beta",
        ),
    ],
)
def test_what_is_not_equivalent_is_said(tmp_path: Path, make_torch: Any, make_mindspore: Any, told: str) -> None:
    net, other = TorchNet(), MindSporeNet()
    optimizer = make_torch(net)
    torch_steps(net, optimizer, 0, 1)
    source = save_torch(net, optimizer, tmp_path / "training.pt")
    like = save_mindspore(other, make_mindspore(other), tmp_path / "like.ckpt")
    options = ("--to", "ckpt", "--map", "torch-mindspore", "--like", str(like), "--jobs", "1")
    said = done("transform", source, tmp_path / "there", *options)
    assert told in said.err + said.out, said


def test_other_betas_than_the_source_was_trained_with_are_refused(tmp_path: Path) -> None:
    net, other = TorchNet(), MindSporeNet()
    other_optimizer = ms.nn.Adam(other.trainable_params(), 0.01, beta1=0.5)
    mindspore_steps(other, other_optimizer, 0, 3)
    source = save_mindspore(other, other_optimizer, tmp_path / "training.ckpt")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch_steps(net, optimizer, 0, 1)
    like = save_torch(net, optimizer, tmp_path / "like.pt")
    with pytest.raises(MapError, match="beta1_power does not belong to the settings of the target"):
        reshard_mpi.transform(source, tmp_path / "back", to="torch", map="torch-mindspore", like=like)
