"""Files that are parts of a checkpoint in several, by what they are called and by what they say.

Nothing else tells that what they hold may be slices. So no such file is taken for a checkpoint by itself.
"""

from __future__ import annotations

import re
from pathlib import Path

# Of which number from 0 of how many. MindFormers saves the model and the optimizer apart.
_OF_MINDFORMERS = re.compile(r".*-(?:model|opt)-(\d{7})-(\d{7})\.safetensors")
# What torch saves so holds whole tensors.
_OF_WHOLE_TENSORS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_BEHIND_THE_FIRST = re.compile(r'"saved_offsets": ?\[[0, ]*[1-9]')


def mindformers_count(name: str) -> int | None:
    """Return how many files like this one MindFormers has saved, by the name of one; None if it is not called so."""
    match = _OF_MINDFORMERS.fullmatch(name)
    return int(match[2]) if match else None


def part_of(path: str, sharding: str | None) -> str:
    """Return in words of what checkpoint a file is a part; empty if nothing says that it is one.

    sharding: what it says of itself as a part of torch's distributed checkpoints.
    """
    name = Path(path).name
    if (mindformers_count(name) or 0) > 1:
        return "a MindFormers checkpoint"
    is_whole = _OF_WHOLE_TENSORS.fullmatch(name) and not _BEHIND_THE_FIRST.search(sharding or "")
    return "" if sharding is None or is_whole else "a distributed checkpoint of torch"
