"""Names in backticks in docstrings, comments and design pages are those of something that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import module_tree

# The package is parsed once: in one of the processes that run tests.
pytestmark = pytest.mark.xdist_group("syntax trees")

PACKAGE = module_tree.PACKAGE
MODULES = {path.stem if path.stem != "__init__" else path.parent.name for path in module_tree.modules(PACKAGE)}
PAGES = [*module_tree.modules(PACKAGE), *sorted((PACKAGE / "decisions").glob("*.md")), PACKAGE / "DESIGN.md"]
# `module.name`, `Class.name`, and a lone name in brackets, as the headlines of modules have it.
DOTTED = re.compile(r"`(?:reshard_mpi\.)?(\w+)\.(\w+)(?:\(\))?`")
ALONE = re.compile(r"\(`([a-z_]+)`\)")
# Names in brackets that are of others: of frameworks, formats, shells and files.
OF_OTHERS: set[str] = set()
ENDINGS = {"py", "json", "md", "toml"}


def names_in_code() -> set[str]:
    """Return all names that the package defines or uses."""
    names = set()
    for path in module_tree.modules(PACKAGE):
        for node in module_tree.nodes(path):
            fields = vars(node)
            names.update(
                value for field in ("name", "id", "attr", "arg", "value") if isinstance(value := fields.get(field), str)
            )
    return names


def missing_names(path: Path, known: set[str]) -> list[str]:
    text = path.read_text()
    dotted = [
        match[0]
        for match in DOTTED.finditer(text)
        if (match[1] in MODULES or match[1][0].isupper() or match[2][0].isupper())
        and match[2] not in ENDINGS
        and not (match[1] in MODULES | known and match[2] in known)
    ]
    alone = [name for name in ALONE.findall(text) if name not in MODULES | known | OF_OTHERS]
    return [f"{path.relative_to(PACKAGE)}: {name}" for name in dotted + alone]


@pytest.mark.slow
def test_names_are_there() -> None:
    known = names_in_code()
    assert [name for path in PAGES for name in missing_names(path, known)] == []
