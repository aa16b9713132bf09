"""Understand calls of public functions: requests and progress (`request_of`), indices of tensors (`chosen_of`).

Each call is a run in this process or its workers (`run`), whose errors a user can act on (`public`). An index of a
tensor means what it means to numpy.
"""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reshard_mpi import formats
from reshard_mpi.errors import OutOfRangeError, UsageError, WrongTypeError, as_reshard_error, told, wrong_type
from reshard_mpi.filesystem.source_files import look_again
from reshard_mpi.options import EXCLUSIVE, OPTIONS, check_number, check_path
from reshard_mpi.processes import memory_scopes
from reshard_mpi.processes.comm import Comm, MPIComm, SerialComm, require_same_options
from reshard_mpi.runs.monitor import monitored
from reshard_mpi.runs.outcome import Outcome, Report
from reshard_mpi.runs.progress import Display, Progress, RunStatus, Words, log, log_warning
from reshard_mpi.runs.request import Request, Task
from reshard_mpi.runs.workers import run_with_workers

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# The least time between two calls of the caller's progress function.
_INTERVAL_SECONDS = 0.5

OnProgress = Callable[[RunStatus], object]
# What selects elements: an integer or a slice for each dimension, or `...` for several.
Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]

_ALL, _BACKWARDS = slice(None), slice(None, None, -1)


class CallbackDisplay(Display):
    """Tells a caller's function the progress. If that raises, the error is logged, and it is not called again."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        super().__init__()
        self._on_progress = on_progress
        self._next_seconds = 0.0

    def update(self, status: RunStatus) -> None:
        if status.seconds >= self._next_seconds:
            self._next_seconds = status.seconds + _INTERVAL_SECONDS
            self._tell(status)

    def say(self, text: str) -> None:
        log_warning(text)

    def close(self, status: RunStatus) -> None:
        self._tell(status)

    def _tell(self, status: RunStatus) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(status)
        except Exception:
            import logging

            logging.getLogger("reshard_mpi").exception("the function that is told the progress has failed")
            self._on_progress = None


def shown_to(on_progress: OnProgress | None, comm: Comm) -> AbstractContextManager[Progress]:
    """Return a context with the progress of a run; a caller's function is told of it until it ends.

    Every process must call this. The function is called on rank 0, if it is given there.
    """
    if not any(comm.allgather(on_progress is not None)):
        return nullcontext(Progress())
    return monitored(Words() if comm.rank else CallbackDisplay(on_progress), comm)


PathLike = str | os.PathLike[str]

# What every call needs is loaded with the functions, so that the first call takes no longer than others.
memory_scopes.prepare()
Task.CONVERT.load()


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function public: all that it raises is a ReshardError, also where the file system or memory fails."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (OSError, MemoryError) as error:
            raise as_reshard_error(error) from error

    return call


def request_of(arguments: Mapping[str, Any], **called: str) -> Request:
    """Build a request from the arguments of a public function; arguments that no run uses are ignored.

    A new call looks anew at what lies in object stores.

    Args:
        called: what the function calls the arguments for some fields of the request, where it has other names for them.

    Raises UsageError for wrong values, and for arguments that exclude each other.
    """
    look_again()
    checks: dict[str, Callable[[Any, str], Any]] = {name: option.check for name, option in OPTIONS.items()}
    given: dict[str, Any] = {"source": "", "target": ""}
    for field, check in {"source": check_path, "target": check_path, **checks}.items():
        name = called.get(field, field)
        if name in arguments and field in Request._fields:
            given[field] = check(arguments[name], name)
    request = Request.of(given)
    for one, other in EXCLUSIVE:
        if all(getattr(request, field) not in (False, None) for field in (one, other)):
            raise UsageError(f"{one} and {other} exclude each other", expected="one of them", got="both")
    return request


def run(
    request: Request,
    processes: int,
    communicator: Any,
    task: Task = Task.CONVERT,
    *,
    progress: OnProgress | None = None,
) -> Report:
    """Do the work that a request asks for, in local processes or with a communicator; log its notes and warnings.

    Args:
        progress: the caller's function that is told the progress.

    Raises the error that refused the run, or one for what has failed in it.
    """
    begin = time.monotonic()
    outcome = outcome_of(request, processes, communicator, task, progress=progress)
    return Report.of(outcome, time.monotonic() - begin)


def outcome_of(
    request: Request, processes: int, communicator: Any, task: Task, *, progress: OnProgress | None = None
) -> Outcome:
    """Do as `run`, and return all that has come out."""
    comm = SerialComm() if communicator is None else MPIComm(communicator)
    require_same_options(comm, {"task": task.name, **request._asdict()})
    with shown_to(progress, comm) as shown:
        if processes > 1 and communicator is None:
            outcome = run_with_workers(request, processes, shown, task)
        else:
            outcome = task.run(request, comm, shown)
    if communicator is None or communicator.Get_rank() == 0:
        log(outcome.notes, (*outcome.warnings, *map(told, formats.left_out().values())))
    if task is Task.CONVERT and request.target_file is None and request.files is None:
        outcome.raise_failures()
    elif outcome.failures:
        first = outcome.failures[0].named(alone=True)
        if len(outcome.failures) > 1:
            first.problem += f" (and {len(outcome.failures) - 1} more found)"
        raise first
    return outcome


def check_files(files: object, name: str) -> dict[int, str]:
    """Return the paths that the argument `name` lists by rank. Raises UsageError if it is no such map."""
    if not isinstance(files, Mapping):
        raise wrong_type(name, "a dict from rank to checkpoint file", files)
    by_rank = {}
    for rank, path in files.items():
        number = check_number(rank, f"a rank in {name}")
        by_rank[number] = check_path(path, f"the file of rank {number} in {name}")
    return by_rank


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
    has_ellipsis = index is ... or (type(index) is tuple and any(each is ... for each in index))
    if view.count(_ALL) == len(view) and (view or has_ellipsis):
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
