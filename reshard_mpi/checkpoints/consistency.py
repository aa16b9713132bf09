"""The shards of a source held against its strategy, so that a mistake in that is told before one in the target's.

A target is planned from few shards. A source strategy that says nothing of uneven slices fits the first of them, and
makes of it a tensor of a length that no target strategy may be able to cut.
"""

from __future__ import annotations

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError
from reshard_mpi.planning.tensors import SourceTensors
from reshard_mpi.sharding.layout import UnknownLengthError

# So many of the first ranks of a stage are looked at, and as many of the last ones, which hold what is uneven.
_LOOKED_AT = 8


def require_consistent_source(source: SourceCheckpoint) -> None:
    """Raise a ReshardError if shards contradict the source's strategy or each other.

    The first and the last shards of each stage are looked at, and only what those hold which can be read.
    """
    strategy = source.strategy
    for stage in range(strategy.stages):
        ranks = strategy.ranks_of(stage)
        chosen = dict.fromkeys((*ranks[:_LOOKED_AT], *ranks[-_LOOKED_AT:]))
        found = {rank: source.find(rank) for rank in chosen if rank in source}
        manifests = {rank: manifest for rank, manifest in found.items() if manifest is not None}
        lost = {rank: source.lost(rank) for rank in chosen if rank not in manifests}
        tensors = SourceTensors(strategy, manifests, lost)
        for name in tensors.names:
            try:
                tensors.group(name)
            except (UnknownLengthError, CoverageError) as error:
                if len(chosen) == len(ranks) and not source.files.picked:  # else others may hold the slices
                    error.where = error.where or source.place
                    raise
            except (DisagreementError, LayoutError) as error:
                error.where += f"; {source.place}" if source.missing else ""
                raise
