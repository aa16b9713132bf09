"""Files that take their names whole and for good: written beside, synced, renamed.

Who is killed leaves what it has written so far. Where one process at a time may write a file, the next one removes that
(`remove_stale`). Where several may, each holds a lock beside its partial file as long as it lives (`shown_alive`), and
what the dead left is told by it (`remove_dead`). Locks may not reach other hosts, so the dead are looked for on their
own: a name has a digest of the host that it was made on.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from reshard_mpi.records import TensorSum

    Before = Callable[[Path, Sequence[TensorSum]], None]

_PARTIAL = ".partial"
# Beside a partial file, with the same token: locked by its writer, and empty.
_ALIVE = ".writer"
_TOKEN_BYTES = 6
_HOST_BYTES = 2
# What `st_blocks` counts in, whatever the blocks of the file system.
_BLOCK_BYTES = 512


class Publication:
    """A file that is written beside its final path and takes that name, synced, when `publish` is called.

    Left without that, for whatever reason, it is removed. before: called with the whole file, and the sums of what it
    holds where they are given, before it takes its name. then: called when it is in place. token: what tells its
    partial file from others', if that has been chosen.
    """

    def __init__(
        self,
        path: Path,
        before: Before = lambda *_: None,
        then: Callable[[], None] = lambda: None,
        *,
        token: str | None = None,
    ) -> None:
        self.partial = partial_path(path, token or os.urandom(_TOKEN_BYTES).hex())
        self._path = path
        self._before = before
        self._then = then
        self._is_published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            self.partial.unlink(missing_ok=True)

    def publish(self, sums: Sequence[TensorSum] = (), *, synced: bool = True) -> None:
        """Put the file in place, whatever was there. synced: False where it need not outlive a loss of power."""
        if synced:
            sync(self.partial)
        self._before(self.partial, sums)
        self.partial.replace(self._path)
        self._is_published = True
        if synced:
            sync(self._path.parent)
        self._then()


def partial_path(path: Path, token: str = "0" * 2 * _TOKEN_BYTES) -> Path:
    """Return where a file is written before it is published; token: what tells this writer's from others'."""
    return path.with_name(f".{path.name}.{token}{_PARTIAL}")


def is_partial(path: Path) -> bool:
    """Tell whether a file has a name that files have before they are published."""
    return path.name.startswith(".") and path.name.endswith(_PARTIAL)


def publish_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Put a small file in place, whatever was there. synced: as for `Publication.publish`."""
    with Publication(path) as publication:
        publication.partial.write_text(text)
        publication.publish(synced=synced)


def remove_stale(path: Path) -> None:
    """Remove what processes that died have left of `path`; nobody else may be writing it."""
    for stale in _stale(path):
        stale.unlink(missing_ok=True)


def stale_bytes(path: Path) -> int:
    """Return what `remove_stale` would make free."""
    return sum(map(_blocks_bytes, _stale(path)))


@contextlib.contextmanager
def shown_alive(path: Path, host: str) -> Iterator[str]:
    """Yield a token for a partial file of `path`, with the lock held that shows others that its writer lives.

    host: the name of this host. The partial file must be gone at the end, or have taken its name.
    """
    while True:
        token = _host_digest(host) + os.urandom(_TOKEN_BYTES - _HOST_BYTES).hex()
        lock = _lock_of(path, token)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Before it was locked, it may have been taken for one of the dead.
            if _try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                try:
                    yield token
                    return
                finally:
                    lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def remove_dead(path: Path, host: str) -> None:
    """Remove what writers of `path` on this host that died have left; others may be writing it."""
    for lock in _locks_of_the_dead(path, host):
        _partial_of(lock).unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


def dead_bytes(path: Path, host: str) -> int:
    """Return what `remove_dead` would make free."""
    return sum(_blocks_bytes(_partial_of(lock)) for lock in _locks_of_the_dead(path, host))


def _locks_of_the_dead(path: Path, host: str) -> Iterator[Path]:
    """Yield the locks that nobody holds, each of them held for the moment."""
    for lock in path.parent.glob(f".{glob.escape(path.name)}.{_host_digest(host)}*{_ALIVE}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # it is gone, or no file of ours
        try:
            if _try_lock(descriptor) and os.fstat(descriptor).st_nlink:
                yield lock
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Take a lock if nobody has it, and tell whether that is so; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _host_digest(host: str) -> str:
    return f"{zlib.crc32(host.encode(errors='replace')) & 0xFFFF:04x}"


def _lock_of(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}{_ALIVE}")


def _partial_of(lock: Path) -> Path:
    return lock.with_name(lock.name.removesuffix(_ALIVE) + _PARTIAL)


def _blocks_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * _BLOCK_BYTES
    except OSError:
        return 0


def remove_stale_records(state: Path) -> None:
    """Remove what writers of records that died have left; nobody else may be writing targets."""
    for stale in state.glob(f".rank_*.json.*{_PARTIAL}"):
        stale.unlink(missing_ok=True)


def _stale(path: Path) -> Iterator[Path]:
    for ending in (_PARTIAL, _ALIVE):
        yield from path.parent.glob(f".{glob.escape(path.name)}.*{ending}")


def make_folder(folder: Path) -> None:
    """Make a folder and those it lies in, so that they last as what is written there does."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
