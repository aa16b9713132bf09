"""Read the TOML spec, and find where a rule stands in it (`parse`, `place_of_rule`)."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding import value_checks
from reshard_mpi.sharding.mindspore_json import StageFile
from reshard_mpi.sharding.mindspore_layouts import located, merged_stages
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.sharding.strategy_files import StrategyFile, StrategyForm, decode, distinct, look_all, text_of
from reshard_mpi.sharding.value_checks import (
    MAX_AXES,
    MAX_DIMENSIONS,
    MAX_LENGTH,
    MAX_RANKS,
    MAX_RULES,
    MAX_SPEC_BYTES,
    MAX_STAGES,
    array,
    integer,
    integers,
    known_keys,
    table,
    text,
    wrong,
)
from reshard_mpi.text import shortened

# What the marks of TOML cost when it is parsed; a key's dots are looked at for each of its parts anew.
_MARK_BYTES = {".": 700, "[": 700, "{": 700, "=": 600}
_MAX_DOTS = 64
# The keys of a spec, and of each of its rules.
SPEC_KEYS = ("mesh", "stages", "parameter")
RULE_KEYS = ("match", "split", "optimizer", "stage", "sizes", "optional")

MeshSizes = Mapping[str, int]


def parse(data: str, where: str) -> Strategy:
    """Read a spec. Raises StrategyError or LayoutError, with `where` in it, for a spec without meaning."""
    content = _content(data, where)
    known_keys(content, SPEC_KEYS, "the spec", where)
    axes = table(content.get("mesh"), "mesh", where)
    mesh = {
        text(axis, "a mesh axis", where): integer(size, f"mesh axis {axis!r}", 1, MAX_RANKS, where)
        for axis, size in axes.items()
    }
    stages = integer(content.get("stages", 1), "stages", 1, MAX_STAGES, where)
    ranks = math.prod(mesh.values()) * stages
    if not 1 <= len(mesh) <= MAX_AXES or ranks > MAX_RANKS:
        raise wrong("mesh", f"1 to {MAX_AXES} axes and at most {MAX_RANKS} ranks in all", axes, where)
    entries = value_checks.rules(content.get("parameter"), "[[parameter]]", where)
    if not entries:
        raise wrong("[[parameter]]", "one entry or more", entries, where)
    by_entry = [tuple(_rules(entry, number, mesh, stages, where)) for number, entry in enumerate(entries, 1)]
    rules = tuple(value_checks.rules([rule for of_entry in by_entry for rule in of_entry], "[[parameter]]", where))
    value_checks.patterns((glob for glob, _ in rules), where)
    needed = (of_entry for of_entry, entry in zip(by_entry, entries) if not entry.get("optional"))
    required = frozenset(glob for of_entry in needed for glob, _ in of_entry if glob != "*")
    return Strategy(ranks, stages, {}, rules, where, required_rules=required, axes=tuple(mesh))


def _content(data: str, where: str) -> dict[str, Any]:
    """Read the TOML of a spec. Raises StrategyError if it is none, or one that takes too much to read."""
    if len(data) > MAX_SPEC_BYTES:
        raise StrategyError("the spec is too large", expected=f"at most {MAX_SPEC_BYTES} bytes", where=where)
    if any(line.count(".") > _MAX_DOTS for line in data.split("\n")):
        raise StrategyError(
            "a line of the spec has too many dots",
            expected=f"at most {_MAX_DOTS}",
            where=where,
            remedy="write a list of patterns in several lines",
        )
    value_checks.parsed_size(sum(cost * data.count(mark) for mark, cost in _MARK_BYTES.items()), 0, where)
    try:
        content = tomllib.loads(data)
    except (ValueError, RecursionError) as error:
        raise StrategyError(
            "this is neither protobuf nor JSON nor TOML",
            expected="a MindSpore strategy (protobuf or JSON) or a TOML spec",
            got=f"text that TOML refuses: {str(error)[:200]}",
            where=where,
        ) from None
    if "map" in content:
        raise StrategyError(
            "this is a map between two models, and no strategy",
            expected="[mesh] and [[parameter]]",
            got="[[map]]",
            where=where,
            remedy="give it by --map",
        )
    return content


def _rules(entry: Any, number: int, mesh: MeshSizes, stages: int, where: str) -> Iterator[tuple[str, Placement]]:
    """Yield a pattern with its placement for each pattern of an entry."""
    where = f"{where}, [[parameter]] {number}"
    entry = table(entry, "a parameter", where)
    known_keys(entry, RULE_KEYS, "a parameter", where)
    match = entry.get("match")
    listed = array(match, "match", where, MAX_RULES) if isinstance(match, list) else [match]
    globs = list(dict.fromkeys(text(glob, "match", where) for glob in listed))
    if not globs:
        raise wrong("match", "a pattern, or a list of patterns", match, where)
    where += f" ({shortened(list(map(repr, globs)))})"
    if not isinstance(entry.get("optional", False), bool):
        raise wrong("optional", "true or false", entry["optional"], where)
    by_dim = {
        _dimension(key, "split", where): _axes(axes, f"split {key}", mesh, where)
        for key, axes in table(entry.get("split", {}), "split", where).items()
    }
    split = tuple(by_dim.get(dim, ()) for dim in range(max(by_dim, default=-1) + 1))
    is_ceil = entry.get("sizes") == "ceil"
    if not is_ceil and not isinstance(entry.get("sizes", {}), dict):
        raise wrong("sizes", '"ceil", or the lengths of all slices, such as { 0 = [5, 3] }', entry["sizes"], where)
    if is_ceil and not split:
        raise wrong("sizes", "a split that it is said of", "ceil", where)
    sizes = {
        _dimension(key, "sizes", where): integers(values, f"sizes {key}", 0, MAX_LENGTH, where)
        for key, values in ({} if is_ceil else table(entry.get("sizes", {}), "sizes", where)).items()
    }
    try:
        placement = Placement(
            tuple(mesh.values()),
            split,
            sizes=tuple(sorted(sizes.items())),
            stages=_stages(entry.get("stage"), stages, where),
            open_ended=True,
            ceil=is_ceil,
        )
        cut = _axes(entry.get("optimizer", []), "optimizer", mesh, where)
        pieces = _optimizer(cut, placement, tuple(mesh), where)
        is_cut = bool(split) or pieces > 1
        placement = placement.changed(optimizer=pieces)
    except LayoutError as error:
        raise located(error, where) from None
    yield from ((glob, placement.changed(whole_scalars=glob == "*" and is_cut)) for glob in globs)


def _dimension(key: str, what: str, where: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 4 and int(key) < MAX_DIMENSIONS):
        raise wrong(f"a key of {what}", "the number of a dimension, from 0", key, where)
    return int(key)


def _axes(value: Any, what: str, mesh: MeshSizes, where: str) -> tuple[int, ...]:
    names = list(mesh)
    values = array(value, what, where, MAX_AXES)
    for axis in values:
        if axis not in names:
            raise wrong(what, f"mesh axes ({', '.join(names)})", axis, where)
    return tuple(names.index(axis) for axis in values)


def _stages(value: Any, stages: int, where: str) -> tuple[int, ...]:
    if value is None:
        return tuple(range(stages))
    values = integers(value if isinstance(value, list) else [value], "stage", 0, stages - 1, where)
    if not values or len(set(values)) != len(values):
        raise wrong("stage", "a stage, or a list of different ones", value, where)
    return tuple(sorted(values))


def _optimizer(cut: tuple[int, ...], placement: Placement, names: tuple[str, ...], where: str) -> int:
    """Return the number of optimizer pieces that a cut of dimension 0 over the axes `cut` makes.

    Pieces go round over the ranks that share a slice, so the axes are the last ones of those that cut nothing; axes of
    one rank make no difference.
    """
    wanted = [axis for axis in cut if placement.mesh[axis] > 1]
    free = [axis for axis in placement.free_axes if placement.mesh[axis] > 1]
    if wanted != free[len(free) - len(wanted) :]:
        named = ", ".join(names[axis] for axis in free)
        raise StrategyError(
            "the optimizer cut cannot go over these axes",
            expected=f"the last ones, in mesh order, of the axes that cut no dimension ({named or 'there are none'})",
            got=", ".join(names[axis] for axis in cut),
            where=where,
            remedy="name all axes that cut no dimension, or only the last of them",
        )
    return math.prod(placement.mesh[axis] for axis in wanted)


_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(?:parameter|\"parameter\"|'parameter')[ \t]*\]\]", re.MULTILINE)
_MOST_TRIED = 8


def place_of_rule(path: str, number: int) -> str:
    """Return where the rule of this number, from 0, is in the spec at `path`, as `spec.toml, line 7, [[parameter]] 2`.

    The line is left out where the entries are not written as tables of their own.
    """
    file = next(look_all(path))
    text = text_of(file)
    patterns = [entry.get("match") for entry in tomllib.loads(text)["parameter"]]
    last_rules = accumulate(len(dict.fromkeys(match)) if isinstance(match, list) else 1 for match in patterns)
    entry = next(place for place, rules in enumerate(last_rules) if number < rules)
    # What looks like a header may be in a text, but not before all true headers that come before this entry's.
    headers = [match.start() for match in _HEADER.finditer(text)][entry : entry + _MOST_TRIED]
    header = next((header for header in headers if _entries_in(text[:header]) == entry), None)
    line = "" if header is None else f", line {_line(text, header)}"
    return f"{file.path}{line}, [[parameter]] {entry + 1}"


def place_of_layout(path: str, name: str) -> str:
    """Return where MindSpore's strategy files at `path` list a parameter: the first file, and its line or its place."""
    places = [place for file in distinct(look_all(path)) if (place := _place_in(file, name))]
    if not places:
        raise StrategyError("no strategy file lists the parameter", expected=repr(name), where=path)
    return places[0] + (f", and in {len(places) - 1} more" if len(places) > 1 else "")


