"""Locating the tensors of a checkpoint file."""

from __future__ import annotations

import math
import sys

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.ckpt import structure
from reshard_mpi.formats.ckpt.values import STRING_TYPE, USUAL_START, Known, Value, is_trailer, learn, value_at
from reshard_mpi.formats.ckpt.wire import Reader
from reshard_mpi.formats.columns import TensorEntry, Tensors
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import Segments

NAME = "ckpt"
# First four bytes of a file saved with enc_key, as a little-endian number (seen in files of MindSpore 2.10).
_ENCRYPTED = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
_MAX_PAYLOAD_BYTES = 1 << 63


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors and strings of the checkpoint at `path` without reading any payload.

    like: another shard; one of the same structure has its tensors at the same places. Raises ShardError if the file is
    empty, truncated, over-long, encrypted, damaged, or holds map tensors, a tag twice, or a tensor whose content is not
    as long as its dims and type say.
    """
    with files.opened(path) as (fd, size_bytes):
        if like is not None and like.structure is not None and structure.of_file(fd, like.tensors) == like.structure:
            return like.at(path)
        reader = Reader(fd, path, size_bytes)
        _refuse_encrypted(reader)
        found = _Reading(reader).manifest()
        return found._replace(structure=structure.of_file(fd, found.tensors))


def read_back(meant: Manifest) -> None:
    """Look at the structure of a checkpoint that was just written. Raises ShardError if it is not what was meant."""
    with files.opened(meant.path) as (fd, _):
        if structure.of_file(fd, meant.tensors) != meant.structure:
            raise files.not_as_written(meant.path)


class _Reading:
    """The tensors and strings of one checkpoint while they are read."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tensors = Tensors(reader.path)
        self._strings: dict[str, str] = {}
        self._known: Known = {}
        self._kept_bytes = self._text_bytes = self._count = 0

    def manifest(self) -> Manifest:
        """Read all of the file."""
        reader, at = self._reader, 0
        while (at := self._take_alike(at)) < reader.size_bytes and not is_trailer(reader, at):
            at = self._take(at)
        return Manifest(reader.path, NAME, self._tensors, self._strings)

    def _take_alike(self, at: int) -> int:
        """Add the tensors from byte `at` on that are, but for their names, like others before; return where one is not.

        Nearly all of a large shard are. The bytes before and after a name are compared as a whole, and little is called
        for a tensor by itself.
        """
        reader, known, matches, intern = self._reader, self._known, USUAL_START.match, sys.intern
        size_bytes, names, strings = reader.size_bytes, self._tensors.number_of, self._strings
        add_kind, add_start = self._tensors.kind_of.append, self._tensors.starts.append
        window, base, last = reader.window(at)
        while at < size_bytes:
            if not base <= at <= last:
                window, base, last = reader.window(at)
            head = matches(window, at - base)
            alike = known.get(head[0]) if head else None
            if head is None or alike is None:
                break
            name_at = head.end()
            name_end = name_at + window[name_at - 1]
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
            self._counted(at, name)
            names[name] = len(names)
            add_kind(kind)
            add_start(start)
            at = start + content_bytes
        return at

    def _take(self, at: int) -> int:
        """Add the tensor or string at byte `at`, all its pieces; return where they end."""
        first = self._value(at)
        pieces, end = [first], first.end
        if first.tag == next(reversed(self._tensors.number_of), None):
            self._require_empty_piece(first)
            return end
        if first.tag in self._tensors or first.tag in self._strings:
            raise self._reader.damage(
                f"the name {first.tag!r} appears twice in a shard, with others between",
                first.at,
                expected="each tensor once, its pieces side by side",
            )
        is_string, held_bytes = first.type_name == STRING_TYPE, first.content.length_bytes
        whole_bytes = self._whole_bytes(first)
        while (is_string or held_bytes < whole_bytes) and end < self._reader.size_bytes:
            if is_trailer(self._reader, end):
                break
            following = value_at(self._reader, end)
            if following.tag != first.tag:
                break
            self._kept_bytes += files.kept_kind_bytes(len(following.dims))
            self._counted(end, following.tag)
            pieces.append(following)
            held_bytes += following.content.length_bytes
            end = following.end
        if is_string:
            self._add_string(pieces)
        else:
            entry = _tensor(self._reader, pieces)
            self._tensors.add_entry(entry)
            if len(pieces) == 1:
                learn(self._reader, first, self._tensors.kind_of[-1], self._known)
        return end

    def _value(self, at: int) -> Value:
        value = value_at(self._reader, at)
        self._kept_bytes += files.kept_kind_bytes(len(value.dims))
        self._counted(at, value.tag)
        return value

    def _counted(self, at: int, name: str) -> None:
        """Count a Value at byte `at`; a piece counts like a tensor, since it brings its own name."""
        self._count += 1
        self._kept_bytes += files.kept_bytes(name)
        if self._count > files.MAX_TENSORS:
            raise self._reader.damage("a shard holds too many values", at, expected=f"{files.MAX_TENSORS} at most")
        if self._kept_bytes > files.MAX_KEPT_BYTES:
            raise self._reader.damage(
                "a shard's names take too much memory", at, expected=f"{files.MAX_KEPT_BYTES} bytes at most"
            )

    def _whole_bytes(self, piece: Value) -> int:
        """Return how many bytes all pieces of a tensor have together; 0 if that cannot be told."""
        dtype = BY_MINDSPORE_NAME.get(piece.type_name)
        return 0 if dtype is None else dtype.itemsize_bytes * math.prod(piece.dims)

    def _require_empty_piece(self, piece: Value) -> None:
        """Raise ShardError if a piece of the last tensor, of which all was there already, brings anything."""
        whole = self._tensors[piece.tag]
        is_alike = piece.dims == whole.shape or (piece.dims == (0,) and not whole.shape)  # see `_tensor`
        if not is_alike or piece.type_name != whole.dtype.mindspore:
            raise _disagreeing(self._reader, piece, whole.dtype.mindspore, whole.shape)
        if piece.content.length_bytes:
            held_bytes = whole.size_bytes + piece.content.length_bytes
            raise _wrong_length(self._reader, piece, whole.dtype, whole.shape, held_bytes)

    def _add_string(self, pieces: list[Value]) -> None:
        text = _string(self._reader, pieces)
        self._strings[pieces[0].tag] = text
        self._text_bytes += files.kept_bytes(text)
        if self._text_bytes > files.MAX_KEPT_BYTES:
            raise self._reader.damage(
                "a shard's strings take too much memory",
                pieces[0].at,
                expected=f"{files.MAX_KEPT_BYTES} bytes at most",
            )


