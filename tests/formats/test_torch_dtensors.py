"""Where the parts of DTensors lie, beside a naive reckoning; and rank files that contradict themselves."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import safetensors_peer, torch_peer
from support.examples import few

import reshard_mpi
from reshard_mpi.errors import ShardError
from reshard_mpi.formats import torch
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.nest.nodes import Call, Dict, Global
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.formats.torch import pickler
from reshard_mpi.formats.torch.dtensors import MeshFactor, TensorMesh, part_of, placement_of
from reshard_mpi.formats.torch.pickler import WrittenTensor, row_major_strides
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement, ceil_lengths

GOLDEN = Path(__file__).parent / "golden" / "torch" / "dtensor_ranks"


def chunks(indices: list[int], count: int) -> list[list[int]]:
    """Cut a list as torch.chunk does, with empty ones at the end so that there are as many as asked for."""
    step = max(-(-len(indices) // count), 1)
    cut = [indices[at : at + step] for at in range(0, len(indices), step)]
    return cut + [[]] * (count - len(cut))


@given(length=st.integers(0, 40), counts=st.lists(st.integers(1, 5), max_size=3))
def test_lengths_are_those_of_torch(length: int, counts: list[int]) -> None:
    cut = [list(range(length))]
    for count in counts:
        cut = [piece for whole in cut for piece in chunks(whole, count)]
    assert ceil_lengths(length, counts) == tuple(map(len, cut))


@pytest.mark.parametrize("length, count, expected", [(5, 2, (3, 2)), (3, 4, (1, 1, 1, 0)), (0, 3, (0, 0, 0))])
def test_uneven_lengths(length: int, count: int, expected: tuple[int, ...]) -> None:
    assert ceil_lengths(length, (count,)) == expected


@given(data=st.data())
def test_parts_are_those_of_a_naive_reckoning(data: st.DataObject) -> None:
    """Ranks of all meshes, in any order of their dimensions, and meshes that are a part of all ranks."""
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    strides = [1] * len(lengths)
    for at in range(len(lengths) - 2, -1, -1):
        strides[at] = strides[at + 1] * lengths[at + 1]
    world_size = strides[0] * lengths[0]
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    dimensions = tuple((MeshFactor(lengths[at], strides[at]),) if lengths[at] > 1 else () for at in chosen)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    cutting = {at: data.draw(st.sampled_from([None, *range(len(shape))])) for at in range(len(chosen))}
    order = data.draw(st.permutations(range(len(chosen))))
    cuts = {dimension: [at for at in order if cutting[at] == dimension] for dimension in range(len(shape))}
    for rank in range(world_size):
        mesh = TensorMesh(world_size, rank, dimensions)
        placement = placement_of(mesh, cuts, shape)
        expected = []
        for dimension, length in enumerate(shape):
            held = list(range(length))
            for at in cuts[dimension]:
                own = lengths[chosen[at]]
                held = chunks(held, own)[rank // strides[chosen[at]] % own]
            expected.append(held)
        box = part_of(placement, rank, shape)
        found = [list(range(low, high)) for low, high in zip(box.start, box.stop)]
        assert list(itertools.product(*found)) == list(itertools.product(*expected))


def changed(tmp_path: Path, old: bytes, new: bytes, rank: int = 1) -> Path:
    """Change the pickle of a rank file in place: nothing looks at its checksum."""
    content = (GOLDEN / f"model_world_size_4_rank_{rank}.pt").read_bytes()
    assert old in content and len(old) == len(new)
    path = tmp_path / "net.pt"
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.parametrize(
    "old, new, problem",
    [
        (b"placement_types\nReplicate", b"placement_types\nPartial__", "placement that is not known"),
        (b"(K\x00K\x01K\x02K\x03t", b"(K\x00K\x02K\x01K\x03t", "not counted from 0"),
        (b"_flatten_rank_map", b"_flatten_rank_nap", "a release of torch that is not known"),
        (b"X\x05\x00\x00\x00_rankq\x50K\x01", b"X\x05\x00\x00\x00_rankq\x50K\x07", "a file of rank 7"),
        (b"X\x05\x00\x00\x00_rankq\x50K\x01", b"X\x05\x00\x00\x00_rankq\x50K\x02", "does not have the part"),
        (b"X\x03\x00\x00\x00dimq[K\x00", b"X\x03\x00\x00\x00dimq[K\x05", "dimension 5 of 2"),
        (b"strideq2K\x02", b"strideq2K\x03", "do not count the ranks"),
        (b"shapeq0K\x02", b"shapeq0K\x00", "without length"),
        (b"tensor_metaq", b"tensor_betaq", "without the shape of the whole"),
    ],
)
def test_meshes_and_placements_that_are_refused(tmp_path: Path, old: bytes, new: bytes, problem: str) -> None:
    with pytest.raises(ShardError, match=problem):
        torch.locate(str(changed(tmp_path, old, new)))


# Meshes of torch up to 2.8, as its source has them: made here, since it is not at hand.

Shape = tuple[int, ...]


def made(module: str, name: str, **attributes: Any) -> Call:
    """Return an object of torch with these attributes."""
    call = Call(Global(f"torch.distributed.{module}", name), (), is_new=True)
    call.state = Dict([part for pair in attributes.items() for part in pair])
    return call


def older_mesh(ranks: np.ndarray, rank: int) -> Call:
    coordinates = [int(at) for at in np.argwhere(ranks == rank)[0]]
    kind = TensorType(BY_NAME["int32"], ranks.shape)
    flat = tuple(int(number) for number in ranks.flat)
    array = WrittenTensor(f"mesh{ranks.size}", kind)
    attributes = {"mesh": array, "_flatten_mesh_list": flat, "_coordinate_on_dim": coordinates}
    return made("device_mesh", "DeviceMesh", device_type="cpu", mesh_dim_names=None, **attributes)


def older_tensor(
    key: str, mesh: Call, dims: Sequence[int | None], local: tuple[int, ...], whole: tuple[int, ...]
) -> Call:
    shards = tuple(
        made("tensor.placement_types", "Replicate") if dim is None else made("tensor.placement_types", "Shard", dim=dim)
        for dim in dims
    )
    strides = row_major_strides(whole)
    meta = Call(Global("torch.distributed.tensor._dtensor_spec", "TensorMeta"), (whole, strides, None), is_new=True)
    spec = made("tensor._dtensor_spec", "DTensorSpec", mesh=mesh, placements=shards, tensor_meta=meta)
    state = Dict(["_local_tensor", WrittenTensor(key, TensorType(BY_NAME["float32"], local)), "_spec", spec])
    wrapper, dtensor = (
        Global("torch._utils", "_rebuild_wrapper_subclass"),
        Global("torch.distributed.tensor", "DTensor"),
    )
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (wrapper, dtensor, (), state))


def save_older(path: Path, tensors: dict[str, Call], **storages: int) -> Path:
    root = Dict([part for pair in tensors.items() for part in pair])
    members = {f"data/{key}": bytes(size_bytes) for key, size_bytes in storages.items()}
    torch_peer.archive(path, {"data.pkl": pickler.dumps(root), **members, "version": b"3\n"})
    return path


def test_meshes_of_older_releases(tmp_path: Path) -> None:
    """A mesh of all ranks beside one of some: rank 2 of (dp 2, tp 2), and the ranks 0 and 2 of its row of dp."""
    every, row = older_mesh(np.arange(4).reshape(2, 2), 2), older_mesh(np.array([0, 2]), 2)
    tensors = {
        "both": older_tensor("0", every, [0, 1], (2, 3), (4, 6)),
        "norm": older_tensor("1", row, [0], (2,), (5,)),
    }
    manifest = torch.locate(str(save_older(tmp_path / "net.pt", tensors, mesh4=16, mesh2=8, **{"0": 24, "1": 8})))
    assert manifest.identity is not None and manifest.identity[:2] == (2, 4)
    placed = strategy_table.loads(manifest.identity.strategy, "")
    assert placed.parameters == {
        "both": (Placement((2, 2), ((0,), (1,))),),
        "norm": (Placement((2, 2), ((0,),), sizes=((0, (3, 2)),)),),
    }
    boxes = {name: entry.box for name, entry in manifest.tensors.items()}
    assert boxes == {"both": Box((2, 0), (4, 3)), "norm": Box((3,), (5,))}


def test_equal_parts_of_a_tensor_are_no_mistake(tmp_path: Path) -> None:
    """The files say that they are different parts, so they are believed: rows of decay rates are alike."""
    rows = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    for rank in range(2):
        mesh = older_mesh(np.arange(2), rank)
        root = Dict(["A_log", older_tensor("0", mesh, [0], (2, 8), (4, 8))])
        members = {"data.pkl": pickler.dumps(root), "data/0": rows[:2].tobytes(), "data/mesh2": bytes(8)}
        path = tmp_path / "ranks" / f"rank_{rank}" / f"checkpoint_{rank}.pt"
        path.parent.mkdir(parents=True)
        torch_peer.archive(path, {**members, "version": b"3\n"})
    reshard_mpi.transform(tmp_path / "ranks", tmp_path / "one", strict=True, to="safetensors")
    written = safetensors_peer.read(tmp_path / "one" / "rank_0" / "checkpoint_0.safetensors")
    np.testing.assert_array_equal(np.frombuffer(written.tensors["A_log"].content, np.float32).reshape(4, 8), rows)


def layout_mesh(shape: Shape, strides: Shape, coordinates: Sequence[int]) -> Call:
    """Return a mesh of torch 2.9, which has lengths and strides, and not the rank itself."""
    layout = made("_mesh_layout", "_MeshLayout", shape=shape, stride=strides)
    attributes = {"_flatten_rank_map": (0, 1, 2, 3), "_coordinate_on_dim": list(coordinates)}
    return made("device_mesh", "DeviceMesh", _device_type="cpu", _layout=layout, **attributes)


def test_meshes_of_torch_2_9(tmp_path: Path) -> None:
    tensors = {
        "norm": older_tensor("1", layout_mesh((2,), (2,), [1]), [0], (2,), (5,)),
        "both": older_tensor("0", layout_mesh((2, 2), (2, 1), [1, 1]), [0, 1], (2, 3), (4, 6)),
    }
    manifest = torch.locate(str(save_older(tmp_path / "net.pt", tensors, **{"0": 24, "1": 8})))
    assert manifest.identity is not None and manifest.identity[:2] == (3, 4)
    boxes = {name: entry.box for name, entry in manifest.tensors.items()}
    assert boxes == {"norm": Box((3,), (5,)), "both": Box((2, 3), (4, 6))}
    lone = {"norm": tensors["norm"]}
    with pytest.raises(ShardError, match="no mesh of all ranks"):
        torch.locate(str(save_older(tmp_path / "lone.pt", lone, **{"1": 8})))


@pytest.mark.parametrize(
    "ranks, problem",
    [
        ([[0, 1], [3, 2]], "not evenly apart"),
        ([[1, 0], [3, 2]], "do not ascend"),
        ([[2, 4], [3, 5]], "no mesh of all ranks"),
    ],
)
def test_older_meshes_that_are_refused(tmp_path: Path, ranks: list[list[int]], problem: str) -> None:
    mesh = older_mesh(np.array(ranks), 3)
    tensors = {"w": older_tensor("0", mesh, [0, 1], (2, 3), (4, 6))}
    path = save_older(tmp_path / "net.pt", tensors, mesh4=16, **{"0": 24})
    with pytest.raises(ShardError, match=problem):
        torch.locate(str(path))


@pytest.mark.parametrize("attribute", few(1, ["_flatten_rank_map", "_rank", "_coordinate_on_dim", "_layout"]))
def test_meshes_of_deeply_nested_values(tmp_path: Path, attribute: str) -> None:
    """What is wrong with them is told without being shown."""
    mesh = layout_mesh((2, 2), (2, 1), [0, 0])
    nested: Any = ()
    for _ in range(90):
        nested = (nested,)
    mesh.state.flat = [part for key, value in mesh.state.pairs() if key != attribute for part in (key, value)]
    mesh.state.flat += [attribute, nested]
    path = save_older(tmp_path / "net.pt", {"w": older_tensor("0", mesh, [0, 1], (2, 3), (4, 6))}, **{"0": 24})
    with zipfile.ZipFile(path) as opened:
        data = opened.read("net/data.pkl")
    deep = data.replace(b")" + b"\x85" * 90, b")" + b"\x85" * 100_000)
    torch_peer.archive(path, {"data.pkl": deep, "data/0": bytes(24), "version": b"3\n"})
    with pytest.raises(ShardError, match="cannot be placed"):
        torch.locate(str(path))


@pytest.mark.slow
def test_tensors_of_very_many_pieces_are_not_counted_without_end(tmp_path: Path) -> None:
    ranks = 1 << 17
    layout = made("_mesh_layout", "_MeshLayout", shape=(ranks,), stride=(1,))
    mesh = made("device_mesh", "DeviceMesh", _layout=layout, _flatten_rank_map=tuple(range(ranks)), _rank=0)
    tensors = {f"w{at}": older_tensor("0", mesh, [0], (1,), (at + 1,)) for at in range(9)}
    path = save_older(tmp_path / "net.pt", tensors, **{"0": 4})
    with pytest.raises(ShardError, match="cut in different ways"):
        torch.locate(str(path))
