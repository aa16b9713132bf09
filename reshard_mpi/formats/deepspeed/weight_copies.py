"""Keep weights and their copies in float32 the same (`weights_made_of`, `compared_parts`).

An engine goes on from the optimizer's copies in float32, and makes the weights of these. Stage 3 has nothing else, so
weights that are not their copies rounded would be lost; at stages 1 and 2 both would contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.layout import STATE, WEIGHTS, LaidParameter, ZeroLayout, vectors_of, whole_part
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.nest.nodes import MODEL
from reshard_mpi.formats.protocol import SameParts
from reshard_mpi.formats.tensor_table import TensorType


class WeightOrigin(NamedTuple):
    """The tensor that weights are made of, and the name of the type that it is rounded to; empty: its own."""

    source: str
    dtype: str = ""


def weights_made_of(
    tensors: Mapping[str, TensorType], shared: Sequence[tuple[str, str]], own_types: Mapping[str, DType]
) -> dict[str, WeightOrigin]:
    """Return the origin of those tensors of the model that are made of other tensors, by name.

    With another type they are the copies in float32, rounded: the weights are these already, rounded to their own type.

    Args:
        shared: second names of tensors, each with the first one.
        own_types: as of `PackingFormat.packed`.
    """
    copies = {name: f"{STATE}{name.removeprefix(MODEL)}.{WEIGHTS}" for name in own_types if name.startswith(MODEL)}
    origins = {name: WeightOrigin(copy, tensors[name].dtype.name) for name, copy in copies.items() if copy in tensors}
    for name, other in shared:
        origins[MODEL + name] = origins.get(MODEL + other, WeightOrigin(MODEL + other))
    return origins


def compared_parts(
    layout: ZeroLayout, tensors: Mapping[str, TensorType], own_types: Mapping[str, DType]
) -> list[list[SameParts]]:
    """Return, for each file, what must be the same before it is written.

    Raises TargetError for second names of tensors of another type or shape.
    """
    files = [[*_of_copies(layout, file, tensors, own_types)] for file in range(layout.optimizer_files)]
    files += [[] for _ in range(layout.model_files + len(layout.apart))]
    files[layout.optimizer_files] += _of_second_names(layout, tensors, own_types)
    return files


def _has_copy(parameter: LaidParameter) -> bool:
    return parameter.weights != MODEL + parameter.name


def _of_copies(
    layout: ZeroLayout, file: int, tensors: Mapping[str, TensorType], own_types: Mapping[str, DType]
) -> Iterator[SameParts]:
    """Yield the parts of weights whose copies are in the vectors of a file, each with the copy rounded."""
    groups = layout.groups[file // layout.ranks]
    name_of = {own.weights: own.name for group in groups for own in group.parameters if _has_copy(own)}
    for vectors in vectors_of(layout, file):
        for _, part in vectors.weights.parts:
            if part.source not in name_of:
                continue
            name = name_of[part.source]
            dtype = own_types.get(MODEL + name, tensors[MODEL + name].dtype).name
            yield SameParts(
                part._replace(source=MODEL + name, dtype=dtype),
                part._replace(dtype=dtype),
                f"the weights of {name!r} are not what DeepSpeed would make of their copy in float32",
                f"leave the copy out (--exclude '{part.source}', or '*.{WEIGHTS}' for all) to go on from these weights,"
                " or change both in the source",
            )


def _of_second_names(
    layout: ZeroLayout, tensors: Mapping[str, TensorType], own_types: Mapping[str, DType]
) -> Iterator[SameParts]:
    """Yield tensors under their second names, each with the same one under its first name."""
    for name, other in layout.shared:
        first, second = (
            (tensors[own].shape, tensors[own].dtype, own_types.get(own, tensors[own].dtype))
            for own in (MODEL + name, MODEL + other)
        )
        problem = f"{name!r} and {other!r} are one tensor by shared_params, and differ"
        remedy = "make them the same in the source, or take the name out of its shared_params"
        if first != second:
            (shape, *_, dtype), (other_shape, *_, other_dtype) = first, second
            got = f"{dtype} {list(shape)} and {other_dtype} {list(other_shape)}"
            raise TargetError(problem, expected="one type and shape", got=got, remedy=remedy)
        part = whole_part(MODEL + name, first[0], layout.optimizer_files)._replace(dtype=first[-1].name)
        yield SameParts(part, part._replace(source=MODEL + other), problem, remedy)
