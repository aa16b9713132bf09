"""Arrange a DeepSpeed training as one nest (`arranged`), and carry its values back into files (`model_text`).

Names in the nest are those of a whole training state. Its keys for values besides tensors are the same in both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.formats.deepspeed.flat_groups import type_in
from reshard_mpi.formats.deepspeed.layout import FlatGroupLayout
from reshard_mpi.formats.deepspeed.parameters import TIED, TrainedParameter
from reshard_mpi.formats.deepspeed.rank_files import ModelStates
from reshard_mpi.formats.deepspeed.torch_forms import is_engines, loss_scaler
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import Dict, NestError, NestTensor, Value, entry_of, is_nest_tensor
from reshard_mpi.formats.torch.file_content import HeldTensor, TensorPieces, held, listed
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.text import shortened

# Keys of the engine that are kept under their own names. All others are what the training has given to
# `save_checkpoint` as `client_state`.
OF_ENGINE = (
    *("data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "num_experts", "ds_config", "ds_version", "universal_checkpoint_info"),
)
CLIENT_STATE = "client_state"
# A key of ours: the model is a pipeline, which loads each layer from a file of its own.
IS_PIPELINE = "is_pipeline"
# Another one: a dictionary of the numbers of its layers that have files, and the names of the parameters that each
# stage trains, in order.
PIPELINE, LAYERS, STAGES = "pipeline_layout", "layers", "stages"
# Under this key the optimizer's files are told the settings of its groups.
SETTINGS = "settings"
# Keys of the nest that the optimizer's files have; the rest is the model's.
_OF_OPTIMIZER = ("dynamic_loss_scale", "overflow", "clip_grad")
# Keys at the root of a training that have a place of their own; all others become client state.
KEPT = ("model", "optimizer", "scheduler", *OF_ENGINE, IS_PIPELINE, PIPELINE)
# Of these, the keys whose place is not in the files of weights, or not as values.
_ELSEWHERE = ("model", "optimizer", "ds_config", "buffer_names", "shared_params", IS_PIPELINE, PIPELINE)
# The optimizer of a training in 16 bit without ZeRO: vectors of all parameters, without their names.
_NAMELESS = ("fp32_groups_flat", "fp32_groups")
_NAMELESS_WHY = "a vector of the optimizer of a training without ZeRO, which does not say whose elements lie where"


class DeepSpeedTraining(NamedTuple):
    """The contents of all files of a checkpoint together.

    Attributes:
        model: the first rank's settings.
        weights: the tensors of the model by name, and what else its modules save; parameters of stage 3 have no
            elements there.
        trained: the parameters that are optimized.
        frozen: those that are not, where they lie in other files than the model's.
        settings: the optimizer's groups, each with the numbers of flat groups as `params`.
        values: what else the optimizer has; starts, path: where the storages of tensors in them begin, in which file.
        layers: the numbers of a pipeline's layers; stages: the names of the parameters that each of its stages trains.
        is_sliced: whether parameters of the model may have no elements in `weights`, as at stage 3.
    """

    model: ModelStates
    weights: Mapping[str, Value]
    trained: Mapping[str, TrainedParameter]
    frozen: Mapping[str, TensorPieces]
    settings: Sequence[Dict] = ()
    values: Mapping[str, Value] = {}
    starts: Mapping[str, int] = {}
    path: str = ""
    layers: Sequence[int] = ()
    stages: Sequence[Sequence[str]] = ()
    is_sliced: bool = True


def arranged(training: DeepSpeedTraining, folder: str, left_out: Sequence[str]) -> Manifest:
    """Return a checkpoint's tensors as pieces that its files hold, and the rest of it as the text of a nest.

    Args:
        left_out: in words, what else is not kept.

    Raises ShardError if weights are missing or contradict what the optimizer has.
    """
    weights = Dict.of(_weights(training, folder))
    root = Dict(["model", weights])
    if training.trained:
        root.flat += ["optimizer", _optimizer(training, dict(weights.pairs()))]
    root.flat += _rest(training)
    nameless = _nameless(training)
    manifest = listed(
        root,
        folder,
        "deepspeed",
        "DeepSpeed checkpoint",
        lambda stored: _of_file(stored, training),
        lambda name: _NAMELESS_WHY if nameless and name.startswith("optimizer.") else None,
    )
    return manifest._replace(left_out=(*manifest.left_out, *left_out))


def _nameless(training: DeepSpeedTraining) -> bool:
    optimizer = training.model.values.get("optimizer")
    return type(optimizer) is Dict and any(optimizer.get(key) is not None for key in _NAMELESS)


def _of_file(stored: StoredTensor, training: DeepSpeedTraining) -> TensorPieces:
    """Return a tensor among values, which are the model's or the optimizer's."""
    model = training.model
    of_model = stored.storage.key in model.starts
    starts, path = (model.starts, model.path) if of_model else (training.starts, training.path)
    return held(stored, starts, path).as_one_piece


def _weights(training: DeepSpeedTraining, folder: str) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of the model, and what else its modules have, by name."""
    shared = training.model.shared
    for name, value in training.weights.items():
        own = shared.get(name, name)
        if type(value) is not TensorPieces:
            if own in training.trained:
                raise ShardError(
                    f"the parameter {name!r} of a DeepSpeed checkpoint is no tensor",
                    expected="a tensor, since the optimizer has it",
                    got=type(value).__name__,
                    where=training.model.path,
                )
            yield name, value
            continue
        trained, frozen = training.trained.get(own), training.frozen.get(own)
        elsewhere = trained.weights if trained is not None else frozen
        shape = value.shape if elsewhere is None else elsewhere.shape
        is_empty = 0 in value.shape and value.shape != shape
        if not is_empty and value.shape != shape:
            raise ShardError(
                f"the parameter {name!r} of a DeepSpeed checkpoint has another shape than is listed",
                expected=f"{list(shape)} (param_shapes)",
                got=str(list(value.shape)),
                where=training.model.path,
            )
        is_placeholder = training.is_sliced and 0 in value.shape and name not in training.model.buffers
        if is_placeholder and elsewhere is None:
            raise _without_elements(name, training.model.path)
        own_pieces = () if is_empty else value.pieces
        copies = () if elsewhere is None else elsewhere.pieces_as(value.dtype)
        yield name, TensorPieces(value.dtype, shape, (*own_pieces, *copies))
    lacking = [name for name in training.trained if name not in training.weights]
    untied = [name for name in lacking if not name.startswith(TIED)]
    if untied:
        name = untied[0]
        raise ShardError(
            "a DeepSpeed checkpoint lacks the weights of parameters that its optimizer has",
            expected=f"{name!r} in *_model_states.pt, or in a file of its layer or expert",
            got=f"{len(lacking)} parameters that are in none of them",
            where=folder,
            remedy="copy or restore all files of one save",
        )
    for name in lacking:
        parameter = training.trained[name]
        dtype = _type_in_layers(name, training)
        yield name, TensorPieces(dtype, parameter.shape, parameter.weights.pieces_as(dtype))


