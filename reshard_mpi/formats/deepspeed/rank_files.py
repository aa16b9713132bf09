"""Read what one file of a DeepSpeed checkpoint says (`read_model_states`, `read_optimizer_states`).

Keys are those of release 0.19 (deepspeed/runtime/engine.py `save_checkpoint`, runtime/zero/stage_1_and_2.py and
stage3.py, runtime/bf16_optimizer.py). Files are pickles, of which nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.nest.nodes import Call, Dict, Value, entry_of, text_pairs
from reshard_mpi.formats.torch.file_content import (
    FileContent,
    FlatVector,
    HeldTensor,
    held,
    read_content,
)
from reshard_mpi.formats.torch.file_signature import FileSignature
from reshard_mpi.formats.torch.tensors import StoredTensor, numbers

# What files say of their own layout. It is of these ranks, so nothing of it is carried over.
LAYOUT_KEYS = (
    *("param_shapes", "frozen_param_shapes", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("group_paddings", "partition_count", "param_slice_mappings", "param_alignment_paddings", "zero_stage"),
    "ds_zero_partition_groups",
)
# The keys of files with shares of the optimizer; the settings are in the model's files too.
_OF_OPTIMIZER_FILES = ("optimizer_state_dict", "ds_config", "ds_version")
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


class ModelStates(NamedTuple):
    """The content of a file `*_model_states.pt`.

    Attributes:
        module: the tensors of the model by name, and what else its modules save. At stage 3 parameters are there
            without elements; None in a pipeline, whose layers have files of their own.
        shapes: the whole shapes of the parameters that are trained, group by group, in the order of the flat vectors;
            None without ZeRO.
        frozen: the whole shapes of those that are not trained; fragments: their elements, at stage 3 this rank's slice.
        shared: names of parameters that are others under a second name, and the names of these.
        buffers: the names of buffers.
        data_ranks, model_ranks: how many there are.
        values: everything else, by key.
        starts: where the storages of tensors in `values` begin.
        signature: by which copies of the file are told; None if it has none.
        odd_keys: those that are no texts, and are left out with their values.
    """

    path: str
    module: Mapping[str, Value] | None
    shapes: Sequence[Mapping[str, tuple[int, ...]]] | None
    frozen: Mapping[str, tuple[int, ...]]
    fragments: Mapping[str, Value]
    shared: Mapping[str, str]
    buffers: Sequence[str]
    data_ranks: int
    model_ranks: int
    values: Mapping[str, Value]
    starts: Mapping[str, int]
    signature: FileSignature | None
    odd_keys: Sequence[str] = ()

    @property
    def weights(self) -> list[ByteRange]:
        """Where tensors of the model lie; at stage 3 this rank's part of frozen parameters, with padding."""
        tensors = [*(self.module or {}).values(), *self.fragments.values()]
        places = [tensor.place for tensor in tensors if type(tensor) is HeldTensor]
        return [run for place in places if isinstance(place, ByteRanges) for run in place.ranges]


class FlatGroup(NamedTuple):
    """One group of parameters in a rank's file.

    Attributes:
        weights: this rank's part of the parameters themselves, as a rule in float32.
        state: its part of the optimizer's state, by kind, such as `exp_avg`.
        of_all: tensors of the state that are the same for every parameter of the group, such as `step`.
        values: state that is no tensor.
        others: names of tensors of the state that are neither, with their shapes.
    """

    weights: FlatVector
    state: Mapping[str, FlatVector]
    of_all: Mapping[str, HeldTensor]
    values: Mapping[str, Value]
    others: Mapping[str, tuple[int, ...]]


