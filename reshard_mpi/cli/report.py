"""The closing line of a run, and its report file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard_mpi import formats
from reshard_mpi.text import counted, one_line
from reshard_mpi.units import format_bytes, format_rate

if TYPE_CHECKING:
    from reshard_mpi.runs.outcome import Outcome

# Every report file begins so.
_BEGINNING = b'{\n "version": 1,\n "source": '


def is_report(path: Path) -> bool:
    """Tell whether the file at `path` is a report, or empty."""
    with path.open("rb") as stream:
        head = stream.read(len(_BEGINNING))
    return head in (_BEGINNING, b"")


def write_report(path: str, facts: Mapping[str, Any], outcome: Outcome, seconds: float) -> None:
    """Write the report of a run as JSON. Raises OSError if it cannot be written; then no file is left."""
    report = {"version": 1, **facts, "seconds": seconds, **outcome.as_json()}
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise


def summary(outcome: Outcome, seconds: float, *, is_verified: bool) -> str:
    """Return the closing line of a run; of one file by itself, it says where that is.

    is_verified: whether targets were compared with their sources.
    """
    made = [target for target in outcome.targets if not target.skipped]
    skipped = len(outcome.targets) - len(made)
    done = "wrote and verified" if is_verified else "wrote"
    speed = f", {_speed(sum(target.written_bytes for target in made), seconds)}" if made else ""
    text = f"{done} {counted(len(made), 'shard')}{speed}"
    text += f"; {skipped} {'was' if skipped == 1 else 'were'} complete already" if skipped else ""
    paths = [target.path for target in outcome.targets]
    kind = formats.name_of(paths[0]) if len(paths) == 1 else None
    # A file of a folder that is one checkpoint is nothing by itself.
    return f"{text}: {one_line(paths[0])}" if kind is not None and formats.folder_by_name(kind) is None else text


def verified(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a verification that found no damage."""
    shards = [checked for checked in outcome.checked if checked.by]
    tensors = sum(checked.tensors for checked in shards)
    by = ", ".join(dict.fromkeys(way for checked in shards for way in checked.by))
    speed = _speed(sum(checked.read_bytes for checked in shards), seconds)
    return f"verified {counted(len(shards), 'shard')}, {counted(tensors, 'tensor')}, {speed} by {by}: sound"


def same(outcome: Outcome, seconds: float) -> str:
    """Return the closing line of a comparison that found two checkpoints to hold the same."""
    tensors = sum(checked.tensors for checked in outcome.checked)
    speed = _speed(sum(checked.read_bytes for checked in outcome.checked), seconds)
    return f"compared {counted(tensors, 'tensor')}, {speed}: the same"


def _speed(size_bytes: int, seconds: float) -> str:
    return f"{format_bytes(size_bytes)} in {seconds:.2f} s ({format_rate(size_bytes, seconds)})"
