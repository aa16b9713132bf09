"""Choose where each part of a target rank is read from, and make its plan (`plan_target`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from reshard_mpi.errors import CoverageError, DisagreementError, ReshardError, StrategyError
from reshard_mpi.formats.manifest import ShardIdentity, apart_error
from reshard_mpi.groups import grouped
from reshard_mpi.planning.comparison_choice import ReplicaGroup, replicas_to_compare
from reshard_mpi.planning.rank_choice import GradientShare, Replicas, choose_holders
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, RankPlan, ReadGroup, SharedFact
from reshard_mpi.planning.shared_facts import (
    CommonStrings,
    agreement_checks,
    left_out_of,
    numbers_of_stages,
    shared_tensors,
    unlike_by_group,
)
from reshard_mpi.planning.source_flaws import UnusableShard, errors_text, named
from reshard_mpi.planning.source_tensors import SourceGroup, TensorPart
from reshard_mpi.planning.step_counters import is_moment
from reshard_mpi.planning.target_tensors import TargetTensors, TensorClass
from reshard_mpi.sharding.placement import Piece, Placement
from reshard_mpi.sharding.strategy import Unlisted, everywhere, find_or_follow, named_after
from reshard_mpi.text import first_few


def plan_target(target: TargetTensors, strategy_table: str) -> RankPlan:
    """Return the plan of one target rank.

    Args:
        target: its tensors, for which nothing is lacking any more.
        strategy_table: the description of the target strategy that goes into the shard; empty if it has no place there.

    Raises CoverageError for a part that no source holds, LayoutError or DisagreementError if shards contradict
    strategies or each other.
    """
    policy = target.policy
    absent = _absent(target)
    choices = _choose(target)
    read_ranks = {rank for chosen in choices for rank in chosen}
    in_order = sorted(target.manifests, key=lambda rank: (rank not in read_ranks, rank != target.home, rank))
    common = CommonStrings.of(target.manifests, in_order)
    planned, holes = _planned_tensors(target, choices, dict(_state_of_other_stages(target, common)))
    same_world = target.strategy.world_size == target.source_strategy.world_size
    stage_of = target.source_strategy.stage_of
    checks = list(agreement_checks(target.tensors, target.class_by_name, stage_of, same_world=same_world))
    tensors = planned
    files_missing: list[str] = []
    if any(manifest.tensors.in_pieces for manifest in target.manifests.values()):
        from reshard_mpi.planning.chunk_reads import ChunkReads, missing_files

        reads = ChunkReads(target.rank, target.strategy.world_size, allows_holes=policy.allows_holes)
        tensors = reads.planned(planned)
        checks += reads.checks(planned.groups, policy.replicas)
        holes |= reads.holes
        for manifest in target.manifests.values():
            files_missing += missing_files(manifest.tensors)
    warnings = (
        *(_not_its_own(target) if same_world and target.rank in target.lost else ()),
        *files_missing,
        *unlike_by_group(target.manifests, in_order),
        *_warnings_of_stages(target, common),
    )
    joining = target.joining
    unlisted = frozenset(name for held in target.classes if not held.group.listed for name in held.names)
    drops_strings = policy.unlisted is Unlisted.DROP
    return RankPlan(
        target_rank=target.rank,
        stage=target.stage,
        identity=ShardIdentity(target.rank, target.strategy.world_size, strategy_table),
        tensors=tensors,
        strings={} if drops_strings else common.strings,
        checks=tuple(checks),
        absent=absent,
        notes=tuple(dict.fromkeys((*common.notes, *(note for one in target.manifests.values() for note in one.notes)))),
        source_ranks=tuple(sorted(target.manifests)),
        unlisted=unlisted,
        unplaced=frozenset(name for name in unlisted if not target.layouts.lists(name)),
        shared_facts=tuple(_shared(target)),
        to_compare=tuple(_to_compare(target)),
        lost=_replaced(target, planned.groups) if target.lost else (),
        warnings=warnings,
        left_out=tuple(left_out_of(target.manifests)),
        gradients=() if joining is None else joining.gradients((held.names, held.group) for held in target.classes),
        holes=holes,
        value_ranks=() if drops_strings else common.ranks,
    )


def _planned_tensors(
    target: TargetTensors, choices: Sequence[Sequence[int | None]], unfit: Mapping[str, ReshardError]
) -> tuple[PlannedTensors, dict[str, ReshardError]]:
    """Plan where tensors are read from; return the plans, and an error for each tensor that nobody has.

    Args:
        choices: the rank that each part of each class is read from.
        unfit: tensors that cannot be taken.

    Raises one of the errors unless holes are allowed.
    """
    allows_holes = target.policy.allows_holes
    for error in unfit.values():
        if not allows_holes:
            raise error
    holes = dict(unfit)
    groups: list[Group] = []
    for held, chosen in zip(target.classes, choices):
        if unfit:
            held = held._replace(names=[name for name in held.names if name not in unfit])
        read_groups = _read_groups(target, held, chosen) if held.names else ()
        if isinstance(read_groups, ReshardError):
            if not allows_holes:
                raise read_groups
            holes |= dict.fromkeys(held.names, read_groups)
            read_groups = ()
        groups.append(Group(held.kind, held.names, read_groups))
    # A group of its own for each kind of those, so that they keep their places.
    apart = grouped((held.kind, name) for name, held in target.class_by_name.items() if name in unfit) if unfit else {}
    own_group = {name: number for number, names in enumerate(apart.values(), len(groups)) for name in names}
    groups += [Group(kind, names, ()) for kind, names in apart.items()]
    group_of = (own_group.get(name, held.number) for name, held in target.class_by_name.items())
    return PlannedTensors(groups, array("I", group_of)), holes


def _warnings_of_stages(target: TargetTensors, common: CommonStrings) -> Iterator[str]:
    """Yield why optimizers of the source's stages are not joined, or what tells that their numbers are not one's."""
    if target.source_strategy.stages == 1:
        return
    reasons = dict.fromkeys(why for apart in common.apart.values() for why in apart.values())
    for why in reasons:
        yield f"optimizers of stages cannot be joined, and those of the first are kept: {why}"
    if not reasons:
        yield from numbers_of_stages(common.strings, target.manifests, target.source_strategy.stage_of)


def _to_compare(target: TargetTensors) -> Iterator[ReplicaGroup]:
    """Yield the replicas that must be alike, of tensors that are taken and of gradients that are joined."""
    replicas, joining = target.policy.replicas, target.joining
    taken = ((held.names, held.group, held.layout) for held in target.classes if held.share is GradientShare.TAKEN)
    yield from replicas_to_compare(taken, target.layouts.box, replicas, target.source_strategy.alike)
    if joining is not None and replicas is not Replicas.ANY:
        for held in target.classes:
            if held.share is GradientShare.JOINED:
                yield from joining.distinct_copies(held.names, held.parts, held.group.dtype.itemsize_bytes)


def _state_of_other_stages(target: TargetTensors, common: CommonStrings) -> Iterator[tuple[str, DisagreementError]]:
    """Yield state of optimizers of stages that cannot be joined with the one whose settings are kept, with the error.

    Stages of one training that this program has cut have the same optimizer, and the same numbers.
    """
    stage_of = target.source_strategy.stage_of
    kept_in: dict[str, frozenset[int]] = {}  # the stages whose optimizers with such names are kept
    for begin in {begin for apart in common.apart.values() for begin in apart}:
        kept_in[begin] = frozenset(stage_of(rank) for rank, apart in common.apart.items() if begin not in apart)
    for held in target.classes if kept_in else ():
        rank, *_ = held.group.ranks
        apart = {
            begin: why
            for begin, why in common.apart.get(rank, {}).items()
            if kept_in[begin].isdisjoint(map(stage_of, held.group.ranks))
        }
        for name in held.names if apart else ():
            if name.startswith((*apart,)):
                shard, kept = target.manifests[rank], target.manifests[next(iter(common.apart))]
                yield name, apart_error(name, shard.path, kept.path, apart)


def _choose(target: TargetTensors) -> list[Sequence[int | None]]:
    """Return the rank to read each part of each `TensorClass` from, None where no opened rank holds it."""
    demands: dict[Placement, dict[Piece, None]] = {}
    for held in target.classes:
        for part in held.parts if held.group.listed and held.share is GradientShare.TAKEN else ():
            demands.setdefault(part.placement, {})[part.piece] = None
    choice = choose_holders(demands, target.home, target.manifests)
    return [
        [choice.get((part.placement, part.piece)) for part in held.parts]
        if held.group.listed
        else [_any_rank(target, held.group)] * len(held.parts)
        for held in target.classes
    ]


def _read_groups(
    target: TargetTensors, held: TensorClass, chosen: Sequence[int | None]
) -> tuple[ReadGroup, ...] | ReshardError:
    """Return where the tensors of a class come from, or why nobody has them. chosen: a rank for each part.

    If the chosen rank lacks the tensors, another holder is taken.
    """
    if isinstance(held.share, ReshardError):
        return held.share
    if held.share is not GradientShare.TAKEN:
        assert target.joining is not None
        return target.joining.read_groups(held.names, held.kind, held.share, held.group, held.parts)
    read_groups = []
    for part, rank in zip(held.parts, chosen):
        if rank not in held.group.ranks:
            rank = next((other for other in part.placement.holders(part.piece) if other in held.group.ranks), None)
        if rank is None:
            return _missing_part_error(held.names[0], part, target)
        tensors = target.manifests[rank].tensors
        numbers = array("I", map(tensors.index_by_name.__getitem__, held.names))
        read_groups.append(ReadGroup(rank, part.box, part.region, tensors, numbers))
    return tuple(read_groups)


def _shared(target: TargetTensors) -> Iterator[SharedFact]:
    """Yield the tensors that this stage of the target shares with others: all ranks of them must have the same."""
    if target.strategy.stages == 1:
        return
    placed = (*target.strategy.parameters.values(), *((rule,) for _, rule in target.strategy.rules))
    shared = {_stages(placements) for placements in (*placed, (everywhere(target.strategy),))}
    by_stages: dict[tuple[int, ...], dict[str, SourceGroup]] = {stages: {} for stages in sorted(shared)}
    for name, held in target.class_by_name.items():
        if (held.group.listed or target.layouts.lists(name)) and not is_moment(name, held.group.shape):
            by_stages[_stages(target.layouts.placements(name) or (held.layout.placement,))][name] = held.group
    for stages, tensors in by_stages.items():
        if len(stages) > 1 and target.stage in stages:
            yield from shared_tensors(stages, tensors, target.manifests)


def _replaced(target: TargetTensors, groups: Sequence[Group]) -> tuple[UnusableShard, ...]:
    """Return the shards that cannot be used, with the ranks from which their data is taken instead.

    Those are the ranks that give the parts for which the lost shard is the preferred holder; if there is no such
    part, all parts that it holds.
    """
    nearest: dict[int, set[int]] = {rank: set() for rank in sorted(target.lost)}
    others: dict[int, set[int]] = {rank: set() for rank in nearest}
    for held, group in zip(target.classes, groups):
        for part, route in zip(held.parts, group.routes):
            first = part.placement.holder(part.piece, target.home)
            for rank, instead in nearest.items():
                if rank == first:
                    instead.add(route.source_rank)
                elif held.group.listed and rank in part.placement.holders(part.piece):
                    others[rank].add(route.source_rank)
    return tuple(
        target.lost[rank]._replace(taken_from=tuple(sorted(nearest[rank] or others[rank]))) for rank in nearest
    )


def _not_its_own(target: TargetTensors) -> Iterator[str]:
    """Yield a warning if this rank's own values, which no strategy places, are taken from another rank's shard."""
    unlisted = [
        name
        for name, held in target.class_by_name.items()
        if not held.group.listed and not is_moment(name, held.group.shape)
    ]
    if unlisted:
        names = first_few(list(map(repr, unlisted)), 3)
        taken_from = _any_rank(target, target.class_by_name[unlisted[0]].group)
        yield (
            f"target rank {target.rank} has {names} of {named([taken_from])}, not its own: no strategy"
            " says who else holds the same, and its own shard cannot be used"
        )


def _any_rank(target: TargetTensors, group: SourceGroup) -> int:
    return target.home if target.home in group.ranks else group.ranks[0]


def _absent(target: TargetTensors) -> tuple[str, ...]:
    """Return the listed parameters that this shard should have and that were never saved, as opened shards show.

    Raises CoverageError if a shard that may hold one was not opened or is damaged, or if `strict`; StrategyError if
    the checkpoint has no parameter at all that the target strategy lists.
    """
    absent = []
    source = target.source_strategy
    for name in target.listed_here:
        if name in target.tensors or not (name in target.strategy.parameters or name in source.parameters):
            continue  # a name that only a rule gives need not be in the checkpoint
        origins = find_or_follow(source, name, lambda _: True)
        stages = _stages(origins)
        damaged = [shard for rank, shard in target.lost.items() if shard.problem and source.stage_of(rank) in stages]
        if origins and not any(source.stage_of(rank) in stages for rank in target.manifests):
            raise CoverageError(
                f"no shard that should hold {name!r} is there",
                expected=f"a shard of stage {origins[0].stages[0]} of the source",
                got=f"shards of {_one_of(tuple(target.manifests))}" + (f"; {errors_text(damaged)}" if damaged else ""),
                remedy="restore the shards of that stage",
            )
        if damaged:
            _require_never_saved(name, damaged, target)
        if name in target.strategy.parameters:
            absent.append(name)
    if absent and target.policy.strict:
        raise CoverageError(
            "the target strategy lists parameters that no source shard holds",
            expected="every listed parameter (--strict)",
            got=f"{len(absent)} absent: {first_few(absent, 5)}",
            where=target.strategy.origin,
            remedy="leave out --strict if they were never saved",
        )
    if absent and not any(target.strategy.find(name) for name in target.class_by_name):
        raise StrategyError(
            "no parameter that the target strategy lists is in the checkpoint",
            expected=", ".join(absent[:3]),
            got=", ".join(islice(target.tensors.names, 3)) or "no tensors",
            where=target.strategy.origin,
            remedy="check that checkpoint and strategy belong to the same network",
        )
    return tuple(absent)


def _stages(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(sorted({stage for placement in placements for stage in placement.stages}))


def _missing_part_error(name: str, part: TensorPart, target: TargetTensors) -> CoverageError:
    """Return the error for a part of a tensor that no shard gives."""
    holders = tuple(part.placement.holders(part.piece))
    opened = [target.manifests[rank].path for rank in holders if rank in target.manifests]
    damaged = [target.lost[rank] for rank in holders if rank in target.lost and target.lost[rank].problem]
    if damaged:
        others = len(holders) - len(damaged)
        got = errors_text(damaged) + (f"; {others} without it, or missing" if others else "")
    else:
        got = "shards without the tensor" if opened else "shard missing"
    return CoverageError(
        f"no source holds a part of {name!r} that target rank {target.rank} needs",
        expected=f"box {part.region} on {_one_of(holders)}",
        got=got,
        where=", ".join(opened),
        remedy="restore one of these ranks' shards, or give the strategy this checkpoint was saved with; where slices"
        ' have different lengths, a TOML rule needs their sizes (sizes = "ceil": as torch cuts)',
    )


def _require_never_saved(name: str, suspects: Sequence[UnusableShard], target: TargetTensors) -> None:
    """Raise CoverageError if a tensor that all opened shards lack may be in a damaged one.

    Nothing is raised for what was evidently never saved: state named after a parameter (`adam_m.weight`) of a kind
    (`adam_m.`) that the target gets of no parameter, while every opened shard holds all that it should.

    Args:
        suspects: the damaged shards of the stages where the source strategy places the tensor.
    """
    source = target.source_strategy
    lacking = (
        rank
        for held in target.classes
        if held.group.listed
        for layout in held.group.layouts
        for rank in target.manifests
        if source.stage_of(rank) in layout.placement.stages and rank not in held.group.ranks
    )
    base = next((base for base in named_after(name) if source.find(base) or target.strategy.find(base)), name)
    kind = name.removesuffix(base)
    has_kind = any(other.startswith(kind) for held in target.classes for other in held.names)
    if has_kind or not kind or next(lacking, None) is not None:
        raise CoverageError(
            f"{name!r} is in no shard that was opened, but may be in one that is damaged",
            expected=f"a shard with {name!r}",
            got=errors_text(suspects),
            remedy="restore these shards, or remove them if it was never saved",
        )


def _one_of(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {first_few(ranks, 8)}"
