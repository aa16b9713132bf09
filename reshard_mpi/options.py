"""List the options of a run, each with one name everywhere, and check their values (`OPTIONS`).

An option has its name on the command line, as an argument in Python (dashes become underscores), in a request, and in
the records of runs; only `--from`, a word of Python's own, is `source_format` there.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.errors import UsageError, wrong_type
from reshard_mpi.filesystem.paths import is_object_path, is_url
from reshard_mpi.processes.host import task_number
from reshard_mpi.text import parse_bytes

# What is between the sides of an equation.
ARROW = "<=>"

_MAX_RANKS = 1 << 16  # ranks that one option may name, as many as a run makes at once
_STAGES = (1, 2, 3)  # of ZeRO
_MAX_DIGITS = 18  # of a number on the command line
_AXIS = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*=[1-9][0-9]{{0,{_MAX_DIGITS - 1}}}")


def check_path(value: object, name: str) -> str:
    """Return a path, or an address in an object store, as a str. Raises UsageError if it can be neither."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise wrong_type(name, "a str or a pathlib.Path", value)
    if not path or "\0" in path:  # empty: such as a variable of the shell that is not set
        raise UsageError(
            f"{name} can be no path", expected=f"a path{' without NUL bytes' * bool(path)}", got=repr(path)
        )
    if is_url(path) and not is_object_path(path):
        remedy = "copy what is there to a file system"
        raise UsageError(
            f"{name} is a URL", expected="a path, or s3://BUCKET/PREFIX", got=f"the URL {path!r}", remedy=remedy
        )
    if path.startswith("s3://"):
        _check_address(path, name)
    return path


def _check_address(address: str, name: str) -> None:
    """Raise UsageError for an address without a bucket, such as of a variable that is not set, or with dots for names.

    A path made of an address has one slash less, so who is given that cannot tell the first any more.
    """
    bucket, *names = address.removeprefix("s3://").split("/")
    if not bucket or not {".", ".."}.isdisjoint(names):
        raise UsageError(
            f"{name} is no address in an object store",
            expected="s3://BUCKET/PREFIX, without . and .. for names",
            got=repr(address),
        )


def check_local_path(value: object, name: str) -> str:
    """Return a path on a file system as a str. Raises UsageError if it cannot be one."""
    path = check_path(value, name)
    if is_object_path(path):
        raise UsageError(
            f"{name} is an address in an object store",
            expected="a path on a file system",
            got=path,
            remedy="have it written to a file system, and copy it",
        )
    return path


_ENDPOINT = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")


def check_endpoint(value: object, name: str) -> str:
    """Return the address of a server as a str. Raises UsageError if it is none."""
    if not isinstance(value, str) or not _ENDPOINT.fullmatch(value):
        expected = "the address of a store that speaks S3, as https://HOST or http://HOST:PORT"
        raise UsageError(f"{name} is no address of a server", expected=expected, got=repr(value))
    return value


def check_map(value: object, name: str) -> str:
    """Return a map as a str: a path, the name of one that comes with the program, or an equation."""
    if value == "":
        raise UsageError(f"{name} can be no map", expected="a path, a name or an equation", got="''")
    return value if isinstance(value, str) and ARROW in value and "\0" not in value else check_path(value, name)


def check_text(value: object, name: str) -> str:
    """Return `value`, a str. Raises WrongTypeError if it is none."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    return value


def check_axis(value: object, name: str) -> str:
    """Return the length of an axis of a map, a text such as `m=128`. Raises UsageError if it is none."""
    text = check_text(value, name)
    if _AXIS.fullmatch(text) is None:
        raise UsageError(f"{name} is no length of an axis", expected="NAME=LENGTH, such as m=128", got=repr(text))
    return text


def check_flag(value: object, name: str) -> bool:
    """Return a flag as a bool; a number or None is one as well. Raises WrongTypeError: "no" would be true."""
    if value is None or isinstance(value, bool):
        return bool(value)
    plain = value.item() if hasattr(value, "item") else value  # numpy's
    if not isinstance(plain, int):
        raise wrong_type(name, "True or False", value)
    return bool(plain)


def check_number(value: Any, name: str) -> int:
    """Return a whole number of any type as an int; True is 1, as in MindSpore. Raises WrongTypeError."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise wrong_type(name, "a whole number", value) from None


def check_count(value: object, name: str) -> int:
    """Return a whole number of 1 or more. Raises UsageError for any other."""
    number = check_number(value, name)
    if number < 1:
        raise UsageError(f"{name} is out of range", expected="1 or more", got=str(number))
    return number


def check_stage(value: object, name: str) -> int:
    """Return a stage of ZeRO: 1, 2 or 3. Raises UsageError for any other number."""
    number = check_number(value, name)
    if number not in _STAGES:
        raise UsageError(f"{name} is no stage of ZeRO", expected="1, 2 or 3", got=str(number))
    return number


def check_numbers(values: object, name: str) -> tuple[int, ...]:
    """Return whole numbers of any types as ints. Raises WrongTypeError."""
    if not isinstance(values, Iterable):
        raise wrong_type(name, "whole numbers, such as [0, 1]", values)
    return tuple(check_number(value, f"one of {name}") for value in values)


