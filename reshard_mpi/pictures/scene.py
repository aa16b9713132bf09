"""A drawing as a list of rectangles and texts, which `svg` and `png` draw alike."""

from __future__ import annotations

from typing import Literal, NamedTuple

from reshard_mpi.pictures.palette import INK
from reshard_mpi.text import one_line

# How wide letters of DejaVu Sans and Verdana are at most, as a part of their size; and those of no group, in ASCII and
# beyond it, where some are pictures.
_LETTERS = {" !'(),-./:;I[\\]fijlrt|J": 0.42, '"*?_`sz': 0.53, "ABCDGHKNOQRUVXZ&": 0.79, "#+<=>^w~": 0.84, "%@MWm": 1.0}
_WIDTHS = {letter: width for letters, width in _LETTERS.items() for letter in letters}
_LETTER, _OTHER_LETTER, _PICTURE = 0.64, 1.14, 1.4
_NARROWEST, _BOLD = 0.42, 1.17


class Rectangle(NamedTuple):
    """A rectangle. title: what is said of it when it is pointed at. key: what it stands for, for a page to react to."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None
    stroke: str | None = None
    stroke_width: float = 1.0
    title: str = ""
    key: str = ""


class Text(NamedTuple):
    """A line of text; `x` and `y` are of its anchor, on the line that letters stand on. turned: written upwards."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = INK
    bold: bool = False
    turned: bool = False
    title: str = ""
    key: str = ""


class Scene(NamedTuple):
    """A drawing of a size in points. title: what it shows, for those who cannot see it."""

    width: float
    height: float
    title: str
    items: tuple[Rectangle | Text, ...]


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return how wide a text will be at most, whichever of the usual fonts it is drawn in."""
    return sum(map(_letter_width, text)) * size * (_BOLD if bold else 1)


def fitted(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Return a text on one line, its middle left out if it is wider than that; "" if nothing of it can be read."""
    text = one_line(text)
    if text_width(text, size, bold=bold) <= width:
        return text
    letters = min(len(text) - 1, int(max(width, 0.0) / (_NARROWEST * size)))
    while letters >= 4:
        kept = f"{text[: -(-letters // 2)]}...{text[len(text) - letters // 2 :]}"
        if text_width(kept, size, bold=bold) <= width:
            return kept
        letters -= 1
    return ""


def wrapped(text: str, width: float, size: float, most: int) -> list[str]:
    """Return a text as lines of at most this width, and no more than `most`."""
    lines = [""]
    for word in one_line(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fitted(line, width, size) for line in lines]


def _letter_width(letter: str) -> float:
    if letter in _WIDTHS:
        return _WIDTHS[letter]
    return _LETTER if letter.isascii() else _OTHER_LETTER if letter < "\u2e80" else _PICTURE
