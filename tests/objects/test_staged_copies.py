"""Targets that are put together on the disk, compared there, and then sent: what the store can copy, it copies.

What it says of a copied part is held against the file on the disk; a part of which it says nothing, or that is another
one, is sent from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Side
from support.command_line import COMMAND, done
from support.conversions import Conversion, write_conversion
from support.examples import few
from support.fault_proxy import (
    ACCESS_DENIED,
    NO_COPIED_RANGES,
    NO_COPIES,
    Fault,
    FaultProxy,
    Operation,
    Request,
    Reword,
    before,
    kill_at,
)
from support.object_servers import Bucket, allowed, forget, names, objects, upload, uploads
from support.oracle import RawLayout

from reshard_mpi.engine.source_ranges import TargetRange, plan_parts
from reshard_mpi.filesystem import object_uploads
from reshard_mpi.journal import staged_parts

MIB = 1 << 20
_RANKS = 3
_SLICE_BYTES = 6 * MIB
# Of the first slice is sent what the header before it lacks to be a part, and so the rest, which is no part by itself.
_COPIED_BYTES = (_RANKS - 1) * _SLICE_BYTES


def copied(folder: Path, bucket: Bucket, to: str, *options: str) -> Conversion:
    """Write a conversion from a store into one file, in which the store can copy all slices but the first."""

    def side(ranks: int) -> Side:
        return Side(ranks, 1, {"w": RawLayout((ranks,), (0, -1))})

    rows = _RANKS * _SLICE_BYTES >> 12
    tensors = {"w": np.random.default_rng(0).integers(0, 1 << 30, (rows, 1 << 10), np.int32)}
    c = write_conversion(folder, "safetensors", side(_RANKS), side(1), tensors, to=to)
    c = c.but(options=(*c.options, *options))
    c.done("transform")
    upload(c.src, bucket / "src")
    return c.but(src=bucket / "src")


def sent(c: Conversion, bucket: Bucket, *options: str) -> int:
    """Run a conversion whose target goes to a store; return how many bytes the store has copied, as the report says."""
    forget()
    report = c.folder / "report.json"
    finished = c.but(dst=bucket / "out").run("transform", "--report", str(report), *options)
    assert finished.code == 0, finished
    (target,) = json.loads(report.read_text())["targets"]
    copied_bytes: int = target["store_copied_bytes"]
    assert ("copied inside the store" in finished.out) == bool(copied_bytes), finished
    return copied_bytes


def assert_as_local(c: Conversion, bucket: Bucket) -> None:
    """Check that the target is the one of a local run, and that nothing else is left."""
    found = objects(bucket / "out")
    targets = {
        str(path.relative_to(c.dst)): path.read_bytes()
        for path in c.dst.rglob("*")
        if path.is_file() and ".reshard_mpi" not in path.parts and path.name != "reshard.json"
    }
    assert targets
    assert {name: found[name] for name in targets} == targets
    assert not uploads(bucket)


STAGED = [
    ("safetensors", "--verify"),
    ("torch", ""),
    ("hdf5", "--verify"),
    ("ckpt", "--verify"),
    ("ckpt", "--crc"),
    ("ckpt", "--crc --verify"),
    ("torch", "--verify"),
    ("dcp", "--verify"),
]


@pytest.mark.parametrize(("to", "options"), few(1, STAGED))
def test_what_a_store_can_copy_is_not_sent(bucket: Bucket, tmp_path: Path, to: str, options: str) -> None:
    c = copied(tmp_path, bucket, to, *options.split())
    with before(bucket.server) as proxy:
        assert sent(c, bucket) == _COPIED_BYTES
    assert proxy.counts[Operation.COPY_PART] == _RANKS - 1
    assert proxy.sent_bytes < _SLICE_BYTES + MIB
    assert_as_local(c, bucket)
    done("verify", bucket / "out")


def shifted(request: Request) -> None:
    """Have the store copy bytes of the source that lie elsewhere: neighbours, as many, and of the same object."""
    assert request.range is not None
    first, end = request.range
    request.headers["x-amz-copy-source-range"] = f"bytes={first - 8}-{end - 9}"


_TAG = rb"<ETag>[^<]*</ETag>"
_NO_SUM = Reword(_TAG, b'<ETag>"11112222-1"</ETag>')  # as of a part that is encrypted
_OTHER_TAG = Reword(_TAG, b'<ETag>"00000000000000000000000000000000"</ETag>')
_OTHER_CRC = Reword(b"</CopyPartResult>", b"<ChecksumCRC32>AAAAAA==</ChecksumCRC32></CopyPartResult>")
# What a store may do to a part that it is to copy.
LIES: dict[str, Fault] = {
    "other bytes": shifted,
    "no sum": _NO_SUM,
    "another CRC-32": _OTHER_CRC,
    "another MD5": _OTHER_TAG,
    "the whole source": NO_COPIED_RANGES,
    "an empty part": NO_COPIES,
    "no right": ACCESS_DENIED,
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("count", "to", "options"), [(1, "safetensors", "--verify"), (None, "torch", "")])
def test_a_part_that_is_not_the_one_on_the_disk_is_sent(
    moto: Bucket, proxy: FaultProxy, tmp_path: Path, lie: str, count: int | None, to: str, options: str
) -> None:
    c = copied(tmp_path, moto, to, *options.split())
    proxy.spoil(LIES[lie], when=Operation.COPY_PART, count=count)
    assert sent(c, moto) == (0 if count is None else _COPIED_BYTES - _SLICE_BYTES)
    assert_as_local(c, moto)


@pytest.mark.slow
def test_a_part_that_is_another_one_by_the_list_alone(moto: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    c = copied(tmp_path, moto, "safetensors", "--verify")
    wrong = Reword(b"</Part>", b"<ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part>")
    proxy.spoil(wrong, when=Operation.LIST_PARTS, count=None)
    assert sent(c, moto) == 0
    assert_as_local(c, moto)


@pytest.mark.slow
def test_a_store_that_knows_no_crc_is_held_against_its_md5(
    moto: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_uploads, "_knows_crc", lambda _: False)
    c = copied(tmp_path, moto, "torch")
    assert sent(c, moto) == _COPIED_BYTES
    proxy.spoil(shifted, when=Operation.COPY_PART)
    assert sent(c, moto, "--overwrite") == _COPIED_BYTES - _SLICE_BYTES
    assert_as_local(c, moto)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [False, True])
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_run_that_is_killed_between_copied_parts_is_resumed(
    moto: Bucket, proxy: FaultProxy, tmp_path: Path, lie: bool, to: str
) -> None:
    """Parts that are there are held against the file on the disk too, and a wrong one is sent."""
    c = copied(tmp_path, moto, to, "--verify")
    if lie:
        proxy.spoil(shifted, when=Operation.COPY_PART)
    kill_at(proxy, Operation.COPY_PART, [*COMMAND, *c.but(dst=moto / "out").arguments("transform")], skip=1)
    assert not [name for name in names(moto / "out") if name.startswith("rank_")]
    assert len(uploads(moto)) == 1
    proxy.forget()
    assert sent(c, moto, "--resume") == _COPIED_BYTES - lie * _SLICE_BYTES
    assert proxy.counts[Operation.COPY_PART] == _RANKS - 2
    assert_as_local(c, moto)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["ckpt", "dcp"])
def test_what_was_streamed_before_is_compared_too(moto: Bucket, proxy: FaultProxy, tmp_path: Path, to: str) -> None:
    """A run without --verify gets other bytes than the source has, and is killed; --verify goes on with its upload."""
    c = copied(tmp_path, moto, to).but(dst=moto / "out")
    first = c.tensors["w"].tobytes()[:16]
    other = Reword(re.escape(first), first[::-1].replace(b"\\", rb"\\"))
    proxy.spoil(other, when=lambda request: request.operation is Operation.GET and "rank_0/" in request.key, count=None)
    # The first upload that is completed is the one by which the store is tried.
    kill_at(proxy, Operation.COMPLETE, [*COMMAND, *c.arguments("transform")], skip=1)
    proxy.forget()
    assert sent(c, moto, "--resume", "--verify") == _COPIED_BYTES
    assert proxy.counts[Operation.PUT_PART] == 1 and proxy.counts[Operation.COPY_PART] == 0
    assert_as_local(c.but(dst=tmp_path / "dst"), moto)


def test_a_real_store_tells_the_sums_of_copied_parts_once_more(seaweedfs: Bucket, tmp_path: Path) -> None:
    """What was copied before the run was killed is not made again, since the list of parts has its sum too."""
    c = copied(tmp_path, seaweedfs, "safetensors", "--verify")
    with before(seaweedfs.server) as proxy:
        command = c.but(dst=seaweedfs / "out").arguments("transform")
        kill_at(proxy, Operation.COPY_PART, [*COMMAND, *command], skip=1)
        proxy.forget()
        assert sent(c, seaweedfs, "--resume") == _COPIED_BYTES
        assert proxy.counts[Operation.COPY_PART] == _RANKS - 2
    assert_as_local(c, seaweedfs)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["ListMultipartUploadParts", "AbortMultipartUpload"])
def test_rights_that_copied_parts_need(moto: Bucket, tmp_path: Path, missing: str) -> None:
    """Without the list of parts nobody knows what was copied; to give an upload up is needed where something failed."""
    c = copied(tmp_path, moto, "safetensors", "--verify")
    rights = ["ListBucket", "GetObject", "PutObject", "DeleteObject", "ListBucketMultipartUploads"]
    others = {"ListMultipartUploadParts", "AbortMultipartUpload"} - {missing}
    forget()
    with allowed(moto, [*rights, *others]):
        finished = c.but(dst=moto / "out").run("transform")
    if missing == "AbortMultipartUpload":
        assert finished.code == 0, finished
    else:
        assert finished.code == 4 and f"s3:{missing}" in finished.err and finished.err.count("error:") == 1, finished
        assert not [name for name in names(moto / "out") if name.startswith("rank_")]
        assert not uploads(moto)
        sent(c, moto, "--resume")
    assert_as_local(c, moto)


@pytest.mark.slow
def test_runs_that_are_too_short_to_be_copied_are_not_kept(
    moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million in a plan: one for each row of a tensor of which a rank holds columns."""
    kept: list[int] = []

    def counted(size_bytes: int, runs: Sequence[TargetRange], **named: Any) -> list[TargetRange]:
        kept.append(len(runs))
        return plan_parts(size_bytes, runs, **named)

    monkeypatch.setattr(staged_parts, "plan_parts", counted)
    source, target = (Side(ranks, 1, {"w": RawLayout((ranks,), (-1, 0))}) for ranks in (1, 2))
    tensors = {"w": np.arange(1 << 20, dtype=np.int32).reshape(16, 1 << 16)}
    c = write_conversion(tmp_path, "safetensors", source, target, tensors)
    upload(c.src, moto / "src")
    c.but(src=moto / "src", dst=moto / "out").done("transform", "--verify")
    assert kept == [2, 2]  # of 16 rows the first and the last, which might go on in another tensor
    c.done("transform")
    assert_as_local(c, moto)
