"""Take the place of CUDA for Megatron-Core on a CPU: call `replace_cuda` before it is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.cpp_extension


def replace_cuda() -> None:
    np.product = np.prod  # type: ignore[attr-defined]  # Megatron-Core 0.14 calls it
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_stream = torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    type_of = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        return type_of(self, *args, **named) if args or named else type_of(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign,assignment]
    torch.utils.cpp_extension.load_inline = _no_compiler  # 0.15 compiles when it is imported
    for name in ("tensor", "zeros", "empty", "ones", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


class _Nothing:
    """A stream of a device, on which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.record = self.synchronize = lambda *_, **__: None


def _no_compiler(*_: Any, **__: Any) -> None:
    raise RuntimeError("no CUDA here")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **named: Any) -> Any:
        return function(*args, **{**named, **({"device": "cpu"} if "cuda" in str(named.get("device", "")) else {})})

    return made


def replace_step() -> None:
    """Have torch's Adam keep its step where Transformer Engine's does: in the groups, and not beside the moments.

    Megatron-Core expects none there. To be called after it is imported.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    states_of = DistributedOptimizer._get_main_param_and_optimizer_states
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def without_step(self: Any, param: Any) -> dict[str, Any]:
        return {name: state for name, state in states_of(self, param).items() if name != "step"}

    def set_but_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        step = {name: state for name, state in states_of(self, param).items() if name == "step"}
        set_states(self, param, {**tensors, **step})

    DistributedOptimizer._get_main_param_and_optimizer_states = without_step
    DistributedOptimizer._set_main_param_and_optimizer_states = set_but_step
