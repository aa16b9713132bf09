"""What the tensors of a target are made of: the source tensors' names, and what in a map says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard_mpi.planning.tensors import SourceGroup
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.sharding.box import Box


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
    from reshard_mpi.mapping.mapped import Made
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
