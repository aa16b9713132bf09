"""Sort the files of a DeepSpeed checkpoint by ranks (`sorted_files`), read them (`read_ranks`), name a target's.

    mp_rank_01_model_states.pt                       weights and settings; stages 0 to 2: of model-parallel rank 1
    zero_pp_rank_2_mp_rank_01_model_states.pt        the same of stage 3: of data-parallel rank 2
    bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt   a data-parallel rank's share of the optimizer, all stages
    layer_03-model_00-model_states.pt                a layer of a pipeline, of tensor-parallel rank 0
    layer_0_expert_5_mp_rank_00_model_states.pt      expert 5 of the first layer that has experts

Facts are of DeepSpeed 0.19; older releases left out `_model_00`, the underscore before `optim`, or `layer_0_`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

from reshard_mpi.errors import DisagreementError, ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.deepspeed.rank_files import (
    ModelStates,
    OptimizerStates,
    read_model_states,
    read_optimizer_states,
)
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.file_content import HeldTensor, text_of
from reshard_mpi.formats.torch.file_signature import FileSignature, same_files
from reshard_mpi.text import counted, shortened

_ZERO = r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_?optim_states\.pt"
_STATES = r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt"
_LAYER = r"layer_(?P<layer>\d+)(?:-model_(?P<model>\d+))?-model_states\.pt"
_EXPERT = r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<model>\d+)_model_states\.pt"
_PREFIX = (
    r"(?P<tag>[^/]+)/(?P<type>bf16_)?zero(?P<zero_stage>[123])"
    r"(?:\.stages(?P<stages>[1-9]\d{0,8})\.layers(?P<layers>\d{1,9}(?:,\d{1,9})*))?"
    r"(?:\.experts(?P<experts>\d{1,9}(?:,\d{1,9})*))?"
)
_EXPERT_OPTIMIZER = r"expp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt"
# The folder of a universal checkpoint in which every parameter has one.
PARAMETERS = "zero"
_READ_BYTES = 1 << 18


class Ranks(NamedTuple):
    """The place of a file: its data-parallel and its model-parallel rank."""

    data: int
    model: int


class LayerPart(NamedTuple):
    """A layer of a pipeline, and the tensor-parallel rank that holds this part of it."""

    layer: int
    model: int


class Expert(NamedTuple):
    """An expert: the number of its layer among layers with experts, its own over all ranks, its model-parallel rank."""

    layer: int
    expert: int
    model: int


class TagFiles(NamedTuple):
    """The files of a checkpoint by their kinds, as names in its folder.

    Attributes:
        models: weights and settings. At stages 0 to 2 they are written by data-parallel rank 0 alone.
        optimizers: shares of the optimizer.
        expert_optimizers: those of trainings without ZeRO.
    """

    models: Mapping[Ranks, str]
    optimizers: Mapping[Ranks, str]
    layers: Mapping[LayerPart, str]
    experts: Mapping[Expert, str]
    expert_optimizers: Mapping[Ranks, str]

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [name for kind in self for name in kind.values()]


class TargetNames(NamedTuple):
    """The facts that the names of a target's files say. The prefix of a run says them too.

    Attributes:
        type: what the names of the optimizer's files begin with.
        stages: how many a pipeline has; layers: the numbers of its layers that have files.
        experts: how many each layer with experts has.
    """

    tag: str = "global_step0"
    type: str = ""
    zero_stage: int = 1
    stages: int = 1
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @classmethod
    def of_prefix(cls, prefix: str) -> TargetNames:
        """Return the names that a prefix says. A user's own says nothing: these files have names of their own."""
        match = re.fullmatch(_PREFIX, prefix)
        if match is None:
            return cls()
        tag, kind, zero_stage, stages, layers, experts = match.groups()
        numbers = [tuple(map(int, own.split(","))) if own else () for own in (layers, experts)]
        return cls(tag, kind or "", int(zero_stage), int(stages or 1), *numbers)

    @property
    def prefix(self) -> str:
        """Such a text as `global_step3/bf16_zero2`."""
        layers = f".stages{self.stages}.layers{','.join(map(str, self.layers))}" if self.layers else ""
        experts = f".experts{','.join(map(str, self.experts))}" if self.experts else ""
        return f"{self.tag}/{self.type}zero{self.zero_stage}{layers}{experts}"

    def path(self, number: int, targets: int) -> str:
        """Return the path of a target. Numbers are as of `layout.ZeroLayout`; targets: how many there are."""
        apart = len(self.layers) + sum(self.experts)
        of_stages = targets - apart
        ranks = of_stages // 2 if self.zero_stage == 3 else of_stages // self.stages - 1
        if number < ranks * self.stages:
            model_rank, rank = divmod(number, ranks)
            return f"{self.tag}/{self.type}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
        if number >= of_stages:
            return f"{self.tag}/{self._apart(number - of_stages)}"
        rank = number - ranks * self.stages
        if self.zero_stage == 3:
            return f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return f"{self.tag}/mp_rank_{rank:02d}_model_states.pt"

    def _apart(self, number: int) -> str:
        if self.layers:
            return f"layer_{self.layers[number]:02d}-model_states.pt"
        ends = [*accumulate(self.experts)]
        layer = bisect_right(ends, number)
        expert = number - ends[layer] + self.experts[layer]
        return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def sorted_files(names: Iterable[str], folder: str) -> TagFiles:
    """Return the files of a checkpoint among the names in a folder. Raises ShardError if two are of one rank."""
    lying = sorted(names)
    return TagFiles(
        models=_by_place(_STATES, Ranks, lying, folder),
        optimizers=_by_place(_ZERO, Ranks, lying, folder),
        layers=_by_place(_LAYER, LayerPart, lying, folder),
        experts=_by_place(_EXPERT, Expert, lying, folder),
        expert_optimizers=_by_place(_EXPERT_OPTIMIZER, Ranks, lying, folder),
    )


