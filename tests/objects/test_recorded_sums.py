"""Verified targets in a store whose sources have recorded sums: what the store copies is not read, and yet proven.

The store tells the CRC-32 of what it has copied, and the records of the source say what that should be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import Arrays
from support.command_line import done
from support.conversions import Conversion, write_conversion
from support.examples import few
from support.fault_proxy import Operation, Request, before
from support.object_servers import Bucket, download, forget, names, objects, put, upload, uploads
from support.oracle import RawLayout

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.engine.open_files import sync_and_drop_cache
from reshard_mpi.formats import ckpt
from reshard_mpi.runs import target_writer
from reshard_mpi.runs.recorded_runs import RecordedSums

MIB = 1 << 20
_RANKS = 3
_SLICE_BYTES = 6 * MIB
# Headers, records, and the samples by which a copied checkpoint is known.
_STRUCTURE_BYTES = 2 * MIB
# The first slice is sent, with the header before it; see `test_staged_copies`.
_COPIED_BYTES = (_RANKS - 1) * _SLICE_BYTES


def rows(ranks: int, *names: str) -> Side:
    return Side(ranks, 1, {name: RawLayout((ranks,), (0, -1)) for name in names or ("w",)})


def large() -> Arrays:
    shape = (_RANKS * _SLICE_BYTES >> 12, 1 << 10)
    return {"w": np.random.default_rng(0).integers(0, 1 << 30, shape, np.int32)}


def verified_source(folder: Path, bucket: Bucket, source: Side, target: Side, tensors: Arrays, to: str) -> Conversion:
    """Return a conversion from a checkpoint in a store that was made with --verify, so that its records have sums."""
    made = write_conversion(folder / "made", "safetensors", source, source, tensors)
    made.done("transform", "--verify")
    upload(made.dst, bucket / "src")
    c = write_conversion(folder / "local", "safetensors", source, target, tensors, to=to)
    return c.but(src=bucket / "src", dst=bucket / "out", options=(*c.options, "--verify"))


def without_records(c: Conversion) -> None:
    """Have a source be one of which no records are kept."""
    for name in [name for name in names(str(c.src)) if not name.startswith("rank_")]:
        put(f"{c.src}/{name}", b"")


def as_local(c: Conversion, folder: Path) -> None:
    """Check that the target in the store is the one that the same command makes on the disk, with the same sums."""
    local = c.but(src=download(str(c.src), folder / "copy"), dst=folder / "out")
    local.done("transform")
    found = objects(str(c.dst))
    files = {
        str(path.relative_to(local.dst)): path
        for path in local.dst.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }
    assert set(found) == set(files)
    for name, path in files.items():
        if ".reshard_mpi/rank_" in name:
            assert json.loads(found[name])["sums"] == json.loads(path.read_text())["sums"]
        elif not name.endswith(".json"):
            assert found[name] == path.read_bytes()


def moved(c: Conversion, bucket: Bucket, *options: str) -> tuple[int, int]:
    """Run a conversion; return how many bytes were read of the store, and how many it has copied."""
    report = c.folder / "report.json"
    forget()
    with before(bucket.server) as proxy:
        finished = c.run("transform", "--report", str(report), *options)
        assert finished.code == 0, finished
    copied_bytes = sum(target["store_copied_bytes"] for target in json.loads(report.read_text())["targets"])
    return proxy.received_bytes, copied_bytes


@pytest.mark.parametrize("to", few(1, ["safetensors", "hdf5", "ckpt", "dcp"]))
def test_what_has_recorded_sums_is_not_read(seaweedfs: Bucket, tmp_path: Path, to: str) -> None:
    c = verified_source(tmp_path, seaweedfs, rows(_RANKS), rows(1), large(), to)
    received_bytes, copied_bytes = moved(c, seaweedfs)
    assert copied_bytes == _COPIED_BYTES
    assert received_bytes < _SLICE_BYTES + _STRUCTURE_BYTES
    as_local(c, tmp_path)
    done("verify", str(c.dst))


@pytest.mark.slow
@pytest.mark.parametrize(("to", "is_recorded"), [("torch", True), ("torch", False), ("safetensors", False)])
def test_what_is_copied_is_read_once(seaweedfs: Bucket, tmp_path: Path, to: str, is_recorded: bool) -> None:
    """Where no sums are recorded, or for a format that keeps sums of its own."""
    c = verified_source(tmp_path, seaweedfs, rows(_RANKS), rows(1), large(), to)
    if not is_recorded:
        without_records(c)
    received_bytes, copied_bytes = moved(c, seaweedfs)
    assert copied_bytes == _COPIED_BYTES
    again_bytes = 0 if is_recorded else _SLICE_BYTES  # what is sent is read once more to compare it
    assert received_bytes < _RANKS * _SLICE_BYTES + again_bytes + _STRUCTURE_BYTES


@pytest.mark.parametrize("to", few(1, ["safetensors", "torch", "hdf5"]))
def test_a_source_that_breaks_its_recorded_sums_is_refused(bucket: Bucket, tmp_path: Path, to: str) -> None:
    """Its object was put anew since, of the same length, with one other byte that no sample has."""
    c = verified_source(tmp_path, bucket, rows(_RANKS), rows(1), large(), to)
    again = c.but(dst=bucket / "src_again", dst_strategy=c.src_strategy, options=("--verify",))
    again.done("transform")
    name = "rank_1/checkpoint_1.safetensors"
    spoiled = bytearray(objects(str(again.dst))[name])
    spoiled[_SLICE_BYTES // 2 + 4097] ^= 1
    put(f"{again.dst}/{name}", bytes(spoiled))
    forget()
    finished = c.but(src=again.dst).run()
    assert finished.code not in (0, 1), finished
    assert finished.err.count("error:") == 1 and "'w'" in finished.err and "rank_1" in finished.err, finished
    assert not [name for name in names(str(c.dst)) if name.startswith("rank_")]
    assert not uploads(bucket)


@pytest.mark.slow
def test_a_tensor_in_several_pieces(seaweedfs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one of a `.ckpt` has headers within: parts that are copied end there."""
    monkeypatch.setattr(ckpt, "CUT_BYTES", 11 * MIB)
    c = verified_source(tmp_path, seaweedfs, rows(_RANKS), rows(1), large(), "ckpt")
    received_bytes, copied_bytes = moved(c, seaweedfs)
    assert 0 < copied_bytes < _COPIED_BYTES
    assert received_bytes < _RANKS * _SLICE_BYTES - copied_bytes + _STRUCTURE_BYTES
    as_local(c, tmp_path)


