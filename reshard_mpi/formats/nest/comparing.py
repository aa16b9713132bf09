"""Where two nests differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from reshard_mpi.formats.nest.order import parsed
from reshard_mpi.formats.nest.text import NestError

_MAX_QUOTED = 60


def first_difference(first: str | None, second: str | None) -> str:
    """Say which value differs first between two texts of nests, of which None has no values; nothing if none does."""
    try:
        ours, theirs = ({} if text is None else dict(_values(parsed(text).root, "")) for text in (first, second))
    except (NestError, ValueError, TypeError, LookupError, RecursionError):
        return "" if first == second else "the text of a nest is damaged"
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return f"{name or 'the whole'} ({_quoted(ours.get(name))} and {_quoted(theirs.get(name))})"
    return ""


def _values(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the values of a nest that are no tensors, by their names: keys and places joined by dots."""
    if isinstance(value, dict) and isinstance(entries := value.get("dict"), list) and len(value) == 1:
        for key, *held in entries:
            if held:
                yield from _values(held[0], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) or (isinstance(value, dict) and [*value] == ["tuple"]):
        for place, item in enumerate(value if isinstance(value, list) else value["tuple"]):
            yield from _values(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, json.dumps(value)


def _quoted(text: str | None) -> str:
    if text is None:
        return "not there"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
