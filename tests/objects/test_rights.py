"""Buckets that do not allow all, or that keep what is replaced: a run ends well, or one message says what is missing.

Nothing half-done has the name of a target.
"""

from __future__ import annotations

import re

import pytest
from support.conversions import Conversion
from support.examples import few
from support.object_servers import IDENTITIES, Bucket, allowed, forget, names, objects, upload, uploads
from support.processes import Finished

from reshard_mpi.filesystem import object_uploads

_TARGETS = ["rank_0/checkpoint_0.ckpt", "rank_1/checkpoint_1.ckpt"]
_STATE = [f".reshard_mpi/{name}.json" for name in ("committed", "rank_0", "rank_1", "run", "strategy")]
_SOURCE = ["ListBucket", "GetObject"]
_TARGET = [
    "PutObject",
    "AbortMultipartUpload",
    "ListBucketMultipartUploads",
    "ListMultipartUploadParts",
    "DeleteObject",
]


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_uploads, "_WITH_CRC", {})


def sent(c: Conversion, bucket: Bucket, *options: str, into: Bucket | None = None) -> Finished:
    """Run a conversion from a bucket into another one, or by default into the same."""
    forget()
    object_uploads._WITH_CRC.clear()
    target = into or bucket
    return c.but(src=bucket / "src", dst=target / "out").run("transform", *options)


def assert_whole(c: Conversion, bucket: Bucket) -> None:
    if not c.dst.exists():
        c.done("transform")
    found = objects(bucket / "out")
    assert sorted(found) == sorted([*_STATE, *_TARGETS, "reshard.json"])
    assert all(found[name] == (c.dst / name).read_bytes() for name in _TARGETS)
    assert not uploads(bucket)


def assert_refused(finished: Finished, *words: str) -> None:
    assert finished.code in (3, 4) and finished.err.count("error:") == 1, finished
    assert all(re.search(rf"\b{word}\b", finished.err) for word in words), finished


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_the_rights_of_the_page_are_enough(moto: Bucket, c: Conversion, options: list[str]) -> None:
    upload(c.src, moto / "src")
    for further in ([], ["--resume"], ["--overwrite"]):
        with allowed(moto, [*_SOURCE, *_TARGET]):
            finished = sent(c, moto, *options, *further)
        assert finished.code == 0, finished
        assert_whole(c, moto)


# All that is needed for a small target of which nothing failed; without the others, what fails is told by name.
@pytest.mark.parametrize("missing", few(1, ["DeleteObject", "PutObject", "ListBucketMultipartUploads", *_SOURCE]))
def test_a_right_that_is_missing_is_named_before_anything_is_written(moto: Bucket, c: Conversion, missing: str) -> None:
    upload(c.src, moto / "src")
    rights = [right for right in (*_SOURCE, *_TARGET) if right != missing]
    with allowed(moto, rights):
        finished = sent(c, moto, "--verify")
    assert finished.code == 3
    assert_refused(finished, f"s3:{missing}", "what to do")
    assert not names(moto / "out")
    assert not uploads(moto)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["DeleteObject", "PutObject", "ListBucketMultipartUploads"])
def test_a_right_that_is_taken_away_leaves_what_is_there(moto: Bucket, c: Conversion, missing: str) -> None:
    upload(c.src, moto / "src")
    assert sent(c, moto).code == 0
    with allowed(moto, [right for right in (*_SOURCE, *_TARGET) if right != missing]):
        finished = sent(c, moto, "--resume")
        assert finished.code == 0, finished
        assert_refused(sent(c, moto, "--overwrite", "--to", "hdf5"), f"s3:{missing}")
    assert_whole(c, moto)


@pytest.mark.parametrize(
    ("identity", "named"),
    [("reader", "s3:"), ("getter", "s3:ListBucket"), ("unlisting", "s3:ListBucket"), ("writer", "s3:GetObject")],
)
def test_identities_of_a_real_store(seaweedfs: Bucket, c: Conversion, identity: str, named: str) -> None:
    upload(c.src, seaweedfs / "src")
    with allowed(seaweedfs, IDENTITIES[identity]):
        finished = sent(c, seaweedfs)
    assert finished.code == 3
    assert_refused(finished, "what to do")
    assert named in finished.err, finished
    assert not names(seaweedfs / "out")
    assert not uploads(seaweedfs)


def versions(bucket: Bucket) -> dict[str, list[str]]:
    """Return the ids of all versions of each object."""
    found: dict[str, list[str]] = {}
    pages = bucket.server.client.get_paginator("list_object_versions").paginate(Bucket=bucket.name)
    for version in (version for page in pages for version in page.get("Versions", ())):
        found.setdefault(version["Key"], []).append(version["VersionId"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_a_bucket_that_keeps_versions(bucket: Bucket, c: Conversion, options: list[str]) -> None:
    client, name = bucket.server.client, bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    upload(c.src, bucket / "src")
    for further in ([], ["--resume"], ["--overwrite", "--to", "hdf5"], ["--overwrite"], ["--overwrite"]):
        finished = sent(c, bucket, *options, *further)
        assert finished.code == 0, finished
    assert_whole(c, bucket)
    assert len(versions(bucket)[f"out/{_TARGETS[0]}"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["COMPLIANCE", "GOVERNANCE"])
def test_a_bucket_whose_objects_are_locked(bucket: Bucket, c: Conversion, mode: str) -> None:
    """What is replaced or removed stays as a version; what is current is right."""
    upload(c.src, bucket / "src")
    locked = Bucket(bucket.server, f"{bucket.name}-locked")
    client = bucket.server.client
    client.create_bucket(Bucket=locked.name, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": mode, "Days": 1}}
    configuration = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    client.put_object_lock_configuration(Bucket=locked.name, ObjectLockConfiguration=configuration)
    for further in ([], ["--resume"], ["--overwrite", "--verify"]):
        finished = sent(c, bucket, *further, into=locked)
        assert finished.code == 0, finished
        assert_whole(c, locked)
