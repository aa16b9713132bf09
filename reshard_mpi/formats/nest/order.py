"""The text of a nest in two parts: its value, and the order of the shard's tensors, in which dictionaries have them.

Formats put tensors into orders of their own, and stages of a pipeline have some of them each. torch numbers the state
of parameters by their order in the model, so this order must outlast all that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard_mpi.formats.files import MAX_NAME_BYTES, MAX_TENSORS
from reshard_mpi.formats.nest.text import NestError, no_constant


class Parsed(NamedTuple):
    """The parts of a text. order: names as `coded` has them, not looked at yet; None if the text has no order."""

    root: Any
    order: Sequence[Any] | None

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of the text; those that it does not have come last, in their own order."""
        names = list(names)
        place = places(self.order, frozenset(names))
        return sorted(names, key=lambda name: place.get(name, len(place)))


def parsed(text: str) -> Parsed:
    """Return the parts of a text. Raises ValueError or RecursionError if it is no JSON, NestError for a wrong order."""
    content = json.loads(text, parse_constant=no_constant)
    if type(content) is not dict or content.keys() != {"nest", "order"}:
        return Parsed(content, None)
    if type(content["order"]) is not list:
        raise NestError("the order of a nest is no list", str(content["order"])[:100])
    return Parsed(content["nest"], content["order"])


def written(root: Any, names: Iterable[str] | None) -> str:
    """Return the text of a nest whose tensors have these names, in order; None: their order is not known."""
    content = root if names is None else {"nest": root, "order": coded(names)}
    return json.dumps(content, separators=(",", ":"))


def coded(names: Iterable[str]) -> list[int | str]:
    """Return for each name how many characters it has in common with the one before, and those that follow."""
    made: list[int | str] = []
    before = ""
    for name in names:
        shared = _shared(before, name)
        made += (shared, name[shared:])
        before = name
    return made


def _shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def decoded(order: Sequence[Any]) -> Iterator[str]:
    """Yield the names of an order. Raises NestError if it is none."""
    name = ""
    if len(order) > 2 * MAX_TENSORS:
        raise NestError("the order of a nest has too many names", f"more than {MAX_TENSORS}")
    for shared, rest in zip(order[::2], order[1::2]):
        if type(shared) is not int or not 0 <= shared <= len(name) or type(rest) is not str:
            raise NestError("the order of a nest has an entry that is no name", str((shared, rest))[:100])
        name = name[:shared] + rest
        if len(name) > MAX_NAME_BYTES:
            raise NestError("the order of a nest has too long a name", repr(name[:60]))
        yield name
    if len(order) % 2:
        raise NestError("the order of a nest has an entry that is no name", str(order[-1])[:100])


def places(order: Sequence[Any] | None, names: frozenset[str]) -> dict[str, int]:
    """Return the places of those names that an order has; none where it is None. Raises NestError for a name twice."""
    place: dict[str, int] = {}
    for name in decoded(order or ()):
        if name in place:
            raise NestError("the order of a nest has a name twice", repr(name)[:100])
        if name in names:
            place[name] = len(place)
    return place


def agree(first: str | None, second: str | None) -> bool:
    """Tell whether two nests are the same; an order that only one of them has counts for nothing."""
    if first is None or second is None or first == second:
        return first == second
    try:
        one, other = parsed(first), parsed(second)
        if written(one.root, None) != written(other.root, None):
            return False
        if one.order is None or other.order is None:
            return True
        ours, theirs = [*decoded(one.order)], [*decoded(other.order)]
    except (ValueError, RecursionError, NestError):
        return False
    in_both = {*ours}.intersection(theirs)
    return [name for name in ours if name in in_both] == [name for name in theirs if name in in_both]
