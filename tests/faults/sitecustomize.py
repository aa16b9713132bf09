"""Stands between a process and its files, and does harm at a chosen call: see `faults.py`.

FAULT_FOLDERS: calls for files below these count. FAULT_COUNTER: a file that grows by a byte for each of them, in any
process of a run. FAULT_AT: before that many are done, FAULT_DO is. FAULT_ON, FAULT_PATH: or before every call of this
name for a file whose path has this in it. FAULT_CUT: targets are divided among processes at such small multiples; that
can be all that is asked for.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_BY_PATH = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
# At which argument the descriptors begin that paths are relative to; opening relative to one is watched itself.
_FOLDERS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1}
_BY_DESCRIPTOR = ("pwrite", "preadv", "copy_file_range", "fsync")
_open, _write, _seek, _close, _unlink = os.open, os.write, os.lseek, os.close, os.unlink

_folders = tuple(os.environ.get("FAULT_FOLDERS", "").split(os.pathsep))
_counter = os.environ.get("FAULT_COUNTER", "")
_at = int(os.environ.get("FAULT_AT", "0"))
_on, _path = os.environ.get("FAULT_ON", ""), os.environ.get("FAULT_PATH", "")
_do = compile(os.environ.get("FAULT_DO", "pass"), "FAULT_DO", "exec")


def kill_all() -> None:
    """Kill all processes of the run that have loaded this, then this one."""
    for name in os.listdir(f"{_counter}.pids"):
        if int(name) != os.getpid():
            os.kill(int(name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _appended(path: str) -> int:
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    _write(descriptor, b".")
    size = _seek(descriptor, 0, os.SEEK_CUR)
    _close(descriptor)
    return size


def _event(name: str, *paths: Any) -> None:
    watched = [path for path in paths if str(path).startswith(_folders)]
    if watched:
        at = _appended(_counter)
        if at == _at or (name == _on and any(_path in str(path) for path in watched)):
            exec(_do, {"os": os, "signal": signal, "kill_all": kill_all, "path": str(watched[0])})


def _path_of(descriptor: Any) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if isinstance(descriptor, int) else ""


def _joined(path: str, folder: int) -> str:
    return path if folder < 0 or os.path.isabs(path) else os.path.join(_path_of(folder), path)


def _open_below(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is not None:
        _event("open", _joined(os.fspath(path), dir_fd))
    return _open(path, flags, mode, dir_fd=dir_fd)


def _watched(name: str) -> Callable[..., Any]:
    call = getattr(os, name)

    def watched(*arguments: Any) -> Any:
        _event(name, *(_path_of(argument) for argument in arguments[: 1 + (name == "copy_file_range")]))
        return call(*arguments)

    return watched


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _BY_PATH:
        paths = [os.fspath(argument) for argument in arguments[:2] if isinstance(argument, str | os.PathLike)]
        folders = arguments[_FOLDERS[event] :][: len(paths)] if event in _FOLDERS else (-1,) * len(paths)
        _event(event, *(_joined(path, folder) for path, folder in zip(paths, folders)))
    elif event == "fcntl.flock":
        _event(event, _path_of(arguments[0]))


def _register() -> None:
    os.makedirs(f"{_counter}.pids", exist_ok=True)
    _close(_open(f"{_counter}.pids/{os.getpid()}", os.O_CREAT | os.O_WRONLY))


# The process that reads foreign HDF5 may not write at all, not even what is counted here; it ends with its parent.
if _counter and not any("hdf5.reader_process_main" in word for word in sys.orig_argv):
    _register()
    os.register_at_fork(after_in_child=_register)
    for _name in _BY_DESCRIPTOR:
        setattr(os, _name, _watched(_name))
    os.open = _open_below
    sys.addaudithook(_hook)
if "FAULT_CUT" in os.environ:
    from reshard_mpi.runs import scheduling

    scheduling.CUT_BYTES = int(os.environ["FAULT_CUT"])
if _on == "mapped":
    from reshard_mpi.engine import open_files

    _window = open_files.Files.window

    @contextmanager
    def _mapped(self: open_files.Files, part: Any, requested_bytes: int) -> Iterator[memoryview]:
        with _window(self, part, requested_bytes) as view:
            _event("mapped", part.path)
            yield view

    open_files.Files.window = _mapped
