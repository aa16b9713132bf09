"""Pack a whole training into DeepSpeed's files for a number of ranks (`packed`).

The tensors have the names of a whole training state, and the nest says the optimizer's groups: which parameters are in
each, in the order of the model. What a training of DeepSpeed loads has to be as its own engine would lay it out, so the
settings that decide this (round_robin_gradients, parameter_alignment, sub_group_size) are taken from its `ds_config`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.flat_groups import has_round_robin, is_aligned, round_robin, sub_group_size
from reshard_mpi.formats.deepspeed.layout import (
    LAYOUT,
    STATE,
    WEIGHTS,
    FlatGroupLayout,
    LaidParameter,
    ZeroLayout,
    frozen_vectors,
    names_by_file,
    vectors_of,
    whole_part,
)
from reshard_mpi.formats.deepspeed.model_parts import ModelParts, parts_of, second_names
from reshard_mpi.formats.deepspeed.parameters import TIED
from reshard_mpi.formats.deepspeed.ranks import TargetNames
from reshard_mpi.formats.deepspeed.torch_forms import EngineNest, loss_scaler, nest_of
from reshard_mpi.formats.deepspeed.training_tree import (
    SETTINGS,
    config_for,
    model_text,
    module_text,
    no_training,
    optimizer_text,
    require_places,
)
from reshard_mpi.formats.deepspeed.weight_copies import WeightOrigin, compared_parts, weights_made_of
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import MODEL, Dict, Value, entry_of, is_nest_tensor
from reshard_mpi.formats.protocol import OwnTypes, Packed, PackingOptions, Part, TensorTypes
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.text import shortened

_OPTIMIZER = "optimizer."
_OF_GROUPS = f"{_OPTIMIZER}param_groups."
# The kind of state that is one number for all of a group.
_COUNTER = "step"
# The types that DeepSpeed trains in.
_TYPES = ("float32", "bfloat16", "float16")
# Parameters begin at multiples of this number of bytes where they are aligned.
_ALIGNED_BYTES = 16
# Of parameters in all files together.
_MAX_PARTS = 1 << 20


def packed(tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes, options: PackingOptions) -> Packed:
    """Return the files for a number of ranks, as `PackingFormat.packed` says."""
    ranks, stage = options.dp, options.zero_stage
    nest = nest_of(tensors, strings)
    groups, settings = _groups(nest)
    root, tensors, own_types = nest.root, nest.tensors, nest.of_engine(own_types)
    parts = parts_of(root, groups, settings, options)
    layout = _layout(nest, parts, own_types, ranks, stage)
    origins = weights_made_of(tensors, layout.shared, own_types)
    files = [*_files_of_optimizer(layout, tensors, settings), *_files_of_model(layout, tensors, origins)]
    count = sum(map(len, files))
    if count > _MAX_PARTS:
        raise TargetError(
            "a checkpoint of DeepSpeed would have too many pieces of parameters",
            expected=f"at most {_MAX_PARTS} in all files",
            got=f"{count} for {ranks} ranks",
            remedy="choose fewer ranks (--dp)",
        )
    steps = root.get("global_steps")
    tag = options.name or f"global_step{steps if type(steps) is int else 0}"
    kind = "bf16_" if layout.dtype == "bfloat16" else ""
    names = TargetNames(tag, kind, stage, len(layout.groups), parts.layers, parts.experts)
    equal = [
        tuple(f"{STATE}{own.name}.{counter}" for own in group.parameters)
        for of_stage in layout.groups
        for group in of_stage
        for counter in layout.counters
    ]
    scaler = loss_scaler(root.get("scaler"), root.get("ds_config"), layout.dtype)
    notes = (*require_places(root, scaler), *parts.notes)
    if nest.untrained:
        notes += (f"parameters without state of the optimizer are taken for not trained: {shortened(nest.untrained)}",)
    absent = tuple(f"{STATE}{own}." for own in nest.untrained)
    equal += nest.equal
    compared = compared_parts(layout, tensors, own_types)
    text = {LAYOUT: layout.as_text()}
    return nest.in_source(Packed(names.prefix, files, text, equal, notes=notes, absent=absent, compared=compared))


def _files_of_optimizer(layout: ZeroLayout, tensors: TensorTypes, settings: Sequence[Dict]) -> Iterator[list[Part]]:
    """Yield the parts of each file of the optimizer. settings: of its groups."""
    of_settings = flatten_tree.flatten(Dict([SETTINGS, settings]), is_nest_tensor).tensors
    for number in range(layout.optimizer_files):
        parts: list[Part] = []
        for vectors in vectors_of(layout, number):
            for vector in (vectors.weights, *vectors.state.values()):
                parts += (part for _, part in vector.parts)
            parts += vectors.counters.values()
        for name, own in of_settings:
            parts.append(whole_part(name, tensors[own.name].shape, number)._replace(source=own.name))
        yield parts


def _files_of_model(
    layout: ZeroLayout, tensors: TensorTypes, origins: Mapping[str, WeightOrigin]
) -> Iterator[list[Part]]:
    """Yield the parts of each file of weights, then of each file of a layer or expert."""
    for number, whole in enumerate(_whole_in_files(layout, tensors)):
        parts = [whole_part(own, tensors[own].shape, layout.optimizer_files + number) for own in whole]
        parts = [part._replace(**origins[part.source]._asdict()) if part.source in origins else part for part in parts]
        if layout.is_sliced:
            parts += (part for vector in frozen_vectors(layout, number) for _, part in vector.parts)
        yield parts


def _groups(nest: EngineNest) -> tuple[list[list[LaidParameter]], list[Dict]]:
    """Return the parameters of each group of the optimizer, and the groups without these.

    Raises TargetError if the nest is of no training, or a parameter is missing, or in two groups.
    """
    root, tensors = nest.root, nest.tensors
    groups = entry_of(entry_of(root, "optimizer"), "param_groups")
    has_groups = type(groups) is list and all(type(group) is Dict for group in groups)
    if not has_groups or type(root.get("model")) is not Dict:
        raise no_training("a model and an optimizer with its groups", shortened(list(tensors)) or "no tensors")
    names = [group.get("params") for group in groups]
    for own in names:
        if type(own) is not list or not all(type(name) is str for name in own):
            raise no_training("the names of parameters as params of each group", f"{own!r}"[:100])
    settings = [group.without("params") for group in groups]
    if any(not own.flat for own in settings):
        expected = "settings of each group of the optimizer, such as lr"
        raise no_training(expected, "none, as elastic checkpoints of DeepSpeed have")
    parameters = [[_parameter(name, tensors) for name in own] for own in names]
    distinct = {parameter.name for own in parameters for parameter in own}
    if len(distinct) != sum(map(len, parameters)) or not all(parameters) or not distinct:
        got = "one in two groups" if all(parameters) else "a group without parameters"
        raise no_training("each parameter in one group", got)
    return parameters, settings


def _layout(nest: EngineNest, parts: ModelParts, own_types: OwnTypes, ranks: int, stage: int) -> ZeroLayout:
    """Return how the training lies in the files. Raises TargetError if a part of it is missing, or cannot lie there."""
    root, tensors, settings = nest.root, nest.tensors, nest.root.get("ds_config")
    trained = {own.name: own for groups in parts.groups for of_parts in groups for own in chain(*of_parts)}
    kinds, counters = _kinds(trained, tensors)
    buffers, shared = _names(root.get("buffer_names")), second_names(root)
    named = (*buffers, *(name for pair in shared for name in pair))
    # What layers of a pipeline share lies in the files of these layers, under their names.
    _require_in_model((name for name in named if not (parts.layers and name.startswith(TIED))), tensors)
    others = [name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)]
    known = {*trained, *buffers, *dict(shared)}
    frozen = [name for name in others if name not in known]
    unknown = [name for name in frozen if name not in nest.untrained]
    if stage == 3 and unknown and root.get("buffer_names") is None:
        raise TargetError(
            "it is not known which tensors of the model are parameters, which stage 3 cuts, and which are buffers",
            expected="buffer_names beside the model, as checkpoints of DeepSpeed have it",
            got=f"{shortened(unknown)}, which the optimizer does not train",
            remedy="choose --zero-stage 1 or 2",
        )
    dtype = _type_of(trained.values(), tensors, own_types)
    itemsize_bytes = BY_NAME[dtype].itemsize_bytes
    flat = tuple(
        tuple(
            laid
            for number, of_parts in enumerate(groups)
            for laid in _flat_groups(of_parts, number, settings, itemsize_bytes, ranks, stage)
        )
        for groups in parts.groups
    )
    config = config_for(settings, stage, ranks, dtype)
    return ZeroLayout(
        stage,
        ranks,
        dtype,
        flat,
        kinds,
        counters,
        tuple(others),
        frozen=tuple(_frozen(name, tensors[MODEL + name]) for name in frozen),
        buffers=buffers,
        shared=shared,
        apart=parts.apart,
        is_pipeline=bool(parts.layers),
        module=module_text(root),
        model=model_text(root, config, parts.experts),
        optimizer=optimizer_text(root, parts.settings, flat, config, dtype),
    )


def _require_in_model(names: Iterable[str], tensors: TensorTypes) -> None:
    """Raise TargetError if the model does not have a buffer or a shared parameter."""
    lost = next((name for name in names if MODEL + name not in tensors), None)
    if lost is not None:
        raise TargetError(
            "buffer_names or shared_params of the source name a tensor that its model does not have",
            expected=f"a tensor called {MODEL}{lost}",
            got="none, as after a map or a selection that does not keep such names",
            remedy="convert to DeepSpeed without that first, or keep the names of buffers and shared parameters",
        )


def _type_of(trained: Collection[LaidParameter], tensors: TensorTypes, own_types: OwnTypes) -> str:
    """Return the type of the parameters. Raises TargetError if there are several, or DeepSpeed does not train in it."""
    dtypes = {tensors[MODEL + own.name].dtype.name for own in trained}
    if len(dtypes) > 1:
        raise no_training("parameters of one type", f"{', '.join(sorted(dtypes))}: choose one (--dtype 'model.*=TYPE')")
    (dtype,) = dtypes
    copies = (own.weights for own in trained if own.weights != MODEL + own.name)
    masters = {tensors[name].dtype.name for name in copies} - {"float32"}
    if dtype not in _TYPES or masters:
        expected = f"parameters of type {', '.join(_TYPES)}, and {WEIGHTS} in float32"
        raise no_training(expected, ", ".join(sorted({dtype, *masters})))
    sources = [own.weights for own in trained if own.weights in own_types]
    wide = next((name for name in sources if own_types[name].name == "float64" and dtype != "float32"), None)
    if wide is not None:
        raise no_training(
            f"weights in at most 32 bit, or {WEIGHTS} beside them, since {dtype} is to be that rounded",
            f"{wide} in float64: convert it to fp32 first (--dtype 'model.*=fp32')",
        )
    return dtype


def _parameter(name: str, tensors: TensorTypes) -> LaidParameter:
    """Return a parameter that is trained. Raises TargetError if it is not in the model, or its state is not there."""
    model = tensors.get(MODEL + name)
    if model is None:
        raise no_training(f"the weights of {name!r}, which the optimizer trains", f"no tensor called {MODEL + name}")
    master = f"{STATE}{name}.{WEIGHTS}"
    if master in tensors and tensors[master].shape != model.shape:
        raise no_training(f"{master} of shape {list(model.shape)}", str(list(tensors[master].shape)))
    return LaidParameter(name, model.shape, master if master in tensors else MODEL + name)


def _frozen(name: str, kind: TensorType) -> LaidParameter:
    return LaidParameter(name, kind.shape, dtype=kind.dtype.name)


def _kinds(
    trained: Mapping[str, LaidParameter], tensors: TensorTypes
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the kinds of state that have the shapes of parameters, and the kinds that are one number.

    Raises TargetError unless all parameters have all of them.
    """
    by_kind: dict[str, dict[str, TensorType]] = {}
    for tensor, kind in tensors.items():
        if not tensor.startswith(_OPTIMIZER) or tensor.startswith(_OF_GROUPS):
            continue
        name, _, word = tensor.removeprefix(STATE).rpartition(".")
        if not tensor.startswith(STATE) or name not in trained:
            raise no_training("state of parameters that are in a group of the optimizer", tensor)
        if word != WEIGHTS:
            by_kind.setdefault(word, {})[name] = kind
    flat: list[tuple[str, str]] = []
    counters: list[str] = []
    for word, own in by_kind.items():
        lacking = next((name for name in trained if name not in own), None)
        if lacking is not None:
            raise no_training(f"{word} of every parameter that the optimizer trains", f"none of {lacking!r}")
        shaped = {name: trained[name].shape for name in own if trained[name].shape}
        # Of parameters without dimensions the shape tells nothing.
        is_counter = all(own[name].shape == () for name in shaped) if shaped else word == _COUNTER
        odd = next((name for name in shaped if not is_counter and own[name].shape != shaped[name]), None)
        if odd is not None:
            raise no_training(
                f"{word} of {odd!r} of shape {list(trained[odd].shape)}, which the parameter has",
                f"{list(own[odd].shape)}: such state has no place in the vectors of ZeRO",
            )
        types = {kind.dtype.name for kind in own.values()}
        if len(types) > 1:
            raise no_training(f"{word} of one type", ", ".join(sorted(types)))
        if is_counter:
            counters.append(word)
        else:
            flat.append((word, types.pop()))
    return tuple(flat), tuple(counters)


