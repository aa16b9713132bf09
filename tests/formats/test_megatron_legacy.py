"""Megatron's older checkpoints: what is read equals the whole tensors laid over ranks, or is refused by name."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support import deepspeed_peer, megatron_legacy_peer, megatron_peer, torch_peer
from support.command_line import done, refused, run_here
from support.examples import few, many
from support.megatron_legacy_peer import EMBEDDING, MODEL, VECTORS, Form, Model, Training, require_read, training
from support.torch_runs import tree_of

import reshard_mpi
from reshard_mpi.errors import ReshardError
from reshard_mpi.soundness.findings import FindingKind

Content = dict[str, Any]
Spoiler = Callable[[str, str, Content], object]
DENSE = training(Model(layers=((1, 1), (0, 2)), has_biases=True, hidden=5))
TIED = training(Model(layers=((1, 2),), is_tied=True, hidden=7))
EXPERTS = training(Model(layers=((1, 1),), experts=4))
SINGLE = training(Model(dtype="float32"))


@many(60)
@given(megatron_legacy_peer.trainings())
def test_whole_tensors(drawn: tuple[Training, Form]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        megatron_legacy_peer.write(Path(folder, "save"), *drawn)
        require_read(Path(folder, "save"), *drawn)


FORMS: dict[str, tuple[Training, Form]] = {
    "uneven stages and chunks": (DENSE, Form(2)),
    "buckets": (DENSE, Form(2, bucket=40)),
    "buckets of weights that are not in one": (DENSE, Form(2, bucket=40, in_one=False)),
    "a tied embedding in buckets of its own": (TIED, Form(2)),
    "numbered state": (TIED, Form(2, optimizer="numbers")),
    "experts": (EXPERTS, Form(2, 2)),
    "experts that are not cut": (EXPERTS, Form(2, 2, expert_tensor=1)),
    "experts in one module": (training(Model(experts=4, is_grouped=True)), Form(1, 2)),
    "numbered state of experts": (EXPERTS, Form(2, 2, optimizer="numbers")),
    "numbered state in float32": (SINGLE, Form(2, optimizer="numbers")),
    "float32": (SINGLE, Form(2)),
    "weights alone": (DENSE, Form(2, optimizer="")),
}


@pytest.mark.parametrize("what", few(1, FORMS))
def test_each_form(tmp_path: Path, what: str) -> None:
    megatron_legacy_peer.write(tmp_path, *FORMS[what])
    require_read(tmp_path, *FORMS[what])


@pytest.mark.parametrize("how", few(1, [{}, {"include": "model.*"}, {"exclude": "optimizer.*"}]))
def test_a_conversion_holds_the_same_tensors(tmp_path: Path, how: dict[str, Any]) -> None:
    """What is of the ranks that have saved it alone is said, and no difference."""
    megatron_legacy_peer.write(tmp_path / "save", DENSE, Form(2))
    reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="torch", **how)
    for pair in ((tmp_path / "save", tmp_path / "out"), (tmp_path / "out", tmp_path / "save")):
        report = reshard_mpi.diff(*pair, **how)
        assert any("which no other layout has" in text for text in report.warnings)
        comparison = reshard_mpi.diff(*pair, values=True, **how).comparison
        assert comparison is not None and comparison.passes


def _chunk(content: Content) -> Content:
    found: Content = content["model" if "model" in content else "model0"]
    return found


def on(folder: str, file: str, change: Callable[[Content], object]) -> Spoiler:
    """Return what changes the content of files of one name, in folders that begin so."""

    def spoil(own_folder: str, own_file: str, content: Content) -> None:
        if own_folder.startswith(folder) and own_file == file and content:
            change(content)

    return spoil


def arg(name: str, value: Any, folder: str = "") -> Spoiler:
    return on(folder, MODEL, lambda content: setattr(content["args"], name, value))


def setting(key: str, value: Any, folder: str = "") -> Spoiler:
    return on(folder, MODEL, lambda content: content.update({key: value}))


def added(name: str, values: dict[str, float], shape: tuple[int, ...] = (3,)) -> Spoiler:
    """Return what adds a tensor to the model, by folder of what value."""

    def spoil(folder: str, file: str, content: Content) -> None:
        value = next((value for begin, value in values.items() if folder.startswith(begin)), None)
        if file == MODEL and value is not None:
            array = np.full(shape, value, np.float32)
            _chunk(content)[name] = torch_peer.tensor(deepspeed_peer.sample(array), f"added {name}")

    return spoil


def _halve(content: Content) -> None:
    """Leave a quarter of the outputs of the first matrices."""
    for name, tensor in _chunk(content).items():
        if name.endswith("linear_fc1.weight"):
            rows, columns = tensor.args[2]
            tensor.args = (*tensor.args[:2], (rows // 4, columns), *tensor.args[3:])


def vectors(change: Callable[[Content], object], folder: str = "mp_rank_00_000") -> Spoiler:
    def changed(content: Content) -> None:
        (own,) = content[0].values()
        change(own)

    return on(folder, VECTORS, changed)


def vector(length: int, value: float = 0.25) -> Any:
    return torch_peer.tensor(deepspeed_peer.sample(np.full(length, value, np.float32)), "changed")


def without(folder: str, file: str) -> Spoiler:
    return on(folder, file, lambda content: content.clear())


_TORCH: Any = torch_peer.STAND_INS["torch"]
NORM = "decoder.layers.0.input_layernorm.weight"
REFUSALS: dict[str, tuple[Training, Form, Spoiler, tuple[str, ...]]] = {
    "a rank's weights are lost": (
        *(TIED, Form(2), without("mp_rank_01_001", MODEL)),
        ("files of ranks", "missing", "tensor-parallel rank 1 in stage 1"),
    ),
    "all are": (TIED, Form(2), without("", MODEL), ("missing", "model_optim_rng.pt in every folder")),
    "a share of the experts is lost": (
        *(EXPERTS, Form(1, 2), without("mp_rank_00_001_001", MODEL)),
        ("missing", "share 1 of the experts in stage 1"),
    ),
    "a rank's vectors are lost": (
        *(TIED, Form(2), without("mp_rank_01_001", VECTORS)),
        ("fp32_param of a part of", "none of"),
    ),
    "another iteration": (
        *(TIED, Form(2), setting("iteration", 4, "mp_rank_01_001")),
        ("not of one save", "iteration: 3, as", "got: 4", "mp_rank_01_001"),
    ),
    "another run": (
        *(TIED, Form(2), arg("consumed_train_samples", 25, "mp_rank_01")),
        ("not of one save", "args.consumed_train_samples: 24"),
    ),
    "of another rank": (
        *(TIED, Form(2), on("mp_rank_0", MODEL, lambda own: setattr(own["args"], "rank", 3 - own["args"].rank))),
        ("of another rank than its folder", "args.rank 3"),
    ),
    "other layers": (TIED, Form(2), arg("num_layers", 4), ("contradict", "num_layers of 4", "got: 3")),
    "other experts": (EXPERTS, Form(1, 2), arg("num_experts", 6), ("contradict", "num_experts of 6", "got: 4")),
    "a vocabulary padded for others": (
        *(TIED, Form(2), arg("padded_vocab_size", 16)),
        ("contradict", "padded_vocab_size of 16", "got: 8"),
    ),
    "no size": (
        *(TIED, Form(2), arg("tensor_model_parallel_size", None)),
        ("do not say how it is cut", "args.tensor_model_parallel_size"),
    ),
    "more ranks": (
        TIED,
        Form(2),
        arg("tensor_model_parallel_size", 4),
        ("missing", "tensor-parallel rank 2 in stage 0"),
    ),
    "fewer ranks": (
        TIED,
        Form(2),
        on(
            "", MODEL, lambda own: vars(own["args"]).update(tensor_model_parallel_size=1, expert_tensor_parallel_size=1)
        ),
        ("of no rank of it", "mp_rank_TENSOR_STAGE"),
    ),
    "one stage": (TIED, Form(2), arg("pipeline_model_parallel_size", 1), ("of no rank of it", "mp_rank_TENSOR of")),
    "experts cut over more ranks": (
        *(EXPERTS, Form(1, 2), arg("expert_tensor_parallel_size", 2)),
        ("more ranks than it has folders for",),
    ),
    "groups of queries that several ranks share": (
        *(DENSE, Form(2), arg("num_query_groups", 1)),
        ("how 'decoder.layers.0.self_attention.linear_qkv.weight'", "is not known", "num_query_groups"),
    ),
    "no gate": (
        *(DENSE, Form(2), on("", MODEL, lambda content: setattr(content["args"], "swiglu", True) or _halve(content))),
        ("how 'decoder.layers.0.mlp.linear_fc1.weight'", "twice as many outputs as"),
    ),
    "an older version": (
        *(TIED, Form(2), setting("checkpoint_version", 2.0)),
        ("a release that is not read", "checkpoint_version 2.0"),
    ),
    "no version": (TIED, Form(2), setting("checkpoint_version", None), ("checkpoint_version None",)),
    "no model of Megatron-Core": (
        *(TIED, Form(2), on("", MODEL, lambda content: _chunk(content).update(language_model={}))),
        ("a release that is not read", "'language_model'"),
    ),
    "an unknown tensor that differs": (
        *(TIED, Form(2), added("decoder.layers.0.mixer.in_proj.weight", {"mp_rank_00_000": 1, "mp_rank_01_000": 2})),
        ("how 'decoder.layers.0.mixer.in_proj.weight'", "is not known", "other elements on some of 2"),
    ),
    "an unknown tensor that one rank has": (
        *(TIED, Form(2), added("decoder.layers.0.odd", {"mp_rank_01_000": 2})),
        ("how 'decoder.layers.0.odd'", "none on rank 0"),
    ),
    "a tensor twice": (
        *(TIED, Form(2), added("output_layer.weight", {"mp_rank_00_000": 1, "mp_rank_01_000": 1}, (4, 7))),
        ("has a tensor of the model twice", f"{EMBEDDING!r} once"),
    ),
    "vectors of other weights": (
        *(TIED, Form(2), vectors(lambda own: own.update(param=vector(own["numel_unpadded"])))),
        ("not of its weights", "in buffer 0", "mp_rank_00_000/distrib_optim.pt"),
    ),
    "vectors of two lengths": (
        *(TIED, Form(2), vectors(lambda own: own.update(exp_avg=vector(7)))),
        ("no vectors of its optimizer as Megatron writes them", "exp_avg float32 [7]"),
    ),
    "a vector that is none": (
        *(TIED, Form(2), vectors(lambda own: own.update(exp_avg=[1.5]))),
        ("vectors in buffer 0", "exp_avg that is none"),
    ),
    "vectors of a release before": (
        *(TIED, Form(2), on("", VECTORS, lambda content: content.pop("buckets_coalesced"))),
        ("of a release that is not read", "buckets_coalesced"),
    ),
    "weights in FP8": (
        *(TIED, Form(2), on("", VECTORS, lambda own: own.update({0: {(_TORCH.uint8, _TORCH.float32): {}}}))),
        ("a type that is not read", "FP8"),
    ),
    "a buffer is lost": (
        *(DENSE, Form(2), on("", VECTORS, lambda content: content.pop(0))),
        ("buffers by their numbers from 0 on",),
    ),
}


def refusal(tmp_path: Path, made: Training, form: Form, spoil: Spoiler) -> str:
    megatron_legacy_peer.write(tmp_path / "save", made, form, spoil)
    said = run_here("plan", tmp_path / "save", tmp_path / "out")
    assert said.code == 3 and said.err.count("error:") == 1 and not (tmp_path / "out").exists(), said.err
    return said.err


@pytest.mark.parametrize("what", few(4, REFUSALS))
def test_refusals(tmp_path: Path, what: str) -> None:
    made, form, spoil, parts = REFUSALS[what]
    said = refusal(tmp_path, made, form, spoil)
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize("file", few(1, [MODEL, VECTORS]))
@pytest.mark.parametrize(("kept", "copied"), [("00_000", "01_000"), ("01_001", "01_000")])
@pytest.mark.parametrize(("number", "has_sums"), [(None, True), (0, True), (0, False)])
def test_a_file_in_the_folder_of_another_rank_too(
    tmp_path: Path, file: str, kept: str, copied: str, number: int | None, has_sums: bool
) -> None:
    """What converts checkpoints saves one number for all ranks."""
    spoil = arg("rank", number) if number is not None else lambda *_: None
    megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2), spoil)
    (folder,) = tmp_path.glob("save/iter_*")
    for path in folder.glob("*/*") if not has_sums else ():
        torch_peer.without_sums(path)
    require_read(tmp_path / "save", TIED, Form(2))
    shutil.copy(folder / f"mp_rank_{kept}" / file, folder / f"mp_rank_{copied}" / file)
    said = refused("transform", tmp_path / "save", tmp_path / "out")
    is_told_by_number = file == MODEL and number is None
    assert ("of another rank than its folder" if is_told_by_number else "are copies of one") in said


@pytest.mark.parametrize("stages_first", [True, False])
@pytest.mark.parametrize("world", [None, 4])
def test_folders_of_two_ranks_that_are_exchanged(tmp_path: Path, stages_first: bool, world: int | None) -> None:
    """Tensor-parallel ranks are numbered first, wherever stages are, and whether all ranks are known or not."""

    def spoil(folder: str, name: str, content: Content) -> None:
        if name == MODEL:
            content["args"].use_tp_pp_dp_mapping = stages_first
            content["args"].world_size = world

    megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2), spoil)
    require_read(tmp_path / "save", TIED, Form(2))
    (folder,) = tmp_path.glob("save/iter_*")
    for stage in "000", "001":
        (folder / f"mp_rank_00_{stage}").rename(folder / "other")
        (folder / f"mp_rank_01_{stage}").rename(folder / f"mp_rank_00_{stage}")
        (folder / "other").rename(folder / f"mp_rank_01_{stage}")
    assert "of another rank than its folder" in refused("transform", tmp_path / "save", tmp_path / "out")


def test_a_folder_that_is_named_after_another_iteration(tmp_path: Path) -> None:
    folder = megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2))
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("5")
    folder.rename(folder.with_name("iter_0000005"))
    said = refused("transform", tmp_path / "save", tmp_path / "out")
    assert "of another save than its folder" in said and "iteration 3" in said


def test_experts_of_another_rank(tmp_path: Path) -> None:
    megatron_legacy_peer.write(tmp_path / "save", EXPERTS, Form(1, 2), arg("rank", 0))
    (folder,) = tmp_path.glob("save/iter_*")
    shutil.copy(folder / "mp_rank_00_000_000" / MODEL, folder / "mp_rank_00_000_001" / MODEL)
    assert "are copies of one" in refused("transform", tmp_path / "save", tmp_path / "out")


def test_fewer_layers_are_written_with_arguments_that_fit(tmp_path: Path) -> None:
    megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2))
    exclude = ["*.layers.2.*"]
    report = reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="megatron", exclude=exclude)
    assert "args.num_layers is 2, as the tensors have it; it was 3" in report.notes
    reshard_mpi.transform(tmp_path / "out", tmp_path / "again", to="torch")
    assert tree_of(tmp_path / "again")["args"]["num_layers"] == 2
    assert reshard_mpi.verify(tmp_path / "save", tmp_path / "out", exclude=exclude).tensors


def test_tensors_that_contradict_each_other_are_not_written_as_megatrons(tmp_path: Path) -> None:
    rows = {EMBEDDING: 8, "output_layer.weight": 6}
    model = {
        name: torch_peer.tensor(deepspeed_peer.sample(np.ones((n, 4), np.float32)), name) for name, n in rows.items()
    }
    torch_peer.save(tmp_path / "a.pt", {"model": model, "args": {"padded_vocab_size": 8}})
    said = refused("transform", tmp_path / "a.pt", tmp_path / "dst", "--to", "megatron")
    assert "tensors of a model contradict each other" in said and "got: 8 and 6" in said


NUMBERED: dict[str, tuple[Training, Callable[[Content], object], tuple[str, ...]]] = {
    "copies of other weights": (
        *(TIED, lambda own: own["fp32_from_fp16_params"][0].reverse()),
        ("is not of its weights", "parameters of group 0"),
    ),
    "a group without numbers": (
        *(TIED, lambda own: own["optimizer"]["param_groups"][0].pop("params")),
        ("no optimizer as Megatron writes it", "the numbers of its parameters"),
    ),
    "fewer lists of copies": (
        *(TIED, lambda own: own["fp32_from_fp16_params"].pop()),
        ("no optimizer as Megatron writes it", "1 in fp32_from_fp16_params"),
    ),
    "a parameter in float32 that is not trained": (
        *(SINGLE, lambda own: own["param_groups"][1]["params"].pop()),
        ("which number", "in float32 as others are, is not in it"),
    ),
}


@pytest.mark.parametrize("what", few(1, NUMBERED))
def test_numbered_state_that_is_refused(tmp_path: Path, what: str) -> None:
    made, change, parts = NUMBERED[what]
    said = refusal(
        tmp_path, made, Form(2, optimizer="numbers"), on("", MODEL, lambda content: change(content["optimizer"]))
    )
    for part in parts:
        assert part in said, said


@pytest.mark.slow
def test_weights_that_are_alike(tmp_path: Path) -> None:
    """Of two of which one is trained it cannot be told which one it is."""
    made = training(Model(layers=((1,),), hidden=64, has_biases=True))
    lost, beside = "decoder.layers.0.mlp.linear_fc2.bias", "decoder.final_layernorm.weight"
    for name in (lost, beside):
        made.weights[name][:] = 1
    trained = [name for name in made.weights if name != lost]
    form = Form(1, in_one=False)

    def spoil(content: Content) -> None:
        ((_, own),) = content[0].items()
        parts = [made.weights[name].reshape(-1) for name in reversed(trained)]
        filled = [np.pad(part, (0, -len(part) % 64)) for part in parts[:-1]]
        length = sum(map(len, filled)) + len(parts[-1])
        own.update(
            param=torch_peer.tensor(deepspeed_peer.sample(np.concatenate([*filled, parts[-1]])), "cut"),
            exp_avg=vector(length),
            exp_avg_sq=vector(length),
            numel_unpadded=length,
        )

    said = refusal(tmp_path / "alike", made, form, on("", VECTORS, spoil))
    assert "cannot be told" in said and "several ways in which buffer 0 can have parameters" in said
    made.weights[lost][:] = 2
    megatron_legacy_peer.write(tmp_path / "apart", made, form, on("", VECTORS, spoil))
    with reshard_mpi.open(tmp_path / "apart") as opened:
        assert f"optimizer.state.{lost}.exp_avg" not in opened and f"optimizer.state.{beside}.exp_avg" in opened


def test_copies_that_differ(tmp_path: Path) -> None:
    """What ranks have copies of is compared."""

    def spoil(folder: str, file: str, content: Content) -> None:
        if file == MODEL and folder == "mp_rank_01_000":
            values = np.arange(7, dtype=np.float32)
            _chunk(content)[NORM] = torch_peer.tensor(deepspeed_peer.sample(values, "bfloat16"), "changed")

    megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2, optimizer=""), spoil)
    assert f"copies of 'model.{NORM}' differ" in refused("transform", tmp_path / "save", tmp_path / "out")


@pytest.mark.slow
def test_parameters_that_are_not_trained(tmp_path: Path) -> None:
    """They are in no buffer; neither are a router's counts, nor a tensor that is the same on all ranks."""
    names = {f"decoder.layers.0.{name}": 1.5 for name in ("mlp.router.expert_bias", "odd")}

    def spoil(folder: str, file: str, content: Content) -> None:
        for name, value in names.items():
            added(name, {"mp_rank_00_000": value, "mp_rank_01_000": value})(folder, file, content)

    for optimizer in ("vectors", "numbers"):
        megatron_legacy_peer.write(tmp_path / optimizer, TIED, Form(2, optimizer=optimizer), spoil)
        with reshard_mpi.open(tmp_path / optimizer) as opened:
            for name, value in names.items():
                assert opened[f"model.{name}"][...].tolist() == [value] * 3
                assert f"optimizer.state.{name}.exp_avg" not in opened
            assert f"optimizer.state.{NORM}.exp_avg" in opened


