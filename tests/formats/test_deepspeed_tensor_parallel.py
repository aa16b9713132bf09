"""DeepSpeed's checkpoints of tensor-parallel ranks: slices join as the files' own rules say, or are refused."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support import deepspeed_peer, deepspeed_slices, torch_peer
from support.command_line import done, refused, run_here
from support.deepspeed_peer import Content, Form, Spoil, require_read
from support.deepspeed_slices import Cut, Sliced, odd_info
from support.examples import few, many

import reshard_mpi


@many(25)
@given(deepspeed_slices.trainings())
def test_whole_tensors(drawn: tuple[Sliced, Form]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deepspeed_slices.write(Path(folder, "save"), *drawn)
        require_read(Path(folder, "save"), drawn[0].whole, drawn[1])


@pytest.mark.parametrize("stage", few(1, [0, 1, 3]))
def test_a_rank_whose_files_are_copies_of_another(tmp_path: Path, stage: int) -> None:
    training = deepspeed_peer.training({"a.w": (4, 6), "norm.w": (6,)}, dtype="float32")
    sliced = deepspeed_slices.sliced(training, {"a.w": Cut("row"), "norm.w": Cut("replicated")}, 2)
    deepspeed_slices.write(tmp_path / "save", sliced, Form(stage, 2))
    require_read(tmp_path / "save", sliced.whole, Form(stage, 2))
    for path in tmp_path.glob("save/*/*mp_rank_00*_states.pt"):
        shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    assert "are copies of one" in refused("transform", tmp_path / "save", tmp_path / "out")


def test_ranks_that_have_nothing_of_what_is_cut_may_have_the_same(tmp_path: Path) -> None:
    training = deepspeed_peer.training({"a.b": (4,)}, dtype="bfloat16", frozen={"norm.w": np.ones(3, np.float32)})
    sliced = deepspeed_slices.sliced(training, {"a.b": Cut("halves"), "norm.w": Cut("replicated")}, 4)
    deepspeed_slices.write(tmp_path / "save", sliced, Form(1, 1))
    require_read(tmp_path / "save", sliced.whole, Form(1, 1))


SHAPES = {"a.w": (4, 6), "a.b": (4,), "norm.w": (6,), "words.w": (5, 2), "qkv.w": (9, 2), "mean.w": (3, 2)}
CUTS = {
    "a.w": Cut("row"),
    "a.b": Cut("halves"),
    "norm.w": Cut("replicated"),
    "words.w": Cut("vocabulary", padding=1),
    "qkv.w": Cut("sub-parameters", (5, 2, 2)),
    "mean.w": Cut("averaged"),
}


def made(**named: Any) -> Sliced:
    return deepspeed_slices.sliced(deepspeed_peer.training(SHAPES, **named), CUTS, 2, rows=5)


@pytest.mark.parametrize("to", few(1, ["torch", "hf", "deepspeed"]))
def test_every_target(tmp_path: Path, to: str) -> None:
    whole, form = made(dtype="float32"), Form(2, 3)
    deepspeed_slices.write(tmp_path / "save", whole, form)
    ranks = ("--dp", "2", "--zero-stage", "3") if to == "deepspeed" else ()
    said = done("transform", tmp_path / "save", tmp_path / "out", "--to", to, *ranks, "--verify").err
    assert "universal_checkpoint_info says, which is not carried over" in said
    if to == "hf":
        with reshard_mpi.open(tmp_path / "out") as opened:
            assert {name: opened[name][...].tobytes() for name in opened} == {
                name: array.tobytes() for name, array in whole.whole.trained.items()
            }
    else:
        require_read(tmp_path / "out", whole.whole, form)


def test_slices_whose_axes_are_turned_in_their_files(tmp_path: Path) -> None:
    """Parts of a slice are rows of it, in whatever order its elements lie."""

    def turn(file: str, content: Content) -> None:
        for own in content.get("module", {}).values():
            stored, _, shape, *_ = own.args
            if len(shape) == 2:
                bits = np.frombuffer(stored.content, np.uint16).reshape(shape)
                turned = stored._replace(content=bits.T.tobytes())
                own.args = (turned, 0, shape, (1, shape[0]), *own.args[4:])

    whole, form = made(), Form(2, 2)
    deepspeed_slices.write(tmp_path, whole, form, turn)
    require_read(tmp_path, whole.whole, form)


def test_the_mean_is_that_of_a_sum_one_by_one(tmp_path: Path) -> None:
    """Of eight equal numbers it is another one, and of negative zeros a positive one, as torch has it."""
    training = deepspeed_peer.training({"mean.w": (64,)}, kinds=(), dtype="float32")
    training.groups[0]["mean.w"][:3] = -0.0, 0.1, 3e38 / 8
    cut = deepspeed_slices.sliced(training, {"mean.w": Cut("replicated")}, 8)
    total = np.zeros(64, np.float32)
    for _ in range(8):
        total = total + training.groups[0]["mean.w"]
    expected = total / np.float32(8)
    assert (expected.view(np.uint32) != training.groups[0]["mean.w"].view(np.uint32)).any()
    info = {**cut.info, "tp_replicated_parameter_patterns": [], "parameter_to_average_patterns": ["mean"]}
    deepspeed_slices.write(tmp_path, cut._replace(info=info), Form(1, 2))
    with reshard_mpi.open(tmp_path) as opened:
        assert opened["model.mean.w"][...].tobytes() == expected.tobytes()


@pytest.mark.slow
def test_words_that_stages_of_a_pipeline_share(tmp_path: Path) -> None:
    """The rule of the shared module is that of the layers which it is in; the padding is taken from all of them."""
    training = deepspeed_peer.training({"0.w": (5, 2), "1.w": (4, 2), "2.w": (5, 2)}, dtype="float16")
    for arrays in (training.groups[0], *training.state.values()):
        arrays["2.w"] = arrays["0.w"]
    words, name = Cut("vocabulary", padding=3), "tied_modules.embed.w"
    cut = deepspeed_slices.sliced(training, {"0.w": words, "1.w": Cut("row"), "2.w": words}, 2, rows=5)
    cut.info["vocabulary_parameter_patterns"] = [r"tied_modules\.embed"]
    cut.info["pipeline_replicated_parameter_patterns"] = [r"tied_modules\.embed"]
    form = Form(1, 2, stages=2)

    def tie(file: str, content: Content) -> None:
        state = content.get("optimizer_state_dict", {})
        for listed in (*content.get("param_shapes", ()), *state.get("param_slice_mappings", ())):
            for own in ("0.w", "2.w"):
                if own in listed:
                    listed[name] = listed.pop(own)
                    for other in {"1.w"} & listed.keys():
                        listed[other] = listed.pop(other)

    deepspeed_slices.write(tmp_path / "save", cut, form, tie)
    wholes = deepspeed_peer.expected(training, form)
    expected = {own: sample for own, sample in wholes.items() if "state.0.w" not in own and "state.2.w" not in own}
    of_state = {own: sample for own, sample in wholes.items() if "state.0.w" in own}
    expected |= {own.replace("0.w", name): sample for own, sample in of_state.items()}
    expected[f"model.{name}"] = wholes["model.0.w"]
    # Written back it has these stages, each whole.
    reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="deepspeed", dp=3, zero_stage=1)
    for folder in ("save", "out"):
        with reshard_mpi.open(tmp_path / folder) as opened:
            assert {own: opened[own][...].tobytes() for own in opened} == {
                own: sample.content for own, sample in expected.items()
            }
    names = [f"mp_rank_0{stage}_model_states.pt" for stage in (0, 1)]
    shapes = [deepspeed_peer.load(tmp_path / "out/global_step3" / own)["param_shapes"] for own in names]
    assert [[*own] for (own,) in shapes] == [[name, "1.w"], [name]]


def _save_model_states_of_two_ranks(
    tag: Path, training: deepspeed_peer.Training, form: Form, of_the_second: dict[str, object]
) -> None:
    """Put the model's files of two model ranks in place of those of ``tag``; the second has values of its own."""
    for path in tag.glob("*_model_states.pt"):
        path.unlink()
    for rank in range(2):
        for name, content in deepspeed_peer.contents(training, form):
            if "model_states" in name:
                content["mp_world_size"] = 2
                content["module"].update(of_the_second if rank else {})
                deepspeed_peer.save(tag / name.replace("mp_rank_00", f"mp_rank_{rank:02d}"), content)


