"""Flatten a tree of objects to names, strings and one text (`flatten`)."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import (
    DOUBLE,
    LESS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    PLAIN,
    Call,
    Dict,
    Global,
    NestError,
    Unreadable,
    Value,
    coded,
    described,
    owner_of,
    parts,
    require_short,
)
from reshard_mpi.formats.structure import MAX_NAME_BYTES, MAX_TENSORS

# What is left out is named, but not without end.
_MAX_NOTES, _MAX_NOTED_CHARACTERS = 64, 300
_MAX_SHOWN = 3
_OTHER_KEYS = "load it with torch, and save it with other keys"
# A list of more single values than this is left out. Shorter ones are, too, where all of them together would be too
# large.
_MOST_ITEMS = (1 << 18, 1 << 14, 1 << 10)
# This number of characters counts as one item.
_CHARACTERS_OF_ITEM = 8
# The nest of a dictionary of tensors, from which something else may have been left out.
_NAMES_ALONE = '{"dict":[]}'


class Flattened(NamedTuple):
    """A tree as names: its tensors in order, the shard's strings, and words on omissions."""

    tensors: list[tuple[str, Value]]
    strings: dict[str, str]
    left_out: tuple[str, ...]


def flatten(root: Value, is_tensor: Callable[[Value], bool], *, has_order: bool = True) -> Flattened:
    """Return a tree as names. Raises NestError if it cannot be.

    Args:
        is_tensor: tells which leaves are tensors.
        has_order: the order of keys is that of whoever made the tree.
    """
    if type(root) is Dict and _is_flat(root, is_tensor):
        flat = [(key, value) for key, value in root.pairs() if is_tensor(value)]
        _require_names(flat)
        strings = {key: value for key, value in root.pairs() if type(value) is str}
        _require_short(strings)
        return Flattened(flat, strings, ())
    if not (type(root) in (Dict, list, tuple) or (type(root) is Call and root.function in PLAIN)):
        raise NestError(
            "it holds no dictionary",
            described(root, is_tensor),
            "load it with torch and save its state_dict(), or leave the file out with --select",
        )
    flattened = _written(root, is_tensor)
    if flattened.unreadable:
        raise NestError(
            "it holds tensors that cannot be read",
            "; ".join(flattened.unreadable[:_MAX_SHOWN]) + (" ..." if len(flattened.unreadable) > _MAX_SHOWN else ""),
            "load it with torch, make them dense and of a usual type, and save it again",
        )
    _require_names(flattened.tensors)
    text, left_out = "".join(flattened.parts), tuple(flattened.left_out)
    if text == _NAMES_ALONE:
        return Flattened(flattened.tensors, {}, left_out)
    if has_order and flattened.tensors:
        order = json.dumps(coded(name for name, _ in flattened.tensors), separators=(",", ":"))
        in_order = f'{{"nest":{text},"order":{order}}}'
        if len(in_order) <= MAX_CHARACTERS:
            text = in_order
        else:
            left_out += (f"the order of its keys: it would take more than {MAX_CHARACTERS} characters with it",)
    return Flattened(flattened.tensors, {NEST: text}, left_out)


def _written(root: Value, is_tensor: Callable[[Value], bool]) -> _Flattening:
    """Return the tree as it is written, without long lists if it would be too large with them. Raises NestError."""
    listed: set[str] = set()
    for most_items, fewer in zip(_MOST_ITEMS, (*_MOST_ITEMS[1:], math.inf)):
        while True:
            flattened = _Flattening(is_tensor, listed, most_items)
            try:
                flattened.write(root, "", 0)
            except _TooLargeError:
                if flattened.longest <= fewer:
                    raise
                break
            misplaced = flattened.misplaced()
            if not misplaced:
                return flattened
            listed |= misplaced
    raise AssertionError("the last attempt returns or raises")


class _TooLargeError(NestError):
    """A tree has too many values, or too long ones."""

    def __init__(self, problem: str, got: str) -> None:
        super().__init__(problem, got, LESS)


def _is_flat(root: Dict, is_tensor: Callable[[Value], bool]) -> bool:
    """Tell whether a tree is a dictionary of tensors followed by texts, each under a name of its own."""
    names: set[str] = set()
    has_text = False
    for key, value in root.pairs():
        is_text = type(value) is str
        if type(key) is not str or key in names or key == NEST or not (is_text or is_tensor(value)):
            return False
        if has_text and not is_text:
            return False
        has_text = is_text
        names.add(key)
    return True


def _require_short(strings: dict[str, str]) -> None:
    if len(strings) > MAX_TENSORS or sum(map(len, (*strings, *strings.values()))) > MAX_CHARACTERS:
        raise _TooLargeError("its texts are too long, or too many", f"more than {MAX_CHARACTERS} characters")
    for text in (*strings, *strings.values()):
        _require_text(text)


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NestError("a name or text is no Unicode text", repr(text[:60]), _OTHER_KEYS) from None