_Place = TypeVar("_Place", Ranks, LayerPart, Expert)


def _by_place(pattern: str, kind: type[_Place], names: Iterable[str], folder: str) -> dict[_Place, str]:
    """Return the names that match a pattern, in the order of the numbers in them."""
    found: dict[_Place, str] = {}
    for name in names:
        match = re.fullmatch(pattern, name)
        if match is None:
            continue
        place = kind(*(int(match[field] or 0) for field in kind._fields))
        other = found.setdefault(place, name)
        if other != name:
            raise ShardError(
                "two files of a DeepSpeed checkpoint are of one rank",
                expected="one of them: the files of one save",
                got=f"{other} and {name}",
                where=folder,
                remedy="remove the files of the other save",
            )
    return dict(sorted(found.items()))


_RESTORE = "copy or restore all files of one save"


class RankStates(NamedTuple):
    """The contents of the files of all ranks.

    Attributes:
        models, optimizers: by rank. Without ZeRO there are no optimizers.
        is_sliced: whether they are of stage 3.
        notes: in words, what only some ranks have and what is not kept.
    """

    models: Mapping[Ranks, ModelStates]
    optimizers: Mapping[Ranks, OptimizerStates]
    is_sliced: bool
    notes: tuple[str, ...]

    @property
    def first(self) -> ModelStates:
        """The settings and weights that the first rank has written."""
        return self.models[Ranks(0, 0)]

    @property
    def model_ranks(self) -> int:
        """How many model-parallel ranks there are: the tensor-parallel ones of each stage of a pipeline."""
        return self.first.model_ranks

    def shares(self, model_rank: int) -> list[OptimizerStates]:
        """Return the optimizer's shares of the data-parallel ranks of one model-parallel rank, in order."""
        return [states for ranks, states in self.optimizers.items() if ranks.model == model_rank]


