"""Runs that verify a checkpoint: against the one it was made from, or against the sums that it keeps itself.

Every process takes a share of the shards. Damage is told tensor by tensor; one damaged shard does not stop the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from reshard_mpi import discovery, formats
from reshard_mpi.box import Box
from reshard_mpi.comm import Comm
from reshard_mpi.conversion import LIMITS, Conversion
from reshard_mpi.discovery import ShardFiles
from reshard_mpi.division import assign
from reshard_mpi.engine.sums import sum_shard, sum_tensors
from reshard_mpi.errors import DamageError, ReshardError, SourceError, as_reshard_error
from reshard_mpi.governor.admission import open_governor
from reshard_mpi.manifest import Manifest, Segments, TensorSpec
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.records import COMMIT_RECORD, STATE, CommitRecord, TargetRecord, TensorSum, record_path
from reshard_mpi.report import Checked, Failure, Outcome, Progress
from reshard_mpi.request import Request, Strategies
from reshard_mpi.source import SourceCheckpoint
from reshard_mpi.strategy import table
from reshard_mpi.sums import sums_of_wholes
from reshard_mpi.verification import tensor_sum, where_it_differs

T = TypeVar("T")

_EXPECTED = (ReshardError, OSError, MemoryError)
# So many damaged tensors of one shard are located; that there are more is said.
_MAX_LOCATED = 20
_MAX_QUOTED = 200


def verify_pair(request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
    """Verify that the checkpoint `request.target` holds what a transform of `request.source` to it would write.

    Damage is in the outcome's failures. Raises, on every process alike, what keeps the two from being compared.
    """

    def begin() -> tuple[Conversion, SourceCheckpoint]:
        read = strategies or Strategies.read(request)
        source = SourceCheckpoint.open(discovery.find_shards(request.source, request.select), read.source)
        held = discovery.find_shards(request.target)
        target = SourceCheckpoint.open(held, None if request.dst_strategy is None else read.target)
        return Conversion(source, target.strategy, request.unlisted), target

    conversion, target = _agreed(begin, comm)
    weights = conversion.target_weights(range(conversion.target.world_size))
    governor = open_governor(request.allowance, os.environ)

    def check(rank: int) -> tuple[Checked, list[ReshardError]]:
        plan = conversion.plan(rank, checked=False)
        if rank not in target:
            raise DamageError("a shard is missing", expected=f"one of target rank {rank}", where=target.files.path)
        shard = target.manifest(rank)
        _require_same_tensors(plan, shard)
        with governor.lease(plan.peak_bytes(LIMITS), f"target rank {rank} of {request.target}", progress.waiting):
            done, damage = _compare(plan, shard)
            unfit: dict[int, ReshardError] = {}
            while damage and (found := _unfit(conversion.source, plan, unfit)):
                unfit |= found
                sound = SourceCheckpoint.open(conversion.source.files, conversion.source.strategy, unfit)
                plan = replace(conversion, source=sound, _opener=None).plan(rank, checked=False)
                done, damage = _compare(plan, shard)
        return done, damage

    return _each(weights, comm, check)


def verify_alone(request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
    """Verify the checkpoint `request.source` against the sums that it keeps.

    Damage is in the outcome's failures. Raises, on every process alike, what keeps it from being verified: above all
    that it keeps no sums.
    """
    files = _agreed(lambda: discovery.find_shards(request.source, request.select), comm)
    governor = open_governor(request.allowance, os.environ)
    folder = Path(files.path)

    def check(rank: int) -> tuple[Checked, list[ReshardError]]:
        with governor.lease(_peak_bytes(), f"rank {rank} of {request.source}", progress.waiting):
            return _check_shard(files, folder, rank)

    outcome = _each(dict.fromkeys(files.by_rank, 1), comm, check)
    damage = list(_together(files, outcome.checked if not outcome.failures else ()))
    outcome = outcome._replace(failures=(*outcome.failures, *(Failure.here(None, comm, error) for error in damage)))
    if not outcome.failures and not any(checked.by for checked in outcome.checked):
        raise _no_sums(files.path)
    unknown = [checked.rank for checked in outcome.checked if not checked.by]
    if unknown:
        note = f"{len(unknown)} of {len(files.by_rank)} shards keep no sums, that of rank {unknown[0]} the first"
        outcome = outcome._replace(notes=(*outcome.notes, note))
    return outcome


def _agreed(begin: Callable[[], T], comm: Comm) -> T:
    """Return what `begin` does; raise, on all processes alike, what went wrong with it on one of them."""
    done: list[T] = []
    failures: tuple[Failure, ...] = ()
    try:
        done.append(begin())
    except _EXPECTED as error:
        failures = (Failure.here(None, comm, as_reshard_error(error)),)
    for outcome in comm.allgather(Outcome(failures=failures), "begun"):
        for failure in outcome.failures:
            raise failure.named(alone=True)
    return done[0]


def _each(
    weights: Mapping[int, int], comm: Comm, check: Callable[[int], tuple[Checked, list[ReshardError]]]
) -> Outcome:
    """Check this process's share of the ranks; return what all processes have found."""
    checked: list[Checked] = []
    failures: list[Failure] = []
    for rank in assign(weights, range(comm.size))[comm.rank]:
        try:
            done, damage = check(rank)
        except _EXPECTED as error:
            failures.append(Failure.here(rank, comm, as_reshard_error(error)))
            continue
        failures += [Failure.here(rank, comm, error) for error in damage]
        checked.append(done)
    lost = tuple(lost for done in checked for lost in done.lost)
    own = Outcome(failures=tuple(failures), lost=lost, checked=tuple(checked))
    found = Outcome(processes=comm.size).joined(comm.allgather(own, "verified"))
    return found._replace(failures=tuple(sorted(found.failures, key=lambda failure: failure.rank or 0)))


