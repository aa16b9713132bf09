"""The object stores of the tests' own: `support.object_servers`."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.object_servers import (
    Bucket,
    ObjectServer,
    delete,
    download,
    names,
    new_bucket,
    objects,
    put,
    running_moto,
    running_seaweedfs,
    upload,
    uploads,
)
from support.processes import run_command

pytest.importorskip("botocore")

FILES = {"a": b"1", "folder/b": b"22", "folder/deep/c": bytes(1000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "files"


def test_files_go_to_a_bucket_and_come_back(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    upload(folder, bucket / "p")
    upload(folder / "a", bucket / "pa")  # which begins alike, and lies beside
    put(bucket / "q/x", b"333")
    assert objects(bucket / "p") == FILES and names(bucket.url) == ["p/a", "p/folder/b", "p/folder/deep/c", "pa", "q/x"]
    back = download(bucket / "p/folder", tmp_path / "back")
    assert (back / "b").read_bytes() == b"22" and (back / "deep/c").read_bytes() == bytes(1000)
    assert objects(bucket / "pa") == {"": b"1"} and download(bucket / "pa", tmp_path / "one").read_bytes() == b"1"
    delete(bucket / "p")
    assert names(bucket.url) == ["pa", "q/x"]


def test_unfinished_uploads_are_seen(bucket: Bucket) -> None:
    client = bucket.server.client
    begun = {key: client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"] for key in ("b", "a")}
    assert uploads(bucket) == sorted(begun.items())
    client.abort_multipart_upload(Bucket=bucket.name, Key="a", UploadId=begun["a"])
    assert uploads(bucket) == [("b", begun["b"])] and names(bucket.url) == []


_PUTS = """
import sys
from botocore.session import Session
Session().create_client("s3").put_object(Bucket=sys.argv[1], Key="k", Body=b"of another process")
"""


def test_other_processes_find_the_server(bucket: Bucket) -> None:
    run_command([sys.executable, "-c", _PUTS, bucket.name], check=True)
    assert objects(bucket / "k") == {"": b"of another process"}


def test_the_environment_is_as_before_afterwards(moto_server: ObjectServer) -> None:
    before = dict(os.environ)
    with new_bucket(moto_server) as one:
        put(one / "k", b"x")
        assert os.environ["AWS_ENDPOINT_URL_S3"] == moto_server.endpoint
    assert dict(os.environ) == before
    with new_bucket(moto_server) as other:
        assert names(other.url) == [] and moto_server.client.list_buckets()["Buckets"][0]["Name"] == other.name


@pytest.mark.slow
@pytest.mark.parametrize("running", [running_moto, running_seaweedfs])
def test_servers_know_nothing_of_each_other_and_leave_nothing(
    running: Callable[[], AbstractContextManager[ObjectServer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running() as one, running() as other, new_bucket(one) as bucket, new_bucket(other):
        assert bucket.name not in [each["Name"] for each in other.client.list_buckets()["Buckets"]]
    for server in (one, other):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)
    assert list(tmp_path.iterdir()) == []
    assert not list(Path("/tmp").glob(f"seaweedfs-*-grpc-{one.address[1] + 10_000}.sock"))