@pytest.mark.parametrize("option", few(1, ["sum", "mean"]))
def test_all_ranks_whose_gradients_are_joined_are_held_against_their_sums(
    moto: Bucket, tmp_path: Path, option: str
) -> None:
    """Also the ones from which nothing is taken by itself: both ranks hold all, and a target takes the first's."""
    name, options = "accu_grads.w", ("--accumulated", option, "--verify")
    source, target = (Side(ranks, 1, {"w": RawLayout((ranks,), (-1, -1))}) for ranks in (2, 1))
    c = write_conversion(tmp_path, "safetensors", source, target, {"w": np.ones((8, 2), np.float32)})
    for rank in range(2):
        c.rewrite(rank, {name: np.full((8, 2), rank + 1, np.float32)})
    made = c.but(dst=tmp_path / "made", dst_strategy=c.src_strategy)
    made.done("transform", "--accumulated", "sum", "--verify")
    shard = made.written(1)
    contents = bytearray(shard.read_bytes())
    entry = formats.by_name("safetensors").locate(str(shard)).tensors[name].stored
    assert entry is not None
    contents[entry.ranges[0].offset_bytes + 3] = 0x40  # of zeros one is 2.0 now
    shard.write_bytes(contents)
    upload(made.dst, moto / "src")
    in_store = c.but(src=moto / "src", dst=moto / "out")
    for each in (c.but(src=made.dst), in_store):
        forget()
        error = each.refused("transform", *options, code=3)
        assert error.count("error:") == 1 and f"'{name}' is damaged" in error
    assert not [found for found in names(str(in_store.dst)) if found.startswith("rank_")]


def shifted(request: Request) -> None:
    """Have the store copy bytes of the source that lie elsewhere: neighbours, as many, and of the same object."""
    assert request.range is not None
    first, end = request.range
    request.headers["x-amz-copy-source-range"] = f"bytes={first - 8}-{end - 9}"


