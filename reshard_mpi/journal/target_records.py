"""Read and write the records of complete targets (`TargetRecord`), with the sums of their tensors (`TensorSum`).

`.reshard_mpi/run.json` names the run, `.reshard_mpi/rank_<r>.json` records that target r is complete and what it was
made from. `reshard.json`, in the target folder itself, exists only while all targets are complete: see `commit`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from reshard_mpi.errors import DamageError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.filesystem.paths import is_object_path, rank_of_folder
from reshard_mpi.filesystem.source_files import FileVersion, SourceFile, open_file, version_of
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.groups import grouped
from reshard_mpi.journal import record_files
from reshard_mpi.journal.provenance import MAX_NS, SourceStates, TargetInputs, require_one_state, require_same_sources
from reshard_mpi.journal.publication import publish_text
from reshard_mpi.journal.record_files import (
    COMMIT_RECORD,
    DAMAGE,
    STATE,
    opened_record,
    read_json,
    record_path,
    recorded_ranks,
    written,
)
from reshard_mpi.planning.rank_plan import SharedFact, StageDigest
from reshard_mpi.planning.source_flaws import PrefixDigest
from reshard_mpi.sharding.box import Box

# No tensor has as many bytes, and sums of as many cannot be put together.
MAX_TENSOR_BYTES = 1 << 62
# As many as a strategy can have.
MAX_RANKS = 1 << 24
_MAX_RANK = MAX_RANKS - 1
_MAX_DIMENSIONS = 64
# 150 bytes for each tensor with a sum, and 80 for each file that a target was made from: 10 MiB with as many tensors as
# a shard can have.
TARGET_ROOM = record_files.RecordLimits(64 << 20, 384 << 20)
_SUM_DIGITS = 8
# The head of a record with the longest path, and the bytes that follow it.
_MAX_HEAD_BYTES = 32 << 10
_BEHIND_HEAD = b', "read_ranks": '
_KEPT = ("digest", "rank", "file", "size_bytes", "modified_ns", "announced", "sample", "tag")
# A sample has as many pages of a file. Any state of a training that goes on changes nearly all pages.
_SAMPLED_PAGES, _PAGE_BYTES = 32, 4096
_MOST_ASKED = 8  # targets in a store, whether they are copies
# In which file systems and archives keep times: nanoseconds to two seconds; and what programs lose that keep floats.
_LONGEST_STEP_NS = 2 * 10**9
_STEPS_NS = (1, 100, 1000, 10**6, 10**7, 10**9, _LONGEST_STEP_NS)
_ROUNDED_NS = 1000


class TensorSum(NamedTuple):
    """The sum of the part of a tensor that a shard holds (see `engine/checksums`): a box of `shape` at `start`."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    value: int
    may_differ: bool  # copies of the tensor may differ: no strategy places it, or it is an accumulated gradient

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(low + length for low, length in zip(self.start, self.shape, strict=True)))

    @classmethod
    def of(cls, facts: Sequence[Any]) -> TensorSum:
        """Return the sum that a record has of a tensor. Raises TypeError or ValueError if it is impossible."""
        name, dtype, whole, start, shape, value, may_differ = facts
        tensor_sum = cls(
            record_files.text(name),
            record_files.one_of(dtype, BY_NAME),
            record_files.each(whole, record_files.number),
            record_files.each(start, record_files.number),
            record_files.each(shape, record_files.number),
            checked_sum(value),
            record_files.flag(may_differ),
        )
        box = Box.whole(tensor_sum.global_shape)
        if box.ndim > _MAX_DIMENSIONS or not box.contains(tensor_sum.box):
            raise ValueError("a place that is in no tensor")
        if box.size * BY_NAME[dtype].itemsize_bytes > MAX_TENSOR_BYTES:
            raise ValueError("a tensor that cannot be")
        return tensor_sum


