"""Files that are written for DeepSpeed hold what its engine would have saved on as many ranks."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import deepspeed_peer, torch_peer
from support.deepspeed_peer import Form, Training
from support.examples import few, few_cases, many

import reshard_mpi
from reshard_mpi.errors import TargetError, UsageError

# Keys that the engine of another release or stage leaves out, with what stands there then.
OFTEN_LEFT_OUT = {
    "random_ltd": None,
    "dynamic_loss_scale": False,
    "overflow": False,
    "loss_scaler": None,
    "clip_grad": 1.0,
}
# What people save beside them.
SHAPES = {"a.weight": (5, 3), "a.bias": (1,), "b.weight": (7, 2), "b.scale": ()}


def plain(value: Any) -> Any:
    """Return what a file holds as values that can be compared: tensors as their type, shape and bytes."""
    if isinstance(value, torch_peer.Tensor):
        sample = torch_peer.sample_of("", value)
        return sample.dtype.name, sample.shape, sample.content
    if isinstance(value, deepspeed_peer.Object):
        attributes = dict(vars(value))
        return type(value).__name__, attributes.pop("args", ()), attributes
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def require_same(found: Any, expected: Any, where: str) -> None:
    """Require that two values are the same, dictionaries of tensors in the same order."""
    if not isinstance(expected, dict):
        assert found == expected, where
        return
    assert found.keys() - expected.keys() <= OFTEN_LEFT_OUT.keys(), where
    if where.endswith("['module']"):
        assert [*found] == [*expected], where
    for key, value in expected.items():
        require_same(found[key], value, f"{where}[{key!r}]")


def require_files(folder: Path, training: Training, form: Form, scratch: Path) -> None:
    """Require that a folder has the files that DeepSpeed saves, and nothing else."""
    tag = folder / (folder / "latest").read_text()
    names = set()
    for name, content in deepspeed_peer.contents(training, form):
        deepspeed_peer.save(scratch, content)
        expected, found = plain(deepspeed_peer.load(scratch)), plain(deepspeed_peer.load(tag / name))
        if "optimizer_state_dict" in expected:  # a source of stage 3 has none
            expected["optimizer_state_dict"].pop("clip_grad", None)
        if form.stage == 1:
            expected.pop("frozen_param_shapes", None)
            found.pop("frozen_param_shapes", None)
        require_same(found, expected, name)
        names.add(name)
    assert {path.name for path in tag.iterdir()} == names


@pytest.mark.slow
@many(14)
@given(deepspeed_peer.trainings(writable=True), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_files_for_other_ranks_and_stages(
    drawn: tuple[Training, Form], stage: int, ranks: int, through_torch: bool
) -> None:
    training, form = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deepspeed_peer.write(folder / "save", training, form)
        source = folder / "save"
        if through_torch:
            source = folder / "torch"
            reshard_mpi.transform(folder / "save", source, to="torch")
        reshard_mpi.transform(source, folder / "out", to="deepspeed", dp=ranks, zero_stage=stage, verify=True)
        # At stage 3 the vectors have no padding to clip, so nothing says where to.
        require_files(folder / "out", training, Form(stage, ranks), folder / "expected.pt")
        reshard_mpi.verify(folder / "out")
        reshard_mpi.verify(source, folder / "out")
        back = deepspeed_peer.expected(training, Form(stage, ranks))
        with reshard_mpi.open(folder / "out") as opened:
            assert {name: opened[name][...].tobytes() for name in opened} == {
                name: sample.content for name, sample in back.items()
            }


@pytest.mark.slow
@many(10)
@given(
    deepspeed_peer.trainings(kinds=("pipeline", "experts")),
    st.integers(1, 2),
    st.integers(1, 5),
    st.sampled_from(["", "torch", "dcp", "hdf5"]),
)
def test_files_of_pipelines_and_experts(drawn: tuple[Training, Form], stage: int, ranks: int, through: str) -> None:
    """Stages stay as they are; experts are divided over as many ranks as before, as far as the ranks allow it."""
    training, form = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deepspeed_peer.write(folder / "save", training, form)
        source = folder / (through or "save")
        if through:
            reshard_mpi.transform(folder / "save", source, to=through)
        stage, parts = 1 if form.stages else stage, math.gcd(form.expert_parts, ranks)
        report = reshard_mpi.transform(source, folder / "out", to="deepspeed", dp=ranks, zero_stage=stage, verify=True)
        assert any(f"ep_size={parts}" in note for note in report.notes) == (parts != form.expert_parts)
        made = Form(stage, ranks, expert_parts=parts, stages=form.stages)
        require_files(folder / "out", training, made, folder / "expected.pt")
        reshard_mpi.verify(folder / "save", folder / "out")
        deepspeed_peer.require_read(folder / "out", training, made)


def source_of(folder: Path, form: Form = Form(2, 2), **named: Any) -> Path:  # noqa: B008 - never changed
    training = deepspeed_peer.training(SHAPES, {"c.weight": (11,)}, **named)
    deepspeed_peer.write(folder / "save", training, form)
    return folder / "save"


def in_torch(folder: Path) -> Any:
    """Return the training of `source_of` as one object."""
    reshard_mpi.transform(source_of(folder), folder / "torch", to="torch")
    return deepspeed_peer.load(folder / "torch/rank_0/checkpoint_0.pt")


@pytest.mark.parametrize("options", [{"dp": 2}, {"zero_stage": 2}, {}])
def test_ranks_and_stage_must_be_said(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="packed for a number of ranks"):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", to="deepspeed", **options)


@pytest.mark.parametrize("options", [{"dp": 2}, {"zero_stage": 2}, {"dp": 2, "to": "dcp"}])
def test_ranks_and_stage_are_for_it_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is for --to deepspeed"):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", **options)


@pytest.mark.parametrize("stage", [0, 4])
def test_no_other_stage(tmp_path: Path, stage: int) -> None:
    with pytest.raises(UsageError, match="no stage of ZeRO"):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", to="deepspeed", dp=2, zero_stage=stage)


def test_a_model_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    reshard_mpi.transform(source_of(tmp_path), tmp_path / "hf", to="hf")
    with pytest.raises(TargetError, match="not a whole training"):
        reshard_mpi.transform(tmp_path / "hf", tmp_path / "out", to="deepspeed", dp=2, zero_stage=2)
    assert not (tmp_path / "out").exists()


@few_cases(1, "excluded", ["optimizer.state.a.weight.exp_avg", "*.step", "optimizer.state.b.weight.*"])
def test_a_training_that_lacks_something_is_refused(tmp_path: Path, excluded: str) -> None:
    asked: dict[str, Any] = {"to": "deepspeed", "dp": 2, "zero_stage": 2}
    if excluded == "*.step":  # of no parameter: it is the optimizer's then, and goes with it
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", exclude=[excluded], **asked)
        return
    with pytest.raises(reshard_mpi.ReshardError):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", exclude=[excluded], **asked)
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_is_left_out_is_in_no_group(tmp_path: Path) -> None:
    """What is left is a whole training of a model without it."""
    left = {name for name in in_torch(tmp_path)["model"] if name != "b.weight"}
    asked: dict[str, Any] = {"to": "deepspeed", "dp": 2, "zero_stage": 2, "exclude": ["model.b.weight"]}
    reshard_mpi.transform(tmp_path / "save", tmp_path / "out", **asked)
    reshard_mpi.transform(tmp_path / "out", tmp_path / "back", to="torch")
    made = deepspeed_peer.load(tmp_path / "back/rank_0/checkpoint_0.pt")
    grouped = [name for group in made["optimizer"]["param_groups"] for name in group["params"]]
    assert {*made["model"]} == left and {*grouped} == {*made["optimizer"]["state"]} <= left


@pytest.mark.parametrize("dtype", ["fp64", "optimizer.*=bf16", "model.a.*=fp16"])
def test_types_that_deepspeed_does_not_train_in_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(TargetError, match="not a whole training"):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", to="deepspeed", dp=2, zero_stage=2, dtype=dtype)


def test_another_type_of_the_model_alone(tmp_path: Path) -> None:
    """The files have the names that an engine in that type looks for; its fp32 weights stay."""
    source = source_of(tmp_path)
    reshard_mpi.transform(source, tmp_path / "out", to="deepspeed", dp=2, zero_stage=3, dtype="model.*=fp16")
    assert (tmp_path / "out/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt").exists()
    with reshard_mpi.open(source) as before, reshard_mpi.open(tmp_path / "out") as after:
        assert after["model.a.weight"].dtype == np.float16
        name = "optimizer.state.a.weight.fp32_param"
        assert np.array_equal(before[name][...], after[name][...])


def test_steps_that_differ_in_a_group_are_refused(tmp_path: Path) -> None:
    """A vector has one step for all of its parameters."""
    loaded = in_torch(tmp_path)
    state = loaded["optimizer"]["state"]
    state["a.bias"]["step"] = torch_peer.tensor(deepspeed_peer.sample(np.float32(9).reshape(())), "new")
    torch_peer.save(tmp_path / "x.pt", loaded)
    with pytest.raises(reshard_mpi.ReshardError, match="step"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", dp=2, zero_stage=2)


def test_a_model_whose_names_begin_with_numbers_is_no_pipeline(tmp_path: Path) -> None:
    """The parts of a `torch.nn.Sequential` are numbered, as the layers of a pipeline are."""
    training = deepspeed_peer.training({"0.w": (3,), "1.w": (4,)})
    deepspeed_peer.write(tmp_path / "save", training, Form(1, 2))
    reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="deepspeed", dp=3, zero_stage=3)
    reshard_mpi.verify(tmp_path / "save", tmp_path / "out")


@pytest.mark.slow
@many(12)
@given(st.integers(1, 7), st.integers(1, 6))
def test_round_robin_gradients_has_an_order_of_its_own(from_ranks: int, to_ranks: int) -> None:
    """The parameters of a group are dealt out over the ranks, and the vectors are in that order."""
    shapes = {f"w{number}": (number + 1, 2) for number in range(7)}

    def dealt(names: list[str], ranks: int) -> list[str]:
        return [name for first in range(ranks) for name in names[first::ranks]]

    def laid(ranks: int) -> Training:
        whole = deepspeed_peer.training(shapes)
        (own,) = whole.groups
        return deepspeed_peer.training({name: shapes[name] for name in dealt([*shapes], ranks)}).__class__(
            [{name: own[name] for name in dealt([*own], ranks)}], whole.state
        )

    def with_setting(_: str, content: dict[str, Any]) -> None:
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deepspeed_peer.write(folder / "save", laid(from_ranks), Form(2, from_ranks), with_setting)
        reshard_mpi.transform(folder / "save", folder / "out", to="deepspeed", dp=to_ranks, zero_stage=2)
        for written, content in deepspeed_peer.contents(laid(to_ranks), Form(2, to_ranks)):
            if "optim" in written:
                deepspeed_peer.save(folder / "expected.pt", content)
                expected = plain(deepspeed_peer.load(folder / "expected.pt"))["optimizer_state_dict"]
                found = plain(deepspeed_peer.load(folder / "out/global_step3" / written))["optimizer_state_dict"]
                require_same(found, expected, written)


@pytest.mark.parametrize("stage", few(1, [1, 2]))
def test_the_order_of_a_training_with_bf16_optimizer_is_kept(tmp_path: Path, stage: int) -> None:
    """It does not deal parameters out as `round_robin_gradients` says, but DeepSpeed does so at other stages."""
    shapes = {f"w{number}": (number + 1, 2) for number in range(7)}

    def with_settings(_: str, content: dict[str, Any]) -> None:
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
        content["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}

    training = deepspeed_peer.training(shapes, dtype="bfloat16")
    deepspeed_peer.write(tmp_path / "save", training, Form(1, 2, is_bf16_optimizer=True), with_settings)
    last = tmp_path / "save"
    for ranks in (3, 2):
        reshard_mpi.transform(last, tmp_path / f"over {ranks}", to="deepspeed", dp=ranks, zero_stage=stage)
        last = tmp_path / f"over {ranks}"
        reshard_mpi.verify(tmp_path / "save", last)
        with reshard_mpi.open(tmp_path / "save") as before, reshard_mpi.open(last) as after:
            assert [*before] == [*after] and all((before[name][...] == after[name][...]).all() for name in before)


@pytest.mark.parametrize("dtype", few(1, [np.float32, np.uint8, np.int64]))
def test_parameters_that_are_not_trained_keep_their_type(tmp_path: Path, dtype: type) -> None:
    """A slice of one has the type that it has in the model, also where it is padding alone."""
    frozen, loaded = np.arange(7).astype(dtype).reshape(7, 1), in_torch(tmp_path)
    loaded["model"]["f.weight"] = torch_peer.tensor(deepspeed_peer.sample(frozen), "new")
    torch_peer.save(tmp_path / "x.pt", loaded)
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", dp=5, zero_stage=3)
    with reshard_mpi.open(tmp_path / "out") as opened:
        array = opened["model.f.weight"][...]
    assert array.dtype == dtype and (array == frozen).all()


def test_an_elastic_checkpoint_keeps_its_groups_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Their settings are not in it, so no optimizer of DeepSpeed could go on from what would be written for it."""
    source = source_of(tmp_path, Form(2, 2, is_elastic=True))
    report = reshard_mpi.transform(source, tmp_path / "torch", to="torch")
    assert any("settings of the optimizer's groups" in note for note in report.notes)
    groups = deepspeed_peer.load(tmp_path / "torch/rank_0/checkpoint_0.pt")["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [[*SHAPES], ["c.weight"]]
    with pytest.raises(TargetError, match="settings of each group"):
        reshard_mpi.transform(source, tmp_path / "out", to="deepspeed", dp=3, zero_stage=2)


@pytest.mark.parametrize("are_named", few(1, [True, False]))
@pytest.mark.parametrize("stage", few(1, [2, 3]))
def test_groups_have_the_order_that_the_optimizer_was_given(tmp_path: Path, are_named: bool, stage: int) -> None:
    """Vectors of ZeRO tell parameters by their order alone, and the engine has that of its optimizer."""
    loaded = in_torch(tmp_path)
    optimizer = loaded["optimizer"]
    groups = [["b.scale", "b.weight", "a.weight"], ["c.weight", "a.bias"]] if are_named else [[*loaded["model"]]]
    names = [name for group in groups for name in group]
    optimizer["state"] = {number: optimizer["state"][name] for number, name in enumerate(names)}
    settings = [{**optimizer["param_groups"][0], "param_names": own} for own in groups]
    optimizer["param_groups"] = [
        {**own, "params": [names.index(name) for name in own["param_names"]]} for own in settings
    ]
    if not are_named:
        del optimizer["param_groups"][0]["param_names"]
    torch_peer.save(tmp_path / "x.pt", loaded)
    how: dict[str, Any] = {"map": "model.{p*} <=> model.n.{p*}", "forward": True, "dp": 2, "zero_stage": stage}
    reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", **how)
    path = next((tmp_path / "out").rglob("*model_states.pt"))
    assert [[*group] for group in deepspeed_peer.load(path)["param_shapes"]] == [
        [f"n.{name}" for name in group] for group in groups
    ]


def test_a_group_without_parameters_is_refused(tmp_path: Path) -> None:
    loaded = in_torch(tmp_path)
    loaded["optimizer"]["param_groups"].append({"lr": 0.5, "params": []})
    torch_peer.save(tmp_path / "x.pt", loaded)
    with pytest.raises(TargetError, match="a group without parameters"):
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", dp=2, zero_stage=2)


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_names_its_folder_last(tmp_path: Path) -> None:
    source, asked = source_of(tmp_path), {"to": "deepspeed", "dp": 3, "zero_stage": 3}
    reshard_mpi.transform(source, tmp_path / "out", rank=[0, 4], **asked)
    assert not (tmp_path / "out/latest").exists()
    reshard_mpi.transform(source, tmp_path / "out", resume=True, **asked)
    assert (tmp_path / "out/latest").read_text() == "global_step3"
    report = reshard_mpi.verify(source, tmp_path / "out")
    assert not report.warnings
    with pytest.raises(TargetError):  # of another stage, into the same folder
        reshard_mpi.transform(source, tmp_path / "out", to="deepspeed", dp=3, zero_stage=2)
    reshard_mpi.transform(source, tmp_path / "out", to="deepspeed", dp=3, zero_stage=2, overwrite=True)
    names = {path.name for path in (tmp_path / "out/global_step3").iterdir()}
    assert names == {"mp_rank_00_model_states.pt"} | {
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)
    }


