"""DeepSpeed's checkpoints by other means than the format under test: numpy, zipfile and the standard pickler.

A training is whole tensors; a form says over which ranks and in which files they are laid. The classes of DeepSpeed's
pickles are stand-ins with their names. Keys and layout are those of release 0.19.
"""

from __future__ import annotations

import enum
import importlib
import io
import itertools
import math
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import reshard_mpi
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.sample_tensors import SampleTensor
from support import torch_peer
from support.dcp_peer import Size

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Content = dict[str, Any]
# What a test does to the content of a file before it is written; it is given the file's name.
Spoil = Callable[[str, Content], object]


class LossScaler:
    def __init__(self, scale: float) -> None:
        self.cur_scale, self.dynamic = scale, False


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)


@dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's own name
    numel: int
    start: int


class Surprise:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.harm = "done"


_PLACES = {
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler,),
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
    "somewhere.else": (Surprise,),
}


def _modules() -> dict[str, types.ModuleType]:
    packages = {name.rsplit(".", number)[0] for name in _PLACES for number in range(1, name.count(".") + 1)}
    modules = {name: types.ModuleType(name) for name in (*packages, *_PLACES)}
    for name, members in _PLACES.items():
        for member in members:
            member.__module__ = name
            setattr(modules[name], member.__name__, member)
    return modules


_MODULES = _modules()


@dataclass(frozen=True)
class Training:
    """The whole tensors of a training.

    Attributes:
        groups: the trained parameters in float32, group by group.
        state: the optimizer's state by kind, of the names and shapes of all parameters.
        frozen, buffers: tensors that are not trained; buffers keep their type.
        shared: second names of parameters.
        dtype: of the model's own weights.
        experts: how many experts each layer has, by what the names of their parameters begin with.
    """

    groups: Sequence[Arrays]
    state: Mapping[str, Arrays]
    frozen: Arrays = field(default_factory=dict)
    buffers: Arrays = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"
    step: float = 3.0
    experts: Mapping[str, int] = field(default_factory=dict)

    @property
    def trained(self) -> Arrays:
        return {name: array for group in self.groups for name, array in group.items()}


@dataclass(frozen=True)
class Form:
    """How a training is laid over ranks and files.

    Attributes:
        stage: of ZeRO.
        data_ranks: how many ranks share each parameter.
        is_bf16_optimizer: a stage 1 with the keys of BF16_Optimizer; `stage` 0: the same without the list of shapes.
        gaps: parameters begin at multiples of so many elements.
        sub_group: at stage 3 a flat group is full from so many elements of a rank on; 0: never.
        expert_parts: over how many parts of the ranks experts are divided.
        stages: of a pipeline, whose layers are what stands before the first dot of the names; 0: none.
    """

    stage: int = 2
    data_ranks: int = 2
    is_bf16_optimizer: bool = False
    is_elastic: bool = False
    gaps: int = 1
    sub_group: int = 0
    expert_parts: int = 1
    stages: int = 0


def as_type(array: Array, dtype: str) -> tuple[str, Array]:
    """Return an array in a type, as that type's name and an array of its bits; bfloat16 is rounded to even."""
    if dtype != "bfloat16":
        return dtype, array.astype(dtype)
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return dtype, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(array.shape)


def sample(array: Array, dtype: str | None = None, name: str = "") -> SampleTensor:
    """Return an array as a tensor of a type, which is its own unless another one is said."""
    kind, bits = (array.dtype.name, array) if dtype is None else as_type(array, dtype)
    return SampleTensor(name, BY_NAME[kind], array.shape, np.ascontiguousarray(bits).tobytes())


def require_read(folder: Path, training: Training, form: Form) -> None:
    """Require that a checkpoint opens as all tensors of a training, bit by bit."""
    require_opened(folder, expected(training, form))


