"""Which rank writes a piece that several ranks hold, where the files of all ranks make up one checkpoint.

It follows from the target strategy and the tensor's name, so that targets can be made apart from each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from reshard_mpi.sharding.placement import Piece, Placement


def written_here(rank: int, names: Iterable[str], placement: Placement, *, loose: bool) -> Iterator[str]:
    """Yield those of the tensors that a rank holds alike of which it is the one that writes its piece.

    placement: of the tensors, with their dimensions. loose: whether no source strategy places them; then ranks may hold
    different values, and all of such are taken from the first rank.
    """
    piece = placement.piece(rank)
    is_mine: dict[int, bool] = {}
    for name in names:
        number = _writer_number(name, placement, loose=loose)
        if number not in is_mine:
            is_mine[number] = placement.nth_holder(piece, number) == rank
        if is_mine[number]:
            yield name


def writer(name: str, piece: Piece, placement: Placement, *, loose: bool) -> int:
    """Return the rank that writes a piece of a tensor. placement, loose: as in `written_here`."""
    return placement.nth_holder(piece, _writer_number(name, placement, loose=loose))


def _writer_number(name: str, placement: Placement, *, loose: bool) -> int:
    """Return which of the ranks that hold a piece writes it, counted in the order of `Placement.holders`."""
    return 0 if loose else zlib.crc32(name.encode("utf-8", "surrogatepass")) % placement.copies
