"""The proxy of the tests before an object store: `support.fault_proxy`."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import fault_proxy
from support.examples import few
from support.fault_proxy import (
    ACCESS_DENIED,
    CONFLICT,
    ERROR_IN_200,
    INTERNAL_ERROR,
    NO_CONDITIONS,
    NO_COPIED_RANGES,
    NO_COPIES,
    NO_RANGES,
    NO_SUCH_BUCKET,
    NOT_IMPLEMENTED,
    OTHER_REGION,
    SLOW_DOWN,
    WRONG_CLOCK,
    Break,
    FaultProxy,
    Operation,
    Request,
)
from support.object_servers import Bucket, names, objects, put, sign, uploads

pytest.importorskip("botocore")

MIB = 1 << 20
CONTENT = bytes(range(256)) * 400
OTHER_TAG = '"0123456789abcdef0123456789abcdef"'


@contextmanager
def client_of(proxy: FaultProxy, attempts: int = 1) -> Iterator[Any]:
    """botocore as the environment has it."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=20)
    client = Session().create_client("s3", config=config)
    assert client.meta.endpoint_url == proxy.endpoint
    yield client
    client.close()


def code(call: Any, **arguments: Any) -> str:
    """Return the code of the error that a call raises."""
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return refused.value.response["Error"]["Code"]


def assert_every_operation_passes(bucket: Bucket, proxy: FaultProxy) -> None:
    at = {"Bucket": bucket.name, "Key": "a/b c+d"}
    with client_of(proxy) as client:
        client.put_object(**at, Body=CONTENT)
        assert client.head_object(**at)["ContentLength"] == len(CONTENT)
        assert client.get_object(**at)["Body"].read() == CONTENT
        assert client.get_object(**at, Range="bytes=7-106", IfNoneMatch=OTHER_TAG)["Body"].read() == CONTENT[7:107]
        assert client.list_objects_v2(Bucket=bucket.name, Prefix="a/")["KeyCount"] == 1
        assert code(client.put_object, **at, Body=b"", IfNoneMatch="*") == "PreconditionFailed"
        put(bucket / "source", bytes(6 * MIB))
        to = {"Bucket": bucket.name, "Key": "made"}
        upload = to | {"UploadId": client.create_multipart_upload(**to)["UploadId"]}
        source = {"CopySource": {"Bucket": bucket.name, "Key": "source"}, "CopySourceRange": f"bytes=3-{5 * MIB + 2}"}
        copied = client.upload_part_copy(**upload, PartNumber=1, **source)["CopyPartResult"]["ETag"]
        sent = client.upload_part(**upload, PartNumber=2, Body=CONTENT)["ETag"]
        assert len(client.list_parts(**upload)["Parts"]) == 2
        assert len(client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]) == 1
        parts = [{"PartNumber": 1, "ETag": copied}, {"PartNumber": 2, "ETag": sent}]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        client.copy_object(**to | {"Key": "copy"}, CopySource={"Bucket": bucket.name, "Key": "made"})
        begun = client.create_multipart_upload(**to)["UploadId"]
        client.abort_multipart_upload(**to, UploadId=begun)
        client.delete_object(**at)
    assert names(bucket.url) == ["copy", "made", "source"] and uploads(bucket) == []
    assert objects(bucket / "copy")[""] == bytes(5 * MIB) + CONTENT
    wanted = dict.fromkeys(Operation, 1) | {Operation.PUT: 2, Operation.GET: 2, Operation.CREATE_UPLOAD: 2}
    assert proxy.counts == {operation: count for operation, count in wanted.items() if operation != Operation.OTHER}
    ranges = {request.operation: request.range for request in proxy.requests}
    assert (ranges[Operation.GET], ranges[Operation.COPY_PART]) == ((7, 107), (3, 5 * MIB + 3))
    gets = [request for request in proxy.requests if request.operation is Operation.GET]
    assert [(request.key, request.status, request.received_bytes) for request in gets] == [
        ("a/b c+d", 200, len(CONTENT)),
        ("a/b c+d", 206, 100),
    ]
    assert 0 <= proxy.sent_bytes - 2 * len(CONTENT) < 2000, "bodies, and the list of parts"
    assert proxy.spoiled == []


