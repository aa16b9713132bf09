"""Read a training in a folder of Megatron's older form, in the files of its ranks (`read_legacy`).

Layers and experts get the numbers that they have in the whole model: `decoder.layers.7.mlp.linear_fc1.weight`. What
several ranks have is listed with its copies.

In an optimizer that is not distributed, torch numbers parameters group by group (`numbered_states`). A group has its
parameters in the order of the rank's model, so the groups of a rank are merged as sorted lists are: the next parameter
of the model is the next one of some group, or is not trained. Which one it is shows by its shape, and by the float32
copy of a 16-bit weight, whose rounding it is. (megatron/core/optimizer/optimizer.py of Megatron-Core 0.19)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRanges, Location
from reshard_mpi.formats.manifest import OF_RANKS_ALONE
from reshard_mpi.formats.megatron.flat_vectors import ParameterState, vector_states
from reshard_mpi.formats.megatron.parameter_order import ElementReader, rounded
from reshard_mpi.formats.megatron.rank_folders import VECTOR_FILE, LegacyRanks, RankFiles, is_chunk, read_ranks
from reshard_mpi.formats.megatron.rank_slices import RankModel, RankTensor, in_slices, rank_tensors
from reshard_mpi.formats.megatron.training_tree import (
    FP32,
    FolderTraining,
    SavedTraining,
    chained,
    differing,
    is_of_experts,
    is_of_group,
    kind_of_group,
    merged,
    not_of_one_save,
    require_agreement,
    require_all_parts,
    require_iteration_of_folder,
    scaler_of,
    with_members,
)
from reshard_mpi.formats.nest.nodes import Dict, Value, entry_of, text_pairs
from reshard_mpi.formats.torch.file_content import HeldTensor, TensorPieces, held, text_of
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box

_OPTIMIZER = "optimizer"
# What each rank has of its own.
_OF_RANKS = ("rng_state", "rerun_state_machine")
# What is read of an optimizer.
_READ = ("optimizer", "grad_scaler", "fp32_from_fp16_params", "state", "param_groups")


class _JoinedState(NamedTuple):
    """An optimizer joined of all ranks: its state by key and kind, its groups, its scaler, and words on omissions."""

    state: Mapping[str, ParameterState]
    groups: Sequence[Dict]
    scaler: Value
    left_out: tuple[str, ...]


def read_legacy(folder: str) -> FolderTraining:
    """Read the training in a folder. Raises ShardError if it is not whole or contradicts itself."""
    ranks = read_ranks(folder)
    require_iteration_of_folder(ranks.first.values, ranks.first.path, folder)
    models = rank_tensors(ranks, folder)
    weights = _weights(models)
    others, own_states = _others(models)
    optimizer = _optimizer(ranks, models, weights, folder)
    with ElementReader() as reader:
        require_agreement(ranks.args, weights, optimizer.state, reader, folder)
    first = ranks.first
    values = {
        key: value for key, value in first.values.items() if not is_chunk(key) and key not in (_OPTIMIZER, *_OF_RANKS)
    }
    if optimizer.scaler is not None:
        values["scaler"] = optimizer.scaler
    left_out = (
        *optimizer.left_out,
        *differing(own_states, "state of the ranks' own, such as what Transformer Engine keeps of FP8"),
        *differing([key for key in _OF_RANKS if key in first.values], OF_RANKS_ALONE),
        *_of_other_ranks(ranks),
    )
    training = SavedTraining({**weights, **others}, optimizer.state, optimizer.groups, values)
    return FolderTraining(training, lambda stored: held(stored, first.starts, first.path).as_one_piece, left_out)


def _weights(models: Sequence[RankModel]) -> dict[str, TensorPieces]:
    """Return the tensors of the model, joined of the ranks' slices, in the order in which the model has them."""
    tensors = [tensor for model in models for tensor in model.tensors]
    pieces: dict[str, list[tuple[Box, Location]]] = {}
    first: dict[str, RankTensor] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.chunk):  # stages are in order already
        first.setdefault(tensor.key, tensor)
        pieces.setdefault(tensor.key, []).extend(tensor.slices)
    return {key: TensorPieces(own.held.dtype, own.shape, tuple(pieces[key])) for key, own in first.items()}