def _type_in_layers(name: str, training: DeepSpeedTraining) -> DType:
    """Return the type of a parameter that layers of a pipeline share, in whose files it has another name."""
    rest, shape = "".join(name.split(".", 2)[2:]), training.trained[name].shape
    of_layers = (own for other, own in training.weights.items() if other.partition(".")[2] == rest)
    types = (own.dtype for own in of_layers if type(own) is TensorPieces and own.shape == shape)
    return next(types, type_in(training.model.values.get("ds_config")))


def _without_elements(name: str, path: str) -> ShardError:
    return ShardError(
        f"the parameter {name!r} of a DeepSpeed checkpoint is empty, and nothing says where its elements are",
        expected="it in param_shapes, frozen_param_shapes or shared_params",
        got="none of these",
        where=path,
    )


def _optimizer(training: DeepSpeedTraining, weights: Mapping[str, Value]) -> Dict:
    """Return the optimizer's state by names of parameters, and its groups."""
    state = Dict()
    for name, parameter in training.trained.items():
        others = parameter.others.items()
        besides = ((key, value.as_one_piece if type(value) is HeldTensor else value) for key, value in others)
        own = Dict.of((*besides, *parameter.state.items()))
        if weights[name].dtype != parameter.weights.dtype:
            own.flat += ["fp32_param", parameter.weights]
        state.flat += [name, own]
    groups: list[Value] = []
    numbered = sorted({parameter.group for parameter in training.trained.values()})
    for settings in training.settings or [Dict(["params", [number]]) for number in numbered]:
        numbers = settings.get("params")
        has_all = type(numbers) is not list
        names = [name for name, parameter in training.trained.items() if has_all or parameter.group in numbers]
        groups.append(Dict([*settings.without("params").flat, "params", names]))
    return Dict(["state", state, "param_groups", groups])


