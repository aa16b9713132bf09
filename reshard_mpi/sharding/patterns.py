"""Match names with shell patterns; the first that matches counts (`Patterns`).

They mean what they mean to `fnmatch.fnmatchcase`. But a spec may have a thousand of them, and a checkpoint tens of
thousands of names from anybody, so no name may take long: a pattern is split into its parts once, and a name is
searched once for each part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate

_SPECIAL = re.compile(r"[?\[]")
_ANY = re.compile(r"[*?]")


class Pattern:
    """One pattern. `text`: as it was written."""

    __slots__ = ("_begin", "_end", "_inner", "_needle", "_regex", "_stars", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._regex = re.compile(translate(text)) if _SPECIAL.search(text) else None
        self._stars = text.count("*")
        # Every name that matches has these at its beginning, at its end, and somewhere.
        parts = _literals(text)
        self._begin, self._end = parts[0], parts[-1] if len(parts) > 1 else ""
        self._inner = [part for part in parts[1:-1] if part]
        self._needle = max(self._inner, key=len, default="")

    @property
    def is_plain(self) -> bool:
        """Whether it has no wildcards: it matches its own text only."""
        return self._regex is None and not self._stars

    @property
    def around(self) -> tuple[str, str]:
        """What every name that it matches begins and ends with."""
        return self._begin, self._end

    @property
    def begins_with_any(self) -> bool:
        """Whether it begins with `*`: then it matches every name whose end it matches."""
        return self.text.startswith("*")

    def matches(self, name: str, start: int = 0) -> bool:
        """Tell whether it matches `name[start:]`."""
        if not name.startswith(self._begin, start) or not name.endswith(self._end) or self._needle not in name:
            return False
        if self._regex is not None:
            return self._regex.match(name, start) is not None
        position = start + len(self._begin)
        if not self._stars:
            return position == len(name)
        end = len(name) - len(self._end)
        if position > end:
            return False
        for part in self._inner:
            position = name.find(part, position, end)
            if position < 0:
                return False
            position += len(part)
        return True

    def ends(self, name: str) -> Iterator[int]:
        """Yield the positions after dots in `name` from which on it matches, ascending.

        Not for a pattern that begins with `*`.
        """
        if self.is_plain:
            if name.endswith("." + self.text):
                yield len(name) - len(self.text)
            return
        last = self._last(name)
        dot = name.find("." + self._begin)
        while 0 <= dot < last:
            if self._regex is None or self._regex.match(name, dot + 1) is not None:
                yield dot + 1
            dot = name.find("." + self._begin, dot + 1)

    def _last(self, name: str) -> int:
        """Return a position that lies behind every dot after which it can match; -1 if it matches no end of `name`."""
        if not name.endswith(self._end):
            return -1
        position = len(name) - len(self._end)
        for part in reversed(self._inner):
            position = name.rfind(part, 0, position)
            if position < 0:
                return -1
        return position - len(self._begin)


def _literals(text: str) -> list[str]:
    """Return the texts between the wildcards of a pattern; one with brackets counts as one wildcard in their place."""
    opening, closing = text.find("["), text.rfind("]")
    if opening < 0:
        return _ANY.split(text)
    after = text[closing + 1 :] if closing > opening else ""
    return [*_ANY.split(text[:opening]), *(_ANY.split(after) if "[" not in after else [""])]


def _number(entry: tuple[int, Pattern]) -> int:
    return entry[0]


class Patterns:
    """Patterns in order; the first that matches a name counts."""

    def __init__(self, texts: Sequence[str]) -> None:
        patterns = list(map(Pattern, texts))
        # A spec has many patterns that begin and end alike, so a name is held against these texts first.
        self._wild: dict[tuple[str, str], list[tuple[int, Pattern]]] = {}
        for number, pattern in enumerate(patterns):
            if not pattern.is_plain:
                self._wild.setdefault(pattern.around, []).append((number, pattern))
        self._plain: dict[str, int] = {}
        for number, pattern in enumerate(patterns):
            if pattern.is_plain:
                self._plain.setdefault(pattern.text, number)
        # No pattern after this one is ever the first.
        self._catching = next((number for number, text in enumerate(texts) if text == "*"), len(patterns))

    def first(self, name: str) -> int | None:
        """Return the number of the first pattern that matches `name`; None if none does."""
        plain_number = self._plain.get(name)
        likely = [
            entry
            for (begin, end), entries in self._wild.items()
            if name.startswith(begin) and name.endswith(end)
            for entry in entries
        ]
        for number, pattern in sorted(likely, key=_number):
            if plain_number is not None and number > plain_number:
                break
            if pattern.matches(name):
                return number
        return plain_number

    def ends(self, name: str) -> Iterator[int]:
        """Yield the positions after dots from which on `name` is matched by a pattern other than `*`, ascending.

        The whole name must not be matched so: then no pattern that begins with `*` matches an end of it.
        """
        ends: set[int] = set()
        for (begin, end), entries in self._wild.items():
            if name.endswith(end) and f".{begin}" in name:
                for number, pattern in entries:
                    if number < self._catching and not pattern.begins_with_any:
                        ends.update(pattern.ends(name))
        if self._plain:
            ends.update(end for end in ends_of(name) if self._plain.get(name[end:], self._catching) < self._catching)
        yield from sorted(ends)


def ends_of(name: str) -> Iterator[int]:
    """Yield the positions after the dots of `name`."""
    dot = name.find(".")
    while dot >= 0:
        yield dot + 1
        dot = name.find(".", dot + 1)
