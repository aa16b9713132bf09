"""DeepSpeed's checkpoints as whole tensors, put together with torch of the files one by one (`by_name`)."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("deepspeed"):
            return type(name, (), {"__init__": lambda self, *args: None})
        return super().find_class(module, name)


_LENIENT = ModuleType("lenient")
_LENIENT.Unpickler, _LENIENT.load, _LENIENT.loads = _Unpickler, pickle.load, pickle.loads  # type: ignore[attr-defined]


def load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_LENIENT)


def number(pattern: str, path: Path) -> int:
    found = re.search(pattern, path.name)
    assert found is not None
    return int(found[1])


def by_name(tag: Path) -> dict[str, Any]:
    """Return whole tensors: `model.NAME`, `fp32.NAME`, `exp_avg.NAME` and so on."""
    found: dict[str, Any] = {}
    for path in tag.glob("layer_*"):
        layer = "" if "expert" in path.name else str(number(r"layer_(\d+)", path)) + "."
        found |= {f"model.{layer}{name}": tensor for name, tensor in load(path).items()}
    for model_rank in {number(r"mp_rank_(\d+)_optim", path) for path in tag.glob("*optim_states.pt")}:
        shares = sorted(
            tag.glob(f"*mp_rank_{model_rank:02d}_optim_states.pt"), key=lambda own: number(r"pp_rank_(\d+)", own)
        )
        states = [load(path)["optimizer_state_dict"] for path in shares]
        models = tag.glob(f"*mp_rank_{model_rank:02d}_model_states.pt")
        model = load(next(path for path in models if "expert" not in path.name))
        module = model["module"] or {}
        found |= {f"model.{name}": tensor for name, tensor in module.items() if tensor.numel()}
        for group, shapes in enumerate(model["param_shapes"]):
            found |= of_group(states, group, shapes)
    return found


def of_group(states: list[Any], group: int, shapes: Any) -> dict[str, Any]:
    if "fp32_flat_groups" in states[0]:
        return sliced(states, group, shapes)
    parts = len(states) // states[0]["partition_count"][group]
    found = {}
    for part in range(parts):
        own = states[part::parts]
        bases = [state["base_optimizer_state"]["state"][group] for state in own]
        flat = {"fp32": torch.cat([state["single_partition_of_fp32_groups"][group].detach() for state in own])}
        flat |= {kind: torch.cat([base[kind] for base in bases]) for kind in ("exp_avg", "exp_avg_sq")}
        gaps = own[0].get("param_alignment_paddings") or {group: [0] * len(shapes)}
        for kind, vector in flat.items():
            start = 0
            for (name, shape), gap in zip(shapes.items(), gaps[group]):
                size = math.prod(shape)
                found[f"{kind}.{renumbered(name, part, shapes)}"] = vector[start : start + size].reshape(tuple(shape))
                start += size + gap
    return found


def renumbered(name: str, part: int, shapes: Any) -> str:
    """Return the name of an expert over all ranks; each part has as many."""
    match = re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name)
    if match is None:
        return name
    count = len({other.removeprefix(match[1]).split(".")[0] for other in shapes if other.startswith(match[1])})
    return f"{match[1]}{part * count + int(match[2])}{match[3]}"


def sliced(states: list[Any], group: int, shapes: Any) -> dict[str, Any]:
    found = {}
    inner = [state["optimizer_state_dict"]["state"][group] for state in states]
    flat = {"fp32": [state["fp32_flat_groups"][group].detach() for state in states]}
    flat |= {kind: [own[kind] for own in inner] for kind in ("exp_avg", "exp_avg_sq")}
    for kind, vectors in flat.items():
        start = 0
        for name, shape in shapes.items():
            length = math.ceil(math.prod(shape) / len(states))
            pieces = torch.cat([vector[start : start + length] for vector in vectors])
            found[f"{kind}.{name}"] = pieces[: math.prod(shape)].reshape(tuple(shape))
            start += length
    return found
