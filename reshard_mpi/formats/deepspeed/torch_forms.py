"""Bring what torch saves of a training into the form that DeepSpeed's engine has (`nest_of`, `loss_scaler`).

    {"state.w.exp_avg": ..., "param_groups.w.lr": 0.1}     a flat optimizer: parameters of equal settings are a group
    {"state": {...}, "param_groups": [{"params": ["w"]}]}  the form that it gets

DeepSpeed's engine leaves parameters that are not trained out of groups; torch's optimizers have them there, without
state. Loss scalers of both are made of other numbers (deepspeed/runtime/fp16/loss_scaler.py, torch/amp/grad_scaler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.flat_groups import type_in
from reshard_mpi.formats.nest import flatten_tree, rebuild_tree
from reshard_mpi.formats.nest.nodes import (
    ORDERED_DICT,
    Call,
    Dict,
    Global,
    NestError,
    NestTensor,
    Value,
    entry_of,
    is_nest_tensor,
)
from reshard_mpi.formats.protocol import OwnTypes, Packed, TensorTypes

_MODEL, _OPTIMIZER = "model", "optimizer"
_GROUPS, _STATE, _PARAMETERS = "param_groups", "state", "params"
# What DeepSpeed begins with in fp16, by the names in its settings (runtime/fp16 and precision_config.py).
_BEGIN = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
_FACTOR = 2.0


class _GroupedOptimizer(NamedTuple):
    """An optimizer by groups. equal, untrained: as `EngineNest` has them."""

    optimizer: Dict
    equal: tuple[tuple[str, ...], ...] = ()
    untrained: tuple[str, ...] = ()


class EngineNest(NamedTuple):
    """A training's nest in the form that DeepSpeed's engine has, with each tensor in it as a `NestTensor`.

    Attributes:
        tensors: by their names in this form; sources: by these names, those that they have in the source, if others.
        equal: names of tensors that must hold the same, of which the first is taken: settings of one group.
        untrained: parameters that are in groups and have no state, unlike others; they are left out of the groups.
    """

    root: Value
    tensors: TensorTypes
    sources: Mapping[str, str] = {}
    equal: tuple[tuple[str, ...], ...] = ()
    untrained: tuple[str, ...] = ()

    def in_source(self, packed: Packed) -> Packed:
        """Return files that are made of these tensors as made of tensors of the source."""
        if not self.sources:
            return packed
        own, optimizer = self.sources, f"{_OPTIMIZER}."
        states = (pair for pair in own.items() if pair[0].startswith(f"{optimizer}{_STATE}."))
        before = next((source.removesuffix(name.removeprefix(optimizer)) for name, source in states), optimizer)
        return packed._replace(
            files=[[part._replace(source=own[part.source]) for part in file] for file in packed.files],
            equal=[tuple(own[name] for name in names) for names in packed.equal],
            left_out=tuple(own[name] for name in packed.left_out),
            absent=tuple(f"{before}{prefix.removeprefix(optimizer)}" for prefix in packed.absent),
            compared=[[same.in_source(own) for same in file] for file in packed.compared],
        )

    def of_engine(self, own_types: OwnTypes) -> OwnTypes:
        """Return types of the source's tensors as types of these."""
        own = self.sources.items()
        return {name: own_types[source] for name, source in own if source in own_types} if own else own_types


