"""Errors for what no source shard gives: which ranks should hold it, and what is wrong with their shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from reshard_mpi.errors import CoverageError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.losses import Lost, described
from reshard_mpi.planning.tensors import Part, SourceGroup
from reshard_mpi.sharding.placement import Placement, Strategy, named_after


def hole(
    name: str, part: Part, target_rank: int, manifests: Mapping[int, Manifest], lost: Mapping[int, Lost]
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
    lost: Mapping[int, Lost],
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
    lost: Mapping[int, Lost],
) -> None:
    """Raise CoverageError if a tensor that all opened shards lack may be in a damaged one.

    Nothing is raised for what was evidently never saved: state named after a parameter (`adam_m.weight`) of a kind
    (`adam_m.`) that the target gets of no parameter, while every opened shard holds all that it should. origins: where
    the source strategy places the tensor. wanted: the names of all that the target gets, by group.
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
