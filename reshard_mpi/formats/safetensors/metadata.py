"""What the metadata of a file says: MindSpore's entries, and strings.

Metadata is text by text. MindSpore takes an entry that is called as a tensor for that tensor's type, and fails where it
is no type; so a shard has no entry called as one of its tensors but for that.
"""

from __future__ import annotations

from collections.abc import Container

from reshard_mpi.formats.files import MAX_NAME_BYTES, kept_bytes
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.units import MIB

METADATA = "__metadata__"
# Who wrote the file. MindSpore and transformers look at it.
FORMAT, MINDSPORE, TORCH = "format", "ms", "pt"
# The decimal CRC-32 of names and contents that `save_checkpoint(crc_check=True)` adds.
CRC = "crc_num"
# In an entry with the name of a tensor: one value a byte, stored as I8.
INT4_TAG = "Int4"
# "True" where what several ranks hold is in the file of one of them.
REMOVED = "remove_redundancy"
# In files of torch's distributed checkpoints: where each tensor lies in the whole one, as JSON (see `torch_dcp`).
SHARDING = "DCP_SHARDING_INFO"
# A string of a shard that cannot stand there by its own name, behind this prefix. Any other entry is a string, too.
STRING_PREFIX = "__reshard_mpi__:"
# What torch says here of the parts of tensors in a file holds for no other file.
_OF_ONE_FILE = "DCP_"
_RESERVED = frozenset((METADATA, FORMAT, CRC, REMOVED, NEST))
# Of all strings that stand under their own names, so that no foreign file fills the memory; longer ones of this
# program's are written behind the prefix.
MAX_PLAIN_BYTES, MAX_WRITTEN_PLAIN_BYTES = 4 * MIB, MIB // 2
# So many entries that are not kept are named, with so many characters of each.
_MAX_LEFT_OUT, _MAX_SHOWN = 64, 100


def is_plain(name: str) -> bool:
    """Tell whether a string of this name is an entry of the same name."""
    return name not in _RESERVED and not name.startswith((STRING_PREFIX, _OF_ONE_FILE)) and is_storable(name)


def is_of_this_file(name: str) -> bool:
    """Tell whether an entry is about the file that it stands in, and nothing is lost if it is not kept."""
    return name in (FORMAT, CRC, REMOVED)


def is_storable(name: str) -> bool:
    """Tell whether shards may have a string of this name."""
    return 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES


class PlainStrings:
    """The strings of a file that stand in its metadata under their own names, while they are read."""

    def __init__(self) -> None:
        self._strings: dict[str, str] = {}
        self._left_out: dict[str, None] = {}
        self._kept_bytes = 0

    def add(self, name: str, text: str | None) -> None:
        """Add what an entry says; of entries of one name, the last counts. text: None if it is too long."""
        self._kept_bytes += kept_bytes(name) + (0 if text is None else kept_bytes(text))
        if text is None or self._kept_bytes > MAX_PLAIN_BYTES:
            self.leave_out(f"{name[:_MAX_SHOWN]!r}, which is too long, or follows others that are")
        elif is_plain(name):
            self._strings[name] = text
        else:
            self.leave_out(f"{name[:_MAX_SHOWN]!r}")

    def leave_out(self, what: str) -> None:
        """Say that an entry is not kept, unless that has been said of many."""
        if len(self._left_out) < _MAX_LEFT_OUT:
            self._left_out[f"of its metadata {what}"] = None

    def kept(self, tensors: Container[str], strings: Container[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the strings, and in words what is left out: what is called as a tensor, or as another string."""
        for name in [name for name in self._strings if name in tensors or name in strings]:
            del self._strings[name]
            self.leave_out(f"{name[:_MAX_SHOWN]!r}, of which there are two")
        return self._strings, tuple(self._left_out)
