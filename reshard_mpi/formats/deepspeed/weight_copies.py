"""Keep weights and their copies in float32 the same: as packed (`weights_made_of`), and read back (`as_read`).

An engine goes on from the optimizer's copies in float32, and makes the weights of these. Stage 3 has nothing else, so
weights that are not their copies rounded would be lost; at stages 1 and 2 both would contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.layout import STATE, WEIGHTS, ZeroLayout, vectors_of, whole_part
from reshard_mpi.formats.deepspeed.model_parts import second_names
from reshard_mpi.formats.deepspeed.torch_forms import nest_of
from reshard_mpi.formats.deepspeed.training_tree import CLIENT_STATE, KEPT
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import MODEL, Dict, NestTensor, Value, entry_of, is_nest_tensor
from reshard_mpi.formats.protocol import OwnTypes, Packed, Part, SameParts, TensorTypes
from reshard_mpi.sharding.box import Box

_FULL = "float32"


class WeightOrigin(NamedTuple):
    """The tensor that weights are made of, and the name of the type that it is rounded to; empty: its own."""

    source: str
    dtype: str = ""


def weights_made_of(
    tensors: TensorTypes, shared: Sequence[tuple[str, str]], own_types: OwnTypes
) -> dict[str, WeightOrigin]:
    """Return the origin of those tensors of the model that are made of other tensors, by name.

    With another type they are the copies in float32, rounded: the weights are these already, rounded to their own type.

    Args:
        shared: second names of tensors, each with the first one.
        own_types: as of `PackingFormat.packed`.
    """
    copies = {name: f"{STATE}{name.removeprefix(MODEL)}.{WEIGHTS}" for name in own_types if name.startswith(MODEL)}
    origins = {name: WeightOrigin(copy, tensors[name].dtype.name) for name, copy in copies.items() if copy in tensors}
    for name, other in shared:
        origins[MODEL + name] = origins.get(MODEL + other, WeightOrigin(MODEL + other))
    return origins


def compared_parts(layout: ZeroLayout, tensors: TensorTypes, own_types: OwnTypes) -> list[list[SameParts]]:
    """Return, for each file, what must be the same before it is written.

    Raises TargetError for second names of tensors of another type or shape.
    """
    files = [[*_of_copies(layout, file, tensors, own_types)] for file in range(layout.optimizer_files)]
    files += [[] for _ in range(layout.model_files + len(layout.apart))]
    files[layout.optimizer_files] += _of_second_names(layout, tensors, own_types)
    return files


def _of_copies(layout: ZeroLayout, file: int, tensors: TensorTypes, own_types: OwnTypes) -> Iterator[SameParts]:
    """Yield the parts of weights whose copies are in the vectors of a file, each with the copy rounded."""
    groups = layout.groups[file // layout.ranks]
    name_of = {own.weights: own.name for group in groups for own in group.parameters if own.weights != MODEL + own.name}
    for vectors in vectors_of(layout, file):
        for _, part in vectors.weights.parts:
            if part.source not in name_of:
                continue
            name = name_of[part.source]
            dtype = own_types.get(MODEL + name, tensors[MODEL + name].dtype).name
            yield SameParts.of_copy(part, MODEL + name, dtype, "DeepSpeed", name)


def _of_second_names(layout: ZeroLayout, tensors: TensorTypes, own_types: OwnTypes) -> Iterator[SameParts]:
    """Yield tensors under their second names, each with the same one under its first name."""
    for name, other in layout.shared:
        first, second = (
            (tensors[own].shape, tensors[own].dtype, own_types.get(own, tensors[own].dtype))
            for own in (MODEL + name, MODEL + other)
        )
        problem = f"{name!r} and {other!r} are one tensor by shared_params, and differ"
        remedy = "make them the same in the source, or take the name out of its shared_params"
        if first != second:
            (shape, *_, dtype), (other_shape, *_, other_dtype) = first, second
            got = f"{dtype} {list(shape)} and {other_dtype} {list(other_shape)}"
            raise TargetError(problem, expected="one type and shape", got=got, remedy=remedy)
        part = whole_part(MODEL + name, first[0], layout.optimizer_files)._replace(dtype=first[-1].name)
        yield SameParts(part, part._replace(source=MODEL + other), problem, remedy)


def as_read(tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes) -> Packed | None:
    """Return the whole tensors that files are read as, as `PackingFormat.as_read` says.

    Weights of a 16-bit model that have no copy in float32 get one, which is made of them; one of a model in float32 is
    the weight itself. What a training keeps besides is found below `client_state`, unless DeepSpeed's engine has a key
    for it.
    """
    nest = nest_of(tensors, strings)
    root, tensors = nest.root, nest.tensors
    if type(root) is not Dict or type(root.get("model")) is not Dict or type(root.get("optimizer")) is not Dict:
        return None
    kept, besides = Dict(), Dict()
    for key, value in root.pairs():
        if key == CLIENT_STATE and type(value) is Dict:
            besides.flat += value.flat
        else:
            to = kept if key in KEPT else besides
            to.flat += [key, _optimizer(value, root, tensors) if key == "optimizer" else value]
    kept.flat += [CLIENT_STATE, besides]
    named = flatten_tree.flatten(kept, is_nest_tensor).tensors
    parts = [Part(name, own.name, Box.whole(tensors[own.name].shape), own.dtype) for name, own in named]
    origins = weights_made_of(tensors, second_names(root), nest.of_engine(own_types))
    parts = [part._replace(**origins[part.name]._asdict()) if part.name in origins else part for part in parts]
    taken = {name for part in parts for name in (part.name, part.source)}
    return nest.in_source(Packed("", [parts], {}, left_out=tuple(name for name in tensors if name not in taken)))


def _optimizer(optimizer: Dict, root: Dict, tensors: TensorTypes) -> Dict:
    """Return the optimizer with a copy in float32 of each parameter of another type that it trains, and of no other."""
    weights, groups, states = root.get("model"), optimizer.get("param_groups"), optimizer.get("state")
    by_name = dict(states.pairs()) if type(states) is Dict else {}
    for group in groups if type(groups) is list else ():
        names = entry_of(group, "params")
        for name in names if type(names) is list else ():
            weight = weights.get(name) if type(name) is str else None
            if type(weight) is NestTensor:
                is_full = tensors[weight.name].dtype.name == _FULL
                by_name[name] = _state(by_name.get(name, Dict()), weight, is_full=is_full)
    return optimizer.with_value("state", Dict.of(by_name.items()))


def _state(own: Value, weight: NestTensor, *, is_full: bool) -> Value:
    """Return the state of a parameter."""
    if type(own) is not Dict:
        return own
    entries = {key: value for key, value in own.pairs() if not (is_full and key == WEIGHTS)}
    if not is_full:
        entries.setdefault(WEIGHTS, weight._replace(dtype=_FULL))
    return Dict.of(entries.items())
