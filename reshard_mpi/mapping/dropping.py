"""What a map leaves out of the tensors that no equation takes; the state of a parameter goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.candidates import MAX_NAMED, Inventory, Likeness
from reshard_mpi.mapping.directions import Direction
from reshard_mpi.mapping.fills import may_make
from reshard_mpi.mapping.following import owned_by, owners
from reshard_mpi.mapping.made import Pads
from reshard_mpi.mapping.rules import Drop, Rules
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.patterns import Pattern


def dropped(
    rules: Rules, left: Sequence[str], inventory: Inventory, direction: Direction, wanted: Likeness
) -> dict[str, Drop]:
    """Return the tensors that are left out, each with the entry of the map that says so.

    A pattern that a parameter matches speaks of parameters: their state is left out with them, and only then. left: the
    names of tensors that no equation takes. wanted: what the target is to have is not left out. Raises MapError for an
    entry that leaves nothing out, though it must, or loses what nothing makes up again.
    """
    _require_made_up_again(rules, direction)
    drops = [drop for drop in rules.drops if drop.side == direction.source_side]
    shapes = {name: kind.shape for name, kind in inventory.items()}
    owner_of = owners(left, shapes, rules, direction) if drops else {}
    entries: dict[str, Drop] = {}
    for drop in drops:
        pattern = Pattern(drop.glob)
        named = {
            name
            for name in left
            if pattern.matches(name) and not any(map(pattern.matches, owned_by(name, owner_of))) and name not in wanted
        }
        if not named and not drop.is_optional:
            raise MapError(
                "nothing is left out by a pattern",
                expected=f"tensors {drop.glob!r} that no equation takes",
                got=", ".join(left[:MAX_NAMED]) or "none that is left",
                where=drop.where,
                remedy="mend the pattern, or say optional = true if it need not match",
            )
        for name in left:
            is_state = name not in wanted and not named.isdisjoint(owned_by(name, owner_of))
            if name in named or is_state:
                known = entries.get(name)
                entries[name] = drop if known is None or drop.are_zeros else known
    return entries


def states_among(names: Mapping[str, Drop], inventory: Inventory, rules: Rules, direction: Direction) -> Iterator[str]:
    """Yield those of the tensors that are left out whose parameters are left out as well."""
    shapes = {name: kind.shape for name, kind in inventory.items()}
    owner_of = owners(names, shapes, rules, direction)
    yield from (name for name, owner in owner_of.items() if owner in names)


def zeros(entries: Mapping[str, Drop], inventory: Inventory) -> Iterator[Pads]:
    """Yield the tensors that are left out and may hold only zeros."""
    for name, drop in entries.items():
        if drop.are_zeros:
            yield Pads(name, (Box.whole(inventory[name].shape),), False, drop.where)


def _require_made_up_again(rules: Rules, direction: Direction) -> None:
    """Raise MapError for what is left out in the other direction, and not made up in this one."""
    for drop in rules.drops:
        if drop.side == direction.source_side or drop.is_optional:
            continue
        if not any(fill.side == drop.side and may_make(fill, drop.glob) for fill in rules.fills):
            raise MapError(
                f"read {direction}, the map loses what it leaves out in the other direction",
                expected="a [[map]] entry with fill that makes it up, or optional = true",
                got=f"drop = {drop.glob!r}",
                where=drop.where,
            )
