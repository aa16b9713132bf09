"""Read files in which a framework keeps a training by torch (`read_content`), their tensors as pieces (`listed`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Converted, Location
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree, nodes
from reshard_mpi.formats.nest.nodes import NestError, Value
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.formats.torch.file_content import FileContent, content_of
from reshard_mpi.formats.torch.tensors import StoredTensor, is_tensor, place_of
from reshard_mpi.sharding.box import Box


def read_content(path: str, framework: str) -> FileContent:
    """Read the object of a file, in which the path is put before the keys of storages.

    Args:
        framework: whose checkpoint it is of, as errors say.

    Raises ShardError if it is not sound, or of the other byte order.
    """
    with structure.opened(path) as file:
        content = content_of(file, prefix=path)
    if content.swapped:
        problem = f"a file of a {framework} checkpoint has the byte order that this machine has not"
        raise ShardError(problem, where=path)
    return content


def text_of(value: Value) -> str:
    """Return a text that is equal for equal values, without tensors."""
    try:
        flattened = flatten_tree.flatten([value], is_tensor, has_order=False)
    except NestError as error:
        return error.problem
    return str([*flattened.strings.values()])


class HeldTensor(NamedTuple):
    """A tensor of a file: its type, its shape, and where its elements are."""

    dtype: DType
    shape: tuple[int, ...]
    place: Location

    @property
    def whole(self) -> TensorPieces:
        """The same tensor as one piece."""
        return TensorPieces(self.dtype, self.shape, ((Box.whole(self.shape), self.place),))


class TensorPieces(NamedTuple):
    """A whole tensor: its type, its shape, and the pieces of it that files hold, each with its box.

    A box comes several times where files hold copies of a piece.
    """

    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Location], ...]

    def pieces_as(self, dtype: DType) -> tuple[tuple[Box, Location], ...]:
        """Return the pieces, converted to a type if they have another one."""
        if self.dtype == dtype:
            return self.pieces
        return tuple((box, Converted(place, self.dtype)) for box, place in self.pieces)


class FlatVector(NamedTuple):
    """A vector of elements in a file, in a row."""

    path: str
    offset_bytes: int
    dtype: DType
    elements: int

    def range(self, start: int, length: int) -> ByteRange:
        """Return where `length` elements from `start` on are."""
        size_bytes = self.dtype.itemsize_bytes
        return ByteRange(self.path, self.offset_bytes + start * size_bytes, length * size_bytes)


def held(tensor: StoredTensor, starts: Mapping[str, int], path: str) -> HeldTensor:
    """Return a tensor of a file with its place. starts: where its storages begin, by their keys."""
    start = starts[tensor.storage.key] + tensor.offset * tensor.dtype.itemsize_bytes
    place = place_of(path, tensor, start, swapped=False)
    if place is None:
        size_bytes = TensorType(tensor.dtype, tensor.shape).size_bytes
        place = ByteRanges((ByteRange(path, start, size_bytes),) if size_bytes else ())
    return HeldTensor(tensor.dtype, tensor.shape, place)


def listed(
    root: Value,
    folder: str,
    format_name: str,
    title: str,
    of_file: Callable[[StoredTensor], TensorPieces],
    why_not: Callable[[str], str | None] = lambda name: None,
) -> Manifest:
    """Return the tensors in a tree as a checkpoint's, and the rest of the tree as the text of a nest.

    Args:
        root: a tree in which tensors are `TensorPieces`, or what files have of them.
        folder: of the checkpoint; title: what errors call it.
        of_file: returns a tensor of a file with its place.
        why_not: by the name of a tensor, why its elements cannot be read, in words; None if they can.

    Raises ShardError if the tree is no nest.
    """
    try:
        flattened = flatten_tree.flatten(root, lambda value: type(value) is TensorPieces or type(value) is StoredTensor)
    except nodes.NestError as error:
        raise error.of_file(f"a {title}", folder) from None
    tensors, table = ChunkedTensors(folder), TensorTable(folder)
    for name, leaf in flattened.tensors:
        own = of_file(leaf) if type(leaf) is StoredTensor else leaf
        why = why_not(name)
        if why is not None:
            tensors.add_unreadable(name, own.dtype, own.shape, why)
        else:
            tensors.add_listed(name, own.dtype, own.shape, _pieces(own, table))
    return Manifest(folder, format_name, tensors, flattened.strings, left_out=flattened.left_out)


def _pieces(tensor: TensorPieces, table: TensorTable) -> Sequence[ListedChunk]:
    """Return the pieces of a tensor, each added to the table."""
    kinds = [table.kind(TensorType(tensor.dtype, box.shape)) for box, _ in tensor.pieces]
    places = zip(kinds, tensor.pieces)
    return [ListedChunk(box, table, table.add_unnamed(kind, NOT_CONTIGUOUS, place)) for kind, (box, place) in places]