def _rest(training: DeepSpeedTraining) -> Iterator[Value]:
    """Yield keys and values in turn: what else the engine and the training keep."""
    values = dict(training.model.values)
    optimizer, scheduler = values.pop("optimizer", None), values.pop("lr_scheduler", None)
    if optimizer is not None and not training.trained:
        yield from ("optimizer", optimizer)
    if scheduler is not None:
        yield from ("scheduler", scheduler)
    of_optimizer = dict(training.values)
    scaler = of_optimizer.pop("loss_scaler", None)
    if scaler is not None:
        yield from ("scaler", scaler)
    if "ds_version" in values:  # the file has more than weights
        yield from ("buffer_names", [*training.model.buffers])
        yield from ("shared_params", Dict.of(training.model.shared.items()))
    if training.model.module is None:
        yield from (IS_PIPELINE, True)
        if training.trained and training.stages:
            stages = [[*own] for own in training.stages]
            yield from (PIPELINE, Dict([LAYERS, [*training.layers], STAGES, stages]))
    for key in OF_ENGINE:
        if key in values:
            yield from (key, values.pop(key))
    for key, value in of_optimizer.items():
        if key not in OF_ENGINE or key not in training.model.values:
            yield from (key, value)
    if values:
        yield from (CLIENT_STATE, Dict.of(values.items()))


def require_places(root: Dict, scaler: Value) -> tuple[str, ...]:
    """Return notes on values for which there is no place.

    Args:
        root: of a training.
        scaler: the loss scaler that its files get; None: the one that scales nothing.

    Raises TargetError for values where others are expected, and for a key that would have two values.
    """
    for key, value, expected in _misplaced(root):
        raise TargetError(
            f"{key} of the source is not what DeepSpeed has there, and would be lost",
            expected=expected,
            got=repr(value)[:100] if type(value) in (str, int, float, bool) else type(value).__name__.lower(),
            remedy="leave it out of the source, or choose --to torch",
        )
    client_state = root.get(CLIENT_STATE)
    besides = [key for key, _ in root.pairs() if key not in (*KEPT, CLIENT_STATE)]
    twice = [key for key, _ in client_state.pairs() if key in besides] if type(client_state) is Dict else []
    if twice:
        raise TargetError(
            "values beside the model would have the keys of client state",
            expected=f"keys that are at the root or in {CLIENT_STATE}",
            got=f"{shortened(twice)} in both",
            remedy="leave one of them out of the source, or choose --to torch",
        )
    return tuple(_notes(root, scaler))


def _misplaced(root: Dict) -> Iterator[tuple[str, Value, str]]:
    """Yield the keys of values that are not of the form that DeepSpeed has, these, and that form."""
    config, names = root.get("ds_config"), root.get("buffer_names")
    zero = entry_of(config, "zero_optimization")
    for key, value in (("ds_config", config), ("ds_config.zero_optimization", zero)):
        if value is not None and type(value) is not Dict:
            yield key, value, "a dictionary"
    version = root.get("ds_version")
    if version is not None and type(version) is not str:
        yield "ds_version", version, "a text"
    if names is not None and not _are_texts(names):
        yield "buffer_names", names, "a list of names"
    shared = root.get("shared_params")
    if shared is not None and not (type(shared) is Dict and _are_texts(shared.flat)):
        yield "shared_params", shared, "a dictionary of names"
    optimizer = root.get("optimizer")
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if state is not None and type(state) is not Dict:
        yield "optimizer.state", state, "a dictionary"
        return
    members = {name for group in groups for name in group.get("params")}
    for name, own in state.pairs() if state is not None else ():
        if type(own) is not Dict:
            yield f"optimizer.state.{name}", own, "a dictionary of the parameter's state"
        elif name not in members and own.flat:
            yield f"optimizer.state.{name}", own, "state of parameters that are in a group of the optimizer"


def _are_texts(values: Value) -> bool:
    return type(values) in (list, tuple) and all(type(value) is str for value in values)


def _notes(root: Dict, scaler: Value) -> Iterator[str]:
    entries, known = root.get("optimizer").pairs(), ("state", "param_groups")
    others = [f"optimizer.{key}" for key, value in entries if key not in known and not is_nest_tensor(value)]
    if others:
        yield f"left out, since DeepSpeed's optimizer has no place for it: {shortened(others)}"
    own, is_dynamic = root.get("scaler"), root.get("dynamic_loss_scale")
    if is_engines(own) and scaler is not own:
        yield "left out, since the model has another type than it was trained in: scaler"
    if is_dynamic is not None and is_dynamic is not (type(scaler) is Dict and scaler.get("dynamic") is True):
        yield "left out, since the loss scaler says it: dynamic_loss_scale"


