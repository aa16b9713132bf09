"""Define the inert records of a pickled tree, and its text (`Global`, `Dict`, `Call`).

Beside these records a tree consists of None, bool, int, float, str, bytes, list and tuple. Whatever else is met in one
is a leaf of the format that made the tree, such as a tensor.

Formats put tensors into orders of their own, and stages of a pipeline have some of them each. torch numbers the state
of parameters by their order in the model, so this order must outlast all that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.structure import MAX_NAME_BYTES, MAX_STRING_BYTES, MAX_TENSORS

# Any of the above. What a hostile file makes of it may be its own part, and as deep as it is long.
Value = Any

# What to do about a tree that is too large.
LESS = "load it with torch, and save it without what is so large, or with that as tensors"

# Parts of a value that are searched for tensors lost with it.
_MAX_LOOKED_INTO = 1 << 16


class Global(NamedTuple):
    """The name of a class, a function or a constant; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Dict:
    """A dictionary in the order of its keys, which may be any values: nothing is hashed.

    Attributes:
        flat: keys and values in turn.
    """

    __slots__ = ("flat",)

    def __init__(self, flat: list[Value] | None = None) -> None:
        self.flat: list[Value] = [] if flat is None else flat

    @classmethod
    def of(cls, pairs: Iterable[tuple[Value, Value]]) -> Dict:
        """Return the dictionary of these keys and values."""
        return cls([part for pair in pairs for part in pair])

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        return zip(self.flat[::2], self.flat[1::2])

    def get(self, key: str) -> Value:
        """Return the value of a key that is text; the last of several, None if there is none."""
        return next((value for own, value in zip(self.flat[-2::-2], self.flat[::-2]) if own == key), None)

    def without(self, key: str) -> Dict:
        """Return the dictionary without a key."""
        return Dict.of(pair for pair in self.pairs() if pair[0] != key)

    def with_value(self, key: str, value: Value) -> Dict:
        """Return the dictionary with another value of a key. All keys must be hashable."""
        return Dict.of({**dict(self.pairs()), key: value}.items())


class Call:
    """A pickled object that is not instantiated: callable, arguments, then state, list items and dict items.

    Attributes:
        is_new: the class's `__new__` is meant, not a call of it.
        state: its attributes.
        items: what is appended to it.
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


def entry_of(value: Value, key: str) -> Value:
    """Return the value of a key in a dictionary; None if there is no dictionary, or no such key in it."""
    return value.get(key) if type(value) is Dict else None


def text_pairs(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a dictionary, ordered or not, whose keys are texts; none of anything else."""
    if type(value) is Dict or type(value) is Call:
        yield from ((key, entry) for key, entry in value.pairs() if type(key) is str)


def parts(value: Value) -> Iterable[Value]:
    """Return the direct parts of a value."""
    kind = type(value)
    if kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is Dict:
        return value.flat  # type: ignore[no-any-return]
    if kind is Call:
        return (*value.args, *(value.items or ()), *(value.flat or ()), value.state)
    return ()


class NestTensor(NamedTuple):
    """A tensor in the nest. dtype: the name of the type that it is converted to; empty: it keeps its own."""

    name: str
    dtype: str = ""


def is_nest_tensor(value: Value) -> bool:
    return type(value) is NestTensor


class Unreadable(NamedTuple):
    """A tensor that cannot be one of a shard: why, in words. is_empty: nothing is lost with it."""

    what: str
    is_empty: bool = False


def described(value: Value, is_tensor: Callable[[Value], bool]) -> str:
    """Name a value that is left out, and the number of tensors lost with it."""
    if is_tensor(value):
        return "a lone tensor"
    if type(value) is Unreadable:
        return value.what
    if type(value) is Global:
        return str(value)[:200]
    if type(value) is not Call:
        return "a tensor within an object, or a value of another kind"
    tensors = _tensors_in(value, is_tensor)
    lost = f", with {tensors} tensor{'' if tensors == 1 else 's'} in it" if tensors else ""
    return f"an object of {value.function}"[:200] + lost


def _tensors_in(value: Value, is_tensor: Callable[[Value], bool]) -> int:
    """Return how many different tensors there are in a value, as far as it is looked into."""
    waiting, met = [value], {id(value)}
    tensors = 0
    while waiting and len(met) < _MAX_LOOKED_INTO:
        part = waiting.pop()
        tensors += is_tensor(part)
        for further in parts(part):
            if id(further) not in met:
                met.add(id(further))
                waiting.append(further)
    return tensors


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


# What names of the model's tensors begin with in a whole training: `{"model": {...}, "optimizer": {...}, ...}`.
MODEL = "model."

MAX_CHARACTERS = MAX_STRING_BYTES // 4
# A value that several parts of a tree share is met as often as it is in it.
MAX_VALUES = 1 << 19
# Trees that people save have a dozen levels.
MAX_DEPTH = 100
DOUBLE = struct.Struct(">d")


