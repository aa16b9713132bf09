"""Checkpoints that are too large to be drawn or compared element by element: of large tensors, or of very many.

Their shards are written through the package's own formats, since a peer would take minutes; what they hold matters less
than how much it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding import strategy_files, strategy_table
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.mindspore_layouts import to_stage_files
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from support.strategy_files import write_stage_file

Shape = tuple[int, int]
# Options of h5py for a dataset.
Storage = dict[str, Any]

RANKS, TARGETS = 4, 8
SMALL, LARGE, WIDE = (16, 16), (2048, 4096), (64, 1 << 18)
_WRITTEN_AT_ONCE = 1 << 16
_STEP = TensorSpec("global_step", BY_NAME["int32"], (), Box((), ()))


class LargeCheckpoint(NamedTuple):
    """A checkpoint, its strategy (None: it has an index), and the strategy that it is to be resharded to."""

    src: Path
    src_strategy: Path | None
    dst_strategy: Path

    def options(self) -> list[str | Path]:
        """Return the options of the command line that name the strategies."""
        source = [] if self.src_strategy is None else ["--src-strategy", self.src_strategy]
        return [*source, "--dst-strategy", self.dst_strategy]

    def planner(self) -> Planner:
        """Return the conversion as the package sees it."""
        files = discovery.find_shards(str(self.src))
        placed = None if self.src_strategy is None else strategy_files.load(str(self.src_strategy))
        source = open_source(files, placed)
        return Planner(source, strategy_files.load(str(self.dst_strategy)))


def write_large(
    folder: Path, kind: str, source: Strategy, target: Strategy, shape: Shape, content: Callable[[int, Box], bytes]
) -> LargeCheckpoint:
    """Write a checkpoint whose tensors, of float32, have one shape and lie alike.

    content: of a rank and its box, what is repeated until each tensor is full; nothing: a hole.
    """
    made = _write_strategies(folder, source, target, shape)
    names = list(source.parameters)
    module = formats.by_name(kind)
    for rank in range(source.world_size):
        box = _box(source, shape, rank)
        specs = (*(TensorSpec(name, BY_NAME["float32"], shape, box) for name in names), _STEP)
        identity = ShardIdentity(rank, source.world_size, strategy_table.dumps(source))
        path = _place(made, rank, kind)
        tensors = reserve_file(module, str(path), ShardSpec(identity, specs, {})).tensors
        _fill(path, [tensors[name] for name in names], content(rank, box))
        seal_file(module, str(path))
    return made


def write_many(
    folder: Path, kind: str, count: int, shape: Shape, storage: Storage | None = None, *, targets: int = TARGETS
) -> LargeCheckpoint:
    """Write a checkpoint of four ranks, of so many tensors, to be resharded to eight; shards differ from each other.

    storage: how h5py is to store each tensor, in HDF5 shards of its making.
    """
    names = [f"backbone.layers.{number // 10}.block.part_{number % 10}.weight" for number in range(count)]
    source = Strategy(RANKS, 1, {name: (Placement((RANKS,), ((0,), ())),) for name in names})
    target = Strategy(targets, 1, {name: (Placement((targets,), ((), (0,))),) for name in names})
    if storage is None:
        return write_large(folder, kind, source, target, shape, lambda rank, box: _noise(rank, box).tobytes())
    made = _write_strategies(folder, source, target, shape)
    for rank in range(RANKS):
        elements = _noise(rank, _box(source, shape, rank))
        with h5py.File(_place(made, rank, kind), "w") as file:
            for name in names:
                file.create_dataset(name, data=elements, **storage)
            file.create_dataset(_STEP.name, data=np.int32(7))
    return made


def _write_strategies(folder: Path, source: Strategy, target: Strategy, shape: Shape) -> LargeCheckpoint:
    folder.mkdir(exist_ok=True)
    made = LargeCheckpoint(folder / "src", folder / "src.ckpt", folder / "dst.ckpt")
    for path, side in ((folder / "src.ckpt", source), (made.dst_strategy, target)):
        write_stage_file(path, to_stage_files(side, dict.fromkeys(side.parameters, shape))[0])
    return made


def _place(made: LargeCheckpoint, rank: int, kind: str) -> Path:
    """Return the path of a shard, whose folder is made."""
    path = made.src / f"rank_{rank}" / f"w{formats.info(kind).suffixes[0]}"
    path.parent.mkdir(parents=True)
    return path


def _box(source: Strategy, shape: Shape, rank: int) -> Box:
    return Layout(source.find(next(iter(source.parameters)))[0], shape).box(rank)


def _noise(rank: int, box: Box) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 1 << 30, box.size, np.int32).view(np.float32).reshape(box.shape)


def _fill(path: Path, entries: Sequence[TensorEntry], content: bytes) -> None:
    """Write `content`, again and again, to where the tensors of a shard lie."""
    if not content:
        return
    content *= -(-_WRITTEN_AT_ONCE // len(content))
    with path.open("r+b") as stream:
        for entry in entries:
            done = 0
            for part in entry.source.ranges:
                stream.seek(part.offset_bytes)
                left = part.length_bytes
                while left:
                    start = done % len(content)
                    count = min(left, len(content) - start)
                    stream.write(content[start : start + count])
                    done, left = done + count, left - count
