"""Locate the tensors of a rank (`locate`); hold an opened source, its shards and strategy (`SourceCheckpoint`)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints.shard_files import ShardFiles, no_such_rank
from reshard_mpi.errors import DisagreementError, ReshardError, ShardError, StrategyError, as_reshard_error, told
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorTable
from reshard_mpi.planning.source_flaws import MissingRanks, UnusableShard
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import MIB, counted

if TYPE_CHECKING:
    from reshard_mpi.quantization.weights import QuantizedWeights

# The structure kept of earlier shards besides the last one's, since neighbouring targets read the same.
MAX_KEPT_BYTES = 56 * MIB
# Types in which no quantized weight is stored.
_PLAIN = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "bool"))
# What is wrong with one shard alone, so that others may be read in its place.
DAMAGE = (ShardError, DisagreementError, OSError)


class ShardStats(NamedTuple):
    """How large the shards are that have been read so far."""

    # tensors, kinds: the most tensors, and the most kinds of them, that one shard holds
    tensors: int = 0
    kinds: int = 0
    decoding_bytes: int = 0  # the most memory that decoding one takes
    is_native: bool = True  # whether all describe themselves
    is_as_stored: bool = True  # whether all elements are read as they are in the files, without numpy
    chunks: int = 0  # the most chunks of tensors that an index lists

    def including(self, shard: Manifest) -> ShardStats:
        return ShardStats(
            max(self.tensors, len(shard.tensors)),
            max(self.kinds, len(shard.tensors.kinds)),
            max(self.decoding_bytes, shard.decoding_bytes),
            self.is_native and shard.identity is not None,
            self.is_as_stored and shard.is_as_stored,
            max(self.chunks, shard.tensors.chunks if isinstance(shard.tensors, ChunkedTensors) else 0),
        )


class SourceCheckpoint:
    """Shard files with the strategy they are sharded by; manifests are read when asked for.

    Args:
        opened: manifests by rank that are not checked yet.
        damage: why shards cannot be read, by rank.
        recorded_strategy: that in the record of the run that has made the shards, where the caller gives another one.
    """

    def __init__(
        self,
        files: ShardFiles,
        strategy: Strategy,
        opened: Mapping[int, Manifest] = {},
        damage: Mapping[int, ReshardError] = {},
        recorded_strategy: Strategy | None = None,
    ) -> None:
        self.files = files
        self.strategy = strategy
        self.recorded_strategy = recorded_strategy
        self._unchecked = dict(opened)
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._damage = dict(damage)
        self._kept_at_most_bytes = 0
        self._stage_ranks: dict[int, int] | None = None
        self._stats = ShardStats()
        self._rule_names: dict[str, dict[int, int]] | None = None
        self.plain_strategy = strategy  # without the companions of quantized weights
        self.quantization: QuantizedWeights | None = None  # its quantized weights; None: it has none that are known
        self.is_told_by_config = False  # whether the caller's configuration says how it is, or would be, quantized
        self.looks_quantized = ""  # a tensor which shows that it is quantized, though nothing says how
        self._looked_at: tuple[object, ...] = ()

    @property
    def quantization_digest(self) -> str | None:
        """A digest of how it is quantized; None if it is not."""
        own = self.quantization
        return None if own is None else hashlib.sha256(own.text.encode()).hexdigest()

    def placed(self, target: Strategy, *, is_global: bool) -> Strategy:
        """Return a strategy for targets that also lists the companions of quantized weights.

        Args:
            is_global: whether the files of targets say for each piece where in the whole it lies.

        Raises what `QuantizedWeights.placing` raises.
        """
        return target if self.quantization is None else self.quantization.placing(target, "target", is_global=is_global)

    def require_known_scheme(self, shards: Iterable[Manifest], is_cut: Callable[[str], bool]) -> None:
        """Raise StrategyError if shards hold a tensor that is quantized and cut, and nothing says how it is quantized.

        Args:
            is_cut: tells of a tensor whether source or target ranks hold parts of it.
        """
        for shard in shards if self.quantization is None else ():
            if not self._looked_at or shard.tensors.index_by_name is not self._looked_at[0]:
                self._looked_at = (shard.tensors.index_by_name,)  # many ranks have the same names
                self.looks_quantized = self.looks_quantized or quantized_tensor_in(shard.tensors)
        if self.looks_quantized and is_cut(self.looks_quantized):
            raise self.unknown_scheme("a strategy that cuts it")

    def unknown_scheme(self, got: str) -> StrategyError:
        """Return the error for a request that needs to know how a checkpoint is quantized."""
        return StrategyError(
            f"{self.looks_quantized!r} is quantized, and nothing says how",
            expected="quantization_config in config.json beside the files of the checkpoint, or --config FILE.json",
            got=got,
            where=self.files.path,
            remedy="give the model's configuration: without it scales could come to other elements than theirs",
        )

    @property
    def summary_text(self) -> str:
        """The checkpoint in one line: format, files, ranks and tensors."""
        files, tensors = counted(len(self.files.shards), "file"), counted(self.stats.tensors, "tensor")
        ranks = self.strategy.world_size
        counts = [f"{ranks} ranks", f"{tensors} a rank"] if ranks > 1 else [tensors]
        return ", ".join([formats.title(self.files.format), files, *counts])

    @property
    def location_text(self) -> str:
        """Where it is, and how many of its ranks have shards there."""
        return (
            f"{self.files.path}, which has the shards of {len(self.files.by_rank)} of {self.strategy.world_size} ranks"
        )

    def __contains__(self, rank: object) -> bool:
        return rank in self.files.by_rank

    @property
    def missing(self) -> MissingRanks | None:
        """The ranks that have no shard, if any; None for shards picked by the caller, who need not have them all."""
        size = self.strategy.world_size
        if self.files.picked or len(self.files.by_rank) == size:
            return None
        ranks = tuple(rank for rank in range(size) if rank not in self.files.by_rank)
        return MissingRanks(ranks, size, self.files.path)

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of `rank`. Raises ShardError or DisagreementError if the shard is damaged."""
        if rank in self._manifests:
            self._manifests.move_to_end(rank)
            return self._manifests[rank]
        if rank in self._damage:
            raise self._damage[rank].with_traceback(None)
        try:
            manifest = self._located(rank)
        except DAMAGE as error:
            self._damage[rank] = as_reshard_error(error, Path(self.files.by_rank[rank][0]))
            raise self._damage[rank] from None
        self._manifests[rank] = manifest
        self._limit_kept(manifest)
        return manifest

    def find(self, rank: int) -> Manifest | None:
        """Return the manifest of `rank`, which must have files; None if they are damaged: `lost` tells how."""
        try:
            return self.manifest(rank)
        except ReshardError:
            if rank not in self._damage:
                raise
            return None

    def lost(self, rank: int) -> UnusableShard:
        """Return why the shard of `rank` cannot be read: it is missing, or `find` has seen that it is damaged."""
        error = self._damage.get(rank)
        if error is None:
            return UnusableShard(rank, self.files.path, "")
        return UnusableShard(rank, error.where or self.files.by_rank[rank][0], told(error))

    def check_crc(self, rank: int, on_bytes: OnBytes = uncounted) -> ReshardError | None:
        """Check the files of `rank` against their own checksums, if they have any; return the first error.

        A file that is missing in a folder with an index has none: others may hold the same.

        Args:
            on_bytes: told how many bytes have just been read.
        """
        module = formats.by_name(self.files.format)
        for path in self.files.by_rank[rank]:
            if self.files.is_folder and not source_files.exists(path):
                continue
            try:
                module.check_crc(path, on_bytes)
            except DAMAGE as error:
                return as_reshard_error(error, Path(path))
        return None

    def _located(self, rank: int) -> Manifest:
        like = next(reversed(self._manifests.values()), None) or next(iter(self._unchecked.values()), None)
        manifest = self._unchecked.pop(rank, None) or locate(self.files, rank, like)
        if manifest.identity is not None:
            require_rank(manifest.identity, rank, self.strategy.world_size, manifest.path)
        self._stats = self._stats.including(manifest)
        for other in self._manifests.values():
            manifest.tensors.share_names(other.tensors)
            break
        return manifest

    @property
    def stats(self) -> ShardStats:
        """How large the shards are that have been read so far."""
        return reduce(ShardStats.including, self._unchecked.values(), self._stats)

    def forget(self) -> None:
        """Free the structure of all shards; it is read again when it is asked for."""
        self._stats = self.stats
        self._manifests.clear()
        self._unchecked.clear()
        self._kept_at_most_bytes = 0

    def _limit_kept(self, added: Manifest) -> None:
        """Free the structure of the shards that have not been asked for the longest, if too much is kept.

        To count what thousands of shards share takes as long as to read another one, so they are counted only once
        what each would take by itself is too much.
        """
        self._kept_at_most_bytes += TensorTable.kept_bytes([added.tensors])
        if self._kept_at_most_bytes <= MAX_KEPT_BYTES:
            return
        while len(self._manifests) > 1 and self._kept_bytes() > MAX_KEPT_BYTES:
            self._manifests.popitem(last=False)
        self._kept_at_most_bytes = self._kept_bytes()

    def _kept_bytes(self) -> int:
        return TensorTable.kept_bytes(manifest.tensors for manifest in self._manifests.values())

    def rule_names(self) -> Mapping[str, Mapping[int, int]]:
        """Return, for each name that shards hold, one rank that holds it by stage; empty if the strategy has no rules.

        Only the first and the last shard of a stage are read; but if they do not hold the same names, the checkpoint
        was saved without redundancy, and all shards of the stage are read.
        """
        if self._rule_names is None:
            self._rule_names = {}
            if self.strategy.rules and self.strategy.world_size > 1:
                for stage, first in self.stage_ranks().items():
                    for rank in self._telling_ranks(stage, first):
                        manifest = self.find(rank)
                        for name in manifest.tensors if manifest is not None else ():
                            self._rule_names.setdefault(name, {}).setdefault(stage, rank)
        return self._rule_names

    def list_rule_names(self) -> None:
        """Have the strategy list the names that its rules place, each in the stages that hold it.

        A rule is for all stages unless it says for which, but most of what it places lies in one of them.
        """
        if self.strategy.stages > 1 and self.strategy.rules:
            self.strategy = self.strategy.listing(self.rule_names())

    def _telling_ranks(self, stage: int, first: int) -> list[int]:
        """Return ranks whose shards together hold all names of a stage. first: the lowest rank with a sound shard."""
        ranks = [rank for rank in self.strategy.ranks_of(stage) if rank >= first and rank in self]
        last = next(rank for rank in reversed(ranks) if self.find(rank) is not None)
        alike = self.manifest(first).tensors.keys() == self.manifest(last).tensors.keys()
        return [first] if alike else ranks

    def stage_ranks(self) -> dict[int, int]:
        """Return, for each stage that has a sound shard, the lowest rank that has one."""
        if self._stage_ranks is None:
            ranks: dict[int, int] = {}
            for rank in sorted(self.files.by_rank):
                stage = self.strategy.stage_of(rank)
                if stage not in ranks and self.find(rank) is not None:
                    ranks[stage] = rank
            self._stage_ranks = ranks
        return self._stage_ranks