def require_opened(folder: Path, whole: Mapping[str, SampleTensor]) -> None:
    with reshard_mpi.open(folder) as opened:
        assert set(opened) == set(whole)
        for name, own in whole.items():
            tensor = opened[name]
            assert tensor.shape == own.shape and tensor.dtype.name == own.dtype.name, name
            assert tensor[...].tobytes() == own.content, name


def order(path: Path) -> list[list[str]]:
    """Return the parameters of each group in the order of its vectors, as a file of a model says it."""
    return [[*group] for group in load(path).get("param_shapes", [])]


def expected(training: Training, form: Form) -> dict[str, SampleTensor]:
    """Return all tensors that a reader must find, by their names in a whole training state."""
    named: dict[str, SampleTensor] = {}

    def add(name: str, array: Array, dtype: str | None = None) -> None:
        named[name] = sample(array, dtype, name)

    for name, array in (training.trained | training.frozen).items():
        add(f"model.{name}", array, training.dtype)
    for name, other in training.shared.items():
        add(f"model.{name}", (training.trained | training.frozen)[other], training.dtype)
    for name, array in training.buffers.items():
        add(f"model.{name}", array)
    for name, array in training.trained.items():
        if training.dtype != "float32":
            add(f"optimizer.state.{name}.fp32_param", array)
        for kind, arrays in training.state.items():
            add(f"optimizer.state.{name}.{kind}", arrays[name])
        if not form.is_elastic:
            add(f"optimizer.state.{name}.step", np.float32(training.step).reshape(()))
    return named


class File:
    """Gives each tensor of a file a storage of its own."""

    def __init__(self) -> None:
        self._keys = map(str, itertools.count())

    def tensor(self, array: Array, dtype: str | None = None) -> torch_peer.Tensor:
        return torch_peer.tensor(sample(np.asarray(array), dtype), next(self._keys))


def write(folder: Path, training: Training, form: Form, spoil: Spoil = lambda name, content: None) -> Path:
    """Write a checkpoint below `folder`, with a file `latest`; return the folder of its tag."""
    return write_files(folder, contents(training, form), spoil)


def write_files(folder: Path, files: Iterator[tuple[str, Content]], spoil: Spoil) -> Path:
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    for name, content in files:
        spoil(name, content)
        if content:
            save(tag / name, content)
    return tag


def save(path: Path, content: Any) -> None:
    """Write a file as torch.save does, with DeepSpeed's classes."""
    with torch_peer.in_place(_MODULES):
        torch_peer.save(path, content)


# Of these no class or function does anything but hold data.
_PLAIN_MODULES = ("argparse", "numpy", "_codecs")


