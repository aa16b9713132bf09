"""Read and write torch's distributed checkpoints (DCP): a folder of files, and `.metadata`.

A file is archives of torch one after another, each of one piece of a tensor or of one object. The metadata is a pickle;
neither is executed. Written are a file a rank, with the pieces of that rank, and the metadata when all are complete.
Facts of the layout are of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError, TargetError, UsageError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.filesystem.source_files import FileVersion
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp import file_layout, metadata
from reshard_mpi.formats.dcp.bulk_metadata import Chunk, ItemKey
from reshard_mpi.formats.dcp.file_layout import tensors_in, tree_of
from reshard_mpi.formats.dcp.items import Common, LocatedFile, MisfitError, WantedItem, locate_items, named
from reshard_mpi.formats.dcp.metadata import INDEX, Metadata, without_flat_state
from reshard_mpi.formats.dcp.metadata_writer import Entry, entries_of, index_contents
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.nest import flatten_tree, nodes
from reshard_mpi.formats.nest.nodes import NestTensor, Value
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable, TensorType
from reshard_mpi.formats.torch import check_members
from reshard_mpi.formats.torch.archive import Archive
from reshard_mpi.formats.torch.pickler import require_types
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, natural_key

NAME = "dcp"
_HOLDER = "a torch distributed checkpoint"
# Whoever asks for the files of a checkpoint opens it next, or goes through them: its metadata is kept so long and no
# longer, since it may be large. By the path of its file, and the version.
_kept: dict[tuple[str, FileVersion], Metadata] = {}


def metadata_of(folder: str) -> Metadata:
    """Return the metadata of a checkpoint, if it has just been read without reading it again."""
    with structure.opened(str(Path(folder, INDEX))) as file:
        key = file.path, file.version
        if key not in _kept:
            _kept.clear()
            _kept[key] = metadata.read(file)
    return _kept[key]


def _metadata_for(path: str) -> Metadata:
    """Return the metadata beside a file; whoever goes through all files is done with them after the last one."""
    metadata = metadata_of(str(Path(path).parent))
    names = {place.file for place in metadata.items.values()}
    if Path(path).name == max(names, key=natural_key, default=Path(path).name):
        _kept.clear()
    return metadata


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the metadata, of all files that it names, and of our files for ranks that hold nothing.

    Raises ShardError if the metadata is damaged.
    """
    metadata = metadata_of(folder)
    names = {place.file for place in metadata.items.values()} - {INDEX}
    others = (name for name in source_files.names(folder, ()) if name.endswith(".distcp") and name not in names)
    names.update([name for name in others if _holds_nothing(str(Path(folder, name)), metadata.strings or {})])
    return tuple(str(Path(folder, name)) for name in (INDEX, *sorted(names, key=natural_key)))