def read_ranks(folder: str, files: TagFiles, *, is_universal: bool = False) -> RankStates:
    """Read all files of weights and of optimizers.

    Args:
        is_universal: whether the optimizer's state is in other files, so that there are none of ranks.

    Raises ShardError if one is missing or not sound, DisagreementError if they are not of one save.
    """
    if Ranks(0, 0) not in files.models:
        raise _missing("the weights and settings of the first rank, *mp_rank_00_model_states.pt", folder)
    models = {ranks: _model_states(ranks, str(Path(folder, name))) for ranks, name in files.models.items()}
    first = models[Ranks(0, 0)]
    data_ranks = range(first.data_ranks if first.shapes is not None or files.optimizers else 0)
    of_optimizers = [] if is_universal else _all_ranks(first, data_ranks)
    described = f"{counted(len(of_optimizers), 'file')} *_optim_states.pt"
    lacking = next((ranks for ranks in of_optimizers if ranks not in files.optimizers), None)
    if lacking is not None:
        raise _missing(
            f"{described}, one a rank" + ("" if files.optimizers else f"; or {PARAMETERS}/"),
            folder,
            f"{counted(len(files.optimizers), 'file')}, none of data-parallel rank {lacking.data}"
            + (f" of model-parallel rank {lacking.model}" if first.model_ranks > 1 else ""),
        )
    optimizers = {ranks: read_optimizer_states(str(Path(folder, name))) for ranks, name in files.optimizers.items()}
    _require_none_beyond(of_optimizers, described, optimizers, first.path, folder)
    _require_one_moment(models, optimizers)
    for model in range(first.model_ranks):
        require_own_files([own] for ranks, own in models.items() if ranks.model == model)
        require_own_files([own] for ranks, own in optimizers.items() if ranks.model == model)
    is_sliced = any(states.is_sliced for states in optimizers.values()) or (
        is_universal and files.models[Ranks(0, 0)].startswith("zero_")
    )
    of_models = _all_ranks(first, data_ranks if is_sliced else range(1))
    described = f"{counted(len(of_models), 'file')} *_model_states.pt"
    absent = next((ranks for ranks in of_models if ranks not in models), None)
    if absent is not None:
        raise _missing(
            described,
            folder,
            f"{counted(len(models), 'file')}, none of data-parallel rank {absent.data},"
            f" model-parallel rank {absent.model}",
        )
    _require_none_beyond(of_models, described, models, first.path, folder)
    return RankStates(models, optimizers, is_sliced, tuple(_notes(models, optimizers, files)))


def _notes(
    models: Mapping[Ranks, ModelStates], optimizers: Mapping[Ranks, OptimizerStates], files: TagFiles
) -> Iterator[str]:
    """Say which values of other ranks than the first one are left out, and which contents are not read."""
    yield from _differing([*models.values()])
    yield from _differing([*optimizers.values()])
    yield from _unread(optimizers)
    first = models[Ranks(0, 0)]
    yield from (f"{key} of {Path(first.path).name}: a key that is no text" for key in first.odd_keys)
    if files.expert_optimizers:
        shown = shortened([*files.expert_optimizers.values()])
        yield f"{shown}: the optimizer of experts without ZeRO, which does not say whose elements lie where"


def _model_states(ranks: Ranks, path: str) -> ModelStates:
    """Read the weights and settings of a rank; of stage 3 only the first's have tensors, so others' are let go."""
    states = read_model_states(path)
    return states if ranks.data == 0 else states._replace(module={})


def _all_ranks(first: ModelStates, data_ranks: Iterable[int]) -> list[Ranks]:
    return [Ranks(data, model) for model in range(first.model_ranks) for data in data_ranks]


def _missing(expected: str, folder: str, got: str = "") -> ShardError:
    return ShardError(
        "files of a DeepSpeed checkpoint are missing",
        expected=expected,
        got=got or "none",
        where=folder,
        remedy=_RESTORE,
    )


def _require_none_beyond(
    expected: Sequence[Ranks],
    described: str,
    states: Mapping[Ranks, ModelStates | OptimizerStates],
    says: str,
    folder: str,
) -> None:
    """Raise ShardError if there are files of more ranks than expected. says: the file that tells how many there are."""
    beyond = next((own.path for ranks, own in states.items() if ranks not in expected), None)
    if beyond is not None:
        raise ShardError(
            "a folder has files of two DeepSpeed checkpoints",
            expected=f"{described}, as {says} says",
            got=f"{Path(beyond).name} too",
            where=folder,
            remedy="remove the files of the other save",
        )


# What all files *_model_states.pt of a save say alike.
_OF_ONE_SAVE = ("global_steps", "global_samples", "skipped_steps", "ds_version")


def _require_one_moment(models: Mapping[Ranks, ModelStates], optimizers: Mapping[Ranks, OptimizerStates]) -> None:
    """Raise DisagreementError if files are of different steps, or of trainings on different numbers of ranks."""
    first, *others = models.values()
    for other in others:
        for key in _OF_ONE_SAVE:
            _require_same(key, first.path, first.values.get(key), other.path, other.values.get(key))
        _require_same("dp_world_size", first.path, first.data_ranks, other.path, other.data_ranks)
        _require_same("mp_world_size", first.path, first.model_ranks, other.path, other.model_ranks)
    if not optimizers:
        return
    first_share = next(iter(optimizers.values()))
    leads: dict[int, OptimizerStates] = {}
    for ranks, share in optimizers.items():
        # At stage 3 slices of uneven sizes fill up other numbers of groups on each tensor-parallel rank.
        lead = leads.setdefault(ranks.model if first_share.is_sliced and share.is_sliced else 0, share)
        _require_same("the form of its vectors", lead.path, _form(lead), share.path, _form(share))
        if share.settings and lead.settings:
            _require_same("the settings of its optimizer", lead.path, _settings(lead), share.path, _settings(share))
    counters: dict[tuple[int, str], tuple[str, str]] = {}
    for states in optimizers.values():
        for number, group in enumerate(states.groups):
            for name, tensor in group.of_all.items():
                value = bytes_of(tensor).hex()
                path, expected = counters.setdefault((number, name), (states.path, value))
                _require_same(f"{name} of group {number}", path, expected, states.path, value)
    for share in optimizers.values():
        data_ranks = first.data_ranks
        odd = next((count for count in share.partitions if count > data_ranks or data_ranks % count), None)
        if odd is not None:
            _require_same("its number of partitions", first.path, data_ranks, share.path, odd)


