"""The errors a user can meet. Every one derives from ReshardError and carries the exit code of the command line.

Those for mistakes that MindSpore 2.10 meets with a ValueError, or a TypeError, are such errors too, so programs that
catch these go on working. (Where it raises NotADirectoryError, ours is a TargetError.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from reshard_mpi.text import lines, one_line

if TYPE_CHECKING:
    from pathlib import Path


class ReshardError(Exception):
    """A problem a user can act on, told as: what is wrong, expected, got, where, what to do.

    As text it has a line for each of these, with all that is not printable escaped. Instances survive pickling, so an
    error raised on one rank can be shown on every rank.
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
        # Of several targets the first to fail is told in its own lines, in which nothing is left to be escaped.
        problem = lines(self.problem) if isinstance(self, TransformError) else one_line(self.problem)
        parts = (("expected", self.expected), ("got", self.got), ("where", self.where), ("what to do", self.remedy))
        return "\n".join([problem, *(f"  {label}: {one_line(text)}" for label, text in parts if text)])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.expected, self.got, self.where, self.remedy)


def _rebuild(kind: type[ReshardError], problem: str, expected: str, got: str, where: str, remedy: str) -> ReshardError:
    return kind(problem, expected=expected, got=got, where=where, remedy=remedy)


class UsageError(ReshardError, ValueError):
    """A wrong call: an unknown value, a rank out of range, options that exclude each other."""

    exit_code = 2


class WrongTypeError(UsageError, TypeError):
    """A wrong call: an argument of a type that it cannot have."""


class SourceError(ReshardError, ValueError):
    """The source checkpoint is not there, is ambiguous, or its shards do not belong together."""


class ShardError(ReshardError, ValueError):
    """One shard file cannot be read: empty, truncated, damaged, encrypted, or of an unknown kind."""


class StrategyError(ReshardError, ValueError):
    """A strategy file or spec cannot be read, or says something impossible."""


class LayoutError(ReshardError, ValueError):
    """A placement does not fit its mesh, or a tensor's shape does not fit its placement."""


class CoverageError(ReshardError, ValueError):
    """Some part of a target tensor has no source."""


class DisagreementError(ReshardError):
    """Shards that should say the same (shape, type, step, replicated bytes) do not."""


class TargetError(ReshardError):
    """The target cannot be written: it is the source, holds another run, is finished, or is being written."""


class TransformError(ReshardError):
    """Some targets failed while they were written; the others are complete."""

    exit_code = 4


class DamageError(ReshardError):
    """What a shard holds is not what it should hold, by its own sums or by the checkpoint it was made from."""

    exit_code = 4


class DifferenceError(ReshardError):
    """Two checkpoints that were compared do not hold the same tensors."""

    exit_code = 4


class BudgetError(ReshardError):
    """What is to be done can never fit the memory that is allowed."""

    exit_code = 5


@contextmanager
def only_known_errors() -> Iterator[None]:
    """Raise what the file system refuses, and a lack of memory, as errors that a user can act on."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise as_reshard_error(error) from error


def told(error: Exception) -> str:
    """Return an error in one line, without where it is and what to do."""
    known = as_reshard_error(error)
    parts = (("expected", known.expected), ("got", known.got))
    return ", ".join([known.problem, *(f"{label} {text}" for label, text in parts if text)])


def as_reshard_error(error: Exception, path: Path | None = None) -> ReshardError:
    """Return `error` as one that can be shown to a user and sent between processes; `path`: what it is about."""
    if isinstance(error, ReshardError):
        return error
    if isinstance(error, OSError):
        names = (error.filename, error.filename2) if error.filename is not None else (path,)
        where = " and ".join(str(name) for name in names if name is not None)
        return ReshardError("the file system refused", got=f"{error.strerror or error}", where=where)
    return ReshardError("out of memory", got=type(error).__name__, remedy="run fewer processes at once")
