"""Checkpoints as torch before 1.6 saved them: five pickles in a row, then each storage with its number of elements."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from reshard_mpi.formats.nest.trees import Dict, Value
from reshard_mpi.formats.torch.content import MAX_PICKLE_BYTES, Content, Storages
from reshard_mpi.formats.torch.pickles import load
from reshard_mpi.formats.torch.readers import CutShortError, PickleError
from reshard_mpi.units import MIB

# The first pickle: a number that no other file begins with.
START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PROTOCOL = 1001
# The pickles do not say how long they are, so at first this much is read.
_FIRST_BYTES = MIB
_COUNT_BYTES = 8
# Types that this program does not read, by the class of their storages: how long an element is, to pass over them.
_PASSED_BYTES = {"QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1}
_PASSED_BYTES["ComplexHalfStorage"] = 4


def of_pickles(fd: int, path: str, size_bytes: int) -> Content:
    """Read the content of a file of the older layout. Raises ShardError if it is not sound."""
    length_bytes = _FIRST_BYTES
    while True:
        try:
            return _content(os.pread(fd, length_bytes, 0), fd, size_bytes)
        except CutShortError as error:
            if length_bytes >= min(size_bytes, MAX_PICKLE_BYTES):
                raise error.of_shard(path) from None
            length_bytes = min(4 * length_bytes, MAX_PICKLE_BYTES)
        except PickleError as error:
            raise error.of_shard(path) from None


def _content(data: bytes, fd: int, size_bytes: int) -> Content:
    """Read the pickles at the beginning of a file, and look where its storages lie."""
    _, at = load(data)
    protocol, at = load(data, at)
    system, at = load(data, at)
    is_little = system.get("little_endian") if type(system) is Dict else None
    if protocol != _PROTOCOL or type(is_little) is not bool:
        raise PickleError("an older checkpoint of torch has an unknown beginning", at)
    order = "little" if is_little else "big"
    storages = Storages()
    root, at = load(data, at, storages.readers)
    keys, at = load(data, at)
    starts: dict[str, int] = {}
    for key, (elements, length_bytes) in zip(_checked(keys, storages, at), _sizes(keys, storages, at)):
        counted = os.pread(fd, _COUNT_BYTES, at)
        starts[key] = at + _COUNT_BYTES
        at = starts[key] + length_bytes
        if len(counted) < _COUNT_BYTES or at > size_bytes:
            raise PickleError("an older checkpoint of torch ends in the middle of a storage", at)
        if int.from_bytes(counted, "little" if is_little else "big") != elements:
            raise PickleError("a storage of an older checkpoint has another size than its pickle says", starts[key])
    if at != size_bytes:
        raise PickleError("something follows the end of an older checkpoint of torch", at)
    return Content(root, starts, order != sys.byteorder)


def _checked(keys: Value, storages: Storages, at: int) -> list[str]:
    """Return the keys of all storages in the order in which they lie in the file."""
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise PickleError("an older checkpoint of torch has no list of its storages", at)
    named = storages.by_key.keys() | storages.unknown.keys()
    if len(keys) != len(named) or set(keys) != named:
        raise PickleError("the storages of an older checkpoint of torch are not those that its pickle names", at)
    return keys


def _sizes(keys: list[str], storages: Storages, at: int) -> Iterator[tuple[int, int]]:
    """Yield of each storage how many elements it has, and how many bytes."""
    for key in keys:
        storage = storages.by_key.get(key) or storages.unknown[key]
        if storage.unknown is None:
            yield storage.elements, storage.size_bytes
        elif storage.unknown in _PASSED_BYTES:
            yield storage.elements, storage.elements * _PASSED_BYTES[storage.unknown]
        else:
            raise PickleError("a storage is of a type that is not known here", at, storage.unknown[:200])
