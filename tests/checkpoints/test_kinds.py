"""Checkpoints by strategy and by list under the one conformance suite."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from support import ckpt_peer, safetensors_peer, toy_folder
from support.checkpoints import sample
from support.in_memory import part
from support.toys import registered_toys

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.errors import DisagreementError
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy, unsharded
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, write

__all__ = ["registered_toys"]


class TestByStrategy(CheckpointConformance):
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


@pytest.mark.usefixtures("registered_toys")
class TestByList(CheckpointConformance):
    """Random lists: pieces of any size, flattened ranges, copies that overlap, several of a tensor in one file."""

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        files: list[list[SampleTensor]] = [[] for _ in range(data.draw(st.integers(1, 4)))]
        listed = {}
        for name, array in arrays.items():
            boxes = data.draw(st.permutations(pieces(array.shape, data)))
            entries = []
            for number, box in enumerate(boxes):
                file = data.draw(st.integers(0, len(files) - 1))
                files[file].append(sample(f"{name} {number}", part(array, box)))
                entries.append([f"{file}.toypart", f"{name} {number}", box.start, box.stop])
            listed[name] = {"dtype": array.dtype.name, "shape": array.shape, "pieces": entries}
        for number, tensors in enumerate(files):
            write(toy_folder.toy_format, str(folder / f"{number}.toypart"), ShardContents.of(tensors))
        (folder / toy_folder.INDEX).write_text(json.dumps({"tensors": listed, "strings": {}}))


class TestHuggingFace(CheckpointConformance):
    """Whole tensors in files that an index names, or all in one file."""

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        names = data.draw(st.sampled_from([["model.safetensors"], ["a.safetensors", "b/c.safetensors"]]))
        file_of = {name: data.draw(st.sampled_from(names)) for name in arrays}
        for file in set(file_of.values()):
            held = (sample(name, array) for name, array in arrays.items() if file_of[name] == file)
            (folder / file).parent.mkdir(exist_ok=True)
            safetensors_peer.write(folder / file, ShardContents.of(held))
        if len(names) > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def pieces(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Draw boxes that cover a tensor together: ranges of its row-major order, or a grid; and some that overlap."""
    whole = Box.whole(shape)
    if not whole.size:
        return [whole]
    cuts = sorted({0, whole.size, *data.draw(st.lists(st.integers(0, whole.size), max_size=3))})
    boxes = [box for low, high in pairwise(cuts) for box in whole.blocks(whole.size, low, high)]
    for _ in range(data.draw(st.integers(0, 2))):
        start = tuple(data.draw(st.integers(0, length)) for length in shape)
        boxes.append(Box(start, tuple(data.draw(st.integers(low, high)) for low, high in zip(start, shape))))
    return boxes


@pytest.mark.usefixtures("registered_toys")
@pytest.mark.parametrize("replicas", [Replicas.SAMPLE, Replicas.CHECK])
def test_pieces_that_overlap_and_differ_are_refused(tmp_path: Path, replicas: Replicas) -> None:
    whole, piece = np.arange(12, dtype=np.int16), np.arange(12, dtype=np.int16)[4:8].copy()
    piece[2] += 1
    tensors = [sample("w 0", whole), sample("w 1", piece)]
    write(toy_folder.toy_format, str(tmp_path / "0.toypart"), ShardContents.of(tensors))
    entries = [["0.toypart", "w 0", [0], [12]], ["0.toypart", "w 1", [4], [8]]]
    listed = {"w": {"dtype": "int16", "shape": [12], "pieces": entries}}
    (tmp_path / toy_folder.INDEX).write_text(json.dumps({"tensors": listed, "strings": {}}))
    source = open_source(discovery.find_shards(str(tmp_path)), None)
    with pytest.raises(DisagreementError, match="'w'") as caught:
        Conversion(source, unsharded(), replicas=replicas).plan(0)
    assert "[6]" in str(caught.value)
    assert Conversion(source, unsharded(), replicas=Replicas.ANY).plan(0).copies == 1
