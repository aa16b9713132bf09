"""Compute the elements of a quantized weight from the tensors that are stored for it (`dequantized`).

Everything is computed in float32, in the order in which the libraries of the schemes do it: the zero point is taken
from the element, and the difference is multiplied by the scale. Nothing is rounded before: a product of what is stored
has so few bits that float32 holds it, so whoever rounds the result once has what these libraries have. (Where the
scale is a float32, they compute in float32 as well.)

A grid is the scales or zero points of a box, each of which is for a block of elements. It has the dimensions of the
logical weight; a box that begins or ends within a block has that block's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard_mpi.engine.elements import Array, assign, convert_elements
from reshard_mpi.errors import SourceError
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS, to_numpy
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.quantization.weights import Companion, QuantizedWeight, Relation
from reshard_mpi.sharding.box import Box

# The elements of a box of a stored tensor, by its name, in the box's shape: unsigned integers as wide as the elements.
Read = Callable[[str, Box], Array]

_FLOAT32, _UINT8 = BY_NAME["float32"], BY_NAME["uint8"]
_NEEDED = frozenset(("scale", "zeros", "group_index", "global_scale"))
# How many elements are computed at a time: their memory stays in the processor's second cache.
_BLOCK = 1 << 15
_WORD_BITS = 32
_E8M0_BIAS = 127
# The bytes of gpt-oss's blocks of 32 elements are a dimension of their own.
_BLOCK_BYTES = 16
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
# Where in a word of AWQ the elements lie that follow each other.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantized(weight: QuantizedWeight, box: Box, kinds: Mapping[str, TensorType], read: Read) -> Array:
    """Return elements of a logical weight, as a C-contiguous array of float32 in the shape of `box`.

    It takes up to twice their memory and some more.

    Args:
        box: in the coordinates of the logical weight, which has two dimensions or more.
        kinds: of all stored tensors, whole.
        read: called once for each tensor and box that `stored_boxes` returns.

    Raises SourceError if what is stored contradicts the scheme.
    """
    if not box.size:
        return np.empty(box.shape, np.float32)
    boxes = stored_boxes(weight, box, kinds)
    stored = {name: _StoredPart(np.ascontiguousarray(read(name, part)), kinds[name]) for name, part in boxes.items()}
    with np.errstate(all="ignore"):
        elements = _elements(weight, box, stored[weight.stored])
        groups = weight.companion("group_index") if weight.scheme.act_order else None
        index = None if groups is None else _group_index(weight, groups, stored)
        zeros, scale = weight.companion("zeros"), weight.companion("scale")
        if zeros is not None:
            _apply(np.subtract, elements, _zeros(weight, zeros, box, stored[zeros.name]), box, index)
        if scale is not None:
            _apply(np.multiply, elements, _scales(weight, scale, stored), box, index)
    return elements


def _group_index(weight: QuantizedWeight, groups: Companion, stored: Mapping[str, _StoredPart]) -> Array:
    """Return the number of the group of each column, along the last dimension; before it are layers or experts.

    Raises SourceError for numbers that no group has.
    """
    index, scale = stored[groups.name].typed, weight.companion("scale")
    columns_first = weight.scheme.kind == "gptq"
    count = 1 if scale is None else stored[scale.name].typed.shape[-2 if columns_first else -1]
    if index.min() < 0 or index.max() >= count:
        raise SourceError(
            f"columns of {weight.name} are in groups that it does not have",
            expected=f"numbers of groups from 0 to {count - 1}",
            got=f"{index.min()} to {index.max()}",
            where=groups.name,
            remedy="if its columns are in order, say so in its quantization_config (desc_act or actorder)",
        )
    return index


def stored_boxes(weight: QuantizedWeight, box: Box, kinds: Mapping[str, TensorType]) -> dict[str, Box]:
    """Return, for each stored tensor that elements of a logical weight are computed from, the box that is needed.

    What is divided by the box's ends, a block or a word with several elements, is needed whole.
    """
    related: dict[str, Sequence[Relation | None]] = {weight.stored: _stored_relations(weight)}
    for companion in weight.companions:
        if companion.role in _NEEDED:
            related[companion.name] = _relations(weight, companion, kinds[companion.name].shape)
    boxes = {}
    for name, relations in related.items():
        shape = kinds[name].shape
        spans = [(0, length) if each is None else _span(each, box) for each, length in zip(relations, shape)]
        boxes[name] = Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))
    return boxes


class _StoredPart(NamedTuple):
    """A part of a stored tensor."""

    raw: Array  # unsigned integers as wide as its elements
    kind: TensorType  # of the whole tensor

    @property
    def typed(self) -> Array:
        return self.raw.view(to_numpy(self.kind.dtype))

    def floats(self) -> Array:
        """Return its elements as float32."""
        if self.kind.dtype not in FLOATS:
            return self.typed.astype(np.float32)
        values = np.empty(self.raw.shape, np.float32)
        convert_elements(self.raw.reshape(-1), self.kind.dtype, values.reshape(-1).view(np.uint32), _FLOAT32)
        return values


def _span(relation: Relation, box: Box) -> tuple[int, int]:
    return box.start[relation.dim] * relation.own // relation.step, relation.length(box.stop[relation.dim])


def _stored_relations(weight: QuantizedWeight) -> tuple[Relation | None, ...]:
    """Return how the dimensions of the stored weight belong to the logical weight's."""
    kind, bits, ndim = weight.scheme.kind, weight.scheme.bits, len(weight.shape)
    outer = tuple(Relation(dim, 1) for dim in range(ndim - 2))
    rows, columns = Relation(ndim - 2, 1), Relation(ndim - 1, 1)
    if kind == "packed":
        return (*outer, rows, Relation(columns.dim, _WORD_BITS, bits))
    if kind == "gptq":
        return (*outer, Relation(columns.dim, _WORD_BITS, bits), rows)
    if kind == "awq":
        return (*outer, columns, Relation(rows.dim, _WORD_BITS, bits))
    if _is_transposed_mxfp4(weight):
        return (*outer, columns, Relation(rows.dim, 2 * _BLOCK_BYTES), None)
    if kind in ("mxfp4", "nvfp4"):
        return (*outer, rows, Relation(columns.dim, 2))
    return (*outer, rows, columns)


