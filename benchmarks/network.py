"""The tensors of a GPT-like network with two Adam moments, of a chosen size, and the ways they are sharded here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

Shapes = dict[str, tuple[int, ...]]

ITEM_BYTES = 4
_LAYERS = 8
_CUTS = 8  # the most pieces that any dimension is cut into, where nothing else is said
_USUAL_STEPS = 16
_COPIES = ("", "adam_m.", "adam_v.")
_CUT_BY_COLUMNS = ("projection", "down")


def shapes(megabytes: float, cuts: int = _CUTS) -> Shapes:
    """Return whole shapes: 8 layers of some hidden size, and an embedding whose rows make up the size asked for.

    cuts: a number of pieces that all dimensions can be cut into. Hidden sizes are multiples of 16 times that (128, as
    those of networks in use are); in toys they are just such that every cut on either side divides them.
    """
    elements = int(megabytes * 1_000_000) // (ITEM_BYTES * len(_COPIES))
    hidden = math.isqrt(elements // (12 * _LAYERS + 10))
    step = _USUAL_STEPS * cuts if hidden >= _USUAL_STEPS * cuts else cuts
    hidden = max(step, hidden - hidden % step)
    rows = (elements - _LAYERS * (12 * hidden + 2) * hidden) // hidden
    rows = max(step, rows - rows % step)
    network: Shapes = {"embedding.weight": (rows, hidden)}
    for layer in range(_LAYERS):
        network |= {
            f"layers.{layer}.attention.qkv.weight": (3 * hidden, hidden),
            f"layers.{layer}.attention.projection.weight": (hidden, hidden),
            f"layers.{layer}.mlp.up.weight": (4 * hidden, hidden),
            f"layers.{layer}.mlp.down.weight": (hidden, 4 * hidden),
            f"layers.{layer}.norm.gamma": (hidden,),
            f"layers.{layer}.norm.beta": (hidden,),
        }
    return {prefix + name: shape for prefix in _COPIES for name, shape in network.items()}


@dataclass(frozen=True, slots=True)
class Resharding:
    """What is to become of a checkpoint of 8 ranks. target: None for one full checkpoint."""

    name: str
    source: Strategy
    target: Strategy | None


def with_optimizer_sharding(network: Shapes) -> Resharding:
    """Data parallel 2 x tensor parallel 4 becomes 2 x 2; the target shards over data parallel ranks as well."""
    return Resharding("8 -> 4 with optimizer sharding", _mesh(network, 2, 4), _mesh(network, 2, 2, optimizer=True))


def consolidation(network: Shapes) -> Resharding:
    """Tensor parallel 8 becomes one full checkpoint."""
    return Resharding("8 -> 1", _mesh(network, 1, 8), None)


def by_rows(network: Shapes) -> Resharding:
    """Every tensor cut along dimension 0: 8 pieces become 4."""
    return Resharding("8 -> 4 along dimension 0", _rows(network, 8), _rows(network, 4))


def rows_into_columns(network: Shapes) -> Resharding:
    """Every tensor cut along dimension 0 into 8 pieces becomes one cut along its last dimension into 3."""
    target = {name: (Placement((3,), (*((),) * (len(shape) - 1), (0,))),) for name, shape in network.items()}
    return Resharding("8 -> 3, rows -> columns", _rows(network, 8), Strategy(3, 1, target))


def _mesh(network: Shapes, data: int, tensor: int, *, optimizer: bool = False) -> Strategy:
    parameters = {}
    for name, shape in network.items():
        split: tuple[tuple[int, ...], ...] = ((),) * len(shape)
        if len(shape) == 2:
            split = ((), (1,)) if any(part in name for part in _CUT_BY_COLUMNS) else ((1,), ())
        sharing = data if len(shape) == 2 else data * tensor
        parameters[name] = (Placement((data, tensor), split, sharing if optimizer else 1),)
    return Strategy(data * tensor, 1, parameters)


def _rows(network: Shapes, ranks: int) -> Strategy:
    return Strategy(
        ranks,
        1,
        {name: (Placement((ranks,), ((0,), *((),) * (len(shape) - 1))),) for name, shape in network.items()},
    )
