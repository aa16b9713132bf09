"""Megatron's torch_dist by other means than the format under test: numpy, zipfile and the standard pickler.

A training is whole tensors; a form says over which ranks and in which files they are laid. Keys and layout are those of
Megatron-Core 0.14 to 0.19 (distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import argparse
import enum
import itertools
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.sample_tensors import SampleTensor
from support import dcp_peer, torch_peer
from support.dcp_peer import Listed, Metadata

Array = np.ndarray[Any, Any]
KINDS = ("param", "exp_avg", "exp_avg_sq")
FORMS = ("dp_reshardable", "fully_reshardable", "fully_sharded_model_space", "none")
_ROOT = "megatron.core.dist_checkpointing.strategies.torch"
_BUCKET = "{}optimizer.distributed.dp_group_idx_{}.gbuf_idx_{}.dtype_(torch.{}, torch.float32).bucket_idx_{}.{}"


class AttnBackend(enum.Enum):
    flash, fused, unfused, local, auto = range(1, 6)


class MCoreMetadata(Metadata):
    """The class that release 0.15 gives to the whole."""


class Surprise:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.harm = "done"


_PLACES: dict[str, type] = {
    "megatron.core.transformer.enums": AttnBackend,
    _ROOT: MCoreMetadata,
    "somewhere.else": Surprise,
}


def _modules() -> dict[str, types.ModuleType]:
    packages = {name.rsplit(".", number)[0] for name in _PLACES for number in range(1, name.count(".") + 1)}
    modules = {name: types.ModuleType(name) for name in (*packages, *_PLACES)}
    for name, member in _PLACES.items():
        member.__module__ = name
        setattr(modules[name], member.__name__, member)
    return modules


_MODULES = _modules()


class Part(NamedTuple):
    """A parameter of the model or of one layer.

    Attributes:
        name: its key, within the layer; shape: without layers and experts.
        cut: the dimension that tensor parallelism cuts; None: all of its ranks have the whole.
        halves: how many parts of this dimension are cut each by itself.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    halves: int = 1
    is_expert: bool = False


