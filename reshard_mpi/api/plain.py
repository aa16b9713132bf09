"""Turns arguments of the public functions (numpy integers, pathlib paths and the like) into plain Python values."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from reshard_mpi.errors import UsageError, wrong_type
from reshard_mpi.filesystem.paths import is_url
from reshard_mpi.units import parse_bytes

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