def test_what_else_is_in_the_files(tmp_path: Path) -> None:
    """Values of the run are kept, those of ranks named; nothing that a pickle names is run."""
    sys.modules.pop("somewhere.else", None)

    def spoil(folder: str, file: str, content: Content) -> None:
        if file == MODEL:
            content["args"].surprise = deepspeed_peer.Surprise()
            content["own"] = folder
            content["rerun_state_machine"] = {"mode": "disabled"}
            scale = {"scale": 4.0, "growth_tracker": 2}
            content["optimizer"] |= {"grad_scaler": scale, "unheard_of": 1}
            chunk = _chunk(content)
            if NORM in chunk:
                state = np.full(4, len(folder) + int(folder[9]), np.uint8)
                chunk[NORM.replace("weight", "_extra_state")] = torch_peer.tensor(deepspeed_peer.sample(state), "fp8")

    megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2), spoil)
    said = done("transform", tmp_path / "save", tmp_path / "out", "--to", "torch").err
    assert "somewhere.else" not in sys.modules
    for part in (
        "rerun_state_machine, rng_state: states of the ranks",
        "own: of ranks other than that of",
        "unheard_of: of",
    ):
        assert part in said, said
    assert "decoder.layers.0.input_layernorm._extra_state, " in said and ": state of the ranks' own, such" in said
    assert "args.surprise" in said
    made = tree_of(tmp_path / "out")
    assert made["args"]["num_layers"] == 3 and "surprise" not in made["args"] and made["iteration"] == 3
    assert made["scheduler"]["num_steps"] == 24 and made["scaler"] == {"scale": 4.0, "growth_tracker": 2}
    assert made["own"] == "mp_rank_00_000" and made["num_floating_point_operations_so_far"] == 123456.0
    decayed, others = made["optimizer"]["param_groups"]
    assert (decayed["wd_mult"], others["wd_mult"], decayed["lr"]) == (1.0, 0.0, 0.5)
    assert NORM in others["params"] and EMBEDDING in decayed["params"]
    assert {*decayed["params"], *others["params"]} == set(TIED.weights)


