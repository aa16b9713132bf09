"""A GPT-like checkpoint of a chosen size: weights and two Adam moments, 8 ranks, to be resharded for 4."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard_mpi import formats
from reshard_mpi.dtypes import BY_NAME
from reshard_mpi.layout import Layout
from reshard_mpi.manifest import Segments, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.placement import Placement, Strategy
from reshard_mpi.strategy import mindspore, table
from reshard_mpi.strategy.stages import to_stage_files

_FLOAT = BY_NAME["float32"]
_LAYERS = 8
_COPIES = ("", "adam_m.", "adam_v.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a generated checkpoint lies. size_bytes: of its whole tensors, each counted once."""

    folder: Path
    source: Path
    src_strategy: Path
    dst_strategy: Path
    format: str
    size_bytes: int


def generate(folder: Path, megabytes: int, kind: str) -> Checkpoint:
    """Write a checkpoint of about `megabytes` MB and the strategies for 8 -> 4 ranks.

    Source: data parallel 2, tensor parallel 4. Target: data parallel 2, tensor parallel 2, optimizer sharding on.
    """
    shapes = _shapes(megabytes)
    source, target = _strategy(shapes, 2, 4, optimizer=False), _strategy(shapes, 2, 2, optimizer=True)
    made = Checkpoint(
        folder,
        folder / "src",
        folder / "src_strategy.ckpt",
        folder / "dst_strategy.ckpt",
        kind,
        sum(4 * int(np.prod(shape)) for shape in shapes.values()),
    )
    for path, strategy in ((made.src_strategy, source), (made.dst_strategy, target)):
        path.write_bytes(mindspore.encode_protobuf(to_stage_files(strategy, shapes)[0]))
    for rank in range(source.world_size):
        _write_shard(made, source, shapes, rank)
    return made


def _shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Return whole shapes: an embedding of 10 x hidden rows and 8 layers, hidden chosen so that all add up."""
    elements_a_square = 10 + 12 * _LAYERS
    hidden = math.isqrt(max(1, megabytes) * 1_000_000 // (4 * len(_COPIES) * elements_a_square))
    hidden = max(8, hidden - hidden % 8)  # every cut on either side divides it
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (10 * hidden, hidden)}
    for layer in range(_LAYERS):
        shapes |= {
            f"layers.{layer}.attention.qkv.weight": (3 * hidden, hidden),
            f"layers.{layer}.attention.projection.weight": (hidden, hidden),
            f"layers.{layer}.mlp.up.weight": (4 * hidden, hidden),
            f"layers.{layer}.mlp.down.weight": (hidden, 4 * hidden),
            f"layers.{layer}.norm.gamma": (hidden,),
            f"layers.{layer}.norm.beta": (hidden,),
        }
    return {prefix + name: shape for prefix in _COPIES for name, shape in shapes.items()}


def _strategy(shapes: dict[str, tuple[int, ...]], data: int, tensor: int, *, optimizer: bool) -> Strategy:
    parameters = {}
    for name, shape in shapes.items():
        split: tuple[tuple[int, ...], ...] = ((),) * len(shape)
        if len(shape) == 2:
            split = ((), (1,)) if "projection" in name or "down" in name else ((1,), ())
        copies = data if len(shape) == 2 else data * tensor
        parameters[name] = (Placement((data, tensor), split, copies if optimizer else 1),)
    return Strategy(data * tensor, 1, parameters)


def _write_shard(made: Checkpoint, strategy: Strategy, shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    module = formats.by_name(made.format)
    path = made.source / f"rank_{rank}" / f"checkpoint_{rank}{module.SUFFIXES[0]}"
    path.parent.mkdir(parents=True)
    specs = tuple(
        TensorSpec(name, _FLOAT, shape, Layout(strategy.find(name)[0], shape).box(rank))
        for name, shape in shapes.items()
    )
    identity = ShardIdentity(rank, strategy.world_size, table.dumps(strategy))
    place = module.reserve(str(path), ShardSpec(identity, specs, {}))
    with path.open("r+b") as stream:
        for spec, content in zip(specs, _contents(specs)):
            segments = place.tensors[spec.name].source
            assert isinstance(segments, Segments)
            for part in segments.ranges:
                stream.seek(part.offset_bytes)
                stream.write(content[: part.length_bytes])
                content = content[part.length_bytes :]
    module.seal(str(path))


def _contents(specs: tuple[TensorSpec, ...]) -> Iterator[memoryview]:
    """Yield bytes for every tensor; replicas need not agree for what is measured here."""
    largest = max(spec.size_bytes for spec in specs)
    noise = np.random.default_rng(0).integers(0, 255, largest, np.uint8)
    for spec in specs:
        yield noise.data[: spec.size_bytes]
