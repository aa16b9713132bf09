"""Draw rectangles and texts as SVG or PNG (`svg_of`, `png_of`); colours and labels (`Scene`)."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from reshard_mpi.errors import UsageError
from reshard_mpi.pictures.figures import Shards
from reshard_mpi.text import one_line

INK, FAINT, GRID, PAPER, EMPTY = "#1b1f24", "#667079", "#d4d9de", "#ffffff", "#eceff1"
# The colours of Okabe and Ito; up to eight are told apart.
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


# How wide letters of DejaVu Sans and Verdana are at most, as a part of their size; then letters of no group, in ASCII
# and beyond it, where some are pictures.
_LETTERS = {" !'(),-./:;I[\\]fijlrt|J": 0.42, '"*?_`sz': 0.53, "ABCDGHKNOQRUVXZ&": 0.79, "#+<=>^w~": 0.84, "%@MWm": 1.0}
_WIDTHS = {letter: width for letters, width in _LETTERS.items() for letter in letters}
_LETTER, _OTHER_LETTER, _PICTURE = 0.64, 1.14, 1.4
_NARROWEST, _BOLD = 0.42, 1.17


class Rectangle(NamedTuple):
    """A rectangle. title: its tooltip. key: the shard or tensor it stands for, for a page to react to."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None
    stroke: str | None = None
    stroke_width: float = 1.0
    title: str = ""
    key: str = ""


class TextLine(NamedTuple):
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
    """A drawing of a size in points. title: its description, for readers who cannot see it."""

    width: float
    height: float
    title: str
    items: tuple[Rectangle | TextLine, ...]


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

    Args:
        total: how many there are.
        files: paths by number.
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

    Args:
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


def label_within(texts: Sequence[str], area: Area, colour: str, title: str) -> Iterator[TextLine]:
    """Yield the first of the texts that fits into a rectangle, in its middle; nothing if none does."""
    for size in _SIZES:
        for text in texts:
            if _fits(text, size, area.width, area.height):
                x, y = area.x + area.width / 2, area.y + area.height / 2 + size * _MIDDLE
                yield TextLine(x, y, text, size, "middle", colour, title=title)
                return


def framed_label(texts: Sequence[str], area: Area, ground: str | None, title: str) -> Iterator[Rectangle | TextLine]:
    """Yield a label in the middle of a rectangle, with its own ground if the rectangle's has several colours.

    Args:
        ground: the colour of the rectangle; None: it has several.
    """
    for label in label_within(texts, area, INK if ground is None else on(ground), title):
        wide = text_width(label.text, label.size) + 6
        if ground is None and label.size + 6 <= area.height:
            middle = area.y + area.height / 2
            yield Rectangle(label.x - wide / 2, middle - label.size * 0.75, wide, label.size * 1.5, PAPER)
        yield label


def label_beside(text: str, area: Area, taken: Sequence[Area], colour: str, title: str) -> Iterator[TextLine]:
    """Yield a text within a rectangle where it meets none of `taken`, written upwards where it is too narrow.

    Yields nothing if there is no such place.
    """
    for size in _SIZES:
        width, down = text_width(text, size), area.y + area.height / 2 + size * _MIDDLE
        if _fits(text, size, area.width, area.height):
            for x in (area.x + 2 * _MARGIN, area.x + area.width - width - 2 * _MARGIN):
                if not any(Area(x, down - size, width, size * 1.3).meets(other) for other in taken):
                    yield TextLine(x, down, text, size, "start", colour, title=title)
                    return
        across = area.x + area.width / 2 + size * _MIDDLE
        if _fits(text, size, area.height, area.width):
            for y in (area.y + area.height - 2 * _MARGIN, area.y + width + 2 * _MARGIN):
                if not any(Area(across - size, y - width, size * 1.3, width).meets(other) for other in taken):
                    yield TextLine(across, y, text, size, "start", colour, turned=True, title=title)
                    return