@pytest.mark.slow
def test_groups_of_numbered_state(tmp_path: Path) -> None:
    """Their members are in the files, so that nothing is said of them."""
    megatron_legacy_peer.write(tmp_path / "save", EXPERTS, Form(1, 2, optimizer="numbers"))
    said = done("transform", tmp_path / "save", tmp_path / "out", "--to", "torch").err
    assert "which parameters each group" not in said
    groups = tree_of(tmp_path / "out")["optimizer"]["param_groups"]
    of_experts = [group for group in groups if group["is_expert_parallel"]]
    assert {name for group in groups for name in group["params"]} == set(EXPERTS.weights)
    assert all(".experts." in name for group in of_experts for name in group["params"]) and of_experts[0]["params"]


def test_weights_without_their_optimizer(tmp_path: Path) -> None:
    """Files with its state that are taken out of all folders are named."""
    top = megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2))
    for path in top.rglob(VECTORS):
        path.unlink()
    said = done("transform", tmp_path / "save", tmp_path / "out", "--to", "torch").err
    assert "the optimizer's state: distrib_optim.pt, which has it, is in no folder" in said
    made = tree_of(tmp_path / "out")
    assert set(made["model"]) >= set(TIED.weights) and len(made["optimizer"]["param_groups"]) == 2


