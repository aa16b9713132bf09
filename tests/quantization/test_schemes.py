"""Schemes of quantization, as configurations say them, and the tensors of each, with the shapes of real models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.errors import SourceError, StrategyError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.quantization.grouping import looks_quantized, quantized_weights
from reshard_mpi.quantization.schemes import quantization_config_of, quantization_of
from reshard_mpi.quantization.weights import SCHEME_TEXT, QuantizedWeight, Relation

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
SHORT = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i8": "int8",
    "u8": "uint8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
}


def kinds_of(stored: Stored) -> dict[str, TensorType]:
    return {name: TensorType(BY_NAME[SHORT[dtype]], shape) for name, (dtype, shape) in stored.items()}


def weights_of(
    config: Mapping[str, Any], stored: Stored, stated: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, QuantizedWeight]:
    weights = quantized_weights(config, kinds_of(stored), "config.json", (stated or {}).get)
    return {weight.name: weight for weight in weights}


def dims_of(weight: QuantizedWeight) -> dict[str, tuple[Any, ...]]:
    """The dimensions of companions: (dim, step) or (dim, step, own) each, None for none."""
    return {
        each.name.rpartition(".")[2]: tuple(
            None if one is None else tuple(one) if one.own > 1 else (one.dim, one.step) for one in each.dims
        )
        for each in weight.companions
    }


def compressed(layout: str, targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PACK = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128)
PACK_ZEROS = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False)
PACK_ORDER = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="group")
PACK_CHANNEL = compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False)
FLOAT_CHANNEL = compressed("float-quantized", type="float", num_bits=8, strategy="channel")
FLOAT_BLOCK = compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 128])
FLOAT_TENSOR = compressed("float-quantized", type="float", num_bits=8, strategy="tensor")
INT_CHANNEL = compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False)
INT_GROUP = compressed("int-quantized", num_bits=8, strategy="group", group_size=64)
NVFP4 = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16)
MX4 = compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32)
MX8 = compressed("mxfp8-quantized", type="float", num_bits=8, strategy="group", group_size=32)
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
MODELOPT_NVFP4 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


class Case(NamedTuple):
    """A weight of a scheme, and what is known of it.

    text: what is stored, behind the name of the module. Of a companion each length is followed by the dimension that it
    goes along, and how many elements of that, and of its own, belong together: `12=0/128`, `7168=1/8*3`.
    """

    config: Mapping[str, Any]
    shape: tuple[int, ...]  # of the logical weight
    grain: tuple[int, ...]
    text: str
    name: str = "weight"

    @property
    def tensors(self) -> dict[str, tuple[str, list[str]]]:
        """Types and the texts of lengths, by name."""
        found = re.findall(r"(\w+) (\w+) \[(.*?)\]", self.text)
        return {name: (dtype, lengths.split(", ") if lengths else []) for name, dtype, lengths in found}

    @property
    def stored(self) -> Stored:
        return {
            name: (dtype, tuple(int(each.partition("=")[0]) for each in lengths))
            for name, (dtype, lengths) in self.tensors.items()
        }

    @property
    def dims(self) -> dict[str, tuple[Any, ...]]:
        """The dimensions of companions, as `dims_of` returns them."""
        _, *companions = self.tensors.items()
        along = {name: [each.partition("=")[2] for each in lengths] for name, (_, lengths) in companions}
        return {
            name: tuple(tuple(map(int, re.split("[/*]", each))) if each else None for each in texts)
            for name, texts in along.items()
        }


CASES = {
    "DeepSeek-V3 q_a_proj": Case(
        FP8, (1536, 7168), (128, 128), "weight e4m3 [1536, 7168]; weight_scale_inv f32 [12=0/128, 56=1/128]"
    ),
    "DeepSeek-V3 kv_a_proj_with_mqa, half a block at the end": Case(
        FP8, (576, 7168), (128, 128), "weight e4m3 [576, 7168]; weight_scale_inv f32 [5=0/128, 56=1/128]"
    ),
    "powers of two as scales": Case(
        {**FP8, "scale_fmt": "ue8m0"},
        (256, 512),
        (128, 128),
        "weight e4m3 [256, 512]; weight_scale_inv u8 [2=0/128, 4=1/128]",
    ),
    "stacked fp8 experts, as vLLM calls them": Case(
        FP8,
        (256, 4096, 7168),
        (1, 128, 128),
        "w13_weight e4m3 [256, 4096, 7168]; w13_weight_scale_inv f32 [256=0/1, 32=1/128, 56=2/128]",
        name="w13_weight",
    ),
    "stacked fp8 experts, as transformers calls them": Case(
        FP8,
        (8, 1024, 640),
        (1, 128, 128),
        "gate_up_proj e4m3 [8, 1024, 640]; gate_up_proj_scale_inv f32 [8=0/1, 8=1/128, 5=2/128]",
        name="gate_up_proj",
    ),
    "fp8, one scale a tensor": Case(
        FP8_TENSOR, (96, 64), (1, 1), "weight e4m3 [96, 64]; weight_scale f32 []; input_scale f32 [1]"
    ),
    "fp8 experts, one scale each": Case(
        FP8_TENSOR,
        (8, 96, 64),
        (1, 1, 1),
        "down_proj e4m3 [8, 96, 64]; down_proj_scale_inv f32 [8=0/1, 1, 1]; down_proj_activation_scale f32 [8=0/1]",
        name="down_proj",
    ),
    "fp8 experts, one scale for all": Case(
        FP8_TENSOR, (8, 96, 64), (1, 1, 1), "weight e4m3 [8, 96, 64]; weight_scale_inv f32 [1]"
    ),
    "int8 experts": Case(
        INT_GROUP,
        (8, 96, 320),
        (1, 1, 64),
        "down_proj i8 [8, 96, 320]; down_proj_scale bf16 [8=0/1, 96=1/1, 5=2/64]",
        name="down_proj",
    ),
    "fbgemm": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        (96, 64),
        (1, 1),
        "weight e4m3 [96, 64]; weight_scale f32 [96=0/1, 1]",
    ),
    "float-quantized, channel": Case(
        FLOAT_CHANNEL, (4096, 14336), (1, 1), "weight e4m3 [4096, 14336]; weight_scale bf16 [4096=0/1, 1]"
    ),
    "float-quantized, block": Case(
        FLOAT_BLOCK, (576, 7168), (128, 128), "weight e4m3 [576, 7168]; weight_scale bf16 [5=0/128, 56=1/128]"
    ),
    "float-quantized, tensor": Case(
        FLOAT_TENSOR, (96, 64), (1, 1), "weight e4m3 [96, 64]; weight_scale bf16 [1]; k_scale bf16 [1]"
    ),
    "int-quantized, channel, with zero points": Case(
        INT_CHANNEL,
        (96, 64),
        (1, 1),
        "weight i8 [96, 64]; weight_scale f32 [96=0/1, 1]; weight_zero_point i8 [96=0/1, 1]",
    ),
    "int-quantized, group": Case(
        INT_GROUP, (96, 320), (1, 64), "weight i8 [96, 320]; weight_scale bf16 [96=0/1, 5=1/64]"
    ),
    "pack-quantized": Case(
        PACK,
        (4096, 14336),
        (1, 16),
        "weight_packed i32 [4096, 1792]; weight_scale bf16 [4096=0/1, 112=1/16]; weight_shape i64 [2]",
    ),
    "pack-quantized, with zero points": Case(
        PACK_ZEROS,
        (4096, 14336),
        (8, 16),
        "weight_packed i32 [4096, 1792]; weight_scale bf16 [4096=0/1, 112=1/16]; "
        "weight_zero_point i32 [512=0/8, 112=1/16]",
    ),
    "pack-quantized, act-order": Case(
        PACK_ORDER,
        (4096, 14336),
        (1, 1),
        "weight_packed i32 [4096, 1792]; weight_scale bf16 [4096=0/1, 112]; weight_g_idx i32 [14336=1/1*8]",
    ),
    "pack-quantized, 8 bits, channel": Case(
        PACK_CHANNEL,
        (96, 64),
        (4, 1),
        "weight_packed i32 [96, 16]; weight_scale f32 [96=0/1, 1]; weight_zero_point i32 [24=0/4, 1]",
    ),
    "pack-quantized experts": Case(
        PACK,
        (8, 64, 256),
        (1, 1, 16),
        "w2_weight_packed i32 [8, 64, 32]; w2_weight_scale bf16 [8=0/1, 64=1/1, 2=2/16]",
        name="w2_weight",
    ),
    "nvfp4": Case(
        NVFP4,
        (4096, 14336),
        (1, 8),
        "weight_packed u8 [4096, 7168]; weight_scale e4m3 [4096=0/1, 896=1/8]; weight_global_scale f32 [1]; "
        "input_global_scale f32 [1]",
    ),
    "mxfp4 of compressed-tensors": Case(
        MX4, (96, 320), (1, 16), "weight_packed u8 [96, 160]; weight_scale u8 [96=0/1, 10=1/16]"
    ),
    "mxfp8 of compressed-tensors": Case(
        MX8, (96, 320), (1, 32), "weight e4m3 [96, 320]; weight_scale u8 [96=0/1, 10=1/32]"
    ),
    "ModelOpt fp8": Case(
        MODELOPT_FP8, (96, 64), (1, 1), "weight e4m3 [96, 64]; weight_scale f32 []; input_scale f32 []"
    ),
    "ModelOpt nvfp4": Case(
        MODELOPT_NVFP4,
        (4096, 14336),
        (1, 8),
        "weight u8 [4096, 7168]; weight_scale e4m3 [4096=0/1, 896=1/8]; weight_scale_2 f32 []; "
        "input_scale f32 []; pre_quant_scale bf16 [14336=1/1*2]",
    ),
    "GPTQ, Llama-2-7B down_proj": Case(
        GPTQ,
        (4096, 11008),
        (16, 8),
        "qweight i32 [1376, 4096]; qzeros i32 [86=0/16, 512=1/8]; scales f16 [86=0/16, 4096=1/1]; "
        "g_idx i32 [11008=0/1*8]",
    ),
    "GPTQ, act-order": Case(
        {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"},
        (4096, 4096),
        (1, 8),
        "qweight i32 [512, 4096]; qzeros i32 [32, 512=1/8]; scales f16 [32, 4096=1/1]; g_idx i32 [4096=0/1*8]",
    ),
    "GPTQ, one group": Case(
        {**GPTQ, "group_size": -1},
        (4096, 4096),
        (1, 8),
        "qweight i32 [512, 4096]; qzeros i32 [1, 512=1/8]; scales f16 [1, 4096=1/1]",
    ),
    "GPTQ, 3 bits": Case(
        {**GPTQ, "bits": 3},
        (4096, 4096),
        (12, 32),
        "qweight i32 [384, 4096]; qzeros i32 [32=0/12, 384=1/32*3]; scales f16 [32=0/12, 4096=1/1]",
    ),
    "AWQ, Llama-2-7B down_proj": Case(
        AWQ,
        (4096, 11008),
        (128, 1),
        "qweight i32 [11008, 512]; qzeros i32 [86=0/128, 512=1/1]; scales f16 [86=0/128, 4096=1/1*8]",
    ),
    "gpt-oss gate_up_proj": Case(
        MXFP4,
        (32, 2880, 5760),
        (1, 1, 1, 16),
        "gate_up_proj_blocks u8 [32, 5760, 90, 16]; gate_up_proj_scales u8 [32=0/1, 5760=1/1, 90=2/1]",
        name="gate_up_proj",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_weight_of_each_scheme(case: Case) -> None:
    plain: Stored = {
        "model.norm.weight": ("bf16", (64,)),
        "lm_head.weight": ("bf16", (100, 64)),
        "m.mlp.bias": ("bf16", (64,)),
        "m.mlp.gate_up_proj_bias": ("bf16", (64,)),
        "m.self_attn.q_scale": ("f32", ()),
    }
    stored = {f"m.mlp.{name}": kind for name, kind in case.stored.items()}
    weights = weights_of(case.config, {**plain, **stored})
    assert list(weights) == [f"m.mlp.{case.name}"]
    (weight,) = weights.values()
    assert weight.stored == next(iter(stored))
    assert (weight.shape, weight.grain) == (case.shape, case.grain)
    assert dims_of(weight) == case.dims
    assert set(weight.names) == set(stored)
    for each in weight.companions:
        for relation, length in zip(each.dims, stored[each.name][1], strict=True):
            assert relation is None or relation.length(stored[weight.stored][1][relation.dim]) == length
    assert looks_quantized(kinds_of({**plain, **stored})) in (weight.stored, None)


def test_all_but_bare_stacks_are_seen_without_a_configuration() -> None:
    unseen = [name for name, case in CASES.items() if looks_quantized(kinds_of(case.stored)) is None]
    assert unseen == ["int8 experts"]


WHOLE = {
    "bitsandbytes": {
        "weight": ("u8", (32, 1)),
        "weight.absmax": ("u8", (1,)),
        "weight.nested_absmax": ("f32", (1,)),
        "weight.quant_map": ("f32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("u8", (80,)),
    },
    "bitsandbytes ": {"weight": ("i8", (8, 8)), "SCB": ("f32", (8,)), "weight_format": ("u8", ())},
    "torchao": {"_weight_qdata": ("i8", (8, 8)), "_weight_scale": ("f32", (8, 1))},
    "golden-stick": {"weight": ("i8", (8, 8)), "dequant_scale": ("f32", (8,)), "quant_bias": ("i32", (8,))},
    "aqlm": {"codebooks": ("f16", (1, 4, 1, 8)), "codes": ("i16", (8, 1, 1)), "scales": ("f16", (8, 1, 1, 1))},
    "quanto": {"weight._data": ("i8", (8, 8)), "weight._scale": ("f32", (8, 1))},
}


@pytest.mark.parametrize(("method", "stored"), WHOLE.items(), ids=WHOLE)
def test_other_schemes_are_recognized_and_never_cut(method: str, stored: Stored) -> None:
    plain: Stored = {
        "embed.weight": ("bf16", (8, 8)),
        "embed.position_ids": ("i64", (1, 8)),
        "q.norm.weight": ("f32", (8,)),
    }
    module = {f"q.{name}": kind for name, kind in stored.items()} | {"q.bias": ("bf16", (8,))}
    weights = weights_of({SCHEME_TEXT: {"quant_method": method.strip()}}, {**plain, **module})
    assert list(weights) == ["q.weight"]
    weight = weights["q.weight"]
    assert weight.scheme.kind == "whole"
    assert set(weight.names) == set(module)
    shape = module[weight.stored][1]
    assert (weight.shape, weight.grain) == (shape, shape)
    assert all(dim is None for each in weight.companions for dim in each.dims)


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "checkpoint_format": "marlin"},
        {**GPTQ, "checkpoint_format": "exllama"},
        {**GPTQ, "is_marlin_format": True},
        {**AWQ, "version": "gemv"},
        {"quant_method": "gptq_marlin", "bits": 4, "group_size": 128},
        compressed("marlin-24", num_bits=4, strategy="group", group_size=128),
        {**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    ],
)
def test_layouts_of_kernels_are_whole(config: Mapping[str, Any]) -> None:
    stored: Stored = {"q.B": ("i32", (8, 128)), "q.s": ("f16", (1, 64)), "n.weight": ("f16", (64,))}
    weights = weights_of(config, stored)
    assert [weight.scheme.kind for weight in weights.values()] == ["whole"]
    assert weights["q.weight"].names == ("q.B", "q.s")


def test_experts_of_bitsandbytes_lie_beside_what_belongs_to_them() -> None:
    stored: Stored = {"e.down_proj": ("u8", (32, 1)), "e.down_proj.absmax": ("f32", (1,))}
    weights = weights_of({"quant_method": "bitsandbytes"}, stored)
    assert [weight.names for weight in weights.values()] == [("e.down_proj", "e.down_proj.absmax")]


def test_fp4_experts_beside_fp8_blocks() -> None:
    stored: Stored = {
        "l.attn.weight": ("e4m3", (128, 128)),
        "l.attn.weight_scale_inv": ("f32", (1, 1)),
        "l.experts.0.w1.weight": ("i8", (64, 64)),
        "l.experts.0.w1.weight_scale_inv": ("u8", (64, 4)),
    }
    weights = weights_of({**FP8, "expert_dtype": "fp4"}, stored)
    assert [(name, each.scheme.kind) for name, each in weights.items()] == [
        ("l.attn.weight", "fp8"),
        ("l.experts.0.w1.weight", "whole"),
    ]


# Configurations


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"model_type": "llama", "quantization_config": GPTQ}, "gptq"),
        ({"text_config": {"quantization_config": FP8}}, "fp8"),
        (
            {"compression_config": {key: value for key, value in PACK.items() if key != "quant_method"}},
            "compressed-tensors",
        ),
        ({key: value for key, value in GPTQ.items() if key != "quant_method"}, "gptq"),
        ({key: value for key, value in AWQ.items() if key != "quant_method"}, "awq"),
        ({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
        (MODELOPT_NVFP4, "modelopt"),
        ({SCHEME_TEXT: json.dumps(AWQ), "format": "pt"}, "awq"),
        ({"tensor_names": '["q.weight"]', "q.weight": '{"_type": "Int8Tensor", "_data": {}}'}, "torchao"),
        ({"quantization_config": {"load_in_4bit": True}}, "unknown"),
    ],
)
def test_where_configurations_stand(values: Mapping[str, Any], method: str) -> None:
    assert quantization_of(values, "config.json").method == method
    # Files of ranks carry the dictionary as a text.
    carried = {SCHEME_TEXT: json.dumps(quantization_config_of(values)), "format": "pt"}
    assert quantization_config_of(carried) == quantization_config_of(values)
    assert quantization_of(carried, "rank_0").scheme("q") == quantization_of(values, "config.json").scheme("q")


@pytest.mark.parametrize("values", [{}, {"model_type": "llama"}, {"quantization_config": None}, {"format": "pt"}])
def test_plain_configurations(values: Mapping[str, Any]) -> None:
    assert quantization_config_of(values) is None
    with pytest.raises(StrategyError, match="does not say how"):
        quantization_of(values, "config.json")


def test_groups_are_chosen_by_name_then_pattern_then_class() -> None:
    group = {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "a": {**group, "format": "pack-quantized", "targets": ["Linear"]},
            "b": {**FLOAT_TENSOR["config_groups"]["group_0"], "format": "float-quantized", "targets": ["re:.*down.*"]},
            "c": {**INT_GROUP["config_groups"]["group_0"], "format": "int-quantized", "targets": ["m.0.down"]},
            "d": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}},
            "e": {**group, "format": "int-quantized", "weights": INT_CHANNEL["config_groups"]["group_0"]["weights"]}
            | {"targets": ["Embedding"]},
        },
    }
    read = quantization_of(config, "config.json")
    names = {"m.0.up": "packed", "m.1.down": "fp8", "m.0.down": "int8", "m.embed_tokens": "int8"}
    assert {name: read.scheme(name).kind for name in names} == names  # type: ignore[union-attr]
    assert read.scheme("m.embed_tokens").block == (1, 0)  # type: ignore[union-attr]
    assert [read.leaves_out(name) for name in ("lm_head", "m.mlp.gate", "m.mlp.gate_proj")] == [True, True, False]


def test_settings_that_are_written_in_two_ways() -> None:
    block = {"strategy": "block", "block_structure": "128x64", "num_bits": 8, "type": "float"}
    assert quantization_of(compressed("float-quantized", **block), "x").scheme("q").block == (128, 64)  # type: ignore[union-attr]
    nvfp4 = quantization_of({"quant_method": "modelopt", "quant_algo": "nvfp4", "group_size": None}, "x").scheme("q")
    assert nvfp4 is not None
    assert (nvfp4.kind, nvfp4.block) == ("nvfp4", (1, 16))


def test_what_dequantizing_must_know_of_zero_points() -> None:
    configs = (
        {**GPTQ, "sym": False},
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        AWQ,
        {**AWQ, "zero_point": False},
        PACK,
    )
    schemes = [quantization_of(config, "x").scheme("q") for config in configs]
    assert [(each.name, each.symmetric) for each in schemes if each is not None] == [
        ("gptq", False),
        ("gptq_v2", True),
        ("awq", False),
        ("awq", True),
        ("pack-quantized", True),
    ]


def test_modules_that_gptq_changes_or_leaves_out() -> None:
    dynamic = {"-:.*gate.*": {}, r"+:.*\.18\..*": {"bits": 8, "group_size": 64}, r".*\.19\..*": {"desc_act": True}}
    read = quantization_of({**GPTQ, "dynamic": dynamic}, "config.json")
    of = {number: read.scheme(f"model.layers.{number}.q") for number in (1, 18, 19)}
    told = {number: (each.bits, each.block, each.act_order) for number, each in of.items() if each is not None}
    assert told == {1: (4, (1, 128), False), 18: (8, (1, 64), False), 19: (4, (1, 128), True)}
    assert read.leaves_out("model.layers.18.gate_proj")


def test_layers_of_mixed_precision() -> None:
    layers = {"l.0.experts": {"quant_algo": "NVFP4", "group_size": 16}, "l.*.attn": {"quant_algo": "FP8"}}
    read = quantization_of(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, "x"
    )
    kinds = [each and each.kind for each in map(read.scheme, ("l.0.experts.7.down_proj", "l.3.attn", "l.1.mlp"))]
    assert kinds == ["nvfp4", "fp8", None]


def _group(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **{"num_bits": 4, "strategy": "group", "group_size": 128, **weights})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": "128xx"}, "weight_block_size"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({**GPTQ, "bits": 5}, "one of 2, 3, 4, 8"),
        ({**GPTQ, "bits": True}, "bits"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "desc_act": "yes"}, "desc_act"),
        ({**GPTQ, "dynamic": []}, "dynamic"),
        ({**GPTQ, "dynamic": {"(": {}}}, "no pattern"),
        ({**AWQ, "bits": 8}, "bits"),
        ({**PACK, "config_groups": []}, "config_groups"),
        ({**PACK, "ignore": ["re:["]}, "no pattern"),
        (_group(num_bits=7), "num_bits"),
        (_group(group_size=None), "group_size"),
        (_group(strategy="token"), "strategy"),
        (_group(symmetric="no"), "symmetric"),
        ({"quantization_config": "{"}, "does not say how"),
    ],
)
def test_configurations_that_say_something_impossible(config: Mapping[str, Any], words: str) -> None:
    with pytest.raises(StrategyError) as caught:
        quantization_of(config, "my/config.json")
    assert words in str(caught.value)
    assert "my/config.json" in str(caught.value)


def test_two_groups_of_classes_are_refused_where_they_meet() -> None:
    groups = {
        name: {**config["config_groups"]["group_0"], "targets": [target], "format": config["format"]}
        for name, config, target in (("a", PACK, "Linear"), ("b", FLOAT_TENSOR, "Conv2d"))
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    stored: Stored = {"q.weight_packed": ("i32", (8, 16)), "q.weight_scale": ("f16", (8, 1))}
    with pytest.raises(StrategyError, match="how q is quantized"):
        weights_of(config, stored)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.sampled_from(("group", "re:(", "128x128", "9" * 5000 + "x8", "*")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("weights", "targets", "format", "strategy", "num_bits")), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = ("bits", "group_size", "weight_block_size", "format", "config_groups", "ignore", "dynamic", "quantized_layers")
_METHODS = ("fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "modelopt", "fbgemm_fp8", 7)


@many(500)
@given(st.sampled_from(_METHODS), st.dictionaries(st.sampled_from(_KEYS), _VALUES), st.booleans())
def test_whatever_a_configuration_says_is_read_or_refused(
    method: object, values: dict[str, Any], is_gptq: bool
) -> None:
    config = {"quant_method": method, **(GPTQ if is_gptq else PACK), **values, SCHEME_TEXT: None}
    try:
        weights = weights_of({**config, "quant_method": method}, {**_GPTQ, **_PACK, **_BLOCKS})
    except (StrategyError, SourceError) as error:
        assert error.expected and error.got and error.where
    else:
        assert all(size > 0 for weight in weights.values() for size in weight.grain)


# Refusals

_DEEPSEEK: Stored = {"q.weight": ("e4m3", (576, 7168)), "q.weight_scale_inv": ("f32", (5, 56))}
_GPTQ: Stored = {
    "q.qweight": ("i32", (512, 64)),
    "q.qzeros": ("i32", (32, 8)),
    "q.scales": ("f16", (32, 64)),
    "q.g_idx": ("i32", (4096,)),
}
_PACK: Stored = {"q.weight_packed": ("i32", (64, 32)), "q.weight_scale": ("bf16", (64, 2))}
_BLOCKS: Stored = {"q_blocks": ("u8", (4, 8, 2, 16)), "q_scales": ("u8", (4, 8, 2))}
_NVFP4: Stored = {
    "q.weight_packed": ("u8", (8, 32)),
    "q.weight_scale": ("e4m3", (8, 4)),
    "q.weight_global_scale": ("f32", (1,)),
}
# Experts that are stored with columns before rows.
_TURNED: Stored = {
    "e.down": ("u8", (2, 32, 64)),
    "e.down_weight_scale": ("e4m3", (2, 4, 64)),
    "e.down_weight_scale_2": ("f32", (1,)),
}
_SHAPED: Stored = {**_PACK, "q.weight_shape": ("i64", (2,))}


@pytest.mark.parametrize(
    ("config", "stored", "changes", "facts"),
    [
        # incomplete
        (FP8, _DEEPSEEK, {"q.weight_scale_inv": None}, ("incomplete", "q.weight", "no scale", "q.weight_scale_inv or")),
        (FP8, _DEEPSEEK, {"q.weight": None}, ("incomplete", "q.weight_scale_inv", "no weight", "q.weight")),
        (FP8, {"e.down": ("e4m3", (2, 8, 8))}, {}, ("incomplete", "e.down", "e.down_scale_inv")),
        (FP8, {"e.down_scale_inv": ("f32", (2, 1, 1))}, {}, ("incomplete", "e.down_scale_inv", "no weight")),
        (GPTQ, _GPTQ, {"q.scales": None}, ("incomplete", "q.weight", "no scale", "q.scales")),
        (GPTQ, _GPTQ, {"q.qzeros": None}, ("incomplete", "q.weight", "no zeros", "q.qzeros")),
        (GPTQ, _GPTQ, {"q.qweight": None}, ("incomplete", "no weight", "q.qweight")),
        ({**GPTQ, "desc_act": True}, _GPTQ, {"q.g_idx": None}, ("incomplete", "no group index", "q.g_idx")),
        (PACK_ZEROS, _PACK, {}, ("incomplete", "no zeros", "q.weight_zero_point")),
        (PACK_ORDER, _PACK, {}, ("incomplete", "no group index", "q.weight_g_idx")),
        (NVFP4, _NVFP4, {"q.weight_global_scale": None}, ("incomplete", "no global scale", "q.weight_global_scale")),
        (NVFP4, _NVFP4, {"q.weight_packed": None}, ("incomplete", "no weight", "q.weight_packed")),
        (MXFP4, _BLOCKS, {"q_scales": None}, ("incomplete", "weight q ", "q_scales")),
        (MXFP4, _BLOCKS, {"q_blocks": None}, ("incomplete", "q_scales", "no weight", "q_blocks")),
        # shapes
        ({**FP8, "weight_block_size": [64, 128]}, _DEEPSEEK, {}, ("[9, 56]", "rows / 64", "[5, 56]", "[576, 7168]")),
        (FP8, _DEEPSEEK, {"q.weight_scale_inv": ("f32", (5, 55))}, ("[5, 56]", "columns / 128", "[5, 55]")),
        (FP8, {"q.weight": ("e4m3", (8,)), "q.weight_scale_inv": ("f32", (1,))}, {}, ("2 dimensions", "[8]")),
        (FP8_TENSOR, _DEEPSEEK, {}, ("q.weight_scale_inv", "[5, 56]")),
        ({**GPTQ, "bits": 8}, _GPTQ, {}, ("q.scales", "[16, 64]", "[32, 64]", "8 bits")),
        ({**GPTQ, "bits": 3}, _GPTQ, {}, ("q.scales", "[43, 64]", "[32, 64]", "3 bits")),
        ({**GPTQ, "group_size": 64}, _GPTQ, {}, ("q.scales", "[64, 64]", "[32, 64]", "64 columns")),
        (GPTQ, _GPTQ, {"q.qzeros": ("i32", (32, 64))}, ("q.qzeros", "[32, 8]", "[32, 64]")),
        (GPTQ, _GPTQ, {"q.g_idx": ("i32", (4000,))}, ("q.g_idx", "[4096]", "[4000]")),
        (AWQ, _GPTQ, {"q.g_idx": None}, ("q.scales", "[4, 512]", "[32, 64]")),
        (MODELOPT_NVFP4, _TURNED, {}, ("weight e.down", "e.down_weight_scale", "[2, 32, 8]", "[2, 4, 64]")),
        ({**AWQ, "group_size": 16}, _GPTQ, {"q.g_idx": None}, ("q.scales", "[32, 512]", "[32, 64]")),
        (PACK_CHANNEL, _PACK, {"q.weight_zero_point": ("i32", (16, 1))}, ("q.weight_scale", "[64]", "[64, 2]")),
        (PACK, _SHAPED, {}, ("q.weight_packed", "columns / 8", "25 for 200", "[64, 32]")),
        (MXFP4, _BLOCKS, {"q_blocks": ("u8", (4, 8, 32))}, ("q_blocks", "[4, 8, 32]", "16")),
        (MXFP4, _BLOCKS, {"q_scales": ("u8", (4, 8, 3))}, ("q_scales", "[4, 8, 2]", "[4, 8, 3]")),
        # types
        (FP8, _DEEPSEEK, {"q.weight": ("bf16", (576, 7168))}, ("type of q.weight", "float8_e4m3fn", "bfloat16")),
        (FP8, _DEEPSEEK, {"q.weight": ("i8", (576, 7168))}, ("type of q.weight", "float8_e4m3fn", "int8")),
        (INT_GROUP, {"q.weight": ("e4m3", (8, 64)), "q.weight_scale": ("f32", (8, 1))}, {}, ("int8", "float8_e4m3fn")),
        (GPTQ, _GPTQ, {"q.qweight": ("u8", (512, 64))}, ("type of q.qweight", "int32", "uint8")),
        (PACK, _PACK, {"q.weight_scale": ("i32", (64, 2))}, ("type of q.weight_scale", "bfloat16", "int32")),
        (MXFP4, _BLOCKS, {"q_scales": ("f32", (4, 8, 2))}, ("type of q_scales", "uint8", "float32")),
        # another scheme, and what is left out
        (PACK, _GPTQ, {}, ("q.qweight", "pack-quantized", "int32")),
        (FP8, _PACK, {}, ("q.weight_packed", "fp8", "int32")),
        (MXFP4, _DEEPSEEK, {}, ("q.weight", "mxfp4", "float8_e4m3fn")),
        ({**FP8, "modules_to_not_convert": ["q"]}, _DEEPSEEK, {}, ("q.weight", "left out")),
        (compressed("float-quantized", ("re:k",), num_bits=8), _DEEPSEEK, {}, ("q.weight", "no group")),
        (PACK, _PACK, {"q.weight": ("bf16", (64, 256))}, ("q.weight", "twice", "q.weight_packed")),
    ],
)
def test_refusals(
    config: Mapping[str, Any], stored: Stored, changes: Mapping[str, Any], facts: tuple[str, ...]
) -> None:
    changed = {name: kind for name, kind in {**stored, **changes}.items() if kind is not None}
    with pytest.raises(SourceError) as caught:
        weights_of(config, changed, {"q.weight_shape": (64, 200)})
    error, text = caught.value, str(caught.value)
    assert [fact for fact in (*facts, "config.json") if fact not in text] == []
    assert error.exit_code == 3
    assert error.expected and error.got and error.remedy


@pytest.mark.parametrize("config", [FP8, FP8_TENSOR, GPTQ, AWQ, MXFP4, PACK, FLOAT_BLOCK, NVFP4, MODELOPT_NVFP4])
def test_weights_that_are_stored_plain_are_plain(config: Mapping[str, Any]) -> None:
    stored: Stored = {
        "lm_head.weight": ("bf16", (100, 64)),
        "model.embed_tokens.weight": ("bf16", (100, 64)),
        "layers.0.mlp.gate.weight": ("f32", (8, 64)),
        "layers.0.mlp.gate.e_score_correction_bias": ("f32", (8,)),
        "layers.0.self_attn.k_scale": ("f32", ()),
        "layers.0.self_attn.sinks": ("bf16", (8,)),
        "vision.embeddings.position_ids": ("i64", (1, 50)),
        "bn.num_batches_tracked": ("i64", ()),
    }
    assert weights_of(config, stored) == {}


def test_an_fp8_weight_that_is_left_out_needs_no_scale() -> None:
    stored: Stored = {**_DEEPSEEK, "lm_head.weight": ("e4m3", (100, 64))}
    assert list(weights_of({**FP8, "modules_to_not_convert": ["lm_head"]}, stored)) == ["q.weight"]


def test_the_stated_shape_counts() -> None:
    stored: Stored = {**_SHAPED, "q.weight_packed": ("i32", (64, 25)), "q.weight_scale": ("bf16", (64, 2))}
    weight = weights_of(PACK, stored, {"q.weight_shape": (64, 197)})["q.weight"]
    assert weight.shape == (64, 197)
    assert weights_of(PACK, stored)["q.weight"].shape == (64, 200)


def test_where_words_are_filled_up_beyond_a_group_nothing_is_cut() -> None:
    # 4 columns in groups of 4 fill half a word; a word has two groups
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=4)
    stored: Stored = {
        "q.weight_packed": ("i32", (6, 1)),
        "q.weight_scale": ("bf16", (6, 1)),
        "q.weight_shape": ("i64", (2,)),
    }
    weight = weights_of(config, stored, {"q.weight_shape": (6, 4)})["q.weight"]
    assert weight.grain == (1, 1)
    assert dims_of(weight)["weight_scale"] == ((0, 1), None)


@pytest.mark.parametrize("config", [{**GPTQ, "desc_act": True}, {**GPTQ, "group_size": -1}, GPTQ])
def test_the_part_of_a_rank_has_all_groups_if_columns_are_in_any_order(config: dict[str, Any]) -> None:
    groups = 1 if config["group_size"] == -1 else 32 if config["desc_act"] else 8
    stored: Stored = {
        "q.qweight": ("i32", (128, 64)),
        "q.qzeros": ("i32", (groups, 8)),
        "q.scales": ("f16", (groups, 64)),
        "q.g_idx": ("i32", (1024,)),
    }
    (weight,) = quantized_weights(config, kinds_of(stored), "config.json", {}.get)
    assert weight.shape == (64, 1024)
    assert [each.dims[0] is None for each in weight.companions] == [groups != 8, groups != 8, False]
    with pytest.raises(SourceError, match="contradicts"):
        changed = {**stored, "q.scales": ("f16", (groups, 65))}
        quantized_weights(config, kinds_of(changed), "config.json", {}.get)


# Random sizes, against the formulas of the schemes


@st.composite
def packed_weights(draw: st.DrawFn) -> tuple[dict[str, Any], Stored, tuple[int, int]]:
    bits, symmetric, by_group = draw(st.sampled_from((2, 3, 4, 5, 6, 8))), draw(st.booleans()), draw(st.booleans())
    rows, columns = draw(st.integers(1, 200)), draw(st.integers(1, 500))
    group = draw(st.sampled_from((32, 64, 128)))
    groups = math.ceil(columns / group) if by_group else 1
    config = compressed(
        "pack-quantized",
        num_bits=bits,
        strategy="group" if by_group else "channel",
        group_size=group if by_group else None,
        symmetric=symmetric,
    )
    stored = {
        "q.weight_packed": ("i32", (rows, math.ceil(columns * bits / 32))),
        "q.weight_scale": ("bf16", (rows, groups)),
        "q.weight_shape": ("i64", (2,)),
    }
    if not symmetric:
        stored["q.weight_zero_point"] = ("i32", (math.ceil(rows * bits / 32), groups))
    return config, stored, (rows, columns)


def check_cuts(weight: QuantizedWeight, stored: Stored) -> None:
    """Both parts of a cut on the grain have as much as they would have if they were weights of their own."""
    shape = stored[weight.stored][1]
    for each in weight.companions:
        for relation, length in zip(each.dims, stored[each.name][1], strict=True):
            if relation is None:
                continue
            size, grain = shape[relation.dim], weight.grain[relation.dim]
            assert relation.length(size) == length
            for place in range(0, size, grain):
                assert place * relation.own % relation.step == 0
                assert relation.length(place) + relation.length(size - place) == length


@many(200)
@given(packed_weights())
def test_packed_weights_of_random_sizes(drawn: tuple[dict[str, Any], Stored, tuple[int, int]]) -> None:
    config, stored, shape = drawn
    weight = weights_of(config, stored, {"q.weight_shape": shape})["q.weight"]
    assert weight.shape == shape
    check_cuts(weight, stored)


@many(200)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from((1, 16, 64, 128)), st.sampled_from((16, 32, 128)))
def test_blocks_of_random_sizes(rows: int, columns: int, block_rows: int, block_columns: int) -> None:
    stored: Stored = {
        "q.weight": ("e4m3", (3, rows, columns)),
        "q.weight_scale_inv": ("f32", (3, math.ceil(rows / block_rows), math.ceil(columns / block_columns))),
    }
    config = {"quant_method": "fp8", "weight_block_size": [block_rows, block_columns]}
    weight = weights_of(config, stored)["q.weight"]
    assert weight.shape == (3, rows, columns)
    assert weight.grain == (1, block_rows, block_columns)
    check_cuts(weight, stored)


@many(200)
@given(
    st.integers(1, 12), st.integers(1, 12), st.sampled_from((2, 3, 4, 8)), st.sampled_from((32, 64, -1)), st.booleans()
)
def test_gptq_and_awq_of_random_sizes(rows: int, columns: int, bits: int, group: int, act_order: bool) -> None:
    rows, columns = rows * 32, columns * 32
    groups = 1 if group == -1 else math.ceil(columns / group)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    stored: Stored = {
        "q.qweight": ("i32", (columns * bits // 32, rows)),
        "q.qzeros": ("i32", (groups, rows * bits // 32)),
        "q.scales": ("f16", (groups, rows)),
        "q.g_idx": ("i32", (columns,)),
    }
    weight = weights_of(config, stored)["q.weight"]
    assert weight.shape == (rows, columns)
    check_cuts(weight, stored)
    is_whole = act_order or group == -1
    assert [each.dims[0] is None for each in weight.companions] == [is_whole, is_whole, False]
    stored = {
        "q.qweight": ("i32", (columns, rows // 8)),
        "q.qzeros": ("i32", (groups, rows // 8)),
        "q.scales": ("f16", (groups, rows)),
    }
    weight = weights_of({"quant_method": "awq", "bits": 4, "group_size": group}, stored)["q.weight"]
    assert weight.shape == (rows, columns)
    assert weight.companions[0].dims[1] == Relation(1, 1, 8)
    check_cuts(weight, stored)


# Without a configuration


@pytest.mark.parametrize(
    "stored",
    [
        {"bert.LayerNorm.weight": ("f32", (8,)), "bert.LayerNorm.bias": ("f32", (8,))},
        {"x.weight": ("bf16", (8, 8)), "x.weight_scale": ("bf16", (8, 1)), "x.weight_scale_inv": ("f32", (1, 1))},
        {"x.weight": ("e4m3", (8, 8))},
        {"x.weight": ("i8", (8, 8))},
        {"x.qweight": ("i32", (8, 8)), "x.scales": ("f16", (1, 8))},
        {"net.scales": ("f32", (8,)), "net.qzeros": ("f32", (8,))},
        {"t.transformer_blocks": ("f32", (8,)), "t.transformer_scales": ("f32", (8,))},
        {"experts.gate_up_proj": ("bf16", (4, 8, 8)), "experts.gate_up_proj_bias": ("bf16", (4, 8))},
        {"mlp.gate.weight": ("bf16", (4, 8)), "mlp.gate.e_score_correction_bias": ("f32", (4,))},
        {"conv.weight_g": ("f32", (4, 1)), "conv.weight_v": ("f32", (4, 8))},
        {"ssm.A_log": ("f32", (4,)), "ssm.dt_bias": ("f32", (4,)), "ssm.conv1d.weight": ("bf16", (4, 1, 4))},
        {"embeddings.position_ids": ("i64", (1, 512))},
        {"m._extra_state": ("u8", (100,)), "m.weight": ("bf16", (8, 8))},
    ],
)
def test_plain_models_do_not_look_quantized(stored: Stored) -> None:
    assert looks_quantized(kinds_of(stored)) is None


@pytest.mark.parametrize(
    "stored",
    [
        *(
            {f"q.{name}": kind for name, kind in WHOLE[method].items()}
            for method in ("bitsandbytes", "bitsandbytes ", "torchao")
        ),
        {"q.weight": ("i8", (8, 8)), "q.weight_scale": ("f32", (8,)), "q.weight_zp": ("i8", (8,))},
    ],
)
def test_others_look_quantized(stored: Stored) -> None:
    assert looks_quantized(kinds_of(stored)) in stored
