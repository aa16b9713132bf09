"""Records as an attacker, a slip of an editor, or a failing disk may leave them in a target folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reshard_mpi.journal.run_records import RunIdentity

Keys = tuple[str | int, ...]
MISSING = object()


def deep(levels: int) -> Any:
    """Return lists in lists."""
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


# Values in the place of another.
VALUES: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "minus one": -1,
    "zero": 0,
    "a fraction": 1.5,
    "no number": float("nan"),
    "10^18": 10**18,
    "2^63": 1 << 63,
    "4,000 digits": 10**4000,
    "an empty text": "",
    "a text": "x",
    "a long text": "x" * 5000,
    "an absolute path": "/etc/hostname",
    "a path upwards": "../../hostname",
    "a path upwards, hidden": "rank_0/../../hostname",
    "the file of another": "rank_1/checkpoint_1.ckpt",
    "another file": "rank_0/other_0.ckpt",
    "a NUL": "rank_0/a\0b",
    "half of a surrogate pair": "\ud800",
    "an escape sequence": "\x1b[31m\x1b]0;title\x07",
    "a list": [],
    "a list in lists": deep(40),
    "names": {},
    "missing": MISSING,
}
# Whole files.
TEXTS: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2].encode(),
    "zeros": lambda text: bytes(len(text)),
    "more after it": lambda text: text.encode() + b"{}",
    "10^5 digits": lambda text: text.replace(": ", ": 1" + "0" * 10**5 + ' , "more": ', 1).encode(),
    "10^5 brackets": lambda text: b'{"digest": ' + b"[" * 10**5,
    "a name twice": lambda text: text.replace("{", '{"digest": "00", ', 1).encode(),
    "two bytes a character": lambda text: text.encode("utf-16"),
    "a list": lambda text: b"[" + text.encode() + b"]",
    "a number": lambda text: b"1",
}


def places(facts: Any, here: Keys = ()) -> Iterator[Keys]:
    """Yield the places of all values in `facts`; of lists the first."""
    if here:
        yield here
    for key in facts if isinstance(facts, dict) else range(min(1, len(facts))) if isinstance(facts, list) else ():
        yield from places(facts[key], (*here, key))


def forged(facts: dict[str, Any], place: Keys, value: Any) -> dict[str, Any]:
    """Return a copy of `facts` with another value in one place."""
    made = copy.deepcopy(facts)
    holder: Any = made
    for key in place[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return made


def as_text(name: str, facts: dict[str, Any]) -> str:
    """Return what a record of that name says, with the digest that its facts have if it is that of the run.

    That of a target is without the check of its facts, which earlier versions did not write.
    """
    if name != "run.json":
        return json.dumps({key: value for key, value in facts.items() if key != "check"})
    files = ("src_strategy_file", "dst_strategy_file")
    facts = {key: value for key, value in facts.items() if key != "digest"}
    digest = RunIdentity({key: value for key, value in facts.items() if key not in files}).digest
    return json.dumps({**facts, "digest": digest})


def path_of(folder: Path, name: str) -> Path:
    """Return where the record of that name lies."""
    return folder / name if name == "reshard.json" else folder / ".reshard_mpi" / name
