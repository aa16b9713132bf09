"""Tell into how many tensor-, pipeline- and expert-parallel ranks a model can be cut (`parallel_sizes`).

Shapes alone do not tell how many heads a model has. A configuration does, or the arguments in a checkpoint of Megatron.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.filesystem import source_files
from reshard_mpi.mapping.map_file import read_configuration
from reshard_mpi.mapping.tensor_kinds import TensorKind, expert_of, kin_of, kind_of, layer_of
from reshard_mpi.text import counted, format_bytes, number_ranges, one_line

CONFIG = "config.json"
# Where models of text and images have the sizes of the former.
_NESTED = ("text_config", "llm_config", "language_config")
# Larger numbers of ranks are not tried.
_MOST_RANKS, _MOST_BY_SHAPE = 256, 64
_MOST_NAMED = 3
# Up to this number of ranks it is said at least why they do not fit.
_MOST_REFUSED = 8
_EMBEDDING = re.compile(r"(?:^|[./])(?:\w*embed\w*|wte|tok_embeddings|shared)[./]", re.IGNORECASE)
_POSITIONS = re.compile(r"position|wpe|rotary|type_embed", re.IGNORECASE)
_STACKED_LAYERS = re.compile(r"(?:^|[./])layers[./]")
_EXPERTS = re.compile(r"(?:^|[./])\w*experts[./]")


class ModelSizes(NamedTuple):
    """The numbers that decide into how many parts a model can be cut; None: not known."""

    heads: int | None = None
    kv_groups: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    layers: int | None = None
    origin: str = ""  # the file, or the part of the checkpoint, that says so


# The names of each in configurations of transformers, and in Megatron's arguments.
_NAMES = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_groups": ("num_key_value_heads", "num_query_groups", "num_kv_heads", "n_head_kv"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
}


class TensorSize(NamedTuple):
    """The shape of a whole tensor, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize_bytes


class RankCount(NamedTuple):
    """A number of ranks that a model may be cut to.

    Attributes:
        obstacles: in words, what cannot be divided by it; none: the model can be cut so.
        model_bytes, size_bytes: of the largest rank at the most: of the weights, and of all tensors.
    """

    ranks: int
    obstacles: tuple[str, ...]
    model_bytes: int
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "obstacles": list(self.obstacles), "fits": not self.obstacles}


class PossibleSizes(NamedTuple):
    """Into how many ranks a model can be cut, along each axis by itself."""

    sizes: ModelSizes
    notes: tuple[str, ...]
    tensor: tuple[RankCount, ...]
    pipeline: tuple[RankCount, ...]
    expert: tuple[RankCount, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        axes = {axis: [count.as_json() for count in getattr(self, axis)] for axis in ("tensor", "pipeline", "expert")}
        return {"kind": "parallel sizes", "sizes": self.sizes._asdict(), "notes": list(self.notes), **axes}

    def as_text(self) -> str:
        """Return it as lines for people: what fits, and what stands in the way of powers of 2."""
        return "\n".join(map(one_line, self._lines()))

    def _lines(self) -> Iterator[str]:
        sizes, parts = self.sizes, []
        known = (
            (sizes.layers, "layer"),
            (sizes.heads, "head"),
            (sizes.kv_groups, "KV group"),
            (sizes.experts, "expert"),
        )
        parts = [counted(number, what) for number, what in known if number]
        parts += [f"vocabulary of {sizes.vocabulary}"] if sizes.vocabulary else []
        yield f"{', '.join(parts) or 'nothing is known of the model'}{f' ({sizes.origin})' * bool(sizes.origin)}"
        yield from self.notes
        for axis, counts in (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert)):
            if not counts:
                continue
            fits = [count for count in counts if not count.obstacles]
            yield f"{axis}-parallel ranks: {number_ranges([count.ranks for count in fits])}"
            for count in counts:
                is_power = not count.ranks & (count.ranks - 1)
                if not count.obstacles:
                    rest = f", {format_bytes(count.size_bytes)} with all else" * (count.size_bytes > count.model_bytes)
                    yield f"  {count.ranks}: at most {format_bytes(count.model_bytes)} of weights a rank{rest}"
                elif is_power and count.ranks <= max(_MOST_REFUSED, 2 * fits[-1].ranks):
                    yield f"  {count.ranks}: no, because of {'; '.join(count.obstacles)}"


def sizes_said(source: str, config: str | None, values: Any) -> ModelSizes:
    """Return the sizes of a model that its configuration says, or else the arguments in the checkpoint.

    Args:
        source: the path of the checkpoint: a configuration may lie beside its files.
        config: the path of another configuration.
        values: what the checkpoint holds beside tensors.

    Raises MapError if there is a configuration that cannot be read.
    """
    folder = Path(source) if source_files.is_folder(source) else Path(source).parent
    beside = folder / CONFIG
    if config is not None or source_files.is_file(beside):
        where = config or str(beside)
        return _sizes_in(read_configuration(where)[0], where)
    said = values.get("args") if isinstance(values, dict) else None
    return _sizes_in(said, "the arguments in the checkpoint") if isinstance(said, dict) else ModelSizes()


