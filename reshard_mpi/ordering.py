"""The order in which people read names that hold numbers."""

from __future__ import annotations

import re


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in which numbers count as numbers: `net-9_5` before `net-10_5`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name))
