"""State that would be left behind: named after a part of a parameter's name, or of a shape that no equation is for.

With `model.layers.0.w` and `optim.exp_avg.layers.0.w`, a map that takes the one and leaves the other as it is would
make a checkpoint whose optimizer belongs to parameters that it does not have. So it would with what Adafactor keeps of
the rows and columns of `w`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import Inventory
from reshard_mpi.mapping.following import STATE_WORDS, parted_anywhere, parts_of
from reshard_mpi.mapping.matching import Match


def require_none_stranded(kept: Iterable[str], taken: Iterable[Match], inventory: Inventory) -> None:
    """Raise MapError if a tensor that stays as it is looks like state of a parameter that an equation takes.

    kept: the names of those that stay, and are neither left out nor state of another tensor by its whole name.
    """
    states = list(filter(is_named_like_state, kept))
    if not states:
        return
    matches = list(taken)
    parameters = _by_ends_of_names(matches)
    match_of = {name: match for match in matches for name in (*match.sources.values(), *match.equal)}
    for name in states:
        parted = parted_anywhere(name, match_of)
        if parted is not None:
            whole, _ = parted
            raise MapError(
                f"state of {whole} would stay as it is, while an equation takes the parameter",
                expected=f"the shape of the parameter, {list(inventory[whole].shape)}, or a single element",
                got=f"{name} {list(inventory[name].shape)}",
                where=match_of[whole].rule.where,
                remedy="write equations for such state, or leave it out with --exclude",
            )
        for parameter, match in _named_in_part(name, parameters):
            if inventory[parameter].shape == inventory[name].shape:
                raise MapError(
                    f"state of {parameter} would stay as it is, while an equation takes the parameter",
                    expected=f"{parameter}, the whole name, in that of its state, so that it follows",
                    got=name,
                    where=match.rule.where,
                    remedy="write equations for such state as for the parameters, or leave it out with --exclude",
                )


def is_named_like_state(name: str) -> bool:
    """Tell whether a part of a tensor's name is a word that optimizers use for their state."""
    return not STATE_WORDS.isdisjoint(parts_of(name))


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
