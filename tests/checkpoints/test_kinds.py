"""Checkpoints by strategy, and folders of Hugging Face, under the one conformance suite (`toy_package` has lists)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from support import ckpt_peer, safetensors_peer
from support.checkpoints import sample
from support.in_memory import part
from support.toys import registered_toys
from toy_package import toy_folder, toy_format

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.errors import DisagreementError
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy, unsharded
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.sample_tensors import ShardContents, write

__all__ = ["registered_toys"]


class TestByStrategy(CheckpointConformance):
    info = formats.info("ckpt")

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> Strategy:
        ranks = data.draw(st.sampled_from([1, 2, 4, 6]))
        parameters = {}
        for name, array in arrays.items():
            able = [dim for dim, length in enumerate(array.shape) if length % ranks == 0]
            dim = data.draw(st.sampled_from([None, *able]))
            split = tuple((0,) if number == dim else () for number in range(array.ndim)) if dim is not None else ()
            parameters[name] = (Placement((ranks,), split),)
        strategy = Strategy(ranks, 1, parameters)
        for rank in range(ranks):
            path = folder / f"rank_{rank}" / f"{rank}.ckpt"
            path.parent.mkdir()
            boxes = {name: Layout(parameters[name][0], array.shape).box(rank) for name, array in arrays.items()}
            ckpt_peer.write(
                path, ShardContents.of(sample(name, part(arrays[name], box)) for name, box in boxes.items())
            )
        return strategy


class TestHuggingFace(CheckpointConformance):
    """Whole tensors in files that an index names, or all in one file."""

    info = formats.info("hf")

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        names = data.draw(st.sampled_from([["model.safetensors"], ["a.safetensors", "b/c.safetensors"]]))
        file_of = {name: data.draw(st.sampled_from(names)) for name in arrays}
        for file in set(file_of.values()):
            held = (sample(name, array) for name, array in arrays.items() if file_of[name] == file)
            (folder / file).parent.mkdir(exist_ok=True)
            safetensors_peer.write(folder / file, ShardContents.of(held))
        if len(names) > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


@pytest.mark.usefixtures("registered_toys")
@pytest.mark.parametrize("replicas", [Replicas.SAMPLE, Replicas.CHECK])
def test_pieces_that_overlap_and_differ_are_refused(tmp_path: Path, replicas: Replicas) -> None:
    whole, piece = np.arange(12, dtype=np.int16), np.arange(12, dtype=np.int16)[4:8].copy()
    piece[2] += 1
    tensors = [sample("w 0", whole), sample("w 1", piece)]
    write(toy_format, str(tmp_path / "0.toypart"), ShardContents.of(tensors))
    entries = [["0.toypart", "w 0", [0], [12]], ["0.toypart", "w 1", [4], [8]]]
    listed = {"w": ["int16", [12], entries]}
    (tmp_path / toy_folder.INDEX).write_text(json.dumps([listed, {}]))
    source = open_source(discovery.find_shards(str(tmp_path)), None)
    with pytest.raises(DisagreementError, match="'w'") as caught:
        Planner(source, unsharded(), Policy(replicas=replicas)).plan(0)
    assert "[6]" in str(caught.value)
    assert Planner(source, unsharded(), Policy(replicas=Replicas.ANY)).plan(0).read_count == 1