def _holds_nothing(path: str, strings: Mapping[str, str]) -> bool:
    """Tell whether a file says of itself that it has no element of a tensor, and no string besides `strings`."""
    try:
        with structure.opened(path) as file:
            held = file_layout.read_footer(file)
    except ShardError:
        return False
    is_empty = all(entry.size_bytes == 0 for entry in held.tensors.values())
    return is_empty and held.strings.items() <= strings.items()


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the tensors of the checkpoint in `folder`, and its objects as the text of a nest.

    Raises ShardError if metadata and files contradict each other, or an object is lost with its file.
    """
    metadata = without_flat_state(metadata_of(folder))
    _kept.clear()
    located, missing = located_items(folder, metadata)
    listed = ChunkedTensors(folder)
    listed.missing = tuple(missing.values())
    boxes: dict[Chunk, Box] = {}
    place_of = {key: (file.tensors, number) for file in located.values() for key, number in file.numbers.items()}
    why_not = {key: why for file in located.values() for key, why in file.unreadable.items()}
    for name, tensor in metadata.entries.items():
        if tensor is None:
            continue
        keys = [ItemKey(name, chunk.offsets) for chunk in tensor.chunks]
        unreadable = tensor.unreadable
        if why_not and not unreadable:
            unreadable = next((why_not[key] for key in keys if key in why_not), "")
        if unreadable:
            listed.add_unreadable(name, tensor.dtype, tensor.shape, unreadable)
            continue
        pieces = [
            ListedChunk(boxes.get(chunk) or boxes.setdefault(chunk, Box.at(chunk.offsets, chunk.sizes)), *place)
            for chunk, key in zip(tensor.chunks, keys)
            if (place := place_of.get(key)) is not None
        ]
        try:
            listed.add_listed(name, tensor.dtype, tensor.shape, pieces)
        except ValueError as error:
            raise ShardError("the metadata contradicts itself", got=str(error), where=folder) from None
    objects = {key.name: value for file in located.values() for key, value in file.objects.items()}
    _require_objects(metadata, objects, missing, folder)
    strings, left_out, inner = _strings(metadata, objects, folder)
    holder = {key: file for file in located.values() for key in file.storages}
    for name, stored in inner:
        file = holder[stored.storage.key]
        piece = ListedChunk(Box.whole(stored.shape), file.tensors, file.add(stored))
        listed.add_listed(name, stored.dtype, stored.shape, [piece])
    besides = tuple(f"{name}: {stored.besides}" for name, stored in inner if stored.besides)
    return {0: Manifest(folder, NAME, listed, strings, left_out=(*metadata.left_out, *left_out, *besides))}


def wanted_in(path: str) -> list[WantedItem]:
    """Return the items that the metadata beside a file says lie in it, objects among them.

    Raises ShardError if the metadata is not there, or is damaged.
    """
    file, folder = Path(path).name, str(Path(path).parent)
    if not source_files.is_file(Path(folder, INDEX)):
        raise ShardError(
            "a file of a torch distributed checkpoint does not say what it holds",
            expected=f"{INDEX} beside it, which does",
            got="the file alone",
            where=path,
            remedy=f"give the folder in which {INDEX} lies",
        )
    metadata = without_flat_state(_metadata_for(path))
    return [
        WantedItem(place.offset_bytes, place.length_bytes, key, kind)
        for key, kind in _items(metadata)
        if (place := metadata.items[key]).file == file
    ]


def located_items(folder: str, metadata: Metadata) -> tuple[dict[str, LocatedFile], dict[str, str]]:
    """Return the contents of each file, and an error text for each file that cannot be used."""
    wanted: dict[str, list[WantedItem]] = {}
    for key, kind in _items(metadata):
        place = metadata.items[key]
        if place.file == INDEX and place.offset_bytes < metadata.end:
            raise ShardError("an item is to lie in the metadata itself", got=named(key), where=str(Path(folder, INDEX)))
        wanted.setdefault(place.file, []).append(WantedItem(place.offset_bytes, place.length_bytes, key, kind))
    common = Common()
    located, missing = dict[str, LocatedFile](), dict[str, str]()
    for file in sorted(wanted, key=natural_key):
        path = str(Path(folder, file))
        _require_inside(folder, path)
        try:
            located[file] = locate_items(path, wanted[file], common)
        except MisfitError:
            raise
        except ShardError as error:
            missing[file] = f"{path}: {told(error)}"
    return located, missing


def _items(metadata: Metadata) -> Iterator[tuple[ItemKey, TensorType | None]]:
    """Yield each item that is to be located, with the kind of tensor that it should be; None for an object.

    Tensors of which is known that they cannot be read are not, nor the objects of what this program has written: its
    strings have all of them.
    """
    kinds: dict[tuple[object, ...], TensorType] = {}
    for name, tensor in metadata.entries.items():
        if tensor is not None:
            for chunk in tensor.chunks if not tensor.unreadable else ():
                size = tensor.dtype, chunk.sizes
                yield ItemKey(name, chunk.offsets), kinds.get(size) or kinds.setdefault(size, TensorType(*size))
        elif metadata.strings is None:
            yield ItemKey(name, None), None


def _require_inside(folder: str, path: str) -> None:
    """Raise ShardError if a file is a link to somewhere outside of the checkpoint's folder."""
    real = real_path(path)
    if real.parent != real_path(folder):
        raise ShardError(
            "a file of a checkpoint is a link that leads out of its folder",
            expected=f"a file in {folder}",
            got=str(real),
            where=path,
            remedy="copy the file to where the link is",
        )


