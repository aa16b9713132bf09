"""DeepSpeed's folders with files that are missing, damaged or of another save: each is refused by what is wrong."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import deepspeed_peer, deepspeed_slices, torch_peer
from support.command_line import done, refused, run_here
from support.deepspeed_peer import Content, Form, Size, Training
from support.deepspeed_slices import Cut
from support.examples import few, many

from reshard_mpi.errors import ReshardError
from reshard_mpi.formats import deepspeed

OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL, MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def training(**named: object) -> Training:
    buffers = {"scale": np.float32([1, 2])}
    return deepspeed_peer.training({"a.w": (3, 4), "b.w": (5,)}, {"c.b": (7,)}, buffers=buffers, **named)


def pipeline() -> Training:
    return deepspeed_peer.training({f"{layer}.w": (2, 3) for layer in range(3)})


def experts() -> Training:
    names = "layer.deepspeed_experts."
    return deepspeed_peer.training(
        {"a.w": (3, 4)}, {f"{names}{number}.w": (2, 3) for number in range(4)}, experts={names: 4}
    )


def removed(*names: str) -> Callable[[Path], None]:
    def remove(tag: Path) -> None:
        for name in names:
            path = tag / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def of_another(name: str, form: Form, **named: object) -> Callable[[Path], None]:
    """Return what replaces a file by that of another save."""

    def replace(tag: Path) -> None:
        other = deepspeed_peer.write(tag.parent.parent / "other", training(**named), form)
        shutil.copy(other / name, tag / name)

    return replace


def cut(name: str, keep: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def shorten(tag: Path) -> None:
        (tag / name).write_bytes(keep((tag / name).read_bytes()))

    return shorten


def copied(name: str, other: str, *, has_sums: bool = True) -> Callable[[Path], None]:
    """Return what puts a copy of another file in the place of one. has_sums: their archives keep checksums."""

    def copy(tag: Path) -> None:
        if not has_sums:
            torch_peer.without_sums(tag / other)
        shutil.copy(tag / other, tag / name)

    return copy


# What is made, by which form; what is done to its folder; words of the refusal: what is expected, what is there.
SPOILED: dict[str, tuple[Training, Form, Callable[[Path], None], tuple[str, ...]]] = {
    "a rank's share": (
        training(),
        Form(2, 3),
        removed(OPTIMIZER.format(1)),
        ("missing", "3 files *_optim_states.pt", "none of data-parallel rank 1"),
    ),
    "the last share": (training(), Form(2, 3), removed(OPTIMIZER.format(2)), ("missing", "data-parallel rank 2")),
    "all shares": (
        training(),
        Form(2, 2),
        removed(OPTIMIZER.format(0), OPTIMIZER.format(1)),
        ("missing", "or zero/", "0 files"),
    ),
    "a rank's share again": (
        *(training(), Form(3, 3), copied(OPTIMIZER.format(2), OPTIMIZER.format(1))),
        ("are copies of one", OPTIMIZER.format(1), OPTIMIZER.format(2)),
    ),
    "a rank's share again, in archives without checksums": (
        *(training(), Form(3, 3), copied(OPTIMIZER.format(2), OPTIMIZER.format(1), has_sums=False)),
        ("are copies of one", OPTIMIZER.format(1), OPTIMIZER.format(2)),
    ),
    "a rank's part of what is frozen again": (
        *(
            training(frozen={"d.w": np.arange(7, dtype=np.float32)}),
            Form(3, 2),
            copied(MODEL_3.format(1), MODEL_3.format(0)),
        ),
        ("are copies of one", MODEL_3.format(0), MODEL_3.format(1)),
    ),
    "the settings": (training(), Form(2, 2), removed(MODEL), ("missing", "*mp_rank_00_model_states.pt")),
    "settings of a rank": (training(), Form(3, 3), removed(MODEL_3.format(1)), ("3 files *_model_states.pt", "rank 1")),
    "a stage": (pipeline(), Form(1, 2, stages=2), removed("mp_rank_01_model_states.pt"), ("model-parallel rank 1",)),
    "a layer": (pipeline(), Form(1, 2, stages=2), removed("layer_01-model_states.pt"), ("lacks the weights", "'1.w'")),
    "all but layers": (
        pipeline(),
        Form(1, 1, stages=2),
        removed(
            *(f"bf16_zero_pp_rank_0_mp_rank_0{n}_optim_states.pt" for n in range(2)), MODEL, "mp_rank_01" + MODEL[10:]
        ),
        ("missing", "*mp_rank_00_model_states.pt"),
    ),
    "an expert": (
        experts(),
        Form(2, 2, expert_parts=2),
        removed("layer_0_expert_2_mp_rank_00_model_states.pt"),
        ("lacks the weights", "'layer.deepspeed_experts.2.w'"),
    ),
    "a share of a later step": (
        training(),
        Form(2, 3),
        of_another(OPTIMIZER.format(1), Form(2, 3), step=4.0),
        ("not of one save", "step of group 0"),
    ),
    "a share of other values": (
        training(kinds=()),
        Form(2, 3),
        of_another(OPTIMIZER.format(1), Form(2, 3), kinds=(), seed=5),
        ("copies of 'model.a.w' differ",),
    ),
    "settings of other values": (
        training(),
        Form(2, 3),
        of_another(MODEL, Form(2, 3), seed=5),
        ("copies of 'model.a.w' differ",),
    ),
    "a share of more ranks": (
        training(),
        Form(2, 3),
        of_another(OPTIMIZER.format(1), Form(2, 4)),
        ("number of partitions: 3", "got: 4"),
    ),
    "a share too many": (
        training(),
        Form(2, 3),
        of_another(OPTIMIZER.format(3), Form(2, 4)),
        ("files of two DeepSpeed checkpoints", "3 files", OPTIMIZER.format(3)),
    ),
    "a share of stage 3": (
        training(),
        Form(2, 3),
        of_another(OPTIMIZER.format(1), Form(3, 3)),
        ("not of one save", "form of its vectors"),
    ),
    "settings of stage 3": (
        training(),
        Form(2, 3),
        of_another(MODEL_3.format(0), Form(3, 3)),
        ("two files of a DeepSpeed checkpoint are of one rank", MODEL, MODEL_3.format(0)),
    ),
    "a share in float32": (
        training(),
        Form(2, 3),
        of_another(OPTIMIZER.format(1).removeprefix("bf16_"), Form(2, 3), dtype="float32"),
        ("two files of a DeepSpeed checkpoint are of one rank", OPTIMIZER.format(1)),
    ),
    "a share with state of another kind": (
        training(),
        Form(1, 2),
        of_another(OPTIMIZER.format(1), Form(1, 2), kinds=("momentum_buffer",)),
        ("not of one save", "exp_avg_sq"),
    ),
    "half a file": (training(), Form(2, 2), cut(OPTIMIZER.format(1), lambda own: own[: len(own) // 2]), ("truncated",)),
    "an empty file": (training(), Form(2, 2), cut(OPTIMIZER.format(0), lambda own: b""), ("empty",)),
    "no file of torch": (
        training(),
        Form(2, 2),
        cut(MODEL, lambda own: b"text" * 99),
        ("a file that torch.save writes",),
    ),
}


@pytest.mark.parametrize("what", few(4, SPOILED))
def test_a_folder_that_is_spoiled(tmp_path: Path, what: str) -> None:
    made, form, spoil, words = SPOILED[what]
    tag = deepspeed_peer.write(tmp_path / "save", made, form)
    spoil(tag)
    require_refused(tmp_path, tag, *words)


def require_refused(tmp_path: Path, tag: Path, *words: str) -> None:
    for source in (tag.parent, tag):
        said = run_here("transform", source, tmp_path / "out")
        assert said.code == 3 and not (tmp_path / "out").exists(), said
        assert said.err.count("error:") == 1 and "Traceback" not in said.err
        assert "where: " in said.err and "what to do: " in said.err and str(tag) in said.err
        assert all(word in said.err for word in words), said.err


def shapes_of(**shapes: tuple[int, ...]) -> Callable[[str, Content], None]:
    def spoil(name: str, content: Content) -> None:
        for key, shape in shapes.items():
            if "model_states" in name:
                content["param_shapes"][0][key.replace("_", ".")] = Size(shape)

    return spoil


def changed(kind: str, **values: object) -> Callable[[str, Content], None]:
    def spoil(name: str, content: Content) -> None:
        if kind in name:
            (content if kind == "model_states" else content["optimizer_state_dict"]).update(values)

    return spoil


def of_size(size: int) -> torch_peer.Tensor:
    return torch_peer.tensor(deepspeed_peer.sample(np.zeros(size, np.float32)), "own")


CONTRADICTIONS: dict[str, tuple[int, Callable[[str, Content], object], tuple[str, ...]]] = {
    "a larger parameter": (2, shapes_of(a_w=(30, 4)), ("padding of group 0", "125 elements")),
    "a smaller parameter": (2, shapes_of(a_w=(2, 4)), ("padding of group 0", "13 elements")),
    "another shape of the same size": (2, shapes_of(a_w=(4, 3)), ("another shape than is listed", "[4, 3]", "[3, 4]")),
    "a larger parameter of stage 3": (3, shapes_of(a_w=(3, 5)), ("group 0", "11 elements in the vector of rank 0")),
    "one parameter more": (3, shapes_of(d_w=(3, 5)), ("group 0", "elements in the vector of rank 0")),
    "shapes that are none": (2, changed("model_states", param_shapes=[{"a.w": "large"}, {}]), ("param_shapes['a.w']",)),
    "a list of too few groups": (2, changed("model_states", param_shapes=[{"a.w": (3, 4)}]), ("1 groups", "got: 2")),
    "no number of ranks": (2, changed("model_states", dp_world_size=None), ("no dp_world_size",)),
    "a number of ranks that is none": (2, changed("model_states", dp_world_size=-1), ("no dp_world_size", "-1")),
    "partitions without numbers": (2, changed("optim_states", partition_count=None), ("no partition_count",)),
    "partitions that are too few": (2, changed("optim_states", partition_count=[2]), ("partition_count", "2 groups")),
    "partitions of odd ranks": (2, changed("optim_states", partition_count=[2, 3]), ("number of partitions", "got: 3")),
    "vectors that are none": (2, changed("optim_states", single_partition_of_fp32_groups=[1, 2]), ("vectors",)),
    "vectors of another size": (
        2,
        changed("optim_states", single_partition_of_fp32_groups=[of_size(3), of_size(3)]),
        ("group",),
    ),
    "state of a group too many": (
        2,
        changed("optim_states", base_optimizer_state={"state": {0: {}, 1: {}, 2: {}}, "param_groups": []}),
        ("the numbers of 2 groups",),
    ),
    "no optimizer": (2, changed("optim_states", base_optimizer_state=None), ("base_optimizer_state",)),
    "a name of no parameter": (2, changed("model_states", shared_params={"tied": 3}), ("shared_params['tied']",)),
}


@pytest.mark.parametrize("what", few(4, CONTRADICTIONS))
def test_what_contradicts_itself(tmp_path: Path, what: str) -> None:
    stage, spoil, words = CONTRADICTIONS[what]
    require_refused(tmp_path, deepspeed_peer.write(tmp_path / "save", training(), Form(stage, 2), spoil), *words)


UNIVERSAL: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "the folder of parameters": (removed("zero"), ("missing", "or zero/")),
    "a parameter": (removed("zero/a.w"), ("lacks a part of it", "zero/a.w with fp32.pt")),
    "a weight": (removed("zero/a.w/fp32.pt"), ("lacks a part of it", "zero/a.w with fp32.pt")),
    "state of a parameter": (removed("zero/a.w/exp_avg.pt"), ("lacks a part of it", "exp_avg.pt is not there")),
    "settings of the optimizer": (removed("zero/optimizer_state.pt"), ("zero/optimizer_state.pt",)),
    "settings of the model": (removed(MODEL), ("without its settings", "no *_model_states.pt")),
    "half a file": (cut("zero/a.w/fp32.pt", lambda own: own[: len(own) // 2]), ("truncated", "zero/a.w/fp32.pt")),
}


@pytest.mark.parametrize("what", few(2, UNIVERSAL))
def test_a_universal_folder(tmp_path: Path, what: str) -> None:
    spoil, words = UNIVERSAL[what]
    tag = deepspeed_peer.write_universal(tmp_path / "save", training(), Form(2, 2))
    spoil(tag)
    require_refused(tmp_path, tag, *words)


def test_a_parameter_of_another_shape_in_a_universal_folder(tmp_path: Path) -> None:
    tag = deepspeed_peer.write_universal(tmp_path / "save", training(), Form(2, 2), shapes_of(a_w=(4, 4)))
    require_refused(tmp_path, tag, "another shape than is listed", "[4, 4]", "[3, 4]")


def test_an_expert_in_two_files(tmp_path: Path) -> None:
    tag = deepspeed_peer.write(tmp_path / "save", experts(), Form(2, 2, expert_parts=2))
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(tag / name.format(3), tag / name.format(4))
    require_refused(tmp_path, tag, "two files of a DeepSpeed checkpoint have the same tensor", "experts.3.w' in two")


def test_files_of_a_larger_model_that_was_saved_before(tmp_path: Path) -> None:
    """DeepSpeed does not load them, and nothing in the save lists their tensors."""
    tag = deepspeed_peer.write(tmp_path / "save", pipeline(), Form(1, 2, stages=2))
    assert "another save" not in done("transform", tag, tmp_path / "whole").err
    shutil.copy(tag / "layer_02-model_states.pt", tag / "layer_09-model_states.pt")
    said = done("transform", tag, tmp_path / "out").err
    assert "warning: 1 tensor in files of their own, such as '9.w', are in no list" in said


def test_slices_of_tensor_parallelism(tmp_path: Path) -> None:
    tag = deepspeed_peer.write(tmp_path / "save", training(), Form(2, 2), changed("model_states", mp_world_size=2))
    for path in tag.glob("*mp_rank_00*"):
        shutil.copy(path, tag / path.name.replace("mp_rank_00", "mp_rank_01"))
    require_refused(tmp_path, tag, "2 tensor-parallel ranks is not read")


def test_slices_of_tensor_parallelism_in_a_pipeline(tmp_path: Path) -> None:
    tag = deepspeed_peer.write(tmp_path / "save", pipeline(), Form(1, 2, stages=2))
    for path in tag.glob("layer_*"):
        for part in range(2):
            shutil.copy(path, tag / path.name.replace("-model_states", f"-model_0{part}-model_states"))
        path.unlink()
    require_refused(tmp_path, tag, "a pipeline with 2 tensor-parallel ranks is not read")


def test_what_is_not_known_is_never_run(tmp_path: Path) -> None:
    """Objects of unknown classes are named as left out, also those of one rank alone; all else is carried over."""

    def spoil(name: str, content: Content) -> None:
        if "model_states" in name:
            content |= {"user": {"deep": deepspeed_peer.Surprise(), "count": 3}, "odd": deepspeed_peer.Surprise()}
            return
        content["extra"] = 7
        state = content["optimizer_state_dict"]
        state["mystery"] = deepspeed_peer.Surprise()
        for own in state["base_optimizer_state"]["state"].values():
            own["row"] = of_size(1)
        if "rank_1_" in name:
            state |= {"loss_scaler": deepspeed_peer.LossScaler(8.0), "of_one": 1}

    tag = deepspeed_peer.write(tmp_path / "save", training(), Form(2, 2), spoil)
    said = done("transform", tag, tmp_path / "out").err
    for name in ("mystery", "client_state.user.deep", "client_state.odd"):
        assert f"{name}: an object of somewhere.else.Surprise" in said
    assert "row of the optimizer: tensors of shape [1]" in said
    assert f"loss_scaler of {OPTIMIZER.format(1)}: it differs" in said and f"of_one of {OPTIMIZER.format(1)}" in said
    loaded = deepspeed_peer.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt")
    assert loaded["extra"] == 7 and loaded["client_state"]["user"] == {"count": 3}
    assert loaded["scaler"]["cur_scale"] == 1.0
    assert "mystery" in refused("transform", tag, tmp_path / "strict", "--strict")


def test_an_optimizer_without_names(tmp_path: Path) -> None:
    """Of a training in 16 bit without ZeRO: it cannot be read, and --exclude does without it, as the refusal says."""
    step = torch_peer.tensor(deepspeed_peer.sample(np.float32(3).reshape(())), "step")
    inner = {"state": {0: {"step": step, "exp_avg": of_size(24)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    def spoil(name: str, content: Content) -> None:
        if "model_states" in name:
            content |= {
                "param_shapes": None,
                "optimizer": {"optimizer_state_dict": inner, "fp32_groups_flat": [of_size(24)]},
            }
        else:
            content.clear()

    tag = deepspeed_peer.write(tmp_path / "save", training(), Form(2, 1), spoil)
    require_refused(tmp_path, tag, "cannot be read", "--exclude 'optimizer.*'")
    done("transform", tag, tmp_path / "out", "--exclude", "optimizer.*")
    assert {*deepspeed_peer.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt")["model"]} == {
        "a.w",
        "b.w",
        "c.b",
        "scale",
    }


def test_optimizers_of_experts_without_zero(tmp_path: Path) -> None:
    """They are named as left out, since they have no names of parameters; the weights are whole."""
    made = experts()

    def spoil(name: str, content: Content) -> None:
        if name == MODEL:
            content["param_shapes"] = None
        elif "optim_states" in name:
            content.clear()

    tag = deepspeed_peer.write(tmp_path / "save", made, Form(2, 2, expert_parts=2), spoil)
    for rank in range(2):
        deepspeed_peer.save(tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer": {"state": {}}})
    said = done("transform", tag, tmp_path / "out").err
    assert "expp_rank_0_mp_rank_00_optim_states.pt" in said and "left out" in said
    assert {*deepspeed_peer.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt")["model"]} == {*made.trained}


def test_weights_alone(tmp_path: Path) -> None:
    """As models are given away: one file with the module and nothing else."""

    def spoil(name: str, content: Content) -> None:
        kept = {"module": content["module"]} if "model_states" in name else {}
        content.clear()
        content |= kept

    tag = deepspeed_peer.write(tmp_path / "save", training(), Form(2, 1), spoil)
    done("transform", tag.parent, tmp_path / "out")
    assert {*deepspeed_peer.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt")} == {"model"}


@pytest.mark.parametrize("form", few(1, [Form(2, 2), Form(3, 2), Form(1, 2, is_bf16_optimizer=True)]))
def test_verify_misses_any_file_that_is_lost(tmp_path: Path, form: Form) -> None:
    """Each of the others is sound by its checksum."""
    tag = deepspeed_peer.write(tmp_path / "save", training(), form)
    done("verify", tag)
    for path in sorted(tag.glob("*.pt")):
        away = path.rename(tmp_path / "away")
        assert run_here("verify", tag).code == 3
        away.rename(path)
    done("verify", tag)


@pytest.mark.parametrize("rank", few(2, range(4)))
@pytest.mark.parametrize("jobs", few(1, ["1", "2"]))
def test_a_share_of_another_training_is_told_wherever_its_part_of_a_tensor_begins(
    tmp_path: Path, rank: int, jobs: str
) -> None:
    """The weights are held against their copies in float32 where each file begins, and not where tensors do alone."""
    own = deepspeed_peer.training({"large.w": (256, 128), "a.w": (16, 16)}, dtype="bfloat16")
    other = deepspeed_peer.training({"large.w": (256, 128), "a.w": (16, 16)}, dtype="bfloat16", seed=9)
    tags = [deepspeed_peer.write(tmp_path / name, made, Form(2, 4)) for name, made in (("own", own), ("other", other))]
    done("transform", tags[0], tmp_path / "out", "--jobs", jobs)
    shutil.copy(tags[1] / OPTIMIZER.format(rank), tags[0] / OPTIMIZER.format(rank))
    assert "copies of 'model." in refused("transform", tags[0], tmp_path / "out2", "--jobs", jobs)


def test_optimizers_of_another_step_than_the_models_files_are_warned_of(tmp_path: Path) -> None:
    """Of stage 3 nothing else tells it, since the weights are in the optimizers' files."""

    def later(name: str, content: Content) -> None:
        if "model_states" in name:
            content.update(global_steps=5, skipped_steps=1)

    form = Form(3, 2)
    own = deepspeed_peer.write(tmp_path / "own", training(), form)
    assert "of two saves" not in done("plan", own, tmp_path / "out").err
    mixed = deepspeed_peer.write(tmp_path / "mixed", training(), form, later)
    said = done("transform", mixed, tmp_path / "out").err
    assert "counts 3.0 steps, and" in said and "of global_steps 5, skipped_steps 1" in said and "of two saves" in said


