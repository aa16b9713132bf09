"""What a native shard records besides its elements: identity, order of tensors, strings, and each tensor's box."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from h5py import h5d, h5s, h5t

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.hdf5 import attributes, elements, schema
from reshard_mpi.formats.hdf5.datasets import shape_of
from reshard_mpi.formats.hdf5.walking import Node, Walk
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.sharding.box import Box


class Description(NamedTuple):
    """A shard as a whole: its identity, the names of its tensors in order, its strings."""

    identity: ShardIdentity
    names: tuple[str, ...]
    strings: dict[str, str]


class Place(NamedTuple):
    """One tensor: its logical type, the shape of the whole tensor, and the box that this shard holds."""

    dtype: DType
    global_shape: tuple[int, ...]
    box: Box


def is_native(root: Node, path: str) -> bool:
    """Tell whether a file is a native shard. Raises ShardError if it is one of an unknown version."""
    if attributes.read_text(root.handle, "format") != schema.FORMAT:
        return False
    version = _number(root, "version", path)
    if version != schema.VERSION:
        raise ShardError(
            "a native HDF5 shard has a version that this program does not know",
            expected=f"version {schema.VERSION}",
            got=f"version {version}",
            where=path,
            remedy="use the reshard_mpi that wrote it, or a newer one",
        )
    return True


def describe(walk: Walk, root: Node, path: str) -> Description:
    """Return the description of a native shard. Raises ShardError if any of it is missing or damaged."""
    reserved = walk.child(root, schema.RESERVED)
    strategy = _read_bytes(walk.child(reserved, schema.STRATEGY), path).decode()
    names, strings = schema.contents(_read_bytes(walk.child(reserved, schema.CONTENTS), path))
    identity = ShardIdentity(_number(root, "rank", path), _number(root, "world_size", path), strategy)
    if identity.rank >= identity.world_size:
        raise ShardError(
            "the rank of a native HDF5 shard is not among its ranks",
            expected=f"less than {identity.world_size}",
            got=str(identity.rank),
            where=path,
        )
    return Description(identity, tuple(names), strings)


def place(handle: Any, stored: elements.Stored, shape: tuple[int, ...], where: str) -> Place:
    """Return what the attributes of a tensor's dataset say. Raises ShardError if they contradict its type or shape."""
    name = attributes.read_text(handle, "dtype")
    dtype = BY_NAME.get(name or "")
    if dtype is None or elements.stored_as(dtype) != stored.name:
        raise ShardError(
            "the attribute `dtype` of a native HDF5 shard is unknown, or does not fit the dataset",
            expected=f"a type stored as {stored.name}",
            got=repr(name),
            where=where,
        )
    global_shape = attributes.read_numbers(handle, "global_shape", where)
    start = attributes.read_numbers(handle, "offset", where)
    if not len(start) == len(global_shape) == len(shape) or any(
        low + length > whole for low, length, whole in zip(start, shape, global_shape)
    ):
        raise ShardError(
            "a tensor of a native HDF5 shard does not lie within the whole tensor",
            expected=f"shape {list(shape)} at {list(start)} within {list(global_shape)}",
            got="something outside",
            where=where,
        )
    stop = tuple(low + length for low, length in zip(start, shape))
    return Place(dtype, global_shape, Box(start, stop))


def _number(root: Node, name: str, path: str) -> int:
    numbers = attributes.read_numbers(root.handle, name, path)
    if len(numbers) != 1:
        raise ShardError(f"the attribute `{name}` of a native HDF5 shard is not one number", where=path)
    return numbers[0]


def _read_bytes(node: Node, path: str) -> bytes:
    where = schema.where(path, node.path)
    if not isinstance(node.handle, h5d.DatasetID):
        raise ShardError("an object of a native HDF5 shard is no dataset", where=where)
    shape = shape_of(node.handle, node.handle.get_create_plist(), where)
    stored = elements.recognise(node.handle.get_type())
    if len(shape) != 1 or stored is None or stored.name != "uint8" or shape[0] > files.MAX_TEXT_BYTES:
        raise ShardError(
            "a text of a native HDF5 shard is damaged or too long",
            expected=f"at most {files.MAX_TEXT_BYTES} bytes in one dimension",
            got=f"shape {list(shape)}",
            where=where,
        )
    content = np.zeros(shape, dtype=np.uint8)
    if content.size:
        node.handle.read(h5s.ALL, h5s.ALL, content, mtype=h5t.NATIVE_UINT8)
    return content.tobytes()