def _require_objects(metadata: Metadata, objects: Mapping[str, Value], missing: Mapping[str, str], folder: str) -> None:
    """Raise ShardError if a file that cannot be used has objects: no other file has them."""
    if metadata.strings is not None:
        return
    for name, entry in metadata.entries.items():
        if entry is None and name not in objects:
            raise ShardError(
                f"{name!r} cannot be read",
                expected="the file that holds it",
                got=missing.get(metadata.items[ItemKey(name, None)].file, "nothing"),
                where=folder,
                remedy="restore the files of the checkpoint",
            )


class _Strings(NamedTuple):
    """The strings of a checkpoint with its nest text, words on omissions, and tensors inside objects."""

    strings: Mapping[str, str]
    left_out: tuple[str, ...]
    inner: list[tuple[str, StoredTensor]]


def _strings(metadata: Metadata, objects: Mapping[str, Value], folder: str) -> _Strings:
    if metadata.strings is not None:
        return _Strings(metadata.strings, (), [])
    # Ranks list their own writes; the paths cover all keys of a rank, in the order of its dictionaries.
    has_order = metadata.paths.keys() == metadata.entries.keys()
    values = (
        (metadata.paths.get(name, (name,)), objects[name] if metadata.entries[name] is None else NestTensor(name))
        for name in (metadata.paths if has_order else metadata.entries)
        if name
    )
    try:
        flattened = flatten_tree.flatten(tree_of(values, folder), _is_tensor, has_order=has_order)
    except nodes.NestError as error:
        raise error.of_file("a checkpoint", folder) from None
    if any(name != leaf.name for name, leaf in flattened.tensors if type(leaf) is NestTensor):
        raise ShardError("the paths of a checkpoint do not lead to its names", where=folder)
    inner = [(name, leaf) for name, leaf in flattened.tensors if type(leaf) is not NestTensor]
    return _Strings(flattened.strings, flattened.left_out, inner)


def _is_tensor(value: Value) -> bool:
    """Tell whether a value is a tensor that is listed, or one in an object."""
    return type(value) is NestTensor or type(value) is StoredTensor


# Tensors in objects, such as betas, lie in the metadata as well.
_MOST_IN_OBJECT_BYTES = 64 * KIB


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return what torch calls the file of a rank; a prefix of the user's has no place in it."""
    return f"__{target_rank}_0.distcp"


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for tensors that torch cannot hold."""
    require_types(spec.specs, _HOLDER, "")
    specs = spec.specs
    _require_small(entries_of([*specs.names, *spec.written_by_others], spec.strings, ""), specs, "")
    return file_layout.size_at_most_bytes(spec)


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path`: an item for each tensor, in the order of `spec`, and a record of them behind.

    Args:
        fd: the empty file.

    Raises TargetError for what torch cannot hold, or strings from which its objects cannot be made.
    """
    specs, strings = spec.specs, dict(spec.strings)
    structure.check_names(path, [*specs.names, *strings])
    require_types(specs, _HOLDER, path)
    _require_small(entries_of([*specs.names, *spec.written_by_others], strings, path), specs, path)
    return Manifest(path, NAME, write_items(fd, path, specs, strings), strings)


# Returns the kind of the item that a file has of a tensor, by its name and kind.
ItemKind = Callable[[str, TensorType], TensorType]


def _same(name: str, kind: TensorType) -> TensorType:
    return kind


def write_items(fd: int, path: str, specs: Specs, strings: dict[str, str], item_kind: ItemKind = _same) -> TensorTable:
    """Write items without their payloads to an empty file, and the record behind them; return where payloads lie."""
    tensors, writer, end = TensorTable(path), structure.HeaderDigestWriter(fd), 0
    kinds = [tensors.kind(kind) for kind in specs.kinds]
    for name, kind in zip(specs.names, specs.kind_ids):
        item = file_layout.of_tensor(item_kind(name, specs.kinds[kind]))
        start = item.start_behind(end)
        payload_start = start + len(item.head)
        writer.add(start, item.head)
        writer.add(payload_start + item.payload_bytes, item.tail)
        tensors.add(name, kinds[kind], payload_start)
        end = start + item.length_bytes
    writer.add(end, file_layout.footer_of(tensors, strings))
    writer.finish()
    return tensors


