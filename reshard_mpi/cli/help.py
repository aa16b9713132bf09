"""Show a page of the user's guide (`page`), and make a shell's completion script of the parser (`script`).

A page is a file of Markdown, so it can be read on the repository's page as well. `README.md` beside the pages links to
each of them, in the order in which they are best read. A completion script is made of the parser, the pages and maps.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.cli.arguments import commands_of, parser
from reshard_mpi.cli.option_parser import path
from reshard_mpi.errors import UsageError
from reshard_mpi.text import did_you_mean

_FOLDER = Path(__file__).parent.parent / "guide"
_LINK_TO_PAGE = re.compile(r"\[([^]]+)\]\((\w+)\.md\)")
# Width of the pages in characters.
_MAX_WIDTH = 120
_GAP = "  "
_TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
# Notes to the tests, such as who runs a block of commands.
_COMMENT = re.compile(r"^<!--.*-->\n", re.MULTILINE)


def topics() -> dict[str, str]:
    """Return the title of each page by its topic, in the order of the table of contents."""
    contents = (_FOLDER / "README.md").read_text(encoding="utf-8")
    return {topic: _title(_FOLDER / f"{topic}.md") for _, topic in _LINK_TO_PAGE.findall(contents)}


def page(topic: str | None) -> str:
    """Return a page of the guide, or a map that comes with the program as it is; None: the list of pages.

    Raises UsageError if there is none of this topic.
    """
    titles = topics()
    if topic is None:
        width = max(map(len, titles))
        return "\n".join(f"reshard-mpi help {name:<{width}}  {title}" for name, title in titles.items())
    if topic not in titles:
        from reshard_mpi.mapping.map_file import printed_map, shipped_maps

        if topic in shipped_maps():
            return printed_map(topic)
        meant = did_you_mean(topic, titles) or _page_about(topic, titles)
        raise UsageError(f"the guide has no such page{meant}", expected=", ".join(titles), got=topic)
    text = (_FOLDER / f"{topic}.md").read_text(encoding="utf-8").rstrip()
    shown = as_shown(text)
    return f"{shown}\n\n{_shipped_maps()}" if topic == "maps" else shown


def _page_about(word: str, topics: Iterable[str]) -> str:
    """Return `; page 'x' tells of it` with the page that has a word in a heading, or most often; empty if none has."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])", re.IGNORECASE)
    said = {}
    for topic in topics:
        text = (_FOLDER / f"{topic}.md").read_text(encoding="utf-8")
        headings = sum(1 for line in text.splitlines() if line.startswith("#") and pattern.search(line))
        said[topic] = headings, len(pattern.findall(text))
    best = max(said, key=said.__getitem__)
    return f"; {best!r} tells of it" if said[best] > (0, 0) else ""


def as_shown(markdown: str) -> str:
    """Return a page as a terminal shows it: no comments, tables aligned, commands in place of links to other pages."""
    text = _LINK_TO_PAGE.sub(_as_command, _COMMENT.sub("", markdown))
    return _TABLE.sub(lambda table: _aligned(table[0]), f"{text}\n").rstrip()


def _as_command(link: re.Match[str]) -> str:
    """Return a link to a page as the command that shows it, behind the words of the link if these are others."""
    words, topic = link.groups()
    command = f"`reshard-mpi help {topic}`"
    return command if words == topic else f"{words} ({command})"


def _aligned(table: str) -> str:
    """Return a table with its columns one below another; where that is too wide, with the cells of a row so."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    if sum(widths) + len(_GAP) * len(widths) > _MAX_WIDTH:
        return "\n".join(_record(head, row) for row in rows)
    shown = [head, ["-" * width for width in widths], *rows] if any(head) else rows
    return "".join(_GAP.join(map(str.ljust, row, widths)).rstrip() + "\n" for row in shown)


def _record(head: list[str], row: list[str]) -> str:
    """Return one row of a table as lines: its first cell, and below it the others with the heads of their columns."""
    others = (f"    {name}: {cell}" if name else f"    {cell}" for name, cell in zip(head[1:], row[1:]))
    return "\n".join([row[0], *others, ""])


def _shipped_maps() -> str:
    """Return the maps that come with the program, with what each is for."""
    from reshard_mpi.mapping.map_file import described_maps

    described = described_maps()
    width = max(map(len, described), default=0)
    lines = [f"    {name:<{width}}  {description}" for name, description in described.items()]
    remark = "`reshard-mpi help NAME` prints one of them, to be read, or changed and given as a file."
    return "\n".join(["## Maps that come with the program", "", *lines, "", remark])


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


# What may be given behind a command and an option; without an option, by what the word begins with. `choices` is words,
# `files` is not empty where files may be given too.
_CASES = """\
    case $command:$option in
