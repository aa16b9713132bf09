"""Open a run by its request: its source, its strategies, its targets and their paths (`open_run`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi import formats
from reshard_mpi.checkpoints import shard_files
from reshard_mpi.checkpoints.opening import NO_DAMAGE, chosen_files, open_source
from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.filesystem.paths import is_object_path, real_path
from reshard_mpi.formats.manifest import Specs
from reshard_mpi.journal.run_records import CHOSEN, FILES_BY_DIGEST, RunIdentity, joined_words
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.planning.rank_choice import Accumulated, Replicas, check_target_rank
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.check_places import refuse_overlap, refuse_posing, refuse_replacing
from reshard_mpi.runs.maps_and_packing import packing_of, planner_with_maps, require_target_options
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.process_memory import RunProcess, Workload
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.scheduling import are_even, assign, target_weights
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

if TYPE_CHECKING:
    from reshard_mpi.checkpoints.source import SourceCheckpoint
    from reshard_mpi.journal.target_folders import SharedIndex, Unrecorded
    from reshard_mpi.processes.comm import Comm
    from reshard_mpi.runs.check_commit import CommittedSums

# Planning takes a millisecond and a KiB for each, and no cluster has as many ranks.
MAX_TARGETS = 1 << 16


class Run(NamedTuple):
    """A run that has been opened: source and strategies have been read, and the targets are known."""

    request: Request
    planner: Planner
    format: str
    targets: tuple[int, ...]
    strategies: Strategies
    map_digests: Mapping[str, str]  # by the name of the option: of the map, its configuration and the --like checkpoint
    # The commit whose sums check the source's whole tensors. None: it has none, or each shard has a record with sums.
    source_commit: CommittedSums | None

    def path(self, target_rank: int) -> Path:
        """Return the final path of one target shard: `rank_<r>/<prefix><r><ending>`, unless its format has others."""
        return _target_file(self.request, self.format, target_rank, self.strategies.target.world_size)

    @property
    def target_notes(self) -> tuple[str, ...]:
        """Notes on which targets these are, and on their paths: a name like `one.pt` becomes a folder all the same."""
        target, part, notes = self.request.target.rstrip("/"), self.request.part, []
        if part is not None and part.variable:
            notes.append(f"this is task {part.number} of {part.shares}, counted from 0, as {part.variable} says")
        if self.targets and formats.name_of(target) is not None:
            notes.append(f"{target} is a folder, in which the targets are written: {self.path(self.targets[0])}")
        return tuple(notes)

    def make_journal(self) -> Journal | Unrecorded:
        """Return the journal, which keeps the state of this run in the target folder."""
        request = self.request
        if not request.keeps_journal:
            from reshard_mpi.journal.target_folders import Unrecorded

            return Unrecorded(request.target, self._shared_index)
        folder, identity, target = Path(request.target), self._identity(), self.planner.placed_target
        # Several targets say how they are cut only by an index that lists their contents, if there is one.
        is_recorded = self.planner.target.world_size > 1 and formats.folder_by_name(self.format) is None
        options: dict[str, Any] = {
            "resume": request.resume,
            "overwrite": request.overwrite,
            "strategy": partial(strategy_table.dumps, target) if is_recorded else None,
        }
        if not is_object_path(folder):
            return Journal(folder, identity, **options)
        from reshard_mpi.journal.object_journal import ObjectJournal

        options |= {"is_streamed": self.is_streamed, "is_single_writer": request.single_writer}
        return ObjectJournal(folder, identity, **options)

    @property
    def is_streamed(self) -> bool:
        """Whether parts of targets are sent to an object store while these are filled: nothing reads them again."""
        return is_streamed(self.request, self.format)

    @property
    def workload(self) -> Workload:
        """The work of a process that makes all targets."""
        return _workload(self.request, self.planner, self.format, len(self.targets))

    def hosts(self, comm: Comm) -> Sequence[object]:
        """Return by process what tells the hosts apart whose processes may fill a target together."""
        return range(comm.size) if is_object_path(self.request.target) else comm.hosts

    def _shared_index(self) -> SharedIndex | None:
        """The index of the files that the request names; None if it names none."""
        files, source = self.request.files, self.planner.source.files
        if files is None:
            return None
        from reshard_mpi.journal.target_folders import SharedIndex

        sources = source.sources(source.by_rank)
        state = repr((sources.folder, sources.files, self.strategies.source_digest))
        own = [files.names[rank] for rank in self.targets]
        stale = [name for name in files.besides if name not in files.held]
        folder = Path(self.request.target)
        return SharedIndex(folder, files.index_name, files.index_text, files.names, own, stale, state)

    def _identity(self) -> RunIdentity:
        request = self.request
        named = {name: getattr(request, name) for name in FILES_BY_DIGEST}
        files = {name: str(real_path(path)) for name, path in named.items() if path is not None}
        if request.map:
            words = request.map_words
            files["map"] = words[0] if len(words) == 1 else joined_words(words)
        if request.select is not None:
            files[CHOSEN] = request.select
        traits = formats.info(self.format)
        source = self.planner.source.files.path  # of several moments that lie there the one that was chosen
        facts = {
            "source": str(real_path(source)),
            "src_strategy": self.strategies.source_digest,
            "dst_strategy": self.strategies.target_digest,
            CHOSEN: chosen_files(self.planner.source.files),
            "prefix": request.prefix,
            "to": self.format,
            "unlisted": str(request.unlisted),
            "strict": request.strict,
            "crc": request.crc,
            "sums_in_shards": request.verify and traits.keeps_sums,
            "target_ranks": self.planner.target.world_size,
        }
        # These are left out where they say nothing, as in the records of versions that did not have them.
        optional = {
            "max_shard_size": request.most_file_bytes if "max_shard_size" in traits.options else None,
            "dp": request.dp,
            "zero_stage": request.zero_stage,
            "ep": request.ep,
            "core_version": request.core_version,
            "from": request.source_format,
            "src_files": request.src_files,
            "accumulated": str(request.accumulated) if request.accumulated is not Accumulated.REFUSE else None,
            **self.map_digests,
            "maps": len(request.map) if len(request.map) > 1 else None,
            "direction": "forward" if request.forward else "reverse" if request.reverse else None,
            "axis": joined_words(sorted(request.axis)),
            "dtype": joined_words(request.dtype),
            "include": joined_words(request.include),
            "exclude": joined_words(request.exclude),
            "quantization": self.planner.source.quantization_digest,
        }
        return RunIdentity({**facts, **{name: value for name, value in optional.items() if value}}, files)


def is_streamed(request: Request, format_name: str) -> bool:
    """Tell whether parts of targets are sent to an object store while these are filled: nothing reads them again."""
    is_read_again = request.verify or request.crc or formats.info(format_name).sums_payloads
    return is_object_path(request.target) and not is_read_again


def _workload(request: Request, planner: Planner, format_name: str, targets: int) -> Workload:
    streamed = is_streamed(request, format_name)
    return Workload(planner, format_name, targets, request.verify, is_streamed=streamed)


def open_run(
    process: RunProcess, known_damage: Mapping[int, ReshardError] = NO_DAMAGE, *, most_planned: int | None = None
) -> Run:
    """Open the run that a request asks for, with the memory to plan its targets one after another.

    Args:
        known_damage: what is known to be wrong with source shards, by rank.
        most_planned: how many targets are planned at most; None: all that are chosen.

    Raises a ReshardError for what is wrong with the request, its files, or both together.
    """
    request, memory = process.request, process.memory
    to = f"{request.target} " if request.target else ""
    purpose = f"planning {to}from {request.source}"
    process.reserve_for_reading(purpose)
    read = process.read_strategies()
    if request.files is not None:
        read = read._replace(target=strategy_of(list(request.files.held.values())))
    request.require_list_to_drop_by()
    _check_prefix(request.prefix)
    shards = request.shard_files()
    name = _target_format(request, shards.format)
    traits = formats.info(name)
    # With --part, or where packing decides how many targets there are, places are checked once the targets are known.
    is_checked_later = request.part is not None or traits.split_by_size or traits.packs
    if not is_checked_later:
        ranks = request.rank if request.rank is not None else range(read.target.world_size)
        _require_possible_places(request, shards, name, ranks, read.target)
    process.reserve_for_reading(purpose, shards.format)
    source = open_source(shards, read.source, known_damage)
    source_commit = _noted_commit(source) if request.verify else None
    # The commit has a sum of each whole tensor, not of each shard, so replicas must be compared in full.
    replicas = request.replicas if source_commit is None else Replicas.CHECK
    planner = _plain_planner(request, source, read.target, traits, replicas)
    planner, map_digests = planner_with_maps(request, planner, packing_of(request, source, name))

    def reserve_to_plan(planner: Planner, targets: int) -> None:
        memory.reserve_for_planning(_workload(request, planner, name, targets), purpose)

    if traits.split_by_size or (traits.packs and planner.mapped is not None):
        reserve_to_plan(planner, 1)
        planner, request = _planner_of_files(request, planner, traits)
        read = read._replace(target=planner.target)
    targets = chosen_targets(request, planner)
    if is_checked_later:
        _require_possible_places(request, shards, name, targets, read.target)
    _require_writable(request, name)
    memory.free_with(planner.forget)
    reserve_to_plan(planner, len(targets) if most_planned is None else most_planned)
    planner.require_fitting_strategies()
    return Run(request, planner, name, targets, read, map_digests, source_commit)


def _noted_commit(source: SourceCheckpoint) -> CommittedSums | None:
    """Return the commit that a source is to be held against, if any; its warnings are added to the source."""
    from reshard_mpi.runs.check_commit import commit_of, is_to_be_held

    commit = commit_of(source.files)
    source.files = source.files._replace(warnings=(*source.files.warnings, *commit.warnings))
    return commit if is_to_be_held(commit, source.files) else None


def _plain_planner(
    request: Request, source: SourceCheckpoint, target: Strategy, traits: formats.FormatInfo, replicas: Replicas
) -> Planner:
    """Return the planner of targets from the tensors of the source as they are."""
    return Planner(
        source,
        target,
        Policy(request.unlisted, request.strict, replicas, request.accumulated),
        keeps_strings=traits.keeps_strings,
        keeps_strategy=traits.describes_itself,
        is_one_checkpoint=traits.is_folder,
        new_names=None if request.files is None else request.files.new_names,
    )


def _planner_of_files(request: Request, planner: Planner, traits: formats.FormatInfo) -> tuple[Planner, Request]:
    """Return a planner of the files that targets are packed into, or that are filled up to a size; and the request."""
    if traits.split_by_size:
        whole = planner.plan(0, checked=False).tensors.specs
        return planner.changed(target=strategy_of(filled_files(whole, request.most_file_bytes))), request
    assert planner.mapped is not None
    packed = planner.mapped.packed
    target = Strategy(len(packed.files), 1, {})  # which file has what is known
    return planner.changed(target=target), request._replace(prefix=packed.prefix)


def open_for_planning(process: RunProcess, *, most_planned: int) -> Run:
    """Open a run to draw or explain some targets: the ones that the request names, or else the first.

    Raises a ReshardError for what `transform` would refuse before planning.
    """
    request = process.request
    if request.part is not None:
        raise UsageError(
            "a part of the targets is neither drawn nor explained",
            expected="--rank with the targets, or neither",
            got="--part",
        )
    # Of a million targets only the requested ones are looked at, and these are known later.
    first = request if request.rank is not None else request._replace(rank=(0,))
    return open_run(process._replace(request=first), most_planned=most_planned)


def _require_writable(request: Request, format_name: str) -> None:
    """Raise UsageError if the run cannot write this format as it is asked to."""
    if formats.folder_by_name(format_name) is not None and not request.keeps_journal:
        raise UsageError(
            f"a folder of the format {format_name} is written by runs that keep a record",
            expected="reshard-mpi transform, or reshard_mpi.transform",
            got="a function that keeps none",
        )
    if request.crc and not formats.info(format_name).has_crc:
        able = [other for other in formats.targets() if formats.info(other).has_crc]
        raise UsageError(
            f"--crc is for targets in {' or '.join(able)}",
            expected=" or ".join(f"--to {other}" for other in able),
            got=f"targets in {format_name}",
        )


def _target_format(request: Request, source_format: str) -> str:
    """Return the name of the targets' format. Raises UsageError for options that it does not allow."""
    own = formats.info(source_format)
    is_cut = request.dst_strategy is not None
    name = request.to or (own.sharded_variant if is_cut else None) or own.default_target or source_format
    traits = formats.info(name)
    if traits.split_by_size and is_cut:
        raise UsageError(
            f"a checkpoint in {name} is not cut over ranks",
            expected=f"--to {name} without --dst-strategy, or --to {traits.sharded_variant} with it",
            got=f"--dst-strategy {request.dst_strategy}",
        )
    require_target_options(request, name, MAX_TARGETS)
    folder_format = formats.folder_by_name(name)
    if (
        folder_format is not None
        and request.keeps_journal
        and request.prefix not in ("", formats.DEFAULT_PREFIX)
        and folder_format.file_name(0, 1, "") == folder_format.file_name(0, 1, request.prefix)
    ):
        raise UsageError(
            f"files of a checkpoint in {name} have names of their own",
            expected="no --prefix",
            got=f"--prefix {request.prefix}",
        )
    return name