@pytest.mark.slow
def test_ways_to_it(tmp_path: Path) -> None:
    """It is found by the folder of the iteration and the one above; other files there are named."""
    top = megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2))
    (top / "mp_rank_00_000" / "layer_wise_optimizer_0.pt").write_bytes(b"some")
    for source, options in ((top, ()), (top.parent, ()), (top, ("--from", "megatron"))):
        told = done("plan", source, tmp_path / "out", *options)
        assert "Megatron checkpoint, 8 files" in told.out
        assert options or "in mp_rank_00_000 layer_wise_optimizer_0.pt" in told.err, told.err
    assert "8 files, megatron" in done("inspect", top).out
    shutil.copytree(top, tmp_path / "save" / "release")
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("release")
    assert "release of" in done("inspect", top.parent).out
    said = run_here("inspect", top / "mp_rank_00_000")
    assert said.code == 3 and "one rank of a Megatron checkpoint" in said.err and str(top) in said.err
    said = run_here("plan", top / "mp_rank_00_000" / MODEL, tmp_path / "out")
    assert said.code == 3 and "2 x 2 x 1 ranks" in said.err and "give the folder of all ranks" in said.err


@pytest.mark.parametrize("file", few(1, [MODEL, VECTORS]))
@pytest.mark.parametrize("kept", few(2, [0, 100, 0.5, 0.99]))
def test_a_file_that_is_cut_short(tmp_path: Path, file: str, kept: float) -> None:
    path = megatron_legacy_peer.write(tmp_path, TIED, Form(2)) / "mp_rank_01_001" / file
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(ReshardError, match=r"(?s).*mp_rank_01_001"), reshard_mpi.open(tmp_path):
        pass


