"""The source checkpoint: its shards by rank, and the strategy they are sharded by."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from reshard_mpi import formats
from reshard_mpi.discovery import ShardFiles
from reshard_mpi.errors import DisagreementError, SourceError, StrategyError
from reshard_mpi.manifest import Manifest, TensorEntry
from reshard_mpi.placement import Strategy, unsharded
from reshard_mpi.strategy import table

# Tensors whose places are kept, some 600 bytes each; neighbouring targets read from the same shards.
_MAX_KEPT_TENSORS = 50_000


@dataclass(slots=True)
class SourceCheckpoint:
    """Shard files with the strategy they are sharded by; manifests are read when asked for."""

    files: ShardFiles
    strategy: Strategy
    _unchecked: dict[int, Manifest] = field(default_factory=dict)
    _manifests: OrderedDict[int, Manifest] = field(default_factory=OrderedDict)

    @classmethod
    def open(cls, files: ShardFiles, strategy: Strategy | None) -> SourceCheckpoint:
        """Join files and strategy; without a strategy the shards describe themselves or are one full checkpoint.

        Raises SourceError or StrategyError where they do not belong together.
        """
        first = min(files.by_rank)
        manifest = _locate(files, first)
        described = _described(manifest)
        if strategy is None:
            strategy = described
        elif described is not None:
            _require_agreement(strategy, described, manifest.path)
        if strategy is None:
            if len(files.by_rank) > 1 or first != 0:
                raise SourceError(
                    "the shards do not say how they are sharded",
                    expected="a source strategy for a checkpoint of several ranks",
                    got=f"{len(files.by_rank)} rank folders without one",
                    where=files.path,
                    remedy="give --src-strategy (src_strategy_file)",
                )
            strategy = unsharded(files.path)
        outside = [rank for rank in files.by_rank if rank >= strategy.world_size]
        if outside:
            raise SourceError(
                "the checkpoint has ranks its strategy does not know",
                expected=f"ranks 0 to {strategy.world_size - 1}, the mesh of {strategy.origin or 'the strategy'}",
                got=f"rank {outside[0]}" + (f" and {len(outside) - 1} more" if len(outside) > 1 else ""),
                where=files.path,
                remedy="give the strategy this checkpoint was saved with",
            )
        return cls(files, strategy, {first: manifest})

    def __contains__(self, rank: object) -> bool:
        return rank in self.files.by_rank

    def manifest(self, rank: int) -> Manifest:
        """Return what the shard of `rank` holds. Raises ShardError if it is damaged."""
        if rank in self._manifests:
            self._manifests.move_to_end(rank)
            return self._manifests[rank]
        manifest = self._unchecked.pop(rank, None) or _locate(self.files, rank)
        if manifest.identity is not None and (manifest.identity.rank, manifest.identity.world_size) != (
            rank,
            self.strategy.world_size,
        ):
            raise DisagreementError(
                "a shard says it belongs elsewhere",
                expected=f"rank {rank} of {self.strategy.world_size}",
                got=f"rank {manifest.identity.rank} of {manifest.identity.world_size}",
                where=manifest.path,
                remedy="put every shard into the folder of its own rank",
            )
        self._manifests[rank] = manifest
        while len(self._manifests) > 1 and self._kept_tensors() > _MAX_KEPT_TENSORS:
            self._manifests.popitem(last=False)
        return manifest

    def _kept_tensors(self) -> int:
        return sum(len(manifest.tensors) for manifest in self._manifests.values())

    def stage_ranks(self) -> dict[int, int]:
        """Return, for each stage that has a shard, the lowest rank that is there."""
        found: dict[int, int] = {}
        for rank in sorted(self.files.by_rank):
            found.setdefault(self.strategy.stage_of(rank), rank)
        return found


def _locate(files: ShardFiles, rank: int) -> Manifest:
    """Read the manifest of one rank, joined where its tensors lie in several files."""
    module = formats.by_name(files.format)
    manifests = [module.locate(path) for path in files.by_rank[rank]]
    if len(manifests) == 1:
        return manifests[0]
    tensors: dict[str, TensorEntry] = {}
    holder: dict[str, str] = {}
    for manifest in manifests:
        for name, entry in manifest.tensors.items():
            if name in tensors:
                raise SourceError(
                    f"two of the loose files hold {name!r}",
                    expected="files of one full checkpoint, each tensor in one of them",
                    got=f"it is in {holder[name]} and {manifest.path}",
                    where=files.path,
                    remedy="choose files with --select, or put the shards of several ranks into rank_* folders",
                )
            tensors[name], holder[name] = entry, manifest.path
    strings = {name: text for manifest in manifests for name, text in manifest.strings.items()}
    return Manifest(files.path, files.format, tensors, strings)


def _described(manifest: Manifest) -> Strategy | None:
    if manifest.identity is None:
        return None
    return table.loads(manifest.identity.strategy, manifest.path)


def _require_agreement(given: Strategy, described: Strategy, path: str) -> None:
    differing = [name for name in described.parameters if given.find(name) != described.parameters[name]]
    if given.world_size != described.world_size or (differing and not given.rules):
        raise StrategyError(
            "the source strategy contradicts what the shards say of themselves",
            expected=f"{described.world_size} ranks, as the shards say",
            got=f"{given.world_size} ranks" + (f", another placement of {differing[0]!r}" if differing else ""),
            where=f"{given.origin} and {path}",
            remedy="leave --src-strategy out: these shards describe themselves",
        )
