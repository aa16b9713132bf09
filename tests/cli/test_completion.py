"""Completion in a real bash and a real zsh: what the key makes of words that have been begun."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import refused, run_apart, run_here
from support.examples import few
from support.processes import run_command

from reshard_mpi.cli.arguments import parser

(COMMANDS,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
# What is typed -> the words that the command is given after the key, where one fits.
ONE = {
    "tra": ["transform"],
    "--ver": ["--version"],
    "transform --res": ["transform", "--resume"],
    "transform a b --dst": ["transform", "a", "b", "--dst-strategy"],
    "transform --resume a b --unl": ["transform", "--resume", "a", "b", "--unlisted"],
    "plan --to hd": ["plan", "--to", "hdf5"],
    "transform --to=saf": ["transform", "--to=safetensors"],
    "transform --map hf-mixtral-s": ["transform", "--map", "hf-mixtral-stacked"],
    "transform --map=hf-mixtral-s": ["transform", "--map=hf-mixtral-stacked"],
    "transform --map strategies/d": ["transform", "--map", "strategies/dst.toml"],
    "transform --dtype bf": ["transform", "--dtype", "bf16"],
    "plan x --src-strategy strategies/d": ["plan", "x", "--src-strategy", "strategies/dst.toml"],
    "plan x --src-strategy=strategies/s": ["plan", "x", "--src-strategy=strategies/src.toml"],
    "help ma": ["help", "maps"],
    "completion z": ["completion", "zsh"],
    "inspect str": ["inspect", "strategies/"],
    "inspect net": ["inspect", "net weights.ckpt"],
}
# Where any number fits: all of them.
ANY = {
    "": list(COMMANDS),
    "transform --re": ["transform", "--report", "--replicas", "--resume", "--reverse"],
    "transform --unlisted ": ["transform", "--unlisted", "follow", "replicate", "drop"],
    "transform --to h": ["transform", "--to", "hdf5", "hf"],
    "verify --replicas=": ["verify", "--replicas=any", "sample"],
    "completion ": ["completion", "bash", "zsh"],
    "transform --jobs ": ["transform", "--jobs"],
    "transform --nothing": ["transform", "--nothing"],
    "ranks ": ["ranks"],
    "governor ": ["governor"],
}
END = "end of what it was given"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "strategies").mkdir()
    for name in ("strategies/src.toml", "strategies/dst.toml", "net weights.ckpt"):
        (path / name).touch()
    return path


class Shell:
    """An interactive shell on a terminal of its own, in which `reshard-mpi` prints what it is given."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._terminal, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null", "PS1": "$ ", "HISTFILE": "/dev/null"}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True
        )
        os.close(slave)

    def give(self, line: str) -> str:
        """Type a line, and a command that tells when it is done; return what the terminal has shown until then."""
        os.write(self._terminal, f"{line}\necho {END[:3]}''{END[3:]}\n".encode())
        shown, deadline = "", time.monotonic() + 300
        while not re.search(rf"^{END}\r?$", shown, re.MULTILINE):
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 1)[0]:
                shown += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return shown

    def words_given(self, typed: str) -> list[str]:
        """Return what `reshard-mpi` is given when this is typed, keys of completion included."""
        (found,) = re.findall(r"^<<(.*)>>\r?$", self.give(f"reshard-mpi {typed}"), re.MULTILINE)
        return [word for word in found.split("><") if word]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


def shell(name: str, folder: Path, options: list[str], setup: list[str]) -> Iterator[Shell]:
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    script = folder.parent / f"completion.{name}"
    script.write_text(run_apart("completion", name, check=True).out)
    running = Shell([name, *options, "-i"], folder)
    try:
        for line in (*setup, f"source {script}", "reshard-mpi() { printf '<<'; printf '%s><' \"$@\"; echo '>>'; }"):
            running.give(line)
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def bash(folder: Path) -> Iterator[Shell]:
    yield from shell("bash", folder, ["--norc", "--noprofile"], [r"""bind '"\C-t": insert-completions'"""])


@pytest.fixture(scope="module")
def zsh(folder: Path) -> Iterator[Shell]:
    yield from shell("zsh", folder, ["-f"], ["unsetopt beep auto_remove_slash", f"ZDOTDIR={folder.parent}"])


@pytest.mark.parametrize("typed", ONE)
def test_one_word_fits_in_bash(bash: Shell, typed: str) -> None:
    assert bash.words_given(f"{typed}\t") == ONE[typed]


@pytest.mark.parametrize("typed", ANY)
def test_any_number_of_words_fit_in_bash(bash: Shell, typed: str) -> None:
    assert sorted(bash.words_given(f"{typed}\x14")) == sorted(ANY[typed])


@pytest.mark.parametrize("typed", few(1, ONE))
def test_one_word_fits_in_zsh(zsh: Shell, typed: str) -> None:
    assert zsh.words_given(f"{typed}\t") == ONE[typed]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_the_script_is_sound(name: str, tmp_path: Path) -> None:
    """Every command and option is in it, and the shell accepts it."""
    text = run_here("completion", name).out
    for command in COMMANDS.values():
        assert all(option in text for action in command._actions for option in action.option_strings)
    (tmp_path / "script").write_text(text)
    if shutil.which(name):
        assert run_command([name, "-n", str(tmp_path / "script")]).code == 0
    if name == "bash" and shutil.which("shellcheck"):
        checked = run_command(["shellcheck", "--shell=bash", str(tmp_path / "script")])
        assert checked.code == 0, checked.out


def test_a_shell_that_nobody_knows() -> None:
    assert "expected bash or zsh, got 'bsh'; did you mean 'bash'?" in refused("completion", "bsh", code=2)
