"""Judge whether a strategy fits its checkpoint, by names and samples (`evaluate_pair`)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, DisagreementError, StrategyError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.groups import grouped
from reshard_mpi.planning.comparison_choice import MAX_TENSORS, RankPair
from reshard_mpi.planning.source_flaws import Differing
from reshard_mpi.sharding.layout import fitted_to_part
from reshard_mpi.sharding.placement import Placement, Shape
from reshard_mpi.sharding.strategy import Pattern, Strategy, Unlisted, find_or_follow, named_after
from reshard_mpi.text import KIB, counted, nearest_first

# A value that each rank has for itself (random state, a counter) is small, has one dimension at most, and only one
# element if that is a floating-point number. More of them than this are suspicious.
_MAX_OWN_BYTES = 64 * KIB
_MAX_OWN_TENSORS = 4
# Statistics that each data-parallel rank gathers from its own data: batch normalization in MindSpore and torch.
_STATISTICS = {"moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"}
_RANDOM_STATE = r"(?:^|[^a-z])(?:rng|random|seeds?)(?:[^a-z]|$)"
# Tensors named in one line that have drifted apart.
_MAX_NAMED = 8


class Similarity(Enum):
    """How alike two shards' parts of a tensor are, as far as a sample shows.

    CLOSE: the values are nearly the same, as in copies that have drifted apart.
    """

    SAME = "same"
    CLOSE = "close"
    DIFFERENT = "different"
    OF_ANOTHER_SHAPE = "of another shape"


class SampleFindings(NamedTuple):
    """Tensors that differ from rank to rank in a sample, though the source strategy is right by all that is seen."""

    drifted: tuple[str, ...] = ()  # the names of tensors that it places and whose copies have drifted apart
    unlisted: tuple[Differing, ...] = ()  # tensors that it does not list

    def joined(self, other: SampleFindings) -> SampleFindings:
        """Join this and another; equal entries are kept once."""
        return SampleFindings(
            tuple(dict.fromkeys((*self.drifted, *other.drifted))),
            tuple(dict.fromkeys((*self.unlisted, *other.unlisted))),
        )


NOTHING_FOUND = SampleFindings()


class PairResult(NamedTuple):
    """The result of comparing one tensor in the two shards of a pair."""

    name: str
    placement: Placement | None  # how their stage holds it; None: no strategy lists it
    one_part: bool  # whether they should hold the same part
    likeness: Similarity
    telling: bool  # whether the compared values vary enough that different parts would differ
    dtype: DType
    shape: Shape  # of the part on the first rank
    size_bytes: int  # of the larger part

    @property
    def differs(self) -> bool:
        return self.likeness is not Similarity.SAME

    @property
    def floating(self) -> bool:
        return "float" in self.dtype.name or "complex" in self.dtype.name

    @property
    def may_drift(self) -> bool:
        """Whether ranks may have different values even though the strategy says that they hold copies.

        True for scalars, statistics, and the state of random number generators.
        """
        if self.likeness is Similarity.OF_ANOTHER_SHAPE:
            return False
        if not self.shape or self.name.rpartition(".")[2] in _STATISTICS:
            return True
        return (
            not self.floating
            and self.size_bytes <= _MAX_OWN_BYTES
            and bool(re.search(_RANDOM_STATE, self.name, re.IGNORECASE))
        )

    @property
    def may_be_own(self) -> bool:
        """Whether it may be a value that each rank has for itself, provided that no strategy lists it."""
        if self.may_drift:
            return True
        if len(self.shape) > 1 or self.size_bytes > _MAX_OWN_BYTES:
            return False
        return not self.floating or math.prod(self.shape) <= 1


def should_be_one_part(placement: Placement | None, pair: RankPair, part_shape: Shape) -> bool:
    """Tell whether the two ranks of a pair should hold the same part of a tensor.

    Args:
        part_shape: of the part on the first rank.

    Raises LayoutError if the placement does not fit it.
    """
    if placement is None:
        return True
    placement = fitted_to_part(placement, part_shape)
    return placement.piece(pair.first) == placement.piece(pair.second)


def evaluate_pair(
    pair: RankPair, compared: Iterable[PairResult], strategy: Strategy, paths: tuple[str, str], unlisted: Unlisted
) -> SampleFindings:
    """Return the tensors that differ on a pair of ranks.

    Args:
        paths: of the two shards.
        unlisted: what becomes of tensors in no strategy.

    Raises StrategyError if the strategy cannot be that of the checkpoint: if, of the tensors held in one way, most
    copies differ or some have nothing in common; if parts that should be different are the same; or if tensors that it
    does not list look like parts.
    """
    by_placement = grouped((tensor.placement, tensor) for tensor in compared)
    all_copies = [tensor for tensor in compared if tensor.one_part and tensor.placement is not None]
    where = _where(strategy, *paths)
    drifted: list[str] = []
    own: tuple[Differing, ...] = ()
    for placement, tensors in by_placement.items():
        if placement is None:
            if unlisted is not Unlisted.REPLICATE:
                _judge_unlisted(pair, tensors, where)
            own = tuple(Differing(tensor.name, pair[:2]) for tensor in tensors if tensor.differs)
            continue
        words = _words(placement, strategy.axes)
        copies = [tensor for tensor in tensors if tensor.one_part]
        # Of a pair with few tensors, all copies count at once: a shard of another moment differs in most of them.
        drifted += _judge_copies(pair, copies, all_copies if pair.tensors < MAX_TENSORS else copies, words, where)
        _judge_parts(pair, [tensor for tensor in tensors if not tensor.one_part], words, where)
    return SampleFindings(tuple(drifted), own)


def _judge_copies(
    pair: RankPair, tensors: Sequence[PairResult], among: Sequence[PairResult], placed: str, where: str
) -> list[str]:
    """Return the tensors whose copies have drifted apart, among tensors that a pair of ranks should hold alike.

    Args:
        among: if most of these differ, any difference is more than drift.

    Raises StrategyError for such a difference.
    """
    comparable = [tensor for tensor in tensors if not tensor.may_drift]
    differing = [tensor for tensor in comparable if tensor.differs]
    unlike = [tensor for tensor in differing if tensor.likeness is not Similarity.CLOSE]
    differ = [tensor.differs for tensor in among if not tensor.may_drift]
    if 2 * sum(differ) > len(differ):
        unlike = differing
    if unlike:
        what = "shapes" if any(tensor.likeness is Similarity.OF_ANOTHER_SHAPE for tensor in unlike) else "values"
        raise StrategyError(
            "the source strategy does not fit the checkpoint: parts that should be the same differ",
            expected=f"the same of {_some(comparable)} on ranks {pair.first} and {pair.second}, by {placed}",
            got=f"other {what} in {_some(unlike)}",
            where=where,
            remedy="correct the strategy: these are cut over more ranks than it says, its mesh is not that of the"
            " checkpoint, or its axes are in another order. If the shards are right, one of them is of another moment"
            " or rank; --replicas any takes one of the copies, whatever the others hold",
        )
    return [tensor.name for tensor in tensors if tensor.differs]


def _judge_parts(pair: RankPair, tensors: Sequence[PairResult], placed: str, where: str) -> None:
    """Raise StrategyError if a pair of ranks holds the same bytes of a tensor where it should hold different parts."""
    same = [tensor for tensor in tensors if tensor.telling and not tensor.differs]
    if same:
        raise StrategyError(
            "the source strategy does not fit the checkpoint: parts that should be different are the same",
            expected=f"different parts of {_some(same)} on ranks {pair.first} and {pair.second}, by {placed}",
            got="the same values wherever they were compared",
            where=where,
            remedy="correct the strategy: these are cut over fewer ranks than it says, or its mesh is not that of the"
            " checkpoint. If all parts really have the same values, --replicas any takes the strategy at its word",
        )


def _judge_unlisted(pair: RankPair, tensors: Sequence[PairResult], where: str) -> None:
    """Raise StrategyError for tensors that no strategy lists and that look like parts of a tensor, not a rank's own."""
    suspects = [tensor for tensor in tensors if tensor.differs and not tensor.may_be_own]
    own = [tensor for tensor in tensors if tensor.differs and not tensor.may_drift]
    if len(own) > _MAX_OWN_TENSORS:
        suspects = own
    if suspects:
        suspects = _parameters_first(suspects)
        raise StrategyError(
            "tensors that the source strategy does not list are no copies of each other",
            expected="the same on every rank, or small values that each rank has for itself",
            got=f"other values on rank {pair.second} than on rank {pair.first} in {_some(suspects)},"
            f" {list(suspects[0].shape)} the first",
            where=where,
            remedy="list them in the source strategy with the way they are cut; --unlisted replicate takes one rank's"
            " values for all",
        )