def at_step(folder: Path, source: Path, step: int) -> Path:
    """Return a copy of a checkpoint as it would be of another step."""
    tag = folder / f"save {step}" / f"global_step{step}"
    shutil.copytree(source / "global_step3", tag)
    for path in tag.glob("*_model_states.pt"):
        deepspeed_peer.save(path, {**deepspeed_peer.load(path), "global_steps": step})
    (tag.parent / "latest").write_text(tag.name)
    return tag.parent


@pytest.mark.parametrize("is_killed", few(1, [False, True]))
def test_another_tag_is_added_to_a_folder_of_saves(tmp_path: Path, is_killed: bool) -> None:
    """As DeepSpeed keeps the saves that lie in a folder; `latest` names the one that was written last."""
    out, asked = tmp_path / "out", {"to": "deepspeed", "zero_stage": 2}
    first = source_of(tmp_path)
    reshard_mpi.transform(first, out, dp=3, **asked)
    second = at_step(tmp_path, first, 20)
    with pytest.raises(TargetError, match="global_step3 stays"):
        reshard_mpi.transform(second, out, dp=2, **asked)
    before = {path: path.read_bytes() for path in (out / "global_step3").iterdir()}
    if is_killed:
        reshard_mpi.transform(second, out, dp=2, overwrite=True, rank=[1], **asked)
        reshard_mpi.transform(second, out, dp=2, resume=True, **asked)
    else:
        reshard_mpi.transform(second, out, dp=2, overwrite=True, **asked)
    assert (out / "latest").read_text() == "global_step20"
    assert {path: path.read_bytes() for path in (out / "global_step3").iterdir()} == before
    for source, own in ((first, out / "global_step3"), (second, out)):
        assert not reshard_mpi.verify(source, own).warnings
        reshard_mpi.transform(own, tmp_path / "back", to="torch", verify=True, overwrite=True)
    assert reshard_mpi.inspect(out)


