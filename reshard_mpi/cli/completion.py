"""Print a shell's completion script, made of the parser (`script`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reshard_mpi.cli.arguments import commands_of, parser
from reshard_mpi.cli.guide import topics
from reshard_mpi.cli.option_parser import path
from reshard_mpi.mapping.map_file import shipped_maps
from reshard_mpi.mapping.rules import TYPES

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
            f"    {name}:{option}) {completion.as_shell()} ;;" for option, completion in _options_with_values(command)
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


def _options_with_values(command: argparse.ArgumentParser) -> Iterator[tuple[str, _Values]]:
    for action in command._actions:
        if action.nargs != 0:
            yield from ((option, _values(action)) for option in action.option_strings)


def _positional(command: argparse.ArgumentParser) -> _Values:
    """Return what may be given without an option; a command takes things of one kind so."""
    first = next((action for action in command._actions if not action.option_strings), None)
    return _Values() if first is None else _values(first)


def _values(action: argparse.Action) -> _Values:
    if action.choices is not None:
        return _Values(tuple(map(str, action.choices)))
    if action.dest == "map":
        return _Values(shipped_maps(), files=True)
    if action.dest == "topic":
        return _Values(topics())
    if action.dest == "dtype":
        return _Values(TYPES)
    return _Values(files=action.type is path)