def unexpected_stage_error(name: str, home_stage: int, strategy: Strategy, paths: tuple[str, str]) -> StrategyError:
    """Return the error for a tensor that also lies in a stage where it should not, and has other values there.

    Args:
        paths: of a shard of stage `home_stage`, where it should be, and of the shard that has other values.
    """
    return StrategyError(
        f"the source strategy does not fit the checkpoint: other stages hold another {name!r} too",
        expected=f"{name!r} in shards of stage {home_stage} alone, or the same values elsewhere",
        got=f"other values in {paths[1]}",
        where=_where(strategy, *paths),
        remedy="give the strategy this checkpoint was saved with; if the stages number their layers or the state of"
        " their optimizers each from 0, these are different tensors of one name, which a checkpoint cannot have: leave"
        " them out (--exclude)",
    )


def unknown_tensor(name: str, strategy: Strategy, path: str) -> CoverageError:
    """Return the error for a tensor that some shards hold, but not the shards that were read to learn the names."""
    return CoverageError(
        f"{name!r} is in some shards only, and no strategy lists it by its name",
        expected="every tensor in the first or the last shard of its stage, where the source strategy goes by patterns",
        got="it in neither of them",
        where=_where(strategy, path),
        remedy=f"add a rule for this name alone to the source strategy: match = {name!r}",
    )


