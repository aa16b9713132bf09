"""Judge the values of a checkpoint's tensors: NaN, zeros, copies, norms far from their kin (`value_findings`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.mapping.tensor_kinds import TensorKind, kin_of, kind_of
from reshard_mpi.quantization.layouts import FLOATS_8_BIT
from reshard_mpi.quantization.weights import QuantizedWeight
from reshard_mpi.soundness.content import TensorContent, bound_of
from reshard_mpi.soundness.findings import Finding, FindingKind
from reshard_mpi.text import counted

# Where an element of a tensor lies, or its first one (None): the source rank, and the path of the file.
PlaceOf = Callable[[str, tuple[int, ...] | None], tuple[int | None, str]]
# The quantized weight that a tensor is stored for, and its role, by its name.
Roles = Mapping[str, tuple[QuantizedWeight, str]]

_WEIGHTS = (TensorKind.MODEL, TensorKind.COPY)
# A smaller share of subnormal values is usual in float16.
_SUBNORMAL_SHARE = 0.1
# Fewer tensors do not tell what is usual among their kin. A norm is unusual that is ten times the median, or a tenth,
# and eight times as far from it as the middle one is.
_LEAST_KIN, _FAR, _SPREADS = 4, 10.0, 8.0
# No step of a training doubles the norm of a weight.
_CHANGED = 2.0
# Types of weights that are quantised. Masks and positions, which layers have alike, are of others.
_QUANTISED = frozenset(("int8", "int4", "uint8", "hifloat8"))
_ADJUSTABLE = frozenset(dtype.name for dtype in FLOATS) | {"complex64", "complex128"}


def value_findings(contents: Sequence[TensorContent], place: PlaceOf, roles: Roles) -> Iterator[Finding]:
    """Yield the findings on the values of tensors.

    Args:
        contents: of all tensors of the checkpoint.
    """
    shapes = {content.name: content.shape for content in contents}
    alike: defaultdict[tuple[object, ...], list[TensorContent]] = defaultdict(list)
    kin: defaultdict[tuple[object, ...], list[TensorContent]] = defaultdict(list)
    for content in contents:
        weight, role = roles.get(content.name, (None, ""))
        yield from _of_one(content, place, role)
        if weight is not None and (flaw := _flaw_of_companion(content, weight, role, shapes)):
            yield Finding(FindingKind.SCALE, content.name, *place(content.name, None), flaw)
        kind = kind_of(content.name)
        if not _is_matrix(content) or content.is_constant or role not in _HOLDS_ELEMENTS:
            continue
        of_kin = kin_of(content.name)
        if of_kin != content.name and kind is not TensorKind.OTHER and (role or _may_not_be_a_copy(content)):
            alike[of_kin, content.key].append(content)
        if kind is TensorKind.MODEL and not role and content.dtype in _ADJUSTABLE and content.first_bad is None:
            kin[of_kin, content.shape, content.dtype].append(content)
    for same in alike.values():
        first, *others = same
        for content in others:
            detail = f"holds the same as {first.name!r}, which is of another layer or expert"
            yield Finding(FindingKind.COPY, content.name, *place(content.name, None), detail)
    for members in kin.values():
        yield from _far_from_kin(members, place)


def changed_norms(
    contents: Iterable[TensorContent], previous: Mapping[str, TensorContent], place: PlaceOf, roles: Roles
) -> Iterator[Finding]:
    """Yield the weights whose norm is far from the one in the previous checkpoint.

    Args:
        roles: of the tensors of quantized weights in either. Only a scale's norm is one of the weight's size.
    """
    for content in contents:
        before = previous.get(content.name)
        _, role = roles.get(content.name, (None, ""))
        if role and (
            role != "scale" or before is None or (before.shape, before.dtype) != (content.shape, content.dtype)
        ):
            continue
        if role and content.dtype not in _ADJUSTABLE:
            continue
        if before is None or kind_of(content.name) not in _WEIGHTS or not _is_matrix(content):
            continue
        if before.norm and content.norm and abs(math.log(content.norm / before.norm)) > math.log(_CHANGED):
            detail = f"its norm is {content.norm:.4g}, and was {before.norm:.4g} in the previous checkpoint"
            yield Finding(FindingKind.CHANGE, content.name, *place(content.name, None), detail)


def _of_one(content: TensorContent, place: PlaceOf, role: str) -> Iterator[Finding]:
    """Yield the findings on one tensor by itself. role: in a quantized weight, or empty."""
    name, values = content.name, content.parts
    bad = content.first_bad
    element = None if bad is None else _index(bad, content.shape)
    for kind, count, what in (
        (FindingKind.NAN, content.nan, "NaN"),
        (FindingKind.INFINITE, content.infinite, "infinite"),
    ):
        if count:
            of_all = f"{count} of {counted(values, 'value')} {'is' if count == 1 else 'are'} {what}"
            first = f", the first bad one at {list(element or ())}" if content.shape else ""
            yield Finding(kind, name, *place(name, element), f"{of_all}{first}")
    bound = bound_of(content.dtype)
    if content.magnitude > bound and content.size > 1:
        detail = f"a magnitude of {content.magnitude:.4g}, and no value of a training is beyond {bound:.4g}"
        detail += f"; the first bad value is at {list(element or ())}"
        yield Finding(FindingKind.BEYOND, name, *place(name, element), detail)
    kind_of_tensor = kind_of(name)
    if (content.dtype not in _ADJUSTABLE and not role) or role not in _HOLDS_ELEMENTS:
        return
    if not _is_matrix(content) or kind_of_tensor in _UNJUDGED:
        return
    is_weight, (rows, first_row, last_row) = kind_of_tensor in _WEIGHTS, content.zero_rows
    if is_weight and content.zeros == values:
        yield Finding(FindingKind.ZERO, name, *place(name, None), f"all {counted(values, 'value')} are zero")
    elif is_weight and content.is_constant and content.least is not None:
        detail = f"all {counted(values, 'value')} are {content.least}"
        yield Finding(FindingKind.CONSTANT, name, *place(name, None), detail)
    elif rows and (is_weight or rows == content.shape[0]):
        which = f"row {first_row}" if rows == 1 else f"the first {first_row}, the last {last_row}"
        detail = f"{rows} of {counted(content.shape[0], 'row')} {'is' if rows == 1 else 'are'} all zero: {which}"
        yield Finding(FindingKind.ROWS, name, *place(name, (first_row, *(0 for _ in content.shape[1:]))), detail)
    share = content.subnormal / values
    if is_weight and share >= _SUBNORMAL_SHARE and BY_NAME[content.dtype].part_bytes > 1:
        detail = f"{share:.0%} of its values are subnormal in {content.dtype}"
        yield Finding(FindingKind.SUBNORMAL, name, *place(name, None), detail)


_UNJUDGED = (TensorKind.STEP, TensorKind.OTHER)
# The roles of tensors that hold elements of weights: of quantized ones, and of others.
_HOLDS_ELEMENTS = ("stored", "")
# Scales of these are quotients of magnitudes; integers may be negated by theirs.
_POSITIVE_SCALES = ("fp8", "nvfp4", "mxfp4")
_NAN_EXPONENT = 255


def _flaw_of_companion(
    content: TensorContent, weight: QuantizedWeight, role: str, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the flaw of a companion of a quantized weight in words; empty: it has none.

    NaN and infinities are found in all tensors.
    """
    least, greatest, of_all = content.least, content.greatest, counted(content.parts, "scale")
    if least is None or greatest is None:
        return ""
    if role in ("scale", "global_scale"):
        if content.dtype == "uint8":
            return "has 255, which is NaN as the exponent of a scale" if greatest == _NAN_EXPONENT else ""
        if least < 0 and weight.scheme.kind in _POSITIVE_SCALES:
            return f"the least of {of_all} is {least:.4g}, and none is negative"
        # What is small becomes zero where scales are of 8 bits too.
        if content.zeros and (content.dtype not in FLOATS_8_BIT or content.zeros == content.parts):
            return (
                f"{content.zeros} of {of_all} {'is' if content.zeros == 1 else 'are'} zero, and so is what they scale"
            )
    scale = weight.companion("scale")
    if role == "group_index" and scale is not None and scale.name in shapes:
        groups = shapes[scale.name][-2 if weight.scheme.kind == "gptq" else -1]
        is_unused = least == greatest == -1  # compressed-tensors writes an index before it is known
        if not is_unused and (least < 0 or greatest >= groups):
            return f"numbers from {least} to {greatest}, and there are {counted(groups, 'group')}"
    return ""


