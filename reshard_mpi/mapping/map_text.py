"""Parse the text of a map: its entries, and the lengths of its axes (`parse_rules`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.mapping.axis_sizes import ConfigurationNeeded, ExpressionProblem, KeyNeeded, evaluated
from reshard_mpi.mapping.box_pairs import EquationProblem, check_one_to_one
from reshard_mpi.mapping.equations import SyntaxProblem, parse
from reshard_mpi.mapping.rules import (
    TYPES,
    Drop,
    EquationRule,
    Fill,
    Rules,
    UsualLength,
    caution_of,
    count_of,
    flag_of,
    name_of,
    number_of,
    require_known,
    text_of,
)

MAX_BYTES, MAX_ENTRIES = 1 << 20, 10_000
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(?:map|\"map\"|'map')[ \t]*\]\]", re.MULTILINE)
_SIDES = ("left", "right")
_LIKE = ("only", "needed", "forward")
# In a name, the length of an axis: `model.layers.{=l}.w` is of the layer behind those from 0 to l - 1.
_LENGTH = re.compile(r"\{=([A-Za-z_][A-Za-z0-9_]*)\}")
# The key by which a configuration says how many tensor-parallel ranks there are, as Megatron calls it.
_TENSOR_PARALLEL = "tensor_model_parallel_size"
_MAX_AXIS, _MAX_DIMENSIONS = 1 << 62, 32
_MAX_SHOWN = 100


class MapText(NamedTuple):
    """The text of a map file, and where it is."""

    text: str
    where: str

    def content(self) -> dict[str, Any]:
        """Return its content as TOML. Raises MapError if it is none, or has other keys than a map may have."""
        return _content(self.text, self.where)


def parse_rules(
    text: str,
    where: str,
    config: Mapping[str, object] | None = None,
    lengths: Mapping[str, int] = MappingProxyType({}),
    included: Sequence[MapText] = (),
) -> Rules:
    """Read a map file, and the files that it includes: their entries come after its own.

    Args:
        config: the model's configuration, for expressions in [axes].
        lengths: of axes, as the user gives them.

    Raises MapError, with the place in the file, for what it cannot mean.
    """
    contents = [(each, each.content()) for each in (MapText(text, where), *included)]
    tables = [content["axes"] for _, content in contents]
    in_names = {
        name: str(_length_in_name(name, tables, config, lengths, each.where))
        for each, _ in contents
        for name in dict.fromkeys(_LENGTH.findall(each.text))
    }
    if in_names:
        contents = [
            (each, _content(_LENGTH.sub(lambda match: in_names[match[1]], each.text), each.where))
            for each, _ in contents
        ]
    count = sum(len(content["map"]) for _, content in contents)
    if not 0 < count <= MAX_ENTRIES:
        raise MapError("the map has no [[map]] entries", expected=f"1 to {MAX_ENTRIES}", got=str(count), where=where)
    read: dict[str, list[Any]] = {kind: [] for kind in _READERS}
    for (text, place), content in contents:
        entries, lines = content["map"], [text.count("\n", 0, header.start()) + 1 for header in _HEADER.finditer(text)]
        for number, entry in enumerate(entries):
            line = f", line {lines[number]}" if len(lines) == len(entries) else ""
            kind, rule = _entry(entry, f"{place}{line}, [[map]] {number + 1}")
            read[kind].append(rule)
    equations: list[EquationRule] = read["eq"]
    rules = Rules(
        tuple(equations),
        tuple(read["drop"]),
        tuple(read["fill"]),
        lengths,
        where,
        from_user=frozenset(lengths),
        states=tuple(read["state"]),
        counts=tuple(read["count"]),
        numbers=tuple(read["number"]),
        cautions=tuple(read["caution"]),
        tensor_parallel=_tensor_parallel(config),
        in_names=frozenset(in_names),
    )
    for (_, place), content in contents:
        rules = _with_axes(rules, content["axes"], config, f"{place}, [axes]")
    return rules


def _length_in_name(
    name: str,
    tables: Sequence[Mapping[str, Any]],
    config: Mapping[str, object] | None,
    lengths: Mapping[str, int],
    where: str,
) -> int:
    """Return the length of an axis for names that have it in them. Raises MapError if nothing tells it."""
    rules = Rules((), (), (), lengths, where)
    for table in tables:
        if name in table and name not in rules.axes:
            rules = _with_axis(rules, name, _choices(table[name]), config, f"{where}, [axes]")
    length = rules.usual[name].length if name in rules.usual else rules.axes.get(name)
    if length is None:
        raise MapError(
            "a name has the length of an axis that nothing tells",
            expected=f"{name!r} in [axes], with --config if it is computed, or --axis {name}=N",
            got=f"{{={name}}}",
            where=where,
        )
    return length


def parse_equation(text: str, lengths: Mapping[str, int] = MappingProxyType({})) -> Rules:
    """Read a map that is a single equation, as on the command line. Raises MapError if it is none.

    Args:
        lengths: of axes, as the user gives them.
    """
    shown = " ".join(text.split())
    where = f"'{shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + '...'}'"
    equations = (_equation({"eq": text}, where),)
    return Rules(equations, (), (), lengths, where, from_user=frozenset(lengths), is_typed=True)


def _tensor_parallel(config: Mapping[str, object] | None) -> int | None:
    """Return how many tensor-parallel ranks a configuration says there are; None if it says nothing."""
    value = None if config is None else config.get(_TENSOR_PARALLEL)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _content(text: str, where: str) -> dict[str, Any]:
    """Return the content of a map file as TOML: entries, and allowed keys."""
    if len(text) > MAX_BYTES:
        raise MapError("the map is too large", expected=f"at most {MAX_BYTES} characters", where=where)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MapError("the map is no TOML", got=str(error)[:200], where=where) from None
    content = {"axes": {}, "include": [], "map": [], **content}
    unknown = sorted(content.keys() - {"axes", "include", "map", "description"})
    if unknown:
        raise MapError(
            "the map has a key that it cannot have",
            expected="axes, include, map, description",
            got=unknown[0],
            where=where,
        )
    if not isinstance(content.get("description", ""), str):
        raise MapError("description is no text", where=where)
    if not isinstance(content["axes"], dict):
        raise MapError("[axes] is no table", got=str(content["axes"])[:60], where=f"{where}, [axes]")
    entries, included = content["map"], content["include"]
    if not isinstance(entries, list):
        raise MapError(
            "the map has no [[map]] entries", expected=f"1 to {MAX_ENTRIES}", got=str(entries)[:60], where=where
        )
    if not isinstance(included, list) or not all(isinstance(name, str) and name for name in included):
        raise MapError(
            "include is no list of files",
            expected='paths of other maps, from the folder of this one: ["parts/attention.toml"]',
            got=str(included)[:60],
            where=where,
        )
    return content


def _entry(entry: object, where: str) -> tuple[str, object]:
    """Read an entry; return its kind and its values."""
    if not isinstance(entry, dict):
        raise MapError("an entry of the map is no table", got=str(entry)[:60], where=where)
    kinds = [kind for kind in _READERS if kind in entry]
    if len(kinds) != 1:
        raise MapError(
            f"an entry of the map needs one of {', '.join(_READERS)}", got=", ".join(entry) or "none", where=where
        )
    return kinds[0], _READERS[kinds[0]](entry, where)


def _only(entry: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the table that an entry consists of."""
    require_known(entry, (key,), where)
    table = entry[key]
    if not isinstance(table, dict):
        raise MapError(f"{key} is no table", got=str(table)[:60], where=where)
    return table


