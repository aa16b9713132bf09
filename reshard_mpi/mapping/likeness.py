"""Whether what a map makes has the names and shapes of a checkpoint that the target is to be like."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.numbering import NO_TRAINING, Training
from reshard_mpi.text import shortened

Shape = tuple[int, ...]


class Like(NamedTuple):
    """A checkpoint that the target is to be like: its path, and the shapes of its tensors by name.

    nest: the text that says how its tensors are nested, with what is neither tensor nor text; None if they are not.
    named: what tensors are called in its file, where that is not their name: numbers of an optimizer's parameters, and
    what names of the model's tensors begin with. training: where these come from.
    """

    path: str
    shapes: Mapping[str, Shape]
    nest: str | None = None
    named: Mapping[str, str] = MappingProxyType({})
    training: Training = NO_TRAINING


def require_alike(made: Mapping[str, Shape], like: Like) -> None:
    """Raise MapError unless the tensors that are made have the names and shapes of those of `like`."""
    missing = [f"{name} {list(shape)}" for name, shape in like.shapes.items() if name not in made]
    surplus = [f"{name} {list(shape)}" for name, shape in made.items() if name not in like.shapes]
    unlike = [
        f"{name} {list(shape)}, not {list(like.shapes[name])}"
        for name, shape in made.items()
        if like.shapes.get(name, shape) != shape
    ]
    if not (missing or surplus or unlike):
        return
    found = (
        ("nothing makes", missing),
        ("not in it", surplus),
        ("of another shape", unlike),
    )
    raise MapError(
        "what the map makes is not like the target's checkpoint",
        expected=f"the names and shapes of {like.path}",
        got="; ".join(f"{what}: {shortened(names)}" for what, names in found if names),
        where=like.path,
        remedy="give the map and the checkpoint that belong to the source, or leave out what both need not have"
        " (--include, --exclude)",
    )
