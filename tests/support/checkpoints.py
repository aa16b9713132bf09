"""Makes real checkpoints and strategy files of a Case, and reads shards back, by routes that bypass the package.

Only the strategy files are encoded by the package's own writer, which MindSpore itself reads in other tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np

from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding import mindspore_json
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents
from support import ckpt_peer, hdf5_peer, safetensors_peer
from support.cases import Side
from support.oracle import RawLayout, optimizer_step, rank_holds, slice_for_rank
from support.strategy_files import write_stage_file

Arrays = dict[str, np.ndarray]
# A shard as it is read back: type name, shape and row-major bytes of every tensor.
Read = dict[str, tuple[str, tuple[int, ...], bytes]]
ENDINGS = {"ckpt": "ckpt", "hdf5": "h5", "safetensors": "safetensors"}
# Those that most tests are run with: one that parsers of ours read and one that a library may have to.
KINDS = ("ckpt", "hdf5")
# What shards of boxes are written in; a format that packs a whole training has tests of its own.
TARGETS = tuple(name for name in formats.targets() if not formats.info(name).packs)


def expected_rank(side: Side, tensors: Arrays, rank: int) -> Arrays:
    """Return what `rank` holds, by the oracle."""
    return {
        name: slice_for_rank(whole, side.layouts[name], rank)
        for name, whole in tensors.items()
        if rank_holds(side.layouts[name], rank)
    }


def write_strategy(side: Side, folder: Path, *, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    """Write one strategy file a stage (JSON if `shapes` are given, else protobuf); return the file or their folder."""
    folder.mkdir(parents=True)
    for stage in range(side.stages):
        layouts = {name: layout for name, layout in side.listed.items() if stage in layout.stages}
        shown = shapes or {}
        raw = {name: _raw(layout, shown.get(name)) for name, layout in layouts.items()}
        file = mindspore_json.StageFile(raw, (mindspore_json.StrategyItem("net/MatMul-op0", stage, ((1, 1),)),))
        write_stage_file(folder / f"strategy_{stage}.{'ckpt' if shapes is None else 'json'}", file)
    return folder if side.stages > 1 else next(folder.iterdir())


def write_shards(side: Side, tensors: Arrays, folder: Path, kind: str, *, pieces: int = 1) -> None:
    """Write the shards of every rank, as the oracle cuts them. pieces: into how many parts .ckpt tensors are cut."""
    ranks = {rank: expected_rank(side, tensors, rank) for rank in range(side.world_size)}
    write_ranks(ranks, folder, kind, pieces=pieces)


def write_ranks(ranks: Mapping[int, Arrays], folder: Path, kind: str = "ckpt", *, pieces: int = 1) -> None:
    """Write the shards of these ranks with what each is to hold."""
    for rank, arrays in ranks.items():
        path = folder / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[kind]}"
        path.parent.mkdir(parents=True)
        write_shard(arrays, path, pieces=pieces)


def write_shard(arrays: Arrays, path: Path, *, pieces: int = 1) -> None:
    """Write one shard in the format its ending says; HDF5 as other programs do."""
    samples = [sample(name, array) for name, array in arrays.items()]
    if path.suffix == ".ckpt":
        ckpt_peer.write(path, ShardContents.of(samples), pieces=pieces)
    elif path.suffix == ".safetensors":
        safetensors_peer.write(path, ShardContents.of(samples))
    else:
        hdf5_peer.write_foreign(path, samples)


def sample(name: str, array: np.ndarray) -> SampleTensor:
    """Return an array as a tensor of a shard."""
    return SampleTensor(name, BY_NAME[array.dtype.name], array.shape, array.tobytes())


def read_shard(path: Path) -> Read:
    """Return what a shard holds: a .ckpt, a .safetensors, or a native HDF5 file."""
    peers = {".ckpt": ckpt_peer, ".safetensors": safetensors_peer}
    contents = peers.get(path.suffix, hdf5_peer).read(path)
    return {name: (tensor.dtype.name, tuple(tensor.shape), tensor.content) for name, tensor in contents.tensors.items()}


def as_read(arrays: Arrays) -> Read:
    """Return arrays in the terms of `read_shard`."""
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def _raw(layout: RawLayout, shape: tuple[int, ...] | None) -> mindspore_json.RawLayout:
    sizes = layout.split_sizes or ()
    return mindspore_json.RawLayout(
        dev_matrix=layout.dev_matrix,
        tensor_map=tuple(entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map),
        opt_weight_shard_size=layout.opt_size,
        opt_weight_shard_step=optimizer_step(layout),
        param_split_shape=sizes,
        indices_offset=tuple(accumulate(sizes, initial=0))[:-1] if sizes else (),
        tensor_shape=shape,
    )


def as_torch_writes(index: Path) -> None:
    """Have an index of ours begin as one that a training has saved: with a later protocol of pickles."""
    index.write_bytes(b"\x80\x04" + index.read_bytes()[2:])


def copied_in_order(source: Path, target: Path, first: str) -> None:
    """Copy a folder as `cp -r` does: all files get times of their own, `.reshard_mpi` first or last."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    paths.sort(key=lambda path: (".reshard_mpi" in path.parts) != (first == "records"))
    for number, path in enumerate(paths):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        modified_ns = path.stat().st_mtime_ns + (60 + number) * 10**9
        os.utime(copy, ns=(modified_ns, modified_ns))


def flip_bits(path: Path, at: int | bytes, bits: int = 1) -> None:
    """Flip bits of one byte of a file, at a place or where these bytes begin; it keeps its size and gets a new time."""
    content = bytearray(path.read_bytes())
    content[at if isinstance(at, int) else content.index(at)] ^= bits
    path.write_bytes(content)
