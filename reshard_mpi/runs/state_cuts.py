"""Refuse targets whose optimizer state is not cut as its parameters are (`require_state_cut`).

torch's optimizers call their state by numbers, or by names that lack what the model's begin with. Such state does not
follow its parameter, as state does that is named after it, so it would lie whole beside a slice.
"""

from __future__ import annotations

from math import prod

from reshard_mpi.errors import StrategyError
from reshard_mpi.formats.nest import NestError
from reshard_mpi.formats.nest.nodes import parsed
from reshard_mpi.mapping.numbered_state import NO_TRAINING
from reshard_mpi.mapping.optimizer_forms import STATE_KEY, optimizers_of
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.sharding.placement import Strategy


def require_state_cut(plan: RankPlan, target: Strategy, nest: str, where: str) -> None:
    """Raise StrategyError for state that is whole, and has the shape of a tensor that the target's strategy cuts.

    State that a rule or a list of the strategy places by its name is as the user wants it.

    Args:
        nest: the text that says how the plan's tensors are nested.
        where: the source, for the error.
    """
    kinds = [(group.kind.whole_shape, group.kind.own_box.shape, group.names) for group in plan.tensors.groups]
    cut = {whole: names[0] for whole, own, names in kinds if own != whole}
    try:
        optimizers = [optimizer for _, optimizer in optimizers_of(parsed(nest).root, NO_TRAINING)] if cut else []
    except (ValueError, RecursionError, NestError):  # a text that is no nest, which whoever nests tensors by it says
        return
    begins = tuple(f"{optimizer.path}{STATE_KEY}." for optimizer in optimizers)
    for whole, own, names in kinds:
        if own != whole or whole not in cut or prod(whole) == 1:
            continue
        for name in names:
            if name.startswith(begins) and (not target.find(name) or target.is_only_caught(name)):
                raise StrategyError(
                    "the target strategy cuts parameters, and not the optimizer's state, which is not named after them",
                    expected="state that is cut as its parameter is",
                    got=f"{name!r} whole, of shape {list(whole)}, which {cut[whole]!r} has before it is cut",
                    where=f"{target.origin or 'the target strategy'} and {where}",
                    remedy="add rules for the state to that strategy (match = 'optimizer.state.0.*'), or leave it out"
                    " (--exclude); state of parameters whose names begin as the model's do follows them",
                )
