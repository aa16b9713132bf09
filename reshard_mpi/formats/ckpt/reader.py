"""Locate the tensors of a `.ckpt` file without reading them (`locate`)."""

from __future__ import annotations

import hashlib
import math
import sys

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.ckpt.wire import (
    CRC_BYTES,
    CRC_MARK,
    STRING_TYPE,
    USUAL_START,
    FileValue,
    WireReader,
    encoding_of,
    is_trailer,
    tag_bytes,
    value_at,
)
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, DType
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import HeaderDigest, Manifest
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable


def of_file(file: SourceFile, tensors: TensorTable) -> HeaderDigest | None:
    """Return the structure of a file whose tensors lie where `tensors` says; None if they cannot lie so in it."""
    payloads, digest = tensors.payload_spans(), hashlib.blake2b()
    try:
        size_bytes = _without_checksum(file, payloads[-1][1] if payloads else 0)
        for parts in structure.contents_by_call(file, structure.spans_besides(file, payloads, size_bytes)):
            digest.update(b"".join(parts))
    except ShardError:  # it is shorter, or cannot be read
        return None
    return HeaderDigest(size_bytes, digest.digest())


def _without_checksum(file: SourceFile, end: int) -> int:
    """Return the length of a file without the checksum that may be at its end. end: of its last payload."""
    shorter_bytes = file.size_bytes - CRC_BYTES
    has_checksum = shorter_bytes >= max(end, 1) and file.read(shorter_bytes, len(CRC_MARK)) == CRC_MARK
    return shorter_bytes if has_checksum else file.size_bytes


