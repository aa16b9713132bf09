"""Text for people, in which nothing acts on a terminal or looks like something else; numbers, and names in their order.

Names of tensors, files and parameters may hold anything. Control characters (even single bytes above 127) move the
cursor, change titles and colours, and forge lines; direction marks reverse names; half of a surrogate pair cannot be
written at all. Whatever Python calls unprintable is shown as Python writes it: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MAX_COMPARED = 50_000


def one_line(text: str) -> str:
    """Return `text` with all unprintable characters escaped, line breaks too."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def lines(text: str) -> str:
    """Return `text` with all unprintable characters escaped but line breaks, which are our own."""
    return "\n".join(map(one_line, text.split("\n")))


def counted(count: int, what: str) -> str:
    """Return a number of things, as `1 shard` or `4 shards`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `0, 2, 5-8`: three or more that follow one another are written as a range."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            run = numbers[start:place]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = place
    return ", ".join(parts)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares numbers in names as numbers: `net-9_5` comes before `net-10_5`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name))


def shortened(texts: Sequence[str], most: int = 5) -> str:
    """Return the first of some texts, and how many more there are."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the name that is most like `name`; "" if none is much like it."""
    import difflib

    # Of very many names only those of about its length are compared, since each takes some microseconds.
    likely = [other for other in known if abs(len(other) - len(name)) <= max(3, len(name) // 3)]
    close = difflib.get_close_matches(name, likely[:_MAX_COMPARED], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
