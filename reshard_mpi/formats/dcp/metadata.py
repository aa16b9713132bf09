"""Read `.metadata`: tensors, objects, and the file and bytes of each (`read`, `without_flat_state`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp.bulk_metadata import (
    CHUNK,
    ITEM_KEY,
    ITEM_PLACE,
    MAX_NUMBER,
    PROPERTIES,
    TENSOR,
    Chunk,
    ItemKey,
    ItemPlace,
    States,
    TensorFacts,
)
from reshard_mpi.formats.dcp.file_layout import Keys
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.nest.nodes import MAX_DEPTH, Call, Dict, Global, Value
from reshard_mpi.formats.torch.pickle_hooks import (
    PLAIN_CALLS,
    PickleCutShortError,
    PickleError,
    PickleHooks,
    no_persistent_ids,
)
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME, SIZE, numbers
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.text import MIB, shortened

INDEX = ".metadata"
# An attribute that this program adds: the strings of the checkpoint, with the text of its nest.
OWN_STRINGS = "reshard_mpi_strings"
# An attribute that Megatron-Core up to 0.15 adds, and the class that 0.15 gives to the whole.
_MEGATRON = "mcore_data"
_WHOLE_SHAPE = "nd_reformulated_orig_global_shape"
_MEGATRON_ROOT = Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
_FLATTENED = "a range of flattened elements a rank, as the optimizer of Megatron-Core up to 0.15 has them: it is read"
_FLATTENED += " with --from megatron"
# An attribute that Megatron-Core adds as the last one: what every rank has planned to write, several times as long as
# all others. Nothing of it is needed, so it is cut away unread: a dictionary ends in its place, and the object with it.
# Where the same bytes stand elsewhere, the unpickler has something left on its stack, or storage_data is not yet there.
_PLANS = re.compile(rb"\x8c\x0fall_local_plans\x94?\]")
_PLANS_BYTES = 19
_END_OF_OBJECT = b"ub."
_READ_BYTES = MIB
# For 250,000 items the file has 48 MB, and its objects take this much memory by the count of the unpickler.
_MAX_BYTES = 48 * MIB
_BUDGET_BYTES = 144 * MIB
# What torch calls these classes; older releases keep them in other modules.
_TORCH = "torch."


class TensorChunks(NamedTuple):
    """A tensor as the metadata has it, and its chunks, each once."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    unreadable: str = ""  # in words, why no file can give its elements; empty if one can


class Metadata(NamedTuple):
    """The contents of `.metadata`."""

    # tensors by name, None for an object
    entries: Mapping[str, TensorChunks | None]
    items: Mapping[ItemKey, ItemPlace]  # where each chunk and object lies
    # the keys under which an entry lies in nested dictionaries and lists, where that is known
    paths: Mapping[str, Keys]
    strings: Mapping[str, str] | None  # those with which this program wrote the checkpoint, None if others did
    end: int  # the byte behind the metadata in its file
    # tensors in which Megatron-Core up to 0.15 has flattened each part, with the shapes of the whole ones
    flattened: Mapping[str, tuple[int, ...]] = {}
    left_out: tuple[str, ...] = ()  # in words, what is in no entry


# The state of an optimizer as Megatron-Core keeps it in memory, and how long its buckets are.
_OF_BUCKETS = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+"
    r"\.(?:gbuf_idx_\d+\.dtype_\(.*\)\.bucket_idx_\d+\..*|per_bucket_numel(?:_unpadded)?/.*)"
)


class _Unsound(Exception):
    """An error in the metadata, and the value that was met."""


