"""Turn what lies beside tensors into plain Python values (`values_beside`), by name (`leaves`), as JSON (`as_json`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from reshard_mpi.formats.nest.nodes import BYTES_IO, Call, Dict, Global, NestError, Value
from reshard_mpi.formats.nest.rebuild_tree import rebuild
from reshard_mpi.text import json_number

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
