"""Read and write DeepSpeed's ZeRO checkpoints: weights, and the optimizer's state in flat vectors, of all ranks.

A folder, called by a tag, has files of weights and settings (`*_model_states.pt`) and one of each rank's share of the
optimizer (`*_optim_states.pt`); stages 1 to 3, layers of pipelines and experts lay them out in different ways. A file
`latest` beside the folder names the newest one. Facts are of DeepSpeed 0.19.

Names are those of a whole training state: `model.NAME`, `optimizer.state.NAME.exp_avg` and so on, with
`optimizer.state.NAME.fp32_param` where the model has a parameter in another type. Parameters of experts have their
numbers over all ranks. A weight that lies both in the model and, in float32, in the optimizer is listed as two pieces,
so that both are compared as copies are.

In a universal checkpoint every parameter has a folder:

    TAG/mp_rank_00_model_states.pt              weights and settings, as before the conversion; of stage 3 one a rank
    TAG/zero/NAME/fp32.pt exp_avg.pt step.pt    a whole parameter and its state: {"param": tensor, ...}; of stage 3 a
                                                vector, and no step
    TAG/zero/optimizer_state.pt                 everything else that the first rank's optimizer has

(deepspeed/checkpoint/ds_to_universal.py of release 0.19)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError, SourceError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.deepspeed.flat_groups import SizeError, in_slices, type_in
from reshard_mpi.formats.deepspeed.other_saves import each_once, require_own_slices, warnings_of_other_saves
from reshard_mpi.formats.deepspeed.packing import packed
from reshard_mpi.formats.deepspeed.parameters import TrainedParameter, trained_parameters, with_shapes
from reshard_mpi.formats.deepspeed.rank_files import LAYOUT_KEYS, named_tensors, optimizer_states_of, plain
from reshard_mpi.formats.deepspeed.ranks import PARAMETERS, Ranks, RankStates, TagFiles, read_ranks, sorted_files
from reshard_mpi.formats.deepspeed.slice_rules import SliceRules, read_rules
from reshard_mpi.formats.deepspeed.tensor_parallel import JOINED, JOINED_BY_STRATEGY, joined
from reshard_mpi.formats.deepspeed.training_tree import DeepSpeedTraining, arranged
from reshard_mpi.formats.deepspeed.weight_copies import as_read
from reshard_mpi.formats.deepspeed.writer import file_name, index_contents, read_back, reserve, seal, size_at_most_bytes
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import Dict, NestError, Value, entry_of, text_pairs
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.formats.torch import check_crc
from reshard_mpi.formats.torch.file_content import FlatVector, HeldTensor, TensorPieces, held, read_content
from reshard_mpi.formats.torch.tensors import StoredTensor, is_tensor
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import natural_key

NAME = "deepspeed"

_NOT_KEPT = f"not carried over, since it is about the ranks of DeepSpeed's files alone: {', '.join(LAYOUT_KEYS)}"
_NO_SETTINGS = "an elastic checkpoint does not say the settings of the optimizer's groups, such as lr: set them anew"
_OF_FIRST = "buffers are those of the first rank's file, as DeepSpeed takes them"


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the checkpoint's files. Raises ShardError if two are of one rank."""
    names = sorted_files(source_files.names(folder), folder).names
    if _is_universal(folder):
        names += files_of_parameters(folder)
    return tuple(str(Path(folder, name)) for name in sorted(names, key=natural_key))


def _is_universal(folder: str) -> bool:
    return source_files.is_folder(Path(folder, PARAMETERS))


