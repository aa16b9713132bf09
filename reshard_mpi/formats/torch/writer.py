"""Write all of a torch file but the elements (`reserve`, `write_archive`, `seal`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from zlib import crc32

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.manifest import NEST, HeaderDigest, Manifest, ShardSpec
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.archive import (
    ENDS_BYTES,
    MEMBER_BYTES,
    TOP,
    Placed,
    descriptor,
    ends,
    first_members,
    local_header,
    placed,
)
from reshard_mpi.formats.torch.file_content import OWN_RECORD
from reshard_mpi.formats.torch.pickler import WrittenTensor, dumps, rebuilt, require_types
from reshard_mpi.formats.torch.reader import NAME

_HOLDER = "a file of torch"
_ID_DIGITS = 40
# What a pickle has of a tensor besides name, shape and strides, and of its first one of a kind.
_PICKLED_BYTES, _PICKLED_KIND_BYTES, _NUMBER_BYTES = 96, 256, 11
# No character of a string, or of a nest, takes more in a pickle.
_PICKLED_CHARACTER_BYTES = 5
# The most that an archive takes besides its pickle and storages.
SMALL_MEMBERS_BYTES = 7 * (MEMBER_BYTES + 2 * len(TOP) + 128)


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without the elements of its tensors, in the layout of torch 2.13.

    Each tensor has a storage of its own, in the order of `spec`.

    Args:
        fd: the empty file.

    Raises TargetError for what torch cannot hold, or a nest that does not fit the tensors; OSError if it cannot be
    written.
    """
    specs = spec.specs
    structure.check_names(path, [*specs.names, *spec.strings])
    pickle = dumps(_root(spec, path))
    strings = dict(spec.strings)
    own = json.dumps({"pickle_crc": crc32(pickle), "strings": strings}).encode() if NEST in strings else None
    sizes = [specs.kinds[kind].size_bytes for kind in specs.kind_ids]
    starts, digest = write_archive(fd, pickle, sizes, own)
    tensors = TensorTable(path)
    kinds = [tensors.kind(kind) for kind in _kinds(spec)]
    for name, kind, start in zip(specs.names, specs.kind_ids, starts):
        tensors.add(name, kinds[kind], start)
    return Manifest(path, NAME, tensors, strings, header_digest=digest)


