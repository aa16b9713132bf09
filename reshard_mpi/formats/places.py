"""Where the elements of a tensor are: byte ranges of files, at even distances in one, or behind a library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Strided(NamedTuple):
    """A tensor whose elements lie at even distances in one file, as those of a view of an array do.

    offset_bytes: where its first element begins. strides_bytes: how far apart neighbours are, dimension by dimension:
    multiples of the element's size, 0 where all indices are the same element. swapped: as of `Segments`.
    """

    path: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]
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


# Where a tensor is.
Place = Segments | Strided | Decoded
