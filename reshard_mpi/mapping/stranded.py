"""State that would be left behind: it is named after a part of a parameter's name, so nothing tells that it follows.

With `model.layers.0.w` and `optim.exp_avg.layers.0.w`, a map that takes the one and leaves the other as it is would
make a checkpoint whose optimizer belongs to parameters that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import Inventory
from reshard_mpi.mapping.following import STATE_WORDS, parts_of
from reshard_mpi.mapping.matching import Match


def require_none_stranded(kept: Iterable[str], taken: Iterable[Match], inventory: Inventory) -> None:
    """Raise MapError if a tensor that stays as it is looks like state of a parameter that an equation takes.

    kept: the names of those that stay, and are neither left out nor state of another tensor by its whole name.
    """
    states = [name for name in kept if not STATE_WORDS.isdisjoint(parts_of(name))]
    if not states:
        return
    parameters = _by_ends_of_names(taken)
    for name in states:
        for parameter, match in _named_in_part(name, parameters):
            if inventory[parameter].shape == inventory[name].shape:
                raise MapError(
                    f"state of {parameter} would stay as it is, while an equation takes the parameter",
                    expected=f"{parameter}, the whole name, in that of its state, so that it follows",
                    got=name,
                    where=match.rule.where,
                    remedy="write equations for such state as for the parameters, or leave it out with --exclude",
                )


def _by_ends_of_names(taken: Iterable[Match]) -> Mapping[str, tuple[str, Match] | None]:
    """Return parameters by what is behind the first parts of their names; None where several end so."""
    found: dict[str, tuple[str, Match] | None] = {}
    for match in taken:
        for name in (*match.sources.values(), *match.equal):
            end = name
            while "." in end:
                end = end.partition(".")[2]
                found[end] = None if end in found else (name, match)
    return found


def _named_in_part(name: str, parameters: Mapping[str, tuple[str, Match] | None]) -> Iterator[tuple[str, Match]]:
    """Yield the parameters whose names end in some consecutive parts of a name of state."""
    parts = parts_of(name)
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1):
            rest = (*parts[:start], *parts[start + length :])
            found = parameters.get(".".join(parts[start : start + length]))
            if found is not None and found[0] != name and not STATE_WORDS.isdisjoint(rest):
                yield found
