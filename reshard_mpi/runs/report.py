"""What a run says: progress lines while it works, the outcome of every target, and a report file."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from reshard_mpi.errors import ReshardError, TransformError
from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.planning.losses import Lost, Missing, merged, warnings_of
from reshard_mpi.runs.log import log
from reshard_mpi.text import one_line
from reshard_mpi.units import format_bytes, format_rate

if TYPE_CHECKING:  # this module is loaded before the engine is, to tell of it
    from reshard_mpi.formats.manifest import Manifest
    from reshard_mpi.journal.records import TensorSum
    from reshard_mpi.planning.copies import Alike
    from reshard_mpi.planning.model import Beginning, Held, Moment
    from reshard_mpi.processes.comm import Comm
    from reshard_mpi.runs.preflight import Room

# Often enough to see that it lives, seldom enough to cost nothing.
_REFRESH_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
# Waiting for memory that is worth mentioning.
_WORTH_SECONDS = 1.0
# Every report file begins so.
_BEGINNING = b'{\n "version": 1,\n "source": '


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
    """What one process did, or all of them together.

    alike: copies that must be the same, until they have been compared. lost: source shards that could not be used.
    missing: the ranks that have none.
    reserved, filled, verified: only passed between the processes that fill a target together. processes: how many
    there were. rooms: what each needs on file systems, drifted: tensors whose copies have drifted apart; both only
    passed between them before anything is written.
    """

    targets: tuple[TargetReport, ...] = ()
    failures: tuple[Failure, ...] = ()
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    held: tuple[Held, ...] = ()
    beginnings: tuple[Beginning, ...] = ()
    alike: tuple[Alike, ...] = ()
    lost: tuple[Lost, ...] = ()
    other_warnings: tuple[str, ...] = ()
    reserved: tuple[Reserved, ...] = ()
    filled: tuple[Filled, ...] = ()
    verified: tuple[Verified, ...] = ()
    checked: tuple[Checked, ...] = ()
    processes: int = 0
    rooms: tuple[Room, ...] = ()
    drifted: tuple[str, ...] = ()
    missing: Missing | None = None

    def joined(self, others: list[Outcome]) -> Outcome:
        """Return this outcome and the `others` as one, targets in the order of their ranks."""
        every = [self, *others]
        return Outcome(
            tuple(sorted((t for one in every for t in one.targets), key=lambda target: target.rank)),
            tuple(failure for one in every for failure in one.failures),
            tuple(dict.fromkeys(name for one in every for name in one.absent)),
            tuple(dict.fromkeys(note for one in every for note in one.notes)),
            tuple(dict.fromkeys(moment for one in every for moment in one.moments)),
            tuple({(held.stage, held.digest): held for one in reversed(every) for held in one.held}.values()),
            tuple({(start.name, start.digest): start for one in reversed(every) for start in one.beginnings}.values()),
            tuple(dict.fromkeys(alike for one in every for alike in one.alike)),
            merged(lost for one in every for lost in one.lost),
            tuple(dict.fromkeys(warning for one in every for warning in one.other_warnings)),
            checked=tuple(sorted((c for one in every for c in one.checked), key=lambda checked: checked.rank)),
            processes=max(one.processes for one in every),
            missing=next((one.missing for one in every if one.missing is not None), None),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must know of the source."""
        absent = self.absent
        names = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        missed = (f"{len(absent)} listed parameters are in no source shard: {names}",) if absent else ()
        return (*warnings_of(self.lost, self.missing), *self.other_warnings, *missed)

    def with_verified(self, other: Outcome) -> Outcome:
        """Return this outcome with what `other`, of the same process, says of having verified."""
        return self._replace(failures=(*self.failures, *other.failures), verified=other.verified)

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


def is_report(path: Path) -> bool:
    """Tell whether the file at `path` is what `write_report` wrote, or empty."""
    with path.open("rb") as stream:
        head = stream.read(len(_BEGINNING))
    return head in (_BEGINNING, b"")