class OptimizerStates(NamedTuple):
    """The content of a file `*_optim_states.pt`.

    Attributes:
        is_sliced: whether the vectors are those of stage 3, where every parameter is cut by itself.
        stage: as it says it; None if it does not, as BF16_Optimizer.
        groups: the flat vectors, group by group.
        settings: the optimizer's own groups, each with the numbers of the flat ones as `params`; empty if the file
            does not say them.
        partitions: over how many ranks each group is cut.
        paddings: how many elements of padding this rank has in each group; None if it is not said.
        gaps: for each group, how many elements lie behind each parameter; empty if none do.
        pieces: for each group, how many elements of which parameters this rank has, in order; empty if it is not said.
            With `round_robin_gradients` DeepSpeed says it wrongly.
        values: everything else, by key.
        starts: where the storages of tensors in `values` begin.
        signature: by which copies of the file are told; None if it has none.
    """

    path: str
    is_sliced: bool
    stage: int | None
    groups: Sequence[FlatGroup]
    settings: Sequence[Dict]
    partitions: Sequence[int]
    paddings: Sequence[int] | None
    gaps: Sequence[Sequence[int]]
    pieces: Sequence[Mapping[str, int]]
    values: Mapping[str, Value]
    starts: Mapping[str, int]
    signature: FileSignature | None

    @property
    def weights(self) -> list[ByteRange]:
        """Where this rank's part of parameters lies, with its padding."""
        return [group.weights.range(0, group.weights.elements) for group in self.groups]


class _Contradiction(ValueError):
    """A key of a file has a value that cannot be: the key, the expected value, and the value there."""

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(key, expected, got)
        self.key, self.expected, self.got = key, expected, got


def _unsound(path: str, error: _Contradiction) -> ShardError:
    return ShardError(
        f"a file of a DeepSpeed checkpoint has no {error.key} that can be understood",
        expected=error.expected,
        got=str(error.got)[:200],
        where=path,
    )


def read_model_states(path: str) -> ModelStates:
    """Read a file of weights and settings. Raises ShardError if it is none."""
    content = read_content(path, "DeepSpeed")
    root = content.root
    try:
        module = entry_of(root, "module")
        # Models are also given away with their weights alone.
        if type(root) is not Dict or (root.get("ds_version") is None and module is None):
            raise _Contradiction("ds_version", "a dictionary of DeepSpeed's engine", type(root).__name__)
        shapes = root.get("param_shapes")
        if shapes is not None:
            groups = shapes if type(shapes) is list else [shapes]  # releases before 0.5 had one group, in no list
            shapes = [dict(_shapes("param_shapes", group)) for group in groups]
        fragments = root.get("frozen_param_fragments") or Dict()
        known = {*LAYOUT_KEYS, "module", "buffer_names", "frozen_param_fragments", "shared_params"}
        return ModelStates(
            path,
            module=None if module is None else dict(named_tensors("module", module, content, path)),
            shapes=shapes,
            frozen=dict(_shapes("frozen_param_shapes", root.get("frozen_param_shapes") or Dict())),
            fragments=dict(named_tensors("frozen_param_fragments", fragments, content, path)),
            shared=dict(_texts("shared_params", root.get("shared_params") or Dict())),
            buffers=[name for name in _list("buffer_names", root.get("buffer_names") or []) if type(name) is str],
            data_ranks=_count("dp_world_size", 1 if root.get("ds_version") is None else root.get("dp_world_size")),
            model_ranks=_count("mp_world_size", 1 if root.get("ds_version") is None else root.get("mp_world_size")),
            values={key: value for key, value in text_pairs(root) if key not in known},
            starts=content.starts,
            signature=content.signature,
            odd_keys=[*_odd_keys(root, ""), *_odd_keys(module, "module.")],
        )
    except _Contradiction as error:
        raise _unsound(path, error) from None


def _odd_keys(value: Value, begin: str) -> Iterator[str]:
    """Yield the keys of a dictionary that are no texts, in words, behind what leads to them."""
    for key, _ in value.pairs() if type(value) in (Dict, Call) else ():
        if type(key) is not str:
            yield f"{begin}{key!r}"[:80]


