"""Values found by pattern and values found field by field are the same, in sound files and in damaged ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from support import ckpt_peer

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.ckpt import values as module
from reshard_mpi.formats.ckpt.values import Value
from reshard_mpi.formats.ckpt.wire import Reader
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing import strategies
from reshard_mpi.testing.samples import Contents, SampleTensor


def walk(path: Path) -> tuple[list[Value], str | None]:
    """Return the Values up to the first error, and the error."""
    found: list[Value] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        found.extend(module.values(Reader(fd, str(path), path.stat().st_size)))
    except ShardError as error:
        return found, str(error)
    finally:
        os.close(fd)
    return found, None


@given(
    contents=strategies.contents(),
    pieces=st.integers(1, 3),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 10_000),
)
def test_both_ways_find_the_same(
    contents: Contents, pieces: int, flips: list[tuple[int, int]], cut: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.ckpt"
        ckpt_peer.write(path, contents, pieces=pieces)
        content = bytearray(path.read_bytes())
        for at, byte in flips:
            content[at % len(content)] = byte
        path.write_bytes(content[:cut])
        fast = walk(path)
        with mock.patch.object(module, "usual_value", lambda reader, at: None):
            slow = walk(path)
        assert fast == slow


def test_what_mindspore_writes_takes_the_fast_way(tmp_path: Path) -> None:
    tensors = [SampleTensor.random(f"layer.{n}.w", dtype, (200, n)) for n, dtype in enumerate(BY_NAME.values())]
    path = tmp_path / "shard.ckpt"
    ckpt_peer.write(path, Contents.of(tensors))
    with mock.patch.object(module, "_value", side_effect=AssertionError("the slow way")):
        found, error = walk(path)
    assert error is None
    assert [value.tag for value in found] == [tensor.name for tensor in tensors]
