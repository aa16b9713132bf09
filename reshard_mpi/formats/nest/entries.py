"""Look into a nest: dictionaries, their entries, items of lists (`entries_of`, `pairs_of`, `dictionaries_in`).

Its text may be anything that is JSON: what is no dictionary, or has no such key, is passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))


def entries_of(node: Any) -> list[Any] | None:
    """Return the entries of a dictionary of a nest; None if it is none."""
    entries = node.get("dict") if isinstance(node, dict) else None
    is_dict = isinstance(entries, list) and all(isinstance(entry, list) and entry for entry in entries)
    return entries if is_dict else None


def value_of(node: Any, key: str) -> Any:
    """Return the value of a key in a dictionary of a nest; None if it has none."""
    for entry in entries_of(node) or ():
        if len(entry) == 2 and entry[0] == key:
            return entry[1]
    return None


def entries_below(node: Any, key: str) -> list[Any] | None:
    """Return the entries of a dictionary in a dictionary: none if it is not there, None if something else is.

    DCP of torch leaves out dictionaries that hold nothing, such as the state of an optimizer that keeps none.
    """
    own = entries_of(node)
    if own is None or all(entry[0] != key for entry in own):
        return None if own is None else []
    return entries_of(value_of(node, key))


def pairs_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys that are texts or numbers and values of a dictionary, or places and items of a list or tuple."""
    if isinstance(node, dict) and isinstance(node.get("tuple"), list):
        node = node["tuple"]
    if isinstance(node, dict):
        entries = node.get("dict")
        pairs = [entry for entry in entries if isinstance(entry, list)] if isinstance(entries, list) else []
        return [(entry[0], entry[1]) for entry in pairs if len(entry) == 2 and type(entry[0]) in (str, int)]
    return [*enumerate(node)] if isinstance(node, list) else []


def dictionaries_in(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries in a part of a nest, each behind the beginning of the names in it."""
    if entries_of(node) is not None:
        yield path, node
    for key, value in pairs_of(node):
        yield from dictionaries_in(value, f"{path}{key}.")


def parts_in(node: Any, path: str, without: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries and lists of a nest, each behind what names in it begin with. Some entries are left out.

    Args:
        without: the entries, as `id` tells them.
    """
    if pairs_of(node) or entries_of(node) is not None:
        yield path, node
    left_out = {entry[0] for entry in entries_of(node) or () if id(entry) in without}
    for key, value in pairs_of(node):
        if key not in left_out:
            yield from parts_in(value, f"{path}{key}.", without)


def lists_by_group(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of lists that schedulers have by groups of parameters."""
    for key, value in pairs_of(node):
        if isinstance(key, str) and key in BY_GROUP:
            yield f"{path}{key}", value
        else:
            yield from lists_by_group(value, f"{path}{key}.")
