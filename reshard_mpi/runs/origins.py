"""What the tensors of a target are made of: the source tensors' names, and what in a map says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import UsageError
from reshard_mpi.formats.listed import ListedTensors
from reshard_mpi.planning.parameters import find_or_follow
from reshard_mpi.planning.tensors import SourceGroup
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Strategy
from reshard_mpi.text import did_you_mean


class Origin(NamedTuple):
    """What a target's tensor is made of.

    sources: the names of source tensors, in the order in which they are met. by: the place of the equation, or of the
    entry that makes it up, in the map; empty where it stays as it is. boxes: for each part that a map makes, its box in
    the target's tensor and the name of the source tensor; None where there is no map.
    """

    sources: tuple[str, ...]
    by: str
    boxes: tuple[tuple[Box, str], ...] | None = None

    def source_of(self, region: Box) -> str | None:
        """Return the source tensor that a region of the target's tensor comes from; None if it is made up."""
        if self.boxes is None:
            return self.sources[0]
        return next((name for box, name in self.boxes if box.contains(region)), None)


def origin_of(conversion: Conversion, name: str) -> Origin:
    """Return what the tensor `name` of a target is made of."""
    if conversion.original is None:
        return Origin((name,), "")
    from reshard_mpi.mapping.made import Made
    from reshard_mpi.runs.mapped import MappedCheckpoint

    assert isinstance(conversion.source, MappedCheckpoint)
    recipe = conversion.source.recipe(name)
    if not isinstance(recipe, Made):
        return Origin((), recipe.where if recipe is not None else "", ())
    boxes = tuple((pair.to, recipe.sources[pair.source]) for pair in recipe.shape.pairs)
    return Origin(tuple(dict.fromkeys(source for _, source in boxes)), recipe.where, boxes)


def source_groups(conversion: Conversion, target_rank: int, names: tuple[str, ...]) -> Mapping[str, SourceGroup]:
    """Return how the source holds those of its tensors that are read for a target."""
    if conversion.original is not None:
        both = conversion.original.both_layouts(0, names)
    else:
        both = conversion.both_layouts(target_rank, names)
    return {name: layouts.source for name, layouts in both.items()}


def listed_pieces(conversion: Conversion, name: str) -> Mapping[Box, tuple[str, ...]] | None:
    """Return the pieces of a source tensor that an index lists, with the files that have each; None if none does."""
    stored = conversion.source.stored
    tensors = stored.manifest(0).tensors if stored.files.is_folder else None
    if not isinstance(tensors, ListedTensors):
        return None
    files: dict[Box, tuple[str, ...]] = {}
    for box, file in tensors.lists[tensors.list_of[tensors.number_of[name]]]:
        files[box] = (*files.get(box, ()), file.path)
    return files


def likely_holders(target: Strategy, name: str) -> Sequence[int]:
    """Return target ranks of which one holds a tensor if any target does: those that its strategy says, then others."""
    placements = find_or_follow(target, name, lambda _: True)
    stages = dict.fromkeys(stage for placement in placements for stage in placement.stages)
    return [stage * target.stage_size for stage in (*stages, *(s for s in range(target.stages) if s not in stages))]


def unknown_tensor(name: str, known: Iterable[str]) -> UsageError:
    """Return the error that no target has a tensor of this name."""
    names = list(known)
    return UsageError(
        "the target has no tensor of this name",
        expected=f"one of its {len(names)} tensors",
        got=f"{name!r}{did_you_mean(name, names)}",
        remedy="reshard-mpi plan -v lists them",
    )
