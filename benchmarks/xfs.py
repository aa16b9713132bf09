"""A file system that can share blocks between files: XFS in an image file, mounted for as long as it is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# mkfs.xfs refuses file systems smaller than 300 MB; its log and the image's own tables want room too.
_LEAST_BYTES = 1 << 30


class CannotMountError(Exception):
    """The machine does not let us have the file system."""


@contextmanager
def mounted(folder: Path, room_bytes: int) -> Iterator[Path]:
    """Yield the mount point of a new XFS with block sharing, its image (a sparse file) in `folder`.

    It is unmounted and removed at the end, whatever happens. Raises CannotMountError with the reason.
    """
    if os.geteuid() != 0:
        raise CannotMountError("only root can mount an image")
    if shutil.which("mkfs.xfs") is None:
        raise CannotMountError("mkfs.xfs is not installed")
    image, point = folder / "xfs.img", folder / "xfs"
    point.mkdir()
    try:
        with image.open("wb") as stream:
            stream.truncate(room_bytes + _LEAST_BYTES)
        _do("mkfs.xfs", "-q", "-m", "reflink=1", str(image))
        _do("mount", "-o", "loop", str(image), str(point))
        try:
            yield point
        finally:
            # Loop device and all; lazily if something still holds it, so that nothing stays mounted.
            if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
                _do("umount", "--lazy", str(point))
    finally:
        image.unlink(missing_ok=True)
        point.rmdir()


def _do(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise CannotMountError(f"{command[0]}: {error.stderr.strip()}") from None
