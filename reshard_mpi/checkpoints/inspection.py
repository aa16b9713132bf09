"""Describe strategy files, shards and checkpoint folders as plain values (`inspect`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery, shard_files
from reshard_mpi.checkpoints.contents import contents_of, steps_of, values_of
from reshard_mpi.checkpoints.refuse_sources import ForeignCheckpointError
from reshard_mpi.checkpoints.shard_files import in_its_rank
from reshard_mpi.checkpoints.source import manifests_of
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import is_object_path, kind_at
from reshard_mpi.formats.locations import LibraryRead, StridedView
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorEntry
from reshard_mpi.journal.record_files import STATE
from reshard_mpi.journal.run_status import about_record, state_of
from reshard_mpi.options import OPTIONS
from reshard_mpi.sharding import strategy_files, strategy_table
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.spec_text import spec_text
from reshard_mpi.sharding.strategy import Pattern, Strategy
from reshard_mpi.text import did_you_mean, with_addresses

_MAY_LACK_FILES = "nothing in it tells whether its last files are missing: tensors may be larger than what is here"


def inspect(
    path: str | os.PathLike[str], names: str | Iterable[str] | None = None, *, rank: int | Iterable[int] | None = None
) -> dict[str, Any]:
    """Return a description of what lies at `path`, as plain values.

    "kind" is "shard", "checkpoint", "strategy", "run" (a target folder without a complete target) or "commit" (the
    commit record of a target folder). For a checkpoint that a run has made, or is making, "run" and "commit" describe
    that. "contents" sums up a shard or checkpoint: parameters and bytes of model, optimizer and the rest, by type,
    layers and experts by the names of tensors, and steps. "values" of a shard has what it holds besides tensors.

    Args:
        names: a glob, or several, of the tensors and values (of a strategy: of the parameters and rules) that are
            described; None: all.
        rank: one or several, of which the shards are described; None: all.

    Raises SourceError if there is nothing that can be read, or nothing of these names and ranks.
    """
    ranks = OPTIONS["rank"].check(rank, "rank")
    globs = None if names is None else (names,) if isinstance(names, str) else tuple(names)
    patterns = None if globs is None else tuple(map(Pattern, globs))
    wanted = _TensorFilter(patterns, None if ranks is None else frozenset(ranks))
    source_files.look_again()
    facts = _facts(os.fspath(path), wanted)
    if is_object_path(path):
        facts = _as_written(facts)
    kind, where = facts["kind"], facts["path"]
    if wanted.ranks is not None and kind != "checkpoint":
        raise SourceError(
            "this has no shards to choose from",
            expected="a checkpoint",
            got=f"a {kind}",
            where=where,
            remedy="leave out --rank",
        )
    if globs is None or patterns is None:
        return facts
    if kind not in ("shard", "checkpoint", "strategy"):
        raise SourceError(
            "this has no tensors",
            expected="a checkpoint",
            got=f"a {kind}",
            where=where,
            remedy="leave out the pattern of names",
        )
    own = list(_names(facts))
    for glob, pattern in zip(globs, patterns):
        if not any(map(pattern.matches, own)) and not (kind == "strategy" and own and len(globs) == 1):
            what = "parameter" if kind == "strategy" else "tensor"
            raise no_such_name(what, glob, _names(_facts(where, wanted._replace(names=None))), where)
    return {**facts, "names": names if isinstance(names, str) else list(globs)}


def _as_written(facts: Any) -> Any:
    """Return plain values with addresses in object stores as people write them."""
    if isinstance(facts, dict):
        return {key: _as_written(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return type(facts)(map(_as_written, facts))
    return with_addresses(facts) if isinstance(facts, str) else facts


def no_such_name(what: str, pattern: str, names: Iterable[str], where: str) -> SourceError:
    """Return the error for a pattern that none of the names of `what` matches."""
    name = pattern.partition("[")[0] if pattern.endswith("]") else pattern  # of a tensor, with a slice behind
    return SourceError(
        f"no {what} has a name like this{did_you_mean(name, names)}",
        expected="a pattern of names, such as 'layers.0.*', or the path of another checkpoint",
        got=pattern,
        where=where,
        remedy=f"reshard-mpi inspect {where} '*' lists all",
    )


class _TensorFilter(NamedTuple):
    """A filter on descriptions: tensors by name, shards by rank; None: all."""

    names: tuple[Pattern, ...] | None
    ranks: frozenset[int] | None

    def has_name(self, name: str) -> bool:
        return self.names is None or any(pattern.matches(name) for pattern in self.names)


def _names(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors and texts, or parameters and rules, that a description has."""
    shards = [facts] if facts["kind"] == "shard" else chain.from_iterable(facts.get("shards", {}).values())
    yield from dict.fromkeys(
        name for shard in shards for name in (*shard["tensors"], *shard["strings"], *shard.get("values", ()))
    )
    yield from facts.get("parameters", ())
    yield from (rule["match"] for rule in facts.get("rules", ()))


