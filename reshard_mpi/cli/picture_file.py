"""Write the picture of a plan into a file, in the form that its ending names (`asked_pictures`, `write_picture`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard_mpi.errors import UsageError
from reshard_mpi.filesystem.paths import described, is_replaceable
from reshard_mpi.runs.picture_data import Asked
from reshard_mpi.text import MIB, counted, one_line

if TYPE_CHECKING:
    from reshard_mpi.pictures.figures import Figures

_ENDINGS = (".html", ".png", ".svg")
# A page has the cuts of this number of kinds of tensors at most.
_MOST_CUTS = 200
# What drawing takes: matplotlib with its fonts and the picture's dots, and the largest page as text.
_PNG_BYTES, _SVG_BYTES = 96 * MIB, 40 * MIB


def asked_pictures(path: str | None, tensors: Sequence[str]) -> Asked:
    """Return the request for a picture in the file `path`. Raises UsageError for pictures or files that are
    impossible.
    """
    if path is None:
        raise UsageError(
            "--tensor says what is drawn", expected="--plot FILE.html, .png or .svg as well", got="no --plot"
        )
    ending = _ending(path)
    if ending not in _ENDINGS:
        raise UsageError("a picture's ending says its form", expected=", ".join(_ENDINGS), got=path)
    if ending != ".html" and len(tensors) > 1:
        raise UsageError(
            "one picture shows one tensor",
            expected="--tensor once, or a page (.html)",
            got=f"{len(tensors)} tensors for {path}",
        )
    if ending == ".png":
        from reshard_mpi.pictures.rendering import require_matplotlib

        require_matplotlib()
    file = Path(path)
    if not is_replaceable(file) or not file.parent.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(
            "the picture cannot be written",
            expected="a new file in a folder that is there, or an earlier picture",
            got=described(file) if not is_replaceable(file) else described(file.parent),
            where=path,
            remedy="choose another name",
        )
    most_cuts = _MOST_CUTS if ending == ".html" else 0
    return Asked(tuple(dict.fromkeys(tensors)), most_cuts, _PNG_BYTES if ending == ".png" else _SVG_BYTES)


def write_picture(path: str, figures: Figures) -> str:
    """Write the picture of figures; return its subject in a line. Raises OSError, and then leaves no file."""
    content = _drawn(path, figures)
    try:
        Path(path).write_bytes(content)
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
    flow = figures.flow
    planned = (
        f"{len(flow.planned)} of {flow.targets.total} targets"
        if flow.is_sample
        else counted(len(flow.planned), "target")
    )
    cuts = f", {counted(len(figures.cuts), 'kind')} of tensors" if _ending(path) == ".html" else ""
    return f"drew {planned}{cuts}: {one_line(path)}"


def _drawn(path: str, figures: Figures) -> bytes:
    if _ending(path) == ".html":
        from reshard_mpi.pictures.rendering import page_of

        return page_of(figures).encode()
    from reshard_mpi.pictures.matrix import matrix_scene
    from reshard_mpi.pictures.tensor_cuts import cut_scene

    scene = cut_scene(figures.cuts[0], figures) if figures.cuts else matrix_scene(figures)
    if _ending(path) == ".svg":
        from reshard_mpi.pictures.scene import svg_of

        return svg_of(scene).encode()
    from reshard_mpi.pictures.rendering import png_of

    return png_of(scene)


def _ending(path: str) -> str:
    return Path(path).suffix.lower()
