"""What a format can do, and how much memory it takes. Code outside of `formats` asks for traits, never for names."""

from __future__ import annotations

from typing import NamedTuple


class Costs(NamedTuple):
    """How much memory a process needs because of a format, in bytes, measured and rounded up (`test_projection.py`).

    reading, writing, checking: for each tensor of a shard that is read, written, or compared with its own sums.
    library: for what is loaded to write; numpy comes on top if `uses_numpy`. cached: what the library keeps for each
    tensor; most_cached: at most. child, child_tensor: for a child process that reads files that other programs have
    written, and for each tensor of these; 0 if there is no such process.
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

    title: the words for its checkpoints, if not its name. describes_itself: a shard states its rank and how its
    checkpoint is sharded. has_crc: a shard can be sealed with a checksum of the whole file. counts_numbers: in which
    whole numbers count as so many bytes (see `counted`). keeps_sums: a shard has a place for sums of its tensors.
    keeps_strings: it has a place for strings. shares_blocks: large tensors are aligned so that file systems can share
    their blocks. is_folder: a checkpoint is a folder whose files an index lists (see `protocol.FolderFormat`).
    is_filled: a checkpoint is a full one, in files that are filled up to a size. sharded_as: the format in which such a
    checkpoint is written instead if it is cut over ranks. written_as: the format in which what is read is written,
    unless another one is asked for; None: the same. tells_files: whether a folder tells which files it should have; if
    not, the user must say how many. unread_types: names of types that its own framework writes and does not read again:
    they are taken over from shards of the same format alone. unread_empty: whether that framework refuses a
    shard of nothing.
    """

    costs: Costs
    describes_itself: bool = False
    has_crc: bool = False
    counts_numbers: bool = False
    keeps_sums: bool = False
    shares_blocks: bool = False
    is_folder: bool = False
    is_filled: bool = False
    keeps_strings: bool = True
    sharded_as: str | None = None
    written_as: str | None = None
    tells_files: bool = True
    title: str = ""
    unread_types: tuple[str, ...] = ()
    unread_empty: bool = False