def open_folder(folder: str, strategy: Strategy | None = None) -> dict[int, Manifest]:
    """Return the whole tensors of the checkpoint, and everything else that it has as the text of a nest.

    Args:
        strategy: by which tensor-parallel ranks have cut parameters, if the user gives one.

    Raises ShardError if a file is missing, not sound, or contradicts others; DisagreementError if files are of several
    saves; SourceError for a strategy that is not of these ranks.
    """
    files = sorted_files(source_files.names(folder), folder)
    is_universal = _is_universal(folder)
    states = read_ranks(folder, files, is_universal=is_universal)
    parts = 1 if is_universal else _tensor_parallel_ranks(states, files)
    if strategy is not None and parts == 1:
        raise SourceError(
            "a strategy is given for a DeepSpeed checkpoint that has no slices of tensor-parallel ranks",
            expected="its files alone, which say where everything lies",
            got=strategy.origin,
            where=folder,
            remedy="leave that strategy out",
        )
    rules = read_rules(states, files, parts, folder, strategy) if parts > 1 else None
    of_parts = [range(part, states.model_ranks, parts) for part in range(parts)]
    weights = [each_once(_weights(states, files, folder, model_ranks), folder) for model_ranks in of_parts]
    if states.optimizers and states.first.shapes is None:
        states = with_shapes(states, weights)
    if is_universal:
        training = _universal(states, weights[0], folder)
    else:
        training = _of_ranks(states, files, weights, of_parts, rules)._replace(is_sliced=states.is_sliced)
    manifest = arranged(training, folder, states.notes)
    of_first = (_OF_FIRST,) if states.is_sliced and states.first.data_ranks > 1 and states.first.buffers else ()
    of_slices = (JOINED if strategy is None else JOINED_BY_STRATEGY,) if parts > 1 else ()
    of_groups = (_NO_SETTINGS,) if training.trained and not training.settings else ()
    notes = (_NOT_KEPT, *of_first, *of_slices, *of_groups)
    return {0: manifest._replace(notes=notes, warnings=warnings_of_other_saves(states, training, folder))}


def _tensor_parallel_ranks(states: RankStates, files: TagFiles) -> int:
    """Return over how many ranks parameters are cut. With a pipeline its stages are model-parallel ranks as well."""
    if states.first.module is not None:
        return states.model_ranks
    return 1 + max((own.model for own in files.layers), default=0)


def _of_ranks(
    states: RankStates,
    files: TagFiles,
    weights: Sequence[Mapping[str, Value]],
    of_parts: Sequence[Sequence[int]],
    rules: SliceRules | None,
) -> DeepSpeedTraining:
    """Return the training in the files of ranks.

    Args:
        weights: of each tensor-parallel rank; of_parts: the model-parallel ranks that each has.
        rules: by which their slices join; None: they are whole.
    """
    trained = [trained_parameters(states, model_ranks) for model_ranks in of_parts]
    # In a pipeline each stage names its own buffers.
    buffers = [*dict.fromkeys(name for model in states.models.values() for name in model.buffers)]
    lead_model = states.first._replace(buffers=buffers)
    trainings = [
        DeepSpeedTraining(lead_model, weights[part], own.by_name, dict(_frozen(states, part)))
        for part, own in enumerate(trained)
    ]
    training = trainings[0] if rules is None else joined(trainings, rules)
    require_own_slices(states, trained[0].stages, trainings[0], training)
    if states.first.module is None:
        layers = sorted({own.layer for own in files.layers})
        training = training._replace(layers=layers, stages=trained[0].stages)
    lead = next(iter(states.optimizers.values()), None)
    if lead is not None:
        training = training._replace(settings=lead.settings, values=lead.values, starts=lead.starts, path=lead.path)
    return training


def _universal(states: RankStates, weights: Mapping[str, Value], folder: str) -> DeepSpeedTraining:
    """Return the training of a universal checkpoint."""
    read = read_universal(folder, states)
    if states.model_ranks > 1:
        shared = {name: own for model in states.models.values() for name, own in model.shared.items()}
        read = read._replace(model=read.model._replace(shared=shared))
        weights = dict(_of_several_ranks(states, read, folder))
    return read._replace(weights=weights, frozen={**dict(_frozen(states, 0)), **read.frozen})


