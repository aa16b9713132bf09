"""The checksum of HDF5's structures: Jenkins' lookup3 (HDF5 File Format Specification, "Computation of Checksums").

Blocks of one length are summed side by side: a long integer holds a number of each in a lane of 64 bits, so that one
operation of Python does the same for hundreds of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

CHECKSUM_BYTES = 4
_WORD_BYTES = 4
_LANE_BITS = 64
_MASK = 0xFFFFFFFF
# Added before something is taken away, so that nothing is borrowed from the next lane.
_BORROW = 1 << 32
_SEED = 0xDEADBEEF


def all_right(blocks: Iterable[bytes]) -> bool:
    """Tell whether the last four bytes of every one of `blocks` are the checksum of those before them."""
    by_length: dict[int, list[bytes]] = {}
    for block in blocks:
        by_length.setdefault(len(block), []).append(block)
    return all(
        length_bytes > CHECKSUM_BYTES
        and lookup3([block[:-CHECKSUM_BYTES] for block in alike])
        == [int.from_bytes(block[-CHECKSUM_BYTES:], "little") for block in alike]
        for length_bytes, alike in by_length.items()
    )


def lookup3(blocks: Sequence[bytes]) -> list[int]:
    """Return the checksum of each of `blocks`, which have one length, not 0."""
    length_bytes = len(blocks[0])
    rounds = -(-length_bytes // (3 * _WORD_BYTES))
    padding = bytes(3 * _WORD_BYTES * rounds - length_bytes)
    # An even number of blocks: words of 32 bits become lanes of 64 as the even ones and the odd ones.
    count = len(blocks) + len(blocks) % 2
    data = b"".join(block + padding for block in blocks) + bytes((count - len(blocks)) * 3 * _WORD_BYTES * rounds)
    columns = memoryview(data).cast("I")
    ones = _repeated(1, count)
    evens = _repeated(_MASK, count // 2)
    half = _LANE_BITS * (count // 2)

    def word(number: int) -> int:
        packed = int.from_bytes(columns[number :: 3 * rounds].tobytes(), "little")
        return packed & evens | (packed >> 32 & evens) << half

    total = _sum([word(number) for number in range(3 * rounds)], _SEED + length_bytes & _MASK, ones)
    found = struct.unpack(f"<{count}Q", total.to_bytes(count * _LANE_BITS // 8, "little"))
    return [found[at // 2 + (count // 2 if at % 2 else 0)] for at in range(len(blocks))]


def _repeated(number: int, count: int) -> int:
    return int.from_bytes(number.to_bytes(_LANE_BITS // 8, "little") * count, "little")


def _sum(words: Sequence[int], seed: int, ones: int) -> int:
    """Return the checksums, in lanes, of the blocks whose words `words` are, each in the lane of its block."""
    mask, borrow = _MASK * ones, _BORROW * ones
    a = b = c = seed * ones
    last = len(words) - 3
    for at in range(0, last, 3):
        a, b, c = a + words[at] & mask, b + words[at + 1] & mask, c + words[at + 2] & mask
        a = (a + borrow - c & mask) ^ ((c << 4 | c >> 28) & mask)
        c = c + b & mask
        b = (b + borrow - a & mask) ^ ((a << 6 | a >> 26) & mask)
        a = a + c & mask
        c = (c + borrow - b & mask) ^ ((b << 8 | b >> 24) & mask)
        b = b + a & mask
        a = (a + borrow - c & mask) ^ ((c << 16 | c >> 16) & mask)
        c = c + b & mask
        b = (b + borrow - a & mask) ^ ((a << 19 | a >> 13) & mask)
        a = a + c & mask
        c = (c + borrow - b & mask) ^ ((b << 4 | b >> 28) & mask)
        b = b + a & mask
    a, b, c = a + words[last] & mask, b + words[last + 1] & mask, c + words[last + 2] & mask
    c = (c ^ b) + borrow - ((b << 14 | b >> 18) & mask) & mask
    a = (a ^ c) + borrow - ((c << 11 | c >> 21) & mask) & mask
    b = (b ^ a) + borrow - ((a << 25 | a >> 7) & mask) & mask
    c = (c ^ b) + borrow - ((b << 16 | b >> 16) & mask) & mask
    a = (a ^ c) + borrow - ((c << 4 | c >> 28) & mask) & mask
    b = (b ^ a) + borrow - ((a << 14 | a >> 18) & mask) & mask
    return (c ^ b) + borrow - ((b << 24 | b >> 8) & mask) & mask
