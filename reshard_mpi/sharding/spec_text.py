"""Write a strategy as a TOML spec (`spec_text`).

Two meshes number the same ranks row-major, so an axis is told by its stride (how many ranks apart its neighbours are)
and its length. A mesh whose axes begin and end wherever an axis in use begins or ends says the same of every placement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.groups import grouped
from reshard_mpi.sharding import toml_spec
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.sharding.value_checks import MAX_RULES
from reshard_mpi.text import natural_key, one_line


class _MeshAxis(NamedTuple):
    """The ranks of a stage whose numbers differ by multiples of `stride`, up to `end`, the stride of the next axis."""

    stride: int
    end: int

    def is_within(self, other: _MeshAxis) -> bool:
        return other.stride <= self.stride < self.end <= other.end


def common_mesh(placements: Iterable[Placement]) -> tuple[int, ...]:
    """Return the coarsest mesh on which all the placements, of stages of one size, can be said.

    Raises LayoutError if there is none.
    """
    bounds = {1}
    for placement in placements:
        bounds |= {placement.stage_size, *_bounds(placement)}
    ordered = sorted(bounds, reverse=True)
    for larger, smaller in pairwise(ordered):
        if larger % smaller:
            raise LayoutError(
                "the meshes cannot be made one",
                expected="axes of which one begins where another does, or within it",
                got=f"axes that begin at every {smaller} ranks, and others at every {larger}",
            )
    return tuple(larger // smaller for larger, smaller in pairwise(ordered)) or (1,)


def on_mesh(placement: Placement, mesh: tuple[int, ...]) -> Placement:
    """Return a placement as one over `mesh`, a common mesh of it and others: the same for tensors of any shape.

    It tells only the dimensions that are cut, so that equal cuts are equal. Raises LayoutError if it cannot be said.
    """
    cuts = _cuts(placement)
    if placement.expanded_shape is not None and any(cuts):
        raise LayoutError(
            "a nested layout tells the factors of dimensions, not the dimensions",
            expected="one entry for each dimension of the tensor",
            got=f"entries for {list(placement.expanded_shape)}",
            remedy="give the strategy as a protobuf file, which keeps nested layouts as they are",
        )
    axes = _axes(mesh)
    split = [tuple(number for cut in dim for number, axis in enumerate(axes) if axis.is_within(cut)) for dim in cuts]
    if placement.ceil and [len(numbers) for numbers in split] != [len(dim) for dim in cuts]:
        raise LayoutError(
            "a cut by ceiling division does not go over several axes as over one",
            expected=f"whole axes of mesh {list(placement.mesh)}",
            got=f"mesh {list(mesh)}",
        )
    sized = max((dim for dim, _ in placement.sizes), default=-1)
    while split and not split[-1] and len(split) > sized + 1:
        split.pop()
    return placement.changed(
        mesh=mesh,
        split=tuple(split),
        expanded_shape=None,
        open_ended=True,
        whole_scalars=placement.whole_scalars and placement.is_cut,
        ceil=placement.ceil and bool(split),
    )


def _axes(mesh: tuple[int, ...]) -> list[_MeshAxis]:
    axes, stride = [], 1
    for length in reversed(mesh):
        axes.append(_MeshAxis(stride, stride * length))
        stride *= length
    return axes[::-1]


def _cuts(placement: Placement) -> list[list[_MeshAxis]]:
    """Return for each dimension the axes that cut it, major first; two that one longer axis is the same as are joined.

    Axes of one rank cut nothing. What is cut by ceiling division is cut otherwise by a longer axis.
    """
    axes, cuts = _axes(placement.mesh), []
    for dim in placement.split:
        joined: list[_MeshAxis] = []
        for axis in (axes[number] for number in dim if placement.mesh[number] > 1):
            if joined and joined[-1].stride == axis.end and not placement.ceil:
                axis = _MeshAxis(axis.stride, joined.pop().end)
            joined.append(axis)
        cuts.append(joined)
    return cuts


def _bounds(placement: Placement) -> set[int]:
    """Return the strides at which an axis must begin or end under the placement."""
    used = sorted(axis for dim in _cuts(placement) for axis in dim)
    bounds = {bound for axis in used for bound in axis}
    pieces, low = placement.optimizer, 1
    # The optimizer's pieces go round over the free ranks, so they are the last axes of those between the used ones.
    for axis in (*used, _MeshAxis(placement.stage_size, placement.stage_size)):
        free = axis.stride // low
        if pieces > 1 and free > 1:
            if pieces % free and free % pieces:
                raise LayoutError(
                    "the optimizer cut does not go over whole axes",
                    expected=f"a divisor or a multiple of {free}, the ranks of an axis that cuts nothing",
                    got=f"an optimizer cut into {placement.optimizer} over mesh {list(placement.mesh)}",
                )
            bounds |= {low, low * min(pieces, free)}
            pieces //= min(pieces, free)
        low = axis.end
    return bounds


_DIGIT = re.compile("[0-9]")
_SPECIAL = re.compile(r"[*?[]")
# Names that differ in more digits than layers, experts and the like have are listed one by one.
_MAX_DIGITS = 24
_LEAST_RANGE = 3


def exact_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns (see `Patterns`): each of the names matches exactly one of them, and no other name any.

    They are in the natural order of names.
    """
    alike = grouped((_DIGIT.sub("0", name), name) for name in sorted(names, key=natural_key))
    return [pattern for group in alike.values() for pattern in _of_alike(group)]


def _of_alike(names: list[str]) -> Iterator[str]:
    """Yield the patterns of names that differ from each other in nothing but digits."""
    places = [match.start() for match in _DIGIT.finditer(names[0])]
    differing = [place for place in places if any(name[place] != names[0][place] for name in names)]
    if not 0 < len(differing) <= _MAX_DIGITS:
        yield from map(_literal, dict.fromkeys(names))
        return
    texts = frozenset("".join(name[place] for place in differing) for name in names)
    for classes in _products(texts):
        begin, parts = 0, []
        for place, digits in zip(differing, classes):
            parts += [_literal(names[0][begin:place]), _one_of(digits)]
            begin = place + 1
        yield "".join([*parts, _literal(names[0][begin:])])


def _products(texts: frozenset[str]) -> list[tuple[str, ...]]:
    """Return products of sets of digits, one for each place, which together are exactly `texts` of one length."""
    if texts == {""}:
        return [()]
    rests = grouped((text[0], text[1:]) for text in texts)
    digits_of = grouped((frozenset(rests[digit]), digit) for digit in sorted(rests))
    return [("".join(digits), *rest) for texts, digits in digits_of.items() for rest in _products(texts)]


def _one_of(digits: Collection[str]) -> str:
    """Return the pattern of one of the digits, which are ascending."""
    if len(digits) == 1:
        return "".join(digits)
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    texts = (f"{run[0]}-{run[-1]}" if len(run) >= _LEAST_RANGE else "".join(run) for run in runs)
    return f"[{''.join(texts)}]"


def _literal(text: str) -> str:
    """Return the pattern that matches `text` alone."""
    return _SPECIAL.sub(r"[\g<0>]", text)


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
    names_of = grouped(
        (_only_one(name, [said[placement] for placement in placements], strategy), name)
        for name, placements in strategy.parameters.items()
    )
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
    _require_same(toml_spec.parse(text, strategy.origin), names_of, rules, strategy)
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
    return placement.changed(whole_scalars=bool(placement.split) or placement.optimizer > 1)


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
