"""What maps and options do to whole checkpoints, one thing at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import read_shard, write_ranks, write_shard
from support.command_line import done, run_here
from support.examples import few
from support.full_checkpoints import assert_held, floats, held, map_of, source_of

import reshard_mpi
from reshard_mpi import DamageError, DifferenceError, MapError, TargetError

JOINED = "[[map]]\neq = 'l.{n}.gate [f h], l.{n}.up [f h] <=> l.{n}.both [h (f + f)]'\n"


# What MindSpore's optimizers put before the names of parameters; Ftrl's `linear` is too common a name of layers.
OF_MINDSPORE = (
    *("accu_grads", "accum", "accum_update", "adam_m", "adam_v", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "lamb_m"),
    *("lamb_v", "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1", "moment2", "momentum_buf"),
    *("moments", "prev", "stat", "step_size", "vhat"),
)


@pytest.mark.parametrize("around", few(1, ["optimizer.state.{}.exp_avg", *(f"{word}.{{}}" for word in OF_MINDSPORE)]))
def test_state_follows_its_parameter(tmp_path: Path, around: str) -> None:
    tensors = {"l.0.gate": floats(3, 2), "l.0.up": floats(3, 2, first=10), "other": floats(2)}
    state = {around.format(name): array + 100 for name, array in tensors.items()}
    joined = np.concatenate([tensors["l.0.gate"], tensors["l.0.up"]]).T
    source, map_path = source_of(tmp_path, tensors | state), map_of(tmp_path, JOINED)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    expected = {"l.0.both": joined, "other": tensors["other"]}
    assert_held(tmp_path / "dst", expected | {around.format(name): array + 100 for name, array in expected.items()})
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=map_path)
    assert_held(tmp_path / "back", tensors | state)


def test_a_state_that_only_some_of_the_parameters_have_is_refused(tmp_path: Path) -> None:
    tensors = {"l.0.gate": floats(3, 2), "l.0.up": floats(3, 2), "moments.l.0.gate": floats(3, 2)}
    with pytest.raises(MapError, match="a state that others have not") as error:
        reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, JOINED))
    assert "moments.l.0.up" in str(error.value)


def test_state_follows_where_others_of_its_equation_have_none(tmp_path: Path) -> None:
    """As with a BatchNorm: its running mean stands in the equation of its weight, and has no state."""
    tensors = {"norm.weight": floats(3), "norm.running_mean": floats(3, first=10)}
    state = {"moments.norm.weight": floats(3, first=20), "state.norm.weight.step": np.array(7, np.float32)}
    equation = "{p*}.weight [c], {p*}.running_mean [c] <=> {p*}.gamma [c], {p*}.moving_mean [c]"
    source = source_of(tmp_path, tensors | state)
    map_path = map_of(tmp_path, f'[[map]]\neq = "{equation}"\noptional = true\n')
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    expected = {"norm.gamma": tensors["norm.weight"], "norm.moving_mean": tensors["norm.running_mean"]}
    expected |= {
        "moments.norm.gamma": state["moments.norm.weight"],
        "state.norm.gamma.step": state["state.norm.weight.step"],
    }
    assert_held(tmp_path / "dst", expected)
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=map_path)
    assert_held(tmp_path / "back", tensors | state)


def test_a_counter_of_each_parameter_becomes_one_if_all_are_the_same(tmp_path: Path) -> None:
    tensors = {"l.0.gate": floats(3, 2), "l.0.up": floats(3, 2)}
    counters = {f"state.{name}.step": np.array(7, np.float32) for name in tensors}
    reshard_mpi.transform(source_of(tmp_path, tensors | counters), tmp_path / "dst", map=map_of(tmp_path, JOINED))
    assert held(tmp_path / "dst")["state.l.0.both.step"] == 7
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=tmp_path / "map.toml")
    assert_held(tmp_path / "back", tensors | counters)
    counters["state.l.0.up.step"] = np.array(8, np.float32)
    (tmp_path / "other").mkdir()
    with pytest.raises(MapError, match="they differ"):
        reshard_mpi.transform(
            source_of(tmp_path / "other", tensors | counters), tmp_path / "dst2", map=tmp_path / "map.toml"
        )


@pytest.mark.parametrize(("begin", "capture", "dtype"), [("", "", np.float64), ("net.", "{p*}.", np.float32)])
def test_a_state_keeps_its_type(tmp_path: Path, begin: str, capture: str, dtype: type) -> None:
    """Also where the same equation takes both."""
    tensors = {f"{begin}w": floats(3, 2), f"moments.{begin}w": floats(3, 2).astype(dtype)}
    text = f"[[map]]\neq = '{capture}w [a b] <=> {capture}v [b a] : bf16'"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text))
    weight, moment = (array.T for array in tensors.values())
    assert_held(tmp_path / "dst", {f"{begin}v": weight.astype(ml_dtypes.bfloat16), f"moments.{begin}v": moment})


def test_a_type_that_the_target_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": floats(3, 2)})
    with pytest.raises(reshard_mpi.ReshardError, match="w") as error:
        reshard_mpi.transform(source, tmp_path / "dst", dtype="fp8_e4m3", to="ckpt")
    assert error.value.exit_code == 3 and not (tmp_path / "dst").exists()


def test_one_tensor_for_two_and_back(tmp_path: Path) -> None:
    tensors = {"embed": floats(5, 2)}
    text = "[[map]]\ncopy = true\neq = 'embed [v h] <=> input [v h], output [v h]'"
    map_path = map_of(tmp_path, text)
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path)
    assert_held(tmp_path / "dst", {"input": tensors["embed"], "output": tensors["embed"]})
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=map_path)
    assert_held(tmp_path / "back", tensors)


NORMS = """
[[map]]
eq = "{p*}.weight [c], {p*}.mean [c] <=> {p*}.gamma [c], {p*}.moving_mean [c]"
optional = true
[[map]]
drop = "*.batches"
[[map]]
fill = { name = "{p*}.batches", shape = [], type = "int64", beside = "{p*}.mean" }
side = "left"
"""


def test_what_is_left_out_and_made_up(tmp_path: Path) -> None:
    tensors = {"bn.weight": floats(3), "bn.mean": floats(3), "bn.batches": np.array(0, np.int64), "fc": floats(2, 2)}
    map_path = map_of(tmp_path, NORMS)
    source = source_of(tmp_path, tensors)
    assert "left out: bn.batches" in done("transform", f"{source}", f"{tmp_path}/dst", "--map", f"{map_path}").err
    assert_held(tmp_path / "dst", {"bn.gamma": floats(3), "bn.moving_mean": floats(3), "fc": floats(2, 2)})
    finished = done("transform", f"{tmp_path}/dst", f"{tmp_path}/back", "--map", f"{map_path}")
    assert "made up: bn.batches" in finished.err
    assert_held(tmp_path / "back", tensors)


def test_padding_that_was_trained_is_dropped_only_where_that_is_said(tmp_path: Path) -> None:
    text = "[axes]\nv = 5\n[[map]]\neq = 'e [v h] <=> w [(v | 4) h]'\n"
    trained = {"w": floats(8, 2)}
    source = source_of(tmp_path, trained)
    finished = run_here("transform", f"{source}", f"{tmp_path}/dst", "--map", f"{map_of(tmp_path, text)}")
    assert finished.code == 3 and "the padding of w is not zero" in finished.err and 'pads = "drop"' in finished.err
    assert not (tmp_path / "dst").exists()
    map_path = map_of(tmp_path, text + "pads = 'drop'")
    finished = done("transform", f"{source}", f"{tmp_path}/dst", "--map", f"{map_path}")
    assert "6 elements of padding are dropped" in finished.err
    assert_held(tmp_path / "dst", {"e": trained["w"][:5]})


def test_axes_from_the_configuration_of_a_model(tmp_path: Path) -> None:
    tensors = {"q": floats(12, 2), "k": floats(4, 2, first=100)}
    text = "[axes]\nr = 'heads / groups'\ng = 'groups'\n"
    text += "[[map]]\neq = 'q [(g r d) h], k [(g d) h] <=> qk [(g (r d + d)) h]'"
    (tmp_path / "config.json").write_text(json.dumps({"heads": 6, "groups": 2}))
    reshard_mpi.transform(
        source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text), config=tmp_path / "config.json"
    )
    grouped = [np.concatenate([tensors["q"][6 * g : 6 * g + 6], tensors["k"][2 * g : 2 * g + 2]]) for g in range(2)]
    assert_held(tmp_path / "dst", {"qk": np.concatenate(grouped)})


def test_types_by_name_and_tensors_by_name(tmp_path: Path) -> None:
    tensors = {"w": floats(3), "b": floats(3), "moments.w": floats(3), "step": np.array([3], np.int32)}
    source = source_of(tmp_path, tensors)
    reshard_mpi.transform(source, tmp_path / "dst", dtype=["bf16", "moments.*=fp64"], exclude="b")
    expected = {
        "w": tensors["w"].astype(ml_dtypes.bfloat16),
        "moments.w": tensors["w"].astype(np.float64),
        "step": tensors["step"],
    }
    assert_held(tmp_path / "dst", expected)
    loaded = reshard_mpi.load_rank(0, source, include=["w", "b"], exclude=["b"], dtype="fp16")
    assert list(loaded) == ["w"] and loaded["w"].dtype == np.float16


def test_it_goes_on_only_with_the_same_map(tmp_path: Path) -> None:
    source, map_path = source_of(tmp_path, {"w": floats(3, 2)}), map_of(tmp_path, "[[map]]\neq = 'w [a b] <=> v [b a]'")
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    assert reshard_mpi.transform(source, tmp_path / "dst", map=map_path, resume=True).targets[0].skipped
    map_path.write_text("[[map]]\neq = 'w [a b] <=> u [b a]'")
    with pytest.raises(TargetError, match="as it is now") as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_path, resume=True)
    assert "as it was then" in str(error.value)
    with pytest.raises(TargetError, match="a run with --dtype 'fp16'"):
        reshard_mpi.transform(source, tmp_path / "dst", map=map_path, dtype="fp16", resume=True)


def test_what_has_changed_since_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": floats(4, 6), "z": floats(2)})
    text = "[axes]\nx = 'q'\n[[map]]\neq = 'w [(x a) b] <=> k [(a x) b]'\n"
    config, like = tmp_path / "config.json", tmp_path / "like.ckpt"
    config.write_text('{"q": 2}')
    write_shard({"k": floats(4, 6), "z": floats(2)}, like)
    given: dict[str, Any] = {"map": map_of(tmp_path, text), "config": config, "like": like}
    reshard_mpi.transform(source, tmp_path / "dst", **given)

    def refused(**options: object) -> str:
        with pytest.raises(TargetError, match="the target folder holds another run") as error:
            reshard_mpi.transform(source, tmp_path / "dst", resume=True, **(given | options))
        return str(error.value)

    message = refused(forward=True)
    assert "a run with --forward\n" in message and "a run with neither --forward nor --reverse\n" in message
    message = refused(config=None, map=map_of(tmp_path, text.replace("'q'", "2")))
    assert "no --config" in message and f"--config {config}" in message and "--map " in message
    map_of(tmp_path, text)
    config.write_text('{"q": 4}')
    message = refused()
    assert f"config {config} as it is now" in message and "as it was then" in message and "map " not in message
    config.write_text('{"q": 2}')
    write_shard({"z": floats(2), "k": floats(4, 6)}, like)
    message = refused()
    assert f"like {like} as it is now" in message and "map " not in message and "config " not in message


def test_verify_and_diff_go_through_the_map(tmp_path: Path) -> None:
    source, map_path = source_of(tmp_path, {"w": floats(3, 2)}), map_of(tmp_path, "[[map]]\neq = 'w [a b] <=> v [b a]'")
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, to="hdf5")
    reshard_mpi.verify(source, tmp_path / "dst", map=map_path)
    reshard_mpi.diff(source, tmp_path / "dst", map=map_path)
    reshard_mpi.verify(source, tmp_path / "dst")  # the record says what it was made with
    shutil.copytree(tmp_path / "dst", tmp_path / "bare", ignore=lambda *_: [".reshard_mpi", "reshard.json"])
    with pytest.raises(DamageError, match="give the options it was made with"):
        reshard_mpi.verify(source, tmp_path / "bare")
    with pytest.raises(DifferenceError):
        reshard_mpi.diff(source, tmp_path / "dst")
    wrong = {"w": floats(3, 2)}
    wrong["w"][2, 0] = 77
    (tmp_path / "other").mkdir()
    with pytest.raises(DifferenceError, match=r"'v' differs at element \[0, 2\]"):
        reshard_mpi.diff(source_of(tmp_path / "other", wrong), tmp_path / "dst", map=map_path)


def test_verify_and_diff_look_at_what_a_map_takes_for_equal(tmp_path: Path) -> None:
    """Else the tensor that is not taken could hold anything."""
    text = "[axes]\nv = 3\n[[map]]\ncopy = true\neq = 'e [v h] <=> a [(v | 4) h], b [(v | 4) h]'"
    map_path, sound = map_of(tmp_path, text), np.pad(floats(3, 2, first=1), ((0, 1), (0, 0)))
    reshard_mpi.transform(source_of(tmp_path, {"a": sound, "b": sound}), tmp_path / "dst", map=map_path)
    for name, damaged in (("other", sound + 1), ("padding", np.where(sound == 0, 5, sound))):
        (tmp_path / name).mkdir()
        tensors = {"a": sound if name == "other" else damaged, "b": damaged}
        source = source_of(tmp_path / name, tensors)
        says = "they differ" if name == "other" else "is not zero"
        for compare in (reshard_mpi.verify, reshard_mpi.diff):
            with pytest.raises(MapError, match=says):
                compare(source, tmp_path / "dst", map=map_path)


def test_what_cannot_be_carried_is_said_with_a_map_too(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "formats" / "golden" / "torch" / "plain.pt"
    finished = done("transform", f"{source}", f"{tmp_path}/dst", "--to", "hdf5", "--dtype", "fp64")
    assert "left out of" in finished.err and "my_project.config.Config" in finished.err
    finished = run_here("transform", f"{source}", f"{tmp_path}/all", "--to", "hdf5", "--dtype", "fp64", "--strict")
    assert finished.code == 3 and not (tmp_path / "all").exists()


def test_the_plan_says_what_each_tensor_is_made_of(tmp_path: Path) -> None:
    tensors = {"l.0.gate": floats(3, 2), "l.0.up": floats(3, 2), "other": floats(2), "more": floats(2)}
    source, map_path = source_of(tmp_path, tensors), map_of(tmp_path, JOINED)
    options = ["--map", f"{map_path}", "--exclude", "more", "--dtype", "l.*=fp16", "-v"]
    finished = run_here("plan", f"{source}", f"{tmp_path}/dst", *options)
    assert "l.0.both float16 [2, 6]: l.0.gate, l.0.up, by" in finished.out
    assert "line 1, [[map]] 1, converted from float32" in finished.out
    assert "other float32 [2]: as it is" in finished.out and "more: left out" in finished.out
    shown = json.loads(run_here("plan", f"{source}", f"{tmp_path}/dst", *options, "--json").out)
    assert len(shown["tensors"]) == 3 and not (tmp_path / "dst").exists()


@pytest.mark.parametrize("jobs", few(1, [1, 2]))
def test_lost_copies_and_several_processes(tmp_path: Path, jobs: int) -> None:
    """Two of four ranks hold the same; one shard of each pair is lost."""
    tensors = {"l.0.gate": floats(8, 4), "l.0.up": floats(8, 4, first=50), "moments.l.0.gate": floats(8, 4)}
    tensors["moments.l.0.up"] = floats(8, 4, first=9)
    spec = '[mesh]\ndp = 2\ntp = 2\n[[parameter]]\nmatch = "l.*"\nsplit = { 0 = ["tp"] }\n'
    (tmp_path / "src.toml").write_text(spec)
    shards = {rank: {name: np.split(array, 2)[rank % 2] for name, array in tensors.items()} for rank in range(4)}
    write_ranks(shards, tmp_path / "src", "ckpt")
    (tmp_path / "src/rank_0/checkpoint_0.ckpt").unlink()
    (tmp_path / "src/rank_3/checkpoint_3.ckpt").write_bytes(b"damaged")
    (tmp_path / "dst.toml").write_text('[mesh]\nn = 4\n[[parameter]]\nmatch = "l.*"\nsplit = { 1 = ["n"] }\n')
    map_path = map_of(tmp_path, JOINED)
    report = reshard_mpi.transform(
        tmp_path / "src", tmp_path / "dst", tmp_path / "src.toml", tmp_path / "dst.toml", map=map_path, jobs=jobs
    )
    assert any("rank 0" in text for text in report.warnings) or report.warnings
    for around in ("{}", "moments.{}"):
        joined = np.concatenate([tensors[around.format("l.0.gate")], tensors[around.format("l.0.up")]]).T
        for rank in range(4):
            name = around.format("l.0.both")
            written = read_shard(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")[name]
            assert written == ("float32", (4, 4), np.split(joined, 4, axis=1)[rank].tobytes())


def test_parameters_of_several_stages_are_put_together(tmp_path: Path) -> None:
    layers = {f"layer.{number}.w": floats(4, 2, first=100 * number) for number in range(4)}
    spec = "stages = 2\n[mesh]\ntp = 2\n" + "".join(
        f'[[parameter]]\nmatch = "layer.{number}.w"\nsplit = {{ 0 = ["tp"] }}\nstage = {number // 2}\n'
        for number in range(4)
    )
    (tmp_path / "src.toml").write_text(spec)
    shards = {
        rank: {
            f"layer.{number}.w": np.split(layers[f"layer.{number}.w"], 2)[rank % 2]
            for number in range(4)
            if number // 2 == rank // 2
        }
        for rank in range(4)
    }
    write_ranks(shards, tmp_path / "src", "ckpt")
    (tmp_path / "dst.toml").write_text('[mesh]\nn = 2\n[[parameter]]\nmatch = "stacked"\nsplit = { 1 = ["n"] }\n')
    map_path = map_of(tmp_path, "[[map]]\neq = 'layer.{l}.w [a b] <=> stacked [l b a]'")
    reshard_mpi.transform(
        tmp_path / "src", tmp_path / "dst", tmp_path / "src.toml", tmp_path / "dst.toml", map=map_path
    )
    stacked = np.stack([array.T for array in layers.values()])
    for rank in range(2):
        written = read_shard(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")["stacked"]
        assert written == ("float32", (4, 1, 4), stacked[:, rank : rank + 1].tobytes())


def test_a_target_strategy_that_names_tensors_of_the_source_is_refused(tmp_path: Path) -> None:
    source, map_path = source_of(tmp_path, {"w": floats(4, 2)}), map_of(tmp_path, "[[map]]\neq = 'w [a b] <=> v [b a]'")
    (tmp_path / "dst.toml").write_text('[mesh]\nn = 2\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["n"] }\n')
    with pytest.raises(reshard_mpi.StrategyError, match="'w'"):
        reshard_mpi.transform(source, tmp_path / "dst", None, tmp_path / "dst.toml", map=map_path)


@pytest.mark.parametrize("to", few(1, ["hf", "dcp", "torch", "ckpt", "hdf5"]))
def test_every_form_is_written_through_a_map(tmp_path: Path, to: str) -> None:
    tensors = {"l.0.gate": floats(3, 2), "l.0.up": floats(3, 2, first=10), "other": floats(2)}
    source, map_path = source_of(tmp_path, tensors), map_of(tmp_path, JOINED)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, to=to)
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=map_path, to="safetensors")
    assert_held(tmp_path / "back", tensors)


def test_only_what_is_named_as_state_follows(tmp_path: Path) -> None:
    """Not a parameter whose name ends like that of another one, nor one whose name has the same letters in it."""
    tensors = {"0.weight": floats(3, 3), "encoder.0.weight": floats(3, 3, first=10), "w": floats(2, 3)}
    tensors |= {"weights.w": floats(2, 3, first=20), "adam_m.w": floats(2, 3, first=30)}
    text = "[[map]]\neq = '0.weight [a b] <=> 0.kernel [b a]'\n[[map]]\neq = 'w [a b] <=> kernel [b a]'"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text))
    turned = {"0.kernel": "0.weight", "kernel": "w", "adam_m.kernel": "adam_m.w"}
    expected = {name: tensors[source].T for name, source in turned.items()}
    assert_held(tmp_path / "dst", expected | {name: tensors[name] for name in ("encoder.0.weight", "weights.w")})


@pytest.mark.parametrize("begin", few(1, ["", "model.", "state_dict."]))
def test_copies_in_other_words_that_stay_are_warned_of(tmp_path: Path, begin: str) -> None:
    """As optax's `mu`, or averages: frameworks have words for what they keep of a parameter that nobody knows all."""
    tensors = {f"{begin}0.weight": floats(3, 3), f"{begin}0.bias": floats(3), f"{begin}gate": floats(3, 3)}
    tensors |= {f"mu.0.{key}": tensors[f"{begin}0.{key}"] for key in ("weight", "bias")}
    tensors |= {"mu.1.weight": floats(3, 3), "kept.0.weight": floats(2, 2), "mu.gate": floats(3, 3)}
    source = source_of(tmp_path, tensors)
    turned = f"[[map]]\neq = '{begin}{{p*}} [a b] <=> {begin}{{p*}} [b a]'"
    turned = turned.replace("{p*}", "0.weight")
    report = reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, turned), forward=True)
    (warning,) = report.warnings
    assert "(mu.0.weight)" in warning
    for number, text in enumerate((f"{begin}0.weight <=> {begin}0.kernel", f"{begin}0.bias [a] <=> {begin}0.b [a]")):
        options = {"map": map_of(tmp_path, f"[[map]]\neq = '{text}'"), "forward": True}
        assert not reshard_mpi.transform(source, tmp_path / f"dst{number}", **options).warnings
    options = {"map": map_of(tmp_path, turned), "forward": True, "exclude": "mu.*"}
    assert not reshard_mpi.transform(source, tmp_path / "without", **options).warnings


