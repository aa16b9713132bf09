"""Copies that must be the same, compared byte by byte before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import DisagreementError, StrategyError
from reshard_mpi.formats.columns import TensorEntry
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.copies import Alike
from reshard_mpi.planning.losses import Lost
from reshard_mpi.planning.model import Check, Copy, Limits
from reshard_mpi.planning.tensors import Part
from reshard_mpi.units import KIB

# Shards of so many tensors in all are compared at a time, some 600 bytes each; where more ranks hold the same, the
# first of them is read once more for each such batch.
_MAX_TENSORS_AT_ONCE = 20_000


def compare(source: SourceCheckpoint, every: Iterable[Alike], limits: Limits) -> tuple[Lost, ...]:
    """Compare all copies of `every`, those of the same holders one after another; return the holders left out.

    Every copy is read once, in blocks of which two are in memory. Shards that cannot be read, and those that lack a
    tensor, have no copy of it. Raises DisagreementError for the first difference, StrategyError if it is in what the
    source strategy does not list.
    """
    lost: dict[int, Lost] = {}
    for _, group in groupby(every, key=attrgetter("holding")):
        _compare_holders(source, tuple(group), limits, lost)
    return tuple(lost.values())


def comparing_bytes(limits: Limits) -> int:
    """Project what comparing takes besides what is there: two blocks, a window, records."""
    return limits.buffer_bytes + limits.window_bytes + 2 * _MAX_TENSORS_AT_ONCE * KIB


def difference(source: SourceCheckpoint, check: Check, other_rank: int, element: Sequence[int]) -> DisagreementError:
    """Return the error for copies that differ, the first one of `check` and that of another rank."""
    ranks = (check.copies[0].source_rank, other_rank)
    return DisagreementError(
        f"copies of {check.name!r} differ",
        expected=f"the same bytes on ranks {ranks[0]} and {ranks[1]}",
        got=f"a difference at element {list(element)}: {check.why}",
        where=" and ".join(source.manifest(rank).path for rank in ranks),
        remedy="use shards of one and the same moment",
    )


def _compare_holders(source: SourceCheckpoint, group: Sequence[Alike], limits: Limits, lost: dict[int, Lost]) -> None:
    """Compare what the same ranks hold. lost: takes those that cannot be read."""
    from reshard_mpi.engine.files import Files
    from reshard_mpi.engine.regions import first_difference

    first: dict[tuple[int, str], Copy] = {}  # the first copy of each, by its place in the group and its name
    for batch in _batches(source, group[0].parts, lost):
        with Files() as files:
            for at, one in enumerate(group):
                for name in one.names:
                    known = first.get((at, name))
                    copies = list(_copies(one, name, batch, known))
                    if copies:
                        first[at, name] = copies[0]
                    if len(copies) < 2:
                        continue
                    check = Check(name, tuple(copies), refuse=True, why=one.why)
                    found = first_difference(check, limits=limits, files=files)
                    if found is not None:
                        other, element = found
                        told = difference(source, check, other.source_rank, element)
                        raise told if one.listed else _of_unlisted(name, told, source)


def _of_unlisted(name: str, told: DisagreementError, source: SourceCheckpoint) -> StrategyError:
    """Return the error for copies that differ of what only the target strategy cuts: most likely they are no copies."""
    origin = source.strategy.origin
    return StrategyError(
        f"the source strategy does not list {name!r}, whose copies differ, and the target strategy cuts it",
        expected=f"{told.expected}, or a source strategy that says how it is cut",
        got=told.got,
        where=", ".join(filter(None, (origin, told.where))),
        remedy="list it in the source strategy as the source is cut",
    )


def _batches(
    source: SourceCheckpoint, parts: Sequence[Part], lost: dict[int, Lost]
) -> Iterator[list[tuple[int, int, Manifest]]]:
    """Yield the shards that hold `parts`, some at a time: the part, the rank, and what its shard holds."""
    batch: list[tuple[int, int, Manifest]] = []
    tensors = 0
    for at, part in enumerate(parts):
        for rank in part.placement.holders(part.piece):
            manifest = source.find(rank) if rank in source else None
            if manifest is None:
                if not source.files.picked or rank in source:
                    lost[rank] = source.lost(rank)
                continue
            if batch and tensors + len(manifest.tensors) > _MAX_TENSORS_AT_ONCE:
                yield batch
                batch, tensors = [], 0
            batch.append((at, rank, manifest))
            tensors += len(manifest.tensors)
    if batch:
        yield batch


def _copies(one: Alike, name: str, batch: Iterable[tuple[int, int, Manifest]], known: Copy | None) -> Iterator[Copy]:
    """Yield the copies of one tensor, after the one that is `known`.

    Raises DisagreementError for one of another shape or type.
    """
    first: TensorEntry | None = None
    if known is not None:
        first = known.source
        yield known
    for at, rank, manifest in batch:
        entry, box = manifest.tensors.get(name), one.parts[at].box
        if entry is None:
            continue
        first = first or entry
        if entry.shape != box.shape or entry.box not in (None, box) or entry.dtype != first.dtype:
            raise DisagreementError(
                f"copies of {name!r} differ in shape or type",
                expected=f"{first.dtype} of shape {list(box.shape)} (box {box})",
                got=f"{entry.dtype} of shape {list(entry.shape)}" + (f" (box {entry.box})" if entry.box else ""),
                where=manifest.path,
                remedy="use shards of one and the same checkpoint",
            )
        yield Copy(rank, entry, box, one.region)