def module_text(root: Dict) -> str:
    """Return the nest of everything besides tensors that the modules of a model save."""
    pairs = root.get("model").pairs()
    besides = Dict.of((key, value) for key, value in pairs if type(value) is not NestTensor)
    return _text(Dict(["module", besides]))


def model_text(root: Dict, config: Dict, experts: Sequence[int]) -> str:
    """Return the nest of everything besides the model itself that goes into the files of weights.

    Args:
        experts: how many each layer with experts has.
    """
    rest = Dict(["ds_config", config])
    if experts:
        rest.flat += ["num_experts", [*experts]]
    for key, value in root.pairs():
        is_taken = key in (*_ELSEWHERE, *_OF_OPTIMIZER) or (experts and key == "num_experts")
        if not is_taken and not (key == "scaler" and (value is None or is_engines(value))):
            rest.flat += [key, value]
    return _text(rest)


def optimizer_text(
    root: Dict, settings: Sequence[Dict], flat: Sequence[Sequence[FlatGroupLayout]], config: Dict, dtype: str
) -> str:
    """Return the nest of everything besides tensors that goes into the files of the optimizer.

    Args:
        settings: of its groups; flat: the flat groups of each stage of a pipeline.
    """
    state = root.get("optimizer").get("state")
    values = [[_common_values(group, state) for group in of_stage] for of_stage in flat]
    rest = Dict.of(pair for pair in root.pairs() if pair[0] in _OF_OPTIMIZER)
    scaler = loss_scaler(root.get("scaler"), root.get("ds_config"), dtype)
    parts = {SETTINGS: [*settings], "values": values, "scaler": scaler, "rest": rest, "config": config}
    return _text(Dict.of(parts.items()).with_value("ds_version", root.get("ds_version")))


def _common_values(group: FlatGroupLayout, state: Value) -> Dict:
    """Return the values besides tensors that the state of all parameters of a group has alike, such as a step."""
    texts: dict[str, Dict] = {}
    for parameter in group.parameters:
        own = entry_of(state, parameter.name)
        pairs = own.pairs() if type(own) is Dict else ()
        values = Dict.of((key, value) for key, value in pairs if type(value) is not NestTensor)
        texts.setdefault(_text(Dict(["values", values])), values)
    if len(texts) > 1:
        first, other, *_ = texts
        raise no_training("state that is the same number for all parameters of a group", f"{first} and {other}"[:200])
    return next(iter(texts.values()))


def config_for(config: Value, stage: int, ranks: int, dtype: str) -> Dict:
    """Return DeepSpeed's settings for this stage and number of ranks."""
    known = dict(config.pairs()) if type(config) is Dict else {}
    if not known and dtype in ("bfloat16", "float16"):
        known["bf16" if dtype == "bfloat16" else "fp16"] = Dict(["enabled", True])
    zero = known.get("zero_optimization")
    known["zero_optimization"] = (zero if type(zero) is Dict else Dict()).with_value("stage", stage)
    size, steps = known.get("train_micro_batch_size_per_gpu"), known.get("gradient_accumulation_steps")
    if type(known.get("train_batch_size")) is int and type(size) is int and type(steps) is int:
        known["train_batch_size"] = size * steps * ranks
    return Dict.of(known.items())


def _text(root: Dict) -> str:
    """Return a tree as the text of a nest. Raises TargetError if it is too large."""
    try:
        return flatten_tree.flatten(root, is_nest_tensor).strings[NEST]
    except NestError as error:
        raise TargetError(
            "the settings of the source besides its tensors cannot be written",
            expected="plain data of moderate size",
            got=error.problem,
            remedy="leave them out of the source, or choose --to torch",
        ) from None


def no_training(expected: str, got: str) -> TargetError:
    """Return the error for a source that is no training, or lacks a part of one."""
    return TargetError(
        "the source is not a whole training, which a checkpoint of DeepSpeed is made of",
        expected=f"{expected}: tensors called model.NAME and optimizer.state.NAME.exp_avg, and"
        " optimizer.param_groups, whose params are names",
        got=got,
        remedy="convert a checkpoint of DeepSpeed, or save one by names of parameters"
        " (torch.distributed.checkpoint.state_dict.get_state_dict)",
    )
