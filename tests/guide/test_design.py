"""DESIGN.md names every module in the row of its room, and none that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard_mpi

PACKAGE = Path(reshard_mpi.__file__).parent
DESIGN = (PACKAGE / "DESIGN.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)/` \|(.*)\|$", DESIGN, re.MULTILINE))
GOVERNOR = DESIGN.split("\n`processes/governor/`")[1].split("\n\n")[0]
TEXTS = ROWS | {"processes/governor": GOVERNOR}


def modules_of(room: Path) -> Iterator[str]:
    """Yield the names of the modules and folders of a room."""
    for path in room.iterdir():
        if path.suffix == ".py" and not path.stem.startswith("__"):
            yield path.stem
        elif path.is_dir() and path.name != "__pycache__":
            yield path.name


def named_in(text: str) -> set[str]:
    return {name.rstrip("/") for name in re.findall(r"`(\w+/?)`", text)}


def test_every_room_has_a_row() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("guide", "__pycache__")}
    assert rooms == ROWS.keys()


@pytest.mark.parametrize("room", TEXTS)
def test_every_module_is_named_in_the_row_of_its_room(room: str) -> None:
    assert set(modules_of(PACKAGE / room)) <= named_in(TEXTS[room])


@pytest.mark.parametrize("room", ROWS)
def test_every_module_that_a_row_names_is_there(room: str) -> None:
    others = {"locate", "reserve", "seal", "spec_text"}  # functions of a format; a module below `strategy`
    assert named_in(ROWS[room]) - others <= set(modules_of(PACKAGE / room))