def _far_from_kin(members: Sequence[TensorContent], place: PlaceOf) -> Iterator[Finding]:
    norms = {content.name: math.log(content.norm) for content in members if 0 < content.norm < math.inf}
    if len(norms) < _LEAST_KIN:
        return
    middle = median(norms.values())
    spread = median(abs(norm - middle) for norm in norms.values())
    for name, norm in norms.items():
        if abs(norm - middle) > max(math.log(_FAR), _SPREADS * spread):
            detail = f"its norm is {math.exp(norm):.4g}, usual of {len(norms)} of its kind is {math.exp(middle):.4g}"
            yield Finding(FindingKind.NORM, name, *place(name, None), detail)


def _is_matrix(content: TensorContent) -> bool:
    """Tell whether a tensor has more than one dimension: norms and biases may be constant, and alike."""
    return sum(length > 1 for length in content.shape) > 1


def _may_not_be_a_copy(content: TensorContent) -> bool:
    is_mask = content.dtype == "uint8" and content.greatest is not None and content.greatest <= 1
    return content.dtype in _ADJUSTABLE or (content.dtype in _QUANTISED and not is_mask)


def _index(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element by its number in row-major order."""
    index = []
    for length in reversed(shape):
        number, place = divmod(number, length)
        index.append(place)
    return tuple(reversed(index))
