"""Make the content of `.metadata` as torch reads it (`index_contents`); `journal/commit` writes it.

The pickle ends where it says that it does, and torch reads no further; the items of objects lie there, since files of
ranks cannot know what others have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, TargetError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp import file_layout
from reshard_mpi.formats.dcp.bulk_metadata import FILESYSTEM, METADATA, ItemPlace
from reshard_mpi.formats.dcp.file_layout import Keys, flattened, tensors_in
from reshard_mpi.formats.dcp.metadata import INDEX, OWN_STRINGS
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import NEST, Manifest, apart_error, common_nest
from reshard_mpi.formats.nest.nodes import NestTensor, Value
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.formats.torch.pickler import memo_opcodes, rebuilt, text_opcode, whole_opcode

_VERSION = "1.0.0"
# Numbers of this many bytes, so that the pickle has the same length wherever its objects lie.
_WIDE_BYTES = 8

# The shape of a chunk, and where it lies.
ChunkPlace = tuple[tuple[int, ...], ItemPlace]


class CollectedTensor(NamedTuple):
    """A tensor of the checkpoint while its pieces are collected. pieces: by their first element."""

    dtype: DType
    shape: tuple[int, ...]
    pieces: dict[tuple[int, ...], ChunkPlace]


def index_contents(shards: Sequence[Manifest]) -> dict[str, bytes]:
    """Return the metadata of the checkpoint that these files make up, which lie in its folder, by target rank.

    A part that several files hold is taken from the first of them; an object, too. Raises DisagreementError if files
    hold different tensors under one name.
    """
    wholes = _wholes(shards)
    strings, paths, objects = _entries(shards)
    for name in (name for value in objects.values() for name in tensors_in(value)) if not strings else ():
        del wholes[name], paths[name]  # without strings, they are read from objects
    items = {name: file_layout.of_object(own, contents_of(tensors_in(own), shards)) for name, own in objects.items()}
    return {INDEX: content_of(wholes, paths, items, paths, strings)}


def content_of(
    wholes: Mapping[str, CollectedTensor],
    names: Iterable[str],
    items: Mapping[str, bytes],
    paths: Mapping[str, Keys] | None = None,
    strings: Mapping[str, str] = {},
) -> bytes:
    """Return the metadata of these tensors, with the items of objects behind it.

    Args:
        names: of all entries, in order.
        paths: of the entries; None: they are in no nest.
        strings: of the checkpoint, for this program.
    """
    places, offset = {}, 0
    for name, item in items.items():
        places[name] = ItemPlace(INDEX, offset, len(item))
        offset += len(item)
    write = _listed(wholes, names, paths, strings)
    end = len(_with_objects(write.copy(), places, 0))
    return _with_objects(write, places, end) + b"".join(items.values())


def contents_of(names: Iterable[str], shards: Sequence[Manifest]) -> dict[str, tuple[TensorType, bytes]]:
    """Return the types and the bytes of tensors, each whole in the first of the files that has it."""
    contents = {}
    for name in names:
        shard = next(shard for shard in shards if name in shard.tensors)
        entry = shard.tensors[name]
        with structure.opened(shard.path) as file:
            content = file.read_exactly(shard.tensors.offsets[shard.tensors.index_by_name[name]], entry.size_bytes)
        contents[name] = TensorType(entry.dtype, entry.shape), content
    return contents


def _wholes(shards: Sequence[Manifest]) -> dict[str, CollectedTensor]:
    wholes: dict[str, CollectedTensor] = {}
    for shard in shards:
        tensors, file = shard.tensors, Path(shard.path).name
        for name, start, number in zip(tensors, tensors.offsets, tensors.kind_ids):
            dtype, shape, box, global_shape = kind = tensors.kinds[number]
            assert box is not None and global_shape is not None
            whole = wholes.get(name)
            if whole is None:
                whole = wholes[name] = CollectedTensor(dtype, global_shape, {})
            if (whole.dtype, whole.shape) != (dtype, global_shape):
                raise DisagreementError(
                    f"files of one checkpoint have different tensors called {name!r}",
                    expected=f"{whole.dtype} {list(whole.shape)}",
                    got=f"{dtype} {list(global_shape)}",
                    where=shard.path,
                    remedy="make all targets anew from one source (--overwrite)",
                )
            item = file_layout.of_tensor(kind)
            if not item.payload_bytes and (0 not in global_shape or whole.pieces):
                continue  # what has no elements is needed where the whole tensor has none
            place = ItemPlace(file, start - len(item.head), item.length_bytes)
            whole.pieces.setdefault(box.start, (shape, place))
    return wholes


# The name of an entry of a checkpoint, its path, and a `NestTensor` or an object.
Entry = tuple[str, Keys, Value]


def entries_of(names: Sequence[str], strings: Mapping[str, str], where: str) -> list[Entry]:
    """Return the entries of a checkpoint of these tensors and strings.

    Tensors in objects have entries of their own besides, for this program. Raises TargetError if the strings do not
    fit the tensors, or two entries have the same name.
    """
    root = rebuilt({name: NestTensor(name) for name in names}, strings, where)
    entries: list[Entry] = []
    met: set[str] = set()
    values = [*flattened(root)]
    objects = [value for _, value in values if type(value) is not NestTensor]
    values += [((name,), NestTensor(name)) for value in objects for name in tensors_in(value)]
    for path, value in values:
        name = ".".join(map(str, path))
        if type(value) is NestTensor and value.name != name:
            name, path = value.name, (value.name,)
        if name in met:
            raise TargetError(
                "two entries have the same name when their keys are joined by dots, as torch does",
                got=repr(name),
                where=where,
                remedy="choose another format with --to",
            )
        met.add(name)
        entries.append((name, path, value))
    return entries


def _entries(shards: Sequence[Manifest]) -> tuple[dict[str, str], dict[str, Keys], dict[str, Value]]:
    """Return the strings of the checkpoint, the paths of all entries, and the objects.

    Files have tensors of their own, all of which together fit the strings. Stages of a pipeline may have strings of
    their own; where these differ, none is kept as such. Of settings that differ the first file's are taken.

    Raises DisagreementError for state of optimizers that cannot be joined.
    """
    names: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    nested = [shard for shard in shards if NEST in shard.strings]
    common = common_nest(shard.strings[NEST] for shard in nested)
    for shard in shards:
        texts = dict(shard.strings)
        if common is not None and NEST in texts:
            apart = common.apart.get(texts[NEST], {})
            for name in shard.tensors if apart else ():
                if name.startswith((*apart,)):
                    raise apart_error(name, shard.path, nested[0].path, apart)
            texts[NEST] = common.text
        names.setdefault(tuple(texts.items()), {}).update(dict.fromkeys(shard.tensors))
    paths: dict[str, Keys] = {}
    objects: dict[str, Value] = {}
    for strings, own in names.items():
        for name, path, value in entries_of(list(own), dict(strings), shards[0].path):
            paths.setdefault(name, path)
            if type(value) is not NestTensor:
                objects.setdefault(name, value)
    return (dict(next(iter(names))) if len(names) == 1 else {}), paths, objects


def _listed(
    wholes: Mapping[str, CollectedTensor],
    names: Iterable[str],
    paths: Mapping[str, Keys] | None,
    strings: Mapping[str, str],
) -> _MetadataPickler:
    """Return the pickle with all but where objects lie."""
    write = _MetadataPickler()
    write.raw(b"\x80\x02")
    write.new(METADATA, "Metadata")
    write.raw(b"}(")
    write.text("state_dict_metadata")
    write.raw(b"}(")
    for name in names:
        write.text(name)
        if name in wholes:
            write.tensor(wholes[name])
        else:
            write.new(METADATA, "BytesStorageMetadata")
            write.raw(b"}b")
    write.raw(b"u")
    write.text("planner_data")
    if paths is None:
        write.raw(b"N")
    else:
        write.raw(b"}(")
        for name, path in paths.items():
            write.text(name)
            write.path(path)
        write.raw(b"u")
    for name, value in (("storage_meta", b"N"), ("version", text_opcode(_VERSION))):
        write.text(name)
        write.raw(value)
    if strings:
        write.text(OWN_STRINGS)
        write.raw(b"}(" + b"".join(text_opcode(part) for pair in strings.items() for part in pair) + b"u")
    write.text("storage_data")
    write.raw(b"}(")
    for name, whole in wholes.items():
        for number, (offsets, (_, place)) in enumerate(whole.pieces.items()):
            write.item(name, offsets, number, place)
    return write


def _with_objects(write: _MetadataPickler, places: Mapping[str, ItemPlace], start: int) -> bytes:
    """Return the whole pickle. places: the objects' places, counted from byte `start`."""
    for name, place in places.items():
        write.item(name, None, None, place._replace(offset_bytes=start + place.offset_bytes))
    write.raw(b"uub.")
    return write.content()