def _require_names(tensors: list[tuple[str, Value]]) -> None:
    if len(tensors) > MAX_TENSORS:
        raise NestError("it holds too many tensors", f"{len(tensors)}, more than {MAX_TENSORS}")
    names: set[str] = set()
    for name, _ in tensors:
        _require_text(name)
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            problem = f"a tensor's name does not have 1 to {MAX_NAME_BYTES} bytes"
            raise NestError(problem, repr(name[:60]), _OTHER_KEYS)
        if name in names:
            problem = "two tensors have the same name, their keys joined by dots"
            raise NestError(problem, repr(name), _OTHER_KEYS)
        names.add(name)


class _Flattening:
    """A tree while it is written.

    Attributes:
        listed: names of tensors that need an entry.
        most_items: how many single values a list or dictionary may have; longer ones are left out.
    """

    def __init__(self, is_tensor: Callable[[Value], bool], listed: set[str], most_items: int) -> None:
        self._is_tensor = is_tensor
        self._listed = listed
        self._most_items = most_items
        # Whether a list is long, by identity: it may be met very often.
        self._known_lists: dict[int, bool] = {}
        self._characters = self._values = 0
        self._open: dict[str, int] = {}
        self._dicts = 0
        self._unlisted: list[tuple[str, int]] = []
        self.parts: list[str] = []
        self.tensors: list[tuple[str, Value]] = []
        self.left_out: list[str] = []
        self.unreadable: list[str] = []
        # Of the values that were written.
        self.longest = 0

    def misplaced(self) -> set[str]:
        """Return the tensors without an entry that would be assigned to the wrong dictionary."""
        return {name for name, number in self._unlisted if owner_of(name, self._open) != number}

    def _put(self, text: str) -> None:
        self.parts.append(text)
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise _TooLargeError("what it holds besides tensors is too much", f"more than {MAX_CHARACTERS} characters")

    def _count(self, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _TooLargeError("it holds too many values", f"more than {MAX_VALUES}")
        if depth > MAX_DEPTH:
            raise NestError("it is nested too deeply", f"more than {MAX_DEPTH} levels")

    def write(self, value: Value, prefix: str, depth: int, *, is_state: bool = False) -> None:
        """Write a value that is kept and no tensor. prefix: what names of tensors in it begin with.

        Args:
            is_state: it has the attributes of an object, so that all its tensors are listed.
        """
        self._count(depth)
        kind = type(value)
        if kind is Dict:
            self._put('{"dict":[')
            self._entries(value.pairs(), prefix, depth, is_state=is_state)
            self._put("]}")
        elif kind is list:
            self._put("[")
            self._items(value, prefix, depth)
            self._put("]")
        elif kind is tuple:
            self._put('{"tuple":[')
            self._items(value, prefix, depth)
            self._put("]}")
        elif kind is Call:
            self._call(value, prefix, depth)
        elif kind is Global:
            self._put(f'{{"global":{json.dumps([*value])}}}')
        elif kind is bytes:
            self._put(f'{{"bytes":"{base64.b64encode(value).decode()}"}}')
        elif kind is float and not math.isfinite(value):
            self._put(f'{{"float":"{DOUBLE.pack(value).hex()}"}}')
        else:
            self._put(json.dumps(value))

    def _entries(
        self, pairs: Iterable[tuple[Value, Value]], prefix: str, depth: int, *, is_state: bool = False
    ) -> None:
        """Write the entries of a dictionary."""
        require_short(prefix)
        number, self._dicts = self._dicts, self._dicts + 1
        seen: set[tuple[type, Value]] = set()
        waiting: list[str] = []
        comma, is_open = "", not is_state

        def put(key: Value) -> None:
            nonlocal comma, is_open
            for earlier in waiting:
                self._put(f"{comma}[{json.dumps(earlier)}]")
                comma = ","
            waiting.clear()
            self._put(f"{comma}[")
            self.write(key, "", depth + 1)
            comma = ","
            is_open = is_open and type(key) is str

        for key, value in pairs:
            self._count(depth)
            name = f"{prefix}{key}"
            if not _is_key(key) or not (type(key) in (str, int) or self._is_plain(value, depth + 1)):
                self._leave_out(prefix, key, "what is under a key that is neither text nor number", value)
                continue
            if type(key) is not tuple:
                if (type(key), key) in seen:
                    raise NestError("a dictionary has a key twice", repr(key)[:100])
                seen.add((type(key), key))
            if self._is_tensor(value):
                self.tensors.append((name, value))
                if type(key) is str and not is_state and name not in self._listed:
                    waiting.append(key)
                else:
                    put(key)
                    self._put("]")
            elif self._is_long(value):
                self._leave_out(prefix, key, self._long(value))
            elif self._is_kept(value, depth + 1):
                put(key)
                self._put(",")
                self.write(value, f"{name}.", depth + 1)
                self._put("]")
            else:
                self._leave_out(prefix, key, described(value, self._is_tensor), value)
        if is_open:
            self._open.setdefault(prefix, number)
        self._unlisted += ((f"{prefix}{key}", number) for key in waiting)

    def _items(self, values: Iterable[Value], prefix: str, depth: int) -> None:
        """Write the items of a list or tuple."""
        require_short(prefix)
        for index, value in enumerate(values):
            if index:
                self._put(",")
            if self._is_tensor(value):
                self._count(depth)
                self.tensors.append((f"{prefix}{index}", value))
                self._put('{"tensor":null}')
            elif self._is_long(value):
                self._count(depth)
                self._leave_out(prefix, index, self._long(value))
                self._put("null")
            elif self._is_kept(value, depth + 1):
                self.write(value, f"{prefix}{index}.", depth + 1)
            else:
                self._count(depth)
                self._leave_out(prefix, index, described(value, self._is_tensor), value)
                self._put("null")

    def _call(self, value: Call, prefix: str, depth: int) -> None:
        module, name = value.function
        self._put(f'{{"call":[{json.dumps(module)},{json.dumps(name)},[')
        self._items(value.args, prefix, depth)
        self._put("]]")
        if value.is_new:
            self._put(',"new":true')
        if value.state is not None:
            self._put(',"state":')
            self.write(value.state, prefix, depth + 1, is_state=True)
        if value.items is not None:
            self._put(',"items":[')
            self._items(value.items, prefix, depth)
            self._put("]")
        if value.flat is not None:
            self._put(',"dict":[')
            self._entries(value.pairs(), prefix, depth)
            self._put("]")
        self._put("}")

    def _is_kept(self, value: Value, depth: int) -> bool:
        """Tell whether a value that is no tensor can be written, itself if not all of its parts."""
        kind = type(value)
        if kind is Call:
            # A dictionary of attributes may lack one; any other state is for the class to understand.
            needed = value.args if type(value.state) is Dict else (*value.args, value.state)
            return value.function in PLAIN and all(self._is_plain(part, depth) for part in needed)
        if kind is Global:
            return value in PLAIN
        return kind in _KEPT

    def _is_plain(self, value: Value, depth: int) -> bool:
        """Tell whether a value can be written with all its parts, and holds no tensor."""
        self._count(depth)
        kind = type(value)
        if self._is_long(value):
            return False
        if kind is list or kind is tuple or kind is Dict:
            return all(self._is_plain(part, depth + 1) for part in parts(value))
        if kind is Call:
            further = (*(value.items or ()), *(value.flat or ()), value.state)
            return self._is_kept(value, depth) and all(self._is_plain(part, depth + 1) for part in further)
        return self._is_kept(value, depth)

    def _is_long(self, value: Value) -> bool:
        """Tell whether a value has too many single values or characters to be kept."""
        kind = type(value)
        if kind is str or kind is bytes:
            self.longest = max(self.longest, len(value) // _CHARACTERS_OF_ITEM)
            return len(value) > _CHARACTERS_OF_ITEM * self._most_items
        items = value.flat if kind is Dict else value if kind is list or kind is tuple else ()
        if len(items) <= self._most_items:
            self.longest = max(self.longest, len(items))
            return False
        is_long = self._known_lists.get(id(value))
        if is_long is None:
            is_long = self._known_lists[id(value)] = all(type(item) in _PLAIN_KEYS for item in items)
        return is_long

    def _long(self, value: Value) -> str:
        """Name a value that is left out for its length."""
        kind = type(value)
        if kind is str or kind is bytes:
            return f"a text or bytes of {len(value)}, more than {_CHARACTERS_OF_ITEM * self._most_items}"
        items = value.flat if kind is Dict else value
        return f"{len(items)} single values, more than {self._most_items}"

    def _leave_out(self, prefix: str, key: Value, what: str, value: Value = None) -> None:
        is_lost = self._is_tensor(value) or (type(value) is Unreadable and not value.is_empty)
        noted = self.unreadable if is_lost else self.left_out
        if len(noted) < _MAX_NOTES:
            name = f"{prefix}{key}" if type(key) in (str, int) else f"{prefix}{key!r}"
            noted.append(f"{name[:_MAX_NOTED_CHARACTERS]}: {what}")


_KEPT = frozenset((type(None), bool, int, float, str, bytes, list, tuple, Dict))
_PLAIN_KEYS = frozenset((type(None), bool, int, float, str, bytes))


def _is_key(value: Value) -> bool:
    """Tell whether a value may be the key of an entry: a plain one, or a tuple of such."""
    return all(type(item) in _PLAIN_KEYS for item in (value if type(value) is tuple else (value,)))
