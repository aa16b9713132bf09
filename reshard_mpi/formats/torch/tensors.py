"""Turn what torch's pickles name into records: storages, tensors, DTensors (`StoredTensor`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Location, StridedView
from reshard_mpi.formats.nest.nodes import Call, Dict, Global, Unreadable, Value
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.formats.torch.pickle_hooks import PLAIN_CALLS

# Types that have a class of storages of their own; the elements of others lie in untyped ones.
_STORAGE_NAMES = {
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
_UNTYPED = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")

STORAGE_OF: dict[DType, str] = {BY_NAME[name]: storage for name, storage in _STORAGE_NAMES.items()}
BY_STORAGE: dict[str, DType] = {storage: dtype for dtype, storage in STORAGE_OF.items()}
BY_TORCH_NAME: dict[str, DType] = {name: BY_NAME[name] for name in (*_STORAGE_NAMES, *_UNTYPED)}


class Storage(NamedTuple):
    """A run of elements in a file, which several tensors may share."""

    key: str  # its name
    dtype: DType | None  # None where it is untyped, or of a type that this program does not know (`unknown`)
    unknown: str | None
    elements: int  # how many there are, or bytes if it is untyped

    @property
    def size_bytes(self) -> int:
        return self.elements * (1 if self.dtype is None else self.dtype.itemsize_bytes)


SIZE = Global("torch", "Size")
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_DTENSORS = frozenset(
    Global(module, "DTensor")
    for module in ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._tensor.api")
)
_PLAIN_CLASSES = frozenset((Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")))
# What torch itself gives to buffers.
_OWN_ATTRIBUTES = ("persistent", "_is_buffer")
_MAX_BYTES = 1 << 62
# The sixth part of a persistent id in files of the older layout.
_NO_VIEWS: tuple[list[None], ...] = ([], [None])


class StoredTensor(NamedTuple):
    """A tensor in a storage: offset, shape, and strides, counted in elements."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    besides: str = ""  # what else it is in its file, which is not kept: a class of its own, attributes

    @property
    def is_row_major(self) -> bool:
        """Whether its elements lie one after another, in the order in which they are counted."""
        run = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides)):
            if length > 1 and stride != run:
                return False
            run *= length
        return True


def place_of(path: str, stored: StoredTensor, start: int, swapped: bool) -> Location | None:
    """Return where a tensor is that is not one run of bytes as this machine has them; None if it is."""
    itemsize_bytes = stored.dtype.itemsize_bytes
    swapped = swapped and stored.dtype.part_bytes > 1
    if 0 in stored.shape or (stored.is_row_major and not swapped):
        return None
    if not stored.is_row_major:
        return StridedView(path, start, tuple(step * itemsize_bytes for step in stored.strides), swapped)
    size_bytes = TensorType(stored.dtype, stored.shape).size_bytes
    return ByteRanges((ByteRange(path, start, size_bytes),), swapped)


class DistributedTensor(NamedTuple):
    """A part of a DTensor with what its file says of the whole: `spec` is the object that has mesh and placements."""

    local: StoredTensor
    spec: Call


def is_tensor(value: Value) -> bool:
    return type(value) is StoredTensor or type(value) is DistributedTensor


def named_storage(persistent_id: Value) -> Storage:
    """Return the storage that a persistent id names. Raises ValueError if it is of another kind."""
    if type(persistent_id) is not tuple or len(persistent_id) not in (5, 6):
        raise ValueError("a persistent id that is no storage")
    word, kind, key, _, count, *view = persistent_id
    if word != "storage" or view not in _NO_VIEWS:
        raise ValueError("a storage that is a view of another")
    if type(kind) is not Global or type(key) is not str or type(count) is not int or count < 0:
        raise ValueError("a storage without class, key or size")
    dtype = BY_STORAGE.get(kind.name)
    is_known = dtype is not None or kind.name == "UntypedStorage"
    return Storage(key, dtype, None if is_known else kind.name, count)


def _tensor(
    stored: Value,
    offset: Value,
    shape: Value,
    strides: Value,
    _grad: Value = None,
    _hooks: Value = None,
    bits: Value = None,
) -> Value:
    if type(stored) is not Storage:
        raise ValueError("a tensor without storage")
    if stored.dtype is None:
        return Unreadable(f"a tensor of an unknown type ({stored.unknown or 'an untyped storage'})"[:200])
    return of_type(stored, stored.dtype, offset, shape, strides, bits)


def _untyped_tensor(
    stored: Value,
    offset: Value,
    shape: Value,
    strides: Value,
    _grad: Value,
    _hooks: Value,
    kind: Value,
    bits: Value = None,
) -> Value:
    if type(stored) is not Storage or type(kind) is not Global:
        raise ValueError("a tensor without storage or type")
    dtype = BY_TORCH_NAME.get(kind.name) if kind.module == "torch" else None
    if dtype is None or stored.unknown is not None:
        return Unreadable(f"a tensor of an unknown type ({stored.unknown or kind})"[:200])
    return of_type(stored, dtype, offset, shape, strides, bits)