def _is_transposed_mxfp4(weight: QuantizedWeight) -> bool:
    """Tell whether a weight is stored as gpt-oss does: transposed, and blocks have a dimension of their own."""
    return weight.scheme.kind == "mxfp4" and len(weight.grain) > len(weight.shape)


def _relations(weight: QuantizedWeight, companion: Companion, shape: tuple[int, ...]) -> list[Relation | None]:
    """Return how the dimensions of a companion belong to the logical weight's. shape: of the companion."""
    scheme, relations = weight.scheme, list[Relation | None]()
    for own, length in zip(companion.dims, shape, strict=True):
        stored = None if own is None else _stored_relations(weight)[own.dim]
        if own is not None and stored is not None:
            relations.append(Relation(stored.dim, stored.step * own.step, stored.own * own.own))
        elif length == 1 or (scheme.act_order and companion.role != "group_index"):
            relations.append(None)
        else:  # words that are filled up make it longer or shorter than it follows from the stored weight's length
            columns = 1 if companion.role == "group_index" else scheme.block[1]
            relations.append(Relation(len(weight.shape) - 1, columns))
    return relations


def _elements(weight: QuantizedWeight, box: Box, stored: _StoredPart) -> Array:
    """Return the elements of a box as float32 before they are scaled; whole numbers less their zero point if known."""
    scheme, raw = weight.scheme, stored.raw
    if scheme.kind in ("fp8", "int8"):
        return stored.floats()
    if _is_transposed_mxfp4(weight):
        blocks = raw.reshape(*raw.shape[:-2], -1)
        return _unpacked_turned(blocks, box.start[-2] % (2 * _BLOCK_BYTES), box.shape[-2], _FP4)
    if scheme.kind in ("mxfp4", "nvfp4"):
        return _unpacked(raw, 4, box.start[-1] % 2 * 4, box.shape[-1], _FP4)
    zero = 0 if weight.companion("zeros") is not None else 1 << scheme.bits - 1
    numbers = np.arange(-zero, (1 << scheme.bits) - zero, dtype=np.float32)
    if scheme.kind == "awq":
        return _unpacked_turned(_bytes_of(_in_order(raw)), box.start[-2] % 8, box.shape[-2], numbers)
    words = raw.swapaxes(-1, -2) if scheme.kind == "gptq" else raw
    return _unpacked(_bytes_of(words), scheme.bits, box.start[-1] * scheme.bits % _WORD_BITS, box.shape[-1], numbers)