@pytest.mark.slow
def test_every_operation_passes_and_is_counted(moto: Bucket, proxy: FaultProxy) -> None:
    assert_every_operation_passes(moto, proxy)


@pytest.mark.parametrize(
    "answer",
    few(
        2,
        [
            SLOW_DOWN,
            OTHER_REGION,
            INTERNAL_ERROR,
            ACCESS_DENIED,
            WRONG_CLOCK,
            NO_SUCH_BUCKET,
            CONFLICT,
            NOT_IMPLEMENTED,
        ],
    ),
    ids=lambda answer: answer.code,
)
def test_answers_in_the_place_of_the_servers(moto: Bucket, proxy: FaultProxy, answer: fault_proxy.Answer) -> None:
    proxy.spoil(answer, when=Operation.PUT)
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=20)
    connection.request("PUT", f"/{moto.name}/k", b"x" * 1000)
    with connection.getresponse() as got:
        assert got.status == answer.status and f"<Code>{answer.code}</Code>".encode() in got.read()
    assert names(moto.url) == [] and [request.status for request in proxy.spoiled] == [answer.status]
    connection.request("PUT", f"/{moto.name}/k", b"x")  # by the same connection
    with connection.getresponse() as got:
        assert got.status == 200
    connection.close()


def test_which_requests_are_spoiled(moto: Bucket, proxy: FaultProxy) -> None:
    put(moto / "k", CONTENT)
    at = {"Bucket": moto.name, "Key": "k"}
    proxy.spoil(SLOW_DOWN, when=Operation.GET, skip=1, count=2)
    proxy.spoil(ACCESS_DENIED, when=lambda request: request.range == (0, 1), count=None)
    proxy.spoil(CONFLICT, when=(Operation.PUT, Operation.DELETE))
    with client_of(proxy) as client:
        client.get_object(**at)["Body"].read()
        assert [code(client.get_object, **at), code(client.get_object, **at)] == ["SlowDown"] * 2
        assert [code(client.get_object, **at, Range="bytes=0-0") for _ in range(3)] == ["AccessDenied"] * 3
        client.get_object(**at, Range="bytes=0-1")["Body"].read()
        assert code(client.delete_object, **at) == "ConditionalRequestConflict"
        client.put_object(**at, Body=b"")
        proxy.heal()
        client.get_object(**at)["Body"].read()
        assert [request.number for request in proxy.spoiled] == [1, 2, 3, 4, 5, 7]
        proxy.forget()
        client.delete_object(**at)
    assert [request.operation for request in proxy.requests] == [Operation.DELETE]


@pytest.mark.slow
def test_botocore_tries_again_what_passes(moto: Bucket, proxy: FaultProxy) -> None:
    put(moto / "k", CONTENT)
    with client_of(proxy, attempts=3) as client:
        for fault in (SLOW_DOWN, Break.RESET, Break.LOST_ANSWER):
            proxy.spoil(fault)
            assert client.get_object(Bucket=moto.name, Key="k")["Body"].read() == CONTENT
    assert proxy.counts == {Operation.GET: 6} and proxy.received_bytes > 3 * len(CONTENT)


@pytest.mark.parametrize("how", [Break.RESET_IN_BODY, Break.SHORT_BODY])
def test_bodies_that_break(moto: Bucket, proxy: FaultProxy, how: Break) -> None:
    put(moto / "k", CONTENT)
    proxy.spoil(how)
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=20)
    signed = sign(moto.server, "GET", f"{proxy.endpoint}/{moto.name}/k", {}, b"")
    connection.request("GET", f"/{moto.name}/k", headers=signed)
    with connection.getresponse() as got:
        assert got.length == len(CONTENT) and got.status == 200
        with pytest.raises(ConnectionResetError if how is Break.RESET_IN_BODY else http.client.IncompleteRead):
            got.read()
    connection.close()
    assert proxy.requests[0].received_bytes == len(CONTENT) // 2


