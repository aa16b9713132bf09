"""What `inspect` found, as lines for people."""

from __future__ import annotations

from typing import Any

from reshard_mpi.journal.state import as_lines
from reshard_mpi.text import counted, one_line, ranges
from reshard_mpi.units import format_bytes

# Of a string so many characters are shown.
_MAX_SHOWN = 200


def as_text(facts: dict[str, Any]) -> str:
    """Return a description by `inspect` as lines for people."""
    return "\n".join(map(one_line, _lines(facts)))


def _lines(facts: dict[str, Any]) -> list[str]:
    if facts["kind"] == "strategy":
        return _strategy_lines(facts)
    if facts["kind"] in ("run", "commit"):
        return as_lines(facts)
    if facts["kind"] == "shard":
        return [*_shard_lines(facts), _total_line(facts["totals"])]
    size = format_bytes(facts["size_bytes"])
    holders = counted(len(facts["files"]), "file") if "files" in facts else counted(facts["ranks"], "rank")
    lines = [f"checkpoint: {holders}, {facts['format']}, {size} of tensors", *facts["notes"]]
    lines += _tensor_lines(facts) if "names" in facts else _file_lines(facts)
    shards = (shard for shards in facts["shards"].values() for shard in shards)
    lost = (_lost_lines(lossy) for lossy in (*shards, facts))
    lines += dict.fromkeys(line for of_shard in lost for line in of_shard)
    lines.append(_total_line(facts["totals"]))
    return [*lines, *as_lines({name: facts[name] for name in ("run", "commit") if name in facts})]


def _file_lines(checkpoint: dict[str, Any]) -> list[str]:
    if "files" in checkpoint:  # a folder with an index has no ranks
        return [f"  {path}" for path in checkpoint["files"]]
    return [
        f"  rank {rank}: {counted(len(shard['tensors']), 'tensor')}, "
        f"{format_bytes(shard['size_bytes'])}  {shard['path']}"
        for rank, shards in checkpoint["shards"].items()
        for shard in shards
    ]


def _tensor_lines(checkpoint: dict[str, Any]) -> list[str]:
    """Return a line for each tensor and kind of part of it, with the ranks that hold such a part."""
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, shards in checkpoint["shards"].items():
        for shard in shards:
            for name, facts in shard["tensors"].items():
                whole = facts.get("global_shape", facts["shape"])
                of_whole = f" of {whole}" if whole != facts["shape"] else ""
                part = f"{facts['dtype']} {facts['shape']}{of_whole}  {format_bytes(facts['size_bytes'])}"
                holders.setdefault(name, {}).setdefault(part, []).append(int(rank))
    one_rank = len(checkpoint["shards"]) == 1
    return [
        f"  {name}  {part}" + ("" if one_rank else f"  {'ranks' if len(ranks) > 1 else 'rank'} {ranges(ranks)}")
        for name, parts in holders.items()
        for part, ranks in parts.items()
    ]


def _total_line(totals: dict[str, Any]) -> str:
    parts = f" in {totals['parts']} parts" if totals["parts"] != totals["tensors"] else ""
    types = [f"{of['parts']} {name} ({format_bytes(of['size_bytes'])})" for name, of in totals["by_type"].items()]
    count = counted(totals["tensors"], "tensor")
    return f"  total: {count}{parts}, {format_bytes(totals['size_bytes'])}: {', '.join(types) or 'none'}"


def _shard_lines(shard: dict[str, Any]) -> list[str]:
    place = f", rank {shard['rank']} of {shard['world_size']}" if "rank" in shard else ""
    size = format_bytes(shard["size_bytes"])
    lines = [f"{shard['format']} shard{place}: {len(shard['tensors'])} tensors, {size}"]
    for name, facts in shard["tensors"].items():
        whole = f"  at {facts['offset']} of {facts['global_shape']}" if "offset" in facts else ""
        lines.append(f"  {name}  {facts['dtype']} {facts['shape']}  {format_bytes(facts['size_bytes'])}{whole}")
    lines += [f"  {name}  {_shown(text)}" for name, text in shard["strings"].items()]
    return [*lines, *_lost_lines(shard)]


def _lost_lines(shard: dict[str, Any]) -> list[str]:
    """Return a line for each thing of a shard that no target can have."""
    unreadable = [f"  cannot be read: {name}: {why}" for name, why in shard.get("unreadable", {}).items()]
    return unreadable + [f"  left out: {what}" for what in shard.get("left_out", ())]


def _shown(text: str) -> str:
    """Return a string as people are shown it: of a long one the beginning."""
    return repr(text) if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}... ({len(text)} characters)"


def _strategy_lines(facts: dict[str, Any]) -> list[str]:
    count = counted(len(facts["parameters"]), "parameter") if facts["parameters"] or not facts["rules"] else ""
    rules = counted(len(facts["rules"]), "rule") if facts["rules"] else ""
    listed = ", ".join(filter(None, (count, rules)))
    ranks, stages = counted(facts["ranks"], "rank"), counted(facts["stages"], "stage")
    lines = [f"strategy: {ranks} in {stages}, {listed}"]
    if "mesh" in facts:
        lines.append(f"  mesh {' '.join(f'{axis}={length}' for axis, length in facts['mesh'].items())}")
    listed_placements = [*facts["parameters"].items(), *((rule["match"], [rule]) for rule in facts["rules"])]
    placed = ((name, placement) for name, placements in listed_placements for placement in placements)
    if "mesh" in facts:
        return lines + [f"  {name}  {_named_placement_text(placement, facts['stages'])}" for name, placement in placed]
    return lines + [f"  {name}  {_placement_text(placement)}" for name, placement in placed]


def _placement_text(facts: dict[str, Any]) -> str:
    """Return a placement whose axes have no names in the words of a spec; they are axis0, axis1 and so on."""
    cuts = [f"{dim}={'+'.join(f'axis{axis}' for axis in axes)}" for dim, axes in enumerate(facts["split"]) if axes]
    text = " ".join(["split", *cuts] if cuts else ["whole"])
    if facts["optimizer"] > 1:
        text = f"{text if cuts else ''} optimizer {facts['optimizer']}".strip()
    if text != "whole":
        text = f"mesh {'x'.join(map(str, facts['mesh']))} {text}"
    if facts["stages"] != [0]:
        text += f" stages {facts['stages']}"
    return text + (f" sizes {facts['sizes']}" if "sizes" in facts else "")


def _named_placement_text(facts: dict[str, Any], stages: int) -> str:
    """Return a placement by a rule of a spec, in the words of the spec. stages: how many the strategy has."""
    axes, sizes = facts["axes"], facts.get("sizes", {})
    cuts = " ".join(f"{dim}={'+'.join(names)}" for dim, names in axes["split"].items())
    of_stages = "" if len(facts["stages"]) == stages else f"stage {' '.join(map(str, facts['stages']))}"
    parts = [
        f"split {cuts}" if cuts else "",
        f"optimizer {'+'.join(axes['optimizer'])}" if axes["optimizer"] else "",
        f"sizes {sizes}" if isinstance(sizes, str) else " ".join(f"sizes {dim}={part}" for dim, part in sizes.items()),
        of_stages,
    ]
    return " ".join(filter(None, parts)) or "whole"
