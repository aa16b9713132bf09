"""Patterns of names, as those of a shell: `*` any text, `?` any character, `[...]` one of these.

They mean what they mean to `fnmatch.fnmatchcase`. But a spec may have a thousand of them, and a checkpoint tens of
thousands of names that somebody else has made, so that no name must take long: a pattern is taken apart once, and a
name is looked through once for each part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate

_SPECIAL = re.compile(r"[?\[]")
_ANY = re.compile(r"[*?]")


class Pattern:
    """One pattern. `text` is what it was made of."""

    __slots__ = ("_begin", "_end", "_inner", "_needle", "_regex", "_stars", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._regex = re.compile(translate(text)) if _SPECIAL.search(text) else None
        self._stars = text.count("*")
        # What every name has that it matches: at its beginning, at its end, and in any place.
        parts = _literals(text)
        self._begin, self._end = parts[0], parts[-1] if len(parts) > 1 else ""
        self._inner = [part for part in parts[1:-1] if part]
        self._needle = max(self._inner, key=len, default="")

    @property
    def is_plain(self) -> bool:
        """Whether it matches itself and nothing else."""
        return self._regex is None and not self._stars

    @property
    def begins_with_any(self) -> bool:
        """Whether it begins with `*`: then it matches a name if it matches an end of it."""
        return self.text.startswith("*")

    def matches(self, name: str, start: int = 0) -> bool:
        """Tell whether it matches what of `name` comes from `start` on."""
        if not name.startswith(self._begin, start) or not name.endswith(self._end) or self._needle not in name:
            return False
        if self._regex is not None:
            return self._regex.match(name, start) is not None
        place = start + len(self._begin)
        if not self._stars:
            return place == len(name)
        end = len(name) - len(self._end)
        if place > end:
            return False
        for part in self._inner:
            place = name.find(part, place, end)
            if place < 0:
                return False
            place += len(part)
        return True

    def ends(self, name: str) -> Iterator[int]:
        """Yield the places after dots in `name` from which on it matches, ascending. Not if it begins with `*`."""
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
        """Return what is beyond all dots after which it can match, as far as what follows its beginning tells."""
        if not name.endswith(self._end):
            return -1
        place = len(name) - len(self._end)
        for part in reversed(self._inner):
            place = name.rfind(part, 0, place)
            if place < 0:
                return -1
        return place - len(self._begin)


def _literals(text: str) -> list[str]:
    """Return what lies between the wildcards of a pattern, outside of brackets."""
    opened, closed = text.find("["), text.rfind("]")
    if opened < 0:
        return _ANY.split(text)
    after = text[closed + 1 :] if closed > opened else ""
    return [*_ANY.split(text[:opened]), *(_ANY.split(after) if "[" not in after else [""])]


class Patterns:
    """Patterns of which the first that matches a name counts."""

    def __init__(self, texts: Sequence[str]) -> None:
        every = list(map(Pattern, texts))
        self._wild = [(at, pattern) for at, pattern in enumerate(every) if not pattern.is_plain]
        self._plain: dict[str, int] = {}
        for at, pattern in enumerate(every):
            if pattern.is_plain:
                self._plain.setdefault(pattern.text, at)
        # What comes after it matches nothing.
        self._catching = next((at for at, pattern in self._wild if pattern.text == "*"), len(every))

    def first(self, name: str) -> int | None:
        """Return the number of the first that matches `name`; None if none does."""
        plain = self._plain.get(name)
        for at, pattern in self._wild:
            if plain is not None and at > plain:
                break
            if pattern.matches(name):
                return at
        return plain

    def ends(self, name: str) -> Iterator[int]:
        """Yield the places after dots from which on `name` is matched by more than `*`, the longest end first.

        The whole name must not be: then no pattern that begins with `*` matches an end of it.
        """
        found: set[int] = set()
        for at, pattern in self._wild:
            if at < self._catching and not pattern.begins_with_any:
                found.update(pattern.ends(name))
        if self._plain:
            found.update(end for end in ends_of(name) if self._plain.get(name[end:], self._catching) < self._catching)
        yield from sorted(found)


def ends_of(name: str) -> Iterator[int]:
    """Yield the places after the dots of `name`."""
    at = name.find(".")
    while at >= 0:
        yield at + 1
        at = name.find(".", at + 1)