def _facts(name: str, wanted: _TensorFilter) -> dict[str, Any]:
    if not source_files.exists(name):
        raise SourceError(
            "there is nothing to inspect",
            expected="a shard, a checkpoint folder or a strategy",
            got="nothing",
            where=name,
            remedy="check the path, and that this machine sees it",
        )
    if Path(name).name == STATE:
        name = str(Path(name).parent)
    record = about_record(Path(name))
    if record is not None:
        return record
    state = state_of(Path(name)) if source_files.is_folder(name) else {}
    try:
        files = discovery.find_shards(name)
    except ForeignCheckpointError:
        raise
    except SourceError as error:
        if state:
            return {"kind": "run", "path": name, **state}
        if (
            any(entry.startswith("rank_") for entry in source_files.names(name, ()))
            or any(source_files.exists(Path(name, pointer)) for pointer in formats.pointer_files())
            or formats.is_mark(Path(name).name)
        ):
            raise
        try:
            return _strategy(name, wanted)
        except SourceError:
            if formats.name_of(name) is not None:
                raise error from None
            raise
    if not source_files.is_file(name):
        return {**_checkpoint(in_its_rank(files), wanted), **state}
    try:
        manifest = files.locate(name)
        shard = _shard(manifest, wanted)
    except ReshardError as shard_error:
        try:  # MindSpore's strategy files end in .ckpt too
            return _strategy(name, wanted)
        except ReshardError:
            raise shard_error from None
    contents = contents_of([_as_parts(shard)], steps_of(manifest), one_rank=_is_full(files, shard))
    return {"kind": "shard", **shard, "totals": _totals([shard]), "contents": contents}


