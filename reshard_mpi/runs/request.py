"""What a user asks for, and the strategies that this names. Light: it is there before anything else is."""

from __future__ import annotations

import os
from typing import NamedTuple

from reshard_mpi.planning.parameters import Unlisted
from reshard_mpi.planning.replicas import Replicas
from reshard_mpi.processes.governor.allowance import Allowance
from reshard_mpi.sharding import strategy
from reshard_mpi.sharding.placement import Strategy, unsharded

# 5GB: what huggingface_hub fills files up to.
_USUAL_FILE_BYTES = 5 * 10**9
# No file is larger, and records of runs hold no larger number.
_MOST_FILE_BYTES = 1 << 62


class TargetFile(NamedTuple):
    """A file of the target where the caller says which tensors it holds, in whole.

    tensors: what each of them is called in the source, and in the file. size_bytes: of all of them.
    """

    name: str
    tensors: tuple[tuple[str, str], ...]
    size_bytes: int


class Request(NamedTuple):
    """What is to be converted, as the options of `reshard-mpi transform` say it.

    src_strategy, dst_strategy: files or folders; None as the options left out. ranks: the targets to make (None: all).
    part: (i, n) for the i-th of n shares of them. to: a format's name, None for the source's. source_format: of the
    files that are meant, None for what lies there. recorded: keep a journal
    in the target folder; without one, existing target files are replaced. memory: a size, "unlimited", or None for what
    the environment says. max_active: how many processes may transform at once on a host (None: any number).
    verify: read sources and targets again, compare them, and keep sums. crc: add a checksum to target files.
    replicas: which of the ranks that hold the same are compared before. report: where a report will be written.
    max_shard_size: how large files may become where they are filled up to a size (None: as large as is usual).
    files: of the target, for a run that writes such.
    """

    source: str
    target: str
    src_strategy: str | None = None
    dst_strategy: str | None = None
    prefix: str = ""
    select: str | None = None
    to: str | None = None
    source_format: str | None = None
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
    report: str | None = None
    max_shard_size: int | None = None
    files: tuple[TargetFile, ...] = ()

    @property
    def most_file_bytes(self) -> int:
        """How large a file may become that is filled up to a size."""
        return _USUAL_FILE_BYTES if self.max_shard_size is None else min(self.max_shard_size, _MOST_FILE_BYTES)

    @property
    def allowance(self) -> Allowance:
        """How much of a host's memory may be taken. Raises UsageError if `memory` is no size."""
        return Allowance.of(self.memory, self.max_active, os.environ)


class Strategies(NamedTuple):
    """How both sides of a conversion are sharded, as the request's files say. source: None if the shards must say it.

    The digests tell whether the files are those of another run; None for a side without files.
    """

    source: Strategy | None
    target: Strategy
    source_digest: str | None
    target_digest: str | None

    @classmethod
    def read(cls, request: Request) -> Strategies:
        """Read the files that `request` names. Raises StrategyError or LayoutError for what is wrong with them."""
        source, target = request.src_strategy, request.dst_strategy
        return cls(
            strategy.load(source) if source else None,
            strategy.load(target) if target else unsharded(),
            strategy.digest(source) if source else None,
            strategy.digest(target) if target else None,
        )