def _others(models: Sequence[RankModel]) -> tuple[dict[str, Value], list[str]]:
    """Return values of modules besides weights if all ranks have them alike, and the keys of all others."""
    holders: dict[str, list[tuple[Value, RankFiles]]] = {}
    for model in models:
        for key, value in model.others.items():
            holders.setdefault(key, []).append((value, model.files))
    kept: dict[str, Value] = {}
    own: list[str] = []
    for key, values in holders.items():
        value, rank = values[0]
        is_alike = len({_text(each) for each, _ in values}) == 1
        if len(values) > 1 and (not is_alike or (type(value) is StoredTensor and 0 not in value.shape)):
            own.append(key)
        else:
            kept[key] = held(value, rank.starts, rank.path).as_one_piece if type(value) is StoredTensor else value
    return kept, own


def _text(value: Value) -> str:
    return f"{value.dtype} {value.shape}" if type(value) is StoredTensor else text_of(value)


def _of_other_ranks(ranks: LegacyRanks) -> Iterator[str]:
    """Say which values differ on other ranks than the first, whose values are kept."""
    first = ranks.first
    kept = {key: text_of(value) for key, value in first.values.items() if not is_chunk(key)}
    known = (_OPTIMIZER, "args", *_OF_RANKS)
    keys = dict.fromkeys(
        key
        for rank in ranks.ranks
        for key, value in rank.values.items()
        if not is_chunk(key) and key not in known and text_of(value) != kept.get(key)
    )
    yield from differing([*keys], f"of ranks other than that of {first.path}, whose is kept")


def _optimizer(
    ranks: LegacyRanks, models: Sequence[RankModel], weights: Mapping[str, TensorPieces], folder: str
) -> _JoinedState:
    """Return the optimizer. Raises ShardError if it has the state of some parts of a parameter alone."""
    optimizers = {rank.place: _chained(rank.values.get(_OPTIMIZER)) for rank in ranks.ranks if rank.values}
    first = optimizers[ranks.first.place]
    if any(len(own) != len(first) for own in optimizers.values()):
        got = " and ".join(map(str, sorted({len(own) for own in optimizers.values()})))
        raise not_of_one_save("as many optimizers on all ranks", got, folder)
    of_experts = [is_of_experts(_inner(own)) for own in first] if len(first) > 1 else [None] * len(first)
    has_numbers = any(_inner(own).get("state") is not None for own in first)
    has_vectors = any(rank.vectors is not None for rank in ranks.ranks)
    state = _StateOfRanks()
    for model in models:
        state.add_rank(model, optimizers.get(model.files.place, []) if has_numbers else [], of_experts)
    groups = [
        with_members(group, state.members(number, group)) if has_numbers else group
        for number, alike in enumerate(zip(*optimizers.values()))
        for group in merged([_without_members(_inner(own)) for own in alike], folder)
    ]
    every = [own for of_rank in optimizers.values() for own in of_rank]
    others = {key for own in every for key, _ in text_pairs(own) if key not in _READ}
    left_out = [*differing([*others], "of the optimizer, which is not read")]
    if not has_vectors and not has_numbers:
        left_out.append(f"the optimizer's state: {VECTOR_FILE}, which has it, is in no folder")
    scaler = scaler_of([own.get("grad_scaler") for own in every if own.get("grad_scaler") is not None], folder)
    return _JoinedState(state.joined(weights, folder), groups, scaler, tuple(left_out if first else ()))


def _without_members(optimizer: Dict) -> Dict:
    groups = optimizer.get("param_groups")
    own = [group.without("params") if type(group) is Dict else group for group in groups or []]
    return Dict(["param_groups", own])


def _chained(optimizer: Value) -> list[Dict]:
    """Return the optimizers of a rank: several are in a list, or have numbers for keys."""
    return [own for own in optimizer if type(own) is Dict] if type(optimizer) is list else chained(optimizer)


def _inner(optimizer: Dict) -> Dict:
    """Return torch's own optimizer, which lies in Megatron's or by itself."""
    inner = optimizer.get("optimizer")
    return inner if type(inner) is Dict else optimizer


