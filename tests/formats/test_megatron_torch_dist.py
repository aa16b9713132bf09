"""Trainings as Megatron-Core saves them (torch_dist): all tensors come out of every form, or the folder is refused."""

from __future__ import annotations

import codecs
import io
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, torch_peer
from support.command_line import done, refused, run_here
from support.examples import few, few_cases, many
from support.megatron_peer import FORMS, KINDS, Contents, Form, Surprise, Training, gpt, write
from support.torch_runs import tree_of

import reshard_mpi
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor


def require_all(folder: Path, training: Training) -> None:
    """Require that the tensors that are read are those of a training, bit by bit."""
    made, expected = dcp_peer.arrays_of(folder), training.expected()
    assert set(made) == set(expected)
    for name, sample in expected.items():
        assert (made[name].shape, made[name].tobytes()) == (sample.shape, sample.content), name


def forms() -> list[tuple[str, Training, Form]]:
    """Return a training and a form for each thing that can be different."""
    plain, cut = gpt(4), Form(tensor=2, stages=2, data=2, bucket=200)
    of_experts = gpt(2, experts=4)
    return [
        *((state, plain, replace(cut, state=state)) for state in FORMS),
        ("one rank", plain, Form()),
        ("chunks", gpt(8), replace(cut, chunks=2, bucket=0)),
        ("chunks and buckets", gpt(8), replace(cut, chunks=2)),
        ("a layout of the pipeline", gpt(6), replace(cut, chunks=2, layout=((1, 0), (2, 3)))),
        ("not gated", gpt(4, is_gated=False), cut),
        ("tied", gpt(2, is_tied=True), cut),
        ("tied, one stage", gpt(2, is_tied=True), Form(tensor=2, bucket=100)),
        ("float16", gpt(2, dtype="float16"), cut),
        *((f"float32, {state}", gpt(2, dtype="float32"), replace(cut, state=state)) for state in FORMS),
        ("numbered layers", gpt(4, is_numbered=True), cut),
        ("experts in the one optimizer", of_experts, Form(tensor=2, stages=2)),
        *((f"experts, {state}", of_experts, replace(cut, state=state, expert=2)) for state in FORMS),
        ("experts cut otherwise", of_experts, Form(tensor=2, expert=2, expert_tensor=1)),
        ("numbered experts", gpt(2, experts=4, is_numbered=True), replace(cut, expert=2)),
        *(
            (f"experts on the last stages, {state}", gpt(6, experts=4, is_numbered=True, dense_layers=2), own)
            for state in FORMS
            for own in [Form(state, tensor=2, stages=3, data=2, expert=2)]
        ),
        (
            "experts in the last chunk",
            gpt(8, experts=4, is_numbered=True, dense_layers=7),
            replace(cut, chunks=2, expert=2, expert_tensor=1),
        ),
        ("each a tensor of its own", gpt(4, is_apart=True), cut),
        *(
            (f"experts apart, {state}", gpt(2, experts=4, is_apart=True), replace(cut, state=state, expert=2))
            for state in FORMS
        ),
        ("experts whole on all ranks", of_experts, Form(tensor=2, expert_tensor=1)),
        ("float32 router", gpt(2, experts=2, of_float32=frozenset({"mlp.router.weight"})), cut),
        ("chunks of two types", gpt(4, of_float32=frozenset({"mlp.linear_fc2.weight"})), replace(cut, chunks=2)),
        ("release 0.15", plain, replace(cut, has_file=True, is_own_class=True, has_plans=True)),
        ("release 0.14", plain, replace(cut, state=FORMS[2], has_file=True, has_plans=True)),
    ]


@pytest.mark.parametrize(
    ("training", "form"),
    [pytest.param(*own, id=name, marks=pytest.mark.slow if at % 16 else ()) for at, (name, *own) in enumerate(forms())],
)
def test_every_form(tmp_path: Path, training: Training, form: Form) -> None:
    write(tmp_path, training, form)
    require_all(tmp_path, training)


