"""Hold results (`Outcome`, `Report`), and do steps in all processes so that an error of one is all's (`together`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard_mpi.errors import ReshardError, TransformError, as_reshard_error
from reshard_mpi.planning.source_flaws import (
    MissingRanks,
    ModifiedShard,
    UnusableShard,
    merged_losses,
    modified_warning,
    warnings_of,
)
from reshard_mpi.text import counted, first_few, with_addresses

if TYPE_CHECKING:
    from reshard_mpi.journal.target_records import TensorSum
    from reshard_mpi.pictures.pages import TensorNorm
    from reshard_mpi.planning.rank_plan import RankPlan
    from reshard_mpi.processes.comm import Comm
    from reshard_mpi.runs.planner import Planner
    from reshard_mpi.runs.value_comparison import ValueComparison
    from reshard_mpi.soundness.findings import Finding


class TargetReport(NamedTuple):
    """One complete target."""

    rank: int
    path: str
    read_ranks: tuple[int, ...]
    written_bytes: int
    needed_bytes: int = 0
    requested_bytes: int = 0  # read from source files
    store_copied_bytes: int = 0  # of the target, copied by an object store from its sources, and neither read nor sent
    mapped_bytes: int = 0  # mapped of them
    seconds: float = 0.0  # for all that was done for it, and for targets that were written side by side with it
    engine_seconds: float = 0.0  # of these, for moving bytes, in the process that took longest
    waited_seconds: float = 0.0  # of these, for waiting for memory, in the process that waited longest
    leased_bytes: int = 0  # memory that each process had asked for
    process: int = 0  # which process of the run led the target
    processes: int = 0  # how many filled it
    skipped: bool = False  # whether it was complete before this run
    overflows: tuple[Overflow, ...] = ()  # of its tensors

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**self._asdict(), "overflows": [overflow._asdict() for overflow in self.overflows]}


class Checked(NamedTuple):
    """A shard that has been verified."""

    rank: int
    path: str
    # tensors, read_bytes: how much of it was read
    tensors: int
    read_bytes: int
    by: tuple[str, ...]  # what it was compared with, such as "its own sums"; empty if there was nothing
    sums: tuple[TensorSum, ...] = ()  # of its tensors whose place in the whole is known
    world_size: int = 0  # how many shards there are by its own account; 0 if it does not say


class Failure(NamedTuple):
    """An error in one process of a run, on `host`. rank: the target rank that it is about; None: of none."""

    rank: int | None
    process: int
    host: str
    error: ReshardError

    @classmethod
    def here(cls, rank: int | None, comm: Comm, error: ReshardError) -> Failure:
        """Return a failure of this process of `comm`."""
        return cls(rank, comm.rank, comm.hosts[comm.rank], error)

    def named(self, *, alone: bool) -> ReshardError:
        """Return the error with the target rank and the process at the beginning of its message.

        Args:
            alone: whether the run has only one process, which then is not named.
        """
        target = "" if self.rank is None else f"target rank {self.rank}"
        target = "" if target in self.error.problem else target
        place = "" if alone else f"process {self.process} on host {self.host}"
        about = f"{target} ({place})" if target and place else target or place
        named = type(self.error).__new__(type(self.error)).with_traceback(self.error.__traceback__)
        vars(named).update(vars(self.error))
        named.problem = f"{about}: {named.problem}" if about else named.problem
        return named


class Outcome(NamedTuple):
    """The results of one process, or of all together."""

    targets: tuple[TargetReport, ...] = ()
    failures: tuple[Failure, ...] = ()
    absent: tuple[str, ...] = ()  # names of listed parameters that no shard holds
    # notes, other_warnings: for the user
    notes: tuple[str, ...] = ()
    lost: tuple[UnusableShard, ...] = ()  # source shards that cannot be used
    modified: tuple[ModifiedShard, ...] = ()  # source shards that may be copies of others
    other_warnings: tuple[str, ...] = ()
    checked: tuple[Checked, ...] = ()  # shards that were verified
    processes: int = 0  # how many the run had
    missing: MissingRanks | None = None  # source ranks without a shard
    comparison: ValueComparison | None = None  # of two checkpoints in numbers
    findings: tuple[Finding, ...] = ()  # of an audit
    norms: tuple[TensorNorm, ...] = ()  # of the tensors, if an audit was to return them

    @classmethod
    def begun(cls, planner: Planner, notes: tuple[str, ...] = ()) -> Outcome:
        """Return an outcome with the notes and warnings on what has been opened, and these `notes`."""
        source = planner.source
        return cls(
            notes=(*planner.notes, *notes),
            modified=source.files.modified,
            other_warnings=source.files.warnings,
            missing=source.missing,
        )

    @classmethod
    def of(cls, plan: RankPlan) -> Outcome:
        """Return an outcome with the notes and warnings on a plan."""
        return cls(
            absent=plan.absent, notes=plan.notes, lost=plan.lost, other_warnings=(*plan.warnings, *plan.left_out)
        )

    def joined(self, others: Iterable[Outcome]) -> Outcome:
        """Return this outcome and the `others` as one, targets in the order of their ranks."""
        outcomes = [self, *others]
        merged = merge(outcomes)
        # Of one shard several processes may have checked as much.
        checked = (shard for outcome in outcomes for shard in outcome.checked)
        comparisons = [outcome.comparison for outcome in outcomes if outcome.comparison is not None]
        return merged._replace(
            targets=tuple(sorted(merged.targets, key=lambda target: target.rank)),
            lost=merged_losses(merged.lost) if merged.lost else (),
            checked=tuple(sorted(checked, key=lambda shard: shard.rank)),
            processes=max(outcome.processes for outcome in outcomes),
            missing=next((outcome.missing for outcome in outcomes if outcome.missing is not None), None),
            comparison=comparisons[0].joined(comparisons[1:]) if comparisons else None,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user on the source, and on its fate in the target."""
        absent = self.absent
        missed = (f"{len(absent)} listed parameters are in no source shard: {first_few(absent, 3)}",) if absent else ()
        own_warnings = (
            *warnings_of(self.lost, self.missing),
            *modified_warning(self.modified, self.lost),
            *self.other_warnings,
            *missed,
        )
        if not any(target.overflows for target in self.targets):
            return own_warnings

        return (*own_warnings, *overflow_warnings(target.overflows for target in self.targets))

    def raise_failures(self) -> None:
        """Raise the error that refused the run, or a TransformError that names the targets that failed; if any."""
        if not self.failures:
            return
        ranks = sorted({failure.rank for failure in self.failures if failure.rank is not None})
        first = next((failure for failure in self.failures if failure.rank is not None), self.failures[0])
        alone = self.processes <= 1
        if not ranks:
            raise first.named(alone=alone)
        named = f"target rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))} failed"
        others = f"{counted(len(self.targets), 'other')} {'is' if len(self.targets) == 1 else 'are'} complete"
        raise TransformError(
            f"{len(ranks)} of {len(ranks) + len(self.targets)} targets failed; the first: {first.named(alone=alone)}",
            got=f"{named}; {others}",
            remedy="mend the cause and run the same command with --resume",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {
            "targets": [target.as_json() for target in self.targets],
            "failures": [{**f._asdict(), "kind": type(f.error).__name__, "error": str(f.error)} for f in self.failures],
            "absent": list(self.absent),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


class ShardReport(NamedTuple):
    """A shard, or another checkpoint, that was compared and found sound."""

    rank: int
    path: str
    # tensors, read_bytes: how much was compared
    tensors: int
    read_bytes: int
    by: tuple[str, ...]  # with what, such as "its own sums"


class Report(NamedTuple):
    """The result of a run."""

    targets: tuple[TargetReport, ...]  # of a transform, in the order of their ranks
    # notes, warnings: for people
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float  # how long it took
    processes: int  # how many took part
    checked: tuple[ShardReport, ...] = ()  # the shards of a verification, or the second checkpoint of a comparison
    comparison: ValueComparison | None = None  # what comparing two checkpoints in numbers has found

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> Report:
        """Return the report of a run. What several processes have compared of one shard is added up.

        Addresses of objects are as people write them.
        """
        shards: dict[tuple[int, str], ShardReport] = {}
        for rank, shard_path, tensors, read_bytes, by, *_ in outcome.checked:
            path = with_addresses(shard_path)
            so_far = shards.get((rank, path), ShardReport(rank, path, 0, 0, by))
            added = so_far._replace(tensors=so_far.tensors + tensors, read_bytes=so_far.read_bytes + read_bytes)
            shards[rank, path] = added
        checked = tuple(shards.values())
        processes, comparison = outcome.processes, outcome.comparison
        targets = tuple(target._replace(path=with_addresses(target.path)) for target in outcome.targets)
        notes, warnings = (tuple(map(with_addresses, texts)) for texts in (outcome.notes, outcome.warnings))
        return cls(targets, notes, warnings, seconds, processes, checked, comparison)

    @property
    def tensors(self) -> int:
        """How many tensors were compared, in all shards together."""
        return sum(shard.tensors for shard in self.checked)

    @property
    def read_bytes(self) -> int:
        """How many bytes of shards, or of the second checkpoint, were compared."""
        return sum(shard.read_bytes for shard in self.checked)

    @property
    def written_bytes(self) -> int:
        """Payload bytes of targets written now, without targets that were complete already."""
        return sum(target.written_bytes for target in self.targets if not target.skipped)


R = TypeVar("R", bound=NamedTuple)


def merge(records: Sequence[R]) -> R:
    """Return records of one kind as one: the entries of their tuples, each once, and all else of the first record."""
    first = records[0]
    tuples = [name for name, value in zip(first._fields, first) if type(value) is tuple]
    entries = {name: dict.fromkeys(entry for record in records for entry in getattr(record, name)) for name in tuples}
    return first._replace(**{name: tuple(each) for name, each in entries.items()})


T = TypeVar("T")


# Errors that are no fault of this program: they become failures of a target or a process.
EXPECTED = (ReshardError, OSError, MemoryError)


def report_of(kind: Callable[[Outcome], T], value: T | Outcome) -> T:
    """Return `value` as a report of `kind`; an outcome, of a process that failed or died, as a report of that alone."""
    return kind(value) if isinstance(value, Outcome) else value


def attempt(do: Callable[[], T], comm: Comm, rank: int | None = None, path: Path | None = None) -> T | Outcome:
    """Return what `do` returns; if it raises an expected error, an outcome with that as a failure of this process.

    Args:
        rank: the target that the failure is about.
        path: what a system error is about, if it does not say so.
    """
    try:
        return do()
    except EXPECTED as error:
        return Outcome(failures=(Failure.here(rank, comm, as_reshard_error(error, path)),))


def together(comm: Comm, step: Callable[[], T]) -> list[T]:
    """Do a step in every process; return the results of all. Raises the same error in all if one has failed."""
    results = comm.allgather(attempt(step, comm))
    raise_first_failure([failed for failed in results if isinstance(failed, Outcome)], comm)
    return [result for result in results if not isinstance(result, Outcome)]


def raise_first_failure(outcomes: Sequence[Outcome], comm: Comm) -> None:
    """Raise the first failure of the outcomes, if any; the same on every process."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures:
        return
    first = failures[0]
    # An error of only some processes may be due to their hosts, for instance a file system that is not mounted.
    everywhere = len({failure.process for failure in failures}) == comm.size
    error = first.named(alone=everywhere or len(set(comm.hosts)) == 1)
    others = {failure.rank for failure in failures} - {first.rank, None}
    if others:
        error.problem += f" (and {len(others)} more {'target is' if len(others) == 1 else 'targets are'} refused)"
    raise error


def agreed(begin: Callable[[], T], comm: Comm) -> T:
    """Run `begin` in every process, and return the result of this one; an error of any is raised in all."""
    done = attempt(lambda: (begin(),), comm)
    for outcome in comm.allgather(done if isinstance(done, Outcome) else Outcome()):
        for failure in outcome.failures:
            raise failure.named(alone=True)
    assert not isinstance(done, Outcome)
    return done[0]


# Tensors that users are told of one by one.
_MAX_TOLD = 8
_LARGEST = {"float8_e4m3fn": "448, its largest number"}


class Overflow(NamedTuple):
    """How many elements of a target tensor were too large for its type, which is `dtype`."""

    tensor: str
    dtype: str
    elements: int


def joined_overflows(overflows: Iterable[Overflow]) -> tuple[Overflow, ...]:
    """Return one record for each tensor of one type, with the elements of all its records."""
    elements = Counter[tuple[str, str]]()
    for overflow in overflows:
        elements[overflow.tensor, overflow.dtype] += overflow.elements
    return tuple(Overflow(tensor, dtype, count) for (tensor, dtype), count in elements.items())


def overflow_warnings(targets: Iterable[Iterable[Overflow]]) -> Iterator[str]:
    """Yield warnings on the overflows of all targets, one for each tensor."""
    records = [overflow for target in targets for overflow in target]
    in_targets = Counter((tensor, dtype) for tensor, dtype, _ in records)
    totals = joined_overflows(records)
    for tensor, dtype, elements in totals[:_MAX_TOLD]:
        are, targets_of_it = "is" if elements == 1 else "are", in_targets[tensor, dtype]
        where = f", in {targets_of_it} targets together," if targets_of_it > 1 else ""
        became = _LARGEST.get(dtype, "infinite")
        yield f"{counted(elements, 'element')} of {tensor!r}{where} {are} too large for {dtype} and became {became}"
    if len(totals) > _MAX_TOLD:
        elements = sum(overflow.elements for overflow in totals[_MAX_TOLD:])
        others = counted(len(totals) - _MAX_TOLD, "further tensor")
        yield f"so did {counted(elements, 'element')} of {others}; the report (--report) names all"