def _state(entry: dict[str, Any], where: str) -> EquationRule:
    require_known(entry, ("state", "warning"), where)
    warning = text_of(entry, "warning", where) if "warning" in entry else ""
    rule = _equation({"eq": text_of(entry, "state", where), "optional": True}, where)
    terms = (*rule.equation.left, *rule.equation.right)
    if len(terms) != 2 or any(
        term.dims is not None or term.type_name or [capture.is_text for capture in term.name.captures] != [True]
        for term in terms
    ):
        raise MapError(
            "state is wrong",
            expected="two names with one capture like {p*}, which stands for a parameter's name",
            got=rule.equation.text[:200],
            where=where,
        )
    return rule._replace(warning=warning)


def _equation(entry: dict[str, Any], where: str) -> EquationRule:
    require_known(entry, ("eq", "optional", "copy", "pads", "like"), where)
    text = text_of(entry, "eq", where)
    try:
        equation = parse(text)
    except SyntaxProblem as error:
        raise MapError(
            f"an equation cannot be read: {error.problem}", got=_marked(text, error.position), where=where
        ) from None
    for term in (*equation.left, *equation.right):
        if term.type_name is not None and term.type_name not in TYPES:
            raise MapError(
                "an equation names an unknown type", expected=", ".join(TYPES), got=term.type_name, where=where
            )
    copies = flag_of(entry, "copy", where)
    pads = entry.get("pads", "zero")
    if pads not in ("zero", "drop"):
        raise MapError("pads is wrong", expected="'drop', or nothing", got=repr(pads)[:60], where=where)
    like = entry.get("like")
    if like is not None and like not in _LIKE:
        raise MapError("like is wrong", expected=f"{', '.join(_LIKE)}, or nothing", got=repr(like)[:60], where=where)
    try:
        shared = check_one_to_one(equation.left, equation.right, copies=copies)
    except EquationProblem as error:
        raise MapError("an equation is wrong", got=f"{error}; in {' '.join(text.split())[:200]}", where=where) from None
    is_optional = flag_of(entry, "optional", where) or like is not None
    return EquationRule(equation, shared, is_optional, copies, pads == "drop", where, like)


def _drop(entry: dict[str, Any], where: str) -> Drop:
    require_known(entry, ("drop", "side", "optional", "zeros"), where)
    glob, side = text_of(entry, "drop", where), _side(entry, "left", where)
    return Drop(glob, side, flag_of(entry, "optional", where), where, flag_of(entry, "zeros", where))


