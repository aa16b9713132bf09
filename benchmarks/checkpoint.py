"""Checkpoints to be resharded: the tensors of the network as shards of 8 ranks, with strategies for both sides."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.network import ITEM_BYTES, Resharding, Shapes
from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.mindspore_layouts import to_stage_files
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf
from reshard_mpi.sharding.strategy import Strategy

_FLOAT = BY_NAME["float32"]
_SHIFT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A generated checkpoint. size_bytes: of its whole tensors, each counted once."""

    folder: Path
    format: str
    shapes: Shapes
    resharding: Resharding
    size_bytes: int

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def src_strategy(self) -> Path:
        return self.folder / "src_strategy.ckpt"

    @property
    def dst_strategy(self) -> Path | None:
        return None if self.resharding.target is None else self.folder / "dst_strategy.ckpt"


def generate(folder: Path, network: Shapes, resharding: Resharding, kind: str) -> Checkpoint:
    """Write the source's shards, filled with noise that is always the same, and the strategies of both sides.

    The noise is numbers as weights are, not any bytes: of those one in 256 would be infinite or no number, which takes
    longer to convert and is found in no checkpoint.
    """
    size_bytes = sum(ITEM_BYTES * math.prod(shape) for shape in network.values())
    made = Checkpoint(folder, kind, network, resharding, size_bytes)
    for path, strategy in ((made.src_strategy, resharding.source), (made.dst_strategy, resharding.target)):
        if path is not None and strategy is not None:
            path.write_bytes(encode_protobuf(to_stage_files(strategy, network)[0]))
    numbers = (_largest_bytes(network) + _SHIFT_BYTES) // ITEM_BYTES
    noise = np.random.default_rng(0).standard_normal(numbers, np.float32).tobytes()
    for rank in range(resharding.source.world_size):
        _write_shard(made, rank, memoryview(noise))
    return made


def source_bytes(network: Shapes, strategy: Strategy) -> int:
    """Return the size of all shards, replicas included."""
    layouts = [Layout(strategy.find(name)[0], shape) for name, shape in network.items()]
    return sum(ITEM_BYTES * layout.box(rank).size for rank in range(strategy.world_size) for layout in layouts)


def _write_shard(made: Checkpoint, rank: int, noise: memoryview) -> None:
    module, strategy = formats.by_name(made.format), made.resharding.source
    path = made.source / f"rank_{rank}" / f"checkpoint_{rank}{formats.info(made.format).suffixes[0]}"
    path.parent.mkdir(parents=True)
    specs = tuple(
        TensorSpec(name, _FLOAT, shape, Layout(strategy.find(name)[0], shape).box(rank))
        for name, shape in made.shapes.items()
    )
    identity = ShardIdentity(rank, strategy.world_size, strategy_table.dumps(strategy))
    place = reserve_file(module, str(path), ShardSpec(identity, specs, {}))
    with path.open("r+b") as stream:
        for spec in specs:
            # The same for every holder of a box, and not the same for every tensor.
            shift_bytes = zlib.crc32(f"{spec.name} {spec.box}".encode()) % (_SHIFT_BYTES // ITEM_BYTES) * ITEM_BYTES
            content = noise[shift_bytes : shift_bytes + spec.size_bytes]
            segments = place.tensors[spec.name].source
            assert isinstance(segments, ByteRanges)
            for part in segments.ranges:
                stream.seek(part.offset_bytes)
                stream.write(content[: part.length_bytes])
                content = content[part.length_bytes :]
    seal_file(module, str(path))


def _largest_bytes(network: Shapes) -> int:
    return max(ITEM_BYTES * math.prod(shape) for shape in network.values())
