"""Locating the tensors of a checkpoint file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt.values import STRING_TYPE, Value, values
from reshard_mpi.formats.ckpt.wire import Reader
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME
from reshard_mpi.formats.manifest import Manifest, Segments, TensorEntry

NAME = "ckpt"
# First four bytes of a file saved with enc_key, as a little-endian number (seen in files of MindSpore 2.10).
_ENCRYPTED = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
_MAX_PAYLOAD_BYTES = 1 << 63


def locate(path: str) -> Manifest:
    """Find the tensors and strings of the checkpoint at `path` without reading any payload.

    Raises ShardError if the file is empty, truncated, over-long, encrypted, damaged, or holds map tensors, a tag
    twice, or a tensor whose content is not as long as its dims and type say.
    """
    tensors: dict[str, TensorEntry] = {}
    strings: dict[str, str] = {}
    text_bytes = 0
    with files.opened(path) as (fd, size_bytes):
        reader = Reader(fd, path, size_bytes)
        _refuse_encrypted(reader)
        for pieces in _by_tag(values(reader)):
            first = pieces[0]
            if first.tag in tensors or first.tag in strings:
                raise reader.damage(
                    f"the name {first.tag!r} appears twice in a shard, with others between",
                    first.at,
                    expected="each tensor once, its pieces side by side",
                )
            if first.type_name == STRING_TYPE:
                strings[first.tag] = _string(reader, pieces)
                text_bytes += files.kept_bytes(strings[first.tag])
                if text_bytes > files.MAX_KEPT_BYTES:
                    raise reader.damage(
                        "a shard's strings take too much memory",
                        first.at,
                        expected=f"{files.MAX_KEPT_BYTES} bytes at most",
                    )
            else:
                tensors[first.tag] = _tensor(reader, pieces)
    return Manifest(path, NAME, tensors, strings)


def _refuse_encrypted(reader: Reader) -> None:
    if reader.size_bytes >= 4:
        cipher = _ENCRYPTED.get(int.from_bytes(reader.read(0, 4), "little"))
        if cipher:
            raise reader.damage(
                f"a shard is encrypted ({cipher})",
                0,
                remedy="load it with MindSpore and its dec_key, and save it without enc_key",
            )


def _by_tag(values: Iterator[Value]) -> Iterator[list[Value]]:
    """Group adjacent Values of one tag: the pieces of one tensor."""
    pieces: list[Value] = []
    for value in values:
        if pieces and pieces[0].tag != value.tag:
            yield pieces
            pieces = []
        pieces.append(value)
    if pieces:
        yield pieces


def _joined(reader: Reader, pieces: list[Value]) -> int:
    """Check that `pieces` belong to one tensor; return their length in bytes."""
    first = pieces[0]
    for piece in pieces:
        if piece.dims != first.dims or piece.type_name != first.type_name:
            raise reader.damage(
                f"the pieces of {first.tag!r} do not agree in shape and type",
                piece.at,
                expected=f"{first.type_name} {list(first.dims)}",
                got=f"{piece.type_name} {list(piece.dims)}",
            )
    return sum(piece.content.length_bytes for piece in pieces)


def _tensor(reader: Reader, pieces: list[Value]) -> TensorEntry:
    first = pieces[0]
    length_bytes = _joined(reader, pieces)
    dtype = BY_MINDSPORE_NAME.get(first.type_name)
    if dtype is None:
        raise reader.damage(f"{first.tag!r} has an unknown type", first.at, got=repr(first.type_name))
    if dtype.itemsize_bytes * math.prod(length for length in first.dims if length) >= _MAX_PAYLOAD_BYTES:
        raise reader.damage(f"the shape of {first.tag!r} is impossibly large", first.at, got=str(list(first.dims)))
    # Older MindSpore wrote scalars with dims [0]; its reader still takes them so.
    shape = () if first.dims == (0,) and length_bytes == dtype.itemsize_bytes else first.dims
    expected_bytes = dtype.itemsize_bytes * math.prod(shape)
    if length_bytes != expected_bytes:
        relation = "shorter" if length_bytes < expected_bytes else "longer"
        raise reader.damage(
            f"the content of {first.tag!r} is {relation} than its shape",
            first.at,
            expected=f"{expected_bytes} bytes ({dtype} {list(shape)})",
            got=f"{length_bytes} bytes in {len(pieces)} piece(s)",
            remedy="the shard is truncated or damaged: save or copy it again",
        )
    ranges = tuple(piece.content for piece in pieces if piece.content.length_bytes)
    return TensorEntry(first.tag, dtype, shape, Segments(ranges))


def _string(reader: Reader, pieces: list[Value]) -> str:
    first = pieces[0]
    length_bytes = _joined(reader, pieces)
    if first.dims not in ((0,), ()) or length_bytes % 4 or length_bytes > files.MAX_STRING_BYTES:
        raise reader.damage(
            f"the string {first.tag!r} is damaged or too long",
            first.at,
            expected=f"dims [0] and UTF-32 of at most {files.MAX_STRING_BYTES} bytes",
            got=f"dims {list(first.dims)} and {length_bytes} bytes",
        )
    content = b"".join(reader.read(piece.content.offset_bytes, piece.content.length_bytes) for piece in pieces)
    try:
        # numpy, which MindSpore uses, pads an empty string with a NUL and drops trailing ones on reading.
        return content.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise reader.damage(f"the string {first.tag!r} is not UTF-32", first.at, got=str(error)) from error