def read_optimizer_states(path: str) -> OptimizerStates:
    """Read a file with one rank's share of the optimizer. Raises ShardError if it is none."""
    content = read_content(path, "DeepSpeed")
    entries = dict(text_pairs(content.root))
    states = optimizer_states_of(entries.get("optimizer_state_dict"), content, path)
    others = {key: value for key, value in entries.items() if key not in _OF_OPTIMIZER_FILES}
    return states._replace(values={**states.values, **others})


def optimizer_states_of(state: Value, content: FileContent, path: str) -> OptimizerStates:
    """Return the state of ZeRO's optimizer in a file. Raises ShardError if it is none."""
    try:
        if type(state) is not Dict:
            raise _Contradiction("optimizer_state_dict", "a dictionary", type(state).__name__)
        is_sliced = state.get("fp32_flat_groups") is not None
        key = "fp32_flat_groups" if is_sliced else "single_partition_of_fp32_groups"
        weights = [_flat(key, tensor, content, path) for tensor in _list(key, state.get(key))]
        key = "optimizer_state_dict" if is_sliced else "base_optimizer_state"
        of_groups, settings = _states(key, state.get(key), len(weights))
        step = state.get("base_optimizer_state_step")
        if step is not None:
            of_groups = [Dict([*group.flat, "step", step]) for group in of_groups]
        partitions = state.get("partition_count")
        paddings = state.get("group_paddings")
        gaps = state.get("param_alignment_paddings") or []
        known = {
            *LAYOUT_KEYS,
            *("fp32_flat_groups", "single_partition_of_fp32_groups", "optimizer_state_dict", "base_optimizer_state"),
            *("base_optimizer_state_step", "ds_version"),
        }
        return OptimizerStates(
            path,
            is_sliced,
            stage=_stage(state.get("zero_stage"), is_sliced=is_sliced),
            groups=[_group(key, own, vector, content, path) for own, vector in zip(of_groups, weights)],
            settings=settings,
            partitions=_counts("partition_count", [partitions] * len(weights) if is_sliced else partitions, weights),
            paddings=None if paddings is None else _numbers("group_paddings", paddings),
            gaps=[_numbers("param_alignment_paddings", group) for group in _list("param_alignment_paddings", gaps)],
            pieces=[_pieces(group) for group in _list("param_slice_mappings", state.get("param_slice_mappings") or [])],
            values={name: plain(value) for name, value in text_pairs(state) if name not in known},
            starts=content.starts,
            signature=content.signature,
        )
    except _Contradiction as error:
        raise _unsound(path, error) from None


def plain(value: Value) -> Value:
    """Return a loss scaler as a dictionary of its class and attributes; anything else as it is."""
    if type(value) is Call and value.function.module == _SCALERS and type(value.state) is Dict:
        return Dict.of((("class", value.function.name), *text_pairs(value.state)))
    return value


def _stage(value: Value, *, is_sliced: bool) -> int | None:
    """Return the stage that a file says, by its number or as a member of DeepSpeed's enumeration."""
    number = value.args[0] if type(value) is Call and len(value.args) == 1 else value
    if number is None:
        return None
    return number if type(number) is int else 3 if is_sliced else 2