def _place_in(file: StrategyFile, name: str) -> str:
    content = decode(file)
    written = _written_name(content, name)
    if written is None:
        return ""
    if file.kind is StrategyForm.JSON:
        text = text_of(file)
        begin = max(0, text.find('"parallel_layout_item"'))
        quoted = "|".join(re.escape(json.dumps(written, ensure_ascii=ascii_only)) for ascii_only in (True, False))
        match = re.compile(f"(?:{quoted})\\s*:").search(text, begin)
        if match is not None:
            return f"{file.path}, line {_line(text, match.start())}, {written!r}"
    number = list(content.layouts).index(written) + 1
    return f"{file.path}, layout {number} of {len(content.layouts)}, {written!r}"


def _written_name(content: StageFile, name: str) -> str | None:
    """Return the name under which a file lists a parameter; merged files write the stage before it."""
    if name in content.layouts:
        return name
    merged = merged_stages(content) or ()
    return next((f"{stage}-{name}" for stage, layouts in enumerate(merged) if name in layouts), None)


def _entries_in(text: str) -> int | None:
    """Return how many entries the beginning of a spec has; None if it ends within something."""
    try:
        entries = tomllib.loads(text).get("parameter", [])
    except (ValueError, RecursionError):
        return None
    return len(entries) if isinstance(entries, list) else None


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
