"""Maps, choices and stages take what is stored beside quantized weights with the weights, or are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from quantization.test_quantized_checkpoints import bytes_of, compressed, dequantized, spec, write, write_packed
from quantization.test_quantized_refusals import FP8
from support import safetensors_peer
from support.command_line import run_here
from support.examples import few, few_cases
from support.quantized import BFLOAT16, E4M3, Array, awq, fp8, gptq, packed

import reshard_mpi
from reshard_mpi.errors import MapError, ReshardError


def in_blocks(name: str, rows: int, columns: int) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a weight in blocks of 4 x 8, and the weight."""
    draw = np.random.default_rng(sum(name.encode()))
    sample = fp8(draw, (rows, columns), (4, 8), np.dtype(np.float32))
    tensors = {
        f"{name}.weight": sample.tensors["w.weight"],
        f"{name}.weight_scale_inv": sample.tensors["w.weight_scale"],
    }
    return tensors, sample.whole


def mapped(folder: Path, tensors: dict[str, Array], equation: str, **options: object) -> Path:
    source = write(folder / "source", tensors, FP8)
    reshard_mpi.transform(source, folder / "mapped", map=equation, to="safetensors", **options)
    return folder / "mapped"


def test_a_scale_is_renamed_with_its_weight(tmp_path: Path) -> None:
    tensors, whole = in_blocks("model.q_proj", 6, 12)
    made = mapped(tmp_path, tensors, "model.{p*}_proj.weight <=> {p*}.kernel.weight")
    assert bytes_of(made) == {
        "q.kernel.weight": tensors["model.q_proj.weight"].tobytes(),
        "q.kernel.weight_scale_inv": tensors["model.q_proj.weight_scale_inv"].tobytes(),
    }
    np.testing.assert_array_equal(dequantized(made), whole)
    reshard_mpi.transform(
        made, tmp_path / "back", to="safetensors", map="model.{p*}_proj.weight <=> {p*}.kernel.weight", reverse=True
    )
    assert bytes_of(tmp_path / "back") == {name: array.tobytes() for name, array in tensors.items()}


def test_weights_are_joined_by_rows_on_the_grain(tmp_path: Path) -> None:
    q, whole_q = in_blocks("q", 8, 16)
    k, whole_k = in_blocks("k", 6, 16)
    made = mapped(tmp_path, q | k, "q.weight [a h], k.weight [b h] <=> qk.weight [(a + b) h]")
    np.testing.assert_array_equal(dequantized(made), np.concatenate([whole_q, whole_k]))


def test_weights_are_not_joined_within_a_block(tmp_path: Path) -> None:
    q, _ = in_blocks("q", 6, 16)
    k, _ = in_blocks("k", 8, 16)
    with pytest.raises(MapError, match="within a block"):
        mapped(tmp_path, q | k, "q.weight [a h], k.weight [b h] <=> qk.weight [(a + b) h]")
    reshard_mpi.transform(  # but once they are dequantized
        tmp_path / "source",
        tmp_path / "plain",
        map="q.weight [a h], k.weight [b h] <=> qk.weight [(a + b) h]",
        dtype="fp32",
        to="safetensors",
    )
    with reshard_mpi.open(tmp_path / "plain") as opened:
        assert list(opened) == ["qk.weight"] and opened["qk.weight"].shape == (14, 16)


@pytest.mark.parametrize("axes", ["[k (h d)] <=> w.qweight [k (d h)]", "[k (h t d)] <=> w.qweight [k (h d t)]"])
def test_heads_are_not_woven_word_by_word(tmp_path: Path, axes: str) -> None:
    """Words of eight elements would stay together, and the equation means elements."""
    sample = awq(np.random.default_rng(0), (128, 32), 16, np.dtype(np.float16))
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    source = write(tmp_path / "source", sample.tensors, config)
    lengths = ["h=4", "t=2"] if " t " in axes else ["h=4"]
    with pytest.raises(MapError, match="8 elements lie in one along dimension 1, and they are woven one by one"):
        reshard_mpi.transform(source, tmp_path / "out", map=f"w.qweight {axes}", axis=lengths, to="safetensors")
    swapped = "w.qweight [k (a h d)] <=> w.qweight [k (h a d)]"
    reshard_mpi.transform(source, tmp_path / "out", map=swapped, axis=["a=2", "h=4"], to="safetensors")
    expected = sample.whole.reshape(2, 4, 16, 32).swapaxes(0, 1).reshape(128, 32)
    np.testing.assert_array_equal(dequantized(tmp_path / "out"), expected)


