"""Whole numbers in the checksum that MindSpore has of a safetensors file.

One without dimensions counts as so many bytes of 0, since that is what Python's `bytes(v)` makes of it; so one that is
negative, or larger than memory, leaves the file without a checksum.
"""

from __future__ import annotations

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.dtypes import DType, numbers
from reshard_mpi.units import GIB

# MindSpore takes as much memory as the number says.
_MOST = 4 * GIB


class UncountableError(Exception):
    """A whole number that does not count as so many bytes."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def refusal(self, where: str) -> TargetError:
        """Return what the user is told if a file with this tensor is to have a checksum."""
        return TargetError(
            f"{self.name!r} has no place in the checksum that MindSpore checks",
            expected="a whole number from 0 to 2^32, since it counts as so many bytes",
            got=str(self.value),
            where=where,
            remedy="leave out --crc, write it as ckpt (--to), or leave the tensor out (--exclude)",
        )


def is_counted(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor counts as so many bytes; others are summed as they are."""
    return not shape and dtype.name.startswith(("int", "uint"))


def counted_bytes(name: str, content: bytes, dtype: DType) -> int:
    """Return the value of a tensor that is counted. Raises UncountableError if it is none that can be."""
    value: int = numbers(content, dtype)[0]
    if not 0 <= value <= _MOST:
        raise UncountableError(name, value)
    return value
