"""What a checkpoint format is: a few functions. A format module provides them at module level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from reshard_mpi.manifest import Manifest, ShardSpec

NO_SUMS: Mapping[str, int] = {}


class Format(Protocol):
    """Says where the bytes of a shard live; never plans or moves payload bytes.

    NAME is the format's name in options and reports, SUFFIXES the file name endings that mark it.
    """

    @property
    def NAME(self) -> str: ...  # noqa: N802

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802

    def locate(self, path: str) -> Manifest:
        """Read the structure of the shard at `path`. Raises ShardError if it is not a sound shard of this format."""

    def size_at_most_bytes(self, spec: ShardSpec, *, sums: bool = False, crc: bool = False) -> int:
        """Return what the shard of `spec` can take at most, structure and gaps included: never less than it will.

        sums, crc: sealed with the sums of its tensors, or with a checksum of the whole file. Loads no library.
        """

    def reserve(self, path: str, spec: ShardSpec) -> Manifest:
        """Create the file `path`, which must not exist, with everything but payloads, at its final length.

        The manifest returned tells where each payload is to be written; every tensor of it has Segments.
        """

    def seal(self, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
        """Finish the file after its payloads are in place (permissions; whatever depends on the payload).

        sums: of its tensors, in file order (see `checksum`), to be kept in it where the format has a place for them;
        none if they are not known. crc: add a checksum of the whole file. Raises UsageError if the format has none.
        """

    def stored_sums(self, path: str) -> Mapping[str, int]:
        """Return the sums of its tensors that the shard at `path` keeps; none if it keeps none. Raises ShardError."""

    def check_crc(self, path: str) -> bool:
        """Tell whether the file has a checksum of all of it. Raises ShardError if it does not fit."""
