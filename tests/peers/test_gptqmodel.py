"""GPTQ's files as GPTQModel itself packs them: dequantized as it does, cut over ranks and merged.

It brings a torch of its own, so it is no part of the extra `peers`: to run this, `pip install gptqmodel` beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard_mpi

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("gptqmodel")

COLUMNS, ROWS, GROUP = 128, 64, 32


def packed(bits: int, symmetric: bool, act_order: bool) -> tuple[dict[str, Any], Any]:
    """Return the tensors of a random weight, and the weight in float16 as GPTQModel dequantizes it."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT

    draw = torch.Generator().manual_seed(bits)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data.copy_(torch.randn(ROWS, COLUMNS, generator=draw))
    group_of = torch.arange(COLUMNS) // GROUP
    if act_order:
        group_of = group_of[torch.randperm(COLUMNS, generator=draw)]
    settings = {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order, "bias": False}
    layer = TorchLinear(**settings, in_features=COLUMNS, out_features=ROWS, format=FORMAT.GPTQ_V2)
    scales, zeros = torch.zeros(ROWS, COLUMNS // GROUP), torch.zeros(ROWS, COLUMNS // GROUP)
    for group in range(COLUMNS // GROUP):
        own = linear.weight.data.float()[:, group_of == group]
        low, high = own.min(1)[0].clamp(max=0), own.max(1)[0].clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, group] = (high - low) / (2**bits - 1)
        zeros[:, group] = 2 ** (bits - 1) if symmetric else torch.round(-low / scales[:, group])
    layer.pack(linear, scales, zeros, group_of.int())
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {f"m.{name}": layer.state_dict()[name].contiguous() for name in names}, layer.dequantize_weight().T


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_as_gptqmodel_dequantizes(tmp_path: Path, bits: int, symmetric: bool, act_order: bool) -> None:
    from safetensors.torch import load_file, save_file

    tensors, whole = packed(bits, symmetric, act_order)
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    told = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits, "group_size": GROUP}
    told |= {"sym": symmetric, "desc_act": act_order}
    (source / "config.json").write_text(json.dumps({"quantization_config": told}))
    with reshard_mpi.open(source, dtype="fp16") as opened:
        assert np.array_equal(np.asarray(opened["m.weight"]), whole.numpy())
    for dim in range(2):
        spec, cut = tmp_path / f"{dim}.toml", tmp_path / f"cut{dim}"
        rule = f'[[parameter]]\nmatch = "*.qweight"\nsplit = {{ {dim} = ["tp"] }}\n'
        spec.write_text(f'mesh = {{ tp = 2 }}\n{rule}[[parameter]]\nmatch = "*"\n')
        reshard_mpi.transform(source, cut, dst_strategy=spec, to="safetensors")
        reshard_mpi.transform(cut, tmp_path / f"merged{dim}", src_strategy=spec, to="safetensors")
        (path,) = (tmp_path / f"merged{dim}").rglob("*.safetensors")
        merged = load_file(path)
        assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())
        with reshard_mpi.open(cut, src_strategy=spec, dtype="fp16") as opened:
            assert np.array_equal(np.asarray(opened["m.weight"]), whole.numpy())
