"""What can go wrong with a store that is read: what passes is tried again, all else ends in one message."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fault_proxy
from support.command_line import run_here
from support.conversions import Conversion, make, shards
from support.examples import few, few_cases
from support.fault_proxy import FaultProxy, Operation, Request
from support.full_checkpoints import floats, held, source_of
from support.object_servers import Bucket, delete, forget, put, upload
from support.processes import Finished

import reshard_mpi
from reshard_mpi.errors import StoreError
from reshard_mpi.filesystem import object_store

LIST, GET = Operation.LIST, Operation.GET


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits before a request is tried again."""
    endpoint = pytest.importorskip("botocore.endpoint")
    for module in (endpoint, object_store):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def c(moto: Bucket, tmp_path: Path) -> Conversion:
    """The small conversion, whose files lie in a bucket as well, and what it makes."""
    made = make(tmp_path / "c")
    upload(made.folder, moto / "c")
    made.done()
    return made


def transform(bucket: Bucket, out: Path, *options: Any) -> Finished:
    forget()  # as a process of its own has nothing
    words = ["--src-strategy", bucket / "c/src_strategy", "--dst-strategy", bucket / "c/dst_strategy", "--jobs", "1"]
    return run_here("transform", bucket / "c/src", out, *words, *options)


def refused(finished: Finished, code: int, *facts: str) -> None:
    """Check that a command has ended with one message that has these facts, and has left no thread."""
    assert finished.code == code and "Traceback" not in finished.err, finished
    assert finished.err.count("error: ") == 1, finished
    for fact in (*facts, "what to do: "):
        assert fact in finished.err, finished
    assert threading.active_count() == 1 or all(
        thread.name.startswith(("Thread-", "MainThread")) for thread in threading.enumerate()
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", fault_proxy.PASSING)
def test_what_passes_is_tried_again(moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path, fault: str) -> None:
    """Whichever request it happens to."""
    assert transform(moto, tmp_path / "first").code == 0
    requests = len(proxy.requests)
    assert requests > 8
    for number in range(requests):
        proxy.heal()
        proxy.spoil(fault_proxy.PASSING[fault], skip=number)
        finished = transform(moto, tmp_path / str(number))
        assert finished.code == 0 and shards(tmp_path / str(number)) == shards(c.dst), (number, finished)
    assert len(proxy.spoiled) == requests


@pytest.mark.parametrize("fault", few(1, fault_proxy.PASSING))
@pytest.mark.parametrize("skip", few(1, [9, 0, 4]))
def test_what_does_not_pass(
    moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path, fault: str, skip: int
) -> None:
    proxy.spoil(fault_proxy.PASSING[fault], skip=skip, count=None)
    finished = transform(moto, tmp_path / "out")
    refused(finished, 4, "the object store does not answer", f"s3://{moto.name}")
    assert not list((tmp_path / "out").glob("rank_*/*.ckpt"))


@few_cases(
    2,
    ("fault", "fact"),
    [
        ("access denied", "have these credentials allowed s3:"),
        ("wrong clock", "set the clock"),
        ("other region", "AWS_DEFAULT_REGION"),
        ("no such bucket", "check the name of the bucket"),
    ],
)
@pytest.mark.parametrize("when", few(1, [GET, LIST]))
def test_what_a_store_refuses(
    moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path, fault: str, fact: str, when: Operation
) -> None:
    proxy.spoil(fault_proxy.LASTING[fault], when=when, count=None)
    refused(transform(moto, tmp_path / "out"), 3, "the object store refused", fact)
    assert not (tmp_path / "out").exists()


def test_a_payload_that_is_refused_fails_its_target(moto: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    """By then the target is begun; the threads that read ahead have ended."""
    upload(source_of(tmp_path, {f"w{number}": floats(1 << 19) for number in range(4)}), moto / "src")

    def is_payload(request: Request) -> bool:
        return request.operation is GET and request.range is not None and request.range[1] - request.range[0] > 1 << 20

    proxy.spoil(fault_proxy.ACCESS_DENIED, when=is_payload, count=None)
    finished = run_here("transform", moto / "src", tmp_path / "out", "--jobs", "1")
    refused(finished, 4, "AccessDenied", "the object store refused")
    assert not list((tmp_path / "out").glob("rank_*/*"))
    proxy.heal()
    assert run_here("transform", moto / "src", tmp_path / "out", "--jobs", "1", "--resume").code == 0


def test_a_store_without_ranges(moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path) -> None:
    proxy.spoil(fault_proxy.NO_RANGES, when=GET, count=None)
    refused(transform(moto, tmp_path / "out"), 3, "gives other bytes than it was asked for", "without a range")


@pytest.mark.parametrize("number", few(1, [4, 0, 1, 2, 3, 5, 6, 7]))
def test_an_object_that_is_replaced_under_way(
    moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path, number: int
) -> None:
    """Once it has been listed no other is read, even of the same length, be it structure or payload."""

    def replace(request: Request) -> None:
        path = c.folder / request.key.removeprefix("c/")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        put(moto / request.key, bytes(content))

    proxy.spoil(replace, when=GET, skip=number)
    finished = transform(moto, tmp_path / "out")
    if not proxy.spoiled:
        pytest.skip("there are fewer requests")
    replaced = proxy.spoiled[0]
    if finished.code == 0:
        assert all(request.key != replaced.key for request in proxy.requests[replaced.number + 1 :])
    else:
        refused(finished, finished.code, "was replaced", f"{replaced.key}")
    assert shards(tmp_path / "out").items() <= {**shards(c.dst), "rank_0": None, "rank_1": None}.items()


@pytest.mark.parametrize("number", few(1, [4, 0, 1, 2, 3, 5, 6, 7]))
def test_an_object_that_is_removed_under_way(
    moto: Bucket, proxy: FaultProxy, c: Conversion, tmp_path: Path, number: int
) -> None:
    proxy.spoil(lambda request: delete(moto / request.key), when=GET, skip=number)
    finished = transform(moto, tmp_path / "out")
    if not proxy.spoiled:
        pytest.skip("there are fewer requests")
    refused(finished, finished.code, proxy.spoiled[0].key)
    assert finished.code in (3, 4)
    assert shards(tmp_path / "out").items() <= {**shards(c.dst), "rank_0": None, "rank_1": None}.items()


def test_an_object_that_is_gone_is_asked_for_once(moto: Bucket, proxy: FaultProxy) -> None:
    put(moto / "gone", b"content")
    place = object_store.ObjectPlace.of(moto / "gone")
    state = object_store.state_of(place)
    delete(moto / "gone")
    with pytest.raises(FileNotFoundError):
        object_store.read_range(place, state, 0, memoryview(bytearray(4)))
    assert proxy.counts[GET] == 1


@pytest.mark.parametrize("names", [("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SECRET_ACCESS_KEY",)])
def test_no_credentials(
    moto: Bucket, c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setattr(object_store._CONNECTION, "client", None)
    refused(transform(moto, tmp_path / "out"), 3, "no credentials", "AWS_ACCESS_KEY_ID")


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ENDPOINT_URL_S3", "no address"), ("AWS_PROFILE", "nobody"), ("AWS_DEFAULT_REGION", "a b")]
)
def test_settings_that_cannot_be(
    moto: Bucket, c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store._CONNECTION, "client", None)
    finished = transform(moto, tmp_path / "out")
    refused(finished, finished.code, "the object store", "AWS_DEFAULT_REGION")
    assert finished.code in (3, 4)


def test_a_server_that_is_not_there(moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr(object_store._CONNECTION, "client", None)
    refused(transform(moto, tmp_path / "out"), 4, "does not answer", "127.0.0.1:9")
    with pytest.raises(StoreError, match="does not answer"):
        reshard_mpi.open(moto / "c/src")


def test_without_botocore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.config", None)
    monkeypatch.setattr(object_store._CONNECTION, "client", None)
    for command in (("transform", "s3://b/a", tmp_path / "out"), ("inspect", "s3://b/a"), ("audit", "s3://b/a")):
        refused(run_here(*command), 2, "botocore", "pip install 'reshard-mpi[s3]'")


@pytest.mark.parametrize("word", ["s3://", "s3:///key", "s3:/"])
def test_an_address_without_a_bucket(tmp_path: Path, word: str) -> None:
    refused(run_here("inspect", word), 2, "s3://BUCKET/PREFIX")


def test_a_bucket_that_is_not_there(moto: Bucket, tmp_path: Path) -> None:
    refused(run_here("inspect", "s3://nobody-has-it/a"), 3, "NoSuchBucket")
    refused(run_here("inspect", "s3://No_Bucket/a"), 3)


@pytest.mark.parametrize(
    ("keys", "fact"),
    few(
        4,
        [
            (("other/file",), "src"),
            (("src", "src/rank_0/a.ckpt"), "an object and a folder have the same name"),
            (("src/rank_0//a.ckpt",), "a name that no file can have"),
            (("src/",), "src"),
            (("src/rank_0", "src/rank_0/a.ckpt"), "an object and a folder have the same name"),
            (("src/../a.ckpt",), "a name that no file can have"),
            (("src/rank_0/./a.ckpt",), "a name that no file can have"),
            (("src2/rank_0/a.ckpt",), "src"),
        ],
    ),
    ids=str,
)
def test_names_that_cannot_be_read(moto: Bucket, tmp_path: Path, keys: tuple[str, ...], fact: str) -> None:
    for key in keys:
        moto.server.client.put_object(Bucket=moto.name, Key=key, Body=b"x")
    forget()
    for command in (("transform", moto / "src", tmp_path / "out"), ("audit", moto / "src"), ("inspect", moto / "src")):
        refused(run_here(*command), 3, fact)


def test_a_mark_of_a_folder_is_no_file(moto: Bucket, tmp_path: Path) -> None:
    """As consoles make them: empty objects whose names end in a slash."""
    upload(source_of(tmp_path, {"w": floats(4)}), moto / "src")
    for key in ("src/", "src/rank_0/", "src/empty/"):
        moto.server.client.put_object(Bucket=moto.name, Key=key, Body=b"")
    assert run_here("transform", moto / "src", tmp_path / "out").code == 0
    assert set(held(tmp_path / "out")) == {"w"}