NAME = "ckpt"
# First four bytes of a file saved with enc_key, as a little-endian number (seen in files of MindSpore 2.10).
_ENCRYPTED = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
_MAX_PAYLOAD_BYTES = 1 << 63
_MAX_ALIKE = 16


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Return the tensors and strings of the checkpoint at `path` without reading any payload.

    Args:
        like: another shard; a shard of the same structure is not parsed, since its tensors lie at the same offsets.

    Raises ShardError if the file is empty, truncated, over-long, encrypted, damaged, or holds map tensors, a tag twice,
    or a tensor whose content is not as long as its dims and type say.
    """
    with structure.opened(path) as file:
        file.will_read(structure.ends_of(file))
        if like is not None and like.header_digest is not None and of_file(file, like.tensors) == like.header_digest:
            return like.at(path)
        reader = WireReader(file)
        _refuse_encrypted(reader)
        manifest = _CheckpointReading(reader).manifest()
        return manifest._replace(header_digest=of_file(file, manifest.tensors))


def read_back(meant: Manifest) -> None:
    """Read back the structure of a checkpoint just written. Raises ShardError if it differs from `meant`."""
    structure.require_as_written(locate(meant.path), meant)


class _CheckpointReading:
    """The tensors and strings of one checkpoint while they are read."""

    def __init__(self, reader: WireReader) -> None:
        self._reader = reader
        self._tensors = TensorTable(reader.path)
        self._strings: dict[str, str] = {}
        # Of the Values before that were one whole tensor: the bytes before the name -> those between name and content
        # -> the number of the tensor's kind, and the length of its content.
        self._known: dict[bytes, dict[bytes, tuple[int, int]]] = {}
        self._kept_bytes = self._text_bytes = self._count = 0

    def manifest(self) -> Manifest:
        """Read all of the file."""
        reader, offset = self._reader, 0
        while (offset := self._take_alike(offset)) < reader.size_bytes and not is_trailer(reader, offset):
            offset = self._take(offset)
        return Manifest(reader.path, NAME, self._tensors, self._strings)

    def _take_alike(self, offset: int) -> int:
        """Add the tensors from `offset` on that differ from earlier ones only by name; return the offset after them.

        Nearly all tensors of a large shard do. The bytes before and after a name are compared as a whole, with as few
        calls for each tensor as can be.
        """
        reader, seen, matches, intern = self._reader, self._known, USUAL_START.match, sys.intern
        size_bytes, names, strings = reader.size_bytes, self._tensors.index_by_name, self._strings
        add_kind, add_start = self._tensors.kind_ids.append, self._tensors.offsets.append
        window, base, last = reader.window(offset)
        while offset < size_bytes:
            if not base <= offset <= last:
                window, base, last = reader.window(offset)
            head = matches(window, offset - base)
            alike = seen.get(head[0]) if head else None
            if head is None or alike is None:
                break
            name_at = head.end()
            name_end = name_at + tag_bytes(head)
            for rest in alike:
                if window.startswith(rest, name_end):
                    break
            else:
                break
            kind, content_bytes = alike[rest]
            start = base + name_end + len(rest)
            try:
                name = intern(window[name_at:name_end].decode())
            except UnicodeDecodeError:
                break
            if start + content_bytes > size_bytes or name in names or name in strings:
                break
            self._count_value(offset, name)
            names[name] = len(names)
            add_kind(kind)
            add_start(start)
            offset = start + content_bytes
        return offset

    def _take(self, offset: int) -> int:
        """Add the tensor or string at `offset` with all its pieces; return the offset after them."""
        first = value_at(self._reader, offset)
        self._count_value(first.offset, first.tag)
        pieces, end = [first], first.end
        if first.tag == next(reversed(self._tensors.index_by_name), None):
            self._require_empty_piece(first)
            return end
        if first.tag in self._tensors or first.tag in self._strings:
            raise self._reader.damage(
                f"the name {first.tag!r} appears twice in a shard, with others between",
                first.offset,
                expected="each tensor once, its pieces side by side",
            )
        is_string, held_bytes = first.type_name == STRING_TYPE, first.content.length_bytes
        dtype = BY_MINDSPORE_NAME.get(first.type_name)  # of an unknown type no further piece is looked at
        whole_bytes = 0 if dtype is None else dtype.itemsize_bytes * math.prod(first.dims)
        while (is_string or held_bytes < whole_bytes) and end < self._reader.size_bytes:
            if is_trailer(self._reader, end):
                break
            following = value_at(self._reader, end)
            if following.tag != first.tag:
                break
            self._count_value(following.offset, following.tag)
            self._keep(following.offset, structure.kept_kind_bytes(len(following.dims)))
            pieces.append(following)
            held_bytes += following.content.length_bytes
            end = following.end
        if is_string:
            self._add_string(pieces)
        else:
            entry, kinds = _tensor(self._reader, pieces), len(self._tensors.kinds)
            self._tensors.add_entry(entry)
            if len(self._tensors.kinds) > kinds:
                self._keep(first.offset, structure.kept_kind_bytes(len(first.dims)))
            if len(pieces) == 1 and held_bytes:
                self._remember(first)
        return end

    def _remember(self, tensor: FileValue) -> None:
        """Remember how the tensor that was added last is encoded, which is one whole Value."""
        encoding = encoding_of(self._reader, tensor)
        if encoding is None:
            return
        before_name, after_name = encoding
        alike = self._known.setdefault(before_name, {})
        if len(alike) == _MAX_ALIKE:  # a file that is made to be slow: real ones have a few
            alike.clear()
        alike[after_name] = self._tensors.kind_ids[-1], tensor.content.length_bytes

    def _count_value(self, offset: int, name: str) -> None:
        """Count a Value, a piece like a tensor: it has a name of its own. Raises ShardError for too many."""
        self._count += 1
        if self._count > structure.MAX_TENSORS:
            raise self._reader.damage(
                "a shard holds too many values", offset, expected=f"{structure.MAX_TENSORS} at most"
            )
        self._keep(offset, structure.kept_bytes(name))

    def _keep(self, offset: int, size_bytes: int) -> None:
        """Count memory that the structure takes. Raises ShardError for too much."""
        self._kept_bytes += size_bytes
        if self._kept_bytes > structure.MAX_KEPT_BYTES:
            raise self._reader.damage(
                "a shard's names take too much memory", offset, expected=f"{structure.MAX_KEPT_BYTES} bytes at most"
            )

    def _require_empty_piece(self, piece: FileValue) -> None:
        """Raise ShardError if `piece`, a further one of the last tensor, which is complete, has any content."""
        whole = self._tensors[piece.tag]
        is_alike = piece.dims == whole.shape or (piece.dims == (0,) and not whole.shape)  # see `_tensor`
        if not is_alike or piece.type_name != whole.dtype.mindspore:
            raise _disagreeing(self._reader, piece, whole.dtype.mindspore, whole.shape)
        if piece.content.length_bytes:
            held_bytes = whole.size_bytes + piece.content.length_bytes
            raise _wrong_length(self._reader, piece, whole.dtype, whole.shape, held_bytes)

    def _add_string(self, pieces: list[FileValue]) -> None:
        text = _string(self._reader, pieces)
        self._strings[pieces[0].tag] = text
        self._text_bytes += structure.kept_bytes(text)
        if self._text_bytes > structure.MAX_KEPT_BYTES:
            raise self._reader.damage(
                "a shard's strings take too much memory",
                pieces[0].offset,
                expected=f"{structure.MAX_KEPT_BYTES} bytes at most",
            )


def _refuse_encrypted(reader: WireReader) -> None:
    if reader.size_bytes >= 4:
        cipher = _ENCRYPTED.get(int.from_bytes(reader.read(0, 4), "little"))
        if cipher:
            raise reader.damage(
                f"a shard is encrypted ({cipher})",
                0,
                remedy="load it with MindSpore and its dec_key, and save it without enc_key",
            )


def _joined_bytes(reader: WireReader, pieces: list[FileValue]) -> int:
    """Return the length of all pieces together. Raises ShardError if they are not pieces of one tensor."""
    first = pieces[0]
    for piece in pieces:
        if piece.dims != first.dims or piece.type_name != first.type_name:
            raise _disagreeing(reader, piece, first.type_name, first.dims)
    return sum(piece.content.length_bytes for piece in pieces)


def _tensor(reader: WireReader, pieces: list[FileValue]) -> TensorEntry:
    first = pieces[0]
    length_bytes = _joined_bytes(reader, pieces)
    dtype = BY_MINDSPORE_NAME.get(first.type_name)
    if dtype is None:
        raise reader.damage(f"{first.tag!r} has an unknown type", first.offset, got=repr(first.type_name))
    if dtype.itemsize_bytes * math.prod(length for length in first.dims if length) >= _MAX_PAYLOAD_BYTES:
        raise reader.damage(f"the shape of {first.tag!r} is impossibly large", first.offset, got=str(list(first.dims)))
    # Older MindSpore wrote scalars with dims [0]; its reader still takes them so.
    shape = () if first.dims == (0,) and length_bytes == dtype.itemsize_bytes else first.dims
    expected_bytes = dtype.itemsize_bytes * math.prod(shape)
    if length_bytes != expected_bytes:
        raise _wrong_length(reader, first, dtype, shape, length_bytes)
    ranges = tuple(piece.content for piece in pieces if piece.content.length_bytes)
    return TensorEntry(first.tag, dtype, shape, ByteRanges(ranges))


def _disagreeing(reader: WireReader, piece: FileValue, type_name: str, dims: tuple[int, ...]) -> ShardError:
    return reader.damage(
        f"the pieces of {piece.tag!r} do not agree in shape and type",
        piece.offset,
        expected=f"{type_name} {list(dims)}",
        got=f"{piece.type_name} {list(piece.dims)}",
    )


def _wrong_length(
    reader: WireReader, value: FileValue, dtype: DType, shape: tuple[int, ...], length_bytes: int
) -> ShardError:
    expected_bytes = dtype.itemsize_bytes * math.prod(shape)
    relation = "shorter" if length_bytes < expected_bytes else "longer"
    return reader.damage(
        f"the content of {value.tag!r} is {relation} than its shape",
        value.offset,
        expected=f"{expected_bytes} bytes ({dtype} {list(shape)})",
        got=f"{length_bytes} bytes",
    )


def _string(reader: WireReader, pieces: list[FileValue]) -> str:
    first = pieces[0]
    length_bytes = _joined_bytes(reader, pieces)
    if first.dims not in ((0,), ()) or length_bytes % 4 or length_bytes > structure.MAX_STRING_BYTES:
        raise reader.damage(
            f"the string {first.tag!r} is damaged or too long",
            first.offset,
            expected=f"dims [0] and UTF-32 of at most {structure.MAX_STRING_BYTES} bytes",
            got=f"dims {list(first.dims)} and {length_bytes} bytes",
        )
    content = b"".join(reader.read(piece.content.offset_bytes, piece.content.length_bytes) for piece in pieces)
    try:
        # numpy, which MindSpore uses, pads an empty string with a NUL and drops trailing ones on reading.
        return content.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise reader.damage(f"the string {first.tag!r} is not UTF-32", first.offset, got=str(error)) from error