def require_own_files(shares: Iterable[Sequence[ModelStates | OptimizerStates]]) -> None:
    """Raise DisagreementError if two of these shares of the same tensors are the same files.

    Where there are more ranks than elements, several have padding alone.
    """
    held: dict[tuple[tuple[int, ...], ...], list[FileSignature]] = {}
    for share in shares:
        own = [states.signature for states in share if states.signature is not None]
        if not share or len(own) < len(share):
            continue
        others = held.setdefault(tuple(each.sums for each in own), own)
        is_copy = others is not own and all(each.is_of_copy(other) for each, other in zip(own, others))
        if is_copy and any(_has_elements(run) for states in share for run in states.weights):
            raise same_files("DeepSpeed", others[0].path, own[0].path)


def _has_elements(run: ByteRange) -> bool:
    """Tell whether anything but zeros lies there. Raises ShardError if it cannot be read."""
    with structure.opened(run.path) as file:
        return any(
            any(file.read_exactly(run.offset_bytes + start, min(_READ_BYTES, run.length_bytes - start)))
            for start in range(0, run.length_bytes, _READ_BYTES)
        )


def _require_same(what: str, path: str, expected: object, other_path: str, got: object) -> None:
    if expected != got:
        raise DisagreementError(
            "files of a DeepSpeed checkpoint are not of one save",
            expected=f"{what}: {expected!r}"[:300] + f", as {path} says",
            got=repr(got)[:300],
            where=other_path,
            remedy=_RESTORE,
        )


def _form(states: OptimizerStates) -> tuple[object, ...]:
    """Return a summary of a file that is equal for all ranks: without the lengths of vectors."""
    groups = [(group.weights.dtype.name, *group.state, *group.of_all, *group.values) for group in states.groups]
    return states.is_sliced, groups


def _settings(states: OptimizerStates) -> str:
    """Return the settings of the optimizer's groups as text, with state that is no tensor."""
    of_groups: list[Value] = [Dict.of(group.values.items()) for group in states.groups]
    return text_of([*states.settings, *of_groups])


def bytes_of(tensor: HeldTensor) -> bytes:
    """Return the elements of a tensor that is one number. Raises ShardError if its file cannot be read."""
    assert isinstance(tensor.place, ByteRanges)
    (run,) = tensor.place.ranges
    with structure.opened(run.path) as file:
        return file.read_exactly(run.offset_bytes, run.length_bytes)


def _differing(states: Sequence[ModelStates | OptimizerStates]) -> Iterator[str]:
    """Say which values in the files of other ranks differ from the first one's, and are left out."""
    if not states:
        return
    first, *others = states
    kept = {key: text_of(value) for key, value in first.values.items()}
    differing: dict[str, list[str]] = {}
    for other in others:
        for key, value in other.values.items():
            if key not in kept or text_of(value) != kept[key]:
                differing.setdefault(key, []).append(Path(other.path).name)
    for key, names in differing.items():
        lead = Path(first.path).name
        why = f"it differs from that of {lead}, which is kept" if key in kept else f"{lead}, which is kept, has none"
        yield f"{key} of {shortened(names, 1)}: {why}"


def _unread(optimizers: Mapping[Ranks, OptimizerStates]) -> Iterator[str]:
    """Say which tensors of an optimizer's state are neither of all elements of a group nor one number."""
    shapes = {name: shape for own in optimizers.values() for each in own.groups for name, shape in each.others.items()}
    for name, shape in shapes.items():
        yield f"{name} of the optimizer: tensors of shape {list(shape)}, which are not of the parameters' elements"