class TargetShare(NamedTuple):
    """A share of the targets."""

    number: int  # from 0
    shares: int  # how many there are
    variable: str = ""  # the environment variable that says the number, if it was not given


def check_part(value: object, name: str) -> TargetShare:
    """Return a share, given as (i, n) or as a text such as "auto/8". Raises UsageError if there is no such share."""
    if isinstance(value, str):
        return read_part(value)
    numbers = check_numbers(value, name)
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise UsageError(f"{name} is no share", expected="(i, n) with i from 0 to n - 1", got=repr(value))
    return TargetShare(*numbers)


def check_memory(value: object, name: str) -> str | int:
    """Return a size of memory, a text or a number, as it is. Raises WrongTypeError."""
    return value if isinstance(value, str) else check_number(value, name)


def check_size(value: object, name: str) -> int:
    """Return a size, a text or a number, in bytes. Raises UsageError if it is none."""
    size = check_memory(value, name)
    try:
        size_bytes = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise UsageError(f"{name} is no size", expected=str(error), got=repr(size)) from None
    if size_bytes < 1:
        raise UsageError(f"{name} is out of range", expected="1 byte or more", got=repr(size))
    return size_bytes


def check_tolerance(value: object, name: str) -> float:
    """Return how far numbers may be apart, a number or a text, as a float. Raises UsageError if it is no distance."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} is no number", expected="0 or more, such as 1e-3", got=repr(value)) from None
    if not 0 <= number < math.inf:
        raise UsageError(f"{name} is out of range", expected="0 or more, such as 1e-3", got=repr(value))
    return number


def check_source_format(value: object, name: str) -> str:
    """Return the name of a format. Raises UsageError for an unknown one."""
    return formats.info(check_text(value, name)).name


def check_target_format(value: object, name: str) -> str:
    """Return the name of a format that can be written. Raises UsageError for an unknown one."""
    return formats.require_target(check_text(value, name))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _wrong_word(expected: str, word: str) -> UsageError:
    return UsageError("an option has a wrong value", expected=expected, got=repr(word))


def read_count(text: str) -> int:
    """Return a number of 1 or more. Raises UsageError for any other text."""
    if not _is_number(text) or int(text) < 1:
        raise _wrong_word("1 or more", text)
    return int(text)


def read_stage(text: str) -> int:
    """Return a stage of ZeRO. Raises UsageError for any other text."""
    if text not in map(str, _STAGES):
        raise _wrong_word("1, 2 or 3", text)
    return int(text)


def read_rank(text: str) -> int:
    """Return one rank. Raises UsageError for any other text."""
    if not _is_number(text):
        raise _wrong_word("a rank, 0 or more", text)
    return int(text)


def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text such as `0-3,8` lists. Raises UsageError for any other text."""
    ranges = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise _wrong_word("ranks, such as 3 or 0-3,8", text)
        ranges.append(range(int(first), int(last if dash else first) + 1))
        if not ranges[-1]:
            raise _wrong_word(f"the lower rank first, {last}-{first}", word)
    if sum(numbers.stop - numbers.start for numbers in ranges) > _MAX_RANKS:
        raise _wrong_word(f"at most {_MAX_RANKS} ranks", text)
    return tuple(number for numbers in ranges for number in numbers)


def read_part(text: str) -> TargetShare:
    """Return a share, of a text such as `0/4`, or `auto/4` in a task of an array. Raises UsageError for any other."""
    share, slash, shares = text.partition("/")
    if len(shares) > _MAX_DIGITS and shares.isdecimal():
        raise _wrong_word(f"I/N with N of {_MAX_DIGITS} digits at most", text)
    if share == "auto" and _is_number(shares) and int(shares):
        number, variable = task_number(int(shares), os.environ)
        return TargetShare(number, int(shares), variable)
    if not (slash and _is_number(share) and _is_number(shares) and int(share) < int(shares)):
        raise _wrong_word("I/N with I from 0 to N-1, or auto/N", text)
    return TargetShare(int(share), int(shares))


class Kind(NamedTuple):
    """A kind of values of options.

    Example: `Kind(check_count, read_count)`, whole numbers of 1 or more.
    """

    check: Callable[[Any, str], Any]  # (value, name): returns an argument in Python as a plain value, or raises
    read: Callable[[str], Any] | None = None  # returns the value of a word of the command line; None: as `check`
    choices: Callable[[], tuple[str, ...]] | None = None  # returns all values, if these are few
    action: str = "store"  # as argparse calls it; "append" and "extend": the option may be given several times


def one_of(*words: str) -> Kind:
    """Return the kind of values that are one of a few words."""

    def check(value: object, name: str) -> str:
        if value not in words:
            raise UsageError(f"unknown value of {name}", expected=", ".join(words), got=repr(value))
        return str(value)

    return Kind(check, choices=lambda: words)