@dataclass(frozen=True)
class Training:
    """The whole tensors of a training, and its settings.

    Attributes:
        before, layer, behind: parameters in the order in which the model is built.
        is_numbered: layers have their numbers in keys, and no dimension.
        is_apart: experts as well, and halves of gated matrices are tensors of their own (singleton_local_shards).
        dense_layers: how many of the first layers have no experts; layers have numbers then.
        of_float32: names of parts that are float32 in a model of another type.
        arrays: by key and kind, the whole tensors in float32.
    """

    before: tuple[Part, ...]
    layer: tuple[Part, ...]
    behind: tuple[Part, ...]
    layers: int
    experts: int = 0
    dtype: str = "bfloat16"
    is_tied: bool = False
    is_numbered: bool = False
    is_apart: bool = False
    dense_layers: int = 0
    of_float32: frozenset[str] = frozenset()
    arrays: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)

    def type_of(self, part: Part) -> str:
        return "float32" if part.name in self.of_float32 else self.dtype

    def tensors(self, part: Part, layer: int | None, expert: int) -> list[tuple[str, Part]]:
        """Return the whole tensors in which a parameter lies, by their keys."""
        key = part.name
        if part.is_expert and self.is_apart:
            key = key.replace("experts.experts.", f"experts.experts.{expert}.")
        if layer is not None:
            key = f"decoder.layers.{f'{layer}.' * self.has_numbers}{key}"
        if not self.is_apart or part.halves == 1:
            return [(key, part)]
        half = part._replace(shape=(part.shape[0] // 2, *part.shape[1:]), halves=1)
        return [(key + "_w", half), (key + "_v", half)]

    @property
    def has_numbers(self) -> bool:
        return self.is_numbered or self.is_apart

    def lead(self, part: Part, layer: int | None, expert: int) -> tuple[int, ...]:
        """Return the place of a parameter in the first dimensions of its whole tensor."""
        of_layer = () if layer is None or self.has_numbers else (layer,)
        return (*of_layer, *((expert,) if part.is_expert and not self.is_apart else ()))

    def wholes(self) -> Iterator[tuple[str, Part, tuple[int, ...]]]:
        """Yield each whole tensor with its shape."""
        for part in (*self.before, *self.behind):
            yield part.name, part, part.shape
        for part in self.layer:
            of_layers = () if self.has_numbers else (self.layers,)
            of_experts = (self.experts,) if part.is_expert and not self.is_apart else ()
            for layer in range(self.dense_layers * part.is_expert, self.layers if self.has_numbers else 1):
                for expert in range(self.experts if part.is_expert and self.is_apart else 1):
                    for key, own in self.tensors(part, layer, expert):
                        yield key, own, (*of_layers, *of_experts, *own.shape)

    def filled(self, seed: int) -> Training:
        """Return the training with other elements."""
        draw = np.random.default_rng(seed)
        made = {
            key: {kind: draw.standard_normal(shape).astype(np.float32) for kind in KINDS}
            for key, _, shape in self.wholes()
        }
        return replace(self, arrays=made)

    def expected(self) -> dict[str, SampleTensor]:
        """Return the tensors that must be read, by their names in a whole training state."""
        made = {}
        for key, part, _ in self.wholes():
            dtype, arrays = self.type_of(part), self.arrays[key]
            if self.is_apart and key.endswith(("_w", "_v")):
                key = key[:-2]
                halves = self.arrays[f"{key}_w"], self.arrays[f"{key}_v"]
                arrays = {kind: np.concatenate([half[kind] for half in halves]) for kind in KINDS}
            made[f"model.{key}"] = rounded(arrays["param"], dtype)
            for kind in KINDS:
                if kind != "param" or dtype != "float32":
                    name = f"optimizer.state.{key}.{'fp32_param' if kind == 'param' else kind}"
                    made[name] = rounded(arrays[kind], "float32")
        return made


def gpt(
    layers: int = 2,
    hidden: int = 8,
    ffn: int = 8,
    rows: int = 24,
    *,
    experts: int = 0,
    is_gated: bool = True,
    has_bias: bool = True,
    seed: int = 0,
    **further: Any,
) -> Training:
    """Return a small training of random elements. rows: of the vocabulary, padded; further: of `Training`."""
    first = Part(
        f"mlp.{'experts.experts.' * bool(experts)}linear_fc1.weight",
        (ffn * (1 + is_gated), hidden),
        0,
        1 + is_gated,
        bool(experts),
    )
    second = Part(f"mlp.{'experts.experts.' * bool(experts)}linear_fc2.weight", (hidden, ffn), 1, 1, bool(experts))
    norm = Part("pre_mlp_layernorm.weight" if experts else "mlp.linear_fc1.layer_norm_weight", (hidden,))
    layer = (
        Part("self_attention.linear_qkv.layer_norm_weight", (hidden,)),
        Part("self_attention.linear_proj.weight", (hidden, hidden), 1),
        Part("self_attention.linear_qkv.weight", (2 * hidden, hidden), 0),
        *([Part("self_attention.linear_qkv.bias", (2 * hidden,), 0)] if has_bias else []),
        norm,
        *([Part("mlp.router.weight", (experts, hidden))] if experts else []),
        *(first, second),
    )
    embedding = Part("embedding.word_embeddings.weight", (rows, hidden), 0)
    is_tied = bool(further.get("is_tied"))
    behind = (Part("decoder.final_layernorm.weight", (hidden,)),)
    if not is_tied:
        behind = (*behind, Part("output_layer.weight", (rows, hidden), 0))
    return Training((embedding,), layer, behind, layers, experts, **further).filled(seed)


@dataclass(frozen=True)
class Form:
    """How a training is laid over ranks and files.

    Attributes:
        state: one of `FORMS`; chunks: of the model on each stage (virtual pipeline).
        layout: by chunk, how many layers each stage has; empty: all as many.
        bucket: elements from which on a bucket is full; 0: never.
        has_file: `common.pt` has what ranks have in common, else an object.
        is_own_class: the metadata is of Megatron's own class.
    """

    state: str = "dp_reshardable"
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 0
    layout: tuple[tuple[int, ...], ...] = ()
    bucket: int = 0
    has_file: bool = False
    is_own_class: bool = False
    has_plans: bool = False
    seed: int = 0

    @property
    def expert_parts(self) -> int:
        return self.expert_tensor or self.tensor


class Contents(NamedTuple):
    """The contents of a folder before they are written, which a test may change."""

    tensors: dict[str, Listed]
    objects: dict[str, tuple[str, Any]]
    common: dict[str, Any]
    mcore_data: dict[str, Any]


class _Local(NamedTuple):
    """A parameter of one rank: the keys of whole tensors, with the boxes of its slices there."""

    dtype: str
    slices: Sequence[tuple[str, Box]]
    is_shared: bool


def rounded(array: Array, dtype: str) -> SampleTensor:
    """Return float32 elements as another type."""
    if dtype == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
        content = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    else:
        content = array.astype(dtype)
    return SampleTensor("", BY_NAME[dtype], array.shape, np.ascontiguousarray(content).tobytes())


def slices(part: Part, lead: tuple[int, ...], rank: int, parts: int) -> list[Box]:
    """Return the boxes of a tensor-parallel rank's slices."""
    low = (*lead, *(0 for _ in part.shape))
    high = (*(place + 1 for place in lead), *part.shape)
    if part.cut is None:
        return [Box(low, high)]
    at, half = len(lead) + part.cut, part.shape[part.cut] // part.halves
    length, boxes = half // parts, []
    for number in range(part.halves):
        start = number * half + rank * length
        boxes.append(Box((*low[:at], start, *low[at + 1 :]), (*high[:at], start + length, *high[at + 1 :])))
    return boxes


def taken(array: Array, box: Box) -> Array:
    """Return the elements of a box in a row."""
    return array[tuple(map(slice, box.start, box.stop))].reshape(-1)


def built(
    training: Training, form: Form, stage: int, chunk: int, rank: int, *, expert_rank: int | None
) -> list[_Local]:
    """Return the parameters of a model chunk as they are built.

    Args:
        rank: in tensor parallelism.
        expert_rank: only experts of this rank of expert parallelism; None: all that dense optimizers have.
    """
    layout = form.layout or ((training.layers // (form.stages * form.chunks),) * form.stages,) * form.chunks
    per, first = layout[chunk][stage], sum(map(sum, layout[:chunk])) + sum(layout[chunk][:stage])
    is_last = (stage, chunk) == (form.stages - 1, form.chunks - 1)
    named: list[tuple[Part, int | None, int]] = []
    if (stage, chunk) == (0, 0):
        named += [(part, None, 0) for part in training.before]
    for layer, part in itertools.product(range(first, first + per), training.layer):
        if part.is_expert and layer >= training.dense_layers:
            own = training.experts // form.expert
            numbers = range(own * (expert_rank or 0), own * ((expert_rank or 0) + 1))
            named += [(part, layer, expert) for expert in numbers]
        elif not part.is_expert:
            named.append((part, layer, 0))
    if is_last:
        named += [(part, None, 0) for part in training.behind]
    if is_last and training.is_tied and form.stages > 1:
        named.append((training.before[0], None, 0))
    has_own = form.expert > 1

    def parts(part: Part) -> int:
        return form.expert_parts if part.is_expert else form.tensor

    return [
        _Local(
            training.type_of(part),
            [
                (key, box)
                for key, own in training.tensors(part, layer, expert)
                for box in slices(own, training.lead(part, layer, expert), rank % parts(part), parts(part))
            ],
            training.is_tied and form.stages > 1 and part is training.before[0],
        )
        for part, layer, expert in named
        if not has_own or part.is_expert == (expert_rank is not None)
    ]


class _Optimizer(NamedTuple):
    """The optimizer of one model-parallel rank: what its keys begin with, its number, and whose parameters it has."""

    prefix: str
    group: int
    stage: int
    rank: int
    expert_rank: int | None


def _optimizers(form: Form) -> Iterator[_Optimizer]:
    """Yield the optimizers of all ranks: with expert parallelism two each, also where a stage has no experts."""
    has_own = form.expert > 1
    for stage in range(form.stages):
        for rank in range(form.tensor):
            yield _Optimizer("chained_0." * has_own, rank + form.tensor * stage, stage, rank, None)
        for share in range(form.expert * has_own):
            for rank in range(form.expert_parts):
                group = rank + form.expert_parts * (share + form.expert * stage)
                yield _Optimizer("chained_1.", group, stage, rank, share)


class _Bucket(NamedTuple):
    places: list[tuple[int, _Local]]
    elements: int  # without the padding at its end


def buckets(parameters: Sequence[_Local], size: int) -> list[_Bucket]:
    """Lay parameters into buckets, in the reverse order, each at a multiple of 64 elements."""
    made: list[_Bucket] = []
    places: list[tuple[int, _Local]] = []
    end = 0
    for parameter in reversed(parameters):
        start = end + -end % 64
        if parameter.is_shared and places:
            made.append(_Bucket(places, start))
            places, start = [], 0
        places.append((start, parameter))
        end = start + sum(box.size for _, box in parameter.slices)
        if parameter.is_shared or (size and end >= size):
            made.append(_Bucket(places, end))
            places, end = [], 0
    return [*made, *([_Bucket(places, end)] if places else [])]


def write(
    folder: Path,
    training: Training,
    form: Form,
    *,
    stated: Training | None = None,
    spoil: Callable[[Contents], object] = lambda _: None,
    made: Callable[[SampleTensor], Any] = lambda sample: torch_peer.tensor(sample, "0"),
) -> None:
    """Write a folder.

    Args:
        stated: another training whose state is written with these weights.
        made: what is saved of a piece of a tensor.
    """
    with torch_peer.in_place(_MODULES):
        contents = _contents(training, form, stated or training)
        spoil(contents)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        if form.has_file:
            torch_peer.save(folder / "common.pt", contents.common)
        elif contents.common:
            contents.objects["common_state/shard_0_1"] = ("__0_0.distcp", [contents.common])

        def finish(made: Metadata) -> None:
            if form.is_own_class:
                made.__class__ = MCoreMetadata
            if contents.mcore_data or form.is_own_class:
                made.mcore_data = contents.mcore_data  # type: ignore[attr-defined]
            if form.has_plans:
                made.all_local_plans = [[{"items": [Surprise()]}]]  # type: ignore[attr-defined]

        with mock.patch.dict(dcp_peer.MODULES, _MODULES):
            dcp_peer.write(folder, contents.tensors, contents.objects, spoil=finish, made=made)


def _contents(training: Training, form: Form, stated: Training) -> Contents:
    contents = Contents({}, {}, {}, {})
    draw = random.Random(form.seed)
    ranks = form.tensor * form.stages * form.data

    def file() -> str:
        return f"__{draw.randrange(ranks)}_0.distcp"

    groups = [_group(decay, is_expert=False) for decay in (1.0, 0.0)]
    of_experts = [_group(1.0, is_expert=True)]
    has_own = form.expert > 1
    for key, part, shape in training.wholes():
        grid = _grid(training, form, part, shape)
        cells = [box for box, _ in grid]
        _add(contents, key, rounded(training.arrays[key]["param"], training.type_of(part)), cells, file)
        for kind in KINDS if form.state in FORMS[1:] else ():
            whole = rounded(stated.arrays[key][kind], "float32")
            if form.state == "fully_reshardable":
                _add(contents, f"optimizer.state.{kind}.{key}", whole, cells, file)
            elif form.state == "none" and (kind != "param" or training.type_of(part) != "float32"):
                name = "fp32_param" if kind == "param" else kind
                _add(contents, f"optimizer.state.{name}.{key}", whole, cells, file)
            elif form.state == "fully_sharded_model_space":
                name = f"optimizer.state.{'fp32_param' if kind == 'param' else kind}.{key}"
                _add_flattened(contents, name, stated.arrays[key][kind], grid, form, draw, file)
    plain: dict[str, Any] = {"param_state_sharding_type": form.state}
    if form.state in ("fully_reshardable", "none"):
        per_optimizer = [
            {**plain, "optimizer": {"param_groups": own}} for own in ([groups, of_experts] if has_own else [groups])
        ]
    else:
        per_optimizer = [plain, plain] if has_own else [plain]
        for own in _optimizers(form):
            name = f"{own.prefix}optimizer.distributed.dp_group_idx_{own.group}.optimizer/shard_0_1"
            contents.objects[name] = (file(), [{"param_groups": groups if own.expert_rank is None else of_experts}])
    if form.state == "dp_reshardable":
        _add_buckets(contents, training, form, stated, draw, file)
    contents.common.update(
        args=_args(training, form),
        checkpoint_version=3.0,
        iteration=3,
        optimizer=dict(enumerate(per_optimizer)) if has_own else per_optimizer[0],
        opt_param_scheduler={"max_lr": 0.01, "num_steps": 24},
        num_floating_point_operations_so_far=123456.0,
        content_metadata={"distrib_optim_sharding_type": form.state},
    )
    contents.objects["rng_state/shard_0.0_1.1"] = (file(), [[{"random_rng_state": [3, (1, 2), None]}]])
    contents.objects["decoder.final_layernorm._extra_state/shard_0_1"] = (file(), [None])
    return contents


def _group(decay: float, *, is_expert: bool) -> dict[str, Any]:
    plain = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * decay, "step": 3.0}
    return {"is_expert_parallel": is_expert, "wd_mult": decay, "lr_mult": 1.0, "is_decoupled_lr": False, **plain}


def _args(training: Training, form: Form) -> argparse.Namespace:
    rows, hidden = training.before[0].shape
    return argparse.Namespace(
        num_layers=training.layers,
        hidden_size=hidden,
        padded_vocab_size=rows,
        num_experts=training.experts or None,
        tensor_model_parallel_size=form.tensor,
        pipeline_model_parallel_size=form.stages,
        virtual_pipeline_model_parallel_size=form.chunks if form.chunks > 1 else None,
        pipeline_model_parallel_layout="|".join("t" * layers for own in form.layout for layers in own) or None,
        expert_model_parallel_size=form.expert,
        expert_tensor_parallel_size=form.expert_parts,
        params_dtype=getattr(torch_peer.STAND_INS["torch"], training.dtype),
        attention_backend=AttnBackend.auto,
        iteration=3,
    )


def _grid(training: Training, form: Form, part: Part, shape: tuple[int, ...]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of all ranks in a whole tensor, each with its place in the grid of boxes."""
    parts = form.expert_parts if part.is_expert else form.tensor
    leads = itertools.product(*(range(length) for length in shape[: len(shape) - len(part.shape)]))
    grid = []
    for lead in leads:
        for rank in range(parts if part.cut is not None else 1):
            for box in slices(part, lead, rank, parts):
                grid.append((box, tuple(low // length for low, length in zip(box.start, box.shape))))
    return grid


def _add(contents: Contents, name: str, whole: SampleTensor, boxes: Sequence[Box], file: Callable[[], str]) -> None:
    elements = np.frombuffer(whole.content, np.dtype(f"V{whole.dtype.itemsize_bytes}")).reshape(whole.shape)
    pieces = [
        (
            file(),
            box.start,
            SampleTensor("", whole.dtype, box.shape, elements[tuple(map(slice, box.start, box.stop))].tobytes()),
        )
        for box in boxes
    ]
    contents.tensors[name] = Listed(whole.dtype.name, whole.shape, pieces)


def _add_flattened(
    contents: Contents,
    name: str,
    whole: Array,
    grid: Sequence[tuple[Box, tuple[int, ...]]],
    form: Form,
    draw: random.Random,
    file: Callable[[], str],
) -> None:
    """Add a tensor whose parts are rows of elements, each cut over the data-parallel ranks."""
    shape = grid[0][0].shape
    row = math.prod(shape)
    pieces = []
    for box, cell in grid:
        elements = taken(whole, box)
        cuts = sorted({0, row, *(draw.randrange(row) for _ in range(form.data - 1))})
        for low, high in itertools.pairwise(cuts):
            sample = SampleTensor(
                "", BY_NAME["float32"], (*(1 for _ in cell), high - low), elements[low:high].tobytes()
            )
            pieces.append((file(), (*cell, low), sample))
    counts = tuple(whole // length for whole, length in zip(whole.shape, shape))
    contents.tensors[name] = Listed("float32", (*counts, row), pieces)
    contents.mcore_data[name] = {"nd_reformulated_orig_global_shape": whole.shape}


def _add_buckets(
    contents: Contents, training: Training, form: Form, stated: Training, draw: random.Random, file: Callable[[], str]
) -> None:
    for prefix, group, stage, rank, share in _optimizers(form):
        sizes: list[dict[Any, list[int]]] = []
        buffer = 0
        for chunk in range(form.chunks):
            own = built(training, form, stage, chunk, rank, expert_rank=share)
            for dtype in dict.fromkeys(parameter.dtype for parameter in own):
                laid = buckets([parameter for parameter in own if parameter.dtype == dtype], form.bucket)
                for number, bucket in enumerate(laid):
                    for kind in KINDS:
                        name = _BUCKET.format(prefix, group, buffer, dtype, number, kind)
                        contents.tensors[name] = _vector(bucket, kind, stated, form, draw, file)
                torch: Any = torch_peer.STAND_INS["torch"]
                sizes.append({(getattr(torch, dtype), torch.float32): [bucket.elements for bucket in laid]})
                buffer += 1
        name = f"{prefix}optimizer.distributed.dp_group_idx_{group}.per_bucket_numel_unpadded/shard_0_1"
        contents.objects[name] = (file(), [sizes])


def _vector(
    bucket: _Bucket, kind: str, stated: Training, form: Form, draw: random.Random, file: Callable[[], str]
) -> Listed:
    """Return a bucket's elements of one kind, cut where parameters and data-parallel ranks begin and end."""
    vector = np.array([draw.random() for _ in range(bucket.elements)], dtype=np.float32)
    edges = {0, bucket.elements}
    for start, parameter in bucket.places:
        elements = np.concatenate([taken(stated.arrays[key][kind], box) for key, box in parameter.slices])
        vector[start : start + len(elements)] = elements
        edges |= {start, start + len(elements)}
    multiple = math.lcm(form.data, 128)
    share = (bucket.elements + -bucket.elements % multiple) // form.data
    edges |= {share * rank for rank in range(form.data) if share * rank < bucket.elements}
    pieces = [
        (file(), (low,), SampleTensor("", BY_NAME["float32"], (high - low,), vector[low:high].tobytes()))
        for low, high in itertools.pairwise(sorted(edges))
    ]
    return Listed("float32", (bucket.elements,), pieces)
