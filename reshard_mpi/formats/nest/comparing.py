"""Where two nests differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from reshard_mpi.formats.nest.order import parsed

_MAX_QUOTED = 60


def first_difference(first: str | None, second: str | None) -> str:
    """Say which value differs first between two texts of nests, of which None has no values; nothing if none does."""
    ours, theirs = ({} if text is None else dict(_values(parsed(text).root, "")) for text in (first, second))
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return f"{name or 'the whole'} ({_quoted(ours.get(name))} and {_quoted(theirs.get(name))})"
    return ""


def _values(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the values of a nest that are no tensors, by their names: keys and places joined by dots."""
    if isinstance(value, dict) and isinstance(entries := value.get("dict"), list) and len(value) == 1:
        for entry in entries:
            if not (isinstance(entry, list) and entry):  # a nest that nobody has made again yet may be anything
                yield name, json.dumps(value)
            elif len(entry) > 1:
                yield from _values(entry[1], f"{name}.{entry[0]}" if name else str(entry[0]))
        return
    items = value["tuple"] if isinstance(value, dict) and [*value] == ["tuple"] else value
    if isinstance(items, list):
        for place, item in enumerate(items):
            yield from _values(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, json.dumps(value)


def _quoted(text: str | None) -> str:
    if text is None:
        return "not there"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