def test_experts_are_stacked_and_taken_apart(tmp_path: Path) -> None:
    parts = [in_blocks(f"experts.{number}", 6, 12) for number in range(3)]
    tensors = {name: array for each, _ in parts for name, array in each.items()}
    equation = "experts.{e}.weight [f h] <=> all.weight [e f h]"
    made = mapped(tmp_path, tensors, equation)
    with reshard_mpi.open(made) as opened:
        assert {name: tensor.shape for name, tensor in opened.items()} == {
            "all.weight": (3, 6, 12),
            "all.weight_scale_inv": (3, 2, 2),
        }
    np.testing.assert_array_equal(dequantized(made), np.stack([whole for _, whole in parts]))
    reshard_mpi.transform(made, tmp_path / "back", map=equation, reverse=True, to="safetensors")
    assert bytes_of(tmp_path / "back") == {name: array.tobytes() for name, array in tensors.items()}


RENAMED = "l.{i}.weight <=> m.{i}.weight"


@pytest.mark.parametrize(
    ("equation", "dtype"),
    [
        (RENAMED, "m.0.weight=bf16"),
        (RENAMED, "*.weight=fp8_e5m2"),
        ("l.{i}.weight [a b] <=> m.{i}.weight [a b] : bf16", ()),
        ("l.0.weight [a h], l.1.weight [a h] <=> both.weight [(a + a) h]", "both.*=fp32"),
        ("l.{i}.weight [a b] <=> m.weight [i a b]", "m.weight=bf16"),
    ],
)
def test_stored_elements_are_not_converted_without_their_scales(tmp_path: Path, equation: str, dtype: object) -> None:
    """By the name that a map gives a weight, a type for some cannot dequantize it: that is done before the map."""
    parts = [in_blocks(f"l.{number}", 8, 16) for number in range(2)]
    source = write(tmp_path / "source", {name: own for tensors, _ in parts for name, own in tensors.items()}, FP8)
    for command in (partial(reshard_mpi.transform, source, tmp_path / "out"), partial(reshard_mpi.open, source)):
        with pytest.raises(MapError, match=r"without their scales|before a map"):
            command(map=equation, dtype=dtype, forward=True)
    reshard_mpi.transform(source, tmp_path / "plain", map=equation, dtype="fp32", forward=True, to="safetensors")
    if equation == RENAMED:
        for number, (_, whole) in enumerate(parts):
            np.testing.assert_array_equal(reshard_mpi.load_rank(0, tmp_path / "plain")[f"m.{number}.weight"], whole)


@pytest.mark.parametrize("form", ["gptq", "pack-quantized"])
@pytest.mark.parametrize("layers", [2, 5])
def test_layers_whose_columns_are_in_any_order_are_stacked(tmp_path: Path, form: str, layers: int) -> None:
    """Each layer has an order of its own; there are fewer layers than groups, or more."""
    shape, half = (32, 64), np.dtype(np.float16)
    if form == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}
        samples = [gptq(np.random.default_rng(n), shape, 4, 16, half, False, True) for n in range(layers)]
    else:
        settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "actorder": "group"}
        config = compressed("pack-quantized", symmetric=False, **settings)
        samples = [packed(np.random.default_rng(n), shape, 4, 16, half, True, True) for n in range(layers)]
    named = (
        (name.replace("w.", f"l.{number}."), array)
        for number, sample in enumerate(samples)
        for name, array in sample.tensors.items()
    )
    source = write(tmp_path / "source", dict(named), config)
    stored = samples[0].weight.stored.removeprefix("w.")
    equation = f"l.{{n}}.{stored} [a b] <=> m.{stored} [n a b]"
    reshard_mpi.transform(source, tmp_path / "out", map=equation, to="safetensors")
    with reshard_mpi.open(tmp_path / "out", config=source / "config.json", dtype="fp32") as opened:
        for number, sample in enumerate(samples):
            np.testing.assert_array_equal(opened["m.weight"][number], sample.whole)
            np.testing.assert_array_equal(opened["m.weight"][number, 3:9, 17:50], sample.whole[3:9, 17:50])
        np.testing.assert_array_equal(opened["m.weight"][:], np.stack([sample.whole for sample in samples]))


