"""Compare replicas before anything is written (`compare`, `compare_checks`), and read what targets must share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import fill, takes_numpy
from reshard_mpi.errors import CoverageError, DisagreementError, StrategyError
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.comparison_choice import NUMBERED_BY_STAGES, ReplicaGroup
from reshard_mpi.planning.rank_plan import Check, Limits, ReadItem, SharedFact, TensorPlan
from reshard_mpi.planning.source_flaws import Differing, PrefixDigest, UnusableShard, named
from reshard_mpi.planning.source_tensors import TensorPart
from reshard_mpi.text import KIB

# How many tensors the shards of a batch may have in all; each takes some 600 bytes. If the ranks that hold the same
# have more, they are compared in several batches, and the first of them is read again for each.
_MAX_TENSORS_AT_ONCE = 20_000
# How many copies in different batches are told apart by their digests at once; each takes some 200 bytes.
_MAX_DIGESTS = 20_000
_DIGEST_BYTES = 200


# A shard in a batch: the number of the part that it holds, its rank, and its manifest.
_Holder = tuple[int, int, Manifest]


def compare(
    source: SourceCheckpoint, all_alike: Iterable[ReplicaGroup], limits: Limits, on_bytes: OnBytes
) -> tuple[UnusableShard, ...]:
    """Compare all replicas of tensors that should be the same; return the shards that could not be read.

    Args:
        all_alike: the tensors and their holders; those of the same holders must follow one another. Each copy is read
            once, in blocks, two of which are in memory at a time. A shard that lacks a tensor is passed over.
        on_bytes: called with the number of bytes just compared, of all replicas.

    Raises DisagreementError for the first difference (or where copies are the same that must differ), StrategyError if
    the source strategy does not list the tensor, or CoverageError if parts of a sum may be on ranks whose shards the
    user has not picked.
    """
    comparison = _Comparison(source, limits, on_bytes)
    for (_, expect_distinct), group in groupby(all_alike, key=attrgetter("holding", "expect_distinct")):
        for portion in _portions(group) if expect_distinct else ():
            comparison.tell_apart(portion)
        if not expect_distinct:
            comparison.compare_holders(tuple(group))
    return tuple(comparison.lost.values())


def compare_checks(
    source: SourceCheckpoint, checks: Iterable[Check], limits: Limits, before_gathering: Callable[[], object]
) -> Iterator[Differing]:
    """Compare the copies that each check names; yield the tensors that differ, with the ranks that have others.

    Args:
        before_gathering: called before copies are compared with numpy, which takes more memory.

    Raises DisagreementError if copies differ that must not.
    """
    from reshard_mpi.engine.first_difference import first_difference

    for check in checks:
        if any(takes_numpy(item, item.target_region, limits.buffer_bytes) for item in check.reads):
            before_gathering()
        with Files() as files:
            differing = first_difference(check, limits=limits, files=files)
            if differing is None:
                continue
            if check.refuse:
                raise _difference(source, check, differing[0].source_rank, differing[1])
            first, *others = check.reads
            pairs = (check._replace(reads=(first, other)) for other in others)
            ranks = [pair.reads[1].source_rank for pair in pairs if first_difference(pair, limits=limits, files=files)]
        yield Differing(check.name, (first.source_rank, *ranks))


def read_counters(counters: Iterable[tuple[str, TensorPlan]], limits: Limits) -> tuple[SharedFact, ...]:
    """Read step counters, each given behind the path of a shard that has it; targets of one checkpoint share them."""
    facts = []
    with Files() as files:
        for path, counter in counters:
            values = numbers(_content(counter, files, limits), counter.spec.dtype)
            facts.append(SharedFact(counter.spec.name, str(values if counter.spec.global_shape else values[0]), path))
    return tuple(facts)


def read_beginnings(starts: Iterable[TensorPlan], limits: Limits) -> tuple[PrefixDigest, ...]:
    """Read the beginnings of tensors that no strategy lists, and return their digests, to be compared by targets."""
    with Files() as files:
        return tuple(
            PrefixDigest(
                start.spec.name, hashlib.sha256(_content(start, files, limits)).hexdigest(), start.reads[0].source_rank
            )
            for start in starts
        )


def _content(tensor: TensorPlan, files: Files, limits: Limits) -> bytes:
    """Return the bytes of a small tensor."""
    content = bytearray(tensor.spec.size_bytes)
    for region in tensor.reads:
        fill(files, region, tensor.spec.box, memoryview(content), limits)
    return bytes(content)


def comparing_bytes(limits: Limits) -> int:
    """Return the memory that `compare` needs in addition to the memory in use.

    That is two blocks, a window, the tables of shards, and digests.
    """
    tables_bytes = 2 * _MAX_TENSORS_AT_ONCE * KIB
    return limits.buffer_bytes + limits.window_bytes + tables_bytes + _MAX_DIGESTS * _DIGEST_BYTES


def _difference(source: SourceCheckpoint, check: Check, other_rank: int, element: Sequence[int]) -> DisagreementError:
    """Return the error for two copies of `check` that differ first at `element`."""
    ranks = (check.reads[0].source_rank, other_rank)
    by_numbers = "; optimizers of stages that go by numbers of each stage cannot be joined: leave them out (--exclude)"
    return DisagreementError(
        f"copies of {check.name!r} differ",
        expected=f"the same bytes on ranks {ranks[0]} and {ranks[1]}",
        got=f"a difference at element {list(element)}: {check.why}",
        where=" and ".join(source.manifest(rank).path for rank in ranks),
        remedy="use shards of one and the same moment" + by_numbers * (check.why == NUMBERED_BY_STAGES),
    )


class _Comparison:
    """Compares replicas of a source. lost: the holders that could not be read so far, by rank."""

    def __init__(self, source: SourceCheckpoint, limits: Limits, on_bytes: OnBytes) -> None:
        self.lost: dict[int, UnusableShard] = {}
        self._source = source
        self._limits = limits
        self._on_bytes = on_bytes

    def compare_holders(self, group: Sequence[ReplicaGroup]) -> None:
        """Compare the tensors of `group`, which the same ranks hold. Raises what `compare` raises."""
        from reshard_mpi.engine.first_difference import digest_unless_zeros, first_difference

        first: dict[tuple[int, str], ReadItem] = {}  # of each tensor, by its place in the group and its name
        for batch in self._batches(group[0].parts):
            with Files() as files:
                for place, alike in enumerate(group):
                    for name in alike.names:
                        reads = list(_read_items(alike, name, batch, first.get((place, name))))
                        if reads:
                            first[place, name] = reads[0]
                        if len(reads) < 2:
                            continue
                        check = Check(name, tuple(reads), refuse=True, why=alike.why)
                        differing = first_difference(check, limits=self._limits, files=files, on_bytes=self._on_bytes)
                        if differing is not None:
                            other, element = differing
                            error = _difference(self._source, check, other.source_rank, element)
                            raise error if alike.listed else _of_unlisted(name, error, self._source)

        unasked = self._unasked(group[0].parts)
        for place, alike in enumerate(group) if unasked else ():
            for name in alike.names if alike.is_partial else ():
                item = first.get((place, name))
                with Files() as files:
                    if item is not None and digest_unless_zeros(item, limits=self._limits, files=files) is not None:
                        raise _of_others(name, item.source_rank, unasked, self._source)

    def tell_apart(self, group: Sequence[ReplicaGroup]) -> None:
        """Make sure that no two copies of a tensor are the same: they are going to be added (--accumulated sum).

        Copies in shards that are opened together are compared up to where they differ, others by digests of all that
        they hold. Raises what `compare` raises.
        """
        batches = self._batches(group[0].parts)
        first, second = next(batches, []), next(batches, None)
        if second is None:
            self._tell_apart_at_once(group, first)
        else:
            self._tell_apart_by_digests(group, chain((first, second), batches))

    def _tell_apart_at_once(self, group: Sequence[ReplicaGroup], batch: Iterable[_Holder]) -> None:
        from reshard_mpi.engine.first_difference import first_same

        with Files() as files:
            for check in _checks(group, batch):
                same = first_same(check, limits=self._limits, files=files) if len(check.reads) > 1 else None
                if same is not None:
                    raise _not_apart(self._source, check.name, check.why, same)
                self._on_bytes(sum(item.size_bytes for item in check.reads))

    def _tell_apart_by_digests(self, group: Sequence[ReplicaGroup], batches: Iterable[Iterable[_Holder]]) -> None:
        from reshard_mpi.engine.first_difference import digest_unless_zeros

        rank_of: dict[tuple[int, str, bytes], int] = {}  # a rank for each digest of each tensor's copies
        for batch in batches:
            with Files() as files:
                for number, check in enumerate(_checks(group, batch)):
                    for item in check.reads:
                        digest = digest_unless_zeros(item, limits=self._limits, files=files)
                        self._on_bytes(item.size_bytes)
                        if digest is None:
                            continue
                        other = rank_of.setdefault((number, check.name, digest), item.source_rank)
                        if other != item.source_rank:
                            same = other, item.source_rank
                            raise _not_apart(self._source, check.name, check.why, same)

    def _unasked(self, parts: Sequence[TensorPart]) -> list[int]:
        """Return the ranks that hold `parts`, and are not among those whose shards the user has picked."""
        if not self._source.files.picked:
            return []
        return [rank for part in parts for rank in part.placement.holders(part.piece) if rank not in self._source]

    def _batches(self, parts: Sequence[TensorPart]) -> Iterator[list[_Holder]]:
        """Yield the shards that hold `parts`, in batches of (number of the part, rank, manifest)."""
        source, batch, tensors = self._source, list[_Holder](), 0
        for number, part in enumerate(parts):
            for rank in part.placement.holders(part.piece):
                manifest = source.find(rank) if rank in source else None
                if manifest is None:
                    if not source.files.picked or rank in source:
                        self.lost[rank] = source.lost(rank)
                    continue
                if batch and tensors + len(manifest.tensors) > _MAX_TENSORS_AT_ONCE:
                    yield batch
                    batch, tensors = [], 0
                batch.append((number, rank, manifest))
                tensors += len(manifest.tensors)
        if batch:
            yield batch


def _portions(group: Iterable[ReplicaGroup]) -> Iterator[tuple[ReplicaGroup, ...]]:
    """Cut checks of the same ranks into portions small enough that all copies of one can be kept in memory."""
    portion, count = list[ReplicaGroup](), 0
    for alike in group:
        names = max(1, _MAX_DIGESTS // alike.replicas)
        for first in range(0, len(alike.names), names):
            part = alike._replace(names=alike.names[first : first + names])
            if portion and count + len(part.names) * part.replicas > _MAX_DIGESTS:
                yield tuple(portion)
                portion, count = [], 0
            portion.append(part)
            count += len(part.names) * part.replicas
    if portion:
        yield tuple(portion)


def _checks(group: Sequence[ReplicaGroup], batch: Iterable[_Holder]) -> Iterator[Check]:
    """Yield the copies of each tensor of a group in a batch of shards, always in the same order."""
    shards = list(batch)
    for alike in group:
        for name in alike.names:
            yield Check(name, tuple(_read_items(alike, name, shards)), refuse=True, why=alike.why)


def _not_apart(source: SourceCheckpoint, name: str, why: str, same: Sequence[int]) -> DisagreementError:
    """Return the error for copies on the ranks `same` that are going to be added, and are the same."""
    return DisagreementError(
        f"copies of {name!r} are the same, and would be added",
        expected=f"on {named(same)} different sums, each of data of its own (--accumulated sum)",
        got=f"the same bytes: {why}",
        where=" and ".join(source.manifest(rank).path for rank in same),
        remedy="leave out --accumulated if all ranks hold the same; --accumulated mean is right even if some do;"
        " --replicas any adds what is the same as well",
    )


def _of_others(name: str, rank: int, others: Sequence[int], source: SourceCheckpoint) -> CoverageError:
    """Return the error for a part of a sum whose other parts are on ranks that the user has not picked."""
    return CoverageError(
        f"{name!r} is a partial sum of a step that is not finished, and other parts may be on other ranks",
        expected=f"the shards of {named(others)} as well",
        got=f"that of rank {rank}, which does not stand for them",
        where=source.manifest(rank).path,
        remedy="give these shards too, and say what becomes of the sums with accumulated: rank_list_for_transform names"
        " the shards if it is told the same; or save at the end of a step",
    )


def _of_unlisted(name: str, error: DisagreementError, source: SourceCheckpoint) -> StrategyError:
    """Return the error for differing copies of a tensor that only the target strategy lists, and cuts."""
    origin = source.strategy.origin
    return StrategyError(
        f"the source strategy does not list {name!r}, whose copies differ, and the target strategy cuts it",
        expected=f"{error.expected}, or a source strategy that says how it is cut",
        got=error.got,
        where=", ".join(filter(None, (origin, error.where))),
        remedy="list it in the source strategy as the source is cut",
    )


def _read_items(
    alike: ReplicaGroup, name: str, batch: Iterable[_Holder], first_item: ReadItem | None = None
) -> Iterator[ReadItem]:
    """Yield the copies of one tensor in a batch of shards, after `first_item` of an earlier batch.

    Raises DisagreementError for a copy of another shape or type.
    """
    first: TensorEntry | None = None
    if first_item is not None:
        first = first_item.source
        yield first_item
    for number, rank, manifest in batch:
        entry, box = manifest.tensors.get(name), alike.parts[number].box
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
        yield ReadItem(rank, entry, box, alike.region)