def area_of(item: Rectangle | TextLine) -> Area:
    """Return where a rectangle is drawn, or about where a text is."""
    if isinstance(item, Rectangle):
        return Area(item.x, item.y, item.width, item.height)
    width = text_width(item.text, item.size, bold=item.bold)
    start = {"start": 0.0, "middle": width / 2, "end": width}[item.anchor]
    if item.turned:
        return Area(item.x - item.size * 0.8, item.y - width + start, item.size, width)
    return Area(item.x - start, item.y - item.size * 0.8, width, item.size)


def _fits(text: str, size: float, width: float, height: float) -> bool:
    return text_width(text, size) <= width - 2 * _MARGIN and size <= height - 3


_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"


def svg_of(scene: Scene) -> str:
    """Return a scene as an SVG element, which may be a file of its own."""
    width, height = _number(scene.width), _number(scene.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="{_FONT}" role="img">',
            f"<title>{_escaped(scene.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            *(_rectangle(item) if isinstance(item, Rectangle) else _text(item) for item in scene.items),
            "</svg>\n",
        ]
    )


def _rectangle(item: Rectangle) -> str:
    stroke = f' stroke="{item.stroke}" stroke-width="{_number(item.stroke_width)}"' if item.stroke else ""
    attributes = (
        f'x="{_number(item.x)}" y="{_number(item.y)}" width="{_number(item.width)}" height="{_number(item.height)}"'
        f' fill="{item.fill or "none"}"{stroke}{_key(item.key)}'
    )
    return f"<rect {attributes}>{_title(item.title)}</rect>" if item.title else f"<rect {attributes}/>"


def _text(item: TextLine) -> str:
    turned = f' transform="rotate(-90 {_number(item.x)} {_number(item.y)})"' if item.turned else ""
    bold = ' font-weight="bold"' if item.bold else ""
    return (
        f'<text x="{_number(item.x)}" y="{_number(item.y)}" font-size="{_number(item.size)}"'
        f' text-anchor="{item.anchor}" fill="{item.colour}"{bold}{turned}{_key(item.key)}>'
        f"{_escaped(item.text)}{_title(item.title)}</text>"
    )


def _title(text: str) -> str:
    return f"<title>{_escaped(text)}</title>" if text else ""


def _key(key: str) -> str:
    return f' data-key="{_escaped(key)}"' if key else ""


def _escaped(text: str) -> str:
    return escape(one_line(text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# Points of a scene become inches of matplotlib's as 1/72, and inches this number of dots: sharp in print at that size.
_POINTS, _DOTS = 72, 200


def require_matplotlib() -> None:
    """Raise UsageError if matplotlib is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "a picture in PNG is drawn by matplotlib, which cannot be imported",
            expected="matplotlib, as pip install 'reshard-mpi[plot]' brings it",
            got=str(error),
            remedy="install it, or ask for .svg or .html, which need nothing",
        ) from None


def png_of(scene: Scene) -> bytes:
    """Return a scene as a PNG file. Raises UsageError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    figure = Figure(figsize=(scene.width / _POINTS, scene.height / _POINTS), dpi=_DOTS, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    for order, item in enumerate(scene.items):
        if isinstance(item, Rectangle):
            _add_rectangle(axes, item, order)
        else:
            _add_text(axes, item, order)
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font has not
        figure.savefig(
            written, format="png", metadata={"Title": scene.title.encode("latin-1", "replace").decode("latin-1")}
        )
    return written.getvalue()


def _add_rectangle(axes: Any, item: Rectangle, order: int) -> None:
    from matplotlib.patches import Rectangle as Patch

    axes.add_patch(
        Patch(
            (item.x, item.y),
            item.width,
            item.height,
            facecolor=item.fill or "none",
            edgecolor=item.stroke or "none",
            linewidth=item.stroke_width if item.stroke else 0,
            joinstyle="miter",
            zorder=order,
        )
    )


def _add_text(axes: Any, item: TextLine, order: int) -> None:
    sides = {"start": "left", "middle": "center", "end": "right"}
    text = axes.text(
        item.x,
        item.y,
        item.text,
        fontsize=item.size,
        color=item.colour,
        fontweight="bold" if item.bold else "normal",
        horizontalalignment=sides[item.anchor],
        verticalalignment="baseline",
        rotation=90 if item.turned else 0,
        rotation_mode="anchor",
        zorder=order,
    )
    text.set_parse_math(False)  # a name with dollars is a name
