"""Folders that are held open: what is done in one is done in that very folder, whatever takes its name meanwhile.

Others may be allowed to write to a target folder. Whatever they put there in the place of what is ours, nothing outside
the folder is opened for writing, cut short, replaced or removed through it: no symbolic link is followed below the
folder that the user has named, and folders and locks of other users are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple, Self

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import kind_of

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# What opening says of a link, and of what is no folder or no file.
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_TOKEN_BYTES = 6


class FileIdentity(NamedTuple):
    """What tells a file from all others of a host, whatever it is called."""

    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino)


class Folder:
    """A folder that is open. path: what it was called."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that the user has named, through whatever links. Raises OSError."""
        return cls(path, os.open(path, _FOLDER))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close(self._descriptor)

    def inner(self, name: str) -> Folder:
        """Open a folder in this one.

        Raises FileNotFoundError if there is none, TargetError if it is a link, no folder, or of another user.
        """
        try:
            found = Folder(self.path / name, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor))
        except OSError as error:
            raise self._refused(name, "a folder", error) from error
        try:
            found.require_own(os.fstat(found._descriptor), found.path)
        except BaseException:
            close(found._descriptor)
            raise
        return found

    def made_inner(self, name: str) -> Folder:
        """Open a folder in this one, made for good if it is not there. Raises as `inner` does."""
        try:
            os.mkdir(name, dir_fd=self._descriptor)
        except FileExistsError:
            return self.inner(name)
        self.sync()
        return self.inner(name)

    def create(self, name: str, mode: int) -> int:
        """Make a new file, for reading and writing. Raises TargetError if anything of that name is there."""
        return create_file(name, mode, self._descriptor, self.path / name)

    def open_file(self, name: str, flags: int, purpose: str, mode: int = 0o666) -> int:
        """Open a regular file of this user, without waiting.

        purpose: what it is. Raises FileNotFoundError, or TargetError if it is a link, no file, or of another user.
        """
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, mode, dir_fd=self._descriptor)
        except OSError as error:
            raise self._refused(name, purpose, error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _in_the_way(self.path / name, kind_of(status.st_mode), purpose)
            self.require_own(status, self.path / name)
        except BaseException:
            close(descriptor)
            raise
        return descriptor

    def replace(self, name: str, final_name: str, descriptor: int) -> None:
        """Give the file behind `descriptor`, called `name`, its final name.

        Raises TargetError if something else has taken its name.
        """
        if not self.is_called(name, descriptor):
            raise replaced(self.path / name)
        os.rename(name, final_name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def is_called(self, name: str, descriptor: int) -> bool:
        """Tell whether the file behind `descriptor` is what lies in the folder under `name`."""
        try:
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return FileIdentity(status.st_dev, status.st_ino) == FileIdentity.of(descriptor)

    def remove(self, name: str) -> bool:
        """Remove a file; tell whether it was there."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        return True

    def blocks(self, name: str) -> int:
        """Return how many blocks of 512 bytes a file takes; 0 if it is gone."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_blocks
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)  # noqa: PTH208

    def sync(self) -> None:
        """Have the names in the folder on the disk."""
        os.fsync(self._descriptor)

    def require_own_file(self, name: str) -> None:
        """Raise TargetError if what is called `name` is of another user."""
        self.require_own(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False), self.path / name)

    def require_own(self, status: os.stat_result, path: Path) -> None:
        """Raise TargetError if what lies at `path`, the folder or something in it, is of another user."""
        if status.st_uid == os.geteuid() or status.st_uid == self._uid_of_what_is_made():
            return
        raise TargetError(
            f"{kind_of(status.st_mode)} of another user is in the way",
            expected=f"nothing, or what user {os.geteuid()} has made",
            got=f"{kind_of(status.st_mode)} of user {status.st_uid}",
            where=str(path),
            remedy="choose another target, or have its owner remove it",
        )

    def _uid_of_what_is_made(self) -> int | None:
        """Return whose a file is that this user makes here: file servers may know the user by another number."""
        name = f".{os.urandom(_TOKEN_BYTES).hex()}.owner"
        try:
            descriptor = create_file(name, 0o600, self._descriptor)
        except (OSError, TargetError):
            return None
        try:
            self.remove(name)
            return os.fstat(descriptor).st_uid
        except OSError:
            return None
        finally:
            close(descriptor)

    def _refused(self, name: str, purpose: str, error: OSError) -> Exception:
        if error.errno not in _IN_THE_WAY:
            return OSError(error.errno, error.strerror, str(self.path / name))
        mode = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode
        return _in_the_way(self.path / name, kind_of(mode), purpose)


def create_file(path: str, mode: int, folder: int | None = None, called: Path | None = None) -> int:
    """Make the new file `path` and return its descriptor, for reading and writing.

    folder: the descriptor of the folder that `path` is relative to. called: its name in messages. Raises TargetError if
    anything of that name is there, were it a link that leads nowhere.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    except FileExistsError as error:
        raise TargetError("a target file exists already", expected="no file", where=str(called or path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(called or path)) from error


def close(descriptor: int) -> None:
    """Close what nothing has been written to, or what has been synced since: what that says is of no account."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make a folder and those it lies in, so that they last as what is written there does."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        with Folder.open(folder.parent) as parent:
            parent.sync()


def replaced(path: Path) -> TargetError:
    """Return the error for a file that has been taken away while it was written."""
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
