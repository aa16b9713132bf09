"""Read map files and model configurations (`read_rules`), and parse the text of a map (`parse_rules`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import described, real_path
from reshard_mpi.mapping.axis_sizes import choices_of, tensor_parallel_of, with_axes, with_axis
from reshard_mpi.mapping.box_pairs import EquationProblem, check_one_to_one
from reshard_mpi.mapping.equations import SyntaxProblem, parse
from reshard_mpi.mapping.rules import (
    TYPES,
    EquationRule,
    Rules,
    caution_of,
    count_of,
    drop_of,
    fill_of,
    flag_of,
    number_of,
    require_known,
    text_of,
)
from reshard_mpi.options import ARROW
from reshard_mpi.text import did_you_mean

_MAX_BYTES, _MAX_ENTRIES = 1 << 20, 10_000
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(?:map|\"map\"|'map')[ \t]*\]\]", re.MULTILINE)
_LIKE = ("only", "needed", "forward")
# In a name, the length of an axis: `model.layers.{=l}.w` is of the layer behind those from 0 to l - 1.
_LENGTH = re.compile(r"\{=([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_SHOWN = 100
_SHIPPED = Path(__file__).parent / "maps"
_MAX_CONFIG_BYTES, _MAX_INCLUDED = 4 << 20, 100
_INCLUDE = re.compile(r"^include = \[[^\]]*\]\n+", re.MULTILINE)


class MapText(NamedTuple):
    """The text of a map file, and where it is."""

    text: str
    where: str


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
    contents = [(each, _content(*each)) for each in (MapText(text, where), *included)]
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
    if not 0 < count <= _MAX_ENTRIES:
        raise MapError("the map has no [[map]] entries", expected=f"1 to {_MAX_ENTRIES}", got=str(count), where=where)
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
        tensor_parallel=tensor_parallel_of(config),
        in_names=frozenset(in_names),
    )
    for (_, place), content in contents:
        rules = with_axes(rules, content["axes"], config, f"{place}, [axes]")
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
            rules = with_axis(rules, name, choices_of(table[name]), config, f"{where}, [axes]")
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


def _content(text: str, where: str) -> dict[str, Any]:
    """Return the content of a map file as TOML: entries, and allowed keys."""
    if len(text) > _MAX_BYTES:
        raise MapError("the map is too large", expected=f"at most {_MAX_BYTES} characters", where=where)
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
            "the map has no [[map]] entries", expected=f"1 to {_MAX_ENTRIES}", got=str(entries)[:60], where=where
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


def _marked(text: str, position: int) -> str:
    """Return the part of an equation around a character, which is marked."""
    before, after = text[max(0, position - 60) : position], text[position : position + 20]
    return f"{' '.join(before.split())} >>> {' '.join(after.split())}"


# What an entry of each kind is read by, which takes the entry and its place in the file.
_READERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "eq": _equation,
    "state": _state,
    "drop": drop_of,
    "fill": fill_of,
    "count": lambda entry, where: count_of(_only(entry, "count", where), where),
    "number": lambda entry, where: number_of(_only(entry, "number", where), where),
    "caution": lambda entry, where: caution_of(_only(entry, "caution", where), where),
}


def shipped_maps() -> dict[str, Path]:
    """Return the maps that come with the program, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.toml"))}


def described_maps() -> dict[str, str]:
    """Return what each map that comes with the program is for, by name."""
    contents = {name: tomllib.loads(_text(path, _MAX_BYTES, "the map")) for name, path in shipped_maps().items()}
    return {name: str(content.get("description", "")) for name, content in contents.items()}


def is_equation(name: str) -> bool:
    """Tell whether a map is given as an equation; a file with such a name goes before."""
    return ARROW in name and not os.path.exists(name)  # noqa: PTH110 - Path.exists raises for long names


def map_path(name: str) -> Path | None:
    """Return the path of a map, given by its path or by the name of one that comes with the program.

    None: it is an equation itself.
    """
    if is_equation(name):
        return None
    path = Path(name)
    if "/" in name or name.endswith(".toml") or path.exists():
        return path
    shipped = shipped_maps()
    if name not in shipped:
        raise MapError(
            f"there is no map of this name{did_you_mean(name, shipped)}",
            expected=f"the path of a file, an equation (LEFT {ARROW} RIGHT), or one of {', '.join(shipped)}",
            got=name,
            remedy="reshard-mpi help maps tells what each is for",
        )
    return shipped[name]


