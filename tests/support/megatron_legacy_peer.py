"""Megatron's older checkpoints by other means than the format under test: numpy, zipfile and the standard pickler.

A training is whole tensors; a form says over which ranks they are laid. Keys and layout are those of release 0.18.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from reshard_mpi.testing.sample_tensors import SampleTensor
from support import deepspeed_peer, torch_peer
from support.deepspeed_peer import Array, Arrays, Content, sample

# What a test does to the content of a file before it is written; it is given the name of its folder, and its own.
Spoil = Callable[[str, str, Content], object]
MODEL, VECTORS = "model_optim_rng.pt", "distrib_optim.pt"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_KINDS = ("exp_avg", "exp_avg_sq")
_HELD = torch_peer.STAND_INS["torch"]


@dataclass(frozen=True)
class Model:
    """The sizes of a model.

    Attributes:
        layers: how many there are in each stage of each chunk, chunk by chunk.
        experts: how many each layer has; 0: none.
        is_grouped: whether experts are one module, as Transformer Engine has them.
    """

    layers: Sequence[Sequence[int]] = ((1, 1),)
    hidden: int = 6
    heads: int = 4
    groups: int = 2
    head: int = 2
    inner: int = 4
    rows: int = 8
    is_gated: bool = True
    has_biases: bool = False
    is_tied: bool = False
    experts: int = 0
    is_grouped: bool = False
    dtype: str = "bfloat16"

    @property
    def stages(self) -> int:
        return len(self.layers[0])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters, in the order in which modules are built."""
        named: dict[str, tuple[int, ...]] = {EMBEDDING: (self.rows, self.hidden)}
        for layer in range(sum(map(sum, self.layers))):
            for name, shape in self._of_layer():
                named[f"decoder.layers.{layer}.{name}"] = shape
        named["decoder.final_layernorm.weight"] = (self.hidden,)
        return named if self.is_tied else {**named, HEAD: (self.rows, self.hidden)}

    def _of_layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, biases = self.heads * self.head, range(self.has_biases)
        yield "input_layernorm.weight", (self.hidden,)
        yield "self_attention.linear_proj.weight", (self.hidden, width)
        yield from (("self_attention.linear_proj.bias", (self.hidden,)) for _ in biases)
        yield "self_attention.linear_qkv.weight", (width + 2 * self.groups * self.head, self.hidden)
        yield "self_attention.linear_qkv.bias", (width + 2 * self.groups * self.head,)
        yield "pre_mlp_layernorm.weight", (self.hidden,)
        outputs = self.inner * (1 + self.is_gated)
        if not self.experts:
            yield "mlp.linear_fc1.weight", (outputs, self.hidden)
            yield from (("mlp.linear_fc1.bias", (outputs,)) for _ in biases)
            yield "mlp.linear_fc2.weight", (self.hidden, self.inner)
            yield from (("mlp.linear_fc2.bias", (self.hidden,)) for _ in biases)
            return
        yield "mlp.router.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            yield self.expert(expert, "fc1"), (outputs, self.hidden)
            yield self.expert(expert, "fc2"), (self.hidden, self.inner)

    def expert(self, number: int, matrix: str) -> str:
        """Return the name of an expert's matrix within its layer."""
        if self.is_grouped:
            return f"mlp.experts.linear_{matrix}.weight{number}"
        return f"mlp.experts.local_experts.{number}.linear_{matrix}.weight"


@dataclass(frozen=True)
class Form:
    """How a training is laid over ranks and files.

    Attributes:
        expert_tensor: over how many ranks matrices of experts are cut; None: as others.
        optimizer: "vectors" of the distributed one, "numbers" of torch's own, or "" for none.
        bucket: a bucket is full from so many elements on; 0: never.
        in_one: whether weights are views of one buffer, as in memory with the distributed optimizer.
    """

    tensor: int = 1
    shares: int = 1
    expert_tensor: int | None = None
    optimizer: str = "vectors"
    bucket: int = 0
    in_one: bool = True


@dataclass(frozen=True)
class Training:
    """The whole tensors of a training: parameters in float32, and the state of each by kind."""

    model: Model
    weights: Arrays
    state: Mapping[str, Arrays] = field(default_factory=dict)


def training(model: Model, seed: int = 0) -> Training:
    """Return a training no two of whose weights are alike, in 16 bits either."""
    shapes = model.shapes()
    random = np.random.default_rng(seed)
    total = sum(map(math.prod, shapes.values()))
    high = random.permutation(0x7000)[:total].astype(np.uint32) + 0x400
    assert len(high) == total, "too large a model for values of its own"
    if model.dtype == "float16":
        exact = high.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        values = (exact + random.integers(0, 0x1000, total, dtype=np.uint32)).view(np.float32)
    else:
        values = ((high << 16) + random.integers(0, 0x8000, total, dtype=np.uint32)).view(np.float32)
    starts = itertools.accumulate(map(math.prod, shapes.values()), initial=0)
    weights = {name: values[at : at + math.prod(own)].reshape(own) for at, (name, own) in zip(starts, shapes.items())}
    state = {kind: deepspeed_peer.arrays(shapes, seed + at + 1) for at, kind in enumerate(_KINDS)}
    return Training(model, weights, state)