def test_a_folder_named_after_another_step_is_warned_of(tmp_path: Path) -> None:
    """Of stage 3 the weights come of the optimizer's files, so that these may be of another save than the others."""

    def later(name: str, content: Content) -> None:
        if "model_states" in name:
            content["global_steps"] = 4

    tag = deepspeed_peer.write(tmp_path / "save", training(), Form(3, 2))
    assert tag.name == "global_step3" and "of another save" not in done("transform", tag, tmp_path / "out").err
    mixed = deepspeed_peer.write(tmp_path / "mixed", training(), Form(3, 2), later)
    (tmp_path / "by a link").symlink_to(mixed)
    said = [
        done("transform", tmp_path / "by a link", tmp_path / "out2").err,
        done("diff", mixed, mixed).err,
        run_here("audit", mixed).err,
        done("verify", mixed).err,
    ]
    assert all("is named after step 3, and" in text and "of global_steps 4" in text for text in said)
    universal = mixed.rename(mixed.with_name("global_step3_universal"))
    assert "is named after step 3, and" in done("plan", universal, tmp_path / "out3").err
    universal.rename(tmp_path / "by any name")
    assert "of another save" not in done("transform", tmp_path / "by any name", tmp_path / "out3").err


PLAIN = (None, 7, -1, 1.5, "text", b"", True, [], [None], [[]], {}, {"a": 1}, {3: 4}, (1, 2))
ODD: list[Callable[[], object]] = [
    *(lambda own=own: own for own in PLAIN),
    *(lambda size=size: of_size(size) for size in (0, 1, 5)),
    deepspeed_peer.Surprise,
]
FORMS = [
    *(Form(2, 2), Form(3, 2), Form(2, 2, is_elastic=True)),
    *(Form(1, 2, is_bf16_optimizer=True), Form(0, 2, is_bf16_optimizer=True)),
]


