"""The checksum of HDF5's structures: Jenkins' lookup3 (HDF5 File Format Specification, "Computation of Checksums")."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

CHECKSUM_BYTES = 4
_WORDS_PER_ROUND = 3
_MASK = 0xFFFFFFFF
_SEED = 0xDEADBEEF
# So many blocks of one length are summed side by side by numpy; it is imported for no fewer than the second number.
_MIN_ARRAY = 16
_MIN_IMPORT = 2000


def all_right(blocks: Iterable[bytes]) -> bool:
    """Tell whether the last four bytes of every one of `blocks` are the checksum of those before them."""
    by_length: dict[int, list[bytes]] = {}
    for block in blocks:
        by_length.setdefault(len(block), []).append(block)
    many = sum(map(len, by_length.values())) >= _MIN_IMPORT or "numpy" in sys.modules
    return all(
        _are_right_together(alike, length_bytes) if many and len(alike) >= _MIN_ARRAY else all(map(_is_right, alike))
        for length_bytes, alike in by_length.items()
    )


def _is_right(block: bytes) -> bool:
    length_bytes = len(block) - CHECKSUM_BYTES
    if length_bytes <= 0:
        return False
    rounds = _rounds(length_bytes)
    words = struct.unpack(f"<{_WORDS_PER_ROUND * rounds}I", block[:-CHECKSUM_BYTES].ljust(12 * rounds, b"\0"))
    return bool(_sum(words, length_bytes) == int.from_bytes(block[-CHECKSUM_BYTES:], "little"))


def _are_right_together(blocks: Sequence[bytes], length_bytes: int) -> bool:
    import numpy as np

    length_bytes -= CHECKSUM_BYTES
    if length_bytes <= 0:
        return False
    padding = bytes(12 * _rounds(length_bytes) - length_bytes)
    content = np.frombuffer(b"".join(block[:-CHECKSUM_BYTES] + padding for block in blocks), "<u4")
    expected = np.frombuffer(b"".join(block[-CHECKSUM_BYTES:] for block in blocks), "<u4")
    words = list(np.ascontiguousarray(content.reshape(len(blocks), -1).T))
    return bool((_sum(words, length_bytes) == expected).all())


def _rounds(length_bytes: int) -> int:
    return -(-length_bytes // 12)


def _sum(words: Sequence[Any], length_bytes: int) -> Any:
    """Return the checksum of so many bytes as `words`: numbers, or arrays of them for many blocks at once."""
    a = b = c = _SEED + length_bytes & _MASK
    last = len(words) - _WORDS_PER_ROUND
    for at in range(0, last, _WORDS_PER_ROUND):
        a, b, c = a + words[at] & _MASK, b + words[at + 1] & _MASK, c + words[at + 2] & _MASK
        a = (a - c & _MASK) ^ (c << 4 & _MASK | c >> 28)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ (a << 6 & _MASK | a >> 26)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ (b << 8 & _MASK | b >> 24)
        b = b + a & _MASK
        a = (a - c & _MASK) ^ (c << 16 & _MASK | c >> 16)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ (a << 19 & _MASK | a >> 13)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ (b << 4 & _MASK | b >> 28)
        b = b + a & _MASK
    a, b, c = a + words[last] & _MASK, b + words[last + 1] & _MASK, c + words[last + 2] & _MASK
    c = (c ^ b) - (b << 14 & _MASK | b >> 18) & _MASK
    a = (a ^ c) - (c << 11 & _MASK | c >> 21) & _MASK
    b = (b ^ a) - (a << 25 & _MASK | a >> 7) & _MASK
    c = (c ^ b) - (b << 16 & _MASK | b >> 16) & _MASK
    a = (a ^ c) - (c << 4 & _MASK | c >> 28) & _MASK
    b = (b ^ a) - (a << 14 & _MASK | a >> 18) & _MASK
    return (c ^ b) - (b << 24 & _MASK | b >> 8) & _MASK
