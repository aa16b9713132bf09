"""Format text and sizes for people; nothing in it acts on a terminal (`shortened`, `parse_bytes`).

Names of tensors, files and parameters may hold anything. Control characters (even single bytes above 127) move the
cursor, change titles and colours, and forge lines; direction marks reverse names; half of a surrogate pair cannot be
written at all. Whatever Python calls unprintable is shown as Python writes it: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

# Tells people a line.
Say = Callable[[str], None]

# Comparing names takes time that grows with both; whoever typed a name compared it with few.
_MAX_NAME_LENGTH = 200
_MAX_COMPARED = 10_000
_LEAST_LIKENESS = 0.6
_MAX_NEAREST = 3
_ADDRESS = re.compile(r"\bs3:/(?!/)")


def one_line(text: str) -> str:
    """Return `text` with all unprintable characters escaped, line breaks too; addresses have both of their slashes."""
    text = with_addresses(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def with_addresses(text: str) -> str:
    """Return `text` with addresses in object stores as people write them: paths made of them lose a slash."""
    return _ADDRESS.sub("s3://", text) if "s3:/" in text else text


def lines(text: str) -> str:
    """Return `text` with all unprintable characters escaped but line breaks, which are our own."""
    return "\n".join(map(one_line, text.split("\n")))


def counted(count: int, what: str) -> str:
    """Return a number of things, as `1 shard` or `4 shards`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `0, 2, 5-8`: three or more that follow one another are written as a range."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            run = numbers[start:place]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = place
    return ", ".join(parts)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares numbers in names as numbers: `net-9_5` comes before `net-10_5`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name))


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending whole numbers as the options of the command line take them, such as `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def shortened(things: Sequence[object], most: int = 5) -> str:
    """Return the first of some things as text, and how many more there are: `a, b and 3 more`."""
    return ", ".join(map(str, things[:most])) + (f" and {len(things) - most} more" if len(things) > most else "")


def first_few(things: Sequence[object], most: int) -> str:
    """Return the first of some things as text, and whether there are more: `a, b ...`."""
    return ", ".join(map(str, things[:most])) + (" ..." if len(things) > most else "")


def beginning(text: str, most: int) -> str:
    """Return a text, of a long one the first `most` characters: `abc...`."""
    return text if len(text) <= most else f"{text[:most]}..."


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the known name that is most like `name`; empty text if none is like it.

    A name that begins with `name` is taken first, the shortest of several. Dashes at the beginning and capitals make no
    difference.
    """
    from difflib import get_close_matches

    def bare(text: str) -> str:
        return text.lstrip("-").casefold()

    candidates: dict[str, str] = {}
    for candidate in islice(names, _MAX_COMPARED):
        if len(candidate) <= _MAX_NAME_LENGTH:
            candidates.setdefault(bare(candidate), candidate)
    typed = bare(name)
    if not typed or len(typed) > _MAX_NAME_LENGTH:
        return ""
    longer = [candidate for candidate in candidates if candidate.startswith(typed)]
    likely = [min(longer, key=len)] if longer else get_close_matches(typed, candidates, 1, _LEAST_LIKENESS)
    return f"; did you mean {candidates[likely[0]]!r}?" if likely else ""


def nearest_first(pattern: str, names: Sequence[str]) -> list[str]:
    """Return names, the most similar to a pattern first, the others in their order.

    Names that contain its text come first, the shortest of them, else those that are spelt like it.
    """
    from difflib import get_close_matches

    bare = re.sub(r"[*?\[\]]", "", pattern)
    if not bare or len(bare) > _MAX_NAME_LENGTH:
        return list(names)
    compared = [name for name in names[:_MAX_COMPARED] if len(name) <= _MAX_NAME_LENGTH]
    likely = sorted((name for name in compared if bare in name), key=len)[:_MAX_NEAREST]
    likely = likely or get_close_matches(bare, compared, _MAX_NEAREST, _LEAST_LIKENESS)
    return list(dict.fromkeys((*likely, *names)))


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_STEPS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])(i?B)?|B)?"


def format_bytes(size_bytes: int) -> str:
    """Return a size such as `1.50 GiB` or `312 B`."""
    for step_bytes, name in _STEPS:
        if size_bytes >= step_bytes:
            return f"{size_bytes / step_bytes:.2f} {name}"
    return f"{size_bytes} B"


def parse_bytes(text: str) -> int:
    """Return the size that `text` says, as `400M`, `1.5 GiB`, `64GB` or `1048576`.

    K, M, G, T, with or without iB, are powers of 1024, as batch systems have them; KB and so on powers of 1000. Raises
    ValueError, which says what is expected.
    """
    match = re.fullmatch(_SIZE, text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise ValueError("a size such as 400M, 1.5G or 64GiB")
    number, unit, ending = match.groups()
    base = 1000 if (ending or "").upper() == "B" else 1024
    factor = base ** ("KMGT".index(unit.upper()) + 1) if unit else 1
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_rate(size_bytes: int, seconds: float) -> str:
    """Return a throughput such as `1.20 GiB/s`."""
    return f"{format_bytes(int(size_bytes / seconds))}/s" if seconds > 0 else "-"


def json_number(value: float) -> float | str:
    """Return a number as strict JSON has it: NaN and infinities as texts."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
