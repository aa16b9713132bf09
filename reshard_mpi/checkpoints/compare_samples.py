"""Compare samples of shards, which shows whether the source strategy is theirs (`sample_findings`)."""

from __future__ import annotations

import cmath
import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from operator import eq

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import excerpt
from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.formats.dtypes import DType, numbers
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.formats.manifest import NEST, Manifest, common_nest, nest_settings, shown_string
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.comparison_choice import RankPair, Sampled, Sampler, places, rank_pairs, share
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.planning.source_flaws import TEXT, Differing
from reshard_mpi.planning.strategy_check import (
    NOTHING_FOUND,
    PairResult,
    SampleFindings,
    Similarity,
    evaluate_pair,
    should_be_one_part,
    unexpected_stage_error,
    unknown_tensor,
)
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import Strategy, Unlisted
from reshard_mpi.text import MIB

# Parts with fewer different elements, or fewer bytes, may be equal by chance, or be all zeros or ones.
_TELLING_ELEMENTS = 4
_TELLING_BYTES = 16
# Copies have drifted apart, and are not of different data, if the mean square of their difference is at most this share
# of the variance of either; for independent values it is 2. Few elements may come close by chance, so their share is
# much lower.
_CLOSE_SHARE = 0.4
_CLOSE_SHARE_OF_FEW = 1e-3
_FEW_ELEMENTS = 16
# Chunks must be decoded whole. This much is decoded for a pair, but one tensor of each placement at least; if chunks
# are larger than this, only one place of each tensor is compared.
_MAX_DECODED_BYTES = 4 * MIB
_LARGE_CHUNK_BYTES = MIB
# If two copies have different shapes, this number of other shards of the stage tells which one is damaged.
_MAX_WITNESSES = 6


def sample_findings(
    source: SourceCheckpoint,
    is_wanted: Callable[[str, Container[str]], bool],
    is_known: Callable[[str], bool],
    unlisted: Unlisted,
    *,
    damaged_are_replaced: bool,
    process: int,
    processes: int,
) -> SampleFindings:
    """Return the tensors that differ from rank to rank, by the pairs of shards that this process compares.

    Args:
        is_wanted: tells whether targets have a tensor, given its name and the names present.
        is_known: tells whether the tensor of a name is looked for in all shards that may hold it.
        damaged_are_replaced: whether damaged shards have been, or will be, left out of the plans: damage is passed over
            here then.

    Raises StrategyError if the source strategy is not that of the checkpoint, CoverageError for a wanted tensor that is
    not known, ShardError if a shard that differs from another does not fit its own checksum. Shards that cannot be read
    are passed over.
    """
    strategy, findings = source.strategy, NOTHING_FOUND
    sampler = Sampler(strategy, is_wanted)
    with Files() as files:
        excerpts = _Excerpts(files)
        for pair in share(rank_pairs(strategy, source.files.by_rank), process, processes):
            first, second = source.find(pair.first), source.find(pair.second)
            if first is None or second is None:
                continue
            for shard, other in ((first, second), (second, first)):
                alone = shard.tensors.keys() - other.tensors.keys()
                unknown = next((name for name in alone if not is_known(name)), None)
                if unknown is not None and is_wanted(unknown, shard.tensors):
                    raise unknown_tensor(unknown, strategy, shard.path)
            sampled = sampler.choose(strategy.stage_of(pair.first), first.tensors, second.tensors)
            _require_homes(source, [tensor for tensor in sampled if tensor.home_stage is not None], pair, excerpts)
            if pair.first == pair.second:
                continue
            compared = list(
                _compared(sampled, pair, first, second, excerpts, is_recorded=source.files.has_recorded_strategy)
            )
            compared = [tensor for tensor in compared if not _is_damage(tensor, pair, source)]
            if any(tensor.one_part and tensor.differs for tensor in compared):
                damage = next((error for rank in pair[:2] if (error := source.check_crc(rank)) is not None), None)
                if damage is not None and damaged_are_replaced:
                    continue
                if damage is not None:
                    raise damage
            findings = findings.joined(evaluate_pair(pair, compared, strategy, (first.path, second.path), unlisted))
            texts = tuple(_texts_that_differ(pair, first, second, strategy))
            findings = findings.joined(SampleFindings(unlisted=texts))
    return findings


def _texts_that_differ(pair: RankPair, first: Manifest, second: Manifest, strategy: Strategy) -> Iterator[Differing]:
    """Yield the strings in which two shards differ, besides what each stage has of its own."""
    one_stage = strategy.stage_of(pair.first) == strategy.stage_of(pair.second)
    for name in sorted(first.strings.keys() & second.strings.keys()):
        texts = [first.strings[name], second.strings[name]]
        do_differ = texts[0] != texts[1] and (name == NEST or one_stage)
        if do_differ and name == NEST:
            with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
                settings = [nest_settings(text) for text in texts]
                common = common_nest(texts) if one_stage and settings[0] == settings[1] else None
                # Ranks of one stage may share out whose state each keeps, and no more of an optimizer.
                do_differ = settings[0] != settings[1] or (common is not None and not common.is_whole)
        if do_differ:
            yield Differing(f"{TEXT}{shown_string(name)}", (pair.first, pair.second))


