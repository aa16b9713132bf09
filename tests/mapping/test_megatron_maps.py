"""The maps between Hugging Face and Megatron-Core: names, shapes and elements of both sides, for random sizes."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.checkpoints import read_shard, write_shard
from support.command_line import done
from support.equations import assert_same
from support.examples import few
from support.full_checkpoints import Weights
from support.pages import blocks

import reshard_mpi
from reshard_mpi.errors import MapError, StrategyError

_NAME = "test_the_example_of_the_guide"

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek", "deepseek-uneven")
MAPS = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "mixtral": "mixtral", "deepseek": "deepseek"}


class Sizes(NamedTuple):
    """The sizes of a model."""

    vocabulary: int
    layers: int
    hidden: int
    groups: int
    heads_of_group: int
    head: int
    feed: int
    experts: int
    is_tied: bool
    queries: int  # the rank of queries; 0: none
    multiple: int  # of which the vocabulary is one once it is padded

    @classmethod
    def drawn(cls, seed: int) -> Sizes:
        """Return random sizes, by which two ranks can divide what they must."""
        draw = random.Random(seed)
        lengths = [draw.randint(5, 40), draw.randint(1, 4), draw.randint(3, 9), 2 * draw.randint(1, 3)]
        lengths += [draw.randint(1, 3), draw.randint(1, 5), 2 * draw.randint(1, 6), draw.randint(2, 12)]
        return cls(*lengths, draw.random() < 0.3, draw.choice((0, 3, 7)), 2 * draw.randint(1, 8))

    @property
    def config(self) -> dict[str, int]:
        return {
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.groups,
            "num_attention_heads": self.groups * self.heads_of_group,
        }


class Both(NamedTuple):
    """A model, or a layer of it, as both sides name it."""

    ours: Tensors
    theirs: Tensors

    def add(self, array: Array, our_name: str, their_name: str) -> None:
        self.ours[our_name] = self.theirs[their_name] = array


def gated(both: Both, weights: Weights, size: int, hidden: int, ours: str, theirs: str) -> None:
    gate, up = weights(size, hidden), weights(size, hidden)
    both.ours[f"{ours}.gate_proj.weight"], both.ours[f"{ours}.up_proj.weight"] = gate, up
    both.theirs[f"{theirs}.linear_fc1.weight"] = np.concatenate([gate, up])
    both.add(weights(hidden, size), f"{ours}.down_proj.weight", f"{theirs}.linear_fc2.weight")


def attention(both: Both, weights: Weights, family: str, sizes: Sizes) -> None:
    """Add an attention whose queries are in groups."""
    groups, of_group, head, hidden = sizes.groups, sizes.heads_of_group, sizes.head, sizes.hidden
    for kind, width in (("weight", [hidden]), ("bias", [])):
        if kind == "bias" and not family.startswith("qwen2"):
            continue
        lengths = {"q": groups * of_group, "k": groups, "v": groups}
        parts = {name: weights(length * head, *width) for name, length in lengths.items()}
        both.ours.update({f"self_attn.{name}_proj.{kind}": array for name, array in parts.items()})
        in_groups = [array.reshape(groups, -1, *width) for array in parts.values()]
        both.theirs[f"self_attention.linear_qkv.{kind}"] = np.concatenate(in_groups, 1).reshape(-1, *width)
    rows = groups * of_group * head
    both.add(weights(hidden, rows), "self_attn.o_proj.weight", "self_attention.linear_proj.weight")
    for name in "qk" if family.startswith("qwen3") else "":
        both.add(weights(head), f"self_attn.{name}_norm.weight", f"self_attention.{name}_layernorm.weight")
    both.add(weights(hidden), "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


def latent_attention(both: Both, weights: Weights, sizes: Sizes) -> None:
    heads, hidden, rank = sizes.groups * sizes.heads_of_group, sizes.hidden, 5
    if sizes.queries:
        both.add(
            weights(sizes.queries, hidden), "self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight"
        )
        norm = weights(sizes.queries)
        both.add(norm, "self_attn.q_a_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
        up = weights(heads * 6, sizes.queries)
        both.add(up, "self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight")
    else:
        both.add(weights(heads * 6, hidden), "self_attn.q_proj.weight", "self_attention.linear_q_proj.weight")
    down = weights(rank + 2, hidden)
    both.add(down, "self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight")
    norm = weights(rank)
    both.add(norm, "self_attn.kv_a_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight")
    both.add(weights(heads * 8, rank), "self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight")
    both.add(weights(hidden, heads * 4), "self_attn.o_proj.weight", "self_attention.linear_proj.weight")
    both.add(weights(hidden), "input_layernorm.weight", "input_layernorm.weight")


def experts(both: Both, weights: Weights, family: str, sizes: Sizes) -> None:
    at, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        at, parts = "block_sparse_moe", ("w1", "w3", "w2")
    count, feed, hidden = sizes.experts, sizes.feed, sizes.hidden
    gate, up, down = weights(count, feed, hidden), weights(count, feed, hidden), weights(count, hidden, feed)
    for number in range(count):
        own = f"{at}.experts.{number}"
        both.ours.update({f"{own}.{part}.weight": array[number] for part, array in zip(parts, (gate, up, down))})
    both.theirs["mlp.experts.experts.linear_fc1.weight"] = np.concatenate([gate, up], axis=1)
    both.theirs["mlp.experts.experts.linear_fc2.weight"] = down
    both.add(weights(count, hidden), f"{at}.gate.weight", "mlp.router.weight")
    if family == "qwen2-moe":
        gated(both, weights, feed + 2, hidden, "mlp.shared_expert", "mlp.shared_experts")
        both.add(weights(1, hidden), "mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight")
    elif family.startswith("deepseek"):
        gated(both, weights, feed + 2, hidden, "mlp.shared_experts", "mlp.shared_experts")
        both.add(weights(count), "mlp.gate.e_score_correction_bias", "mlp.router.expert_bias")


def model_of(family: str, sizes: Sizes, multiple: int) -> Both:
    """Return a model as Hugging Face and as Megatron-Core name it, with layers by their numbers."""
    weights, both = Weights(), Both({}, {})

    def rows(array: Array) -> Array:
        return np.pad(array, ((0, -len(array) % multiple), (0, 0)))

    both.ours["model.embed_tokens.weight"] = weights(sizes.vocabulary, sizes.hidden)
    both.theirs["embedding.word_embeddings.weight"] = rows(both.ours["model.embed_tokens.weight"])
    for number in range(sizes.layers):
        layer = Both({}, {})
        if family.startswith("deepseek"):
            latent_attention(layer, weights, sizes)
        else:
            attention(layer, weights, family, sizes)
        is_dense = family in ("llama", "qwen2", "qwen3") or (family == "deepseek-uneven" and number == 0)
        norm = "mlp.linear_fc1.layer_norm_weight" if is_dense else "pre_mlp_layernorm.weight"
        layer.add(weights(sizes.hidden), "post_attention_layernorm.weight", norm)
        if is_dense:
            gated(layer, weights, sizes.feed, sizes.hidden, "mlp", "mlp")
        else:
            experts(layer, weights, family, sizes)
        both.ours.update({f"model.layers.{number}.{name}": array for name, array in layer.ours.items()})
        both.theirs.update({f"decoder.layers.{number}.{name}": array for name, array in layer.theirs.items()})
    both.add(weights(sizes.hidden), "model.norm.weight", "decoder.final_layernorm.weight")
    if not sizes.is_tied:
        both.ours["lm_head.weight"] = weights(sizes.vocabulary, sizes.hidden)
        both.theirs["output_layer.weight"] = rows(both.ours["lm_head.weight"])
    return both


def with_stacked_layers(tensors: Tensors) -> Tensors:
    """Return tensors of Megatron-Core as torch_dist has them."""
    stacked = {name: array for name, array in tensors.items() if not name.startswith("decoder.layers.")}
    for name in (name for name in tensors if name.startswith("decoder.layers.0.")):
        number, layers = 0, []
        while (own := name.replace(".0.", f".{number}.", 1)) in tensors:
            layers.append(tensors[own])
            number += 1
        stacked[name.replace(".0.", ".", 1)] = np.stack(layers)
    return stacked


def of_rank(name: str, array: Array, rank: int, ranks: int) -> Array:
    """Return a tensor-parallel rank's part."""
    if "norm" in name or "router" in name or "down_proj" in name or name.endswith("gate_weight"):
        return array
    if name.endswith("linear_fc1.weight"):
        axis = array.ndim - 2
        return np.concatenate([np.split(half, ranks, axis)[rank] for half in np.split(array, 2, axis)], axis)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(array, ranks, -1)[rank]
    return np.split(array, ranks)[rank]


