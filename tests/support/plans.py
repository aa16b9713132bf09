"""Plans of tensors that are told one by one."""

from __future__ import annotations

from collections.abc import Iterable

from reshard_mpi.formats.tensor_table import TensorTable, TensorType
from reshard_mpi.planning.rank_plan import Group, PlannedTensors, ReadGroup, TensorPlan


def planned_singly(tensors: Iterable[TensorPlan]) -> PlannedTensors:
    """Return tensors that were planned one by one, each as a group of its own."""
    groups = []
    for spec, copies in tensors:
        routes = tuple(
            ReadGroup(rank, source_box, region, TensorTable("", [source]), (0,), to, order)
            for rank, source, source_box, region, to, order in copies
        )
        groups.append(Group(TensorType.of_box(spec.dtype, spec.box, spec.global_shape), (spec.name,), routes))
    return PlannedTensors(groups, range(len(groups)))
