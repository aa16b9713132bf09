"""Where the parts of DTensors lie, beside a naive reckoning; and rank files that contradict themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import torch
from reshard_mpi.formats.torch.dtensors import Factor, Mesh, chunk_lengths, part_of, placement_of

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
    assert chunk_lengths(length, counts) == tuple(map(len, cut))


@pytest.mark.parametrize("length, count, expected", [(5, 2, (3, 2)), (3, 4, (1, 1, 1, 0)), (0, 3, (0, 0, 0))])
def test_uneven_lengths(length: int, count: int, expected: tuple[int, ...]) -> None:
    assert chunk_lengths(length, (count,)) == expected


@given(data=st.data())
def test_parts_are_those_of_a_naive_reckoning(data: st.DataObject) -> None:
    """Ranks of all meshes, in any order of their dimensions, and meshes that are a part of all ranks."""
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    strides = [1] * len(lengths)
    for at in range(len(lengths) - 2, -1, -1):
        strides[at] = strides[at + 1] * lengths[at + 1]
    world_size = strides[0] * lengths[0]
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    dimensions = tuple((Factor(lengths[at], strides[at]),) if lengths[at] > 1 else () for at in chosen)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    cutting = {at: data.draw(st.sampled_from([None, *range(len(shape))])) for at in range(len(chosen))}
    order = data.draw(st.permutations(range(len(chosen))))
    cuts = {dimension: [at for at in order if cutting[at] == dimension] for dimension in range(len(shape))}
    for rank in range(world_size):
        mesh = Mesh(world_size, rank, dimensions)
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
        (b"_flatten_rank_map", b"_flatten_rank_nap", "another release"),
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