class _Unpickler(torch_peer._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(("deepspeed.", "megatron.")):
            return type(name, (Object,), {})
        if module.partition(".")[0] in _PLAIN_MODULES:
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda make, kind, args, state: make(*args)
        if name in {"Tensor", "set"}:
            return {"Tensor": object, "set": set}[name]
        return super().find_class(module, name)


class Object:
    """An object of a class of DeepSpeed or Megatron, with its attributes."""

    def __new__(cls, *args: Any) -> Object:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        self.args = args


def load(path: Path) -> Any:
    """Return what a file of DeepSpeed or Megatron holds, with `torch_peer.Tensor`s and `Object`s in it."""
    with zipfile.ZipFile(path) as opened:
        names = opened.namelist()
        top = next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")
        storages = {name.removeprefix(f"{top}data/"): opened.read(name) for name in names if "/data/" in name}
        return _Unpickler(io.BytesIO(opened.read(f"{top}data.pkl")), storages).load()


def contents(training: Training, form: Form) -> Iterator[tuple[str, Content]]:
    """Yield the names of all files and what they hold."""
    of_stages = [*_by_stage(training, form)]
    for model_rank, groups in enumerate(of_stages):
        numbered = [*_flat_groups(groups, form)]
        for data_rank in range(form.data_ranks):
            if form.stage == 3 or data_rank == 0:
                prefix = f"zero_pp_rank_{data_rank}_" if form.stage == 3 else ""
                yield (
                    f"{prefix}mp_rank_{model_rank:02d}_model_states.pt",
                    _model_states(training, form, numbered, data_rank),
                )
            prefix = "bf16_" if training.dtype == "bfloat16" else ""
            name = f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            yield name, _optimizer_states(training, form, numbered, data_rank)
    if form.stages:
        for layer in sorted({name.partition(".")[0] for name in training.trained}, key=int):
            own = {name.partition(".")[2]: array for name, array in training.trained.items() if _is_of(name, layer)}
            file = File()
            tensors = OrderedDict((name, file.tensor(array, training.dtype)) for name, array in own.items())
            yield f"layer_{int(layer):02d}-model_states.pt", tensors
    for place, (before, count) in enumerate(training.experts.items()):
        for number in range(count):
            own = {name: array for name, array in training.trained.items() if name.startswith(f"{before}{number}.")}
            file = File()
            tensors = OrderedDict((name, file.tensor(array, training.dtype)) for name, array in own.items())
            yield f"layer_{place}_expert_{number}_mp_rank_00_model_states.pt", tensors


def _is_of(name: str, layer: str) -> bool:
    return name.partition(".")[0] == layer


def _by_stage(training: Training, form: Form) -> Iterator[list[Arrays]]:
    """Yield the groups of each stage of the pipeline, which has as many layers as others, in their order."""
    if not form.stages:
        yield training.groups
        return
    layers = 1 + max(_layer(name) for group in training.groups for name in group)
    for stage in range(form.stages):
        yield [
            {name: array for name, array in group.items() if _layer(name) * form.stages // layers == stage}
            for group in training.groups
        ]


def _layer(name: str) -> int:
    return int(name.partition(".")[0])


class _Group(NamedTuple):
    """A flat group: its parameters under the names of each part of the experts, and over how many ranks it is cut."""

    of_parts: list[dict[str, str]]  # for each part: the local name of a parameter, and the global one
    arrays: Arrays

    @property
    def local(self) -> dict[str, tuple[int, ...]]:
        return {own: self.arrays[name].shape for own, name in self.of_parts[0].items()}


def _flat_groups(groups: Sequence[Arrays], form: Form) -> Iterator[_Group]:
    for arrays in groups:
        if form.stage == 3 and form.sub_group:
            full, own = 0, Arrays()
            for name, array in arrays.items():
                own[name] = array
                full += math.ceil(array.size / form.data_ranks)
                if full >= form.sub_group:
                    yield _Group([dict(zip(own, own))], own)
                    full, own = 0, Arrays()
            if own:
                yield _Group([dict(zip(own, own))], own)
        elif any("deepspeed_experts." in name for name in arrays):
            yield _Group(_by_part(arrays, form.expert_parts), arrays)
        else:
            yield _Group([dict(zip(arrays, arrays))], arrays)


def _by_part(names: Mapping[str, object], parts: int) -> list[dict[str, str]]:
    """Return for each part of the experts its parameters, by local names: each part has as many of each layer."""
    of_parts: list[dict[str, str]] = [{} for _ in range(parts)]
    counts: dict[str, int] = {}
    for name in names:
        before, _, rest = name.partition("deepspeed_experts.")
        counts[before] = max(counts.get(before, 0), int(rest.partition(".")[0]) + 1)
    for name in names:
        before, _, rest = name.partition("deepspeed_experts.")
        number, _, after = rest.partition(".")
        part, local = divmod(int(number), counts[before] // parts)
        of_parts[part][f"{before}deepspeed_experts.{local}.{after}"] = name
    return of_parts


def _model_states(training: Training, form: Form, groups: Sequence[_Group], data_rank: int) -> Content:
    file, is_sliced = File(), form.stage == 3
    trained = {name: array for group in groups for name, array in group.arrays.items()}
    module: OrderedDict[str, Any] | None = OrderedDict()
    for name, array in (trained | training.frozen).items():
        if "deepspeed_experts." not in name:
            kept = np.zeros(0, np.float32) if is_sliced else array
            module[name] = file.tensor(kept, training.dtype)
    for name, other in training.shared.items():
        module[name] = module[other]
    for name, array in training.buffers.items():
        module[name] = file.tensor(array)
    fragments = {
        name: file.tensor(_slice(array, form.data_ranks, data_rank) if is_sliced else array, training.dtype)
        for name, array in training.frozen.items()
    }
    shapes = [OrderedDict((name, Size(shape)) for name, shape in group.local.items()) for group in groups]
    return {
        "module": None if form.stages else module,
        "buffer_names": [*training.buffers],
        "optimizer": None,
        "param_shapes": shapes if form.stage else None,
        "frozen_param_shapes": OrderedDict((name, Size(array.shape)) for name, array in training.frozen.items()),
        "shared_params": dict(training.shared) if data_rank == 0 else {},
        "frozen_param_fragments": fragments if form.stage > 1 else None,
        "lr_scheduler": {"last_batch_iteration": 2},
        "data_sampler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 12,
        "dp_world_size": form.data_ranks,
        "mp_world_size": max(form.stages, 1),
        "checkpoint_parallel_dimensions": {"pp_degree": max(form.stages, 1), "tp_degree": 1},
        "ds_config": _config(training, form),
        "ds_version": "0.19.8",
        "epoch": 1,
        "words": ["a", 2.5, None, True],
        **({"num_experts": [*training.experts.values()]} if training.experts else {}),
    }


def _config(training: Training, form: Form) -> Content:
    types_of = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}, "float32": {}}
    return {"train_batch_size": 8, "zero_optimization": {"stage": form.stage}, **types_of[training.dtype]}


def _slice(array: Array, ranks: int, rank: int) -> Array:
    """Return a rank's slice of a parameter of stage 3, with padding."""
    length = math.ceil(array.size / ranks)
    return np.pad(array.reshape(-1), (0, length * ranks - array.size))[rank * length : (rank + 1) * length]


def _optimizer_states(training: Training, form: Form, groups: Sequence[_Group], data_rank: int) -> Content:
    file = File()
    kinds = {"": training.trained, **training.state}
    flat: list[dict[str, Array]] = []
    paddings, partitions, gaps, mappings = [], [], [], []
    for group in groups:
        parts = len(group.of_parts)
        ranks, rank = form.data_ranks // parts, data_rank // parts
        names = [*group.of_parts[data_rank % parts].values()]
        between = [-math.prod(group.arrays[name].shape) % form.gaps for name in names]
        if form.stage == 3:
            own = {
                kind: np.concatenate([_slice(arrays[name], ranks, rank) for name in names])
                for kind, arrays in kinds.items()
            }
        else:
            whole = {
                kind: np.concatenate([np.pad(arrays[name].reshape(-1), (0, gap)) for name, gap in zip(names, between)])
                for kind, arrays in kinds.items()
            }
            total = len(whole[""])
            length = math.ceil(total / (2 * ranks)) * 2
            own = {kind: np.pad(vector, (0, length * ranks - total)) for kind, vector in whole.items()}
            own = {kind: vector[rank * length : (rank + 1) * length] for kind, vector in own.items()}
            sizes = [group.arrays[name].size for name in names]
            mappings.append(OrderedDict(_pieces([*group.local], sizes, between, rank, length)))
            if form.is_bf16_optimizer:  # the last rank says how much all have together
                paddings.append(length * ranks - total if rank == ranks - 1 else 0)
            else:
                paddings.append(min(max((rank + 1) * length - total, 0), length))
        flat.append(own)
        partitions.append(ranks)
        gaps.append(between)
    states, weights = [], []
    for number, own in enumerate(flat):
        cut = len(own[""]) - (paddings[number] if form.stage < 3 and not form.is_bf16_optimizer else 0)
        weights.append(file.tensor(own[""][:cut]))
        lean = form.is_elastic
        states.append({kind: file.tensor(own[kind][:cut] if lean else own[kind]) for kind in training.state})
        if not lean:
            states[-1]["step"] = file.tensor(np.float32(training.step).reshape(()))
    base: Any = {
        "state": dict(enumerate(states)),
        "param_groups": [
            {"lr": 0.01, "betas": (0.9, 0.95), "maximize": False, **_called(group, form), "params": [number]}
            for number, group in enumerate(groups)
        ],
    }
    config = {"ds_config": _config(training, form), "ds_version": "0.19.8"}
    if form.stage == 3:
        state = {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": form.data_ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": weights,
        }
        return {"optimizer_state_dict": state, **config}
    state = {
        "clip_grad": 1.0,
        "base_optimizer_state": states if form.is_elastic else base,
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "partition_count": partitions,
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }
    if form.is_elastic:
        state["base_optimizer_state_step"] = training.step
    if not form.is_bf16_optimizer:
        state |= {"zero_stage": ZeroStageEnum(form.stage), "loss_scaler": LossScaler(1.0), "overflow": False}
        state |= {"param_alignment_paddings": gaps}
    return {"optimizer_state_dict": state, **config}


def _called(group: _Group, form: Form) -> Content:
    """Return the settings by which a group is told to be one of experts."""
    is_of_experts = any("deepspeed_experts." in name for name in group.arrays)
    return {"moe": True, "name": f"ep_size_{form.expert_parts}"} if is_of_experts else {}


def _pieces(
    names: Sequence[str], sizes: Sequence[int], gaps: Sequence[int], rank: int, length: int
) -> Iterator[tuple[str, fragment_address]]:
    """Yield the parameters that a rank has elements of, and where these lie in its partition."""
    start = 0
    for name, size, gap in zip(names, sizes, gaps):
        low, high = max(start, rank * length), min(start + size, (rank + 1) * length)
        if low < high:
            yield name, fragment_address(high - low, low - rank * length)
        start += size + gap


def write_universal(folder: Path, training: Training, form: Form, spoil: Spoil = lambda name, content: None) -> Path:
    """Write what ds_to_universal.py makes of a checkpoint, below `folder`; return the folder of its tag."""
    tag = folder / "global_step3_universal"
    (folder / "latest_universal").parent.mkdir(parents=True, exist_ok=True)
    (folder / "latest_universal").write_text(tag.name)
    is_sliced = form.stage == 3
    files: dict[str, Content] = {name: own for name, own in contents(training, form) if "model_states" in name}
    optimizer = next(own for name, own in contents(training, form) if "optim_states" in name)["optimizer_state_dict"]
    settings = dict(optimizer)
    if not is_sliced:
        lost = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
        settings |= {"param_groups": optimizer["base_optimizer_state"]["param_groups"]}
        settings = {key: value for key, value in settings.items() if key not in lost}
    else:
        settings |= {"param_groups": optimizer["optimizer_state_dict"]["param_groups"]}
    files["zero/optimizer_state.pt"] = settings
    for name, array in training.trained.items():
        for kind, whole in {"fp32": array, **{kind: own[name] for kind, own in training.state.items()}}.items():
            file = File()
            is_bare = is_sliced
            tensor = file.tensor(whole.reshape(-1) if is_sliced else whole)
            files[f"zero/{name}/{kind}.pt"] = {"bare": tensor} if is_bare else {"param": tensor, "cat_dim": 0}
        if not is_sliced:
            files[f"zero/{name}/step.pt"] = {"bare": File().tensor(np.float32(training.step).reshape(()))}
    for name, content in files.items():
        spoil(name, content)
        if content:
            (tag / name).parent.mkdir(parents=True, exist_ok=True)
            save(tag / name, content.get("bare", content))
    return tag


def arrays(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: str = "float32") -> Arrays:
    """Return random arrays of these shapes."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def training(
    *groups: Mapping[str, tuple[int, ...]],
    kinds: Sequence[str] = ("exp_avg", "exp_avg_sq"),
    seed: int = 0,
    **named: Any,
) -> Training:
    """Return a training with random parameters of these shapes. named: as in `Training`."""
    own = [arrays(shapes, seed + number) for number, shapes in enumerate(groups)]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    state = {kind: arrays(shapes, seed + 100 + number) for number, kind in enumerate(kinds)}
    return Training(own, state, **named)


_SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def trainings(
    draw: st.DrawFn, *, kinds: Sequence[str] = ("plain", "plain", "pipeline", "experts"), writable: bool = False
) -> tuple[Training, Form]:
    """Draw a training and a form that it can be laid in; writable: one that the package writes as well."""
    kind = draw(st.sampled_from(["plain"] if writable else kinds))
    seed = draw(st.integers(0, 1 << 20))
    state = draw(st.sampled_from([("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()]))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    ranks = draw(st.integers(1, 5))
    if kind == "pipeline":
        stages = draw(st.integers(2, 3))
        layers = draw(st.integers(stages, 5))
        shapes = {f"{layer}.w{at}": draw(_SHAPES) for layer in range(layers) for at in range(draw(st.integers(1, 3)))}
        is_bf16 = draw(st.booleans())
        made = training(shapes, kinds=state, seed=seed, dtype="bfloat16" if is_bf16 else dtype)
        stage = draw(st.integers(0, 1)) if is_bf16 else 1
        return made, Form(stage, ranks, is_bf16_optimizer=is_bf16, stages=stages)
    if kind == "experts":
        parts = draw(st.sampled_from([1, 2, 3]))
        before = [f"layer{layer}.deepspeed_experts." for layer in (2, 10)[: draw(st.integers(1, 2))]]
        experts = {own: parts * draw(st.integers(1, 2)) for own in before}
        weights = {own: {f"w{at}": draw(_SHAPES) for at in range(draw(st.integers(1, 2)))} for own in before}
        of_experts = {
            f"{own}{number}.{weight}": shape
            for own, count in experts.items()
            for number in range(count)
            for weight, shape in weights[own].items()
        }
        others = {f"p{at}": draw(_SHAPES) for at in range(draw(st.integers(1, 3)))}
        made = training(others, of_experts, kinds=state, seed=seed, dtype=dtype, experts=experts)
        return made, Form(draw(st.integers(1, 2)), parts * draw(st.integers(1, 2)), expert_parts=parts)
    names = (f"block.{at}.weight" for at in itertools.count())
    groups = [
        {next(names): draw(_SHAPES) for _ in range(draw(st.integers(1, 4)))} for _ in range(draw(st.integers(1, 3)))
    ]
    frozen = arrays({f"frozen{at}": draw(_SHAPES) for at in range(draw(st.integers(0, 2)))}, seed + 50)
    shared = {"tied": next(iter(groups[0]))} if draw(st.booleans()) else {}
    buffers = {"count": np.arange(3), "scale": np.float32([1.5])} if draw(st.booleans()) else {}
    stage = draw(st.integers(1, 3))
    form = Form(
        stage,
        ranks,
        is_bf16_optimizer=stage == 1 and not writable and draw(st.booleans()),
        is_elastic=stage < 3 and not writable and draw(st.booleans()),
        gaps=draw(st.sampled_from([1, 8])) if stage < 3 else 1,
        # The sub-groups of stage 3 look like groups of the optimizer.
        sub_group=0 if stage == 3 and writable else draw(st.sampled_from([0, 1, 20])),
    )
    if form.is_bf16_optimizer:
        form = Form(draw(st.integers(0, 1)), ranks, is_bf16_optimizer=True)
    made = training(*groups, kinds=state, seed=seed, dtype=dtype, frozen=frozen, buffers=buffers, shared=shared)
    return made, form
