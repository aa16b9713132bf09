"""A run that is only looked at: opened as one that writes, without looking at what the target folder holds."""

from __future__ import annotations

from functools import partial

from reshard_mpi.errors import UsageError
from reshard_mpi.runs.memory import RunMemory
from reshard_mpi.runs.prepared import Run
from reshard_mpi.runs.request import Request


def opened_run(request: Request, memory: RunMemory, *, targets: int = 1) -> Run:
    """Open the run that a request asks for, with the memory to plan its targets one by one.

    targets: how many are planned at most. Raises a ReshardError for what `transform` would refuse before planning.
    """
    if request.part is not None:
        raise UsageError(
            "a part of the targets is neither drawn nor explained",
            expected="--rank with the targets, or neither",
            got="--part",
        )
    purpose = f"planning {request.target} from {request.source}"
    strategies = (request.src_strategy, request.dst_strategy)
    memory.open()
    memory.to_open(strategies, purpose)
    # Of a million targets only those that are asked for are looked at, and which those are is seen later.
    first = request if request.ranks is not None else request._replace(ranks=(0,))
    run = Run.open(
        first, None, {}, partial(memory.to_open, strategies, purpose), partial(memory.to_plan, purpose=purpose)
    )
    memory.on_giving_way(run.conversion.forget)
    memory.to_plan(run.conversion, run.format, purpose, targets=targets)
    run.conversion.require_fitting_strategies()
    return run
