"""Which rank writes a piece that several ranks hold, where the files of all ranks make up one checkpoint.

It follows from the target strategy and the tensor's name, so that targets can be made apart from each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from reshard_mpi.sharding.placement import Placement


def written_here(rank: int, names: Iterable[str], placement: Placement, *, loose: bool) -> Iterator[str]:
    """Yield those of the tensors that a rank holds alike of which it is the one that writes its piece.

    placement: of the tensors, with their dimensions. loose: whether no source strategy places them; then ranks may hold
    different values, and all of such are taken from the first rank.
    """
    piece, copies = placement.piece(rank), placement.copies
    is_mine: dict[int, bool] = {}
    for name in names:
        number = 0 if loose else zlib.crc32(name.encode("utf-8", "surrogatepass")) % copies
        if number not in is_mine:
            is_mine[number] = placement.nth_holder(piece, number) == rank
        if is_mine[number]:
            yield name
