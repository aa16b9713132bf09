"""Every block of commands of the guide and of README.md is run, and prints what its page shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import done, refused, run_here
from support.launch import find_mpi
from support.pages import GUIDE, README, ROOT, Block, Step, agrees, blocks, run_steps, steps

from reshard_mpi.cli import help as guide

PAGES = [README, *sorted(GUIDE.glob("*.md"))]
TOYS = ROOT / "tests" / "toy_package"
# Commands that are marked in other words: continuous integration reads them so, and the test of the first story.
_MARKED = {"ci:setup": ".ci/run", "ci:test": ".ci/run", "guide": "tests/cli/test_stories.py"}


# The suite has the conformance suites of two pages itself: there each of their properties is looked at a few times.
_FEW = """from hypothesis import settings
settings.register_profile("few", max_examples=2)
settings.load_profile("few")
"""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which conformance suites look at few examples."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "few.py").write_text(_FEW)
    return {"PYTEST_ADDOPTS": "-p few", "PYTHONPATH": str(folder)}


def is_run_here(step: Step) -> bool:
    return step.commands.elsewhere is None and step.commands.mark not in _MARKED


def runnable() -> Iterator[object]:
    for page in PAGES:
        if any(map(is_run_here, steps(page.read_text()))):
            # Two pages run conformance suites, which are a part of this suite too.
            yield pytest.param(page, marks=pytest.mark.slow) if page.stem.startswith("example_") else page


@pytest.mark.parametrize("page", [*runnable()], ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page: Path, tmp_path: Path, few: dict[str, str]) -> None:
    run = [step for step in steps(page.read_text()) if is_run_here(step)]
    if any("mpirun" in step.commands.text for step in run) and find_mpi("mpich") is None:
        pytest.skip("mpich is not installed")
    ran = run_steps(run, tmp_path, env=few)
    for step, (code, printed) in zip(run, ran):
        place = f"{page.name}, line {step.commands.line}"
        assert code == step.commands.exit_code, f"{place}: exit code {code}\n{step.commands.text}\n{printed}"
        if step.output is not None:
            assert agrees(step.output.text, printed), f"{place} shows\n{step.output.text}\nbut it is\n{printed}"
    assert len(ran) == len(run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_run_elsewhere_have_their_test(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.elsewhere is None:
            assert not block.mark or block.mark in _MARKED or block.mark.startswith("exit "), block
            continue
        path, name = block.elsewhere
        statements = ast.parse((ROOT / path).read_text()).body
        assert name in {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}, (
            f"{page.name}, line {block.line}: {path} has no {name}"
        )


@pytest.mark.parametrize("path", sorted(TOYS.glob("*.py")), ids=lambda path: path.stem)
def test_the_toys_of_the_tests_are_those_of_the_pages(path: Path) -> None:
    """A page writes each file of the package; the tests, and those who check types and style, have the same."""
    written = f"{path.name} <<'END'\n{path.read_text()}END\n"
    assert any(written in page.read_text() for page in PAGES)


def without_blocks(page: str, *languages: str) -> str:
    """Return a page without its blocks in these languages; without languages, without any."""
    for block in blocks(page):
        if not languages or block.language in languages:
            page = page.replace(f"```{block.language}\n{block.text}```\n", "")
    return page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_command_stands_where_nothing_runs_it(page: Path) -> None:
    """Commands outside of blocks of commands are forms to be filled in: they have words in capitals."""
    text = without_blocks(page.read_text(), "sh", "python")
    for line in text.splitlines():
        if re.match(r"\s*(reshard-mpi|mpirun|sbatch|srun) ", line):
            assert re.search(r"\b[A-Z]{3,}\b", line), f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short_and_plain(page: Path) -> None:
    text = page.read_text()
    lines = text.splitlines()
    assert text.isascii() and text.startswith("# ") and text.endswith("\n")
    whole_files = (file for path in TOYS.glob("*.py") if (file := path.read_text()) in text)
    assert len(lines) <= (120 if page == README else 149) + sum(file.count("\n") for file in whole_files)
    assert max(map(len, lines)) <= 125 or page == README  # whose links may not be broken
    assert [line for line in without_blocks(text).splitlines() if line.count("`") % 2] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_the_table_of_contents_has_every_page() -> None:
    assert sorted(guide.topics()) == sorted(page.stem for page in GUIDE.glob("*.md") if page.name != "README.md")


def test_the_program_lists_its_pages_in_the_order_of_reading() -> None:
    shown = done("help")
    assert [line.split()[2] for line in shown.out.splitlines()] == list(guide.topics())
    assert next(iter(guide.topics())) == "overview"


@pytest.mark.parametrize("topic", guide.topics())
def test_the_program_shows_a_page_without_what_only_a_browser_can_use(topic: str) -> None:
    shown = run_here("help", topic)
    assert shown.code == 0 and shown.out.startswith("# ")
    assert "<!--" not in shown.out and ".md)" not in shown.out


def test_tables_are_shown_in_columns() -> None:
    table = "| key | value |\n|---|---|\n| `a` | long enough |\n| bcd | x |\n"
    assert guide.as_shown(f"A table:\n\n{table}\nEnd.\n") == (
        "A table:\n\nkey  value\n---  -----------\n`a`  long enough\nbcd  x\n\nEnd."
    )
    assert guide.as_shown("| | |\n|---|---|\n| a | b |\n").strip() == "a  b"


def test_a_table_that_is_too_wide_is_shown_row_by_row() -> None:
    wide = "w" * 100
    table = f"| name | is | has |\n|---|---|---|\n| a | {wide} | {wide} |\n| b | x | y |\n"
    shown = ["a", f"    is: {wide}", f"    has: {wide}", "", "b", "    is: x", "    has: y"]
    assert guide.as_shown(table).splitlines() == shown


def test_comments_and_links_are_for_the_repositorys_page() -> None:
    assert guide.as_shown("See [maps](maps.md).\n<!-- exit 3 -->\nEnd.\n") == "See `reshard-mpi help maps`.\nEnd."
    assert guide.as_shown("A [map](maps.md).\n") == "A map (`reshard-mpi help maps`)."


def test_a_page_that_is_not_there_is_wrong_usage() -> None:
    said = refused("help", "nothing", code=2)
    assert "no such page" in said and "overview" in said


PAGE = """# A page

