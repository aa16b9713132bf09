"""How many trips to the store it takes to open a checkpoint: structure is asked for many parts at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import done
from support.full_checkpoints import floats
from support.local_objects import LocalObjects, served

from reshard_mpi import formats
from reshard_mpi.formats.ckpt.wire import Steps
from reshard_mpi.text import KIB, MIB

LAYERS = 24
# Of one layer: the slices of one rank of four.
LAYER = {
    "input_norm.weight": (512,),
    "attention.q.weight": (128, 128),
    "attention.k.weight": (64, 128),
    "attention.v.weight": (64, 128),
    "attention.o.weight": (128, 128),
    "post_norm.weight": (512,),
    "mlp.gate.weight": (256, 128),
    "mlp.up.weight": (256, 128),
    "mlp.down.weight": (128, 256),
}
TENSORS = {
    "embedding.weight": floats(1024, 128),
    **{
        f"layers.{layer}.{name}": floats(*shape, first=layer)
        for layer in range(LAYERS)
        for name, shape in LAYER.items()
    },
}
FILES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of 4 ranks with 217 tensors each, in every format of shards, and a DCP folder of 4 files."""
    folder = tmp_path_factory.mktemp("trips")
    assert len(TENSORS) == 217
    write_ranks(dict.fromkeys(range(FILES), TENSORS), folder / "ckpt")
    (folder / "s.toml").write_text('mesh = { d = 4 }\n[[parameter]]\nmatch = "*"\n')
    (folder / "cut.toml").write_text('mesh = { d = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["d"] }\n')
    words = ["transform", folder / "ckpt", "--src-strategy", folder / "s.toml", "--dst-strategy"]
    for to in ("safetensors", "hdf5", "torch"):
        done(*words[:2], folder / to, *words[2:], folder / "s.toml", "--to", to)
    done(*words[:2], folder / "dcp", *words[2:], folder / "cut.toml", "--to", "dcp")
    return folder


@pytest.fixture
def local(folder: Path) -> Iterator[LocalObjects]:
    with served(folder) as objects:
        yield objects


@pytest.mark.parametrize(
    ("name", "first", "other"), [("safetensors", 1, 1), ("hdf5", 5, 5), ("torch", 2, 2), ("ckpt", 15, 2)]
)
def test_a_file(local: LocalObjects, folder: Path, name: str, first: int, other: int) -> None:
    module, like = formats.by_name(name), None
    paths = sorted(folder.glob(f"{name}/rank_*/*"))
    assert len(paths) == FILES
    for path, most in zip(paths, [first, *[other] * (FILES - 1)]):
        local.forget()
        address = local / path.relative_to(folder).as_posix()
        manifest = module.locate(address, like)
        like = like or manifest
        assert local.trips <= most, local.reads
        assert local.read_bytes <= MIB * 3 / 2


def test_a_folder_of_torch(local: LocalObjects, folder: Path) -> None:
    formats.by_name("dcp").open_folder(local / "dcp")
    assert local.trips <= 6, local.reads


def test_a_chain_that_repeats_nothing(local: LocalObjects, folder: Path) -> None:
    """No two distances are alike: nothing is foreseen, and nothing read for nothing."""
    shapes = np.random.default_rng(0).permutation(range(2000, 42000, 1000))
    write_ranks({0: {f"w{number}": floats(int(size)) for number, size in enumerate(shapes)}}, folder / "odd")
    path = folder / "odd/rank_0/checkpoint_0.ckpt"
    manifest = formats.by_name("ckpt").locate(local / "odd/rank_0/checkpoint_0.ckpt")
    assert len(manifest.tensors) == 40 and local.trips <= 40
    assert local.read_bytes <= 256 * KIB + 64 * KIB + 40 * 8 * KIB
    assert [*manifest.tensors.offsets] == [*formats.by_name("ckpt").locate(str(path)).tensors.offsets]


@pytest.mark.parametrize("most", [3, 50, 300])
def test_steps_are_foreseen_once_they_have_come_before(most: int) -> None:
    steps, at, foreseen, surprises = Steps(), 0, set[int](), 0
    layer = [5000, 70_000, 71_000, 9000, 5000, 120_000]
    for number in range(most):
        surprises += at not in foreseen
        steps.add(at)
        if at not in foreseen:
            foreseen.update(start + KIB for start, _ in steps.ahead())
        at += layer[number % len(layer)]
    assert surprises <= 2 * len(layer) + 6