def _require_same_tensors(plan: RankPlan, shard: Manifest) -> None:
    """Raise DamageError if the shard does not hold the tensors that are planned, of these types and shapes."""
    planned = {spec.name: (spec.dtype, spec.box.shape) for spec in plan.shard.tensors}
    held = {name: (entry.dtype, entry.shape) for name, entry in shard.tensors.items()}
    for name in [*planned, *(name for name in held if name not in planned)]:
        if planned.get(name) != held.get(name):
            raise DamageError(
                f"{name!r} is not what the source holds",
                expected=_described(planned.get(name)),
                got=_described(held.get(name)),
                where=shard.path,
                remedy="give the strategies and the --unlisted it was made with, or make it anew with --overwrite",
            )


def _unfit(source: SourceCheckpoint, plan: RankPlan, known: Collection[int]) -> dict[int, ReshardError]:
    """Return what is wrong with source shards of `plan`, besides those `known`, that do not fit their own checksum."""
    found = ((rank, source.check_crc(rank)) for rank in plan.read_ranks if rank not in known)
    return {rank: error for rank, error in found if error is not None}


def _described(tensor: tuple[object, ...] | None) -> str:
    if tensor is None:
        return "no such tensor"
    dtype, shape = tensor
    return f"{getattr(dtype, 'name', dtype)} of shape {shape}"


def _quoted(text: str | None) -> str:
    if text is None:
        return "no such text"
    return repr(text) if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]!r}..."


