"""Open a DeepSpeed checkpoint as whole tensors by their names (`open_folder`).

Its names are those of a whole training state: `model.NAME`, `optimizer.state.NAME.exp_avg` and so on, with
`optimizer.state.NAME.fp32_param` where the model has a parameter in another type. Parameters of experts have their
numbers over all ranks. A weight that lies both in the model and, in float32, in the optimizer is listed as two pieces,
so that both are compared as copies are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.deepspeed.file_names import PARAMETERS, TagFiles, sorted_files
from reshard_mpi.formats.deepspeed.flat_groups import SizeError, in_slices
from reshard_mpi.formats.deepspeed.parameters import trained_parameters
from reshard_mpi.formats.deepspeed.rank_files import (
    LAYOUT_KEYS,
    FlatVector,
    HeldTensor,
    held,
    named_tensors,
    read_content,
)
from reshard_mpi.formats.deepspeed.ranks import RankStates, read_ranks
from reshard_mpi.formats.deepspeed.training_tree import SavedTraining, arranged, type_in
from reshard_mpi.formats.deepspeed.universal import UniversalStates, files_of_parameters, read_universal
from reshard_mpi.formats.deepspeed.unlisted_shapes import with_shapes
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import NestError, Value
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.formats.torch.tensors import StoredTensor, is_tensor
from reshard_mpi.text import natural_key

NAME = "deepspeed"

_NOT_KEPT = f"not carried over, since it is about the ranks of DeepSpeed's files alone: {', '.join(LAYOUT_KEYS)}"
_OF_FIRST = "buffers are those of the first rank's file, as DeepSpeed takes them"


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the checkpoint's files. Raises ShardError if two are of one rank."""
    names = sorted_files(source_files.names(folder), folder).names
    if _is_universal(folder):
        names += files_of_parameters(folder)
    return tuple(str(Path(folder, name)) for name in sorted(names, key=natural_key))


def _is_universal(folder: str) -> bool:
    return source_files.is_folder(Path(folder, PARAMETERS))


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the whole tensors of the checkpoint, and everything else that it has as the text of a nest.

    Raises ShardError if a file is missing, not sound, or contradicts others; DisagreementError if files are of several
    saves.
    """
    files = sorted_files(source_files.names(folder), folder)
    is_universal = _is_universal(folder)
    states = read_ranks(folder, files, is_universal=is_universal)
    weights = dict(_weights(states, files, folder, is_universal=is_universal))
    if states.optimizers and states.first.shapes is None:
        states = with_shapes(states, weights)
    if is_universal:
        training = _universal(states, weights, folder)
    else:
        lead = next(iter(states.optimizers.values()), None)
        training = SavedTraining(states.first, weights, trained_parameters(states), dict(_frozen(states)))
        if lead is not None:
            training = training._replace(settings=lead.settings, values=lead.values, starts=lead.starts, path=lead.path)
    manifest = arranged(training, folder, states.notes)
    of_first = (_OF_FIRST,) if states.is_sliced and len(states.models) > 1 and states.first.buffers else ()
    return {0: manifest._replace(notes=(_NOT_KEPT, *of_first))}


def _universal(states: RankStates, weights: Mapping[str, Value], folder: str) -> SavedTraining:
    """Return the training of a universal checkpoint."""
    read = read_universal(folder, states)
    if states.model_ranks > 1:
        weights = dict(_of_several_ranks(states, read, folder))
    return SavedTraining(
        states.first,
        weights,
        read.trained,
        {**dict(_frozen(states)), **read.besides},
        read.settings,
        read.values,
        read.starts,
        read.path,
    )


def _of_several_ranks(states: RankStates, read: UniversalStates, folder: str) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the tensors of a model whose files hold slices, or some layers each: the optimizer has them whole.

    Raises ShardError for a parameter that is not trained, since no file has it whole.
    """
    dtype = type_in(states.first.values.get("ds_config"))
    nothing = HeldTensor(dtype, (0,), ByteRanges(()))
    yield from dict.fromkeys(read.trained, nothing).items()
    yield from read.besides.items()
    for model in states.models.values():
        others = (model.module or {}).keys() - read.trained.keys() - read.besides.keys() - model.shared.keys()
        if others:
            raise ShardError(
                "a universal checkpoint of DeepSpeed has tensors that are in files of tensor-parallel ranks alone",
                expected="all of them below zero/",
                got=f"{len(others)} others, such as {min(others)!r}",
                where=folder,
                remedy="load it with the training's own framework, and save it whole",
            )


def _weights(states: RankStates, files: TagFiles, folder: str, *, is_universal: bool) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of the model by name, with what else its modules have.

    Raises ShardError if several model-parallel ranks have slices of the same tensors.
    """
    module = states.first.module
    if is_universal and states.model_ranks > 1:
        return
    parts = 1 + max((layer.model for layer in files.layers), default=0)
    if parts > 1 or (module is not None and states.model_ranks > 1):
        raise ShardError(
            f"a DeepSpeed checkpoint of {max(parts, states.model_ranks)} tensor-parallel ranks is not read"
            if module is not None
            else f"a DeepSpeed checkpoint of a pipeline with {parts} tensor-parallel ranks is not read",
            expected="data parallelism, a pipeline, or experts",
            got="files of several model-parallel ranks, with slices of the same parameters",
            where=folder,
            remedy="load it with the training's own framework, and save it whole",
        )
    if module is not None:
        yield from module.items()
    for layer, name in files.layers.items():
        for key, value in _of_file(str(Path(folder, name))):
            yield f"{layer.layer}.{key}", value
    for name in files.experts.values():
        yield from _of_file(str(Path(folder, name)))


def _of_file(path: str) -> Iterator[tuple[str, Value]]:
    content = read_content(path)
    yield from named_tensors("state of a layer or expert", content.root, content, path)


def _frozen(states: RankStates) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the parameters that are not trained, where they lie apart: at stage 3 in slices, else a second time."""
    if not states.is_sliced:
        fragments = states.first.fragments.items()
        yield from ((name, tensor) for name, tensor in fragments if type(tensor) is HeldTensor)
        return
    for name, shape in states.first.frozen.items():
        vectors = [_vector(name, model.fragments.get(name), model.path) for model in states.models.values()]
        size = TensorType(vectors[0].dtype, shape).size_bytes // vectors[0].dtype.itemsize_bytes
        try:
            (runs,) = in_slices([size], [vector.elements for vector in vectors])
        except SizeError as error:
            raise ShardError(
                f"the slices of {name!r}, which is not trained, are not of its size",
                expected=error.expected,
                got=error.got,
                where=states.first.path,
            ) from None
        ranges = tuple(vectors[run.rank].range(run.start, run.length) for run in runs)
        yield name, HeldTensor(vectors[0].dtype, shape, ByteRanges(ranges))


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
    content = read_content(path)
    try:
        tensors = flatten_tree.flatten(content.root, is_tensor).tensors
    except NestError as error:
        problem = f"a file of a DeepSpeed checkpoint cannot be read: {error.problem}"
        raise ShardError(problem, got=error.got, where=path, remedy=error.remedy) from None
    placed = ((name, held(tensor, content.starts, path)) for name, tensor in tensors if type(tensor) is StoredTensor)
    table = TensorTable(path, (TensorEntry(name, *tensor) for name, tensor in placed))
    return Manifest(path, NAME, table, part_of="a DeepSpeed checkpoint", to_have_all=f"give {Path(path).parent}")
