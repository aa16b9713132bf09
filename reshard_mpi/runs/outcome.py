"""What a run comes to: its targets, what went wrong, and what is to be said of its source."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard_mpi.errors import ReshardError, TransformError, as_reshard_error
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.planning.losses import Lost, Missing, merged, warnings_of

if TYPE_CHECKING:  # this module is loaded before the engine is, to tell of it
    from reshard_mpi.formats.manifest import Manifest
    from reshard_mpi.journal.records import TensorSum
    from reshard_mpi.planning.copies import Alike
    from reshard_mpi.planning.model import Beginning, Held, Moment
    from reshard_mpi.processes.comm import Comm
    from reshard_mpi.runs.preflight import Room


class TargetReport(NamedTuple):
    """One complete target. requested_bytes were asked of source files, mapped_bytes lay in windows on them.

    process: which process of the run led it. processes: how many filled it. seconds: all that was done for this target.
    engine_seconds, waited_seconds: what of it moving bytes took, and waiting for memory, the longest of the processes.
    leased_bytes: how much memory each of them had to wait for.
    """

    rank: int
    path: str
    read_ranks: tuple[int, ...]
    written_bytes: int
    needed_bytes: int
    requested_bytes: int
    mapped_bytes: int
    seconds: float
    engine_seconds: float
    waited_seconds: float
    leased_bytes: int
    process: int
    processes: int
    skipped: bool = False


class Reserved(NamedTuple):
    """A target that several processes fill: it is there, but for its payloads, in the file that `manifest` names.

    Every process is told of all of them, and needs few, so they come packed. identity: of that file.
    """

    rank: int
    packed: bytes
    identity: FileIdentity

    @classmethod
    def of(cls, rank: int, manifest: Manifest, identity: FileIdentity) -> Reserved:
        return cls(rank, zlib.compress(pickle.dumps(manifest), level=1), identity)

    def manifest(self) -> Manifest:
        """Return where everything has its place."""
        manifest: Manifest = pickle.loads(zlib.decompress(self.packed))
        return manifest


class Filled(NamedTuple):
    """What one of several processes has moved into a target."""

    rank: int
    requested_bytes: int
    mapped_bytes: int
    seconds: float
    waited_seconds: float


class Verified(NamedTuple):
    """What one of several processes has found a target to hold, and that it is what the sources hold."""

    rank: int
    sums: tuple[TensorSum, ...]
    waited_seconds: float


class Checked(NamedTuple):
    """A shard that has been verified: what was read of it, and by what it was found sound.

    by: as "its own sums"; nothing if there was nothing to go by. sums: what it holds, as far as it is known of what.
    lost: the shards of its source that could not be used. world_size: how many shards it says there are; 0: nothing.
    """

    rank: int
    path: str
    tensors: int
    read_bytes: int
    by: tuple[str, ...]
    sums: tuple[TensorSum, ...] = ()
    lost: tuple[Lost, ...] = ()
    world_size: int = 0


class Failure(NamedTuple):
    """What went wrong, for which target rank (None: for none), and in which process of the run, on which host."""

    rank: int | None
    process: int
    host: str
    error: ReshardError

    @classmethod
    def here(cls, rank: int | None, comm: Comm, error: ReshardError) -> Failure:
        """Return what went wrong in this process of `comm`."""
        return cls(rank, comm.rank, comm.hosts[comm.rank], error)

    def named(self, *, alone: bool) -> ReshardError:
        """Return the error, its problem beginning with what failed and where.

        alone: the run has but one process, so there is no need to say which.
        """
        target = "" if self.rank is None or self._is_named() else f"target rank {self.rank}"
        place = "" if alone else f"process {self.process} on host {self.host}"
        about = f"{target} ({place})" if target and place else target or place
        named = copy.copy(self.error).with_traceback(self.error.__traceback__)
        named.problem = f"{about}: {named.problem}" if about else named.problem
        return named

    def _is_named(self) -> bool:
        return f"target rank {self.rank}" in self.error.problem


class Outcome(NamedTuple):
    """What one process came to, or all of them together, and what is to be said of it.

    lost: source shards that could not be used. missing: the ranks that have none. processes: how many there were.
    """

    targets: tuple[TargetReport, ...] = ()
    failures: tuple[Failure, ...] = ()
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    other_warnings: tuple[str, ...] = ()
    checked: tuple[Checked, ...] = ()
    processes: int = 0
    missing: Missing | None = None

    def joined(self, others: Iterable[Outcome]) -> Outcome:
        """Return this outcome and the `others` as one, targets in the order of their ranks."""
        every = [self, *others]
        return Outcome(
            tuple(sorted((t for one in every for t in one.targets), key=lambda target: target.rank)),
            tuple(failure for one in every for failure in one.failures),
            tuple(dict.fromkeys(name for one in every for name in one.absent)),
            tuple(dict.fromkeys(note for one in every for note in one.notes)),
            merged(lost for one in every for lost in one.lost),
            tuple(dict.fromkeys(warning for one in every for warning in one.other_warnings)),
            tuple(sorted((c for one in every for c in one.checked), key=lambda checked: checked.rank)),
            max(one.processes for one in every),
            next((one.missing for one in every if one.missing is not None), None),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must know of the source."""
        absent = self.absent
        names = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        missed = (f"{len(absent)} listed parameters are in no source shard: {names}",) if absent else ()
        return (*warnings_of(self.lost, self.missing), *self.other_warnings, *missed)

    def raise_failures(self) -> None:
        """Raise what refused the run, or a TransformError that names the targets that failed."""
        if not self.failures:
            return
        ranks = sorted({failure.rank for failure in self.failures if failure.rank is not None})
        first = next((failure for failure in self.failures if failure.rank is not None), self.failures[0])
        alone = self.processes <= 1
        if not ranks:
            raise first.named(alone=alone)
        done = sum(not target.skipped for target in self.targets)
        raise TransformError(
            f"{len(ranks)} of {len(ranks) + len(self.targets)} targets failed; the first: {first.named(alone=alone)}",
            got=f"failed: {', '.join(map(str, ranks))}; complete: {done}",
            remedy="mend the cause and run the same command with --resume",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {
            "targets": [target._asdict() for target in self.targets],
            "failures": [{**f._asdict(), "kind": type(f.error).__name__, "error": str(f.error)} for f in self.failures],
            "absent": list(self.absent),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


class Report(NamedTuple):
    """What a transform has done: its targets in the order of their ranks, and what is to be said of its source.

    seconds: how long it took. processes: how many took part.
    """

    targets: tuple[TargetReport, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float
    processes: int

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> Report:
        return cls(outcome.targets, outcome.notes, outcome.warnings, seconds, outcome.processes)

    @property
    def written_bytes(self) -> int:
        """Payload bytes of the targets that were written, without those that were complete already."""
        return sum(target.written_bytes for target in self.targets if not target.skipped)


class Planned(NamedTuple):
    """What a process tells the others of its plans, before anything is written.

    outcome: what is to be said of them, and what refuses the run. What targets must have in common: moments, held,
    beginnings (see `RankPlan`). alike: copies that must be the same. rooms: what is needed on file systems.
    """

    outcome: Outcome = Outcome()
    moments: tuple[Moment, ...] = ()
    held: tuple[Held, ...] = ()
    beginnings: tuple[Beginning, ...] = ()
    alike: tuple[Alike, ...] = ()
    rooms: tuple[Room, ...] = ()

    def joined(self, others: Iterable[Planned]) -> Planned:
        """Return what this and the `others` say together, without rooms."""
        every = [self, *others]
        return Planned(
            self.outcome.joined(one.outcome for one in every[1:]),
            tuple(dict.fromkeys(moment for one in every for moment in one.moments)),
            tuple({(held.stage, held.digest): held for one in reversed(every) for held in one.held}.values()),
            tuple({(start.name, start.digest): start for one in reversed(every) for start in one.beginnings}.values()),
            tuple(dict.fromkeys(alike for one in every for alike in one.alike)),
        )


class Compared(NamedTuple):
    """What a process has found of copies. drifted: tensors whose copies have drifted apart."""

    outcome: Outcome = Outcome()
    drifted: tuple[str, ...] = ()


class Part(NamedTuple):
    """What a process has done for targets that several fill together, so far; its failures are in the outcome."""

    outcome: Outcome = Outcome()
    reserved: tuple[Reserved, ...] = ()
    filled: tuple[Filled, ...] = ()
    verified: tuple[Verified, ...] = ()

    def joined(self, others: Iterable[Part]) -> Part:
        """Return what this and the `others`, of the same process, have done."""
        every = [self, *others]
        return Part(
            self.outcome.joined(one.outcome for one in every[1:]),
            tuple(reserved for one in every for reserved in one.reserved),
            tuple(filled for one in every for filled in one.filled),
            tuple(verified for one in every for verified in one.verified),
        )


T = TypeVar("T")
R = TypeVar("R", Planned, Compared, Part)


def record_of(kind: type[R], value: R | Outcome) -> R:
    """Return what a process says of its own; the outcome alone of one that failed before, or died."""
    return kind(value) if isinstance(value, Outcome) else value


# What a process fails at without being in the wrong itself.
EXPECTED = (ReshardError, OSError, MemoryError)


def attempt(do: Callable[[], T], comm: Comm, rank: int | None = None, path: Path | None = None) -> T | Outcome:
    """Return what `do` comes to; an error that is expected is a failure of this process, and of the target `rank`.

    path: where an error of the system happened that does not say so.
    """
    try:
        return do()
    except EXPECTED as error:
        return Outcome(failures=(Failure.here(rank, comm, as_reshard_error(error, path)),))


def agreed(begin: Callable[[], T], comm: Comm) -> T:
    """Return what `begin` does; raise, on all processes alike, what went wrong with it on one of them."""
    done = attempt(lambda: (begin(),), comm)
    for outcome in comm.allgather(done if isinstance(done, Outcome) else Outcome()):
        for failure in outcome.failures:
            raise failure.named(alone=True)
    assert not isinstance(done, Outcome)
    return done[0]
