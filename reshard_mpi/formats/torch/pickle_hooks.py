"""Define hooks that build objects from a pickle (`PickleHooks`), and which names run code (`runs_code`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.nest.nodes import BYTES_IO, Global, Value


class PickleError(Exception):
    """An error in a pickle, its byte offset, and a remedy if there is one."""

    def __init__(self, problem: str, offset: int, got: str = "", remedy: str = "") -> None:
        super().__init__(problem, offset, got, remedy)
        self.problem = problem
        self.at = offset
        self.got = got
        self.remedy = remedy

    def of_shard(self, path: str, within: str = "") -> ShardError:
        """Return the error for the shard at `path`. within: in which member of it, in words."""
        problem, where = f"a shard cannot be read: {self.problem}", f"{path}, byte {self.at}{within}"
        return ShardError(problem, got=self.got, where=where, remedy=self.remedy)


class PickleCutShortError(PickleError):
    """A pickle goes on behind the end of the data."""

    def __init__(self, offset: int) -> None:
        super().__init__("a pickle ends before it is complete", offset)


class ReadObjects(NamedTuple):
    """Result of a bulk reader: values for the stack, the offset behind their bytes, memo entries."""

    values: Sequence[Value]
    end: int
    memoized: Sequence[Value]
    cost_bytes: int  # what they take of memory besides the opcode that made the first


# Is given a pickle, the byte behind the opcode that makes an object without arguments, and the memo. Reads the object,
# and others that follow; None if they are not written as it knows them.
ObjectReader = Callable[[bytes, int, Sequence[Value]], ReadObjects | None]


class PickleHooks(NamedTuple):
    """Hooks by which a caller builds its own objects while a pickle is read, and the errors it raises.

    Attributes:
        persistent: makes a value of what a persistent id is.
        calls: by the name of what is called, a function that makes a value of its arguments; other calls become a
            `Call`. Both raise ValueError for what they do not know.
        objects: by the name of a class of which there are very many objects, what reads one with its attributes at
            once.
    """

    persistent: Callable[[Value], Value]
    calls: Mapping[Global, Callable[..., Value]]
    objects: Mapping[Global, ObjectReader] = {}


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
PLAIN_CALLS: Mapping[Global, Callable[..., Value]] = {CODECS_ENCODE: decoded_bytes, BYTES: lambda: b""}
PLAIN_HOOKS = PickleHooks(no_persistent_ids, PLAIN_CALLS)


# Modules that serve to run something: a checkpoint that names one of them is none. What they would have done is not
# asked. The names of `builtins` that only hold data are no part of it.
_RUNNERS = frozenset(
    (
        *("_aix_support", "_imp", "_io", "_osx_support", "_pickle", "_posixsubprocess", "_pyrepl", "_thread"),
        *("asyncio", "bdb", "cProfile", "cPickle", "code", "codeop", "commands", "concurrent", "ctypes", "_ctypes"),
        *("cloudpickle", "dill", "distutils", "doctest", "ensurepip", "http", "idlelib", "imp", "importlib", "io"),
        *("joblib", "lib2to3", "linecache", "marshal", "multiprocessing", "nt", "ntpath", "os", "pdb", "pickle"),
        *("pickletools", "pip", "pkgutil", "popen2", "posix", "posixpath", "profile", "pty", "py_compile", "pydoc"),
        *("requests", "runpy", "setuptools", "shelve", "shutil", "signal", "site", "smtplib", "socket", "ssl"),
        *("subprocess", "sys", "tempfile", "test", "threading", "timeit", "trace", "unittest", "urllib", "venv"),
        *("webbrowser", "winreg", "xmlrpc", "zipimport"),
    )
)
_DATA_OF_BUILTINS = frozenset(
    (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"),
        *("set", "slice", "str", "tuple", "Ellipsis", "NotImplemented"),
    )
)
# Protocols below 3 spell some names as Python 2 did.
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
OLD_NAMES = {
    Global("__builtin__", "xrange"): Global("builtins", "range"),
    Global("__builtin__", "unicode"): Global("builtins", "str"),
    Global("__builtin__", "long"): Global("builtins", "int"),
}


# Python 3.11.0 to 3.11.3 pickles a member of an enumeration as `getattr(CLASS, NAME)`, and torch's metadata has some.
GETATTR = Global("builtins", "getattr")


def is_enum_member(args: tuple[Value, ...]) -> bool:
    """Tell whether `GETATTR` with these arguments gets a member of an enumeration: a class, and a name."""
    return len(args) == 2 and type(args[0]) is Global and type(args[1]) is str


def runs_code(name: Global) -> bool:
    """Tell whether a name belongs to code that can run something, however it is called."""
    if name == GETATTR:
        return False
    if name.module == "builtins":
        return name.name not in _DATA_OF_BUILTINS
    return name != BYTES_IO and name.module.partition(".")[0] in _RUNNERS
