"""State that torch numbers, loaded into torch's own optimizer after conversions that have another order of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard_mpi
from reshard_mpi.errors import MapError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

STAGES = """
mesh = { d = 1 }
stages = 2
[[parameter]]
match = "*layers.[13]*"
stage = 1
[[parameter]]
match = "optimizer.state.[37].*"
stage = 1
[[parameter]]
match = "*"
stage = 0
"""
RANKS = "mesh = { d = 2 }\n[[parameter]]\nmatch = '*weight'\nsplit = { 0 = ['d'] }\n[[parameter]]\nmatch = '*'\n"
CHAINS = {
    "by type": (("safetensors", ""),),
    "ranks": (("dcp", RANKS),),
    "stages": (("torch", STAGES), ("dcp", RANKS)),
    "all": (("hdf5", STAGES), ("safetensors", RANKS), ("ckpt", STAGES)),
}


class Net(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Layers of one shape, of two types."""

    def __init__(self) -> None:
        super().__init__()
        types = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=dtype) for dtype in types)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.norm(x.float())


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    steps(net, optimizer, 0, 3)
    return net, optimizer


def steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    for number in range(first, last):
        torch.manual_seed(number)
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def through(folder: Path, path: Path, chain: str) -> tuple[Path, Path | None]:
    """Convert a file by a chain of formats; return what came of it, and its strategy."""
    before = None
    for number, (to, spec) in enumerate(CHAINS[chain]):
        cut = folder / f"{number}.toml" if spec else None
        if cut is not None:
            cut.write_text(spec)
        reshard_mpi.transform(path, folder / str(number), before, cut, to=to)
        path, before = folder / str(number), None if to == "dcp" else cut
    return path, before


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("way", ["as it is", "by names", "like"])
def test_a_training_goes_on_with_the_state_of_each_parameter(tmp_path: Path, chain: str, way: str) -> None:
    net, optimizer = trained()
    saved = {"epoch": 3, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "x.pt")
    path, before = through(tmp_path, tmp_path / "x.pt", chain)
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'net.{p*} <=> net.{p*}'\n")
    (tmp_path / "same.toml").write_text("[[map]]\neq = '{p*} <=> {p*}'\n")
    options: dict[str, Any] = {"forward": True}
    if way == "by names":
        options["map"] = tmp_path / "map.toml"
    elif way == "like":
        like, _ = through(tmp_path / "like", like_file(tmp_path / "like"), "by type")
        options |= {"map": tmp_path / "same.toml", "like": like}
    else:
        options = {}
    reshard_mpi.transform(path, tmp_path / "back", before, to="torch", **options)
    loaded = torch.load(tmp_path / "back" / "rank_0" / "checkpoint_0.pt", weights_only=True)
    assert [*loaded["net"]] == [*net.state_dict()] and [*loaded] == [*saved]

    other = Net()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    other.load_state_dict(loaded["net"])
    if way == "by names":
        names = [name for name, _ in other.named_parameters()]
        state = loaded["optimizer"]
        assert [*state["state"]] == names == state["param_groups"][0]["params"]
        state["state"] = {number: state["state"][name] for number, name in enumerate(names)}
        state["param_groups"][0]["params"] = [*range(len(names))]
    other_optimizer.load_state_dict(loaded["optimizer"])
    steps(net, optimizer, 3, 5)
    steps(other, other_optimizer, 3, 5)
    for (name, ours), theirs in zip(other.named_parameters(), net.parameters()):
        assert torch.equal(ours, theirs), name
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(other_optimizer.state[ours][key], value), (name, key)


def like_file(folder: Path) -> Path:
    folder.mkdir()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    steps(net, optimizer, 0, 1)
    saved = {"epoch": 0, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / "like.pt")
    return folder / "like.pt"


def test_a_checkpoint_that_torch_has_written_by_ranks_has_the_order(tmp_path: Path) -> None:
    """Several ranks that have saved their state together list their items in orders of their own."""
    import torch.distributed.checkpoint as dcp

    net, optimizer = trained()
    dcp.save(
        {"net": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'net.{p*} <=> net.{p*}'\n")
    reshard_mpi.transform(tmp_path / "dcp", tmp_path / "back", to="torch", map=tmp_path / "map.toml", forward=True)
    state = torch.load(tmp_path / "back" / "rank_0" / "checkpoint_0.pt", weights_only=True)["optimizer"]["state"]
    for name, parameter in net.named_parameters():
        assert torch.equal(state[name]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name


def test_tied_weights_are_refused_once_they_are_apart(tmp_path: Path) -> None:
    net = Net()
    net.layers[2].weight = net.layers[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    steps(net, optimizer, 0, 1)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'net.{p*} <=> net.{p*}'\n")
    options: dict[str, Any] = {"map": tmp_path / "map.toml", "forward": True, "to": "torch"}
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "right", **options)
    path, _ = through(tmp_path, tmp_path / "x.pt", "by type")
    with pytest.raises(MapError, match="10 parameters, and 9 numbers"):
        reshard_mpi.transform(path, tmp_path / "back", **options)
