"""Bring what torch saves of a training into the form that DeepSpeed's engine has (`with_groups`, `loss_scaler`).

    {"state.w.exp_avg": ..., "param_groups.w.lr": 0.1}     a flat optimizer: parameters of equal settings are a group
    {"state": {...}, "param_groups": [{"params": ["w"]}]}  the form that it gets

DeepSpeed's engine leaves parameters that are not trained out of groups; torch's optimizers have them there, without
state. Loss scalers of both are made of other numbers (deepspeed/runtime/fp16/loss_scaler.py, torch/amp/grad_scaler.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi.formats.deepspeed.settings import config_value, type_in
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import ORDERED_DICT, Call, Dict, Global, Value

_GROUPS, _STATE, _PARAMETERS = "param_groups", "state", "params"
# What DeepSpeed begins with in fp16, by the names in its settings (runtime/fp16 and precision_config.py).
_BEGIN = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
_FACTOR = 2.0


class NestTensor(NamedTuple):
    """A tensor in the nest. dtype: the name of the type that it is converted to; empty: it keeps its own."""

    name: str
    dtype: str = ""


def is_nest_tensor(value: Value) -> bool:
    return type(value) is NestTensor


def dictionary_of(pairs: dict[Value, Value]) -> Dict:
    return Dict([part for pair in pairs.items() for part in pair])


def is_ordered(value: Value) -> bool:
    """Tell whether a value is an ordered dictionary, as torch gives a model's."""
    return type(value) is Call and value.function == ORDERED_DICT and not value.args


class GroupedOptimizer(NamedTuple):
    """An optimizer by groups.

    Attributes:
        optimizer: with its state by parameters, and its groups.
        equal: names of tensors that must hold the same, of which the first is taken: settings of one group.
        untrained: parameters that are in groups and have no state, unlike others; they are left out of the groups.
    """

    optimizer: Dict
    equal: tuple[tuple[str, ...], ...] = ()
    untrained: tuple[str, ...] = ()


def with_groups(optimizer: Dict) -> GroupedOptimizer:
    """Return an optimizer by groups, which has those parameters that it trains."""
    grouped = _nested(optimizer) if optimizer.get(_GROUPS) is None else GroupedOptimizer(optimizer)
    state, groups = grouped.optimizer.get(_STATE), grouped.optimizer.get(_GROUPS)
    trained = {key for key, _ in state.pairs()} if type(state) is Dict else set()
    untrained: list[str] = []
    alone: list[Value] = []
    for group in groups if type(groups) is list else ():
        names = group.get(_PARAMETERS) if type(group) is Dict else None
        if type(names) is not list or not all(type(name) is str for name in names) or trained.isdisjoint(names):
            alone.append(group)
            continue
        untrained += (name for name in names if name not in trained)
        own = [name for name in names if name in trained]
        alone.append(dictionary_of({**dict(group.pairs()), _PARAMETERS: own}))
    if not untrained:
        return grouped
    entries = {**dict(grouped.optimizer.pairs()), _GROUPS: alone}
    return grouped._replace(optimizer=dictionary_of(entries), untrained=tuple(untrained))


def _nested(optimizer: Dict) -> GroupedOptimizer:
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
        return GroupedOptimizer(optimizer)
    members: dict[str, list[Value]] = {}
    for name, own in settings.items():
        plain = Dict(["settings", dictionary_of({key: own[key] for key in own if not is_nest_tensor(own[key])})])
        members.setdefault(str(flatten_tree.flatten(plain, is_nest_tensor).strings), []).append(name)
    groups: list[Value] = []
    equal: list[tuple[str, ...]] = []
    for names in members.values():
        groups.append(dictionary_of({**settings[names[0]], _PARAMETERS: names}))
        equal += _of_one_group([settings[name] for name in names])
    by_name = dictionary_of({name: dictionary_of(own) for name, own in state.items()})
    entries = {**others, _STATE: by_name, _GROUPS: groups}
    return GroupedOptimizer(dictionary_of(entries), tuple(equal))


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
    section = config_value(config, "fp16")
    fixed = _number(config_value(section, "loss_scale"), 0.0)
    if type(scaler) is not Dict and fixed:
        return Dict(["class", "LossScaler", "cur_scale", fixed, "dynamic", False])
    power, window, least, shift = (_number(config_value(section, key), usual) for key, usual in _BEGIN.items())
    growth, backoff = (_number(config_value(scaler, key), 0.0) for key in ("growth_factor", "backoff_factor"))
    scale = _number(config_value(scaler, "scale"), 2.0**power)
    patience = int(shift) if type(scaler) is not Dict else 1
    attributes: dict[Value, Value] = {
        "class": "DynamicLossScaler",
        "cur_scale": scale,
        "cur_iter": int(_number(config_value(scaler, "_growth_tracker"), 0)),  # as if the scale had changed before 0
        "last_overflow_iter": -1,
        "scale_factor": growth if growth * backoff == 1 else _FACTOR,
        "scale_window": int(_number(config_value(scaler, "growth_interval"), window)),
        "min_scale": min(least, scale),
        "delayed_shift": patience,
        "cur_hysteresis": patience,
        "consecutive_hysteresis": config_value(section, "consecutive_hysteresis") is True,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": Global("torch", "float16"),
    }
    return dictionary_of(attributes)


def _number(value: Value, otherwise: float) -> float:
    """Return a number above 0; anything else is answered with another one."""
    return value if type(value) in (int, float) and 0 < value < math.inf else otherwise
