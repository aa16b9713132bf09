"""torch's own tools for whole files, in one process.

`torch_files.py to_torch DCP FILE` writes a distributed checkpoint as one file of torch.save. `torch_files.py shard
SOURCE OUTPUT RANKS` cuts the tensors of full safetensors files along dimension 0 into shards as distributed
checkpoints of that form have them; `torch_files.py consolidate SHARDS OUTPUT` puts such shards together.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def shard(source: Path, output: Path, ranks: int) -> None:
    """Write the shards: each tensor's rows as evenly as may be, those of one row on the first rank alone."""
    output.mkdir()
    names = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update((name, path) for name in file.keys())  # noqa: SIM118 - it is no mapping
    for rank in range(ranks):
        tensors, offsets = {}, {}
        for name, path in names.items():
            with safe_open(path, framework="pt") as file:
                rows = file.get_slice(name)
                shape = rows.get_shape()
                first, last = (shape[0] * part // ranks for part in (rank, rank + 1))
                if first < last:
                    tensors[name] = rows[first:last].contiguous()
                    offsets[name] = {"saved_offsets": [first, *(0 for _ in shape[1:])]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        save_file(tensors, output / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata)


def consolidate(source: Path, output: Path) -> None:
    """Put shards together."""
    output.mkdir()
    names: dict[str, int] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(dict.fromkeys(file.keys(), 1))  # all into the first file, which is the only one
    consolidate_safetensors_files(str(source), str(output), names, num_threads=2)


def main() -> None:
    """Do what the command line says."""
    torch.set_num_threads(1)
    task, source, output, *rest = sys.argv[1:]
    if task == "to_torch":
        dcp_to_torch_save(source, output)
    elif task == "shard":
        shard(Path(source), Path(output), int(rest[0]))
    else:
        consolidate(Path(source), Path(output))


main()
