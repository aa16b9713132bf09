"""Note flaws of a source that a run survives (`UnusableShard`, `ModifiedShard`, `Differing`).

Tensors that differ from rank to rank may be each rank's own, such as the state of a random number generator; or parts
of a tensor that the strategy forgets, of which all but one would be lost. Bytes do not tell which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError
from reshard_mpi.text import shortened

# Ranks named that have the same error.
_MAX_NAMED = 8
# Unusable shards described in one message.
_MAX_DESCRIBED = 4


class UnusableShard(NamedTuple):
    """A source shard that cannot be used."""

    rank: int
    where: str  # its path, or the folder in which it is missing
    problem: str  # what is wrong with it; empty if it is missing
    taken_from: tuple[int, ...] = ()  # the ranks whose shards are used in its place; none if nothing of it is needed

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.problem}, in {self.where}" if self.problem else f"rank {self.rank}: no shard"


NONE_LOST: Mapping[int, UnusableShard] = MappingProxyType({})


class MissingRanks(NamedTuple):
    """The ranks of a source strategy that have no shard in the folder at `where`. world_size: how many ranks it has."""

    ranks: tuple[int, ...]
    world_size: int
    where: str

    def __str__(self) -> str:
        present = self.world_size - len(self.ranks)
        return f"{present} of {self.world_size} ranks are there: no shard of {named(self.ranks)} in {self.where}"


class ModifiedShard(NamedTuple):
    """A file whose time is not the one that the run which has written it has recorded. rank: of that run's target."""

    rank: int
    path: str


def merged_losses(losses: Iterable[UnusableShard]) -> tuple[UnusableShard, ...]:
    """Return each lost shard once, by rank, with all the ranks that any target takes its data from instead."""
    sources: dict[UnusableShard, set[int]] = {}
    for lost in losses:
        sources.setdefault(lost._replace(taken_from=()), set()).update(lost.taken_from)
    return tuple(lost._replace(taken_from=tuple(sorted(sources[lost]))) for lost in sorted(sources))


def warnings_of(losses: Iterable[UnusableShard], missing: MissingRanks | None = None) -> Iterator[str]:
    """Yield warnings on unusable shards: a line for all missing ones, one for each damaged one.

    Args:
        missing: all ranks that have no shard, even if nothing of them is needed; None: tell only of those that are
            needed.
    """
    all_lost = merged_losses(losses)
    needed = [lost for lost in all_lost if not lost.problem and lost.taken_from]
    others = sorted({rank for lost in needed for rank in lost.taken_from})
    instead = f"; what should be there was taken from {named(others)} instead" if needed else ""
    if missing is not None:
        yield f"{missing}{instead}"
    elif needed:
        yield f"no shard of {named([lost.rank for lost in needed])} in {needed[0].where}{instead}"
    for lost in all_lost:
        if lost.problem:
            instead = f"; taken from {named(lost.taken_from)} instead" if lost.taken_from else ""
            yield f"the shard of rank {lost.rank} cannot be used, {lost.where}: {lost.problem}{instead}"


def modified_warning(modified: Collection[ModifiedShard], losses: Iterable[UnusableShard] = ()) -> Iterator[str]:
    """Yield a warning on shards that may be copies of others, if there are any besides those in `losses`."""
    lost = [shard.where for shard in losses]  # each a path, or a place in one
    paths = {rank: path for rank, path in modified if not any(where.startswith(path) for where in lost)}
    if len(paths) == 1:
        yield f"{min(paths.values())} was modified after its record was written; a copy of another shard?"
    elif paths:
        others = f"{len(paths) - 1} more shards ({named(sorted(paths))})"
        yield f"{paths[min(paths)]} and {others} were modified after their records were written; copies of others?"


def named(ranks: Collection[int]) -> str:
    """Return ranks in words: `rank 3`, or `ranks 1, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shortened(list(ranks), _MAX_NAMED)}"


def errors_text(losses: Sequence[object]) -> str:
    """Describe errors of shards or files in words: of many, the first ones only."""
    return "; ".join([*map(str, losses[:_MAX_DESCRIBED]), *(["..."] if len(losses) > _MAX_DESCRIBED else [])])


# A part of a name that says so.
_GENERATOR = r"(?:^|[^a-z])(?:[a-z]*rng|[a-z]*random|random[a-z]*|seeds?|generators?)(?:[^a-z]|$)"
# Tensors named in one line.
_MAX_NAMED_TENSORS = 8


# What the name of a string begins with among names of tensors.
TEXT = "the string "


class PrefixDigest(NamedTuple):
    """A digest of the first bytes of a tensor that no strategy places, or of a string, on source rank `rank`."""

    name: str
    digest: str
    rank: int


class Differing(NamedTuple):
    """A tensor that no strategy lists, with source ranks that do not all have the same values of it."""

    name: str
    ranks: tuple[int, ...]


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
