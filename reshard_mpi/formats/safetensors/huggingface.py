"""Read Hugging Face folders (`open_folder`), and make their index (`index_contents`); `journal/commit` writes it.

A checkpoint is `model.safetensors`, or files such as `model-00001-of-00003.safetensors` and the index
`model.safetensors.index.json` (see `index_contents`). Loaders disagree on folders whose files and index do not fit each
other; such a folder is refused. A file says in its metadata that it is of torch (`format`: `pt`), since some loaders
refuse anything else; there is no place for strings.

What MindSpore's `unified_safetensors` makes is read as well: files that `param_name_map.json` names in place of an
index, and beside them `hyper_param.safetensors`. There MindSpore puts what its strategy does not list, as rank 0 has
it, which may be a slice; so from there only single numbers are taken.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError, TargetError, UsageError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats import safetensors, structure
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.protocol import NO_SUMS
from reshard_mpi.formats.protocol import no_crc as check_crc  # MindSpore's may be of another file
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.safetensors import read_back
from reshard_mpi.formats.safetensors.file_header import FORMAT, TORCH
from reshard_mpi.formats.safetensors.json_reader import Json, JsonReader, shown
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorTable
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB, shortened

_METADATA_KEY, _TOTAL, _MAP = "metadata", "total_size", "weight_map"
_SUFFIX = ".safetensors"
_MAX_FILE_BYTES = 1024
_REMEDY = "restore files and index of one and the same save, or choose files without the index (--select 'model-*')"


def read(path: str, *, may_be_flat: bool = False) -> dict[str, str]:
    """Return the file of each tensor, by the names in the index at `path`. may_be_flat: it may be the map alone.

    Raises ShardError if it is damaged, names a tensor twice, or a file that does not lie in its folder.
    """
    with structure.opened(path) as file:
        text = JsonReader(file.read_exactly, path, 0, file.size_bytes, "the index of a checkpoint")
        nested, flat = None, _Map(text)
        for key in text.members():
            if key == _MAP and text.at_object:
                if nested is not None:
                    raise text.damage(f"the index of a checkpoint has {_MAP!r} twice", expected="it once")
                nested = _Map(text)
                for name in text.members():
                    nested.add(name, text.value())
                continue
            value = text.value()
            if may_be_flat and isinstance(value, str):
                flat.add(key, value)
        text.require_end()
    files_by_name = flat.files if nested is None else nested.files
    if not files_by_name:
        raise text.damage(f"the index of a checkpoint has no {_MAP!r}", expected="a file for each tensor")
    return files_by_name


class _Map:
    """The files of tensors while they are read."""

    def __init__(self, text: JsonReader) -> None:
        self.files: dict[str, str] = {}
        self._text = text
        self._known: dict[str, str] = {}
        self._kept_bytes = 0

    def add(self, name: str, file: Json) -> None:
        """Add the file of a tensor."""
        text, file_names = self._text, self._known
        text.require_new(name, self.files, f"the index of a checkpoint names {shown(name)} twice")
        if type(file) is not str or (file not in file_names and not _is_inside(file)):
            raise text.damage(
                f"the index of a checkpoint says that {name!r} lies outside of its folder, or in no file of it",
                expected=f"the name of a file in the folder, which ends in {_SUFFIX}",
                got=shown(file),
            )
        self._kept_bytes += structure.kept_bytes(name)
        if self._kept_bytes > structure.MAX_KEPT_BYTES or len(self.files) == structure.MAX_TENSORS:
            raise text.damage(
                "the index of a checkpoint names too many tensors",
                expected=f"{structure.MAX_TENSORS} at most, of {structure.MAX_KEPT_BYTES} bytes together",
            )
        self.files[sys.intern(name)] = file_names.setdefault(file, file)


def _is_inside(file: str) -> bool:
    """Tell whether a path names a file of the folder, or of one in it, whatever the links there are."""
    is_short = len(file.encode()) <= _MAX_FILE_BYTES
    return is_short and all(map(structure.is_file_name, file.split("/"))) and file.endswith(_SUFFIX)


def index_text(files_of: Mapping[str, str], total_bytes: int) -> str:
    """Return the text of the index: the file of each tensor, and their total size."""
    facts = {_METADATA_KEY: {_TOTAL: total_bytes}, _MAP: dict(files_of)}
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def require_listed(weight_map: Mapping[str, str], file: str, held: Iterable[str], folder: str) -> None:
    """Raise ShardError unless the index names this file for each of the tensors that it holds."""
    for name in held:
        listed = weight_map.get(name)
        if listed != file:
            raise ShardError(
                f"{name!r} lies in a file that the index does not name for it",
                expected=f"it in {listed} alone" if listed is not None else f"no {name!r}, which the index lacks",
                got=f"it in {file}",
                where=folder,
                remedy=_REMEDY,
            )


def require_all(weight_map: Mapping[str, str], held: Collection[str], folder: str) -> None:
    """Raise ShardError if the index names tensors that no file holds. held: tensors in files."""
    if len(held) < len(weight_map):
        missing = sorted(set(weight_map).difference(held))
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ShardError(
            f"{missing[0]!r} is not in the file that the index names for it{more}",
            expected=f"it in {weight_map[missing[0]]}",
            got="other tensors",
            where=folder,
            remedy=_REMEDY,
        )


NAME = "hf"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAP, HYPER = "param_name_map.json", "hyper_param.safetensors"
_METADATA = {FORMAT: TORCH}
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors of one of the files, as of any safetensors file."""
    return safetensors.locate(path, like)._replace(format=NAME, strings={})


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the size of the file of `spec`. Raises TargetError for unsupported contents."""
    _require_types(spec.specs, "")
    return safetensors.lay_out(spec.specs, _METADATA, "").size_bytes


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without its payloads. Raises TargetError for unsupported contents."""
    _require_types(spec.specs, path)
    return safetensors.reserve_as(fd, path, spec._replace(strings={}), NAME, _METADATA)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Do nothing: the file is as it should be. Raises UsageError if a checksum is asked for."""
    if crc:
        raise UsageError("files of Hugging Face's form have no checksum", expected="no --crc", got="--crc", where=path)


class _FolderFiles(NamedTuple):
    """The files of a folder."""

    listed_by: str | None  # the name of the file that says which file holds which tensor (weight_map), if there is one
    weight_map: dict[str, str]
    has_hyper: bool = False  # `HYPER` lies beside it

    @property
    def files(self) -> Sequence[str]:
        """The files that hold tensors, in the order of their names."""
        named = set(self.weight_map.values()) if self.listed_by is not None else {SINGLE}
        return sorted({*named, HYPER} if self.has_hyper else named)


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the index, if there is one, and of all files that it names.

    Raises ShardError if the index is damaged, or files lie beside it, or beside `model.safetensors`, that some loaders
    take in its place.
    """
    listing = _listing(folder)
    names = listing.files if listing.listed_by is None else (listing.listed_by, *listing.files)
    return tuple(str(Path(folder, name)) for name in names)


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the tensors of the checkpoint, file by file.

    Raises ShardError if files and index do not fit each other, or a file is missing or damaged: no other has the same.
    """
    listing, listed = _listing(folder), ChunkedTensors(folder)
    strings: dict[str, dict[str, None]] = {}
    left_out: dict[str, None] = {}
    for file in listing.files:
        located = _located(folder, file)
        held = located.tensors
        left_out |= dict.fromkeys(located.left_out)
        for name, text in located.strings.items():
            strings.setdefault(name, {})[text] = None
        if listing.has_hyper and file == HYPER:
            _require_numbers(held, listing.weight_map)
        elif listing.listed_by is not None:
            require_listed(listing.weight_map, file, held, folder)
        listed.add_whole(held)
    require_all(listing.weight_map, listed, folder)
    same = {name: next(iter(texts)) for name, texts in strings.items() if len(texts) == 1 and name not in listed}
    differing = (f"of the metadata {name!r}, of which there are several" for name in strings.keys() - same.keys())
    return {0: Manifest(folder, NAME, listed, same, left_out=(*left_out, *sorted(differing)))}


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return the fixed name of a file: loaders know files by these names, so there is no prefix."""
    return SINGLE if targets == 1 else f"model-{target_rank + 1:05}-of-{targets:05}.safetensors"


