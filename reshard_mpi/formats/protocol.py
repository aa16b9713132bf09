"""What a checkpoint format is: three functions. A format module provides them at module level."""

from __future__ import annotations

from typing import Protocol

from reshard_mpi.manifest import Manifest, ShardSpec


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

    def reserve(self, path: str, spec: ShardSpec) -> Manifest:
        """Create the file `path`, which must not exist, with everything but payloads, at its final length.

        The manifest returned tells where each payload is to be written; every tensor of it has Segments.
        """

    def seal(self, path: str) -> None:
        """Finish the file after its payloads are in place (permissions; whatever depends on the payload)."""
