"""Files that torch 2.13 has written; torch itself is not needed to read them.

`plain.pt`: Python's own data of many kinds, parameters, buffers, a channels-last network, what is no plain tensor, and
an object of a class that nobody has here. The others are described in `expected.json`'s terms: name, type, shape and
CRC-32 of the elements in row-major order.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import torch
from reshard_mpi.formats.locations import StridedView
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.testing import sample_tensors

GOLDEN = Path(__file__).parent / "golden" / "torch"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
RANKS = [GOLDEN / "dtensor_ranks" / f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]


def facts(manifest: Manifest) -> dict[str, object]:
    return {
        name: {
            "crc32": zlib.crc32(sample_tensors.payload(entry)),
            "dtype": entry.dtype.name,
            "shape": list(entry.shape),
        }
        for name, entry in manifest.tensors.items()
    }


@pytest.mark.parametrize("name", ["train.pth", "legacy.pth", "plain.pt"])
def test_tensors(name: str) -> None:
    assert facts(torch.locate(str(GOLDEN / name))) == EXPECTED[name]


def test_views_share_a_storage() -> None:
    tensors = torch.locate(str(GOLDEN / "train.pth")).tensors
    assert tensors["model.emb.weight"].source == tensors["model.fc.weight"].source
    strided = tensors["strided"].source
    assert isinstance(strided, StridedView) and strided.strides_bytes == (4, 24)


def test_a_channels_last_network_keeps_its_strides() -> None:
    source = torch.locate(str(GOLDEN / "plain.pt")).tensors["conv.weight"].source
    assert isinstance(source, StridedView) and source.strides_bytes == (108, 4, 36, 12)


def test_what_is_left_out_is_named() -> None:
    assert torch.locate(str(GOLDEN / "plain.pt")).left_out == (
        "config: an object of my_project.config.Config, with 1 tensor in it",
        "function: random.Random",
        "meta: a tensor without elements (meta)",
    )
    assert torch.locate(str(GOLDEN / "train.pth")).left_out == ()


def test_tensors_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ShardError, match="tensors that cannot be read") as error:
        torch.locate(str(GOLDEN / "unreadable.pt"))
    assert error.value.got == (
        "odd.conj: a conjugated or negated view: save tensor.resolve_conj().resolve_neg();"
        " odd.sparse: a sparse tensor; odd.quantized: a quantized tensor"
    )


def test_a_flat_file_has_no_nest() -> None:
    assert torch.locate(str(GOLDEN / "legacy.pth")).strings == {}
    assert torch.locate(str(GOLDEN / "train.pth")).strings.keys() == {NEST}


@pytest.mark.parametrize("name", ["train.pth", "plain.pt"])
def test_written_again_it_is_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shard.pt"
    contents = sample_tensors.contents_of(torch.locate(str(GOLDEN / name)))
    sample_tensors.write(torch, str(path), contents)
    assert sample_tensors.contents_of(torch.locate(str(path))) == contents
    assert path.stat().st_size <= torch.size_at_most_bytes(sample_tensors.spec_of(contents))


def test_ranks_of_distributed_tensors_describe_themselves() -> None:
    manifests = [torch.locate(str(path)) for path in RANKS]
    assert [manifest.identity[:2] for manifest in manifests if manifest.identity] == [(rank, 4) for rank in range(4)]
    strategies = {manifest.identity.strategy for manifest in manifests if manifest.identity}
    assert len(strategies) == 1
    placed = strategy_table.loads(strategies.pop(), "")
    mesh = (2, 2)
    assert placed.parameters == {
        "row": (Placement(mesh, ((1,), ())),),
        "col": (Placement(mesh, ((), (1,))),),
        "both": (Placement(mesh, ((0,), (1,))),),
        "rep": (Placement(mesh, ((),)),),
        "uneven": (Placement(mesh, ((0,), ()), sizes=((0, (3, 2)),)),),
    }
    for manifest in manifests:
        plain = manifest.tensors["plain"]
        assert (
            plain.box is None
            and zlib.crc32(sample_tensors.payload(plain)) == EXPECTED["dtensor_ranks"]["plain"]["crc32"]
        )
