"""What DeepSpeed loads from files of layers and experts is written as it is trained, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import deepspeed_peer, torch_peer
from support.deepspeed_peer import Arrays, Form, Spoil, Training
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.ranks import TargetNames, sorted_files

BEFORE = "l.deepspeed_experts."
SHAPES = {
    f"{BEFORE}{number}.{weight}": shape for number in range(4) for weight, shape in {"a": (3, 2), "b": (5,)}.items()
}
PIPELINE, EXPERTS = Form(1, 2, stages=2), Form(2, 4, expert_parts=2)
# What a module is called in the optimizer that both stages have.
TIED = "tied_modules.t.w"


def pipeline(dtype: str = "bfloat16") -> Training:
    return deepspeed_peer.training({"0.w": (3,), "1.w": (4, 2), "2.b": ()}, dtype=dtype)


def mixture(**shapes: tuple[int, ...]) -> Training:
    return deepspeed_peer.training({"w": (3,), "v": (2, 2)}, SHAPES | shapes, experts={BEFORE: 4})


def nothing(_: str, __: dict[str, Any]) -> None:
    pass


def saved(folder: Path, training: Training, form: Form, spoil: Spoil = nothing) -> Path:
    deepspeed_peer.write(folder / "save", training, form, spoil)
    return folder / "save"


def in_torch(folder: Path, source: Path, edit: Callable[[Any], object]) -> Path:
    """Return a checkpoint as a file of torch, after an edit of it."""
    reshard_mpi.transform(source, folder / "torch", to="torch")
    loaded = deepspeed_peer.load(folder / "torch/rank_0/checkpoint_0.pt")
    edit(loaded)
    torch_peer.save(folder / "edited.pt", loaded)
    return folder / "edited.pt"


def written(source: Path, target: Path, stage: int = 1, ranks: int = 2, **others: Any) -> Path:
    reshard_mpi.transform(source, target, to="deepspeed", dp=ranks, zero_stage=stage, **others)
    return target


def refused(source: Path, word: str, stage: int = 1, ranks: int = 2, **others: Any) -> str:
    with pytest.raises(TargetError, match=word) as caught:
        written(source, source.parent / "refused", stage, ranks, **others)
    assert not (source.parent / "refused").exists()
    return str(caught.value)


def test_a_prefix_says_the_names_of_all_files() -> None:
    pipeline, experts = TargetNames("t", "bf16_", 1, 2, (0, 3)), TargetNames("t", "", 2, experts=(2, 1))
    assert [TargetNames.of_prefix(each.prefix) for each in (pipeline, experts)] == [pipeline, experts]
    files = sorted_files([Path(pipeline.path(number, 8)).name for number in range(8)], "")
    counts = [len(kind) for kind in files]
    assert counts == [2, 4, 2, 0, 0]
    names = [Path(experts.path(number, 6)).name for number in range(6)]
    assert names[3:] == [
        f"layer_{layer}_expert_{own}_mp_rank_00_model_states.pt" for layer, own in ((0, 0), (0, 1), (1, 0))
    ]
    for forged in ("t/zero1.stages0.layers1", "t/zero1.stages2.layers1,", "t/zero1.experts" + "9" * 10, "t/zero4"):
        assert TargetNames.of_prefix(forged) == TargetNames()


@pytest.mark.parametrize(("stage", "form"), [(2, PIPELINE), (3, PIPELINE), (3, EXPERTS)])
def test_stages_at_which_deepspeed_does_not_train_them(tmp_path: Path, stage: int, form: Form) -> None:
    said = refused(saved(tmp_path, pipeline() if form.stages else mixture(), form), f"at stage {stage}", stage)
    assert ("1 or 2" in said) == (not form.stages)


def without_pipeline(root: Any) -> None:
    del root["pipeline_layout"]


def with_another_name(root: Any) -> None:
    root["pipeline_layout"]["stages"][1] = ["2.v"]


def with_numbers_for_names(root: Any) -> None:
    root["pipeline_layout"]["stages"] = [[1], [2]]


def with_an_empty_stage(root: Any) -> None:
    root["pipeline_layout"]["stages"] += [[]]


def with_a_tensor_of_no_layer(root: Any) -> None:
    root["model"]["scale"] = root["model"]["0.w"]


def with_an_expert(root: Any) -> None:
    root["model"][f"1.{BEFORE}0.w"] = root["model"]["0.w"]


@few_cases(
    1,
    ("edit", "got"),
    [
        (without_pipeline, "stages are not known"),
        (with_numbers_for_names, "stages are not known"),
        (with_another_name, "2.b, 2.v"),
        (with_an_empty_stage, "none of group 0 on stage 2"),
        (with_a_tensor_of_no_layer, "'scale'"),
        (with_an_expert, "experts in a pipeline"),
    ],
)
def test_a_pipeline_that_does_not_say_what_it_takes(tmp_path: Path, edit: Callable[[Any], None], got: str) -> None:
    refused(in_torch(tmp_path, saved(tmp_path, pipeline(), PIPELINE), edit), got)


EXCHANGED = ("{0} <=> between.{0}", "{1} <=> {0}", "between.{0} <=> {1}")


def exchange(*names: str) -> list[str]:
    """Return maps that give two tensors, or two modules, each the name of the other."""
    return [each.format(*names) for each in EXCHANGED]


def test_layers_that_change_their_stages_are_refused(tmp_path: Path) -> None:
    """DeepSpeed's stages have layers in a row; it gives a layer the state that lies in its place, whatever its name."""
    source = saved(tmp_path, deepspeed_peer.training({f"{layer}.w": (3,) for layer in range(4)}), PIPELINE)
    said = refused(source, "other layers than", map=exchange("1.{p*}", "2.{p*}"), forward=True)
    assert "layer 1" in said


