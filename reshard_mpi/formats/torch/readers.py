"""What reads a pickle, beside the opcodes: what a caller makes of what it names, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.nest.trees import Global, Value


class PickleError(Exception):
    """What is wrong with a pickle, at which byte, and what to do if there is something."""

    def __init__(self, problem: str, at: int, got: str = "", remedy: str = "") -> None:
        super().__init__(problem, at, got, remedy)
        self.problem = problem
        self.at = at
        self.got = got
        self.remedy = remedy

    def of_shard(self, path: str, within: str = "") -> ShardError:
        """Return the error for the shard at `path`. within: in which member of it, in words."""
        problem, where = f"a shard cannot be read: {self.problem}", f"{path}, byte {self.at}{within}"
        return ShardError(problem, got=self.got, where=where, remedy=self.remedy)


class CutShortError(PickleError):
    """A pickle goes on behind the end of the data."""

    def __init__(self, at: int) -> None:
        super().__init__("a pickle ends before it is complete", at)


class ReadObjects(NamedTuple):
    """Objects that were read at once: what they become, where their bytes end, and what they put into the memo.

    cost_bytes: what they take of memory besides the opcode that made the first.
    """

    values: Sequence[Value]
    end: int
    memoized: Sequence[Value]
    cost_bytes: int


# Is given a pickle, the byte behind the opcode that makes an object without arguments, or that begins the arguments of
# a call, and the memo. Reads them, and objects that follow; None if they are not written as it knows them.
ObjectReader = Callable[[bytes, int, Sequence[Value]], ReadObjects | None]
NO_OBJECTS: Mapping[Global, ObjectReader] = {}


class Readers:
    """What a caller makes of some things that a pickle names, while it is read.

    persistent: makes a value of what a persistent id is. calls: by the name of what is called, a function that makes a
    value of its arguments; other calls become a `Call`. Both raise ValueError for what they do not know.
    objects: by the name of a class of which there are very many objects, what reads one with its attributes at once.
    rows: by the name of what is called very many times, what reads the arguments of a call, and further calls, at once.
    """

    __slots__ = ("calls", "objects", "persistent", "rows")

    def __init__(
        self,
        persistent: Callable[[Value], Value],
        calls: Mapping[Global, Callable[..., Value]],
        objects: Mapping[Global, ObjectReader] = NO_OBJECTS,
        rows: Mapping[Global, ObjectReader] = NO_OBJECTS,
    ) -> None:
        self.persistent = persistent
        self.calls = calls
        self.objects = objects
        self.rows = rows


def no_persistent_ids(_: Value) -> Value:
    """Refuse every persistent id: in a pickle that has none."""
    raise ValueError("a persistent id")


def decoded_bytes(text: Value, encoding: Value) -> bytes:
    """Return the bytes that protocol 2 writes as a call of `_codecs.encode`."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding than latin-1")
    return text.encode("latin-1")


CODECS_ENCODE = Global("_codecs", "encode")
BYTES = Global("builtins", "bytes")
PLAIN_CALLS: Mapping[Global, Callable[..., Value]] = {
    CODECS_ENCODE: decoded_bytes,
    BYTES: lambda: b"",
}
PLAIN_READERS = Readers(no_persistent_ids, PLAIN_CALLS)
