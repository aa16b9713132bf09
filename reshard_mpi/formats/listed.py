"""The tensors of a checkpoint whose index lists the pieces of each tensor, in any of its files."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.formats.columns import ELSEWHERE, Kind, Tensors
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.places import Segments
from reshard_mpi.sharding.box import Box

# The place of a tensor that has none of its own, since only its pieces have places.
_NOWHERE = Segments(())


class Piece(NamedTuple):
    """A listed part of a tensor. box: in the whole tensor. tensors, number: the tensors of a file, and which it is."""

    box: Box
    tensors: Tensors
    number: int


# What many listed tensors have in common: for each piece, its box and the tensors of its file.
PieceList = tuple[tuple[Box, Tensors], ...]


class ListedTensors(Tensors):
    """The whole tensors of a checkpoint whose pieces are listed one by one; only the pieces have places.

    A file may have several pieces of a tensor. Pieces may overlap if they hold the same there. lists: the different
    lists of pieces. list_of: for each tensor, the number of its list. numbers: for each tensor, the numbers of its
    pieces in their files. missing: in words, why no pieces of some files are listed. unreadable: the names of tensors
    whose elements cannot be read though their files are sound, each with the reason in words; no pieces of them are
    listed.
    """

    __slots__ = ("_number_of_list", "list_of", "lists", "missing", "numbers", "unreadable")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lists: list[PieceList] = []
        self.list_of = array("I")
        self.numbers: list[tuple[int, ...]] = []
        self.missing: tuple[str, ...] = ()
        self.unreadable: dict[str, str] = {}
        self._number_of_list: dict[tuple[tuple[Box, int], ...], int] = {}

    def add_listed(self, name: str, dtype: DType, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Add a tensor. Raises ValueError if there is one of its name already, or if a piece does not fit it."""
        whole = Box.whole(shape)
        for box, tensors, number in pieces:
            kind = tensors.kinds[tensors.kind_of[number]]
            if (kind.dtype, kind.shape) != (dtype, box.shape) or not (box.ndim == whole.ndim and whole.contains(box)):
                raise ValueError(f"a piece of {name!r} is {kind.dtype} {list(kind.shape)}, listed as {dtype} at {box}")
        key = tuple((piece.box, id(piece.tensors)) for piece in pieces)
        list_number = self._number_of_list.setdefault(key, len(self.lists))
        if list_number == len(self.lists):
            self.lists.append(tuple((piece.box, piece.tensors) for piece in pieces))
        self._add(name, Kind(dtype, shape), list_number, tuple(piece.number for piece in pieces))

    def add_unreadable(self, name: str, dtype: DType, shape: tuple[int, ...], why: str) -> None:
        """Add a tensor that cannot be read. Raises ValueError if there is one of its name already.

        It has an empty list of its own, so that nothing is said of it together with others.
        """
        self._add(name, Kind(dtype, shape), len(self.lists), ())
        self.lists.append(())
        self.unreadable[name] = why

    def _add(self, name: str, kind: Kind, list_number: int, numbers: tuple[int, ...]) -> None:
        if name in self.number_of:
            raise ValueError(f"two tensors called {name!r}")
        self.elsewhere[len(self.starts)] = _NOWHERE
        self.add(name, self.kind(kind), ELSEWHERE)
        self.list_of.append(list_number)
        self.numbers.append(numbers)

    @property
    def pieces(self) -> int:
        """How many pieces all tensors have together."""
        return sum(map(len, self.numbers))

    @property
    def files(self) -> tuple[Tensors, ...]:
        """The tensors of each file that has pieces."""
        by_identity = {id(tensors): tensors for pieces in self.lists for _, tensors in pieces}
        return tuple(by_identity.values())

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
        for list_number, numbers in zip(self.list_of, self.numbers):
            pieces = zip(self.lists[list_number], numbers)
            yield [(box, tensors.source(number)) for (box, tensors), number in pieces]
