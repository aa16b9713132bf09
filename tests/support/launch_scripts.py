"""The batch scripts that the project ships, and what they are given."""

from __future__ import annotations

from pathlib import Path

from support.conversions import Conversion

LAUNCH = Path(__file__).parents[2] / "launch"


def operands(c: Conversion) -> list[str]:
    """Return source, target and strategies of a conversion, as the scripts take them."""
    return [argument for argument in c.arguments() if argument not in ("transform", "--jobs", "1")]
