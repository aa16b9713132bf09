"""Values told by being like others, and values read field by field, are the same: in sound files and damaged ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ckpt_peer

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import ckpt
from reshard_mpi.formats.ckpt import locate
from reshard_mpi.formats.ckpt import wire as module
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.testing import example_contents
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents


def located(path: Path, like: Manifest | str | None = None) -> Manifest | str:
    """Return what a checkpoint holds, or what is wrong with it. like: another one."""
    try:
        return locate(str(path), like if isinstance(like, Manifest) else None)
    except ShardError as error:
        return str(error)


@given(
    contents=example_contents.contents(),
    pieces=st.integers(1, 3),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 10_000),
)
def test_both_ways_find_the_same(
    contents: ShardContents, pieces: int, flips: list[tuple[int, int]], cut: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.ckpt"
        ckpt_peer.write(path, contents, pieces=pieces)
        content = bytearray(path.read_bytes())
        for at, byte in flips:
            content[at % len(content)] = byte
        path.write_bytes(content[:cut])
        ckpt_peer.write(path.with_name("like.ckpt"), contents, pieces=pieces)
        fast = located(path)
        assert located(path, located(path.with_name("like.ckpt"))) == fast
        with mock.patch.object(ckpt, "encoding_of", lambda *_: None):
            slow = located(path)
        assert fast == slow


def test_a_shard_of_the_same_structure_is_not_parsed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.ckpt" for number in range(3)]
    for number, path in enumerate(paths):
        tensor = SampleTensor("w", BY_NAME["int8"], (3, 4), bytes([number]) * 12)
        ckpt_peer.write(path, ShardContents.of([tensor], {"note": "a" if number < 2 else "b"}))
    like = located(paths[0])
    with mock.patch.object(ckpt, "_CheckpointReading", side_effect=AssertionError("parsed")):
        assert located(paths[1], like) == like.at(str(paths[1]))
        with pytest.raises(AssertionError):
            located(paths[2], like)


def test_tensors_that_are_alike_are_not_parsed_again(tmp_path: Path) -> None:
    tensors = [SampleTensor.random(f"layer.{n}.w", BY_NAME["float16"], (3, 4)) for n in range(10, 99)]
    path = tmp_path / "shard.ckpt"
    ckpt_peer.write(path, ShardContents.of(tensors))
    with mock.patch.object(module, "_value", wraps=module._value) as parsed:
        manifest = located(path)
    assert isinstance(manifest, Manifest)
    assert list(manifest.tensors) == [tensor.name for tensor in tensors]
    assert parsed.call_count == 1


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 2000, 4096])
def test_names_of_every_length_are_taken_alike(tmp_path: Path, length: int) -> None:
    names = [f"{number}".rjust(length, "n") for number in range(50)]
    contents = ShardContents.of([SampleTensor(name, BY_NAME["int8"], (2,), b"ab") for name in names])
    ckpt_peer.write(tmp_path / "shard.ckpt", contents)
    with mock.patch.object(ckpt, "value_at", wraps=ckpt.value_at) as parsed:
        fast = located(tmp_path / "shard.ckpt")
    with mock.patch.object(ckpt, "encoding_of", lambda *_: None):
        slow = located(tmp_path / "shard.ckpt")
    assert fast == slow and isinstance(fast, Manifest) and list(fast.tensors) == names
    assert parsed.call_count < 10 or length > 2000  # the longest may end behind what is read at once
