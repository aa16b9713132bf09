"""A training goes on in another torch model, whose parameters are joined and in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard_mpi

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

MAP = """
[[map]]
eq = "first.weight [a h], second.weight [b h] <=> both.weight [(a + b) h]"
[[map]]
eq = "first.bias [a], second.bias [b] <=> both.bias [(a + b)]"
"""


class Apart(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.second = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        return self.last(torch.cat([self.first(x), self.second(x)], dim=1))


class Together(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 2)
        self.norm = torch.nn.BatchNorm1d(4)
        self.both = torch.nn.Linear(4, 8)

    def forward(self, x: Any) -> Any:
        return self.last(self.both(self.norm(x)))


def steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    for seed in range(first, last):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def adam(net: Any) -> Any:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def trained(folder: Path) -> tuple[Any, Any, Path]:
    """Return a net after three steps, its optimizer, and the file of both."""
    torch.manual_seed(5)
    net = Apart()
    optimizer = adam(net)
    steps(net, optimizer, 0, 3)
    (folder / "map.toml").write_text(MAP)
    return net, optimizer, saved(net, optimizer, folder / "apart.pt")


def saved(net: Any, optimizer: Any, path: Path) -> Path:
    torch.save({"net": net.state_dict(), "optim": optimizer.state_dict(), "step": 3}, path)
    return path


def made(folder: Path) -> Any:
    (path,) = folder.rglob("*.pt")
    return torch.load(path, weights_only=True)


def assert_same(net: Any, other: Any) -> None:
    state, joined = net.state_dict(), other.state_dict()
    for kind in ("weight", "bias"):
        state[f"both.{kind}"] = torch.cat([state.pop(f"first.{kind}"), state.pop(f"second.{kind}")])
    assert state.keys() == joined.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(joined[name], tensor, rtol=1e-5, atol=1e-6)


def test_numbered_as_the_other_has_them(tmp_path: Path) -> None:
    net, optimizer, source = trained(tmp_path)
    other = Together()
    other_optimizer = adam(other)
    steps(other, other_optimizer, 8, 9)
    like = saved(other, other_optimizer, tmp_path / "like.pt")
    reshard_mpi.transform(source, tmp_path / "made", map=tmp_path / "map.toml", like=like)
    state = made(tmp_path / "made")
    other.load_state_dict(state["net"])
    other_optimizer.load_state_dict(state["optim"])
    assert_same(net, other)
    steps(net, optimizer, 3, 6)
    steps(other, other_optimizer, 3, 6)
    assert_same(net, other)

    like = saved(Apart(), optimizer, tmp_path / "apart-again.pt")
    reshard_mpi.transform(
        saved(other, other_optimizer, tmp_path / "together.pt"), tmp_path / "back", map=tmp_path / "map.toml", like=like
    )
    again = made(tmp_path / "back")
    for number, of_parameter in optimizer.state_dict()["state"].items():
        for key, tensor in of_parameter.items():
            torch.testing.assert_close(again["optim"]["state"][number][key], tensor, rtol=1e-4, atol=1e-6)


def test_by_name_as_torch_itself_takes_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    net, optimizer, source = trained(tmp_path)
    text = MAP.replace("first", "net.first").replace("second", "net.second").replace("both", "net.both")
    (tmp_path / "map.toml").write_text(text)
    report = reshard_mpi.transform(source, tmp_path / "made", map=tmp_path / "map.toml")
    assert "set_optimizer_state_dict" in " ".join(report.notes)
    state = made(tmp_path / "made")
    other = Together()
    other_optimizer = adam(other)
    other.load_state_dict(state["net"])
    set_optimizer_state_dict(other, other_optimizer, state["optim"])
    steps(net, optimizer, 3, 6)
    steps(other, other_optimizer, 3, 6)
    assert_same(net, other)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_a_model_under_another_key_goes_on_with_its_optimizer(tmp_path: Path, key: str) -> None:
    """As Lightning's `state_dict`: names in the optimizer are the model's own, without the key of the file."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    net, optimizer, _ = trained(tmp_path)
    torch.save({key: net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "made", map=f"{key}.{{p*}} <=> model.{{p*}}", forward=True)
    state = made(tmp_path / "made")
    other = Apart()
    other_optimizer = adam(other)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    steps(net, optimizer, 3, 6)
    steps(other, other_optimizer, 3, 6)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)