def write_report(path: str, facts: Mapping[str, Any], outcome: Outcome, seconds: float) -> None:
    """Write the report of a whole run as JSON. Raises OSError if it cannot be written; then there is none."""
    report = {"version": 1, **facts, "seconds": seconds, **outcome.as_json()}
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise


def summary(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a run."""
    done = [target for target in outcome.targets if not target.skipped]
    written_bytes = sum(target.written_bytes for target in done)
    skipped = len(outcome.targets) - len(done)
    text = (
        f"wrote {len(done)} {'shard' if len(done) == 1 else 'shards'}, {format_bytes(written_bytes)} in {seconds:.2f} s"
    )
    text += f" ({format_rate(written_bytes, seconds)})"
    return text + (f"; {skipped} {'was' if skipped == 1 else 'were'} complete already" if skipped else "")


def verified(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a run that has found no damage."""
    shards = [checked for checked in outcome.checked if checked.by]
    tensors = sum(checked.tensors for checked in shards)
    read_bytes = sum(checked.read_bytes for checked in shards)
    by = ", ".join(dict.fromkeys(way for checked in shards for way in checked.by))
    count = f"{len(shards)} {'shard' if len(shards) == 1 else 'shards'}"
    rate = f"{format_bytes(read_bytes)} in {seconds:.2f} s ({format_rate(read_bytes, seconds)})"
    return f"verified {count}, {tensors} tensors, {rate} by {by}: sound"


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print at once what a run can do without: nothing is to fail because nobody listens any more."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=stream, flush=True)


class Progress(Protocol):
    """Is told what happens while targets are written; first, once by every process, which ones it is to write."""

    def assigned(self, ranks: tuple[int, ...]) -> None: ...

    def started(self, rank: int, written_bytes: int) -> None: ...

    def waiting(self, text: str) -> None: ...

    def moved(self, count_bytes: int) -> None: ...

    def finished(self, report: TargetReport) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Says nothing, but to the log that a caller of the functions may listen to."""

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        log(notes=(), warnings=(text,))

    def moved(self, count_bytes: int) -> None:
        pass

    def finished(self, report: TargetReport) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """A line for every finished target, and now and then one for the bytes moved so far."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moved_bytes = 0
        self._next = time.monotonic() + _PLAIN_SECONDS

    def assigned(self, ranks: tuple[int, ...]) -> None:
        pass

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        say(one_line(text), self._stream)

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_SECONDS
            say(f"{format_bytes(self._moved_bytes)} written so far", self._stream)

    def finished(self, report: TargetReport) -> None:
        sources = len(report.read_ranks)
        waited = f", {report.waited_seconds:.2f} s of it waiting" if report.waited_seconds >= _WORTH_SECONDS else ""
        say(
            f"target {report.rank}: {format_bytes(report.written_bytes)} from {sources} source"
            f" {'rank' if sources == 1 else 'ranks'} in {report.seconds:.2f} s{waited}",
            self._stream,
        )

    def close(self) -> None:
        pass


class Bar:
    """One line on a terminal that is written anew as bytes move."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._begin = time.monotonic()
        self._next = 0.0
        self._moved_bytes = 0
        self._assigned = self._done = 0

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._assigned += len(ranks)

    def started(self, rank: int, written_bytes: int) -> None:
        pass

    def waiting(self, text: str) -> None:
        say(f"\r{one_line(text):<78}", self._stream)

    def moved(self, count_bytes: int) -> None:
        self._moved_bytes += count_bytes
        if time.monotonic() >= self._next:
            self._draw()

    def finished(self, report: TargetReport) -> None:
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        self._next = now + _REFRESH_SECONDS
        rate = format_rate(self._moved_bytes, now - self._begin)
        text = f"{self._done} of {self._assigned} targets, {format_bytes(self._moved_bytes)}, {rate}"
        say(f"\r{text:<78}", self._stream, end="")

    def close(self) -> None:
        """End the line."""
        if self._assigned:
            say("", self._stream)
