"""Checkpoints of any number of tensors, of four ranks to be resharded to eight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.formats.specs import ShardSpec, TensorSpec
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement, Strategy
from reshard_mpi.sharding.strategy import table
from reshard_mpi.sharding.strategy.protobuf import encode_protobuf
from reshard_mpi.sharding.strategy.stages import to_stage_files

RANKS, TARGETS = 4, 8


# Options of h5py for a dataset.
Storage = dict[str, Any]


class Checkpoint(NamedTuple):
    """A checkpoint of four ranks, and the strategy of eight that it is to be resharded to."""

    src: Path
    src_strategy: Path
    dst_strategy: Path

    @classmethod
    def write(
        cls, folder: Path, kind: str, tensors: int, shape: tuple[int, int], storage: Storage | None = None
    ) -> Checkpoint:
        """storage: how h5py is to store each tensor, in HDF5 shards of its making."""
        names = [f"backbone.layers.{at // 10}.block.part_{at % 10}.weight" for at in range(tensors)]
        source = Strategy(RANKS, 1, {name: (Placement((RANKS,), ((0,), ())),) for name in names})
        target = Strategy(TARGETS, 1, {name: (Placement((TARGETS,), ((), (0,))),) for name in names})
        folder.mkdir()
        made = cls(folder / "src", folder / "src.ckpt", folder / "dst.ckpt")
        shapes = dict.fromkeys(names, shape)
        for path, side in ((made.src_strategy, source), (made.dst_strategy, target)):
            path.write_bytes(encode_protobuf(to_stage_files(side, shapes)[0]))
        for rank in range(RANKS):
            path = made.src / f"rank_{rank}" / f"w{formats.by_name(kind).SUFFIXES[0]}"
            path.parent.mkdir(parents=True)
            _write_shard(path, kind, names, Layout(source.find(names[0])[0], shape).box(rank), rank, shape, storage)
        return made

    def options(self) -> list[str | Path]:
        return ["--src-strategy", self.src_strategy, "--dst-strategy", self.dst_strategy]

    def conversion(self) -> Conversion:
        files = discovery.find_shards(str(self.src))
        source = SourceCheckpoint.open(files, strategy.load(str(self.src_strategy)))
        return Conversion(source, strategy.load(str(self.dst_strategy)))


def _write_shard(
    path: Path, kind: str, names: Sequence[str], box: Box, rank: int, shape: tuple[int, int], storage: Storage | None
) -> None:
    """Write a shard whose parts differ from rank to rank."""
    elements = np.random.default_rng(rank).integers(0, 1 << 30, box.size, np.int32).view(np.float32).reshape(box.shape)
    if storage is not None:
        with h5py.File(path, "w") as file:
            for name in names:
                file.create_dataset(name, data=elements, **storage)
            file.create_dataset("global_step", data=np.int32(7))
        return
    module = formats.by_name(kind)
    specs = (
        *(TensorSpec(name, BY_NAME["float32"], shape, box) for name in names),
        TensorSpec("global_step", BY_NAME["int32"], (), Box((), ())),
    )
    place = reserve_file(
        module, str(path), ShardSpec(ShardIdentity(rank, RANKS, table.dumps(_described(names))), specs, {})
    )
    with path.open("r+b") as stream:
        for entry in (place.tensors[name] for name in names):
            done = 0
            for part in entry.source.ranges:
                stream.seek(part.offset_bytes)
                stream.write(elements.tobytes()[done : done + part.length_bytes])
                done += part.length_bytes
    seal_file(module, str(path))


def _described(names: Sequence[str]) -> Strategy:
    return Strategy(RANKS, 1, {name: (Placement((RANKS,), ((0,), ())),) for name in names})


SMALL, LARGE, WIDE = (48, 16), (2048, 4096), (256, 1 << 18)