@pytest.mark.parametrize("stage", few(1, [2, 3]))
@pytest.mark.parametrize("what", few(2, ["copies", "other values", "other shapes", "a weight"]))
def test_a_universal_folder_of_slices_has_the_buffers_of_its_ranks(tmp_path: Path, stage: int, what: str) -> None:
    """ds_to_universal.py leaves them in the files of ranks, where each has all of them."""
    training = deepspeed_peer.training({"a.w": (4, 6)}, buffers={"scale": np.arange(3, dtype=np.float32)})
    half = deepspeed_peer.training({"a.w": (2, 6)}, buffers=training.buffers)
    form = Form(stage, 2)
    tag = deepspeed_peer.write_universal(tmp_path, training, form)
    changed = {}
    if what != "copies":
        other = np.arange(4 if what == "other shapes" else 3, dtype=np.float32)[::-1].copy()
        key = "more.w" if what == "a weight" else "scale"
        changed[key] = torch_peer.tensor(deepspeed_peer.sample(other), "new")
    _save_model_states_of_two_ranks(tag, half, form, changed)
    if what == "copies":
        with reshard_mpi.open(tmp_path) as opened:
            assert opened["model.scale"][...].tolist() == [0, 1, 2]
            assert opened["optimizer.state.a.w.exp_avg"][...].tobytes() == training.state["exp_avg"]["a.w"].tobytes()
        return
    said = run_here("transform", tmp_path, tmp_path / "out")
    assert said.code == 3 and not (tmp_path / "out").exists()
    assert ("'more.w'" if what == "a weight" else "scale") in said.err


