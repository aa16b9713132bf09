"""Silent errors that converters of others shipped: each comes out right here, or is refused.

The tests have the names under which the errors were reported. What is tested is the kind of error, on small tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn
from support.checkpoints import write_shard
from support.command_line import done

import reshard_mpi
from reshard_mpi.errors import DifferenceError, MapError, ReshardError

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

HEADS, GROUPS, HEAD, HIDDEN = 8, 2, 4, 6


def loaded(folder: Path, tensors: Tensors, map_text: str, **options: Any) -> Tensors:
    """Return what a map makes of tensors."""
    write_shard(tensors, folder / "source.safetensors")
    (folder / "map.toml").write_text(map_text)
    arrays = reshard_mpi.load_rank(0, folder / "source.safetensors", map=folder / "map.toml", **options)
    return {name: value for name, value in arrays.items() if not isinstance(value, str)}


def config(folder: Path, heads: int, groups: int) -> Path:
    path = folder / f"config-{heads}-{groups}.json"
    path.write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 10}))
    return path


def numbered(*shape: int, first: int = 0) -> Array:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def interleaved(query: Array, key: Array, value: Array, groups: int) -> Array:
    """Return queries, keys and values group by group."""
    parts = zip(*(np.split(array, groups) for array in (query, key, value)))
    return np.concatenate([array for part in parts for array in part])


ATTENTION = """
[axes]
g = "num_key_value_heads"
r = "num_attention_heads / num_key_value_heads"
[[map]]
eq = '''q [(g r d) h], k [(g d) h], v [(g d) h], o [h (g r d)] <=> qkv [(g (r d + d + d)) h], proj [h (g r d)]'''
"""


def attention() -> Tensors:
    rows = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    tensors = {name: numbered(length, HIDDEN, first=1000 * at) for at, (name, length) in enumerate(rows.items())}
    return {**tensors, "o": numbered(HIDDEN, HEADS * HEAD, first=5000)}


def test_megatron_lm_2769_interleaved_qkv_with_the_wrong_group_size(tmp_path: Path) -> None:
    apart = attention()
    fused = {"qkv": interleaved(apart["q"], apart["k"], apart["v"], GROUPS), "proj": apart["o"]}
    right = config(tmp_path, HEADS, GROUPS)
    made = loaded(tmp_path, apart, ATTENTION, config=right)
    assert made.keys() == fused.keys() and all(np.array_equal(made[name], array) for name, array in fused.items())
    again = loaded(tmp_path, fused, ATTENTION, config=right)
    assert all(np.array_equal(again[name], array) for name, array in apart.items())
    # 4 groups of 16 rows with heads of 3 would be as many rows as 2 groups of 24 with heads of 4.
    for wrong in (config(tmp_path, HEADS, 1), config(tmp_path, HEADS, 4), config(tmp_path, HEADS, 8)):
        for tensors in (apart, fused):
            with pytest.raises(MapError, match="does not fit the shapes"):
                loaded(tmp_path, tensors, ATTENTION, config=wrong)
    for tensors in (apart, fused):
        with pytest.raises(MapError, match="does not tell how long"):
            loaded(tmp_path, tensors, ATTENTION)


EXPERTS = """
[[map]]
eq = "layers.{l}.attn [h] <=> blocks.{l}.attention [h]"
[[map]]
eq = '''layers.{l}.experts.w1_EFD [e f h], layers.{l}.router [e h]
    <=> blocks.{l}.experts.{e}.w1 [f h], blocks.{l}.gate [e h]'''
"""


def mixture(experts: str) -> Tensors:
    tensors: Tensors = {}
    for layer in range(2):
        tensors[f"layers.{layer}.attn"] = numbered(HIDDEN)
        tensors[f"layers.{layer}.{experts}"] = numbered(3, 4, HIDDEN)
        tensors[f"layers.{layer}.router"] = numbered(3, HIDDEN)
    return tensors


def test_torchtitan_4475_experts_left_out(tmp_path: Path) -> None:
    """The parameters of experts got new names, and the table of names was not told."""
    made = loaded(tmp_path, mixture("experts.w1_EFD"), EXPERTS)
    assert np.array_equal(made["blocks.1.experts.2.w1"], numbered(3, 4, HIDDEN)[2]) and len(made) == 2 * (1 + 3 + 1)
    stale = mixture("experts.w1")
    with pytest.raises(MapError, match="applies in part"):
        loaded(tmp_path, stale, EXPERTS, forward=True)
    # An equation that may apply nowhere leaves them as they are, and says so; they are never left out.
    optional = f"{EXPERTS}optional = true\n"
    assert "layers.1.experts.w1" in loaded(tmp_path, stale, optional, forward=True)
    write_shard(made, tmp_path / "like.safetensors")
    with pytest.raises(MapError, match="not like the target"):
        loaded(tmp_path, stale, optional, forward=True, like=tmp_path / "like.safetensors")
    fewer = {name: array for name, array in made.items() if name != "blocks.0.experts.2.w1"}
    with pytest.raises(MapError, match="does not fit the shapes"):
        loaded(tmp_path, fewer, EXPERTS, forward=False)


BLOCKS = """
[axes]   # of a block, which has one scale
b = 4
c = 4
[[map]]
eq = '''gate.weight [(f b) (k c)], up.weight [(f b) (k c)], gate.scale [f k], up.scale [f k]
    <=> gate_up.weight [(f b + f b) (k c)], gate_up.scale [(f + f) k]'''