class Rank(NamedTuple):
    """A rank of a form: its number, its places, and whether it is the first of those that have the same."""

    number: int
    tensor: int
    stage: int
    share: int
    part: int
    is_first: bool
    is_first_of_experts: bool


def ranks(model: Model, form: Form) -> Iterator[Rank]:
    """Yield the ranks, as Megatron numbers them, that write files."""
    parts = form.expert_tensor or form.tensor
    of_stage = form.tensor * form.shares
    for stage, number in itertools.product(range(model.stages), range(of_stage)):
        is_first, is_first_of_experts = number < form.tensor, number < parts * form.shares
        if is_first or is_first_of_experts:
            share = number // parts % form.shares
            places = number % form.tensor, stage, share, number % parts
            yield Rank(stage * of_stage + number, *places, is_first, is_first_of_experts)


def folder_name(model: Model, form: Form, rank: Rank) -> str:
    stage = f"_{rank.stage:03d}" if model.stages > 1 else ""
    return f"mp_rank_{rank.tensor:02d}{stage}" + (f"_{rank.share:03d}" if form.shares > 1 else "")


def is_of_experts(name: str) -> bool:
    return ".experts." in name


def _chunks(made: Training, form: Form, rank: Rank) -> list[dict[str, str]]:
    """Return for each chunk of a rank the names that parameters have in its file, and their own names."""
    model, chunks, layer = made.model, list[dict[str, str]](), 0
    own_experts = model.experts // form.shares
    for number, counts in enumerate(model.layers):
        of_chunk: dict[str, str] = {}
        for stage, count in enumerate(counts):
            if stage == rank.stage:
                if stage == number == 0:
                    of_chunk[EMBEDDING] = EMBEDDING
                for local, name in itertools.product(range(count), made.weights):
                    before, after = f"decoder.layers.{layer + local}.", name.split(".", 3)[-1]
                    if name.startswith(before):
                        for expert in range(model.experts):
                            for matrix in ("fc1", "fc2"):
                                if after == model.expert(expert, matrix):
                                    is_own = expert // own_experts == rank.share
                                    after = model.expert(expert % own_experts, matrix) if is_own else ""
                        if after:
                            of_chunk[f"decoder.layers.{local}.{after}"] = name
                if stage == model.stages - 1 and number == len(model.layers) - 1:
                    of_chunk["decoder.final_layernorm.weight"] = "decoder.final_layernorm.weight"
                    if not model.is_tied or model.stages > 1:
                        of_chunk[HEAD] = EMBEDDING if model.is_tied else HEAD
            layer += count
        chunks.append(of_chunk)
    return chunks


def cut(name: str, whole: Array, model: Model, form: Form, rank: Rank) -> Array:
    """Return what a rank has of a parameter."""
    is_expert = is_of_experts(name)
    parts = (form.expert_tensor or form.tensor) if is_expert else form.tensor
    part = rank.part if is_expert else rank.tensor
    if "linear_fc1" in name and model.is_gated:
        return np.concatenate([np.split(half, parts)[part] for half in np.split(whole, 2)])
    if any(word in name for word in ("linear_fc1", "linear_qkv", "word_embeddings", "output_layer")):
        return np.split(whole, parts)[part]
    if ("linear_proj" in name or "linear_fc2" in name) and whole.ndim == 2:
        return np.split(whole, parts, axis=1)[part]
    return whole


def write(folder: Path, made: Training, form: Form, spoil: Spoil = lambda folder, name, content: None) -> Path:
    """Write a checkpoint below `folder`, with the file that names it; return the folder of its iteration."""
    top = folder / "iter_0000003"
    top.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    for rank in ranks(made.model, form):
        name = folder_name(made.model, form, rank)
        (top / name).mkdir()
        for file, content in ((MODEL, _model(made, form, rank)), (VECTORS, _vectors(made, form, rank))):
            spoil(name, file, content)
            if content:
                own = content.get("list", content)
                deepspeed_peer.save(top / name / file, own)
    return top


