"""How the shards of one checkpoint are called in all ranks: by their names without the number of the rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

# Epoch and step, as MindSpore ends names.
STEP = re.compile(r"-(\d+)_(\d+)\.\w+$")
_NUMBER = re.compile(r"\d+")


def name_without_rank(rank: int, name: str) -> str:
    """Return the name of a shard of `rank` with the rank replaced: the same for all ranks, if epoch and step are."""
    cut, number = _end_of_stem(name), str(rank)
    return _NUMBER.sub(lambda match: "<rank>" if match[0] == number else match[0], name[:cut]) + name[cut:]


def _without_last(rank: int, name: str) -> str:
    """Return the name with the rank replaced where it comes last before the step: in `llama2_7b_rank_2` only once."""
    return _replaced_last(rank, name, _end_of_stem(name))


def name_ending_in_rank(rank: int, name: str) -> str:
    """Return the name with the rank replaced also where the step else is: targets may have the prefix `net-3_`."""
    return _replaced_last(rank, name, len(name) - len(Path(name).suffix))


def _replaced_last(rank: int, name: str, cut: int) -> str:
    places = [match.span() for match in _NUMBER.finditer(name[:cut]) if match[0] == str(rank)]
    return f"{name[: places[-1][0]]}<rank>{name[places[-1][1] :]}" if places else name


def _end_of_stem(name: str) -> int:
    """Return where the part of a shard's name ends that comes before its epoch and step, or before its ending."""
    step = STEP.search(name)
    return step.start() if step else len(name) - len(Path(name).suffix)


# Ways to call what all ranks have by one name. They take a rank and the name of its file.
NAME_WAYS: tuple[Callable[[int, str], str], ...] = (
    lambda _, name: name,
    name_without_rank,
    _without_last,
)
