"""Test folders of toys: random pieces of random tensors, which files and an index written by hand hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import test_toy
from hypothesis import strategies as st
from toy_package import toy_folder

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents


class TestToys(CheckpointConformance):
    """Pieces of any size, ranges of the row-major order, copies that overlap, several of a tensor in one file."""

    info = toy_folder.INFO

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        files: list[list[SampleTensor]] = [[] for _ in range(data.draw(st.integers(1, 4)))]
        listed = {}
        for name, array in arrays.items():
            entries = []
            for number, box in enumerate(data.draw(st.permutations(pieces(array.shape, data)))):
                file = data.draw(st.integers(0, len(files) - 1))
                content = np.array(array[(..., *map(slice, box.start, box.stop))], order="C").tobytes()
                files[file].append(SampleTensor(f"{name} {number}", BY_NAME[array.dtype.name], box.shape, content))
                entries.append([f"{file}.toypart", f"{name} {number}", box.start, box.stop])
            listed[name] = [array.dtype.name, array.shape, entries]
        for number, held in enumerate(files):
            test_toy.TestToy().write_independently(folder / f"{number}.toypart", ShardContents.of(held))
        (folder / toy_folder.INDEX).write_text(json.dumps([listed, {}]))


def pieces(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Draw boxes that cover a tensor together: ranges of its row-major order, or a grid; and some that overlap."""
    whole = Box.whole(shape)
    if not whole.size:
        return [whole]
    cuts = sorted({0, whole.size, *data.draw(st.lists(st.integers(0, whole.size), max_size=3))})
    boxes = [box for low, high in itertools.pairwise(cuts) for box in whole.blocks(whole.size, low, high)]
    for _ in range(data.draw(st.integers(0, 2))):
        start = tuple(data.draw(st.integers(0, length)) for length in shape)
        boxes.append(Box(start, tuple(data.draw(st.integers(low, high)) for low, high in zip(start, shape))))
    return boxes