def _zeros(weight: QuantizedWeight, zeros: Companion, box: Box, stored: _StoredPart) -> _BlockGrid:
    """Return the zero points of a box."""
    scheme, relations = weight.scheme, _relations(weight, zeros, stored.kind.shape)
    rows = len(weight.shape) - 2  # which they are packed along
    packed = next((axis for axis, each in enumerate(relations) if each is not None and each.dim == rows), None)
    if scheme.kind not in ("packed", "gptq", "awq"):
        return _grid(weight, relations, stored.floats())
    if packed is None:  # one for all elements is stored as it is, while the elements are stored plus half their range
        return _grid(weight, relations, stored.floats() + (1 << scheme.bits - 1))
    relations[packed] = Relation(rows, 1)
    words = stored.raw.swapaxes(packed, -1)
    numbers = np.arange(1 << scheme.bits, dtype=np.float32)
    if scheme.kind == "awq":
        words = _in_order(words)
    first_bit = box.start[-2] * scheme.bits % _WORD_BITS
    values = _unpacked(_bytes_of(words), scheme.bits, first_bit, box.shape[-2], numbers)
    if scheme.kind == "gptq":
        values += _left_out(weight, zeros, values)
    return _grid(weight, relations, values.swapaxes(packed, -1))


def _left_out(weight: QuantizedWeight, zeros: Companion, values: Array) -> int:
    """Return what has to be added to zero points of GPTQ: in its first form they are stored less 1."""
    scheme = weight.scheme
    if not scheme.symmetric:
        return 0 if scheme.name == "gptq_v2" else 1
    # Some writers say one form and store the other; what a symmetric zero point is, is known.
    middle = 1 << scheme.bits - 1
    if (values == middle).all():
        return 0
    if (values == middle - 1).all():
        return 1
    raise SourceError(
        f"{weight.name} has other zero points than a symmetric weight of {scheme.bits} bits",
        expected=f"all {middle - 1} (gptq) or all {middle} (gptq_v2)",
        got=f"{values.min():g} to {values.max():g}",
        where=zeros.name,
        remedy='if it was not quantized symmetrically, say "sym": false in its quantization_config',
    )


def _scales(weight: QuantizedWeight, scale: Companion, stored: Mapping[str, _StoredPart]) -> _BlockGrid:
    own = stored[scale.name]
    # Of bytes each is an exponent of two (E8M0).
    is_power = own.kind.dtype == _UINT8
    values = np.ldexp(np.float32(1), own.raw.astype(np.int32) - _E8M0_BIAS) if is_power else own.floats()
    grid = _grid(weight, _relations(weight, scale, own.kind.shape), values)
    whole = weight.companion("global_scale")
    if whole is None:
        return grid
    shared = stored[whole.name]
    by = _grid(weight, _relations(weight, whole, shared.kind.shape), shared.floats()).values
    return grid._replace(values=grid.values / by if weight.scheme.divides else grid.values * by)


class _BlockGrid(NamedTuple):
    """Numbers for blocks of elements of the logical weight; see above."""

    values: Array  # float32, of as many dimensions as the weight
    steps: tuple[int, ...]  # how many elements each is for, along each dimension; 0: all there are


def _grid(weight: QuantizedWeight, relations: Sequence[Relation | None], values: Array) -> _BlockGrid:
    """Return numbers with the dimensions of the logical weight.

    Args:
        relations: how the dimensions of `values` belong to it. What is longer than 1 and does not is for groups of
            columns.
    """
    ndim = len(weight.shape)
    axes, steps = dict[int, int](), [0] * ndim
    for axis, relation in enumerate(relations):
        if relation is not None:
            axes[relation.dim], steps[relation.dim] = axis, relation.step // relation.own
        elif values.shape[axis] > 1:
            axes[ndim - 1] = axis
    order = [axes[dim] for dim in sorted(axes)]
    turned = values.transpose([*order, *(axis for axis in range(values.ndim) if axis not in order)])
    shape = [values.shape[axes[dim]] if dim in axes else 1 for dim in range(ndim)]
    return _BlockGrid(turned.reshape(shape), tuple(steps))


