"""What is told of reading a region before it is read: never that numpy can be done without where it cannot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.engine import read
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.rank_plan import ReadItem
from reshard_mpi.sharding.box import Box


@st.composite
def placed(draw: st.DrawFn) -> tuple[ReadItem, Box]:
    """Draw a copy of a region, and the box that it is brought to, which holds it."""
    start, stop, before, after = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, 4))
        start.append(low)
        stop.append(low + draw(st.integers(1, 40)))
        before.append((draw(st.integers(0, low)), draw(st.integers(0, low))))
        after.append((draw(st.integers(0, 5)), draw(st.integers(0, 5))))
    source, place = (
        Box(tuple(pair[side] for pair in before), tuple(high + pair[side] for high, pair in zip(stop, after)))
        for side in (0, 1)
    )
    size_bytes = 4 * source.size
    entry = TensorEntry("w", BY_NAME["int32"], source.shape, ByteRanges((ByteRange("w", 0, size_bytes),)))
    return ReadItem(0, entry, source, Box(tuple(start), tuple(stop))), place


@many(150)
@given(drawn=placed(), buffer_bytes=st.integers(4, 1 << 14))
def test_numpy_is_announced(drawn: tuple[ReadItem, Box], buffer_bytes: int) -> None:
    item, place = drawn
    if read.takes_numpy(item, place, buffer_bytes):
        return
    for block in place.blocks(buffer_bytes // 4):
        part = item.meeting(block)
        if part is not None:
            strides = part.strides(block)
            assert strides.size <= read._FEW_RUNS * strides.run_length
