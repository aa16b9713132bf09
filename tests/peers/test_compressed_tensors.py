"""Quantized weights as compressed-tensors itself writes them: each stored tensor belongs to its weight."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.examples import few

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.quantization.grouping import looks_quantized, quantized_weights

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.torch

CASES: list[tuple[str, dict[str, Any]]] = [
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    *(
        ("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **strategy})
        for bits in (2, 3, 4, 5, 6, 8)
        for is_symmetric in (True, False)
        for strategy in ({"strategy": "group", "group_size": 32}, {"strategy": "channel"})
    ),
]


def compressed_model(layout: str, weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the tensors of a small model."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    columns = 100 if weights["strategy"] == "channel" else 96
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(columns, 72, dtype=torch.bfloat16))
    model.add_module("lm_head", torch.nn.Linear(96, 40, bias=False, dtype=torch.bfloat16))
    model.add_module("embed_tokens", torch.nn.Embedding(10, 96, dtype=torch.bfloat16))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=layout)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"], quantization_status="frozen"
    )
    apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if name.endswith(("_scale", "_zero_point")):
            parameter.data.fill_(0 if name.endswith("_zero_point") else 0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    said = json.loads(json.dumps(compressor.quantization_config.model_dump(mode="json")))
    return {"quantization_config": said}, model.state_dict()


@pytest.mark.parametrize(("layout", "weights"), few(3, CASES))
def test_each_stored_tensor_belongs_to_its_weight(layout: str, weights: dict[str, Any]) -> None:
    config, tensors = compressed_model(layout, weights)
    kinds = {
        name: TensorType(BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    (weight,) = quantized_weights(config, kinds, "config.json", lambda name: tuple(tensors[name].tolist()))
    assert weight.shape == (72, 100 if weights["strategy"] == "channel" else 96)
    assert {*weight.names, "q_proj.bias", "lm_head.weight", "embed_tokens.weight"} == set(tensors)
    assert looks_quantized(kinds) == weight.stored
    stored = kinds[weight.stored].shape
    for companion in weight.companions:
        for relation, length in zip(companion.dims, kinds[companion.name].shape, strict=True):
            assert relation is None or relation.length(stored[relation.dim]) == length