<!-- a note -->

<!-- exit 3 -->
```sh
cd below
false || exit 3
```

```text
...
took 0.10 s
```

```toml
mesh = {}
```
"""


def test_blocks_are_found_with_their_marks() -> None:
    commands, output, spec = blocks(PAGE)
    assert commands == Block("sh", "cd below\nfalse || exit 3\n", "exit 3", 5, False)
    assert (output.follows, spec.follows, commands.exit_code) == (True, True, 3)
    assert steps(PAGE) == [Step(commands, output)]


def command(text: str, mark: str = "") -> Step:
    return Step(Block("sh", text, mark, 1, False), None)


def test_one_shell_runs_all_commands_until_one_fails(tmp_path: Path) -> None:
    run = [command("mkdir a\ncd a\n"), command("touch b; false\n", "exit 1"), command("ls\n"), command("false; echo\n")]
    ran = run_steps([*run, command("echo never\n")], tmp_path)
    assert ran == [(0, ""), (1, ""), (0, "b\n"), (1, "")]


def test_what_is_shown_must_be_what_is_printed() -> None:
    assert agrees("wrote 1.2 MiB in 0.10 s\n", "wrote 1.2 MiB in 11.3 s\n")
    assert agrees("a\n...\nd", "a\nb\nc\nd\n")
    assert not agrees("wrote 1.2 MiB in 0.10 s\n", "wrote 1.3 MiB in 0.10 s\n")
    assert not agrees("a\nd", "a\nb\nd")
    assert agrees("a\n", "planning, 1 s so far\nwriting 1.2 MiB of 2.4 MiB, 50 %, 1 of 2 targets\na\n")
