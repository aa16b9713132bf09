"""Write a tree and its tensors as a pickle that torch loads with `weights_only=True` (`dumps`)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.formats.nest import nodes, rebuild_tree
from reshard_mpi.formats.nest.nodes import ORDERED_DICT, Call, Dict, Global, Value
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.formats.torch.pickle_hooks import BYTES, CODECS_ENCODE, OLD_MODULES, OLD_NAMES
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME, REBUILD, REBUILD_UNTYPED, STORAGE_OF

# As many items at a time as the standard pickler gives to a dictionary.
_BATCH = 1000
_OLD_MODULES = {new: old for old, new in OLD_MODULES.items()}
_OLD_NAMES = {new: old for old, new in OLD_NAMES.items()}
_FLOAT = struct.Struct(">d")
_UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")


class WrittenTensor(NamedTuple):
    """A tensor in a tree that is written: the key of its storage, in which it lies alone, row-major."""

    key: str
    kind: TensorType


def dumps(root: Value) -> bytes:
    """Return the pickle of a tree whose tensors are `WrittenTensor`s."""
    pickler = _Pickler()
    pickler.write(root)
    return b"\x80\x02" + b"".join(pickler.parts) + b"."


def require_types(specs: Specs, holder: str, path: str) -> None:
    """Raise TargetError for the first tensor of a type that torch has not. holder: what cannot hold it, in words."""
    unknown = {number for number, kind in enumerate(specs.kinds) if kind.dtype.name not in BY_TORCH_NAME}
    if unknown:
        name, dtype, *_ = next(specs[index] for index, kind in enumerate(specs.kind_ids) if kind in unknown)
        raise TargetError(
            f"{holder} cannot hold {name!r}",
            expected=f"one of {', '.join(BY_TORCH_NAME)}",
            got=str(dtype),
            where=path,
            remedy=f"choose a format that holds {dtype}: --to ckpt or --to hdf5",
        )


def rebuilt(leaves: Mapping[str, Value], strings: Mapping[str, str], path: str) -> Value:
    """Return the tree of a target's tensors and strings. Raises TargetError if the strings do not fit the tensors."""
    try:
        return rebuild_tree.rebuild(leaves, strings)
    except nodes.NestError as error:
        raise TargetError(
            f"the nested dictionaries of the source cannot be made again: {error.problem}",
            got=error.got,
            where=path,
            remedy="choose another format with --to, which keeps the tensors by their names",
        ) from None


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements apart neighbours are in each dimension, as torch counts it for empty tensors too."""
    strides, run = [], 1
    for length in reversed(shape):
        strides.append(run)
        run *= max(length, 1)
    return tuple(reversed(strides))


class _Pickler:
    """A pickle while it is written. parts: its bytes so far."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Hashable, bytes] = {}
        # What stands before and behind the key of a tensor's storage, where one of its kind has been written.
        self._around: dict[TensorType, tuple[bytes, bytes]] = {}

    def write(self, value: Value) -> None:
        """Write any value of a tree."""
        put, kind = self.parts.append, type(value)
        if kind is WrittenTensor:
            self._tensor(value)
        elif kind is str:
            put(text_opcode(value))
        elif kind is Dict:
            put(b"}")
            self._batches(value.flat, b"u", 2)
        elif kind is list:
            put(b"]")
            self._batches(value, b"e", 1)
        elif kind is tuple:
            self._tuple(value)
        elif kind is Call:
            self._call(value)
        elif kind is Global:
            self._global(value)
        elif value is None:
            put(b"N")
        elif kind is bool:
            put(b"\x88" if value else b"\x89")
        elif kind is int:
            put(whole_opcode(value))
        elif kind is float:
            put(b"G" + _FLOAT.pack(value))
        elif kind is bytes:
            self._bytes(value)
        else:
            raise TypeError(f"{kind.__name__} is no part of a tree")

    def _shared(self, key: Hashable, write: Callable[[], object]) -> None:
        """Write an object that is the same wherever it occurs; from the second time on it is taken from the memo."""
        reference = self._memo.get(key)
        if reference is not None:
            self.parts.append(reference)
            return
        write()
        put, self._memo[key] = memo_opcodes(len(self._memo))
        self.parts.append(put)

    def _global(self, name: Global) -> None:
        module, old_name = _OLD_NAMES.get(name) or (_OLD_MODULES.get(name.module, name.module), name.name)
        self._shared(name, lambda: self.parts.append(f"c{module}\n{old_name}\n".encode()))

    def _tuple(self, values: tuple[Value, ...]) -> None:
        if not values:
            self.parts.append(b")")
            return
        if len(values) > 3:
            self.parts.append(b"(")
        for value in values:
            self.write(value)
        self.parts.append((b"\x85", b"\x86", b"\x87", b"t")[min(len(values), 4) - 1])

    def _batches(self, values: list[Value], opcode: bytes, width: int) -> None:
        """Add values to the object on the stack by `opcode`, in batches of the size that torch's pickler uses."""
        for start in range(0, len(values), _BATCH * width):
            self.parts.append(b"(")
            for value in values[start : start + _BATCH * width]:
                self.write(value)
            self.parts.append(opcode)

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._tuple(value.args)
        self.parts.append(b"\x81" if value.is_new else b"R")
        if value.items is not None:
            self._batches(value.items, b"e", 1)
        if value.flat is not None:
            self._batches(value.flat, b"u", 2)
        if value.state is not None:
            self.write(value.state)
            self.parts.append(b"b")

    def _bytes(self, content: bytes) -> None:
        args = content.decode("latin-1"), "latin1"
        self._call(Call(CODECS_ENCODE, args) if content else Call(BYTES, ()))

    def _tensor(self, leaf: WrittenTensor) -> None:
        around = self._around.get(leaf.kind)
        if around is not None:
            self.parts += (around[0], text_opcode(leaf.key), around[1])
            return
        self._before_key(leaf.kind)
        self.parts.append(text_opcode(leaf.key))
        self._behind_key(leaf.kind)
        # All that these name is in the memo now.
        self._around[leaf.kind] = (self._apart(self._before_key, leaf.kind), self._apart(self._behind_key, leaf.kind))

    def _apart(self, write: Callable[[TensorType], object], kind: TensorType) -> bytes:
        parts, self.parts = self.parts, []
        write(kind)
        written, self.parts = b"".join(self.parts), parts
        return written

    def _before_key(self, kind: TensorType) -> None:
        storage = STORAGE_OF.get(kind.dtype)
        self._global(REBUILD if storage else REBUILD_UNTYPED)
        self.parts.append(b"((")
        self._shared("storage", lambda: self.parts.append(text_opcode("storage")))
        self._global(Global("torch", storage) if storage else _UNTYPED_STORAGE)

    def _behind_key(self, kind: TensorType) -> None:
        shape, is_typed = kind.shape, kind.dtype in STORAGE_OF
        self._shared("cpu", lambda: self.parts.append(text_opcode("cpu")))
        count = kind.size_bytes // kind.dtype.itemsize_bytes if is_typed else kind.size_bytes
        self.parts.append(whole_opcode(count) + b"tQK\x00")
        self._shared(("size", shape), lambda: self._tuple(shape))
        self._shared(("strides", shape), lambda: self._tuple(row_major_strides(shape)))
        self.parts.append(b"\x89")
        self._call(Call(ORDERED_DICT, ()))
        if not is_typed:
            self._global(Global("torch", kind.dtype.name))
        self.parts.append(b"tR")


def memo_opcodes(number: int) -> tuple[bytes, bytes]:
    """Return what puts the last object into the memo by a number, and what takes it from there."""
    if number < 256:
        return b"q%c" % number, b"h%c" % number
    wide = number.to_bytes(4, "little")
    return b"r" + wide, b"j" + wide


def text_opcode(text: str) -> bytes:
    """Return what puts a text on the stack."""
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + len(content).to_bytes(4, "little") + content


def whole_opcode(number: int) -> bytes:
    """Return what puts a whole number on the stack, in the shortest form."""
    if 0 <= number < 1 << 8:
        return b"K%c" % number
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -1 << 31 <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    length_bytes = number.bit_length() // 8 + 1
    return b"\x8a%c" % length_bytes + number.to_bytes(length_bytes, "little", signed=True)