def named_tensors(key: str, value: Value, content: FileContent, path: str) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a dictionary of tensors: those as `HeldTensor`, others as they are.

    Raises ShardError if it is no dictionary.
    """
    if type(value) is not Dict and type(value) is not Call:
        raise _unsound(path, _Contradiction(key, "a dictionary of tensors", type(value).__name__))
    for name, entry in text_pairs(value):
        yield name, held(entry, content.starts, path) if type(entry) is StoredTensor else entry


def _shapes(key: str, value: Value) -> Iterator[tuple[str, tuple[int, ...]]]:
    if type(value) is not Dict and type(value) is not Call:
        raise _Contradiction(key, "a dictionary of shapes", type(value).__name__)
    for name, shape in text_pairs(value):
        try:
            yield name, numbers(shape)
        except ValueError as error:
            raise _Contradiction(f"{key}[{name!r}]", "a shape", error) from None


def _texts(key: str, value: Value) -> Iterator[tuple[str, str]]:
    for name, other in text_pairs(value):
        if type(other) is not str:
            raise _Contradiction(f"{key}[{name!r}]", "the name of a parameter", type(other).__name__)
        yield name, other


def _flat(key: str, tensor: Value, content: FileContent, path: str) -> FlatVector:
    if type(tensor) is not StoredTensor or len(tensor.shape) != 1 or not tensor.is_row_major:
        raise _Contradiction(key, "vectors", getattr(tensor, "what", type(tensor).__name__))
    start = content.starts[tensor.storage.key] + tensor.offset * tensor.dtype.itemsize_bytes
    return FlatVector(path, start, tensor.dtype, tensor.shape[0])


def _states(key: str, value: Value, groups: int) -> tuple[list[Dict], list[Dict]]:
    """Return the optimizer's state of each flat group, and its own groups with their settings.

    An elastic checkpoint has a list of states, and no settings.
    """
    if type(value) is list:
        states, settings = value, []
    elif type(value) is Dict and type(value.get("state")) is Dict:
        by_number = dict(value.get("state").pairs())
        # An optimizer without state, such as plain SGD, has no entries.
        states = [by_number.pop(number, None) or Dict() for number in range(groups)]
        if by_number:
            raise _Contradiction(f"{key}.state", f"the numbers of {groups} groups", sorted(map(str, by_number)))
        settings = _list(f"{key}.param_groups", value.get("param_groups"))
    else:
        raise _Contradiction(key, "a dictionary of state and param_groups, or a list of states", type(value).__name__)
    if len(states) != groups or not all(type(part) is Dict for part in (*states, *settings)):
        raise _Contradiction(key, f"the state of {groups} groups", f"{len(states)}")
    return states, settings


def _group(key: str, state: Dict, weights: FlatVector, content: FileContent, path: str) -> FlatGroup:
    """Return a group with its state, sorted into vectors, single numbers and others."""
    flat, of_all, values, others = {}, {}, {}, {}
    for name, value in text_pairs(state):
        if type(value) is not StoredTensor:
            values[name] = value
        elif not value.shape:
            of_all[name] = held(value, content.starts, path)
        elif len(value.shape) == 1 and value.shape[0] >= weights.elements:
            flat[name] = _flat(f"{key}.{name}", value, content, path)
        else:
            others[name] = value.shape
    return FlatGroup(weights, flat, of_all, values, others)


def _pieces(value: Value) -> dict[str, int]:
    """Return the parameters of a group that a rank has elements of, with the numbers of these elements."""
    attributes = {name: place.state for name, place in text_pairs(value) if type(place) is Call}  # fragment_address
    counts = {name: own.get("numel") for name, own in attributes.items() if type(own) is Dict}
    return {name: count for name, count in counts.items() if type(count) is int}


def _list(key: str, value: Value) -> list[Value]:
    if type(value) is not list:
        raise _Contradiction(key, "a list", type(value).__name__)
    return value


def _count(key: str, value: Value) -> int:
    if type(value) is not int or value < 1:
        raise _Contradiction(key, "a number from 1 on", repr(value))
    return value


def _counts(key: str, value: Value, groups: Sequence[object]) -> list[int]:
    counts = [_count(key, number) for number in _list(key, value)]
    if len(counts) != len(groups):
        raise _Contradiction(key, f"a number for each of {len(groups)} groups", f"{len(counts)}")
    return counts


def _numbers(key: str, value: Value) -> tuple[int, ...]:
    try:
        return numbers(value)
    except ValueError:
        raise _Contradiction(key, "numbers from 0 on", repr(value)) from None
