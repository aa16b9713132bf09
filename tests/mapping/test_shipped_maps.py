"""The maps that come with the program, against what they mean written down in numpy, in both directions."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.checkpoints import write_shard
from support.equations import assert_same
from support.examples import few
from support.full_checkpoints import Weights

import reshard_mpi
from reshard_mpi.errors import MapError, StrategyError
from reshard_mpi.mapping.map_file import read_rules, shipped_maps

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

HIDDEN, HEADS, GROUPS, HEAD, FEED, VOCABULARY, LAYERS, EXPERTS = 8, 4, 2, 3, 10, 11, 3, 4
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
}


class Through(NamedTuple):
    """A map, and where files are written."""

    name: str
    folder: Path

    def __call__(self, source: Tensors, like: Tensors | None = None, **options: Any) -> Tensors:
        write_shard(source, self.folder / "source.safetensors")
        if like is not None:
            write_shard(like, self.folder / "like.safetensors")
            options["like"] = self.folder / "like.safetensors"
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        if options.pop("config", True):
            options["config"] = self.folder / "config.json"
        loaded = reshard_mpi.load_rank(0, self.folder / "source.safetensors", map=self.name, **options)
        return {name: value for name, value in loaded.items() if not isinstance(value, str)}


def llama(*, is_tied: bool = False, is_qwen: bool = False) -> Tensors:
    """Return the tensors of a Llama as transformers names them. is_qwen: with what Qwen2 and Qwen3 have besides."""
    weights, tensors = Weights(), {}
    tensors["model.embed_tokens.weight"] = weights(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS * HEAD), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = weights(rows, HIDDEN)
            if is_qwen:
                tensors[f"{at}self_attn.{name}_proj.bias"] = weights(rows)
        tensors[f"{at}self_attn.o_proj.weight"] = weights(HIDDEN, HEADS * HEAD)
        if is_qwen:
            tensors |= {f"{at}self_attn.{name}_norm.weight": weights(HEAD) for name in "qk"}
        tensors[f"{at}mlp.gate_proj.weight"] = weights(FEED, HIDDEN)
        tensors[f"{at}mlp.up_proj.weight"] = weights(FEED, HIDDEN)
        tensors[f"{at}mlp.down_proj.weight"] = weights(HIDDEN, FEED)
        tensors[f"{at}input_layernorm.weight"] = weights(HIDDEN)
        tensors[f"{at}post_attention_layernorm.weight"] = weights(HIDDEN)
    tensors["model.norm.weight"] = weights(HIDDEN)
    if not is_tied:
        tensors["lm_head.weight"] = weights(VOCABULARY, HIDDEN)
    return tensors


@pytest.mark.parametrize("name", few(1, ["hf-llama-megatron-tp", "hf-llama-megatron"]))
@pytest.mark.parametrize(("tensor_parallel", "ranks"), few(1, [(1, 2), (2, 4), (2, 2), (2, 1)]))
def test_a_configuration_that_contradicts_the_strategy(
    tmp_path: Path, name: str, tensor_parallel: int, ranks: int
) -> None:
    write_shard(llama(), tmp_path / "llama.safetensors")
    keys = {"tensor_model_parallel_size": tensor_parallel, "make_vocab_size_divisible_by": 4}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | keys))
    rules = '[[parameter]]\nmatch = "*linear_fc1.weight"\nsplit = { 0 = ["tensor"] }\n[[parameter]]\nmatch = "*"\n'
    (tmp_path / "ranks.toml").write_text(f"mesh = {{ tensor = {ranks} }}\n{rules}")
    through = {"map": name, "config": tmp_path / "config.json"}
    has_parts_for_ranks = name.endswith("-tp")
    is_right = ranks == 1 or (tensor_parallel == ranks if has_parts_for_ranks else tensor_parallel == 1)

    hugging_face = tmp_path / "llama.safetensors"

    def target() -> dict[str, Array | str]:
        return reshard_mpi.load_rank(0, hugging_face, None, tmp_path / "ranks.toml", **through)

    def source() -> dict[str, Array | str]:
        return reshard_mpi.load_rank(0, tmp_path / "shards", tmp_path / "ranks.toml", **through)

    write_shard(reshard_mpi.load_rank(0, hugging_face, **through), tmp_path / "megatron.safetensors")
    reshard_mpi.transform(
        tmp_path / "megatron.safetensors", tmp_path / "shards", None, tmp_path / "ranks.toml", to="safetensors"
    )
    if is_right:
        target()
        assert_same(source(), llama())
        return
    for side, load in (("target", target), ("source", source)):
        with pytest.raises(StrategyError, match=f"strategy of the {side} contradicts the configuration") as caught:
            load()
        assert "linear_fc1" in str(caught.value) and "tensor_model_parallel_size" in str(caught.value)


def mindformers(model: Tensors, form: str) -> Tensors:
    """Return the tensors of a Llama as MindFormers has them. form: what it does with qkv_concat, as maps are named."""
    tensors = {}
    for name, array in model.items():
        for old, new in (
            ("embed_tokens.weight", "tok_embeddings.embedding_weight"),
            *((f"self_attn.{part}_proj", f"attention.w{part}") for part in "qkvo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("model.norm.", "model.norm_out."),
        ):
            name = name.replace(old, new)
        tensors[name] = array
    for layer in range(LAYERS) if form else ():
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            if f"{at}attention.wq.{kind}" in tensors:
                parts = [tensors.pop(f"{at}attention.w{part}.{kind}") for part in "qkv"]
                groups = GROUPS if form == "-concat-groups" else 1
                tensors[f"{at}attention.w_qkv.{kind}"] = in_turns(parts, groups)
        parts = [tensors.pop(f"{at}feed_forward.w{part}.weight") for part in (1, 3)]
        groups = len(parts[0]) if form == "-concat-groups" else 1
        tensors[f"{at}feed_forward.w_gate_hidden.weight"] = in_turns(parts, groups)
    return tensors


def in_turns(parts: list[np.ndarray], groups: int) -> np.ndarray:
    """Return arrays row by row: the first group of rows of each, then the second of each, and so on."""
    cut = [np.split(part, groups) for part in parts]
    return np.concatenate([part[group] for group in range(groups) for part in cut])


@pytest.mark.parametrize("is_qwen", few(1, [False, True]), ids=["llama", "qwen"])
@pytest.mark.parametrize("is_tied", few(1, [False, True]), ids=["", "tied"])
@pytest.mark.parametrize("form", ["", "-concat-groups", "-concat-blocks"])
def test_llama_to_mindformers_and_back(tmp_path: Path, form: str, is_tied: bool, is_qwen: bool) -> None:
    through, model = Through("hf-llama-mindformers" + form, tmp_path), llama(is_tied=is_tied, is_qwen=is_qwen)
    expected = mindformers(model, form)
    assert_same(through(model, config=bool(form)), expected)
    assert_same(through(expected, config=bool(form)), model)


def test_rows_that_may_lie_in_two_ways_are_taken_by_no_map_that_does_not_say_which(tmp_path: Path) -> None:
    """MindFormers changed the order within w_qkv and w_gate_hidden, and neither names nor shapes."""
    old, new = (mindformers(llama(), form) for form in ("-concat-blocks", "-concat-groups"))
    assert {name: array.shape for name, array in old.items()} == {name: array.shape for name, array in new.items()}
    with pytest.raises(MapError, match=r"attention\.wq.* are not there"):
        Through("hf-llama-mindformers", tmp_path)(old, config=False)


def mixture(gate: str, expert: str, parts: tuple[str, str, str]) -> tuple[Tensors, Tensors]:
    """Return the same layers with experts apart, and stacked. parts: of an expert that are gate, up and down."""
    weights, apart, stacked = Weights(), {}, {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        arrays = {part: weights(EXPERTS, *shape) for part, shape in zip(parts, [(FEED, HIDDEN)] * 2 + [(HIDDEN, FEED)])}
        for number in range(EXPERTS):
            for part, array in arrays.items():
                apart[f"{at}{expert}.{number}.{part}.weight"] = array[number]
        router = weights(EXPERTS, HIDDEN)
        apart[f"{at}{gate}.weight"] = stacked[f"{at}mlp.gate.weight"] = router
        gates, ups, downs = (arrays[part] for part in parts)
        stacked[f"{at}mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        stacked[f"{at}mlp.experts.down_proj"] = downs
        apart[f"{at}norm.weight"] = stacked[f"{at}norm.weight"] = weights(HIDDEN)
    return apart, stacked


MIXTURES = [
    ("hf-mixtral-stacked", mixture("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))),
    ("hf-qwen2-moe", mixture("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))),
]


@pytest.mark.parametrize(("name", "sides"), MIXTURES, ids=[name for name, _ in MIXTURES])
def test_experts_stacked_and_back(tmp_path: Path, name: str, sides: tuple[Tensors, Tensors]) -> None:
    through, (apart, stacked) = Through(name, tmp_path), sides
    assert_same(through(apart), stacked)
    assert_same(through(stacked), apart)


@pytest.mark.parametrize(("name", "sides"), MIXTURES, ids=[name for name, _ in MIXTURES])
@pytest.mark.parametrize(
    "is_left_out",
    [
        lambda name: ".experts.3." in name,
        lambda name: ".experts.1." in name,
        lambda name: name.endswith((".3.w2.weight", ".3.down_proj.weight")),
    ],
    ids=["the last expert", "another expert", "a part of the last one"],
)
def test_left_out_experts_are_refused(
    tmp_path: Path, name: str, sides: tuple[Tensors, Tensors], is_left_out: Callable[[str], bool]
) -> None:
    some = {name: array for name, array in sides[0].items() if not is_left_out(name)}
    assert len(some) < len(sides[0])
    with pytest.raises(MapError):
        Through(name, tmp_path)(some)


def test_layers_stacked_and_back(tmp_path: Path) -> None:
    through, model = Through("layers-stacked", tmp_path), llama(is_qwen=True)
    expected = {name: array for name, array in model.items() if ".layers." not in name}
    for name in [name.removeprefix("model.layers.0.") for name in model if name.startswith("model.layers.0.")]:
        layers = [model[f"model.layers.{layer}.{name}"] for layer in range(LAYERS)]
        expected[f"model.layers.{name}"] = np.stack(layers)
    assert_same(through(model, config=False, forward=True), expected)
    assert_same(through(expected, config=False), model)
    with pytest.raises(MapError, match="can be read in both directions"):
        through(model, config=False)


def test_each_says_in_one_line_what_it_is() -> None:
    assert len(shipped_maps()) >= 6
    for name, path in shipped_maps().items():
        description = tomllib.loads(path.read_text())["description"]
        assert 0 < len(description) <= 100 and "\n" not in description, name
        assert read_rules(name, None)[0].equations, name
