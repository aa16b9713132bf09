"""DeepSpeed's settings decide how a training lies in its files; they are read as its own engine reads them."""

from __future__ import annotations

from typing import Any

import pytest

from reshard_mpi.formats.deepspeed import flat_groups
from reshard_mpi.formats.nest.nodes import Dict


def nested(value: Any) -> Any:
    if type(value) is dict:
        return Dict([part for key, own in value.items() for part in (key, nested(own))])
    return value


def config(accumulated: Any = None, *, bf16: Any = True, **zero: Any) -> Any:
    types = {} if accumulated is None else {"data_types": {"grad_accum_dtype": accumulated}}
    return nested({"bf16": {"enabled": bf16}, "zero_optimization": zero, **types})


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "on", "YES", "y", "t", "1"])
def test_what_stands_for_true(value: Any) -> None:
    of = config(bf16=value, round_robin_gradients=value, parameter_alignment=value)
    assert flat_groups.type_in(of).name == "bfloat16"
    assert (
        flat_groups.has_round_robin(of, 2) and flat_groups.is_aligned(of, 1) and not flat_groups.has_round_robin(of, 3)
    )


@pytest.mark.parametrize("value", [False, 0, "false", "off", "no", "0", None, 2, [1], "auto"])
def test_what_does_not(value: Any) -> None:
    of = config(bf16=value, round_robin_gradients=value, parameter_alignment=value)
    assert flat_groups.type_in(of).name == "float32"
    assert not flat_groups.has_round_robin(of, 2) and not flat_groups.is_aligned(of, 1)


@pytest.mark.parametrize(
    "of, expected",
    [
        (config("fp32"), True),
        (config("float"), True),
        (config("torch.float32"), True),
        (config("bf16"), False),
        (config(), False),
        (config("fp32", bf16=False), False),
        (config("fp32", offload_optimizer={"device": "cpu"}), False),
        (config("fp32", cpu_offload=True), False),
        (config("fp32", offload_optimizer={"device": "nvme"}), True),
        (None, False),
    ],
)
def test_where_the_engine_takes_bf16_optimizer(of: Any, expected: bool) -> None:
    assert flat_groups.has_bf16_optimizer(of, 1) is expected
    assert not flat_groups.has_bf16_optimizer(of, 2)


@pytest.mark.parametrize(
    "value, expected", [(40, 40), ("40", 40), (4e3, 4000), (float("inf"), None), (float("nan"), None), (1.5, None)]
)
def test_the_size_of_a_sub_group(value: Any, expected: int | None) -> None:
    assert flat_groups.sub_group_size(config(sub_group_size=value)) == expected
    assert flat_groups.sub_group_size(config()) == 10**9
