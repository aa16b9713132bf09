"""Checkpoints in a zip archive, as torch 1.6 and later save them."""

from __future__ import annotations

import os
import sys

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.nest.trees import LESS, Value
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.content import MAX_PICKLE_BYTES, Content, Storages
from reshard_mpi.formats.torch.pickles import BUDGET_BYTES, load
from reshard_mpi.formats.torch.readers import PickleError
from reshard_mpi.units import MIB

# What this program adds to archives whose names alone do not tell how it met them (`writing.py`).
OWN_RECORD = ".reshard_mpi"
_MAX_OWN_BYTES = 24 * MIB
_NEWEST_VERSION = 10
_MAX_SMALL_BYTES = 64


def of_archive(
    fd: int,
    path: str,
    size_bytes: int,
    first_byte: int = 0,
    budget_bytes: int = BUDGET_BYTES,
    prefix: str = "",
) -> Content:
    """Read the content of an archive, which begins at `first_byte` of its file.

    budget_bytes: what its objects may take of memory. prefix: of the keys of storages in what is returned.
    Raises ShardError if it is not sound, or no checkpoint.
    """
    members = archive.members(fd, path, size_bytes, first_byte)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ShardError(
            "an archive is no checkpoint of torch",
            expected="one data.pkl in a folder of it",
            got=f"{len(pickles)}, and {len(members)} members",
            where=path,
            remedy="if checkpoints are in it, unpack it; if it is arrays of numpy (.npz), save them as safetensors",
        )
    top = pickles[0].removesuffix("data.pkl")
    if f"{top}constants.pkl" in members:
        raise archive.program(path)

    def small(name: str, default: bytes) -> bytes:
        member = members.get(top + name)
        return default if member is None else _member_bytes(fd, path, member, _MAX_SMALL_BYTES, name)

    version = small("version", b"3").strip()
    if not version.isdigit() or int(version) > _NEWEST_VERSION:
        raise ShardError("a checkpoint of torch has an unknown version", got=repr(version), where=path)
    order = small("byteorder", sys.byteorder.encode())
    if order not in (b"little", b"big"):
        raise ShardError("a checkpoint of torch has an unknown byte order", got=repr(order), where=path)
    pickle = members[pickles[0]]
    data = _member_bytes(fd, path, pickle, MAX_PICKLE_BYTES, "data.pkl")
    storages = Storages(prefix)
    root = _unpickled(data, storages, path, budget_bytes)
    starts = {}
    for key, storage in storages.by_key.items():
        needed_bytes = storage.size_bytes
        member = members.get(f"{top}data/{key}")
        if member is None or member.size_bytes != needed_bytes:
            raise ShardError(
                f"the storage {key!r} of a shard is not there as its pickle says"[:200],
                expected=f"{needed_bytes} bytes",
                got="nothing" if member is None else f"{member.size_bytes} bytes",
                where=path,
                remedy="save or copy it again",
            )
        starts[prefix + key] = member.offset_bytes
    own = members.get(top + OWN_RECORD)
    record = None if own is None else _member_bytes(fd, path, own, _MAX_OWN_BYTES, OWN_RECORD)
    return Content(root, starts, order.decode() != sys.byteorder, pickle.crc, record)


def _member_bytes(fd: int, path: str, member: archive.Member, most_bytes: int, name: str) -> bytes:
    if member.size_bytes > most_bytes:
        raise ShardError(
            f"{name} of a shard is too large",
            expected=f"{most_bytes} bytes at most",
            got=f"{member.size_bytes} bytes",
            where=path,
            remedy=LESS,
        )
    content = os.pread(fd, member.size_bytes, member.offset_bytes)
    if len(content) != member.size_bytes:
        raise ShardError(f"a shard ends in the middle of its {name}", where=path)
    return content


def _unpickled(data: bytes, storages: Storages, path: str, budget_bytes: int) -> Value:
    try:
        root, end = load(data, readers=storages.readers, budget_bytes=budget_bytes)
        if end != len(data):
            raise PickleError("a pickle ends before its member does", end)
    except PickleError as error:
        raise error.of_shard(path, " of data.pkl") from None
    return root