def test_a_type_for_all_leaves_counters_as_they_are(tmp_path: Path) -> None:
    """A bfloat16 cannot count to 257."""
    counters = {"optimizer.state.w.step": np.array([257], np.float32), "learning_rate": np.array(0.1, np.float32)}
    source = source_of(tmp_path, {"w": floats(3), **counters})
    reshard_mpi.transform(source, tmp_path / "dst", dtype="bf16")
    assert_held(tmp_path / "dst", {"w": floats(3).astype(ml_dtypes.bfloat16), **counters})
    reshard_mpi.transform(source, tmp_path / "named", dtype=["bf16", "*.step=fp64"])
    assert held(tmp_path / "named")["optimizer.state.w.step"].dtype == np.float64


@pytest.mark.parametrize("name", ["step.a", "state_step.a"])
def test_a_type_for_all_leaves_counts_of_parameters_as_they_are(tmp_path: Path, name: str) -> None:
    """16 bit would round them."""
    tensors = {"a": floats(2), name: np.array([100_001], np.float32)}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", dtype="bf16")
    assert_held(tmp_path / "dst", tensors | {"a": tensors["a"].astype(ml_dtypes.bfloat16)})


def test_what_is_made_up_is_chosen_and_typed_like_the_rest(tmp_path: Path) -> None:
    text = "[[map]]\neq = '{p*}.mean [c] <=> {p*}.moving_mean [c]'\n"
    text += "[[map]]\nfill = { name = '{p*}.gamma', value = 1, beside = '{p*}.moving_mean' }\n"
    source, map_path = source_of(tmp_path, {"bn.mean": floats(3)}), map_of(tmp_path, text)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, dtype="bf16")
    ones = np.ones(3, ml_dtypes.bfloat16)
    assert_held(tmp_path / "dst", {"bn.gamma": ones, "bn.moving_mean": floats(3).astype(ml_dtypes.bfloat16)})
    reshard_mpi.transform(source, tmp_path / "without", map=map_path, exclude="*.gamma")
    assert_held(tmp_path / "without", {"bn.moving_mean": floats(3)})


