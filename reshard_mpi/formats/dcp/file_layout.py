"""Lay out a `.distcp` file: torch's items, and our footer that lists the tensors (`of_tensor`, `read_footer`).

torch joins the keys on the way to a tensor or object by dots, and keeps them as a path: texts are keys of dictionaries,
numbers are places in lists.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp.bulk_metadata import MAX_NUMBER
from reshard_mpi.formats.manifest import ShardSpec
from reshard_mpi.formats.nest.nodes import ORDERED_DICT, Call, Dict, Global, NestTensor, Value, parts
from reshard_mpi.formats.structure import require_own
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.formats.torch.archive import (
    ALIGNMENT_BYTES,
    Placed,
    descriptor,
    ends,
    first_members,
    local_header,
    placed,
)
from reshard_mpi.formats.torch.pickle_hooks import PickleError
from reshard_mpi.formats.torch.pickler import WrittenTensor, dumps
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME
from reshard_mpi.formats.torch.tensors import numbers as numbers_of
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB

# Payloads of this size and more begin where file systems can share blocks.
_LARGE_BYTES, _BLOCK_BYTES = 64 * KIB, 4 * KIB
_KEY = "0"
# torch gives each archive a number, which it never looks at.
_NUMBER = b"0" * 40


class ItemLayout(NamedTuple):
    """What an item of a tensor consists of besides its payload: the bytes before it, and those behind it.

    There is no checksum of the payload, which torch never looks at.
    """

    head: bytes
    tail: bytes
    payload_bytes: int

    @property
    def length_bytes(self) -> int:
        return len(self.head) + self.payload_bytes + len(self.tail)

    def start_behind(self, end: int) -> int:
        """Return where the item begins whose predecessor ends at byte `end`, so that its payload is aligned."""
        alignment_bytes = _BLOCK_BYTES if self.payload_bytes >= _LARGE_BYTES else ALIGNMENT_BYTES
        return -(-(end + len(self.head)) // alignment_bytes) * alignment_bytes - len(self.head)


@lru_cache(maxsize=1024)
def of_tensor(kind: TensorType) -> ItemLayout:
    """Return the layout of an item for a tensor of a kind; only type and shape count."""
    plain = kind.unplaced
    before, members = _written(first_members(dumps(WrittenTensor(_KEY, plain))), [])
    payload = placed(f"data/{_KEY}", plain.size_bytes, members[-1].end)
    head = before.ljust(payload.header_start, b"\0") + local_header(payload)
    return ItemLayout(head, _finished([*members, payload]), plain.size_bytes)


def of_object(value: Value, contents: Mapping[str, tuple[TensorType, bytes]]) -> bytes:
    """Return the item of an object. contents: types and bytes of the tensors in it, by name."""
    written = {name: WrittenTensor(str(key), kind) for key, (name, (kind, _)) in enumerate(contents.items(), 1)}
    payloads = {f"data/{written[name].key}": content for name, (_, content) in contents.items()}
    before, members = _written(first_members(dumps(_with(written, value))) | payloads, [])
    return before + _finished(members)


def _with(written: Mapping[str, WrittenTensor], value: Value) -> Value:
    """Return a value with tensors in place of their leaves."""
    kind = type(value)
    if kind is NestTensor:
        return written[value.name]
    if kind is list or kind is tuple:
        return kind(_with(written, part) for part in value)
    if kind is Dict:
        return Dict(_with(written, value.flat))
    if kind is Call:
        call = Call(value.function, _with(written, value.args), is_new=value.is_new)
        call.state, call.items, call.flat = (_with(written, each) for each in (value.state, value.items, value.flat))
        return call
    return value


def _finished(members: list[Placed]) -> bytes:
    """Return what follows the members of an archive: the descriptor of a payload, the last members, the directory."""
    of_payload = descriptor(members[-1]) if members[-1].name.endswith(f"data/{_KEY}".encode()) else b""
    last, every = _written({"version": b"3\n", ".data/serialization_id": _NUMBER}, members)
    return of_payload + last + ends(every, every[-1].end)


def _written(contents: dict[str, bytes], before: list[Placed]) -> tuple[bytes, list[Placed]]:
    parts, members = [], list(before)
    for name, content in contents.items():
        member = placed(name, len(content), members[-1].end if members else 0, crc32(content))
        parts.append(local_header(member) + content + descriptor(member))
        members.append(member)
    return b"".join(parts), members


Keys = tuple[str | int, ...]

# Dictionaries of other classes; their contents are flattened like a plain dictionary's.
_COUNTER = Global("collections", "Counter")
_DICTIONARIES = frozenset((_COUNTER, ORDERED_DICT, Global("collections", "defaultdict")))
# Lists may lack items, which torch fills with None: empty dictionaries before.
_MOST_LACKING = 1 << 16


def tree_of(values: Iterable[tuple[Keys, Value]], where: str) -> Value:
    """Return the nested dictionaries and lists in which each value lies at its path.

    Raises ShardError if two paths contradict each other.
    """
    root: dict[str | int, Value] = {}
    lists: list[_List] = []
    for path, value in values:
        inner = root
        for key, further in pairwise(path):
            if key not in inner:
                inner[key] = _List() if type(further) is int else _Dictionary()
                if type(further) is int:
                    lists.append(inner[key])
            inner_tree = inner[key]
            if type(inner_tree) is not (_List if type(further) is int else _Dictionary):
                raise _contradiction(path, where)
            inner = inner_tree
        if path[-1] in inner:
            raise _contradiction(path, where)
        inner[path[-1]] = value
    places = [[key for key in inner_tree if type(key) is int] for inner_tree in lists]
    if sum(max(keys) + 1 - len(keys) for keys in places) > _MOST_LACKING or any(min(keys) < 0 for keys in places):
        raise ShardError("lists of a checkpoint lack most of their items", where=where)
    return _finished_tree(root)


class _Dictionary(dict[str | int, Value]):
    """A dictionary of the tree while it is made."""


class _List(dict[str | int, Value]):
    """A list of the tree while it is made, by place."""


def _finished_tree(tree: Mapping[str | int, Value]) -> Value:
    values = {key: _finished_tree(own) if type(own) in (_Dictionary, _List) else own for key, own in tree.items()}
    if type(tree) is not _List:
        if type(values.get("state")) is Dict:
            values["state"] = _numbered(values["state"], values.get("param_groups"))
        if "gamma" in values and type(values.get("milestones")) is Dict:
            values["milestones"] = _counter(values["milestones"])
        return Dict.of(values.items())
    length = max(key for key in values if type(key) is int) + 1
    return [values.get(index) for index in range(length)]


def _numbered(state: Dict, groups: Value) -> Dict:
    """Return state with numbers for keys that are a parameter's as text: torch passes over these without an error."""
    members = [group.get("params") for group in groups if type(group) is Dict] if type(groups) is list else []
    numbers = {str(number): number for keys in members if type(keys) is list for number in keys if type(number) is int}
    return Dict.of((numbers.get(key, key), value) for key, value in state.pairs())


