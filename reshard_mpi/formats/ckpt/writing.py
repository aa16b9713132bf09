"""Creating a checkpoint file with everything in it but the payloads."""

from __future__ import annotations

import os
from functools import lru_cache

from reshard_mpi.errors import TargetError
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.reading import NAME
from reshard_mpi.formats.ckpt.values import CRC_BYTES, EMPTY_CHECKPOINT, STRING_TYPE, encode_header
from reshard_mpi.formats.manifest import ByteRange, Manifest, Segments, ShardSpec, TensorEntry

# MindSpore's synchronous save cuts at exactly this many bytes (`SLICE_SIZE`), and protobuf ends at 2 GiB.
CUT_BYTES = 512 << 20


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the checkpoint `path` without its payloads, byte for byte as MindSpore's synchronous save would.

    Tensors come first, in the order of `spec`, then strings. fd: the empty file. Raises TargetError if a name cannot
    be stored, OSError if it cannot be written.
    """
    files.check_names(path, [tensor.name for tensor in spec.tensors] + list(spec.strings))
    tensors: dict[str, TensorEntry] = {}
    headers: list[tuple[int, bytes]] = []
    at = 0
    for tensor in spec.tensors:
        shape = tensor.box.shape
        ranges = []
        for length_bytes in _cuts(tensor.size_bytes):
            header = encode_header(tensor.name, shape, tensor.dtype.mindspore, length_bytes)
            headers.append((at, header))
            at += len(header)
            if length_bytes:
                ranges.append(ByteRange(path, at, length_bytes))
            at += length_bytes
        tensors[tensor.name] = TensorEntry(tensor.name, tensor.dtype, shape, Segments(tuple(ranges)))
    for name, text in spec.strings.items():
        content = _string_content(path, name, text)
        record = encode_header(name, (0,), STRING_TYPE, len(content)) + content
        headers.append((at, record))
        at += len(record)
    if not headers:
        # A file of 0 bytes cannot be told from a failed copy: a shard of nothing is the checksum of nothing.
        headers.append((0, EMPTY_CHECKPOINT))
        at = len(EMPTY_CHECKPOINT)
    os.ftruncate(fd, at)
    for offset_bytes, header in headers:
        files.write_all(fd, header, offset_bytes)
    return Manifest(path, NAME, tensors, dict(spec.strings))


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return what the checkpoint of `spec` takes, with its headers; crc: and the checksum of it all."""
    size_bytes = CRC_BYTES if crc else 0
    for tensor in spec.tensors:
        for length_bytes in _cuts(tensor.size_bytes):
            header_bytes = _header_bytes(
                _tag_bytes(tensor.name), tensor.box.shape, tensor.dtype.mindspore, length_bytes
            )
            size_bytes += header_bytes + length_bytes
    for name, text in spec.strings.items():
        content_bytes = 4 * max(1, len(text))
        size_bytes += _header_bytes(_tag_bytes(name), (0,), STRING_TYPE, content_bytes) + content_bytes
    return size_bytes if spec.tensors or spec.strings else size_bytes + len(EMPTY_CHECKPOINT)


def _tag_bytes(name: str) -> int:
    """Return the length of a name; also of one that `reserve` will refuse."""
    return len(name) if name.isascii() else len(name.encode(errors="replace"))


# Most tensors of a shard have one of a few shapes, and a name of one of a few lengths.
@lru_cache(maxsize=1024)
def _header_bytes(tag_bytes: int, dims: tuple[int, ...], type_name: str, content_bytes: int) -> int:
    return len(encode_header("x" * tag_bytes, dims, type_name, content_bytes))


def _cuts(size_bytes: int) -> list[int]:
    """Return the lengths of the pieces a tensor is written in; one empty piece for a tensor of no elements."""
    whole, rest = divmod(size_bytes, CUT_BYTES)
    return [CUT_BYTES] * whole + ([rest] if rest or not whole else [])


def _string_content(path: str, name: str, text: str) -> bytes:
    try:
        content = text.encode("utf-32-le") or b"\0\0\0\0"
    except UnicodeEncodeError as error:
        raise TargetError(f"the string {name!r} is no Unicode text", got=str(error), where=path) from error
    if len(content) > files.MAX_STRING_BYTES or text.endswith("\0"):
        raise TargetError(
            f"the string {name!r} cannot be stored in a .ckpt file",
            expected=f"at most {files.MAX_STRING_BYTES // 4} characters, the last one not NUL",
            got=f"{len(text)} characters",
            where=path,
        )
    return content