def nest_of(tensors: TensorTypes, strings: Mapping[str, str]) -> EngineNest:
    """Return the nest that tensors lie in. Raises TargetError if it does not fit them."""
    try:
        root = rebuild_tree.rebuild({name: NestTensor(name) for name in tensors}, strings)
    except NestError as error:
        raise TargetError(
            "the nest of the source does not fit its tensors",
            expected="nested dictionaries that hold the tensors by their names",
            got=error.problem,
            remedy="convert the source to torch first (--to torch), and then that",
        ) from None
    if type(root) is not Dict:
        return EngineNest(root, tensors)
    entries = {key: _plain(value) if key in (_MODEL, _OPTIMIZER) else value for key, value in root.pairs()}
    is_lifted = _lift(entries, _OPTIMIZER, _is_optimizer)
    optimizer = entries.get(_OPTIMIZER)
    if type(optimizer) is not Dict:
        return EngineNest(Dict.of(entries.items()), tensors)
    grouped = _with_groups(optimizer)
    entries[_OPTIMIZER] = grouped.optimizer
    names = {*_parameters_of(grouped.optimizer)}
    is_lifted |= _lift(entries, _MODEL, lambda own: names <= {key for key, _ in own.pairs()})
    _lift_numbers(entries)
    own = EngineNest(Dict.of(entries.items()), tensors, {}, grouped.equal, grouped.untrained)
    if not is_lifted:
        return own
    flattened = flatten_tree.flatten(own.root, is_nest_tensor)
    sources = {name: tensor.name for name, tensor in flattened.tensors}
    new_names = {source: name for name, source in sources.items()}
    return own._replace(
        root=rebuild_tree.rebuild({name: NestTensor(name) for name in sources}, flattened.strings),
        tensors={name: tensors[source] for name, source in sources.items()},
        sources=sources,
        equal=tuple(tuple(new_names[name] for name in names if name in new_names) for names in own.equal),
    )


def _plain(value: Value) -> Value:
    """Return a dictionary as one without order, which torch gives a model's."""
    return Dict([*(value.flat or ())]) if type(value) is Call and value.function == ORDERED_DICT else value


def _is_optimizer(value: Dict) -> bool:
    keys = [key for key, _ in value.pairs() if type(key) is str]
    return any(key == _GROUPS or key.startswith(f"{_GROUPS}.") for key in keys)


def _lift(entries: dict[Value, Value], key: str, is_it: Callable[[Dict], bool]) -> bool:
    """Put a dictionary in the place of the one that it is in, at the root, and what lies beside it to the root.

    A file of a model, `{"model": {...}, "epoch": 3}`, is kept below `model` as it is, where several are joined. Where
    one dictionary alone is what DeepSpeed needs there, it is moved. Returns whether one is.
    """
    outer = entries.get(key)
    if type(outer) is not Dict or is_it(outer):
        return False
    inner = [(word, own) for word, value in outer.pairs() if type(own := _plain(value)) is Dict and is_it(own)]
    others = {word: value for word, value in outer.pairs() if not inner or word != inner[0][0]}
    if len(inner) != 1 or not entries.keys().isdisjoint(others):
        return False
    entries |= {**others, key: inner[0][1]}
    return True


def _lift_numbers(entries: dict[Value, Value]) -> None:
    """Put single values beside the weights of a model, such as an epoch, to the root: no module would load them.

    What modules save themselves has names that end in `_extra_state`, and may be anything in a training of DeepSpeed.
    """
    model = entries.get(_MODEL)
    if type(model) is not Dict or entries.get("ds_version") is not None:
        return
    single = {key: value for key, value in model.pairs() if type(value) in (int, float, bool, str)}
    moved = {key: own for key, own in single.items() if not str(key).endswith("_extra_state") and key not in entries}
    if moved:
        entries |= {_MODEL: Dict.of({key: value for key, value in model.pairs() if key not in moved}.items()), **moved}


def _parameters_of(optimizer: Dict) -> Iterator[Value]:
    groups = optimizer.get(_GROUPS)
    for group in groups if type(groups) is list else ():
        names = entry_of(group, _PARAMETERS)
        yield from names if type(names) is list else ()


def _with_groups(optimizer: Dict) -> _GroupedOptimizer:
    """Return an optimizer by groups, which has those parameters that it trains."""
    grouped = _nested(optimizer) if optimizer.get(_GROUPS) is None else _GroupedOptimizer(optimizer)
    state, groups = grouped.optimizer.get(_STATE), grouped.optimizer.get(_GROUPS)
    trained = {key for key, _ in state.pairs()} if type(state) is Dict else set()
    untrained: list[str] = []
    alone: list[Value] = []
    for group in groups if type(groups) is list else ():
        names = entry_of(group, _PARAMETERS)
        if type(names) is not list or not all(type(name) is str for name in names) or trained.isdisjoint(names):
            alone.append(group)
            continue
        untrained += (name for name in names if name not in trained)
        own = [name for name in names if name in trained]
        alone.append(group.with_value(_PARAMETERS, own))
    if not untrained:
        return grouped
    return grouped._replace(optimizer=grouped.optimizer.with_value(_GROUPS, alone), untrained=tuple(untrained))


