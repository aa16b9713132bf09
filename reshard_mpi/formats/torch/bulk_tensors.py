"""Read the tensors of a pickle many at a time (`TensorRunReader`).

From the second tensor of a type on, torch's pickler writes the same opcodes for each, so a regular expression takes an
entry whole: its name, and the call that makes the tensor. What is written in any other way is left to the interpreter;
both come to the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from reshard_mpi.formats.nest.nodes import ORDERED_DICT, Call, Global, Value
from reshard_mpi.formats.torch.pickle_hooks import PickleHooks, ReadObjects
from reshard_mpi.formats.torch.tensors import BY_STORAGE, CALLS, REBUILD, Storage, StoredTensor, of_type, storage
from reshard_mpi.text import MIB

# What an entry takes of memory besides its texts, as the interpreter counts it.
_COST_BYTES = 1080
# Tensors at a time, so that their memory can be checked.
_MOST_AT_ONCE = 4096
# Objects in the memo before its numbers take four bytes.
_LONG_NUMBERS = 256
# Files that are not hostile have a few dozen sorts of tensors.
_MAX_KNOWN = 1024

_PUT, _GET, _NUMBER = rb"r(.{4})", rb"(?:h.|j.{4})", rb"(?:K.|M..|J.{4})"
_SIZE = rb"((?:%s\x85|(?:%s){2}\x86|(?:%s){3}\x87|\((?:%s){4,32}t))" % ((_NUMBER,) * 4)
_TEXT = rb"X(.)\0\0\0"
# Behind the first mark: the storage with its key, type and size; the offset in it; shape, strides; no gradients, no
# hooks. Numbers of the memo: of the key, the storage, the shape, the strides, the hooks, the arguments, the tensor.
_ARGUMENTS = rb"\((%s)(%s)%s([0-9]{1,19})%s(%s)(%s)t%sQ" % (
    _GET,
    _GET,
    _TEXT,
    _PUT,
    _GET,
    _NUMBER,
    _PUT,
) + rb"(%s)%s%s%s%s\x89(%s)\)R%st%sR%s" % (_NUMBER, _SIZE, _PUT, _SIZE, _PUT, _GET, _PUT, _PUT, _PUT)
_FIRST = re.compile(_ARGUMENTS, re.DOTALL)
_AGAIN = re.compile(_TEXT + rb"(.{0,255}?)%s(%s)\(" % (_PUT, _GET) + _ARGUMENTS, re.DOTALL)
_NAME_GROUPS = 4
_SEVEN, _EIGHT = Struct("<7I"), Struct("<8I")
_FIND_NUMBERS = re.compile(_NUMBER, re.DOTALL)


class _TensorTemplate(NamedTuple):
    """What tensors have in common that differ in their names and storages."""

    refers_to: tuple[tuple[int, Value], ...]  # numbers in the memo, and what they must be there
    stored: StoredTensor  # a tensor of this sort
    kind: Global  # its type as it is named
    device: Value  # where it was


class TensorRunReader:
    """Reads tensors in a row from behind the mark before the arguments of the first call.

    Attributes:
        known: adds a storage to those of the pickle and returns it as it is called there; raises ValueError if there is
            another of its key.
    """

    def __init__(self, known_storage: Callable[[Storage], Storage]) -> None:
        self._known = known_storage
        self._sorts: dict[tuple[bytes, ...], _TensorTemplate] = {}

    def __call__(self, data: bytes, position: int, memo: Sequence[Value]) -> ReadObjects | None:
        """Read them. See `pickle_hooks.ObjectReader`."""
        if len(memo) < _LONG_NUMBERS:
            return None
        values: list[Value] = []
        memoized: list[Value] = []
        # What is written alike in one row refers to the same things: nothing else is put into the memo meanwhile.
        met: dict[tuple[bytes, ...], _TensorTemplate] = {}
        cost_bytes, number, match = 0, len(memo), _FIRST.match(data, position)
        while match is not None and len(values) < 2 * _MOST_AT_ONCE:
            groups = match.groups()
            is_first = not values
            own = groups if is_first else groups[_NAME_GROUPS:]
            storage_word, kind, key_bytes, key, key_put, device, count, put, offset, shape, shape_put, *rest = own
            strides, strides_put, hooks, hooks_put, args_put, tensor_put = rest
            puts = key_put + put + shape_put + strides_put + hooks_put + args_put + tensor_put
            if is_first:
                name, rebuild, expected = None, b"", _SEVEN.pack(*range(number, number + 7))
            else:
                name_bytes, raw_name, name_put, rebuild = groups[:_NAME_GROUPS]
                puts, expected = name_put + puts, _EIGHT.pack(*range(number, number + 8))
                name = raw_name.decode("utf-8", "surrogatepass") if len(raw_name) == name_bytes[0] else None
                if name is None:
                    break
            if puts != expected or len(key) != key_bytes[0]:
                break
            written = (rebuild, storage_word, kind, device, count, offset, shape, strides, hooks)
            sort = met.get(written)
            if sort is None:
                sort = self._sort(written, memo)
                if sort is None:
                    break
                met[written] = sort
            _, like, kind_name, place = sort
            text, elements = key.decode(), like.storage.elements
            stored = self._known(Storage(text, like.dtype, None, elements))
            tensor = StoredTensor(stored, like.dtype, like.offset, like.shape, like.strides)
            no_hooks = Call(ORDERED_DICT, ())
            if name is not None:
                values.append(name)
                memoized.append(name)
                cost_bytes += len(name)
            values.append(tensor)
            identity = ("storage", kind_name, text, place, elements)
            args = (stored, like.offset, like.shape, like.strides, False, no_hooks)
            memoized += (text, identity, like.shape, like.strides, no_hooks, args, tensor)
            number = len(memo) + len(memoized)
            cost_bytes += _COST_BYTES + len(key)
            position = match.end()
            match = _AGAIN.match(data, position)
        return ReadObjects(values, position, memoized, cost_bytes) if values else None

    def _sort(self, written: tuple[bytes, ...], memo: Sequence[Value]) -> _TensorTemplate | None:
        """Return the template of the tensor at hand; None if it is not written in the usual way."""
        sort = self._sorts.get(written)
        if sort is not None and all(memo[number] is value for number, value in sort.refers_to):
            return sort
        rebuild, word, kind, device, count, offset, shape, strides, hooks = written
        numbers = [_got(get) for get in (rebuild, word, kind, device, hooks) if get]
        if any(number >= len(memo) for number in numbers):
            return None
        values = [memo[number] for number in numbers]
        *first, word_value, kind_value, device_value, hooks_value = values
        if first not in ([], [REBUILD]) or word_value != "storage" or hooks_value != ORDERED_DICT:
            return None
        dtype = BY_STORAGE.get(kind_value.name) if type(kind_value) is Global else None
        elements = _numbers(count)[0]
        if dtype is None or elements < 0:
            return None
        stored = Storage("", dtype, None, elements)
        tensor = of_type(stored, dtype, _numbers(offset)[0], _numbers(shape), _numbers(strides), None)
        if type(tensor) is not StoredTensor:
            return None
        sort = _TensorTemplate(tuple(zip(numbers, values)), tensor, kind_value, device_value)
        if len(self._sorts) < _MAX_KNOWN:
            self._sorts[written] = sort
        return sort


def _got(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


def _numbers(written: bytes) -> tuple[int, ...]:
    """Return the numbers that opcodes put on the stack."""
    operands = _FIND_NUMBERS.findall(written.removeprefix(b"("))
    return tuple(int.from_bytes(number[1:], "little", signed=number[0] == 0x4A) for number in operands)


# The pickle of 100,000 tensors has 12 MB.
MAX_PICKLE_BYTES = 40 * MIB


class ArchiveContent(NamedTuple):
    """One file: its object as a tree, and where the bytes of each storage begin, by key."""

    root: Value
    starts: Mapping[str, int]
    swapped: bool  # the elements have the byte order this machine has not
    # CRC-32 of the archive's pickle: as its directory says, and of what lies there
    pickle_crc: int = 0
    found_crc: int = 0
    own_record: bytes | None = None  # what this program has added to it, None in files that others have written


class Storages:
    """The storages that a pickle names, while it is read.

    Attributes:
        by_key: one of each, of types that are known; all of a key have the same size.
        unknown: those of other types.
        prefix: is put before their keys in what is read, to tell them from those of other archives.
    """

    def __init__(self, prefix: str = "") -> None:
        self.by_key: dict[str, Storage] = {}
        self.unknown: dict[str, Storage] = {}
        self._prefix = prefix

    @property
    def readers(self) -> PickleHooks:
        """The hooks with which the pickle is read."""
        return PickleHooks(self._storage, CALLS, rows={REBUILD: TensorRunReader(self._known)})

    def _storage(self, persistent_id: Value) -> Storage:
        read = storage(persistent_id)
        if read.unknown is not None:
            return self.unknown.setdefault(read.key, read)
        return self._known(read)

    def _known(self, read: Storage) -> Storage:
        first = self.by_key.setdefault(read.key, read)
        if first is not read and first.size_bytes != read.size_bytes:
            raise ValueError(f"a storage of two sizes: {read.key[:60]!r}")
        return read._replace(key=self._prefix + read.key) if self._prefix else read
