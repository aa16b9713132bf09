"""Descriptions of strategy files, shards and checkpoint folders, for people and scripts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery, moments
from reshard_mpi.checkpoints.siblings import in_its_rank
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.formats.columns import TensorEntry
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import Decoded, Strided
from reshard_mpi.journal.records import STATE
from reshard_mpi.journal.state import about_record, state_of
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Placement, Strategy

_MAY_LACK_FILES = "nothing in it tells whether its last files are missing: tensors may be larger than what is here"


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a description of what lies at `path`, as plain values.

    "kind" is "shard", "checkpoint", "strategy", "run" (a target folder without a complete target) or "commit" (the
    commit record of a target folder). For a checkpoint that a run has made, or is making, "run" and "commit" describe
    that. Raises SourceError if there is nothing that can be read.
    """
    name = os.fspath(path)
    if not Path(name).exists():
        raise SourceError("nothing to inspect", expected="a shard, a checkpoint folder or a strategy", where=name)
    if Path(name).name == STATE:
        name = str(Path(name).parent)
    record = about_record(Path(name))
    if record is not None:
        return record
    state = state_of(Path(name)) if Path(name).is_dir() else {}
    try:
        files = discovery.find_shards(name)
    except SourceError:
        if state:
            return {"kind": "run", "path": name, **state}
        if any(Path(name).glob("rank_*")) or Path(name, moments.TRACKER).exists():
            raise
        return _strategy(name)
    if not Path(name).is_file():
        return {**_checkpoint(in_its_rank(files)), **state}
    try:
        return {"kind": "shard", **_shard(files.locate(name))}
    except ReshardError as shard_error:
        try:  # MindSpore's strategy files end in .ckpt too
            return _strategy(name)
        except ReshardError:
            raise shard_error from None


def _checkpoint(files: discovery.ShardFiles) -> dict[str, Any]:
    folder_format = formats.folder_by_name(files.format)
    if files.is_folder and folder_format is not None:
        shards = {0: [_shard(folder_format.open_folder(files.path))]}
    else:
        shards = {rank: [_shard(files.locate(path)) for path in paths] for rank, paths in files.by_rank.items()}
    sizes_bytes = [shard["size_bytes"] for rank_shards in shards.values() for shard in rank_shards]
    return {
        "kind": "checkpoint",
        "path": files.path,
        "format": files.format,
        "ranks": len(shards),
        "size_bytes": sum(sizes_bytes),
        "notes": [*files.notes, *([] if formats.by_name(files.format).TRAITS.tells_files else [_MAY_LACK_FILES])],
        "shards": shards,
    }


def _shard(manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": sum(entry.size_bytes for entry in manifest.tensors.values()),
        "tensors": {name: _tensor(entry) for name, entry in manifest.tensors.items()},
        "strings": dict(manifest.strings),
    }
    if manifest.left_out:
        facts["left_out"] = list(manifest.left_out)
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
        ranges = entry.stored.ranges if entry.stored is not None else ()
        facts["ranges"] = [[part.offset_bytes, part.length_bytes] for part in ranges]
    if isinstance(entry.source, Strided):
        facts["strides_bytes"] = list(entry.source.strides_bytes)
    return facts


def _strategy(path: str) -> dict[str, Any]:
    try:
        loaded = strategy.load(path)
    except StrategyError as error:
        raise SourceError(
            "neither a checkpoint nor a strategy",
            expected="a shard, a folder of rank_* folders, or strategy files",
            got=error.problem,
            where=path,
            remedy="give one of these",
        ) from None
    return {"kind": "strategy", "path": path, **_strategy_facts(loaded)}


def _strategy_facts(loaded: Strategy) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "ranks": loaded.world_size,
        "stages": loaded.stages,
        "parameters": {
            name: [_placement(placement, loaded) for placement in placements]
            for name, placements in loaded.parameters.items()
        },
        "rules": [{"match": glob, **_placement(placement, loaded)} for glob, placement in loaded.rules],
    }
    if loaded.axes:
        (lengths,) = {placement.mesh for _, placement in loaded.rules}
        facts["mesh"] = dict(zip(loaded.axes, lengths, strict=True))
    return facts


def _placement(placement: Placement, strategy: Strategy) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "mesh": list(placement.mesh),
        "split": [list(axes) for axes in placement.split],
        "optimizer": placement.optimizer,
        "stages": list(placement.stages),
    }
    if placement.sizes:
        facts["sizes"] = {str(dim): list(sizes) for dim, sizes in placement.sizes}
    if placement.ceil:
        facts["sizes"] = "ceil"
    if strategy.axes:
        names = strategy.axes
        split = {str(dim): [names[axis] for axis in axes] for dim, axes in enumerate(placement.split) if axes}
        facts["axes"] = {"split": split, "optimizer": [names[axis] for axis in _optimizer_axes(placement)]}
    return facts


def _optimizer_axes(placement: Placement) -> list[int]:
    """Return the axes over which the optimizer cuts, in a spec: the last of those that cut no dimension."""
    axes: list[int] = []
    for axis in reversed(placement.free_axes):
        if math.prod(placement.mesh[chosen] for chosen in axes) == placement.optimizer:
            break
        if placement.mesh[axis] > 1:
            axes.insert(0, axis)
    return axes
