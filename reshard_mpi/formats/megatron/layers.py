"""Tell layers and experts by the names of Megatron's tensors (`place_of`), and stack their weights (`stacked`).

torch_dist stacks the layers of a model: `decoder.layers.7.mlp.linear_fc2.weight [h, f]` is part 7 of
`decoder.layers.mlp.linear_fc2.weight [L, h, f]`, if all layers are alike; layers that are not keep their numbers, as
Megatron-Core keeps them then, and those of multi-token prediction. Experts are stacked in any case, behind the layers.
(megatron/core/transformer/transformer_block.py, multi_token_prediction.py, moe/experts.py of Megatron-Core 0.19)

A file lists its tensors by name alone, so the name of a chunk says of which tensor it is, where it begins, and of what
shape the whole is: `decoder.layers.mlp.linear_fc2.weight [3, 0, 0] of [4, 32, 48]`. What is no chunk has another name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.tensor_table import TensorType

# Parts of a model in the order in which they are built.
_SECTIONS = ("embedding.", "decoder.layers.", "decoder.final_", "mtp.", "output_layer.")
# Tensors whose first dimension is the padded vocabulary.
OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?:(?P<number>\d{1,9})\.)?(?P<part>.+)")
EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"(?P<before>.*\.(?:local_)?experts\.)(?P<number>\d{1,9})(?P<after>\..*)")
_CHUNK = re.compile(r"(?P<key>.*) \[(?P<start>[\d, ]*)\] of \[(?P<whole>[\d, ]*)\]", re.DOTALL)


class NamedPlace(NamedTuple):
    """The place of a tensor in its model, as its name tells it.

    Attributes:
        section: which part of the model, in the order in which they are built; None: that is not known.
        layer, expert: its numbers, None where the name has none.
        part: the name without these.
        stacked_layers, stacked_experts: whether the tensor has them as its first dimensions.
    """

    section: int | None
    layer: int | None
    expert: int | None
    part: str
    stacked_layers: bool
    stacked_experts: bool


def place_of(key: str) -> NamedPlace:
    """Return the place of a tensor in its model."""
    section = next((number for number, begin in enumerate(_SECTIONS) if key.startswith(begin)), None)
    layer, part, stacked_layers = None, key, False
    if match := _LAYER.fullmatch(key):
        part, stacked_layers = match["part"], match["number"] is None
        layer = None if stacked_layers else int(match["number"])
    expert = None
    if found := _EXPERT.fullmatch(part):
        part, expert = f"{found['before']}*{found['after']}", int(found["number"])
    return NamedPlace(section, layer, expert, part, stacked_layers, EXPERTS in key and expert is None)


def is_expert(key: str) -> bool:
    """Tell whether a tensor is of experts, which the ranks of expert parallelism share out."""
    place = place_of(key)
    return place.stacked_experts or place.expert is not None or ".experts." in key


def layer_axes(key: str) -> int:
    """Return how many of a tensor's first dimensions are layers and experts."""
    place = place_of(key)
    return place.stacked_layers + place.stacked_experts


def least_axes(key: str) -> int:
    """Return how many dimensions a tensor has at least, as its name says."""
    return layer_axes(key) + (2 if key in OF_VOCABULARY else 0)


class NamedChunk(NamedTuple):
    """A chunk of a tensor: the key of that, where the chunk begins, and the shape of the whole."""

    key: str
    start: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.key} {list(self.start)} of {list(self.whole)}"

    def shape(self, kind: TensorType) -> tuple[int, ...]:
        """Return the shape of the chunk, which lies in a file without the dimensions that are layers and experts."""
        return (*(1,) * (len(self.whole) - len(kind.shape)), *kind.shape)


