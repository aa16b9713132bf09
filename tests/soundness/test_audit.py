"""Checkpoints that are spoiled as users' were are found out, each by kind and tensor; sound ones have no error."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import flip_bits, sample, write_ranks
from support.command_line import done, refused, run_apart, run_here
from support.examples import few, few_cases
from support.launch import MPI, by_one_mpi
from support.whole_checkpoints import CONFIG, EMBEDDING, HEAD, Array, Tensors, save, stand_ins, weights, with_state

import reshard_mpi
from reshard_mpi.errors import DamageError, UsageError

__all__ = ["stand_ins"]
WRONG = DamageError.exit_code
EXPERT = "model.layers.1.experts.2.w1.weight"
Spoil = Callable[[Tensors], Tensors]
Found = set[tuple[str, str]]


def audited(folder: Path, *options: str) -> Found:
    """Return kind and tensor of each finding, as the command tells them; its exit code must fit."""
    finished = run_here("audit", folder, "--json", "--jobs", "1", *options)
    assert finished.code in (0, WRONG), finished
    report = json.loads(finished.out)
    errors = [each for each in report["findings"] if each["severity"] == "error"]
    assert finished.code == (WRONG if errors or ("--strict" in options and report["findings"]) else 0)
    assert (report["errors"], report["notes"]) == (len(errors), len(report["findings"]) - len(errors))
    return {(each["kind"], each["tensor"]) for each in report["findings"]}


def without(pattern: str) -> Spoil:
    return lambda tensors: {name: array for name, array in tensors.items() if pattern not in name}


def changed(name: str, change: Callable[[Array], Array]) -> Spoil:
    """Change a weight, and its copy in float32 with it."""

    def spoil(tensors: Tensors) -> Tensors:
        weight = change(tensors[f"model.{name}"])
        copy = f"optimizer.state.{name}.fp32_param"
        state = {} if copy not in tensors else {copy: weight.astype(np.float32)}
        return {**tensors, f"model.{name}": weight, **state}

    return spoil


def at(name: str, array: Callable[[Tensors], Array]) -> Spoil:
    return lambda tensors: {**tensors, name: array(tensors)}


def junk(array: Array) -> Array:
    """Return memory as it may be found: addresses and numbers of other types."""
    return np.frombuffer(np.random.default_rng(5).bytes(array.nbytes), array.dtype).reshape(array.shape)


def lost_shard(tensors: Tensors) -> Tensors:
    """Leave out a third of the tensors, as an export without one of its files does."""
    return {name: array for number, (name, array) in enumerate(tensors.items()) if number % 3}


def lost_names(spoil: Spoil) -> Found:
    before = with_state(weights())
    gone = before.keys() - spoil(before).keys()
    return {("missing", name.removeprefix("model.")) for name in gone if name.startswith("model.")}


ROWS_LOST = changed(EMBEDDING, lambda array: array[:-8])
SPOILED: dict[str, tuple[Spoil, Found]] = {
    "experts dropped": (without(".experts."), lost_names(without(".experts."))),
    "a shard lost with a consistent index": (lost_shard, lost_names(lost_shard)),
    "an expert copied over another": (
        at(f"model.{EXPERT}", lambda tensors: tensors["model.model.layers.0.experts.1.w1.weight"]),
        {("copy", f"model.{EXPERT}"), ("fp32", f"optimizer.state.{EXPERT}.fp32_param")},
    ),
    "a tensor left zero": (changed(EXPERT, np.zeros_like), {("zero", f"model.{EXPERT}")}),
    "a tensor not initialised": (changed(EXPERT, junk), {("beyond", f"model.{EXPERT}")}),
    "a tensor transposed": (changed(EXPERT, lambda array: array.T.copy()), {("shape", f"model.{EXPERT}")}),
    "rows of the vocabulary lost": (ROWS_LOST, {("shape", f"model.{EMBEDDING}")}),
    "moments of another step": (
        at(f"optimizer.state.{EXPERT}.step", lambda _: np.array(2, np.float32)),
        {("step", f"optimizer.state.{EXPERT}.step")},
    ),
    "a copy in float32 of other weights": (
        at(f"optimizer.state.{EXPERT}.fp32_param", lambda tensors: tensors[f"optimizer.state.{EXPERT}.fp32_param"] * 2),
        {("fp32", f"optimizer.state.{EXPERT}.fp32_param")},
    ),
    "a tensor too much": (
        at("model.model.layers.0.experts.4.w1.weight", lambda tensors: tensors[f"model.{EXPERT}"][::-1].copy()),
        {("surplus", "model.model.layers.0.experts.4.w1.weight")},
    ),
    "a head that contradicts the tied one": (
        at(f"model.{HEAD}", lambda tensors: tensors[f"model.{EMBEDDING}"][::-1].copy()),
        {("tied", f"model.{HEAD}")},
    ),
}


@pytest.mark.parametrize("name", few(4, SPOILED))
def test_spoiled_checkpoints_are_found_out(name: str, tmp_path: Path, stand_ins: Path) -> None:
    spoil, expected = SPOILED[name]
    found = audited(save(tmp_path / "src", spoil(with_state(weights())), config=CONFIG))
    assert expected <= found
    told = {tensor for _, tensor in expected}
    of_others = {tensor for _, tensor in found if not any(tensor.endswith(each) or each[6:] in tensor for each in told)}
    assert of_others == set() or "shard" in name or "dropped" in name


@pytest.mark.parametrize("has_state", few(1, [True, False]))
def test_a_sound_training_has_no_findings(has_state: bool, tmp_path: Path, stand_ins: Path) -> None:
    tensors = with_state(weights()) if has_state else weights()
    folder = save(tmp_path / "src", tensors, config=CONFIG)
    finished = done("audit", folder, "--strict", "--jobs", "1")
    assert "TinyMoeForCausalLM of transformers 4.99" in finished.out and finished.out.endswith(": sound\n")
    tied = {**tensors, f"{'model.' * has_state}{HEAD}": tensors[f"{'model.' * has_state}{EMBEDDING}"]}
    assert audited(save(tmp_path / "tied", tied, config=CONFIG)) == set()


def test_the_base_models_prefix_may_be_missing(tmp_path: Path, stand_ins: Path) -> None:
    tensors = {name.removeprefix("model."): array for name, array in weights().items()}
    assert audited(save(tmp_path / "src", tensors, config=CONFIG)) == set()


@pytest.mark.slow
def test_a_map_gives_the_names_of_the_model(tmp_path: Path, stand_ins: Path) -> None:
    tensors = {name.replace("model.layers", "decoder.blocks"): array for name, array in weights().items()}
    folder = save(tmp_path / "src", tensors, config=CONFIG)
    assert audited(folder) == {("missing", "")}
    assert audited(folder, "--map", "decoder.blocks.{p*} <=> model.layers.{p*}") == set()
    del tensors[EXPERT.replace("model.layers", "decoder.blocks")]
    lacking = save(tmp_path / "lacking", tensors, config=CONFIG)
    assert audited(lacking, "--map", "decoder.blocks.{p*} <=> model.layers.{p*}") == {("missing", EXPERT)}
    assert "nowhere" in refused("audit", folder, "--map", "nowhere.{p*} <=> elsewhere.{p*}", "--jobs", "1")


def test_another_checkpoint_tells_names_and_shapes(tmp_path: Path) -> None:
    like = save(tmp_path / "like", weights())
    tensors = weights(2)
    tensors["extra.w"] = tensors.pop(EXPERT)
    tensors[EMBEDDING] = tensors[EMBEDDING][:-1]
    found = audited(save(tmp_path / "src", tensors), "--like", str(like))
    assert found == {("missing", EXPERT), ("surplus", "extra.w"), ("shape", EMBEDDING)}
    assert audited(like, "--like", str(like)) == set()
    other = save(tmp_path / "other", {"conv.w": weights()[EXPERT]})
    complaint = refused("audit", like, "--like", other, "--jobs", "1")
    assert str(other) in complaint and "'conv.w'" in complaint


def test_norms_are_held_against_the_previous_checkpoint(tmp_path: Path) -> None:
    before = save(tmp_path / "before", weights())
    tensors = {name: array + array for name, array in weights().items()}
    tensors[EXPERT] = tensors[EXPERT] + tensors[EXPERT]
    after = save(tmp_path / "after", tensors)
    assert audited(after, "--before", str(before)) == {("change", EXPERT)}
    assert audited(after, "--before", str(before), "--strict") == {("change", EXPERT)}
    assert audited(after, "--before", str(before), "--strict", "--allow", "*.experts.2.*") == set()
    other = save(tmp_path / "other", {"w": weights()[EXPERT]})
    complaint = refused("audit", after, "--before", other, "--jobs", "1")
    assert f"'{EMBEDDING}'" in complaint and str(other) in complaint
    assert "is not there" in refused("audit", after, "--before", tmp_path / "nowhere", "--jobs", "1")


def test_notes_are_no_errors(tmp_path: Path) -> None:
    tensors = weights()
    tensors[EMBEDDING][3:7] = 0
    tensors["model.layers.0.experts.0.w1.weight"] *= ml_dtypes.bfloat16(64)
    tensors["model.layers.0.experts.0.w2.weight"] = tensors["model.layers.0.experts.0.w2.weight"].astype(np.float16)
    tensors["model.layers.0.experts.0.w2.weight"] *= np.float16(1e-3)
    folder = save(tmp_path / "src", tensors)
    found = {
        ("rows", EMBEDDING),
        ("norm", "model.layers.0.experts.0.w1.weight"),
        ("subnormal", "model.layers.0.experts.0.w2.weight"),
    }
    assert audited(folder) == found == audited(folder, "--strict")
    finished = done("audit", folder, "--jobs", "1")
    assert "4 of 40 rows are all zero: the first 3, the last 6" in finished.out


def test_vectors_masks_and_what_is_allowed_may_be_alike(tmp_path: Path) -> None:
    tensors = weights()
    for layer in range(3):
        tensors[f"model.layers.{layer}.mask"] = np.tril(np.ones((6, 6), np.uint8))
        tensors[f"model.layers.{layer}.index"] = np.arange(36).reshape(6, 6)
        tensors[f"model.layers.{layer}.is_on"] = np.ones((6, 6), np.bool_)
        tensors[f"model.layers.{layer}.bias"] = np.zeros((1, 1, 8), np.float32)
        seen = np.tril(np.ones((1, 1, 6, 6), np.float32))
        tensors[f"model.layers.{layer}.attn.bias"] = seen
        for name, dtype in {"half": np.float16, "single": np.float32}.items():
            tensors[f"model.layers.{layer}.{name}.added"] = np.where(seen, 0, np.finfo(dtype).min).astype(dtype)
        tensors[f"model.layers.{layer}.attn_mask"] = np.where(seen, 0, -np.inf).astype(np.float32)
        angles = np.arange(1, 7)[:, None] / 10000 ** (np.arange(4) / 4)
        for name in ("cos_cached", "sin_cached"):
            tensors[f"model.layers.{layer}.rotary_emb.{name}"] = getattr(np, name[:3])(angles).astype(np.float32)
    assert audited(save(tmp_path / "src", tensors)) == set()
    tensors[EXPERT] = tensors["model.layers.0.experts.0.w1.weight"]
    folder = save(tmp_path / "copied", tensors)
    assert audited(folder) == {("copy", EXPERT)} and audited(folder, "--allow", "*.experts.*") == set()
    same = {
        f"layers.{layer}.experts.{expert}.w": np.full((2, 2), 3, np.float32) for layer in (0, 1) for expert in (0, 1)
    }
    assert audited(save(tmp_path / "constant", same)) == {("constant", name) for name in same}


@pytest.mark.parametrize(
    "form", few(2, ["{}.weight", "model.{}.attn.w", "stages.{}.blocks.0.w", "layer1.{}.conv.w", "layers.{}.w"])
)
def test_a_copied_layer_is_told_by_any_number(tmp_path: Path, form: str) -> None:
    random = np.random.default_rng(0)
    tensors = {form.format(number): random.standard_normal((8, 8)).astype(np.float32) for number in range(4)}
    assert audited(save(tmp_path / "sound", tensors)) == set()
    tensors[form.format(2)] = tensors[form.format(1)]
    assert audited(save(tmp_path / "copied", tensors)) == {("copy", form.format(2))}


def test_what_is_nearly_a_mask_is_none(tmp_path: Path) -> None:
    tensors = weights()
    mask = np.tril(np.ones((6, 6), np.float32))
    added = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
    for layer in range(2):
        tensors[f"model.layers.{layer}.other"] = mask + mask[::-1]
    tensors["model.one"] = np.where(np.arange(36).reshape(6, 6) == 7, np.float32(-1e38), added * 0)
    tensors["model.two"] = np.where(np.arange(36).reshape(6, 6) == 7, np.float32(-1e38), added)
    tensors["model.attn_mask"] = np.where(mask, 1, -np.inf).astype(np.float32)
    found = {("copy", "model.layers.1.other"), ("infinite", "model.attn_mask")}
    found |= {(kind, f"model.{name}") for kind in ("beyond", "rows") for name in ("one", "two")}
    assert audited(save(tmp_path / "src", tensors)) == found


def test_a_checkpoint_without_a_part_or_a_file_is_found_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "src", weights())
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    finished = run_here("audit", folder, "--jobs", "1")
    assert finished.code == WRONG and path.name in finished.out and finished.out.startswith("error: structure")
    path.unlink()
    finished = run_here("audit", folder, "--jobs", "1")
    assert finished.code == WRONG and path.name in finished.out
    assert "nowhere" in refused("audit", tmp_path / "nowhere")


@pytest.mark.slow
def test_shards_are_named_by_rank(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text("mesh = { tp = 2 }\n[[parameter]]\nmatch = '*'\nsplit = { 0 = ['tp'] }\n")
    array = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    array[4, 1] = np.nan
    write_ranks({0: {"w": array[:3]}, 1: {"w": array[3:]}}, tmp_path / "src")
    finished = run_here("audit", tmp_path / "src", "--src-strategy", spec, "--json", "--jobs", "2")
    (found,) = json.loads(finished.out)["findings"]
    assert (found["kind"], found["rank"], found["tensor"]) == ("nan", 1, "w") and "[4, 1]" in found["detail"]
    assert found["file"].endswith("rank_1/checkpoint_1.ckpt")
    (tmp_path / "src" / "rank_1" / "checkpoint_1.ckpt").unlink()
    finished = run_here("audit", tmp_path / "src", "--src-strategy", spec, "--json", "--jobs", "2")
    kinds = {(each["kind"], each["tensor"]) for each in json.loads(finished.out)["findings"]}
    assert finished.code == WRONG and kinds == {("structure", "w"), ("structure", "")}


def test_what_does_not_fit_its_sum_is_found_out(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}}, tmp_path / "src")
    done("transform", tmp_path / "src", tmp_path / "dst", "--verify", "--jobs", "1")
    assert "(structure, sums, values)" in done("audit", tmp_path / "dst", "--jobs", "1").out
    path = tmp_path / "dst" / "rank_0" / "checkpoint_0.ckpt"
    flip_bits(path, -100)
    finished = run_here("audit", tmp_path / "dst", "--jobs", "1")
    assert finished.code == WRONG and "error: sum" in finished.out and "'w' is damaged" in finished.out


def tensor_of(random: np.random.Generator, *shape: int, value: float | None = None) -> torch_peer.Tensor:
    """Return a tensor of float32 as torch has it, of drawn values or of one."""
    array = random.standard_normal(shape) if value is None else np.full(shape, value)
    return torch_peer.tensor(sample("", array.astype(np.float32)), str(random.integers(1 << 30)))


@pytest.mark.parametrize("is_tensor", [True, False], ids=["a tensor", "a value"])
@pytest.mark.parametrize("form", ["numbers", "param_names", "names"])
def test_a_count_of_steps_is_state(tmp_path: Path, form: str, is_tensor: bool) -> None:
    """A parameter without kin that has kept it alone has lost its moments; one without any state may have none yet."""
    drawn = partial(tensor_of, np.random.default_rng(0))
    rows = {**{f"layers.{layer}.w": 4 for layer in range(3)}, "head.w": 5, "out.w": 6}
    model = {name: drawn(count, 4) for name, count in rows.items()}
    state: dict[Any, dict[str, Any]] = {
        name if form == "names" else number: {
            "step": drawn(value=5) if is_tensor else 5,
            **({} if name == "head.w" else {key: drawn(count, 4) for key in ("exp_avg", "exp_avg_sq")}),
        }
        for number, (name, count) in enumerate(rows.items())
        if name != "out.w"
    }
    names = {"param_names": [*model]} if form == "param_names" else {}
    groups = [{"lr": 0.1, "params": [*model] if form == "names" else [*range(len(model))], **names}]
    torch_peer.save(tmp_path / "a.pt", {"model": model, "optimizer": {"state": state, "param_groups": groups}})
    assert audited(tmp_path / "a.pt") == {("moments", "model.head.w")}


@pytest.mark.parametrize("is_tensor", [True, False], ids=["a tensor", "a value"])
@pytest.mark.parametrize("lacking", ["layers.1.w", "head.w"])
def test_a_parameter_with_moments_and_no_count_of_steps(tmp_path: Path, lacking: str, is_tensor: bool) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    model = {name: drawn(4, 3) for name in ("layers.0.w", "layers.1.w", "layers.2.w", "head.w")}
    state: dict[str, dict[str, Any]] = {
        name: {"step": drawn(value=5) if is_tensor else 5, "exp_avg": drawn(4, 3)} for name in model
    }
    del state[lacking]["step"]
    groups = [{"lr": 0.1, "params": [*model]}]
    torch_peer.save(tmp_path / "a.pt", {"model": model, "optimizer": {"state": state, "param_groups": groups}})
    assert audited(tmp_path / "a.pt") == {("moments", f"model.{lacking}")}


@pytest.mark.parametrize("are_named", [True, False])
def test_a_moment_of_another_shape_is_an_error_by_numbers_too(tmp_path: Path, are_named: bool) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    model = {f"layers.{layer}.w": drawn(6, 4) for layer in range(4)}
    state: dict[int, dict[str, Any]] = {
        number: {"step": drawn(value=5), "exp_avg": drawn(6 + (number == 2), 4), "exp_avg_sq": drawn(6, 4)}
        for number in range(4)
    }
    del state[3]["exp_avg_sq"]
    group = {"lr": 0.1, "params": [*range(4)], **({"param_names": [*model]} if are_named else {})}
    torch_peer.save(tmp_path / "a.pt", {"model": model, "optimizer": {"state": state, "param_groups": [group]}})
    assert audited(tmp_path / "a.pt") == {("moments", "optimizer.state.2.exp_avg"), ("moments", "model.layers.3.w")}


def test_state_by_numbers_is_its_parameters(tmp_path: Path) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    model = {f"layers.{layer}.w": drawn(4, 3 + layer) for layer in range(3)}
    state: dict[int, dict[str, Any]] = {
        number: {"step": drawn(value=5), "exp_avg": drawn(4, 3 + number), "exp_avg_sq": drawn(4, 3 + number)}
        for number in range(3)
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    torch_peer.save(tmp_path / "sound.pt", {"model": model, "optimizer": optimizer})
    assert audited(tmp_path / "sound.pt") == set()
    del state[1]["exp_avg"]
    torch_peer.save(tmp_path / "lacking.pt", {"model": model, "optimizer": optimizer})
    assert audited(tmp_path / "lacking.pt") == {("moments", "model.layers.1.w")}
    state[1]["exp_avg"], state[2]["step"] = drawn(4, 4), drawn(value=4)
    torch_peer.save(tmp_path / "steps.pt", {"model": model, "optimizer": optimizer})
    assert audited(tmp_path / "steps.pt") == {("step", "optimizer.state.2.step")}
    for number, kept in state.items():
        kept["step"] = 5 + (number == 1)
    torch_peer.save(tmp_path / "values.pt", {"model": model, "optimizer": optimizer})
    assert audited(tmp_path / "values.pt") == {("step", "optimizer.state.1.step")}


@pytest.mark.parametrize("is_tensor", [True, False], ids=["a tensor", "a value"])
def test_an_optimizer_that_keeps_counts_alone_is_sound_beside_another(tmp_path: Path, is_tensor: bool) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    names = [*(f"layers.{layer}.w" for layer in range(6)), "head.w"]
    step = partial(drawn, value=5) if is_tensor else lambda: 5
    adam = {name: {"step": step(), "exp_avg": drawn(4, 4), "exp_avg_sq": drawn(4, 4)} for name in names[:5]}
    plain = {name: {"step": step()} for name in names[5:]}
    optimizers = {
        key: {"state": state, "param_groups": [{"lr": 0.1, "params": [*state]}]}
        for key, state in (("optimizer", adam), ("plain", plain))
    }
    model = {name: drawn(4, 4) for name in names}
    torch_peer.save(tmp_path / "sound.pt", {"model": model, **optimizers})
    assert audited(tmp_path / "sound.pt") == set()
    del adam[names[0]]["exp_avg"], adam[names[0]]["exp_avg_sq"]
    torch_peer.save(tmp_path / "lacking.pt", {"model": model, **optimizers})
    assert audited(tmp_path / "lacking.pt") == {("moments", f"model.{names[0]}")}


@pytest.mark.parametrize("start", few(1, [0.0, 0.1]))
@pytest.mark.parametrize("as_values", [False, True], ids=["tensors", "values"])
@pytest.mark.parametrize("key", ["optimizer", "optimizer_state_dict"])
def test_state_that_adagrad_makes_with_itself(tmp_path: Path, key: str, start: float, as_values: bool) -> None:
    """Of parameters that are frozen, or have no gradient. start: Adagrad's initial_accumulator_value."""
    drawn = partial(tensor_of, np.random.default_rng(0))
    model = {f"layers.{layer}.w": drawn(4, 3) for layer in range(4)}
    state: dict[int, dict[str, Any]] = {
        number: {"step": 5 if as_values else drawn(value=5), "sum": drawn(4, 3)} for number in range(4)
    }
    state[1] = {"step": 0 if as_values else drawn(value=0), "sum": drawn(4, 3, value=start)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    torch_peer.save(tmp_path / "sound.pt", {"model": model, key: optimizer})
    assert audited(tmp_path / "sound.pt") == set()
    state[2] |= {"step": 0 if as_values else drawn(value=0)}
    torch_peer.save(tmp_path / "step.pt", {"model": model, key: optimizer})
    assert audited(tmp_path / "step.pt") == {("step", f"{key}.state.2.step")}


@pytest.mark.parametrize("key", few(1, ["model", "net"]))
def test_a_parameter_whose_name_is_the_whole_name_of_another(tmp_path: Path, key: str) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    shapes = {"fc.w": (2, 3), f"{key}.fc.w": (4, 3), "z.w": (5, 3)}
    state = {name: {"step": drawn(value=7), "exp_avg": drawn(*shape)} for name, shape in shapes.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [*shapes]}]}
    saved = {key: {name: drawn(*shape) for name, shape in shapes.items()}, "optimizer": optimizer}
    torch_peer.save(tmp_path / "sound.pt", saved)
    assert audited(tmp_path / "sound.pt") == set()
    state["fc.w"]["step"] = drawn(value=3)
    del state[f"{key}.fc.w"]["exp_avg"]
    torch_peer.save(tmp_path / "spoiled.pt", saved)
    found = audited(tmp_path / "spoiled.pt")
    assert found == {("step", "optimizer.state.fc.w.step"), ("moments", f"{key}.{key}.fc.w")}


