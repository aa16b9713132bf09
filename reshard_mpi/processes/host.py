"""Name the host, and read its facts on processes and locks (`host_name`, `pid_state`, `holders_of_lock`).

What a host is called. Processes of one host share its memory, and may fill a file together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Names this host, if its own name will not do.
HOST_VARIABLE = "RESHARD_MPI_HOST"
# Drawn anew whenever a kernel starts: two machines never have the same one, the containers of one machine have.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGITS = 8


class Identity(NamedTuple):
    """Identifies the host of a process."""

    name: str
    kernel: str  # the random number that its kernel has drawn at its start; empty if it has none

    @classmethod
    def local(cls, environment: Mapping[str, str]) -> Identity:
        """Return the identity of the host of this process."""
        try:
            kernel = _BOOT_ID.read_text().strip().replace("-", "")
        except OSError:
            kernel = ""
        return cls(host_name(environment), kernel)


def host_name(environment: Mapping[str, str]) -> str:
    """Return the name of this host: that in `RESHARD_MPI_HOST`, else its own."""
    return environment.get(HOST_VARIABLE) or os.uname().nodename


def distinct_names(identities: Sequence[Identity]) -> list[str]:
    """Return a name for the host of each identity: the same for one host, and different for different hosts.

    If hosts share a name, the number that their kernels have drawn is added: `node#1a2b3c4d`.
    """
    kernels: dict[str, set[str]] = {}
    for identity in identities:
        kernels.setdefault(identity.name, set()).add(identity.kernel)
    return [
        name if len(kernels[name]) == 1 else f"{name}#{kernel[:_DIGITS] or 'unknown'}" for name, kernel in identities
    ]


# Keeps libraries from starting threads: processes share the cores already.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


_MAX_READ_BYTES = 1 << 20
_STOPPED = ("T", "t")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
_ENDED = "ended"


def read_text(path: str) -> str:
    """Return the contents of a small file in /proc. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(fd, _MAX_READ_BYTES):
            data += part
    finally:
        os.close(fd)
    return data.decode(errors="replace")


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended, or the kernel does not tell."""
    try:
        return [int(child) for child in read_text(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []


def pid_state(pid: int) -> str:
    """Return the state of a process in a word or a few."""
    return _STATES.get(_state(pid), _ENDED)


def is_stopped(pid: int) -> bool:
    """Tell whether a process has been stopped (SIGSTOP, Ctrl-Z, a debugger), and does nothing until it is continued."""
    return _state(pid) in _STOPPED


def _state(pid: int) -> str:
    try:
        # The name before it may hold anything, brackets included.
        return read_text(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the number of the PID namespace of this process; 0 if the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - pathlib is slow
    except OSError:
        return 0


def holders_of_lock(fd: int) -> list[int]:
    """Return the processes that hold a lock (flock) on an open file, as far as this one can see them."""
    status = os.fstat(fd)
    own_file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = [line.split() for line in read_text("/proc/locks").splitlines()]
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 708 00:13:16 0 EOF; "1: -> FLOCK ..." is one that waits
    pids_by_file: dict[str, list[int]] = {words[5]: [] for words in lines if words[1] == "FLOCK"}
    for words in lines:
        if words[1] == "FLOCK" and int(words[4]) > 0:
            pids_by_file[words[5]].append(int(words[4]))
    if own_file in pids_by_file:
        return pids_by_file[own_file]
    # For some file systems the kernel names another device there than in the status of their files.
    inode = f":{status.st_ino}"
    return [pid for file, pids in pids_by_file.items() if file.endswith(inode) for pid in pids]