def drift_warning(names: Sequence[str]) -> str:
    """Return the warning on tensors whose copies have drifted apart."""
    return (
        f"copies of {_quoted(names, _MAX_NAMED)} differ from rank to rank ({len(names)} found in a sample): each target"
        " has what one of the ranks holds"
    )


def require_no_drift(names: Sequence[str], where: str) -> None:
    """Raise DisagreementError if copies of any tensors have drifted apart."""
    if names:
        raise DisagreementError(
            "copies that should be the same have drifted apart",
            expected="the same on every rank that holds them (--strict)",
            got=drift_warning(names),
            where=where,
            remedy="leave out --strict to take the copies of one rank for each target",
        )


def dead_rules(strategy: Strategy, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the globs of the rules of a spec that must place one of these tensors at least, and place none.

    With each comes the glob of an earlier rule that takes tensors which it matches; "" if none does.
    """
    by_rule = grouped((strategy.rule_of(name), name) for name in dict.fromkeys(names))
    dead = []
    for rule, (glob, _) in enumerate(strategy.rules):
        if rule not in by_rule and glob in strategy.required_rules:
            matches = Pattern(glob).matches
            takers = (before for before in range(rule) if any(map(matches, by_rule.get(before, ()))))
            taker = next(takers, None)
            dead.append((glob, "" if taker is None else strategy.rules[taker][0]))
    return dead


def require_living_rules(strategy: Strategy, names: Collection[str], which: str, where: str) -> None:
    """Raise StrategyError if a rule of a spec places none of the tensors `names`. which: "source" or "target"."""
    dead = dead_rules(strategy, names)
    if not dead:
        return
    glob, taken_by = dead[0]
    others = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    got = f"{glob!r}{others}, beside {counted(len(names), 'tensor')}: {_quoted(nearest_first(glob, list(names)))}"
    remedy = "correct the pattern, or say optional = true in the rule"
    if taken_by == glob:
        got, remedy = f"{glob!r} twice{others}", "remove one of the two rules"
    elif taken_by:
        got, remedy = f"{glob!r}{others}, whose tensors {taken_by!r} before it takes", f"put it before {taken_by!r}"
    raise StrategyError(
        f"a rule of the {which} strategy places no tensor of the checkpoint",
        expected="every rule but '*' to match a tensor that no rule before it matches",
        got=got,
        where=f"{strategy.origin}; tensors of {where}",
        remedy=remedy,
    )


def require_same_network(strategy: Strategy, manifests: Iterable[Manifest]) -> None:
    """Raise StrategyError if a source strategy lists parameters one by one and the shards hold none of them."""
    opened = list(manifests)
    names = dict.fromkeys(chain.from_iterable(manifest.tensors for manifest in opened))
    if strategy.rules or not names or any(find_or_follow(strategy, name, lambda _: True) for name in names):
        return
    raise StrategyError(
        "no tensor of the checkpoint is in the source strategy",
        expected=", ".join(map(repr, list(strategy.parameters)[:3])),
        got=", ".join(map(repr, list(names)[:3])),
        where=_where(strategy, opened[0].path),
        remedy="check that checkpoint and strategy belong to the same network",
    )


def unconfirmed_rules(strategy: Strategy) -> Iterator[str]:
    """Yield notes on rules of a spec that cut tensors in a way that no comparison of shards can confirm.

    A comparison only shows which ranks hold the same. It shows nothing where no two ranks do, and nothing about the
    order of several axes that cut a tensor.
    """
    cutting = [(glob, placement) for glob, placement in strategy.rules if strategy.is_spec and placement.is_cut]
    alone = [glob for glob, placement in cutting if placement.replicas == len(placement.stages)]
    if alone:
        yield (
            f"no two ranks hold the same of what {_quoted(alone)} {'matches' if len(alone) == 1 else 'match'}, so the"
            f" checkpoint cannot show whether {strategy.origin} has the right axes and dimensions for it"
        )
    ordered = [glob for glob, placement in cutting if glob not in alone and _count_cutting_axes(placement) > 1]
    if ordered:
        yield (
            f"{_quoted(ordered)} {'is' if len(ordered) == 1 else 'are'} cut over several axes, and the checkpoint"
            f" cannot show which of them cuts which dimension, and in which order: {strategy.origin} is believed"
        )


def _where(strategy: Strategy, *paths: str) -> str:
    """Return the file of the strategy, if it has one, and the paths of the shards that an error is about, as words."""
    return " and ".join(filter(None, (strategy.origin, *paths)))


def _quoted(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(map(repr, names[:limit])) + (", ..." if len(names) > limit else "")


def _count_cutting_axes(placement: Placement) -> int:
    """Return how many axes of the mesh cut a tensor; a cut by the optimizer counts as one more."""
    axes = [axis for over in placement.split for axis in over if placement.mesh[axis] > 1]
    return len(axes) + (placement.optimizer > 1)


def _parameters_first(tensors: Sequence[PairResult]) -> list[PairResult]:
    """Sort tensors so that state comes after its parameter: an error in a parameter explains its state's."""
    names = {tensor.name for tensor in tensors}
    return sorted(tensors, key=lambda tensor: any(base in names for base in named_after(tensor.name)))


def _some(tensors: Sequence[PairResult]) -> str:
    names = _quoted([tensor.name for tensor in _parameters_first(tensors)])
    return f"{len(tensors)} compared tensors ({names})" if len(tensors) > 1 else names


def _words(placement: Placement, axes: tuple[str, ...]) -> str:
    """Return how a placement cuts, in words. axes: the names of the mesh's axes; empty if they have none."""
    names = axes if len(axes) == len(placement.mesh) else tuple(map(str, range(len(placement.mesh))))
    mesh = " ".join(f"{name}={length}" for name, length in zip(axes, placement.mesh)) if axes else list(placement.mesh)
    cuts = [
        f"dimension {dim} over {'axes' if len(over) > 1 else 'axis'} {', '.join(names[axis] for axis in over)}"
        for dim, over in enumerate(placement.split)
        if over
    ]
    cuts += [f"dimension 0 in {placement.optimizer} by the optimizer"] if placement.optimizer > 1 else []
    return f"mesh {mesh}, with " + " and ".join(cuts) + " cut" if cuts else f"mesh {mesh}, with nothing cut"