def index_contents(held: Sequence[Manifest]) -> dict[str, bytes]:
    """Return the index over these files; none if there is one, which needs none."""
    if len(held) == 1:
        return {}
    weight_map = {name: Path(file.path).name for file in held for name in file.tensors}
    total_bytes = sum(entry.size_bytes for file in held for entry in file.tensors.values())
    return {INDEX: index_text(weight_map, total_bytes).encode()}


def _listing(folder: str) -> _FolderFiles:
    """Return the files of a folder. Raises ShardError as `files_of` does."""
    if source_files.is_file(Path(folder, INDEX)):
        weight_map = read(str(Path(folder, INDEX)))
        _require_one_save(folder, INDEX, weight_map)
        _require_no_other_parts(folder, weight_map)
        return _FolderFiles(INDEX, weight_map)
    if source_files.is_file(Path(folder, MAP)):
        weight_map = read(str(Path(folder, MAP)), may_be_flat=True)
        _require_one_save(folder, MAP, weight_map)
        has_hyper = HYPER not in weight_map.values() and source_files.is_taken(Path(folder, HYPER))
        return _FolderFiles(MAP, weight_map, has_hyper)
    others = sorted(name for name in source_files.names(folder) if name.endswith(_SUFFIX) and name != SINGLE)
    if others:
        raise ShardError(
            f"other files lie beside {SINGLE}, and no index says whether they belong to it",
            expected=f"{SINGLE} alone, or {INDEX}",
            got=shortened(others, 3),
            where=folder,
            remedy=f"remove what does not belong to it, or choose with --select (such as --select {SINGLE})",
        )
    return _FolderFiles(None, {})


