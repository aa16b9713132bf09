"""A proxy before an object store of the tests that counts requests, and spoils those that a test names (`before`).

    with before(moto.server) as proxy:  # the environment now names the proxy
        proxy.spoil(SLOW_DOWN, when=Operation.GET, skip=2, count=None)  # the third and all later ones
        ...
        assert proxy.counts[Operation.LIST] == 1

It keeps the header Host, so that signatures hold, and signs again where a store is to overlook a header.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.object_servers import ObjectServer, in_environment, sign
from support.processes import HANG_SECONDS, clean_environment

_SERVER_SECONDS = 120.0
_PIECE_BYTES = 1 << 16
_POLL_SECONDS = 0.01
# Said from hop to hop.
_NOT_PASSED = {"connection", "keep-alive", "transfer-encoding", "expect", "server"}


class Operation(StrEnum):
    """The operations of S3 that requests are counted by."""

    LIST = "LIST"  # of objects
    LIST_UPLOADS = "LIST_UPLOADS"
    LIST_PARTS = "LIST_PARTS"
    HEAD = "HEAD"
    GET = "GET"  # of an object or a range of it
    PUT = "PUT"
    COPY = "COPY"  # of a whole object
    CREATE_UPLOAD = "CREATE_UPLOAD"
    PUT_PART = "PUT_PART"
    COPY_PART = "COPY_PART"
    COMPLETE = "COMPLETE"
    ABORT = "ABORT"
    DELETE = "DELETE"
    OTHER = "OTHER"  # of buckets


@dataclass(slots=True)
class Request:
    """A request, and what has become of it so far."""

    number: int  # from 0 on, as they came
    operation: Operation
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    sent_bytes: int  # of its body
    status: int = 0  # of the answer to the client; 0: none
    received_bytes: int = 0  # of the answer's body, passed to the client; of what a reset follows, not all may come
    spoiled: bool = False

    @property
    def range(self) -> tuple[int, int] | None:
        """From which byte to which, exclusive, a GET, or the source of a copied part, is asked for."""
        text = self.headers.get("range") or self.headers.get("x-amz-copy-source-range")
        if text is None:
            return None
        first, _, last = text.removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that the proxy gives in the server's place, with an error of S3 in it."""

    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        text = f"<Error><Code>{self.code}</Code><Message>the proxy of the tests says so</Message></Error>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()


@dataclass(frozen=True, slots=True)
class Overlook:
    """Have the server not see some headers of a request, as a store that does not know them."""

    headers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reword:
    """Have another text stand in an answer's body, where a pattern is found."""

    pattern: bytes
    text: bytes


class Break(Enum):
    """How a connection breaks. An answer without a body breaks before its first byte."""

    RESET = "reset before the server has the request"
    LOST_ANSWER = "reset when the server has done what was asked"
    RESET_IN_BODY = "reset in the middle of the body"
    SHORT_BODY = "closed in the middle of the body, as at its end"


# A function is called before the request is passed: to replace an object, or to stop a process.
Fault = Answer | Overlook | Reword | Break | Callable[[Request], object]

SLOW_DOWN = Answer(503, "SlowDown")
INTERNAL_ERROR = Answer(500, "InternalError")
ERROR_IN_200 = Answer(200, "InternalError")  # which Complete and copies may answer
ACCESS_DENIED = Answer(403, "AccessDenied")
WRONG_CLOCK = Answer(403, "RequestTimeTooSkewed")
OTHER_REGION = Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-central-1"),))
NO_SUCH_BUCKET = Answer(404, "NoSuchBucket")
NO_SUCH_UPLOAD = Answer(404, "NoSuchUpload")
CONFLICT = Answer(409, "ConditionalRequestConflict")
NOT_IMPLEMENTED = Answer(501, "NotImplemented")

NO_RANGES = Overlook(("range",))
NO_CONDITIONS = Overlook(("if-match", "if-none-match", "x-amz-copy-source-if-match"))
NO_COPIED_RANGES = Overlook(("x-amz-copy-source-range",))  # the whole object becomes the part
NO_COPIES = Overlook(("x-amz-copy-source", "x-amz-copy-source-range", "x-amz-copy-source-if-match"))  # an empty one