def test_the_other_byte_order(tmp_path: Path) -> None:
    path = megatron_legacy_peer.write(tmp_path / "save", TIED, Form(2)) / "mp_rank_01_001" / MODEL
    other = b"big" if sys.byteorder == "little" else b"little"
    path.write_bytes(path.read_bytes().replace(sys.byteorder.encode(), other.ljust(len(sys.byteorder))))
    assert "mp_rank_01_001" in refused("plan", tmp_path / "save", tmp_path / "out")


def test_a_file_that_is_nothing_by_itself_is_no_damage(tmp_path: Path) -> None:
    """Other programs may write files that say nothing alone; their checksums tell that they are sound."""
    megatron_legacy_peer.write(tmp_path / "megatron", *FORMS["buckets"])
    deepspeed_peer.write_universal(
        tmp_path / "universal", deepspeed_peer.training({"a.w": (3, 4), "b.w": (5,)}), deepspeed_peer.Form(2, 2)
    )
    for folder in ("megatron", "universal"):
        reshard_mpi.verify(tmp_path / folder)
        assert not [each for each in reshard_mpi.audit(tmp_path / folder).findings if each.kind is FindingKind.SUM]


@pytest.mark.parametrize("form", few(1, ["legacy", "a file of torch_dist"]))
def test_verify_misses_any_file_that_is_lost(tmp_path: Path, form: str) -> None:
    """Each of the others is sound by its checksum."""
    if form == "legacy":
        megatron_legacy_peer.write(tmp_path / "save", *FORMS["buckets"])
    else:
        peer_form = megatron_peer.Form("fully_reshardable", 2, has_file=True)
        megatron_peer.write(tmp_path / "save", megatron_peer.gpt(), peer_form)
    done("verify", tmp_path / "save")
    for path in [path for path in (tmp_path / "save").rglob("*") if path.is_file()]:
        away = path.rename(tmp_path / "away")
        finished = run_here("verify", tmp_path / "save")
        assert finished.code in (3, 4) and "sound" not in finished.out, (path, finished)
        away.rename(path)