def _names(value: Value) -> tuple[str, ...]:
    return tuple(name for name in value if type(name) is str) if type(value) in (list, tuple) else ()


def _flat_groups(
    of_parts: Sequence[Sequence[LaidParameter]], number: int, config: Value, itemsize_bytes: int, ranks: int, stage: int
) -> list[FlatGroupLayout]:
    """Return the flat groups that the engine makes of one group of the optimizer.

    Args:
        of_parts: its parameters, for each part of the ranks that have some.
    """
    own = of_parts[0]
    if stage == 3:
        most = sub_group_size(config)
        if most is None:
            raise TargetError(
                "the size of a sub-group in ds_config cannot be followed",
                expected="a whole number (zero_optimization.sub_group_size)",
                got="another value",
                remedy="choose --zero-stage 1 or 2, or leave the setting out of the source",
            )
        return [FlatGroupLayout(tuple(part), (0,) * len(part), number) for part in _sub_groups(own, ranks, most)]
    if has_round_robin(config, stage):
        places = round_robin(len(own), ranks // len(of_parts))
        of_parts = [[part[place] for place in places] for part in of_parts]
    alignment = 1
    if is_aligned(config, stage):
        alignment = _ALIGNED_BYTES // math.gcd(_ALIGNED_BYTES, itemsize_bytes)
    gaps = [-parameter.size % alignment for parameter in of_parts[0][:-1]]
    return [FlatGroupLayout(tuple(chain(*of_parts)), (*gaps, 0), number, len(of_parts))]


def _sub_groups(own: Sequence[LaidParameter], ranks: int, most: int) -> Iterator[list[LaidParameter]]:
    """Yield the sub-groups of stage 3: each is full when its slices have `most` elements."""
    slices = [-(-parameter.size // ranks) for parameter in own]
    if most >= sum(slices):
        yield [*own]
        return
    part: list[LaidParameter] = []
    length = 0
    for parameter, size in zip(own, slices):
        part.append(parameter)
        length += size
        if length >= most:
            yield part
            part, length = [], 0
    if part:
        yield part


def _whole_in_files(layout: ZeroLayout, tensors: TensorTypes) -> Iterator[list[str]]:
    """Yield the names of the whole tensors in each file of weights, then in each file of a layer or expert."""
    buffers = {*layout.buffers}
    names = [own for own in layout.names if not layout.is_sliced or own in buffers]
    by_file = names_by_file(layout, names)
    together = () if layout.is_pipeline else by_file.get("", ())
    others = [own for own in tensors if not own.startswith((MODEL, _OPTIMIZER))]
    for _ in range(layout.model_files):
        yield [*(MODEL + own for own in together), *others]
    for begin in layout.apart:
        yield [MODEL + own for own in by_file.get(begin, ())]
