"""Pages of Markdown for people, and the commands on them: found, and run as a reader would who pastes them in order."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.processes import HANG_SECONDS, run_command
from support.zygote import ShellZygote

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "reshard_mpi" / "guide"
README = ROOT / "README.md"

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```\n(?P<gap>\s*)", re.DOTALL | re.MULTILINE
)
_RUN_ELSEWHERE = re.compile(r"run by (\S+)::(\w+)")
_EXIT = re.compile(r"exit (\d+)")
# What differs from run to run: seconds, and rates.
_VARYING = re.compile(r"\b\d+(?:\.\d+)? s\b|\d+(?:\.\d+)? [KMGT]?i?B/s")
# What a run that takes longer than usual, as any does on a busy machine, says of its progress.
_STAGES = "starting|planning|checking sources|comparing copies|comparing|writing|verifying|auditing"
_PROGRESS = re.compile(rf"^(?:{_STAGES})(?:: |, | \d)[^\n]*\n", re.MULTILINE)
_RUNNERS = {"sh": "bash", "python": "python"}


class Block(NamedTuple):
    """A fenced block of a page.

    mark: of the comment above it, "" if there is none. line: where it begins. follows: whether nothing but blank lines
    lies between this block and the one before it.
    """

    language: str
    text: str
    mark: str
    line: int
    follows: bool

    @property
    def elsewhere(self) -> tuple[str, str] | None:
        """The file and the function of the test that runs these commands; None: they are run with their page."""
        match = _RUN_ELSEWHERE.fullmatch(self.mark)
        return (match[1], match[2]) if match else None

    @property
    def exit_code(self) -> int:
        """The exit code that the commands must end with."""
        match = _EXIT.fullmatch(self.mark)
        return int(match[1]) if match else 0


class Step(NamedTuple):
    """A block of commands, and the block that shows what they print; None if the page shows nothing of it."""

    commands: Block
    output: Block | None


class Ran(NamedTuple):
    """What came of a step: its exit code, and all that was printed, complaints too."""

    code: int
    printed: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    end = -1
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], match["text"], match["mark"] or "", line, match.start() == end))
        end = match.end()
    return found


def steps(page: str) -> list[Step]:
    """Return the commands of a page, in order. A block `text` right below a block of commands is what they print."""
    found = blocks(page)
    following: Sequence[Block | None] = [*found[1:], None]
    return [
        Step(block, after if after is not None and after.language == "text" and after.follows else None)
        for block, after in zip(found, following)
        if block.language in _RUNNERS
    ]


def block_run_by(page: str, test: str) -> str:
    """Return the text of the block of which the page says that this test runs it."""
    (text,) = (block.text for block in blocks(page) if block.elsewhere and block.elsewhere[1] == test)
    return text


@functools.cache
def _zygote(python_path: str) -> ShellZygote:
    """Return the process that is `reshard-mpi` for all pages of this process: most of them are short conversions."""
    return ShellZygote(python_path)


def run_steps(
    run: Iterable[Step],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 2 * HANG_SECONDS,
) -> list[Ran]:
    """Run commands in one shell, which begins in a new folder `folder`/work, and stops where an exit code is another.

    What is returned ends with the step that went wrong. env: what the shell has in its environment besides.
    """
    work, scripts = folder / "work", folder / "steps"
    work.mkdir()
    scripts.mkdir()
    driver = [f"cd {work}"]
    for number, step in enumerate(run):
        name = scripts / str(number)
        name.write_text(step.commands.text)
        expected = step.commands.exit_code
        # Sourced, so that a change of folder lasts.
        command = f". {name}" if step.commands.language == "sh" else f"python {name}"
        driver += [
            "set -e" if expected == 0 else "set +e",
            f"trap 'echo $? >{name}.code' EXIT",
            f"{{ {command}; }} >{name}.printed 2>&1",
            f"code=$?; trap - EXIT; echo $code >{name}.code; [ $code = {expected} ] || exit 0",
        ]
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": str(folder), **(env or {})}
    programs = _zygote(environment["PYTHONPATH"]).folder
    environment["PATH"] = os.pathsep.join([str(programs), sysconfig.get_path("scripts"), os.environ["PATH"]])
    run_command(["bash", "-c", "\n".join(driver)], env=environment, timeout_seconds=timeout_seconds)
    codes = sorted(scripts.glob("*.code"), key=lambda path: int(path.stem))
    return [Ran(int(path.read_text()), path.with_suffix(".printed").read_text()) for path in codes]


def agrees(shown: str, printed: str) -> bool:
    """Tell whether a page shows what was printed, progress aside.

    `...` stands for anything; seconds and rates may be others.
    """
    printed = _PROGRESS.sub("", printed)
    pieces = (re.escape(_VARYING.sub("<varying>", piece)) for piece in shown.strip().split("..."))
    return re.fullmatch(".*".join(pieces), _VARYING.sub("<varying>", printed).strip(), re.DOTALL) is not None