def read(file: SourceFile) -> Metadata:
    """Read the metadata of a checkpoint, without executing it. Raises ShardError if it is not sound."""
    content, is_cut = _content(file)
    try:
        if not is_cut:
            return _metadata(*_loaded(content))
        try:
            return _without_plans(content, file)
        except (PickleError, _Unsound):
            # What has been cut away is something else than plans, or the file is damaged.
            if file.size_bytes > _MAX_BYTES:
                raise
        return _metadata(*_loaded(file.read_exactly(0, file.size_bytes)))
    except PickleError as error:
        raise ShardError(
            f"the metadata of a checkpoint cannot be read: {error.problem}",
            got=error.got,
            where=f"{file.path}, byte {error.at}",
            remedy=error.remedy,
        ) from None
    except _Unsound as error:
        raise ShardError(
            f"the metadata of a checkpoint is not sound: {error.args[0]}",
            got=str(error.args[1])[:300] if len(error.args) > 1 else "",
            where=file.path,
        ) from None


def _without_plans(content: bytes, file: SourceFile) -> Metadata:
    """Return what stands before Megatron's plans. Raises PickleError or _Unsound if that is no metadata."""
    metadata = _metadata(_loaded(content + _END_OF_OBJECT)[0], file.size_bytes)
    if file.read(file.size_bytes - len(_END_OF_OBJECT), len(_END_OF_OBJECT)) != _END_OF_OBJECT:
        raise PickleCutShortError(file.size_bytes)
    return metadata


def _loaded(content: bytes) -> tuple[Value, int]:
    hooks = PickleHooks(no_persistent_ids, {**PLAIN_CALLS, SIZE: numbers}, States().readers)
    return load(content, hooks=hooks, budget_bytes=_BUDGET_BYTES)


def _content(file: SourceFile) -> tuple[bytes, bool]:
    """Return the pickle, and whether it ends before Megatron's plans. Raises ShardError if it is too large."""
    content = bytearray()
    while len(content) <= _MAX_BYTES:
        more = file.read(len(content), _READ_BYTES)
        searched = max(len(content) - _PLANS_BYTES + 1, 0)
        content += more
        plans = _PLANS.search(content, searched)
        if plans is not None:
            return bytes(memoryview(content)[: plans.start()]), True
        if len(content) == file.size_bytes or not more:
            return bytes(content), False
    raise ShardError(
        "the metadata of a checkpoint is too large",
        expected=f"{_MAX_BYTES} bytes at most",
        got=str(file.size_bytes),
        where=file.path,
    )


def _metadata(root: Value, end: int) -> Metadata:
    is_of_megatron = type(root) is Call and root.function == _MEGATRON_ROOT and type(root.state) is Dict
    state = root.state if is_of_megatron else _state(root, "Metadata")
    flattened = {
        name: _numbers(facts.get(_WHOLE_SHAPE))
        for name, facts in _named(state.get(_MEGATRON) or Dict(), _MEGATRON)
        if type(facts) is Dict and facts.get(_WHOLE_SHAPE) is not None
    }
    entries: dict[str, TensorChunks | None] = {}
    alike: dict[int, TensorChunks] = {}
    for name, value in _named(state.get("state_dict_metadata"), "state_dict_metadata"):
        if type(value) is Call and value.function.name == "BytesStorageMetadata":
            entries[name] = None
            continue
        tensor = alike.get(id(value)) or alike.setdefault(id(value), _tensor(name, value))
        entries[name] = tensor if name else tensor._replace(unreadable="a tensor without a name")
    items: dict[ItemKey, ItemPlace] = {}
    for key_value, place_value in _pairs(state.get("storage_data"), "storage_data"):
        key, place = _key(key_value), _place(place_value)
        if key in items:
            raise _Unsound("an item is listed twice in storage_data", key)
        if key.name not in entries:
            raise _Unsound("storage_data has an item of what state_dict_metadata does not list", key.name)
        items[key] = place
    _require_same_items(entries, items)
    own = state.get(OWN_STRINGS)
    strings = None if own is None else dict(_named(own, OWN_STRINGS))
    if strings is not None and not all(type(text) is str for text in strings.values()):
        raise _Unsound(f"{OWN_STRINGS} is no dictionary of texts")
    paths = _paths(state.get("planner_data"), entries)
    return Metadata(entries, items, paths, strings, end, flattened)


