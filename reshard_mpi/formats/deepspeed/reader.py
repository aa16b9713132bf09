"""Open a DeepSpeed checkpoint as whole tensors by their names (`open_folder`).

Its names are those of a whole training state: `model.NAME`, `optimizer.state.NAME.exp_avg` and so on, with
`optimizer.state.NAME.fp32_param` where the model has a parameter in another type. Parameters of experts have their
numbers over all ranks. A weight that lies both in the model and, in float32, in the optimizer is listed as two pieces,
so that both are compared as copies are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from reshard_mpi.errors import ShardError, SourceError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.deepspeed.flat_groups import SizeError, in_slices, type_in
from reshard_mpi.formats.deepspeed.parameters import trained_parameters, with_shapes
from reshard_mpi.formats.deepspeed.rank_files import LAYOUT_KEYS, named_tensors
from reshard_mpi.formats.deepspeed.ranks import PARAMETERS, Ranks, RankStates, TagFiles, read_ranks, sorted_files
from reshard_mpi.formats.deepspeed.slice_rules import read_rules
from reshard_mpi.formats.deepspeed.tensor_parallel import JOINED, JOINED_BY_STRATEGY, joined
from reshard_mpi.formats.deepspeed.training_tree import DeepSpeedTraining, arranged
from reshard_mpi.formats.deepspeed.universal import UniversalStates, files_of_parameters, read_universal
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import NestError, Value
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.formats.torch.framework_files import FlatVector, HeldTensor, TensorPieces, held, read_content
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
    weights = [dict(_weights(states, files, folder, range(part, states.model_ranks, parts))) for part in range(parts)]
    if states.optimizers and states.first.shapes is None:
        states = with_shapes(states, weights)
    if is_universal:
        training = _universal(states, weights[0], folder)
    else:
        lead = next(iter(states.optimizers.values()), None)
        trained = [trained_parameters(states, range(part, states.model_ranks, parts)) for part in range(parts)]
        frozen = [dict(_frozen(states, part)) for part in range(parts)]
        by_name = [own.by_name for own in trained]
        # In a pipeline each stage names its own buffers.
        buffers = [*dict.fromkeys(name for model in states.models.values() for name in model.buffers)]
        lead_model = states.first._replace(buffers=buffers)
        trainings = [DeepSpeedTraining(lead_model, *of_part) for of_part in zip(weights, by_name, frozen)]
        training = trainings[0] if rules is None else joined(trainings, rules)
        if states.first.module is None:
            layers = sorted({own.layer for own in files.layers})
            training = training._replace(layers=layers, stages=trained[0].stages)
        if lead is not None:
            training = training._replace(settings=lead.settings, values=lead.values, starts=lead.starts, path=lead.path)
    manifest = arranged(training, folder, states.notes)
    of_first = (_OF_FIRST,) if states.is_sliced and states.first.data_ranks > 1 and states.first.buffers else ()
    of_slices = (JOINED if strategy is None else JOINED_BY_STRATEGY,) if parts > 1 else ()
    of_groups = (_NO_SETTINGS,) if training.trained and not training.settings else ()
    return {0: manifest._replace(notes=(_NOT_KEPT, *of_first, *of_slices, *of_groups))}


def _tensor_parallel_ranks(states: RankStates, files: TagFiles) -> int:
    """Return over how many ranks parameters are cut. With a pipeline its stages are model-parallel ranks as well."""
    return (
        states.model_ranks
        if states.first.module is not None
        else 1 + max((own.model for own in files.layers), default=0)
    )


def _universal(states: RankStates, weights: Mapping[str, Value], folder: str) -> DeepSpeedTraining:
    """Return the training of a universal checkpoint."""
    read = read_universal(folder, states)
    if states.model_ranks > 1:
        weights = dict(_of_several_ranks(states, read, folder))
    return DeepSpeedTraining(
        states.first,
        weights,
        read.trained,
        {**dict(_frozen(states, 0)), **read.besides},
        read.settings,
        read.values,
        read.starts,
        read.path,
    )


def _of_several_ranks(states: RankStates, read: UniversalStates, folder: str) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the tensors of a model whose files hold slices, or some layers each: the optimizer has them whole.

    Buffers are whole in all files, and listed with their copies. Raises ShardError for a parameter that is not trained,
    since no file has it whole.
    """
    dtype = type_in(states.first.values.get("ds_config"))
    nothing = TensorPieces(dtype, (0,), ())
    yield from dict.fromkeys(read.trained, nothing).items()
    yield from read.besides.items()
    buffers: dict[str, TensorPieces] = {}
    for model in states.models.values():
        tensors = model.module or {}
        for name in model.buffers:
            own = tensors.get(name)
            if type(own) is HeldTensor and name not in read.besides:
                first = buffers.setdefault(name, own.whole._replace(pieces=()))
                if (own.dtype, own.shape) == (first.dtype, first.shape):
                    buffers[name] = first._replace(pieces=(*first.pieces, *own.whole.pieces))
    yield from buffers.items()
    for model in states.models.values():
        known = {*read.trained, *read.besides, *model.shared, *buffers}
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
    yield from ((name, value.whole if type(value) is HeldTensor else value) for name, value in tensors)


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
        yield from ((name, tensor.whole) for name, tensor in fragments if type(tensor) is HeldTensor)
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
        ranges = tuple(vectors[run.rank].range(run.start, run.length) for run in runs)
        yield name, HeldTensor(vectors[0].dtype, shape, ByteRanges(ranges)).whole


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
        problem = f"a file of a DeepSpeed checkpoint cannot be read: {error.problem}"
        raise ShardError(problem, got=error.got, where=path, remedy=error.remedy) from None
    placed = ((name, held(tensor, content.starts, path)) for name, tensor in tensors if type(tensor) is StoredTensor)
    table = TensorTable(path, (TensorEntry(name, *tensor) for name, tensor in placed))
    return Manifest(path, NAME, table, part_of="a DeepSpeed checkpoint", to_have_all=f"give {Path(path).parent}")
