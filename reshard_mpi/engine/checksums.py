"""Sum tensors by CRC-32: of a whole from the sums of its parts, in any order; of shards and sources (`sum_shard`).

A part's sum is the CRC-32 of the whole tensor's row-major bytes, with zeros in place of what the part does not hold.
CRC-32 is affine over bits, so the sums of disjoint parts, each less the sum of all zeros, add up (by exclusive or) to
that of the whole, `zlib.crc32(whole.tobytes())`. So neither layout nor format matters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import Stream, read_region
from reshard_mpi.formats.locations import ByteRanges, Span
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.chunk_reads import held_tensor
from reshard_mpi.planning.rank_plan import Limits, RankPlan, ReadItem, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs, Strides, run_length

if TYPE_CHECKING:
    import numpy as np

    Sums = np.ndarray[Any, np.dtype[np.uint32]]

_ONES = 0xFFFFFFFF
# Up to this number, runs are put together one by one: it takes less time than to begin any of the ways for more of
# them.
_FEW_RUNS = 64
# Of more, those shorter than this are summed all at once, byte after byte, by numpy; others one by one with tables.
_SHORT_BYTES = 48
# Runs are only a few different distances apart; the tables of one distance take 40 KiB.
_KEPT_STEPS = 64


class ContiguousPart(NamedTuple):
    """The place of a part whose bytes are one run of the row-major bytes of its whole tensor."""

    length_bytes: int
    bytes_behind: int  # of the whole tensor, behind the part
    whole_bytes: int

    @classmethod
    def of(cls, box: Box, global_shape: tuple[int, ...], itemsize_bytes: int) -> ContiguousPart | None:
        """Return the place of a part of a tensor; None if it is several runs."""
        whole = Box.whole(global_shape)
        if run_length(box, box, whole) != box.size:
            return None
        behind = whole.size - whole.offset_of(box) - box.size
        return cls(box.size * itemsize_bytes, behind * itemsize_bytes, whole.size * itemsize_bytes)


class PartSum:
    """The sum of one part of a tensor, to which blocks are added as they are read.

    Attributes:
        whole: the box of the whole tensor. The blocks must be disjoint.
    """

    def __init__(self, whole: Box, itemsize_bytes: int) -> None:
        self._whole = whole
        self._itemsize = itemsize_bytes
        self._size_bytes = whole.size * itemsize_bytes
        self._state = 0

    @property
    def value(self) -> int:
        """The sum of what has been added so far."""
        return self._state ^ sum_of_zeros(self._size_bytes)

    def add(self, block: Box, data: memoryview) -> None:
        """Add the elements of `block`, whose row-major bytes are `data`."""
        for runs in Strides.between(block, block, block, self._whole).runs(self._itemsize):
            end = runs.target_offset + runs.target_span
            self._state ^= _shifted(_sum_of_runs(data, runs), self._size_bytes - end)


def sum_of_whole(parts: Iterable[int], size_bytes: int) -> int:
    """Return the CRC-32 of a tensor of the given size from the sums of the disjoint parts that make it up."""
    zeros = sum_of_zeros(size_bytes)
    state = zeros
    for part in parts:
        state ^= part ^ zeros
    return state


def crc_of_pieces(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of pieces that follow one another. pieces: the CRC-32 of each, and its length in bytes."""
    crc = 0
    for piece_crc, length_bytes in pieces:
        crc = crc32_combine(crc, piece_crc, length_bytes)
    return crc


def sum_of_contiguous(crc: int, place: ContiguousPart) -> int:
    """Return the sum of a part that is one run of its whole tensor, from the CRC-32 of its bytes."""
    state = _shifted(crc ^ sum_of_zeros(place.length_bytes), place.bytes_behind)
    return state ^ sum_of_zeros(place.whole_bytes)


def crc_of_contiguous(value: int, place: ContiguousPart) -> int:
    """Return the CRC-32 of the bytes of a part that is one run of its whole tensor, from its sum."""
    state = value ^ sum_of_zeros(place.whole_bytes)
    # A remainder is the same again after as many bits as there are remainders but 0, and so after as many bytes.
    return _shifted(state, _ONES - place.bytes_behind % _ONES) ^ sum_of_zeros(place.length_bytes)


def has_short_runs(box: Box, whole: Box, itemsize_bytes: int) -> bool:
    """Tell whether a part's runs in its whole tensor are short and numerous enough to load numpy for them."""
    length = run_length(box, box, whole)
    return length * _FEW_RUNS < box.size and length * itemsize_bytes < _SHORT_BYTES


def sum_of_zeros(size_bytes: int) -> int:
    """Return the CRC-32 of a number of zero bytes."""
    return _shifted(_ONES, size_bytes) ^ _ONES


