"""Open a DCP folder: its metadata and the files that it names (`open_folder`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.filesystem.source_files import FileVersion
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp import file_layout, metadata
from reshard_mpi.formats.dcp.bulk_metadata import Chunk, ItemKey
from reshard_mpi.formats.dcp.file_layout import TensorLeaf, tree_of
from reshard_mpi.formats.dcp.items import Common, LocatedFile, MisfitError, WantedItem, locate_items, named
from reshard_mpi.formats.dcp.metadata import INDEX, Metadata, without_flat_state
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree, nodes
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorType
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import natural_key

NAME = "dcp"


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
        unreadable = tensor.unreadable
        if why_not and not unreadable:
            keys = (ItemKey(name, chunk.offsets) for chunk in tensor.chunks)
            unreadable = next((why_not[key] for key in keys if key in why_not), "")
        if unreadable:
            listed.add_unreadable(name, tensor.dtype, tensor.shape, unreadable)
            continue
        pieces = []
        for chunk in tensor.chunks:
            place = place_of.get(ItemKey(name, chunk.offsets))
            if place is not None:
                box = boxes.get(chunk) or boxes.setdefault(chunk, Box.at(chunk.offsets, chunk.sizes))
                pieces.append(ListedChunk(box, *place))
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
    metadata = without_flat_state(metadata_of(folder))
    names = {place.file for place in metadata.items.values()}
    if file == max(names, key=natural_key, default=file):
        _kept.clear()  # whoever goes through all files is done
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
        (metadata.paths.get(name, (name,)), objects[name] if metadata.entries[name] is None else TensorLeaf(name))
        for name in (metadata.paths if has_order else metadata.entries)
        if name
    )
    try:
        flattened = flatten_tree.flatten(tree_of(values, folder), _is_tensor, has_order=has_order)
    except nodes.NestError as error:
        raise error.of_file("a checkpoint", folder) from None
    if any(name != leaf.name for name, leaf in flattened.tensors if type(leaf) is TensorLeaf):
        raise ShardError("the paths of a checkpoint do not lead to its names", where=folder)
    inner = [(name, leaf) for name, leaf in flattened.tensors if type(leaf) is not TensorLeaf]
    return _Strings(flattened.strings, flattened.left_out, inner)


def _is_tensor(value: Value) -> bool:
    """Tell whether a value is a tensor that is listed, or one in an object."""
    return type(value) is TensorLeaf or type(value) is StoredTensor
