"""Scenes as SVG: plain elements with attributes, no style and no script, so that a page may hold them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from reshard_mpi.pictures.palette import PAPER
from reshard_mpi.pictures.scene import Rectangle, Scene, Text
from reshard_mpi.text import one_line

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
            *_elements(scene),
            "</svg>\n",
        ]
    )


def _elements(scene: Scene) -> Iterator[str]:
    for item in scene.items:
        yield _rectangle(item) if isinstance(item, Rectangle) else _text(item)


def _rectangle(item: Rectangle) -> str:
    stroke = f' stroke="{item.stroke}" stroke-width="{_number(item.stroke_width)}"' if item.stroke else ""
    attributes = (
        f'x="{_number(item.x)}" y="{_number(item.y)}" width="{_number(item.width)}" height="{_number(item.height)}"'
        f' fill="{item.fill or "none"}"{stroke}{_key(item.key)}'
    )
    return f"<rect {attributes}>{_title(item.title)}</rect>" if item.title else f"<rect {attributes}/>"


def _text(item: Text) -> str:
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