def test_state_of_two_models_with_the_same_names_is_not_held_against_one_of_them(tmp_path: Path) -> None:
    drawn = partial(tensor_of, np.random.default_rng(0))
    models = {"gen": {"a": (2, 3), "b": (4, 3), "c": (5, 3)}, "disc": {"a": (3, 2), "b": (3, 3)}}
    saved: dict[str, Any] = {key: {name: drawn(*shape) for name, shape in own.items()} for key, own in models.items()}
    for key, own in models.items():
        state = {name: {"step": 7, "exp_avg": drawn(*shape)} for name, shape in own.items()}
        saved[f"opt_{key}"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [*own]}]}
    torch_peer.save(tmp_path / "sound.pt", saved)
    assert audited(tmp_path / "sound.pt") == set()


def test_what_lies_beside_tensors_is_looked_at(tmp_path: Path) -> None:
    """A text that cannot be read any more says how tensors are nested; to leave some out, it has to be read."""
    torch_peer.save(tmp_path / "x.pt", two_optimizers(are_apart=True))
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "made", to="safetensors")
    path = tmp_path / "spoiled.safetensors"
    content = (tmp_path / "made/rank_0/checkpoint_0.safetensors").read_bytes()
    path.write_bytes(content.replace(rb"\"dict\"", rb"\"dict!!", 1))
    assert path.read_bytes() != content and audited(path) == {("structure", "")}
    complaint = refused("transform", path, tmp_path / "dst", "--exclude", "*.momentum_buffer")
    assert "how the tensors of a file are nested cannot be read" in complaint


