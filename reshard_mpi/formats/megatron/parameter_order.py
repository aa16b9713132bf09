"""Find whose elements lie where in the flat buckets of Megatron's distributed optimizer (`placed`).

A buffer has the parameters of one model-parallel rank, in the reverse of the order in which its model was built. Each
begins at a multiple of 64 elements of its bucket; what lies between has no meaning. No file says which parameter is
where. But the float32 copy of each lies in the bucket too, and its rounding is the weight, which is in the same
checkpoint: so every place is told by samples of both, and the order of layers decides among weights that are equal bit
by bit. (megatron/core/optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py of Megatron-Core 0.19)
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cmp_to_key
from typing import NamedTuple, Self

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.torch.file_content import FlatVector
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME
from reshard_mpi.sharding.box import Box

_ALIGNED_ELEMENTS = 64
# How many elements of a parameter are compared at its beginning, in its middle and at its end; a short one is whole.
_SAMPLED_ELEMENTS = 16
# How many files stay open: a training may have more than a process may open.
_MOST_OPEN = 64
# The copy of each parameter from which its weight is rounded.
MAIN = "param"


class ModelPlace(NamedTuple):
    """Where a parameter stands in its model.

    Attributes:
        section: which part of the model, in the order in which they are built; None: that is not known.
        layer: its number; 0 outside of layers.
        part: the name within the layer.
        expert: its number, 0 for others.
    """

    section: int | None
    layer: int
    part: str
    expert: int


class TensorSlice(NamedTuple):
    """A part of a whole tensor that a rank has: the name of the tensor, the box, and where its weights are."""

    key: str
    box: Box
    weights: ByteRanges


class Parameter(NamedTuple):
    """A parameter of one model-parallel rank: slices of whole tensors, one behind the other."""

    place: ModelPlace
    dtype: DType
    slices: tuple[TensorSlice, ...]

    @property
    def elements(self) -> int:
        return sum(own.box.size for own in self.slices)

    @property
    def title(self) -> str:
        """What errors call it."""
        key = self.slices[0].key
        return f"{key!r} of layer {self.place.layer}" if self.place.part != key else repr(key)


class Bucket(NamedTuple):
    """A bucket: flat vectors of one length, by kind of state; each is cut over the data-parallel ranks.

    Attributes:
        name: what errors call it, and where: its folder.
        elements: how many it has, gaps between parameters included.
        vectors: for each kind the parts in order, each with its first element.
    """

    name: str
    where: str
    elements: int
    vectors: Mapping[str, Sequence[tuple[int, FlatVector]]]

    def ranges(self, kind: str, start: int, length: int) -> ByteRanges:
        """Return where `length` elements of a kind of state from `start` on are."""
        parts = self.vectors[kind]
        number = bisect_right(parts, start, key=lambda part: part[0]) - 1
        ranges: list[ByteRange] = []
        end = start + length
        while start < end:
            first, vector = parts[number]
            count = min(end, first + vector.elements) - start
            ranges.append(vector.range(start - first, count))
            start += count
            number += 1
        return ByteRanges(tuple(ranges))

    @property
    def borders(self) -> frozenset[int]:
        """Where parts begin or end: the places where parameters do are among them."""
        return frozenset(start for start, _ in self.vectors[MAIN]) | {self.elements}


class Buffer(NamedTuple):
    """The buckets of one rank's parameters of one type."""

    dtype: DType
    buckets: Sequence[Bucket]


class PlacedParameter(NamedTuple):
    """A parameter, the bucket that has its state, and the first element of it there."""

    parameter: Parameter
    bucket: Bucket
    start: int


class _Slot(NamedTuple):
    """A place in a bucket whose parameter is one of several that are alike; they sort as they lie."""

    buffer: int
    stage: int
    bucket_number: int
    start: int
    bucket: Bucket


# What parameters that cannot be told from each other have in common: type, number of elements, and samples of these.
_Likeness = tuple[DType, int, bytes]


