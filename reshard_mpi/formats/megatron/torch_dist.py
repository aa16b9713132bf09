"""Read the training in a folder of Megatron's form torch_dist, which is a DCP folder (`read_training`).

    iter_0000003/metadata.json      says that it is torch_dist; written last
    iter_0000003/.metadata          torch's index: every tensor and object, and where it lies
    iter_0000003/__0_0.distcp ...   tensors and objects of all ranks
    iter_0000003/common.pt          up to release 0.18: everything that is the same on all ranks; later an object has it

The optimizer's state is there by the names of weights, as whole tensors or with each rank's part of them flattened, or
in flat buckets. (megatron/core/dist_checkpointing and optimizer/distrib_optimizer.py of Megatron-Core 0.14 to 0.19)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp import located_items, metadata_of
from reshard_mpi.formats.dcp.bulk_metadata import ItemKey
from reshard_mpi.formats.dcp.items import LocatedFile, StoragePlace
from reshard_mpi.formats.dcp.metadata import TensorChunks
from reshard_mpi.formats.locations import Location
from reshard_mpi.formats.manifest import OF_RANKS_ALONE
from reshard_mpi.formats.megatron.flat_state import BucketNames, GroupObjects, of_buckets, unflattened
from reshard_mpi.formats.megatron.layers import layer_axes
from reshard_mpi.formats.megatron.parameter_order import ElementReader
from reshard_mpi.formats.megatron.training_tree import (
    FP32,
    MAIN_NAMES,
    FolderTraining,
    SavedTraining,
    chained,
    differing,
    merged,
    require_agreement,
    require_iteration_of_folder,
    scaler_of,
)
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.file_content import TensorPieces, content_of, held
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import natural_key

COMMON, _INDEX = "common.pt", "metadata.json"
_OBJECT = re.compile(r"(?P<key>.*)/shard_(?P<place>[\d.]+)_(?P<of>[\d.]+)")
_STATE = re.compile(r"optimizer\.state\.(?P<kind>[^.]+)\.(?P<key>.+)")
_OF_GROUP = re.compile(
    r"(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\.(?P<what>[a-z_]+)"
)
# Of a gated matrix, tensors of their own that some releases save (`singleton_local_shards`).
_HALF = re.compile(r"(?P<whole>.*\.linear_fc1\.(?:weight|bias)_)[wv]")
_GATE, _UP = "w", "v"
_COMMON_STATE = "common_state"
# How the optimizer's state is kept.
_CONTENT, _LENGTHS = "content_metadata", "per_bucket_numel"
# Objects that are of these ranks alone.
_OF_RANKS = ("rng_state", "rerun_state_machine_state")


class _Objects(NamedTuple):
    """The objects of a folder, sorted.

    Attributes:
        common: what is the same on all ranks.
        extra: what modules of the model have besides tensors, by key.
        of_groups: of the distributed optimizer, by chained optimizer and kind, the values of all model-parallel ranks.
        left_out: keys of those that are of these ranks alone.
        of_files: keys of those that say how long buckets are.
    """

    common: Mapping[str, Value]
    extra: Mapping[str, Value]
    of_groups: GroupObjects
    left_out: Sequence[str]
    of_files: Sequence[str]


def is_torch_dist(folder: str) -> bool:
    """Tell whether a folder is of this form."""
    return source_files.is_file(Path(folder, _INDEX))


def read_training(folder: str) -> FolderTraining:
    """Read the training in a folder. Raises ShardError if it is not whole or contradicts itself."""
    metadata = metadata_of(folder)
    located, missing = located_items(folder, metadata)
    if missing:
        raise ShardError(
            "files of a Megatron checkpoint cannot be used",
            expected="all of them, since each has parts of many tensors",
            got="; ".join(list(missing.values())[:3]),
            where=folder,
            remedy="restore them, or copy the checkpoint again",
        )
    storages = {key: (file, place) for file in located.values() for key, place in file.storages.items()}
    own_objects = {key.name: value for file in located.values() for key, value in file.objects.items()}
    common, of_common = _common_file(folder)
    objects = _sorted(own_objects, common, folder)
    tensors: dict[str, TensorPieces] = {}
    for name, tensor in _tensors(metadata.entries, located, folder):
        shape = metadata.flattened.get(name)
        tensors[name] = tensor if shape is None else unflattened(name, tensor, shape, folder)
    tensors = _with_joined_halves(tensors, folder)

    def of_file(stored: StoredTensor) -> TensorPieces:
        if stored.storage.key in of_common:
            return held(stored, of_common, str(Path(folder, COMMON))).as_one_piece
        file, place = storages[stored.storage.key]
        return _held(stored, file, place)

    weights: dict[str, Value] = {}
    state: dict[str, dict[str, TensorPieces]] = {}
    buckets: dict[str, TensorPieces] = {}
    for name, tensor in tensors.items():
        if match := _STATE.fullmatch(name):
            kind = FP32 if match["kind"] in MAIN_NAMES else match["kind"]
            state.setdefault(match["key"], {})[kind] = tensor
        elif BucketNames.fullmatch(name):
            buckets[name] = tensor
        else:
            weights[name] = tensor
    _require_known(objects, folder)
    args = _args(objects)
    with ElementReader() as reader:
        require_agreement(args, weights, state, reader, folder)
        if buckets:
            state.update(of_buckets(buckets, weights, objects.of_groups, args, reader, folder))
    groups, scaler = _groups_of(objects, folder)
    values = dict(objects.common)
    if scaler is not None:
        values["scaler"] = scaler
    training = SavedTraining({**weights, **objects.extra}, state, groups, values)
    left_out = differing(objects.left_out, OF_RANKS_ALONE)
    about_files = [
        *differing([_CONTENT] if _CONTENT in objects.common else [], "in which form files have the optimizer's state"),
        *differing(objects.of_files, "how long buckets are that are taken apart"),
    ]
    return FolderTraining(training, of_file, tuple(left_out), tuple(about_files))


def _common_file(folder: str) -> tuple[Mapping[str, Value], Mapping[str, int]]:
    """Return the content of `common.pt`, and where its storages begin; nothing if there is none."""
    path = Path(folder, COMMON)
    if not source_files.is_file(path):
        return {}, {}
    with structure.opened(str(path)) as file:
        content = content_of(file, prefix=f"{COMMON}/")
    return dict(_texts(content.root, str(path))), content.starts


def _texts(value: Value, where: str) -> Iterator[tuple[str, Value]]:
    if type(value) is not Dict or not all(type(key) is str for key, _ in value.pairs()):
        raise ShardError(
            "what a Megatron checkpoint keeps of its run is no dictionary", got=type(value).__name__, where=where
        )
    yield from value.pairs()


def _tensors(
    entries: Mapping[str, TensorChunks | None], located: Mapping[str, LocatedFile], folder: str
) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the tensors of the index with their pieces. Raises ShardError for one that cannot be read."""
    place_of = {key: (file.tensors, number) for file in located.values() for key, number in file.numbers.items()}
    why_not = {key.name: why for file in located.values() for key, why in file.unreadable.items()}
    for name, tensor in entries.items():
        if tensor is None:
            continue
        why = tensor.unreadable or why_not.get(name)
        if why:
            raise ShardError(f"the tensor {name!r} of a Megatron checkpoint cannot be read", got=why, where=folder)
        pieces: list[tuple[Box, Location]] = []
        for chunk in tensor.chunks:
            table, number = place_of[ItemKey(name, chunk.offsets)]
            pieces.append((Box.at(chunk.offsets, chunk.sizes), table.source(number)))
        yield name, TensorPieces(tensor.dtype, tensor.shape, tuple(pieces))