def test_state_belongs_to_the_parameter_of_the_longest_name(tmp_path: Path) -> None:
    tensors = {"w": floats(2, 3), "x.w": floats(4, 5), "opt.optimizer.x.w.step": np.array(7, np.float32)}
    text = "[[map]]\neq = 'w [a b] <=> k [b a]'"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text))
    assert_held(tmp_path / "dst", {"k": tensors["w"].T, **{name: tensors[name] for name in list(tensors)[1:]}})


def test_counts_of_parameters_of_one_element_stay_one(tmp_path: Path) -> None:
    tensors = {"a": floats(1), "b": floats(1, first=5)}
    counts = {f"state.{name}.step": np.array([7], np.float32) for name in tensors}
    text = "[[map]]\neq = 'a [x], b [x] <=> c [(x + x)]'"
    reshard_mpi.transform(source_of(tmp_path, tensors | counts), tmp_path / "dst", map=map_of(tmp_path, text))
    expected = {"c": np.array([0, 5], np.float32), "state.c.step": np.array([7], np.float32)}
    assert_held(tmp_path / "dst", expected)


def test_nothing_is_made_up_beside_state(tmp_path: Path) -> None:
    tensors = {"bn.mean": floats(3), "moments.bn.mean": floats(3)}
    text = "[[map]]\neq = '{p*}.mean [c] <=> {p*}.moving [c]'\n"
    text += "[[map]]\nfill = { name = '{p*}.count', shape = [], type = 'int64', beside = '{p*}.moving' }"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text))
    assert held(tmp_path / "dst").keys() == {"bn.moving", "moments.bn.moving", "bn.count"}


