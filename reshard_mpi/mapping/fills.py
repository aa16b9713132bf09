"""What a map makes up: tensors of which all elements are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import Kind
from reshard_mpi.mapping.directions import Direction
from reshard_mpi.mapping.following import is_named_as_state
from reshard_mpi.mapping.likeness import Like
from reshard_mpi.mapping.made import Constant, Made
from reshard_mpi.mapping.names import NamePattern
from reshard_mpi.mapping.rules import Fill, Rules
from reshard_mpi.sharding.patterns import Pattern
from reshard_mpi.sharding.placement import named_after
from reshard_mpi.text import shortened


def may_make(fill: Fill, glob: str) -> bool:
    """Tell whether what a fill makes up can be what a glob leaves out."""
    return Pattern(glob).matches(fill.name.filled({capture.name: "0" for capture in fill.name.captures}))


def made_up(rules: Rules, tensors: Sequence[Made], direction: Direction, like: Like | None) -> list[Constant]:
    """Return what is made up; if the target is to be like a checkpoint, only what that has and nothing else makes."""
    names = {tensor.name for tensor in tensors}
    made: dict[str, Constant] = {}
    for fill in rules.fills:
        if fill.side != direction.target_side or (like is None and fill.needs_like):
            continue
        filled = list(_of_fill(fill, tensors))
        if not filled and not fill.is_optional and not _may_be_nowhere(fill, rules, direction):
            raise MapError(
                "what is made up beside other tensors is made nowhere",
                expected=f"tensors {fill.beside.text if fill.beside is not None else ''} of the target",
                got=shortened([tensor.name for tensor in tensors]) or "no tensors",
                where=fill.where,
                remedy="mend the name, or say optional = true if there need not be any",
            )
        for constant in filled:
            if like is not None and (constant.name not in like.shapes or constant.name in names):
                continue
            if constant.name in names or constant.name in made:
                raise MapError(f"what is made up has the name of another tensor: {constant.name}", where=fill.where)
            made[constant.name] = constant
    return list(made.values())


def _may_be_nowhere(fill: Fill, rules: Rules, direction: Direction) -> bool:
    """Tell whether equations make what a fill is beside, so that there is none only where these do not apply."""
    if fill.beside is None:
        return False
    terms = [term for rule in (*rules.equations, *rules.states) for term in direction.sides(rule)[1]]
    names = (term.name.filled({capture.name: "0" for capture in term.name.captures}) for term in terms)
    return any(fill.beside.match(name) is not None for name in names)


def _of_fill(fill: Fill, tensors: Sequence[Made]) -> Iterator[Constant]:
    if fill.beside is None:
        assert fill.shape is not None and fill.dtype is not None
        yield Constant(fill.name.text, Kind(fill.dtype, fill.shape), fill.element(fill.dtype), fill.where)
        return
    beside: NamePattern = fill.beside
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        values = beside.match(tensor.name)
        # `{p*}` may stand for what is before a parameter in its state as well; a map that names state means it.
        is_of_state = values is not None and any(
            base in names and beside.match(base) is not None and is_named_as_state(tensor.name, base)
            for base in named_after(tensor.name)
        )
        if values is not None and not is_of_state:
            name = fill.name.filled({capture.name: value for capture, value in zip(beside.captures, values)})
            dtype = fill.dtype or tensor.dtype
            shape = tensor.shape.shape if fill.shape is None else fill.shape
            yield Constant(name, Kind(dtype, shape), fill.element(dtype), fill.where)
