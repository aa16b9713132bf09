"""What a file that torch saved consists of: the object that was pickled, and where the bytes of its storages lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.formats.nest.trees import Value
from reshard_mpi.formats.torch.dtypes import Storage
from reshard_mpi.formats.torch.readers import Readers
from reshard_mpi.formats.torch.rows import TensorRows
from reshard_mpi.formats.torch.tensors import CALLS, REBUILD, storage
from reshard_mpi.units import MIB

# The pickle of 100,000 tensors has 12 MB.
MAX_PICKLE_BYTES = 40 * MIB


class Content(NamedTuple):
    """One file: its object as a tree, and where the bytes of each storage begin, by key.

    swapped: the elements have the byte order this machine has not. pickle_crc: of the archive's pickle. own_record:
    what this program has added to it, None in files that others have written.
    """

    root: Value
    starts: Mapping[str, int]
    swapped: bool
    pickle_crc: int = 0
    own_record: bytes | None = None


class Storages:
    """The storages that a pickle names, while it is read.

    by_key: one of each, of types that are known; all of a key have the same size. unknown: those of other types.
    prefix: is put before their keys in what is read, to tell them from those of other archives.
    """

    def __init__(self, prefix: str = "") -> None:
        self.by_key: dict[str, Storage] = {}
        self.unknown: dict[str, Storage] = {}
        self._prefix = prefix

    @property
    def readers(self) -> Readers:
        """What the pickle is read with."""
        return Readers(self._storage, CALLS, rows={REBUILD: TensorRows(self._known)})

    def _storage(self, persistent_id: Value) -> Storage:
        made = storage(persistent_id)
        if made.unknown is not None:
            return self.unknown.setdefault(made.key, made)
        return self._known(made)

    def _known(self, made: Storage) -> Storage:
        first = self.by_key.setdefault(made.key, made)
        if first is not made and first.size_bytes != made.size_bytes:
            raise ValueError(f"a storage of two sizes: {made.key[:60]!r}")
        return made._replace(key=self._prefix + made.key) if self._prefix else made
