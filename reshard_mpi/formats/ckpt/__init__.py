"""Read and write MindSpore's checkpoint files (`.ckpt`), by byte range.

    Checkpoint  { repeated Value value = 1 }
    Value       { required string tag = 1; oneof { TensorProto tensor = 2; MapTensorProto maptensor = 3 } }
    TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3 }

A large tensor is cut into adjacent Values of one tag, each with the dims of the whole; a string has type `str`, dims
[0] and UTF-32LE content. `save_checkpoint(crc_check=True)` appends 17 bytes: `crc_num` and, in 10 bytes, the
big-endian CRC-32 of everything before. They are no tensors; `check_crc` verifies them.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping

from reshard_mpi.errors import ChecksumError, ShardError, TargetError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.ckpt.wire import (
    CRC_BYTES,
    CRC_MARK,
    EMPTY_CHECKPOINT,
    STRING_TYPE,
    USUAL_START,
    FileValue,
    WireReader,
    disagreeing,
    encode_around,
    encode_header,
    encoding_of,
    header_bytes,
    is_trailer,
    joined_bytes,
    refuse_encrypted,
    size_without_checksum,
    tag_bytes,
    value_at,
)
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import HeaderDigest, Manifest, ShardSpec
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType

NAME = "ckpt"
_MAX_PAYLOAD_BYTES = 1 << 63
_MAX_ALIKE = 16


def of_file(file: SourceFile, tensors: TensorTable) -> HeaderDigest | None:
    """Return the structure of a file whose tensors lie where `tensors` says; None if they cannot lie so in it."""
    payloads, digest = tensors.payload_spans(), hashlib.blake2b()
    try:
        size_bytes = size_without_checksum(file, payloads[-1][1] if payloads else 0)
        for parts in structure.contents_by_call(file, structure.spans_besides(file, payloads, size_bytes)):
            digest.update(b"".join(parts))
    except ShardError:  # it is shorter, or cannot be read
        return None
    return HeaderDigest(size_bytes, digest.digest())


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
        refuse_encrypted(reader)
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
            raise disagreeing(self._reader, piece, whole.dtype.mindspore, whole.shape)
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


def _tensor(reader: WireReader, pieces: list[FileValue]) -> TensorEntry:
    first = pieces[0]
    length_bytes = joined_bytes(reader, pieces)
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
    length_bytes = joined_bytes(reader, pieces)
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
        tag_bytes = _encoded_bytes(name)
        tensor_bytes = seen.get((number, tag_bytes))
        if tensor_bytes is None:
            kind = specs.kinds[number]
            tensor_bytes = seen[number, tag_bytes] = sum(
                header_bytes(tag_bytes, kind.shape, kind.dtype.mindspore, length_bytes) + length_bytes
                for length_bytes in _cuts(kind.size_bytes)
            )
        size_bytes += tensor_bytes
    for name, text in spec.strings.items():
        content_bytes = 4 * max(1, len(text))
        size_bytes += header_bytes(_encoded_bytes(name), (0,), STRING_TYPE, content_bytes) + content_bytes
    return size_bytes if spec.tensors or spec.strings else size_bytes + len(EMPTY_CHECKPOINT)


def _encoded_bytes(name: str) -> int:
    """Return the length of an encoded name, even of one that `reserve` will refuse."""
    return len(name) if name.isascii() else len(name.encode(errors="replace"))


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
    """Tell whether the file at `path` ends in a CRC-32. Raises ChecksumError if that is not of what comes before it."""
    with structure.opened(path) as file:
        summed_bytes = file.size_bytes - CRC_BYTES
        trailer = file.read(summed_bytes, CRC_BYTES) if summed_bytes >= 0 else b""
        if not trailer.startswith(CRC_MARK):
            return False
        expected = int.from_bytes(trailer[len(CRC_MARK) :], "big")
        computed = structure.crc32_of(file, (0, summed_bytes), on_bytes=on_bytes)
        if computed != expected:
            raise ChecksumError(
                "a checkpoint does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {expected:08x}, as its last {CRC_BYTES} bytes say",
                got=f"{computed:08x}",
                where=path,
                remedy="copy it again, or use another replica",
            )
        return True
