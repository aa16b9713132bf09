"""Plan target ranks from one source, mapped if asked (`Planner`), and warn of optimizer state that stays whole."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from reshard_mpi.checkpoints.compare_replicas import compare_checks, read_beginnings, read_counters
from reshard_mpi.checkpoints.compare_samples import rank_of_another_stage, require_one_of_stages, sample_findings
from reshard_mpi.checkpoints.copied_files import require_own_files
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.refuse_sources import require_files_meant
from reshard_mpi.checkpoints.shard_files import SingleShard
from reshard_mpi.checkpoints.shard_opener import ShardOpener, ShardShare, require_consistent_source
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import CoverageError, ReshardError, StrategyError
from reshard_mpi.formats.manifest import NEST, Manifest, shown_string
from reshard_mpi.planning.plan_target import plan_target
from reshard_mpi.planning.rank_choice import Replicas, check_target_rank
from reshard_mpi.planning.rank_plan import Check, Group, Limits, RankPlan, SharedFact
from reshard_mpi.planning.shared_facts import (
    not_carried,
    require_nothing_left_out,
    require_one_checkpoint,
    text_digests,
    unlisted_beginnings,
)
from reshard_mpi.planning.source_flaws import Differing, PrefixDigest
from reshard_mpi.planning.step_counters import moment_counters, plain_counters, steps_apart
from reshard_mpi.planning.strategy_check import (
    NOTHING_FOUND,
    SampleFindings,
    dead_rules,
    require_living_rules,
    require_same_network,
    unconfirmed_rules,
)
from reshard_mpi.planning.target_tensors import Policy, TensorClass
from reshard_mpi.quantization.weights import SCHEME_TEXT
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.strategy import Strategy, Unlisted, find_or_follow, is_dropped
from reshard_mpi.text import MIB, shortened

if TYPE_CHECKING:
    from reshard_mpi.quantization.weights import QuantizedWeights
    from reshard_mpi.runs.mapped_source import MappedCheckpoint


# The buffer is so large that Python's work for each filling takes little time compared with moving the bytes. The
# window is the most that is mapped of sources at once. `process_memory` says how much memory a process takes besides.
LIMITS = Limits(buffer_bytes=2 * MIB, window_bytes=16 * MIB)

# Shards opened before a tensor counts as absent, since shards may be saved without what others hold.
_MAX_LOOKED_INTO = 64


class Planner:
    """Plans target ranks and checks the source before anything is written.

    Args:
        keeps_strings: whether the target format has a place for strings.
        keeps_strategy: whether it has one for how the whole checkpoint is sharded.
        is_one_checkpoint: whether the files of all targets make up one, so that each piece is written by one only.
        new_names: of the tensors of targets, by those in the source; None: the same.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        target: Strategy,
        policy: Policy = Policy(),  # noqa: B008 - never changed
        *,
        keeps_strings: bool = True,
        keeps_strategy: bool = True,
        is_one_checkpoint: bool = False,
        new_names: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.policy = policy
        self.limits = LIMITS
        self.keeps_strings = keeps_strings
        self.keeps_strategy = keeps_strategy
        self.is_one_checkpoint = is_one_checkpoint
        self.mapped: MappedCheckpoint | None = None  # what maps make of the source; None: there is no map
        self.new_names = new_names
        # called before copies are compared with numpy, which takes more memory than planning
        self.before_gathering: Callable[[], object] = lambda: None
        self._reset()

    def _reset(self) -> None:
        self._is_fitting = False
        self._table: str | None = None
        self._opener: ShardOpener | None = None
        self._placed: Strategy | None = None
        self.source.list_rule_names()

    def changed(self, **values: Any) -> Planner:
        """Return the same planner with other values of its attributes."""
        other = object.__new__(Planner)
        vars(other).update(vars(self), **values)
        other._reset()
        return other

    @property
    def planned_source(self) -> SourceCheckpoint:
        """The checkpoint that targets are planned from: the result of the maps, or else the source itself."""
        return self.source if self.mapped is None else self.mapped

    @property
    def placed_target(self) -> Strategy:
        """The targets' strategy, which also lists the companions of quantized weights."""
        if self._placed is None:
            self._placed = self.planned_source.placed(self.target, is_global=self.is_one_checkpoint)
        return self._placed

    def plan(self, target_rank: int, *, checked: bool = True) -> RankPlan:
        """Return the plan of one target rank, after its checks have passed.

        Args:
            checked: whether to read and compare small values too (`with_values_compared`); False if that has been done.
                Replicas in `plan.to_compare`, which targets share, are left to `compare_replicas.compare`.

        Raises a ReshardError if the target cannot be made exactly.
        """
        check_target_rank(target_rank, self.target)
        self.require_fitting_strategies()
        if self.mapped is not None and self.mapped.has_files:
            plan = self.mapped.completed(self.mapped.file_plan(target_rank), checked=checked)
            if not checked:
                return plan
            self.require_none_left_behind(plan, ShardShare(target_rank, self.target.world_size))
            return self.with_values_compared(plan)
        try:
            opened = self.opener.open(target_rank)
            if self.mapped is None and not self.is_one_checkpoint:
                self.source.require_known_scheme(opened.manifests.values(), opened.is_cut)
            require_same_network(self.planned_source.strategy, opened.manifests.values())
            if self.policy.strict:
                require_nothing_left_out(opened.manifests)
                require_files_meant(self.source.files)
            plan = plan_target(opened, self._strategy_table() if self.keeps_strategy else "")
        except CoverageError as error:
            self._tell_where(error)
            raise
        for hole in plan.holes.values():
            if isinstance(hole, CoverageError):
                self._tell_where(hole)
        quantization = self.planned_source.quantization
        if quantization is not None:
            plan = self._saying_how(plan, quantization)
        if plan.strings and not self.keeps_strings:
            plan = self._without_strings(plan)
        if self.mapped is not None:
            plan = self.mapped.completed(plan, checked=checked)
            if not self.is_one_checkpoint:  # else cuts say only who writes what
                plan = plan._replace(warnings=(*plan.warnings, *self.mapped.cut_warnings(plan)))
        strings = (plan.strings, *(manifest.strings for manifest in opened.manifests.values()))
        nest = next((each[NEST] for each in strings if NEST in each), None)
        may_cut = self.target.world_size > 1 or self.policy.unlisted is Unlisted.DROP
        if may_cut and not self.is_one_checkpoint and self.policy.unlisted is not Unlisted.REPLICATE:
            plan = _warned_of_whole_state(plan, self.placed_target, nest, self.policy, self.source.files.path)
        if plan.gradients:
            from reshard_mpi.planning.gradient_joining import notes_on

            plan = plan._replace(notes=(*plan.notes, *notes_on(self.policy.accumulated, plan.gradients)))
        if checked:
            self.require_none_left_behind(plan, ShardShare(target_rank, self.target.world_size))
            plan = self.with_values_compared(plan)
        if self.is_one_checkpoint:
            opened.require_one_copy()
            self.opener.require_written(opened)
            plan = plan.without(opened.written_elsewhere())
        return plan if self.new_names is None else plan.renamed(self.new_names)

    def held(self, target_rank: int, names: Iterable[str]) -> dict[str, TensorClass]:
        """Return how both sides hold each of the tensors that a target has. Raises as `plan` does."""
        held_by_name = self.opener.open(target_rank).class_by_name
        return {name: held_by_name[name] for name in names if name in held_by_name}

    def require_none_left_behind(
        self, plan: RankPlan, share: ShardShare, is_asked: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Raise StrategyError if a share of the source's shards holds tensors that no target would get.

        Args:
            plan: that of any target.
            is_asked: tells which tensors are asked for.
        """
        if self.mapped is not None:
            self.mapped.require_none_left_behind(share, is_asked)
            return
        taken = {*plan.tensors.specs.names, *plan.written_by_others}
        self.opener.require_none_left_behind(plan.target_rank, taken, share, is_asked)

    def _tell_where(self, error: CoverageError) -> None:
        """Say in an error where parts were looked for, and where they may be."""
        error.where = error.where or self.source.location_text
        lone = SingleShard.of(self.source.files)
        if lone is not None and self.source.strategy.world_size > 1 and lone.siblings():
            error.remedy = f"give {lone.checkpoint}, where the shards of the other ranks are"

    def with_values_compared(self, plan: RankPlan) -> RankPlan:
        """Return a plan with all that reading tensors of the source shows. Raises what `plan` raises."""
        manifests = {rank: self.planned_source.manifest(rank) for rank in plan.source_ranks}
        counters = plain_counters(manifests.values(), are_mapped=self.mapped is not None)
        require_one_checkpoint(counters)
        moments = (*self._moments(manifests), *counters)
        return plan._replace(
            differing=self._differing(plan.checks) if plan.checks else plan.differing,
            shared_facts=(*plan.shared_facts, *moments),
            warnings=(*plan.warnings, *steps_apart(moments)),
            prefix_digests=self._beginnings(plan),
        )

    def _saying_how(self, plan: RankPlan, quantization: QuantizedWeights) -> RankPlan:
        """Return a plan whose target says how it is quantized, and the shapes of its own pieces of weights."""
        if self.mapped is not None or self.target.world_size > 1 or self.source.strategy.world_size > 1:
            from reshard_mpi.planning.made_tensors import with_piece_shapes

            plan = with_piece_shapes(plan, quantization.weights, is_global=self.is_one_checkpoint)
        if self.keeps_strings and quantization.text:
            return plan._replace(strings={**plan.strings, SCHEME_TEXT: quantization.text})
        if SCHEME_TEXT not in plan.strings:
            return plan
        note = "the targets do not say how they are quantized: keep the model's config.json beside them"
        strings = {name: text for name, text in plan.strings.items() if name != SCHEME_TEXT}
        return plan._replace(strings=strings, notes=(*plan.notes, note))

    def _without_strings(self, plan: RankPlan) -> RankPlan:
        """Return a plan without strings, for which the target has no place. Raises DisagreementError if `strict`."""
        names = ", ".join(map(shown_string, plan.strings))
        if self.policy.strict:
            raise not_carried(
                names,
                expected="a target format with a place for texts",
                where=self.source.files.path,
                remedy="choose another format (--to)",
            )
        left_out = f"left out, since the target's format has no place for texts or settings: {names}"
        return plan._replace(strings={}, value_ranks=(), notes=(*plan.notes, left_out))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the source and the strategies."""
        return (*self.source.files.notes, *unconfirmed_rules(self.source.strategy))

    def needs(self, name: str) -> bool:
        """Tell whether anything is made of a tensor of the source."""
        return self.mapped is None or self.mapped.needs(name)

    def sample_findings(
        self,
        *,
        damaged_are_replaced: bool = False,
        process: int = 0,
        processes: int = 1,
        needs: Callable[[str], bool] = lambda _: True,
    ) -> SampleFindings:
        """Return the tensors that differ from rank to rank, as one process's share of a sample shows.

        Args:
            needs: tells which tensors are looked at, of those that targets have. With `replicas` ANY nothing is read.

        Raises what `compare_samples.sample_findings` raises.
        """
        self.require_fitting_strategies()
        if self.mapped is not None:
            return self.mapped.original.sample_findings(
                damaged_are_replaced=damaged_are_replaced, process=process, processes=processes, needs=self.mapped.needs
            )
        if self.policy.replicas is Replicas.ANY:
            return NOTHING_FOUND
        if self.source.strategy.world_size == 1:
            if process == 0:
                require_own_files(self.source)
            return NOTHING_FOUND
        quantization = self.source.quantization
        own = frozenset[str]() if quantization is None else quantization.shapes
        findings = sample_findings(
            self.source,
            lambda name, present: name not in own and self.is_wanted(name, present) and needs(name),
            self.opener.knows,
            self.policy.unlisted,
            damaged_are_replaced=damaged_are_replaced,
            process=process,
            processes=processes,
        )
        # Where each rank keeps its own of what no strategy lists, that may differ.
        return findings._replace(unlisted=()) if self._keeps_each_ranks_own else findings

    def require_one_of_stages(self, differing: Iterable[Differing]) -> None:
        """Raise StrategyError if stages hold different tensors of one name (`compare_samples`).

        Args:
            differing: what targets take from one rank of several.
        """
        if self.policy.unlisted is not Unlisted.REPLICATE and self.policy.replicas is not Replicas.ANY:
            for tensor in differing:
                require_one_of_stages(self.source, tensor)

    @property
    def _keeps_each_ranks_own(self) -> bool:
        """Whether each target has the values of one source rank that no strategy lists: none of them is lost."""
        return self.planned_source.strategy.world_size == self.target.world_size and not self.is_one_checkpoint

    def is_wanted(self, name: str, present: Container[str]) -> bool:
        """Tell whether the targets have a tensor. present: the names of all tensors of the checkpoint."""
        return self.policy.unlisted is not Unlisted.DROP or not is_dropped(self.placed_target, name, present)

    def without(self, damage: Mapping[int, ReshardError]) -> Planner:
        """Return the same planner without source shards that are known to be damaged."""
        source = open_source(self.source.files, self.source.plain_strategy, damage)
        mapped = None if self.mapped is None else self.mapped.of(source)
        return self.changed(source=source, mapped=mapped)

    def forget(self) -> None:
        """Free what has been read of shards; it is read again when it is needed."""
        self.source.forget()
        if self.mapped is not None:
            self.mapped.forget()
        self._opener = None

    def require_fitting_strategies(self) -> None:
        """Raise StrategyError if a rule of a spec places no tensor.

        If shards contradict the source's strategy, that error comes first. If a stage has no shard, nothing is raised.
        """
        source = self.planned_source
        both = ((source.strategy, "source"), (self.target, "target"))
        sides = [(strategy, side) for strategy, side in both if strategy.required_rules]
        if self._is_fitting or not sides:
            return
        stage_ranks = source.stage_ranks()
        if len(stage_ranks) == source.strategy.stages:
            names = {name: None for rank in stage_ranks.values() for name in source.manifest(rank).tensors}
            if any(dead_rules(strategy, names) for strategy, _ in sides):
                others = islice((rank for rank in source.files.by_rank if source.find(rank)), _MAX_LOOKED_INTO)
                names |= {name: None for rank in others for name in source.manifest(rank).tensors}
                names |= dict.fromkeys(source.rule_names())
            for strategy, side in sides:
                if side == "target" and dead_rules(strategy, names):
                    require_consistent_source(self.source)
                require_living_rules(strategy, names, side, source.files.path)
        self._is_fitting = True

    @property
    def opener(self) -> ShardOpener:
        if self._opener is None:
            self._opener = ShardOpener(self.planned_source, self.placed_target, self.policy)
        return self._opener

    def _moments(self, manifests: Mapping[int, Manifest]) -> tuple[SharedFact, ...]:
        if self.mapped is not None:
            # Names in the source itself tell the moment. In a map's result, a number in a name may be another's.
            return ()
        strategy = self.planned_source.strategy
        counters = moment_counters(manifests, lambda name: bool(find_or_follow(strategy, name, lambda _: True)))
        return read_counters(counters, self.limits)

    def _beginnings(self, plan: RankPlan) -> tuple[PrefixDigest, ...]:
        strategy = self.planned_source.strategy
        if strategy.world_size == 1 or self._keeps_each_ranks_own:
            return ()  # there is nothing else to take
        texts = text_digests(plan, of_stages=strategy.stages > 1)
        return (*texts, *read_beginnings(unlisted_beginnings(plan), self.limits))

    def _differing(self, checks: Iterable[Check]) -> tuple[Differing, ...]:
        """Return the tensors whose copies differ, where targets get one of these alone."""
        differing = compare_checks(self.planned_source, checks, self.limits, self.before_gathering)
        if self.planned_source.strategy.world_size != self.target.world_size:
            return tuple(differing)
        return tuple(tensor for tensor in differing if rank_of_another_stage(self.source, tensor) is not None)

    def _strategy_table(self) -> str:
        if self._table is None:
            placed, quantization = self.placed_target, self.planned_source.quantization
            if quantization is not None and quantization.shapes:  # each rank has its own, so no strategy lists them
                listed = {name: own for name, own in placed.parameters.items() if name not in quantization.shapes}
                placed = placed.listing_also(listed, placed.alike)
            self._table = strategy_table.dumps(placed)
        return self._table


def _warned_of_whole_state(plan: RankPlan, target: Strategy, nest: str | None, policy: Policy, where: str) -> RankPlan:
    """Return a plan that warns of state which is whole, and has the shape of a tensor that the strategy cuts.

    torch's optimizers call their state by numbers, by names that lack what the model's begin with, or by a key behind
    the parameter's name. Such state does not follow its parameter: it lies whole beside a slice, and is not dropped
    with what no rule matches.

    If what is not listed is dropped, it warns of all state that is kept because only a rule for every name matches it.
    Raises StrategyError for whole state if the policy is strict.

    Args:
        nest: the text that says how its tensors are nested, if they are; where: the source, for the error.
    """
    groups = plan.tensors.groups
    whole, cut = ([each for each in groups if _is_cut(each) is is_cut] for is_cut in (False, True))
    is_weights_alone = policy.unlisted is Unlisted.DROP
    shapes = {group.kind.whole_shape for group in cut if prod(group.kind.whole_shape) > 1}
    asked = groups if is_weights_alone else [group for group in whole if group.kind.whole_shape in shapes]
    state = list(_unplaced_state(asked, groups if is_weights_alone else cut, target, nest)) if asked else []
    if not state:
        return plan
    if is_weights_alone:
        kept = (
            f"the optimizer's state is kept ({shortened(state)}): it is not named after its parameters, so a rule '*'"
            " takes it for a tensor of its own; --exclude leaves it out"
        )
        return plan._replace(warnings=(*plan.warnings, kept))
    if policy.strict:
        raise StrategyError(
            "the target strategy cuts parameters, and not the optimizer's state, which is not named after them",
            expected="state that is cut as its parameter is",
            got=f"{shortened(state)} whole",
            where=f"{target.origin or 'the target strategy'} and {where}",
            remedy=f"add rules for the state to that strategy (match = '{state[0]}'), or leave it out"
            " (--exclude); state of parameters whose names begin as the model's do follows them",
        )
    warning = (
        f"the target strategy cuts parameters, and the optimizer's state is whole on every rank ({shortened(state)}),"
        " since it is not named after them: torch cannot go on with such a rank alone; rules for the state cut it"
    )
    return plan._replace(warnings=(*plan.warnings, warning))


def _is_cut(group: Group) -> bool:
    return group.kind.own_box.shape != group.kind.whole_shape


def _unplaced_state(
    asked: Iterable[Group], parameters: Iterable[Group], target: Strategy, nest: str | None
) -> Iterator[str]:
    """Yield those tensors asked for that are state, as a nest or parameters' names tell, and that no rule places."""
    from reshard_mpi.formats.nest.nodes import NestError
    from reshard_mpi.mapping.optimizers import STATE_KEY, optimizers_in_nest
    from reshard_mpi.mapping.tensor_kinds import parted_anywhere

    begins: tuple[str, ...] = ()
    with suppress(ValueError, RecursionError, NestError):  # a text that is no nest, as who nests tensors by it says
        begins = tuple(f"{optimizer.path}{STATE_KEY}." for optimizer in optimizers_in_nest(nest))
    names = frozenset(name for group in parameters for name in group.names)
    for name in (name for group in asked for name in group.names):
        is_placed = target.find(name) and not target.is_only_caught(name)
        if not is_placed and (name.startswith(begins) or parted_anywhere(name, names) is not None):
            yield name
