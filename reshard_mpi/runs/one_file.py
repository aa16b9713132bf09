"""One target file: it is filled, its structure is read back, and it is reported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard_mpi import formats
from reshard_mpi.engine.files import OnBytes, forget_cached
from reshard_mpi.engine.transfer import Span, write_shard
from reshard_mpi.errors import ShardError, TransformError, told
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import Format
from reshard_mpi.journal.publication import Publication
from reshard_mpi.planning.model import Limits, RankPlan
from reshard_mpi.runs.exchanged import Filled
from reshard_mpi.runs.outcome import TargetReport

if TYPE_CHECKING:
    from reshard_mpi.runs.overflows import Overflow


def target_report(
    plan: RankPlan,
    path: Path,
    begin: float,
    waited_seconds: float,
    leased_bytes: int,
    process: int,
    filled: Sequence[Filled],
) -> TargetReport:
    """Return the report of a target that is complete now. begin: a monotonic time. filled: its parts."""
    return TargetReport(
        rank=plan.target_rank,
        path=str(path),
        read_ranks=plan.read_ranks,
        written_bytes=plan.written_bytes,
        needed_bytes=plan.needed_bytes,
        requested_bytes=sum(part.requested_bytes for part in filled),
        mapped_bytes=sum(part.mapped_bytes for part in filled),
        seconds=time.monotonic() - begin,
        engine_seconds=max(part.seconds for part in filled),
        waited_seconds=waited_seconds + max(part.waited_seconds for part in filled),
        leased_bytes=leased_bytes,
        process=process,
        processes=len(filled),
        overflows=_joined_overflows(filled),
    )


def _joined_overflows(filled: Sequence[Filled]) -> tuple[Overflow, ...]:
    overflows = [overflow for part in filled for overflow in part.overflows]
    if not overflows:
        return ()
    from reshard_mpi.runs.overflows import joined

    return joined(overflows)


def write_whole(
    plan: RankPlan, format_name: str, publication: Publication, limits: Limits, on_bytes: OnBytes
) -> Filled:
    """Write the shard of `plan`, read its structure back, and put it in place."""
    module, fd, path = formats.by_name(format_name), publication.descriptor, str(publication.partial)
    manifest = module.reserve(fd, path, plan.shard)
    filled = fill_file(plan, manifest, fd, None, limits, on_bytes)
    module.seal(fd, path)
    require_as_meant(module, publication, manifest, {})
    publication.publish()
    return filled


def require_as_meant(module: Format, publication: Publication, manifest: Manifest, sums: Mapping[str, int]) -> None:
    """Raise TransformError if a sealed target, read back from the disk, has not the intended structure and sums."""
    forget_cached(publication.descriptor)
    try:
        module.read_back(manifest)
        found_sums = module.stored_sums(manifest.path) if sums else sums
    except ShardError as error:
        raise _not_as_meant(manifest.path, told(error)) from error
    if found_sums and found_sums != sums:
        raise _not_as_meant(manifest.path, "other sums")


def _not_as_meant(path: str, got: str) -> TransformError:
    return TransformError(
        "what was written is not what lies in the file",
        expected="the structure that was meant",
        got=got,
        where=path,
        remedy="look for a failing disk or memory, and run the same command with --resume",
    )


def fill_file(
    plan: RankPlan, manifest: Manifest, descriptor: int, span: Span | None, limits: Limits, on_bytes: OnBytes
) -> Filled:
    """Write the payloads of `plan` to a file that has been reserved. span: only this range of it; None: all."""
    begin = time.monotonic()
    traffic = write_shard(plan, manifest, descriptor, span=span, limits=limits, on_bytes=on_bytes)
    seconds = time.monotonic() - begin
    overflows = tuple(_overflows(plan, traffic.overflows)) if traffic.overflows else ()
    return Filled(plan.target_rank, traffic.requested_bytes, traffic.mapped_bytes, seconds, 0.0, overflows)


def _overflows(plan: RankPlan, elements: Mapping[str, int]) -> Iterator[Overflow]:
    """Yield the overflows of a target's tensors. elements: how many were too large, by name."""
    from reshard_mpi.runs.overflows import Overflow

    for spec in plan.tensors.specs:
        if spec.name in elements:
            yield Overflow(spec.name, spec.dtype.name, elements[spec.name])