def _counter(milestones: Dict) -> Value:
    """Return the milestones of torch's MultiStepLR as they were saved: it looks up numbers in them."""
    if not all(type(key) is str and key.isdecimal() for key in milestones.flat[::2]):
        return milestones
    return Call(_COUNTER, (Dict.of((int(key), count) for key, count in milestones.pairs()),))


def _contradiction(path: Keys, where: str) -> ShardError:
    return ShardError(
        "two entries of a checkpoint are to lie at one place", got=f"keys {list(path)}"[:300], where=where
    )


def flattened(root: Value) -> Iterator[tuple[Keys, Value]]:
    """Yield the path of every tensor and object of a tree, in order.

    As torch does: dictionaries are taken apart, and lists if there are tensors or dictionaries in them. All else is an
    object, even if it has tensors in it. Empty dictionaries vanish.
    """
    if type(root) is Dict:
        yield from _dictionary(root.pairs(), ())
    else:
        yield from ((tuple(map(str, path[:1])) + path[1:], value) for path, value in _opened(root, ()))


def _dictionary(pairs: Iterable[tuple[Value, Value]], path: Keys) -> Iterator[tuple[Keys, Value]]:
    for key, value in pairs:
        yield from _value(value, (*path, str(key)))


def _value(value: Value, path: Keys) -> Iterator[tuple[Keys, Value]]:
    if _is_dictionary(value) or (type(value) is list and _has_more(value)):
        yield from _opened(value, path)
    else:
        yield path, value