@pytest.mark.parametrize("stage", few(1, [2, 3]))
def test_a_universal_folder_of_slices_has_second_names_and_no_strays(tmp_path: Path, stage: int) -> None:
    """A parameter of a model that was saved before is told, as it is where the model's files are of one rank."""
    training = deepspeed_peer.training({"a.w": (4, 6)}, shared={"head.w": "a.w"}, dtype="bfloat16")
    half = deepspeed_peer.training({"a.w": (2, 6)}, shared=training.shared, dtype="bfloat16")
    form = Form(stage, 2)
    tag = deepspeed_peer.write_universal(tmp_path, training, form)
    for name in "head.w", "old.w":
        (tag / "zero" / name).mkdir()
        shutil.copy(tag / "zero/a.w/fp32.pt", tag / "zero" / name)
    _save_model_states_of_two_ranks(tag, half, form, {})
    with reshard_mpi.open(tmp_path) as opened:
        assert {name for name in opened if name.startswith("model.")} == {"model.a.w", "model.head.w"}
        assert opened["model.head.w"][...].tobytes() == opened["model.a.w"][...].tobytes()
    said = run_here("transform", tmp_path, tmp_path / "out")
    assert said.code == 0 and "'old.w'" in said.err


def test_a_slice_that_is_said_to_be_whole_is_told_behind_many_others(tmp_path: Path) -> None:
    """Both ranks have another half of it, and the same of all that comes before it."""
    shapes = {f"{number}.norm": (number + 1,) for number in range(12)}
    training = deepspeed_peer.training({**shapes, "up.w": (4, 6)}, dtype="bfloat16")
    kinds = {**dict.fromkeys(shapes, Cut("replicated")), "up.w": Cut("row")}
    sliced = deepspeed_slices.sliced(training, kinds, 2)
    deepspeed_slices.write(tmp_path / "save", sliced, Form(2, 2))
    require_read(tmp_path / "save", sliced.whole, Form(2, 2))
    wrong = deepspeed_slices.info_of(sliced.whole.trained, {**kinds, "up.w": Cut("replicated")}, 2, 0.4)
    deepspeed_slices.write(tmp_path / "wrong", sliced._replace(info=wrong), Form(2, 2))
    assert "copies of 'model.up.w' differ" in refused("transform", tmp_path / "wrong", tmp_path / "out")


