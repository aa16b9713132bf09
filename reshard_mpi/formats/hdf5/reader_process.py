"""Read HDF5 files of others in another process, so that a crash is an error (`locate`), by messages (`send`).

One such process reads all files for this one, in turn, and is started again when it has died. It is a new interpreter,
never a fork: this process may have threads, MPI, or locks that a fork would keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard_mpi.errors import ShardError, of_parts
from reshard_mpi.filesystem.paths import absolute_path
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import native_shard
from reshard_mpi.formats.locations import ByteRange, ByteRanges, LibraryRead
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.processes.host import ONE_THREAD
from reshard_mpi.processes.imports import fresh_interpreter, import_environment
from reshard_mpi.sharding.box import Box

if TYPE_CHECKING:
    import numpy as np

_START = "from reshard_mpi.formats.hdf5.reader_process_main import main; main(0, 1)"
# Variables of the child besides this process's own: one thread; no filters or drivers from outside the library; no part
# in an MPI job, where HDF5 was built with MPI; memory of decoded chunks is given back at once.
_ENVIRONMENT = {
    **ONE_THREAD,
    "HDF5_PLUGIN_PRELOAD": "::",
    "MPI4PY_RC_INITIALIZE": "0",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
_NOT_PASSED_ON = "HDF5_"
# For a file system that does not answer; the process itself limits its processor time.
_PATIENCE_SECONDS = 600.0
_REMEDY = "check it with h5dump; save or copy it again"


def locate(path: str, size_bytes: int) -> Manifest:
    """Return the manifest of the HDF5 file at `path` as the library reads it. Raises ShardError if it cannot."""
    values = _ask(["locate", str(absolute_path(path))], path, None)
    try:
        return to_manifest(path, size_bytes, values)
    except ShardError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise _failed(path, f"an answer that cannot be: {error}"[:200]) from error


def stored_sums(path: str) -> dict[str, int]:
    """Return the sums that a native shard keeps, as the library reads them. Raises ShardError if it cannot."""
    sums = _ask(["sums", str(absolute_path(path))], path, None)
    if not isinstance(sums, dict) or not all(isinstance(number, int) for number in sums.values()):
        raise _failed(path, "an answer that cannot be")
    return sums


def read(
    path: str, version: Any, route: tuple[str, ...], dtype_name: str, swapped: bool, chunk: tuple[int, ...], box: Box
) -> np.ndarray[Any, Any]:
    """Return the elements of a box of a dataset, as `locations.LibraryRead` has it."""
    import numpy as np

    itemsize = BY_NAME[dtype_name].itemsize_bytes
    values = np.empty(box.shape, dtype=np.dtype(f"u{itemsize}") if itemsize <= 8 else np.dtype((np.void, itemsize)))
    if values.size:
        where = native_shard.where(path, route)
        request = ["read", str(absolute_path(path)), version, route, dtype_name, swapped, chunk, box.start, box.stop]
        _ask(request, where, memoryview(values.reshape(-1).view(np.uint8).data))
    return values


class _Process:
    """The process that has the library, and the pipes to it."""

    def __init__(self) -> None:
        theirs_in, self.requests = os.pipe()
        self.replies, theirs_out = os.pipe()
        environment = {name: text for name, text in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                fresh_interpreter(_START),
                {**environment, **_ENVIRONMENT, **import_environment()},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs_in, 0),
                    (os.POSIX_SPAWN_DUP2, theirs_out, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),  # what a library says that dies
                ],
                setpgroup=0,  # an interrupt from the terminal is for this process, at whose end that one ends
                setsigmask=[],
                setsigdef=[signal.SIGPROF],
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.owner = os.getpid()

    @property
    def is_there(self) -> bool:
        """Whether the process still waits for requests; without any for long it ends by itself."""
        return self.owner == os.getpid() and not self._can_receive(0)

    def ask(self, request: list[Any], payload: memoryview | None) -> tuple[str, Any]:
        """Return the answer to `request`; elements are read into `payload`.

        Raises EOFError if the process has ended, TimeoutError if it does not answer, ValueError for a wrong answer.
        """
        try:
            send(self.requests, request)
        except BrokenPipeError:
            raise EOFError from None
        if not self._can_receive(_PATIENCE_SECONDS):
            raise TimeoutError
        kind, value = receive(self.replies)
        if kind == "elements":
            if payload is None or value != len(payload):
                raise ValueError(f"{value} bytes")
            receive_into(self.replies, payload)
        return kind, value

    def end(self) -> int | None:
        """End the process and return its exit code, negative for a signal; None where it is not known."""
        os.close(self.requests)
        os.close(self.replies)
        if self.owner != os.getpid():
            return None  # another process's, left here by a fork
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody waits for all children
            return None

    def _can_receive(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


class _Keeper:
    """Keeps the process that has the library, for all threads in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def ask(self, request: list[Any], where: str, payload: memoryview | None) -> tuple[str, Any]:
        """Return the answer to `request`. Raises ShardError that names `where` if there is none."""
        with self._lock:
            answered = False
            try:
                answer = self._answer(request, where, payload)
                answered = True
                return answer
            except ShardError:  # the process has ended
                raise
            except TimeoutError:
                raise _failed(where, f"no answer in {_PATIENCE_SECONDS:.0f} seconds") from None
            except ValueError as error:
                raise _failed(where, f"an answer that cannot be: {error}"[:200]) from error
            finally:
                if not answered:  # after an interrupt, too: the next request must not get the answer to this one
                    self._end()

    def _answer(self, request: list[Any], where: str, payload: memoryview | None) -> tuple[str, Any]:
        for attempt in range(2):
            if self._process is not None and not self._process.is_there:
                self._end()
            if self._process is None:
                self._process = _Process()
            try:
                return self._process.ask(request, payload)
            except EOFError:
                exit_code = self._end()
                if exit_code or attempt:
                    raise _failed(where, _cause(exit_code)) from None
                # It had just ended by itself, as it does when it is not needed, or cannot open another file.
        raise AssertionError("the second attempt has ended")

    def _end(self) -> int | None:
        process, self._process = self._process, None
        return process.end() if process is not None else None


