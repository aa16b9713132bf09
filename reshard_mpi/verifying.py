"""Runs that verify a checkpoint: against the one it was made from, or against the sums that it keeps itself.

Every process takes a share of the shards. Damage is told tensor by tensor; one damaged shard does not stop the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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
from reshard_mpi.records import COMMIT_RECORD, STATE, TargetRecord, TensorSum, read_json
from reshard_mpi.report import Checked, Failure, Outcome, Progress
from reshard_mpi.request import Request, Strategies
from reshard_mpi.source import SourceCheckpoint, require_rank
from reshard_mpi.strategy import table
from reshard_mpi.sums import sums_of_wholes
from reshard_mpi.verification import tensor_sum, where_it_differs

T = TypeVar("T")

_EXPECTED = (ReshardError, OSError, MemoryError)
# So many damaged tensors of one shard are located; that there are more is said.
_MAX_LOCATED = 20


def verify_pair(request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
    """Verify that the checkpoint `request.target` holds what a transform of `request.source` to it would write.

    Damage is in the outcome's failures. Raises, on every process alike, what keeps the two from being compared.
    """

    def begin() -> tuple[Conversion, SourceCheckpoint]:
        read = strategies or Strategies.read(request)
        source = SourceCheckpoint.open(discovery.find_shards(request.source, request.select), read.source)
        target = SourceCheckpoint.open(discovery.find_shards(request.target), read.target)
        return Conversion(source, read.target, request.unlisted), target

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
            return _compare(plan, shard)

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
    outcome = outcome._replace(failures=(*outcome.failures, *_missing(files, folder, outcome.checked, comm)))
    if not outcome.failures:
        if not any(checked.by for checked in outcome.checked):
            raise _no_sums(files.path)
        outcome = _with_wholes(outcome, folder, comm)
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
                remedy="give the strategies it was made with, or make it anew with --overwrite",
            )


def _described(tensor: tuple[object, ...] | None) -> str:
    if tensor is None:
        return "no such tensor"
    dtype, shape = tensor
    return f"{getattr(dtype, 'name', dtype)} of shape {shape}"


def _compare(plan: RankPlan, shard: Manifest) -> tuple[Checked, list[ReshardError]]:
    damage: list[ReshardError] = []
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
    tensors = read_bytes = world_size = 0
    for path in files.by_rank[rank]:
        shard = module.locate(path)
        if shard.identity is not None:
            world_size = shard.identity.world_size
            if folder.is_dir():
                require_rank(shard.identity, rank, world_size, path)
        if module.check_crc(path):
            by["its checksum"] = None
        recorded = record is not None and folder / record.file == Path(path)
        known: dict[str, int] = {}
        if stored := module.stored_sums(path):
            known.update(stored)
            by["its own sums"] = None
        if record is not None and recorded and record.sums:
            known.update({one.name: one.value for one in record.sums})
            by["the record of its run"] = None
        placed = _placed(shard, record.sums if record is not None and recorded else ())
        specs = [spec for spec in placed if spec.name in known]
        for summed in sum_tensors(specs, shard, limits=LIMITS):
            found.append(tensor_sum(summed.tensor, summed.found, loose=placed[summed.tensor]))
            tensors += 1
            read_bytes += summed.tensor.size_bytes
            if known[summed.tensor.name] != summed.found:
                damage.append(_damaged(shard, summed.tensor.name, known[summed.tensor.name], summed.found))
        if known:
            damage += _of_other_tensors(shard, known.keys(), {spec.name for spec in specs})
    checked = Checked(rank, files.by_rank[rank][0], tensors, read_bytes, tuple(by), tuple(found), world_size=world_size)
    return checked, damage


def _of_other_tensors(shard: Manifest, summed: Set[str], looked_at: Set[str]) -> list[ReshardError]:
    """Return an error if a tensor of the shard has no sum, or one that has is not there as it was."""
    names = sorted((summed | shard.tensors.keys()) - looked_at)
    if not names:
        return []
    entry = shard.tensors.get(names[0])
    return [
        DamageError(
            f"{names[0]!r} is not as it was written",
            expected="a tensor of the type and shape that its sum is of" if names[0] in summed else "a sum of it",
            got="no such tensor" if entry is None else f"{entry.dtype.name} of shape {list(entry.shape)}",
            where=shard.path,
            remedy="restore the file, or make it anew with --overwrite",
        )
    ]


def _placed(shard: Manifest, recorded: tuple[TensorSum, ...]) -> dict[TensorSpec, bool]:
    """Return the tensors of a shard whose place in the whole is known, from itself or from its record if that fits.

    Of each: whether it is loose, for all that is known.
    """
    records = {one.name: one for one in recorded}
    listed = () if shard.identity is None else table.loads(shard.identity.strategy, shard.path).parameters
    found: dict[TensorSpec, bool] = {}
    for name, entry in shard.tensors.items():
        record = records.get(name)
        loose = name not in listed if record is None else record.loose
        if record is not None and (record.dtype, record.shape) != (entry.dtype.name, entry.shape):
            continue
        if entry.box is not None and entry.global_shape is not None:
            found[TensorSpec(name, entry.dtype, entry.global_shape, entry.box)] = loose
        elif record is not None:
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


def _missing(files: ShardFiles, folder: Path, found: Iterable[Checked], comm: Comm) -> Iterator[Failure]:
    """Yield a failure if there should be more shards, by the commit record or by what the shards say of themselves."""
    if not folder.is_dir():
        return  # one file of a checkpoint can be verified by itself
    committed = (read_json(folder / COMMIT_RECORD) or {}).get("target_ranks")
    says = [checked.world_size for checked in found]
    says += [committed] if isinstance(committed, int) else []
    expected = max(says, default=0)
    missing = expected - sum(rank < expected for rank in files.by_rank)
    if missing:
        first = next(rank for rank in range(expected) if rank not in files.by_rank)
        error = DamageError(
            "a shard is missing" if missing == 1 else f"{missing} shards are missing, this one the first",
            expected=f"those of ranks 0 to {expected - 1}",
            got=f"{len(files.by_rank)} of {expected}",
            where=str(folder),
            remedy="restore them from a copy, or finish the transform with --resume",
        )
        yield Failure.here(first, comm, error)


def _with_wholes(outcome: Outcome, folder: Path, comm: Comm) -> Outcome:
    """Compare whole tensors with the commit record, where all shards are known well enough."""
    committed = (read_json(folder / COMMIT_RECORD) or {}).get("sums", {})
    try:
        sums = dict(sums_of_wholes(checked.sums for checked in outcome.checked))
        for name, value in committed.items():
            if name in sums and value != f"{sums[name]:08x}":
                raise DamageError(
                    f"{name!r} is not what was committed",
                    expected=f"CRC-32 {value}, as {COMMIT_RECORD} says",
                    got=f"{sums[name]:08x}",
                    where=str(folder),
                    remedy="restore the checkpoint from a copy",
                )
    except DamageError as error:
        return outcome._replace(failures=(Failure.here(None, comm, error),))
    return outcome


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