def _shifted(state: int, count_bytes: int) -> int:
    """Return the remainder `state` after `count_bytes` more zero bytes, which may be more than any file has."""
    return crc32_combine(state, 0, count_bytes % _ONES)  # the period of CRC-32


def _remainder(data: memoryview) -> int:
    """Return the remainder of `data` from state 0: CRC-32 without its inversions, and therefore linear."""
    return crc32(data, _ONES) ^ _ONES


def _sum_of_runs(data: memoryview, runs: Runs) -> int:
    """Return the remainder of all runs, with as many zero bytes between them as lie there in the whole tensor."""
    first, length, step, apart = runs.source_offset, runs.length, runs.source_step, runs.target_step
    if runs.repeats == 1 or length == step == apart:
        return _remainder(data[first : first + runs.source_span])
    ends = range(first + length, first + length + runs.repeats * step, step)
    if runs.repeats <= _FEW_RUNS:
        state = 0
        for end in ends:
            state = _shifted(state, apart) ^ _remainder(data[end - length : end])
        return state
    if length < _SHORT_BYTES:
        import numpy as np

        content = np.frombuffer(data, np.uint8, runs.source_span, first)
        rows = np.lib.stride_tricks.as_strided(content, (runs.repeats, length), (step, 1))
        return _joined(_short_remainders(rows), apart)
    low, second, third, high = _gap(apart - length)
    crc = _ONES
    for end in ends:
        crc = low[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ high[crc >> 24]
        crc = crc32(data[end - length : end], crc)
    return crc ^ _ONES


@lru_cache(_KEPT_STEPS)
def _gap(count_bytes: int) -> tuple[list[int], ...]:
    """Return four tables, for the low to the high byte of a CRC-32: its part after `count_bytes` zero bytes."""
    tables = _after_zeros(count_bytes)
    inversions = _shifted(_ONES, count_bytes) ^ _ONES
    return (*tables[:3], [value ^ inversions for value in tables[3]])


def _after_zeros(count_bytes: int) -> list[list[int]]:
    """Return four tables, for the low to the high byte of a remainder: its part after `count_bytes` zero bytes."""
    return [_combined([_shifted(1 << bit, count_bytes) for bit in range(low, low + 8)]) for low in range(0, 32, 8)]


def _combined(bits: list[int]) -> list[int]:
    """Return a table of 256 values: entry n is the exclusive or of the values (of eight) whose bits are set in n."""
    table = [0]
    for value in bits:
        table += [value ^ other for other in table]
    return table


def _short_remainders(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> Sums:
    import numpy as np

    table = _byte_table()
    states = np.zeros(len(rows), np.uint32)
    for column in np.ascontiguousarray(rows.T):
        states = table[(states ^ column) & 0xFF] ^ (states >> np.uint32(8))
    return states


def _joined(remainders: Sums, apart_bytes: int) -> int:
    """Combine the remainders of equally long pieces that begin `apart_bytes` apart."""
    import numpy as np

    while len(remainders) > 1:
        if len(remainders) % 2:
            remainders = np.concatenate((np.zeros(1, np.uint32), remainders))  # nothing before the first
        low, second, third, high = _tables(apart_bytes)
        left = remainders[0::2]
        remainders = (
            low[left & 0xFF] ^ second[left >> 8 & 0xFF] ^ third[left >> 16 & 0xFF] ^ high[left >> 24]
        ) ^ remainders[1::2]
        apart_bytes *= 2
    return int(remainders[0])


@lru_cache(_KEPT_STEPS)
def _tables(count_bytes: int) -> list[Sums]:
    import numpy as np

    return [np.array(table, np.uint32) for table in _after_zeros(count_bytes)]


@lru_cache(1)
def _byte_table() -> Sums:
    """Return the remainder of each single byte."""
    import numpy as np

    return np.array(_combined([_shifted(1 << bit, 1) for bit in range(8)]), np.uint32)


class Summed(NamedTuple):
    """The sum of one tensor's part. expected: by its sources; None if these were not read. found: by the shard."""

    tensor: TensorSpec
    expected: int | None
    found: int


class Shown(NamedTuple):
    """How much of a target is shown to be its sources' by other means than reading these."""

    spans: Sequence[Span] = ()  # of the file, ascending
    sums: Mapping[str, int] = {}  # of whole tensors, by name; they need not be in the file


NOTHING_SHOWN = Shown()


def sum_shard(
    plan: RankPlan,
    target: Manifest,
    *,
    span: Span | None,
    limits: Limits,
    on_bytes: OnBytes = lambda _: None,
    shown: Shown = NOTHING_SHOWN,
) -> Iterator[Summed]:
    """Yield the sums of every tensor of `plan`, by its sources and by the shard `target`.

    Args:
        span: only elements that begin in this range of the target file, and tensors without elements; None: all.
        on_bytes: called with the number of bytes just summed; each byte of the target counts once, half of it for its
            source.
        shown: for this, sources are not read.

    Raises ShardError if a file cannot be read.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    with Files() as files:
        for tensor in plan.tensors:
            spec, entry = tensor.spec, target.tensors[tensor.spec.name]
            if (value := shown.sums.get(spec.name)) is not None:
                on_bytes(spec.size_bytes)
                yield Summed(spec, value, value)
                continue
            first, last = (0, spec.box.size) if span is None else _elements_within(entry, span)
            if first == last and spec.box.size:
                continue  # no element begins in the span; a tensor without elements belongs to every span
            own, limit = held_tensor(spec, target).reads, max(1, len(buffer) // spec.dtype.itemsize_bytes)
            of_shown, of_others = list[Box](), list[Box]()
            for start, stop, is_shown in _divided(entry, first, last, shown.spans):
                (of_shown if is_shown else of_others).extend(spec.box.blocks(limit, start, stop))
            expected = _sum(files, spec, tensor.reads, of_others, buffer, limits, lambda size: on_bytes(size // 2))
            actual = _sum(files, spec, own, of_others, buffer, limits, lambda size: on_bytes(size - size // 2))
            alike = _sum(files, spec, own, of_shown, buffer, limits, on_bytes)
            whole_bytes = Box.whole(spec.global_shape).size * spec.dtype.itemsize_bytes
            yield Summed(spec, *(sum_of_whole([value, alike], whole_bytes) for value in (expected, actual)))


def _divided(entry: TensorEntry, first: int, last: int, shown: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges of elements that lie in spans of the file, or not: the first, the one after the last, and which."""
    assert isinstance(entry.source, ByteRanges)
    itemsize, start_bytes = entry.dtype.itemsize_bytes, 0
    for part in entry.source.ranges if shown else ():
        end = part.offset_bytes + part.length_bytes
        for low, high in shown[max(0, bisect_right(shown, (part.offset_bytes, end)) - 1) :]:
            if low >= end:
                break
            skipped, stop = max(low - part.offset_bytes, 0), min(high, end) - part.offset_bytes
            inner = max(first, -(-(start_bytes + skipped) // itemsize)), min(last, (start_bytes + stop) // itemsize)
            if inner[0] < inner[1]:
                yield first, inner[0], False
                yield *inner, True
                first = inner[1]
        start_bytes += part.length_bytes
    yield first, last, False


def sum_tensors(tensors: Iterable[TensorPlan], *, limits: Limits, on_bytes: OnBytes) -> Iterator[Summed]:
    """Yield the sums of planned tensors. Raises ShardError if a file cannot be read.

    Args:
        on_bytes: called with the number of bytes just summed.
    """
    buffer = memoryview(bytearray(limits.buffer_bytes))
    with Files() as files:
        for tensor in tensors:
            spec = tensor.spec
            blocks = spec.box.blocks(max(1, len(buffer) // spec.dtype.itemsize_bytes))
            yield Summed(spec, None, _sum(files, spec, tensor.reads, blocks, buffer, limits, on_bytes))


def takes_numpy(spec: TensorSpec, entry: TensorEntry) -> bool:
    """Tell whether numpy is loaded to sum a tensor of a shard."""
    return not entry.is_as_stored or has_short_runs(spec.box, Box.whole(spec.global_shape), spec.dtype.itemsize_bytes)


def _elements_within(entry: TensorEntry, span: Span) -> tuple[int, int]:
    """Return the first element that begins in a span of the file, and the one after the last."""
    assert isinstance(entry.source, ByteRanges)
    itemsize = entry.dtype.itemsize_bytes
    start, stop = Stream(entry.source).within(span)
    return -(-start // itemsize), -(-stop // itemsize)


def _sum(
    files: Files,
    spec: TensorSpec,
    reads: Sequence[ReadItem],
    blocks: Iterable[Box],
    buffer: memoryview,
    limits: Limits,
    on_bytes: OnBytes,
) -> int:
    """Return the sum of the elements in `blocks`, read by `reads`. on_bytes: called with the size of each block."""
    itemsize = spec.dtype.itemsize_bytes
    summed = PartSum(Box.whole(spec.global_shape), itemsize)
    for block in blocks:
        for part in meeting(reads, block):
            region = part.target_region
            content = buffer[: region.size * itemsize]
            read_region(files, part, region, content, limits)
            summed.add(region, content)
        on_bytes(block.size * itemsize)
    return summed.value
