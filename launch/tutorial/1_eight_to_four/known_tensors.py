"""Whole tensors that are known, and which part of each a rank must hold: by numpy alone, for each strategy by hand.

The layouts are those that MindSpore's compiler chose; they are written down here a second time so that checking shares
no code with converting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
Arrays = Mapping[str, Array]

SHAPES = {
    "layer1.weight": (784, 512),
    "layer1.bias": (512,),
    "layer2.weight": (512, 512),
    "layer2.bias": (512,),
    "layer3.weight": (512, 10),
    "layer3.bias": (10,),
}


def whole_tensors(*states: str) -> dict[str, Array]:
    """Draw the weights, and for each of `states` ("moments", ...) the optimizer's state of that name.

    They are as small as weights are, so that a network can be trained from them.
    """
    random = np.random.default_rng(8)
    prefixes = ["", *(f"{state}." for state in states)]
    return {
        prefix + name: random.standard_normal(shape, np.float32) * np.float32(0.05)
        for prefix in prefixes
        for name, shape in SHAPES.items()
    }


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor is, or is the state of."""
    return ".".join(name.split(".")[-2:])


def eight_cards(name: str, whole: Array, rank: int) -> Array:
    """The guide's 8 cards: layer1's columns and layer3's rows are halved by the middle one of the rank's three bits."""
    half = rank // 2 % 2
    match parameter_of(name):
        case "layer1.weight":
            return whole[:, half * 256 : (half + 1) * 256]
        case "layer3.weight":
            return whole[half * 256 : (half + 1) * 256]
    return whole


def four_cards(name: str, whole: Array, rank: int) -> Array:
    """The guide's 4 cards: layer1's rows by 4; layer3's rows by 2; and all that ranks would hold alike by optimizer."""
    match parameter_of(name):
        case "layer3.bias":
            return whole  # 10 elements do not go by 4
        case "layer3.weight":  # halved by the rank's last bit, and each half by the optimizer, by the rank's first bit
            start = rank % 2 * 256 + rank // 2 * 128
            return whole[start : start + 128]
    rows = len(whole) // 4
    return whole[rank * rows : (rank + 1) * rows]


def pipeline(name: str, whole: Array, rank: int) -> Array | None:
    """Two stages of 4 cards, the optimizer sharded: layer1 by ranks 0 to 3, the others by 4 to 7; None elsewhere."""
    parameter = parameter_of(name)
    if rank // 4 != (0 if parameter.startswith("layer1.") else 1):
        return None
    if parameter == "layer3.bias":
        return whole
    rows = len(whole) // 4
    return whole[rank % 4 * rows : (rank % 4 + 1) * rows]


def replicated(name: str, whole: Array, rank: int) -> Array:
    """The guide's 4 cards after the pipeline: every rank has all."""
    return whole
