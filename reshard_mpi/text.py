"""How text is shown to people: nothing in it acts on a terminal or passes for something else, and numbers are in order.

Names of tensors, files and parameters may hold anything. Control characters (those of one byte above 127 as well) move
the cursor, change titles and colours, and forge lines; marks of direction turn names round; half of a surrogate pair
cannot be written at all. All that Python calls not printable is shown as Python writes it: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import re


def one_line(text: str) -> str:
    """Return `text` with everything escaped that is not printable, line breaks too."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def lines(text: str) -> str:
    """Return `text` with everything escaped that is not printable but its line breaks, which are ours."""
    return "\n".join(map(one_line, text.split("\n")))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in which numbers count as numbers: `net-9_5` before `net-10_5`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name))
