"""Tell of tensors whose values differ from rank to rank (`difference_messages`).

They may be each rank's own, such as the state of a random number generator; or parts of a tensor that the strategy
forgets, of which all but one would be lost. Bytes do not tell which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError
from reshard_mpi.planning.lost_shards import named
from reshard_mpi.planning.rank_plan import TEXT, Differing, PrefixDigest

# A part of a name that says so.
_GENERATOR = r"(?:^|[^a-z])(?:[a-z]*rng|[a-z]*random|random[a-z]*|seeds?|generators?)(?:[^a-z]|$)"
# Tensors named in one line.
_MAX_NAMED_TENSORS = 8


class Differences(NamedTuple):
    """Messages on differing tensors: notes on the state of generators, warnings on everything else."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_generator_state(name: str) -> bool:
    """Tell whether a name says that a tensor is the state of a random number generator."""
    return bool(re.search(_GENERATOR, name, re.IGNORECASE))


def between_targets(beginnings: Iterable[PrefixDigest]) -> list[Differing]:
    """Return the tensors that different targets take from source ranks whose values differ."""
    by_name: dict[str, dict[str, int]] = {}
    for beginning in sorted(beginnings, key=lambda each: each.rank):
        by_name.setdefault(beginning.name, {}).setdefault(beginning.digest, beginning.rank)
    return [Differing(name, tuple(ranks.values())) for name, ranks in by_name.items() if len(ranks) > 1]


def difference_messages(differing: Iterable[Differing], where: str, *, strict: bool = False) -> Differences:
    """Return the messages on tensors that differ, each tensor once.

    Raises DisagreementError if `strict` and any is not the state of a generator.

    Args:
        where: the checkpoint.
    """
    ranks: dict[str, set[int]] = {}
    for tensor in differing:
        ranks.setdefault(tensor.name, set()).update(tensor.ranks)
    own = [
        f"{_differs(name, ranks[name])}: each rank has its own; one of them was taken"
        for name in ranks
        if _is_each_ranks_own(name)
    ]
    others = [_differs(name, ranks[name]) for name in ranks if not _is_each_ranks_own(name)]
    if not others:
        return Differences(tuple(own))
    shown = "; ".join(others[:_MAX_NAMED_TENSORS]) + (
        f"; and {len(others) - _MAX_NAMED_TENSORS} more" if others[_MAX_NAMED_TENSORS:] else ""
    )
    if strict:
        raise DisagreementError(
            "tensors that no strategy lists differ from rank to rank",
            expected="the same on every rank, or a strategy that says how they are cut (--strict)",
            got=shown,
            where=where,
            remedy="list them in the source strategy with the way they are cut; if each rank has its own, leave out"
            " --strict, and each target has that of one rank",
        )
    return Differences(
        tuple(own),
        (
            f"{shown}: no strategy says how {'they are' if others[1:] else 'it is'} cut, so each target has what one"
            " rank holds, and nothing of the others; list what is cut in the source strategy",
        ),
    )


def without(differing: Iterable[Differing], texts: Collection[str]) -> list[Differing]:
    """Return the differences that no earlier message to the user names."""
    return [
        tensor for tensor in differing if not any(f"{_called(tensor.name)} differs between" in text for text in texts)
    ]


def _is_each_ranks_own(name: str) -> bool:
    return name.startswith(TEXT) or is_generator_state(name)


def _differs(name: str, ranks: Collection[int]) -> str:
    return f"{_called(name)} differs between {named(sorted(ranks))}"


def _called(name: str) -> str:
    return name if name.startswith(TEXT) else repr(name)
