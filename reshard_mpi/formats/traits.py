"""What a format can do, and what memory it takes: nothing outside of `formats` asks what it is called."""

from __future__ import annotations

from typing import NamedTuple


class Costs(NamedTuple):
    """What memory a process needs because of a format, in bytes, measured and rounded up (`test_projection.py`).

    reading, writing, checking: for each tensor of a shard whose structure is read, that is written, that is compared
    with the sums it keeps. library: what is loaded to write, with numpy if `uses_numpy`. cached, most_cached: what that
    keeps of each tensor, and at the most. child, child_tensor: a process that reads files of other making, and each
    tensor of those; none if there is no such process.
    """

    reading: int
    writing: int
    checking: int
    library: int = 0
    uses_numpy: bool = False
    cached: int = 0
    most_cached: int = 0
    child: int = 0
    child_tensor: int = 0


class Traits(NamedTuple):
    """What a format can do.

    title: what people call its checkpoints, if not by its name. describes_itself: a shard says whose it is and how its
    checkpoint is cut. has_crc: a shard can be sealed with a checksum of all of it. keeps_sums: a shard has a place for
    sums of its tensors. keeps_strings: and for strings. shares_blocks: large tensors lie so that file systems can share
    their blocks. is_folder: a checkpoint is a folder whose files an index lists, see `protocol.FolderFormat`.
    is_filled: it is one full checkpoint in files that are filled up to a size. sharded_as: the format that such a
    checkpoint gets where it is cut over ranks.
    """

    costs: Costs
    describes_itself: bool = False
    has_crc: bool = False
    keeps_sums: bool = False
    shares_blocks: bool = False
    is_folder: bool = False
    is_filled: bool = False
    keeps_strings: bool = True
    sharded_as: str | None = None
    title: str = ""
