"""Open a source: join its files with a strategy, by its first sound shard, or refuse them (`open_source`).

A folder may hold checkpoints of several moments, and a training may add another one at any time. Then whoever looks
later chooses other files, of the same structure and with other values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from reshard_mpi import formats
from reshard_mpi.checkpoints.file_names import NAME_WAYS, name_ending_in_rank, name_without_rank
from reshard_mpi.checkpoints.quantized_source import with_quantization
from reshard_mpi.checkpoints.refuse_sources import require_full
from reshard_mpi.checkpoints.shard_files import ShardFiles, common_name, in_its_rank
from reshard_mpi.checkpoints.source import DAMAGE, SourceCheckpoint, locate
from reshard_mpi.errors import LayoutError, ReshardError, SourceError, StrategyError, as_reshard_error
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.record_files import STATE
from reshard_mpi.planning.rank_plan import CHOSEN_FILES, SharedFact
from reshard_mpi.planning.shared_facts import require_one_checkpoint
from reshard_mpi.planning.source_flaws import modified_warning
from reshard_mpi.planning.source_tensors import SourceTensors
from reshard_mpi.processes.comm import Comm
from reshard_mpi.quantization.weights import SCHEME_TEXT
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy, everywhere, find_or_follow, unsharded
from reshard_mpi.text import shortened

if TYPE_CHECKING:
    from reshard_mpi.journal.record_finder import RunOfFiles
    from reshard_mpi.journal.run_records import RunIdentity

NO_DAMAGE: Mapping[int, ReshardError] = MappingProxyType({})


def open_source(
    files: ShardFiles, strategy: Strategy | None, known_damage: Mapping[int, ReshardError] = NO_DAMAGE
) -> SourceCheckpoint:
    """Join files and strategy; without a strategy the shards describe themselves or are one full checkpoint.

    Args:
        known_damage: what is known to be wrong with the shards of some ranks, though their structure may be sound.

    Raises SourceError or StrategyError where they do not belong together. Raises the first shard's error if no shard
    can be read, or if no strategy says which other shards hold the same data.
    """
    _require_all_files(files)
    run = _run_of(files) if _has_records(files) else None
    if run is not None:
        files = files._replace(modified=run.modified)
    if files.is_folder:
        return _open_folder(files, strategy, known_damage)
    if strategy is not None and strategy.world_size > 1:
        files = in_its_rank(files)
    said, recorded = strategy is not None, None
    first, manifest, described, damage = _first_sound(files, known_damage)
    if strategy is None:
        strategy = described
        if described is None:
            strategy = _recorded(files)
            files = files._replace(has_recorded_strategy=strategy is not None)
        if strategy is None and len(files.by_rank) == 1:
            _require_whole_run(files)
    elif described is not None:
        _require_agreement(strategy, described, manifest)
    elif run is not None:
        _require_as_many_ranks(files, strategy)
        _require_recorded_ranks(files, run)
        # Where all of them have been written since, the record tells nothing of them.
        if len(run.modified) < len(files.shards):
            recorded = _recorded_otherwise(run, strategy)
    if strategy is None:
        if damage:
            raise damage[min(damage)]
        _require_alone(files, first)
        strategy = unsharded(files.path)
    if strategy.world_size == 1 and manifest.identity is None:
        _require_no_part(manifest)
        files = require_full(files, manifest, said=said)
        if manifest.lacks_others:
            warning = f"{manifest.path} was saved without what other ranks hold: tensors of theirs may be missing"
            files = files._replace(warnings=(*files.warnings, warning))
    _require_known_ranks(files, strategy)
    return with_quantization(SourceCheckpoint(files._replace(read=None), strategy, {first: manifest}, damage, recorded))


def _open_folder(
    files: ShardFiles, strategy: Strategy | None, known_damage: Mapping[int, ReshardError]
) -> SourceCheckpoint:
    """Open a checkpoint that lists its own pieces."""
    if known_damage:  # its files belong to one rank, so no other has the same
        raise known_damage[min(known_damage)].with_traceback(None)
    if strategy is not None and formats.info(files.format).joins_by_strategy:
        files = files._replace(strategy=strategy)
    elif strategy is not None:
        raise SourceError(
            "a strategy is given for a checkpoint that lists its own pieces",
            expected="its index alone, which says where everything lies",
            got=strategy.origin,
            where=files.path,
            remedy="leave that strategy out",
        )
    manifest = locate(files, 0)
    files = files._replace(warnings=(*files.warnings, *manifest.warnings))
    return with_quantization(SourceCheckpoint(files, unsharded(files.path), {0: manifest}))


def _require_alone(files: ShardFiles, first: int) -> None:
    """Raise SourceError if a shard that does not describe itself is not rank 0 alone. first: its rank."""
    if len(files.by_rank) > 1 or first != 0:
        raise SourceError(
            "the shards do not say how they are sharded",
            expected="a source strategy for a checkpoint of several ranks",
            got="; ".join((f"{len(files.by_rank)} rank folders without one", *modified_warning(files.modified))),
            where=files.path,
            remedy="give --src-strategy, or --dst-strategy if it is the second checkpoint of verify or diff",
        )


def _require_known_ranks(files: ShardFiles, strategy: Strategy) -> None:
    """Raise SourceError if there are shards of ranks that the strategy does not have."""
    outside = [rank for rank in files.by_rank if rank >= strategy.world_size]
    if outside:
        raise SourceError(
            "the checkpoint has ranks its strategy does not know",
            expected=f"ranks 0 to {strategy.world_size - 1}, the mesh of {strategy.origin or 'the strategy'}",
            got=f"rank {shortened(outside, 1)}",
            where=files.path,
            remedy="give the strategy this checkpoint was saved with",
        )


def _first_sound(
    files: ShardFiles, known_damage: Mapping[int, ReshardError]
) -> tuple[int, Manifest, Strategy | None, dict[int, ReshardError]]:
    """Return the first shard that can be read: its rank, itself, the strategy it describes; and all known damage.

    Shards that are known to be damaged are passed over. Raises what is wrong with the first one if none can be read.
    """
    damage = dict(known_damage)
    for rank in sorted(files.by_rank.keys() - damage.keys()):
        try:
            manifest = locate(files, rank)
            return rank, manifest, _described(manifest), damage
        except (*DAMAGE, StrategyError) as error:
            damage[rank] = as_reshard_error(error, Path(files.by_rank[rank][0]))
    raise damage[min(damage)]


def _require_all_files(files: ShardFiles) -> None:
    """Raise SourceError if the number of files is not the number the user gave, or if no number is known.

    A folder that lists nothing looks complete without its last files: its tensors are then smaller.
    """
    count, said = len(files.shards), files.src_files
    lying = f"{count}, the last of them {Path(files.shards[-1]).name}" if files.shards else "none"
    if said is not None and said != count:
        raise SourceError(
            "the checkpoint has not as many files as you say" if count < said else "the checkpoint has other files too",
            expected=f"{said} files (--src-files)",
            got=lying,
            where=files.path,
            remedy="copy the missing ones" if count < said else "remove what does not belong to it",
        )
    if said is None and files.is_folder and not formats.info(files.format).knows_file_count:
        raise SourceError(
            f"nothing in a {formats.title(files.format)} tells whether its last files are missing",
            expected="--src-files N: how many files were saved, as a rule one for each rank that saved",
            got=lying,
            where=files.path,
            remedy="look it up where it was saved: without its last files a model looks complete, and is smaller",
        )


def _require_no_part(manifest: Manifest) -> None:
    """Raise SourceError if a file taken for a full checkpoint says that it is a part of one."""
    if manifest.part_of:
        raise SourceError(
            f"a file is one part of {manifest.part_of}, and may hold slices",
            expected="all parts" if manifest.to_have_all else "the folder with all parts",
            got="a file by itself",
            where=manifest.path,
            remedy=manifest.to_have_all or "give that folder as it was saved, without --select",
        )


def _described(manifest: Manifest) -> Strategy | None:
    return None if manifest.identity is None else strategy_table.stated(manifest.identity.strategy, manifest.path)


def _recorded(files: ShardFiles) -> Strategy | None:
    """Return the strategy that the run which wrote the files has recorded; None if it has not, or they are others."""
    from reshard_mpi.journal.run_records import recorded_strategy

    try:
        recorded = recorded_strategy(Path(files.path), files.by_rank)
    except OSError as error:
        raise as_reshard_error(error, Path(files.path)) from None
    return None if recorded is None else strategy_table.loads(*recorded)


def _run_of(files: ShardFiles) -> RunOfFiles | None:
    """Return the run that has made the files, if it has records of them.

    Raises DisagreementError if they are of several runs, as where one has replaced some of them.
    """
    from reshard_mpi.journal.record_finder import require_one_run

    files.look(*files.shards)  # one that is replaced after this is noticed
    return require_one_run(files.by_target_rank, files.path)


def _has_records(files: ShardFiles) -> bool:
    """Tell whether a run keeps records in a folder that one of the files lies in."""
    real = (str(real_path(path)) for path in files.shards)
    folders = {os.path.dirname(path) for path in (*files.shards, *real)}  # noqa: PTH120 - there may be thousands
    folders |= {os.path.dirname(folder) for folder in folders}  # noqa: PTH120
    return any(source_files.is_folder(Path(folder, STATE)) for folder in folders)


def _require_as_many_ranks(files: ShardFiles, strategy: Strategy) -> None:
    """Raise SourceError if the run that has made the files has another number of targets than a strategy has ranks."""
    from reshard_mpi.journal.record_finder import run_of

    rank, paths = next(iter(files.by_rank.items()))
    written_by = run_of(paths[0], rank)
    count = strategy.world_size if written_by is None else written_by[0].facts.get("target_ranks", strategy.world_size)
    if count != strategy.world_size:
        raise SourceError(
            "the run that has made these shards has another number of targets than the source strategy has ranks",
            expected=f"{count} ranks, a strategy file for each of their stages",
            got=f"{strategy.world_size} ranks",
            where=f"{files.path} and {strategy.origin or 'the source strategy'}",
            remedy="give the strategy that was the run's --dst-strategy",
        )


def _require_recorded_ranks(files: ShardFiles, run: RunOfFiles) -> None:
    """Raise SourceError if a file is given for another rank than the run that has made it has written it for."""
    for rank, paths in files.by_rank.items():
        for path in paths:
            recorded = run.rank_of.get(path, rank)
            if recorded != rank:
                raise SourceError(
                    "a shard lies in the place of another rank than the run has made it for",
                    expected=f"rank {recorded}, as its record says",
                    got=f"rank {rank}",
                    where=path,
                    remedy="give each file for its own rank; what you know to be right is read without its records"
                    " (copies of the files elsewhere)",
                )


def _recorded_otherwise(run: RunOfFiles, strategy: Strategy) -> Strategy | None:
    """Return the strategy by which a run has cut the shards that it made; None if it is the given one, or lost."""
    from reshard_mpi.journal.run_records import strategy_of_run

    tables = (strategy_of_run(folder, run.digest) for folder in run.folders)
    table = next((each for each in tables if each is not None), None)
    return None if table is None or table[0] == strategy_table.dumps(strategy) else strategy_table.loads(*table)


def require_recorded_cut(source: SourceCheckpoint, tensors: SourceTensors, names: Iterable[str]) -> None:
    """Raise StrategyError if the source's strategy and the record of the run that made the shards disagree on cuts.

    Both must give each opened shard the same box of the whole tensor that follows from the strategy.

    Args:
        tensors: of opened shards; names: of those that are looked at.
    """
    recorded = source.recorded_strategy
    if recorded is None:
        return
    alike = set()
    for name in names:
        group = tensors.group(name)
        before = find_or_follow(recorded, name, partial(tensors.same_shape, name)) or (everywhere(recorded),)
        if group.has_whole_sums:
            before = tuple(placement.changed(optimizer=1) for placement in before)
        if (group, before) in alike:
            continue
        alike.add((group, before))
        for rank in group.ranks:
            own = next(layout for layout in group.layouts if source.strategy.of_rank([layout.placement], rank))
            placement = recorded.of_rank(before, rank)
            if placement is not None and not _is_cut_so(placement, own, rank):
                raise StrategyError(
                    "the source strategy cuts a tensor otherwise than the run that has made these shards",
                    expected=f"{name!r}: {placement.cuts_text}, as {recorded.origin} says",
                    got=f"{own.placement.cuts_text}: ranks would hold other parts",
                    where=f"{source.files.path} and {source.strategy.origin or 'the source strategy'}",
                    remedy="leave the strategy out, or give the run's --dst-strategy",
                )


def _is_cut_so(placement: Placement, layout: Layout, rank: int) -> bool:
    """Tell whether a placement gives a rank the same box of a tensor as a layout."""
    try:
        return Layout(placement, layout.shape).box(rank) == layout.box(rank)
    except LayoutError:
        return False


def _require_whole_run(files: ShardFiles) -> None:
    """Raise SourceError if a file that is taken for a full checkpoint is one of several that a run has cut."""
    from reshard_mpi.journal.record_finder import RecordFinder, run_of, run_to_replace

    ((rank, paths),) = files.by_rank.items()
    for path in paths:
        written_by = run_of(path, rank) or run_to_replace(path)
        found = None if written_by is not None else RecordFinder().find_head(path, rank)
        if found is not None:
            raise SourceError(
                "it is not known whether a shard is one of several: the record of its run is lost",
                expected="run.json beside the record of the shard, or reshard.json of the same run",
                got=f"{found.path} alone",
                where=path,
                remedy="restore the record, or give --src-strategy; what you know to be a full checkpoint is read"
                " without its records (a copy of the file elsewhere)",
            )
        count = 1 if written_by is None else written_by[0].facts.get("target_ranks", 1)
        if written_by is None or count in (1, len(paths)) or not _may_be_cut(*written_by):
            continue
        raise SourceError(
            f"a shard is one of the {count} targets of a run, and the others are not there",
            expected="all of them, or the strategy by which they are cut",
            got=path,
            where=files.path,
            remedy="let the run finish (transform --resume), restore the others, or give --src-strategy",
        )


def _may_be_cut(run: RunIdentity, folder: Path) -> bool:
    """Tell whether the targets of a run in `folder` may hold slices of tensors."""
    from reshard_mpi.journal.run_records import strategy_of_run

    name = run.facts.get("to")
    if isinstance(name, str) and name in formats.targets() and formats.info(name).split_by_size:
        return False  # files that are filled up hold whole tensors
    recorded = strategy_of_run(folder, run.digest)
    if recorded is None:
        return True
    strategy = strategy_table.loads(*recorded)
    placements = (placement for of_name in strategy.parameters.values() for placement in of_name)
    of_rules = (placement for _, placement in strategy.rules)
    return strategy.stages > 1 or any(placement.is_cut for placement in (*placements, *of_rules))


def _require_agreement(given: Strategy, described: Strategy, manifest: Manifest) -> None:
    names: Iterable[str] = described.parameters
    if SCHEME_TEXT in manifest.strings:  # who gives a strategy need not list the companions of quantized weights
        names = filter(given.find, names)
    differing = [name for name in names if given.find(name) != described.parameters[name]]
    if given.world_size != described.world_size or (differing and not given.rules):
        raise StrategyError(
            "the strategy contradicts what the shards say of themselves",
            expected=f"{described.world_size} ranks, as the shards say",
            got=f"{given.world_size} ranks" + (f", another placement of {differing[0]!r}" if differing else ""),
            where=f"{given.origin} and {manifest.path}",
            remedy="leave it out: these shards describe themselves",
        )


_DIGEST_LENGTH = 32


def chosen_files(files: ShardFiles) -> str:
    """Return the common name of the files of all ranks, with `<rank>` for the rank; else one name and a digest of all.

    What all ranks are called by is the same if some of them are missing, or restored.
    """
    names = {rank: tuple(path.rpartition("/")[2] for path in paths) for rank, paths in files.by_rank.items()}
    are_single = all(len(own) == 1 for own in names.values())
    common = common_name(name for (name,) in names.values()) if are_single else None
    if common is not None:
        return common
    if are_single or (files.by_branch and not files.is_folder):
        # First the way that calls a single rank as it calls many.
        for way in (name_without_rank, *NAME_WAYS, name_ending_in_rank):
            called = (" and ".join(way(rank, name) for name in own) for rank, own in names.items())
            first = next(called, None)
            if first is not None and all(other == first for other in called):  # most ways are given up at once
                return first
    digest = hashlib.sha256(json.dumps(sorted((rank, sorted(own)) for rank, own in names.items())).encode())
    least, count = min((min(own) for own in names.values() if own), default=""), sum(map(len, names.values()))
    return f"{least} and {count - 1} more, sha256:{digest.hexdigest()[:_DIGEST_LENGTH]}"


def moments_of(files: ShardFiles) -> tuple[SharedFact, ...]:
    """Return what all who read the checkpoint must agree in: its files, and its folder if that is the latest of some.

    Another checkpoint may become the newest while processes begin.
    """
    chosen = SharedFact(CHOSEN_FILES, chosen_files(files), files.path)
    return (chosen, SharedFact("latest checkpoint", files.latest, files.path)) if files.latest else (chosen,)


def require_same_choice(comm: Comm, *checkpoints: ShardFiles) -> None:
    """Raise DisagreementError, the same on every process, unless all have chosen the same files of each checkpoint.

    Every process looks for them itself, and another one may become the newest meanwhile. All processes must call this.
    """
    for of_one in zip(*comm.allgather(tuple(map(moments_of, checkpoints))), strict=True):
        require_one_checkpoint(moment for moments in of_one for moment in moments)
