"""Random equations with the tensors of both sides, put together by numpy alone.

Each block is an array over named axes whose elements are all different. A side is drawn as a way to arrange blocks; its
text is what the language says, and its tensors are what numpy makes of the arrays.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.result import MapResult

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Any


class Arrangement(NamedTuple):
    """How the axes of a block lie in a tensor.

    dims: for each dimension its axes, the major one first. in_name: the axes that are captures of the name. pads: for
    dimensions that are padded, up to a multiple of what.
    """

    dims: tuple[tuple[str, ...], ...]
    in_name: tuple[str, ...]
    pads: dict[int, int]


class Side(NamedTuple):
    """One side of an equation: its text, and its tensors by name."""

    text: str
    tensors: dict[str, Array]


class Case(NamedTuple):
    """An equation and the tensors of both sides. axes: the lengths of all that is no capture of a name on the left."""

    equation: str
    axes: dict[str, int]
    left: dict[str, Array]
    right: dict[str, Array]
    is_padded: bool


def _ways(draw: Draw, axes: list[str], names: list[str], *, pads: bool) -> Arrangement:
    """Draw how axes lie in a tensor. names: the axes that may go into its name."""
    in_name = tuple(axis for axis in names if draw(st.booleans()))
    others = draw(st.permutations([axis for axis in axes if axis not in in_name]))
    dims: list[tuple[str, ...]] = []
    for axis in others:
        if dims and draw(st.integers(0, 2)) == 0:
            dims[-1] = (*dims[-1], axis)
        else:
            dims.append((axis,))
    padded = {}
    if pads and dims and draw(st.booleans()):
        padded = {draw(st.integers(0, len(dims) - 1)): draw(st.integers(2, 5))}
    return Arrangement(tuple(dims), in_name, padded)


def _text(name: str, way: Arrangement) -> str:
    dims = []
    for number, dim in enumerate(way.dims):
        inner = " ".join(dim)
        if number in way.pads:
            dims.append(f"({inner} | {way.pads[number]})")
        else:
            dims.append(inner if len(dim) == 1 else f"({inner})")
    captures = "".join(f".{{{axis}}}" for axis in way.in_name)
    return f"{name}.{{l}}{captures} [{' '.join(dims)}]"


def _tensors(name: str, layer: int, block: Array, axes: list[str], way: Arrangement) -> dict[str, Array]:
    """Arrange one block as tensors of its own."""
    order = [*way.in_name, *(axis for dim in way.dims for axis in dim)]
    array = block.transpose([axes.index(axis) for axis in order])
    lengths = dict(zip(axes, block.shape))
    tensors = {}
    for indices in product(*(range(lengths[axis]) for axis in way.in_name)):
        tensor = array[indices].reshape([int(np.prod([lengths[axis] for axis in dim])) for dim in way.dims])
        for dim, multiple in way.pads.items():
            widths = [(0, 0)] * tensor.ndim
            widths[dim] = (0, -tensor.shape[dim] % multiple)
            tensor = np.pad(tensor, widths)
        tensors[".".join([f"{name}.{layer}", *map(str, indices)])] = np.array(tensor)
    return tensors


def _joined(
    draw: Draw, name: str, blocks: list[list[Array]], axes: list[list[str]], common: list[str], lengths: dict[str, int]
) -> Side:
    """Arrange blocks behind each other in one tensor: they differ in what is not `common`.

    The dimension of the concatenation is `(major (own + own ...) minor)`; the other common axes are dimensions.
    """
    order = draw(st.permutations(common))
    majors = draw(st.integers(0, len(order)))
    minors = draw(st.integers(majors, len(order)))
    major, minor, rest = list(order[:majors]), list(order[majors:minors]), list(order[minors:])
    own = [draw(st.permutations([axis for axis in block_axes if axis not in common])) for block_axes in axes]
    summands = " + ".join(" ".join(names) if names else "1" for names in own)
    joined = f"({' '.join(major)} ({summands}) {' '.join(minor)})".replace("( (", "((").replace(" )", ")")
    place = draw(st.integers(0, len(rest)))
    dims = [*rest[:place], joined, *rest[place:]]
    tensors = {}
    for layer, layer_blocks in enumerate(blocks):
        arrays = []
        for block, block_axes, names in zip(layer_blocks, axes, own):
            turned = block.transpose(
                [block_axes.index(axis) for axis in (*rest[:place], *major, *names, *minor, *rest[place:])]
            )
            shape = [lengths[axis] for axis in rest[:place]] + [lengths[axis] for axis in major]
            shape += [int(np.prod([lengths[axis] for axis in names]))] + [lengths[axis] for axis in minor]
            arrays.append(turned.reshape(shape + [lengths[axis] for axis in rest[place:]]))
        whole = np.concatenate(arrays, axis=place + len(major))
        middle = int(np.prod(whole.shape[place : place + len(major) + 1 + len(minor)]))
        tensors[f"{name}.{layer}"] = np.array(
            whole.reshape((*whole.shape[:place], middle, *whole.shape[place + len(major) + 1 + len(minor) :]))
        )
    return Side(f"{name}.{{l}} [{' '.join(dims)}]", tensors)


@st.composite
def cases(draw: Draw, *, pads: bool = True) -> Case:
    """Draw an equation over one to three blocks, in one or two layers."""
    count = draw(st.integers(1, 3))
    common = ["a", "b", "c"][: draw(st.integers(0, 3))]
    axes = [[*common, *([f"x{number}"] if draw(st.booleans()) else [])] for number in range(count)]
    lengths = {axis: draw(st.integers(1, 4)) for axis in sorted({axis for names in axes for axis in names})}
    layers = draw(st.integers(1, 2))
    label = 1
    blocks: list[list[Array]] = []
    for _ in range(layers):
        layer_blocks = []
        for names in axes:
            shape = [lengths[axis] for axis in names]
            size = int(np.prod(shape))
            layer_blocks.append(np.arange(label, label + size, dtype=np.int64).reshape(shape))
            label += size
        blocks.append(layer_blocks)
    sides = []
    is_padded = False
    joined_sides = draw(st.sampled_from([(False, False), (False, True), (True, False), (True, True)]))
    in_name: set[str] = set()
    for name, is_joined in zip(("left", "right"), joined_sides):
        if is_joined and count > 1:
            sides.append(_joined(draw, name, blocks, axes, common, lengths))
            continue
        texts, tensors = [], {}
        for number, names in enumerate(axes):
            # An axis in the names of both sides would be no axis of either; names take common axes of all blocks alike.
            way = _ways(draw, names, [axis for axis in names if axis not in in_name], pads=pads and not is_joined)
            is_padded = is_padded or bool(way.pads)
            own = f"{name}{number}"
            texts.append(_text(own, way))
            for layer, layer_blocks in enumerate(blocks):
                tensors |= _tensors(own, layer, layer_blocks[number], names, way)
            if name == "left":
                in_name |= set(way.in_name)
        sides.append(Side(", ".join(texts), tensors))
    left, right = sides
    return Case(f"{left.text} <=> {right.text}", lengths, left.tensors, right.tensors, is_padded)


class _Family(NamedTuple):
    """The tensors of one name of a side: an array over the captures of the name and its dimensions, for each layer."""

    name: str
    captures: int
    layers: list[Array]


def _families(tensors: dict[str, Array]) -> list[_Family]:
    by_name: dict[str, dict[int, dict[tuple[int, ...], Array]]] = {}
    for full, array in tensors.items():
        name, layer, *indices = full.split(".")
        by_name.setdefault(name, {}).setdefault(int(layer), {})[tuple(map(int, indices))] = array
    families = []
    for name, layers in by_name.items():
        arrays = []
        for _, members in sorted(layers.items()):
            last = max(members)
            stacked = np.stack([members[index] for index in sorted(members)])
            arrays.append(stacked.reshape(tuple(index + 1 for index in last) + stacked.shape[1:]))
        families.append(_Family(name, len(last), arrays))
    return families


@st.composite
def following(draw: Draw, tensors: dict[str, Array], name: str) -> Case:
    """Draw an equation that takes all tensors of a side through a further one, in other arrangements.

    name: what the tensors that it makes begin with. Dimensions are cut where the first equation has not cut them.
    """
    families = _families(tensors)
    layers = len(families[0].layers)
    axes, lengths, texts, blocks = [], {}, [], [[] for _ in range(layers)]
    for number, family in enumerate(families):
        own, dims = [], []
        for place, length in enumerate(family.layers[0].shape):
            cut = draw(st.sampled_from([size for size in range(1, length + 1) if length % size == 0]))
            parts = {f"{name}{number}v{place}": cut, f"{name}{number}w{place}": length // cut}
            if place < family.captures:
                parts = {f"{name}{number}v{place}": length}
            lengths |= parts
            own += parts
            dims.append(" ".join(parts) if len(parts) == 1 else f"({' '.join(parts)})")
        captures = "".join(f".{{{axis}}}" for axis in own[: family.captures])
        texts.append(f"{family.name}.{{l}}{captures} [{' '.join(dims[family.captures :])}]")
        axes.append(own)
        for layer, array in enumerate(family.layers):
            blocks[layer].append(array.reshape([lengths[axis] for axis in own]))
    if len(families) > 1 and draw(st.booleans()):
        right = _joined(draw, name, blocks, axes, [], lengths)
    else:
        ways = [_ways(draw, own, [], pads=draw(st.booleans())) for own in axes]
        made: dict[str, Array] = {}
        for number, way in enumerate(ways):
            for layer in range(layers):
                made |= _tensors(f"{name}{number}", layer, blocks[layer][number], axes[number], way)
        right = Side(", ".join(_text(f"{name}{number}", way) for number, way in enumerate(ways)), made)
    is_padded = "|" in right.text
    return Case(f"{', '.join(texts)} <=> {right.text}", lengths, tensors, right.tensors, is_padded)


def kinds(tensors: dict[str, Array]) -> dict[str, TensorType]:
    return {name: TensorType(BY_NAME[str(array.dtype)], array.shape) for name, array in tensors.items()}


def made_of(mapped: MapResult, tensors: dict[str, Array]) -> dict[str, Array]:
    """Make every tensor element by element, and see that each element is made once."""
    made = {}
    for tensor in mapped.made:
        array = np.full(tensor.assembly.shape, -1, dtype=np.int64)
        for box in tensor.assembly.zeros:
            place = tuple(map(slice, box.start, box.stop))
            assert (array[place] == -1).all()
            array[place] = 0
        for pair in tensor.assembly.pairs:
            part = tensors[tensor.sources[pair.source]][tuple(map(slice, pair.region.start, pair.region.stop))]
            if pair.order is not None:
                part = part.transpose(pair.order)
            place = tuple(map(slice, pair.to.start, pair.to.stop))
            assert (array[place] == -1).all()
            array[place] = part.reshape(pair.to.shape)
        assert (array != -1).all()
        made[tensor.name] = array
    return made


def assert_same(made: dict[str, Array], expected: dict[str, Array]) -> None:
    assert made.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(made[name], array), name