def _opened(value: Value, path: Keys) -> Iterator[tuple[Keys, Value]]:
    """Yield the members of a value that is not kept as one object."""
    if type(value) is Dict:
        yield from _dictionary(value.pairs(), path)
    elif type(value) is list or type(value) is tuple:
        for index, item in enumerate(value):
            yield from _value(item, (*path, index))
    elif type(value) is Call:
        for index, item in enumerate((*value.args, *(value.items or ()))):
            if value.function == _COUNTER and type(item) is Dict:
                yield from _dictionary(item.pairs(), path)
            elif not _is_dictionary(value) or type(item) is not Global:  # which makes values of a defaultdict
                yield from _value(item, (*path, str(index)))
        if value.flat:
            yield from _dictionary(value.pairs(), path)
        if type(value.state) is Dict and (not _is_dictionary(value) or any(tensors_in(value.state))):
            yield from _dictionary(value.state.pairs(), path)


def _is_dictionary(value: Value) -> bool:
    return type(value) is Dict or (type(value) is Call and value.function in _DICTIONARIES)


def _has_more(values: list[Value]) -> bool:
    """Tell whether there are tensors or dictionaries in a list, or in lists in it."""
    return any(
        type(value) is NestTensor or _is_dictionary(value) or (type(value) is list and _has_more(value))
        for value in values
    )


def tensors_in(value: Value) -> Iterator[str]:
    """Yield the names of the tensors in a value."""
    if type(value) is NestTensor:
        yield value.name
    for part in parts(value):
        yield from tensors_in(part)


_MARK = b"rmpidcp1"
# The mark, how long the record before it is, and its CRC-32.
_END = struct.Struct("<8sQI")
_MAX_BYTES = 48 * MIB
# What an item takes besides its payload: the gap before it and its own structure, measured for 32 dimensions.
_ITEM_BYTES = 4 * KIB + 3 * KIB
# Of a tensor: its number of a kind and its place, the opcodes of its name. Of a kind: its type and numbers.
_TENSOR_BYTES, _KIND_BYTES, _NUMBER_BYTES = 12 + 8, 64, 12
# No character of a string takes more.
_CHARACTER_BYTES = 4


class Footer(NamedTuple):
    """The tensors of a file and where their payloads lie, its strings, and where the items end."""

    tensors: TensorTable
    strings: dict[str, str]
    end: int


def footer_of(tensors: TensorTable, strings: dict[str, str]) -> bytes:
    """Return the footer behind the items: each tensor is one run of the file, and a box of a whole tensor."""
    kinds = []
    for kind in tensors.kinds:
        assert kind.box is not None and kind.global_shape is not None
        kinds.append((kind.dtype.name, kind.global_shape, kind.box.start, kind.box.stop))
    record = Dict(
        [
            *("kinds", kinds),
            *("names", list(tensors)),
            *("kind_of", _little_endian(array("I", tensors.kind_ids)).tobytes().hex()),
            *("starts", _little_endian(array("q", tensors.offsets)).tobytes().hex()),
            *("strings", Dict.of(strings.items())),
        ]
    )
    content = dumps(record)
    return content + _END.pack(_MARK, len(content), crc32(content))


