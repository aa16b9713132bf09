"""Parse JSON through a small window, in bounded memory (`JsonText`)."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator

from reshard_mpi.errors import ShardError

_WINDOW_BYTES = 64 << 10
# The longest item that must not be cut by the end of the window: a character outside of the basic plane, escaped.
_ITEM_BYTES = 12
# The longest number.
_NUMBER_BYTES = 64
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Characters of a string; what is half of a pair of surrogates is none.
_CHARACTERS = re.compile(
    rb'(?:[^"\\\x00-\x1f]++'
    rb'|\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))*+"
)
# A short string in which nothing is escaped.
_PLAIN = re.compile(rb'"([^"\\\x00-\x1f]{0,256}+)"')
_WHOLE = re.compile(rb"(0|[1-9][0-9]{0,19}+)(?![0-9.eE+-])")
_MAX_WHOLE = (1 << 64) - 1
_OTHER = re.compile(
    rb"-?(?:0|[1-9][0-9]{0,30}+)(?:\.[0-9]{1,20}+)?(?:[eE][+-]?[0-9]{1,4}+)?(?![0-9.eE+-])|true|false|null"
)
# An array of plain values, such as a list of ranks: passed over at once where it lies in the window.
_ARRAY = re.compile(
    rb"\[ (?:VALUE(?: , VALUE)*+ )?\]".replace(b" ", _SPACE.pattern).replace(b"VALUE", b"(?:%b)" % _OTHER.pattern)
)
_MAX_DEPTH = 32


class JsonText:
    """The JSON between two bytes of a file, taken item by item. `path` and offsets are named in every error.

    Attributes:
        called: what errors call it.
    """

    def __init__(self, fd: int, path: str, start: int, end: int, called: str) -> None:
        self.path = path
        self.end = end
        self._fd = fd
        self._called = called
        self._window, self._base, self._at = b"", start, 0

    def damage(self, problem: str, offset: int, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error that says `problem` was found at byte `offset`."""
        return ShardError(problem, expected=expected, got=got, where=f"{self.path}, byte {offset}", remedy=remedy)

    @property
    def at(self) -> int:
        """The byte of the file that is looked at next."""
        return self._base + self._at

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
            raise self.unexpected("nothing more")

    def unexpected(self, expected: str) -> ShardError:
        """Return the error for what comes next, where something else is expected."""
        got = self._window[self._at : self._at + 20]
        return self.damage(f"{self._called} is damaged", self.at, expected=expected, got=repr(got)[1:])

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
            match = _CHARACTERS.match(self._window, start)
            assert match is not None  # it matches nothing, too
            part = match[0]
            self._check(decoder, part)
            kept_bytes += len(part)
            if kept_bytes <= most_bytes:
                parts.append(part)
            self._at = match.end()
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

    def usual(self, pattern: re.Pattern[bytes], most_bytes: int) -> re.Match[bytes] | None:
        """Take the text that the pattern matches here, white space apart, up to `most_bytes`.

        It is for what nearly all files have in the same form; a pattern must match nothing that is not JSON.
        """
        self._skip_space()
        self._have(most_bytes)
        match = pattern.match(self._window, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def members(self, most_bytes: int) -> Iterator[tuple[int, str | None]]:
        """Take an object: yield the byte and the text of each key, None if that is longer than `most_bytes`.

        Whoever iterates takes the value of a key before asking for the next.
        """
        self.require(b"{")
        if self.take(b"}"):
            return
        while True:
            self.next_is(b'"')
            offset = self.at
            key = self.text(most_bytes)
            self.require(b":")
            yield offset, key
            if self.take(b"}"):
                return
            self.require(b",")

    def items(self) -> Iterator[int]:
        """Take an array: yield the byte of each value, which whoever iterates takes before asking for the next."""
        self.require(b"[")
        if self.take(b"]"):
            return
        while True:
            yield self.at
            if self.take(b"]"):
                return
            self.require(b",")

    def pass_over(self) -> None:
        """Take a value of whatever kind, and keep nothing of it."""
        closing: list[bytes] = []
        while True:
            if self.next_is(b"[") and self.usual(_ARRAY, _WINDOW_BYTES // 4) is not None:
                if not self._after_value(closing):
                    return
                continue
            opened = next((pair for pair in (b"{}", b"[]") if self.take(pair[:1])), None)
            if opened is not None:
                if len(closing) == _MAX_DEPTH:
                    raise self.damage(f"{self._called} is nested too deeply", self.at, expected=f"{_MAX_DEPTH} levels")
                closing.append(opened[1:])
                if not self.next_is(closing[-1]):
                    self._take_key(closing[-1])
                    continue
            elif self.next_is(b'"'):
                self.text(0)
            else:
                self._have(_NUMBER_BYTES)
                match = _OTHER.match(self._window, self._at)
                if match is None:
                    raise self.unexpected("a value")
                self._at = match.end()
            if not self._after_value(closing):
                return

    def _after_value(self, closing: list[bytes]) -> bool:
        """Pass over the text after a value; tell whether another value follows. closing: the open bracket."""
        while closing and self.take(closing[-1]):
            closing.pop()
        if closing:
            self.require(b",")
            self._take_key(closing[-1])
        return bool(closing)

    def _take_key(self, closing: bytes) -> None:
        if closing == b"}":
            self.text(0)
            self.require(b":")

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._no_utf8(error) from None

    def number(self) -> int:
        """Take a whole number of 64 bits at most, without sign."""
        self._skip_space()
        self._have(_NUMBER_BYTES)
        match = _WHOLE.match(self._window, self._at)
        if match is None or int(match[1]) > _MAX_WHOLE:
            raise self.unexpected("a whole number, 0 or more, of 64 bits")
        self._at = match.end()
        return int(match[1])

    def numbers(self, most: int) -> tuple[int, ...]:
        """Take an array of whole numbers, with a maximum length."""
        read: list[int] = []
        for _ in self.items():
            if len(read) == most:
                raise self.damage("an array is too long", self.at, expected=f"{most} at most")
            read.append(self.number())
        return tuple(read)

    def _check(self, decoder: codecs.IncrementalDecoder, part: bytes, *, final: bool = False) -> None:
        try:
            decoder.decode(part, final)
        except UnicodeDecodeError as error:
            raise self._no_utf8(error) from None

    def _no_utf8(self, error: UnicodeDecodeError) -> ShardError:
        return self.damage(f"{self._called} is not UTF-8", self.at, got=str(error))

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._window, self._at)
            assert match is not None  # it matches nothing, too
            self._at = match.end()
            if self._at < len(self._window) or self.at >= self.end:
                return
            self._refill()

    def _have(self, length_bytes: int) -> None:
        if len(self._window) - self._at < length_bytes:
            self._refill()

    def _refill(self) -> None:
        """Have as much of the text in the window from here on as goes into it."""
        offset = self.at
        wanted_bytes = min(_WINDOW_BYTES, self.end - offset)
        if len(self._window) - self._at < wanted_bytes:
            self._window, self._base, self._at = self._pread(offset, wanted_bytes), offset, 0
            if len(self._window) < wanted_bytes:
                raise self.damage(f"{self._called} became shorter while it was read", offset)

    def _pread(self, offset: int, length_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, length_bytes, offset)
        except OSError as error:
            raise self.damage(f"{self._called} cannot be read", offset, got=str(error)) from error