def _with_joined_halves(tensors: Mapping[str, TensorPieces], folder: str) -> dict[str, TensorPieces]:
    """Return tensors with the halves of gated matrices in one, the gate first. Raises ShardError if one is missing."""
    joined: dict[str, TensorPieces] = {}
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name)
        if match is None:
            joined[name] = tensor
            continue
        stem, axis = match["whole"], layer_axes(name)
        if stem[:-1] in tensors:
            raise ShardError(
                f"the gated matrix {stem[:-1]!r} of a Megatron checkpoint is there whole and in halves",
                expected="one of both",
                got=f"{stem[:-1]} and {name}",
                where=folder,
                remedy="remove what is of another save; weights under all names can be read with --from dcp",
            )
        gate, up = tensors.get(stem + _GATE), tensors.get(stem + _UP)
        if gate is None or up is None or gate[:2] != up[:2] or len(gate.shape) <= axis:
            raise ShardError(
                f"the gated matrix {stem[:-1]!r} of a Megatron checkpoint has not two halves that are alike",
                expected=f"{stem}{_GATE} and {stem}{_UP} of one type and shape",
                got=", ".join(f"{own.dtype} {list(own.shape)}" if own else "none" for own in (gate, up)),
                where=folder,
                remedy="copy or restore all files of one save",
            )
        rows = gate.shape[axis]
        shape = (*gate.shape[:axis], 2 * rows, *gate.shape[axis + 1 :])
        behind = ((box.within(axis, rows + box.start[axis], rows + box.stop[axis]), place) for box, place in up.pieces)
        joined[stem[:-1]] = TensorPieces(gate.dtype, shape, (*gate.pieces, *behind))
    return joined