@st.composite
def laid(draw: st.DrawFn) -> tuple[Training, Form]:
    """Draw a training, and how it is laid."""
    tensor, stages, chunks = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 3), (1, 2)))
    expert, layers = draw(st.sampled_from((0, 1, 2))), stages * chunks * draw(st.integers(1, 2))
    is_numbered, is_apart = draw(st.booleans()), draw(st.booleans())
    training = gpt(
        layers,
        hidden=draw(st.sampled_from((4, 8, 12))),
        ffn=draw(st.sampled_from((4, 8))),
        rows=4 * draw(st.integers(2, 7)),
        experts=expert * draw(st.integers(1, 2)),
        is_gated=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        is_tied=draw(st.booleans()),
        is_numbered=is_numbered,
        is_apart=is_apart,
        dense_layers=draw(st.integers(0, layers - 1)) if is_numbered or is_apart else 0,
        seed=draw(st.integers(0, 1 << 20)),
    )
    form = Form(
        draw(st.sampled_from(FORMS)),
        tensor,
        stages,
        chunks if stages > 1 else 1,
        draw(st.integers(1, 3)),
        max(expert, 1),
        bucket=draw(st.sampled_from((0, 1, 100, 400))),
        has_file=draw(st.booleans()),
        is_own_class=draw(st.booleans()),
        has_plans=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    return training, form


@pytest.mark.slow
@many(15)
@given(laid())
def test_random_trainings(tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Training, Form]) -> None:
    folder = tmp_path_factory.mktemp("training")
    write(folder, *drawn)
    require_all(folder, drawn[0])


# Weights that are alike


def with_alike(training: Training, *names: str, value: float = 1.0) -> Training:
    """Return a training in which the weights of some tensors are all one number, as they begin."""
    arrays = {key: dict(kinds) for key, kinds in training.arrays.items()}
    for name in names:
        arrays[name]["param"] = np.full_like(arrays[name]["param"], value)
    return replace(training, arrays=arrays)


NORM, OTHER = (
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
)


@pytest.mark.parametrize(
    "form",
    few(
        1,
        [
            Form(tensor=2, stages=2, bucket=100),
            Form(stages=2, chunks=2),
            Form(stages=2, chunks=2, layout=((3, 0), (2, 3))),
            Form(stages=2, chunks=3, layout=((0, 3), (2, 0), (2, 1))),
            Form(data=2),
        ],
    ),
    ids=str,
)
def test_layers_that_are_alike_are_told_by_their_order(tmp_path: Path, form: Form) -> None:
    training = with_alike(gpt(8), NORM)
    write(tmp_path, training, form)
    require_all(tmp_path, training)


@pytest.mark.slow
def test_alike_layers_in_chunks_of_which_some_have_none(tmp_path: Path) -> None:
    """The first stage has no experts in its first chunk, so its first buffer is of layers behind the second stage's."""
    training = gpt(8, experts=4, is_numbered=True, dense_layers=2)
    alike = [name for name in training.arrays if name.endswith("experts.linear_fc2.weight")]
    form = Form(stages=2, chunks=2, expert=2)
    training = with_alike(training, *alike)
    write(tmp_path / "told", training, form)
    require_all(tmp_path / "told", training)
    other = with_alike(training, *[name for name in training.arrays if ".experts." in name])
    write(tmp_path / "not", other, form)
    said = refused("plan", tmp_path / "not", tmp_path / "out")
    assert "have the same weights" in said and "linear_fc" in said


@pytest.mark.slow
def test_two_that_are_alike_in_a_layer_are_not_told(tmp_path: Path) -> None:
    """Nothing says which was built first. The form that has names needs no order."""
    training = with_alike(gpt(2), NORM, OTHER)
    write(tmp_path, training, Form(tensor=2))
    said = refused("plan", tmp_path, tmp_path.parent / "out")
    assert NORM.removeprefix("decoder.layers.") in said and OTHER.removeprefix("decoder.layers.") in said
    named = tmp_path.parent / "named"
    write(named, training, Form("fully_reshardable", tensor=2))
    require_all(named, training)


# Folders that contradict themselves


def lost(name: str) -> Any:
    """Return a change that takes a tensor or object out of a folder."""

    def change(contents: Contents) -> None:
        del (contents.tensors if name in contents.tensors else contents.objects)[name]

    return change


def lost_bucket(group: int, *, number: int = 0, prefix: str = "", kinds: tuple[str, ...] = KINDS) -> Any:
    """Return a change that takes away a bucket of a rank's first buffer. number: -1 is the last one."""

    def change(contents: Contents) -> None:
        begin = f"{prefix}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0."
        own = {
            name: int(name.split("bucket_idx_")[1].split(".")[0]) for name in contents.tensors if name.startswith(begin)
        }
        lost = number if number >= 0 else max(own.values())
        for name in [name for name in own if own[name] == lost and name.endswith(kinds)]:
            del contents.tensors[name]

    return change


