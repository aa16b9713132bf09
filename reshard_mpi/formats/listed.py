"""The tensors of a checkpoint whose index lists the pieces of each of them, in whatever files they lie."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.formats.columns import ELSEWHERE, Kind, Tensors
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.places import Segments
from reshard_mpi.sharding.box import Box

# In the place of where a tensor's elements are, if only its pieces have a place.
_NOWHERE = Segments(())


class Piece(NamedTuple):
    """A part of a tensor as a checkpoint lists it: `box` of the whole tensor is the tensor `number` of a file."""

    box: Box
    tensors: Tensors
    number: int


# What many tensors of a list have alike: the box of each piece, and the file that it lies in.
PieceList = tuple[tuple[Box, Tensors], ...]


class ListedTensors(Tensors):
    """The whole tensors of a checkpoint whose pieces are listed one by one: their places are those of the pieces.

    Pieces may lie in any files, several of a tensor in one of them, and may overlap if they hold the same there.
    lists: the different lists of pieces. list_of: the number of each tensor's. numbers: its pieces' numbers in their
    files. missing: what is wrong with files of which no piece is listed, in words.
    """

    __slots__ = ("_number_of_list", "list_of", "lists", "missing", "numbers")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lists: list[PieceList] = []
        self.list_of = array("I")
        self.numbers: list[tuple[int, ...]] = []
        self.missing: tuple[str, ...] = ()
        self._number_of_list: dict[tuple[tuple[Box, int], ...], int] = {}

    def add_listed(self, name: str, dtype: DType, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Add a tensor. Raises ValueError if there is one of its name, or a piece does not fit it."""
        if name in self.number_of:
            raise ValueError(f"two tensors called {name!r}")
        whole = Box.whole(shape)
        for box, tensors, number in pieces:
            kind = tensors.kinds[tensors.kind_of[number]]
            if (kind.dtype, kind.shape) != (dtype, box.shape) or not (box.ndim == whole.ndim and whole.contains(box)):
                raise ValueError(f"a piece of {name!r} is {kind.dtype} {list(kind.shape)}, listed as {dtype} at {box}")
        key = tuple((piece.box, id(piece.tensors)) for piece in pieces)
        listed = self._number_of_list.setdefault(key, len(self.lists))
        if listed == len(self.lists):
            self.lists.append(tuple((piece.box, piece.tensors) for piece in pieces))
        self.elsewhere[len(self.starts)] = _NOWHERE
        self.add(name, self.kind(Kind(dtype, shape)), ELSEWHERE)
        self.list_of.append(listed)
        self.numbers.append(tuple(piece.number for piece in pieces))

    @property
    def files(self) -> tuple[Tensors, ...]:
        """The files that pieces lie in."""
        every = {id(tensors): tensors for pieces in self.lists for _, tensors in pieces}
        return tuple(every.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ListedTensors) or list(self) != list(other):
            return False
        return (
            self.kinds == other.kinds
            and self.kind_of == other.kind_of
            and list(self._pieces()) == list(other._pieces())
        )

    def __hash__(self) -> int:
        return super().__hash__()

    def _pieces(self) -> Iterator[object]:
        for listed, numbers in zip(self.list_of, self.numbers):
            pieces = zip(self.lists[listed], numbers)
            yield [(box, tensors.source(number)) for (box, tensors), number in pieces]
