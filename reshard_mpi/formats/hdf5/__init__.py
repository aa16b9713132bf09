"""Read and write HDF5 shards (`.h5`, `.hdf5`): native ones, and other programs' files.

A native shard, version 2, holds one contiguous dataset a tensor, allocated when it is created, so that its payload is
one byte range of the file, known before a byte of it is written. The file has the attributes `format`, `version`,
`rank` and `world_size`, and a group `__reshard_mpi__` with the placement table of all ranks (`strategy`), the
order of the tensors and the strings (`contents`, JSON), a table with a row for each tensor in that order (`boxes`: its
logical element type `dtype`, its `global_shape`, and the `offset` of the box that the shard holds), and the tensors
whose names HDF5 cannot hold (`tensors`, under percent-encoded names). Where tensors have been summed, `sums` holds a
number for each, in the order of the contents: the CRC-32 of the whole tensor's row-major bytes with zeros in place of
what this shard does not hold. Behind the end of the HDF5 file there is an `index`. Version 1 had the boxes in
attributes of each dataset; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard_mpi.errors import ShardError, UsageError
from reshard_mpi.filesystem.paths import START_BYTES
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.hdf5 import native_shard
from reshard_mpi.formats.hdf5.native_shard import NAME
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.protocol import NO_SUMS
from reshard_mpi.formats.protocol import no_crc as check_crc

# HDF5 File Format Specification, "Format Signature and Superblock": the signature stands at byte 0, 512, 1024, 2048 and
# so on; versions 0 and 1 have the addresses after 24 and 28 bytes, versions 2 and 3 after 12. The end-of-file address
# counts from the start of the file.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEAD_BYTES = 128
# version -> (byte with the size of addresses, first byte of the first address, number of the end-of-file address)
_LAYOUTS = {0: (13, 24, 2), 1: (13, 28, 2), 2: (9, 12, 2), 3: (9, 12, 2)}


def end_of_file(file: SourceFile) -> int:
    """Return where the HDF5 file ends: at the end of the file, or where the index of a native shard begins.

    Raises ShardError if it is not HDF5, or not as long as it says.
    """
    path, size_bytes, offset = file.path, file.size_bytes, _signature(file)
    if offset is None:
        start = file.read(0, START_BYTES)
        raise structure.other_kind(start, path, "an HDF5 file") or ShardError(
            "a shard is not an HDF5 file",
            expected="the signature of HDF5",
            got=repr(start[:8]),
            where=f"{path}, byte 0",
            remedy="save or copy it again",
        )
    end = _end_of_file(file.read(offset, _HEAD_BYTES))
    if end is None:
        return size_bytes
    expected_bytes = end if size_bytes <= end else native_shard.length_bytes(file, end) or end
    if expected_bytes != size_bytes:
        problem = "is truncated" if size_bytes < expected_bytes else "goes on after its end"
        raise ShardError(
            f"an HDF5 shard {problem}",
            expected=f"{expected_bytes} bytes, as its {'superblock' if expected_bytes == end else 'index'} says",
            got=f"{size_bytes} bytes",
            where=f"{path}, superblock at byte {offset}",
            remedy="save or copy it again",
        )
    return end


def _signature(file: SourceFile) -> int | None:
    offset = 0
    while offset < file.size_bytes:
        if file.read(offset, len(_SIGNATURE)) == _SIGNATURE:
            return offset
        offset = offset * 2 or 512
    return None


def _end_of_file(head: bytes) -> int | None:
    """Return the end-of-file address in the superblock `head`; None if only the library can read it."""
    layout = _LAYOUTS.get(head[8]) if len(head) > 8 else None
    if layout is None:
        return None
    size_at, base_at, number = layout
    if len(head) <= size_at:
        return None
    width = head[size_at]
    address = head[base_at + number * width : base_at + (number + 1) * width]
    return int.from_bytes(address, "little") if width in (2, 4, 8) and len(address) == width else None


# From this size on payloads are aligned; file systems share blocks between offsets that are multiples of 4096, and
# smaller payloads are not worth the gaps.
ALIGNED_FROM_BYTES = 65536
ALIGNMENT_BYTES = 4096
# Structure is written in blocks of this size: the default of 2 KiB spreads it all over the file.
STRUCTURE_BLOCK_BYTES = 16384

# How much space the library leaves unused depends on the order of what it creates. The numbers here are upper bounds,
# with room to spare; `tests/runs/test_room.py` compares them with real files.
# The superblock, the root, the reserved groups, texts and table, and the unused rest of blocks.
_FILE_BYTES = 4 * STRUCTURE_BLOCK_BYTES
# A tensor's dataset and its lines of tables, or a group.
_OBJECT_BYTES = 4096
# A character of a text in the list of contents; one of a name there, in a link and in an attribute.
_TEXT_CHARACTER_BYTES = 6
_NAME_CHARACTER_BYTES = 16


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the size that the shard of `spec` has at most. Structure is not reckoned to the byte."""
    specs = spec.specs
    objects = sum(1 + name.count("/") for name in specs.names)
    gaps = sum(specs.kinds[number].size_bytes >= ALIGNED_FROM_BYTES for number in specs.kind_ids)
    names_bytes = _NAME_CHARACTER_BYTES * sum(map(_encoded_bytes, specs.names))
    texts_bytes = _TEXT_CHARACTER_BYTES * sum(map(_encoded_bytes, (*spec.strings, *spec.strings.values())))
    strategy_bytes = _encoded_bytes(spec.identity.strategy)
    objects_bytes = _OBJECT_BYTES * objects + ALIGNMENT_BYTES * gaps
    return specs.size_bytes + _FILE_BYTES + objects_bytes + names_bytes + texts_bytes + strategy_bytes


def _encoded_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the native shard `path` without its payloads (see `writer`)."""
    from reshard_mpi.formats.hdf5 import writer  # the library is loaded only for this

    return writer.reserve(fd, path, spec)


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Return the tensors and strings of the HDF5 file at `path` without reading any payload.

    Raises ShardError if the file is empty, truncated, over-long, damaged or not HDF5, if it refers to other files, or
    if a dataset has a type that no tensor has.
    """
    with structure.opened(path) as file:
        file.will_read(structure.ends_of(file))
        manifest = native_shard.locate(file, end_of_file(file))
        if manifest is None:
            from reshard_mpi.formats.hdf5 import reader_process  # for files that this program did not write

            return reader_process.locate(path, file.size_bytes)
        return manifest


def stored_sums(path: str) -> Mapping[str, int]:
    """Return the sums of its tensors that the shard at `path` keeps; none if it keeps none. Raises ShardError."""
    with structure.opened(path) as file:
        sums = native_shard.stored_sums(file, end_of_file(file))
        if sums is None:
            from reshard_mpi.formats.hdf5 import reader_process

            return reader_process.stored_sums(path)
        return sums


def read_back(meant: Manifest) -> None:
    """Read back the structure of a native shard just written. Raises ShardError if it differs from `meant`."""
    with structure.opened(meant.path) as file:
        if native_shard.locate(file, end_of_file(file)) != meant:
            raise structure.not_as_written(meant.path)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Write the sums of all tensors, in the order of the list of contents, to the place reserved for them.

    Raises UsageError for `crc`, as HDF5 has no checksum of a whole file, OSError if the sums cannot be written.
    """
    if crc:
        raise UsageError(
            "an HDF5 shard has no checksum of the whole file", expected="no --crc", got="--crc", where=path
        )
    if sums:
        file = SourceFile(path, fd)
        native_shard.write_sums(fd, file, end_of_file(file), list(sums.values()))
