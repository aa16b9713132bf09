"""What a strategy file, a shard or a checkpoint folder holds, for people and scripts to read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reshard_mpi import discovery, formats, strategy
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.manifest import Decoded, Manifest, TensorEntry
from reshard_mpi.placement import Placement, Strategy
from reshard_mpi.siblings import in_its_rank
from reshard_mpi.units import format_bytes


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
        if any(Path(at).glob("rank_*")):
            raise
        return _strategy(at)
    if not Path(at).is_file():
        return _checkpoint(in_its_rank(files))
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
            remedy="give one of these",
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


def as_text(found: dict[str, Any]) -> str:
    """Return what `inspect` found as lines for people."""
    if found["kind"] == "strategy":
        lines = [f"strategy: {found['ranks']} ranks in {found['stages']} stages, {len(found['parameters'])} parameters"]
        every = [*found["parameters"].items(), *((rule["match"], [rule]) for rule in found["rules"])]
        lines += [f"  {name}  {_placement_text(facts)}" for name, placements in every for facts in placements]
        return "\n".join(lines)
    if found["kind"] == "shard":
        return "\n".join(_shard_lines(found))
    total = format_bytes(found["size_bytes"])
    lines = [f"checkpoint: {found['ranks']} ranks, {found['format']}, {total} of tensors", *found["notes"]]
    for rank, shards in found["shards"].items():
        for shard in shards:
            size = format_bytes(shard["size_bytes"])
            lines.append(f"  rank {rank}: {len(shard['tensors'])} tensors, {size}  {shard['path']}")
    return "\n".join(lines)


def _shard_lines(shard: dict[str, Any]) -> list[str]:
    place = f", rank {shard['rank']} of {shard['world_size']}" if "rank" in shard else ""
    size = format_bytes(shard["size_bytes"])
    lines = [f"{shard['format']} shard{place}: {len(shard['tensors'])} tensors, {size}"]
    for name, facts in shard["tensors"].items():
        whole = f"  at {facts['offset']} of {facts['global_shape']}" if "offset" in facts else ""
        lines.append(f"  {name}  {facts['dtype']} {facts['shape']}  {format_bytes(facts['size_bytes'])}{whole}")
    return [*lines, *(f"  {name}  {text!r}" for name, text in shard["strings"].items())]


def _placement_text(facts: dict[str, Any]) -> str:
    text = f"mesh {facts['mesh']} split {facts['split']}"
    if facts["optimizer"] > 1:
        text += f" optimizer {facts['optimizer']}"
    if facts["stages"] != [0]:
        text += f" stages {facts['stages']}"
    return text + (f" sizes {facts['sizes']}" if "sizes" in facts else "")
