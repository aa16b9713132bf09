"""Checkpoints in an object store: what goes through the client, and what that costs it, beside `aws s3 cp`.

The server and the proxy that counts are those of the tests. The server shares the machine, so bytes and the CPU time of
the client are measured, not seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.checkpoint import Checkpoint, generate
from benchmarks.machine import as_line, describe
from benchmarks.measure import ROOT, CommandFailedError
from benchmarks.measure import measure as measure_commands
from benchmarks.network import ITEM_BYTES, Resharding, Shapes
from benchmarks.results import Results, table
from benchmarks.spread import Spread, short
from benchmarks.targets import MIB
from benchmarks.workplace import workplace
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

if TYPE_CHECKING:
    from support.fault_proxy import FaultProxy
    from support.object_servers import Bucket

_GIB = 1 << 30
_LONG_MIB = (16, 16, 24)  # slices of one rank of 8
_FORMATS = ("safetensors", "hdf5", "torch", "ckpt", "dcp")
_COPIED_FORMATS = ("safetensors", "hdf5", "ckpt")
_TENSORS = 217
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Figured:
    """A figure, what it is of, and the bound that it is to keep. note: what else was counted."""

    key: str
    what: str
    figure: float
    unit: str
    bound: float | None = None
    note: str = ""
    least: bool = False  # the bound is the least

    @property
    def reached(self) -> bool | None:
        if self.bound is None:
            return None
        return self.figure >= self.bound if self.least else self.figure <= self.bound


@dataclass(slots=True)
class Figures(Results):
    """What was measured with an object store, a figure a line."""

    figures: list[Figured] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        lines = [
            {
                "key": line.key,
                "what": line.what,
                "figure": line.figure,
                "unit": line.unit,
                "target": line.bound,
                "reached": line.reached,
                "note": line.note,
            }
            for line in self.figures
        ]
        return {**Results.as_json(self), "rows": lines}

    def as_markdown(self) -> str:
        """Return the machine's line and the table."""
        lines = [
            [
                line.what,
                f"{short(line.figure)} {line.unit}",
                "-" if line.bound is None else f"at {'least' if line.least else 'most'} {line.bound:g}",
                {True: "yes", False: "no", None: "-"}[line.reached],
                line.note or "-",
            ]
            for line in self.figures
        ]
        return "\n\n".join([as_line(self.machine), table(("what", "figure", "asked for", "reached", "besides"), lines)])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where it is measured: a folder, a bucket, and the proxy before its server, by which clients ask."""

    folder: Path
    bucket: Bucket
    proxy: FaultProxy

    def sent(self, made: Checkpoint) -> str:
        """Put the source of a checkpoint into the bucket; return its address."""
        from support.object_servers import upload

        upload(made.source, self.bucket / "src")
        return self.bucket / "src"

    def clear(self) -> None:
        from support.object_servers import delete

        delete(self.bucket.url)
        for entry in list(self.folder.iterdir()):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def through(self) -> int:
        """Return how many bytes of bodies have gone through clients."""
        return self.proxy.sent_bytes + self.proxy.received_bytes


def measure(pairs: int, megabytes: int, kills: int, folder: Path | None) -> Figures:
    """Measure all of it. megabytes: of the checkpoint that is read and written beside `aws s3 cp`, and of the killed.

    Raises NoRoomError; CommandFailedError if a command fails.
    """
    sys.path.append(str(ROOT / "tests"))
    from support.fault_proxy import before
    from support.object_servers import missing_for_seaweedfs, new_bucket, running_seaweedfs

    if missing := missing_for_seaweedfs():
        raise CommandFailedError(f"{missing} is not installed", "")
    with workplace(folder, 3 * max(megabytes, 470) * 1_000_000) as place:
        machine = describe(place)
        with running_seaweedfs() as server, new_bucket(server) as bucket, before(server) as proxy:
            at = _Place(place, bucket, proxy)
            figures: list[Figured] = []
            for step in (
                lambda: _copied(at),
                lambda: _verified(at),
                lambda: _opened(at),
                lambda: _quarters(at, megabytes),
                lambda: _beside_aws(at, megabytes, pairs),
                lambda: _killed(at, megabytes, kills),
            ):
                figures += step()
                at.clear()
                proxy.forget()
    return Figures("objects", machine, pairs, [], figures=figures)


def _rows(network: Shapes, ranks: int, axis: int = 0) -> Strategy:
    cut = tuple((0,) if at == axis else () for at in range(2))
    return Strategy(ranks, 1, {name: (Placement((ranks,), cut),) for name in network})


def _transform(made: Checkpoint, source: str, target: str, *options: str, as_before: bool = False) -> list[str]:
    """Return the command. as_before: whether targets are cut as the source is."""
    dst_strategy = made.src_strategy if as_before else made.dst_strategy
    strategies = ["--src-strategy", str(made.src_strategy), "--dst-strategy", str(dst_strategy)]
    words = [sys.executable, "-m", "reshard_mpi", "transform", source, target, *strategies, *options]
    return [*words, "--progress", "none", "--jobs", "1"]


def _copied(at: _Place) -> Iterator[Figured]:
    """Reshard 8 ranks into 4 inside the store, each tensor cut along rows: slices that the store can copy."""
    for kind in _COPIED_FORMATS:
        made = _long_slices(at, kind)
        source = at.sent(made)
        at.proxy.forget()
        measure_commands([_transform(made, source, at.bucket / "dst")])
        copies = sum("x-amz-copy-source" in request.headers for request in at.proxy.requests)
        yield Figured(
            f"objects.sent.{kind}",
            f"sent by the client, {kind} 8 -> 4 of {made.size_bytes / MIB:.0f} MiB",
            100 * at.proxy.sent_bytes / made.size_bytes,
            "% of the bytes",
            5 if kind != "ckpt" else None,
            f"{at.proxy.sent_bytes / MIB:.1f} MiB, and {at.proxy.received_bytes / MIB:.1f} received; {copies} copies",
        )
        at.clear()


def _long_slices(at: _Place, kind: str) -> Checkpoint:
    """Make a checkpoint of 8 ranks for 4, cut along rows of 16 and 24 MiB a rank."""
    network: Shapes = {f"w{number}": (8 * mib * 256, 1024) for number, mib in enumerate(_LONG_MIB)}
    return generate(at.folder, network, Resharding("8 -> 4", _rows(network, 8), _rows(network, 4)), kind)


def _verified(at: _Place) -> Iterator[Figured]:
    """Reshard inside the store with --verify: a source without sums, and one whose records have them."""
    made = _long_slices(at, "safetensors")
    source, verified = at.sent(made), at.bucket / "verified"
    measure_commands([_transform(made, source, verified, "--verify", as_before=True)])
    for name, what, begin in (("read", "a source without sums", source), ("recorded", "of recorded sums", verified)):
        at.proxy.forget()
        measure_commands([_transform(made, begin, at.bucket / "dst", "--verify", "--overwrite")])
        yield Figured(
            f"objects.verify.{name}",
            f"received by the client, --verify, {what}",
            100 * at.proxy.received_bytes / made.size_bytes,
            "% of the bytes",
            note=f"8 -> 4 of {made.size_bytes / MIB:.0f} MiB, and {at.proxy.sent_bytes / MIB:.1f} MiB sent",
        )


def _opened(at: _Place) -> Iterator[Figured]:
    """Open one file of 217 tensors in every format."""
    network: Shapes = {f"layers.{number}.weight": (64, 64) for number in range(_TENSORS)}
    made = generate(at.folder, network, Resharding("1", _rows(network, 1), _rows(network, 1)), "safetensors")
    source = at.sent(made)
    for kind in _FORMATS:
        target = at.bucket / f"opened_{kind}"
        measure_commands([_transform(made, source, target, "--to", kind)])
        at.proxy.forget()
        program = f"import reshard_mpi; reshard_mpi.open({target!r})"
        measure_commands([[sys.executable, "-c", program]])
        yield Figured(
            f"objects.open.{kind}",
            f"open {_TENSORS} tensors of {kind}",
            sum(request.operation.value == "GET" for request in at.proxy.requests),
            "ranges",
            note=f"{len(at.proxy.requests)} requests, {at.through() / 1024:.0f} KiB; ranges are asked for side by side",
        )


def _quarters(at: _Place, megabytes: int) -> Iterator[Figured]:
    """Reshard rows of 2 ranks for 4: each target wants a quarter of the rows, then a quarter of every row."""
    for what, axis in (("of the rows", 0), ("of every row", 1)):
        made = _large(at, megabytes, (2, 4), axis)
        source = at.sent(made)
        at.proxy.forget()
        measure_commands([_transform(made, source, at.bucket / "dst", "--overwrite", "--dtype", "bf16")])
        yield Figured(
            f"objects.quarters.{axis}",
            f"source read, where 4 targets want a quarter {what} each",
            at.proxy.received_bytes / made.size_bytes,
            "times the bytes needed",
            1.02,
            f"{made.size_bytes / MIB:.0f} MiB, converted, so that the store copies nothing",
        )
        at.clear()


def _large(at: _Place, megabytes: int, ranks: tuple[int, int], axis: int, tensors: int = 8) -> Checkpoint:
    """Make a checkpoint that is cut along rows. axis: along which targets are cut; tensors: how many there are."""
    rows = max(16, megabytes * 1_000_000 // (tensors * 4096 * ITEM_BYTES) // 16 * 16)
    network: Shapes = {f"w{number}": (rows, 4096) for number in range(tensors)}
    before, after = ranks
    strategies = _rows(network, before), _rows(network, after, axis)
    return generate(at.folder, network, Resharding(f"{before} -> {after}", *strategies), "safetensors")


def _beside_aws(at: _Place, megabytes: int, pairs: int) -> Iterator[Figured]:
    """Read and write a checkpoint beside `aws s3 cp` of the same there and back.

    First rows that are too short to be copied inside the store, then rows that become columns.
    """
    for name, what, axis, tensors in (("rows", "short rows", 0, megabytes // 4), ("cpu", "rows -> columns", 1, 8)):
        made = _large(at, megabytes, (2, 4) if axis == 0 else (2, 2), axis, max(8, tensors))
        source = at.sent(made)
        gib = math.prod((2, made.size_bytes)) / _GIB
        command = _transform(made, source, at.bucket / "dst", "--overwrite")
        yield _cpu_beside(at, name, what, command, source, gib, pairs)
        if axis:
            held = _held_bytes(command) / MIB
            yield Figured("objects.memory", "memory of a process", held, "MiB", 128, "with what it stages")
        at.clear()


def _cpu_beside(at: _Place, name: str, what: str, command: list[str], source: str, gib: float, pairs: int) -> Figured:
    """Compare CPU time with `aws s3 cp`. gib: how much is read and written."""
    aws = str(Path(sys.executable).parent / "aws")
    copying = [[aws, "s3", "cp", "--quiet", "--recursive", source, str(at.folder / "copy")]]
    copying += [[aws, "s3", "cp", "--quiet", "--recursive", str(at.folder / "copy"), at.bucket / "copy"]]
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(measure_commands([command]).run.cpu_seconds / gib)
        if Path(aws).exists():
            theirs.append(sum(measure_commands([words]).run.cpu_seconds for words in copying) / gib)
    note = f"{Spread.of(ours).as_text()} CPU s a GiB read and written"
    if not theirs:
        return Figured(f"objects.cpu.{name}", f"client CPU, {what}", Spread.of(ours).median, "s a GiB", None, note)
    note += f", aws s3 cp {Spread.of(theirs).as_text()}"
    ratio = Spread.of(one / other for one, other in zip(ours, theirs)).median
    return Figured(f"objects.cpu.{name}", f"client CPU, {what}", ratio, "times aws s3 cp", 1.1, note)


def _held_bytes(command: Sequence[str]) -> int:
    """Run a command; return the most memory that it was seen to hold, with that of files in memory.

    What is written to such a file is no resident memory of the process.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    most = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, psutil.Error):
            resident = psutil.Process(process.pid).memory_info()
            most = max(most, resident.rss - resident.shared + _staged_bytes(process.pid))
        time.sleep(_LOOK_SECONDS)
    if process.returncode:
        raise CommandFailedError(f"exit code {process.returncode}", " ".join(command))
    return most