def test_a_transposed_weight_has_a_transposed_grid(tmp_path: Path) -> None:
    tensors, _ = in_blocks("q", 8, 16)
    equation = "q.weight [a h] <=> v.weight [h a]"
    with pytest.raises(MapError, match="blocks of 4 x 8 are none"):
        mapped(tmp_path, tensors, equation)
    square = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    sample = fp8(np.random.default_rng(3), (8, 12), (4, 4), np.dtype(np.float32))
    stored = {"q.weight": sample.tensors["w.weight"], "q.weight_scale_inv": sample.tensors["w.weight_scale"]}
    source = write(tmp_path / "square", stored, square)
    reshard_mpi.transform(source, tmp_path / "turned", map=equation, to="safetensors")
    np.testing.assert_array_equal(dequantized(tmp_path / "turned"), sample.whole.T)


@pytest.mark.parametrize(
    ("equation", "problem"),
    [
        ("q.weight [a h], k.weight [a h] <=> qk.weight [(a + a) h]", "would have to be one"),
        ("q.weight [a h] <=> v.weight [(a | m) h]", "zeros"),
    ],
)
def test_one_scale_is_not_joined_nor_padding_added(tmp_path: Path, equation: str, problem: str) -> None:
    tensors = {}
    for name in "qk":
        tensors[f"{name}.weight"] = np.zeros((6, 8), E4M3)
        tensors[f"{name}.weight_scale"] = np.full(1, ord(name), "f4")
    source = write(
        tmp_path / "source", tensors, compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    )
    options = {"axis": ("m=4",)} if "m)" in equation else {}
    with pytest.raises(MapError, match=problem):
        reshard_mpi.transform(source, tmp_path / "out", map=equation, **options)


def test_packed_weights_are_not_transposed_and_stack_with_their_shapes(tmp_path: Path) -> None:
    configuration = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
    tensors = {}
    for number in range(2):
        sample = packed(np.random.default_rng(number), (4, 32), 4, 16, BFLOAT16)
        tensors |= {name.replace("w.", f"w.{number}."): array for name, array in sample.tensors.items()}
    source = write(tmp_path / "source", tensors, configuration)
    with pytest.raises(MapError, match="packed along an axis"):
        reshard_mpi.transform(source, tmp_path / "out", map="w.{n}.weight_packed [a b] <=> v.{n}.weight_packed [b a]")
    equation = "w.{n}.weight_packed [a b] <=> v.weight_packed [n a b]"
    reshard_mpi.transform(source, tmp_path / "out", map=equation, to="safetensors")
    reshard_mpi.transform(
        tmp_path / "out", tmp_path / "back", map=equation, reverse=True, to="safetensors", config=source / "config.json"
    )
    assert bytes_of(tmp_path / "back") == {name: array.tobytes() for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"include": ["q.*"]}, {"q.weight", "q.weight_scale_inv"}),
        ({"exclude": ["q.weight"]}, {"k.weight", "k.weight_scale_inv"}),
        ({"map": "q.weight <=> v.weight", "include": ["v.weight"]}, {"v.weight", "v.weight_scale_inv"}),
    ],
)
def test_what_is_chosen_goes_with_its_scale(tmp_path: Path, options: dict[str, object], left: set[str]) -> None:
    tensors = in_blocks("q", 8, 16)[0] | in_blocks("k", 8, 16)[0]
    reshard_mpi.transform(write(tmp_path / "source", tensors, FP8), tmp_path / "out", **options)
    assert set(bytes_of(tmp_path / "out")) == left


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_scale_is_not_chosen_by_itself(tmp_path: Path, option: str) -> None:
    source = write(tmp_path / "source", in_blocks("q", 8, 16)[0], FP8)
    with pytest.raises(MapError, match="matches no tensor"):
        reshard_mpi.transform(source, tmp_path / "out", **{option: ["*_scale_inv"]})