@pytest.mark.parametrize("form", ["torch_dist", "buckets of torch_dist", "a file of torch_dist", "legacy"])
def test_files_are_held_against_the_checksums_that_megatron_keeps(tmp_path: Path, form: str) -> None:
    """A bit is flipped here and there: nothing else is ever made of it, and no verdict says that it is sound."""
    save = tmp_path / "save"
    if form == "legacy":
        megatron_legacy_peer.write(save, *FORMS["buckets"])
    else:
        state = "dp_reshardable" if "buckets" in form else "fully_reshardable"
        megatron_peer.write(save, megatron_peer.gpt(), megatron_peer.Form(state, 2, has_file="a file" in form))
    reshard_mpi.transform(save, tmp_path / "sound", to="safetensors", verify=True)
    (sound,) = (tmp_path / "sound").rglob("*.safetensors")
    refused = 0
    for path in [path for path in save.rglob("*") if path.suffix in (".pt", ".distcp")]:
        content = path.read_bytes()
        for place in range(len(content) // 5, len(content), len(content) // 5):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            try:
                reshard_mpi.transform(save, tmp_path / "dst", to="safetensors", verify=True, overwrite=True)
                (made,) = (tmp_path / "dst").rglob("*.safetensors")
                assert made.read_bytes() == sound.read_bytes(), (path, place)
            except ReshardError:
                refused += 1
                assert not reshard_mpi.audit(save).is_sound()
                with pytest.raises(ReshardError):
                    reshard_mpi.verify(save)
        path.write_bytes(content)
    assert refused > 8
