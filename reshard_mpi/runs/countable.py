"""Whether a target can have the checksum that is asked for: where a format counts numbers, their values decide."""

from __future__ import annotations

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.regions import only_element, takes_numpy
from reshard_mpi.formats.counted import UncountableError, counted_bytes, is_counted
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.runs.conversion import Conversion


def require_countable(conversion: Conversion, plan: RankPlan) -> None:
    """Raise TargetError for the first whole number of a target that has no place in the checksum of its file."""
    groups = (group for group in plan.tensors.groups if is_counted(group.kind.dtype, group.kind.global_shape))
    tensors = (group.tensor(place) for group in groups for place in range(len(group.names)))
    with Files() as files:
        for tensor in tensors:
            if any(takes_numpy(copy, tensor.spec.box, conversion.limits.buffer_bytes) for copy in tensor.copies):
                conversion.before_gathering()
            content = only_element(files, tensor, conversion.limits)
            try:
                counted_bytes(tensor.spec.name, content, tensor.spec.dtype)
            except UncountableError as error:
                raise error.refusal(conversion.source.files.path) from None