@pytest.mark.parametrize(
    ("training", "form", "exchanged"),
    [
        (deepspeed_peer.training({f"{layer}.w": (3,) for layer in range(4)}), PIPELINE, ("0.w", "1.w")),
        (deepspeed_peer.training({"h.0.w": (3,), "h.1.w": (3,), "n.w": (3,)}), Form(2, 2), ("h.0.{p*}", "h.1.{p*}")),
        (deepspeed_peer.training({"q.w": (3,), "k.w": (3,), "n.w": (3,)}), Form(3, 2), ("q.w", "k.w")),
        (mixture(), EXPERTS, (f"{BEFORE}0.{{p*}}", f"{BEFORE}1.{{p*}}")),
    ],
)
def test_exchanged_modules_lie_in_the_order_of_the_model(
    tmp_path: Path, training: Training, form: Form, exchanged: tuple[str, str]
) -> None:
    """Its optimizer takes vectors by the order of the model's parameters, and asks for no names."""
    source = saved(tmp_path, training, form)
    names = [each.replace("{p*}", "") for each in exchanged]

    def new(name: str) -> str:
        return next((name.replace(old, to) for old, to in (names, names[::-1]) if name.startswith(old)), name)

    def renamed(arrays: Arrays) -> Arrays:
        return {name: arrays[new(name)] for name in arrays}

    out = written(source, tmp_path / "out", form.stage, form.data_ranks, map=exchange(*exchanged), forward=True)
    moved = replace(
        training,
        groups=[renamed(training.trained | group) for group in training.groups],
        state={kind: renamed(arrays) for kind, arrays in training.state.items()},
    )
    deepspeed_peer.require_read(out, moved, form)
    orders = [[deepspeed_peer.order(path) for path in sorted(each.rglob("*model_states.pt"))] for each in (source, out)]
    assert orders[0] == orders[1]


def with_a_frozen_expert(root: Any) -> None:
    root["optimizer"]["param_groups"][1]["params"].remove(f"{BEFORE}1.b")
    del root["optimizer"]["state"][f"{BEFORE}1.b"]


def with_no_name_of_the_group(root: Any) -> None:
    del root["optimizer"]["param_groups"][1]["name"]


def with_too_large_an_ep_size(root: Any) -> None:
    root["optimizer"]["param_groups"][1]["name"] = "ep_size_3"


def with_experts_and_others_in_a_group(root: Any) -> None:
    first, second = root["optimizer"]["param_groups"]
    second["params"] += [first["params"].pop()]


def with_experts_that_are_not_alike(root: Any) -> None:
    names = root["optimizer"]["param_groups"][1]["params"]
    names[0], names[1] = names[1], names[0]


def with_one_expert_less(root: Any) -> None:
    for name in (f"{BEFORE}3.a", f"{BEFORE}3.b"):
        del root["model"][name]
        root["optimizer"]["param_groups"][1]["params"].remove(name)
        del root["optimizer"]["state"][name]