def with_args(**changed: Any) -> Any:
    return lambda contents: vars(contents.common["args"]).update(changed)


def renamed(before: str, after: str) -> Any:
    """Return a change of a word in the names of all tensors."""

    def change(contents: Contents) -> None:
        kept = {name.replace(before, after): tensor for name, tensor in contents.tensors.items()}
        assert kept.keys() != contents.tensors.keys()
        contents.tensors.clear()
        contents.tensors.update(kept)

    return change


def without_experts(contents: Contents) -> None:
    """Take away the last expert of each layer, weights and all."""
    for name, tensor in contents.tensors.items():
        if ".experts." in name:
            pieces = [piece for piece in tensor.pieces if piece[1][1] != 3]
            contents.tensors[name] = tensor._replace(shape=(2, 3, *tensor.shape[2:]), pieces=pieces)


def without_pieces(word: str) -> Any:
    """Return a change that takes the last piece from each tensor with a word in its name."""

    def change(contents: Contents) -> None:
        for name, tensor in contents.tensors.items():
            if word in name:
                contents.tensors[name] = tensor._replace(pieces=tensor.pieces[:-1])

    return change


def shifted(contents: Contents) -> None:
    """Write the state of the embedding as releases do whose buckets are several: other elements, the last ones zero."""
    for kind in KINDS:
        name = f"optimizer.state.{kind}.embedding.word_embeddings.weight"
        tensor = contents.tensors[name]
        moved = [(*piece[:2], replace(piece[2], content=piece[2].content[64:] + bytes(64))) for piece in tensor.pieces]
        contents.tensors[name] = tensor._replace(pieces=moved)


def longer_bucket(contents: Contents) -> None:
    """Add elements behind the last parameter of a bucket."""
    for name, tensor in contents.tensors.items():
        if "dp_group_idx_0" in name:
            (length,) = tensor.shape
            more = SampleTensor("", tensor.pieces[0][2].dtype, (10,), bytes(40))
            contents.tensors[name] = tensor._replace(
                shape=(length + 10,), pieces=[*tensor.pieces, ("__0_0.distcp", (length,), more)]
            )


def gather_scatter(contents: Contents) -> None:
    contents.objects["optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"] = ("__0_0.distcp", [{}])


CUT = Form(tensor=2, stages=2)
BUCKETS, NAMED, FLATTENED = CUT, replace(CUT, state=FORMS[1]), replace(CUT, state=FORMS[2], data=2)
PLAIN = replace(CUT, state="none")
EXPERTS = replace(CUT, expert=2)
CONTRADICTIONS: dict[str, tuple[Form, Any, tuple[str, ...]]] = {
    "layers": (NAMED, with_args(num_layers=3), ("num_layers of 3", "got: 2")),
    "vocabulary": (NAMED, with_args(padded_vocab_size=32), ("padded_vocab_size of 32", "got: 24")),
    "width": (PLAIN, with_args(hidden_size=16), ("hidden_size of 16", "got: 8")),
    "experts": (EXPERTS, with_args(num_experts=8), ("num_experts of 8", "got: 4")),
    "tensor ranks": (BUCKETS, with_args(tensor_model_parallel_size=4), ("4 tensor-parallel ranks",)),
    "stages": (BUCKETS, with_args(pipeline_model_parallel_size=1), ("1 stages", "4 model-parallel ranks")),
    "a last rank's buckets": (BUCKETS, lost_bucket(3), ("3 model-parallel ranks",)),
    "a rank's buckets": (BUCKETS, lost_bucket(1), ("from 0 to 3",)),
    "a bucket": (replace(BUCKETS, bucket=100), lost_bucket(0), ("buckets of model-parallel rank 0",)),
    "copies in a bucket": (BUCKETS, lost_bucket(2, kinds=("param",)), ("param in float32",)),
    "the last bucket": (replace(BUCKETS, bucket=100), lost_bucket(2, number=-1), ("per_bucket_numel_unpadded",)),
    "elements of buckets": (BUCKETS, without_pieces("bucket_idx_0"), ("each once",)),
    "elements behind a bucket": (BUCKETS, longer_bucket, ("model-parallel rank 0",)),
    "buckets in FP8": (BUCKETS, renamed("(torch.bfloat16", "(torch.uint8"), ("FP8",)),
    "buckets of another type": (BUCKETS, renamed("(torch.bfloat16", "(torch.complex64"), ("complex64",)),
    "experts of an optimizer": (EXPERTS, lost_bucket(7, prefix="chained_1."), ("experts",)),
    "lost experts": (EXPERTS, without_experts, ("num_experts of 4", "got: 3")),
    "shifted state": (NAMED, shifted, ("'embedding.word_embeddings.weight'", "--overlap-grad-reduce")),
    "elements of parts": (FLATTENED, without_pieces("optimizer.state.exp_avg."), ("lacks elements",)),
    "weights without state": (NAMED, lost("output_layer.weight"), ("'output_layer.weight'",)),
    "what is in common": (NAMED, lambda contents: contents.common.clear(), ("common.pt",)),
    "another form": (NAMED, gather_scatter, ("dp_zero_gather_scatter",)),
}


