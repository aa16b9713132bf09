"""Name the tensors that ranks of Megatron's older form have, and tell how they are cut (`rank_tensors`).

Files say neither: layers and experts are numbered from 0 on each rank, and how a matrix is cut over tensor-parallel
ranks is known by its module alone. The first matrix of a gated block has on each rank its part of the gate, then of the
values; whole it has all the gate, then all values, as in torch_dist.
(megatron/core/tensor_parallel/layers.py, transformer/mlp.py, multi_latent_attention.py of Megatron-Core 0.19)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.locations import ByteRanges, Location
from reshard_mpi.formats.megatron.parameter_order import ElementReader
from reshard_mpi.formats.megatron.rank_folders import LegacyRanks, RankFiles
from reshard_mpi.formats.nest.nodes import Value, text_pairs
from reshard_mpi.formats.torch.file_content import HeldTensor, held
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box

_Shape = tuple[int, ...]
_LAYER = re.compile(r"(?P<before>(?:.*\.)?(?:decoder|encoder)\.layers\.)(?P<number>\d+)(?P<after>\..*)?")
_EXPERT = re.compile(
    r"(?P<before>.*\.local_experts\.|.*\.experts\.linear_fc\d\.(?:weight|bias))(?P<number>\d+)(?P<after>(?:\..*)?)"
)
_OF_EXPERTS = ".experts."
EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
EXTRA_STATE = "._extra_state"

# Modules whose matrices are cut along their outputs, so along dimension 0, as are their biases.
_OF_OUTPUTS = frozenset(
    (
        *("word_embeddings", "output_layer", "linear_qkv", "linear_q", "linear_kv", "linear_fc1"),
        *("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"),
    )
)
# Modules whose matrices are cut along their inputs, so along dimension 1; all ranks have the whole bias.
_OF_INPUTS = frozenset(("linear_proj", "linear_fc2"))
# Modules that are cut along their outputs or not at all, by what their number of outputs is the sum of.
_BY_OUTPUTS = {
    "linear_q_down_proj": ("q_lora_rank",),
    "linear_kv_down_proj": ("kv_lora_rank", "qk_pos_emb_head_dim"),
    "eh_proj": ("hidden_size",),
}
_WHOLE = re.compile(
    r"(?:.*\.)?(?:\w*norm\.(?:weight|bias)|layer_norm_(?:weight|bias)|router\.\w+|gate_weight"
    r"|(?:position|tokentype)_embeddings\.weight)"
)
_OF_HEADS = ".softmax_offset"
_LEAF = re.compile(r"(?P<kind>weight|bias)\d*")


class RankTensor(NamedTuple):
    """A tensor in the file of one rank: slices of a whole one, one behind the other.

    Attributes:
        key: the name of the whole tensor.
        chunk: in which of the rank's chunks of the model it is.
        storage: the key of the storage that it is in; others may be in it too.
        shape: of the whole.
        slices: their boxes in the whole, and where their elements are.
    """

    key: str
    chunk: int
    held: HeldTensor
    storage: str
    shape: _Shape
    slices: tuple[tuple[Box, Location], ...]

    @property
    def elements(self) -> int:
        return math.prod(self.held.shape)

    @property
    def is_expert(self) -> bool:
        return _OF_EXPERTS in self.key


class RankModel(NamedTuple):
    """What one rank has of the model: its tensors in the order of its file, and what else its modules save."""

    files: RankFiles
    tensors: Sequence[RankTensor]
    others: Mapping[str, Value]


class _Named(NamedTuple):
    """A tensor of a rank under the name of the whole one."""

    name: str
    chunk: int
    tensor: HeldTensor
    storage: str


def rank_tensors(ranks: LegacyRanks, folder: str) -> list[RankModel]:
    """Return what each rank has of the model. Raises ShardError if it contradicts others', or the arguments."""
    names = _WholeNames(ranks)
    own: list[tuple[RankFiles, dict[str, _Named], dict[str, Value]]] = []
    for rank in ranks.ranks:
        tensors: dict[str, _Named] = {}
        others: dict[str, Value] = {}
        for chunk, values in enumerate(rank.chunks):
            for name, value in text_pairs(values):
                key = names.whole(rank, chunk, name)
                if type(value) is StoredTensor and not key.endswith(EXTRA_STATE):
                    if key in tensors:
                        raise _twice(key, tensors[key].name, name, rank.path)
                    place = held(value, rank.starts, rank.path)
                    tensors[key] = _Named(name, chunk, place, value.storage.key)
                else:
                    others[key] = value
        own.append((rank, tensors, others))
    cuts = _Cuts(ranks, folder)
    for rank, tensors, _ in own:
        for key, named in tensors.items():
            cuts.add(rank, key, named.tensor)
    return [
        RankModel(rank, [cuts.cut(rank, key, named) for key, named in tensors.items()], others)
        for rank, tensors, others in own
    ]


