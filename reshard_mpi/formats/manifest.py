"""Where the bytes of a shard live: the one description that formats give, planning matches and the engine follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.sharding.box import Box

if TYPE_CHECKING:
    import numpy as np


class ByteRange(NamedTuple):
    """`length_bytes` bytes of the file `path` from `offset_bytes` on."""

    path: str
    offset_bytes: int
    length_bytes: int


class Segments(NamedTuple):
    """A tensor's row-major bytes as one stream of byte ranges, which may be cut at any byte.

    swapped: the file has the byte order this machine has not.
    """

    ranges: tuple[ByteRange, ...]
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """A tensor that must be read through its library (compressed or chunked storage).

    read: returns a box of the tensor, in the tensor's own coordinates, as a C-contiguous array of raw elements
    (unsigned integers or void of the element's size, in this machine's byte order). chunk: the shape in which the
    library decodes. decoding_bytes: what one chunk takes of memory besides the box that is read. kept_bytes: what the
    library keeps of it while it decodes the next.
    """

    path: str
    read: Callable[[Box], np.ndarray[Any, Any]] = field(compare=False, repr=False)
    chunk: tuple[int, ...]
    decoding_bytes: int
    kept_bytes: int


class TensorEntry(NamedTuple):
    """One tensor of one shard: its type, the shape held here, and where the elements are.

    box: the part of the whole tensor this is, and global_shape that tensor's shape, where the file itself says so;
    None in formats that leave it to the strategy.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Segments | Decoded
    box: Box | None = None
    global_shape: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        size = self.dtype.itemsize_bytes
        for length in self.shape:
            size *= length
        return size


class ShardIdentity(NamedTuple):
    """What a self-describing shard says of its place in its checkpoint.

    strategy: the placement table of the whole checkpoint (text made by `strategy.table`).
    """

    rank: int
    world_size: int
    strategy: str


class Manifest(NamedTuple):
    """One shard file: its tensors in the file's order, its strings, and its identity where it carries one."""

    path: str
    format: str
    tensors: Mapping[str, TensorEntry]
    strings: Mapping[str, str] = {}
    identity: ShardIdentity | None = None

    @property
    def is_as_stored(self) -> bool:
        """Whether all elements lie in the file as they are on this machine."""
        sources = (entry.source for entry in self.tensors.values())
        return all(isinstance(source, Segments) and not source.swapped for source in sources)

    @property
    def decoding_bytes(self) -> int:
        """The most memory that decoding one of the tensors takes."""
        sources = (entry.source for entry in self.tensors.values())
        return max((source.decoding_bytes for source in sources if isinstance(source, Decoded)), default=0)


class TensorSpec(NamedTuple):
    """A tensor of a shard that is to be written: `box` of a tensor of shape `global_shape`."""

    name: str
    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class ShardSpec(NamedTuple):
    """A shard that is to be written, tensors in file order. with_sums: it is to keep a sum of each of them."""

    identity: ShardIdentity
    tensors: tuple[TensorSpec, ...]
    strings: Mapping[str, str]
    with_sums: bool = False
