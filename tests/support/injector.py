"""Fails a call of libc, of any process of a run: compiles `faults/calls.c`, says what is to happen, reads what did."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from reshard_mpi.processes.host import ONE_THREAD

_SOURCE = Path(__file__).parents[1] / "faults" / "calls.c"
_CAPACITY = 1 << 15
# As `struct control` and `struct entry` of the source say.
_CONTROL = struct.Struct("=QQiiiiQ512s512s1024si1028x")
_ENTRY = struct.Struct("=24sii224s")
_ENTRIES_AT = 4096
_FOLDERS_BYTES = 1024
_COUNT, _FAIL, _SHORTEN, _KILL, _STOP, _KILL_ALL = range(6)
# What can be done to a call besides failing it.
_ACTIONS = {"short": _SHORTEN, "kill": _KILL, "stop": _STOP, "kill all": _KILL_ALL}
# Calls that only read are not counted unless they are asked for.
READING = ("open", "read", "pread", "preadv", "mmap", "close_reader")
_WHO = ("", "maker", "others")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a run made for one of its files. path: its end, where it is long."""

    name: str
    path: str
    pid: int
    is_harmed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.path.rpartition('/dst/')[2]}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen at the call number `call`, from 1 on: an error's name, "short", "kill", "kill all" or "stop".

    short: half is written. kill all: every process of the run, the launcher too. is_lasting: to that call and all later
    ones; with ENOSPC and EDQUOT only to those that need room. names: only these calls count; none: all but those that
    read. path: only for files whose path has this in it. who: only those of the "maker", a process that has created
    such a file, or of the "others"; nothing: of all.
    """

    call: int
    do: str
    is_lasting: bool = False
    names: tuple[str, ...] = ()
    path: str = ""
    who: str = ""

    def at_call(self, number: int) -> Fault:
        """Return the same at another call."""
        return replace(self, call=number)

    def __str__(self) -> str:
        which = f" of {','.join(self.names)}" if self.names else ""
        where = f" for *{self.path}*" if self.path else ""
        where += f" of the {self.who}" if self.who else ""
        return f"{self.do} {'from' if self.is_lasting else 'at'} call {self.call}{which}{where}"


NO_FAULT = Fault(0, "EIO")


class Injector:
    """The control file of one run after the other."""

    def __init__(self, control: Path) -> None:
        self._control = control
        with control.open("wb") as stream:
            stream.truncate(_ENTRIES_AT + _CAPACITY * _ENTRY.size)

    def environment(self, fault: Fault, folders: Sequence[Path]) -> dict[str, str]:
        """Return what to add to a run's environment, so that `fault` happens to a call for files below `folders`.

        The next call makes this one void, so there is one run at a time.
        """
        action = _ACTIONS.get(fault.do, _FAIL) if fault.call else _COUNT
        error = getattr(errno, fault.do) if action == _FAIL else 0
        names = f",{','.join(fault.names)},".encode() if fault.names else b""
        watched = os.fsencode(":".join(map(str, folders)))
        assert len(watched) < _FOLDERS_BYTES, watched
        which = (_CAPACITY, names, fault.path.encode(), watched, _WHO.index(fault.who))
        values = (0, fault.call, action, error, fault.is_lasting, 0, *which)
        with self._control.open("r+b") as stream:
            stream.write(_CONTROL.pack(*values))
        return {"LD_PRELOAD": str(compiled()), "FAULT_CALLS": str(self._control), **ONE_THREAD}

    def calls(self) -> list[Call]:
        """Return the calls that were counted, in the order in which they were made."""
        with self._control.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            count = min(_CONTROL.unpack_from(view)[0], _CAPACITY)
            entries = [_ENTRY.unpack_from(view, _ENTRIES_AT + number * _ENTRY.size) for number in range(count)]
        return [Call(_text(name), _text(path), pid, bool(harmed)) for name, pid, harmed, path in entries]

    @property
    def harmed(self) -> int:
        """How many calls were harmed."""
        return int(_CONTROL.unpack(self._control.read_bytes()[: _CONTROL.size])[5])


def compiler() -> str | None:
    """Return a C compiler of this machine, or None."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


@functools.cache
def compiled() -> Path:
    """Return the library that is to be loaded before all others; compiled once for a process."""
    folder = _folder()
    library = folder / "calls.so"
    command = [compiler() or "cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, _SOURCE]
    subprocess.run(command, check=True, timeout=300)
    return library


@functools.cache
def _folder_kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="reshard_mpi_faults_")


def _folder() -> Path:
    return Path(_folder_kept().name)


def counts(calls: Collection[Call]) -> str:
    """Return how many calls there were of each name, for people."""
    names = sorted({call.name for call in calls})
    return ", ".join(f"{sum(call.name == name for call in calls)} {name}" for name in names)


def _text(value: bytes) -> str:
    return value.partition(b"\0")[0].decode(errors="replace")