@pytest.mark.slow
def test_a_part_that_has_not_the_recorded_sum_is_fetched_and_sent(seaweedfs: Bucket, tmp_path: Path) -> None:
    c = verified_source(tmp_path, seaweedfs, rows(_RANKS), rows(1), large(), "safetensors")
    report = tmp_path / "report.json"
    forget()
    with before(seaweedfs.server) as proxy:
        proxy.spoil(shifted, when=Operation.COPY_PART, count=1)
        finished = c.run("transform", "--report", str(report))
    assert finished.code == 0, finished
    assert json.loads(report.read_text())["targets"][0]["store_copied_bytes"] == _COPIED_BYTES - _SLICE_BYTES
    as_local(c, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_a_disk_has_lost_is_not_published(
    seaweedfs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """What is compared with recorded sums, and with what the store has copied, is read from the disk, as what is sent.

    One byte becomes another one there as soon as the target was filled: one that is sent, or, where no sums are
    recorded, one of a part that the store copies.
    """
    c = verified_source(tmp_path, seaweedfs, rows(_RANKS), rows(1), large(), "safetensors")
    if not is_recorded:
        without_records(c)
    lost = [_SLICE_BYTES // 2 if is_recorded else 2 * _SLICE_BYTES]

    def spoiled(descriptor: int) -> None:
        sync_and_drop_cache(descriptor)
        while lost:
            place = lost.pop()
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 1]), place)

    monkeypatch.setattr(target_writer, "sync_and_drop_cache", spoiled)
    forget()
    finished = c.run()
    assert not lost
    assert finished.code not in (0, 1) and finished.err.count("error:") == 1, finished
    assert not [name for name in names(str(c.dst)) if name.startswith("rank_")]


def test_ranks_of_which_elements_are_computed_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that are joined in a tensor, as gradients and quantized weights are, and those of numbers for a map."""

    def group(known: bool, *ranks: int, size_bytes: int = 4) -> Any:
        route = SimpleNamespace(source_rank=ranks[0], joined_ranks=ranks if len(ranks) > 1 else ())
        kind = SimpleNamespace(size_bytes=size_bytes)
        return SimpleNamespace(kind=kind, names=["w"], routes=(route,), tensor=lambda _: known)

    def unknown(*groups: Any) -> set[int]:
        plan: Any = SimpleNamespace(tensors=SimpleNamespace(groups=groups), value_ranks=(9,))
        return sums.unknown_ranks(plan)

    sums = RecordedSums(ShardFiles("src", "safetensors", {}))
    monkeypatch.setattr(sums, "crc_of", lambda known: 0 if known else None)
    assert unknown(group(True, 1), group(False, 2, size_bytes=0)) == set()
    assert unknown(group(True, 1), group(False, 3)) == {3, 9}
    assert unknown(group(False, 4, 5, 6), group(True, 7, 8)) == {4, 5, 6, 9}


MIXED: dict[str, tuple[RawLayout, RawLayout]] = {
    "rows": (RawLayout((2, 2), (1, -1)), RawLayout((2,), (0, -1))),
    "halves": (RawLayout((2, 2), (1, -1)), RawLayout((2,), (-1, 0))),
    "columns": (RawLayout((2, 2), (-1, 0)), RawLayout((2,), (-1, 0))),
    "same columns": (RawLayout((2, 2), (-1, 1)), RawLayout((2,), (-1, 0))),
    "norm": (RawLayout((2, 2), (-1,)), RawLayout((2,), (-1,))),
    "step": (RawLayout((2, 2), ()), RawLayout((2,), ())),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("safetensors", ()),
        ("hdf5", ("--dtype", "*columns*=bf16")),
        ("ckpt", ("--exclude", "norm")),
        ("torch", ()),
        ("dcp", ("--exclude", "rows")),
    ],
)
def test_tensors_of_all_kinds(seaweedfs: Bucket, tmp_path: Path, to: str, options: tuple[str, ...]) -> None:
    """Some have recorded sums and are copied, or sent; others are turned, cut, cast, left out, or too short."""
    rng = np.random.default_rng(1)
    shapes: dict[str, Any] = dict.fromkeys(MIXED, (2048, 1536)) | {"norm": (7,), "step": ()}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    source = Side(4, 1, {name: layouts[0] for name, layouts in MIXED.items()})
    target = Side(2, 1, {name: layouts[1] for name, layouts in MIXED.items()})
    c = verified_source(tmp_path, seaweedfs, source, target, tensors, to)
    c = c.but(options=(*c.options, *options))
    moved(c, seaweedfs)
    as_local(c, tmp_path)
    done("verify", str(c.dst))