def _compare(plan: RankPlan, shard: Manifest) -> tuple[Checked, list[ReshardError]]:
    damage: list[ReshardError] = []
    for name in sorted(plan.strings.keys() | shard.strings.keys()):
        expected, got = (strings.get(name) for strings in (plan.strings, shard.strings))
        if expected != got:
            problem = f"{name!r} is not the text that the source holds"
            damage.append(DamageError(problem, expected=_quoted(expected), got=_quoted(got), where=shard.path))
    for summed in sum_shard(plan, shard, span=None, limits=LIMITS):
        if summed.expected != summed.found:
            if len(damage) == _MAX_LOCATED:
                damage.append(DamageError("more tensors of this shard differ", where=shard.path))
                break
            damage.append(where_it_differs(plan, shard, summed.tensor.name, LIMITS))
    read_bytes = plan.written_bytes
    by = ("the source",) if not damage else ()
    return Checked(plan.target_rank, shard.path, len(plan.tensors), read_bytes, by, lost=plan.lost), damage


def _check_shard(files: ShardFiles, folder: Path, rank: int) -> tuple[Checked, list[ReshardError]]:
    """Check what one rank holds against the checksum, the sums and the record that there are of it."""
    module = formats.by_name(files.format)
    record = TargetRecord.read(folder / STATE, rank)
    damage: list[ReshardError] = []
    by: dict[str, None] = {}
    found: list[TensorSum] = []
    tensors = read_bytes = 0
    if record is None and os.path.lexists(record_path(folder / STATE, rank)):
        remedy = "reshard-mpi verify SRC DST, if there is a source; transform with --resume makes the target anew"
        where = str(record_path(folder / STATE, rank))
        damage.append(DamageError("the record of a shard is damaged", where=where, remedy=remedy))
    for path in files.by_rank[rank]:
        shard = module.locate(path)
        if module.check_crc(path):
            by["its checksum"] = None
        known: dict[str, int] = {}
        if stored := module.stored_sums(path):
            known.update(stored)
            by["its own sums"] = None
        recorded: dict[str, TensorSum] = {}
        if record is not None and _is_of(record, folder, path):
            recorded = {one.name: one for one in record.sums}
            damage += _against_record(shard, record, recorded)
        if recorded:
            known.update({name: one.value for name, one in recorded.items()})
            by["the record of its run"] = None
        if shard.identity is not None and shard.identity.rank != rank:
            expected, got = f"rank {rank}", f"rank {shard.identity.rank}"
            damage.append(DamageError("a shard says it belongs elsewhere", expected=expected, got=got, where=path))
        placed = _placed(shard, recorded)
        specs = [spec for spec in placed if spec.name in known]
        for summed in sum_tensors(specs, shard, limits=LIMITS):
            found.append(tensor_sum(summed.tensor, summed.found, loose=placed[summed.tensor]))
            tensors += 1
            read_bytes += summed.tensor.size_bytes
            name = summed.tensor.name
            for value in {known[name], stored.get(name, known[name])} - {summed.found}:  # the shard's, the record's
                damage.append(_damaged(shard, name, value, summed.found))
        lost = sorted(known.keys() - shard.tensors.keys())
        if lost:
            damage.append(DamageError(f"{lost[0]!r} is missing", expected="as its sums say", where=path))
    return Checked(rank, files.by_rank[rank][0], tensors, read_bytes, tuple(by), tuple(found)), damage


def _is_of(record: TargetRecord, folder: Path, path: str) -> bool:
    """Tell whether a record is of the file at `path`, and not of one that was about to take its place."""
    return folder / record.file == Path(path) and (record.announced is None or record.is_about(Path(path).stat()))


def _against_record(shard: Manifest, record: TargetRecord, recorded: Mapping[str, TensorSum]) -> Iterator[ReshardError]:
    """Yield what a shard is not that its record says it is, besides the bytes of its tensors."""
    size_bytes = Path(shard.path).stat().st_size
    if size_bytes != record.size_bytes:
        expected, got = f"{record.size_bytes} bytes, as it was written", f"{size_bytes}"
        yield DamageError("a shard has another size", expected=expected, got=got, where=shard.path)
    if not recorded:
        return
    for name, entry in shard.tensors.items():
        one = recorded.get(name)
        if one is None or (one.dtype, one.shape) != (entry.dtype.name, entry.shape):
            yield DamageError(
                f"{name!r} is not what was written",
                expected=_described(None if one is None else (one.dtype, one.shape)),
                got=_described((entry.dtype, entry.shape)),
                where=shard.path,
                remedy="restore the file",
            )


