"""Hold the user's request, and name the tasks of a run (`Request`, `Task`). Loads little, since it comes first."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.errors import ReshardError, UsageError, as_reshard_error
from reshard_mpi.filesystem.paths import absolute_path, is_object_path, real_path, require_reachable
from reshard_mpi.options import OPTIONS, PATH, TargetShare
from reshard_mpi.planning.rank_choice import Accumulated, Replicas
from reshard_mpi.processes.governor import Allowance
from reshard_mpi.sharding.strategy import Strategy, Unlisted, unsharded

if TYPE_CHECKING:
    from reshard_mpi.checkpoints.shard_files import ShardFiles
    from reshard_mpi.processes.comm import Comm
    from reshard_mpi.runs.outcome import Outcome
    from reshard_mpi.runs.process_memory import RunProcess
    from reshard_mpi.runs.progress import Progress

    TaskFunction = Callable[[RunProcess], Outcome]

# 5 GB, the size up to which huggingface_hub fills files.
_USUAL_FILE_BYTES = 5 * 10**9
# No file is larger, and records of runs hold no larger number.
_MOST_FILE_BYTES = 1 << 62


class TargetFiles(NamedTuple):
    """Files of whole tensors that are the targets of a run, in place of ranks, and the index that lists them.

    Example: `TargetFiles({"part0.safetensors": ("w",)}, {"w": "model.w"}, "param_name_map.json", "{...}", "hf")`.
    """

    held: Mapping[str, tuple[str, ...]]  # by file name: the tensors in it, by their names in the source
    new_names: Mapping[str, str]  # of all tensors, by those
    index_name: str
    index_text: str
    read_as: str  # the name of the format that the folder is read as
    besides: tuple[str, ...] = ()  # names of files that are read together with the index, whatever it says

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files; targets are numbered in this order."""
        return tuple(self.held)


class Request(NamedTuple):
    """The user's request: the checkpoints of both sides, and a field for each option of a run (`options.OPTIONS`).

    Example: `Request("src", "dst", "src_strategy.ckpt", "dst_strategy.ckpt", to="hdf5", rank=(0, 1))`.
    """

    source: str  # path of the source checkpoint
    target: str  # path of the target folder
    src_strategy: str | None = None  # path of a file or folder
    dst_strategy: str | None = None  # path of a file or folder
    prefix: str = ""  # of target file names
    select: str | None = None  # glob that source file names must match
    to: str | None = None  # name of the target format; None: the source's
    source_format: str | None = None  # read only files of this format; None: of any
    src_files: int | None = None  # number of files the source was saved in, if the user gives it
    rank: tuple[int, ...] | None = None  # targets to make; None: all
    part: TargetShare | None = None  # of the targets
    resume: bool = False  # keep complete targets of this same run
    overwrite: bool = False  # replace targets of other runs
    single_writer: bool = False  # nobody else writes to the target meanwhile, where a store keeps no conditions
    unlisted: Unlisted = Unlisted.FOLLOW  # handling of tensors in no strategy
    strict: bool = False  # refuse where there would be a warning
    keeps_journal: bool = True  # keep a journal in the target folder; without one, existing target files are replaced
    memory: str | int | None = None  # a size, "unlimited", or None for the environment's
    max_active: int | None = None  # processes of a host that may transform at once; None: any number
    verify: bool = False  # read sources and targets again, compare them, and keep sums
    crc: bool = False  # add a checksum to target files
    replicas: Replicas = Replicas.SAMPLE  # copies compared before one is taken
    accumulated: Accumulated = Accumulated.REFUSE  # handling of accumulated gradients that differ between replicas
    report: str | None = None  # path of the report to write; None: none
    max_shard_size: int | None = None  # most bytes of a file, where files are filled up to a size; None: the usual
    dp: int | None = None  # number of data-parallel ranks of the target, where its files are packed for ranks
    zero_stage: int | None = None  # stage of ZeRO of such a target
    ep: int | None = None  # ranks of expert parallelism for which an optimizer is; None: as the source's
    core_version: str | None = None  # release of Megatron-Core that is to load the target; None: the latest known
    source_by_rank: Mapping[int, str] | None = None  # paths of source shards, if the caller lists them
    target_file: str | None = None  # path of the target, for a run whose caller names the file of a single one
    files: TargetFiles | None = None  # the targets, for a run whose caller assigns the tensors to files
    map: tuple[str, ...] = ()  # maps in order, each an equation, a file, or the name of a shipped map
    forward: bool = False  # read all maps from left to right
    reverse: bool = False  # read all maps from right to left; neither: each as the names tell
    config: str | None = None  # path of the model's configuration
    axis: tuple[str, ...] = ()  # `NAME=LENGTH`: lengths of the maps' axes
    dtype: tuple[str, ...] = ()  # `TYPE` or `GLOB=TYPE`; the last that matches counts
    include: tuple[str, ...] = ()  # globs; names of target tensors must match one
    exclude: tuple[str, ...] = ()  # globs; names of target tensors may match none
    like: str | None = None  # path of a checkpoint whose names and shapes the target gets
    atol: float = 0.0  # how far numbers a and b that are compared may be apart: atol + rtol * |b|
    rtol: float = 0.0
    before: str | None = None  # path of the previous checkpoint of the training, for an audit
    norms: bool = False  # whether an audit is to return the norms of all tensors
    allow: tuple[str, ...] = ()  # globs; an audit finds nothing wrong with tensors whose names match

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Request:
        """Return the request with these values of its fields, which may have texts for choices."""
        kinds = {"unlisted": Unlisted, "replicas": Replicas, "accumulated": Accumulated}
        choices = {name: kind(values[name]) for name, kind in kinds.items() if name in values}
        return cls(**{**values, **choices})

    def shard_files(self) -> ShardFiles:
        """Find the files of the source. Raises a ReshardError if they do not make up a checkpoint."""
        from reshard_mpi.checkpoints.discovery import find_shards, shards_from_map

        if self.source_by_rank is not None:
            for path in self.source_by_rank.values():
                require_reachable(path)
            return shards_from_map(self.source_by_rank)
        require_reachable(self.source)
        files = find_shards(self.source, self.select, format_name=self.source_format, src_files=self.src_files)
        return files if self.config is None else files._replace(config=self.config)

    def require_list_to_drop_by(self) -> None:
        """Raise UsageError if unlisted tensors are to be dropped, and no target strategy lists any."""
        if self.unlisted is Unlisted.DROP and self.dst_strategy is None and self.files is None:
            raise UsageError(
                "--unlisted drop needs a list to go by",
                expected="--dst-strategy with the parameters to keep",
                got="no target strategy",
            )

    @property
    def is_mapped(self) -> bool:
        """Whether the request has maps, types or a selection."""
        of_maps = (self.map, self.forward, self.reverse, self.axis, self.like)
        return any((*of_maps, self.dtype, self.include, self.exclude))

    def from_anywhere(self) -> Request:
        """Return the same request with absolute paths of source, strategies, maps, configuration and the like."""
        named = {name: getattr(self, name) for name in ("source", "src_strategy", "dst_strategy", "config", "like")}
        paths: dict[str, Any] = {name: str(absolute_path(path)) for name, path in named.items() if path}
        return self._replace(map=self.map_words, **paths)

    @property
    def map_words(self) -> tuple[str, ...]:
        """The maps as they may be given from any folder: absolute paths, and equations as they are."""
        if not self.map:
            return ()
        from reshard_mpi.mapping.map_file import map_path

        paths = ((name, map_path(name)) for name in self.map)
        return tuple(name if path is None else str(real_path(path)) for name, path in paths)

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
        from reshard_mpi.sharding.strategy_files import digest, load

        source, target = request.src_strategy, request.dst_strategy
        return cls(
            load(source) if source else None,
            load(target) if target else unsharded(),
            digest(source) if source else None,
            digest(target) if target else None,
        )


