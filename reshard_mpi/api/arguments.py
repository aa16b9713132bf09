"""Turn arguments of the public functions into plain values, and errors into their words (`plain_path`).

Messages name what belongs to a run as the command line does. Each public function is `public`, and while it is called
`in_python` turns such names into those of its own arguments, or else of those of `reshard_mpi.transform`.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from reshard_mpi.errors import ReshardError, UsageError, as_reshard_error, wrong_type
from reshard_mpi.filesystem.paths import is_url
from reshard_mpi.text import parse_bytes

T = TypeVar("T")


def or_none(plain: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    """Return a function that does as `plain` does, and returns None for None."""
    return lambda value, name: None if value is None else plain(value, name)


def plain_number(value: object, name: str) -> int:
    """Return a whole number of any type as an int; True is 1, as in MindSpore. Raises WrongTypeError."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, "a whole number", value) from None


def plain_flag(value: object, name: str) -> bool:
    """Return a flag as a bool; a number or None is one as well. Raises WrongTypeError: "no" would be true."""
    if value is None or isinstance(value, bool):
        return bool(value)
    plain = value.item() if hasattr(value, "item") else value  # numpy's
    if not isinstance(plain, int):
        raise wrong_type(name, "True or False", value)
    return bool(plain)


def plain_size(value: object, name: str) -> str | int | None:
    """Return a size as a str, an int or None. Raises WrongTypeError."""
    return value if value is None or isinstance(value, str) else plain_number(value, name)


def plain_bytes(value: object, name: str) -> int | None:
    """Return a size, a text or a number, in bytes; None for None. Raises WrongTypeError or UsageError."""
    size = plain_size(value, name)
    try:
        size_bytes = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise UsageError(f"{name} is no size", expected=str(error), got=repr(size)) from None
    if size_bytes is not None and size_bytes < 1:
        raise UsageError(f"{name} is out of range", expected="1 byte or more", got=repr(size))
    return size_bytes


def plain_numbers(values: object, name: str) -> tuple[int, ...]:
    """Return whole numbers of any types as ints. Raises WrongTypeError."""
    if not isinstance(values, Iterable):
        raise wrong_type(name, "whole numbers, such as [0, 1]", values)
    return tuple(plain_number(value, f"one of {name}") for value in values)


def plain_share(value: object, name: str) -> tuple[int, int]:
    """Return (i, n): share number i, from 0, of n shares. Raises UsageError if there is no such share."""
    numbers = plain_numbers(value, name)
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise UsageError(f"{name} is no share", expected="(i, n) with i from 0 to n - 1", got=repr(value))
    return numbers[0], numbers[1]


def plain_path(value: object, name: str) -> str:
    """Return a path as a str. Raises UsageError if it cannot be a path."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise wrong_type(name, "a str or a pathlib.Path", value)
    if not path or "\0" in path:
        raise UsageError(f"{name} can be no path", expected="text without NUL bytes", got=repr(path))
    if is_url(path):
        raise UsageError(
            f"{name} is a URL", expected="a path", got=repr(path), remedy="copy what is there to a file system"
        )
    return path


def plain_maps(values: object, name: str) -> tuple[str, ...]:
    """Return a map (a path, a name or an equation), several, or none of them, as a tuple. Raises WrongTypeError."""
    if values is None:
        return ()
    if isinstance(values, str | os.PathLike):
        return (plain_path(values, name),)
    if not isinstance(values, Iterable):
        raise wrong_type(name, "a path, a name or an equation, or several", values)
    return tuple(plain_path(value, f"one of {name}") for value in values)


def plain_files(files: object, name: str) -> dict[int, str]:
    """Return a dict from rank to the path of its shard. Raises UsageError if `files` is no such map."""
    if not isinstance(files, Mapping):
        raise wrong_type(name, "a dict from rank to checkpoint file", files)
    ranks = {rank: plain_number(rank, f"a rank in {name}") for rank in files}
    return {ranks[rank]: plain_path(path, f"the file of rank {ranks[rank]} in {name}") for rank, path in files.items()}


def plain_text(value: object, name: str) -> str:
    """Return `value`, a str. Raises WrongTypeError if it is none."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    return value


def plain_texts(values: object, name: str) -> tuple[str, ...]:
    """Return a text, or several, as a tuple. Raises WrongTypeError."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Iterable):
        raise wrong_type(name, "a str, or several", values)
    return tuple(plain_text(value, f"one of {name}") for value in values)


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
            reshard_error = as_reshard_error(error)
            for part in ("problem", "expected", "got", "remedy"):
                setattr(reshard_error, part, in_python(getattr(reshard_error, part)))
            if reshard_error.where.startswith("--"):  # else it is a path, in which nothing is to be replaced
                reshard_error.where = in_python(reshard_error.where)
            if reshard_error is error:
                raise
            raise reshard_error from error
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


def _named(match: re.Match[str]) -> str:
    option, value, left_out = match["option"], match["value"], match["left_out"] or ""
    if option not in _ARGUMENTS:
        return match[0]
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