def _staged_bytes(pid: int) -> int:
    """Return the bytes of files in memory that a process has open, each counted once."""
    size_by_file: dict[tuple[int, int], int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if str(entry.readlink()).startswith("/memfd:"):
                status = entry.stat()
                size_by_file[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(size_by_file.values())


def _killed(at: _Place, megabytes: int, kills: int) -> Iterator[Figured]:
    """Kill a run at random instants, and run it again with --resume."""
    from support.object_servers import delete, objects, uploads

    made = _large(at, min(megabytes, 256), (2, 2), 1)
    target = at.bucket / "dst"
    command = _transform(made, at.sent(made), target)

    def targets() -> dict[str, bytes]:
        return {name: content for name, content in objects(target).items() if name.startswith("rank_")}

    begin = time.monotonic()
    measure_commands([command])
    seconds, expected, right, half_sent = time.monotonic() - begin, targets(), 0, 0
    for _ in range(kills):
        delete(target)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)
        time.sleep(random.uniform(0, seconds))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        half_sent += bool(uploads(at.bucket))
        measure_commands([[*command, "--resume"]])
        right += targets() == expected and not uploads(at.bucket)
    note = f"{half_sent} left an upload"
    yield Figured("objects.kills", f"of {kills} kills: resumed, same objects", right, "", kills, note, least=True)
