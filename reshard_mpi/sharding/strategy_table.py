"""Read and write a strategy as the table that native shards carry (`dumps`, `loads`)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from reshard_mpi.errors import LayoutError, StrategyError, told
from reshard_mpi.sharding import value_checks
from reshard_mpi.sharding.mindspore_json import parse_json, place
from reshard_mpi.sharding.mindspore_layouts import located
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.sharding.value_checks import (
    MAX_AXES,
    MAX_DIMENSIONS,
    MAX_EXPANDED_DIMENSIONS,
    MAX_FILE_BYTES,
    MAX_LENGTH,
    MAX_RANKS,
    MAX_STAGES,
    array,
    integer,
    integers,
    known_keys,
    table,
    text,
    wrong,
)

VERSION = 1
# Stages kept at most, added up over the different ways in which parameters are placed.
_MAX_HELD = 1 << 22
# What a placement on a mesh is made of, where nothing else is said.
_UNCUT = vars(Placement((1,)))


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


def stated(data: str, shard: str) -> Strategy:
    """Return the strategy that the shard file `shard` states as `data`. Raises StrategyError, which names the shard."""
    try:
        return loads(data, shard)
    except (StrategyError, LayoutError) as error:
        raise StrategyError(
            "the strategy that a shard states cannot be read",
            expected="the text that this program writes there",
            got=told(error),
            where=error.where or shard,
            remedy="restore this shard",
        ) from None


def loads(data: str, where: str) -> Strategy:
    """Return the strategy that `dumps` wrote as `data`. Raises StrategyError or LayoutError for anything else.

    Args:
        where: what the text was read from, for errors.
    """
    if len(data) > MAX_FILE_BYTES:
        raise StrategyError("the placement table is too large", expected=f"{MAX_FILE_BYTES} bytes", where=where)
    content = parse_json(data, where)
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise wrong("the placement table's version", str(VERSION), version, where, "update reshard_mpi")
    known_keys(
        content, ("version", "world_size", "stages", "placements", "parameters", "rules"), "the placement table", where
    )
    world_size = integer(content.get("world_size"), "world_size", 1, MAX_RANKS, where)
    stages = integer(content.get("stages"), "stages", 1, min(world_size, MAX_STAGES), where)
    if world_size % stages:
        raise wrong("stages", f"a divisor of {world_size} ranks", stages, where)
    listed = array(content.get("placements"), "placements", where)
    placements = tuple(_placement(entry, stages, f"{where}, placement {number}") for number, entry in enumerate(listed))
    parameters = _parameters(table(content.get("parameters"), "parameters", where), placements, stages, where)
    rules = tuple(_rule(rule, placements, where) for rule in value_checks.rules(content.get("rules"), "rules", where))
    value_checks.patterns((glob for glob, _ in rules), where)
    return Strategy(world_size, stages, parameters, rules, where)


def _placement_values(placement: Placement) -> dict[str, Any]:
    """Return the fields that differ from their defaults, in the order in which the class has them."""
    return {name: value for name, value in vars(placement).items() if name == "mesh" or value != _UNCUT[name]}


def _placement(values: Any, stages: int, where: str) -> Placement:
    values = table(values, "a placement", where)
    known_keys(values, list(_UNCUT), "a placement", where)
    mesh = integers(array(values.get("mesh"), "mesh", where, MAX_AXES), "mesh", 1, MAX_RANKS, where)
    split = tuple(
        integers(axes, "split", 0, max(len(mesh) - 1, 0), where)
        for axes in array(values.get("split", []), "split", where, MAX_DIMENSIONS)
    )
    stages_held = integers(values.get("stages", [0]), "stages", 0, stages - 1, where)
    if not stages_held or any(first >= second for first, second in pairwise(stages_held)):
        raise wrong("stages", "stages in ascending order", list(stages_held[:16]), where)
    shape = values.get("expanded_shape")
    if shape is not None:
        shape = integers(shape, "expanded_shape", 0, MAX_LENGTH, where)
        if len(shape) != len(split) or len(shape) > MAX_EXPANDED_DIMENSIONS:
            raise wrong("expanded_shape", "one length for each entry of split", list(shape[:16]), where)
    open_ended = values.get("open_ended", False)
    if not isinstance(open_ended, bool) or (open_ended and shape is not None):
        raise wrong("open_ended", "true or false, and not true beside expanded_shape", open_ended, where)
    whole_scalars = values.get("whole_scalars", False)
    if not isinstance(whole_scalars, bool) or (whole_scalars and not open_ended):
        raise wrong("whole_scalars", "true or false, and true only beside open_ended", whole_scalars, where)
    ceil = values.get("ceil", False)
    if not isinstance(ceil, bool):
        raise wrong("ceil", "true or false", ceil, where)
    try:
        return Placement(
            mesh,
            split,
            integer(values.get("optimizer", 1), "optimizer", 1, MAX_RANKS, where),
            _sizes(values.get("sizes", []), len(split), where),
            stages_held,
            shape,
            open_ended,
            whole_scalars,
            ceil,
        )
    except LayoutError as error:
        raise located(error, where) from None


def _sizes(value: Any, dims: int, where: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    by_dim: dict[int, tuple[int, ...]] = {}
    for pair in array(value, "sizes", where, MAX_DIMENSIONS):
        if not isinstance(pair, list) or len(pair) != 2:
            raise wrong("sizes", "pairs of a dimension and its slice sizes", pair, where)
        dim = integer(pair[0], "sizes", max(by_dim, default=-1) + 1, dims - 1, where)
        by_dim[dim] = integers(pair[1], "sizes", 0, MAX_LENGTH, where)
    return tuple(by_dim.items())


def _parameters(
    listed: dict[str, Any], placements: tuple[Placement, ...], stages: int, where: str
) -> dict[str, tuple[Placement, ...]]:
    """Return the placements of each parameter. Those with the same numbers share one object, as most do."""
    parameters: dict[str, tuple[Placement, ...]] = {}
    ways: dict[tuple[int, ...], tuple[Placement, ...]] = {}
    for name, value in listed.items():
        text(name, "a parameter's name", where)
        parameter = place(where, name)
        numbers = integers(value, "placements", 0, len(placements) - 1, parameter)
        if numbers not in ways:
            chosen = tuple(placements[number] for number in numbers)
            count = sum(len(placement.stages) for placement in chosen)
            if count * (len(ways) + 1) > _MAX_HELD:
                got = f"{len(ways)} ways"
                raise wrong("placements of the parameters", "a few ways for many parameters", got, parameter)
            if not chosen or count > stages or len({stage for way in chosen for stage in way.stages}) != count:
                raise wrong("placements of a parameter", "one or more, each for stages of its own", value, parameter)
            ways[numbers] = chosen
        parameters[name] = ways[numbers]
    return parameters


def _rule(value: Any, placements: tuple[Placement, ...], where: str) -> tuple[str, Placement]:
    if not isinstance(value, list) or len(value) != 2:
        raise wrong("a rule", "a pattern and the number of a placement", value, where)
    glob = text(value[0], "a pattern", where)
    return glob, placements[integer(value[1], "a placement", 0, len(placements) - 1, where)]
