"""Rebuild the tree from names, strings and the text (`rebuild`), also as plain Python values (`values_beside`)."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import (
    BYTES_IO,
    DOUBLE,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    PLAIN,
    Call,
    Dict,
    Global,
    NestError,
    Value,
    owner_of,
    parsed,
    require_short,
)
from reshard_mpi.text import beginning, json_number


def rebuild(leaves: Mapping[str, Value], strings: Mapping[str, str]) -> Value:
    """Return the tree of these tensors and strings, as `strings[NEST]` says; without it a dictionary of names.

    Args:
        leaves: what stands for each tensor in the tree. A tensor that the nest lists and the shard lacks is left out of
            its dictionary, and so is a list of nothing but such tensors.

    Raises NestError if the text is none, or something has no place or two.
    """
    text = strings.get(NEST)
    others = [(name, value) for name, value in strings.items() if name != NEST]
    if text is None:
        return Dict.of((*leaves.items(), *others))
    if len(text) > MAX_CHARACTERS:
        raise NestError("the text of the nest is too long", f"{len(text)} characters")
    try:
        content = parsed(text)
    except (ValueError, RecursionError) as error:
        raise NestError("the text of the nest is no JSON", str(error)[:100]) from None
    rebuilding = _Rebuilding({name: leaves[name] for name in content.in_order(leaves)})
    try:
        root = rebuilding.value(content.root, "", 0)
    except RecursionError:  # of what is shown of an unknown value
        raise NestError("the nest has too many values or levels") from None
    rebuilding.add_unlisted(others)
    return root


class _Rebuilding:
    """A tree while it is made."""

    def __init__(self, leaves: Mapping[str, Value]) -> None:
        self._leaves = leaves
        self._placed: set[str] = set()
        self._values = 0
        # By what names in it begin with, the number of each dictionary that takes what is not listed.
        self._open: dict[str, int] = {}
        # By number, the keys and values of each dictionary, and its keys.
        self._dicts: list[tuple[list[Value], set[Value]]] = []

    def value(self, content: Any, prefix: str, depth: int, *, is_state: bool = False) -> Value:
        """Return the value that a part of the JSON describes. prefix: what names of tensors in it begin with.

        Args:
            is_state: it has the attributes of an object.
        """
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise NestError("the nest has too many values or levels")
        if type(content) is list:
            return self._items(content, prefix, depth)
        if type(content) is not dict:
            return content
        match content:
            case {"dict": list() as entries, **rest} if not rest:
                node = Dict()
                self._entries(node.flat, entries, prefix, depth, is_state=is_state)
                return node
            case {"tuple": list() as items, **rest} if not rest:
                return tuple(self._items(items, prefix, depth))
            case {"call": [str() as module, str() as name, list() as args], **rest}:
                return self._call(Global(module, name), args, rest, prefix, depth)
            case {"global": [str() as module, str() as name], **rest} if not rest:
                return _allowed(Global(module, name))
            case {"bytes": str() as text, **rest} if not rest:
                return _decoded(text)
            case {"float": str() as text, **rest} if not rest:
                return _double(text)
        raise NestError("the nest has an unknown value", str(content)[:100])

    def _items(self, items: list[Any], prefix: str, depth: int) -> list[Value]:
        require_short(prefix)
        values = []
        for index, content in enumerate(items):
            if type(content) is dict and "tensor" in content:
                name = f"{prefix}{index}"
                if name not in self._leaves:
                    raise NestError("a part of a list of the nest is not in the shard", repr(name))
                values.append(self._take(name))
            else:
                values.append(self.value(content, f"{prefix}{index}.", depth + 1))
        return values

    def _take(self, name: str) -> Value:
        if name in self._placed:
            raise NestError("a tensor has two places in the nest", repr(name))
        self._placed.add(name)
        return self._leaves[name]

    def _entries(
        self, flat: list[Value], entries: list[Any], prefix: str, depth: int, *, is_state: bool = False
    ) -> None:
        """Add the described entries of a dictionary to its keys and values."""
        require_short(prefix)
        number, is_open = len(self._dicts), not is_state
        keys: set[Value] = set()
        self._dicts.append((flat, keys))
        for entry in entries:
            if type(entry) is not list or len(entry) not in (1, 2) or type(entry[0]) is list:
                raise NestError("the nest has an entry that is no key with its value", str(entry)[:100])
            key = self.value(entry[0], "", depth + 1)
            if type(key) not in (str, int, float, bool, bytes, tuple, type(None)):
                raise NestError("the nest has a key that is no plain value", str(entry)[:100])
            is_open = is_open and type(key) is str
            if type(key) is not tuple:
                mark = key if type(key) is str else (type(key), key)
                if mark in keys:
                    raise NestError("a dictionary of the nest has a key twice", repr(key)[:100])
                keys.add(mark)
            name = f"{prefix}{key}"
            if len(entry) == 2 and not self._is_left_out(entry[1], f"{name}."):
                flat += [key, self.value(entry[1], f"{name}.", depth + 1)]
            elif len(entry) == 1 and name in self._leaves:
                flat += [key, self._take(name)]
        if is_open:
            self._open.setdefault(prefix, number)

    def _is_left_out(self, content: Any, prefix: str) -> bool:
        """Tell whether a part of the JSON is a list of nothing but tensors that the shard lacks."""
        items = content.get("tuple") if type(content) is dict else content
        return (type(items) is list and bool(items)) and all(
            f"{prefix}{index}" not in self._leaves
            if type(item) is dict and "tensor" in item
            else self._is_left_out(item, f"{prefix}{index}.")
            for index, item in enumerate(items)
        )

    def _call(self, function: Global, args: list[Any], rest: Mapping[str, Any], prefix: str, depth: int) -> Call:
        is_new, items, entries = rest.get("new", False), rest.get("items"), rest.get("dict")
        if type(is_new) is not bool or not rest.keys() <= {"new", "state", "items", "dict"}:
            raise NestError("the nest has an unknown value", str(rest)[:100])
        if not all(part is None or type(part) is list for part in (items, entries)):
            raise NestError("the nest has an object whose items are no list", str(function))
        call = Call(_allowed(function), tuple(self._items(args, prefix, depth)), is_new=is_new)
        if rest.get("state") is not None:
            call.state = self.value(rest["state"], prefix, depth + 1, is_state=True)
        if items is not None:
            call.items = self._items(items, prefix, depth)
        if entries is not None:
            call.flat = []
            self._entries(call.flat, entries, prefix, depth)
        return call

    def add_unlisted(self, strings: list[tuple[str, str]]) -> None:
        """Put tensors without an entry into the dictionaries that they belong to, and strings into the root."""
        unlisted = ((name, leaf) for name, leaf in self._leaves.items() if name not in self._placed)
        owners = [(name, leaf, owner_of(name, self._open)) for name, leaf in unlisted]
        owners += [(name, text, self._open.get("")) for name, text in strings]
        lengths = {number: len(prefix) for prefix, number in self._open.items()}
        for name, value, number in owners:
            if number is None:
                raise NestError("a tensor or string has no place in the nest", repr(name)[:100])
            flat, keys = self._dicts[number]
            key = name[lengths[number] :]
            if key in keys:
                raise NestError("a tensor or string has the place of something else in the nest", repr(name)[:100])
            keys.add(key)
            flat += [key, value]


def _allowed(name: Global) -> Global:
    """Return a name that may be written. Raises NestError for all others: whoever loads the file would call it."""
    if name not in PLAIN:
        raise NestError("the nest names something that is no plain data", str(name)[:100])
    return name


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise NestError("the nest has bytes that are no base64", repr(text[:40])) from None


def _double(text: str) -> float:
    try:
        value: float = DOUBLE.unpack(bytes.fromhex(text))[0]
    except (ValueError, struct.error):
        raise NestError("the nest has a number that is none", repr(text[:40])) from None
    if math.isfinite(value):
        raise NestError("the nest has a finite number in hexadecimal digits", repr(text[:40]))
    return value


_MAX_QUOTED = 60


def first_difference(first: str | None, second: str | None) -> str:
    """Name the first value that differs between two nest texts (None: a text without values); empty if none differs."""
    try:
        ours, theirs = ({} if text is None else dict(_values(parsed(text).root, "")) for text in (first, second))
    except (NestError, ValueError, TypeError, LookupError, RecursionError):
        return "" if first == second else "the text of a nest is damaged"
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return f"{name or 'the whole'} ({_quoted(ours.get(name))} and {_quoted(theirs.get(name))})"
    return ""


def _values(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the values of a nest that are no tensors, by their names: keys and places joined by dots."""
    if isinstance(value, dict) and isinstance(entries := value.get("dict"), list) and len(value) == 1:
        for key, *held in entries:
            if held:
                yield from _values(held[0], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) or (isinstance(value, dict) and [*value] == ["tuple"]):
        for place, item in enumerate(value if isinstance(value, list) else value["tuple"]):
            yield from _values(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, json.dumps(value)


def _quoted(text: str | None) -> str:
    return "not there" if text is None else beginning(text, _MAX_QUOTED)


# What stands for each tensor in the tree.
_TENSOR = object()
_SEQUENCES = {"set": set, "frozenset": frozenset, "list": list, "tuple": tuple, "bytearray": bytearray, "deque": list}


def values_beside(names: Iterable[str], strings: Mapping[str, str]) -> Any:
    """Return the values beside tensors of these names, as plain dicts, lists, numbers and texts.

    A dict lacks the entries that are tensors, and in a list None is in the place of one. Raises NestError if `strings`
    does not say how they are nested.
    """
    try:
        return _plain(rebuild(dict.fromkeys(names, _TENSOR), strings))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise NestError(str(error)) from error


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in dicts, lists and tuples by their names: keys and places joined by dots."""
    if isinstance(value, dict | list | tuple) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value


def as_json(value: Any) -> Any:
    """Return a plain value as JSON has it: lists for tuples, sets and complex numbers, texts for bytes and NaN."""
    if isinstance(value, dict):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, complex):
        return [json_number(value.real), json_number(value.imag)]
    if isinstance(value, float):
        return json_number(value)
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _plain(value: Value) -> Any:
    """Return a value as dicts, lists, tuples, sets, numbers, texts and bytes.

    A dict lacks the entries that are tensors, and in a list None is in the place of one. Namespaces and other
    dictionaries become dicts; numpy's numbers become Python's; paths, and element types of torch, become texts. An
    object that is none of these is a dict of its "class", "args" and "state": nothing is imported or called.
    """
    kind = type(value)
    if value is _TENSOR:
        return None
    if kind is Dict:
        return _dict(value.pairs())
    if kind is list:
        return [_plain(item) for item in value]
    if kind is tuple:
        return tuple(_plain(item) for item in value)
    if kind is Global:
        return str(value)
    return _made(value) if kind is Call else value


def _dict(pairs: Iterable[tuple[Value, Value]]) -> dict[Any, Any]:
    return {_plain(key): _plain(value) for key, value in pairs if value is not _TENSOR}


def _made(call: Call) -> Any:
    """Return the plain value of an object."""
    module, name = call.function
    args = [_plain(argument) for argument in call.args]
    if call.flat is not None or name in ("OrderedDict", "defaultdict", "dict"):
        first = args[0] if args and isinstance(args[0], dict) else {}
        return {**first, **_dict(call.pairs())}
    if name == "complex" and all(isinstance(part, int | float) for part in args):
        return complex(*args[:2])
    if name == "Counter":
        return args[0] if args else {}
    if name in ("Namespace", "SimpleNamespace"):
        return _plain(call.state) if call.state is not None else {}
    given = args[0] if args else ()
    if name in _SEQUENCES and isinstance(given, list | tuple | set | frozenset | bytes):
        return _SEQUENCES[name]([*given, *map(_plain, call.items or ())])
    if name == "Size":
        return tuple(given)
    if call.function == BYTES_IO:
        return args[0] if args else b""
    if module.partition(".")[0] == "pathlib" and all(isinstance(argument, str) for argument in args):
        return str(PurePosixPath(*args))
    if name == "scalar" and len(args) == 2 and isinstance(args[1], bytes):
        dtype = call.args[0]
        if type(dtype) is Call and re.fullmatch("[biufc][0-9]{1,2}", str(dtype.args[:1]).strip("(',)")):
            return _number(dtype, args[1])
    return {"class": str(call.function), "args": args, "state": _plain(call.state)}


def _number(dtype: Call, content: bytes) -> Any:
    """Return the number that numpy's `scalar` makes of an element type, as it is pickled, and bytes."""
    import numpy as np

    order = dtype.state[1] if type(dtype.state) is tuple and len(dtype.state) > 1 else ""
    return np.frombuffer(content, f"{order if order in ('<', '>') else '='}{dtype.args[0]}")[0].item()