def test_a_universal_folder_of_a_pipeline_has_parameters_that_are_not_trained(tmp_path: Path) -> None:
    """The files of its layers have the names, and the files of its stages do not."""
    training = deepspeed_peer.training({f"{layer}.w": (2, 3) for layer in range(3)})
    tag = deepspeed_peer.write_universal(tmp_path, training, Form(1, 2, stages=2))
    (tag / "zero" / "2.frozen").mkdir()
    shutil.copy(tag / "zero/2.w/fp32.pt", tag / "zero" / "2.frozen")
    with reshard_mpi.open(tmp_path) as opened:
        assert opened["model.2.frozen"][...].tobytes() == training.trained["2.w"].tobytes()


def changed_slice(rank: int, name: str, change: Any) -> Spoil:
    """Return what replaces a tensor of the model of a tensor-parallel rank."""

    def spoil(file: str, content: Content) -> None:
        if file == f"mp_rank_{rank:02d}_model_states.pt":
            content["module"][name] = change(content["module"])

    return spoil


def without_info(name: str, content: Content) -> None:
    content.pop("universal_checkpoint_info", None)


def of_one_rank(name: str, content: Content) -> None:
    if name.startswith("mp_rank_01"):
        odd_info(original_vocab_size=4)(name, content)


def renamed(name: str, content: Content) -> None:
    if name.startswith("mp_rank_01"):
        content["param_shapes"][0]["other.w"] = content["param_shapes"][0].pop("mean.w")


SUB, WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
QKV = "^qkv\\.w$"


def fused(shape: list[Any], dim: int = 0) -> list[Content]:
    return [{"patterns": [QKV], "shape": shape, "partition_dim": dim}]