class _WholeNames:
    """Knows the names of whole tensors of the model by the names that ranks have."""

    def __init__(self, ranks: LegacyRanks) -> None:
        self._args = ranks.args
        counts: dict[tuple[int, int], dict[str, int]] = {}
        experts = 0
        for rank in ranks.ranks:
            for chunk, values in enumerate(rank.chunks):
                of_chunk = counts.setdefault((chunk, rank.place.stage), {})
                for name in (*_modules(values), *(name for name, _ in text_pairs(values))):
                    if match := _LAYER.fullmatch(name):
                        of_chunk[match["before"]] = max(of_chunk.get(match["before"], 0), int(match["number"]) + 1)
                    if match := _EXPERT.fullmatch(name):
                        experts = max(experts, int(match["number"]) + 1)
        # A pipeline goes through the first chunks of all stages, then through the second ones.
        self._first: dict[tuple[int, int], dict[str, int]] = {}
        totals = Counter[str]()
        for place in sorted(counts):
            self._first[place] = dict(totals)
            totals.update(counts[place])
        self._experts = experts

    def whole(self, rank: RankFiles, chunk: int, name: str) -> str:
        """Return the name of the whole tensor, by the name that a rank has for its part."""
        if match := _LAYER.fullmatch(name):
            first = self._first[chunk, rank.place.stage].get(match["before"], 0)
            name = f"{match['before']}{int(match['number']) + first}{match['after'] or ''}"
        if match := _EXPERT.fullmatch(name):
            number = int(match["number"]) + rank.place.expert * self._experts
            name = f"{match['before']}{number}{match['after']}"
        # The last stage has a copy of the embedding for its outputs.
        is_tied = self._args.get("untie_embeddings_and_output_weights") is False
        return EMBEDDING if is_tied and name == _HEAD else name


def _twice(key: str, name: str, other: str, path: str) -> ShardError:
    return ShardError(
        "a rank of a Megatron checkpoint has a tensor of the model twice",
        expected=f"{key!r} once",
        got=f"{name!r} and {other!r}",
        where=path,
        remedy="load it with its Megatron, and save it with --ckpt-format torch_dist",
    )


def _modules(chunk: Value) -> Iterator[str]:
    """Yield the names of all modules of a part of a model, with or without tensors."""
    state = getattr(chunk, "state", None)
    for key, metadata in text_pairs(state):
        if key == "_metadata":
            yield from (name for name, _ in text_pairs(metadata))