def _held(stored: StoredTensor, file: LocatedFile, place: StoragePlace) -> TensorPieces:
    """Return a tensor that is in an object."""
    own = held(stored, {stored.storage.key: place.start}, file.tensors.path)
    if place.swapped:
        raise ShardError(
            "a file of a Megatron checkpoint has the byte order that this machine has not", where=file.tensors.path
        )
    return own.as_one_piece


def _sorted(found: Mapping[str, Value], common: Mapping[str, Value], folder: str) -> _Objects:
    """Sort objects by their keys. Each is kept as a list of one value."""
    extra: dict[str, Value] = {}
    of_groups: dict[tuple[int, str], dict[int, Value]] = {}
    left_out: list[str] = []
    of_files: list[str] = []
    for name, listed in found.items():
        value = listed[0] if type(listed) is list and len(listed) == 1 else listed
        match = _OBJECT.fullmatch(name)
        key = name if match is None else match["key"]
        if key == _COMMON_STATE:
            common = dict(_texts(value, f"{name} of {folder}"))
        elif key in _OF_RANKS:
            left_out.append(name)
        elif group := _OF_GROUP.fullmatch(key):
            chain = int(group["chain"] or 0)
            of_groups.setdefault((chain, group["what"]), {})[int(group["group"])] = value
            of_files += [name] if group["what"].startswith(_LENGTHS) else []
        else:
            extra[name] = value
    if not common:
        raise ShardError(
            "a Megatron checkpoint lacks what its ranks have in common: arguments, iteration, settings",
            expected=f"{COMMON}, or the object {_COMMON_STATE}",
            got="neither",
            where=folder,
            remedy="copy or restore all files of one save; weights alone can be read with --from dcp",
        )
    require_iteration_of_folder(common, f"{COMMON} or the object {_COMMON_STATE}", folder)
    return _Objects(common, extra, of_groups, left_out, of_files)


def _args(objects: _Objects) -> Mapping[str, Value]:
    """Return the arguments of the run, none where they are not kept."""
    state = getattr(objects.common.get("args"), "state", None)
    return {key: value for key, value in state.pairs() if type(key) is str} if type(state) is Dict else {}


# Kinds of objects of the distributed optimizer that are read.
_READ_OF_GROUPS = ("optimizer", "grad_scaler", "per_bucket_numel", "per_bucket_numel_unpadded")


def _require_known(objects: _Objects, folder: str) -> None:
    """Raise ShardError for state of the optimizer in a form that is not read."""
    for _, what in objects.of_groups:
        if what not in _READ_OF_GROUPS:
            raise ShardError(
                f"the optimizer of a Megatron checkpoint has a form that is not read, with {what}",
                expected="state by the names of weights, or buckets (dp_reshardable)",
                got="the form dp_zero_gather_scatter" if what == "param_state" else "another one",
                where=folder,
                remedy="load it with its Megatron and save it in one of these forms; weights alone: --from dcp",
            )


def _groups_of(objects: _Objects, folder: str) -> tuple[list[Dict], Value]:
    """Return the groups of all optimizers with their settings, and the state of the scaler of gradients.

    Raises DisagreementError if model-parallel ranks have different ones.
    """
    groups: list[Dict] = []
    scaler: Value = None
    for number, own in enumerate(chained(objects.common.get("optimizer"))):
        of_ranks = objects.of_groups.get((number, "optimizer"), {0: own.get("optimizer")})
        groups += merged([value for _, value in sorted(of_ranks.items())], folder, may_be_alike=True)
        scalers = objects.of_groups.get((number, "grad_scaler"), {0: own.get("grad_scaler")})
        of_optimizer = scaler_of([*scalers.values()], folder)
        scaler = scaler or of_optimizer
    return groups, scaler


def files_of_torch_dist(folder: str) -> tuple[str, ...]:
    """Return the paths of the files that make up such a checkpoint, its index first."""
    metadata = metadata_of(folder)
    names = sorted({place.file for place in metadata.items.values()} - {".metadata"}, key=natural_key)
    others = [COMMON] if source_files.is_file(Path(folder, COMMON)) else []
    return tuple(str(Path(folder, name)) for name in (_INDEX, ".metadata", *others, *names))