@values@
    *)
        case $command:$current in
@options@
        :*) choices='@commands@' ;;
@positionals@
        *) files=1 ;;
        esac ;;
    esac
"""
# bash splits words at `=`, unless the user has it otherwise.
_BASH = """\
# Completion of reshard-mpi. In ~/.bashrc: eval "$(reshard-mpi completion bash)"
_reshard_mpi() {
    local command='' option='' choices='' files='' begin='' number word
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    for ((number = 1; number < COMP_CWORD; number++)); do
        word=${COMP_WORDS[number]}
        if [[ $word != -* ]]; then command=$word; break; fi
    done
    if [[ $current == --*=* ]]; then
        option=${current%%=*} current=${current#*=} begin=$option=
    elif [[ $current == = ]]; then
        option=$previous current=''
    elif [[ $previous == = ]]; then
        option=${COMP_WORDS[COMP_CWORD - 2]}
    elif [[ $previous == -* ]]; then
        option=$previous
    fi
@cases@    COMPREPLY=()
    if [[ -n $files ]]; then compopt -o filenames; fi
    while IFS= read -r word; do
        COMPREPLY+=("$begin$word")
    done < <(compgen -W "$choices" -- "$current"; if [[ -n $files ]]; then compgen -f -- "$current"; fi)
}
complete -F _reshard_mpi reshard-mpi"""
_ZSH = """\
# Completion of reshard-mpi. In ~/.zshrc: eval "$(reshard-mpi completion zsh)"
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_reshard_mpi() {
    local command='' option='' choices='' files='' number
    for ((number = 2; number < CURRENT; number++)); do
        if [[ $words[number] != -* ]]; then command=$words[number]; break; fi
    done
    if compset -P '--*='; then
        option=${IPREFIX%=}
    elif [[ $words[CURRENT-1] == -* ]]; then
        option=$words[CURRENT-1]
    fi
    local current=$PREFIX
@cases@    [[ -z $choices ]] || compadd -- ${=choices}
    [[ -z $files ]] || _files
}
compdef _reshard_mpi reshard-mpi"""


class _Values(NamedTuple):
    """What may be given in a place: words, and whether files as well."""

    words: Iterable[str] = ()
    files: bool = False

    def as_shell(self) -> str:
        return f"choices='{' '.join(self.words)}'" + (" files=1" if self.files else "")


def script(shell: str) -> str:
    """Return the script that a shell, bash or zsh, is to run."""
    top = parser()
    commands = commands_of(top)
    option_values, options, positionals = [], [], []
    for name, command in {"": top, **commands}.items():
        option_values += [
            f"    {name}:{option}) {_values(action).as_shell()} ;;"
            for action in command._actions
            for option in action.option_strings
            if action.nargs != 0
        ]
        words = " ".join(option for action in command._actions for option in action.option_strings)
        options.append(f"        {name}:-*) choices='{words}' ;;")
        if name:
            positionals.append(f"        {name}:*) {_positional(command).as_shell()} ;;")
    text = {"bash": _BASH, "zsh": _ZSH}[shell].replace("@cases@", _CASES)
    for part, content in (
        ("values", "\n".join(option_values)),
        ("options", "\n".join(options)),
        ("commands", " ".join(commands)),
        ("positionals", "\n".join(positionals)),
    ):
        text = text.replace(f"@{part}@", content)
    return text


def _positional(command: argparse.ArgumentParser) -> _Values:
    """Return what may be given without an option; a command takes things of one kind so."""
    first = next((action for action in command._actions if not action.option_strings), None)
    return _Values() if first is None else _values(first)


def _values(action: argparse.Action) -> _Values:
    from reshard_mpi.mapping.map_file import shipped_maps
    from reshard_mpi.mapping.rules import TYPES

    if action.choices is not None:
        return _Values(tuple(map(str, action.choices)))
    if action.dest == "map":
        return _Values(shipped_maps(), files=True)
    if action.dest == "topic":
        return _Values(topics())
    if action.dest == "dtype":
        return _Values(TYPES)
    return _Values(files=action.type is path)
