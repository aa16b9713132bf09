"""The header of a file: how long it is, and its JSON.

Accepted is what the reference parser accepts (safetensors 0.8), with exceptions that are refused: an entry or a field
given twice, fields that are not known.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.file_kinds import START_BYTES
from reshard_mpi.formats import files
from reshard_mpi.formats.safetensors.json_text import JsonText
from reshard_mpi.formats.safetensors.metadata import METADATA

# The reference's own limit.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
# An entry of the usual form is no longer, unless its name is.
_ENTRY_BYTES = 8 << 10
_METADATA = METADATA.encode()
_ENTRY_NUMBER = rb"(?:0|[1-9][0-9]{0,17}+)"
# An entry as nearly all are written, with or without the space that Python puts behind colons and commas, up to what
# follows it.
_USUAL = re.compile(
    rb' ?"([^"\\\x00-\x1f]++)": ?\{"dtype": ?"([A-Z0-9_]{1,16})", ?"shape": ?\[((?:%b(?:, ?%b)*+)?)\], ?'
    rb'"data_offsets": ?\[(%b), ?(%b)\]\}(,|\})' % ((_ENTRY_NUMBER,) * 4)
)


class Usual(NamedTuple):
    """An entry of the usual form: name, type and shape as they are written, and the first byte and the one after it."""

    at: int
    name: bytes
    dtype: bytes
    shape: bytes
    begin: int
    end: int


class Header(JsonText):
    """The header of a file, whose entries are taken one after another."""

    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        """Find out how long the header is. Raises ShardError if that cannot be."""
        start = _start(fd, path)
        length_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
        super().__init__(fd, path, LENGTH_BYTES, LENGTH_BYTES + length_bytes, "the header of a shard")
        begins = start[LENGTH_BYTES : LENGTH_BYTES + 1]
        if length_bytes < 2 or length_bytes > MAX_HEADER_BYTES or begins != b"{":
            raise self._no_safetensors(start, size_bytes, length_bytes)
        if self.end > size_bytes:
            raise self.damage(
                "a shard ends in the middle of its header: it is truncated",
                0,
                expected=f"{self.end} bytes at least",
                got=f"{size_bytes} bytes in all",
                remedy="copy it again",
            )

    def usual_entry(self) -> Usual | None:
        """Take the next entry, and the comma behind it, if it has the usual form and others follow it."""
        self._have(_ENTRY_BYTES)
        found = _USUAL.match(self._window, self._at)
        if found is None or found[1] == _METADATA or found[6] == b"}":
            return None
        usual = Usual(self.at, found[1], found[2], found[3], int(found[4]), int(found[5]))
        self._at = found.end()
        return usual

    def _no_safetensors(self, start: bytes, size_bytes: int, length_bytes: int) -> ShardError:
        other = files.other_kind(start, self.path, "a safetensors file")
        if other is not None:
            return other
        got = (
            f"{size_bytes} bytes" if size_bytes <= LENGTH_BYTES else f"a length of {length_bytes}, then {start[8:12]!r}"
        )
        return self.damage(
            "a shard is not a safetensors file",
            0,
            expected=f"the length of a header, up to {MAX_HEADER_BYTES}, and a header that begins with '{{'",
            got=got,
            remedy="copy it again, or give it the ending of its format",
        )


def _start(fd: int, path: str) -> bytes:
    try:
        return os.pread(fd, START_BYTES, 0)
    except OSError as error:
        raise ShardError("a shard cannot be read", got=str(error), where=path) from error