def test_a_map_and_a_strategy_cut_the_result_on_its_grain(tmp_path: Path) -> None:
    q, whole_q = in_blocks("q", 8, 16)
    k, whole_k = in_blocks("k", 8, 16)
    source = write(tmp_path / "source", q | k, FP8)
    strategy = spec(tmp_path / "spec.toml", "qk.weight", 0, [4, 12])
    equation = "q.weight [a h], k.weight [a h] <=> qk.weight [(a + a) h]"
    reshard_mpi.transform(source, tmp_path / "cut", map=equation, dst_strategy=strategy, to="safetensors")
    reshard_mpi.transform(tmp_path / "cut", tmp_path / "whole", src_strategy=strategy, to="safetensors")
    np.testing.assert_array_equal(dequantized(tmp_path / "whole"), np.concatenate([whole_q, whole_k]))
    with pytest.raises(ReshardError, match=r"'qk\.weight' is quantized in blocks"):
        other = spec(tmp_path / "other.toml", "qk.weight", 0, [6, 10])
        reshard_mpi.transform(source, tmp_path / "no", map=equation, dst_strategy=other, to="safetensors")


def test_what_is_dropped_goes_with_its_scale(tmp_path: Path) -> None:
    tensors = in_blocks("q", 8, 16)[0] | in_blocks("k", 8, 16)[0]
    (tmp_path / "map.toml").write_text('[[map]]\neq = "k.weight <=> key.weight"\n[[map]]\ndrop = "q.*"\n')
    source = write(tmp_path / "source", tensors, FP8)
    finished = run_here("transform", source, tmp_path / "out", "--map", tmp_path / "map.toml", "--to", "safetensors")
    assert finished.code == 0 and "left out: q.weight, q.weight_scale_inv" in finished.err, finished.err
    assert set(bytes_of(tmp_path / "out")) == {"key.weight", "key.weight_scale_inv"}


def test_some_weights_are_dequantized_and_others_stay(tmp_path: Path) -> None:
    q, whole_q = in_blocks("q", 8, 16)
    k, _ = in_blocks("k", 8, 16)
    source = write(tmp_path / "source", q | k, FP8)
    reshard_mpi.transform(source, tmp_path / "out", dtype=["q.*=fp32"], to="safetensors")
    with reshard_mpi.open(tmp_path / "out") as opened:
        assert set(opened) == {"q.weight", "k.weight", "k.weight_scale_inv"}
        np.testing.assert_array_equal(np.asarray(opened["q.weight"]), whole_q)
    written = bytes_of(tmp_path / "out")
    assert {name: written[name] for name in k} == {name: array.tobytes() for name, array in k.items()}
    with pytest.raises(MapError, match="a type for all"):
        reshard_mpi.transform(source, tmp_path / "no", dtype=["q.*=fp32"], map="q.weight <=> v.weight")


PACKED = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)


def packed_weights(**shapes: tuple[int, int]) -> dict[str, Array]:
    """Return packed weights by their names."""
    samples = {name: packed(np.random.default_rng(len(name)), shape, 4, 16, BFLOAT16) for name, shape in shapes.items()}
    return {
        own.replace("w.", f"{name}."): array for name, each in samples.items() for own, array in each.tensors.items()
    }


@few_cases(
    1,
    ("equation", "shapes", "stated"),
    [
        (
            "p.weight_packed [(a + 3) b] <=> u.weight_packed [a b], v.weight_packed [3 b]",
            {"p": (8, 32)},
            "u 5 32 v 3 32",
        ),
        (
            "p.weight_packed [a b], q.weight_packed [c b] <=> u.weight_packed [(a + c) b]",
            {"p": (8, 27), "q": (4, 27)},
            "u 12 27",
        ),
        (
            "p.weight_packed [a b], q.weight_packed [a c] <=> u.weight_packed [a (b + c)]",
            {"p": (8, 32), "q": (8, 19)},
            "u 8 51",
        ),
    ],
)
def test_packed_weights_state_the_shapes_that_they_get(
    tmp_path: Path, equation: str, shapes: dict[str, tuple[int, int]], stated: str
) -> None:
    source = write(tmp_path / "source", packed_weights(**shapes), PACKED)
    reshard_mpi.transform(source, tmp_path / "out", map=equation, to="safetensors")
    with reshard_mpi.open(tmp_path / "out") as opened:
        found = [f"{name[0]} {tensor[0]} {tensor[1]}" for name, tensor in opened.items() if name.endswith("_shape")]
    assert " ".join(found) == stated
    with reshard_mpi.open(tmp_path / "out", dtype="fp32") as opened:
        reshard_mpi.transform(source, tmp_path / "plain", map=equation.replace("_packed", ""), dtype="fp32")
        with reshard_mpi.open(tmp_path / "plain") as plain:
            for name, tensor in opened.items():
                np.testing.assert_array_equal(np.asarray(tensor), np.asarray(plain[name]))


