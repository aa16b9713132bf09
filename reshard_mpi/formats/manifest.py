"""What a shard file holds: the one description that formats give, planning matches and the engine follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.listed import ListedTensors
from reshard_mpi.formats.places import Decoded, Place, Segments


class ShardIdentity(NamedTuple):
    """What a self-describing shard says of its place in its checkpoint.

    strategy: the placement table of the whole checkpoint (text made by `strategy.table`).
    """

    rank: int
    world_size: int
    strategy: str


class Structure(NamedTuple):
    """What makes two files of a format the same but for payloads: their length, and a digest of all else."""

    size_bytes: int
    digest: bytes


class Manifest(NamedTuple):
    """One shard file: its tensors in the file's order, its strings, and its identity where it carries one.

    structure: where a format can tell by it that another file has the same tensors at the same places. left_out: what
    else is in the file and cannot be carried, in words. lacks_others: it says that it was saved without what other
    ranks hold as well.
    """

    path: str
    format: str
    tensors: Tensors
    strings: Mapping[str, str] = {}
    identity: ShardIdentity | None = None
    structure: Structure | None = None
    left_out: tuple[str, ...] = ()
    lacks_others: bool = False

    def at(self, path: str) -> Manifest:
        """Return what a file of the same structure holds."""
        return self._replace(path=path, tensors=self.tensors.at(path))

    @property
    def is_as_stored(self) -> bool:
        """Whether all elements lie in the file as they are on this machine."""
        return all(isinstance(source, Segments) and not source.swapped for source in self._otherwise_stored())

    @property
    def decoding_bytes(self) -> int:
        """The most memory that decoding one of the tensors takes."""
        sources = self._otherwise_stored()
        return max((source.decoding_bytes for source in sources if isinstance(source, Decoded)), default=0)

    def _otherwise_stored(self) -> Iterator[Place]:
        files = self.tensors.files if isinstance(self.tensors, ListedTensors) else (self.tensors,)
        return (source for tensors in files for source in tensors.elsewhere.values())