def two_optimizers(*, are_apart: bool, layers: int = 3) -> dict[str, Any]:
    """Return a training whose matrices Muon trains, and Adam the vectors and the head, which has done more steps."""
    drawn = partial(tensor_of, np.random.default_rng(1))
    shapes = {f"layers.{layer}.{part}.w": (4, 3) for layer in range(layers) for part in ("q", "k")}
    shapes |= {f"layers.{layer}.norm.w": (4,) for layer in range(layers)} | {"head.w": (5, 4)}
    muon = {
        name: {"step": 4, "momentum_buffer": drawn(*shape)} for name, shape in shapes.items() if ".norm." not in name
    }
    del muon["head.w"]
    adam = {name: {"step": 9, "exp_avg": drawn(*shape)} for name, shape in shapes.items() if name not in muon}
    optimizers = [{"state": state, "param_groups": [{"lr": 0.1, "params": [*state]}]} for state in (muon, adam)]
    if not are_apart:
        for state in (muon, adam):
            for own in state.values():
                own["step"] = 9
        groups = [group for each in optimizers for group in each["param_groups"]]
        optimizers = [{"state": muon | adam, "param_groups": groups}]
    return {"model": {name: drawn(*shape) for name, shape in shapes.items()}, "optimizers": optimizers}


@pytest.mark.parametrize("are_apart", [True, False])
def test_parameters_of_two_optimizers_do_not_lack_state_of_the_other_one(tmp_path: Path, are_apart: bool) -> None:
    training = two_optimizers(are_apart=are_apart)
    torch_peer.save(tmp_path / "sound.pt", training)
    assert audited(tmp_path / "sound.pt") == set()
    muon, adam = (training["optimizers"][number]["state"] for number in (0, -1))
    del muon["layers.1.q.w"]["momentum_buffer"], adam["layers.2.norm.w"]
    torch_peer.save(tmp_path / "lacking.pt", training)
    assert audited(tmp_path / "lacking.pt") == {("moments", "model.layers.1.q.w"), ("moments", "model.layers.2.norm.w")}
    training = two_optimizers(are_apart=are_apart)
    number = -1 if are_apart else 0
    training["optimizers"][number]["state"]["head.w"]["step"] = 4
    torch_peer.save(tmp_path / "steps.pt", training)
    place = len(training["optimizers"]) - 1
    assert audited(tmp_path / "steps.pt") == {("step", f"optimizers.{place}.state.head.w.step")}


