"""What both ways between a tree and its text share: the reserved string, its limits, whose a name is."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NoReturn

from reshard_mpi.formats.files import MAX_NAME_BYTES, MAX_STRING_BYTES

MAX_CHARACTERS = MAX_STRING_BYTES // 4
# A value that several parts of a tree share is met as often as it is in it.
MAX_VALUES = 1 << 19
# Trees that people save have a dozen levels.
MAX_DEPTH = 100
DOUBLE = struct.Struct(">d")


class NestError(Exception):
    """What keeps a tree from being names and a text, or these from being a tree: what was met, and what to do."""

    def __init__(self, problem: str, got: str = "", remedy: str = "") -> None:
        super().__init__(problem, got, remedy)
        self.problem = problem
        self.got = got
        self.remedy = remedy


def no_constant(text: str) -> NoReturn:
    """Refuse what Python's parser takes for JSON and is none, such as NaN."""
    raise ValueError(f"{text} is no JSON")


def require_short(prefix: str) -> None:
    """Raise NestError if names that begin so would be too long: many such prefixes are kept at a time."""
    if len(prefix) > MAX_NAME_BYTES:
        raise NestError(
            "its keys joined by dots are too long", f"more than {MAX_NAME_BYTES} characters: {prefix[:60]!r}"
        )


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