def without_flat_state(metadata: Metadata) -> Metadata:
    """Return the metadata of a checkpoint of Megatron-Core as torch would have it: without the optimizer's flat state.

    Buckets of the optimizer are left out, which is said; tensors whose parts are flattened cannot be read.
    """
    buckets = [name for name in metadata.entries if _OF_BUCKETS.fullmatch(name)]
    if not buckets and not metadata.flattened:
        return metadata
    entries = {name: entry for name, entry in metadata.entries.items() if not _OF_BUCKETS.fullmatch(name)}
    for name in metadata.flattened:
        entry = entries.get(name)
        if entry is not None:
            entries[name] = entry._replace(unreadable=_FLATTENED)
    return metadata._replace(entries=entries, left_out=_left_out(buckets))


def _left_out(buckets: Sequence[str]) -> tuple[str, ...]:
    """Say which buckets, and which records of their division, are left out, if there are any."""
    if not buckets:
        return ()
    what = "the optimizer's state in flat buckets (dp_reshardable), which is read with --from megatron"
    return (f"{shortened(sorted(buckets), 2)}: {what}",)


def _require_same_items(entries: Mapping[str, TensorChunks | None], items: Mapping[ItemKey, ItemPlace]) -> None:
    """Raise _Unsound unless each chunk and each object has an item, and each item is of one of them."""
    listed = 0
    for key in _keys(entries):
        listed += 1
        if key not in items:
            raise _Unsound("storage_data does not say where a chunk or object lies", key)
    if listed != len(items):
        every = set(_keys(entries))
        key = next(key for key in items if key not in every)
        raise _Unsound("storage_data has a chunk that state_dict_metadata does not list", key)


def _keys(entries: Mapping[str, TensorChunks | None]) -> Iterator[ItemKey]:
    """Yield the keys of all items that there should be, each once."""
    for name, tensor in entries.items():
        if tensor is None:
            yield ItemKey(name, None)
        else:
            yield from (ItemKey(name, chunk.offsets) for chunk in tensor.chunks)


def _tensor(name: str, value: Value) -> TensorChunks:
    """Return a tensor of the metadata. Raises _Unsound if there can be none like it, or this program reads none."""
    dtype, shape, chunks = value if isinstance(value, TensorFacts) else _facts(value)
    torch_dtype = BY_TORCH_NAME.get(dtype.name) if dtype.module == "torch" else None
    unreadable = "" if torch_dtype is not None else f"elements of a type that is not known here, {dtype}"[:200]
    if len(shape) > structure.MAX_DIMENSIONS:
        raise _Unsound("a tensor has too many dimensions", f"{name!r}, {len(shape)}")
    listed: dict[tuple[int, ...], Chunk] = {}
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise _Unsound("a chunk has other dimensions than its tensor", f"{name!r}, {chunk} of {list(shape)}")
        if any(low + length > whole for low, length, whole in zip(chunk.offsets, chunk.sizes, shape)):
            raise _Unsound("a chunk does not lie in its tensor", f"{name!r}, {chunk} of {list(shape)}")
        if listed.setdefault(chunk.offsets, chunk) != chunk:
            raise _Unsound("a tensor has two chunks of different sizes at one place", f"{name!r}, {chunk}")
    # Of an unknown type nothing is read; one byte an element stands for its size.
    return TensorChunks(torch_dtype or DType(dtype.name, 1, 1, ""), shape, tuple(listed.values()), unreadable)


def _facts(value: Value) -> TensorFacts:
    """Return the facts of a tensor that was read opcode by opcode."""
    state = _state(value, TENSOR.name)
    properties, chunks = state.get("properties"), state.get("chunks")
    is_known = type(properties) is Call and properties.function.name == PROPERTIES.name
    dtype = properties.state[0] if is_known and type(properties.state) is tuple and properties.state else None
    if type(dtype) is not Global:
        raise _Unsound("a tensor has no properties with a type")
    if type(chunks) is not list:
        raise _Unsound("a tensor has no list of chunks")
    return TensorFacts(dtype, _numbers(state.get("size")), tuple(map(_chunk, chunks)))


