"""Byte sizes and rates as people write and read them."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_STEPS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def format_bytes(size_bytes: int) -> str:
    """Return a size such as `1.50 GiB` or `312 B`."""
    for step_bytes, name in _STEPS:
        if size_bytes >= step_bytes:
            return f"{size_bytes / step_bytes:.2f} {name}"
    return f"{size_bytes} B"


def format_rate(size_bytes: int, seconds: float) -> str:
    """Return a throughput such as `1.20 GiB/s`."""
    return f"{format_bytes(int(size_bytes / seconds))}/s" if seconds > 0 else "-"
