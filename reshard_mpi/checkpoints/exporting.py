"""The strategy of a checkpoint, or of strategy files, as a TOML spec."""

from __future__ import annotations

from pathlib import Path

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.inspection import manifests_of
from reshard_mpi.errors import SourceError
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.strategy import table
from reshard_mpi.sharding.strategy.spec_text import spec_text


def strategy_as_toml(path: str) -> str:
    """Return the strategy that lies at `path`, or that the shards there carry, as a TOML spec.

    Raises StrategyError if a spec cannot say it, or SourceError if the shards carry none.
    """
    try:
        files = discovery.find_shards(path)
    except SourceError:
        if not Path(path).exists():
            raise
        return spec_text(strategy.load(path))
    identity = next((shard.identity for _, shards in manifests_of(files) for shard in shards), None)
    if identity is None:
        raise SourceError(
            "the shards do not say how they are sharded",
            expected="strategy files, or shards that carry their strategy, such as native HDF5 ones",
            got=f"shards in {files.format}",
            where=path,
            remedy="give the strategy files of the checkpoint",
        )
    return spec_text(table.loads(identity.strategy, path))
