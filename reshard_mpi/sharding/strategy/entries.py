"""Where in strategy files it is written how a parameter is placed: the file, and the line or the entry."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import accumulate

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.strategy.files import Kind, StrategyFile, decode, distinct, look_all, text_of
from reshard_mpi.sharding.strategy.mindspore import StageFile
from reshard_mpi.sharding.strategy.stages import merged_stages

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
    if file.kind is Kind.JSON:
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
