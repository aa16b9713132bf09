"""Understand an index of a tensor as numpy does (`chosen_of`), and check an array to read into (`require_fitting`)."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from reshard_mpi.errors import OutOfRangeError, UsageError, WrongTypeError, wrong_type

if TYPE_CHECKING:
    import numpy as np

# What selects elements: an integer or a slice for each dimension, or `...` for several.
Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]

_ALL, _BACKWARDS = slice(None), slice(None, None, -1)


def positions(index: Index, shape: tuple[int, ...], name: str) -> tuple[int | range, ...]:
    """Return the position, or the positions in order, that an index has in each dimension of a tensor.

    Args:
        name: of the tensor, for errors.

    Raises UsageError for an index that is none, OutOfRangeError for one beyond the end.
    """
    given = index if isinstance(index, tuple) else (index,)
    ellipses = [number for number, each in enumerate(given) if each is ...]
    missing = len(shape) - len(given) + len(ellipses)
    if len(ellipses) > 1:
        raise UsageError(
            "an index has `...` more than once",
            expected="integers, slices and one `...`",
            got=repr(index).replace("Ellipsis", "..."),
            where=name,
        )
    if missing < 0:
        raise OutOfRangeError(
            "an index has too many dimensions", expected=f"{len(shape)} at most", got=repr(index), where=name
        )
    where = ellipses[0] if ellipses else len(given)
    every = (*given[:where], *(_ALL,) * missing, *given[where + len(ellipses) :])
    return tuple(
        _range(each, length, name) if type(each) is slice else _integer(each, length, name)
        for each, length in zip(every, shape)
    )


def chosen_of(
    index: Index, shape: tuple[int, ...], name: str
) -> tuple[list[range], tuple[int | slice | EllipsisType, ...] | None]:
    """Return the chosen positions in each dimension, ascending, and the view of these elements that the index means.

    The view turns slices of negative steps, and leaves out dimensions of integers; None: all as it is. Raises as
    `positions` does.
    """
    # One row, several, or a slice of each dimension are by far the most frequent.
    if type(index) is int and shape:
        row = _integer(index, shape[0], name)
        return [range(row, row + 1), *map(range, shape[1:])], (0,)
    if type(index) is slice and shape:
        rows = _range(index, shape[0], name)
        if rows.step > 0:
            return [rows, *map(range, shape[1:])], None
    if type(index) is tuple and shape:
        slices = [each for each in index if isinstance(each, slice)]
        if len(slices) == len(index) == len(shape):
            ranges = [_range(each, length, name) for each, length in zip(slices, shape)]
            if all(each.step > 0 for each in ranges):
                return ranges, None
    chosen: list[range] = []
    view: list[int | slice] = []
    for each in positions(index, shape, name):
        if isinstance(each, int):
            chosen.append(range(each, each + 1))
            view.append(0)
        elif each.step > 0:
            chosen.append(each)
            view.append(_ALL)
        else:
            chosen.append(each[::-1])
            view.append(_BACKWARDS)
    if view and view.count(_ALL) == len(view):
        return chosen, None
    has_ellipsis = index is ... or (type(index) is tuple and any(each is ... for each in index))
    if not view and has_ellipsis:
        return chosen, None
    # As in numpy, an index with `...` has an array for its result, be it one of no dimensions.
    return chosen, (*view, ...) if has_ellipsis else tuple(view)


def _range(chosen: slice, length: int, name: str) -> range:
    try:
        return range(*chosen.indices(length))
    except (TypeError, ValueError) as error:
        raise WrongTypeError("a slice has a wrong bound", got=f"{chosen}: {error}", where=name) from None


def _integer(index: object, length: int, name: str) -> int:
    """Return an index counted from the start. Raises UsageError for anything else, OutOfRangeError beyond the end."""
    try:
        if isinstance(index, bool):
            raise TypeError
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(f"an index of {name}", "integers, slices and one `...`", index) from None
    if not -length <= number < length:
        raise OutOfRangeError(
            "an index is out of range", expected=f"{-length} to {length - 1}", got=str(number), where=name
        )
    return number % length


def require_fitting(array: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> None:
    """Raise UsageError if elements of a tensor, of this type and shape, cannot be read into an array.

    Args:
        name: of the tensor, for errors.
    """
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise wrong_type("array", "an array of numpy", array)
    if array.dtype != dtype or array.shape != shape:
        raise UsageError(
            "the array does not fit what is read into it",
            expected=f"{dtype.name} {list(shape)}",
            got=f"{array.dtype.name} {list(array.shape)}",
            where=name,
            remedy="" if array.dtype == dtype else "open the checkpoint with dtype=, which converts",
        )
    if not array.flags.writeable:
        raise UsageError(
            "the array cannot be written to",
            expected="a writable array",
            got="one that is read-only",
            where=name,
            remedy="make a copy of it",
        )
    if _overlaps(array):
        raise UsageError(
            "elements of the array share memory",
            expected="a place of its own for each element",
            got=f"shape {list(array.shape)} with strides of {list(array.strides)} bytes",
            where=name,
            remedy="make a copy of it",
        )


def _overlaps(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether elements of an array may share memory."""
    if array.flags.c_contiguous:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(array.strides, array.shape)):
        if length > 1 and stride < reach:
            return array.size > 0
        reach += (length - 1) * stride
    return False
