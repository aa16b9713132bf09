"""Find whose elements lie where in the flat vectors of Megatron's older form (`vector_states`).

A vector has the parameters of one type that a rank has in one chunk of its model, in the reverse of the order in which
the model's file has them. Each begins at a multiple of 64 elements of its bucket; buckets follow one another without
what fills them up. Neither where buckets end nor which parameters are trained is said. But the float32 copy of each
parameter is there too, and its rounding is the weight; and weights lie in their file as they do in memory, where they
are views of one buffer. (megatron/core/optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.megatron.parameter_order import MAIN, ElementReader, rounded, weights_type
from reshard_mpi.formats.megatron.rank_slices import EMBEDDING, RankModel, RankTensor
from reshard_mpi.formats.megatron.training_tree import FP32
from reshard_mpi.formats.nest.nodes import Dict, Global, Value
from reshard_mpi.formats.torch.file_content import FlatVector, HeldTensor
from reshard_mpi.formats.torch.tensors import StoredTensor

_ALIGNED_ELEMENTS = 64
_COALESCED = "buckets_coalesced"
_REMEDY = (
    "restore the files of one save, or save it with a newer Megatron; to read weights alone, take these files out of"
    " all folders"
)

# The state of a parameter: by kind its tensors, or numbers.
ParameterState = Mapping[str, Value]


class _Vectors(NamedTuple):
    """Vectors of one length: of what type the weights are, and for each kind of state one."""

    name: str
    dtype: DType
    by_kind: Mapping[str, FlatVector]

    @property
    def elements(self) -> int:
        return self.by_kind[MAIN].elements


def vector_states(
    model: RankModel, of_experts: Sequence[bool | None], reader: ElementReader
) -> Iterator[tuple[RankTensor, ParameterState]]:
    """Yield the parameters of a rank whose state is in its file of vectors, each with its state.

    Args:
        of_experts: for each optimizer of the run whether it is of the experts; None: of all parameters.

    Raises ShardError if the vectors are not of the rank's weights, or it cannot be told whose elements are where.
    """
    rank = model.files
    root = rank.vectors
    states = root if type(root) is list else [root]
    if len(states) != len(of_experts):
        raise _unsound(rank.vector_path, f"the state of {len(of_experts)} optimizers", f"of {len(states)}")
    unused: dict[tuple[int, bool, DType], list[RankTensor]] = {}
    is_whole = of_experts == [None]
    for tensor in model.tensors:
        key = tensor.chunk, not is_whole and tensor.is_expert, tensor.held.dtype
        unused.setdefault(key, []).append(tensor)
    for is_expert, state in zip(of_experts, states):
        if state is None:  # the file of another rank has it
            continue
        for vectors in _vectors(state, model, rank.vector_path):
            fitting = [key for key in sorted(unused, key=itemgetter(0)) if key[1:] == (bool(is_expert), vectors.dtype)]
            for key in fitting:
                placed = _VectorFilling(unused[key], vectors, reader, rank.vector_path).placed()
                if placed is not None:
                    del unused[key]
                    break
            else:
                raise _not_of_weights(vectors, rank.vector_path)
            for tensor, start in placed:
                yield tensor, dict(_state(tensor, start, vectors))


def _state(tensor: RankTensor, start: int, vectors: _Vectors) -> Iterator[tuple[str, HeldTensor]]:
    for kind, vector in vectors.by_kind.items():
        place = ByteRanges((vector.range(start, tensor.elements),))
        yield FP32 if kind == MAIN else kind, HeldTensor(vector.dtype, tensor.held.shape, place)


def _vectors(state: Value, model: RankModel, path: str) -> Iterator[_Vectors]:
    """Yield the vectors of one optimizer in order. Raises ShardError if they are none that are read."""
    if type(state) is not Dict or state.get(_COALESCED) is not True:
        raise ShardError(
            "the optimizer's vectors of a Megatron checkpoint are of a release that is not read",
            expected=f"a dictionary with {_COALESCED}, as Megatron-Core has it since 0.6",
            got="none",
            where=path,
            remedy=_REMEDY,
        )
    numbered = {key: own for key, own in state.pairs() if type(key) is int}
    others = [str(key) for key, _ in state.pairs() if type(key) is not int and key != _COALESCED]
    if sorted(numbered) != [*range(len(numbered))] or others:
        raise _unsound(path, "buffers by their numbers from 0 on", ", ".join([*map(str, numbered), *others][:8]))
    for number in sorted(numbered):
        own = numbered[number]
        pairs = [*own.pairs()] if type(own) is Dict else []
        if len(pairs) != 1 or type(pairs[0][1]) is not Dict:
            raise _unsound(path, f"one pair of types in buffer {number}", f"{len(pairs)}")
        types, kinds = pairs[0]
        yield _Vectors(f"buffer {number}", _weights_type(types, path), _by_kind(number, kinds, model, path))


def _weights_type(types: Value, path: str) -> DType:
    first = types[0] if type(types) is tuple and types else types
    is_of_torch = type(first) is Global and first.module == "torch"
    name = first.name if is_of_torch else f"{first!s:.80}, which is no type of torch"
    return weights_type(
        name, "vectors", path, "save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
    )


def _by_kind(number: int, kinds: Dict, model: RankModel, path: str) -> dict[str, FlatVector]:
    """Return the vectors of a buffer, the weights' copy first. Raises ShardError if they are not of one length."""
    vectors: dict[str, FlatVector] = {}
    for kind, value in kinds.pairs():
        if type(value) is StoredTensor and len(value.shape) == 1 and value.is_row_major:
            start = model.files.starts[value.storage.key] + value.offset * value.dtype.itemsize_bytes
            vectors[str(kind)] = FlatVector(path, start, value.dtype, value.shape[0])
        elif kind != "numel_unpadded":
            raise _unsound(path, f"vectors in buffer {number}", f"{str(kind)[:80]} that is none")
    lengths = {vector.elements for vector in vectors.values()}
    said = kinds.get("numel_unpadded")
    said = said if type(said) is int else None
    if MAIN not in vectors or vectors[MAIN].dtype.name != "float32" or len(lengths) > 1 or said not in lengths:
        got = ", ".join(f"{kind} {vector.dtype} [{vector.elements}]" for kind, vector in vectors.items())
        expected = f"vectors of {said} elements in buffer {number}, {MAIN} in float32 among them"
        raise _unsound(path, expected, got or "none")
    return {MAIN: vectors.pop(MAIN), **vectors}


