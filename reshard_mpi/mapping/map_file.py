"""Read map files and model configurations (`read_rules`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from reshard_mpi.errors import MapError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import described, real_path
from reshard_mpi.mapping.map_text import MAX_BYTES, MapText, parse_equation, parse_rules
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.options import ARROW
from reshard_mpi.text import did_you_mean

_SHIPPED = Path(__file__).parent / "maps"
_MAX_CONFIG_BYTES, _MAX_INCLUDED = 4 << 20, 100
_INCLUDE = re.compile(r"^include = \[[^\]]*\]\n+", re.MULTILINE)


def shipped_maps() -> dict[str, Path]:
    """Return the maps that come with the program, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.toml"))}


def described_maps() -> dict[str, str]:
    """Return what each map that comes with the program is for, by name."""
    descriptions = {}
    for name, path in shipped_maps().items():
        content = tomllib.loads(_text(path, MAX_BYTES, "the map"))
        descriptions[name] = str(content.get("description", ""))
    return descriptions


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
        text = MapText(_text(file if including else path, MAX_BYTES, "the map"), where)
        yield text
        for other in text.content()["include"]:
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
