"""Space between the rows of an array in which axes change places."""

from __future__ import annotations

from reshard_mpi.sharding.box import Box

# Rows of an array in which axes change places lie so much farther apart than they are long. Without it, the elements of
# a column would all fall on a few lines of the processor's cache where rows are as long as a power of two.
_SPACE_BYTES = 64


def with_space(box: Box, itemsize: int) -> Box:
    """Return a box with some space behind each row, unless rows are short."""
    if not box.ndim or (box.stop[-1] - box.start[-1]) * itemsize < _SPACE_BYTES:
        return box
    return Box(box.start, (*box.stop[:-1], box.stop[-1] + max(1, _SPACE_BYTES // itemsize)))
