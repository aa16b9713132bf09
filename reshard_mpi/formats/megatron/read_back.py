"""Tell as which whole tensors the files of a checkpoint are read that it has been packed into (`as_read`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.megatron.packing import FLOAT32, STATE, SortedTensors, source_tensors
from reshard_mpi.formats.megatron.stacking import stacked
from reshard_mpi.formats.megatron.training_tree import FP32
from reshard_mpi.formats.nest.nodes import MODEL
from reshard_mpi.formats.protocol import Packed, Part
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.sharding.box import Box


def as_read(
    tensors: Mapping[str, TensorType], strings: Mapping[str, str], own_types: Mapping[str, DType]
) -> Packed | None:
    """Return the whole tensors that files are read as, as `PackingFormat.as_read` says."""
    _, found = source_tensors(tensors, strings)
    places = stacked({key: tensors[name] for key, name in found.weights.items()})
    numbered = next((key for key, own in places.items() if own.key != key), None)
    if numbered is not None:
        raise TargetError(
            "layers and experts that lie by themselves here are on top of each other in a checkpoint of Megatron",
            expected="the record of the run that has put them there, which says file by file what was taken",
            got=f"no record, and {numbered!r}, which is a part of {places[numbered].key!r}",
            remedy="verify the folder that was written, with its .reshard_mpi",
        )
    parts = [*_parts(found, tensors)]
    taken = {part.source for part in parts}
    return Packed("", [parts], {}, left_out=tuple(name for name in tensors if name not in taken))


def _parts(found: SortedTensors, tensors: Mapping[str, TensorType]) -> Iterator[Part]:
    """Yield whole tensors under the names that reading gives them."""
    for key, name in (found.weights | found.extra).items():
        yield Part(MODEL + key, name, Box.whole(tensors[name].shape))
    copies = found.state.get(FP32, {})
    for key in found.trained:
        weight, name = found.weights[key], copies.get(key, found.weights[key])
        if tensors[weight].dtype.name != FLOAT32:
            dtype = "" if tensors[name].dtype.name == FLOAT32 else FLOAT32
            yield Part(f"{STATE}{key}.{FP32}", name, Box.whole(tensors[name].shape), dtype)
        for kind, own in found.moments.items():
            yield Part(f"{STATE}{key}.{kind}", own[key], Box.whole(tensors[own[key]].shape))