def _of_several_ranks(states: RankStates, read: DeepSpeedTraining, folder: str) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the tensors of a model whose files hold slices, or some layers each: the optimizer has them whole.

    Buffers are whole in all files, and listed with their copies. Raises ShardError for a parameter that is not trained,
    since no file has it whole.
    """
    nothing = TensorPieces(type_in(states.first.values.get("ds_config")), (0,), ())
    yield from dict.fromkeys(read.trained, nothing).items()
    shared = read.model.shared
    yield from ((name, nothing) for name, own in shared.items() if own in read.trained or own in read.frozen)
    named = {name for model in states.models.values() for name in (*(model.module or {}), *model.frozen)}
    is_pipeline = states.first.module is None  # the files of its layers have the names
    for name, frozen in read.frozen.items():
        if name not in shared and (name in named or is_pipeline):  # else it is of another save, which a warning says
            yield name, frozen
    buffers: dict[str, TensorPieces] = {}
    for model in states.models.values():
        tensors = model.module or {}
        for name in model.buffers:
            own = tensors.get(name)
            if type(own) is HeldTensor and name not in read.frozen:
                first = buffers.setdefault(name, own.as_one_piece._replace(pieces=()))
                if (own.dtype, own.shape) == (first.dtype, first.shape):
                    buffers[name] = first._replace(pieces=(*first.pieces, *own.as_one_piece.pieces))
    yield from buffers.items()
    for model in states.models.values():
        known = {*read.trained, *read.frozen, *model.shared, *buffers}
        others = [
            name
            for name, own in (model.module or {}).items()
            if name not in known or (name in buffers and _is_unlike(own, buffers[name]))
        ]
        if others:
            raise ShardError(
                "a universal checkpoint of DeepSpeed has tensors that are in files of tensor-parallel ranks alone",
                expected="all of them below zero/",
                got=f"{len(others)} others, or of several shapes, such as {min(others)!r}",
                where=folder,
                remedy="load it with the training's own framework, and save it whole",
            )


def _is_unlike(tensor: Value, other: TensorPieces) -> bool:
    return type(tensor) is not HeldTensor or (tensor.dtype, tensor.shape) != (other.dtype, other.shape)


def _weights(
    states: RankStates, files: TagFiles, folder: str, model_ranks: Sequence[int]
) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of the model by name, with what else its modules have.

    Args:
        model_ranks: whose. They are the stages of a pipeline.
    """
    first = states.models[Ranks(0, model_ranks[0])]
    if first.module is not None:
        yield from _as_whole(first.module.items())
    for layer, name in files.layers.items():
        if layer.model == model_ranks[0]:
            for key, value in _of_file(str(Path(folder, name))):
                yield f"{layer.layer}.{key}", value
    for name in files.experts.values():
        yield from _of_file(str(Path(folder, name)))


