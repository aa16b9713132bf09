"""The values of an entry of a map file: each is returned with its type known, or MapError raised.

where: the place of the entry in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.names import NamePattern, PatternProblem


def require_known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise MapError for a key that is none of `keys`."""
    unknown = [key for key in table if key not in keys]
    if unknown:
        raise MapError("an entry of the map has an unknown key", expected=", ".join(keys), got=unknown[0], where=where)


def text_of(table: Mapping[str, Any], key: str, where: str) -> str:
    """Return a text that is not empty."""
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise MapError(f"{key} is no text", got=repr(value)[:60], where=where)
    return value


def flag_of(table: Mapping[str, Any], key: str, where: str) -> bool:
    """Return whether something is said to be so; False if nothing is said."""
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise MapError(f"{key} is wrong", expected="true or false", got=repr(value)[:60], where=where)
    return value


def name_of(table: Mapping[str, Any], key: str, where: str) -> NamePattern:
    """Return the name of a tensor, with its captures."""
    try:
        return NamePattern(text_of(table, key, where))
    except PatternProblem as error:
        raise MapError("a name is wrong", got=str(error), where=where) from None