def _chunk(value: Value) -> Chunk:
    if isinstance(value, Chunk):
        return value
    state = _state(value, CHUNK.name)
    return Chunk(_numbers(state.get("offsets")), _numbers(state.get("sizes")))


def _key(value: Value) -> ItemKey:
    if isinstance(value, ItemKey):
        return value
    state = _state(value, ITEM_KEY.name)
    name, offsets = state.get("fqn"), state.get("offset")
    if type(name) is not str:
        raise _Unsound("an item of storage_data has no name", name)
    return ItemKey(name, None if offsets is None else _numbers(offsets))


def _place(value: Value) -> ItemPlace:
    if isinstance(value, ItemPlace):
        file, offset_bytes, length_bytes = value
    else:
        state = _state(value, ITEM_PLACE.name)
        if state.get("transform_descriptors"):
            raise _Unsound("an item is compressed or otherwise transformed", state.get("transform_descriptors"))
        file, offset_bytes, length_bytes = (state.get(name) for name in ("relative_path", "offset", "length"))
    if type(offset_bytes) is not int or type(length_bytes) is not int or min(offset_bytes, length_bytes) < 0:
        raise _Unsound("an item has no place in its file", value)
    if offset_bytes + length_bytes >= MAX_NUMBER:
        raise _Unsound("an item lies where no file can have it", value)
    if type(file) is not str or not structure.is_file_name(file):
        raise _Unsound("an item is to lie in a file that is not beside the metadata", repr(file))
    return ItemPlace(file, offset_bytes, length_bytes)


def _paths(value: Value, entries: Mapping[str, TensorChunks | None]) -> Mapping[str, Keys]:
    """Return the paths of entries, as far as the metadata has paths for these names."""
    if type(value) is not Dict:
        return {}
    keys_of: dict[str, Keys] = {}
    for name, path in value.pairs():
        if type(name) is not str or type(path) is not tuple or not 0 < len(path) < MAX_DEPTH:
            continue
        if name in entries and all(type(key) in (str, int) for key in path) and ".".join(map(str, path)) == name:
            keys_of[name] = path
    return keys_of


def _named(value: Value, what: str) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a dictionary whose keys are names."""
    names: set[str] = set()
    for name, entry in _pairs(value, what):
        if type(name) is not str or len(name.encode("utf-8", "surrogatepass")) > structure.MAX_NAME_BYTES:
            raise _Unsound(f"{what} has a key that is no name, or too long a one", repr(name)[:100])
        if name in names:
            raise _Unsound(f"{what} has a name twice", repr(name))
        names.add(name)
        yield name, entry
    if len(names) > structure.MAX_TENSORS:
        raise _Unsound(f"{what} has too many names", f"{len(names)}, more than {structure.MAX_TENSORS}")


def _pairs(value: Value, what: str) -> Iterator[tuple[Value, Value]]:
    if type(value) is not Dict:
        raise _Unsound(f"it has no dictionary {what}")
    return value.pairs()


def _numbers(value: Value) -> tuple[int, ...]:
    try:
        read = numbers(value)
    except ValueError as error:
        raise _Unsound(str(error)) from None
    if any(number >= MAX_NUMBER for number in read):
        raise _Unsound("a size is impossibly large", read)
    return read


def _state(value: Value, class_name: str) -> Dict:
    """Return the attributes of an object of a class of torch."""
    if type(value) is not Call or value.function.name != class_name or not value.function.module.startswith(_TORCH):
        raise _Unsound(f"no {class_name} where one should be", str(getattr(value, "function", type(value).__name__)))
    if type(value.state) is not Dict:
        raise _Unsound(f"a {class_name} has no attributes")
    return value.state