@pytest.mark.parametrize("case", few(4, CONTRADICTIONS))
def test_contradictions(tmp_path: Path, case: str) -> None:
    form, change, says = CONTRADICTIONS[case]
    write(tmp_path, gpt(2, experts=4 * (form.expert > 1)), form, spoil=change)
    said = refused("plan", tmp_path, tmp_path.parent / "out")
    assert all(word in said for word in says), said
    assert str(tmp_path) in said


def test_what_is_in_common_is_of_another_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor says of which iteration it is, but the folder does."""
    folders = [tmp_path / f"iter_{iteration:07d}" for iteration in (3, 4)]
    for iteration, folder in enumerate(folders, 3):
        form = replace(NAMED, has_file=True)
        write(folder, gpt(2), form, spoil=lambda contents: contents.common.update(iteration=iteration))  # noqa: B023
        done("plan", folder, tmp_path / "out")
    shutil.copyfile(folders[1] / "common.pt", folders[0] / "common.pt")
    (tmp_path / "by a link").symlink_to(folders[0])
    monkeypatch.chdir(folders[0])
    for source in (folders[0], tmp_path / "by a link", "."):
        said = refused("plan", source, tmp_path / "out")
        assert "of another save" in said and "expected: iteration 3" in said and "got: iteration 4" in said


@pytest.mark.parametrize("state", few(1, FORMS))
def test_state_of_another_save(tmp_path: Path, state: str) -> None:
    """Copies that are not the weights' are seen before anything is written."""
    training = gpt(2)
    write(tmp_path, training, replace(CUT, state=state, data=2), stated=training.filled(1))
    assert refused("plan", tmp_path, tmp_path.parent / "out")


@pytest.mark.parametrize("state", few(1, FORMS))
def test_one_file_is_lost(tmp_path: Path, state: str) -> None:
    write(tmp_path, gpt(2), replace(CUT, state=state))
    for path in sorted(tmp_path.glob("*.distcp")):
        content = path.read_bytes()
        path.unlink()
        assert path.name in refused("plan", tmp_path, tmp_path.parent / "out")
        path.write_bytes(content)
    require_all(tmp_path, gpt(2))


@pytest.mark.slow
@pytest.mark.parametrize("state", few(1, FORMS))
def test_one_file_of_another_save(tmp_path: Path, state: str) -> None:
    """Its items have the same lengths, so what they hold must tell."""
    training = gpt(2)
    form = replace(CUT, state=state)
    write(tmp_path / "a", training, form)
    write(tmp_path / "b", training.filled(1), form)
    for path in sorted((tmp_path / "a").glob("*.distcp")):
        content = path.read_bytes()
        path.write_bytes((tmp_path / "b" / path.name).read_bytes())
        assert refused("plan", tmp_path / "a", tmp_path / "out")
        path.write_bytes(content)


def test_without_arguments(tmp_path: Path) -> None:
    """As Megatron Bridge saves it: files tell over how many ranks it is cut."""
    training = gpt(2)
    write(tmp_path, training, BUCKETS, spoil=lambda contents: contents.common.pop("args"))
    require_all(tmp_path, training)


