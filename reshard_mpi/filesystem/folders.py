"""Hold folders open, and lock files that several hosts share (`Folder`, `try_lock`).

Other users may be allowed to write to a target folder. Whatever they put in the place of our files, nothing outside
the folder is opened for writing, truncated, replaced or removed: no symbolic link is followed below the folder that
the user has named, and folders and locks of other users are refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import is_object_path, words_of_mode
from reshard_mpi.processes.host import holders_of_lock, pid_state
from reshard_mpi.text import Say

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Errors of opening a link, or something other than the folder or file that was expected.
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_TOKEN_BYTES = 6


class FileIdentity(NamedTuple):
    """Identifies a file on this host, whatever it is called."""

    device: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> Self:
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino)


class Folder:
    """An open folder. path: its name when it was opened."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that the user has named, through whatever links. Raises OSError."""
        return cls(path, os.open(path, _FOLDER))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close(self._fd)

    def inner(self, name: str) -> Folder:
        """Open a folder in this one.

        Raises FileNotFoundError if there is none, TargetError if it is a link, no folder, or of another user.
        """
        try:
            inner = Folder(self.path / name, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd))
        except OSError as error:
            raise self._refused(name, "a folder", error) from error
        try:
            inner.require_own(os.fstat(inner._fd), inner.path)
        except BaseException:
            close(inner._fd)
            raise
        return inner

    def made_inner(self, name: str) -> Folder:
        """Open a folder in this one, which is made, and synced, if it is not there. Raises as `inner` does."""
        try:
            os.mkdir(name, dir_fd=self._fd)
        except FileExistsError:
            return self.inner(name)
        self.sync()
        return self.inner(name)

    def create(self, name: str) -> int:
        """Make a new file, for reading and writing. Raises TargetError if anything of that name is there."""
        return create_file(name, folder=self._fd, called=self.path / name)

    def open_file(self, name: str, flags: int, purpose: str) -> int:
        """Open a regular file of this user without blocking, and return its descriptor.

        Args:
            purpose: how errors call it.

        Raises FileNotFoundError, or TargetError if it is a link, no regular file, or of another user.
        """
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o666, dir_fd=self._fd)
        except OSError as error:
            raise self._refused(name, purpose, error) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _in_the_way(self.path / name, words_of_mode(status.st_mode), purpose)
            self.require_own(status, self.path / name)
        except BaseException:
            close(fd)
            raise
        return fd

    def replace(self, name: str, final_name: str, fd: int) -> None:
        """Rename the file `name`, open as `fd`, to its final name.

        Raises TargetError if `name` is another file by now.
        """
        if not self.is_called(name, fd):
            raise replaced(self.path / name)
        os.rename(name, final_name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def is_called(self, name: str, fd: int) -> bool:
        """Tell whether `name` is the file that is open as `fd`."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return FileIdentity(status.st_dev, status.st_ino) == FileIdentity.of(fd)

    def put(self, name: str, content: bytes) -> bool:
        """Write a small file in place of whatever is there, if it appears whole by itself; tell whether that was done.

        On a file system it does not.
        """
        return False

    def remove(self, name: str) -> bool:
        """Remove a file; tell whether it was there."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def remove_empty(self, name: str) -> None:
        """Remove a folder in this one if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._fd)

    def blocks(self, name: str) -> int:
        """Return how many blocks of 512 bytes a file takes; 0 if it is gone."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        return os.listdir(self._fd)  # noqa: PTH208

    def sync(self) -> None:
        """Wait until the names in the folder are on the disk."""
        os.fsync(self._fd)

    def require_removable(self, name: str) -> None:
        """Raise TargetError if `name` is of another user, or may not be removed from this folder."""
        self.require_own(os.stat(name, dir_fd=self._fd, follow_symlinks=False), self.path / name)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._fd):
            raise TargetError(
                "a file cannot be removed from the target folder",
                expected="the right to write to its folder",
                got="none",
                where=str(self.path / name),
                remedy="choose another target, or make the folder writable",
            )

    def require_own(self, status: os.stat_result, path: Path) -> None:
        """Raise TargetError if `path`, this folder or something in it with this `status`, is of another user."""
        if status.st_uid == os.geteuid() or status.st_uid == self._uid_of_new_files():
            return
        raise TargetError(
            f"{words_of_mode(status.st_mode)} of another user is in the way",
            expected=f"nothing, or what user {os.geteuid()} has made",
            got=f"{words_of_mode(status.st_mode)} of user {status.st_uid}",
            where=str(path),
            remedy="choose another target, or have its owner remove it",
        )

    def _uid_of_new_files(self) -> int | None:
        """Return the owner of a file that this user makes here: file servers may know the user by another number."""
        name = f".{os.urandom(_TOKEN_BYTES).hex()}.owner"
        try:
            fd = create_file(name, 0o600, self._fd)
        except (OSError, TargetError):
            return None
        try:
            self.remove(name)
            return os.fstat(fd).st_uid
        except OSError:
            return None
        finally:
            close(fd)

    def _refused(self, name: str, purpose: str, error: OSError) -> Exception:
        if error.errno not in _IN_THE_WAY:
            return OSError(error.errno, error.strerror, str(self.path / name))
        mode = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode
        return _in_the_way(self.path / name, words_of_mode(mode), purpose)