def test_an_axis_of_one_element_is_turned_and_joined_like_others(tmp_path: Path) -> None:
    rows = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    tensors = {"w.weight": np.zeros((2, 1), E4M3), "w.weight_scale": np.ones((2, 1), "f4")}
    source = write(tmp_path / "source", tensors, rows)
    with pytest.raises(MapError, match="its axes change places"):
        reshard_mpi.transform(source, tmp_path / "out", map="w.weight [a b] <=> v.weight [b a]")
    one = {name: np.ascontiguousarray(array[:1]) for name, array in tensors.items()} | {
        "w.input_scale": np.ones((), "f4")
    }
    equation = "w.weight [a b] <=> v.weight [1 a b]"
    reshard_mpi.transform(write(tmp_path / "one", one, rows), tmp_path / "in", map=equation, to="safetensors")
    reshard_mpi.transform(tmp_path / "in", tmp_path / "back", map=equation, reverse=True, to="safetensors")
    with reshard_mpi.open(tmp_path / "back") as opened:
        assert {name: tensor.shape for name, tensor in opened.items()} == {n: array.shape for n, array in one.items()}


def test_a_configuration_that_names_modules_does_not_outlive_their_names(tmp_path: Path) -> None:
    tensors = {
        "q.weight": np.zeros((6, 8), E4M3),
        "q.weight_scale": np.ones(1, "f4"),
        "k.weight": np.ones((4, 4), "f4"),
    }
    configuration = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    configuration["config_groups"]["group_0"]["targets"] = ["q"]
    source = write(tmp_path / "source", tensors, configuration)
    equation = "{p*}.weight <=> {p*}_proj.weight"
    for name, map_options in (("kept", []), ("renamed", ["--map", equation])):
        finished = run_here("transform", source, tmp_path / name, "--to", "safetensors", *map_options)
        assert finished.code == 0 and ("as they were before the map" in finished.err) == bool(map_options), finished.err
        (path,) = (tmp_path / name).rglob("*.safetensors")
        assert ("quantization_config" in safetensors_peer.read(path).strings) != bool(map_options)
    assert set(bytes_of(tmp_path / "renamed")) == {"q_proj.weight", "q_proj.weight_scale", "k_proj.weight"}


def test_a_configuration_for_axes_alone_leaves_it_to_the_files(tmp_path: Path) -> None:
    tensors, whole = in_blocks("q", 8, 16)
    source = write(tmp_path / "source", tensors, FP8)
    (tmp_path / "axes.json").write_text('{"hidden_size": 16}')
    reshard_mpi.transform(
        source, tmp_path / "out", map="q.weight [a h] <=> v.weight [a h]", config=tmp_path / "axes.json", dtype="fp32"
    )
    with reshard_mpi.open(tmp_path / "out") as opened:
        np.testing.assert_array_equal(np.asarray(opened["v.weight"]), whole)


@pytest.mark.parametrize("columns", few(1, [48, 43]))
def test_a_choice_without_a_map_leaves_what_files_say(tmp_path: Path, columns: int) -> None:
    """Columns may fill no whole word: then the shape that is stated tells how many there are."""
    source, tensors = write_packed(tmp_path, 3, columns, 8)
    finished = run_here("transform", source, tmp_path / "out", "--include", "w.*", "--to", "safetensors")
    assert finished.code == 0 and "before the map" not in finished.err, finished.err
    (path,) = (tmp_path / "out").rglob("*.safetensors")
    assert "quantization_config" in safetensors_peer.read(path).strings
    assert bytes_of(tmp_path / "out") == {name: array.tobytes() for name, array in tensors.items()}
