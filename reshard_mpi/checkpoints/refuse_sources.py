"""Refuse forms of other programs that are not read, and one shard that is no full checkpoint (`require_readable`).

Folders of Megatron and DeepSpeed hold torch's files, which would pass for one full checkpoint, or for none. Each is
refused by what it is. In a data-parallel run every rank saves the whole checkpoint; in any other run one shard is only
a part. Nothing in a shard tells which, so it is compared with the shards in the rank folders beside its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.file_names import name_without_rank
from reshard_mpi.checkpoints.shard_files import ShardFiles, SingleShard
from reshard_mpi.errors import DisagreementError, ReshardError, SourceError, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.structure import is_file_name
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.groups import grouped
from reshard_mpi.planning.comparison_choice import kind_of
from reshard_mpi.planning.rank_plan import Check, Limits, ReadItem
from reshard_mpi.planning.shared_facts import not_carried
from reshard_mpi.planning.source_flaws import modified_warning, named
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

if TYPE_CHECKING:
    from random import Random

# If ranks hold different parts, neighbours do: they differ in what is cut over the fastest mesh axis, and the last rank
# in most of what is cut over any axis.
_MAX_SIBLINGS = 4
# At most 96 KiB of each shard are read. Tensors of one shape whose names differ only in numbers are mostly cut alike,
# so one of each such kind comes first: a model has some dozens of kinds.
_MAX_TENSORS = 96
_SAMPLES = 4
_SAMPLE_BYTES = 256
_SEED = 11
_LIMITS = Limits(buffer_bytes=MIB, window_bytes=MIB)


def require_files_meant(files: ShardFiles) -> None:
    """Raise DisagreementError if files beside the source's own are not read, or some may be copies of others."""
    for modified in modified_warning(files.modified):
        raise DisagreementError(
            "shards are not the ones that their run has recorded",
            expected="files that have their times, as --strict demands",
            got=modified,
            where=files.path,
            remedy="leave out --strict, or restore them with their times (cp -p), or with their records",
        )
    if files.left_out:
        expected, remedy = "all files of the folder to be read", "move them elsewhere"
        raise not_carried(files.left_out, expected=expected, remedy=remedy, where=files.path)


def require_full(files: ShardFiles, manifest: Manifest, *, said: bool) -> ShardFiles:
    """Return `files`, which are one full checkpoint; with a note if only a comparison could show that.

    Args:
        manifest: of the files.
        said: whether the user has said that the checkpoint is of one rank.

    Raises SourceError, which names the folder to give instead, if shards of other ranks lie beside it and differ, or if
    it should be compared with others and cannot be.
    """
    lone = SingleShard.of(files)
    if lone is None:
        return files
    siblings = lone.siblings()
    if not siblings and (said or lone.rank == 0):
        return files if said else _without_siblings(files, lone)
    compared: list[int] = []
    problems: list[str] = []
    for rank in _nearest_and_last(lone.rank, siblings):
        try:
            other = _counterpart(files, lone.rank, rank, siblings[rank])
            difference = _difference(manifest, other)
        except (ReshardError, OSError) as error:
            problems.append(f"that of rank {rank} cannot be compared ({told(error)})")
            continue
        if difference:
            raise _refusal(files, lone, f"that of rank {rank}, beside it, {difference}")
        compared.append(rank)
    if not compared:
        raise _refusal(files, lone, "; ".join(problems) or "none of other ranks to compare it with")
    beside = f"the shards beside it (compared with {named(compared)})"
    note = f"{files.path} is taken for a full checkpoint: it holds the same as {beside}"
    return files._replace(notes=(*files.notes, note))


def _without_siblings(files: ShardFiles, lone: SingleShard) -> ShardFiles:
    """Return files of rank 0 alone, with a warning if other ranks have folders without shards.

    Raises SourceError if a shard of another rank has begun to be written.
    """
    from reshard_mpi.journal.publication import is_partial

    empty = lone.empty_siblings()
    for folder in empty.values():
        partial = next(filter(is_partial, map(folder.joinpath, source_files.names(folder, ()))), None)
        if partial is not None:
            raise SourceError(
                "the shard of another rank is not finished",
                expected="all shards of the checkpoint, or a single one",
                got=str(partial),
                where=files.path,
                remedy="let the run that writes it finish (transform --resume), or remove that file if none does",
            )
    if not empty:
        return files
    warning = f"{files.path} is taken for a full checkpoint: the rank folders beside it ({named(empty)}) have no shards"
    return files._replace(warnings=(*files.warnings, warning))


def _refusal(files: ShardFiles, lone: SingleShard, got: str) -> SourceError:
    return SourceError(
        "the shard of one rank is no full checkpoint",
        expected="the folder of all rank folders, or a shard that holds the same as those of the other ranks",
        got=f"the shard of rank {lone.rank} alone; {got}",
        where=files.path,
        remedy=f"give {lone.checkpoint}, and the strategy it is sharded by",
    )


