"""Read and write the footer that lists the tensors of our `.distcp` files (`read`).

What a file says of itself behind its items: which tensors they are. torch does not look there.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.stores import SourceFile
from reshard_mpi.formats import files
from reshard_mpi.formats.dcp.bulk_metadata import MAX_NUMBER
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.formats.torch.pickle_hooks import PickleError
from reshard_mpi.formats.torch.pickler import dumps
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME
from reshard_mpi.formats.torch.tensors import numbers as numbers_of
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

_MARK = b"rmpidcp1"
# The mark, how long the record before it is, and its CRC-32.
_END = struct.Struct("<8sQI")
_MAX_BYTES = 48 * MIB
# Of a tensor: its number of a kind and its place, the opcodes of its name. Of a kind: its type and numbers.
_TENSOR_BYTES, _KIND_BYTES, _NUMBER_BYTES = 12 + 8, 64, 12
# No character of a string takes more.
_CHARACTER_BYTES = 4


class Footer(NamedTuple):
    """The tensors of a file and where their payloads lie, its strings, and where the items end."""

    tensors: TensorTable
    strings: dict[str, str]
    end: int


def record_of(tensors: TensorTable, strings: dict[str, str]) -> bytes:
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
            *("strings", Dict([part for pair in strings.items() for part in pair])),
        ]
    )
    content = dumps(record)
    return content + _END.pack(_MARK, len(content), crc32(content))


def size_at_most_bytes(names: list[str], dimensions: list[int], strings: dict[str, str]) -> int:
    """Return the largest size of the footer. dimensions: number of dimensions of each kind of tensor."""
    of_names = sum(_CHARACTER_BYTES * len(name) + 2 * _TENSOR_BYTES for name in names)
    of_kinds = sum(_KIND_BYTES + 3 * _NUMBER_BYTES * count for count in dimensions)
    of_strings = sum(_CHARACTER_BYTES * (len(name) + len(text)) + 32 for name, text in strings.items())
    return of_names + of_kinds + of_strings + 512 + _END.size


def is_there(file: SourceFile) -> bool:
    """Tell whether a file ends as those do that this program has written."""
    return file.read(max(0, file.size_bytes - _END.size), len(_MARK)) == _MARK


def read(file: SourceFile) -> Footer:
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
    if type(root) is not Dict:
        raise ValueError
    kinds, names, strings = root.get("kinds"), root.get("names"), root.get("strings")
    if type(kinds) is not list or type(names) is not list or type(strings) is not Dict:
        raise ValueError
    kind_of, starts = array("I", _bytes(root.get("kind_of"))), array("q", _bytes(root.get("starts")))
    if not len(names) == len(kind_of) == len(starts) <= files.MAX_TENSORS:
        raise ValueError
    if not all(type(text) is str for text in (*names, *strings.flat)) or len(set(names)) < len(names):
        raise ValueError
    tensors = TensorTable(path)
    numbers = [tensors.kind(_kind(kind)) for kind in kinds]
    for name, kind, start in zip(names, _little_endian(kind_of), _little_endian(starts)):
        tensors.add(name, numbers[kind], start)
    return Footer(tensors, dict(strings.pairs()), end)


def _kind(value: Value) -> TensorType:
    """Return the kind that a record describes; raises as `_contents` does."""
    if type(value) is not tuple or len(value) != 4 or type(value[0]) is not str:
        raise ValueError
    dtype, (whole, low, high) = BY_TORCH_NAME[value[0]], map(numbers_of, value[1:])
    box = Box(low, high)
    kind = TensorType(dtype, box.shape, box, whole)
    if box.ndim > files.MAX_DIMENSIONS or not Box.whole(whole).contains(box) or kind.size_bytes >= MAX_NUMBER:
        raise ValueError
    return kind


def _bytes(text: Value) -> bytes:
    if type(text) is not str:
        raise ValueError
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
