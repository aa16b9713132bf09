"""Read flat state of Megatron's distributed optimizer: in buckets (`of_buckets`), or part by part (`unflattened`).

`dp_reshardable` keeps the buckets of each model-parallel rank as they are in memory (`parameter_order`). Up to release
0.15 `fully_sharded_model_space` keeps each rank's part of a tensor as a row of elements: a tensor of shape [X, Y] whose
parts have shape [x, y] is stored with shape [X/x, Y/y, x*y]. (megatron/core/optimizer/distrib_optimizer.py)

Files do not say which ranks belong together, with which parameters (`ModelParallelSizes`). It follows from the
arguments, the pieces of the weights, and how many ranks have buckets. (megatron/core/parallel_state.py and
optimizer/__init__.py of Megatron-Core 0.19)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import mul

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRange, ByteRanges, Location
from reshard_mpi.formats.megatron.layers import is_expert, place_of
from reshard_mpi.formats.megatron.parameter_order import (
    MAIN,
    Bucket,
    Buffer,
    ElementReader,
    ModelPlace,
    Parameter,
    PlacedParameter,
    TensorSlice,
    placed,
    weights_type,
)
from reshard_mpi.formats.megatron.training_tree import FP32, is_of_experts, require_all_parts
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.file_content import FlatVector, TensorPieces
from reshard_mpi.sharding.box import Box

# A family: its ranks by stage, which part of how many it has of cut tensors, and which experts (None: all).
_Family = tuple[list[int], int, int, range | None]
# Objects of the distributed optimizer: by chained optimizer and kind, the values of all model-parallel ranks.
GroupObjects = Mapping[tuple[int, str], Mapping[int, Value]]


def has_expert_groups(objects: GroupObjects, chain: int) -> bool:
    """Tell whether a chained optimizer has groups of experts."""
    return is_of_experts(next(iter(objects.get((chain, "optimizer"), {}).values()), None))


class ModelParallelSizes:
    """Over how many ranks the training was cut in each way.

    Attributes:
        stages: of the pipeline; chunks: into how many each stage's part of the model is divided.
        expert_parts: over how many ranks each expert is cut.
    """

    def __init__(
        self,
        args: Mapping[str, Value],
        weights: Mapping[str, Value],
        ranks: Mapping[int, Mapping[int, Sequence[Buffer]]],
        objects: GroupObjects,
        folder: str,
    ) -> None:
        self._ranks, self._objects, self._folder, self._weights = ranks, objects, folder, weights
        dense = next((len(own) for chain, own in ranks.items() if not self.is_of_experts(chain)), None)
        self._tensor = _count(args.get("tensor_model_parallel_size")) or self._vocabulary_parts()
        stages = _count(args.get("pipeline_model_parallel_size"))
        if dense is not None and dense % self._tensor == 0:
            stages = stages or dense // self._tensor
        if stages is None or (dense is not None and dense != self._tensor * stages):
            raise ShardError(
                "the arguments of a Megatron checkpoint contradict its files",
                expected=f"an optimizer of {self._tensor} tensor-parallel ranks times {stages or 'some'} stages",
                got=f"{dense} model-parallel ranks",
                where=folder,
                remedy="copy or restore all files of one save",
            )
        self.stages = stages
        of_type = (Counter(buffer.dtype for buffer in own) for of_chain in ranks.values() for own in of_chain.values())
        most = max(max(own.values()) for own in of_type)
        self.chunks = _count(args.get("virtual_pipeline_model_parallel_size")) or (1 if args else most)
        self._shares = _count(args.get("expert_model_parallel_size"))
        self.expert_parts = _count(args.get("expert_tensor_parallel_size")) or self._expert_parts()

    def is_of_experts(self, chain: int) -> bool | None:
        """Tell whether a chained optimizer has the experts; None: it is the only one, and has all parameters."""
        return None if len(self._ranks) == 1 else has_expert_groups(self._objects, chain)

    def families(self, chain: int) -> Iterator[_Family]:
        """Yield the ranks of a chained optimizer: together all stages that have the same part of tensors.

        Stages may have no experts. Raises ShardError if other ranks are missing.
        """
        if not self.is_of_experts(chain):
            for part in range(self._tensor):
                yield [part + self._tensor * stage for stage in range(self.stages)], part, self._tensor, None
            return
        experts, parts, ranks = self._experts(), self.expert_parts, self._ranks[chain]
        shares = self._shares or (max(ranks) + 1) // (parts * self.stages)
        of_stage = parts * shares
        stages = sorted({rank // of_stage for rank in ranks}) if of_stage else []
        if not stages or stages[-1] >= self.stages or experts % shares or len(ranks) != of_stage * len(stages):
            raise ShardError(
                "the optimizer of experts in a Megatron checkpoint contradicts its weights",
                expected=f"{experts} experts, cut over {parts} tensor-parallel ranks in {self.stages} stages",
                got=f"{len(ranks)} ranks of its optimizer, up to number {max(ranks)}",
                where=self._folder,
                remedy="copy or restore all files of one save",
            )
        own = experts // shares
        for share in range(shares):
            for part in range(parts):
                first = part + parts * share
                yield [first + of_stage * stage for stage in stages], part, parts, range(share * own, (share + 1) * own)

    def _vocabulary_parts(self) -> int:
        embedding = self._weights.get("embedding.word_embeddings.weight")
        return len({box for box, _ in embedding.pieces}) if type(embedding) is TensorPieces else 1

    def _experts(self) -> int:
        numbers = [0]
        for key, own in self._weights.items():
            place = place_of(key)
            if place.stacked_experts and type(own) is TensorPieces:
                numbers.append(own.shape[place.stacked_layers])
            elif place.expert is not None:
                numbers.append(place.expert + 1)
        return max(numbers)

    def _expert_parts(self) -> int:
        """Return into how many parts the second matrix of an expert is cut; the first one may be cut into halves."""
        of_second = [key for key in self._weights if is_expert(key) and ".linear_fc2.weight" in key]
        return min((len(cell) for key in of_second for cell in cells_of(key, self._weights[key]).values()), default=1)


def _count(value: Value) -> int | None:
    return value if type(value) is int and value > 0 else None


# By layer and expert, the pieces of a tensor in order.
Cells = dict[tuple[int, int], list[tuple[Box, ByteRanges]]]


def cells_of(key: str, tensor: TensorPieces) -> Cells:
    """Return the pieces of a tensor by layer and expert."""
    place = place_of(key)
    cells: Cells = {}
    for box, location in sorted(tensor.pieces, key=lambda piece: piece[0].start):
        layer = box.start[0] if place.stacked_layers else place.layer or 0
        expert = box.start[place.stacked_layers] if place.stacked_experts else place.expert or 0
        if isinstance(location, ByteRanges):
            cells.setdefault((layer, expert), []).append((box, location))
    return cells


def parameters_of(
    cells: Mapping[str, Cells], weights: Mapping[str, Value], part: int, parts: int, experts: range | None, folder: str
) -> Iterator[Parameter]:
    """Yield the parameters of a tensor-parallel rank: gated ones have two slices, one of each half."""
    for key, of_key in cells.items():
        named = place_of(key)
        for (layer, expert), pieces in of_key.items():
            if experts is not None and expert not in experts:
                continue
            own = [TensorSlice(key, *piece) for piece in _slices(key, pieces, part, parts, folder)]
            yield Parameter(ModelPlace(named.section, layer, named.part, expert), weights[key].dtype, tuple(own))


def _slices(
    key: str, pieces: Sequence[tuple[Box, ByteRanges]], part: int, parts: int, folder: str
) -> Sequence[tuple[Box, ByteRanges]]:
    """Return the pieces of a tensor that a tensor-parallel rank has. Raises ShardError if they cannot be told."""
    if len(pieces) == 1:
        return pieces
    if len(pieces) in (parts, 2 * parts):
        return pieces[part::parts]
    raise ShardError(
        f"how {key!r} of a Megatron checkpoint is cut is not known",
        expected=f"1, {parts} or {2 * parts} parts, with {parts} tensor-parallel ranks",
        got=f"{len(pieces)}",
        where=folder,
    )


BucketNames = re.compile(
    r"(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})"
    r"\.gbuf_idx_(?P<buffer>\d{1,9})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d{1,9})"
    r"\.(?P<kind>\w+)"
)
# By chained optimizer: of each model-parallel rank its buffers.
_Ranks = dict[int, list[Buffer]]
_BY_OTHER_FORM = "save it with --dist-ckpt-optim-fully-reshardable; weights alone can be read with --from dcp"
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
        starts = [box.start[-1] for box, _ in runs]
        if [*starts, row] != ends or any(box.size != box.shape[-1] for box, _ in runs):
            raise ShardError(
                f"the tensor {name!r} of a Megatron checkpoint lacks elements",
                expected=f"{row} elements of the part at {list(cell)}, each once",
                got=", ".join(f"{box.start[-1]} to {box.stop[-1]}" for box, _ in runs[:4]),
                where=folder,
            )
        box = Box.at(tuple(map(mul, cell, part)), part)
        pieces.append((box, _joined(name, [place for _, place in runs], folder)))
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
    objects: GroupObjects,
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


def _by_rank(tensors: Mapping[str, TensorPieces], objects: GroupObjects, folder: str) -> dict[int, _Ranks]:
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
            found: list[Buffer] = []
            for number in _without_gap(buffers, f"buffers of model-parallel rank {group}", folder):
                dtype = weights_type(dtypes[chain, group, number], "buckets", folder, _BY_OTHER_FORM)
                found.append(Buffer(dtype, _buckets(group, number, buffers[number], folder)))
            ranks.setdefault(chain, {})[group] = found
            own = [[bucket.elements for bucket in buffer.buckets] for buffer in found]
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
                remedy=_BY_OTHER_FORM,
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
    return [
        (box.start[0], FlatVector(run.path, run.offset_bytes, tensor.dtype, box.size))
        for box, place in pieces
        for run in _joined(name, [place], folder).ranges
    ]


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
        require_all_parts("the state", key, weights[key], kinds[FP32], folder)
    return {
        key: {kind: TensorPieces(dtypes[kind], weights[key].shape, tuple(own)) for kind, own in kinds.items()}
        for key, kinds in pieces.items()
    }