def _placed(shard: Manifest, recorded: Mapping[str, TensorSum]) -> dict[TensorSpec, bool]:
    """Return the tensors of a shard whose place in the whole is known, from the shard itself or its record.

    Of each: whether it is loose, for all that is known.
    """
    listed = () if shard.identity is None else table.loads(shard.identity.strategy, shard.path).parameters
    found: dict[TensorSpec, bool] = {}
    for name, entry in shard.tensors.items():
        record = recorded.get(name)
        loose = name not in listed if record is None else record.loose
        if entry.box is not None and entry.global_shape is not None:
            found[TensorSpec(name, entry.dtype, entry.global_shape, entry.box)] = loose
        elif record is not None and record.shape == entry.shape:
            stop = tuple(low + length for low, length in zip(record.start, entry.shape))
            found[TensorSpec(name, entry.dtype, record.global_shape, Box(record.start, stop))] = loose
    return found


def _damaged(shard: Manifest, name: str, expected: int, found: int) -> DamageError:
    source = shard.tensors[name].source
    place = ""
    if isinstance(source, Segments) and source.ranges:
        first, last = source.ranges[0], source.ranges[-1]
        place = f", bytes {first.offset_bytes} to {last.offset_bytes + last.length_bytes}"
    return DamageError(
        f"{name!r} is damaged",
        expected=f"the sum {expected:08x}, as it was written",
        got=f"{found:08x}",
        where=f"{shard.path}{place}",
        remedy="restore the file; reshard-mpi verify SRC DST says which byte, if there is a source",
    )


def _together(files: ShardFiles, checked: Iterable[Checked]) -> Iterator[DamageError]:
    """Yield what is wrong with the shards together: copies differ, or they are not those of their commit record.

    checked: all shards, if they are sound each by itself.
    """
    folder = Path(files.path)
    sums: dict[str, int] = {}
    try:
        sums.update(sums_of_wholes({one.rank: one.sums for one in checked}))
    except DamageError as error:
        error.where = files.path
        yield error
    record = CommitRecord.read(folder)
    if record is None:
        if os.path.lexists(folder / COMMIT_RECORD):
            remedy = "reshard-mpi commit writes it anew, if the records of the run are there"
            yield DamageError("the commit record is damaged", where=str(folder / COMMIT_RECORD), remedy=remedy)
        return
    named = {folder / file for file in record.files.values()}
    if not all(Path(path) in named for paths in files.by_rank.values() for path in paths):
        return
    for rank in sorted(record.files.keys() - files.by_rank.keys()):
        yield DamageError(
            "a shard is missing",
            expected=f"{record.files[rank]}, as {COMMIT_RECORD} says",
            where=files.path,
            remedy="restore it; reshard-mpi transform with --resume makes it anew, if there is a source",
        )
    for name, value in record.sums.items():
        if name in sums and value != f"{sums[name]:08x}":
            yield DamageError(
                f"{name!r} is not what was committed",
                expected=f"CRC-32 {value}, as {COMMIT_RECORD} says",
                got=f"{sums[name]:08x}",
                where=files.path,
                remedy="restore the checkpoint from a copy",
            )


def _no_sums(path: str) -> SourceError:
    return SourceError(
        "the checkpoint keeps no sums to verify it against",
        expected="HDF5 shards or records made by transform --verify, or .ckpt files with a checksum (--crc)",
        got="none of them",
        where=path,
        remedy="give its source as well: reshard-mpi verify SRC DST",
    )


def _peak_bytes() -> int:
    return LIMITS.base_bytes + LIMITS.buffer_bytes + LIMITS.window_bytes
