"""What the shards of one checkpoint must say alike, besides the shapes and types of their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard_mpi.box import Box
from reshard_mpi.manifest import Manifest, TensorEntry
from reshard_mpi.placement import Piece, Placement
from reshard_mpi.planning.model import Check, Copy
from reshard_mpi.planning.tensors import SourceTensor
from reshard_mpi.units import KIB

# Small enough to read from every opened shard for nothing.
_SMALL_BYTES = 64 * KIB
# How MindSpore records the moment of a checkpoint: ModelCheckpoint's append_info, and the optimizers' step counter.
_MOMENT = ("epoch_num", "step_num", "global_step")

# A needed part of a tensor: its placement, the piece, the box the piece has and the region wanted of it.
Part = tuple[Placement, Piece, Box, Box]


def agreement_checks(tensors: Iterable[SourceTensor], *, same_world: bool) -> Iterator[Check]:
    """Yield the checks on small tensors that every opened shard holds whole.

    The step counters must agree. Others that no strategy lists are expected to; where source and target have as many
    ranks they may differ (random state), since each rank then keeps its own.
    """
    for tensor in tensors:
        first = next(iter(tensor.entries.values()))
        if first.size_bytes > _SMALL_BYTES or len(tensor.entries) < 2 or first.shape != tensor.shape:
            continue
        moment = tensor.name in _MOMENT
        if not moment and (tensor.listed or same_world):
            continue
        box = Box.whole(tensor.shape)
        copies = tuple(Copy(rank, entry, box, box) for rank, entry in tensor.entries.items())
        why = "the shards are of different moments" if moment else "each rank has its own; one of them was taken"
        yield Check(tensor.name, copies, refuse=moment, why=why)


def replica_checks(
    name: str, alternatives: Iterable[list[Part]], entries: Mapping[int, TensorEntry], why: str
) -> Iterator[Check]:
    """Yield the checks that all copies of the needed parts of one tensor are the same.

    alternatives: the needed parts by each placement of the tensor (stages that share it may cut it differently).
    """
    regions: list[tuple[Box, list[Part]]] = []
    for parts in alternatives:
        if not regions:
            regions = [(part[3], [part]) for part in parts]
            continue
        regions = [
            (shared, [*same, part])
            for region, same in regions
            for part in parts
            if (shared := region.intersect(part[3])) is not None
        ]
    for region, same in regions:
        copies = tuple(
            Copy(rank, entries[rank], box, region)
            for placement, piece, box, _ in same
            for rank in placement.holders(piece)
            if rank in entries
        )
        if len(copies) > 1:
            yield Check(name, copies, refuse=True, why=why)


def common_strings(manifests: Mapping[int, Manifest], home: int) -> tuple[dict[str, str], list[str]]:
    """Return the strings of the opened shards, those of rank `home` first, and a note for each that differs."""
    strings: dict[str, str] = {}
    notes = []
    for rank in sorted(manifests, key=lambda rank: (rank != home, rank)):
        for name, text in manifests[rank].strings.items():
            if strings.setdefault(name, text) != text:
                notes.append(f"the string {name!r} of {manifests[rank].path} differs from the one taken")
    return dict(sorted(strings.items())), notes
