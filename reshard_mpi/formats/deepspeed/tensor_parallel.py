"""Join the slices of parameters that tensor-parallel ranks of DeepSpeed hold (`joined`).

A parameter becomes pieces of the whole, each with its box; what all ranks have is listed with its copies. How they lie
is what `slice_rules.py` has read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import le
from typing import NamedTuple

from reshard_mpi.errors import LayoutError, ShardError
from reshard_mpi.formats.deepspeed.parameters import TIED, TrainedParameter
from reshard_mpi.formats.deepspeed.slice_rules import (
    AVERAGED,
    HALVES,
    INFO,
    REPLICATED,
    ROW,
    UNSUPPORTED,
    VOCABULARY,
    SliceRules,
    SubParameters,
    numbers_of,
)
from reshard_mpi.formats.deepspeed.training_tree import DeepSpeedTraining
from reshard_mpi.formats.locations import Location, Reduced
from reshard_mpi.formats.nest.nodes import MODEL, Dict, Value, entry_of
from reshard_mpi.formats.torch.file_content import HeldTensor, TensorPieces
from reshard_mpi.formats.torch.pickler import row_major_strides
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, fitted_to_part
from reshard_mpi.sharding.strategy import Strategy

JOINED_BY_STRATEGY = "slices of tensor-parallel ranks are joined as the source strategy says"
JOINED = f"slices of tensor-parallel ranks are joined as {INFO} says, which is not carried over"

_Shape = tuple[int, ...]


class _SlicePart(NamedTuple):
    """A part of a parameter: the rank that has it, the rows of its slice that are it, and its box in the whole."""

    rank: int
    first_row: int
    box: Box


class _SliceLayout(NamedTuple):
    """The whole shape of a parameter, and its parts. is_mean: whether all ranks have all, and it is their mean."""

    shape: _Shape
    parts: Sequence[_SlicePart]
    is_mean: bool = False


def _layout_of(rules: SliceRules, name: str, shapes: Sequence[_Shape]) -> _SliceLayout:
    """Return how the slices of a parameter join. shapes: of each rank's. Raises ShardError if they do not."""
    if rules.strategy is not None:
        return _by_strategy(rules, rules.strategy, name, shapes)
    for pattern, why in rules.unsupported:
        if pattern.matches(name):
            raise _not_joined(rules, name, "a parameter that can be converted", f"{UNSUPPORTED}: {why}")
    maps = [own for pattern, own in rules.maps if pattern.matches(name)]
    sub_parameters = next((rule for rule in rules.sub_parameters if rule.pattern.matches(name)), None)
    if len(maps) > 1:
        raise _not_joined(rules, name, "one pattern of affine_map for it", f"{len(maps)}")
    if maps:
        layout = _mapped(rules, name, maps[0], shapes)
    elif rules.has(REPLICATED, name):
        layout = _copies(rules, name, shapes)
    elif rules.has(AVERAGED, name):
        layout = _copies(rules, name, shapes)._replace(is_mean=True)
    elif rules.has(HALVES, name):
        odd = next((shape for shape in shapes if not shape or shape[0] % 2), None)
        if odd is not None:
            raise _not_joined(rules, name, f"two halves along dimension 0 ({HALVES})", f"shape {list(odd)}")
        layout = _in_bands(rules, name, shapes, 0, [[shape[0] // 2 for shape in shapes]] * 2)
    elif sub_parameters is not None:
        layout = _of_sub_parameters(rules, name, sub_parameters, shapes)
    else:
        dim = 1 if rules.has(ROW, name) else 0
        if any(len(shape) <= dim for shape in shapes):
            raise _not_joined(rules, name, f"slices that join along dimension {dim}", _shown(shapes))
        layout = _in_bands(rules, name, shapes, dim, [[shape[dim] for shape in shapes]])
    return _without_padding(rules, name, layout) if rules.has(VOCABULARY, name) else layout


def _by_strategy(rules: SliceRules, strategy: Strategy, name: str, shapes: Sequence[_Shape]) -> _SliceLayout:
    """Return how slices join that a strategy places; all ranks have whole the tensors that it does not list."""
    placements = strategy.find(MODEL + name) or strategy.find(name)
    if not placements:
        return _copies(rules, name, shapes)
    placement = fitted_to_part(placements[0], shapes[0])
    if not placement.split:
        return _copies(rules, name, shapes)
    pieces = [placement.piece(rank).slices for rank in range(rules.ranks)]
    sizes: list[dict[int, int]] = [{} for _ in shapes[0]]
    for shape, slices in zip(shapes, pieces):
        for dim, (size, number) in enumerate(zip(shape, slices)):
            sizes[dim][number] = size
    try:
        layout = Layout(placement, tuple(sum(own.values()) for own in sizes))
        boxes = [layout.box(rank) for rank in range(rules.ranks)]
    except LayoutError as error:
        raise _not_joined(rules, name, error.expected, error.got) from None
    odd = next((rank for rank in range(rules.ranks) if boxes[rank].shape != shapes[rank]), None)
    if odd is not None:
        expected = f"a slice of shape {list(boxes[odd].shape)} on rank {odd}, as it is placed"
        raise _not_joined(rules, name, expected, str(list(shapes[odd])))
    return _SliceLayout(layout.shape, [_SlicePart(rank, 0, box) for rank, box in enumerate(boxes)])


def _copies(rules: SliceRules, name: str, shapes: Sequence[_Shape]) -> _SliceLayout:
    """Return how copies join that all ranks have. Raises ShardError if they are of several shapes."""
    if len(set(shapes)) > 1:
        raise _not_joined(rules, name, "the same shape on all ranks, as all have the whole of it", _shown(shapes))
    whole = Box.whole(shapes[0])
    return _SliceLayout(shapes[0], [_SlicePart(rank, 0, whole) for rank in range(rules.ranks)])


def _in_bands(
    rules: SliceRules, name: str, shapes: Sequence[_Shape], dim: int, widths: Sequence[Sequence[int]]
) -> _SliceLayout:
    """Return how slices join that have a part of each of several bands of the whole, one behind the other.

    Args:
        widths: for each band, how many indices of the dimension each rank has.
    """
    sums = [sum(own) for own in zip(*widths)]
    if sums != [shape[dim] for shape in shapes] or len({(*own[:dim], *own[dim + 1 :]) for own in shapes}) > 1:
        expected = f"slices that have {', '.join(map(str, sums))} along dimension {dim}, and are else alike"
        raise _not_joined(rules, name, expected, _shown(shapes))
    if dim and len(widths) > 1:
        got = f"{len(widths)} sub-parameters along dimension {dim}"
        raise _not_joined(rules, name, "sub-parameters along dimension 0", got)
    whole = (*shapes[0][:dim], sum(sums), *shapes[0][dim + 1 :])
    parts, start, rows = [], 0, [0] * rules.ranks
    for band in widths:
        for rank, width in enumerate(band):
            parts.append(_SlicePart(rank, rows[rank], Box.whole(whole).within(dim, start, start + width)))
            start += width
            rows[rank] += width
    return _SliceLayout(whole, parts)


def _of_sub_parameters(rules: SliceRules, name: str, rule: SubParameters, shapes: Sequence[_Shape]) -> _SliceLayout:
    dim, first = rule.dim, shapes[0]
    is_alike = len(first) == len(rule.shape) and all(
        size in (-1, own) for place, (size, own) in enumerate(zip(rule.shape, first)) if place != dim
    )
    if any(len(shape) <= dim for shape in shapes) or not (dim == 0 or is_alike):
        expected = f"slices of shape {list(rule.shape)}, cut along dimension {dim}"
        raise _not_joined(rules, name, expected, _shown(shapes))
    widths: Sequence[Sequence[int]] = rule.widths
    if not widths:
        size = sum(shape[dim] for shape in shapes)
        if size % (rule.number * rules.ranks):
            expected = f"{rule.number} sub-parameters of one size, cut evenly over {rules.ranks} ranks"
            raise _not_joined(rules, name, expected, f"{size} along dimension {dim}")
        widths = [[size // rule.number // rules.ranks] * rules.ranks] * rule.number
    return _in_bands(rules, name, shapes, dim, widths)


def _mapped(rules: SliceRules, name: str, own: Value, shapes: Sequence[_Shape]) -> _SliceLayout:
    """Return how slices join by a map. Raises ShardError unless its pieces are boxes of whole rows of slices."""
    ranks = entry_of(own, "ranks")
    entries = {key: entry for key, entry in ranks.pairs() if type(key) is int} if type(ranks) is Dict else {}
    whole = numbers_of(entry_of(own, "logical_shape"))
    parts = []
    for rank, shape in enumerate(shapes):
        entry = entries.get(rank)
        pieces, said = entry_of(entry, "pieces"), numbers_of(entry_of(entry, "shard_shape"))
        if whole is None or said != shape or type(pieces) is not list:
            expected = f"an affine_map with a logical_shape and, for rank {rank}, pieces of the shape {list(shape)}"
            got = "none of this rank" if said is None else f"a shard_shape of {list(said)}"
            raise _not_joined(rules, name, expected, got)
        parts += [_mapped_part(rules, name, piece, rank, whole, shape) for piece in pieces]
    return _SliceLayout(whole or (), parts)


def _mapped_part(rules: SliceRules, name: str, piece: Value, rank: int, whole: _Shape, shape: _Shape) -> _SlicePart:
    size = numbers_of(entry_of(piece, "shape"))
    source, target = (_strided(entry_of(piece, key)) for key in ("source", "dest"))
    if entry_of(piece, "scale") in (None, 1) and size is not None and source is not None and target is not None:
        row = math.prod(shape[1:])
        start, left = [], source[0]
        for step in row_major_strides(whole):
            start.append(left // step)
            left %= step
        stop = tuple(map(sum, zip(start, size)))
        is_box = left == 0 and len(size) == len(whole) == len(shape) and all(map(le, stop, whole))
        is_row_major = source[1] == row_major_strides(whole) and target[1] == row_major_strides(shape)
        in_rows = size[1:] == shape[1:] and target[0] % max(row, 1) == 0
        first_row = target[0] // max(row, 1)
        if is_box and is_row_major and in_rows and (not size or first_row + size[0] <= shape[0]):
            return _SlicePart(rank, first_row, Box(tuple(start), stop))
    expected = "an affine_map whose pieces are boxes of the whole, whole rows of slices, unscaled"
    raise _not_joined(rules, name, expected, f"a piece of rank {rank} that is not")


def _without_padding(rules: SliceRules, name: str, layout: _SliceLayout) -> _SliceLayout:
    """Return a layout without the rows that only fill up a vocabulary."""
    rows = rules.vocabulary
    if rows is None or len(layout.shape) < 2:
        expected = f"original_vocab_size, and a tensor of 2 dimensions ({VOCABULARY})"
        raise _not_joined(rules, name, expected, f"shape {list(layout.shape)}")
    parts = [
        part._replace(box=Box(part.box.start, (min(rows, part.box.stop[0]), *part.box.stop[1:])))
        for part in layout.parts
        if part.box.start[0] < rows
    ]
    return layout._replace(shape=(min(rows, layout.shape[0]), *layout.shape[1:]), parts=parts)


def _pieces_of(rules: SliceRules, name: str, slices: Sequence[TensorPieces], layout: _SliceLayout) -> TensorPieces:
    """Return a tensor joined of slices; each may be listed with copies of it.

    Raises ShardError if they are of several types, or not of one whose mean is that which DeepSpeed takes.
    """
    dtype = slices[0].dtype
    expected = "float32 or float64, of which DeepSpeed's mean is known" if layout.is_mean else f"{dtype}, as rank 0"
    for own in slices:
        if own.dtype != dtype or (layout.is_mean and dtype.name not in ("float32", "float64")):
            raise _not_joined(rules, name, expected, f"{own.dtype}")
    places = [[_rows(slices[part.rank], place, part) for _, place in slices[part.rank].pieces] for part in layout.parts]
    if layout.is_mean:
        means = (Reduced(copies, is_mean=True, keeps_equal=False) for copies in zip(*places))
        return TensorPieces(dtype, layout.shape, tuple((layout.parts[0].box, mean) for mean in means))
    pieces = [(part.box, place) for part, own in zip(layout.parts, places) for place in own]
    filled = [piece for piece in pieces if piece[0].size]
    return TensorPieces(dtype, layout.shape, tuple(filled or pieces[:1]))


def _not_joined(rules: SliceRules, name: str, expected: str, got: str) -> ShardError:
    return ShardError(
        f"the slices that tensor-parallel ranks have of {name!r} are not joined",
        expected=expected,
        got=got,
        where=rules.where,
        remedy=rules.remedy,
    )


def _rows(slice_: TensorPieces, place: Location, part: _SlicePart) -> Location:
    """Return where the rows of a slice are that are a part of the whole."""
    if not slice_.shape or part.box.shape[:1] == slice_.shape[:1]:
        return place
    return HeldTensor(slice_.dtype, slice_.shape, place).rows(part.first_row, part.box.shape[0])


def joined(trainings: Sequence[DeepSpeedTraining], rules: SliceRules) -> DeepSpeedTraining:
    """Return the whole training, joined of the slices that tensor-parallel ranks have.

    Args:
        trainings: of each rank.

    Raises ShardError if ranks have different tensors, or slices that do not join.
    """
    first = trainings[0]
    trained = _by_name("parameters that are optimized", [own.trained for own in trainings], rules)
    frozen = _by_name("parameters that are not optimized", [own.frozen for own in trainings], rules)
    weights = _by_name("tensors of the model", [own.weights for own in trainings], rules)
    rules.require_few_tries([*{**trained, **frozen, **weights}])
    values = {key: value for key, value in first.model.values.items() if key != INFO}
    return first._replace(
        model=first.model._replace(values=values),
        weights={name: _weight(name, slices, first, rules) for name, slices in weights.items()},
        trained={name: _parameter(name, slices, rules) for name, slices in trained.items()},
        frozen={name: _untrained(name, slices, rules) for name, slices in frozen.items()},
    )


def _by_name(what: str, of_ranks: Sequence[Mapping[str, Value]], rules: SliceRules) -> dict[str, list[Value]]:
    """Return what each rank has by a name. Raises ShardError if ranks have different names."""
    for rank, own in enumerate(of_ranks):
        if own.keys() != of_ranks[0].keys():
            odd = min(own.keys() ^ of_ranks[0].keys())
            raise ShardError(
                f"tensor-parallel ranks of a DeepSpeed checkpoint have different {what}",
                expected=f"the same names on rank {rank} as on rank 0, with a slice of each",
                got=f"{odd!r} on one of them alone",
                where=rules.path,
                remedy="copy or restore all files of one save",
            )
    return {name: [own[name] for own in of_ranks] for name in of_ranks[0]}


def _parameter(name: str, slices: Sequence[TrainedParameter], rules: SliceRules) -> TrainedParameter:
    first = slices[0]
    layout = _layout_of(rules, name, [own.shape for own in slices])
    if any(own.state.keys() != first.state.keys() for own in slices):
        raise _not_joined(rules, name, "the same state of it on all ranks", "other state on some")
    return first._replace(
        shape=layout.shape,
        weights=_pieces_of(rules, name, [own.weights for own in slices], layout),
        state={kind: _pieces_of(rules, name, [own.state[kind] for own in slices], layout) for kind in first.state},
    )


def _untrained(name: str, slices: Sequence[TensorPieces], rules: SliceRules) -> TensorPieces:
    layout = _layout_of(rules, name, [own.shape for own in slices])
    return _pieces_of(rules, name, slices, layout._replace(is_mean=False))


def _weight(name: str, slices: Sequence[Value], first: DeepSpeedTraining, rules: SliceRules) -> Value:
    """Return a tensor of the model; of what else a module saves the first rank's value is taken.

    Buffers are copies. The mean of a parameter that is optimized is taken of the optimizer's weights alone.
    """
    if not all(type(own) is TensorPieces for own in slices):
        return slices[0]
    shapes = [own.shape for own in slices]
    own = _rule_name(first.model.shared.get(name, name), first)
    if own in first.trained or own in first.frozen:
        if all(shape == (0,) for shape in shapes):  # stage 3 has the elements elsewhere
            return slices[0]
    elif name in first.model.buffers:
        return _pieces_of(rules, name, slices, _copies(rules, name, shapes))
    layout = _layout_of(rules, own, shapes)
    if layout.is_mean and own in first.trained:
        return TensorPieces(slices[0].dtype, layout.shape, ())
    return _pieces_of(rules, name, slices, layout._replace(is_mean=False))


def _rule_name(name: str, first: DeepSpeedTraining) -> str:
    """Return the name by which rules mean a tensor: in a pipeline a module of several layers has one of its own."""
    if name in first.trained:
        return name
    rest = name.partition(".")[2]
    tied = (own for own in first.trained if own.startswith(TIED) and own.split(".", 2)[2:] == [rest])
    return next(tied, name)


def _strided(value: Value) -> tuple[int, tuple[int, ...]] | None:
    """Return an offset and strides, in elements; None for anything else."""
    if type(value) not in (list, tuple) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        return None
    strides = numbers_of(value[1])
    return None if strides is None else (value[0], strides)


def _shown(shapes: Sequence[_Shape]) -> str:
    return ", ".join(map(str, map(list, shapes[:8])))
