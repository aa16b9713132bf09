"""Deals tensors out to files that are filled up to a size, as Hugging Face's libraries do."""

from __future__ import annotations

from collections.abc import Sequence

from reshard_mpi.formats.specs import Specs
from reshard_mpi.sharding.placement import Placement, Strategy


def filled_files(specs: Specs, most_bytes: int) -> list[list[str]]:
    """Return the names of the tensors that each file holds, in their order.

    A new file is begun when the next tensor would make the current one larger than `most_bytes`. A tensor that is
    larger by itself gets a file of its own, which comes before the current one.
    """
    sizes = [kind.size_bytes for kind in specs.kinds]
    done: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, kind in zip(specs.names, specs.kind_of):
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

    named: the names of the tensors in each file.
    """
    parameters: dict[str, tuple[Placement, ...]] = {}
    for stage, names in enumerate(named):
        placement = (Placement((1,), stages=(stage,)),)
        parameters |= dict.fromkeys(names, placement)
    return Strategy(len(named), len(named), parameters)