class _Cuts:
    """Knows how tensors are cut over ranks: by their names, and by the shapes of what lies beside them."""

    def __init__(self, ranks: LegacyRanks, folder: str) -> None:
        self._ranks, self._folder = ranks, folder
        # By name and part, one of the ranks' tensors.
        self._parts: dict[str, dict[int, HeldTensor]] = {}
        self._layouts: dict[str, tuple[_Shape, list[list[Box]]]] = {}

    def add(self, rank: RankFiles, key: str, tensor: HeldTensor) -> None:
        """Take note of a rank's part of a tensor. Raises ShardError if its copies have other types or shapes."""
        part = self._ranks.parallelism.part(rank.place, is_expert=_OF_EXPERTS in key)
        first = self._parts.setdefault(key, {}).setdefault(part, tensor)
        if first[:2] != tensor[:2]:
            raise ShardError(
                f"ranks of a Megatron checkpoint have different copies of {key!r}",
                expected=f"{first.dtype} {list(first.shape)}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                where=rank.path,
                remedy="copy or restore all files of one save",
            )

    def cut(self, rank: RankFiles, key: str, named: _Named) -> RankTensor:
        """Return a rank's tensor with its slices. Raises ShardError if it is not known how it is cut."""
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(key)
        part = self._ranks.parallelism.part(rank.place, is_expert=_OF_EXPERTS in key)
        slices = tuple(in_slices(named.tensor, layout[1][part]))
        return RankTensor(key, named.chunk, named.tensor, named.storage, layout[0], slices)

    def _layout(self, key: str) -> tuple[_Shape, list[list[Box]]]:
        """Return the shape of a whole tensor, and the boxes of each part."""
        parts = self._parts[key]
        count = self._ranks.parallelism.parts(is_expert=_OF_EXPERTS in key)
        first = parts[min(parts)]
        if len(parts) < count:
            lost = next(part for part in range(count) if part not in parts)
            raise self._unknown(key, f"a part of it on each of {count} tensor-parallel ranks", f"none on rank {lost}")
        alike = {(tensor.dtype, tensor.shape) for tensor in parts.values()}
        if len(alike) > 1:
            got = " and ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in alike))
            raise self._unknown(key, "parts of one shape", got)
        dim, halves = self._rule(key, count)
        if dim is None:
            return first.shape, [[Box.whole(first.shape)]] * count
        length = first.shape[dim] // halves
        shape = (*first.shape[:dim], first.shape[dim] * count, *first.shape[dim + 1 :])
        whole = Box.whole(shape)
        return shape, [
            [whole.within(dim, start * length, (start + 1) * length) for start in range(part, halves * count, count)]
            for part in range(count)
        ]

    def _rule(self, key: str, count: int) -> tuple[int | None, int]:
        """Return along which dimension a tensor is cut (None: not at all), and how many parts of it a rank has."""
        shape = self._parts[key][0].shape
        module, _, leaf = key.rpartition(".")
        module = module.rpartition(".")[2]
        named = _LEAF.fullmatch(leaf)
        kind = named["kind"] if named else ""
        if key.endswith(_OF_HEADS) and len(shape) == 1:
            return 0, 1
        if kind and module in _BY_OUTPUTS and shape:
            return (0 if self._is_cut(key, _BY_OUTPUTS[module], shape[0], count) else None), 1
        groups = self._ranks.args.get("num_query_groups") if self._ranks.args.get("group_query_attention") else None
        if module == "linear_qkv" and type(groups) is int and groups % count:
            expected = f"args.num_query_groups that {count} tensor-parallel ranks share evenly"
            raise self._unknown(key, expected, f"{groups}")
        if kind and module in _OF_OUTPUTS and shape:
            return 0, self._halves(key, leaf, shape[0]) if module == "linear_fc1" else 1
        if kind == "weight" and module in _OF_INPUTS and len(shape) == 2:
            return 1, 1
        is_bias_of_all = kind == "bias" and module in _OF_INPUTS
        if not is_bias_of_all and not _WHOLE.fullmatch(key) and not self._is_alike(key):
            raise self._unknown(
                key,
                "a tensor of a module that is known here, or one that is the same on all ranks",
                f"other elements on some of {count} tensor-parallel ranks",
            )
        return None, 1

    def _halves(self, key: str, leaf: str, outputs: int) -> int:
        """Return 2 for a gated block, whose first matrix has two outputs for each input of the second one, else 1."""
        second = key.removesuffix(leaf).replace("linear_fc1", "linear_fc2") + leaf.replace("bias", "weight")
        parts = self._parts.get(second, {})
        inputs = parts[0].shape[-1] if 0 in parts and parts[0].shape else 0
        is_gated = self._ranks.args.get("swiglu")
        if inputs == 0 and type(is_gated) is bool:
            return 2 if is_gated and outputs % 2 == 0 else 1
        if inputs and outputs in (inputs, 2 * inputs) and not (is_gated and outputs == inputs):
            return outputs // inputs
        expected = f"{'twice ' if is_gated else ''}as many outputs as {second} has inputs"
        raise self._unknown(key, expected, f"{outputs} and {inputs}")

    def _is_cut(self, key: str, summands: Sequence[str], outputs: int, count: int) -> bool:
        numbers = [self._ranks.args.get(name) for name in summands]
        said = sum(number for number in numbers if type(number) is int)
        if None in numbers or outputs not in (said, said // count):
            raise self._unknown(key, f"{' + '.join(summands)} of args, {said}, over {count} ranks", f"{outputs}")
        return outputs != said

    def _is_alike(self, key: str) -> bool:
        """Tell whether all parts of a tensor begin alike, and are alike in the middle and at the end."""
        samples = set()
        with ElementReader() as reader:
            for dtype, shape, place in self._parts[key].values():
                if not isinstance(place, ByteRanges):
                    return len(self._parts[key]) == 1
                samples.add(reader.sample(place, Box.whole(shape).size, dtype.itemsize_bytes))
        return len(samples) == 1

    def _unknown(self, key: str, expected: str, got: str) -> ShardError:
        return ShardError(
            f"how {key!r} of a Megatron checkpoint is cut over ranks is not known",
            expected=expected,
            got=got,
            where=self._folder,
            remedy="load it with its Megatron, and save it with --ckpt-format torch_dist",
        )


def in_slices(tensor: HeldTensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, Location]]:
    """Yield the boxes that a tensor has one behind the other, each with its place."""
    if len(boxes) == 1:
        yield boxes[0], tensor.place
        return
    rows = 0
    for box in boxes:
        yield box, tensor.rows(rows, box.shape[0])
        rows += box.shape[0]