PATH = Kind(check_path)
LOCAL_PATH = Kind(check_local_path)
ENDPOINT = Kind(check_endpoint)
FLAG = Kind(check_flag, action="store_true")
TEXT = Kind(check_text)
TEXTS = Kind(check_text, action="append")
MAPS = Kind(check_map, action="append")
AXES = Kind(check_axis, action="append")
COUNT = Kind(check_count, read_count)
STAGE = Kind(check_stage, read_stage)
RANK = Kind(check_number, read_rank)
RANKS = Kind(check_number, read_ranks, action="extend")
PART = Kind(check_part, read_part)
SIZE = Kind(check_size)
MEMORY = Kind(check_memory)
TOLERANCE = Kind(check_tolerance)
SOURCE_FORMAT = Kind(check_source_format, choices=formats.names)
TARGET_FORMAT = Kind(check_target_format, choices=formats.targets)


class Option(NamedTuple):
    """An option of a run.

    Example: `Option("src_files", COUNT, "N", is_recorded=True)` is `--src-files N`, `src_files=N` in Python, and
    `"src_files": N` in the record of a run.
    """

    name: str  # of the argument in Python, and of the field of `Request`
    kind: Kind  # of its values
    metavar: str | None = None  # word for the value in the help
    default: Any = None  # value where the option is not given
    is_recorded: bool = False  # identifies a run, and is kept in its record: the value, or the digest of its file
    is_of_task: bool = False  # not passed on to a batch script, which gives each task its own value, or none
    is_of_transform: bool = True  # transform takes it; else other commands alone do

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--from" if self.name == "source_format" else f"--{self.name.replace('_', '-')}"

    @property
    def recorded_name(self) -> str:
        """The option's name in records."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be given several times."""
        return self.kind.action in ("append", "extend")

    def check(self, value: object, name: str) -> Any:
        """Return the value of the argument `name` in Python as a plain one, of several a tuple. Raises UsageError."""
        if value is None and self.default in (None, ()):
            return self.default
        if not self.is_repeatable:
            return self.kind.check(value, name)
        if self.kind is AXES and isinstance(value, Mapping):
            value = [f"{axis}={check_count(length, f'{name}[{axis!r}]')}" for axis, length in value.items()]
        if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable):
            return (self.kind.check(value, name),)
        return tuple(self.kind.check(item, f"one of {name}") for item in value)


_FILE = "F|DIR"
OPTIONS = {
    option.name: option
    for option in (
        Option("src_strategy", PATH, _FILE, is_recorded=True),
        Option("dst_strategy", PATH, _FILE, is_recorded=True),
        Option("unlisted", one_of("follow", "replicate", "drop"), default="follow", is_recorded=True),
        Option("select", TEXT, "GLOB"),
        Option("source_format", SOURCE_FORMAT, "FORMAT", is_recorded=True),
        Option("src_files", COUNT, "N", is_recorded=True),
        Option("map", MAPS, "FILE|NAME|EQ", (), is_recorded=True),
        Option("forward", FLAG, default=False),
        Option("reverse", FLAG, default=False),
        Option("config", PATH, "FILE.json", is_recorded=True),
        Option("axis", AXES, "NAME=LENGTH", (), is_recorded=True),
        Option("like", PATH, "CHECKPOINT", is_recorded=True),
        Option("dtype", TEXTS, "[GLOB=]TYPE", (), is_recorded=True),
        Option("include", TEXTS, "GLOB", (), is_recorded=True),
        Option("exclude", TEXTS, "GLOB", (), is_recorded=True),
        Option("before", PATH, "CHECKPOINT", is_of_transform=False),
        Option("allow", TEXTS, "GLOB", (), is_of_transform=False),
        Option("accumulated", one_of("mean", "sum", "refuse"), default="refuse", is_recorded=True),
        Option("to", TARGET_FORMAT, is_recorded=True),
        Option("prefix", TEXT, default=formats.DEFAULT_PREFIX, is_recorded=True),
        Option("max_shard_size", SIZE, "SIZE", is_recorded=True),
        Option("dp", COUNT, "N", is_recorded=True),
        Option("zero_stage", STAGE, "N", is_recorded=True),
        Option("ep", COUNT, "N", is_recorded=True),
        Option("core_version", one_of("0.15", "0.16", "0.17", "0.18", "0.19"), is_recorded=True),
        Option("crc", FLAG, default=False, is_recorded=True),
        Option("rank", RANKS, "RANKS", is_of_task=True),
        Option("part", PART, "I/N|auto/N", is_of_task=True),
        Option("resume", FLAG, default=False, is_of_task=True),
        Option("overwrite", FLAG, default=False),
        Option("single_writer", FLAG, default=False),
        Option("verify", FLAG, default=False),
        Option("strict", FLAG, default=False, is_recorded=True),
        Option("replicas", one_of("any", "sample", "check"), default="sample"),
        Option("atol", TOLERANCE, "NUMBER", 0.0, is_of_transform=False),
        Option("rtol", TOLERANCE, "NUMBER", 0.0, is_of_transform=False),
        Option("memory", MEMORY, "SIZE|unlimited"),
        Option("max_active", COUNT, "N"),
        Option("jobs", COUNT, "N", is_of_task=True),
    )
}
# Pairs of options that exclude each other.
EXCLUSIVE = (("forward", "reverse"), ("rank", "part"), ("resume", "overwrite"))
