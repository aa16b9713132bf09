"""Makes real checkpoints and strategy files of a Case, and reads shards back, by routes that bypass the package.

Only the strategy files are encoded by the package's own writer, which MindSpore itself reads in other tests.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import h5py
import numpy as np

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.strategy import mindspore
from reshard_mpi.sharding.strategy.protobuf import encode_protobuf
from reshard_mpi.testing.samples import Contents, SampleTensor
from support import ckpt_peer, safetensors_peer
from support.cases import Side
from support.oracle import RawLayout, optimizer_step, rank_holds, slice_for_rank

Arrays = dict[str, np.ndarray]
ENDINGS = {"ckpt": "ckpt", "hdf5": "h5", "safetensors": "safetensors"}


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
        file = mindspore.StageFile(raw, (mindspore.StrategyItem("net/MatMul-op0", stage, ((1, 1),)),))
        if shapes is None:
            (folder / f"strategy_{stage}.ckpt").write_bytes(encode_protobuf(file))
        else:
            (folder / f"strategy_{stage}.json").write_bytes(mindspore.encode_json(file))
    return folder if side.stages > 1 else next(folder.iterdir())


def write_shards(side: Side, tensors: Arrays, folder: Path, kind: str, *, pieces: int = 1) -> None:
    """Write the shards of every rank, as the oracle cuts them. pieces: into how many parts .ckpt tensors are cut."""
    for rank in range(side.world_size):
        at = folder / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[kind]}"
        at.parent.mkdir(parents=True)
        write_shard(expected_rank(side, tensors, rank), at, pieces=pieces)


def write_shard(arrays: Arrays, path: Path, *, pieces: int = 1) -> None:
    """Write one shard in the format its ending says; HDF5 as a foreign file without any of our attributes."""
    if path.suffix == ".ckpt":
        ckpt_peer.write(path, Contents.of((_sample(name, array) for name, array in arrays.items()), {}), pieces=pieces)
        return
    if path.suffix == ".safetensors":
        safetensors_peer.write(path, Contents.of(_sample(name, array) for name, array in arrays.items()))
        return
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array.dtype.name == "bfloat16":
                space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
                kind = _bfloat16()
                dataset = h5py.h5d.create(file.id, name.encode(), kind, space)
                if array.size:
                    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array.view(np.uint16), mtype=kind)
            else:
                file.create_dataset(name, data=array)


def read_shard(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return type name, shape and row-major bytes of every tensor of a shard."""
    if path.suffix in (".ckpt", ".safetensors"):
        found = (ckpt_peer if path.suffix == ".ckpt" else safetensors_peer).read(path)
        return {name: (t.dtype.name, tuple(t.shape), t.content) for name, t in found.tensors.items()}
    tensors = {}
    with h5py.File(path) as file:

        def visit(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and not name.startswith("__reshard_mpi__"):
                tensors[name] = (item.attrs["dtype"].decode(), item.shape, _raw_bytes(item))

        file.visititems(visit)
    return tensors


def as_read(arrays: Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return arrays in the terms of `read_shard`."""
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def _raw(layout: RawLayout, shape: tuple[int, ...] | None) -> mindspore.RawLayout:
    sizes = layout.split_sizes or ()
    return mindspore.RawLayout(
        dev_matrix=layout.dev_matrix,
        tensor_map=tuple(entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map),
        opt_weight_shard_size=layout.opt_size,
        opt_weight_shard_step=optimizer_step(layout),
        param_split_shape=sizes,
        indices_offset=tuple(accumulate(sizes, initial=0))[:-1] if sizes else (),
        tensor_shape=shape,
    )


def _sample(name: str, array: np.ndarray) -> SampleTensor:
    return SampleTensor(name, BY_NAME[array.dtype.name], array.shape, array.tobytes())


def _bfloat16() -> object:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def _raw_bytes(item: h5py.Dataset) -> bytes:
    if not item.size:
        return b""
    buffer = np.empty(item.shape, np.dtype((np.void, item.id.get_type().get_size())))
    item.id.read(h5py.h5s.ALL, h5py.h5s.ALL, buffer, mtype=item.id.get_type())
    return buffer.tobytes()
