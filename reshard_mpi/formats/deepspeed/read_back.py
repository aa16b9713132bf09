"""Tell as which whole tensors the files of a training are read that it has been packed into (`as_read`).

Weights of a 16-bit model that have no copy in float32 get one, which is made of them; one of a model in float32 is the
weight itself. What a training keeps besides is found below `client_state`, unless DeepSpeed's engine has a key for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard_mpi.formats.deepspeed.carried_values import KEPT
from reshard_mpi.formats.deepspeed.layout import WEIGHTS
from reshard_mpi.formats.deepspeed.model_parts import second_names
from reshard_mpi.formats.deepspeed.torch_forms import dictionary_of, is_nest_tensor, nest_of
from reshard_mpi.formats.deepspeed.training_tree import CLIENT_STATE
from reshard_mpi.formats.deepspeed.weight_copies import weights_made_of
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import Dict, NestTensor, Value
from reshard_mpi.formats.protocol import Packed, Part
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.sharding.box import Box

_FULL = "float32"


def as_read(
    tensors: Mapping[str, TensorType], strings: Mapping[str, str], own_types: Mapping[str, DType]
) -> Packed | None:
    """Return the whole tensors that files are read as, as `PackingFormat.as_read` says."""
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


def _optimizer(optimizer: Dict, root: Dict, tensors: Mapping[str, TensorType]) -> Dict:
    """Return the optimizer with a copy in float32 of each parameter of another type that it trains, and of no other."""
    weights, groups, states = root.get("model"), optimizer.get("param_groups"), optimizer.get("state")
    by_name = dict(states.pairs()) if type(states) is Dict else {}
    for group in groups if type(groups) is list else ():
        names = group.get("params") if type(group) is Dict else None
        for name in names if type(names) is list else ():
            weight = weights.get(name) if type(name) is str else None
            if type(weight) is NestTensor:
                is_full = tensors[weight.name].dtype.name == _FULL
                by_name[name] = _state(by_name.get(name, Dict()), weight, is_full=is_full)
    return dictionary_of({**dict(optimizer.pairs()), "state": dictionary_of(by_name)})


def _state(own: Value, weight: NestTensor, *, is_full: bool) -> Value:
    """Return the state of a parameter."""
    if type(own) is not Dict:
        return own
    entries = {key: value for key, value in own.pairs() if not (is_full and key == WEIGHTS)}
    if not is_full:
        entries.setdefault(WEIGHTS, weight._replace(dtype=_FULL))
    return dictionary_of(entries)
