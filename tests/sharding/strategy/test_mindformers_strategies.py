"""Two strategy files that a real MindSpore wrote; they are not the project's, and the tests skip where they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.mindspore_layouts import to_strategy
from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf, encode_protobuf
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy_table import dumps, loads

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
FOLDER = DATA / "mindformers_gpt2"

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no mindformers_gpt2 under RESHARD_MPI_SHARED_DATA or ../shared/data"
)


@pytest.mark.parametrize(("ranks", "mesh"), [(4, (2,)), (8, (2, 2))])
def test_what_they_say(ranks: int, mesh: tuple[int, ...]) -> None:
    made = strategy_files.load(str(FOLDER / f"strategy_{ranks}_npus.ckpt"))
    assert (made.world_size, made.stages) == (ranks, 2)
    assert sum(len(placement.stages) for found in made.parameters.values() for placement in found) == 148
    last = len(mesh) - 1
    assert made.find("backbone.embedding.word_embedding.embedding_table") == (Placement(mesh, ((), ()), stages=(0, 1)),)
    assert made.find("adam_m.backbone.blocks.0.output.mapping.weight") == (Placement(mesh, ((), (last,))),)
    assert made.find("backbone.blocks.1.attention.projection.weight") == (Placement(mesh, ((last,), ()), stages=(1,)),)
    assert loads(dumps(made), "") == made


@pytest.mark.parametrize("ranks", [4, 8])
def test_written_again_they_say_the_same(ranks: int) -> None:
    path = FOLDER / f"strategy_{ranks}_npus.ckpt"
    file = decode_protobuf(path.read_bytes(), str(path))
    again = decode_protobuf(encode_protobuf(file), str(path))
    assert again == file
    assert to_strategy([again], "") == strategy_files.load(str(path))