def _require_small(entries: Iterable[Entry], specs: Specs, path: str) -> None:
    """Raise TargetError for a tensor in an object that is large, or cut: the metadata is to have all of it."""
    kind_of = dict(zip(specs.names, specs.kind_ids))
    for name, _, value in entries:
        for tensor in tensors_in(value) if type(value) is not NestTensor else ():
            kind = specs.kinds[kind_of[tensor]] if tensor in kind_of else None
            if kind is not None and (kind.size_bytes > _MOST_IN_OBJECT_BYTES or kind.shape != kind.whole_shape):
                raise TargetError(
                    f"torch keeps {name!r} as one object, and a tensor in it is large or cut",
                    expected=f"tensors of {_MOST_IN_OBJECT_BYTES} bytes at most, whole on each rank",
                    got=f"{tensor!r} {list(kind.shape)} of {list(kind.whole_shape)}",
                    where=path,
                    remedy="save a list or a dictionary in place of a tuple or an object",
                )


def locate_own(path: str) -> Manifest:
    """Find the tensors of a file that this program has written. Raises ShardError if it is another one, or damaged."""
    footer = read_items(path)
    return Manifest(path, NAME, footer.tensors, footer.strings)


def read_items(path: str, item_kind: ItemKind = _same) -> file_layout.Footer:
    """Return the items that the record of a file lists, as `write_items` wrote them. Raises ShardError if not so."""
    with structure.opened(path) as file:
        own_footer = file_layout.read_footer(file)
        tensors, end = own_footer.tensors, 0
        kinds = (tensors.kinds[number] for number in tensors.kind_ids)
        items = [file_layout.of_tensor(item_kind(*named)) for named in zip(tensors, kinds)]
        spans, parts = list[Span](), list[bytes]()
        for start, item in zip(tensors.offsets, items):
            head_start, tail_start = start - len(item.head), start + item.payload_bytes
            if head_start < end or tail_start + len(item.tail) > own_footer.end:
                break
            end = tail_start + len(item.tail)
            spans += ((head_start, start), (tail_start, end))
            parts += (item.head, item.tail)
        unlike = (number for number, part in enumerate(structure.contents(file, spans)) if part != parts[number])
        misplaced = next(unlike, len(parts)) // 2
    if misplaced < len(tensors):
        raise ShardError(
            f"{list(tensors)[misplaced]!r} is not where its file says",
            expected="an item of its type and shape",
            got="something else",
            where=f"{path}, byte {tensors.offsets[misplaced] - len(items[misplaced].head)}",
        )
    return own_footer


def read_back(meant: Manifest) -> None:
    """Look at the structure of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate_own(meant.path), meant)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Do nothing: all but payloads is there, and there is no place for what depends on them.

    Raises UsageError for `crc`.
    """
    if crc:
        raise UsageError("a .distcp file has no checksum of its own", expected="no --crc", got="--crc", where=path)


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the pieces of tensors in a file, by its footer, or by the metadata beside it.

    Those that others have written are called by their places too, since a file may have several of a tensor. Raises
    ShardError if it is damaged, or nothing says what it holds.
    """
    if _is_own(path):
        return locate_own(path)
    wanted = [item for item in wanted_in(path) if item.kind is not None]
    tensors = TensorTable(path)
    if wanted:
        located = locate_items(path, wanted, Common())
        for key, number in located.numbers.items():
            kind, start = located.tensors.kind_ids[number], located.tensors.offsets[number]
            if number in located.tensors.locations:
                tensors.locations[len(tensors)] = located.tensors.locations[number]
            tensors.add(f"{key.name} {list(key.offsets or ())}", tensors.kind(located.tensors.kinds[kind]), start)
    return Manifest(path, NAME, tensors)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every item of a file has checksums. Raises ChecksumError if one does not fit.

    What this program writes has none, nor has the metadata.
    """
    if Path(path).name == INDEX or _is_own(path):
        return False
    items = [place for place in _metadata_for(path).items.values() if place.file == Path(path).name]
    with structure.opened(path) as file:
        members = (Archive(file, item.offset_bytes, item.length_bytes).members() for item in items)
        checked = [check_members(file, of_item, on_bytes) for of_item in members]
    return bool(checked) and all(checked)


def _is_own(path: str) -> bool:
    with structure.opened(path) as file:
        return file_layout.has_footer(file)