def with_a_gap_between_experts(root: Any) -> None:
    with_one_expert_less(root)
    del root["num_experts"]
    for where in (root["model"], root["optimizer"]["state"]):
        for weight in "ab":
            where[f"{BEFORE}4.{weight}"] = where.pop(f"{BEFORE}2.{weight}")
    names = root["optimizer"]["param_groups"][1]["params"]
    names[:] = [name.replace(f"{BEFORE}2.", f"{BEFORE}4.") for name in names]


@few_cases(
    1,
    ("edit", "got"),
    [
        (with_a_frozen_expert, f"{BEFORE}1.b"),
        (with_no_name_of_the_group, "name: None"),
        (with_too_large_an_ep_size, "ep_size_3"),
        (with_experts_and_others_in_a_group, "8 of 9"),
        (with_experts_that_are_not_alike, f"{BEFORE}0.b"),
        (with_one_expert_less, r"\[3\]"),
        (with_a_gap_between_experts, f"{BEFORE}2"),
    ],
)
def test_experts_that_deepspeed_could_not_load(tmp_path: Path, edit: Callable[[Any], None], got: str) -> None:
    refused(in_torch(tmp_path, saved(tmp_path, mixture(), EXPERTS), edit), got)


def test_experts_are_lost_in_a_selection(tmp_path: Path) -> None:
    refused(saved(tmp_path, mixture(), EXPERTS), "lacks experts", exclude=["*deepspeed_experts.3.*"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ep"), few(1, [(4, 4), (4, 1), (2, 2), (6, 1)]))
def test_another_number_of_ranks_that_share_experts(tmp_path: Path, ranks: int, ep: int) -> None:
    source = saved(tmp_path, mixture(), EXPERTS)
    out = written(source, tmp_path / "out", 2, ranks, ep=ep)
    reshard_mpi.verify(source, out)
    for rank in range(ranks):
        path = out / f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = deepspeed_peer.load(path)["optimizer_state_dict"]
        assert state["partition_count"] == [ranks, ranks // ep]
        assert state["base_optimizer_state"]["param_groups"][1]["name"] == f"ep_size_{ep}"
    deepspeed_peer.require_read(out, mixture(), Form(2, ranks, expert_parts=ep))


@pytest.mark.parametrize(("ranks", "ep", "got"), [(4, 3, "--dp 4"), (3, 3, "over 3 ranks; experts: 4")])
def test_numbers_of_ranks_that_cannot_share_experts(tmp_path: Path, ranks: int, ep: int, got: str) -> None:
    refused(saved(tmp_path, mixture(), EXPERTS), got, ranks=ranks, ep=ep)


def test_a_model_without_experts_has_none_to_share(tmp_path: Path) -> None:
    refused(saved(tmp_path, pipeline(), PIPELINE), "0 layers with experts", ep=2)


@pytest.mark.slow
def test_groups_that_would_become_one(tmp_path: Path) -> None:
    """Two layers whose experts are divided over 2 and over 4 ranks: over 2 ranks their groups have one name."""
    other = "m.deepspeed_experts."
    shapes = {f"{other}{number}.a": (3,) for number in range(4)}

    def divide(root: Any) -> None:
        first, second = root["optimizer"]["param_groups"]
        names = second["params"]
        groups = [[name for name in names if (name in shapes) == is_other] for is_other in (False, True)]
        of_four = {**second, "name": "ep_size_4", "params": groups[1]}
        root["optimizer"]["param_groups"] = [first, {**second, "params": groups[0]}, of_four]

    training = deepspeed_peer.training({"w": (3,)}, SHAPES | shapes, experts={BEFORE: 4, other: 4})
    source = in_torch(tmp_path, saved(tmp_path, training, EXPERTS), divide)
    refused(source, "in other groups, or in another order", ranks=2)
    reshard_mpi.verify(source, written(source, tmp_path / "out", ranks=4))


def backwards(root: Any) -> None:
    root["optimizer"]["param_groups"][1]["params"].reverse()


def twice(root: Any) -> None:
    group = root["optimizer"]["param_groups"][1]
    names = group["params"]
    root["optimizer"]["param_groups"].append({**group, "params": names[1::2]})
    group["params"] = names[::2]


@pytest.mark.slow
@pytest.mark.parametrize("edit", few(1, [backwards, twice]))
def test_another_division_of_groups_that_depend_on_it(tmp_path: Path, edit: Callable[[Any], None]) -> None:
    """An order of its own, and a group that DeepSpeed has divided in two, stay as they are over as many ranks."""
    source = in_torch(tmp_path, saved(tmp_path, mixture(), EXPERTS), edit)
    assert "a multiple of 2" in refused(source, "in other groups, or in another order", ranks=3)
    refused(source, "in other groups, or in another order", ranks=4, ep=4)
    out = written(source, tmp_path / "out", ranks=6)
    reshard_mpi.verify(source, out)
    # The second group of some has but a part of the weights of each expert.
    written(out, tmp_path / "again", ranks=4)
    reshard_mpi.verify(source, tmp_path / "again")


@pytest.mark.slow
def test_a_part_of_the_experts_in_several_groups(tmp_path: Path) -> None:
    """DeepSpeed begins another group in the midst of an expert, where one would have very many elements."""
    names = [[f"{BEFORE}{number}.{weight}" for number in numbers for weight in "ab"] for numbers in ((0, 1), (2, 3))]
    groups = [[*names[0][:3], *names[1][:3]], [names[0][3], names[1][3]]]

    def divide(root: Any) -> None:
        first, second = root["optimizer"]["param_groups"]
        root["optimizer"]["param_groups"] = [first, *({**second, "params": own} for own in groups)]

    out = written(in_torch(tmp_path, saved(tmp_path, mixture(), EXPERTS), divide), tmp_path / "out", stage=2, ranks=4)
    deepspeed_peer.require_read(out, mixture(), EXPERTS)
    content = deepspeed_peer.load(out / "global_step3/mp_rank_00_model_states.pt")
    assert [[*own] for own in content["param_shapes"]] == [["w", "v"], names[0][:3], names[0][3:]]


def share(root: Any) -> None:
    """Make the weight of layer 0 one that layer 2 has too: in the optimizer it is that of a module of both stages."""
    model, optimizer = root["model"], root["optimizer"]
    model["2.w"] = model[TIED] = model["0.w"]
    optimizer["state"][TIED] = optimizer["state"].pop("0.w")
    names = optimizer["param_groups"][0]["params"]
    names[names.index("0.w")] = TIED
    root["pipeline_layout"] = {"layers": [0, 1, 2, 5], "stages": [[TIED, "1.w"], [TIED, "2.b"]]}


@pytest.mark.parametrize("dtype", few(1, ["bfloat16", "float32"]))
def test_what_layers_of_a_pipeline_share(tmp_path: Path, dtype: str) -> None:
    """It lies in their files, and in the vectors of each stage that has it; a layer without weights has a file too."""
    source = in_torch(tmp_path, saved(tmp_path, pipeline(dtype), PIPELINE), share)
    tag = written(source, tmp_path / "out", ranks=3) / "global_step3"
    reshard_mpi.verify(source, tmp_path / "out")
    shapes = [deepspeed_peer.load(tag / f"mp_rank_0{stage}_model_states.pt")["param_shapes"] for stage in (0, 1)]
    assert [[*own] for (own,) in shapes] == [[TIED, "1.w"], [TIED, "2.b"]]
    layers = {path.name: [*deepspeed_peer.load(path)] for path in sorted(tag.glob("layer*"))}
    names = [["w"], ["w"], ["b", "w"], []]
    assert layers == {f"layer_0{layer}-model_states.pt": own for layer, own in zip((0, 1, 2, 5), names)}
    with reshard_mpi.open(source) as before, reshard_mpi.open(tmp_path / "out") as after:
        assert before.keys() == after.keys()
        assert all(before[name][...].tobytes() == after[name][...].tobytes() for name in before)
    written(tmp_path / "out", tmp_path / "again")
    reshard_mpi.verify(source, tmp_path / "again")


def freeze(root: Any) -> None:
    del root["optimizer"]["state"]["0.w"]
    root["optimizer"]["param_groups"][0]["params"].remove("0.w")
    root["pipeline_layout"]["stages"][0].remove("0.w")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_pipeline_with_a_weight_that_is_not_trained(tmp_path: Path, dtype: str) -> None:
    source = in_torch(tmp_path, saved(tmp_path, pipeline(dtype), PIPELINE), freeze)
    written(source, tmp_path / "out", ranks=3)
    written(tmp_path / "out", tmp_path / "again")
    for folder in ("out", "again"):
        reshard_mpi.verify(source, tmp_path / folder)
        with reshard_mpi.open(source) as before, reshard_mpi.open(tmp_path / folder) as after:
            assert before.keys() == after.keys()
            assert all(before[name][...].tobytes() == after[name][...].tobytes() for name in before)


def test_a_map_that_takes_layers_from_what_they_share_is_refused(tmp_path: Path) -> None:
    source = in_torch(tmp_path, saved(tmp_path, pipeline(), PIPELINE), share)
    said = refused(source, "none of its layers has", map="{l}.{p*} <=> {l}.block.{p*}", forward=True)
    assert TIED in said


@pytest.mark.slow
@pytest.mark.parametrize("how", few(1, [{"dtype": "model.*=fp16"}, {"dtype": "fp32"}, {"exclude": ["*.fp32_param"]}]))
def test_other_types_of_what_layers_share(tmp_path: Path, how: dict[str, Any]) -> None:
    source = in_torch(tmp_path, saved(tmp_path, pipeline(), PIPELINE), share)
    reshard_mpi.verify(source, written(source, tmp_path / "out", ranks=3, **how), **how)


def with_other_contents(root: Any) -> None:
    share(root)
    root["model"]["2.w"] = torch_peer.tensor(deepspeed_peer.sample(np.zeros(3, np.float32), "bfloat16"), "new")


def with_another_module_of_the_name(root: Any) -> None:
    share(root)
    other = "tied_modules.s.w"
    root["model"][other] = root["model"]["1.w"]
    root["optimizer"]["state"][other] = root["optimizer"]["state"]["1.w"]
    root["optimizer"]["param_groups"][0]["params"].append(other)
    root["pipeline_layout"]["stages"][0].append(other)


@few_cases(1, ("edit", "got"), [(with_other_contents, "differ"), (with_another_module_of_the_name, "tied_modules.s.w")])
def test_what_layers_share_must_be_told_apart(tmp_path: Path, edit: Callable[[Any], None], got: str) -> None:
    source = in_torch(tmp_path, saved(tmp_path, pipeline(), PIPELINE), edit)
    with pytest.raises(reshard_mpi.ReshardError, match=got):
        written(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_buffers_and_values_of_modules_go_to_their_layers(tmp_path: Path) -> None:
    def add(root: Any) -> None:
        root["model"] |= {
            "0.count": torch_peer.tensor(deepspeed_peer.sample(np.arange(3)), "new"),
            "1._extra_state": "x",
        }
        root["buffer_names"] = ["0.count"]

    source = in_torch(tmp_path, saved(tmp_path, pipeline(), PIPELINE), add)
    tag = written(source, tmp_path / "out", ranks=3) / "global_step3"
    reshard_mpi.verify(source, tmp_path / "out")
    names = [deepspeed_peer.load(tag / f"mp_rank_0{stage}_model_states.pt")["buffer_names"] for stage in (0, 1)]
    assert names == [["0.count"], []]
    assert deepspeed_peer.load(tag / "layer_01-model_states.pt")["_extra_state"] == "x"
    assert [*deepspeed_peer.load(tag / "layer_00-model_states.pt")] == ["w", "count"]
    reshard_mpi.transform(tmp_path / "out", tmp_path / "back", to="torch")
    back = deepspeed_peer.load(tmp_path / "back/rank_0/checkpoint_0.pt")
    assert back["buffer_names"] == ["0.count"] and back["model"]["1._extra_state"] == "x"


@pytest.mark.slow
def test_names_in_lists_follow_a_map(tmp_path: Path) -> None:
    """Of buffers, of second names, and of what the stages of a pipeline train."""
    plain = deepspeed_peer.training({"a": (3,)}, buffers={"scale": np.float32([1.5])}, shared={"tied": "a"})
    how: dict[str, Any] = {"map": "{p*} <=> m.{p*}", "forward": True}
    tag = written(saved(tmp_path / "plain", plain, Form(2, 2)), tmp_path / "plain/out", 3, 3, **how) / "global_step3"
    content = deepspeed_peer.load(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert content["buffer_names"] == ["m.scale"] and content["shared_params"] == {"m.tied": "m.a"}
    source = saved(tmp_path, pipeline(), PIPELINE)
    how["map"] = "{l}.{p*} <=> {l}.m.{p*}"
    tag = written(source, tmp_path / "out", ranks=3, **how) / "global_step3"
    (shapes,) = deepspeed_peer.load(tag / "mp_rank_00_model_states.pt")["param_shapes"]
    assert [*shapes] == ["0.m.w", "1.m.w"]
    assert [*deepspeed_peer.load(tag / "layer_02-model_states.pt")] == ["m.b"]
    refused(source, "tensors of no layer", map="{l}.{p*} <=> m.{l}.{p*}", forward=True)