def _apply(operation: np.ufunc, elements: Array, grid: _BlockGrid, box: Box, index: Array | None) -> None:
    """Subtract zero points from elements, or multiply these by scales, in place.

    Args:
        index: for each column of the box, in each layer or expert, the group whose number it has; None: the columns of
            a group follow each other.
    """
    (low, left), (high, right) = box.start[-2:], box.stop[-2:]
    step, width = grid.steps[-2:]
    run = step if step > 1 else max(1, _BLOCK // (right - left))
    for outer in np.ndindex(elements.shape[:-2]):
        values = grid.values[_place_in(grid.values.shape[:-2], outer)]
        own_index = None if index is None else index[_place_in(index.shape[:-1], outer)]
        for first in range(low // run * run, high, run):
            rows = slice(max(first, low) - low, min(first + run, high) - low)
            if step > 1:
                block = first // step - low // step
                numbers = values[block : block + 1]
            else:
                numbers = values[rows] if step else values
            if own_index is not None and values.shape[1] > 1:
                numbers = numbers[:, own_index]
            elif width > 1:
                numbers = np.repeat(numbers, width, axis=1)[:, left % width :][:, : right - left]
            part = elements[outer][rows]
            operation(part, numbers, out=part)


def _place_in(shape: tuple[int, ...], outer: tuple[int, ...]) -> tuple[int, ...]:
    """Return where numbers for an outer place of a weight lie: dimensions of length 1 are the same for all."""
    return tuple(place if length > 1 else 0 for place, length in zip(outer, shape))


def _in_order(words: Array) -> Array:
    """Return words of AWQ with their elements one after the other, the first in the lowest bits."""
    ordered = np.zeros_like(words)
    for place, source in enumerate(_AWQ_PLACES):
        ordered |= (words >> 4 * source & 0xF) << 4 * place
    return ordered


def _bytes_of(words: Array) -> Array:
    """Return the bytes of words, from the lowest on."""
    return np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)


def _unpacked(stream: Array, bits: int, first_bit: int, count: int, values: Array) -> Array:
    """Return `count` elements of each row of bytes; they follow each other from the lowest bit on.

    Args:
        values: for each number of `bits` what it becomes.
    """
    elements = np.empty((*stream.shape[:-1], count), np.float32)
    rows, target = stream.reshape(-1, stream.shape[-1]), elements.reshape(-1, count)
    places = first_bit + np.arange(count) * bits
    low, shifts = places >> 3, (places & 7).astype(np.uint16)
    each = 8 // bits
    begin, skipped = first_bit // 8, first_bit % 8 // bits
    end = begin - (skipped + count) // -each
    table = values[np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1]
    # A few rows at a time, for the indices that numpy makes to stay small.
    at_a_time = max(1, _BLOCK // count)
    for first in range(0, len(rows), at_a_time):
        part = rows[first : first + at_a_time]
        if 8 % bits:  # elements may straddle bytes
            lower, upper = (np.take(part, low + after, axis=1, mode="clip") for after in (0, 1))
            numbers = (lower | upper.astype(np.uint16) << 8) >> shifts & (1 << bits) - 1
            np.take(values, numbers, out=target[first : first + at_a_time], mode="clip")
        else:
            unpacked = np.take(table, part[:, begin:end], axis=0, mode="clip").reshape(len(part), -1)
            target[first : first + at_a_time] = unpacked[:, skipped : skipped + count]
    return elements


def _unpacked_turned(stream: Array, skipped: int, count: int, values: Array) -> Array:
    """Return `count` elements of 4 bits of each row of bytes after the first `skipped`, in columns in place of rows."""
    turned = np.empty((*stream.shape[:-2], stream.shape[-1], stream.shape[-2]), np.uint8)
    assign(turned, stream.swapaxes(-1, -2))
    elements = np.empty((*turned.shape[:-1], 2, turned.shape[-1]), np.float32)
    rows, target = turned.reshape(-1, turned.shape[-1]), elements.reshape(-1, 2, turned.shape[-1])
    numbers = np.arange(256)
    tables = values[numbers & 0xF], values[numbers >> 4]
    at_a_time = max(1, _BLOCK // rows.shape[1])
    for first in range(0, len(rows), at_a_time):
        part = slice(first, first + at_a_time)
        for half, table in enumerate(tables):
            target[part, half] = np.take(table, rows[part], mode="clip")
    halves = elements.reshape(*turned.shape[:-2], -1, turned.shape[-1])
    return np.ascontiguousarray(halves[..., skipped : skipped + count, :])