def _nested(optimizer: Dict) -> _GroupedOptimizer:
    """Return a flat optimizer by groups; another one as it is."""
    state: dict[Value, dict[Value, Value]] = {}
    settings: dict[Value, dict[Value, Value]] = {}
    others: dict[Value, Value] = {}
    for key, value in optimizer.pairs():
        kind, _, rest = key.partition(".") if type(key) is str else ("", "", "")
        name, dot, word = rest.rpartition(".")
        if dot and kind in (_STATE, _GROUPS):
            (state if kind == _STATE else settings).setdefault(name, {})[word] = value
        else:
            others[key] = value
    if not settings:
        return _GroupedOptimizer(optimizer)
    members: dict[str, list[Value]] = {}
    for name, own in settings.items():
        plain = Dict(["settings", Dict.of((key, value) for key, value in own.items() if not is_nest_tensor(value))])
        members.setdefault(str(flatten_tree.flatten(plain, is_nest_tensor).strings), []).append(name)
    groups: list[Value] = []
    equal: list[tuple[str, ...]] = []
    for names in members.values():
        groups.append(Dict.of({**settings[names[0]], _PARAMETERS: names}.items()))
        equal += _of_one_group([settings[name] for name in names])
    by_name = Dict.of((name, Dict.of(own.items())) for name, own in state.items())
    entries = {**others, _STATE: by_name, _GROUPS: groups}
    return _GroupedOptimizer(Dict.of(entries.items()), tuple(equal))


def _of_one_group(settings: list[dict[Value, Value]]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the tensors that several parameters have as the same setting."""
    for word, value in settings[0].items():
        if is_nest_tensor(value):
            yield tuple(own[word].name for own in settings if is_nest_tensor(own.get(word)))


def is_engines(scaler: Value) -> bool:
    """Tell whether a loss scaler is one of DeepSpeed's."""
    return type(scaler) is Dict and scaler.get("class") is not None


def loss_scaler(scaler: Value, config: Value, dtype: str) -> Value:
    """Return the loss scaler that DeepSpeed's engine has with a model of this type; None for one that scales nothing.

    Args:
        scaler: of the training: DeepSpeed's, torch's, or anything else.
        config: the settings of DeepSpeed that the training had; None if it was none of DeepSpeed's.
    """
    if is_engines(scaler) and (type(config) is not Dict or type_in(config).name == dtype):
        return scaler
    if dtype != "float16":
        return None
    section = entry_of(config, "fp16")
    fixed = _number(entry_of(section, "loss_scale"), 0.0)
    if type(scaler) is not Dict and fixed:
        return Dict(["class", "LossScaler", "cur_scale", fixed, "dynamic", False])
    power, window, least, shift = (_number(entry_of(section, key), usual) for key, usual in _BEGIN.items())
    growth, backoff = (_number(entry_of(scaler, key), 0.0) for key in ("growth_factor", "backoff_factor"))
    scale = _number(entry_of(scaler, "scale"), 2.0**power)
    patience = int(shift) if type(scaler) is not Dict else 1
    attributes: dict[Value, Value] = {
        "class": "DynamicLossScaler",
        "cur_scale": scale,
        "cur_iter": int(_number(entry_of(scaler, "_growth_tracker"), 0)),  # as if the scale had changed before 0
        "last_overflow_iter": -1,
        "scale_factor": growth if growth * backoff == 1 else _FACTOR,
        "scale_window": int(_number(entry_of(scaler, "growth_interval"), window)),
        "min_scale": min(least, scale),
        "delayed_shift": patience,
        "cur_hysteresis": patience,
        "consecutive_hysteresis": entry_of(section, "consecutive_hysteresis") is True,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": Global("torch", "float16"),
    }
    return Dict.of(attributes.items())


def _number(value: Value, otherwise: float) -> float:
    """Return a number above 0; anything else is answered with another one."""
    return value if type(value) in (int, float) and 0 < value < math.inf else otherwise
