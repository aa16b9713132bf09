"""Check that parts of a Megatron training agree: arguments with tensors, copies with weights (`require_agreement`).

Both are checked before anything is read as a whole: a few elements of each piece tell whether a float32 copy is its
weight's. Megatron-Core 0.15 to 0.19 saves copies and moments of other parameters where its state is named and its
buckets are several. (megatron/core/optimizer/distrib_optimizer.py, corrected by pull request 5077)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.megatron.layers import layer_axes, place_of
from reshard_mpi.formats.megatron.parameter_order import ElementReader, rounded
from reshard_mpi.formats.megatron.training_tree import FP32
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.torch.framework_files import TensorPieces

# Tensors whose first dimension is the padded vocabulary.
_OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_DECODER = "decoder.layers."


def require_agreement(
    args: Mapping[str, Value],
    weights: Mapping[str, Value],
    state: Mapping[str, Mapping[str, Value]],
    reader: ElementReader,
    folder: str,
) -> None:
    """Raise ShardError if arguments contradict tensors, or the float32 copy of a weight is another's.

    Args:
        args: of the run; empty if they are not kept.
        state: the optimizer's, by key and kind.
    """
    tensors = {key: value for key, value in weights.items() if type(value) is TensorPieces}
    for key, tensor in tensors.items():
        if len(tensor.shape) < layer_axes(key) + (key in _OF_VOCABULARY) * 2:
            raise ShardError(
                f"the tensor {key!r} of a Megatron checkpoint has too few dimensions",
                expected="one for layers, one for experts, as its name says; two for a vocabulary",
                got=f"shape {list(tensor.shape)}",
                where=folder,
            )
    for name, of_files in _sizes(tensors):
        said = args.get(name)
        if type(said) is int and said != of_files:
            raise ShardError(
                "the arguments of a Megatron checkpoint contradict its tensors",
                expected=f"{name} of {said}, as its arguments have it",
                got=str(of_files),
                where=folder,
                remedy="copy or restore all files of one save",
            )
    for key, kinds in state.items():
        if key in tensors and FP32 in kinds and tensors[key].shape == kinds[FP32].shape:
            _require_rounded(key, tensors[key], kinds[FP32], reader, folder)


def _sizes(tensors: Mapping[str, TensorPieces]) -> Iterator[tuple[str, int]]:
    """Yield sizes of the model as its tensors tell them, by the names of arguments."""
    layers, experts = set[int](), set[int]()
    for key, tensor in tensors.items():
        place = place_of(key)
        if key in _OF_VOCABULARY:
            yield "padded_vocab_size", tensor.shape[0]
            yield "hidden_size", tensor.shape[1]
        if key.startswith(_DECODER) and place.stacked_layers:
            yield "num_layers", tensor.shape[0]
        elif key.startswith(_DECODER) and place.layer is not None:
            layers.add(place.layer)
        if place.stacked_experts:
            yield "num_experts", tensor.shape[place.stacked_layers]
        elif place.expert is not None:
            experts.add(place.expert)
    for name, numbers in (("num_layers", layers), ("num_experts", experts)):
        if numbers:
            yield name, len(numbers)


def _require_rounded(key: str, weight: TensorPieces, copy: TensorPieces, reader: ElementReader, folder: str) -> None:
    """Raise ShardError if elements of a float32 copy that are looked at do not round to its weight."""
    held = {box.start: (box, place) for box, place in weight.pieces}
    for box, place in copy.pieces:
        own_box, own_place = held.get(box.start, (None, None))
        if own_box is None or not (isinstance(place, ByteRanges) and isinstance(own_place, ByteRanges)) or not box.size:
            continue  # as other programs may cut it: they are compared as copies are
        if place.swapped or own_place.swapped:
            continue
        elements = box.size if own_box == box else min(box.shape[-1], own_box.shape[-1])
        main = reader.sample(place, elements, copy.dtype.itemsize_bytes)
        if rounded(main, weight.dtype) not in (None, reader.sample(own_place, elements, weight.dtype.itemsize_bytes)):
            raise ShardError(
                f"the float32 copy of {key!r} in a Megatron checkpoint is not its weight's",
                expected=f"elements that round to the weights, {weight.dtype.name}",
                got=f"others in the part that begins at {list(box.start)}",
                where=folder,
                remedy="releases 0.15 to 0.19 save the state of other parameters with --overlap-grad-reduce and"
                " --dist-ckpt-optim-fully-reshardable: save it without one of the two; weights alone: --from dcp",
            )
