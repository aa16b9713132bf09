"""Networks of MindSpore itself that `reshard_mpi.mindspore.load` fills, from checkpoints that it has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import expected_rank, write_strategy
from support.mindformers import SIDES, weights, write_merged
from support.oracle import RawLayout

import reshard_mpi

pytest.importorskip("mindspore")
import mindspore as ms
from support import mindspore_peer as peer

import reshard_mpi.mindspore
from reshard_mpi.errors import ReshardError, UsageError

pytestmark = pytest.mark.mindspore

Array = np.ndarray[Any, Any]
DTYPES = [np.dtype(name) for name in ("float32", "float16", "int32", "int64", "uint8", "bool", ml_dtypes.bfloat16)]
FOUR = RawLayout((2, 2), (1, -1), 2)
TWO = RawLayout((2,), (-1, 0))


class Network(ms.nn.Cell):
    """Parameters of zeros, with the names, types and shapes of arrays."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        super().__init__()
        for number, (name, array) in enumerate(arrays.items()):
            setattr(self, f"p{number}", ms.Parameter(peer.tensor_of(np.zeros_like(array)), name=name))

    def held(self) -> dict[str, bytes]:
        return {parameter.name: bytes(parameter.get_bytes()) for parameter in self.get_parameters()}


def raw(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture
def every_type() -> dict[str, Array]:
    noise = np.random.default_rng(3).integers(0, 2, (len(DTYPES), 24, 12))
    return {f"layer.{dtype.name}": part.astype(dtype) for dtype, part in zip(DTYPES, noise)}


def saved(folder: Path, tensors: dict[str, Array]) -> tuple[Path, Path]:
    """Have MindSpore save tensors that are cut over four ranks; return the checkpoint and its strategy."""
    side = Side(4, 1, dict.fromkeys(tensors, FOUR))
    strategy = write_strategy(side, folder / "four")
    for rank in range(4):
        path = folder / "src" / f"rank_{rank}" / "net.ckpt"
        peer.save(expected_rank(side, tensors, rank), path, append_dict={"epoch_num": 3, "note": "é层"})
    return folder / "src", strategy


def test_a_whole_network_from_four_ranks(tmp_path: Path, every_type: dict[str, Array]) -> None:
    """What is not loaded is what `load_param_into_net` returns of the same checkpoint as one file."""
    source, strategy = saved(tmp_path, every_type)
    arrays = {**every_type, "another": np.ones(3, np.float32), "accu_grads.x": np.zeros(3, np.float32)}
    del arrays["layer.int32"]
    network, other = Network(arrays), Network(arrays)
    lacking = reshard_mpi.mindspore.load(network, source, src_strategy=strategy)
    assert network.held() == raw({**arrays, "another": np.zeros(3, np.float32)})
    reshard_mpi.transform(source, tmp_path / "one", strategy)
    (path,) = (tmp_path / "one" / "rank_0").glob("*.ckpt")
    assert lacking == ms.load_param_into_net(other, ms.load_checkpoint(str(path)))
    assert lacking == (["another"], ["layer.int32", "epoch_num", "note"])
    assert other.held() == network.held()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_told", [True, False])
def test_slices_of_a_rank(
    tmp_path: Path, every_type: dict[str, Array], monkeypatch: pytest.MonkeyPatch, rank: int, is_told: bool
) -> None:
    """Whose slices they are is said, or known to mindspore.communication."""
    source, strategy = saved(tmp_path, every_type)
    side = Side(2, 1, dict.fromkeys(every_type, TWO))
    target = write_strategy(side, tmp_path / "two")
    network = Network(expected_rank(side, every_type, rank))
    if not is_told:
        monkeypatch.setattr(reshard_mpi.mindspore.GlobalComm, "INITED", True)
        monkeypatch.setattr(reshard_mpi.mindspore, "get_rank", lambda: rank)
    given = rank if is_told else None
    missing, _ = reshard_mpi.mindspore.load(
        network, source, src_strategy=strategy, dst_strategy=target, rank=given, exclude="*bfloat16"
    )
    held = network.held()
    assert missing == ["layer.bfloat16"] and not any(held.pop("layer.bfloat16"))
    assert held == {n: b for n, b in raw(expected_rank(side, every_type, rank)).items() if n != "layer.bfloat16"}


def test_a_gpt2_of_eight_ranks_in_two_stages(tmp_path: Path) -> None:
    """Whole, and as the slices of each of four ranks, which are two stages too."""
    tensors = weights()
    source, target = (write_merged(SIDES[ranks], tmp_path / f"strategy_{ranks}") for ranks in (8, 4))
    for rank in range(8):
        path = tmp_path / "src" / f"rank_{rank}" / "gpt2-3_1875.ckpt"
        peer.save(expected_rank(SIDES[8], tensors, rank), path)
    network = Network(tensors)
    assert reshard_mpi.mindspore.load(network, tmp_path / "src", src_strategy=source) == ([], [])
    assert network.held() == raw(tensors)
    for rank in range(4):
        expected = expected_rank(SIDES[4], tensors, rank)
        network = Network(expected)
        options = {"src_strategy": source, "dst_strategy": target, "rank": rank, "check": rank == 0}
        assert reshard_mpi.mindspore.load(network, tmp_path / "src", **options) == ([], [])
        assert network.held() == raw(expected)


def test_weights_of_torch_by_a_map(tmp_path: Path) -> None:
    """A layer computes with them what numpy does."""
    random = np.random.default_rng(4)
    weight, bias, batch = (random.standard_normal(shape, np.float32) for shape in ((24, 12), 24, (5, 12)))
    peer.save({"fc.w": weight, "fc.b": bias}, tmp_path / "src" / "a.ckpt")
    dense = ms.nn.Dense(12, 24)
    maps = ["fc.w [o i] <=> weight [o i]", "fc.b <=> bias"]
    assert reshard_mpi.mindspore.load(dense, tmp_path / "src", map=maps, forward=True) == ([], [])
    assert np.allclose(dense(ms.Tensor(batch)).asnumpy(), batch @ weight.T + bias, atol=1e-5)


@pytest.mark.parametrize("wrong", ["shape", "type"])
def test_a_parameter_that_does_not_fit_is_named(tmp_path: Path, every_type: dict[str, Array], wrong: str) -> None:
    """Nothing is loaded then. With another type asked for, the elements are converted."""
    source, strategy = saved(tmp_path, every_type)
    name, array = "layer.float16", every_type["layer.float16"]
    network = Network({**every_type, name: array[:3] if wrong == "shape" else array.astype(np.float32)})
    before = network.held()
    with pytest.raises(UsageError) as error:
        reshard_mpi.mindspore.load(network, source, src_strategy=strategy)
    assert name in str(error.value) and network.held() == before
    if wrong == "type":
        reshard_mpi.mindspore.load(network, source, src_strategy=strategy, dtype="layer.float16=fp32")
        assert network.held() == raw({**every_type, name: array.astype(np.float32)})


def test_what_is_refused(tmp_path: Path, every_type: dict[str, Array]) -> None:
    source, strategy = saved(tmp_path, every_type)
    network = Network(every_type)
    with pytest.raises(UsageError, match="rank="):
        reshard_mpi.mindspore.load(network, source, src_strategy=strategy, dst_strategy=strategy)
    with pytest.raises(ReshardError, match="rank"):
        reshard_mpi.mindspore.load(network, source, src_strategy=strategy, dst_strategy=strategy, rank=4)
    (source / "rank_2" / "net.ckpt").unlink()
    with pytest.raises(ReshardError):
        reshard_mpi.mindspore.load(network, source, src_strategy=strategy)
    assert not any(map(any, network.held().values()))
