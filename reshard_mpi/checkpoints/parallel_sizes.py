"""Tell into how many tensor-, pipeline- and expert-parallel ranks a model can be cut (`parallel_sizes`).

Shapes alone do not tell how many heads a model has. A configuration does, or the arguments in a checkpoint of Megatron.
Weights are cut along the dimension that servers cut: rows of what makes queries, keys, values and gates, columns of
what comes behind them; quantized ones between blocks.
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
from reshard_mpi.quantization.layouts import COLUMNS, ROWS, layout_of
from reshard_mpi.quantization.weights import StoredWeight
from reshard_mpi.text import counted, format_bytes, number_ranges, one_line

CONFIG = "config.json"
# Where models of text and images have the sizes of the former.
_NESTED = ("text_config", "llm_config", "language_config")
# Larger numbers of ranks are not tried.
_MOST_RANKS, _MOST_BY_SHAPE = 256, 64
_MOST_NAMED = 3
# Powers of two up to this are listed with what stands in their way, larger ones only up to twice what fits.
_MOST_REFUSED = 8
_EMBEDDING = re.compile(r"(?:^|[./])(?:\w*embed\w*|wte|tok_embeddings|shared)[./]", re.IGNORECASE)
_POSITIONS = re.compile(r"position|wpe|rotary|type_embed", re.IGNORECASE)
_ATTENTION = re.compile(r"att", re.IGNORECASE)
_STACKED_LAYERS = re.compile(r"(?:^|[./])layers[./]")
_EXPERTS = re.compile(r"(?:^|[./])\w*experts[./]")
# Modules that servers cut along rows, along columns, and not at all; others may be cut along either. In a joined module
# each part is cut.
_TWO_PARTS, _QKV = ("gate_up_proj", "w13"), "qkv_proj"
_CUT_BY_ROWS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", _QKV, "q_b_proj", "kv_b_proj", "linear_qkv", "query_key_value", "c_attn"),
        *("gate_proj", "up_proj", *_TWO_PARTS, "linear_fc1", "dense_h_to_4h", "c_fc", "fc1", "lm_head"),
        *("w1", "w3", "wq", "wk", "wv", "wq_b", "wkv_b"),
    )
)
_CUT_BY_COLUMNS = frozenset(
    ("o_proj", "down_proj", "out_proj", "c_proj", "linear_proj", "linear_fc2", "dense_4h_to_h", "fc2", "w2", "wo")
)
_WHOLE = frozenset(
    (
        *("q_a_proj", "kv_a_proj_with_mqa", "linear_q_down_proj", "linear_kv_down_proj", "wq_a", "wkv_a"),
        *("gate", "router", "shared_expert_gate"),  # of experts
    )
)
# Modules of GPT-2, whose weights have columns before rows.
_COLUMNS_FIRST = frozenset(("c_attn", "c_fc", "c_proj"))


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
        model_bytes, size_bytes: the most bytes on any rank, of weights and of all tensors.
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
        sizes = self.sizes
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


def parallel_sizes(
    tensors: Mapping[str, TensorSize], said: ModelSizes, quantized: Mapping[str, StoredWeight] = {}
) -> PossibleSizes:
    """Return into how many ranks a model can be cut.

    Args:
        tensors: all of the checkpoint by name, with their whole shapes.
        said: the sizes that a configuration has.
        quantized: the quantized weights, by the names of the tensors that hold their elements.
    """
    model = _Model(tensors, quantized)
    own = model.sizes()
    notes = []
    for what in ("layers", "experts"):
        here, there = getattr(own, what), getattr(said, what)
        if here and there and here != there:
            notes.append(f"{said.origin} says {there} {what}, the names of tensors say {here}; these count")
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
    tensor = model.counts(sizes.heads or _MOST_BY_SHAPE, lambda n: model.tensor_obstacles(n, sizes), model.is_cut)
    stages = model.counts(sizes.layers or 1, lambda n: _undivided(sizes.layers, "layers", n), model.is_of_layer)
    expert = model.counts(sizes.experts or 0, lambda n: _undivided(sizes.experts, "experts", n), model.is_of_expert)
    return PossibleSizes(sizes, tuple(notes), tuple(tensor), tuple(stages), tuple(expert))


def _undivided(number: int | None, what: str, ranks: int) -> Iterator[str]:
    if number and number % ranks:
        yield f"{number} {what}"


class _Model:
    """The tensors of a model and its optimizer, as parts of layers and experts."""

    def __init__(self, tensors: Mapping[str, TensorSize], quantized: Mapping[str, StoredWeight]) -> None:
        self._tensors = tensors
        self._quantized = {name: _CutWeight.of(stored) for name, stored in quantized.items()}
        self._companions = {
            companion.name: (companion, stored.weight.stored)
            for stored in quantized.values()
            for companion in stored.weight.companions
        }
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
            if not self._is_quantized(name)
        ]
        return ModelSizes(
            vocabulary=max(rows, default=None),
            experts=len(experts) or self._most_common(1),
            layers=len(layers) or self._most_common(0),
        )

    def _most_common(self, axis: int) -> int | None:
        """Return the length of most tensors along which layers (0) or experts (1) are stacked; None if none are."""
        lengths = Counter(
            tensor.shape[self._stacked[name][0] * axis]  # experts are stacked behind layers, if both are
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

    def tensor_obstacles(self, ranks: int, sizes: ModelSizes) -> Iterator[str]:
        yield from _undivided(sizes.heads, "heads", ranks)
        if sizes.kv_groups != sizes.heads:
            yield from _undivided(sizes.kv_groups, "KV groups", ranks)
        if sizes.vocabulary and sizes.vocabulary % ranks:
            padding = counted(-sizes.vocabulary % ranks, "row")
            yield f"vocabulary of {sizes.vocabulary}, which {padding} more would make a multiple"
        off_grain: dict[str, str] = {}
        for weight in dict.fromkeys(self._cut_weights.values()):
            obstacle = weight.obstacle(ranks, sizes)
            if obstacle and not weight.is_told_by(sizes):
                off_grain.setdefault(obstacle, f"{weight.name}: {obstacle}")
        texts = [*off_grain.values()]
        yield from texts[:_MOST_NAMED]
        if len(texts) > _MOST_NAMED:
            yield counted(len(texts) - _MOST_NAMED, "more weight")

    @cached_property
    def _cut_weights(self) -> dict[str, _CutWeight]:
        """The matrices of the model, quantized ones and others, by name; layers and experts have equal ones."""
        plain = {
            name: _CutWeight.plain(name, tensor.shape, self._stacked[name])
            for name, tensor in self._of_model.items()
            if self._is_matrix(name) and not self._is_quantized(name)
        }
        return plain | self._quantized

    def is_cut(self, name: str) -> bool:
        """Tell whether tensor-parallel ranks share a tensor out."""
        if name in self._companions:
            companion, stored = self._companions[name]
            dims = {axis.dim for axis in self._quantized[stored].axes}
            return any(relation is not None and relation.dim in dims for relation in companion.dims)
        cut = self._cut_weights.get(name)
        return self._is_matrix(name) if cut is None else bool(cut.axes)

    def _is_matrix(self, name: str) -> bool:
        return len(self._tensors[name].shape) - sum(self._stacked[name]) > 1

    def _is_quantized(self, name: str) -> bool:
        return name in self._quantized or name in self._companions

    def is_of_layer(self, name: str) -> bool:
        return layer_of(name) is not None or bool(self._stacked[name][0])

    def is_of_expert(self, name: str) -> bool:
        return expert_of(name) is not None or bool(self._stacked[name][1])


class _GrainedAxis(NamedTuple):
    """An axis of a weight along which servers cut it."""

    what: str
    dim: int  # of the stored tensor
    length: int  # of the logical weight
    grain: int  # pieces are multiples of this number of elements of the weight


class _CutWeight(NamedTuple):
    """A weight, and the axes along which servers may cut it; none: each rank has it whole."""

    name: str
    module: str  # the last word of its module's name
    axes: tuple[_GrainedAxis, ...]
    whole_by: str  # a scheme that is not known well enough to cut it; else empty

    @classmethod
    def plain(cls, name: str, shape: tuple[int, ...], stacked: tuple[int, int]) -> _CutWeight:
        """Return one that is not quantized.

        Args:
            stacked: how many first dimensions are layers, and experts.
        """
        module, first = _module_of(name), sum(stacked)
        own = _axes_cut(module)
        # Frameworks stack experts with rows or with columns first. Convolutions have further dimensions.
        if module in _COLUMNS_FIRST or (stacked[1] and not module.startswith("linear_fc")) or len(shape) - first != 2:
            own = {ROWS, COLUMNS} if own else own
        words = {ROWS: "rows", COLUMNS: "columns"}
        dims = {ROWS: [first], COLUMNS: range(first + 1, len(shape))}
        axes = tuple(_GrainedAxis(words[each], dim, shape[dim], 1) for each in sorted(own) for dim in dims[each])
        return cls(kin_of(name), module, axes, "")

    @classmethod
    def of(cls, stored: StoredWeight) -> _CutWeight:
        """Return a quantized one."""
        weight, shape = stored
        module = _module_of(weight.name)
        whole_by = weight.scheme.name if weight.scheme.kind == "whole" else ""
        whole = cls(kin_of(weight.name), module, (), whole_by)
        if whole_by or ".indexer." in weight.name:
            return whole
        axes = layout_of(weight.scheme).stored.axes
        found = {
            axis.of: _GrainedAxis(
                "rows" if axis.of == ROWS else "columns",
                dim,
                int(shape[dim] / axis.ratio),
                int(weight.grain[dim] / axis.ratio),
            )
            for dim, axis in enumerate(axes, len(shape) - len(axes))
            if axis.of is not None
        }
        return whole._replace(axes=tuple(found[each] for each in sorted(_axes_cut(module))))

    def is_told_by(self, sizes: ModelSizes) -> bool:
        """Tell whether heads or the vocabulary tell if it can be cut, so that nothing need be said of it."""
        has_heads = sizes.heads is not None and _ATTENTION.search(self.name) is not None
        return all(axis.grain == 1 for axis in self.axes) and (
            has_heads or any(axis.what == "rows" and axis.length == sizes.vocabulary for axis in self.axes)
        )

    def obstacle(self, ranks: int, sizes: ModelSizes) -> str:
        """Return in words why it cannot be cut over a number of ranks; empty: it can be."""
        if ranks == 1:
            return ""
        if self.whole_by:
            return f"moved whole, being quantized by {self.whole_by}"
        off = [text for axis in self.axes if (text := self._off_grain(axis, ranks, sizes))]
        return " and ".join(off) if len(off) == len(self.axes) else ""

    def _off_grain(self, axis: _GrainedAxis, ranks: int, sizes: ModelSizes) -> str:
        length, what, heads, groups = axis.length, axis.what, sizes.heads or 0, sizes.kv_groups or 0
        if self.module in _TWO_PARTS:
            length, what = length // 2, f"{what} of each part"
        elif self.module == _QKV and groups:
            length, what = length * groups // (heads + 2 * groups), f"{what} of keys"
        if length % (ranks * axis.grain) == 0:
            return ""
        wanted = "a whole number" if axis.grain == 1 else f"a multiple of {axis.grain}"
        return f"{length} {what} / {ranks} = {length / ranks:.6g}, not {wanted}"


def _module_of(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _axes_cut(module: str) -> set[int]:
    """Return the axes along which servers may cut a module's weight."""
    if module in _WHOLE:
        return set()
    return {ROWS} if module in _CUT_BY_ROWS else {COLUMNS} if module in _CUT_BY_COLUMNS else {ROWS, COLUMNS}