def write_archive(
    fd: int, pickle: bytes, sizes: Sequence[int], own_record: bytes | None = None
) -> tuple[list[int], HeaderDigest]:
    """Write an archive without the elements of its storages; return where each begins, 0 for an empty one.

    Args:
        fd: the empty file.
        sizes: of the storages in bytes, whose keys are their numbers.
        own_record: what is kept beside them (`OWN_RECORD`).
    """
    members, writer = list[Placed](), structure.HeaderDigestWriter(fd)

    def add(name: str, content: bytes) -> None:
        member = placed(name, len(content), members[-1].end if members else 0, crc32(content))
        writer.add(member.header_start, local_header(member) + content + descriptor(member))
        members.append(member)

    for name, content in first_members(pickle).items():
        add(name, content)
    starts = []
    for number, size_bytes in enumerate(sizes):
        member = placed(f"data/{number}", size_bytes, members[-1].end)
        writer.add(member.header_start, local_header(member))
        if size_bytes:
            writer.add(member.payload_start + size_bytes, descriptor(member))
        members.append(member)
        starts.append(member.payload_start if size_bytes else 0)
    if own_record is not None:
        add(OWN_RECORD, own_record)
    add("version", b"3\n")
    add(".data/serialization_id", _identity(pickle))
    writer.add(members[-1].end, ends(members, members[-1].end))
    return starts, writer.finish()


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for tensors that torch cannot hold."""
    specs = spec.specs
    require_types(specs, _HOLDER, "")
    if NEST in spec.strings:
        _root(spec, "")
    dimensions = [2 * len(kind.shape) * _NUMBER_BYTES for kind in specs.kinds]
    of_tensors = sum(
        MEMBER_BYTES + 2 * (len(TOP) + 16) + _PICKLED_BYTES + 4 * len(name) + dimensions[kind]
        for name, kind in zip(specs.names, specs.kind_ids)
    )
    of_strings = sum(_string_bytes(name, text) for name, text in spec.strings.items())
    of_kinds = _PICKLED_KIND_BYTES * (len(specs.kinds) + 1)
    return specs.size_bytes + of_tensors + of_strings + of_kinds + SMALL_MEMBERS_BYTES + ENDS_BYTES


def _string_bytes(name: str, text: str) -> int:
    """Return the largest size of a string in the pickle, and in the record beside a nest."""
    recorded_bytes = len(json.dumps(name)) + len(json.dumps(text)) + 16
    return _PICKLED_CHARACTER_BYTES * (len(name) + len(text) + 16) + recorded_bytes


def _root(spec: ShardSpec, path: str) -> Value:
    """Return the tree that the file is a pickle of. Raises TargetError if there is none."""
    specs = spec.specs
    require_types(specs, _HOLDER, path)
    kinds = list(_kinds(spec))
    leaves = {
        name: WrittenTensor(str(index), kinds[kind])
        for index, (name, kind) in enumerate(zip(specs.names, specs.kind_ids))
    }
    return rebuilt(leaves, spec.strings, path)


def _kinds(spec: ShardSpec) -> Iterator[TensorType]:
    """Yield the pickled form of each kind of tensors."""
    return (kind.unplaced for kind in spec.specs.kinds)


def _identity(pickle: bytes) -> bytes:
    """Return digits that tell files of different tensors, as torch gives each file."""
    digest = int.from_bytes(hashlib.blake2b(pickle).digest(), "little")
    return str(digest)[-_ID_DIGITS:].zfill(_ID_DIGITS).encode()


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Put the CRC-32 of every member behind its payload and into the directory.

    There is no place in it for the sums of tensors; members always have theirs, so `crc` changes nothing.
    """
    file = SourceFile(path, fd)
    members = archive.Archive(file).members()
    start, listed, _ = archive.Archive(file).directory()
    directory = bytearray(listed)
    for offset, member, member_crc in zip(archive.entries(listed), members.values(), _sums(file, members)):
        directory[offset + archive.ENTRY_CRC_AT : offset + archive.ENTRY_CRC_AT + len(member_crc)] = member_crc
        if member.size_bytes:
            structure.write_all(fd, member_crc, member.offset_bytes + member.size_bytes + archive.DESCRIPTOR_CRC_AT)
    structure.write_all(fd, bytes(directory), start)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every member of the file has a checksum. Raises ShardError if one does not fit.

    torch can be told to leave them out; then they are 0. Files of the older layout have none.
    """
    with structure.opened(path) as file:
        return archive.is_archive(file.read(0, 4)) and check_members(file, archive.Archive(file).members(), on_bytes)


def check_members(file: SourceFile, members: Mapping[str, archive.Member], on_bytes: OnBytes) -> bool:
    """Tell whether every member of an archive has a checksum. Raises ShardError if one does not fit.

    Args:
        on_bytes: told how many bytes have just been read.
    """
    if any(member.size_bytes and not member.crc for member in members.values()):
        return False
    for (name, member), crc in zip(members.items(), _sums(file, members, on_bytes)):
        if int.from_bytes(crc, "little") != member.crc:
            raise ShardError(
                "a member of a shard does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {member.crc:08x}, as the directory says",
                got=f"{int.from_bytes(crc, 'little'):08x}",
                where=f"{file.path}, byte {member.offset_bytes}, member {name!r}",
                remedy="copy it again, or use another replica",
            )
    return True


def _sums(file: SourceFile, members: Mapping[str, archive.Member], on_bytes: OnBytes = uncounted) -> Iterator[bytes]:
    """Yield the CRC-32 of each member's payload, as it is written."""
    for member in members.values():
        span = member.offset_bytes, member.offset_bytes + member.size_bytes
        yield structure.crc32_of(file, span, on_bytes=on_bytes).to_bytes(4, "little")
