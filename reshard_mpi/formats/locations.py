"""Define where the elements of a tensor lie: byte ranges, strides, a library (`ByteRanges`).

Shards have no other places. A plan may take elements that are converted to another type, that are in no file, or that
are computed of those of several tensors: sums, and quantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.sharding.box import Box

if TYPE_CHECKING:
    import numpy as np

    from reshard_mpi.planning.rank_plan import TensorPlan
    from reshard_mpi.quantization.weights import QuantizedWeight

# The first byte of a range (of a file, or of a tensor's row-major bytes), and the one after its last.
Span = tuple[int, int]


class ByteRange(NamedTuple):
    """`length_bytes` bytes of the file `path` from `offset_bytes` on."""

    path: str
    offset_bytes: int
    length_bytes: int


class ByteRanges(NamedTuple):
    """A tensor's row-major bytes as one stream of byte ranges, which may be cut at any byte."""

    ranges: tuple[ByteRange, ...]
    swapped: bool = False  # whether the file has the other byte order than this machine


class StridedView(NamedTuple):
    """A tensor whose elements lie at even distances in one file, like a view of an array."""

    path: str
    offset_bytes: int  # of its first element
    # for each dimension, how far apart neighbours are: a multiple of the element's size, or 0 if all indices mean the
    # same element
    strides_bytes: tuple[int, ...]
    swapped: bool = False  # as in `ByteRanges`


class LibraryRead(NamedTuple):
    """A tensor that must be read through its library (compressed or chunked storage)."""

    path: str
    # returns a box of the tensor, in the tensor's own coordinates, as a C-contiguous array of raw elements (unsigned
    # integers or void of the element's size, in this machine's byte order)
    read: Callable[[Box], np.ndarray[Any, Any]]
    chunk: tuple[int, ...]  # the shape that the library decodes at once
    decoding_bytes: int  # the memory that decoding a chunk takes, besides the box that is read
    kept_bytes: int  # the memory that the library keeps for a chunk while it decodes the next

    def __eq__(self, other: object) -> bool:
        """Tell whether both are the same but for the functions that read them."""
        return isinstance(other, LibraryRead) and self[:1] + self[2:] == other[:1] + other[2:]

    def __hash__(self) -> int:
        return hash(self[:1] + self[2:])


class Constant(NamedTuple):
    """A tensor that is in no file: all its elements have the same bytes, in this machine's byte order."""

    element: bytes


class Converted(NamedTuple):
    """A tensor whose elements are converted to another floating-point type when they are read."""

    place: Location  # where they are
    dtype: DType  # the type that they have there


class Reduced(NamedTuple):
    """A tensor each of whose elements is the sum, or the mean, of one element of each of several tensors."""

    # where these tensors are, in the order in which they are added. They have the type and shape of this one.
    places: tuple[Location, ...]
    is_mean: bool  # whether it is the mean
    # whether in a mean an element that is the same in all tensors, bit for bit, stays as it is, rather than being added
    # and divided as others are
    keeps_equal: bool = True


class Dequantized(NamedTuple):
    """A quantized weight whose elements are computed in float32 when they are read."""

    weight: QuantizedWeight
    stored: Mapping[str, TensorPlan]  # where the tensors come from, whole, that are stored for it and needed

    def __hash__(self) -> int:
        return hash(self.weight)


# Where a tensor is.
Location = ByteRanges | StridedView | LibraryRead | Constant | Converted | Reduced | Dequantized


def read_element_bytes(place: Location | None, dtype: DType) -> int:
    """Return how many bytes of files are read for one element of a type; where it is None, it lies there as it is."""
    while isinstance(place, Converted):
        place, dtype = place
    if isinstance(place, Reduced):
        return sum(read_element_bytes(part, dtype) for part in place.places)
    if isinstance(place, Dequantized):
        return max(1, place.weight.scheme.bits // 8)
    return 0 if isinstance(place, Constant) else dtype.itemsize_bytes


def paths_of(location: Location) -> Iterator[str]:
    """Yield the paths of the files that the elements lie in; one may come several times."""
    if isinstance(location, ByteRanges):
        yield from (byte_range.path for byte_range in location.ranges)
    elif isinstance(location, StridedView | LibraryRead):
        yield location.path
    elif isinstance(location, Converted):
        yield from paths_of(location.place)
    elif isinstance(location, Reduced):
        for place in location.places:
            yield from paths_of(place)
    elif isinstance(location, Dequantized):
        for tensor in location.stored.values():
            for item in tensor.reads:
                yield from paths_of(item.source.source)
