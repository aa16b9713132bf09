"""Writes checkpoints of Megatron's form torch_dist, of noise, with the keys and classes of core 0.19's files.

`megatron_files.py weights FOLDER MEGABYTES` writes weights alone, of one rank; `megatron_files.py buckets FOLDER
MEGABYTES` also the optimizer of tensor parallelism 2 and 2 stages, in buckets as they are in memory (dp_reshardable);
`megatron_files.py items FOLDER COUNT` as many small weights, and what every rank has planned. The noise is always the
same.
"""

import argparse
import json
import pickle
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

_LAYERS, _VOCABULARY_ROWS, _ALIGNED, _KINDS = 4, 4096, 64, ("param", "exp_avg", "exp_avg_sq")
_TENSOR, _STAGES = 2, 2


class Writer:
    """The files of one checkpoint while they are written: each rank's items one behind the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "iter_0000001"
        self._folder.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._plans: list[WriteItem] = []

    def tensor(
        self, file: str, name: str, shape: tuple[int, ...], offset: tuple[int, ...], value: torch.Tensor
    ) -> None:
        """Write a chunk of a tensor."""
        properties = TensorProperties.create_from_tensor(value)
        entry = self._entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
        chunk = ChunkStorageMetadata(torch.Size(offset), value.shape)
        entry.chunks.append(chunk)
        index = MetadataIndex(name, chunk.offsets, len(entry.chunks) - 1)
        self._plans.append(
            WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, entry.size))
        )
        self._append(index, file, value)

    def value(self, file: str, name: str, value: object) -> None:
        """Write a value as an object, as Megatron does: in a list."""
        self._entries[name] = BytesStorageMetadata()
        self._append(MetadataIndex(name), file, [value])

    def _append(self, index: MetadataIndex, file: str, value: object) -> None:
        with (self._folder / file).open("ab") as stream:
            start = stream.seek(0, 2)
            torch.save(value, stream)
            self._places[index] = _StorageInfo(file, start, stream.tell() - start)

    def close(self) -> None:
        """Write the index, and say what it is."""
        metadata = Metadata(self._entries, None, self._places)
        metadata.all_local_plans = [SavePlan(self._plans)]
        with (self._folder / ".metadata").open("wb") as stream:
            pickle.dump(metadata, stream)
        (self._folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def parameters(hidden: int) -> Iterator[tuple[str, tuple[int, ...], int | str | None]]:
    """Yield the name of each parameter, its shape, and how it is cut over tensor parallelism.

    The parts of layers come in the order in which Megatron builds them, once for all layers.
    """
    inner = 8 * hidden // 3 // 64 * 64
    yield "embedding.word_embeddings.weight", (_VOCABULARY_ROWS, hidden), 0
    yield "decoder.layers.self_attention.linear_qkv.layer_norm_weight", (hidden,), None
    yield "decoder.layers.self_attention.linear_proj.weight", (hidden, hidden), 1
    yield "decoder.layers.self_attention.linear_qkv.weight", (3 * hidden, hidden), 0
    yield "decoder.layers.mlp.linear_fc1.layer_norm_weight", (hidden,), None
    yield "decoder.layers.mlp.linear_fc1.weight", (2 * inner, hidden), "gated"
    yield "decoder.layers.mlp.linear_fc2.weight", (hidden, inner), 1
    yield "decoder.final_layernorm.weight", (hidden,), None
    yield "output_layer.weight", (_VOCABULARY_ROWS, hidden), 0


def pieces(
    shape: tuple[int, ...], cut: int | str | None, rank: int, ranks: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return where the pieces of a tensor-parallel rank begin in a parameter, and their shapes."""
    if cut is None:
        return [((0,) * len(shape), shape)]
    axis, halves = (0, 2) if cut == "gated" else (int(cut), 1)
    length = shape[axis] // ranks // halves
    own = tuple(length if dim == axis else whole for dim, whole in enumerate(shape))
    starts = (half * shape[axis] // halves + rank * length for half in range(halves))
    return [(tuple(start if dim == axis else 0 for dim in range(len(shape))), own) for start in starts]


def write(folder: Path, hidden: int, tensor: int, stages: int, *, has_optimizer: bool) -> None:
    """Write weights in bfloat16, and the optimizer's buckets."""
    writer = Writer(folder)
    own = [*parameters(hidden)]
    layer_parts = [entry for entry in own if entry[0].startswith("decoder.layers.")]
    for rank in range(tensor * stages):
        part, stage, file = rank % tensor, rank // tensor, f"__{rank}_0.distcp"
        of_stage = range(stage * _LAYERS // stages, (stage + 1) * _LAYERS // stages)
        built = [(None, entry) for entry in own[:1] if stage == 0]
        built += [(layer, entry) for layer in of_stage for entry in layer_parts]
        built += [(None, entry) for entry in own[-2:] if stage == stages - 1]
        flat: dict[str, list[torch.Tensor]] = {kind: [] for kind in _KINDS}
        for layer, (name, shape, cut) in reversed(built):
            whole = shape if layer is None else (_LAYERS, *shape)
            # What is not cut is the same on all tensor-parallel ranks.
            seed = zlib.crc32(f"{layer} {name} {part if cut is not None else 0}".encode())
            generator = torch.Generator().manual_seed(seed)
            for number, (start, size) in enumerate(pieces(shape, cut, part, tensor)):
                values = {
                    kind: torch.empty(size).normal_(0, 0.02, generator=generator)
                    for kind in _KINDS[: 1 + 2 * has_optimizer]
                }
                offset, weight = start, values["param"].bfloat16()
                if layer is not None:
                    offset, weight = (layer, *start), weight[None]
                if cut is not None or part == 0:
                    writer.tensor(file, name, whole, offset, weight)
                for kind, value in values.items():
                    flat[kind].append(value.flatten())
                assert number == 0 or value.numel() % _ALIGNED == 0
        if has_optimizer:
            key = f"optimizer.distributed.dp_group_idx_{rank}"
            bucket = f"{key}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
            for kind, rows in flat.items():
                total = sum(row.numel() for row in rows)
                begin = 0
                for row in rows:
                    writer.tensor(file, f"{bucket}.{kind}", (total,), (begin,), row)
                    begin += row.numel()
            groups = [{"wd_mult": wd, "lr_mult": 1.0, "lr": 0.01, "step": 1} for wd in (1.0, 0.0)]
            writer.value(file, f"{key}.optimizer/shard_0_1", {"param_groups": groups})
    args = argparse.Namespace(
        num_layers=_LAYERS, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages, swiglu=True
    )
    state = {"args": args, "iteration": 1, "checkpoint_version": 3.0}
    if has_optimizer:
        state["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    writer.value("__0_0.distcp", "common_state/shard_0_1", state)
    writer.close()


def write_items(folder: Path, count: int) -> None:
    """Write as many small weights, one a layer of as few tensors as the size of an index allows."""
    writer, layers = Writer(folder), 100
    for number in range(count // layers):
        for layer in range(layers):
            value = torch.full((1, 4), float(number), dtype=torch.bfloat16)
            writer.tensor("__0_0.distcp", f"decoder.layers.part_{number}.weight", (layers, 4), (layer, 0), value)
    writer.value("__0_0.distcp", "common_state/shard_0_1", {"iteration": 1})
    writer.close()


def _hidden(megabytes: int, bytes_of_parameter: int) -> int:
    """Return the width with which the parameters take about as much."""
    widths = range(64, 64 * 128, 64)
    wanted = megabytes * 1_000_000 / bytes_of_parameter
    return min(widths, key=lambda width: abs(_LAYERS * 12 * width * width + 2 * _VOCABULARY_ROWS * width - wanted))


if __name__ == "__main__":
    task, where, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if task == "items":
        write_items(where, size)
    elif task == "weights":
        write(where, _hidden(size, 2), 1, 1, has_optimizer=False)
    else:
        write(where, _hidden(size, 2 + 12), _TENSOR, _STAGES, has_optimizer=True)