def test_buckets_of_a_stage_with_experts_are_lost(tmp_path: Path) -> None:
    """A stage may have none, so that nothing but the weights tells."""

    def change(contents: Contents) -> None:
        for name in [*contents.tensors]:
            if name.startswith(tuple(f"chained_1.optimizer.distributed.dp_group_idx_{rank}." for rank in (4, 5))):
                lost(name)(contents)

    write(tmp_path, gpt(6, experts=4, is_numbered=True, dense_layers=2), Form(stages=3, expert=2), spoil=change)
    said = refused("plan", tmp_path, tmp_path.parent / "out")
    assert "decoder.layers.4.mlp.experts" in said and "other stages" in said and str(tmp_path) in said


@pytest.mark.parametrize("state", few(1, FORMS))
def test_one_half_of_a_gated_matrix_is_lost(tmp_path: Path, state: str) -> None:
    key = "decoder.layers.1.mlp.linear_fc1.weight"
    write(tmp_path, gpt(2, is_apart=True), replace(CUT, state=state), spoil=lost(f"{key}_v"))
    said = refused("plan", tmp_path, tmp_path.parent / "out")
    assert repr(key) in said and "bfloat16 [8, 8], none" in said and str(tmp_path) in said


# What a folder holds besides tensors


def leaves(value: Any, *keys: str) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, own in value.items() for leaf in leaves(own, *keys, str(key))]
    return [".".join(keys)]