def of_type(stored: Storage, dtype: DType, offset: Value, shape: Value, strides: Value, bits: Value) -> Value:
    """Return a tensor whose elements all lie within its storage. Raises ValueError if they do not."""
    lengths, steps = numbers(shape), numbers(strides)
    if type(offset) is not int or offset < 0 or len(lengths) != len(steps):
        raise ValueError("a tensor without a sound place in its storage")
    if len(lengths) > structure.MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(lengths)} dimensions, more than {structure.MAX_DIMENSIONS}")
    last, size = offset, 1
    for length, step in zip(lengths, steps):
        last += (length - 1) * step
        size *= length or 1
    if dtype.itemsize_bytes * size >= _MAX_BYTES:
        raise ValueError("a tensor of an impossibly large shape")
    if (last + 1) * dtype.itemsize_bytes > stored.size_bytes and 0 not in lengths:
        raise ValueError(f"a tensor that runs past the end of its storage {stored.key[:60]!r}")
    if bits is not None and (type(bits) is not Dict or any(value is not False for value in bits.flat[1::2])):
        return Unreadable("a conjugated or negated view: save tensor.resolve_conj().resolve_neg()")
    return StoredTensor(stored, dtype, offset, lengths, steps)


def numbers(value: Value) -> tuple[int, ...]:
    """Return the numbers of a size or of strides, none negative. Raises ValueError for anything else."""
    if type(value) is Call and value.function == SIZE and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not tuple and type(value) is not list:
        raise ValueError("a size that is no tuple")
    for number in value:
        if type(number) is not int or number < 0:
            raise ValueError("a size or stride that is no number, or less than 0")
    return tuple(value)


def _parameter(tensor: Value, *_: Value) -> Value:
    """Return the tensor that a parameter is made of."""
    return tensor


def _parameter_with_state(tensor: Value, _grad: Value, _hooks: Value, state: Value) -> Value:
    """Return the tensor that a parameter with attributes is made of."""
    return _with(tensor, _attributes(state))


def _with(tensor: Value, *besides: str) -> Value:
    """Return a tensor with further facts about it."""
    if type(tensor) is not StoredTensor:
        return tensor
    return tensor._replace(besides=", ".join(filter(None, (tensor.besides, *besides)))[:200])


def _attributes(state: Value) -> str:
    """Say which attributes an object has; nothing if it has none."""
    parts = state if type(state) is tuple else (state,)  # in a dictionary, and in slots
    names = [str(name) for own in parts if type(own) is Dict for name in own.flat[::2] if name not in _OWN_ATTRIBUTES]
    return f"its attributes {', '.join(names)}" if names else ""


def _from_type(rebuild: Value, kind: Value, args: Value, state: Value) -> Value:
    """Unwrap a tensor subclass: return its plain tensor, noting the class that is dropped."""
    if type(rebuild) is not Global or type(kind) is not Global or type(args) is not tuple:
        raise ValueError("a tensor of no class")
    if rebuild == _WRAPPER:
        return _distributed(kind, state)
    if rebuild == _FROM_TYPE:
        raise ValueError("a tensor of a class within another")
    maker = CALLS.get(rebuild)
    if maker is None:
        return Unreadable(f"a tensor made by {rebuild}"[:200])
    return _with(maker(*args), "" if kind in _PLAIN_CLASSES else f"its class {kind}", _attributes(state))


def _distributed(kind: Global, state: Value) -> Value:
    if type(state) is tuple and len(state) == 2:
        state = state[1]  # attributes in a dictionary, which is empty, and in slots
    if kind not in _DTENSORS or type(state) is not Dict:
        return Unreadable(f"a tensor of {kind}"[:200])
    local, spec = state.get("_local_tensor"), state.get("_spec")
    if type(local) is not StoredTensor or type(spec) is not Call:
        return Unreadable("a DTensor without elements of its own")
    return DistributedTensor(local, spec)


def _unreadable(what: str) -> Callable[..., Value]:
    return lambda *_: Unreadable(what)


CALLS: Mapping[Global, Callable[..., Value]] = {
    **PLAIN_CALLS,
    REBUILD: _tensor,
    REBUILD_UNTYPED: _untyped_tensor,
    Global("torch._utils", "_rebuild_tensor"): _tensor,
    Global("torch._utils", "_rebuild_parameter"): _parameter,
    Global("torch._utils", "_rebuild_parameter_with_state"): _parameter_with_state,
    _FROM_TYPE: _from_type,
    Global("torch._utils", "_rebuild_sparse_tensor"): _unreadable("a sparse tensor"),
    Global("torch._utils", "_rebuild_sparse_csr_tensor"): _unreadable("a sparse tensor"),
    Global("torch._utils", "_rebuild_nested_tensor"): _unreadable("a nested tensor"),
    Global("torch._utils", "_rebuild_qtensor"): _unreadable("a quantized tensor"),
    Global("torch._utils", "_rebuild_meta_tensor_no_storage"): lambda *_: Unreadable(
        "a tensor without elements (meta)", is_empty=True
    ),
}