class _MetadataPickler:
    """A pickle while it is written: what comes again is taken from the memo."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._memo: dict[Hashable, bytes] = {}

    def copy(self) -> _MetadataPickler:
        other = _MetadataPickler()
        other._content, other._memo = self._content[:], self._memo.copy()
        return other

    def content(self) -> bytes:
        return bytes(self._content)

    def raw(self, content: bytes) -> None:
        self._content += content

    def _is_known(self, key: Hashable) -> bool:
        """Take a value from the memo if it is there, and tell whether it was."""
        get = self._memo.get(key)
        if get is None:
            return False
        self._content += get
        return True

    def _remember(self, key: Hashable) -> None:
        """Give what was written last a number in the memo."""
        put, self._memo[key] = memo_opcodes(len(self._memo))
        self._content += put

    def text(self, text: str) -> None:
        if not self._is_known(text):
            self.raw(text_opcode(text))
            self._remember(text)

    def constant(self, module: str, name: str) -> None:
        if not self._is_known((module, name)):
            self.raw(f"c{module}\n{name}\n".encode())
            self._remember((module, name))

    def new(self, module: str, name: str) -> None:
        """Write an object without attributes yet."""
        self.constant(module, name)
        self.raw(b")\x81")

    def size(self, numbers: tuple[int, ...]) -> None:
        if not self._is_known(numbers):
            self.constant("torch", "Size")
            self.raw(b"(" + b"".join(map(whole_opcode, numbers)) + b"t\x85R")
            self._remember(numbers)

    def path(self, path: Keys) -> None:
        keys = (whole_opcode(key) if type(key) is int else text_opcode(str(key)) for key in path)
        self.raw(b"(" + b"".join(keys) + b"t")

    def tensor(self, whole: CollectedTensor) -> None:
        self.new(METADATA, "TensorStorageMetadata")
        self.raw(b"}(")
        self.text("properties")
        self._properties(whole.dtype)
        self.text("size")
        self.size(whole.shape)
        self.text("chunks")
        self.raw(b"](")
        for offsets, (sizes, _) in whole.pieces.items():
            self._chunk(offsets, sizes)
        self.raw(b"eub")

    def _properties(self, dtype: DType) -> None:
        """Write type, layout, whether gradients are required, memory format, and whether memory is pinned."""
        if self._is_known(dtype):
            return
        self.new(METADATA, "TensorProperties")
        self.raw(b"(")
        self.constant("torch", dtype.name)
        self.constant("torch.serialization", "_get_layout")
        self.raw(text_opcode("torch.strided") + b"\x85R\x89")
        self.constant(METADATA, "_MEM_FORMAT_ENCODING")
        self.raw(b"K\x00\x85R\x89tb")
        self._remember(dtype)

    def _chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        if self._is_known((offsets, sizes)):
            return
        self.new(METADATA, "ChunkStorageMetadata")
        self.raw(b"}(")
        self.text("offsets")
        self.size(offsets)
        self.text("sizes")
        self.size(sizes)
        self.raw(b"ub")
        self._remember((offsets, sizes))

    def item(self, name: str, offsets: tuple[int, ...] | None, number: int | None, place: ItemPlace) -> None:
        """Write the key of an item and its place."""
        self.new(METADATA, "MetadataIndex")
        self.raw(b"}(")
        self.text("fqn")
        self.text(name)
        self.text("index")
        self.raw(b"N" if number is None else whole_opcode(number))
        self.text("offset")
        if offsets is None:
            self.raw(b"N")
        else:
            self.size(offsets)
        self.raw(b"ub")
        self.new(FILESYSTEM, "_StorageInfo")
        self.raw(b"}(")
        self.text("relative_path")
        self.text(place.file)
        self.text("offset")
        self.raw(b"\x8a%c" % _WIDE_BYTES + place.offset_bytes.to_bytes(_WIDE_BYTES, "little"))
        self.text("length")
        self.raw(whole_opcode(place.length_bytes) + b"ub")