def _fill(entry: dict[str, Any], where: str) -> Fill:
    require_known(entry, ("fill", "side", "like", "optional"), where)
    if entry.get("like") not in (None, "only"):
        raise MapError("like is wrong", expected="'only', or nothing", got=repr(entry["like"])[:60], where=where)
    fill = entry["fill"]
    if not isinstance(fill, dict):
        raise MapError(
            "fill is no table", expected="{ name, value, shape, type, beside }", got=str(fill)[:60], where=where
        )
    require_known(fill, ("name", "value", "shape", "type", "beside"), where)
    name = name_of(fill, "name", where)
    beside = name_of(fill, "beside", where) if "beside" in fill else None
    if not set(name.captures) <= set(beside.captures if beside is not None else ()):
        raise MapError(
            "the name of what is made up has captures that the tensor beside it has not", got=name.text, where=where
        )
    value = fill.get("value", 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MapError("value is no number", got=repr(value)[:60], where=where)
    shape = fill.get("shape")
    if shape is not None and not (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMENSIONS
        and all(
            isinstance(length, int) and not isinstance(length, bool) and 0 <= length < _MAX_AXIS for length in shape
        )
    ):
        raise MapError("shape is no list of lengths", got=repr(shape)[:60], where=where)
    type_name = fill.get("type")
    dtype = None
    if type_name is not None:
        dtype = (TYPES | BY_NAME).get(type_name) if isinstance(type_name, str) else None
        if dtype is None:
            raise MapError(
                "type is unknown", expected=", ".join((*TYPES, *BY_NAME)), got=repr(type_name)[:60], where=where
            )
    if beside is None and (shape is None or dtype is None):
        raise MapError("what is made up beside nothing needs a shape and a type", got=name.text, where=where)
    side, lengths = _side(entry, "right", where), None if shape is None else tuple(shape)
    return Fill(name, beside, lengths, dtype, value, side, where, "like" in entry, flag_of(entry, "optional", where))


def _with_axes(rules: Rules, table: Mapping[str, Any], config: Mapping[str, object] | None, where: str) -> Rules:
    """Return rules with the lengths in [axes] of those axes that have none yet.

    Without a configuration, computed ones are left out.
    """
    used = rules.all_axes
    for name, value in table.items():
        if name not in used:
            raise MapError(
                f"[axes] has {name!r}, which no equation has",
                expected=", ".join(sorted(used)[:20]) or "no axes",
                where=where,
                remedy="mend the name, or remove it",
            )
        choices = _choices(value)
        if _TENSOR_PARALLEL in choices:
            rules = rules._replace(cuts_by_rank=True)
        if name not in rules.axes and name not in rules.usual:
            rules = _with_axis(rules, name, choices, config, where)
    return rules


def _choices(value: object) -> list[object]:
    return value if isinstance(value, list) and value else [value]


def _with_axis(
    rules: Rules, name: str, choices: Sequence[object], config: Mapping[str, object] | None, where: str
) -> Rules:
    """Return rules with the length of an axis: the first of `choices` whose keys the configuration has.

    A number behind others is the length where nothing else tells it.
    """
    first: KeyNeeded | None = None
    for value in choices:
        if not isinstance(value, str):
            length = _checked_length(name, value, where)
            if value is choices[0]:
                return rules._replace(axes={**rules.axes, name: length})
            otherwise = ", or ".join(text for text in choices if isinstance(text, str))
            return rules._replace(usual={**rules.usual, name: UsualLength(length, otherwise)})
        try:
            length = _checked_length(name, evaluated(value, config), where)
        except KeyNeeded as error:
            first = first or error
        except ExpressionProblem as error:
            raise _not_computed(name, value, error, where) from None
        else:
            return rules._replace(axes={**rules.axes, name: length})
    assert first is not None
    if isinstance(first, ConfigurationNeeded):
        return rules._replace(lacks_config=True)
    raise _not_computed(name, " or ".join(map(str, choices)), first, where)


def _checked_length(name: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_AXIS:
        raise MapError(
            f"{name!r} in [axes] is no length", expected="a positive integer", got=str(value)[:60], where=where
        )
    return value


def _not_computed(name: str, text: str, error: ExpressionProblem, where: str) -> MapError:
    return MapError(
        f"the length of {name!r} cannot be computed",
        expected=f"an integer from {text!r}",
        got=str(error),
        where=where,
        remedy=error.remedy,
    )


def _side(table: Mapping[str, Any], usual: str, where: str) -> str:
    value = table.get("side", usual)
    if value not in _SIDES:
        raise MapError("side is wrong", expected="'left' or 'right'", got=repr(value)[:60], where=where)
    return str(value)


def _marked(text: str, position: int) -> str:
    """Return the part of an equation around a character, which is marked."""
    before, after = text[max(0, position - 60) : position], text[position : position + 20]
    return f"{' '.join(before.split())} >>> {' '.join(after.split())}"


# What an entry of each kind is read by, which takes the entry and its place in the file.
_READERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "eq": _equation,
    "state": _state,
    "drop": _drop,
    "fill": _fill,
    "count": lambda entry, where: count_of(_only(entry, "count", where), where),
    "number": lambda entry, where: number_of(_only(entry, "number", where), where),
    "caution": lambda entry, where: caution_of(_only(entry, "caution", where), where),
}
