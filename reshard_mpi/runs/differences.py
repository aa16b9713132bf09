"""Compares shards with the sources they were made from: by sums, and byte by byte if those differ."""

from __future__ import annotations

from collections.abc import Sequence

from reshard_mpi.engine.comparing import first_difference
from reshard_mpi.engine.files import Files, OnBytes
from reshard_mpi.engine.regions import fill
from reshard_mpi.engine.sums import Span, copies_and_target, place_of, sum_shard
from reshard_mpi.errors import DamageError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.places import Joined
from reshard_mpi.formats.specs import TensorSpec
from reshard_mpi.journal.records import TensorSum
from reshard_mpi.planning.model import Check, Copy, Limits, RankPlan
from reshard_mpi.planning.partial_sums import is_partial_sum
from reshard_mpi.sharding.box import Box


def sums_as_planned(
    plan: RankPlan, target: Manifest, span: Span | None, limits: Limits, on_bytes: OnBytes
) -> tuple[TensorSum, ...]:
    """Return the sums of the tensors in the shard `target`, each of which is also the sum of its sources.

    span: only of elements that begin in this range of the file; None: all. on_bytes: called with the number of bytes
    just summed. Raises DamageError for the first tensor that differs from its sources, with the element and its place
    in the files.
    """
    sums = []
    for summed in sum_shard(plan, target, span=span, limits=limits, on_bytes=on_bytes):
        if summed.expected != summed.found:
            raise where_it_differs(plan, target, summed.tensor.name, limits)
        sums.append(tensor_sum(summed.tensor, summed.found, loose=summed.tensor.name in plan.loose))
    return tuple(sums)


def tensor_sum(spec: TensorSpec, value: int, *, loose: bool) -> TensorSum:
    """Return the record of a tensor's sum. loose: whether no strategy places it."""
    loose = loose or is_partial_sum(spec.name)
    return TensorSum(spec.name, spec.dtype.name, spec.global_shape, spec.box.start, spec.box.shape, value, loose)


def where_it_differs(plan: RankPlan, target: Manifest, name: str, limits: Limits) -> DamageError:
    """Return the error for a tensor of the shard `target` that differs from its sources."""
    tensor = next(tensor for tensor in plan.tensors if tensor.spec.name == name)
    for source, own in copies_and_target(tensor, target):
        differing = first_difference(Check(name, (source, own), refuse=True, why=""), limits=limits)
        if differing is not None:
            _, element = differing
            return DamageError(
                f"{name!r} differs from its source at element {list(element)}",
                expected=_content(source, element, limits),
                got=_content(own, element, limits),
                where=target.path,
                remedy="make the target anew with --overwrite; if it differs again, look for a failing disk or memory",
            )
    return DamageError(
        f"{name!r} was read as something else a moment ago",
        expected="the same bytes whenever they are read",
        got="sums that differed, and bytes that do not",
        where=target.path,
        remedy="make sure nothing writes to source or target; look for failing memory",
    )


def _content(copy: Copy, element: Sequence[int], limits: Limits) -> str:
    """Return the bytes of an element as hexadecimal digits, and their place in the file, as words."""
    place = place_of(copy, element)
    if isinstance(copy.source.unconverted.source, Joined):
        part = copy.part(Box(tuple(element), tuple(index + 1 for index in element)))
        joined = bytearray(copy.source.dtype.itemsize_bytes)
        with Files() as files:
            fill(files, part, part.target_region, memoryview(joined), limits)
        return f"{joined.hex()}, joined of several ranks"
    if place is None:
        return "another value, compressed" if copy.source_rank < 0 else f"what rank {copy.source_rank} has, compressed"
    data = bytearray(place.length_bytes)
    with Files() as files:
        files.read_into(place, memoryview(data))
    return f"{data.hex()} at byte {place.offset_bytes} of {place.path}"