def name_of(family: str) -> str:
    return f"hf-{MAPS.get(family.removesuffix('-uneven'), 'qwen-moe')}-megatron"


def through(folder: Path, source: Tensors, name: str, config: dict[str, Any], **options: Any) -> Tensors:
    write_shard(source, folder / "source.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    loaded = reshard_mpi.load_rank(0, folder / "source.safetensors", map=name, config=folder / "config.json", **options)
    return {name: value for name, value in loaded.items() if not isinstance(value, str)}


@pytest.mark.parametrize("family", few(1, FAMILIES))
# Of these, vocabularies are tied or not, and queries have a rank or none, in all four ways.
@pytest.mark.parametrize("seed", few(1, range(4)))
def test_there_and_back(tmp_path: Path, family: str, seed: int) -> None:
    """Hugging Face to Megatron needs no checkpoint of the target; the vocabulary is padded as is said."""
    sizes, name = Sizes.drawn(seed), name_of(family)
    both = model_of(family, sizes, sizes.multiple)
    layouts = [(name, both.theirs)]
    if not family.endswith("-uneven"):
        layouts.append((f"{name}-dist", with_stacked_layers(both.theirs)))
    keys = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": sizes.multiple // 2}
    for number, (layout, expected) in enumerate(layouts):
        # How the padding is said depends on neither the family nor the layout: in each, seeds take turns.
        alone: dict[str, Any] = {"config": sizes.config}
        there, back = {"config": sizes.config | keys}, {**alone, "axis": {"m": sizes.multiple}}
        if (seed + number) % 2:
            there, back = back, alone
        assert_same(through(tmp_path, both.ours, layout, **there), expected)
        assert_same(through(tmp_path, expected, layout, **back), both.ours)
        if seed > 1:
            continue
        unpadded = {
            key: array[: sizes.vocabulary] if key.startswith(("embedding", "output")) else array
            for key, array in expected.items()
        }
        assert_same(through(tmp_path, both.ours, layout, sizes.config), unpadded)


@pytest.mark.parametrize("family", few(1, FAMILIES))
# One with a tied vocabulary and several heads in a group, one with neither.
@pytest.mark.parametrize("seed", few(1, [10, 12]))
def test_ranks_and_back(tmp_path: Path, family: str, seed: int) -> None:
    sizes, name = Sizes.drawn(seed), f"{name_of(family)}-tp"
    both = model_of(family, sizes, sizes.multiple)
    keys = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": sizes.multiple // 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes.config | keys))
    whole = {"*norm*", "*router*", "*down_proj*", "*gate_weight"}
    rules = [(glob, "") for glob in sorted(whole)]
    cuts = {"*experts.experts.linear_fc1*": 1, "*experts.experts.linear_fc2*": 2}
    cuts |= {"*linear_proj*": 1, "*linear_fc2*": 1, "*": 0}
    rules += [(glob, f'split = {{ {axis} = ["tensor"] }}\n') for glob, axis in cuts.items()]
    text = "mesh = { tensor = 2 }\n"
    text += "".join(f'[[parameter]]\nmatch = "{glob}"\noptional = true\n{split}' for glob, split in rules)
    (tmp_path / "two.toml").write_text(text)
    options: dict[str, Any] = {"map": name, "config": tmp_path / "config.json"}
    write_shard(both.ours, tmp_path / "ours.safetensors")
    reshard_mpi.transform(
        tmp_path / "ours.safetensors", tmp_path / "ranks", dst_strategy=tmp_path / "two.toml", **options
    )
    for rank in range(2):
        file = tmp_path / "ranks" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        expected = {key: of_rank(key, array, rank, 2) for key, array in both.theirs.items()}
        held = read_shard(file)
        assert held.keys() == expected.keys()
        for key, array in expected.items():
            assert held[key][1:] == (array.shape, array.tobytes()), key
    again = reshard_mpi.load_rank(0, tmp_path / "ranks", tmp_path / "two.toml", **options)
    assert_same({key: value for key, value in again.items() if not isinstance(value, str)}, both.ours)


def alternative(tensors: Tensors, family: str) -> Tensors:
    """Return the names of Megatron-Core's own layers, in files of ranks: norms and experts by themselves."""
    made: Tensors = {}
    for name, array in tensors.items():
        for new, old in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
            ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ):
            name = name.replace(old, new)
        if ".experts.experts." in name:
            for number, expert in enumerate(array):
                of_expert = f".local_experts.{number}." if family != "qwen3-moe" else "."
                end = str(number) if family == "qwen3-moe" else ""
                made[name.replace(".experts.experts.", f".experts{of_expert}") + end] = expert
        else:
            made[name] = array
    return made