def _nearest_and_last(rank: int, siblings: Mapping[int, object]) -> list[int]:
    """Return a few of the other ranks: those nearest to `rank`, and the last one."""
    near = sorted(siblings, key=lambda other: (abs(other - rank), other))
    return list(dict.fromkeys([*near[: _MAX_SIBLINGS - 1], *sorted(siblings)[-1:]]))


def _counterpart(files: ShardFiles, rank: int, other_rank: int, candidates: list[Path]) -> Manifest:
    """Return the manifest of those files of another rank that have the same names as `files`, which are of `rank`.

    A single file may have another name. Raises SourceError if several files have.
    """
    (paths,) = files.by_rank.values()
    chosen = [_namesake(Path(path).name, rank, other_rank, candidates) for path in paths]
    if None in chosen:
        if len(paths) > 1 or len(candidates) > 1:
            got = ", ".join(path.name for path in candidates[:3])
            raise SourceError(
                "no shard of the same name",
                expected=Path(paths[0]).name,
                got=got,
                remedy="give all shards of a rank the names that those of other ranks have",
            )
        chosen = [candidates[0]]
    manifests = [_locate(path) for path in chosen if path is not None]
    if len(manifests) == 1:
        return manifests[0]
    if files.by_branch:
        from reshard_mpi.checkpoints.join_files import joined

        return joined(manifests, manifests[0].path, by_branch=True)
    tensors = {name: entry for manifest in manifests for name, entry in manifest.tensors.items()}
    return manifests[0]._replace(tensors=TensorTable(manifests[0].path, tensors.values()))


def _namesake(name: str, rank: int, other_rank: int, candidates: list[Path]) -> Path | None:
    alike = name_without_rank(rank, name)
    return next(
        (path for path in candidates if path.name == name),
        next((path for path in candidates if name_without_rank(other_rank, path.name) == alike), None),
    )


def _locate(path: Path) -> Manifest:
    name = formats.name_of(path.name)
    assert name is not None  # it was listed as a shard
    return formats.by_name(name).locate(str(path))


def _difference(shard: Manifest, other: Manifest) -> str:
    """Return how another rank's shard differs, as the end of a sentence; empty if no difference is seen."""
    ours, theirs = shard.tensors, other.tensors
    if ours.keys() != theirs.keys():
        name = min(ours.keys() ^ theirs.keys())
        return f"{'lacks' if name in ours else 'also holds'} {name!r}"
    for name, entry in ours.items():
        if (entry.dtype, entry.shape) != (theirs[name].dtype, theirs[name].shape):
            return f"holds {name!r} as {_type(theirs[name])}, not {_type(entry)}"
    from reshard_mpi.engine.first_difference import first_difference
    from reshard_mpi.engine.open_files import Files

    with Files() as files:
        for name in _chosen(ours):
            for check in _samples(ours[name], theirs[name]):
                if first_difference(check, limits=_LIMITS, files=files) is not None:
                    return f"holds other values of {name!r}"
    return ""


def _type(entry: TensorEntry) -> str:
    return f"{entry.dtype.name} {list(entry.shape)}"