def _as_parts(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a shard without the shapes of the wholes that its tensors are parts of."""
    kept = ("dtype", "shape", "size_bytes")
    parts = {name: {key: facts[key] for key in kept} for name, facts in shard["tensors"].items()}
    return {**shard, "tensors": parts}


def _is_full(files: shard_files.ShardFiles, shard: dict[str, Any]) -> bool:
    """Tell whether a file by itself holds whole tensors."""
    lone = shard_files.SingleShard.of(files)
    is_cut = any(facts.get("global_shape", facts["shape"]) != facts["shape"] for facts in shard["tensors"].values())
    return not is_cut and not (lone is not None and lone.siblings())


def _checkpoint(files: shard_files.ShardFiles, wanted: _TensorFilter) -> dict[str, Any]:
    shards: dict[int, list[dict[str, Any]]] = {}
    steps: dict[str, list[Any]] = {}
    for rank, manifests in manifests_of(files, wanted.ranks):
        of_rank = shards[rank] = []
        for manifest in manifests:
            of_rank.append(_shard(manifest, wanted))
            if len(shards) == 1:  # all ranks should say the same
                steps |= steps_of(manifest)
    of_all = [shard for of_rank in shards.values() for shard in of_rank]
    return {
        "kind": "checkpoint",
        "path": files.path,
        "format": files.format,
        "ranks": len(shards),
        **({"files": list(files.one_by_one().shards)} if files.is_folder else {}),
        "size_bytes": sum(shard["size_bytes"] for shard in of_all),
        "totals": _totals(of_all),
        **({"contents": contents_of(of_all, steps, one_rank=len(files.by_rank) == 1)} if wanted.ranks is None else {}),
        **({"left_out": [files.left_out]} if files.left_out else {}),
        "notes": [*files.notes, *([] if formats.info(files.format).knows_file_count else [_MAY_LACK_FILES])],
        "shards": shards,
    }


def _shard(manifest: Manifest, wanted: _TensorFilter) -> dict[str, Any]:
    tensors = {name: _tensor(entry) for name, entry in manifest.tensors.items() if wanted.has_name(name)}
    facts: dict[str, Any] = {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": sum(tensor["size_bytes"] for tensor in tensors.values()),
        "tensors": tensors,
        "strings": {name: text for name, text in manifest.strings.items() if name != NEST and wanted.has_name(name)},
    }
    if values := {name: value for name, value in values_of(manifest).items() if wanted.has_name(name)}:
        facts["values"] = values
    if manifest.left_out:
        facts["left_out"] = list(manifest.left_out)
    if isinstance(manifest.tensors, ChunkedTensors):
        pieces = zip(manifest.tensors, manifest.tensors.numbers)
        facts["pieces"] = sum(len(numbers) for name, numbers in pieces if name in tensors)
        if manifest.tensors.unreadable:
            facts["unreadable"] = dict(manifest.tensors.unreadable)
    if manifest.identity is not None:
        facts |= {"rank": manifest.identity.rank, "world_size": manifest.identity.world_size}
    return facts


def _totals(shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return how many tensors there are, in how many parts, and by type the parts, elements and bytes."""
    names: set[str] = set()
    by_type: dict[str, dict[str, int]] = {}
    for shard in shards:
        names.update(shard["tensors"])
        for tensor in shard["tensors"].values():
            of_type = by_type.setdefault(tensor["dtype"], {"parts": 0, "elements": 0, "size_bytes": 0})
            of_type["parts"] += 1
            of_type["elements"] += math.prod(tensor["shape"])
            of_type["size_bytes"] += tensor["size_bytes"]
    return {
        "tensors": len(names),
        "parts": sum(of_type["parts"] for of_type in by_type.values()),
        "size_bytes": sum(of_type["size_bytes"] for of_type in by_type.values()),
        "by_type": by_type,
    }


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": entry.dtype.name, "shape": list(entry.shape), "size_bytes": entry.size_bytes}
    if entry.box is not None and entry.global_shape is not None:
        facts |= {"offset": list(entry.box.start), "global_shape": list(entry.global_shape)}
    if isinstance(entry.source, LibraryRead):
        facts["chunk"] = list(entry.source.chunk)
    else:
        ranges = entry.stored.ranges if entry.stored is not None else ()
        facts["ranges"] = [[part.offset_bytes, part.length_bytes] for part in ranges]
    if isinstance(entry.source, StridedView):
        facts["strides_bytes"] = list(entry.source.strides_bytes)
    return facts


def _strategy(path: str, wanted: _TensorFilter) -> dict[str, Any]:
    try:
        loaded = strategy_files.load(path)
    except StrategyError as error:
        kind = kind_at(Path(path))
        raise SourceError(
            "neither a checkpoint nor a strategy",
            expected="a shard, a folder of rank_* folders, or strategy files",
            got=error.problem if kind is None else f"{kind.what}: {error.problem}",
            where=path,
            remedy="give one of these; the folders of ranks must be called rank_0, rank_1 and so on (links will do)"
            if kind is None
            else kind.remedy,
        ) from None
    return {"kind": "strategy", "path": path, **_strategy_facts(loaded, wanted)}


def _strategy_facts(loaded: Strategy, wanted: _TensorFilter) -> dict[str, Any]:
    # Of a name without wildcards the rule that places it is meant.
    plain = [pattern.text for pattern in wanted.names or () if pattern.is_plain]
    name = plain[0] if len(plain) == 1 else None
    placing = loaded.rule_of(name) if name is not None and name not in loaded.parameters else None
    facts: dict[str, Any] = {
        "ranks": loaded.world_size,
        "stages": loaded.stages,
        "parameters": {
            name: [_placement(placement, loaded) for placement in placements]
            for name, placements in loaded.parameters.items()
            if wanted.has_name(name)
        },
        "rules": [
            {"match": glob, **_placement(placement, loaded)}
            for number, (glob, placement) in enumerate(loaded.rules)
            if wanted.has_name(glob) or number == placing
        ],
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
        facts["axes"] = {"split": split, "optimizer": [names[axis] for axis in placement.optimizer_axes]}
    return facts


def strategy_as_toml(path: str) -> str:
    """Return the strategy that lies at `path`, or that the shards there carry, as a TOML spec.

    Raises StrategyError if a spec cannot say it, or SourceError if the shards carry none.
    """
    try:
        files = discovery.find_shards(path)
    except SourceError:
        if not source_files.exists(path):
            raise
        return spec_text(strategy_files.load(path))
    first = next((shard for _, shards in manifests_of(files) for shard in shards), None)
    if first is None or first.identity is None:
        raise SourceError(
            "the shards do not say how they are sharded",
            expected="strategy files, or shards that carry their strategy, such as native HDF5 ones",
            got=f"shards in {files.format}",
            where=path,
            remedy="give the strategy files of the checkpoint",
        )
    return spec_text(strategy_table.stated(first.identity.strategy, first.path))
