"""Folders of slices in safetensors files, made by the standard library's JSON: MindFormers' second form, and torch's.

Nothing of the package's readers is used; what a slice holds is cut out by numpy.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support import safetensors_peer

_TAGS = {"float32": "F32", "int16": "I16", "float64": "F64", "uint8": "U8", "complex64": "C64", "int64": "I64"}
_TAGS |= {"bfloat16": "BF16", "int8": "I8", "bool": "BOOL", "float16": "F16"}
# As MindSpore calls the types, and with the other spelling that its strategies have.
_MINDSPORE = {"uint8": "UInt8", "int16": "Int16", "float64": "Float64", "complex64": "Complex64"}

Array = np.ndarray[Any, Any]
COMMON = {"epoch_num": 1, "step_num": 2, "global_step": 2, "loss_scale": None, "global_batch_size": 8}


class Sliced(NamedTuple):
    """A tensor that is cut evenly: into how many slices along each dimension, and the files that hold each slice."""

    whole: Array
    counts: tuple[int, ...]
    holders: Sequence[Sequence[int]]
    kind: str = "model"

    def slices(self) -> Iterator[Array]:
        lengths = [length // count for length, count in zip(self.whole.shape, self.counts)]
        for place in itertools.product(*map(range, self.counts)):
            yield self.whole[tuple(slice(at * n, (at + 1) * n) for at, n in zip(place, lengths))]


def file_of(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file with these arrays."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = b""
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": _TAGS[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += content
    return safetensors_peer.file_of(header, data)


def mindformers_file(kind: str, number: int, total: int, prefix: str = "net") -> str:
    return f"{prefix}-{kind}-{number:07}-{total:07}.safetensors"


def write_mindformers(
    folder: Path,
    tensors: Mapping[str, Sliced],
    total: int,
    *,
    others: Mapping[str, Mapping[str, Array]] | None = None,
    common: Mapping[str, Any] | None = COMMON,
    spoil: Callable[[dict[str, Any]], object] = lambda _: None,
) -> None:
    """Write a checkpoint of `total` files of each kind, of the step that its folder is named after.

    Args:
        others: tensors by file that the index does not list.
        spoil: changes the index before it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Array]] = {name: dict(arrays) for name, arrays in (others or {}).items()}
    described: dict[str, Any] = {}
    storage: dict[str, Any] = {}
    for name, tensor in tensors.items():
        chunks = []
        for number, (part, holders) in enumerate(zip(tensor.slices(), tensor.holders)):
            chunks.append({"global_offset": [number], "local_shape": list(part.shape)})
            held_by = [(holder, mindformers_file(tensor.kind, holder, total)) for holder in holders]
            for _, file in held_by:
                files.setdefault(file, {})[name] = part
            storage[repr((name, (number,)))] = [{"file_name": file, "storage_rank": rank} for rank, file in held_by]
        dtype = tensor.whole.dtype.name
        described[name] = {
            "properties": {"dtype": _MINDSPORE.get(dtype, dtype), "replica_id": [0], "allow_to_save": True},
            "global_shape": list(tensor.whole.shape),
            "axis_fragmentations": list(tensor.counts),
            "layout": {"device_matrix": [total], "interleaved_parallel": False, "rank_list": list(range(total))},
            "chunk": chunks,
        }
    index = {"state_dict_metadata": described, "storage_data": storage}
    spoil(index)
    (folder / "metadata.json").write_text(json.dumps(index, indent=4, ensure_ascii=False))
    if common is COMMON and folder.name.startswith("iteration_"):
        steps = int(folder.name.removeprefix("iteration_"))
        common = {**COMMON, "step_num": steps, "global_step": steps}
    if common is not None:
        (folder / "common.json").write_text(json.dumps(common, indent=4))
    for file, arrays in files.items():
        (folder / file).write_bytes(file_of(arrays, {"format": "ms"}))


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a checkpoint that is there."""
    path = folder / "metadata.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index, indent=4))


class At(NamedTuple):
    """A piece of a tensor and its first element in the whole one."""

    start: Sequence[int]
    part: Array


def torch_file(rank: int, number: int = 1, total: int = 1) -> str:
    return f"shard-{rank:05}-model-{number:05}-of-{total:05}.safetensors"


def write_torch(
    folder: Path, files: Mapping[str, Mapping[str, At]], *, info: Callable[[dict[str, Any]], object] = dict
) -> None:
    """Write these files with the pieces in them. info: what a file is to say, made of what it should say."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, pieces in files.items():
        says = {name: {"saved_offsets": list(piece.start)} for name, piece in pieces.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info(says)), "DCP_VERSION": "1.0", "format": "pt"}
        (folder / file).write_bytes(file_of({name: piece.part for name, piece in pieces.items()}, metadata))
