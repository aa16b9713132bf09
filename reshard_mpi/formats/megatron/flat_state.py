"""Read flat state of Megatron's distributed optimizer: in buckets (`of_buckets`), or part by part (`unflattened`).

`dp_reshardable` keeps the buckets of each model-parallel rank as they are in memory (`parameter_order`). Up to release
0.15 `fully_sharded_model_space` keeps each rank's part of a tensor as a row of elements: a tensor of shape [X, Y] whose
parts have shape [x, y] is stored with shape [X/x, Y/y, x*y]. (megatron/core/optimizer/distrib_optimizer.py)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Location
from reshard_mpi.formats.megatron.model_names import is_expert
from reshard_mpi.formats.megatron.parameter_order import (
    MAIN,
    Bucket,
    Buffer,
    ElementReader,
    Parameter,
    PlacedParameter,
    placed,
)
from reshard_mpi.formats.megatron.rank_parameters import ModelParallelSizes, cells_of, has_expert_groups, parameters_of
from reshard_mpi.formats.megatron.training_tree import FP32
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.framework_files import FlatVector, TensorPieces
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME
from reshard_mpi.sharding.box import Box

BucketNames = re.compile(
    r"(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})"
    r"\.gbuf_idx_(?P<buffer>\d{1,9})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d{1,9})"
    r"\.(?P<kind>\w+)"
)
# By chained optimizer: of each model-parallel rank its buffers.
_Ranks = dict[int, list[Buffer]]
# What is needed of it here: from what element on, and where.
_Part = tuple[int, FlatVector]


def unflattened(name: str, tensor: TensorPieces, shape: tuple[int, ...], folder: str) -> TensorPieces:
    """Return a whole tensor whose parts are stored as rows of elements. Raises ShardError if it cannot be one."""
    *grid, row = tensor.shape or (0,)
    is_one = len(grid) == len(shape) and all(count and whole % count == 0 for count, whole in zip(grid, shape))
    part = tuple(whole // count for count, whole in zip(grid, shape)) if is_one else ()
    if not is_one or math.prod(part) != row:
        raise ShardError(
            f"the tensor {name!r} of a Megatron checkpoint is not of the shape that it says",
            expected=f"rows of the parts of a tensor of shape {list(shape)}",
            got=f"shape {list(tensor.shape)}",
            where=folder,
        )
    of_cell: dict[tuple[int, ...], list[tuple[Box, Location]]] = {}
    for box, place in tensor.pieces:
        of_cell.setdefault(box.start[:-1], []).append((box, place))
    pieces = []
    for cell, runs in of_cell.items():
        runs.sort(key=lambda run: run[0].start[-1])
        ends = [0, *(box.stop[-1] for box, _ in runs)]
        if (
            [box.start[-1] for box, _ in runs] != ends[:-1]
            or ends[-1] != row
            or any(box.size != box.shape[-1] for box, _ in runs)
        ):
            raise ShardError(
                f"the tensor {name!r} of a Megatron checkpoint lacks elements",
                expected=f"{row} elements of the part at {list(cell)}, each once",
                got=", ".join(f"{box.start[-1]} to {box.stop[-1]}" for box, _ in runs[:4]),
                where=folder,
            )
        low = tuple(number * length for number, length in zip(cell, part))
        high = tuple(start + length for start, length in zip(low, part))
        pieces.append((Box(low, high), _joined(name, [place for _, place in runs], folder)))
    return TensorPieces(tensor.dtype, shape, tuple(pieces))


def _joined(name: str, places: Sequence[Location], folder: str) -> ByteRanges:
    """Return rows of elements one behind the other. Raises ShardError if one is stored in another way."""
    ranges: list[ByteRange] = []
    for place in places:
        if not isinstance(place, ByteRanges) or place.swapped:
            raise ShardError(
                f"the tensor {name!r} of a Megatron checkpoint is stored as Megatron stores none",
                expected="elements in a row, in the byte order of this machine",
                got="elements with gaps between them, or in another order",
                where=folder,
                remedy="save it with its Megatron; weights alone can be read with --from dcp",
            )
        ranges += place.ranges
    return ByteRanges(tuple(ranges))


def of_buckets(
    tensors: Mapping[str, TensorPieces],
    weights: Mapping[str, Value],
    objects: Mapping[tuple[int, str], Mapping[int, Value]],
    args: Mapping[str, Value],
    reader: ElementReader,
    folder: str,
) -> dict[str, dict[str, TensorPieces]]:
    """Return the optimizer's state by the names of weights and its kinds, taken out of buckets.

    Args:
        tensors: the buckets; weights: the tensors of the model; objects: of the distributed optimizer.
        args: of the run.

    Raises ShardError if they contradict each other, or whose state lies where cannot be told.
    """
    ranks = _by_rank(tensors, objects, folder)
    parallel = ModelParallelSizes(args, weights, ranks, objects, folder)
    cells = {key: cells_of(key, own) for key, own in weights.items() if type(own) is TensorPieces}
    found: list[PlacedParameter] = []
    to_be_found: set[str] = set()
    for chain, of_chain in ranks.items():
        has_experts = parallel.is_of_experts(chain)
        wanted = {key: own for key, own in cells.items() if has_experts in (None, is_expert(key))}
        for stages, part, parts, experts in parallel.families(chain):
            to_be_found.update(wanted if len(stages) < parallel.stages else ())
            own: list[Parameter] = []
            for are_experts in (False, True):
                keys = {key: of_key for key, of_key in wanted.items() if is_expert(key) == are_experts}
                cut = parts if not are_experts else parallel.expert_parts
                own += parameters_of(keys, weights, part % cut, cut, experts, folder)
            found += placed([of_chain[stage] for stage in stages], own, parallel.chunks, reader)
    state = _state_of(found, weights, folder)
    if lost := sorted(to_be_found - state.keys()):
        raise ShardError(
            "a Megatron checkpoint lacks buckets of its optimizer",
            expected=f"those of a stage that has {lost[0]!r}",
            got="experts of other stages alone",
            where=folder,
            remedy="copy or restore all files of one save",
        )
    return state


def _by_rank(
    tensors: Mapping[str, TensorPieces], objects: Mapping[tuple[int, str], Mapping[int, Value]], folder: str
) -> dict[int, _Ranks]:
    """Return the buffers of all model-parallel ranks, by chained optimizer. Raises ShardError if some are missing."""
    numbered: dict[int, dict[int, dict[int, dict[int, dict[str, TensorPieces]]]]] = {}
    dtypes: dict[tuple[int, int, int], str] = {}
    for name, tensor in tensors.items():
        match = BucketNames.fullmatch(name)
        assert match is not None
        chain, group, buffer, bucket = (int(match[word] or 0) for word in ("chain", "group", "buffer", "bucket"))
        dtypes[chain, group, buffer] = match["dtype"]
        of_rank = numbered.setdefault(chain, {}).setdefault(group, {})
        of_rank.setdefault(buffer, {}).setdefault(bucket, {})[match["kind"]] = tensor
    ranks: dict[int, _Ranks] = {}
    for chain, of_chain in sorted(numbered.items()):
        # Stages may have no experts.
        groups = sorted(of_chain) if has_expert_groups(objects, chain) else _without_gap(of_chain, "ranks", folder)
        for group in groups:
            buffers = of_chain[group]
            lengths = objects.get((chain, "per_bucket_numel_unpadded"), {}).get(group)
            ranks.setdefault(chain, {})[group] = [
                Buffer(
                    _weights_type(dtypes[chain, group, number], folder),
                    _buckets(group, number, buffers[number], folder),
                )
                for number in _without_gap(buffers, f"buffers of model-parallel rank {group}", folder)
            ]
            own = [[bucket.elements for bucket in buffer.buckets] for buffer in ranks[chain][group]]
            if type(lengths) is list and [*map(_lengths, lengths)] != own:
                raise ShardError(
                    "the buckets of a Megatron checkpoint are not those that its optimizer lists",
                    expected=f"in each buffer buckets of as many elements as per_bucket_numel_unpadded says,"
                    f" {[*map(_lengths, lengths)]}"[:200],
                    got=str(own)[:200],
                    where=f"model-parallel rank {group} of {folder}",
                    remedy="copy or restore all files of one save",
                )
    return ranks


def _lengths(of_buffer: Value) -> Value:
    """Return how long the buckets of a buffer are, by the record that the optimizer keeps of them."""
    listed = [value for _, value in of_buffer.pairs()] if type(of_buffer) is Dict else []
    return listed[0] if len(listed) == 1 else None


def _weights_type(name: str, folder: str) -> DType:
    if name not in BY_TORCH_NAME or name == "uint8":
        raise ShardError(
            "the optimizer's buckets of a Megatron checkpoint are of weights of a type that is not read",
            expected="bfloat16, float16 or float32",
            got=f"{name}, as weights in FP8 have it" if name == "uint8" else name,
            where=folder,
            remedy="save it with --dist-ckpt-optim-fully-reshardable; weights alone can be read with --from dcp",
        )
    return BY_TORCH_NAME[name]


def _without_gap(numbered: Mapping[int, object], what: str, folder: str) -> list[int]:
    numbers = sorted(numbered)
    if numbers != [*range(len(numbers))]:
        raise ShardError(
            "a Megatron checkpoint lacks buckets of its optimizer",
            expected=f"{what} from 0 to {numbers[-1]}",
            got=", ".join(map(str, numbers[:16])),
            where=folder,
            remedy="copy or restore all files of one save",
        )
    return numbers


def _buckets(group: int, buffer: int, buckets: Mapping[int, Mapping[str, TensorPieces]], folder: str) -> list[Bucket]:
    """Return the buckets of a buffer in order. Raises ShardError for one that lacks elements, or is not of float32."""
    of_buffer = []
    for number in _without_gap(buckets, f"buckets of model-parallel rank {group}", folder):
        kinds = buckets[number]
        name = f"bucket {number} of buffer {buffer} of model-parallel rank {group}"
        main = kinds.get(MAIN)
        shapes = {tensor.shape for tensor in kinds.values()}
        if main is None or main.dtype.name != "float32" or len(shapes) > 1 or len(main.shape) != 1:
            raise ShardError(
                "a bucket of a Megatron checkpoint is not one that can be read",
                expected=f"vectors of one length, {MAIN} in float32 among them",
                got=", ".join(f"{kind} {tensor.dtype.name} {list(tensor.shape)}" for kind, tensor in kinds.items()),
                where=f"{name} of {folder}",
                remedy="save it with --dist-ckpt-optim-fully-reshardable; weights alone can be read with --from dcp",
            )
        vectors = {kind: _in_order(name, tensor, folder) for kind, tensor in kinds.items()}
        of_buffer.append(Bucket(name, folder, main.shape[0], vectors))
    return of_buffer


def _in_order(name: str, tensor: TensorPieces, folder: str) -> list[_Part]:
    """Return the parts of a flat vector in order. Raises ShardError if they are not the whole of it."""
    pieces = sorted(tensor.pieces, key=lambda piece: piece[0].start)
    ends = [0, *(box.stop[0] for box, _ in pieces)]
    if [box.start[0] for box, _ in pieces] != ends[:-1] or ends[-1] != tensor.shape[0]:
        gap = next((low for low, (box, _) in zip(ends, pieces) if box.start[0] != low), ends[-1])
        raise ShardError(
            "a bucket of a Megatron checkpoint lacks elements, or has some twice",
            expected=f"{tensor.shape[0]} elements, each once",
            got=f"others from element {gap} on",
            where=f"{name} of {folder}",
            remedy="copy or restore all files of one save",
        )
    parts = []
    for box, place in pieces:
        for run in _joined(name, [place], folder).ranges:
            parts.append((box.start[0], FlatVector(run.path, run.offset_bytes, tensor.dtype, box.size)))
    return parts


def _state_of(
    found: Sequence[PlacedParameter], weights: Mapping[str, Value], folder: str
) -> dict[str, dict[str, TensorPieces]]:
    """Return the state of whole tensors, put together from all ranks."""
    pieces: dict[str, dict[str, list[tuple[Box, Location]]]] = {}
    dtypes = {}
    for parameter, bucket, start in found:
        for key, box, _ in parameter.slices:
            own = pieces.setdefault(key, {})
            for kind, vectors in bucket.vectors.items():
                name = FP32 if kind == MAIN else kind
                dtypes[name] = vectors[0][1].dtype
                own.setdefault(name, []).append((box, bucket.ranges(kind, start, box.size)))
            start += box.size
    for key, kinds in pieces.items():
        held = {box for box, _ in kinds[FP32]}
        lacking = next((box for box, _ in weights[key].pieces if box not in held), None)
        if lacking is not None:
            raise ShardError(
                f"the optimizer of a Megatron checkpoint has the state of a part of {key!r} alone",
                expected=f"that of all parts of shape {list(weights[key].shape)}",
                got=f"none of {lacking}",
                where=folder,
                remedy="copy or restore all files of one save",
            )
    return {
        key: {kind: TensorPieces(dtypes[kind], weights[key].shape, tuple(own)) for kind, own in kinds.items()}
        for key, kinds in pieces.items()
    }
