"""Read a long JSON text part by part, in bounded memory (`JsonReader`).

Each part is read by `json`; only the braces, brackets, colons and commas between parts are looked for here. The objects
that `json` makes of a whole header would take several times as much memory as what is kept of it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterator

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure

# An object is a tuple of its keys and values, since a key may be there twice; an array is a list.
Json = str | int | float | bool | None | list["Json"] | tuple[tuple[str, "Json"], ...]

# As much of the text is looked at, if no value is longer.
_WINDOW_BYTES = 64 << 10
# The text of a value; its objects take at most 22 times as much memory, as empty arrays do.
_MAX_VALUE_BYTES = 1 << 20
# A value may go on behind the window if fewer characters than these follow it there: `12` of `12e3`.
_MARGIN = 32
_MARGIN_BYTES = 4 * _MARGIN
_MAX_WHOLE = (1 << 64) - 1
_MAX_SHOWN = 60
_SPACE = re.compile(r"[ \t\n\r]*+")
_CHARACTERS = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is no number of JSON")


def _signed(digits: str) -> int | float:
    """Return a whole number; -0 is none, but the number -0.0."""
    return -0.0 if digits == "-0" else int(digits)


_decode = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_refuse_constant).raw_decode
# This one takes longer.
_decode_signed = json.JSONDecoder(
    object_pairs_hook=tuple, parse_constant=_refuse_constant, parse_int=_signed
).raw_decode


class JsonReader:
    """Reads the JSON between two bytes of a file.

    Whoever iterates over members or items takes each value before asking for the next.

    Attributes:
        called: what errors call the text, beside its path.
        end: the byte behind it.
    """

    def __init__(self, read: Callable[[int, int], bytes], path: str, start: int, end: int, called: str) -> None:
        """Begin at byte `start`. read: returns bytes from an offset on, and how many."""
        self.path = path
        self.called = called
        self._read = read
        self.end = end
        # The characters from byte `_window_start` up to `_window_end` of the file, and the next one among them.
        self._window, self._at = "", 0
        self._window_start = self._window_end = start
        self._load(_WINDOW_BYTES)
        self._skip_space()

    @property
    def at_object(self) -> bool:
        """Whether an object comes next."""
        return self._window.startswith("{", self._at)

    def members(self) -> Iterator[str]:
        """Take an object, and yield its keys."""
        for _ in self._parts("{", "}"):
            if not self._window.startswith('"', self._at):
                raise self.unexpected("a name")
            key = self.value()
            assert isinstance(key, str)
            self._take(":")
            yield key

    def matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield matches of a pattern, one behind the other from the next character on; going on takes each."""
        while found := pattern.match(self._window, self._at):
            yield found
            self._at = found.end()

    def items(self) -> Iterator[None]:
        """Take an array; each value is the next to be taken when this yields."""
        return self._parts("[", "]")

    def _parts(self, begin: str, end: str) -> Iterator[None]:
        """Take what stands between two marks: parts with commas between them, each to be taken when this yields."""
        self._take(begin)
        if self._window.startswith(end, self._at):
            self._take(end)
            return
        mark = ","
        while mark == ",":
            yield
            mark = self._take(f",{end}")

    def text(self, most_bytes: int) -> str | None:
        """Take a string; None if it has more than about as many bytes: then it is passed over."""
        if not self._window.startswith('"', self._at):
            raise self.unexpected("a text")
        decoded = self._decoded() or self._decoded_further(most_bytes)
        if decoded is None:
            self._pass_over_text()
            return None
        text, self._at = decoded
        self._skip_space()
        assert isinstance(text, str)
        return text

    def value(self, most_bytes: int = _MAX_VALUE_BYTES) -> Json:
        """Take a value with all that is in it. Raises ShardError if it has more than about as many bytes."""
        decoded = self._decoded() or self._decoded_further(most_bytes)
        if decoded is None:
            raise self.damage(f"a value in {self.called} is too long", expected=f"{most_bytes} bytes at most")
        value, self._at = decoded
        self._skip_space()
        return value

    def require_end(self) -> None:
        """Raise ShardError if anything is left."""
        if self._at < len(self._window):
            raise self.unexpected("nothing more")

    def unexpected(self, expected: str, problem: str = "") -> ShardError:
        """Return the error for what comes next, where something else is expected. problem: with it, if that is known"""
        got = repr(self._window[self._at : self._at + _MAX_SHOWN])
        return self.damage(f"{self.called} is damaged", expected=expected, got=f"{got} ({problem})" if problem else got)

    def damage(self, problem: str, *, expected: str = "", got: str = "", remedy: str = "") -> ShardError:
        """Return the error for what was just read, with the byte up to which the text has been read."""
        where = f"{self.path}, byte {self._window_start + len(self._window[: self._at].encode())}"
        return ShardError(problem, expected=expected, got=got, where=where, remedy=remedy)

    def require_new(self, name: str, known: Container[str], problem: str) -> None:
        """Raise ShardError if a tensor's name is known already, which is the problem, or has an impossible length."""
        if not 0 < len(name.encode()) <= structure.MAX_NAME_BYTES or name in known:
            expected = f"each tensor once, by 1 to {structure.MAX_NAME_BYTES} bytes"
            raise self.damage(f"{problem}, or the name is too long, or empty", expected=expected)

    def _decoded(self) -> tuple[Json, int] | None:
        """Return the value that comes next, and the index behind it; None if it may go on behind the window."""
        window, is_all = self._window, self._window_end == self.end
        try:
            value, end = _decode(window, self._at)
            if window.find("-0", self._at, end) >= 0 or window.find("\\u", self._at, end) >= 0:
                value, end = _decode_signed(window, self._at)
                json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates cannot be
        except json.JSONDecodeError as error:
            # A string that goes on behind the window ends with an error at its beginning.
            is_cut = error.pos + _MARGIN > len(window) or window[error.pos] == '"'
            if is_all or not is_cut:
                raise self.unexpected("a value", error.msg) from None
            return None
        except RecursionError:
            raise self.damage(f"{self.called} is nested too deeply") from None
        except ValueError as error:  # NaN, a number of very many digits, or half of a pair of surrogates
            raise self.unexpected("a value", str(error)) from None
        return (value, end) if is_all or end + _MARGIN <= len(window) else None

    def _decoded_further(self, most_bytes: int) -> tuple[Json, int] | None:
        """Return what `_decoded` returns, with as large a window as it takes; None if the value is too long."""
        window_bytes, last_bytes = 0, most_bytes + _MARGIN_BYTES
        while window_bytes < last_bytes:
            window_bytes = min(max(2 * window_bytes, _WINDOW_BYTES), last_bytes)
            self._load(window_bytes)
            decoded = self._decoded()
            if decoded is not None:
                value, self._at = decoded
                self._load(_WINDOW_BYTES)
                return value, self._at
        return None

    def _pass_over_text(self) -> None:
        """Pass over a string of any length, and keep nothing of it."""
        self._at += 1
        while True:
            match = _CHARACTERS.match(self._window, self._at)
            assert match is not None  # it matches nothing, too
            self._at = match.end()
            if self._window.startswith('"', self._at):
                break
            if self._window_end == self.end:
                raise self.unexpected("the rest of a text")
            self._load(_WINDOW_BYTES)
        self._at += 1
        self._skip_space()

    def _take(self, marks: str) -> str:
        """Take one of these characters, and the white space behind it."""
        mark = self._window[self._at : self._at + 1]
        if not mark or mark not in marks:
            raise self.unexpected(" or ".join(map(repr, marks)))
        self._at += 1
        self._skip_space()
        return mark

    def _skip_space(self) -> None:
        """Pass over white space, so that the next character is in the window, if any is left."""
        while self._window[self._at : self._at + 1] <= " ":  # nothing is left in the window, or white space
            match = _SPACE.match(self._window, self._at)
            assert match is not None  # it matches nothing, too
            self._at = match.end()
            if self._at < len(self._window) or self._window_end == self.end:
                return
            self._load(_WINDOW_BYTES)

    def _load(self, window_bytes: int) -> None:
        """Have as much of the text in the window, from the next character on."""
        start = self._window_start + len(self._window[: self._at].encode())
        length_bytes = min(window_bytes, self.end - start)
        self._window, self._at, self._window_start = "", 0, start
        content = self._read(start, length_bytes)
        try:
            self._window, used_bytes = codecs.utf_8_decode(content, "strict", start + length_bytes == self.end)
        except UnicodeDecodeError as error:
            raise self.damage(f"{self.called} is not UTF-8", got=str(error)) from None
        self._window_end = start + used_bytes


def as_object(value: Json) -> dict[str, Json] | None:
    """Return an object; None if a value is none, or has a key twice."""
    if not isinstance(value, tuple):
        return None
    by_key = dict(value)
    return by_key if len(by_key) == len(value) else None


def as_numbers(value: Json) -> tuple[int, ...] | None:
    """Return an array with a whole number, 0 or more, of 64 bits for each dimension; None if a value is none."""
    if type(value) is not list or len(value) > structure.MAX_DIMENSIONS:
        return None
    numbers = [number for number in value if type(number) is int and 0 <= number <= _MAX_WHOLE]
    return tuple(numbers) if len(numbers) == len(value) else None


def shown(value: Json) -> str:
    """Return the beginning of a value, for an error."""
    try:
        return repr(value)[:_MAX_SHOWN]
    except RecursionError:  # what could just be read may be nested too deeply to be written
        return "something nested very deeply"