@pytest.mark.parametrize("how", list(Break))
def test_whether_the_server_has_what_was_sent_before_a_break(moto: Bucket, proxy: FaultProxy, how: Break) -> None:
    proxy.spoil(how)
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=20)
    with pytest.raises(ConnectionError):
        connection.request("PUT", f"/{moto.name}/k", b"x")
        connection.getresponse()
    connection.close()
    assert names(moto.url) == ([] if how is Break.RESET else ["k"])


def test_errors_in_an_answer_of_success(moto: Bucket, proxy: FaultProxy) -> None:
    at = {"Bucket": moto.name, "Key": "k"}
    with client_of(proxy) as client:
        upload = at | {"UploadId": client.create_multipart_upload(**at)["UploadId"]}
        tag = client.upload_part(**upload, PartNumber=1, Body=b"x")["ETag"]
        proxy.spoil(ERROR_IN_200, when=Operation.COMPLETE)
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        assert code(client.complete_multipart_upload, **upload, MultipartUpload=parts) == "InternalError"
        assert names(moto.url) == [] and len(uploads(moto)) == 1


def test_an_object_is_replaced_under_way(moto: Bucket, proxy: FaultProxy) -> None:
    put(moto / "k", CONTENT)
    met: list[Request] = []

    def replaced(request: Request) -> None:
        met.append(request)
        put(moto / "k", b"other")

    proxy.spoil(replaced, when=Operation.GET, skip=1)
    at = {"Bucket": moto.name, "Key": "k"}
    with client_of(proxy) as client:
        tag = client.get_object(**at)["ETag"]
        assert code(client.get_object, **at, IfMatch=tag) == "PreconditionFailed"
    assert met == proxy.spoiled == proxy.requests[1:]


def assert_headers_are_overlooked(bucket: Bucket, proxy: FaultProxy) -> None:
    content = bytes(5 * MIB) + CONTENT
    put(bucket / "k", content)
    at = {"Bucket": bucket.name, "Key": "k"}
    with client_of(proxy) as client:
        proxy.spoil(NO_RANGES)
        whole = client.get_object(**at, Range="bytes=5-9")
        assert whole["ResponseMetadata"]["HTTPStatusCode"] == 200 and whole["Body"].read() == content
        proxy.spoil(NO_CONDITIONS, count=2)
        assert client.get_object(**at, IfMatch=OTHER_TAG, Range="bytes=5-9")["Body"].read() == content[5:10]
        client.put_object(**at, Body=content, IfNoneMatch="*")
        to = {"Bucket": bucket.name, "Key": "made"}
        upload = to | {"UploadId": client.create_multipart_upload(**to)["UploadId"]}
        source = {"CopySource": {"Bucket": bucket.name, "Key": "k"}, "CopySourceRange": f"bytes=0-{5 * MIB - 1}"}
        proxy.spoil(NO_COPIED_RANGES)
        client.upload_part_copy(**upload, PartNumber=1, **source)
        proxy.spoil(NO_COPIES)
        client.upload_part_copy(**upload, PartNumber=2, **source)
        assert [part["Size"] for part in client.list_parts(**upload)["Parts"]] == [len(content), 0]
    assert [request.operation for request in proxy.spoiled] == [
        *(Operation.GET, Operation.GET, Operation.PUT),
        *(Operation.COPY_PART, Operation.COPY_PART),
    ]


def test_a_store_that_overlooks_headers(moto: Bucket, proxy: FaultProxy) -> None:
    assert_headers_are_overlooked(moto, proxy)


def test_signatures_hold_at_a_real_store(seaweedfs: Bucket) -> None:
    with fault_proxy.before(seaweedfs.server) as proxy:
        assert_every_operation_passes(seaweedfs, proxy)
    with fault_proxy.before(seaweedfs.server) as proxy:
        assert_headers_are_overlooked(seaweedfs, proxy)
