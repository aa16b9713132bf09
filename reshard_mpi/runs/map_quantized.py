"""Take quantized weights through maps, or dequantize them before (`companions_followed`, `to_dequantize`)."""

from __future__ import annotations

from collections.abc import Sequence

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.apply_to_file import MappedFile
from reshard_mpi.mapping.chain import composed
from reshard_mpi.mapping.companions import follow, kinds_of
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.selection import ANY
from reshard_mpi.quantization.placing import QuantizedWeights
from reshard_mpi.quantization.weights import QuantizedWeight
from reshard_mpi.runs.check_maps import TensorMap
from reshard_mpi.sharding.patterns import Pattern
from reshard_mpi.text import counted

_NARROW = ("float8_e4m3fn", "float8_e5m2")


def to_dequantize(
    quantization: QuantizedWeights, tensor_map: TensorMap
) -> tuple[tuple[QuantizedWeight, ...], QuantizedWeights | None]:
    """Return the weights that `--dtype` dequantizes, and the quantized ones that are left, if any.

    Raises MapError for weights that cannot be dequantized, and for types that are none of plain weights.
    """
    chosen: list[QuantizedWeight] = []
    for stored in quantization.weights.values():
        weight = stored.weight
        names = (weight.name, weight.stored)
        types = [
            (glob, dtype)
            for glob, dtype in tensor_map.choice.types
            if glob == ANY or any(map(Pattern(glob).matches, names))
        ]
        if not types:
            continue
        glob, dtype = types[-1]
        if glob != ANY and tensor_map.rules:
            raise MapError(
                f"--dtype {glob}=... would dequantize {weight.stored} before a map that may give it another name",
                expected="with --map, a type for all: --dtype TYPE",
                got=f"a pattern that matches {weight.stored}",
                where=quantization.where,
            )
        inputs = next((each.name for each in weight.companions if each.name.endswith("pre_quant_scale")), None)
        if dtype.name in _NARROW or weight.scheme.kind == "whole" or inputs is not None:
            way = f"and {dtype} is no type to dequantize it"
            if weight.scheme.kind == "whole":
                way = "whose form is not known well enough to dequantize it"
            elif inputs is not None:
                way = f"and {inputs} scales its module's inputs, of which a plain weight knows nothing"
            raise MapError(
                f"{weight.stored} is quantized by {weight.scheme.name}, {way}",
                expected="--dtype bf16, fp16 or fp32, of weights that can be dequantized",
                got=f"--dtype {'' if glob == ANY else f'{glob}='}{dtype}",
                where=quantization.where,
                remedy="leave --dtype out: quantized weights are moved as they are",
            )
        chosen.append(weight)
    if not chosen:
        return (), quantization
    gone = {weight.stored for weight in chosen}
    left = {name: stored for name, stored in quantization.weights.items() if name not in gone}
    return tuple(chosen), QuantizedWeights(quantization.text, left, quantization.where) if left else None


def companions_followed(
    made: MappedFile, quantization: QuantizedWeights, inventory: Inventory
) -> tuple[MappedFile, QuantizedWeights | None]:
    """Return what maps make with the companions of quantized weights, and the quantized weights that they make.

    Args:
        inventory: all tensors of the checkpoint, companions too.

    Raises MapError where companions cannot follow.
    """
    results = []
    weights = quantization.weights
    for mapped in made.mapped:
        mapped, weights = follow(mapped, weights, inventory)
        inventory = dict(kinds_of(mapped)) | {constant.name: constant.kind for constant in mapped.constants}
        inventory |= {number.name: number.kind for number in mapped.computed}
        results.append(mapped)
    left = QuantizedWeights(quantization.text, weights, quantization.where) if weights else None
    return made._replace(mapped=tuple(results), made=composed(results)), left


def notes_on(dequantized: Sequence[QuantizedWeight]) -> tuple[str, ...]:
    """Return a note on the weights that are dequantized."""
    if not dequantized:
        return ()
    names = " and ".join(sorted({weight.scheme.name for weight in dequantized}))
    return (
        f"dequantized {counted(len(dequantized), 'weight')} of {names}: take quantization_config out of the model's"
        " configuration (config.json)",
    )
