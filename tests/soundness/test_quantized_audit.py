"""Quantized checkpoints are audited as the weights that they hold; a scale that is none is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from soundness.test_audit import WRONG, Spoil, at, audited, without
from support.command_line import done, refused, run_here
from support.examples import few
from support.quantized import E4M3, awq, gpt_oss, gptq, packed
from support.whole_checkpoints import CONFIG, EMBEDDING, Array, Tensors, save, stand_ins, weights

__all__ = ["stand_ins"]
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": True}
MXFP4 = {"quant_method": "mxfp4"}
Q_PROJ, EXPERT = "model.layers.1.q_proj", "model.layers.1.experts.2.w1"
EXPERTS = "model.layers.1.mlp.experts"


def in_blocks(weight: Array) -> tuple[Array, Array]:
    """Return a weight in blocks of 4 x 4, as DeepSeek quantizes it, and their scales."""
    rows, columns = weight.shape
    padded = np.zeros((-rows % 4 + rows, -columns % 4 + columns), np.float32)
    padded[:rows, :columns] = weight
    blocks = padded.reshape(len(padded) // 4, 4, -1, 4)
    scales = np.abs(blocks).max(axis=(1, 3)) / 448
    stored = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return stored.astype(E4M3), scales


def of_deepseek(seed: int = 0) -> Tensors:
    made: Tensors = {}
    for name, array in weights(seed).items():
        made[name] = array
        if array.ndim == 2 and name != EMBEDDING:
            made[name], made[f"{name}_scale_inv"] = in_blocks(array.astype(np.float32))
    return made


def of_gptq(seed: int = 0, columns: int = 8) -> Tensors:
    """Return the weights of the model with `q_proj` in groups that are in any order."""
    random, made = np.random.default_rng(seed), dict[str, Array]()
    for name, array in weights(seed).items():
        if "q_proj" not in name:
            made[name] = array
            continue
        sample = gptq(random, (8, columns), 4, 4, np.dtype(np.float16), act_order=True)
        made |= {name.replace("weight", own.removeprefix("w.")): array for own, array in sample.tensors.items()}
    return made


def of_gpt_oss(seed: int = 0) -> Tensors:
    random, made = np.random.default_rng(seed), {EMBEDDING: weights(seed)[EMBEDDING]}
    for layer in range(3):
        for name, rows in (("gate_up_proj", 12), ("down_proj", 8)):
            sample = gpt_oss(random, (4, 32, rows))
            begin = f"model.layers.{layer}.mlp.experts.{name}"
            made |= {own.replace("w_", f"{begin}_"): array for own, array in sample.tensors.items()}
    return made


MADE: dict[str, tuple[Callable[[], Tensors], dict[str, Any]]] = {
    "deepseek": (of_deepseek, FP8),
    "gptq": (of_gptq, {**GPTQ, "group_size": 4}),
    "gpt-oss": (of_gpt_oss, MXFP4),
}


def saved(folder: Path, tensors: Tensors, quantization: dict[str, Any], **more: Any) -> Path:
    return save(folder, tensors, config={"model_type": "toy", **more, "quantization_config": quantization})


@pytest.mark.parametrize("name", few(1, MADE))
def test_sound_quantized_checkpoints_have_no_findings(name: str, tmp_path: Path) -> None:
    made, quantization = MADE[name]
    assert audited(saved(tmp_path / "src", made(), quantization), "--strict") == set()


@pytest.mark.parametrize("name", few(1, ["deepseek", "gptq"]))
def test_the_definition_is_that_of_the_model_without_quantization(name: str, tmp_path: Path, stand_ins: Path) -> None:
    made, quantization = MADE[name]
    folder = saved(tmp_path / "src", made(), quantization, **CONFIG)
    finished = done("audit", folder, "--strict", "--jobs", "1")
    assert "TinyMoeForCausalLM of transformers 4.99" in finished.out and finished.out.endswith(": sound\n")
    assert "quantized" not in finished.err
    (folder / "config.json").rename(tmp_path / "config.json")
    assert audited(folder, "--config", str(tmp_path / "config.json"), "--strict") == set()
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert audited(folder, "--config", str(tmp_path), "--strict") == set()


@pytest.mark.slow
def test_weights_that_are_missing_or_too_much_are_told_once(tmp_path: Path, stand_ins: Path) -> None:
    tensors = {name.replace("layers.1.q_proj", "layers.9.q_proj"): array for name, array in of_gptq().items()}
    tensors["model.layers.0.self_attn.k_scale"] = np.ones((), np.float32)  # of its cache
    found = audited(saved(tmp_path / "src", tensors, MADE["gptq"][1], **CONFIG))
    assert found == {("missing", f"{Q_PROJ}.weight"), ("surplus", "model.layers.9.q_proj.weight")}
    tensors = of_deepseek()
    tensors[f"{EXPERT}.weight"], tensors[f"{EXPERT}.weight_scale_inv"] = in_blocks(np.ones((8, 8), np.float32))
    tensors[f"{EXPERT}.weight"][0] = 1
    assert audited(saved(tmp_path / "shape", tensors, FP8, **CONFIG)) == {("shape", f"{EXPERT}.weight")}


def test_a_map_gives_quantized_weights_the_names_of_the_model(tmp_path: Path, stand_ins: Path) -> None:
    tensors = {name.replace("model.layers", "decoder.blocks"): array for name, array in of_gptq().items()}
    folder = saved(tmp_path / "src", tensors, MADE["gptq"][1], **CONFIG)
    assert audited(folder, "--map", "decoder.blocks.{p*} <=> model.layers.{p*}", "--strict") == set()


def test_schemes_that_are_only_known_by_name_are_not_held_against_a_definition(tmp_path: Path, stand_ins: Path) -> None:
    tensors = {**weights(), f"{Q_PROJ}.weight": np.arange(64, dtype=np.int8).reshape(8, 8)}
    tensors[f"{Q_PROJ}.scale"] = np.ones(8, np.float32)
    folder = saved(tmp_path / "src", tensors, {"quant_method": "of_tomorrow"}, **CONFIG)
    assert audited(folder) == set()
    assert "since the model is quantized" in done("audit", folder, "--jobs", "1").err
    assert "quantized" in refused("audit", folder, "--config", folder, "--jobs", "1")


def value(array: Array, number: float) -> Array:
    """Return an array with another number at one place."""
    array = array.copy()
    array.reshape(-1)[-1] = number
    return array


def spoiled(name: str, number: float) -> Spoil:
    return at(name, lambda tensors: value(tensors[name], number))


SCALES, INDEX = f"{EXPERT}.weight_scale_inv", f"{Q_PROJ}.g_idx"
OF_GPTQ, OF_OSS = f"{Q_PROJ}.scales", f"{EXPERTS}.down_proj_scales"
SPOILED: dict[str, tuple[str, Spoil, set[tuple[str, str]]]] = {
    "NaN": ("deepseek", spoiled(SCALES, np.nan), {("nan", SCALES)}),
    "infinite": ("deepseek", spoiled(SCALES, np.inf), {("infinite", SCALES)}),
    "zero": ("deepseek", spoiled(SCALES, 0), {("scale", SCALES)}),
    "negative": ("deepseek", spoiled(SCALES, -1), {("scale", SCALES)}),
    "NaN in a group": ("gptq", spoiled(OF_GPTQ, np.nan), {("nan", OF_GPTQ)}),
    "a zero group": ("gptq", spoiled(OF_GPTQ, 0), {("scale", OF_GPTQ)}),
    "a negative group": ("gptq", spoiled(OF_GPTQ, -1), set()),  # as AutoRound has them
    "a group beyond": ("gptq", spoiled(INDEX, 2), {("scale", INDEX)}),
    "a group before": ("gptq", spoiled(INDEX, -1), {("scale", INDEX)}),
    "an exponent that is NaN": ("gpt-oss", spoiled(OF_OSS, 255), {("scale", OF_OSS)}),
    "an exponent of zero": ("gpt-oss", spoiled(OF_OSS, 0), set()),
    "NaN in a weight": ("deepseek", spoiled(f"{EXPERT}.weight", np.nan), {("nan", f"{EXPERT}.weight")}),
    "experts left zero": (
        "gpt-oss",
        at(f"{EXPERTS}.down_proj_blocks", lambda tensors: np.zeros_like(tensors[f"{EXPERTS}.down_proj_blocks"])),
        {("zero", f"{EXPERTS}.down_proj_blocks")},
    ),
    "experts that are copies": (
        "gpt-oss",
        at(f"{EXPERTS}.down_proj_blocks", lambda tensors: tensors["model.layers.0.mlp.experts.down_proj_blocks"]),
        {("copy", f"{EXPERTS}.down_proj_blocks")},
    ),
    "scales that are alike": (
        "deepseek",
        lambda tensors: {n: np.full_like(a, 0.25) if "scale" in n else a for n, a in tensors.items()},
        set(),
    ),
    "scales of other experts": (
        "deepseek",
        at(SCALES, lambda tensors: tensors["model.layers.0.experts.1.w1.weight_scale_inv"]),
        set(),
    ),
}


@pytest.mark.parametrize("name", few(4, SPOILED))
def test_values_that_no_scheme_has_are_found_out(name: str, tmp_path: Path) -> None:
    kind, spoil, expected = SPOILED[name]
    made, quantization = MADE[kind]
    assert audited(saved(tmp_path / "src", spoil(made()), quantization)) == expected


def test_scales_of_floats_of_eight_bits_may_become_zero(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).integers(1, 256, (8, 16), np.uint8)
    scales = np.full((8, 2), 2, E4M3)
    scales[3, 1] = 0
    settings = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "symmetric": True}}
    groups = {"config_groups": {"group_0": settings}, "format": "nvfp4-pack-quantized"}
    quantization = {"quant_method": "compressed-tensors", **groups}
    tensors = {"w.weight_packed": weight, "w.weight_scale": scales, "w.weight_global_scale": np.ones(1, np.float32)}
    assert audited(saved(tmp_path / "small", tensors, quantization), "--strict") == set()
    tensors["w.weight_scale"] = np.zeros_like(scales)
    assert audited(saved(tmp_path / "unwritten", tensors, quantization)) == {("scale", "w.weight_scale")}
    tensors["w.weight_scale"], tensors["w.weight_global_scale"] = scales, np.zeros(1, np.float32)
    assert audited(saved(tmp_path / "whole", tensors, quantization)) == {("scale", "w.weight_global_scale")}


def test_zero_points_and_indices_that_are_not_known_are_sound(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sample = packed(random, (16, 32), 4, 16, np.dtype(np.float32), zero=True, act_order=True)
    weights_of = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
    settings = {"targets": ["Linear"], "weights": {**weights_of, "actorder": "group"}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": settings}}
    tensors = {**sample.tensors, "w.weight_zero_point": np.zeros_like(sample.tensors["w.weight_zero_point"])}
    assert audited(saved(tmp_path / "zero", tensors, quantization), "--strict") == set()
    tensors["w.weight_g_idx"] = np.full(32, -1, np.int32)
    assert audited(saved(tmp_path / "unknown", tensors, quantization), "--strict") == set()
    tensors["w.weight_g_idx"] = np.full(32, 2, np.int32)
    assert audited(saved(tmp_path / "beyond", tensors, quantization)) == {("scale", "w.weight_g_idx")}
    words = awq(random, (16, 32), 16, np.dtype(np.float16)).tensors
    words["w.qzeros"] = np.zeros_like(words["w.qzeros"])
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    assert audited(saved(tmp_path / "awq", words, settings), "--strict") == set()


@pytest.mark.parametrize(
    ("lost", "said"),
    [("layers.1.experts.2.w1.weight_scale_inv", "has no scale"), ("layers.1.experts.2.w1.weight", "has no weight")],
)
def test_half_a_weight_is_an_incomplete_checkpoint(lost: str, said: str, tmp_path: Path) -> None:
    tensors = {name: array for name, array in of_deepseek().items() if not name.endswith(lost)}
    finished = run_here("audit", saved(tmp_path / "src", tensors, FP8), "--json", "--jobs", "1")
    (found,) = json.loads(finished.out)["findings"]
    assert finished.code == WRONG and found["kind"] == "structure"
    assert "incomplete checkpoint" in found["detail"] and said in found["detail"] and EXPERT in found["detail"]


def test_shapes_that_contradict_the_scheme_are_found_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "src", of_deepseek(), {**FP8, "weight_block_size": [2, 4]})
    finished = run_here("audit", folder, "--json", "--jobs", "1")
    (found,) = json.loads(finished.out)["findings"]
    assert finished.code == WRONG and found["kind"] == "structure" and "contradicts" in found["detail"]


@pytest.mark.slow
def test_another_checkpoint_may_be_quantized_in_another_way(tmp_path: Path, stand_ins: Path) -> None:
    plain, deepseek = save(tmp_path / "plain", weights()), saved(tmp_path / "deepseek", of_deepseek(), FP8)
    by_groups = saved(tmp_path / "gptq", of_gptq(), MADE["gptq"][1])
    for folder, like in ((deepseek, plain), (plain, deepseek), (by_groups, deepseek), (deepseek, deepseek)):
        assert audited(folder, "--like", str(like), "--strict") == set()
    tensors = {**of_deepseek(), f"{Q_PROJ}.input_scale": np.ones(1, np.float32)}
    more = saved(tmp_path / "more", tensors, FP8)
    assert audited(more, "--like", str(deepseek)) == {("surplus", f"{Q_PROJ}.input_scale")}
    assert audited(more, "--like", str(plain)) == set()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": FP8}))
    assert audited(deepseek, "--like", str(deepseek), "--config", str(tmp_path), "--strict") == set()
    lacking = saved(tmp_path / "lacking", without(EXPERT)(of_deepseek()), FP8)
    assert audited(lacking, "--like", str(plain)) == {("missing", f"{EXPERT}.weight")}
    oss, experts = of_gpt_oss(), {}
    for name, array in oss.items():
        if name.endswith("_blocks"):
            shape = array.shape[0], 32 * array.shape[2], array.shape[1]
            experts[name.removesuffix("_blocks")] = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    model = save(tmp_path / "model", {EMBEDDING: oss[EMBEDDING], **experts})
    assert audited(saved(tmp_path / "oss", oss, MXFP4), "--like", str(model), "--strict") == set()


@pytest.mark.slow
def test_norms_of_stored_elements_are_none_of_weights(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", weights())
    deepseek = saved(tmp_path / "deepseek", of_deepseek(), FP8)
    assert audited(deepseek, "--before", str(plain)) == set() == audited(plain, "--before", str(deepseek))
    tensors = of_deepseek()
    tensors[SCALES] = tensors[SCALES] * 4
    tensors[f"{Q_PROJ}.weight"] = (tensors[f"{Q_PROJ}.weight"].astype(np.float32) / 4).astype(E4M3)
    tensors[EMBEDDING] = tensors[EMBEDDING] + tensors[EMBEDDING] + tensors[EMBEDDING]
    changed = saved(tmp_path / "changed", tensors, FP8)
    assert audited(changed, "--before", str(deepseek)) == {("change", SCALES), ("change", EMBEDDING)}
    assert audited(changed, "--before", str(plain)) == {("change", EMBEDDING)}
    lacking = saved(tmp_path / "lacking", without(EXPERT)(of_deepseek()), FP8)
    assert f"{EXPERT}.weight'" in refused("audit", lacking, "--before", deepseek, "--jobs", "1")


def test_maps_that_stack_weights_keep_what_they_are(tmp_path: Path) -> None:
    stacked = {name: array for name, array in weights().items() if "q_proj" not in name}
    stacked["model.q_proj.weight"] = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32)
    like = str(save(tmp_path / "like", stacked))
    equation = "model.layers.{n}.q_proj.qweight [a b] <=> model.q_proj.qweight [n a b]"
    folder = saved(tmp_path / "src", of_gptq(columns=16), MADE["gptq"][1])
    assert audited(folder, "--map", equation, "--like", like, "--strict") == set()


@pytest.mark.parametrize("jobs", few(1, ["1", "2"]))
def test_ranks_that_hold_pieces_are_named(jobs: str, tmp_path: Path) -> None:
    tensors = of_deepseek()
    tensors[SCALES] = value(tensors[SCALES], 0)
    folder, spec = saved(tmp_path / "src", tensors, FP8), tmp_path / "spec.toml"
    rule = f"[[parameter]]\nmatch = '{EXPERT}.weight'\nsplit = {{ 1 = ['tp'] }}\n[[parameter]]\nmatch = '*'\n"
    spec.write_text(f"mesh = {{ tp = 2 }}\n{rule}")
    done("transform", folder, tmp_path / "cut", "--dst-strategy", spec, "--to", "safetensors", "--jobs", "1")
    finished = run_here("audit", tmp_path / "cut", "--src-strategy", spec, "--json", "--jobs", jobs)
    (found,) = json.loads(finished.out)["findings"]
    assert finished.code == WRONG and (found["kind"], found["tensor"]) == ("scale", SCALES)
    assert "1 of 4 scales is zero" in found["detail"]