def chunk_of(name: str) -> NamedChunk | None:
    """Return the chunk of this name; None if it is the name of something else."""
    match = _CHUNK.fullmatch(name)
    return None if match is None else NamedChunk(match["key"], _numbers(match["start"]), _numbers(match["whole"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def item_kind(name: str, kind: TensorType) -> TensorType:
    """Return the kind of the item that a file has of a tensor."""
    chunk = chunk_of(name)
    return kind if chunk is None else TensorType(kind.dtype, chunk.shape(kind))


_NUMBERED_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d+)\.(?P<part>.+)")
_NUMBERED_EXPERT = re.compile(r"(?P<before>.*?\.)experts\.(?:(?:local_)?experts\.)?(?P<number>\d+)\.(?P<part>.+)")
_STACKED_LAYERS = re.compile(r"(?:.*\.)?layers\.(?!\d)")
# Norms of Megatron's own layers, which torch_dist calls as Transformer Engine does, and what tells these layers.
_NORM = re.compile(r"(?P<before>.*\.)(?P<norm>input_layernorm|pre_mlp_layernorm)\.(?P<part>weight|bias)")
_OF_TORCH_DIST = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
}
_OF_OWN_LAYERS = ("input_layernorm.weight", "self_attention.linear_qkv.weight")
# Layers of multi-token prediction always have numbers.
_ALWAYS_NUMBERED = "mtp.layers."
# Arguments that say which layers are of another kind: a number above 1, or a list.
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
_OF_SEVERAL_KINDS = ("hetereogenous_dist_checkpoint", "heterogeneous_layers_config_path")
# What modules of Megatron keep besides tensors has this behind its key: which one of how many.
_SHARD = re.compile(r"(?P<key>.*)/shard_[\d.]+_(?P<of>[\d.]+)")
# Experts whose matrices are multiplied as a group have their numbers behind.
_GROUPED = re.compile(r"(?P<before>.*?\.)experts\.(?P<part>linear_fc\d\.(?:weight|bias))(?P<number>\d+)")


class StackedPlace(NamedTuple):
    """Where a weight is in a stacked tensor: the key of that, and its place among layers and experts.

    Attributes:
        counts: how many of these there are.
        own_counts: the weight's own first dimensions that are layers and experts.
    """

    key: str
    place: tuple[int, ...]
    counts: tuple[int, ...]
    own_counts: tuple[int, ...]


class _NumberedKey(NamedTuple):
    """A key without numbers, and these: of the layer and of the expert, None where it has none."""

    key: str
    layers: str
    layer: int | None
    expert: int | None


def stacked(weights: Mapping[str, TensorType], args: Mapping[str, Value]) -> dict[str, StackedPlace]:
    """Return the places of weights in stacked tensors, by key.

    Args:
        args: of the run, which may say that layers keep their numbers though they are alike; empty if there are none.

    Raises TargetError if experts of one layer are not alike.
    """
    numbered = _with_norms({key: _numbered(key) for key in weights})
    unlike = {own.layers for own in numbered.values()} if _keep_numbers(args) else {*_unlike(numbered, weights)}
    places: dict[str, StackedPlace] = {}
    of_key: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for key, own in numbered.items():
        name, layer = own.key, own.layer
        if own.layers in unlike and layer is not None:
            name, layer = f"{own.layers}{layer}.{own.key.removeprefix(own.layers)}", None
        of_key.setdefault(name, []).append((key, tuple(n for n in (layer, own.expert) if n is not None)))
    for name, members in of_key.items():
        counts = tuple(1 + max(numbers) for numbers in zip(*(place for _, place in members)))
        are_alike = len({weights[key] for key, _ in members}) == 1
        if not are_alike or not len({place for _, place in members}) == len(members) == math.prod(counts):
            raise TargetError(
                f"the weights that are to become {name!r} are not alike",
                expected=f"tensors of one type and shape, each of {' x '.join(map(str, counts)) or '1'} once",
                got=", ".join(f"{key} {weights[key].dtype} {list(weights[key].shape)}" for key, _ in members[:3]),
                remedy="choose --to dcp or --to torch",
            )
        for key, place in members:
            places[key] = StackedPlace(name, place, counts, weights[key].shape[: _own_axes(key, numbered[key])])
    return places


def _with_norms(numbered: Mapping[str, _NumberedKey]) -> dict[str, _NumberedKey]:
    """Return keys in which norms of Megatron's own layers have the names of Transformer Engine, as in torch_dist.

    Those layers have both norms by themselves, beside the weights of queries, keys and values in one.
    """
    present = {(own.key, own.layer) for own in numbered.values()}

    def renamed(own: _NumberedKey) -> _NumberedKey:
        match = _NORM.fullmatch(own.key)
        marks = () if match is None else (f"{match['before']}{mark}" for mark in _OF_OWN_LAYERS)
        if match is None or not all((mark, own.layer) in present for mark in marks):
            return own
        return own._replace(key=f"{match['before']}{_OF_TORCH_DIST[match['norm']]}{match['part']}")

    return {key: renamed(own) for key, own in numbered.items()}


def _keep_numbers(args: Mapping[str, Value]) -> bool:
    """Tell whether layers keep their numbers, since a run with these arguments can have layers of several kinds."""
    frequencies = [args.get(name) for name in _FREQUENCIES]
    return any(type(own) is list or (type(own) is int and own > 1) for own in frequencies) or any(
        args.get(name) for name in _OF_SEVERAL_KINDS
    )


class ModulePlaces:
    """Knows where in stacked tensors modules are, by their weights."""

    def __init__(self, places: Mapping[str, StackedPlace]) -> None:
        self._by_module = {_numbered(key.rpartition(".")[0]): own for key, own in places.items()}
        self._layers = {
            match[0]: own.counts[:1]
            for own in places.values()
            if own.place and (match := _STACKED_LAYERS.match(own.key)) is not None
        }

    def object_key(self, key: str) -> str:
        """Return the key of an object, in which layers and experts are told as `shard_3.0_4.2`, by a key with numbers.

        A key that tells some already stays as it is.
        """
        shard = _SHARD.fullmatch(key)
        if shard is not None and shard["of"] != "1":
            return key
        key = shard["key"] if shard is not None else key
        (module, _, part), own = key.rpartition("."), _numbered(key)
        place = self._by_module.get(_numbered(module))
        if place is not None:
            return object_key(f"{place.key.rpartition('.')[0]}.{part}", place.place, place.counts)
        if own.layer is not None and own.layers in self._layers:
            return object_key(own.key, (own.layer,), self._layers[own.layers])
        return object_key(key, (), ())


def object_key(key: str, place: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """Return the key of an object of a module: which layer and expert it is of, of how many."""
    return f"{key}/shard_{'.'.join(map(str, place or (0,)))}_{'.'.join(map(str, counts or (1,)))}"


def _own_axes(key: str, own: _NumberedKey) -> int:
    """Return how many of a weight's own first dimensions are layers and experts that have no number in its name."""
    return (own.layer is None and _STACKED_LAYERS.match(key) is not None) + (own.expert is None and EXPERTS in key)


def _numbered(key: str) -> _NumberedKey:
    layers, layer, part, expert = "", None, key, None
    if match := _NUMBERED_LAYER.fullmatch(key):
        layers, layer, part = match["before"], int(match["number"]), match["part"]
    if match := _NUMBERED_EXPERT.fullmatch(part) or _GROUPED.fullmatch(part):
        part, expert = f"{match['before']}experts.experts.{match['part']}", int(match["number"])
    return _NumberedKey(f"{layers}{part}", layers, layer, expert)


def _unlike(numbered: Mapping[str, _NumberedKey], weights: Mapping[str, TensorType]) -> Iterator[str]:
    """Yield what keys of layers begin with that are not alike: one has other weights than another."""
    of_layers: dict[str, dict[int, dict[tuple[str, int | None], TensorType]]] = {}
    for key, own in numbered.items():
        if own.layer is not None:
            of_layers.setdefault(own.layers, {}).setdefault(own.layer, {})[own.key, own.expert] = weights[key]
    for layers, own_layers in of_layers.items():
        first = next(iter(own_layers.values()))
        is_full = sorted(own_layers) == [*range(len(own_layers))]
        if layers == _ALWAYS_NUMBERED or not is_full or any(each != first for each in own_layers.values()):
            yield layers