class Task(StrEnum):
    """What processes do together: MODULE:FUNCTION, which each calls with its `process_memory.RunProcess`."""

    CONVERT = "runs.transform:convert"
    VERIFY_PAIR = "runs.verify_command:verify_pair"
    VERIFY_ALONE = "runs.verify_command:verify_alone"
    DIFF = "runs.diff:diff"
    DIFF_VALUES = "runs.diff:diff_values"
    AUDIT = "soundness.command:audit"

    def load(self) -> TaskFunction:
        """Import the function's module, and return the function."""
        module, _, name = self.partition(":")
        function: TaskFunction = getattr(importlib.import_module(f"reshard_mpi.{module}"), name)
        return function

    def run(self, request: Request, comm: Comm, progress: Progress, strategies: Strategies | None = None) -> Outcome:
        """Do this process's part; return the outcome of all processes of `comm`, which must do the same.

        Args:
            strategies: those of the request, if they have been read already.

        Raises the same error on every process if the run is refused.
        """
        from reshard_mpi.runs.process_memory import RunProcess

        function = self.load()
        list_object_stores(request, comm, is_target_read=self is not Task.CONVERT)
        with RunProcess.begun(request, comm, progress, strategies) as process:
            return function(process)


def list_object_stores(request: Request, comm: Comm | None = None, *, is_target_read: bool = False) -> None:
    """Have one process list what lies in object stores where the request names something, and tell the others.

    Args:
        comm: the processes that do the work together; None: this one alone.
        is_target_read: whether the target is a second checkpoint.

    Raises, on every process, the error of the one that has listed.
    """
    options = (getattr(request, option.name) for option in OPTIONS.values() if option.kind is PATH)
    files = (request.source_by_rank or {}).values()
    named = (request.source, *options, *request.map, *files, request.target if is_target_read else None)
    paths = [path for path in named if path and is_object_path(path)]
    if not paths:
        return
    from reshard_mpi.filesystem import object_folders

    listed: object_folders.ListedFolders | ReshardError | None = None
    if comm is None or comm.rank == 0:
        try:
            for path in paths:
                object_folders.look(path)
            listed = object_folders.known()
        except (OSError, ReshardError) as error:
            listed = as_reshard_error(error)
    told = listed if comm is None or comm.size == 1 else comm.allgather(listed)[0]
    if isinstance(told, ReshardError):
        raise told
    if comm is not None and comm.rank and isinstance(told, object_folders.ListedFolders):
        object_folders.learn(told)
