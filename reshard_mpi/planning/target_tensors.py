"""Tell which tensors one target rank holds, and what opened shards lack for them (`TargetTensors`)."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.errors import LayoutError, ReshardError, StrategyError, UsageError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.groups import grouped
from reshard_mpi.planning.rank_choice import (
    Accumulated,
    GradientShare,
    Replicas,
    home_rank,
    is_partial_sum,
    pieces_written_by,
    wants,
)
from reshard_mpi.planning.shared_facts import require_tensors_or_strings
from reshard_mpi.planning.source_flaws import UnusableShard
from reshard_mpi.planning.source_tensors import SourceGroup, SourceTensors, TensorPart, needed_parts
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Piece, Placement
from reshard_mpi.sharding.strategy import (
    Strategy,
    Unlisted,
    everywhere,
    find_or_follow,
    is_dropped,
    listed_names,
    may_be_held,
    named_after,
)

if TYPE_CHECKING:
    from reshard_mpi.planning.gradient_joining import GradientJoining

_NOT_DIVIDED = (
    "choose a target strategy whose cuts divide the tensor, or give the sizes of its slices (in a TOML rule"
    ' sizes = "ceil": as torch cuts)'
)
_NOT_DIVIDED_AGAIN = (
    "choose a target strategy whose cuts divide the tensor: in TOML give it a rule before this one, without optimizer,"
    ' or one with split and sizes = "ceil" instead of optimizer'
)


class TargetLayouts:
    """The layouts of tensors, and the boxes of one rank, on the target's side.

    Attributes:
        tensors: what the source has.
        unlisted: what becomes of parameters that the strategy does not list.
    """

    def __init__(self, strategy: Strategy, rank: int, tensors: SourceTensors, unlisted: Unlisted) -> None:
        self._strategy = strategy
        self._rank = rank
        self._tensors = tensors
        self._unlisted = unlisted
        self._boxes: dict[Layout, Box] = {}
        self._layouts: dict[tuple[SourceGroup, int], Layout | None] = {}  # by the identity of kept placements

    def layout(self, name: str, group: SourceGroup) -> Layout | None:
        """Return how this target rank holds a tensor; None if it does not."""
        if self._unlisted is Unlisted.DROP and is_dropped(self._strategy, name, self._tensors):
            return None
        placements = self._strategy.of_every_name or self.placements(name)  # there may be very many
        key = (group, id(placements))
        if key not in self._layouts:
            self._layouts[key] = self._placed(name, group, placements)
        return self._layouts[key]

    def _placed(self, name: str, group: SourceGroup, placements: tuple[Placement, ...]) -> Layout | None:
        """Return how this target rank holds the tensors of a group by these target placements; None if it does not."""
        is_cut = any(layout.placement.is_cut for layout in group.layouts)
        if not placements and self._unlisted is Unlisted.FOLLOW and is_cut:
            raise StrategyError(
                f"{name!r} is sharded in the source and the target strategy does not say how to place it",
                expected="it in the target strategy, or a parameter of the same shape whose whole name is in its own",
                got=_not_followed(self._strategy, name),
                where=self._strategy.origin,
                remedy="add it to the target strategy, or use --unlisted replicate or --unlisted drop",
            )
        placements = placements or (everywhere(self._strategy),)
        placement = self._strategy.of_rank(placements, self._rank)
        if placement is None:
            return None
        if group.has_whole_sums:
            placement = placement.changed(optimizer=1)
        try:
            return self._tensors.layout(placement, group.shape)
        except LayoutError as error:
            error.where = f"tensor {name!r}, target strategy {self._strategy.origin}".rstrip()
            error.remedy = error.remedy or (_NOT_DIVIDED_AGAIN if placement.optimizer > 1 else _NOT_DIVIDED)
            raise

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Return how the target strategy places a tensor; empty where it does not."""
        if self._unlisted is not Unlisted.FOLLOW:
            return self._strategy.find(name)
        return find_or_follow(self._strategy, name, lambda base: self._tensors.same_shape(name, base))

    def lists(self, name: str) -> bool:
        """Tell whether the target strategy lists a name, other than by a rule for every name."""
        return bool(self._strategy.find(name)) and not self._strategy.is_only_caught(name)

    def box(self, layout: Layout) -> Box:
        """Return what this target rank holds of a tensor."""
        if layout not in self._boxes:
            self._boxes[layout] = layout.box(self._rank)
        return self._boxes[layout]


def _not_followed(target: Strategy, name: str) -> str:
    others = [base for base in named_after(name) if target.find(base)]
    return f"{others[0]!r} listed, but of another shape" if others else "neither listed"


