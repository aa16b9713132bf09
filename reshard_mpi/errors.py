"""Define the errors a user can meet, with their exit codes (`ReshardError`).

Errors for which MindSpore 2.10 raises ValueError or TypeError derive from that too, so programs that catch it go on
working. (Where MindSpore raises NotADirectoryError, this is a TargetError.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from reshard_mpi.text import beginning, lines, one_line

if TYPE_CHECKING:
    from pathlib import Path


class ReshardError(Exception):
    """A problem that a user can act on: the problem, the expected and the actual state, the place, the remedy.

    Its text has a line for each of these, with unprintable characters escaped. It can be pickled, so an error of one
    rank can be shown on every rank.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, problem: str, *, expected: str = "", got: str = "", where: str = "", remedy: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.got = got
        self.where = where
        self.remedy = remedy
        super().__init__(problem)

    def __str__(self) -> str:
        # The problem of a TransformError holds the lines of another error, which are escaped already.
        problem = lines(self.problem) if isinstance(self, TransformError) else one_line(self.problem)
        parts = (("expected", self.expected), ("got", self.got), ("where", self.where), ("what to do", self.remedy))
        return "\n".join([problem, *(f"  {label}: {one_line(text)}" for label, text in parts if text)])

    @property
    def parts(self) -> tuple[str, str, str, str, str]:
        """All that it says, from which `of_parts` makes another one."""
        return self.problem, self.expected, self.got, self.where, self.remedy

    def __reduce__(self) -> tuple[object, ...]:
        return of_parts, (type(self), *self.parts)


E = TypeVar("E", bound=ReshardError)


def of_parts(kind: type[E], problem: str, expected: str, got: str, where: str, remedy: str) -> E:
    """Return an error of this kind that says what another one says."""
    return kind(problem, expected=expected, got=got, where=where, remedy=remedy)


class UsageError(ReshardError, ValueError):
    """A wrong call: an unknown value, a rank out of range, options that exclude each other."""

    exit_code = 2


class WrongTypeError(UsageError, TypeError):
    """A wrong call: an argument of a type that it cannot have."""


class UnknownTensorError(UsageError, KeyError):
    """A wrong call: a tensor that the checkpoint does not have."""


class OutOfRangeError(UsageError, IndexError):
    """A wrong call: an index that a tensor does not have."""


class SourceError(ReshardError, ValueError):
    """The source checkpoint does not exist, is ambiguous, or its shards do not belong together."""


# What helps with a file that is not what it should be, where nothing better is known.
_RESTORE = "copy the file again, or have the checkpoint saved again; reshard-mpi inspect says what can be read"


class ShardError(ReshardError, ValueError):
    """One shard file cannot be read: empty, truncated, damaged, encrypted, or of an unknown kind."""

    def __init__(self, problem: str, *, expected: str = "", got: str = "", where: str = "", remedy: str = "") -> None:
        super().__init__(problem, expected=expected, got=got, where=where, remedy=remedy or _RESTORE)


class ChecksumError(ShardError):
    """One shard file does not fit the checksum that it has of its own bytes."""


class StrategyError(ReshardError, ValueError):
    """A strategy file or spec cannot be read, or says something impossible."""


class MapError(ReshardError, ValueError):
    """A map between two models cannot be read, is not one-to-one, or does not fit the checkpoint."""


class LayoutError(ReshardError, ValueError):
    """A placement does not fit its mesh, or a tensor's shape does not fit its placement."""


class CoverageError(ReshardError, ValueError):
    """Some part of a target tensor has no source."""


class DisagreementError(ReshardError):
    """Shards that should say the same (shape, type, step, replicated bytes) do not."""


class TargetError(ReshardError):
    """The target cannot be written: it is the source, holds another run, is finished, or is being written."""


class StoreError(ReshardError):
    """An object store refuses a request: for its credentials, its bucket, its region, a right, a clock."""


class StoreUnreachableError(StoreError):
    """An object store does not answer, or only with errors that pass: the same command may succeed later."""

    exit_code = 4


class TransformError(ReshardError):
    """The run could not complete: targets failed, are incomplete, or a process died."""

    exit_code = 4


class DamageError(ReshardError):
    """A shard does not hold what its own sums, or the checkpoint that it was made from, say it should."""

    exit_code = 4


class DifferenceError(ReshardError):
    """Two checkpoints that were compared do not hold the same tensors."""

    exit_code = 4


class BudgetError(ReshardError):
    """The work can never fit the memory that is allowed."""

    exit_code = 5


_MAX_QUOTED = 80


def wrong_type(name: str, expected: str, value: object) -> WrongTypeError:
    """Return the error for an argument `name` of a type that it cannot have."""
    got = f"{type(value).__name__}: {beginning(repr(value), _MAX_QUOTED)}"
    return WrongTypeError(f"{name} is of a wrong type", expected=expected, got=got)


def told(error: Exception) -> str:
    """Return an error in one line: problem, expected, got."""
    reshard_error = as_reshard_error(error)
    parts = (("expected", reshard_error.expected), ("got", reshard_error.got))
    return ", ".join([reshard_error.problem, *(f"{label} {text}" for label, text in parts if text)])


def as_reshard_error(error: Exception, path: Path | None = None) -> ReshardError:
    """Return a ReshardError, OSError or MemoryError as a ReshardError, which can be sent between processes.

    Args:
        path: the file, if `error` names none.
    """
    if isinstance(error, ReshardError):
        return error
    if isinstance(error, OSError):
        names = (error.filename, error.filename2) if error.filename is not None else (path,)
        where = " and ".join(str(name) for name in names if name is not None)
        return ReshardError("the file system refused", got=f"{error.strerror or error}", where=where)
    return ReshardError("out of memory", got=type(error).__name__, remedy="run fewer processes at once")