class _StateOfRanks:
    """Joins the state that ranks have of parameters."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[str, list[tuple[Box, Location]]]] = {}
        self._types: dict[str, dict[str, tuple[DType, tuple[int, ...]]]] = {}
        self._values: dict[str, dict[str, Value]] = {}
        self._members: dict[tuple[int, str], dict[str, None]] = {}

    def add_rank(self, model: RankModel, optimizers: Sequence[Dict], of_experts: Sequence[bool | None]) -> None:
        """Add the state of a rank.

        Args:
            optimizers: of the rank, if they number its parameters.
            of_experts: for each optimizer whether it is of the experts; None: of all parameters.

        Raises DisagreementError if another rank has other numbers.
        """
        with ElementReader() as reader:
            if model.files.vectors is not None:
                for tensor, own in vector_states(model, of_experts, reader):
                    self._add(tensor, own, model.files)
            for number, (optimizer, is_expert) in enumerate(zip(optimizers, of_experts)):
                tensors = [own for own in model.tensors if is_expert in (None, own.is_expert)]
                for found in numbered_states(model.files, optimizer, tensors, reader):
                    self._add(found.tensor, found.state, model.files)
                    self._members.setdefault((number, kind_of_group(found.group)), {})[found.tensor.key] = None

    def members(self, optimizer: int, group: Dict) -> list[str]:
        """Return the parameters that groups of this kind have on any rank."""
        return [*self._members.get((optimizer, kind_of_group(group)), ())]

    def _add(self, tensor: RankTensor, state: ParameterState, rank: RankFiles) -> None:
        for kind, value in state.items():
            if type(value) is not HeldTensor:
                first = self._values.setdefault(tensor.key, {}).setdefault(kind, value)
                if text_of(first) != text_of(value):
                    raise not_of_one_save(f"{kind} {first!r} of {tensor.key!r}", repr(value), rank.path)
                continue
            is_single = value.shape == () != tensor.held.shape
            shape = () if is_single else tensor.shape
            boxes = [Box((), ())] if is_single else [box for box, _ in tensor.slices]
            self._types.setdefault(tensor.key, {}).setdefault(kind, (value.dtype, shape))
            self._pieces.setdefault(tensor.key, {}).setdefault(kind, []).extend(in_slices(value, boxes))

    def joined(self, weights: Mapping[str, TensorPieces], folder: str) -> dict[str, ParameterState]:
        """Return the state of whole parameters. Raises ShardError if a part of one is missing."""
        whole: dict[str, ParameterState] = {}
        for key in weights:
            pieces = self._pieces.get(key, {})
            for kind, own in pieces.items():
                if self._types[key][kind][1]:
                    require_all_parts(kind, key, weights[key], own, folder)
            tensors = {kind: TensorPieces(*self._types[key][kind], tuple(own)) for kind, own in pieces.items()}
            if tensors or key in self._values:
                whole[key] = {**tensors, **self._values.get(key, {})}
        return whole


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
    inner = _inner(optimizer)
    states = inner.get("state")
    groups = list(_groups(inner, optimizer.get(_MAIN), rank.path))
    numbered = {key: own for key, own in states.pairs() if type(key) is int} if type(states) is Dict else {}
    met = [_Place(0, 0) for _ in groups]
    unmet: list[RankTensor] = []
    for tensor in tensors:
        places = enumerate(zip(groups, met))
        fitting = [number for number, place in places if _is_next(tensor, *place, numbered, rank, reader)]
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
        own = dict(_state(numbered.get(group.numbers[place.parameters]), rank))
        if not _is_float32(tensor):
            own = {FP32: held(group.mains[place.mains], rank.starts, rank.path), **own}
        met[number] = _Place(place.parameters + 1, place.mains + (not _is_float32(tensor)))
        yield NumberedState(tensor, own, group.settings)
    _require_all(groups, met, unmet, rank.path)


def _is_float32(tensor: RankTensor) -> bool:
    return tensor.held.dtype.name == "float32"


def _groups(inner: Dict, mains: Value, path: str) -> Iterator[_NumberedGroup]:
    """Yield the groups of an optimizer. Raises ShardError if they are none."""
    groups = inner.get("param_groups")
    lists = mains if type(mains) is list else [[] for _ in groups or []]
    if type(groups) is not list or len(lists) != len(groups):
        got = f"{len(lists)} in {_MAIN}" if type(groups) is list else type(groups).__name__
        raise _unsound(path, f"a list param_groups, with as many lists in {_MAIN}", got)
    for group, own in zip(groups, lists):
        numbers = entry_of(group, "params")
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
    if _is_float32(tensor):
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


def _state(state: Value, rank: RankFiles) -> Iterator[tuple[str, Value]]:
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
    in_float32 = [tensor for tensor in unmet if _is_float32(tensor) and not tensor.key.endswith(_BUFFERS)]
    if in_float32 and any(len(group.numbers) > len(group.mains) for group in groups):
        raise _undecided(f"{in_float32[0].key!r}, in float32 as others are, is not in it", path)


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
