"""The JSON at the beginning of a file, read piece by piece through a small window, so memory is bounded.

Accepted is what the reference parser accepts (safetensors 0.8), with exceptions that are refused here: an entry or a
field given twice, fields that are not known.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.safetensors.metadata import METADATA

# The reference's own limit.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
_WINDOW_BYTES = 64 << 10
# The longest item that must not be cut by the end of the window: a character outside of the basic plane, escaped.
_ITEM_BYTES = 12
# An entry of the usual form is no longer, unless its name is.
_ENTRY_BYTES = 8 << 10
_METADATA = METADATA.encode()
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Characters of a string; what is half of a pair of surrogates is none.
_CHARACTERS = re.compile(
    rb'(?:[^"\\\x00-\x1f]++'
    rb'|\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))*+"
)
# A short string in which nothing is escaped.
_PLAIN = re.compile(rb'"([^"\\\x00-\x1f]{0,256}+)"')
_NUMBER = re.compile(rb"(0|[1-9][0-9]{0,19}+)(?![0-9.eE+-])")
_MAX_NUMBER = (1 << 64) - 1
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


class Header:
    """The header of a file, whose bytes are taken one after another. `path` and offsets are named in every error."""

    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        """Find out how long the header is. Raises ShardError if that cannot be."""
        self.path = path
        self._fd = fd
        self._window, self._base, self._at = b"", 0, 0
        start = self._pread(0, LENGTH_BYTES + 1)
        length_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
        self.end = LENGTH_BYTES + length_bytes
        if len(start) <= LENGTH_BYTES or length_bytes < 2 or length_bytes > MAX_HEADER_BYTES or start[8:] != b"{":
            raise self._no_safetensors(size_bytes, length_bytes)
        if self.end > size_bytes:
            raise self.damage(
                "a shard ends in the middle of its header: it is truncated",
                0,
                expected=f"{self.end} bytes at least",
                got=f"{size_bytes} bytes in all",
                remedy="copy it again",
            )
        self._base = self._at = LENGTH_BYTES

    def damage(self, problem: str, at: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error that says `problem` was found at byte `at`."""
        return ShardError(problem, expected=expected, got=got, where=f"{self.path}, byte {at}", remedy=remedy)

    @property
    def at(self) -> int:
        """The byte of the file that is looked at next."""
        return self._base + self._at

    def usual_entry(self) -> Usual | None:
        """Take the next entry, and the comma behind it, if it has the usual form and others follow it."""
        self._have(_ENTRY_BYTES)
        found = _USUAL.match(self._window, self._at)
        if found is None or found[1] == _METADATA or found[6] == b"}":
            return None
        usual = Usual(self.at, found[1], found[2], found[3], int(found[4]), int(found[5]))
        self._at = found.end()
        return usual

    def next_is(self, wanted: bytes) -> bool:
        """Tell whether `wanted`, one byte, comes next, white space apart."""
        self._skip_space()
        return self._window[self._at : self._at + 1] == wanted

    def take(self, wanted: bytes) -> bool:
        """Take `wanted`, one byte, if it comes next, white space apart."""
        if self.next_is(wanted):
            self._at += 1
            return True
        return False

    def require(self, wanted: bytes) -> None:
        """Take `wanted`, one byte. Raises ShardError if something else comes next."""
        if not self.take(wanted):
            raise self.unexpected(repr(wanted.decode()))

    def require_end(self) -> None:
        """Raise ShardError if anything but white space is left."""
        self._skip_space()
        if self.at < self.end:
            raise self.unexpected("the end of the header")

    def unexpected(self, expected: str) -> ShardError:
        """Return the error for what comes next, where something else is expected."""
        got = self._window[self._at : self._at + 20]
        return self.damage("the header of a shard is damaged", self.at, expected=expected, got=repr(got)[1:])

    def text(self, most_bytes: int) -> str | None:
        """Take a string; None if it has more than `most_bytes` bytes as it is written: then it is passed over."""
        self._skip_space()
        plain = _PLAIN.match(self._window, self._at)
        if plain is not None and len(plain[1]) <= most_bytes:
            self._at = plain.end()
            return self._decoded(plain[1])
        self.require(b'"')
        parts: list[bytes] = []
        kept_bytes, decoder = 0, codecs.getincrementaldecoder("utf-8")()
        while True:
            self._have(_ITEM_BYTES)
            start = self._at
            found = _CHARACTERS.match(self._window, start)
            assert found is not None  # it matches nothing, too
            part = found[0]
            self._check(decoder, part)
            kept_bytes += len(part)
            if kept_bytes <= most_bytes:
                parts.append(part)
            self._at = found.end()
            if self._at < len(self._window) and self._window[self._at] == ord('"'):
                self._check(decoder, b"", final=True)
                self._at += 1
                break
            if self._at == start:
                raise self.unexpected("the characters of a string, or its end")
        if kept_bytes > most_bytes:
            return None
        content = b"".join(parts)
        text: str = json.loads(b'"%b"' % content) if b"\\" in content else content.decode()
        return text

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._no_utf8(error) from None

    def number(self) -> int:
        """Take a whole number of 64 bits at most, without sign."""
        self._skip_space()
        self._have(32)
        found = _NUMBER.match(self._window, self._at)
        if found is None or int(found[1]) > _MAX_NUMBER:
            raise self.unexpected("a whole number, 0 or more, of 64 bits")
        self._at = found.end()
        return int(found[1])

    def numbers(self, most: int) -> tuple[int, ...]:
        """Take an array of so many whole numbers at the most."""
        self.require(b"[")
        found: list[int] = []
        if self.take(b"]"):
            return ()
        while True:
            if len(found) == most:
                raise self.damage("an array in a shard's header is too long", self.at, expected=f"{most} at most")
            found.append(self.number())
            if self.take(b"]"):
                return tuple(found)
            self.require(b",")

    def _check(self, decoder: codecs.IncrementalDecoder, part: bytes, *, final: bool = False) -> None:
        try:
            decoder.decode(part, final)
        except UnicodeDecodeError as error:
            raise self._no_utf8(error) from None

    def _no_utf8(self, error: UnicodeDecodeError) -> ShardError:
        return self.damage("the header of a shard is not UTF-8", self.at, got=str(error))

    def _skip_space(self) -> None:
        while True:
            found = _SPACE.match(self._window, self._at)
            assert found is not None  # it matches nothing, too
            self._at = found.end()
            if self._at < len(self._window) or self.at >= self.end:
                return
            self._refill()

    def _have(self, length_bytes: int) -> None:
        if len(self._window) - self._at < length_bytes:
            self._refill()

    def _refill(self) -> None:
        """Have as much of the header in the window from here on as goes into it."""
        at = self.at
        wanted_bytes = min(_WINDOW_BYTES, self.end - at)
        if len(self._window) - self._at < wanted_bytes:
            self._window, self._base, self._at = self._pread(at, wanted_bytes), at, 0
            if len(self._window) < wanted_bytes:
                raise self.damage("a shard became shorter while it was read", at)

    def _pread(self, at: int, length_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, length_bytes, at)
        except OSError as error:
            raise self.damage("a shard cannot be read", at, got=str(error)) from error

    def _no_safetensors(self, size_bytes: int, length_bytes: int) -> ShardError:
        start = self._pread(0, 64)
        for mark, what, remedy in _OTHERS:
            if start.startswith(mark):
                return self.damage(f"a shard is {what}", 0, expected="a safetensors file", remedy=remedy)
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


# What other files begin with that are met under this name.
_OTHERS = (
    (
        b"version https://git-lfs",
        "a pointer of Git LFS in the place of the file",
        "fetch the file itself: git lfs pull",
    ),
    (b"PK\x03\x04", "a zip archive, such as torch.save makes", "give it the ending .pt"),
    (b"\x80\x02", "a pickle, such as torch.save made", "give it the ending .pt"),
    (b"<!DOCTYPE", "a web page", "download it again"),
    (b"<html", "a web page", "download it again"),
)
