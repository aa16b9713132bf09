"""Report what no source shard gives, and tensors that differ from rank to rank (`missing_part_error`).

They may be each rank's own, such as the state of a random number generator; or parts of a tensor that the strategy
forgets, of which all but one would be lost. Bytes do not tell which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, DisagreementError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import TEXT, Differing, PrefixDigest
from reshard_mpi.planning.tensors import SourceGroup, TensorPart
from reshard_mpi.planning.unusable_shards import UnusableShard, described, named
from reshard_mpi.sharding.placement import Placement, Strategy, named_after


def missing_part_error(
    name: str, part: TensorPart, target_rank: int, manifests: Mapping[int, Manifest], lost: Mapping[int, UnusableShard]
) -> CoverageError:
    """Return the error for a part of a tensor that no shard gives."""
    holders = tuple(part.placement.holders(part.piece))
    damaged = [lost[rank] for rank in holders if rank in lost and lost[rank].problem]
    if damaged:
        others = len(holders) - len(damaged)
        got = described(damaged) + (f"; {others} without it, or missing" if others else "")
    else:
        opened = any(rank in manifests for rank in holders)
        got = "shards without the tensor" if opened else "shard missing"
    return CoverageError(
        f"no source holds a part of {name!r} that target rank {target_rank} needs",
        expected=f"box {part.region} on {_one_of(holders)}",
        got=got,
        where=", ".join(manifests[rank].path for rank in holders if rank in manifests),
        remedy="restore one of these ranks' shards, or give the strategy this checkpoint was saved with; where slices"
        ' have different lengths, a TOML rule needs their sizes (sizes = "ceil": as torch cuts)',
    )


def stage_missing(
    name: str,
    origins: tuple[Placement, ...],
    source: Strategy,
    manifests: Mapping[int, Manifest],
    lost: Mapping[int, UnusableShard],
) -> CoverageError:
    """Return the error for a tensor if no shard of the stages that should hold it was opened."""
    stages = {stage for origin in origins for stage in origin.stages}
    damaged = [shard for rank, shard in lost.items() if shard.problem and source.stage_of(rank) in stages]
    return CoverageError(
        f"no shard that should hold {name!r} is there",
        expected=f"a shard of stage {origins[0].stages[0]} of the source",
        got=f"shards of {_one_of(tuple(manifests))}" + (f"; {described(damaged)}" if damaged else ""),
        remedy="restore the shards of that stage",
    )


def require_never_saved(
    name: str,
    origins: tuple[Placement, ...],
    source: Strategy,
    target: Strategy,
    wanted: Iterable[tuple[Collection[str], SourceGroup]],
    manifests: Mapping[int, Manifest],
    lost: Mapping[int, UnusableShard],
) -> None:
    """Raise CoverageError if a tensor that all opened shards lack may be in a damaged one.

    Nothing is raised for what was evidently never saved: state named after a parameter (`adam_m.weight`) of a kind
    (`adam_m.`) that the target gets of no parameter, while every opened shard holds all that it should.

    Args:
        origins: where the source strategy places the tensor.
        wanted: the names of all that the target gets, by group.
    """
    stages = {stage for origin in origins for stage in origin.stages}
    suspects = [shard for rank, shard in lost.items() if shard.problem and source.stage_of(rank) in stages]
    if not suspects:
        return
    groups = list(wanted)
    lacking = (
        rank
        for _, group in groups
        if group.listed
        for layout in group.layouts
        for rank in manifests
        if source.stage_of(rank) in layout.placement.stages and rank not in group.ranks
    )
    base = next((base for base in named_after(name) if source.find(base) or target.find(base)), name)
    kind = name.removesuffix(base)
    has_kind = any(other.startswith(kind) for names, _ in groups for other in names)
    if has_kind or not kind or next(lacking, None) is not None:
        raise CoverageError(
            f"{name!r} is in no shard that was opened, but may be in one that is damaged",
            expected=f"a shard with {name!r}",
            got=described(suspects),
            remedy="restore these shards, or remove them if it was never saved",
        )


def _one_of(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"one of ranks {shown}"


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