def piece(**values: Any) -> Content:
    """Return a map of a parameter of which both ranks have the whole, with other values in the first rank's piece."""
    own = {"shape": [6], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
    ranks = {0: {"shard_shape": [6], "pieces": [own | values]}, 1: {"shard_shape": [6], "pieces": [own]}}
    return {"version": 1, "params": {"norm": {"logical_shape": [6], "ranks": ranks}}}


def half_a_map() -> Content:
    """Return a map in which the last two elements of a parameter are nowhere."""
    own = piece(shape=[4])
    ranks = own["params"]["norm"]["ranks"]
    ranks[1] = ranks[0]
    return own


UNSOUND: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no info": (without_info, ("2 tensor-parallel ranks is not read", "and no universal_checkpoint_info")),
    "an info that is none": (
        lambda name, content: content.update(universal_checkpoint_info=3),
        ("2 tensor-parallel ranks is not read",),
    ),
    "another info on one rank": (of_one_rank, ("differ in universal_checkpoint_info",)),
    "other parameters on one rank": (renamed, ("have different parameters", "'mean.w'")),
    "patterns that are none": (odd_info(tp_replicated_parameter_patterns="norm"), ("a list of regular expressions",)),
    "a pattern that is none": (odd_info(tp_replicated_parameter_patterns=[3]), ("a regular expression of at most",)),
    "a pattern that is wrong": (odd_info(tp_replicated_parameter_patterns=["(norm"]), ("'(norm'", "unterminated")),
    "a pattern that is long": (odd_info(tp_replicated_parameter_patterns=["x" * 1001]), ("at most 1000 characters",)),
    "a repeated group": (odd_info(tp_replicated_parameter_patterns=["(x*)*y"]), ("without repeated groups", "(x*)*y")),
    "a group repeated in braces": (
        odd_info(tp_replicated_parameter_patterns=["(x*){9}"]),
        ("without repeated groups",),
    ),
    "a reference": (odd_info(tp_replicated_parameter_patterns=["(x)\\1"]), ("without repeated groups, references",)),
    "looking ahead": (odd_info(tp_replicated_parameter_patterns=["(?=x)"]), ("looking around",)),
    "many repetitions": (odd_info(tp_replicated_parameter_patterns=["x*" * 20]), ("few repetitions", "x*x*")),
    "many alternatives": (odd_info(tp_replicated_parameter_patterns=["(x|x)" * 40]), ("few repetitions",)),
    "two patterns of one": (
        odd_info(tp_replicated_parameter_patterns=["norm", "norm.w"]),
        ("one pattern of tp_replicated_parameter_patterns for 'norm.w'", "'norm', 'norm.w'"),
    ),
    "copies of other shapes": (
        odd_info(tp_replicated_parameter_patterns=["qkv", "norm"]),
        ("the same shape on all ranks", "[5, 2], [4, 2]"),
    ),
    "slices of other widths": (
        odd_info(parameter_with_row_parallelism_patterns=["qkv", "a.w"], **{SUB: []}),
        ("qkv.w",),
    ),
    "no dimension to join": (
        odd_info(parameter_with_row_parallelism_patterns=["norm", "a.w"], tp_replicated_parameter_patterns=[]),
        ("slices that join along dimension 1", "'norm.w'"),
    ),
    "halves of odd rows": (
        odd_info(parameter_with_2_sub_params_cat_dim_0=["a.b", "words"]),
        ("two halves along dimension 0", "'words.w'"),
    ),
    "no widths": (odd_info(**{WIDTHS: {}}), ("the width on each of 2 ranks", "no sub_param_shard_widths")),
    "widths of other sums": (odd_info(**{WIDTHS: {QKV: [[3, 2], [1, 1], [1, 2]]}}), ("in all (5, 2, 2)",)),
    "widths of other ranks": (odd_info(**{WIDTHS: {QKV: [[5], [2], [2]]}}), ("the width on each of 2 ranks",)),
    "widths of other slices": (odd_info(**{WIDTHS: {QKV: [[2, 3], [1, 1], [1, 1]]}}), ("slices that have 4, 5",)),
    "widths along dimension 1": (
        odd_info(**{SUB: fused([-1, (2, 2)], 1), WIDTHS: {QKV: [[1, 1], [1, 1]]}}),
        ("'qkv.w'", "not joined"),
    ),
    "sizes that no ranks divide": (odd_info(universal_checkpoint_version=0.2), ("the width on each of 2 ranks",)),
    "a count that does not divide": (
        odd_info(universal_checkpoint_version=0.2, **{SUB: fused([2, -1])}),
        ("2 sub-parameters of one size", "9 along dimension 0"),
    ),
    "a dimension that is none": (odd_info(**{SUB: fused([(5, 2, 2), -1], 2)}), ("a partition_dim",)),
    "sub-parameters that are none": (odd_info(**{SUB: 3}), ("a list as parameter_with_sub_params",)),
    "no size of a vocabulary": (odd_info(original_vocab_size=None), ("original_vocab_size", "'words.w'")),
    "a size that is none": (odd_info(original_vocab_size="5"), ("a number as original_vocab_size",)),
    "a version that is none": (
        odd_info(universal_checkpoint_version="new"),
        ("a number as universal_checkpoint_version",),
    ),
    "what AutoTP cannot": (odd_info(autotp_unsupported_parameter_patterns={"norm": "odd heads"}), ("odd heads",)),
    "a newer map": (odd_info(affine_map={"version": 2, "params": {}}), ("an affine_map of version 1",)),
    "a scaled map": (odd_info(affine_map=piece(scale=0.5)), ("'norm.w'", "unscaled")),
    "a map that leaves the whole": (odd_info(affine_map=piece(source=[1, [1]])), ("'norm.w'", "boxes of the whole")),
    "a map of other strides": (odd_info(affine_map=piece(dest=[0, [2]])), ("'norm.w'", "whole rows")),
    "a map that is none": (odd_info(affine_map={"version": 1, "params": {"words": None}}), ("an affine_map with",)),
    "a map with a hole": (odd_info(affine_map=half_a_map()), ("'model.norm.w'", "box [4:6]")),
    "copies that differ": (changed_slice(1, "norm.w", lambda own: own["mean.w"]), ("'norm.w'",)),
}


@pytest.mark.parametrize("what", few(2, UNSOUND))
def test_what_is_refused(tmp_path: Path, what: str) -> None:
    spoil, words = UNSOUND[what]
    tag = deepspeed_slices.write(tmp_path / "save", made(), Form(2, 2), spoil)
    said = run_here("transform", tag, tmp_path / "out")
    assert said.code == 3 and not (tmp_path / "out").exists(), said
    assert said.err.count("error:") == 1 and "Traceback" not in said.err
    assert "where: " in said.err and "what to do: " in said.err and all(word in said.err for word in words), said.err