def _refuse_encrypted(reader: Reader) -> None:
    if reader.size_bytes >= 4:
        cipher = _ENCRYPTED.get(int.from_bytes(reader.read(0, 4), "little"))
        if cipher:
            raise reader.damage(
                f"a shard is encrypted ({cipher})",
                0,
                remedy="load it with MindSpore and its dec_key, and save it without enc_key",
            )


def _joined(reader: Reader, pieces: list[Value]) -> int:
    """Check that `pieces` belong to one tensor; return their length in bytes."""
    first = pieces[0]
    for piece in pieces:
        if piece.dims != first.dims or piece.type_name != first.type_name:
            raise _disagreeing(reader, piece, first.type_name, first.dims)
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
        raise _wrong_length(reader, first, dtype, shape, length_bytes)
    ranges = tuple(piece.content for piece in pieces if piece.content.length_bytes)
    return TensorEntry(first.tag, dtype, shape, Segments(ranges))


def _disagreeing(reader: Reader, piece: Value, type_name: str, dims: tuple[int, ...]) -> ShardError:
    return reader.damage(
        f"the pieces of {piece.tag!r} do not agree in shape and type",
        piece.at,
        expected=f"{type_name} {list(dims)}",
        got=f"{piece.type_name} {list(piece.dims)}",
    )


def _wrong_length(reader: Reader, value: Value, dtype: DType, shape: tuple[int, ...], length_bytes: int) -> ShardError:
    expected_bytes = dtype.itemsize_bytes * math.prod(shape)
    relation = "shorter" if length_bytes < expected_bytes else "longer"
    return reader.damage(
        f"the content of {value.tag!r} is {relation} than its shape",
        value.at,
        expected=f"{expected_bytes} bytes ({dtype} {list(shape)})",
        got=f"{length_bytes} bytes",
        remedy="the shard is truncated or damaged: save or copy it again",
    )


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
