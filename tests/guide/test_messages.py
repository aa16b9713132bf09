"""The listing of the words of all errors is up to date, and those of files say what to do."""

from __future__ import annotations

import ast

import pytest
from support import messages
from support.module_tree import PACKAGE, modules

# The package is parsed once: in one of the processes that run tests.
pytestmark = pytest.mark.xdist_group("syntax trees")


def test_messages_are_those_of_the_listing() -> None:
    """It shows all words of a change at once; other tests look for the facts: names, ranks, paths, numbers."""
    assert messages.LISTING.read_text() == messages.listing(), "python tests/support/messages.py writes it"


# What is wrong with files and folders is for the user to mend, and `expected` does not say how.
OF_FILES = {"SourceError", "CoverageError", "DisagreementError", "TargetError", "TransformError", "DamageError"}
# It only says that there are more, after others that say what to do.
WITHOUT_REMEDY = {"more tensors of this shard differ"}


def test_every_error_of_files_says_what_to_do() -> None:
    silent = [
        f"{module}:{call.lineno}: {ast.unparse(call.args[0])}"
        for module in modules(PACKAGE)
        for name, call in messages.made_in(module)
        if name in OF_FILES and not any(keyword.arg == "remedy" for keyword in call.keywords)
        if ast.unparse(call.args[0]).strip("'") not in WITHOUT_REMEDY
    ]
    assert not silent, "\n".join(silent)