@pytest.mark.parametrize("state", few(1, FORMS))
def test_every_key_is_told(tmp_path: Path, state: str) -> None:
    """What ranks have in common is in the target, what is theirs alone is named."""
    kept: list[Contents] = []
    write(tmp_path / "source", gpt(2), replace(CUT, state=state), spoil=kept.append)
    said = run_here("transform", tmp_path / "source", tmp_path / "out", "--to", "torch")
    assert said.code == 0
    target = tree_of(tmp_path / "out")
    common = kept[0].common
    names = {"opt_param_scheduler": "scheduler"}
    of_files = {"optimizer", "content_metadata"}
    for key, value in common.items():
        if key not in of_files:
            own = vars(value) if key == "args" else value
            made = target[names.get(key, key)]
            lacking = {leaf for leaf in leaves(own) if leaf not in {one.removesuffix(".value") for one in leaves(made)}}
            assert not lacking, key
    assert target["iteration"] == 3 and target["args"]["num_layers"] == 2
    assert target["args"]["attention_backend"]["value"] == 5
    (decayed, others) = target["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0) and decayed["step"] == 3.0
    assert not set(decayed["params"]) & set(others["params"])
    assert set(decayed["params"]) | set(others["params"]) == set(target["optimizer"]["state"])
    assert "decoder.final_layernorm.weight" in others["params"] and "output_layer.weight" in decayed["params"]
    assert "rng_state/shard_0.0_1.1" in said.err
    assert "content_metadata" in said.err
    assert ("per_bucket_numel_unpadded/" in said.err) == (state == "dp_reshardable")


@pytest.mark.slow
def test_what_transformer_engine_keeps_of_modules(tmp_path: Path) -> None:
    """Nothing, a tensor, or what a stream holds: it comes back under the same keys."""
    key = "decoder.layers.self_attention.linear_qkv._extra_state/shard_{}_3"
    scales = SampleTensor("", BY_NAME["uint8"], (3,), b"abc")
    kept = (None, torch_peer.tensor(scales, "0"), io.BytesIO(b"scales"))

    def add(contents: Contents) -> None:
        del contents.common["args"]
        contents.objects.update({key.format(layer): ("__0_0.distcp", [value]) for layer, value in enumerate(kept)})

    write(tmp_path / "source", gpt(3), replace(CUT, stages=3, state=FORMS[1]), spoil=add)
    reshard_mpi.transform(tmp_path / "source", tmp_path / "out", to="megatron", verify=True)
    with mock.patch.dict(torch_peer.STAND_INS, {"_io": io, "_codecs": codecs}):
        objects = dcp_peer.read(tmp_path / "out" / "iter_0000003").objects
    (nothing,), (tensor,), (stream,) = (objects[key.format(layer)] for layer in range(3))
    assert nothing is None and torch_peer.sample_of("", tensor).content == b"abc"
    assert stream.getvalue() == b"scales"


def test_unknown_classes_are_not_made(tmp_path: Path) -> None:
    """An object of one is left out and named, or kept as plain data; it is never made."""

    def surprise(contents: Contents) -> None:
        contents.common["surprise"] = Surprise()
        contents.objects["decoder.final_layernorm._extra_state/shard_0_1"] = ("__0_0.distcp", [Surprise()])

    write(tmp_path / "source", gpt(2), CUT, spoil=surprise)
    said = run_here("plan", tmp_path / "source", tmp_path / "out")
    assert said.code == 0 and "surprise" in said.err and "_extra_state" in said.err
    require_all(tmp_path / "source", gpt(2))


@pytest.mark.slow
def test_random_changes_are_never_read_wrong(tmp_path: Path) -> None:
    """A folder of which pieces were exchanged is refused: their boxes are right, their elements are others'."""
    draw = random.Random(5)
    training = gpt(2)
    for number in range(6):

        def exchange(contents: Contents) -> None:
            name = draw.choice([name for name in contents.tensors if name.startswith("optimizer.state.param")])
            tensor = contents.tensors[name]
            first, second = draw.sample(range(len(tensor.pieces)), 2) if len(tensor.pieces) > 1 else (0, 0)
            pieces = list(tensor.pieces)
            one, other = pieces[first], pieces[second]
            content = other[2].content if first != second else bytes(len(one[2].content))
            pieces[first] = (*one[:2], replace(one[2], content=content))
            contents.tensors[name] = tensor._replace(pieces=pieces)

        folder = tmp_path / str(number)
        write(folder, training, NAMED, spoil=exchange)
        assert "float32 copy" in refused("plan", folder, tmp_path / "out")


# Tensors that Megatron would not write


def with_gaps(sample: SampleTensor) -> torch_peer.Tensor:
    """Return a float32 tensor whose elements lie at every second place of its storage."""
    whole = np.zeros((*sample.shape, 2), np.float32)
    if sample.dtype.name != "float32":
        return torch_peer.tensor(sample, "0")
    whole[..., 0] = np.frombuffer(sample.content, np.float32).reshape(sample.shape)
    made = torch_peer.tensor(SampleTensor("", sample.dtype, whole.shape, whole.tobytes()), "0")
    stored, offset, _, strides, *rest = made.args
    return torch_peer.Tensor(made.make, stored, offset, sample.shape, strides[:-1], *rest)


@pytest.mark.parametrize("state", few(1, FORMS))
def test_elements_with_gaps_between_them(tmp_path: Path, state: str) -> None:
    """Buckets and rows of them are refused; tensors are read as torch reads them."""
    write(tmp_path, gpt(2), replace(CUT, state=state), made=with_gaps)
    if state in ("dp_reshardable", "fully_sharded_model_space"):
        assert "elements in a row" in refused("plan", tmp_path, tmp_path.parent / "out")
    else:
        require_all(tmp_path, gpt(2))


def without_dimensions(word: str) -> Any:
    """Return a change that makes tensors with a word in their names scalars."""

    def change(contents: Contents) -> None:
        for name, tensor in contents.tensors.items():
            if word in name:
                first = tensor.pieces[0][2]
                scalar = SampleTensor("", first.dtype, (), first.content[: first.dtype.itemsize_bytes])
                contents.tensors[name] = tensor._replace(shape=(), pieces=[("__0_0.distcp", (), scalar)])

    return change


@few_cases(1, "word", ["word_embeddings.weight", "linear_proj.weight", "experts.linear_fc2", "bucket_idx_0", "_avg."])
def test_scalars_are_refused(tmp_path: Path, word: str) -> None:
    form = replace(EXPERTS, state=FORMS[2] if word == "_avg." else FORMS[0])
    write(tmp_path, gpt(2, experts=4), form, spoil=without_dimensions(word))
    assert str(tmp_path) in refused("plan", tmp_path, tmp_path.parent / "out")


def test_numbers_of_many_digits(tmp_path: Path) -> None:
    """A layer of such a number is none; a bucket of such a rank is a tensor like others."""
    digits = "7" * 5000
    for place, name in enumerate((f"decoder.layers.{digits}.a", f"decoder.layers.0.experts.{digits}.a")):

        def add(contents: Contents, name: str = name) -> None:
            contents.tensors[name] = contents.tensors["decoder.final_layernorm.weight"]

        write(tmp_path / str(place), gpt(2), PLAIN, spoil=add)
        said = refused("plan", tmp_path / str(place), tmp_path / "out")
        assert "num_layers" in said or "name" in said