def places(content: object, *keys: object) -> Iterator[tuple[object, ...]]:
    """Yield where anything lies in a file, but for the attributes of objects."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield (*keys, key)
            yield from places(value, *keys, key)


def write_slices(folder: Path, made: Training, form: Form, spoil: deepspeed_peer.Spoil) -> Path:
    """Write a training cut over two tensor-parallel ranks, in all ways that there are."""
    kinds = {"a.w": Cut("row"), "c.b": Cut("averaged"), "b.w": Cut("sub-parameters", (2, 3)), "fixed": Cut("halves")}
    kinds["a.w"] = kinds["a.w"]._replace(is_mapped=form.stage > 1)
    return deepspeed_slices.write(folder, deepspeed_slices.sliced(made, kinds, 2), form, spoil)


@many(125)
@given(st.data())
def test_any_value_may_be_odd(data: st.DataObject) -> None:
    """Whatever stands in a file in place of anything, it is refused by an error of the package, or read."""
    form = data.draw(st.sampled_from(FORMS))
    writers = [deepspeed_peer.write, write_slices]
    if form.stage > 0 and not form.is_elastic:
        writers.append(deepspeed_peer.write_universal)
    write = data.draw(st.sampled_from(writers))
    made = training(frozen=deepspeed_peer.arrays({"fixed": (2, 3)}, 7), shared={"tied": "a.w"})
    names: list[str] = []

    def spoil(name: str, content: Content) -> None:
        names.append(name)
        if len(names) == chosen:
            *keys, last = data.draw(st.sampled_from([*places(content)]))
            for key in keys:
                content = content[key]
            content[last] = data.draw(st.sampled_from(ODD))()

    chosen = data.draw(st.integers(1, 12))
    with tempfile.TemporaryDirectory() as folder:
        tag = write(Path(folder), made, form, spoil)
        try:
            deepspeed.open_folder(str(tag))
        except ReshardError as error:
            assert str(error)
