"""Payload of objects is fetched ahead of its use, in the order of the plan: the right bytes, once, in little memory."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.checkpoints import write_ranks, write_shards, write_strategy
from support.command_line import done, run_apart
from support.conversions import shards
from support.examples import few, many
from support.local_objects import LocalObjects, served
from support.object_servers import Bucket, upload

import reshard_mpi
from reshard_mpi.engine import source_ranges
from reshard_mpi.filesystem import object_files, read_ahead
from reshard_mpi.filesystem.object_files import ObjectFile, open_object
from reshard_mpi.filesystem.read_ahead import ReadAhead, blocks_of
from reshard_mpi.planning.rank_plan import Limits
from reshard_mpi.runs import planner
from reshard_mpi.text import KIB, MIB

SIZE = 4000


@contextmanager
def small_numbers(block: int, gap: int, foreseen: int, room: int) -> Iterator[None]:
    """Have all that is fetched be small, so that small checkpoints take many blocks, and there is room for few."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (object_files, read_ahead):
            patch.setattr(module, "BLOCK_BYTES", block)
        patch.setattr(read_ahead, "_GAP_BYTES", gap)
        patch.setattr(read_ahead, "_FORESEEN_BYTES", foreseen)
        patch.setattr(read_ahead, "_MOST_WAITING", 5)
        patch.setattr(source_ranges, "_LONG_RUN_BYTES", 16)
        patch.setattr(planner, "LIMITS", Limits(4 * block, 8 * block))
        for module in (source_ranges, read_ahead):
            patch.setattr(module, "ReadAhead", partial(ReadAhead, room_bytes=room))
        yield


@pytest.fixture
def two(tmp_path: Path) -> Iterator[LocalObjects]:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(SIZE))
    with served(tmp_path) as local:
        yield local


RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, SIZE - 1), st.integers(1, 700)).map(
        lambda drawn: (*drawn[:2], min(drawn[2], SIZE - drawn[1]))
    ),
    max_size=40,
)


@many(200)
@given(RANGES, st.integers(1, 400), st.integers(0, 100), st.integers(1, 900))
def test_blocks(ranges: list[tuple[str, int, int]], block: int, gap: int, foreseen: int) -> None:
    """They have all bytes of the ranges, are no longer than a block, and have no gap that is too long."""
    ranges = [(f"s3://local/{name}", offset, length) for name, offset, length in ranges]
    with small_numbers(block, gap, foreseen, 1):
        planned = list(blocks_of([*ranges, ("/local/file", 0, 10)]))
    assert sum(block.wanted_bytes for block in planned) == sum(length for _, _, length in ranges)
    blocks = [(block.path, block.begin, block.length_bytes) for block in planned]
    assert {path for path, _, _ in blocks} == {path for path, _, _ in ranges}
    assert all(0 < length <= block for _, _, length in blocks)
    wanted = {path: bytearray(SIZE) for path, _, _ in ranges}
    for path, offset, length in ranges:
        wanted[path][offset : offset + length] = b"x" * length
    for path, offset, length in blocks:
        content = bytes(wanted[path][offset : offset + length])
        assert content[:1] == content[-1:] == b"x" and b"\0" * (gap + 1) not in content
    for path, offset, length in ranges:
        left = {*range(offset, offset + length)}
        for other, start, count in blocks:
            left -= {*range(start, start + count)} if other == path else set()
        assert not left


@many(100)
@given(RANGES, st.randoms(use_true_random=False), st.integers(20, 2000))
def test_what_is_read_is_what_lies_there(
    ranges: list[tuple[str, int, int]], draw: random.Random, room_bytes: int
) -> None:
    """In the order of the plan, and in between anything else, which fetches nothing of the plan anew."""
    with tempfile.TemporaryDirectory() as name, small_numbers(97, 13, 300, room_bytes):
        folder = Path(name)
        contents = {key: random.Random(key).randbytes(SIZE) for key in "ab"}
        for key, content in contents.items():
            (folder / key).write_bytes(content)
        with (
            served(folder) as local,
            closing(ReadAhead([(local / key, *span) for key, *span in ranges], room_bytes)) as ahead,  # type: ignore[misc]
        ):
            files = {key: open_object(local / key) for key in contents}
            for file in files.values():
                file.read_ahead_by(ahead)
            for key, offset, length in ranges:
                if draw.random() < 0.2:
                    other = draw.randrange(SIZE)
                    assert read(files["a"], other, 50) == contents["a"][other : other + 50]
                done_bytes = 0
                while done_bytes < length:
                    count = min(length - done_bytes, draw.randint(1, 300))
                    begin = offset + done_bytes
                    assert read(files[key], begin, count) == contents[key][begin : begin + count]
                    done_bytes += count
                assert ahead._held_bytes <= max(room_bytes, 97)
    assert threading.enumerate() == [threading.main_thread()]


def read(file: ObjectFile, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: file.read_into(offset, [memoryview(buffer)])])


