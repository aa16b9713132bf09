"""Tell which ranks of a Megatron training belong together (`ModelParallelSizes`), with which parameters.

Files do not say it. It follows from the arguments, the pieces of the weights, and how many ranks have buckets.
(megatron/core/parallel_state.py and optimizer/__init__.py of Megatron-Core 0.19)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.megatron.model_names import is_expert, place_of
from reshard_mpi.formats.megatron.parameter_order import Buffer, ModelPlace, Parameter, TensorSlice
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.framework_files import TensorPieces
from reshard_mpi.sharding.box import Box

# A family: its ranks by stage, which part of how many it has of cut tensors, and which experts (None: all).
_Family = tuple[list[int], int, int, range | None]


def has_expert_groups(objects: Mapping[tuple[int, str], Mapping[int, Value]], chain: int) -> bool:
    """Tell whether a chained optimizer has groups of experts."""
    value = next(iter(objects.get((chain, "optimizer"), {}).values()), None)
    groups = value.get("param_groups") if type(value) is Dict else None
    return any(type(group) is Dict and group.get("is_expert_parallel") is True for group in groups or [])


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
        objects: Mapping[tuple[int, str], Mapping[int, Value]],
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
    cells: Mapping[str, Cells],
    weights: Mapping[str, Value],
    part: int,
    parts: int,
    experts: range | None,
    folder: str,
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