"""


def quantised(rows: int) -> Tensors:
    tensors: Tensors = {}
    for at, name in enumerate(("gate", "up")):
        values = np.random.default_rng(at).integers(1, 100, (rows, 8)).astype(np.float32)
        tensors[f"{name}.weight"] = values.astype(float8_e4m3fn)
        tensors[f"{name}.scale"] = numbered(-(-rows // 4), 2, first=10 * at + 1)
    return tensors


def dequantised(weight: Array, scale: Array) -> Array:
    wide = np.repeat(np.repeat(scale, 4, axis=0), 4, axis=1)
    return weight.astype(np.float32) * wide[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize("rows", [8, 12])
def test_sglang_9433_whole_blocks_keep_their_scales(tmp_path: Path, rows: int) -> None:
    apart = quantised(rows)
    joined = loaded(tmp_path, apart, BLOCKS)
    expected = np.concatenate([dequantised(apart[f"{name}.weight"], apart[f"{name}.scale"]) for name in ("gate", "up")])
    assert np.array_equal(dequantised(joined["gate_up.weight"], joined["gate_up.scale"]), expected)
    again = loaded(tmp_path, joined, BLOCKS)
    assert all(np.array_equal(again[name], array) for name, array in apart.items())


@pytest.mark.parametrize("rows", [6, 10])
def test_sglang_9433_rows_lost_at_block_quantised_cuts(tmp_path: Path, rows: int) -> None:
    """Joined, the second half would begin in the middle of a block; cut, the last rows would have no scale."""
    with pytest.raises(MapError, match="does not fit the shapes"):
        loaded(tmp_path, quantised(rows), BLOCKS)


def test_sglang_9433_no_row_is_lost_where_ranks_cut_through_blocks(tmp_path: Path) -> None:
    """10 rows in blocks of 4 have 3 scales: 2 ranks cannot have as many each, and none is rounded away."""
    spec = 'mesh = { tp = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["tp"] }\n'
    (tmp_path / "two.toml").write_text(spec)
    write_shard(quantised(10), tmp_path / "whole.safetensors")
    with pytest.raises(ReshardError) as raised:
        reshard_mpi.transform(tmp_path / "whole.safetensors", tmp_path / "cut", dst_strategy=tmp_path / "two.toml")
    raised.match(r"gate\.scale")
    assert not list(tmp_path.glob("cut/rank_*/*"))


REGROUP = f"""
[axes]
g = {GROUPS}
r = {HEADS // GROUPS}
[[map]]
eq = "fused [(g (r d + d + d)) h] <=> joined [(g r d + g d + g d) h]"
"""


def test_sglang_36438_scores_that_fell_after_a_regroup(tmp_path: Path) -> None:
    """Both layouts have the same shape: only what is where differs, which no shape tells."""
    apart = attention()
    query, key, value = apart["q"], apart["k"], apart["v"]
    fused, joined = interleaved(query, key, value, GROUPS), np.concatenate([query, key, value])
    assert fused.shape == joined.shape and not np.array_equal(fused, joined)
    assert np.array_equal(loaded(tmp_path, {"fused": fused}, REGROUP)["joined"], joined)
    assert np.array_equal(loaded(tmp_path, {"joined": joined}, REGROUP)["fused"], fused)
    # The check after any conversion: the same through the map, or the first element that is not.
    write_shard({"fused": fused}, tmp_path / "fused.safetensors")
    for made, is_right in ((joined, True), (fused, False)):
        write_shard({"joined": made}, tmp_path / "joined.safetensors")
        both = tmp_path / "fused.safetensors", tmp_path / "joined.safetensors"
        if is_right:
            reshard_mpi.diff(*both, map=tmp_path / "map.toml")
        else:
            with pytest.raises(DifferenceError, match="'joined' differs at element"):
                reshard_mpi.diff(*both, map=tmp_path / "map.toml")


VOCABULARY = """
[axes]
v = 10
m = 4
[[map]]
eq = "embed [v h] <=> words [(v | m) h]"
"""


def test_vocabulary_pads_that_had_been_trained(tmp_path: Path) -> None:
    embedding = numbered(10, HIDDEN)
    padded = np.concatenate([embedding, np.zeros((2, HIDDEN), np.float32)])
    assert np.array_equal(loaded(tmp_path, {"embed": embedding}, VOCABULARY)["words"], padded)
    assert np.array_equal(loaded(tmp_path, {"words": padded}, VOCABULARY)["embed"], embedding)
    padded[11, 3] = 1e-30
    with pytest.raises(MapError, match="the padding of words is not zero") as raised:
        loaded(tmp_path, {"words": padded}, VOCABULARY)
    raised.match(r"element \[11, 3\]")
    dropping = f'{VOCABULARY}pads = "drop"\n'
    assert np.array_equal(loaded(tmp_path, {"words": padded}, dropping)["embed"], embedding)
    said = done("plan", tmp_path / "source.safetensors", tmp_path / "dst", "--map", tmp_path / "map.toml")
    assert "12 elements of padding are dropped, whatever they hold: words" in said.out + said.err