@pytest.mark.parametrize("kind", few(1, ("safetensors", "ckpt")))
@many(8)
@given(case=cases(max_ranks=6), sizes=st.tuples(*[st.integers(16, 400)] * 2), room_bytes=st.integers(100, 3000))
def test_targets_are_those_of_files(kind: str, case: Case, sizes: tuple[int, int], room_bytes: int) -> None:
    """Whatever strategies cut, and joined by whatever way of moving bytes: with room for next to nothing, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, other = (write_strategy(side, folder / name) for side, name in ((case.src, "one"), (case.dst, "other")))
        write_shards(case.src, case.tensors, folder / "src", kind)
        strategies = ["--src-strategy", one, "--dst-strategy", other, "--jobs", "1"]
        done("transform", folder / "src", folder / "local", *strategies)
        with served(folder) as local, small_numbers(sizes[0], sizes[1] // 4, 2 * sizes[1], room_bytes):
            done("transform", local / "src", folder / "remote", *strategies)
        assert shards(folder / "remote") == shards(folder / "local")


QUARTERS = 'mesh = { d = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { %d = ["d"] }\n'
WAYS = {
    "rows": (["--dst-strategy", "rows.toml"], 1.02),
    "columns": (["--dst-strategy", "columns.toml"], 1.02),  # each target is made of all rows, which are read once
    "columns of another type": (["--dst-strategy", "columns.toml", "--dtype", "fp16"], 2.04),
    "another type": (["--dst-strategy", "rows.toml", "--dtype", "fp16"], 2.04),
    "turned axes": (["--map", "{p*} [a b] <=> {p*}.t [b a]", "--forward"], 1.02),
    "torch": (["--to", "torch"], 1.02),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    draw = np.random.default_rng(0)
    tensors = {f"w{number}": draw.random((512, 1024), np.float32) for number in range(32)}
    write_ranks({0: tensors}, folder / "src", "safetensors")
    for number, name in enumerate(("rows", "columns")):
        (folder / f"{name}.toml").write_text(QUARTERS % number)
    rows = ["--dst-strategy", folder / "rows.toml"]
    done("transform", folder / "src", folder / "cut", *rows)
    columns = ["--dst-strategy", folder / "columns.toml"]
    done("transform", folder / "src", folder / "cut_by_columns", *columns)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_more_is_fetched_than_is_needed(large: Path, tmp_path: Path, way: str) -> None:
    options, share = WAYS[way]
    words = [str(large / word) if word.endswith(".toml") else word for word in options]
    done("transform", large / "src", tmp_path / "local", *words)
    with served(large) as local:
        done("transform", local / "src", tmp_path / "remote", *words)
        written_bytes = sum(path.stat().st_size for path in (tmp_path / "local").glob("rank_*/*"))
        assert local.read_bytes <= share * written_bytes
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.parametrize("cut", ("cut", "cut_by_columns"))
def test_what_ranks_have_is_joined(large: Path, tmp_path: Path, cut: str) -> None:
    """All of them are read in turn, a part of each at a time; nothing is fetched twice."""
    strategy = large / ("rows.toml" if cut == "cut" else "columns.toml")
    with served(large) as local:
        done("transform", local / cut, tmp_path / "whole", "--src-strategy", strategy, "--to", "safetensors")
        assert local.read_bytes <= 64 * MIB + 4 * 450 * KIB
    (whole,) = (tmp_path / "whole").glob("rank_0/*")
    (source,) = (large / "src").glob("rank_0/*")
    done("diff", whole, source)


@pytest.mark.slow
def test_columns_of_an_open_checkpoint(large: Path) -> None:
    """Runs that lie apart are asked for at once, not one after another, and what lies far between them is not read."""
    with served(large) as local, reshard_mpi.open(local / "src") as checkpoint:
        whole = reshard_mpi.open(large / "src")["w3"][...]
        local.forget()
        checkpoint["w3"][:1]  # so that it is listed again
        local.reads.clear()
        local.trips = 0
        assert np.array_equal(checkpoint["w3"][:, 5:9], whole[:, 5:9])
        assert local.trips <= 2 and local.read_bytes <= 2 * MIB
        local.reads.clear()
        assert np.array_equal(checkpoint["w3"][::100, 100:900:3], whole[::100, 100:900:3])
        assert local.read_bytes <= 6 * 8 * KIB


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["cut", "cut_by_columns"])
def test_a_target_that_processes_share(moto: Bucket, large: Path, tmp_path: Path, cut: str) -> None:
    """Each fetches what its part of the file is made of, in a fork of a process that has looked around."""
    upload(large / cut, moto / cut)
    strategy = large / ("rows.toml" if cut == "cut" else "columns.toml")
    words = ["--src-strategy", strategy, "--to", "torch"]
    done("transform", large / cut, tmp_path / "local", *words)
    report = tmp_path / "report.json"
    run_apart("transform", moto / cut, tmp_path / "remote", *words, "--jobs", "2", "--report", report, check=True)
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")
    (target,) = json.loads(report.read_text())["targets"]
    assert target["processes"] == 2
