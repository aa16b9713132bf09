"""Compare parts of tensors that must be the same, since a file has only one of them (`require_same_parts`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from reshard_mpi.engine.first_difference import first_difference_of_tensors, value_at
from reshard_mpi.engine.open_files import Files, OnBytes
from reshard_mpi.errors import DisagreementError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.protocol import SameParts
from reshard_mpi.planning.rank_plan import Limits, TensorPlan

if TYPE_CHECKING:
    from reshard_mpi.runs.mapped_source import MappedCheckpoint


def compared_bytes(view: MappedCheckpoint, numbers: Iterable[int]) -> int:
    """Return how many bytes `require_same_parts` compares of the files of these numbers."""
    parts = (same.first for number in numbers for same in _compared(view, number))
    return sum(part.box.size * BY_NAME[part.dtype].itemsize_bytes for part in parts)


def require_same_parts(view: MappedCheckpoint, numbers: Iterable[int], limits: Limits, on_bytes: OnBytes) -> None:
    """Compare, bit by bit, what must be the same before the files of these numbers are written.

    Args:
        on_bytes: called with the number of bytes just compared; not with what lies in one place.

    Raises DisagreementError for the first difference.
    """
    for number in numbers:
        compared = _compared(view, number)
        both = [view.planned_parts([getattr(same, side) for same in compared]) for side in ("first", "second")]
        with Files() as files:
            for same, first, second in zip(compared, *both):
                if [*_places(first)] == [*_places(second)]:
                    continue
                element = first_difference_of_tensors(files, first, second, limits, on_bytes)
                if element is not None:
                    values = " and ".join(value_at(files, tensor, element, limits) for tensor in (first, second))
                    index = [start + place for start, place in zip(same.first.box.start, element)]
                    raise DisagreementError(
                        same.problem,
                        expected=f"{same.first.source} as {same.second.source} is, in {same.first.dtype}",
                        got=f"a difference at element {index}: {values}",
                        where=view.files.path,
                        remedy=same.remedy,
                    )


def _compared(view: MappedCheckpoint, number: int) -> Sequence[SameParts]:
    compared = view.packed.compared
    return compared[number] if compared else ()


def _places(tensor: TensorPlan) -> Iterator[tuple[object, ...]]:
    """Yield where the parts of a tensor lie, and what becomes of them."""
    yield from ((copy.source.source, copy.source_box, copy.region, copy.to, copy.order) for copy in tensor.copies)
