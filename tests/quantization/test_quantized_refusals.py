"""What is wrong with a quantized checkpoint, its configuration or its strategy is refused by the weight's name."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantization.test_quantized_checkpoints import bytes_of, compressed, write
from support import safetensors_peer
from support.command_line import refused, run_here
from support.examples import few_cases
from support.quantized import BFLOAT16, E4M3, Array, fp8, gptq, packed

import reshard_mpi
from reshard_mpi.errors import DisagreementError, LayoutError, MapError, SourceError, StrategyError, UsageError

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
SCALE = "w.weight_scale_inv"


def blocks(rows: int = 16, columns: int = 32) -> dict[str, Array]:
    """Return a weight in blocks of 4 x 8, as DeepSeek stores it, and a tensor beside it."""
    sample = fp8(np.random.default_rng(rows + columns), (rows, columns), (4, 8), np.dtype(np.float32))
    return {"w.weight": sample.tensors["w.weight"], SCALE: sample.tensors["w.weight_scale"], "bias": np.ones(4, "f4")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", blocks(), FP8)


def strategy(folder: Path, rules: str, ranks: int = 2) -> Path:
    path = folder / "strategy.toml"
    path.write_text(f'mesh = {{ tp = {ranks} }}\n{rules}\n[[parameter]]\nmatch = "*"\n')
    return path


def cut(name: str, dim: int = 0, more: str = "") -> str:
    return f'[[parameter]]\nmatch = "{name}"\nsplit = {{ {dim} = ["tp"] }}\n{more}\n'


def test_the_numbers_of_ranks_that_would_do_are_said(source: Path, tmp_path: Path) -> None:
    told = refused("transform", source, tmp_path / "out", "--dst-strategy", strategy(tmp_path, cut("w.weight"), 8))
    assert "'w.weight' is quantized in blocks" in told and "multiples of 4: evenly over 1-2,4 ranks" in told
    assert "--dtype bf16" in told and not (tmp_path / "out").exists()


def test_patterns_are_not_asked_for_companions(source: Path, tmp_path: Path) -> None:
    spec = strategy(tmp_path, cut("*_scale_inv", 1) + cut("w.*"))
    reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec, to="safetensors")
    scales = bytes_of(next((tmp_path / "out" / "rank_1").glob("*.safetensors")).parent.parent)
    assert scales  # the ranks are read back without a strategy, as their record says how they are cut
    reshard_mpi.transform(tmp_path / "out", tmp_path / "back", src_strategy=spec, to="safetensors")
    assert bytes_of(tmp_path / "back") == {name: array.tobytes() for name, array in blocks().items()}


@pytest.mark.parametrize(("rule", "is_refused"), [(cut(SCALE, 1), True), (cut(SCALE, 0), False)])
def test_an_entry_under_its_full_name_must_say_the_same(
    source: Path, tmp_path: Path, rule: str, is_refused: bool
) -> None:
    spec = strategy(tmp_path, rule + cut("w.weight"))
    if is_refused:
        with pytest.raises(StrategyError, match="otherwise than the weight"):
            reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec, to="safetensors")
    else:
        reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec, to="safetensors")
        assert bytes_of(tmp_path / "out") == {name: array.tobytes() for name, array in blocks().items()}


def ranks_of(folder: Path, parts: list[dict[str, Array]], configuration: Any = FP8) -> Path:
    """Write a checkpoint of several ranks, with the configuration beside the folders."""
    for rank, part in enumerate(parts):
        write(folder / f"rank_{rank}", part, None)
    (folder / "config.json").write_text(json.dumps({"quantization_config": configuration}))
    return folder


def test_parts_that_were_quantized_one_by_one_are_refused(tmp_path: Path) -> None:
    parts = [{"w.weight": np.zeros((6, 8), E4M3), SCALE: np.ones((2, 1), "f4")} for _ in range(2)]
    source = ranks_of(tmp_path / "source", parts)
    with pytest.raises(LayoutError, match=r"'w\.weight' is quantized in blocks") as error:
        reshard_mpi.transform(source, tmp_path / "out", src_strategy=strategy(tmp_path, cut("w.weight")))
    assert "made from other slices" in error.value.remedy


def test_a_scale_of_the_whole_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    configuration = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    parts = [{"w.weight": np.zeros((4, 8), E4M3), "w.weight_scale": np.full(1, 1 + rank, "f4")} for rank in range(2)]
    source, spec = ranks_of(tmp_path / "source", parts, configuration), strategy(tmp_path, cut("w.weight"))
    with pytest.raises((DisagreementError, StrategyError), match=r"w\.weight_scale|differ"):
        reshard_mpi.transform(source, tmp_path / "out", src_strategy=spec)
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_what_looks_quantized_is_not_cut_without_a_configuration(tmp_path: Path) -> None:
    source, spec = write(tmp_path / "source", blocks(), None), strategy(tmp_path, cut("w.weight"))
    with pytest.raises(StrategyError, match="nothing says how"):
        reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec)
    reshard_mpi.transform(source, tmp_path / "whole", to="safetensors")  # nothing is cut
    config = tmp_path / "model.json"
    config.write_text(json.dumps({"quantization_config": FP8}))
    reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec, config=config)
    again = strategy(tmp_path, cut("w.weight"))
    reshard_mpi.transform(tmp_path / "out", tmp_path / "back", src_strategy=again, to="safetensors")
    assert bytes_of(tmp_path / "back") == {name: array.tobytes() for name, array in blocks().items()}


def test_a_configuration_belongs_to_a_map_or_a_quantized_checkpoint(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"w": np.ones((2, 2), "f4")}, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="--config belongs to a map"):
        reshard_mpi.transform(source, tmp_path / "out", config=tmp_path / "config.json")


@pytest.mark.parametrize("lost", ["w.weight", SCALE])
def test_a_weight_without_its_scale_is_incomplete(tmp_path: Path, lost: str) -> None:
    tensors = {name: array for name, array in blocks().items() if name != lost}
    told = refused("transform", write(tmp_path / "source", tensors, FP8), tmp_path / "out")
    assert lost.rpartition(".")[0] in told and not (tmp_path / "out").exists()


def test_a_configuration_that_contradicts_shapes_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", blocks(), {**FP8, "weight_block_size": [4, 4]})
    with pytest.raises(SourceError, match=r"contradicts the quantized weight w\.weight"):
        reshard_mpi.transform(source, tmp_path / "out")


def test_an_unknown_scheme_is_moved_whole_and_never_cut(tmp_path: Path) -> None:
    tensors = {"w.weight": np.zeros((4, 4), np.int8), "w.scale": np.ones(4, "f4")}
    source = write(tmp_path / "source", tensors, {"quant_method": "of_tomorrow"})
    with pytest.raises(LayoutError, match="of_tomorrow"):
        reshard_mpi.transform(source, tmp_path / "out", dst_strategy=strategy(tmp_path, cut("w.weight")))
    reshard_mpi.transform(source, tmp_path / "out", dst_strategy=strategy(tmp_path, ""), to="safetensors")
    with pytest.raises(MapError, match="dequantize"):
        reshard_mpi.transform(source, tmp_path / "other", dtype="bf16")


def test_types_of_eight_bits_are_none_for_quantized_weights(source: Path, tmp_path: Path) -> None:
    with pytest.raises(MapError, match=r"w\.weight is quantized by fp8"):
        reshard_mpi.transform(source, tmp_path / "out", dtype="fp8_e5m2")


@pytest.mark.slow
def test_dequantizing_says_what_becomes_of_the_configuration(source: Path, tmp_path: Path) -> None:
    finished = run_here("transform", source, tmp_path / "out", "--to", "hf", "--dtype", "bf16")
    assert finished.code == 0 and "take quantization_config out of" in finished.err
    assert not (tmp_path / "out" / "config.json").exists()
    with reshard_mpi.open(tmp_path / "out") as opened:
        assert set(opened) == {"w.weight", "bias"} and opened["w.weight"].dtype.name == "bfloat16"


def test_a_configuration_that_was_changed_since_is_no_damage(source: Path, tmp_path: Path) -> None:
    reshard_mpi.transform(source, tmp_path / "out", to="hf", dtype="bf16")
    configuration = json.loads((source / "config.json").read_text())
    configuration["quantization_config"]["weight_block_size"] = [5, 8]  # as many blocks
    (source / "config.json").write_text(json.dumps(configuration))
    with pytest.raises(UsageError, match="said otherwise how weights are quantized"):
        reshard_mpi.verify(source, tmp_path / "out")


@pytest.mark.parametrize(
    "tensors",
    [
        blocks(),
        {"w.weight": np.ones((16, 8), np.int8), "w.SCB": np.ones(16, "f4")},
        {"w.weight_packed": np.ones((8, 8), np.int32), "w.weight_scale": np.ones((8, 1), "f4")},
    ],
)
def test_every_shard_is_asked_whether_it_is_quantized(tmp_path: Path, tensors: dict[str, Array]) -> None:
    for rank, part in enumerate(({"embedding.weight": np.ones((4, 4), "f4")}, tensors)):
        write(tmp_path / "source" / f"rank_{rank}", part, None)
    stages = tmp_path / "stages.toml"
    rules = '[[parameter]]\nmatch = "embedding.*"\nstage = 0\n[[parameter]]\nmatch = "*"\nstage = 1\n'
    stages.write_text(f"mesh = {{ tp = 1 }}\nstages = 2\n{rules}")
    spec = strategy(tmp_path, cut(next(iter(tensors))))
    with pytest.raises(StrategyError, match="is quantized, and nothing says how"):
        reshard_mpi.transform(tmp_path / "source", tmp_path / "out", src_strategy=stages, dst_strategy=spec)


def test_types_are_not_changed_of_what_looks_quantized(tmp_path: Path) -> None:
    source = write(tmp_path / "source", blocks(), None)
    for function in (
        reshard_mpi.open,
        lambda path, **options: reshard_mpi.transform(path, tmp_path / "out", **options),
    ):
        with pytest.raises(StrategyError, match="nothing says how"):
            function(source, dtype="bf16")


def test_what_says_no_method_is_moved_whole(tmp_path: Path) -> None:
    """MLX writes no more than this, and stores what GPTQ does not."""
    tensors = {
        "w.weight": np.ones((16, 8), np.uint32),
        "w.scales": np.ones((16, 1), "f2"),
        "norm.weight": np.ones(4, "f4"),
    }
    source = write(tmp_path / "source", tensors, {"group_size": 64, "bits": 4})
    reshard_mpi.transform(source, tmp_path / "out", to="safetensors")
    assert bytes_of(tmp_path / "out") == {name: array.tobytes() for name, array in tensors.items()}
    with pytest.raises(LayoutError, match="moved whole"):
        reshard_mpi.transform(source, tmp_path / "cut", dst_strategy=strategy(tmp_path, cut("w.weight")))


def test_ranks_that_say_how_they_are_cut_need_no_entry_for_scales(source: Path, tmp_path: Path) -> None:
    reshard_mpi.transform(source, tmp_path / "out", dst_strategy=strategy(tmp_path, cut("w.weight")), to="hdf5")
    named = tmp_path / "named.toml"
    named.write_text(f'mesh = {{ tp = 2 }}\n{cut("w.weight")}[[parameter]]\nmatch = "bias"\n')
    finished = run_here(
        "transform", tmp_path / "out", tmp_path / "hf", "--src-strategy", named, "--to", "hf", "--strict"
    )
    assert finished.code == 0 and "keep the model's config.json beside them" in finished.err, finished
    assert bytes_of(tmp_path / "hf") == {name: array.tobytes() for name, array in blocks().items()}


def test_a_companion_is_not_placed_without_its_weight(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "scales.toml"
    path.write_text(f'mesh = {{ tp = 2 }}\n{cut("*_scale_inv")}[[parameter]]\nmatch = "bias"\n')
    with pytest.raises(StrategyError, match="not the weight that it belongs to"):
        reshard_mpi.transform(source, tmp_path / "out", dst_strategy=path)


def test_a_configuration_of_quantized_weights_may_be_given_for_plain_ones(tmp_path: Path) -> None:
    """As where they have been dequantized: it is looked into, and says nothing of weights of 16 or 32 bits."""
    tensors = {"w.weight": np.ones((4, 8), "f4")}
    source = write(tmp_path / "source", tensors, None)
    (tmp_path / "model.json").write_text(json.dumps({"quantization_config": FP8}))
    reshard_mpi.transform(source, tmp_path / "out", config=tmp_path / "model.json", to="safetensors")
    assert bytes_of(tmp_path / "out") == {"w.weight": tensors["w.weight"].tobytes()}


def test_a_configuration_takes_no_more_memory_than_it_is_long(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"w": np.ones((2, 2), "f4")}, None)
    (source / "config.json").write_text('{"model_type": "toy"}')
    reshard_mpi.plan(source)  # what is imported stays
    tracemalloc.start()
    try:
        reshard_mpi.plan(source)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_settings_in_a_file_are_texts(tmp_path: Path) -> None:
    sample = gptq(np.random.default_rng(0), (8, 32), 4, 16, np.dtype("f2"))
    source = write(tmp_path / "source", sample.tensors, None)
    settings = {"quant_method": "gptq", "bits": "4", "group_size": "16"}
    (tmp_path / "said").mkdir()
    contents = safetensors_peer.read(source / "model.safetensors")
    safetensors_peer.write(tmp_path / "said" / "model.safetensors", dataclasses.replace(contents, strings=settings))
    with reshard_mpi.open(tmp_path / "said", dtype="fp32") as opened:
        np.testing.assert_array_equal(np.asarray(opened["w.weight"]), sample.whole)


@few_cases(
    1,
    "text",
    [
        '{"quantization_config": "yes"}',
        '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}',
        '{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}',
        '{"quantization_config": null}',
        "[]",
        "no JSON",
    ],
)
def test_plain_checkpoints_are_moved_whatever_lies_beside_them(tmp_path: Path, text: str) -> None:
    tensors = {"block.layer_scales": np.ones(4, "f4"), "ls.scales": np.ones(4, "f4"), "w.weight": np.ones((8, 4), "f4")}
    source = write(tmp_path / "source", tensors, None)
    (source / "config.json").write_text(text)
    spec = strategy(tmp_path, cut("w.weight"))
    reshard_mpi.transform(source, tmp_path / "out", dst_strategy=spec, to="safetensors")
    reshard_mpi.transform(tmp_path / "out", tmp_path / "back", src_strategy=spec, to="safetensors", dtype="fp64")
    assert set(bytes_of(tmp_path / "back")) == set(tensors)


def test_a_configuration_that_is_a_folder_or_a_loop_says_nothing(tmp_path: Path) -> None:
    for name in ("folder", "loop"):
        source = write(tmp_path / name, {"w.weight": np.ones((8, 4), "f4")}, None)
        if name == "folder":
            (source / "config.json").mkdir()
        else:
            (source / "config.json").symlink_to("config.json")
        reshard_mpi.transform(source / "model.safetensors", tmp_path / f"{name}_out", to="safetensors")
        assert set(bytes_of(tmp_path / f"{name}_out")) == {"w.weight"}


def test_columns_in_order_that_may_be_in_any_are_not_cut(tmp_path: Path) -> None:
    """compressed-tensors has groups of -1 then; a rank would have the scales of all, and begin with the first."""
    tensors = packed(np.random.default_rng(1), (8, 64), 4, 16, BFLOAT16, act_order=True).tensors
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "actorder": "group"}
    configuration = compressed("pack-quantized", **settings)
    reshard_mpi.transform(
        write(tmp_path / "any", tensors, configuration),
        tmp_path / "cut",
        dst_strategy=strategy(tmp_path, cut("w.weight_packed", 1)),
    )
    tensors["w.weight_g_idx"][:] = -1
    source = write(tmp_path / "in_order", tensors, configuration)
    with pytest.raises(LayoutError, match="moved whole"):
        reshard_mpi.transform(source, tmp_path / "no", dst_strategy=strategy(tmp_path, cut("w.weight_packed", 1)))
    reshard_mpi.transform(source, tmp_path / "moved", to="safetensors")
    assert bytes_of(tmp_path / "moved") == {name: array.tobytes() for name, array in tensors.items()}
    with pytest.raises(MapError, match="dequantize"):
        reshard_mpi.open(source, dtype="bf16")
