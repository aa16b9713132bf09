"""Find whose state has which number in an optimizer that is not distributed (`numbered_states`).

Torch numbers parameters group by group. A group has its parameters in the order of the rank's model, so the groups of a
rank are merged as sorted lists are: the next parameter of the model is the next one of some group, or is not trained.
Which one it is shows by its shape, and by the float32 copy of a 16-bit weight, whose rounding it is.
(megatron/core/optimizer/optimizer.py of Megatron-Core 0.19)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.megatron.flat_vectors import ParameterState
from reshard_mpi.formats.megatron.parameter_order import ElementReader, rounded
from reshard_mpi.formats.megatron.rank_folders import RankFiles
from reshard_mpi.formats.megatron.rank_slices import RankTensor
from reshard_mpi.formats.megatron.training_tree import FP32, is_of_group
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.framework_files import held
from reshard_mpi.formats.torch.tensors import StoredTensor

_MAIN = "fp32_from_fp16_params"
# Tensors of the model that no optimizer has, in float32.
_BUFFERS = ".expert_bias"


class NumberedState(NamedTuple):
    """A parameter of a rank, its state, and the group that has it."""

    tensor: RankTensor
    state: ParameterState
    group: Dict


class _NumberedGroup(NamedTuple):
    """A group: the numbers of its parameters, and float32 copies of all that have 16 bits."""

    settings: Dict
    numbers: Sequence[int]
    mains: Sequence[StoredTensor]


class _Place(NamedTuple):
    """How many parameters of a group have been met, and how many of these have copies."""

    parameters: int
    mains: int


def numbered_states(
    rank: RankFiles, optimizer: Dict, tensors: Sequence[RankTensor], reader: ElementReader
) -> Iterator[NumberedState]:
    """Yield the parameters of one optimizer of a rank with their state.

    Args:
        tensors: of the rank's model, those that the optimizer may have.

    Raises ShardError if the state is not of these, or it cannot be told whose is which.
    """
    inner = optimizer.get("optimizer")
    inner = inner if type(inner) is Dict else optimizer
    states = inner.get("state")
    groups = list(_groups(inner, optimizer.get(_MAIN), rank.path))
    numbered = {key: own for key, own in states.pairs() if type(key) is int} if type(states) is Dict else {}
    met = [_Place(0, 0) for _ in groups]
    unmet: list[RankTensor] = []
    for tensor in tensors:
        fitting = [
            number
            for number, (group, place) in enumerate(zip(groups, met))
            if _is_next(tensor, group, place, numbered, rank, reader)
        ]
        if len(fitting) > 1:
            usual = [n for n in fitting if is_of_group(groups[n].settings, tensor.key, len(tensor.shape))]
            fitting = usual if len(usual) == 1 else fitting
        if not fitting:
            unmet.append(tensor)
            continue
        if len(fitting) > 1:
            got = f"{tensor.key!r} can be the next parameter of {len(fitting)} groups"
            raise _undecided(got, rank.path)
        (number,) = fitting
        group, place = groups[number], met[number]
        own = dict(_state(tensor, numbered.get(group.numbers[place.parameters]), rank))
        if not _is_single(tensor):
            own = {FP32: held(group.mains[place.mains], rank.starts, rank.path), **own}
        met[number] = _Place(place.parameters + 1, place.mains + (not _is_single(tensor)))
        yield NumberedState(tensor, own, group.settings)
    _require_all(groups, met, unmet, rank.path)


def _is_single(tensor: RankTensor) -> bool:
    return tensor.held.dtype.name == "float32"


def _groups(inner: Dict, mains: Value, path: str) -> Iterator[_NumberedGroup]:
    """Yield the groups of an optimizer. Raises ShardError if they are none."""
    groups = inner.get("param_groups")
    lists = mains if type(mains) is list else [[] for _ in groups or []]
    if type(groups) is not list or len(lists) != len(groups):
        got = f"{len(lists)} in {_MAIN}" if type(groups) is list else type(groups).__name__
        raise _unsound(path, f"a list param_groups, with as many lists in {_MAIN}", got)
    for group, own in zip(groups, lists):
        numbers = group.get("params") if type(group) is Dict else None
        if type(numbers) is not list or not all(type(number) is int for number in numbers):
            raise _unsound(path, "the numbers of its parameters in every group", "none")
        if type(own) is not list or not all(type(main) is StoredTensor for main in own) or len(own) > len(numbers):
            raise _unsound(path, f"a tensor for each 16-bit parameter in {_MAIN}", "something else")
        yield _NumberedGroup(group, numbers, own)


def _is_next(
    tensor: RankTensor,
    group: _NumberedGroup,
    place: _Place,
    states: Mapping[int, Value],
    rank: RankFiles,
    reader: ElementReader,
) -> bool:
    """Tell whether a tensor can be the next parameter of a group."""
    if place.parameters == len(group.numbers) or tensor.key.endswith(_BUFFERS):
        return False
    shapes = {own.shape for own in _tensors(states.get(group.numbers[place.parameters])) if own.shape}
    if tensor.held.shape and shapes - {tensor.held.shape}:
        return False
    if _is_single(tensor):
        return len(group.numbers) - place.parameters > len(group.mains) - place.mains
    if place.mains == len(group.mains):
        return False
    main = held(group.mains[place.mains], rank.starts, rank.path)
    own = tensor.held
    if main.shape != own.shape or main.dtype.name != "float32":
        return False
    if not isinstance(main.place, ByteRanges) or not isinstance(own.place, ByteRanges):
        return False
    sample = rounded(reader.sample(main.place, tensor.elements, 4), own.dtype)
    return sample == reader.sample(own.place, tensor.elements, own.dtype.itemsize_bytes)


def _tensors(state: Value) -> Iterator[StoredTensor]:
    if type(state) is Dict:
        yield from (value for value in state.flat[1::2] if type(value) is StoredTensor)


def _state(tensor: RankTensor, state: Value, rank: RankFiles) -> Iterator[tuple[str, Value]]:
    """Yield what an optimizer has of a parameter, by kind."""
    for kind, value in state.pairs() if type(state) is Dict else ():
        yield str(kind), held(value, rank.starts, rank.path) if type(value) is StoredTensor else value


def _require_all(
    groups: Sequence[_NumberedGroup], met: Sequence[_Place], unmet: Sequence[RankTensor], path: str
) -> None:
    """Raise ShardError if groups have parameters that are none of the model, or by shapes alone may be others."""
    for number, (group, place) in enumerate(zip(groups, met)):
        if place.parameters < len(group.numbers) or place.mains < len(group.mains):
            raise ShardError(
                "the optimizer of a Megatron checkpoint is not of its weights",
                expected=f"{len(group.numbers)} parameters of group {number} among those of the rank's model, in its"
                f" order; {len(group.mains)} of them are float32 copies rounded",
                got=f"{place.parameters}, of which {place.mains} are float32 copies rounded",
                where=path,
                remedy="restore the files of one save",
            )
    singles = [tensor for tensor in unmet if _is_single(tensor) and not tensor.key.endswith(_BUFFERS)]
    if singles and any(len(group.numbers) > len(group.mains) for group in groups):
        raise _undecided(f"{singles[0].key!r}, in float32 as others are, is not in it", path)


def _undecided(got: str, path: str) -> ShardError:
    return ShardError(
        "whose state has which number in the optimizer of a Megatron checkpoint cannot be told",
        expected="parameters that differ in shape, or float32 copies by which they can be told",
        got=got,
        where=path,
        remedy="load it with its Megatron, and save it with --ckpt-format torch_dist",
    )


def _unsound(path: str, expected: str, got: str) -> ShardError:
    return ShardError(
        "a file of a Megatron checkpoint has no optimizer as Megatron writes it", expected=expected, got=got, where=path
    )
