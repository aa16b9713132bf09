"""Values that no strategy lists and that differ from rank to rank: each target has those of one rank.

They may be each rank's own, such as the state of a random number generator; or parts of a tensor that the strategy
forgets, of which all but one would be lost. Bytes do not tell which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError
from reshard_mpi.planning.losses import named
from reshard_mpi.planning.model import Beginning, Differing

# A part of a name that says so.
_GENERATOR = re.compile(
    r"(?:^|[^a-z])(?:[a-z]*rng|[a-z]*random|random[a-z]*|seeds?|generators?)(?:[^a-z]|$)", re.IGNORECASE
)
# So many tensors are named in one line.
_MAX_NAMED = 8


class Told(NamedTuple):
    """What the user is told: notes on the state of generators, warnings on everything else."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_generator_state(name: str) -> bool:
    """Tell whether a name says that a tensor is the state of a random number generator."""
    return bool(_GENERATOR.search(name))


def between_targets(beginnings: Iterable[Beginning]) -> list[Differing]:
    """Return the tensors that different targets take from source ranks whose values differ."""
    by_name: dict[str, dict[str, int]] = {}
    for beginning in sorted(beginnings, key=lambda each: each.rank):
        by_name.setdefault(beginning.name, {}).setdefault(beginning.digest, beginning.rank)
    return [Differing(name, tuple(ranks.values())) for name, ranks in by_name.items() if len(ranks) > 1]


def told_of(differing: Iterable[Differing], where: str, *, strict: bool = False) -> Told:
    """Return what the user is told of tensors that differ, each tensor once.

    Raises DisagreementError if `strict` and any is not the state of a generator. where: the checkpoint.
    """
    ranks: dict[str, set[int]] = {}
    for tensor in differing:
        ranks.setdefault(tensor.name, set()).update(tensor.ranks)
    own = [
        f"{_differs(name, ranks[name])}: each rank has its own; one of them was taken"
        for name in ranks
        if is_generator_state(name)
    ]
    others = [_differs(name, ranks[name]) for name in ranks if not is_generator_state(name)]
    if not others:
        return Told(tuple(own))
    shown = "; ".join(others[:_MAX_NAMED]) + (f"; and {len(others) - _MAX_NAMED} more" if others[_MAX_NAMED:] else "")
    if strict:
        raise DisagreementError(
            "tensors that no strategy lists differ from rank to rank",
            expected="the same on every rank, or a strategy that says how they are cut (--strict)",
            got=shown,
            where=where,
            remedy="list them in the source strategy with the way they are cut; if each rank has its own, leave out"
            " --strict, and each target has that of one rank",
        )
    return Told(
        tuple(own),
        (
            f"{shown}: no strategy says how {'they are' if others[1:] else 'it is'} cut, so each target has what one"
            " rank holds, and nothing of the others; list what is cut in the source strategy",
        ),
    )


def without(differing: Iterable[Differing], told: Collection[str]) -> list[Differing]:
    """Return those of which none of the texts that the user has got already tells."""
    return [tensor for tensor in differing if not any(f"{tensor.name!r} differs between" in text for text in told)]


def _differs(name: str, ranks: Collection[int]) -> str:
    return f"{name!r} differs between {named(sorted(ranks))}"
