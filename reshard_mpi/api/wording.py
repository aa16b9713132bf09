"""Messages as the callers of the public functions read them: with the names of arguments instead of options.

Messages name what belongs to a run as the command line does. Each public function is `public`, and while it is called
`in_python` turns such names into those of its own arguments, or else of those of `reshard_mpi.transform`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from reshard_mpi.errors import ReshardError, as_reshard_error

P = ParamSpec("P")
R = TypeVar("R")

# The arguments that mean what an option does, the one of `reshard_mpi.transform` first.
_ARGUMENTS = {
    **{name: (name,) for name in ("accumulated", "config", "dtype", "exclude", "include", "like", "map", "memory")},
    **{name: (name,) for name in ("crc", "forward", "overwrite", "resume", "reverse", "strict", "verify")},
    **{name: (name,) for name in ("replicas", "unlisted")},
    "dst-strategy": ("dst_strategy", "dst_strategy_file", "second_strategy"),
    "from": ("source_format",),
    "jobs": ("jobs", "process_num", "max_process_num"),
    "max-active": ("max_active",),
    "max-shard-size": ("max_shard_size",),
    "part": ("part", "split_dst_file"),
    "prefix": ("prefix", "ckpt_prefix"),
    "rank": ("ranks", "rank", "rank_id"),
    "select": ("select", "file_suffix"),
    "src-files": ("source_files",),
    "src-strategy": ("src_strategy", "src_strategy_file", "first_strategy"),
    "to": ("to", "output_format"),
}
_FLAGS = {"crc", "forward", "overwrite", "resume", "reverse", "strict", "verify"}
_CHOICES = "any|sample|check|mean|sum|refuse|follow|replicate|drop|unlimited|ckpt|hdf5|safetensors|torch|hf|dcp"
# An option, and what follows it if that is its value: one of several words, something in quotes, or a placeholder. In
# "no --crc" and "leave out --crc" it is named and not given.
_OPTION = re.compile(
    r"(?P<left_out>\b(?:no|without|leave|leave out|neither|nor) )?(?<![\w-])--(?P<option>[a-z]+(?:-[a-z]+)*)(?![\w-])"
    rf"(?: (?P<value>(?:{_CHOICES})\b|'[^']*'|[A-Z]+(?:[|/][A-Z]+)*\b))?"
)
_AGAIN = "run the same command with --resume"
_arguments: ContextVar[tuple[str, ...]] = ContextVar("_arguments", default=())


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function public: all that it raises is a ReshardError that names arguments.

    Errors of the file system and a lack of memory become one.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _arguments.set(names)
        try:
            return function(*args, **kwargs)
        except (ReshardError, OSError, MemoryError) as error:
            known = as_reshard_error(error)
            for part in ("problem", "expected", "got", "remedy"):
                setattr(known, part, in_python(getattr(known, part)))
            if known.where.startswith("--"):  # else it is a path, in which nothing is to be replaced
                known.where = in_python(known.where)
            if known is error:
                raise
            raise known from error
        finally:
            _arguments.reset(token)

    return call


def in_python(text: str) -> str:
    """Return a message with the arguments of the public function that is being called instead of options."""
    arguments = _arguments.get()
    if _AGAIN in text:
        text = text.replace(_AGAIN, "make the same call with --resume" if "resume" in arguments else "make it again")
    return _OPTION.sub(_named, text)


def all_in_python(texts: Iterable[str]) -> tuple[str, ...]:
    """Return messages as `in_python` does."""
    return tuple(map(in_python, texts))


def _named(found: re.Match[str]) -> str:
    option, value, left_out = found["option"], found["value"], found["left_out"] or ""
    if option not in _ARGUMENTS:
        return found[0]
    own = next((name for name in _ARGUMENTS[option] if name in _arguments.get()), None)
    name = own or _ARGUMENTS[option][0]
    if option in _FLAGS:
        said = name if left_out else f"{name}=True"
        said += f" {value}" if value else ""
    elif value is None or option == "part":
        said = name
    else:
        said = f"{name}={value!r}" if re.fullmatch(_CHOICES, value) else f"{name}={value}"
    return f"{left_out}{said}" + ("" if own else " of reshard_mpi.transform")