def require_rank(identity: ShardIdentity, rank: int, world_size: int, path: str) -> None:
    """Raise DisagreementError if the shard at `path` does not say it is `rank` of `world_size` ranks."""
    if (identity.rank, identity.world_size) != (rank, world_size):
        raise DisagreementError(
            "a shard says it belongs elsewhere",
            expected=f"rank {rank} of {world_size}",
            got=f"rank {identity.rank} of {identity.world_size}",
            where=path,
            remedy="put every shard into the folder of its own rank",
        )


def locate(files: ShardFiles, rank: int, like: Manifest | None = None) -> Manifest:
    """Read the manifest of one rank, joined if its tensors lie in several files. like: another rank's manifest."""
    folder_format = formats.folder_by_name(files.format)
    if files.is_folder and folder_format is not None:
        files.look(*files.by_rank[rank])
        joining = () if files.strategy is None else (files.strategy,)
        manifests = [folder_format.open_folder(folder, *joining)[rank] for folder in files.folders or (files.path,)]
    else:
        manifests = [files.locate(path, like) for path in files.by_rank[rank]]
    if len(manifests) == 1:
        return manifests[0]
    from reshard_mpi.checkpoints.join_files import joined  # only here, since most ranks have one file

    return joined(manifests, files.path if len(files.by_rank) == 1 else manifests[0].path, by_branch=files.by_branch)


def manifests_of(files: ShardFiles, ranks: Collection[int] | None = None) -> Iterator[tuple[int, Iterator[Manifest]]]:
    """Yield the structure of the files of each rank, or of the given ones only.

    All of a folder with an index counts as one file of rank 0. Raises SourceError if one of `ranks` has no files.
    """
    for rank in () if ranks is None else sorted(ranks):
        if rank not in files.by_rank:
            raise no_such_rank(files, rank)
    for rank, paths in files.by_rank.items():
        if ranks is None or rank in ranks:
            joined = files.is_folder or files.by_branch
            yield rank, iter((locate(files, rank),)) if joined else map(files.locate, paths)


def quantized_tensor_in(tensors: TensorTable) -> str:
    """Return the name of a tensor which shows that it is quantized; empty if there is none."""
    if all(kind.dtype.name in _PLAIN for kind in tensors.kinds):
        return ""
    from reshard_mpi.quantization.grouping import looks_quantized

    return looks_quantized({name: tensors.kind_named(name) for name in tensors}) or ""
