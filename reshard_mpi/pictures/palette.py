"""Colours that people with any colour vision can tell apart, and that stay apart in grey."""

from __future__ import annotations

from collections.abc import Sequence

INK, FAINT, GRID, PAPER, EMPTY = "#1b1f24", "#667079", "#d4d9de", "#ffffff", "#eceff1"
# The colours of Okabe and Ito, of which up to eight are told apart.
_FEW = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
# From blue to yellow and from dark to light at once, for more than these.
_MANY = ((0, 34, 78), (58, 78, 108), (112, 113, 115), (166, 154, 110), (216, 198, 82), (255, 233, 69))
# From pale to dark, for amounts.
_AMOUNTS = ((226, 238, 248), (142, 193, 224), (66, 146, 198), (8, 81, 156), (8, 40, 92))


def rank_colours(ranks: Sequence[int]) -> dict[int, str]:
    """Return a colour for each of these ranks, in their order: one of its own, or for many a shade."""
    ordered = sorted(set(ranks))
    if len(ordered) <= len(_FEW):
        return dict(zip(ordered, _FEW))
    return {rank: _shade(_MANY, place / (len(ordered) - 1)) for place, rank in enumerate(ordered)}


def amount_colour(fraction: float) -> str:
    """Return the colour of an amount, as a fraction of the largest."""
    return _shade(_AMOUNTS, fraction)


def on(colour: str) -> str:
    """Return the colour of text on a ground of this colour: dark or white."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else PAPER


def _shade(anchors: Sequence[tuple[int, int, int]], fraction: float) -> str:
    place = min(max(fraction, 0.0), 1.0) * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(anchors[low], anchors[low + 1]))
    return "#" + "".join(f"{value:02x}" for value in mixed)
