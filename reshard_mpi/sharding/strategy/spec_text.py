"""A strategy as the text of a TOML spec, which `toml` reads as the same placements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding.common_mesh import common_mesh, on_mesh
from reshard_mpi.sharding.exact_patterns import exact_patterns
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import toml
from reshard_mpi.sharding.strategy.limits import MAX_RULES
from reshard_mpi.text import natural_key, one_line

_REMEDY = "use the strategy files themselves"


def spec_text(strategy: Strategy) -> str:
    """Return a spec that places every name as `strategy` does, listed or not.

    Listed names become patterns that match exactly these names. Raises StrategyError if a spec cannot say it: meshes
    that cannot be made one, a parameter that stages cut differently, nested layouts whose dimensions are not known.
    """
    mesh, axes = _mesh(strategy)
    first_name = {rule: glob for glob, rule in reversed(strategy.rules)}
    for name, placements in strategy.parameters.items():
        first_name.update(dict.fromkeys(placements, name))
    said = {placement: _said(name, placement, strategy, mesh) for placement, name in first_name.items()}
    names_of: dict[Placement, list[str]] = {}
    for name, placements in strategy.parameters.items():
        placement = _only_one(name, [said[placement] for placement in placements], strategy)
        names_of.setdefault(placement, []).append(name)
    by_name = sorted(names_of.items(), key=lambda group: min(map(natural_key, group[1])))
    listed = [(glob, placement) for placement, names in by_name for glob in exact_patterns(names)]
    rules = [(glob, _caught(said[rule]) if glob == "*" else said[rule]) for glob, rule in strategy.rules]
    if len(listed) + len(rules) > MAX_RULES:
        problem = "the strategy has too many patterns of names for a spec"
        raise _unsayable(strategy, problem, f"at most {MAX_RULES}", str(len(listed) + len(rules)))
    optional = {glob for glob, _ in strategy.rules if glob != "*"} - strategy.required_rules
    lines = [
        f"# What {one_line(strategy.origin)} says, as a TOML spec.",
        "# A rule that places no tensor of a checkpoint is refused, unless it says `optional = true`.",
        *([f"stages = {strategy.stages}", ""] if strategy.stages > 1 else []),
        "[mesh]",
        *(f"{_key(axis)} = {length}" for axis, length in zip(axes, mesh)),
    ]
    for number, (glob, placement) in enumerate((*listed, *rules)):
        lines += ["", *_rule_lines(glob, placement, axes, strategy.stages)]
        if number >= len(listed) and glob in optional:
            lines.append("optional = true")
    text = "\n".join(lines)
    _require_same(toml.parse(text, strategy.origin), names_of, rules, strategy)
    return text


def _mesh(strategy: Strategy) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh of the spec, and the names of its axes."""
    if strategy.axes:
        return strategy.rules[0][1].mesh, strategy.axes
    listed = (placement for placements in strategy.parameters.values() for placement in placements)
    placements = dict.fromkeys((*listed, *(placement for _, placement in strategy.rules)))
    try:
        mesh = common_mesh(placements)
    except LayoutError as error:
        raise _unsayable(strategy, error.problem, error.expected, error.got) from None
    return mesh, tuple(f"axis{number}" for number in range(len(mesh)))


def _said(name: str, placement: Placement, strategy: Strategy, mesh: tuple[int, ...]) -> Placement:
    """Return a placement of the parameter or pattern `name` as one over `mesh`."""
    if strategy.axes:
        return placement
    try:
        return on_mesh(placement, mesh)
    except LayoutError as error:
        problem = f"a spec cannot say how {name!r} is placed: {error.problem}"
        raise _unsayable(strategy, problem, error.expected, error.got, error.remedy) from None


def _only_one(name: str, placements: Sequence[Placement], strategy: Strategy) -> Placement:
    """Return the placement of a listed parameter, which is the same in all the stages that hold it."""
    stages = tuple(sorted(stage for placement in placements for stage in placement.stages))
    ways = {placement.with_stages(stages) for placement in placements}
    if len(ways) > 1:
        problem, got = f"stages hold {name!r} in different ways", f"{len(ways)} ways in stages {list(stages)}"
        raise _unsayable(strategy, problem, "one way for each parameter, as a spec has it", got)
    (placement,) = ways
    if placement.whole_scalars:
        problem, expected = f"{name!r} is cut unless it is a scalar", "one way, which a spec says of a name"
        raise _unsayable(strategy, problem, expected, "the way of a rule for every name")
    return placement


def _caught(placement: Placement) -> Placement:
    """Return the placement of a rule for every name, which cuts no scalars."""
    return replace(placement, whole_scalars=bool(placement.split) or placement.optimizer > 1)


def _unsayable(strategy: Strategy, problem: str, expected: str, got: str, remedy: str = "") -> StrategyError:
    return StrategyError(problem, expected=expected, got=got, where=strategy.origin, remedy=remedy or _REMEDY)


def _rule_lines(glob: str, placement: Placement, axes: Sequence[str], stages: int) -> Iterator[str]:
    yield "[[parameter]]"
    yield f"match = {_text(glob)}"
    last = len(placement.split) - 1
    cuts = [f"{dim} = {_names(cut, axes)}" for dim, cut in enumerate(placement.split) if cut or dim == last]
    if cuts:
        yield f"split = {{ {', '.join(cuts)} }}"
    if placement.optimizer > 1:
        yield f"optimizer = {_names(placement.optimizer_axes, axes)}"
    if placement.ceil:
        yield 'sizes = "ceil"'
    if placement.sizes:
        yield f"sizes = {{ {', '.join(f'{dim} = {list(lengths)}' for dim, lengths in placement.sizes)} }}"
    if len(placement.stages) < stages:
        yield f"stage = {placement.stages[0] if len(placement.stages) == 1 else list(placement.stages)}"


def _names(numbers: Sequence[int], axes: Sequence[str]) -> str:
    return f"[{', '.join(_text(axes[number]) for number in numbers)}]"


def _text(text: str) -> str:
    """Return a string of TOML, with all that is not printable escaped."""
    return "".join(
        char if char.isprintable() else f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
        for char in json.dumps(text, ensure_ascii=False)
    )


def _key(text: str) -> str:
    return text if text.isascii() and text.replace("_", "").replace("-", "").isalnum() else _text(text)


def _require_same(
    read: Strategy,
    names_of: Mapping[Placement, Sequence[str]],
    rules: Sequence[tuple[str, Placement]],
    strategy: Strategy,
) -> None:
    """Raise StrategyError unless the spec, as it was read back, places all listed names so, and has the rules."""
    listed = len(read.rules) - len(rules)
    other = [glob for (glob, rule), meant in zip(read.rules[listed:], rules) if (glob, rule) != meant]
    other += [name for meant, names in names_of.items() for name in names if read.find(name) != (meant,)]
    if other:
        problem = f"a spec cannot say how {other[0]!r} is placed"
        raise _unsayable(strategy, problem, "the same placement when it is read back", "another one")
