"""8-bit floats with a scale for each block of 128 x 128, as DeepSeek-V3's files have them.

`fp8_files.py make FOLDER MEGABYTES` writes a folder of Hugging Face of about that size, of noise in four files;
`fp8_files.py dequantize SOURCE OUTPUT` makes bfloat16 of it with torch, file by file and tensor by tensor.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_FILES, _SHAPE, _BLOCK, _SCALE = 4, (2048, 7168), 128, "_scale_inv"


def make(folder: Path, megabytes: int) -> None:
    """Write the folder: as many weights of experts as the size asks for, each with its scales, and a norm."""
    folder.mkdir(parents=True)
    noise = torch.Generator().manual_seed(0)
    count = max(1, megabytes * 1_000_000 // (_FILES * _SHAPE[0] * _SHAPE[1]))
    grid = tuple(length // _BLOCK for length in _SHAPE)
    file_of = {}
    for number in range(_FILES):
        tensors = {f"model.layers.{number}.input_layernorm.weight": torch.ones(_SHAPE[1], dtype=torch.bfloat16)}
        for expert in range(count):
            name = f"model.layers.{number}.mlp.experts.{expert}.gate_proj.weight"
            tensors[name] = torch.empty(_SHAPE).normal_(0, 100, generator=noise).to(torch.float8_e4m3fn)
            tensors[name + _SCALE] = torch.rand(grid, generator=noise)
        path = folder / f"model-{number + 1:05d}-of-{_FILES:05d}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        file_of.update(dict.fromkeys(tensors, path.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))


def dequantize(source: Path, output: Path) -> None:
    """Write the weights in bfloat16, in files of the same names."""
    output.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_SCALE)}
        for name, scale in scales.items():
            weight = tensors[name.removesuffix(_SCALE)].to(torch.float32)
            blocks = weight.view(scale.shape[0], _BLOCK, scale.shape[1], _BLOCK)
            blocks *= scale[:, None, :, None]
            tensors[name.removesuffix(_SCALE)] = weight.to(torch.bfloat16)
        save_file(tensors, output / path.name, {"format": "pt"})


def main() -> None:
    """Do what the command line says."""
    task, folder, rest = sys.argv[1:]
    if task == "make":
        make(Path(folder), int(rest))
    else:
        dequantize(Path(folder), Path(rest))


main()