# Where a vector is filled up to, and where in it (modulo 64) the bucket begins that is filled.
_Filled = tuple[int, int]


class _Step(NamedTuple):
    """One way to come to a state: the way that places most elements, since a copy that lies there is no accident.

    Attributes:
        elements: how many of the vector's elements are a parameter's.
        ways: how many ways there are that have as many; 2: several.
        before: the state before it.
        start: of the parameter; None: it is not in the vector.
        last: the parameter that was put in last, with its start.
    """

    elements: int
    ways: int
    before: _Filled
    start: int | None
    last: tuple[RankTensor, int] | None


def _better(step: _Step, other: _Step | None) -> _Step:
    """Return the one of two ways to a state that places more elements, or both as one."""
    if other is None or step.elements > other.elements:
        return step
    return other if step.elements < other.elements else step._replace(ways=min(step.ways + other.ways, 2))


class _VectorFilling:
    """Lays the parameters of a chunk into a vector: each way in which all of it is filled."""

    def __init__(self, tensors: Sequence[RankTensor], vectors: _Vectors, reader: ElementReader, path: str) -> None:
        self._tensors = tensors[::-1]
        self._vectors, self._reader, self._path = vectors, reader, path
        # Samples: of copies by their places in the vector, rounded, and of weights.
        self._rounded: dict[tuple[int, int], bytes | None] = {}
        self._weights: dict[str, bytes] = {}
        # How long the rest can be at most.
        lengths = [tensor.elements + -tensor.elements % _ALIGNED_ELEMENTS for tensor in tensors]
        self._rest = [*reversed([*accumulate(lengths)]), 0]

    def placed(self) -> list[tuple[RankTensor, int]] | None:
        """Return the parameters that are in the vector, each with its start; None if the vector is not of them.

        Raises ShardError if there are several ways.
        """
        layers: list[dict[_Filled, _Step]] = [{(0, 0): _Step(0, 1, (0, 0), None, None)}]
        for number, tensor in enumerate(self._tensors):
            layer: dict[_Filled, _Step] = {}
            for filled, step in layers[-1].items():
                for after, start in self._steps(number, tensor, filled, step):
                    own = _Step(step.elements, step.ways, filled, start, step.last)
                    if start is not None:
                        own = own._replace(elements=step.elements + tensor.elements, last=(tensor, start))
                    layer[after] = _better(own, layer.get(after))
            layers.append(layer)
        ends = {filled: step for filled, step in layers[-1].items() if filled[0] == self._vectors.elements}
        if not ends:
            return None
        filled = max(ends, key=lambda end: ends[end].elements)
        most = [step.ways for step in ends.values() if step.elements == ends[filled].elements]
        if sum(most) > 1:
            raise self._undecided()
        placed = []
        for tensor, layer in zip(reversed(self._tensors), reversed(layers)):
            step = layer[filled]
            if step.start is not None:
                placed.append((tensor, step.start))
            filled = step.before
        return placed

    def _steps(
        self, number: int, tensor: RankTensor, filled: _Filled, step: _Step
    ) -> Iterator[tuple[_Filled, int | None]]:
        """Yield the states behind a parameter, each with its start: None if it is not in the vector."""
        end, begin = filled
        starts = {end + (begin - end) % _ALIGNED_ELEMENTS: begin, end: end % _ALIGNED_ELEMENTS}
        for start, bucket in starts.items():
            ends_bucket = start == end or tensor.key == EMBEDDING
            if _lies_as_in_memory(tensor, start, step.last, ends_bucket=ends_bucket) and self._is(tensor, start):
                yield (start + tensor.elements, bucket), start
        if end + _ALIGNED_ELEMENTS + self._rest[number + 1] >= self._vectors.elements:
            yield filled, None

    def _is(self, tensor: RankTensor, start: int) -> bool:
        """Tell whether a parameter's copy is at a place, as far as samples tell."""
        own = _run(tensor)
        if own is None or start + tensor.elements > self._vectors.elements or not tensor.elements:
            return False
        place = start, tensor.elements
        if place not in self._rounded:
            copy = ByteRanges((self._vectors.by_kind[MAIN].range(*place),))
            self._rounded[place] = rounded(self._reader.sample(copy, tensor.elements, 4), self._vectors.dtype)
        if tensor.key not in self._weights:
            itemsize_bytes = tensor.held.dtype.itemsize_bytes
            self._weights[tensor.key] = self._reader.sample(ByteRanges((own,)), tensor.elements, itemsize_bytes)
        return self._rounded[place] == self._weights[tensor.key]

    def _undecided(self) -> ShardError:
        return ShardError(
            "whose optimizer state lies where in the vectors of a Megatron checkpoint cannot be told",
            expected="weights by which parameters can be told apart, since no file says which are trained, and where",
            got=f"several ways in which {self._vectors.name} can have parameters",
            where=self._path,
            remedy="save it with --ckpt-format torch_dist; or train it for some more steps, since weights that are"
            " still as they began are alike",
        )