def _require_one_save(folder: str, listed_by: str, weight_map: Mapping[str, str]) -> None:
    """Raise ShardError if what another program would load lies beside an index, and is of another save.

    Args:
        listed_by: the name of the index.
    """
    for other in (SINGLE, MAP):
        if other == listed_by or not source_files.is_taken(Path(folder, other)):
            continue
        files = {other} if other == SINGLE else set(read(str(Path(folder, other)), may_be_flat=True).values())
        if not files.issubset(weight_map.values()):
            raise ShardError(
                f"{other} lies beside an index that does not name {'it' if other == SINGLE else 'its files'}: one of"
                " them is left from another save",
                expected=f"either {other} or {listed_by}: some programs load the one, some the other",
                got="both",
                where=folder,
                remedy="remove the old one" + f", or choose {SINGLE} with --select" * (other == SINGLE),
            )


def _require_no_other_parts(folder: str, weight_map: Mapping[str, str]) -> None:
    """Raise ShardError if a part of another save lies beside the files that the index names."""
    named = set(weight_map.values())
    others = sorted(name for name in source_files.names(folder) if _PART.fullmatch(name) and name not in named)
    if others:
        raise ShardError(
            "parts lie beside the index that it does not name: they are left from another save",
            expected=f"the {len(named)} files that {INDEX} names",
            got=shortened(others, 3),
            where=folder,
            remedy="remove the old ones",
        )


def _require_numbers(held: TensorTable, weight_map: Mapping[str, str]) -> None:
    """Raise ShardError unless a file holds single numbers only, and none that the map names for another file."""
    for name, entry in held.items():
        if name in weight_map:
            raise ShardError(
                f"{name!r} lies in two files",
                expected=f"it in {weight_map[name]} alone, as {MAP} says",
                got=f"it in {HYPER} too",
                where=held.path,
                remedy="remove the one that is left from another save",
            )
        if math.prod(entry.shape) != 1:
            raise ShardError(
                f"{name!r} may be a slice: MindSpore puts there what rank 0 has of a tensor that its strategy lacks",
                expected="single numbers, such as step counters",
                got=f"{entry.dtype} {list(entry.shape)}",
                where=held.path,
                remedy="leave that file out (--select 'part*'), or take it at its word (--select '*.safetensors')",
            )


def _located(folder: str, file: str) -> Manifest:
    path = str(Path(folder, file))
    if not source_files.is_taken(path):
        raise ShardError(
            "a file that the index names is not there",
            expected=file,
            got="nothing",
            where=folder,
            remedy="copy or download it again",
        )
    manifest = safetensors.locate(path)
    if manifest.part_of:
        raise ShardError(
            f"a file that the index names is one part of {manifest.part_of}, and may hold slices",
            expected="whole tensors",
            where=path,
            remedy="give the folder of that checkpoint",
        )
    return manifest


def _require_types(specs: Specs, path: str) -> None:
    """Raise TargetError for the first tensor of MindSpore's Int4, which torch would take for int8."""
    for name, kind in zip(specs.names, specs.kind_ids):
        if specs.kinds[kind].dtype.name == "int4":
            raise TargetError(
                f"{name!r} has a type that Hugging Face's libraries do not know",
                expected="a type that torch has",
                got="int4",
                where=path,
                remedy="write it as safetensors, ckpt or hdf5 (--to)",
            )
    structure.check_names(path, list(specs.names))
