"""Scenes as PNG, drawn by matplotlib, which only this module imports."""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

from reshard_mpi.errors import UsageError
from reshard_mpi.pictures.palette import PAPER
from reshard_mpi.pictures.scene import Rectangle, Scene, Text

# Points of a scene become inches of matplotlib's as 1/72, and those so many dots: sharp in print at that size.
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


def _add_text(axes: Any, item: Text, order: int) -> None:
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