def _lies_as_in_memory(
    tensor: RankTensor, start: int, last: tuple[RankTensor, int] | None, *, ends_bucket: bool
) -> bool:
    """Tell whether a parameter is as far behind the last one as their weights say; also if they do not.

    Args:
        ends_bucket: whether a bucket may end between them, which is filled up in memory alone. One does before an
            embedding that stages share.
    """
    own = _run(tensor)
    before = _run(last[0]) if last is not None else None
    if own is None or before is None or last is None or tensor.storage != last[0].storage:
        return True
    distance = (own.offset_bytes - before.offset_bytes) // tensor.held.dtype.itemsize_bytes
    return distance == start - last[1] or (ends_bucket and distance > start - last[1])


def _run(tensor: RankTensor) -> ByteRange | None:
    """Return where a tensor's elements are in a row; None if they are not."""
    place = tensor.held.place
    return place.ranges[0] if isinstance(place, ByteRanges) and len(place.ranges) == 1 else None


def _not_of_weights(vectors: _Vectors, path: str) -> ShardError:
    return ShardError(
        "the optimizer's vectors of a Megatron checkpoint are not of its weights",
        expected=f"in {vectors.name} float32 copies whose rounding are the {vectors.dtype.name} weights of the rank, in"
        " the reverse of the order in which its model has them",
        got=f"{vectors.elements} elements that are not",
        where=path,
        remedy=_REMEDY,
    )


def _unsound(path: str, expected: str, got: str) -> ShardError:
    return ShardError(
        "a file of a Megatron checkpoint has no vectors of its optimizer as Megatron writes them",
        expected=expected,
        got=got,
        where=path,
        remedy="copy or restore all files of one save",
    )
