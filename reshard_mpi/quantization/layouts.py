"""Know which tensors each scheme stores for a weight, and fit them to one another (`layout_of`, `fit`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from reshard_mpi.quantization.weights import Relation, Scheme

# The axes of a logical weight: output features, and input features.
ROWS, COLUMNS = 0, 1

FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
FLOATS_8_BIT = frozenset(("float8_e4m3fn", "float8_e5m2"))
_BYTES, _WORDS, _ONE = frozenset(("uint8",)), frozenset(("int32",)), Fraction(1)
# A power of two is stored as its exponent plus 127.
_FLOATS_OR_POWERS = FLOATS | _BYTES
_INTEGERS = frozenset(("int8", "uint8", "int32"))


class StoredAxis(NamedTuple):
    """A dimension of a stored tensor. Example, 8 elements of a row in a word: `StoredAxis(COLUMNS, Fraction(1, 8))`."""

    of: int | None  # of the logical weight; None: of neither, and `ratio` is its length
    ratio: Fraction = _ONE  # stored elements for each element of the weight
    tied: bool = True  # whether it is cut where the weight is cut


class SchemePart(NamedTuple):
    """One of the tensors that a scheme stores for a weight."""

    role: str  # a companion's (no two in a layout are alike), or "stored"
    names: tuple[str, ...]  # how it may be called, behind the name of the module
    dtypes: frozenset[str]
    # Dimensions of length 1 may stand between them, and the dimensions of stacked experts before them.
    axes: tuple[StoredAxis, ...] = ()
    required: bool = True


class SchemeLayout(NamedTuple):
    """The tensors that a scheme stores for a weight."""

    stored: SchemePart  # the one that holds the weight's elements
    parts: tuple[SchemePart, ...]
    logical_name: str  # of the weight, behind the name of the module
    transposed: bool = False  # whether columns go before rows once it is dequantized


@lru_cache(maxsize=256)
def layout_of(scheme: Scheme) -> SchemeLayout:
    """Return which tensors a scheme stores for each weight; it must not be `whole`."""
    rows, columns = scheme.block
    packed = Fraction(scheme.bits, 32)
    by_rows = (StoredAxis(ROWS, Fraction(1, rows)),) if rows else ()
    # A column may be of any group if an index says its group: then all groups go with every part.
    by_columns = (StoredAxis(COLUMNS, Fraction(1, columns), not scheme.act_order),) if columns else ()
    scales = (*by_rows, *by_columns)
    zeros_required = not scheme.symmetric
    index = StoredAxis(COLUMNS)
    if scheme.kind in ("gptq", "awq"):
        is_gptq = scheme.kind == "gptq"
        # Dimension 0 is of columns, which gptq packs; awq packs rows.
        words = (StoredAxis(COLUMNS, packed if is_gptq else _ONE), StoredAxis(ROWS, _ONE if is_gptq else packed))
        groups = by_columns or (StoredAxis(None),)  # one for all columns
        # gptq stores the zero points of symmetric weights too
        zeros_required = zeros_required or is_gptq
        parts = [
            SchemePart("scale", ("scales",), FLOATS, (*groups, *by_rows)),
            SchemePart("zeros", ("qzeros",), _WORDS, (*groups, StoredAxis(ROWS, packed)), zeros_required),
        ]
        if is_gptq:
            parts.append(SchemePart("group_index", ("g_idx",), _WORDS, (index,), scheme.act_order))
        return SchemeLayout(SchemePart("stored", ("qweight",), _WORDS, words), tuple(parts), "weight")
    if scheme.kind == "packed":
        zeros = (StoredAxis(ROWS, packed), *by_columns) if rows else ()
        return SchemeLayout(
            SchemePart("stored", ("weight_packed",), _WORDS, (StoredAxis(ROWS), StoredAxis(COLUMNS, packed))),
            (
                SchemePart("scale", ("weight_scale",), FLOATS, scales),
                SchemePart("zeros", ("weight_zero_point",), _WORDS if rows else _INTEGERS, zeros, zeros_required),
                SchemePart("group_index", ("weight_g_idx",), _WORDS, (index,), scheme.act_order),
                SchemePart("shape", ("weight_shape",), frozenset(("int64", "int32")), required=False),
            ),
            "weight",
        )
    if scheme.name == "mxfp4":
        # gpt-oss: 16 bytes for each block of 32 columns
        blocks = (StoredAxis(ROWS), *by_columns)
        stored = SchemePart("stored", ("_blocks",), _BYTES, (*blocks, StoredAxis(None, Fraction(16))))
        return SchemeLayout(stored, (SchemePart("scale", ("_scales",), _BYTES, blocks),), "", transposed=True)
    if scheme.kind in ("nvfp4", "mxfp4"):
        is_compressed = scheme.name.endswith("pack-quantized")
        halves = (StoredAxis(ROWS), StoredAxis(COLUMNS, Fraction(1, 2)))
        stored = SchemePart("stored", ("weight_packed" if is_compressed else "weight",), _BYTES, halves)
        dtypes = _BYTES if scheme.kind == "mxfp4" else FLOATS_8_BIT
        parts = [SchemePart("scale", ("weight_scale",), dtypes, scales)]
        if scheme.kind == "nvfp4":
            name = "weight_global_scale" if is_compressed else "weight_scale_2"
            parts.append(SchemePart("global_scale", (name,), FLOATS))
            parts.append(SchemePart("carried", ("pre_quant_scale",), FLOATS, (index,), required=False))
        return SchemeLayout(stored, tuple(parts), "weight")
    names = ("weight_scale_inv", "weight_scale") if scheme.name == "fp8" else ("weight_scale",)
    if scheme.kind == "int8":
        dtypes, scale_dtypes, zero_dtypes = frozenset(("int8",)), FLOATS, _INTEGERS
    else:
        dtypes, scale_dtypes, zero_dtypes = FLOATS_8_BIT, _FLOATS_OR_POWERS, _INTEGERS | FLOATS | FLOATS_8_BIT
    return SchemeLayout(
        SchemePart("stored", ("weight",), dtypes, (StoredAxis(ROWS), StoredAxis(COLUMNS))),
        (
            SchemePart("scale", names, scale_dtypes, scales),
            SchemePart("zeros", ("weight_zero_point",), zero_dtypes, scales, zeros_required),
        ),
        "weight",
    )


class Misfit(Exception):
    """A tensor of a weight has not the shape that the scheme and the weight's shape give it.

    Attributes:
        role: of the tensor.
        expected: in words.
    """

    def __init__(self, role: str, expected: str) -> None:
        super().__init__(expected)
        self.role, self.expected = role, expected


class Fit(NamedTuple):
    """How the tensors of a weight belong together."""

    shape: tuple[int, ...]  # of the logical weight
    grain: tuple[int, ...]
    dims: Mapping[str, tuple[Relation | None, ...]]  # of its companions, by role


def fit(
    layout: SchemeLayout,
    stored: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    stated: Sequence[int] | None,
) -> Fit:
    """Return how the tensors of a weight belong together.

    Args:
        stored: the shape of the tensor that holds the elements.
        shapes: those of its companions, by role.
        stated: the shape of the logical weight, if a tensor of the checkpoint says it.

    Raises Misfit if a shape is not what it must be.
    """
    axes = layout.stored.axes
    experts = stored[: max(0, len(stored) - len(axes))]
    own = stored[len(experts) :]
    fixed = [length for axis, length in zip(axes, own) if axis.of is None and length != axis.ratio]
    if len(own) < len(axes) or fixed:
        sizes = ", ".join(_axis_name(axis) for axis in axes)
        raise Misfit("stored", f"{len(axes)} dimensions ({sizes}), or further ones before them")
    lengths = _logical_lengths(axes, own, stated)
    grains = [1, 1]
    for axis in (*axes, *(axis for part in layout.parts if part.role in shapes for axis in part.axes)):
        if axis.of is not None and axis.tied:
            grains[axis.of] = math.lcm(grains[axis.of], axis.ratio.denominator)
    grain = [1] * len(experts) + [
        own[number] if axis.of is None else int(grains[axis.of] * axis.ratio) for number, axis in enumerate(axes)
    ]
    dims = {}
    for part in (part for part in layout.parts if part.role in shapes):
        shape = shapes[part.role]
        relations = _relations(part, shape, experts, axes, lengths)
        for number, (relation, length) in enumerate(zip(relations, shape)):
            # Where words are filled up beyond the last group, no place in one follows from that in the other.
            if relation is not None and relation.length(stored[relation.dim]) != length:
                grain[relation.dim] = max(1, stored[relation.dim])
                relations[number] = None
        dims[part.role] = tuple(relations)
    rows, columns = lengths
    shape = (*experts, columns, rows) if layout.transposed else (*experts, rows, columns)
    return Fit(shape, tuple(grain), dims)


def _axis_name(axis: StoredAxis) -> str:
    if axis.of is None:
        return str(axis.ratio)
    name, ratio = ("rows", "columns")[axis.of], axis.ratio
    if ratio.numerator > 1:
        return f"{name} x {ratio}"
    return name if ratio == 1 else f"{name} / {ratio.denominator}"


def _logical_lengths(axes: Sequence[StoredAxis], own: Sequence[int], stated: Sequence[int] | None) -> tuple[int, int]:
    """Return how many rows and columns the weight has."""
    lengths = [0, 0]
    for axis, length in zip(axes, own):
        if axis.of is None:
            continue
        lengths[axis.of] = math.floor(length / axis.ratio)
        if stated is not None and len(stated) >= 2:
            lengths[axis.of] = stated[axis.of - 2]
        if lengths[axis.of] < 0 or math.ceil(lengths[axis.of] * axis.ratio) != length:
            number = f"{math.ceil(lengths[axis.of] * axis.ratio)} for {lengths[axis.of]} of the weight"
            raise Misfit("stored", f"{_axis_name(axis)}: {number}")
    return lengths[ROWS], lengths[COLUMNS]


class _WantedDimension(NamedTuple):
    """A dimension that a companion must have."""

    length: int
    relation: Relation | None = None
    # Where an index tells the groups, a part has all of them, also of columns that it does not have.
    has_others: bool = False

    def fits(self, length: int) -> bool:
        return length == self.length or (self.has_others and length > self.length)


def _wanted_of(
    axis: StoredAxis, experts: int, axes: Sequence[StoredAxis], lengths: tuple[int, int]
) -> _WantedDimension:
    """Return the dimension of a companion for one of its axes. experts: how many dimensions of these are before it."""
    if axis.of is None:
        return _WantedDimension(int(axis.ratio))
    dim = next(number for number, each in enumerate(axes) if each.of == axis.of)
    ratio = axis.ratio / axes[dim].ratio
    relation = Relation(experts + dim, ratio.denominator, ratio.numerator) if axis.tied else None
    return _WantedDimension(math.ceil(lengths[axis.of] * axis.ratio), relation, not axis.tied)


def _matched(shape: Sequence[int], wanted: Sequence[_WantedDimension]) -> list[Relation | None] | None:
    """Return the relations of the dimensions of a shape, where further ones have length 1; None if some do not fit."""
    relations: list[Relation | None] = []
    remaining = list(wanted)
    for length in shape:
        if remaining and remaining[0].fits(length):
            relations.append(remaining.pop(0).relation)
        elif length == 1:
            relations.append(None)
        else:
            return None
    return None if remaining else relations


def _relations(
    part: SchemePart,
    shape: tuple[int, ...],
    experts: tuple[int, ...],
    axes: Sequence[StoredAxis],
    lengths: tuple[int, int],
) -> list[Relation | None]:
    """Return how a companion's dimensions belong to the stored weight's. Raises Misfit if one does not."""
    if part.role == "shape":
        stacked = [Relation(number, 1) for number in range(len(experts))] if len(shape) > len(experts) else []
        return [*stacked, *[None] * (len(shape) - len(stacked))]
    ahead = [_WantedDimension(length, Relation(number, 1)) for number, length in enumerate(experts)]
    behind = [_wanted_of(axis, len(experts), axes, lengths) for axis in part.axes]
    # One for all experts is possible where it is one for all elements, or what is only carried.
    for wanted in ([*ahead, *behind], behind) if not part.axes or part.role == "carried" else ([*ahead, *behind],):
        relations = _matched(shape, wanted)
        if relations is not None:
            return relations
    expected = [each.length for each in (*ahead, *behind)]
    sizes = [_axis_name(axis) for axis in part.axes]
    scaled = f" ({', '.join(sizes)})" if sizes else ""
    raise Misfit(part.role, f"{expected}{scaled} for {list(lengths)} rows and columns of the weight")