class ElementReader:
    """Reads elements of files; the last files stay open until it is closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[str, SourceFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def sample(self, place: ByteRanges, elements: int, itemsize_bytes: int) -> bytes:
        """Return elements of the beginning, the middle and the end of a row of them. Raises ShardError."""
        if elements <= 3 * _SAMPLED_ELEMENTS:
            return self._read(place, 0, elements * itemsize_bytes)
        length = _SAMPLED_ELEMENTS * itemsize_bytes
        starts = (0, elements // 2, elements - _SAMPLED_ELEMENTS)
        return b"".join(self._read(place, start * itemsize_bytes, length) for start in starts)

    def _read(self, place: ByteRanges, start: int, length: int) -> bytes:
        content = b""
        for path, offset, size in place.ranges:
            if start < size and length:
                count = min(length, size - start)
                content += self._file(path).read_exactly(offset + start, count)
                length -= count
            start = max(start - size, 0)
        return content

    def _file(self, path: str) -> SourceFile:
        if path not in self._files:
            if len(self._files) == _MOST_OPEN:
                self._stack.close()
                self._files.clear()
            self._files[path] = self._stack.enter_context(structure.opened(path))
        return self._files[path]


def weights_type(name: str, of: str, where: str, remedy: str) -> DType:
    """Return the type of weights by torch's name. Raises ShardError if it is not read.

    Args:
        of: what of the optimizer is of these weights, in words.
    """
    if name not in BY_TORCH_NAME or name == "uint8":
        raise ShardError(
            f"the optimizer's {of} of a Megatron checkpoint are of weights of a type that is not read",
            expected="bfloat16, float16 or float32",
            got=f"{name}, as weights in FP8 have it" if name == "uint8" else name,
            where=where,
            remedy=remedy,
        )
    return BY_TORCH_NAME[name]


def rounded(content: bytes, dtype: DType) -> bytes | None:
    """Return elements of float32 converted to a type of weights; None if they are of no type that is known here."""
    if dtype.name == "float32":
        return content
    if dtype.name == "bfloat16":
        bits = struct.unpack(f"={len(content) // 4}I", content)
        nearest = (0x7FC0 if (b & 0x7FFFFFFF) > 0x7F800000 else (b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits)
        return struct.pack(f"={len(bits)}H", *nearest)
    if dtype.name == "float16":
        values = struct.unpack(f"={len(content) // 4}f", content)
        return b"".join(map(_half, values))
    return None


def _half(value: float) -> bytes:
    try:
        return struct.pack("=e", value)
    except OverflowError:
        return struct.pack("=e", float("inf") if value > 0 else float("-inf"))


def placed(
    stages: Sequence[Sequence[Buffer]], parameters: Sequence[Parameter], chunks: int, reader: ElementReader
) -> list[PlacedParameter]:
    """Return for each place in the buckets of some ranks the parameter whose state is there.

    Args:
        stages: the buffers of the ranks of each stage of the pipeline, which have one place in tensor parallelism.
        parameters: of all these ranks; chunks: into how many each stage's part of the model is divided.

    Raises ShardError if a place is no parameter's, or one cannot be told from another.
    """
    alike: dict[_Likeness, list[Parameter]] = {}
    for parameter in parameters:
        weights = ByteRanges(tuple(part for own in parameter.slices for part in own.weights.ranges))
        sample = reader.sample(weights, parameter.elements, parameter.dtype.itemsize_bytes)
        alike.setdefault((parameter.dtype, parameter.elements, sample), []).append(parameter)
    slots: dict[_Likeness, list[_Slot]] = {}
    for stage, buffers in enumerate(stages):
        for number, buffer in enumerate(buffers):
            for bucket_number, bucket in enumerate(buffer.buckets):
                for start, likeness in _told(buffer.dtype, bucket, alike, reader):
                    slots.setdefault(likeness, []).append(_Slot(number, stage, bucket_number, start, bucket))
    decided = {likeness: alike[likeness][0] for likeness in slots if len(alike[likeness]) == 1}
    order, buffers_order = _PartOrder(decided, slots), _BufferOrder(decided, slots, stages, chunks)
    return [own for likeness in slots for own in _assigned(alike[likeness], slots[likeness], order, buffers_order)]


def _told(
    dtype: DType, bucket: Bucket, alike: Mapping[_Likeness, Sequence[Parameter]], reader: ElementReader
) -> Iterator[tuple[int, _Likeness]]:
    """Yield the first element and the likeness of each parameter of a bucket. Raises ShardError if some are of none."""
    sizes = sorted({elements for own, elements, _ in alike if own == dtype}, reverse=True)
    borders, start = bucket.borders, 0
    while start < bucket.elements:
        for elements in sizes:
            end = start + elements
            if end not in borders or end > bucket.elements:
                continue
            main = reader.sample(bucket.ranges(MAIN, start, elements), elements, 4)
            likeness = dtype, elements, rounded(main, dtype) or b""
            if likeness in alike:
                yield start, likeness
                break
        else:
            raise _not_of_weights(dtype, bucket, start)
        start = end + -end % _ALIGNED_ELEMENTS if end < bucket.elements else end
        if start > bucket.elements:
            raise _not_of_weights(dtype, bucket, end)


def _not_of_weights(dtype: DType, bucket: Bucket, start: int) -> ShardError:
    return ShardError(
        "the optimizer's buckets of a Megatron checkpoint are not of its weights",
        expected=f"from element {start} on a float32 copy whose rounding is the {dtype.name} weight of a"
        " parameter that is in the model",
        got="elements of none",
        where=f"{bucket.name} of {bucket.where}",
        remedy="restore the files of one save; weights alone can be read with --from dcp",
    )


def _assigned(
    members: Sequence[Parameter], slots: Sequence[_Slot], order: _PartOrder, buffers_order: _BufferOrder
) -> Iterator[PlacedParameter]:
    """Yield the parameters of places that are alike. Raises ShardError if it cannot be told which is which."""
    if len(members) == 1:
        if len({slot.stage for slot in slots}) < len(slots):
            first, second, *_ = slots
            raise ShardError(
                f"the optimizer's buckets have the state of {members[0].title} twice",
                got=f"from elements {first.start} and {second.start} on",
                where=f"{first.bucket.name} of {first.bucket.where}",
            )
        # Stages that share a parameter have a copy each.
        for slot in slots:
            yield PlacedParameter(members[0], slot.bucket, slot.start)
        return
    numbers = buffers_order.numbers(slots)
    if len(members) != len(slots) or numbers is None:
        raise _undecided(members[0], members[1], slots[0].bucket)
    by_place = sorted(slots, key=lambda slot: (-numbers[slot.stage, slot.buffer], *slot[2:4]))
    try:
        reverse = sorted(members, key=cmp_to_key(order.compared), reverse=True)
    except _UndecidedError as error:
        one, other = error.args
        raise _undecided(one, other, slots[0].bucket) from None
    for parameter, slot in zip(reverse, by_place, strict=True):
        yield PlacedParameter(parameter, slot.bucket, slot.start)


class _UndecidedError(Exception):
    """Two parameters whose order nothing tells."""


class _BufferOrder:
    """Knows in which order buffers of several stages and chunks have parameters of the model.

    A stage has a buffer for each type of weights in each chunk, unless the chunk has no such weights.
    """

    def __init__(
        self,
        decided: Mapping[_Likeness, Parameter],
        slots: Mapping[_Likeness, Sequence[_Slot]],
        stages: Sequence[Sequence[Buffer]],
        chunks: int,
    ) -> None:
        self._stages, self._chunks = stages, chunks
        # Of the parameters in a buffer that are decided, the first one's place in the model.
        self._first: dict[tuple[int, int], tuple[int, int]] = {}
        for likeness, parameter in decided.items():
            section, layer, *_ = parameter.place
            if section is not None and len(slots[likeness]) == 1:
                buffer = slots[likeness][0].stage, slots[likeness][0].buffer
                self._first[buffer] = min(self._first.get(buffer, (section, layer)), (section, layer))

    def numbers(self, slots: Sequence[_Slot]) -> Mapping[tuple[int, int], int] | None:
        """Return for the buffers of places, as stage and number, which of them is how far back; None: nothing tells."""
        buffers = {(slot.stage, slot.buffer) for slot in slots}
        places = {buffer: self._first[buffer] for buffer in buffers if buffer in self._first}
        if len(places) < len(buffers):
            dtype = self._stages[slots[0].stage][slots[0].buffer].dtype
            for stage in {stage for stage, _ in buffers}:
                own = [number for number, buffer in enumerate(self._stages[stage]) if buffer.dtype == dtype]
                if len(own) != self._chunks:
                    return None
                places.update(((stage, number), (chunk, stage)) for chunk, number in enumerate(own))
        return {buffer: number for number, buffer in enumerate(sorted(buffers, key=places.__getitem__))}


class _PartOrder:
    """Knows which of two parameters was built first, as far as layers and decided places tell."""

    def __init__(self, decided: Mapping[_Likeness, Parameter], slots: Mapping[_Likeness, Sequence[_Slot]]) -> None:
        of_layer: dict[tuple[int | None, int, int], list[tuple[tuple[int, ...], str]]] = {}
        for likeness, parameter in decided.items():
            section, layer, part, expert = parameter.place
            place = slots[likeness][0]
            of_layer.setdefault((section, layer, expert), []).append(((-place.bucket_number, -place.start), part))
        self._before: set[tuple[str, str]] = set()
        for places in of_layer.values():
            parts = [part for _, part in sorted(places)]
            self._before.update((one, other) for number, one in enumerate(parts) for other in parts[number + 1 :])

    def compared(self, one: Parameter, other: Parameter) -> int:
        """Return a negative number if `one` was built before `other`. Raises _UndecidedError if nothing tells."""
        ours, theirs = one.place, other.place
        if ours.section is None or theirs.section is None:
            raise _UndecidedError(one, other)
        if ours[:2] != theirs[:2]:
            return -1 if (ours.section, ours.layer) < (theirs.section, theirs.layer) else 1
        if ours.part == theirs.part:
            return ours.expert - theirs.expert
        before, behind = ((pair in self._before) for pair in ((ours.part, theirs.part), (theirs.part, ours.part)))
        if before == behind or ours.expert != theirs.expert:
            raise _UndecidedError(one, other)
        return -1 if before else 1


def _undecided(one: Parameter, other: Parameter, bucket: Bucket) -> ShardError:
    return ShardError(
        "whose optimizer state lies where in the buckets of a Megatron checkpoint cannot be told",
        expected="weights by which parameters can be told apart, since no file says their order",
        got=f"{one.title} and {other.title} have the same weights",
        where=f"{bucket.name} of {bucket.where}",
        remedy="save it in the form that has the state by names (--dist-ckpt-optim-fully-reshardable); or train it for"
        " some more steps, since weights that are still as they began are alike",
    )