_keeper = _Keeper()
# In a fork the process belongs to the parent, and a thread that held the lock is not there.
os.register_at_fork(after_in_child=_keeper.__init__)  # type: ignore[misc]


def _ask(request: list[Any], where: str, payload: memoryview | None) -> Any:
    kind, value = _keeper.ask(request, where, payload)
    if kind == "error":
        raise of_parts(ShardError, *value)
    if kind == "memory":
        raise ShardError(
            "an HDF5 file takes too much memory to read",
            expected="what a file of its kind takes",
            where=where,
            remedy=_REMEDY,
        )
    return value


def _cause(exit_code: int | None) -> str:
    if exit_code == -signal.SIGPROF:
        return "no end of it in the processor time that is allowed"
    if exit_code is not None and exit_code < 0:
        return f"the library died: {signal.Signals(-exit_code).name}"
    return f"the process that has the library ended with exit code {exit_code}"


def _failed(where: str, got: str) -> ShardError:
    return ShardError(
        "an HDF5 shard cannot be read: it brings the HDF5 library down, or keeps it busy without end",
        expected="a sound HDF5 file",
        got=got,
        where=where,
        remedy=_REMEDY,
    )


_LENGTH_BYTES = 8
# The largest number of tensors and strings of a shard, with the longest names, as JSON.
_MAX_VALUE_BYTES = 512 << 20


def send(fd: int, value: Any, payload: memoryview | None = None) -> None:
    """Send a JSON value, and then the bytes of `payload`. Raises BrokenPipeError if nobody reads them."""
    text = json.dumps(value).encode()
    for part in (memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text), payload):
        while part:
            part = part[os.write(fd, part) :]


def receive(fd: int) -> Any:
    """Wait for a JSON value and return it. Raises EOFError if the sender has ended, ValueError if it is too long."""
    head = bytearray(_LENGTH_BYTES)
    receive_into(fd, memoryview(head))
    length_bytes = int.from_bytes(head, "little")
    if length_bytes > _MAX_VALUE_BYTES:
        raise ValueError(f"a value of {length_bytes} bytes")
    text = bytearray(length_bytes)
    receive_into(fd, memoryview(text))
    return json.loads(text)


def receive_into(fd: int, payload: memoryview) -> None:
    """Wait for bytes until `payload` is full. Raises EOFError if the sender has ended."""
    while payload:
        count = os.readv(fd, [payload])
        if not count:
            raise EOFError
        payload = payload[count:]


def from_manifest(manifest: Manifest) -> list[Any]:
    """Return a manifest that was made with the library as values for JSON."""
    return [[_from_entry(entry) for entry in manifest.tensors.values()], dict(manifest.strings), manifest.identity]


def to_manifest(path: str, size_bytes: int, values: list[Any]) -> Manifest:
    """Return the manifest of `path` that `from_manifest` turned into `values`.

    Raises ValueError or TypeError if the values are of no manifest, or place something outside a file of `size_bytes`
    bytes.
    """
    tensors, strings, identity = values
    entries = (_to_entry(path, size_bytes, tensor) for tensor in tensors)
    own = ShardIdentity(*identity) if identity else None
    return Manifest(path, native_shard.NAME, TensorTable(path, entries), strings, own)


def _from_entry(entry: TensorEntry) -> list[Any]:
    source: list[Any]
    if isinstance(entry.source, ByteRanges):
        places = [[part.offset_bytes, part.length_bytes] for part in entry.source.ranges]
        source = [places, entry.source.swapped]
    else:
        assert isinstance(entry.source, LibraryRead)  # the library gives no views
        _, version, route, _, swapped = entry.source.read.args  # type: ignore[attr-defined]
        content = entry.source
        source = [version, route, swapped, content.chunk, content.decoding_bytes, content.kept_bytes]
    start = entry.box.start if entry.box is not None else None
    return [entry.name, entry.dtype.name, entry.shape, source, start, entry.global_shape]


def _to_entry(path: str, size_bytes: int, values: list[Any]) -> TensorEntry:
    name, dtype_name, shape, source, start, global_shape = values
    dtype = BY_NAME[dtype_name]
    box, whole = None if start is None else Box.at(start, shape), None if global_shape is None else tuple(global_shape)
    return TensorEntry(name, dtype, tuple(shape), _to_source(path, size_bytes, dtype_name, source), box, whole)


def _to_source(path: str, size_bytes: int, dtype_name: str, source: list[Any]) -> ByteRanges | LibraryRead:
    if len(source) == 2:
        places, swapped = source
        if any(offset < 0 or length < 0 or offset + length > size_bytes for offset, length in places):
            raise ValueError("a place outside the file")
        return ByteRanges(tuple(ByteRange(path, offset, length) for offset, length in places), swapped)
    version, route, swapped, chunk, decoding_bytes, kept_bytes = source
    decode = partial(read, path, tuple(version), tuple(route), dtype_name, swapped, tuple(chunk))
    return LibraryRead(path, decode, tuple(chunk), int(decoding_bytes), int(kept_bytes))