@pytest.mark.parametrize("options", few(1, [{"dtype": "fp64"}, {"include": ["w", "rng"]}, {"exclude": "b"}]))
def test_what_each_rank_has_for_itself_is_not_replaced_in_silence(tmp_path: Path, options: dict[str, Any]) -> None:
    shards = {rank: {"w": floats(2, 4), "b": floats(2), "rng": np.array([rank, 7], np.int64)} for rank in range(2)}
    write_ranks(shards, tmp_path / "src", "ckpt")
    spec = '[mesh]\nm = 2\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["m"] }\n[[parameter]]\nmatch = "b"\n'
    spec += "optional = true\n"
    (tmp_path / "spec.toml").write_text(spec)
    strategies = tmp_path / "spec.toml", tmp_path / "spec.toml"
    with pytest.raises(reshard_mpi.DisagreementError, match="each rank has its own 'rng'") as error:
        reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", *strategies, replicas="any", **options)
    assert "--exclude 'rng'" in str(error.value) and not (tmp_path / "dst").exists()
    without = {**options, "exclude": ["b", "rng"] if "exclude" in options else "rng"}
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", *strategies, replicas="any", **without)


def test_diff_says_what_a_map_leaves_out(tmp_path: Path) -> None:
    text = "[[map]]\neq = 'w [a b] <=> v [b a]'\n[[map]]\ndrop = 'junk'"
    source, map_path = source_of(tmp_path, {"w": floats(2, 3), "junk": floats(2)}), map_of(tmp_path, text)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    assert "left out: junk" in done("diff", f"{source}", f"{tmp_path}/dst", "--map", f"{map_path}", "--jobs", "1").err
