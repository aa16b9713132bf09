"""Read the object that a file of torch holds (`content_of`), and list tensors of several files as pieces (`listed`)."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.paths import START_BYTES
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Converted, Location, StridedView
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import LESS, NestError, Value, entry_of
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.formats.torch.archive import Archive, Member, is_archive, program
from reshard_mpi.formats.torch.file_signature import FileSignature
from reshard_mpi.formats.torch.pickle_hooks import PickleCutShortError, PickleError, PickleHooks
from reshard_mpi.formats.torch.tensors import CALLS, Storage, StoredTensor, is_tensor, named_storage, place_of
from reshard_mpi.formats.torch.unpickler import BUDGET_BYTES, load
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

# The pickle of 100,000 tensors has 12 MB.
_MAX_PICKLE_BYTES = 40 * MIB
# The member in which this program keeps what the pickle has no place for: strings, and the pickle's CRC-32.
OWN_RECORD = ".reshard_mpi"
_MAX_OWN_BYTES = 24 * MIB
_NEWEST_VERSION = 10
_MAX_SMALL_BYTES = 64
# The first pickle: a number that no other file begins with.
_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PROTOCOL = 1001
# The pickles do not say how long they are, so at first this much is read.
_FIRST_BYTES = MIB
_COUNT_BYTES = 8
# Types that this program does not read, by the class of their storages: how long an element is, to pass over them.
_PASSED_BYTES = {"QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1}
_PASSED_BYTES["ComplexHalfStorage"] = 4


class FileContent(NamedTuple):
    """One file: its object as a tree, and where the bytes of each storage begin, by key."""

    root: Value
    starts: Mapping[str, int]
    swapped: bool  # the elements are in the other byte order than this machine's
    # CRC-32 of the archive's pickle: as its directory says, and of what lies there
    pickle_crc: int = 0
    found_crc: int = 0
    # CRC-32 of the ones that the archive's directory has of its storages; 0 if there are none
    storages_crc: int = 0
    own_record: bytes | None = None  # what this program has added to it, None in files that others have written
    has_elements: bool = False  # a storage is not empty
    signature: FileSignature | None = None  # where the file may be a copy of another one


class Storages:
    """The storages that a pickle names, while it is read.

    Attributes:
        by_key: one of each, of types that are known; all of a key have the same size.
        unknown: those of other types.
        prefix: is put before their keys in what is read, to tell them from those of other archives.
    """

    def __init__(self, prefix: str = "") -> None:
        self.by_key: dict[str, Storage] = {}
        self.unknown: dict[str, Storage] = {}
        self._prefix = prefix

    @property
    def have_elements(self) -> bool:
        return any(storage.size_bytes for storage in self.by_key.values())

    @property
    def hooks(self) -> PickleHooks:
        """The hooks with which the pickle is read."""
        return PickleHooks(self._storage, CALLS)

    def _storage(self, persistent_id: Value) -> Storage:
        read = named_storage(persistent_id)
        if read.unknown is not None:
            return self.unknown.setdefault(read.key, read)
        first = self.by_key.setdefault(read.key, read)
        if first is not read and first.size_bytes != read.size_bytes:
            raise ValueError(f"a storage of two sizes: {read.key[:60]!r}")
        return read._replace(key=self._prefix + read.key) if self._prefix else read


def content_of(file: SourceFile, prefix: str = "") -> FileContent:
    """Read the object that a file of torch holds. Raises ShardError if the file is not sound, or no file of torch.

    Args:
        prefix: of the keys of storages in what is returned.
    """
    file.will_read(structure.ends_of(file))
    start = file.read(0, START_BYTES)
    if is_archive(start):
        return of_archive(Archive(file), prefix=prefix)
    if start.startswith(_START):
        return _of_older_layout(file, prefix)
    raise structure.other_kind(start, file.path, "a file that torch.save writes") or ShardError(
        "a shard is no file that torch.save writes",
        expected="a zip archive, or the older layout with its number",
        got=f"a file that begins with {start[:8]!r}",
        where=file.path,
        remedy="if it is a bare pickle or a tar file, load it with torch, and save its state_dict()",
    )


def of_archive(archive: Archive, budget_bytes: int = BUDGET_BYTES, prefix: str = "") -> FileContent:
    """Read the content of an archive.

    Args:
        budget_bytes: what its objects may take of memory.
        prefix: of the keys of storages in what is returned.

    Raises ShardError if it is not sound, or no checkpoint.
    """
    file, members = archive.file, archive.members()
    path = file.path
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
        raise program(path)

    def small(name: str, default: bytes) -> bytes:
        member = members.get(top + name)
        return default if member is None else _member_bytes(file, member, _MAX_SMALL_BYTES, name)

    version = small("version", b"3").strip()
    if not version.isdigit() or int(version) > _NEWEST_VERSION:
        raise ShardError("a checkpoint of torch has an unknown version", got=repr(version), where=path)
    order = small("byteorder", sys.byteorder.encode())
    if order not in (b"little", b"big"):
        raise ShardError("a checkpoint of torch has an unknown byte order", got=repr(order), where=path)
    pickle = members[pickles[0]]
    data = _member_bytes(file, pickle, _MAX_PICKLE_BYTES, "data.pkl")
    storages = Storages(prefix)
    root = _unpickled(data, storages, path, budget_bytes)
    starts, sums = {}, []
    for key, storage in storages.by_key.items():
        member = members.get(f"{top}data/{key}")
        if member is None or member.size_bytes != storage.size_bytes:
            raise ShardError(
                f"the storage {key!r} of a shard is not there as its pickle says"[:200],
                expected=f"{storage.size_bytes} bytes",
                got="nothing" if member is None else f"{member.size_bytes} bytes",
                where=path,
            )
        starts[prefix + key] = member.offset_bytes
        sums.append(member.crc)
    own = members.get(top + OWN_RECORD)
    record = None if own is None else _member_bytes(file, own, _MAX_OWN_BYTES, OWN_RECORD)
    if own is not None and record is not None and crc32(record) != own.crc:
        record = None  # it is damaged, and as good as none
    storages_crc = crc32(array("L", sums).tobytes()) if any(sums) else 0
    is_swapped = order.decode() != sys.byteorder
    return FileContent(
        root, starts, is_swapped, pickle.crc, crc32(data), storages_crc, record, has_elements=storages.have_elements
    )


def _member_bytes(file: SourceFile, member: Member, most_bytes: int, name: str) -> bytes:
    if member.size_bytes > most_bytes:
        raise ShardError(
            f"{name} of a shard is too large",
            expected=f"{most_bytes} bytes at most",
            got=f"{member.size_bytes} bytes",
            where=file.path,
            remedy=LESS,
        )
    return file.read_exactly(member.offset_bytes, member.size_bytes)


def _unpickled(data: bytes, storages: Storages, path: str, budget_bytes: int) -> Value:
    try:
        root, end = load(data, hooks=storages.hooks, budget_bytes=budget_bytes)
        if end != len(data):
            raise PickleError("a pickle ends before its member does", end)
    except PickleError as error:
        raise error.of_shard(path, " of data.pkl") from None
    return root


def _of_older_layout(file: SourceFile, prefix: str) -> FileContent:
    """Read the content of a file of the older layout. Raises ShardError if it is not sound."""
    length_bytes = _FIRST_BYTES
    while True:
        try:
            return _older_content(file.read(0, length_bytes), file, prefix)
        except PickleCutShortError as error:
            if length_bytes >= min(file.size_bytes, _MAX_PICKLE_BYTES):
                raise error.of_shard(file.path) from None
            length_bytes = min(4 * length_bytes, _MAX_PICKLE_BYTES)
        except PickleError as error:
            raise error.of_shard(file.path) from None


def _older_content(data: bytes, file: SourceFile, prefix: str) -> FileContent:
    """Read the pickles at the beginning of a file, and look where its storages lie."""
    _, offset = load(data)
    protocol, offset = load(data, offset)
    system, offset = load(data, offset)
    is_little = entry_of(system, "little_endian")
    if protocol != _PROTOCOL or type(is_little) is not bool:
        raise PickleError("an older checkpoint of torch has an unknown beginning", offset)
    storages = Storages(prefix)
    root, offset = load(data, offset, storages.hooks)
    keys, offset = load(data, offset)
    starts: dict[str, int] = {}
    storage_keys = _storage_keys(keys, storages, offset)
    sizes = [*_sizes(storage_keys, storages, offset)]
    ends = accumulate((_COUNT_BYTES + length_bytes for _, length_bytes in sizes), initial=offset)
    # A count lies before each storage; an object store is asked for many of them at once.
    counts = structure.foreseen(file, [(end, end + _COUNT_BYTES) for end in ends][:-1])
    for key, (elements, length_bytes), _ in zip(storage_keys, sizes, counts):
        counted = file.read(offset, _COUNT_BYTES)
        start = offset + _COUNT_BYTES
        starts[prefix + key] = start
        offset = start + length_bytes
        if len(counted) < _COUNT_BYTES or offset > file.size_bytes:
            raise PickleError("an older checkpoint of torch ends in the middle of a storage", offset)
        if int.from_bytes(counted, "little" if is_little else "big") != elements:
            raise PickleError("a storage of an older checkpoint has another size than its pickle says", start)
    if offset != file.size_bytes:
        raise PickleError("something follows the end of an older checkpoint of torch", offset)
    is_swapped = is_little != (sys.byteorder == "little")
    return FileContent(root, starts, is_swapped, has_elements=storages.have_elements)


def _storage_keys(keys: Value, storages: Storages, offset: int) -> list[str]:
    """Return the keys of all storages in the order in which they lie in the file.

    Raises PickleError if `keys` are not those of the storages that the pickle names.
    """
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise PickleError("an older checkpoint of torch has no list of its storages", offset)
    named = storages.by_key.keys() | storages.unknown.keys()
    if len(keys) != len(named) or set(keys) != named:
        raise PickleError("the storages of an older checkpoint of torch are not those that its pickle names", offset)
    return keys


def _sizes(keys: list[str], storages: Storages, offset: int) -> Iterator[tuple[int, int]]:
    """Yield of each storage how many elements it has, and how many bytes."""
    for key in keys:
        storage = storages.by_key.get(key) or storages.unknown[key]
        if storage.unknown is None:
            yield storage.elements, storage.size_bytes
        elif storage.unknown in _PASSED_BYTES:
            yield storage.elements, storage.elements * _PASSED_BYTES[storage.unknown]
        else:
            raise PickleError("a storage is of a type that is not known here", offset, storage.unknown[:200])


def read_content(path: str, framework: str) -> FileContent:
    """Read the object of a file, in which the path is put before the keys of storages.

    Args:
        framework: whose checkpoint it is of, as errors say.

    Raises ShardError if it is not sound, or of the other byte order.
    """
    with structure.opened(path) as file:
        content = content_of(file, prefix=path)
        checksums = (content.pickle_crc, content.storages_crc) if content.storages_crc else ()
        signature = FileSignature.of(file, checksums) if content.has_elements else None
    if content.swapped:
        problem = f"a file of a {framework} checkpoint has the byte order that this machine has not"
        raise ShardError(problem, where=path)
    return content._replace(signature=signature)


def text_of(value: Value) -> str:
    """Return a text that is equal for equal values, without tensors."""
    try:
        flattened = flatten_tree.flatten([value], is_tensor, has_order=False)
    except NestError as error:
        return error.problem
    return str([*flattened.strings.values()])


class HeldTensor(NamedTuple):
    """A tensor of a file: its type, its shape, and where its elements are."""

    dtype: DType
    shape: tuple[int, ...]
    place: Location

    @property
    def as_one_piece(self) -> TensorPieces:
        """The same tensor as one piece."""
        return TensorPieces(self.dtype, self.shape, ((Box.whole(self.shape), self.place),))

    def rows(self, first: int, count: int) -> Location:
        """Return where some of its rows are, indices of the first dimension. Its elements are in files as they are."""
        place = self.place
        if isinstance(place, StridedView):
            return place._replace(offset_bytes=place.offset_bytes + first * place.strides_bytes[0])
        assert isinstance(place, ByteRanges)
        row_bytes = self.dtype.itemsize_bytes * math.prod(self.shape[1:])
        return place._replace(ranges=tuple(_cut(place.ranges, first * row_bytes, (first + count) * row_bytes)))


def _cut(ranges: Sequence[ByteRange], first: int, end: int) -> Iterator[ByteRange]:
    """Yield the bytes from number `first` to `end` of a stream of byte ranges."""
    start = 0
    for run in ranges:
        low, high = max(first, start), min(end, start + run.length_bytes)
        if low < high:
            yield ByteRange(run.path, run.offset_bytes + low - start, high - low)
        start += run.length_bytes


class TensorPieces(NamedTuple):
    """A whole tensor: its type, its shape, and the pieces of it that files hold, each with its box.

    A box comes several times where files hold copies of a piece.
    """

    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Location], ...]

    def pieces_as(self, dtype: DType) -> tuple[tuple[Box, Location], ...]:
        """Return the pieces, converted to a type if they have another one."""
        if self.dtype == dtype:
            return self.pieces
        return tuple((box, Converted(place, self.dtype)) for box, place in self.pieces)


class FlatVector(NamedTuple):
    """A vector of elements in a file, in a row."""

    path: str
    offset_bytes: int
    dtype: DType
    elements: int

    def range(self, start: int, length: int) -> ByteRange:
        """Return where `length` elements from `start` on are."""
        size_bytes = self.dtype.itemsize_bytes
        return ByteRange(self.path, self.offset_bytes + start * size_bytes, length * size_bytes)


def held(tensor: StoredTensor, starts: Mapping[str, int], path: str) -> HeldTensor:
    """Return a tensor of a file with its place. starts: where its storages begin, by their keys."""
    start = starts[tensor.storage.key] + tensor.offset * tensor.dtype.itemsize_bytes
    place = place_of(path, tensor, start, swapped=False)
    if place is None:
        size_bytes = TensorType(tensor.dtype, tensor.shape).size_bytes
        place = ByteRanges((ByteRange(path, start, size_bytes),) if size_bytes else ())
    return HeldTensor(tensor.dtype, tensor.shape, place)


def listed(
    root: Value,
    folder: str,
    format_name: str,
    title: str,
    of_file: Callable[[StoredTensor], TensorPieces],
    why_not: Callable[[str], str | None] = lambda name: None,
) -> Manifest:
    """Return the tensors in a tree as a checkpoint's, and the rest of the tree as the text of a nest.

    Args:
        root: a tree in which tensors are `TensorPieces`, or what files have of them.
        folder: of the checkpoint; title: what errors call it.
        of_file: returns a tensor of a file with its place.
        why_not: by the name of a tensor, why its elements cannot be read, in words; None if they can.

    Raises ShardError if the tree is no nest.
    """
    try:
        flattened = flatten_tree.flatten(root, lambda value: type(value) is TensorPieces or type(value) is StoredTensor)
    except NestError as error:
        raise error.of_file(f"a {title}", folder) from None
    tensors, table = ChunkedTensors(folder), TensorTable(folder)
    for name, leaf in flattened.tensors:
        own = of_file(leaf) if type(leaf) is StoredTensor else leaf
        why = why_not(name)
        if why is not None:
            tensors.add_unreadable(name, own.dtype, own.shape, why)
        else:
            tensors.add_listed(name, own.dtype, own.shape, _pieces(own, table))
    return Manifest(folder, format_name, tensors, flattened.strings, left_out=flattened.left_out)


def _pieces(tensor: TensorPieces, table: TensorTable) -> Sequence[ListedChunk]:
    """Return the pieces of a tensor, each added to the table."""
    kinds = [table.kind(TensorType(tensor.dtype, box.shape)) for box, _ in tensor.pieces]
    places = zip(kinds, tensor.pieces)
    return [ListedChunk(box, table, table.add_unnamed(kind, NOT_CONTIGUOUS, place)) for kind, (box, place) in places]
