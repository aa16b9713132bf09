"""A source checkpoint held against its strategy: a few shards compared in a few places of a few tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard_mpi.dtypes import DType, to_numpy
from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.manifest import Manifest, TensorEntry
from reshard_mpi.placement import Placement
from reshard_mpi.planning.fit import Compared, Likeness, judge, should_be_one_part
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.samples import Pair, Sampler, places, rank_pairs
from reshard_mpi.source import SourceCheckpoint

if TYPE_CHECKING:
    from reshard_mpi.engine.files import Files

# Parts with fewer different elements than these in what is compared may be the same by chance, or be zeros or ones.
_TELLING_ELEMENTS = 4
_TELLING_BYTES = 16
# Copies have drifted apart if their difference has no more than this share of the variance of either; it is 2 for
# values that have nothing in common. Of few elements much less, since they may come close by chance.
_CLOSE_SHARE = 0.4
_CLOSE_SHARE_OF_FEW = 1e-3
_FEW_ELEMENTS = 16


def drifted_tensors(
    source: SourceCheckpoint,
    is_wanted: Callable[[str], bool],
    unlisted: Unlisted,
    *,
    damaged_are_replaced: bool,
    process: int,
    processes: int,
) -> tuple[str, ...]:
    """Return the tensors whose copies have drifted apart, as far as a sample shows; one process's share of the pairs.

    is_wanted: tells which tensors the targets have. damaged_are_replaced: shards that do not fit their own checksum are
    not read for the targets. Raises StrategyError if the source's strategy is not that of the checkpoint, ShardError if
    a shard that differs from another does not fit its own checksum. Shards that cannot be read are passed over.
    """
    from reshard_mpi.engine.files import Files

    strategy = source.strategy
    if strategy.world_size == 1:
        return ()
    pairs = rank_pairs(strategy, source.files.by_rank)[process::processes]
    drifted: dict[str, None] = {}
    with Files() as files:
        excerpts = _Excerpts(files)
        sampler = Sampler(strategy, is_wanted)
        for pair in pairs:
            first, second = source.find(pair.first), source.find(pair.second)
            if first is None or second is None:
                continue
            sampled = sampler.choose(strategy.stage_of(pair.first), first.tensors, second.tensors)
            compared = [_compare(name, placement, pair, first, second, excerpts) for name, placement in sampled]
            found = [tensor for tensor in compared if tensor is not None]
            if any(tensor.one_part and tensor.differs for tensor in found):
                damage = next((error for rank in pair if (error := source.check_crc(rank)) is not None), None)
                if damage is not None and damaged_are_replaced:
                    continue
                if damage is not None:
                    raise damage
            drifted.update(dict.fromkeys(judge(pair, found, strategy, (first.path, second.path), unlisted)))
    return tuple(drifted)


class _Excerpts:
    """What has been read of shards in a few places, so that a shard that is in many pairs is read once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._read: dict[tuple[str, str], bytes] = {}

    def of(self, manifest: Manifest, entry: TensorEntry) -> bytes:
        """Return the bytes of the tensor's elements in its places, in this machine's byte order."""
        from reshard_mpi.engine.excerpts import excerpt

        key = (manifest.path, entry.name)
        if key not in self._read:
            boxes = places(entry.name, entry.shape)
            self._read[key] = b"".join(excerpt(self._files, entry, box) for box in boxes)
        return self._read[key]


def _compare(
    name: str, placement: Placement | None, pair: Pair, first: Manifest, second: Manifest, excerpts: _Excerpts
) -> Compared | None:
    """Compare what two shards hold of a tensor; None if that cannot be told, as where one is damaged: see planning."""
    entry, other = first.tensors[name], second.tensors[name]
    try:
        one_part = should_be_one_part(placement, pair, entry.shape)
        if entry.shape != other.shape or entry.dtype != other.dtype:
            likeness, telling = Likeness.OF_ANOTHER_SHAPE, True
        else:
            likeness, telling = _likeness(excerpts.of(first, entry), excerpts.of(second, other), entry.dtype)
    except (LayoutError, ShardError, OSError):
        return None
    floating = "float" in entry.dtype.name or "complex" in entry.dtype.name
    size_bytes = max(entry.size_bytes, other.size_bytes)
    return Compared(name, placement, one_part, likeness, telling, floating, entry.shape, size_bytes)


def _likeness(content: bytes, other: bytes, dtype: DType) -> tuple[Likeness, bool]:
    """Return how alike two parts are, and whether they have enough different values to tell different parts apart."""
    if content == other:
        return Likeness.SAME, _is_telling(content, dtype)
    return Likeness.CLOSE if _is_close(content, other, dtype) else Likeness.DIFFERENT, True


def _is_telling(content: bytes, dtype: DType) -> bool:
    width = dtype.itemsize_bytes
    elements = {content[start : start + width] for start in range(0, len(content), width)}
    return len(content) >= _TELLING_BYTES and len(elements) >= _TELLING_ELEMENTS


def _is_close(content: bytes, other: bytes, dtype: DType) -> bool:
    """Tell whether two copies have nearly the same values."""
    import numpy as np

    kind = to_numpy(dtype)
    wide = np.complex128 if kind.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        ours, theirs = (np.frombuffer(data, kind).astype(wide) for data in (content, other))
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            return False
        if ours.size == 1:
            return bool(abs(ours - theirs)[0] <= _CLOSE_SHARE_OF_FEW * abs(ours[0]))
        share = _CLOSE_SHARE if ours.size >= _FEW_ELEMENTS else _CLOSE_SHARE_OF_FEW
        difference = float((abs(ours - theirs) ** 2).mean())
        return bool(difference <= share * min(ours.var(), theirs.var()))
