"""What a pickled object is made of, as inert records: names of classes, calls that nobody makes, dictionaries.

Beside these records a tree consists of None, bool, int, float, str, bytes, list and tuple. Whatever else is met in one
is a leaf of the format that made the tree, such as a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# Any of the above. What a hostile file makes of it may be its own part, and as deep as it is long.
Value = Any

# What to do about a tree that is too large.
LESS = "load it with torch, and save it without what is so large, or with that as tensors"


class Global(NamedTuple):
    """The name of a class, a function or a constant; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Dict:
    """A dictionary in the order of its keys, which may be any values: nothing is hashed.

    flat: keys and values in turn.
    """

    __slots__ = ("flat",)

    def __init__(self, flat: list[Value] | None = None) -> None:
        self.flat: list[Value] = [] if flat is None else flat

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        return zip(self.flat[::2], self.flat[1::2])

    def get(self, key: str) -> Value:
        """Return the value of a key that is text; the last of several, None if there is none."""
        return next((value for own, value in zip(self.flat[-2::-2], self.flat[::-2]) if own == key), None)


class Call:
    """An object as a pickle describes it: what makes it of which arguments, and what it is then given.

    is_new: the class's `__new__` is meant, not a call of it. state: its attributes. items: what is appended to it.
    flat: keys and values that are set in it, in turn. None where there are none.
    """

    __slots__ = ("args", "flat", "function", "is_new", "items", "state")

    def __init__(self, function: Global, args: tuple[Value, ...], *, is_new: bool = False) -> None:
        self.function = function
        self.args = args
        self.is_new = is_new
        self.state: Value = None
        self.items: list[Value] | None = None
        self.flat: list[Value] | None = None

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        flat = self.flat or []
        return zip(flat[::2], flat[1::2])


def parts(value: Value) -> Iterable[Value]:
    """Return what a value has in it, one level down."""
    kind = type(value)
    if kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is Dict:
        return value.flat  # type: ignore[no-any-return]
    if kind is Call:
        return (*value.args, *(value.items or ()), *(value.flat or ()), value.state)
    return ()


class Unreadable(NamedTuple):
    """A tensor that cannot be one of a shard: why, in words. is_empty: nothing is lost with it."""

    what: str
    is_empty: bool = False


ORDERED_DICT = Global("collections", "OrderedDict")
SET = Global("builtins", "set")
FROZENSET = Global("builtins", "frozenset")
BYTEARRAY = Global("builtins", "bytearray")

# Transformer Engine has its layers' extra state in it.
BYTES_IO = Global("_io", "BytesIO")

_PLAIN_NAMES = {
    BYTES_IO.module: (BYTES_IO.name,),
    "argparse": ("Namespace",),
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set"),
        *("slice", "str", "tuple"),
    ),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "types": ("SimpleNamespace",),
    "uuid": ("UUID",),
}
# Element types of torch are constants of its module.
_TORCH_DTYPES = (
    *("bfloat16", "bool", "complex32", "complex64", "complex128", "float16", "float32", "float64", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "int16"),
    *("int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"),
)
# Making these, of whatever arguments, does nothing but hold data; no others are carried from one file to another.
PLAIN = frozenset(Global(module, name) for module, names in _PLAIN_NAMES.items() for name in names) | frozenset(
    Global("torch", name) for name in _TORCH_DTYPES
)