@pytest.mark.slow
def test_only_the_files_of_the_same_tag_are_replaced(tmp_path: Path) -> None:
    out, asked = tmp_path / "out", {"to": "deepspeed", "zero_stage": 3}
    first = source_of(tmp_path)
    second = at_step(tmp_path, first, 20)
    reshard_mpi.transform(first, out, dp=2, **asked)
    reshard_mpi.transform(second, out, dp=3, overwrite=True, **asked)
    reshard_mpi.transform(second, out, dp=1, overwrite=True, **asked)
    assert len([*(out / "global_step3").iterdir()]) == 4 and len([*(out / "global_step20").iterdir()]) == 2
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {
        *("global_step3", "global_step20", "latest", "reshard.json")
    }


of_every_framework = pytest.mark.parametrize("to", few(1, ["deepspeed", "megatron"]))


def gone_on(folder: Path, to: str) -> tuple[dict[str, Any], Path, Path]:
    """Make a target that the training has gone on from, with a later save; return how, its pointer, and that save."""
    out, begin, pointer = folder / "out", "iter_00000", "latest_checkpointed_iteration.txt"
    asked: dict[str, Any] = {"to": to}
    if to == "deepspeed":
        begin, pointer, asked = "global_step", "latest", asked | {"dp": 3, "zero_stage": 2}
    reshard_mpi.transform(source_of(folder), out, **asked)
    (own,) = out.glob(f"{begin}*")
    (out / pointer).write_text("global_step10" if to == "deepspeed" else "10")
    return asked, out / pointer, Path(shutil.copytree(own, out / f"{begin}10"))