def read_rules(
    name: str, config: str | None, lengths: Mapping[str, int] = MappingProxyType({})
) -> tuple[Rules, dict[str, str]]:
    """Read the rules of a map; return them with digests of their files (`map`, and `config` if there is one).

    Args:
        name: of a map that comes with the program, the path of a file, or an equation.
        config: the path of a model's configuration; None: there is none.
        lengths: of axes, as the user gives them.

    Raises MapError if one of them cannot be read.
    """
    path = map_path(name)
    texts = [MapText(name, name)] if path is None else list(_texts(path, name))
    of_texts = [hashlib.sha256(each.text.encode()).hexdigest() for each in texts]
    digests, values = {"map": of_texts[0]}, None
    if len(texts) > 1:
        digests["map"] = hashlib.sha256(" ".join(of_texts).encode()).hexdigest()
    if config is not None:
        values, digests["config"] = read_configuration(config)
    if path is None:
        return parse_equation(name, lengths), digests
    return parse_rules(*texts[0], values, lengths, texts[1:]), digests


def _texts(path: Path, name: str) -> Iterator[MapText]:
    """Yield the text of a map file, then the texts of the files that it includes, each once.

    Args:
        name: what the map is called by the user.

    Raises MapError if one of them cannot be read, lies elsewhere, or includes itself.
    """
    is_shipped = path == shipped_maps().get(name)
    folder = real_path(path).parent
    passed: set[Path] = set()

    def texts_of(file: Path, including: tuple[Path, ...]) -> Iterator[MapText]:
        where = str(path) if not including else str(file)
        if is_shipped:
            where = str(Path(name, *file.relative_to(folder).parts)) if including else name
        if file in passed and file not in including:
            return
        passed.add(file)
        text = MapText(_text(file if including else path, _MAX_BYTES, "the map"), where)
        yield text
        for other in _content(*text)["include"]:
            wanted = real_path(file.parent / other)
            problem = None
            if wanted == file or wanted in including:
                problem = "includes itself"
            elif Path(other).is_absolute() or not wanted.is_relative_to(folder):
                problem = "lies elsewhere"
            elif len(passed) > _MAX_INCLUDED:
                problem = f"is one of more than {_MAX_INCLUDED}"
            if problem is not None:
                raise MapError(
                    f"a map that is included {problem}",
                    expected="files in the folder of the map, or in folders of that, named from where the file that"
                    " includes them lies",
                    got=other,
                    where=where,
                )
            yield from texts_of(wanted, (*including, file))

    yield from texts_of(real_path(path), ())


def printed_map(name: str) -> str:
    """Return a map that comes with the program as one text, which may be changed and given as a file."""
    own, *included = (each.text.strip() for each in _texts(shipped_maps()[name], name))
    return "\n\n".join([_INCLUDE.sub("", own), *included])


def _text(path: Path, most_bytes: int, what: str) -> str:
    if source_files.exists(path) and not source_files.is_file(path):
        got = described(path)
        raise MapError(f"{what} is no file", expected="a file", got=got, where=str(path), remedy="give its path")
    try:
        with source_files.open_stream(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise MapError(
            f"{what} cannot be read",
            expected="a file that may be read",
            got=error.strerror or str(error),
            where=str(path),
            remedy="check the path, and the permissions of the file",
        ) from None
    if len(content) > most_bytes:
        expected, got = f"at most {most_bytes} bytes", "more"
        raise MapError(f"{what} is too large", expected=expected, got=got, where=str(path), remedy="give its path")
    try:
        return content.decode("utf-8-sig")  # as editors of other systems save texts
    except UnicodeDecodeError as error:
        expected, remedy = "UTF-8", "save it as UTF-8"
        raise MapError(
            f"{what} is no UTF-8 text", expected=expected, got=str(error), where=str(path), remedy=remedy
        ) from None


def read_configuration(path: str) -> tuple[Mapping[str, object], str]:
    """Return the configuration of a model, and the digest of its text. Raises MapError if it cannot be read."""
    text = _text(Path(path), _MAX_CONFIG_BYTES, "the configuration")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        values, got = None, str(error)[:200]
    else:
        got = text[:60]
    if not isinstance(values, dict):
        raise MapError(
            "the configuration is no JSON object",
            expected="the config.json of the model, such as Hugging Face folders have",
            got=got,
            where=path,
            remedy="give its path",
        )
    return values, hashlib.sha256(text.encode()).hexdigest()
