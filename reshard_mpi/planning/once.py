"""Which rank writes a piece that several ranks hold, where the files of all ranks make up one checkpoint.

It follows from the target strategy and the tensor's name, so that targets can be made apart from each other.
"""

from __future__ import annotations

import zlib

from reshard_mpi.sharding.placement import Placement


def is_writer(rank: int, name: str, placements: tuple[Placement, ...], held_by: Placement, *, loose: bool) -> bool:
    """Tell whether a rank is the one that writes its piece of a tensor.

    placements: of the tensor, one for each group of stages that cut it alike; the pieces of the first make it up.
    held_by: the one of them by which the rank holds it, with the tensor's dimensions. loose: whether no source strategy
    places the tensor; then ranks may hold different values, and all of such are taken from the first rank.
    """
    if rank // held_by.stage_size not in placements[0].stages:
        return False
    number = 0 if loose else zlib.crc32(name.encode("utf-8", "surrogatepass")) % held_by.copies
    return held_by.nth_holder(held_by.piece(rank), number) == rank