@of_every_framework
def test_a_later_save_of_the_training_stays_the_latest(tmp_path: Path, to: str) -> None:
    """Also where the commit record was removed meanwhile."""
    asked, pointer, _ = gone_on(tmp_path, to)
    source, out = tmp_path / "save", tmp_path / "out"
    for is_removed in (False, True):
        if is_removed:
            (out / "reshard.json").unlink()
        reshard_mpi.transform(source, out, resume=True, **asked)
        assert pointer.read_text().endswith("10") and (out / "reshard.json").exists()
    pointer.write_text(pointer.read_text().replace("10", "9"))  # there is no such folder
    reshard_mpi.transform(source, out, resume=True, **asked)
    assert pointer.read_text().endswith("3")


@of_every_framework
def test_the_pointer_of_a_training_that_has_gone_on_is_nothing_to_be_removed(tmp_path: Path, to: str) -> None:
    """With --overwrite a run of another format removes what the earlier one has made, and refuses what is not its."""
    _, pointer, later = gone_on(tmp_path, to)
    with pytest.raises(TargetError, match="no part of the checkpoint"):
        reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="torch", overwrite=True)
    (own,) = tmp_path.glob("out/*3")
    assert pointer.read_text().endswith("10") and later.exists() and own.exists()


def test_a_file_of_another_save_beside_the_targets_is_refused(tmp_path: Path) -> None:
    tag = tmp_path / "out/global_step3"
    tag.mkdir(parents=True)
    (tag / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"another")
    with pytest.raises(TargetError, match="no part of the checkpoint"):
        reshard_mpi.transform(source_of(tmp_path), tmp_path / "out", to="deepspeed", dp=2, zero_stage=2)
