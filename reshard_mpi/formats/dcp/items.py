"""Locate the items of a `.distcp` file: torch archives one after another (`locate_items`).

Those of tensors that are alike differ in their payloads and in checksums only. So the structure of each is compared
with those met before, byte by byte, and parsed where it is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp.bulk_metadata import ItemKey
from reshard_mpi.formats.nest.nodes import Unreadable, Value, parts
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS, TensorTable, TensorType
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.file_content import FileContent, of_archive
from reshard_mpi.formats.torch.tensors import StoredTensor, place_of
from reshard_mpi.formats.torch.unpickler import BUDGET_BYTES
from reshard_mpi.text import KIB

# What is before the payload of an item, and what is behind it, of torch 2.13: 704 to 768 bytes, and 873.
_HEAD_BYTES, _TAIL_BYTES = KIB, 2 * KIB
# A checkpoint has a few dozen sorts of items of one length at the most.
_MAX_KNOWN = 64
# Objects are mostly numbers and short lists; this number of small ones is kept parsed.
_SMALL_BYTES, _MAX_REMEMBERED = 4 * KIB, 1024
_CRC_BYTES = 4
# Of this number of items an object store is asked for all parts of the structure at once.
_FORESEEN_ITEMS = 512
_PART_BYTES = 100


class WantedItem(NamedTuple):
    """An item that is to be located. kind: of the tensor that it should be; None for an object."""

    offset_bytes: int
    length_bytes: int
    key: ItemKey
    kind: TensorType | None


class StoragePlace(NamedTuple):
    """Where the bytes of a storage begin in a file, and whether they have the byte order this machine has not."""

    start: int
    swapped: bool


class LocatedFile(NamedTuple):
    """The items of a file: its tensors, the number of each among them, and the objects as trees."""

    tensors: TensorTable
    numbers: dict[ItemKey, int]
    objects: dict[ItemKey, Value]
    # of the tensors in objects, by key, which no other archive of the checkpoint has
    storages: dict[str, StoragePlace]
    unreadable: dict[ItemKey, str]  # in words, why tensors cannot be read whose items are sound

    def add(self, stored: StoredTensor) -> int:
        """Add a tensor that is part of an object to the tensors of the file; return its number."""
        start, swapped = self.storages[stored.storage.key]
        start += stored.offset * stored.dtype.itemsize_bytes
        place = place_of(self.tensors.path, stored, start, swapped)
        kind = self.tensors.kind(TensorType(stored.dtype, stored.shape))
        return self.tensors.add_unnamed(kind, start if place is None else NOT_CONTIGUOUS, place)


class _ItemTemplate(NamedTuple):
    """What items of one structure have alike: all bytes before the payload, and those behind it but for checksums."""

    head: bytes
    # tail, mask: the bytes behind it as a number; all of them agree in the bits of `mask`
    tail: int
    mask: int
    tail_start: int
    payload_start: int
    tensor: StoredTensor
    swapped: bool


class Common:
    """State shared by the files of a checkpoint while they are located.

    Attributes:
        left_bytes: what objects may still take of memory.
        archives: how many archives of such have been read.
        sorts: those that have been met of items, by their length.
    """

    def __init__(self) -> None:
        self.left_bytes = BUDGET_BYTES
        self.archives = 0
        self.sorts: dict[int, list[_ItemTemplate]] = {}

    def spend(self, value: Value) -> None:
        """Count a value, each part of it as often as it is met, since it is written so."""
        waiting = [value]
        while waiting and self.left_bytes > 0:
            part = waiting.pop()
            self.left_bytes -= _PART_BYTES + (len(part) if isinstance(part, (str, bytes)) else 0)
            waiting += parts(part)


def locate_items(path: str, wanted: Sequence[WantedItem], common: Common) -> LocatedFile:
    """Locate items of the file at `path`. Raises ShardError for an item that is missing or of another kind."""
    ordered = sorted(wanted, key=lambda item: item.offset_bytes)
    with structure.opened(path) as file:
        _require_apart(ordered, path, file.size_bytes)
        return _Locating(file, common).located(ordered)


def _require_apart(ordered: Sequence[WantedItem], path: str, size_bytes: int) -> None:
    end, previous = 0, ordered[0].key
    for item in ordered:
        if item.offset_bytes < end:
            raise MisfitError(
                "two items of a checkpoint lie over each other",
                expected="each chunk and object in bytes of its own",
                got=f"{named(previous)} and {named(item.key)}",
                where=f"{path}, byte {item.offset_bytes}",
            )
        end, previous = item.offset_bytes + item.length_bytes, item.key
        if end > size_bytes:
            raise ShardError(
                f"a file of a checkpoint ends before {named(item.key)} does",
                expected=f"{end} bytes or more",
                got=str(size_bytes),
                where=path,
            )


class MisfitError(ShardError):
    """Files that are sound, but that the metadata does not describe."""


def named(key: ItemKey) -> str:
    """Return what errors call an item."""
    return repr(key.name) if key.offsets is None else f"the chunk of {key.name!r} at {list(key.offsets)}"


def _spans(items: Iterable[WantedItem]) -> Iterator[tuple[int, int]]:
    """Yield the spans of a file that are read of items: all of small objects, else before and behind payloads."""
    for item in items:
        end = item.offset_bytes + item.length_bytes
        if item.kind is None and item.length_bytes <= _SMALL_BYTES:
            yield item.offset_bytes, end
        else:
            yield item.offset_bytes, min(item.offset_bytes + _HEAD_BYTES, end)
            yield max(item.offset_bytes, end - _TAIL_BYTES), end


class _Locating:
    """A file while its items are located."""

    def __init__(self, file: SourceFile, common: Common) -> None:
        self._file = file
        self._common = common
        self._remembered: dict[bytes, FileContent] = {}

    def located(self, ordered: Sequence[WantedItem]) -> LocatedFile:
        tensors, numbers, objects = TensorTable(self._file.path), dict[ItemKey, int](), dict[ItemKey, Value]()
        storages: dict[str, StoragePlace] = {}
        unreadable: dict[ItemKey, str] = {}
        kinds: dict[TensorType, int] = {}
        for number, item in enumerate(ordered):
            if number % _FORESEEN_ITEMS == 0 and self._file.is_far:
                self._file.will_read(_spans(ordered[number : number + _FORESEEN_ITEMS]))
            if item.kind is None:
                content = self._object(item)
                objects[item.key] = content.root
                storages |= {key: StoragePlace(start, content.swapped) for key, start in content.starts.items()}
                continue
            payload_start, stored, swapped = self._tensor(item)
            if isinstance(stored, Unreadable):
                unreadable[item.key] = stored.what
                continue
            dtype, shape = item.kind[:2]
            if stored.dtype is not dtype or stored.shape != shape:
                raise MisfitError(
                    f"{named(item.key)} is not what the metadata says",
                    expected=f"{dtype} {list(shape)}",
                    got=f"{stored.dtype} {list(stored.shape)}",
                    where=f"{self._file.path}, byte {item.offset_bytes}",
                    remedy="look whether file and metadata are of the same save, and save the checkpoint again",
                )
            kind = kinds.get(item.kind)
            if kind is None:
                kind = kinds[item.kind] = tensors.kind(item.kind)
            start = payload_start + stored.offset * dtype.itemsize_bytes
            place = place_of(self._file.path, stored, start, swapped)
            numbers[item.key] = tensors.add_unnamed(kind, start if place is None else NOT_CONTIGUOUS, place)
        return LocatedFile(tensors, numbers, objects, storages, unreadable)

    def _tensor(self, item: WantedItem) -> tuple[int, StoredTensor | Unreadable, bool]:
        """Return where the payload of an item begins, what lies in it, and whether its bytes are swapped.

        The place of a tensor that cannot be read is 0.
        """
        sorts = self._common.sorts.setdefault(item.length_bytes, [])
        head = self._file.read_exactly(item.offset_bytes, min(_HEAD_BYTES, item.length_bytes))
        for sort in sorts:
            if head.startswith(sort.head):
                tail = self._file.read_exactly(item.offset_bytes + sort.tail_start, item.length_bytes - sort.tail_start)
                if int.from_bytes(tail) & sort.mask == sort.tail:
                    return item.offset_bytes + sort.payload_start, sort.tensor, sort.swapped
        content = self._content(item)
        stored = content.root
        if type(stored) is Unreadable:
            return 0, stored, False
        if type(stored) is not StoredTensor:
            raise MisfitError(
                f"{named(item.key)} is no tensor",
                expected="a chunk, as the metadata says",
                got="another object",
                where=f"{self._file.path}, byte {item.offset_bytes}",
                remedy="look whether file and metadata are of the same save",
            )
        payload_start = content.starts[stored.storage.key]
        if len(sorts) < _MAX_KNOWN:
            sorts[:0] = self._sorts_of(item, head, payload_start, content)
        return payload_start, stored, content.swapped

    def _object(self, item: WantedItem) -> FileContent:
        is_small = item.length_bytes <= _SMALL_BYTES
        content = self._file.read_exactly(item.offset_bytes, item.length_bytes) if is_small else b""
        if content in self._remembered:
            return self._remembered[content]
        common = self._common
        if common.left_bytes <= 0:
            raise ShardError(
                "the objects of a checkpoint take too much memory",
                expected=f"{BUDGET_BYTES} bytes at most",
                got=f"more, without {named(item.key)}",
                where=self._file.path,
            )
        common.archives += 1
        read = of_archive(self._archive(item), common.left_bytes, prefix=f"{common.archives}/")
        common.spend(read.root)
        if content and not read.starts and len(self._remembered) < _MAX_REMEMBERED:
            self._remembered[content] = read
        return read

    def _archive(self, item: WantedItem) -> archive.Archive:
        return archive.Archive(self._file, item.offset_bytes, item.length_bytes)

    def _content(self, item: WantedItem) -> FileContent:
        if not archive.is_archive(self._file.read(item.offset_bytes, 4)):
            raise ShardError(
                f"{named(item.key)} cannot be read",
                expected="a plain tensor or object as torch.save writes it",
                got="no archive of torch",
                where=f"{self._file.path}, byte {item.offset_bytes}",
            )
        try:
            return of_archive(self._archive(item))
        except ShardError as error:
            error.problem = f"{named(item.key)}: {error.problem}"
            raise

    def _sorts_of(self, item: WantedItem, head: bytes, payload_start: int, content: FileContent) -> list[_ItemTemplate]:
        """Return the bytes common to items like this one, if torch laid it out."""
        first, stored = item.offset_bytes, content.root
        members = self._archive(item).members()
        payload = f"archive/data/{stored.storage.key}"
        before = {name for name, member in members.items() if member.offset_bytes < payload_start}
        head_bytes = payload_start - first
        tail_start = head_bytes + members[payload].size_bytes if payload in members else 0
        tail_bytes = item.length_bytes - tail_start
        if not before >= {"archive/data.pkl", "archive/byteorder"} or members.get(payload, (0,))[0] != payload_start:
            return []
        if head_bytes > len(head) or tail_bytes > _TAIL_BYTES:
            return []
        tail = self._file.read_exactly(first + tail_start, tail_bytes)
        mask = bytearray(b"\xff" * tail_bytes)
        for offset, length in self._checksums(item, members, payload):
            if tail_start <= offset <= item.length_bytes - length:
                mask[offset - tail_start : offset - tail_start + length] = bytes(length)
        same = int.from_bytes(mask)
        alike = int.from_bytes(tail) & same
        return [_ItemTemplate(head[:head_bytes], alike, same, tail_start, head_bytes, stored, content.swapped)]

    def _checksums(
        self, item: WantedItem, members: dict[str, archive.Member], payload: str
    ) -> Iterator[tuple[int, int]]:
        """Yield where an item has what depends on its payload, and how many bytes: checksums, and the number of it."""
        start, directory, _ = self._archive(item).directory()
        for offset, (name, member) in zip(archive.entries(directory), members.items()):
            end = member.offset_bytes + member.size_bytes - item.offset_bytes
            is_number = name == "archive/.data/serialization_id"
            if name == payload or is_number:
                yield start + offset + archive.ENTRY_CRC_AT, _CRC_BYTES
                if member.size_bytes:
                    yield end + archive.DESCRIPTOR_CRC_AT, _CRC_BYTES
            if is_number:
                yield end - member.size_bytes, member.size_bytes