class RecordHead(NamedTuple):
    """Which run has made which file: the beginning of a target's record, which is read without the rest."""

    digest: str  # of the run
    rank: int
    file: str  # its path in the target folder
    size_bytes: int
    modified_ns: int | None  # when the file was last modified; None in records of earlier versions
    # the inode and time of modification of the file, in a record that is written just before the file takes its name,
    # and which is true from then on, even if the writer dies; None in a record that is written when the file is in
    # place
    announced: tuple[int, int] | None = None
    sample: str | None = None  # the file's `sample_of`; None in records of earlier versions
    tag: int | None = None  # of an object: the number in the place of an inode, which stands for its content
    # whether the record's own file has that time too, as when it was written: a folder may be copied without times
    has_its_time: bool = False

    def is_about(self, path: Path) -> bool:
        """Tell whether the file at `path`, in the place of the target, is the one that was written, or a copy of it.

        It has its time; or its sample, and the record is of another time too, as in a copy. A state that differs in few
        tensors may have the same sample. An object has its tag; or its sample, in a prefix that was copied. Raises
        OSError if it cannot be looked at.
        """
        version = version_of(path)
        if version.size_bytes != self.size_bytes:
            return False
        if self.tag is not None and is_object_path(path) and version.inode == self.tag:
            return True
        if self.announced is not None:
            return self.announced == (version.inode, version.modified_ns)
        if self.modified_ns is None or (self.tag is None and version.modified_ns == self.modified_ns):
            return True
        if self.has_its_time and not _is_same_time(self.modified_ns, version.modified_ns):
            return False
        if self.sample is None:
            return version.modified_ns > self.modified_ns - _LONGEST_STEP_NS
        return self.has_sample_of(path) and not (is_object_path(path) and self._is_beside_originals(path))

    def _is_beside_originals(self, path: Path) -> bool:
        """Tell whether other targets beside an object are the ones that were written, and no copies of them.

        Then it is no copy of its own either, since a prefix is copied as a whole: each object gets another time.
        """
        folder = path.parents[self.file.count("/")]
        others = [rank for rank in recorded_ranks(folder / STATE) if rank != self.rank]
        for rank in others[:: -(-len(others) // _MOST_ASKED) or 1]:
            head = RecordHead.read(folder / STATE, rank)
            with contextlib.suppress(FileNotFoundError):
                if head is not None and head.is_original(version_of(folder / head.file)):
                    return True
        return False

    def is_original(self, version: FileVersion) -> bool:
        """Tell whether an object is the one that was written, and no copy of it, which has a later time."""
        return (version.inode, version.modified_ns) == (self.tag, self.modified_ns)

    def is_newer_than(self, path: Path) -> bool:
        """Tell whether the recorded file is newer than the one at `path`, another one, which is no later save then."""
        if self.modified_ns is None or is_object_path(path):
            return False
        is_older = version_of(path).modified_ns < self.modified_ns - _LONGEST_STEP_NS
        return is_older and not self.has_sample_of(path)

    def has_sample_of(self, path: Path) -> bool:
        """Tell whether a file has the recorded sample, whatever its time. Raises OSError if it cannot be read."""
        with open_file(str(path)) as file:
            return file.size_bytes == self.size_bytes and sample_of(file) == self.sample

    @classmethod
    def read(cls, state: Path, target_rank: int) -> RecordHead | None:
        """Return the beginning of the record of a target; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, *DAMAGE), opened_record(record_path(state, target_rank)) as (stream, version):
            if version is None:
                return None
            begin, end, _ = stream.read(_MAX_HEAD_BYTES).partition(_BEHIND_HEAD)
            facts = json.loads(begin + b"}") if end else {}
            if "modified_ns" in facts:
                head = cls.of(facts)
                # An object has the time at which it was uploaded, whatever is in it.
                has_its_time = (
                    head.modified_ns is not None
                    and not is_object_path(state)
                    and _is_same_time(head.modified_ns, version.modified_ns)
                )
                return head._replace(has_its_time=has_its_time) if head.rank == target_rank else None
        record = TargetRecord.read(state, target_rank)
        return None if record is None else record.head

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> RecordHead:
        """Return the head with these values. Raises LookupError, TypeError or ValueError if they are not of one."""
        rank = checked_rank(facts["rank"])
        head = cls(
            record_files.digest(facts["digest"]),
            rank,
            checked_file(facts["file"], rank),
            record_files.number(facts["size_bytes"]),
            record_files.number(facts["modified_ns"], -MAX_NS, MAX_NS) if "modified_ns" in facts else None,
            _announced(facts["announced"]) if "announced" in facts else None,
            record_files.digest(facts["sample"]) if "sample" in facts else None,
            record_files.number(facts["tag"]) if "tag" in facts else None,
        )
        if "check" in facts and facts["check"] != head.as_json()["check"]:  # records of earlier versions have none
            raise ValueError("values that have become others")
        return head

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with a check of them."""
        facts = {name: value for name, value in self._asdict().items() if value is not None and name in _KEPT}
        return {**facts, "check": record_files.check_of(facts)}


class TargetRecord(NamedTuple):
    """Records that a target is complete."""

    head: RecordHead
    inputs: TargetInputs
    sums: tuple[TensorSum, ...] = ()  # of its tensors, in file order; none if it was not verified
    # a digest of all of its bytes besides tensors (`formats.structure.digest_besides`); empty if it was not verified
    besides: str = ""

    @property
    def rank(self) -> int:
        return self.head.rank

    @property
    def file(self) -> str:
        return self.head.file

    def written_ns(self, path: Path) -> int:
        """Return when the target was written, as nanoseconds since 1970: of records that do not say it, by its file."""
        return version_of(path).modified_ns if self.head.modified_ns is None else self.head.modified_ns

    @property
    def is_verified(self) -> bool:
        """Whether the target was compared with its sources when it was made; one without tensors has no sums."""
        return bool(self.sums or self.besides)

    def as_text(self) -> str:
        """Return what `rank_<r>.json` holds."""
        inputs = self.inputs
        facts = {
            **self.head.as_json(),
            "read_ranks": inputs.read_ranks,
            "held": inputs.held._asdict(),
            "moments": [moment._asdict() for moment in inputs.shared_facts],
            "beginnings": [beginning._asdict() for beginning in inputs.prefix_digests],
            "sums": [(*part[:5], f"{part.value:08x}", part.may_differ) for part in self.sums],
            "sources": inputs.sources.as_json(),
            "texts": inputs.texts,
        }
        if self.besides:
            facts["besides"] = self.besides
        return written(json.dumps(facts), TARGET_ROOM, f"target rank {self.rank}")

    def publish(self, state: Folder, *, synced: bool = True) -> None:
        """Write the record, with the time of its file, into the open folder of a run's state.

        Args:
            synced: False if it need not survive a loss of power.
        """
        name = record_path(state.path, self.rank).name
        publish_text(state, name, self.as_text(), synced=synced, modified_ns=self.head.modified_ns)

    @classmethod
    def read(cls, state: Path, target_rank: int) -> TargetRecord | None:
        """Return the record of a target; None where there is none, or it is damaged."""
        facts = read_json(record_path(state, target_rank), TARGET_ROOM)
        try:
            record = cls._of(facts or {})
        except DAMAGE:
            return None
        return record if record.rank == target_rank else None

    @classmethod
    def _of(cls, facts: Mapping[str, Any]) -> TargetRecord:
        """Return the record with these values. Raises LookupError, TypeError or ValueError if they are not of one."""
        head, held = RecordHead.of(facts), facts["held"]
        inputs = TargetInputs(
            record_files.each(facts["read_ranks"], checked_rank),
            StageDigest(checked_rank(held["stage"]), record_files.digest(held["digest"]), checked_rank(held["rank"])),
            tuple(
                SharedFact(*(record_files.text(moment[name]) for name in SharedFact._fields))
                for moment in record_files.each(facts["moments"], record_files.table)
            ),
            tuple(
                PrefixDigest(
                    record_files.text(start["name"]), record_files.digest(start["digest"]), checked_rank(start["rank"])
                )
                for start in record_files.each(facts["beginnings"], record_files.table)
            ),
            SourceStates.of(facts["sources"]),
            record_files.digest(facts["texts"]),
        )
        sums = record_files.each(facts["sums"], TensorSum.of)
        if len({part.name for part in sums}) < len(sums):
            raise ValueError("two sums of one tensor")
        besides = record_files.sha256(facts["besides"]) if "besides" in facts else ""
        return cls(head, inputs, sums, besides)


def checked_rank(value: Any) -> int:
    return record_files.number(value, 0, _MAX_RANK)


def checked_sum(value: Any) -> int:
    """Return the sum that eight hexadecimal digits say."""
    if len(record_files.digest(value)) != _SUM_DIGITS:
        raise ValueError("no sum")
    return int(value, 16)


def checked_file(value: Any, rank: int) -> str:
    """Return the relative path of a target's file: in the target folder, or in one that is not another rank's."""
    folder, _, name = record_files.path_below(value).rpartition("/")
    is_elsewhere = "/" in folder or folder.startswith(".") or rank_of_folder(folder) not in (None, rank)
    is_hidden = name.startswith(".") and not folder
    if is_elsewhere or name in ("", ".", COMMIT_RECORD) or is_hidden:
        raise ValueError("the file of another target")
    return str(value)


def _is_same_time(recorded_ns: int, found_ns: int) -> bool:
    """Tell whether two times are the same one, as far as file systems and archives keep times."""
    steps = (recorded_ns - recorded_ns % step_ns for step_ns in _STEPS_NS)
    return any(abs(found_ns - kept_ns) <= _ROUNDED_NS for kept_ns in steps)


def sampled_pages(size_bytes: int) -> list[int]:
    """Return the numbers of the pages of a file of this size that `sample_of` reads, ascending."""
    last_page = max(size_bytes - 1, 0) // _PAGE_BYTES
    return sorted({last_page * step // (_SAMPLED_PAGES - 1) for step in range(_SAMPLED_PAGES)})


def sample_of(file: SourceFile) -> str:
    """Return a digest of pages of a file, evenly spread over it, with the first and the last. Raises OSError."""
    sample, page = 0, memoryview(bytearray(_PAGE_BYTES))
    numbers = sampled_pages(file.size_bytes)
    file.will_read([(number * _PAGE_BYTES, (number + 1) * _PAGE_BYTES) for number in numbers])
    for number in numbers:
        sample = crc32(page[: file.read_into(number * _PAGE_BYTES, [page])], sample)
    return f"{sample:08x}"


def _announced(value: Any) -> tuple[int, int]:
    inode, modified_ns = value
    return record_files.number(inode, 0, 2 * record_files.MAX_NUMBER + 1), record_files.number(
        modified_ns, -MAX_NS, MAX_NS
    )


def joined_sums(parts: Iterable[Sequence[TensorSum]], names: Iterable[str]) -> tuple[TensorSum, ...]:
    """Return the sums of the tensors of one shard from the sums of its parts, which have no elements in common.

    Args:
        names: the tensors in file order.
    """
    from reshard_mpi.engine.checksums import sum_of_whole  # which loads a library for sums

    of_parts = grouped((tensor_sum.name, tensor_sum) for part in parts for tensor_sum in part)

    def joined(last: TensorSum, sums: Iterable[TensorSum]) -> TensorSum:
        return last._replace(value=sum_of_whole((each.value for each in sums), _size_bytes(last)))

    return tuple(joined(of_parts[name][-1], of_parts[name]) for name in names)


def sums_of_wholes(shards: Mapping[int, Sequence[TensorSum]]) -> Iterator[tuple[str, int]]:
    """Yield the name and CRC-32 of every tensor of a checkpoint, from the sums of its shards by rank.

    Left out are tensors that stages share and cut differently, and those whose copies may differ, if they do. Raises
    DamageError if shards that should hold the same part have different sums of it.
    """
    from reshard_mpi.engine.checksums import sum_of_whole

    parts: defaultdict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], TensorSum]] = defaultdict(dict)
    of_their_own: set[str] = set()
    for rank, shard in shards.items():
        for tensor_sum in shard:
            other = parts[tensor_sum.name].setdefault((tensor_sum.start, tensor_sum.shape), tensor_sum)
            if other.value != tensor_sum.value and tensor_sum.may_differ:
                of_their_own.add(tensor_sum.name)
            elif other.value != tensor_sum.value:
                raise DamageError(
                    f"copies of {tensor_sum.name!r} differ",
                    expected=f"the sum {other.value:08x}, as in a shard before",
                    got=f"{tensor_sum.value:08x} in the shard of rank {rank}",
                    remedy="make the targets anew with --overwrite",
                )
    for name, by_box in parts.items():
        sums = list(by_box.values())
        if name in of_their_own or len({(tensor_sum.dtype, tensor_sum.global_shape) for tensor_sum in sums}) > 1:
            continue
        if sum(math.prod(tensor_sum.shape) for tensor_sum in sums) == math.prod(sums[0].global_shape):
            yield name, sum_of_whole((tensor_sum.value for tensor_sum in sums), _size_bytes(sums[0]))


def _size_bytes(tensor_sum: TensorSum) -> int:
    return BY_NAME[tensor_sum.dtype].itemsize_bytes * math.prod(tensor_sum.global_shape)


def require_one_source(targets: Collection[tuple[TargetRecord, Path]], remedy: str, *, is_committed: bool) -> None:
    """Raise DisagreementError if targets were made from two states of the source, as their records say.

    Args:
        targets: their records and paths.
        is_committed: whether they were compared once, so that it does not matter what has become of the source since.
    """
    if is_committed:
        require_same_sources({record.rank: record.inputs.sources for record, _ in targets}, remedy)
    else:
        written = {record.rank: (record.inputs.sources, record.written_ns(path)) for record, path in targets}
        require_one_state(written, remedy)
