"""A whole Strategy as one compact text, which self-describing shards carry."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import checks
from reshard_mpi.sharding.strategy.checks import array, integer, integers, known_keys, table, text, wrong
from reshard_mpi.sharding.strategy.limits import (
    MAX_AXES,
    MAX_DIMENSIONS,
    MAX_EXPANDED_DIMENSIONS,
    MAX_FILE_BYTES,
    MAX_LENGTH,
    MAX_RANKS,
    MAX_STAGES,
)
from reshard_mpi.sharding.strategy.mindspore import parse_json, place
from reshard_mpi.sharding.strategy.stages import located

VERSION = 1
# Stages of all the different ways in which parameters are placed.
_MAX_HELD = 1 << 22


def dumps(strategy: Strategy) -> str:
    """Return the strategy as text: the same text for equal strategies, equal placements written once."""
    numbers: dict[Placement, int] = {}
    parameters = {
        name: [numbers.setdefault(placement, len(numbers)) for placement in strategy.parameters[name]]
        for name in sorted(strategy.parameters)
    }
    rules = [[glob, numbers.setdefault(placement, len(numbers))] for glob, placement in strategy.rules]
    content = {
        "version": VERSION,
        "world_size": strategy.world_size,
        "stages": strategy.stages,
        "placements": [_placement_values(placement) for placement in numbers],
        "parameters": parameters,
        "rules": rules,
    }
    return json.dumps(content, separators=(",", ":"))


def loads(data: str, where: str) -> Strategy:
    """Read what `dumps` wrote. Raises StrategyError or LayoutError, with `where` in it, for anything else."""
    if len(data) > MAX_FILE_BYTES:
        raise StrategyError("the placement table is too large", expected=f"{MAX_FILE_BYTES} bytes", where=where)
    content = parse_json(data, where)
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise wrong("the placement table's version", str(VERSION), version, where, "update reshard_mpi")
    known_keys(
        content,
        ("version", "world_size", "stages", "placements", "parameters", "rules"),
        "the placement table",
        where,
    )
    world_size = integer(content.get("world_size"), "world_size", 1, MAX_RANKS, where)
    stages = integer(content.get("stages"), "stages", 1, min(world_size, MAX_STAGES), where)
    if world_size % stages:
        raise wrong("stages", f"a divisor of {world_size} ranks", stages, where)
    listed = array(content.get("placements"), "placements", where)
    placements = tuple(_placement(values, stages, f"{where}, placement {at}") for at, values in enumerate(listed))
    # Parameters of a checkpoint are placed in a few ways.
    known: dict[tuple[int, ...], tuple[Placement, ...]] = {}
    parameters = {
        text(name, "a parameter's name", where): _chosen(at, placements, stages, known, place(where, name))
        for name, at in table(content.get("parameters"), "parameters", where).items()
    }
    rules = tuple(_rule(rule, placements, where) for rule in checks.rules(content.get("rules"), "rules", where))
    checks.patterns((glob for glob, _ in rules), where)
    return Strategy(world_size, stages, parameters, rules, where)


def _placement_values(placement: Placement) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    values: dict[str, Any] = {"mesh": placement.mesh}
    if placement.split:
        values["split"] = placement.split
    if placement.optimizer != 1:
        values["optimizer"] = placement.optimizer
    if placement.sizes:
        values["sizes"] = placement.sizes
    if placement.stages != (0,):
        values["stages"] = placement.stages
    if placement.expanded_shape is not None:
        values["expanded_shape"] = placement.expanded_shape
    if placement.open_ended:
        values["open_ended"] = True
    return values


def _placement(values: Any, stages: int, where: str) -> Placement:
    values = table(values, "a placement", where)
    known_keys(
        values,
        ("mesh", "split", "optimizer", "sizes", "stages", "expanded_shape", "open_ended"),
        "a placement",
        where,
    )
    mesh = integers(array(values.get("mesh"), "mesh", where, MAX_AXES), "mesh", 1, MAX_RANKS, where)
    split = tuple(
        integers(axes, "split", 0, max(len(mesh) - 1, 0), where)
        for axes in array(values.get("split", []), "split", where, MAX_DIMENSIONS)
    )
    at = integers(values.get("stages", [0]), "stages", 0, stages - 1, where)
    if not at or any(first >= second for first, second in pairwise(at)):
        raise wrong("stages", "stages in ascending order", list(at[:16]), where)
    shape = values.get("expanded_shape")
    if shape is not None:
        shape = integers(shape, "expanded_shape", 0, MAX_LENGTH, where)
        if len(shape) != len(split) or len(shape) > MAX_EXPANDED_DIMENSIONS:
            raise wrong("expanded_shape", "one length for each entry of split", list(shape[:16]), where)
    open_ended = values.get("open_ended", False)
    if not isinstance(open_ended, bool) or (open_ended and shape is not None):
        raise wrong("open_ended", "true or false, and not true beside expanded_shape", open_ended, where)
    try:
        return Placement(
            mesh,
            split,
            integer(values.get("optimizer", 1), "optimizer", 1, MAX_RANKS, where),
            _sizes(values.get("sizes", []), len(split), where),
            at,
            shape,
            open_ended,
        )
    except LayoutError as error:
        raise located(error, where) from None


def _sizes(value: Any, dims: int, where: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    made: dict[int, tuple[int, ...]] = {}
    for pair in array(value, "sizes", where, MAX_DIMENSIONS):
        if not isinstance(pair, list) or len(pair) != 2:
            raise wrong("sizes", "pairs of a dimension and its slice sizes", pair, where)
        dim = integer(pair[0], "sizes", max(made, default=-1) + 1, dims - 1, where)
        made[dim] = integers(pair[1], "sizes", 0, MAX_LENGTH, where)
    return tuple(made.items())


def _chosen(
    value: Any,
    placements: tuple[Placement, ...],
    stages: int,
    known: dict[tuple[int, ...], tuple[Placement, ...]],
    where: str,
) -> tuple[Placement, ...]:
    numbers = integers(value, "placements", 0, len(placements) - 1, where)
    chosen = known.get(numbers)
    if chosen is None:
        chosen = tuple(placements[at] for at in numbers)
        held = sum(len(placement.stages) for placement in chosen)
        if held * (len(known) + 1) > _MAX_HELD:
            raise wrong("placements of the parameters", "a few ways for many parameters", f"{len(known)} ways", where)
        if not chosen or held > stages or len({at for placement in chosen for at in placement.stages}) != held:
            raise wrong("placements of a parameter", "one or more, each for stages of its own", value, where)
        known[numbers] = chosen
    return chosen


def _rule(value: Any, placements: tuple[Placement, ...], where: str) -> tuple[str, Placement]:
    if not isinstance(value, list) or len(value) != 2:
        raise wrong("a rule", "a pattern and the number of a placement", value, where)
    glob = text(value[0], "a pattern", where)
    return glob, placements[integer(value[1], "a placement", 0, len(placements) - 1, where)]