def _as_whole(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    yield from ((name, value.as_one_piece if type(value) is HeldTensor else value) for name, value in tensors)


def _of_file(path: str) -> Iterator[tuple[str, Value]]:
    content = read_content(path, "DeepSpeed")
    yield from _as_whole(named_tensors("state of a layer or expert", content.root, content, path))


def _frozen(states: RankStates, model_rank: int) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the parameters of a model-parallel rank that are not trained, where they lie apart.

    At stage 3 they do so in slices, else a second time.
    """
    models = [model for ranks, model in states.models.items() if ranks.model == model_rank]
    if not states.is_sliced:
        fragments = models[0].fragments.items()
        yield from ((name, tensor.as_one_piece) for name, tensor in fragments if type(tensor) is HeldTensor)
        return
    for name, shape in models[0].frozen.items():
        vectors = [_vector(name, model.fragments.get(name), model.path) for model in models]
        size = TensorType(vectors[0].dtype, shape).size_bytes // vectors[0].dtype.itemsize_bytes
        try:
            (runs,) = in_slices([size], [vector.elements for vector in vectors])
        except SizeError as error:
            raise ShardError(
                f"the slices of {name!r}, which is not trained, are not of its size",
                expected=error.expected,
                got=error.got,
                where=models[0].path,
            ) from None
        ranges = tuple(vectors[rank].range(start, length) for rank, start, length in runs)
        yield name, HeldTensor(vectors[0].dtype, shape, ByteRanges(ranges)).as_one_piece


def _vector(name: str, fragment: Value, path: str) -> FlatVector:
    """Return a rank's slice of a parameter. Raises ShardError if it is none."""
    if type(fragment) is HeldTensor and len(fragment.shape) == 1 and isinstance(fragment.place, ByteRanges):
        start = fragment.place.ranges[0].offset_bytes if fragment.place.ranges else 0
        return FlatVector(path, start, fragment.dtype, fragment.shape[0])
    raise ShardError(
        f"a file lacks its slice of {name!r}, which is not trained",
        expected="a vector in frozen_param_fragments",
        got="nothing" if fragment is None else "something else",
        where=path,
    )


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Return the vectors and other tensors of one of the files, which are parts of what all hold together.

    Raises ShardError if it is not sound.
    """
    content = read_content(path, "DeepSpeed")
    try:
        tensors = flatten_tree.flatten(content.root, is_tensor).tensors
    except NestError as error:
        raise error.of_file("a file of a DeepSpeed checkpoint", path) from None
    placed = ((name, held(tensor, content.starts, path)) for name, tensor in tensors if type(tensor) is StoredTensor)
    table = TensorTable(path, (TensorEntry(name, *tensor) for name, tensor in placed))
    return Manifest(path, NAME, table, part_of="a DeepSpeed checkpoint", to_have_all=f"give {Path(path).parent}")


_SETTINGS, _WEIGHTS, _SUFFIX = "optimizer_state.pt", "fp32", ".pt"
_OF_VECTORS = ("optimizer_state_dict", "fp32_flat_groups", "ds_version", "param_groups")
_RESTORE = "convert the checkpoint with ds_to_universal.py again, or give the one that it was made from"


def files_of_parameters(folder: str) -> Iterator[str]:
    """Yield the paths of all files below the folder of parameters, relative to `folder`."""
    for below, names in _folders(folder).items():
        yield from (f"{PARAMETERS}/{below}/{name}" for name in names)
    if source_files.is_file(Path(folder, PARAMETERS, _SETTINGS)):
        yield f"{PARAMETERS}/{_SETTINGS}"


def _folders(folder: str) -> dict[str, list[str]]:
    """Return, for the folder of each parameter, the names of its files."""
    entries = source_files.entries(Path(folder, PARAMETERS))
    below = (entry.name for entry in entries if entry.is_folder)
    return {
        name: sorted(own for own in source_files.names(str(Path(folder, PARAMETERS, name))) if own.endswith(_SUFFIX))
        for name in below
    }


def read_universal(folder: str, states: RankStates) -> DeepSpeedTraining:
    """Read all parameters with their state; what has no state counts as frozen. Weights of the model are not read.

    Args:
        states: the settings of all ranks, which list the parameters.

    Raises ShardError if a file is missing, not sound, or of another shape than is listed.
    """
    by_name = {name: _read(folder, name, files) for name, files in _folders(folder).items()}
    path = str(Path(folder, PARAMETERS, _SETTINGS))
    if not source_files.is_file(path):
        raise _lacking(f"{PARAMETERS}/{_SETTINGS}, with the settings of its optimizer", "no such file", folder)
    content = read_content(path, "DeepSpeed")
    root = content.root
    settings = entry_of(root, "param_groups")
    if type(settings) is not list or not all(type(group) is Dict for group in settings):
        raise ShardError(
            "a universal checkpoint of DeepSpeed does not say the settings of its optimizer",
            expected="a dictionary with param_groups, a list of dictionaries",
            got=type(root if type(root) is not Dict else settings).__name__,
            where=path,
            remedy=_RESTORE,
        )
    is_sliced = root.get("fp32_flat_groups") is not None
    groups = optimizer_states_of(root, content, path).groups if is_sliced else ()
    trained: dict[str, TrainedParameter] = {}
    for name, (shape, number) in _listed(states).items():
        own = by_name.pop(name, {})
        weights = own.get(_WEIGHTS)
        if not isinstance(weights, HeldTensor):
            raise _lacking_part(name, "a tensor in fp32.pt", folder)
        of_all = {**groups[number].values, **groups[number].of_all} if number < len(groups) else {}
        trained[name] = _parameter(name, weights.shape if shape is None else shape, own, of_all, number, folder)
    _require_alike(trained, folder)
    frozen = {
        name: tensor.as_one_piece
        for name, own in by_name.items()
        if isinstance(tensor := own.get(_WEIGHTS), HeldTensor)
    }
    values = {key: plain(value) for key, value in text_pairs(root) if key not in (*LAYOUT_KEYS, *_OF_VECTORS)}
    return DeepSpeedTraining(states.first, {}, trained, frozen, settings, values, content.starts, path)


def _listed(states: RankStates) -> dict[str, tuple[tuple[int, ...] | None, int]]:
    """Return the parameters that files of ranks list, each with its shape and the number of its group.

    With several model-parallel ranks the shapes are those of slices, and None is returned for each.
    """
    first = states.first
    if states.model_ranks == 1:
        return {name: (shape, group) for group, own in enumerate(first.shapes or ()) for name, shape in own.items()}
    shapes = (model.shapes or () for ranks, model in states.models.items() if ranks.data == 0)
    return {name: (None, group) for groups in shapes for group, own in enumerate(groups) for name in own}


def _read(folder: str, name: str, files: Sequence[str]) -> dict[str, Value]:
    """Return the contents of a parameter's files, by their names without ending."""
    own = {}
    for file in files:
        path = str(Path(folder, PARAMETERS, name, file))
        content = read_content(path, "DeepSpeed")
        value = content.root.get("param") if type(content.root) is Dict else content.root
        own[file.removesuffix(_SUFFIX)] = held(value, content.starts, path) if type(value) is StoredTensor else value
    return own


def _parameter(
    name: str, shape: tuple[int, ...], own: Mapping[str, Value], of_all: Mapping[str, Value], number: int, folder: str
) -> TrainedParameter:
    """Return a parameter with its state. Raises ShardError if a file does not hold as many elements as it has."""
    state: dict[str, TensorPieces] = {}
    others = dict(of_all)
    for kind, value in own.items():
        if not isinstance(value, HeldTensor) or (not value.shape and shape):
            others[kind] = value
            continue
        is_vector = value.shape == (math.prod(shape),) and isinstance(value.place, ByteRanges)
        if value.shape != shape and not is_vector:
            raise ShardError(
                f"{kind} of {name!r} in a universal checkpoint of DeepSpeed has another shape than is listed",
                expected=f"{list(shape)}, or a vector of as many elements",
                got=str(list(value.shape)),
                where=str(Path(folder, PARAMETERS, name, f"{kind}{_SUFFIX}")),
                remedy=_RESTORE,
            )
        state[kind] = value._replace(shape=shape).as_one_piece
    return TrainedParameter(shape, state.pop(_WEIGHTS), state, others, number)


def _lacking_part(name: str, what: str, folder: str) -> ShardError:
    return _lacking(f"{PARAMETERS}/{name} with fp32.pt and the optimizer's state", f"{what} is not there", folder)


def _lacking(expected: str, got: str, folder: str) -> ShardError:
    return ShardError(
        "a universal checkpoint of DeepSpeed lacks a part of it",
        expected=expected,
        got=got,
        where=folder,
        remedy=_RESTORE,
    )


def _require_alike(trained: Mapping[str, TrainedParameter], folder: str) -> None:
    """Raise ShardError unless all parameters have the same kinds of state: a file is missing where they have not."""
    kinds = {name: {*parameter.state, *parameter.others} for name, parameter in trained.items()}
    every = set[str]().union(*kinds.values())
    for name, own in kinds.items():
        if own != every:
            raise _lacking_part(name, f"{min(every - own)}{_SUFFIX}", folder)