@pytest.mark.parametrize("family", few(1, FAMILIES))
def test_names_of_other_layers_are_told_by_a_checkpoint(tmp_path: Path, family: str) -> None:
    sizes, name = Sizes.drawn(20), name_of(family)
    both = model_of(family, sizes, sizes.multiple)
    layouts = {name: alternative(both.theirs, family)}
    if MAPS.get(family) == "llama":  # in torch_dist, experts are not by themselves
        layouts[f"{name}-dist"] = with_stacked_layers(layouts[name])
    for layout, expected in layouts.items():
        write_shard({key: np.zeros_like(array) for key, array in expected.items()}, tmp_path / "like.safetensors")
        assert_same(through(tmp_path, both.ours, layout, sizes.config, like=tmp_path / "like.safetensors"), expected)
        assert_same(through(tmp_path, expected, layout, sizes.config), both.ours)


def llamas(seed: int = 20) -> tuple[Both, Both, dict[str, int]]:
    """Return a model with a head of its own, one of the same sizes whose head is tied, and their configuration."""
    sizes = Sizes.drawn(seed)
    apart, tied = (model_of("llama", sizes._replace(is_tied=is_tied), sizes.multiple) for is_tied in (False, True))
    return apart, tied, sizes.config


@pytest.mark.parametrize("ours", few(1, [False, True]), ids=["head here", "tied here"])
@pytest.mark.parametrize("theirs", [False, True], ids=["head there", "tied there"])
def test_tied_heads(tmp_path: Path, ours: bool, theirs: bool) -> None:
    _, (here, there), config = llamas()
    here |= {} if ours else {"lm_head.weight": here["model.embed_tokens.weight"]}
    there |= {} if theirs else {"output_layer.weight": there["embedding.word_embeddings.weight"]}
    for source, target in ((here, there), (there, here)):
        write_shard(target, tmp_path / "like.safetensors")
        made = through(tmp_path, source, "hf-llama-megatron", config, like=tmp_path / "like.safetensors")
        assert_same(made, target)


