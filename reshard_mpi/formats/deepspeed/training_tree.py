"""Arrange a DeepSpeed training as one nest under the names of a whole training state (`arranged`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.deepspeed.flat_groups import type_in
from reshard_mpi.formats.deepspeed.parameters import TIED, TrainedParameter
from reshard_mpi.formats.deepspeed.rank_files import ModelStates
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.file_content import HeldTensor, TensorPieces, held, listed
from reshard_mpi.formats.torch.tensors import StoredTensor

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
    return held(stored, starts, path).whole


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
        if 0 in value.shape and elsewhere is None and name not in training.model.buffers:
            raise _without_elements(name, training.model.path)
        own_pieces = () if is_empty else value.pieces
        copies = () if elsewhere is None else elsewhere.pieces_as(value.dtype)
        yield name, TensorPieces(value.dtype, shape, (*own_pieces, *copies))
    lacking = [name for name in training.trained if name not in training.weights]
    tied = [name for name in lacking if name.startswith(TIED)]
    if len(tied) < len(lacking):
        name = next(name for name in lacking if name not in tied)
        raise ShardError(
            "a DeepSpeed checkpoint lacks the weights of parameters that its optimizer has",
            expected=f"{name!r} in *_model_states.pt, or in a file of its layer or expert",
            got=f"{len(lacking)} parameters that are in none of them",
            where=folder,
            remedy="copy or restore all files of one save",
        )
    for name in tied:
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
        besides = ((key, value.whole if type(value) is HeldTensor else value) for key, value in others)
        own = Dict.of((*besides, *parameter.state.items()))
        if weights[name].dtype != parameter.weights.dtype:
            own.flat += ["fp32_param", parameter.weights]
        state.flat += [name, own]
    groups: list[Value] = []
    numbered = sorted({parameter.group for parameter in training.trained.values()})
    for settings in training.settings or [Dict(["params", [number]]) for number in numbered]:
        numbers = settings.get("params")
        names = [
            name
            for name, parameter in training.trained.items()
            if type(numbers) is not list or parameter.group in numbers
        ]
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
