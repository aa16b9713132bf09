"""Read DeepSpeed's universal checkpoints, in which every parameter has a folder (`read_universal`).

    TAG/mp_rank_00_model_states.pt              weights and settings, as before the conversion; of stage 3 one a rank
    TAG/zero/NAME/fp32.pt exp_avg.pt step.pt    a whole parameter and its state: {"param": tensor, ...}; of stage 3 a
                                                vector, and no step
    TAG/zero/optimizer_state.pt                 everything else that the first rank's optimizer has

(deepspeed/checkpoint/ds_to_universal.py of release 0.19)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.deepspeed.parameters import TrainedParameter
from reshard_mpi.formats.deepspeed.rank_files import LAYOUT_KEYS, optimizer_states_of, plain
from reshard_mpi.formats.deepspeed.ranks import PARAMETERS, RankStates
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.framework_files import HeldTensor, TensorPieces, held, pairs_of, read_content
from reshard_mpi.formats.torch.tensors import StoredTensor

_SETTINGS, _WEIGHTS, _SUFFIX = "optimizer_state.pt", "fp32", ".pt"
_OF_VECTORS = ("optimizer_state_dict", "fp32_flat_groups", "ds_version", "param_groups")
_RESTORE = "convert the checkpoint with ds_to_universal.py again, or give the one that it was made from"


class UniversalStates(NamedTuple):
    """The contents of the folder of parameters.

    Attributes:
        trained: the parameters that are optimized, in the order of the groups.
        besides: others that have a folder: buffers.
        settings: the optimizer's groups; values: what else it has; starts, path: of tensors in them, and their file.
    """

    trained: Mapping[str, TrainedParameter]
    besides: Mapping[str, TensorPieces]
    settings: Sequence[Dict]
    values: Mapping[str, Value]
    starts: Mapping[str, int]
    path: str


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


def read_universal(folder: str, states: RankStates) -> UniversalStates:
    """Read all parameters with their state.

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
    settings = root.get("param_groups") if type(root) is Dict else None
    if type(root) is not Dict or type(settings) is not list or not all(type(group) is Dict for group in settings):
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
    besides = {
        name: tensor.whole for name, own in by_name.items() if isinstance(tensor := own.get(_WEIGHTS), HeldTensor)
    }
    values = {key: plain(value) for key, value in pairs_of(root) if key not in (*LAYOUT_KEYS, *_OF_VECTORS)}
    return UniversalStates(trained, besides, settings, values, content.starts, path)


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
    name: str,
    shape: tuple[int, ...],
    own: Mapping[str, Value],
    of_all: Mapping[str, Value],
    number: int,
    folder: str,
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
        state[kind] = value._replace(shape=shape).whole
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