def test_tied_heads_that_differ_are_refused(tmp_path: Path) -> None:
    apart, tied, config = llamas()
    for source, like in ((apart.ours, tied.theirs), (apart.theirs, tied.ours)):
        write_shard(like, tmp_path / "like.safetensors")
        with pytest.raises(MapError, match="one tensor is taken for several, and they differ"):
            through(tmp_path, source, "hf-llama-megatron", config, like=tmp_path / "like.safetensors")


def test_megatron_needs_the_configuration(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path, tensors in zip(paths, llamas()[0]):
        write_shard(tensors, path)
    with pytest.raises(MapError, match=r"--config FILE\.json"):
        reshard_mpi.load_rank(0, paths[0], map="hf-llama-megatron", like=paths[1])


@pytest.mark.parametrize("family", few(1, FAMILIES))
def test_state_of_an_optimizer_follows(tmp_path: Path, family: str) -> None:
    sizes, name = Sizes.drawn(30), name_of(family)
    both = model_of(family, sizes, 1)
    dist = name if family.endswith("-uneven") else f"{name}-dist"
    theirs = both.theirs if dist == name else with_stacked_layers(both.theirs)

    def with_state(tensors: Tensors) -> Tensors:
        return tensors | {f"exp_avg.{key}": -array for key, array in tensors.items()}

    assert_same(through(tmp_path, with_state(both.ours), dist, sizes.config), with_state(theirs))
    assert_same(through(tmp_path, with_state(theirs), dist, sizes.config), with_state(both.ours))


def prediction(both: Both, weights: Weights, sizes: Sizes) -> None:
    """Add the layer of multi-token prediction that DeepSeek-V3 has behind its others."""
    layer, at = Both({}, {}), f"model.layers.{sizes.layers}"
    latent_attention(layer, weights, sizes)
    layer.add(weights(sizes.hidden), "post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
    experts(layer, weights, "deepseek", sizes)
    both.ours.update({f"{at}.{name}": array for name, array in layer.ours.items()})
    both.theirs.update({f"mtp.layers.0.transformer_layer.{name}": array for name, array in layer.theirs.items()})
    for name in ("enorm", "hnorm"):
        both.add(weights(sizes.hidden), f"{at}.{name}.weight", f"mtp.layers.0.{name}.weight")
    both.add(weights(sizes.hidden, 2 * sizes.hidden), f"{at}.eh_proj.weight", "mtp.layers.0.eh_proj.weight")
    both.add(weights(sizes.hidden), f"{at}.shared_head.norm.weight", "mtp.layers.0.final_layernorm.weight")


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(1, range(50, 53)))
def test_multi_token_prediction(tmp_path: Path, seed: int) -> None:
    sizes = Sizes.drawn(seed)._replace(queries=4, is_tied=False)
    both = model_of("deepseek-uneven", sizes, 8)
    prediction(both, Weights(), sizes)
    copies = {
        f"model.layers.{sizes.layers}.embed_tokens.weight": both.ours["model.embed_tokens.weight"],
        f"model.layers.{sizes.layers}.shared_head.head.weight": both.ours["lm_head.weight"],
    }
    name, options = "hf-deepseek-megatron", {"axis": {"m": 8}}
    assert_same(through(tmp_path, both.ours | copies, name, sizes.config, **options), both.theirs)
    assert_same(through(tmp_path, both.theirs, name, sizes.config), both.ours)
    write_shard(both.ours | copies, tmp_path / "like.safetensors")
    again = through(tmp_path, both.theirs, name, sizes.config, like=tmp_path / "like.safetensors")
    assert_same(again, both.ours | copies)
    write_shard(both.theirs, tmp_path / "like.safetensors")
    there = through(tmp_path, both.ours | copies, name, sizes.config, like=tmp_path / "like.safetensors")
    assert_same(there, both.theirs)


@pytest.mark.parametrize("family", few(2, ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek"]))
def test_lost_experts_are_refused(tmp_path: Path, family: str) -> None:
    sizes = Sizes.drawn(40)
    ours = model_of(family, sizes, 1).ours
    last = f".experts.{sizes.experts - 1}."
    for lost in (lambda key: last in key, lambda key: "layers.0." in key and last in key):
        some = {key: array for key, array in ours.items() if not lost(key)}
        with pytest.raises(MapError):
            through(tmp_path, some, f"{name_of(family)}-dist", sizes.config)


def test_the_example_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(reshard_mpi.__file__).parent / "guide" / "megatron_maps.md").read_text()
    (block,) = (block for block in blocks(page) if block.elsewhere == (f"tests/mapping/{Path(__file__).name}", _NAME))
    sizes = Sizes.drawn(8)
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    write_shard(model_of("llama", sizes, 1).ours, Path("llama", "model.safetensors"))
    Path("llama", "config.json").write_text(json.dumps(sizes.config))
    for line in block.text.splitlines():
        done(*shlex.split(line)[1:])
    with reshard_mpi.open("save") as checkpoint:
        assert checkpoint["model.embedding.word_embeddings.weight"].shape == (128, sizes.hidden)


def test_a_vocabulary_padded_for_others_is_refused(tmp_path: Path) -> None:
    sizes = Sizes.drawn(3)._replace(vocabulary=10)
    theirs = with_stacked_layers(model_of("llama", sizes, 12).theirs)
    keys = {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 8}
    with pytest.raises(MapError, match="is 12 long, not 32"):
        through(tmp_path, theirs, "hf-llama-megatron-dist", sizes.config | keys)
    theirs["embedding.word_embeddings.weight"][11, 0] = 1
    with pytest.raises(MapError, match="not zero"):
        through(tmp_path, theirs, "hf-llama-megatron-dist", sizes.config)


def test_a_model_of_old_whose_configuration_has_no_groups(tmp_path: Path) -> None:
    sizes = Sizes.drawn(5)._replace(heads_of_group=1)
    both = model_of("llama", sizes, 1)
    for config in ({"num_key_value_heads": None}, {}):
        config = {key: value for key, value in sizes.config.items() if key != "num_key_value_heads"} | config
        assert_same(through(tmp_path, both.ours, "hf-llama-megatron", config), both.theirs)
        assert_same(through(tmp_path, both.theirs, "hf-llama-megatron", config), both.ours)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_more_ranks_than_groups_are_refused(tmp_path: Path, family: str) -> None:
    sizes = Sizes.drawn(6)._replace(groups=2)
    ours = model_of(family, sizes, 1).ours
    with pytest.raises((MapError, StrategyError), match="length of 'g' cannot be computed"):
        through(tmp_path, ours, f"{name_of(family)}-tp", sizes.config | {"tensor_model_parallel_size": 4})
