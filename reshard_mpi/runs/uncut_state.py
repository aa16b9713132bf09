"""Warn of optimizer state that the target's strategy does not treat as its parameters (`with_warning`).

torch's optimizers call their state by numbers, or by names that lack what the model's begin with. Such state does not
follow its parameter, as state does that is named after it: it lies whole beside a slice, and is not dropped with what
no rule matches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from reshard_mpi.errors import StrategyError
from reshard_mpi.formats.nest.nodes import NestError, parsed
from reshard_mpi.mapping.numbered_state import NO_TRAINING
from reshard_mpi.mapping.optimizers import STATE_KEY, optimizers_of
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.planning.tensor_names import Unlisted
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.text import shortened


def _unplaced_state(plan: RankPlan, target: Strategy, nest: str) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield the state that no rule or list of the target's strategy places by its name: name, whole and own shape.

    Args:
        nest: the text that says how the plan's tensors are nested.
    """
    try:
        optimizers = [optimizer for _, optimizer in optimizers_of(parsed(nest).root, NO_TRAINING)]
    except (ValueError, RecursionError, NestError):  # a text that is no nest, which whoever nests tensors by it says
        return
    begins = tuple(f"{optimizer.path}{STATE_KEY}." for optimizer in optimizers)
    for group in plan.tensors.groups if begins else ():
        for name in group.names:
            if name.startswith(begins) and (not target.find(name) or target.is_only_caught(name)):
                yield name, group.kind.whole_shape, group.kind.own_box.shape


def with_warning(plan: RankPlan, target: Strategy, nest: str, policy: Policy, where: str) -> RankPlan:
    """Return a plan that warns of state which is whole, and has the shape of a tensor that the strategy cuts.

    If what is not listed is dropped, it warns of all state that is kept because only a rule for every name matches it.
    Raises StrategyError for whole state if the policy is strict.

    Args:
        nest: as for `_unplaced_state`; where: the source, for the error.
    """
    kinds = ((group.kind.whole_shape, group.kind.own_box.shape) for group in plan.tensors.groups)
    cut = {whole for whole, own in kinds if own != whole and prod(whole) > 1}
    if not cut and policy.unlisted is not Unlisted.DROP:
        return plan
    state = list(_unplaced_state(plan, target, nest))
    if policy.unlisted is Unlisted.DROP and state:
        kept = (
            f"the optimizer's state is kept ({shortened([name for name, *_ in state])}): it is not named after its"
            " parameters, so a rule '*' takes it for a tensor of its own; --exclude leaves it out"
        )
        return plan._replace(warnings=(*plan.warnings, kept))
    names = [name for name, whole, own in state if own == whole and whole in cut]
    if not names:
        return plan
    if policy.strict:
        raise StrategyError(
            "the target strategy cuts parameters, and not the optimizer's state, which is not named after them",
            expected="state that is cut as its parameter is",
            got=f"{shortened(names)} whole",
            where=f"{target.origin or 'the target strategy'} and {where}",
            remedy="add rules for the state to that strategy (match = 'optimizer.state.0.*'), or leave it out"
            " (--exclude); state of parameters whose names begin as the model's do follows them",
        )
    warning = (
        f"the target strategy cuts parameters, and the optimizer's state is whole on every rank ({shortened(names)}),"
        " since it is not named after them: torch cannot go on with such a rank alone; rules for the state cut it"
    )
    return plan._replace(warnings=(*plan.warnings, warning))
