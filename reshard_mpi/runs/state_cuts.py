"""Find optimizer state that the target's strategy leaves whole though it cuts its parameters (`whole_state`).

torch's optimizers call their state by numbers, or by names that lack what the model's begin with. Such state does not
follow its parameter, as state does that is named after it, so it lies whole beside a slice.
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
from reshard_mpi.text import shortened


def whole_state(plan: RankPlan, target: Strategy, nest: str) -> list[str]:
    """Return the names of state that is whole, and has the shape of a tensor that the target's strategy cuts.

    State that a rule or a list of the strategy places by its name is as the user wants it.

    Args:
        nest: the text that says how the plan's tensors are nested.
    """
    kinds = [(group.kind.whole_shape, group.kind.own_box.shape, group.names) for group in plan.tensors.groups]
    cut = {whole for whole, own, _ in kinds if own != whole and prod(whole) > 1}
    try:
        optimizers = [optimizer for _, optimizer in optimizers_of(parsed(nest).root, NO_TRAINING)] if cut else []
    except (ValueError, RecursionError, NestError):  # a text that is no nest, which whoever nests tensors by it says
        return []
    begins = tuple(f"{optimizer.path}{STATE_KEY}." for optimizer in optimizers)
    whole_names = (name for whole, own, names in kinds if own == whole and whole in cut for name in names)
    of_state = (name for name in whole_names if name.startswith(begins))
    return [name for name in of_state if not target.find(name) or target.is_only_caught(name)]


def with_warning(plan: RankPlan, target: Strategy, nest: str, *, strict: bool, where: str) -> RankPlan:
    """Return a plan that warns of the state that `whole_state` finds. Raises StrategyError if it must be `strict`.

    Args:
        where: the source, for the error.
    """
    names = whole_state(plan, target, nest)
    if not names:
        return plan
    if strict:
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
