"""Test folders of toys: random pieces of random tensors, and spoiled folders, all written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import test_toy
from hypothesis import strategies as st
from toy_package import toy_folder

from reshard_mpi.errors import CoverageError, SourceError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance
from reshard_mpi.testing.folders import FolderConformance, cut_short, lost
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


def leads_to(folder: Path, file: str) -> str:
    """Have the index say that a piece lies in `file`; return what that is refused with."""
    (folder / toy_folder.INDEX).write_text(json.dumps([{"w": ["int8", [1], [[file, "w", [0], [1]]]]}, {}]))
    return "the index cannot be read"


class TestFolder(FolderConformance):
    """Two halves of a tensor, and everything that may be wrong with them."""

    info, index = toy_folder.INFO, toy_folder.INDEX
    damaged_indices: ClassVar = {
        text: text.encode()
        for text in ("", "[]", "[{}, []]", '[{"w": 1}, {}]', '[{}, {"note": 1}]', '[{"w": ["int8", [1], [["a"]]]}, {}]')
    }
    wrong: ClassVar = {
        "a file is missing": (lost("1.toypart"), ("no chunk of 'w'", "1.toypart"), CoverageError),
        "a file is cut short": (cut_short("1.toypart"), ("no chunk of 'w'", "1.toypart"), CoverageError),
        "no index": (lost(toy_folder.INDEX), "no index of them", SourceError),
        "a piece that no file has": (lambda folder: leads_to(folder, "0.toypart"), "does not fit the files"),
    }

    def save(self, folder: Path) -> ArraysByName:
        whole = np.arange(6, dtype=np.int8)
        for number, half in enumerate(np.split(whole, 2)):
            held = [SampleTensor("w", BY_NAME["int8"], (3,), half.tobytes())]
            test_toy.TestToy().write_independently(folder / f"{number}.toypart", ShardContents.of(held))
        entries = [["0.toypart", "w", [0], [3]], ["1.toypart", "w", [3], [6]]]
        (folder / toy_folder.INDEX).write_text(json.dumps([{"w": ["int8", [6], entries]}, {}]))
        return {"w": whole}

    def lead_outside(self, folder: Path, file: str) -> str:
        return leads_to(folder, file)


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
