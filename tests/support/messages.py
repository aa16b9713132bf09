"""List the messages of all errors as the package words them: `python tests/support/messages.py` writes the listing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.module_tree import PACKAGE, modules, nodes

LISTING = Path(__file__).parents[1] / "guide" / "messages.txt"
# Which line of a message each argument becomes.
LABELS = {"problem": "", "expected": "expected: ", "got": "got: ", "where": "where: ", "remedy": "what to do: "}


def made_in(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the errors that a module makes in their order, each by the name of its class."""
    calls = [node for node in nodes(module) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = getattr(call.func, "id", "")
        if name.endswith(("Error", "Problem")):
            yield name, call


def template(node: ast.expr) -> str:
    """Return a text as it is written, with what stands for other texts in braces.

    Only names are shown there, so that the listing changes with the words alone; choices are divided by bars.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", "\\n")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return template(node.value)
    if isinstance(node, ast.IfExp):
        return f"({template(node.body)}|{template(node.orelse)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return f"{{{ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else '...'}}}"


def message(name: str, call: ast.Call) -> Iterator[str]:
    """Yield the lines of the message of an error."""
    parts = [("problem", argument) for argument in call.args[:1]]
    parts += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg in LABELS]
    for at, (part, text) in enumerate(parts):
        yield f"{f'  {name}: ' if at == 0 else '    '}{LABELS[part]}{template(text)}"


def listing() -> str:
    """Return all messages, by modules."""
    lines: list[str] = []
    for module in modules(PACKAGE):
        said = [line for made in made_in(module) for line in message(*made)]
        lines += [str(module.relative_to(PACKAGE)), *said] if said else []
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    LISTING.write_text(listing())