def test_parameters_in_no_group_of_the_optimizer_lack_no_state(tmp_path: Path) -> None:
    """The lowest layer of four is frozen, as in many a fine-tuning."""
    training = two_optimizers(are_apart=True, layers=4)
    muon, adam = (each["state"] for each in training["optimizers"])
    for state, name in ((muon, "layers.0.q.w"), (muon, "layers.0.k.w"), (adam, "layers.0.norm.w")):
        del state[name]
    torch_peer.save(tmp_path / "in_groups.pt", training)
    lacking = {("moments", f"model.layers.0.{part}.w") for part in ("q", "k", "norm")}
    assert audited(tmp_path / "in_groups.pt") == lacking
    for optimizer in training["optimizers"]:
        optimizer["param_groups"][0]["params"] = [*optimizer["state"]]
    torch_peer.save(tmp_path / "frozen.pt", training)
    assert audited(tmp_path / "frozen.pt") == set()


def test_names_of_mindspore_tell_whose_state_a_tensor_is(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    names = [f"net.layers.{layer}.weight" for layer in range(4)]
    made = {name: random.standard_normal((4, 3)).astype(np.float32) for name in names}
    for kind in ("adam_m", "adam_v"):
        made |= {f"{kind}.{name}": random.standard_normal((4, 3)).astype(np.float32) for name in names}
    made |= {"global_step": np.array(7, np.int32), "learning_rate": np.array(0.1, np.float32)}
    write_ranks({0: made}, tmp_path / "sound")
    assert audited(tmp_path / "sound") == set()
    steps = {f"step.{name}": np.array(7 - (name == names[2]), np.int64) for name in names}
    write_ranks({0: made | steps}, tmp_path / "steps")
    assert audited(tmp_path / "steps") == {("step", f"step.{names[2]}")}
    del made[f"adam_v.{names[1]}"], made[f"adam_m.{names[2]}"], made[f"adam_v.{names[2]}"]
    made[f"adam_m.{names[3]}"] = made[f"adam_m.{names[3]}"].T.copy()
    write_ranks({0: made}, tmp_path / "spoiled")
    expected = {("moments", names[1]), ("moments", names[2]), ("moments", f"adam_m.{names[3]}")}
    assert audited(tmp_path / "spoiled") == expected


def test_steps_of_an_optimizer_that_names_no_state(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    names = [f"layers.{layer}.w" for layer in range(3)]
    made = {name: random.standard_normal((4, 3)).astype(np.float32) for name in names}
    made |= {f"optimizer.{name}.exp_avg": random.standard_normal((4, 3)).astype(np.float32) for name in names}
    made |= {f"optimizer.{name}.step": np.array(5, np.int32) for name in names}
    write_ranks({0: made}, tmp_path / "sound")
    assert audited(tmp_path / "sound") == set()
    made[f"optimizer.{names[1]}.step"] = np.array(4, np.int32)
    write_ranks({0: made}, tmp_path / "spoiled")
    assert audited(tmp_path / "spoiled") == {("step", f"optimizer.{names[1]}.step")}


@pytest.mark.parametrize("jobs", few(1, ["1", "2"]))
def test_many_findings_fit_on_a_screen(jobs: str, tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.{'x' * 3}\x1b[2J\u202e.w": np.zeros((3, 2), np.float32) for layer in range(60)}
    tensors["bad.w"] = np.full((2, 2), np.nan, np.float32)
    write_ranks({0: tensors}, tmp_path / "src")
    finished = run_here("audit", tmp_path / "src", "--jobs", jobs)
    lines = finished.out.splitlines()
    assert finished.code == WRONG and len(lines) <= 24 and lines[0].startswith("error: nan 'bad.w'")
    assert "41 more" in lines[-2] and "60 zero" in lines[-2]
    assert finished.out.isprintable() or ("\x1b" not in finished.out and "\u202e" not in finished.out)
    everything = run_here("audit", tmp_path / "src", "--jobs", jobs, "-v")
    assert len([line for line in everything.out.splitlines() if "error: zero" in line]) == 60
    report = reshard_mpi.audit(tmp_path / "src", jobs=int(jobs))
    assert len(report.findings) == len(report.errors) == 61 and not report.is_sound()
    assert reshard_mpi.audit(tmp_path / "src", allow=["layers.*", "bad.*"]).is_sound(strict=True)


@few_cases(
    1,
    ("config", "said"),
    [
        ({**CONFIG, "architectures": ["\x1b[31mOther"]}, "no such architecture"),
        ({**CONFIG, "architectures": ["Other"], "auto_map": {"AutoModel": "code.py"}}, "never run"),
        ({**CONFIG, "architectures": ["PicklyForCausalLM"]}, "these settings"),
        ({**CONFIG, "quantization_config": {"bits": 8}}, "quantized"),
    ],
)
def test_configurations_that_tell_nothing(config: object, said: str, tmp_path: Path, stand_ins: Path) -> None:
    folder = save(tmp_path / "src", weights(), config=config)
    beside = done("audit", folder, "--jobs", "1")
    assert said in beside.err and "\x1b" not in beside.err
    complaint = refused("audit", folder, "--config", folder, "--jobs", "1")
    assert said in complaint and "\x1b" not in complaint


def test_a_configuration_of_another_model(tmp_path: Path, stand_ins: Path) -> None:
    other = save(tmp_path / "other", {"conv.w": weights()[EXPERT]}, config=CONFIG)
    assert audited(other) == {("missing", "")}
    complaint = refused("audit", other, "--config", other, "--jobs", "1")
    assert "TinyMoeForCausalLM" in complaint and "'conv.w'" in complaint
    (tmp_path / "list.json").write_text("[1]")
    for path in (tmp_path / "nowhere", tmp_path / "list.json", tmp_path):
        refused("audit", other, "--config", path, "--jobs", "1", code=UsageError.exit_code)


def test_without_transformers_one_sentence_says_what_to_install(tmp_path: Path, stand_ins: Path) -> None:
    (stand_ins / "torch.py").write_text("raise ImportError('no torch here')")
    folder = save(tmp_path / "src", weights(), config=CONFIG)
    (note,) = [line for line in done("audit", folder, "--jobs", "1").err.splitlines() if line.startswith("note")]
    assert "pip install transformers torch" in note and "config.json" in note
    complaint = refused("audit", folder, "--config", folder, "--jobs", "1", code=UsageError.exit_code)
    assert "no torch here" in complaint and "pip install transformers torch" in complaint


@by_one_mpi
def test_mpi_ranks_share_the_work(tmp_path: Path, mpi: MPI) -> None:
    tensors = weights()
    tensors[EXPERT][2, 2] = np.inf
    folder = save(tmp_path / "src", tensors)
    finished = run_apart("audit", folder, mpi=mpi)
    assert finished.code == WRONG
    assert f"error: infinite '{EXPERT}': 1 of 48 values is infinite, the first bad one at [2, 2]" in finished.out


def test_accumulated_gradients_that_no_strategy_lists(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((3, 4, 4), np.float32)
    tensors = dict(zip(("a", "accu_grads.a", "b"), values))
    write_ranks(dict.fromkeys(range(2), tensors), tmp_path / "src", "safetensors")
    (tmp_path / "one.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "b"\n')
    finished = run_here("audit", tmp_path / "src", "--src-strategy", tmp_path / "one.toml")
    assert finished.code == 4 and ": 1 error, 0 notes" in finished.out, finished
    assert "the source strategy does not place 'accu_grads.a'" in finished.out
