"""Hold the user's request (`Request`). Loads little, since it comes first.

What a user asks for, and the strategies that the request names. This module loads little, since it comes first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.planning.parameters import Accumulated, Unlisted
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.processes.governor.admission import Allowance
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Strategy, unsharded

if TYPE_CHECKING:
    from reshard_mpi.checkpoints.discovery import ShardFiles

# 5 GB, the size up to which huggingface_hub fills files.
_USUAL_FILE_BYTES = 5 * 10**9
# No file is larger, and records of runs hold no larger number.
_MOST_FILE_BYTES = 1 << 62


class TargetFile(NamedTuple):
    """A file of the target, for which the caller says which tensors it holds, each whole.

    tensors: the name of each in the source, and that in the file. size_bytes: of all of them.
    """

    name: str
    tensors: tuple[tuple[str, str], ...]
    size_bytes: int


class Request(NamedTuple):
    """The user's request, in the terms of the options of `reshard-mpi transform`.

    src_strategy, dst_strategy: paths of files or folders; None if left out. prefix: of target file names. select: a
    glob that source file names must match. to: name of the target format; None: that of the source. source_format: read
    only files of this format; None: of whichever there is. source_files: how many files the source was saved in, if the
    user says so. ranks: the targets to make; None: all. part: (i, n) for share number i of n of them. recorded: keep a
    journal in the target folder; without one, existing target files are replaced. memory: a size, "unlimited", or None
    for what the environment says. max_active: how many processes of a host may transform at once; None: any number.
    verify: read sources and targets again, compare them, and keep sums. crc: add a checksum to target files. replicas:
    which copies are compared before one is taken. accumulated: what becomes of accumulated gradients that differ
    between replicas. report: path of the report that will be written; None: none. max_shard_size: the most bytes of a
    file, where files are filled up to a size; None: the usual size. files: those of the target, for a run whose caller
    says which tensors each holds. map: maps that are applied one after another, each an equation, a file, or the name
    of a map that comes with the program. forward, reverse: which way they are read; neither: as the names tell, for
    each by itself. config: path of the model's configuration. dtype: `TYPE` or `GLOB=TYPE`, of which the last that
    matches counts. include, exclude: globs of which one, and none, must match the names of the target's tensors. like:
    path of a checkpoint whose names and shapes the target is to have.
    """

    source: str
    target: str
    src_strategy: str | None = None
    dst_strategy: str | None = None
    prefix: str = ""
    select: str | None = None
    to: str | None = None
    source_format: str | None = None
    source_files: int | None = None
    ranks: tuple[int, ...] | None = None
    part: tuple[int, int] | None = None
    resume: bool = False
    overwrite: bool = False
    unlisted: Unlisted = Unlisted.FOLLOW
    strict: bool = False
    recorded: bool = True
    memory: str | int | None = None
    max_active: int | None = None
    verify: bool = False
    crc: bool = False
    replicas: Replicas = Replicas.SAMPLE
    accumulated: Accumulated = Accumulated.REFUSE
    report: str | None = None
    max_shard_size: int | None = None
    files: tuple[TargetFile, ...] = ()
    map: tuple[str, ...] = ()
    forward: bool = False
    reverse: bool = False
    config: str | None = None
    dtype: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    like: str | None = None

    def shard_files(self) -> ShardFiles:
        """Find the files of the source. Raises a ReshardError if they do not make up a checkpoint."""
        from reshard_mpi.checkpoints.discovery import find_shards
        from reshard_mpi.filesystem.paths import require_reachable

        require_reachable(self.source)
        return find_shards(self.source, self.select, format_name=self.source_format, file_count=self.source_files)

    @property
    def is_mapped(self) -> bool:
        """Whether the request has maps, types or a selection."""
        said = (self.map, self.forward, self.reverse, self.config, self.like, self.dtype, self.include, self.exclude)
        return any(said)

    @property
    def most_file_bytes(self) -> int:
        """The most bytes of a file that is filled up to a size."""
        return _USUAL_FILE_BYTES if self.max_shard_size is None else min(self.max_shard_size, _MOST_FILE_BYTES)

    @property
    def allowance(self) -> Allowance:
        """How much of a host's memory may be used. Raises UsageError if `memory` is no size."""
        return Allowance.of(self.memory, self.max_active, os.environ)


class Strategies(NamedTuple):
    """The strategies of both sides of a conversion. source: None if the shards must describe themselves.

    The digests are those of the files, which tell whether another run had the same; None for a side without files.
    """

    source: Strategy | None
    target: Strategy
    source_digest: str | None
    target_digest: str | None

    @classmethod
    def read(cls, request: Request) -> Strategies:
        """Read the strategy files that `request` names. Raises StrategyError or LayoutError if they are wrong."""
        source, target = request.src_strategy, request.dst_strategy
        return cls(
            strategy.load(source) if source else None,
            strategy.load(target) if target else unsharded(),
            strategy.digest(source) if source else None,
            strategy.digest(target) if target else None,
        )