def _chosen(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of the tensors to compare: one of each kind, the largest first, and others if there is room."""
    kinds = grouped(((kind_of(name), entry.dtype, entry.shape), name) for name, entry in tensors.items())
    generator = _generator()
    first = [generator.choice(names) for names in kinds.values()]
    taken = set(first)
    others = (name for name in tensors if name not in taken)
    return [*sorted(first, key=lambda name: -tensors[name].size_bytes), *others][:_MAX_TENSORS]


def _generator() -> Random:
    from random import Random  # only here, since most checkpoints are not one shard

    return Random(_SEED)


def _samples(ours: TensorEntry, theirs: TensorEntry) -> Iterator[Check]:
    """Yield checks of the beginning, the end, and places in between that are drawn from a fixed seed."""
    whole = Box.whole(ours.shape)
    count = math.prod(ours.shape)
    length = min(count, max(1, _SAMPLE_BYTES // ours.dtype.itemsize_bytes))
    generator = _generator()
    places = {0, count - length, *(generator.randint(0, count - length) for _ in range(_SAMPLES - 2))}
    for first in sorted(places):
        for region in whole.blocks(max(1, length), first, first + length):
            reads = (ReadItem(0, ours, whole, region), ReadItem(1, theirs, whole, region))
            yield Check(ours.name, reads, refuse=True, why="")


# Files that name the folder of the latest save, as DeepSpeed and its converter write them.
_TRACKERS = ("latest", "latest_universal")
_MAX_TAG_BYTES = 255
# The folder of parameters in what ds_to_universal.py makes.
_UNIVERSAL, _OF_PARAMETER = "zero", "fp32.pt"
_MEGATRON, _TORCH_INDEX = "megatron", ".metadata"
_MEGATRON_FILE, _MEGATRON_OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_MAX_LOOKED_INTO = 64
_SETTINGS, _SETTINGS_BYTES, _ZARR = "metadata.json", 4096, b'"sharded_backend": "zarr"'


class ForeignCheckpointError(SourceError):
    """The checkpoint is of another program, in a form that is known and not read."""


class _ForeignFolder(NamedTuple):
    """A folder of another program: its kind, where its contents are, and advice."""

    what: str
    got: str
    remedy: str


def require_readable(folder: str, role: str, format_name: str | None) -> None:
    """Raise ForeignCheckpointError if a folder, or a save that a file in it names, is of a form that is not read.

    Args:
        role: what errors call the checkpoint.
        format_name: the one that the user has chosen.
    """
    tagged = _tagged(folder)
    for path in (folder, *tagged):
        kind = _universal(path) or _megatron(path, format_name)
        if kind is not None:
            raise ForeignCheckpointError(
                f"the {role} is {kind.what}, which is not read",
                expected="whole tensors, or shards with a strategy",
                got=kind.got,
                where=path,
                remedy=kind.remedy,
            )


def require_no_lost_index(folder: str, role: str, format_name: str) -> None:
    """Raise ForeignCheckpointError if a folder with one format's index is of another, whose own index is lost.

    A folder of Megatron has torch's `.metadata` too; `common.pt` beside it tells that `metadata.json` lay there.
    """
    for info in formats.all_formats():
        own = {*info.before_index} - {*formats.info(format_name).marks}
        if format_name in info.also_marked_as and not own.isdisjoint(source_files.names(folder, ())):
            index = info.marks[0]
            raise ForeignCheckpointError(
                f"the {role} is a {info.title} that has lost its {index}, or one whose save was not finished",
                expected=index,
                got=" and ".join(info.before_index),
                where=folder,
                remedy=f"copy or restore {index}; or read the tensors alone, with --from {format_name}",
            )


def _tagged(folder: str) -> list[str]:
    """Return the folders that DeepSpeed's trackers in a folder name."""
    folders = []
    for tracker in _TRACKERS:
        try:
            tag = source_files.first_bytes(Path(folder, tracker), _MAX_TAG_BYTES + 1).decode().strip()
            if is_file_name(tag) and source_files.is_folder(Path(folder, tag)):
                folders.append(str(Path(folder, tag)))
        except (OSError, UnicodeDecodeError):
            continue
    return folders


def _universal(folder: str) -> _ForeignFolder | None:
    """Return the kind of a folder with the parameters of a universal checkpoint of DeepSpeed, and no more of it."""
    names = source_files.names(folder, ())
    if _has_parameters(folder, names):
        return _ForeignFolder(
            "the parameters of a universal checkpoint of DeepSpeed, without its settings",
            "folders PARAMETER/fp32.pt and so on",
            f"give the folder above, {Path(folder).parent}",
        )
    if _UNIVERSAL in names and _has_parameters(str(Path(folder, _UNIVERSAL))):
        return _ForeignFolder(
            "a universal checkpoint of DeepSpeed without its settings",
            f"{_UNIVERSAL}/PARAMETER/fp32.pt and so on, and no *_model_states.pt",
            "copy or restore those files, or give the checkpoint that it was made from",
        )
    return None


def _has_parameters(folder: str, names: Sequence[str] | None = None) -> bool:
    """Tell whether folders of parameters lie in a folder, as far as it is looked into."""
    listed = source_files.names(folder, ()) if names is None else names
    return any(source_files.is_file(Path(folder, name, _OF_PARAMETER)) for name in listed[:_MAX_LOOKED_INTO])


def _megatron(folder: str, format_name: str | None) -> _ForeignFolder | None:
    """Return the kind of a folder of Megatron in a form that is not read; None if it is not one."""
    names = source_files.names(folder, ())
    if _SETTINGS in names and _ZARR in source_files.first_bytes(Path(folder, _SETTINGS), _SETTINGS_BYTES, b""):
        return _ForeignFolder(
            "a Megatron checkpoint in zarr", "arrays of zarr", "load it with Megatron, and save it as torch_dist"
        )
    if format_name == _MEGATRON and _TORCH_INDEX in names and _SETTINGS not in names:
        return _ForeignFolder(
            "a Megatron checkpoint in the form torch_dcp or fsdp_dtensor, or one whose save was not finished",
            f"{_TORCH_INDEX} without {_SETTINGS}",
            "read it with --from dcp, by the names that these forms have: their layers and experts are not stacked, and"
            " of fsdp_dtensor gate and values (weight_w, weight_v) are apart",
        )
    if _MEGATRON_FILE in names and _MEGATRON_OPTIMIZER in names:
        what = f"{_MEGATRON_FILE}, and the optimizer's state in flat vectors in {_MEGATRON_OPTIMIZER}"
        remedy = f"give the folder of all ranks, {Path(folder).parent}; or {_MEGATRON_FILE} for this rank's weights"
        return _ForeignFolder("one rank of a Megatron checkpoint", what, remedy)
    return None
