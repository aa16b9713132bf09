"""Prepares a request: which targets are made, from which shards, by which strategies, and where they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.filesystem.paths import real_path, require_reachable
from reshard_mpi.journal.records import RunIdentity
from reshard_mpi.journal.targets import Journal, Unrecorded
from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.ranks import check_target_rank
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.division import assign
from reshard_mpi.runs.overlap import refuse_overlap
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.sharding.placement import Strategy

# Planning takes a millisecond and a KiB for each, and no cluster has as many ranks.
MAX_TARGETS = 1 << 16


class Run(NamedTuple):
    """A prepared request: source and strategies have been read, and the targets are known."""

    request: Request
    conversion: Conversion
    format: str
    targets: tuple[int, ...]
    strategies: Strategies

    @classmethod
    def open(
        cls,
        request: Request,
        strategies: Strategies | None,
        known_damage: Mapping[int, ReshardError],
        before_shards: Callable[[str], None],
    ) -> Run:
        """Find the shards, and read the strategies where they are not given.

        known_damage: what is known to be wrong with source shards. before_shards: is told the format of the shards
        before any is read. Raises a ReshardError for what is wrong with them.
        """
        strategies = strategies or Strategies.read(request)
        if request.unlisted is Unlisted.DROP and request.dst_strategy is None:
            raise UsageError(
                "--unlisted drop needs a list to go by",
                expected="--dst-strategy with the parameters to keep",
                got="no target strategy",
            )
        _check_prefix(request.prefix)
        require_reachable(request.source)
        files = discovery.find_shards(request.source, request.select, format_name=request.source_format)
        name = request.to or files.format
        ranks = request.ranks if request.ranks is not None else range(strategies.target.world_size)
        if request.part is None:
            _refuse_overlap(request, files, name, ranks, strategies.target)
        before_shards(files.format)
        source = SourceCheckpoint.open(files, strategies.source, known_damage)
        conversion = Conversion(source, strategies.target, request.unlisted, request.strict, replicas=request.replicas)
        targets = _targets(request, strategies.target, conversion)
        if request.part is not None:  # of millions, so that only its own are looked at
            _refuse_overlap(request, files, name, targets, strategies.target)
        if formats.folder_by_name(name) is not None and not request.recorded:
            raise UsageError(
                f"a folder of the format {name} is written by runs that keep a record",
                expected="reshard-mpi transform",
                got="a function that keeps none",
            )
        if request.crc and not formats.by_name(name).TRAITS.has_crc:
            able = [other for other in formats.NAMES if formats.by_name(other).TRAITS.has_crc]
            raise UsageError(
                f"--crc is for targets in {' or '.join(able)}",
                expected=" or ".join(f"--to {other}" for other in able),
                got=f"targets in {name}",
            )
        return cls(request, conversion, name, targets, strategies)

    def path(self, target_rank: int) -> Path:
        """Return the final path of one target shard: `rank_<r>/<prefix><r><ending>`, unless its format has others."""
        return _target_file(self.request, self.format, target_rank, self.strategies.target.world_size)

    def journal(self) -> Journal | Unrecorded:
        """Return what keeps the state of this run in the target folder."""
        request = self.request
        if not request.recorded:
            return Unrecorded(Path(request.target))
        identity, resume, overwrite = self._identity(), request.resume, request.overwrite
        return Journal(Path(request.target), identity, resume=resume, overwrite=overwrite)

    def _identity(self) -> RunIdentity:
        request = self.request
        strategies = {"src_strategy": request.src_strategy, "dst_strategy": request.dst_strategy}
        return RunIdentity(
            {
                "source": str(real_path(request.source)),
                "src_strategy": self.strategies.source_digest,
                "dst_strategy": self.strategies.target_digest,
                "select": request.select,
                "prefix": request.prefix,
                "to": self.format,
                "unlisted": str(request.unlisted),
                "strict": request.strict,
                "crc": request.crc,
                "sums_in_shards": request.verify and formats.by_name(self.format).TRAITS.keeps_sums,
                "target_ranks": self.conversion.target.world_size,
                **({"from": request.source_format} if request.source_format else {}),
            },
            {name: str(real_path(path)) for name, path in strategies.items() if path is not None},
        )


def _refuse_overlap(
    request: Request, files: discovery.ShardFiles, format_name: str, ranks: Sequence[int], target: Strategy
) -> None:
    """Raise TargetError for targets that overlap with the source, UsageError if they are too many to be looked at."""
    if len(ranks) > MAX_TARGETS:
        parts = -(-target.world_size // MAX_TARGETS)
        raise UsageError(
            "there are too many targets for one run",
            expected=f"at most {MAX_TARGETS}",
            got=str(len(ranks)),
            where=request.dst_strategy or "",
            remedy=f"make them in {parts} parts or more (--part I/N), or some of them (--rank)",
        )
    refuse_overlap(
        files, request.target, [_target_file(request, format_name, rank, target.world_size) for rank in ranks]
    )


def _check_prefix(prefix: str) -> None:
    if "/" in prefix or "\0" in prefix or prefix.startswith("."):
        raise UsageError(
            "the prefix cannot begin a file name",
            expected="text without '/' that does not start with '.', which would hide the files",
            got=repr(prefix),
        )


def _target_file(request: Request, format_name: str, target_rank: int, targets: int) -> Path:
    folder_format = formats.folder_by_name(format_name)
    if folder_format is not None:
        return Path(request.target, folder_format.file_name(target_rank, targets, request.prefix))
    ending = formats.by_name(format_name).SUFFIXES[0]
    return Path(request.target, f"rank_{target_rank}", f"{request.prefix}{target_rank}{ending}")


def _targets(request: Request, target: Strategy, conversion: Conversion) -> tuple[int, ...]:
    if request.ranks is not None:
        for rank in request.ranks:
            check_target_rank(rank, target)
        return tuple(sorted(set(request.ranks)))
    every = range(target.world_size)
    if request.part is None:
        return tuple(every)
    share, shares = request.part
    if shares >= len(every):
        return tuple(every[share : share + 1])
    if conversion.has_even_targets:
        return tuple(every[share::shares])  # as `assign` deals out what is alike
    return tuple(sorted(assign(conversion.target_weights(every), range(shares))[share]))