# What passes when it is tried again, and what does not, by name.
PASSING: dict[str, Fault] = {
    "slow down": SLOW_DOWN,
    "internal error": INTERNAL_ERROR,
    **{each.name.lower().replace("_", " "): each for each in Break},
}
LASTING: dict[str, Fault] = {
    "access denied": ACCESS_DENIED,
    "wrong clock": WRONG_CLOCK,
    "other region": OTHER_REGION,
    "no such bucket": NO_SUCH_BUCKET,
}

When = Operation | Collection[Operation] | Callable[[Request], bool] | None


@dataclass(slots=True)
class _Rule:
    fault: Fault
    when: When
    skip: int
    count: int | None
    met: int = 0  # requests that it is for

    def applies(self, request: Request) -> bool:
        """Tell whether a request is to be spoiled, and count it if the rule is for it."""
        match self.when:
            case None:
                is_meant = True
            case Operation():
                is_meant = request.operation is self.when
            case Collection():
                is_meant = request.operation in self.when
            case _:
                is_meant = self.when(request)
        self.met += is_meant
        return is_meant and self.met > self.skip and (self.count is None or self.met <= self.skip + self.count)


@dataclass(eq=False)
class FaultProxy:
    """The running proxy. It serves each connection in a thread, and passes each request by a connection of its own.

    Attributes:
        requests: all so far, in the order in which they came; what is told of one is true once its client has it.
    """

    server: ObjectServer
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    _rules: list[_Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _problems: list[str] = field(default_factory=list)

    def spoil(self, fault: Fault, *, when: When = None, skip: int = 0, count: int | None = 1) -> None:
        """Spoil requests from now on: of those that `when` is for, `count` after the first `skip`; None: all.

        when: an operation, several, or a function of the request; None: every request. Of several rules for a request
        the one that was given first counts.
        """
        with self._lock:
            self._rules.append(_Rule(fault, when, skip, count))

    def heal(self) -> None:
        """Spoil nothing more."""
        with self._lock:
            self._rules.clear()

    def forget(self) -> None:
        """Count from nothing again."""
        with self._lock:
            self.requests.clear()

    @property
    def counts(self) -> Counter[Operation]:
        """How many requests of each operation there were."""
        return Counter(request.operation for request in self.requests)

    @property
    def spoiled(self) -> list[Request]:
        return [request for request in self.requests if request.spoiled]

    @property
    def sent_bytes(self) -> int:
        """Bytes of bodies that clients have sent."""
        return sum(request.sent_bytes for request in self.requests)

    @property
    def received_bytes(self) -> int:
        """Bytes of bodies that clients were sent."""
        return sum(request.received_bytes for request in self.requests)

    def _admit(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Request, Fault | None]:
        """Record a request; return how it is to be spoiled."""
        place, _, text = path.partition("?")
        query = dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(place).lstrip("/").partition("/")
        with self._lock:
            operation = _operation(method, key, query, headers)
            request = Request(len(self.requests), operation, bucket, key, query, headers, len(body))
            self.requests.append(request)
            # Each rule counts, also if it comes too late for this request.
            faults = [rule.fault for rule in list(self._rules) if rule.applies(request)]
        request.spoiled = bool(faults)
        return request, faults[0] if faults else None


def _operation(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> Operation:
    copies, is_part = "x-amz-copy-source" in headers, "partNumber" in query
    match method, bool(key):
        case "GET", False:
            if "uploads" in query:
                return Operation.LIST_UPLOADS
            return Operation.LIST if {"list-type", "prefix"} & query.keys() else Operation.OTHER
        case "GET", True:
            return Operation.LIST_PARTS if "uploadId" in query else Operation.GET
        case "HEAD", True:
            return Operation.HEAD
        case "PUT", True if is_part:
            return Operation.COPY_PART if copies else Operation.PUT_PART
        case "PUT", True:
            return Operation.COPY if copies else Operation.PUT
        case "POST", True if "uploads" in query:
            return Operation.CREATE_UPLOAD
        case "POST", True if "uploadId" in query:
            return Operation.COMPLETE
        case "DELETE", True:
            return Operation.ABORT if "uploadId" in query else Operation.DELETE
        case "POST", False if "delete" in query:
            return Operation.DELETE
    return Operation.OTHER


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle_any(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            raise NotImplementedError("the proxy takes no bodies of unknown length")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request, fault = self.server.proxy._admit(self.command, self.path, headers, body)
        if isinstance(fault, Answer):
            self._answer(request, fault)
        elif fault is Break.RESET:
            self._reset()
        else:
            if callable(fault):
                fault(request)
            self._pass(request, fault, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - the names that the library calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""

    def _answer(self, request: Request, answer: Answer) -> None:
        body = b"" if self.command == "HEAD" else answer.body
        request.status, request.received_bytes = answer.status, len(body)
        self.send_response(answer.status)
        for name, value in (*answer.headers, ("Content-Type", "application/xml"), ("Content-Length", len(body))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def _pass(self, request: Request, fault: Fault | None, body: bytes) -> None:
        """Ask the server, and give its answer to the client."""
        server = self.server.proxy.server
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED}
        if isinstance(fault, Overlook) and any(headers.pop(name, None) for name in fault.headers):
            headers = sign(server, self.command, f"http://{headers['host']}{self.path}", headers, body)
        with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=_SERVER_SECONDS)) as connection:
            # Not by `request`, which would add headers.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            with connection.getresponse() as answer:
                self._give(request, fault, answer)

    def _give(self, request: Request, fault: Fault | None, answer: http.client.HTTPResponse) -> None:
        has_length = (answer.length is not None or self.command == "HEAD") and not isinstance(fault, Reword)
        content = b"" if has_length else answer.read()
        if isinstance(fault, Reword):
            content = re.sub(fault.pattern, fault.text, content)
        length_bytes = (answer.length or 0) if has_length else len(content)
        breaks_in_body = fault in (Break.RESET_IN_BODY, Break.SHORT_BODY)
        if fault is Break.LOST_ANSWER or (breaks_in_body and length_bytes < 2):
            self._reset()
            return
        request.status = answer.status
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _NOT_PASSED and (has_length or name.lower() != "content-length"):
                self.send_header(name, value)
        if not has_length and answer.status not in (204, 304):
            self.send_header("Content-Length", str(length_bytes))
        self.end_headers()
        left_bytes = length_bytes // 2 if breaks_in_body else length_bytes
        while left_bytes:
            piece = content or answer.read(min(_PIECE_BYTES, left_bytes))
            if not piece:
                raise ConnectionError("the server's own answer was short")
            piece = piece[:left_bytes]
            left_bytes -= len(piece)
            request.received_bytes += len(piece)  # before the client has it
            self.wfile.write(piece)
        if fault is Break.RESET_IN_BODY:
            self._reset()
        elif fault is Break.SHORT_BODY:
            self.close_connection = True

    def _reset(self) -> None:
        """Have the connection reset, not ended, when it is closed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # all have ended when the proxy has
    request_queue_size = 64

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.open: set[socket.socket] = set()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, without ending it before, which a reset must not."""
        with self.lock:
            self.open.discard(request)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that went away is no problem
            self.proxy._problems.append(traceback.format_exc())

    def end(self) -> None:
        self.shutdown()
        with self.lock:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


@contextlib.contextmanager
def before(server: ObjectServer) -> Iterator[FaultProxy]:
    """Start a proxy before a server for a `with` block, in which the environment names the proxy.

    What the functions of `object_servers` do goes past it. Raises AssertionError at the end if it has met a problem.
    """
    proxy = FaultProxy(server)
    listening = _Server(proxy)
    proxy.endpoint = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with in_environment(server, proxy.endpoint):
            yield proxy
    finally:
        listening.end()
        thread.join()
    assert not proxy._problems, "\n".join(proxy._problems)


def kill_at(proxy: FaultProxy, operation: Operation, command: Sequence[str], *, skip: int = 0) -> None:
    """Run a command, and kill it before the server has a request of it: the first of an operation after `skip` others.

    The server has answered those by then. Nothing is spoiled any more when the command has ended.
    """
    running: list[subprocess.Popen[bytes]] = []

    def kill(request: Request) -> None:
        before = [other for other in proxy.requests[: request.number] if other.operation is operation]
        deadline = time.monotonic() + HANG_SECONDS
        while not all(other.status for other in before):
            assert time.monotonic() < deadline, "an earlier request was not answered"
            time.sleep(_POLL_SECONDS)
        running[0].kill()
        running[0].wait()
        raise ConnectionResetError

    proxy.spoil(kill, when=operation, skip=skip)
    running.append(subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL))
    code = running[0].wait()
    proxy.heal()
    assert code == -signal.SIGKILL, f"there was no such request; exit code {code}"