def _sizes_in(facts: Mapping[str, object], origin: str) -> ModelSizes:
    nested = [each for key in _NESTED if isinstance(each := facts.get(key), dict)]

    def number(names: Sequence[str]) -> int | None:
        values = (each.get(name) for each in (*nested, facts) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    found = {what: number(names) for what, names in _NAMES.items()}
    if found["kv_groups"] is None or facts.get("group_query_attention") is False:
        found["kv_groups"] = found["heads"]
    return ModelSizes(**found, origin=origin) if any(found.values()) else ModelSizes()


def parallel_sizes(tensors: Mapping[str, TensorSize], said: ModelSizes) -> PossibleSizes:
    """Return into how many ranks a model can be cut.

    Args:
        tensors: all of the checkpoint by name, with their whole shapes.
        said: the sizes that a configuration has.
    """
    model = _Model(tensors)
    own = model.sizes()
    notes = []
    for what, unit in (("layers", "layers"), ("experts", "experts")):
        here, there = getattr(own, what), getattr(said, what)
        if here and there and here != there:
            notes.append(f"{said.origin} says {there} {unit}, the names of tensors say {here}; these count")
    if said.heads is None:
        notes.append(
            "heads are not known: the shapes alone are looked at, which may be cut through heads"
            f" ({CONFIG} beside the checkpoint, or --config, tells them)"
        )
    sizes = ModelSizes(
        said.heads,
        said.kv_groups,
        own.vocabulary or said.vocabulary,
        own.experts or said.experts,
        own.layers or said.layers,
        said.origin,
    )
    tensor = model.counts(sizes.heads or _MOST_BY_SHAPE, lambda n: model.tensor_obstacles(n, sizes), model.is_matrix)
    stages = model.counts(sizes.layers or 1, lambda n: _undivided(sizes.layers, "layers", n), model.is_of_layer)
    expert = model.counts(sizes.experts or 0, lambda n: _undivided(sizes.experts, "experts", n), model.is_of_expert)
    return PossibleSizes(sizes, tuple(notes), tuple(tensor), tuple(stages), tuple(expert))


def _undivided(number: int | None, what: str, ranks: int) -> Iterator[str]:
    if number and number % ranks:
        yield f"{number} {what}"


class _Model:
    """The tensors of a model and its optimizer, as parts of layers and experts."""

    def __init__(self, tensors: Mapping[str, TensorSize]) -> None:
        self._tensors = tensors
        self._of_model = {name: tensor for name, tensor in tensors.items() if kind_of(name) is TensorKind.MODEL}
        # The dimensions that layers and experts are stacked along, by the name of the tensor.
        self._stacked = {name: self._stacked_axes(name, tensor.shape) for name, tensor in tensors.items()}

    def _stacked_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        layers = int(layer_of(name) is None and _STACKED_LAYERS.search(name) is not None and len(shape) > 1)
        experts = int(expert_of(name) is None and _EXPERTS.search(name) is not None and len(shape) > layers + 1)
        return layers, experts

    def sizes(self) -> ModelSizes:
        """Return what names and shapes tell."""
        layers = {number for number in map(layer_of, self._of_model) if number is not None}
        experts = {number for number in map(expert_of, self._of_model) if number is not None}
        rows = [
            tensor.shape[0]
            for name, tensor in self._of_model.items()
            if len(tensor.shape) == 2 and _EMBEDDING.search(name) and not _POSITIONS.search(name)
        ]
        return ModelSizes(
            vocabulary=max(rows, default=None),
            experts=len(experts) or self._most_common(1),
            layers=len(layers) or self._most_common(0),
        )

    def _most_common(self, axis: int) -> int | None:
        """Return the length of most tensors along which layers (0) or experts (1) are stacked; None if none are."""
        lengths = Counter(
            tensor.shape[self._stacked[name][0] * axis]
            for name, tensor in self._of_model.items()
            if self._stacked[name][axis]
        )
        return lengths.most_common(1)[0][0] if lengths else None

    def counts(
        self, most: int, obstacles: Callable[[int], Iterator[str]], is_cut: Callable[[str], bool]
    ) -> Iterator[RankCount]:
        """Yield numbers of ranks, up to `most`. is_cut: tells by its name whether ranks share a tensor out."""
        whole, cut = [0, 0], [0, 0]  # bytes of the model, and of all
        for name, tensor in self._tensors.items():
            held = cut if is_cut(name) else whole
            held[0] += tensor.size_bytes * (name in self._of_model)
            held[1] += tensor.size_bytes
        for ranks in range(1, min(most, _MOST_RANKS) + 1):
            model_bytes, size_bytes = (own + -(-shared // ranks) for own, shared in zip(whole, cut))
            yield RankCount(ranks, tuple(obstacles(ranks)), model_bytes, size_bytes)

    @cached_property
    def _matrices(self) -> dict[tuple[int, ...], str]:
        """The different shapes of what tensor-parallel ranks cut, each with a tensor, without its layer and expert."""
        shapes: dict[tuple[int, ...], str] = {}
        for name, tensor in self._of_model.items():
            if self.is_matrix(name):
                shapes.setdefault(tensor.shape[sum(self._stacked[name]) :], f"{kin_of(name)} {list(tensor.shape)}")
        return shapes

    def tensor_obstacles(self, ranks: int, sizes: ModelSizes) -> Iterator[str]:
        yield from _undivided(sizes.heads, "heads", ranks)
        if sizes.kv_groups != sizes.heads:
            yield from _undivided(sizes.kv_groups, "KV groups", ranks)
        if sizes.vocabulary and sizes.vocabulary % ranks:
            padding = counted(-sizes.vocabulary % ranks, "row")
            yield f"vocabulary of {sizes.vocabulary}, which {padding} more would make a multiple"
        named = [name for shape, name in self._matrices.items() if all(length % ranks for length in shape)]
        yield from named[:_MOST_NAMED]
        if len(named) > _MOST_NAMED:
            yield counted(len(named) - _MOST_NAMED, "more shape")

    def is_matrix(self, name: str) -> bool:
        return len(self._tensors[name].shape) - sum(self._stacked[name]) > 1

    def is_of_layer(self, name: str) -> bool:
        return layer_of(name) is not None or bool(self._stacked[name][0])

    def is_of_expert(self, name: str) -> bool:
        return expert_of(name) is not None or bool(self._stacked[name][1])
