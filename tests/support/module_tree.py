"""Make the tree of modules in DESIGN.md from their first lines: `python tests/support/module_tree.py` writes it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import reshard_mpi

PACKAGE = Path(reshard_mpi.__file__).parent
DESIGN = PACKAGE / "DESIGN.md"
BEGIN, END = "<!-- The tree of modules: tests/support/module_tree.py writes it. -->\n", "<!-- End of the tree. -->\n"
_WIDTH = 30  # columns of the names


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module, which is not to be changed."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a module, outer ones before those in them."""
    return tuple(ast.walk(parsed(path)))


def first_line(path: Path) -> str:
    """Return the first line of the docstring of the module at `path`. Raises ValueError if it has none."""
    text = ast.get_docstring(parsed(path))
    if not text:
        raise ValueError(f"{path} has no docstring")
    return text.splitlines()[0]


def modules(folder: Path) -> Iterator[Path]:
    """Yield the modules of a folder and of those below it in the order of the tree; packages by their `__init__`."""
    yield folder / "__init__.py"
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.stem != "__init__":
            yield path
        elif path.is_dir() and (path / "__init__.py").exists():
            yield from modules(path)


def tree() -> str:
    """Return the tree as it stands in DESIGN.md between `BEGIN` and `END`: a line for each module."""
    lines = []
    for path in modules(PACKAGE):
        parts = path.relative_to(PACKAGE.parent).parts
        is_package = path.stem == "__init__"
        depth = len(parts) - 2 if is_package else len(parts) - 1
        name = f"{'  ' * depth}{parts[-2] + '/' if is_package else parts[-1]}"
        lines.append(f"{name:{_WIDTH}} {first_line(path)}")
    return "\n".join(["```text", *lines, "```", ""])


if __name__ == "__main__":
    before, _, rest = DESIGN.read_text().partition(BEGIN)
    DESIGN.write_text(before + BEGIN + tree() + END + rest.partition(END)[2])
