"""Byte sizes and rates as people write and read them."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_STEPS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])(i?B)?|B)?", re.ASCII | re.IGNORECASE)


def format_bytes(size_bytes: int) -> str:
    """Return a size such as `1.50 GiB` or `312 B`."""
    for step_bytes, name in _STEPS:
        if size_bytes >= step_bytes:
            return f"{size_bytes / step_bytes:.2f} {name}"
    return f"{size_bytes} B"


def parse_bytes(text: str) -> int:
    """Return the size that `text` says, as `400M`, `1.5 GiB`, `64GB` or `1048576`.

    K, M, G, T, with or without iB, are powers of 1024, as batch systems have them; KB and so on powers of 1000. Raises
    ValueError, which says what is expected.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 400M, 1.5G or 64GiB")
    number, unit, ending = match.groups()
    base = 1000 if (ending or "").upper() == "B" else 1024
    factor = base ** ("KMGT".index(unit.upper()) + 1) if unit else 1
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_rate(size_bytes: int, seconds: float) -> str:
    """Return a throughput such as `1.20 GiB/s`."""
    return f"{format_bytes(int(size_bytes / seconds))}/s" if seconds > 0 else "-"
