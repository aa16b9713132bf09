"""A drawing as a list of rectangles and texts, which `svg` and `png` draw alike."""

from __future__ import annotations

from typing import Literal, NamedTuple

from reshard_mpi.pictures.palette import INK
from reshard_mpi.text import one_line

# How wide a letter is, as a part of its size: of DejaVu Sans no less than in most names, and the mean of plain text.
_LETTER, _PLAIN_LETTER = 0.6, 0.53


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


def text_width(text: str, size: float) -> float:
    """Return about how wide a text will be."""
    return sum(1.7 if ord(char) > 0x2E7F else 1.0 for char in text) * _LETTER * size


def fitted(text: str, width: float, size: float) -> str:
    """Return a text on one line, its middle left out if it is wider than that; "" if nothing of it can be read."""
    text = one_line(text)
    if text_width(text, size) <= width:
        return text
    letters = int(width / (_LETTER * size)) - 3
    while letters >= 4:
        kept = f"{text[: -(-letters // 2)]}...{text[len(text) - letters // 2 :]}"
        if text_width(kept, size) <= width:
            return kept
        letters -= 1
    return ""


def wrapped(text: str, width: float, size: float, most: int) -> list[str]:
    """Return a text as lines of at most this width, and no more than `most`."""
    lines = [""]
    for word in one_line(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and len(longer) * _PLAIN_LETTER * size > width:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fitted(line, width * _LETTER / _PLAIN_LETTER, size) for line in lines]
