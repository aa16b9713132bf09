"""Answer the requests of `reader_process`: the process that loads the HDF5 library (`main`).

HDF5 is written in C, and files have made it crash before. Here only this process ends with it: it leaves no core file,
writes no file, has no descriptor for a second HDF5 file, and bounded memory and processor time for each request.
Filters and drivers from outside the library are switched off by the environment it is started with.
"""

from __future__ import annotations

import encodings.ascii  # noqa: F401 (h5py looks for it when it describes a table)
import gc
import math
import os
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# All is imported at the start, as later there is no descriptor to do it with.
import numpy as np

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import FileVersion
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import datasets, library_reader, reader_process
from reshard_mpi.sharding.box import Box

# The records of a shard with as many tensors as are read, their JSON, and the library's cache of structure.
_LOCATE_BYTES = 256 << 20
# Besides chunks: the library's buffers.
_READ_BYTES = 64 << 20
# A chunk as stored, as decoded, as a filter makes it from that, and in the cache.
_CHUNKS_IN_MEMORY = 4
# Of processor time, for each step forward; a thousand times what one takes.
_STEP_SECONDS = 0.9
# At least so fast are chunks decoded.
_DECODED_BYTES_PER_SECOND = 8 << 20
# Without a request for so long the process ends; starting another takes a moment.
_IDLE_SECONDS = 60.0
# The file that is read, once for the library and once beside it.
_DESCRIPTORS = range(3, 5)
_MAX_DESCRIPTORS = 1 << 20
# Between setting the alarm anew, which is a system call.
_STEPS = 32


def main(requests: int, replies: int) -> None:
    """Answer requests until the asking process is gone, or has none for long. Both are descriptors of pipes."""
    # Descriptors that the asking process has left open for its children, such as locks and connections.
    os.closerange(_DESCRIPTORS.start, _MAX_DESCRIPTORS)
    limits = _ProcessLimits()
    while select.select([requests], [], [], _IDLE_SECONDS)[0]:
        try:
            request = reader_process.receive(requests)
        except EOFError:
            return
        payload = None
        try:
            kind, *arguments = request
            reply, payload = _ANSWERS[kind](limits, *arguments)
        except ShardError as error:
            reply = ["error", error.parts]
        except MemoryError:
            reply = ["memory", None]
        limits.release()
        try:
            reader_process.send(replies, reply, payload)
        except BrokenPipeError:
            return
        if payload is None and _holds_a_file():
            return  # the next file would find no descriptor: a new process has them all


def _holds_a_file() -> bool:
    """Tell whether a file that could not be read is still open in the library."""
    datasets.forget()
    if not any(map(_is_open, _DESCRIPTORS)):
        return False
    gc.collect()
    return any(map(_is_open, _DESCRIPTORS))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _locate(limits: _ProcessLimits, path: str) -> tuple[list[Any], None]:
    datasets.forget()
    limits.allow(_LOCATE_BYTES, _STEP_SECONDS)
    return ["manifest", reader_process.from_manifest(library_reader.locate(path, limits.step))], None


def _sums(limits: _ProcessLimits, path: str) -> tuple[list[Any], None]:
    datasets.forget()
    limits.allow(_LOCATE_BYTES, _STEP_SECONDS)
    return ["sums", library_reader.stored_sums(path, limits.step)], None


def _read(
    limits: _ProcessLimits,
    path: str,
    version: list[int],
    route: list[str],
    dtype_name: str,
    swapped: bool,
    chunk: list[int],
    start: list[int],
    stop: list[int],
) -> tuple[list[Any], memoryview]:
    dtype, box = BY_NAME[dtype_name], Box(tuple(start), tuple(stop))
    chunk_bytes = dtype.itemsize_bytes * math.prod(chunk)
    # All chunks that the box meets are decoded.
    steps = zip(box.start, box.stop, (max(1, length) for length in chunk))
    covered = math.prod((-(-high // step) - low // step) * step for low, high, step in steps)
    limits.allow(
        _READ_BYTES + _CHUNKS_IN_MEMORY * chunk_bytes + 2 * dtype.itemsize_bytes * box.size,
        _STEP_SECONDS + covered * dtype.itemsize_bytes / _DECODED_BYTES_PER_SECOND,
    )
    values = datasets.read(path, FileVersion(*version), tuple(route), dtype, swapped, box)
    return ["elements", values.nbytes], memoryview(values.reshape(-1).view(np.uint8).data)


class _ProcessLimits:
    """The limits of the process, set anew for each request."""

    def __init__(self) -> None:
        self._base_bytes = _data_bytes()
        self._steps = 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS.stop, _DESCRIPTORS.stop))

    def allow(self, size_bytes: int, seconds: float) -> None:
        """Let memory grow by `size_bytes` beyond the idle process, and allow the given processor time.

        Then the process is killed (SIGPROF), unless `step` or `release` is called before.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self._base_bytes + size_bytes, hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def step(self) -> None:
        """Allow the time for the next step."""
        self._steps += 1
        if self._steps % _STEPS == 0:
            signal.setitimer(signal.ITIMER_PROF, _STEP_SECONDS)

    def release(self) -> None:
        """End the limits on the request that has been answered."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data_bytes() -> int:
    """Return how much memory counts for RLIMIT_DATA now."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(fields["VmData"].split()[0])


_ANSWERS: dict[str, Callable[..., tuple[list[Any], memoryview | None]]] = {
    "locate": _locate,
    "sums": _sums,
    "read": _read,
}