def _require_possible_places(
    request: Request, files: shard_files.ShardFiles, format_name: str, ranks: Sequence[int], target: Strategy
) -> None:
    """Raise TargetError if targets overlap with the source, UsageError if they are too many to be checked.

    Nothing overlaps if the request names no target, since nothing is written then.
    """
    if not request.target:
        return
    if is_object_path(request.target) and not request.keeps_journal:
        raise UsageError(
            "targets in an object store are written by runs that keep a record",
            expected="reshard-mpi transform, or reshard_mpi.transform",
            got="a function that keeps none",
            where=request.target,
        )
    if request.target_file is not None:
        refuse_posing(files, Path(request.target_file))
        refuse_replacing(Path(request.target_file), (request.src_strategy, request.dst_strategy))
        return
    if len(ranks) > MAX_TARGETS:
        parts = -(-target.world_size // MAX_TARGETS)
        raise UsageError(
            "there are too many targets for one run",
            expected=f"at most {MAX_TARGETS}",
            got=str(len(ranks)),
            where=request.dst_strategy or "",
            remedy=f"make them in {parts} parts or more (--part I/N), or some of them (--rank)",
        )
    target_files = [_target_file(request, format_name, rank, target.world_size) for rank in ranks]
    for path in dict.fromkeys((files.path, request.source)):  # which may be a folder that names another one
        refuse_overlap(files._replace(path=path), request.target, target_files)


def _check_prefix(prefix: str) -> None:
    if "/" in prefix or "\0" in prefix or prefix.startswith(".") or prefix[-1:].isdigit():
        raise UsageError(
            "the prefix cannot begin a file name",
            expected="text without '/' that does not start with '.', which would hide the files, nor end in a digit,"
            " since the number of the rank follows",
            got=repr(prefix),
            remedy="choose another --prefix, such as net_",
        )


def _target_file(request: Request, format_name: str, target_rank: int, targets: int) -> Path:
    if request.target_file is not None:
        return Path(request.target_file)
    if request.files is not None:
        return Path(request.target, request.files.names[target_rank])
    return Path(request.target, formats.target_file(format_name, target_rank, targets, request.prefix))


def chosen_targets(request: Request, planner: Planner) -> tuple[int, ...]:
    """Return the target ranks that the request names, or that make up its part; all if it says nothing of them.

    Raises UsageError if there is no such rank.
    """
    target = planner.target
    if request.rank is not None:
        for rank in request.rank:
            check_target_rank(rank, target)
        return tuple(sorted(set(request.rank)))
    all_ranks = range(target.world_size)
    if request.part is None:
        return tuple(all_ranks)
    share, shares = request.part.number, request.part.shares
    if shares >= len(all_ranks):
        return tuple(all_ranks[share : share + 1])
    if are_even(target):
        return tuple(all_ranks[share::shares])  # as `assign` deals out equal targets
    return tuple(sorted(assign(target_weights(planner, all_ranks), range(shares))[share]))


def filled_files(specs: Specs, most_bytes: int) -> list[list[str]]:
    """Return the names of the tensors that each file holds, in their order.

    A new file is begun when the next tensor would make the current one larger than `most_bytes`. A tensor that is
    larger by itself gets a file of its own, which comes before the current one.
    """
    sizes = [kind.size_bytes for kind in specs.kinds]
    done: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, kind in zip(specs.names, specs.kind_ids):
        size_bytes = sizes[kind]
        if size_bytes > most_bytes:
            done.append([name])
            continue
        if current_bytes + size_bytes > most_bytes:
            done.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size_bytes
    return [*done, current] if current or not done else done


def strategy_of(named: Sequence[Sequence[str]]) -> Strategy:
    """Return the strategy of files with whole tensors: one stage of one rank for each file.

    Args:
        named: the names of the tensors in each file.
    """
    placements = ((Placement((1,), stages=(stage,)),) for stage in range(len(named)))
    parameters = {name: placement for names, placement in zip(named, placements) for name in names}
    return Strategy(len(named), len(named), parameters)
