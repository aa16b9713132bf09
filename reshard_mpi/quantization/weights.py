"""Describe quantized weights: the stored tensors that make up one, and how their axes belong together."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

# The name of the text, in files of ranks, that says how a checkpoint is quantized: the configuration's own key.
SCHEME_TEXT = "quantization_config"
# How the names of what a module has besides end: of its activations and its cache.
CARRIED = tuple(
    f"{what}_{value}"
    for what in ("input", "output", "activation", "q", "k", "v")
    for value in ("scale", "scale_inv", "zero_point", "global_scale")
)


class Scheme(NamedTuple):
    """A way of quantizing, as a checkpoint's configuration says it.

    Example, DeepSeek's: `Scheme("fp8", "fp8", block=(128, 128))`.
    """

    name: str  # what the configuration calls it, for messages: `fp8`, `gptq`, `pack-quantized`
    # fp8: elements of 8-bit floats times scales; int8: whole numbers times scales; packed: whole numbers of `bits` in
    # int32 along the last dimension (compressed-tensors); gptq, awq: their own packing; mxfp4: blocks of 32 with a
    # power of two (gpt-oss); nvfp4: blocks of 16; whole: recognized, and never cut
    kind: str
    bits: int = 8
    # how many elements of the logical weight (rows, columns) share a scale; 0: all of them
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True  # whether there are no zero points; gptq stores them all the same
    act_order: bool = False  # whether an index says which group a column belongs to
    divides: bool = False  # whether the scale of the whole tensor divides (compressed-tensors' nvfp4)

    @property
    def per_word(self) -> int:
        """How many elements are packed together in whole words of 32 bits."""
        return lcm(32, self.bits) // self.bits


class Relation(NamedTuple):
    """How a dimension of a companion belongs to one of its weight.

    A stored weight that is `length` long there has a companion that is ceil(length * own / step) long.
    """

    dim: int  # of the stored weight
    step: int  # how many elements of the stored weight belong to `own` elements of the companion
    own: int = 1

    def length(self, length: int) -> int:
        """Return the companion's length, or the place where it is cut, by the stored weight's."""
        return -(-length * self.own // self.step)


class Companion(NamedTuple):
    """A tensor that is stored beside a quantized weight and belongs to it."""

    role: str  # scale, zeros, group_index, global_scale, shape; else what is only carried (input_scale)
    name: str
    # for each of its dimensions how it belongs to the weight's; None: it has nothing to do with them, so whoever holds
    # a part of the weight holds all of it
    dims: tuple[Relation | None, ...] = ()


class QuantizedWeight(NamedTuple):
    """A logical weight, and the tensors that are stored for it.

    Example, DeepSeek's in blocks of 128 x 128:

        QuantizedWeight("q.weight", "q.weight", (576, 7168), scheme, (128, 128), (
            Companion("scale", "q.weight_scale_inv", (Relation(0, 128), Relation(1, 128))),
        ))
    """

    name: str  # as the weight is called once it is dequantized
    stored: str  # the tensor that holds its elements
    shape: tuple[int, ...]  # of the logical weight
    scheme: Scheme
    grain: tuple[int, ...]  # for each dimension of the stored tensor, of how many elements a cut must be a multiple
    companions: tuple[Companion, ...]

    def companion(self, role: str) -> Companion | None:
        """Return the companion of a role; None if there is none."""
        return next((each for each in self.companions if each.role == role), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that are stored for it."""
        return (self.stored, *(each.name for each in self.companions))
