"""Name the groups and datasets of a native HDF5 shard (`routes`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

from reshard_mpi.formats import structure

NAME = "hdf5"
FORMAT = "reshard_mpi"
VERSION = 2
# The group that holds what is not a tensor, and in it: the placement table, order and strings, types
# and boxes, escaped tensors, sums.
RESERVED = "__reshard_mpi__"
STRATEGY = "strategy"
CONTENTS = "contents"
BOXES = "boxes"
ESCAPED = "tensors"
SUMS = "sums"

# What makes JSON large when it is parsed: three of them for each name, twice as many as tensors may have.
_MARKS = (b'"', b"[", b"{", b",")
_MAX_MARKS = 6 * structure.MAX_TENSORS
# A dataset is found by walking these link names from the root, one by one.
GroupPath = tuple[str, ...]
_UNESCAPED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def routes(names: Iterable[str]) -> dict[str, GroupPath]:
    """Return by name the route of each tensor's dataset: its parts between `/`, or an escaped name where need be.

    HDF5 has no empty names, takes `.` for the group itself, ends a name at NUL, and cannot have a dataset with the name
    of a group. Routes of different names are different, whatever their order.
    """
    plain = {name: tuple(name.split("/")) for name in names}
    folders = {route[:depth] for route in plain.values() if _holdable(route) for depth in range(1, len(route))}
    return {
        name: route if _holdable(route) and route not in folders else (RESERVED, ESCAPED, escape(name))
        for name, route in plain.items()
    }


def where(path: str, route: Iterable[str]) -> str:
    """Return how errors name the object at `route` of the file `path`."""
    return f"{path}, /{'/'.join(route)}"


def escape(name: str) -> str:
    """Return `name` with every byte but letters, digits, `_` and `-` written as `%XX`."""
    return "".join(chr(byte) if byte in _UNESCAPED else f"%{byte:02X}" for byte in name.encode())


def unescape(link: str) -> str:
    """Return the name that `escape` makes `link` of. Raises ValueError if there is none."""
    name = unquote_to_bytes(link).decode(errors="replace")
    if escape(name) != link:
        raise ValueError(f"an escaped tensor name that is damaged: {link!r}")
    return name


def contents_text(names: list[str], strings: Mapping[str, str]) -> bytes:
    """Return the list of contents as JSON: the names of the tensors in order, and the strings."""
    return json.dumps({"tensors": names, "strings": strings}, ensure_ascii=False, separators=(",", ":")).encode()


def contents(data: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the names and strings of a list of contents. Raises ValueError or RecursionError for anything else."""
    if sum(map(data.count, _MARKS)) > _MAX_MARKS:
        raise ValueError("more than names and strings")
    content = json.loads(data)
    names, strings = (content.get(key) for key in ("tensors", "strings")) if isinstance(content, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(strings, dict):
        raise ValueError("no lists of tensors and strings")
    if not all(isinstance(text, str) for text in (*names, *strings, *strings.values())):
        raise ValueError("names and strings that are no text")
    return names, strings


def _holdable(route: GroupPath) -> bool:
    return route[0] != RESERVED and all(part not in ("", ".") and "\0" not in part for part in route)