def arguments(model: Model, form: Form) -> dict[str, Any]:
    """Return the arguments of a run, as far as they say how it is laid over ranks."""
    return {
        "num_layers": sum(map(sum, model.layers)),
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "group_query_attention": True,
        "swiglu": model.is_gated,
        "padded_vocab_size": model.rows,
        "untie_embeddings_and_output_weights": not model.is_tied,
        "tensor_model_parallel_size": form.tensor,
        "pipeline_model_parallel_size": model.stages,
        "virtual_pipeline_model_parallel_size": len(model.layers) if len(model.layers) > 1 else None,
        "expert_model_parallel_size": form.shares,
        "expert_tensor_parallel_size": form.expert_tensor or form.tensor,
        "num_experts": model.experts or None,
        "world_size": form.tensor * form.shares * model.stages,
        "use_distributed_optimizer": form.optimizer == "vectors",
        "consumed_train_samples": 24,
    }


class _File(deepspeed_peer.File):
    """Gives tensors of a file storages: one each, or one for several."""

    def views(self, buffer: Array, dtype: str, starts: Mapping[str, int], shapes: Mapping[str, Array]) -> Content:
        """Return tensors that are views of one vector."""
        whole = self.tensor(buffer, dtype)
        made: Content = {}
        for name, start in starts.items():
            _, _, _, _, *rest = whole.args
            shape = shapes[name].shape
            strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
            made[name] = torch_peer.Tensor(whole.make, whole.args[0], start, shape, strides, *rest)
        return made


def _model(made: Training, form: Form, rank: Rank) -> Content:
    """Return the content of a rank's file of weights."""
    file, model = _File(), made.model
    chunks = _chunks(made, form, rank)
    content: Content = {
        "args": argparse.Namespace(**arguments(model, form), rank=rank.number),
        "checkpoint_version": 3.0,
        "iteration": 3,
    }
    for number, names in enumerate(chunks):
        tensors = {name: cut(own, made.weights[own], model, form, rank) for name, own in names.items()}
        views: Content = {}
        for is_expert in (False, True) if form.in_one and form.optimizer == "vectors" else ():
            own = {name: array for name, array in tensors.items() if _is_apart(names[name], form) == is_expert}
            if own:
                buffer = _buffer(own, form, model)
                starts = {name: start for name, (start, _) in buffer.items()}
                memory = np.zeros(max(starts[name] + own[name].size for name in own) + 77, np.float32)
                for name, start in starts.items():
                    memory[start : start + own[name].size] = own[name].reshape(-1)
                views |= file.views(memory, model.dtype, starts, own)
        ordered = ((name, views.get(name) or file.tensor(array, model.dtype)) for name, array in tensors.items())
        entries: OrderedDict[str, Any] = OrderedDict(
            part
            for name, tensor in ordered
            for part in ((name, tensor), (f"{name.rpartition('.')[0]}._extra_state", None))
        )
        content["model" if len(chunks) == 1 else f"model{number}"] = entries
    if form.optimizer:
        content["optimizer"] = _optimizer(made, form, rank, file)
    content["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": 24}
    content["rng_state"] = [{"random_rng_state": (3, (1, 2), None)}]
    content["num_floating_point_operations_so_far"] = 123456.0
    return content


def _is_apart(name: str, form: Form) -> bool:
    """Tell whether a parameter is one of experts that have an optimizer of their own."""
    return is_of_experts(name) and form.shares > 1


def _groups(made: Training, form: Form, rank: Rank) -> Iterator[list[tuple[Content, list[str]]]]:
    """Yield for each optimizer its groups: settings, and the names of the parameters, chunk by chunk."""
    names = [own for chunk in _chunks(made, form, rank) for own in chunk.values()]
    for is_expert in (False, True) if form.shares > 1 else (None,):
        own = [name for name in names if is_expert is None or _is_apart(name, form) == is_expert]
        by_decay = {mult: [name for name in own if (made.weights[name].ndim > 1) == bool(mult)] for mult in (1.0, 0.0)}
        yield [
            ({"wd_mult": mult, "lr_mult": 1.0, "is_expert_parallel": bool(is_expert), "lr": 0.5}, members)
            for mult, members in by_decay.items()
        ]


def _optimizer(made: Training, form: Form, rank: Rank, file: _File) -> Any:
    optimizers = []
    for groups in _groups(made, form, rank):
        if form.optimizer == "vectors":
            settings = [{**group, "step": 3.0} for group, _ in groups]
            optimizers.append({"optimizer": {"param_groups": settings}})
            continue
        numbers = itertools.count()
        numbered = [({**group, "params": [next(numbers) for _ in names]}, names) for group, names in groups]
        state = {
            number: {
                "step": file.tensor(np.float32(3).reshape(())),
                **{kind: file.tensor(cut(name, made.state[kind][name], made.model, form, rank)) for kind in _KINDS},
            }
            for group, names in numbered
            for number, name in zip(group["params"], names)
        }
        inner = {"state": state, "param_groups": [group for group, _ in numbered]}
        mains = [
            [file.tensor(cut(name, made.weights[name], made.model, form, rank)) for name in names]
            for _, names in numbered
        ]
        is_single = made.model.dtype == "float32"
        optimizers.append(inner if is_single else {"optimizer": inner, "fp32_from_fp16_params": mains})
    return optimizers if len(optimizers) > 1 else optimizers[0]


