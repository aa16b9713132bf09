"""What both ways between a tree and its text share: the reserved string, its limits, whose a name is."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from reshard_mpi.formats.files import MAX_STRING_BYTES

# The string of a shard that holds the text.
NEST = "__reshard_mpi_nest__"
MAX_CHARACTERS = MAX_STRING_BYTES // 4
# A value that several parts of a tree share is met as often as it is in it.
MAX_VALUES = 1 << 19
# Trees that people save have a dozen levels.
MAX_DEPTH = 100
DOUBLE = struct.Struct(">d")


class NestError(Exception):
    """What keeps a tree from being names and a text, or these from being a tree: the problem, and what was met."""

    def __init__(self, problem: str, got: str = "") -> None:
        super().__init__(problem, got)
        self.problem = problem
        self.got = got


def owner_of(name: str, paths: Mapping[str, int]) -> int | None:
    """Return the number of the dictionary with the longest path that a name begins with; None if there is none.

    paths: of the dictionaries that take tensors without an entry, each with a dot behind it; that of the root is empty.
    """
    at = name.rfind(".")
    while at >= 0:
        number = paths.get(name[: at + 1])
        if number is not None:
            return number
        at = name.rfind(".", 0, at)
    return paths.get("")
