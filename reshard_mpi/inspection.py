"""What a strategy file, a shard or a checkpoint folder holds, for people and scripts to read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reshard_mpi import discovery, formats, strategy
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.layout import Placement, Strategy
from reshard_mpi.manifest import Decoded, Manifest, TensorEntry


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what lies at `path` as plain values: kind is "shard", "checkpoint" or "strategy".

    Raises SourceError if it is nothing that can be read.
    """
    at = os.fspath(path)
    if not Path(at).exists():
        raise SourceError("nothing to inspect", expected="a shard, a checkpoint folder or a strategy", where=at)
    try:
        files = discovery.find_shards(at)
    except SourceError:
        return _strategy(at)
    if not Path(at).is_file():
        return _checkpoint(files)
    name = formats.name_of(at)
    assert name is not None  # or find_shards would have raised
    try:
        return {"kind": "shard", **_shard(formats.by_name(name).locate(at))}
    except ReshardError as shard_error:
        try:  # MindSpore's strategy files end in .ckpt too
            return _strategy(at)
        except ReshardError:
            raise shard_error from None


def _checkpoint(files: discovery.ShardFiles) -> dict[str, Any]:
    module = formats.by_name(files.format)
    shards = {rank: [_shard(module.locate(path)) for path in paths] for rank, paths in files.by_rank.items()}
    every = [shard for of_rank in shards.values() for shard in of_rank]
    return {
        "kind": "checkpoint",
        "path": files.path,
        "format": files.format,
        "ranks": len(shards),
        "size_bytes": sum(shard["size_bytes"] for shard in every),
        "notes": list(files.notes),
        "shards": {rank: of_rank for rank, of_rank in shards.items()},
    }


def _shard(manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": sum(entry.size_bytes for entry in manifest.tensors.values()),
        "tensors": {name: _tensor(entry) for name, entry in manifest.tensors.items()},
        "strings": dict(manifest.strings),
    }
    if manifest.identity is not None:
        facts |= {"rank": manifest.identity.rank, "world_size": manifest.identity.world_size}
    return facts


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": entry.dtype.name, "shape": list(entry.shape), "size_bytes": entry.size_bytes}
    if entry.box is not None and entry.global_shape is not None:
        facts |= {"offset": list(entry.box.start), "global_shape": list(entry.global_shape)}
    if isinstance(entry.source, Decoded):
        facts["chunk"] = list(entry.source.chunk)
    else:
        ranges = entry.source.ranges
        facts["ranges"] = [[part.offset_bytes, part.length_bytes] for part in ranges]
    return facts


def _strategy(path: str) -> dict[str, Any]:
    try:
        found = strategy.load(path)
    except StrategyError as error:
        raise SourceError(
            "neither a checkpoint nor a strategy",
            expected="a shard, a folder of rank_* folders, or strategy files",
            got=error.problem,
            where=path,
        ) from None
    return {"kind": "strategy", "path": path, **_strategy_facts(found)}


def _strategy_facts(found: Strategy) -> dict[str, Any]:
    return {
        "ranks": found.world_size,
        "stages": found.stages,
        "parameters": {name: [_placement(p) for p in placements] for name, placements in found.parameters.items()},
        "rules": [{"match": glob, **_placement(placement)} for glob, placement in found.rules],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "mesh": list(placement.mesh),
        "split": [list(axes) for axes in placement.split],
        "optimizer": placement.optimizer,
        "stages": list(placement.stages),
    }
    if placement.sizes:
        facts["sizes"] = {str(dim): list(sizes) for dim, sizes in placement.sizes}
    return facts
