"""What a file of torch's distributed checkpoint says of its tensors: at which element of the whole one each begins.

    {NAME: {"saved_offsets": [4, 0]}, ...}

It is a text in the metadata of the file, so it is JSON in a string of JSON.
"""

from __future__ import annotations

import re

from reshard_mpi.formats import files
from reshard_mpi.formats.safetensors.json_text import JsonText

_FIELD = "saved_offsets"
_MAX_FIELD_BYTES = 64
# As many bytes as a character can be written with, for each byte of a name.
_ESCAPED = 6
_NUMBER = rb"(?:0|[1-9][0-9]{0,17}+)"
# An entry as nearly all are written, and what follows it.
_USUAL = re.compile(
    rb' ?"([^"\\\x00-\x1f]++)": ?\{"%b": ?\[((?:%b(?:, ?%b){0,%d}+)?)\]\}(,|\}\Z)'
    % (_FIELD.encode(), _NUMBER, _NUMBER, files.MAX_DIMENSIONS - 1)
)


def saved_offsets(text: str, path: str) -> dict[str, tuple[int, ...]]:
    """Return where each tensor begins in the whole one. path: of the file. Raises ShardError if the text is damaged."""
    content = text.encode()
    return _usual(content) or _whatever(content, path)


def _usual(content: bytes) -> dict[str, tuple[int, ...]] | None:
    """Return the offsets if all entries are written as nearly all are; None if one is not, or a name is there twice."""
    offsets: dict[str, tuple[int, ...]] = {}
    alike: dict[bytes, tuple[int, ...]] = {}
    at, end = 1, b","
    while end == b",":
        entry = _USUAL.match(content, at)
        if entry is None or not content.startswith(b"{"):
            return None
        name, numbers = entry[1].decode(), entry[2]
        if name in offsets or len(entry[1]) > files.MAX_NAME_BYTES:
            return None
        if numbers not in alike:
            alike[numbers] = tuple(map(int, numbers.split(b","))) if numbers else ()
        offsets[name] = alike[numbers]
        at, end = entry.end(), entry[3]
    return offsets


def _whatever(content: bytes, path: str) -> dict[str, tuple[int, ...]]:
    """Return the offsets of a text that is written in any way that JSON allows."""
    text = _Text(content, path)
    offsets: dict[str, tuple[int, ...]] = {}
    for at, name in text.members(_ESCAPED * files.MAX_NAME_BYTES):
        if not name or name in offsets:
            problem = f"a file says twice where {name!r} lies" if name else "a tensor's name is too long, or empty"
            raise text.damage(problem, at, expected=f"each tensor once, by 1 to {files.MAX_NAME_BYTES} bytes")
        found: tuple[int, ...] | None = None
        for field_at, field in text.members(_MAX_FIELD_BYTES):
            if field != _FIELD or found is not None:
                raise text.damage(
                    f"a file says of {name!r} what is not known, or twice the same",
                    field_at,
                    expected=f"{_FIELD} alone",
                    got=repr(field),
                )
            found = text.numbers(files.MAX_DIMENSIONS)
        if found is None:
            raise text.damage(f"a file does not say where {name!r} lies", at, expected=_FIELD)
        offsets[name] = found
    text.require_end()
    return offsets


class _Text(JsonText):
    """JSON that is in the memory. Bytes in errors are counted from its beginning."""

    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(-1, path, 0, len(content), "what a file says of its pieces")
        self._content = content

    def _pread(self, at: int, length_bytes: int) -> bytes:
        return self._content[at : at + length_bytes]
