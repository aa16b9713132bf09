"""DESIGN.md has the tree of modules as their first lines are, and its words; a class name stands for one thing."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import pytest
from support import module_tree
from support.conversions import make
from support.module_tree import BEGIN, DESIGN, END, PACKAGE, tree

# The package is parsed once: in one of the processes that run tests.
pytestmark = pytest.mark.xdist_group("syntax trees")

TEXT = DESIGN.read_text()
DECISIONS = sorted((PACKAGE / "decisions").glob("*.md"))


def test_the_tree_is_made_of_the_first_lines_of_the_modules() -> None:
    found = TEXT.partition(BEGIN)[2].partition(END)[0]
    assert found == tree(), f"run python {module_tree.__file__}"


def test_a_first_line_is_one_short_sentence_that_begins_with_no_question() -> None:
    for line in map(module_tree.first_line, module_tree.modules(PACKAGE)):
        assert len(line) <= 114 and line.rstrip().endswith((".", ")")), line
        assert line.split()[0] not in ("What", "How", "Whether", "Which", "Where", "Whose"), line


def test_names_of_classes_stand_for_one_thing() -> None:
    places = defaultdict(list)
    for path in module_tree.modules(PACKAGE):
        for node in module_tree.nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_what_the_text_names_is_there() -> None:
    """Every file that the text or a decision names in backticks, with or without its ending, is there."""
    text = "\n".join([TEXT.replace(tree(), ""), *(path.read_text() for path in DECISIONS)])
    names = re.findall(r"`((?:\w+/)+\w*)(?:\.py)?`", text)
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    missing = [
        name
        for name in names
        if name.split("/")[0] in rooms and not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").exists()
    ]
    assert missing == []


def test_every_decision_has_a_page_and_a_line() -> None:
    links = re.findall(r"^- \[.+\]\(decisions/(.+)\)$", TEXT, re.MULTILINE)
    assert sorted(links) == [path.name for path in DECISIONS]


def test_a_process_alone_comes_to_the_modules_to_read_in_their_order(tmp_path: Path) -> None:
    in_order, _, further = TEXT.partition("To read it")[2].partition("\n\n")[0].partition("Further ")
    conversion, entered = make(tmp_path), dict[str, None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # and no module or class that is being made
        if event == "call" and is_function and path.startswith(f"{PACKAGE}/"):
            module = path.removeprefix(f"{PACKAGE}/").removesuffix(".py")
            entered.setdefault(f"{module}.{frame.f_code.co_qualname.partition('.')[0]}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        conversion.done("transform", "--jobs", "1")
    finally:
        sys.setprofile(before)
    named = re.findall(r"`(\w+/\w+\.\w+)`", in_order)
    assert len(named) > 5 and [name for name in entered if name in named] == named
    publication, workers = re.findall(r"`(\w+/\w+\.\w+)`", further)
    assert publication in entered and workers not in entered