def size_at_most_bytes(spec: ShardSpec) -> int:
    """Return the largest size of a file with an item for each tensor of `spec`, and the footer."""
    of_items = spec.specs.size_bytes + _ITEM_BYTES * len(spec.specs)
    of_names = sum(_CHARACTER_BYTES * len(name) + 2 * _TENSOR_BYTES for name in spec.specs.names)
    of_kinds = sum(_KIND_BYTES + 3 * _NUMBER_BYTES * len(kind.shape) for kind in spec.specs.kinds)
    of_strings = sum(_CHARACTER_BYTES * (len(name) + len(text)) + 32 for name, text in spec.strings.items())
    return of_items + of_names + of_kinds + of_strings + 512 + _END.size


def has_footer(file: SourceFile) -> bool:
    """Tell whether a file ends as those do that this program has written."""
    return file.read(max(0, file.size_bytes - _END.size), len(_MARK)) == _MARK


def read_footer(file: SourceFile) -> Footer:
    """Read the footer of a file. Raises ShardError if there is none, or it is damaged."""
    path = file.path
    end = file.read(max(0, file.size_bytes - _END.size), _END.size)
    if len(end) < _END.size or not end.startswith(_MARK):
        raise ShardError(
            "a file of a torch distributed checkpoint does not say what it holds",
            expected="its folder with the metadata, which does",
            got="the file alone",
            where=path,
            remedy="give the folder in which .metadata lies",
        )
    _, length_bytes, crc = _END.unpack(end)
    start = file.size_bytes - _END.size - length_bytes
    content = file.read(start, length_bytes) if start >= 0 and length_bytes <= _MAX_BYTES else b""
    if len(content) != length_bytes or crc32(content) != crc:
        raise _damaged(path)
    try:
        root, offset = load(content)
        if offset != len(content):
            raise _damaged(path)
        return _contents(root, path, start)
    except (PickleError, ValueError, KeyError, IndexError):
        raise _damaged(path) from None


def _contents(root: Value, path: str, end: int) -> Footer:
    """Return the contents that a record describes. Raises ValueError, KeyError or IndexError if it is damaged."""
    require_own(type(root) is Dict)
    kinds, names, strings = root.get("kinds"), root.get("names"), root.get("strings")
    require_own(type(kinds) is list and type(names) is list and type(strings) is Dict)
    kind_of, starts = array("I", _bytes(root.get("kind_of"))), array("q", _bytes(root.get("starts")))
    require_own(len(names) == len(kind_of) == len(starts) <= structure.MAX_TENSORS)
    require_own(all(type(text) is str for text in (*names, *strings.flat)) and len(set(names)) == len(names))
    tensors = TensorTable(path)
    numbers = [tensors.kind(_kind(kind)) for kind in kinds]
    for name, kind, start in zip(names, _little_endian(kind_of), _little_endian(starts)):
        tensors.add(name, numbers[kind], start)
    return Footer(tensors, dict(strings.pairs()), end)


def _kind(value: Value) -> TensorType:
    """Return the kind that a record describes; raises as `_contents` does."""
    require_own(type(value) is tuple and len(value) == 4 and type(value[0]) is str)
    dtype, (whole, low, high) = BY_TORCH_NAME[value[0]], map(numbers_of, value[1:])
    box = Box(low, high)
    kind = TensorType(dtype, box.shape, box, whole)
    require_own(box.ndim <= structure.MAX_DIMENSIONS and Box.whole(whole).contains(box))
    require_own(kind.size_bytes < MAX_NUMBER)
    return kind


def _bytes(text: Value) -> bytes:
    require_own(type(text) is str)
    return bytes.fromhex(text)


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _damaged(path: str) -> ShardError:
    return ShardError(
        "what a file of a checkpoint says of itself is damaged",
        expected="the record of its tensors, with a checksum that fits",
        got="something else",
        where=path,
    )
