"""Values of arguments, from what was typed; what is wrong with one is an ArgumentTypeError."""

from __future__ import annotations

import argparse

from reshard_mpi.filesystem.paths import is_url
from reshard_mpi.units import parse_bytes

# What is between the sides of an equation; `mapping.syntax` has it too, and takes long to load.
ARROW = "<=>"

# As many as a run makes at once.
_MOST_RANKS = 1 << 16
_MOST_DIGITS = 18


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def path(text: str) -> str:
    """Return a path as it was given."""
    if not text:  # such as a variable of the shell that is not set; to a system call it is no path either
        raise argparse.ArgumentTypeError("expected a path, got ''")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"expected a path, got the URL {text!r}; copy what is there to a file system")
    return text


def map_name(text: str) -> str:
    """Return a map as it was given: a path, a name or an equation."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, a name or an equation, got ''")
    return text if ARROW in text else path(text)


def positive(text: str) -> int:
    """Return a number of 1 or more."""
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """Return a size in bytes."""
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from None
    if size_bytes < 1:
        raise argparse.ArgumentTypeError(f"expected 1 byte or more, got {text!r}")
    return size_bytes


def rank(text: str) -> int:
    """Return one rank."""
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"expected a rank, 0 or more, got {text!r}")
    return int(text)


def ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text such as `0-3,8` lists."""
    ranges = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise argparse.ArgumentTypeError(f"expected ranks, such as 3 or 0-3,8, got {text!r}")
        ranges.append(range(int(first), int(last if dash else first) + 1))
        if not ranges[-1]:
            raise argparse.ArgumentTypeError(f"expected the lower rank first, {last}-{first}, got {word!r}")
    if sum(numbers.stop - numbers.start for numbers in ranges) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS} ranks, got {text!r}")
    return tuple(number for numbers in ranges for number in numbers)


def part(text: str) -> tuple[int, int]:
    """Return a share and the number of shares, of a text such as `0/4`."""
    share, slash, shares = text.partition("/")
    if len(shares) > _MOST_DIGITS and shares.isdecimal():
        raise argparse.ArgumentTypeError(f"expected I/N with N of {_MOST_DIGITS} digits at most, got {text!r}")
    if not (slash and _is_number(share) and _is_number(shares) and int(share) < int(shares)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(share), int(shares)
