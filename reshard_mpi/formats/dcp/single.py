"""One file of a checkpoint by itself: what it holds, and whether it fits its checksums."""

from __future__ import annotations

from pathlib import Path

from reshard_mpi.formats import files
from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.dcp import contents
from reshard_mpi.formats.dcp.items import Common, locate_items
from reshard_mpi.formats.dcp.metadata import INDEX
from reshard_mpi.formats.dcp.reading import NAME, wanted_in
from reshard_mpi.formats.dcp.writing import locate_own
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.sealing import check_members


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the pieces of tensors in a file, by what it says of itself, or by the metadata beside it.

    Those that others have written are called by their places too, since a file may have several of a tensor. Raises
    ShardError if it is damaged, or nothing says what it holds.
    """
    if _is_own(path):
        return locate_own(path)
    wanted = [item for item in wanted_in(path) if item.kind is not None]
    tensors = Tensors(path)
    if wanted:
        located = locate_items(path, wanted, Common())
        for key, number in located.numbers.items():
            kind, start = located.tensors.kind_of[number], located.tensors.starts[number]
            if number in located.tensors.elsewhere:
                tensors.elsewhere[len(tensors)] = located.tensors.elsewhere[number]
            tensors.add(f"{key.name} {list(key.offsets or ())}", tensors.kind(located.tensors.kinds[kind]), start)
    return Manifest(path, NAME, tensors)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every item of a file has checksums. Raises ShardError if one does not fit.

    What this program writes has none, nor has the metadata.
    """
    if Path(path).name == INDEX or _is_own(path):
        return False
    wanted = wanted_in(path)
    with files.opened(path) as (fd, _):
        checked = [
            check_members(fd, path, archive.members(fd, path, item.length_bytes, item.offset_bytes), on_bytes)
            for item in wanted
        ]
    return bool(checked) and all(checked)


def _is_own(path: str) -> bool:
    with files.opened(path) as (fd, size_bytes):
        return contents.is_there(fd, size_bytes)
