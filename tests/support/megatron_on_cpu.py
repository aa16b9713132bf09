"""Take the place of CUDA for Megatron-Core on a CPU: call `replace_cuda` before it is imported."""

from __future__ import annotations

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
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    type_of = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        return type_of(self, *args, **named) if args or named else type_of(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign,assignment]
    torch.utils.cpp_extension.load_inline = _no_compiler  # 0.15 compiles when it is imported
    for name in ("tensor", "zeros", "empty", "ones", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _no_compiler(*_: Any, **__: Any) -> None:
    raise RuntimeError("no CUDA here")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **named: Any) -> Any:
        return function(*args, **{**named, **({"device": "cpu"} if "cuda" in str(named.get("device", "")) else {})})

    return made
