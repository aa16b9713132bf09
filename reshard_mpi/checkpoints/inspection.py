"""What a strategy file, a shard or a checkpoint folder holds, for people and scripts to read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.siblings import in_its_rank
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.formats.columns import TensorEntry
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import Decoded, Strided
from reshard_mpi.journal.records import STATE
from reshard_mpi.journal.state import about_record, as_lines, state_of
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.text import one_line
from reshard_mpi.units import format_bytes

# Of a string so many characters are shown to people.
_MAX_SHOWN = 200


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what lies at `path` as plain values.

    kind is "shard", "checkpoint", "strategy", "run" (a target folder without a complete target) or "commit" (its
    commit record). A checkpoint that a run has made, or is making, says so under "run" and "commit". Raises SourceError
    if it is nothing that can be read.
    """
    at = os.fspath(path)
    if not Path(at).exists():
        raise SourceError("nothing to inspect", expected="a shard, a checkpoint folder or a strategy", where=at)
    if Path(at).name == STATE:
        at = str(Path(at).parent)
    record = about_record(Path(at))
    if record is not None:
        return record
    state = state_of(Path(at)) if Path(at).is_dir() else {}
    try:
        files = discovery.find_shards(at)
    except SourceError:
        if state:
            return {"kind": "run", "path": at, **state}
        if any(Path(at).glob("rank_*")):
            raise
        return _strategy(at)
    if not Path(at).is_file():
        return {**_checkpoint(in_its_rank(files)), **state}
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
    module, folder_format = formats.by_name(files.format), formats.folder_by_name(files.format)
    if files.is_folder and folder_format is not None:
        shards = {0: [_shard(folder_format.open_folder(files.path))]}
    else:
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
    facts: dict[str, Any] = {
        "ranks": found.world_size,
        "stages": found.stages,
        "parameters": {
            name: [_placement(placement, found) for placement in placements]
            for name, placements in found.parameters.items()
        },
        "rules": [{"match": glob, **_placement(placement, found)} for glob, placement in found.rules],
    }
    if found.axes:
        (lengths,) = {placement.mesh for _, placement in found.rules}
        facts["mesh"] = dict(zip(found.axes, lengths, strict=True))
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
    if strategy.axes:
        names = strategy.axes
        split = {str(dim): [names[axis] for axis in axes] for dim, axes in enumerate(placement.split) if axes}
        facts["axes"] = {"split": split, "optimizer": [names[axis] for axis in _optimizer_axes(placement)]}
    return facts


def _optimizer_axes(placement: Placement) -> list[int]:
    """Return the axes that the optimizer cut of a spec goes over: the last of those that cut no dimension."""
    axes: list[int] = []
    for axis in reversed(placement.free_axes):
        if math.prod(placement.mesh[chosen] for chosen in axes) == placement.optimizer:
            break
        if placement.mesh[axis] > 1:
            axes.insert(0, axis)
    return axes


def as_text(found: dict[str, Any]) -> str:
    """Return what `inspect` found as lines for people."""
    return "\n".join(map(one_line, _lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    if found["kind"] == "strategy":
        return _strategy_lines(found)
    if found["kind"] in ("run", "commit"):
        return as_lines(found)
    if found["kind"] == "shard":
        return _shard_lines(found)
    total = format_bytes(found["size_bytes"])
    lines = [f"checkpoint: {found['ranks']} ranks, {found['format']}, {total} of tensors", *found["notes"]]
    for rank, shards in found["shards"].items():
        for shard in shards:
            size = format_bytes(shard["size_bytes"])
            lines.append(f"  rank {rank}: {len(shard['tensors'])} tensors, {size}  {shard['path']}")
    return [*lines, *as_lines({name: found[name] for name in ("run", "commit") if name in found})]


def _shard_lines(shard: dict[str, Any]) -> list[str]:
    place = f", rank {shard['rank']} of {shard['world_size']}" if "rank" in shard else ""
    size = format_bytes(shard["size_bytes"])
    lines = [f"{shard['format']} shard{place}: {len(shard['tensors'])} tensors, {size}"]
    for name, facts in shard["tensors"].items():
        whole = f"  at {facts['offset']} of {facts['global_shape']}" if "offset" in facts else ""
        lines.append(f"  {name}  {facts['dtype']} {facts['shape']}  {format_bytes(facts['size_bytes'])}{whole}")
    lines += [f"  {name}  {_shown(text)}" for name, text in shard["strings"].items()]
    return [*lines, *(f"  left out: {what}" for what in shard.get("left_out", ()))]


def _shown(text: str) -> str:
    """Return a string as people are shown it: of a long one the beginning."""
    return repr(text) if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}... ({len(text)} characters)"


def _strategy_lines(found: dict[str, Any]) -> list[str]:
    count = f"{len(found['parameters'])} parameters" if found["parameters"] or not found["rules"] else ""
    rules = f"{len(found['rules'])} rules" if found["rules"] else ""
    listed = ", ".join(filter(None, (count, rules)))
    lines = [f"strategy: {found['ranks']} ranks in {found['stages']} stages, {listed}"]
    if "mesh" in found:
        lines.append(f"  mesh {' '.join(f'{axis}={length}' for axis, length in found['mesh'].items())}")
    every = [*found["parameters"].items(), *((rule["match"], [rule]) for rule in found["rules"])]
    placed = ((name, facts) for name, placements in every for facts in placements)
    if "mesh" in found:
        return lines + [f"  {name}  {_named_placement_text(facts, found['stages'])}" for name, facts in placed]
    return lines + [f"  {name}  {_placement_text(facts)}" for name, facts in placed]


def _placement_text(facts: dict[str, Any]) -> str:
    text = f"mesh {facts['mesh']} split {facts['split']}"
    if facts["optimizer"] > 1:
        text += f" optimizer {facts['optimizer']}"
    if facts["stages"] != [0]:
        text += f" stages {facts['stages']}"
    return text + (f" sizes {facts['sizes']}" if "sizes" in facts else "")


def _named_placement_text(facts: dict[str, Any], stages: int) -> str:
    """Return one rule of a spec in the spec's own words. stages: how many the strategy has."""
    axes, sizes = facts["axes"], facts.get("sizes", {})
    cuts = " ".join(f"{dim}={'+'.join(names)}" for dim, names in axes["split"].items())
    held = "" if len(facts["stages"]) == stages else f"stage {' '.join(map(str, facts['stages']))}"
    parts = [
        f"split {cuts}" if cuts else "",
        f"optimizer {'+'.join(axes['optimizer'])}" if axes["optimizer"] else "",
        " ".join(f"sizes {dim}={lengths}" for dim, lengths in sizes.items()),
        held,
    ]
    return " ".join(filter(None, parts)) or "whole"
