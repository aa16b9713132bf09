"""Read in DeepSpeed's settings (`ds_config`) how a training lies in its files, as its engine does.

(deepspeed/runtime/config.py, zero/config.py and `_do_optimizer_sanity_check` of engine.py in release 0.19; values are
checked by pydantic, which takes several words and numbers for true, and texts for numbers.)
"""

from __future__ import annotations

import math

from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.nest.nodes import Dict, Global, Value

_ON = ("1", "true", "t", "yes", "y", "on")
_FLOAT32 = ("torch.float32", "fp32", "float32", "float")
# Elements of a sub-group of stage 3, where the settings do not say it.
_USUAL_SUB_GROUP = 10**9


def config_value(config: Value, key: str) -> Value:
    """Return a value of a section of DeepSpeed's settings; None if there is no such section, or no such value in it."""
    return config.get(key) if type(config) is Dict else None


def is_on(value: Value) -> bool:
    """Tell whether a setting stands for true."""
    if type(value) in (bool, int, float):
        return bool(value == 1)
    return type(value) is str and value.lower() in _ON


def type_in(config: Value) -> DType:
    """Return the type of a model's parameters."""
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if is_on(config_value(config_value(config, key), "enabled")):
            return BY_NAME[name]
    return BY_NAME["float32"]


def has_bf16_optimizer(config: Value, stage: int) -> bool:
    """Tell whether the engine takes BF16_Optimizer for this stage, which knows neither order nor alignment."""
    accumulated = config_value(config_value(config, "data_types"), "grad_accum_dtype")
    is_float32 = accumulated in _FLOAT32 if type(accumulated) is str else accumulated == Global("torch", "float32")
    zero = config_value(config, "zero_optimization")
    device = config_value(config_value(zero, "offload_optimizer"), "device")
    is_offloaded = device == "cpu" or is_on(config_value(zero, "cpu_offload"))
    return stage == 1 and type_in(config).name == "bfloat16" and is_float32 and not is_offloaded


def has_round_robin(config: Value, stage: int) -> bool:
    """Tell whether the parameters of a group are dealt out over the ranks (`flat_groups.round_robin`)."""
    zero = config_value(config, "zero_optimization")
    return stage < 3 and is_on(config_value(zero, "round_robin_gradients")) and not has_bf16_optimizer(config, stage)


def is_aligned(config: Value, stage: int) -> bool:
    """Tell whether parameters begin at multiples of a number of bytes in their vector."""
    zero = config_value(config, "zero_optimization")
    return stage < 3 and is_on(config_value(zero, "parameter_alignment")) and not has_bf16_optimizer(config, stage)


def sub_group_size(config: Value) -> int | None:
    """Return how many elements a sub-group of stage 3 has; None if the setting is no whole number."""
    size = config_value(config_value(config, "zero_optimization"), "sub_group_size")
    if size is None:
        return _USUAL_SUB_GROUP
    if type(size) is str and size.strip().isascii() and size.strip().isdigit():
        return int(size)
    if type(size) is int or (type(size) is float and math.isfinite(size) and size == int(size)):
        return int(size)
    return None
