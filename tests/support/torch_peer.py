"""Files of torch by other means than the format under test: zipfile, and the standard pickler with stand-ins for torch.

The stand-ins have the names under which torch's own objects are pickled; torch itself is not needed.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
UNTYPED = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
CANNOT_HOLD = frozenset(BY_NAME) - frozenset(STORAGES) - frozenset(UNTYPED)
_TYPES = {storage: name for name, storage in STORAGES.items()}


class Stored(NamedTuple):
    """A storage: its class, key, number of elements and bytes."""

    kind: type
    key: str
    elements: int
    content: bytes


class Tensor:
    """A tensor as it is pickled: what makes it, of what."""

    def __init__(self, make: Any, *args: Any) -> None:
        self.make = make
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.make, self.args


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for member_name, member in members.items():
        if not isinstance(member, types.ModuleType):
            member.__module__, member.__qualname__, member.__name__ = name, member_name, member_name
        setattr(module, member_name, member)
    return module


class _Element:
    """An element type, which is pickled by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name


def _stand_ins() -> dict[str, types.ModuleType]:
    def function(name: str) -> Any:
        def made(*args: Any) -> Any:
            return Tensor(made, *args)

        return made

    made_by = ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor", "meta_tensor_no_storage")
    functions = {f"_rebuild_{name}": function(f"_rebuild_{name}") for name in made_by}
    utils = _module("torch._utils", **functions)
    storage = _module("torch.storage", UntypedStorage=type("UntypedStorage", (), {}))
    elements = {name: _Element(name) for name in (*STORAGES, *UNTYPED)}
    torch = types.ModuleType("torch")
    for name in _TYPES:
        made = type(name, (), {})
        made.__module__ = "torch"
        setattr(torch, name, made)
    for name, element in elements.items():
        element.__module__ = "torch"  # type: ignore[attr-defined]
        setattr(torch, name, element)
    torch._utils, torch.storage = utils, storage  # type: ignore[attr-defined]
    return {"torch": torch, "torch._utils": utils, "torch.storage": storage}


STAND_INS = _stand_ins()


@contextlib.contextmanager
def in_place(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Have these modules imported, in place of any of their names."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.stored: dict[str, bytes] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Stored):
            return None
        self.stored[value.key] = value.content
        return "storage", value.kind, value.key, "cpu", value.elements


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, contents: dict[str, bytes]) -> None:
        super().__init__(stream)
        self._contents = contents

    def find_class(self, module: str, name: str) -> Any:
        if module in STAND_INS:
            return getattr(STAND_INS[module], name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise AssertionError(f"{module}.{name} is not expected here")

    def persistent_load(self, pid: Any) -> Stored:
        word, kind, key, location, elements = pid
        assert (word, location) == ("storage", "cpu")
        return Stored(kind, key, elements, self._contents[key])


def tensor(sample: SampleTensor, key: str) -> Tensor:
    """Return a tensor of a storage of its own."""
    strides = [math.prod(max(length, 1) for length in sample.shape[at + 1 :]) for at in range(len(sample.shape))]
    elements = math.prod(sample.shape)
    torch, utils, storage = (STAND_INS[name] for name in ("torch", "torch._utils", "torch.storage"))
    if sample.dtype.name in STORAGES:
        stored = Stored(getattr(torch, STORAGES[sample.dtype.name]), key, elements, sample.content)
        return Tensor(utils._rebuild_tensor_v2, stored, 0, sample.shape, tuple(strides), False, OrderedDict())
    stored = Stored(storage.UntypedStorage, key, len(sample.content), sample.content)
    element = getattr(torch, sample.dtype.name)
    return Tensor(utils._rebuild_tensor_v3, stored, 0, sample.shape, tuple(strides), False, OrderedDict(), element)


def dumps(value: Any, *, protocol: int = 2) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickle of a value with tensors in it, and the bytes of its storages by key."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol)
    with in_place(STAND_INS):
        pickler.dump(value)
    return stream.getvalue(), pickler.stored


def archive(path: Path, members: dict[str, bytes], *, top: str = "net", compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive of these members."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, content in members.items():
            made.writestr(f"{top}/{name}", content)


def save(path: Path, value: Any, *, protocol: int = 2, **further: bytes) -> None:
    """Write a value with tensors in it as torch.save does, but for the padding. further: more members."""
    data, stored = dumps(value, protocol=protocol)
    storages = {f"data/{key}": content for key, content in stored.items()}
    archive(path, {"data.pkl": data, "byteorder": sys.byteorder.encode(), **storages, "version": b"3\n", **further})


def without_sums(path: Path) -> None:
    """Take the checksums out of an archive, as torch writes it after `set_crc32_options(False)`."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as opened:
        entry = opened.start_dir
        for member in opened.infolist():
            content[member.header_offset + 14 : member.header_offset + 18] = bytes(4)
            content[entry + 16 : entry + 20] = bytes(4)
            entry += 46 + sum(struct.unpack("<3H", content[entry + 28 : entry + 34]))
    path.write_bytes(content)


def write(path: Path, contents: ShardContents) -> None:
    """Write a shard of these contents."""
    tensors = {name: tensor(sample, str(at)) for at, (name, sample) in enumerate(contents.tensors.items())}
    save(path, tensors | dict(contents.strings))


def load(path: Path, *, has_sums: bool = True) -> Any:
    """Return what a file holds, with `Tensor`s in it. has_sums: its payloads have checksums."""
    with zipfile.ZipFile(path) as opened:
        for member in opened.infolist() if not has_sums else ():
            member.CRC = None  # type: ignore[assignment]
        assert opened.testzip() is None
        top = next(name for name in opened.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
        contents = {
            name.removeprefix(f"{top}data/"): opened.read(name)
            for name in opened.namelist()
            if name.startswith(f"{top}data/")
        }
        assert opened.read(f"{top}byteorder") == sys.byteorder.encode()
        return _Unpickler(io.BytesIO(opened.read(f"{top}data.pkl")), contents).load()


def sample_of(name: str, made: Tensor) -> SampleTensor:
    """Return a tensor that lies row-major in a storage of its own."""
    stored, offset, shape, strides, grad, hooks, *rest = made.args
    assert (offset, grad, hooks) == (0, False, OrderedDict())
    assert strides == tuple(math.prod(max(length, 1) for length in shape[at + 1 :]) for at in range(len(shape)))
    dtype = BY_NAME[rest[0].name if rest else _TYPES[stored.kind.__name__]]
    assert stored.elements == (len(stored.content) if rest else math.prod(shape))
    return SampleTensor(name, dtype, tuple(shape), stored.content)


def read(path: Path) -> ShardContents:
    """Read a shard that is a dictionary of tensors and texts."""
    loaded = load(path)
    tensors = [sample_of(name, value) for name, value in loaded.items() if isinstance(value, Tensor)]
    return ShardContents.of(tensors, {name: value for name, value in loaded.items() if not isinstance(value, Tensor)})
