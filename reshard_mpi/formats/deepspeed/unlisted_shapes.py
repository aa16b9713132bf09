"""Find the shapes of parameters where no file lists them: in a training in bfloat16 without ZeRO (`with_shapes`).

Its optimizer (deepspeed/runtime/bf16_optimizer.py) cuts groups as ZeRO's first stage does, but the engine lists the
shapes of parameters only with ZeRO. Each rank says how many elements of which parameters it has; the model has shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.deepspeed.ranks import RankStates
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.torch.tensor_pieces import TensorPieces

# In a pipeline, modules that several layers share: their weights lie in the files of these layers.
TIED = "tied_modules."


def with_shapes(states: RankStates, weights: Sequence[Mapping[str, Value]]) -> RankStates:
    """Return what ranks say, with the shapes of all parameters.

    Args:
        weights: the tensors of the model by name, as each tensor-parallel rank has them.

    Raises ShardError for a parameter that the model has not, or with another number of elements.
    """
    models = {
        ranks: model._replace(shapes=[*_shapes(states, ranks.model, weights[ranks.model % len(weights)])])
        for ranks, model in states.models.items()
    }
    return states._replace(models=models)


def _shapes(states: RankStates, model_rank: int, weights: Mapping[str, Value]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes of each group of a model-parallel rank, in the order in which they lie in its vectors."""
    shares = states.shares(model_rank)
    for number in range(len(shares[0].groups)):
        sizes: dict[str, int] = {}
        for share in shares:
            for name, elements in share.pieces[number].items() if number < len(share.pieces) else ():
                sizes[name] = sizes.get(name, 0) + elements
        yield {name: _shape(name, size, weights, shares[0].path) for name, size in sizes.items()}


def _shape(name: str, size: int, weights: Mapping[str, Value], path: str) -> tuple[int, ...]:
    own = name.split(".", 2)[2] if name.startswith(TIED) else None
    named = (
        tensor
        for other, tensor in weights.items()
        if other == name or (own is not None and other.partition(".")[2] == own)
    )
    shapes = {tensor.shape for tensor in named if type(tensor) is TensorPieces}
    if {math.prod(shape) for shape in shapes} != {size} or len(shapes) > 1:
        raise ShardError(
            f"the shape of the parameter {name!r} of a DeepSpeed checkpoint is not known",
            expected=f"a tensor of {size} elements in *_model_states.pt, as its optimizer has",
            got=", ".join(map(str, map(list, shapes))) or "none",
            where=path,
            remedy="copy or restore all files of one save",
        )
    return shapes.pop()
