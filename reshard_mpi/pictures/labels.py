"""What is written into a picture: names that are short and still tell apart, and the place of a text in a rectangle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from reshard_mpi.pictures.figures import Shards
from reshard_mpi.pictures.palette import INK
from reshard_mpi.pictures.scene import Text, text_width
from reshard_mpi.text import one_line

# Sizes in which a text is tried, and how far it stays from the sides of its rectangle.
_SIZES, _MARGIN = (11.0, 9.0), 2.0
# Half of the height of a text above the line that it stands on, as a part of its size.
_MIDDLE = 0.36


class Area(NamedTuple):
    """A rectangle of a drawing."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Area) -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def files_as_shards(total: int, files: Mapping[int, str]) -> Shards:
    """Return shards that have no rank, called by their files' names below the folder that these share.

    total: how many there are. files: paths by number.
    """
    parts = {number: PurePath(path).parts for number, path in files.items()}
    shared = _shared(list(parts.values()), min((len(path) - 1 for path in parts.values()), default=0))
    names = {number: one_line("/".join(path[shared:])) for number, path in parts.items()}
    short = distinct_parts([re.findall(r"[^\W_]+|[\W_]+", name) for name in names.values()])
    return Shards(total, "file", files, names, dict(zip(names, short)))


def tensor_labels(names: Sequence[str]) -> list[str]:
    """Return the parts in which names of tensors differ: of `a.q.weight` and `a.k.weight`, `q` and `k`."""
    split = [re.findall(r"[^.]+\.?|\.", one_line(name)) for name in names]
    short = [part.rstrip(".") for part in distinct_parts(split)]
    if not any(part.isdecimal() for part in short):
        return short
    return [part.rstrip(".") for part in distinct_parts(split, before=1)]  # `experts.0` rather than `0`


def distinct_parts(names: Sequence[Sequence[str]], before: int = 0) -> list[str]:
    """Return names without the parts that all of them begin and end with; all as they are if one would be empty.

    before: how many of the parts that all begin with are kept.
    """
    whole = ["".join(parts) for parts in names]
    if len(names) < 2:
        return whole
    least = min(map(len, names))
    begin = _shared(names, least)
    end = _shared([parts[::-1] for parts in names], least - begin)
    short = ["".join(parts[max(0, begin - before) : len(parts) - end]) for parts in names]
    return short if all(re.search(r"[^\W_]", text) for text in short) else whole


def _shared(names: Sequence[Sequence[str]], most: int) -> int:
    """Return how many parts all of these begin with, `most` at most."""
    return next((place for place in range(most) if len({parts[place] for parts in names}) > 1), most)


def label_within(texts: Sequence[str], area: Area, colour: str = INK, title: str = "") -> Iterator[Text]:
    """Yield the first of the texts that fits into a rectangle, in its middle; nothing if none does."""
    for size in _SIZES:
        for text in texts:
            if _fits(text, size, area.width, area.height):
                x, y = area.x + area.width / 2, area.y + area.height / 2 + size * _MIDDLE
                yield Text(x, y, text, size, "middle", colour, title=title)
                return


def label_beside(text: str, area: Area, taken: Sequence[Area], colour: str, title: str) -> Iterator[Text]:
    """Yield a text within a rectangle where it meets none of `taken`, written upwards where it is too narrow.

    Yields nothing if there is no such place.
    """
    for size in _SIZES:
        width, down = text_width(text, size), area.y + area.height / 2 + size * _MIDDLE
        if _fits(text, size, area.width, area.height):
            for x in (area.x + 2 * _MARGIN, area.x + area.width - width - 2 * _MARGIN):
                if not any(Area(x, down - size, width, size * 1.3).meets(other) for other in taken):
                    yield Text(x, down, text, size, "start", colour, title=title)
                    return
        across = area.x + area.width / 2 + size * _MIDDLE
        if _fits(text, size, area.height, area.width):
            for y in (area.y + area.height - 2 * _MARGIN, area.y + width + 2 * _MARGIN):
                if not any(Area(across - size, y - width, size * 1.3, width).meets(other) for other in taken):
                    yield Text(across, y, text, size, "start", colour, turned=True, title=title)
                    return


def area_of(text: Text) -> Area:
    """Return about where a text is drawn."""
    width = text_width(text.text, text.size, bold=text.bold)
    start = {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    if text.turned:
        return Area(text.x - text.size * 0.8, text.y - width + start, text.size, width)
    return Area(text.x - start, text.y - text.size * 0.8, width, text.size)


def _fits(text: str, size: float, width: float, height: float) -> bool:
    return text_width(text, size) <= width - 2 * _MARGIN and size <= height - 3
