"""Write all of a `.ckpt` file but the payloads (`reserve`, `seal`)."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.ckpt.reader import NAME
from reshard_mpi.formats.ckpt.wire import (
    CRC_BYTES,
    CRC_MARK,
    EMPTY_CHECKPOINT,
    STRING_TYPE,
    encode_around,
    encode_header,
)
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType

# MindSpore's synchronous save cuts at exactly this many bytes (`SLICE_SIZE`), and protobuf ends at 2 GiB.
CUT_BYTES = 512 << 20


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the checkpoint `path` without its payloads, byte for byte as MindSpore's synchronous save does.

    Tensors come first, in the order of `spec`, then strings.

    Args:
        fd: the empty file.

    Returns where the payloads are to be written. Raises TargetError if a name or string cannot be stored, OSError if
    the file cannot be written.
    """
    structure.check_names(path, [*spec.specs.names, *spec.strings])
    tensors, writer, offset = TensorTable(path), structure.HeaderDigestWriter(fd), 0
    seen: dict[tuple[int, int], tuple[bytes, bytes, int, int]] = {}
    specs = spec.specs
    for name, number in zip(specs.names, specs.kind_ids):
        tag = name.encode()
        alike = seen.get((number, len(tag)))
        if alike is None:
            kind = specs.kinds[number]
            if kind.size_bytes > CUT_BYTES:
                offset = _reserve_pieces(writer, tensors, name, kind, offset)
                continue
            around = encode_around(len(tag), kind.shape, kind.dtype.mindspore, kind.size_bytes)
            alike = seen[number, len(tag)] = (*around, tensors.kind(kind.unplaced), kind.size_bytes)
        before, after, own_kind, size_bytes = alike
        header = b"%b%b%b" % (before, tag, after)
        writer.add(offset, header)
        offset += len(header)
        tensors.add(name, own_kind, offset if size_bytes else 0)
        offset += size_bytes
    for name, text in spec.strings.items():
        content = _string_content(path, name, text)
        record = encode_header(name, (0,), STRING_TYPE, len(content)) + content
        writer.add(offset, record)
        offset += len(record)
    if offset == 0:
        # A file of 0 bytes cannot be told from a failed copy: a shard of nothing is the checksum of nothing.
        writer.add(0, EMPTY_CHECKPOINT)
        offset = len(EMPTY_CHECKPOINT)
    return Manifest(path, NAME, tensors, dict(spec.strings), header_digest=writer.finish(offset))


def _reserve_pieces(
    writer: structure.HeaderDigestWriter, tensors: TensorTable, name: str, kind: TensorType, offset: int
) -> int:
    """Reserve a tensor that is cut into several Values, from `offset` on; return the offset after it."""
    dtype, shape, ranges = kind.dtype, kind.shape, []
    for length_bytes in _cuts(kind.size_bytes):
        header = encode_header(name, shape, dtype.mindspore, length_bytes)
        writer.add(offset, header)
        ranges.append(ByteRange(tensors.path, offset + len(header), length_bytes))
        offset += len(header) + length_bytes
    tensors.add_entry(TensorEntry(name, dtype, shape, ByteRanges(tuple(ranges))))
    return offset


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the size of the checkpoint of `spec`. crc: with the checksum at its end."""
    size_bytes = CRC_BYTES if crc else 0
    seen: dict[tuple[int, int], int] = {}
    specs = spec.specs
    for name, number in zip(specs.names, specs.kind_ids):
        tag_bytes = _tag_bytes(name)
        tensor_bytes = seen.get((number, tag_bytes))
        if tensor_bytes is None:
            kind = specs.kinds[number]
            tensor_bytes = seen[number, tag_bytes] = sum(
                _header_bytes(tag_bytes, kind.shape, kind.dtype.mindspore, length_bytes) + length_bytes
                for length_bytes in _cuts(kind.size_bytes)
            )
        size_bytes += tensor_bytes
    for name, text in spec.strings.items():
        content_bytes = 4 * max(1, len(text))
        size_bytes += _header_bytes(_tag_bytes(name), (0,), STRING_TYPE, content_bytes) + content_bytes
    return size_bytes if spec.tensors or spec.strings else size_bytes + len(EMPTY_CHECKPOINT)


def _tag_bytes(name: str) -> int:
    """Return the length of an encoded name, even of one that `reserve` will refuse."""
    return len(name) if name.isascii() else len(name.encode(errors="replace"))


def _header_bytes(tag_bytes: int, dims: tuple[int, ...], type_name: str, content_bytes: int) -> int:
    return tag_bytes + sum(map(len, encode_around(tag_bytes, dims, type_name, content_bytes)))


def _cuts(size_bytes: int) -> list[int]:
    """Return the lengths of the pieces in which a tensor is written; a tensor of no elements has one, empty."""
    whole, rest = divmod(size_bytes, CUT_BYTES)
    return [CUT_BYTES] * whole + ([rest] if rest or not whole else [])


def _string_content(path: str, name: str, text: str) -> bytes:
    try:
        content = text.encode("utf-32-le") or b"\0\0\0\0"
    except UnicodeEncodeError as error:
        raise TargetError(
            f"the string {name!r} is no Unicode text",
            got=str(error),
            where=path,
            remedy="save the checkpoint without it",
        ) from error
    if len(content) > structure.MAX_STRING_BYTES or text.endswith("\0"):
        raise TargetError(
            f"the string {name!r} cannot be stored in a .ckpt file",
            expected=f"at most {structure.MAX_STRING_BYTES // 4} characters, the last one not NUL",
            got=f"{len(text)} characters",
            where=path,
            remedy="save the checkpoint without it, or with a shorter one",
        )
    return content


_NUMBER_BYTES = CRC_BYTES - len(CRC_MARK)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Finish a checkpoint file. crc: append its CRC-32.

    The sums of tensors are dropped, as the format has no place for them.
    """
    if crc:
        file = SourceFile(path, fd)
        trailer = CRC_MARK + structure.crc32_of(file, (0, file.size_bytes)).to_bytes(_NUMBER_BYTES, "big")
        structure.write_all(fd, trailer, file.size_bytes)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether the file at `path` ends in a CRC-32. Raises ShardError if that is not of what comes before it."""
    with structure.opened(path) as file:
        summed_bytes = file.size_bytes - CRC_BYTES
        trailer = file.read(summed_bytes, CRC_BYTES) if summed_bytes >= 0 else b""
        if not trailer.startswith(CRC_MARK):
            return False
        expected = int.from_bytes(trailer[len(CRC_MARK) :], "big")
        computed = structure.crc32_of(file, (0, summed_bytes), on_bytes=on_bytes)
        if computed != expected:
            raise ShardError(
                "a checkpoint does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {expected:08x}, as its last {CRC_BYTES} bytes say",
                got=f"{computed:08x}",
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True
