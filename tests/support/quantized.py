"""Quantized weights made by hand: numbers are drawn, packed bit by bit, and what they stand for is computed one by one.

It shares no code with the package, and unpacks nothing: what is packed is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.quantization.weights import Companion, QuantizedWeight, Relation, Scheme
from reshard_mpi.sharding.box import Box

Array = np.ndarray[Any, np.dtype[Any]]

E4M3, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
SCALE_TYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
# Element number i of a word of AWQ is of this column.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Sample(NamedTuple):
    weight: QuantizedWeight
    tensors: dict[str, Array]  # as they are stored, by name
    whole: Array  # the logical weight, float32

    @property
    def kinds(self) -> dict[str, TensorType]:
        return {name: TensorType(BY_NAME[array.dtype.name], array.shape) for name, array in self.tensors.items()}

    def reader(self) -> Callable[[str, Box], Array]:
        """Return what reads boxes of the stored tensors, each once, and none that reach out of them."""
        left = set(self.tensors)

        def read(name: str, box: Box) -> Array:
            left.remove(name)
            array = self.tensors[name]
            assert Box.whole(array.shape).contains(box), (name, box, array.shape)
            part = array[tuple(map(slice, box.start, box.stop))]
            return np.ascontiguousarray(part).view(f"u{array.itemsize}")

        return read


def fp8(draw: np.random.Generator, shape: tuple[int, ...], block: tuple[int, int], scale_type: np.dtype[Any]) -> Sample:
    """block: (1, 0) for a scale for each row, (0, 0) for one for all; those of 32 columns are powers of two."""
    stored = draw.integers(0, 256, shape, np.uint8).view(E4M3)
    shared = scales(draw, grid_shape(shape, block), scale_type)
    whole = each(shape, lambda *at: number(stored[at]) * factor(shared[cell(at, block)]))
    scheme = Scheme("fp8", "fp8", block=block)
    return two_tensors(scheme, shape, stored, shared, whole)


def int8(
    draw: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], scale_type: np.dtype[Any], zero: bool
) -> Sample:
    stored = draw.integers(-128, 128, shape, np.int8)
    shared = scales(draw, grid_shape(shape, block), scale_type)
    zeros = draw.integers(-128, 128, shared.shape, np.int8) if zero else np.zeros(shared.shape, np.int8)

    def value(*at: int) -> np.float32:
        place = cell(at, block)
        return np.float32(int(stored[at]) - int(zeros[place])) * number(shared[place])

    sample = two_tensors(Scheme("int-quantized", "int8", 8, block, not zero), shape, stored, shared, each(shape, value))
    if not zero:
        return sample
    scale = sample.weight.companions[0]
    companions = (scale, Companion("zeros", "w.weight_zero_point", scale.dims))
    return sample._replace(
        weight=sample.weight._replace(companions=companions), tensors={**sample.tensors, "w.weight_zero_point": zeros}
    )


def packed(
    draw: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int,
    scale_type: np.dtype[Any],
    zero: bool = False,
    act_order: bool = False,
) -> Sample:
    """As compressed-tensors packs. group: 0 for a scale for each row."""
    rows, columns = shape
    numbers, groups = draw.integers(0, 1 << bits, shape), -(-columns // group) if group else 1
    shared = scales(draw, (rows, groups), scale_type)
    zeros = draw.integers(0, 1 << bits, (rows, groups)) if zero else np.full((rows, groups), 1 << bits - 1)
    index = group_index(draw, columns, group, act_order)
    whole = each(shape, lambda n, k: np.float32(numbers[n, k] - zeros[n, index[k]]) * number(shared[n, index[k]]))
    tensors = {
        "w.weight_packed": np.array([words(row, bits) for row in numbers]),
        "w.weight_scale": shared,
        "w.weight_shape": np.array(shape),
    }
    related = Relation(1, group * bits, 32) if group and not act_order else None
    companions = [
        Companion("scale", "w.weight_scale", (Relation(0, 1), related)),
        Companion("shape", "w.weight_shape", (None,)),
    ]
    if zero:
        tensors["w.weight_zero_point"] = np.array([words(column, bits) for column in zeros.T]).T.copy()
        companions.append(Companion("zeros", "w.weight_zero_point", (Relation(0, 32, bits), related)))
    if act_order:
        tensors["w.weight_g_idx"] = index.astype(np.int32)
        companions.append(Companion("group_index", "w.weight_g_idx", (Relation(1, bits, 32),)))
    scheme = Scheme("pack-quantized", "packed", bits, (1, group), not zero, act_order)
    return of(scheme, "w.weight_packed", shape, tensors, whole, companions)


def gptq(
    draw: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int,
    scale_type: np.dtype[Any],
    symmetric: bool = True,
    act_order: bool = False,
    form: str = "gptq",
) -> Sample:
    rows, columns = shape
    numbers, groups = draw.integers(0, 1 << bits, shape), -(-columns // group) if group else 1
    shared = scales(draw, (groups, rows), scale_type)
    less = 1 if form == "gptq" else 0
    stored_zeros = draw.integers(0, 1 << bits, (groups, rows))
    if symmetric:
        stored_zeros[:] = (1 << bits - 1) - less
    index = group_index(draw, columns, group, act_order)

    def value(n: int, k: int) -> np.float32:
        return np.float32(numbers[n, k] - stored_zeros[index[k], n] - less) * number(shared[index[k], n])

    tensors = {
        "w.qweight": np.array([words(row, bits) for row in numbers]).T.copy(),
        "w.qzeros": np.array([words(row, bits) for row in stored_zeros]),
        "w.scales": shared,
        "w.g_idx": index.astype(np.int32),
    }
    related = Relation(0, group * bits, 32) if group and not act_order else None
    companions = [
        Companion("zeros", "w.qzeros", (related, Relation(1, 32, bits))),
        Companion("scale", "w.scales", (related, Relation(1, 1))),
        Companion("group_index", "w.g_idx", (Relation(0, bits, 32),)),
    ]
    scheme = Scheme(form, "gptq", bits, (1, group), symmetric, act_order)
    return of(scheme, "w.qweight", shape, tensors, each(shape, value), companions)


def awq(draw: np.random.Generator, shape: tuple[int, int], group: int, scale_type: np.dtype[Any]) -> Sample:
    rows, columns = shape
    groups = columns // group if group else 1
    numbers, zeros = draw.integers(0, 16, shape), draw.integers(0, 16, (groups, rows))
    shared, index = scales(draw, (groups, rows), scale_type), group_index(draw, columns, group, False)

    def in_words(line: Array) -> Array:
        return words(line.reshape(-1, 8)[:, AWQ_COLUMNS].reshape(-1), 4)

    whole = each(shape, lambda n, k: np.float32(numbers[n, k] - zeros[index[k], n]) * number(shared[index[k], n]))
    tensors = {
        "w.qweight": np.array([in_words(column) for column in numbers.T]),
        "w.qzeros": np.array([in_words(line) for line in zeros]),
        "w.scales": shared,
    }
    related = Relation(0, group) if group else None
    companions = [
        Companion("zeros", "w.qzeros", (related, Relation(1, 1))),
        Companion("scale", "w.scales", (related, Relation(1, 1, 8))),
    ]
    return of(Scheme("awq", "awq", 4, (1, group), False), "w.qweight", shape, tensors, whole, companions)


def gpt_oss(draw: np.random.Generator, shape: tuple[int, int, int]) -> Sample:
    """shape: of the logical weight, [E, K, N]."""
    experts, columns, rows = shape
    numbers = draw.integers(0, 16, (experts, rows, columns))
    shared = draw.integers(100, 150, (experts, rows, columns // 32), np.uint8)
    tensors = {"w_blocks": pairs(numbers).reshape(experts, rows, columns // 32, 16), "w_scales": shared}
    whole = each(shape, lambda e, k, n: np.float32(FP4[numbers[e, n, k]]) * factor(shared[e, n, k // 32]))
    dims = tuple(Relation(dim, 1) for dim in range(3))
    scheme = Scheme("mxfp4", "mxfp4", 4, (1, 32))
    weight = QuantizedWeight("w", "w_blocks", shape, scheme, (1, 1, 1, 16), (Companion("scale", "w_scales", dims),))
    return Sample(weight, tensors, whole)


def mxfp4(draw: np.random.Generator, shape: tuple[int, ...]) -> Sample:
    """As compressed-tensors stores it."""
    numbers = draw.integers(0, 16, shape)
    shared = draw.integers(100, 150, grid_shape(shape, (1, 32)), np.uint8)
    whole = each(shape, lambda *at: np.float32(FP4[numbers[at]]) * factor(shared[cell(at, (1, 32))]))
    companions = [Companion("scale", "w.weight_scale", byte_relations(shape, 32))]
    tensors = {"w.weight_packed": pairs(numbers), "w.weight_scale": shared}
    scheme = Scheme("mxfp4-pack-quantized", "mxfp4", 4, (1, 32))
    return of(scheme, "w.weight_packed", shape, tensors, whole, companions)


def nvfp4(draw: np.random.Generator, shape: tuple[int, ...], divides: bool) -> Sample:
    numbers = draw.integers(0, 16, shape)
    shared = draw.integers(1, 0x7F, grid_shape(shape, (1, 16)), np.uint8).view(E4M3)
    whole_scale = np.asarray(np.abs(draw.normal(3, 1, (1,) if divides else ())), np.float32)
    by = whole_scale.reshape(-1)[0]

    def value(*at: int) -> np.float32:
        scale = number(shared[cell(at, (1, 16))])
        return np.float32(FP4[numbers[at]]) * (scale / by if divides else scale * by)

    names = ("w.weight_packed", "w.weight_global_scale") if divides else ("w.weight", "w.weight_scale_2")
    tensors = {names[0]: pairs(numbers), "w.weight_scale": shared, names[1]: whole_scale}
    companions = [
        Companion("scale", "w.weight_scale", byte_relations(shape, 16)),
        Companion("global_scale", names[1], (None,) if divides else ()),
        Companion("carried", "w.input_scale", ()),
    ]
    tensors["w.input_scale"] = np.array(7, np.float32)
    scheme = Scheme("nvfp4", "nvfp4", 4, (1, 16), divides=divides)
    return of(scheme, names[0], shape, tensors, each(shape, value), companions)


def two_tensors(scheme: Scheme, shape: tuple[int, ...], stored: Array, shared: Array, whole: Array) -> Sample:
    rows, columns = (Relation(len(shape) - 2 + at, step) if step else None for at, step in enumerate(scheme.block))
    dims = (*(Relation(dim, 1) for dim in range(len(shape) - 2)), rows, columns)
    companions = [Companion("scale", "w.weight_scale", dims)]
    return of(scheme, "w.weight", shape, {"w.weight": stored, "w.weight_scale": shared}, whole, companions)


def of(
    scheme: Scheme,
    stored: str,
    shape: tuple[int, ...],
    tensors: dict[str, Array],
    whole: Array,
    companions: list[Companion],
) -> Sample:
    """Make a sample. A companion that is not as long as a relation says, for its words are filled up, has none."""
    lengths = tensors[stored].shape
    companions = [
        each._replace(
            dims=tuple(
                None if own is None or own.length(lengths[own.dim]) != length else own
                for own, length in zip(each.dims, tensors[each.name].shape)
            )
        )
        for each in companions
    ]
    weight = QuantizedWeight("w.weight", stored, shape, scheme, (1,) * len(shape), tuple(companions))
    return Sample(weight, tensors, whole)


def byte_relations(shape: tuple[int, ...], group: int) -> tuple[Relation, ...]:
    """Return how scales for groups of columns belong to bytes of two columns each."""
    return (*(Relation(dim, 1) for dim in range(len(shape) - 1)), Relation(len(shape) - 1, group // 2))


def each(shape: tuple[int, ...], value: Callable[..., np.float32]) -> Array:
    with np.errstate(all="ignore"):
        elements = [value(*at) for at in itertools.product(*map(range, shape))]
    return np.array(elements, np.float32).reshape(shape)


def number(element: Any) -> np.float32:
    return np.float32(element)


def factor(scale: Any) -> np.float32:
    """Return what a scale multiplies by: one of a byte is an exponent of two."""
    return np.float32(2.0 ** (int(scale) - 127)) if isinstance(scale, np.uint8) else np.float32(scale)


def scales(draw: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if dtype == np.uint8:
        return draw.integers(100, 150, shape, np.uint8)
    return draw.normal(0, 0.01, shape).astype(dtype)


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    ends = (-(-length // step) if step else 1 for length, step in zip(shape[-2:], block))
    return (*shape[:-2], *ends)


def cell(at: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the place of the scale that an element has."""
    return (*at[:-2], *(place // step if step else 0 for place, step in zip(at[-2:], block)))


def group_index(draw: np.random.Generator, columns: int, group: int, act_order: bool) -> Array:
    index = np.arange(columns) // group if group else np.zeros(columns, int)
    return draw.permutation(index) if act_order else index


def words(numbers: Array, bits: int) -> Array:
    """Return numbers as one stream of bits, from the lowest on, in words of 32."""
    stream = sum(int(value) << bits * place for place, value in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    return np.array([stream >> 32 * place & 0xFFFFFFFF for place in range(count)], np.uint32).view(np.int32)


def pairs(numbers: Array) -> Array:
    """Return numbers of 4 bits two a byte, the first in the lower half."""
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).astype(np.uint8)