def open_folder(path: Path) -> Folder:
    """Open a folder that the user has named, on a file system or in an object store. Raises OSError."""
    if not is_object_path(path):
        return Folder.open(path)
    from reshard_mpi.filesystem.object_folders import ObjectFolder

    return ObjectFolder(path)


def create_file(path: str, mode: int = 0o666, folder: int | None = None, called: Path | None = None) -> int:
    """Make the new file `path` and return its descriptor, for reading and writing.

    Args:
        mode: its permissions, before the user's mask.
        folder: the descriptor of the folder that `path` is relative to.
        called: the name in errors.

    Raises TargetError if anything has that name, even a link that leads nowhere.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    except FileExistsError as error:
        raise TargetError(
            "a target file exists already",
            expected="no file",
            where=str(called or path),
            remedy="remove it, or choose another target",
        ) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(called or path)) from error


def close(fd: int) -> None:
    """Close a file and ignore errors: nothing was written to it, or what was written has been synced."""
    with contextlib.suppress(OSError):
        os.close(fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield `fd`, and close it as `close` does when the block ends."""
    try:
        yield fd
    finally:
        close(fd)


def make_folders(folder: Path) -> None:
    """Make a folder and those it lies in, and sync their names."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        with Folder.open(folder.parent) as parent:
            parent.sync()


def replaced(path: Path) -> TargetError:
    """Return the error for a file that others have removed or replaced while it was written."""
    return TargetError(
        "the file that was being written is not there any more",
        expected="nobody to change what is being written",
        got="another file of its name, or none",
        where=str(path),
        remedy="see who else may write there, and run again",
    )


def _in_the_way(path: Path, kind: str, purpose: str) -> TargetError:
    return TargetError(
        f"{kind} is in the place of {purpose}",
        expected=f"{purpose} that is no link, or nothing",
        got=kind,
        where=str(path),
        remedy="remove it, or choose another target",
    )


_SHORTEST_NAP_SECONDS = 0.0005
_LONGEST_NAP_SECONDS = 0.02
_NOTICE_SECONDS = 1.0


def open_lock(folder: Folder, name: str) -> int:
    """Open the file of a lock, which is made if it is not there, and return its descriptor.

    Raises TargetError if a link, something other than a file, or a file of another user is in its place.
    """
    return folder.open_file(name, os.O_RDWR | os.O_CREAT, "a lock")


def try_lock(fd: int, kind: int) -> bool:
    """Take a lock (LOCK_SH or LOCK_EX) if no other process is in the way; tell whether it was taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(
    fd: int, kind: int, path: Path, say: Say, patience_seconds: float, settled: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for a lock; tell whether it was taken. It was not if `settled` said meanwhile that it is needed no more.

    Args:
        say: is told after a second who is in the way.

    Raises TargetError, which names them, after `patience_seconds`.
    """
    begin = time.monotonic()
    is_told, nap_seconds = False, _SHORTEST_NAP_SECONDS
    while not try_lock(fd, kind):
        if settled():
            return False
        waited_seconds = time.monotonic() - begin
        if waited_seconds >= patience_seconds:
            raise TargetError(
                "a lock of the target is held by another process",
                expected="nobody who holds it for longer than a moment",
                got=f"a lock held by {holders(fd)}",
                where=str(path),
                remedy="wait for that process or end it; if it is none of reshard-mpi's, remove the file",
            )
        if not is_told and waited_seconds >= _NOTICE_SECONDS:
            is_told = True
            say(f"waiting for the lock {path}, held by {holders(fd)}")
        time.sleep(nap_seconds)
        nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
    return True


def holders(fd: int) -> str:
    """Say who holds the lock on a file, as far as can be seen from this host."""
    processes = (f"process {pid} ({pid_state(pid)})" for pid in holders_of_lock(fd))
    return ", ".join(processes) or "a process that cannot be seen from here, as on another host"
