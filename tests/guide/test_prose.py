"""Docstrings, comments and the guide are plain: none of the phrases by which a sentence becomes a riddle."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from support.module_tree import PACKAGE, modules, nodes

# The package is parsed once: in one of the processes that run tests.
pytestmark = pytest.mark.xdist_group("syntax trees")

# Nowhere: they stand for a noun that the reader must find.
RIDDLES = ("that of", "those of", "those that", "those which", "of which", "so many", "so much")
# Not in the first paragraph of a docstring: it says the answer, not the question.
QUESTIONS = ("what is", "what are", "what it", "what they", "what a", "what the")
# Messages that the guide shows as they are printed, and a term of maps.
EXCEPTIONS = {"as those of the other ranks": "problems.md: a message"}


def found(text: str, phrases: tuple[str, ...]) -> list[str]:
    words = " ".join(text.split()).lower()
    for exception in EXCEPTIONS:
        words = words.replace(exception, "")
    return [phrase for phrase in phrases if re.search(rf"\b{phrase}\b", words)]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a program, lines that follow each other as one, with the number of the first line."""
    first, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, text
                first, text = token.start[0], ""
            last, text = token.start[0], f"{text} {token.string.lstrip('# ')}"
    yield first, text


def test_first_paragraphs_of_docstrings_are_plain() -> None:
    riddles = [
        f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}: {phrase}"
        for path in modules(PACKAGE)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for phrase in found((ast.get_docstring(node) or "").partition("\n\n")[0], RIDDLES + QUESTIONS)
    ]
    assert riddles == []


@pytest.mark.slow
def test_comments_are_plain() -> None:
    riddles = [
        f"{path.relative_to(PACKAGE)}:{line}: {phrase}"
        for path in modules(PACKAGE)
        if found((source := path.read_text()).replace("#", " "), RIDDLES)  # else no comment has any either
        for line, text in comments(source)
        for phrase in found(text, RIDDLES)
    ]
    assert riddles == []


def test_the_guide_is_plain() -> None:
    riddles = [
        f"{path.name}: {phrase}"
        for path in sorted((PACKAGE / "guide").glob("*.md"))
        for paragraph in path.read_text().split("\n\n")
        for phrase in found(paragraph, RIDDLES)
    ]
    assert riddles == []
