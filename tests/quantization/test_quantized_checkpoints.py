"""Quantized weights keep their scales: each rank's file stands alone, and all of them are the whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import safetensors_peer
from support.examples import few, few_cases, many
from support.quantized import (
    BFLOAT16,
    E4M3,
    SCALE_TYPES,
    Array,
    Sample,
    awq,
    fp8,
    gpt_oss,
    gptq,
    int8,
    mxfp4,
    nvfp4,
    packed,
)

import reshard_mpi
from reshard_mpi.errors import LayoutError, MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

Configuration = dict[str, Any]


class Case(NamedTuple):
    """A quantized weight, what its configuration says, and where it may be cut.

    axes: for each dimension of the stored tensor that may be cut, the dimension of the logical weight, and how many
    elements of the stored tensor a cut must be a multiple of.
    """

    sample: Sample
    configuration: Configuration
    axes: Mapping[int, tuple[int, int]]

    @property
    def stored(self) -> str:
        return next(iter(self.sample.tensors))

    def renamed(self, names: Mapping[str, str]) -> Case:
        tensors = {names.get(name, name): array for name, array in self.sample.tensors.items()}
        return self._replace(sample=self.sample._replace(tensors=tensors))


def compressed(layout: str, **weights: Any) -> Configuration:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


SEEDS = st.integers(0, 1 << 32).map(np.random.default_rng)
TYPES, FLAGS, COUNTS = st.sampled_from(SCALE_TYPES), st.booleans(), st.integers(1, 6)


@st.composite
def in_blocks(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([(4, 8), (3, 5), (8, 4)]))
    shape = draw(COUNTS) * block[0] - draw(st.integers(0, 2)), draw(COUNTS) * block[1] - draw(st.integers(0, 2))
    case = Case(
        fp8(draw(SEEDS), shape, block, np.dtype(np.float32)),
        {"quant_method": "fp8", "weight_block_size": list(block)},
        {0: (0, block[0]), 1: (1, block[1])},
    )
    return case.renamed({"w.weight_scale": "w.weight_scale_inv"})


@st.composite
def with_a_scale_a_row(draw: st.DrawFn) -> Case:
    shape, dtype = (draw(COUNTS) * 2, draw(COUNTS) * 2), draw(TYPES)
    if draw(FLAGS):
        sample, kind = fp8(draw(SEEDS), shape, (1, 0), dtype), "float"
    else:
        sample, kind = int8(draw(SEEDS), shape, (1, 0), dtype, draw(FLAGS)), "int"
    settings = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": sample.weight.scheme.symmetric}
    return Case(sample, compressed(f"{kind}-quantized", **settings), {0: (0, 1), 1: (1, 1)})


@st.composite
def with_one_scale(draw: st.DrawFn) -> Case:
    sample = fp8(draw(SEEDS), (draw(COUNTS) * 2, draw(COUNTS) * 2), (0, 0), draw(TYPES))
    configuration = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    return Case(sample, configuration, {0: (0, 1), 1: (1, 1)})


@st.composite
def in_packed_groups(draw: st.DrawFn) -> Case:
    bits, group, zero, act_order = draw(st.sampled_from([2, 4, 8])), 16, draw(FLAGS), draw(FLAGS)
    per_word = 32 // bits
    shape = draw(COUNTS) * per_word, draw(COUNTS) * group
    sample = packed(draw(SEEDS), shape, bits, group, BFLOAT16, zero, act_order)
    settings = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": not zero}
    settings["actorder"] = "group" if act_order else None
    rows, columns = per_word if zero else 1, 1 if act_order else max(1, group // per_word)
    return Case(sample, compressed("pack-quantized", **settings), {0: (0, rows), 1: (1, columns)})


@st.composite
def in_gptq(draw: st.DrawFn) -> Case:
    bits, group, act_order = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([16, -1])), draw(FLAGS)
    per_word = 32 // bits
    shape = draw(COUNTS) * per_word, draw(COUNTS) * 16
    act_order = act_order and group > 0
    sample = gptq(draw(SEEDS), shape, bits, max(group, 0), draw(TYPES), True, act_order)
    configuration = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": True}
    columns = 1 if act_order or group < 0 else max(1, group // per_word)
    return Case(sample, configuration, {0: (1, columns), 1: (0, per_word)})


@st.composite
def in_awq(draw: st.DrawFn) -> Case:
    sample = awq(draw(SEEDS), (8 * draw(COUNTS), 16 * draw(COUNTS)), 16, draw(TYPES))
    configuration = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    return Case(sample, configuration, {0: (1, 16), 1: (0, 1)})


@st.composite
def in_gpt_oss(draw: st.DrawFn) -> Case:
    sample = gpt_oss(draw(SEEDS), (draw(COUNTS), 32 * draw(COUNTS), draw(COUNTS)))
    case = Case(sample, {"quant_method": "mxfp4"}, {0: (0, 1), 1: (2, 1), 2: (1, 1)})
    return case.renamed({"w_blocks": "mlp.experts.w_blocks", "w_scales": "mlp.experts.w_scales"})


@st.composite
def in_four_bit_floats(draw: st.DrawFn) -> Case:
    if draw(FLAGS):
        sample = mxfp4(draw(SEEDS), (draw(COUNTS), 32 * draw(COUNTS)))
        return Case(sample, compressed("mxfp4-pack-quantized", num_bits=4, type="float"), {0: (0, 1), 1: (1, 16)})
    sample = nvfp4(draw(SEEDS), (draw(COUNTS), 16 * draw(COUNTS)), True)
    return Case(sample, compressed("nvfp4-pack-quantized", num_bits=4, type="float"), {0: (0, 1), 1: (1, 8)})


CASES = [
    in_blocks,
    with_a_scale_a_row,
    with_one_scale,
    in_packed_groups,
    in_gptq,
    in_awq,
    in_gpt_oss,
    in_four_bit_floats,
]
KINDS = ("ckpt", "safetensors", "hdf5")


def write(folder: Path, tensors: Mapping[str, Array], configuration: Configuration | None) -> Path:
    """Write a checkpoint of one safetensors file, with the configuration of its model beside it."""
    folder.mkdir(parents=True)
    samples = [
        SampleTensor(name, BY_NAME[array.dtype.name], array.shape, np.ascontiguousarray(array).tobytes())
        for name, array in tensors.items()
    ]
    safetensors_peer.write(folder / "model.safetensors", ShardContents.of(samples))
    if configuration is not None:
        text = json.dumps({"model_type": "toy", "quantization_config": configuration})
        (folder / "config.json").write_text(text)
    return folder


def spec(path: Path, name: str, dim: int, lengths: list[int]) -> Path:
    """Write a strategy that cuts one tensor into slices of these lengths, and nothing else."""
    sizes = f"sizes = {{ {dim} = {lengths} }}\n" if len(set(lengths)) > 1 else ""
    text = f'mesh = {{ tp = {len(lengths)} }}\n[[parameter]]\nmatch = "{name}"\nsplit = {{ {dim} = ["tp"] }}\n{sizes}'
    path.write_text(f'{text}[[parameter]]\nmatch = "*"\n')
    return path


def file_of(rank: Path) -> Path:
    """Return the only file of a rank."""
    (path,) = (path for path in rank.iterdir() if path.suffix in (".safetensors", ".ckpt", ".h5", ".hdf5"))
    return path


def new_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent.parent))


def bytes_of(checkpoint: Path) -> dict[str, bytes]:
    with reshard_mpi.open(checkpoint, check=False) as opened:
        return {name: np.asarray(tensor).tobytes() for name, tensor in opened.items()}


def dequantized(checkpoint: Path) -> Array:
    """Return the only weight of a checkpoint as a loader would see it that knows nothing but this checkpoint."""
    if checkpoint.is_file():
        checkpoint = Path(shutil.copy(checkpoint, new_folder(checkpoint.parent.parent) / checkpoint.name))
    with reshard_mpi.open(checkpoint, dtype="fp32", check=False) as opened:
        (name,) = (name for name in opened if name != "norm.weight")
        return np.asarray(opened[name])


def require_parts(checkpoint: Path, ranks: int, axis: int, whole: Array) -> None:
    """Require that files of ranks, each by itself, dequantize to the slices of the whole along an axis."""
    files = [file_of(checkpoint / f"rank_{rank}") for rank in range(ranks)]
    if files[0].suffix != ".h5":  # which says that it is a part, and is none by itself
        np.testing.assert_array_equal(np.concatenate([dequantized(path) for path in files], axis), whole)


@st.composite
def lengths_of(draw: st.DrawFn, length: int, grain: int, fits: bool) -> list[int]:
    """Draw the lengths of slices: at multiples of the grain, or with one cut elsewhere."""
    places = range(grain, length, grain) if fits else [at for at in range(1, length) if at % grain]
    cuts = sorted(draw(st.sets(st.sampled_from(list(places)), min_size=1, max_size=3)))
    return list(np.diff([0, *cuts, length]))


@pytest.mark.parametrize("cases", few(1, CASES))
@many(10)
@given(st.data())
def test_every_rank_stands_alone_and_together_they_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, cases: Callable[[], st.SearchStrategy[Case]], data: st.DataObject
) -> None:
    case = data.draw(cases())
    folder, stored = tmp_path_factory.mktemp("quantized"), case.sample.tensors[case.stored]
    tensors = {**case.sample.tensors, "norm.weight": np.ones(3, np.float32)}
    source = write(folder / "source", tensors, case.configuration)
    dim = data.draw(st.sampled_from(sorted(case.axes)))
    logical, grain = case.axes[dim]
    if stored.shape[dim] <= grain:
        return
    lengths = [int(length) for length in data.draw(lengths_of(stored.shape[dim], grain, True))]
    strategy = spec(folder / "strategy.toml", case.stored, dim, lengths)
    has_fp8 = any(array.dtype == E4M3 for array in tensors.values())  # which no .ckpt holds
    kind = data.draw(st.sampled_from(KINDS[has_fp8:]))
    cut = folder / "cut"
    reshard_mpi.transform(source, cut, dst_strategy=strategy, to=kind)
    require_parts(cut, len(lengths), logical, case.sample.whole)
    merged = folder / "merged"
    reshard_mpi.transform(cut, merged, src_strategy=strategy, to="safetensors")
    assert bytes_of(merged) == {name: array.tobytes() for name, array in tensors.items()}
    np.testing.assert_array_equal(dequantized(merged), case.sample.whole)
    again = [int(length) for length in data.draw(lengths_of(stored.shape[dim], grain, True))]
    other, once_more = spec(folder / "other.toml", case.stored, dim, again), folder / "once_more"
    reshard_mpi.transform(cut, once_more, src_strategy=strategy, dst_strategy=other, to=kind)
    require_parts(once_more, len(again), logical, case.sample.whole)


@pytest.mark.parametrize("cases", few(2, CASES))
@many(8)
@given(st.data())
def test_a_cut_within_a_block_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cases: Callable[[], st.SearchStrategy[Case]], data: st.DataObject
) -> None:
    case = data.draw(cases())
    folder, stored = tmp_path_factory.mktemp("quantized"), case.sample.tensors[case.stored]
    dims = [dim for dim, (_, grain) in case.axes.items() if grain > 1 and stored.shape[dim] > 1]
    if not dims:
        return
    source = write(folder / "source", case.sample.tensors, case.configuration)
    dim = data.draw(st.sampled_from(dims))
    grain = case.axes[dim][1]
    lengths = [int(length) for length in data.draw(lengths_of(stored.shape[dim], grain, False))]
    strategy = spec(folder / "strategy.toml", case.stored, dim, lengths)
    with pytest.raises(LayoutError) as refused:
        reshard_mpi.transform(source, folder / "cut", dst_strategy=strategy, to="safetensors")
    assert refused.value.exit_code == 3 and repr(case.stored) in refused.value.problem
    assert f"multiples of {grain}" in refused.value.expected and not (folder / "cut").exists()
    reshard_mpi.transform(source, folder / "dcp", dst_strategy=strategy, to="dcp")  # where files say places
    assert bytes_of(folder / "dcp") == {name: array.tobytes() for name, array in case.sample.tensors.items()}


@pytest.mark.parametrize("cases", few(1, CASES))
@many(5)
@given(st.data())
def test_dequantized_weights_are_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, cases: Callable[[], st.SearchStrategy[Case]], data: st.DataObject
) -> None:
    """They are computed in parts of any size, and rounded once."""
    case = data.draw(cases())
    whole = case.sample.whole
    folder = tmp_path_factory.mktemp("quantized")
    source = write(folder / "source", case.sample.tensors, case.configuration)
    with reshard_mpi.open(source, dtype="fp32") as opened:
        (name,) = opened
    dim = data.draw(st.sampled_from([dim for dim, length in enumerate(whole.shape) if length > 1] or [0]))
    lengths = [int(length) for length in data.draw(lengths_of(whole.shape[dim], 1, True))]
    strategy = spec(folder / "strategy.toml", name, dim, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard_mpi.engine.gather._CONVERTED_BYTES", 4 * data.draw(st.integers(1, 200)))
        reshard_mpi.transform(source, folder / "cut", dst_strategy=strategy, to="safetensors", dtype="bf16")
    begins = np.cumsum([0, *lengths])
    for rank, (begin, length) in enumerate(zip(begins, lengths)):
        (tensor,) = safetensors_peer.read(file_of(folder / "cut" / f"rank_{rank}")).tensors.values()
        part = whole[(slice(None),) * dim + (slice(begin, begin + length),)]
        got = np.frombuffer(tensor.content, BFLOAT16).reshape(tensor.shape)
        np.testing.assert_array_equal(got.astype(np.float32), part.astype(BFLOAT16).astype(np.float32))


def test_weights_whose_inputs_are_scaled_are_not_dequantized(tmp_path: Path) -> None:
    """A plain weight would be another one: the scale of its inputs would be left out."""
    sample = nvfp4(np.random.default_rng(3), (4, 32), False)
    tensors = {**sample.tensors, "w.pre_quant_scale": np.ones(32, BFLOAT16)}
    source = write(tmp_path / "source", tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    with pytest.raises(MapError, match=r"w\.pre_quant_scale"):
        reshard_mpi.transform(source, tmp_path / "plain", to="hf", dtype="bf16")
    reshard_mpi.transform(source, tmp_path / "moved", to="hf")
    assert bytes_of(tmp_path / "moved") == {name: array.tobytes() for name, array in tensors.items()}


def test_the_memory_of_converting_is_the_same_in_any_order_of_tensors(tmp_path: Path) -> None:
    """Dequantized weights take more than others that are converted too, before or behind them."""
    sample = fp8(np.random.default_rng(7), (7, 8), (4, 8), np.dtype(np.float32))
    configuration = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    peaks = set()
    for name in ("a.weight", "z.weight"):
        tensors = {name: np.ones((7, 8), BFLOAT16), **sample.tensors}
        source = write(tmp_path / name, {each: tensors[each] for each in sorted(tensors)}, configuration)
        peaks.add(reshard_mpi.plan(source, dtype="fp32").peak_bytes)
    assert len(peaks) == 1


def write_packed(folder: Path, rows: int, columns: int, bits: int = 4) -> tuple[Path, dict[str, Array]]:
    """Write a weight in packed groups of 16 columns; return the checkpoint and its tensors."""
    tensors = packed(np.random.default_rng(rows), (rows, columns), bits, 16, BFLOAT16).tensors
    settings = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 16}
    return write(folder / "source", tensors, compressed("pack-quantized", **settings)), tensors


@few_cases(
    1, ("bits", "columns", "lengths"), [(4, 23, [2, 1]), (8, 50, [4, 9, 0]), (4, 14, [2, 0]), (8, 43, [0, 4, 4, 3])]
)
def test_the_last_part_tells_where_a_packed_weight_ends(
    tmp_path: Path, bits: int, columns: int, lengths: list[int]
) -> None:
    source, tensors = write_packed(tmp_path, 3, columns, bits)
    strategy = spec(tmp_path / "strategy.toml", "w.weight_packed", 1, lengths)
    reshard_mpi.transform(source, tmp_path / "cut", dst_strategy=strategy)
    files = [safetensors_peer.read(file_of(tmp_path / "cut" / f"rank_{rank}")) for rank in range(len(lengths))]
    stated = [np.frombuffer(file.tensors["w.weight_shape"].content, np.int64).tolist() for file in files]
    assert [rows for rows, _ in stated] == [3] * len(lengths) and sum(own for _, own in stated) == columns
    assert [-(-own * bits // 32) for _, own in stated] == lengths
    reshard_mpi.transform(tmp_path / "cut", tmp_path / "merged", src_strategy=strategy)
    assert bytes_of(tmp_path / "merged") == {name: array.tobytes() for name, array in tensors.items()}


@pytest.mark.parametrize("kind", few(1, ["safetensors", "hdf5"]))
def test_ranks_that_state_shapes_of_their_own_are_verified(tmp_path: Path, kind: str) -> None:
    source, tensors = write_packed(tmp_path, 12, 32)
    strategy = spec(tmp_path / "strategy.toml", "w.weight_packed", 0, [4, 8])
    reshard_mpi.transform(source, tmp_path / "cut", dst_strategy=strategy, to=kind, verify=True)
    reshard_mpi.verify(tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / ".reshard_mpi", ignore_errors=True)
    if kind == "hdf5":  # whose files have sums of their own
        reshard_mpi.verify(tmp_path / "cut")
    reshard_mpi.transform(tmp_path / "cut", tmp_path / "merged", src_strategy=strategy, to="safetensors", verify=True)
    assert bytes_of(tmp_path / "merged") == {name: array.tobytes() for name, array in tensors.items()}


def test_ranks_without_rows_hold_no_scales(tmp_path: Path) -> None:
    sample = fp8(np.random.default_rng(7), (7, 8), (4, 8), np.dtype(np.float32))
    tensors = {"w.weight": sample.tensors["w.weight"], "w.weight_scale_inv": sample.tensors["w.weight_scale"]}
    source = write(tmp_path / "source", tensors, {"quant_method": "fp8", "weight_block_size": [4, 8]})
    strategy = spec(tmp_path / "strategy.toml", "w.weight", 0, [7, 0, 0])
    reshard_mpi.transform(source, tmp_path / "cut", dst_strategy=strategy)
    require_parts(tmp_path / "cut", 3, 0, sample.whole)