class _Excerpts:
    """Reads shards in a few places, and keeps what was read, since a shard may be in many pairs."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._read: dict[tuple[str, str], list[bytes]] = {}

    def of(self, shard: Manifest, entry: TensorEntry, boxes: Sequence[Box]) -> Iterator[bytes]:
        """Yield the bytes of each box of the shard's part of a tensor, in this machine's byte order.

        Calls for the same shard and tensor must give the same boxes, or the first of them.
        """
        read = self._read.setdefault((shard.path, entry.name), [])
        for number, box in enumerate(boxes):
            if number == len(read):
                read.append(excerpt(self._files, entry, box))
            yield read[number]


def _require_homes(source: SourceCheckpoint, strays: Iterable[Sampled], pair: RankPair, excerpts: _Excerpts) -> None:
    """Raise StrategyError if a tensor lies in a stage where it should not, and differs from that in its own stage."""
    stage_size = source.strategy.stage_size
    for name, _, home_stage in strays:
        assert home_stage is not None
        home_rank = home_stage * stage_size + pair.first % stage_size
        shard, home = source.find(pair.first), source.find(home_rank) if home_rank in source else None
        if shard is None or home is None or name not in home.tensors or is_partial_sum(name):
            continue
        at_home, here = ((manifest, manifest.tensors[name]) for manifest in (home, shard))
        try:
            likeness, _ = _likeness(at_home, here, True, excerpts)
        except (ShardError, OSError):  # planning reports it if the shard is needed
            continue
        if likeness is not Similarity.SAME:
            raise unexpected_stage_error(name, home_stage, source.strategy, (home.path, shard.path))


def require_one_of_stages(source: SourceCheckpoint, tensor: Differing) -> None:
    """Raise StrategyError if stages hold different tensors of a name that no strategy lists, and no small values.

    Args:
        tensor: one that targets take from one rank of several.
    """
    first, other = tensor.ranks[0], rank_of_another_stage(source, tensor)
    if other is not None:
        paths = source.manifest(first).path, source.manifest(other).path
        raise unexpected_stage_error(tensor.name, source.strategy.stage_of(first), source.strategy, paths)


def rank_of_another_stage(source: SourceCheckpoint, tensor: Differing) -> int | None:
    """Return a rank of another stage that has another tensor of the name; None if each rank may have its own."""
    first, *others = tensor.ranks
    stage_of, tensors = source.strategy.stage_of, source.manifest(first).tensors
    rank = next((rank for rank in others if stage_of(rank) != stage_of(first)), None)
    if rank is None or tensor.name not in tensors:  # it may be a text
        return None
    _, dtype, shape, *_ = entry = tensors[tensor.name]
    found = PairResult(tensor.name, None, True, Similarity.DIFFERENT, True, dtype, shape, entry.size_bytes)
    return None if found.may_be_own else rank


def _compared(
    sampled: Iterable[Sampled],
    pair: RankPair,
    first: Manifest,
    second: Manifest,
    excerpts: _Excerpts,
    *,
    is_recorded: bool,
) -> Iterator[PairResult]:
    """Compare tensors in two shards: `pair.tensors` at most whose parts should be the same, and as many of the others.

    Tensors that cannot be compared, for instance because a shard is damaged, are left to planning.

    Args:
        is_recorded: whether the run that wrote the shards has recorded how they are cut: then parts may well be equal.
    """
    one_part_of: dict[tuple[int, Shape | None], bool] = {}
    left = {True: pair.tensors, False: pair.tensors}
    decoded_bytes, ways = 0, set[tuple[int, bool]]()
    for name, placement, _ in sampled:
        entry, other = first.tensors[name], second.tensors[name]
        # Equal placements give equal answers, unless it is the shape that says what is cut.
        by_shape = placement is not None and (placement.expanded_shape or placement.whole_scalars)
        key = (id(placement), entry.shape if by_shape else None)
        try:
            one_part = one_part_of.get(key)
            if one_part is None:
                one_part = one_part_of[key] = should_be_one_part(placement, pair, entry.shape)
            # Planning has all copies of these compared, and finds from their shapes whether the optimizer cuts them.
            if is_partial_sum(name) and (one_part or (placement is not None and placement.optimizer > 1)):
                continue
            if not left[one_part] or (decoded_bytes >= _MAX_DECODED_BYTES and (id(placement), one_part) in ways):
                continue
            ways.add((id(placement), one_part))
            decoded_bytes += _decoded_bytes(entry) + _decoded_bytes(other)
            likeness, telling = _likeness((first, entry), (second, other), one_part, excerpts)
            telling = telling and not ((is_recorded and not one_part) or _say_different_parts(entry, other))
        except (LayoutError, ShardError, OSError):
            continue
        left[one_part] -= 1
        size_bytes = max(entry.size_bytes, other.size_bytes)
        yield PairResult(name, placement, one_part, likeness, telling, entry.dtype, entry.shape, size_bytes)


def _say_different_parts(entry: TensorEntry, other: TensorEntry) -> bool:
    """Tell whether two files themselves say that they hold different parts, so equal values are no sign of a mistake.

    Rows may be equal by nature: the decay rates of a state-space model, or the state of an optimizer.
    """
    return entry.box is not None and other.box is not None and entry.box != other.box


def _is_damage(tensor: PairResult, pair: RankPair, source: SourceCheckpoint) -> bool:
    """Tell whether two copies have different shapes because one shard is damaged: no other of its stage has that shape.

    A damaged shard is dealt with if it is needed. If other shards have either shape too, or there are no others, the
    strategy may be wrong: the tensor is cut, and unevenly.
    """
    if tensor.likeness is not Similarity.OF_ANOTHER_SHAPE or not tensor.one_part or tensor.placement is None:
        return False
    if tensor.placement.is_uneven:
        return True  # parts have different shapes anyway, so other shards show nothing
    stage = source.strategy.stage_of(pair.first)
    others = (rank for rank in source.strategy.ranks_of(stage) if rank in source and rank not in pair[:2])
    manifests = [source.find(rank) for rank in (*pair[:2], *islice(others, _MAX_WITNESSES))]
    entries = [manifest.tensors[tensor.name] for manifest in manifests if manifest and tensor.name in manifest.tensors]
    kinds = [(entry.shape, entry.dtype) for entry in entries]
    holders = [kinds.count(kind) for kind in kinds[:2]]
    return min(holders) == 1 and max(holders) > 1


def _likeness(
    first: tuple[Manifest, TensorEntry], second: tuple[Manifest, TensorEntry], one_part: bool, excerpts: _Excerpts
) -> tuple[Similarity, bool]:
    """Return how alike two parts are, and whether their values vary enough that different parts would differ."""
    entry, other = first[1], second[1]
    if entry.shape != other.shape or entry.dtype != other.dtype:
        return Similarity.OF_ANOTHER_SHAPE, True
    boxes = places(entry.name, entry.shape)
    if max(map(_decoded_bytes, (entry, other))) > _LARGE_CHUNK_BYTES:
        boxes = boxes[:1]
    if all(map(eq, excerpts.of(*first, boxes), excerpts.of(*second, boxes))):
        return Similarity.SAME, one_part or is_telling(b"".join(excerpts.of(*first, boxes)), entry.dtype)
    if not one_part:
        return Similarity.DIFFERENT, True
    ours, theirs = (b"".join(excerpts.of(*held, boxes)) for held in (first, second))
    return Similarity.CLOSE if _is_close(ours, theirs, entry.dtype) else Similarity.DIFFERENT, True


def _decoded_bytes(entry: TensorEntry) -> int:
    """Return how much is decoded to read one place of a tensor; 0 if its bytes are stored as they are."""
    if not isinstance(entry.source, LibraryRead):
        return 0
    return math.prod(entry.source.chunk) * entry.dtype.itemsize_bytes


def is_telling(content: bytes, dtype: DType) -> bool:
    """Tell whether elements vary enough that other parts would differ from them."""
    width = dtype.itemsize_bytes
    elements = {content[start : start + width] for start in range(0, len(content), width)}
    return len(content) >= _TELLING_BYTES and len(elements) >= _TELLING_ELEMENTS


def _is_close(content: bytes, other: bytes, dtype: DType) -> bool:
    """Tell whether two copies have nearly the same values."""
    ours, theirs = numbers(content, dtype), numbers(other, dtype)
    if not all(map(cmath.isfinite, (*ours, *theirs))):
        return False
    if len(ours) == 1:
        return bool(abs(ours[0] - theirs[0]) <= _CLOSE_SHARE_OF_FEW * abs(ours[0]))
    share = _CLOSE_SHARE if len(ours) >= _FEW_ELEMENTS else _CLOSE_SHARE_OF_FEW
    differences = [own - counterpart for own, counterpart in zip(ours, theirs)]
    return _mean_square(differences) <= share * min(map(_variance, (ours, theirs)))


def _variance(values: Sequence[complex]) -> float:
    mean = sum(values) / len(values)
    return _mean_square([value - mean for value in values])


def _mean_square(values: Sequence[complex]) -> float:
    return sum(value.real * value.real + value.imag * value.imag for value in values) / len(values)