class TensorClass(NamedTuple):
    """Tensors that are alike in source and target, by name in file order, and the parts that are needed of each."""

    number: int
    group: SourceGroup
    layout: Layout
    share: GradientShare | ReshardError
    box: Box
    parts: tuple[TensorPart, ...]
    names: list[str]

    @property
    def kind(self) -> TensorType:
        """The type of each of them in the target."""
        return TensorType.of_box(self.group.dtype, self.box, self.group.shape)


class Policy(NamedTuple):
    """The user's options for targets."""

    unlisted: Unlisted = Unlisted.FOLLOW  # what becomes of parameters that the target strategy does not list
    strict: bool = False  # whether a listed parameter that was never saved is an error
    replicas: Replicas = Replicas.SAMPLE  # which copies are compared
    accumulated: Accumulated = Accumulated.REFUSE  # what becomes of accumulated gradients
    allows_holes: bool = False  # tensors that cannot be made do not refuse the plan, but are named in it


class TargetTensors:
    """The tensors of one target rank, as the source shards that were opened for it show them.

    Attributes:
        source_strategy, strategy: of the source and of the targets.
        stage, home: the target's stage, and the source rank that it prefers to others that hold the same.
        manifests: the opened shards by rank, those of `needed_ranks` at least.
        lost: the shards that were needed and cannot be used, by rank.
        tensors, layouts: the tensors of the opened shards, and how the target holds them.
        class_by_name: in file order, all tensors that go into the target.
        listed_here: the listed names that no opened shard holds and that the target needs or must refuse.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        target_rank: int,
        manifests: Mapping[int, Manifest],
        lost: Mapping[int, UnusableShard],
        policy: Policy,
    ) -> None:
        self.source_strategy = source
        self.strategy = target
        self.rank = target_rank
        self.stage = target.stage_of(target_rank)
        self.home = home_rank(target_rank, target.world_size, source.world_size)
        self.manifests = manifests
        self.policy = policy
        if policy.unlisted is not Unlisted.DROP:
            require_tensors_or_strings(manifests)
        leaves_out = target.stages > 1 or policy.unlisted is Unlisted.DROP
        self.tensors = SourceTensors(source, manifests, lost, self._may_hold if leaves_out else None)
        self.layouts = TargetLayouts(target, target_rank, self.tensors, policy.unlisted)
        self.lost = lost
        # All that goes into this shard: the classes of its tensors, and the class of each tensor by its name, in file
        # order.
        self._classes: dict[tuple[SourceGroup, Layout, GradientShare | ReshardError], TensorClass] = {}
        self.class_by_name: dict[str, TensorClass] = {}
        home_stage = source.stage_of(self.home)
        self.joining: GradientJoining | None = None
        if policy.accumulated is not Accumulated.REFUSE:
            from reshard_mpi.planning.gradient_joining import GradientJoining

            self.joining = GradientJoining(
                policy.accumulated, source, self.tensors, target_rank, manifests, lost, keeps_errors=policy.allows_holes
            )
        taken: GradientShare | ReshardError = GradientShare.TAKEN
        for name in self.tensors.names:
            group = self.tensors.group(name)
            layout = self.layouts.layout(name, group)
            if layout is not None:
                share = taken if self.joining is None else self.joining.share(name, group, layout.placement)
                held = self._classes.get((group, layout, share))
                if held is None:
                    box = self.layouts.box(layout)
                    has_parts = share in (GradientShare.TAKEN, GradientShare.JOINED)
                    parts = needed_parts(name, group, box, target_rank, home_stage, manifests) if has_parts else ()
                    held = TensorClass(len(self._classes), group, layout, share, box, parts, [])
                    self._classes[group, layout, share] = held
                held.names.append(name)
                self.class_by_name[name] = held
        self.listed_here = tuple(self._find_listed_here())

    def _may_hold(self, name: str, present: Container[str]) -> bool:
        return may_be_held(self.strategy, self.stage, name, self.policy.unlisted, present)

    @property
    def classes(self) -> Collection[TensorClass]:
        """The classes of the tensors of this target, by their numbers."""
        return self._classes.values()

    @property
    def names(self) -> Collection[str]:
        """The tensors of this target."""
        return self.class_by_name.keys()

    def is_cut(self, name: str) -> bool:
        """Tell whether ranks of the source or of the target hold parts of a tensor of this target."""
        held = self.class_by_name.get(name)
        return held is not None and any(each.placement.is_cut for each in (held.layout, *held.group.layouts))

    def lacking(self) -> dict[tuple[int, ...], list[str]]:
        """Return needed names that no opened shard has, by the ranks that should have them.

        If no opened shard holds the name at all, these are the ranks that should hold the same part as an opened one.
        """
        lacking: dict[tuple[int, ...], list[str]] = {}
        for held in self.classes:
            if held.group.listed:
                pieces: dict[Placement, set[Piece]] = {}
                for part in held.parts:
                    if part.placement not in pieces:  # there may be thousands of holders, and few ranks are opened
                        stages = part.placement.stages
                        of_stages = (rank for rank in held.group.ranks if self.source_strategy.stage_of(rank) in stages)
                        pieces[part.placement] = set(map(part.placement.piece, of_stages))
                    if part.piece not in pieces[part.placement]:
                        lacking.setdefault(tuple(part.placement.holders(part.piece)), []).extend(held.names)
        holders_of: dict[object, list[tuple[int, ...]]] = {}  # many tensors are placed alike
        for origins, names in self.unseen().items():
            if origins not in holders_of:
                holders_of[origins] = [tuple(self._alike(origin)) for origin in origins]
            for ranks in holders_of[origins]:
                lacking.setdefault(ranks, []).extend(names)
        lacking.pop((), None)
        return lacking

    def joined_ranks(self) -> set[int]:
        """Return the ranks whose shards are all needed, since their contents are joined."""
        return {
            rank
            for held in self.classes
            if held.share is GradientShare.JOINED
            for part in held.parts
            for rank in part.placement.holders(part.piece)
        }

    def require_one_copy(self) -> None:
        """Raise UsageError if target ranks that hold the same piece get different sums, for a target of one copy."""
        for held in self.classes:
            name, replicas = held.names[0], held.layout.placement.replicas
            if self.policy.accumulated is Accumulated.SUM and is_partial_sum(name) and replicas > 1:
                raise UsageError(
                    f"the target has one copy of {name!r} for {replicas} ranks",
                    expected="one rank for each piece, as there is one sum",
                    got="--accumulated sum, which gives the sum to one of these ranks and zeros to the others",
                    where=self.strategy.origin,
                    remedy="take --accumulated mean, a format with a file a rank (--to), or a target without replicas",
                )

    def unseen(self) -> dict[tuple[Placement, ...], list[str]]:
        """Return the listed names that this shard should have and no opened shard holds, by their source placements.

        A shard of a stage in which the source strategy does not list the name does not count as holding it. A name that
        the source strategy does not place is taken to be on every rank.
        """
        source, unplaced = self.source_strategy, (everywhere(self.source_strategy),)
        return grouped((find_or_follow(source, name, lambda _: True) or unplaced, name) for name in self.listed_here)

    def _find_listed_here(self) -> Iterator[str]:
        """Yield the listed names that no opened shard holds and that this target needs or must refuse (see `wants`)."""
        for name in dict.fromkeys((*listed_names(self.strategy), *listed_names(self.source_strategy))):
            if name in self.tensors and (not self.source_strategy.find(name) or self.tensors.group(name).listed):
                continue
            if self.layouts.lists(name):
                here = self.strategy.of_rank(self.strategy.find(name), self.rank) is not None
            else:
                here = wants(self.source_strategy, self.strategy, self.rank, name, self.policy.unlisted, self.tensors)
            if here:
                yield name

    def _alike(self, origin: Placement) -> Iterator[int]:
        """Yield the ranks that hold the same part by `origin` as the first opened rank in one of its stages."""
        opened = next((rank for rank in self.manifests if self.source_strategy.stage_of(rank) in origin.stages), None)
        return iter(()) if opened is None else origin.holders(origin.piece(opened))

    def written_elsewhere(self) -> frozenset[str]:
        """Return the tensors whose pieces here another target rank writes, if each piece is to be written once.

        Of a tensor that stages cut differently, those of the first placement make it up. One that no strategy lists is
        written by each stage that has it: whether others have it is not known here.
        """
        elsewhere: set[str] = set()
        for held in self.classes:
            placement, is_listed = held.layout.placement, held.group.listed
            here = set(pieces_written_by(self.rank, held.names, placement, is_listed=is_listed))
            of_stage = placement if is_listed else placement.with_stages((self.stage,))
            in_stage = set(pieces_written_by(self.rank, held.names, of_stage, is_listed=is_listed))
            for name in held.names:
                if not is_listed and not self.layouts.lists(name):
                    is_here = name in in_stage
                else:
                    placements = self.layouts.placements(name) or (placement,)
                    is_here = name in here and self.stage in placements[0].stages
                if not is_here:
                    elsewhere.add(name)
        return frozenset(elsewhere)

    def writers_of_unlisted(self) -> dict[str, int]:
        """Return the target rank that writes each tensor which no strategy lists, if it is another one."""
        writers: dict[str, int] = {}
        for held in self.classes:
            of_stage = held.layout.placement.with_stages((self.stage,))
            rank = self.rank if held.group.listed else of_stage.nth_holder(of_stage.piece(self.rank), 0)
            if rank != self.rank:
                writers.update((name, rank) for name in held.names if not self.layouts.lists(name))
        return writers