class NestError(Exception):
    """What keeps a tree from being names and a text, or these from being a tree: what was met, and what to do."""

    def __init__(self, problem: str, got: str = "", remedy: str = "") -> None:
        super().__init__(problem, got, remedy)
        self.problem = problem
        self.got = got
        self.remedy = remedy

    def of_file(self, what: str, where: str) -> ShardError:
        """Return the error for a file that cannot be read for it. what: the file, in words; where: it is."""
        problem = f"{what} cannot be read: {self.problem}"
        return ShardError(problem, got=self.got, where=where, remedy=self.remedy)


# Raised by `parsed` for a text that is no nest.
UNREADABLE = (ValueError, RecursionError, NestError)


def no_constant(text: str) -> NoReturn:
    """Refuse what Python's parser takes for JSON and is none, such as NaN."""
    raise ValueError(f"{text} is no JSON")


def require_short(prefix: str) -> None:
    """Raise NestError if names that begin so would be too long: many such prefixes are kept at a time."""
    if len(prefix) > MAX_NAME_BYTES:
        raise NestError(
            "its keys joined by dots are too long", f"more than {MAX_NAME_BYTES} characters: {prefix[:60]!r}"
        )


def owner_of(name: str, paths: Mapping[str, int]) -> int | None:
    """Return the number of the dictionary with the longest path that a name begins with; None if there is none.

    Args:
        paths: of the dictionaries that take tensors without an entry, each with a dot behind it; that of the root is
            empty.
    """
    dot = name.rfind(".")
    while dot >= 0:
        number = paths.get(name[: dot + 1])
        if number is not None:
            return number
        dot = name.rfind(".", 0, dot)
    return paths.get("")


class Parsed(NamedTuple):
    """The parts of a text. order: names as `coded` has them, not looked at yet; None if the text has no order."""

    root: Any
    order: Sequence[Any] | None

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of the text; names that are not in it come last, in their own order."""
        names = list(names)
        place = places(self.order, frozenset(names))
        return sorted(names, key=lambda name: place.get(name, len(place)))


def parsed(text: str) -> Parsed:
    """Return the parts of a text. Raises ValueError or RecursionError if it is no JSON, NestError for a wrong order."""
    content = json.loads(text, parse_constant=no_constant)
    if type(content) is not dict or content.keys() != {"nest", "order"}:
        return Parsed(content, None)
    if type(content["order"]) is not list:
        raise NestError("the order of a nest is no list", str(content["order"])[:100])
    return Parsed(content["nest"], content["order"])


def is_whole_training(text: str | None) -> bool:
    """Tell whether a nest has a model and an optimizer, each a dictionary of its own."""
    try:
        root = None if text is None else parsed(text).root
    except UNREADABLE:
        return False
    entries = root.get("dict") if type(root) is dict else None
    found = {entry[0] for entry in entries or () if type(entry) is list and len(entry) == 2 and _is_dict(entry[1])}
    return found.issuperset(("model", "optimizer"))


def _is_dict(content: Any) -> bool:
    return type(content) is dict and (content.keys() == {"dict"} or "call" in content)


def written(root: Any, names: Iterable[str] | None) -> str:
    """Return the text of a nest whose tensors have these names, in order; None: their order is not known."""
    content = root if names is None else {"nest": root, "order": coded(names)}
    return json.dumps(content, separators=(",", ":"))


def coded(names: Iterable[str]) -> list[int | str]:
    """Return for each name the number of characters in common with the one before, and the characters that follow."""
    codes: list[int | str] = []
    before = ""
    for name in names:
        shared = _shared(before, name)
        codes += (shared, name[shared:])
        before = name
    return codes


def _shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def decoded(order: Sequence[Any]) -> Iterator[str]:
    """Yield the names of an order. Raises NestError if it is none."""
    name = ""
    if len(order) > 2 * MAX_TENSORS:
        raise NestError("the order of a nest has too many names", f"more than {MAX_TENSORS}")
    for shared, rest in zip(order[::2], order[1::2]):
        if type(shared) is not int or not 0 <= shared <= len(name) or type(rest) is not str:
            raise NestError("the order of a nest has an entry that is no name", str((shared, rest))[:100])
        name = name[:shared] + rest
        if len(name) > MAX_NAME_BYTES:
            raise NestError("the order of a nest has too long a name", repr(name[:60]))
        yield name
    if len(order) % 2:
        raise NestError("the order of a nest has an entry that is no name", str(order[-1])[:100])


def places(order: Sequence[Any] | None, names: frozenset[str]) -> dict[str, int]:
    """Return the places of those names that an order has; none where it is None. Raises NestError for a name twice."""
    place: dict[str, int] = {}
    for name in decoded(order or ()):
        if name in place:
            raise NestError("the order of a nest has a name twice", repr(name)[:100])
        if name in names:
            place[name] = len(place)
    return place


def agree(first: str | None, second: str | None) -> bool:
    """Tell whether two nests are the same; an order that only one of them has counts for nothing."""
    if first is None or second is None or first == second:
        return first == second
    try:
        one, other = parsed(first), parsed(second)
        if written(one.root, None) != written(other.root, None):
            return False
        if one.order is None or other.order is None:
            return True
        ours, theirs = [*decoded(one.order)], [*decoded(other.order)]
    except UNREADABLE:
        return False
    in_both = {*ours}.intersection(theirs)
    return [name for name in ours if name in in_both] == [name for name in theirs if name in in_both]
