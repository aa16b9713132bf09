"""torch.nn and mindspore.nn: weights of the one, through the map, make the other compute the same, and come back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard_mpi

torch = pytest.importorskip("torch")
ms = pytest.importorskip("mindspore")

pytestmark = [pytest.mark.torch, pytest.mark.mindspore]

TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _after_the_first_reshape() -> None:
    """MindSpore 2.10 is built for numpy 1: under numpy 2 the first reshape in a process fails, and no later one."""
    with contextlib.suppress(ImportError, SystemError):
        ms.Tensor([1.0]).reshape(1, 1)


class TorchConvolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.act = torch.nn.PReLU(8)
        self.grouped = torch.nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.gn = torch.nn.GroupNorm(2, 8)
        self.pointwise = torch.nn.Conv2d(8, 4, 1)
        self.up = torch.nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.plain = torch.nn.BatchNorm2d(4, affine=False)
        self.fc = torch.nn.Linear(4 * 10 * 10, 7)
        self.last = torch.nn.Linear(7, 5, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.act(self.bn1(self.conv(x)))
        x = self.up(self.pointwise(self.gn(self.grouped(x))))
        return self.last(self.fc(self.plain(x).flatten(1)))


class MindSporeConvolutions(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = ms.nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.bn1 = ms.nn.BatchNorm2d(8)
        self.act = ms.nn.PReLU(8)
        self.grouped = ms.nn.Conv2d(8, 8, 3, pad_mode="pad", padding=1, group=4)
        self.gn = ms.nn.GroupNorm(2, 8)
        self.pointwise = ms.nn.Conv2d(8, 4, 1, pad_mode="valid", has_bias=True)
        self.up = ms.nn.Conv2dTranspose(4, 4, 2, stride=2, pad_mode="valid", has_bias=True)
        self.plain = ms.nn.BatchNorm2d(4, affine=False)
        self.fc = ms.nn.Dense(4 * 10 * 10, 7)
        self.last = ms.nn.Dense(7, 5, has_bias=False)
        self.flat = ms.nn.Flatten()

    def construct(self, x: Any) -> Any:
        x = self.act(self.bn1(self.conv(x)))
        x = self.up(self.pointwise(self.gn(self.grouped(x))))
        return self.last(self.fc(self.flat(self.plain(x))))


class TorchSequences(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)  # as an Embedding, but for its name there
        self.lstm = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = torch.nn.GRU(10, 6, batch_first=True)
        self.ln = torch.nn.LayerNorm(6)
        self.linear1 = torch.nn.Linear(6, 6)
        self.linear2 = torch.nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        x, _ = self.lstm(self.emb(x))
        x, _ = self.gru(x)
        return self.head(self.linear2(self.linear1(self.ln(x))))


class MindSporeSequences(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.emb = ms.nn.Embedding(11, 6)
        self.head = ms.nn.Dense(6, 11, has_bias=False)
        self.lstm = ms.nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = ms.nn.GRU(10, 6, batch_first=True)
        self.ln = ms.nn.LayerNorm((6,), epsilon=1e-5)
        self.linear1 = ms.nn.Dense(6, 6)
        self.linear2 = ms.nn.Dense(6, 6)

    def construct(self, x: Any) -> Any:
        x, _ = self.lstm(self.emb(x))
        x, _ = self.gru(x)
        return self.head(self.linear2(self.linear1(self.ln(x))))


class TorchEncoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class MindSporeEncoder(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = ms.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def construct(self, x: Any) -> Any:
        return self.layer(x)


def images() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((3, 3, 5, 5)).astype(np.float32)


def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 11, (3, 4)).astype(np.int32)


def vectors() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((3, 4, 8)).astype(np.float32)


NETS = [
    pytest.param(TorchConvolutions, MindSporeConvolutions, images, id="convolutions"),
    pytest.param(TorchSequences, MindSporeSequences, tokens, id="sequences"),
    pytest.param(TorchEncoder, MindSporeEncoder, vectors, id="encoder"),
]


def trained_a_little(net: Any, batch: np.ndarray) -> Any:
    """Return a net whose parameters and running figures are no longer those it was made with."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.from_numpy(batch)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return net.eval()


@pytest.mark.parametrize(("make_torch", "make_mindspore", "make_batch"), NETS)
def test_outputs_agree_and_weights_come_back(
    tmp_path: Path, make_torch: Any, make_mindspore: Any, make_batch: Any
) -> None:
    torch.manual_seed(3)
    batch = make_batch()
    net, other = trained_a_little(make_torch(), batch), make_mindspore()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    ms.save_checkpoint(other, str(tmp_path / "like.ckpt"))
    reshard_mpi.transform(
        tmp_path / "net.pt",
        tmp_path / "there",
        to="ckpt",
        map="torch-mindspore",
        like=tmp_path / "like.ckpt",
        forward=True,
    )
    (made,) = (tmp_path / "there").glob("rank_0/*.ckpt")
    missing, surplus = ms.load_param_into_net(other, ms.load_checkpoint(str(made)), strict_load=True)
    assert not missing and not surplus
    other.set_train(False)
    with torch.no_grad():
        expected = net(torch.from_numpy(batch)).numpy()
    assert np.abs(other(ms.Tensor(batch)).asnumpy() - expected).max() <= TOLERANCE

    torch.save(make_torch().state_dict(), tmp_path / "like.pt")
    options = {"exclude": ["plain.gamma", "plain.beta"]} if hasattr(net, "plain") else {}
    reshard_mpi.transform(
        made,
        tmp_path / "back",
        to="torch",
        map="torch-mindspore",
        like=tmp_path / "like.pt",
        reverse=True,
        **options,
    )
    (again,) = (path for path in (tmp_path / "back").rglob("*.pt"))
    state = torch.load(again, weights_only=True)
    assert state.keys() == net.state_dict().keys()
    for name, tensor in net.state_dict().items():
        wanted = torch.zeros_like(tensor) if name.endswith("num_batches_tracked") else tensor
        assert state[name].shape == wanted.shape and torch.equal(state[name], wanted), name