SPEC = """
mesh = { tensor = 2 }

[[parameter]]
match = "model.a.w"
split = { 1 = ["tensor"] }

[[parameter]]
match = ["qkv.w", "*.odd.b"]
split = { 0 = ["tensor"] }
sizes = { 0 = [5, 4] }

[[parameter]]
match = "*.words.w"
split = { 0 = ["tensor"] }
"""
PLACED = {"a.w": (4, 6), "norm.w": (6,), "qkv.w": (9, 2), "words.w": (6, 2)}
BY_SPEC = {"a.w": Cut("row"), "norm.w": Cut("replicated"), "qkv.w": Cut("column"), "words.w": Cut("column")}


def placed(folder: Path, form: Form, **named: Any) -> Sliced:
    """Write a training that two ranks have cut as SPEC says, and the spec, without an info."""
    training = deepspeed_peer.training(PLACED, buffers={"n": np.arange(3)}, **named)
    cut = deepspeed_slices.sliced(training, BY_SPEC, 2)
    deepspeed_slices.write(folder / "save", cut, form, without_info)
    (folder / "spec.toml").write_text(SPEC)
    return cut


@pytest.mark.parametrize("stage", few(1, [1, 2, 3]))
def test_a_strategy_of_the_user_says_how_slices_join(tmp_path: Path, stage: int) -> None:
    form = Form(stage, 3)
    whole = placed(tmp_path, form).whole
    asked: dict[str, Any] = {"src_strategy": tmp_path / "spec.toml"}
    report = reshard_mpi.transform(tmp_path / "save", tmp_path / "torch", to="torch", verify=True, **asked)
    assert any("as the source strategy says" in note for note in report.notes)
    expected = deepspeed_peer.expected(whole, form)
    with reshard_mpi.open(tmp_path / "save", **asked) as opened:
        assert {name: opened[name][...].tobytes() for name in opened} == {
            name: own.content for name, own in expected.items()
        }
    reshard_mpi.transform(tmp_path / "save", tmp_path / "out", to="deepspeed", dp=2, zero_stage=stage, **asked)
    require_read(tmp_path / "out", whole, form)
    reshard_mpi.verify(tmp_path / "save", tmp_path / "out", **asked)
    # By itself it is opened as a whole, too, to see whether a file is missing.
    alone = ("verify", tmp_path / "save", "--src-strategy", tmp_path / "spec.toml")
    assert "sound" in done(*alone).out
    assert "or --src-strategy, which says so" in run_here(*alone[:2]).err
    min((tmp_path / "save" / "global_step3").glob("*mp_rank_01*")).unlink()
    assert run_here(*alone).code == 3


ODD_SPECS = {
    "other ranks": (SPEC.replace("2", "3", 1).replace("[5, 4]", "[3, 3, 3]"), "a mesh of 2 ranks"),
    "other sizes": (SPEC.replace("[5, 4]", "[4, 5]"), "'qkv.w'"),
    "a slice for a copy": (SPEC.replace("*.words.w", "none"), "'model.words.w'"),
}


@pytest.mark.parametrize("what", ODD_SPECS)
def test_a_strategy_that_is_not_the_one_of_the_ranks_is_refused(tmp_path: Path, what: str) -> None:
    placed(tmp_path, Form(2, 2))
    spec, words = ODD_SPECS[what]
    (tmp_path / "spec.toml").write_text(spec)
    said = run_here("transform", tmp_path / "save", tmp_path / "out", "--src-strategy", tmp_path / "spec.toml")
    assert said.code == 3 and words in said.err and not (tmp_path / "out").exists(), said.err


def test_a_strategy_without_slices_is_refused(tmp_path: Path) -> None:
    deepspeed_peer.write(tmp_path / "save", deepspeed_peer.training(PLACED), Form(2, 2))
    (tmp_path / "spec.toml").write_text(SPEC)
    said = run_here("transform", tmp_path / "save", tmp_path / "out", "--src-strategy", tmp_path / "spec.toml")
    assert said.code == 3 and "leave that strategy out" in said.err