def _buffer(tensors: Arrays, form: Form, model: Model) -> dict[str, tuple[int, int]]:
    """Return where parameters begin in memory, where buckets are filled up, and in the vectors, where they are not."""
    at = begin = stored = stored_begin = 0
    starts: dict[str, tuple[int, int]] = {}
    for name in reversed(tensors):
        at = -(-at // 64) * 64
        is_shared = model.is_tied and model.stages > 1 and name in (EMBEDDING, HEAD)
        if is_shared and at > begin:
            stored_begin += at - begin
            begin = at = -(-at // 128) * 128
        stored = stored_begin + at - begin
        starts[name] = at, stored
        at += tensors[name].size
        if is_shared or (form.bucket and at - begin >= form.bucket):
            stored_begin += at - begin
            begin = at = -(-at // 128) * 128
    return starts


def _vectors(made: Training, form: Form, rank: Rank) -> Content:
    """Return the content of a rank's file of vectors; nothing if it writes none."""
    if form.optimizer != "vectors":
        return {}
    file, model = _File(), made.model
    states: list[Content | None] = []
    for is_expert in (False, True) if form.shares > 1 else (False,):
        if not (rank.is_first_of_experts if is_expert else rank.is_first):
            states.append(None)
            continue
        state: Content = {"buckets_coalesced": True}
        for names in _chunks(made, form, rank):
            own = {name: whole for name, whole in names.items() if _is_apart(whole, form) == is_expert}
            if not own:
                continue
            parts = {name: cut(whole, made.weights[whole], model, form, rank) for name, whole in own.items()}
            starts = _buffer(parts, form, model)
            length = max(starts[name][1] + parts[name].size for name in parts)
            vectors: Content = {}
            for kind, arrays in {"param": made.weights, **made.state}.items():
                vector = np.full(length, 0.25, np.float32)
                for name, (_, start) in starts.items():
                    part = cut(own[name], arrays[own[name]], model, form, rank)
                    vector[start : start + part.size] = part.reshape(-1)
                vectors[kind] = file.tensor(vector)
            types = getattr(_HELD, model.dtype), _HELD.float32  # type: ignore[attr-defined]
            state[len(state) - 1] = {types: {**vectors, "numel_unpadded": length}}
        states.append(state)
    return {"list": states} if len(states) > 1 else states[0] or {}


def expected(made: Training, form: Form) -> dict[str, SampleTensor]:
    """Return all tensors that a reader must find, by their names in a whole training state."""
    named: dict[str, SampleTensor] = {}
    for name, array in made.weights.items():
        named[f"model.{name}"] = sample(array, made.model.dtype)
        if form.optimizer:
            arrays = {kind: arrays[name] for kind, arrays in made.state.items()}
            if made.model.dtype != "float32":
                arrays["fp32_param"] = array
            if form.optimizer == "numbers":
                arrays["step"] = np.float32(3).reshape(())
            named |= {f"optimizer.state.{name}.{kind}": sample(own) for kind, own in arrays.items()}
    return named


def require_read(folder: Path, made: Training, form: Form) -> None:
    """Require that a checkpoint opens as all tensors of a training, bit by bit."""
    deepspeed_peer.require_opened(folder, expected(made, form))


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Training, Form]:
    """Draw trainings on up to some dozens of ranks, with layers spread unevenly over stages."""
    tensor, shares = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
    stages = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 2)) if stages > 1 else 1
    groups = tensor * draw(st.integers(1, 2))
    model = Model(
        layers=draw(
            st.lists(st.lists(st.integers(0, 2), min_size=stages, max_size=stages), min_size=chunks, max_size=chunks)
        ),
        hidden=draw(st.integers(2, 7)),
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        head=draw(st.integers(1, 2)),
        inner=tensor * draw(st.integers(1, 3)),
        rows=tensor * draw(st.integers(1, 20)),
        is_gated=draw(st.booleans()),
        has_biases=draw(st.booleans()),
        is_tied=draw(st.booleans()),
        experts=shares * draw(st.integers(1, 2)) if shares > 1 else draw(st.sampled_from([0, 0, 2])),
        is_grouped=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
    form = Form(
        tensor=tensor,
        shares=shares,
        expert_tensor=draw(st.sampled_from([None, 1])) if shares > 1 else None,
        optimizer=draw(st.sampled_from(["vectors", "vectors", "numbers", ""])),
        bucket=draw(st.sampled_from([0, 0, 40, 200])),
        in_one=draw(st.booleans()),
    )
    return training(model, draw(st.integers(0, 1000))), form
